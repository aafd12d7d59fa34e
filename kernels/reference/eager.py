"""The reference as an engine: each op's own reference function, so that planner and modules run without a GPU."""

from __future__ import annotations

from ...integration.engines.arch import Arch
from ...integration.engines.contract import BuildContext, CompiledRegion, Decline, Engine, Offer, Region
from ...integration.graph.ops.table import op_table
from ..common.evaluate import reference_launch


class Reference(Engine):
    id = "reference/eager"
    not_ahead = "plain PyTorch, whose kernels are compiled"

    def match(self, region: Region, arch: Arch) -> Offer | Decline:
        op = op_table()[region.node.op]
        if op.kind == "collective":
            return Decline("collectives are issued by the runner")
        # unfused float32: an order of magnitude more traffic than a kernel
        return Offer(efficiency=0.1, launches=10, host_us=60, ahead_of_time=True, capture_safe=not op.host_sync)

    def build(self, ctx: BuildContext) -> CompiledRegion:
        return CompiledRegion(reference_launch(ctx.region))
