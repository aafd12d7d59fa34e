"""What the kernels over the heads of a token share: where a thread's channels and heads are, how their values come in,
and the arithmetic of one head.

In a fused QKV product heads lie per KV group: its queries, its key, its value. What is read is seen as [n0, n1, heads,
head_dim], n0 and n1 the token's two leading dims (n1 = 1 where it has one), with any strides; what is written is
contiguous, [tokens, heads, head_dim]. A *unit* is a pair of vectors of one head, a *slot* the threads that work
together (config.py); a slot's heads are its *steps*: a kind and, of queries, which of them. A thread's values of a head
are lists with an entry for each of its units: a pair of fragments, or one list of float32 numbers."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from ...common import device as d
from ...common.packed import numbers, packed, round_trip
from ..config import Tile

QUERY, KEY, VALUE = 0, 1, 2


def fake(dtype: str | None, shape: tuple, step: int, *, rows: bool = True, heads: bool = False):
    """A tensor of ``shape`` with stride 1 along its last dim (``rows``; else any), other strides that are multiples of
    ``step`` elements, and an address that is a multiple of ``step`` elements (16 bytes at most are asked for); None
    where ``dtype`` is None."""
    if dtype is None:
        return None
    kind = d.TYPES[dtype]
    strides = [cute.sym_int64(divisibility=step) for _ in shape]
    if rows:
        strides[-1] = 1
    if heads:
        strides[-2] = cute.sym_int(divisibility=step)
    return cute.runtime.make_fake_tensor(
        kind, shape, stride=tuple(strides), assumed_align=min(16, step * kind.width // 8)
    )


def as_heads(tensor, fused_heads: int, head_dim: int, lead: int):
    """A tensor [n0(, n1), heads, head_dim], or with ``fused_heads`` [n0(, n1), fused_heads * head_dim], as [n0, n1,
    heads, head_dim]."""
    if tensor is None:
        return None
    leads, strides = tensor.shape[:lead], tensor.stride[:lead]
    if lead == 1:
        leads, strides = (*leads, 1), (*strides, 0)
    heads, stride = (fused_heads, head_dim) if fused_heads else (tensor.shape[lead], tensor.stride[lead])
    return cute.make_tensor(tensor.iterator, cute.make_layout((*leads, heads, head_dim), stride=(*strides, stride, 1)))


def as_rows(tensor, tokens, heads: int, width: int):
    """A contiguous tensor as [tokens, heads, width]."""
    if tensor is None:
        return None
    return cute.make_tensor(tensor.iterator, cute.make_layout((tokens, heads, width), stride=(heads * width, width, 1)))


def fake_tables(dtype: str | None, half: int, step: int) -> list:
    """cos and sin [positions, half], contiguous."""
    if dtype is None:
        return [None, None]
    kind, rows = d.TYPES[dtype], cute.sym_int()
    align = min(16, step * kind.width // 8)
    return [cute.runtime.make_fake_tensor(kind, (rows, half), stride=(half, 1), assumed_align=align) for _ in range(2)]


class Place:
    """Where a thread works: a token, its coordinates (i0, i1), and its slot of that token; ``active``: whether its
    results count. Threads without work of their own do another's, so that all take part in sums and no address is out
    of range."""

    def __init__(self, token, i0, i1, slot, active) -> None:
        self.token, self.i0, self.i1, self.slot, self.active = token, i0, i1, slot, active

    def row(self, tensor, head):
        """One head of this token in [n0, n1, heads, width] or [tokens, heads, width]."""
        if cute.rank(tensor) == 3:
            return tensor[self.token, head, None]
        return tensor[self.i0, self.i1, head, None]


def row_position(positions, place: Place, axis: int):
    """A token's row of the tables: its coordinate along ``axis``, or what ``positions`` [its dims, or that one]
    says."""
    coordinate = (place.i0, place.i1)[axis]
    if positions is None:
        return coordinate
    return Int64(positions[coordinate] if cute.rank(positions) == 1 else positions[place.i0, place.i1])


class Heads:
    """The heads of one kernel."""

    def __init__(self, tile: Tile, *, interleaved: bool, inverse: bool, streaming: bool) -> None:
        self.tile, self.span, self.inverse, self.streaming = tile, tile.span, inverse, streaming
        self.adjacent = interleaved and self.span.vector == 1  # a pair is the two channels of a unit
        self.within = interleaved and self.span.vector > 1  # pairs lie within a vector
        self.groups = d.Groups(self.span.lanes, 1)
        self.per_group = tile.queries // tile.keys if tile.keys else tile.queries
        self.steps = [(QUERY, j) for j in range(tile.rounds)] + ([(KEY, 0), (VALUE, 0)] if tile.keys else [])

    # ---- where -------------------------------------------------------------------------------------------------------

    def place(self, tile, tokens, inner) -> Place:
        """This thread's place in a tile of tokens; ``inner``: a fast divisor of n1, None where tokens have one dim."""
        thread = cute.arch.thread_idx()[0] // self.span.lanes
        if self.tile.splits > 1:
            slot, which = cute.arch.block_idx()[1] * self.tile.slots + thread, Int32(0)
        else:
            slot, which = thread % self.tile.per_token, thread // self.tile.per_token
        token = tile * self.tile.tokens + which
        active = (which < self.tile.tokens) & (slot < self.tile.per_token) & (token < tokens)
        token, slot = cutlass.min(token, tokens - 1), cutlass.min(slot, Int32(self.tile.per_token - 1))
        i0, i1 = (token, Int32(0)) if inner is None else divmod(token, inner)
        return Place(Int64(token), Int64(i0), Int64(i1), slot, active)

    def units(self) -> list:
        """(unit, whether it is this thread's own) of each of a thread's units of a head."""
        lane, found = cute.arch.thread_idx()[0] % self.span.lanes, []
        for u in range(self.span.per_lane):
            unit = lane + u * self.span.lanes
            whole = (u + 1) * self.span.lanes <= self.span.units
            found.append(
                (unit, True) if whole else (cutlass.min(unit, Int32(self.span.units - 1)), unit < self.span.units)
            )
        return found

    def vectors(self, unit) -> tuple:
        """Indices of a unit's two vectors among those of its head. The turned channels take 2 * turned vectors, the
        others lie behind."""
        turned, units = self.span.turned, self.span.units
        if self.adjacent:
            return 2 * unit, 2 * unit + 1
        if turned in (0, units):
            return unit, unit + units
        behind = unit >= turned
        return d.select(behind, unit + turned, unit), d.select(behind, unit + units, unit + turned)

    def has(self, place: Place, kind: int):
        """Whether a slot has a head of ``kind``: queries all have, keys and values the first ones."""
        if kind == QUERY or self.tile.per_token == self.tile.keys:
            return True
        return place.slot < self.tile.keys

    def counts(self, place: Place, kind: int):
        """Whether a slot's results of a head of ``kind`` count."""
        has = self.has(place, kind)
        return place.active if has is True else place.active & has

    def number(self, place: Place, step: tuple):
        """A step's head among those of its kind; in range where the slot has none."""
        kind, j = step
        if kind == QUERY:
            return place.slot * self.tile.rounds + j
        return place.slot if self.has(place, kind) is True else cutlass.min(place.slot, Int32(self.tile.keys - 1))

    def part_row(self, parts: tuple, place: Place, step: tuple):
        """A step's head [head_dim] of the tensor of its kind, out of (queries, keys, values)."""
        return place.row(parts[step[0]], self.number(place, step))

    def fused_row(self, tensor, place: Place, step: tuple):
        """A step's head [head_dim] of the tensor of all heads."""
        (kind, j), at = step, self.number(place, step)
        if self.tile.keys and kind == QUERY:
            slots = self.per_group // self.tile.rounds  # of a KV group
            at = place.slot // slots * (self.per_group + 2) + place.slot % slots * self.tile.rounds + j
        elif self.tile.keys:
            at = at * (self.per_group + 2) + self.per_group + (kind - KEY)
        return place.row(tensor, at)

    # ---- values ------------------------------------------------------------------------------------------------------

    def vector_numbers(self, vector, units: list):
        """A thread's numbers of a vector [head_dim] that other blocks read too; None where there is none."""
        if vector is None:
            return None
        found = []
        for unit, _ in units:
            pair = [d.fragment(vector.element_type, self.span.vector) for _ in range(2)]
            for index, into in zip(self.vectors(unit), pair, strict=True):
                d.read(vector, index, into)
            found.append(tuple(pair))
        return self.numbers(found)

    def numbers(self, pairs: list) -> list:
        """Pairs of fragments as float32 numbers."""
        return [numbers(a) + numbers(b) for a, b in pairs]

    def pairs(self, values: list, dtype) -> list:
        """Numbers as pairs of fragments of ``dtype``, rounded."""
        n = self.span.vector
        return [(packed(x[:n], dtype), packed(x[n:], dtype)) for x in values]

    def rounding(self, values: list, dtype) -> list:
        """Numbers rounded to ``dtype`` and back, as an op's output is."""
        return [round_trip(x, dtype) for x in values]

    def totals(self, terms: list, units: list) -> tuple:
        """Sums over a head, in an order that is the same in every run: ``terms`` are pairs (a, b) of numbers, whose
        products are added; b None: the numbers a alone."""
        results = []
        for a, b in terms:
            result = Float32(0.0)
            for u, (_, own) in enumerate(units):
                parts = [Float32(0.0)] * 2  # two chains, half as long
                for i, x in enumerate(a[u]):
                    parts[i % 2] = parts[i % 2] + x if b is None else d.fma(x, b[u][i], parts[i % 2])
                part = parts[0] + parts[1]
                result = result + (part if own is True else d.select(own, part, Float32(0.0)))
            results.append(result)
        return self.groups.sum(tuple(results), None, 0, 0)

    @property
    def table_step(self) -> int:
        """Elements of one access to the tables."""
        return self.span.vector // 2 if self.within else self.span.vector

    def table(self, cos, sin, position, units: list) -> list:
        """(cos, sin) of a thread's units at a row of the tables, as numbers in the order of ``turn``'s pairs. Units
        that are not turned get another's."""
        found, turned = [], self.span.turned
        for unit, _ in units:
            at = unit if turned == self.span.units else cutlass.min(unit, Int32(turned - 1))
            pair = []
            for rows in (cos, sin):
                made = []
                for index in (at, at + turned) if self.within else (at,):
                    values = d.fragment(rows.element_type, self.table_step)
                    d.read(rows[position, None], index, values)
                    made += numbers(values)
                pair.append(made)
            found.append(tuple(pair))
        return found

    def turn(self, values: list, table: list, units: list) -> list:
        """The rotation, or its inverse, of a head's numbers; units that are not turned keep theirs."""
        found, n = [], self.span.vector
        order = [(2 * j, 2 * j + 1) for j in range(n)] if self.within else [(j, n + j) for j in range(n)]
        for x, (cos, sin), (unit, _) in zip(values, table, units, strict=True):
            y = list(x)
            for (a, b), c, s in zip(order, cos, sin, strict=True):
                s = -s if self.inverse else s
                y[a], y[b] = x[a] * c - x[b] * s, x[b] * c + x[a] * s
            if self.span.turned < self.span.units:
                y = [d.select(unit < self.span.turned, new, old) for new, old in zip(y, x, strict=True)]
            found.append(y)
        return found

    @cute.jit
    def store(self, row, units, pairs, active):
        """Pairs of fragments of a head to a row [head_dim] where ``active``."""
        for u in cutlass.range_constexpr(len(units)):
            unit, own = units[u]
            a, b = self.vectors(unit)
            if active & own:
                d.write(row, a, pairs[u][0], streaming=self.streaming)
                d.write(row, b, pairs[u][1], streaming=self.streaming)


