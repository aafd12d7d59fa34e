"""Small graphs that several test modules plan, and the mark of tests that need a package for it."""

from __future__ import annotations

import pytest
import torch

from layerplan.integration.engines.packages import locate
from layerplan.integration.graph.ir import Dim, Graph, GraphBuilder, TensorSpec
from layerplan.integration.planner.shapes import SpecMaker

T = Dim("t", 1024)
LONG = (2, 4096, 8, 64)  # attention this long takes a GPU several times what any launch takes its host
needs_triton = pytest.mark.skipif(not locate("triton").here, reason="the inductor engine needs the package triton")


def bf16(*shape: int | Dim) -> TensorSpec:
    return TensorSpec(shape, "bfloat16")


def sdpa(q=(2, 64, 8, 64), k=None, v=None, *, dtype="bfloat16", sink=False, mask=False, lse=False, ends=4, **attrs) -> Graph:
    """Attention of tensors of these shapes (k: q's, v: k's), its output and, with ``lse``, its LSE. Packed ones
    (``layout="thd"``) get cumulative lengths of ``ends`` entries, dropout its seed and offset."""
    k = k or q
    v = v or k
    b = GraphBuilder()
    ins = {n: b.input(n, TensorSpec(s, dtype)) for n, s in (("q", q), ("k", k), ("v", v))}
    if sink:
        ins["sink"] = b.input("sink", TensorSpec((q[-2],), "float32"))
    if mask:
        ins["mask"] = b.input("mask", TensorSpec((1, 1, q[1], k[1]), "bool"))
    if attrs.get("layout") == "thd":
        ins |= {n: b.input(n, TensorSpec((ends,), "int32")) for n in ("cu_seqlens_q", "cu_seqlens_k")}
    if attrs.get("dropout"):
        ins |= {n: b.input(n, TensorSpec((1,), "int64")) for n in ("seed", "offset")}
    out = b.op("sdpa", want=("out", "lse") if lse else ("out",), **ins, **attrs)
    return b.build(list(out) if isinstance(out, tuple) else [out])


def mlp(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> Graph:
    """Linear, swiglu, linear of tensors x [..., h], w1 [2f, h], w2 [h', f]: what a Runner builds."""
    b, spec = GraphBuilder(), SpecMaker()
    x, w1, w2 = b.input("x", spec(x, "*t h!")), b.input("w1", spec(w1, "f! h!"), weight=True), b.input("w2", spec(w2, "g! e!"), weight=True)
    return b.build([b.op("linear", x=b.op("swiglu", x=b.op("linear", x=x, weight=w1)), weight=w2)])
