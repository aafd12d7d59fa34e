"""Small graphs that several test modules plan, and the mark of tests that need a package for it."""

from __future__ import annotations

import pytest

from layerplan.integration.engines.packages import locate
from layerplan.integration.graph.ir import Dim, Graph, GraphBuilder, TensorSpec

T = Dim("t", 1024)
needs_triton = pytest.mark.skipif(not locate("triton").here, reason="the inductor engine needs the package triton")


def bf16(*shape: int | Dim) -> TensorSpec:
    return TensorSpec(shape, "bfloat16")


def sdpa(**attrs) -> Graph:
    """Attention of q, k and v [2, 64, 8, 64] in bfloat16; its output alone."""
    b = GraphBuilder()
    q, k, v = (b.input(n, bf16(2, 64, 8, 64)) for n in "qkv")
    return b.build([b.op("sdpa", q=q, k=k, v=v, **attrs)])
