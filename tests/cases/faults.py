"""Faults that layers like ours have had elsewhere, each pinned with the right value; run on every engine of a device.

Every function takes (device, engine): engine None means what the planner chooses. An engine may decline (PlanError); one
that answers must be right. ``BY_OP`` at the end lists them; a case of several ops has ``__wrapped__``.

q = 0 makes softmax uniform, so that outputs are plain averages; "index" values are v[j] = j.
"""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch

from layerplan.integration import ops
from layerplan.integration.planner.policy import Policy

from .. import oracle
from .catalogue import plain_attention, plain_rope, two_rows_far_apart
from .context_parallel import case_04_context_parallel_equals_one_rank, rows_of_rank
from .norms_and_loss import (
    case_09_norm_with_rows_beyond_32_bits,
    case_19_cast_order_is_one_rounding_at_the_end,
    case_19_one_formula_with_and_without_residual,
    case_19_zero_centred_gamma_of_zero_is_one,
    case_20_inputs_are_left_alone,
    case_20_strided_gradients_are_honoured,
    case_21_odd_unaligned_and_wide_rows,
    case_22_every_reduction_equals_the_unfused_loss,
    case_22_minus_infinity_everywhere_but_the_target,
    case_22_weighted_and_ignored_tokens,
)
from .reruns import same, watching

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


def _against_fp64(q, k, v, extra, causal, out, dout, grads, what, window=(None, None)):
    """Outputs and gradients against fp64, PyTorch in the same dtype as the measure."""
    results = []
    for dtype in (torch.float64, q.dtype):
        t = {n: x.detach().to(dtype).requires_grad_() for n, x in (("q", q), ("k", k), ("v", v))}
        o = plain_attention({**t, **extra}, causal=causal, window=window)[0]
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
    for d in (64, 128, 192, 256):
        gen = torch.Generator().manual_seed(d + 1)
        q, k, v = _leaves(device, gen, BF16, (12, 4, d), (5, 1, d), (5, 1, d))
        extra = {"cu_seqlens_q": _cu([0, 4, 7, 9, 12], device), "cu_seqlens_k": _cu([0, 0, 3, 5, 5], device)}
        oracle.poison(q, k, v)
        out, lse = _packed(q, k, v, *extra.values(), engine, return_lse=True)
        for rows in (slice(0, 4), slice(9, 12)):
            assert not out[rows].any(), f"d={d}: a query without keys must give 0"
            assert bool((lse[:, rows] == -INF).all()), f"d={d}: its LSE must be -inf, got {lse[:, rows].flatten()[:4].tolist()}"
        assert bool(lse[:, 4:9].isfinite().all())
        dout = torch.randn(out.shape, generator=gen).to(device, BF16)
        oracle.poison(q, k, v)
        grads = torch.autograd.grad(out, (q, k, v), dout)
        assert not grads[0][0:4].any() and not grads[0][9:12].any(), f"d={d}: queries without keys got a gradient"
        _against_fp64(q, k, v, extra, False, out, dout, grads, f"empty keys, d={d}")


def case_02_longest_query_is_one(device, engine):
    """Empty segments and grouped heads: max_seqlen_q = 1 gives what 2 gives, forward and backward."""
    k, v = torch.ones(15, 2, 64, dtype=BF16, device=device), _index(15, 2, 64, device)
    cu_q, cu_k = _cu([0, 1, 1, 2, 2, 3], device), _cu([0, 4, 4, 6, 9, 15], device)
    expected = torch.tensor([1.5, 4.5, 11.5], dtype=BF16, device=device).view(3, 1, 1).expand(3, 6, 64)
    dout = torch.randn(3, 6, 64, generator=torch.Generator().manual_seed(2)).to(device, BF16)
    seen = []
    with watching() as ran:
        for longest in (1, 2):
            leaves = [x.detach().requires_grad_() for x in (torch.zeros_like(dout), k, v)]
            oracle.poison(dout, k)
            out = _packed(*leaves, cu_q, cu_k, engine, max_seqlen_q=longest, max_seqlen_k=6)
            oracle.equal(out.detach(), expected, f"max_seqlen_q = {longest}")
            oracle.poison(dout, k)
            grads = torch.autograd.grad(out, leaves, dout)
            extra = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
            _against_fp64(*leaves, extra, False, out, dout, grads, f"max_seqlen_q = {longest}")
            assert not grads[1][6:9].any() and not grads[2][6:9].any(), "keys of an empty query segment got a gradient"
            seen.append(grads)
    for name, a, b in zip(("dq", "dk", "dv"), *seen, strict=True):
        same(ran, name, a, b, "max_seqlen_q = 1 against 2")


