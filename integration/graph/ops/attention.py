"""sdpa: softmax attention with grouped heads, causal and sliding windows, sinks, packed sequences and dropout.

Conventions: causal is bottom-right aligned; a window (L, R) keeps keys i + Sk - Sq - L ... i + Sk - Sq + R inclusive;
``lse`` is the natural log of the softmax denominator, the sink included; a row that sees no key gives 0 and LSE -inf
(with a sink: the sink). Packed rows behind the last segment give 0, LSE -inf and no gradient, with a sink too.
The backward follows Dao, "FlashAttention-2", 2023 (delta = rowsum(dO * O), less dLSE).
"""

from __future__ import annotations

import itertools
import math

import torch

from ..ir import TensorSpec
from .elementwise import check_dropout, keep_mask
from .table import Op, acc, acc_dtype, boolean, demand, finite, ports, same_dtype, size_product

ATTRS = {
    "layout": "bshd", "causal": False, "window": (None, None), "scale": None, "dropout": 0.0,
    "max_seqlen_q": None, "max_seqlen_k": None,
}  # fmt: skip
# where (batch, sequence) stand in each layout; packed tensors are [tokens, heads, head_dim]
_AXES = {"bshd": (0, 1), "sbhd": (1, 0), "thd": (None, 0)}


def check_heads(op: str, hq: int, hk: int) -> None:
    demand(hk > 0 and hq > 0 and hq % hk == 0, op, "heads", f"(query {hq}, key {hk})",
           f"query heads ({hq}) must be a positive multiple of key heads ({hk})",
           "change num_attention_heads or num_query_groups")  # fmt: skip


def _infer(specs, attrs):
    op, q, k, v, layout = "sdpa", specs["q"], specs["k"], specs["v"], attrs["layout"]
    demand(layout in _AXES, op, "layout", layout, f"must be one of {sorted(_AXES)}")
    same_dtype(op, q=q, k=k, v=v)
    rank = 3 if layout == "thd" else 4
    for name, s in (("q", q), ("k", k), ("v", v)):
        demand(s.rank == rank, op, name, s, f"layout {layout} needs {rank} dims")
    check_heads(op, q.shape[-2], k.shape[-2])
    demand(k.shape[:-1] == v.shape[:-1], op, "v", v, f"must share all dims but the last with k {k}")
    demand(q.shape[-1] == k.shape[-1], op, "k", k, f"must share the head dim of q {q}")
    demand(q.shape[-1] != 0, op, "q", q, "its head dim must be at least 1")
    check_dropout(op, "dropout", specs, attrs)
    _check_attrs(op, attrs)
    if layout == "thd":
        demand("cu_seqlens_q" in specs and "cu_seqlens_k" in specs, op, "cu_seqlens_q, cu_seqlens_k", None,
               "packed inputs need cumulative lengths")  # fmt: skip
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            c = specs[name]
            demand(c.rank == 1 and c.dtype in ("int32", "int64"), op, name, c, "must be a vector of int32 or int64")
        demand("mask" not in specs, op, "mask", specs.get("mask"), "packed inputs take no mask")
    else:
        b, _ = _AXES[layout]
        demand(q.shape[b] == k.shape[b], op, "k", k, f"must share the batch size of q {q}")
    if "sink" in specs:
        demand(specs["sink"].shape == (q.shape[-2],), op, "sink", specs["sink"], f"one value per query head ({q.shape[-2]})")
    if "mask" in specs:
        m, s = specs["mask"], _AXES[layout][1]
        want = ((1, q.shape[_AXES[layout][0]]), (1, q.shape[-2]), (q.shape[s],), (k.shape[s],))
        ok = m.dtype == "bool" and m.rank == 4 and all(d in allowed for d, allowed in zip(m.shape, want, strict=True))
        demand(ok, op, "mask", m, "must be bool [1 or batch, 1 or query heads, query length, key length], True hides a pair")
    return {"out": TensorSpec((*q.shape[:-1], v.shape[-1]), q.dtype), "lse": lse_spec(q, attrs)}


