"""quantize and dequantize: tensors as 8-bit floats and scales, per tensor, in blocks of 1 x 128, or as MXFP8.

``x`` [..., n] (bfloat16, float16 or float32) is taken as rows. ``data`` has its shape; ``data_t`` [n, rows] is the
transposed x, quantised in blocks along x's rows, as the weight gradient's product reads it. A row's last block may hold
fewer elements. What a block's values are is said by ``scale_inv``: value = data * scale_inv. All of it is float32
arithmetic of one rounding each, so a kernel can give the same bits:

    data = cast(x * scale)   the product rounded to float32; cast saturates at M, rounds to nearest even, keeps the sign
                             of zero, makes infinities M and every NaN 0x7f (as cvt.rn.satfinite does)
    M = 448 for float8_e4m3fn, 57344 for float8_e5m2: 1.75 * 2^m with m = 8, 15
    amax = the largest |x| of the block, NaNs left out, at most F = 0x1.fffffep127 (so infinity counts as F)
    e = max(0, ((bits(amax) + 0x1fffff) >> 23) - m)
                             the biased exponent of the smallest power of two >= amax / M

Whole tensor, block (0, 0): ``scale`` [1] is given (finite, > 0); scale_inv [1] = 1 / scale, and data_t shares it.
``amax`` [1] is the largest |x|, infinities among them, NaN where x holds one, 0 where x is empty: what delayed
scaling makes the next scale of.

1 x 128, block (1, 128), float32 scales. With ``power_of_two`` scale = 2^(127 - e), scale_inv = 2^(e - 127), a
denormal for e = 0. Otherwise scale = min(M / amax, 2^127), scale_inv = 1 / scale, divisions rounded to nearest. Both
are 1 where amax is 0.

MXFP8, block (1, 32), float8_e8m0fnu scales: scale_inv is the byte e, meaning 2^(e - 127); scale = 2^(127 - e). e = 0
where amax is 0.

Sources: 1 x 128 is Transformer Engine's Float8BlockScaling (recipe_common.cuh, epsilon 0; scale = M / amax as there,
where DeepSeek-V3 divides x by amax / M), but for infinite amax, where its scale is 1, and for amax < M / 2^127. MXFP8
is the OCP MX format 1.0 with its exponent rounded up, so that nothing saturates, as in cuBLAS ("1D block scaling")
and Transformer Engine, not the specification's floor(log2(amax)) - m. e is exact where Transformer Engine multiplies
by a rounded 1 / M, which gives the same for 16-bit x, except for infinite amax.

Neither op has a gradient: what passes through a rounding is for the op that reads ``data`` to say. Quantised copies
are ports of a forward.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..ir import Dim, ScaleSpec, TensorSpec, size_of
from .table import REQUIRED, Op, as_rows, boolean, demand, ports

TENSOR, BLOCK, MX = (0, 0), (1, 128), (1, 32)
SCALE_DTYPES = {TENSOR: "float32", BLOCK: "float32", MX: "float8_e8m0fnu"}
LAYOUTS = {TENSOR: ("row",), BLOCK: ("row",), MX: ("row", "swizzled")}
MAX_EXPONENT = {"float8_e4m3fn": 8, "float8_e5m2": 15}  # m
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}  # M
INPUTS = ("bfloat16", "float16", "float32")
_NAN = 0x7F
_FLOAT_MAX = torch.finfo(torch.float32).max
_ROUND_UP = 0x1FFFFF  # carries into the exponent from a mantissa above 1.75 on
_LAYOUT_ROWS, _LAYOUT_SCALES = 128, 4


# ---- rules -----------------------------------------------------------------------------------------------------------


def scale_spec(block: tuple[int, int], layout: str = "row") -> ScaleSpec:
    """How tensors in blocks of ``block`` are scaled."""
    return ScaleSpec(tuple(block), SCALE_DTYPES[tuple(block)], layout)


def _scaled(op: str, attrs) -> ScaleSpec:
    """The scale spec that the attributes name."""
    block = attrs["block"]
    demand(isinstance(block, tuple | list) and tuple(block) in LAYOUTS, op, "block", block,
           f"is one of {', '.join(map(str, LAYOUTS))}: the whole tensor, 1 x 128, MXFP8's 1 x 32")  # fmt: skip
    block = tuple(block)
    demand(
        attrs["layout"] in LAYOUTS[block],
        op,
        "layout",
        attrs["layout"],
        f"is {' or '.join(LAYOUTS[block])} for block {block}",
    )
    return scale_spec(block, attrs["layout"])


def _infer(specs, attrs):
    op, x, scale, scaled = "quantize", specs["x"], specs.get("scale"), _scaled("quantize", attrs)
    whole = scaled.block == TENSOR
    demand(attrs["dtype"] in LARGEST, op, "dtype", attrs["dtype"], f"is one of {', '.join(LARGEST)}")
    boolean(op, "power_of_two", attrs["power_of_two"])
    demand(
        scaled.block == BLOCK or not attrs["power_of_two"],
        op,
        "power_of_two",
        attrs["power_of_two"],
        f"belongs to block {BLOCK}",
        "drop it: MXFP8's scales are powers of two, a whole tensor's is given",
    )
    demand(x.dtype in INPUTS and x.rank >= 1, op, "x", x, f"must be {', '.join(INPUTS)} of rank 1 or more")
    demand((scale is not None) == whole, op, "scale", scale, f"is given for block {TENSOR} and for no other",
           "pass a float32 tensor of one element" if whole else "drop it: a block's comes from its values")  # fmt: skip
    demand(scale is None or scale == TensorSpec((1,), "float32"), op, "scale", scale, "must be float32 [1]")
    data = TensorSpec(x.shape, attrs["dtype"], scale=scaled)
    data_t = TensorSpec((x.shape[-1], size_of(x.shape[:-1])), attrs["dtype"], scale=scaled)
    made = {"data": data, "scale_inv": scaled.scales(data.shape), "data_t": data_t}
    return (
        {**made, "amax": TensorSpec((1,), "float32")} if whole else {**made, "scale_inv_t": scaled.scales(data_t.shape)}
    )


def _dequantize_infer(specs, attrs):
    op, data, given, scaled = "dequantize", specs["data"], specs["scale_inv"], _scaled("dequantize", attrs)
    demand(attrs["dtype"] in INPUTS, op, "dtype", attrs["dtype"], f"is one of {', '.join(INPUTS)}")
    demand(
        data.dtype in LARGEST and data.rank >= 1, op, "data", data, f"must be {' or '.join(LARGEST)} of rank 1 or more"
    )
    demand(data.scale == scaled, op, "scale of data", data.scale, f"must be {scaled}, as block and layout say")
    made = scaled.scales(data.shape)  # sizes that are known at run time alone are compared there
    fits = given.rank == made.rank and all(
        Dim in (type(a), type(b)) or a == b for a, b in zip(given.shape, made.shape, strict=True)
    )
    demand(
        fits and given.dtype == made.dtype, op, "scale_inv", given, f"must be {made}, a scale for each block of data"
    )
    return {"y": TensorSpec(data.shape, attrs["dtype"])}


def _dequantize_check(t, shape, attrs):
    data, given = shape("data"), shape("scale_inv")
    if None in data or None in given:
        return
    made = _scaled("dequantize", attrs).scales(data).shape
    if given != made:
        raise ValueError(
            f"dequantize: scale_inv = {list(given)}: must be {list(made)}, a scale for each block of data {list(data)}"
        )


# ---- references ------------------------------------------------------------------------------------------------------


def cast(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """float32 to 8 bits as the module says: saturating, nearest even, one NaN."""
    most = LARGEST[dtype]
    bits = x.clamp(-most, most).to(getattr(torch, dtype)).view(torch.uint8)
    return torch.where(x.isnan(), _NAN, bits).view(getattr(torch, dtype))


def _blocks(x: torch.Tensor, size: int) -> torch.Tensor:
    """[..., n] as [..., ceil(n / size), size], filled up with zeros."""
    count = -(-x.shape[-1] // size)
    return F.pad(x, (0, count * size - x.shape[-1])).reshape(*x.shape[:-1], count, size)


def _divide(a: float, b: torch.Tensor) -> torch.Tensor:
    return torch.full_like(b, a) / b  # a number over a tensor would be a product with a rounded reciprocal


def _scales(x: torch.Tensor, attrs) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale as float32, scale_inv as it is stored row-major) of the blocks of float32 ``x``."""
    dtype, block = attrs["dtype"], tuple(attrs["block"])
    size = _blocks(torch.where(x.isnan(), 0.0, x.abs()), block[1])
    amax = size.amax(-1).clamp(max=_FLOAT_MAX)
    e = (((amax.view(torch.int32) + _ROUND_UP) >> 23) - MAX_EXPONENT[dtype]).clamp(min=0)
    if block == MX:
        return ((254 - e) << 23).view(torch.float32), e.to(torch.uint8).view(torch.float8_e8m0fnu)
    if attrs["power_of_two"]:
        scale = ((254 - e) << 23).view(torch.float32)
    else:
        scale = _divide(LARGEST[dtype], amax).clamp(max=2.0**127)
    scale = torch.where(amax == 0, 1.0, scale)
    return scale, _divide(1.0, scale)


