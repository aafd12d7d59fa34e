"""Memory as 32-bit words at addresses: what device code uses where the elements of one access are packed, predicated
and 64-bit addressed.

Imports the compiler, so host code never imports this file. Addresses are Int64 in global memory and Int32 in shared
memory, in bytes. An access of ``count`` words (1, 2 or 4) is one instruction; its address is a multiple of its size.
Elements that a predicate leaves out are read as 0 and not written: nothing here needs a branch. """

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cute.arch.nvvm_wrappers import inline_ptx
from cutlass.memory import SmemAllocator


def address(tensor):
    """The address of a tensor in global memory (Int64) or in shared memory (Int32)."""
    return tensor.iterator.toint()


def shared(storage: SmemAllocator, words: int, alignment: int = 16):
    """The address of so many words of shared memory, a multiple of ``alignment`` bytes."""
    return address(storage.allocate_tensor(Uint32, cute.make_layout(words), byte_alignment=alignment))


def _list(prefix: str, count: int, first: int = 0) -> str:
    names = ", ".join(f"{{${prefix}{first + i}}}" for i in range(count))
    return names if count == 1 else f"{{ {names} }}"


def _suffix(count: int) -> str:
    return f".v{count}.b32" if count > 1 else ".b32"


def _one(result) -> list:
    return list(result) if isinstance(result, tuple) else [result]


def _if(ok: str, code: str) -> str:
    """PTX whose statements ``@p`` run where operand ``ok`` is not 0. It may be a constant, which only a move takes."""
    return f"{{ .reg .pred p; .reg .b32 t; .reg .b16 h, z; mov.b32 t, {{${ok}}}; setp.ne.b32 p, t, 0; {code} }}"


def read_words(at, count: int, ok) -> list:
    """``count`` words of global memory, zeros where ``ok`` does not hold."""
    zeros = " ".join(f"mov.b32 {{$w{i}}}, 0;" for i in range(count))
    code = _if("r1", f"{zeros} @p ld.global{_suffix(count)} {_list('w', count)}, [{{$r0}}];")
    return _one(inline_ptx(code, write_only_types=[Uint32] * count, read_only_args=[at, Int32(ok)]))


def read_piece(at, size: int, ok):
    """One element of ``size`` bytes (1, 2 or 4) of global memory in the low bits of a word, 0 where ``ok`` does not
    hold."""
    load, part = {1: ("u8 {$w0}", ""), 2: ("b16 h", "mov.b32 {$w0}, {h, z};"), 4: ("b32 {$w0}", "")}[size]
    code = _if("r1", f"mov.b32 {{$w0}}, 0; mov.b16 h, 0; mov.b16 z, 0; @p ld.global.{load}, [{{$r0}}]; {part}")
    return inline_ptx(code, write_only_types=[Uint32], read_only_args=[at, Int32(ok)])


def write_words(at, words: list, ok, *, streaming: bool = False) -> None:
    """Words to global memory. ``streaming``: nothing reads them soon, L2 may drop them first."""
    kind = "st.global.cs" if streaming else "st.global"
    code = _if(f"r{len(words) + 1}", f"@p {kind}{_suffix(len(words))} [{{$r0}}], {_list('r', len(words), 1)};")
    inline_ptx(code, read_only_args=[at, *words, Int32(ok)])


def write_piece(at, word, size: int, ok) -> None:
    """The low ``size`` bytes (1, 2 or 4) of a word to global memory."""
    store, part = {1: ("u8 [{$r0}], t", ""), 2: ("b16 [{$r0}], h", "mov.b32 {h, z}, t;"), 4: ("b32 [{$r0}], t", "")}[
        size
    ]
    inline_ptx(_if("r2", f"mov.b32 t, {{$r1}}; {part} @p st.global.{store};"), read_only_args=[at, word, Int32(ok)])


