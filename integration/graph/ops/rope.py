"""Rotary position embedding (Su et al., 2021): interleaved or half-split pairs, partial, per-token positions, inverse."""

from __future__ import annotations

import torch

from .table import Op, acc, boolean, demand, ports


def _infer(specs, attrs):
    x, cos, sin = specs["x"], specs["cos"], specs["sin"]
    demand(x.is_float and x.rank >= 3, "rope", "x", x, "must be floating point with dims [..., heads, head_dim]")
    demand(cos.rank == 2 and cos.shape == sin.shape, "rope", "cos, sin", (cos, sin),
           "must share a shape [positions, rotary_dim / 2]")  # fmt: skip
    demand(2 * cos.shape[1] <= x.shape[-1], "rope", "cos", cos, f"rotary_dim (2 * {cos.shape[1]}) must not exceed the head dim {x.shape[-1]}")
    for flag in ("interleaved", "inverse"):
        boolean("rope", flag, attrs[flag])
    axis = attrs["seq_axis"]
    demand(0 <= axis < x.rank - 2, "rope", "seq_axis", axis, f"must be one of the leading dims of x {x}")
    if "positions" in specs:
        p = specs["positions"]
        demand(p.dtype in ("int32", "int64"), "rope", "positions", p, "must be int32 or int64")
        ok = p.shape == x.shape[:-2] or p.shape == (x.shape[axis],)
        demand(ok, "rope", "positions", p, f"must have shape {list(x.shape[:-2])} or [{x.shape[axis]}]")
    return {"y": x}


def _check(t, shape, attrs):
    rows, positions = shape("cos")[0], t.get("positions")
    tokens = shape("x")[attrs["seq_axis"]]
    if shape("positions") is None and None not in (rows, tokens) and rows < tokens:
        raise ValueError(f"rope: cos has {rows} positions: must cover the {tokens} of x; build a longer table or pass positions")
    if positions is not None and positions.numel():
        low, high = int(positions.min()), int(positions.max())
        if low < 0 or high >= rows:
            raise ValueError(f"rope: positions span {low} .. {high}: must lie in [0, {rows}), the rows of cos; build a longer table")


def _rows(table, t, attrs):
    """cos or sin per token, shaped to broadcast over x [..., heads, rotary_dim / 2]."""
    x, axis = t["x"], attrs["seq_axis"]
    lead = x.dim() - 2
    positions = t.get("positions")
    if positions is not None and positions.dim() == lead and lead > 1:
        rows = table[positions.to(torch.int64)]
    else:
        rows = table[: x.shape[axis]] if positions is None else table[positions.to(torch.int64)]
        shape = [1] * lead + [table.shape[1]]
        shape[axis] = x.shape[axis]
        rows = rows.reshape(shape)
    return rows.unsqueeze(-2)


def _reference(t, attrs, want):
    x = acc(t["x"])
    cos, sin = (_rows(t[n].to(x.dtype), t, attrs) for n in ("cos", "sin"))
    if attrs["inverse"]:
        sin = -sin
    r = 2 * cos.shape[-1]
    turn, rest = x[..., :r], x[..., r:]
    if attrs["interleaved"]:
        a, b = turn[..., 0::2], turn[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = turn.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return {"y": torch.cat((turned, rest), dim=-1).to(t["x"].dtype)}


def _gradient(g):
    # a rotation's transpose is its inverse
    dx = g.op("rope", x=g.out("y"), cos=g.value("cos"), sin=g.value("sin"),
              positions=g.value("positions") if g.has("positions") else None,
              interleaved=g.attr("interleaved"), inverse=not g.attr("inverse"), seq_axis=g.attr("seq_axis"))  # fmt: skip
    return {"x": dx}


OPS = (
    Op("rope", ports("x", "cos", "sin", "positions?"), ports("y"), _infer, _reference, check=_check,
       attrs={"interleaved": False, "inverse": False, "seq_axis": 0}, gradient=_gradient,
       differentiable=frozenset({"x"}), flops=lambda i, o, a: 3 * i["x"].numel()),
)  # fmt: skip
