"""Host side of kernels that go by row_map: where a launch finds its tensors, how many rows there are, and views or
copies that the kernels can read."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ...integration.graph.ops.moe import capacity
from ..common.rows import vector

type Find = Callable[[tuple, str], torch.Tensor | None]

MOST_SLOTS = 32  # of a token: the kernels are unrolled over them


def slots_reason(slots: object) -> str | None:
    """Why the kernels cannot take so many slots of a token, None where they can."""
    if isinstance(slots, int) and 0 < slots <= MOST_SLOTS:
        return None
    return f"{slots} slots of a token: compiles for a number from 1 to {MOST_SLOTS}"


def whole(t: torch.Tensor) -> torch.Tensor:
    """``t`` [tokens, slots] contiguous, at an address that is a multiple of 16 bytes; a copy where it is not."""
    fine = t.stride() == (t.shape[1], 1) and not t.data_ptr() % 16
    return t if fine else t.clone(memory_format=torch.contiguous_format)


def finder(places: Mapping[str, int]) -> Find:
    """A function that finds a port's tensor among those that a launch is given, by the port's place there; None for one
    that has none."""
    return lambda given, port: given[places[port]] if port in places else None


def ends(align: int, find: Find) -> Callable[[tuple], tuple]:
    """A function from a launch's tensors to counts and offsets, Nones where no padding has to be filled."""
    if align == 1:
        return lambda given: (None, None)
    return lambda given: (vector(find(given, "counts"), 1), vector(find(given, "offsets"), 1))


def room(experts: int, align: int) -> Callable[[torch.Tensor], int]:
    """A function from row_map to the number of rows."""
    return lambda row_map: capacity(*row_map.shape, experts, align)
