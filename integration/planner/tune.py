"""Measures what ranking otherwise predicts: every region that an engine offers for, on the device at hand.

Inputs are random (``graph/examples.py``), those that a view gives have its strides. They rotate through more than twice
the L2 cache, engines of one region take turns block by block, and the figure is the median over blocks.

Before it is timed, an engine's result is held against the reference one precision up, by the rule of ``oracle.py``.
From 16-bit inputs also the L2 error may be at most 8 eps of the L2 norm: one unit at the largest value says little of
small ones. Two things are added to the limit. float32 results: the rounding of their own sums (``_sum_error``). Ops
that round inside (``_ROUNDED_INSIDE``): eps at the largest value, since the reference, which stays in float32 there, is
a stricter peer than PyTorch's computation in 16 bits."""

from __future__ import annotations

import dataclasses
import gc
import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..engines.arch import Arch
from ..engines.contract import Region
from ..engines.manifest import BY_ID
from ..graph.examples import WRITTEN, example, sizes_of
from ..graph.ir import Graph, Node
from ..graph.ops.table import op_table
from ..plan_cache.memory import context
from .cover import region_of
from .oracle import Wrong, errors, limit
from .planner import GraphPlan, Plan, plan
from .policy import Policy
from .rank import Priced, Ranking
from .records import Record, Records, gpu_name, plain_knobs, region_key, versions_of
from .text import aligned

log = logging.getLogger("layerplan")
_ROUNDED_INSIDE = frozenset({"sdpa", "sdpa_bwd", "linear_cross_entropy", "linear_cross_entropy_bwd"})
_LOST = "lost the GPU"
_BLOCKS = {"cuda": 15, "cpu": 7}
_BLOCK_SECONDS = {"cuda": 2e-3, "cpu": 2e-4}
_MOST_LAUNCHES = 200
_L2_EPS = 8.0
_MEMORY_SHARE = 0.25  # of what is free: what rotating inputs may take
_SLEEP_CLOCK, _MOST_SLEEP = 2e9, 1e8  # cycles a second, about, and the most that the GPU is kept waiting for the host


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """One graph of a model as it is planned: ``options`` of ``planner.plan``, and how often a micro-batch runs it under
    ``policy``."""

    kind: str
    name: str
    graph: Graph
    policy: Policy
    options: Mapping[str, Any]
    times: int = 1


class LostDevice(RuntimeError):
    """A launch left the GPU's context unusable; ``record`` says whose."""

    def __init__(self, record: Record) -> None:
        super().__init__(
            f"{'+'.join(record.ops)} on {record.engine} {record.error}: nothing more can run in this process"
        )
        self.record = record


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """One distinct region, the offers for it, and where its inputs come from: ``views`` are the nodes of ``parent``
    whose outputs are views when the plan runs. ``seconds`` is what a micro-batch spends in it at least."""

    region: Region
    parent: Graph
    views: Mapping[str, Node]
    offers: dict[tuple[str, Any], Priced]
    seconds: float

    @property
    def title(self) -> str:
        graph = self.region.graph
        return f"{'+'.join(self.region.ops)}  {', '.join(_shown(graph, v) for v in graph.inputs)}"


