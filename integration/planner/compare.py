"""Two ways to run a model's layers, held against each other: which module errs first, and by how much.

A model run in sequence amplifies early differences, so modules are compared one by one on the same inputs: one step of
the model is run on one side, every call of a layerplan module is kept with its inputs and incoming gradients, and then
each call is run by itself on both sides, and on the reference in the model's dtype and in a wider one. The rule is that
of ``oracle.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from ..graph.ir import Graph, GraphBuilder
from ..settings import POLICIES
from .applied import applied
from .oracle import Errors, Wrong, errors, limit
from .plan_file import Pins, load
from .policy import Policy
from .records import Records
from .report import planned_modules
from .runner import Runner, WeightGrads
from .text import aligned, folded

Step = Callable[[torch.nn.Module], Any]
"""Runs forward and backward of a model on one batch and returns the loss, a number or a tensor of one element."""


# ---- what is kept of a step ------------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True, eq=False)
class Call:
    """One call of a module's runner. ``tensors``: its inputs; ``grads``: what arrived for each output, None where
    nothing did; ``arrived``: its place in the backward's order, None where the backward has not come by."""

    module: str
    runner: Runner
    index: int  # of this module's calls
    tensors: tuple[torch.Tensor, ...]
    needs: tuple[bool, ...]
    recorded: bool  # whether grad mode was on
    sink: WeightGrads | None
    grads: list[torch.Tensor | None]
    arrived: int | None = None


def _kept(t: torch.Tensor) -> torch.Tensor:
    """A copy that later writes do not reach, with the strides of ``t``; a parameter as it is, since a step does not
    change it."""
    if isinstance(t, torch.nn.Parameter):
        return t.detach()
    # a broadcast dim is one row in memory
    small = t.detach()[tuple(slice(0, 1) if s == 0 else slice(None) for s in t.stride())]
    copy = torch.empty_strided(small.size(), small.stride(), dtype=t.dtype, device=t.device).copy_(small)
    return copy.expand(t.shape)


class Log:
    """The calls of one step, in the order of the forward."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._of_module: dict[str, int] = {}
        self._arrived = 0

    def note(
        self, module: str, runner: Runner, tensors: tuple[torch.Tensor, ...], sink: WeightGrads | None, out: Any
    ) -> None:
        """Keep a call with its result, a tensor or a tuple of them; gradients are added when they come."""
        outputs = out if isinstance(out, tuple) else (out,)
        index = self._of_module[module] = self._of_module.get(module, -1) + 1
        call = Call(
            module,
            runner,
            index,
            tuple(map(_kept, tensors)),
            tuple(t.requires_grad for t in tensors),
            torch.is_grad_enabled(),
            sink,
            [None] * len(outputs),
        )
        self.calls.append(call)
        for i, t in enumerate(outputs):
            if t.requires_grad:
                t.register_hook(functools.partial(self._gradient, call, i))

    def _gradient(self, call: Call, output: int, grad: torch.Tensor) -> None:
        if call.arrived is None:
            call.arrived, self._arrived = self._arrived, self._arrived + 1
        call.grads[output] = _kept(grad)


class _Recording(Runner):
    """A runner that notes its calls in a log."""

    def __init__(self, log: Log, module: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._log, self._module = log, module

    @torch.compiler.disable
    def __call__(self, *tensors: torch.Tensor, sink: WeightGrads | None = None):
        out = super().__call__(*tensors, sink=sink)
        self._log.note(self._module, self, tensors, sink, out)
        return out


# ---- a call by itself ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What one call gives: outputs, the gradient of each input (None where there is none) and the engines that ran,
    by pass."""

    outputs: tuple[torch.Tensor, ...]
    grads: tuple[torch.Tensor | None, ...]
    engines: Mapping[str, str] = dataclasses.field(default_factory=dict)


