"""A layer of experts asks for no value of a tensor while it runs, but for the numbers of rows of an all-to-all: what a
CUDA graph and a GPU that is never idle need. Run on a CPU, where such questions can be seen in any Python code
(``tests/cases/host_reads.py``)."""

from unittest import mock

import pytest
from harness import run_ranks
from test_megatron_layers import _megatron
from test_megatron_moe import _ours

VARIANTS = {
    "losses": {"moe_shared_expert_intermediate_size": None},
    "shared experts": {},
    "shared experts with a gate": {"moe_shared_expert_gate": True},
    "bias and groups": {
        "num_moe_experts": 8, "moe_router_score_function": "sigmoid", "moe_router_num_groups": 4,
        "moe_router_group_topk": 2, "moe_router_enable_expert_bias": True,
        "moe_router_load_balancing_type": "seq_aux_loss",
    },
    "several losses": {"moe_aux_loss_coeff": [1e-2, 2e-2, 3e-2],
                       "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"]},
    "recompute": {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]},
}  # fmt: skip
RANKS = {"one rank": 1, "two ranks": 2}
# of a CPU alone: the mode passes calls on with the CPU for a GPU, and the router moves weights that lie on no GPU
ON_A_CPU = ("integration/megatron/cpu_mode.py:__torch_function__", "megatron/core/transformer/moe/router.py:gating")


def _watched(ep, dispatcher):
    """{variant: (what, where) of all questions of a forward and backward behind the first ones}."""
    import torch
    from parity_model import layout

    from layerplan.integration.planner import runner
    from tests.cases.host_reads import watching

    out = {}
    with _megatron(), mock.patch.object(runner, "readable", lambda t: False):  # as on a GPU: values are not checked
        layout(ep=ep)
        for name, changes in VARIANTS.items():
            mlp = _ours(moe_token_dispatcher_type=dispatcher, **changes).gpt.decoder.layers[0].mlp
            x = torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)
            padding = torch.zeros(2, 16, dtype=torch.bool)
            for masked in ({}, {"padding_mask": padding}):
                mlp(x, **masked)[0].sum().backward()
                with watching() as reads:
                    mlp(x, **masked)[0].sum().backward()
                found = [[what, where] for what, where in reads if where not in ON_A_CPU]
                out[f"{name}{', padding' if masked else ''}"] = found
    return out


def _all_gather(ep):
    return _watched(ep, "allgather")


def _all_to_all(ep):
    return _watched(ep, "alltoall")


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.timeout(300)
def test_nothing_is_asked_where_all_ranks_see_all_tokens(ranks):
    for found in run_ranks("test_megatron_moe_host:_all_gather", world=RANKS[ranks], timeout=240, ep=RANKS[ranks]):
        assert len(found) == 2 * len(VARIANTS)
        assert not any(found.values()), found


@pytest.mark.timeout(300)
def test_an_all_to_all_asks_once_for_its_numbers_of_rows():
    for found in run_ranks("test_megatron_moe_host:_all_to_all", world=2, timeout=240, ep=2):
        assert len(found) == 2 * len(VARIANTS)
        once = [["tolist", "integration/megatron/moe_dispatch.py:wait"]]
        assert all(reads == once for reads in found.values()), found
