"""Which engine's offer is the best for a node, and how a measurement and a prediction compare.

The rule: a measured time counts as it is, or as the host's cost of the launch where that is more; beside measured ones
a predicted time counts only after it is multiplied by the largest ratio of measured to predicted time that any of them
shows (at least 1), so that a prediction wins only if it would win even when it is as far off as the worst of them.
Measured times whose quartiles overlap are equal, and
of equals the manifest's first is taken. The longest region goes first, but an offer over several nodes is taken only
where it costs at most what the best offers for its nodes, each alone, cost together. An offer that a record calls wrong
or failed is not ranked at all."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from ..engines.arch import Arch
from ..engines.contract import Decline, Engine, Offer, Pattern, Region
from ..engines.manifest import BY_ID, MANIFEST, Entry
from ..engines.packages import import_error
from ..graph.ir import Graph, Node
from ..graph.ops.table import op_table
from .cover import entries_for, fits, grow, matches, region_of
from .policy import Policy
from .records import Record, Records, region_key, short_name

TIMES = ("predicted us", "roofline us", "measured us")
"""Headings of ``Candidate.times``."""
_ORDER = {e.id: i for i, e in enumerate(MANIFEST)}


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """One engine's answer for one region. ``seconds`` is predicted, ``roofline_seconds`` what datasheet rates allow at
    least, ``measured_seconds`` a record's time where there is one; ``reason`` says why it was chosen, or why not;
    ``offer`` is None where it declined or was not asked. ``region`` is the offer's."""

    engine: str
    seconds: float | None
    reason: str
    chosen: bool = False
    offer: Offer | None = None
    roofline_seconds: float | None = None
    measured_seconds: float | None = None
    region: Region | None = dataclasses.field(default=None, repr=False, compare=False)

    def times(self) -> tuple[str, str, str]:
        """Predicted, roofline and measured microseconds as a table shows them, empty where there is none."""
        return tuple(
            "" if s is None else f"{s * 1e6:.1f}" for s in (self.seconds, self.roofline_seconds, self.measured_seconds)
        )

    def to_json(self) -> dict[str, Any]:
        """Field -> plain value."""
        return {
            "engine": self.engine,
            "seconds": self.seconds,
            "roofline_seconds": self.roofline_seconds,
            "measured_seconds": self.measured_seconds,
            "reason": self.reason,
            "chosen": self.chosen,
            "offer": None if self.offer is None else self.offer.to_json(),
        }


