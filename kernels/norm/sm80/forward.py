"""Device code: rms_norm and layer_norm forward, with an optional residual sum in front (integration/graph/ops/norm.py
is the law).

One pass over memory: a row is read once into the registers of its threads, so the statistics are of the values at hand
(the variance of layer_norm of centred ones), and y is written from there. Either every tile has a block of its own and
many blocks overlap (``stages`` = 0), or resident blocks take tiles in turn while cp.async brings the next ones.
"""

from __future__ import annotations

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from ...common import device as d
from ...common.row_tiles import Tiles


def affine(values: list, average, inverse, weight: list | None, bias: list | None, offset: float) -> list:
    """(values [- average]) * inverse [* (weight + offset)] [+ bias] on float32 numbers, each step rounded: the same
    bits in every kernel."""
    if average is not None:
        values = [d.add(v, -average) for v in values]
    values = [d.mul(v, inverse) for v in values]
    if weight is not None:
        weight = [d.add(w, offset) for w in weight] if offset else weight
        values = [d.mul(v, w) for v, w in zip(values, weight, strict=True)]
    return values if bias is None else [d.add(v, b) for v, b in zip(values, bias, strict=True)]


class Forward:
    """``layer``: layer_norm. ``offset`` is added to the weight in float32. ``blocks``: at most so many where ``stages``
    > 0."""

    def __init__(
        self, tiles: Tiles, layer: bool, offset: float, stages: int, blocks: int, hold_weight: bool, streaming: bool
    ) -> None:
        self.tiles, self.layer, self.offset = tiles, layer, offset
        self.stages, self.blocks, self.hold_weight, self.streaming = stages, blocks, hold_weight, streaming

    @cute.jit
    def __call__(self, x, weight, bias, residual, y, total, mean, rstd, eps: Float32, stream):
        self.start(x, weight, bias, residual, (y, total, d.numbers(mean), d.numbers(rstd)), eps, stream)

    def start(self, x, weight, bias, residual, outputs, eps, stream) -> None:
        """The launch, from a host function."""
        tiles = cute.ceil_div(x.shape[0], self.tiles.groups.rows)
        grid = cutlass.min(tiles, Int32(self.blocks)) if self.stages else tiles
        self.kernel(x, weight, bias, residual, outputs, eps).launch(
            grid=[grid, 1, 1], block=[self.tiles.groups.block, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, x, weight, bias, residual, outputs, eps: Float32):
        rows, stages = self.tiles.groups.rows, self.stages
        storage = d.SmemAllocator()
        scratch = self.tiles.groups.scratch(storage, 1)
        group, thread = self.tiles.place()
        first, count = cute.arch.block_idx()[0], x.shape[0]
        sources = [x] if const_expr(residual is None) else [x, residual]
        vectors = (weight, bias)
        if const_expr(self.hold_weight):
            held = [self.tiles.vector(v, thread) for v in vectors]
        else:
            held = [None, None]
        self.begin(outputs, count, group, thread)
        if const_expr(stages == 0):
            row = first * rows + group
            ok = self.tiles.row_ok(row, count)
            loaded = [
                [self.tiles.read(s[Int64(row), None], c, thread, ok) for c in range(self.tiles.chunks)] for s in sources
            ]
            self.finish(loaded, vectors, held, outputs, eps, scratch, row, ok, group, thread, Int32(0))
        else:
            buffers = [self.tiles.allocate(storage, s.element_type, stages) for s in sources]
            turn = cute.arch.grid_dim()[0] * rows  # rows between two tiles of a block
            for ahead in cutlass.range_constexpr(stages - 1):
                row = first * rows + group + ahead * turn
                self.tiles.issue(sources, buffers, Int32(ahead), group, thread, row, row < count)
            stage, filled, buffer = Int32(0), Int32(stages - 1), Int32(0)
            for tile in cutlass.range(first * rows, count, turn):
                row = tile + group
                later = row + (stages - 1) * turn
                self.tiles.issue(sources, buffers, filled, group, thread, later, later < count)
                cute.arch.cp_async_wait_group(stages - 1)
                loaded = [
                    [self.tiles.read_stage(b, stage, group, c, thread) for c in range(self.tiles.chunks)]
                    for b in buffers
                ]
                ok = self.tiles.row_ok(row, count)
                self.finish(loaded, vectors, held, outputs, eps, scratch, row, ok, group, thread, buffer)
                filled = stage
                stage = d.select(stage + 1 < stages, stage + 1, Int32(0))
                if const_expr(not self.layer):
                    buffer = 1 - buffer  # layer_norm uses both in each row

    def begin(self, outputs, count, group, thread) -> None:
        """What is done once, before the rows: nothing here."""

    def finish(self, loaded, vectors, held, outputs, eps, scratch, row, ok, group, thread, buffer) -> None:
        """From the loaded row to all that is written of it."""
        tiles, (total, mean, rstd) = self.tiles, outputs[1:4]
        row, sums = Int64(row), loaded[0]
        if len(loaded) == 2:
            dtype, sums = sums[0].element_type, []
            for c, (a, b) in enumerate(zip(*loaded, strict=True)):
                h = d.rounded([d.add(p, q) for p, q in zip(d.floats(a), d.floats(b), strict=True)], dtype)
                sums.append(h)
                if total is not None:
                    tiles.write(total[row, None], c, thread, ok, h, self.streaming)
        average, inverse = self.statistics(sums, eps, scratch, group, thread, buffer)
        if mean is not None:
            tiles.put(mean, row, thread, ok, average)
        if rstd is not None:
            tiles.put(rstd, row, thread, ok, inverse)
        self.leave(sums, average, inverse, vectors, held, outputs, row, ok, thread)

    def leave(self, sums, average, inverse, vectors, held, outputs, row, ok, thread) -> None:
        """Makes and writes y, where it is wanted."""
        if outputs[0] is None:
            return
        for c, h in enumerate(sums):
            values = d.rounded(self.normed(h, c, average, inverse, vectors, held, thread), h.element_type)
            self.tiles.write(outputs[0][row, None], c, thread, ok, values, self.streaming)

    def normed(self, h, c: int, average, inverse, vectors, held, thread) -> list:
        """A chunk of y in float32."""
        factors = []
        for vector, kept in zip(vectors, held, strict=True):
            part = None if vector is None else kept[c] if kept else self.tiles.read(vector, c, thread, True)
            factors.append(None if part is None else d.floats(part))
        return affine(d.floats(h), average, inverse, *factors, self.offset)

    def statistics(self, sums, eps, scratch, group, thread, buffer):
        """(mean or None, rstd) of the row."""
        tiles, width = self.tiles, self.tiles.width
        average = None
        if self.layer:
            partial = functools.reduce(d.add, [functools.reduce(d.add, d.floats(h)) for h in sums])
            (partial,) = tiles.groups.sum((partial,), scratch, group, buffer)
            average, buffer = d.mean(partial, width), 1 - buffer
        squares = []
        for c, h in enumerate(sums):
            part = Float32(0.0)
            for v in d.floats(h):
                v = v if average is None else d.add(v, -average)
                part = d.fma(v, v, part)
            inside = tiles.vector_ok(c, thread)
            squares.append(part if average is None or inside is True else d.select(inside, part, Float32(0.0)))
        (partial,) = tiles.groups.sum((functools.reduce(d.add, squares),), scratch, group, buffer)
        return average, d.rsqrt(d.add(d.mean(partial, width), eps))


def forward(arch: str, layer: bool, width: int, step: int, x: str, weight: str | None, bias: str | None,
            residual: bool, outputs: list[str],
            offset: float, threads: int, rows: int, stages: int, blocks: int, hold_weight: bool,
            streaming: bool):  # fmt: skip
    """The compiled function over (x, weight, bias, residual, y, residual_out, mean, rstd, eps); None for what is
    absent. ``x``, ``weight``, ``bias`` are dtypes, ``outputs`` the ports that are written, ``step`` the elements of a
    vector. Rows [count, width] with stride 1 in a row, vectors [width], statistics [count, 1] in float32."""
    count = cute.sym_int()
    like_x = [d.fake_rows(x if there else None, count, width, step) for there in (
        True, residual, "y" in outputs, "residual_out" in outputs)]  # fmt: skip
    vectors = [d.fake_vector(v, width, step) for v in (weight, bias)]
    numbers = [d.fake_numbers(p in outputs, count) for p in ("mean", "rstd")]
    kernel = Forward(Tiles(width, step, threads, rows), layer, offset, stages, blocks, hold_weight, streaming)
    return cute.compile(
        kernel, like_x[0], *vectors, *like_x[1:], *numbers, Float32(0.0), d.fake_stream(), options=d.OPTIONS
    )
