"""The autograd Function that runs plans, and the table from tensor metadata to plans in front of it.

On a hit a call costs one key, one dict access and the Function; everything else (validation, planning, building) happens
once per key.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..engines.arch import Arch
from ..engines.manifest import BY_ID
from ..graph.autodiff import accumulate_weight_grads, differentiate
from ..graph.ir import Dim, Graph, GraphError
from ..graph.ops.table import op_table
from ..settings import settings
from . import nvtx
from .plan_file import Pins
from .planner import Plan, PlannedRegion, plan
from .policy import Policy
from .program import BackwardProgram, forward_programs, warn_if_reference
from .records import Records, default_records

_grad_enabled = torch.is_grad_enabled
_transforms_active = torch._C._are_functorch_transforms_active
_plans: dict[tuple, Plan] = {}
_MOST_KEYS = 4096  # token counts that a runner remembers; to look one up again costs the graph's building


def cached_plan(graph: Graph, arch: Arch, policy: Policy, *, pins: Pins | None = None, records: Records | None = None, **options: Any) -> Plan:
    """``planner.plan``, once per distinct graph, shape class, plan file, records and options."""
    hints = tuple(d.hint for d in graph.dims())
    key = (graph.signature(), hints, arch.name, policy, tuple(sorted(options.items())), pins, records)
    found = _plans.get(key)
    own = found.forward.graph if found else None
    if own is None or own.inputs != graph.inputs or own.outputs[: len(graph.outputs)] != graph.outputs:
        found = _plans[key] = plan(graph, arch, policy, pins=pins, records=records, **options)
    return found


def readable(t: torch.Tensor) -> bool:
    """Whether a tensor's values may be read to check them: where that waits for no device, or with LAYERPLAN_CHECK=1."""
    return not t.is_meta and (not t.is_cuda or settings().check)


class _Checks:
    """The op table's ``check`` of every node of a graph that has one, over the graph's input tensors."""

    def __init__(self, graph: Graph) -> None:
        table, position = op_table(), {v: i for i, v in enumerate(graph.inputs)}
        self.rows = [
            (table[n.op].check, {p: position[v] for p, v in n.inputs if v in position}, {p: graph.specs[v].shape for p, v in n.inputs}, n.attributes)
            for n in graph.nodes if table[n.op].check is not None
        ]  # fmt: skip
        self.where = {d.name: (i, axis) for i, v in enumerate(graph.inputs) for axis, d in enumerate(graph.specs[v].shape) if isinstance(d, Dim)}

    def __call__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        sizes = {name: tensors[i].shape[axis] for name, (i, axis) in self.where.items()}
        for check, ports, shapes, attrs in self.rows:
            values = {p: tensors[i] for p, i in ports.items() if readable(tensors[i])}

            def shape(port: str, shapes=shapes) -> tuple[int | None, ...] | None:
                return tuple(d if isinstance(d, int) else sizes.get(d.name) for d in shapes[port]) if port in shapes else None

            check(values, shape, attrs)


class _Constants:
    """The inputs of a graph that require a gradient though a port that reads them passes none on (the tables of a rotation): their
    gradient would be lost without a word. Without grad mode nothing is."""

    def __init__(self, graph: Graph, needs: tuple[bool, ...]) -> None:
        table, position = op_table(), {v: i for i, v in enumerate(graph.inputs)}
        self.positions: dict[int, tuple[str, str]] = {}  # position of the input -> (op, port)
        for n in graph.nodes:
            allowed = table[n.op].differentiable
            for p, v in n.inputs:
                if v in position and needs[position[v]] and allowed is not None and p not in allowed:
                    self.positions.setdefault(position[v], (n.op, p))

    def before(self, check: Callable[[tuple[torch.Tensor, ...]], None] | None, owner: Runner) -> Callable[[tuple[torch.Tensor, ...]], None]:
        i, (op, port) = next(iter(self.positions.items()))

        def refuse(tensors: tuple[torch.Tensor, ...]) -> None:
            if _grad_enabled():
                raise ValueError(f"{owner.name or 'layerplan'}: {owner.names[i]} requires a gradient: {op} passes none to its port "
                                 f"{port}; pass {owner.names[i]}.detach()")  # fmt: skip
            if check is not None:
                check(tensors)

        return refuse


