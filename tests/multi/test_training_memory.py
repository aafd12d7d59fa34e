"""The dry run's memory estimate against what a step allocates, tracked on a CPU."""

from __future__ import annotations

import pytest
from harness import run_ranks

BASE = ("model.num_layers=4", "model.hidden_size=128", "model.ffn_hidden_size=352", "model.vocab_size=512", "model.seq_length=128",
        "train.micro_batch=4", "train.global_batch=8")  # fmt: skip
SHARDED = (*BASE, "parallel.tensor=2", "train.micro_batch=2")
WIDE = "model.vocab_size=2048"
BF16 = "precision.dtype=bf16"
EXPERTS = ("model.num_experts=8", "model.moe_ffn_hidden_size=128", "model.moe_dense_layers=1",
           "model.moe_shared_expert_intermediate_size=128", "model.moe_aux_loss_coeff=0.01", "model.moe_z_loss_coeff=0.001")  # fmt: skip
LATENT = ("model.kv_lora_rank=64", "model.num_query_groups=4", "model.qk_head_dim=32", "model.qk_pos_emb_head_dim=16",
          "model.v_head_dim=32", "model.qk_norm=true")  # fmt: skip
ONE_RANK = {
    "plain": BASE, "bf16": (*BASE, BF16), "deeper": (*BASE, "model.num_layers=8", "model.seq_length=256", "train.micro_batch=2"),
    "wider": (*BASE, "model.hidden_size=256", "model.ffn_hidden_size=704"), "large vocabulary": (*BASE, WIDE, BF16),
    "fused adds": (*BASE, "plan.fuse_residual=true"), "full": (*BASE, "plan.recompute=full"),
    "selective": (*BASE, "plan.recompute=selective", "plan.recompute_modules=mlp,layernorm"),
    "core attention": (*BASE, "plan.recompute=selective"), "chunked": (*BASE, WIDE, "plan.loss=chunked"),
    "Megatron's loss": (*BASE, WIDE, BF16, "plan.loss=megatron"), "Megatron's loss, fp32": (*BASE, WIDE, "plan.loss=megatron"),
    "dropout": (*BASE, "model.hidden_dropout=0.1"), "tied": (*BASE, "model.tie_embeddings=true"),
    "biases": (*BASE, "model.linear_bias=true", "model.normalization=LayerNorm", "model.activation=gelu"),
}  # fmt: skip
TWO_RANKS = {
    "tensor": SHARDED, "sequence": (*SHARDED, "parallel.sequence=true"),
    "sequence, chunked": (*SHARDED, "parallel.sequence=true", "plan.loss=chunked", WIDE),
    "sequence, fused adds": (*SHARDED, "parallel.sequence=true", "plan.fuse_residual=true"),
    "sequence, full": (*SHARDED, "parallel.sequence=true", "plan.recompute=full"),
    "pipeline": (*BASE, "parallel.pipeline=2", "train.micro_batch=2"), "data": BASE,
    "data, whole optimiser": (*BASE, BF16, "parallel.distributed_optimizer=false"),
}  # fmt: skip

ONE_RANK_EXPERTS = {
    "experts": (*BASE, *EXPERTS), "experts, bf16": (*BASE, *EXPERTS, BF16),
    "experts, selective": (*BASE, *EXPERTS, "plan.recompute=selective", "plan.recompute_modules=moe_act,shared_experts,mlp"),
    "experts, again": (*BASE, *EXPERTS, "plan.recompute=selective", "plan.recompute_modules=moe"),
    "experts, full": (*BASE, *EXPERTS, "plan.recompute=full"),
    "latent": (*BASE, *LATENT), "latent, low-rank queries": (*BASE, *LATENT, "model.q_lora_rank=96", BF16),
    "latent, selective": (*BASE, *LATENT, *EXPERTS, "plan.recompute=selective", "plan.recompute_modules=mla_up_proj"),
}
TWO_RANKS_EXPERTS = {
    "experts of two ranks": (*BASE, *EXPERTS, "parallel.expert=2"),
    "experts, gathered": (*BASE, *EXPERTS, "parallel.expert=2", "parallel.dispatcher=allgather"),
    "experts, tensor": (*SHARDED, *EXPERTS, "parallel.sequence=true"),
}  # fmt: skip
GROUPS = {"one": (1, ONE_RANK), "two": (2, TWO_RANKS), "experts": (1, ONE_RANK_EXPERTS), "experts of two": (2, TWO_RANKS_EXPERTS)}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    pytest.importorskip("megatron.core")
    peaks = {}
    for name, (world, cases) in GROUPS.items():
        ranks = run_ranks("training_memory:peaks", world, 300, folder=str(tmp_path_factory.mktemp(name)), cases=cases)
        peaks |= {case: max((r[case] for r in ranks), key=lambda row: row[0]) for case in cases}
    return peaks


@pytest.mark.parametrize("case", [case for _, cases in GROUPS.values() for case in cases])
def test_the_estimate_is_within_a_twentieth_of_what_a_step_holds_at_its_peak(found, case):
    peak, estimate, terms = found[case]
    assert abs(estimate - peak) <= 0.05 * peak, (peak, terms)


def test_what_a_layer_saves_moves_the_tracked_peak_as_it_moves_the_estimate(found):
    for less in ("full", "selective"):
        tracked, estimated = (found["plain"][i] - found[less][i] for i in (0, 1))
        assert estimated == pytest.approx(tracked, rel=0.01) and tracked > 0.2 * found["plain"][0]
