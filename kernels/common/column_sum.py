"""Device code: [sums, blocks, width] float32 summed over the blocks, in an order that is the same in every run. It is
the second pass of gradients of weights: each block of the first leaves one row of partial sums."""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from . import device as d
from .row_tiles import read_if, write_if

_ROWS, _COLUMNS = 32, 8  # threads of a block: rows of the partial sums at once, vectors of a row
_AHEAD = 4  # rows that a thread loads before it adds them


def fake_partials(sums: int, blocks, width: int):
    """[sums, blocks, width] float32, contiguous; ``blocks`` a ``cute.sym_int()``."""
    step = math.gcd(width, 4)
    stride = (cute.sym_int64(divisibility=step), width, 1)
    return cute.runtime.make_fake_tensor(Float32, (sums, blocks, width), stride=stride, assumed_align=4 * step)


class ColumnSum:
    """Launches from a host function (``@cute.jit``) behind the kernel that writes the partial sums. ``overlap``: the
    grid starts while that kernel ends, and waits for it on the device (sm_90 or newer)."""

    def __init__(self, width: int, overlap: bool) -> None:
        self.step = math.gcd(width, 4)
        self.vectors = width // self.step
        self.overlap = overlap

    def __call__(self, partials, outputs, stream) -> None:
        """``partials`` [sums, blocks, width]; ``outputs``: one [width] for each sum, in any float dtype of at least 16
        bits."""
        grid = [-(-self.vectors // _COLUMNS), len(outputs), 1]
        self.kernel(partials, outputs).launch(
            grid=grid, block=[_ROWS * _COLUMNS, 1, 1], stream=stream, use_pdl=self.overlap
        )

    @cute.kernel
    def kernel(self, partials: cute.Tensor, outputs):
        index = cute.arch.thread_idx()[0]
        column, first = index % _COLUMNS, index // _COLUMNS
        vector, which = cute.arch.block_idx()[0] * _COLUMNS + column, cute.arch.block_idx()[1]
        inside = vector < self.vectors
        storage = d.SmemAllocator()
        layout = cute.make_ordered_layout((_ROWS * _COLUMNS // d.WARP, _COLUMNS * self.step), order=(1, 0))
        scratch = storage.allocate_tensor(Float32, layout, byte_alignment=16)
        if const_expr(self.overlap):
            cute.arch.griddepcontrol_wait()
        blocks = partials.shape[1]
        total = d.fragment(Float32, self.step)
        total.fill(0.0)
        for start in cutlass.range(first, blocks, _ROWS * _AHEAD):
            parts = []
            for k in cutlass.range_constexpr(_AHEAD):
                part = d.fragment(Float32, self.step)
                part.fill(0.0)
                block = start + Int32(k * _ROWS)
                read_if(inside & (block < blocks), partials[which, block, None], vector, part)
                parts.append(part)
            for part in parts:
                total.store(total.load() + part.load())
        self.over_rows(total, scratch, index, column)
        if index < _COLUMNS:
            for s in cutlass.range_constexpr(len(outputs)):
                values = d.rounded([total[i] for i in range(self.step)], outputs[s].element_type)
                write_if(inside & (which == s), outputs[s], vector, values, False)

    @cute.jit
    def over_rows(self, total, scratch, index, column):
        """The sums of all rows' threads, to the first ``_COLUMNS`` threads: within a warp by shuffles, then over the
        warps."""
        for offset in (8, 16):  # _COLUMNS and its multiples below a warp
            for i in cutlass.range_constexpr(self.step):
                total[i] = d.add(total[i], cute.arch.shuffle_sync_bfly(total[i], offset=offset))
        if index % d.WARP < _COLUMNS:
            d.write_shared(scratch[index // d.WARP, None], column, total)
        cute.arch.sync_threads()
        if index < _COLUMNS:
            total.fill(0.0)
            for w in cutlass.range_constexpr(_ROWS * _COLUMNS // d.WARP):
                part = d.fragment(Float32, self.step)
                d.read_shared(scratch[w, None], column, part)
                total.store(total.load() + part.load())
