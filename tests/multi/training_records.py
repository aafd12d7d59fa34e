"""Two ranks that train with measured times: rank 0's are those of all."""

from __future__ import annotations

from pathlib import Path

from training_ranks import prepare_documents, quiet, recipe_of, refused, run


def favouring(engine: str, recipe):
    """Records by which ``engine`` is the fastest wherever it offers, for the recipe's layers on a CPU."""
    from layerplan.integration.engines.arch import ARCHS
    from layerplan.integration.engines.manifest import BY_ID
    from layerplan.integration.planner.records import Record, Records, region_key, versions_of
    from layerplan.recipes.estimate import estimate_recipe

    rows = {}
    for graph in estimate_recipe(recipe, ARCHS["cpu"]).graphs:
        for region in (*graph.plan.forward.regions, *graph.plan.backward.regions):
            for c in region.candidates:
                if c.region is not None:
                    us = 1.0 if c.engine == engine else 1000.0
                    rows[region_key(c.region), c.engine] = Record(
                        "cpu",
                        "another CPU",
                        region_key(c.region),
                        region.ops,
                        c.engine,
                        (),
                        tuple(sorted(versions_of(BY_ID[c.engine]))),
                        us,
                        (us, us),
                    )
    return Records(tuple(rows.values()))


def prepare(folder: str) -> str:
    return prepare_documents(Path(folder))


def two_ranks(folder: str, prefix: str) -> dict:
    import torch.distributed as dist

    from layerplan.integration.planner import records
    from layerplan.integration.planner.report import report

    quiet()
    dist.init_process_group("gloo")
    rank, kept = dist.get_rank(), []
    file = Path(folder, f"records-{rank}.json")
    if rank == 0:
        records.save(file, favouring("reference/eager", recipe_of(prefix, None)))
    result = {}
    for name, extra in (("plain", ()), ("measured", (f"plan.records={file}",))):
        found = run(recipe_of(prefix, None, *extra, "train.steps=1"), change=kept.append)
        rows = report(kept.pop().built.gpt).rows
        result[name] = {
            "said": found["said"],
            "engines": sorted({r.engine for r in rows if r.ops == "linear"}),
            "measured": all(r.measured_us is not None for r in rows),
        }
    if rank == 0:
        file.write_text("{")
    result["broken"] = refused(lambda: run(recipe_of(prefix, None, f"plan.records={file}", "train.steps=1")))
    return result
