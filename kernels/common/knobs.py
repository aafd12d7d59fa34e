"""Knobs of a plan file, held against those that an engine has."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any


def names_reason(given: Collection[str], known: Collection[str], needed: Collection[str]) -> str | None:
    """Why knobs with these names cannot be run with, None where they can."""
    there = f"there are {', '.join(known) or 'none'}"
    if unknown := [name for name in given if name not in known]:
        return f"knob {unknown[0]}: the engine has none of this name; {there}"
    if missing := [name for name in needed if name not in given]:
        return f"knob {missing[0]}: is not given; {there}, and {', '.join(needed)} must be given"
    return None


def given_knobs[T](kind: type[T], knobs: tuple[tuple[str, Any], ...]) -> T | str:
    """The knobs of a plan file as ``kind``, a dataclass of ints and bools; what is wrong with their names or types
    where something is."""
    values, types = dict(knobs), {f.name: f.type for f in dataclasses.fields(kind)}
    needed = [f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING]
    if (reason := names_reason(values, types, needed)) is not None:
        return reason
    wrong = next((name for name, value in values.items() if type(value).__name__ != types[name]), None)
    return kind(**values) if wrong is None else f"knob {wrong} = {values[wrong]!r}: must be of type {types[wrong]}"