def replay(call: Call, runner: Runner, *, dtype: torch.dtype | None = None, fuse: bool = True) -> Result:
    """Run a call by itself, on its kept inputs and incoming gradients. ``dtype``: what floating-point tensors are
    cast to; ``fuse``: whether weight gradients are added to float32 buffers where the call's were."""
    leaves = []
    for t, needs in zip(call.tensors, call.needs, strict=True):
        t = t.detach()
        leaves.append((t.to(dtype) if dtype is not None and t.is_floating_point() else t).requires_grad_(needs))
    sink = None
    if call.sink is not None and fuse:
        fused = call.sink.fused_positions()
        for i in fused:
            leaf, dtype_there = leaves[i], call.sink.params[i].main_grad.dtype
            leaf.main_grad = torch.zeros(leaf.shape, dtype=dtype_there, device=leaf.device)
            leaf.grad_added_to_main_grad = False
        sink = WeightGrads({i: leaves[i] for i in call.sink.params}, fuse=call.sink.fuse, defer=call.sink.defer)
    with torch.set_grad_enabled(call.recorded):
        out = runner(*leaves, sink=sink)
    outputs = out if isinstance(out, tuple) else (out,)
    arrived = [(o, g.to(o.dtype)) for o, g in zip(outputs, call.grads, strict=True) if g is not None]
    if arrived:
        torch.autograd.backward(*map(list, zip(*arrived, strict=True)))
        while sink is not None and sink.run_deferred():
            pass
    grads = tuple(leaf.main_grad if hasattr(leaf, "main_grad") else leaf.grad for leaf in leaves)
    ran: dict[str, dict[str, None]] = {}
    for direction, _, region in runner.regions():
        ran.setdefault(direction, {})[region.engine] = None
    return Result(tuple(o.detach() for o in outputs), grads, {d: ", ".join(ids) for d, ids in ran.items()})


class Side(Protocol):
    """One of the two ways to run a model. ``label`` is what messages call it."""

    label: str

    def step(self, model: torch.nn.Module, step: Step, log: Log | None) -> tuple[float, float]:
        """Run one step this way, keep its calls in ``log``; returns the loss and the norm of all gradients."""

    def replay(self, call: Call) -> Result | None:
        """One call this way; None where this side has nothing that computes it."""


@dataclasses.dataclass(frozen=True)
class Planned:
    """The model's own layers under a policy and a plan file; measured times are those that each module has already."""

    label: str
    policy: Policy
    pins: Pins | None = None
    _runners: dict[int, Runner] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    def step(self, model: torch.nn.Module, step: Step, log: Log | None) -> tuple[float, float]:
        """As Side says. Raises ValueError for a pattern that holds for no module, PlanError for a layer that cannot
        be planned."""
        self.policy.hold_against(name for name, _ in planned_modules(model))
        for name, module in _planned(model):
            make = Runner if log is None else functools.partial(_Recording, log, name)
            module.set_policy(
                self.policy.for_module(name),
                name,
                pins=self.pins,
                records=module.planning().get("_records"),
                make_runner=make,
            )
        return run_step(model, step)

    def replay(self, call: Call) -> Result:
        runner = self._runners.get(id(call.runner))
        if runner is None:
            policy = self.policy.for_module(call.module)
            # a module's own config may ask for determinism under any policy
            policy = dataclasses.replace(policy, deterministic=policy.deterministic or call.runner.policy.deterministic)
            runner = self._runners[id(call.runner)] = _like(call.runner, policy, self.pins, call.runner.records)
        return replay(call, runner)


def _planned(model: torch.nn.Module) -> list[tuple[str, Any]]:
    """All modules that can run plans; those that a parent's plan reads run some of their own where the parent leaves
    it to them."""
    return [(name, module) for name, module in model.named_modules() if hasattr(module, "restore_planning")]


def _like(runner: Runner, policy: Policy, pins: Pins | None = None, records: Records | None = None) -> Runner:
    return Runner(
        runner.build,
        runner.names,
        policy=policy,
        name=runner.name,
        training=runner.training,
        recompute=runner.recompute,
        groups=runner.groups,
        pins=pins,
        records=records,
    )


def side_of(
    value: Side | Policy | Pins | str | Path | Mapping[str, str] | None, *, deterministic: bool = False
) -> Side:
    """A side from a policy, a plan file, or a text of these parted by commas: a mode, PATTERN=MODE rows, a FILE.json.

    ``"auto"``, ``"strict,*.mlp=reference"``, ``"plan.json"``. Raises ValueError naming the part that is none of these,
    PlanFileError for a file that cannot be read.
    """
    if isinstance(value, Pins):
        return Planned(value.source, Policy(deterministic=deterministic), value)
    if isinstance(value, Path):
        value = str(value)
    if not isinstance(value, str):
        return value if hasattr(value, "replay") else Planned(_label(Policy.of(value)), Policy.of(value))
    mode, rows, pins = None, [], None
    for part in value.split(","):
        pattern, equals, its_mode = part.strip().rpartition("=")
        if its_mode in POLICIES and not equals and mode is None:
            mode = its_mode
        elif its_mode in POLICIES and pattern:
            rows.append((pattern, its_mode))
        elif part.strip().endswith(".json") and pins is None:
            pins = load(part.strip())
        else:
            wrong = f"{part.strip()!r}: " if part.strip() != value.strip() else ""
            raise ValueError(
                f"policy = {value!r}: {wrong}must be one of {', '.join(POLICIES)}, PATTERN=POLICY or a plan "
                "file FILE.json, each but PATTERN=POLICY once; for example auto,*.mlp=reference"
            )
    policy = Policy(mode or "auto", deterministic, tuple(rows))
    if pins is not None and {policy.mode, *(m for _, m in rows)} == {"reference"}:
        raise ValueError(
            f"policy {value!r}: reference leaves no choice that {pins.source} could pin; name one of the two"
        )
    return Planned(value, policy, pins)


