"""Recipes, overrides and their rules; parameter and FLOP formulas against independent counts."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from layerplan.integration.engines.arch import Arch
from layerplan.integration.training.launch import load_checked
from layerplan.recipes import RECIPES, Recipe, RecipeError, apply_overrides, describe, load_recipe
from layerplan.recipes.compile import compile_recipe
from layerplan.recipes.config import folder_problems
from layerplan.recipes.estimate import estimate_recipe
from layerplan.recipes.memory import memory_estimate, memory_fit
from layerplan.recipes.overrides import MEGATRON_NAMES
from layerplan.recipes.size import flops_per_token, parameter_count
from layerplan.recipes.tune import tune_recipe

CPU, SM80, SM90 = (Arch.parse(name) for name in ("cpu", "sm_80", "sm_90"))


def problems_of(name: str, *overrides: str) -> dict[str, str]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(name, overrides)
    return {p.field: f"{p.rule}; {p.remedy}" for p in caught.value.problems}


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_valid_and_named_after_its_function(name):
    recipe = load_recipe(name)
    assert recipe.name == name and recipe.validate() == []
    assert recipe.validate_world(recipe.parallel.replica) == []
    assert describe(name).endswith(".")


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_survives_json(name):
    recipe = load_recipe(name, ["plan.recompute=selective", "plan.recompute_modules=mlp,layernorm"])
    again = Recipe.from_dict(json.loads(json.dumps(recipe.to_dict())))
    assert again == recipe and again.plan.recompute_modules == ("mlp", "layernorm")


def test_a_stored_recipe_with_foreign_fields_is_refused_with_their_names():
    data = load_recipe("gpt_tiny").to_dict()
    data["model"]["wings"] = 2
    del data["train"]["steps"]
    with pytest.raises(RecipeError) as caught:
        Recipe.from_dict(data)
    assert {p.field for p in caught.value.problems} == {"model.wings", "train.steps"}


def test_each_call_gives_a_recipe_of_its_own():
    load_recipe("gpt_tiny", ["train.steps=7", "schedule.warmup_steps=1"])
    assert load_recipe("gpt_tiny").train.steps != 7


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("train.steps=200", 200), ("optimizer.lr=1e-4", 1e-4), ("optimizer.lr=1", 1.0), ("parallel.distributed_optimizer=false", False),
        ("parallel.distributed_optimizer=ON", True), ("data.prefix=/a=b/c", "/a=b/c"), ("data.prefix=none", None), ("model.head_dim=64", 64),
        ("model.head_dim=None", None), ("precision.dtype=bf16", "bf16"), ("plan.recompute_modules=core_attn, mlp", ("core_attn", "mlp")),
        ("plan.recompute_modules=[mlp]", ("mlp",)), ("data.split=98,2,0", "98,2,0"),
    ],
)  # fmt: skip
def test_an_override_takes_the_type_of_its_field(text, value):
    recipe = load_recipe("gpt_tiny")
    assert apply_overrides(recipe, [text]) == []
    section, _, name = text.partition("=")[0].partition(".")
    found = getattr(getattr(recipe, section), name)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train.steps=2.5", "must be a whole number"), ("train.steps=", "must be a whole number"), ("train.steps=none", "must be a whole number"),
        ("optimizer.lr=fast", "must be a finite number"), ("optimizer.lr=nan", "must be a finite number"),
        ("parallel.sequence=1", "must be true or false"), ("precision.dtype=fp8", "must be one of fp32, bf16"),
        ("model.head_dim=wide", "must be a whole number or none"), ("checkpoint.dir=", "must be a text that is not empty or none"),
    ],
)  # fmt: skip
def test_an_override_of_the_wrong_type_names_field_value_and_expected_type(text, expected):
    with pytest.raises(RecipeError) as caught:
        load_recipe("gpt_tiny", [text])
    (problem,) = caught.value.problems
    field, _, value = text.partition("=")
    assert (problem.field, problem.value) == (field, value)
    assert problem.rule == expected
    assert field in str(caught.value) and repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("key", "right"),
    [
        ("train.step", "train.steps"), ("trian.steps", "train.steps"), ("steps", "train.steps"), ("parallel.lr", "optimizer.lr"),
        ("optimiser.lr", "optimizer.lr"), ("model.hiden_size", "model.hidden_size"), ("sequence", "parallel.sequence"),
    ],
)  # fmt: skip
def test_a_wrong_key_suggests_the_right_one(key, right):
    assert f"did you mean {right}?" in problems_of("gpt_tiny", f"{key}=1")[key]


def test_a_key_that_is_close_to_nothing_lists_what_there_is():
    found = problems_of("gpt_tiny", "wings.flap=1", "model.zzzzzz=1", "train=3", "nonsense")
    assert "sections are model, train" in found["wings.flap"]
    assert "num_layers" in found["model.zzzzzz"] and "steps" in found["train"]
    assert "section.field=value" in found["override"]


def test_an_unknown_recipe_suggests_the_right_one():
    assert "did you mean gpt_tiny?" in problems_of("gpt_tinny")["recipe"]


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (["model.num_query_groups=3"], "model.num_attention_heads"), (["model.num_attention_heads=3", "model.num_query_groups=1"], "model.hidden_size"),
        (["model.head_dim=31"], "model.head_dim"), (["model.num_query_groups=8"], "model.num_query_groups"),
        (["parallel.tensor=4"], "model.num_query_groups"), (["parallel.pipeline=2"], "model.num_layers"),
        (["parallel.sequence=true"], "parallel.sequence"), (["parallel.tensor=2", "parallel.sequence=true", "model.seq_length=127"], "model.seq_length"),
        (["parallel.tensor=2", "parallel.sequence=true", "plan.layers=megatron_local"], "parallel.sequence"),
        (["plan.layers=transformer_engine", "train.device=cpu"], "plan.layers"), (["plan.layers=transformer_engine", "plan.loss=chunked"], "plan.loss"),
        (["parallel.overlap_param_gather=true"], "parallel.overlap_param_gather"), (["train.global_batch=7"], "train.global_batch"),
        (["schedule.warmup_steps=400"], "schedule.warmup_steps"), (["schedule.decay_steps=10", "schedule.warmup_steps=10"], "schedule.warmup_steps"),
        (["optimizer.min_lr=1"], "optimizer.min_lr"), (["train.eval_every_steps=-1"], "train.eval_every_steps"),
        (["train.eval_batches=0"], "train.eval_batches"), (["train.eval_every_steps=5"], "data.split"),
        (["train.eval_every_steps=5", "data.split=99,0,1"], "data.split"), (["plan.file=p.json", "plan.layers=megatron_local"], "plan.file"),
        (["plan.file=p.json", "plan.policy=reference"], "plan.file"), (["checkpoint.every_steps=5"], "checkpoint.every_steps"), (["data.split=1,2"], "data.split"),
        (["data.split=0,1,1"], "data.split"), (["plan.recompute=selective", "plan.recompute_modules=wings"], "plan.recompute_modules"),
        (["plan.recompute=selective", "plan.recompute_modules=moe_act"], "plan.recompute_modules"),
        (["model.hidden_dropout=1.0"], "model.hidden_dropout"), (["train.steps=0"], "train.steps"), (["optimizer.lr=0"], "optimizer.lr"),
        (["model.moe_router_topk=3"], "model.moe_router_topk"), (["parallel.expert=2"], "parallel.expert"), (["parallel.dispatcher=allgather"], "parallel.dispatcher"),
        (["model.kv_lora_rank=16"], "model.num_query_groups"), (["model.kv_lora_rank=16", "model.head_dim=32"], "model.head_dim"),
        (["model.kv_lora_rank=16", "model.qk_pos_emb_head_dim=7"], "model.qk_pos_emb_head_dim"), (["model.kv_lora_rank=0"], "model.kv_lora_rank"),
        (["plan.recompute=selective", "plan.recompute_modules=mla_up_proj"], "plan.recompute_modules"),
        (["model.kv_lora_rank=16", "model.num_query_groups=4", "plan.layers=megatron_local"], "plan.layers"),
        (["checkpoint.keep=0"], "checkpoint.keep"), (["plan.arch=sm_42"], "plan.arch"), (["optimizer.beta2=-0.1"], "optimizer.beta2"),
    ],
)  # fmt: skip
def test_a_rule_that_is_broken_names_its_field(overrides, field):
    assert field in problems_of("gpt_tiny", *overrides)


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (["model.moe_router_topk=9"], "model.moe_router_topk"), (["model.moe_dense_layers=3"], "model.moe_dense_layers"), (["model.linear_bias=true"], "model.linear_bias"),
        (["parallel.expert=3"], "model.num_experts"), (["parallel.expert_tensor=3"], "model.moe_ffn_hidden_size"), (["parallel.tensor=2"], "parallel.sequence"),
        (["parallel.tensor=2", "parallel.sequence=true", "model.moe_shared_expert_intermediate_size=65"], "model.moe_shared_expert_intermediate_size"),
        (["plan.layers=transformer_engine"], "plan.layers"), (["model.moe_dense_layers=0", "plan.fuse_residual=true"], "plan.fuse_residual"),
        (["model.moe_router_num_groups=4"], "model.moe_router_num_groups, model.moe_router_group_topk"),
        (["model.moe_router_num_groups=3", "model.moe_router_group_topk=1"], "model.moe_router_num_groups"),
        (["model.moe_router_num_groups=8", "model.moe_router_group_topk=1"], "model.moe_router_group_topk"),
        (["model.moe_router_enable_expert_bias=true"], "model.moe_router_enable_expert_bias"),
        (["model.moe_router_pre_softmax=true", "model.moe_router_score_function=sigmoid"], "model.moe_router_pre_softmax"),
        (["model.moe_router_topk=1"], "model.moe_router_pre_softmax"), (["model.moe_router_load_balancing_type=none"], "model.moe_aux_loss_coeff"),
        (["model.moe_router_topk_scaling_factor=0"], "model.moe_router_topk_scaling_factor"), (["model.num_experts=0"], "model.num_experts"),
        (["model.num_experts=none"], "model.moe_aux_loss_coeff"), (["plan.recompute=selective", "plan.recompute_modules=wings"], "plan.recompute_modules"),
    ],
)  # fmt: skip
def test_a_rule_of_experts_that_is_broken_names_its_field(overrides, field):
    assert field in problems_of("moe_tiny", *overrides)


def test_experts_recompute_what_a_dense_model_has_not():
    for modules in ("moe_act", "moe", "shared_experts,layernorm"):
        assert load_recipe("moe_tiny", ["plan.recompute=selective", f"plan.recompute_modules={modules}"]).validate() == []


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("model.num_layers=99999999999999999999", "at most 100000"), ("model.hidden_size=4611686018427387904", "at most 1000000"),
        ("train.seed=4294967296", "at most 4294967295"), ("data.seed=18446744073709551616", "at most 4294967295"), ("data.seed=-1", "at least 0"),
        ("train.threads=100000", "the CPUs of this machine"), ("data.split=inf,0,0", "finite shares"), ("data.split=nan,1,1", "finite shares"),
        ("train.global_batch=1000000000000", "at most 100000000"),
    ],
)  # fmt: skip
def test_a_size_that_no_run_passes_is_refused_by_its_limit(override, rule):
    assert rule.replace("the CPUs", f"the {os.cpu_count()} CPUs") in problems_of("gpt_tiny", override)[override.partition("=")[0]]


def test_patterns_are_not_held_against_layers_without_end():
    found = problems_of("gpt_tiny", "model.num_layers=99999999999999999999", "plan.per_module=*.mlp=reference")
    assert set(found) == {"model.num_layers"}


@pytest.mark.parametrize("folder", ["/dev/null", "/dev/null/below", "/proc/x", "{file}", "{file}/below", "x" * 300])
@pytest.mark.parametrize("field", ["checkpoint.dir", "logging.dir"])
def test_a_folder_that_cannot_be_made_is_a_problem_of_its_field(tmp_path, field, folder):
    (tmp_path / "file").write_text("")
    (problem,) = folder_problems(load_recipe("gpt_tiny", [f"{field}={folder.format(file=tmp_path / 'file')}"]))
    assert problem.field == field and "can be made and written to" in problem.rule


def test_a_folder_that_can_be_made_is_none_and_is_left_as_it_was(tmp_path):
    recipe = load_recipe("gpt_tiny", [f"checkpoint.dir={tmp_path}", f"logging.dir={tmp_path / 'a' / 'b'}"])
    assert folder_problems(recipe) == [] and list(tmp_path.iterdir()) == []


def test_a_plan_file_pins_what_is_not_under_the_reference_policy():
    for split in ("data.split=98,2,0", "data.split=969, 30, 1"):
        assert load_recipe("gpt_tiny", ["train.eval_every_steps=5", split]).validate() == []
    assert load_recipe("gpt_tiny", ["plan.file=p.json", "plan.policy=reference", "plan.per_module=*.mlp=auto"]).validate() == []


@pytest.mark.parametrize("name", MEGATRON_NAMES)
def test_megatrons_names_are_told_the_field_that_means_it(name):
    ours = MEGATRON_NAMES[name]
    section, _, field = ours.partition(".")
    assert field in {f.name for f in dataclasses.fields(load_recipe("gpt_tiny").sections()[section])}
    for key in (name, f"parallel.{name}", f"model.{name}", name.replace("_", "-")):
        assert problems_of("gpt_tiny", f"{key}=1")[key].endswith(f"did you mean {ours}?")


def test_all_problems_come_in_one_error():
    found = problems_of("gpt_tiny", "train.step=1", "optimizer.lr=x", "model.num_query_groups=3", "train.global_batch=7", "checkpoint.every_steps=5")
    assert set(found) == {"train.step", "optimizer.lr", "model.num_attention_heads", "train.global_batch", "checkpoint.every_steps"}
    assert all("; " in text and text.strip("; ") for text in found.values())


def test_the_number_of_ranks_must_fit_the_layout_and_the_batch():
    recipe = load_recipe("gpt_tiny", ["parallel.tensor=2"])
    (problem,) = recipe.validate_world(3)
    assert "must divide the number of ranks, 3" in problem.rule
    (problem,) = load_recipe("gpt_tiny").validate_world(3)
    assert problem.field == "train.global_batch" and "12" in problem.rule and "12" in problem.remedy
    assert recipe.validate_world(4) == []


UNFIT = (("qwen3_30b_a3b", ["train.global_batch=4"], 8), ("moe_tiny", ["parallel.expert=4", "parallel.expert_tensor=2"], 32),
         ("moe_tiny", ["parallel.expert=4", "parallel.expert_tensor=2", "train.global_batch=100"], 32))  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "unit"), UNFIT)
def test_a_batch_that_one_replica_refuses_is_refused_by_all_that_plan_the_recipe(name, changes, unit, tmp_path):
    recipe = load_recipe(name, changes)
    ways = (
        lambda: estimate_recipe(recipe, SM90), lambda: memory_estimate(recipe, SM90), lambda: compile_recipe(recipe, [SM90], 1, ()),
        lambda: tune_recipe(recipe, tmp_path / "records.json", 1.0, "cpu"), lambda: load_checked(name, changes, dry_run=True),
    )  # fmt: skip
    for way in ways:
        with pytest.raises(RecipeError, match=f"train.global_batch = .*must be a multiple of .* = {unit}; set train.global_batch="):
            way()
    fitting = load_recipe(name, [*changes, f"train.global_batch={unit}"])
    assert estimate_recipe(fitting, SM90).micro_batches == 1 and memory_estimate(fitting, SM90).total > 0


@pytest.mark.parametrize(("name", "world", "remedy"), [
    ("llama3_8b", 1, "a multiple of 2 ranks, or set parallel.tensor=1 parallel.sequence=false"),
    ("llama3_70b", 1, "a multiple of 32 ranks, or set parallel.tensor=1 parallel.pipeline=1 parallel.sequence=false"),
    ("llama3_70b", 8, "a multiple of 32 ranks, or set parallel.pipeline=1"), ("llama3_70b", 12, "a multiple of 32 ranks, or set parallel.tensor=4 parallel.pipeline=1"),
    ("llama3_70b", 3, "a multiple of 32 ranks, or set parallel.tensor=1 parallel.pipeline=1 parallel.sequence=false"),
    ("deepseek_v2_lite", 4, "a multiple of 8 ranks, or set parallel.expert=4"), ("mixtral_8x7b", 8, "a multiple of 32 ranks, or set parallel.expert=2"),
    ("qwen3_30b_a3b", 1, "a multiple of 16 ranks, or set parallel.pipeline=1 parallel.expert=1"),
])  # fmt: skip
def test_too_few_ranks_are_told_the_overrides_that_fit_them(name, world, remedy):
    (problem,) = load_recipe(name).validate_world(world)
    assert problem.remedy == f"start {remedy}"
    changes = [word for word in problem.remedy.split() if word.startswith("parallel.")]
    assert all("divide the number of ranks" not in p.rule for p in load_recipe(name, changes).validate_world(world))


@pytest.mark.parametrize("name", ["llama3_8b", "llama3_70b"])
def test_a_short_try_of_a_long_recipe_needs_no_other_schedule_and_is_its_beginning(name):
    short, whole = load_recipe(name, ["train.steps=20"]), load_recipe(name)
    assert (short.warmup_steps, short.decay_steps) == (whole.warmup_steps, whole.decay_steps) == (2000, whole.train.steps)


def test_parameter_counts_are_those_of_the_published_models():
    assert parameter_count(load_recipe("llama3_8b")) == 8_030_261_248
    assert parameter_count(load_recipe("llama3_70b")) == 70_553_706_496
    assert parameter_count(load_recipe("mixtral_8x7b")) == 46_702_792_704
    assert parameter_count(load_recipe("qwen3_30b_a3b")) == 30_532_122_624
    assert parameter_count(load_recipe("deepseek_v2_lite")) == 15_706_484_224
    untied = dataclasses.replace(load_recipe("gpt_125m").model, tie_embeddings=False)
    recipe = load_recipe("gpt_125m")
    tied = parameter_count(recipe)
    recipe.model = untied
    assert parameter_count(recipe) - tied == untied.vocab_size * untied.hidden_size


def test_flops_per_token_are_six_per_matrix_parameter_and_the_causal_half_of_attention():
    recipe = load_recipe("llama3_8b")
    m = recipe.model
    norms = m.hidden_size * (2 * m.num_layers + 1)
    matrices = parameter_count(recipe) - norms - m.vocab_size * m.hidden_size  # the input embedding is a look-up
    attention = 6 * m.num_layers * m.hidden_size * m.seq_length
    assert flops_per_token(recipe) == 6 * matrices + attention


def test_a_token_costs_the_experts_that_it_takes():
    recipe = load_recipe("mixtral_8x7b")
    m = recipe.model
    taken = parameter_count(recipe) - m.num_layers * 6 * 3 * m.hidden_size * m.ffn_hidden_size - m.vocab_size * m.hidden_size
    assert taken == pytest.approx(12.75e9, rel=1e-2), "of 46.7 billion, without the embedding"
    norms, attention = m.hidden_size * (2 * m.num_layers + 1), 6 * m.num_layers * m.hidden_size * m.seq_length
    assert flops_per_token(recipe) == 6 * (taken - norms) + attention
    latent = load_recipe("deepseek_v2_lite")
    shorter = dataclasses.replace(latent, model=dataclasses.replace(latent.model, seq_length=2048))
    assert flops_per_token(latent) - flops_per_token(shorter) == 6 * 27 * 16 * (192 + 128) / 2 * 2048


@pytest.mark.parametrize("name", ["mixtral_8x7b", "qwen3_30b_a3b", "deepseek_v2_lite"])
def test_memory_of_experts_is_shared_by_the_ranks_that_share_them(name):
    recipe = load_recipe(name)
    m, stages = recipe.model, recipe.parallel.pipeline
    routed = (m.num_layers - m.moe_dense_layers) * m.num_experts * 3 * m.hidden_size * m.expert_width // stages
    plain, wide = memory_estimate(recipe, SM90), memory_estimate(load_recipe(name, ["parallel.expert=4"]), SM90)
    assert wide.weights - plain.weights == 2 * (routed // 4 - routed // 8)
    assert wide.gradients - plain.gradients == 4 * (routed // 4 - routed // 8)
    assert memory_estimate(load_recipe(name, ["plan.recompute=full"]), SM90).activations < plain.activations / 10
    assert memory_fit(recipe, SM90, "H100", 80).startswith("H100 has 80 GiB")


def test_memory_falls_with_ranks_and_with_recomputation():
    plain = memory_estimate(load_recipe("llama3_8b"), SM90)
    params = parameter_count(load_recipe("llama3_8b")) / 2  # tensor = 2
    assert plain.weights == pytest.approx(2 * params, rel=1e-3) and plain.gradients == pytest.approx(4 * params, rel=1e-3)
    assert plain.optimizer == pytest.approx(12 * params, rel=1e-3)
    assert memory_estimate(load_recipe("llama3_8b"), SM90, 16).optimizer == pytest.approx(plain.optimizer / 8, rel=1e-6)
    assert memory_estimate(load_recipe("llama3_8b", ["plan.recompute=full"]), SM90).activations < plain.activations / 5
    assert plain.total == sum(plain.terms().values()) and set(plain.terms()) == {
        "weights", "gradients", "optimiser", "activations", "logits", "working", "buffers"}  # fmt: skip


def test_activations_are_what_the_plans_save_and_logits_what_the_loss_keeps():
    recipe = load_recipe("gpt_125m")
    m, tokens = recipe.model, recipe.train.micro_batch * recipe.model.seq_length
    # per layer two inputs and two norm outputs, q k v and the attention's output, fc1's output and the activation; rstd twice and LSE in
    # float32. Then the final norm's input, output and rstd.
    layer = tokens * (2 * (8 * m.hidden_size + 3 * m.ffn_hidden_size) + 4 * (2 + m.num_attention_heads))
    assert memory_estimate(recipe, SM90).activations == m.num_layers * layer + tokens * (2 * 2 * m.hidden_size + 4)
    logits = tokens * m.vocab_size * 2
    assert {loss: memory_estimate(load_recipe("gpt_125m", [f"plan.loss={loss}"]), SM90).logits // logits for loss in ("fused", "megatron")} == {
        "fused": 2, "megatron": 3}  # fmt: skip


def test_a_view_keeps_the_whole_product_it_lies_in():
    fused, split = load_recipe("gpt_125m"), load_recipe("gpt_125m", ["plan.policy=reference"])
    kept = memory_estimate(split, SM90).activations - memory_estimate(fused, SM90).activations
    qkv = split.train.micro_batch * split.model.seq_length * 3 * split.model.hidden_size * 2
    assert kept == split.model.num_layers * (qkv - qkv // 3), "v alone is read again, as a view of q, k and v"


@pytest.mark.parametrize("changes", [["parallel.pipeline=2", "model.num_layers=4"], ["plan.layers=megatron_local"], ["plan.recompute=selective"], ["train.micro_batch=2"]])
def test_memory_is_estimated_for_every_layout(changes):
    memory, plain = memory_estimate(load_recipe("gpt_tiny", changes), CPU), memory_estimate(load_recipe("gpt_tiny"), CPU)
    assert memory.total != plain.total and min(memory.terms().values()) >= 0


def test_a_recipe_that_does_not_fit_a_gpu_says_each_single_change_that_makes_it_fit():
    recipe = load_recipe("llama3_8b")
    need = memory_estimate(recipe, SM90).total / 2**30
    assert memory_fit(recipe, SM90, "H200", 141) == f"H200 has 141 GiB: {141 - need:.0f} are left for the CUDA context, communication buffers and fragmentation"
    text = memory_fit(recipe, SM80, "A100", 80)
    assert text.startswith("it does not fit A100, which has 80 GiB; it does with 4 ranks (2 replicas share the optimiser's state)")
    assert text.endswith(", or plan.recompute=full, or parallel.pipeline=2")
    for changes in (["plan.recompute=full"], ["parallel.pipeline=2"]):
        assert memory_estimate(load_recipe("llama3_8b", changes), SM80).total < 80 * 2**30 < memory_estimate(recipe, SM80).total
    assert memory_estimate(recipe, SM80, 4).total < 80 * 2**30
    assert "80 GiB: 2" in memory_fit(load_recipe("llama3_70b"), SM90, "H100", 80), "it fits the smallest GPU of its kind"
    assert "raise parallel.tensor as well" in memory_fit(load_recipe("llama3_70b"), SM90, "toy", 1)


def test_recipes_import_neither_torch_nor_megatron():
    code = ("import sys; from layerplan.recipes import load_recipe, size; load_recipe('llama3_8b', ['plan.arch=sm_90']); "
            "print([m for m in ('torch', 'megatron', 'numpy') if m in sys.modules])")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