@dataclasses.dataclass(frozen=True, slots=True)
class TunedRegion:
    """One region's figures. ``rows``: (offer, its record; None where it was not measured, why)."""

    site: Site
    rows: tuple[tuple[Priced, Record | None, str], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Tuned:
    """``records``: those that were there, with what was measured. ``before`` and ``now``: region key -> engines that
    the plans ran or run it on. ``left``: regions that the budget left out; ``lost``: why it ended early."""

    gpu: str
    regions: tuple[TunedRegion, ...]
    records: Records
    before: Mapping[str, frozenset[str]]
    now: Mapping[str, frozenset[str]]
    left: int = 0
    lost: str | None = None

    def __str__(self) -> str:
        """A table per region: engine, median and quartiles, share of the roofline, and what the plans choose."""
        lines = [f"measured on {self.gpu}"]
        for tuned in self.regions:
            key = region_key(tuned.site.region)
            chosen = self.now.get(key, frozenset())
            taken = [r for p, r, _ in tuned.rows if p.entry.id in chosen and r is not None and r.quartiles is not None]
            rows = [("engine", "us", "quartiles", "of roofline", "")]
            for offer, record, note in sorted(tuned.rows, key=_time_of):
                alike = record is not None and record.quartiles is not None and any(map(record.equals, taken))
                said = [
                    *(["chosen now"] if offer.entry.id in chosen else ["as fast (quartiles overlap)"] if alike else []),
                    *(["chosen before"] if offer.entry.id in self.before.get(key, ()) else []),
                    *(["on trial"] if offer.entry.trial else []),
                    *([note] if note else []),
                ]
                if record is None or record.microseconds is None:
                    rows.append((offer.entry.id, "", "", "", "; ".join(said)))
                    continue
                us, (low, high) = record.microseconds, record.quartiles
                share = f"{offer.roofline * 1e8 / us:.0f} %" if record.arch != "cpu" else ""
                rows.append((offer.entry.id, f"{us:.1f}", f"{low:.1f} .. {high:.1f}", share, "; ".join(said)))
            if all(record is None or record.arch == "cpu" for _, record, _ in tuned.rows):
                rows = [(*row[:3], row[4]) for row in rows]  # a CPU has no roofline: its rates are no datasheet's
            lines += ["", tuned.site.title, *(f"  {line}" for line in aligned(rows))]
        if self.left:
            lines += [
                "",
                f"{self.left} regions were not measured: the budget was spent; a larger --budget, "
                "or the same command again, goes on",
            ]
        if self.lost:
            lines += ["", self.lost]
        return "\n".join(lines)


def tune(
    workloads: Sequence[Workload],
    device: torch.device,
    *,
    before: Records,
    budget: float,
    keep: Callable[[Records], None],
) -> Tuned:
    """Measure every region of ``workloads`` on ``device`` for at most about ``budget`` seconds, those that weigh most
    first, regions without any record before the others. ``before``: records that are there; ``keep`` is given all of
    them after each region."""
    arch, gpu = Arch.of_device(-1 if device.type == "cpu" else device.index or 0), gpu_name(device)
    records, done, lost, end = before, [], None, time.monotonic() + budget
    known = {r.region for r in before.rows if r.arch == arch.name and r.gpu == gpu and r.stale() is None}

    def planned() -> list[Plan]:
        return [plan(w.graph, arch, w.policy, records=records, **w.options) for w in workloads]

    first = now = planned()
    seen: set[str] = set()
    # a region that its ops apart have beaten leaves smaller ones, which the next plans consider
    while (
        lost is None
        and (new := [s for s in _sites(workloads, now, arch) if region_key(s.region) not in seen])
        and time.monotonic() < end
    ):
        for site in sorted(new, key=lambda s: (region_key(s.region) in known, -s.seconds)):
            if time.monotonic() > end:
                break
            log.info("measuring %s", site.title)
            seen.add(region_key(site.region))
            try:
                rows = _Bench(site, arch, device, gpu, before).run()
            except LostDevice as error:
                records, lost = records.merged([error.record]), str(error)
                keep(records)
                break
            records = records.merged(r for _, r, _ in rows if r is not None)
            keep(records)
            done.append(TunedRegion(site, rows))
        now = planned()
    left = sum(region_key(s.region) not in seen for s in _sites(workloads, now, arch)) if lost is None else 0
    return Tuned(gpu, tuple(done), records, _chosen(first), _chosen(now), left, lost)


def _time_of(row: tuple[Priced, Record | None, str]) -> float:
    """What a table is sorted by: rows without a time last."""
    _, record, _ = row
    return math.inf if record is None or record.microseconds is None else record.microseconds


def _parts(made: Plan) -> list[GraphPlan]:
    return [made.forward, *([made.backward] if made.backward else [])]


def _chosen(plans: Sequence[Plan]) -> dict[str, frozenset[str]]:
    found: dict[str, frozenset[str]] = {}
    for region in (r for p in plans for part in _parts(p) for r in part.regions if r.engine in BY_ID):
        key = region_key(region.region)
        found[key] = found.get(key, frozenset()) | {region.engine}
    return found


def _sites(workloads: Sequence[Workload], plans: Sequence[Plan], arch: Arch) -> list[Site]:
    """Every distinct region that an engine offers for: nodes alone, each engine's largest regions, and those that the
    plans considered."""
    found: dict[str, Site] = {}
    for work, made in zip(workloads, plans, strict=True):
        for part in _parts(made):
            ranking = Ranking(part.graph, arch, Policy(), trial=True)
            free, views = {id(n) for n in part.graph.nodes}, _views(part)
            offers: list[Priced] = []
            for node in part.graph.nodes:
                if op_table()[node.op].kind == "collective":
                    continue
                alone, _ = ranking.alone(node)
                plain = next((p.predicted for p in alone if p.entry.is_reference), math.inf)
                # an engine that itself predicts more than the reference (Inductor on a CPU) is there to be named
                offers += [p for p in alone if p.predicted <= plain]
                offers += ranking.fused(node, free, [])[0]
            considered = [
                (c.engine, c.region, c.offer)
                for r in part.regions
                for c in r.candidates
                if c.region is not None and len(c.region.nodes) > 1
            ]
            offers += [ranking.priced(BY_ID[engine], region, offer) for engine, region, offer in considered]
            for offer in offers:
                key = region_key(offer.region)
                site = found.get(key) or Site(offer.region, part.graph, views, {}, 0.0)
                site.offers[offer.entry.id, offer.offer.knobs] = offer
                found[key] = dataclasses.replace(site, seconds=max(site.seconds, work.times * offer.roofline))
    return list(found.values())


def _views(part: GraphPlan) -> dict[str, Node]:
    """The values that are views when the plan runs, with their nodes."""
    alone = [r.region.nodes[0] for r in part.regions if len(r.region.nodes) == 1 and r.engine in BY_ID]
    return {v: n for n in alone if op_table()[n.op].aliases for _, v in n.outputs}


def _shown(graph: Graph, value: str) -> str:
    spec = graph.specs[value]
    return f"{spec.dtype}[{', '.join(str(d if isinstance(d, int) else d.hint) for d in spec.shape)}]"


# ---- one region ------------------------------------------------------------------------------------------------------


class _Bench:
    """Checks and times the offers of one region."""

    def __init__(self, site: Site, arch: Arch, device: torch.device, gpu: str, before: Records) -> None:
        self.site, self.arch, self.device, self.gpu = site, arch, device, gpu
        self.graph = site.region.graph
        self.generator = torch.Generator(device).manual_seed(0)
        self._lost = {
            (r.engine, r.knobs)
            for r in before.rows
            if r.region == region_key(site.region)
            and r.arch == arch.name
            and r.error
            and r.error.startswith(_LOST)
            and r.stale() is None
        }
        self._turn = 0

    def run(self) -> tuple[tuple[Priced, Record | None, str], ...]:
        """Each offer with its record. Raises LostDevice."""
        rows: list[tuple[Priced, Record | None, str]] = []
        ready: list[tuple[Priced, Callable[..., Any]]] = []
        with torch.no_grad():
            try:
                check = _Check(self)
            except Exception as error:  # no example, or no room even for small ones: nobody's fault, so nobody's record
                return tuple((p, None, f"not measured: {_first_line(error)}") for p in self.site.offers.values())
            for offer in self.site.offers.values():
                if (offer.entry.id, plain_knobs(offer.offer.knobs)) in self._lost:
                    rows.append(
                        (offer, None, f"not measured: {_LOST} in an earlier run; remove its record to try again")
                    )
                    continue
                try:
                    launch = offer.entry.load().build(context(self.site.region, self.arch, offer.offer)).launch
                    wrong = check(launch)
                except torch.OutOfMemoryError as error:  # the machine may be shared
                    rows.append((offer, None, f"not measured: {_first_line(error)}"))
                except Exception as error:
                    self._see_that_the_device_lives(offer, error)
                    rows.append((offer, self._record(offer, error=(text := f"failed: {_first_line(error)}")), text))
                else:
                    if wrong is None:
                        ready.append((offer, launch))
                    else:
                        rows.append((offer, self._record(offer, error=f"wrong: {wrong}"), f"wrong: {wrong}"))
            del check
            self.release()  # what the check held is room for inputs
            rows += self._timed(ready)
        self.release()
        return tuple(rows)

    def _timed(self, ready: list[tuple[Priced, Callable[..., Any]]]) -> list[tuple[Priced, Record | None, str]]:
        if not ready:
            return []
        try:
            copies = self._copies()
            counts = [self._launches(launch, copies) for _, launch in ready]
            blocks: list[list[float]] = [[] for _ in ready]
            for turn in range(_BLOCKS[self.device.type]):
                for i in (*range(turn % len(ready), len(ready)), *range(turn % len(ready))):
                    blocks[i].append(self._block(ready[i][1], copies, *counts[i]))
        except torch.OutOfMemoryError as error:
            return [(p, None, f"not measured: {_first_line(error)}") for p, _ in ready]
        except Exception as error:
            self._see_that_the_device_lives(ready[0][0], error)
            return [(p, None, f"not measured: {_first_line(error)}") for p, _ in ready]
        return [(p, self._record(p, seconds=times), "") for (p, _), times in zip(ready, blocks, strict=True)]

    def _record(self, offer: Priced, *, seconds: list[float] | None = None, error: str | None = None) -> Record:
        us = quartiles = None
        if seconds is not None:  # a clock's resolution: nothing takes no time at all
            low, us, high = (max(round(s * 1e6, 3), 0.001) for s in statistics.quantiles(seconds, n=4))
            quartiles = low, high
        region = self.site.region
        return Record(
            self.arch.name,
            self.gpu,
            region_key(region),
            region.ops,
            offer.entry.id,
            plain_knobs(offer.offer.knobs),
            tuple(sorted(versions_of(offer.entry))),
            us,
            quartiles,
            error,
        )

    def inputs(self, sizes: Mapping[str, int]) -> list[torch.Tensor]:
        """Fresh inputs of the region; views have the strides of their nodes."""
        made: dict[str, torch.Tensor] = {}

        def value(graph: Graph, name: str) -> torch.Tensor:
            node = self.site.views.get(name)
            if name not in made and node is not None:
                source = region_of(self.site.parent, [node]).graph
                result = op_table()[node.op].reference(
                    {p: value(source, v) for p, v in node.inputs}, node.attributes, tuple(p for p, _ in node.outputs)
                )
                made.update({v: result[p] for p, v in node.outputs})
            elif name not in made:
                made[name] = example(graph, name, sizes, self.generator)
            return made[name]

        return [value(self.graph, v) for v in self.graph.inputs]

    def _copies(self) -> list[list[torch.Tensor]]:
        """So many sets of inputs that one is no longer in the L2 cache when its turn comes again."""
        sizes = sizes_of(self.site.parent) | sizes_of(self.graph)
        first = self.inputs(sizes)
        nbytes = max(sum(t.untyped_storage().nbytes() for t in first), 1)
        if self.device.type != "cuda":
            return [first, self.inputs(sizes)]
        free, _ = torch.cuda.mem_get_info(self.device)
        l2 = torch.cuda.get_device_properties(self.device).L2_cache_size
        wanted = min(2 * l2 // nbytes + 2, max(int(_MEMORY_SHARE * free) // nbytes, 1), 4 * _MOST_LAUNCHES)
        return [first, *(self.inputs(sizes) for _ in range(wanted - 1))]

    def _launches(self, launch: Callable[..., Any], copies: list[list[torch.Tensor]]) -> tuple[int, float]:
        """(launches of a block, host seconds that issuing them takes), after a warm-up."""
        for inputs in (*copies[:2], copies[0]):
            launch(*inputs)
        once = self._block(launch, copies, 3, 0.0)
        count = min(max(math.ceil(_BLOCK_SECONDS[self.device.type] / max(once, 1e-7)), 1), _MOST_LAUNCHES)
        start = time.perf_counter()
        for i in range(count):
            launch(*copies[i % len(copies)])
        host = time.perf_counter() - start
        self.wait()
        return count, host

    def _block(self, launch: Callable[..., Any], copies: list[list[torch.Tensor]], count: int, host: float) -> float:
        """Seconds per launch. The GPU is kept waiting until the host has issued the block: gaps between short kernels
        are the host's."""
        turns = [copies[(self._turn + i) % len(copies)] for i in range(count)]
        self._turn += count
        if self.device.type != "cuda":
            start = time.perf_counter()
            for inputs in turns:
                launch(*inputs)
            return (time.perf_counter() - start) / count
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(min(1.2 * host * _SLEEP_CLOCK, _MOST_SLEEP)) + 1)
        first.record()
        for inputs in turns:
            launch(*inputs)
        last.record()
        last.synchronize()
        return first.elapsed_time(last) * 1e-3 / count

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _see_that_the_device_lives(self, offer: Priced, error: Exception) -> None:
        try:
            self.wait()
        except RuntimeError:
            raise LostDevice(self._record(offer, error=f"{_LOST}: {_first_line(error)}")) from error

    def release(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


class _Check:
    """Whether a launch of a region gives what its reference says, at the region's own sizes, or at the largest that the
    reference has memory for. Raises what the reference raises."""

    def __init__(self, bench: _Bench) -> None:
        region, self.bench = bench.site.region, bench
        self.reference = BY_ID["reference/eager"].load().build(context(region, bench.arch, None)).launch
        self.written = [
            any(p in WRITTEN for n in region.nodes for p, v in n.inputs if v == value) for value in region.graph.inputs
        ]
        floats = [
            getattr(torch, region.graph.specs[v].dtype) for v in region.graph.inputs if region.graph.specs[v].is_float
        ]
        self.dtype = min(floats, key=lambda d: d.itemsize, default=torch.float32)
        self.relative = torch.finfo(self.dtype).eps if _ROUNDED_INSIDE & set(region.ops) else 0.0
        self.sums = _sum_error(region)
        self.ends = _ends_of_rows(region)
        largest = max((d.hint for d in region.graph.dims()), default=1)
        while not self._prepared(largest):
            self.inputs = self.exact = self.peer = self.limits = ()
            bench.release()
            largest //= 2

    def _prepared(self, largest: int) -> bool:
        """Runs the reference at token dims of at most ``largest``; False where it has no memory for that."""
        try:
            self._prepare(largest)
        except torch.OutOfMemoryError:
            if largest < 2:
                raise
            return False
        return True

    def _prepare(self, largest: int) -> None:
        bench = self.bench
        sizes = sizes_of(bench.site.parent, largest) | sizes_of(bench.graph, largest)
        self.inputs = bench.inputs(sizes)
        self.exact = self._closed(self.reference(*map(self._wider, self.inputs)))
        self.peer = self._closed(self.reference(*self._own()))
        self.limits = [
            limit(p.dtype, e, p, self.relative + (self.sums if p.dtype is torch.float32 else 0.0))
            if p.is_floating_point()
            else None
            for p, e in zip(self.peer, self.exact, strict=True)
        ]

    def _own(self) -> list[torch.Tensor]:
        """The inputs, copies of those that are written to."""
        return [t.clone() if w else t for t, w in zip(self.inputs, self.written, strict=True)]

    def _closed(self, result: Any) -> tuple[torch.Tensor, ...]:
        """The outputs, without the rows in which anything may stand."""
        made = _tuple(result)
        if len(made) != len(self.ends):  # the caller says so
            return made
        return tuple(t if at is None else t[: int(self.inputs[at][-1])] for t, at in zip(made, self.ends, strict=True))

    def _wider(self, t: torch.Tensor) -> torch.Tensor:
        """A float tensor one precision up; a copy where it is not."""
        if not t.is_floating_point():
            return t
        wide = torch.float64 if self.dtype in (torch.float32, torch.float64) else torch.float32
        return t.clone() if t.dtype in (wide, torch.float64) else t.to(wide)

    def __call__(self, launch: Callable[..., Any]) -> str | None:
        """What is wrong with the result, None where nothing is."""
        # memory that comes back from the allocator holds NaN, so that what is not written shows
        dirty = [torch.full_like(p, float("nan")) for p in self.peer if p.is_floating_point()]
        del dirty
        made = self._closed(launch(*self._own()))
        self.bench.wait()
        if len(made) != len(self.peer):
            return f"{len(made)} outputs, not {len(self.peer)}"
        for i, (got, exact, peer, most) in enumerate(zip(made, self.exact, self.peer, self.limits, strict=True)):
            where = f"output {i}"
            if got.dtype != peer.dtype:
                return f"{where} is {got.dtype}, not {peer.dtype}"
            try:
                if most is None:
                    if not torch.equal(got, peer):
                        return f"{where} differs"
                    continue
                found = errors(got, exact)
                if not found.within(most):
                    rms = f"root mean square {found.rms:.3g} over {most.rms:.3g}"
                    return f"{where}: error {found.largest:.3g} over {most.largest:.3g}, {rms}"
                if self.dtype.itemsize == 2:
                    bound = _L2_EPS * torch.finfo(self.dtype).eps * errors(torch.zeros_like(exact), exact).rms
                    if found.rms > bound:
                        return f"{where}: root mean square error {found.rms:.3g} over {bound:.3g}"
            except Wrong as error:
                return f"{where}: {error}"
        return None


def _ends_of_rows(region: Region) -> list[int | None]:
    """For each output the input that holds the ends of the groups of its rows, where rows behind them are left open: by
    the op that makes them, or by one before it in the region, whose open rows are rows of this value too."""
    table, specs, ends = op_table(), region.graph.specs, {}
    for node in region.nodes:
        rows = {specs[v].shape[0]: ends[v] for _, v in node.inputs if v in ends}
        for port, value in node.outputs:
            lead = specs[value].shape[:1]
            if port in table[node.op].open_rows:
                ends[value] = node.input("offsets")
            elif node.input("offsets") is None and lead and lead[0] in rows:
                ends[value] = rows[lead[0]]
    places = region.graph.inputs
    return [places.index(at) if (at := ends.get(v)) in places else None for v in region.graph.outputs]


def _sum_error(region: Region) -> float:
    """What the order and the width of a float32 sum may move its result, as a fraction of the largest: the reference
    sums in one order, a kernel in another. Sums of n terms on vector units: log2(n) roundings of 2^-24 in a tree.
    Products on tensor cores add 16 terms at a time to an accumulator that keeps 22 bits and truncates, so that n / 16
    errors of 2^-22 lie on one side."""
    specs = [region.graph.specs[v] for v in region.graph.inputs]
    longest = max([2, *(d if isinstance(d, int) else d.hint for s in specs for d in s.shape)])
    if any(op.startswith(("linear", "grouped_matmul")) for op in region.ops):
        return longest / 16 * 2.0**-22
    return math.ceil(math.log2(longest)) * 2.0**-24


def _tuple(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or '(no message)').splitlines()[0]}"