def swizzle(scales: torch.Tensor) -> torch.Tensor:
    """Row-major one-byte scales [rows, k] in the layout ``swizzled``, [ceil(rows / 128) * 128, ceil(k / 4) * 4] with
    zeros where there is none. The tiles of 128 x 4 lie row-major, 512 bytes each; scale (r, c) of a tile is its byte r
    % 32 * 16 + r // 32 * 4 + c. Source: cuBLAS, "1D block scaling factors layout"."""
    rows, k = scales.shape
    full = F.pad(scales.view(torch.uint8), (0, -k % _LAYOUT_SCALES, 0, -rows % _LAYOUT_ROWS))
    tiles = full.reshape(-1, 4, 32, full.shape[1] // _LAYOUT_SCALES, _LAYOUT_SCALES) if full.numel() else full
    return (tiles.permute(0, 3, 2, 1, 4).reshape(full.shape) if full.numel() else full).view(scales.dtype)


def unswizzle(scales: torch.Tensor, rows: int, k: int) -> torch.Tensor:
    """Undoes ``swizzle`` for row-major scales of [rows, k]."""
    if not scales.numel():
        return scales.view(torch.uint8).new_zeros(rows, k).view(scales.dtype)
    tiles = scales.view(torch.uint8).reshape(-1, scales.shape[1] // _LAYOUT_SCALES, 32, 4, _LAYOUT_SCALES)
    return tiles.permute(0, 3, 2, 1, 4).reshape(scales.shape)[:rows, :k].contiguous().view(scales.dtype)


def _quantized(x: torch.Tensor, attrs) -> tuple[torch.Tensor, torch.Tensor]:
    """(data, scale_inv in its layout) of float32 ``x``."""
    scale, stored = _scales(x, attrs)
    data = cast((_blocks(x, attrs["block"][1]) * scale.unsqueeze(-1)).flatten(-2)[..., : x.shape[-1]], attrs["dtype"])
    return data.contiguous(), stored if attrs["layout"] == "row" else swizzle(as_rows(stored))


def _reference(t, attrs, want):
    x, out = t["x"].float(), {}
    if "scale" in t:
        data = cast(x * t["scale"], attrs["dtype"])
        out = {"data": data, "scale_inv": _divide(1.0, t["scale"])}
        if "data_t" in want:
            out["data_t"] = as_rows(data).t().contiguous()
        if "amax" in want:
            size = x.abs().flatten()
            out["amax"] = F.pad(size, (0, 1)).amax(0, keepdim=True)
        return out
    out["data"], out["scale_inv"] = _quantized(x, attrs)
    if "data_t" in want or "scale_inv_t" in want:
        out["data_t"], out["scale_inv_t"] = _quantized(as_rows(x).t().contiguous(), attrs)
    return out


def _dequantize_reference(t, attrs, want):
    data, scale, block = t["data"].float(), t["scale_inv"], tuple(attrs["block"])
    n = data.shape[-1]
    if attrs["layout"] == "swizzled":
        count = -(-n // block[1])
        scale = unswizzle(scale, as_rows(data).shape[0], count).view(*data.shape[:-1], count)
    scale = scale.float()
    if block != TENSOR:
        scale = scale.repeat_interleave(block[1], -1)[..., :n]
    return {"y": (data * scale).to(getattr(torch, attrs["dtype"]))}


OPS = (
    Op(
        "quantize",
        ports("x", "scale?"),
        ports("data", "scale_inv?", "data_t?", "scale_inv_t?", "amax?"),
        _infer,
        _reference,
        attrs={"dtype": "float8_e4m3fn", "block": REQUIRED, "layout": "row", "power_of_two": False},
        implied=lambda s, a: ("data", "scale_inv"),
        flops=lambda i, o, a: 4 * i["x"].numel(),
    ),
    Op(
        "dequantize",
        ports("data", "scale_inv"),
        ports("y"),
        _dequantize_infer,
        _dequantize_reference,
        attrs={"dtype": REQUIRED, "block": REQUIRED, "layout": "row"},
        check=_dequantize_check,
    ),
)
