"""The graphs of the Megatron layers on the planner's choice of kernels: outputs and gradients against float64."""

import pytest
import torch

from layerplan.integration.planner.policy import Policy
from layerplan.integration.planner.runner import Runner
from layerplan.modules.graphs import (
    LATENT_UP_PROJECTION,
    Activation,
    HeadLayout,
    NormAttrs,
    TensorParallel,
    latent_attention_graph,
    mlp_graph,
    self_attention_graph,
)
from tests import oracle

S, B, H, D, R = 130, 2, 256, 64, 32
SBHD = {"layout": "sbhd", "causal": True, "window": (None, None), "scale": None, "dropout": 0.0}
ONE = TensorParallel()


def _rotary(r):
    angles = torch.arange(S).double()[:, None] * 10000.0 ** (-torch.arange(r // 2).double() / (r // 2))
    return {"cos": angles.cos().float(), "sin": angles.sin().float()}


def _self_attention(qk_norm):
    heads, gammas = HeadLayout(2, 2, D), {f"{s}_norm_weight": (D,) for s in "qk"} if qk_norm else {}
    shapes = {"x": (S, B, H), "qkv": (2 * 4 * D, H), "proj": (H, 4 * D), "norm_weight": (H,), **gammas}
    names = (*shapes, "cos", "sin")
    norm = NormAttrs()
    build = self_attention_graph(ONE, heads, names, SBHD, norm=norm, qk_norm=norm if qk_norm else None,
                                 interleaved=False)  # fmt: skip
    return shapes, _rotary(D), names, build


def _latent():
    shapes = {"q_latent": (S, B, 96), "q_weight": (4 * (D + R), 96), "kv_latent": (S, B, 64),
              "kv_weight": (4 * 2 * D, 64), "k_rope": (S, B, 1, R)}  # fmt: skip
    names = (*shapes, "cos", "sin")
    return shapes, _rotary(R), names, latent_attention_graph(ONE, 4, D, names, SBHD)


def _mlp():
    shapes = {"x": (S, B, H), "fc1": (1024, H), "fc2": (H, 512), "norm_weight": (H,)}
    names, build = mlp_graph(ONE, Activation(), bias=False, row_weight=False, norm=NormAttrs())
    return shapes, {}, names, build


LAYERS = {
    "self_attention": lambda: _self_attention(False),
    "self_attention_qk_norm": lambda: _self_attention(True),
    "latent": _latent,
    "mlp": _mlp,
}
REBUILT = {
    "self_attention": {"rms_norm", "sdpa"},
    "self_attention_qk_norm": {"sdpa"},
    "latent": LATENT_UP_PROJECTION,
    "mlp": {"rms_norm", "swiglu"},
}
"""What a save policy rebuilds in the backward."""


def _tensors(shapes, tables, dtype, device):
    gen = torch.Generator().manual_seed(0)
    made = {}
    for name, shape in shapes.items():  # weights that keep the variance of what they multiply
        t = torch.randn(shape, generator=gen) * (shape[-1] ** -0.5 if len(shape) == 2 else 1.0)
        made[name] = t.bfloat16().to(device, dtype).requires_grad_()
    wide = dtype if dtype is torch.float64 else torch.float32
    return made | {n: t.to(device, wide) for n, t in tables.items()}


def _run(layer, dtype, device, policy, recompute=frozenset()):
    shapes, tables, names, build = LAYERS[layer]()
    t = _tensors(shapes, tables, dtype, device)
    runner = Runner(build, names, policy=policy, name=layer, recompute=recompute)
    out = runner(*(t[n] for n in names))
    dy = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(device, dtype)
    oracle.poison(*t.values())
    return [out, *torch.autograd.grad(out, [t[n] for n in shapes], dy)], [*("output",), *shapes], runner


@pytest.mark.parametrize("layer", LAYERS)
def test_layer_is_as_exact_as_its_references(layer):
    truth, names, _ = _run(layer, torch.float64, "cpu", Policy("reference"))
    peer, _, _ = _run(layer, torch.bfloat16, "cuda", Policy("reference"))
    ours, _, runner = _run(layer, torch.bfloat16, "cuda", Policy("strict"))
    for name, a, r, p in zip(names, ours, truth, peer, strict=True):
        oracle.compare(a, r, p, f"{layer}: {name}")
    ran = [(stage, r.ops, r.engine) for stage, _, r in runner.regions()]
    assert {stage for stage, *_ in ran} == {"forward", "backward"}
    assert not [row for row in ran if row[2].startswith("reference/")], "a policy of strict lets no reference run"


@pytest.mark.parametrize("layer", LAYERS)
def test_what_a_save_policy_rebuilds_is_bitwise_invisible(layer):
    policy = Policy(deterministic=True)  # what differs is then the rebuilding, not the order of sums
    kept, names, _ = _run(layer, torch.bfloat16, "cuda", policy)
    rebuilt, _, _ = _run(layer, torch.bfloat16, "cuda", policy, frozenset(REBUILT[layer]))
    for name, a, b in zip(names, rebuilt, kept, strict=True):
        oracle.equal(a, b, f"{layer}: {name}")
