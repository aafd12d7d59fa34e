"""The table of config fields: it covers the dataclasses exactly and refuses what the layers do not do."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
import torch
import torch.nn.functional as F
from megatron.core.activations import squared_relu
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from layerplan.integration.megatron import compat, config_map
from layerplan.integration.megatron.config_map import (
    HONOURED,
    IRRELEVANT,
    REFUSED,
    ConfigError,
    check_config,
    raise_for,
)

CLASSES = (TransformerConfig, MLATransformerConfig)


def dense(**fields):
    return TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, **fields)


def latent(**fields):
    return MLATransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, **fields)


def fields_named(config):
    return [p.field for p in check_config(config)]


def test_table_covers_exactly_the_fields_of_megatrons_configs():
    known = [*HONOURED, *REFUSED, *IRRELEVANT]
    actual = {f.name for cls in CLASSES for f in dataclasses.fields(cls)}
    assert sorted(actual - set(known)) == [], "Megatron has fields that the table does not classify"
    assert sorted(set(known) - actual) == [], "the table names fields that Megatron does not have"
    assert sorted({n for n in known if known.count(n) > 1}) == [], "fields are classified twice"
    listed = [n for names in config_map._IRRELEVANT_GROUPS.values() for n in names.split()]
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize("config", [dense(), latent()], ids=["dense", "mla"])
def test_plain_configs_have_no_problem(config):
    assert check_config(config) == []
    raise_for(config)


@pytest.mark.parametrize("cls", CLASSES)
def test_default_of_every_refused_field_is_neutral(cls):
    for field in dataclasses.fields(cls):
        if field.name in REFUSED:
            assert REFUSED[field.name].problem(field.name, field.default) is None, field.name


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_each_refused_field_is_named_with_value_rule_and_remedy_when_set(name):
    away = {"transformer_impl": "inference_optimized", "cuda_graph_impl": "transformer_engine", "mtp_num_layers": 1,
            "glu_linear_offset": 0.25, "gtp_weight_remat_size": 2, "expert_gtp_weight_remat_size": 2,
            "fp8": "hybrid", "fp4": "e2m1", "experimental_attention_variant": "dsa"}  # fmt: skip
    config = dense()
    default = (
        next(f.default for f in dataclasses.fields(TransformerConfig) if f.name == name)
        if hasattr(config, name)
        else False
    )
    value = away.get(name, {False: True, None: 32}.get(default))
    setattr(config, name, value)  # past __post_init__, which refuses some of them itself on this machine
    found = [p for p in check_config(config) if p.field == name]
    assert len(found) == 1 and found[0].value == value
    assert found[0].rule.startswith("must be ") and found[0].remedy
    assert str(found[0]).startswith(f"{name} = {value!r}: ")


def test_all_problems_come_in_one_error():
    config = dense(window_size=(8, 0))
    config.fp8, config.qk_clip, config.context_parallel_size, config.normalization = "hybrid", True, 2, "BatchNorm"
    with pytest.raises(ConfigError) as caught:
        raise_for(config, context="the block spec")
    assert sorted(p.field for p in caught.value.problems) == [
        "context_parallel_size",
        "fp8",
        "normalization",
        "qk_clip",
    ]
    lines = str(caught.value).splitlines()
    assert lines[0] == "the block spec cannot run this config as it says, 4 problem(s):" and len(lines) == 5
    assert any(line.strip().startswith("fp8 = 'hybrid': must be None or False") for line in lines)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("func", [F.silu, F.gelu, F.relu, squared_relu, torch.tanh], ids=lambda f: f.__name__)
def test_activations_are_accepted_exactly_where_the_layers_have_them(func, gated):
    from layerplan.integration.megatron.layers import activation_of

    config = dense(activation_func=func, gated_linear_unit=gated)
    try:
        activation_of(config)
        offered = True
    except ValueError:
        offered = False
    assert (fields_named(config) == []) == offered
    assert offered or fields_named(config) == ["activation_func, gated_linear_unit"]


def test_clamp_without_a_gated_activation_is_refused():
    config = dense(activation_func=F.gelu)
    config.activation_func_clamp_value = 7.0
    assert fields_named(config) == ["activation_func_clamp_value"]
    config.gated_linear_unit = True
    assert fields_named(config) == []


@pytest.mark.parametrize(
    "size, good",
    [(None, True), ((128, 0), True), ((-1, -1), True), ((128,), False), ((-2, 0), False), ((1.5, 0), False)],
)
def test_window_must_be_two_counts_of_tokens(size, good):
    config = dense()
    config.window_size = size
    assert fields_named(config) == ([] if good else ["window_size"])


@pytest.mark.parametrize("value, good", [(0.0, True), (0.1, True), (1.0, False), (-0.1, False)])
def test_dropout_must_be_a_probability_below_one(value, good):
    assert fields_named(dense(attention_dropout=value)) == ([] if good else ["attention_dropout"])


def test_attention_backends_other_than_auto_are_refused_by_name():
    problem = check_config(dense(attention_backend=AttnBackend.local))[0]
    assert (problem.field, problem.value) == ("attention_backend", "local")


def test_fused_residual_norm_is_refused_only_beside_layernorm_recompute():
    config = dense(recompute_granularity="selective", recompute_modules=["layernorm"])
    assert fields_named(config) == []
    config.fused_residual_rmsnorm = True
    assert fields_named(config) == ["fused_residual_rmsnorm, recompute_modules"]
    config.recompute_modules = ["core_attn"]
    assert fields_named(config) == []


def test_latent_norms_with_tp_and_whole_sequences_need_the_guard():
    config = latent(tensor_model_parallel_size=2, qk_layernorm=True)
    found = check_config(config)
    assert len(found) == 1 and "compat.apply(*compat.GUARDS)" in found[0].remedy
    with compat.apply("mla-qk-norm-gradient"):
        assert check_config(config) == []
    config.sequence_parallel = True
    assert check_config(config) == []


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None, reason="the fault shows without Transformer Engine only"
)
def test_recompute_that_calls_transformer_engine_without_it_needs_the_guard():
    def recomputing(make, *modules, **fields):
        config = make(recompute_granularity="selective", **fields)
        config.recompute_modules = list(modules)  # past __post_init__, which keeps moe_act for grouped experts
        return config

    config = recomputing(latent, "layernorm", "mla_up_proj", "moe_act")
    assert [(p.field, p.value) for p in check_config(config)] == [("recompute_modules", "['layernorm']")]
    with compat.apply("checkpoint-fp8-flag"):
        assert check_config(config) == []
    assert fields_named(recomputing(latent, "mla_up_proj", "moe_act")) == [], "save policies of the plans call nothing of it"
    assert fields_named(recomputing(dense, "layernorm", "moe_act")) == []
    assert fields_named(recomputing(dense, "moe_act", num_moe_experts=2, add_bias_linear=False)) == [], "the experts' activation is a save policy too"
    assert fields_named(recomputing(dense, "layernorm", num_moe_experts=2, add_bias_linear=False)) == ["recompute_modules"]


def test_experts_and_their_hidden_units_must_divide_among_the_ranks_that_share_them():
    config = dense(num_moe_experts=6, moe_ffn_hidden_size=10, add_bias_linear=False)
    assert fields_named(config) == []
    config.expert_model_parallel_size = config.expert_tensor_parallel_size = 4
    first, second = check_config(config)
    assert (first.field, first.value) == ("num_moe_experts, expert_model_parallel_size", (6, 4)) and "6 % 4 = 2" in first.rule
    assert (second.field, second.value) == ("moe_ffn_hidden_size, expert_tensor_parallel_size", (10, 4)) and "10 % 4 = 2" in second.rule
    assert "multiple of 4" in first.remedy and "multiple of 4" in second.remedy


@pytest.mark.parametrize(
    "make, sizes, field, numbers, remedy",
    [
        (dense, {"num_attention_heads": 6, "num_query_groups": 4}, "num_attention_heads, num_query_groups", "6, 4", "multiple of 4"),
        (dense, {"num_attention_heads": 6, "num_query_groups": 2, "tensor_model_parallel_size": 4},
         "num_attention_heads, tensor_model_parallel_size", "6, 4", "divisor of 6"),
        (dense, {"num_attention_heads": 12, "num_query_groups": 3, "tensor_model_parallel_size": 4},
         "num_query_groups, tensor_model_parallel_size", "3, 4", "multiple or a divisor of 4"),
        (dense, {"num_attention_heads": 12, "num_query_groups": 6, "tensor_model_parallel_size": 4},
         "num_query_groups, tensor_model_parallel_size", "6, 4", "multiple or a divisor of 4"),
        (dense, {"ffn_hidden_size": 6, "tensor_model_parallel_size": 4}, "ffn_hidden_size, tensor_model_parallel_size", "6, 4", "multiple of 4"),
        (dense, {"kv_channels": 0}, "kv_channels", "0", "set kv_channels"),
        (dense, {"num_query_groups": 0}, "num_query_groups", "0", "set num_query_groups"),
        (dense, {"num_attention_heads": 2.0}, "num_attention_heads", "2.0", "set num_attention_heads"),
        (latent, {"num_attention_heads": 6, "num_query_groups": 6, "tensor_model_parallel_size": 4, "sequence_parallel": True},
         "num_attention_heads, tensor_model_parallel_size", "6, 4", "divisor of 6"),
        (latent, {"num_query_groups": 2}, "num_query_groups, num_attention_heads", "2, 4", "num_query_groups = 4"),
        (latent, {"qk_pos_emb_head_dim": 7}, "qk_pos_emb_head_dim", "7", "8"),
        (latent, {"rotary_interleaved": True}, "rotary_interleaved", "True", "rotary_interleaved = False"),
        (latent, {"rope_type": "alibi"}, "rope_type", "alibi", "set one of them"),
        (latent, {"no_rope_freq": 2}, "no_rope_freq", "2", "no_rope_freq = None"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused_with_both_numbers_and_a_remedy(make, sizes, field, numbers, remedy):
    config = make(ffn_hidden_size=96)
    for name, value in sizes.items():
        setattr(config, name, value)  # past __post_init__, whose own error would come alone
    (problem,) = check_config(config)
    assert problem.field == field and numbers in str(problem) and remedy in problem.remedy


@pytest.mark.parametrize("heads, groups, tp", [(8, 8, 4), (8, 4, 4), (8, 2, 4), (8, 1, 8), (12, 4, 2), (12, 2, 4)])
def test_sizes_that_megatron_divides_over_the_ranks_are_accepted(heads, groups, tp):
    config = dense(ffn_hidden_size=96)
    config.num_attention_heads, config.num_query_groups, config.tensor_model_parallel_size = heads, groups, tp
    assert check_config(config) == []


def test_all_sizes_that_do_not_divide_come_in_one_error_together_with_the_rest():
    config = dense(ffn_hidden_size=90)
    config.num_attention_heads, config.num_query_groups, config.tensor_model_parallel_size = 10, 3, 4
    config.fp8 = "hybrid"
    with pytest.raises(ConfigError) as caught:
        raise_for(config)
    assert sorted(p.field for p in caught.value.problems) == [
        "ffn_hidden_size, tensor_model_parallel_size",
        "fp8",
        "num_attention_heads, num_query_groups",
        "num_attention_heads, tensor_model_parallel_size",
        "num_query_groups, tensor_model_parallel_size",
    ]


def test_field_of_another_megatron_is_refused_when_it_is_set():
    @dataclasses.dataclass
    class Newer(TransformerConfig):
        swizzle_heads: bool = False

    config = Newer(num_layers=2, hidden_size=64, num_attention_heads=4)
    assert check_config(config) == []
    config.swizzle_heads = True
    assert fields_named(config) == ["swizzle_heads"]
