"""Records: JSON of measured times that ranking reads in place of predictions; ``layerplan tune`` writes it.

    {"format": 1, "records": [{
        "arch": "sm_90", "gpu": "NVIDIA H200", "versions": {"torch": "2.11.0"},
        "region": "<signature>@<sizes of the token dims>", "ops": ["linear"], "engine": "linear/torch", "knobs": {},
        "microseconds": 312.4, "quartiles": [311.9, 313.0], "error": null}]}

A region's key is its signature and its shape class, token dims rounded up to a power of two, as in plan files, but
without which of its inputs are parameters: a kernel does not see that, and the functional API has none. A row with an
``error`` and no time is an engine that failed there or gave a wrong result: it is never ranked. Reading a file imports
neither torch nor an engine."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engines.arch import ARCHS
from ..engines.manifest import BY_ID, Entry
from ..engines.packages import distribution, installed_version
from ..settings import settings
from . import json_file

if TYPE_CHECKING:
    from ..engines.contract import Region

FORMAT = 1
Knobs = tuple[tuple[str, Any], ...]
log = logging.getLogger("layerplan")
_said: set[str] = set()


class RecordsError(ValueError):
    """A file of records that cannot be read or written; names the file, the row and the rule."""


def packages_of(entry: Entry) -> tuple[str, ...]:
    """The packages whose versions decide whether a time of this engine still holds: torch for what ships with it, else
    the engine's own."""
    return tuple(distribution(m) for m in entry.needs if m != "torch" or len(entry.needs) == 1)


@functools.cache
def installed(package: str) -> str:
    """A package's version without the part that names a build (``2.11.0+cu130``): planning without a GPU reads the same
    records."""
    return (installed_version(package) or "not installed").partition("+")[0]


def versions_of(entry: Entry) -> tuple[tuple[str, str], ...]:
    """(package, version) of torch and of the engine's packages, as a row holds them."""
    return tuple((p, installed(p)) for p in dict.fromkeys(("torch", *packages_of(entry))))


def region_key(region: Region) -> str:
    """What a region's times are found by."""
    return dataclasses.replace(region, graph=dataclasses.replace(region.graph, weights=frozenset())).key()


def plain_knobs(knobs: Iterable[tuple[str, Any]]) -> Knobs:
    """Knobs as a key: sorted by name, lists as tuples (JSON has no others)."""
    return tuple(sorted((k, tuple(v) if isinstance(v, list) else v) for k, v in knobs))


def gpu_name(device: Any) -> str:
    """What a row calls the hardware of a torch.device: the name that its vendor gives it."""
    if device.type != "cuda":
        try:
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        except OSError:
            lines = []
        return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "cpu")
    import torch

    return torch.cuda.get_device_name(device)


def short_name(gpu: str) -> str:
    """A GPU's name as a reason says it."""
    return gpu.removeprefix("NVIDIA ")


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """What one engine took for one region: the median and the quartiles in microseconds. ``error``: why there is no
    time."""

    arch: str
    gpu: str
    region: str
    ops: tuple[str, ...]
    engine: str
    knobs: Knobs = ()
    versions: tuple[tuple[str, str], ...] = ()
    microseconds: float | None = None
    quartiles: tuple[float, float] | None = None
    error: str | None = None

    @property
    def key(self) -> tuple[str, str, str, str, Knobs]:
        """What a newer measurement replaces."""
        return self.arch, self.gpu, self.region, self.engine, self.knobs

    def equals(self, other: Record) -> bool:
        """Whether the quartiles of two times overlap: the difference is noise."""
        (low, high), (least, most) = self.quartiles, other.quartiles
        return low <= most and least <= high

    def stale(self) -> str | None:
        """Why the row does not count here: another version of the engine's package. None where it counts."""
        then = dict(self.versions)
        for package in packages_of(BY_ID[self.engine]):
            if then[package] != installed(package):
                return f"{package} {then[package]}, here it is {installed(package)}"
        return None

    def to_json(self) -> dict[str, Any]:
        """Field -> plain value."""
        return {
            **dataclasses.asdict(self),
            "ops": list(self.ops),
            "knobs": {k: list(v) if isinstance(v, tuple) else v for k, v in self.knobs},
            "versions": dict(self.versions),
            "quartiles": None if self.quartiles is None else list(self.quartiles),
        }


