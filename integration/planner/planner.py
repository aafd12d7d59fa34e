"""A pure function from (graph, arch, policy, ...) to a plan: it never queries the device and never communicates."""

from __future__ import annotations

import dataclasses

from ..engines.arch import Arch
from ..engines.contract import Decline, Engine, Offer, Region
from ..engines.manifest import BY_ID, Entry
from ..graph.autodiff import Differentiated, differentiate
from ..graph.ir import Graph, Node
from ..graph.ops.table import op_table
from ..graph.verify import verify
from .cover import chain, entries_for, grow, region_of
from .policy import Policy


class PlanError(RuntimeError):
    """No engine may run a region under the policy in force; the message holds every candidate's reason."""


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """One engine's answer for one region. ``seconds`` is predicted; ``reason`` says why it was not chosen."""

    engine: str
    seconds: float | None
    reason: str
    chosen: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedRegion:
    region: Region
    engine: str  # "runner" for collectives
    offer: Offer
    candidates: tuple[Candidate, ...]
    seconds: float

    @property
    def ops(self) -> tuple[str, ...]:
        return self.region.ops


@dataclasses.dataclass(frozen=True, slots=True)
class GraphPlan:
    """The cover of one graph, in execution order."""

    graph: Graph
    regions: tuple[PlannedRegion, ...]

    @property
    def seconds(self) -> float:
        return sum(r.seconds for r in self.regions)


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """``forward`` also computes what the backward saves; ``backward`` is None where nothing needs a gradient."""

    signature: str
    arch: Arch
    policy: Policy
    derived: Differentiated | None
    forward: GraphPlan
    backward: GraphPlan | None

    def choices(self) -> list[dict]:
        """JSON-able: per region its pass, ops, engine, knobs, predicted microseconds and all other candidates."""
        rows = []
        for name, part in (("forward", self.forward), ("backward", self.backward)):
            for r in part.regions if part else ():
                rows.append({
                    "pass": name, "ops": list(r.ops), "engine": r.engine, "knobs": dict(r.offer.knobs),
                    "predicted_us": round(r.seconds * 1e6, 3), "launches": r.offer.launches,
                    "candidates": [dataclasses.asdict(c) for c in r.candidates],
                })  # fmt: skip
        return rows


def plan(
    graph: Graph,
    arch: Arch,
    policy: Policy | None = None,
    *,
    needs_grad: tuple[bool, ...] | None = None,
    grad_outputs: tuple[int, ...] | None = None,
    recompute: frozenset[str] = frozenset(),
    pins: dict | None = None,
) -> Plan:
    """Plan a graph for ``arch``.

    ``needs_grad`` has one flag per input (None: no gradient). The forward saves what a backward from any output reads;
    the planned backward starts from ``grad_outputs`` (default: ``primary_outputs``). ``recompute`` is the save policy;
    ``pins`` maps region signatures to engine ids (a plan file's content).
    Raises PlanError where the policy leaves a region without an engine, GraphError for a malformed graph.
    """
    policy = policy or Policy.of(None)
    verify(graph)
    if needs_grad is None or not any(needs_grad):
        return Plan(graph.signature(), arch, policy, None, _cover(graph, arch, policy, pins), None)
    derived = differentiate(graph, needs_grad, None, recompute)
    verify(derived.forward)
    starts = tuple(i for i in grad_outputs or primary_outputs(graph) if i in derived.grad_outputs)
    backward = derived.backward
    if starts and starts != derived.grad_outputs:
        backward = differentiate(graph, needs_grad, starts, recompute).backward
    verify(backward)
    return Plan(graph.signature(), arch, policy, derived, _cover(derived.forward, arch, policy, pins),
                _cover(backward, arch, policy, pins))  # fmt: skip


def primary_outputs(graph: Graph) -> tuple[int, ...]:
    """Positions of the outputs that usually receive a gradient: all but statistics such as an LSE, which are optional
    ports that nothing implies."""
    table, primary = op_table(), []
    for i, value in enumerate(graph.outputs):
        node = graph.producer(value)
        if node is not None:
            op = table[node.op]
            port = next(p for p, v in node.outputs if v == value)
            implied = op.implied({p: graph.specs[v] for p, v in node.inputs}, node.attributes) if op.implied else ()
            if port not in op.required_outputs and port not in implied:
                continue
        primary.append(i)
    return tuple(primary)


def _cover(graph: Graph, arch: Arch, policy: Policy, pins: dict | None) -> GraphPlan:
    free = {id(n) for n in graph.nodes}
    chosen: list[PlannedRegion] = []
    for node in graph.nodes:
        if id(node) not in free:
            continue
        planned = _best_region(graph, node, free, arch, policy, pins)
        free -= {id(n) for n in planned.region.nodes}
        chosen.append(planned)
    return GraphPlan(graph, _in_order(graph, chosen))


