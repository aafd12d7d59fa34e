"""Checks that run between the stages of planning: a broken graph stops there, by name, not in a kernel."""

from __future__ import annotations

from .ir import Graph, GraphError
from .ops.table import op_table


def verify(graph: Graph) -> Graph:
    """Return ``graph`` if it is well formed, raise GraphError with the first fault otherwise.

    Every value is defined once and before it is read; ports and attributes are those of the op table; the specs of
    outputs are what the op's rule infers from its inputs; weights are inputs.
    """
    table = op_table()
    defined = set(graph.inputs)
    if len(defined) != len(graph.inputs):
        raise GraphError(f"inputs {graph.inputs}: a name stands twice")
    for k, node in enumerate(graph.nodes):
        where = f"node {k} ({node.op})"
        op = table.get(node.op)
        if op is None:
            raise GraphError(f"{where}: no such op in the table")
        bound, attrs = op.bind({**dict(node.inputs), **node.attributes})
        if bound != node.inputs or tuple(sorted(attrs.items())) != node.attrs:
            raise GraphError(f"{where}: ports or attributes are incomplete or out of order")
        for port, value in node.inputs:
            if value not in defined:
                raise GraphError(f"{where}: port {port!r} reads {value!r}, which nothing before it defines")
        inferred = op.infer({p: graph.specs[v] for p, v in node.inputs}, attrs)
        missing = op.required_outputs - {p for p, _ in node.outputs}
        if missing:
            raise GraphError(f"{where}: required output {sorted(missing)[0]!r} is missing")
        if not node.outputs:
            raise GraphError(f"{where}: computes nothing")
        for port, value in node.outputs:
            if value in defined:
                raise GraphError(f"{where}: {value!r} is defined a second time")
            if port not in inferred:
                raise GraphError(f"{where}: cannot compute port {port!r} from its inputs")
            if graph.specs.get(value) != inferred[port]:
                raise GraphError(f"{where}: {value!r} is {graph.specs.get(value)}, the op's rule says {inferred[port]}")
            defined.add(value)
    for value in graph.outputs:
        if value not in defined:
            raise GraphError(f"output {value!r}: nothing defines it")
    if not graph.weights <= set(graph.inputs):
        raise GraphError(f"weights {sorted(graph.weights - set(graph.inputs))}: must be inputs")
    return graph
