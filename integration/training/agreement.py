"""Whether all ranks would plan, train and save the same: compared once, before anything is built.

Planning is a pure function and never communicates, so a rank with another version, arch, setting or recipe would run other
kernels, or wait in a collective that the others do not reach; one with other data would train on it without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch.distributed as dist

from layerplan import __version__

from ...recipes import Problem, Recipe, RecipeError
from ..engines.manifest import MANIFEST
from ..settings import settings
from .build import Ranks, arch_of
from .checkpoint import digest
from .indexed import DatasetError, check_dataset, tokenizer_path

_OF_A_RANK = ("data.prefix", "plan.file", "train.threads")  # paths of a machine, whose content is compared, and what changes no tensor
_SETTINGS = ("check", "policy", "deterministic")
_PACKAGES = ("torch", "triton", "megatron-core", "nvidia-cudnn-frontend", "quack-kernels", "flash-attn-4",
             "nvidia-cutlass-dsl")  # fmt: skip
_SECTIONS = ("model", "train", "optimizer", "parallel", "data", "schedule", "precision", "plan", "checkpoint")


def facts(recipe: Recipe, ranks: Ranks) -> dict[str, Any]:
    """Field -> value of everything that planning, the order of collectives and the samples depend on, apart from the plan
    file."""
    own = recipe.to_dict()
    found = {f"{s}.{k}": v for s in _SECTIONS for k, v in own[s].items() if f"{s}.{k}" not in _OF_A_RANK}
    found |= {f"environment: {name}": str(getattr(settings(), name)) for name in _SETTINGS}
    found |= {f"version of {p}": _version(p) for p in _PACKAGES}
    arch = arch_of(ranks.device).name
    found |= {f"engine {e.id}": "cannot run" if e.unusable() else "can run" for e in MANIFEST if arch in e.archs}
    return found | data_facts(recipe.data.prefix) | {"arch": arch, "version of layerplan": __version__}


def data_facts(prefix: str | None) -> dict[str, Any]:
    """What tells two prepared datasets apart without reading all tokens. A part that cannot be read is a value too: a rank that
    lacks it differs from those that have it, and where all lack it the check of the data says so on each."""

    def read(value: Callable[[], Any]) -> Any:
        try:
            return value()
        except (DatasetError, OSError) as error:
            return f"cannot be read ({type(error).__name__})"

    if prefix is None:
        return {}
    info = read(lambda: check_dataset(prefix))
    counts = info if isinstance(info, str) else f"{info.sequences} sequences, {info.documents} documents, {info.tokens} tokens"
    return {
        "data: counts": counts,
        "data: size of .bin": read(lambda: Path(f"{prefix}.bin").stat().st_size),
        "data: SHA-256 of .idx": read(lambda: digest(Path(f"{prefix}.idx"))),
        "data: SHA-256 of the tokenizer": read(lambda: digest(tokenizer_path(prefix))),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")


def compare_ranks(recipe: Recipe, ranks: Ranks) -> None:
    """Raises RecipeError on every rank, naming each field that differs and the ranks that hold each value."""
    own, everyone = facts(recipe, ranks), [None] * ranks.world
    dist.all_gather_object(everyone, own, group=ranks.control)
    problems = []
    for field in dict.fromkeys(f for one in everyone for f in one):
        holders: dict[str, list[int]] = {}
        for rank, one in enumerate(everyone):
            holders.setdefault(repr(one.get(field)), []).append(rank)
        if len(holders) > 1:
            held = ", ".join(f"{value} on rank {_listed(who)}" for value, who in holders.items())
            rule = f"differs between ranks: {held}"
            problems.append(Problem(field, own.get(field), rule, "start every rank with the same"))
    if problems:
        raise RecipeError(problems)
