"""Device code: dequantize. A thread takes 8 neighbouring values of each of 8 rows: they share a scale, and an access is
8 bytes of data and 16 of a 16-bit result. A block of threads takes 8 rows by 1024 columns."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int64, Uint32

from ...common import device as d
from ...common import fp8
from ...common import words as w

_THREADS, _ROWS, _STEP = 128, 8, 8
_COLUMNS = _THREADS * _STEP


def dequantize(arch: str, *, dtype: str, vector: bool, kind: str, swizzled: bool, out: str):
    """A function (data [rows, width] as bytes with any row stride, addresses of scale_inv and y). ``vector``: the width
    divides by 8 and rows of data lie at multiples of 8 bytes, else values are read and written one by one."""
    packed = w.Packed(out)

    def scale_of(scale_inv, row, column, width, ok):
        if kind == fp8.TENSOR:
            return w.float_of(w.read_words(scale_inv, 1, ok)[0])
        if kind == fp8.BLOCK:
            blocks = (width + 127) // 128
            return w.float_of(w.read_words(scale_inv + (Int64(row) * blocks + column // 128) * 4, 1, ok)[0])
        blocks = (width + 31) // 32
        place = fp8.swizzled(row, column // 32, (blocks + 3) // 4) if swizzled else Int64(row) * blocks + column // 32
        return fp8.mx_value(w.read_piece(scale_inv + place, 1, ok))

    def data_of(at, ok) -> list:
        """Two words."""
        if vector:
            return w.read_words(at, 2, ok)
        a, b, c, e, f, g, h, i = (w.read_piece(at + k, 1, p) << Uint32(k % 4 * 8) for k, p in enumerate(ok))
        return [a | b | c | e, f | g | h | i]

    @cute.kernel
    def kernel(mData: cute.Tensor, scale_inv: Int64, y: Int64):
        rows, width = mData.shape[0], mData.shape[1]
        across = (width + (_COLUMNS - 1)) // _COLUMNS
        block = cute.arch.block_idx()[0]
        row, column = block // across * _ROWS, block % across * _COLUMNS + cute.arch.thread_idx()[0] * _STEP
        stride = Int64(mData.stride[0])
        begin = w.address(mData) + Int64(row) * stride + column
        there = [(row + i < rows) & (column < width) for i in range(_ROWS)]
        oks = (
            there if vector else [[(row + i < rows) & (column + k < width) for k in range(_STEP)] for i in range(_ROWS)]
        )
        words = [data_of(begin + i * stride, ok) for i, ok in enumerate(oks)]
        scales = [scale_of(scale_inv, row + i, column, width, ok) for i, ok in enumerate(there)]
        at = y + (Int64(row) * width + column) * packed.itemsize
        for i in cutlass.range_constexpr(_ROWS):
            values = [d.mul(v, scales[i]) for word in words[i] for v in fp8.floats(word, dtype, arch)]
            packed.write(at + Int64(width) * (i * packed.itemsize), packed.words(values), oks[i])

    @cute.jit
    def launch(mData: cute.Tensor, scale_inv: Int64, y: Int64, stream):
        blocks = ((mData.shape[0] + (_ROWS - 1)) // _ROWS) * ((mData.shape[1] + (_COLUMNS - 1)) // _COLUMNS)
        kernel(mData, scale_inv, y).launch(grid=[blocks, 1, 1], block=[_THREADS, 1, 1], stream=stream)

    step = _STEP if vector else 1
    data = d.fake_rows("uint8", cute.sym_int(), cute.sym_int(divisibility=step), step)
    return cute.compile(launch, data, Int64(0), Int64(0), d.fake_stream(), options=d.OPTIONS)
