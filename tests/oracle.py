"""What right means: an error at most twice PyTorch's in the same dtype, plus one ulp of the output dtype at max|ref|.

Both the largest and the root-mean-square error are held to that (root mean square, so that the ulp has the same unit).
NaN never passes, infinities must stand in the same places with the same signs. Also here: dirty allocators, guard rows.
"""

from __future__ import annotations

import dataclasses
import math

import torch

SENTINEL = 12345.0


@dataclasses.dataclass(frozen=True)
class Errors:
    largest: float
    rms: float


def ulp(dtype: torch.dtype, at: float) -> float:
    """The spacing of ``dtype`` at magnitude ``at``; the smallest normal's spacing below it."""
    info = torch.finfo(dtype)
    exponent = math.floor(math.log2(max(at, info.tiny)))
    return info.eps * 2.0**exponent


def errors(actual: torch.Tensor, reference: torch.Tensor, what: str = "") -> Errors:
    """Errors over the finite entries; AssertionError where shapes, NaNs or infinities differ."""
    assert actual.shape == reference.shape, f"{what}: shape {list(actual.shape)}, reference {list(reference.shape)}"
    a, r = actual.detach().double().cpu(), reference.detach().double().cpu()
    assert not r.isnan().any(), f"{what}: the reference itself holds NaN"
    bad = int(a.isnan().sum())
    assert not bad, f"{what}: {bad} of {a.numel()} values are NaN"
    infinite = r.isinf() | a.isinf()
    wrong = int((a[infinite] != r[infinite]).sum())
    assert not wrong, f"{what}: {wrong} infinities are misplaced or have the wrong sign"
    d = (a - r)[~infinite]
    if not d.numel():
        return Errors(0.0, 0.0)
    return Errors(float(d.abs().max()), float(d.square().mean().sqrt()))


def compare(actual: torch.Tensor, reference: torch.Tensor, peer: torch.Tensor, what: str = "", relative: float = 0.0) -> None:
    """Hold ``actual`` to the rule. ``reference``: fp64 (or fp32); ``peer``: PyTorch's result in the dtype of ``actual``;
    ``relative``: a further error that the caller has derived, as a fraction of max|ref|."""
    ours = errors(actual, reference, what)
    p = peer.detach().double().cpu()
    finite = torch.isfinite(p)
    same = torch.isfinite(reference.cpu()) == finite
    theirs = errors(torch.where(same, p, reference.detach().double().cpu()), reference, f"{what} (peer)")
    r = reference.detach().double()
    r = r[torch.isfinite(r)]
    top = float(r.abs().max()) if r.numel() else 0.0
    unit = ulp(actual.dtype, top) + relative * top
    for name in ("largest", "rms"):
        limit = 2 * getattr(theirs, name) + unit
        got = getattr(ours, name)
        assert got <= limit, f"{what}: {name} error {got:.3e} over {limit:.3e} (PyTorch's {getattr(theirs, name):.3e}, one ulp {unit:.3e})"


def equal(actual: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    """Bit for bit, NaN refused."""
    assert actual.shape == expected.shape, f"{what}: shape {list(actual.shape)}, expected {list(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, expected {expected.dtype}"
    assert not actual.isnan().any(), f"{what}: holds NaN"
    wrong = int((actual != expected).sum())
    assert not wrong, f"{what}: {wrong} of {actual.numel()} values differ"


def poison(*like: torch.Tensor) -> None:
    """Make the allocator dirty: allocate buffers of these sizes, fill them with NaN, free them. Call just before."""
    held = [torch.full_like(t, float("nan")) for t in like if t.is_floating_point() for _ in range(3)]
    del held


def guarded(t: torch.Tensor, offset: int = 1, rows: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy of ``t`` at storage offset ``offset`` between sentinels: (the copy, its whole buffer for ``check_guards``)."""
    pad = rows * max(t.shape[-1] if t.dim() else 1, 8)
    buffer = torch.full((offset + t.numel() + pad,), SENTINEL, dtype=t.dtype, device=t.device)
    inner = buffer[offset : offset + t.numel()].view(t.shape)
    inner.copy_(t.detach())
    return inner, buffer


def check_guards(inner: torch.Tensor, buffer: torch.Tensor, what: str = "") -> None:
    """The sentinels around a guarded tensor are as they were."""
    begin = inner.storage_offset()
    sentinel = torch.tensor(SENTINEL, dtype=buffer.dtype, device=buffer.device)
    outside = torch.cat((buffer[:begin], buffer[begin + inner.numel() :]))
    assert bool((outside == sentinel).all()), f"{what}: {int((outside != sentinel).sum())} values outside of the tensor were written"