def write_bytes(at, word, count) -> None:
    """The first ``count`` bytes of a word to global memory: all from 4 on, none from 0 down."""
    part = " setp.gt.s32 p, {{$r2}}, {i}; shr.b32 t, {{$r1}}, {bits}; @p st.global.u8 [{{$r0}}+{i}], t;"
    parts = "".join(part.format(i=i, bits=8 * i) for i in range(4))
    inline_ptx(f"{{ .reg .pred p; .reg .b32 t;{parts} }}", read_only_args=[at, word, count])


def take_number(at, ok):
    """What a number in global memory was before this adds 1 to it, 0 where ``ok`` does not hold."""
    code = _if("r1", "mov.b32 {$w0}, 0; @p atom.global.add.u32 {$w0}, [{$r0}], 1;")
    return inline_ptx(code, write_only_types=[Uint32], read_only_args=[at, Int32(ok)])


def count_up(at, ok) -> None:
    """Adds 1 to a number in global memory: who did ``wait_for`` it sees what was written before, by threads too that
    passed a barrier with this one."""
    inline_ptx(_if("r1", "@p red.release.gpu.global.add.u32 [{$r0}], 1;"), read_only_args=[at, Int32(ok)])


def wait_for(at, least: int, ok) -> None:
    """Returns when a number in global memory is ``least`` or more; at once where ``ok`` does not hold."""
    loop = f"again: ld.acquire.gpu.global.u32 t, [{{$r0}}]; setp.lt.u32 p, t, {least}; @p bra again;"
    inline_ptx(_if("r1", f"@!p bra done; {loop} done: mov.b32 t, 0;"), read_only_args=[at, Int32(ok)])


def read_shared_words(at, count: int) -> list:
    """Words of shared memory."""
    code = f"ld.shared{_suffix(count)} {_list('w', count)}, [{{$r0}}];"
    return _one(inline_ptx(code, write_only_types=[Uint32] * count, read_only_args=[at]))


def read_shared_piece(at, size: int):
    """One element of ``size`` bytes (2 or 4) of shared memory in the low bits of a word."""
    load, part = {2: ("b16 h", " mov.b32 {$w0}, {h, z};"), 4: ("b32 {$w0}", "")}[size]
    code = f"{{ .reg .b16 h, z; mov.b16 z, 0; ld.shared.{load}, [{{$r0}}];{part} }}"
    return inline_ptx(code, write_only_types=[Uint32], read_only_args=[at])


def write_shared_words(at, words: list, ok=True) -> None:
    """Words to shared memory."""
    code = _if(f"r{len(words) + 1}", f"@p st.shared{_suffix(len(words))} [{{$r0}}], {_list('r', len(words), 1)};")
    inline_ptx(code, read_only_args=[at, *words, Int32(ok)])


def read_matrices(at) -> list:
    """Four matrices of 8 x 8 16-bit values in shared memory, transposed, a word of each: lane l of the warp names the
    address of row l % 8 of matrix l / 8, a multiple of 16 bytes, and gets rows 2 * (l % 4) and the next of column
    l / 4."""
    code = f"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {_list('w', 4)}, [{{$r0}}];"
    return list(inline_ptx(code, write_only_types=[Uint32] * 4, read_only_args=[at]))


def copy_chunk(at, to, ok) -> None:
    """16 bytes of global memory to shared memory, asynchronously and past L1, zeros where ``ok`` does not hold. The
    caller commits and waits."""
    code = "{ .reg .b32 n; mov.b32 n, {$r2}; cp.async.cg.shared.global [{$r0}], [{$r1}], 16, n; }"
    inline_ptx(code, read_only_args=[to, at, cutlass.select_(ok, Int32(16), Int32(0))])


def float_of(word):
    """The float32 number of these bits."""
    return inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[word])


def bits_of(value):
    """The bits of a float32 number, as Uint32."""
    return inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[Float32(value)])


