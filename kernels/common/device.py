"""What the device code of several families shares: element types, fake tensors to compile from, vector copies, sums
over the threads of a row, and arithmetic with one rounding each.

Imports the compiler, so host code never imports this file. Everything here is traced into the caller's kernel. A plain
function holds no ``if`` on a value of the device; those that need one are ``@cute.jit``.

A *row* is a one-dimensional view of global or shared memory with stride 1, a *step* the elements of one vector, a
*fragment* a register tensor [step] in the row's own dtype. Kernels keep fragments (16-bit values stay packed) and make
floats of them where they compute. nvvm contracts ``a * b + c`` wherever it meets it: a product that must be rounded
first is ``mul(a, b)``.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import CopyG2ROp, CopyR2GOp, StoreCacheMode, cpasync
from cutlass.cutlass_dsl import T
from cutlass.memory import SmemAllocator

OPTIONS = "--enable-tvm-ffi"  # of every cute.compile here
WARP = 32
TYPES = {
    "float32": cutlass.Float32,
    "bfloat16": cutlass.BFloat16,
    "float16": cutlass.Float16,
    "float8_e4m3fn": cutlass.Float8E4M3FN,
    "float8_e5m2": cutlass.Float8E5M2,
    "uint8": cutlass.Uint8,
    "int32": cutlass.Int32,
    "int64": cutlass.Int64,
}


def has(arch: str, least: int) -> bool:
    """Whether ``arch`` ("sm_90", "sm_90a") is of capability ``least`` (90) or newer."""
    return int(arch.removeprefix("sm_").rstrip("af")) >= least


# ---- arguments to compile from --------------------------------------------------------------------------------------


def fake_rows(dtype: str | None, rows, width: int, step: int):
    """[rows, width] of ``dtype`` with stride 1 in a row and any row stride that is a multiple of ``step`` elements, at
    an address that is a multiple of ``step`` elements (16 bytes at most are asked for). ``rows`` is a
    ``cute.sym_int()`` that tensors of one length share. None where ``dtype`` is None: an absent tensor."""
    if dtype is None:
        return None
    kind = TYPES[dtype]
    stride = (cute.sym_int64(divisibility=step), 1)
    return cute.runtime.make_fake_tensor(
        kind, (rows, width), stride=stride, assumed_align=min(16, step * kind.width // 8)
    )


def fake_vector(dtype: str | None, size, step: int = 1):
    """[size] of ``dtype`` with stride 1, at an address that is a multiple of ``step`` elements (16 bytes at most are
    asked for)."""
    if dtype is None:
        return None
    kind = TYPES[dtype]
    return cute.runtime.make_fake_tensor(kind, (size,), stride=(1,), assumed_align=min(16, step * kind.width // 8))


def fake_numbers(there: bool, rows):
    """[rows, 1] float32 with any row stride: a number of each row, as the graph has statistics. ``numbers`` makes it
    one-dimensional."""
    return fake_rows("float32", rows, 1, 1) if there else None


def numbers(column):
    """[rows, 1] as [rows]; None stays None."""
    return None if column is None else column[None, 0]


def fake_stream():
    """The caller's current stream, which tvm-ffi finds: the compiled function has no argument for it."""
    return cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)


# ---- vectors --------------------------------------------------------------------------------------------------------


def fragment(dtype, step: int):
    """A register tensor [step] of a numeric type. Its stride is 1 also for one element: a bare shape (1,) gets stride
    0, and as narrower values a word of stride 0 is one value in place of two or four."""
    return cute.make_rmem_tensor(cute.make_layout((step,), stride=(1,)), dtype)


def _bits(row, step: int) -> int:
    """Bits of one access: 16 bytes where the vector has as many."""
    return min(128, step * row.element_type.width)


def read(row, index, into) -> None:
    """Vector ``index`` of a row in global memory into a fragment. By way of L1 also what is read once: past it
    (``L1::no_allocate``) loads are 3 to 5 % slower (H200)."""
    step = cute.size(into)
    atom = cute.make_copy_atom(CopyG2ROp(), row.element_type, num_bits_per_copy=_bits(row, step))
    cute.copy(atom, cute.local_tile(row, (step,), (index,)), into)


