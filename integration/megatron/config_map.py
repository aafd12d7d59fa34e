"""What becomes of every field of Megatron's TransformerConfig and MLATransformerConfig: honoured or refused.

    problems = check_config(config)         # all of them, each with field, value, rule and remedy
    raise_for(config)                       # ConfigError that holds them all; the block spec calls it before building
    raise_for(config, fields={"normalization"})  # those of some fields; a slot that is built without the spec calls it

HONOURED, REFUSED and IRRELEVANT together name exactly the fields of the two dataclasses of megatron-core 0.19.2; a
test holds that, so that a field which a new Megatron brings fails by name instead of being ignored. Megatron itself
ignores some fields where Transformer Engine is missing (FP8 among them): those are refused here. This file imports no
Megatron.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch.nn.functional as F

from ..problems import Problem, show
from . import compat, moe_config


class ConfigError(ValueError):
    """A config that these layers would not run as it says. `problems` holds all that is wrong with it."""

    def __init__(self, problems: Iterable[Problem], context: str = "layerplan"):
        self.problems = tuple(problems)
        lines = "\n".join(f"  {p}" for p in self.problems)
        super().__init__(f"{context} cannot run this config as it says, {len(self.problems)} problem(s):\n{lines}")


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """A field that must keep one of its neutral values, and why. The default remedy is to set the first of them."""

    neutral: tuple[Any, ...]
    rule: str
    remedy: str = ""

    def problem(self, field: str, value: Any) -> Problem | None:
        # Compared with its type: 0 and False are different things to say, and a list has no hash.
        if any(type(value) is type(n) and value == n for n in self.neutral):
            return None
        shown = " or ".join(show(n) for n in self.neutral)
        return Problem(
            field, value, f"must be {shown}: {self.rule}", self.remedy or f"set {field} = {show(self.neutral[0])}"
        )


HONOURED: dict[str, str] = {
    "tensor_model_parallel_size": "column- and row-parallel linears",
    "sequence_parallel": "collectives around the linears; gradient sums of replicated parameters",
    "perform_initialization": "parameters",
    "use_cpu_initialization": "parameters",
    "init_model_with_meta_device": "parameters",
    "init_method": "parameters",
    "output_layer_init_method": "row-parallel parameters",
    "fp16": "through params_dtype",
    "bf16": "through params_dtype",
    "params_dtype": "parameters; fp32, bf16, fp16",
    "deterministic_mode": "engines whose results may differ between runs decline",
    "gradient_accumulation_fusion": "weight gradients go into main_grad",
    "delay_wgrad_compute": "backward_dw of the linears",
    "hidden_size": "sizes",
    "num_attention_heads": "sizes, see _head_counts",
    "num_query_groups": "sizes; grouped heads, see _head_counts",
    "kv_channels": "sizes, see _head_counts",
    "ffn_hidden_size": "sizes, see _ffn",
    "softmax_scale": "core attention",
    "softmax_type": "core attention: vanilla, off-by-one, learnable",
    "attention_dropout": "core attention",
    "hidden_dropout": "the MLP's plan where it holds the residual adds; elsewhere Megatron's",
    "mlp_chunks_for_training": "Megatron's transformer layer; must be 1 where the MLP's plan holds the residual adds",
    "apply_query_key_layer_scaling": "core attention: the scale is divided by the layer's number",
    "attention_softmax_in_fp32": "core attention: always in fp32",
    "window_size": "core attention",
    "window_attn_skip_freq": "core attention",
    "normalization": "norms: RMSNorm, LayerNorm",
    "layernorm_epsilon": "norms",
    "layernorm_zero_centered_gamma": "norms",
    "qk_layernorm": "norms of q and k, of MLA's latents",
    "add_bias_linear": "linears",
    "add_qkv_bias": "linears",
    "gated_linear_unit": "activation, see _activation",
    "activation_func": "activation, see _activation",
    "activation_func_clamp_value": "activation: gated ones only",
    "bias_activation_fusion": "activation: gelu then uses tanh, as Megatron's fused one does",
    "recompute_granularity": "save policies of the plans; Megatron's checkpoint around a layer",
    "recompute_modules": "save policies of the plans: layernorm, moe_act, mla_up_proj; mlp with fused residual adds; "
    "core_attn of MLA, whose plan keeps nothing that it would rebuild; the others are Megatron's",
    "multi_latent_attention": "block spec",
    "q_lora_rank": "sizes",
    "kv_lora_rank": "sizes",
    "qk_head_dim": "sizes",
    "qk_pos_emb_head_dim": "sizes, see _latent",
    "v_head_dim": "sizes",
    "rope_type": "latent attention, see _latent; its tables come from Megatron's rope and yarn",
    "rotary_interleaved": "Megatron's rotary embedding; see _latent",
    "no_rope_freq": "Megatron's rotary embedding; see _latent",
    "apply_rope_fusion": "latent attention: the planner chooses the kernel; elsewhere Megatron's rotary embedding",
    "num_layers": "block spec",
    "context_parallel_size": "must be 1, see _context_parallel",
    "fused_residual_rmsnorm": "the norm's residual stays Megatron's; see _residual_norm for recomputation",
    "attention_backend": "auto: the planner chooses; see _attention_backend",
} | moe_config.HONOURED
"""Fields that layerplan's slots or block spec act upon, and where."""

