"""Self attention with grouped heads on one plan: Megatron's parameters, our graph from hidden states to output."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import attention as megatron_attention
from megatron.core.transformer.identity_op import IdentityOp

from ...modules.base import PlannedModule
from ...modules.graphs import QK_NORM_INPUTS, HeadLayout, self_attention_graph
from . import layers
from .config_map import recomputes


class SelfAttention(PlannedModule, megatron_attention.SelfAttention):
    """Norm, QKV projection, split, qk-norm, rotary embedding, core attention and output projection as one graph.

    What the backward keeps is a save policy: "layernorm" of recompute_modules rebuilds the norm's output, "core_attn"
    the attention's. Inference, offloading, more tensor-parallel ranks than KV groups and rotary tables that differ
    between sequences or between queries and keys go through Megatron's forward, slot by slot.
    """

    boundary = "bias of linear_proj, dropout and residual add behind it"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._plan_name, self._deterministic = kwargs.get("name") or "", self.config.deterministic_mode
        wanted = {"linear_qkv": layers.ColumnParallelLinear, "linear_proj": layers.RowParallelLinear,
                  "core_attention": layers.CoreAttention}  # fmt: skip
        for name, kind in wanted.items():
            child = getattr(self, name)
            if not isinstance(child, kind):
                raise ValueError(f"{name} = {type(child).__name__}: this attention runs projections and core attention "
                                 f"in one plan and needs layerplan's {kind.__name__}; use Megatron's SelfAttention for "
                                 "others")  # fmt: skip
        norms = [n for n in (self.q_layernorm, self.k_layernorm) if n is not None and not isinstance(n, IdentityOp)]
        foreign = [type(n).__name__ for n in norms if not isinstance(n, layers.Norm)]
        if foreign or len(norms) == 1:
            raise ValueError(f"q_layernorm, k_layernorm = {foreign or 'one of them alone'}: must both be layerplan's "
                             "Norm, or neither be there")  # fmt: skip
        c = self.config
        self._qk_norm = bool(norms)
        by_slots = c.fine_grained_activation_offloading or c.attention_output_gate or c.test_mode
        self._whole = c.num_query_groups >= self.world_size and not by_slots
        for name in (*wanted, "q_layernorm", "k_layernorm") if self._whole else ():
            if isinstance(getattr(self, name), PlannedModule):
                getattr(self, name).run_by_parent()

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None,
                key_value_states: torch.Tensor | None = None, inference_context: Any = None, rotary_pos_emb: Any = None,
                rotary_pos_cos: torch.Tensor | None = None, rotary_pos_sin: torch.Tensor | None = None,
                rotary_pos_cos_sin: torch.Tensor | None = None, attention_bias: torch.Tensor | None = None,
                packed_seq_params: Any = None, sequence_len_offset: int | None = None,
                *, inference_params: Any = None):  # fmt: skip
        """hidden_states [s(/tp), b, h], packed [t(/tp), 1, h] -> (output of that shape, linear_proj's bias or None)."""
        c = self.config
        if c.no_rope_freq and c.no_rope_freq[self.layer_number - 1]:
            rotary_pos_emb = None
        others = (key_value_states, inference_context, inference_params, rotary_pos_cos, rotary_pos_sin,
                  rotary_pos_cos_sin, attention_bias)  # fmt: skip
        if not self._whole or any(x is not None for x in others) or not _one_table(rotary_pos_emb):
            return super().forward(
                hidden_states, attention_mask, key_value_states, inference_context, rotary_pos_emb, rotary_pos_cos,
                rotary_pos_sin, rotary_pos_cos_sin, attention_bias, packed_seq_params, sequence_len_offset,
                inference_params=inference_params,
            )  # fmt: skip
        packed = packed_seq_params if packed_seq_params is not None and packed_seq_params.qkv_format == "thd" else None
        x = hidden_states.squeeze(1) if packed is not None else hidden_states
        out = self._run(x, attention_mask, rotary_pos_emb, packed)
        return (out.unsqueeze(1) if packed is not None else out), self.linear_proj.bias

    def _run(self, x: torch.Tensor, attention_mask: torch.Tensor | None, rotary: Any, packed: Any) -> torch.Tensor:
        qkv, proj, core = self.linear_qkv, self.linear_proj, self.core_attention
        norms = (self.q_layernorm, self.k_layernorm) if self._qk_norm else ()
        layers.run_pre_hooks(qkv, proj, core, *norms)
        tp = qkv._parallel()
        inputs: dict[str, torch.Tensor | None] = {"x": x, "qkv": qkv.weight, "proj": proj.weight, "qkv_bias": qkv.bias}
        if qkv._norm is not None:
            inputs |= {"norm_weight": qkv.layer_norm_weight, "norm_bias": qkv.layer_norm_bias}
        for side, norm in zip("qk", norms, strict=False):
            inputs |= {f"{side}_norm_weight": norm.weight, f"{side}_norm_bias": norm.bias}
        optional, attrs = core.arguments(x.device, attention_mask, self.attn_mask_type, packed)
        if rotary is not None:
            inputs |= dict(zip(("cos", "sin"), self._table(rotary), strict=True))
            if packed is not None:
                tokens = x.shape[0] * (tp.size if tp.sequence else 1)
                inputs |= {f"{side}_positions": layers.positions_in_segments(optional[f"cu_seqlens_{side}"], tokens)
                           for side in "qk"}  # fmt: skip
        inputs = {n: t for n, t in (inputs | optional).items() if t is not None}
        names = tuple(inputs)
        groups = self.num_query_groups_per_partition
        per_group = self.num_attention_heads_per_partition // groups
        heads = HeadLayout(groups, per_group, self.hidden_size_per_attention_head)
        qk_norm = norms[0].attrs if norms else None
        build = self_attention_graph(tp, heads, names, attrs, norm=qkv._norm, qk_norm=qk_norm,
                                     interleaved=self.config.rotary_interleaved)  # fmt: skip
        again = set(qkv._recompute(tp)) | (QK_NORM_INPUTS if norms else set())
        if recomputes(self.config, "core_attn"):
            again.add("sdpa")
        runner = self.planned((names, tp, tuple(sorted(attrs.items()))), names, build, recompute=frozenset(again),
                              groups={tp.symbol: qkv.tp_group})  # fmt: skip
        return runner(*inputs.values(), sink=qkv.sink_for({1: qkv.weight, 2: proj.weight}))

    def _table(self, rotary: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [s, r / 2] in float32 of Megatron's angles [s, 1, 1, r], kept on that tensor: its owner keeps it
        for as long as the length stays, and all layers read it."""
        angles = rotary[0] if isinstance(rotary, tuple) else rotary
        made = getattr(angles, "_layerplan_table", None)
        if made is None:
            half = angles[:, 0, 0, :: 2] if self.config.rotary_interleaved else angles[:, 0, 0, : angles.shape[-1] // 2]
            factor = self._yarn_concentration_factor
            made = angles._layerplan_table = half.float().cos() * factor, half.float().sin() * factor
        return made

    def backward_dw(self) -> None:
        """The deferred weight gradients of one micro-batch."""
        if self._whole:
            self.linear_qkv.backward_dw(self.linear_proj)
        else:
            super().backward_dw()


def _one_table(rotary: Any) -> bool:
    """Whether one table of angles serves all sequences, queries and keys; also where there is none."""
    if isinstance(rotary, tuple):
        if rotary[0] is not rotary[1]:
            return False
        rotary = rotary[0]
    return rotary is None or (rotary.dim() == 4 and rotary.shape[1] == 1 and rotary.shape[2] == 1)
