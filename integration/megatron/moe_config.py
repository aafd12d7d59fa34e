"""What becomes of a config's fields of experts: rules of ``config_map.check_config``, and those of
``LayerplanMoELayer``.

This file imports no Megatron.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..problems import Problem

HONOURED: dict[str, str] = {
    "num_moe_experts": "block spec; experts run as grouped products",
    "moe_layer_freq": "block spec",
    "moe_grouped_gemm": "experts are grouped products either way; Megatron wants it for moe_act of recompute_modules",
    "moe_ffn_hidden_size": "sizes of the experts",
    "expert_model_parallel_size": "experts of a rank; dispatchers",
    "expert_tensor_parallel_size": "sizes of the experts of a rank; dispatchers",
    "moe_token_dispatcher_type": "dispatchers: allgather, alltoall; flex in Megatron's layer",
    "overlap_moe_expert_parallel_comm": "Megatron's schedule over its own layer; see layer_problems",
    "moe_apply_probs_on_input": "must be False, see experts_problems",
    "moe_latent_size": "sizes of the experts in Megatron's layer; see layer_problems",
    "moe_shared_expert_intermediate_size": "shared experts",
    "moe_shared_expert_gate": "shared experts: Megatron's product behind their plan",
    "moe_shared_expert_overlap": "in Megatron's layer linears leave it the collectives; see layer_problems",
    "moe_router_topk": "router",
    "moe_router_score_function": "router: softmax, sigmoid in a plan; sqrtsoftplus is Megatron's function",
    "moe_router_pre_softmax": "router",
    "moe_router_num_groups": "router",
    "moe_router_group_topk": "router",
    "moe_router_topk_scaling_factor": "router",
    "moe_router_dtype": "Megatron's gating product; dtype of logits and probabilities",
    "moe_router_enable_expert_bias": "router; counts of real tokens",
    "moe_router_bias_update_rate": "Megatron's update of the expert bias",
    "moe_router_load_balancing_type": "router: losses in plans; sinkhorn, quantile_balancing Megatron's functions",
    "moe_router_quantile_balancing_ema": "Megatron's quantile balancing",
    "moe_aux_loss_coeff": "router",
    "moe_z_loss_coeff": "router",
    "moe_router_force_load_balancing": "Megatron's logits, in front of the router's plan",
    "moe_router_force_biased": "Megatron's logits, in front of the router's plan",
    "moe_input_jitter_eps": "Megatron's input of the router",
    "moe_enable_routing_replay": "Megatron's routing, whose tables become the chosen experts",
    "moe_expert_capacity_factor": "Megatron's routing, whose tables become the chosen experts",
    "moe_token_drop_policy": "Megatron's routing, whose tables become the chosen experts",
    "moe_pad_expert_input_to_capacity": "Megatron's layer; see layer_problems",
    "moe_router_padding_for_quantization": "Megatron's layer; see layer_problems",
}
"""Fields of experts that the layers act upon, and where."""

DISPATCHERS = ("allgather", "alltoall", "flex")
"""Those of Megatron-Core 0.19; its own MoELayer runs all of them."""
OWN_DISPATCHERS = ("allgather", "alltoall")
BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "quantile_balancing", "none")
"""What moe_router_load_balancing_type may hold in Megatron-Core 0.19, which takes any other word for "none"."""

EXPERTS_FIELDS = frozenset(
    {
        "activation_func",
        "gated_linear_unit",
        "activation_func_clamp_value",
        "glu_linear_offset",
        "add_bias_linear",
        "num_moe_experts",
        "expert_model_parallel_size",
        "moe_ffn_hidden_size",
        "expert_tensor_parallel_size",
        "moe_apply_probs_on_input",
        "moe_mlp_glu_interleave_size",
        "moe_single_grouped_weight",
        "moe_single_grouped_bias",
        "fp8",
        "fp4",
    }
)
"""Fields that ``GroupedExperts`` reads, or would have to."""

_MEGATRONS = "or leave the layer to Megatron (gpt_block_spec(..., moe_layer='megatron'))"

_LAYER: dict[str, tuple[tuple[Any, ...], str]] = {
    "moe_shared_expert_overlap": ((False,), "the shared expert runs while the splits are copied to the host"),
    "overlap_moe_expert_parallel_comm": ((False,), "its schedule calls the steps of Megatron's layer one by one"),
    "moe_pad_expert_input_to_capacity": ((False,), "groups of rows are not padded"),
    "moe_router_padding_for_quantization": ((False, None), "groups of rows are not padded"),
    "moe_latent_size": ((None,), "its projections are Transformer Engine's"),
}
"""Field -> (values that ``LayerplanMoELayer`` runs, why no other one)."""


def experts_problems(config: Any) -> Iterable[Problem]:
    """What ``GroupedExperts`` would not do as ``config`` says, whichever layer calls it."""
    experts, parallel, shards = (
        config.num_moe_experts,
        config.expert_model_parallel_size,
        config.expert_tensor_parallel_size,
    )
    if not experts:
        return
    if experts % parallel:
        yield Problem(
            "num_moe_experts, expert_model_parallel_size",
            (experts, parallel),
            f"every rank holds as many experts, and {experts} % {parallel} = {experts % parallel}",
            f"set num_moe_experts to a multiple of {parallel}",
        )
    width = config.moe_ffn_hidden_size
    if shards and width % shards:
        yield Problem(
            "moe_ffn_hidden_size, expert_tensor_parallel_size",
            (width, shards),
            f"every rank takes as many hidden units of an expert, and {width} % {shards} = {width % shards}",
            f"set moe_ffn_hidden_size to a multiple of {shards}",
        )
    if config.add_bias_linear:
        yield Problem(
            "add_bias_linear, num_moe_experts", (True, experts), "experts have no biases", "set add_bias_linear = False"
        )
    if config.moe_apply_probs_on_input:
        yield Problem(
            "moe_apply_probs_on_input",
            True,
            "must be False: probabilities weigh the rows behind the activation",
            "set moe_apply_probs_on_input = False",
        )
    if config.moe_token_dispatcher_type not in DISPATCHERS:
        yield Problem(
            "moe_token_dispatcher_type",
            config.moe_token_dispatcher_type,
            f"must be one of {', '.join(DISPATCHERS)}",
            "set moe_token_dispatcher_type = 'alltoall'",
        )
    kinds = config.moe_router_load_balancing_type
    unknown = [k for k in (kinds if isinstance(kinds, list) else [kinds]) if k not in BALANCING]
    if unknown:
        yield Problem(
            "moe_router_load_balancing_type",
            kinds,
            f"must be among {', '.join(BALANCING)}",
            f"take {', '.join(map(repr, unknown))} out",
        )


def layer_problems(config: Any) -> Iterable[Problem]:
    """What ``LayerplanMoELayer`` would not do as ``config`` says; ``check_config`` has what concerns its experts."""
    kind = config.moe_token_dispatcher_type
    if kind not in OWN_DISPATCHERS:
        yield Problem(
            "moe_token_dispatcher_type",
            kind,
            f"must be one of {', '.join(OWN_DISPATCHERS)}: this layer has dispatchers of its own",
            f"set moe_token_dispatcher_type = 'alltoall', {_MEGATRONS}",
        )
    for field, (neutral, why) in _LAYER.items():
        value = getattr(config, field)
        if value not in neutral:
            yield Problem(field, value, f"must be {neutral[0]!r}: {why}", f"set {field} = {neutral[0]!r}, {_MEGATRONS}")
    parts = {getattr(m, "name", m) for m in config.cuda_graph_modules or ()} & {"moe_router", "moe_preprocess"}
    if config.cuda_graph_impl != "none" and parts:
        yield Problem(
            "cuda_graph_modules",
            sorted(parts),
            "must name no part of an MoE layer: its steps are not Megatron's",
            f"take {' and '.join(sorted(parts))} out, {_MEGATRONS}",
        )
