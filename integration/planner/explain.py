"""What would run, what would not, and why: for any op, shapes and arch, as data and without a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ..engines.arch import Arch
from ..graph.ir import Graph, GraphBuilder, GraphError, TensorSpec
from ..graph.ops.table import op_table
from .planner import Candidate, Plan, PlanError, plan
from .policy import Policy


@dataclasses.dataclass(frozen=True, slots=True)
class Explanation:
    """``candidates`` of the forward and ``backward`` of the op's gradient; ``chosen`` is None where the policy leaves no
    engine, then ``error`` says so."""

    op: str
    arch: str
    chosen: str | None
    candidates: tuple[Candidate, ...]
    backward: tuple[tuple[str, tuple[Candidate, ...]], ...] = ()
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def reasons(self) -> dict[str, str]:
        """Engine id -> why it was not chosen, forward."""
        return {c.engine: c.reason for c in self.candidates if not c.chosen}


def explain(op: str, shapes: Mapping[str, tuple[Sequence[int], str]], arch: str | Arch, *, policy: Policy | str | None = None,
            engine: str | None = None, **attrs: Any) -> Explanation:  # fmt: skip
    """Candidates and reasons for one op.

    ``shapes`` maps input ports to (sizes, dtype), for example ``{"q": ((1, 4096, 32, 128), "bfloat16"), ...}``; ``attrs``
    are the op's attributes. Raises GraphError for shapes that break the op's rules, ValueError for an unknown op or arch.
    """
    if op not in op_table():
        import difflib

        close = difflib.get_close_matches(op, op_table(), 1)
        raise ValueError(f"op = {op!r}: no such op" + (f"; did you mean {close[0]!r}?" if close else f"; known: {sorted(op_table())}"))
    arch = arch if isinstance(arch, Arch) else Arch.parse(arch)
    chosen = Policy.of(policy)
    if engine is not None:
        chosen = dataclasses.replace(chosen, engine=engine)
    graph = _one_node(op, shapes, attrs)
    free = dataclasses.replace(chosen, mode="auto", engine=None)
    needs = tuple(graph.specs[v].is_float and _differentiable(op, v) for v in graph.inputs)
    has_gradient = op_table()[op].gradient is not None and op_table()[op].kind != "collective" and any(needs)
    options = {"needs_grad": needs} if has_gradient else {}
    try:
        made, error = plan(graph, arch, chosen, **options), None
    except PlanError as e:
        made, error = plan(graph, arch, free, **options), str(e)
    return _explained(op, arch, made, error)


def _explained(op: str, arch: Arch, made: Plan, error: str | None) -> Explanation:
    (forward,) = made.forward.regions
    backward = tuple(("+".join(r.ops), r.candidates) for r in made.backward.regions) if made.backward else ()
    return Explanation(op, arch.name, None if error else forward.engine, forward.candidates, backward, error)


def _differentiable(op: str, port: str) -> bool:
    allowed = op_table()[op].differentiable
    return allowed is None or port in allowed


def _one_node(op: str, shapes: Mapping[str, tuple[Sequence[int], str]], attrs: Mapping[str, Any]) -> Graph:
    b = GraphBuilder()
    ports = op_table()[op].input_names
    for name in shapes:
        if name not in ports:
            raise GraphError(f"{op}: no input port {name!r}; it has {list(ports)}")
    values = {}
    for p in ports:
        if p in shapes:
            size, dtype = shapes[p]
            values[p] = b.input(p, TensorSpec(tuple(int(s) for s in size), dtype))
    out = b.op(op, **values, **attrs)
    return b.build([out] if isinstance(out, str) else out)
