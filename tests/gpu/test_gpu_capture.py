"""A forward and backward of each kind, captured into a CUDA graph after warm-up and replayed on new data."""

import pytest
import torch

from layerplan.integration import ops


def _bf16(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_()


def _block(x, g, w):
    y = ops.rms_norm(x, g, eps=1e-5)
    q, k, v = ops.linear(y, w).unflatten(-1, (3, 4, 64)).unbind(-3)
    return ops.attention(q, k, v, causal=True)


KINDS = {
    "norm": (((64, 256), (256,)), lambda t: ops.rms_norm(*t, eps=1e-5)),
    "layer_norm": (((64, 256), (256,)), lambda t: ops.layer_norm(*t, eps=1e-5)),
    "linear": (((64, 256), (128, 256), (128,)), lambda t: ops.linear(*t)),
    "attention": (((2, 128, 4, 64),) * 3, lambda t: ops.attention(*t, causal=True)),
    "attention_flash": (((2, 128, 4, 64),) * 3, lambda t: ops.attention(*t, causal=True, engine="attention/torch_flash")),
    "activation": (((64, 256),), lambda t: ops.swiglu(*t)),
    "block": (((2, 128, 256), (256,), (768, 256)), lambda t: _block(*t)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_captured_forward_and_backward_replay_on_new_data_as_eager(kind):
    shapes, call = KINDS[kind]
    torch.manual_seed(0)
    t = [_bf16(*s) for s in shapes]
    dout = torch.randn_like(call(t))

    def step():
        out = call(t)
        return (out, *torch.autograd.grad(out, t, dout))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(2):
        with torch.no_grad():
            for x in (*t, dout):
                x.copy_(torch.randn_like(x))
        graph.replay()
        replayed = [x.clone() for x in captured]
        for i, (a, b) in enumerate(zip(replayed, step(), strict=True)):
            # attention's dq is summed by atomics: a rounding apart, nothing more
            torch.testing.assert_close(a, b, atol=2e-2 * float(b.abs().max()), rtol=0, msg=lambda m, i=i: f"{kind} result {i}: {m}")


def test_hot_path_makes_no_host_sync():
    t = [_bf16(*s) for s in ((2, 128, 256), (256,), (768, 256))]
    _block(*t).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        _block(*t).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
