"""Qwen3."""

from __future__ import annotations

from .config import Model, Optimizer, Parallel, Precision, Recipe, Schedule, Train


def qwen3_30b_a3b() -> Recipe:
    """Qwen3 30B-A3B in bfloat16: eight of 128 experts a token, experts over eight GPUs, two pipeline stages."""
    return Recipe(
        name="qwen3_30b_a3b",
        model=Model(
            num_layers=48, hidden_size=2048, ffn_hidden_size=6144, num_attention_heads=32, num_query_groups=4,
            head_dim=128, vocab_size=151936, seq_length=4096, rope_base=1000000.0, norm_eps=1e-6, qk_norm=True,
            num_experts=128, moe_ffn_hidden_size=768, moe_router_topk=8,
            moe_aux_loss_coeff=1e-3, moe_router_load_balancing_type="global_aux_loss",
        ),
        train=Train(steps=100_000, global_batch=1024, micro_batch=1),
        optimizer=Optimizer(lr=3e-4, min_lr=3e-5),
        schedule=Schedule(warmup_steps=2000, decay_steps=100_000),
        precision=Precision(dtype="bf16"),
        parallel=Parallel(pipeline=2, expert=8, overlap_grad_reduce=True, overlap_param_gather=True),
    )  # fmt: skip
