"""Device code: swiglu and its gradient, as ``integration/graph/ops/activation.py`` defines them: float32 inside, one
rounding.

A thread takes vectors of 16 bytes of gate and of up, several at once for bytes in flight. Vectors are counted through
the whole matrix, so that no thread is idle at the end of a row; only the gradient of row weights, which is a sum over a
row, gives a row to each block."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.arch.nvvm_wrappers import inline_ptx
from cutlass.memory import SmemAllocator

from ...common import device as d
from ...common import words as w
from ...common.quantize_tile import THREADS, QuantizeTile

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
        dgate, dup = (cutlass.select_(ok, v, Float32(0.0)) for ok, v in zip(closed, (dgate, dup), strict=True))
    return dgate, dup, dweight


# ---- rows and vectors ------------------------------------------------------------------------------------------------


class _Rows:
    """Rows of ``width`` values of ``dtype`` in vectors of 16 bytes. Without ``whole`` the width does not divide into
    them, or places are no multiples of 16 bytes: then values are read and written one by one, and the last vector of a
    row is partial."""

    def __init__(self, dtype: str, width: int, whole: bool) -> None:
        self.packed, self.width, self.whole = w.Packed(dtype), width, whole
        self.itemsize = self.packed.itemsize
        self.step = 16 // self.itemsize
        self.vectors = -(-width // self.step)

    def ok(self, there, vector):
        """Of a vector that is ``there``, which values exist, as ``Packed.read`` takes it."""
        return there if self.whole else [there & (vector * self.step + k < self.width) for k in range(self.step)]

    def first(self, count: int):
        """(first row, vectors into it) of this block, where each takes ``count`` vectors."""
        place = Int64(cute.arch.block_idx()[0]) * count
        row = place // self.vectors
        return row, Int32(place - row * self.vectors) + cute.arch.thread_idx()[0]

    def blocks(self, rows, count: int):
        return (Int64(rows) * self.vectors + (count - 1)) // count


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


def forward(arch: str, *, dtype: str, width: int, whole: bool, clamp: float | None, weight: str | None, vectors: int):
    """A function (x [rows, 2 * width] with any row stride, row_weight [rows] of dtype ``weight`` or None, address of
    y). ``vectors`` of a thread are in flight at once."""
    r, kind = _Rows(dtype, width, whole), None if weight is None else w.Packed(weight)
    count = THREADS * vectors

    @cute.kernel
    def kernel(mX: cute.Tensor, mWeight: cute.Tensor | None, y: Int64):
        row0, place = r.first(count)
        stride, weights = Int64(mX.stride[0]) * r.itemsize, None if kind is None else w.address(mWeight)
        own = []
        for u in cutlass.range_constexpr(vectors):
            k = place + u * THREADS
            row, vector = row0 + k // r.vectors, k % r.vectors
            there = row < Int64(mX.shape[0])
            ok, at = r.ok(there, vector), w.address(mX) + row * stride + vector * 16
            gate, up = r.packed.read(at, r.step, ok), r.packed.read(at + width * r.itemsize, r.step, ok)
            own.append((row, vector, ok, gate, up, _weight(kind, weights, row, there)))
        for row, vector, ok, gate, up, factor in own:
            pairs = zip(r.packed.floats(gate), r.packed.floats(up), strict=True)
            values = [forward_value(g, u, clamp, factor) for g, u in pairs]
            r.packed.write(y + row * (width * r.itemsize) + vector * 16, r.packed.words(values), ok)

    @cute.jit
    def launch(mX: cute.Tensor, mWeight: cute.Tensor | None, y: Int64, stream):
        kernel(mX, mWeight, y).launch(grid=[r.blocks(mX.shape[0], count), 1, 1], block=[THREADS, 1, 1], stream=stream)

    rows_of, weights = _arguments(dtype, width, whole, weight)
    return cute.compile(launch, rows_of(2), weights, Int64(0), d.fake_stream(), options=d.OPTIONS)


# ---- backward --------------------------------------------------------------------------------------------------------


def _backward_vector(r: _Rows, x, dy, dx, vector, there, clamp, factor, write: bool):
    """One vector of a row: reads gate, up and dy at the addresses of their rows, writes d gate and d up, returns the
    sum of the elements' d weight (0 without weights)."""
    ok, half = r.ok(there, vector), r.width * r.itemsize
    gate, up, grad = (r.packed.floats(r.packed.read(at + vector * 16, r.step, ok)) for at in (x, x + half, dy))
    found = [gradients(g, a, b, clamp, factor) for g, a, b in zip(grad, gate, up, strict=True)]
    if write:
        for at, k in ((dx, 0), (dx + half, 1)):
            r.packed.write(at + vector * 16, r.packed.words([f[k] for f in found]), ok)
    total = Float32(0.0)
    if factor is not None:
        for f in found:
            total = d.add(total, f[2])
    return total


