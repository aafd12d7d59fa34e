"""Ops that PyTorch does as well as any kernel of their own: views, concatenation, one add, one sum."""

from __future__ import annotations

import torch

from ...integration.engines.arch import Arch
from ...integration.engines.contract import BuildContext, CompiledRegion, Decline, Engine, Offer, Region
from ...integration.graph.ops.table import as_rows
from ..common.evaluate import reference_launch


class TorchLayout(Engine):
    """Values as they are, in the inputs' dtype: split, unflattened and expanded ones are views of the input, merged and concatenated ones
    new. ``row_sum`` [..., n] -> [n] and ``sum_heads`` [..., h, d] -> [..., 1, d] accumulate in float32 or wider."""

    id = "layout/torch"

    def match(self, region: Region, arch: Arch) -> Offer | Decline:
        if region.node.op in ("shard_targets", "stack_shard", "shard_loss"):  # a kernel for each step of their references
            return Offer(efficiency=0.3, launches=6, host_us=40, ahead_of_time=True)
        return Offer(efficiency=0.8, ahead_of_time=True)

    def build(self, ctx: BuildContext) -> CompiledRegion:
        node = ctx.region.node
        if node.op == "add":
            return CompiledRegion(ctx.region.by_port(torch.add))
        if node.op == "row_sum":
            dtype = node.attr("dtype")
            if dtype in (None, ctx.region.spec("x").dtype):  # aten accumulates in float32 inside
                return CompiledRegion(lambda x: as_rows(x).sum(0))
        if node.op == "sum_heads":
            return CompiledRegion(lambda x: x.sum(-2, keepdim=True))
        return CompiledRegion(reference_launch(ctx.region))
