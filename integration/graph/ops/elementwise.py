"""add, row sums (bias gradients), counter-based dropout and bias-dropout-add."""

from __future__ import annotations

import torch

from ..ir import TensorSpec
from .table import Op, acc, as_rows, demand, finite, ports, same_dtype, same_shape, vector_of

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF


def philox_uniform(shape: tuple[int, ...], seed: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Uniform [0, 1) float32 of ``shape`` as a pure function of (seed, offset) and the element's index.

    Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011); the counter is
    (index // 4, offset), the key is the seed. The same on every device, in recompute and in a graph's replay, and
    without a host sync: seed and offset are int64 tensors of one element.
    """
    n = 1
    for s in shape:
        n *= s
    device = seed.device
    block = torch.arange((n + 3) // 4, device=device, dtype=torch.int64)
    seed, offset = seed.reshape(()).to(torch.int64), offset.reshape(()).to(torch.int64)
    c0, c1 = block & _MASK, (block >> 32) & _MASK
    c2, c3 = (offset & _MASK).expand_as(block), ((offset >> 32) & _MASK).expand_as(block)
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1
        hi0, lo0, hi1, lo1 = (p0 >> 32) & _MASK, p0 & _MASK, (p1 >> 32) & _MASK, p1 & _MASK
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    words = torch.stack((c0, c1, c2, c3), dim=-1).reshape(-1)[:n]
    return ((words >> 8).to(torch.float32) * (2.0**-24)).reshape(shape)


def keep_mask(shape: tuple[int, ...], p: float, seed: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Boolean mask of the elements that dropout with probability ``p`` keeps."""
    return philox_uniform(shape, seed, offset) >= p


def check_dropout(op: str, field: str, specs, attrs) -> None:
    """Refuses a probability ``attrs[field]`` outside of [0, 1) or without a seed and an offset, int64 tensors of one element."""
    p = attrs[field]
    finite(op, field, p)
    demand(0.0 <= p < 1.0, op, field, p, "a dropout probability lies in [0, 1)")
    if p > 0.0:
        demand("seed" in specs and "offset" in specs, op, field, p, "dropout needs the ports seed and offset",
               "pass rng=(seed, offset), int64 tensors of one element")  # fmt: skip
    for name in ("seed", "offset"):
        if name in specs:
            demand(specs[name].dtype == "int64" and specs[name].numel() == 1, op, name, specs[name],
                   "must be an int64 tensor of one element")  # fmt: skip


# ---- add -----------------------------------------------------------------------------------------------------------


def _add_infer(specs, attrs):
    same_dtype("add", a=specs["a"], b=specs["b"])
    same_shape("add", "b", specs["b"], specs["a"])
    return {"y": specs["a"]}


def _add_reference(t, attrs, want):
    return {"y": (acc(t["a"]) + acc(t["b"])).to(t["a"].dtype)}


# ---- row_sum: the gradient of a bias that is broadcast over all leading dims ------------------------------------------


def _row_sum_infer(specs, attrs):
    return {"y": TensorSpec((specs["x"].shape[-1],), attrs["dtype"] or specs["x"].dtype)}


def _row_sum_reference(t, attrs, want):
    x = t["x"]
    out = as_rows(acc(x)).sum(0)
    return {"y": out.to(getattr(torch, attrs["dtype"]) if attrs["dtype"] else x.dtype)}


# ---- bias_dropout_add ------------------------------------------------------------------------------------------------


def _bda_infer(specs, attrs):
    op = "bias_dropout_add"
    same_dtype(op, x=specs["x"], residual=specs["residual"], bias=specs.get("bias"))
    demand(specs["x"].rank >= 1, op, "x", specs["x"], "must have at least one dim")
    same_shape(op, "residual", specs["residual"], specs["x"])
    vector_of(op, "bias", specs.get("bias"), specs["x"].shape[-1])
    check_dropout(op, "p", specs, attrs)
    return {"y": specs["x"]}


def _bda_reference(t, attrs, want):
    x = acc(t["x"])
    if "bias" in t:
        x = x + acc(t["bias"])
    if attrs["p"] > 0.0:
        x = torch.where(keep_mask(tuple(x.shape), attrs["p"], t["seed"], t["offset"]), x / (1.0 - attrs["p"]), 0.0)
    return {"y": (x + acc(t["residual"])).to(t["x"].dtype)}


def _bda_gradient(g):
    dy, p = g.out("y"), g.attr("p")
    dx = g.op("dropout_bwd", dy=dy, seed=g.value("seed"), offset=g.value("offset"), p=p) if p > 0.0 else dy
    bias = g.op("row_sum", x=dx, dtype=g.spec("bias").dtype) if g.needs("bias") else None
    return {"x": dx, "residual": dy, "bias": bias}


def _dropout_bwd_infer(specs, attrs):
    check_dropout("dropout_bwd", "p", specs, attrs)
    return {"dx": specs["dy"]}


def _dropout_bwd_reference(t, attrs, want):
    dy = acc(t["dy"])
    keep = keep_mask(tuple(dy.shape), attrs["p"], t["seed"], t["offset"])
    return {"dx": torch.where(keep, dy / (1.0 - attrs["p"]), 0.0).to(t["dy"].dtype)}


OPS = (
    Op("add", ports("a", "b"), ports("y"), _add_infer, _add_reference,
       gradient=lambda g: {"a": g.out("y"), "b": g.out("y")}),
    Op("row_sum", ports("x"), ports("y"), _row_sum_infer, _row_sum_reference, attrs={"dtype": None}, kind="reduction"),
    Op("bias_dropout_add", ports("x", "residual", "bias?", "seed?", "offset?"), ports("y"), _bda_infer, _bda_reference,
       attrs={"p": 0.0}, gradient=_bda_gradient, differentiable=frozenset({"x", "residual", "bias"})),
    Op("dropout_bwd", ports("dy", "seed", "offset"), ports("dx"), _dropout_bwd_infer, _dropout_bwd_reference,
       attrs={"p": 0.0}),
)  # fmt: skip
