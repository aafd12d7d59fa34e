"""Whether a package is really there, by its code and without importing it; and how to install what is not."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
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


# what layerplan's own commands import: modules of the core requirements, and per extra those that it brings
CORE = ("torch", "numpy", "typer", "rich")
EXTRAS = {"megatron": ("megatron.core",), "train": ("tokenizers", "tensorboard", "matplotlib", "psutil")}
# module that an engine imports -> (what brings it, as an installer knows it; the extra of layerplan that asks for it)
_BROUGHT_BY = {"quack": ("quack-kernels", "peers"), "flash_attn.cute.cache_utils": ("flash-attn-4", "peers"),
               "transformer_engine": ("transformer-engine", "te"), "cutlass": ("nvidia-cutlass-dsl", ""),
               "tvm_ffi": ("apache-tvm-ffi", ""), "deep_gemm": ("deep-gemm", "")}  # fmt: skip
KNOWN_VERSIONS = {"quack-kernels": "0.6.5", "flash-attn-4": "4.0.0b36", "deep-gemm": "2.6.1"}
"""Packages whose functions change from one version to the next, internal ones most of all, with the version that they are known in:
another may take other arguments, or in another order, so the engines decline it."""
SOURCES = {"deep-gemm": "--no-build-isolation git+https://github.com/deepseek-ai/DeepGEMM@54e2261"}
"""What pip takes where a package's known version is on no index."""


def distribution(module: str) -> str:
    """The name under which the package that holds ``module`` is installed."""
    return _BROUGHT_BY.get(module, (module, ""))[0]


@functools.cache
def is_checkout() -> bool:
    """Whether this layerplan is a source tree with its pinned versions beside it: an editable install or a bare checkout."""
    import layerplan

    root = Path(layerplan.__file__).resolve().parents[1]
    return all((root / name).is_file() for name in ("pyproject.toml", "constraints.txt"))


def install_command(*extras: str) -> str:
    """What installs layerplan with ``extras``: in a checkout the README's command, to be run in its root; else by name."""
    wanted = f"[{','.join(extras)}]" if extras else ""
    if is_checkout():
        return f"pip install -c constraints.txt -e {f"'.{wanted}'" if wanted else '.'}"
    return f"pip install 'layerplan{wanted}'"


def remedy_for(module: str) -> str | None:
    """``install_command`` with the extra that brings ``module`` (of any depth), None where no requirement does."""
    root = module.partition(".")[0]
    if root in CORE:
        return install_command()
    extra = next((extra for extra, modules in EXTRAS.items() if root in {m.partition(".")[0] for m in modules}), None)
    return None if extra is None else install_command(extra)


def install_hint(module: str) -> str:
    """What installs a package that an engine needs."""
    name, extra = _BROUGHT_BY.get(module, (module, ""))
    return install_command(extra) if extra else f"pip install {SOURCES.get(name, name)}"


@functools.cache
def absence(module: str) -> str | None:
    """Why an engine that needs ``module`` cannot run, None where its code is there."""
    place = locate(module)
    if place.here:
        return _unknown_version(module)
    if place.state == "missing":
        return f"needs the package {distribution(module)!r}, which is not installed: {install_hint(module)}"
    return (f"needs the package {distribution(module)!r}, which is not installed: {place.location} is a folder of its module's name "
            f"without a package in it; {install_hint(module)}")  # fmt: skip


def installed_version(package: str) -> str | None:
    """The version of an installed package by its metadata, None where it has none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _unknown_version(module: str) -> str | None:
    """Why the package that is there is not the one that its engines know, None where it is, or where any version will do."""
    name = distribution(module)
    known, version = KNOWN_VERSIONS.get(name), installed_version(name)
    if known is None or (version is not None and version.partition("+")[0] == known):
        return None
    there = f"{version} is installed" if version else "what is installed has no metadata that says its version"
    return f"needs {name} {known}, the version whose functions it knows; {there}: {install_hint(module)}"


@functools.cache
def import_error(module: str) -> str | None:
    """Why ``module`` cannot be imported, None where it can; imports it."""
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever a broken package raises is a reason, not an end
        return f"{module!r} cannot be imported: {type(error).__name__}: {error}"
    return None
