"""Policies per module, recipes against the environment, and every mistake of a launch in one list."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import layerplan
from layerplan.integration import settings as settings_module
from layerplan.integration.engines.arch import Arch
from layerplan.integration.planner.policy import Policy
from layerplan.modules.norm import Norm
from layerplan.recipes import Problem, RecipeError, load_recipe
from layerplan.recipes.estimate import estimate_recipe
from layerplan.recipes.policies import module_names, modules_of, policy_of

torch.set_num_threads(1)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def environment(monkeypatch):
    """Sets LAYERPLAN_* variables; what was read of them before is forgotten, and again afterwards."""

    def forget():
        settings_module.settings.cache_clear()
        settings_module.given.cache_clear()

    def use(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        forget()

    yield use
    monkeypatch.undo()
    forget()


def problems(*overrides):
    with pytest.raises(RecipeError) as caught:
        load_recipe("gpt_tiny", overrides)
    return [(p.field, p.value, p.rule, p.remedy) for p in caught.value.problems]


# ---- patterns -------------------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.ModuleDict({"norm": Norm(8), "inner": Norm(8)}) for _ in range(2)])
        self.final, self.hidden = Norm(8), Norm(8)
        self.hidden.run_by_parent()


def modes(model):
    return {n: m.__dict__["_policy"].mode for n, m in model.named_modules() if "_policy" in m.__dict__}


def test_a_pattern_sets_the_modules_that_it_matches_and_no_other():
    model = Model()
    layerplan.apply_policy(model, Policy(per_module=(("layers.0.norm", "strict"), ("*.norm", "reference"))))
    found = modes(model)
    assert (found["layers.0.norm"], found["layers.1.norm"], found["layers.0.inner"], found["final"]) == ("strict", "reference", "auto", "auto")


@pytest.mark.parametrize(("pattern", "words"), [
    ("*.nrom", ["'*.nrom'", "matches no layerplan module", "did you mean *.norm"]),
    ("layers.2.norm", ["'layers.2.norm'", "did you mean layers.1.norm or layers.0.norm"]),
    ("*.zzzzzzzz", ["'*.zzzzzzzz'", "modules end in norm, inner, final"]),
    ("hidden", ["'hidden'", "matches no layerplan module"]),  # its parent's plan runs it: a policy of its own would be lost
])  # fmt: skip
def test_a_pattern_that_matches_no_module_is_an_error_with_close_names_and_sets_nothing(pattern, words):
    model = Model()
    with pytest.raises(ValueError, match="per_module") as caught:
        layerplan.apply_policy(model, {"*.inner": "reference", pattern: "reference"})
    assert all(word in str(caught.value) for word in words), caught.value
    assert "'*.inner'" not in str(caught.value) and modes(model) == {}


def test_every_pattern_that_holds_for_nothing_is_named_and_a_hidden_one_says_why():
    with pytest.raises(ValueError, match="per_module") as caught:
        layerplan.apply_policy(Model(), Policy(per_module=(("layers.*", "reference"), ("*.inner", "strict"), ("nothing", "strict"))))
    lines = str(caught.value).splitlines()
    assert len(lines) == 2 and "'*.inner'" in lines[0] and "taken by an earlier pattern" in lines[0] and "'nothing'" in lines[1]


def test_names_that_differ_from_the_models_own_can_be_given():
    model = Model()
    layerplan.apply_policy(model, {"stage.layers.1.*": "reference"}, rename=lambda name: f"stage.{name}")
    assert modes(model) == {n: "reference" if n.startswith("layers.1.") else "auto" for n in modes(model)}


# ---- recipes --------------------------------------------------------------------------------------------------------


def test_a_recipe_takes_patterns_and_the_last_equals_sign_parts_them():
    recipe = load_recipe("gpt_tiny", ["plan.per_module=decoder.layers.0.*=reference, *.mlp=strict", "plan.deterministic=true"])
    made = policy_of(recipe)
    assert made == Policy(deterministic=True, per_module=(("decoder.layers.0.*", "reference"), ("*.mlp", "strict")))
    assert made.for_module("decoder.layers.0.mlp").mode == "reference" and made.for_module("decoder.layers.2.mlp").mode == "strict"
    assert type(recipe).from_dict(recipe.to_dict()) == recipe


@pytest.mark.parametrize(("rows", "value", "rule", "remedy"), [
    ("*.mpl=reference", "*.mpl=reference", "matches no layerplan module", "did you mean *.mlp"),
    ("decoder.layers.9.mlp=strict", "decoder.layers.9.mlp=strict", "matches no layerplan module", "did you mean decoder.layers."),
    ("*=reference,*.mlp=strict", "*.mlp=strict", "taken by an earlier pattern", "put it before the wider one"),
    ("*.mlp=fast", "*.mlp=fast", "PATTERN=POLICY with a policy of auto, strict, reference", "*.mlp=reference"),
    ("*.mlp", "*.mlp", "PATTERN=POLICY", "*.mlp=reference"),
    ("=strict", "=strict", "PATTERN=POLICY", "*.mlp=reference"),
    ("*.mlp=strict,*.mlp=auto", "*.mlp=auto", "given twice", "drop one"),
    ("*.linear_fc1=strict", "*.linear_fc1=strict", "matches no layerplan module", "modules end in"),
])  # fmt: skip
def test_a_wrong_pattern_of_a_recipe_is_a_problem_with_rule_and_remedy(rows, value, rule, remedy):
    ((field, found, why, cure),) = problems(f"plan.per_module={rows}")
    assert (field, found) == ("plan.per_module", value) and rule in why and remedy in cure


def test_patterns_for_layers_that_layerplan_does_not_run_are_refused():
    ((field, _, rule, _),) = problems("plan.per_module=*.mlp=strict", "plan.layers=megatron_local")
    assert field == "plan.per_module" and "runs no plans" in rule


def test_the_estimate_plans_each_layer_under_its_own_policy():
    arch = Arch.parse("sm_90")
    plain = estimate_recipe(load_recipe("llama3_8b"), arch)
    mixed = estimate_recipe(load_recipe("llama3_8b", ["plan.per_module=decoder.layers.[01].mlp=reference"]), arch)
    counts = {g.name: (g.times, {r["engine"] for r in g.plan.choices()}) for g in mixed.graphs if "mlp" in g.name}
    layers = next(g.times for g in plain.graphs if "mlp" in g.name)
    (both, own) = counts["norm + mlp"], counts["norm + mlp (reference)"]
    assert (both[0], own[0]) == (layers - 2, 2) and own[1] - {"runner"} == {"reference/eager"}
    assert "reference/eager" not in both[1] and mixed.step_seconds > plain.step_seconds
    assert "norm + mlp (reference)" in str(mixed) and len(mixed.graphs) == len(plain.graphs) + 1


def test_every_graph_of_the_estimate_belongs_to_modules_that_patterns_can_name():
    recipe = load_recipe("gpt_tiny", ["model.qk_norm=true"])
    names = set(module_names(recipe))
    for graph in estimate_recipe(recipe, Arch.parse("cpu")).graphs:
        assert set(modules_of(recipe, graph.kind)) <= names, graph.name
    assert len(names) == 2 * recipe.model.num_layers + 2
    for name, per_layer in (("moe_tiny", 2 * 5 + 2), ("deepseek_v2_lite", 26 * 9 + 6)):
        recipe = load_recipe(name)
        kinds = {graph.kind for graph in estimate_recipe(recipe, Arch.parse("cpu")).graphs}
        assert {n for kind in kinds for n in modules_of(recipe, kind)} == set(module_names(recipe))
        assert len(module_names(recipe)) == per_layer + 2


# ---- the environment ------------------------------------------------------------------------------------------------


def test_a_variable_that_says_another_policy_than_the_recipe_is_a_problem_with_both_values(environment):
    environment(LAYERPLAN_POLICY="strict", LAYERPLAN_DETERMINISTIC="1")
    found = {field: (value, rule, remedy) for field, value, rule, remedy in problems()}
    assert found == {
        "plan.policy": ("auto", "the environment says LAYERPLAN_POLICY=strict", "unset LAYERPLAN_POLICY or set plan.policy=strict"),
        "plan.deterministic": (False, "the environment says LAYERPLAN_DETERMINISTIC=true",
                               "unset LAYERPLAN_DETERMINISTIC or set plan.deterministic=true"),
    }  # fmt: skip
    assert load_recipe("gpt_tiny", ["plan.policy=strict", "plan.deterministic=true"]).plan.policy == "strict"


def test_a_variable_set_to_the_default_still_says_something(environment):
    environment(LAYERPLAN_POLICY="auto")
    assert load_recipe("gpt_tiny").plan.policy == "auto"
    ((field, value, rule, _),) = problems("plan.policy=reference")
    assert (field, value) == ("plan.policy", "reference") and "LAYERPLAN_POLICY=auto" in rule


def test_a_wrong_variable_is_among_the_problems_of_the_recipe(environment):
    environment(LAYERPLAN_POLICY="fastest", LAYERPLAN_LOGG="info")
    found = problems("train.step=3")
    assert [f for f, *_ in found].count("environment") == 2 and "train.step" in [f for f, *_ in found]
    assert any("must be one of auto, strict, reference" in rule for _, _, rule, _ in found)
    assert any("did you mean LAYERPLAN_LOG?" in rule for _, _, rule, _ in found)


# ---- all at once ----------------------------------------------------------------------------------------------------

WRONG = {
    "train.stepz=3": "did you mean train.steps?",
    "precision.dtype=fp8": "must be one of fp32, bf16",
    "plan.per_module=*.mpl=reference": "did you mean *.mlp?",
    "parallel.tensor=3": "must be a multiple of parallel.tensor = 3",
    "plan.policy=strictly": "must be one of auto, strict, reference",
    "plan.deterministic=true": None,
    "plan.file=no_such_plan.json": "no such file",
    "data.prefix=no_such_data": "no such file",
    "checkpoint.every_steps=5": "set checkpoint.dir=PATH",
    "plan.arch=sm_91": "did you mean",
}


def test_a_dry_run_without_a_gpu_lists_every_mistake_with_field_value_reason_and_fix(tmp_path):
    env = {**os.environ, "LAYERPLAN_DETERMINISTIC": "0", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-m", "layerplan", "pretrain", "gpt_tiny", *WRONG, "--dry-run"], capture_output=True, text=True,
                          timeout=120, env=env, cwd=tmp_path)  # fmt: skip
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    lines = done.stderr.splitlines()
    count = int(re.search(r"(\d+) problems", lines[0]).group(1))
    assert count == len(lines) - 1 >= len(WRONG)
    for override, fix in WRONG.items():
        field, _, value = override.partition("=")
        mine = [line for line in lines if line.startswith(f"  {field} = ")]
        if field == "parallel.tensor":  # the fields that it does not divide
            mine = [line for line in lines if fix in line and line.startswith("  model.")]
            assert len(mine) == 4, lines
        elif fix is not None:
            assert mine and all(value in line for line in mine) and fix in mine[0], f"{field}: {lines}"
    assert any("plan.deterministic = True" in line and "LAYERPLAN_DETERMINISTIC=false" in line for line in lines)
    assert all("; " in line for line in lines[1:]), "each has a rule and a remedy"


def test_one_problem_of_a_file_and_none_of_the_recipe_are_listed_with_megatrons(monkeypatch):
    pytest.importorskip("megatron.core")
    from layerplan.integration.training import launch

    def refuses(recipe):
        raise RecipeError([Problem("recipe", recipe.name, "Megatron-Core refuses it", "change the field it names")])

    monkeypatch.setattr(launch, "_check_megatron", refuses)  # a recipe that is right by its own rules and not by Megatron's is rare
    with pytest.raises(RecipeError) as caught:
        launch.load_checked("gpt_tiny", ["plan.file=no_such_plan.json"], dry_run=True)
    assert [p.field for p in caught.value.problems] == ["plan.file", "recipe"]
