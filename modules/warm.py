"""Everything that a model's plans need, planned, compiled, loaded and launched once before the first step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..integration.engines.arch import Arch
from ..integration.graph.examples import example, sizes_of
from ..integration.graph.ir import Dim
from ..integration.planner.planner import PlannedRegion
from ..integration.planner.program import compiled_launch
from ..integration.planner.runner import Executable, Runner, WeightGrads
from .base import PlannedModule

_ROWS = 16  # tokens of a first launch: code does not depend on their number


def warm(model: torch.nn.Module, shapes: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> int:
    """Plans, compiles and loads what the layerplan modules of ``model`` need for calls of given shapes, so that a first
    step, or the capture of a CUDA graph, finds everything; the number of distinct regions that are ready.

    ``shapes``: one call of ``model`` or several, each a mapping from names of its arguments to ``(sizes, dtype)``, such
    as ``{"x": ((8192, 4096), torch.bfloat16)}``; other values are passed as they are. Other sizes of one shape class
    (token counts between two powers of two) need no call of their own. In training mode with grad mode on, backward is
    made ready too, with and without a gradient of the floating-point arguments, but for a forward that the model runs
    again inside of its backward (full recomputation): its plans are made there. What is ready holds for the mode, the
    policy and the parameters' dtypes that are in force now.

    The model's Python code runs on tensors without contents: what depends on its inputs is not computed, and no
    parameter, buffer, gradient or random state changes. What it makes of nothing, such as a rotary table, is real: it
    may keep it. Code that reads the values of what depends on its inputs cannot run so, and fails with torch's words.
    Then, on a GPU, each region is launched once on a few random tokens, which loads its code and what its library sets
    up. No plan's collective is issued.

    ValueError for a model without layerplan modules or malformed shapes; what planning and compiling raise."""
    modules = [m for m in model.modules() if isinstance(m, PlannedModule)]
    if not modules:
        raise ValueError(f"warm: model = {type(model).__name__}: holds no layerplan module: nothing is to be prepared")
    calls = [shapes] if isinstance(shapes, Mapping) else list(shapes) if isinstance(shapes, Sequence) else []
    if not calls or not all(isinstance(call, Mapping) for call in calls):
        shown = type(shapes).__name__ if calls or not isinstance(shapes, Sequence) else "no call"
        raise ValueError(f"warm: shapes = {shown}: must be a mapping from argument names to (sizes, dtype), or several in a list")
    device = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    stands: list[_Stand] = []
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    buffers = {name: fake.from_tensor(t) for name, t in model.named_buffers()}  # a forward may write to them
    with _standing(modules, stands, fake), _WithoutDraws(fake):
        for call in calls:
            arguments = {name: _stand_in(name, value, device, fake) for name, value in call.items()}
            torch.func.functional_call(model, buffers, (), arguments)
            # plans differ by what needs a gradient: the first layers' input does not, a later pipeline stage's does
            floats = {n: t for n, t in arguments.items() if isinstance(t, torch.Tensor) and t.is_floating_point()}
            if floats and model.training and torch.is_grad_enabled():
                with fake:
                    leaves = {n: torch.empty_like(t, requires_grad=True) for n, t in floats.items()}
                torch.func.functional_call(model, buffers, (), arguments | leaves)
    regions = {
        (r.region.key(), r.engine, r.offer.knobs, arch): r
        for stand in stands for _, arch, r in stand.runner.regions() if r.engine != "runner"
    }  # fmt: skip
    if device.type == "cuda":
        for planned in regions.values():
            _launch(planned, Arch.of_device(device.index or 0), device)
        torch.cuda.synchronize(device)
    return len(regions)


def _stand_in(name: str, value: Any, device: torch.device, fake: FakeTensorMode) -> Any:
    if not (isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], str | torch.dtype)):
        return value
    sizes, dtype = value
    dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    fits = isinstance(sizes, Sequence) and all(type(n) is int and n >= 0 for n in sizes)
    if not isinstance(dtype, torch.dtype) or not fits:
        raise ValueError(f"warm: {name} = {value}: must be (sizes, dtype), such as ((8192, 4096), torch.bfloat16)")
    with fake:
        return torch.empty(sizes, dtype=dtype, device=device)


class _WithoutDraws(TorchDispatchMode):
    """Random numbers are not drawn: their tensors have no contents, and generators stay where they are."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self.fake = fake

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with self.fake if torch.Tag.nondeterministic_seeded in func.tags else contextlib.nullcontext():
            return func(*args, **kwargs or {})


