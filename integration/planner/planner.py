"""A pure function from (graph, arch, policy, ...) to a plan: it never queries the device and never communicates."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from ..engines.arch import Arch
from ..engines.contract import Decline, Engine, Offer, Region
from ..engines.manifest import BY_ID, Entry
from ..graph.autodiff import Differentiated, accumulate_weight_grads, differentiate
from ..graph.ir import Graph, Node
from ..graph.ops.table import op_table
from ..graph.verify import verify
from .cover import chain, convex, entries_for, find, grow, region_of
from .plan_file import Pin, Pins
from .policy import Policy
from .text import aligned


class PlanError(RuntimeError):
    """No engine may run a region under the policy in force, or a plan file's pin no longer fits; the message holds
    every reason and the remedy. ``candidates`` are the engines that were asked, each with its reason."""

    def __init__(self, message: str, candidates: tuple[Candidate, ...] = ()) -> None:
        super().__init__(message)
        self.candidates = candidates


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """One engine's answer for one region. ``seconds`` is predicted; ``reason`` says why it was chosen, or why not; ``offer``
    is None where it declined or was not asked."""

    engine: str
    seconds: float | None
    reason: str
    chosen: bool = False
    offer: Offer | None = None

    def to_json(self) -> dict[str, Any]:
        """Field -> plain value."""
        return {"engine": self.engine, "seconds": self.seconds, "reason": self.reason, "chosen": self.chosen,
                "offer": None if self.offer is None else self.offer.to_json()}  # fmt: skip


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

    def __str__(self) -> str:
        """One line per region: pass, ops, engine, predicted time and why; then every other candidate with its reason."""
        rows = [("pass", "ops", "engine", "predicted us", "why")]
        for c in self.choices():
            first, *others = c["candidates"] or [{"reason": "a collective: issued by the runner"}]
            rows.append((c["pass"], "+".join(c["ops"]), c["engine"], f"{c['predicted_us']:.1f}", first["reason"]))
            rows += [("", "", f"not {o['engine']}", "" if o["seconds"] is None else f"{o['seconds'] * 1e6:.1f}", o["reason"]) for o in others]
        return "\n".join([f"plan {self.signature} on {self.arch.name}, policy {self.policy.mode}", *aligned(rows)])

    def choices(self) -> list[dict]:
        """JSON-able: per region its pass, ops, engine, predicted microseconds, what the engine offers, and all candidates."""
        rows = []
        for name, part in (("forward", self.forward), ("backward", self.backward)):
            for r in part.regions if part else ():
                rows.append({
                    "pass": name, "ops": list(r.ops), "engine": r.engine, "predicted_us": round(r.seconds * 1e6, 3),
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
) -> Plan:
    """Plan a graph for ``arch``.

    ``needs_grad`` has one flag per input (None: no gradient). The forward saves what a backward from any output reads;
    the planned backward starts from ``grad_outputs`` (default: ``primary_outputs``). ``recompute`` is the save policy;
    the gradients of the inputs at ``accumulate`` are added to float32 buffers where they are one product;
    ``pins`` (a plan file's content) name engine and knobs of regions: those are taken first, as they are, whatever
    ranking and a longer region would say. Pins of another arch do not apply, nor do pins under a policy that leaves no choice.
    Raises PlanError where the policy leaves a region without an engine or a pinned engine declines, GraphError for a
    malformed graph.
    """
    policy = policy or Policy.of(None)
    verify(graph)
    if needs_grad is None or not any(needs_grad):
        return Plan(graph.signature(), arch, policy, None, _cover(graph, arch, policy, pins), None)
    derived = differentiate(graph, needs_grad, None, recompute)
    verify(derived.forward)
    starts = tuple(i for i in grad_outputs or primary_outputs(graph) if i in derived.grad_outputs)
    part = derived
    if starts and starts != derived.grad_outputs:
        part = differentiate(graph, needs_grad, starts, recompute)
    backward, _, _ = accumulate_weight_grads(part.backward, part.grads, accumulate)
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


def _cover(graph: Graph, arch: Arch, policy: Policy, pins: Pins | None) -> GraphPlan:
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
        cover(lambda node: _pinned_region(graph, node, free, regions, arch, policy, pins))
    obeyed = len(chosen)
    cover(lambda node: _best_region(graph, node, free, regions, arch, policy))
    for planned in chosen[obeyed:] if rows else ():
        if (key := planned.region.key()) in rows:  # it was not found by what it says of itself
            _hold(rows[key], key, planned.region, pins)
    return GraphPlan(graph, _in_order(graph, chosen))


def _pinned_region(graph: Graph, node: Node, free: set[int], regions: list[set[int]], arch: Arch, policy: Policy,
                   pins: Pins) -> PlannedRegion | None:  # fmt: skip
    """The longest pinned region that begins at ``node``, None where there is none."""
    rows = pins.of_arch(arch.name)
    known = {(p.ops, p.edges) for p in rows.values() if p.ops[0] == node.op} | {((node.op,), ())}
    for ops, edges in sorted(known, key=lambda s: (-len(s[0]), s)):
        for nodes in find(graph, node, ops, edges, free):
            region = region_of(graph, nodes)
            key = region.key()
            if key not in rows:
                continue
            _hold(rows[key], key, region, pins)
            if len(ops) == 1 or convex(graph, {id(n) for n in nodes}, regions):
                return _obey(rows[key], region, arch, policy, pins)
    return None


def _hold(pin: Pin, key: str, region: Region, pins: Pins) -> None:
    """Refuses a pin that describes another region than the one that its key is made from: it would not be found and so be ignored."""
    for field, said, true in (("ops", pin.ops, region.ops), ("edges", pin.edges, region.edges())):
        if said != true:
            raise PlanError(f"{pins.source}: pin {key}: {field} = {list(said)}: the region of that key has {list(true)}; {pins.remedy}")


def _obey(pin: Pin, region: Region, arch: Arch, policy: Policy, pins: Pins) -> PlannedRegion:
    entry = BY_ID[pin.engine]
    answer = _ask(entry, region, arch, policy, pin.knobs)
    if isinstance(answer, Decline):
        raise PlanError(f"{'+'.join(pin.ops)} on {arch.name} under policy {policy}: {pins.source} pins {pin.engine} "
                        f"with knobs {dict(pin.knobs)}, which no longer fits: {pin.engine}: {answer.reason}; "
                        f"{pins.remedy}")  # fmt: skip
    ids = dict.fromkeys(e.id for op in pin.ops for e in entries_for(op) if e is not entry)
    others = (Candidate(e, None, f"{pins.source} pins {entry.id}") for e in ids)
    seconds = region.predicted_seconds(answer, arch)
    winner = Candidate(entry.id, seconds, f"pinned by {pins.source}", True, answer)
    return PlannedRegion(region, entry.id, answer, (winner, *others), seconds)


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


def _best_region(graph: Graph, node: Node, free: set[int], regions: list[set[int]], arch: Arch,
                 policy: Policy) -> PlannedRegion:  # fmt: skip
    if op_table()[node.op].kind == "collective":
        region = region_of(graph, [node])
        return PlannedRegion(region, "runner", Offer(1.0), (), 0.0)
    rejected: list[Candidate] = []
    offers: list[tuple[int, float, Region, Entry, Offer]] = []
    for entry in entries_for(node.op):
        for nodes in _shapes(graph, node, free, regions, entry, arch):
            region = region_of(graph, nodes)
            answer = _ask(entry, region, arch, policy)
            if isinstance(answer, Decline):
                if len(nodes) == 1:
                    rejected.append(Candidate(entry.id, None, answer.reason))
                continue
            offers.append((len(nodes), region.predicted_seconds(answer, arch), region, entry, answer))
            break
    if not offers:
        reasons = "\n".join(f"  {c.engine}: {c.reason}" for c in rejected)
        raise PlanError(f"{node.op} on {arch.name} under policy {policy}: no engine may run it\n{reasons}\n"
                        "relax the policy, drop engine=, or install what the reasons name", tuple(rejected))  # fmt: skip
    best = min(offers, key=lambda o: (-o[0], o[1]))  # longest first; then the fastest; then the manifest's order
    size, seconds, region, entry, offer = best
    losers = [Candidate(o[3].id, o[1], _why_not(o, best), offer=o[4]) for o in offers if o is not best]
    winner = Candidate(entry.id, seconds, _why(best, offers, policy), True, offer)
    return PlannedRegion(region, entry.id, offer, (winner, *losers, *rejected), seconds)


def _why(best: tuple, offers: list[tuple], policy: Policy) -> str:
    """Why the best of the offers is the best."""
    if not policy.chooses:
        return "policy is reference" if policy.engine is None else f"engine={policy.engine!r} is forced"
    if len(offers) == 1:
        return "the only engine that offers"
    return f"{'covers the most ops' if best[0] > max(o[0] for o in offers if o is not best) else 'predicted fastest'} of {len(offers)} offers"


def _why_not(other: tuple, best: tuple) -> str:
    """Why an offer is not the best one; both are (number of ops, seconds, region, entry, offer)."""
    (ops, seconds, *_), (most, least, _, chosen, _) = other, best
    if ops < most:
        return f"covers {ops} op{'s' if ops > 1 else ''}, {chosen.id} covers {most}"
    if seconds == least:
        return f"as fast: {seconds * 1e6:.1f} us predicted, {chosen.id} comes first"
    return f"slower: {seconds * 1e6:.1f} us predicted, {chosen.id} {least * 1e6:.1f} us"


def _shapes(graph: Graph, node: Node, free: set[int], regions: list[set[int]], entry: Entry, arch: Arch):
    """Node sets around ``node`` that an engine could take, largest first."""
    if entry.is_reference or arch.name not in entry.archs or entry.unusable():
        yield [node]
        return
    engine: Engine = entry.load()
    if engine.fuses and arch.is_gpu:
        nodes = grow(graph, node, free, frozenset(entry.ops), regions=regions)
        if len(nodes) > 1:
            yield nodes
    for pattern in sorted(engine.patterns, key=len, reverse=True):
        nodes = chain(graph, node, pattern, free, regions)
        if nodes and len(nodes) > 1:
            yield nodes
    yield [node]


def _ask(entry: Entry, region: Region, arch: Arch, policy: Policy, knobs: tuple | None = None) -> Offer | Decline:
    """An entry's answer under the policy, with a pin's knobs if there is one: the cheap, import-free refusals first."""
    forced = BY_ID[policy.engine] if policy.engine is not None else None
    if forced and entry is not forced and (forced.is_reference or any(op in forced.ops for op in region.ops)):
        # a forced engine holds for every op that it names; what it has no code for runs as usual
        return Decline(f"engine={policy.engine!r} is forced")
    if policy.mode == "reference" and not entry.is_reference and policy.engine is None:
        return Decline("policy is reference")
    if policy.mode == "strict" and entry.is_reference and policy.engine is None:
        return Decline("policy is strict: a reference is not allowed")
    if arch.name not in entry.archs:
        return Decline(f"has no code for {arch.name}; it runs on {', '.join(entry.archs)}")
    unusable = entry.unusable()
    if unusable:
        return Decline(unusable)
    if entry.trial and forced is not entry and knobs is None:
        return Decline(f"on trial: runs only where engine={entry.id!r} or a plan file names it")
    engine: Engine = entry.load()
    if knobs is None:
        answer = engine.match(region, arch)
    elif not entry.is_reference and any(op not in entry.ops for op in region.ops):
        answer = Decline(f"has no code for {', '.join(op for op in region.ops if op not in entry.ops)}")
    elif len(region.ops) > 1 and not engine.fuses and region.ops not in engine.patterns:
        answer = Decline("takes no region of several nodes such as this")
    else:
        answer = engine.offer_with(region, arch, knobs)
    if isinstance(answer, Offer):
        if policy.deterministic and not answer.deterministic:
            return Decline("policy is deterministic: its results may differ between runs")
        if policy.mode == "strict" and answer.emulated:
            return Decline("policy is strict: emulation is not allowed")
    return answer
