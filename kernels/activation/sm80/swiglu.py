"""Device code: swiglu and its gradient, as ``integration/graph/ops/activation.py`` defines them: float32 inside, one
rounding.

A thread takes vectors of 16 bytes of gate and of up, a block a piece of a row; only the gradient of row weights, which
is a sum over a row, gives a row to each block."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.arch.nvvm_wrappers import inline_ptx
from cutlass.memory import SmemAllocator

from ...common import device as d
from ...common import words as w
from ...common.quantize_tile import THREADS, QuantizeTile
from ...common.row_pieces import RowPieces

# ---- the maths, on numbers -------------------------------------------------------------------------------------------


def _unary(code: str, x):
    return inline_ptx(code, write_only_types=[Float32], read_only_args=[x])


def sigmoid(x):
    """1 / (1 + exp(-x)) with a relative error of about 2^-21; 0 where it is less than 2^-126."""
    power = _unary("ex2.approx.ftz.f32 {$w0}, {$r0};", d.mul(x, -1.4426950408889634))
    return _unary("rcp.approx.ftz.f32 {$w0}, {$r0};", d.add(power, 1.0))


def _clamped(gate, up, clamp: float | None):
    if clamp is None:
        return gate, up
    return d.smallest(gate, clamp), d.largest(d.smallest(up, clamp), -clamp)


def forward_value(gate, up, clamp: float | None, weight):
    """silu(gate) * up, times ``weight`` where that is not None."""
    gate, up = _clamped(gate, up, clamp)
    y = d.mul(d.mul(gate, sigmoid(gate)), up)
    return y if weight is None else d.mul(y, weight)


def gradients(dy, gate, up, clamp: float | None, weight):
    """(d gate, d up, d weight of this element; None where there is none)."""
    closed = None if clamp is None else (gate <= Float32(clamp), (up >= Float32(-clamp)) & (up <= Float32(clamp)))
    gate, up = _clamped(gate, up, clamp)
    s = sigmoid(gate)
    value = d.mul(gate, s)
    slope = d.mul(s, d.fma(gate, d.add(1.0, d.mul(s, -1.0)), 1.0))
    dweight = None if weight is None else d.mul(dy, d.mul(value, up))
    dy = dy if weight is None else d.mul(dy, weight)
    dgate, dup = d.mul(d.mul(dy, up), slope), d.mul(dy, value)
    if closed is not None:
        dgate, dup = (d.select(ok, v, Float32(0.0)) for ok, v in zip(closed, (dgate, dup), strict=True))
    return dgate, dup, dweight


# ---- rows and vectors ------------------------------------------------------------------------------------------------


class _Rows(RowPieces):
    """Rows of ``width`` values of ``dtype`` in vectors of 16 bytes, ``vectors`` for each thread at most. Without
    ``whole`` the width does not divide into them, or places are no multiples of 16 bytes: then values are read and
    written one by one, and the last vector of a row is partial."""

    def __init__(self, dtype: str, width: int, whole: bool, threads: int = THREADS, vectors: int = 1) -> None:
        self.packed, self.width, self.whole = w.Packed(dtype), width, whole
        self.itemsize = self.packed.itemsize
        self.step = 16 // self.itemsize
        super().__init__(-(-width // self.step), threads, vectors)

    def ok(self, there, vector):
        """Of a vector that is ``there``, which values exist, as ``Packed.read`` takes it."""
        return there if self.whole else [there & (vector * self.step + k < self.width) for k in range(self.step)]

    def mine(self, first, there) -> list:
        """(bytes behind the thread's first vector, which values exist) of each of its vectors."""
        return [(step * 16, self.ok(here, first + step)) for step, here in self.steps(first, there)]


def _weight(kind: w.Packed | None, base, row, there):
    """The float32 weight of a row; None without weights."""
    if kind is None:
        return None
    return kind.floats([w.read_piece(base + row * kind.itemsize, kind.itemsize, there)])[0]


def _arguments(dtype: str, width: int, whole: bool, weight: str | None):
    step = 16 // w.Packed(dtype).itemsize if whole else 1
    rows = cute.sym_int()
    return lambda times: d.fake_rows(dtype, rows, times * width, step), d.fake_vector(weight, rows)


# ---- forward ---------------------------------------------------------------------------------------------------------


def forward(arch: str, *, dtype: str, width: int, whole: bool, clamp: float | None, weight: str | None, threads: int,
            vectors: int, streaming: bool):  # fmt: skip
    """A function (x [rows, 2 * width] with any row stride, row_weight [rows] of dtype ``weight`` or None, address of
    y). ``threads`` of a block at most; ``vectors`` of a thread are in flight at once; ``streaming``: L2 may drop what
    is written first."""
    r, kind = _Rows(dtype, width, whole, threads, vectors), None if weight is None else w.Packed(weight)
    half = width * r.itemsize

    @cute.kernel
    def kernel(mX: cute.Tensor, mWeight: cute.Tensor | None, y: Int64):
        row, first, there = r.place(cute.arch.block_idx()[0], mX.shape[0])
        x = w.address(mX) + row * (Int64(mX.stride[0]) * r.itemsize) + first * 16
        out, own = y + row * half + first * 16, r.mine(first, there)
        raw = [[r.packed.read(x + at + part, r.step, ok) for part in (0, half)] for at, ok in own]
        factor = _weight(kind, None if kind is None else w.address(mWeight), row, there)
        for (at, ok), words in zip(own, raw, strict=True):
            pairs = zip(*(r.packed.floats(part) for part in words), strict=True)
            values = [forward_value(gate, up, clamp, factor) for gate, up in pairs]
            r.packed.write(out + at, r.packed.words(values), ok, streaming=streaming)

    @cute.jit
    def launch(mX: cute.Tensor, mWeight: cute.Tensor | None, y: Int64, stream):
        kernel(mX, mWeight, y).launch(grid=[r.blocks(mX.shape[0]), 1, 1], block=[r.threads, 1, 1], stream=stream)

    rows_of, weights = _arguments(dtype, width, whole, weight)
    return cute.compile(launch, rows_of(2), weights, Int64(0), d.fake_stream(), options=d.OPTIONS)


# ---- backward --------------------------------------------------------------------------------------------------------


def _backward_vectors(r: _Rows, x, dy, dx, own: list, clamp, factor, *, write: bool = True,
                      streaming: bool = False):  # fmt: skip
    """Vectors of a row: reads gate, up and dy behind the addresses x and dy, writes d gate and d up behind dx, returns
    the sum of the elements' d weight (0 without weights). ``own`` as ``_Rows.mine`` gives it."""
    half, total = r.width * r.itemsize, Float32(0.0)
    raw = [[r.packed.read(base, r.step, ok) for base in (dy + at, x + at, x + at + half)] for at, ok in own]
    for (at, ok), words in zip(own, raw, strict=True):
        values = zip(*(r.packed.floats(part) for part in words), strict=True)
        found = [gradients(grad, gate, up, clamp, factor) for grad, gate, up in values]
        if write:
            for part, k in ((0, 0), (half, 1)):
                r.packed.write(dx + at + part, r.packed.words([f[k] for f in found]), ok, streaming=streaming)
        if factor is not None:
            for f in found:
                total = d.add(total, f[2])
    return total


def backward(arch: str, *, dtype: str, width: int, whole: bool, clamp: float | None, weight: str | None, threads: int,
             vectors: int, streaming: bool):  # fmt: skip
    """A function (dy [rows, width], x [rows, 2 * width], both with any row stride, row_weight [rows] or None, address
    of dx); other constants as ``forward`` has them."""
    r, kind = _Rows(dtype, width, whole, threads, vectors), None if weight is None else w.Packed(weight)

    @cute.kernel
    def kernel(mDy: cute.Tensor, mX: cute.Tensor, mWeight: cute.Tensor | None, dx: Int64):
        row, first, there = r.place(cute.arch.block_idx()[0], mX.shape[0])
        x, dy = (w.address(m) + row * (Int64(m.stride[0]) * r.itemsize) + first * 16 for m in (mX, mDy))
        factor = _weight(kind, None if kind is None else w.address(mWeight), row, there)
        own, out = r.mine(first, there), dx + row * (2 * width * r.itemsize) + first * 16
        _backward_vectors(r, x, dy, out, own, clamp, factor, streaming=streaming)

    @cute.jit
    def launch(mDy: cute.Tensor, mX: cute.Tensor, mWeight: cute.Tensor | None, dx: Int64, stream):
        kernel(mDy, mX, mWeight, dx).launch(
            grid=[r.blocks(mX.shape[0]), 1, 1], block=[r.threads, 1, 1], stream=stream
        )

    rows_of, weights = _arguments(dtype, width, whole, weight)
    return cute.compile(launch, rows_of(1), rows_of(2), weights, Int64(0), d.fake_stream(), options=d.OPTIONS)


def backward_with_weights(
    arch: str, *, dtype: str, width: int, whole: bool, clamp: float | None, weight: str, dx: bool
):
    """A function (dy, x, row_weight as ``backward`` has them, address of dx, which is looked at where ``dx``, and of
    drow_weight [rows], of row_weight's dtype). A block takes a row; its sum has one order in every run."""
    r, kind = _Rows(dtype, width, whole), w.Packed(weight)
    threads = min(THREADS, d.WARP * -(-r.vectors // d.WARP))
    groups = d.Groups(threads, 1)

    @cute.kernel
    def kernel(mDy: cute.Tensor, mX: cute.Tensor, mWeight: cute.Tensor, to_dx: Int64, to_weight: Int64):
        scratch = groups.scratch(SmemAllocator(), 1)
        row, thread = Int64(cute.arch.block_idx()[0]), cute.arch.thread_idx()[0]
        x = w.address(mX) + row * Int64(mX.stride[0]) * r.itemsize
        dy = w.address(mDy) + row * Int64(mDy.stride[0]) * r.itemsize
        at = to_dx + row * (2 * width * r.itemsize)
        factor = _weight(kind, w.address(mWeight), row, True)
        total = Float32(0.0)
        for c in range((r.vectors + (threads - 1)) // threads):
            vector = c * threads + thread
            own = [(vector * 16, r.ok(vector < r.vectors, vector))]
            total = d.add(total, _backward_vectors(r, x, dy, at, own, clamp, factor, write=dx))
        (total,) = groups.sum((total,), scratch, Int32(0), 0)
        number = kind.words([total] * kind.per_word)[0]
        w.write_piece(to_weight + row * kind.itemsize, number, kind.itemsize, thread == 0)

    @cute.jit
    def launch(mDy: cute.Tensor, mX: cute.Tensor, mWeight: cute.Tensor, to_dx: Int64, to_weight: Int64, stream):
        kernel(mDy, mX, mWeight, to_dx, to_weight).launch(
            grid=[mX.shape[0], 1, 1], block=[threads, 1, 1], stream=stream
        )

    rows_of, weights = _arguments(dtype, width, whole, weight)
    return cute.compile(launch, rows_of(1), rows_of(2), weights, Int64(0), Int64(0), d.fake_stream(), options=d.OPTIONS)


# ---- forward with quantised outputs ----------------------------------------------------------------------------------


def forward_quantize(arch: str, *, source: str, clamp: float | None, weight: str | None, **constants):
    """A function (x [rows, 2 * width] of ``source`` with any row stride, row_weight [rows] or None, addresses of scale,
    data, scale_inv, data_t, scale_inv_t, amax, workspace): quantize of y, which is rounded to ``source`` first. The
    other constants are those of ``QuantizeTile``."""
    packed, weights = w.Packed(source), None if weight is None else w.Packed(weight)
    tile = QuantizeTile(packed, arch=arch, batch=4, **constants)  # of 16-bit gate and up 4 rows take 32 registers
    half = tile.width * packed.itemsize

    def value(gate, up, factor):
        pairs = zip(packed.floats(gate), packed.floats(up), strict=True)
        return packed.words([forward_value(g, u, clamp, factor) for g, u in pairs])

    def load_from(begin, stride, factors):
        def load(row, column, oks):
            at = begin + Int64(row) * stride + column * packed.itemsize
            read = [(packed.read(at + i * stride, 8, ok), packed.read(at + i * stride + half, 8, ok),
                     _weight(weights, factors, Int64(row + i), ok if tile.vector else ok[0]))
                    for i, ok in enumerate(oks)]  # fmt: skip
            return [value(*parts) for parts in read]

        return load

    @cute.kernel
    def kernel(mX: cute.Tensor, mWeight: cute.Tensor | None, scale: Int64, data: Int64, scale_inv: Int64, data_t: Int64,
               scale_inv_t: Int64, amax: Int64):  # fmt: skip
        load = load_from(
            w.address(mX), Int64(mX.stride[0]) * packed.itemsize, None if weights is None else w.address(mWeight)
        )
        tile.run(load, mX.shape[0], data, scale_inv, data_t, scale_inv_t, scale, amax)

    @cute.jit
    def launch(mX: cute.Tensor, mWeight: cute.Tensor | None, scale: Int64, data: Int64, scale_inv: Int64, data_t: Int64,
               scale_inv_t: Int64, amax: Int64, workspace: Int64, stream):  # fmt: skip
        rows, (own, own_t) = mX.shape[0], tile.scales(scale_inv, scale_inv_t, workspace)
        kernel(mX, mWeight, scale, data, own, data_t, own_t, amax).launch(**tile.launch(rows, stream))
        tile.move_scales(rows, scale_inv, scale_inv_t, workspace, stream)

    rows_of, row_weights = _arguments(source, tile.width, tile.vector, weight)
    return cute.compile(launch, rows_of(2), row_weights, *[Int64(0)] * 7, d.fake_stream(), options=d.OPTIONS)
