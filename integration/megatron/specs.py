"""Block specs for Megatron's GPT models: ``--spec layerplan.integration.megatron.specs guarded_block_spec``."""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from . import compat, layers
from .agreement import compare_planning_once
from .config_map import raise_for
from .latent_attention import MLASelfAttention
from .moe_layer import LayerplanMoELayer, SharedExperts, raise_for_moe_layer
from .moe_router import TopKRouter
from .optimizer import install_optimizer
from .provider import LayerplanSpecProvider
from .self_attention import SelfAttention
from .transformer_layer import LayerplanTransformerLayer, raise_for_residual

MOE_LAYERS = ("layerplan", "megatron")


@functools.cache
def guard_process() -> None:
    """Put the guards of compat.py in force, and layerplan's Adam and multi-tensor functions where neither Transformer Engine
    nor Apex is installed: for the rest of the process."""
    compat.apply(*compat.GUARDS)
    install_optimizer()


def guarded_block_spec(config: Any, vp_stage: int | None = None, **options: Any) -> TransformerBlockSubmodules:
    """``gpt_block_spec`` after ``guard_process`` and, where there are several ranks, one ``compare_planning`` of all of them: for a
    training script that offers no other place to call these from."""
    guard_process()
    compare_planning_once()
    return gpt_block_spec(config, vp_stage, **options)


def guarded_residual_block_spec(config: Any, vp_stage: int | None = None, **options: Any) -> TransformerBlockSubmodules:
    """``guarded_block_spec`` with ``fuse_residual``, for ``--spec``, which passes no options."""
    return guarded_block_spec(config, vp_stage, **{"fuse_residual": True} | options)


def gpt_block_spec(config: Any, vp_stage: int | None = None, *, provider: BackendSpecProvider | None = None,
                   pp_rank: int | None = None, fuse_residual: bool = False, moe_layer: str = "layerplan") -> TransformerBlockSubmodules:  # fmt: skip
    """The layers of this pipeline stage and the final norm.

    ``config``: a TransformerConfig, or an object whose ``transformer`` is one (Megatron's GPTModelConfig). Every field that
    changes a layer's maths is honoured or refused: all problems in one ConfigError, before anything is built.
    ``fuse_residual``: dense layers run their residual adds in the MLP's plan (``LayerplanTransformerLayer``); layers of
    experts stay Megatron's. ValueError where no layer is dense.
    ``moe_layer``: what runs layers of experts. "layerplan": ``LayerplanMoELayer``, whose router, permutation and experts are plans.
    "megatron": Megatron's MoELayer with its router and its dispatchers ("flex" too) over the provider's experts.
    """
    config = config if isinstance(config, TransformerConfig) else config.transformer
    raise_for(config)
    if moe_layer not in MOE_LAYERS:
        raise ValueError(f"moe_layer = {moe_layer!r}: must be one of {', '.join(MOE_LAYERS)}")
    if config.num_moe_experts and moe_layer == "layerplan":
        raise_for_moe_layer(config)
    if fuse_residual:
        raise_for_residual(config)
    provider = provider or LayerplanSpecProvider()
    attention = _mla(config, provider) if config.multi_latent_attention else _self_attention(config, provider)
    pattern = _moe_pattern(config)
    if fuse_residual and all(pattern):
        raise ValueError("fuse_residual = True: must be False where every layer has experts, whose residual adds are Megatron's; "
                         "leave it out")  # fmt: skip
    made = {moe: _layer(config, provider, attention, moe and moe_layer, fuse_residual and not moe) for moe in set(pattern)}
    first = get_transformer_layer_offset(config, vp_stage, pp_rank)
    count = get_num_layers_to_build(config, vp_stage, pp_rank)
    specs = [made[moe] for moe in pattern[first : first + count]]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=provider.layer_norm(config.normalization == "RMSNorm"))


def _moe_pattern(config: TransformerConfig) -> list[bool]:
    if not config.num_moe_experts:
        return [False] * config.num_layers
    freq = config.moe_layer_freq
    return [bool(f) for f in freq] if isinstance(freq, list) else [i % freq == 0 for i in range(config.num_layers)]


def _qk_norm(config: TransformerConfig, provider: BackendSpecProvider) -> type:
    return provider.layer_norm(config.normalization == "RMSNorm", for_qk=True) if config.qk_layernorm else IdentityOp


def _self_attention(config: TransformerConfig, provider: BackendSpecProvider) -> ModuleSpec:
    norm = _qk_norm(config, provider)
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=provider.column_parallel_layer_norm_linear(),
            core_attention=provider.core_attention(),
            linear_proj=provider.row_parallel_linear(),
            q_layernorm=norm,
            k_layernorm=norm,
        ),
    )


def _mla(config: TransformerConfig, provider: BackendSpecProvider) -> ModuleSpec:
    norm = _qk_norm(config, provider)
    return ModuleSpec(
        module=MLASelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=provider.column_parallel_linear(),
            linear_q_down_proj=provider.linear(),
            linear_q_up_proj=provider.column_parallel_linear(),
            linear_kv_down_proj=provider.linear(),
            linear_kv_up_proj=provider.column_parallel_linear(),
            core_attention=provider.core_attention(),
            linear_proj=provider.row_parallel_linear(),
            q_layernorm=norm if config.q_lora_rank else IdentityOp,
            kv_layernorm=norm,
        ),
    )


def _moe(config: TransformerConfig, provider: BackendSpecProvider) -> Any:
    linears = MLPSubmodules(linear_fc1=provider.column_parallel_linear(), linear_fc2=provider.row_parallel_linear())
    return partial(LayerplanMoELayer, submodules=MoESubmodules(
        experts=provider.grouped_mlp_modules(config.moe_grouped_gemm), shared_experts=partial(SharedExperts, submodules=linears), router=TopKRouter))  # fmt: skip


def _layer(config: TransformerConfig, provider: BackendSpecProvider, attention: ModuleSpec, moe: str | bool, fuse_residual: bool) -> ModuleSpec:
    """``moe``: what runs a layer of experts, False for a dense one."""
    norm = provider.layer_norm(config.normalization == "RMSNorm")
    if moe == "layerplan":
        mlp = _moe(config, provider)
    elif moe:
        mlp = get_moe_module_spec_for_backend(provider, config.num_moe_experts, config.moe_grouped_gemm)
    else:
        mlp = partial(layers.MLP.as_mlp_submodule, submodules=MLPSubmodules(
            linear_fc1=provider.column_parallel_layer_norm_linear(), linear_fc2=provider.row_parallel_linear()))  # fmt: skip
    return ModuleSpec(
        module=LayerplanTransformerLayer if fuse_residual else TransformerLayer,
        submodules=TransformerLayerSubmodules(
            # the norms in front of fused linears live in those; MLA's down projections share one, MoE's router reads it
            input_layernorm=norm if config.multi_latent_attention else IdentityOp,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm if moe else IdentityOp,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
            # Megatron's local layers write their norms under the fused names; MLA's input norm keeps its own
            sharded_state_dict_keys_map={},
        ),
    )
