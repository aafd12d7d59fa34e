"""What a pretraining run is made of: one dataclass per section, and the rules between their fields.

Times are in optimiser steps, batches in sequences, sizes in elements unless a name says otherwise.
"""

from __future__ import annotations

import dataclasses
import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..integration.planner import records as records_file
from ..integration.planner.plan_file import Pins, PlanFileError, load
from ..integration.planner.records import Records, RecordsError
from ..integration.problems import Problem
from ..integration.settings import PolicyMode, settings


class RecipeError(ValueError):
    """A configuration that cannot be run; ``problems`` holds all that is wrong with it."""

    def __init__(self, problems: Sequence[Problem]):
        self.problems = list(problems)
        count = f"{len(self.problems)} problem{'s' if len(self.problems) > 1 else ''}"
        super().__init__(f"{count}:\n" + "\n".join(f"  {p}" for p in self.problems))


@dataclass(kw_only=True)
class Model:
    """A decoder-only transformer. ``head_dim`` None means hidden_size / num_attention_heads.

    With ``kv_lora_rank`` attention is multi-head latent attention: keys and values come from a latent of that width, queries from one of
    ``q_lora_rank`` or, without it, from the hidden states; ``qk_norm`` is then the norm of the latents. With ``num_experts`` the layers behind the first
    ``moe_dense_layers`` have experts of width ``moe_ffn_hidden_size`` (None: ffn_hidden_size), of which a token takes ``moe_router_topk``; ``moe_...`` fields are
    Megatron-Core's of that name."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    vocab_size: int
    seq_length: int
    head_dim: int | None = None
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    norm_eps: float = 1e-5
    activation: Literal["swiglu", "geglu", "gelu", "squared_relu"] = "swiglu"
    linear_bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    rope_base: float = 10000.0
    tie_embeddings: bool = False
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    init_std: float = 0.02
    kv_lora_rank: int | None = None
    q_lora_rank: int | None = None
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128
    num_experts: int | None = None
    moe_dense_layers: int = 0
    moe_ffn_hidden_size: int | None = None
    moe_shared_expert_intermediate_size: int | None = None
    moe_router_topk: int = 2
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    moe_router_pre_softmax: bool = False
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_router_topk_scaling_factor: float | None = None
    moe_router_enable_expert_bias: bool = False
    moe_router_dtype: Literal["fp32"] | None = "fp32"
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "none"] = "aux_loss"
    moe_aux_loss_coeff: float = 0.0
    moe_z_loss_coeff: float | None = None

    @property
    def latent(self) -> bool:
        """Whether attention is multi-head latent attention."""
        return self.kv_lora_rank is not None

    @property
    def head_width(self) -> int:
        """Width of one attention head's query and key."""
        if self.latent:
            return self.qk_head_dim + self.qk_pos_emb_head_dim
        return self.head_dim or self.hidden_size // max(self.num_attention_heads, 1)

    @property
    def rotary_width(self) -> int:
        """How much of a head the rotary embedding turns."""
        return self.qk_pos_emb_head_dim if self.latent else self.head_width

    @property
    def expert_width(self) -> int:
        """Hidden units of one expert."""
        return self.moe_ffn_hidden_size or self.ffn_hidden_size

    def has_experts(self, layer: int) -> bool:
        """Whether layer ``layer``, counted from 0, has experts."""
        return self.num_experts is not None and layer >= self.moe_dense_layers

    @property
    def gated(self) -> bool:
        return self.activation in ("swiglu", "geglu")