@dataclasses.dataclass(frozen=True, slots=True)
class Priced:
    """An offer and what it is said to take. ``stale``: why a record of it does not count."""

    region: Region
    entry: Entry
    offer: Offer
    predicted: float
    roofline: float
    record: Record | None = None
    stale: str | None = None

    @property
    def size(self) -> int:
        return len(self.region.nodes)

    @property
    def measured(self) -> float | None:
        """Seconds of the record, None where there is none."""
        return None if self.record is None or self.record.microseconds is None else self.record.microseconds * 1e-6

    @property
    def paid(self) -> float | None:
        """The record's seconds as they rank: a record is the device's time alone, and a launch takes the host's at
        least."""
        if self.measured is None or self.record.arch == "cpu":  # there the host's time is the device's
            return self.measured
        return max(self.measured, self.offer.host_us * 1e-6)

    @property
    def seconds(self) -> float:
        """What the plan's sums take: measured where it is."""
        return self.predicted if self.measured is None else self.measured

    def equals(self, other: Priced) -> bool:
        """Whether both are measured and the difference is noise."""
        return self.measured is not None and other.measured is not None and self.record.equals(other.record)

    @property
    def said(self) -> str:
        """The time in a reason's words."""
        if self.measured is None:
            return f"predicted {self.predicted * 1e6:.1f} us"
        return f"measured {self.measured * 1e6:.1f} us ({short_name(self.record.gpu)})"

    def candidate(self, reason: str, chosen: bool = False) -> Candidate:
        note = f"; a record does not count: it is of {self.stale}" if self.stale else ""
        return Candidate(
            self.entry.id, self.predicted, reason + note, chosen, self.offer, self.roofline, self.measured, self.region
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """The nodes of a region, each on its best offer alone. ``measured`` is None unless all of them are."""

    predicted: float
    measured: float | None
    paid: float | None
    count: int

    @property
    def said(self) -> str:
        if self.measured is None:
            return f"predicted {self.predicted * 1e6:.1f} us"
        return f"measured {self.measured * 1e6:.1f} us"


class Refused(Decline):
    """A decline that a record asks for."""


def costs(ways: Sequence[Priced | Parts]) -> list[float]:
    """Comparable seconds of several ways to compute one thing, by the rule of this module."""
    doubt = _doubt(ways)
    return [w.predicted * doubt if w.paid is None else w.paid for w in ways]


def _doubt(ways: Sequence[Priced | Parts]) -> float:
    return max([1.0, *(w.measured / w.predicted for w in ways if w.measured is not None)])


def _cheapest(offers: list[Priced]) -> Priced:
    """The best of offers that are in the manifest's order."""
    paid = costs(offers)
    best = offers[min(range(len(offers)), key=lambda i: paid[i])]
    return next(p for p in offers if p is best or p.equals(best))


class Ranking:
    """The offers for the nodes of one graph on one arch under one policy, each asked once; made anew for each cover."""

    def __init__(
        self, graph: Graph, arch: Arch, policy: Policy, records: Records | None = None, *, trial: bool = False
    ) -> None:
        """``trial``: engines on trial answer as the others do, and what a record says of an offer does not keep it out:
        for measuring."""
        self.graph, self.arch, self.policy, self._trial = graph, arch, policy, trial
        self._records = records if records is not None and records.of_arch(arch.name) else None
        self._alone: dict[int, tuple[list[Priced], list[Candidate]]] = {}

    def best(self, node: Node, free: set[int], regions: list[set[int]]) -> tuple[Priced | None, list[Candidate]]:
        """What runs ``node`` and the free nodes around it that it is best taken with, and all candidates, the chosen
        one first; None where no engine may run it. ``regions`` are the node ids of the regions of several nodes that
        are there already."""
        alone, declined = self.alone(node)
        fused, refused = self.fused(node, free, regions)
        best, lost = self._longest(fused)
        if best is None and alone:
            best = _cheapest(alone)
        apart = [p.candidate(lost[id(p)]) for p in fused if id(p) in lost]
        if best is None:
            return None, [*apart, *refused, *declined]
        standing = [p for p in fused if id(p) not in lost]
        engines = {p.entry.id for p in standing}
        offers = sorted((*standing, *(p for p in alone if p.entry.id not in engines)), key=lambda p: _ORDER[p.entry.id])
        rivals = [p for p in offers if p.size == best.size]
        losers = [p.candidate(_why_not(p, best, rivals)) for p in offers if p is not best]
        return best, [best.candidate(_why(best, offers, self.policy), True), *losers, *apart, *refused, *declined]

    def _longest(self, fused: list[Priced]) -> tuple[Priced | None, dict[int, str]]:
        """The longest offer that costs no more than its nodes apart, of equally long ones the cheapest; and why those
        that went before it are not taken, by their id."""
        lost: dict[int, str] = {}
        for size in sorted({p.size for p in fused}, reverse=True):
            equal = [p for p in fused if p.size == size]
            while equal:
                offer = _cheapest(equal)
                equal.remove(offer)
                parts = self._parts(offer) if self.policy.chooses else None
                if parts is None:
                    return offer, lost
                together, apart = costs([offer, parts])
                if together <= apart:
                    return offer, lost
                together_said = _beside(offer, [offer, parts])
                lost[id(offer)] = f"its {size} ops cost less apart: {parts.said}, together {together_said}"
        return None, lost

    def alone(self, node: Node) -> tuple[list[Priced], list[Candidate]]:
        """The offers for one node alone and the declines, in the manifest's order."""
        found = self._alone.get(id(node))
        if found is None:
            region, offers, declines = region_of(self.graph, [node]), [], []
            for entry in entries_for(node.op):
                answer = self._price(entry, region)
                if isinstance(answer, Priced):
                    offers.append(answer)
                else:
                    declines.append(Candidate(entry.id, None, answer.reason))
            found = self._alone[id(node)] = offers, declines
        return found

    def fused(self, node: Node, free: set[int], regions: list[set[int]]) -> tuple[list[Priced], list[Candidate]]:
        """For each engine its largest offer that takes other free nodes along, and what a record keeps out."""
        offers, refused = [], []
        for entry in entries_for(node.op):
            for nodes in self._shapes(node, free, regions, entry):
                region = region_of(self.graph, nodes)
                answer = self._price(entry, region)
                if isinstance(answer, Priced):
                    offers.append(answer)
                    break
                if isinstance(answer, Refused):
                    refused.append(Candidate(entry.id, None, f"{'+'.join(region.ops)}: {answer.reason}"))
        return offers, refused

    def _parts(self, offer: Priced) -> Parts | None:
        """None where some node has no offer alone."""
        predicted = measured = paid = 0.0
        for node in offer.region.nodes:
            offers, _ = self.alone(node)
            if not offers:
                return None
            one = _cheapest(offers)
            predicted += one.predicted + self._copy_seconds(node)
            measured += math.nan if one.measured is None else one.measured
            paid += math.nan if one.paid is None else one.paid
        known = not math.isnan(measured)
        return Parts(predicted, measured if known else None, paid if known else None, offer.size)

    def _copy_seconds(self, node: Node) -> float:
        """What the views that an op may give cost where they are not free: its readers, or the op itself, may have to
        copy them. A prediction counts them as copied; a measurement of the readers knows."""
        if not op_table()[node.op].aliases:
            return 0.0
        values = dict.fromkeys(v for _, v in (*node.inputs, *node.outputs))
        return self.arch.roofline(0, sum(self.graph.specs[v].nbytes() for v in values), "float32")

    def _price(self, entry: Entry, region: Region) -> Priced | Decline:
        answer = ask(entry, region, self.arch, self.policy, trial=self._trial)
        if isinstance(answer, Decline):
            return answer
        priced = self.priced(entry, region, answer)
        record = priced.record
        if record is not None and record.error is not None and self.policy.chooses and not self._trial:
            return Refused(f"{record.error} (when it was measured on {short_name(record.gpu)})")
        return priced

    def priced(self, entry: Entry, region: Region, offer: Offer) -> Priced:
        """An offer with its times."""
        roofline = region.roofline_seconds(self.arch)
        record = stale = None
        if self._records is not None:
            where = self.arch.name, region_key(region), entry.id, offer.knobs
            record, stale = self._records.find(*where), self._records.stale(*where)
        return Priced(region, entry, offer, offer.seconds(roofline), roofline, record, stale)

    def _shapes(self, node: Node, free: set[int], regions: list[set[int]], entry: Entry) -> Iterator[list[Node]]:
        """Sets of several nodes around ``node`` that an engine could take, largest first."""
        if entry.is_reference or self.arch.name not in entry.archs or entry.unusable():
            return
        engine: Engine = entry.load()
        if engine.fuses and self.arch.is_gpu:
            nodes = grow(self.graph, node, free, frozenset(entry.ops), regions=regions)
            if len(nodes) > 1:
                yield nodes
        for pattern in sorted(map(Pattern.of, engine.patterns), key=lambda p: len(p.ops), reverse=True):
            yield from matches(self.graph, node, pattern, free, regions)


def _why(best: Priced, offers: list[Priced], policy: Policy) -> str:
    """Why the best of the offers is the best."""
    if best.entry.id == policy.engine:
        return f"engine={policy.engine!r} is forced"
    if policy.engine is None and not policy.chooses:
        return "policy is reference"
    measured = "" if best.measured is None else f", {best.said}"
    if len(offers) == 1:
        return f"the only engine that offers{measured}"
    if best.size > max(p.size for p in offers if p is not best):
        return f"covers the most ops of {len(offers)} offers{measured}"
    return f"{'predicted fastest' if best.measured is None else 'fastest'} of {len(offers)} offers{measured}"


def _why_not(other: Priced, best: Priced, rivals: list[Priced]) -> str:
    """Why an offer is not the best one; ``rivals`` are the offers over as many ops as the best one's."""
    if other.size < best.size:
        return f"covers {other.size} op{'s' if other.size > 1 else ''}, {best.entry.id} covers {best.size}"
    paid = dict(zip(map(id, rivals), costs(rivals), strict=True))
    equal = paid[id(other)] == paid[id(best)] or other.equals(best)
    if other.measured is None and best.measured is None:
        us = f"{other.predicted * 1e6:.1f} us predicted, {best.entry.id}"
        return f"as fast: {us} comes first" if equal else f"slower: {us} {best.predicted * 1e6:.1f} us"
    first = " and comes first" if equal and _ORDER[best.entry.id] < _ORDER[other.entry.id] else ""
    return (
        f"{'as fast' if equal else 'slower'}: {_beside(other, rivals)}, {best.entry.id} {_beside(best, rivals)}{first}"
    )


def _beside(offer: Priced, ways: Sequence[Priced | Parts]) -> str:
    """An offer's time, and what a prediction counts as beside the measured ones among ``ways``."""
    doubt = _doubt(ways)
    if offer.measured is not None or doubt == 1.0:
        return offer.said
    return f"{offer.said} (counts as {offer.predicted * doubt * 1e6:.1f} us beside measured times)"


def ask(
    entry: Entry, region: Region, arch: Arch, policy: Policy, knobs: tuple | None = None, *, trial: bool = False
) -> Offer | Decline:
    """An entry's answer under the policy, with a pin's knobs if there is one: the cheap, import-free refusals first.
    ``trial``: an engine on trial answers as the others do."""
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
    if entry.trial and not trial and forced is not entry and knobs is None:
        return Decline(f"on trial: runs only where engine={entry.id!r} or a plan file names it")
    if import_error(entry.module):
        return Decline(entry.unusable())
    answer = _answer(entry, region, arch, policy, knobs)
    # an absent package comes last: nobody need install what would decline anyhow
    return Decline(why) if isinstance(answer, Offer) and (why := entry.absent()) else answer


def _answer(entry: Entry, region: Region, arch: Arch, policy: Policy, knobs: tuple | None) -> Offer | Decline:
    """What the engine itself says, held against the policy."""
    engine: Engine = entry.load()
    if knobs is None:
        answer = engine.match(region, arch)
    elif not entry.is_reference and any(op not in entry.ops for op in region.ops):
        answer = Decline(f"has no code for {', '.join(op for op in region.ops if op not in entry.ops)}")
    elif len(region.ops) > 1 and not engine.fuses and not fits(region, engine.patterns):
        answer = Decline("takes no region of several nodes such as this")
    else:
        answer = engine.offer_with(region, arch, knobs)
    if isinstance(answer, Offer):
        if policy.deterministic and not answer.deterministic:
            return Decline("policy is deterministic: its results may differ between runs")
        if policy.mode == "strict" and answer.emulated:
            return Decline("policy is strict: emulation is not allowed")
    return answer
