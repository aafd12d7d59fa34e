"""Multi-head latent attention on one plan: Megatron's parameters, our graph from the latents to attention's output."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import multi_latent_attention as mla
from megatron.core.transformer.identity_op import IdentityOp

from ...modules.base import PlannedModule
from ...modules.graphs import LATENT_UP_PROJECTION, latent_attention_graph
from ..planner.shapes import bucket
from . import layers
from .config_map import recomputes


class MLASelfAttention(PlannedModule, mla.MLASelfAttention):
    """Up projections, rotary embedding and core attention as one graph, from the latents' norms to linear_proj.

    "mla_up_proj" of recompute_modules is its save policy: queries, keys and values are rebuilt in the backward from the
    latents. Inference goes through Megatron's forward, which keeps keys and values in its cache.
    """

    boundary = "bias of linear_proj, dropout and residual add behind it"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._plan_name, self._deterministic = kwargs.get("name") or "", self.config.deterministic_mode
        self._table: tuple[torch.Tensor, torch.Tensor] | None = None
        self.recompute_up_proj = False  # Megatron's own way to do it; here it is a save policy
        column, query = layers.ColumnParallelLinear, "linear_q_proj" if self.config.q_lora_rank is None else "linear_q_up_proj"
        for name, kind in ((query, column), ("linear_kv_up_proj", column), ("core_attention", layers.CoreAttention)):
            child = getattr(self, name)
            if not isinstance(child, kind) or getattr(child, "_norm", None) is not None:
                raise ValueError(f"{name} = {type(child).__name__}: this attention runs the up projections and the core "
                                 f"attention in one plan and needs layerplan's {kind.__name__}; use Megatron's "
                                 "MLASelfAttention for others")  # fmt: skip
            child.run_by_parent()

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """The spec's classes as they are. Megatron's resolver would look for norms inside Transformer Engine's linears,
        and put a second norm in front of q_proj where there is no query latent."""
        low_rank, norms = self.config.q_lora_rank is not None, self.config.qk_layernorm
        return {
            "linear_q_proj": IdentityOp if low_rank else submodules.linear_q_proj,
            "linear_q_up_proj": submodules.linear_q_up_proj if low_rank else IdentityOp,
            "linear_kv_up_proj": submodules.linear_kv_up_proj,
            "q_layernorm": submodules.q_layernorm if norms and low_rank else IdentityOp,
            "kv_layernorm": submodules.kv_layernorm if norms else IdentityOp,
        }

    def _qkv_down_projection(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[s(/tp), b, h] -> the query's latent (the hidden states without one) and [s(/tp), b, kv_lora_rank + rope]."""
        q_latent = hidden_states if self.config.q_lora_rank is None else self.linear_q_down_proj(hidden_states)[0]
        return q_latent, self.linear_kv_down_proj(hidden_states)[0]

    @property
    def _q_projection(self) -> layers.ColumnParallelLinear:
        return self.linear_q_proj if self.config.q_lora_rank is None else self.linear_q_up_proj

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None,
                key_value_states: torch.Tensor | None = None, inference_context: Any = None, *,
                packed_seq_params: Any = None, inference_params: Any = None, **options: Any):  # fmt: skip
        """hidden_states [s(/tp), b, h], packed [t(/tp), 1, h] -> (output of that shape, bias of linear_proj or None)."""
        if inference_context is not None or inference_params is not None:
            return super().forward(hidden_states, attention_mask, key_value_states, inference_context,
                                   inference_params=inference_params, packed_seq_params=packed_seq_params, **options)  # fmt: skip
        unread = ("position_ids", "sequence_len_offset")  # by Megatron's forward too
        given = [n for n, x in (options | {"key_value_states": key_value_states}).items() if x is not None and n not in unread]
        if given:
            raise ValueError(f"{given[0]}: must be None; latent attention makes its rotary embedding and its keys itself and "
                             "adds no bias")  # fmt: skip
        packed = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
        q_latent, kv = self._qkv_down_projection(hidden_states)
        kv_latent, k_rope = torch.split(kv, [self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim], dim=-1)
        if packed:
            q_latent, kv_latent, k_rope = (x.squeeze(1) for x in (q_latent, kv_latent, k_rope))
        if self.config.q_lora_rank is not None:
            q_latent = self.q_layernorm(q_latent)
        out = self._attend(q_latent, self.kv_layernorm(kv_latent), k_rope.unsqueeze(-2), attention_mask,
                           packed_seq_params if packed else None)  # fmt: skip
        out = out.reshape(out.shape[0], 1 if packed else out.shape[1], -1)
        return self.linear_proj(out)

    def _attend(self, q_latent: torch.Tensor, kv_latent: torch.Tensor, k_rope: torch.Tensor,
                attention_mask: torch.Tensor | None, packed: Any) -> torch.Tensor:  # fmt: skip
        """Latents of this rank's tokens -> [s, b, heads / tp, v_head_dim] or [t, ...] of all tokens, by one plan."""
        q, kv, core = self._q_projection, self.linear_kv_up_proj, self.core_attention
        layers.run_pre_hooks(q, kv, core)
        tp = kv._parallel()
        optional, attrs = core.arguments(q_latent.device, attention_mask, self.attn_mask_type, packed)
        tokens = k_rope.shape[0] * (tp.size if tp.sequence else 1)
        longest = tokens
        positions: dict[str, torch.Tensor] = {}
        if packed is not None:
            for side in ("q", "k"):
                positions[f"{side}_positions"] = layers.positions_in_segments(optional[f"cu_seqlens_{side}"], tokens)
            known = (packed.max_seqlen_q, packed.max_seqlen_kv)
            longest = max(map(int, known)) if all(known) else tokens
        cos, sin = self._rotary_table(longest, q_latent.device)
        inputs = {"q_latent": q_latent, "q_weight": q.weight, "kv_latent": kv_latent, "kv_weight": kv.weight,
                  "k_rope": k_rope, "cos": cos, "sin": sin, **positions, **optional}  # fmt: skip
        names = tuple(inputs)
        again = {"all_gather"} if tp.sequence else set()  # only shards are kept
        if recomputes(self.config, "mla_up_proj"):
            again |= LATENT_UP_PROJECTION
        heads = self.num_attention_heads_per_partition
        build = latent_attention_graph(tp, heads, self.config.qk_head_dim, names, attrs)
        runner = self.planned((names, tp, tuple(sorted(attrs.items()))), names, build, recompute=frozenset(again),
                              groups={tp.symbol: kv.tp_group})  # fmt: skip
        return runner(*inputs.values(), sink=kv.sink_for({1: q.weight, 3: kv.weight}))

    def _rotary_table(self, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [at least length, r / 2] in float32, YaRN's concentration factor in both; made when needed."""
        if self._table is None or self._table[0].shape[0] < length or self._table[0].device != device:
            with torch.inference_mode(False), torch.no_grad():  # kept, and read by later training steps
                made = self.rotary_pos_emb.get_emb(bucket(length))
                angles, factor = made if isinstance(made, tuple) else (made, 1.0)
                angles = angles[:, 0, 0, : angles.shape[-1] // 2].to(device)
                self._table = angles.cos() * factor, angles.sin() * factor
        return self._table

    def backward_dw(self) -> None:
        """The deferred weight gradients of one micro-batch."""
        self.linear_kv_up_proj.backward_dw(self._q_projection)
        self.linear_kv_down_proj.backward_dw()
        if self.config.q_lora_rank is not None:
            self.linear_q_down_proj.backward_dw()
        self._backward_output_proj()