@dataclass(kw_only=True)
class Parallel:
    """How ranks share the model. Data parallelism takes what tensor and pipeline leave over. ``expert``: ranks that share the experts, among all that
    the pipeline leaves over; ``expert_tensor``: ranks that share each expert (None: as ``tensor``). ``dispatcher``: how tokens reach
    experts on other ranks."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    dispatcher: Literal["alltoall", "allgather"] = "alltoall"
    sequence: bool = False
    distributed_optimizer: bool = True
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False

    @property
    def expert_shards(self) -> int:
        """Ranks that share each expert."""
        return self.tensor if self.expert_tensor is None else self.expert_tensor

    @property
    def replica(self) -> int:
        """The fewest ranks that hold a whole model."""
        return self.pipeline * math.lcm(self.tensor, self.expert * self.expert_shards)


@dataclass(kw_only=True)
class Data:
    """``prefix``: what ``layerplan data prepare`` wrote (prefix.bin, prefix.idx, prefix.tokenizer.json). ``split``: shares
    of the documents for training, validation and test, as in 98,2,0 or 969,30,1."""

    prefix: str | None = None
    seed: int = 1234
    split: str = "100,0,0"
    mask_loss_after_eod: bool = False


@dataclass(kw_only=True)
class Optimizer:
    """Adam with decoupled weight decay; biases, norms and other one-dimensional parameters are not decayed."""

    lr: float
    min_lr: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_grad: float = 1.0


@dataclass(kw_only=True)
class Schedule:
    """Linear warm-up over ``warmup_steps`` (None: a tenth of the decay's steps, at most 100), then ``style`` down to
    optimizer.min_lr at ``decay_steps`` (None: train.steps)."""

    style: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int | None = None
    decay_steps: int | None = None


@dataclass(kw_only=True)
class Precision:
    """``bf16``: parameters and activations in bfloat16, gradients accumulated and weights kept in float32."""

    dtype: Literal["fp32", "bf16"] = "fp32"

    @property
    def tensor_dtype(self) -> str:
        """The dtype of parameters and activations, by the name that graphs and torch have for it."""
        return {"fp32": "float32", "bf16": "bfloat16"}[self.dtype]


@dataclass(kw_only=True)
class Plan:
    """Whose layers run, and what the planner may choose. ``layers``: ours, Megatron's own in PyTorch (``megatron_local``), or Megatron's
    on Transformer Engine with every fusion that keeps the maths (``transformer_engine``, which needs that package and a GPU). ``arch`` is
    what ``--dry-run`` plans for; None means the device at hand, and training refuses another. ``gradient_accumulation_fusion``: weight gradients are added to the float32 gradients within
    the product. ``fuse_residual``: a layer's residual adds are part of its MLP's plan. ``loss``: what follows the last layer: ``fused``
    (Megatron's output layer, cross entropy over sharded classes in a plan), ``chunked`` (both in one plan, chunk by chunk: logits never
    exist whole, one product more), ``megatron``; None means fused where layerplan's layers run, Megatron's elsewhere. ``file``: a plan file (``layerplan plan
    --save``) whose engines and knobs are pinned. ``records``: measured times (``layerplan tune``) that rank what no plan file pins; None
    means what LAYERPLAN_RECORDS names, or none. ``per_module``: other policies for modules by name, first match first, each
    PATTERN=POLICY (``*.mlp=reference``); layers are numbered through all stages."""

    layers: Literal["layerplan", "megatron_local", "transformer_engine"] = "layerplan"
    policy: PolicyMode = "auto"
    per_module: tuple[str, ...] = ()
    deterministic: bool = False
    recompute: Literal["none", "full", "selective"] = "none"
    recompute_modules: tuple[str, ...] = ("core_attn",)
    gradient_accumulation_fusion: bool = True
    fuse_residual: bool = False
    loss: Literal["fused", "chunked", "megatron"] | None = None
    file: str | None = None
    records: str | None = None
    arch: str | None = None

    @property
    def loss_runs(self) -> str:
        """``loss``, or what None stands for."""
        return self.loss or ("fused" if self.layers == "layerplan" else "megatron")


@dataclass(kw_only=True)
class Checkpoint:
    """``dir`` None writes nothing. ``keep``: how many complete ones stay. ``pin_plan``: a resumed run runs what the
    checkpoint's plan file says, engine by engine; plan.file goes before it."""

    dir: str | None = None
    every_steps: int = 0
    keep: int = 2
    resume: Literal["auto", "none"] = "auto"
    pin_plan: bool = True
    background: bool = True
    save_at_end: bool = True


@dataclass(kw_only=True)
class Logging:
    """``dir`` None: beside the checkpoints, or nowhere. Metrics are JSON lines; the rest is drawn from them."""

    dir: str | None = None
    every_steps: int = 1
    progress: bool = True
    tensorboard: bool = False
    plot: bool = True


@dataclass(kw_only=True)
class Train:
    """``global_batch`` sequences make one step, in micro-batches of ``micro_batch`` per data-parallel rank. Every
    ``eval_every_steps`` (0: never) and after the last step, the loss on the first ``eval_batches`` global batches of the
    validation split is taken."""

    steps: int
    global_batch: int
    micro_batch: int
    seed: int = 1234
    eval_every_steps: int = 0
    eval_batches: int = 8
    threads: int | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"


_SHARES = 3
_MAX_WARMUP = 100
_MODULES = ("core_attn", "layernorm", "mlp")
_EXPERT_MODULES = ("moe", "moe_act", "shared_experts")


@dataclass(kw_only=True)
class Recipe:
    """One whole pretraining run."""

    name: str
    model: Model
    train: Train
    optimizer: Optimizer
    parallel: Parallel = field(default_factory=Parallel)
    data: Data = field(default_factory=Data)
    schedule: Schedule = field(default_factory=Schedule)
    precision: Precision = field(default_factory=Precision)
    plan: Plan = field(default_factory=Plan)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    logging: Logging = field(default_factory=Logging)

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, as JSON would hold them."""
        return {k: _plain(v) for k, v in dataclasses.asdict(self).items()}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Recipe:
        """The recipe whose ``to_dict`` gave ``data``. Raises RecipeError naming every field that is unknown or missing."""
        problems, made = [], {}
        for f in dataclasses.fields(Recipe):
            if f.name == "name":
                continue
            cls, given = _SECTIONS[f.name], data.get(f.name, {})
            known = {g.name: g for g in dataclasses.fields(cls)}
            for name in given.keys() - known.keys():
                problems.append(Problem(f"{f.name}.{name}", given[name], "no such field", "it was written by another version of layerplan"))
            missing = [n for n, g in known.items() if n not in given and g.default is g.default_factory is dataclasses.MISSING]
            problems += [Problem(f"{f.name}.{n}", None, "is missing", "it was written by another version of layerplan") for n in missing]
            if not missing:
                made[f.name] = cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items() if k in known})
        if problems:
            raise RecipeError(problems)
        return Recipe(name=data["name"], **made)

    @property
    def decay_steps(self) -> int:
        """The step at which the rate has come down to optimizer.min_lr."""
        return self.train.steps if self.schedule.decay_steps is None else self.schedule.decay_steps

    @property
    def warmup_steps(self) -> int:
        """Steps in which the rate rises to optimizer.lr."""
        given = self.schedule.warmup_steps
        return min(_MAX_WARMUP, self.decay_steps // 10) if given is None else given

    def sections(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "name"}

    def validate(self) -> list[Problem]:
        """Everything that is wrong, without a device and without the number of ranks."""
        from .experts import expert_problems
        from .policies import policy_problems

        return [*_ranges(self), *_model(self), *expert_problems(self), *_parallel(self), *_rest(self), *policy_problems(self)]

    def validate_world(self, world: int) -> list[Problem]:
        """What is wrong once the number of ranks is known."""
        p, t = self.parallel, self.train
        block = p.replica
        if block < 1 or world % block:
            experts = "" if p.expert * p.expert_shards == p.tensor else ", lcm with parallel.expert * parallel.expert_tensor"
            return [Problem(f"parallel.tensor * parallel.pipeline{experts}", block, f"must divide the number of ranks, {world}",
                            f"start a multiple of {block} ranks, or set {_smaller_layout(p, world)}")]  # fmt: skip
        data = world // (p.tensor * p.pipeline)
        if t.micro_batch > 0 and t.global_batch % (t.micro_batch * data):
            unit = t.micro_batch * data
            near = max(unit, round(t.global_batch / unit) * unit)
            return [Problem("train.global_batch", t.global_batch, f"must be a multiple of train.micro_batch * data-parallel ranks = {unit}",
                            f"set train.global_batch={near} or another train.micro_batch")]  # fmt: skip
        return []


def _smaller_layout(p: Parallel, world: int) -> str:
    """Overrides that give the widest layout within ``p`` that divides ``world`` ranks."""
    tensors, stages = ([d for d in range(1, max(n, 1) + 1) if n % d == 0 and world % d == 0] or [1] for n in (p.tensor, p.pipeline))
    _, tensor, pipeline = max((t * s, t, s) for t in tensors for s in stages if world % (t * s) == 0)
    changes: dict[str, Any] = {"tensor": tensor, "pipeline": pipeline} | ({"sequence": False} if p.sequence and tensor == 1 else {})
    shards = tensor if p.expert_tensor is None or world % (p.expert_tensor * pipeline) else p.expert_tensor
    changes["expert"] = max(d for d in range(1, max(p.expert, 1) + 1) if p.expert % d == 0 and world % (d * shards * pipeline) == 0)
    changes |= {"expert_tensor": "none"} if shards != p.expert_shards and p.expert_tensor is not None else {}
    return " ".join(f"parallel.{name}={str(value).lower()}" for name, value in changes.items() if value != getattr(p, name))


_SECTIONS: dict[str, type] = {
    "model": Model, "train": Train, "optimizer": Optimizer, "parallel": Parallel, "data": Data, "schedule": Schedule,
    "precision": Precision, "plan": Plan, "checkpoint": Checkpoint, "logging": Logging,
}  # fmt: skip


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return list(value) if isinstance(value, tuple) else value


_AT_LEAST_ONE = (
    "model.num_layers", "model.hidden_size", "model.ffn_hidden_size", "model.num_attention_heads", "model.num_query_groups",
    "model.vocab_size", "model.seq_length", "model.head_dim", "model.kv_lora_rank", "model.q_lora_rank", "model.qk_head_dim",
    "model.qk_pos_emb_head_dim", "model.v_head_dim", "model.num_experts", "model.moe_ffn_hidden_size",
    "model.moe_shared_expert_intermediate_size", "model.moe_router_topk", "model.moe_router_num_groups", "model.moe_router_group_topk",
    "parallel.tensor", "parallel.pipeline", "parallel.expert", "parallel.expert_tensor", "checkpoint.keep",
    "logging.every_steps", "train.steps", "train.global_batch", "train.micro_batch", "train.threads", "train.eval_batches",
    "schedule.decay_steps",
)  # fmt: skip
_AT_LEAST_ZERO = ("schedule.warmup_steps", "checkpoint.every_steps", "optimizer.weight_decay", "optimizer.min_lr",
                  "optimizer.clip_grad", "model.init_std", "model.moe_dense_layers", "model.moe_aux_loss_coeff", "model.moe_z_loss_coeff",
                  "train.seed", "train.eval_every_steps",
                  "data.seed")  # fmt: skip
AT_MOST = {
    "model.num_layers": 10**5, "model.hidden_size": 10**6, "model.ffn_hidden_size": 10**7, "model.num_attention_heads": 10**5,
    "model.num_query_groups": 10**5, "model.head_dim": 10**5, "model.vocab_size": 10**8, "model.seq_length": 10**8,
    "model.num_experts": 10**5, "model.moe_ffn_hidden_size": 10**7, "model.moe_shared_expert_intermediate_size": 10**7,
    "model.kv_lora_rank": 10**6, "model.q_lora_rank": 10**6, "model.qk_head_dim": 10**5, "model.qk_pos_emb_head_dim": 10**5, "model.v_head_dim": 10**5,
    "parallel.tensor": 10**5, "parallel.pipeline": 10**5, "parallel.expert": 10**5, "parallel.expert_tensor": 10**5, "train.global_batch": 10**8, "train.micro_batch": 10**6,
    "train.steps": 10**9, "train.eval_batches": 10**8, "train.eval_every_steps": 10**9, "schedule.warmup_steps": 10**9,
    "schedule.decay_steps": 10**9, "checkpoint.every_steps": 10**9, "checkpoint.keep": 10**9, "logging.every_steps": 10**9,
    "train.seed": 2**32 - 1, "data.seed": 2**32 - 1,  # NumPy's generators take no more
}  # fmt: skip
"""Sizes and counts that no run passes: a value beyond is a slip, and would run into 64-bit arithmetic or endless loops."""
_THREADS_PER_CPU = 4
_ABOVE_ZERO = ("optimizer.lr", "optimizer.eps", "model.norm_eps", "model.rope_base")
_FRACTIONS = ("model.hidden_dropout", "model.attention_dropout", "optimizer.beta1", "optimizer.beta2")


def _get(recipe: Recipe, path: str) -> Any:
    section, _, name = path.partition(".")
    return getattr(getattr(recipe, section), name)


def _ranges(recipe: Recipe) -> list[Problem]:
    problems = []
    rules = (
        (_AT_LEAST_ONE, lambda v: v >= 1, "must be at least 1"),
        (_AT_LEAST_ZERO, lambda v: v >= 0, "must be at least 0"),
        (_ABOVE_ZERO, lambda v: v > 0, "must be above 0"),
        (_FRACTIONS, lambda v: 0 <= v < 1, "must be at least 0 and below 1"),
    )
    for paths, holds, rule in rules:
        for path in paths:
            value = _get(recipe, path)
            if value is not None and not (math.isfinite(value) and holds(value)):
                problems.append(Problem(path, value, rule, "set a value in that range"))
    cpus = os.cpu_count() or 1
    threads = f" = {_THREADS_PER_CPU} * the {cpus} CPUs of this machine"
    for path, most, why in (*((p, n, "") for p, n in AT_MOST.items()), ("train.threads", _THREADS_PER_CPU * cpus, threads)):
        value = _get(recipe, path)
        if value is not None and value > most:
            problems.append(Problem(path, value, f"must be at most {most}{why}", "lower it"))
    return problems


def _divides(problems: list[Problem], path: str, value: int, by: int, what: str, remedy: str) -> None:
    if value >= 1 and by >= 1 and value % by:
        problems.append(Problem(path, value, f"must be a multiple of {what} = {by}", remedy))


def _model(recipe: Recipe) -> list[Problem]:
    m, problems = recipe.model, []
    if m.head_dim is None and not m.latent:
        _divides(problems, "model.hidden_size", m.hidden_size, m.num_attention_heads, "model.num_attention_heads",
                 "change either, or set model.head_dim")  # fmt: skip
    if m.rotary_width % 2:
        problems.append(Problem("model.qk_pos_emb_head_dim" if m.latent else "model.head_dim", m.rotary_width,
                                "must be even: rotary embeddings turn pairs", "choose an even width"))  # fmt: skip
    if m.latent:
        problems += _latent(recipe)
    _divides(problems, "model.num_attention_heads", m.num_attention_heads, m.num_query_groups, "model.num_query_groups",
             "every query group serves the same number of heads")  # fmt: skip
    if m.num_query_groups > m.num_attention_heads >= 1:
        problems.append(Problem("model.num_query_groups", m.num_query_groups,
                                f"must be at most model.num_attention_heads = {m.num_attention_heads}", "lower it"))  # fmt: skip
    return problems


def _latent(recipe: Recipe) -> list[Problem]:
    """What latent attention does not have."""
    m, problems = recipe.model, []
    if recipe.plan.layers != "layerplan":
        problems.append(Problem("plan.layers", recipe.plan.layers, "recipes run latent attention on layerplan's layers only: Megatron's local ones have none",
                                "set plan.layers=layerplan"))  # fmt: skip
    if m.num_query_groups != m.num_attention_heads:
        problems.append(Problem("model.num_query_groups", m.num_query_groups, "must equal model.num_attention_heads where model.kv_lora_rank is set: "
                                "latent attention has a key for every head", f"set it to {m.num_attention_heads}"))  # fmt: skip
    for name, value in (("head_dim", m.head_dim), ("qkv_bias", m.qkv_bias or None)):
        if value is not None:
            problems.append(Problem(f"model.{name}", value, "has no meaning where model.kv_lora_rank is set", "leave it out"))
    return problems


def _parallel(recipe: Recipe) -> list[Problem]:
    m, p, problems = recipe.model, recipe.parallel, []
    for path, value in (("model.num_attention_heads", m.num_attention_heads), ("model.num_query_groups", m.num_query_groups),
                        ("model.ffn_hidden_size", m.ffn_hidden_size), ("model.vocab_size", m.vocab_size)):  # fmt: skip
        _divides(problems, path, value, p.tensor, "parallel.tensor", "change either")
    _divides(problems, "model.num_layers", m.num_layers, p.pipeline, "parallel.pipeline", "every stage holds the same number of layers")
    if p.sequence:
        _divides(problems, "model.seq_length", m.seq_length, p.tensor, "parallel.tensor", "sequence parallelism splits the sequence")
        if p.tensor == 1:
            problems.append(Problem("parallel.sequence", True, "needs parallel.tensor above 1", "set parallel.sequence=false"))
        if recipe.plan.layers == "megatron_local":
            problems.append(Problem("parallel.sequence", True, "Megatron's local norms refuse sequence parallelism",
                                    "set plan.layers=layerplan or parallel.sequence=false"))  # fmt: skip
    if p.overlap_param_gather and not (p.distributed_optimizer and p.overlap_grad_reduce):
        problems.append(Problem("parallel.overlap_param_gather", True, "needs the distributed optimiser and overlapped gradients",
                                "set parallel.distributed_optimizer=true parallel.overlap_grad_reduce=true"))  # fmt: skip
    return problems


def _rest(recipe: Recipe) -> list[Problem]:
    problems = []
    t, s, o, c = recipe.train, recipe.schedule, recipe.optimizer, recipe.checkpoint
    _divides(problems, "train.global_batch", t.global_batch, t.micro_batch, "train.micro_batch", "a step is whole micro-batches")
    end = recipe.decay_steps
    if s.warmup_steps is not None and s.warmup_steps >= end >= 1:
        which = "train.steps" if s.decay_steps is None else "schedule.decay_steps"
        problems.append(Problem("schedule.warmup_steps", s.warmup_steps, f"must be below {which} = {end}",
                                f"lower it, raise {which}, or leave it out: a tenth of {which}"))  # fmt: skip
    if o.min_lr > o.lr:
        problems.append(Problem("optimizer.min_lr", o.min_lr, f"must be at most optimizer.lr = {o.lr}", "lower it"))
    if c.every_steps and c.dir is None:
        problems.append(Problem("checkpoint.every_steps", c.every_steps, "needs a folder to save in", "set checkpoint.dir=PATH"))
    problems += _shares(recipe.data.split, t.eval_every_steps)
    problems += _plan_files(recipe.plan)
    if recipe.plan.fuse_residual and recipe.plan.layers != "layerplan":
        problems.append(Problem("plan.fuse_residual", True, f"plan.layers = {recipe.plan.layers!r} runs no plans",
                                "set plan.layers=layerplan or plan.fuse_residual=false"))  # fmt: skip
    if recipe.plan.layers == "transformer_engine" and t.device == "cpu":
        problems.append(Problem("plan.layers", "transformer_engine", "Transformer Engine runs on a GPU only",
                                "set plan.layers=layerplan or megatron_local, or train.device=cuda"))  # fmt: skip
    if recipe.plan.loss_runs != "megatron" and recipe.plan.layers != "layerplan":
        problems.append(Problem("plan.loss", recipe.plan.loss, f"plan.layers = {recipe.plan.layers!r} runs no plans",
                                "set plan.layers=layerplan or plan.loss=none"))  # fmt: skip
    problems += _arch(recipe.plan.arch)
    if recipe.plan.recompute == "selective":
        m = recipe.model
        known = _MODULES + (("mla_up_proj",) if m.latent else ()) + (_EXPERT_MODULES if m.num_experts else ())
        for name in recipe.plan.recompute_modules:
            if name not in known:
                problems.append(Problem("plan.recompute_modules", name, f"must be among {', '.join(known)}", "remove it"))
    return problems


def _shares(split: str, eval_every_steps: int) -> list[Problem]:
    try:
        parts = [float(p) for p in split.split(",")]
    except ValueError:
        parts = []
    if len(parts) != _SHARES or not all(0 <= p < math.inf for p in parts) or parts[0] <= 0:
        return [Problem("data.split", split, "must be three finite shares for training, validation and test, the first above 0", "write 98,2,0")]
    if eval_every_steps > 0 and parts[1] == 0:
        rule = f"leaves nothing for validation, which train.eval_every_steps = {eval_every_steps} asks for"
        return [Problem("data.split", split, rule, "write 98,2,0, or set train.eval_every_steps=0")]
    return []


def pattern_and_mode(row: str) -> tuple[str, str]:
    """The two halves of a row of plan.per_module; the last equals sign parts them. Empty where one is absent."""
    pattern, _, mode = row.rpartition("=")
    return pattern.strip(), mode.strip()


def _plan_files(plan: Plan) -> list[Problem]:
    """A plan file or records that no layer would read."""
    modes, problems = {plan.policy, *(pattern_and_mode(row)[1] for row in plan.per_module)}, []
    for name, value, verb in (("plan.file", plan.file, "pinned"), ("plan.records", plan.records, "ranked")):
        if value is not None and plan.layers != "layerplan":
            problems.append(Problem(name, value, f"plan.layers = {plan.layers!r} runs no plans", f"set plan.layers=layerplan or {name}=none"))
        elif value is not None and modes == {"reference"}:
            problems.append(Problem(name, value, f"plan.policy = 'reference' leaves no choice that could be {verb}",
                                    f"set plan.policy=auto or {name}=none"))  # fmt: skip
    return problems


def load_pins(recipe: Recipe) -> Pins | None:
    """The pins of plan.file, None where the recipe names none. Raises RecipeError where the file cannot be read."""
    file = recipe.plan.file
    if file is None:
        return None
    remedy = "write it anew (layerplan plan RECIPE --save FILE), or set plan.file=none"
    source = f"plan.file = {file}"
    try:
        return load(Path(file), source=source, remedy=remedy)
    except PlanFileError as error:
        raise RecipeError([Problem("plan.file", file, str(error).removeprefix(f"{source}: "), remedy)]) from None


def load_records(recipe: Recipe) -> Records:
    """The measured times of plan.records, else of LAYERPLAN_RECORDS; no rows where neither is set. Raises RecipeError where the file
    cannot be read."""
    file = recipe.plan.records
    field, value, remedy = ("LAYERPLAN_RECORDS", settings().records, "or unset it") if file is None else ("plan.records", file, "or set plan.records=none")
    source = f"{field} = {value}"
    try:
        if file is None:
            return records_file.default_records(remedy="")
        return records_file.load(Path(file), source=source, remedy="")
    except RecordsError as error:
        rule = str(error).removeprefix(f"{source}: ")
        raise RecipeError([Problem(field, value, rule, f"write it anew (layerplan tune RECIPE --out FILE), {remedy}")]) from None


def refuse_without_plans(recipe: Recipe, what: str) -> None:
    """ValueError where other layers than layerplan's run: nothing of the recipe is planned. ``what``: what would have
    been done with its plans."""
    layers = recipe.plan.layers
    if layers != "layerplan":
        raise ValueError(f"plan.layers = {layers!r}: runs no plans that could be {what}; set plan.layers=layerplan")


def refuse_unfit_world(recipe: Recipe, world: int | None = None) -> None:
    """RecipeError where the layout or the batch does not fit ``world`` ranks (default: one data-parallel replica)."""
    if problems := recipe.validate_world(world or recipe.parallel.replica):
        raise RecipeError(problems)


def folder_problems(recipe: Recipe) -> list[Problem]:
    """Folders that the run would write to and cannot: each is tried with an empty folder in it, or in what exists of it, that is
    removed again."""
    problems = []
    for path, value in (("checkpoint.dir", recipe.checkpoint.dir), ("logging.dir", recipe.logging.dir)):
        if value is None:
            continue
        try:
            folder = Path(value).absolute()
            while not folder.exists():
                folder = folder.parent
            with tempfile.TemporaryDirectory(prefix=".layerplan-", dir=folder):
                pass
        except (OSError, ValueError) as error:  # a file in its path, no right to write, a name that no path can have
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            problems.append(Problem(path, value, f"must be a folder that can be made and written to ({why})", "choose another folder"))
    return problems


def _arch(name: str | None) -> list[Problem]:
    from ..integration.engines.arch import Arch

    try:
        if name is not None:
            Arch.parse(name)
    except ValueError as error:
        return [Problem("plan.arch", name, str(error).partition(": ")[2], "name one of these, or leave it out")]
    return []
