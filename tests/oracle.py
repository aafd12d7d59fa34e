"""The rule of ``layerplan.integration.planner.oracle`` as assertions. Also here: equality, dirty allocators, guard rows."""

from __future__ import annotations

import torch

from layerplan.integration.planner.oracle import Errors, Wrong, limit, ulp
from layerplan.integration.planner.oracle import errors as errors_of

__all__ = ["SENTINEL", "check_guards", "compare", "equal", "errors", "guarded", "poison", "same_bits", "sentinels", "ulp"]
SENTINEL = 12345.0


def errors(actual: torch.Tensor, reference: torch.Tensor, what: str = "") -> Errors:
    """Errors over the finite entries; AssertionError where shapes, NaNs or infinities differ."""
    try:
        return errors_of(actual, reference)
    except Wrong as error:
        raise AssertionError(f"{what}: {error}") from None


def compare(actual: torch.Tensor, reference: torch.Tensor, peer: torch.Tensor, what: str = "", relative: float = 0.0) -> None:
    """Hold ``actual`` to the rule. ``reference``: fp64 (or fp32); ``peer``: PyTorch's result in the dtype of ``actual``;
    ``relative``: a further error that the caller has derived, as a fraction of max|ref|."""
    ours = errors(actual, reference, what)
    try:
        allowed = limit(actual.dtype, reference, peer, relative)
    except Wrong as error:
        raise AssertionError(f"{what} (peer): {error}") from None
    for name in ("largest", "rms"):
        got, most = getattr(ours, name), getattr(allowed, name)
        assert got <= most, f"{what}: {name} error {got:.3e} over {most:.3e}, twice PyTorch's and an ulp of {actual.dtype} at max|ref|"


def equal(actual: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    """Bit for bit, NaN refused."""
    assert actual.shape == expected.shape, f"{what}: shape {list(actual.shape)}, expected {list(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, expected {expected.dtype}"
    assert not actual.isnan().any(), f"{what}: holds NaN"
    wrong = int((actual != expected).sum())
    assert not wrong, f"{what}: {wrong} of {actual.numel()} values differ"


def same_bits(actual: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    """Byte for byte, on whatever devices; a float32 NaN is like any other."""
    assert actual.shape == expected.shape, f"{what}: shape {list(actual.shape)}, expected {list(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, expected {expected.dtype}"
    a, b = actual.detach().cpu(), expected.detach().cpu()
    if a.dtype == torch.float32:
        a, b = (torch.where(t.isnan(), float("nan"), t) for t in (a, b))
    a, b = (t.contiguous().flatten().view(torch.uint8) for t in (a, b))
    wrong = (a != b).nonzero().flatten()
    shown = [(int(i), hex(int(a[i])), hex(int(b[i]))) for i in wrong[:4]]
    assert not len(wrong), f"{what}: {len(wrong)} of {len(a)} bytes differ; (place, actual, expected): {shown}"


def poison(*like: torch.Tensor) -> None:
    """Make the allocator dirty: allocate buffers of these sizes, fill them with NaN, free them. Call just before."""
    held = [torch.full_like(t, float("nan")) for t in like if t.is_floating_point() for _ in range(3)]
    del held


def sentinels(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """A tensor of SENTINEL; of bytes 0x5b where the dtype has one byte."""
    if dtype.itemsize == 1:
        return torch.full(shape, 0x5B, dtype=torch.uint8, device=device).view(dtype)
    return torch.full(shape, SENTINEL, dtype=dtype, device=device)


def guarded(t: torch.Tensor, offset: int = 1, rows: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy of ``t`` at storage offset ``offset`` between sentinels: (the copy, its whole buffer for ``check_guards``)."""
    pad = rows * max(t.shape[-1] if t.dim() else 1, 8)
    buffer = sentinels((offset + t.numel() + pad,), t.dtype, t.device)
    inner = buffer[offset : offset + t.numel()].view(t.shape)
    inner.copy_(t.detach())
    return inner, buffer


def check_guards(inner: torch.Tensor, buffer: torch.Tensor, what: str = "") -> None:
    """The sentinels around a guarded tensor are as they were."""
    begin, end = inner.storage_offset(), inner.storage_offset() + inner.numel()
    same = buffer.view(torch.uint8) == sentinels(tuple(buffer.shape), buffer.dtype, buffer.device).view(torch.uint8)
    same = same.view(len(buffer), -1).all(1)
    wrong = int((~same[:begin]).sum() + (~same[end:]).sum())
    assert not wrong, f"{what}: {wrong} values outside of the tensor were written"
