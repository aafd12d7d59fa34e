"""A region as the op table's own functions say it: what the reference engine runs and what Inductor traces."""

from __future__ import annotations

from ...integration.engines.contract import Region
from ...integration.graph.ops.table import op_table


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
