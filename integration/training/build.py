"""A recipe as Megatron's objects: process groups, model, optimiser, learning-rate schedule."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import re
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.num_microbatches_calculator import (
    init_num_microbatches_calculator,
    unset_num_microbatches_calculator,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from ...modules.base import apply_policy, planned_names
from ...recipes import Problem, Recipe, RecipeError
from ...recipes.config import Model, load_records
from ...recipes.policies import policy_of
from ..engines.arch import Arch
from ..engines.packages import absence, import_error
from ..megatron import compat
from ..megatron.cpu_mode import cpu_mode
from ..megatron.cpu_mode import is_active as cpu_mode_is_active
from ..megatron.optimizer import install_optimizer
from ..planner.plan_file import Pins
from ..planner.records import Records
from ..settings import launcher_environment, relevant_environment

_TIMEOUT = datetime.timedelta(minutes=30)


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    return torch.square(F.relu(x))


_ACTIVATIONS = {"swiglu": F.silu, "geglu": F.gelu, "gelu": F.gelu, "squared_relu": squared_relu}


@dataclass(frozen=True, slots=True)
class Ranks:
    """Where this process stands. ``control``: a gloo group over all ranks, for decisions that must not touch the GPU."""

    rank: int
    world: int
    tensor: int
    pipeline: int
    data: int
    data_size: int
    device: torch.device
    control: Any

    @property
    def first_stage(self) -> bool:
        return mpu.is_pipeline_first_stage()

    @property
    def last_stage(self) -> bool:
        return mpu.is_pipeline_last_stage()

    @property
    def logs(self) -> bool:
        """Whether this rank writes metrics: the first of those that know the loss."""
        return self.last_stage and self.tensor == 0 and self.data == 0

    def coordinates(self) -> str:
        return f"rank {self.rank} (tensor {self.tensor}, pipeline {self.pipeline}, data {self.data})"


def refuse_together(problems: list[Problem], ranks: Ranks) -> None:
    """RecipeError on every rank, with the problems of all, if any rank has one: none waits for one that stopped."""
    found: list[list[Problem]] = [[] for _ in range(ranks.world)]
    dist.all_gather_object(found, problems, group=ranks.control)
    everyone = list(dict.fromkeys(p for part in found for p in part))
    if everyone:
        raise RecipeError(everyone)


def arch_of(device: torch.device) -> Arch:
    return Arch.of_device(-1 if device.type == "cpu" else device.index)


def wants_cpu(recipe: Recipe) -> bool:
    """Whether the run is on the CPU; refuses train.device=cuda where there is no GPU."""
    available = torch.cuda.is_available()
    if recipe.train.device == "cuda" and not available:
        raise RecipeError([Problem("train.device", "cuda", "PyTorch sees no GPU here", "set train.device=cpu, or see layerplan doctor")])
    return recipe.train.device == "cpu" or not available


@contextlib.contextmanager
def ranks_of(recipe: Recipe) -> Iterator[Ranks]:
    """Process groups, seeds and Megatron's patches for the length of the block.

    One process makes a group by itself; where a launcher set WORLD_SIZE above 1 (torchrun, or anything else), RANK, MASTER_ADDR
    and MASTER_PORT say which group to join. A group that exists already is used and left alone. On a machine without a GPU (or with train.device=cpu) the block is in CPU mode, over gloo.
    """
    with contextlib.ExitStack() as stack:
        cpu = wants_cpu(recipe)
        world = 1 if dist.is_initialized() else launched_world(launcher_environment(), cpu)
        if cpu:
            if not cpu_mode_is_active():
                stack.enter_context(cpu_mode())
            device = torch.device("cpu")
        else:
            stack.enter_context(compat.apply(*compat.GUARDS))
            stack.callback(install_optimizer().undo)
            device = torch.device("cuda", dist.get_node_local_rank(fallback_rank=0))
            torch.cuda.set_device(device)
        if recipe.train.threads is not None:
            before = torch.get_num_threads()
            torch.set_num_threads(recipe.train.threads)
            stack.callback(torch.set_num_threads, before)
        _join(stack, cpu, device, world)
        world = dist.get_world_size()
        problems = recipe.validate_world(world) + _arch_problems(recipe, device) + transformer_engine_problems(recipe, device)
        if problems:
            raise RecipeError(problems)
        p, t = recipe.parallel, recipe.train
        mpu.initialize_model_parallel(p.tensor, p.pipeline, expert_model_parallel_size=p.expert, expert_tensor_parallel_size=p.expert_shards)
        stack.callback(mpu.destroy_model_parallel)
        stack.callback(destroy_moe_metrics_tracker)  # Megatron's log of router losses is the process's
        torch.manual_seed(t.seed)
        model_parallel_cuda_manual_seed(t.seed)  # after the line above: on a CPU both seed the one generator
        data_size = mpu.get_data_parallel_world_size()
        init_num_microbatches_calculator(dist.get_rank(), None, t.global_batch, t.micro_batch, data_size)
        stack.callback(unset_num_microbatches_calculator)
        yield Ranks(dist.get_rank(), world, mpu.get_tensor_model_parallel_rank(), mpu.get_pipeline_model_parallel_rank(),
                    mpu.get_data_parallel_rank(), data_size, device, dist.new_group(backend="gloo", timeout=_TIMEOUT))  # fmt: skip


def _arch_problems(recipe: Recipe, device: torch.device) -> list[Problem]:
    if recipe.plan.arch is None:
        return []
    here, wanted = arch_of(device), Arch.parse(recipe.plan.arch)
    if here.name == wanted.name:
        return []
    return [Problem("plan.arch", recipe.plan.arch, f"the device at hand is {here.name}", "leave plan.arch out to train")]


def transformer_engine_problems(recipe: Recipe, device: torch.device) -> list[Problem]:
    """What keeps plan.layers=transformer_engine from running on ``device``; imports that package, which needs torch imported first."""
    if recipe.plan.layers != "transformer_engine":
        return []

    def problem(rule: str, remedy: str) -> list[Problem]:
        return [Problem("plan.layers", "transformer_engine", rule, remedy)]

    reason = absence("transformer_engine")
    found = problem(reason, "or set plan.layers=layerplan") if reason else []
    if device.type == "cpu":
        return found + problem("Transformer Engine runs on a GPU only", "set plan.layers=layerplan or megatron_local")
    if not found and (reason := import_error("transformer_engine.pytorch")):
        found = problem(reason, "repair it, or set plan.layers=layerplan")
    allowed = relevant_environment().get("NVTE_ALLOW_NONDETERMINISTIC_ALGO")
    if recipe.plan.deterministic and allowed != "0":
        rule = f"plan.deterministic needs NVTE_ALLOW_NONDETERMINISTIC_ALGO = 0 in the environment, which is {allowed or 'not set'}"
        found += problem(rule, "set it before the start, or plan.deterministic=false")
    return found


def launched_world(env: Mapping[str, str], cpu: bool) -> int:
    """The number of processes that a launcher started, 1 without one; ``env`` as ``launcher_environment`` gives it.

    Raises RecipeError naming each variable that is absent or wrong: a rank that took itself for a run of its own would train
    beside the others, into the same files.
    """
    problems, remedy = [], "start with torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for every process"
    numbers: dict[str, int] = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        if name in env:
            if env[name].isascii() and env[name].isdigit():
                numbers[name] = int(env[name])
            else:
                problems.append(Problem(f"environment: {name}", env[name], "must be a whole number, at least 0", remedy))
    world = numbers.get("WORLD_SIZE", 1)
    if world > 1:
        needed = ("RANK", "MASTER_ADDR", "MASTER_PORT", *(() if cpu else ("LOCAL_RANK",)))
        rule = f"must be set where WORLD_SIZE = {world}"
        problems += [Problem(f"environment: {name}", None, rule, remedy) for name in needed if name not in env]
    if numbers.get("RANK", 0) >= max(world, 1) and "WORLD_SIZE" not in [p.field.partition(": ")[2] for p in problems]:
        rule = f"must be below WORLD_SIZE = {world}" if "WORLD_SIZE" in env else "WORLD_SIZE is not set: this rank would train alone"
        problems.append(Problem("environment: RANK", env["RANK"], rule, remedy))
    if problems:
        raise RecipeError(problems)
    return world


def _join(stack: contextlib.ExitStack, cpu: bool, device: torch.device, world: int) -> None:
    if dist.is_initialized():
        return
    # gloo beside NCCL: objects and flags travel without a kernel on the GPU
    options: dict[str, Any] = {"backend": "gloo"} if cpu else {"backend": "cpu:gloo,cuda:nccl", "device_id": device}
    if world > 1:
        dist.init_process_group(init_method="env://", timeout=_TIMEOUT, **options)
    else:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, timeout=_TIMEOUT, **options)
    stack.callback(dist.destroy_process_group)


def transformer_config(recipe: Recipe) -> TransformerConfig:
    """Megatron's config of the recipe's model."""
    m, p, plan = recipe.model, recipe.parallel, recipe.plan
    dtype = getattr(torch, recipe.precision.tensor_dtype)
    recompute: dict[str, Any] = {}
    if plan.recompute == "full":
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif plan.recompute == "selective":
        recompute = {"recompute_granularity": "selective", "recompute_modules": list(plan.recompute_modules)}
    make, latent = (MLATransformerConfig, _latent_fields(m)) if m.latent else (TransformerConfig, {"kv_channels": m.head_width})
    return make(
        num_layers=m.num_layers, hidden_size=m.hidden_size, ffn_hidden_size=m.ffn_hidden_size,
        num_attention_heads=m.num_attention_heads, num_query_groups=m.num_query_groups,
        normalization=m.normalization, layernorm_epsilon=m.norm_eps, activation_func=_ACTIVATIONS[m.activation],
        gated_linear_unit=m.gated, add_bias_linear=m.linear_bias, add_qkv_bias=m.qkv_bias, qk_layernorm=m.qk_norm,
        hidden_dropout=m.hidden_dropout, attention_dropout=m.attention_dropout, init_method_std=m.init_std,
        tensor_model_parallel_size=p.tensor, pipeline_model_parallel_size=p.pipeline, sequence_parallel=p.sequence,
        pipeline_dtype=dtype, params_dtype=dtype, bf16=dtype is torch.bfloat16, deterministic_mode=plan.deterministic,
        calculate_per_token_loss=True, attention_softmax_in_fp32=True, gradient_accumulation_fusion=plan.gradient_accumulation_fusion,
        **_fusions(recipe), **recompute, **latent, **_expert_fields(recipe),
    )  # fmt: skip


def _latent_fields(m: Model) -> dict[str, Any]:
    """Megatron's fields of multi-head latent attention, whose rotary embedding is its own."""
    names = ("kv_lora_rank", "q_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    return {n: getattr(m, n) for n in names} | {"multi_latent_attention": True, "rope_type": "rope", "rotary_base": m.rope_base}


_RECIPES_OWN = ("moe_dense_layers", "moe_ffn_hidden_size")  # fields of experts that Megatron has under another name or value


def _expert_fields(recipe: Recipe) -> dict[str, Any]:
    """Megatron's fields of experts; the recipe's bear their names. Layers have one shape in checkpoints where all have experts."""
    m, p = recipe.model, recipe.parallel
    if m.num_experts is None:
        return {}
    same = {f.name: getattr(m, f.name) for f in dataclasses.fields(m) if f.name.startswith("moe_") and f.name not in _RECIPES_OWN}
    return same | {
        "num_moe_experts": m.num_experts, "moe_ffn_hidden_size": m.expert_width, "moe_grouped_gemm": recipe.plan.layers == "layerplan",
        "moe_layer_freq": [int(m.has_experts(i)) for i in range(m.num_layers)] if m.moe_dense_layers else 1,
        "moe_token_dispatcher_type": p.dispatcher, "expert_model_parallel_size": p.expert, "expert_tensor_parallel_size": p.expert_shards,
    }  # fmt: skip


def _fusions(recipe: Recipe) -> dict[str, Any]:
    """Megatron's own fusions. None where plans take their place, nor for its layers in plain PyTorch; beside Transformer Engine's layers
    all that keep the maths: its fused GELU is an approximation."""
    if recipe.plan.layers != "transformer_engine":
        return {"transformer_impl": "local", "bias_dropout_fusion": False, "bias_activation_fusion": False}
    return {"transformer_impl": "transformer_engine", "bias_dropout_fusion": True, "bias_activation_fusion": recipe.model.activation == "swiglu",
            "apply_rope_fusion": True, "cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "native",
            # left to choose, Transformer Engine 2.20 takes flash-attn-4 where that is importable, and its values are wrong
            "attention_backend": AttnBackend.fused}  # fmt: skip


def block_spec(recipe: Recipe, config: TransformerConfig) -> Any:
    """The layers that plan.layers asks for."""
    if recipe.plan.layers == "layerplan":
        from ..megatron.specs import gpt_block_spec

        return gpt_block_spec(config, fuse_residual=recipe.plan.fuse_residual)
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )

    if recipe.plan.layers == "transformer_engine":
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    if recipe.model.num_experts is not None:
        return get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
    return get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)


