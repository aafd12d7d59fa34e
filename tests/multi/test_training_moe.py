"""Recipes with experts, trained on a CPU: beside Megatron's own layers, across ranks, resumed, counted."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
from harness import run_ranks

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
STEPS = 20
LAYERS = ("layerplan", "megatron_local")
SMALL = (
    "model.hidden_size=32",
    "model.ffn_hidden_size=64",
    "model.seq_length=32",
    "model.moe_ffn_hidden_size=48",
    "model.moe_shared_expert_intermediate_size=32",
    "model.vocab_size=264",
    "train.global_batch=4",
    "train.micro_batch=1",
    "train.steps=5",
    "schedule.decay_steps=20",
    "schedule.warmup_steps=2",
)
LATENT = (
    "model.num_attention_heads=4",
    "model.num_query_groups=4",
    "model.kv_lora_rank=16",
    "model.qk_head_dim=8",
    "model.qk_pos_emb_head_dim=4",
    "model.v_head_dim=8",
    "model.num_experts=8",
    "parallel.expert=1",
    "model.num_layers=2",
    "precision.dtype=fp32",
)


def _recipe(name, prefix, directory, *more):
    from layerplan.recipes import load_recipe

    common = (
        f"data.prefix={prefix}",
        "train.threads=1",
        "logging.progress=false",
        "logging.plot=false",
        f"checkpoint.dir={directory or 'none'}",
    )
    return load_recipe(name, [*common, *more])


def _tiny(folder: str):
    """``moe_tiny`` as it is for 20 steps, on both kinds of layers; then smaller ones: resumed, with latent attention,
    counted."""
    from training_ranks import prepare_data, quiet, run

    quiet()
    work = Path(folder)
    prefix, out = prepare_data(work), {}
    for layers in LAYERS:
        recipe = _recipe(
            "moe_tiny", prefix, None, f"plan.layers={layers}", f"train.steps={STEPS}", f"logging.dir={work / layers}"
        )
        out[layers] = run(recipe)["rows"]
        out[f"{layers} log"] = _log(work / layers)
    for part, steps in (("whole", 5), ("parts", 3), ("parts", 5)):
        out[f"{part} {steps}"] = run(_recipe("moe_tiny", prefix, str(work / part), *SMALL, f"train.steps={steps}"))
    for policy in ("auto", "reference"):
        out[f"latent {policy}"] = run(
            _recipe("deepseek_v2_lite", prefix, None, *SMALL, *LATENT, f"plan.policy={policy}")
        )["rows"]
    out["models"] = _models(prefix)
    return out


def _log(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _models(prefix):
    """Parameters by the formula and of the built model, names of planned modules by the recipe and in the model."""
    from layerplan.integration.training.build import build_model, ranks_of, transformer_config
    from layerplan.modules.base import planned_names
    from layerplan.recipes.policies import module_names
    from layerplan.recipes.size import parameter_count

    found = []
    for name, extra in (
        ("moe_tiny", SMALL),
        ("deepseek_v2_lite", (*SMALL, *LATENT)),
        ("deepseek_v2_lite", (*SMALL, *LATENT, "model.q_lora_rank=12")),
    ):
        recipe = _recipe(name, prefix, None, *extra)
        with ranks_of(recipe):
            model = build_model(recipe, transformer_config(recipe))
            found.append(
                [
                    parameter_count(recipe),
                    sum(p.numel() for p in model.parameters()),
                    sorted(module_names(recipe)),
                    sorted(planned_names(model)),
                ]
            )
    return found


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    pytest.importorskip("megatron.core")
    return run_ranks("test_training_moe:_tiny", world=1, timeout=240, folder=str(tmp_path_factory.mktemp("tiny")))[0]


def _same(rows, wanted, tolerance=1e-5):
    assert rows.keys() == wanted.keys()
    for step, (loss, norm) in rows.items():
        assert math.isclose(loss, wanted[step][0], rel_tol=tolerance) and math.isclose(
            norm, wanted[step][1], rel_tol=10 * tolerance
        ), step


def test_moe_tiny_follows_megatrons_sequential_experts_over_20_steps_and_learns(tiny):
    assert len(tiny["layerplan"]) == STEPS
    _same(tiny["layerplan"], tiny["megatron_local"])
    assert tiny["layerplan"][str(STEPS)][0] < tiny["layerplan"]["1"][0] - 1


def test_metrics_hold_the_routers_losses(tiny):
    for ours, theirs in zip(tiny["layerplan log"], tiny["megatron_local log"], strict=True):
        for name in ("load_balancing_loss", "z_loss"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4)
        assert ours["load_balancing_loss"] >= 0.999, "1 where all experts are chosen alike"


def test_a_resumed_run_with_experts_equals_an_uninterrupted_one(tiny):
    whole, rest = tiny["whole 5"], tiny["parts 5"]
    assert rest["state"] == whole["state"] and rest["rows"] == {step: whole["rows"][step] for step in ("4", "5")}


def test_latent_attention_with_experts_learns_alike_on_engines_and_references(tiny):
    _same(tiny["latent auto"], tiny["latent reference"])
    assert tiny["latent auto"]["5"][0] < tiny["latent auto"]["1"][0]


def test_formula_and_names_of_recipes_are_those_of_the_built_models(tiny):
    for counted, built, names, found in tiny["models"]:
        assert counted == built and names == found


def _ranks(folder: str):
    import torch.distributed as dist
    from training_ranks import prepare_data, quiet, refused, run

    quiet()
    dist.init_process_group("gloo")
    work = Path(folder)
    if dist.get_rank() == 0:
        prepare_data(work)
    dist.barrier()
    prefix, out, expert = str(work / "text"), {}, ("parallel.expert=2",)
    for name, more in (
        ("alltoall", expert),
        ("allgather", (*expert, "parallel.dispatcher=allgather")),
        ("local", (*expert, "plan.layers=megatron_local")),
        ("tensor", ("parallel.tensor=2", "parallel.sequence=true", *expert, "parallel.expert_tensor=1")),
    ):
        out[name] = run(_recipe("moe_tiny", prefix, None, *SMALL, *more))["rows"]
    for layers in LAYERS:  # dense layers on the first stage, experts on both
        more = ("parallel.pipeline=2", "model.num_layers=4", f"plan.layers={layers}", f"logging.dir={work / layers}")
        out[f"pipeline {layers}"] = run(_recipe("moe_tiny", prefix, None, *SMALL, *more))["rows"]
        dist.barrier()
        out[f"log {layers}"] = _log(work / layers)
    run(_recipe("moe_tiny", prefix, str(work / "run"), *SMALL, *expert, "train.steps=3"))
    dist.barrier()
    out["resumed"] = run(_recipe("moe_tiny", prefix, str(work / "run"), *SMALL, *expert))["rows"]
    out["refused"] = refused(lambda: run(_recipe("moe_tiny", prefix, str(work / "run"), *SMALL, "train.steps=6")))
    return out


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    pytest.importorskip("megatron.core")
    return run_ranks("test_training_moe:_ranks", world=2, timeout=240, folder=str(tmp_path_factory.mktemp("ranks")))


@pytest.mark.parametrize("name", ["alltoall", "allgather"])
def test_experts_of_two_ranks_train_as_megatrons_do(ranks, name):
    for rank in ranks:
        _same(rank[name], rank["local"])


def test_stages_of_a_pipeline_share_the_routers_losses_in_the_log(ranks):
    for rank in ranks:
        logs = [rank[f"log {layers}"] for layers in LAYERS]
        assert len(logs[0]) == len(logs[1]) == 5
        for ours, theirs in zip(*logs, strict=True):
            for name in ("loss", "load_balancing_loss", "z_loss"):
                assert ours[name] == pytest.approx(theirs[name], rel=1e-4) and ours[name] > 0.9


def test_experts_train_beside_tensor_and_sequence_parallelism(ranks):
    for rank in ranks:
        losses = [loss for loss, _ in rank["tensor"].values()]
        assert all(map(math.isfinite, losses)) and losses[-1] < losses[0] - 0.1


def test_a_run_with_experts_of_two_ranks_resumes(ranks):
    for rank in ranks:
        assert rank["resumed"] == {step: rank["alltoall"][step] for step in ("4", "5")}


def test_moments_that_megatron_keeps_apart_are_refused_in_another_layout_by_name(ranks):
    for rank in ranks:
        assert "parallel.expert = 1: " in rank["refused"] and "holds the moments of experts apart" in rank["refused"]
