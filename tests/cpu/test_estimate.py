"""Plans of whole recipes, without a GPU."""

import time

import pytest
import torch

import layerplan
from layerplan.integration.engines.arch import Arch
from layerplan.recipes import RECIPES, load_recipe
from layerplan.recipes.estimate import estimate_recipe

torch.set_num_threads(1)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "cpu"])
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_plans_for_every_arch(name, arch):
    found = estimate_recipe(load_recipe(name, []), Arch.parse(arch))
    assert found.step_seconds > 0
    assert all(r["engine"] for g in found.to_json()["graphs"] for r in g["regions"])


@pytest.mark.parametrize("name", ["llama3_8b", "llama3_70b"])
def test_llama3_never_runs_a_reference_on_hopper(name):
    found = estimate_recipe(load_recipe(name), Arch.parse("sm_90"))
    engines = {r["engine"] for g in found.to_json()["graphs"] for r in g["regions"]}
    assert not any(e.startswith("reference/") for e in engines), engines


def test_text_of_a_plan_says_why_a_reference_runs_on_a_gpu():
    text = str(estimate_recipe(load_recipe("gpt_tiny"), Arch.parse("sm_90")))
    part = text.partition("reference   plain PyTorch runs\n")[2].splitlines()
    assert part[0] == "  sdpa, sdpa_bwd in norm + self attention, because"
    (dtype,) = [line for line in part if "dtype float32: bfloat16 and float16 only" in line]
    assert dtype.split(":")[0].strip() == "attention/torch_cudnn, attention/torch_flash, attention/fa4, attention/fa4_deterministic"
    assert any("attention/torch_cpu:" in line and "has no code for sm_90" in line for line in part)
    held = str(estimate_recipe(load_recipe("gpt_tiny", ["plan.per_module=*.mlp=reference"]), Arch.parse("sm_90")))
    assert "swiglu" in held and "in norm + mlp (reference), because\n      policy is reference\n" in held


@pytest.mark.parametrize(("name", "arch"), [("gpt_125m", "sm_90"), ("gpt_tiny", "cpu")])
def test_text_of_a_plan_holds_no_reasons_where_none_are_needed(name, arch):
    assert "reference   " not in str(estimate_recipe(load_recipe(name), Arch.parse(arch)))


def test_planning_cost_depends_on_distinct_graphs_and_not_on_layers():
    recipe = load_recipe("llama3_8b", [])
    deep = load_recipe("llama3_8b", ["model.num_layers=128"])
    arch = Arch.parse("sm_90")
    estimate_recipe(recipe, arch)  # the engines' modules are imported by now
    few, many = (min(_cpu_ms(r, arch) for _ in range(5)) for r in (recipe, deep))
    assert len(estimate_recipe(deep, arch).graphs) == len(estimate_recipe(recipe, arch).graphs)
    assert few < 50
    assert many < 2 * few


def test_the_output_layer_takes_what_torchs_products_are_said_to_take():
    recipe, arch = load_recipe("llama3_8b"), Arch.parse("sm_90")
    m, t = recipe.model, recipe.train
    shapes = {"x": ((m.seq_length * t.micro_batch, m.hidden_size), "bfloat16"), "weight": ((m.vocab_size // recipe.parallel.tensor, m.hidden_size), "bfloat16")}
    found = layerplan.explain("linear", shapes, arch, engine="linear/torch")
    regions = [found.candidates, *(candidates for _, candidates in found.backward)]
    assert len(regions) == 3
    seconds = sum(c.seconds for candidates in regions for c in candidates if c.chosen)
    assert estimate_recipe(recipe, arch).outside_seconds == pytest.approx(seconds, rel=1e-6)
    assert estimate_recipe(load_recipe("llama3_8b", ["plan.loss=chunked"]), arch).outside_seconds == 0.0


def _cpu_ms(recipe, arch):
    start = time.process_time()  # CPU time: what else the machine does must not count
    estimate_recipe(recipe, arch)
    return (time.process_time() - start) * 1e3


@pytest.mark.parametrize(("name", "arch", "world", "head", "time_on"), [
    ("qwen3_30b_a3b", "sm_90", None, "on sm_90, 16 ranks (2 pipeline stages: the layers of one, loss of the last): ", "a step on 16 GPUs ("),
    ("llama3_8b", "sm_90", 4, "on sm_90, 4 ranks: ", "a step on 4 GPUs ("), ("gpt_tiny", "sm_90", None, "on sm_90, 1 rank: ", "a step on 1 GPU ("),
    ("gpt_tiny", "cpu", None, "on cpu, 1 rank: ", "a step on 1 process ("),
])  # fmt: skip
def test_a_plan_says_for_how_many_ranks_and_stages_it_is(name, arch, world, head, time_on):
    found = estimate_recipe(load_recipe(name), Arch.parse(arch), world)
    first, *_, last = str(found).splitlines()
    assert head in first and time_on in last
    assert (found.to_json()["ranks"], found.to_json()["stages"]) == (found.ranks, load_recipe(name).parallel.pipeline)


def test_time_scales_with_layers():
    arch = Arch.parse("sm_90")
    once = estimate_recipe(load_recipe("llama3_8b", []), arch).step_seconds
    twice = estimate_recipe(load_recipe("llama3_8b", ["model.num_layers=64"]), arch).step_seconds
    assert 1.7 < twice / once < 2.1