# ---- in the place of runners -----------------------------------------------------------------------------------------


class _Stand:
    """In the place of a runner: makes it ready for what it is called with, and returns tensors without contents."""

    def __init__(self, runner: Runner, training: bool, fake: FakeTensorMode) -> None:
        self.runner, self.training, self.fake = runner, training, fake

    def __call__(self, *tensors: torch.Tensor, sink: WeightGrads | None = None) -> Any:
        with _disable_current_modes():
            entry = self.runner.prepared(tensors)
            recorded = entry.differentiable and torch.is_grad_enabled()
            if recorded and self.training and (entry.library is None or sink is not None):
                entry.build_backward(sink)
        with self.fake:
            made = tuple(_outputs(entry, tensors, recorded))
        return made[0] if entry.single else made


def _outputs(entry: Executable, tensors: tuple[torch.Tensor, ...], recorded: bool) -> Iterator[torch.Tensor]:
    graph = entry.graph
    sizes = {
        d.name: n
        for v, t in zip(graph.inputs, tensors, strict=True)
        for d, n in zip(graph.specs[v].shape, t.shape, strict=True) if isinstance(d, Dim)
    }  # fmt: skip
    for i, v in enumerate(graph.outputs):
        spec = graph.specs[v]
        shape = [d.at(lambda d: sizes[d.name]) if isinstance(d, Dim) else d for d in spec.shape]
        out = torch.empty(shape, dtype=getattr(torch, spec.dtype), device=tensors[0].device)
        active = recorded and i in entry.plan.derived.grad_outputs
        yield out.requires_grad_().clone() if active else out  # a clone: callers may write to what a module returns


@contextlib.contextmanager
def _standing(modules: Sequence[PlannedModule], stands: list[_Stand], fake: FakeTensorMode) -> Iterator[None]:
    """Has ``modules`` call stand-ins, which ``stands`` gets; their runners have what was prepared afterwards."""
    before = [m.planning() for m in modules]

    def maker(module: PlannedModule, make: Any):
        def made(*arguments: Any, **options: Any) -> _Stand:
            stands.append(_Stand(make(*arguments, **options), module.training, fake))
            return stands[-1]

        return made

    try:
        for module, planning in zip(modules, before, strict=True):
            module.__dict__ |= {"_runners": {}, "_make_runner": maker(module, planning.get("_make_runner", Runner))}
        yield
    finally:
        for module, planning in zip(modules, before, strict=True):
            runners = dict(planning.get("_runners", {}))
            for key, stand in module.__dict__["_runners"].items():
                runners.setdefault(key, stand.runner).take(stand.runner)
            module.restore_planning(planning | {"_runners": runners})


def _launch(planned: PlannedRegion, arch: Arch, device: torch.device) -> None:
    """One launch of a region on random tensors of a few tokens."""
    graph, generator = planned.region.graph, torch.Generator(device).manual_seed(0)
    sizes = sizes_of(graph, _ROWS)
    try:
        with torch.no_grad():
            compiled_launch(planned, arch)(*(example(graph, v, sizes, generator) for v in graph.inputs))
    except Exception as error:
        error.add_note(f"layerplan.warm: in the first launch of {'+'.join(planned.ops)} on {planned.engine}")
        raise
