"""The plans of a training run: what is pinned, what has been planned so far, and how that differs from an earlier plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...recipes import Problem, Recipe, RecipeError
from ...recipes.config import load_pins, load_records
from ..planner import plan_file
from ..planner.plan_file import Pin, Pins, PlanFileError
from ..planner.records import Records, gpu_name
from ..planner.report import planned_modules
from .build import Ranks, arch_of, plan_model

PLAN = "plan.json"
"""A checkpoint's plan file."""

_SAID_AT_ONCE = 5  # new regions that are named before the rest is counted


class RunPlans:
    """What one rank's layers are planned with. All ranks make it, and call each of its methods, together.

    ``pins``: the plan file in force (plan.file, or the checkpoint's), None where there is none or it has no pins for this arch.
    ``records``: the measured times that rank what it does not pin, as rank 0 reads them. Raises RecipeError on all ranks where
    plan.file or the records cannot be read.
    """

    def __init__(self, recipe: Recipe, ranks: Ranks, say: Callable[[str], None]) -> None:
        self._recipe, self._ranks, self._say = recipe, ranks, say
        self._arch = arch_of(ranks.device).name
        self._before: Pins | None = None  # the plan that this run's is compared with
        self._said: set[str] = set()
        self.pins = self._applying(self._from_rank_0(lambda: load_pins(recipe)))
        self.records: Records = self._from_rank_0(lambda: load_records(recipe))
        self._say_other_board()

    def _say_other_board(self) -> None:
        """Say where the records are of another arch, or of another board of it: their times then only resemble this one's."""
        records, here = self.records, gpu_name(self._ranks.device)
        if not records.rows:
            return
        if not records.of_arch(self._arch):
            self._say(f"{records.source}: measured on {', '.join(records.gpus())}, this run is on {self._arch}: they do not apply")
        elif here not in records.gpus(self._arch):
            self._say(f"{records.source}: measured on {', '.join(records.gpus(self._arch))}, this run is on {here}; 'layerplan tune' measures it")

    def _from_rank_0(self, read: Callable[[], Any]) -> Any:
        """What rank 0 reads: one plan for all ranks, whatever their file systems show. Raises RecipeError on all."""
        box: list[Any] = [None, None]
        if self._ranks.rank == 0:
            try:
                box[0] = read()
            except RecipeError as error:
                box[1] = error.problems
        dist.broadcast_object_list(box, src=0, group=self._ranks.control)
        if box[1]:
            raise RecipeError(box[1])
        return box[0]

    def _applying(self, pins: Pins | None) -> Pins | None:
        """``pins`` if they can hold in this run, else None, and that is said."""
        if pins is None:
            return None
        if not pins.of_arch(self._arch):
            self._say(f"{pins.source} has pins for {pins.written_for()}, this run is on {self._arch}: they do not apply")
            return None
        self._before = pins
        return pins

    def planned(self, model: torch.nn.Module) -> Pins:
        """What has been planned for ``model`` on all ranks so far: what a checkpoint's plan file holds."""
        own = plan_file.pins_of(p for _, m in planned_modules(model) for r in m.plan_runners() for p in r.plans())
        parts: list[Any] = [None] * self._ranks.world
        dist.all_gather_object(parts, own, group=self._ranks.control)
        return plan_file.merged(parts)

    def say_differences(self, model: torch.nn.Module) -> None:
        """Say regions whose engine or knobs are not those of the plan file that was in force, and new regions; each line once.
        Says nothing where there was no plan file."""
        before = self._before
        if before is None:
            return
        old, new, lines = before.of_arch(self._arch), [], []
        for key, pin in self.planned(model).of_arch(self._arch).items():
            runs = f"{'+'.join(pin.ops)} runs on {_shown(pin)}"
            if key not in old:
                new.append(f"plan differs from {before.source}: new region {runs}")
            elif (old[key].engine, dict(old[key].knobs)) != (pin.engine, dict(pin.knobs)):
                lines.append(f"plan differs from {before.source}: {runs}, was {_shown(old[key])}")
        new = [line for line in dict.fromkeys(new) if line not in self._said]
        lines += new[:_SAID_AT_ONCE]
        if len(new) > _SAID_AT_ONCE:
            lines.append(f"plan differs from {before.source}: {len(new) - _SAID_AT_ONCE} more new regions")
        for line in dict.fromkeys(lines):
            if line not in self._said:
                self._say(line)
        self._said.update(lines, new)

    def resume(self, folder: Path, model: torch.nn.Module) -> None:
        """Pin what the plan file of the checkpoint in ``folder`` says and plan ``model`` anew, unless the recipe names a file of its
        own or wants none: then that plan is what differences are said from. Raises RecipeError where a wanted one cannot be read."""
        recipe = self._recipe
        if recipe.plan.layers != "layerplan":
            return
        remedy = "set checkpoint.pin_plan=false to plan anew"

        def read() -> Pins:
            try:
                return plan_file.load(folder / PLAN, source=f"checkpoint {folder / PLAN}", remedy=remedy)
            except PlanFileError as error:
                problem = Problem("checkpoint.pin_plan", recipe.checkpoint.pin_plan, str(error), remedy)
                raise RecipeError([problem]) from None

        if recipe.checkpoint.pin_plan and recipe.plan.file is None:
            self.pins = self._applying(self._from_rank_0(read))
            plan_model(recipe, model, self.pins, self.records)
            return
        try:
            self._before = self._applying(self._from_rank_0(read))
        except RecipeError as error:
            self._say(f"{error.problems[0].rule}: what differs from it cannot be said")


def _shown(pin: Pin) -> str:
    return pin.engine + (f" with {dict(pin.knobs)}" if pin.knobs else "")