def _in_order(graph: Graph, regions: list[PlannedRegion]) -> tuple[PlannedRegion, ...]:
    """Regions so that each runs after what it reads; collectives as early as they can start, weight gradients last."""
    made_by = {v: i for i, r in enumerate(regions) for n in r.region.nodes for _, v in n.outputs}
    waiting = {i: {made_by[v] for v in r.region.graph.inputs if v in made_by} for i, r in enumerate(regions)}
    order: list[int] = []

    def urgency(i: int) -> tuple[int, int]:
        ops = regions[i].ops
        if regions[i].engine == "runner":
            return 0, i
        return (2 if all(op == "linear_wgrad" or op == "row_sum" for op in ops) else 1), i

    while waiting:
        ready = [i for i, deps in waiting.items() if not deps]
        first = min(ready, key=urgency)
        order.append(first)
        del waiting[first]
        for deps in waiting.values():
            deps.discard(first)
    return tuple(regions[i] for i in order)


def _best_region(graph: Graph, node: Node, free: set[int], arch: Arch, policy: Policy, pins) -> PlannedRegion:
    if op_table()[node.op].kind == "collective":
        region = region_of(graph, [node])
        return PlannedRegion(region, "runner", Offer(1.0), (), 0.0)
    best: tuple[int, float, Region, Entry, Offer] | None = None
    rejected: list[Candidate] = []
    offers: list[tuple[int, float, Region, Entry, Offer]] = []
    for entry in entries_for(node.op):
        for nodes in _shapes(graph, node, free, entry, arch):
            region = region_of(graph, nodes)
            answer = _ask(entry, region, arch, policy, pins)
            if isinstance(answer, Decline):
                if len(nodes) == 1:
                    rejected.append(Candidate(entry.id, None, answer.reason))
                continue
            offers.append((len(nodes), region.predicted_seconds(answer, arch), region, entry, answer))
            break
    if offers:
        # longest first; then the fastest; then the manifest's order
        best = min(offers, key=lambda o: (-o[0], o[1]))
    if best is None:
        reasons = "\n".join(f"  {c.engine}: {c.reason}" for c in rejected)
        raise PlanError(f"{node.op} on {arch.name} under policy {policy}: no engine may run it\n{reasons}\n"
                        "relax the policy, drop engine=, or install what the reasons name")  # fmt: skip
    size, seconds, region, entry, offer = best
    losers = [
        Candidate(e.id, s, f"covers {n} node(s), {s * 1e6:.1f} us predicted, against {size} and {seconds * 1e6:.1f} us")
        for n, s, _, e, _ in offers if e is not entry
    ]  # fmt: skip
    winner = Candidate(entry.id, seconds, "chosen", True)
    return PlannedRegion(region, entry.id, offer, (winner, *losers, *rejected), seconds)


def _shapes(graph: Graph, node: Node, free: set[int], entry: Entry, arch: Arch):
    """Node sets around ``node`` that an engine could take, largest first."""
    if entry.is_reference or arch.name not in entry.archs or entry.missing_package():
        yield [node]
        return
    engine: Engine = entry.load()
    if engine.fuses and arch.is_gpu:
        nodes = grow(graph, node, free, frozenset(entry.ops))
        if len(nodes) > 1:
            yield nodes
    for pattern in sorted(engine.patterns, key=len, reverse=True):
        nodes = chain(graph, node, pattern, free)
        if nodes and len(nodes) > 1:
            yield nodes
    yield [node]


def _ask(entry: Entry, region: Region, arch: Arch, policy: Policy, pins) -> Offer | Decline:
    """An entry's answer under the policy: the cheap, import-free refusals first."""
    forced = BY_ID[policy.engine] if policy.engine is not None else None
    if forced and entry is not forced and (forced.is_reference or any(op in forced.ops for op in region.ops)):
        # a forced engine holds for every op that it names; what it has no code for runs as usual
        return Decline(f"engine={policy.engine!r} is forced")
    if policy.mode == "reference" and not entry.is_reference and policy.engine is None:
        return Decline("policy is reference")
    if policy.mode == "strict" and entry.is_reference and policy.engine is None:
        return Decline("policy is strict: a reference is not allowed")
    if pins and (pinned := pins.get(region.graph.signature())) is not None and pinned != entry.id:
        return Decline(f"the plan file pins {pinned}")
    if arch.name not in entry.archs:
        return Decline(f"has no code for {arch.name}; it runs on {', '.join(entry.archs)}")
    package = entry.missing_package()
    if package:
        return Decline(f"needs the package {package!r}, which is not installed")
    answer = entry.load().match(region, arch)
    if isinstance(answer, Offer):
        if policy.deterministic and not answer.deterministic:
            return Decline("policy is deterministic: its results may differ between runs")
        if policy.mode == "strict" and answer.emulated:
            return Decline("policy is strict: emulation is not allowed")
    return answer
