"""Megatron on one GPU: what the tests of its layers share. Megatron is imported where it is called for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """Process group and parallel state of this process alone, gone again behind the block."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.cuda.set_device(0)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda:0"))
    try:
        parallel_state.initialize_model_parallel(1, 1)
        model_parallel_cuda_manual_seed(7)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def moe_config(**changes: Any):
    """A small layer of experts: width 256, bf16, SwiGLU."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    fields: dict[str, Any] = {
        "num_layers": 1, "hidden_size": 256, "num_attention_heads": 4, "ffn_hidden_size": 512,
        "normalization": "RMSNorm", "add_bias_linear": False, "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu, "hidden_dropout": 0.0, "attention_dropout": 0.0,
        "bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16,
        "gradient_accumulation_fusion": False, "bias_dropout_fusion": False, "bias_activation_fusion": False,
        "num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 128, "moe_router_dtype": "fp32",
        "moe_grouped_gemm": True, "moe_router_load_balancing_type": "none",
    }  # fmt: skip
    return TransformerConfig(**(fields | changes))