_TE = "it is Transformer Engine's"

REFUSED: dict[str, Refusal] = {
    "fp8": Refusal(
        (None, False), "these layers do not quantise yet, and Megatron ignores it without Transformer Engine"
    ),
    "fp4": Refusal(
        (None, False), "these layers do not quantise yet, and Megatron ignores it without Transformer Engine"
    ),
    "fp8_param": Refusal((False,), "parameters are kept in params_dtype"),
    "fp4_param": Refusal((False,), "parameters are kept in params_dtype"),
    "fp8_output_proj": Refusal((False,), "the output layer is not quantised"),
    "fp8_dot_product_attention": Refusal((False,), "attention is not quantised"),
    "fp8_multi_head_attention": Refusal((False,), "attention is not quantised"),
    "activation_func_fp8_input_store": Refusal((False,), "activation inputs are saved in their own dtype"),
    "quant_recipe": Refusal((None,), "per-module quantisation recipes are read by Transformer Engine's linears only"),
    "glu_linear_offset": Refusal((0.0, 0), "the gated activations add no offset"),
    "fp32_residual_connection": Refusal(
        (False,), "it hands fp32 activations to layers whose weights are in params_dtype"
    ),
    "apply_residual_connection_post_layernorm": Refusal((False,), "no code of Megatron-Core 0.19 reads it"),
    "enable_autocast": Refusal(
        (False,), "plans are made for the dtypes of the weights", "set params_dtype instead, and bf16 or fp16"
    ),
    "hybrid_context_parallel": Refusal((False,), "core attention has no context parallelism"),
    "gtp_weight_remat_size": Refusal(
        (1,), "weights are not sharded beyond TP", "set tensor_parallel_num_weight_shards = None"
    ),
    "expert_gtp_weight_remat_size": Refusal(
        (1,), "weights are not sharded beyond TP", "set expert_tensor_parallel_num_weight_shards = None"
    ),
    "tp_comm_overlap": Refusal(
        (False,), f"{_TE} user-buffer overlap; these linears overlap their collectives themselves"
    ),
    "overlap_dispatch_backward_with_experts_wgrad": Refusal((False,), f"{_TE} grouped linear that splits its backward"),
    "cpu_offloading": Refusal((False,), f"{_TE} offload context"),
    "fine_grained_activation_offloading": Refusal(
        (False,), "tensors that a plan saves are not offered to the offloader"
    ),
    "moe_paged_stash": Refusal((False,), f"{_TE} fused grouped MLP"),
    "qk_l2_norm": Refusal((False,), "the block spec has no L2 norm", "use qk_layernorm"),
    "qk_clip": Refusal((False,), "core attention does not return its largest logits"),
    "log_max_attention_logit": Refusal((False,), "core attention does not return its largest logits"),
    "experimental_attention_variant": Refusal(
        (None,), "the block spec builds GQA and MLA", "use Megatron's spec for dsa and gated_delta_net"
    ),
    "mla_down_proj_fusion": Refusal((False,), f"{_TE} fused down projection"),
    "cache_mla_latents": Refusal((False,), f"{_TE} fused up projection is what the latent cache absorbs"),
    "flash_decode": Refusal((False,), "it goes past the core-attention slot, and with it past windows and sinks"),
    "batch_invariant_mode": Refusal((False,), "no engine promises results that are the same for every batch size"),
    "use_kitchen": Refusal((False,), "Kitchen's layers would take the slots"),
    "use_kitchen_attention": Refusal((False,), "Kitchen's attention would take the slot"),
    "use_te_activation_func": Refusal(
        (False,), f"the activation is part of the MLP's plan, and {_TE} module is wrong for silu and relu"
    ),
    "use_transformer_engine_op_fuser": Refusal((False,), _TE),
    "use_grouped_gemm_for_dense_mlp": Refusal((False,), f"{_TE} op fuser"),
    "use_grouped_gemm_for_shared_expert": Refusal((False,), f"{_TE} grouped linear"),
    "moe_mlp_glu_interleave_size": Refusal((None,), "gate and up are stored one after the other"),
    "moe_shared_expert_glu_interleave_size": Refusal((None,), "gate and up are stored one after the other"),
    "moe_single_grouped_weight": Refusal((False,), f"{_TE} grouped linear"),
    "moe_single_grouped_bias": Refusal((False,), f"{_TE} grouped linear"),
    "mtp_num_layers": Refusal((None,), "the block spec has no multi-token prediction layers"),
    "heterogeneous_block_specs": Refusal((False,), "all layers of the block spec have one shape"),
    "is_hybrid_model": Refusal((False,), "the block spec has no state-space layers", "use Megatron's hybrid model"),
    "symmetric_ar_type": Refusal((None,), f"{_TE} row-parallel linear reads it"),
    "use_inference_optimized_layers": Refusal((False,), "Megatron's inference layers would take the slots"),
    "inference_fuse_tp_communication": Refusal((False,), "Megatron's inference layers read it"),
    "transformer_impl": Refusal(
        ("transformer_engine", "local"), "the inference layers would take the slots", "set transformer_impl = 'local'"
    ),
    "cuda_graph_impl": Refusal(
        ("none", "local", "full_iteration"),
        f"{_TE} capture knows its own modules only",
        "set cuda_graph_impl = 'local'",
    ),
    "external_cuda_graph": Refusal(
        (False,), f"{_TE} capture knows its own modules only", "set cuda_graph_impl = 'local'"
    ),
}
"""Fields that must keep a neutral value: Megatron leaves them to the layers, and these layers do not act upon them."""

