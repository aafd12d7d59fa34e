"""From a planned graph to a Python function: straight-line code over compiled regions.

Collectives are issued asynchronously where their input is ready and waited for before their first reader, so that the
all-gather of a weight gradient's input and the reduce-scatter of a data gradient run beside the products.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ..engines.arch import Arch
from ..engines.manifest import BY_ID
from ..graph.ir import Graph
from ..graph.ops.table import op_table
from ..plan_cache.memory import context
from . import nvtx
from .planner import GraphPlan, PlanError, PlannedRegion
from .policy import Policy

log = logging.getLogger("layerplan")


class ReferenceFallback(UserWarning):
    """A reference runs on a GPU because no kernel would take the region."""


_compiled: dict[tuple, Any] = {}
_warned: set[str] = set()


def compiled_launch(planned: PlannedRegion, arch: Arch) -> Any:
    """The launch function of a planned region; built once per (region, engine, knobs, arch)."""
    key = (planned.region.graph.signature(), planned.engine, planned.offer.knobs, arch.name)
    launch = _compiled.get(key)
    if launch is None:
        engine = BY_ID[planned.engine].load()
        if arch.is_gpu and torch.cuda.is_available():
            # builds may ask the driver, and autograd's threads have no context before they ask the runtime
            torch.cuda.mem_get_info()
        try:
            launch = _compiled[key] = engine.build(context(planned.region, arch, planned.offer)).launch
        except ImportError as error:  # another engine instead would be slower without a word, and on this rank alone
            raise PlanError(f"{'+'.join(planned.ops)}: {planned.engine} cannot be built here: {type(error).__name__}: "
                            f"{error}; reinstall what it needs ({', '.join(BY_ID[planned.engine].needs)}; 'layerplan "
                            "doctor' says more), uninstall it, or choose another engine or policy"
                            ) from error  # fmt: skip
    return launch


def warn_if_reference(planned: PlannedRegion, arch: Arch, policy: Policy, where: str) -> None:
    """Under ``auto`` on a GPU, say once per op and set of reasons that a reference runs, why, and what it costs."""
    if not arch.is_gpu or policy.mode != "auto" or policy.engine:
        return
    if planned.engine == "runner" or not BY_ID[planned.engine].is_reference:
        return
    reasons = "; ".join(f"{c.engine}: {c.reason}" for c in planned.candidates if not c.chosen)
    text = f"{'+'.join(planned.ops)}: {reasons}"
    if text in _warned:
        return
    _warned.add(text)
    flops, nbytes = planned.region.cost()
    ideal = arch.roofline(flops, nbytes, planned.region.dtype())
    warnings.warn(
        f"layerplan: {where or 'ops'}: {'+'.join(planned.ops)} runs on its plain PyTorch reference on {arch.name}, "
        f"about {planned.seconds * 1e6:.0f} us instead of {ideal * 1e6:.0f} us at the roofline. Why: {reasons}",
        ReferenceFallback, stacklevel=5,
    )  # fmt: skip


# ---- collectives -----------------------------------------------------------------------------------------------------


class _Pending:
    __slots__ = ("out", "work")

    def __init__(self, out: torch.Tensor, work: Any) -> None:
        self.out, self.work = out, work


def _finish(pending: _Pending) -> torch.Tensor:
    if pending.work is not None:
        pending.work.wait()
    return pending.out


def _collective(op: str, group: Any, size: int, in_place: bool):
    """A function that issues the collective and returns what ``_finish`` takes."""
    if size == 1 or op == "group_copy":
        return lambda x: _Pending(x, None)
    if op == "all_gather":

        def start(x):
            out = x.new_empty(x.shape[0] * size, *x.shape[1:])
            return _Pending(out, dist.all_gather_into_tensor(out, x.contiguous(), group=group, async_op=True))

    elif op == "reduce_scatter":

        def start(x):
            if x.shape[0] % size:
                raise ValueError(
                    f"reduce_scatter: dim 0 = {x.shape[0]} must divide by the group's size {size}; pad the sequence"
                )
            out = x.new_empty(x.shape[0] // size, *x.shape[1:])
            return _Pending(out, dist.reduce_scatter_tensor(out, x.contiguous(), group=group, async_op=True))

    else:

        def start(x):
            out = x if in_place and x.is_contiguous() else x.contiguous().clone()
            return _Pending(out, dist.all_reduce(out, group=group, async_op=True))

    return start


# ---- code generation -------------------------------------------------------------------------------------------------


class _Writer:
    """Writes one function over a part of a plan's regions. ``module`` and ``direction``: what NVTX ranges say of it."""

    def __init__(self, graph: Graph, arch: Arch, groups: Mapping[str, Any], module: str, direction: str) -> None:
        self.graph, self.arch, self.groups = graph, arch, groups
        self.module, self.direction = module, direction
        self.names: dict[str, str] = {}
        self.env: dict[str, Any] = {"_finish": _finish}
        self.lines: list[str] = []
        self.ranges = nvtx.ranges()
        if self.ranges is not None:
            self.env |= dict(zip(("_push", "_pop"), self.ranges, strict=True))

    def name(self, value: str) -> str:
        return self.names.setdefault(value, f"a{len(self.names)}")

    def body(self, regions: Iterable[PlannedRegion], keep: set[str]) -> None:
        """Calls in order; values outside ``keep`` are dropped after their last reader, inputs too."""
        regions = list(regions)
        last: dict[str, int] = {}
        for i, r in enumerate(regions):
            for v in (*r.region.graph.inputs, *r.region.graph.outputs):
                last[v] = i
        pending: set[str] = set()
        for i, r in enumerate(regions):
            g = r.region.graph
            for v in g.inputs:
                self._wait(v, pending)
            if r.engine == "runner":
                self._issue(r, i, pending)
            else:
                self.env[f"r{i}"] = compiled_launch(r, self.arch)
                targets = ", ".join(self.name(v) for v in g.outputs)
                self._launch(r, i, f"{targets} = r{i}({', '.join(self.name(v) for v in g.inputs)})")
            dead = [v for v, k in last.items() if k == i and v not in keep and v not in pending]
            if dead:
                self.lines.append(f"del {', '.join(self.name(v) for v in dead)}")
        for v in sorted(pending):
            if v in keep:
                self._wait(v, pending)

    def _wait(self, value: str, pending: set[str]) -> None:
        if value in pending:
            pending.discard(value)
            self.lines.append(f"{self.name(value)} = _finish({self.name(value)})")

    def _issue(self, r: PlannedRegion, i: int, pending: set[str]) -> None:
        node = r.region.node
        source, target = node.input("x"), node.output("y")
        size, symbol = node.attr("size"), node.attr("group")
        if size > 1 and symbol not in self.groups:
            raise ValueError(
                f"collective {node.op}: no process group for symbol {symbol!r}; known: {sorted(self.groups)}"
            )
        # the source may be overwritten only if this node alone reads it and the graph made it
        maker = self.graph.producer(source)
        alone = (maker is not None and not op_table()[maker.op].aliases and len(self.graph.consumers(source)) == 1
                 and source not in self.graph.outputs)  # fmt: skip
        self.env[f"c{i}"] = _collective(node.op, self.groups.get(symbol), size, alone)
        self._launch(r, i, f"{self.name(target)} = c{i}({self.name(source)})")
        pending.add(target)

    def _launch(self, r: PlannedRegion, i: int, line: str) -> None:
        """The line that launches a region; where ranges are wanted in one, which ends also where it raises."""
        if self.ranges is None:
            self.lines.append(line)
            return
        self.env[f"n{i}"] = nvtx.text(self.module, self.direction, r.engine, r.ops)
        self.lines += [f"_push(n{i})", "try:", f"    {line}", "finally:", "    _pop()"]

    def function(self, arguments: str, header: list[str], tail: list[str]):
        source = "\n    ".join([f"def program({arguments}):", *header, *self.lines, *tail])
        env = dict(self.env)
        exec(compile(source, "<layerplan plan>", "exec"), env)  # the text above is made of generated names alone
        return env["program"]


