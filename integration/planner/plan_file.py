"""Plan files: JSON that pins the engine of every region by its signature, and says what made it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..engines.manifest import BY_ID
from .planner import Plan

FORMAT = 1


class PlanFileError(ValueError):
    """A plan file that cannot be read or whose pins no longer fit."""


def to_json(plans: Iterable[Plan]) -> dict[str, Any]:
    pins: dict[str, dict[str, Any]] = {}
    archs = set()
    for p in plans:
        archs.add(p.arch.name)
        for part in (p.forward, p.backward):
            for r in part.regions if part else ():
                if r.engine != "runner":
                    pins[r.region.graph.signature()] = {"engine": r.engine, "ops": list(r.ops), "knobs": dict(r.offer.knobs)}
    return {"format": FORMAT, "archs": sorted(archs), "pins": dict(sorted(pins.items()))}


def save(path: Path, plans: Iterable[Plan]) -> None:
    """Write atomically: a reader sees the old file or the new one."""
    temporary = path.with_suffix(f"{path.suffix}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(to_json(plans), indent=1) + "\n")
    os.replace(temporary, path)


def load(path: Path) -> dict[str, str]:
    """Region signature -> engine id, for ``plan(pins=...)``. Raises PlanFileError naming the file and what is wrong."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PlanFileError(f"plan file {path}: cannot be read ({error}); write it again with layerplan plan --save") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("pins"), dict):
        raise PlanFileError(f"plan file {path}: format must be {FORMAT} with an object of pins; write it again")
    pins = {}
    for signature, pin in data["pins"].items():
        engine = pin.get("engine") if isinstance(pin, dict) else None
        if engine not in BY_ID:
            raise PlanFileError(f"plan file {path}: pin {signature}: engine {engine!r} is not in the manifest: {', '.join(BY_ID)}")
        pins[signature] = engine
    return pins
