"""grouped_matmul and its two gradients: one product for each group of rows, all in one op.

x [t, k], weight [e, n, k], offsets [e] int32 -> y [t, n]: y[r] = weight[i] @ x[r] for the rows r of group i, which are
offsets[i - 1] .. offsets[i] - 1 (from 0 for i = 0). Counts may be any, 0 too. Rows from offsets[-1] on are read by no
one; what y and dx hold there is left open. The weight gradient of an empty group is exactly zero; where gradients are
added up, it leaves what is there.

``align`` says that every offset is a multiple of it, as where permute made them with that alignment: a promise that
engines may rely on. A group's padding rows are rows like others.
"""

from __future__ import annotations

import itertools

import torch

from ..ir import TensorSpec
from .moe import check_offsets, positive
from .table import Op, acc, demand, ports, same_dtype, size_product


def _operands(op: str, x: TensorSpec, field: str, specs, axis: int, align: object) -> None:
    """Checks the rows, the weight whose dim ``axis`` they are multiplied over, and the offsets."""
    w, offsets = specs["weight"], specs["offsets"]
    positive(op, "align", align)
    same_dtype(op, **{field: x, "weight": w})
    ok = w.rank == 3 and all(isinstance(d, int) for d in w.shape) and w.shape[0] > 0
    demand(ok, op, "weight", w, "must be [experts, out_features, in_features] of at least one expert")
    turned = axis == 2 and x.rank == 2 and x.shape[1] == w.shape[1]
    demand(x.rank == 2 and x.shape[1] == w.shape[axis], op, field, x,
           f"must be [rows, {w.shape[axis]}] for weight {w}, which is [experts, out, in]",
           "weight looks like [experts, in, out]: pass w.transpose(1, 2)" if turned else "")  # fmt: skip
    _ends(op, offsets, w.shape[0])


def _ends(op: str, offsets: TensorSpec, experts: int) -> None:
    convert = "" if offsets.dtype == "int32" else " and convert them with .int()"
    leading = f"{experts + 1} entries are like cu_seqlens: drop the leading 0, pass offsets[1:]{convert}"
    demand(
        offsets.shape == (experts,) and offsets.dtype == "int32",
        op,
        "offsets",
        offsets,
        f"must be int32 [{experts}], where each expert's rows end",
        leading if offsets.shape == (experts + 1,) else f"pass cumulative ends of {experts} groups{convert}",
    )


def _infer(specs, attrs):
    x, w = specs["x"], specs["weight"]
    _operands("grouped_matmul", x, "x", specs, 2, attrs["align"])
    return {"y": TensorSpec((x.shape[0], w.shape[1]), x.dtype)}


def _check(t, shape, attrs):
    if "offsets" not in t:
        return
    for i, end in enumerate(check_offsets("grouped_matmul", t["offsets"], shape("x")[0])):
        if end % attrs["align"]:
            raise ValueError(
                f"grouped_matmul: offsets[{i}] = {end}: must be a multiple of align = {attrs['align']}; make the groups "
                "with permute(..., align=...), or leave align at 1"
            )


def _groups(offsets: torch.Tensor):
    """(expert, its rows) of each group that has any. Reads the offsets on the host."""
    for i, (begin, end) in enumerate(itertools.pairwise([0, *offsets.tolist()])):
        if end > begin:
            yield i, slice(begin, end)


def _products(rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """rows [t, a], weight [e, a, b] -> [t, b]."""
    out = rows.new_zeros((len(rows), weight.shape[2]))
    for i, own in _groups(offsets):
        out[own] = (acc(rows[own]) @ acc(weight[i])).to(out.dtype)
    return out


def _reference(t, attrs, want):
    return {"y": _products(t["x"], t["weight"].transpose(1, 2), t["offsets"])}


def _gradient(g):
    out, shared = {}, {"dy": g.out("y"), "offsets": g.value("offsets"), "align": g.attr("align")}
    if g.needs("x"):
        out["x"] = g.op("grouped_matmul_dgrad", weight=g.value("weight"), **shared)
    if g.needs("weight"):
        out["weight"] = g.op("grouped_matmul_wgrad", x=g.value("x"), **shared)
    return out


def _dgrad_infer(specs, attrs):
    dy, w = specs["dy"], specs["weight"]
    _operands("grouped_matmul_dgrad", dy, "dy", specs, 1, attrs["align"])
    return {"dx": TensorSpec((dy.shape[0], w.shape[2]), dy.dtype)}


def _dgrad_reference(t, attrs, want):
    return {"dx": _products(t["dy"], t["weight"], t["offsets"])}


def _wgrad_infer(specs, attrs):
    op, dy, x, offsets, accumulate = (
        "grouped_matmul_wgrad",
        specs["dy"],
        specs["x"],
        specs["offsets"],
        specs.get("accumulate"),
    )
    positive(op, "align", attrs["align"])
    same_dtype(op, dy=dy, x=x)
    demand(dy.rank == 2 and x.rank == 2 and dy.shape[0] == x.shape[0], op, "dy", dy, f"must have as many rows as x {x}")
    experts = offsets.shape[0] if offsets.rank == 1 else None
    demand(isinstance(experts, int) and experts > 0, op, "offsets", offsets, "must be int32 [experts]")
    _ends(op, offsets, experts)
    shape = (experts, dy.shape[1], x.shape[1])
    if accumulate is not None:
        demand(accumulate.shape == shape, op, "accumulate", accumulate, f"must have shape {list(shape)}")
        return {"dweight": accumulate}
    return {"dweight": TensorSpec(shape, dy.dtype)}


def _wgrad_reference(t, attrs, want):
    dy, x, offsets = t["dy"], t["x"], t["offsets"]
    into = t["accumulate"] if "accumulate" in t else dy.new_zeros((len(offsets), dy.shape[1], x.shape[1]))
    for i, own in _groups(offsets):
        into[i] += (acc(dy[own]).T @ acc(x[own])).to(into.dtype)
    return {"dweight": into}


def _flops(i, o, a):
    """2 m n k of the products over all rows, whichever of the three it is."""
    rows, other = (i["x"], o["y"]) if "y" in o else (i["dy"], o["dx"]) if "dx" in o else (i["dy"], i["x"])
    return 2 * size_product(rows.shape) * size_product(other.shape[1:])


_MATMUL = {"kind": "matmul", "attrs": {"align": 1}, "flops": _flops, "host_sync": True}

OPS = (
    Op(
        "grouped_matmul",
        ports("x", "weight", "offsets"),
        ports("y"),
        _infer,
        _reference,
        gradient=_gradient,
        check=_check,
        differentiable=frozenset({"x", "weight"}),
        open_rows=frozenset({"y"}),
        **_MATMUL,
    ),
    Op(
        "grouped_matmul_dgrad",
        ports("dy", "weight", "offsets"),
        ports("dx"),
        _dgrad_infer,
        _dgrad_reference,
        open_rows=frozenset({"dx"}),
        **_MATMUL,
    ),
    Op(
        "grouped_matmul_wgrad",
        ports("dy", "x", "offsets", "accumulate?"),
        ports("dweight"),
        _wgrad_infer,
        _wgrad_reference,
        **_MATMUL,
    ),
)
