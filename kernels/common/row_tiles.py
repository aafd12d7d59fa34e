"""Device code: rows of one width, spread over the threads of a block, and their way through shared memory.

A row of ``width`` elements is ``vectors`` vectors of ``step`` elements. ``threads`` threads share it: vector c *
threads + t is chunk c of thread t. A block works on ``rows`` rows at once, a tile. Where the last chunk passes the
row's end, its fragment is zero.

Stages: every thread copies with cp.async just those vectors that it reads later, several tiles ahead, so that no
barrier is needed and bytes in flight do not cost registers.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from . import device as d


@cute.jit
def read_if(ok, row, index, into):
    if ok:
        d.read(row, index, into)


@cute.jit
def write_if(ok, row, index, values, streaming: cutlass.Constexpr):
    if ok:
        d.write(row, index, values, streaming=streaming)


@cute.jit
def put_if(ok, vector, index, value):
    """A number to an element of a one-dimensional tensor."""
    if ok:
        vector[index] = value


@cute.jit
def number_if(ok, vector, index, otherwise):
    """An element of a one-dimensional tensor, ``otherwise`` where not ``ok``."""
    value = otherwise
    if ok:
        value = vector[index]
    return value


@cute.jit
def _copy_if(ok, source, index, target, step: cutlass.Constexpr):
    if ok:
        d.copy_async(source, index, target, index, step)
    else:
        empty = d.fragment(source.element_type, step)
        empty.fill(0)
        d.write_shared(target, index, empty)


class Tiles:
    """``exact``: every row of every tile exists, as where a block has one row at a time; else ``rows_left`` says which
    do."""

    def __init__(self, width: int, step: int, threads: int, rows: int) -> None:
        assert width % step == 0, (width, step)
        self.width, self.step = width, step
        self.vectors = width // step
        self.chunks = -(-self.vectors // threads)
        self.padded = self.chunks * threads * step  # elements of a row in shared memory
        self.exact = rows == 1
        self.groups = d.Groups(threads, rows)

    def place(self):
        """(group, thread): which of the tile's rows this thread works on, and its place among the row's threads."""
        index = cute.arch.thread_idx()[0]
        if self.groups.rows == 1:
            return Int32(0), index
        return index // self.groups.threads, index % self.groups.threads

    def vector_ok(self, chunk: int, thread):
        """Whether the row has the thread's vector of a chunk; True where it has for every thread."""
        if (chunk + 1) * self.groups.threads <= self.vectors:
            return True
        return thread + chunk * self.groups.threads < self.vectors

    def row_ok(self, row, count):
        """Whether row ``row`` of ``count`` exists; True where all do."""
        return True if self.exact else row < count

    @staticmethod
    def both(a, b):
        return b if a is True else a if b is True else a & b

    # ---- global memory

    def read(self, source, chunk: int, thread, ok):
        """The thread's fragment of a chunk of ``source``, a row or a vector of ``width``; zeros where ``ok`` is not or
        the row ends."""
        into = d.fragment(source.element_type, self.step)
        ok = self.both(ok, self.vector_ok(chunk, thread))
        index = thread + chunk * self.groups.threads
        if ok is True:
            d.read(source, index, into)
        else:
            into.fill(0)
            read_if(ok, source, index, into)
        return into

    def write(self, target, chunk: int, thread, ok, values, streaming: bool = False) -> None:
        """The thread's fragment of a chunk to a row of global memory."""
        ok = self.both(ok, self.vector_ok(chunk, thread))
        index = thread + chunk * self.groups.threads
        if ok is True:
            d.write(target, index, values, streaming=streaming)
        else:
            write_if(ok, target, index, values, streaming)

    def vector(self, source, thread):
        """All chunks of a vector of ``width`` that every row uses; None for an absent one."""
        return None if source is None else [self.read(source, c, thread, True) for c in range(self.chunks)]

    def put(self, target, row, thread, ok, value) -> None:
        """A row's number to ``target`` [rows]."""
        put_if(self.both(ok, thread == 0), target, row, value)

    # ---- shared memory

    def allocate(self, storage: d.SmemAllocator, dtype, stages: int):
        """[stages, rows, padded] of ``dtype``."""
        layout = cute.make_ordered_layout((stages, self.groups.rows, self.padded), order=(2, 1, 0))
        return storage.allocate_tensor(dtype, layout, byte_alignment=16)

    def issue(self, sources, buffers, stage, group, thread, row, ok) -> None:
        """Starts the copies of row ``row`` of each source into a stage of its buffer, and makes them one group. Where
        the row is not ``ok`` or has ended, zeros are put there."""
        for source, buffer in zip(sources, buffers, strict=True):
            from_row, to_row = source[Int64(row), None], buffer[stage, group, None]
            for c in range(self.chunks):
                index = thread + c * self.groups.threads
                _copy_if(self.both(ok, self.vector_ok(c, thread)), from_row, index, to_row, self.step)
        cute.arch.cp_async_commit_group()

    def read_stage(self, buffer, stage, group, chunk: int, thread):
        """The thread's fragment of a chunk of a staged row."""
        into = d.fragment(buffer.element_type, self.step)
        d.read_shared(buffer[stage, group, None], thread + chunk * self.groups.threads, into)
        return into
