"""Compiled kernels of this process: what an engine asks for is compiled or loaded once."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

from ..engines.arch import Arch
from ..engines.contract import BuildContext, Kernel, Offer, Region
from ..settings import cache_folders
from .build import obtain
from .compiler import Compiler
from .disk import Store
from .key import KernelError, chip, keyed, label

_functions: dict[tuple[str, str, str], Callable[..., Any]] = {}
_compilers: dict[str, Compiler] = {}
_one = threading.RLock()  # autograd's threads build too


class CompileInCapture(KernelError):
    """A kernel that this process has not loaded was asked for while a CUDA graph is captured."""


def context(region: Region, arch: Arch, offer: Offer) -> BuildContext:
    """What an engine builds ``region`` from."""
    return BuildContext(region, arch, offer, functools.partial(function, arch=arch, region=region))


def function(kernel: Kernel, arch: Arch, region: Region | None = None) -> Callable[..., Any]:
    """``kernel`` for ``arch``: from this process, from the cache, or compiled now. ``region``: whom it is for.

    CompileInCapture while the current stream captures, unless this process has it; KernelError where it does not
    compile."""
    key = kernel.target, repr(kernel.constants), arch.name  # 1, 1.0 and True are one value to a dict
    found = _functions.get(key)
    if found is None:
        _refuse_in_capture(kernel, arch, region)
        with _one:
            found = _functions.get(key)
            if found is None:
                by = _compilers.setdefault(arch.name, Compiler(chip(arch)))
                found = _functions[key] = obtain(keyed(kernel, arch), Store(cache_folders()), by)
    return found


def _refuse_in_capture(kernel: Kernel, arch: Arch, region: Region | None) -> None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized() or not torch.cuda.is_current_stream_capturing():
        return
    where = "" if region is None else f" for {'+'.join(region.ops)} of shape class {_shape_class(region)}"
    raise CompileInCapture(
        f"{label(kernel.target, kernel.constants)} on {arch.name}{where}: is not loaded, and a CUDA graph is being "
        "captured, which allows neither compiling nor loading; before the capture call layerplan.warm(model, shapes), "
        "or run these shapes once"
    )


def _shape_class(region: Region) -> str:
    return "(" + ", ".join(f"{v}: {region.graph.specs[v]}" for v in region.graph.inputs) + ")"
