"""From tensors to specs: which sizes are static and which are token dims of a shape class."""

from __future__ import annotations

import torch

from ..graph.ir import Dim, Size, TensorSpec

_NAMES = {getattr(torch, n): n for n in (
    "float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool",
    "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")}  # fmt: skip


def dtype_name(dtype: torch.dtype) -> str:
    try:
        return _NAMES[dtype]
    except KeyError:
        raise TypeError(f"dtype {dtype}: layerplan handles {', '.join(_NAMES.values())}") from None


def bucket(size: int) -> int:
    """The smallest power of two that is at least ``size``: the shape class of a token dim."""
    return 1 << max(size - 1, 0).bit_length()


class SpecMaker:
    """Makes the specs of one call's tensors. A pattern names the dims: ``"*t n!"``. ``!`` marks a static dim, ``*`` any
    number of leading ones. Token dims of one name and one size are one symbol; a size of 1 is always static, since a
    symbol stands for many sizes and broadcasting makes 1 special."""

    def __init__(self) -> None:
        self._dims: dict[tuple[str, int], Dim] = {}

    def __call__(self, tensor: torch.Tensor, pattern: str) -> TensorSpec:
        names = pattern.split()
        rank = tensor.dim()
        if names and names[0].startswith("*"):
            lead = rank - len(names) + 1
            names = [f"{names[0][1:]}{i}" for i in range(max(lead, 0))] + names[1:]
        if len(names) != rank:  # the op's own rule will refuse it, with names
            names = [f"r{i}" for i in range(rank)]
        shape = tuple(self._size(n, int(s)) for n, s in zip(names, tensor.shape, strict=True))
        return TensorSpec(shape, dtype_name(tensor.dtype))

    def _size(self, name: str, size: int) -> Size:
        if name.endswith("!") or size <= 1:
            return size
        key = (name, size)
        if key not in self._dims:
            clash = sum(1 for n, _ in self._dims if n == name)
            self._dims[key] = Dim(name + "'" * clash, bucket(size))
        return self._dims[key]