def prmt(a, b, selector: int):
    """Four of the eight bytes of (a, b), a's being 0 to 3, by the nibbles of ``selector``, the lowest first."""
    return inline_ptx(
        f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {selector:#x};", write_only_types=[Uint32], read_only_args=[a, b]
    )


class Packed:
    """Numbers of a dtype as they lie in words: two 16-bit ones (the first in the low half) or one float32 number a
    word."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.itemsize = 4 if dtype == "float32" else 2
        self.per_word = 4 // self.itemsize
        self._ptx = {"float32": "f32", "bfloat16": "bf16x2", "float16": "f16x2"}[dtype]

    def read(self, at, elements: int, ok) -> list:
        """``elements`` of global memory as words, in accesses of at most 16 bytes; where they are single, a multiple of
        two is read one by one into whole words. ``ok`` is one predicate, or a list of one for each element, which are
        then read one by one."""
        if isinstance(ok, list):
            pieces = [read_piece(at + i * self.itemsize, self.itemsize, p) for i, p in enumerate(ok)]
            return (
                pieces
                if self.per_word == 1
                else [prmt(a, b, 0x5410) for a, b in zip(pieces[::2], pieces[1::2], strict=True)]
            )
        words, result = elements // self.per_word, []
        for start in range(0, words, 4):
            count = min(4, words - start)
            result += read_words(at + 4 * start, count, ok)
        return result

    def write(self, at, words: list, ok, *, streaming: bool = False) -> None:
        """Words to global memory; ``ok`` as for ``read``, ``streaming`` as for ``write_words``."""
        if isinstance(ok, list):
            for i, p in enumerate(ok):
                word = words[i // self.per_word]
                write_piece(at + i * self.itemsize, word >> Uint32(16) if i % self.per_word else word, self.itemsize, p)
            return
        for start in range(0, len(words), 4):
            write_words(at + 4 * start, words[start : start + 4], ok, streaming=streaming)

    def floats(self, words: list) -> list:
        """The numbers as float32, exact."""
        if self.dtype == "float32":
            return [float_of(w) for w in words]
        if self.dtype == "bfloat16":
            return [float_of(h) for w in words for h in (w << Uint32(16), w & Uint32(0xFFFF0000))]
        code = "{ .reg .b16 l, h; mov.b32 {l, h}, {$r0}; cvt.f32.f16 {$w0}, l; cvt.f32.f16 {$w1}, h; }"
        return [f for w in words for f in inline_ptx(code, write_only_types=[Float32] * 2, read_only_args=[w])]

    def words(self, values: list) -> list:
        """float32 numbers as words, each rounded to nearest even, infinite where too large."""
        if self.dtype == "float32":
            return [bits_of(v) for v in values]
        code = f"cvt.rn.{self._ptx}.f32 {{$w0}}, {{$r1}}, {{$r0}};"
        return [
            inline_ptx(code, write_only_types=[Uint32], read_only_args=[a, b])
            for a, b in zip(values[::2], values[1::2], strict=True)
        ]

    def magnitudes(self, words: list) -> list:
        """Without their signs; a NaN is any NaN."""
        code = f"abs.{self._ptx} {{$w0}}, {{$r0}};"
        return [inline_ptx(code, write_only_types=[Uint32], read_only_args=[word]) for word in words]

    def largest(self, a, b, nan: bool = False, sizes: bool = False):
        """Elementwise maximum of two words. Where one is NaN: the other one, or NaN with ``nan``. With ``sizes``
        that of their magnitudes, with any sign: one instruction from sm_86 on."""
        code = f"max{'.NaN' if nan else ''}{'.xorsign.abs' if sizes else ''}.{self._ptx} {{$w0}}, {{$r0}}, {{$r1}};"
        return inline_ptx(code, write_only_types=[Uint32], read_only_args=[a, b])

    def transposed_largest(self, rows: list, nan: bool = False, sizes: bool = False) -> list:
        """The largest of each of several lists of words, as words."""
        folded = []
        for words in rows:
            while len(words) > 1:
                words = [self.largest(a, b, nan, sizes) for a, b in zip(words[::2], words[1::2], strict=True)]
            folded.append(words[0])
        if self.per_word == 1:
            return folded
        pairs = zip(folded[::2], folded[1::2], strict=True)
        return [self.largest(prmt(a, b, 0x5410), prmt(a, b, 0x7632), nan, sizes) for a, b in pairs]