def plan_model(recipe: Recipe, model: torch.nn.Module, pins: Pins | None, records: Records | None = None) -> None:
    """Have layerplan's layers planned anew, under the recipe's policies, a plan file and measured times (None: the recipe's)."""
    if recipe.plan.layers != "layerplan":
        return
    first = min((m.layer_number - 1 for m in model.modules() if isinstance(m, TransformerLayer)), default=0)

    def whole(name: str) -> str:
        """The name with the layer's number in the whole model: a stage's module list counts from 0."""
        return re.sub(r"(?<=\bdecoder\.layers\.)\d+", lambda m: str(int(m.group()) + first), name)

    policy = policy_of(recipe)
    missing = policy.unmatched(map(whole, planned_names(model)))  # the recipe was held against all layers: those of other stages
    policy = dataclasses.replace(policy, per_module=tuple(row for row in policy.per_module if row[0] not in missing))
    apply_policy(model, policy, pins=pins, records=load_records(recipe) if records is None else records, rename=whole)


def build_model(recipe: Recipe, config: TransformerConfig, pins: Pins | None = None, records: Records | None = None) -> GPTModel:
    """This rank's part of the model, in the parameters' dtype, on the device."""
    m = recipe.model
    make, loss = GPTModel, {}
    if recipe.plan.loss_runs != "megatron":
        from ..megatron.model import LayerplanGPTModel

        make, loss = LayerplanGPTModel, {"loss": recipe.plan.loss_runs}
    model = make(
        config, block_spec(recipe, config), m.vocab_size, m.seq_length,
        pre_process=mpu.is_pipeline_first_stage(), post_process=mpu.is_pipeline_last_stage(),
        position_embedding_type="rope", rotary_base=m.rope_base, share_embeddings_and_output_weights=m.tie_embeddings,
        parallel_output=True, **loss,
    )  # fmt: skip
    plan_model(recipe, model, pins, records)
    return model.to(torch.cuda.current_device())