_IRRELEVANT_GROUPS: dict[str, str] = {
    "Megatron's groups, schedules and pipeline": """
        pipeline_model_parallel_comm_backend pipeline_model_parallel_size virtual_pipeline_model_parallel_size
        timers finalize_model_grads_func grad_scale_func
        moe_grad_scale_func mtp_grad_scale_func no_sync_func grad_sync_func param_sync_func
        num_microbatches_with_partial_activation_checkpoints pipeline_dtype variable_seq_lengths
        overlap_p2p_comm batch_p2p_comm batch_p2p_sync use_ring_exchange_p2p deallocate_pipeline_outputs
        overlap_p2p_comm_warmup_flush microbatch_group_size_per_vp_stage barrier_with_L1_time
        num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage pipeline_model_parallel_layout
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
        ep_overlap_early_attn_memory_release calculate_per_token_loss
        config_logger_dir hetereogenous_dist_checkpoint high_priority_a2a_comm_stream""",
    "Megatron's embedding, output layer and loss": """
        cross_entropy_loss_fusion cross_entropy_fusion_impl defer_embedding_wgrad_compute wgrad_deferral_limit
        embedding_init_method embedding_init_method_std clone_scatter_output_in_embedding mup_embedding_mult
        mup_output_mult""",
    "resolved by Megatron into init_method, softmax_scale and learning rates": """
        init_method_std use_mup mup_width_mult mup_base_hidden_size mup_base_head_dim mup_attn_scale_power""",
    "Megatron's rotary embedding: in front of the core attention, or the tables that latent attention reads": """
        fused_single_qkv_rope mrope_section
        rotary_base rotary_percent rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow
        mscale mscale_all_dim""",
    "Megatron's attention module and transformer layer, around the slots": """
        attention_output_gate test_mode bias_dropout_fusion mlp_chunks_for_prefill flash_attention_version""",
    "a choice of kernel with the same result, which the planner makes here": """
        masked_softmax_fusion persist_layer_norm memory_efficient_layer_norm
        disable_bf16_reduced_precision_matmul disable_parameter_transpose_cache use_fused_weighted_squared_relu
        moe_permute_fusion moe_router_fusion""",
    "resolved by Megatron into gtp_weight_remat_size and expert_gtp_weight_remat_size, which are refused": """
        tensor_parallel_num_weight_shards expert_tensor_parallel_num_weight_shards""",
    "Megatron's checkpoint around whole layers": "recompute_method recompute_num_layers distribute_saved_activations",
    "random number trackers, which Megatron makes": "use_te_rng_tracker inference_rng_tracker inference_sampling_seed",
    "without effect unless moe_token_dispatcher_type = 'flex', whose layer is Megatron's": """
        moe_enable_deepep moe_flex_dispatcher_backend moe_permute_fusion_into_hybridep
        moe_hybridep_pad_uneven_dispatch_inputs moe_flex_dispatcher_num_sms moe_deepep_num_sms moe_hybridep_num_sms
        moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms_preprocessing
        moe_ncclep_static_shape moe_ncclep_zero_copy moe_expert_rank_capacity_factor""",
    "resolved by Megatron into other fields of experts, or read by its log": """
        moe_router_topk_limited_devices moe_router_padding_for_fp8 moe_layer_recompute moe_token_dropping
        moe_per_layer_logging moe_pad_experts_for_cuda_graph_inference""",
    "Megatron's CUDA graphs": """
        enable_cuda_graph cuda_graph_use_single_mempool cuda_graph_retain_backward_graph cuda_graph_warmup_steps
        cuda_graph_modules inference_cuda_graph_scope cuda_graph_scope""",
    "without effect unless fp8 or fp4, which are refused": """
        fp8_recipe fp8_quantizer_factory fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo
        fp8_wgrad tp_only_amax_red first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16
        fp4_recipe fp4_quantizer_factory""",
    "without effect unless tp_comm_overlap, which is refused": """
        tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad
        tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs tp_comm_overlap_disable_qkv
        tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend""",
    "without effect unless context_parallel_size > 1, which is refused": """
        hierarchical_context_parallel_sizes max_seqlen_per_dp_cp_rank cp_comm_type""",
    "without effect unless one of the offloading fields, which are refused": """
        cpu_offloading_num_layers _cpu_offloading_context cpu_offloading_activations cpu_offloading_weights
        cpu_offloading_double_buffering cpu_offloading_retain_pinned_cpu_buffers offload_modules
        min_offloaded_tensor_size delay_offload_until_cuda_graph delta_offload_bytes_across_pp_ranks
        activation_offload_fraction fine_grained_offloading_max_inflight_offloads moe_paged_stash_page_size
        moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_buffer_size_factor_cpu""",
    "without effect unless experimental_attention_variant, which is refused": """
        experimental_attention_variant_loss_scale_func dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk
        dsa_indexer_topk_freq dsa_indexer_skip_topk_offset dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss
        dsa_kernel_backend dsa_indexer_rope_interleaved dsa_indexer_rotate_activation dsa_indexer_scoring_relu
        dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32 linear_attention_freq linear_conv_kernel_dim
        linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads""",
    "without effect unless mtp_num_layers, which is refused": """
        mtp_standalone mtp_loss_scaling_factor mtp_use_repeated_layer mtp_detach_heads
        mtp_hybrid_override_pattern""",
    "without effect unless qk_clip, use_kitchen_attention, enable_autocast, is_hybrid_model, use_inference_...": """
        qk_clip_alpha qk_clip_threshold kitchen_attention_backend autocast_dtype mamba_state_dim mamba_head_dim
        mamba_num_groups mamba_num_heads mamba_training_ssm_states_dtype use_mamba_mem_eff_path
        nccl_all_reduce_for_prefill inference_disable_triton_nvls_kernels inference_grouped_gemm_backend
        inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type""",
}