def _check_attrs(op: str, attrs) -> None:
    causal, window = attrs["causal"], attrs["window"]
    boolean(op, "causal", causal)
    sides = isinstance(window, tuple) and len(window) == 2 and all(w is None or (type(w) is int and w >= 0) for w in window)
    demand(sides, op, "window", window, "must be a tuple (left, right); each side is None (open) or an int of at least 0")
    if attrs["scale"] is not None:
        finite(op, "softmax_scale", attrs["scale"])


def _check(t, shape, attrs):
    for side in ("q", "k"):
        if f"cu_seqlens_{side}" in t:
            check_cu_seqlens(side, t[f"cu_seqlens_{side}"], shape(side)[0], None)


def check_cu_seqlens(side: str, cu: torch.Tensor, tokens: int | None, longest: int | None) -> None:
    """Refuses cumulative lengths ``cu`` [segments + 1] of side "q" or "k" that do not start at 0, decrease, end beyond ``tokens``
    or hold a segment of more than ``longest`` tokens. Reads the values: a host sync where they lie on a GPU."""
    name, values = f"cu_seqlens_{side}", cu.tolist()
    if not values or values[0] != 0:
        first = f"{name}[0] = {values[0]}" if values else f"{name} is empty"
        raise ValueError(f"attention: {first}: must be 0; prepend a 0 to the cumulative lengths")
    for i, (a, b) in enumerate(itertools.pairwise(values)):
        if b < a:
            raise ValueError(f"attention: {name}[{i + 1}] = {b} after {a}: must not decrease; pass cumulative ends, not lengths")
        if longest is not None and b - a > longest:
            raise ValueError(f"attention: segment {i} of {name} has {b - a} tokens: longer than max_seqlen_{side} = {longest}; "
                             "pass the longest segment's length")  # fmt: skip
    if tokens is not None and values[-1] > tokens:
        raise ValueError(f"attention: {name}[-1] = {values[-1]}: beyond the tensor's {tokens} tokens; pass the lengths of these tensors")


def lse_spec(q: TensorSpec, attrs) -> TensorSpec:
    """[b, h, s], or [h, t] for packed inputs."""
    b, s = _AXES[attrs["layout"]]
    lead = () if b is None else (q.shape[b],)
    return TensorSpec((*lead, q.shape[-2], q.shape[s]), acc_dtype(q))


def softmax_scale(attrs, head_dim: int) -> float:
    return attrs["scale"] if attrs["scale"] is not None else 1.0 / math.sqrt(head_dim)


def _bhsd(x: torch.Tensor, layout: str) -> torch.Tensor:
    """[b, h, s, d] view; packed tensors become one batch."""
    if layout == "bshd":
        return x.permute(0, 2, 1, 3)
    return x.permute(1, 2, 0, 3) if layout == "sbhd" else x.permute(1, 0, 2).unsqueeze(0)


