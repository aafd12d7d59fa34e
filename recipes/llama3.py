"""Llama 3."""

from __future__ import annotations

from .config import Model, Optimizer, Parallel, Precision, Recipe, Schedule, Train


def llama3_8b() -> Recipe:
    """Llama 3 8B in bfloat16, tensor parallel over two GPUs with sequence parallelism."""
    return Recipe(
        name="llama3_8b",
        model=Model(
            num_layers=32, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32, num_query_groups=8,
            vocab_size=128256, seq_length=8192, rope_base=500000.0,
        ),
        train=Train(steps=100_000, global_batch=512, micro_batch=1),
        optimizer=Optimizer(lr=3e-4, min_lr=3e-5),
        schedule=Schedule(warmup_steps=2000, decay_steps=100_000),  # of the whole run: fewer steps are its beginning
        precision=Precision(dtype="bf16"),
        parallel=Parallel(tensor=2, sequence=True, overlap_grad_reduce=True, overlap_param_gather=True),
    )  # fmt: skip


def llama3_70b() -> Recipe:
    """Llama 3 70B in bfloat16, tensor parallel over eight GPUs with sequence parallelism, four pipeline stages."""
    return Recipe(
        name="llama3_70b",
        model=Model(
            num_layers=80, hidden_size=8192, ffn_hidden_size=28672, num_attention_heads=64, num_query_groups=8,
            vocab_size=128256, seq_length=8192, rope_base=500000.0,
        ),
        train=Train(steps=100_000, global_batch=1024, micro_batch=1),
        optimizer=Optimizer(lr=1.5e-4, min_lr=1.5e-5),
        schedule=Schedule(warmup_steps=2000, decay_steps=100_000),
        precision=Precision(dtype="bf16"),
        parallel=Parallel(tensor=8, pipeline=4, sequence=True, overlap_grad_reduce=True, overlap_param_gather=True),
    )  # fmt: skip
