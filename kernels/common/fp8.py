"""Device code of quantisation: 8-bit floats and block scales with the bits that ``integration/graph/ops/quantize.py``
defines.

Imports the compiler, so host code never imports this file. Plain functions on numbers of the device; none needs a
branch."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cute.arch.nvvm_wrappers import inline_ptx

from . import device as d
from .words import bits_of, float_of

# what constants of kernels call blocks of 1 x 128, of 1 x 32 and the whole tensor
BLOCK, MX, TENSOR = "block", "mx", "tensor"
_MAX = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
_MAX_EXPONENT = {"float8_e4m3fn": 8, "float8_e5m2": 15}
_MANTISSA = {"float8_e4m3fn": 3, "float8_e5m2": 2}
_LEAST_EXPONENT = {"float8_e4m3fn": -6, "float8_e5m2": -14}  # of normal values
_FLOAT_MAX = float.fromhex("0x1.fffffep127")
_NAN = 0x7F


# ---- conversion -----------------------------------------------------------------------------------------------------


def cast(values: list, dtype: str, arch: str):
    """Four float32 numbers as the bytes of a word, the first in the lowest: to nearest even, saturated, any NaN 0x7f.
    In one instruction for two numbers from sm_89 on, by integers before."""
    if not d.has(arch, 89):
        a, b, c, e = (_cast_by_integers(v, dtype) for v in values)
        return a | (b << Uint32(8)) | (c << Uint32(16)) | (e << Uint32(24))
    kind = {"float8_e4m3fn": "e4m3x2", "float8_e5m2": "e5m2x2"}[dtype]
    code = ("{ .reg .b16 lo, hi;"
            f" cvt.rn.satfinite.{kind}.f32 lo, {{$r1}}, {{$r0}};"
            f" cvt.rn.satfinite.{kind}.f32 hi, {{$r3}}, {{$r2}};"
            " mov.b32 {$w0}, {lo, hi}; }")  # fmt: skip
    return inline_ptx(code, write_only_types=[Uint32], read_only_args=[Float32(v) for v in values])


def _cast_by_integers(value, dtype: str):
    """The byte of one float32 number. A normal value's is rounded by a carry into its mantissa; a smaller one's is the
    mantissa of its sum with the number whose last place is the spacing of denormals."""
    mantissa, least = _MANTISSA[dtype], _LEAST_EXPONENT[dtype]
    bits = bits_of(value)
    size = bits & Uint32(0x7FFFFFFF)
    top = bits_of(d.smallest(float_of(size), _MAX[dtype]))  # NaN stays above
    drop = 23 - mantissa
    carried = top + Uint32((1 << (drop - 1)) - 1) + ((top >> Uint32(drop)) & Uint32(1))
    normal = (carried >> Uint32(drop)) - Uint32((126 + least) << mantissa)
    magic = 2.0 ** (23 - mantissa + least)
    tiny = bits_of(d.add(float_of(top), magic)) - bits_of(Float32(magic))
    byte = d.select(top < Uint32((127 + least) << 23), tiny, normal) | ((bits >> Uint32(24)) & Uint32(0x80))
    return d.select(size > Uint32(0x7F800000), Uint32(_NAN), byte)


def floats(word, dtype: str, arch: str) -> list:
    """The four values of a word as float32 numbers, exact. From sm_89 on an instruction makes halves of two. Before, a
    half with e5m2's bits on top is that value; one with e4m3's exponent and mantissa below its sign is the value times
    2^-8, but for NaN."""
    if d.has(arch, 89):
        kind = {"float8_e4m3fn": "e4m3x2", "float8_e5m2": "e5m2x2"}[dtype]
        code = (
            "{ .reg .b16 lo, hi, a, b, c, e; .reg .b32 x, y; mov.b32 {lo, hi}, {$r0};"
            f" cvt.rn.f16x2.{kind} x, lo; cvt.rn.f16x2.{kind} y, hi; mov.b32 {{a, b}}, x; mov.b32 {{c, e}}, y;"
            " cvt.f32.f16 {$w0}, a; cvt.f32.f16 {$w1}, b; cvt.f32.f16 {$w2}, c; cvt.f32.f16 {$w3}, e; }"
        )
        return list(inline_ptx(code, write_only_types=[Float32] * 4, read_only_args=[word]))
    result = []
    for i in range(4):
        byte = (word >> Uint32(8 * i)) & Uint32(0xFF)
        if dtype == "float8_e5m2":
            half = byte << Uint32(8)
        else:
            half = ((byte & Uint32(0x80)) << Uint32(8)) | ((byte & Uint32(0x7F)) << Uint32(7))
        code = "{ .reg .b16 h, z; mov.b32 {h, z}, {$r0}; cvt.f32.f16 {$w0}, h; }"
        value = inline_ptx(code, write_only_types=[Float32], read_only_args=[half])
        if dtype != "float8_e5m2":
            nan = (byte & Uint32(0x7F)) == Uint32(0x7F)
            value = d.select(nan, Float32(float("nan")), d.mul(value, 256.0))
        result.append(value)
    return result


# ---- scales ----------------------------------------------------------------------------------------------------------


def larger(a, b):
    """max(a, b) in float32, the other one where one is NaN: what combines the magnitudes of a block."""
    return inline_ptx(
        "max.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[Float32(a), Float32(b)]
    )


def block_amax(packed, words: list, lanes: int):
    """The largest magnitude of a block that so many lanes beside each other share, a power of two, each with as many
    ``words`` of values (``words.Packed``), as a float32 number. NaNs are left out; it is NaN where all are."""
    sizes = packed.magnitudes(words)
    while len(sizes) > 1:
        sizes = [packed.largest(a, b) for a, b in zip(sizes[::2], sizes[1::2], strict=True)]
    (size,) = sizes
    offset = lanes // 2
    while offset:
        size = packed.largest(size, cute.arch.shuffle_sync_bfly(size, offset=offset))
        offset //= 2
    parts = packed.floats([size])
    return parts[0] if len(parts) == 1 else larger(*parts)


def _smaller(a, b):
    return inline_ptx(
        "min.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[Float32(a), Float32(b)]
    )


def _exponent(amax, dtype: str):
    """The biased exponent e of the smallest power of two that is at least amax / M, as Int32. ``amax`` is finite."""
    carried = (Int32(bits_of(amax)) + Int32(0x1FFFFF)) >> Int32(23)
    return inline_ptx(
        "max.s32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Int32],
        read_only_args=[carried - Int32(_MAX_EXPONENT[dtype]), Int32(0)],
    )


def _power(biased):
    """2^(biased - 127) for 1 <= biased <= 254."""
    return float_of(Uint32(biased << Int32(23)))


def mx_scale(amax, dtype: str):
    """(what a block of MXFP8 with this largest magnitude is multiplied by, its scale_inv: e as Int32). A NaN amax
    counts as 0."""
    e = _exponent(_smaller(larger(amax, 0.0), _FLOAT_MAX), dtype)
    return _power(Int32(254) - e), e


def block_scale(amax, dtype: str, power_of_two: bool):
    """(scale, scale_inv) of a block of 1 x 128 with this largest magnitude, float32. A NaN amax counts as 0."""
    amax = _smaller(larger(amax, 0.0), _FLOAT_MAX)
    none = amax == Float32(0.0)
    if power_of_two:
        e = _exponent(amax, dtype)
        scale = _power(Int32(254) - e)
        inverse = float_of(Uint32(d.select(e == Int32(0), Int32(0x00400000), e << Int32(23))))
    else:
        scale, inverse = _quotients(larger(amax, _MAX[dtype] * 2.0**-127), dtype)
    return d.select(none, Float32(1.0), scale), d.select(none, Float32(1.0), inverse)


def _quotients(amax, dtype: str):
    """(M / amax, 1 / that), each rounded to nearest, for a finite amax of M / 2^127 or more.

    Without the division's slow path, whose call takes registers from all of the kernel: mantissas are divided, and
    exponents added. A quotient and its remainder, which is exact, give the rounded one with the reciprocal; that holds
    for every mantissa and every reciprocal within 2^-23 (``tests/cases/quotients.py --all`` tries them), but for
    1 / (1 - 2^-24), which is a hair above the middle of two numbers."""
    bits = bits_of(amax)
    mantissa = float_of((bits & Uint32(0x007FFFFF)) | Uint32(0x3F800000))  # 1 <= mantissa < 2
    r = d.reciprocal(mantissa)
    q = d.mul(1.75, r)
    q = d.fma(d.fma(d.mul(q, -1.0), mantissa, 1.75), r, q)  # 0.875 < q <= 1.75
    power = Uint32((127 + _MAX_EXPONENT[dtype]) << 23) - (bits & Uint32(0x7F800000))  # scale = q * 2^power
    minus = d.mul(q, -1.0)
    r = d.reciprocal(q)
    r = d.fma(d.fma(minus, r, 1.0), r, r)
    v = d.fma(d.fma(minus, r, 1.0), r, r)
    v = d.select(bits_of(q) == Uint32(0x3F7FFFFF), float_of(Uint32(0x3F800001)), v)
    normal = bits_of(v) - power
    # below 2^-126 a bit less: that of v is the middle of two numbers, and the remainder says on which side 1 / q lies
    more = d.select(d.fma(minus, v, 1.0) > Float32(0.0), Uint32(1), Uint32(0))
    tiny = (((bits_of(v) & Uint32(0x007FFFFF)) | Uint32(0x00800000)) + more) >> Uint32(1)
    inverse = d.select(Int32(normal) < Int32(0x00800000), tiny, normal)
    return float_of(bits_of(q) + power), float_of(inverse)


def mx_value(byte):
    """The float32 number 2^(byte - 127) of a float8_e8m0fnu, NaN for 255."""
    e = Int32(byte)
    bits = d.select(e == Int32(0), Int32(0x00400000), e << Int32(23))
    return float_of(Uint32(d.select(e == Int32(255), Int32(0x7FC00000), bits)))


def raise_amax(top, amax) -> None:
    """The warp's largest magnitude to the largest so far, as the bits of a float32 number: they are ordered as the
    numbers are, NaN above. Written only where it rises, so seldom that blocks do not wait for each other; its order
    does not matter to a maximum."""
    largest = cute.arch.warp_redux_sync(Int32(bits_of(top)), "max")
    now = inline_ptx("ld.relaxed.gpu.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[amax])
    rises = (cute.arch.lane_idx() == 0) & (largest > now)
    inline_ptx("red.global.max.s32 [{$r0}], {$r1};", read_only_args=[amax, largest], predicate=rises)


def swizzled(row, column, columns4):
    """The place of MXFP8 scale (row, column) in the layout ``swizzled`` with ``columns4`` tiles of four scales in a
    row, as Int64."""
    tile = cutlass.Int64(row // 128) * columns4 + column // 4
    return tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + column % 4