def write(row, index, values, *, streaming: bool = False) -> None:
    """A fragment to vector ``index`` of a row in global memory. ``streaming``: nothing reads it soon, L2 may drop it
    first."""
    step = cute.size(values)
    mode = StoreCacheMode.STREAMING if streaming else StoreCacheMode.WRITE_BACK
    atom = cute.make_copy_atom(CopyR2GOp(), row.element_type, num_bits_per_copy=_bits(row, step), store_cache_mode=mode)
    cute.copy(atom, values, cute.local_tile(row, (step,), (index,)))


def read_shared(row, index, into) -> None:
    """Vector ``index`` of a row in shared memory into a fragment."""
    cute.autovec_copy(cute.local_tile(row, (cute.size(into),), (index,)), into)


def write_shared(row, index, values) -> None:
    """A fragment to vector ``index`` of a row in shared memory."""
    cute.autovec_copy(values, cute.local_tile(row, (cute.size(values),), (index,)))


def can_copy_async(dtype, step: int) -> bool:
    """Whether ``copy_async`` moves such vectors: cp.async has 4, 8 and 16 bytes."""
    return step * dtype.width >= 32


def copy_async(source, index, target, slot, step: int) -> None:
    """Vector ``index`` of a row in global memory to vector ``slot`` of a row in shared memory with cp.async, past L1
    where it has 16 bytes. The caller commits and waits."""
    bits = _bits(source, step)
    mode = cpasync.LoadCacheMode.GLOBAL if bits == 128 else cpasync.LoadCacheMode.ALWAYS
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(cache_mode=mode), source.element_type, num_bits_per_copy=bits)
    cute.copy(atom, cute.local_tile(source, (step,), (index,)), cute.local_tile(target, (step,), (slot,)))


def floats(values) -> list:
    """The values of a fragment as float32 numbers."""
    wide = values.load().to(Float32)
    return [wide[i] for i in range(cute.size(values))]


def rounded(values, dtype):
    """float32 numbers as a fragment of ``dtype``, each rounded to nearest even; 16-bit floats become infinite where too
    large."""
    wide = fragment(Float32, len(values))
    for i, v in enumerate(values):
        wide[i] = v
    if dtype is Float32:
        return wide
    narrow = fragment(dtype, len(values))
    narrow.store(wide.load().to(dtype))
    return narrow


# ---- arithmetic with one rounding each ------------------------------------------------------------------------------


def _ptx(code: str, *values):
    """One instruction on float32 registers: {0} is its result, {1} and on its operands."""
    code = code.format(*(f"${i}" for i in range(len(values) + 1))) + ";"
    given = [Float32(v).ir_value() for v in values]
    constraints = ",".join(["=f"] + ["f"] * len(given))
    made = llvm.inline_asm(
        T.f32(), given, code, constraints, has_side_effects=False, asm_dialect=llvm.AsmDialect.AD_ATT
    )
    return Float32(made)


def mul(a, b):
    """a * b in float32, rounded to nearest even and never contracted with a sum."""
    return _ptx("mul.rn.f32 {0}, {1}, {2}", a, b)


def add(a, b):
    """a + b in float32, rounded to nearest even and never contracted with a product."""
    return _ptx("add.rn.f32 {0}, {1}, {2}", a, b)


def div(a, b):
    """a / b in float32, correctly rounded, denormals kept."""
    return _ptx("div.rn.f32 {0}, {1}, {2}", a, b)


def fma(a, b, c):
    """a * b + c in float32 with one rounding."""
    return _ptx("fma.rn.f32 {0}, {1}, {2}, {3}", a, b, c)


def rsqrt(a):
    """1 / sqrt(a) in float32 with a relative error of at most 2^-22.9, denormals kept, infinite at 0."""
    return _ptx("rsqrt.approx.f32 {0}, {1}", a)


def reciprocal(a):
    """1 / a in float32 with a relative error of at most 2^-23, for normal numbers whose reciprocal is one."""
    return _ptx("rcp.approx.ftz.f32 {0}, {1}", a)


