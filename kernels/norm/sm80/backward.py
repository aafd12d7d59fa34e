"""Device code: rms_norm and layer_norm backward (integration/graph/ops/norm.py is the law), with the gradient of the
residual stream added to dx, and gradients of weight and bias without atomics.

Resident blocks take tiles of rows in turn. Every thread keeps float32 sums for its own columns over all its rows; at
the end the rows of a block are added up and leave one row of partial sums a block, which a second kernel adds
(``ColumnSum``). Rows come through shared memory with cp.async (``stages`` > 0) or, where they are too long or too
narrow for that, straight from global memory, the second time mostly from the caches.
"""

from __future__ import annotations

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from ...common import device as d
from ...common.column_sum import ColumnSum, fake_partials
from ...common.row_tiles import Tiles, number_if


class Backward:
    """``layer``: layer_norm_bwd. ``offset`` is added to the weight in float32. ``hold``: x and dy stay in registers
    between the two times that they are needed; ``hold_weight``: the weight does from row to row; ``shared_sums``: the
    first of the sums does not, but lies in shared memory (one row at once)."""

    def __init__(self, tiles: Tiles, layer: bool, offset: float, stages: int, hold: bool, hold_weight: bool,
                 shared_sums: bool,
                 streaming: bool, overlap: bool) -> None:  # fmt: skip
        self.tiles, self.layer, self.offset = tiles, layer, offset
        self.stages, self.hold, self.hold_weight = stages, hold, hold_weight
        self.shared_sums, self.streaming = shared_sums, streaming
        self.sum = ColumnSum(tiles.width, overlap)

    @cute.jit
    def __call__(self, dy, x, weight, mean, rstd, residual, dx, partials, dweight, dbias, blocks: Int32, stream):
        self.kernel(dy, x, weight, d.numbers(mean), d.numbers(rstd), residual, dx, partials, dweight, dbias).launch(
            grid=[blocks, 1, 1], block=[self.tiles.groups.block, 1, 1], stream=stream
        )
        if const_expr(partials is not None):
            self.sum(partials, [s for s in (dweight, dbias) if s is not None], stream)

    @cute.kernel
    def kernel(self, dy, x, weight, mean, rstd, residual, dx, partials, dweight, dbias):
        rows, stages = self.tiles.groups.rows, self.stages
        storage = d.SmemAllocator()
        scratch = self.tiles.groups.scratch(storage, 2 if self.layer else 1)
        group, thread = self.tiles.place()
        first, count = cute.arch.block_idx()[0], x.shape[0]
        sources = [dy, x] if const_expr(residual is None) else [dy, x, residual]
        held = self.tiles.vector(weight, thread) if const_expr(self.hold_weight) else None
        totals = self.zeros(storage, thread, [dweight is not None, dbias is not None])
        buffers = (
            [self.tiles.allocate(storage, s.element_type, stages) for s in sources] if const_expr(stages) else None
        )
        turn = cute.arch.grid_dim()[0] * rows  # rows between two tiles of a block
        row = first * rows + group
        for ahead in cutlass.range_constexpr(stages - 1):
            later = row + ahead * turn
            self.tiles.issue(sources, buffers, Int32(ahead), group, thread, later, later < count)
        inverse, average = self.numbers(rstd, mean, row, count)
        stage, filled, buffer = Int32(0), Int32(stages - 1), Int32(0)
        for tile in cutlass.range(first * rows, count, turn):
            row = tile + group
            ok = self.tiles.row_ok(row, count)
            if const_expr(stages):
                later = row + (stages - 1) * turn
                self.tiles.issue(sources, buffers, filled, group, thread, later, later < count)
            next_inverse, next_average = self.numbers(rstd, mean, row + turn, count)
            if const_expr(stages):
                cute.arch.cp_async_wait_group(stages - 1)
            place = (sources, buffers, stage, group, thread, row, ok)
            kept = self.sum_row(place, weight, held, inverse, average, totals, dx is not None)
            if const_expr(dx is not None):
                averages = tuple(
                    d.mean(s, self.tiles.width) for s in self.tiles.groups.sum(kept[0], scratch, group, buffer)
                )
                self.write_row(place, kept[1], weight, held, inverse, average, averages, dx)
            inverse, average = next_inverse, next_average
            filled = stage
            stage = d.select(stage + 1 < stages, stage + 1, Int32(0))
            buffer = 1 - buffer
        if const_expr(partials is not None):
            if const_expr(stages):
                cute.arch.cp_async_wait_group(0)
            self.leave(storage, [t for t in totals if t is not None], partials, first, group, thread)

    def zeros(self, storage, thread, wanted) -> list:
        """float32 sums of the thread's columns for each wanted gradient, None for others: a fragment a chunk, or a row
        of shared memory."""
        tiles, made = self.tiles, []
        for want in wanted:
            parts = [d.fragment(Float32, tiles.step) for _ in range(tiles.chunks)] if want else None
            for part in parts or ():
                part.fill(0.0)
            if want and self.shared_sums and not any(m is not None for m in made):
                shared = storage.allocate_tensor(Float32, cute.make_layout((tiles.padded,)), byte_alignment=16)
                for c, part in enumerate(parts):
                    d.write_shared(shared, thread + c * tiles.groups.threads, part)
                parts = shared
            made.append(parts)
        return made

    def add_to(self, total, c: int, thread, gradient, factors) -> None:
        """Adds gradient * factors of a chunk, or the gradient where ``factors`` is None, to a sum."""
        part, index = (
            total[c] if isinstance(total, list) else d.fragment(Float32, self.tiles.step),
            thread + c * self.tiles.groups.threads,
        )
        if not isinstance(total, list):
            d.read_shared(total, index, part)
        for i, v in enumerate(gradient):
            part[i] = d.add(part[i], v) if factors is None else d.fma(v, factors[i], part[i])
        if not isinstance(total, list):
            d.write_shared(total, index, part)

    def numbers(self, rstd, mean, row, count):
        """(rstd, mean) of a row, zeros where there is no such row: what is made of them adds nothing. Without a mean it
        is 0."""
        ok, zero = row < count, Float32(0.0)
        return number_if(ok, rstd, row, zero), zero if mean is None else number_if(ok, mean, row, zero)

    def chunk(self, place, which: int, c: int):
        """A chunk of dy (0), x (1) or the residual's gradient (2), from its stage or from global memory."""
        sources, buffers, stage, group, thread, row, ok = place
        if self.stages:
            return self.tiles.read_stage(buffers[which], stage, group, c, thread)
        return self.tiles.read(sources[which][Int64(row), None], c, thread, ok)

    def gain(self, weight, held, c: int, thread):
        """The factors of a chunk in float32; None without a weight."""
        if weight is None:
            return None
        g = d.floats(held[c] if held is not None else self.tiles.read(weight, c, thread, True))
        return [w + self.offset for w in g] if self.offset else g

    def normed(self, x, inverse, average) -> list:
        """x in float32, centred and scaled to unit variance."""
        return [d.mul(d.add(v, -average) if self.layer else v, inverse) for v in d.floats(x)]

    def sum_row(self, place, weight, held, inverse, average, totals, wants_dx: bool):
        """Adds the row to the sums of dweight and dbias. Gives the thread's part of (sum of g * dy * xhat, and of g *
        dy in layer_norm), and the fragments of dy and x where they are held."""
        thread, parts, fragments = place[4], [], []
        for c in range(self.tiles.chunks):
            dy, x = self.chunk(place, 0, c), self.chunk(place, 1, c)
            fragments.append((dy, x))
            gradient, xhat = d.floats(dy), self.normed(x, inverse, average)
            for total, values in zip(totals, (xhat, None), strict=True):
                if total is not None:
                    self.add_to(total, c, thread, gradient, values)
            if wants_dx:
                g = self.gain(weight, held, c, thread)
                scaled = gradient if g is None else [d.mul(v, w) for v, w in zip(gradient, g, strict=True)]
                dot = functools.reduce(lambda s, p: d.fma(p[0], p[1], s), zip(scaled, xhat, strict=True), Float32(0.0))
                parts.append((dot, functools.reduce(d.add, scaled)) if self.layer else (dot,))
        if not wants_dx:
            return (), None
        return tuple(
            functools.reduce(d.add, column) for column in zip(*parts, strict=True)
        ), fragments if self.hold else None

    def write_row(self, place, fragments, weight, held, inverse, average, averages, dx) -> None:
        """dx = (g * dy - xhat * mean(g * dy * xhat) [- mean(g * dy)]) * rstd [+ the residual's gradient]."""
        sources, _, _, _, thread, row, ok = place
        for c in range(self.tiles.chunks):
            dy, x = fragments[c] if fragments is not None else (self.chunk(place, 0, c), self.chunk(place, 1, c))
            scaled, g = d.floats(dy), self.gain(weight, held, c, thread)
            if g is not None:
                scaled = [d.mul(v, w) for v, w in zip(scaled, g, strict=True)]
            made = []
            for v, h in zip(scaled, self.normed(x, inverse, average), strict=True):
                correction = d.fma(h, averages[0], averages[1]) if self.layer else d.mul(h, averages[0])
                made.append(d.mul(d.add(v, -correction), inverse))
            if len(sources) == 3:
                made = [d.add(v, r) for v, r in zip(made, d.floats(self.chunk(place, 2, c)), strict=True)]
            self.tiles.write(dx[Int64(row), None], c, thread, ok, d.rounded(made, dx.element_type), self.streaming)

    def leave(self, storage, totals, partials, block, group, thread) -> None:
        """The block's row of partial sums: its rows' threads add up in order, through shared memory."""
        tiles, groups = self.tiles, self.tiles.groups
        scratch = None
        if groups.rows > 1:
            layout = cute.make_ordered_layout((groups.rows - 1, tiles.padded), order=(1, 0))
            scratch = storage.allocate_tensor(Float32, layout, byte_alignment=16)
        for which, total in enumerate(totals):
            if groups.rows > 1:
                self.over_groups(total, scratch, group, thread, which > 0)
            for c in range(tiles.chunks):
                if isinstance(total, list):
                    part = total[c]
                else:
                    part = d.fragment(Float32, tiles.step)
                    d.read_shared(total, thread + c * groups.threads, part)
                tiles.write(partials[which, block, None], c, thread, True if groups.rows == 1 else group == 0, part)

    @cute.jit
    def over_groups(self, total, scratch, group, thread, again: cutlass.Constexpr):
        tiles = self.tiles
        if const_expr(again):
            cute.arch.sync_threads()  # the scratch is in use
        if group > 0:
            for c in cutlass.range_constexpr(tiles.chunks):
                d.write_shared(scratch[group - 1, None], thread + c * tiles.groups.threads, total[c])
        cute.arch.sync_threads()
        if group == 0:
            for other in cutlass.range_constexpr(tiles.groups.rows - 1):
                for c in cutlass.range_constexpr(tiles.chunks):
                    part = d.fragment(Float32, tiles.step)
                    d.read_shared(scratch[other, None], thread + c * tiles.groups.threads, part)
                    total[c].store(total[c].load() + part.load())


