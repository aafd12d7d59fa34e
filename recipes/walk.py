"""Plans on a ledger of memory: what a forward and a backward hold, region by region, and branches made of several
plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..integration.graph.ir import ITEMSIZE, Dim, TensorSpec
from ..integration.graph.ops.table import op_table
from ..integration.planner.planner import GraphPlan, PlannedRegion
from .estimate import PlannedGraph

_ROUND = 512  # the caching allocator rounds each tensor up to this


class Storage:
    """Memory of one tensor and its views; ``holders`` count who keeps it."""

    __slots__ = ("holders", "kind", "nbytes")

    def __init__(self, kind: str, nbytes: int) -> None:
        self.kind, self.nbytes, self.holders = kind, nbytes, 1


class Ledger:
    """Bytes that are held now and at the peak, by kind. A storage is held once by whoever made it; None stands for
    tensors that are there all the time."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._total = self._most = 0

    def new(self, nbytes: int, kind: str = "working") -> Storage:
        made = Storage(kind, -(-nbytes // _ROUND) * _ROUND)
        self._change(kind, made.nbytes)
        return made

    def _change(self, kind: str, nbytes: int) -> None:
        self.now[kind] += nbytes
        self._total += nbytes
        if self._total > self._most:
            self._most, self.peak = self._total, self.now.copy()

    def hold(self, *storages: Storage | None) -> None:
        for s in storages:
            if s is not None:
                s.holders += 1

    def drop(self, *storages: Storage | None) -> None:
        for s in storages:
            if s is not None:
                s.holders -= 1
                if not s.holders:
                    self._change(s.kind, -s.nbytes)

    def call(self, storage: Storage | None, kind: str) -> None:
        """From now on ``storage`` counts as ``kind``."""
        if storage is not None and storage.kind != kind:
            self.now[storage.kind] -= storage.nbytes
            self.now[kind] += storage.nbytes
            storage.kind = kind

    def passing(self, nbytes: int, kind: str = "working") -> None:
        """What is allocated and freed at once."""
        self.drop(self.new(nbytes, kind))


type Values = dict[str, Storage | None]


@dataclass(slots=True)
class Saved:
    """What waits for a plan's backward."""

    graph: PlannedGraph
    values: Values


class Walk:
    """Plans on a ledger. ``kind``: what large intermediate results count as."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def forward(
        self, g: PlannedGraph, given: Values, recorded: bool, kind: str = "working"
    ) -> tuple[list[Storage | None], Saved | None]:
        """Run a forward plan. ``given``: its inputs that are not there all the time; the caller keeps holding them. The
        outputs are held for the caller; with ``recorded`` so is what the backward reads."""
        part, derived = g.plan.forward, g.plan.derived
        saved = derived.saved if recorded else ()
        outputs = part.graph.outputs[: derived.num_outputs]
        self.ledger.hold(*given.values())
        values = dict(given)
        self._regions(part, values, {*outputs, *saved}, g.sizes, kind)
        for v in saved:
            self.ledger.hold(values.get(v))
            self.ledger.call(values.get(v), "logits" if kind == "logits" else "activations")
        results = [values[v] for v in outputs]
        self.ledger.hold(*results)
        self.ledger.drop(*values.values())
        return results, Saved(g, {v: s for v in saved if (s := values.get(v)) is not None}) if recorded else None

    def backward(self, saved: Saved, grads: Sequence[Storage | None], kind: str = "working") -> Values:
        """Run a plan's backward from the gradients of its outputs that have one, which the caller keeps holding.
        Returns the gradients of its inputs but the weights, by name, held for the caller. Weight gradients, and what
        stands for those that were added elsewhere, go at its end."""
        g = saved.graph
        plan, part = g.plan, g.plan.backward
        names = [v for v in part.graph.inputs if v not in plan.derived.saved and not v.startswith("main_grad")]
        values = {v: saved.values.get(v) for v in part.graph.inputs if v in plan.derived.saved} | dict(
            zip(names, grads, strict=True)
        )
        self.ledger.hold(*grads)
        unread = [v for v in saved.values if v not in values]
        self.ledger.drop(*(saved.values[v] for v in unread))
        self._regions(part, values, set(part.graph.outputs), g.sizes, kind)
        own = plan.forward.graph
        buffers = [v for v in part.graph.inputs if v.startswith("main_grad")]
        added = [own.inputs[int(v.removeprefix("main_grad"))] for v in buffers]
        dummies = [self.ledger.new(_nbytes(own.specs[v], g.sizes)) for v in added]
        inputs = zip(own.inputs, plan.derived.grads, strict=False)
        results = {v: values[made] for v, made in inputs if v not in own.weights and made in values}
        self.ledger.hold(*results.values())
        self.ledger.drop(*dummies, *values.values())
        return results

    def _regions(self, part: GraphPlan, values: Values, keep: set[str], sizes: Mapping[str, int], kind: str) -> None:
        """Run regions in order. ``values`` comes with the inputs, each held once, and leaves with ``keep`` alone."""
        last = {v: i for i, r in enumerate(part.regions) for v in (*r.region.graph.inputs, *r.region.graph.outputs)}
        for i, r in enumerate(part.regions):
            views = _views(r)
            for v in r.region.graph.outputs:
                if v in views:
                    values[v] = values.get(views[v])
                    self.ledger.hold(values[v])
                else:
                    values[v] = self.ledger.new(_nbytes(r.region.graph.specs[v], sizes), kind)
            self.ledger.passing(r.offer.workspace_bytes, kind)
            for v in (*r.region.graph.inputs, *r.region.graph.outputs):
                if v in values and last[v] == i and v not in keep:
                    self.ledger.drop(values.pop(v))


def _views(r: PlannedRegion) -> dict[str, str]:
    """Outputs of a region that need no memory of their own -> the input that they lie in. What a region computes beside
    them is compiled, and then views are results of their own."""
    table, nodes = op_table(), r.region.nodes
    sums = [(n.output("dweight"), n.input("accumulate")) for n in nodes]
    found = {made: into for made, into in sums if made is not None and into is not None}
    if r.engine == "runner":
        (n,) = nodes
        return {n.output("y"): n.input("x")} if n.op == "group_copy" or n.attr("size") == 1 else {}
    if all(table[n.op].aliases for n in nodes):
        for n in nodes:
            source = n.inputs[0][1]
            found |= dict.fromkeys((v for _, v in n.outputs), found.get(source, source))
    return found


def _size(dim: Dim, sizes: Mapping[str, int]) -> int:
    """The size of a dim of a recipe's graph: an input's, that times or over the ranks of a collective, or one computed
    from these."""
    if dim.of:
        return dim.at(lambda d: _size(d, sizes))
    if dim.name in sizes:
        return sizes[dim.name]
    for sign in "*/":
        name, found, count = dim.name.rpartition(sign)
        if found:
            whole = _size(Dim(name), sizes)
            return whole * int(count) if sign == "*" else whole // int(count)
    raise KeyError(f"dim {dim.name}: no input of the graph has it")


def _nbytes(spec: TensorSpec, sizes: Mapping[str, int]) -> int:
    count = ITEMSIZE[spec.dtype]
    for d in spec.shape:
        count *= _size(d, sizes) if isinstance(d, Dim) else d
    return count


# ---- branches: several plans, and what runs between them -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Use:
    """A plan in a branch. ``inputs``: graph input -> value, of those that are not there all the time; ``outputs``: a
    value for each output, "" for one that nobody reads. Values that have no gradient are left out of the backward."""

    graph: PlannedGraph
    inputs: Mapping[str, str]
    outputs: tuple[str, ...]

    def forward(self, walk: Walk, values: Values, recorded: bool) -> object:
        results, saved = walk.forward(self.graph, {n: values[v] for n, v in self.inputs.items()}, recorded)
        for name, made in zip(self.outputs, results, strict=True):
            if name:
                values[name] = made
            else:
                walk.ledger.drop(made)
        return saved

    def backward(self, walk: Walk, saved: object, grads: Values) -> Values:
        derived = self.graph.plan.derived
        own = [grads.get(self.outputs[i]) for i in derived.grad_outputs]
        made = walk.backward(saved, own)
        found = {self.inputs[n]: s for n, s in made.items() if n in self.inputs}
        walk.ledger.drop(*(s for n, s in made.items() if n not in self.inputs))
        return found


@dataclass(frozen=True, slots=True)
class Alike:
    """Something of the framework's between plans that keeps its inputs or nothing: forward it makes ``output`` of
    ``nbytes`` (0: a view of its first input), backward a tensor of ``gradient`` bytes for each of ``inputs`` (0: it
    passes the gradient on). ``passing``: what is made and freed on both ways."""

    inputs: tuple[str, ...]
    output: str
    nbytes: int = 0
    gradient: int = 0
    keeps: bool = False
    passing: int = 0

    def forward(self, walk: Walk, values: Values, recorded: bool) -> object:
        ledger, first = walk.ledger, values[self.inputs[0]]
        ledger.passing(self.passing)
        if self.nbytes:
            values[self.output] = ledger.new(self.nbytes)
        else:
            values[self.output] = first
            ledger.hold(first)
        if not (recorded and self.keeps):
            return None
        ledger.hold(first)
        ledger.call(first, "activations")
        return first

    def backward(self, walk: Walk, saved: object, grads: Values) -> Values:
        ledger, grad = walk.ledger, grads.get(self.output)
        ledger.passing(self.passing)
        found: Values = {}
        for name in self.inputs:
            found[name] = ledger.new(self.gradient) if self.gradient else grad
            if not self.gradient:
                ledger.hold(grad)
        ledger.drop(saved)
        return found


@dataclass(frozen=True, slots=True)
class Again:
    """A branch under Megatron's checkpoint: its input is kept, and it runs again in the backward."""

    branch: Branch

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.branch.input,)

    @property
    def outputs(self) -> tuple[str, ...]:
        return (self.branch.output,)

    def forward(self, walk: Walk, values: Values, recorded: bool) -> object:
        x = values[self.branch.input]
        if recorded:
            walk.ledger.hold(x)
            walk.ledger.call(x, "activations")
        values[self.branch.output], _ = self.branch.forward(walk, x, False)
        return x if recorded else None

    def backward(self, walk: Walk, saved: object, grads: Values) -> Values:
        out, inner = self.branch.forward(walk, saved, True)
        dx = self.branch.backward(walk, inner, grads[self.branch.output])
        walk.ledger.drop(out, saved)
        return {self.branch.input: dx}


@dataclass(frozen=True, slots=True)
class Branch:
    """Steps in order between ``input`` and ``output``."""

    steps: tuple[Use | Alike | Again, ...]
    input: str = "h"
    output: str = "y"

    def forward(self, walk: Walk, x: Storage | None, recorded: bool) -> tuple[Storage | None, list[object]]:
        """(the output, held for the caller; what each step has saved). The caller keeps holding ``x``."""
        values: Values = {self.input: x}
        walk.ledger.hold(x)
        last = {v: i for i, s in enumerate(self.steps) for v in (*_read(s), *_made(s))}
        last[self.output] = len(self.steps)
        saved = []
        for i, step in enumerate(self.steps):
            saved.append(step.forward(walk, values, recorded))
            for v in [v for v in values if last.get(v, i) <= i]:
                walk.ledger.drop(values.pop(v))
        out = values.pop(self.output)
        walk.ledger.drop(*values.values())
        return out, saved

    def backward(self, walk: Walk, saved: list[object], grad: Storage | None) -> Storage | None:
        """The gradient of the input, held for the caller, who keeps holding ``grad``. Autograd adds gradients of one
        value in place."""
        grads: Values = {self.output: grad}
        walk.ledger.hold(grad)
        for step, own in reversed(list(zip(self.steps, saved, strict=True))):
            made = step.backward(walk, own, grads)
            for v in _made(step):
                walk.ledger.drop(grads.pop(v, None))
            for v, s in made.items():
                if v in grads:
                    walk.ledger.drop(s)
                else:
                    grads[v] = s
        return grads.pop(self.input)


def _read(step: Use | Alike | Again) -> tuple[str, ...]:
    return tuple(step.inputs.values()) if isinstance(step, Use) else step.inputs


def _made(step: Use | Alike | Again) -> tuple[str, ...]:
    return tuple(v for v in step.outputs if v) if not isinstance(step, Alike) else (step.output,)
