"""Compiles a kernel over vectors of 1 to 8 values, through ``kernels/common/packed.py`` and as words of narrower ones.
``python -m tests.cases.packed_vectors`` prints the vectors whose size or layout is not what went in: layouts are known
while a kernel is traced, so no GPU runs it."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Uint8, Uint32

from layerplan.kernels.common import device as d
from layerplan.kernels.common.packed import numbers, packed, round_trip

COUNTS = (1, 2, 4, 8)
wrong: list[str] = []


def expect(what: str, found: int, wanted: int) -> None:
    if found != wanted:
        wrong.append(f"{what}: {found} values of {wanted}")


def trace(rows) -> None:
    """Every dtype and count; traced as Python."""
    for dtype in (Float32, BFloat16, Float16):
        for n in COUNTS:
            values = d.fragment(dtype, n)
            d.read(rows[dtype], 0, values)
            given = numbers(values)
            made = packed(round_trip(given, dtype), dtype)
            expect(f"numbers of {n} {dtype}", len(given), n)
            expect(f"packed {n} {dtype}", cute.size(made), n)
            d.write(rows[dtype], 1, made)
    for n in COUNTS:
        for narrow in (BFloat16, Uint8):
            parts = cute.recast_tensor(d.fragment(Uint32, n), narrow)
            expect(f"{n} words as {narrow}", cute.size(parts), n * 32 // narrow.width)


@cute.kernel
def kernel(wide, brain, half):
    trace({Float32: wide, BFloat16: brain, Float16: half})


@cute.jit
def launch(wide, brain, half, stream):
    kernel(wide, brain, half).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)


def main() -> None:
    rows = [d.fake_vector(name, cute.sym_int(divisibility=8), 8) for name in ("float32", "bfloat16", "float16")]
    cute.compile(launch, *rows, d.fake_stream(), options=d.OPTIONS)
    print(f"{len(wrong)} wrong with cutlass {cutlass.__version__}", *wrong, sep="\n")


if __name__ == "__main__":
    main()