IRRELEVANT: dict[str, str] = {name: why for why, names in _IRRELEVANT_GROUPS.items() for name in names.split()}
"""Fields that do not concern the layers, and why."""


# Honoured fields have rules of their own; each function yields what breaks them.


def _norm(config: Any) -> Iterable[Problem]:
    if config.normalization not in ("RMSNorm", "LayerNorm"):
        yield Problem("normalization", config.normalization, "must be 'RMSNorm' or 'LayerNorm'", "set one of them")


def _activation(config: Any) -> Iterable[Problem]:
    func, gated = config.activation_func, config.gated_linear_unit
    plain = func is F.gelu or getattr(func, "__name__", "") == "squared_relu"
    if not (func in (F.silu, F.gelu) if gated else plain):
        yield Problem(
            "activation_func, gated_linear_unit",
            f"{show(func)}, {gated}",
            "must be silu or gelu with gated_linear_unit, gelu or squared_relu without",
            "choose one of these four pairs",
        )
    if config.activation_func_clamp_value is not None and not gated:
        yield Problem(
            "activation_func_clamp_value",
            config.activation_func_clamp_value,
            "gated activations only",
            "set it to None, or gated_linear_unit to True",
        )


def _softmax(config: Any) -> Iterable[Problem]:
    if config.softmax_type not in ("vanilla", "off-by-one", "learnable"):
        yield Problem(
            "softmax_type", config.softmax_type, "must be 'vanilla', 'off-by-one' or 'learnable'", "set one of them"
        )
    for name in ("attention_dropout", "hidden_dropout"):
        value = getattr(config, name)
        if not 0.0 <= value < 1.0:
            yield Problem(name, value, "must be at least 0 and below 1", f"set {name} = 0.0 to turn it off")