def _label(policy: Policy) -> str:
    return ",".join([policy.engine or policy.mode, *(f"{p}={m}" for p, m in policy.per_module)])


# ---- a step ----------------------------------------------------------------------------------------------------------


def clear_gradients(model: torch.nn.Module) -> None:
    """Forget the gradients of ``model``, those in ``main_grad`` buffers among them."""
    for p in model.parameters():
        p.grad = None
        if getattr(p, "main_grad", None) is not None:
            p.main_grad.zero_()
        if hasattr(p, "grad_added_to_main_grad"):
            p.grad_added_to_main_grad = False


def gradient_of(p: torch.nn.Parameter) -> torch.Tensor | None:
    """A parameter's gradient: where it has a ``main_grad``, its ``grad`` may be a dummy."""
    main = getattr(p, "main_grad", None)
    return p.grad if main is None else main


def run_step(model: torch.nn.Module, step: Step) -> tuple[float, float]:
    """Loss and norm of all gradients (this rank's) of one step from cleared gradients."""
    clear_gradients(model)
    loss = float(step(model))
    squares = [
        float(torch.linalg.vector_norm(g, dtype=torch.float64)) ** 2
        for p in model.parameters()
        if (g := gradient_of(p)) is not None
    ]
    return loss, sum(squares) ** 0.5


def _generators() -> list[torch.Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])]


