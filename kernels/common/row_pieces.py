"""Device code: rows of one width, spread over blocks in pieces."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from . import device as d


def both(a, b):
    """a and b, of which a may be Python's True."""
    return b if a is True else a & b


class RowPieces:
    """Rows of ``vectors`` accesses. A block of at most ``threads`` has a piece of a row, ``each`` accesses for each
    thread at most, or several rows of less than a warp; with ``whole`` it has all of a row. So a block divides once, by
    a constant, a thread has one row, and its accesses lie at constant distances. Such blocks are fewer than 2^31 for
    any tensor that fits a device."""

    def __init__(self, vectors: int, threads: int, each: int, *, whole: bool = False) -> None:
        self.vectors, self.each = vectors, min(each, -(-vectors // d.WARP))
        self.pieces = 1 if whole else -(-vectors // (threads * self.each))
        if vectors < d.WARP:
            self.lanes = 1 << (vectors - 1).bit_length()
            self.rows = threads // self.lanes
        else:
            per_piece = min(threads * self.each, -(-vectors // self.pieces))
            self.lanes, self.rows = d.WARP * -(-per_piece // (self.each * d.WARP)), 1
        self.threads = self.lanes * self.rows

    def blocks(self, rows):
        return (rows + (self.rows - 1)) // self.rows * self.pieces

    def place(self, block, rows) -> tuple:
        """(row, its first vector, whether the row is there) of this thread."""
        block, thread = Uint32(block), cute.arch.thread_idx()[0]
        if self.rows > 1:
            row = Int64(block * self.rows + Uint32(thread) // self.lanes)
            return row, thread % self.lanes, row < Int64(rows)
        if self.pieces == 1:
            return Int64(block), thread, True
        row = block // self.pieces
        return Int64(row), Int32(block - row * self.pieces) * (self.lanes * self.each) + thread, True

    def steps(self, first, there) -> list:
        """(vectors behind the thread's first one, whether it is there) of each of its vectors."""
        exact = self.pieces * self.each * self.lanes == self.vectors
        return [
            (u * self.lanes, there if exact else both(there, first + u * self.lanes < self.vectors))
            for u in range(self.each)
        ]