def _window(config: Any) -> Iterable[Problem]:
    size = config.window_size
    if size is None:
        return
    if len(size) != 2 or any(type(side) is not int or side < -1 for side in size):
        yield Problem(
            "window_size",
            size,
            "must be (left, right), tokens on each side, -1 for no limit",
            "give two integers of at least -1",
        )


def _context_parallel(config: Any) -> Iterable[Problem]:
    if config.context_parallel_size != 1:
        yield Problem(
            "context_parallel_size",
            config.context_parallel_size,
            "must be 1: core attention sees its own rank's tokens only",
            "set it to 1, or use Megatron's spec for context parallelism",
        )


def _attention_backend(config: Any) -> Iterable[Problem]:
    name = getattr(config.attention_backend, "name", config.attention_backend)
    if name != "auto":
        yield Problem(
            "attention_backend",
            name,
            "must be auto: it names Transformer Engine's backends, or makes Megatron replace the slot",
            "leave the choice to the planner",
        )


def _head_counts(config: Any) -> Iterable[Problem]:
    heads, groups, tp = config.num_attention_heads, config.num_query_groups, config.tensor_model_parallel_size
    latent = config.multi_latent_attention
    counts = {"num_attention_heads": heads, "num_query_groups": groups, "tensor_model_parallel_size": tp}
    if not latent:
        counts["kv_channels"] = config.kv_channels
    bad = {field: n for field, n in counts.items() if type(n) is not int or n < 1}
    for field, n in bad.items():
        yield Problem(field, n, "must be an integer of at least 1", f"set {field} to one")
    if bad:
        return
    if heads % tp:
        yield Problem(
            "num_attention_heads, tensor_model_parallel_size",
            (heads, tp),
            f"every tensor-parallel rank takes the same number of heads, and {heads} % {tp} = {heads % tp}",
            f"set num_attention_heads to a multiple of {tp}, or tensor_model_parallel_size to a divisor of {heads}",
        )
    if latent and groups != heads:
        yield Problem(
            "num_query_groups, num_attention_heads",
            (groups, heads),
            "must be equal with multi_latent_attention, which has a key and a value for every head",
            f"set num_query_groups = {heads}",
        )
    elif heads % groups:
        yield Problem(
            "num_attention_heads, num_query_groups",
            (heads, groups),
            f"every query group has the same number of heads, and {heads} % {groups} = {heads % groups}",
            f"set num_attention_heads to a multiple of {groups}, or num_query_groups to a divisor of {heads}",
        )
    if not latent and groups % tp and tp % groups:
        yield Problem(
            "num_query_groups, tensor_model_parallel_size",
            (groups, tp),
            f"a rank takes whole query groups or a part of one: neither of {groups} and {tp} divides the other",
            f"set num_query_groups to a multiple or a divisor of {tp}",
        )