def case_03_more_queries_than_keys(device, engine, packed=False):
    """A row that sees no key gives 0 and LSE -inf; its gradients are 0."""
    d = 16
    lead = () if packed else (1,)
    cu = {"cu_seqlens_q": _cu([0, 5], device), "cu_seqlens_k": _cu([0, 2], device)} if packed else {}
    q = torch.zeros(*lead, 5, 2, d, dtype=BF16, device=device, requires_grad=True)
    gen = torch.Generator().manual_seed(0)
    k = torch.randn(*lead, 2, 2, d, generator=gen).to(device, BF16).requires_grad_()
    v = torch.tensor([1.0, 3.0], device=device, dtype=BF16).view(2, 1, 1).expand(*lead, 2, 2, d).contiguous().requires_grad_()
    oracle.poison(q)
    out, lse = ops.attention(q, k, v, causal=True, return_lse=True, engine=engine, **cu)
    oracle.equal(out, torch.tensor([0, 0, 0, 1, 2], dtype=BF16, device=device).view(5, 1, 1).expand(*lead, 5, 2, d))
    expected = torch.tensor([-INF, -INF, -INF, 0.0, 0.6931], device=device)
    assert torch.equal(lse[..., :4], expected[:4].expand(*lead, 2, 4)), f"LSE {lse.tolist()}"
    torch.testing.assert_close(lse[..., 4], torch.full((*lead, 2), math.log(2.0), device=device), atol=1e-6, rtol=0)
    assert f"{float(lse.detach().flatten()[4]):.4f}" == "0.6931"
    oracle.poison(q)
    dout = torch.randn(out.shape, generator=gen).to(device, BF16)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    assert not grads[0][..., :3, :, :].any(), "queries without keys got a gradient"
    _against_fp64(q, k, v, cu, True, out, dout, grads, "more queries than keys")


def case_03_more_queries_than_keys_packed(device, engine):
    case_03_more_queries_than_keys(device, engine, packed=True)


def case_03_window_that_ends_before_the_first_key(device, engine):
    """Rows left of every key's window are blind, whatever hides the keys from them: 0, LSE -inf, gradient 0."""
    gen = torch.Generator().manual_seed(3)
    q, k, v = _leaves(device, gen, BF16, (1, 9, 4, 64), (1, 3, 2, 64), (1, 3, 2, 64))
    oracle.poison(q)
    out, lse = ops.attention(q, k, v, causal=True, window=(1, 0), return_lse=True, engine=engine)  # row i sees keys i - 7 and i - 6
    assert not out[:, :6].any() and bool((lse[..., :6] == -INF).all()) and bool(lse[..., 6:].isfinite().all())
    oracle.poison(q)
    dout = torch.randn(out.shape, generator=gen).to(device, BF16)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    assert not grads[0][:, :6].any(), "queries without keys got a gradient"
    _against_fp64(q, k, v, {}, True, out, dout, grads, "blind rows of a window", window=(1, 0))


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
    # the same tokens with rows behind the end, which belong to no segment: what they hold counts for nothing
    tail, nan = sum(padded) - sum(real), float("nan")
    longer = [torch.cat((x.detach(), torch.full((tail, *x.shape[1:]), nan, dtype=BF16, device=device))).requires_grad_() for x in (q, k, v)]
    oracle.poison(*longer)
    with watching() as ran:
        wide = _packed(*longer, tight, tight, engine, causal=True)
    oracle.equal(wide[: sum(real)], out, "real tokens")
    assert not wide[sum(real) :].any(), "rows behind the last segment must be 0"
    dout = torch.randn(wide.shape, generator=gen).to(device, BF16)
    dout[sum(real) :] = nan
    oracle.poison(*longer)
    wide_grads = torch.autograd.grad(wide, longer, dout)
    grads = torch.autograd.grad(out, (q, k, v), dout[: sum(real)])
    for name, g, w in zip(("dq", "dk", "dv"), grads, wide_grads, strict=True):
        assert not w[sum(real) :].any(), "rows behind the last segment must get gradient 0"
        same(ran, name, w[: sum(real)], g, "real tokens")
    _against_fp64(q, k, v, {"cu_seqlens_q": tight, "cu_seqlens_k": tight}, True, out, dout[: sum(real)], grads, "tight")
    # each segment padded at its own end: causal attention hides the padding from every real token
    rows = torch.cat([torch.arange(n) + sum(padded[:i]) for i, n in enumerate(real)]).to(device)
    spread = [torch.zeros(sum(padded), *x.shape[1:], dtype=BF16, device=device).index_copy(0, rows, x.detach()) for x in (q, k, v)]
    cu = _cu([0, *torch.tensor(padded).cumsum(0).tolist()], device)
    between = _packed(*spread, cu, cu, engine, causal=True)
    truth, peer = (plain_attention({"q": q.detach().to(t), "k": k.detach().to(t), "v": v.detach().to(t), "cu_seqlens_q": tight,
                                    "cu_seqlens_k": tight}, causal=True)[0] for t in (torch.float64, BF16))  # fmt: skip
    oracle.compare(between[rows], truth, peer, "padded between segments")


