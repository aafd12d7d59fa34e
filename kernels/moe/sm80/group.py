"""Device code of group_by_expert and tokens_per_expert, as ``integration/graph/ops/moe.py`` defines them: a stable
counting sort of slots by expert, without atomics, so that reruns are bitwise equal.

The slots lie in order over the warps of all blocks, a stretch for each warp. ``count`` leaves what each block holds of
each expert. ``place`` counts once more, for each warp, sums up what lies in front of it, and gives rows out in order:
lanes that hold the same expert find each other, and the warp's next row of it moves on by as many."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from ...common import device as d
from ...common import words as w
from ...common.row_tiles import number_if, put_if

WARPS = 8
THREADS = WARPS * d.WARP
BATCH = 8  # rounds of a warp, and blocks, that are read at once


def _table(storage, rows: int, columns: int):
    """int32 in shared memory."""
    return storage.allocate_tensor(Int32, cute.make_ordered_layout((rows, columns), order=(1, 0)), byte_alignment=16)


class Bins:
    """Slots as bins: their expert's, with ``sequences`` one for each expert and sequence (token i, of ``slots`` slots,
    is of sequence i % sequences), and one behind those for slots that count nowhere."""

    def __init__(self, experts: int, slots: int = 1, sequences: int = 1, masked: bool = False) -> None:
        self.slots, self.experts, self.sequences, self.masked = slots, experts, sequences, masked
        self.count = sequences * experts

    def stretch(self, slots) -> tuple:
        """(this lane's first slot, the end of its warp's, how many rounds of the warp's lanes those are)."""
        warps = Int64(cute.arch.grid_dim()[0]) * WARPS
        warp = Int64(cute.arch.block_idx()[0]) * WARPS + cute.arch.thread_idx()[0] // d.WARP
        rounds = (slots + (warps * d.WARP - 1)) // (warps * d.WARP)
        end = (warp + 1) * rounds * d.WARP
        return warp * rounds * d.WARP + cute.arch.lane_idx(), d.select(end < slots, end, slots), Int32(rounds)

    def of(self, expert_map, mask, slot, end):
        """The bin of a slot; that of no expert from ``end`` on."""
        there = slot < end
        expert = Int32(w.read_piece(expert_map + slot * 4, 4, there))
        kept = there & (expert >= 0) & (expert < self.experts)
        if self.masked:
            kept = kept & (Int32(w.read_piece(mask + slot // self.slots, 1, there)) == 0)
        if self.sequences > 1:
            expert = Int32(slot // self.slots % self.sequences) * self.experts + expert
        return d.select(kept, expert, Int32(self.count))

    def batch(self, expert_map, mask, slot, end) -> list:
        """(slot, bin) of rounds that are read at once."""
        return [(slot + i * d.WARP, self.of(expert_map, mask, slot + i * d.WARP, end)) for i in range(BATCH)]

    @staticmethod
    def together(bin) -> tuple:
        """(lanes of the same bin in front of this one, how many have it)."""
        lanes = cute.arch.match_sync(0xFFFFFFFF, bin)
        before = lanes & ((Uint32(1) << Uint32(cute.arch.lane_idx())) - Uint32(1))
        return Int32(cute.arch.popc(before)), Int32(cute.arch.popc(lanes))

    @cute.jit
    def count_warps(self, table, expert_map, mask, slots):
        """Fills ``table`` [warps, bins] with what each warp's stretch holds. All threads of a block."""
        thread = cute.arch.thread_idx()[0]
        for bin in cutlass.range(thread, self.count + 1, THREADS):
            for warp in cutlass.range_constexpr(WARPS):
                table[warp, bin] = Int32(0)
        cute.arch.sync_threads()
        first, end, rounds = self.stretch(slots)
        for r in cutlass.range(0, rounds, BATCH):
            self.count_batch(table[thread // d.WARP, None], expert_map, mask, first + Int64(r) * d.WARP, end)
        cute.arch.sync_threads()

    def count_batch(self, mine, expert_map, mask, slot, end) -> None:
        for _, bin in self.batch(expert_map, mask, slot, end):
            before, all_ = self.together(bin)
            put_if(before == 0, mine, bin, mine[bin] + all_)
            cute.arch.sync_warp()


# ---- count -----------------------------------------------------------------------------------------------------------


class Count:
    """[blocks, bins] int32: how many slots of each bin a block holds."""

    def __init__(self, bins: Bins) -> None:
        self.bins = bins

    @cute.jit
    def launch(self, mMap: cute.Tensor, mask: Int64, blocks: Int32, to_held: Int64, stream):
        self.kernel(mMap, mask, to_held).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, mMap: cute.Tensor, mask: Int64, to_held: Int64):
        table = _table(SmemAllocator(), WARPS, self.bins.count + 1)
        self.bins.count_warps(table, w.address(mMap), mask, Int64(mMap.shape[0]))
        to = to_held + Int64(cute.arch.block_idx()[0]) * (4 * self.bins.count)
        for bin in cutlass.range(cute.arch.thread_idx()[0], self.bins.count, THREADS):
            self.held(table, bin, to)

    def held(self, table, bin, to) -> None:
        total = table[0, bin]
        for warp in range(1, WARPS):
            total = total + table[warp, bin]
        w.write_words(to + Int64(bin) * 4, [Uint32(total)], True)


def count(arch: str, *, experts: int, slots: int, sequences: int, masked: bool):
    """A function (expert_map [slots of all tokens] int32, address of a bool mask [tokens], which is looked at where
    ``masked`` and hides tokens, blocks, address of held [blocks, sequences * experts] int32)."""
    work = Count(Bins(experts, slots, sequences, masked))
    return cute.compile(work.launch, _fake_map(), Int64(0), Int32(0), Int64(0), d.fake_stream(), options=d.OPTIONS)


def _fake_map():
    return d.fake_vector("int32", cute.sym_int())


# ---- sums over blocks ------------------------------------------------------------------------------------------------


class Held:
    """Sums over [blocks, bins]. ``parts`` of a block's threads share the blocks of a bin where there are more threads
    than bins."""

    def __init__(self, bins: int) -> None:
        self.bins = bins
        self.columns = min(THREADS, max(d.WARP, 1 << (bins - 1).bit_length()))
        self.parts = THREADS // self.columns

    def tables(self, storage) -> tuple:
        return _table(storage, self.parts, self.bins), _table(storage, self.parts, self.bins)

    @cute.jit
    def sum(self, held, blocks, block, totals, fronts):
        """Of each bin, into ``totals`` and ``fronts`` [parts, bins]: how many all blocks hold, and those in front of
        ``block``, by parts. All threads of a block."""
        thread = cute.arch.thread_idx()[0]
        part = thread // self.columns
        for bin in cutlass.range(thread % self.columns, self.bins, self.columns):
            total, front = Int32(0), Int32(0)
            for b in cutlass.range(part, blocks, self.parts * BATCH):
                total, front = self.add_batch(held, b, blocks, block, bin, total, front)
            totals[part, bin] = total
            fronts[part, bin] = front
        cute.arch.sync_threads()

    def add_batch(self, held, first, blocks, block, bin, total, front) -> tuple:
        """Both sums with what some blocks hold, which is read at once."""
        own = [first + i * self.parts for i in range(BATCH)]
        numbers = [Int32(w.read_piece(held + (Int64(b) * self.bins + bin) * 4, 4, b < blocks)) for b in own]
        for b, number in zip(own, numbers, strict=True):
            total = total + number
            front = front + d.select(b < block, number, Int32(0))
        return total, front

    def over_parts(self, table, bin):
        total = table[0, bin]
        for part in range(1, self.parts):
            total = total + table[part, bin]
        return total


# ---- tokens_per_expert -----------------------------------------------------------------------------------------------


class Total:
    """[bins] float32 of what the blocks hold."""

    def __init__(self, bins: int) -> None:
        self.held = Held(bins)

    @cute.jit
    def launch(self, mHeld: cute.Tensor, to: Int64, stream):
        self.kernel(mHeld, to).launch(grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, mHeld: cute.Tensor, to: Int64):
        totals, fronts = self.held.tables(SmemAllocator())
        self.held.sum(w.address(mHeld), Int32(mHeld.shape[0]), Int32(0), totals, fronts)
        for bin in cutlass.range(cute.arch.thread_idx()[0], self.held.bins, THREADS):
            self.put(totals, bin, to)

    def put(self, totals, bin, to) -> None:
        w.write_words(to + Int64(bin) * 4, [w.bits_of(Float32(self.held.over_parts(totals, bin)))], True)


def total(arch: str, *, bins: int):
    """A function (held [blocks, bins] int32, address of [bins] float32)."""
    held = cute.runtime.make_fake_tensor(Int32, (cute.sym_int(), bins), stride=(bins, 1), assumed_align=4)
    return cute.compile(Total(bins).launch, held, Int64(0), d.fake_stream(), options=d.OPTIONS)


# ---- group_by_expert -------------------------------------------------------------------------------------------------


class Place:
    """counts, offsets and row_map."""

    def __init__(self, experts: int, align: int) -> None:
        self.bins, self.held, self.experts, self.align = Bins(experts), Held(experts), experts, align
        self.each = -(-experts // d.WARP)  # experts of a lane that sums over them

    @cute.jit
    def launch(
        self, mMap: cute.Tensor, held: Int64, blocks: Int32, to_counts: Int64, to_offsets: Int64, to_rows: Int64, stream
    ):
        kernel = self.kernel(mMap, held, blocks, to_counts, to_offsets, to_rows)
        kernel.launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self, mMap: cute.Tensor, held: Int64, blocks: Int32, to_counts: Int64, to_offsets: Int64, to_rows: Int64
    ):
        storage, thread, block = SmemAllocator(), cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        table, (totals, fronts) = _table(storage, WARPS, self.experts + 1), self.held.tables(storage)
        ends = _table(storage, 1, self.experts)[0, None]
        slots = Int64(mMap.shape[0])
        self.bins.count_warps(table, w.address(mMap), Int64(0), slots)
        self.held.sum(held, d.select(blocks > 1, blocks, Int32(0)), block, totals, fronts)
        for expert in cutlass.range(thread, self.experts, THREADS):
            self.gather(table, totals, ends, expert, blocks)
        cute.arch.sync_threads()
        if thread < d.WARP:
            self.sum_up(ends, thread)
        cute.arch.sync_threads()
        for expert in cutlass.range(thread, self.experts, THREADS):
            self.begin(table, totals, fronts, ends, expert)
        if block == 0:
            for expert in cutlass.range(thread, self.experts, THREADS):
                self.put(totals, ends, expert, to_counts, to_offsets)
        cute.arch.sync_threads()
        self.give(table[thread // d.WARP, None], w.address(mMap), slots, to_rows)

    def gather(self, table, totals, ends, expert, blocks) -> None:
        """An expert's rows, of this block alone where it is the only one, into ``totals`` [0]; padded into ``ends``."""
        own = table[0, expert]
        for warp in range(1, WARPS):
            own = own + table[warp, expert]
        count = d.select(blocks > 1, self.held.over_parts(totals, expert), own)
        totals[0, expert] = count
        ends[expert] = (count + (self.align - 1)) // self.align * self.align

    @cute.jit
    def sum_up(self, ends, lane):
        """Where each expert's group ends, from its padded rows, by one warp."""
        total = Int32(0)
        for i in cutlass.range_constexpr(self.each):
            total = total + number_if(lane * self.each + i < self.experts, ends, lane * self.each + i, Int32(0))
        end = total
        for offset in (1, 2, 4, 8, 16):
            before = cute.arch.shuffle_sync(end, cutlass.max(lane - offset, Int32(0)))
            end = end + d.select(lane >= offset, before, Int32(0))
        end = end - total
        for i in cutlass.range_constexpr(self.each):
            expert = lane * self.each + i
            end = end + number_if(expert < self.experts, ends, expert, Int32(0))
            put_if(expert < self.experts, ends, expert, end)

    def begin(self, table, totals, fronts, ends, expert) -> None:
        """Each warp's first row of an expert, into ``table``."""
        count = totals[0, expert]
        row = (
            ends[expert] - (count + (self.align - 1)) // self.align * self.align + self.held.over_parts(fronts, expert)
        )
        for warp in range(WARPS):
            held = table[warp, expert]
            table[warp, expert] = row
            row = row + held

    def put(self, totals, ends, expert, to_counts, to_offsets) -> None:
        w.write_words(to_counts + Int64(expert) * 4, [Uint32(totals[0, expert])], True)
        w.write_words(to_offsets + Int64(expert) * 4, [Uint32(ends[expert])], True)

    @cute.jit
    def give(self, next_row, expert_map, slots, to_rows):
        """Rows to this warp's slots in order; ``next_row`` [bins] is its own."""
        first, end, rounds = self.bins.stretch(slots)
        for r in cutlass.range(0, rounds, BATCH):
            self.give_batch(next_row, expert_map, first + Int64(r) * d.WARP, end, to_rows)

    def give_batch(self, next_row, expert_map, slot, end, to_rows) -> None:
        for at, bin in self.bins.batch(expert_map, Int64(0), slot, end):
            before, all_ = self.bins.together(bin)
            row = next_row[bin] + before
            cute.arch.sync_warp()
            put_if(before == 0, next_row, bin, row + all_)
            cute.arch.sync_warp()
            w.write_words(to_rows + at * 4, [Uint32(d.select(bin < self.experts, row, Int32(-1)))], at < end)


def place(arch: str, *, experts: int, align: int):
    """A function (expert_map [slots of all tokens] int32, address of held [blocks, experts], which ``count`` wrote in a
    grid of as many blocks and which is not looked at for one, blocks, addresses of counts, offsets [experts] and
    row_map)."""
    zeros = [Int64(0), Int32(0), Int64(0), Int64(0), Int64(0)]
    return cute.compile(Place(experts, align).launch, _fake_map(), *zeros, d.fake_stream(), options=d.OPTIONS)