@dataclasses.dataclass(frozen=True)
class Records:
    """Rows of a file as a value that can be a key: equal for equal rows, whatever their ``source`` (what messages say
    of it)."""

    rows: tuple[Record, ...] = ()
    source: str = dataclasses.field(default="the records", compare=False)

    def __hash__(self) -> int:
        return hash(self.digest)

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the rows: equal on two ranks that rank alike."""
        return hashlib.sha256(json.dumps([r.to_json() for r in self.rows], sort_keys=True).encode()).hexdigest()

    @functools.cached_property
    def _by_arch(self) -> dict[str, tuple[dict[tuple[str, str, Knobs], Record], dict[tuple[str, str, Knobs], str]]]:
        """Arch -> (rows that count, why others do not), both by (region, engine, knobs)."""
        found: dict[str, tuple[dict, dict]] = {}
        for r in self.rows:
            fresh, old = found.setdefault(r.arch, ({}, {}))
            key = r.region, r.engine, r.knobs
            why = r.stale()
            if why is not None:
                old[key] = why
            # of two boards' the one with an error, else the faster one's
            elif key not in fresh or (r.microseconds or 0.0) < (fresh[key].microseconds or 0.0):
                fresh[key] = r
        return found

    def find(self, arch: str, region: str, engine: str, knobs: Iterable[tuple[str, Any]]) -> Record | None:
        """The row that counts for an engine with these knobs in a region, None where there is none."""
        fresh, _ = self._by_arch.get(arch, ({}, {}))
        return fresh.get((region, engine, plain_knobs(knobs)))

    def stale(self, arch: str, region: str, engine: str, knobs: Iterable[tuple[str, Any]]) -> str | None:
        """Why a row that is there does not count, which is logged once for all rows of ``arch`` that share the reason;
        None where none is there, or one counts."""
        fresh, old = self._by_arch.get(arch, ({}, {}))
        key = region, engine, plain_knobs(knobs)
        why = None if key in fresh else old.get(key)
        if why is not None:
            count = sum(w == why for w in old.values())
            _say_once(
                f"{self.source}: {count} records of {arch} do not count: they are of {why}; run 'layerplan tune' again"
            )
        return why

    def of_arch(self, arch: str) -> bool:
        """Whether any row is of ``arch``, whether or not it counts."""
        return arch in self._by_arch

    def gpus(self, arch: str | None = None) -> tuple[str, ...]:
        """Names of the GPUs that the rows (of ``arch``) are of."""
        return tuple(sorted({r.gpu for r in self.rows if arch in (None, r.arch)}))

    def merged(self, newer: Iterable[Record]) -> Records:
        """These rows with ``newer`` ones, which replace those of the same GPU, region, engine and knobs."""
        rows = {r.key: r for r in (*self.rows, *newer)}
        return Records(tuple(rows[k] for k in sorted(rows, key=repr)), self.source)

    def to_json(self) -> dict[str, Any]:
        """What a file holds."""
        return {"format": FORMAT, "records": [r.to_json() for r in self.rows]}


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        log.warning(text)


def save(path: Path, records: Records) -> None:
    """Write atomically: a reader sees the old file or the new one."""
    json_file.write(path, records.to_json())


def load(path: str | Path, *, source: str | None = None, remedy: str = "write it anew with 'layerplan tune'") -> Records:
    """The records of a file. Raises RecordsError naming the file and what is wrong with it; ``remedy``: what it says to
    do where the file holds something else, empty for a caller that says so itself."""
    name, path = source or f"records file {path}", Path(path)
    data = json_file.read(path, name, RecordsError)
    rows = data.get("records") if isinstance(data, dict) and data.get("format") == FORMAT else None
    if not isinstance(rows, list):
        rule = f"must be an object of format {FORMAT} with a list of records"
        if isinstance(data, dict) and "pins" in data:
            rule = "is a plan file, not records: plan.file and pins= take those"
        raise RecordsError(f"{name}: {rule}{f'; {remedy}' if remedy else ''}")
    return Records((), name).merged(_record(f"{name}: record {i}", row) for i, row in enumerate(rows))


def _record(where: str, row: Any) -> Record:
    fields = [f.name for f in dataclasses.fields(Record)]
    if not isinstance(row, dict) or sorted(row) != sorted(fields):
        raise RecordsError(f"{where}: must hold {', '.join(fields)}, it is {row!r}")

    def demand(ok: bool, field: str, rule: str) -> None:
        if not ok:
            raise RecordsError(f"{where}: {field} = {row[field]!r}: {rule}")

    def strings(value: Any) -> bool:
        return isinstance(value, list) and bool(value) and all(isinstance(v, str) for v in value)

    def time(value: Any) -> bool:
        return type(value) in (int, float) and 0 < value <= sys.float_info.max  # an int of JSON may be larger

    for field in ("arch", "gpu", "region"):
        demand(isinstance(row[field], str) and bool(row[field]), field, "must be a name")
    demand(row["arch"] in ARCHS, "arch", f"must be one of {', '.join(ARCHS)}")
    demand(strings(row["ops"]), "ops", "must be names, at least one")
    demand(
        isinstance(row["engine"], str) and row["engine"] in BY_ID,
        "engine",
        f"is not in the manifest: {', '.join(BY_ID)}",
    )
    demand(isinstance(row["knobs"], dict), "knobs", "must be an object")
    demand(all(map(json_file.is_knob, row["knobs"].values())), "knobs", f"each {json_file.KNOB_RULE}")
    wanted, given = packages_of(BY_ID[row["engine"]]), row["versions"]
    holds = isinstance(given, dict) and all(isinstance(v, str) for v in given.values()) and set(wanted) <= set(given)
    demand(holds, "versions", f"must hold the versions of {', '.join(wanted)}")
    us, quartiles, error = row["microseconds"], row["quartiles"], row["error"]
    demand(error is None or (isinstance(error, str) and bool(error)), "error", "must be null or a text")
    demand(
        (us is None) != (error is None) and (us is None or time(us)),
        "microseconds",
        "must be a number above 0, or null beside an error",
    )
    pair = (
        isinstance(quartiles, list)
        and len(quartiles) == 2
        and all(map(time, quartiles))
        and quartiles[0] <= quartiles[1]
    )
    demand(
        quartiles is None if us is None else pair,
        "quartiles",
        "must be two numbers above 0, the lower first, and null beside an error",
    )
    return Record(
        row["arch"],
        row["gpu"],
        row["region"],
        tuple(row["ops"]),
        row["engine"],
        plain_knobs(row["knobs"].items()),
        tuple(sorted(given.items())),
        us,
        None if quartiles is None else tuple(quartiles),
        error,
    )


@functools.cache
def _of_environment(path: str, remedy: str) -> Records:
    return load(path, source=f"LAYERPLAN_RECORDS = {path}", remedy=remedy)


def default_records(*, remedy: str = "write it anew with 'layerplan tune', or unset it") -> Records:
    """What LAYERPLAN_RECORDS names, read once; no rows where it is not set. Raises RecordsError where the file cannot
    be read; ``remedy`` as in ``load``."""
    path = settings().records
    return NONE if path is None else _of_environment(path, remedy)


def given_records(value: Records | str | Path | None) -> Records:
    """Records from a file's path, from Records, or from None (what the environment says)."""
    if value is None:
        return default_records()
    if isinstance(value, str | Path):
        return load(value)
    if isinstance(value, Records):
        return value
    raise TypeError(f"records = {type(value).__name__}: must be a records file's path, Records, or None")


NONE = Records()
"""No records: every time is predicted."""
