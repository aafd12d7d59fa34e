"""What right means: an error at most twice PyTorch's in the same dtype, plus one ulp of the output dtype at max|ref|.

Both the largest and the root-mean-square error are held to that (root mean square, so that the ulp has the same unit).
NaN never passes, infinities must stand in the same places with the same signs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch

_CHUNK = 1 << 24  # elements that are held in float64 at once: a model's logits would not fit


class Wrong(ValueError):
    """A result that no tolerance covers: another shape, a NaN, a misplaced infinity."""


@dataclasses.dataclass(frozen=True, slots=True)
class Errors:
    """The largest and the root-mean-square error of one tensor, or the limits of both."""

    largest: float
    rms: float

    def within(self, limit: Errors) -> bool:
        """Whether both are at most those of ``limit``."""
        return self.largest <= limit.largest and self.rms <= limit.rms


def ulp(dtype: torch.dtype, at: float) -> float:
    """The spacing of ``dtype`` at magnitude ``at``; the smallest normal's spacing below it."""
    info = torch.finfo(dtype)
    exponent = math.floor(math.log2(max(at, info.tiny)))
    return info.eps * 2.0**exponent


def _chunks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Tensors of one shape in float64, some of their elements at a time, on the device of the first."""
    device = tensors[0].device
    parts = [t.detach().reshape(-1).split(_CHUNK) for t in tensors]
    for chunk in zip(*parts, strict=True):
        yield tuple(c.to(device).double() for c in chunk)


def errors(actual: torch.Tensor, reference: torch.Tensor) -> Errors:
    """Errors over the finite entries. Raises Wrong where shapes, NaNs or infinities differ; the reference may hold
    no NaN."""
    if actual.shape != reference.shape:
        raise Wrong(f"shape {list(actual.shape)}, reference {list(reference.shape)}")
    largest = squares = 0.0
    count = bad = wrong = 0
    for a, r in _chunks(actual, reference):
        if r.isnan().any():
            raise Wrong("the reference itself holds NaN")
        bad += int(a.isnan().sum())
        infinite = r.isinf() | a.isinf()
        wrong += int((a[infinite] != r[infinite]).sum())
        d = (a - r)[~infinite]
        if d.numel():
            largest = max(largest, float(d.abs().max()))
            squares += float(d.square().sum())
            count += d.numel()
    if bad:
        raise Wrong(f"{bad} of {actual.numel()} values are NaN")
    if wrong:
        raise Wrong(f"{wrong} infinities are misplaced or have the wrong sign")
    return Errors(largest, math.sqrt(squares / count) if count else 0.0)


def _top(reference: torch.Tensor) -> float:
    """max|reference| over its finite entries."""
    tops = (float(r.nan_to_num(0.0, 0.0, 0.0).abs().max()) for (r,) in _chunks(reference) if r.numel())
    return max(tops, default=0.0)


def limit(dtype: torch.dtype, reference: torch.Tensor, peer: torch.Tensor, relative: float = 0.0) -> Errors:
    """The largest errors that a result of ``dtype`` may have. ``reference``: float64 (or float32); ``peer``:
    PyTorch's result in the dtype at hand; ``relative``: a further error that the caller has derived, as a fraction
    of max|ref|. Where the peer overflows, it has no error. Raises Wrong as ``errors`` does."""
    here = reference.to(peer.device)
    same = torch.isfinite(here) == torch.isfinite(peer)
    theirs = errors(peer if bool(same.all()) else torch.where(same, peer.double(), here.double()), reference)
    top = _top(reference)
    unit = (ulp(dtype, top) if dtype.is_floating_point else 0.0) + relative * top
    return Errors(2 * theirs.largest + unit, 2 * theirs.rms + unit)
