"""rms_norm and layer_norm, with optional residual add in front, bias and zero-centred gamma.

The one formula, with and without a residual (all in float32 or wider, one rounding at the end)::

    h = round(x + residual)                        (h = x without a residual; returned as residual_out)
    rms_norm:   y = round(h * rstd * g + bias)     rstd = 1 / sqrt(mean(h^2) + eps)
    layer_norm: y = round((h - mean) * rstd * g + bias)
    g = weight, or 1 + weight where the gamma is zero-centred

RMSNorm: Zhang and Sennrich, 2019. LayerNorm: Ba, Kiros and Hinton, 2016.
"""

from __future__ import annotations

import torch

from ..ir import TensorSpec
from .table import Op, acc, acc_dtype, as_rows, boolean, demand, finite, ports, same_dtype, same_shape, vector_of


def _infer(op: str, stats: tuple[str, ...]):
    def infer(specs, attrs):
        x = specs["x"]
        demand(x.is_float and x.rank >= 1, op, "x", x, "must be a floating-point tensor of rank 1 or more")
        n = x.shape[-1]
        finite(op, "eps", attrs["eps"])
        boolean(op, "zero_centered", attrs["zero_centered"])
        demand(attrs["eps"] >= 0, op, "eps", attrs["eps"], "must not be negative")
        for name in ("weight", "bias"):
            vector_of(op, name, specs.get(name), n)
            if name in specs:
                demand(specs[name].is_float, op, name, specs[name], "must be a floating-point tensor")
        if "residual" in specs:
            same_shape(op, "residual", specs["residual"], x)
            same_dtype(op, x=x, residual=specs["residual"])
        row = TensorSpec((*x.shape[:-1], 1), acc_dtype(x))  # as torch keeps them: no views on the hot path
        out = {"y": x, **{s: row for s in stats}}
        if "residual" in specs:
            out["residual_out"] = x
        return out

    return infer


def _gamma(t, attrs):
    if "weight" not in t:
        return None
    w = acc(t["weight"])
    return w + 1 if attrs["zero_centered"] else w


def _reference(rms: bool):
    def reference(t, attrs, want):
        x, out = t["x"], {}
        h = acc(x)
        if "residual" in t:
            rounded = (h + acc(t["residual"])).to(x.dtype)
            out["residual_out"], h = rounded, acc(rounded)
        if rms:
            rstd = torch.rsqrt(h.square().mean(-1, keepdim=True) + attrs["eps"])
            y = h * rstd
        else:
            out["mean"] = h.mean(-1, keepdim=True)
            centred = h - out["mean"]
            rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + attrs["eps"])
            y = centred * rstd
        g = _gamma(t, attrs)
        if g is not None:
            y = y * g.to(y.dtype)
        if "bias" in t:
            y = y + acc(t["bias"]).to(y.dtype)
        return {**out, "y": y.to(x.dtype), "rstd": rstd}

    return reference


def _gradient(op: str, rms: bool):
    def gradient(g):
        has_residual = g.has("residual")
        dy, dres = g.out("y"), g.out("residual_out") if has_residual else None
        if dy is None:  # only the residual stream is used
            return {"x": dres, "residual": dres}
        want = [p for p, q in (("dweight", "weight"), ("dbias", "bias")) if g.needs(q)]
        needs_x = g.needs("x") or g.needs("residual")
        if needs_x:
            want.append("dx")
        if not want:
            return {}
        saved = {} if rms else {"mean": g.value("mean")}
        outs = g.op(
            f"{op}_bwd",
            want=want,
            dy=dy,
            x=g.value("residual_out") if has_residual else g.value("x"),
            weight=g.value("weight") if g.has("weight") else None,
            rstd=g.value("rstd"),
            dresidual=dres,
            zero_centered=g.attr("zero_centered"),
            bias_dtype=g.spec("bias").dtype if g.has("bias") else None,
            **saved,
        )
        got = dict(zip([p for p in ("dx", "dweight", "dbias") if p in want], outs if len(want) > 1 else (outs,), strict=True))
        dx = got.get("dx")
        return {"x": dx, "residual": dx, "weight": got.get("dweight"), "bias": got.get("dbias")}

    return gradient


def _bwd_infer(op: str):
    def infer(specs, attrs):
        x = specs["x"]
        same_shape(op, "dy", specs["dy"], x)
        if "dresidual" in specs:
            same_shape(op, "dresidual", specs["dresidual"], x)
        out = {"dx": x}
        if "weight" in specs:
            out["dweight"] = specs["weight"]
        if attrs["bias_dtype"]:
            out["dbias"] = TensorSpec((x.shape[-1],), attrs["bias_dtype"])
        return out

    return infer


def _bwd_reference(rms: bool):
    def reference(t, attrs, want):
        x, dy = acc(t["x"]), acc(t["dy"])
        rstd = t["rstd"].to(x.dtype)
        xhat = (x if rms else x - t["mean"].to(x.dtype)) * rstd
        g = _gamma(t, attrs)
        out = {}
        if "dx" in want:
            wdy = dy if g is None else dy * g.to(dy.dtype)
            correction = xhat * (wdy * xhat).mean(-1, keepdim=True)
            if not rms:
                correction = correction + wdy.mean(-1, keepdim=True)
            dx = (wdy - correction) * rstd
            if "dresidual" in t:
                dx = dx + acc(t["dresidual"])
            out["dx"] = dx.to(t["x"].dtype)
        if "dweight" in want:
            out["dweight"] = as_rows(dy * xhat).sum(0).to(t["weight"].dtype)
        if "dbias" in want:
            out["dbias"] = as_rows(dy).sum(0).to(getattr(torch, attrs["bias_dtype"]))
        return out

    return reference


def _ops(name: str, rms: bool):
    stats = ("rstd",) if rms else ("mean", "rstd")
    stat_ports = ("rstd?",) if rms else ("mean?", "rstd?")
    bwd_stats = ("rstd",) if rms else ("mean", "rstd")
    yield Op(
        name, ports("x", "weight?", "bias?", "residual?"), ports("y", "residual_out?", *stat_ports), _infer(name, stats),
        _reference(rms), attrs={"eps": 1e-5, "zero_centered": False}, gradient=_gradient(name, rms), kind="norm",
        constant_outputs=frozenset(stats),
        implied=lambda specs, attrs: ("residual_out",) if "residual" in specs else (),
        flops=lambda i, o, a: 6 * i["x"].numel(),
    )  # fmt: skip
    yield Op(
        f"{name}_bwd", ports("dy", "x", "weight?", *bwd_stats, "dresidual?"), ports("dx?", "dweight?", "dbias?"),
        _bwd_infer(f"{name}_bwd"), _bwd_reference(rms), attrs={"zero_centered": False, "bias_dtype": None}, kind="norm",
        addends={"dx": "dresidual"},
        flops=lambda i, o, a: 10 * i["x"].numel(),
    )  # fmt: skip


OPS = (*_ops("rms_norm", True), *_ops("layer_norm", False))