def case_27_repeated_ends_of_cu_seqlens(device, engine):
    """Padding cu_seqlens by repeating its end adds empty segments only: bitwise a no-op, forward and backward."""
    gen = torch.Generator().manual_seed(27)
    q, k, v = _leaves(device, gen, BF16, *[(9, h, 64) for h in (4, 2, 2)])  # rows 7 and 8 belong to no segment
    dout = torch.randn(9, 4, 64, generator=gen).to(device, BF16)
    for causal in (False, True):
        seen = []
        with watching() as ran:
            for ends in ([0, 3, 7], [0, 3, 7, 7, 7]):
                cu = _cu(ends, device)
                oracle.poison(q, k, v)
                out, lse = _packed(q, k, v, cu, cu, engine, causal=causal, return_lse=True, max_seqlen_q=4, max_seqlen_k=4)
                oracle.poison(q, k, v)
                seen.append((out, lse, *torch.autograd.grad(out, (q, k, v), dout)))
        _against_fp64(q, k, v, {"cu_seqlens_q": cu, "cu_seqlens_k": cu}, causal, seen[1][0], dout, seen[1][2:], f"causal={causal}")
        for name, short, padded in zip(("out", "lse", "dq", "dk", "dv"), *seen, strict=True):
            same(ran, name, padded, short, f"padded cu_seqlens, causal={causal}")


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
    _against_fp64(q, k, v, {}, True, out, dout, grads, "head dim 256, window 16", window=(16, 0))


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


def _fused_qkv(device, length):
    """[S, 1, 12 + 2 * 2, 64] and a dout; q, k and v are its slices."""
    gen = torch.Generator().manual_seed(8)
    qkv = torch.randn(length, 1, 16, 64, generator=gen).to(device, BF16)
    return qkv.split([12, 2, 2], dim=2), torch.randn(length, 1, 12, 64, generator=gen).to(device, BF16)


def _run_sbhd(engine, q, k, v, dout, policy=None):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    oracle.poison(*leaves)
    out = ops.attention(*leaves, causal=True, layout="sbhd", engine=engine, policy=policy)
    oracle.poison(*leaves)
    return out, *torch.autograd.grad(out, leaves, dout)


def case_08_slices_of_one_qkv_tensor(device, engine, length=1536):
    fused, dout = _fused_qkv(device, length)
    with watching() as ran:
        got, want = _run_sbhd(engine, *fused, dout), _run_sbhd(engine, *(x.contiguous() for x in fused), dout)
    # k and v with strides that differ from each other, and a dout whose head dim is strided
    wide = torch.full((length, 1, 2, 192), float("nan"), dtype=BF16, device=device)
    wide[..., 64:128] = fused[1]
    v2 = torch.zeros(1, 2, length, 64, dtype=BF16, device=device).permute(2, 0, 1, 3)
    v2.copy_(fused[2])
    spread = torch.full((length, 1, 12, 128), float("nan"), dtype=BF16, device=device)
    spread[..., ::2] = dout
    mixed = _run_sbhd(engine, fused[0], wide[..., 64:128], v2, spread[..., ::2])
    for name, a, m, b in zip(("out", "dq", "dk", "dv"), got, mixed, want, strict=True):
        same(ran, name, a, b, "slices")
        same(ran, name, m, b, "mixed strides")
    turned = [x.transpose(0, 1) for x in (*fused, got[0], dout, *got[1:])]
    _against_fp64(*turned[:3], {}, True, turned[3], turned[4], turned[5:], "slices")