def select(ok, a, b):
    """``a`` where ``ok``, else ``b``, of their type. ``cutlass.select_`` forgets it: what it makes of Uint32 compares as
    a signed number."""
    kind = type(b) if isinstance(a, (int, float)) else type(a)
    return kind(cutlass.select_(ok, a, b))


def mean(total, count: int):
    """total / count in float32, correctly rounded for a result of 2^-126 or more and a count below 2^20.

    Without the slow path of a division, whose call costs registers: q + (total - q * count) / count. The remainder is
    exact, so before its rounding the result is within 2^-22 units in the last place of the quotient, which lies 1 / (2 *
    count) of one or more from every tie. Where the remainder is NaN, q is infinite or NaN itself."""
    inverse = Float32(1.0 / count)
    q = mul(total, inverse)
    if count & (count - 1) == 0:
        return q
    left = fma(q, -float(count), total)
    return select(left == left, fma(left, inverse, q), q)


def absolute(a):
    """|a| in float32; NaN stays NaN."""
    return _ptx("abs.f32 {0}, {1}", a)


def largest(a, b):
    """max(a, b) in float32, NaN where one is."""
    return _ptx("max.NaN.f32 {0}, {1}, {2}", a, b)


def smallest(a, b):
    """min(a, b) in float32, NaN where one is."""
    return _ptx("min.NaN.f32 {0}, {1}, {2}", a, b)


# ---- sums over the threads of a row ---------------------------------------------------------------------------------


class Groups:
    """How the threads of a block share rows: ``threads`` to a row, ``rows`` rows at once. ``threads`` is a power of two
    up to 32, or a multiple of 32: then rows of one block wait for their own threads alone."""

    def __init__(self, threads: int, rows: int) -> None:
        assert threads % WARP == 0 or (threads < WARP and WARP % threads == 0), threads
        assert threads <= WARP or rows == 1 or rows <= 15, "a row of several warps takes one of the block's 16 barriers"
        self.threads, self.rows = threads, rows
        self.block = threads * rows
        self.warps = max(1, threads // WARP)

    def scratch(self, storage: SmemAllocator, values: int, buffers: int = 2):
        """Shared memory for ``sum`` [buffers, rows, values, warps] in float32; None where a row has one warp."""
        if self.warps == 1:
            return None
        layout = cute.make_ordered_layout((buffers, self.rows, values, self.warps), order=(3, 2, 1, 0))
        return storage.allocate_tensor(Float32, layout, byte_alignment=16)

    def wait(self, group) -> None:
        """Barrier of the threads of one row."""
        if const_expr(self.rows == 1):
            cute.arch.sync_threads()
        else:
            cute.arch.barrier(barrier_id=group + 1, number_of_threads=self.threads)

    @cute.jit
    def over_warps(self, values, scratch, group: Int32, buffer, combine: cutlass.Constexpr):
        thread = cute.arch.thread_idx()[0] % self.threads
        if thread % WARP == 0:
            for i in cutlass.range_constexpr(len(values)):
                scratch[buffer, group, i, thread // WARP] = values[i]
        self.wait(group)
        result = []
        for i in cutlass.range_constexpr(len(values)):
            parts = fragment(Float32, self.warps)
            cute.autovec_copy(scratch[buffer, group, i, None], parts)
            total = parts[0]
            for j in cutlass.range_constexpr(1, self.warps):
                total = combine(total, parts[j])
            result.append(total)
        return tuple(result)

    def reduce(self, values, combine, scratch, group, buffer) -> tuple:
        """``combine`` (``add``, ``largest``) over the threads of each row, for each of a tuple of float32 numbers;
        every thread gets the results, in an order that is the same in every run. All threads of a block take part.
        ``group`` is the row that this thread works on, ``buffer`` 0 or 1 in turn: a buffer is free again when the next
        reduction has passed its barrier."""
        offset = min(self.threads, WARP) // 2
        while offset:
            values = tuple(combine(v, cute.arch.shuffle_sync_bfly(v, offset=offset)) for v in values)
            offset //= 2
        return values if self.warps == 1 else self.over_warps(values, scratch, group, buffer, combine)

    def sum(self, values, scratch, group, buffer) -> tuple:
        return self.reduce(values, add, scratch, group, buffer)
