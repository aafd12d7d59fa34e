"""Device code: quantize of a tensor in memory, tile by tile (``kernels/common/quantize_tile.py``)."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int64

from ...common import device as d
from ...common import words as w
from ...common.quantize_tile import QuantizeTile


def quantize(arch: str, *, source: str, **constants):
    """A function (x [rows, width] of ``source`` with any row stride, addresses of scale, data, scale_inv, data_t,
    scale_inv_t, amax, workspace). The constants are those of ``QuantizeTile``; ``vector`` asks for rows of x at multiples of 16
    bytes, which are then copied to shared memory without a way through registers."""
    packed = w.Packed(source)
    tile = QuantizeTile(packed, arch=arch, resident=5, **constants)

    def load_from(begin, stride):
        def load(row, column, oks):
            at = begin + Int64(row) * stride + column * packed.itemsize
            return [packed.read(at + i * stride, 8, ok) for i, ok in enumerate(oks)]

        return load

    @cute.kernel
    def kernel(mX: cute.Tensor, scale: Int64, data: Int64, scale_inv: Int64, data_t: Int64, scale_inv_t: Int64,
               amax: Int64):  # fmt: skip
        place = w.address(mX), Int64(mX.stride[0]) * packed.itemsize
        load = place if tile.vector else load_from(*place)
        tile.run(load, mX.shape[0], data, scale_inv, data_t, scale_inv_t, scale, amax)

    @cute.jit
    def launch(mX: cute.Tensor, scale: Int64, data: Int64, scale_inv: Int64, data_t: Int64, scale_inv_t: Int64,
               amax: Int64, workspace: Int64, stream):  # fmt: skip
        rows, (own, own_t) = mX.shape[0], tile.scales(scale_inv, scale_inv_t, workspace)
        kernel(mX, scale, data, own, data_t, own_t, amax).launch(**tile.launch(rows, stream))
        tile.move_scales(rows, scale_inv, scale_inv_t, workspace, stream)

    x = d.fake_rows(source, cute.sym_int(), tile.width, 16 // packed.itemsize if tile.vector else 1)
    return cute.compile(launch, x, *[Int64(0)] * 7, d.fake_stream(), options=d.OPTIONS)
