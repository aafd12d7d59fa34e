"""Tensors as the rows that compiled kernels take: which dtypes, how wide a vector access may be, and views or copies
that fit it. Deciding needs no package and no device."""

from __future__ import annotations

import math

import torch

from ...integration.graph.ir import ITEMSIZE, TensorSpec

DTYPES = ("float32", "bfloat16", "float16")


def dtype_reason(**specs: TensorSpec | None) -> str | None:
    """Why the kernels cannot take a dtype among ``specs``, None where they take all."""
    bad = next(((p, s.dtype) for p, s in specs.items() if s is not None and s.dtype not in DTYPES), None)
    return None if bad is None else f"computes in float32 from {', '.join(DTYPES)}; {bad[0]} is {bad[1]}"


def step_of(width: int, *dtypes: str) -> int:
    """Elements of one vector access to rows of ``width``: 16 bytes of the widest of ``dtypes`` where the width divides
    by that many. Row strides must be multiples of it, and addresses multiples of that many elements, or of 16 bytes
    where that is less."""
    return math.gcd(width, *(16 // ITEMSIZE[d] for d in dtypes))


def fresh(x: torch.Tensor) -> torch.Tensor:
    """An empty contiguous tensor like ``x``."""
    return (
        torch.empty_like(x) if x.is_contiguous() else x.new_empty(*x.shape)
    )  # the first is cheaper, and keeps a layout


def rows(x: torch.Tensor, width: int, step: int) -> torch.Tensor:
    """``x`` [..., width] of at least one row as [rows, width] that vector accesses of ``step`` elements can read: last
    stride 1, row stride a multiple of ``step`` and not less than the width, aligned address. A view where it is one,
    else a copy."""
    if x.dim() != 2:
        x = x.reshape(-1, width)
    stride, last = x.stride()
    if last != 1 or stride % step or stride < width or x.data_ptr() % min(16, step * x.itemsize):
        return x.clone(memory_format=torch.contiguous_format)
    return x


def dense(x: torch.Tensor) -> torch.Tensor:
    """``x`` row-major at an address that is a multiple of 16 bytes: itself or a copy."""
    return x if x.is_contiguous() and not x.data_ptr() % 16 else x.clone(memory_format=torch.contiguous_format)


def vector(x: torch.Tensor, step: int) -> torch.Tensor:
    """``x`` [n] with stride 1 and the alignment of ``step`` elements; a copy where it has not."""
    if x.stride(0) != 1 or x.data_ptr() % min(16, step * x.itemsize):
        return x.clone(memory_format=torch.contiguous_format)
    return x