class WeightGrads:
    """Where a module wants the gradients of its weights.

    ``params`` maps input positions to parameters. With ``fuse`` a gradient is added in place to ``param.main_grad``
    (only if the parameter has it and ``grad_added_to_main_grad``), the flag is set and a dummy gradient is returned:
    zeros if the parameter's ``zero_out_wgrad`` says so. With ``defer`` weight gradients wait for ``run_deferred``.
    """

    def __init__(self, params: Mapping[int, torch.nn.Parameter], *, fuse: bool = False, defer: bool = False) -> None:
        self.params, self.fuse, self.defer = dict(params), fuse, defer
        self._queue: list[Callable[[], None]] = []

    def fused_positions(self) -> tuple[int, ...]:
        """Input positions whose gradients are added to ``main_grad``: parameters that are frozen, or that carry no ``main_grad`` or no
        ``grad_added_to_main_grad``, are not among them. Empty without ``fuse``."""
        if not self.fuse:
            return ()
        return tuple([
            i for i, p in self.params.items()
            if p.requires_grad and getattr(p, "main_grad", None) is not None and hasattr(p, "grad_added_to_main_grad")
        ])  # fmt: skip

    def dummy(self, position: int) -> torch.Tensor:
        """What autograd gets in place of a gradient that went into ``main_grad``: shape, dtype and device of the parameter; zeros
        where ``zero_out_wgrad`` is set, else uninitialised. Sets ``grad_added_to_main_grad``."""
        p = self.params[position]
        p.grad_added_to_main_grad = True
        make = torch.zeros if getattr(p, "zero_out_wgrad", False) else torch.empty
        return make(*p.shape, dtype=p.dtype, device=p.device)  # sizes one by one: as a tuple they cost 1 us more

    def push(self, job: Callable[[], None]) -> None:
        self._queue.append(job)

    def run_deferred(self) -> bool:
        """Run the oldest deferred weight gradient (one micro-batch); False where none waits."""
        if not self._queue:
            return False
        self._queue.pop(0)()
        return True

    def deposit(self, position: int, grad: torch.Tensor | None) -> None:
        """Hand a deferred, unfused gradient to its parameter."""
        p = self.params[position]
        if grad is not None:
            p.grad = grad if p.grad is None else p.grad + grad


