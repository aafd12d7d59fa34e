"""Router, losses, permute and unpermute against Megatron-Core's own functions, forward and gradients, in float32."""

from __future__ import annotations

import itertools

import pytest
import torch
from megatron.core.transformer.moe import moe_utils

from layerplan.integration import ops

TOKENS, EXPERTS = 24, 12


def logits(seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(TOKENS, EXPERTS, generator=gen)).to(dtype)


ROUTERS = [
    {"score_function": "softmax", "topk": 4},
    {"score_function": "softmax", "topk": 1},
    {"score_function": "softmax", "topk": 4, "pre_softmax": True},
    {"score_function": "softmax", "topk": 4, "pre_softmax": True, "num_groups": 4, "group_topk": 2},
    {"score_function": "softmax", "topk": 3, "num_groups": 3, "group_topk": 2, "scaling_factor": 2.5},
    {"score_function": "sigmoid", "topk": 4},
    {"score_function": "sigmoid", "topk": 1},
    {"score_function": "sigmoid", "topk": 4, "num_groups": 4, "group_topk": 2, "scaling_factor": 2.5},
]


WITH_BIAS = [(o, b) for o in ROUTERS for b in (False, True) if not b or o["score_function"] == "sigmoid"]


@pytest.mark.parametrize(("options", "bias"), WITH_BIAS)
def test_probabilities_choice_and_gradient_are_megatrons(options, bias):
    expert_bias = 0.3 * torch.randn(EXPERTS, generator=torch.Generator().manual_seed(1)) if bias else None
    theirs_in, ours_in = logits().requires_grad_(), logits().requires_grad_()
    named = {"pre_softmax": "use_pre_softmax"}
    theirs, chosen = moe_utils.topk_routing_with_score_function(
        theirs_in, expert_bias=expert_bias, dense_output=True, **{named.get(k, k): v for k, v in options.items()}
    )
    ours, expert_map = ops.router(ours_in, expert_bias=expert_bias, **options)
    assert torch.equal(expert_map.long(), chosen) and expert_map.dtype == torch.int32
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    weight = torch.randn(ours.shape, generator=torch.Generator().manual_seed(2))
    a, b = (torch.autograd.grad((p * weight).sum(), x)[0] for p, x in ((ours, ours_in), (theirs, theirs_in)))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def padding() -> torch.Tensor:
    mask = torch.zeros(TOKENS, dtype=torch.bool)
    mask[[3, 4, 11, 20]] = True
    return mask


@pytest.mark.parametrize(
    ("score", "masked", "sequences"), itertools.product(("softmax", "sigmoid"), (False, True), (1, 3))
)
def test_balance_loss_and_gradient_are_megatrons(score, masked, sequences):
    topk, coefficient, mask = 3, 0.02, padding() if masked else None
    theirs_in, ours_in = logits(3).requires_grad_(), logits(3).requires_grad_()
    routing, scores = moe_utils.compute_routing_scores_for_aux_loss(theirs_in, topk, score, padding_mask=mask)
    length = TOKENS // sequences
    routing, scores = routing.reshape(length, -1), scores.reshape(length, -1)  # as the router does it
    tokens = routing.sum(0)
    total = tokens.sum() / (topk * sequences) if masked else length
    theirs = moe_utils.switch_load_balancing_loss_func(scores, tokens, total, topk, EXPERTS, coefficient) / sequences

    _, expert_map = ops.router(ours_in.detach(), topk=topk, score_function=score, pre_softmax=score == "softmax")
    counted = ops.tokens_per_expert(expert_map, num_experts=EXPERTS, padding_mask=mask, sequences=sequences)
    assert torch.equal(counted.flatten(), tokens.float())
    ours = ops.load_balancing_loss(
        ours_in, counted, topk=topk, score_function=score, coefficient=coefficient, padding_mask=mask
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    a, b = (torch.autograd.grad(loss, x)[0] for loss, x in ((ours, ours_in), (theirs, theirs_in)))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)


def test_balance_loss_over_a_running_mean_of_counts_is_megatrons():
    topk, coefficient = 2, 0.01
    theirs_in, ours_in = logits(4).requires_grad_(), logits(4).requires_grad_()
    routing, scores = moe_utils.compute_routing_scores_for_aux_loss(theirs_in, topk, "softmax")
    mean = (routing.sum(0) + torch.arange(EXPERTS)) / 2
    theirs = moe_utils.switch_load_balancing_loss_func(scores, mean, TOKENS, topk, EXPERTS, coefficient)
    ours = ops.load_balancing_loss(
        ours_in, mean[None], topk=topk, coefficient=coefficient, total_tokens=torch.tensor([float(TOKENS)])
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    a, b = (torch.autograd.grad(loss, x)[0] for loss, x in ((ours, ours_in), (theirs, theirs_in)))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("masked", [False, True])
def test_z_loss_and_gradient_are_megatrons(masked):
    mask = padding() if masked else None
    theirs_in, ours_in = logits(5).requires_grad_(), logits(5).requires_grad_()
    theirs = moe_utils.z_loss_func(theirs_in, 1e-3, padding_mask=mask)
    ours = ops.z_loss(ours_in, coefficient=1e-3, padding_mask=mask)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    a, b = (torch.autograd.grad(loss, x)[0] for loss, x in ((ours, ours_in), (theirs, theirs_in)))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)


def test_permuted_rows_their_probabilities_and_the_way_back_are_megatrons():
    gen, width, topk = torch.Generator().manual_seed(6), 16, 3
    x, values = torch.randn(TOKENS, width, generator=gen), logits(7)
    probs, expert_map = ops.router(values, topk=topk)
    dense = torch.zeros(TOKENS, EXPERTS).scatter(1, expert_map.long(), probs)
    theirs, their_probs, order, *_ = moe_utils.permute(x, dense > 0, probs=dense, num_out_tokens=TOKENS * topk)
    ours = ops.permute(x, expert_map, num_experts=EXPERTS, probs=probs)
    assert torch.equal(ours.rows, theirs) and torch.equal(ours.probs, their_probs)
    assert torch.equal(ours.counts.long(), (dense > 0).sum(0))
    back = moe_utils.unpermute(theirs, order, x.shape, probs=dense, routing_map=dense > 0)
    torch.testing.assert_close(ops.unpermute(ours.rows, ours, probs), back, rtol=1e-6, atol=1e-6)
