"""Greedy cover: the longest pattern first. Pure functions over graphs; no engine is chosen here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

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


def grow(graph: Graph, seed: Node, free: set[int], ops: frozenset[str], limit: int = 16,
         regions: Sequence[set[int]] = ()) -> list[Node]:  # fmt: skip
    """The largest connected set of free nodes around ``seed`` whose ops are all in ``ops``, convex beside ``regions``
    (the node ids of regions that are there already), in graph order."""
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
            if convex(graph, set(trial), regions):
                chosen, grown = trial, True
                break
    return sorted(chosen.values(), key=lambda n: order[id(n)])


def convex(graph: Graph, ids: set[int], regions: Sequence[set[int]] = ()) -> bool:
    """Whether no path between two members leaves the set; otherwise the regions could not be put in an order. The nodes
    of one of ``regions`` run together: a path that enters it leaves it anywhere."""
    together = {i: members for members in regions for i in members}
    producers = {v: id(n) for n in graph.nodes for _, v in n.outputs}
    later: set[int] = set()  # nodes outside of the set that depend on it
    grown = True
    while grown:
        grown = False
        for node in graph.nodes:
            if id(node) in ids or id(node) in later:
                continue
            if any((made := producers.get(v)) in ids or made in later for _, v in node.inputs):
                later |= together.get(id(node), {id(node)})
                grown = bool(regions)  # without regions the order of the nodes makes one pass enough
    return not any(producers.get(v) in later for n in graph.nodes if id(n) in ids for _, v in n.inputs)


def find(graph: Graph, seed: Node, ops: tuple[str, ...], edges: Sequence[tuple[int, str, int, str]],
         free: set[int]) -> Iterator[list[Node]]:  # fmt: skip
    """Lists of free nodes in graph order that begin with ``seed`` and have these ops and these values between them (as
    ``Region.edges`` gives them). Values that cross the border are not looked at."""
    order = {id(n): i for i, n in enumerate(graph.nodes)}
    producers = {v: n for n in graph.nodes for _, v in n.outputs}

    def fits(found: dict[int, Node]) -> bool:
        inside = [e for e in edges if e[0] in found and e[2] in found]
        return all(found[b].input(q) == found[a].output(p) is not None for a, p, b, q in inside)

    def extend(found: dict[int, Node]) -> Iterator[list[Node]]:
        if len(found) == len(ops):
            places = [order[id(found[i])] for i in range(len(ops))]
            if places == sorted(places):
                yield [found[i] for i in range(len(ops))]
            return
        edge = next((e for e in edges if (e[0] in found) != (e[2] in found)), None)
        if edge is None:
            return
        a, p, b, q = edge
        if a in found:
            index, choices = b, graph.consumers(found[a].output(p))
        else:
            index, choices = a, [producers.get(found[b].input(q))]
        for node in choices:
            if node is None or id(node) not in free or node.op != ops[index] or any(node is n for n in found.values()):
                continue
            if fits(trial := {**found, index: node}):
                yield from extend(trial)

    if seed.op == ops[0] and id(seed) in free:
        yield from extend({0: seed})


def chain(graph: Graph, seed: Node, pattern: tuple[str, ...], free: set[int],
          regions: Sequence[set[int]] = ()) -> list[Node] | None:  # fmt: skip
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
    return nodes if convex(graph, {id(n) for n in nodes}, regions) else None
