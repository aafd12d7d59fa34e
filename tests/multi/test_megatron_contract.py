"""What Megatron-Core asks of a provider and its slots, pinned: an upgrade that changes it fails here, by name."""

import ast
import dataclasses
import functools
import importlib
import inspect
import textwrap
import warnings

import pytest
import torch

warnings.filterwarnings("ignore")

from megatron.core.fusions import fused_bias_dropout  # noqa: E402
from megatron.core.models import backends  # noqa: E402
from megatron.core.optimizer import distrib_optimizer  # noqa: E402
from megatron.core.tensor_parallel import layers, random  # noqa: E402
from megatron.core.transformer import (  # noqa: E402  # noqa: E402
    attention,
    dot_product_attention,
    mlp,
    multi_latent_attention,
    torch_norm,
    transformer_block,
    transformer_layer,
)
from megatron.core.transformer.moe import moe_layer, router, shared_experts, token_dispatcher  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from layerplan.integration.megatron import (  # noqa: E402
    compat,
    moe_config,
    moe_experts,
)
from layerplan.integration.megatron import layers as own  # noqa: E402
from layerplan.integration.megatron import moe_layer as own_moe  # noqa: E402
from layerplan.integration.megatron.config_map import ConfigError, check_config  # noqa: E402

finalize_model_grads = importlib.import_module(
    "megatron.core.distributed.finalize_model_grads"
)  # shadowed by a function


def names(function):
    """Parameters in order, without self; keyword-only ones behind a star; those without a default end in '!'."""
    parts, starred = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parts, starred = [*parts, "*"], True
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        starred |= prefix == "*"
        required = parameter.default is parameter.empty and not prefix
        parts.append(prefix + parameter.name + ("!" if required else ""))
    return " ".join(parts)