@dataclass(slots=True)
class Built:
    """Megatron's parts of one rank. ``gpt`` is the model without its wrappers, ``model`` what the schedule runs."""

    config: TransformerConfig
    gpt: GPTModel
    model: DistributedDataParallel
    optimizer: Any
    scheduler: OptimizerParamScheduler


def build(recipe: Recipe, pins: Pins | None = None, records: Records | None = None) -> Built:
    """Model, wrappers, optimiser and schedule, as the recipe says, its layers planned as ``pins`` and ``records`` say. Call inside
    ``ranks_of``."""
    o, p, t = recipe.optimizer, recipe.parallel, recipe.train
    config = transformer_config(recipe)
    gpt = build_model(recipe, config, pins, records)
    inner = Float16Module(config, gpt) if config.bf16 else gpt
    model = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,  # what gradient_accumulation_fusion adds to
            use_distributed_optimizer=p.distributed_optimizer,
            overlap_grad_reduce=p.overlap_grad_reduce, overlap_param_gather=p.overlap_param_gather,
        ),
        inner,
    )  # fmt: skip
    model.broadcast_params()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=o.lr, min_lr=o.min_lr, adam_beta1=o.beta1, adam_beta2=o.beta2, adam_eps=o.eps,
            weight_decay=o.weight_decay, clip_grad=o.clip_grad, bf16=config.bf16, params_dtype=config.params_dtype,
            use_distributed_optimizer=p.distributed_optimizer, overlap_param_gather=p.overlap_param_gather,
        ),
        [model],
    )  # fmt: skip
    decay = recipe.decay_steps * t.global_batch
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=o.lr, min_lr=o.min_lr, lr_warmup_steps=recipe.warmup_steps * t.global_batch,
        lr_decay_steps=decay, lr_decay_style=recipe.schedule.style, start_wd=o.weight_decay, end_wd=o.weight_decay,
        wd_incr_steps=decay, wd_incr_style="constant",
    )  # fmt: skip
    # Not the bound method: Megatron's optimiser keeps views of fp32 parameters with their graph, which the garbage collector does not
    # see through, so a model that held its optimiser would never be freed, nor its process groups with their threads.
    held = weakref.ref(optimizer)
    config.grad_scale_func = lambda loss: held().scale_loss(loss)
    config.finalize_model_grads_func = finalize_model_grads
    if p.overlap_grad_reduce:
        config.no_sync_func = model.no_sync
    if p.overlap_param_gather:
        config.param_sync_func = model.start_param_sync
    return Built(config, gpt, model, optimizer, scheduler)
