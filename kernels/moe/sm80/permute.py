"""Device code of permute, unpermute and their gradients, as ``integration/graph/ops/moe.py`` defines them.

Rows are spread from their tokens: a token's row is read once and written to each of its slots' rows, so x comes from
memory once, whatever the number of slots, and no inverse of the map is needed. Blocks of their own, in front of the
others, fill the padding rows of the groups with zeros. Sums gather: a thread reads its vector of all rows of a token
and writes one. Nothing is summed by atomics, and rows behind the last group are not touched."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from ...common import device as d
from ...common import words as w
from ...common.row_pieces import both
from ...common.row_tiles import number_if
from .rows import Numbers, Rows

PADDING_ROWS = 16  # of a block that fills them
MOST_IN_FLIGHT = 8  # vectors that a thread reads at once
UNROLLED = 4  # chunks of a row up to which their loop is unrolled


class Padding:
    """The padding rows of ``experts`` groups, each a multiple of ``align`` rows. Blocks of it are the first of a
    grid."""

    def __init__(self, experts: int, align: int, rows: Rows, numbers: Numbers | None, streaming: bool) -> None:
        self.parts = -(-(align - 1) // PADDING_ROWS)
        self.blocks = experts * self.parts
        self.rows, self.numbers, self.streaming = rows, numbers, streaming

    @cute.jit
    def fill(self, block, counts, offsets, to_rows, to_numbers):
        """Zeros in one block's share of the rows, and in their numbers where there are any."""
        expert, thread = block // self.parts, cute.arch.thread_idx()[0]
        begin = number_if(expert > 0, offsets, expert - 1, Int32(0))
        first = begin + counts[expert] + (block - expert * self.parts) * PADDING_ROWS
        end = cutlass.min(offsets[expert], first + PADDING_ROWS)
        for row in cutlass.range(first, end):
            for vector in cutlass.range(thread, self.rows.vectors, self.rows.threads):
                self.zero(to_rows, row, vector)
            self.zero_number(to_numbers, row, thread)

    def zero(self, to_rows, row, vector) -> None:
        zeros = [cutlass.Uint32(0)] * max(1, self.rows.access // 4)
        self.rows.write(self.rows.place_of(to_rows, row, self.rows.width, vector), zeros, True, self.streaming)

    def zero_number(self, to_numbers, row, thread) -> None:
        if self.numbers is not None:
            self.numbers.put(to_numbers, row, cutlass.Uint32(0), thread == 0)


def tensors(dtype: str, width: int, access: int, slots: int, weight: str | None, align: int, experts: int) -> tuple:
    """(x or dy, row_map, counts, offsets, probs) to compile from."""
    tokens, kind = cute.sym_int(), w.Packed(dtype)
    ends = [d.fake_vector("int32" if align > 1 else None, experts) for _ in range(2)]
    probs = None if weight is None else Numbers(weight, slots).fake(tokens)
    return (
        d.fake_rows(dtype, tokens, width, access // kind.itemsize),
        Numbers("int32", slots).fake(tokens),
        *ends,
        probs,
    )


# ---- rows to their slots ---------------------------------------------------------------------------------------------


class Spread:
    """Rows [c, width] of x [tokens, width]; times the slot's probability with ``weighted``; with ``numbers`` each row's
    probability too."""

    def __init__(
        self,
        dtype: str,
        width: int,
        access: int,
        slots: int,
        weight: str | None,
        weighted: bool,
        numbers: bool,
        experts: int,
        align: int,
        threads: int,
        vectors: int,
        streaming: bool,
    ) -> None:
        self.rows, self.map = Rows(dtype, width, access, threads, vectors), Numbers("int32", slots)
        self.probs = None if weight is None else Numbers(weight, slots)
        self.weighted, self.numbers, self.streaming = weighted, numbers, streaming
        self.padding = Padding(experts, align, self.rows, self.probs if numbers else None, streaming)

    @cute.jit
    def launch(
        self,
        mX: cute.Tensor,
        mMap: cute.Tensor,
        mCounts: cute.Tensor | None,
        mOffsets: cute.Tensor | None,
        mProbs: cute.Tensor | None,
        to_rows: Int64,
        to_numbers: Int64,
        stream,
    ):
        self.start(mX, mMap, mCounts, mOffsets, mProbs, to_rows, to_numbers, stream)

    def start(self, mX, mMap, mCounts, mOffsets, mProbs, to_rows, to_numbers, stream) -> None:
        """The launch, from a host function."""
        grid = [self.rows.blocks(mX.shape[0]) + self.padding.blocks, 1, 1]
        kernel = self.kernel(mX, mMap, mCounts, mOffsets, mProbs, to_rows, to_numbers)
        kernel.launch(grid=grid, block=[self.rows.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,
        mMap: cute.Tensor,
        mCounts: cute.Tensor | None,
        mOffsets: cute.Tensor | None,
        mProbs: cute.Tensor | None,
        to_rows,
        to_numbers: Int64,
    ):
        block = cute.arch.block_idx()[0]
        if const_expr(self.padding.blocks == 0):
            self.move(block, mX, mMap, mProbs, to_rows, to_numbers)
        else:
            if block < self.padding.blocks:
                self.padding.fill(block, mCounts, mOffsets, to_rows, to_numbers)
            else:
                self.move(block - self.padding.blocks, mX, mMap, mProbs, to_rows, to_numbers)

    def move(self, block, mX, mMap, mProbs, to_rows, to_numbers) -> None:
        r = self.rows
        token, first, there = r.place(block, mX.shape[0])
        x, own = r.place_of(w.address(mX), token, mX.stride[0], first), r.mine(first, there)
        words = [r.read(x + at, ok) for at, ok in own]
        places = self.map.ints(w.address(mMap), token, there)
        bits = None if self.probs is None else self.probs.read(w.address(mProbs), token, there)
        factors = self.probs.floats(bits) if self.weighted else [None] * len(places)
        values = [r.floats(v) for v in words] if self.weighted else None
        for slot, (place, factor) in enumerate(zip(places, factors, strict=True)):
            to, kept = r.place_of(to_rows, place, r.width, first), place >= 0
            for v, (at, ok) in enumerate(own):
                out = words[v] if factor is None else r.words([d.mul(x, factor) for x in values[v]])
                r.write(to + at, out, both(ok, kept), self.streaming)
            if self.numbers:
                self.probs.put(to_numbers, place, bits[slot], both(there, kept & (first == 0)))


def spread(
    arch: str,
    *,
    dtype: str,
    width: int,
    access: int,
    slots: int,
    weight: str | None,
    weighted: bool,
    numbers: bool,
    experts: int,
    align: int,
    threads: int,
    vectors: int,
    streaming: bool,
):
    """A function (x [tokens, width] with any row stride, row_map [tokens, slots], counts and offsets [experts] where
    ``align`` > 1 else None, probs [tokens, slots] of ``weight`` or None, addresses of rows and of row_probs).
    ``access`` bytes divide rows and what lies between them. ``threads`` of a block at most, ``vectors`` of a thread;
    ``streaming``: L2 may drop what is written first."""
    work = Spread(dtype, width, access, slots, weight, weighted, numbers, experts, align, threads, vectors, streaming)
    given = tensors(dtype, width, access, slots, weight, align, experts)
    return cute.compile(work.launch, *given, Int64(0), Int64(0), d.fake_stream(), options=d.OPTIONS)


# ---- slots to their sum ----------------------------------------------------------------------------------------------


class Gather:
    """y [tokens, width], the sum of each token's rows in slot order, times ``weight``s where there are any; with
    ``numbers`` also the number of each slot's row."""

    def __init__(
        self,
        dtype: str,
        width: int,
        access: int,
        slots: int,
        weight: str | None,
        numbers: str | None,
        threads: int,
        vectors: int,
        streaming: bool,
    ) -> None:
        self.rows, self.map = Rows(dtype, width, access, threads, vectors), Numbers("int32", slots)
        self.probs = None if weight is None else Numbers(weight, slots)
        self.numbers, self.streaming = None if numbers is None else Numbers(numbers, slots), streaming
        self.batch = max(1, MOST_IN_FLIGHT // self.rows.each)

    @cute.jit
    def launch(
        self,
        mRows: cute.Tensor,
        mMap: cute.Tensor,
        mProbs: cute.Tensor | None,
        mNumbers: cute.Tensor | None,
        to_y: Int64,
        to_numbers: Int64,
        stream,
    ):
        kernel = self.kernel(mRows, mMap, mProbs, mNumbers, to_y, to_numbers)
        kernel.launch(grid=[self.rows.blocks(mMap.shape[0]), 1, 1], block=[self.rows.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self,
        mRows: cute.Tensor,
        mMap: cute.Tensor,
        mProbs: cute.Tensor | None,
        mNumbers: cute.Tensor | None,
        to_y: Int64,
        to_numbers: Int64,
    ):
        self.work(mRows, mMap, mProbs, mNumbers, to_y, to_numbers)

    def work(self, mRows, mMap, mProbs, mNumbers, to_y, to_numbers) -> None:
        r = self.rows
        token, first, there = r.place(cute.arch.block_idx()[0], mMap.shape[0])
        places = self.map.ints(w.address(mMap), token, there)
        factors = [None] * len(places)
        if self.probs is not None:
            factors = self.probs.floats(self.probs.read(w.address(mProbs), token, there))
        own, begin = r.mine(first, there), w.address(mRows)
        totals: list = [None] * len(own)
        for start in range(0, len(places), self.batch):
            part = list(zip(places, factors, strict=True))[start : start + self.batch]
            read = [
                [r.read(r.place_of(begin, place, mRows.stride[0], first) + at, both(ok, place >= 0)) for at, ok in own]
                for place, _ in part
            ]
            for (_, factor), vectors in zip(part, read, strict=True):
                totals = [self.added(total, r.floats(v), factor) for total, v in zip(totals, vectors, strict=True)]
        y = r.place_of(to_y, token, r.width, first)
        for (at, ok), total in zip(own, totals, strict=True):
            r.write(y + at, r.words(total), ok, self.streaming)
        if self.numbers is not None:
            found, mine = w.address(mNumbers), both(there, first == 0)
            self.numbers.write(
                to_numbers, token, [self.numbers.get(found, p, both(mine, p >= 0)) for p in places], mine
            )

    @staticmethod
    def added(total: list | None, values: list, factor) -> list:
        if total is None:
            return values if factor is None else [d.mul(v, factor) for v in values]
        if factor is None:
            return [d.add(t, v) for t, v in zip(total, values, strict=True)]
        return [d.fma(v, factor, t) for t, v in zip(total, values, strict=True)]


def gather(
    arch: str,
    *,
    dtype: str,
    width: int,
    access: int,
    slots: int,
    weight: str | None,
    numbers: str | None,
    threads: int,
    vectors: int,
    streaming: bool,
):
    """A function (rows [c, width] with any row stride, row_map [tokens, slots], probs [tokens, slots] of ``weight`` or
    None, row_probs [c] of ``numbers`` or None, addresses of y and of probs by slot); other constants as ``spread`` has
    them."""
    work = Gather(dtype, width, access, slots, weight, numbers, threads, vectors, streaming)
    places, count = cute.sym_int(), cute.sym_int()
    probs = None if weight is None else Numbers(weight, slots).fake(places)
    given = (
        d.fake_rows(dtype, count, width, access // w.Packed(dtype).itemsize),
        Numbers("int32", slots).fake(places),
        probs,
        d.fake_vector(numbers, count),
    )
    return cute.compile(work.launch, *given, Int64(0), Int64(0), d.fake_stream(), options=d.OPTIONS)


def pick(arch: str, *, numbers: str, slots: int, threads: int):
    """A function (row_map [tokens, slots], row_probs [c], address of probs by slot): the number of each slot's row, 0
    where the slot is dropped. A thread has a token."""
    places, kind = Numbers("int32", slots), Numbers(numbers, slots)

    @cute.kernel
    def kernel(mMap: cute.Tensor, mNumbers: cute.Tensor, to: Int64):
        token = Int64(cute.arch.block_idx()[0]) * threads + cute.arch.thread_idx()[0]
        there, found = token < Int64(mMap.shape[0]), w.address(mNumbers)
        rows = places.ints(w.address(mMap), token, there)
        kind.write(to, token, [kind.get(found, p, there & (p >= 0)) for p in rows], there)

    @cute.jit
    def launch(mMap: cute.Tensor, mNumbers: cute.Tensor, to: Int64, stream):
        grid = [(mMap.shape[0] + (threads - 1)) // threads, 1, 1]
        kernel(mMap, mNumbers, to).launch(grid=grid, block=[threads, 1, 1], stream=stream)

    given = places.fake(cute.sym_int()), d.fake_vector(numbers, cute.sym_int())
    return cute.compile(launch, *given, Int64(0), d.fake_stream(), options=d.OPTIONS)


# ---- gradients of weighted sums --------------------------------------------------------------------------------------


class SpreadDots:
    """Gradients of a weighted sum: rows of dy times the slot's probability where ``spread``, and for each slot the sum
    of dy times its row, in an order that is the same in every run. A block has whole rows of dy."""

    def __init__(
        self,
        dtype: str,
        width: int,
        access: int,
        slots: int,
        weight: str,
        spread: bool,
        experts: int,
        align: int,
        threads: int,
        streaming: bool,
    ) -> None:
        self.rows, self.map = Rows(dtype, width, access, threads, whole=True), Numbers("int32", slots)
        self.probs, self.spread, self.streaming = Numbers(weight, slots), spread, streaming
        self.groups = d.Groups(self.rows.lanes, self.rows.rows)
        self.padding = Padding(experts, align if spread else 1, self.rows, None, streaming)

    @cute.jit
    def launch(
        self,
        mDy: cute.Tensor,
        mMap: cute.Tensor,
        mCounts: cute.Tensor | None,
        mOffsets: cute.Tensor | None,
        mProbs: cute.Tensor,
        mRows: cute.Tensor,
        to_rows: Int64,
        to_probs: Int64,
        stream,
    ):
        grid = [self.rows.blocks(mDy.shape[0]) + self.padding.blocks, 1, 1]
        kernel = self.kernel(mDy, mMap, mCounts, mOffsets, mProbs, mRows, to_rows, to_probs)
        kernel.launch(grid=grid, block=[self.rows.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self,
        mDy: cute.Tensor,
        mMap: cute.Tensor,
        mCounts: cute.Tensor | None,
        mOffsets: cute.Tensor | None,
        mProbs: cute.Tensor,
        mRows: cute.Tensor,
        to_rows: Int64,
        to_probs: Int64,
    ):
        block, scratch = cute.arch.block_idx()[0], self.groups.scratch(SmemAllocator(), self.map.count, 1)
        if const_expr(self.padding.blocks == 0):
            self.work(block, mDy, mMap, mProbs, mRows, to_rows, to_probs, scratch)
        else:
            if block < self.padding.blocks:
                self.padding.fill(block, mCounts, mOffsets, to_rows, Int64(0))
            else:
                self.work(block - self.padding.blocks, mDy, mMap, mProbs, mRows, to_rows, to_probs, scratch)

    @cute.jit
    def work(self, block, mDy, mMap, mProbs, mRows, to_rows, to_probs, scratch):
        token, first, there = self.rows.place(block, mDy.shape[0])
        places = self.map.ints(w.address(mMap), token, there)
        factors = self.factors(mProbs, token, there)
        totals = d.fragment(Float32, self.map.count)
        totals.fill(0.0)
        if const_expr(self.rows.chunks <= UNROLLED):
            for chunk in cutlass.range_constexpr(self.rows.chunks):
                self.chunk(first + chunk * self.rows.lanes, token, there, places, factors, mDy, mRows, to_rows, totals)
        else:
            for vector in cutlass.range(first, self.rows.vectors, self.rows.lanes):
                self.chunk(vector, token, there, places, factors, mDy, mRows, to_rows, totals)
        self.finish(token, first, there, totals, scratch, to_probs)

    def factors(self, mProbs, token, there):
        return tuple(self.probs.floats(self.probs.read(w.address(mProbs), token, there))) if self.spread else ()

    def chunk(self, vector, token, there, places, factors, mDy, mRows, to_rows, totals) -> None:
        r, begin = self.rows, w.address(mRows)
        ok = there if r.chunks * r.lanes == r.vectors else both(there, vector < r.vectors)
        grad = r.floats(r.read(r.place_of(w.address(mDy), token, mDy.stride[0], vector), ok))
        for start in range(0, len(places), MOST_IN_FLIGHT):
            slots = range(start, min(start + MOST_IN_FLIGHT, len(places)))
            kept = [both(ok, places[s] >= 0) for s in slots]
            read = [
                r.read(r.place_of(begin, places[s], mRows.stride[0], vector), k)
                for s, k in zip(slots, kept, strict=True)
            ]
            for s, k in zip(slots, kept, strict=True):
                if self.spread:
                    out = r.words([d.mul(g, factors[s]) for g in grad])
                    r.write(r.place_of(to_rows, places[s], r.width, vector), out, k, self.streaming)
            for s, words in zip(slots, read, strict=True):
                total = totals[s]
                for g, x in zip(grad, r.floats(words), strict=True):
                    total = d.fma(g, x, total)
                totals[s] = total

    def finish(self, token, first, there, totals, scratch, to_probs) -> None:
        group = cute.arch.thread_idx()[0] // self.rows.lanes if self.rows.rows > 1 else Int32(0)
        sums = self.groups.sum(tuple(totals[s] for s in range(self.map.count)), scratch, group, 0)
        self.probs.write(to_probs, token, self.probs.rounded(list(sums)), both(there, first == 0))


def spread_dots(
    arch: str,
    *,
    dtype: str,
    width: int,
    access: int,
    slots: int,
    weight: str,
    spread: bool,
    experts: int,
    align: int,
    threads: int,
    streaming: bool,
):
    """A function (dy [tokens, width] and later rows [c, width] with any row stride, row_map [tokens, slots], counts and
    offsets [experts] where they are looked at else None, probs [tokens, slots] of ``weight``, rows, addresses of drows,
    which is written where ``spread``, and of dprobs); other constants as ``spread`` has them."""
    work = SpreadDots(dtype, width, access, slots, weight, spread, experts, align, threads, streaming)
    given = tensors(dtype, width, access, slots, weight, align if spread else 1, experts)
    rows = d.fake_rows(dtype, cute.sym_int(), width, access // w.Packed(dtype).itemsize)
    return cute.compile(work.launch, *given, rows, Int64(0), Int64(0), d.fake_stream(), options=d.OPTIONS)
