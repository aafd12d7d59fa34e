"""DeepSeek."""

from __future__ import annotations

from .config import Model, Optimizer, Parallel, Precision, Recipe, Schedule, Train


def deepseek_v2_lite() -> Recipe:
    """DeepSeek-V2-Lite in bfloat16: latent attention, six of 64 experts and two shared ones, experts over eight GPUs."""
    return Recipe(
        name="deepseek_v2_lite",
        model=Model(
            num_layers=27, hidden_size=2048, ffn_hidden_size=10944, num_attention_heads=16, num_query_groups=16,
            vocab_size=102400, seq_length=4096, norm_eps=1e-6, qk_norm=True, kv_lora_rank=512, qk_head_dim=128,
            qk_pos_emb_head_dim=64, v_head_dim=128, num_experts=64, moe_dense_layers=1, moe_ffn_hidden_size=1408,
            moe_shared_expert_intermediate_size=2816, moe_router_topk=6, moe_router_pre_softmax=True,
            moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=1e-3,
        ),
        train=Train(steps=100_000, global_batch=4608, micro_batch=1),
        optimizer=Optimizer(lr=4.2e-4, min_lr=4.2e-5),
        schedule=Schedule(warmup_steps=2000, decay_steps=100_000),
        precision=Precision(dtype="bf16"),
        parallel=Parallel(expert=8, overlap_grad_reduce=True, overlap_param_gather=True),
    )  # fmt: skip