def _ffn(config: Any) -> Iterable[Problem]:
    # Megatron divides the two halves of a gated fc1 together: 2 * ffn may divide where each half does not.
    ffn, tp = config.ffn_hidden_size, config.tensor_model_parallel_size
    if type(tp) is int and tp > 0 and ffn % tp:
        yield Problem(
            "ffn_hidden_size, tensor_model_parallel_size",
            (ffn, tp),
            f"every tensor-parallel rank takes as many hidden units, and {ffn} % {tp} = {ffn % tp}",
            f"set ffn_hidden_size to a multiple of {tp}",
        )


def _latent(config: Any) -> Iterable[Problem]:
    if not config.multi_latent_attention:
        return
    if config.rope_type not in ("rope", "yarn"):
        yield Problem("rope_type", config.rope_type, "must be 'rope' or 'yarn'", "set one of them")
    if config.qk_pos_emb_head_dim % 2:
        yield Problem(
            "qk_pos_emb_head_dim",
            config.qk_pos_emb_head_dim,
            "must be even: the rotary embedding turns pairs",
            f"set it to {config.qk_pos_emb_head_dim + 1}",
        )
    if config.no_rope_freq:
        yield Problem(
            "no_rope_freq",
            config.no_rope_freq,
            "must be None with multi_latent_attention: Megatron's turns keys and queries in every layer",
            "set no_rope_freq = None",
        )
    if config.rotary_interleaved:
        yield Problem(
            "rotary_interleaved",
            True,
            "must be False with multi_latent_attention, whose rotary pairs are interleaved as they are: Megatron would "
            "pair its half-split copy a second time, which is no rotation",
            "set rotary_interleaved = False",
        )


def recomputes(config: Any, module: str) -> bool:
    """Whether ``config`` asks for selective recomputation of ``module``, by Megatron's name for it."""
    return config.recompute_granularity == "selective" and module in (config.recompute_modules or ())


