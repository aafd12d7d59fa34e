"""Every differentiable op as a table row: inputs, our call, and the same maths written once more in plain PyTorch. Those of a
mixture of experts stand in ``moe.py``.

The plain versions share no code with the op table. In float64 they are the truth, in the dtype at hand the peer whose
error sets the tolerance.

B batch, S sequence, H heads, D head dim, N width, V classes, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from layerplan.integration import ops
from layerplan.integration.engines.manifest import MANIFEST
from layerplan.integration.planner.planner import PlanError

from .. import oracle
from . import moe, quantized
from .op_case import OpCase, Tensors, randn


def engines_for(op: str, device: str, *, inductor: bool = True) -> list[str]:
    """Ids of the manifest's engines that have code for an op on a kind of device."""
    archs = {"cpu": lambda e: "cpu" in e.archs, "cuda": lambda e: any(a != "cpu" for a in e.archs)}[device]
    found = [e.id for e in MANIFEST if (op in e.ops or e.ops == ("*",)) and archs(e)]
    return [e for e in found if inductor or e != "pointwise/inductor"]


class Declined(Exception):
    """An engine said why it will not; the tests print that and go on."""


def declined(error: PlanError) -> str:
    """The forced engine's reason out of a PlanError: the one that is not about another engine being forced."""
    reasons = [line.strip() for line in str(error).splitlines()[1:-1] if "is forced" not in line and "policy" not in line.split(":")[-1]]
    assert reasons, f"a refusal without a reason: {error}"
    return reasons[0]


# ---- plain PyTorch --------------------------------------------------------------------------------------------------


def plain_norm(t: Tensors, rms: bool, eps: float = 1e-5, zero_centered: bool = False) -> tuple:
    x = t["x"]
    if "residual" in t:
        x = x + t["residual"]
    w = t["weight"].to(x.dtype) if x.dtype == torch.float64 else t["weight"]
    if zero_centered:
        w = w.double() + 1 if x.dtype == torch.float64 else w.float() + 1
    b = t.get("bias")
    h = x if x.dtype == torch.float64 else x.float()
    centred = h if rms else h - h.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    # as model code does it: the normed value is cast back, then scaled
    y = y.to(x.dtype) * w.to(x.dtype)
    if b is not None:
        y = y + b.to(x.dtype)
    return (y, x) if "residual" in t else (y,)