class Executable:
    """A plan for one key, with its programs. Built once. ``forward(*tensors)`` runs where nothing is recorded;
    ``apply(sink, *tensors)`` is the entry's own autograd Function, whose backward is planned by its first run.
    ``library(*tensors)``, where it is not None, is the same plan as one call that a library differentiates itself: then no
    Python runs in backward."""

    __slots__ = ("_backward", "_function", "_owner", "_recompute", "apply", "arch", "check", "checks", "differentiable", "forward", "graph", "library",
                 "needs", "num_outputs", "plan", "plans", "saved", "single")  # fmt: skip

    def __init__(self, owner: Runner, graph: Graph, arch: Arch, needs: tuple[bool, ...]) -> None:
        constant = _Constants(graph, needs)
        needs = tuple(n and i not in constant.positions for i, n in enumerate(needs))
        self._owner, self.graph, self.arch, self.needs = owner, graph, arch, needs
        self._recompute = owner.recompute
        self.differentiable = any(needs)
        # a training module's first pass of full recompute runs under no_grad: it plans as if everything needed a gradient
        planned_for = needs if self.differentiable or not owner.training else tuple(graph.specs[v].is_float for v in graph.inputs)
        self.plan = cached_plan(graph, arch, owner.policy, pins=owner.pins, records=owner.records, needs_grad=planned_for,
                                recompute=owner.recompute)  # fmt: skip
        self.plans = [dataclasses.replace(self.plan, backward=None)]  # what runs; backwards are added when they are asked for
        self.num_outputs, self.single = len(graph.outputs), len(graph.outputs) == 1
        derived = self.plan.derived
        self.saved = derived.saved if derived and self.differentiable else ()
        for r in self.plan.forward.regions:
            warn_if_reference(r, arch, owner.policy, owner.name)
        active = set(derived.grad_outputs) if derived else set()
        still = tuple(i for i in range(self.num_outputs) if i not in active) if self.differentiable else ()
        self.forward, recorded = forward_programs(self.plan.forward, arch, self.num_outputs, self.saved, still, owner.groups, owner.name)
        self._backward: dict[tuple, tuple] = {}
        if self.differentiable:
            self._function, self.apply = _function(owner.name or graph.nodes[0].op, recorded, self._run_backward)
        self.library = self._library_call()
        checks = _Checks(graph)
        self.checks = checks if checks.rows else None
        # sizes are checked once per key; values on each call, where they may be read
        self.check = self.checks if self.checks and (not arch.is_gpu or settings().check) else None
        if constant.positions:  # rare: the others pay nothing for it
            self.check = constant.before(self.check, owner)

    def _library_call(self) -> Callable[..., torch.Tensor] | None:
        """One library call that is the whole plan: one region forward, and the same engine for all of its gradient. None under
        LAYERPLAN_NVTX: the library's own backward would have no range."""
        if not (self.differentiable and self.single) or self._recompute or len(self.plan.forward.regions) != 1 or nvtx.ranges():
            return None
        (own,) = self.plan.forward.regions
        if own.region.graph.inputs != self.graph.inputs or any(r.engine != own.engine for r in self.plan.backward.regions):
            return None
        return BY_ID[own.engine].load().autograd(own.region, self.arch)

    def _run_backward(self, ctx: Any, *grads: torch.Tensor | None) -> tuple:
        if _grad_enabled():
            raise RuntimeError("layerplan: double backward (create_graph=True) is not offered; its backward ops have no gradient")
        saved = list(ctx.saved_tensors)
        ctx.maybe_clear_saved_tensors()  # unless the graph is retained; from here on only the list holds them
        return (None, *self.backward(ctx.sink, saved, grads))

    def backward(self, sink: WeightGrads | None, saved: list, grads: tuple) -> tuple:
        """The gradients of the inputs. Empties ``saved``, so that each saved tensor is freed after its last reader."""
        given = (True,) if self.single else tuple([g is not None for g in grads])
        fused = sink.fused_positions() if sink is not None else ()
        program, pick, fill, fused, picked_saved = self._variant(given, fused, sink)
        if fill:
            grads, sizes = list(grads), self._sizes(saved, grads)
            device = next(g.device for g in grads if g is not None)
            for i, spec in fill:
                shape = [d if isinstance(d, int) else sizes[d.name] if d.name in sizes else d.at(lambda d: sizes[d.name]) for d in spec.shape]
                grads[i] = torch.zeros(shape, dtype=getattr(torch, spec.dtype), device=device)
        grads = tuple([grads[i] for i in pick])
        if picked_saved is not None:
            saved[:] = [saved[i] for i in picked_saved]
        extra = tuple([sink.params[i].main_grad for i in fused])
        results, carry = program.data(saved, grads, extra)
        if program.weight is not None:
            self._defer(sink, program, carry, fused)
            fused = tuple(i for i in fused if i not in program.deferred)
        if fused:
            results = list(results)
            for i in fused:
                results[i] = sink.dummy(i)
        return results

    def _variant(self, given: tuple[bool, ...], fused: tuple[int, ...], sink: WeightGrads | None) -> tuple:
        """The backward of one kind of call, built by the first one."""
        key = (given, fused, sink is not None and sink.defer)
        variant = self._backward.get(key)
        if variant is None:
            variant = self._backward[key] = self._build_backward(given, fused, key[2])
            if self.single and sink is None:  # the usual case: from now on without this function
                self._function._backward_cls.apply = variant[0].direct(self._run_backward)
        return variant

    def build_backward(self, sink: WeightGrads | None = None) -> None:
        """Plans and builds the backward from all primary outputs, before its first run. ``sink`` as the call will have
        it."""
        wanted = self.plan.derived.grad_outputs
        given = tuple(self.single or i in wanted for i in range(self.num_outputs))
        self._variant(given, sink.fused_positions() if sink is not None else (), sink)

    def _defer(self, sink: WeightGrads, program: BackwardProgram, carry: tuple, fused: tuple[int, ...]) -> None:
        def job() -> None:
            with torch.no_grad():
                for i, grad in zip(program.deferred, program.weight(carry), strict=True):
                    if i in fused:
                        sink.params[i].grad_added_to_main_grad = True
                        sink.params[i].grad = sink.dummy(i) if sink.params[i].grad is None else sink.params[i].grad
                    else:
                        sink.deposit(i, grad)

        sink.push(job)

    def _build_backward(self, given: tuple[bool, ...], fused: tuple[int, ...], defer: bool):
        default = self.plan.derived
        positions = tuple(i for i in default.grad_outputs if given[i])
        part, fill, picked = default, (), None
        if positions != default.grad_outputs:
            # what arrives differs from what was saved for: use the smaller backward if its reads are saved
            part = differentiate(self.graph, self.needs, positions, self._recompute)
            if set(part.saved) <= set(self.saved):
                picked = tuple(self.saved.index(v) for v in part.saved)
            else:  # reads something that was not saved: feed zeros to the whole backward instead
                part = default
                fill = tuple((i, self.graph.specs[self.graph.outputs[i]]) for i in default.grad_outputs if not given[i])
        graph, results, fused = accumulate_weight_grads(part.backward, part.grads, fused)
        deferred = ()
        if defer:
            table = op_table()
            wgrads = {v for n in graph.nodes if table[n.op].weight_gradient for _, v in n.outputs}
            deferred = tuple(i for i, v in enumerate(results) if v in wgrads)
        made = cached_plan(graph, self.arch, self._owner.policy, pins=self._owner.pins, records=self._owner.records)
        self.plans.append(made)
        for r in made.forward.regions:
            warn_if_reference(r, self.arch, self._owner.policy, self._owner.name)
        program = BackwardProgram(made.forward, self.arch, len(part.saved), len(part.grad_outputs), results, deferred, self._owner.groups,
                                  self._owner.name)  # fmt: skip
        return program, part.grad_outputs, fill, fused, picked

    def _sizes(self, saved: list, grads: list) -> dict[str, int]:
        """The symbolic dims' sizes, from what is saved and what arrives."""
        derived, sizes = self.plan.derived, {}
        known = [*zip(self.saved, saved, strict=True), *zip(derived.forward.outputs, grads, strict=False)]
        for v, t in known:
            if t is not None:
                for d, s in zip(derived.forward.specs[v].shape, t.shape, strict=True):
                    if not isinstance(d, int):
                        sizes[d.name] = s
        return sizes


