"""swiglu, geglu, gelu and squared_relu. Gated ones read [gate, up] halves, gate first (Shazeer, "GLU variants", 2020).

With ``clamp`` c the gate is clamped to at most c and the up half to [-c, c] before the product. ``row_weight`` scales
every row of the output (the probability of an expert's token).
"""

from __future__ import annotations

import math

import torch

from ..ir import TensorSpec
from .table import Op, acc, demand, finite, ports, same_shape

_C = math.sqrt(2.0 / math.pi)


def _silu(x):
    s = torch.sigmoid(x)
    return x * s, s * (1 + x * (1 - s))


def _gelu(x):
    cdf = 0.5 * (1 + torch.erf(x / math.sqrt(2.0)))
    return x * cdf, cdf + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _gelu_tanh(x):
    t = torch.tanh(_C * (x + 0.044715 * x**3))
    return 0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * _C * (1 + 3 * 0.044715 * x * x)


def _squared_relu(x):
    r = torch.relu(x)
    return r * r, 2 * r


def _curve(kind: str, attrs):
    """The activation and its derivative, both as functions of one pre-activation."""
    if kind in ("geglu", "gelu"):
        return _gelu_tanh if attrs["approximate"] == "tanh" else _gelu
    return _silu if kind == "swiglu" else _squared_relu


def _gated(kind: str) -> bool:
    return kind in ("swiglu", "geglu")


def _infer(kind: str):
    def infer(specs, attrs):
        x = specs["x"]
        demand(x.is_float and x.rank >= 1, kind, "x", x, "must be a floating-point tensor of rank 1 or more")
        if "approximate" in attrs:
            demand(attrs["approximate"] in ("none", "tanh"), kind, "approximate", attrs["approximate"], "is none or tanh")
        if attrs["clamp"] is not None:
            finite(kind, "clamp", attrs["clamp"])
            demand(attrs["clamp"] > 0, kind, "clamp", attrs["clamp"], "must be positive")
        width = x.shape[-1]
        if _gated(kind):
            demand(isinstance(width, int) and width % 2 == 0, kind, "x", x, "its last dim holds gate and up: it must be even")
            width //= 2
        y = TensorSpec((*x.shape[:-1], width), x.dtype)
        if "row_weight" in specs:
            demand(specs["row_weight"].shape == x.shape[:-1], kind, "row_weight", specs["row_weight"],
                   f"must have one value per row, shape {list(x.shape[:-1])}")  # fmt: skip
        return {"y": y}

    return infer


def _halves(kind: str, x, attrs):
    """(pre-activation, up or None, masks of what the clamp lets gradients through)."""
    c = attrs["clamp"]
    if not _gated(kind):
        return (x if c is None else x.clamp(max=c)), None, (None if c is None else x <= c), None
    gate, up = x.chunk(2, dim=-1)
    if c is None:
        return gate, up, None, None
    return gate.clamp(max=c), up.clamp(-c, c), gate <= c, (up >= -c) & (up <= c)


def _reference(kind: str):
    def reference(t, attrs, want):
        gate, up, _, _ = _halves(kind, acc(t["x"]), attrs)
        y, _ = _curve(kind, attrs)(gate)
        if up is not None:
            y = y * up
        if "row_weight" in t:
            y = y * acc(t["row_weight"]).to(y.dtype).unsqueeze(-1)
        return {"y": y.to(t["x"].dtype)}

    return reference


def _gradient(kind: str):
    def gradient(g):
        want = [f"d{p}" for p in ("x", "row_weight") if g.needs(p)]
        attrs = {"clamp": g.attr("clamp")} | ({"approximate": g.attr("approximate")} if kind in ("geglu", "gelu") else {})
        outs = g.op(f"{kind}_bwd", want=want, dy=g.out("y"), x=g.value("x"),
                    row_weight=g.value("row_weight") if g.has("row_weight") else None, **attrs)  # fmt: skip
        return dict(zip([w[1:] for w in want], outs if len(want) > 1 else (outs,), strict=True))

    return gradient


def _bwd_infer(kind: str):
    def infer(specs, attrs):
        same_shape(f"{kind}_bwd", "dy", specs["dy"], _infer(kind)({k: v for k, v in specs.items() if k != "dy"}, attrs)["y"])
        out = {"dx": specs["x"]}
        if "row_weight" in specs:
            out["drow_weight"] = specs["row_weight"]
        return out

    return infer


def _bwd_reference(kind: str):
    def reference(t, attrs, want):
        dy = acc(t["dy"])
        gate, up, gate_open, up_open = _halves(kind, acc(t["x"]), attrs)
        value, slope = _curve(kind, attrs)(gate)
        out = {}
        if "drow_weight" in want:
            product = value if up is None else value * up
            out["drow_weight"] = (dy * product).sum(-1).to(t["row_weight"].dtype)
        if "dx" in want:
            if "row_weight" in t:
                dy = dy * acc(t["row_weight"]).to(dy.dtype).unsqueeze(-1)
            dgate = dy * slope if up is None else dy * up * slope
            if gate_open is not None:
                dgate = torch.where(gate_open, dgate, 0.0)
            if up is not None:
                dup = dy * value
                if up_open is not None:
                    dup = torch.where(up_open, dup, 0.0)
                dgate = torch.cat((dgate, dup), dim=-1)
            out["dx"] = dgate.to(t["x"].dtype)
        return out

    return reference


def _ops(kind: str):
    attrs = {"clamp": None} | ({"approximate": "none"} if kind in ("geglu", "gelu") else {})
    yield Op(kind, ports("x", "row_weight?"), ports("y"), _infer(kind), _reference(kind), attrs=attrs,
             gradient=_gradient(kind), flops=lambda i, o, a: 6 * o["y"].numel())  # fmt: skip
    yield Op(f"{kind}_bwd", ports("dy", "x", "row_weight?"), ports("dx?", "drow_weight?"), _bwd_infer(kind),
             _bwd_reference(kind), attrs=attrs, flops=lambda i, o, a: 12 * i["dy"].numel())  # fmt: skip


OPS = tuple(op for kind in ("swiglu", "geglu", "gelu", "squared_relu") for op in _ops(kind))
