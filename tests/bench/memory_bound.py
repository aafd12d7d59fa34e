"""Memory-bound kernels of our own beside their peers, as a share of the copy bandwidth of the same run.

    python -m tests.bench.memory_bound [--only TEXT] [--sweep] [--compile] [--out FILE]

Each row is an op at one shape. Its bytes are those of every operand once (``Region.cost``); ``copy`` is a plain copy
that reads and writes as many in all, the faster of two; ``fill_us`` is what it takes only to write what the row writes (memory
that is only written to is slower than a copy). Contenders are engines of ours, which launch the package's compiled kernels, and
functions of libraries that are there. Each is captured into a CUDA graph of several launches over inputs that rotate,
so that L2 is cold and the host does not count; graphs are replayed in turns, behind a write of other memory, and the
median counts. What a contender computes is compared with the reference's result before it is timed. ``--sweep`` times
the row's list of knobs as well, ``--toggle NAME`` the default knobs with that one switched.
``--compile`` compiles what the rows need into the cache, on a machine that may have no GPU, and times nothing.

The rows stand in ``tests/bench/memory_rows.py``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from layerplan.integration.engines.arch import Arch
from layerplan.integration.engines.contract import BuildContext, Decline, Offer
from layerplan.integration.engines.manifest import BY_ID
from layerplan.integration.plan_cache import ahead, memory
from layerplan.integration.plan_cache.disk import Store
from layerplan.integration.settings import cache_folders
from layerplan.kernels.common.evaluate import reference_launch
from tests.bench.host_cost import environment
from tests.bench.memory_rows import FAMILIES, Call, Knobs, Row

LAUNCHES, ROUNDS = 12, 9  # of one graph; replays of each graph
# the copy bandwidth is the faster one's: a copy inside a graph takes 1.5 times as long at some sizes
FILL = "fill"
COPIES: dict[str, Callable[..., object]] = {"copy": lambda a, b: b.copy_(a), "copy by a kernel": lambda a, b: torch.bitwise_not(a, out=b)}


@dataclasses.dataclass(frozen=True, slots=True)
class Tried:
    """Which knobs of our engine are tried beside its default: the row's list where ``sweep``, and the default with each
    of ``toggles`` switched."""

    sweep: bool = False
    toggles: tuple[str, ...] = ()

    def knobs(self, row: Row, default: Offer) -> Iterator[Knobs]:
        yield from row.knobs if self.sweep else ()
        given = dict(default.knobs)
        for name in self.toggles:
            if isinstance(given.get(name), bool):
                yield tuple((given | {name: not given[name]}).items())


def offers(row: Row, arch: Arch, tried: Tried) -> Iterator[tuple[str, str, Offer]]:
    """(contender's name, engine, offer): ours, with the knobs of ``tried`` that it takes, and the peers that are
    engines."""
    for engine in (row.own, *row.engines):
        loaded = BY_ID[engine].load()
        answer = loaded.match(row.region, arch)
        if isinstance(answer, Decline):
            print(f"{row.name}: {engine} declines: {answer.reason}", flush=True)
            continue
        yield engine, engine, answer
        for knobs in tried.knobs(row, answer) if engine == row.own else ():
            other = loaded.offer_with(row.region, arch, knobs)
            if isinstance(other, Offer) and other.knobs != answer.knobs:
                yield f"{engine} {json.dumps(dict(other.knobs))}", engine, other


def contenders(row: Row, arch: Arch, tried: Tried) -> Iterator[tuple[str, Call]]:
    """Name and function over the region's inputs; one that cannot be built is told and left out."""
    for name, engine, offer in offers(row, arch, tried):
        if why := BY_ID[engine].absent():
            print(f"{row.name}: {engine} is absent: {why}", flush=True)
            continue
        try:
            yield name, BY_ID[engine].load().build(memory.context(row.region, arch, offer)).launch
        except Exception as error:
            print(f"{row.name}: {name} does not build: {type(error).__name__}: {str(error)[-300:]}", flush=True)
    yield from row.libraries.items()


def wrong(row: Row, call: Call, inputs: list[torch.Tensor], expected: tuple[torch.Tensor, ...]) -> str | None:
    """What is wrong with a contender's results, None where they are right. ``exact``: a byte; else more than one value
    of a thousand that is off by 2 % of the largest (sums differ by their order, and what is quantised from them by
    more; the tests are the ones to hold results to more)."""
    got = call(*inputs)
    got = got if isinstance(got, tuple) else (got,)
    for i, (a, b) in enumerate(zip(got, expected, strict=False)):
        if row.exact:
            if not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
                return f"result {i} differs in {int((a.view(torch.uint8) != b.view(torch.uint8)).sum())} bytes"
        else:
            a, b = a.float(), b.float()
            top = float(b.abs().max())
            many = int(((a - b).abs() <= 0.02 * top).logical_not_().sum())
            if many > b.numel() / 1000:
                return f"result {i}: {many} of {b.numel()} values are off by more than 2 % of {top:.3g}"
    return None


def graph_of(call: Call, sets: list[list[torch.Tensor]], pool) -> torch.cuda.CUDAGraph:
    """``LAUNCHES`` calls over inputs that rotate."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for given in sets:
            call(*given)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        for i in range(LAUNCHES):
            call(*sets[i % len(sets)])
    return graph


def in_turns(graphs: dict[str, torch.cuda.CUDAGraph], between: Call) -> dict[str, float]:
    """Median seconds of one launch of each graph; another one is first each time. In front of each runs ``between``, so
    that all find the same in L2: stores past L2 (``.cs``) leave in it what others wrote before, and kernels with such
    stores take 4 % longer behind a copy than behind themselves."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    names = list(graphs)
    for graph in graphs.values():
        graph.replay()
    for turn in range(ROUNDS):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            between()
            start.record()
            graphs[name].replay()
            stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop) / LAUNCHES / 1e3)
    return {name: statistics.median(t) for name, t in times.items()}


