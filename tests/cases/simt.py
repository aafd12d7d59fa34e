"""Device code run on a CPU, thread by thread: a stand-in for the part of the DSL that our kernels use.

``install()`` puts it where ``cutlass`` is imported from, for the rest of the process. The kernels' own Python then runs
on numbers: one thread of the host for each thread of a block, blocks one after the other, barriers and shuffles as
meeting points. It shows wrong indices, missing waits and wrong arithmetic without a GPU; it knows nothing of time, of
memory order or of the compiler.

It is strict where a GPU is silent: an access outside a tensor, a vector that is not aligned, and a row that does not
fit the tensor that a kernel was compiled from are errors; shared memory starts as NaN; what cp.async copies is there
after the wait and not before; shuffles and barriers that not all threads reach time out.
"""

from __future__ import annotations

import copy as copy_module
import math
import sys
import threading
import types

import numpy as np
import torch

from . import simt_ptx

WAIT_S = 120  # for threads that never come; the slowest of a block takes its time on a loaded machine
_here = threading.local()  # of a device thread: block, thread


class Kind:
    """A numeric type. Calling it converts a number."""

    def __init__(self, name: str, width: int, convert) -> None:
        self.name, self.width, self.convert = name, width, convert
        self.torch = getattr(torch, name)

    def __call__(self, value):
        return self.convert(value)

    def __deepcopy__(self, memo):
        return self  # compared by identity

    @property
    def is_float(self) -> bool:
        return self.torch.is_floating_point

    def round(self, values: np.ndarray) -> np.ndarray:
        """float32 values as this type has them, in float32; integers unchanged."""
        if not self.is_float:
            return values
        return torch.from_numpy(np.asarray(values, np.float32).copy()).to(self.torch).float().numpy()


def _float(value):
    with np.errstate(over="ignore"):
        return np.float32(value)


class Word(int):
    """Uint32: arithmetic modulo 2^32."""

    def __new__(cls, value):
        return super().__new__(cls, int(value) & 0xFFFFFFFF)


for _name in ("add", "sub", "mul", "and", "or", "xor", "lshift", "rshift", "floordiv", "mod"):
    for _side in ("", "r"):
        _of_int = getattr(int, f"__{_side}{_name}__")
        setattr(Word, f"__{_side}{_name}__", lambda a, b, f=_of_int: Word(f(int(a), int(b))))


def _signed(value):
    """Int32, also of the bits of a Word."""
    value = int(value)
    return value - (1 << 32) if 1 << 31 <= value < 1 << 32 else value


KINDS = {
    "Float32": Kind("float32", 32, _float),
    "BFloat16": Kind("bfloat16", 16, _float),
    "Float16": Kind("float16", 16, _float),
    "Float8E4M3FN": Kind("float8_e4m3fn", 8, _float),
    "Float8E5M2": Kind("float8_e5m2", 8, _float),
    "Int32": Kind("int32", 32, _signed),
    "Int64": Kind("int64", 64, int),
    "Uint8": Kind("uint8", 8, int),
    "Uint32": Kind("uint32", 32, Word),
    "Boolean": Kind("bool", 1, bool),
}


class Values:
    """What ``Tensor.load`` gives: immutable."""

    def __init__(self, values: np.ndarray, kind: Kind) -> None:
        self.values, self.kind = values, kind

    def to(self, kind: Kind) -> Values:
        return Values(kind.round(self.values), kind)

    def __getitem__(self, i):
        return self.values[i]

    def __add__(self, other):
        return Values(self.values + other.values, self.kind)