def plain_rope(t: Tensors, *, interleaved: bool = False, inverse: bool = False) -> tuple:
    x, cos, sin = t["x"], t["cos"].to(t["x"].dtype), t["sin"].to(t["x"].dtype)
    r = 2 * cos.shape[1]
    positions = t.get("positions")
    axis = 1 if x.dim() == 4 else 0
    if positions is None:
        positions = torch.arange(x.shape[axis], device=x.device)
    c, s = cos[positions.long()], sin[positions.long()]
    if x.dim() == 4 and positions.dim() == 1:
        c, s = c.unsqueeze(0), s.unsqueeze(0)
    c, s = c.unsqueeze(-2), s.unsqueeze(-2)
    if inverse:
        s = -s
    if interleaved:
        a, b = x[..., 0:r:2], x[..., 1:r:2]
        turned = torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2)
    else:
        a, b = x[..., : r // 2], x[..., r // 2 : r]
        turned = torch.cat((a * c - b * s, a * s + b * c), -1)
    return (torch.cat((turned, x[..., r:]), -1),)


def plain_gate(t: Tensors, kind: str, clamp: float | None = None) -> tuple:
    x = t["x"]
    gated = kind in ("swiglu", "geglu")
    a, u = x.chunk(2, -1) if gated else (x, None)
    if clamp is not None:
        a = a.clamp(max=clamp)
        u = None if u is None else u.clamp(-clamp, clamp)
    y = F.silu(a) if kind == "swiglu" else F.relu(a).square() if kind == "squared_relu" else F.gelu(a)
    y = y if u is None else y * u
    if "row_weight" in t:
        y = y * t["row_weight"].to(y.dtype).unsqueeze(-1)
    return (y,)


def _one(q, k, v, scale, causal, window, sink, mask=None):
    """[h, sq, d] x [hk, sk, d] -> (out, lse); softmax in float32 or wider, as eager model code does it."""
    groups = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    s = (q @ k.transpose(-1, -2)) * scale
    s = s if s.dtype == torch.float64 else s.float()
    sq, sk = s.shape[-2:]
    i = torch.arange(sq, device=q.device)[:, None] + sk - sq
    j = torch.arange(sk, device=q.device)[None]
    left, right = window
    keep = torch.ones(sq, sk, dtype=torch.bool, device=q.device)
    if causal:
        keep &= j <= i
    if left is not None:
        keep &= j >= i - left
    if right is not None:
        keep &= j <= i + right
    if mask is not None:
        keep = keep & ~mask
    s = s.masked_fill(~keep, float("-inf"))
    if sink is not None:
        s = torch.cat((s, sink.to(s.dtype).view(-1, 1, 1).expand(-1, sq, 1)), -1)
    alive = keep.any(-1).expand(s.shape[:-1]) if sink is None else torch.ones(s.shape[:-1], dtype=torch.bool, device=q.device)
    safe = torch.where(alive.unsqueeze(-1), s, 0.0)  # a dead row takes no part, in either direction
    if s.shape[-1]:
        lse = torch.where(alive, torch.logsumexp(safe, -1), float("-inf"))
        p = torch.where(alive.unsqueeze(-1), torch.softmax(safe, -1), 0.0)
    else:
        lse, p = s.new_full(s.shape[:-1], float("-inf")), s
    return p[..., :sk].to(q.dtype) @ v, lse


def plain_attention(t: Tensors, *, causal: bool = False, window=(None, None), scale: float | None = None) -> tuple:
    q, k, v, sink = t["q"], t["k"], t["v"], t.get("sink")
    scale = scale if scale is not None else 1 / math.sqrt(q.shape[-1])
    if q.dim() == 4:
        outs, lses = [], []
        for b in range(q.shape[0]):
            mask = t["mask"][b if t["mask"].shape[0] > 1 else 0] if "mask" in t else None
            o, lse = _one(q[b].transpose(0, 1), k[b].transpose(0, 1), v[b].transpose(0, 1), scale, causal, window, sink, mask)
            outs.append(o.transpose(0, 1))
            lses.append(lse)
        return torch.stack(outs), torch.stack(lses)
    cq, ck = t["cu_seqlens_q"].tolist(), t["cu_seqlens_k"].tolist()
    outs, lses = [], []
    for i in range(len(cq) - 1):
        a, b = slice(cq[i], cq[i + 1]), slice(ck[i], ck[i + 1])
        o, lse = _one(q[a].transpose(0, 1), k[b].transpose(0, 1), v[b].transpose(0, 1), scale, causal, window, sink)
        outs.append(o.transpose(0, 1))
        lses.append(lse)
    rest = q.shape[0] - cq[-1]
    outs.append(q.new_zeros(rest, q.shape[1], v.shape[-1]))
    lses.append(lses[0].new_full((q.shape[1], rest), float("-inf")))
    return torch.cat(outs), torch.cat(lses, -1)


def plain_cross_entropy(t: Tensors, ignore_index: int = -100) -> tuple:
    x, y = t["logits"], t["targets"].long()
    x = x if x.dtype == torch.float64 else x.float()
    flat = F.cross_entropy(x.reshape(-1, x.shape[-1]), y.reshape(-1), reduction="none", ignore_index=ignore_index)
    return (flat.reshape(y.shape),)


def plain_linear_cross_entropy(t: Tensors) -> tuple:
    return plain_cross_entropy({"logits": F.linear(t["x"], t["w"]), "targets": t["targets"]})


def native_layer_norm(t: Tensors) -> tuple:
    """F.layer_norm after the residual's addition; the composed version where the dtypes are mixed."""
    if t["weight"].dtype != t["x"].dtype:
        return plain_norm(t, False)
    h = t["x"] + t["residual"] if "residual" in t else t["x"]
    y = F.layer_norm(h, h.shape[-1:], t["weight"], t.get("bias"), 1e-5)
    return (y, h) if "residual" in t else (y,)


# ---- rows -----------------------------------------------------------------------------------------------------------


def _norm_case(name: str, tag: str, shape: tuple[int, ...], *, bias=False, residual=False, zero=False, wdtype=None) -> OpCase:
    rms = name == "rms_norm"

    def make(gen, dtype):
        t = {"x": randn(gen, dtype, *shape) + 0.3, "weight": randn(gen, wdtype or dtype, shape[-1]) + (0.0 if zero else 1.0)}
        if bias:
            t["bias"] = randn(gen, wdtype or dtype, shape[-1])
        if residual:
            t["residual"] = randn(gen, dtype, *shape)
        return t

    def ours(t, **kw):
        y = getattr(ops, name)(t["x"], t["weight"], eps=1e-5, bias=t.get("bias"), residual=t.get("residual"), zero_centered=zero, **kw)
        return y if isinstance(y, tuple) else (y,)

    diff = ("x", "weight", *(("bias",) if bias else ()), *(("residual",) if residual else ()))
    return OpCase(f"{name}-{tag}", name, make, diff, ours, lambda t: plain_norm(t, rms, zero_centered=zero),
                  peer=None if rms or zero else native_layer_norm)  # fmt: skip


def _linear_case(tag: str, lead: tuple[int, ...], n: int, k: int, bias: bool) -> OpCase:
    def make(gen, dtype):
        t = {"x": randn(gen, dtype, *lead, k), "w": randn(gen, dtype, n, k)}
        return {**t, "bias": randn(gen, dtype, n)} if bias else t

    return OpCase(f"linear-{tag}", "linear", make, ("x", "w", *(("bias",) if bias else ())),
                  lambda t, **kw: (ops.linear(t["x"], t["w"], t.get("bias"), **kw),),
                  lambda t: (F.linear(t["x"], t["w"], t.get("bias")),))  # fmt: skip


def _rope_case(tag: str, shape: tuple[int, ...], r: int, positions: str | None = None, **kw) -> OpCase:
    def make(gen, dtype):
        s = shape[1] if len(shape) == 4 else shape[0]
        angle = torch.arange(s + 5, dtype=torch.float64)[:, None] * 10000.0 ** (-torch.arange(r // 2, dtype=torch.float64) / (r // 2))
        t = {"x": randn(gen, dtype, *shape), "cos": angle.cos().float(), "sin": angle.sin().float()}
        if positions:
            size = (shape[0], s) if positions == "bs" else (s,)
            t["positions"] = torch.randint(0, s + 5, size, generator=gen, dtype=torch.int32)
        return t

    return OpCase(f"rope-{tag}", "rope", make, ("x",),
                  lambda t, **k: (ops.rope(t["x"], t["cos"], t["sin"], positions=t.get("positions"), **kw, **k),),
                  lambda t: plain_rope(t, **kw))  # fmt: skip


def _gate_case(kind: str, tag: str, shape: tuple[int, ...], *, clamp=None, weights=False) -> OpCase:
    def make(gen, dtype):
        t = {"x": randn(gen, dtype, *shape) * 2}
        if weights:
            t["row_weight"] = torch.rand(shape[:-1], generator=gen, dtype=torch.float64).float()
        return t

    return OpCase(f"{kind}-{tag}", kind, make, ("x", *(("row_weight",) if weights else ())),
                  lambda t, **kw: (getattr(ops, kind)(t["x"], clamp=clamp, row_weight=t.get("row_weight"), **kw),),
                  lambda t: plain_gate(t, kind, clamp))  # fmt: skip


def _attention_case(tag: str, q: tuple[int, ...], k: tuple[int, ...], dv: int | None = None, *, cu=None, sink=False, mask=False,
                    causal=False, window=(None, None), lse=True) -> OpCase:  # fmt: skip
    def make(gen, dtype):
        t = {"q": randn(gen, dtype, *q), "k": randn(gen, dtype, *k), "v": randn(gen, dtype, *k[:-1], dv or k[-1])}
        if sink:
            t["sink"] = randn(gen, torch.float32, q[-2])
        if mask:
            t["mask"] = torch.rand((q[0], 1, q[1], k[1]), generator=gen) < 0.3
        if cu:
            t["cu_seqlens_q"], t["cu_seqlens_k"] = (torch.tensor(c, dtype=torch.int32) for c in cu)
        return t

    def ours(t, **kw):
        out = ops.attention(t["q"], t["k"], t["v"], causal=causal, window=window, sink=t.get("sink"), mask=t.get("mask"),
                            cu_seqlens_q=t.get("cu_seqlens_q"), cu_seqlens_k=t.get("cu_seqlens_k"), return_lse=lse, **kw)  # fmt: skip
        return out if lse else (out,)

    return OpCase(f"attention-{tag}", "sdpa", make, ("q", "k", "v", *(("sink",) if sink else ())), ours,
                  lambda t: plain_attention(t, causal=causal, window=window)[: 2 if lse else 1],
                  exponent=lambda t: _largest(plain_attention(t, causal=causal, window=window)[1]))  # fmt: skip


def _largest(x: torch.Tensor) -> float:
    x = x.detach()
    x = x[torch.isfinite(x)]
    return float(x.abs().max()) if x.numel() else 0.0


def _bda_case(tag: str, shape: tuple[int, ...], bias: bool) -> OpCase:
    def make(gen, dtype):
        t = {"x": randn(gen, dtype, *shape), "residual": randn(gen, dtype, *shape)}
        return {**t, "bias": randn(gen, dtype, shape[-1])} if bias else t

    return OpCase(f"bias_dropout_add-{tag}", "bias_dropout_add", make, ("x", "residual", *(("bias",) if bias else ())),
                  lambda t, **kw: (ops.bias_dropout_add(t["x"], t["residual"], bias=t.get("bias"), **kw),),
                  lambda t: ((t["x"] + t["bias"] if bias else t["x"]) + t["residual"],))  # fmt: skip


def _loss_case(tag: str, lead: tuple[int, ...], classes: int, dtype=torch.int64) -> OpCase:
    def make(gen, d):
        targets = torch.randint(0, classes, lead, generator=gen, dtype=dtype)
        if targets.numel() > 1:
            targets.view(-1)[0] = -100
        return {"logits": randn(gen, d, *lead, classes) * 3, "targets": targets}

    return OpCase(f"cross_entropy-{tag}", "cross_entropy", make, ("logits",),
                  lambda t, **kw: (ops.cross_entropy(t["logits"], t["targets"], **kw),), plain_cross_entropy,
                  exponent=lambda t: _largest(torch.logsumexp(t["logits"], -1)))  # fmt: skip


def _linear_loss_case(tag: str, lead: tuple[int, ...], classes: int, width: int, dtype=torch.int64, *, ignored: str = "first") -> OpCase:
    """``ignored``: the first target of several, or all."""

    def make(gen, d):
        targets = torch.randint(0, classes, lead, generator=gen, dtype=dtype)
        if ignored == "all":
            targets.fill_(-100)
        elif targets.numel() > 1:
            targets.view(-1)[0] = -100
        return {"x": randn(gen, d, *lead, width), "w": randn(gen, d, classes, width) * 3 / math.sqrt(width), "targets": targets}

    return OpCase(f"linear_cross_entropy-{tag}", "linear_cross_entropy", make, ("x", "w"),
                  lambda t, **kw: (ops.linear_cross_entropy(t["x"], t["w"], t["targets"], **kw),), plain_linear_cross_entropy,
                  exponent=lambda t: _largest(torch.logsumexp(F.linear(t["x"], t["w"]), -1)))  # fmt: skip


def _layout_case(op: str, tag: str, inputs: dict[str, tuple[int, ...]], outputs: tuple[str, ...], plain: Callable[..., tuple],
                 **attrs: int) -> OpCase:  # fmt: skip
    """An op that has no function of its own: a one-node plan. ``plain`` takes the inputs in order; the last two dims are static."""

    def make(gen, dtype):
        return {n: randn(gen, dtype, *shape) for n, shape in inputs.items()}

    def ours(t, *, engine=None, policy=None):
        given = tuple((n, "*t h! d!" if len(inputs[n]) > 2 else "*t d!", t[n]) for n in inputs)
        out = ops._call(op, tuple(sorted(attrs.items())), given, engine, policy, outputs)
        return out if isinstance(out, tuple) else (out,)

    return OpCase(f"{op}-{tag}", op, make, tuple(inputs), ours, lambda t: plain(*(t[n] for n in inputs)))


def _interleave_qkv(q, k, v):
    """Per KV group its queries, then its key and value, side by side."""
    groups = k.shape[-2]
    share = q.shape[-2] // groups
    rows = [torch.cat((q[..., g * share : (g + 1) * share, :].flatten(-2), k[..., g, :], v[..., g, :]), -1) for g in range(groups)]
    return (torch.cat(rows, -1),)


def _split_qkv(x, groups: int, share: int, d: int):
    rows = [c.split([d] * (share + 2), -1) for c in x.chunk(groups, -1)]
    q = torch.stack([h for row in rows for h in row[:share]], -2)
    return q, torch.stack([row[share] for row in rows], -2), torch.stack([row[share + 1] for row in rows], -2)


_QUANTIZED = ("data", "scale_inv", "data_t", "scale_inv_t", "amax")  # in the order in which ops.quantize returns them


def _quantize_case(tag: str, shape: tuple[int, ...], block: tuple[int, int], dtype: torch.dtype = torch.float8_e4m3fn, *, transposed=False, **kw) -> OpCase:
    """Inputs hold what breaks kernels, but for ``numbers``: then ordinary ones alone."""
    whole, numbers = block == quantized.TENSOR, kw.pop("numbers", False)

    def make(gen, d):
        x = randn(gen, d, *shape)
        t = {"x": x if numbers else quantized.hard(x)}
        return {**t, "scale": torch.rand(1, generator=gen) * 99 + 1} if whole else t

    def ours(t, **k):
        return ops.quantize(t["x"], scale=t.get("scale"), block=block, dtype=dtype, transposed=transposed, amax=whole, **kw, **k)

    def plain(t):
        made = quantized.plain_quantize(t["x"], block, dtype, scale=t.get("scale"), **kw)
        return tuple(made[p] for p in _QUANTIZED if p in made and (transposed or not p.endswith("_t")))

    return OpCase(f"quantize-{tag}", "quantize", make, (), ours, plain, (torch.float32, torch.bfloat16, torch.float16), exact=True)


def _dequantize_case(tag: str, shape: tuple[int, ...], block: tuple[int, int], dtype: torch.dtype = torch.float8_e4m3fn, layout: str = "row") -> OpCase:
    """From the transposed copy, whose width is known at run time alone. ``out`` says by its dtype what comes out."""

    def make(gen, d):
        x, scale = randn(gen, torch.float32, *shape), torch.rand(1, generator=gen) + 1
        x[..., ::7] *= 1e-3
        made = quantized.plain_quantize(x, block, dtype, layout=layout, scale=scale if block == quantized.TENSOR else None)
        return {"data": made["data_t"], "scale_inv": made.get("scale_inv_t", made["scale_inv"]), "out": torch.zeros((), dtype=d)}

    def ours(t, **k):
        return (ops.dequantize(t["data"], t["scale_inv"], block=block, layout=layout, dtype=t["out"].dtype, **k),)

    def plain(t):
        return (quantized.plain_dequantize(t["data"], t["scale_inv"], block, layout).to(t["out"].dtype),)

    return OpCase(f"dequantize-{tag}", "dequantize", make, (), ours, plain, (torch.float32, torch.bfloat16, torch.float16), exact=True)


CASES: tuple[OpCase, ...] = (
    *(c for name in ("rms_norm", "layer_norm") for c in (
        _norm_case(name, "plain", (5, 33)),
        _norm_case(name, "one_wide", (7, 1)),
        _norm_case(name, "odd_769", (7, 769)),
        _norm_case(name, "batched_residual", (2, 3, 64), residual=True),
        _norm_case(name, "bias_zero_centred", (3, 40), bias=True, zero=True),
        _norm_case(name, "fp32_weight_all", (2, 3, 5), bias=True, residual=True, zero=True, wdtype=torch.float32),
        _norm_case(name, "no_rows", (0, 16)),
        _norm_case(name, "vector", (24,)),
    )),
    _linear_case("plain", (9,), 16, 24, False),
    _linear_case("odd_bias", (3, 5), 7, 13, True),
    _linear_case("no_rows", (0,), 8, 16, True),
    _linear_case("one_row", (1,), 8, 16, False),
    _rope_case("half", (2, 7, 3, 16), 16),
    _rope_case("partial_interleaved", (2, 7, 3, 16), 8, interleaved=True),
    _rope_case("inverse", (2, 7, 3, 16), 16, inverse=True),
    _rope_case("packed_positions", (9, 2, 8), 8, positions="s"),
    _rope_case("batch_positions", (2, 5, 2, 8), 6, positions="bs", interleaved=True),
    _rope_case("shared_positions", (2, 5, 2, 8), 8, positions="s"),
    _rope_case("no_tokens", (0, 2, 8), 8),
    *(_gate_case(kind, "plain", (7, 38)) for kind in ("swiglu", "geglu", "gelu", "squared_relu")),
    _gate_case("swiglu", "clamp_weights", (2, 5, 32), clamp=1.0, weights=True),
    _gate_case("geglu", "weights", (2, 5, 32), weights=True),
    _gate_case("gelu", "clamp_weights", (5, 31), clamp=0.5, weights=True),
    _gate_case("squared_relu", "clamp", (5, 31), clamp=0.5),
    _gate_case("swiglu", "no_rows", (0, 32)),
    _quantize_case("tensor", (9, 48), quantized.TENSOR, numbers=True),
    _quantize_case("tensor_e5m2_transposed", (2, 7, 40), quantized.TENSOR, torch.float8_e5m2, transposed=True),
    _quantize_case("tensor_no_rows", (0, 16), quantized.TENSOR, transposed=True),
    _quantize_case("block", (9, 264), quantized.BLOCK),
    _quantize_case("block_odd", (5, 133), quantized.BLOCK, torch.float8_e5m2, power_of_two=True),
    _quantize_case("block_transposed", (2, 66, 136), quantized.BLOCK, transposed=True),
    _quantize_case("block_transposed_power", (130, 72), quantized.BLOCK, transposed=True, power_of_two=True),
    _quantize_case("block_vector", (24,), quantized.BLOCK),
    _quantize_case("block_no_rows", (0, 16), quantized.BLOCK, transposed=True),
    _quantize_case("mx", (9, 72), quantized.MX),
    _quantize_case("mx_odd_transposed", (35, 37), quantized.MX, torch.float8_e5m2, transposed=True),
    _quantize_case("mx_swizzled", (3, 200), quantized.MX, layout="swizzled"),
    _quantize_case("mx_swizzled_transposed", (2, 67, 136), quantized.MX, transposed=True, layout="swizzled"),
    _dequantize_case("tensor", (9, 48), quantized.TENSOR, torch.float8_e5m2),
    _dequantize_case("block", (135, 40), quantized.BLOCK),
    _dequantize_case("mx_odd", (37, 7), quantized.MX, torch.float8_e5m2),
    _dequantize_case("mx_swizzled", (2, 72, 40), quantized.MX, layout="swizzled"),
    _dequantize_case("no_rows", (0, 16), quantized.BLOCK),
    _attention_case("plain", (2, 9, 4, 16), (2, 9, 4, 16)),
    _attention_case("causal_gqa", (2, 17, 6, 32), (2, 17, 2, 32), causal=True, lse=False),
    _attention_case("causal_short_keys", (1, 7, 2, 16), (1, 4, 2, 16), causal=True),
    _attention_case("causal_long_keys", (1, 5, 2, 16), (1, 12, 1, 16), causal=True),
    _attention_case("window", (2, 19, 4, 16), (2, 19, 2, 16), window=(3, 2)),
    _attention_case("causal_window", (1, 19, 2, 16), (1, 23, 2, 16), causal=True, window=(4, None)),
    _attention_case("sink", (2, 8, 4, 16), (2, 8, 2, 16), causal=True, sink=True),
    _attention_case("mask", (2, 8, 4, 16), (2, 11, 2, 16), mask=True),
    _attention_case("mla_dims", (1, 9, 2, 48), (1, 9, 2, 48), 32, causal=True),
    _attention_case("odd_dim", (1, 5, 2, 11), (1, 5, 2, 11)),
    _attention_case("packed", (14, 4, 16), (16, 2, 16), cu=([0, 3, 8, 14], [0, 6, 11, 16]), causal=True),
    _attention_case("packed_empty_and_tail", (12, 4, 16), (15, 2, 16), cu=([0, 0, 3, 3, 9], [0, 4, 9, 12, 12]), causal=True),
    _attention_case("packed_sink_tail", (12, 4, 16), (15, 2, 16), cu=([0, 0, 3, 9], [0, 4, 9, 9]), causal=True, sink=True),
    _attention_case("packed_sink_window", (9, 4, 16), (9, 2, 16), cu=([0, 4, 9], [0, 4, 9]), causal=True, window=(2, None), sink=True),
    _bda_case("plain", (5, 24), False),
    _bda_case("bias", (2, 3, 33), True),
    _loss_case("plain", (6,), 11),
    _loss_case("batched_int32", (2, 3), 33, torch.int32),
    _loss_case("no_tokens", (0,), 11),
    _linear_loss_case("odd", (7,), 37, 13),
    _linear_loss_case("batched_int32", (9, 3), 64, 16, torch.int32),
    _linear_loss_case("one_token", (1,), 11, 8),
    _linear_loss_case("all_ignored", (5,), 11, 8, ignored="all"),
    _linear_loss_case("no_tokens", (0,), 11, 8),
    _layout_case("qkv_split", "grouped", {"x": (3, 2, 2 * 5 * 7)}, ("q", "k", "v"), lambda x: _split_qkv(x, 2, 3, 7),
                 groups=2, queries_per_group=3, head_dim=7),
    _layout_case("qkv_merge", "grouped", {"q": (3, 2, 6, 7), "k": (3, 2, 2, 7), "v": (3, 2, 2, 7)}, ("x",), _interleave_qkv),
    _layout_case("split", "uneven", {"x": (3, 2, 4, 11)}, ("a", "b"), lambda x: (x.narrow(-1, 0, 8), x.narrow(-1, 8, 3)), first=8),
    _layout_case("split", "no_rows", {"x": (0, 6)}, ("a", "b"), lambda x: (x.narrow(-1, 0, 1), x.narrow(-1, 1, 5)), first=1),
    _layout_case("concat", "uneven", {"a": (5, 3, 8), "b": (5, 3, 3)}, ("x",), lambda a, b: (torch.cat((a, b), -1),)),
    _layout_case("concat", "no_rows", {"a": (0, 8), "b": (0, 3)}, ("x",), lambda a, b: (torch.cat((a, b), -1),)),
    _layout_case("unflatten_heads", "plain", {"x": (5, 2, 33)}, ("y",), lambda x: (torch.stack(x.chunk(3, -1), -2),), heads=3),
    _layout_case("flatten_heads", "plain", {"x": (5, 2, 3, 11)}, ("y",), lambda x: (torch.cat(x.unbind(-2), -1),)),
    _layout_case("expand_heads", "plain", {"x": (5, 2, 1, 11)}, ("y",), lambda x: (torch.cat([x] * 3, -2),), heads=3),
    _layout_case("sum_heads", "plain", {"x": (5, 2, 3, 11)}, ("y",), lambda x: (x.sum(-2, keepdim=True),)),
    _layout_case("sum_heads", "no_rows", {"x": (0, 3, 11)}, ("y",), lambda x: (x.sum(-2, keepdim=True),)),
    *moe.CASES,
)  # fmt: skip
# sizes that reach more than one tile of a kernel
LARGE: tuple[OpCase, ...] = (
    _norm_case("rms_norm", "large", (1031, 1544)),
    _norm_case("layer_norm", "large", (1031, 1544), bias=True),
    _linear_case("large", (517,), 264, 1032, True),
    _gate_case("swiglu", "large", (1031, 1544)),
    _gate_case("swiglu", "large_clamp_weights", (1031, 1544), clamp=1.0, weights=True),
    _quantize_case("large_tensor", (1031, 1544), quantized.TENSOR, transposed=True),
    _quantize_case("large_block", (1031, 1544), quantized.BLOCK),
    _quantize_case("large_block_transposed", (1032, 1544), quantized.BLOCK, transposed=True),
    _quantize_case("large_block_odd_rows", (1031, 1544), quantized.BLOCK, transposed=True, power_of_two=True),
    _quantize_case("large_mx", (1031, 1544), quantized.MX, transposed=True),
    _quantize_case("large_mx_swizzled", (1032, 1544), quantized.MX, transposed=True, layout="swizzled"),
    _dequantize_case("large_block", (1032, 1544), quantized.BLOCK),
    _dequantize_case("large_mx_swizzled", (1031, 1544), quantized.MX, layout="swizzled"),
    _attention_case("large_causal", (2, 257, 8, 64), (2, 257, 2, 64), causal=True),
    _attention_case("large_128", (1, 300, 4, 128), (1, 300, 4, 128)),
    _attention_case("large_192_128", (1, 257, 4, 192), (1, 257, 4, 192), 128, causal=True),
    _attention_case("large_256", (1, 200, 2, 256), (1, 200, 1, 256), causal=True),
    _attention_case("large_short_keys", (2, 300, 4, 64), (2, 130, 2, 64), causal=True),
    _attention_case("large_window", (1, 400, 4, 64), (1, 400, 2, 64), causal=True, window=(100, 0)),
    _attention_case("large_packed", (700, 4, 64), (900, 2, 64), cu=([0, 1, 300, 300, 700], [0, 200, 500, 501, 900]), causal=True),
    _attention_case("no_queries", (2, 0, 4, 64), (2, 8, 4, 64)),
    _attention_case("no_keys", (2, 8, 4, 64), (2, 0, 4, 64)),
    _loss_case("large", (300,), 32001),
    _linear_loss_case("large", (2, 259), 4104, 264),
    *moe.LARGE,
)
BY_ID = {c.id: c for c in (*CASES, *LARGE)}


# ---- running a row --------------------------------------------------------------------------------------------------


def place(t: Tensors, device: str, diff: tuple[str, ...], how: str = "plain") -> tuple[Tensors, list]:
    """Inputs as leaves on a device. ``how``: plain; strided (every second element of a wider buffer, along the last
    dim); offset (one element into a buffer between sentinels). Returns (inputs, guard pairs)."""
    out, guards = {}, []
    for name, x in t.items():
        x = x.to(device)
        if x.is_floating_point() and how == "strided" and x.dim():
            wide = oracle.sentinels((*x.shape[:-1], 2 * x.shape[-1]), x.dtype, device)
            wide[..., ::2] = x
            x = wide[..., ::2]
        elif x.is_floating_point() and how == "offset":
            x, buffer = oracle.guarded(x)
            guards.append((x, buffer))
        out[name] = x.detach().requires_grad_(name in diff)
    return out, guards


def two_rows_far_apart(device: str, width: int, gen: torch.Generator) -> torch.Tensor:
    """[2, width] whose rows are rows 0 and 300000 of a tensor with rows of 7200: the second starts at element 2160000000, which
    32 bits wrap to -2134967296. On a CPU the memory between them is never touched."""
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GiB of free GPU memory")
    row = 300000 * 7200
    view = torch.empty(row + width, dtype=torch.bfloat16, device=device).as_strided((2, width), (row, 1))
    return view.copy_(torch.randn(2, width, generator=gen))


def gradients(case: OpCase, call: Callable[[Tensors], tuple], t: Tensors, douts: list[torch.Tensor] | None, gen=None,
              upto: int | None = None, how: str = "plain"):  # fmt: skip
    """(outputs, cotangents, gradients by name); cotangents are drawn where None, and lie in memory as ``how`` says (see
    ``place``). ``upto``: only that many outputs get one."""
    outs = call(t)
    if douts is None:
        douts = [torch.randn(o.shape, generator=gen, dtype=torch.float64) for o in outs]
        douts = [torch.where(torch.isfinite(o.detach().cpu()), d, 0.0) for o, d in zip(outs, douts, strict=True)]
    given = [place({"d": d.to(o.dtype)}, str(o.device), (), how)[0]["d"] for d, o in zip(douts, outs, strict=True)]
    pairs = [(o, d) for o, d in list(zip(outs, given, strict=True))[:upto] if o.requires_grad]
    grads = torch.autograd.grad([o for o, _ in pairs], [t[n] for n in case.diff], [d for _, d in pairs], allow_unused=True)
    return outs, douts, {n: torch.zeros_like(t[n]) if g is None else g for n, g in zip(case.diff, grads, strict=True)}


def hold(case: OpCase, device: str, dtype: torch.dtype, how: str = "plain", seed: int = 0, upto: int | None = None,
         **kw) -> None:  # fmt: skip
    """Run a row on an engine and hold outputs and gradients to the oracle's rule. Raises Declined with the reason."""
    gen = torch.Generator().manual_seed(seed)
    inputs = case.make(gen, dtype)
    if case.exact:
        return _hold_bits(case, inputs, device, how, **kw)
    exact = {n: x.double().requires_grad_(n in case.diff) if x.is_floating_point() else x for n, x in inputs.items()}
    truth, douts, truth_grads = gradients(case, case.plain, exact, None, gen)
    rounded = [d.to(dtype).double() for d in douts]  # what every dtype is fed
    truth, _, truth_grads = gradients(case, case.plain, exact, rounded, upto=upto)
    peers = {n: x.to(device).requires_grad_(n in case.diff) for n, x in inputs.items()}
    peer, _, peer_grads = gradients(case, case.peer or case.plain, peers, rounded, upto=upto)
    # the backward rebuilds p = exp(x - LSE) from a saved float32 LSE: half an ulp of the LSE is that much relative error of
    # p, and p enters a gradient in a product and in a difference, at most twice
    relative = oracle.ulp(torch.float32, case.exponent(exact)) if case.exponent else 0.0
    t, guards = place(inputs, device, case.diff, how)
    before = {n: x.detach().clone() for n, x in t.items()}
    oracle.poison(*(torch.empty(o.shape, dtype=dtype, device=device) for o in truth))
    try:
        outs, _, grads = gradients(case, lambda t: case.ours(t, **kw), t, rounded, upto=upto, how=how)
    except PlanError as error:
        raise Declined(declined(error)) from None
    for i, (o, r, p) in enumerate(zip(outs, truth, peer, strict=True)):
        assert o.dtype == p.dtype, f"{case.id}: output {i} is {o.dtype}, expected {p.dtype}"
        oracle.compare(o, r, p, f"{case.id} output {i}")
    for n in case.diff:
        assert grads[n].dtype == inputs[n].dtype, f"{case.id}: d{n} is {grads[n].dtype}, expected {inputs[n].dtype}"
        oracle.compare(grads[n], truth_grads[n], peer_grads[n], f"{case.id} d{n}", relative)
    for n, x in t.items():
        assert torch.equal(x.detach(), before[n]), f"{case.id}: input {n} was overwritten"
    for inner, buffer in guards:
        oracle.check_guards(inner, buffer, case.id)


def _hold_bits(case: OpCase, inputs: Tensors, device: str, how: str, **kw) -> None:
    """``hold`` for a row whose outputs are exact."""
    expected = case.plain(inputs)
    t, guards = place(inputs, device, (), how)
    before = {n: x.clone() for n, x in t.items()}
    oracle.poison(*(torch.empty(o.shape, dtype=o.dtype, device=device) for o in expected))
    try:
        outs = case.ours(t, **kw)
    except PlanError as error:
        raise Declined(declined(error)) from None
    for i, (o, e) in enumerate(zip(outs, expected, strict=True)):
        oracle.same_bits(o, e, f"{case.id} output {i}")
    for n, x in t.items():
        oracle.same_bits(x, before[n], f"{case.id}: input {n} was overwritten")
    for inner, buffer in guards:
        oracle.check_guards(inner, buffer, case.id)
