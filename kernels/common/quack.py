"""What the engines on quack-kernels share: its dtypes, which row widths it takes, and tensors as the rows that its
compiled kernels accept. The package is imported by ``build`` alone: deciding needs no package and no device."""

from __future__ import annotations

import math

import torch

from ...integration.engines.arch import Arch
from ...integration.graph.ir import ITEMSIZE, TensorSpec

DTYPES = ("float32", "bfloat16", "float16")
_CLUSTERS = ("sm_90", "sm_100", "sm_103", "sm_120")  # where the package spreads a row over the blocks of a cluster


def cute_dtype(name: str | None):
    """The DSL's type of a dtype's name; None stays None, as the compile functions want an absent tensor."""
    import cutlass

    names = {"float32": "Float32", "bfloat16": "BFloat16", "float16": "Float16", "int32": "Int32", "int64": "Int64"}
    return None if name is None else getattr(cutlass, names[name])


def spreads_rows(arch: Arch) -> bool:
    return arch.name in _CLUSTERS


def dtype_reason(**specs: TensorSpec | None) -> str | None:
    """Why the kernels cannot take a dtype among ``specs``, None where they take all."""
    bad = next(((p, s.dtype) for p, s in specs.items() if s is not None and s.dtype not in DTYPES), None)
    return None if bad is None else f"computes in float32 from {', '.join(DTYPES)}; {bad[0]} is {bad[1]}"


def step_of(width: int, *dtypes: str) -> int:
    """Elements of one vector access to rows of ``width``: 16 bytes of the widest dtype where the width divides by that
    many. Row strides must be multiples of it, and addresses multiples of that many elements."""
    return math.gcd(width, *(16 // ITEMSIZE[d] for d in dtypes))


def width_reason(x: TensorSpec, *dtypes: str) -> str | None:
    """Why rows of ``x`` cannot be copied to shared memory, None where they can: an asynchronous copy moves 4 bytes or
    more."""
    width = x.shape[-1]
    if not isinstance(width, int):
        return f"compiles for one row width, and that of x {x} is known only at run time"
    if step_of(width, x.dtype, *dtypes) * ITEMSIZE[x.dtype] < 4:
        return f"rows of {width} {x.dtype} values: its copies move 4 bytes or more, the width must be even"
    return None


def fresh(x: torch.Tensor) -> torch.Tensor:
    """An empty contiguous tensor like ``x``."""
    return (
        torch.empty_like(x) if x.is_contiguous() else x.new_empty(x.shape)
    )  # the first is cheaper, and keeps a layout


def rows(x: torch.Tensor, width: int, step: int) -> torch.Tensor:
    """``x`` [..., width] of at least one row as [rows, width] that vector accesses of ``step`` elements can read: last
    stride 1, row stride a multiple of ``step`` and not less than the width, aligned address. A view where it is one,
    else a copy."""
    if x.dim() != 2:
        x = x.reshape(-1, width)
    stride, last = x.stride()
    if last != 1 or stride % step or stride < width or x.data_ptr() % (step * x.itemsize):
        return x.clone(memory_format=torch.contiguous_format)
    return x


def vector(x: torch.Tensor, step: int) -> torch.Tensor:
    """``x`` [n] with stride 1 and the alignment of ``step`` elements; a copy where it has not."""
    if x.stride(0) != 1 or x.data_ptr() % (step * x.itemsize):
        return x.clone(memory_format=torch.contiguous_format)
    return x
