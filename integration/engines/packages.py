"""Whether a package is really there, by its code and without importing it."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """``state``: ``here``, ``missing``, or ``look-alike`` for a folder of the name on the path that holds no package: Python imports
    it as an empty namespace. ``location``: the module's file, or that folder."""

    state: str
    location: str | None = None

    @property
    def here(self) -> bool:
        return self.state == "here"


def locate(module: str) -> Place:
    """Where ``import module`` would find it. ``a.b`` is looked up inside of ``a`` without importing ``a``."""
    top, *rest = module.split(".")
    spec, name = _find(top), top
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return Place("missing")
        name, folders = f"{name}.{part}", list(spec.submodule_search_locations)
        try:
            spec = PathFinder.find_spec(name, folders)
        except KeyError:  # a folder without a package: its path is that of a parent which is not imported
            return Place("look-alike", next(str(f) for folder in folders if (f := Path(folder, part)).is_dir()))
    if spec is None:
        return Place("missing")
    if spec.origin is None:
        return Place("look-alike", next(iter(spec.submodule_search_locations or ()), None))
    return Place("here", spec.origin)


def _find(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ValueError:  # a module without a spec was put into sys.modules by hand
        return None


@functools.cache
def absence(module: str) -> str | None:
    """Why an engine that needs ``module`` cannot run, None where its code is there."""
    place = locate(module)
    if place.here:
        return None
    if place.state == "missing":
        return f"needs the package {module!r}, which is not installed"
    return f"needs the package {module!r}, which is not installed: {place.location} is a folder of that name without a package in it"


@functools.cache
def import_error(module: str) -> str | None:
    """Why ``module`` cannot be imported, None where it can; imports it."""
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever a broken package raises is a reason, not an end
        return f"{module!r} cannot be imported: {type(error).__name__}: {error}"
    return None
