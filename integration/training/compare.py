"""``layerplan compare``: a recipe's model under two policies, or beside Megatron's own layers, on one batch."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import sys
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module

from ...recipes import Problem, Recipe, RecipeError
from ..planner.compare import (
    Call,
    Comparison,
    Log,
    Result,
    Step,
    clear_gradients,
    compare,
    gradient_of,
    run_step,
    side_of,
)
from ..planner.planner import PlanError
from ..settings import launcher_environment
from .build import Ranks, build_model, ranks_of, transformer_config
from .data import Batch, Samples
from .indexed import check_data
from .launch import load_checked
from .trainer import rng_state, set_rng_state

MEGATRON = "megatron"
"""What the command calls Megatron's own local layers."""


class _Trainable:
    """A model as training wraps it, without an optimiser: gradients go into float32 buffers. ``loss`` is one step on
    one batch."""

    def __init__(self, recipe: Recipe, batch: Batch) -> None:
        config = transformer_config(recipe)
        self.gpt: GPTModel = build_model(recipe, config)
        inner = Float16Module(config, self.gpt) if config.bf16 else self.gpt
        self._model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), inner)
        self._model.train()
        self._batch = batch

    def loss(self, _: torch.nn.Module) -> torch.Tensor:
        """Mean loss per token after forward and backward."""
        batch = self._batch
        losses = self._model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        mask = batch["loss_mask"]
        loss = (losses.float() * mask).sum() / mask.sum()
        loss.backward()
        return loss.detach()


# ---- Megatron's own layers -------------------------------------------------------------------------------------------

_ATTENTION = {
    "qkv": "self_attention.linear_qkv.weight",
    "qkv_bias": "self_attention.linear_qkv.bias",
    "proj": "self_attention.linear_proj.weight",
    "norm_weight": "input_layernorm.weight",
    "norm_bias": "input_layernorm.bias",
    "q_norm_weight": "self_attention.q_layernorm.weight",
    "q_norm_bias": "self_attention.q_layernorm.bias",
    "k_norm_weight": "self_attention.k_layernorm.weight",
    "k_norm_bias": "self_attention.k_layernorm.bias",
}
_MLP = {
    "fc1": "mlp.linear_fc1.weight",
    "fc1_bias": "mlp.linear_fc1.bias",
    "fc2": "mlp.linear_fc2.weight",
    "norm_weight": "pre_mlp_layernorm.weight",
    "norm_bias": "pre_mlp_layernorm.bias",
}
_PORTS = {
    "self_attention": _ATTENTION,
    "mlp": _MLP,
    "final_layernorm": {"weight": "weight", "bias": "bias"},
    "loss": {},
}
_DATA = {"self_attention": ("x", "cos", "sin"), "mlp": ("x",), "final_layernorm": ("x",), "loss": ("logits", "targets")}
"""The ports of a kind of module that are no parameters, the differentiable one first."""
_FUSED_NORMS = (
    (r"self_attention\.linear_qkv\.layer_norm_", "input_layernorm."),
    (r"mlp\.linear_fc1\.layer_norm_", "pre_mlp_layernorm."),
)


def _local_name(name: str) -> str:
    """The name that a parameter of layerplan's layers has in Megatron's local ones, whose norms are modules of their
    own."""
    for ours, theirs in _FUSED_NORMS:
        name = re.sub(ours, theirs, name)
    return name


