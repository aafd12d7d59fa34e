"""Whether all ranks would plan, train and save the same: compared once, before anything is built. What planning itself reads is
``planner.agreement``'s; a rank with other data would train on it without a word."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...recipes import Recipe, RecipeError
from ..megatron.agreement import megatron_facts
from ..planner import agreement
from ..planner.plan_file import Pins
from ..planner.records import Records
from .build import Ranks, arch_of
from .checkpoint import digest
from .indexed import DatasetError, check_dataset, tokenizer_path

_OF_A_RANK = ("data.prefix", "plan.file", "plan.records", "train.threads")  # paths of a machine, whose content is compared, and what changes no tensor
_SECTIONS = ("model", "train", "optimizer", "parallel", "data", "schedule", "precision", "plan", "checkpoint")


def facts(recipe: Recipe, ranks: Ranks) -> dict[str, Any]:
    """Field -> value of everything that planning, the order of collectives and the samples depend on, apart from the plan
    file and plan.records, which all ranks have from rank 0; LAYERPLAN_RECORDS is read on each, for what runs beside the model."""
    own = recipe.to_dict()
    found = {f"{s}.{k}": v for s in _SECTIONS for k, v in own[s].items() if f"{s}.{k}" not in _OF_A_RANK}
    planning = agreement.planning_facts(arch_of(ranks.device)) | megatron_facts()
    del planning["policy"]  # the environment's: the recipe's own holds, field by field
    return found | planning | data_facts(recipe.data.prefix)


def compare_ranks(recipe: Recipe, ranks: Ranks) -> dict[str, Any]:
    """The facts that all ranks share. Raises RecipeError on every rank, naming each field that differs and the ranks that hold each
    value."""
    own = facts(recipe, ranks)
    try:
        agreement.compare(own, ranks.control)
    except agreement.RanksDifferError as error:
        raise RecipeError(error.problems) from None
    return own


def run_digest(shared: dict[str, Any], pins: Pins | None, records: Records) -> str:
    """SHA-256 of what ``compare_ranks`` returned, with the plan file and the measured times that are in force."""
    return agreement.digest(shared | agreement.file_facts(pins, records))


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
