"""A whole layer of experts in a CUDA graph: router, permute, experts, unpermute, shared experts and losses, both
passes, replayed on other tokens that go to other experts."""

from __future__ import annotations

import pytest
import torch

from layerplan.integration.engines.manifest import MANIFEST
from layerplan.integration.engines.packages import locate
from tests import oracle
from tests.cases.trial import off_trial
from tests.gpu.capture import captured, waits_for_no_host
from tests.gpu.one_rank import moe_config, one_rank

pytestmark = pytest.mark.skipif(not locate("megatron.core").here, reason="needs megatron-core")
S, B, H = 96, 2, 256
LAYERS = {
    "experts": {},
    "shared experts": {"moe_shared_expert_intermediate_size": 256, "moe_shared_expert_gate": True},
    "losses": {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": [1e-2, 1e-2],
               "moe_z_loss_coeff": 1e-3},
    "bias and groups": {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
                        "moe_router_num_groups": 4, "moe_router_group_topk": 2},
}  # fmt: skip
ENGINES = {
    "auto": ((), ()),
    "torch": ((), ("grouped_matmul/quack",)),
    "quack": ((), ("grouped_matmul/torch",)),
    "all on trial": (tuple(e.id for e in MANIFEST if e.trial), ()),
}
"""(Engines on trial that ranking may choose too, engines that it may not)"""


@pytest.fixture(scope="module", autouse=True)
def _rank():
    with one_rank():
        yield


def _layer(changes: dict) -> torch.nn.Module:
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.transformer_block import TransformerBlock

    from layerplan.integration.megatron.specs import gpt_block_spec

    config = moe_config(**changes)
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1, device="cuda"))  # as the training loop does in each step
    block = TransformerBlock(config, gpt_block_spec(config), pre_process=True, post_process=False)
    return block.cuda().layers[0].mlp


def _regions(layer: torch.nn.Module) -> list:
    """Those of the plans that have run."""
    runners = [r for m in layer.modules() if hasattr(m, "plan_runners") for r in m.plan_runners()]
    regions = [region for r in runners for _, _, region in r.regions()]
    assert regions, "the layer runs in plans"
    return regions


@pytest.mark.parametrize("engines", ENGINES)
@pytest.mark.parametrize("kind", LAYERS)
def test_a_captured_layer_replays_on_other_routes_bitwise_as_eager_and_waits_for_no_host(kind, engines, monkeypatch):
    off_trial(monkeypatch, *ENGINES[engines])
    torch.manual_seed(0)
    layer = _layer(LAYERS[kind])
    x = torch.randn(S, B, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dout, weights = torch.randn_like(x), dict(layer.named_parameters())

    def step():
        out, _ = layer(x)
        return (out.detach(), *torch.autograd.grad(out, [x, *weights.values()], dout))

    step()
    regions = _regions(layer)
    if left := sorted({f"{'+'.join(r.ops)} on {r.engine}" for r in regions if not r.offer.capture_safe}):
        pytest.skip(f"not in a CUDA graph: {', '.join(left)}")
    if engines in ("torch", "quack"):
        assert f"grouped_matmul/{engines}" in {r.engine for r in regions}
    replay, names, routes = captured(step), ("out", "dx", *(f"d{n}" for n in weights)), set()
    for data in (torch.randn_like(x), torch.randn_like(x), torch.randn_like(x[:1, :1]).expand_as(x)):
        with torch.no_grad():
            x.copy_(data)
            dout.copy_(torch.randn_like(dout))
        for name, a, b in zip(names, replay(), step(), strict=True):
            oracle.equal(a, b, f"{kind} on {engines}: {name}")
        with torch.no_grad():
            experts = layer.router(x)[1]
        routes.add(str(experts.tolist()))
    assert len(routes) == 3, "each replay goes to other experts"
    chosen = experts[0].long().tolist()  # of every token of the last replay
    assert bool((experts == experts[0]).all())
    for name, grad in zip(names, replay(), strict=True):
        if name in ("dexperts.fc1", "dexperts.fc2"):
            others = [e for e in range(len(grad)) if e not in chosen]
            assert bool(grad[chosen].any()) and not bool(grad[others].any()), f"{name} of experts without tokens"
    waits_for_no_host(step)