def _from_bhsd(x: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "bshd":
        return x.permute(0, 2, 1, 3)
    return x.permute(2, 0, 1, 3) if layout == "sbhd" else x.squeeze(0).permute(1, 0, 2)


def _segments(cu: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(segment, position in it, its length) of every token; tokens past the last end get segment -1."""
    cu = cu.to(torch.int64)
    index = torch.arange(tokens, device=cu.device)
    if cu.numel() < 2:  # no segment at all
        return torch.full_like(index, -1), index, torch.zeros_like(index)
    segment = torch.searchsorted(cu, index, right=True) - 1
    inside = segment < cu.numel() - 1
    safe = segment.clamp(max=cu.numel() - 2)
    return torch.where(inside, segment, -1), index - cu[safe], (cu[1:] - cu[:-1])[safe]


def hidden_pairs(t, attrs, sq: int, sk: int, device) -> torch.Tensor | None:
    """Boolean [.., sq, sk] of the (query, key) pairs that the softmax does not see, or None if it sees all."""
    if attrs["layout"] == "thd":
        seg_q, pos_q, len_q = _segments(t["cu_seqlens_q"], sq)
        seg_k, pos_k, len_k = _segments(t["cu_seqlens_k"], sk)
        lengths_k = (t["cu_seqlens_k"][1:] - t["cu_seqlens_k"][:-1]).to(torch.int64)
        own_k = lengths_k[seg_q.clamp(min=0)] if lengths_k.numel() else torch.zeros_like(pos_q)
        hidden = (seg_q[:, None] != seg_k[None, :]) | (seg_q[:, None] < 0)
        row, col = (pos_q + own_k - len_q)[:, None], pos_k[None, :]
    else:
        hidden = None
        row = torch.arange(sq, device=device)[:, None] + (sk - sq)
        col = torch.arange(sk, device=device)[None, :]
    left, right = attrs["window"]
    if attrs["causal"]:
        right = 0 if right is None else min(right, 0)
    for side in ((col > row + right) if right is not None else None, (col < row - left) if left is not None else None):
        if side is not None:
            hidden = side if hidden is None else hidden | side
    if "mask" in t:
        hidden = t["mask"] if hidden is None else hidden | t["mask"]
    return hidden


def _scores(t, attrs):
    layout = attrs["layout"]
    q, k, v = (_bhsd(acc(t[n]), layout) for n in ("q", "k", "v"))
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    s = (q @ k.transpose(-1, -2)) * softmax_scale(attrs, q.shape[-1])
    hidden = hidden_pairs(t, attrs, q.shape[2], k.shape[2], q.device)
    if hidden is not None:
        s = s.masked_fill(hidden, float("-inf"))
    return q, k, v, s, groups


def _without_tail(t, attrs):
    """``t`` with zeros in the rows behind the last segment, which may hold anything: a hidden pair's weight of 0 would not
    hide a NaN."""
    if attrs["layout"] != "thd":
        return t
    ends = {"q": "cu_seqlens_q", "out": "cu_seqlens_q", "dout": "cu_seqlens_q", "k": "cu_seqlens_k", "v": "cu_seqlens_k"}
    inside = {n: (torch.arange(t[n].shape[0], device=t[n].device) < t[cu][-1]).view(-1, 1, 1) for n, cu in ends.items() if n in t}
    return {n: torch.where(inside[n], x, 0) if n in inside else x for n, x in t.items()}


def _reference(t, attrs, want):
    t = _without_tail(t, attrs)
    _, _, v, s, _ = _scores(t, attrs)
    sink = acc(t["sink"]).to(s.dtype).view(1, -1, 1) if "sink" in t else None
    m = s.detach().amax(-1) if s.shape[-1] else s.new_full(s.shape[:-1], float("-inf"))
    if sink is not None:
        m = torch.maximum(m, sink.detach().expand_as(m))
    shift = torch.where(m == float("-inf"), 0.0, m)
    p = torch.exp(s - shift.unsqueeze(-1))
    total = p.sum(-1)
    if sink is not None:
        total = total + torch.exp(torch.where(sink.isinf() & (sink == shift), 0.0, sink - shift))
    seen = total > 0
    safe = torch.where(seen, total, 1.0)
    lse = torch.where(seen, torch.log(safe) + shift, float("-inf"))
    if sink is not None and attrs["layout"] == "thd":  # rows of no segment see not even the sink
        lse = lse.masked_fill(torch.arange(lse.shape[-1], device=lse.device) >= t["cu_seqlens_q"][-1], float("-inf"))
    p = p / safe.unsqueeze(-1)
    if attrs["dropout"] > 0:
        keep = keep_mask(tuple(p.shape), attrs["dropout"], t["seed"], t["offset"])
        p = torch.where(keep, p / (1.0 - attrs["dropout"]), 0.0)
    out = _from_bhsd(p @ v, attrs["layout"]).contiguous().to(t["q"].dtype)
    return {"out": out, "lse": lse.squeeze(0) if attrs["layout"] == "thd" else lse}


def _gradient(g):
    dout, dlse = g.out("out"), g.out("lse")
    if dout is None:
        dout = g.zeros("out")
    names = [p for p in ("q", "k", "v", "sink") if g.needs(p)]
    forward = {p: g.value(p) for p in ("q", "k", "v", "sink", "cu_seqlens_q", "cu_seqlens_k", "mask", "seed", "offset") if g.has(p)}
    attrs = {k: g.attr(k) for k in ATTRS}
    outs = g.op("sdpa_bwd", want=[f"d{n}" for n in names], dout=dout, dlse=dlse, out=g.value("out"), lse=g.value("lse"),
                **forward, **attrs)  # fmt: skip
    return dict(zip(names, outs if len(names) > 1 else (outs,), strict=True))


def _bwd_infer(specs, attrs):
    return {f"d{n}": specs[n] for n in ("q", "k", "v", "sink") if n in specs}


def _bwd_reference(t, attrs, want):
    layout, t = attrs["layout"], _without_tail(t, attrs)
    q, k, v, s, groups = _scores(t, attrs)
    dout, out = _bhsd(acc(t["dout"]), layout), _bhsd(acc(t["out"]), layout)
    lse = (t["lse"].unsqueeze(0) if layout == "thd" else t["lse"]).to(s.dtype)
    finite = torch.where(lse.isinf(), 0.0, lse)  # a row without keys has only -inf scores: p = 0 whatever the shift
    p = torch.exp(s - finite.unsqueeze(-1))
    p = torch.where((lse == float("inf")).unsqueeze(-1), 0.0, p)
    delta = (dout * out).sum(-1)
    if "dlse" in t:
        dlse = t["dlse"].unsqueeze(0) if layout == "thd" else t["dlse"]
        delta = delta - torch.where(lse.isinf(), 0.0, dlse.to(s.dtype))
    dp, pd = dout @ v.transpose(-1, -2), p
    if attrs["dropout"] > 0:
        keep = keep_mask(tuple(p.shape), attrs["dropout"], t["seed"], t["offset"])
        scale = 1.0 / (1.0 - attrs["dropout"])
        dp, pd = torch.where(keep, dp * scale, 0.0), torch.where(keep, p * scale, 0.0)
    dv = pd.transpose(-1, -2) @ dout
    ds = p * (dp - delta.unsqueeze(-1)) * softmax_scale(attrs, q.shape[-1])
    dq, dk = ds @ k, ds.transpose(-1, -2) @ q

    def ungroup(x):
        return x if groups == 1 else x.unflatten(1, (-1, groups)).sum(2)

    grads = {"dq": dq, "dk": ungroup(dk), "dv": ungroup(dv)}
    result = {n: _from_bhsd(grads[n], layout).contiguous().to(t[n[1:]].dtype) for n in grads if n in want}
    if "dsink" in want:
        sink = acc(t["sink"]).to(s.dtype).view(1, -1, 1)
        p_sink = torch.where(lse == float("inf"), 1.0, torch.exp(sink - finite))
        p_sink = torch.where(lse == float("-inf"), 0.0, p_sink)
        result["dsink"] = -(p_sink * delta).sum((0, 2)).to(t["sink"].dtype)
    return result


def pairs(q: TensorSpec, k: TensorSpec, attrs) -> float:
    """(query, key) pairs that the softmax sees, per head: what the flops of attention count."""
    b, s = _AXES[attrs["layout"]]
    batch = 1 if b is None else size_product((q.shape[b],))
    sq, sk = (size_product((x.shape[s],)) for x in (q, k))
    longest_q, longest_k = attrs["max_seqlen_q"], attrs["max_seqlen_k"]
    if b is None and isinstance(longest_q, int) and isinstance(longest_k, int) and longest_q > 0:
        batch, sq, sk = max(sq / longest_q, 1.0), min(longest_q, sq), min(longest_k, sk)
    left, right = attrs["window"]
    if attrs["causal"]:
        right = 0
    if left is not None and right is not None:
        return batch * sq * min(sk, left + right + 1)
    return batch * sq * sk * (0.5 if attrs["causal"] and sq <= sk and sq > 1 else 1.0)


def _flops(products: int):
    def flops(i, o, a):
        return int(products * pairs(i["q"], i["k"], a) * size_product(i["q"].shape[-2:-1]) * (i["q"].shape[-1] + i["v"].shape[-1]))

    return flops


_EXTRA = ("sink?", "cu_seqlens_q?", "cu_seqlens_k?", "mask?", "seed?", "offset?")

OPS = (
    Op("sdpa", ports("q", "k", "v", *_EXTRA), ports("out", "lse?"), _infer, _reference, attrs=ATTRS, gradient=_gradient,
       flops=_flops(2), check=_check, kind="attention", differentiable=frozenset({"q", "k", "v", "sink"})),
    Op("sdpa_bwd", ports("dout", "dlse?", "out", "lse", "q", "k", "v", *_EXTRA), ports("dq?", "dk?", "dv?", "dsink?"),
       _bwd_infer, _bwd_reference, attrs=ATTRS, flops=_flops(5), kind="attention"),
)  # fmt: skip

