"""Greedy cover: the longest pattern first. Pure functions over graphs; no engine is chosen here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ..engines.contract import Pattern, Region
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


def find(graph: Graph, seed: Node, pattern: Pattern, free: set[int]) -> Iterator[list[Node]]:
    """Lists of free nodes in graph order, ``seed`` among them, that have the pattern's ops and these values between them.
    Values that cross the border are not looked at."""
    ops, edges = pattern.ops, pattern.edges
    order = {id(n): i for i, n in enumerate(graph.nodes)}
    producers = {v: n for n in graph.nodes for _, v in n.outputs}

    def passes(a: Node, out: str | None, b: Node, into: str | None) -> bool:
        made = {v for p, v in a.outputs if out in (None, p)}
        return any(v in made and into in (None, p) for p, v in b.inputs)

    def extend(found: dict[int, Node]) -> Iterator[list[Node]]:
        if len(found) == len(ops):
            yield sorted(found.values(), key=lambda n: order[id(n)])
            return
        edge = next((e for e in edges if (e[0] in found) != (e[2] in found)), None)
        if edge is None:
            return
        a, out, b, into = edge
        if a in found:
            index, values = b, {v for p, v in found[a].outputs if out in (None, p)}
            choices = [n for n in graph.nodes if any(v in values for _, v in n.inputs)]
        else:
            index, values = a, [v for p, v in found[b].inputs if into in (None, p)]
            choices = [producers[v] for v in values if v in producers]
        for node in choices:
            if id(node) not in free or node.op != ops[index] or any(node is n for n in found.values()):
                continue
            trial = {**found, index: node}
            if all(passes(trial[i], p, trial[j], q) for i, p, j, q in edges if i in trial and j in trial):
                yield from extend(trial)

    for index, op in enumerate(ops):
        if op == seed.op and id(seed) in free:
            yield from extend({index: seed})


def matches(graph: Graph, seed: Node, pattern: Pattern, free: set[int],
            regions: Sequence[set[int]] = ()) -> Iterator[list[Node]]:  # fmt: skip
    """What ``find`` finds, each set of nodes once, where it is convex beside ``regions``."""
    seen = set()
    for nodes in find(graph, seed, pattern, free):
        ids = frozenset(map(id, nodes))
        if ids not in seen and convex(graph, set(ids), regions):
            seen.add(ids)
            yield nodes


def fits(region: Region, patterns: Iterable[tuple[str, ...] | Pattern]) -> bool:
    """Whether a region is what one of an engine's patterns describes."""
    free = {id(n) for n in region.nodes}
    return any(sorted(p.ops) == sorted(region.ops) and any(find(region.graph, region.nodes[0], p, free))
               for p in map(Pattern.of, patterns))  # fmt: skip
