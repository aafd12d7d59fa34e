"""Device code: a tile of 128 x 128 values to fp8, by rows and, transposed, by columns, with the bits that
``integration/graph/ops/quantize.py`` defines.

A block of 256 threads takes a tile and passes it through shared memory. A warp fetches 16 rows, 16 lanes to a row, so
that a row is one stretch of memory, and quantises them. Where a transposed copy is made, each warp then takes 16
columns. Either way a line (a row or a column) belongs to 4 lanes: lane t has its values 16t ... 16t + 15 and those 64
further, and every thread has two lines, 8 apart. So the largest magnitude of 128 values takes two shuffles, a scale
serves 32 values, and bytes leave 16 at a time, 64 beside each other. Warps wait for each other once, before the
columns.

In shared memory a row is chunks of 16 bytes, chunk c of row r at place c ^ f(r) with f(r) = r % 2 + 2 * (r / 16 % 4)
(float32: ^ 3 more where c / 8 is odd). Every access then touches each bank once, in each of the parts in which it is
served:

* rows come as 8 chunks beside each other, all places of 128 bytes; float32 as every other one of 16, which the flip of
  bit 0 in the second half makes all;
* rows are read by 8 lanes at once, 4 chunks of row r and 4 of r + 1: f differs in bit 0, which tells the rows apart;
* columns are read by ldmatrix with a transposition, 8 rows to a matrix. Its row 2t + j is row 16t + 2m + j of the tile
  for matrix m, so that a thread has 16 rows in order, and f is 2t + j: all 8 places. float32 has no such instruction:
  4 bytes a lane, of 4 rows 16 apart and 8 columns, that is 2 chunks: also all 8 places.

Where values come from is the caller's. Rows and columns behind the end are 0 and not written.

Scales of 1 x 128 are 4 bytes of a tile in each of 256 sectors, and L2 is busy with them. With ``apart`` a tile leaves
them in a workspace, where they lie beside each other, and a second kernel (``scale_places.py``) moves them."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from . import device as d
from . import fp8
from . import words as w
from .scale_places import SIDE, ScalePlaces

THREADS = 256
_EDGE = 8  # values that are fetched together, and rows that a thread fetches
_PIECE = 16  # values of a line that a thread has together; it has two such pieces of each of two lines
_APART = SIDE // 2  # the pieces


def _all(*oks):
    """Whether all hold. What is True while the kernel is traced costs nothing."""
    left = [ok for ok in oks if ok is not True]
    if not left:
        return True
    result = left[0]
    for ok in left[1:]:
        result = result & ok
    return result


@dataclasses.dataclass
class _Way:
    """One way through a tile: two lines of a thread, ``line`` and ``line + 8`` of ``lines``, from ``place`` of
    ``length`` on; the tile is number ``tile`` of ``tiles`` along them. ``data`` and ``scale_inv`` are addresses."""

    words: list[list[Any]]
    line: Any
    lines: Any
    place: Any
    length: Any
    tile: Any
    tiles: Any
    data: Any
    scale_inv: Any


class QuantizeTile:
    """``values``: how the values lie in words (``Packed``). ``width``: of a row; with ``vector`` it divides by 8, and
    so do the places of 8 values in memory, else values are read and written one by one. ``kind``: ``fp8.BLOCK``,
    ``fp8.MX`` or ``fp8.TENSOR``. ``swizzled``: the layout of MXFP8 scales. ``transposed``: also the transposed copy.
    ``amax``: also the largest magnitude. ``batch``: rows that a thread fetches at once. ``down``: tiles are taken
    column by column. ``reverse``: from the last to the first. ``streaming``: nothing reads the data soon.
    ``resident``: blocks on a multiprocessor that registers leave room for, where shared memory does. ``apart``: scales
    go through a workspace (``fp8.BLOCK`` with ``transposed`` alone)."""

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
        batch: int = _EDGE,
        down: bool = False,
        reverse: bool = False,
        streaming: bool = False,
        resident: int = 4,
        apart: bool = False,
    ) -> None:
        assert not apart or (kind == fp8.BLOCK and transposed), (kind, transposed)
        self.values, self.width, self.vector, self.kind = values, width, vector, kind
        self.dtype, self.arch, self.power_of_two = dtype, arch, power_of_two
        self.swizzled, self.transposed, self.amax, self.batch = swizzled, transposed, amax, batch
        self.across, self.down, self.reverse, self.streaming = -(-width // SIDE), down, reverse, streaming  # tiles
        self.pitch, self.resident = SIDE * values.itemsize, resident  # bytes of a row in shared memory
        self.fold = 3 if values.itemsize == 4 else 0
        self.places = ScalePlaces(width, overlap=d.has(arch, 90)) if apart else None
        self.sizes = d.has(arch, 86) and values.itemsize == 2  # a maximum of magnitudes is one instruction

    def blocks(self, rows):
        """How many blocks of threads a launch needs for so many rows."""
        return ((rows + (SIDE - 1)) // SIDE) * self.across

    def launch(self, rows, stream) -> dict[str, Any]:
        """How a kernel of such tiles is launched. It needs no L1, but shared memory for as many blocks as fit."""
        return {"grid": [self.blocks(rows), 1, 1], "block": [THREADS, 1, 1], "stream": stream,
                "min_blocks_per_mp": self._resident(), "preferred_smem_carveout": 100}  # fmt: skip

    def scales(self, scale_inv, scale_inv_t, workspace) -> tuple:
        """What ``run`` is given as ``scale_inv`` and ``scale_inv_t``; ``workspace``: an address, looked at with
        ``apart``."""
        return (scale_inv, scale_inv_t) if self.places is None else self.places.aside(workspace)

    def move_scales(self, rows, scale_inv, scale_inv_t, workspace, stream) -> None:
        """With ``apart`` the launch behind that of the tiles."""
        if self.places is not None:
            self.places(rows, workspace, scale_inv, scale_inv_t, stream)

    def _resident(self) -> int:
        """As many as shared memory leaves room for: 5 leave a thread 48 registers, 4 leave it 64. MXFP8 both ways
        takes more than 48, and so do scales apart, which spill 16 bytes there; a cast without an instruction takes 80,
        with MXFP8 both ways more than that."""
        memory = 164 if not d.has(self.arch, 86) else 228 if d.has(self.arch, 90) and not d.has(self.arch, 120) else 100
        more = self.kind == fp8.MX and self.transposed
        most = min(self.resident, 5 - (more or self.places is not None) if d.has(self.arch, 89) else 3 - more)
        return min(most, memory // (SIDE * self.pitch // 1024 + 1))  # in KiB; a block takes 1 more

    def allocate(self, storage: SmemAllocator):
        """The address of the shared memory of a tile."""
        return w.shared(storage, SIDE * self.pitch // 4, alignment=SIDE)

    def run(self, load, rows, data, scale_inv, data_t=None, scale_inv_t=None, scale=None, amax=None, *, block=None,
            memory=None) -> None:  # fmt: skip
        """``load(row, column, oks)`` gives the words of the 8 values from ``column`` on of each of the rows ``row``,
        ``row + 1``, ..., zeros where its ``ok`` (see ``Packed.read``) does not hold. In its stead (address, bytes from
        row to row) of the values themselves: with ``vector`` and chunks of 16 bytes at multiples of 16 they are copied
        without a way through registers. The others are addresses; those of what the constants leave out are not looked
        at. ``amax`` holds 0 at first. ``block``: which of ``blocks`` this is, where it is not the grid's; ``memory``:
        what ``allocate`` gave, where that was before."""
        thread = copy.copy(self)  # its places are its own
        thread._place(rows, block)
        thread.memory = self.allocate(SmemAllocator()) if memory is None else memory
        thread._tile(load, data, scale_inv, data_t, scale_inv_t, scale, amax)

    def _tile(self, load, data, scale_inv, data_t, scale_inv_t, scale, amax) -> None:
        self._fetch(load)
        given = self._given(scale, scale_inv) if self.kind == fp8.TENSOR else None
        rows = self._rows(data, scale_inv)
        if self.amax:
            self._raise_amax(rows.words, amax)
        self._quantize(rows, given, self.width, self.vector)
        if self.transposed:
            cute.arch.sync_threads()
            self._quantize(self._columns(data_t, scale_inv_t), given, self.rows, None)

    # ---- places

    def _place(self, rows, block) -> None:
        """Which tile this block has, and who of it this thread is."""
        self.rows, self.tiles_down = rows, (rows + (SIDE - 1)) // SIDE
        thread, tile = cute.arch.thread_idx()[0], cute.arch.block_idx()[0] if block is None else block
        if self.reverse:
            tile = cute.arch.grid_dim()[0] - 1 - tile
        self.thread, self.warp, self.lane = thread, thread // d.WARP, thread % d.WARP
        if self.down:
            self.tile_row, self.tile_column = tile % self.tiles_down, tile // self.tiles_down
        else:
            self.tile_row, self.tile_column = tile // self.across, tile % self.across
        self.quarter, self.line = self.lane % 4, self.warp * 16 + self.lane // 4  # of a line; the first one

    def _chunk(self, chunk, low, high):
        """The place in bytes of a chunk in a row whose number has ``low`` as bit 0 and ``high`` as bits 4 and 5."""
        if self.fold:
            chunk = chunk ^ (chunk // 8 % 2 * self.fold)
        return (chunk ^ (high * 2) ^ low) * 16

    # ---- to shared memory

    def _fetch(self, load) -> None:
        """The warp's 16 rows: lanes 0 to 15 have the first 8 of them, 8 values beside each other each."""
        first, octet = self.warp * 16 + self.lane // 16 * _EDGE, self.lane % 16
        row, column = self.tile_row * SIDE + first, self.tile_column * SIDE + octet * _EDGE
        chunks = _EDGE * self.values.itemsize // 16
        places = [[self.memory + first * self.pitch + self._chunk(octet * chunks + k, low, self.warp % 4)
                   for k in range(chunks)] for low in (0, 1)]  # fmt: skip
        if isinstance(load, tuple):
            begin, stride = load
            at = begin + Int64(row) * stride + column * self.values.itemsize
            for i in range(_EDGE):
                for k, place in enumerate(places[i % 2]):
                    w.copy_chunk(at + i * stride + 16 * k, place + i * self.pitch, self._ok(row + i, column))
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(0)
        else:
            for start in range(0, _EDGE, self.batch):
                oks = [self._ok(row + i, column) for i in range(start, start + self.batch)]
                for i, words in enumerate(load(row + start, column, oks), start):
                    for k, place in enumerate(places[i % 2]):
                        w.write_shared_words(place + i * self.pitch, words[4 * k : 4 * k + 4])
        cute.arch.sync_warp()

    def _ok(self, row, column):
        """Which of 8 values exist, as ``Packed.read`` takes it."""
        row_ok = row < self.rows
        if self.vector:
            return row_ok & (column < self.width)
        return [row_ok & (column + j < self.width) for j in range(_EDGE)]

    # ---- and from it

    def _rows(self, data, scale_inv) -> _Way:
        """Of the rows that the thread's warp has fetched."""
        chunks, at = _PIECE * self.values.itemsize // 16, self.memory + self.line * self.pitch
        places = [at + self._chunk(self.quarter * chunks + k, self.line % 2, self.warp % 4) for k in range(chunks)]
        words = []
        for down in (0, 8 * self.pitch):
            pieces = [place + (down + far) for far in (0, _APART * self.values.itemsize) for place in places]
            words.append([word for piece in pieces for word in w.read_shared_words(piece, 4)])
        line, place = self.tile_row * SIDE + self.line, self.tile_column * SIDE + self.quarter * _PIECE
        return _Way(words, line, self.rows, place, self.width, self.tile_column, self.across, data, scale_inv)

    def _columns(self, data_t, scale_inv_t) -> _Way:
        """Of the columns."""
        words = [self._column_words(octet) for octet in (0, 1)]
        line, place = self.tile_column * SIDE + self.line, self.tile_row * SIDE + self.quarter * _PIECE
        return _Way(words, line, self.width, place, self.rows, self.tile_row, self.tiles_down, data_t, scale_inv_t)

    def _column_words(self, octet: int) -> list:
        """The thread's column among 8 of the warp's 16."""
        pieces = (0, _APART * self.pitch)
        if self.values.itemsize == 4:
            column = self.lane // 4
            chunk, at = self.warp * 4 + octet * 2 + column // 4, self.memory + self.quarter * (_PIECE * self.pitch)
            places = [at + self._chunk(chunk, low, self.quarter) + column % 4 * 4 for low in (0, 1)]
            return [w.read_shared_words(places[i % 2] + (far + i * self.pitch), 1)[0]
                    for far in pieces for i in range(_PIECE)]  # fmt: skip
        matrix, row = self.lane // 8, self.lane % 8  # of four; the lane says where its row begins
        at = self.memory + self._matrix_row(matrix, row) * self.pitch
        at = at + self._chunk(self.warp * 2 + octet, row % 2, row // 2)
        return [word for far in pieces for half in (0, 8 * self.pitch) for word in w.read_matrices(at + (far + half))]

    @staticmethod
    def _matrix_row(matrix, row):
        """Which row of the tile, so that a lane's rows of four matrices are 8 in order."""
        return row // 2 * _PIECE + matrix * 2 + row % 2

    # ---- a way

    def _quantize(self, way: _Way, given, length, vector) -> None:
        """``length``: of a line, a number where it is known while the kernel is traced, and then ``vector`` says
        whether bytes may be written 8 at a time; None: that is seen from the length."""
        if self.kind == fp8.TENSOR:
            scales = [[given, given]] * 2
        elif self.kind == fp8.BLOCK:
            scales = [[scale, scale] for scale in self._block_scales(way)]
        else:
            scales = self._mx_scales(way)
        begin = way.data + Int64(way.line) * way.length + way.place
        for i, (words, (near, far)) in enumerate(zip(way.words, scales, strict=True)):
            values = [d.mul(v, near if k < _PIECE else far) for k, v in enumerate(self.values.floats(words))]
            made = [self._cast(values[k : k + 4]) for k in range(0, 2 * _PIECE, 4)]
            at, there = begin + Int64(way.length) * (8 * i), way.line + 8 * i < way.lines
            if vector is None:
                self._write_any(at, made, there, way.place, way.length)
            else:
                size = 16 if vector and length % 16 == 0 else 8 if vector else 1
                self._write(at, made, there, way.place, length, size)

    def _cast(self, values: list):
        return fp8.cast(values, self.dtype, self.arch)

    def _given(self, scale, scale_inv):
        given = w.float_of(w.read_words(scale, 1, True)[0])
        first = (self.thread == 0) & (self.tile_row == 0) & (self.tile_column == 0)
        w.write_words(scale_inv, [w.bits_of(d.div(1.0, given))], first)
        return given

    def _raise_amax(self, lines: list, amax) -> None:
        fp8.raise_amax(d.largest(*self._numbers(self._largest(lines, nan=True))), amax)

    def _largest(self, lines: list, nan: bool = False) -> list:
        """The largest magnitude of each of several lists of words, as words with any sign."""
        lines = lines if self.sizes else [self.values.magnitudes(words) for words in lines]
        return self.values.transposed_largest(lines, nan, self.sizes)

    def _numbers(self, sizes: list) -> list:
        return self.values.floats(self.values.magnitudes(sizes) if self.sizes else sizes)

    def _own(self, one, two):
        """The first of two for lanes of even number, the second for the others."""
        return d.select(self.quarter % 2 == 0, one, two)

    def _both(self, own) -> list:
        """What lanes of even and of odd number have."""
        other = cute.arch.shuffle_sync_bfly(own, offset=1)
        return [self._own(own, other), self._own(other, own)]

    def _over_lanes(self, sizes: list, *offsets: int) -> list:
        for offset in offsets:
            others = [cute.arch.shuffle_sync_bfly(size, offset=offset) for size in sizes]
            sizes = [self.values.largest(a, b, sizes=self.sizes) for a, b in zip(sizes, others, strict=True)]
        return self._numbers(sizes)

    def _block_scales(self, way: _Way) -> list:
        """Of both lines, of which each lane divides for one."""
        amax = self._own(*self._over_lanes(self._largest(way.words), 1, 2))
        scale, inverse = fp8.block_scale(amax, self.dtype, self.power_of_two)
        down, first = self._own(Int32(0), Int32(8)), self.quarter < 2
        if self.places is None:
            line = way.line + down
            at, there = way.scale_inv + (Int64(line) * way.tiles + way.tile) * 4, first & (line < way.lines)
        else:  # in whole sectors, what is behind the end too
            tile = self.places.beside(self.tile_row * self.across + self.tile_column)
            at, there = way.scale_inv + tile + (self.line + down) * 4, first
        w.write_words(at, [w.bits_of(inverse)], there)
        return self._both(scale)

    def _mx_scales(self, way: _Way) -> list:
        """Of both lines, two pieces each. A block is a piece of two lanes; each makes the scales of one line."""
        half = len(way.words[0]) // 2
        pieces = [words[part] for part in (slice(half), slice(half, None)) for words in way.words]
        one, two, far_one, far_two = self._over_lanes(self._largest(pieces), 1)
        made = [fp8.mx_scale(self._own(*pair), self.dtype) for pair in ((one, two), (far_one, far_two))]
        self._write_exponents(way, *(e for _, e in made))
        return [list(pair) for pair in zip(*(self._both(scale) for scale, _ in made), strict=True)]

    def _write_exponents(self, way: _Way, near, far) -> None:
        """The four scales of a line are bytes beside each other: of blocks 0 and 1, near ones, and 2 and 3."""
        high = self.quarter // 2
        word = (Uint32(near) | (Uint32(far) << Uint32(16))) << Uint32(high * 8)
        word = word | cute.arch.shuffle_sync_bfly(word, offset=2)
        line = way.line + self._own(Int32(0), Int32(8))
        if self.swizzled:  # tiles are whole: what is behind the end has scale 0
            w.write_words(way.scale_inv + fp8.swizzled(line, way.tile * 4, way.tiles), [word], high == 0)
            return
        blocks = (way.length + 31) // 32
        at, whole, there = way.scale_inv + Int64(line) * blocks + way.tile * 4, blocks % 4 == 0, line < way.lines
        if whole is not False:
            w.write_words(at, [word], _all(high == 0, there, whole))
        if whole is not True:
            partial = True if whole is False else blocks % 4 != 0
            for i in range(2):
                own = high * 2 + i
                w.write_piece(at + own, word >> Uint32(own * 8), 1, _all(there, way.tile * 4 + own < blocks, partial))

    # ---- to global memory

    @cute.jit
    def _write_any(self, at, words, there, place, length):
        if length % 16 == 0:
            self._write(at, words, there, place, length, 16)
        else:
            if length % 8 == 0:
                self._write(at, words, there, place, length, 8)
            else:
                self._write(at, words, there, place, length, 1)

    def _write(self, at, words: list, there, place, length, size: int) -> None:
        """Two pieces of 16 bytes, ``size`` (16, 8 or 1) at a time, of a line that is ``there``."""
        for far in (0, _APART):
            first = far // _APART * 4
            if size == 1:
                left = d.select(there, length - (place + far), Int32(0))
                for k in range(4):
                    w.write_bytes(at + far + 4 * k, words[first + k], left - 4 * k)
                continue
            for k in range(0, 4, size // 4):
                part, ok = words[first + k : first + k + size // 4], there & (place + (far + 4 * k) < length)
                w.write_words(at + far + 4 * k, part, ok, streaming=self.streaming)
