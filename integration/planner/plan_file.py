"""Plan files: JSON that pins engine and knobs of every region, per arch, region signature and shape class.

    {"format": 2, "pins": {"sm_90": {"<signature>@<sizes of the token dims>": {
        "ops": ["bias_dropout_add", "rms_norm"], "edges": [[0, "y", 1, "x"]],
        "engine": "pointwise/inductor", "knobs": {}}}}}

``edges`` are the values that nodes of the region pass to each other: with them the planner finds the region again in a
graph that it would group in another way. Reading a file imports neither torch nor an engine.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engines.arch import ARCHS
from ..engines.manifest import BY_ID, MANIFEST
from . import json_file

if TYPE_CHECKING:
    from .planner import Plan

FORMAT = 2
_OPS = {op: None for e in MANIFEST for op in e.ops if op != "*"}  # all but collectives, which no engine runs


class PlanFileError(ValueError):
    """A plan file that cannot be read; names the file, the pin and the rule."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pin:
    """What one region ran on. ``edges``: (producing node's index, its port, reading node's index, its port)."""

    engine: str
    ops: tuple[str, ...]
    edges: tuple[tuple[int, str, int, str], ...] = ()
    knobs: tuple[tuple[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True)
class Pins:
    """The content of a plan file as a value that can be a key. ``rows`` are (arch, region key, pin), sorted.

    ``source`` and ``remedy`` are what messages say of it: whose pins they are, and what to do where one no longer fits.
    """

    rows: tuple[tuple[str, str, Pin], ...] = ()
    source: str = "the plan file"
    remedy: str = "write the plan file anew, or plan without it"

    @functools.cached_property
    def _by_arch(self) -> dict[str, dict[str, Pin]]:
        found: dict[str, dict[str, Pin]] = {}
        for arch, key, pin in self.rows:
            found.setdefault(arch, {})[key] = pin
        return found

    def archs(self) -> tuple[str, ...]:
        return tuple(self._by_arch)

    def written_for(self) -> str:
        """The archs as a message says them."""
        return ", ".join(self.archs()) or "no arch"

    def of_arch(self, arch: str) -> Mapping[str, Pin]:
        """Region key -> pin for one arch; empty where the file was written for others."""
        return self._by_arch.get(arch, {})

    def to_json(self) -> dict[str, Any]:
        pins = {
            arch: {
                key: {"ops": list(p.ops), "edges": [list(e) for e in p.edges], "engine": p.engine, "knobs": dict(p.knobs)}
                for key, p in rows.items()
            }
            for arch, rows in self._by_arch.items()
        }
        return {"format": FORMAT, "pins": pins}


def pins_of(plans: Iterable[Plan]) -> Pins:
    """Pins of the regions of ``plans``. Plans whose policy leaves no choice (references only, a forced engine) are left
    out, and so are regions that two modules run on different engines under different policies: those follow from the
    policies."""
    found: dict[tuple[str, str], set[Pin]] = {}
    for p in plans:
        if not p.policy.chooses:
            continue
        for part in (p.forward, p.backward):
            for r in part.regions if part else ():
                if r.engine != "runner":
                    pin = Pin(r.engine, r.ops, r.region.edges(), r.offer.knobs)
                    found.setdefault((p.arch.name, r.region.key()), set()).add(pin)
    return Pins(tuple(sorted((arch, key, *pins) for (arch, key), pins in found.items() if len(pins) == 1)))


def merged(parts: Iterable[Pins]) -> Pins:
    """Pins of several ranks as one. They agree where they name the same region: planning is the same on every rank."""
    rows = {(arch, key): pin for part in parts for arch, key, pin in part.rows}
    return Pins(tuple((arch, key, rows[arch, key]) for arch, key in sorted(rows)))


def save(path: Path, pins: Pins) -> None:
    """Write atomically: a reader sees the old file or the new one."""
    json_file.write(path, pins.to_json())


def load(path: str | Path, *, source: str | None = None, remedy: str | None = None) -> Pins:
    """The pins of a plan file. Raises PlanFileError naming the file and what is wrong with it."""
    name, path = source or f"plan file {path}", Path(path)
    data = json_file.read(path, name, PlanFileError)
    archs = data.get("pins") if isinstance(data, dict) and data.get("format") == FORMAT else None
    if isinstance(data, dict) and "records" in data and "pins" not in data:
        raise PlanFileError(f"{name}: holds records of 'layerplan tune', not pins: plan.records and records= take those")
    if not isinstance(archs, dict) or not all(isinstance(rows, dict) for rows in archs.values()):
        raise PlanFileError(f"{name}: must be an object of format {FORMAT} with pins per arch")
    unknown = sorted(set(archs) - set(ARCHS))
    if unknown:
        raise PlanFileError(f"{name}: arch {unknown[0]!r} is not one of {', '.join(ARCHS)}")
    rows = [(arch, key, _pin(f"{name}: pin {key}", row)) for arch, pins in archs.items() for key, row in pins.items()]
    return Pins(tuple(sorted(rows)), name, remedy or Pins.remedy)


def _pin(where: str, row: Any) -> Pin:
    fields = {"ops": list, "edges": list, "engine": str, "knobs": dict}
    if not isinstance(row, dict) or {k: type(v) for k, v in row.items()} != fields:
        raise PlanFileError(f"{where}: must hold ops, edges, engine and knobs, it is {row!r}")
    if row["engine"] not in BY_ID:
        raise PlanFileError(f"{where}: engine {row['engine']!r} is not in the manifest: {', '.join(BY_ID)}")
    ops, edges = row["ops"], row["edges"]
    if not ops or not all(isinstance(op, str) for op in ops):
        raise PlanFileError(f"{where}: ops must be names, at least one, they are {ops!r}")
    unknown = [op for op in ops if op not in _OPS]
    if unknown:
        close = difflib.get_close_matches(unknown[0], _OPS, 1)
        raise PlanFileError(f"{where}: ops = {ops!r}: no engine has an op {unknown[0]!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
    for edge in edges:
        typed = isinstance(edge, list) and [type(e) for e in edge] == [int, str, int, str]
        if not (typed and 0 <= edge[0] < edge[2] < len(ops)):
            raise PlanFileError(f"{where}: edge {edge!r} must be [producer, port, reader, port], "
                                f"producer < reader < {len(ops)}")  # fmt: skip
    for knob, value in row["knobs"].items():
        if not json_file.is_knob(value):
            raise PlanFileError(f"{where}: knob {knob} = {value!r}: {json_file.KNOB_RULE}")
    # JSON has lists where the engine gave tuples
    knobs = tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in row["knobs"].items())
    return Pin(row["engine"], tuple(ops), tuple(tuple(e) for e in edges), knobs)
