"""Every distinct graph of a recipe's layers, as they build it in training: on meta tensors, without Megatron."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch

from ..integration.graph.ir import Dim, Graph
from ..integration.planner.shapes import bucket
from ..modules.graphs import (
    LATENT_UP_PROJECTION,
    QK_NORM_INPUTS,
    Activation,
    HeadLayout,
    NormAttrs,
    ResidualAdds,
    TensorParallel,
    latent_attention_graph,
    linear_graph,
    mlp_from_norm,
    mlp_graph,
    norm_graph,
    self_attention_graph,
)
from ..modules.loss import cross_entropy_graph
from ..modules.moe import Routing, balance_graph, moe_graph, permute_graph, receive_rows, router_graph, unpermute_graph
from .config import Recipe

NEEDS_GRAD = frozenset({"x", "residual", "hidden", "logits", "probs", "rows", "q_latent", "kv_latent", "k_rope"})
"""Inputs that receive a gradient, beside the weights."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One distinct graph. ``kind``: which modules run it, one of ``policies.MODULE_KINDS``; ``recompute``: its save
    policy; ``sizes``: of its symbolic dims, by name."""

    kind: str
    name: str
    graph: Graph
    recompute: frozenset[str]
    sizes: dict[str, int]


type _Tensors = dict[str, torch.Tensor]


def _meta(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _row(
    kind: str,
    name: str,
    build: Callable[..., Graph],
    tensors: Sequence[torch.Tensor],
    recompute: frozenset[str] | set[str] = frozenset(),
) -> Row:
    graph = build(*tensors)
    shapes = ((graph.specs[v].shape, t.shape) for v, t in zip(graph.inputs, tensors, strict=True))
    sizes = {d.name: n for dims, shape in shapes for d, n in zip(dims, shape, strict=True) if isinstance(d, Dim)}
    return Row(kind, name, graph, frozenset(recompute), sizes)


class _Layers:
    """What the graphs of one recipe share: sizes of a rank, dtype, norm and save policy."""

    def __init__(self, recipe: Recipe) -> None:
        m, p = recipe.model, recipe.parallel
        self.recipe, self.m, self.p = recipe, m, p
        self.dtype = getattr(torch, recipe.precision.tensor_dtype)
        self.tp = TensorParallel(p.tensor, p.sequence and p.tensor > 1)
        self.norm = NormAttrs("rms_norm" if m.normalization == "RMSNorm" else "layer_norm", m.norm_eps)
        self.activation = Activation(m.activation)
        self.modules = set(recipe.plan.recompute_modules) if recipe.plan.recompute == "selective" else set()
        self.gathered = {"all_gather"} if self.tp.sequence else set()
        self.again = self.gathered | ({self.norm.op} if "layernorm" in self.modules else set())
        self.s, self.b = m.seq_length, recipe.train.micro_batch
        self.x = self.meta(self.s // (p.tensor if self.tp.sequence else 1), self.b, m.hidden_size)

    def meta(self, *shape: int) -> torch.Tensor:
        return _meta(self.dtype, *shape)

    def norm_of(self, prefix: str, width: int) -> _Tensors:
        ports = ("weight", "bias") if self.norm.op == "layer_norm" else ("weight",)
        return {f"{prefix}{port}": self.meta(width) for port in ports}

    def norm_row(self, kind: str, name: str, width: int) -> Row:
        tensors = {"x": self.meta(*self.x.shape[:2], width)} | self.norm_of("", width)
        return _row(kind, name, norm_graph(self.norm, tuple(tensors)), (*tensors.values(),))

    def dropout(self) -> _Tensors:
        return {n: _meta(torch.int64, 1) for n in ("seed", "offset")} if self.m.attention_dropout > 0 else {}

    def sdpa(self, width: int) -> dict[str, object]:
        return {
            "layout": "sbhd",
            "causal": True,
            "scale": 1.0 / math.sqrt(width),
            "window": (None, None),
            "dropout": self.m.attention_dropout,
        }

    def attention(self) -> list[Row]:
        m, t, h = self.m, self.p.tensor, self.m.hidden_size
        hq, hk, d = m.num_attention_heads // t, m.num_query_groups // t, m.head_width
        width = (hq + 2 * hk) * d
        given = {"x": self.x, "qkv": self.meta(width, h), "proj": self.meta(h, hq * d)}
        given |= {"qkv_bias": self.meta(width)} if m.linear_bias or m.qkv_bias else {}
        given |= self.norm_of("norm_", h) | (
            self.norm_of("q_norm_", d) | self.norm_of("k_norm_", d) if m.qk_norm else {}
        )
        given |= {n: _meta(torch.float32, self.s, d // 2) for n in ("cos", "sin")} | self.dropout()
        build = self_attention_graph(
            self.tp,
            HeadLayout(hk, hq // hk, d),
            tuple(given),
            self.sdpa(d),
            norm=self.norm,
            qk_norm=self.norm if m.qk_norm else None,
            interleaved=False,
        )
        again = (
            self.again | ({"sdpa"} if "core_attn" in self.modules else set()) | (QK_NORM_INPUTS if m.qk_norm else set())
        )
        return [_row("self_attention", "norm + self attention", build, (*given.values(),), again)]

    def latent_attention(self) -> list[Row]:
        m, h, heads = self.m, self.m.hidden_size, self.m.num_attention_heads // self.p.tensor
        nope, rope, keys, low = m.qk_head_dim, m.qk_pos_emb_head_dim, m.kv_lora_rank, m.q_lora_rank
        rows = [self.norm_row("input_layernorm", "norm in front of attention", h)]
        for kind, width in (("linear_q_down_proj", low), ("linear_kv_down_proj", keys + rope)):
            if width is not None:
                _, build = linear_graph(TensorParallel(), column=True, bias=False)
                rows.append(_row(kind, f"down projection to {width}", build, [self.x, self.meta(width, h)]))
        if m.qk_norm:
            rows += [
                self.norm_row(kind, f"norm of {width} latents", width)
                for kind, width in (("q_layernorm", low), ("kv_layernorm", keys))
                if width
            ]
        lead = self.x.shape[:2]
        given = (
            {
                "q_latent": self.meta(*lead, low or h),
                "q_weight": self.meta(heads * (nope + rope), low or h),
                "kv_latent": self.meta(*lead, keys),
                "kv_weight": self.meta(heads * (nope + m.v_head_dim), keys),
                "k_rope": self.meta(*lead, 1, rope),
            }
            | {n: _meta(torch.float32, bucket(self.s), rope // 2) for n in ("cos", "sin")}
            | self.dropout()
        )
        build = latent_attention_graph(self.tp, heads, nope, tuple(given), self.sdpa(m.head_width))
        again = self.gathered | (LATENT_UP_PROJECTION if "mla_up_proj" in self.modules else set())
        rows.append(_row("self_attention", "latent attention", build, (*given.values(),), again))
        _, build = linear_graph(self.tp, column=False, bias=False)
        rows.append(
            _row(
                "linear_proj",
                "output projection",
                build,
                [self.meta(self.s, self.b, heads * m.v_head_dim), self.meta(h, heads * m.v_head_dim)],
            )
        )
        return rows

    def mlp(self) -> list[Row]:
        m, plan, h, f = self.m, self.recipe.plan, self.m.hidden_size, self.m.ffn_hidden_size // self.p.tensor
        wide = f * (2 if m.gated else 1)
        given = [
            self.x,
            self.meta(wide, h),
            self.meta(h, f),
            *([self.meta(wide)] if m.linear_bias else []),
            *self.norm_of("", h).values(),
        ]
        adds, name, again = None, "norm + mlp", self.again | ({m.activation} if "moe_act" in self.modules else set())
        if plan.fuse_residual:
            adds = ResidualAdds(m.linear_bias, m.linear_bias, m.hidden_dropout)
            name = "residual + norm + mlp + residual"
            given += [
                self.x if n == "residual" else self.meta(h) if n.endswith("bias") else _meta(torch.int64, 1)
                for n in adds.names()
            ]
            again = again | (mlp_from_norm(self.norm, self.activation) if "mlp" in self.modules else set())
        _, build = mlp_graph(
            self.tp,
            self.activation,
            bias=m.linear_bias,
            row_weight=False,
            norm=self.norm,
            norm_bias=self.norm.op == "layer_norm",
            adds=adds,
        )
        return [_row("mlp", name, build, given, again)]

    def experts(self) -> list[Row]:
        """A layer of experts. Ranks are taken to receive as many rows as they send: what routers are trained for."""
        m, p, h = self.m, self.p, self.m.hidden_size
        tokens, k = self.x.shape[0] * self.x.shape[1], m.moe_router_topk
        rows = [self.norm_row("pre_mlp_layernorm", "norm in front of experts", h), *self._router(tokens)]
        act = {m.activation} if "moe_act" in self.modules else set()
        if (shared := m.moe_shared_expert_intermediate_size) is not None:
            _, build = mlp_graph(self.tp, self.activation, bias=False, row_weight=False)
            width = shared // p.tensor
            given = [self.x, self.meta(width * (2 if m.gated else 1), h), self.meta(h, width)]
            rows.append(_row("shared_experts", "shared experts", build, given, self.gathered | act))
        local, width, shards = m.num_experts // p.expert, m.expert_width // p.expert_shards, p.expert_shards
        weights = [self.meta(local, width * (2 if m.gated else 1), h), self.meta(local, h, width)]
        probs, table = _meta(self.router_dtype, tokens, k), _meta(torch.int32, tokens, k)
        gather, x = TensorParallel(p.expert * shards, True, "tp_ep"), self.meta(tokens, h)
        if p.expert > 1 and p.dispatcher == "alltoall":
            room, gather, sent = (
                receive_rows(tokens * k),
                TensorParallel(shards, True, "expt_tp"),
                self.meta(tokens * k, h),
            )
            ends = [_meta(torch.int32, m.num_experts)] * 2
            rows += [
                _row("experts", "permute", permute_graph(m.num_experts)[1], [x, probs, table]),
                _row("experts", "unpermute", unpermute_graph()[1], [table, *ends, sent]),
            ]
            x, probs, table = self.meta(room, h), _meta(self.router_dtype, room, 1), _meta(torch.int32, room, 1)
        _, build = moe_graph(gather, self.activation, local)
        table = _meta(torch.int32, table.shape[0] * gather.size, table.shape[1])
        return [*rows, _row("experts", "experts", build, [x, probs, table, *weights], act)]

    @property
    def router_dtype(self) -> torch.dtype:
        return torch.float32 if self.m.moe_router_dtype == "fp32" else self.dtype

    def _router(self, tokens: int) -> list[Row]:
        m = self.m
        grouped = (m.moe_router_num_groups, m.moe_router_group_topk) if m.moe_router_group_topk else (None, None)
        routing = Routing(
            m.num_experts,
            m.moe_router_topk,
            m.moe_router_score_function,
            m.moe_router_pre_softmax,
            m.moe_router_topk_scaling_factor,
            *grouped,
        )
        sequences = self.b if m.moe_router_load_balancing_type == "seq_aux_loss" else 1
        balanced = (sequences,) if m.moe_aux_loss_coeff > 0 else ()
        z, bias = m.moe_z_loss_coeff or None, m.moe_router_enable_expert_bias
        logits = _meta(self.router_dtype, tokens, m.num_experts)
        names, build = router_graph(
            routing,
            bias=bias,
            padding=False,
            z_coefficient=None if z is None else z / self.p.tensor,
            balanced=balanced,
            counted=bias,
        )
        rows = [_row("router", "router", build, [logits, *([_meta(torch.float32, m.num_experts)] if bias else [])])]
        if balanced:
            _, build = balance_graph(routing, m.moe_aux_loss_coeff, padding=False)
            counts = [_meta(torch.float32, sequences, m.num_experts), _meta(torch.float32, 1)]
            rows.append(_row("router", "load-balancing loss", build, [logits, *counts]))
        return rows

    def loss(self) -> list[Row]:
        """What follows the final norm; nothing where Megatron runs all of it."""
        m, loss = self.m, self.recipe.plan.loss_runs
        if loss == "megatron":
            return []
        chunked, classes, tokens = loss == "chunked", m.vocab_size // self.tp.size, (self.s, self.b)
        data = [self.x, self.meta(classes, m.hidden_size)] if chunked else [self.meta(*tokens, classes)]
        names, build = cross_entropy_graph(self.tp, linear=chunked)
        data += [_meta(torch.int64, *tokens), *([_meta(torch.int64, 1)] if "first" in names else [])]
        return [
            _row(
                "loss",
                "output layer + loss" if chunked else "loss",
                build,
                data,
                self.gathered if chunked else frozenset(),
            )
        ]


def graphs_of(recipe: Recipe) -> list[Row]:
    """Every distinct graph of ``recipe``, once."""
    made, m = _Layers(recipe), recipe.model
    rows = made.latent_attention() if m.latent else made.attention()
    rows += made.mlp() if not m.has_experts(0) else []
    rows += made.experts() if m.num_experts is not None else []
    return [*rows, made.norm_row("final_layernorm", "final norm", m.hidden_size), *made.loss()]
