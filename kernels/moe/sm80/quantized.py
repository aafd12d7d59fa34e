"""Device code: permute with the quantize that reads its rows, in blocks of 1 x 128, as ``integration/graph/ops/moe.py``
and ``quantize.py`` define them, in one pass over x.

A token's row is read and quantised once, whatever the number of slots: each of its rows has the same bytes and scales.
A block of scales lies in neighbouring lanes of a warp, 16 bytes of x each; those lanes write its scale, a slot each.
Padding rows are rows of zeros: their bytes are 0 and their scales 1."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from ...common import device as d
from ...common import fp8
from ...common import words as w
from ...common.row_pieces import both
from .permute import Padding, Spread, tensors
from .rows import Numbers, Rows

ACCESS = 16  # bytes of x that a thread reads at once
BLOCK = 128  # values that share a scale
ONE = 0x3F800000  # the bits of 1.0


class Quantized:
    """The rows that are written: data [c, width] of 8 bits and scale_inv [c, ceil(width / 128)] in float32, where
    ``rows`` says how the values lie in vectors. ``to`` is (address of data, address of scale_inv)."""

    def __init__(self, rows: Rows, streaming: bool) -> None:
        self.rows, self.streaming = rows, streaming
        self.across = -(-rows.width // BLOCK)
        self.lanes = min(BLOCK // rows.elements, rows.lanes)  # that share a block

    def write(self, to, row, vector, words: list, ok) -> None:
        """Vector ``vector`` of a row of data."""
        w.write_words(to[0] + Int64(row) * self.rows.width + vector * self.rows.elements, words, ok,
                      streaming=self.streaming)  # fmt: skip

    def write_scale(self, to, row, vector, word, ok) -> None:
        """The scale of the block that holds vector ``vector`` of a row."""
        w.write_words(to[1] + (Int64(row) * self.across + vector // self.lanes) * 4, [word], ok)


class QuantizedPadding(Padding):
    """Padding rows whose ``to_rows`` are those of ``Quantized``."""

    def __init__(self, experts: int, align: int, quantized: Quantized, numbers: Numbers | None) -> None:
        super().__init__(experts, align, quantized.rows, numbers, quantized.streaming)
        self.quantized = quantized

    def zero(self, to_rows, row, vector) -> None:
        q = self.quantized
        q.write(to_rows, row, vector, [Uint32(0)] * (q.rows.elements // 4), True)
        q.write_scale(to_rows, row, vector, Uint32(ONE), vector % q.lanes == 0)


class SpreadQuantize(Spread):
    """Rows of x to their slots, quantised to ``fp8`` ("float8_e4m3fn" or "float8_e5m2"); with ``numbers`` each row's
    probability too. ``arch`` says which instruction casts."""

    def __init__(self, arch: str, fp8_dtype: str, power_of_two: bool, *, dtype: str, width: int, slots: int,
                 weight: str | None, experts: int, align: int, threads: int, vectors: int,
                 streaming: bool) -> None:  # fmt: skip
        super().__init__(dtype, width, ACCESS, slots, weight, False, weight is not None, experts, align, threads,
                         vectors, streaming)  # fmt: skip
        self.arch, self.fp8_dtype, self.power_of_two = arch, fp8_dtype, power_of_two
        self.quantized = Quantized(self.rows, streaming)
        self.padding = QuantizedPadding(experts, align, self.quantized, self.probs)

    @cute.jit
    def launch(
        self,
        mX: cute.Tensor,
        mMap: cute.Tensor,
        mCounts: cute.Tensor | None,
        mOffsets: cute.Tensor | None,
        mProbs: cute.Tensor | None,
        to_data: Int64,
        to_scales: Int64,
        to_numbers: Int64,
        stream,
    ):
        self.start(mX, mMap, mCounts, mOffsets, mProbs, (to_data, to_scales), to_numbers, stream)

    def move(self, block, mX, mMap, mProbs, to_rows, to_numbers) -> None:
        r, q = self.rows, self.quantized
        token, first, there = r.place(block, mX.shape[0])
        own = [(first + step, ok) for step, ok in r.steps(first, there)]
        read = [r.read(r.place_of(w.address(mX), token, mX.stride[0], vector), ok) for vector, ok in own]
        places = self.map.ints(w.address(mMap), token, there)
        bits = None if self.probs is None else self.probs.read(w.address(mProbs), token, there)
        made = [self.cast(words) for words in read]
        for slot, place in enumerate(places):
            kept = place >= 0
            for (vector, ok), (words, _) in zip(own, made, strict=True):
                q.write(to_rows, place, vector, words, both(ok, kept))
            if bits is not None:
                self.probs.put(to_numbers, place, bits[slot], both(there, kept & (first == 0)))
        self.write_scales(token, there, own, [scale for _, scale in made], mMap, to_rows)

    def cast(self, words: list) -> tuple:
        """(bytes as words, the bits of scale_inv) of a vector of x."""
        packed = self.rows.packed
        amax = fp8.block_amax(packed, words, self.quantized.lanes)
        scale, inverse = fp8.block_scale(amax, self.fp8_dtype, self.power_of_two)
        values = [d.mul(v, scale) for v in packed.floats(words)]
        fours = [values[i : i + 4] for i in range(0, len(values), 4)]
        return [fp8.cast(v, self.fp8_dtype, self.arch) for v in fours], w.bits_of(inverse)

    def write_scales(self, token, there, own: list, scales: list, mMap, to_rows) -> None:
        """Each lane of a block writes the block's scale for one slot, and where there are more slots than lanes for
        those further behind too."""
        q, slots = self.quantized, self.map.count
        lane = cute.arch.thread_idx()[0] % q.lanes
        for start in range(0, slots, q.lanes):
            slot = lane + start
            mine = there if start + q.lanes <= slots else both(there, slot < slots)
            place = Int32(self.map.get(w.address(mMap), token * slots + slot, mine))
            for (vector, ok), scale in zip(own, scales, strict=True):
                # the last block may have lanes without a vector
                exists = ok if self.rows.width % BLOCK == 0 else vector // q.lanes < q.across
                q.write_scale(to_rows, place, vector, scale, both(mine, both(exists, place >= 0)))


def spread_quantize(
    arch: str,
    *,
    dtype: str,
    width: int,
    slots: int,
    weight: str | None,
    experts: int,
    align: int,
    fp8: str,
    power_of_two: bool,
    threads: int,
    vectors: int,
    streaming: bool,
):
    """A function (x [tokens, width] with any row stride, row_map [tokens, slots], counts and offsets [experts] where
    ``align`` > 1 else None, probs [tokens, slots] of ``weight`` or None, addresses of data, of scale_inv and of
    row_probs). Rows and what lies between them divide by 16 bytes; other constants as ``permute.spread`` has them."""
    work = SpreadQuantize(arch, fp8, power_of_two, dtype=dtype, width=width, slots=slots, weight=weight,
                          experts=experts, align=align, threads=threads, vectors=vectors,
                          streaming=streaming)  # fmt: skip
    given = tensors(dtype, width, ACCESS, slots, weight, align, experts)
    return cute.compile(work.launch, *given, *[Int64(0)] * 3, d.fake_stream(), options=d.OPTIONS)
