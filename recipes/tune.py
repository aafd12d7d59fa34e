"""Measuring the layers of a recipe: what ``layerplan tune`` runs."""

from __future__ import annotations

from pathlib import Path

import torch

from ..integration.engines.arch import Arch
from ..integration.planner import records as records_file
from ..integration.planner.records import Records, RecordsError, gpu_name
from ..integration.planner.tune import Tuned, tune
from ..integration.settings import launcher_environment
from .config import Recipe, load_records, refuse_unfit_world, refuse_without_plans
from .estimate import workloads


def tune_recipe(recipe: Recipe, out: Path, budget: float, device: str) -> Tuned:
    """Measure on ``device`` ("cuda" or "cpu") for about ``budget`` seconds and write ``out`` after each region, adding
    to what it holds. Plans are made with its records, or with the recipe's where it is not there yet.

    Raises ValueError where this machine or process cannot measure, RecordsError where ``out`` cannot be read or written
    or is of another GPU, RecipeError where the recipe's records cannot be read."""
    chosen = _device(recipe, device)
    name, there = gpu_name(chosen), out.exists()
    remedy = "name another file for --out"
    before = records_file.load(out, source=f"--out = {out}", remedy=remedy) if there else load_records(recipe)
    if there and before.gpus() not in ((), (name,)):
        raise RecordsError(
            f"--out = {out}: holds records of {', '.join(before.gpus())}, this is {name}; name another file"
        )

    def keep(records: Records) -> None:
        try:
            records_file.save(out, Records(tuple(r for r in records.rows if r.gpu == name)))
        except OSError as error:
            raise RecordsError(
                f"--out = {out}: cannot be written ({error.strerror}); name a file that can be"
            ) from None

    keep(before)  # what cannot be written is known before the work, not after it
    return tune(workloads(recipe), chosen, before=before, budget=budget, keep=keep)


def _device(recipe: Recipe, device: str) -> torch.device:
    refuse_without_plans(recipe, "measured")
    refuse_unfit_world(recipe)
    if device not in ("cuda", "cpu"):
        raise ValueError(f"--device = {device!r}: must be cuda or cpu")
    ranks = launcher_environment().get("WORLD_SIZE", "1")
    if ranks != "1":
        raise ValueError(
            f"WORLD_SIZE = {ranks}: tune measures one GPU in one process, which others would disturb; "
            "start it without a launcher"
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "--device = 'cuda': PyTorch sees no GPU here; run it on the GPU that you train on (layerplan doctor says "
            "what is in the way), or measure this CPU with --device cpu"
        )
    chosen = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
    here = Arch.of_device(-1 if device == "cpu" else chosen.index).name
    if recipe.plan.arch is not None and Arch.parse(recipe.plan.arch).name != here:
        raise ValueError(
            f"plan.arch = {recipe.plan.arch!r}: tune measures the device at hand, which is {here}; leave plan.arch "
            "out, or run it on that GPU"
        )
    return chosen
