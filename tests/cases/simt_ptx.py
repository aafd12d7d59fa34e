"""The inline PTX of our kernels, run on a CPU one statement after the other: what ``tests/cases/simt.py`` needs for
memory at addresses.

Registers hold bits. Global memory is the host's own, at the addresses of tensors: an access outside of what ``allow``
was given, or one that is not aligned, is an error. Shared memory is the words that ``SHARED`` finds. Only what the
kernels use is here; anything else is a KeyError that names it."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable

import numpy as np
import torch

_STATEMENTS = 1000  # that one piece of PTX may run
_allowed: dict[int, int] = {}  # first byte -> behind the last


def allow(*tensors: torch.Tensor | None) -> None:
    """Global memory that may be accessed."""
    for t in tensors:
        if t is not None and t.numel():
            extent = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
            _allowed[t.data_ptr()] = t.data_ptr() + extent * t.element_size()


def forget() -> None:
    _allowed.clear()


class Shared:
    """Shared memory at addresses, set by the stand-in: ``find(address)`` gives an array of words and the place in it;
    ``note(address, size)`` is told of every access of a thread, ``later(put)`` of what a copy does when it is waited
    for; ``rows(address)`` gives the addresses that all lanes of the warp name, and which lane asks."""

    find: Callable[[int], tuple[np.ndarray, int]]
    note: Callable[[int, int], None]
    later: Callable[[Callable[[], None]], None]
    rows: Callable[[int], tuple[list[int], int]]


SHARED = Shared()


def _checked(address: int, size: int) -> int:
    if not any(a <= address and address + size <= b for a, b in _allowed.items()):
        raise IndexError(f"{size} bytes at address {address:#x} outside of every tensor")
    return address


def _load(space: str, address: int, size: int) -> int:
    if address % size:
        raise ValueError(f"an access of {size} bytes at address {address:#x}")
    if space == "shared":
        words, place = SHARED.find(address)
        return int(words[place]) >> 8 * (address % 4) & (1 << 8 * size) - 1
    return int.from_bytes(ctypes.string_at(_checked(address, size), size), "little")


def _store(space: str, address: int, size: int, value: int) -> None:
    if address % size:
        raise ValueError(f"an access of {size} bytes at address {address:#x}")
    if space == "shared":
        assert size == 4, "words"
        words, place = SHARED.find(address)
        words[place] = value
    else:
        ctypes.memmove(_checked(address, size), (value & (1 << 8 * size) - 1).to_bytes(size, "little"), size)


# ---- numbers --------------------------------------------------------------------------------------------------------


def bits(value: np.float32) -> int:
    return int(np.float32(value).view(np.uint32))


def number(word: int) -> np.float32:
    return np.uint32(word & 0xFFFFFFFF).view(np.float32)


def _narrow(value: np.float32, dtype: torch.dtype) -> int:
    return int(
        torch.tensor(float(value)).float().to(dtype).view(torch.int16 if dtype.itemsize == 2 else torch.uint8)
    ) & (0xFFFF if dtype.itemsize == 2 else 0xFF)


def _wide(word: int, dtype: torch.dtype) -> np.float32:
    kind = torch.int16 if dtype.itemsize == 2 else torch.uint8
    word = word - (1 << 16) if dtype.itemsize == 2 and word >= 1 << 15 else word
    return np.float32(torch.tensor(word, dtype=kind).view(dtype).float())


def _fp8(value: np.float32, dtype: torch.dtype) -> int:
    """Saturating, nearest even, any NaN 0x7f."""
    most = torch.finfo(dtype).max
    return 0x7F if np.isnan(value) else _narrow(np.float32(np.clip(value, -most, most)), dtype)


def _pick(a: np.float32, b: np.float32, largest: bool, nan: bool) -> np.float32:
    if np.isnan(a) or np.isnan(b):
        return np.float32(math.nan) if nan else (b if np.isnan(a) else a)
    return (max if largest else min)(a, b)


_HALF = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}
_EIGHT = {"e4m3x2": torch.float8_e4m3fn, "e5m2x2": torch.float8_e5m2}


def _magnitude(op: str, word: int) -> int:
    return word & (0x7FFFFFFF if op.endswith("f32") else 0x7FFF7FFF)


def _extreme(op: str, a: int, b: int) -> int:
    name, *rest = op.split(".")
    nan, kind = "NaN" in rest, rest[-1]
    if "xorsign" in rest:  # the larger magnitude, with the sign of the product
        plain = ".".join(p for p in op.split(".") if p not in ("xorsign", "abs"))
        larger = _extreme(plain, _magnitude(kind, a), _magnitude(kind, b))
        return _magnitude(kind, larger) | ((a ^ b) & ~_magnitude(kind, 0xFFFFFFFF))
    if kind == "s32":
        a, b = (v - (1 << 32) if v >= 1 << 31 else v for v in (a, b))
        return (max if name == "max" else min)(a, b) & 0xFFFFFFFF
    if kind == "f32":
        return bits(_pick(number(a), number(b), name == "max", nan))
    dtype, made = _HALF[kind], 0
    for shift in (0, 16):
        parts = [_wide(v >> shift & 0xFFFF, dtype) for v in (a, b)]
        made |= _narrow(_pick(*parts, name == "max", nan), dtype) << shift
    return made


def _convert(op: str, *values: int) -> int:
    to, source = op.split(".")[-2:]
    if to in _EIGHT:
        high, low = (_fp8(number(v), _EIGHT[to]) for v in values)
        return high << 8 | low
    if source in _EIGHT:
        return _narrow(_wide(values[0] >> 8, _EIGHT[source]), _HALF[to]) << 16 | _narrow(
            _wide(values[0] & 0xFF, _EIGHT[source]), _HALF[to]
        )
    if to in _HALF:
        high, low = (_narrow(number(v), _HALF[to]) for v in values)
        return high << 16 | low
    return bits(_wide(values[0], {"f16": torch.float16, "bf16": torch.bfloat16}[source]))


def _exact(function, word: int) -> int:
    """What a GPU approximates, rounded once."""
    with np.errstate(all="ignore"):
        return bits(function(number(word)))


def _permute(a: int, b: int, selector: int) -> int:
    both = b << 32 | a
    return sum((both >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i for i in range(4))


# ---- statements -----------------------------------------------------------------------------------------------------


def _operands(text: str) -> list:
    """Names of registers, lists of them, addresses in brackets."""
    found = []
    for part in re.findall(r"\{[^{}]*\}|\[[^\]]*\]|[^,\s]+", text):
        found.append([p.strip() for p in part[1:-1].split(",")] if part[0] == "{" else part)
    return found


class _Run:
    def __init__(self, registers: dict[str, int]) -> None:
        self.registers = registers

    def value(self, name: str) -> int:
        return self.registers[name] if name in self.registers else int(name, 0)

    def statement(self, text: str) -> str | None:
        """Runs one; the label to go on at, if it says so."""
        guard = re.match(r"@(!?)(\w+)\s+(.*)", text)
        if guard:
            if bool(self.registers[guard[2]]) == bool(guard[1]):
                return None
            text = guard[3]
        if text.startswith("bra "):
            return text[4:].strip()
        self.operation(text)
        return None

    def operation(self, text: str) -> None:
        op, _, rest = text.partition(" ")
        name, operands = op.split(".")[0], _operands(rest)
        if name in ("ld", "st", "red", "atom"):
            self.memory(op, operands)
        elif op == "setp.ne.b32":
            self.registers[operands[0]] = int(self.value(operands[1]) != self.value(operands[2]))
        elif op == "setp.gt.s32":
            a, b = (v - (1 << 32) if v >= 1 << 31 else v for v in map(self.value, operands[1:]))
            self.registers[operands[0]] = int(a > b)
        elif op == "setp.lt.u32":
            self.registers[operands[0]] = int(self.value(operands[1]) < self.value(operands[2]))
        elif name == "cp":
            self.copy(*operands)
        elif name == "ldmatrix":
            self.matrices(*operands)
        elif name == "mov":
            self.move(*operands)
        else:
            target, values = operands[0], [self.value(o) for o in operands[1:]]
            maths = {"max": lambda: _extreme(op, *values), "min": lambda: _extreme(op, *values),
            "cvt": lambda: _convert(op, *values),
                     "prmt": lambda: _permute(*values), "abs": lambda: _magnitude(op, *values),
                     "shr": lambda: values[0] >> values[1], "ex2": lambda: _exact(np.exp2, *values),
                     "rcp": lambda: _exact(np.reciprocal, *values)}  # fmt: skip
            self.registers[target] = maths[name]()

    def move(self, target, source) -> None:
        if isinstance(target, list):
            for i, t in enumerate(target):
                self.registers[t] = self.value(source) >> 16 * i & 0xFFFF
        elif isinstance(source, list):
            self.registers[target] = sum(self.value(s) << 16 * i for i, s in enumerate(source))
        else:
            self.registers[target] = self.value(source)

    def add(self, op: str, place: str, value: str) -> int:
        """Adds to a number in global memory; what it was. Only one block runs at a time, and one thread of it adds."""
        assert op.split(".")[-3:] == ["global", "add", "u32"], op
        address = self.place(place)
        was = _load("global", address, 4)
        _store("global", address, 4, was + self.value(value))
        return was

    def place(self, operand: str) -> int:
        """The address that brackets name: a register and perhaps a number."""
        base, _, more = operand[1:-1].partition("+")
        return self.value(base) + int(more or 0)

    def copy(self, to: str, source: str, size: str, given: str) -> None:
        """``cp.async``: the first ``given`` of ``size`` bytes, zeros behind them, when they are waited for."""
        target, address, total, count = self.place(to), self.place(source), int(size), self.value(given)
        if target % total or (count and address % total):
            raise ValueError(f"a copy of {total} bytes from address {address:#x} to {target:#x}")
        data = [_load("global", address + i, 1) if i < count else 0 for i in range(total)]
        words = [int.from_bytes(bytes(data[i : i + 4]), "little") for i in range(0, total, 4)]
        SHARED.note(target, total)
        SHARED.later(lambda: [_store("shared", target + 4 * i, 4, word) for i, word in enumerate(words)])

    def matrices(self, names: list, place: str) -> None:
        """``ldmatrix`` with ``x4.trans``: of each matrix two rows' values of one column."""
        own = self.place(place)
        if own % 16:
            raise ValueError(f"a row of a matrix at address {own:#x}")
        SHARED.note(own, 16)
        rows, lane = SHARED.rows(own)
        for i, name in enumerate(names):
            pair = rows[8 * i + lane % 4 * 2 :][:2]
            low, high = (_load("shared", row + lane // 4 * 2, 2) for row in pair)
            self.registers[name] = high << 16 | low

    def memory(self, op: str, operands: list) -> None:
        parts = op.split(".")
        space = "shared" if "shared" in parts else "global"
        size = {"b32": 4, "s32": 4, "u32": 4, "b16": 2, "u8": 1}[parts[-1]]
        if parts[0] == "atom":
            self.registers[operands[0]] = self.add(op, operands[1], operands[2])
            return
        if parts[0] == "red" and parts[-2] == "add":
            self.add(op, *operands)
            return
        target, place = (operands[0], operands[1]) if parts[0] == "ld" else (operands[1], operands[0])
        address = self.place(place)
        names = target if isinstance(target, list) else [target]
        if address % (size * len(names)):
            raise ValueError(f"an access of {size * len(names)} bytes at address {address:#x}")
        if space == "shared":
            SHARED.note(address, size * len(names))
        for i, name in enumerate(names):
            if parts[0] == "ld":
                self.registers[name] = _load(space, address + size * i, size)
            elif parts[0] == "st":
                _store(space, address + size * i, size, self.value(name))
            else:
                assert parts[-2:] == ["max", "s32"], op
                _store(space, address, size, _extreme("max.s32", _load(space, address, size), self.value(name)))


def run(code: str, types: list, given: list[int], predicate: bool | None) -> list[int]:
    """The bits of the outputs {$w0}, ..."""
    if predicate is not None and not predicate:
        return []
    code = re.sub(r"\{\$([rw]\d+)\}", r"\1", code).strip()
    code = code[1:-1] if code.startswith("{") else code
    registers = {f"r{i}": v for i, v in enumerate(given)}
    machine, statements, labels = _Run(registers), [], {}
    for text in (t.strip() for t in code.split(";")):
        label = re.match(r"(\w+):\s*(.*)", text)
        if label:
            labels[label[1]], text = len(statements), label[2]
        if text and not text.startswith(".reg"):
            statements.append(text)
    at, left = 0, _STATEMENTS
    while at < len(statements):
        target = machine.statement(statements[at])
        at, left = (at + 1 if target is None else labels[target]), left - 1
        if not left:
            raise TimeoutError(f"waits for what no block before has done: {code}")
    return [registers[f"w{i}"] for i in range(len(types))]