class MegatronSide:
    """Megatron's local layers with the parameters of ``ours``. Modules that they have no counterpart of are not
    computed."""

    label = MEGATRON

    def __init__(self, recipe: Recipe, batch: Batch, ours: GPTModel) -> None:
        local = copy.deepcopy(recipe)
        local.plan = dataclasses.replace(local.plan, layers="megatron_local", fuse_residual=False, loss="megatron")
        self._trainable = _Trainable(local, batch)
        self._gpt = self._trainable.gpt
        theirs, given = dict(self._gpt.named_parameters()), {_local_name(n): p for n, p in ours.named_parameters()}
        if theirs.keys() != given.keys():
            raise RuntimeError(
                f"parameters without a counterpart in Megatron's layers: {sorted(theirs.keys() ^ given.keys())}"
            )
        with torch.no_grad():
            for name, p in theirs.items():
                p.copy_(given[name])

    def step(self, model: torch.nn.Module, step: Step, log: Log | None) -> tuple[float, float]:
        return run_step(self._gpt, self._trainable.loss)

    def replay(self, call: Call) -> Result | None:
        kind, names = call.module.rpartition(".")[2], call.runner.names
        if kind not in _PORTS or not set(_DATA[kind][:1]) <= set(names) <= {*_PORTS[kind], *_DATA[kind]}:
            return None  # a plan that goes further than Megatron's module: with residual adds, with the output layer
        given = dict(zip(names, call.tensors, strict=True))
        first = _DATA[kind][0]
        x = given[first].detach().requires_grad_(call.needs[names.index(first)])
        owner = self._gpt.get_submodule(
            call.module.rpartition(".")[0] if kind in ("self_attention", "mlp") else "decoder.final_layernorm"
        )
        clear_gradients(self._gpt)
        with torch.set_grad_enabled(call.recorded):
            out = self._run(kind, owner, x, given)
        params, came = dict(owner.named_parameters()), call.grads[0] is not None
        if came:
            out.backward(call.grads[0])
        grads = [
            x.grad if n == first else _copied(params[_PORTS[kind][n]]) if came and n in _PORTS[kind] else None
            for n in names
        ]
        return Result((out.detach(),), tuple(grads), dict.fromkeys(("forward", "backward"), "Megatron's own"))

    def _run(self, kind: str, owner: Any, x: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
        if kind == "loss":  # it writes to float32 logits
            return tensor_parallel.vocab_parallel_cross_entropy(x.clone(), given["targets"])
        if kind == "mlp":
            return owner.mlp(owner.pre_mlp_layernorm(x))[0]
        if kind == "self_attention":
            return owner.self_attention(
                owner.input_layernorm(x), None, rotary_pos_emb=self._gpt.rotary_pos_emb(x.shape[0])
            )[0]
        return owner(x)


def _copied(p: torch.nn.Parameter) -> torch.Tensor | None:
    grad = gradient_of(p)
    return None if grad is None else grad.clone()


# ---- the command -----------------------------------------------------------------------------------------------------


def synthetic_batch(recipe: Recipe, device: torch.device) -> Batch:
    """Random tokens by train.seed: a micro-batch for a recipe without data."""
    m, t = recipe.model, recipe.train
    rows = torch.randint(
        m.vocab_size, (t.micro_batch, m.seq_length + 1), generator=torch.Generator().manual_seed(t.seed)
    )
    batch = {
        "tokens": rows[:, :-1],
        "labels": rows[:, 1:],
        "position_ids": torch.arange(m.seq_length).expand(t.micro_batch, -1),
        "loss_mask": torch.ones(t.micro_batch, m.seq_length),
    }
    return {k: v.contiguous().to(device) for k, v in batch.items()}


def _batch(recipe: Recipe, ranks: Ranks) -> Batch:
    if recipe.data.prefix is None:
        return synthetic_batch(recipe, ranks.device)
    problems, tokenizer = check_data(recipe)
    if problems:
        raise RecipeError(problems)
    return next(Samples(recipe, tokenizer, ranks).micro_batches(0, recipe, ranks))


def compare_problems(recipe: Recipe, a: str, b: str) -> list[Problem]:
    """What of a recipe, or of the environment, a comparison would ignore or cannot do."""
    plan, p, problems = recipe.plan, recipe.parallel, []
    said = "the two policies of the command say how layers are planned"
    for name, value, default in (
        ("policy", plan.policy, "auto"),
        ("per_module", plan.per_module, ()),
        ("file", plan.file, None),
        ("layers", plan.layers, "layerplan"),
        ("arch", plan.arch, None),
    ):
        if value != default:
            problems.append(Problem(f"plan.{name}", value, said, f"leave plan.{name} out"))
    if p.replica > 1:
        experts = ", parallel.expert" if recipe.model.num_experts is not None else ""
        problems.append(
            Problem(
                f"parallel.tensor * parallel.pipeline{experts}",
                p.replica,
                "a comparison runs in one process",
                "set parallel.tensor=1 parallel.pipeline=1 parallel.sequence=false"
                + (" parallel.expert=1 parallel.expert_tensor=none" if experts else ""),
            )
        )
    if MEGATRON in (a, b):
        for name, what in (("num_experts", "experts"), ("kv_lora_rank", "latent attention")):
            value = getattr(recipe.model, name)
            if value is not None:
                problems.append(
                    Problem(
                        f"model.{name}",
                        value,
                        f"Megatron's side is made of its dense local layers, which have no {what}",
                        "compare two policies, or reference with one",
                    )
                )
    world = launcher_environment().get("WORLD_SIZE", "1")
    if world != "1":
        problems.append(
            Problem("environment: WORLD_SIZE", world, "a comparison runs in one process", "start it without torchrun")
        )
    for name, drawn_in_plans in (("attention_dropout", True), ("hidden_dropout", plan.fuse_residual)):
        value = getattr(recipe.model, name)
        if MEGATRON in (a, b) and drawn_in_plans and value:
            problems.append(
                Problem(f"model.{name}", value, "Megatron's layers draw other masks", f"set model.{name}=0")
            )
    return problems


def compare_recipe(recipe: Recipe, a: str, b: str) -> Comparison:
    """Compare the recipe's model under ``a`` and ``b``, each a text for ``side_of`` or "megatron", on one
    micro-batch: of the data, or of random tokens where the recipe names none. Raises RecipeError, PlanFileError,
    PlanError and ValueError."""
    problems = compare_problems(recipe, a, b)
    if problems:
        raise RecipeError(problems)
    sides = [None if text == MEGATRON else side_of(text, deterministic=recipe.plan.deterministic) for text in (a, b)]
    if sides == [None, None]:
        raise ValueError("both sides are Megatron's own layers: name a policy or a plan file for one of them")
    with ranks_of(recipe) as ranks:
        batch = _batch(recipe, ranks)
        ours = _Trainable(recipe, batch)
        sides = [side or MegatronSide(recipe, batch, ours.gpt) for side in sides]
        return compare(ours.gpt, ours.loss, *sides, generators=(rng_state, set_rng_state))


def compare_command(recipe: str, a: str, b: str, overrides: list[str], as_json: bool) -> int:
    """The command. Returns the exit status: 0 where both sides are within the rule, 1 where one is not, 2 for input
    that cannot run."""
    try:
        found = compare_recipe(load_checked(recipe, overrides, dry_run=True).recipe, a, b)
    except (ValueError, PlanError) as error:
        print(f"layerplan compare: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found.to_json(), indent=2) if as_json else found)
    return 0 if found.ok else 1