def _set_generators(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if states[1:]:
        torch.cuda.set_rng_state_all(states[1:])


# ---- what comes out --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """One side's result for one tensor: its errors, or in ``fault`` why there are none; ``engines`` that ran in that
    pass. ``absent``: this side has nothing that computes the module, which is no difference."""

    errors: Errors | None = None
    fault: str = ""
    engines: str = ""
    ok: bool = False
    absent: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One tensor of one call: an output (pass forward) or the gradient of an input (pass backward), on both sides.
    ``limit``: the largest errors allowed, None where the reference itself has none to compare with."""

    module: str
    call: int
    direction: str
    tensor: str
    dtype: str
    limit: Errors | None
    a: Measured
    b: Measured

    @property
    def ok(self) -> bool:
        return self.a.ok and self.b.ok

    def verdict(self, a: str, b: str) -> str:
        """``ok``, or the labels of the sides that differ from the reference beyond the limit."""
        wrong = [label for label, side in ((a, self.a), (b, self.b)) if not side.ok]
        return f"{' and '.join(wrong)} differ{'s' if len(wrong) == 1 else ''}" if wrong else "ok"

    def nearness(self) -> float:
        """How near the worse side comes to the limit: 1 is at it, infinity where there are no errors to speak of."""
        if not self.ok and (self.limit is None or any(s.fault for s in (self.a, self.b))):
            return float("inf")
        found = [s.errors for s in (self.a, self.b) if s.errors]
        pairs = [(getattr(e, n), getattr(self.limit, n)) for e in found for n in ("largest", "rms")]
        return max((e / m if m else (float("inf") if e else 0.0) for e, m in pairs), default=0.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """``rows`` in the order of execution: forward, then backward. ``loss`` and ``grad_norm`` of one step on (a, b)."""

    a: str
    b: str
    rows: tuple[Row, ...]
    loss: tuple[float, float]
    grad_norm: tuple[float, float]

    @property
    def first(self) -> Row | None:
        """The first tensor that differs beyond the rule on either side."""
        return next((r for r in self.rows if not r.ok), None)

    @property
    def ok(self) -> bool:
        return self.first is None

    def to_json(self) -> dict[str, Any]:
        """Nested dicts and lists of plain values."""
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        found["rows"] = [_row_json(r) for r in self.rows]
        return found | {"ok": self.ok, "first": None if self.first is None else _row_json(self.first)}

    def __str__(self) -> str:
        """One line for each module and pass, of its tensor that is nearest to the limit; then the verdict and the
        whole step."""
        groups: dict[tuple[str, str], list[Row]] = {}
        for r in self.rows:
            groups.setdefault((r.direction, r.module), []).append(r)
        errors_of = ("max error a", "b", "limit", "rms error a", "b", "limit")
        lines = [("pass", "module", "nearest to the limit", *errors_of, "verdict")]
        for (direction, module), rows in groups.items():
            worst = max(rows, key=Row.nearness)
            three = worst.a.errors, worst.b.errors, worst.limit
            cells = [_number(e and getattr(e, n)) for n in ("largest", "rms") for e in three]
            lines.append((direction, module, worst.tensor, *cells, worst.verdict(self.a, self.b)))
        title = f"a = {self.a}, b = {self.b}; errors against the reference in a wider dtype"
        return "\n".join([title, *aligned(lines), "", *self._summary()])

    def _summary(self) -> list[str]:
        calls = {(r.module, r.call) for r in self.rows}
        if self.first is None:
            lines = [
                f"{len(self.rows)} outputs and gradients of {len({m for m, _ in calls})} modules in {len(calls)} calls "
                "are within the rule on both sides"
            ]
        else:
            r = self.first
            lines = [f"first difference: {r.module}, {r.direction}, {r.tensor} ({r.dtype}, call {r.call})"]
            for label, side in ((self.a, r.a), (self.b, r.b)):
                lines.append(f"  {label} on {side.engines or 'nothing'}: {_said(side, r.limit)}")
        for label, side in ((self.a, "a"), (self.b, "b")):
            absent = dict.fromkeys(r.module for r in self.rows if getattr(r, side).absent)
            if absent:
                lines.append(
                    f"{label} has no counterpart of {folded(absent)}: the other side alone was compared with the "
                    "reference there"
                )
        for name, (a, b) in (("loss", self.loss), ("gradient norm", self.grad_norm)):
            lines.append(
                f"{name} of the whole step: {a:.7g} on {self.a}, {b:.7g} on {self.b}, difference {abs(a - b):.3g}"
            )
        return lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2e}"


def _said(side: Measured, most: Errors | None) -> str:
    if side.absent:
        return "has no such module"
    if side.errors is None or most is None:
        return side.fault
    return (
        f"max error {side.errors.largest:.3e} where {most.largest:.3e} is allowed, rms {side.errors.rms:.3e} where "
        f"{most.rms:.3e} is{': ok' if side.ok else ''}"
    )


def _row_json(row: Row) -> dict[str, Any]:
    return dataclasses.asdict(row) | {"ok": row.ok}


# ---- the comparison --------------------------------------------------------------------------------------------------


def compare(
    model: torch.nn.Module,
    step: Step,
    a: Any,
    b: Any,
    *,
    generators: tuple[Callable[[], Any], Callable[[Any], None]] = (_generators, _set_generators),
) -> Comparison:
    """Which layerplan module of ``model`` errs first under ``a`` or ``b`` (see ``side_of``), on one batch.

    ``step`` runs forward and backward of the model it is given and returns the loss; it is called once per side, from
    the same state of the random generators, which ``generators`` reads and sets (its default: torch's; a
    tensor-parallel tracker's must be given). Parameters, generators and the model's own policies are at the end what
    they were; gradients are cleared. Raises PlanError where a side cannot be planned, ValueError where no module of
    layerplan runs or one computes in float64, where a side's plan file pins nothing, and where ``step`` changes
    parameters.
    """
    sides = (side_of(a), side_of(b))
    own = [isinstance(s, Planned) for s in sides]
    if not any(own):
        raise ValueError(
            f"compare: a = {sides[0].label}, b = {sides[1].label}: neither runs layerplan's modules; name a policy or "
            "a plan file"
        )
    versions = {n: p._version for n, p in model.named_parameters()}
    log, start, before = Log(), generators[0](), [(m, m.planning()) for _, m in _planned(model)]
    whole = []
    try:
        for i, side in enumerate(sides):
            generators[1](start)
            whole.append(side.step(model, step, log if i == own.index(True) else None))
            if own[i] and side.pins is not None:
                _see_that_pins_hold("ab"[i], side, model)
            changed = [n for n, p in model.named_parameters() if p._version != versions[n]]
            if changed:
                raise ValueError(
                    f"compare: step changes parameters ({folded(changed)}), so that the other side would run others; "
                    "leave the optimiser out: it runs forward and backward alone"
                )
    finally:
        for module, planning in before:
            module.restore_planning(planning)
        clear_gradients(model)
        generators[1](start)
    if not log.calls:
        raise ValueError("compare: no module of layerplan ran in the step; build the model with layerplan's layers")
    rows = []
    for place, call in enumerate(log.calls):
        for row in _compare_call(call, sides):
            backward = row.direction == "backward"
            rows.append(((backward, call.arrived if backward else place), row))
    rows.sort(key=lambda r: r[0])
    (loss_a, norm_a), (loss_b, norm_b) = whole
    return Comparison(sides[0].label, sides[1].label, tuple(row for _, row in rows), (loss_a, loss_b), (norm_a, norm_b))


def _see_that_pins_hold(letter: str, side: Planned, model: torch.nn.Module) -> None:
    """ValueError where the plan file of a side pins nothing of what its modules ran: it would be the other policy again."""
    plans = [p for _, m in planned_modules(model) for r in m.plan_runners() for p in r.plans()]
    for found in [applied(arch, plans, side.pins) for arch in dict.fromkeys(p.arch.name for p in plans)]:
        if not found.pinned:
            raise ValueError(
                f"compare: {letter} = {side.label}: {found.of_pins(side.pins)}; write a plan file of this model for "
                f"{found.arch} (layerplan plan RECIPE --arch {found.arch} --save FILE)"
            )


def _compare_call(call: Call, sides: tuple[Side, Side]) -> Iterable[Row]:
    if any(t.dtype == torch.float64 for t in call.tensors):
        raise ValueError(
            f"compare: {call.module} computes in float64, and no reference is wider; compare the model in float32 or "
            "bfloat16"
        )
    reference = Policy("reference")
    alike = _like(call.runner, reference)
    alike.build = _apart(alike.build)
    peer = replay(call, alike, fuse=False)
    narrow = all(t is None or t.element_size() <= 2 for t in (*peer.outputs, *peer.grads))
    wide = torch.float32 if narrow else torch.float64
    with _full_float32():
        exact = replay(call, _like(call.runner, reference), dtype=wide, fuse=False)
    results = [side.replay(call) for side in sides]
    names = call.runner.names
    outputs = ["output"] if len(exact.outputs) == 1 else [f"output {i}" for i in range(len(exact.outputs))]
    for direction, field, tensors in (
        ("forward", "outputs", outputs),
        ("backward", "grads", [f"gradient of {n}" for n in names]),
    ):
        for i, tensor in enumerate(tensors):
            truth, theirs = getattr(exact, field)[i], getattr(peer, field)[i]
            if truth is not None and truth.is_floating_point():
                found = [None if r is None else getattr(r, field)[i] for r in results]
                yield _row(call, direction, tensor, truth, theirs, results, found)


def _apart(build: Callable[..., Graph]) -> Callable[..., Graph]:
    """``build``, where its graph is ``linear_cross_entropy`` with that as two ops: PyTorch rounds the logits between
    them, and so do the engines, where the reference of the one op does not."""

    def built(*tensors: torch.Tensor) -> Graph:
        graph = build(*tensors)
        node = graph.nodes[0]
        if len(graph.nodes) > 1 or node.op != "linear_cross_entropy":
            return graph
        b = GraphBuilder()
        made = {v: b.input(v, graph.specs[v], weight=v in graph.weights) for v in graph.inputs}
        x, weight, targets = (made[v] for port in ("x", "weight", "targets") for p, v in node.inputs if p == port)
        logits = b.op("linear", x=x, weight=weight)
        return b.build(
            [b.op("cross_entropy", logits=logits, targets=targets, ignore_index=node.attr("ignore_index"))]
        )

    return built


def _row(
    call: Call,
    direction: str,
    tensor: str,
    truth: torch.Tensor,
    peer: torch.Tensor,
    results: list[Result | None],
    found: list[torch.Tensor | None],
) -> Row:
    dtype = next((t.dtype for t in found if t is not None), peer.dtype)
    most, fault = None, ""
    try:
        most = limit(dtype, truth, peer)
    except Wrong as error:
        fault = f"reference: {error}"
    sides = []
    for result, t in zip(results, found, strict=True):
        if result is None:
            sides.append(Measured(ok=True, absent=True))
            continue
        engines, got, said = result.engines.get(direction, ""), None, fault
        if t is None:
            said = fault or "no gradient came"
        elif most is not None:
            try:
                got = errors(t, truth)
            except Wrong as error:
                said = str(error)
        sides.append(Measured(got, said, engines, got is not None and most is not None and got.within(most)))
    return Row(call.module, call.index, direction, tensor, str(dtype).removeprefix("torch."), most, *sides)


@contextlib.contextmanager
def _full_float32() -> Iterator[None]:
    """Products of float32 in float32, whatever the process allows: the reference is one of them."""
    before = torch.get_float32_matmul_precision()
    if before == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
