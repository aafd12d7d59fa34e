"""layerplan: the layers of a Megatron model, planned onto the best kernels for the GPU at hand.

``layerplan.ops`` holds the functions, ``layerplan.explain`` says what would run and why, ``layerplan.report`` what ran,
``layerplan.warm`` makes a model's plans ready before the first step.
Importing this package imports neither torch nor megatron.
"""

from __future__ import annotations

import sys

# a checkout on PYTHONPATH meets any Python: this file is syntax that older ones read too
if sys.version_info < (3, 12):  # noqa: UP036
    _this = ".".join(map(str, sys.version_info[:2]))
    raise ImportError("layerplan needs Python 3.12 or newer; this is " + _this + " (" + sys.executable + ")")

import importlib
from pathlib import Path as _Path

__version__ = "0.1.0"
__all__ = ["Arch", "Policy", "__version__", "apply_policy", "compare", "explain", "ops", "plan", "report", "warm"]

_LAZY = {
    "Arch": ("integration.engines.arch", "Arch"),
    "Policy": ("integration.planner.policy", "Policy"),
    "apply_policy": ("modules.base", "apply_policy"),
    "compare": ("integration.planner.compare", "compare"),
    "explain": ("integration.planner.explain", "explain"),
    "ops": ("integration.ops", None),
    "plan": ("integration.planner.planner", "plan"),
    "report": ("integration.planner.report", "report"),
    "warm": ("modules.warm", "warm"),
}

_root = _Path(__file__).resolve().parent
if not (_root / "integration" / "__init__.py").exists():
    # a checkout without symbolic links (a ZIP download): the four folders stand beside this one
    __path__.append(str(_root.parent))


def __getattr__(name: str):
    if name not in _LAZY:
        raise AttributeError(f"module 'layerplan' has no attribute {name!r}; it has {', '.join(__all__)}")
    module, attribute = _LAZY[name]
    loaded = importlib.import_module(f"layerplan.{module}")
    return loaded if attribute is None else getattr(loaded, attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
