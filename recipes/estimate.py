"""The plans of a recipe's layers for an arch, and what they add up to: without a GPU, and without Megatron."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import torch

from ..integration.engines.arch import Arch
from ..integration.graph.ir import Graph
from ..integration.planner.planner import Plan, plan
from ..integration.planner.policy import Policy
from ..modules.graphs import Activation, NormAttrs, TensorParallel, attention_graph, linear_graph, mlp_graph, norm_graph
from .config import Recipe


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedGraph:
    """One distinct graph of the model: its plan and how often a micro-batch runs it on the fullest rank."""

    name: str
    plan: Plan
    times: int

    @property
    def seconds(self) -> float:
        return self.times * (self.plan.forward.seconds + (self.plan.backward.seconds if self.plan.backward else 0.0))


@dataclasses.dataclass(frozen=True, slots=True)
class RecipePlan:
    """Predictions from datasheet rates; ``outside_seconds`` are the output layer's products, which Megatron runs itself.
    Embedding, rope, residual adds, loss, optimiser and communication are not in the time."""

    recipe: str
    arch: str
    graphs: tuple[PlannedGraph, ...]
    micro_batches: int
    tokens_per_step: int
    outside_seconds: float
    planning_ms: float

    @property
    def step_seconds(self) -> float:
        return self.micro_batches * (sum(g.seconds for g in self.graphs) + self.outside_seconds)

    def to_json(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe, "arch": self.arch, "micro_batches": self.micro_batches, "tokens_per_step": self.tokens_per_step,
            "predicted_step_seconds": self.step_seconds, "planning_ms": round(self.planning_ms, 3),
            "graphs": [{"name": g.name, "times": g.times, "signature": g.plan.signature, "predicted_us": round(g.seconds * 1e6, 1),
                        "regions": g.plan.choices()} for g in self.graphs],
        }  # fmt: skip

    def __str__(self) -> str:
        lines = [f"plan        {self.recipe} on {self.arch}: {len(self.graphs)} distinct graphs, planned in {self.planning_ms:.0f} ms"]
        for g in self.graphs:
            lines.append(f"  {g.name} x {g.times}  about {g.seconds * 1e3:.2f} ms a micro-batch")
            for row in g.plan.choices():
                lines.append(f"    {row['pass']:<8} {'+'.join(row['ops']):<28} {row['engine']:<24} {row['predicted_us']:>10.1f} us")
        lines.append(f"time        about {self.step_seconds:.3g} s a step ({self.tokens_per_step / self.step_seconds:,.0f} tokens/s) in these "
                     "plans and the output layer: a prediction from datasheet rates, without optimiser and communication")  # fmt: skip
        return "\n".join(lines)


def _meta(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _graphs(recipe: Recipe) -> list[tuple[str, Graph, int, frozenset[str]]]:
    """(name, graph, count per stage, save policy) of every distinct graph."""
    m, p = recipe.model, recipe.parallel
    dtype = torch.bfloat16 if recipe.precision.dtype == "bf16" else torch.float32
    tp = TensorParallel(p.tensor, p.sequence and p.tensor > 1)
    norm = NormAttrs("rms_norm" if m.normalization == "RMSNorm" else "layer_norm", m.norm_eps)
    has_bias = norm.op == "layer_norm"
    s, b, h, f = m.seq_length, recipe.train.micro_batch, m.hidden_size, m.ffn_hidden_size
    local, t = s // (p.tensor if tp.sequence else 1), p.tensor
    hq, hk, d = m.num_attention_heads // t, max(m.num_query_groups // t, 1), m.head_width
    layers = math.ceil(m.num_layers / p.pipeline)
    again = {"all_gather"} if tp.sequence else set()
    if recipe.plan.recompute == "selective" and "layernorm" in recipe.plan.recompute_modules:
        again.add(norm.op)
    keep = frozenset(again)
    x, gammas = _meta(dtype, local, b, h), [_meta(dtype, h)] * (1 + has_bias)
    qkv_bias = m.linear_bias or m.qkv_bias
    width = (hq + 2 * hk) * d

    def ask(made, *tensors):
        names, build = made
        return build(*tensors)

    rows = [
        ("norm + qkv", ask(linear_graph(tp, column=True, bias=qkv_bias, norm=norm, norm_bias=has_bias), x, _meta(dtype, width, h),
                           *([_meta(dtype, width)] if qkv_bias else []), *gammas), layers, keep),
        ("core attention", attention_graph(("q", "k", "v"), {"layout": "sbhd", "causal": True, "dropout": 0.0})(
            _meta(dtype, s, b, hq, d), _meta(dtype, s, b, hk, d), _meta(dtype, s, b, hk, d)), layers, frozenset()),
        ("attention projection", ask(linear_graph(tp, column=False, bias=False), _meta(dtype, s, b, hq * d), _meta(dtype, h, hq * d)),
         layers, frozenset()),
        ("norm + mlp", ask(mlp_graph(tp, Activation(m.activation), bias=m.linear_bias, row_weight=False, norm=norm, norm_bias=has_bias), x,
                           _meta(dtype, f * (2 if m.gated else 1) // t, h), _meta(dtype, h, f // t),
                           *([_meta(dtype, f // t)] if m.linear_bias else []), *gammas), layers, keep),
        ("final norm", norm_graph(norm, ("x", "weight", "bias") if has_bias else ("x", "weight"))(x, *gammas), 1, frozenset()),
    ]  # fmt: skip
    if m.qk_norm:
        names = ("x", "weight", "bias") if has_bias else ("x", "weight")
        small = [_meta(dtype, d)] * (1 + has_bias)
        for name, heads in (("query norm", hq), ("key norm", hk)):
            rows.append((name, norm_graph(norm, names)(_meta(dtype, s, b, heads, d), *small), layers, frozenset()))
    return rows


def estimate_recipe(recipe: Recipe, arch: Arch, world: int | None = None) -> RecipePlan:
    """Plan every distinct graph of ``recipe`` for ``arch``. ``world``: number of ranks (default: one data-parallel replica).

    Raises PlanError where the recipe's policy leaves a region without an engine.
    """
    policy = Policy(mode=recipe.plan.policy, deterministic=recipe.plan.deterministic)
    start = time.perf_counter()
    planned = tuple(
        PlannedGraph(name, plan(g, arch, policy, needs_grad=tuple(g.specs[v].is_float for v in g.inputs), recompute=keep), n)
        for name, g, n, keep in _graphs(recipe)
    )
    planning_ms = (time.perf_counter() - start) * 1e3
    m, t, p = recipe.model, recipe.train, recipe.parallel
    data = max(1, (world or p.tensor * p.pipeline) // (p.tensor * p.pipeline))
    micro_batches = t.global_batch // (t.micro_batch * data)
    dtype = "bfloat16" if recipe.precision.dtype == "bf16" else "float32"
    outside = 3 * arch.roofline(2 * t.micro_batch * m.seq_length * m.hidden_size * m.vocab_size / p.tensor, 0, dtype) / 0.75
    return RecipePlan(recipe.name, arch.name, planned, micro_batches, t.global_batch * m.seq_length, outside, planning_ms)
