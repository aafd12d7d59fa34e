"""linear and its two gradients. A linear's weight gradient is its own node: a stage that can be deferred."""

from __future__ import annotations

from ..ir import TensorSpec
from .table import Op, acc, as_rows, demand, ports, same_dtype, size_product, vector_of


def _infer(specs, attrs):
    x, w = specs["x"], specs["weight"]
    same_dtype("linear", x=x, weight=w, bias=specs.get("bias"))
    demand(w.rank == 2, "linear", "weight", w, "must be a matrix [out_features, in_features]")
    demand(x.rank >= 1 and x.shape[-1] == w.shape[1], "linear", "x", x,
           f"its last dim must equal in_features of weight {w}")  # fmt: skip
    vector_of("linear", "bias", specs.get("bias"), w.shape[0])
    return {"y": TensorSpec((*x.shape[:-1], w.shape[0]), x.dtype)}


def _reference(t, attrs, want):
    y = acc(t["x"]) @ acc(t["weight"]).T
    if "bias" in t:
        y = y + acc(t["bias"])
    return {"y": y.to(t["x"].dtype)}


def _gradient(g):
    dy = g.out("y")
    return {
        "x": g.op("linear_dgrad", dy=dy, weight=g.value("weight")) if g.needs("x") else None,
        "weight": g.op("linear_wgrad", dy=dy, x=g.value("x")) if g.needs("weight") else None,
        "bias": g.op("row_sum", x=dy, dtype=g.spec("bias").dtype) if g.needs("bias") else None,
    }


def _dgrad_infer(specs, attrs):
    dy, w = specs["dy"], specs["weight"]
    demand(dy.shape[-1] == w.shape[0], "linear_dgrad", "dy", dy, f"its last dim must equal out_features of {w}")
    return {"dx": TensorSpec((*dy.shape[:-1], w.shape[1]), dy.dtype)}


def _dgrad_reference(t, attrs, want):
    return {"dx": (acc(t["dy"]) @ acc(t["weight"])).to(t["dy"].dtype)}


def _wgrad_infer(specs, attrs):
    dy, x, accumulate = specs["dy"], specs["x"], specs.get("accumulate")
    demand(dy.shape[:-1] == x.shape[:-1], "linear_wgrad", "dy", dy, f"its leading dims must be those of x {x}")
    shape = (dy.shape[-1], x.shape[-1])
    if accumulate is not None:
        demand(accumulate.shape == shape, "linear_wgrad", "accumulate", accumulate, f"must have shape {list(shape)}")
        return {"dweight": accumulate}
    return {"dweight": TensorSpec(shape, dy.dtype)}


def _wgrad_reference(t, attrs, want):
    dy, x = acc(t["dy"]), acc(t["x"])
    dw = as_rows(dy).T @ as_rows(x)
    if "accumulate" in t:
        return {"dweight": t["accumulate"].add_(dw.to(t["accumulate"].dtype))}
    return {"dweight": dw.to(t["dy"].dtype)}


def _flops(i, o, a):
    """2 m n k of the product, whichever of the three it is."""
    if "weight" in i:
        rows = size_product(next(s for p, s in i.items() if p in ("x", "dy")).shape[:-1])
        return 2 * rows * size_product(i["weight"].shape)
    return 2 * size_product(i["x"].shape) * size_product(i["dy"].shape[-1:])


OPS = (
    Op("linear", ports("x", "weight", "bias?"), ports("y"), _infer, _reference, gradient=_gradient, flops=_flops,
       kind="matmul"),
    Op("linear_dgrad", ports("dy", "weight"), ports("dx"), _dgrad_infer, _dgrad_reference, flops=_flops, kind="matmul"),
    Op("linear_wgrad", ports("dy", "x", "accumulate?"), ports("dweight"), _wgrad_infer, _wgrad_reference, flops=_flops,
       kind="matmul"),
)  # fmt: skip