def _tuple(names: Iterable[str]) -> str:
    names = list(names)
    return f"({', '.join(names)}{',' if len(names) == 1 else ''})"


def forward_programs(part: GraphPlan, arch: Arch, num_outputs: int, saved: tuple[str, ...],
                     non_differentiable: tuple[int, ...], groups: Mapping[str, Any], module: str):  # fmt: skip
    """``plain(*inputs)`` -> the output, or a tuple of several; and ``recorded(ctx, sink, *inputs)``, which also saves
    what the backward reads: the forward of an autograd Function. ``module``: the name of the module whose plan it
    is."""
    graph, outputs = part.graph, part.graph.outputs[:num_outputs]

    def write(keep: tuple[str, ...]) -> tuple[_Writer, str, str]:
        w = _Writer(graph, arch, groups, module, "forward")
        inputs = ", ".join([w.name(v) for v in graph.inputs])
        w.body(part.regions, set(keep))
        returned = w.name(outputs[0]) if num_outputs == 1 else _tuple(w.name(v) for v in outputs)
        return w, inputs, f"return {returned}"

    w, inputs, result = write(outputs)
    plain = w.function(inputs, [], [result])
    w, inputs, result = write((*outputs, *saved))
    tail = [f"ctx.save_for_backward({', '.join(w.name(v) for v in saved)})", "if sink is not None: ctx.sink = sink"]
    if num_outputs > 1:
        tail.append("ctx.set_materialize_grads(False)")
    if non_differentiable:
        tail.append(f"ctx.mark_non_differentiable({', '.join(w.name(outputs[i]) for i in non_differentiable)})")
    return plain, w.function(f"ctx, sink, {inputs}", [], [*tail, result])


