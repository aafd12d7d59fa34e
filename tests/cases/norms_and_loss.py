"""Faults of norms and of the loss, for every engine of a device: see ``faults``, which lists them.

Cases of norms take the function as a third argument: ``ops.rms_norm`` or ``ops.layer_norm``.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F

from layerplan.integration import ops

from .. import oracle
from .catalogue import native_layer_norm, plain_norm, two_rows_far_apart

INF = float("inf")
BF16 = torch.bfloat16


# ---- norms ----------------------------------------------------------------------------------------------------------


def case_19_zero_centred_gamma_of_zero_is_one(device, engine, op):
    gen = torch.Generator().manual_seed(0)
    x, w = torch.randn(4, 64, generator=gen).to(device, BF16), torch.zeros(64, dtype=BF16, device=device)
    y = op(x, w, eps=1e-6, zero_centered=True, engine=engine)
    h = x.double() if op is ops.rms_norm else x.double() - x.double().mean(-1, keepdim=True)
    exact = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)
    assert bool(y.any()), "a zero-centred weight of 0 must scale by 1"
    # float32 inside and one rounding: at most a tie falls the other way
    assert float((y.double() - exact).abs().max()) <= 0.51 * oracle.ulp(BF16, float(exact.abs().max()))
    oracle.equal(y, op(x, w + 1, eps=1e-6, engine=engine), "1 + 0 against 1")


def case_19_one_formula_with_and_without_residual(device, engine, op):
    """Bitwise the same with a residual of zeros; also for 3-D inputs and weights of another dtype."""
    gen = torch.Generator().manual_seed(1)
    for shape, wdtype in itertools.product(((64, 64), (2, 3, 5)), (BF16, torch.float32)):
        x = torch.randn(shape, generator=gen).to(device, BF16)
        w = torch.randn(shape[-1], generator=gen).to(device, wdtype)
        y, h = op(x, w, eps=1e-5, residual=torch.zeros_like(x), engine=engine)
        oracle.equal(op(x, w, eps=1e-5, engine=engine), y, f"{shape} {wdtype}")
        oracle.equal(h, x, "the residual stream")


def case_19_cast_order_is_one_rounding_at_the_end(device, engine):
    """y = round(h * rstd * w) with h = round(x + residual); the other order, round(round(h * rstd) * w), differs in hundreds
    of 4096 values."""
    gen = torch.Generator().manual_seed(2)
    x, residual = (torch.randn(64, 64, generator=gen).to(device, BF16) for _ in range(2))
    w = torch.randn(64, generator=gen).to(device, BF16)
    for res in (None, residual):
        y = ops.rms_norm(x, w, eps=1e-5, residual=res, engine=engine)
        h = x
        if res is not None:
            y, h = y
            oracle.equal(h, x + res, "the residual stream")
        exact = h.double() * torch.rsqrt(h.double().square().mean(-1, keepdim=True) + 1e-5)
        once, twice = (exact * w.double()).to(BF16), exact.to(BF16) * w
        assert int((once != twice).sum()) > 400, "the orders must be told apart"
        assert int((y != once).sum()) <= 4, f"{int((y != once).sum())} values differ from one rounding at the end"


def case_20_inputs_are_left_alone(device, engine, op):
    """y has two readers; after the backward x, residual, weight, y, h and every incoming gradient are as they were."""
    gen = torch.Generator().manual_seed(3)
    for dtype in (torch.float32, BF16):
        wide, g, dh = (torch.randn(6, n, generator=gen).to(device, dtype) for n in (48, 48, 24))
        x = wide[:, :24].detach().requires_grad_()  # row stride 2 N
        residual = torch.randn(6, 24, generator=gen).to(device, dtype).requires_grad_()
        w = torch.randn(24, generator=gen).to(device, dtype).requires_grad_()
        y, h = op(x, w, eps=1e-5, residual=residual, engine=engine)
        first, second = y * g[:, ::2], y.sin()
        arriving: list[tuple[torch.Tensor, torch.Tensor]] = []  # the very tensors that the op's backward is handed
        for t in (y, h):
            t.register_hook(lambda d, into=arriving: into.append((d, d.clone())))
        seen = [(n, t, t.detach().clone()) for n, t in (("x", x), ("residual", residual), ("w", w), ("x's buffer", wide), ("y", y), ("h", h), ("g", g))]
        torch.autograd.backward((first, second, h), (torch.ones_like(y), torch.ones_like(y), dh))
        for name, t, before in seen:
            assert torch.equal(t.detach(), before), f"{name} was overwritten"
        assert len(arriving) == 2 and all(torch.equal(d, before) for d, before in arriving), "a gradient was overwritten"
        results = []
        for kind in (torch.float64, dtype):
            t = {n: v.detach().to(kind).requires_grad_() for n, v in (("x", x), ("residual", residual), ("weight", w))}
            yr, hr = plain_norm(t, op is ops.rms_norm)
            torch.autograd.backward((yr * g[:, ::2].to(kind), yr.sin(), hr), (torch.ones_like(yr), torch.ones_like(yr), dh.to(kind)))
            results.append([v.grad for v in t.values()])
        for name, ours, truth, peer in zip(("x", "residual", "weight"), (x, residual, w), *results, strict=True):
            oracle.compare(ours.grad, truth, peer, f"{dtype} d{name}")


def case_20_strided_gradients_are_honoured(device, engine, op):
    """dY = g[:, ::2], an expanded dY and x with row stride 2 N give bitwise what contiguous ones give."""
    gen = torch.Generator().manual_seed(4)
    for dtype in (torch.float32, BF16):
        wide, g = (torch.randn(6, 48, generator=gen).to(device, dtype) for _ in range(2))
        w = torch.randn(24, generator=gen).to(device, dtype)
        x = wide[:, :24]
        for dy in (g[:, ::2], torch.full((1, 1), 0.75, dtype=dtype, device=device).expand(6, 24), g[0, :24].expand(6, 24)):
            before = dy.clone()
            runs = []
            for rows, cotangent in ((x, dy), (x.contiguous(), dy.contiguous())):
                leaves = [v.detach().requires_grad_() for v in (rows, w)]
                oracle.poison(before)
                y = op(*leaves, eps=1e-5, engine=engine)
                runs.append((y, *torch.autograd.grad(y, leaves, cotangent)))
            for name, a, b in zip(("y", "dx", "dw"), *runs, strict=True):
                oracle.equal(a, b, f"{dtype} {name}, dy of strides {dy.stride()}")
            assert torch.equal(dy, before), "dy was overwritten"


def case_21_odd_unaligned_and_wide_rows(device, engine, op, widths=(1, 3, 769, 3584, 4095, 4097, 53248)):
    """Seven rows that start one element into their buffer, between guard rows that stay as they were."""
    for n, with_residual in itertools.product(widths, (False, True)):
        gen = torch.Generator().manual_seed(n)
        names = ("x", "weight", *(("residual",) if with_residual else ()))
        guarded = {k: oracle.guarded(torch.randn(*((n,) if k == "weight" else (7, n)), generator=gen).to(device, BF16)) for k in names}
        guarded["dy"] = oracle.guarded(torch.randn(7, n, generator=gen).to(device, BF16))
        t = {k: guarded[k][0].requires_grad_() for k in names}
        dy = guarded["dy"][0]
        oracle.poison(dy, dy)
        y = op(t["x"], t["weight"], eps=1e-5, residual=t.get("residual"), engine=engine)
        y = y[0] if with_residual else y
        oracle.poison(dy, dy)
        grads = torch.autograd.grad(y, list(t.values()), dy)
        results = []
        for dtype in (torch.float64, BF16):
            plain = {k: v.detach().to(dtype).requires_grad_() for k, v in t.items()}
            p = (plain_norm(plain, True) if op is ops.rms_norm else native_layer_norm(plain))[0]
            results.append((p, *torch.autograd.grad(p, list(plain.values()), dy.to(dtype))))
        what = f"{op.__name__}{' with residual' if with_residual else ''}, N = {n}"
        for name, a, r, p in zip(("y", *(f"d{k}" for k in names)), (y, *grads), *results, strict=True):
            oracle.compare(a, r, p, f"{name}, {what}")
        for k, (inner, buffer) in guarded.items():
            oracle.check_guards(inner, buffer, f"{k}, {what}")


def case_09_norm_with_rows_beyond_32_bits(device, engine, op):
    gen = torch.Generator().manual_seed(9)
    far = two_rows_far_apart(device, 2 * 1536, gen)
    seen = []
    for source in (far, far.contiguous()):
        x, w = source[:, :1536].detach().requires_grad_(), torch.ones(1536, dtype=BF16, device=device, requires_grad=True)
        y = op(x, w, eps=1e-5, engine=engine)
        seen.append((y, *torch.autograd.grad(y, (x, w), source[:, 1536:])))
    for name, a, b in zip(("y", "dx", "dw"), *seen, strict=True):
        oracle.equal(a, b, name)


# ---- loss -----------------------------------------------------------------------------------------------------------


def case_22_weighted_and_ignored_tokens(device, engine):
    logits = torch.tensor([[2.0, 0, 0], [0, 1, 0]], device=device, requires_grad=True)
    oracle.poison(logits)
    loss = ops.cross_entropy(logits, torch.tensor([0, -100], device=device), engine=engine)
    torch.testing.assert_close(loss.cpu(), torch.tensor([0.239545, 0.0]), atol=1e-6, rtol=0)
    assert float(loss.detach()[1]) == 0.0
    oracle.poison(logits)
    loss.backward(torch.tensor([0.5, 3.0], device=device))
    torch.testing.assert_close(logits.grad.cpu()[0], torch.tensor([-0.106507, 0.053253, 0.053253]), atol=1e-6, rtol=0)
    assert not logits.grad[1].any()


def case_22_every_reduction_equals_the_unfused_loss(device, engine):
    """Sum, mean over the tokens that count, and per-token weights: loss and gradient of torch's cross-entropy."""
    gen = torch.Generator().manual_seed(22)
    targets = torch.randint(0, 1001, (2, 9), generator=gen).to(device)
    targets[0, 2] = targets[1, 8] = -100
    weight = torch.rand(2, 9, generator=gen, dtype=torch.float64).to(device)
    reductions = {"sum": lambda t: t.sum(), "mean": lambda t: t.sum() / (targets != -100).sum(), "weighted": lambda t: (t * weight.to(t.dtype)).sum()}
    for (name, reduce), dtype in itertools.product(reductions.items(), (torch.float32, BF16)):
        logits = (3 * torch.randn(2, 9, 1001, generator=gen)).to(device, dtype).requires_grad_()
        oracle.poison(logits)
        total = reduce(ops.cross_entropy(logits, targets, engine=engine))
        oracle.poison(logits)
        (grad,) = torch.autograd.grad(total, logits)
        results = []
        for kind in (torch.float64, dtype):
            t = logits.detach().to(kind).requires_grad_()
            wide = t if kind == torch.float64 else t.float()  # a loss is float32, whatever the logits
            loss = F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="none").view(2, 9)
            results.append((reduce(loss), *torch.autograd.grad(reduce(loss), t)))
        if name != "weighted":
            whole = F.cross_entropy(logits.detach().double().flatten(0, 1), targets.flatten(), reduction=name)
            torch.testing.assert_close(results[0][0], whole.detach(), atol=1e-12, rtol=1e-12)
        # the backward rebuilds exp(x - LSE) from a float32 LSE: half an ulp of it is that much relative error, twice at most
        relative = oracle.ulp(torch.float32, float(torch.logsumexp(logits.detach().double(), -1).max()))
        oracle.compare(total, *(r[0] for r in results), f"{name} {dtype} loss")
        oracle.compare(grad, *(r[1] for r in results), f"{name} {dtype} dlogits", relative)
        assert not grad[targets == -100].any(), "an ignored token got a gradient"


def case_22_minus_infinity_everywhere_but_the_target(device, engine):
    for dtype in (torch.float32, BF16):
        logits = torch.full((2, 100000), -INF, dtype=dtype, device=device)
        logits[0, 77] = 3.0
        logits[1, 0] = -5.0
        logits.requires_grad_()
        oracle.poison(logits)
        loss = ops.cross_entropy(logits, torch.tensor([77, 0], device=device), engine=engine)
        assert not loss.any(), f"loss {loss.tolist()}"
        loss.sum().backward()
        assert not logits.grad.any() and not logits.grad.isnan().any()
