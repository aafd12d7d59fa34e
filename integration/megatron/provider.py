"""The provider that answers Megatron's slots with layerplan's layers."""

from __future__ import annotations

from typing import Any

from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider

from . import layers
from .moe_experts import GroupedExperts


class LayerplanSpecProvider(BackendSpecProvider):
    """Answers the slots of GQA and MLA models, dense and with experts. ``fallback`` is the provider for the slot that
    layerplan does not take (TE activation modules): Megatron's local one by default."""

    def __init__(self, fallback: BackendSpecProvider | None = None) -> None:
        self.fallback = fallback if fallback is not None else LocalSpecProvider()

    def linear(self) -> type:
        return layers.DuplicatedLinear

    def column_parallel_linear(self) -> type:
        return layers.ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        return layers.RowParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return layers.LayerNormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        return layers.Norm  # which norm it is, the config says

    def core_attention(self) -> type:
        return layers.CoreAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
        return GroupedExperts  # grouped either way

    def activation_func(self) -> Any:
        return self.fallback.activation_func()
