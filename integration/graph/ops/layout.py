"""Ops that move values and change none, and the sum that is the gradient of one of them.

Split and merge of a fused QKV projection in Megatron's layout: per KV group, its queries, then its key, then its value.
Split and concatenation along the last dim; heads as a dim of their own and back; one head spread over all.
"""

from __future__ import annotations

import torch

from ..ir import TensorSpec
from .table import REQUIRED, Op, acc, demand, ports, same_dtype


def _split_infer(specs, attrs):
    x, g, q, d = specs["x"], attrs["groups"], attrs["queries_per_group"], attrs["head_dim"]
    width = g * (q + 2) * d
    demand(x.shape[-1] == width, "qkv_split", "x", x,
           f"its last dim must be groups * (queries_per_group + 2) * head_dim = {g} * ({q} + 2) * {d} = {width}")  # fmt: skip
    lead = x.shape[:-1]
    kv = TensorSpec((*lead, g, d), x.dtype)
    return {"q": TensorSpec((*lead, g * q, d), x.dtype), "k": kv, "v": kv}


def _split_reference(t, attrs, want):
    x, g, n, d = t["x"], attrs["groups"], attrs["queries_per_group"], attrs["head_dim"]
    mixed = x.reshape(*x.shape[:-1], g, n + 2, d)
    views = {"k": mixed.select(-2, n), "v": mixed.select(-2, n + 1)}
    if "q" in want:  # a copy where several groups have several queries
        views["q"] = mixed.narrow(-2, 0, n).reshape(*x.shape[:-1], g * n, d)
    return views


def _split_gradient(g):
    grads = {p: g.out(p) or g.zeros(p) for p in ("q", "k", "v")}
    return {"x": g.op("qkv_merge", **grads)}


def _merge_infer(specs, attrs):
    q, k, v = specs["q"], specs["k"], specs["v"]
    same_dtype("qkv_merge", q=q, k=k, v=v)
    demand(k.shape == v.shape and q.shape[:-2] == k.shape[:-2] and q.shape[-1] == k.shape[-1], "qkv_merge", "k, v", (k, v),
           f"must share leading dims and head dim with q {q}")  # fmt: skip
    hq, hk, d = q.shape[-2], k.shape[-2], q.shape[-1]
    demand(hk > 0 and hq % hk == 0, "qkv_merge", "heads", (hq, hk), "query heads must be a multiple of key heads")
    return {"x": TensorSpec((*q.shape[:-2], (hq + 2 * hk) * d), q.dtype)}


