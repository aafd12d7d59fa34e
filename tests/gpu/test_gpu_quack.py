"""The engines on quack-kernels beyond the shared cases: wide rows and vocabularies, sizes beyond 32 bits, layouts,
epilogues, capture."""

import pytest
import torch

from layerplan.integration import ops
from layerplan.integration.engines.arch import Arch
from layerplan.integration.engines.contract import Offer
from layerplan.integration.engines.packages import locate
from layerplan.integration.planner import runner as runner_module
from layerplan.integration.planner.planner import plan
from layerplan.integration.planner.policy import Policy
from layerplan.integration.planner.runner import Runner, WeightGrads
from tests import oracle
from tests.cases import catalogue, faults
from tests.cases.graphs import mlp
from tests.gpu.capture import captured, new_data
from tests.gpu.memory import need

pytestmark = pytest.mark.skipif(not locate("quack").here, reason="needs quack-kernels")
BF16 = torch.bfloat16


def _gen(seed=0):
    return torch.Generator(device="cuda").manual_seed(seed)


@pytest.mark.parametrize("width", [6, 770, 3584, 4098, 16384, 53248, 65536])
@pytest.mark.parametrize("op", [ops.rms_norm, ops.layer_norm])
def test_fault_21_even_unaligned_and_wide_rows(op, width):
    faults.case_21_odd_unaligned_and_wide_rows("cuda", "norm/quack", op, widths=(width,))


@pytest.mark.parametrize("width", [33, 770, 16384])
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_float32_residual_that_the_kernel_adds_itself(op, width):
    case = catalogue._norm_case(op, "fused_residual", (67, width), residual=True)
    catalogue.hold(case, "cuda", torch.float32, engine="norm/quack")


@pytest.mark.parametrize("op", [ops.rms_norm, ops.layer_norm])
def test_fault_21_more_than_2_to_the_31_elements_in_a_norm_and_its_gradient(op):
    need(24)
    x = torch.empty(524289, 4096, dtype=BF16, device="cuda").normal_(generator=_gen()).requires_grad_()
    w = torch.randn(4096, generator=_gen(1), device="cuda", dtype=BF16)
    y = op(x, w, eps=1e-5, engine="norm/quack")
    (dx,) = torch.autograd.grad(y, x, x.detach())
    for row in (0, 262144, 524288):
        part = x[row : row + 1].detach().requires_grad_()
        alone = op(part, w, eps=1e-5, engine="norm/quack")
        oracle.equal(y[row : row + 1], alone, f"row {row}")
        oracle.equal(dx[row : row + 1], torch.autograd.grad(alone, part, part.detach())[0], f"gradient of row {row}")


@pytest.mark.parametrize("classes", [1002, 50304, 128256, 151936, 262144])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_loss_over_vocabularies_of_every_cluster_size(classes, dtype):
    catalogue.hold(catalogue._loss_case("wide", (37,), classes), "cuda", dtype, engine="loss/quack")


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_loss_of_rows_in_which_whole_blocks_see_nothing_but_minus_infinity(dtype):
    gen, classes = torch.Generator().manual_seed(0), 128256
    logits = (3 * torch.randn(4, classes, generator=gen)).to(dtype)
    logits[0, 1000:] = logits[1, :-10] = logits[2, 4::8] = -torch.inf
    targets = torch.tensor([5, classes - 3, 16, -100])
    results = []
    for kind, device in ((torch.float64, "cpu"), (dtype, "cuda")):
        t = logits.to(device, kind).requires_grad_()
        (value,) = catalogue.plain_cross_entropy({"logits": t, "targets": targets.to(device)})
        results.append((value, *torch.autograd.grad(value.sum(), t)))
    x = logits.cuda().requires_grad_()
    oracle.poison(x)
    value = ops.cross_entropy(x, targets.cuda(), engine="loss/quack")
    (grad,) = torch.autograd.grad(value.sum(), x)
    oracle.compare(value, results[0][0], results[1][0], "loss")
    relative = oracle.ulp(torch.float32, float(torch.logsumexp(logits.double(), -1).max()))
    oracle.compare(grad, results[0][1], results[1][1], "dlogits", relative)
    assert not grad[3].any(), "an ignored token got a gradient"


