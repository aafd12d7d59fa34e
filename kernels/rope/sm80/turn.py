"""One pass over the heads of tokens: [a norm over each head of queries and keys,] [their rotation,] on the way out of a
fused QKV product or into it. Forward: split, norm, turn. Backward without norms: turn back, merge. Alone: turn.

Every value is read once and written once, by one thread. What the op table rounds is rounded: the norm's output, then
the rotation's. Values are copied as they are."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ...common import device as d
from ..config import Span, Tile
from .heads import KEY, QUERY, VALUE, Feed, Heads, as_heads, as_rows, fake, fake_tables, put_if, row_position


class Turn:
    """``split``: out of the fused product, else into it. ``norm`` is None or (op, eps, zero_centered).
    ``one_position``: queries and keys of a token are at the same position; ``axis``: the dim of a token that positions
    count along. ``ahead``: a thread reads a token ahead and goes on from tile to tile; else it has one token, all of
    whose loads are in flight at once. ``resident``: blocks that fit a multiprocessor by their registers."""

    def __init__(self, heads: Heads, *, ahead: bool, resident: int, split: bool, lead: int, axis: int,
                 norm: tuple | None, one_position: bool) -> None:  # fmt: skip
        self.heads, self.ahead, self.resident = heads, ahead, resident
        self.split, self.lead, self.axis = split, lead, axis
        self.norm, self.one_position = norm, one_position
        self.feed = Feed(heads, [1] * len(heads.steps))

    @cute.jit
    def __call__(self, fused, q, k, v, cos, sin, q_at, k_at, q_gamma, k_gamma, q_beta, k_beta, q_rstd, k_rstd,
                 q_mean, k_mean, blocks: Int32, stream):  # fmt: skip
        tile = self.heads.tile
        tokens, inner = Int32(fused.shape[0]), None
        if const_expr(self.lead == 2):
            tokens, inner = tokens * fused.shape[1], cute.fast_divmod_create_divisor_v2(fused.shape[1])
        n, heads = tile.span.head_dim, tile.queries + 2 * tile.keys
        if const_expr(self.split):
            fused = as_heads(fused, heads, n, self.lead)
            q = as_rows(q, tokens, tile.queries, n)
            k, v = [as_rows(t, tokens, tile.keys, n) for t in (k, v)]
        else:
            fused = as_rows(fused, tokens, heads, n)
            q, k, v = [as_heads(t, 0, n, self.lead) for t in (q, k, v)]
        q_rstd, q_mean = [as_rows(t, tokens, tile.queries, 1) for t in (q_rstd, q_mean)]
        k_rstd, k_mean = [as_rows(t, tokens, tile.keys, 1) for t in (k_rstd, k_mean)]
        self.kernel(
            fused, q, k, v, cos, sin, q_at, k_at, q_gamma, k_gamma, q_beta, k_beta, q_rstd, k_rstd, q_mean, k_mean,
            tokens, inner,
        ).launch(
            grid=[cutlass.min(blocks, cute.ceil_div(tokens, tile.tokens)), tile.splits, 1], block=[tile.threads, 1, 1],
            stream=stream, min_blocks_per_mp=self.resident, preferred_smem_carveout=100 if self.ahead else 0,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, fused, q, k, v, cos, sin, q_at, k_at, q_gamma, k_gamma, q_beta, k_beta, q_rstd, k_rstd,
               q_mean, k_mean, tokens: Int32, inner):  # fmt: skip
        data = fused, (q, k, v)
        side = cos, sin, (q_at, k_at), (q_gamma, k_gamma), (q_beta, k_beta), (q_rstd, k_rstd), (q_mean, k_mean)
        first, stride = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        if const_expr(self.ahead):
            shared = self.feed.allocate(fused.element_type)
            self.fetch(data, shared, self.heads.place(first, tokens, inner))
            for tile in cutlass.range(first, cute.ceil_div(tokens, self.heads.tile.tokens), stride):
                after = self.heads.place(tile + stride, tokens, inner)
                self.from_shared(data, side, shared, self.heads.place(tile, tokens, inner), after)
        else:
            self.at_once(data, side, self.heads.place(first, tokens, inner))

    # ---- pieces, traced as Python ------------------------------------------------------------------------------------

    def source(self, data, place, step: tuple) -> list:
        """What is read of a step's head, for ``Feed``."""
        (fused, parts), h = data, self.heads
        if not self.split:
            return [(h.part_row(parts, place, step), h.has(place, step[0]))]
        if parts[step[0]] is None:
            return []  # values that nobody reads
        return [(h.fused_row(fused, place, step), h.has(place, step[0]))]

    def at_once(self, data, side, place) -> None:
        raw = [self.feed.read(self.source(data, place, step), self.heads.units()) for step in self.heads.steps]
        table = self.tables(side, place)
        for step, of_step in zip(self.heads.steps, raw, strict=True):
            self.head(data, side, table, of_step, place, step)

    def fetch(self, data, shared, place) -> None:
        for i, step in enumerate(self.heads.steps):
            self.feed.fetch(shared, i, self.source(data, place, step), self.heads.units())

    def from_shared(self, data, side, shared, place, after) -> None:
        """One token of this thread; the next one begins to come in."""
        table = self.tables(side, place)
        for i, step in enumerate(self.heads.steps):
            rows = self.source(data, after, step)
            raw = self.feed.take(shared, i, len(rows), self.heads.units())
            self.feed.fetch(shared, i, rows, self.heads.units())
            self.head(data, side, table, raw, place, step)

    def tables(self, side, place) -> dict:
        """The rows of the tables of a token's queries and keys; nothing where there is no rotation."""
        cos, sin, positions, *_ = side
        if cos is None:
            return {}
        found = {
            QUERY: self.heads.table(cos, sin, row_position(positions[QUERY], place, self.axis), self.heads.units())
        }
        if self.one_position or not self.heads.tile.keys:
            return found | {KEY: found[QUERY]}
        return found | {
            KEY: self.heads.table(cos, sin, row_position(positions[KEY], place, self.axis), self.heads.units())
        }

    def head(self, data, side, table, raw, place, step: tuple) -> None:
        """One head of this thread, from what was read of it to what is stored."""
        (fused, parts), h, kind = data, self.heads, step[0]
        if not raw:
            return
        (pairs,), units = raw, h.units()
        if kind != VALUE and (self.norm is not None or table):
            dtype, values = fused.element_type, h.numbers(pairs)
            if self.norm is not None:
                values = h.rounding(self.normed(values, side, place, step, units), dtype)
            if table:
                values = h.turn(values, table[kind], units)
            pairs = h.pairs(values, dtype)
        row = h.part_row(parts, place, step) if self.split else h.fused_row(fused, place, step)
        h.store(row, units, pairs, h.counts(place, kind))

    def normed(self, values, side, place, step: tuple, units) -> list:
        """The norm of a head, unrounded; its statistics are stored where they are wanted."""
        (op, eps, zero_centered), kind, h = self.norm, step[0], self.heads
        _, _, _, weights, biases, rstds, means = side
        n = Float32(1.0 / h.span.head_dim)
        gamma, beta = h.vector_numbers(weights[kind], units), h.vector_numbers(biases[kind], units)
        if op == "layer_norm":
            mean = h.totals([(values, None)], units)[0] * n
            self.keep(means, mean, place, step)
            values = [[v - mean for v in unit] for unit in values]
        rstd = d.rsqrt(h.totals([(values, values)], units)[0] * n + Float32(eps))
        self.keep(rstds, rstd, place, step)
        values = [[v * rstd for v in unit] for unit in values]
        if gamma is not None:
            one = Float32(1.0)
            values = [
                [v * (g + one if zero_centered else g) for v, g in zip(x, w, strict=True)]
                for x, w in zip(values, gamma, strict=True)
            ]
        if beta is not None:
            values = [[v + b for v, b in zip(x, w, strict=True)] for x, w in zip(values, beta, strict=True)]
        return values

    def keep(self, sides: tuple, number, place, step: tuple) -> None:
        """Stores one number of a head where its side wants it."""
        if sides[step[0]] is not None:
            first = cute.arch.thread_idx()[0] % self.heads.span.lanes == 0
            put_if(self.heads.counts(place, step[0]) & first, self.heads.part_row(sides, place, step), number)