class BackwardProgram:
    """``data(saved, grads, extra) -> (gradients, carry)``, which empties the list ``saved`` so that each tensor is
    freed after its last reader, and, where weight gradients are deferred, ``weight(carry) -> deferred gradients``.
    ``deferred`` lists the positions that ``weight`` fills. ``direct(otherwise)`` makes the data stage the backward of
    an autograd Function."""

    def __init__(self, part: GraphPlan, arch: Arch, num_saved: int, num_grads: int, results: tuple[str | None, ...],
                 deferred: tuple[int, ...], groups: Mapping[str, Any], module: str) -> None:  # fmt: skip
        graph = part.graph
        self.deferred = deferred
        now = [None if i in deferred else v for i, v in enumerate(results)]
        late = self._late(part, {v for v in now if v is not None}) if deferred else []
        early = [r for r in part.regions if r not in late]
        made_late = {v for r in late for v in r.region.graph.outputs}
        carry = [v for v in dict.fromkeys(v for r in late for v in r.region.graph.inputs) if v not in made_late]
        # a deferred gradient that an early region already computes travels along
        carry += [v for i in deferred if (v := results[i]) is not None and v not in made_late and v not in carry]
        w = _Writer(graph, arch, groups, module, "backward")
        end = num_saved + num_grads
        parts = graph.inputs[:num_saved], graph.inputs[num_saved:end], graph.inputs[end:]
        given = [_tuple(w.name(v) for v in values) if values else "_" for values in parts]
        w.body(early, {v for v in now if v} | set(carry))
        returned = ["None" if v is None else w.name(v) for v in now]
        header = [f"{given[0]}, {given[1]}, {given[2]} = saved, grads, extra", "saved.clear()"]
        tail = f"return {_tuple(returned)}, {_tuple(w.name(v) for v in carry)}"
        self.data = w.function("saved, grads, extra", header, [tail])
        self._data_stage = w, given, returned
        self.weight = None
        if deferred:
            w2 = _Writer(graph, arch, groups, module, "backward")
            header = [f"{_tuple(w2.name(v) for v in carry)} = carry"] if carry else []
            outs = [results[i] for i in deferred]
            w2.body(late, {v for v in outs if v})
            tail = f"return {_tuple('None' if v is None else w2.name(v) for v in outs)}"
            self.weight = w2.function("carry", header, [tail])

    def direct(self, otherwise: Callable[..., tuple]):
        """``f(ctx, grad)`` for a graph of one output: unpacks what was saved, runs, returns. A call with a sink, or one
        that would be recorded for a second backward, goes to ``otherwise``."""
        w, (saved, grads, _), returned = self._data_stage
        w.env |= {"_grad_enabled": torch.is_grad_enabled, "_otherwise": otherwise}
        header = ["if ctx.sink is not None or _grad_enabled():", f"    return _otherwise(ctx, {grads[1:-2]})",
                  f"{saved} = ctx.saved_tensors", "ctx.maybe_clear_saved_tensors()"]  # fmt: skip
        return w.function(f"ctx, {grads[1:-2]}", header, [f"return None, {', '.join(returned)}"])

    @staticmethod
    def _late(part: GraphPlan, needed: set[str]) -> list[PlannedRegion]:
        """Regions that nothing in ``needed`` depends on."""
        needed, late = set(needed), []
        for r in reversed(part.regions):
            if any(v in needed for v in r.region.graph.outputs):
                needed.update(r.region.graph.inputs)
            else:
                late.append(r)
        return late[::-1]
