"""What may differ between two runs on equal inputs: nothing, but for gradients that the planned engine sums by atomics.

``watching`` notes what runs, ``same`` holds two results to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from layerplan.integration.planner.planner import PlannedRegion
from layerplan.integration.planner.runner import Runner

from .. import oracle

# gradients that an engine without a deterministic offer sums by atomics; all of an engine that is not named here
_SUMMED_BY_ATOMICS = {"attention/torch_cudnn": ("dq",), "attention/torch_flash": ("dq",)}
_ATTENTION = ("dq", "dk", "dv")


class Watched:
    """The plans behind the calls inside a ``watching`` block. Read it after the backwards have run."""

    def __init__(self) -> None:
        self.ran: list[Any] = []

    def backward_regions(self) -> list[PlannedRegion]:
        """Regions of every backward: as planned with its forward, and as planned for the gradients that arrived."""
        parts = [p for e in self.ran for p in (e.plan.backward, *(made.forward for made in e.plans[1:])) if p is not None]
        return [r for part in parts for r in part.regions]

    def varying(self) -> set[str]:
        """Names of the gradients that may differ between runs, by the offers of the engines that were planned."""
        loose = [r for r in self.backward_regions() if not r.offer.deterministic]
        return {name for r in loose for name in _SUMMED_BY_ATOMICS.get(r.engine, _ATTENTION)}


@contextlib.contextmanager
def watching() -> Iterator[Watched]:
    """Note the plan of every call of a runner (``layerplan.ops``, the modules) in the block."""
    watched, call = Watched(), Runner.__call__

    def noted(self, *tensors, sink=None):
        result = call(self, *tensors, sink=sink)
        watched.ran.append(self.entries[self._key(*tensors)])
        return result

    with mock.patch.object(Runner, "__call__", noted):
        yield watched


def same(watched: Watched, name: str, a: torch.Tensor, b: torch.Tensor, what: str) -> None:
    """Bitwise equal, but for what the planned engine sums by atomics on a GPU: that is ``near``."""
    hold = near if b.is_cuda and name in watched.varying() else oracle.equal
    hold(a, b, f"{name} of {what}")


def near(a: torch.Tensor, b: torch.Tensor, what: str) -> None:
    """Two orders of one float32 sum, rounded to the dtype of ``a`` and ``b``.

    The sum has at most 2^5 terms here (tiles of keys, or heads of a group), each at most about max|b|. Two orders of it are
    apart by at most 2^5 roundings each, of partial sums of at most 2^5 max|b|: 2 * 2^5 * 2^-24 * 2^5 max|b| = 2^-13 max|b|.
    Then each is rounded once to the dtype, and two neighbours are one ulp apart: at most ``eps`` of their value.
    """
    assert not a.isnan().any() and not b.isnan().any(), f"{what}: holds NaN"
    atol, rtol = 2**-13 * float(b.abs().max()) if b.numel() else 0.0, torch.finfo(b.dtype).eps
    torch.testing.assert_close(a, b, atol=atol, rtol=rtol, msg=lambda m: f"{what}: {m}")
