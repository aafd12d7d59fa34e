"""A region as the op table's own functions say it: what the reference engine runs and what Inductor traces."""

from __future__ import annotations

from ...integration.engines.contract import Region
from ...integration.graph.ops.table import op_table


def reference_launch(region: Region):
    """A function over the region's inputs that evaluates its nodes with their references, as far as anything is read."""
    table, graph = op_table(), region.graph
    read = {v for n in graph.nodes for _, v in n.inputs} | set(graph.outputs)
    made = [tuple((p, v) for p, v in n.outputs if v in read) for n in graph.nodes]
    steps = [(table[n.op].reference, n.inputs, n.attributes, outs, tuple(p for p, _ in outs)) for n, outs in zip(graph.nodes, made, strict=True)]
    inputs, outputs = graph.inputs, graph.outputs

    def launch(*tensors):
        env = dict(zip(inputs, tensors, strict=True))
        for reference, ins, attrs, outs, want in steps:
            result = reference({p: env[v] for p, v in ins}, attrs, want)
            for port, value in outs:
                env[value] = result[port]
        return env[outputs[0]] if len(outputs) == 1 else tuple(env[v] for v in outputs)

    return launch
