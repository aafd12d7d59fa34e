"""A forward and backward of each kind, captured into a CUDA graph after warm-up and replayed on new data."""

import pytest
import torch

from layerplan.integration import ops
from tests import oracle
from tests.cases.reruns import same, watching
from tests.gpu.capture import captured, new_data


def _bf16(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_()


def _front(x, g, w):
    return ops.linear(ops.rms_norm(x, g, eps=1e-5), w)


def _heads(qkv):
    return ops.attention(*qkv.unflatten(-1, (3, 4, 64)).unbind(-3), causal=True)


# shapes, names (the gradients' are "d" and these), call
KINDS = {
    "norm": (((64, 256), (256,)), ("x", "weight"), lambda t: ops.rms_norm(*t, eps=1e-5)),
    "layer_norm": (((64, 256), (256,)), ("x", "weight"), lambda t: ops.layer_norm(*t, eps=1e-5)),
    "linear": (((64, 256), (128, 256), (128,)), ("x", "w", "bias"), lambda t: ops.linear(*t)),
    "attention": (((2, 128, 4, 64),) * 3, "qkv", lambda t: ops.attention(*t, causal=True)),
    "attention_flash": (((2, 128, 4, 64),) * 3, "qkv",
                        lambda t: ops.attention(*t, causal=True, engine="attention/torch_flash")),
    "activation": (((64, 256),), ("gate_up",), lambda t: ops.swiglu(*t)),
}  # fmt: skip
BLOCK = (2, 128, 256), (256,), (768, 256)


@pytest.mark.parametrize("kind", KINDS)
def test_captured_forward_and_backward_replay_on_new_data_bitwise_as_eager(kind):
    """Bitwise, but for the gradients that the planned engine sums by atomics (see ``same``)."""
    shapes, names, call = KINDS[kind]
    torch.manual_seed(0)
    t = [_bf16(*s) for s in shapes]
    dout = torch.randn_like(call(t))

    def step():
        out = call(t)
        return (out, *torch.autograd.grad(out, t, dout))

    replay = captured(step)
    for _ in range(2):
        new_data(*t, dout)
        replayed = replay()
        with watching() as ran:
            eager = step()
        for name, a, b in zip(("out", *(f"d{n}" for n in names)), replayed, eager, strict=True):
            same(ran, name, a, b, kind)


def test_captured_block_replays_on_new_data_bitwise_as_eager_given_its_attention_gradient():
    """Norm, fused QKV and attention in one graph. Attention's gradient may differ where atomics sum it; what lies
    before it is bitwise the eager gradient of the replayed one."""
    torch.manual_seed(0)
    t = [_bf16(*s) for s in BLOCK]
    dout = torch.randn_like(_heads(_front(*t)))

    def step():
        qkv = _front(*t)
        out = _heads(qkv)
        (dqkv,) = torch.autograd.grad(out, qkv, dout, retain_graph=True)
        return (out, dqkv, *torch.autograd.grad(qkv, t, dqkv))

    replay = captured(step)
    for _ in range(2):
        new_data(*t, dout)
        out, dqkv, *grads = replay()
        with watching() as ran:
            eager_out, eager_dqkv, *_ = step()
        oracle.equal(out, eager_out, "out")
        parts = (x.unflatten(-1, (3, 4, 64)).unbind(-3) for x in (dqkv, eager_dqkv))
        for name, a, b in zip(("dq", "dk", "dv"), *parts, strict=True):
            same(ran, name, a, b, "block")
        for name, a, b in zip(("dx", "dg", "dw"), grads, torch.autograd.grad(_front(*t), t, dqkv), strict=True):
            oracle.equal(a, b, name)


def test_hot_path_makes_no_host_sync():
    t = [_bf16(*s) for s in BLOCK]
    _heads(_front(*t)).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        _heads(_front(*t)).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