def measure(row: Row, arch: Arch, tried: Tried) -> dict:
    gen = torch.Generator(device="cuda").manual_seed(0)
    size = max(row.nbytes, 1)
    count = max(2, -(-4 * torch.cuda.get_device_properties(0).L2_cache_size // size))
    sets = [row.make(gen) for _ in range(count)]
    half = size // 2 // 16 * 16
    copies = [[torch.empty(half // 4, dtype=torch.int32, device="cuda").random_() for _ in range(2)] for _ in range(count)]
    expected = reference_launch(row.region)(*sets[0])
    expected = expected if isinstance(expected, tuple) else (expected,)
    pool = torch.cuda.graph_pool_handle()
    written = sum(t.nbytes for t in expected)
    blank = [[torch.empty(written, dtype=torch.uint8, device="cuda")] for _ in range(count)]
    graphs, notes = {name: graph_of(call, copies, pool) for name, call in COPIES.items()}, {}
    for name, call in contenders(row, arch, tried):
        try:
            why = wrong(row, call, sets[0], expected)
            if why is None:
                graphs[name] = graph_of(call, sets, pool)
            else:
                notes[name] = f"WRONG: {why}"
        except Exception as error:
            notes[name] = f"fails: {type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
            torch.cuda.synchronize()
    graphs[FILL] = graph_of(torch.Tensor.zero_, blank, pool)
    other = torch.empty(4 * torch.cuda.get_device_properties(0).L2_cache_size, dtype=torch.uint8, device="cuda")
    return result(row, in_turns(graphs, other.zero_), notes)


def result(row: Row, times: dict[str, float], notes: dict[str, str]) -> dict:
    copy, fill = min(times[name] for name in COPIES), times.pop(FILL)
    ours = {n: t for n, t in times.items() if n.split(" ")[0] == row.own}
    peers = {n: t for n, t in times.items() if n not in COPIES and n not in ours}
    rows = [{"name": n, "us": round(t * 1e6, 2), "tb_s": round(row.nbytes / t / 1e12, 3), "of_copy": round(copy / t, 3)}
            for n, t in sorted(times.items(), key=lambda item: item[1])]  # fmt: skip
    best = min(peers.values(), default=None)
    default = times.get(row.own)
    made = {"row": row.name, "bytes": row.nbytes, "least": row.least, "fill_us": round(fill * 1e6, 2), "contenders": rows, "notes": notes}
    if default is not None:
        made |= {"of_copy": round(copy / default, 3), "met": copy / default >= row.least,
                 "over_best_peer": None if best is None else round(best / default, 3),
                 "best_knobs_of_copy": round(copy / min(ours.values()), 3)}  # fmt: skip
    return made


def show(made: dict) -> None:
    head = {k: v for k, v in made.items() if k not in ("contenders", "notes")}
    print(json.dumps(head), flush=True)
    for c in made["contenders"][:24]:
        print(
            f"    {c['us']:9.2f} us  {c['tb_s']:6.3f} TB/s  {100 * c['of_copy']:5.1f} % of copy  {c['name']}",
            flush=True,
        )
    for name, note in made["notes"].items():
        print(f"    {name}: {note}", flush=True)


def compile_rows(rows: list[Row], arch: Arch, tried: Tried, workers: int) -> None:
    """Into the cache of LAYERPLAN_CACHE, what the rows' own kernels need."""
    contexts = [(e, BuildContext(r.region, arch, o)) for r in rows for _, e, o in offers(r, arch, tried) if e == r.own]
    jobs, _ = ahead.jobs_of(contexts, None)
    print(f"{len(jobs)} kernels for {arch.name}", flush=True)
    for done in ahead.compile_all(jobs, Store(cache_folders()), workers):
        if done.note or getattr(done, "frame_bytes", 0):
            print(f"    {done}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="", help="rows whose family and name hold this text, as norm/rms_norm 16384x4096"
    )
    parser.add_argument("--sweep", action="store_true", help="the row's lists of knobs too")
    parser.add_argument("--toggle", action="append", default=[], metavar="NAME", help="this knob switched too")
    parser.add_argument("--compile", metavar="ARCH", help="compile for this arch and time nothing")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--commit", help="of the code, for the record")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    tried = Tried(given.sweep, tuple(given.toggle))
    rows = [r for family, make in FAMILIES.items() for r in make() if given.only in f"{family}/{r.name}"]
    if given.compile:
        compile_rows(rows, Arch.parse(given.compile), tried, given.workers)
        return
    arch, made = Arch.of_device(0), []
    for row in rows:
        made.append(measure(row, arch, tried))
        show(made[-1])
        torch.cuda.empty_cache()
        if given.out:
            record = {
                "what": "memory-bound kernels",
                "launches": LAUNCHES,
                "rounds": ROUNDS,
                **environment(given.commit),
                "rows": made,
            }
            given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
