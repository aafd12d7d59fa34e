"""What would run, what would not, and why: for any op, shapes and arch, as data and without a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ..engines.arch import Arch
from ..graph.ir import Graph, GraphBuilder, GraphError, TensorSpec
from ..graph.ops.table import op_table
from .planner import Candidate, PlanError, PlannedRegion, plan
from .policy import Policy
from .text import aligned


@dataclasses.dataclass(frozen=True, slots=True)
class Explanation:
    """``candidates`` of the forward and ``backward`` of the op's gradient: (ops, candidates) per region. Each candidate has its
    reason; ``chosen`` is None where the policy leaves no engine, then ``error`` says so."""

    op: str
    arch: str
    chosen: str | None
    candidates: tuple[Candidate, ...]
    backward: tuple[tuple[str, tuple[Candidate, ...]], ...] = ()
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """A table of candidates, predicted times and reasons for the forward and for each region of the backward."""
        lines = []
        for title, candidates in ((f"{self.op} on {self.arch}", self.candidates), *((f"backward: {ops}", c) for ops, c in self.backward)):
            engine = next((c.engine for c in candidates if c.chosen), "no engine may run it")
            rows = [("yes" if c.chosen else "no", c.engine, "" if c.seconds is None else f"{c.seconds * 1e6:.1f}", c.reason) for c in candidates]
            lines += [f"{title}: {engine}", *(f"  {line}" for line in aligned([("runs", "engine", "predicted us", "why"), *rows]))]
        return "\n".join(lines)

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
    needs = tuple(graph.specs[v].is_float and _differentiable(op, v) for v in graph.inputs)
    has_gradient = op_table()[op].gradient is not None and op_table()[op].kind != "collective" and any(needs)
    options = {"needs_grad": needs} if has_gradient else {}
    try:
        made, error = plan(graph, arch, chosen, **options), None
    except PlanError as e:  # the regions of a plan without that policy, each asked under it
        made, error = plan(graph, arch, dataclasses.replace(chosen, mode="auto", engine=None), **options), str(e)
    (forward,) = made.forward.regions
    asked = (lambda r: r.candidates) if error is None else (lambda r: _candidates(r, arch, chosen))
    backward = tuple(("+".join(r.ops), asked(r)) for r in made.backward.regions) if made.backward else ()
    return Explanation(op, arch.name, None if error else forward.engine, asked(forward), backward, error)


def _candidates(region: PlannedRegion, arch: Arch, policy: Policy) -> tuple[Candidate, ...]:
    """What every engine answers for a region under a policy that may leave it none."""
    try:
        return tuple(c for r in plan(region.region.graph, arch, policy).forward.regions for c in r.candidates)
    except PlanError as error:
        return error.candidates


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