def test_fault_21_more_than_2_to_the_31_logits():
    need(16)
    rows, classes = 16750, 128256
    assert rows * classes > 2**31
    x = torch.empty(rows, classes, dtype=BF16, device="cuda").normal_(generator=_gen()).requires_grad_()
    targets = torch.randint(0, classes, (rows,), generator=_gen(1), device="cuda")
    value = ops.cross_entropy(x, targets, engine="loss/quack")
    (grad,) = torch.autograd.grad(value.sum(), x)
    for row in (0, 8191, rows - 1):
        part = x[row : row + 1].detach().requires_grad_()
        alone = ops.cross_entropy(part, targets[row : row + 1], engine="loss/quack")
        oracle.equal(value[row : row + 1], alone, f"row {row}")
        oracle.equal(grad[row : row + 1], torch.autograd.grad(alone.sum(), part)[0], f"gradient of row {row}")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("half", [64, 16])
def test_rope_of_slices_of_one_qkv_tensor_in_both_layouts(half, interleaved):
    qkv = torch.randn(2, 301, 24, 128, generator=_gen(), device="cuda", dtype=BF16)
    angle = torch.rand(400, half, generator=_gen(1), device="cuda")
    cos, sin = angle.cos(), angle.sin()
    x = qkv[:, :, 3:19]
    (truth,) = catalogue.plain_rope(
        {"x": x.double(), "cos": cos.double(), "sin": sin.double()}, interleaved=interleaved
    )
    (peer,) = catalogue.plain_rope({"x": x, "cos": cos, "sin": sin}, interleaved=interleaved)
    oracle.poison(x)
    y = ops.rope(x, cos, sin, interleaved=interleaved, engine="rope/quack")
    oracle.compare(y, truth, peer, "batch first")
    attrs = (("interleaved", interleaved), ("inverse", False), ("seq_axis", 0))
    inputs = (("x", "s b h! d!", x.transpose(0, 1)), ("cos", "p r!", cos), ("sin", "p r!", sin))
    z = ops._call("rope", attrs, inputs, "rope/quack", None, ("y",))
    oracle.equal(z.transpose(0, 1), y, "sequence first")


def test_fault_21_more_than_2_to_the_31_elements_in_a_rope():
    need(12)
    x = torch.empty(131072, 129, 128, dtype=BF16, device="cuda").normal_(generator=_gen())
    assert x.numel() > 2**31
    angle = torch.rand(131072, 64, generator=_gen(1), device="cuda")
    y = ops.rope(x, angle.cos(), angle.sin(), engine="rope/quack")
    oracle.equal(y[:, -1:], ops.rope(x[:, -1:], angle.cos(), angle.sin(), engine="rope/quack"), "the last head")


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("shape", [(1031, 512, 776), (1, 8, 8), (300, 1544, 264)])
def test_products_as_exact_as_pytorchs(shape, dtype):
    tokens, k, n = shape
    case = catalogue._linear_case("odd_tiles", (tokens,), n, k, True)
    catalogue.hold(case, "cuda", dtype, engine="linear/quack")