def _residual_norm(config: Any) -> Iterable[Problem]:
    # Megatron frees the norm's outputs, the residual too, before it reads that one: transformer_layer.py:684,698.
    if config.fused_residual_rmsnorm and recomputes(config, "layernorm"):
        yield Problem(
            "fused_residual_rmsnorm, recompute_modules",
            f"True, {config.recompute_modules}",
            "must not go together: Megatron frees the residual before it reads it",
            "set fused_residual_rmsnorm = False, or take 'layernorm' out of recompute_modules",
        )


def _guards(config: Any) -> Iterable[Problem]:
    """Faults of Megatron that this config runs into unless the guard of compat.py is in force."""
    active = compat.active()

    def missing(fields: str, value: str, guard: str, other: str) -> Iterable[Problem]:
        if guard not in active:
            remedy = ("take guarded_block_spec as the spec, or call layerplan.integration.megatron.compat.apply(*compat.GUARDS) before "
                      f"building{other}")  # fmt: skip
            yield Problem(fields, value, f"{compat.PATCHES[guard].why} ({compat.PATCHES[guard].where})", remedy)

    tp = config.tensor_model_parallel_size
    if config.multi_latent_attention and tp > 1 and not config.sequence_parallel and config.qk_layernorm:
        yield from missing(
            "multi_latent_attention, tensor_model_parallel_size, sequence_parallel, qk_layernorm",
            f"True, {tp}, False, True",
            "mla-qk-norm-gradient",
            ", or set sequence_parallel = True",
        )
    if config.gradient_accumulation_fusion and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:
        yield from missing("gradient_accumulation_fusion", "True", "weight-gradient-accumulation", ", or set it to False")
    # what is left to Megatron: the norms that stand before MLA and experts
    theirs = {"layernorm"} if config.multi_latent_attention or config.num_moe_experts else set()
    again = {module for module in theirs if recomputes(config, module)}
    if again and importlib.util.find_spec("transformer_engine") is None:
        yield from missing("recompute_modules", str(sorted(again)), "checkpoint-fp8-flag", "")


RULES: tuple[Callable[[Any], Iterable[Problem]], ...] = (
    _norm,
    _activation,
    _softmax,
    _window,
    _head_counts,
    _ffn,
    _latent,
    _context_parallel,
    _attention_backend,
    _residual_norm,
    moe_config.experts_problems,
    _guards,
)


def check_config(config: Any) -> list[Problem]:
    """All that is not honoured of `config`, a TransformerConfig or MLATransformerConfig after its __post_init__.

    An empty list means that layerplan's layers run it as it says. Fields that the table does not know, of a subclass
    or of another Megatron-Core, are a problem each if they are set away from their default.
    """
    problems = []
    for field, refusal in REFUSED.items():
        if not hasattr(config, field):
            continue
        problem = refusal.problem(field, getattr(config, field))
        if problem is not None:
            problems.append(problem)
    for rule in RULES:
        problems += rule(config)
    return problems + list(_unknown(config))


def _unknown(config: Any) -> Iterable[Problem]:
    for field in dataclasses.fields(config):
        if field.name in HONOURED or field.name in REFUSED or field.name in IRRELEVANT:
            continue
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        value = getattr(config, field.name)
        if value != default:
            yield Problem(
                field.name,
                value,
                f"is not a field of megatron-core {compat.VERIFIED}.x: whether the layers must act upon it is unknown",
                f"leave it at {show(default)}, or install megatron-core {compat.VERIFIED}.x",
            )


def raise_for(config: Any, *, context: str = "layerplan", fields: Collection[str] | None = None) -> None:
    """Raises one ConfigError with all problems of `config`; `context` names who refuses it. With `fields`, only problems that
    concern one of them count: a slot asks for the fields that it reads."""
    problems = check_config(config)
    if fields is not None:
        problems = [p for p in problems if not set(fields).isdisjoint(p.field.split(", "))]
    if problems:
        raise ConfigError(problems, context)
