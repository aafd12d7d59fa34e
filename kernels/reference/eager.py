"""The reference as an engine: each op's own reference function, so that planner and modules run without a GPU."""

from __future__ import annotations

from ...integration.engines.arch import Arch
from ...integration.engines.contract import BuildContext, CompiledRegion, Decline, Engine, Offer, Region
from ...integration.graph.ops.table import op_table


class Reference(Engine):
    id = "reference/eager"

    def match(self, region: Region, arch: Arch) -> Offer | Decline:
        op = op_table()[region.node.op]
        if op.kind == "collective":
            return Decline("collectives are issued by the runner")
        # unfused float32: an order of magnitude more traffic than a kernel
        return Offer(efficiency=0.1, launches=10, ahead_of_time=True)

    def build(self, ctx: BuildContext) -> CompiledRegion:
        return CompiledRegion(reference_launch(ctx.region))


def reference_launch(region: Region):
    """A function over the region's inputs that evaluates its nodes with their references."""
    table, graph = op_table(), region.graph
    steps = [(table[n.op].reference, n.inputs, n.attributes, n.outputs, tuple(p for p, _ in n.outputs)) for n in graph.nodes]
    inputs, outputs = graph.inputs, graph.outputs

    def launch(*tensors):
        env = dict(zip(inputs, tensors, strict=True))
        for reference, ins, attrs, outs, want in steps:
            result = reference({p: env[v] for p, v in ins}, attrs, want)
            for port, value in outs:
                env[value] = result[port]
        return env[outputs[0]] if len(outputs) == 1 else tuple(env[v] for v in outputs)

    return launch