def _merge_reference(t, attrs, want):
    q, k, v = t["q"], t["k"], t["v"]
    lead, g, d = q.shape[:-2], *k.shape[-2:]
    mixed = torch.cat((q.reshape(*lead, g, q.shape[-2] // g, d), k.reshape(*lead, g, 1, d), v.reshape(*lead, g, 1, d)), dim=-2)
    return {"x": mixed.reshape(*lead, (q.shape[-2] + 2 * g) * d)}


def _merge_gradient(g):
    hq, hk, d = g.spec("q").shape[-2], g.spec("k").shape[-2], g.spec("q").shape[-1]
    q, k, v = g.op("qkv_split", x=g.out("x"), groups=hk, queries_per_group=hq // hk, head_dim=d)
    return {"q": q, "k": k, "v": v}


# ---- split and concat along the last dim -----------------------------------------------------------------------------


def _part_infer(specs, attrs):
    x, first = specs["x"], attrs["first"]
    width = x.shape[-1]
    ok = isinstance(width, int) and isinstance(first, int) and 0 < first < width
    demand(ok, "split", "first", first, f"must lie between 1 and the last dim of x {x}, less one")
    return {"a": TensorSpec((*x.shape[:-1], first), x.dtype), "b": TensorSpec((*x.shape[:-1], width - first), x.dtype)}


def _part_reference(t, attrs, want):
    return {"a": t["x"][..., : attrs["first"]], "b": t["x"][..., attrs["first"] :]}


def _part_gradient(g):
    return {"x": g.op("concat", a=g.out("a") or g.zeros("a"), b=g.out("b") or g.zeros("b"))}


def _concat_infer(specs, attrs):
    a, b = specs["a"], specs["b"]
    demand(a.dtype == b.dtype, "concat", "dtype of b", b.dtype, f"must equal that of a ({a.dtype})", "cast one of them")
    ok = a.rank >= 1 and a.shape[:-1] == b.shape[:-1] and isinstance(a.shape[-1], int) and isinstance(b.shape[-1], int)
    demand(ok, "concat", "b", b, f"must share all dims but the last, which is a number, with a {a}")
    return {"x": TensorSpec((*a.shape[:-1], a.shape[-1] + b.shape[-1]), a.dtype)}


def _concat_reference(t, attrs, want):
    return {"x": torch.cat((t["a"], t["b"]), dim=-1)}


def _concat_gradient(g):
    a, b = g.op("split", x=g.out("x"), first=g.spec("a").shape[-1])
    return {"a": a, "b": b}


# ---- heads: [..., heads * d] and [..., heads, d]; one head for all -----------------------------------------------------


def _unflatten_infer(specs, attrs):
    x, heads = specs["x"], attrs["heads"]
    width = x.shape[-1]
    ok = isinstance(heads, int) and heads > 0 and isinstance(width, int) and width % heads == 0
    demand(ok, "unflatten_heads", "heads", heads, f"must be positive and divide the last dim of x {x}")
    return {"y": TensorSpec((*x.shape[:-1], heads, width // heads), x.dtype)}


def _unflatten_reference(t, attrs, want):
    x = t["x"]
    return {"y": x.reshape(*x.shape[:-1], attrs["heads"], x.shape[-1] // attrs["heads"])}


def _flatten_infer(specs, attrs):
    x = specs["x"]
    ok = x.rank >= 2 and all(isinstance(d, int) for d in x.shape[-2:])
    demand(ok, "flatten_heads", "x", x, "must have dims [..., heads, head_dim], the last two of them numbers")
    return {"y": TensorSpec((*x.shape[:-2], x.shape[-2] * x.shape[-1]), x.dtype)}


def _flatten_reference(t, attrs, want):
    x = t["x"]
    return {"y": x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])}


def _expand_infer(specs, attrs):
    x, heads = specs["x"], attrs["heads"]
    demand(x.rank >= 2 and x.shape[-2] == 1, "expand_heads", "x", x, "must have dims [..., 1, head_dim]")
    demand(isinstance(heads, int) and heads > 0, "expand_heads", "heads", heads, "must be a positive number")
    return {"y": TensorSpec((*x.shape[:-2], heads, x.shape[-1]), x.dtype)}


def _expand_reference(t, attrs, want):
    x = t["x"]
    return {"y": x.expand(*x.shape[:-2], attrs["heads"], x.shape[-1])}


def _sum_infer(specs, attrs):
    x = specs["x"]
    ok = x.rank >= 2 and x.is_float and isinstance(x.shape[-2], int)
    demand(ok, "sum_heads", "x", x, "must be floating point with dims [..., heads, head_dim], heads a number")
    return {"y": TensorSpec((*x.shape[:-2], 1, x.shape[-1]), x.dtype)}


def _sum_reference(t, attrs, want):
    return {"y": acc(t["x"]).sum(-2, keepdim=True).to(t["x"].dtype)}


def _heads_gradient(op: str, heads: bool):
    """The gradient of one of the four is another one of them; ``heads``: it needs their number."""

    def gradient(g):
        attrs = {"heads": g.spec("x").shape[-2]} if heads else {}
        return {"x": g.op(op, x=g.out("y"), **attrs)}

    return gradient


def _zeros_reference(t, attrs, want):
    return {"y": torch.zeros_like(t["like"])}


_QKV = {"groups": REQUIRED, "queries_per_group": REQUIRED, "head_dim": REQUIRED}

OPS = (
    Op("qkv_split", ports("x"), ports("q", "k", "v"), _split_infer, _split_reference, attrs=_QKV,
       gradient=_split_gradient, kind="layout", aliases=True),
    Op("qkv_merge", ports("q", "k", "v"), ports("x"), _merge_infer, _merge_reference, gradient=_merge_gradient,
       kind="layout"),
    Op("split", ports("x"), ports("a", "b"), _part_infer, _part_reference, attrs={"first": REQUIRED},
       gradient=_part_gradient, kind="layout", aliases=True),
    Op("concat", ports("a", "b"), ports("x"), _concat_infer, _concat_reference, gradient=_concat_gradient,
       kind="layout"),
    Op("unflatten_heads", ports("x"), ports("y"), _unflatten_infer, _unflatten_reference, attrs={"heads": REQUIRED},
       gradient=_heads_gradient("flatten_heads", False), kind="layout", aliases=True),
    Op("flatten_heads", ports("x"), ports("y"), _flatten_infer, _flatten_reference,
       gradient=_heads_gradient("unflatten_heads", True), kind="layout", aliases=True),
    Op("expand_heads", ports("x"), ports("y"), _expand_infer, _expand_reference, attrs={"heads": REQUIRED},
       gradient=_heads_gradient("sum_heads", False), kind="layout", aliases=True),
    Op("sum_heads", ports("x"), ports("y"), _sum_infer, _sum_reference, gradient=_heads_gradient("expand_heads", True),
       flops=lambda i, o, a: i["x"].numel(), kind="reduction"),
    Op("zeros_like", ports("like"), ports("y"), lambda s, a: {"y": s["like"]}, _zeros_reference, kind="layout"),
)  # fmt: skip
