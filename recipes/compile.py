"""Compiling what a recipe's plans need, on a machine that may have no GPU: what ``layerplan compile`` runs."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..integration.engines.arch import Arch
from ..integration.engines.contract import BuildContext
from ..integration.plan_cache.ahead import CACHED, COMPILED, FAILED, KEPT, NOT_AHEAD, Done, compile_all, jobs_of
from ..integration.plan_cache.disk import Store
from ..integration.planner.planner import PlannedRegion, plan
from ..integration.planner.text import aligned
from .config import Recipe, load_pins, load_records, refuse_unfit_world, refuse_without_plans
from .estimate import workloads


@dataclasses.dataclass(frozen=True, slots=True)
class Compiled:
    """What became of each kernel that a recipe's plans need. ``libraries``: variables by which libraries find what they
    compiled, by arch."""

    recipe: str
    rows: tuple[Done, ...]
    seconds: float
    folder: Path | None
    libraries: dict[str, dict[str, str]]

    @property
    def failed(self) -> bool:
        return any(r.state == FAILED for r in self.rows)

    def to_json(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe,
            "folder": None if self.folder is None else str(self.folder),
            "seconds": round(self.seconds, 1),
            "kernels": [r.to_json() for r in self.rows],
            "libraries": self.libraries,
        }

    def __str__(self) -> str:
        own = [r for r in self.rows if r.state != NOT_AHEAD]
        table = [("arch", "state", "seconds", "registers", "local bytes", "kernel"), *map(_cells, own)]
        lines = aligned(table) if own else [f"{self.recipe}: its plans need no kernel that is compiled ahead"]
        lines += ["", *(f"{r.arch}: {r.name} does not compile: {r.note}" for r in own if r.state == FAILED)]
        rest = {}
        for r in self.rows:
            if r.state == NOT_AHEAD:
                rest.setdefault((r.engine, r.note), []).append(r.arch)
        lines += ["not compiled ahead"] if rest else []
        lines += [f"  {line}" for line in aligned((e, ", ".join(a), note) for (e, note), a in rest.items())]
        for arch, variables in self.libraries.items():
            lines.append(f"on {arch} set {' '.join(f'{n}={v}' for n, v in variables.items())}")
        count = {s: sum(r.state == s for r in own) for s in (CACHED, COMPILED, KEPT, FAILED)}
        lines.append(
            f"{count[COMPILED]} compiled, {count[CACHED]} were there, {count[KEPT]} kept by their libraries, "
            f"{count[FAILED]} failed, in {self.seconds:.0f} s; {self.folder or 'no cache folder'}"
        )
        return "\n".join(lines)


def _cells(row: Done) -> tuple[str, ...]:
    """A kernel's name is long: it comes last."""
    numbers = ("" if n is None else f"{n}" for n in (row.registers, row.frame_bytes))
    return row.arch, row.state, "" if row.seconds is None else f"{row.seconds:.1f}", *numbers, row.name


def compile_recipe(recipe: Recipe, archs: Sequence[Arch], workers: int, folders: tuple[Path, ...],
                   tell: Callable[[Done], None] = lambda done: None) -> Compiled:  # fmt: skip
    """Compiles for ``archs`` what the plans of ``recipe`` need, in training and in evaluation, into the first of
    ``folders``, in ``workers`` processes; ``tell`` hears of each kernel as it is done.

    Raises ValueError where nothing can be compiled, PlanError and RecipeError as ``estimate_recipe``."""
    refuse_without_plans(recipe, "compiled")
    refuse_unfit_world(recipe)
    began = time.monotonic()
    contexts = [
        (r.engine, BuildContext(r.region, arch, r.offer)) for arch in archs for r in planned_regions(recipe, arch)
    ]
    library = folders[0] / "libraries" if folders else None
    jobs, rest = jobs_of(contexts, library)
    store = Store(folders)
    if folders and not all(job.ready(store) for job in jobs):
        _refuse_without_room(folders[0])
    done = compile_all(jobs, store, workers, tell)
    kept = {r.engine for r in done if r.state == KEPT}
    libraries: dict[str, dict[str, str]] = {}
    for job in jobs:
        if job.engine in kept and job.variables:
            libraries.setdefault(job.arch.name, {}).update(job.variables)
    rows = sorted(done, key=lambda r: (r.arch, r.engine, r.name))
    folder = folders[0] if folders else None
    return Compiled(recipe.name, (*rows, *rest), time.monotonic() - began, folder, libraries)


def _refuse_without_room(folder: Path) -> None:
    """ValueError where the cache's folder takes no files: before the work, not once for each kernel behind it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"LAYERPLAN_CACHE: {folder}: takes no files ({error.strerror}); name a folder first that can be written") from None


def planned_regions(recipe: Recipe, arch: Arch) -> Iterator[PlannedRegion]:
    """Every region that the layers of ``recipe`` run on ``arch``: forward and backward in training, and the forward of
    evaluation, which saves nothing."""
    pins, records = load_pins(recipe), load_records(recipe)
    for w in workloads(recipe):
        made = plan(w.graph, arch, w.policy, pins=pins, records=records, **w.options)
        still = plan(w.graph, arch, w.policy, pins=pins, records=records)
        for part in (made.forward, made.backward, still.forward):
            yield from (r for r in part.regions if r.engine != "runner") if part is not None else ()
