"""What ``layerplan cache`` does: show and check a cache, carry it to another machine, make room.

An archive is a plain tar file of the entries' files. Loading an entry runs its code, and a checksum says that a file is
whole, not whose it is: import archives, and use folders, of people whom you would let run code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import tarfile
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..engines.packages import installed_version
from .disk import TAKING, Entry, Fault, clear_left_overs, is_entry_file, place, read, remove, scan
from .key import FORMAT, KernelError, label

_MOST = 256 << 20  # bytes of one file that is taken from an archive: a hundred times what a kernel has
_COMING = 60.0  # seconds in which the files of an entry may still be coming into place


def write_archive(entries: Iterable[Entry], file: Path) -> int:
    """Writes the files of ``entries`` to a tar file, and how many entries there were. OSError where it cannot."""
    count = 0
    with tarfile.open(file, "w") as tar:
        for entry in entries:
            for suffix in (*entry.facts["files"], ".json"):
                tar.add(entry.file(suffix), arcname=entry.file(suffix).name, filter=_anonymous)
            count += 1
    return count


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def read_archive(file: Path, folder: Path) -> tuple[list[Entry], list[Fault], int]:
    """Takes the whole entries of an archive into ``folder``; (those, what was refused and why, how many were there
    already and are left alone). KernelError for what is no tar file; OSError where the folder cannot be written."""
    taken, refused, there = [], [], 0
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=TAKING) as unpacked:
        keys = _unpack(file, Path(unpacked), refused)
        for key in sorted(keys):
            if isinstance(read(folder, key, whole=True), Entry):
                there += 1
                continue
            entry = read(Path(unpacked), key, whole=True)
            if isinstance(entry, Entry):
                facts = {name: entry.facts[name] for name in ("seconds", "cpu", "resources")}
                taken.append(place(folder, key, entry.facts["inputs"], Path(unpacked), facts))
            else:
                refused.append(Fault(Path(key), entry or "no JSON beside it"))
    return taken, refused, there


def _unpack(file: Path, folder: Path, refused: list[Fault]) -> set[str]:
    """The files of an archive that have an entry's names, in ``folder``; their keys."""
    keys = set()
    try:
        with tarfile.open(file, "r:") as tar:
            for member in tar:
                name = Path(member.name)
                if not (member.isreg() and member.name == name.name and is_entry_file(name)):
                    refused.append(Fault(name, "no file of an entry"))
                elif member.size > _MOST:
                    refused.append(Fault(name, f"{member.size} bytes: larger than any kernel"))
                else:
                    (folder / name).write_bytes(tar.extractfile(member).read())
                    keys.add(name.stem)
    except tarfile.TarError as error:
        raise KernelError(f"{file}: is no tar file of 'layerplan cache export': {error}") from None
    return keys


@dataclasses.dataclass(frozen=True, slots=True)
class Listing:
    """What a folder holds: its whole entries, the latest used first, and files that are no part of one."""

    folder: Path
    entries: tuple[Entry, ...]
    faults: tuple[Fault, ...]

    def to_json(self) -> dict[str, Any]:
        kernels = [e.facts | {"bytes": e.nbytes, "used": _date(e.used)} for e in self.entries]
        return {"folder": str(self.folder), "kernels": kernels, "broken": [str(f) for f in self.faults]}

    def rows(self) -> list[tuple[str, ...]]:
        """A table of the entries, its heading first; a kernel's name, which is long, comes last."""
        rows = [("arch", "KiB", "seconds", "registers", "local bytes", "compiler", "used", "kernel")]
        for e in self.entries:
            inputs, used = e.facts["inputs"], e.facts["resources"].values()
            most = (f"{max((u[name] for u in used), default=0)}" for name in ("registers", "frame_bytes"))
            name = label(inputs["target"], inputs["constants"].items())
            size, version = f"{e.nbytes / 1024:.0f}", f"{inputs['dsl']} cu{inputs['cuda']}"
            rows.append((inputs["arch"], size, f"{e.facts['seconds']:.1f}", *most, version, _date(e.used), name))
        return rows

    @property
    def nbytes(self) -> int:
        return sum(e.nbytes for e in self.entries)


def listing(folder: Path) -> Listing:
    """What ``folder`` holds; nothing where it is not there."""
    entries, faults = scan(folder)
    return Listing(folder, tuple(entries), tuple(faults))


def _date(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).isoformat(sep=" ", timespec="minutes")


# ---- making room -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What ``prune`` removes: entries unused for more than ``days``, those of other versions of the compiler than the
    installed one (``other_versions``), and the longest unused until at most ``nbytes`` remain. None: no limit."""

    days: float | None = None
    nbytes: int | None = None
    other_versions: bool = False


def prune(folder: Path, limits: Limits) -> tuple[list[Entry], list[Fault]]:
    """Removes what ``limits`` say, and files that are no part of a whole entry: (entries, files) that are gone. OSError
    where the folder takes no changes."""
    entries, faults = scan(folder, whole=True)
    now, kept, gone = time.time(), 0, []
    for entry in entries:  # the newest first
        old = limits.days is not None and now - entry.used > limits.days * 86400
        other = limits.other_versions and not _of_this_version(entry)
        large = limits.nbytes is not None and kept + entry.nbytes > limits.nbytes
        if old or other or large:
            remove(entry)
            gone.append(entry)
        else:
            kept += entry.nbytes
    clear_left_overs(folder)
    broken = []
    for fault in faults:
        with contextlib.suppress(FileNotFoundError):
            if now - fault.path.stat().st_mtime > _COMING:
                fault.path.unlink()
                broken.append(fault)
    return gone, broken


def _of_this_version(entry: Entry) -> bool:
    inputs = entry.facts["inputs"]
    return (inputs["format"], inputs["dsl"], inputs["tvm_ffi"]) == (
        FORMAT,
        installed_version("nvidia-cutlass-dsl"),
        installed_version("apache-tvm-ffi"),
    )
