"""A pure function from (graph, arch, policy, plan file, records) to a plan: it asks no device and never communicates.

Pinned regions come first, then every free node with what it is best taken with; ``rank.py`` compares the offers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from ..engines.arch import Arch
from ..engines.contract import Decline, Offer, Pattern, Region
from ..engines.manifest import BY_ID, MANIFEST
from ..graph.autodiff import Differentiated, accumulate_weight_grads, differentiate
from ..graph.ir import Graph, Node
from ..graph.ops.table import op_table
from ..graph.verify import verify
from .cover import convex, entries_for, find, region_of
from .plan_file import Pin, Pins
from .policy import Policy
from .rank import TIMES, Candidate, Ranking, ask
from .records import Records
from .text import aligned


class PlanError(RuntimeError):
    """No engine may run a region under the policy in force, or a plan file's pin no longer fits; the message holds
    every reason and the remedy. ``candidates`` are the engines that were asked, each with its reason."""

    def __init__(self, message: str, candidates: tuple[Candidate, ...] = ()) -> None:
        super().__init__(message)
        self.candidates = candidates


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedRegion:
    region: Region
    engine: str  # "runner" for collectives
    offer: Offer
    candidates: tuple[Candidate, ...]
    seconds: float  # measured where a record says so, else predicted

    @property
    def ops(self) -> tuple[str, ...]:
        return self.region.ops

    @property
    def measured_seconds(self) -> float | None:
        """The record's time, None where there is none."""
        return self.candidates[0].measured_seconds if self.candidates else None

    @property
    def predicted_seconds(self) -> float:
        """By datasheet rates, whether or not there is a record."""
        return self.candidates[0].seconds if self.candidates else 0.0


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

    def __str__(self) -> str:
        """One line per region: pass, ops, engine, predicted, roofline and measured time and why; then every other
        candidate with its reason."""
        rows = [("pass", "ops", "engine", *TIMES, "why")]
        for name, part in (("forward", self.forward), ("backward", self.backward)):
            for r in part.regions if part else ():
                first, *others = r.candidates or (Candidate("runner", 0.0, "a collective: issued by the runner"),)
                rows.append((name, "+".join(r.ops), r.engine, *first.times(), first.reason))
                rows += [("", "", f"not {o.engine}", *o.times(), o.reason) for o in others]
        return "\n".join([f"plan {self.signature} on {self.arch.name}, policy {self.policy.mode}", *aligned(rows)])

    def choices(self) -> list[dict]:
        """JSON-able: per region its pass, ops, engine, predicted and (None: no record) measured microseconds, what the
        engine offers, and all candidates."""
        rows = []
        for name, part in (("forward", self.forward), ("backward", self.backward)):
            for r in part.regions if part else ():
                rows.append({
                    "pass": name, "ops": list(r.ops), "engine": r.engine,
                    "predicted_us": round(r.predicted_seconds * 1e6, 3),
                    "measured_us": None if r.measured_seconds is None else round(r.measured_seconds * 1e6, 3),
                    **r.offer.to_json(), "candidates": [c.to_json() for c in r.candidates],
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
    accumulate: tuple[int, ...] = (),
    pins: Pins | None = None,
    records: Records | None = None,
) -> Plan:
    """Plan a graph for ``arch``.

    ``needs_grad`` has one flag per input (None: no gradient). The forward saves what a backward from any output reads;
    the planned backward starts from ``grad_outputs`` (default: ``primary_outputs``). ``recompute`` is the save policy;
    the gradients of the inputs at ``accumulate`` are added to float32 buffers where they are one product; ``pins`` (a
    plan file's content) name engine and knobs of regions: those are taken first, as they are, whatever ranking and a
    longer region would say. Pins of another arch do not apply, nor do pins under a policy that leaves no choice.
    ``records`` are measured times that rank offers in place of predictions (None: all are predicted). Raises PlanError
    where the policy leaves a region without an engine or a pinned engine declines, GraphError for a malformed graph.
    """
    policy = policy or Policy.of(None)
    verify(graph)
    if needs_grad is None or not any(needs_grad):
        return Plan(graph.signature(), arch, policy, None, _cover(graph, arch, policy, pins, records), None)
    derived = differentiate(graph, needs_grad, None, recompute)
    verify(derived.forward)
    starts = tuple(i for i in grad_outputs or primary_outputs(graph) if i in derived.grad_outputs)
    part = derived
    if starts and starts != derived.grad_outputs:
        part = differentiate(graph, needs_grad, starts, recompute)
    backward, _, _ = accumulate_weight_grads(part.backward, part.grads, accumulate)
    verify(backward)
    return Plan(graph.signature(), arch, policy, derived, _cover(derived.forward, arch, policy, pins, records),
                _cover(backward, arch, policy, pins, records))  # fmt: skip


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


def _cover(graph: Graph, arch: Arch, policy: Policy, pins: Pins | None, records: Records | None) -> GraphPlan:
    ranking = Ranking(graph, arch, policy, records)
    free = {id(n) for n in graph.nodes}
    chosen: list[PlannedRegion] = []
    regions: list[set[int]] = []  # of several nodes: what later ones must be convex beside

    def cover(choose: Callable[[Node], PlannedRegion | None]) -> None:
        for node in graph.nodes:
            if id(node) in free and (planned := choose(node)) is not None:
                ids = {id(n) for n in planned.region.nodes}
                free.difference_update(ids)
                chosen.append(planned)
                if len(ids) > 1:
                    regions.append(ids)

    rows = pins.of_arch(arch.name) if pins is not None and policy.chooses else {}
    if rows:
        cover(lambda node: _pinned_region(ranking, node, free, regions, pins))
    obeyed = len(chosen)
    cover(lambda node: _best_region(ranking, node, free, regions))
    for planned in chosen[obeyed:] if rows else ():
        if (key := planned.region.key()) in rows:  # it was not found by what it says of itself
            _hold(rows[key], key, planned.region, pins)
    return GraphPlan(graph, _in_order(graph, chosen))


def _pinned_region(
    ranking: Ranking, node: Node, free: set[int], regions: list[set[int]], pins: Pins
) -> PlannedRegion | None:
    """The longest pinned region that begins at ``node``, None where there is none."""
    graph, rows = ranking.graph, pins.of_arch(ranking.arch.name)
    known = {(p.ops, p.edges) for p in rows.values() if p.ops[0] == node.op} | {((node.op,), ())}
    for ops, edges in sorted(known, key=lambda s: (-len(s[0]), s)):
        for nodes in find(graph, node, Pattern(ops, edges), free):
            region = region_of(graph, nodes)
            key = region.key()
            if key not in rows:
                continue
            _hold(rows[key], key, region, pins)
            if len(ops) == 1 or convex(graph, {id(n) for n in nodes}, regions):
                return _obey(rows[key], region, ranking, pins)
    return None


def _hold(pin: Pin, key: str, region: Region, pins: Pins) -> None:
    """Refuses a pin that describes another region than its key does: it would not be found, and so be ignored."""
    for field, said, true in (("ops", pin.ops, region.ops), ("edges", pin.edges, region.edges())):
        if said != true:
            raise PlanError(f"{pins.source}: pin {key}: {field} = {list(said)}: the region of that key has "
                            f"{list(true)}; {pins.remedy}")  # fmt: skip


def _obey(pin: Pin, region: Region, ranking: Ranking, pins: Pins) -> PlannedRegion:
    entry = BY_ID[pin.engine]
    answer = ask(entry, region, ranking.arch, ranking.policy, pin.knobs)
    if isinstance(answer, Decline):
        raise PlanError(f"{'+'.join(pin.ops)} on {ranking.arch.name} {ranking.policy.said}: {pins.source} pins "
                        f"{pin.engine} with knobs {dict(pin.knobs)}, which no longer fits: {pin.engine}: "
                        f"{answer.reason}; {pins.remedy}")  # fmt: skip
    ids = dict.fromkeys(e.id for op in pin.ops for e in entries_for(op) if e is not entry)
    others = (Candidate(e, None, f"{pins.source} pins {entry.id}") for e in ids)
    priced = ranking.priced(entry, region, answer)
    winner = priced.candidate(f"pinned by {pins.source}", True)
    return PlannedRegion(region, entry.id, answer, (winner, *others), priced.seconds)


def _in_order(graph: Graph, regions: list[PlannedRegion]) -> tuple[PlannedRegion, ...]:
    """Regions so that each runs after what it reads. Collectives as early as they can start and their readers as late,
    so that products run beside them; a weight gradient right after the data gradient of its product, so that what the
    two read is freed early."""
    made_by = {v: i for i, r in enumerate(regions) for n in r.region.nodes for _, v in n.outputs}
    waiting = {i: {made_by[v] for v in r.region.graph.inputs if v in made_by} for i, r in enumerate(regions)}
    table = op_table()
    data_grads = {i: {n.input("dy") for n in r.region.nodes if n.op.endswith("_dgrad")} for i, r in enumerate(regions)}
    order: list[int] = []
    flying: dict[str, int] = {}  # results of collectives that nobody has read yet -> when they were issued

    def urgency(i: int) -> tuple[int, int, int]:
        region = regions[i].region
        awaited = [flying[v] for v in region.graph.inputs if v in flying]
        if regions[i].engine == "runner":
            return 0, 0, i
        if awaited:
            return 4, max(awaited), i
        if all(table[op].weight_gradient or op == "row_sum" for op in region.ops):
            read = set(region.graph.inputs)
            return (3 if any(read & data_grads[k] for k in waiting) else 1), 0, i
        return 2, 0, i

    while waiting:
        first = min((i for i, deps in waiting.items() if not deps), key=urgency)
        order.append(first)
        del waiting[first]
        for v in regions[first].region.graph.inputs:
            flying.pop(v, None)
        if regions[first].engine == "runner":
            flying |= dict.fromkeys(regions[first].region.graph.outputs, len(order))
        for deps in waiting.values():
            deps.discard(first)
    return tuple(regions[i] for i in order)


def _best_region(ranking: Ranking, node: Node, free: set[int], regions: list[set[int]]) -> PlannedRegion:
    if op_table()[node.op].kind == "collective":
        region = region_of(ranking.graph, [node])
        return PlannedRegion(region, "runner", Offer(1.0), (), 0.0)
    best, candidates = ranking.best(node, free, regions)
    if best is None:
        reasons = "\n".join(f"  {c.engine}: {c.reason}" for c in candidates)
        raise PlanError(f"{node.op} on {ranking.arch.name} {ranking.policy.said}: no engine may run it\n{reasons}\n"
                        f"{_ways_out(ranking.policy, ranking.arch, candidates)}", tuple(candidates))  # fmt: skip
    return PlannedRegion(best.region, best.entry.id, best.offer, tuple(candidates), best.seconds)


def _ways_out(policy: Policy, arch: Arch, candidates: Sequence[Candidate]) -> str:
    """What to change where no engine may run a region: only what some candidate's reason asks for."""
    ways = [] if policy.engine is None else ["drop engine="]
    if policy.engine is None and policy.mode == "strict":
        ways.append("set the policy auto")
    if policy.deterministic and any(c.reason.startswith("policy is deterministic") for c in candidates):
        ways.append("do without deterministic")
    absent = {e.absent() for e in MANIFEST if arch.name in e.archs}
    if any(c.reason in absent for c in candidates if policy.engine in (None, c.engine)):
        ways.append("install what the reasons name")
    return ", or ".join(ways) or "change what the reasons name"
