"""Steps of tiny recipes under the tracker of allocations: run inside ranks."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from training_ranks import prepare_data, quiet, recipe_of


def peak_of(recipe) -> int:
    """The most bytes that are held in the second step of ``recipe`` on this rank: model, optimiser and all."""
    from layerplan.integration.training.build import ranks_of
    from layerplan.integration.training.trainer import Trainer
    from tests.cases.memory_tracker import Tracker, tracked_regions

    tracker = Tracker()
    with ranks_of(recipe) as ranks, tracked_regions(tracker), tracker:
        trainer = Trainer(recipe, ranks, say=lambda text: None)
        trainer.built.model.train()
        trainer.run_step()
        tracker.peak = 0
        trainer.run_step()
    return tracker.peak


def peaks(folder: str, cases: dict[str, list[str]]) -> dict[str, list]:
    """Case -> (peak of this rank, estimate, terms of the estimate)."""
    import torch.distributed as dist

    from layerplan.integration.engines.arch import Arch
    from layerplan.recipes.memory import memory_estimate

    quiet()
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        prepare_data(Path(folder))
    dist.barrier()
    found = {}
    for name, extra in cases.items():
        recipe = recipe_of(str(Path(folder) / "text"), None, *extra)
        memory = memory_estimate(recipe, Arch.parse("cpu"), dist.get_world_size())
        found[name] = [peak_of(recipe), memory.total, memory.terms()]
    return found
