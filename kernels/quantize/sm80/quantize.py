"""Device code: quantize of a tensor in memory, tile by tile (``kernels/common/quantize_tile.py``)."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int64

from ...common import device as d
from ...common import words as w
from ...common.quantize_tile import THREADS, QuantizeTile


def quantize(
    arch: str,
    *,
    source: str,
    width: int,
    vector: bool,
    kind: str,
    dtype: str,
    power_of_two: bool,
    swizzled: bool,
    transposed: bool,
    amax: bool,
    lanes: int = 4,
    down: bool = False,
):
    """A function (x [rows, width] of ``source`` with any row stride, addresses of scale, data, scale_inv, data_t,
    scale_inv_t, amax). The constants are those of ``QuantizeTile``; ``vector`` asks for rows of x at multiples of 16
    bytes."""
    packed = w.Packed(source)
    tile = QuantizeTile(packed, width, vector=vector, kind=kind, dtype=dtype, arch=arch, power_of_two=power_of_two,
                        swizzled=swizzled, transposed=transposed, amax=amax, lanes=lanes, down=down)  # fmt: skip

    def load_from(begin, stride):
        def load(row, column, oks):
            at = begin + Int64(row) * stride + column * packed.itemsize
            return [packed.read(at + i * stride, 8, ok) for i, ok in enumerate(oks)]

        return load

    @cute.kernel
    def kernel(
        mX: cute.Tensor, scale: Int64, data: Int64, scale_inv: Int64, data_t: Int64, scale_inv_t: Int64, amax: Int64
    ):
        load = load_from(w.address(mX), Int64(mX.stride[0]) * packed.itemsize)
        tile.run(load, mX.shape[0], data, scale_inv, data_t, scale_inv_t, scale, amax)

    @cute.jit
    def launch(
        mX: cute.Tensor,
        scale: Int64,
        data: Int64,
        scale_inv: Int64,
        data_t: Int64,
        scale_inv_t: Int64,
        amax: Int64,
        stream,
    ):
        kernel(mX, scale, data, scale_inv, data_t, scale_inv_t, amax).launch(
            grid=[tile.blocks(mX.shape[0]), 1, 1], block=[THREADS, 1, 1], stream=stream)  # fmt: skip

    x = d.fake_rows(source, cute.sym_int(), width, 16 // packed.itemsize if vector else 1)
    return cute.compile(launch, x, *[Int64(0)] * 6, d.fake_stream(), options=d.OPTIONS)
