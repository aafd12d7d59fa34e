"""Faults that layers like ours have had elsewhere, each pinned with the right value; run on every engine of a device.

Every function takes (device, engine): engine None means what the planner chooses. An engine may decline (PlanError); one
that answers must be right. ``ATTENTION``, ``NORM``, ... at the end list them by op.

q = 0 makes softmax uniform, so that outputs are plain averages; "index" values are v[j] = j.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from layerplan.integration import ops

from .. import oracle
from .catalogue import plain_attention, plain_norm

INF = float("inf")
BF16 = torch.bfloat16


def _cu(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def _index(n: int, heads: int, d: int, device, dtype=BF16):
    return torch.arange(n, device=device, dtype=torch.float32).view(n, 1, 1).expand(n, heads, d).to(dtype).contiguous()


def _leaves(device, gen, dtype, *shapes):
    return [torch.randn(s, generator=gen, dtype=torch.float64).to(dtype).to(device).requires_grad_() for s in shapes]


def _packed(q, k, v, cu_q, cu_k, engine, causal=False, **kw):
    return ops.attention(q, k, v, causal=causal, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, engine=engine, **kw)


def _against_fp64(q, k, v, extra, causal, out, dout, grads, what):
    """Outputs and gradients against fp64, PyTorch in the same dtype as the measure."""
    results = []
    for dtype in (torch.float64, q.dtype):
        t = {n: x.detach().to(dtype).requires_grad_() for n, x in (("q", q), ("k", k), ("v", v))}
        o = plain_attention({**t, **extra}, causal=causal)[0]
        results.append((o, torch.autograd.grad(o, list(t.values()), dout.to(dtype))))
    (truth, tg), (peer, pg) = results
    oracle.compare(out, truth, peer, f"{what} out")
    for name, g, r, p in zip("qkv", grads, tg, pg, strict=True):
        oracle.compare(g, r, p, f"{what} d{name}")


# ---- attention ------------------------------------------------------------------------------------------------------


def case_01_empty_query_segment(device, engine):
    """Keys of an empty query segment get gradient 0, everything else is finite and right."""
    for d in (64, 128, 192, 256):
        gen = torch.Generator().manual_seed(d)
        q, k, v = _leaves(device, gen, BF16, (5, 4, d), (12, 1, d), (12, 1, d))
        extra = {"cu_seqlens_q": _cu([0, 0, 3, 5, 5], device), "cu_seqlens_k": _cu([0, 4, 7, 9, 12], device)}
        oracle.poison(q, k, v)
        out = _packed(q, k, v, *extra.values(), engine)
        dout = torch.randn(5, 4, d, generator=gen).to(device, BF16)
        oracle.poison(q, k, v)
        grads = torch.autograd.grad(out, (q, k, v), dout)
        for g in grads[1:]:
            assert not g[0:4].any() and not g[9:12].any(), f"d={d}: keys of an empty segment got a gradient"
        _against_fp64(q, k, v, extra, False, out, dout, grads, f"d={d}")


def case_01_empty_key_segment(device, engine):
    """Queries of an empty key segment give 0 and LSE -inf, gradient 0."""
    gen = torch.Generator().manual_seed(1)
    q, k, v = _leaves(device, gen, BF16, (12, 4, 64), (5, 2, 64), (5, 2, 64))
    cu_q, cu_k = _cu([0, 4, 7, 9, 12], device), _cu([0, 0, 3, 5, 5], device)
    oracle.poison(q, k, v)
    out, lse = _packed(q, k, v, cu_q, cu_k, engine, return_lse=True)
    for rows in (slice(0, 4), slice(9, 12)):
        assert not out[rows].any(), "a query without keys must give 0"
        assert bool((lse[:, rows] == -INF).all()), f"its LSE must be -inf, got {lse[:, rows].flatten()[:4].tolist()}"
    assert bool(lse[:, 4:9].isfinite().all())
    dout = torch.randn(out.shape, generator=gen).to(device, BF16)
    oracle.poison(q, k, v)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    assert not grads[0][0:4].any() and not grads[0][9:12].any()
    _against_fp64(q, k, v, {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}, False, out, dout, grads, "empty keys")


def case_02_longest_query_is_one(device, engine):
    q = torch.zeros(3, 6, 64, dtype=BF16, device=device)
    k, v = torch.ones(15, 2, 64, dtype=BF16, device=device), _index(15, 2, 64, device)
    cu_q, cu_k = _cu([0, 1, 1, 2, 2, 3], device), _cu([0, 4, 4, 6, 9, 15], device)
    expected = torch.tensor([1.5, 4.5, 11.5], dtype=BF16, device=device).view(3, 1, 1).expand(3, 6, 64)
    for longest in (1, 2):
        oracle.poison(q)
        out = _packed(q, k, v, cu_q, cu_k, engine, max_seqlen_q=longest, max_seqlen_k=6)
        oracle.equal(out, expected, f"max_seqlen_q = {longest}")


def case_03_more_queries_than_keys(device, engine):
    """A row that sees no key gives 0 and LSE -inf; its gradients are 0."""
    d = 16
    q = torch.zeros(1, 5, 2, d, dtype=BF16, device=device, requires_grad=True)
    gen = torch.Generator().manual_seed(0)
    k = torch.randn(1, 2, 2, d, generator=gen).to(device, BF16).requires_grad_()
    v = torch.tensor([1.0, 3.0], device=device, dtype=BF16).view(1, 2, 1, 1).expand(1, 2, 2, d).contiguous().requires_grad_()
    oracle.poison(q)
    out, lse = ops.attention(q, k, v, causal=True, return_lse=True, engine=engine)
    oracle.equal(out, torch.tensor([0, 0, 0, 1, 2], dtype=BF16, device=device).view(1, 5, 1, 1).expand(1, 5, 2, d))
    expected = torch.tensor([-INF, -INF, -INF, 0.0, math.log(2.0)], device=device)
    assert torch.equal(lse[..., :4], expected[:4].expand(1, 2, 4)), f"LSE {lse[0, 0].tolist()}"
    torch.testing.assert_close(lse[..., 4], expected[4].expand(1, 2), atol=1e-6, rtol=0)
    oracle.poison(q)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.randn(out.shape, generator=gen).to(device, BF16))
    assert not dq[:, :3].any(), "queries without keys got a gradient"
    assert all(bool(g.isfinite().all()) for g in (dq, dk, dv))


def case_04_tail_padded_packs(device, engine):
    """Padded between segments or behind the last one: real tokens as without padding, padding 0, reruns bitwise equal."""
    real, padded, d = [5, 8, 3, 12, 8, 7], [8, 8, 4, 12, 8, 8], 64
    gen = torch.Generator().manual_seed(4)
    q, k, v = _leaves(device, gen, BF16, *[(sum(real), h, d) for h in (4, 2, 2)])
    tight = _cu([0, *torch.tensor(real).cumsum(0).tolist()], device)
    out = _packed(q, k, v, tight, tight, engine, causal=True)
    oracle.poison(q)
    again = _packed(q, k, v, tight, tight, engine, causal=True)
    oracle.equal(again, out, "second run")
    # the same tokens with rows behind the end, which belong to no segment
    tail = sum(padded) - sum(real)
    longer = [torch.cat((x.detach(), torch.full((tail, *x.shape[1:]), 3.0, dtype=BF16, device=device))).requires_grad_() for x in (q, k, v)]
    oracle.poison(*longer)
    wide = _packed(*longer, tight, tight, engine, causal=True)
    oracle.equal(wide[: sum(real)], out, "real tokens")
    assert not wide[sum(real) :].any(), "rows behind the last segment must be 0"
    dout = torch.randn(wide.shape, generator=gen).to(device, BF16)
    oracle.poison(*longer)
    wide_grads = torch.autograd.grad(wide, longer, dout)
    for g in wide_grads:
        assert not g[sum(real) :].any(), "rows behind the last segment must get gradient 0"
    grads = torch.autograd.grad(out, (q, k, v), dout[: sum(real)])
    _against_fp64(q, k, v, {"cu_seqlens_q": tight, "cu_seqlens_k": tight}, True, out, dout[: sum(real)], grads, "tight")
    # each segment padded at its own end: causal attention hides the padding from every real token
    rows = torch.cat([torch.arange(n) + sum(padded[:i]) for i, n in enumerate(real)]).to(device)
    spread = [torch.zeros(sum(padded), *x.shape[1:], dtype=BF16, device=device).index_copy(0, rows, x.detach()) for x in (q, k, v)]
    cu = _cu([0, *torch.tensor(padded).cumsum(0).tolist()], device)
    between = _packed(*spread, cu, cu, engine, causal=True)
    truth, peer = (plain_attention({"q": q.detach().to(t), "k": k.detach().to(t), "v": v.detach().to(t), "cu_seqlens_q": tight,
                                    "cu_seqlens_k": tight}, causal=True)[0] for t in (torch.float64, BF16))  # fmt: skip
    oracle.compare(between[rows], truth, peer, "padded between segments")


def case_06_packed_mla_dims(device, engine, tokens=3000):
    cut = tokens * 13 // 30
    gen = torch.Generator().manual_seed(6)
    q, k, v = _leaves(device, gen, BF16, (tokens, 1, 192), (tokens, 1, 192), (tokens, 1, 128))
    cu = _cu([0, cut, tokens], device)
    oracle.poison(v)
    out = _packed(q, k, v, cu, cu, engine, causal=True, max_seqlen_q=tokens - cut, max_seqlen_k=tokens - cut)
    assert out.shape == (tokens, 1, 128)
    dout = torch.randn(out.shape, generator=gen).to(device, BF16)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    _against_fp64(q, k, v, {"cu_seqlens_q": cu, "cu_seqlens_k": cu}, True, out, dout, grads, "MLA")


def case_06_head_dim_256_with_window(device, engine):
    gen = torch.Generator().manual_seed(7)
    q, k, v = _leaves(device, gen, BF16, (1, 70, 2, 256), (1, 70, 1, 256), (1, 70, 1, 256))
    out = ops.attention(q, k, v, causal=True, window=(16, 0), engine=engine)
    dout = torch.randn(out.shape, generator=gen).to(device, BF16)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    for dtype in (torch.float64,):
        t = {n: x.detach().to(dtype).requires_grad_() for n, x in (("q", q), ("k", k), ("v", v))}
        truth = plain_attention(t, causal=True, window=(16, 0))[0]
        truth_grads = torch.autograd.grad(truth, list(t.values()), dout.to(dtype))
    p = {n: x.detach().requires_grad_() for n, x in (("q", q), ("k", k), ("v", v))}
    peer = plain_attention(p, causal=True, window=(16, 0))[0]
    oracle.compare(out, truth, peer, "out")
    for g, r, b in zip(grads, truth_grads, torch.autograd.grad(peer, list(p.values()), dout), strict=True):
        oracle.compare(g, r, b, "grad")


def case_07_head_counts_that_do_not_divide(device, engine):
    for hq, hk in ((33, 2), (3, 2), (8, 0)):
        q, k = (torch.randn(4, h, 64, dtype=BF16, device=device) for h in (hq, hk))
        cu = _cu([0, 4], device)
        for packed in (True, False):
            with pytest.raises(ValueError, match="heads") as info:
                if packed:
                    _packed(q, k, k, cu, cu, engine)
                else:
                    ops.attention(q[None], k[None], k[None], causal=True, engine=engine)
            assert str(hq) in str(info.value) and str(hk) in str(info.value)


def case_08_slices_of_one_qkv_tensor(device, engine, length=1536):
    hq, hk, d = 12, 2, 64
    gen = torch.Generator().manual_seed(8)
    qkv = torch.randn(length, 1, hq + 2 * hk, d, generator=gen).to(device, BF16)
    dout = torch.randn(length, 1, hq, d, generator=gen).to(device, BF16)

    def run(q, k, v, rows):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = ops.attention(*leaves, causal=True, layout="sbhd", engine=engine)
        return out, *torch.autograd.grad(out, leaves, rows)

    fused = qkv.split([hq, hk, hk], dim=2)
    got, want = run(*fused, dout), run(*(x.contiguous() for x in fused), dout)
    # k and v with strides that differ from each other, and a dout whose head dim is strided
    wide = torch.zeros(length, 1, hk, 3 * d, dtype=BF16, device=device)
    wide[..., d : 2 * d] = fused[1]
    v2 = torch.zeros(1, hk, length, d, dtype=BF16, device=device).permute(2, 0, 1, 3)
    v2.copy_(fused[2])
    spread = torch.zeros(length, 1, hq, 2 * d, dtype=BF16, device=device)
    spread[..., ::2] = dout
    mixed = run(fused[0], wide[..., d : 2 * d], v2, spread[..., ::2])
    truth = run(*(x.double() for x in fused), dout.double()) if engine == "reference/eager" else None
    for name, a, m, b in zip(("out", "dq", "dk", "dv"), got, mixed, want, strict=True):
        # dq is summed by atomics on a GPU: two runs on the same inputs may differ there, by a rounding
        if device == "cpu" or name != "dq":
            oracle.equal(a, b, f"{name} of slices")
            oracle.equal(m, b, f"{name} of mixed strides")
        else:
            for x in (a, m):
                torch.testing.assert_close(x, b, atol=2 * oracle.ulp(BF16, float(b.abs().max())), rtol=2e-2)
    if truth is not None:
        torch.testing.assert_close(got[0].double(), truth[0], atol=2e-2, rtol=2e-2)


def case_08_head_dim_that_is_not_dense(device, engine):
    """A kernel that takes the last stride for 1 reads its neighbours: here NaN."""
    gen = torch.Generator().manual_seed(9)
    wide = torch.full((3, 1, 33, 4, 128), float("nan")).to(device, BF16)
    wide[..., ::2] = torch.randn(3, 1, 33, 4, 64, generator=gen).to(device, BF16)
    strided = [wide[i][..., ::2].requires_grad_() for i in range(3)]
    dense = [x.detach().contiguous().requires_grad_() for x in strided]
    a, b = (ops.attention(*t, causal=True, engine=engine) for t in (strided, dense))
    oracle.equal(a, b, "out")
    dout = torch.randn(b.shape, generator=gen).to(device, BF16)
    for name, x, y in zip("qkv", torch.autograd.grad(a, strided, dout), torch.autograd.grad(b, dense, dout), strict=True):
        torch.testing.assert_close(x, y, atol=2 * oracle.ulp(BF16, float(y.abs().max())), rtol=2e-2, msg=f"d{name}")


# ---- rope -----------------------------------------------------------------------------------------------------------


def positions_of_rank(cu: list[int], cp: int, rank: int, restart: bool) -> list[int]:
    """Rows of a packed sequence that a context-parallel rank holds: of 2 cp chunks per segment, its own and the mirrored.
    ``restart``: positions inside of each segment, otherwise of the pack."""
    rows = []
    for begin, end in itertools.pairwise(cu):
        chunk = (end - begin) // (2 * cp)
        for c in (rank, 2 * cp - 1 - rank):
            rows += range((0 if restart else begin) + c * chunk, (0 if restart else begin) + (c + 1) * chunk)
    return rows


def case_05_packed_rope_under_context_parallelism(device, engine):
    """Each token keeps its own position after the split."""
    cu, cp = [0, 8, 12], 2
    assert positions_of_rank(cu, cp, 0, False) == [0, 1, 6, 7, 8, 11]
    assert positions_of_rank(cu, cp, 0, True) == [0, 1, 6, 7, 0, 3]
    gen = torch.Generator().manual_seed(5)
    x = torch.randn(12, 2, 16, generator=gen).to(device, BF16)
    angle = (torch.arange(12)[:, None] * 0.3 ** torch.arange(8)).to(device)
    for restart in (False, True):
        whole = torch.tensor([p for a, b in itertools.pairwise(cu) for p in range(0 if restart else a, (b - a) if restart else b)])
        full = ops.rope(x, angle.cos(), angle.sin(), positions=whole.to(device), engine=engine)
        seen = []
        for rank in range(cp):
            rows = torch.tensor(positions_of_rank(cu, cp, rank, False), device=device)
            mine = torch.tensor(positions_of_rank(cu, cp, rank, restart), device=device, dtype=torch.int32)
            oracle.poison(x)
            part = ops.rope(x[rows], angle.cos(), angle.sin(), positions=mine, engine=engine)
            oracle.equal(part, full[rows], f"rank {rank}, restart {restart}")
            seen += rows.tolist()
        assert sorted(seen) == list(range(12))


def case_05_rope_on_an_odd_number_of_packed_tokens(device, engine):
    gen = torch.Generator().manual_seed(5)
    x = torch.randn(257, 1, 64, generator=gen).to(device, BF16)
    angle = (torch.arange(257)[:, None] * 10000.0 ** (-torch.arange(32) / 32)).to(device)
    oracle.poison(x)
    y = ops.rope(x, angle.cos(), angle.sin(), engine=engine)
    a, b = x.float().chunk(2, -1)
    c, s = angle.cos()[:, None], angle.sin()[:, None]
    torch.testing.assert_close(y.float(), torch.cat((a * c - b * s, b * c + a * s), -1), atol=2e-2, rtol=1e-2)
    assert bool(y.isfinite().all())


# ---- norms ----------------------------------------------------------------------------------------------------------


def case_19_zero_centred_gamma_of_zero_is_one(device, engine):
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).to(device, BF16)
    y = ops.rms_norm(x, torch.zeros(64, dtype=BF16, device=device), eps=1e-6, zero_centered=True, engine=engine)
    expected = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)).to(BF16)
    assert bool(y.any())
    torch.testing.assert_close(y, expected, atol=0, rtol=2**-7)


def case_19_one_formula_with_and_without_residual(device, engine):
    """Bitwise the same with a residual of zeros; also for 3-D inputs and weights of another dtype."""
    gen = torch.Generator().manual_seed(1)
    for op in (ops.rms_norm, ops.layer_norm):
        for shape in ((64, 64), (2, 3, 5)):
            for wdtype in (BF16, torch.float32):
                x = torch.randn(shape, generator=gen).to(device, BF16)
                w = torch.randn(shape[-1], generator=gen).to(device, wdtype)
                y, h = op(x, w, eps=1e-5, residual=torch.zeros_like(x), engine=engine)
                oracle.equal(op(x, w, eps=1e-5, engine=engine), y, f"{op.__name__} {shape} {wdtype}")
                oracle.equal(h, x, "the residual stream")


def case_19_cast_order_is_one_rounding_at_the_end(device, engine):
    """y = round(x * rstd * w); the other order, round(round(x * rstd) * w), differs in hundreds of 4096 values."""
    gen = torch.Generator().manual_seed(2)
    x, w = torch.randn(64, 64, generator=gen).to(device, BF16), torch.randn(64, generator=gen).to(device, BF16)
    y = ops.rms_norm(x, w, eps=1e-5, engine=engine)
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5)
    once, twice = (exact * w.double()).to(BF16), exact.to(BF16) * w
    assert int((once != twice).sum()) > 400, "the orders must be told apart"
    assert int((y != once).sum()) <= 4, f"{int((y != once).sum())} values differ from one rounding at the end"


def case_20_inputs_are_left_alone_and_strided_gradients_honoured(device, engine):
    gen = torch.Generator().manual_seed(3)
    for op in (ops.rms_norm, ops.layer_norm):
        wide = torch.randn(6, 48, generator=gen).to(device, torch.float32)
        x = wide[:, :24].detach().requires_grad_()  # row stride 2 N
        residual = torch.randn(6, 24, generator=gen).to(device, torch.float32).requires_grad_()
        w = torch.randn(24, generator=gen).to(device, torch.float32).requires_grad_()
        copies = [t.detach().clone() for t in (x, residual, w, wide)]
        y, h = op(x, w, eps=1e-5, residual=residual, engine=engine)
        g = torch.randn(6, 48, generator=gen).to(device, torch.float32)
        seen = {"y": y.detach().clone(), "h": h.detach().clone(), "g": g.clone()}
        ((y * g[:, ::2]).sum() + y.sin().sum() + h.square().sum()).backward()  # two readers of y, one of h
        for name, t, c in zip(("x", "residual", "w", "x's buffer"), (x, residual, w, wide), copies, strict=True):
            assert torch.equal(t.detach(), c), f"{op.__name__}: {name} was overwritten"
        for name, t in (("y", y), ("h", h), ("g", g)):
            assert torch.equal(t.detach(), seen[name]), f"{op.__name__}: {name} was overwritten"
        t = {"x": x.detach().double().requires_grad_(), "residual": residual.detach().double().requires_grad_(), "weight": w.detach().double().requires_grad_()}
        yr, hr = plain_norm(t, op is ops.rms_norm)
        ((yr * g[:, ::2].double()).sum() + yr.sin().sum() + hr.square().sum()).backward()
        for name, ours in (("x", x), ("residual", residual), ("weight", w)):
            torch.testing.assert_close(ours.grad.double(), t[name].grad, atol=1e-5, rtol=1e-5, msg=lambda m, n=name, o=op: f"{o.__name__} d{n}: {m}")
        for dy in (g[:, ::2], torch.ones(1, 1, device=device).expand(6, 24)):
            a, b = ([v.detach().requires_grad_() for v in (x, w)] for _ in range(2))
            got = torch.autograd.grad(op(*a, eps=1e-5, engine=engine), a, dy)
            want = torch.autograd.grad(op(*b, eps=1e-5, engine=engine), b, dy.contiguous())
            for p, q in zip(got, want, strict=True):
                oracle.equal(p, q, f"{op.__name__} with a strided dy")


def case_21_odd_unaligned_and_wide_rows(device, engine, widths=(1, 3, 769, 3584, 4095, 4097, 53248)):
    for n in widths:
        gen = torch.Generator().manual_seed(n)
        x, buffer = oracle.guarded(torch.randn(7, n, generator=gen).to(device, BF16))
        w = torch.randn(n, generator=gen).to(device, BF16)
        leaves = [x.requires_grad_(), w.requires_grad_()]
        dy, dy_buffer = oracle.guarded(torch.randn(7, n, generator=gen).to(device, BF16))
        oracle.poison(x)
        y = ops.rms_norm(*leaves, eps=1e-5, engine=engine)
        oracle.poison(x)
        dx, dw = torch.autograd.grad(y, leaves, dy)
        results = []
        for dtype in (torch.float64, BF16):
            t = {"x": x.detach().to(dtype).requires_grad_(), "weight": w.detach().to(dtype).requires_grad_()}
            (p,) = plain_norm(t, True)
            results.append((p, *torch.autograd.grad(p, list(t.values()), dy.to(dtype))))
        for name, a, r, p in zip(("y", "dx", "dw"), (y, dx, dw), *results, strict=True):
            oracle.compare(a, r, p, f"{name}, N = {n}")
        oracle.check_guards(x, buffer, f"x, N = {n}")
        oracle.check_guards(dy, dy_buffer, f"dy, N = {n}")


# ---- loss -----------------------------------------------------------------------------------------------------------


def case_22_weighted_and_ignored_tokens(device, engine):
    logits = torch.tensor([[2.0, 0, 0], [0, 1, 0]], device=device, requires_grad=True)
    loss = ops.cross_entropy(logits, torch.tensor([0, -100], device=device), engine=engine)
    torch.testing.assert_close(loss.cpu(), torch.tensor([0.239545, 0.0]), atol=1e-6, rtol=0)
    loss.backward(torch.tensor([0.5, 3.0], device=device))
    torch.testing.assert_close(logits.grad.cpu()[0], torch.tensor([-0.106507, 0.053253, 0.053253]), atol=1e-6, rtol=0)
    assert not logits.grad[1].any()


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


ATTENTION = (case_01_empty_query_segment, case_01_empty_key_segment, case_02_longest_query_is_one, case_03_more_queries_than_keys,
             case_04_tail_padded_packs, case_06_packed_mla_dims, case_06_head_dim_256_with_window,
             case_07_head_counts_that_do_not_divide, case_08_slices_of_one_qkv_tensor, case_08_head_dim_that_is_not_dense)  # fmt: skip
ROPE = (case_05_packed_rope_under_context_parallelism, case_05_rope_on_an_odd_number_of_packed_tokens)
NORM = (case_19_zero_centred_gamma_of_zero_is_one, case_19_one_formula_with_and_without_residual,
        case_19_cast_order_is_one_rounding_at_the_end, case_20_inputs_are_left_alone_and_strided_gradients_honoured,
        case_21_odd_unaligned_and_wide_rows)  # fmt: skip
LOSS = (case_22_weighted_and_ignored_tokens, case_22_minus_infinity_everywhere_but_the_target)
BY_OP = {"sdpa": ATTENTION, "rope": ROPE, "rms_norm": NORM, "cross_entropy": LOSS}
# sizes for one CPU core
SMALL = {case_06_packed_mla_dims: {"tokens": 300}, case_08_slices_of_one_qkv_tensor: {"length": 192}}
