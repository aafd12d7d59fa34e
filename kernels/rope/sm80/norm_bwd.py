"""One pass over the heads of tokens: the rotation's inverse, the gradient of a norm over each head of queries and keys,
and the way into a fused QKV product. Beside it the gradients of the norms' weights and biases: each block sums over its
tokens in float32 and leaves one row, and a second kernel sums these rows. No atomics: reruns are bitwise equal.

With xhat = (x - mean) * rstd (mean 0 in an RMS norm), g = weight, or 1 + weight, and dy the rotated-back gradient,
rounded as the op table rounds it::

    dx = (dy * g - xhat * mean(dy * g * xhat) [- mean(dy * g)]) * rstd
    dweight = sum(dy * xhat)    dbias = sum(dy)
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ...common import device as d
from ...common.column_sum import ColumnSum, fake_partials
from ..config import Span, Tile
from .heads import KEY, QUERY, VALUE, Feed, Heads, as_heads, as_rows, fake, fake_tables, row_position


class NormBackward:
    """``from_fused``: the norms' inputs lie in one fused product. ``sums``: (kind, whether of the weight; else of the
    bias) of every sum over the tokens, in the order of the partial sums. Other names as in ``turn.Turn``."""

    def __init__(self, heads: Heads, *, ahead: bool, resident: int, from_fused: bool, lead: int, axis: int, layer: bool,
                 zero_centered: bool, one_position: bool, sums: tuple, overlap: bool) -> None:  # fmt: skip
        self.heads, self.ahead, self.resident = heads, ahead, resident
        self.from_fused, self.lead, self.axis = from_fused, lead, axis
        self.layer, self.zero_centered, self.one_position, self.sums = layer, zero_centered, one_position, sums
        self.feed = Feed(heads, [1 if kind == VALUE else 2 for kind, _ in heads.steps])
        self.column_sum = ColumnSum(heads.span.head_dim, overlap)

    @cute.jit
    def __call__(self, fused, dq, dk, dv, x, xq, xk, cos, sin, q_at, k_at, q_gamma, k_gamma, q_rstd, k_rstd,
                 q_mean, k_mean, partials, dq_gamma, dk_gamma, dq_beta, dk_beta, blocks: Int32, stream):  # fmt: skip
        tile = self.heads.tile
        tokens, inner = Int32(fused.shape[0]), None
        if const_expr(self.lead == 2):
            tokens, inner = tokens * fused.shape[1], cute.fast_divmod_create_divisor_v2(fused.shape[1])
        n, heads = tile.span.head_dim, tile.queries + 2 * tile.keys
        fused, x = as_rows(fused, tokens, heads, n), as_heads(x, heads, n, self.lead)
        dq, dk, dv, xq, xk = [as_heads(t, 0, n, self.lead) for t in (dq, dk, dv, xq, xk)]
        q_rstd, q_mean = [as_rows(t, tokens, tile.queries, 1) for t in (q_rstd, q_mean)]
        k_rstd, k_mean = [as_rows(t, tokens, tile.keys, 1) for t in (k_rstd, k_mean)]
        self.kernel(
            fused, dq, dk, dv, x, xq, xk, cos, sin, q_at, k_at, q_gamma, k_gamma, q_rstd, k_rstd, q_mean, k_mean,
            partials, tokens, inner,
        ).launch(
            grid=[blocks, tile.splits, 1], block=[tile.threads, 1, 1], stream=stream,
            min_blocks_per_mp=self.resident, preferred_smem_carveout=100,
        )  # fmt: skip
        if const_expr(len(self.sums) > 0):
            self.column_sum(partials, [t for t in (dq_gamma, dk_gamma, dq_beta, dk_beta) if t is not None], stream)

    @cute.kernel
    def kernel(self, fused, dq, dk, dv, x, xq, xk, cos, sin, q_at, k_at, q_gamma, k_gamma, q_rstd, k_rstd,
               q_mean, k_mean, partials, tokens: Int32, inner):  # fmt: skip
        given = (dq, dk, dv), x, (xq, xk)
        side = cos, sin, (q_at, k_at), (q_gamma, k_gamma), (q_rstd, k_rstd), (q_mean, k_mean)
        first, stride = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        totals, shared = self.zeros(), None
        if const_expr(self.ahead):
            shared = self.feed.allocate(fused.element_type)
            self.fetch(given, shared, self.heads.place(first, tokens, inner))
        for tile in cutlass.range(first, cute.ceil_div(tokens, self.heads.tile.tokens), stride):
            place, after = self.heads.place(tile, tokens, inner), self.heads.place(tile + stride, tokens, inner)
            self.token(fused, given, side, shared, totals, place, after)
        self.leave(totals, partials)

    # ---- pieces, traced as Python ------------------------------------------------------------------------------------

    def zeros(self) -> list:
        """For each sum the totals of this thread's channels, one fragment for each of its units."""
        found = [[d.fragment(Float32, 2 * self.heads.span.vector) for _ in self.heads.units()] for _ in self.sums]
        for of_sum in found:
            for total in of_sum:
                total.fill(0.0)
        return found

    def source(self, given, place, step: tuple) -> list:
        """What is read of a step's head, for ``Feed``: the gradient, and the norm's input, which values have none
        of."""
        (grads, x, parts), h, kind = given, self.heads, step[0]
        rows = [(h.part_row(grads, place, step), h.has(place, kind))]
        if kind != VALUE:
            rows.append(
                (h.fused_row(x, place, step) if self.from_fused else h.part_row(parts, place, step), h.has(place, kind))
            )
        return rows

    def fetch(self, given, shared, place) -> None:
        for i, step in enumerate(self.heads.steps):
            self.feed.fetch(shared, i, self.source(given, place, step), self.heads.units())

    def token(self, fused, given, side, shared, totals, place, after) -> None:
        """One token of this thread; where it reads ahead, the next one begins to come in."""
        h, units = self.heads, self.heads.units()
        cos, sin, positions, *_ = side
        table = {}
        if cos is not None:
            table = {
                k: h.table(cos, sin, row_position(positions[k], place, self.axis), units)
                for k in (QUERY, KEY)[: 1 if self.one_position else 2]
            }
            table.setdefault(KEY, table[QUERY])
        for i, step in enumerate(h.steps):
            if self.ahead:
                rows = self.source(given, after, step)
                raw = self.feed.take(shared, i, len(rows), units)
                self.feed.fetch(shared, i, rows, units)
            else:
                raw = self.feed.read(self.source(given, place, step), units)
            made = raw[0] if step[0] == VALUE else self.gradient(*raw, side, table, totals, place, step, units)
            h.store(h.fused_row(fused, place, step), units, made, h.counts(place, step[0]))

    def gradient(self, of_dy, of_x, side, table, totals, place, step: tuple, units) -> list:
        """The gradient of a head's rotation and norm, as pairs of fragments; its part of the sums is added."""
        _, _, _, weights, rstds, means = side
        h, kind, dtype, n = self.heads, step[0], of_dy[0][0].element_type, Float32(1.0 / self.heads.span.head_dim)
        dy, x = h.numbers(of_dy), h.numbers(of_x)
        if table:
            dy = h.rounding(h.turn(dy, table[kind], units), dtype)
        rstd = h.part_row(rstds, place, step)[0]
        if self.layer:
            mean = h.part_row(means, place, step)[0]
            x = [[v - mean for v in unit] for unit in x]
        xhat = [[v * rstd for v in unit] for unit in x]
        for (of_kind, weight), of_sum in zip(self.sums, totals, strict=True):
            if of_kind == kind:
                add_if(h.counts(place, kind), of_sum, dy, xhat if weight else None)
        gamma = h.vector_numbers(weights[kind], units)
        if gamma is not None:
            one = Float32(1.0)
            dy = [
                [v * (g + one if self.zero_centered else g) for v, g in zip(a, b, strict=True)]
                for a, b in zip(dy, gamma, strict=True)
            ]
        sums = h.totals([(dy, xhat), *([(dy, None)] if self.layer else [])], units)
        along, shift = sums[0] * n, sums[1] * n if self.layer else None
        dx = [[v - p * along for v, p in zip(a, b, strict=True)] for a, b in zip(dy, xhat, strict=True)]
        return h.pairs([[(v - shift if self.layer else v) * rstd for v in unit] for unit in dx], dtype)

    def leave(self, totals, partials) -> None:
        """The block's sums, over its slots, to its row of the partial sums: over a warp by shuffles, then over the
        warps."""
        h = self.heads
        if not self.sums:
            return
        warps, n = h.tile.threads // d.WARP, h.span.head_dim
        scratch = d.SmemAllocator().allocate_tensor(
            Float32, cute.make_ordered_layout((len(self.sums), warps, n), order=(2, 1, 0)), byte_alignment=16
        )
        for s, of_sum in enumerate(totals):
            for total in of_sum:
                offset = h.span.lanes
                while offset < d.WARP:
                    for i in range(2 * h.span.vector):
                        total[i] = d.add(total[i], cute.arch.shuffle_sync_bfly(total[i], offset=offset))
                    offset *= 2
            self.share(scratch, s, of_sum, h.units())
        cute.arch.sync_threads()
        self.write_partials(scratch, partials)

    @cute.jit
    def share(self, scratch, which: cutlass.Constexpr, of_sum, units):
        thread = cute.arch.thread_idx()[0]
        n = self.heads.span.vector
        for u in cutlass.range_constexpr(len(units)):
            unit, own = units[u]
            a, b = self.heads.vectors(unit)
            if (thread % d.WARP < self.heads.span.lanes) & own:
                for i in cutlass.range_constexpr(n):
                    scratch[which, thread // d.WARP, a * n + i] = of_sum[u][i]
                    scratch[which, thread // d.WARP, b * n + i] = of_sum[u][n + i]

    @cute.jit
    def write_partials(self, scratch, partials):
        row = cute.arch.block_idx()[0] * self.heads.tile.splits + cute.arch.block_idx()[1]
        for start in cutlass.range_constexpr(0, self.heads.span.head_dim, self.heads.tile.threads):
            channel = cute.arch.thread_idx()[0] + start
            if channel < self.heads.span.head_dim:
                for s in cutlass.range_constexpr(len(self.sums)):
                    total = scratch[s, 0, channel]
                    for w in cutlass.range_constexpr(1, self.heads.tile.threads // d.WARP):
                        total = d.add(total, scratch[s, w, channel])
                    partials[s, row, channel] = total


@cute.jit
def add_if(wanted, of_sum, dy, xhat):
    """dy, or dy * xhat, to the totals of a thread's channels."""
    if wanted:
        for u in cutlass.range_constexpr(len(of_sum)):
            for i in cutlass.range_constexpr(len(dy[u])):
                if const_expr(xhat is None):
                    of_sum[u][i] = of_sum[u][i] + dy[u][i]
                else:
                    of_sum[u][i] = d.fma(dy[u][i], xhat[u][i], of_sum[u][i])


def compile_norm_bwd(arch: str, *, head_dim: int, half: int, dtype: str, queries: int, keys: int, from_fused: bool,
                     lead: int, axis: int, threads: int, rounds: int, ahead: bool, resident: int, streaming: bool,
                     table: str | None, interleaved: bool, inverse: bool, positions: list, position_rank: int, op: str,
                     zero_centered: bool, weights: list, dweights: list, dbiases: list):  # fmt: skip
    """``f(dfused, dq, dk, dv, fused x, q x, k x, cos, sin, q positions, k positions, q weight, k weight, q rstd, k
    rstd, q mean, k mean, partials, q dweight, k dweight, q dbias, k dbias, blocks)`` for at least one token; absent
    tensors are None.

    The norms' inputs are the fused product's (``from_fused``) or two tensors like dq and dk. partials [sums, blocks *
    splits, head_dim] float32, None where ``dweights`` and ``dbiases`` (dtypes or None, of queries and of keys) hold
    none; sums are in their order. Other arguments as in ``turn.compile_turn``, statistics are contiguous; ``op`` is
    rms_norm or layer_norm."""
    span = Span(head_dim, half, d.TYPES[dtype].width // 8)
    tile = Tile(span, queries, keys, threads, rounds)
    leads, step, one = tuple(cute.sym_int() for _ in range(lead)), span.vector, positions[1] in ("same", None)
    layer = op == "layer_norm"
    heads = Heads(tile, interleaved=interleaved, inverse=inverse, streaming=streaming)
    sums = tuple(
        (k, w) for w, kinds in ((True, dweights), (False, dbiases)) for k in (QUERY, KEY) if kinds[k] is not None
    )
    run = NormBackward(heads, ahead=ahead, resident=resident, from_fused=from_fused, lead=lead, axis=axis,
                       layer=layer, zero_centered=zero_centered, one_position=one, sums=sums,
                       overlap=d.has(arch, 90))  # fmt: skip
    whole = (*leads, (queries + 2 * keys) * head_dim)

    def part(count: int, wanted: bool = True):
        return fake(dtype if wanted else None, (*leads, count, head_dim), step, heads=True)

    xs = [fake(dtype, whole, step), None, None] if from_fused else [None, part(queries), part(keys)]
    tables, at_shape = fake_tables(table, half, heads.table_step), leads if position_rank == 2 else (leads[axis],)
    at = [fake(p, at_shape, 1, rows=False) for p in (positions[0], None if one else positions[1])]
    gammas = [fake(kind, (head_dim,), step) for kind in weights]
    stats = [
        fake("float32" if wanted else None, (*leads, n, 1), 1, rows=False)
        for wanted in (True, layer)
        for n in (queries, keys)
    ]
    partials = fake_partials(len(sums), cute.sym_int(), head_dim) if sums else None
    outputs = [fake(kind, (head_dim,), run.column_sum.step) for kind in (*dweights, *dbiases)]
    given = (
        fake(dtype, whole, step),
        part(queries),
        part(keys),
        part(keys),
        *xs,
        *tables,
        *at,
        *gammas,
        *stats,
        partials,
        *outputs,
    )
    return cute.compile(run, *given, Int32(1), d.fake_stream(), options=d.OPTIONS)
