"""Rules between the fields of a recipe that has experts, and of one that has none."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..integration.problems import Problem
from .config import Model, Recipe


def expert_problems(recipe: Recipe) -> list[Problem]:
    """What is wrong with ``model.num_experts``, ``model.moe_...`` and how ranks share experts."""
    m, p = recipe.model, recipe.parallel
    if m.num_experts is None:
        return _without(recipe)
    found: list[tuple[str, Any, str, str]] = []
    if m.moe_router_topk > m.num_experts:
        found.append(
            (
                "model.moe_router_topk",
                m.moe_router_topk,
                f"must be at most model.num_experts = {m.num_experts}",
                "lower it",
            )
        )
    if m.moe_dense_layers >= m.num_layers >= 1:
        found.append(
            (
                "model.moe_dense_layers",
                m.moe_dense_layers,
                f"must be below model.num_layers = {m.num_layers}",
                "lower it, or set model.num_experts=none",
            )
        )
    if m.linear_bias:
        found.append(("model.linear_bias", True, "experts have no biases", "set model.linear_bias=false"))
    found += _router(m)
    if m.num_experts % max(p.expert, 1):
        found.append(
            ("model.num_experts", m.num_experts, f"must be a multiple of parallel.expert = {p.expert}", "change either")
        )
    if m.expert_width % max(p.expert_shards, 1):
        field = "model.ffn_hidden_size" if m.moe_ffn_hidden_size is None else "model.moe_ffn_hidden_size"
        found.append(
            (
                field,
                m.expert_width,
                f"must be a multiple of the {p.expert_shards} ranks that share an expert",
                "change it or parallel.expert_tensor",
            )
        )
    shared = m.moe_shared_expert_intermediate_size
    if shared is not None and shared % max(p.tensor, 1):
        found.append(
            (
                "model.moe_shared_expert_intermediate_size",
                shared,
                f"must be a multiple of parallel.tensor = {p.tensor}",
                "change either",
            )
        )
    if p.tensor > 1 and not p.sequence:
        found.append(
            (
                "parallel.sequence",
                False,
                "Megatron-Core trains experts with tensor parallelism under sequence parallelism only",
                "set parallel.sequence=true or parallel.tensor=1",
            )
        )
    if recipe.plan.layers == "transformer_engine":
        found.append(
            (
                "plan.layers",
                "transformer_engine",
                "recipes with experts run layerplan's or Megatron's own layers",
                "set plan.layers=layerplan or megatron_local",
            )
        )
    if recipe.plan.fuse_residual and not m.moe_dense_layers:
        found.append(
            (
                "plan.fuse_residual",
                True,
                "no layer is dense, and layers of experts leave their adds to Megatron",
                "set plan.fuse_residual=false",
            )
        )
    return [Problem(*row) for row in found]


def _router(m: Model) -> list[tuple[str, Any, str, str]]:
    found: list[tuple[str, Any, str, str]] = []
    groups, kept, score = m.moe_router_num_groups, m.moe_router_group_topk, m.moe_router_score_function
    if (groups is None) != (kept is None):
        found.append(
            (
                "model.moe_router_num_groups, model.moe_router_group_topk",
                (groups, kept),
                "come together",
                "set both or neither",
            )
        )
    elif groups:
        if m.num_experts % groups:
            found.append(
                (
                    "model.moe_router_num_groups",
                    groups,
                    f"must divide model.num_experts = {m.num_experts}",
                    "change either",
                )
            )
        elif (
            kept > min(groups, m.moe_router_topk)
            or m.moe_router_topk % kept
            or m.moe_router_topk > kept * (m.num_experts // groups)
        ):
            found.append(
                (
                    "model.moe_router_group_topk",
                    kept,
                    f"must divide model.moe_router_topk = {m.moe_router_topk}, be at most "
                    f"model.moe_router_num_groups = {groups}, and leave as many experts as a token takes",
                    "change one of them",
                )
            )
    if m.moe_router_enable_expert_bias and score != "sigmoid":
        found.append(
            (
                "model.moe_router_enable_expert_bias",
                True,
                "goes with sigmoid scores only",
                "set model.moe_router_score_function=sigmoid",
            )
        )
    if m.moe_router_pre_softmax and score != "softmax":
        found.append(("model.moe_router_pre_softmax", True, "has no meaning with sigmoid scores", "set it to false"))
    if m.moe_router_topk == 1 and score == "softmax" and not m.moe_router_pre_softmax:
        found.append(
            (
                "model.moe_router_pre_softmax",
                False,
                "the softmax over one chosen expert is 1: the router would learn nothing",
                "set model.moe_router_pre_softmax=true",
            )
        )
    if m.moe_aux_loss_coeff > 0 and m.moe_router_load_balancing_type == "none":
        found.append(
            (
                "model.moe_aux_loss_coeff",
                m.moe_aux_loss_coeff,
                "no loss carries it",
                "choose model.moe_router_load_balancing_type, or set it to 0",
            )
        )
    if m.moe_router_topk_scaling_factor == 0:
        found.append(("model.moe_router_topk_scaling_factor", 0.0, "must not be 0", "set it to none for no scaling"))
    return found


def _without(recipe: Recipe) -> list[Problem]:
    """Fields of experts that nothing reads."""
    m, p = recipe.model, recipe.parallel
    found = [
        Problem(
            f"model.{f.name}",
            getattr(m, f.name),
            "model.num_experts is not set: nothing would read it",
            "set model.num_experts, or leave it out",
        )
        for f in dataclasses.fields(m)
        if f.name.startswith("moe_") and getattr(m, f.name) != f.default
    ]
    return found + [
        Problem(
            f"parallel.{name}",
            getattr(p, name),
            "model.num_experts is not set: there are none to share",
            "leave it out",
        )
        for name, neutral in (("expert", 1), ("expert_tensor", None), ("dispatcher", "alltoall"))
        if getattr(p, name) != neutral
    ]