def backward(arch: str, *, dtype: str, width: int, whole: bool, clamp: float | None, weight: str | None, vectors: int):
    """A function (dy [rows, width], x [rows, 2 * width], both with any row stride, row_weight [rows] or None, address
    of dx)."""
    r, kind = _Rows(dtype, width, whole), None if weight is None else w.Packed(weight)
    count = THREADS * vectors

    @cute.kernel
    def kernel(mDy: cute.Tensor, mX: cute.Tensor, mWeight: cute.Tensor | None, dx: Int64):
        row0, place = r.first(count)
        x_stride, dy_stride = (Int64(m.stride[0]) * r.itemsize for m in (mX, mDy))
        weights = None if kind is None else w.address(mWeight)
        for u in cutlass.range_constexpr(vectors):
            k = place + u * THREADS
            row, vector = row0 + k // r.vectors, k % r.vectors
            there = row < Int64(mX.shape[0])
            _backward_vector(
                r,
                w.address(mX) + row * x_stride,
                w.address(mDy) + row * dy_stride,
                dx + row * (2 * width * r.itemsize),
                vector,
                there,
                clamp,
                _weight(kind, weights, row, there),
                True,
            )

    @cute.jit
    def launch(mDy: cute.Tensor, mX: cute.Tensor, mWeight: cute.Tensor | None, dx: Int64, stream):
        kernel(mDy, mX, mWeight, dx).launch(
            grid=[r.blocks(mX.shape[0], count), 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    rows_of, weights = _arguments(dtype, width, whole, weight)
    return cute.compile(launch, rows_of(1), rows_of(2), weights, Int64(0), d.fake_stream(), options=d.OPTIONS)


def backward_with_weights(
    arch: str, *, dtype: str, width: int, whole: bool, clamp: float | None, weight: str, dx: bool
):
    """A function (dy, x, row_weight as ``backward`` has them, address of dx, which is looked at where ``dx``, and of
    drow_weight [rows], of row_weight's dtype). A block takes a row; its sum has one order in every run."""
    r, kind = _Rows(dtype, width, whole), w.Packed(weight)
    groups = d.Groups(THREADS, 1)

    @cute.kernel
    def kernel(mDy: cute.Tensor, mX: cute.Tensor, mWeight: cute.Tensor, to_dx: Int64, to_weight: Int64):
        scratch = groups.scratch(SmemAllocator(), 1)
        row, thread = Int64(cute.arch.block_idx()[0]), cute.arch.thread_idx()[0]
        x = w.address(mX) + row * Int64(mX.stride[0]) * r.itemsize
        dy = w.address(mDy) + row * Int64(mDy.stride[0]) * r.itemsize
        at = to_dx + row * (2 * width * r.itemsize)
        factor = _weight(kind, w.address(mWeight), row, True)
        total = Float32(0.0)
        for c in range((r.vectors + (THREADS - 1)) // THREADS):
            vector = c * THREADS + thread
            part = _backward_vector(r, x, dy, at, vector, vector < r.vectors, clamp, factor, dx)
            total = d.add(total, part)
        (total,) = groups.sum((total,), scratch, Int32(0), 0)
        number = kind.words([total] * kind.per_word)[0]
        w.write_piece(to_weight + row * kind.itemsize, number, kind.itemsize, thread == 0)

    @cute.jit
    def launch(mDy: cute.Tensor, mX: cute.Tensor, mWeight: cute.Tensor, to_dx: Int64, to_weight: Int64, stream):
        kernel(mDy, mX, mWeight, to_dx, to_weight).launch(
            grid=[mX.shape[0], 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    rows_of, weights = _arguments(dtype, width, whole, weight)
    return cute.compile(launch, rows_of(1), rows_of(2), weights, Int64(0), Int64(0), d.fake_stream(), options=d.OPTIONS)


# ---- forward with quantised outputs ----------------------------------------------------------------------------------


def forward_quantize(
    arch: str,
    *,
    source: str,
    width: int,
    vector: bool,
    kind: str,
    dtype: str,
    power_of_two: bool,
    swizzled: bool,
    transposed: bool,
    amax: bool,
    clamp: float | None,
    weight: str | None,
    batch: int,
    lanes: int = 4,
    down: bool = False,
):
    """A function (x [rows, 2 * width] of ``source`` with any row stride, row_weight [rows] or None, addresses of scale,
    data, scale_inv, data_t, scale_inv_t, amax): quantize of y, which is rounded to ``source`` first. The other
    constants are those of ``QuantizeTile``; ``batch``: rows of a thread that are read at once."""
    packed, weights = w.Packed(source), None if weight is None else w.Packed(weight)
    tile = QuantizeTile(packed, width, vector=vector, kind=kind, dtype=dtype, arch=arch, power_of_two=power_of_two,
                        swizzled=swizzled, transposed=transposed, amax=amax, lanes=lanes, down=down)  # fmt: skip

    def value(gate, up, factor):
        pairs = zip(packed.floats(gate), packed.floats(up), strict=True)
        return packed.words([forward_value(g, u, clamp, factor) for g, u in pairs])

    def load_from(begin, stride, factors):
        def load(row, column, oks):
            at, half, result = begin + Int64(row) * stride + column * packed.itemsize, width * packed.itemsize, []
            for start in range(0, len(oks), batch):
                read = [(packed.read(at + i * stride, 8, oks[i]), packed.read(at + i * stride + half, 8, oks[i]),
                         _weight(weights, factors, Int64(row + i), oks[i] if vector else oks[i][0]))
                        for i in range(start, start + batch)]  # fmt: skip
                result += [value(*parts) for parts in read]
            return result

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
               scale_inv_t: Int64, amax: Int64, stream):  # fmt: skip
        kernel(mX, mWeight, scale, data, scale_inv, data_t, scale_inv_t, amax).launch(
            grid=[tile.blocks(mX.shape[0]), 1, 1], block=[THREADS, 1, 1], stream=stream)  # fmt: skip

    rows_of, row_weights = _arguments(source, width, vector, weight)
    return cute.compile(launch, rows_of(2), row_weights, *[Int64(0)] * 6, d.fake_stream(), options=d.OPTIONS)