def case_08_slices_are_bitwise_equal_in_deterministic_mode(device, engine, length=1536):
    fused, dout = _fused_qkv(device, length)
    policy = Policy(deterministic=True)
    got = _run_sbhd(engine, *fused, dout, policy)
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, _run_sbhd(engine, *(x.contiguous() for x in fused), dout, policy), strict=True):
        oracle.equal(a, b, name)


def case_08_head_dim_that_is_not_dense(device, engine):
    """A kernel that takes the last stride for 1 reads its neighbours: here NaN."""
    gen = torch.Generator().manual_seed(9)
    wide = torch.full((3, 1, 33, 4, 128), float("nan")).to(device, BF16)
    wide[..., ::2] = torch.randn(3, 1, 33, 4, 64, generator=gen).to(device, BF16)
    strided = [wide[i][..., ::2].requires_grad_() for i in range(3)]
    dense = [x.detach().contiguous().requires_grad_() for x in strided]
    with watching() as ran:
        a, b = (ops.attention(*t, causal=True, engine=engine) for t in (strided, dense))
    oracle.equal(a, b, "out")
    dout = torch.randn(b.shape, generator=gen).to(device, BF16)
    for name, x, y in zip(("dq", "dk", "dv"), torch.autograd.grad(a, strided, dout), torch.autograd.grad(b, dense, dout), strict=True):
        same(ran, name, x, y, "a strided head dim")


# ---- rope -----------------------------------------------------------------------------------------------------------


def _angles(positions: int, half: int, device, base=10000.0):
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * base ** (-torch.arange(half, dtype=torch.float64) / half)
    return angle.cos().float().to(device), angle.sin().float().to(device)


def case_05_packed_rope_under_context_parallelism(device, engine):
    """Each token keeps its own position after the split, of the pack or of its sequence, and so does its gradient."""
    cu, cp = [0, 8, 12], 2
    gen = torch.Generator().manual_seed(5)
    x, dy = (torch.randn(12, 2, 16, generator=gen).to(device, BF16) for _ in range(2))
    table = _angles(12, 8, device)
    for restart in (False, True):
        whole = [p for a, b in itertools.pairwise(cu) for p in range(0 if restart else a, (b - a) if restart else b)]
        leaf = x.clone().requires_grad_()
        full = ops.rope(leaf, *table, positions=torch.tensor(whole, device=device), engine=engine)
        (dfull,) = torch.autograd.grad(full, leaf, dy)
        seen = []
        for rank in range(cp):
            rows = torch.tensor(rows_of_rank(cu, cp, rank), device=device)
            mine = torch.tensor(rows_of_rank(cu, cp, rank, restart), device=device, dtype=torch.int32)
            part_leaf = x[rows].requires_grad_()
            oracle.poison(part_leaf)
            part = ops.rope(part_leaf, *table, positions=mine, engine=engine)
            oracle.equal(part, full[rows], f"rank {rank}, restart {restart}")
            oracle.poison(part_leaf)
            (dpart,) = torch.autograd.grad(part, part_leaf, dy[rows])
            oracle.equal(dpart, dfull[rows], f"gradient, rank {rank}, restart {restart}")
            seen += rows.tolist()
        assert sorted(seen) == list(range(12))


def case_05_rope_on_the_key_part_of_mla(device, engine):
    """[257, 1, 64], packed, a slice of the compressed key-value tensor whose other columns are NaN: finite and right."""
    gen = torch.Generator().manual_seed(5)
    compressed = torch.full((257, 512 + 64), float("nan"), dtype=BF16, device=device)
    compressed[:, 512:] = torch.randn(257, 64, generator=gen).to(device, BF16)
    dy = torch.randn(257, 1, 64, generator=gen).to(device, BF16)
    cos, sin = _angles(257, 32, device)
    for interleaved in (False, True):
        x = compressed[:, 512:].unsqueeze(1).detach().requires_grad_()
        oracle.poison(dy)
        y = ops.rope(x, cos, sin, interleaved=interleaved, engine=engine)
        oracle.poison(dy)
        (dx,) = torch.autograd.grad(y, x, dy)
        results = []
        for dtype in (torch.float64, BF16):
            t = {"x": x.detach().to(dtype).requires_grad_(), "cos": cos.to(dtype), "sin": sin.to(dtype)}
            (p,) = plain_rope(t, interleaved=interleaved)
            results.append((p, *torch.autograd.grad(p, t["x"], dy.to(dtype))))
        for name, a, r, p in zip(("y", "dx"), (y, dx), *results, strict=True):
            oracle.compare(a, r, p, f"{name}, interleaved={interleaved}")


