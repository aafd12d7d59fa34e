"""Device code: rows of one width, how they are spread over blocks, and a token's few numbers (its rows, its
probabilities).

A row is ``vectors`` accesses of ``access`` bytes (16, 8, 4 or 2), which divide it. Addresses are Int64."""

from __future__ import annotations

import math

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from ...common import device as d
from ...common import words as w
from ...common.row_pieces import RowPieces


class Rows(RowPieces):
    """Rows of ``width`` values of ``dtype``, ``vectors`` accesses for each thread at most; with ``whole`` a block has
    all of a row."""

    def __init__(
        self, dtype: str, width: int, access: int, threads: int, vectors: int = 1, *, whole: bool = False
    ) -> None:
        self.packed, self.access, self.width = w.Packed(dtype), access, width
        self.elements, self.nbytes = access // self.packed.itemsize, width * self.packed.itemsize
        super().__init__(self.nbytes // access, threads, vectors, whole=whole)
        self.chunks = -(-self.vectors // self.lanes)  # of a thread, where a block has all of a row

    # ---- where

    def mine(self, first, there) -> list:
        """(bytes behind the thread's first vector, whether it is there) of each of its vectors."""
        return [(step * self.access, ok) for step, ok in self.steps(first, there)]

    def place_of(self, base, row, stride, first):
        """The address of vector ``first`` of a row; ``stride`` in elements."""
        return base + Int64(row) * (Int64(stride) * self.packed.itemsize) + first * self.access

    # ---- vectors

    def read(self, at, ok) -> list:
        """A vector as words, zeros where not ``ok``."""
        return w.read_words(at, self.access // 4, ok) if self.access >= 4 else [w.read_piece(at, 2, ok)]

    def write(self, at, words: list, ok, streaming: bool) -> None:
        if self.access >= 4:
            w.write_words(at, words, ok, streaming=streaming)
        else:
            w.write_piece(at, words[0], 2, ok)

    def floats(self, words: list) -> list:
        return self.packed.floats(words)[: self.elements]

    def words(self, values: list) -> list:
        """float32 numbers rounded once; a single one fills its word."""
        return self.packed.words(values * self.packed.per_word if len(values) < self.packed.per_word else values)


class Numbers:
    """``count`` numbers of a dtype for each token, [tokens, count] contiguous, and such numbers one by one."""

    def __init__(self, dtype: str, count: int) -> None:
        self.count, self.kind = count, None if dtype == "int32" else w.Packed(dtype)
        self.size = 4 if self.kind is None else self.kind.itemsize
        self.access = math.gcd(count * self.size, 16)  # bytes that divide a token's

    def at(self, base, token):
        return base + token * (self.count * self.size)

    def read(self, base, token, there) -> list:
        """The bits of a token's numbers, each in the low part of a word."""
        at = self.at(base, token)
        if self.access < 4:
            return [w.read_piece(at + i * self.size, self.size, there) for i in range(self.count)]
        words = []
        for start in range(0, self.count * self.size, self.access):
            words += w.read_words(at + start, self.access // 4, there)
        return words if self.size == 4 else [half for word in words for half in (word, word >> Uint32(16))]

    def ints(self, base, token, there) -> list:
        return [Int32(word) for word in self.read(base, token, there)]

    def floats(self, words: list) -> list:
        """float32 numbers from what ``read`` gave."""
        return [self.kind.floats([word])[0] for word in words]

    def rounded(self, values: list) -> list:
        """float32 numbers, each in the low part of a word."""
        return [self.kind.words([v] * self.kind.per_word)[0] for v in values]

    def write(self, base, token, words: list, ok) -> None:
        """Numbers of a token, each in the low part of a word."""
        for i, word in enumerate(words):
            w.write_piece(self.at(base, token) + i * self.size, word, self.size, ok)

    def put(self, base, place, word, ok) -> None:
        """The low part of a word as number ``place`` of all."""
        w.write_piece(base + Int64(place) * self.size, word, self.size, ok)

    def get(self, base, place, ok):
        """The bits of number ``place`` of all, 0 where not ``ok``."""
        return w.read_piece(base + Int64(place) * self.size, self.size, ok)

    def fake(self, tokens):
        """What a kernel is compiled from."""
        kind = d.TYPES["int32" if self.kind is None else self.kind.dtype]
        return cute.runtime.make_fake_tensor(
            kind, (tokens, self.count), stride=(self.count, 1), assumed_align=max(self.size, self.access)
        )
