"""A layer with its residual adds in its MLP's plan: Megatron's layer, our graph from the attention's output on."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.inference.utils import InferenceMode
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import make_viewless_tensor, nvtx_range_pop, nvtx_range_push

from ..problems import Problem
from . import layers
from .config_map import ConfigError, raise_for


@dataclasses.dataclass(frozen=True, slots=True)
class _Pending:
    """What the add behind the attention would add: it is left to the MLP's plan. No tuple, which Megatron's forward
    would unpack."""

    output: torch.Tensor
    bias: torch.Tensor | None
    residual: torch.Tensor
    dropout: float


def _postponed(training: bool, fused: bool) -> Any:
    """Stands in the slot of Megatron's bias-dropout-add."""
    del training, fused
    return lambda output_with_bias, residual, dropout: _Pending(*output_with_bias, residual, dropout)


def raise_for_residual(config: TransformerConfig) -> None:
    """ConfigError with all that ``config`` asks of the residual adds and a layer with fused ones would not do."""
    context = "a layer with fused residual adds"
    raise_for(config, context=context, fields={
        "fp8", "fp4", "fp32_residual_connection", "cpu_offloading", "fine_grained_activation_offloading",
        "cuda_graph_impl", "inference_fuse_tp_communication"})  # fmt: skip
    if config.mlp_chunks_for_training > 1:
        rule = "must be 1 where the residual adds are part of the MLP's plan, which runs all tokens at once"
        raise ConfigError([Problem("mlp_chunks_for_training", config.mlp_chunks_for_training, rule,
                                   "set it to 1, or leave fuse_residual out")], context)  # fmt: skip


class LayerplanTransformerLayer(TransformerLayer):
    """Megatron's layer of self attention and a dense MLP, with both residual adds in the MLP's plan: the planner may
    run add and norm as one region, in backward the norm's gradient adds the residual's, and the second add stands
    behind fc2 and its collective.

    The attention's part of the forward is Megatron's own. Inference runs Megatron's forward as a whole, and whoever
    calls ``_forward_attention`` and ``_forward_mlp`` (schedules that overlap experts) gets Megatron's. Parameters and
    checkpoint names are those of Megatron's layer. Raises ConfigError for options that the plan does not do, ValueError
    for slots that are not a dense layer's.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        raise_for_residual(self.config)
        wanted = {
            "mlp": isinstance(self.mlp, layers.MLP) and self.mlp.linear_fc1._norm is not None,
            "pre_mlp_layernorm": isinstance(self.pre_mlp_layernorm, IdentityOp),
            "pre_cross_attn_layernorm": isinstance(self.pre_cross_attn_layernorm, IdentityOp),
            "cross_attention": isinstance(self.cross_attention, IdentityOp),
            "cross_attn_bda": isinstance(self.cross_attn_bda, IdentityFuncOp),
            "self_attn_bda": self.self_attn_bda is get_bias_dropout_add,
            "mlp_bda": self.mlp_bda is get_bias_dropout_add,
        }
        wrong = [f"{name} = {_shown(getattr(self, name))}" for name, right in wanted.items() if not right]
        if wrong:
            raise ValueError(f"{'; '.join(wrong)}: a layer with fused residual adds has self attention without cross "
                             "attention, Megatron's bias-dropout-add, and layerplan's MLP with its norm in fc1; use "
                             "Megatron's TransformerLayer for others")  # fmt: skip
        self.self_attention.boundary, self.mlp.boundary = "", "the next layer's norm"

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """hidden_states [s(/tp), b, h] and Megatron's other arguments -> (hidden states of that shape, None)."""
        inference = (kwargs.get("inference_context"), kwargs.get("inference_params"))
        if InferenceMode.is_active() or any(given is not None for given in inference):
            return super().forward(*args, **kwargs)
        own = self.self_attn_bda
        self.self_attn_bda = _postponed
        try:
            pending, context = self._forward_attention(*args, **kwargs)
        finally:
            self.self_attn_bda = own
        nvtx_range_push(suffix="mlp")
        out, _ = self.mlp(pending.output, padding_mask=kwargs.get("padding_mask"),
                          residual=layers.Residual(pending.residual, pending.bias, pending.dropout))  # fmt: skip
        nvtx_range_pop(suffix="mlp")
        return make_viewless_tensor(inp=out, requires_grad=out.requires_grad, keep_graph=True), context


def _shown(slot: Any) -> str:
    return slot.__name__ if callable(slot) and hasattr(slot, "__name__") else type(slot).__name__
