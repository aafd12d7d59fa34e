"""Scenarios of one rank beside those of ``training_ranks``: plan files and pins, fused weight gradients, evaluation."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

from training_ranks import DROPOUT, EVALUATED, prepare_documents, recipe_of, refused, run, seal

PINNED = ("model.hidden_dropout=0.1",)  # attention with dropout runs on the reference anyway
MATCHING = {
    "fp32": (), "bf16": ("precision.dtype=bf16",), "dropout": DROPOUT, "unfused": ("plan.gradient_accumulation_fusion=false",),
    "biases": ("model.normalization=LayerNorm", "model.activation=gelu", "model.linear_bias=true", "model.qk_norm=true"),
    "recompute": ("plan.recompute=selective", "plan.recompute_modules=layernorm,core_attn"),
    "chunked": ("plan.loss=chunked",), "megatron_loss": ("plan.loss=megatron",),
}  # fmt: skip
"""Recipes whose plans made without a model must name every region that training them runs."""


@contextlib.contextmanager
def attention_answers(answer):
    """``answer(offer)`` in place of the CPU attention's offer, and every graph planned anew."""
    from layerplan.integration.engines.manifest import BY_ID
    from layerplan.integration.planner import runner

    engine = type(BY_ID["attention/torch_cpu"].load())
    match = engine.match
    engine.match = lambda self, region, arch: answer(match(self, region, arch))
    kept = dict(runner._plans)
    runner._plans.clear()
    try:
        yield
    finally:
        engine.match = match
        runner._plans.clear()
        runner._plans.update(kept)


def engines_of(checkpoint: Path) -> dict[str, list[str]]:
    """Ops of a region -> engines that the checkpoint's plan file pins it to."""
    found: dict[str, set[str]] = {}
    for pin in json.loads((checkpoint / "plan.json").read_text())["pins"]["cpu"].values():
        found.setdefault("+".join(pin["ops"]), set()).add(pin["engine"])
    return {ops: sorted(engines) for ops, engines in found.items()}


def pinned_runs(work: Path, prefix: str) -> dict:
    """A run of three steps that goes on to five after ranking has changed, or the pinned engine has gone."""
    from dataclasses import replace

    from layerplan.integration.engines.contract import Decline

    whole = run(recipe_of(prefix, str(work / "pin-whole"), *PINNED))
    run(recipe_of(prefix, str(work / "pin"), *PINNED, "train.steps=3"))

    def slow(offer):
        return offer if isinstance(offer, Decline) else replace(offer, efficiency=1e-9)

    def resumed(name, *more):
        shutil.copytree(work / "pin", work / name, ignore=shutil.ignore_patterns("step_0000005"))
        return run(recipe_of(prefix, str(work / name), *PINNED, *more))

    with attention_answers(slow):
        kept = resumed("pin-kept")
        free = resumed("pin-free", "checkpoint.pin_plan=false")
    with attention_answers(lambda offer: Decline("it was taken out")):
        gone = refused(lambda: resumed("pin-gone"))
        without = resumed("pin-without", "checkpoint.pin_plan=false")
    last = "step_0000005"
    return {
        "kept": kept, "whole": whole, "free": free, "gone": gone, "without": without["said"],
        "kept_engines": engines_of(work / "pin-kept" / last), "free_engines": engines_of(work / "pin-free" / last),
        "new_region": resumed("pin-new", "plan.gradient_accumulation_fusion=false")["said"],
        "other_policy": resumed("pin-reference", "plan.policy=reference")["said"],
    }  # fmt: skip


def damaged_plans(work: Path, prefix: str) -> dict:
    """A checkpoint whose plan file was changed by hand, and sealed again."""
    source = work / "pin" / "step_0000003"
    found = {}
    for name, text in (("half", "{"), ("old", '{"format": 1, "pins": {}}'), ("other_arch", None)):
        folder = work / f"pin-{name}" / source.name
        shutil.copytree(source, folder)
        plan = json.loads((source / "plan.json").read_text())
        plan["pins"] = {"sm_90": plan["pins"]["cpu"]}
        (folder / "plan.json").write_text(text or json.dumps(plan))
        seal(folder)
    for name in ("half", "old"):
        found[name] = refused(lambda name=name: run(recipe_of(prefix, str(work / f"pin-{name}"), *PINNED)))
    found["half_unpinned"] = run(recipe_of(prefix, str(work / "pin-half"), *PINNED, "checkpoint.pin_plan=false"))["said"]
    found["other_arch"] = run(recipe_of(prefix, str(work / "pin-other_arch"), *PINNED))["said"]
    return found


