"""Collectives over dim 0. They carry a group symbol and its size; engines never fuse them, the runner issues them.

Gradients in Megatron's convention: a value that is replicated over the group has one gradient, equal on every rank.
``group_copy`` is the identity whose gradient is summed (the input of a column-parallel linear without sequence parallel).
The reference stands for a group of one; the runner replaces it with the process group's collective.
"""

from __future__ import annotations

from ..ir import Dim, Size
from .table import REQUIRED, Op, demand, ports

_ATTRS = {"group": REQUIRED, "size": REQUIRED}


def _times(d: Size, n: int) -> Size:
    if isinstance(d, int) or n == 1:
        return d * n if isinstance(d, int) else d
    if d.name.endswith(f"/{n}"):
        return Dim(d.name[: -len(f"/{n}")], d.hint * n)
    return Dim(f"{d.name}*{n}", d.hint * n)


def _over(op: str, d: Size, n: int) -> Size:
    if isinstance(d, int) or n == 1:
        if isinstance(d, int):
            demand(d % n == 0, op, "dim 0", d, f"must divide by the group's size {n}", "pad the sequence")
            return d // n
        return d
    if d.name.endswith(f"*{n}"):
        return Dim(d.name[: -len(f"*{n}")], max(d.hint // n, 1))
    return Dim(f"{d.name}/{n}", max(d.hint // n, 1))


def _spec(x, size):
    return type(x)((size, *x.shape[1:]), x.dtype, x.layout, x.scale)


def _reference(t, attrs, want):
    demand(attrs["size"] == 1, "collective reference", "size", attrs["size"], "stands for a group of one rank",
           "run the plan with its process group")  # fmt: skip
    return {"y": t["x"]}


def _gradient_of(name: str):
    return lambda g: {"x": g.op(name, x=g.out("y"), group=g.attr("group"), size=g.attr("size"))}


def _op(name, infer, backward):
    return Op(name, ports("x"), ports("y"), infer, _reference, attrs=_ATTRS, gradient=_gradient_of(backward), kind="collective",
              aliases=True, flops=lambda i, o, a: 0)  # fmt: skip


OPS = (
    _op("all_gather", lambda s, a: {"y": _spec(s["x"], _times(s["x"].shape[0], a["size"]))}, "reduce_scatter"),
    _op("reduce_scatter", lambda s, a: {"y": _spec(s["x"], _over("reduce_scatter", s["x"].shape[0], a["size"]))}, "all_gather"),
    _op("all_reduce", lambda s, a: {"y": s["x"]}, "group_copy"),
    _op("group_copy", lambda s, a: {"y": s["x"]}, "all_reduce"),
)
