"""Device code: rms_norm and layer_norm with the quantize that reads y (integration/graph/ops/norm.py and quantize.py
are the law): y is rounded to x's dtype and quantised from that, with the same bits as from memory.

Without a transposed copy it is one pass: a block of scales lies along a row, in neighbouring lanes of one warp. The
transposed copy has blocks along columns, so a block of threads needs 128 rows at once, whose statistics must be known:
a first kernel adds the residual and leaves the statistics, a second one takes tiles of 128 x 128. It goes from the last
row to the first, for the last ones are still in L2.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from ...common import device as d
from ...common import fp8
from ...common import words as w
from ...common.quantize_tile import SIDE, THREADS, QuantizeTile
from ...common.row_tiles import Tiles
from .forward import Forward, affine


class ForwardQuantize(Forward):
    """Its outputs are y (None unless it is stored too), residual_out, mean, rstd, and addresses: data, scale_inv,
    scale, amax. The constants are those of ``QuantizeTile``."""

    def __init__(self, tiles: Tiles, layer: bool, offset: float, stages: int, blocks: int, hold_weight: bool,
                 streaming: bool, arch: str, source: str, kind: str, dtype: str, power_of_two: bool, swizzled: bool,
                 amax: bool) -> None:  # fmt: skip
        super().__init__(tiles, layer, offset, stages, blocks, hold_weight, streaming)
        self.arch, self.packed, self.kind, self.dtype = arch, w.Packed(source), kind, dtype
        self.power_of_two, self.swizzled, self.amax = power_of_two, swizzled, amax
        self.block = {fp8.BLOCK: 128, fp8.MX: 32, fp8.TENSOR: 128}[kind]
        self.lanes = self.block // tiles.step  # that share a block
        assert tiles.groups.threads * tiles.step >= 128, (
            "a thread for every vector of 128 values: none of another row is among its lanes"
        )
        self.across = -(-tiles.width // self.block)

    @cute.jit
    def __call__(self, x, weight, bias, residual, y, total, mean, rstd, data: Int64, scale_inv: Int64, scale: Int64,
                 amax: Int64, eps: Float32, stream):  # fmt: skip
        outputs = (y, total, d.numbers(mean), d.numbers(rstd), data, scale_inv, scale, amax)
        self.start(x, weight, bias, residual, outputs, eps, stream)

    def begin(self, outputs, count, group, thread) -> None:
        if self.kind == fp8.TENSOR:
            first = (cute.arch.thread_idx()[0] == 0) & (cute.arch.block_idx()[0] == 0)
            w.write_words(outputs[5], [w.bits_of(d.div(1.0, self.given(outputs)))], first)
        elif self.swizzled:
            self.clear(outputs[5], count)

    @staticmethod
    def given(outputs):
        return w.float_of(w.read_words(outputs[6], 1, True)[0])

    @cute.jit
    def clear(self, scale_inv, count):
        """Zeros as the scales of the rows that fill up the last 128."""
        words = (self.tiles.width + (SIDE - 1)) // SIDE  # of four scales, in a row
        end = (count + Int32(SIDE - 1)) // SIDE * SIDE
        for row in cutlass.range(count + cute.arch.block_idx()[0], end, cute.arch.grid_dim()[0]):
            for word in cutlass.range(cute.arch.thread_idx()[0], words, self.tiles.groups.block):
                w.write_words(scale_inv + fp8.swizzled(row, word * 4, words), [Uint32(0)], True)

    def leave(self, sums, average, inverse, vectors, held, outputs, row, ok, thread) -> None:
        tiles, packed = self.tiles, self.packed
        y, (data, scale_inv), top = outputs[0], outputs[4:6], None
        scale = self.given(outputs) if self.kind == fp8.TENSOR else None
        for c, h in enumerate(sums):
            values, there = (
                self.normed(h, c, average, inverse, vectors, held, thread),
                tiles.both(ok, tiles.vector_ok(c, thread)),
            )
            if there is not True:  # what lies behind the end counts nothing
                values = [d.select(there, v, Float32(0.0)) for v in values]
            rounded = d.rounded(values, h.element_type)
            if y is not None:
                tiles.write(y[row, None], c, thread, ok, rounded, self.streaming)
            words = cute.recast_tensor(rounded, Uint32)
            words = [words[i] for i in range(tiles.step // packed.per_word)]
            index = thread + c * tiles.groups.threads
            if self.kind == fp8.TENSOR:
                if self.amax:
                    size = packed.transposed_largest([packed.magnitudes(words)] * packed.per_word, nan=True)[0]
                    top = size if top is None else packed.largest(top, size, nan=True)
                factor = scale
            else:
                factor = self.block_scale(words, scale_inv, row, index, ok)
            line = [d.mul(v, factor) for v in packed.floats(words)]
            made = [fp8.cast(line[i : i + 4], self.dtype, self.arch) for i in range(0, tiles.step, 4)]
            w.write_words(data + row * tiles.width + index * tiles.step, made, there)
        if top is not None:
            fp8.raise_amax(packed.floats([top])[0], outputs[7])

    def block_scale(self, words, scale_inv, row, index, ok):
        """What the values of this thread's block are multiplied by; the first lane of the block writes scale_inv."""
        amax = fp8.block_amax(self.packed, words, self.lanes)
        block, first = index // self.lanes, index % self.lanes == 0
        there = self.tiles.both(ok, first & (block < self.across))
        if self.kind == fp8.BLOCK:
            factor, inverse = fp8.block_scale(amax, self.dtype, self.power_of_two)
            w.write_words(scale_inv + (row * self.across + block) * 4, [w.bits_of(inverse)], there)
            return factor
        factor, exponent = fp8.mx_scale(amax, self.dtype)
        if self.swizzled:  # tiles are whole: a block behind the end has scale 0
            words4 = -(-self.across // 4)
            at, there = scale_inv + fp8.swizzled(row, block, words4), self.tiles.both(ok, first & (block < 4 * words4))
        else:
            at = scale_inv + row * self.across + block
        w.write_piece(at, Uint32(exponent), 1, there)
        return factor


class TransposedQuantize:
    """The second kernel: y of h, statistics and weights, tile by tile, to fp8 both ways."""

    def __init__(
        self,
        tile: QuantizeTile,
        source: str,
        weight: str | None,
        bias: str | None,
        layer: bool,
        offset: float,
        overlap: bool,
    ) -> None:
        self.tile, self.packed, self.layer, self.offset, self.overlap = tile, w.Packed(source), layer, offset, overlap
        self.kinds = [None if v is None else w.Packed(v) for v in (weight, bias)]

    def start(self, h, weight, bias, mean, rstd, addresses, stream) -> None:
        """The launch, from a host function."""
        self.kernel(h, weight, bias, mean, rstd, addresses).launch(
            **self.tile.launch(h.shape[0], stream), use_pdl=self.overlap
        )

    @cute.kernel
    def kernel(self, h, weight, bias, mean, rstd, addresses):
        if const_expr(self.overlap):
            cute.arch.griddepcontrol_wait()
        self.run(h, weight, bias, mean, rstd, addresses)

    def run(self, h, weight, bias, mean, rstd, addresses, **where) -> None:
        """One tile; ``where`` as for ``QuantizeTile.run``."""
        data, scale_inv, data_t, scale_inv_t, scale, amax = addresses
        stride = Int64(h.stride[0]) * self.packed.itemsize
        numbers = [None if v is None else w.address(v) for v in (weight, bias, mean, rstd)]
        self.tile.run(lambda *place: self.load(w.address(h), stride, numbers, *place), h.shape[0], data, scale_inv,
                      data_t, scale_inv_t, scale, amax, **where)  # fmt: skip

    def load(self, begin, stride, numbers, row, column, oks) -> list:
        """The words of y, as ``QuantizeTile.run`` asks for them."""
        vectors = [self.vector(kind, at, column, oks[0]) for kind, at in zip(self.kinds, numbers[:2], strict=True)]
        read = [
            self.packed.read(begin + Int64(row + i) * stride + column * self.packed.itemsize, 8, ok)
            for i, ok in enumerate(oks)
        ]
        result = []
        for i, ok in enumerate(oks):
            average, inverse = (
                None if at is None else w.float_of(w.read_words(at + Int64(row + i) * 4, 1, ok)[0])
                for at in numbers[2:]
            )
            values = affine(self.packed.floats(read[i]), average, inverse, *vectors, self.offset)
            result.append([d.select(ok, word, Uint32(0)) for word in self.packed.words(values)])
        return result

    def vector(self, kind, at, column, ok):
        """8 numbers of weight or bias in float32; None for an absent one."""
        return None if kind is None else kind.floats(kind.read(at + column * kind.itemsize, 8, ok))


def row_wise(arch: str, layer: bool, width: int, step: int, x: str, weight: str | None, bias: str | None,
             residual: bool, outputs: list[str],
             offset: float, threads: int, rows: int, stages: int, blocks: int, hold_weight: bool, streaming: bool,
             kind: str, dtype: str, power_of_two: bool, swizzled: bool, amax: bool):  # fmt: skip
    """The compiled function over (x, weight, bias, residual, y, residual_out, mean, rstd, addresses of data, scale_inv,
    scale and amax, eps); otherwise as ``forward.forward``. ``amax`` holds 0 at first."""
    count = cute.sym_int()
    like_x = [
        d.fake_rows(x if there else None, count, width, step)
        for there in (True, residual, "y" in outputs, "residual_out" in outputs)
    ]
    numbers = [d.fake_numbers(p in outputs, count) for p in ("mean", "rstd")]
    kernel = ForwardQuantize(Tiles(width, step, threads, rows), layer, offset, stages, blocks, hold_weight, streaming,
                             arch, x, kind, dtype,
                             power_of_two, swizzled, amax)  # fmt: skip
    vectors = [d.fake_vector(v, width, step) for v in (weight, bias)]
    return cute.compile(
        kernel,
        like_x[0],
        *vectors,
        *like_x[1:],
        *numbers,
        *[Int64(0)] * 4,
        Float32(0.0),
        d.fake_stream(),
        options=d.OPTIONS,
    )


class BothWays:
    """Statistics and the residual sum, then the tiles."""

    def __init__(self, first: Forward, second: TransposedQuantize) -> None:
        self.first, self.second = first, second

    @cute.jit
    def __call__(self, x, weight, bias, residual, total, mean, rstd, data: Int64, scale_inv: Int64, data_t: Int64,
                 scale_inv_t: Int64, scale: Int64, amax: Int64, workspace: Int64, eps: Float32, stream):  # fmt: skip
        mean, rstd = d.numbers(mean), d.numbers(rstd)
        self.first.start(x, None, None, residual, (None, total, mean, rstd), eps, stream)
        h = x if const_expr(total is None) else total
        tile, (own, own_t) = self.second.tile, self.second.tile.scales(scale_inv, scale_inv_t, workspace)
        self.second.start(h, weight, bias, mean, rstd, (data, own, data_t, own_t, scale, amax), stream)
        tile.move_scales(x.shape[0], scale_inv, scale_inv_t, workspace, stream)


class Together:
    """Both in one launch, so that the tiles find h in L2: blocks of the two kinds take turns. A step has as many as
    make statistics and sum of 128 rows, and then those of all tiles of 128 rows, ``lag`` steps behind. A tile waits
    until ``counters`` say that its rows are there. They are 0 at first: one of blocks that have begun, then for each
    128 rows one of blocks that have made theirs.

    A block's place in this order is the order in which blocks begin, so what a tile waits for has begun and waits for
    nothing itself."""

    def __init__(self, first: Forward, second: TransposedQuantize, lag: int) -> None:
        groups = first.tiles.groups
        assert groups.block == THREADS and SIDE % groups.rows == 0 and not first.stages, (groups.threads, groups.rows)
        self.first, self.second, self.lag = first, second, lag
        self.makers = SIDE // groups.rows  # blocks of a step that make statistics
        self.step = self.makers + second.tile.across

    @cute.jit
    def __call__(self, x, weight, bias, residual, total, mean, rstd, data: Int64, scale_inv: Int64, data_t: Int64,
                 scale_inv_t: Int64, scale: Int64, amax: Int64, workspace: Int64, counters: Int64, eps: Float32,
                 stream):  # fmt: skip
        steps = (x.shape[0] + (SIDE - 1)) // SIDE + self.lag
        tile, (own, own_t) = self.second.tile, self.second.tile.scales(scale_inv, scale_inv_t, workspace)
        addresses = (data, own, data_t, own_t, scale, amax)
        how = tile.launch(x.shape[0], stream) | {"grid": [steps * self.step, 1, 1]}
        mean, rstd = d.numbers(mean), d.numbers(rstd)
        self.kernel(x, weight, bias, residual, total, mean, rstd, addresses, counters, eps).launch(**how)
        tile.move_scales(x.shape[0], scale_inv, scale_inv_t, workspace, stream)

    @cute.kernel
    def kernel(self, x, weight, bias, residual, total, mean, rstd, addresses, counters: Int64, eps: Float32):
        storage = d.SmemAllocator()
        scratch, memory = self.first.tiles.groups.scratch(storage, 1), self.second.tile.allocate(storage)
        turn = self.turn(w.shared(storage, 4), counters)
        step, place = turn // self.step, turn % self.step
        if place < self.makers:
            if step < (x.shape[0] + (SIDE - 1)) // SIDE:
                self.make(x, residual, (None, total, mean, rstd), eps, scratch, counters, step, place)
        else:
            if step >= self.lag:
                self.tile(x if const_expr(total is None) else total, weight, bias, mean, rstd, addresses, counters,
                          step - self.lag, place - self.makers, memory)  # fmt: skip

    def turn(self, memory, counters):
        """Which of the blocks this is, in the order in which they begin."""
        first = cute.arch.thread_idx()[0] == 0
        w.write_shared_words(memory, [w.take_number(counters, first)], first)
        cute.arch.sync_threads()
        return Int32(w.read_shared_words(memory, 1)[0])

    def make(self, x, residual, outputs, eps, scratch, counters, step, place) -> None:
        """Statistics and sum of as many rows as a block takes at once."""
        tiles = self.first.tiles
        group, thread = tiles.place()
        row = step * SIDE + place * tiles.groups.rows + group
        ok = row < x.shape[0]
        sources = [x] if residual is None else [x, residual]
        loaded = [[tiles.read(s[Int64(row), None], c, thread, ok) for c in range(tiles.chunks)] for s in sources]
        self.first.finish(loaded, (None, None), [None, None], outputs, eps, scratch, row, ok, group, thread, Int32(0))
        cute.arch.sync_threads()
        w.count_up(self._made(counters, step), cute.arch.thread_idx()[0] == 0)

    def tile(self, h, weight, bias, mean, rstd, addresses, counters, group, column, memory) -> None:
        w.wait_for(self._made(counters, group), self.makers, cute.arch.thread_idx()[0] == 0)
        cute.arch.sync_threads()
        block = group * self.second.tile.across + column
        self.second.run(h, weight, bias, mean, rstd, addresses, block=block, memory=memory)

    @staticmethod
    def _made(counters, group):
        return counters + (Int64(group) + 1) * 4


def both_ways(arch: str, layer: bool, width: int, step: int, x: str, weight: str | None, bias: str | None,
              residual: bool, offset: float, threads: int, rows: int, stages: int, blocks: int, streaming: bool,
              overlap: bool, stream_data: bool, lag: int, **quantize):  # fmt: skip
    """``streaming`` is for residual_out, which the tiles read, ``stream_data`` for the quantised data; ``quantize``:
    constants of ``QuantizeTile``. With ``lag`` it is one kernel (``Together``), with 0 there are two.

    The compiled function over (x, weight, bias, residual, residual_out, mean, rstd, addresses of data, scale_inv,
    data_t, scale_inv_t, scale, amax and workspace, with ``lag`` that of the counters, eps). With a residual
    residual_out is there, with layer_norm mean, and rstd always: the tiles read them."""
    count = cute.sym_int()
    like_x = [d.fake_rows(x if there else None, count, width, step) for there in (True, residual, residual)]
    vectors = [d.fake_vector(v, width, 8) for v in (weight, bias)]
    numbers = [d.fake_numbers(there, count) for there in (layer, True)]
    tile = QuantizeTile(w.Packed(x), width, vector=True, transposed=True, reverse=not lag, streaming=stream_data,
                        arch=arch, **quantize)  # fmt: skip
    first = Forward(Tiles(width, step, threads, rows), layer, 0.0, stages, blocks, False, streaming)
    second = TransposedQuantize(tile, x, weight, bias, layer, offset, overlap)
    kernel = Together(first, second, lag) if lag else BothWays(first, second)
    addresses = [Int64(0)] * (8 if lag else 7)
    return cute.compile(kernel, like_x[0], *vectors, *like_x[1:], *numbers, *addresses, Float32(0.0), d.fake_stream(),
                        options=d.OPTIONS)  # fmt: skip