def plan_files(work: Path, prefix: str) -> dict:
    """Plan files made from a recipe, without a model, pinning the training of that recipe."""
    from layerplan.integration.engines.arch import ARCHS
    from layerplan.integration.planner import plan_file
    from layerplan.recipes.estimate import estimate_recipe

    found = {}
    for name, extra in MATCHING.items():
        file = work / f"{name}.plan.json"
        plan_file.save(file, estimate_recipe(recipe_of(prefix, None, *extra), ARCHS["cpu"]).pins())
        found[name] = run(recipe_of(prefix, None, *extra, f"plan.file={file}", "train.steps=1"))["said"]
    (work / "broken.json").write_text("[]")
    found["broken"] = refused(lambda: run(recipe_of(prefix, None, f"plan.file={work / 'broken.json'}")))
    found["absent"] = refused(lambda: run(recipe_of(prefix, None, f"plan.file={work / 'absent.json'}")))
    plan_file.save(work / "sm_90.json", estimate_recipe(recipe_of(prefix, None), ARCHS["sm_90"]).pins())
    found["foreign"] = run(recipe_of(prefix, None, f"plan.file={work / 'sm_90.json'}", "train.steps=1"))["said"]
    return found


def fused_weight_gradients(prefix: str) -> dict:
    """The same five steps with and without gradient_accumulation_fusion; and how many weights were really added in place."""

    def counted(*extra):
        added = []

        def change(trainer):
            step = trainer.built.optimizer.step

            def stepping():
                added.append(sum(bool(p.grad_added_to_main_grad) for p in trainer.built.gpt.parameters()))
                return step()

            trainer.built.optimizer.step = stepping

        return run(recipe_of(prefix, None, *DROPOUT, *extra), change=change) | {"added": added}

    cases = {"fp32": (), "bf16": ("precision.dtype=bf16",), "tied": ("model.tie_embeddings=true",), "chunked": ("plan.loss=chunked",), "megatron_local": ("plan.layers=megatron_local",)}
    off = "plan.gradient_accumulation_fusion=false"
    return {name: {"fused": counted(*extra), "plain": counted(*extra, off)} for name, extra in cases.items()}


def evaluations(work: Path) -> dict:
    prefix = prepare_documents(work)
    cases = {"fp32": DROPOUT, "overlap": (*DROPOUT, "parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true", "precision.dtype=bf16")}
    found = {}
    for name, extra in cases.items():
        without = run(recipe_of(prefix, None, EVALUATED[0], *extra))
        folder = str(work / f"evaluated-{name}")
        first = run(recipe_of(prefix, folder, *EVALUATED, *extra, "train.steps=3"))
        second = run(recipe_of(prefix, folder, *EVALUATED, *extra, "logging.plot=true", "logging.tensorboard=true"))
        whole = run(recipe_of(prefix, None, *EVALUATED, *extra))
        found[name] = {"without": without, "whole": whole, "first": first, "second": second, "metrics": Path(folder, "metrics.jsonl").read_text()}
        found[name]["drawn"] = [Path(folder, "loss.png").exists(), any(Path(folder, "tensorboard").iterdir())]
    found["sparse_log"] = run(recipe_of(prefix, str(work / "sparse"), *EVALUATED, "logging.every_steps=5"))["validation"]
    found["sparse_metrics"] = Path(work, "sparse", "metrics.jsonl").read_text()
    found["too_many"] = refused(lambda: run(recipe_of(prefix, None, *EVALUATED, "train.eval_batches=1000")))
    found["nan"] = refused(lambda: run(recipe_of(prefix, str(work / "nan-evaluated"), *EVALUATED, "checkpoint.every_steps=1"), change=_nan_evaluation))
    found["nan_left"] = sorted(p.name for p in (work / "nan-evaluated").glob("step_*"))
    return found


def _nan_evaluation(trainer):
    loss_of = trainer.loss_of
    trainer.loss_of = lambda out, batch: loss_of(out if out.requires_grad else out * float("nan"), batch)


def rope_bases() -> list[float]:
    """The first step of the rotary frequencies for a base that is no whole number: what the recipe says, and what was built."""
    from layerplan.integration.training.build import build_model, ranks_of, transformer_config

    recipe = recipe_of("none", None, "model.rope_base=12345.75")
    with ranks_of(recipe):
        model = build_model(recipe, transformer_config(recipe))
        return [12345.75 ** (-2 / recipe.model.head_width), float(model.rotary_pos_emb.inv_freq[1])]
