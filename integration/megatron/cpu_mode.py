"""Unmodified Megatron-Core on a machine without a GPU, over gloo.

    with cpu_mode():
        torch.distributed.init_process_group("gloo")
        ...                                   # build and train as on a GPU; device="cuda" means the CPU in here

Megatron-Core names the device "cuda" in hundreds of places. Inside the block a function mode turns such devices into
"cpu", the functions of torch.cuda that a training run calls are replaced one by one (TORCH_PATCHES), Megatron-Core gets
the `cpu-*` rows and the guards of compat.py, and its optimiser comes from optimizer.py. On leaving, all of it is taken
back.

The CPU's generator plays the CUDA generator: Megatron's tracker then forks it as it forks the GPU's. The mode is for
one thread of a process that never touches CUDA; it is refused where CUDA is initialised and where it is on already.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from layerplan.integration.megatron import compat
from layerplan.integration.megatron.optimizer import install_optimizer

_CPU = torch.device("cpu")


class CpuModeError(RuntimeError):
    """CPU mode was asked for where it cannot be, or left out of order, or CUDA was asked for inside it."""


class CpuStream:
    """A stream of a machine that has none: everything is done by the time a call returns."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any):
        self.device = _CPU

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return CpuEvent() if event is None else event

    def __enter__(self) -> CpuStream:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CpuStream)

    def __hash__(self) -> int:
        return 0

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)


class CpuEvent:
    """An event that has happened. Times between two of them are 0 ms: they measure nothing."""

    def __init__(self, *_: Any, **__: Any): ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, *_: Any) -> float:
        return 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TorchPatch:
    """One function of torch.cuda that is replaced inside CPU mode. `make()` gives a new object per name."""

    targets: tuple[str, ...]
    why: str
    make: Callable[[], Any]


def _returns(value: Any) -> Callable[[], Any]:
    # A new function for every name: torch._dynamo refuses a module that has one object under several names.
    return lambda: lambda *args, **kwargs: value


def _stream_context() -> Any:
    return lambda stream: contextlib.nullcontext()


def _new_stream() -> Any:
    return lambda *args, **kwargs: CpuStream()


def _seed() -> Any:
    return lambda seed: torch.default_generator.manual_seed(int(seed)) and None


def _get_state() -> Any:
    return lambda *args, **kwargs: torch.get_rng_state()


def _set_state() -> Any:
    return lambda state, *args, **kwargs: torch.set_rng_state(state)


def _run_backward() -> Any:
    run = torch.autograd._engine_run_backward

    def inside_the_mode(*args: Any, **kwargs: Any) -> Any:
        with CpuFunctionMode():
            return run(*args, **kwargs)

    return inside_the_mode


def _refuse_init() -> Any:
    def _lazy_init() -> None:
        raise CpuModeError(
            "device = cuda: CUDA was about to be initialised inside CPU mode; something reached for a GPU in a "
            "way the mode "
            "does not turn into the CPU. Pass device='cpu' there, or leave the mode first"
        )

    return _lazy_init


def _cuda(*names: str) -> tuple[str, ...]:
    return tuple(f"torch.cuda:{name}" for name in names)


