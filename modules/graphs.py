"""The graphs of the modules, as functions from tensors to a Graph: host code without a framework."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from ..integration.graph.ir import Graph, GraphBuilder
from ..integration.planner.shapes import SpecMaker


@dataclasses.dataclass(frozen=True, slots=True)
class TensorParallel:
    """How a linear takes part in tensor parallelism: ``size`` ranks of group ``symbol``; with ``sequence`` the tokens are
    sharded over them outside of the linear pair."""

    size: int = 1
    sequence: bool = False
    symbol: str = "tp"

    def enter(self, b: GraphBuilder, x: str) -> str:
        """In front of a column-parallel linear."""
        if self.size == 1:
            return x
        return b.op("all_gather" if self.sequence else "group_copy", x=x, group=self.symbol, size=self.size)

    def leave(self, b: GraphBuilder, y: str) -> str:
        """Behind a row-parallel linear."""
        if self.size == 1:
            return y
        return b.op("reduce_scatter" if self.sequence else "all_reduce", x=y, group=self.symbol, size=self.size)


@dataclasses.dataclass(frozen=True, slots=True)
class NormAttrs:
    op: str = "rms_norm"
    eps: float = 1e-5
    zero_centered: bool = False

    def attrs(self) -> dict[str, object]:
        return {"eps": self.eps, "zero_centered": self.zero_centered}


@dataclasses.dataclass(frozen=True, slots=True)
class Activation:
    """An activation op of the table and its attributes."""

    op: str = "swiglu"
    attrs: tuple[tuple[str, object], ...] = ()


def norm_graph(norm: NormAttrs, names: tuple[str, ...]) -> Callable[..., Graph]:
    """``names`` in order: x, weight, then optionally bias and residual."""
    patterns = {"x": "*t n!", "residual": "*t n!", "weight": "n!", "bias": "n!"}

    def build(*tensors: torch.Tensor) -> Graph:
        b, spec = GraphBuilder(), SpecMaker()
        values = {n: b.input(n, spec(t, patterns[n]), weight=n in ("weight", "bias")) for n, t in zip(names, tensors, strict=True)}
        out = b.op(norm.op, **values, **norm.attrs())
        return b.build([out] if isinstance(out, str) else out)

    return build


def linear_graph(tp: TensorParallel, *, column: bool, bias: bool, norm: NormAttrs | None = None,
                 norm_bias: bool = False) -> tuple[tuple[str, ...], Callable[..., Graph]]:  # fmt: skip
    """([norm,] all-gather or copy, linear) for a column-parallel one, (linear, reduce) for a row-parallel one.

    Returns the inputs' names and the builder. Inputs: x, weight[, bias][, norm_weight[, norm_bias]].
    """
    names = ("x", "weight", *(("bias",) if bias else ()), *(("norm_weight",) if norm else ()), *(("norm_bias",) if norm_bias else ()))

    def build(*tensors: torch.Tensor) -> Graph:
        b, spec = GraphBuilder(), SpecMaker()
        patterns = {"x": "*t k!", "weight": "n! k!", "bias": "n!", "norm_weight": "k!", "norm_bias": "k!"}
        v = {n: b.input(n, spec(t, patterns[n]), weight=n != "x") for n, t in zip(names, tensors, strict=True)}
        x = v["x"]
        if norm is not None:
            x = b.op(norm.op, x=x, weight=v["norm_weight"], bias=v.get("norm_bias"), want=("y",), **norm.attrs())
        if column:
            x = tp.enter(b, x)
        y = b.op("linear", x=x, weight=v["weight"], bias=v.get("bias"))
        return b.build([y if column else tp.leave(b, y)])

    return names, build


def mlp_graph(tp: TensorParallel, activation: Activation, *, bias: bool, row_weight: bool, norm: NormAttrs | None = None,
              norm_bias: bool = False) -> tuple[tuple[str, ...], Callable[..., Graph]]:  # fmt: skip
    """[norm,] fc1 (+ bias), activation, fc2, with the collectives of tensor parallelism around them. The bias of fc2 is
    left to the caller, who adds it with the residual."""
    names = ("x", "fc1", "fc2", *(("fc1_bias",) if bias else ()), *(("row_weight",) if row_weight else ()),
             *(("norm_weight",) if norm else ()), *(("norm_bias",) if norm_bias else ()))  # fmt: skip
    patterns = {"x": "*t h!", "fc1": "f! h!", "fc2": "h! g!", "fc1_bias": "f!", "row_weight": "*t", "norm_weight": "h!", "norm_bias": "h!"}

    def build(*tensors: torch.Tensor) -> Graph:
        b, spec = GraphBuilder(), SpecMaker()
        data = ("x", "row_weight")
        v = {n: b.input(n, spec(t, patterns[n]), weight=n not in data) for n, t in zip(names, tensors, strict=True)}
        x = v["x"]
        if norm is not None:
            x = b.op(norm.op, x=x, weight=v["norm_weight"], bias=v.get("norm_bias"), want=("y",), **norm.attrs())
        h = b.op("linear", x=tp.enter(b, x), weight=v["fc1"], bias=v.get("fc1_bias"))
        a = b.op(activation.op, x=h, row_weight=v.get("row_weight"), **dict(activation.attrs))
        return b.build([tp.leave(b, b.op("linear", x=a, weight=v["fc2"]))])

    return names, build


def attention_graph(names: tuple[str, ...], attrs: dict[str, object]) -> Callable[..., Graph]:
    """One sdpa node. ``names`` are the connected ports in order; ``attrs`` holds at least the layout."""
    dense = {"bshd": ("b s", "b s"), "sbhd": ("s b", "s b"), "thd": ("t", "t")}[attrs["layout"]]
    patterns = {
        "q": f"{dense[0]} h! d!", "k": f"{dense[1]} g! d!", "v": f"{dense[1]} g! e!", "sink": "h!", "cu_seqlens_q": "n",
        "cu_seqlens_k": "n", "mask": "b h s s", "seed": "*i", "offset": "*i",
    }  # fmt: skip

    def build(*tensors: torch.Tensor) -> Graph:
        b, spec = GraphBuilder(), SpecMaker()
        v = {n: b.input(n, spec(t, patterns[n]), weight=n == "sink") for n, t in zip(names, tensors, strict=True)}
        return b.build([b.op("sdpa", want=("out",), **v, **attrs)])

    return build
