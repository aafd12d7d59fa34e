"""NVTX ranges round the launches of a plan: what a profiler's timeline calls a kernel's place in the model.

Off by default. LAYERPLAN_NVTX=1 has the ranges written into the generated code (``program.py``), so that off costs
nothing.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from ..settings import settings

Ranges = tuple[Callable[[str], Any], Callable[[], Any]]
"""(push a range of this name, pop the innermost)."""


@functools.cache
def ranges() -> Ranges | None:
    """torch's NVTX functions where LAYERPLAN_NVTX asks for ranges, else None. Without CUDA the variable is ignored,
    with one warning. Asked where code is generated, never on the hot path."""
    if not settings().nvtx:
        return None
    if not torch.cuda.is_available():
        warnings.warn(
            "layerplan: LAYERPLAN_NVTX = 1 is ignored: PyTorch sees no CUDA device here, and NVTX is CUDA's",
            stacklevel=2,
        )
        return None
    return torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop


def text(module: str, direction: str, engine: str, ops: tuple[str, ...]) -> str:
    """A range's name: module, pass, engine id and ops, as in ``decoder.layers.0.mlp forward linear/torch linear``."""
    return f"{module or 'ops'} {direction} {engine} {'+'.join(ops)}"
