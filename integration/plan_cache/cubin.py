"""What compiled kernels use of a GPU, read from their machine code: ELF images for a GPU, inside of object files.

Registers and frames stand in the section ``.nv.info``: records of a format byte, an attribute byte, a size and, for
these attributes, a symbol's index and a number. A frame is local memory: what a kernel spills, and arrays that it
indexes.
"""

from __future__ import annotations

import dataclasses
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..engines.packages import locate

_MAGIC, _EM_CUDA = b"\x7fELF", 190
_SIZED, _REGISTERS, _FRAME = 0x04, 0x2F, 0x11  # format of records with a size; attributes
_ALONE = (0x01, 0x02, 0x03)  # formats whose record is these four bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Resources:
    """Of one device function: registers a thread, bytes of local memory a thread (spills and indexed arrays), bytes of
    static shared memory a block."""

    registers: int
    frame_bytes: int
    shared_bytes: int = 0

    def to_json(self) -> dict[str, int]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, slots=True)
class _Section:
    name: str
    kind: int
    offset: int
    size: int
    link: int


def images(content: bytes) -> Iterator[bytes]:
    """Every GPU image in an object file, from its first byte on."""
    at = content.find(_MAGIC)
    while at >= 0:
        if len(content) >= at + 64 and struct.unpack_from("<H", content, at + 18)[0] == _EM_CUDA:
            yield content[at:]
        at = content.find(_MAGIC, at + 4)


def resources(content: bytes) -> dict[str, Resources]:
    """Device function -> what it uses, of every GPU image in ``content``."""
    found: dict[str, Resources] = {}
    for image in images(content):
        sections = _sections(image)
        info = next((s for s in sections if s.name == ".nv.info"), None)
        symbols = next((s for s in sections if s.name == ".symtab"), None)
        if info is None or symbols is None:
            continue
        names = _symbols(image, symbols, sections[symbols.link])
        records = image[info.offset : info.offset + info.size]
        frames = dict(_records(records, _FRAME))
        shared = {s.name.removeprefix(".nv.shared."): s.size for s in sections if s.name.startswith(".nv.shared.")}
        for index, registers in _records(records, _REGISTERS):
            found[names[index]] = Resources(registers, frames.get(index, 0), shared.get(names[index], 0))
    return found


def _sections(image: bytes) -> list[_Section]:
    (table,) = struct.unpack_from("<Q", image, 40)
    size, count, names = struct.unpack_from("<HHH", image, 58)
    rows = [struct.unpack_from("<IIQQQQII", image, table + i * size) for i in range(count)]
    texts = rows[names][4]
    return [_Section(_text(image, texts + r[0]), r[1], r[4], r[5], r[6]) for r in rows]


def _symbols(image: bytes, table: _Section, texts: _Section) -> list[str]:
    starts = range(table.offset, table.offset + table.size, 24)
    return [_text(image, texts.offset + struct.unpack_from("<I", image, at)[0]) for at in starts]


def _text(image: bytes, at: int) -> str:
    return image[at : image.index(b"\0", at)].decode(errors="replace")


def _records(info: bytes, attribute: int) -> Iterator[tuple[int, int]]:
    """(symbol's index, number) of every record of an attribute."""
    at = 0
    while at + 4 <= len(info):
        form, kind, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form in _ALONE:
            continue
        if form == _SIZED and kind == attribute:
            yield struct.unpack_from("<II", info, at)
        at += size


# ---- machine code as text, where NVIDIA's disassembler is there -----------------------------------------------------


def disassembler() -> str | None:
    """nvdisasm on the PATH, or the one that triton's package brings; None without either."""
    if (found := shutil.which("nvdisasm")) is not None:
        return found
    place = locate("triton")
    beside = place.here and Path(place.location).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    return str(beside) if beside and beside.is_file() else None


def machine_code(content: bytes) -> str:
    """Instructions of every GPU image in ``content``, one a line. FileNotFoundError without nvdisasm."""
    program = disassembler()
    if program is None:
        raise FileNotFoundError("nvdisasm is not there: it comes with CUDA and with the package triton")
    texts = []
    for image in images(content):
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(image)
            file.flush()
            texts.append(subprocess.run([program, "-c", file.name], check=True, capture_output=True, text=True).stdout)
    return "\n".join(texts)