ATTENTION_FORWARD = (
    "hidden_states! attention_mask! key_value_states inference_context rotary_pos_emb rotary_pos_cos rotary_pos_sin "
    "rotary_pos_cos_sin attention_bias packed_seq_params"
)
SIGNATURES = {
    "provider.layer_norm": (backends.BackendSpecProvider.layer_norm, "rms_norm for_qk has_residual"),
    "provider.grouped_mlp_modules": (backends.BackendSpecProvider.grouped_mlp_modules, "moe_use_grouped_gemm!"),
    "norm": (
        torch_norm.WrappedTorchNorm.__new__,
        "cls! config! hidden_size! eps persist_layer_norm zero_centered_gamma normalization",
    ),
    "column": (
        layers.ColumnParallelLinear.__init__,
        "input_size! output_size! * config! init_method! bias gather_output stride keep_master_weight_for_test "
        "skip_bias_add skip_weight_param_allocation embedding_activation_buffer grad_output_buffer is_expert "
        "tp_comm_buffer_name disable_grad_reduce tp_group name",
    ),
    "column.forward": (layers.ColumnParallelLinear.forward, "input_! weight runtime_gather_output"),
    "row": (
        layers.RowParallelLinear.__init__,
        "input_size! output_size! * config! init_method! bias! input_is_parallel! skip_bias_add! stride "
        "keep_master_weight_for_test is_expert tp_comm_buffer_name tp_group name",
    ),
    "row.forward": (layers.RowParallelLinear.forward, "input_!"),
    "core attention": (
        dot_product_attention.DotProductAttention.__init__,
        "config! layer_number! attn_mask_type! attention_type! attention_dropout softmax_scale cp_comm_type pg_collection",
    ),
    "core attention.forward": (
        dot_product_attention.DotProductAttention.forward,
        "query! key! value! attention_mask! attn_mask_type attention_bias packed_seq_params",
    ),
    "self attention": (
        attention.SelfAttention.__init__,
        "config! submodules! layer_number! attn_mask_type cp_comm_type pg_collection pp_layer_offset name",
    ),
    "self attention.forward": (
        attention.SelfAttention.forward,
        f"{ATTENTION_FORWARD} sequence_len_offset * inference_params",
    ),
    "mla": (
        multi_latent_attention.MLASelfAttention.__init__,
        "config! submodules! layer_number! attn_mask_type cp_comm_type pg_collection pp_layer_offset name",
    ),
    "mla.forward": (
        multi_latent_attention.MLASelfAttention.forward,
        f"{ATTENTION_FORWARD} position_ids sequence_len_offset * inference_params",
    ),
    "mla._qkv_down_projection": (multi_latent_attention.MLASelfAttention._qkv_down_projection, "hidden_states!"),
    "mlp": (mlp.MLP.__init__, "config! submodules! is_expert input_size ffn_hidden_size tp_group name"),
    "mlp.forward": (mlp.MLP.forward, "hidden_states! per_token_scale **kwargs"),
    "layer": (
        transformer_layer.TransformerLayer.__init__,
        "config! submodules! layer_number hidden_dropout pg_collection vp_stage is_mtp_layer add_layer_offset "
        "pp_layer_offset name",
    ),
    "layer._forward_attention": (
        transformer_layer.TransformerLayer._forward_attention,
        "hidden_states! attention_mask context context_mask rotary_pos_emb rotary_pos_cos rotary_pos_sin rotary_pos_cos_sin "
        "attention_bias inference_context packed_seq_params sequence_len_offset padding_mask * inference_params",
    ),
    "experts": (moe_layer.ExpertsBuilder.__call__, "num_local_experts! config! * pg_collection! name"),
    "experts.forward": (moe_layer.ExpertsInterface.forward, "dispatched_input! tokens_per_expert! permuted_probs!"),
    "moe layer": (moe_layer.MoELayer.__init__, "config! submodules layer_number pg_collection is_mtp_layer name"),
    "moe layer.forward": (moe_layer.MoELayer.forward, "hidden_states! intermediate_tensors padding_mask"),
    "router": (router.TopKRouter.__init__, "config! pg_collection is_mtp_layer"),
    "router.routing": (router.TopKRouter.routing, "logits! padding_mask"),
    "router.attach": (
        router.TopKRouter.attach_and_log_load_balancing_loss,
        "activation! aux_loss_coeff! aux_loss! aux_loss_name! reduce_group! needs_dp_avg valid_token_count",
    ),
    "shared experts": (shared_experts.SharedExpertMLP.__init__, "config! submodules! gate! pg_collection name"),
    "bias-dropout-add": (fused_bias_dropout.get_bias_dropout_add, "training! fused!"),
}
# What MLA builds as duplicated linears; the class itself cannot be inspected without Transformer Engine.
TE_LINEAR = (
    "input_size output_size parallel_mode config init_method bias skip_bias_add skip_weight_param_allocation "
    "tp_comm_buffer_name is_expert symmetric_ar_type tp_group name gtp_remat_group"
)
FIELDS = {
    transformer_layer.TransformerLayerSubmodules: "input_layernorm self_attention self_attn_bda pre_cross_attn_layernorm "
    "cross_attention cross_attn_bda pre_mlp_layernorm mlp mlp_bda sharded_state_dict_keys_map",
    transformer_block.TransformerBlockSubmodules: "layer_specs layer_norm",
    attention.SelfAttentionSubmodules: "linear_qkv core_attention linear_proj q_layernorm k_layernorm",
    multi_latent_attention.MLASelfAttentionSubmodules: "linear_proj q_layernorm kv_layernorm linear_q_proj "
    "linear_q_down_proj linear_q_up_proj linear_kv_down_proj linear_kv_up_proj linear_qkv_down_proj core_attention",
    mlp.MLPSubmodules: "linear_fc1 linear_fc2 activation_func",
    moe_layer.MoESubmodules: "experts shared_experts router",
}
# The arguments that Megatron's modules pass when they build a slot, from the source of the call.
CALLS = {
    "linear_fc1": (
        mlp.MLP,
        "config init_method gather_output bias skip_bias_add is_expert tp_comm_buffer_name tp_group stride name",
    ),
    "linear_fc2": (
        mlp.MLP,
        "config init_method bias input_is_parallel skip_bias_add is_expert tp_comm_buffer_name tp_group name",
    ),
    "linear_qkv": (
        attention.SelfAttention,
        "config init_method gather_output bias skip_bias_add is_expert tp_comm_buffer_name tp_group name",
    ),
    "linear_proj": (
        attention.Attention,
        "config init_method bias input_is_parallel skip_bias_add is_expert tp_comm_buffer_name tp_group name",
    ),
    "core_attention": (
        attention.Attention,
        "config layer_number attn_mask_type attention_type cp_comm_type softmax_scale pg_collection",
    ),
    "linear_kv_up_proj": (
        multi_latent_attention.MLASelfAttention,
        "config init_method gather_output bias skip_bias_add is_expert tp_comm_buffer_name tp_group name",
    ),
    "input_layernorm": (transformer_layer.TransformerLayer, "config hidden_size eps"),
    "pre_mlp_layernorm": (transformer_layer.TransformerLayer, "config hidden_size eps"),
}
# The line of Megatron each guard is for: once it is gone, so may the guard be.
FAULTS = {
    "checkpoint-fp8-flag": (random.CheckpointWithoutOutput.__init__, "self.fp8 = fp8 is not None"),
    "mla-rope-key-gradient": (
        multi_latent_attention.MLASelfAttention.get_query_key_value_tensors,
        "if get_pg_size(self.tp_group) > 1 and self.config.sequence_parallel:",
    ),
    "mla-qk-norm-gradient": (
        finalize_model_grads._allreduce_non_tensor_model_parallel_grads,
        'config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)',
    ),
    "distopt-load-leaf": (
        distrib_optimizer.DistributedOptimizer._set_main_param_and_optimizer_states,
        "dst_tensors[key].copy_(tensors[key])",
    ),
    "weight-gradient-accumulation": (
        layers.ColumnParallelLinear.__init__,
        "if config.gradient_accumulation_fusion and not _grad_accum_fusion_available:",
    ),
}


