"""Split and merge of a fused QKV projection in Megatron's layout: per KV group, its queries, then its key, then its value."""

from __future__ import annotations

import torch

from ..ir import TensorSpec
from .table import Op, demand, ports, same_dtype


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
    mixed = x.reshape(*x.shape[:-1], g, (n + 2) * d)
    q, k, v = mixed.split([n * d, d, d], dim=-1)
    return {"q": q.reshape(*x.shape[:-1], g * n, d), "k": k, "v": v}


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
    g = k.shape[-2]
    lead = q.shape[:-2]
    mixed = torch.cat((q.reshape(*lead, g, -1), k, v), dim=-1)
    return {"x": mixed.reshape(*lead, g * mixed.shape[-1])}


def _merge_gradient(g):
    hq, hk, d = g.spec("q").shape[-2], g.spec("k").shape[-2], g.spec("q").shape[-1]
    q, k, v = g.op("qkv_split", x=g.out("x"), groups=hk, queries_per_group=hq // hk, head_dim=d)
    return {"q": q, "k": k, "v": v}


def _zeros_reference(t, attrs, want):
    return {"y": torch.zeros_like(t["like"])}


_QKV = {"groups": None, "queries_per_group": None, "head_dim": None}

OPS = (
    Op("qkv_split", ports("x"), ports("q", "k", "v"), _split_infer, _split_reference, attrs=_QKV,
       gradient=_split_gradient, kind="layout", aliases=True),
    Op("qkv_merge", ports("q", "k", "v"), ports("x"), _merge_infer, _merge_reference, gradient=_merge_gradient,
       kind="layout"),
    Op("zeros_like", ports("like"), ports("y"), lambda s, a: {"y": s["like"]}, _zeros_reference, kind="layout"),
)  # fmt: skip
