"""quantize and dequantize once more, from their definition and without a line of the op table: scales in float64 by
exponents, 8-bit values by search in the list of all that there are."""

from __future__ import annotations

import torch

LARGEST = {torch.float8_e4m3fn: (448.0, 8), torch.float8_e5m2: (57344.0, 15)}  # M = 1.75 * 2^m: (M, m)
TENSOR, BLOCK, MX = (0, 0), (1, 128), (1, 32)


def nearest(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 to 8 bits: the value of ``dtype`` that is closest, that with an even code of two; the largest for all
    above; one NaN."""
    codes = torch.arange(128, dtype=torch.uint8)
    values = codes.view(dtype).double()
    codes, values = codes[values.isfinite()], values[values.isfinite()]
    size = x.double().abs().nan_to_num(nan=0.0, posinf=1e300)
    above = torch.searchsorted(values, size).clamp(1, len(values) - 1)
    low, high = values[above - 1], values[above]
    up = (size - low > high - size) | ((size - low == high - size) & (codes[above] % 2 == 0)) | (size >= values[-1])
    found = torch.where(up, codes[above], codes[above - 1]) + torch.where(x.signbit(), 128, 0).to(torch.uint8)
    return torch.where(x.isnan(), 0x7F, found).to(torch.uint8).view(dtype)


def round32(x: torch.Tensor) -> torch.Tensor:
    """float64 to float32; a product or quotient of float32 numbers in float64 rounds to what float32 arithmetic
    gives."""
    return x.float()


def block_scales(
    amax: torch.Tensor, dtype: torch.dtype, block: tuple[int, int], power_of_two: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, scale_inv as it is stored) of blocks with these largest magnitudes, float32."""
    most, m = LARGEST[dtype]
    amax = amax.double().clamp(max=torch.finfo(torch.float32).max)
    fraction, exponent = torch.frexp(amax)  # amax = fraction * 2^exponent, fraction in [0.5, 1)
    power = (exponent - (m + 1) + (fraction > 0.875).int()).clamp(min=-127)  # 2^power >= amax / M, the smallest one
    power = torch.where(amax == 0, -127, power)
    if block == MX:
        return torch.ldexp(torch.ones_like(amax), -power).float(), (power + 127).to(torch.uint8).view(
            torch.float8_e8m0fnu
        )
    if power_of_two:
        scale = torch.ldexp(torch.ones_like(amax), -power)
    else:
        scale = round32(most / amax).double().clamp(max=2.0**127)
    scale = torch.where(amax == 0, 1.0, scale)
    return scale.float(), round32(1.0 / scale)


def by_rows(
    x: torch.Tensor, dtype: torch.dtype, block: tuple[int, int], power_of_two: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(data, scale_inv row-major) of float32 ``x`` [rows, n], block after block."""
    data, scales = torch.zeros(x.shape, dtype=torch.uint8), []
    for start in range(0, x.shape[1], block[1]):
        part = x[:, start : start + block[1]]
        amax = torch.where(part.isnan(), 0.0, part.abs()).amax(1)
        scale, stored = block_scales(amax, dtype, block, power_of_two)
        data[:, start : start + block[1]] = nearest(round32(part.double() * scale.double()[:, None]), dtype).view(
            torch.uint8
        )
        scales.append(stored.view(torch.uint8) if block == MX else stored)
    kind, none = (torch.uint8, torch.float8_e8m0fnu) if block == MX else (torch.float32, torch.float32)
    stacked = torch.stack(scales, 1) if scales else torch.zeros(x.shape[0], 0, dtype=kind)
    return data.view(dtype), stacked.view(none)


def swizzled(scales: torch.Tensor) -> torch.Tensor:
    """Byte by byte: tile (row / 128, column / 4), in it r % 32 * 16 + r / 32 * 4 + c."""
    rows, columns = scales.shape
    down, across = -(-rows // 128), -(-columns // 4)
    out = torch.zeros(down * across * 512, dtype=torch.uint8)
    for c in range(columns):
        r = torch.arange(rows)
        out[(r // 128 * across + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = scales.view(torch.uint8)[
            :, c
        ]
    return out.view(down * 128, across * 4).view(scales.dtype)


def plain_quantize(
    x: torch.Tensor,
    block: tuple[int, int],
    dtype: torch.dtype,
    *,
    layout: str = "row",
    power_of_two: bool = False,
    scale: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """All outputs by port; ``x`` [..., n] on a CPU."""
    flat = x.float().reshape(x.shape[:-1].numel(), x.shape[-1])
    if scale is not None:
        data = nearest(round32(flat.double() * scale.double()), dtype)
        size = x.float().abs()
        amax = (
            torch.tensor([float("nan")])
            if size.isnan().any()
            else torch.cat((size.flatten(), torch.zeros(1))).max().reshape(1)
        )
        transposed = data.view(torch.uint8).t().contiguous().view(dtype)
        return {
            "data": data.view(x.shape),
            "scale_inv": round32(1.0 / scale.double()),
            "data_t": transposed,
            "amax": amax,
        }
    out: dict[str, torch.Tensor] = {}
    for port, values in (("", flat), ("_t", flat.t().contiguous())):
        data, scales = by_rows(values, dtype, block, power_of_two)
        lead = values.shape[:1] if port else x.shape[:-1]
        out[f"data{port}"] = data.view(*lead, values.shape[1])
        out[f"scale_inv{port}"] = swizzled(scales) if layout == "swizzled" else scales.view(*lead, scales.shape[1])
    return out


def plain_dequantize(
    data: torch.Tensor, scale_inv: torch.Tensor, block: tuple[int, int], layout: str = "row"
) -> torch.Tensor:
    """float32 of ``data`` [rows, n] on a CPU."""
    values, (rows, n) = data.float().double(), data.shape
    if block == TENSOR:
        return round32(values * scale_inv.double())
    count = -(-n // block[1])
    if layout == "swizzled":
        flat, across = scale_inv.view(torch.uint8).flatten(), -(-count // 4)
        r, c = torch.arange(rows)[:, None], torch.arange(count)[None]
        scale_inv = flat[(r // 128 * across + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4].view(
            scale_inv.dtype
        )
    return round32(values * scale_inv.float().double()[:, torch.arange(n) // block[1]])


def hard(x: torch.Tensor) -> torch.Tensor:
    """``x`` with what breaks kernels in it: NaNs of both signs, infinities, zeros of both signs, denormals, the largest
    numbers, values at the edges of 8-bit ranges; a row of zeros, a row of NaN and one of denormals."""
    x = x.clone()
    if x.dim() > 1 and x.shape[0] > 6:
        x[2], x[4] = 0, float("nan")
        x[5] *= 1e-6 if x.dtype == torch.float16 else 1e-39
    if (flat := x.view(-1)).numel() > 40:
        nan, inf = float("nan"), float("inf")
        values = torch.tensor(
            [nan, -nan, inf, -inf, 0.0, -0.0, 1e-40, -3e-39, 3e38, 448.0, -448.0, 464.0, 57344.0, 65504.0, 2.0**-126]
        )
        flat[:: flat.numel() // len(values)][: len(values)] = values.to(x.dtype)
    return x
