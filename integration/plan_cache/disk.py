"""Where compiled kernels are kept: a folder of entries, each named by its key.

An entry is ``KEY.o``, ``KEY.so`` where a linker was there, and ``KEY.json``, which says what the key was made of and
the size and SHA-256 of the files. Files come into place whole, by renaming, the JSON last. Whatever does not agree with
its JSON (cut short, another's, of another format) is not there for a reader, and the next compile replaces it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import toolkit
from .key import FORMAT, digest
from .lock import Lock

SUFFIXES = (".o", ".so", ".json")
_MAKING, TAKING = "layerplan-compile-", "layerplan-import-"  # temporary folders: a cache's folder may hold others'
_HEX = frozenset("0123456789abcdef")
_ROOM = 8 << 20  # bytes that the files of an entry find room in, with what the linker makes beside them
_LEFT_OVER = 3600.0  # seconds after which a temporary folder or a lock is a dead process's: no compile takes that long


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A whole entry. ``facts`` is what its JSON holds: ``inputs`` (of the key), ``files`` (suffix -> bytes and sha256),
    ``resources`` (of each device function), ``seconds`` (that compiling took), ``cpu`` (the level that its host code
    needs), ``created``."""

    key: str
    folder: Path
    facts: dict[str, Any]

    def file(self, suffix: str) -> Path:
        return self.folder / f"{self.key}{suffix}"

    @property
    def shared_object(self) -> Path | None:
        return self.file(".so") if ".so" in self.facts["files"] else None

    @property
    def nbytes(self) -> int:
        return sum(f["bytes"] for f in self.facts["files"].values())

    @property
    def used(self) -> float:
        """When it was last loaded, or made: seconds since 1970."""
        return self.file(".json").stat().st_mtime


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """A file of a cache that is no part of a whole entry, and why."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class Store:
    """The folders in which entries are looked up, in this order; new ones go into the first alone. A folder that cannot
    be written serves what it has."""

    def __init__(self, folders: tuple[Path, ...]) -> None:
        self.folders = folders

    def find(self, key: str) -> Entry | None:
        """The whole entry of ``key``; None where there is none, or only one whose host code needs a newer CPU."""
        for folder in self.folders:
            entry = read(folder, key)
            if isinstance(entry, Entry) and entry.facts["cpu"] <= toolkit.cpu_level():
                return entry
        return None

    @contextlib.contextmanager
    def locked(self, key: str) -> Iterator[bool]:
        """Holds ``key`` against every other process. False, holding nothing, where the first folder takes no files."""
        lock = None
        if self.folders:
            try:
                self.folders[0].mkdir(parents=True, exist_ok=True)
                lock = Lock(self.folders[0] / f"{key}.lock")
            except OSError:  # read-only, full, or not a folder
                pass
        try:
            yield lock is not None
        finally:
            if lock is not None:
                lock.release()

    def publish(self, key: str, inputs: dict[str, Any], made: Path, **facts: Any) -> Entry | None:
        """Puts ``made/KEY.o`` and, where it is there, ``made/KEY.so`` into the first folder; ``facts`` go into the
        JSON. None where the folder takes nothing, or there is none."""
        try:
            return place(self.folders[0], key, inputs, made, facts)
        except (OSError, IndexError):
            return None

    @contextlib.contextmanager
    def workshop(self) -> Iterator[Path]:
        """An empty folder to make files in: on the file system of the first folder where that can be written and has
        room, else where temporary files go."""
        root = None
        with contextlib.suppress(OSError, IndexError):
            root = self.folders[0] / "tmp"
            root.mkdir(parents=True, exist_ok=True)
            clear_left_overs(self.folders[0])
        if root is not None and not (os.access(root, os.W_OK) and shutil.disk_usage(root).free >= _ROOM):
            root = None
        with tempfile.TemporaryDirectory(dir=root, prefix=_MAKING, ignore_cleanup_errors=True) as folder:
            yield Path(folder)


def place(folder: Path, key: str, inputs: dict[str, Any], made: Path, facts: dict[str, Any]) -> Entry:
    """Moves the files of an entry into ``folder``. OSError where it takes none."""
    files = {s: described(file) for s in SUFFIXES[:2] if (file := made / f"{key}{s}").is_file()}
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    whole = {"format": FORMAT, "key": key, "inputs": inputs, "files": files, "created": created, **facts}
    text = made / f"{key}.json"
    text.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    for suffix in (*files, ".json"):
        os.replace(made / f"{key}{suffix}", folder / f"{key}{suffix}")
    if ".so" not in files:
        (folder / f"{key}.so").unlink(missing_ok=True)  # of an entry that this one replaces
    return Entry(key, folder, whole)


def described(file: Path) -> dict[str, Any]:
    """What a JSON says of a file: its size and SHA-256."""
    content = file.read_bytes()
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def read(folder: Path, key: str, *, whole: bool = False) -> Entry | str | None:
    """The entry of ``key`` in ``folder``, None where there is none, or why it is not whole. Of the files only the one
    that would be loaded is read, all of them with ``whole``."""
    try:
        facts = json.loads((folder / f"{key}.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return f"its JSON cannot be read: {error}"
    if (why := misfit(facts, key)) is not None:
        return why
    files = facts["files"]
    for suffix in (s for s in SUFFIXES[:2] if s in files and (whole or s == (".so" if ".so" in files else ".o"))):
        try:
            found = described(folder / f"{key}{suffix}")
        except OSError as error:
            return f"{key}{suffix} cannot be read: {error.strerror}"
        if found != files[suffix]:
            sizes = f"{found['bytes']} of {files[suffix]['bytes']} bytes"
            return f"{key}{suffix} is not the file that its JSON describes ({sizes})"
    return Entry(key, folder, facts)


def misfit(facts: Any, key: str) -> str | None:
    """Why a JSON is not that of the entry ``key``; None where it is."""
    try:
        if facts["format"] != FORMAT:
            return f"format {facts['format']}; this version reads {FORMAT}"
        if facts["key"] != key or digest(facts["inputs"]) != key:
            return "its key is not the one that its inputs make"
        described_all = all(
            isinstance(f["bytes"], int) and isinstance(f["sha256"], str) for f in facts["files"].values()
        )
        if ".o" not in facts["files"] or not set(facts["files"]) <= {".o", ".so"} or not described_all:
            return "it does not describe its files"
        numbers = isinstance(facts["seconds"], int | float) and isinstance(facts["cpu"], int)
        if not isinstance(facts["resources"], dict) or not numbers:
            return "it does not say what its kernels use"
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        return f"its JSON is not that of an entry: {type(error).__name__}: {error}"
    return None


def touch(entry: Entry) -> None:
    """Notes that an entry was used, for ``prune``; where it cannot be noted, nothing is."""
    with contextlib.suppress(OSError):
        if time.time() - entry.used > 3600:
            os.utime(entry.file(".json"))


# ---- what a person asks of a cache ----------------------------------------------------------------------------------


def scan(folder: Path, *, whole: bool = False) -> tuple[list[Entry], list[Fault]]:
    """Every entry of a folder, the newest first, and every file of an entry that is not whole. Files without the name of
    an entry's are somebody else's."""
    entries, faults = [], []
    files = sorted(f for f in folder.iterdir() if is_entry_file(f)) if folder.is_dir() else []
    keys = sorted({f.stem for f in files})
    for key in keys:
        found = read(folder, key, whole=whole)
        if isinstance(found, Entry):
            entries.append(found)
        else:
            reason = found or "no JSON beside it: a compile was cut off before its end"
            faults += [Fault(f, reason) for f in files if f.stem == key]
    return sorted(entries, key=lambda e: -e.used), faults


def is_entry_file(file: Path) -> bool:
    """Whether a file has the name of one of an entry's."""
    return file.suffix in SUFFIXES and _is_key(file.stem)


def _is_key(name: str) -> bool:
    return len(name) == 64 and set(name) <= _HEX


def remove(entry: Entry) -> None:
    """Removes the files of an entry, the JSON first. OSError where the folder takes no changes."""
    for suffix in reversed(SUFFIXES):
        entry.file(suffix).unlink(missing_ok=True)


def clear_left_overs(folder: Path) -> None:
    """Removes temporary folders and locks of processes that are gone; by their names, since a cache may have been put
    into a folder with other things."""
    locks = [f for f in folder.glob("*.lock") if _is_key(f.stem) and not _young(f.with_suffix(".lease"))]
    temporary = (*(folder / "tmp").glob(f"{_MAKING}*"), *folder.glob(f"{TAKING}*"))
    for old in (f for f in (*temporary, *locks) if not _young(f)):
        with contextlib.suppress(OSError):
            if old.suffix == ".lock":
                old.unlink()
                old.with_suffix(".lease").unlink(missing_ok=True)
            else:
                shutil.rmtree(old, ignore_errors=True)


def _young(file: Path) -> bool:
    try:
        return time.time() - file.stat().st_mtime < _LEFT_OVER
    except OSError:
        return False