# ---- sizes beyond 32 bits -------------------------------------------------------------------------------------------


def case_09_attention_with_rows_beyond_32_bits(device, engine):
    gen = torch.Generator().manual_seed(9)
    heads, d = 16, 96
    far = two_rows_far_apart(device, 4 * heads * d, gen).unflatten(1, (4, heads, d))
    assert far.stride(0) == 2160000000
    for packed in (True, False):
        cu = {"cu_seqlens_q": _cu([0, 2], device), "cu_seqlens_k": _cu([0, 2], device)} if packed else {}
        q, k, v, dout = (x if packed else x.unsqueeze(0) for x in far.unbind(1))
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        oracle.poison(far[0], far[0])
        out = ops.attention(*leaves, causal=True, engine=engine, **cu)
        oracle.poison(far[0], far[0])
        grads = torch.autograd.grad(out, leaves, dout)
        # not bitwise: BLAS takes another product where a leading dimension passes 2^31
        _against_fp64(*(x.detach().contiguous() for x in leaves), cu, True, out, dout.contiguous(), grads, f"packed={packed}")


def case_09_batch_of_5500_single_tokens(device, engine):
    gen = torch.Generator().manual_seed(0)
    q, k, v = _leaves(device, gen, BF16, *[(5500, 1, 24, 128)] * 3)
    oracle.poison(q)
    out = ops.attention(q, k, v, causal=True, engine=engine)
    oracle.equal(out.detach(), v.detach(), "one key: the output is its value")
    dout = torch.randn(out.shape, generator=gen).to(device, BF16)
    oracle.poison(q)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    oracle.equal(dv, dout, "dv")
    assert bool(dq.isfinite().all()) and bool(dk.isfinite().all())


def _with(case, op):
    """A case of norms for one of them."""

    @functools.wraps(case)
    def run(device, engine, **kw):
        case(device, engine, op, **kw)

    run.__name__ = f"{case.__name__}-{op.__name__}"
    return run


ATTENTION = (
    case_01_empty_query_segment, case_01_empty_key_segment, case_02_longest_query_is_one, case_03_more_queries_than_keys,
    case_03_more_queries_than_keys_packed, case_03_window_that_ends_before_the_first_key, case_04_tail_padded_packs,
    case_04_context_parallel_equals_one_rank, case_06_packed_mla_dims, case_06_head_dim_256_with_window,
    case_07_head_counts_that_do_not_divide, case_08_slices_of_one_qkv_tensor, case_08_slices_are_bitwise_equal_in_deterministic_mode,
    case_08_head_dim_that_is_not_dense, case_09_attention_with_rows_beyond_32_bits, case_09_batch_of_5500_single_tokens,
    case_27_repeated_ends_of_cu_seqlens,
)  # fmt: skip
ROPE = (case_05_packed_rope_under_context_parallelism, case_05_rope_on_the_key_part_of_mla)
NORMS = (
    case_09_norm_with_rows_beyond_32_bits, case_19_zero_centred_gamma_of_zero_is_one, case_19_one_formula_with_and_without_residual,
    case_20_inputs_are_left_alone, case_20_strided_gradients_are_honoured, case_21_odd_unaligned_and_wide_rows,
)  # fmt: skip
RMS_NORM = (case_19_cast_order_is_one_rounding_at_the_end, *(_with(case, ops.rms_norm) for case in NORMS))
LAYER_NORM = tuple(_with(case, ops.layer_norm) for case in NORMS)
LOSS = (case_22_weighted_and_ignored_tokens, case_22_every_reduction_equals_the_unfused_loss, case_22_minus_infinity_everywhere_but_the_target)
BY_OP = {"sdpa": ATTENTION, "rope": ROPE, "rms_norm": RMS_NORM, "layer_norm": LAYER_NORM, "cross_entropy": LOSS}
# sizes for one CPU core
SMALL = {
    case_06_packed_mla_dims: {"tokens": 300}, case_08_slices_of_one_qkv_tensor: {"length": 192},
    case_08_slices_are_bitwise_equal_in_deterministic_mode: {"length": 192},
}  # fmt: skip