def _function(name: str, forward: Callable[..., Any], backward: Callable[..., tuple]):
    """An autograd Function of these two, and its ``apply``.

    Old style, since ``setup_context`` costs 14 us more a call; one class per plan, so that the generated code itself is
    what autograd calls. ``Function.apply`` looks for functorch transforms and a setup_context on every call, and
    ``BackwardCFunction.apply`` for a vjp: both are left out.
    """
    made = type(name, (torch.autograd.Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})
    made._backward_cls.apply = lambda ctx, *grads: backward(ctx, *grads)  # a plain function: it is bound to ctx
    made._backward_cls.sink = None  # unless a call sets its own: a context without attributes has no dictionary
    return made, super(torch.autograd.Function, made).apply


@functools.cache
def _key_function(arity: int):
    """key(a, b, ...): what of the tensors' metadata a plan may depend on."""
    names = [f"t{i}" for i in range(arity)]
    items = ", ".join(f"{n}.shape, {n}.dtype, {n}.device, {n}.requires_grad" for n in names)
    return eval(f"lambda {', '.join(names)}: ({items},)")  # generated from an int


class Runner:
    """Runs one family of graphs: ``build(*tensors)`` makes the graph (and checks the inputs) for a new key.

    ``names`` are the inputs' names, for messages. ``training`` plans as a module in training does: the forward's engines
    do not depend on grad mode. ``recompute`` is the save policy; ``groups`` maps group symbols to process groups; ``pins`` is
    the plan file in force, ``records`` the measured times that rank what it does not pin (None: those of LAYERPLAN_RECORDS).
    """

    def __init__(self, build: Callable[..., Graph], names: tuple[str, ...], *, policy: Policy, name: str = "",
                 training: bool = False, recompute: frozenset[str] = frozenset(),
                 groups: Mapping[str, Any] | None = None, pins: Pins | None = None, records: Records | None = None) -> None:  # fmt: skip
        self.records = default_records() if records is None else records
        self.build, self.names, self.policy, self.name = build, names, policy, name
        self.training, self.recompute, self.groups, self.pins = training, recompute, dict(groups or {}), pins
        self.entries: dict[tuple, Executable] = {}  # by the tensors' metadata: the hot path's one lookup
        self._executables: dict[tuple, Executable] = {}  # by graph and shape class
        self._key = _key_function(len(names))

    def __call__(self, *tensors: torch.Tensor, sink: WeightGrads | None = None):
        if torch.compiler.is_dynamo_compiling():
            return _outside_compile(self, tensors, sink)
        try:
            entry = self.entries.get(self._key(*tensors))
        except (AttributeError, TypeError):
            self._refuse_types(tensors)
            raise
        if entry is None:
            entry = self._miss(tensors)
        if entry.check is not None:
            entry.check(tensors)
        if entry.differentiable and _grad_enabled():
            if sink is None and entry.library is not None:
                return entry.library(*tensors)
            if _transforms_active():
                raise RuntimeError(f"{self.name or 'layerplan'}: torch.func transforms (grad, vjp, vmap, ...) are not offered for this plan, whose "
                                   "backward is planned; use torch.autograd.grad or .backward()")  # fmt: skip
            return entry.apply(sink, *tensors)
        return entry.forward(*tensors)

    def _miss(self, tensors: tuple[torch.Tensor, ...]) -> Executable:
        entry = self.prepared(tensors)
        if entry.checks is not None:
            entry.checks(tensors)
        if len(self.entries) >= _MOST_KEYS:
            self.entries.clear()
        self.entries[self._key(*tensors)] = entry
        return entry

    def prepared(self, tensors: tuple[torch.Tensor, ...]) -> Executable:
        """The executable for tensors of this metadata, planned and built where it is not there. Contents are not read."""
        devices = {n: t.device for n, t in zip(self.names, tensors, strict=True)}
        if len(set(devices.values())) > 1:
            listed = ", ".join(f"{n} on {d}" for n, d in devices.items())
            raise ValueError(f"{self.name or 'layerplan'}: device: all tensors must be on one device, got {listed}; move them with .to()")
        index = tensors[0].get_device()
        try:
            arch = Arch.of_device(index)
            graph = self.build(*tensors)
            needs = tuple(t.requires_grad for t in tensors)
            # one executable serves every size of a shape class
            same = (graph.signature(), graph.inputs, graph.outputs, tuple(d.hint for d in graph.dims()), arch.name, needs)
            entry = self._executables.get(same)
            if entry is None:
                entry = self._executables[same] = Executable(self, graph, arch, needs)
        except GraphError as error:
            shapes = ", ".join(f"{n}: {list(t.shape)} {str(t.dtype).removeprefix('torch.')}"
                               for n, t in zip(self.names, tensors, strict=True))  # fmt: skip
            raise type(error)(f"{error}\n  called with {shapes}") from None
        return entry

    def take(self, other: Runner) -> None:
        """Has what another runner of the same graphs has prepared."""
        self._executables = other._executables | self._executables

    def _refuse_types(self, tensors: tuple) -> None:
        if len(tensors) != len(self.names):
            raise TypeError(f"{self.name}: takes {len(self.names)} tensors ({', '.join(self.names)}), got {len(tensors)}")
        for n, t in zip(self.names, tensors, strict=True):
            if not isinstance(t, torch.Tensor):
                raise TypeError(f"{self.name}: {n} = {type(t).__name__}: must be a torch.Tensor")

    def plans(self) -> list[Plan]:
        """Every plan that this runner has run: the forward of each key, and each backward that was asked for."""
        return [p for e in self._executables.values() for p in ([e.plan] if e.library is not None and len(e.plans) == 1 else e.plans)]

    def regions(self) -> list[tuple[str, str, PlannedRegion]]:
        """(pass, arch, region) of every plan that this runner has run. The backward is what ran, where one has run that a plan
        was made for (an accumulating or a partial one is not the one planned with the forward), otherwise what is planned."""
        rows = []
        for entry in self._executables.values():
            arch, ran = entry.arch.name, [p.forward for p in entry.plans[1:]]
            planned = [entry.plan.backward] if entry.plan.backward else []
            rows += [("forward", arch, r) for r in entry.plan.forward.regions]
            rows += [("backward", arch, r) for part in ran or planned for r in part.regions]
        return rows


@torch.compiler.disable
def _outside_compile(runner: Runner, tensors, sink):
    """One clean graph break under torch.compile."""
    return Runner.__call__(runner, *tensors, sink=sink)

