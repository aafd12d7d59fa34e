"""Host cost of layerplan.ops per op: what a call costs beyond the raw compiled launch and its output allocations.

    python tests/bench/host_cost.py [--engines] [--out FILE]

Tiny tensors, so that the device never limits. What is compared is timed in turns, block by block, and the figure is the
median over blocks of the difference; the quartiles stand beside it. Per op a row: forward with grad, the raw launch
(the compiled region under no_grad, outputs allocated by it), their difference; forward + backward against aten's
equivalent. ``--engines``: a row for each engine that runs the op here, beside the one that the planner chooses. Bounds
of the design: 10 us forward; aten's forward + backward + 15 us. Backward on a GPU runs in autograd's own thread; where
that thread wakes decides tens of microseconds, so the process is held on two cores (``--cores N`` for another number).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from layerplan.integration import ops
from layerplan.integration.engines.manifest import MANIFEST
from layerplan.integration.planner.planner import PlanError
from layerplan.integration.planner.program import compiled_launch
from layerplan.integration.planner.records import gpu_name

FORWARD_BOUND_US, BOTH_BOUND_US = 10.0, 15.0
OP = {"attention": "sdpa"}  # where the op's name in the table differs


def in_turns(functions: dict[str, Callable[[], object]], n: int, blocks: int = 41) -> dict[str, list[float]]:
    """Microseconds of host time per call of each function, one figure per block; the functions take turns."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for f in functions.values():
        for _ in range(100):
            f()
    for _ in range(blocks):
        for name, f in functions.items():
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(n):
                f()
            times[name].append((time.perf_counter() - start) / n * 1e6)
    return times


def difference(times: dict[str, list[float]], a: str, b: str) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile of a - b over the blocks."""
    low, middle, high = statistics.quantiles([x - y for x, y in zip(times[a], times[b], strict=True)], n=4)
    return round(low, 2), round(middle, 2), round(high, 2)


def cases(device: str, dtype: torch.dtype):
    """(name, our function, which takes ``engine=`` too, aten's equivalent, tensors)."""

    def t(*shape):
        return torch.randn(*shape, device=device, dtype=dtype, requires_grad=True)

    x, w = t(64, 256), t(256)
    rms_norm, layer_norm = (functools.partial(f, eps=1e-5) for f in (ops.rms_norm, ops.layer_norm))
    yield "rms_norm", rms_norm, (lambda x, w: F.rms_norm(x, (256,), w, 1e-5)), (x, w)
    yield "layer_norm", layer_norm, (lambda x, w: F.layer_norm(x, (256,), w, None, 1e-5)), (x, w)
    yield "linear", ops.linear, F.linear, (t(64, 256), t(128, 256))
    yield "swiglu", ops.swiglu, (lambda g: F.silu(g[..., :128]) * g[..., 128:]), (t(64, 256),)

    def sdpa(q, k, v):
        out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
        return out.transpose(1, 2)

    yield "attention", functools.partial(ops.attention, causal=True), sdpa, tuple(t(1, 128, 4, 64) for _ in "qkv")


def entry_of(name: str):
    """The entry that the op's last new call made."""
    runner = next(r for r in reversed(list(ops._runners.values())) if r.name == OP.get(name, name))
    return next(iter(runner.entries.values()))


def engines(name: str) -> dict[str, list[str]]:
    plan = entry_of(name).plan
    return {"forward": [r.engine for r in plan.forward.regions], "backward": [r.engine for r in plan.backward.regions]}


def raw_launch(name: str, tensors):
    """The compiled forward launch alone, as the plan calls it; detached inputs, so that nothing is recorded."""
    entry = entry_of(name)
    (region,) = entry.plan.forward.regions
    launch = compiled_launch(region, entry.arch)
    order = [entry.graph.inputs.index(v) for v in region.region.graph.inputs]
    arguments = [tensors[i].detach() for i in order]
    return lambda: launch(*arguments)


def choices(name: str, ours: Callable[..., torch.Tensor], tensors, every: bool) -> list[str | None]:
    """None (the planner's choice) and, where asked, the engines that run the op here, forward and backward."""
    if not every:
        return [None]
    found: list[str | None] = [None]
    for entry in MANIFEST:
        if OP.get(name, name) not in entry.ops or entry.is_reference:
            continue
        try:
            ours(*tensors, engine=entry.id).sum().backward()
            found.append(entry.id)
        except PlanError as error:
            print(f"{name}: {entry.id}: {str(error).splitlines()[0][:160]}", flush=True)
    return found


def measure(device: str, dtype: torch.dtype, every: bool = False) -> list[dict]:
    rows = []
    for name, run, aten, tensors in cases(device, dtype):
        for engine in choices(name, run, tensors, every):
            ours = run if engine is None else functools.partial(run, engine=engine)
            rows.append({"op": name, "asked": engine or "auto", **figures(name, ours, aten, tensors)})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def figures(name: str, ours: Callable[..., torch.Tensor], aten: Callable[..., torch.Tensor], tensors) -> dict:
    ops._runners.clear()  # the plan of the next call is the last one made
    grad = torch.randn_like(ours(*tensors))
    aten_grad = torch.randn_like(aten(*tensors))

    def both(f, g):
        y = f(*tensors)
        torch.autograd.backward(y, g)
        for t in tensors:
            t.grad = None

    both(ours, grad)
    raw = raw_launch(name, tensors)
    forward = in_turns({"ours": lambda: ours(*tensors), "raw": raw, "aten": lambda: aten(*tensors)}, 200)
    backward = in_turns({"ours": lambda: both(ours, grad), "aten": lambda: both(aten, aten_grad)}, 100)
    cost, over = difference(forward, "ours", "raw"), difference(backward, "ours", "aten")
    middle = {f"{part}_{who}_us": round(statistics.median(v), 2)
              for part, times in (("forward", forward), ("both", backward)) for who, v in times.items()}  # fmt: skip
    return {"engines": engines(name), **middle, "forward_cost_us": cost[1],
            "forward_cost_quartiles": [cost[0], cost[2]], "forward_ok": cost[1] <= FORWARD_BOUND_US,
            "both_over_aten_us": over[1], "both_over_aten_quartiles": [over[0], over[2]],
            "both_ok": over[1] <= BOTH_BOUND_US}  # fmt: skip


def cudnn() -> int | str | None:
    """Its version; in words where another library has loaded one that torch was not built for. Loads torch's own:
    behind that Transformer Engine cannot load the system's."""
    try:
        return torch.backends.cudnn.version()
    except RuntimeError as error:
        return str(error).partition(". ")[0]


def environment(commit: str | None = None) -> dict:
    """What a record says of the machine and the code; ``commit`` where the code is a copy of another one than git's."""
    commit = commit or subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cpu": gpu_name(torch.device("cpu")), "torch": torch.__version__,
        "cuda": torch.version.cuda, "cudnn": cudnn(), "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"), "commit": commit,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--engines", action="store_true", help="a row for each engine that runs the op")
    parser.add_argument("--cores", type=int, default=2, help="hold the process on so many cores (default 2)")
    arguments = parser.parse_args()
    # before the first backward: autograd's device thread inherits what is set here
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.cores])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = measure(device, torch.bfloat16 if device == "cuda" else torch.float32, arguments.engines)
    if arguments.out:
        record = {"what": "host cost", "cores": arguments.cores, **environment(), "rows": rows}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
