"""Memory as 32-bit words at addresses: what device code uses where the elements of one access are packed, predicated
and 64-bit addressed.

Imports the compiler, so host code never imports this file. Addresses are Int64 in global memory and Int32 in shared
memory, in bytes. An access of ``count`` words (1, 2 or 4) is one instruction; its address is a multiple of its size.
Elements that a predicate leaves out are read as 0 and not written: nothing here needs a branch. """

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cute.arch.nvvm_wrappers import inline_ptx
from cutlass.memory import SmemAllocator


def address(tensor):
    """The address of a tensor in global memory (Int64) or in shared memory (Int32)."""
    return tensor.iterator.toint()


def shared(storage: SmemAllocator, words: int):
    """The address of so many words of shared memory, a multiple of 16 bytes."""
    return address(storage.allocate_tensor(Uint32, cute.make_layout(words), byte_alignment=16))


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
    """``count`` words of global memory that nothing else reads soon, zeros where ``ok`` does not hold."""
    zeros = " ".join(f"mov.b32 {{$w{i}}}, 0;" for i in range(count))
    code = _if("r1", f"{zeros} @p ld.global.L1::no_allocate{_suffix(count)} {_list('w', count)}, [{{$r0}}];")
    return _one(inline_ptx(code, write_only_types=[Uint32] * count, read_only_args=[at, Int32(ok)]))


def read_piece(at, size: int, ok):
    """One element of ``size`` bytes (1, 2 or 4) of global memory in the low bits of a word, 0 where ``ok`` does not
    hold."""
    load, part = {1: ("u8 {$w0}", ""), 2: ("b16 h", "mov.b32 {$w0}, {h, z};"), 4: ("b32 {$w0}", "")}[size]
    code = _if("r1", f"mov.b32 {{$w0}}, 0; mov.b16 h, 0; mov.b16 z, 0; @p ld.global.{load}, [{{$r0}}]; {part}")
    return inline_ptx(code, write_only_types=[Uint32], read_only_args=[at, Int32(ok)])


def write_words(at, words: list, ok) -> None:
    """Words to global memory."""
    code = _if(f"r{len(words) + 1}", f"@p st.global{_suffix(len(words))} [{{$r0}}], {_list('r', len(words), 1)};")
    inline_ptx(code, read_only_args=[at, *words, Int32(ok)])


def write_piece(at, word, size: int, ok) -> None:
    """The low ``size`` bytes (1, 2 or 4) of a word to global memory."""
    store, part = {1: ("u8 [{$r0}], t", ""), 2: ("b16 [{$r0}], h", "mov.b32 {h, z}, t;"), 4: ("b32 [{$r0}], t", "")}[
        size
    ]
    inline_ptx(_if("r2", f"mov.b32 t, {{$r1}}; {part} @p st.global.{store};"), read_only_args=[at, word, Int32(ok)])


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

    def write(self, at, words: list, ok) -> None:
        """Words to global memory; ``ok`` as for ``read``."""
        if isinstance(ok, list):
            for i, p in enumerate(ok):
                word = words[i // self.per_word]
                write_piece(at + i * self.itemsize, word >> Uint32(16) if i % self.per_word else word, self.itemsize, p)
            return
        for start in range(0, len(words), 4):
            write_words(at + 4 * start, words[start : start + 4], ok)

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
        """Without their signs."""
        mask = Uint32(0x7FFFFFFF if self.per_word == 1 else 0x7FFF7FFF)
        return [w & mask for w in words]

    def largest(self, a, b, nan: bool = False):
        """Elementwise maximum of two words. Where one is NaN: the other one, or NaN with ``nan``."""
        code = f"max{'.NaN' if nan else ''}.{self._ptx} {{$w0}}, {{$r0}}, {{$r1}};"
        return inline_ptx(code, write_only_types=[Uint32], read_only_args=[a, b])

    def transposed_largest(self, rows: list, nan: bool = False) -> list:
        """The largest of each of several lists of words, as words."""
        folded = []
        for words in rows:
            while len(words) > 1:
                words = [self.largest(a, b, nan) for a, b in zip(words[::2], words[1::2], strict=True)]
            folded.append(words[0])
        if self.per_word == 1:
            return folded
        pairs = zip(folded[::2], folded[1::2], strict=True)
        return [self.largest(prmt(a, b, 0x5410), prmt(a, b, 0x7632), nan) for a, b in pairs]
