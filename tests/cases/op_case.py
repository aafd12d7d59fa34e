"""What a row of the catalogue is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

Tensors = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class OpCase:
    """``make(gen, dtype)`` gives inputs on the CPU; ``diff`` names those that get gradients; ``ours(t, **kw)`` and
    ``plain(t)`` return tuples of outputs."""

    id: str
    op: str
    make: Callable[[torch.Generator, torch.dtype], Tensors]
    diff: tuple[str, ...]
    ours: Callable[..., tuple]
    plain: Callable[[Tensors], tuple]
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    peer: Callable[[Tensors], tuple] | None = None  # where PyTorch has a function of its own
    exponent: Callable[[Tensors], float] | None = None  # largest |LSE|, where the backward rebuilds exp(x - LSE)
    exact: bool = False  # outputs are ``plain``'s in the dtype at hand, on a CPU, bit for bit; nothing gets a gradient


def randn(gen: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=gen, dtype=torch.float64).to(dtype)
