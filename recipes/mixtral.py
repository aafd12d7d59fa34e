"""Mixtral."""

from __future__ import annotations

from .config import Model, Optimizer, Parallel, Precision, Recipe, Schedule, Train


def mixtral_8x7b() -> Recipe:
    """Mixtral 8x7B in bfloat16: two of eight experts a token, experts over eight GPUs, four pipeline stages."""
    return Recipe(
        name="mixtral_8x7b",
        model=Model(
            num_layers=32, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32, num_query_groups=8,
            vocab_size=32000, seq_length=4096, rope_base=1000000.0, num_experts=8, moe_router_topk=2,
            moe_aux_loss_coeff=0.02,
        ),
        train=Train(steps=100_000, global_batch=1024, micro_batch=1),
        optimizer=Optimizer(lr=3e-4, min_lr=3e-5),
        schedule=Schedule(warmup_steps=2000, decay_steps=100_000),
        precision=Precision(dtype="bf16"),
        parallel=Parallel(pipeline=4, expert=8, overlap_grad_reduce=True, overlap_param_gather=True),
    )  # fmt: skip
