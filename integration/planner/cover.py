"""Greedy cover: the longest pattern first. Pure functions over graphs; no engine is chosen here."""

from __future__ import annotations

from collections.abc import Iterable

from ..engines.contract import Region
from ..engines.manifest import MANIFEST, Entry
from ..graph.ir import Graph, Node


def region_of(graph: Graph, nodes: Iterable[Node]) -> Region:
    """The region of some of a graph's nodes: inputs in the order of first use, outputs that others read."""
    chosen = list(nodes)
    ids = {id(n) for n in chosen}
    made = {v for n in chosen for _, v in n.outputs}
    inputs = tuple(dict.fromkeys(v for n in chosen for _, v in n.inputs if v not in made))
    read_outside = set(graph.outputs) | {v for n in graph.nodes if id(n) not in ids for _, v in n.inputs}
    outputs = tuple(v for n in chosen for _, v in n.outputs if v in read_outside)
    specs = {v: graph.specs[v] for v in (*inputs, *made)}
    return Region(Graph(inputs, outputs, tuple(chosen), specs, graph.weights & set(inputs)))


def entries_for(op: str) -> list[Entry]:
    return [e for e in MANIFEST if op in e.ops or e.ops == ("*",)]


def grow(graph: Graph, seed: Node, free: set[int], ops: frozenset[str], limit: int = 16) -> list[Node]:
    """The largest connected convex set of free nodes around ``seed`` whose ops are all in ``ops``, in graph order.

    Convex: no path between two members leaves the set; otherwise the regions could not be put in an order.
    """
    producers = {v: n for n in graph.nodes for _, v in n.outputs}
    order = {id(n): i for i, n in enumerate(graph.nodes)}
    chosen: dict[int, Node] = {id(seed): seed}

    def neighbours():
        made = {v for n in chosen.values() for _, v in n.outputs}
        for node in graph.nodes:
            reads_us = any(v in made for _, v in node.inputs)
            feeds_us = any(producers.get(v) is node for n in chosen.values() for _, v in n.inputs)
            if id(node) in free and id(node) not in chosen and node.op in ops and (reads_us or feeds_us):
                yield node

    grown = True
    while grown and len(chosen) < limit:
        grown = False
        for node in list(neighbours()):
            trial = {**chosen, id(node): node}
            if _convex(graph, set(trial)):
                chosen, grown = trial, True
                break
    return sorted(chosen.values(), key=lambda n: order[id(n)])


def _convex(graph: Graph, ids: set[int]) -> bool:
    tainted: set[str] = set()  # values that depend on the set through a node outside of it
    inside: set[str] = set()
    for node in graph.nodes:
        reads = [v for _, v in node.inputs]
        if id(node) in ids:
            if any(v in tainted for v in reads):
                return False
            inside.update(v for _, v in node.outputs)
        elif any(v in inside or v in tainted for v in reads):
            tainted.update(v for _, v in node.outputs)
    return True


def chain(graph: Graph, seed: Node, pattern: tuple[str, ...], free: set[int]) -> list[Node] | None:
    """Nodes that match ``pattern`` from ``seed`` along producer-consumer edges, None where they do not."""
    if seed.op != pattern[0]:
        return None
    nodes = [seed]
    for op in pattern[1:]:
        made = {v for _, v in nodes[-1].outputs}
        step = next((n for n in graph.nodes if n.op == op and id(n) in free and any(v in made for _, v in n.inputs)), None)
        if step is None:
            return None
        nodes.append(step)
    return nodes if _convex(graph, {id(n) for n in nodes}) else None