def compile_turn(arch: str, *, head_dim: int, half: int, dtype: str, queries: int, keys: int, values: bool, split: bool,
                 lead: int, axis: int, threads: int, rounds: int, ahead: bool, resident: int, streaming: bool,
                 table: str | None, interleaved: bool, inverse: bool, positions: list, position_rank: int,
                 norm: list | None, weights: list, biases: list, stats: list):  # fmt: skip
    """``f(fused, q, k, v, cos, sin, q positions, k positions, q weight, k weight, q bias, k bias, q rstd, k rstd, q
    mean, k mean, blocks)`` for at least one token; absent tensors are None. ``blocks`` is the most that are launched:
    all that tokens fill, unless ``ahead``.

    fused [*t, (queries + 2 keys) * head_dim] and parts [*t, heads, head_dim]; with ``keys`` 0 fused [*t, queries,
    head_dim] and q alone. ``values``: whether there are values. ``lead``: how many dims ``*t`` are, ``axis`` the one
    that positions count along. ``positions``, ``weights``, ``biases``: dtypes or None, of queries and of keys; "same"
    as the second position: that of the queries. ``stats``: which of the four [*t, heads, 1] are stored. ``norm``: [op,
    eps, zero_centered]. What is read has stride 1 within a head, its other strides and its address are multiples of the
    span's vector; what is written is contiguous."""
    del arch  # the code is the same for all
    span = Span(head_dim, half, d.TYPES[dtype].width // 8)
    tile = Tile(span, queries, keys, threads, rounds)
    leads, step, one = tuple(cute.sym_int() for _ in range(lead)), span.vector, positions[1] in ("same", None)
    heads = Heads(tile, interleaved=interleaved, inverse=inverse, streaming=streaming)
    run = Turn(heads, ahead=ahead, resident=resident, split=split, lead=lead, axis=axis,
               norm=None if norm is None else tuple(norm), one_position=one)  # fmt: skip
    counts, given = (queries, keys, keys), (True, keys > 0, keys > 0 and values)
    fused = fake(dtype, (*leads, (queries + 2 * keys) * head_dim) if keys else (*leads, queries, head_dim), step)
    parts = [fake(dtype if g else None, (*leads, c, head_dim), step) for c, g in zip(counts, given, strict=True)]
    tables, at_shape = fake_tables(table, half, heads.table_step), leads if position_rank == 2 else (leads[axis],)
    at = [fake(p, at_shape, 1, rows=False) for p in (positions[0], None if one else positions[1])]
    vectors = [fake(kind, (head_dim,), step) for kind in (*weights, *biases)]
    kept = [fake("float32" if s else None, (*leads, counts[i % 2], 1), 1, rows=False) for i, s in enumerate(stats)]
    return cute.compile(run, fused, *parts, *tables, *at, *vectors, *kept, Int32(1), d.fake_stream(), options=d.OPTIONS)