class Feed:
    """What a thread reads of its heads: for each step a list of (row [head_dim], whether it is wanted).

    ``read`` reads on the spot. ``fetch`` and ``take`` go by shared memory, a token ahead: every thread copies with
    cp.async just those vectors that it reads itself, so that no barrier is needed and bytes in flight cost no
    registers."""

    def __init__(self, heads: Heads, reads: list[int]) -> None:
        """``reads``: how many rows each step reads."""
        self.heads = heads
        self.first = [sum(reads[:i]) * heads.span.per_lane * 2 for i in range(len(reads) + 1)]  # vector of a thread

    def allocate(self, dtype):
        """Shared memory [vectors of a thread, threads, vector]."""
        layout = cute.make_ordered_layout(
            (self.first[-1], self.heads.tile.threads, self.heads.span.vector), order=(2, 1, 0)
        )
        return d.SmemAllocator().allocate_tensor(dtype, layout, byte_alignment=16)

    def fetch(self, shared, step: int, rows: list, units: list) -> None:
        """Begin to copy what a step reads of the next token; what was there must have been taken."""
        thread, j = cute.arch.thread_idx()[0], self.first[step]
        for row, wanted in rows:
            for unit, _ in units:
                for vector in self.heads.vectors(unit):
                    copy_if(wanted, row, vector, shared[j, thread, None], self.heads.span.vector)
                    j += 1
        cute.arch.cp_async_commit_group()

    def take(self, shared, step: int, count: int, units: list) -> list:
        """Pairs of fragments for each of a step's ``count`` reads. One fetch for each step has been begun since; what
        was not wanted holds anything."""
        cute.arch.cp_async_wait_group(len(self.first) - 2)
        thread, j, found = cute.arch.thread_idx()[0], self.first[step], []
        for _ in range(count):
            of_read = []
            for _ in units:
                pair = [d.fragment(shared.element_type, self.heads.span.vector) for _ in range(2)]
                for values in pair:
                    cute.autovec_copy(shared[j, thread, None], values)
                    j += 1
                of_read.append(tuple(pair))
            found.append(of_read)
        return found

    def read(self, rows: list, units: list) -> list:
        """Pairs of fragments for each row; what is not wanted holds zeros."""
        found = []
        for row, wanted in rows:
            of_read = []
            for unit, _ in units:
                pair = [d.fragment(row.element_type, self.heads.span.vector) for _ in range(2)]
                for vector, values in zip(self.heads.vectors(unit), pair, strict=True):
                    read_if(wanted, row, vector, values)
                of_read.append(tuple(pair))
            found.append(of_read)
        return found


@cute.jit
def copy_if(wanted, row, vector, target, step: cutlass.Constexpr):
    if wanted:
        d.copy_async(row, vector, target, 0, step)


@cute.jit
def read_if(wanted, row, vector, values):
    if const_expr(wanted is not True):
        values.fill(0)
    if wanted:
        d.read(row, vector, values)


@cute.jit
def put_if(wanted, row, number):
    """A number to the first element of a row."""
    if wanted:
        row[0] = number
