"""How our own norm kernels spread rows over threads and blocks: the knobs, their defaults by row width, and what an
arch can hold.

``threads`` share a row and ``rows`` rows are in a block at once, ``stages`` tiles of them are on their way through
shared memory (0: none, rows are read straight from global memory). The defaults keep about 40 KB or more of reads
outstanding on each SM.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

from ...integration.engines.arch import Arch
from ...integration.graph.ir import ITEMSIZE

WARP = 32
WIDEST = 32768
_FILE = 65536  # registers of an SM
_THREADS = (*(1 << i for i in range(5)), *range(32, 1025, 32))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What a kernel reads and sums: rows of ``width`` in vectors of ``step`` elements of ``dtype``, from ``tensors``
    tensors; the weight's dtype or None; ``sums`` gradients of vectors. ``layer``: of a layer_norm."""

    width: int
    step: int
    dtype: str
    weight: str | None
    tensors: int
    sums: int = 0
    layer: bool = False

    @property
    def vectors(self) -> int:
        return self.width // self.step

    @property
    def async_copies(self) -> bool:
        """Whether cp.async moves the vectors: 4 bytes or more."""
        return self.step * ITEMSIZE[self.dtype] >= 4

    def chunks(self, threads: int) -> int:
        """Vectors of a row that each of ``threads`` threads has."""
        return -(-self.vectors // threads)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ForwardKnobs:
    """``blocks``: resident blocks on an SM where ``stages`` > 0. ``hold_weight``: weight and bias are read before the
    row's statistics and, with stages, stay in registers. ``streaming``: L2 may drop what is written first."""

    threads: int
    rows: int = 1
    stages: int = 0
    blocks: int = 1
    hold_weight: bool = False
    streaming: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BackwardKnobs:
    """``blocks``: resident blocks on an SM. ``hold``: x and dy stay in registers between the two times that they are
    needed, ``hold_weight``: the weight does from row to row, ``shared_sums``: the first gradient's sums do not, but lie
    in shared memory. ``overlap``: the sum over blocks starts while the first kernel ends (sm_90 or newer)."""

    threads: int
    rows: int = 1
    stages: int = 0
    blocks: int = 1
    hold: bool = False
    hold_weight: bool = False
    shared_sums: bool = False
    streaming: bool = False
    overlap: bool = False


Knobs = ForwardKnobs | BackwardKnobs


def quantize_knobs(rows: Rows, held: int) -> ForwardKnobs:
    """As forward, but that a row has threads for 128 values or more: the lanes of a block of scales are of one row.
    Weight and bias, of ``held`` bytes an element of a row, are read ahead where they take 16 registers at most (H200,
    16384x4096 bfloat16 without a residual: 5 % faster)."""
    made = forward_knobs(rows)
    threads = max(made.threads, 128 // rows.step)
    hold = 0 < held * rows.step * rows.chunks(threads) <= 64 and threads <= 512
    return ForwardKnobs(threads=threads, rows=_rows_at_once(threads), hold_weight=hold)


def _threads(vectors: int, chunks: int) -> int:
    """Threads of a row so that each has at most about ``chunks`` vectors: a power of two below a warp, whole warps
    above."""
    if vectors <= 32:
        return 1 << (vectors - 1).bit_length()
    return min(1024, 32 * math.ceil(vectors / (32 * chunks)))


def forward_knobs(rows: Rows) -> ForwardKnobs:
    """One block for each tile: about four vectors of 16 bytes a thread, so that registers leave room for 32 warps or more."""
    threads = _threads(rows.vectors, 4)
    return ForwardKnobs(threads=threads, rows=_rows_at_once(threads))


def _rows_at_once(threads: int) -> int:
    """Rows of a block of about 128 threads. Rows of several warps wait at barriers that are numbered at run time, so
    that a block holds all 16, and an SM has them for four blocks: such a row has its block alone."""
    return max(1, 128 // threads) if threads <= WARP else 1


def backward_knobs(rows: Rows, arch: Arch) -> BackwardKnobs:
    """One block on each SM with as many rows at once as its registers hold, and with three stages of them where shared
    memory does. Where it cannot hold a tile, or vectors are too short for asynchronous copies, rows are read twice."""
    overlap, best = arch.capability >= (9, 0), None
    for elements, hold in itertools.product((16, 8, 32), (True, False)):  # of a row a thread
        threads = _threads(rows.vectors, max(1, elements // rows.step))
        hold_weight = rows.chunks(threads) * rows.step <= 16
        each = max(1, WARP // threads)
        count = _registers(rows, threads, hold, hold_weight)
        most = min(max(1, 896 // threads), 15 if threads > WARP else 896)
        tile = next((n for n in range(most, 0, -1) if _most_registers(n * threads) >= count), 0) // each * each
        if tile == 3:  # H200, 16384x4096 bfloat16: 109 us, and 99 with two rows
            tile = 2
        made = BackwardKnobs(threads=threads, rows=max(each, tile), hold=hold, hold_weight=hold_weight, overlap=overlap)
        for stages in (3, 2) if tile and rows.async_copies else ():
            staged = dataclasses.replace(made, stages=stages)
            if shared_bytes(staged, rows) <= limit_bytes(arch):
                if threads * tile >= 512:
                    return staged
                best = best or staged
    if best is not None:
        return best
    threads = _threads(rows.vectors, max(1, (16 if rows.width <= 12288 else 32) // rows.step))
    tile = max(1, 256 // threads) if threads <= WARP else 1
    made = BackwardKnobs(threads=threads, rows=tile, blocks=max(1, 768 // (threads * tile)), overlap=overlap)
    wide = dataclasses.replace(made, shared_sums=threads > 768 and rows.sums > 0)  # 64 registers a thread
    return wide if shared_bytes(wide, rows) <= limit_bytes(arch) else made


def _most_registers(threads: int) -> int:
    """Registers that a thread of such a block can have: an SM has four parts, each with a quarter of the registers and of
    the warps, and gives them out to warps by eights a thread."""
    return min(255, _FILE // 4 // WARP // math.ceil(threads / WARP / 4) // 8 * 8)


def _registers(rows: Rows, threads: int, hold: bool, hold_weight: bool) -> int:
    """About how many a thread of a backward takes: sums, weight, the row where it is held, 48 to 88 for the rest."""
    mine = rows.chunks(threads) * rows.step
    held = hold * 2 * ITEMSIZE[rows.dtype] + hold_weight * (ITEMSIZE[rows.weight] if rows.weight else 0)
    everything = hold and mine > 8 and rows.layer and rows.tensors > 2 and rows.sums > 1  # 128 registers spill a few bytes
    rest = 48 + 8 * (rows.layer + (rows.tensors > 2)) + 16 * everything + 24 * (mine > 16)
    return 8 * math.ceil((rest + mine * rows.sums + mine * held // 4) / 8)


def shared_bytes(knobs: Knobs, rows: Rows) -> int:
    """Shared memory of a block: stages, sums of warps, and in a backward the sums of its rows."""
    padded = rows.chunks(knobs.threads) * rows.step * knobs.threads
    stages = knobs.stages * rows.tensors * knobs.rows * padded * ITEMSIZE[rows.dtype]
    warps = max(1, knobs.threads // WARP)
    scratch = 0 if warps == 1 else 2 * knobs.rows * 2 * warps * 4
    sums = 4 * (knobs.rows - 1 + knobs.shared_sums) * padded if isinstance(knobs, BackwardKnobs) else 0
    return stages + scratch + sums + 1024  # alignment


def limit_bytes(arch: Arch) -> int:
    """Shared memory that one block may have."""
    return arch.smem_kib * 1024


def knob_reason(knobs: Knobs, rows: Rows, arch: Arch) -> str | None:
    """Why a kernel cannot run with these knobs, None where it can."""
    block = knobs.threads * knobs.rows
    if knobs.threads not in _THREADS or knobs.rows < 1 or block > 1024 or block % WARP:
        return (
            f"threads = {knobs.threads}, rows = {knobs.rows}: a power of two below 32 or whole warps a row, "
            "whole warps and at most 1024 threads a block"
        )
    if knobs.threads > WARP and knobs.rows > 15:
        return f"rows = {knobs.rows}: rows of several warps take a barrier each, and a block has 15"
    if knobs.stages == 1 or knobs.stages < 0:
        return f"stages = {knobs.stages}: 0, or 2 and more"
    if knobs.stages and not rows.async_copies:
        return (
            f"stages = {knobs.stages}: asynchronous copies move 4 bytes or more, and rows of {rows.width} {rows.dtype} "
            "values have shorter vectors"
        )
    if rows.chunks(knobs.threads) > 32:
        return f"threads = {knobs.threads}: more than 32 vectors of a row of {rows.width} a thread"
    if knobs.blocks < 1:
        return f"blocks = {knobs.blocks}: 1 or more"
    if getattr(knobs, "shared_sums", False) and knobs.rows > 1:
        return f"shared_sums = True, rows = {knobs.rows}: one row at once"
    if getattr(knobs, "overlap", False) and arch.capability < (9, 0):
        return "overlap = True: grids overlap from sm_90 on"
    need, have = shared_bytes(knobs, rows), limit_bytes(arch)
    return (
        None
        if need <= have
        else f"stages = {knobs.stages}: {need} bytes of shared memory, {arch.name} has {have} a block"
    )
