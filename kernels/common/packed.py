"""16-bit floats in device code, two to a 32-bit word: with fewer instructions than a conversion for each value takes.
bfloat16 becomes float32 by a shift for the low half and a mask for the high one, where the compiler's own code takes
three instructions for the two; a rounding whose result is used as float32 again stays one packed conversion, where it
would become two slow scalar ones.

Imports the compiler, so host code never imports this file."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T

from .device import floats, fragment, rounded


def _asm(code: str, constraints: str, kind, *values):
    return llvm.inline_asm(
        kind, list(values), code, constraints, has_side_effects=False, asm_dialect=llvm.AsmDialect.AD_ATT
    )


def _as_float(word) -> Float32:
    return Float32(llvm.bitcast(T.f32(), Uint32(word).ir_value()))


def halves(word, dtype) -> list:
    """The two values of a word as float32 numbers, the low half first."""
    if dtype is BFloat16:
        return [_as_float(word << Uint32(16)), _as_float(word & Uint32(0xFFFF0000))]
    parts = [word & Uint32(0xFFFF), word >> Uint32(16)]
    code = "{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.f32.f16 $0, low; }"
    return [Float32(_asm(code, "=f,r", T.f32(), p.ir_value())) for p in parts]


def word_of(low, high, dtype) -> Uint32:
    """Two float32 numbers rounded to nearest even, in one word."""
    name = {BFloat16: "bf16x2", Float16: "f16x2"}[dtype]
    return Uint32(
        _asm(f"cvt.rn.{name}.f32 $0, $2, $1;", "=r,f,f", T.i32(), Float32(low).ir_value(), Float32(high).ir_value())
    )


def numbers(values) -> list:
    """The values of a fragment as float32 numbers."""
    dtype, count = values.element_type, cute.size(values)
    if dtype is not BFloat16 or count % 2:
        return floats(values)
    words = cute.recast_tensor(values, Uint32)
    return [x for i in range(count // 2) for x in halves(words[i], dtype)]


def round_trip(values: list, dtype) -> list:
    """float32 numbers rounded to ``dtype`` and back."""
    if dtype is Float32:
        return values
    if len(values) % 2:
        return floats(rounded(values, dtype))
    return [x for i in range(0, len(values), 2) for x in halves(word_of(values[i], values[i + 1], dtype), dtype)]


def packed(values: list, dtype):
    """float32 numbers as a fragment of ``dtype``, each rounded to nearest even."""
    if dtype not in (BFloat16, Float16) or len(values) % 2:
        return rounded(values, dtype)
    words = fragment(Uint32, len(values) // 2)
    for i in range(len(values) // 2):
        words[i] = word_of(values[2 * i], values[2 * i + 1], dtype)
    return cute.recast_tensor(words, dtype)
