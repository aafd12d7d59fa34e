"""A tiny GPT that trains the same way under every parallel layout: what the Megatron tests share.

Parameters are filled from their global names, so that the layouts of one model start from equal weights; the data is
two micro-batches, which data parallelism deals out and the other layouts run one after the other.
"""

from __future__ import annotations

import dataclasses
import re
import zlib
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

VOCAB, LENGTH, BATCH, MICRO_BATCHES = 64, 16, 2, 2


def dense_config(**changes: Any) -> TransformerConfig:
    """Two layers of width 32 with RMSNorm and SwiGLU, no dropout, fp32."""
    fields: dict[str, Any] = {
        "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 64,
        "normalization": "RMSNorm", "add_bias_linear": False, "gated_linear_unit": True, "activation_func": F.silu,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "transformer_impl": "local", "bias_dropout_fusion": False,
        "bias_activation_fusion": False, "pipeline_dtype": torch.float32,
        "tensor_model_parallel_size": mpu.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": mpu.get_pipeline_model_parallel_world_size(),
        "expert_model_parallel_size": mpu.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": mpu.get_expert_tensor_parallel_world_size(),
    }  # fmt: skip
    return TransformerConfig(**(fields | changes))


def layout(tp: int = 1, pp: int = 1, ep: int = 1, etp: int | None = None) -> None:
    """Makes Megatron's groups anew."""
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp)
    model_parallel_cuda_manual_seed(123)


@torch.no_grad()
def fill(model: torch.nn.Module, scale: float = 0.2) -> None:
    """Gives every parameter the values that its global name says, and this rank's part of them."""
    numbers = {name: module.layer_number for name, module in model.named_modules() if re.search(r"layers\.\d+$", name)}
    for name, param in model.named_parameters():
        for prefix, number in numbers.items():
            if name.startswith(prefix + "."):
                name = f"layer {number}{name[len(prefix) :]}"
        if ".experts." in name:
            _fill_experts(param, name, model.config.num_moe_experts, scale)
            continue
        if param.dim() == 1:
            param.fill_(1.0 if name.endswith("weight") else 0.0)
            continue
        tp = mpu.get_tensor_model_parallel_world_size() if getattr(param, "tensor_model_parallel", False) else 1
        dim, stride = (param.partition_dim, param.partition_stride) if tp > 1 else (0, 1)
        shape = list(param.shape)
        shape[dim] *= tp
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))) * scale
        parts = whole.chunk(stride * tp, dim)[mpu.get_tensor_model_parallel_rank() :: tp] if tp > 1 else [whole]
        param.copy_(torch.cat(list(parts), dim))


def _fill_experts(param: torch.Tensor, name: str, experts: int, scale: float) -> None:
    """Matrices by their expert's number in the whole model: one of Megatron's SequentialMLP, or all of a rank in one parameter of ours."""
    head, _, tail = name.partition(".experts.")
    first = mpu.get_expert_model_parallel_rank() * (experts // mpu.get_expert_model_parallel_world_size())
    if tail.startswith("local_experts."):
        _, index, which, _ = tail.split(".")
        matrices = [(first + int(index), which, param)]
    else:
        matrices = [(first + i, f"linear_{tail}", m) for i, m in enumerate(param)]
    size, rank = mpu.get_expert_tensor_parallel_world_size(), mpu.get_expert_tensor_parallel_rank()
    for number, which, matrix in matrices:
        dim, stride = (0, 2) if which == "linear_fc1" else (1, 1)
        shape = [n * size if k == dim else n for k, n in enumerate(matrix.shape)]
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(f"{head} {number} {which}".encode()))) * scale
        matrix.copy_(torch.cat(whole.chunk(stride * size, dim)[rank::size], dim))