@pytest.mark.parametrize("offset", [0, 1, 4])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_main_grad_is_accumulated_in_float32_wherever_it_lies(dtype, offset):
    gen = torch.Generator().manual_seed(0)
    w = torch.nn.Parameter(torch.randn(264, 520, generator=gen).to("cuda", dtype))
    start = torch.randn(264, 520, generator=gen)
    w.main_grad, buffer = oracle.guarded(start.cuda(), offset)
    w.grad_added_to_main_grad = False
    x = torch.randn(777, 520, generator=gen).to("cuda", dtype)
    dy = torch.randn(777, 264, generator=gen).to("cuda", dtype)
    ops.linear(x, w, engine="linear/quack")  # builds the runner
    linears = (r for k, r in ops._runners.items() if k[0] == "linear" and r.names == ("x", "weight"))
    runner = next(r for r in linears if r.policy.engine == "linear/quack")
    runner(x, w, sink=WeightGrads({1: w}, fuse=True)).backward(dy)
    truth = start.double() + dy.double().cpu().T @ x.double().cpu()
    peer = start.cuda() + torch.mm(dy.T, x, out_dtype=torch.float32)
    oracle.compare(w.main_grad, truth, peer, "main_grad")
    oracle.check_guards(w.main_grad, buffer, "main_grad")
    assert w.grad_added_to_main_grad is True


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("tokens", [1031, 1, 0])
def test_swiglu_and_its_gradient_in_the_epilogue_of_the_products_before_them(tokens, dtype, monkeypatch):
    # so small that the host's cost would keep them apart
    monkeypatch.setattr(Offer, "seconds", lambda offer, roofline: offer.launches * 1e-6)
    monkeypatch.setattr(runner_module, "_plans", {})
    gen = torch.Generator().manual_seed(0)
    values = [torch.randn(*s, generator=gen).to(dtype) for s in ((tokens, 264), (2 * 776, 264), (136, 776))]
    values[1], values[2] = values[1] / 16, values[2] / 16
    dy = torch.randn(tokens, 136, generator=gen).to(dtype)
    results = []
    for kind, device in ((torch.float64, "cpu"), (dtype, "cuda")):
        x, w1, w2 = leaves = [v.to(device, kind).requires_grad_() for v in values]
        gate, up = (x @ w1.t()).chunk(2, -1)
        y = (torch.nn.functional.silu(gate) * up) @ w2.t()
        results.append((y, *torch.autograd.grad(y, leaves, dy.to(device, kind))))
    t, arch = [v.cuda().requires_grad_() for v in values], Arch.of_device(0)
    made = plan(mlp(*t), arch, needs_grad=(True,) * 3)
    assert any(r.engine == "linear_swiglu/quack" for r in made.backward.regions), str(made)
    oracle.poison(t[0], results[1][0])
    y = Runner(mlp, ("x", "w1", "w2"), policy=Policy())(*t)
    got = (y, *torch.autograd.grad(y, t, dy.cuda()))
    for name, a, truth, peer in zip(("y", "dx", "dw1", "dw2"), got, *results, strict=True):
        oracle.compare(a, truth, peer, name)
    made = plan(mlp(*t), arch)
    assert any(r.engine == "linear_swiglu/quack" for r in made.forward.regions), str(made)
    with torch.no_grad():
        oracle.poison(y)
        alone = Runner(mlp, ("x", "w1", "w2"), policy=Policy())(*(x.detach() for x in t))
    oracle.compare(alone, results[0][0], results[1][0], "inference")


def _angles(x):
    angle = torch.arange(x.shape[1], device="cuda")[:, None] * torch.linspace(0.01, 1.0, 32, device="cuda")
    return angle.cos(), angle.sin()


CALLS = {
    "rms_norm": (((513, 4096), (4096,)), lambda t: ops.rms_norm(*t, eps=1e-5, engine="norm/quack")),
    "rms_norm_residual": (
        ((513, 1024), (1024,), (513, 1024)),
        lambda t: ops.rms_norm(*t[:2], eps=1e-5, residual=t[2], engine="norm/quack")[0],
    ),
    "layer_norm": (((513, 1024), (1024,)), lambda t: ops.layer_norm(*t, eps=1e-5, engine="norm/quack")),
    "loss": (((65, 32000),), lambda t: ops.cross_entropy(t[0], torch.arange(65, device="cuda"), engine="loss/quack")),
    "rope": (((2, 65, 4, 64),), lambda t: ops.rope(t[0], *_angles(t[0]), engine="rope/quack")),
    "linear": (((513, 256), (512, 256), (512,)), lambda t: ops.linear(*t, engine="linear/quack")),
}


@pytest.mark.parametrize("kind", CALLS)
def test_captured_forward_and_backward_replay_on_new_data_bitwise_as_eager(kind):
    shapes, call = CALLS[kind]
    t = [torch.randn(*s, generator=_gen(i), device="cuda", dtype=BF16).requires_grad_() for i, s in enumerate(shapes)]
    dout = torch.randn_like(call(t))

    def step():
        out = call(t)
        return (out, *torch.autograd.grad(out, t, dout))

    replay = captured(step)
    for _ in range(2):
        new_data(*t, dout)
        replayed = replay()
        for i, (a, b) in enumerate(zip(replayed, step(), strict=True)):
            oracle.equal(a, b, f"{kind}: result {i}")


@pytest.mark.parametrize("kind", CALLS)
def test_hot_path_makes_no_host_sync_and_reruns_are_bitwise_equal(kind):
    shapes, call = CALLS[kind]
    t = [torch.randn(*s, generator=_gen(i), device="cuda", dtype=BF16).requires_grad_() for i, s in enumerate(shapes)]
    dout = torch.randn_like(call(t))
    first = torch.autograd.grad(call(t), t, dout)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        runs = [torch.autograd.grad(call(t), t, dout) for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for run in runs:
        for i, (a, b) in enumerate(zip(run, first, strict=True)):
            oracle.equal(a, b, f"{kind}: gradient {i}")
