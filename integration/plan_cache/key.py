"""The name of a compiled kernel: a SHA-256 over everything that changes its code, and over nothing else.

Not in it: tensors, paths, times of files, the machine's GPU. So two machines that hold the same sources and packages
give one name to the same kernel, and an entry can be carried from one to the other.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import importlib.util
import json
import platform
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engines.arch import Arch
from ..engines.packages import installed_version
from . import toolkit

if TYPE_CHECKING:  # it imports torch, which caches are read without
    from ..engines.contract import Kernel

FORMAT = 1  # of an entry's files: another number is another entry


class KernelError(RuntimeError):
    """A kernel of ours cannot be compiled or loaded; the message names it, the arch, the reason and the remedy."""


def chip(arch: Arch) -> str:
    """What the compiler calls ``arch``: from sm_90 on with the instructions of that arch alone, ``sm_90a``."""
    if not arch.is_gpu:
        raise KernelError(f"arch = {arch.name}: kernels are compiled for GPUs; name one such as sm_90")
    return f"{arch.name}a" if arch.capability >= (9, 0) else arch.name


@dataclasses.dataclass(frozen=True, slots=True)
class Keyed:
    """A kernel with its name. ``inputs`` is what the name is made of."""

    kernel: Kernel
    arch: str
    inputs: dict[str, Any] = dataclasses.field(hash=False)
    key: str

    @property
    def symbol(self) -> str:
        """The function's name in the compiled files: a file that was put in another's place does not have it."""
        return f"layerplan_{self.key[:32]}"

    def __str__(self) -> str:
        return label(self.kernel.target, self.kernel.constants)


def label(target: str, constants: Iterable[tuple[str, Any]]) -> str:
    """``norm.sm80.rms_norm:forward(dtype=bfloat16, width=4096)``."""
    named = ", ".join(f"{name}={value}" for name, value in constants)
    return f"{target.removeprefix('layerplan.kernels.')}({named})"


def keyed(kernel: Kernel, arch: Arch) -> Keyed:
    """``kernel`` for ``arch`` with its name. KernelError where its module is not there or a constant is not JSON."""
    inputs = {
        "format": FORMAT,
        "target": kernel.target,
        "constants": _constants(kernel),
        "sources": source_digest(kernel.target.partition(":")[0]),
        "arch": chip(arch),
        "dsl": installed_version("nvidia-cutlass-dsl"),
        "tvm_ffi": installed_version("apache-tvm-ffi"),
        "cuda": toolkit.major(),
        "machine": platform.machine(),
    }
    return Keyed(kernel, arch.name, inputs, digest(inputs))


def digest(inputs: dict[str, Any]) -> str:
    return hashlib.sha256(canonical(inputs).encode()).hexdigest()


def canonical(value: Any) -> str:
    """The one JSON text of a value. ValueError for what JSON does not know, TypeError for tensors and other objects."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True)


def _constants(kernel: Kernel) -> dict[str, Any]:
    constants = dict(kernel.constants)
    try:
        same = len(constants) == len(kernel.constants) and json.loads(canonical(constants)) == constants
    except (TypeError, ValueError):
        same = False
    if not same:  # a tuple would reach the compiler as a list: another value than the one that is named
        raise KernelError(
            f"{kernel.target}: constants = {kernel.constants}: must be (name, value) pairs of distinct names with JSON "
            "values: strings, finite numbers, booleans, None, lists and dictionaries of them"
        )
    return constants


# ---- sources ---------------------------------------------------------------------------------------------------------


@functools.cache
def source_digest(module: str) -> str:
    """SHA-256 over the names and texts of ``sources(module)``."""
    return digest(sources(module))


def sources(module: str) -> dict[str, str]:
    """Module -> source text: of ``module`` and, over any number of steps, of what it imports from its own package or
    from layerplan, wherever in its text the import stands. Nothing is imported for it."""
    roots = {"layerplan", module.partition(".")[0]}
    texts: dict[str, str] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in texts:
            continue
        file = source_file(name)
        if file is None:
            if name == module:
                raise KernelError(
                    f"{module}: its source file is not there; a target is module:function of an importable module"
                )
            continue  # a folder without __init__.py, or a name inside of a module
        texts[name] = file.read_text(encoding="utf-8")
        waiting += [n for n in _imported(texts[name], name, file.name == "__init__.py") if n.partition(".")[0] in roots]
    return texts


def _imported(text: str, module: str, is_package: bool) -> Iterator[str]:
    """Absolute names that a module may import; ``from a import b`` gives a and a.b."""
    parts = module.split(".")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = len(parts) - node.level + is_package
            base = ".".join([*(parts[:above] if node.level else ()), *([node.module] if node.module else ())])
            yield base
            yield from (f"{base}.{a.name}" for a in node.names)


def source_file(module: str) -> Path | None:
    """The file of an importable module, without importing it; None for what is not there and for a folder without
    ``__init__.py``."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:
        spec = None
    if spec is None:
        return None
    if not rest:
        return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
    folders = [Path(f) for f in spec.submodule_search_locations or ()]
    for part in rest[:-1]:
        folders = [f / part for f in folders if (f / part).is_dir()]
    found = (file for f in folders for file in (f / rest[-1] / "__init__.py", f / f"{rest[-1]}.py") if file.is_file())
    return next(found, None)
