"""What flash-attn-4 compiles, taken out of its caches.

The package's function runs once per kind of code on fake tensors, set to launch nothing: it picks its tiles and
compiles, and the kernels that it asked its caches for are kept. Its persistent cache works as ever
(``FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1``). Nothing here needs a GPU; without one ``CUTE_DSL_ARCH`` names the
target.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

from ...integration.engines.arch import Arch

_TOKENS = 4096  # of the fake tensors: more than one tile in every direction


@dataclasses.dataclass(frozen=True, slots=True)
class Code:
    """Everything that changes the compiled code. ``causal``: a plain causal mask, without a window; ``left`` and
    ``right``: whether the window has that side."""

    arch: Arch
    dtype: str
    d: int
    dv: int
    group: int
    packed: bool
    causal: bool
    left: bool
    right: bool
    sink: str | None = None
    dlse: bool = False
    deterministic: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Backward:
    """The backward's kernels and how they pad: rows to ``tile_m`` and ``tile_n`` (``cluster`` of these), the
    accumulators' head dims to ``multiple``. ``post``: for dq, or for dq, dk and dv, or none (sm_100's kernel of head
    dim 256 writes its results itself)."""

    pre: Callable[..., Any]
    main: Callable[..., Any]
    post: tuple[Callable[..., Any], ...]
    tile_m: int
    tile_n: int
    cluster: int
    multiple: int


class _Asked:
    """Stands in for one of the package's caches: passes everything on, keeps the keys that were asked for, in order."""

    def __init__(self, cache: Any) -> None:
        self.cache, self.keys = cache, []

    def __contains__(self, key: Any) -> bool:
        self.keys.append(key)
        return key in self.cache

    def __getitem__(self, key: Any) -> Any:
        return self.cache[key]

    def __setitem__(self, key: Any, kernel: Any) -> None:
        self.cache[key] = kernel

    @property
    def kernels(self) -> list[Any]:
        return [self.cache[k] for k in self.keys]


@contextlib.contextmanager
def _replaced(owner: Any, **values: Any):
    before = {n: getattr(owner, n) for n in values}
    try:
        for n, v in values.items():
            setattr(owner, n, v)
        yield
    finally:
        for n, v in before.items():
            setattr(owner, n, v)


_lock = threading.Lock()
_compiled: dict[tuple[str, Code], Any] = {}


def _once(make: Callable[[Code], Any]) -> Callable[[Code], Any]:
    """``make`` once per code; one at a time, since it changes the package's globals while it runs."""

    @functools.wraps(make)
    def get(code: Code) -> Any:
        key = (make.__name__, code)
        with _lock:
            if key not in _compiled:
                _compiled[key] = make(code)
            return _compiled[key]

    return get


@contextlib.contextmanager
def _package(code: Code):
    """The package, set to compile for ``code.arch`` and to launch nothing: (its module, its caches' stand-ins by the
    name of the function that they belong to)."""
    from flash_attn.cute import interface
    from torch._subclasses.fake_tensor import FakeTensorMode

    cached = ("_flash_attn_fwd", "_flash_attn_bwd", "_bwd_preprocess", "_bwd_postprocess_convert")
    asked = {n: _Asked(getattr(interface, n).compile_cache) for n in cached}
    major, minor = code.arch.capability
    target = {"_get_device_arch": lambda: 10 * major + minor, "get_num_sms_for_selection": lambda *_: code.arch.sms}
    with contextlib.ExitStack() as stack:
        for name, cache in asked.items():
            stack.enter_context(_replaced(getattr(interface, name), compile_cache=cache))
        stack.enter_context(_replaced(interface, **target))
        # semaphores are converted through torch's own DLPack, which asks a driver where the others do not
        through_ffi = functools.partial(interface.utils.from_dlpack, enable_tvm_ffi=True)
        stack.enter_context(_replaced(interface.utils, from_dlpack=through_ffi))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="Argument aux_data")
        stack.enter_context(FakeTensorMode())
        yield interface, asked


def _fakes(code: Code) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Fake tensors and options of a call that has ``code``."""
    lead = (2 * _TOKENS,) if code.packed else (2, _TOKENS)

    def new(*shape: int, dtype: str = code.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype), device="cuda")

    heads = 2 * code.group
    t = {
        "q": new(*lead, heads, code.d),
        "k": new(*lead, 2, code.d),
        "v": new(*lead, 2, code.dv),
        "out": new(*lead, heads, code.dv),
    }
    t["lse"] = new(*((heads, 2 * _TOKENS) if code.packed else (2, heads, _TOKENS)), dtype="float32")
    options: dict[str, Any] = {
        "causal": code.causal,
        "window_size_left": 64 if code.left else None,
        "window_size_right": 64 if code.right else None,
    }
    if code.packed:
        options |= {f"cu_seqlens_{s}": new(3, dtype="int32") for s in "qk"}
    if code.sink is not None:
        options["learnable_sink"] = new(heads, dtype=code.sink)
    return t, options


@_once
def forward_kernel(code: Code) -> Callable[..., Any]:
    """The forward's kernel, which also writes the LSE; compiles in 2 to 10 s where it is not there yet."""
    with _package(code) as (interface, asked):
        t, options = _fakes(code)
        interface._flash_attn_fwd(t["q"], t["k"], t["v"], out=t["out"], lse=t["lse"], **options)
    (kernel,) = asked["_flash_attn_fwd"].kernels
    return kernel


@_once
def backward_kernels(code: Code) -> Backward:
    """The backward's kernels; they compile in 2 to 10 s where they are not there yet."""
    with _package(code) as (interface, asked):
        t, options = _fakes(code)
        dlse = torch.empty_like(t["lse"]) if code.dlse else None
        interface._flash_attn_bwd(t["q"], t["k"], t["v"], t["out"], torch.empty_like(t["out"]), t["lse"],
                                  deterministic=code.deterministic, dlse=dlse, **options)  # fmt: skip
        (pre,), (main,) = asked["_bwd_preprocess"].kernels, asked["_flash_attn_bwd"].kernels
        post = asked["_bwd_postprocess_convert"]
        padding = _named(interface._compile_bwd_preprocess, asked["_bwd_preprocess"].keys[0])
        tiles = _named(interface._compile_bwd_postprocess, post.keys[1]) if len(post.keys) == 3 else {}
        # without a postprocess of dk only semaphores ask for the cluster: it stands in the main kernel's key of sm_100
        alone = asked["_flash_attn_bwd"].keys[0][12] if code.arch.capability[0] == 10 else 1
        tile_n, cluster = tiles.get("block_size", 0), tiles.get("cluster_size", alone)
    tile_m, multiple = padding["m_block_size"], padding["hdim_multiple_of"]
    return Backward(pre, main, tuple(post.kernels), tile_m, tile_n, cluster, multiple)


def _named(function: Callable[..., Any], key: tuple) -> dict[str, Any]:
    """The package's keys are its compile functions' arguments: by name."""
    return inspect.signature(function).bind(*key).arguments


def aux() -> tuple:
    """The kernels' argument for what score modifications read: nothing."""
    from flash_attn.cute.utils import AuxData

    return AuxData()