def backward(arch: str, layer: bool, width: int, step: int, x: str, weight: str | None, residual: bool,
             outputs: list[list[str]],
             offset: float, threads: int, rows: int, stages: int, hold: bool, hold_weight: bool, shared_sums: bool,
             streaming: bool, overlap: bool):  # fmt: skip
    """The compiled function over (dy, x, weight, mean, rstd, dresidual, dx, partials, dweight, dbias, blocks); None for
    what is absent. ``x`` and ``weight`` are dtypes, ``outputs`` (port, dtype) of what is written: dx, dweight, dbias.
    Rows [count, width] with stride 1 in a row, vectors [width], statistics [count, 1] in float32, partials [sums,
    blocks, width] in float32."""
    kinds, count, blocks = dict(outputs), cute.sym_int(), cute.sym_int()
    matrix = d.fake_rows(x, count, width, step)
    sums = tuple(d.fake_vector(kinds.get(p), width, step) for p in ("dweight", "dbias"))
    wanted = sum(s is not None for s in sums)
    kernel = Backward(
        Tiles(width, step, threads, rows), layer, offset, stages, hold, hold_weight, shared_sums, streaming, overlap
    )
    return cute.compile(
        kernel, matrix, d.fake_rows(x, count, width, step), d.fake_vector(weight, width, step),
        d.fake_numbers(layer, count), d.fake_numbers(True, count), d.fake_rows(x if residual else None, count, width,
        step),
        d.fake_rows(x if "dx" in kinds else None, count, width, step), fake_partials(wanted, blocks,
        width) if wanted else None, *sums,
        Int32(1), d.fake_stream(), options=d.OPTIONS,
    )  # fmt: skip