@dataclasses.dataclass
class Run:
    """A model with its wrapper and optimiser; `step()` is one update."""

    gpt: GPTModel
    model: DistributedDataParallel
    optimizer: Any
    all_data: bool = False
    good: bool = True  # whether the last update was made, not skipped

    def step(self) -> list[float]:
        """[loss over both micro-batches, gradient norm]; the loss is NaN on a rank without the last stage."""
        tokens = torch.randint(0, VOCAB, (MICRO_BATCHES, BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(7))
        replicas, replica = mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
        mine = tokens if replicas == 1 or self.all_data else tokens[replica::replicas]
        positions = torch.arange(LENGTH)[None].expand(BATCH, -1)
        mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)

        def loss_func(output: torch.Tensor) -> Any:
            loss = output.float().mean()
            return loss, {"loss": loss.detach().clone()}  # the schedule divides the loss in place

        def forward_step(batches: Any, model: Any) -> Any:
            row = next(batches)
            return model(row[:, :-1].contiguous(), positions, mask, labels=row[:, 1:].contiguous()), loss_func

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        logged = get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=iter(mine), model=[self.model], num_microbatches=len(mine),
            seq_length=LENGTH, micro_batch_size=BATCH, forward_only=False,
        )  # fmt: skip
        self.good, norm, _ = self.optimizer.step()
        if not logged:
            return [float("nan"), float(norm)]
        loss = torch.stack([entry["loss"] for entry in logged]).mean()
        torch.distributed.all_reduce(loss, group=mpu.get_data_parallel_group())
        return [loss.item() / replicas, float(norm)]

    def state(self, metadata: dict[str, Any], loading: bool = False) -> dict[str, Any]:
        model = self.gpt.sharded_state_dict(metadata=metadata)
        return {"model": model, "optimizer": self.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)}

    def save(self, folder: str, metadata: dict[str, Any]) -> None:
        if self.model.ddp_config.overlap_param_gather:
            self.model.disable_forward_pre_hook(param_sync=True)  # parameters are gathered lazily: gather them first
        dist_checkpointing.save(self.state(metadata), folder)
        if self.model.ddp_config.overlap_param_gather:
            self.model.enable_forward_pre_hook()

    def load(self, folder: str, metadata: dict[str, Any]) -> None:
        got = dist_checkpointing.load(self.state(metadata, loading=True), folder)
        self.gpt.load_state_dict(got["model"])
        self.optimizer.load_state_dict(got["optimizer"])


def build(config: Any = None, spec: Any = None, *, distributed_optimizer: bool = False, overlap: bool = False,
          all_data: bool = False, make: Any = GPTModel, **optimizer: Any) -> Run:  # fmt: skip
    """A filled model, wrapped, with its optimiser. `all_data`: every data-parallel rank runs all micro-batches; `make`: GPTModel
    or what takes its arguments."""
    config = config or dense_config()
    spec = spec or get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
    gpt = make(
        config, spec, vocab_size=VOCAB, max_sequence_length=LENGTH,
        position_embedding_type="none" if config.multi_latent_attention else "rope", share_embeddings_and_output_weights=False,
        pre_process=mpu.is_pipeline_first_stage(), post_process=mpu.is_pipeline_last_stage(),
    )  # fmt: skip
    fill(gpt)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed_optimizer, overlap_grad_reduce=overlap,
        overlap_param_gather=overlap and distributed_optimizer, grad_reduce_in_fp32=True,
    )  # fmt: skip
    model = DistributedDataParallel(config, ddp, Float16Module(config, gpt) if config.bf16 or config.fp16 else gpt)
    model.broadcast_params()
    options = OptimizerConfig(
        **({"optimizer": "adam", "lr": 1e-2, "weight_decay": 0.01, "clip_grad": 1.0, "bf16": config.bf16, "fp16": config.fp16,
            "params_dtype": config.params_dtype, "use_distributed_optimizer": distributed_optimizer,
            "overlap_param_gather": overlap and distributed_optimizer} | optimizer)
    )  # fmt: skip
    run = Run(gpt, model, get_megatron_optimizer(options, [model]), all_data)
    config.finalize_model_grads_func, config.grad_scale_func = finalize_model_grads, run.optimizer.scale_loss
    if overlap:
        config.no_sync_func = model.no_sync
    return run