def keywords_of_calls(cls, slot):
    """Keyword arguments of every call in `cls` that builds `slot`, directly or as build_module's first argument."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))

    def is_slot(node):
        if isinstance(node, ast.Subscript):  # MLA resolves its classes first: layer_classes["linear_kv_up_proj"]
            return ast.unparse(node) == f"layer_classes['{slot}']"
        return isinstance(node, ast.Attribute) and node.attr == slot and "submodules" in ast.unparse(node.value)

    return [
        {keyword.arg for keyword in call.keywords if keyword.arg}
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and (is_slot(call.func) or (call.args and is_slot(call.args[0])))
    ]


def test_megatron_is_of_the_release_that_the_patches_were_run_with():
    assert compat.megatron_version().startswith(compat.VERIFIED + ".")


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_the_one_the_slots_answer(name):
    function, want = SIGNATURES[name]
    assert names(function) == want


# Megatron's signature -> the slot of ours that answers it.
OURS = {"norm": own.Norm, "core attention": own.CoreAttention, "core attention.forward": own.CoreAttention.forward,
        "mlp.forward": own.MLP.forward, "experts": moe_experts.GroupedExperts, "moe layer": own_moe.LayerplanMoELayer,
        "moe layer.forward": own_moe.LayerplanMoELayer.forward}  # fmt: skip


@pytest.mark.parametrize("name", [*OURS, "duplicated linear"])
def test_our_slot_names_every_argument_of_megatrons_and_swallows_none(name):
    target, theirs = OURS.get(name, own.DuplicatedLinear), SIGNATURES.get(name, (None, TE_LINEAR))[1]
    taken = inspect.signature(target).parameters
    wanted = {argument.rstrip("!") for argument in theirs.split()} - {"cls", "*", "**kwargs"}
    assert wanted <= set(taken), wanted - set(taken)
    assert not any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in taken.values())


def test_linear_of_transformer_engine_takes_the_arguments_that_our_duplicated_one_answers():
    te = inspect.getsource(importlib.import_module("megatron.core.extensions.transformer_engine"))
    (tree,) = [node for node in ast.walk(ast.parse(te)) if isinstance(node, ast.ClassDef) and node.name == "TELinear"]
    init = next(f for f in tree.body if isinstance(f, ast.FunctionDef) and f.name == "__init__").args
    assert [a.arg for a in (*init.args[1:], *init.kwonlyargs)] == TE_LINEAR.split()


def _config(**changes):
    options = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "use_cpu_initialization": True, "normalization": "RMSNorm"}
    return TransformerConfig(**options, **changes)


def test_norm_takes_what_repeats_the_config_and_refuses_what_differs():
    assert own.Norm(_config(), 8, persist_layer_norm=True, zero_centered_gamma=False, normalization="RMSNorm").attrs.op == "rms_norm"
    with pytest.raises(ValueError, match=r"normalization = 'LayerNorm': the config says 'RMSNorm'; leave it out"):
        own.Norm(_config(), 8, normalization="LayerNorm")
    with pytest.raises(ValueError, match=r"zero_centered_gamma = True: the config says False"):
        own.Norm(_config(), 8, zero_centered_gamma=True)
    with pytest.raises(TypeError, match="has_residual"):
        own.Norm(_config(), 8, has_residual=True)


def test_duplicated_linear_refuses_all_that_it_would_not_do_at_once():
    with pytest.raises(ValueError, match="symmetric_ar_type = 'multimem'") as caught:
        own.DuplicatedLinear(8, 8, config=_config(), init_method=None, parallel_mode="column", is_expert=True, symmetric_ar_type="multimem",
                             gtp_remat_group="group", tp_comm_buffer_name="q_down_proj")  # fmt: skip
    assert all(word in str(caught.value) for word in ("gtp_remat_group", "parallel_mode = 'column'", "is_expert"))


@pytest.mark.parametrize(("field", "value", "build", "slot"), [
    ("normalization", "BatchNorm", lambda c: own.Norm(c, 8), "the norm slot"),
    ("activation_func", torch.tanh, own.activation_of, "the MLP slot"),
    ("glu_linear_offset", 1.0, own.activation_of, "the MLP slot"),
    ("context_parallel_size", 2, lambda c: own.CoreAttention(c, 1, None, "self"), "the core-attention slot"),
])  # fmt: skip
def test_a_slot_built_without_the_block_spec_refuses_its_own_fields_in_the_config_maps_words(field, value, build, slot):
    config = _config()
    setattr(config, field, value)
    config.qk_clip = True  # another slot's
    (problem,) = [p for p in check_config(config) if field in p.field]
    with pytest.raises(ConfigError) as caught:
        build(config)
    assert caught.value.problems == (problem,) and str(caught.value).startswith(f"{slot} cannot run this config")


@pytest.mark.parametrize("cls", FIELDS, ids=lambda cls: cls.__name__)
def test_submodules_have_the_fields_that_the_specs_fill(cls):
    assert " ".join(field.name for field in dataclasses.fields(cls)) == FIELDS[cls]


def test_megatron_has_the_dispatchers_and_the_balancing_that_the_config_map_names():
    source = inspect.getsource(moe_layer.MoELayer.__init__)
    assert all(f"== \"{name}\"" in source for name in moe_config.DISPATCHERS)
    found = {c for c in vars(token_dispatcher) if c.startswith("MoE") and c.endswith("TokenDispatcher")} - {"MoETokenDispatcher"}
    assert len(found) == len(moe_config.DISPATCHERS), found
    words = inspect.getsource(router)
    assert all(f'"{name}"' in words for name in moe_config.BALANCING if name != "none")


@pytest.mark.parametrize("slot", CALLS)
def test_megatron_builds_the_slot_with_these_arguments(slot):
    cls, want = CALLS[slot]
    calls = keywords_of_calls(cls, slot)
    assert calls and all(call == set(want.split()) for call in calls), calls


def test_provider_has_exactly_these_slots():
    abstract = {
        name
        for name, member in vars(backends.BackendSpecProvider).items()
        if getattr(member, "__isabstractmethod__", 0)
    }
    assert abstract == {
        "column_parallel_linear", "row_parallel_linear", "fuse_layernorm_and_linear", "column_parallel_layer_norm_linear",
        "layer_norm", "core_attention", "grouped_mlp_modules", "activation_func",
    }  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_that_a_guard_is_for_is_still_there(name):
    function, line = FAULTS[name]
    assert line in " ".join(inspect.getsource(function).split())


def test_every_guard_has_its_fault_pinned():
    assert set(FAULTS) == set(compat.GUARDS)


def test_every_patch_is_applied_and_taken_back_exactly():
    def values():
        found = {}
        for target in (target for patch in compat.PATCHES.values() for target in patch.targets):
            module, _, path = target.partition(":")
            found[target] = functools.reduce(getattr, path.split("."), importlib.import_module(module))
        return found

    before = values()
    with compat.apply(*compat.PATCHES):
        inside = values()
        with compat.apply("checkpoint-fp8-flag"):
            pass
        assert all(values()[target] is inside[target] for target in inside)  # counted: the outer one still holds
        replaced = {target for target in before if inside[target] is not before[target]}
        without_te = {"megatron.core.transformer.moe.moe_utils:te_general_gemm"}
        assert set(before) - replaced <= without_te | {t for t in before if before[t] in (True, False)} | {
            "megatron.core.optimizer:SGD"
        }
        assert compat.active() == tuple(compat.PATCHES)
    assert all(values()[target] is before[target] for target in before) and compat.active() == ()


def test_unknown_patch_is_refused_and_known_ones_are_listed():
    with pytest.raises(compat.CompatError, match=r"no-such-patch.*checkpoint-fp8-flag"):
        compat.apply("no-such-patch")


def test_missing_target_is_an_error_that_names_patch_and_target_and_undoes_the_rest(monkeypatch):
    broken = dataclasses.replace(
        compat.PATCHES["mla-rope-key-gradient"], name="broken", targets=("megatron.core.utils:gone",)
    )
    monkeypatch.setitem(compat.PATCHES, "broken", broken)
    before = random.CheckpointWithoutOutput.__init__
    with pytest.raises(compat.CompatError, match=r"patch broken: target megatron\.core\.utils:gone"):
        compat.apply("checkpoint-fp8-flag", "broken")
    assert random.CheckpointWithoutOutput.__init__ is before and compat.active() == ()


def test_another_release_of_megatron_is_warned_about_by_patch_name(monkeypatch):
    monkeypatch.setattr(compat, "megatron_version", lambda: "0.99.0")
    with pytest.warns(compat.CompatWarning, match=r"0\.99\.0.*unverified here: checkpoint-fp8-flag"):
        compat.apply("checkpoint-fp8-flag").undo()


def test_recomputation_without_fp8_does_not_reach_for_transformer_engine_under_the_guard():
    assert random.CheckpointWithoutOutput().fp8 is True  # the fault
    with compat.apply("checkpoint-fp8-flag"):
        assert random.CheckpointWithoutOutput().fp8 is False and random.CheckpointWithoutOutput(fp8=True).fp8 is True
