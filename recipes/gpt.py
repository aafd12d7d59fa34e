"""Small GPT recipes: two for a laptop, one for a single GPU."""

from __future__ import annotations

from .config import Logging, Model, Optimizer, Precision, Recipe, Train


def gpt_tiny() -> Recipe:
    """A Llama-like model of about a million parameters that learns text on a CPU in minutes."""
    return Recipe(
        name="gpt_tiny",
        model=Model(
            num_layers=3, hidden_size=128, ffn_hidden_size=352, num_attention_heads=4, num_query_groups=2,
            vocab_size=2048, seq_length=128,
        ),
        train=Train(steps=400, global_batch=8, micro_batch=4),
        optimizer=Optimizer(lr=3e-3, min_lr=3e-4),
        logging=Logging(every_steps=1),
    )  # fmt: skip


def moe_tiny() -> Recipe:
    """``gpt_tiny`` with experts: two of eight a token and a shared one, trained on a CPU in minutes."""
    return Recipe(
        name="moe_tiny",
        model=Model(
            num_layers=3, hidden_size=128, ffn_hidden_size=352, num_attention_heads=4, num_query_groups=2,
            vocab_size=2048, seq_length=128, num_experts=8, moe_dense_layers=1, moe_ffn_hidden_size=128,
            moe_router_topk=2, moe_shared_expert_intermediate_size=128, moe_aux_loss_coeff=1e-2, moe_z_loss_coeff=1e-3,
        ),
        train=Train(steps=400, global_batch=8, micro_batch=4),
        optimizer=Optimizer(lr=3e-3, min_lr=3e-4),
        logging=Logging(every_steps=1),
    )  # fmt: skip


def gpt_125m() -> Recipe:
    """The size of the smallest GPT-3, with RMSNorm, SwiGLU and rotary embeddings; one GPU, bfloat16."""
    return Recipe(
        name="gpt_125m",
        model=Model(
            num_layers=12, hidden_size=768, ffn_hidden_size=2048, num_attention_heads=12, num_query_groups=12,
            vocab_size=32768, seq_length=2048, tie_embeddings=True,
        ),
        train=Train(steps=5000, global_batch=64, micro_batch=16),
        optimizer=Optimizer(lr=6e-4, min_lr=6e-5),
        precision=Precision(dtype="bf16"),
    )  # fmt: skip