TORCH_PATCHES = (
    TorchPatch(
        targets=_cuda("is_available"), why="a host with a GPU takes the same paths as one without", make=_returns(False)
    ),
    TorchPatch(targets=_cuda("_lazy_init"), why="a GPU that is reached for by accident is an error", make=_refuse_init),
    TorchPatch(targets=_cuda("current_device"), why="goes straight into device= arguments", make=_returns(_CPU)),
    TorchPatch(targets=_cuda("device_count"), why="ranks are divided by it; one device a process", make=_returns(1)),
    TorchPatch(
        targets=_cuda("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"),
        why="nothing to do on a CPU",
        make=_returns(None),
    ),
    TorchPatch(
        targets=_cuda("manual_seed_all"), why="torch.manual_seed calls it after seeding the CPU", make=_returns(None)
    ),
    TorchPatch(
        targets=_cuda("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
        why="no device memory is used",
        make=_returns(0),
    ),
    TorchPatch(targets=_cuda("memory_stats"), why="no device memory is used", make=lambda: lambda *a, **k: {}),
    TorchPatch(targets=_cuda("current_stream", "default_stream"), why="no streams", make=_new_stream),
    TorchPatch(targets=_cuda("stream"), why="no streams", make=_stream_context),
    TorchPatch(targets=_cuda("Stream"), why="no streams", make=lambda: CpuStream),
    TorchPatch(targets=_cuda("Event"), why="no streams", make=lambda: CpuEvent),
    TorchPatch(targets=_cuda("is_current_stream_capturing"), why="no graphs on a CPU", make=_returns(False)),
    TorchPatch(
        targets=_cuda("get_device_capability"), why="older than any arch a check asks for", make=_returns((0, 0))
    ),
    TorchPatch(targets=_cuda("manual_seed"), why="the CPU generator plays the CUDA generator", make=_seed),
    TorchPatch(
        targets=_cuda("get_rng_state", "random.get_rng_state"),
        why="the CPU generator plays the CUDA generator",
        make=_get_state,
    ),
    TorchPatch(
        targets=_cuda("set_rng_state", "random.set_rng_state"),
        why="the CPU generator plays the CUDA generator",
        make=_set_state,
    ),
    TorchPatch(
        targets=("torch.autograd:_engine_run_backward",),
        why="torch leaves the function mode to handle backward, in which a recomputed forward names the GPU again",
        make=_run_backward,
    ),
    TorchPatch(
        targets=_cuda("nvtx.range_push", "nvtx.range_pop", "nvtx.mark"),
        why="torch built without NVTX raises",
        make=_returns(None),
    ),
)


def _to_cpu(device: Any) -> Any:
    """`device` as the CPU if it means a GPU: an index, "cuda", "cuda:1", torch.device("cuda")."""
    if isinstance(device, int) and not isinstance(device, bool):
        return _CPU
    if isinstance(device, str) and device.partition(":")[0] == "cuda":
        return _CPU
    if isinstance(device, torch.device) and device.type == "cuda":
        return _CPU
    return device


class CpuFunctionMode(TorchFunctionMode):
    """Turns the device "cuda" into the CPU, in arguments of torch's functions and tensor methods."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.record_stream:
            return None
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron's optimisers tell precisions apart by this name: 'torch.cuda.FloatTensor'.
            name = func(*args)
            return name if "cuda" in name else name.replace("torch.", "torch.cuda.", 1)
        if "device" in kwargs:
            kwargs = dict(kwargs, device=_to_cpu(kwargs["device"]))
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], (str, int, torch.device)):
            args = (args[0], _to_cpu(args[1]), *args[2:])
        return func(*args, **kwargs)


_lock = threading.Lock()
_current: CpuMode | None = None


class CpuMode:
    """The mode as an object: `enter()` and `exit()`, or a `with` block. One use each; see `cpu_mode`."""

    def __init__(self) -> None:
        self._stack: contextlib.ExitStack | None = None
        self._thread = 0

    @property
    def active(self) -> bool:
        return self._stack is not None

    def enter(self) -> CpuMode:
        global _current
        with _lock:
            if _current is not None:
                raise CpuModeError(
                    "cpu_mode = on already: its patches are the process's, so it cannot be nested or entered by "
                    "a second thread; "
                    "run inside the block that is open"
                )
            if torch.cuda.is_initialized():
                raise CpuModeError(
                    "CUDA = initialised: tensors may already be on a GPU, and CPU mode would read them as CPU "
                    "tensors; enter it "
                    "in a fresh process, before the first use of CUDA"
                )
            with contextlib.ExitStack() as stack:
                for patch in TORCH_PATCHES:
                    for target in patch.targets:
                        undo = compat.swap(
                            target, lambda _, make=patch.make: make(), label="CPU mode", version=torch.__version__
                        )
                        stack.callback(undo)
                stack.enter_context(compat.apply(*compat.CPU, *compat.GUARDS))
                stack.callback(install_optimizer(force=True).undo)
                stack.enter_context(CpuFunctionMode())
                self._stack = stack.pop_all()
            self._thread = threading.get_ident()
            _current = self
        return self

    def exit(self) -> None:
        global _current
        with _lock:
            if self._stack is None or _current is not self:
                raise CpuModeError(
                    "cpu_mode = off: this mode is not the one in force; leave each mode once, after entering it"
                )
            if threading.get_ident() != self._thread:
                raise CpuModeError(
                    "cpu_mode = on in another thread: its function mode is that thread's; leave it there"
                )
            stack, self._stack, _current = self._stack, None, None
        stack.close()

    def __enter__(self) -> CpuMode:
        return self.enter()

    def __exit__(self, *_: object) -> None:
        self.exit()


def cpu_mode() -> CpuMode:
    """A context inside which unmodified Megatron-Core builds and trains on the CPU, with gloo.

    Raises CpuModeError if CUDA is initialised or the mode is on already, CompatError if the installed Megatron-Core or
    torch lacks what is replaced; warns (CompatWarning) about a Megatron-Core other than 0.19.x.
    """
    return CpuMode()


def is_active() -> bool:
    """Whether this process is inside CPU mode."""
    return _current is not None
