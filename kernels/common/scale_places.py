"""Device code: scales of blocks of 128 values that a tile of 128 x 128 has left beside each other, to their places.

In [rows, tiles] and [columns, tiles down] the scales of one tile are a column: 4 bytes in each of 128 sectors of 32.
So tiles may write them to a workspace instead, [tile, 2, 128] float32, rows' scales and then columns', tiles row by
row, in whole sectors; and this kernel, behind theirs, transposes them, 32 x 32 at once through shared memory, both
matrices in one launch. It reads and writes 128 bytes beside each other."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.memory import SmemAllocator

from . import device as d
from . import words as w

SIDE = 128  # of a tile
_EDGE = 32  # lines and tiles of a transposition
_WARPS = 8
_PITCH = _EDGE + 1  # words of a tile's lines in shared memory: lines and tiles both lie in different banks


class ScalePlaces:
    """For data of ``width`` values a row. ``overlap``: the grid starts while the kernel of the tiles ends, and waits
    for it on the device (sm_90 or newer)."""

    def __init__(self, width: int, overlap: bool) -> None:
        self.width, self.across, self.overlap = width, -(-width // SIDE), overlap

    def aside(self, workspace) -> tuple:
        """The addresses behind which tiles write their rows' and their columns' scales."""
        return workspace, workspace + 4 * SIDE

    @staticmethod
    def beside(tile):
        """How many bytes behind those of tile 0 the scales of tile ``tile`` begin."""
        return Int64(tile) * (2 * 4 * SIDE)

    def __call__(self, rows, workspace, scale_inv, scale_inv_t, stream) -> None:
        """The launch, from a host function: addresses of the workspace and of both matrices, which hold whole rows."""
        pieces = self._pieces(rows, self.across) + self._pieces(self.width, (rows + (SIDE - 1)) // SIDE)
        self.kernel(rows, workspace, scale_inv, scale_inv_t).launch(
            grid=[pieces, 1, 1], block=[_WARPS * d.WARP, 1, 1], stream=stream, use_pdl=self.overlap
        )

    @staticmethod
    def _pieces(lines, tiles):
        return ((lines + (_EDGE - 1)) // _EDGE) * ((tiles + (_EDGE - 1)) // _EDGE)

    @cute.kernel
    def kernel(self, rows, workspace: Int64, scale_inv: Int64, scale_inv_t: Int64):
        self.piece(rows, workspace, scale_inv, scale_inv_t, w.shared(SmemAllocator(), _EDGE * _PITCH))

    def piece(self, rows, workspace, scale_inv, scale_inv_t, memory) -> None:
        """32 lines of 32 tiles: the first blocks have those of rows, the others those of columns."""
        block, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        down, first = (rows + (SIDE - 1)) // SIDE, self._pieces(rows, self.across)
        of_rows = block < first

        def own(a, b):
            return d.select(of_rows, a, b)

        lines, tiles = own(rows, Int32(self.width)), own(Int32(self.across), down)
        place, each = own(block, block - first), (tiles + (_EDGE - 1)) // _EDGE
        line, tile = place // each * _EDGE, place % each * _EDGE  # the first ones
        group, x, y = line // SIDE, thread % d.WARP, thread // d.WARP
        near, far = self.aside(workspace)
        begin = own(near, far) + self.beside(own(group * self.across, group)) + (line % SIDE + x) * 4
        step = self.beside(own(Int32(1), Int32(self.across)))  # from tile to tile
        if self.overlap:
            cute.arch.griddepcontrol_wait()
        for k in range(0, _EDGE, _WARPS):
            word = w.read_words(begin + (tile + y + k) * step, 1, tile + y + k < tiles)
            w.write_shared_words(memory + ((y + k) * _PITCH + x) * 4, word)
        cute.arch.sync_threads()
        to = own(scale_inv, scale_inv_t) + (Int64(line + y) * tiles + (tile + x)) * 4
        for k in range(0, _EDGE, _WARPS):
            word = w.read_shared_words(memory + (x * _PITCH + (y + k)) * 4, 1)
            w.write_words(to + Int64(tiles) * (4 * k), word, (line + y + k < lines) & (tile + x < tiles))