class Tensor:
    """A view of flat memory. ``base`` is the address of its first element in bytes, for alignment."""

    def __init__(self, memory: np.ndarray, kind: Kind, shape, stride, offset: int = 0, base: int = 0) -> None:
        self.memory, self.element_type, self.shape, self.stride = memory, kind, tuple(shape), tuple(stride)
        self.offset, self.base = offset, base

    def _at(self, index) -> tuple[int, list[int]]:
        index = index if isinstance(index, tuple) else (index,)
        assert len(index) == len(self.shape), (index, self.shape)
        kept, offset = [], self.offset
        for axis, i in enumerate(index):
            if i is None:
                kept.append(axis)
            else:
                offset += int(i) * self.stride[axis]
        return offset, kept

    def _one(self, index) -> int:
        index = index if isinstance(index, tuple) else (index,)
        for i, size in zip(index, self.shape, strict=True):
            if not 0 <= i < size:
                raise IndexError(f"element {index} of a tensor {self.shape}")
        return self._at(index)[0]

    def __getitem__(self, index):
        offset, kept = self._at(index)
        if not kept:
            return self.element_type(self.memory[self._one(index)])
        return Tensor(
            self.memory,
            self.element_type,
            [self.shape[a] for a in kept],
            [self.stride[a] for a in kept],
            offset,
            self.base,
        )

    def __setitem__(self, index, value) -> None:
        kind = self.element_type
        self.memory[self._one(index)] = kind.round(np.asarray([value], np.float32))[0] if kind.is_float else int(value)

    def fill(self, value) -> None:
        assert len(self.shape) == 1, "a fragment"
        self.memory[self.offset : self.offset + self.shape[0]] = value

    def load(self) -> Values:
        (size,) = self.shape
        return Values(self.memory[self.offset : self.offset + size].copy(), self.element_type)

    def store(self, values: Values) -> None:
        assert values.kind is self.element_type, "store() converts nothing"
        self.memory[self.offset : self.offset + self.shape[0]] = values.values

    @property
    def iterator(self):
        address = self.base + self.offset * self.element_type.width // 8
        return types.SimpleNamespace(toint=lambda: address, tensor=self)

    def recast(self, kind: Kind) -> Tensor:
        """The bits of a fragment as another type: a copy, to be read. As with the DSL, a word of stride 0 stays one
        value."""
        if self.stride == (0,) and kind.width < self.element_type.width:
            return fragment(self.shape, kind)
        values = self.memory[self.offset : self.offset + self.shape[0]]
        held = torch.from_numpy(values.copy()).to(self.element_type.torch)
        other = held.view(kind.torch)
        made = fragment((tuple(other.shape), (1,)), kind)
        made.memory[:] = other.to(torch.float32 if kind.is_float else torch.int64).numpy()
        return made

    def tile(self, step: int, index: int) -> Tensor:
        """Vector ``index`` of a row; may lie outside, where it must not be accessed."""
        ((size,), (stride,)) = self.shape, self.stride
        assert stride == 1, "a vector of a row with stride 1"
        inside = index * step >= 0 and (index + 1) * step <= size
        made = Tensor(self.memory, self.element_type, [step], [1], self.offset + index * step, self.base)
        made.outside = None if inside else f"vector {index} of {step} elements, of a row of {size}"
        return made

    def access(self, bits: int) -> slice:
        """Where it lies, if it may be accessed with vectors of ``bits``."""
        if getattr(self, "outside", None):
            raise IndexError(self.outside)
        start, size = self.offset, self.shape[0]
        if start < 0 or start + size > len(self.memory):
            raise IndexError(f"elements {start} to {start + size} of {len(self.memory)}")
        address = self.base + start * self.element_type.width // 8
        if address % (bits // 8):
            raise ValueError(f"an access of {bits} bits at address {address}")
        return slice(start, start + size)


def fragment(given, kind: Kind) -> Tensor:
    """A register tensor of one dim, of a layout or a shape; one element of a bare shape has stride 0, as in the DSL."""
    shape, stride = given if isinstance(given[0], tuple) else (given, (0 if given[0] == 1 else 1,))
    return Tensor(memory(shape[0], kind), kind, shape, stride)


def halves(word, kind: Kind) -> list:
    """The two values of a word as float32 numbers, the low half first."""
    held = torch.from_numpy(np.array([word], np.uint32).view(np.int16))
    return list(held.view(kind.torch).float().numpy())


def word_of(low, high, kind: Kind) -> Word:
    """Two float32 numbers rounded to nearest even, in one word."""
    held = torch.from_numpy(np.array([low, high], np.float32)).to(kind.torch)
    return Word(held.view(torch.int16).numpy().view(np.uint32)[0])


def memory(size: int, kind: Kind) -> np.ndarray:
    """What nobody has written: NaN, and integers that no kernel means."""
    return np.full(size, np.nan, np.float32) if kind.is_float else np.full(size, 0x5A5A5A5A, np.int64)


# ---- blocks and threads ---------------------------------------------------------------------------------------------


class Block:
    """The threads of a block, its shared memory and its meeting points."""

    def __init__(self, index, grid, size: int) -> None:
        self.index, self.grid, self.size = index, grid, size
        self.lock, self.barriers, self.lanes, self.shared, self.failed = threading.Lock(), {}, {}, [], []
        self.accesses: list[list[tuple[int, int]]] = [[] for _ in range(size)]

    def meet(self, key, count: int) -> None:
        with self.lock:
            barrier = self.barriers.setdefault(key, threading.Barrier(count))
        assert barrier.parties == count, f"barrier {key} of {barrier.parties} and of {count} threads"
        barrier.wait(WAIT_S)

    def run(self, function, arguments) -> None:
        def body(index: int) -> None:
            _here.block, _here.thread, _here.allocated, _here.pending = self, index, 0, [[]]
            try:
                kernel, *given = arguments
                with np.errstate(all="ignore"):
                    function(copy_of(kernel), *given)
            except BaseException as error:
                self.failed.append(error)
                for barrier in list(self.barriers.values()):
                    barrier.abort()

        threads = [threading.Thread(target=body, args=(i,)) for i in range(self.size)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        real = [e for e in self.failed if not isinstance(e, threading.BrokenBarrierError)] or self.failed
        if real:
            raise real[0]
        for first in range(0, self.size, 32):
            together = self.accesses[first : first + 32]
            if len({len(own) for own in together}) == 1:  # otherwise some are predicated
                conflicts.extend(filter(None, map(conflict, zip(*together, strict=True))))


conflicts: list[str] = []  # accesses to shared memory at addresses that take longer than their bytes do


def conflict(lanes) -> str | None:
    """What is wrong with one access (address, size) of each lane, None where each part of the warp that is served at
    once finds its words in different banks: 8 lanes of 16 bytes, 16 of 8, all of 4 or less."""
    part = min(32, 128 // max(4, lanes[0][1]))
    for start in range(0, 32, part):
        words = {(address + k) // 4 for address, size in lanes[start : start + part] for k in range(0, size, 4)}
        if len({word % 32 for word in words}) != len(words):
            return f"lanes {start} to {start + part - 1}: {[hex(a) for a, _ in lanes[start : start + part]]}"
    return None


def copy_of(kernel):
    """A thread's own: what a kernel's object keeps while it is traced is each thread's."""
    return copy_module.deepcopy(kernel)


class Launch:
    def __init__(self, function, arguments) -> None:
        self.function, self.arguments = function, arguments

    def launch(self, grid, block, stream=None, use_pdl=False, **_) -> None:
        assert block[0] % 32 == 0 and block[0] <= 1024, f"{block[0]} threads: whole warps, 1024 at most"
        for y in range(grid[1]):
            for x in range(grid[0]):
                Block((x, y, 0), grid, block[0]).run(self.function, self.arguments)
                for fake, tensor in bound:  # the next block or kernel may read them at their addresses
                    fake.write_back(tensor)


bound: list[tuple[Fake, Tensor]] = []  # the tensors of the function that runs


class Allocator:
    def allocate_tensor(self, kind: Kind, layout, byte_alignment: int = 16) -> Tensor:
        shape, stride = layout
        block, index = _here.block, _here.allocated
        _here.allocated += 1
        with block.lock:
            if index == len(block.shared):
                block.shared.append(memory(math.prod(shape), kind))
        return Tensor(block.shared[index], kind, shape, stride, base=(index + 1) << _SHARED_BITS)


_SHARED_BITS = 20  # of an address in shared memory: the place in one of its tensors


def _find_shared(address: int):
    place = address & ((1 << _SHARED_BITS) - 1)
    return _here.block.shared[(address >> _SHARED_BITS) - 1], place // 4


def _all_lanes(value) -> tuple[list, int]:
    """What all lanes of the warp give, and which one this is."""
    block, (warp, lane) = _here.block, divmod(_here.thread, 32)
    with block.lock:
        lanes = block.lanes.setdefault(("all", warp), [None] * 32)
    lanes[lane] = value
    block.meet(("warp", warp, 0), 32)
    got = list(lanes)
    block.meet(("warp", warp, 1), 32)
    return got, lane


simt_ptx.SHARED.find = _find_shared
simt_ptx.SHARED.note = lambda address, size: _here.block.accesses[_here.thread].append((address, size))
simt_ptx.SHARED.later = lambda put: _here.pending[-1].append(put)
simt_ptx.SHARED.rows = _all_lanes


def inline_ptx(code: str, *, write_only_types=(), read_only_args=(), predicate=None):
    given = [simt_ptx.bits(a) if isinstance(a, np.floating | float) else int(a) for a in read_only_args]
    given = [v & 0xFFFFFFFF if -(1 << 31) <= v < 0 else v for v in given]
    found = simt_ptx.run(code, list(write_only_types), given, predicate)
    made = [
        kind(simt_ptx.number(v)) if kind.is_float else kind(v) for kind, v in zip(write_only_types, found, strict=True)
    ]
    return None if not made else made[0] if len(made) == 1 else tuple(made)


def untyped(value):
    """What ``select_`` gives: no Uint32, but the signed number of its bits."""
    return _signed(value) if isinstance(value, Word) else value


def reduce_warp(value, what: str):
    """Over the lanes of a warp; an unsigned number has a reduction of its own."""
    assert isinstance(value, Word) == what.startswith("u"), (value, what)
    return {"max": max, "min": min, "umax": max}[what](_all_lanes(value)[0])


def shuffle_bfly(value, offset: int):
    return shuffle(value, (_here.thread % 32) ^ offset)


def shuffle(value, lane: int):
    """What a lane of the warp gives."""
    block, thread = _here.block, _here.thread
    warp = thread // 32
    with block.lock:
        lanes = block.lanes.setdefault(warp, [None] * 32)
    lanes[thread % 32] = value
    block.meet(("warp", warp, 0), 32)
    got = lanes[lane]
    block.meet(("warp", warp, 1), 32)
    return got


def barrier(barrier_id: int, number_of_threads: int) -> None:
    assert 0 <= barrier_id < 16, f"barrier {barrier_id} of 16"
    _here.block.meet(("named", barrier_id), number_of_threads)


def sync_warp() -> None:
    _here.block.meet(("warp", _here.thread // 32, 0), 32)


def match(mask: int, value):
    """The lanes of the warp that give the same value, as bits."""
    assert mask == 0xFFFFFFFF, "all lanes"
    lanes, lane = _all_lanes(value)
    return Word(sum(1 << i for i, v in enumerate(lanes) if v == lanes[lane]))


def sync_threads() -> None:
    _here.block.meet("all", _here.block.size)


def commit_group() -> None:
    _here.pending.append([])


def wait_group(left: int) -> None:
    while len(_here.pending) - 1 > left:
        for put in _here.pending.pop(0):
            put()


def copy(atom, source: Tensor, target: Tensor) -> None:
    asynchronous, bits = atom
    assert source.element_type.width == target.element_type.width, "a copy converts nothing"
    values = source.memory[source.access(bits)].copy()
    where = target.access(bits)
    if asynchronous:
        _here.pending[-1].append(lambda: target.memory.__setitem__(where, values))
    else:
        target.memory[where] = values


def make_copy_atom(op, kind: Kind, num_bits_per_copy: int, **_):
    assert op != "async" or num_bits_per_copy in (32, 64, 128), f"cp.async of {num_bits_per_copy} bits"
    return op == "async", num_bits_per_copy


def autovec_copy(source: Tensor, target: Tensor) -> None:
    bits = min(128, source.shape[0] * source.element_type.width)
    while (source.shape[0] * source.element_type.width) % bits or bits & (bits - 1):
        bits //= 2
    target.memory[target.access(8)] = source.memory[source.access(8)]


def make_layout(shape, stride=None):
    shape = shape if isinstance(shape, tuple) else (shape,)
    return make_ordered_layout(shape, range(len(shape))) if stride is None else (shape, tuple(stride))


def make_tensor(iterator, layout) -> Tensor:
    """A view of the memory that begins where a tensor's ``iterator`` does."""
    (shape, stride), of = layout, iterator.tensor
    return Tensor(of.memory, of.element_type, shape, stride, of.offset, of.base)


def make_ordered_layout(shape, order):
    stride, step = [0] * len(shape), 1
    for axis in sorted(range(len(shape)), key=lambda a: order[a]):
        stride[axis], step = step, step * shape[axis]
    return tuple(shape), tuple(stride)


# ---- compiling ------------------------------------------------------------------------------------------------------


class Fake:
    """A tensor to compile from: checks what it is called with."""

    def __init__(self, kind: Kind, shape, stride, assumed_align: int) -> None:
        self.kind, self.shape, self.stride, self.align = kind, shape, stride, assumed_align

    def bind(self, x: torch.Tensor, sizes: dict) -> Tensor:
        assert x is not None, f"a tensor {self.shape} is wanted"
        assert x.dtype == self.kind.torch, (x.dtype, self.kind.name)
        assert x.dim() == len(self.shape), (x.shape, self.shape)
        for size, want in zip(x.shape, self.shape, strict=True):
            assert size == (want if isinstance(want, int) else sizes.setdefault(want, size)), (x.shape, self.shape)
        for axis, (stride, want) in enumerate(zip(x.stride(), self.stride, strict=True)):
            assert x.shape[axis] == 1 or (
                stride == want if isinstance(want, int) else stride % want.divisibility == 0
            ), (x.stride(), self.stride)
        assert x.data_ptr() % self.align == 0, f"an address that is a multiple of {self.align}"
        extent = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
        self.flat = x.as_strided((extent,), (1,))
        held = self.flat.to(torch.float32 if x.is_floating_point() else torch.int64).clone().numpy()
        return Tensor(held, self.kind, x.shape, x.stride(), 0, x.data_ptr())

    def write_back(self, made: Tensor) -> None:
        self.flat.copy_(torch.from_numpy(made.memory).to(self.kind.torch))


class Symbol:
    def __init__(self, divisibility: int = 1, **_) -> None:
        self.divisibility = divisibility


STREAM = object()


def compile_(function, *given, options: str = ""):
    """A function over torch tensors of the host, numbers and None, in the order of ``given`` without its stream."""
    assert given[-1] is STREAM
    given = given[:-1]

    def run(*arguments):
        assert len(arguments) == len(given), f"{len(arguments)} arguments of {len(given)}"
        sizes, made = {}, []
        bound.clear()
        for fake, value in zip(given, arguments, strict=True):
            if isinstance(fake, Fake):
                made.append(fake.bind(value, sizes))
                bound.append((fake, made[-1]))
                simt_ptx.allow(value)
            else:
                assert (fake is None) == (value is None), "None where it was compiled from None, and nowhere else"
                made.append(value if value is None else type(fake)(value))
        function(*made, None)

    return run


def fused(a, b, c):
    """a * b + c of float32 numbers or arrays, rounded once: the sum in float64 is made odd where it is not exact, so
    that the second rounding does not see a tie that is none."""
    a, b, c = (np.float64(v) for v in (a, b, c))
    product = a * b  # exact
    total = product + c
    back = total - product
    left = (product - (total - back)) + (c - back)
    up = np.where(left > 0, np.inf, -np.inf)
    even = (np.asarray(total).view(np.int64) & 1) == 0
    return np.where((left != 0) & even & np.isfinite(total), np.nextafter(total, up), total).astype(np.float32)[()]


_PTX = {
    "mul.rn": lambda a, b: a * b, "add.rn": lambda a, b: a + b, "div.rn": lambda a, b: a / b,
    "fma.rn": lambda a, b, c: fused(a, b, c),
    "rcp.approx.ftz": lambda a: np.float32(1.0) / a,
    "rsqrt.approx": lambda a: np.float32(1.0) / np.sqrt(a), "abs": abs,
    "max.NaN": np.maximum, "min.NaN": np.minimum,
}  # fmt: skip


def instruction(code: str, *values):
    """What the device helpers' one-instruction functions do. A NaN has a GPU's bits: a CPU's may have a sign."""
    made = np.float32(_PTX[code.split(".f32")[0]](*(np.float32(v) for v in values)))
    return np.uint32(0x7FFFFFFF).view(np.float32) if np.isnan(made) else made


def _module(name: str, **names) -> types.ModuleType:
    made = types.ModuleType(name)
    made.__dict__.update(names)
    sys.modules[name] = made
    return made


def _same(function):
    return function


def _kernel(function):
    return lambda *arguments: Launch(function, arguments)


def install() -> None:
    """From now on ``import cutlass`` finds the stand-in."""
    assert "cutlass" not in sys.modules, "in a process of its own"
    flags = type("Flags", (), {"__getattr__": lambda self, name: name})()
    arch = types.SimpleNamespace(
        thread_idx=lambda: (_here.thread, 0, 0), block_idx=lambda: _here.block.index,
        grid_dim=lambda: tuple(_here.block.grid),
        shuffle_sync_bfly=shuffle_bfly, shuffle_sync=shuffle, sync_threads=sync_threads, sync_warp=sync_warp, barrier=barrier, cp_async_commit_group=commit_group,
        cp_async_wait_group=wait_group, griddepcontrol_wait=lambda: None, lane_idx=lambda: _here.thread % 32,
        warp_redux_sync=reduce_warp, match_sync=match, popc=lambda word: Word(int(word).bit_count()),
    )  # fmt: skip
    runtime = types.SimpleNamespace(
        make_fake_tensor=lambda kind, shape, stride, assumed_align: Fake(kind, shape, stride, assumed_align),
        make_fake_stream=lambda use_tvm_ffi_env_stream: STREAM,
    )
    cpasync = types.SimpleNamespace(CopyG2SOp=lambda cache_mode: "async", LoadCacheMode=flags)
    nvgpu = _module("cutlass.cute.nvgpu", CopyG2ROp=lambda: "load", CopyR2GOp=lambda: "store", StoreCacheMode=flags, cpasync=cpasync)
    cute = _module(
        "cutlass.cute", jit=_same, kernel=_kernel, compile=compile_, arch=arch, runtime=runtime,
        nvgpu=nvgpu, Tensor=Tensor,
        ceil_div=lambda a, b: -(-a // b), size=lambda t: math.prod(t.shape), make_rmem_tensor=fragment, copy=copy,
        local_tile=lambda row, shape, index: row.tile(shape[0], index[0]), autovec_copy=autovec_copy,
        make_copy_atom=make_copy_atom,
        make_ordered_layout=make_ordered_layout, make_layout=make_layout,
        make_tensor=make_tensor, rank=lambda t: len(t.shape), fast_divmod_create_divisor_v2=int, sym_int=Symbol,
        sym_int64=Symbol, recast_tensor=lambda t, kind: t.recast(kind),
    )  # fmt: skip
    cute.arch.nvvm_wrappers = _module("cutlass.cute.arch.nvvm_wrappers", inline_ptx=inline_ptx)
    _module("cutlass.cute.arch", **vars(arch))
    top = _module(
        "cutlass", cute=cute, const_expr=_same, range=lambda *r, **_: range(*r), range_constexpr=range,
        min=min, max=max, Constexpr=object,
        select_=lambda ok, a, b: untyped(a if ok else b), **KINDS,
    )  # fmt: skip
    top.__path__ = []
    _module("cutlass.memory", SmemAllocator=Allocator)
    _module("cutlass._mlir")
    _module("cutlass._mlir.dialects", llvm=None)
    _module("cutlass.cutlass_dsl", T=None)
    from layerplan.kernels.common import device, packed

    device._ptx = instruction
    packed.halves, packed.word_of = halves, word_of
