"""Device code: a tile of 128 x 128 values to fp8, by rows and, transposed, by columns, with the bits that
``integration/graph/ops/quantize.py`` defines.

A block of 256 threads takes a tile, and each thread 8 x 8 values of it, which it keeps as packed words: so an access to
a row is one of 16 bytes (of 16-bit values), and 8 rows of a column are a piece of the transposed copy, in order,
without a way through shared memory. Where a transposed copy is made, the lanes of a warp are 8 x 4 such squares, 64
rows by 32 columns, or 4 x 8: a block of MXFP8 (32 values) lies within one warp either way, and one of 128 values meets
in shared memory. Otherwise the lanes are 2 x 16: rows of 128 columns.

Where values come from is the caller's: ``run`` asks for 8 of each row. Rows and columns behind the end are 0 and not
written."""

from __future__ import annotations

import copy

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.cute.arch.nvvm_wrappers import inline_ptx
from cutlass.memory import SmemAllocator

from . import device as d
from . import fp8
from . import words as w

THREADS = 256
SIDE = 128  # of a tile
_EDGE = 8  # of a thread's square


def select(ok, a, b):
    return cutlass.select_(ok, a, b)


class QuantizeTile:
    """``values``: how the values lie in words (``Packed``). ``width``: of a row; with ``vector`` it divides by 8, and
    so do the places of 8 values in memory, else values are read and written one by one. ``kind``: ``fp8.BLOCK``,
    ``fp8.MX`` or ``fp8.TENSOR``. ``swizzled``: the layout of MXFP8 scales. ``transposed``: also the transposed copy,
    with ``lanes`` (4 or 8) of a warp side by side. ``amax``: also the largest magnitude. ``down``: tiles are taken
    column by column. ``reverse``: from the last to the first."""

    def __init__(
        self,
        values: w.Packed,
        width: int,
        *,
        vector: bool,
        kind: str,
        dtype: str,
        arch: str,
        power_of_two: bool = False,
        swizzled: bool = False,
        transposed: bool = False,
        amax: bool = False,
        lanes: int = 4,
        down: bool = False,
        reverse: bool = False,
    ) -> None:
        self.values, self.width, self.vector, self.kind = values, width, vector, kind
        self.dtype, self.arch, self.power_of_two = dtype, arch, power_of_two
        self.swizzled, self.transposed, self.amax = swizzled, transposed, amax
        self.across, self.down, self.reverse = -(-width // SIDE), down, reverse  # tiles
        self.lanes = lanes if transposed else 16
        self.warps_across = 16 // self.lanes
        self.warps_down = THREADS // d.WARP // self.warps_across
        self.shared = kind == fp8.BLOCK and transposed

    def blocks(self, rows):
        """How many blocks of threads a launch needs for so many rows."""
        return ((rows + (SIDE - 1)) // SIDE) * self.across

    # ---- places

    def _place(self, rows) -> None:
        """Which values this thread has: rows ``row`` ... ``row + 7``, columns ``column`` ... ``column + 7``."""
        self.rows = rows
        thread, tile = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        if self.reverse:
            tile = cute.arch.grid_dim()[0] - 1 - tile
        self.thread, warp, lane = thread, thread // d.WARP, thread % d.WARP
        if self.down:
            count = (self.rows + (SIDE - 1)) // SIDE
            self.tile_row, self.tile_column = tile % count, tile // count
        else:
            self.tile_row, self.tile_column = tile // self.across, tile % self.across
        self.lane_row, self.lane_column = lane // self.lanes, lane % self.lanes
        self.warp_row, self.warp_column = warp // self.warps_across, warp % self.warps_across
        group = self.warp_row * (d.WARP // self.lanes) + self.lane_row
        octet = self.warp_column * self.lanes + self.lane_column
        self.in_row, self.in_column = group * _EDGE, octet * _EDGE
        self.row, self.column = self.tile_row * SIDE + self.in_row, self.tile_column * SIDE + self.in_column

    def _ok(self, i: int):
        """Which values of row i exist, as ``Packed.read`` takes it."""
        row_ok = self.row + i < self.rows
        if self.vector:
            return row_ok & (self.column < self.width)
        return [row_ok & (self.column + j < self.width) for j in range(_EDGE)]

    # ---- largest magnitudes

    def _over_lanes(self, magnitudes: list, begin: int, end: int) -> list:
        """Over the lanes whose numbers differ in the bits from ``begin`` up to below ``end``, both powers of two."""
        for offset in [1 << b for b in range(begin.bit_length() - 1, end.bit_length() - 1)]:
            magnitudes = [self.values.largest(m, cute.arch.shuffle_sync_bfly(m, offset=offset)) for m in magnitudes]
        return magnitudes

    def _rows_largest(self, sizes: list, lanes: int) -> list:
        """Of each of the thread's rows, over so many lanes beside each other, as words."""
        return self._over_lanes(self.values.transposed_largest(sizes), 1, lanes)

    def _columns_largest(self, sizes: list, lanes: int) -> list:
        """Of each of the thread's columns, over so many lanes below each other, as words."""
        return self._over_lanes(self._fold(sizes), self.lanes, self.lanes * lanes)

    def _fold(self, sizes: list, nan: bool = False) -> list:
        while len(sizes) > 1:
            sizes = [
                [self.values.largest(a, b, nan) for a, b in zip(x, y, strict=True)]
                for x, y in zip(sizes[::2], sizes[1::2], strict=True)
            ]
        return sizes[0]

    # ---- scales: each returns what the thread's 8 rows and 8 columns are multiplied by, and writes scale_inv

    def _tensor_scales(self, scale, scale_inv):
        given = w.float_of(w.read_words(scale, 1, True)[0])
        first = (self.thread == 0) & (cute.arch.block_idx()[0] == 0)
        w.write_words(scale_inv, [w.bits_of(d.div(1.0, given))], first)
        return [given] * _EDGE, [given] * _EDGE

    def _row_block_scales(self, sizes: list, scale_inv):
        """128 values lie in the 16 lanes of half a warp. Of its 8 rows each lane makes one scale (two divisions), and has
        the others from the lanes beside it."""
        which, row = self.lane_column % _EDGE, self.row + self.lane_column % _EDGE
        first, *others = self.values.floats(self._rows_largest(sizes, 16))
        for i, other in enumerate(others):
            first = select(which == i + 1, other, first)
        scale, inverse = fp8.block_scale(first, self.dtype, self.power_of_two)
        at = scale_inv + (Int64(row) * self.across + self.tile_column) * 4
        w.write_words(at, [w.bits_of(inverse)], (self.lane_column < _EDGE) & (row < self.rows))
        lane = self.thread % d.WARP - self.lane_column
        return [cute.arch.shuffle_sync(scale, lane + i) for i in range(_EDGE)], None

    def _both_block_scales(self, sizes: list, scale_inv, scale_inv_t, memory):
        """Magnitudes of rows meet over the warps beside each other, those of columns over the ones below each other, 4
        and 2 or 2 and 4; then each thread makes the scale of one row or column."""
        line = SIDE * self.values.itemsize
        of_rows, of_columns, scales = memory, memory + self.warps_across * line, memory + 6 * line
        self._to_shared(of_rows + self.warp_column * line + self.in_row * self.values.itemsize,
                        self._rows_largest(sizes, self.lanes), self.lane_column == 0)  # fmt: skip
        self._to_shared(of_columns + self.warp_row * line + self.in_column * self.values.itemsize,
                        self._columns_largest(sizes, d.WARP // self.lanes), self.lane_row == 0)  # fmt: skip
        cute.arch.sync_threads()
        own, is_row = self.thread % SIDE, self.thread < SIDE
        parts = [
            select(is_row, of_rows + k % self.warps_across * line, of_columns + k % self.warps_down * line)
            for k in range(4)
        ]
        parts = [at + own * self.values.itemsize for at in parts]
        parts = [self.values.floats([w.read_shared_piece(at, self.values.itemsize)])[0] for at in parts]
        largest = fp8.larger(fp8.larger(parts[0], parts[1]), fp8.larger(parts[2], parts[3]))
        scale, inverse = fp8.block_scale(largest, self.dtype, self.power_of_two)
        w.write_shared_words(scales + self.thread * 4, [w.bits_of(scale)])
        row, column = self.tile_row * SIDE + own, self.tile_column * SIDE + own
        down = (self.rows + (SIDE - 1)) // SIDE
        at = select(is_row, scale_inv + (Int64(row) * self.across + self.tile_column) * 4,
                    scale_inv_t + (Int64(column) * down + self.tile_row) * 4)  # fmt: skip
        w.write_words(at, [w.bits_of(inverse)], select(is_row, row < self.rows, column < self.width))
        cute.arch.sync_threads()
        return self._from_shared(scales + self.in_row * 4), self._from_shared(scales + (self.in_column + SIDE) * 4)

    @staticmethod
    def _to_shared(at, words: list, ok) -> None:
        for i in range(0, len(words), 4):
            w.write_shared_words(at + 4 * i, words[i : i + 4], ok)

    @staticmethod
    def _from_shared(at) -> list:
        return [w.float_of(word) for i in (0, 16) for word in w.read_shared_words(at + i, 4)]

    def _mx_scales(self, sizes: list, scale_inv, scale_inv_t):
        """32 values of a row lie in 4 neighbouring lanes, 32 of a column in 4 lanes below each other. Each lane writes
        two bytes."""
        rows = [fp8.mx_scale(m, self.dtype) for m in self.values.floats(self._rows_largest(sizes, 4))]
        self._write_bytes(
            scale_inv,
            [e for _, e in rows],
            self.lane_column % 4,
            self.row,
            self.rows,
            self.column // 32,
            -(-self.width // 32),
            self.across,
        )
        if not self.transposed:
            return [s for s, _ in rows], None
        columns = [fp8.mx_scale(m, self.dtype) for m in self.values.floats(self._columns_largest(sizes, 4))]
        self._write_bytes(
            scale_inv_t,
            [e for _, e in columns],
            self.lane_row % 4,
            self.column,
            self.width,
            self.row // 32,
            (self.rows + 31) // 32,
            (self.rows + (SIDE - 1)) // SIDE,
        )
        return [s for s, _ in rows], [s for s, _ in columns]

    def _write_bytes(self, base, exponents: list, lane, line, lines, block, blocks, blocks4) -> None:
        """Scales of 8 lines (rows or columns) of one block of each: lane 0 to 3 writes two of them."""
        low, high = (self._bytes(exponents[i : i + 4]) for i in (0, 4))
        both = select(lane < 2, low, high) >> Uint32(lane % 2 * 16)
        for i in range(2):
            own = line + lane * 2 + i
            if self.swizzled:  # tiles are whole: what is behind the end has scale 0
                at, ok = base + fp8.swizzled(own, block, blocks4), True
            else:
                at, ok = base + Int64(own) * blocks + block, (own < lines) & (block < blocks)
            w.write_piece(at, both >> Uint32(8 * i) & Uint32(0xFF), 1, ok)

    @staticmethod
    def _bytes(numbers: list):
        a, b, c, e = (Uint32(n) for n in numbers)
        return a | (b << Uint32(8)) | (c << Uint32(16)) | (e << Uint32(24))

    def _write_amax(self, sizes: list, amax, memory) -> None:
        """The largest magnitude of the block as the bits of a float32 number: they are ordered as the numbers are, NaN
        above."""
        words = self._fold([[m] for m in self._fold(sizes, nan=True)], nan=True)
        bits = [Int32(w.bits_of(f)) for f in self.values.floats(words)]
        largest = bits[0] if len(bits) == 1 else cutlass.max(bits[0], bits[1])
        largest = cute.arch.warp_redux_sync(largest, "max")
        w.write_shared_words(memory + self.thread // d.WARP * 4, [Uint32(largest)], self.thread % d.WARP == 0)
        cute.arch.sync_threads()
        for word in [word for i in (0, 16) for word in w.read_shared_words(memory + i, 4)]:
            largest = cutlass.max(largest, Int32(word))
        inline_ptx("red.global.max.s32 [{$r0}], {$r1};", read_only_args=[amax, largest], predicate=self.thread == 0)

    # ---- the tile

    def run(self, load, rows, data, scale_inv, data_t=None, scale_inv_t=None, scale=None, amax=None) -> None:
        """``load(row, column, oks)`` gives the words of the 8 values from ``column`` on of each of the rows ``row``,
        ``row + 1``, ..., zeros where its ``ok`` (see ``Packed.read``) does not hold. The others are addresses; those of
        what the constants leave out are not looked at. ``amax`` holds 0 at first."""
        thread = copy.copy(self)  # its places are its own
        thread._place(rows)
        thread._tile(load, data, scale_inv, data_t, scale_inv_t, scale, amax)

    def _tile(self, load, data, scale_inv, data_t, scale_inv_t, scale, amax) -> None:
        memory = (
            w.shared(SmemAllocator(), 6 * SIDE * self.values.itemsize // 4 + 2 * SIDE if self.shared else 8)
            if self.shared or self.amax
            else None
        )
        words = load(self.row, self.column, [self._ok(i) for i in range(_EDGE)])
        sizes = [self.values.magnitudes(row) for row in words] if self.kind != fp8.TENSOR or self.amax else None
        if self.kind == fp8.TENSOR:
            if self.amax:
                self._write_amax(sizes, amax, memory)
            of_rows, of_columns = self._tensor_scales(scale, scale_inv)
        elif self.kind == fp8.MX:
            of_rows, of_columns = self._mx_scales(sizes, scale_inv, scale_inv_t)
        elif self.transposed:
            of_rows, of_columns = self._both_block_scales(sizes, scale_inv, scale_inv_t, memory)
        else:
            of_rows, of_columns = self._row_block_scales(sizes, scale_inv)
        at, columns = data + Int64(self.row) * self.width + self.column, []
        for half in range(0, _EDGE, 4):
            numbers = [self.values.floats(words[half + i]) for i in range(4)]
            for i in range(4):
                line = [d.mul(v, of_rows[half + i]) for v in numbers[i]]
                self._write(
                    at + (half + i) * self.width, [self._cast(line[:4]), self._cast(line[4:])], self._ok(half + i)
                )
            if self.transposed:
                columns.append(
                    [self._cast([d.mul(numbers[i][j], of_columns[j]) for i in range(4)]) for j in range(_EDGE)]
                )
        if self.transposed:
            whole = self.rows % _EDGE == 0
            at = data_t + Int64(self.column) * self.rows + self.row
            self._write_columns(at, [list(pair) for pair in zip(*columns, strict=True)], whole)

    def _cast(self, values: list):
        return fp8.cast(values, self.dtype, self.arch)

    def _write(self, at, words: list, ok) -> None:
        if self.vector:
            w.write_words(at, words, ok)
        else:
            for j, p in enumerate(ok):
                w.write_piece(at + j, words[j // 4] >> Uint32(8 * (j % 4)), 1, p)

    @cute.jit
    def _write_columns(self, at, words, whole):
        """8 bytes of each of 8 columns. Where the rows do not divide by 8, places do neither."""
        if whole:
            for j in cutlass.range_constexpr(_EDGE):
                w.write_words(
                    at + Int64(j) * self.rows, words[j], (self.row < self.rows) & (self.column + j < self.width)
                )
        else:
            for j in cutlass.range_constexpr(_EDGE):
                for i in cutlass.range_constexpr(_EDGE):
                    ok = (self.row + i < self.rows) & (self.column + j < self.width)
                    w.write_piece(at + Int64(j) * self.rows + i, words[j][i // 4] >> Uint32(8 * (i % 4)), 1, ok)
