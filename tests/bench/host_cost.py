"""Host cost of layerplan.ops per op: what a call costs beyond the raw compiled launch and its output allocations.

    python tests/bench/host_cost.py [--out FILE]

Tiny tensors, so that the device never limits; medians over blocks of calls. Per op a row: forward with grad, the raw launch
(the compiled region under no_grad, outputs allocated by it), their difference; forward + backward against aten's equivalent.
Bounds of the design: 10 us forward; aten's forward + backward + 15 us.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from layerplan.integration import ops

FORWARD_BOUND_US, BOTH_BOUND_US = 10.0, 15.0


def per_call(f, n: int = 400, blocks: int = 15) -> float:
    """Microseconds of host time per call, median over blocks."""
    for _ in range(50):
        f()
    times = []
    for _ in range(blocks):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(n):
            f()
        times.append((time.perf_counter() - start) / n * 1e6)
    return statistics.median(times)


def cases(device: str, dtype: torch.dtype):
    """(name, our function, aten's equivalent, tensors)."""

    def t(*shape):
        return torch.randn(*shape, device=device, dtype=dtype, requires_grad=True)

    x, w = t(64, 256), t(256)
    yield "rms_norm", (lambda x, w: ops.rms_norm(x, w, eps=1e-5)), (lambda x, w: F.rms_norm(x, (256,), w, 1e-5)), (x, w)
    yield "layer_norm", (lambda x, w: ops.layer_norm(x, w, eps=1e-5)), (lambda x, w: F.layer_norm(x, (256,), w, None, 1e-5)), (x, w)
    yield "linear", ops.linear, F.linear, (t(64, 256), t(128, 256))
    yield "swiglu", ops.swiglu, (lambda g: F.silu(g[..., :128]) * g[..., 128:]), (t(64, 256),)

    def sdpa(q, k, v):
        return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)

    yield "attention", (lambda q, k, v: ops.attention(q, k, v, causal=True)), sdpa, (t(1, 128, 4, 64), t(1, 128, 4, 64), t(1, 128, 4, 64))


def raw_launch(name: str, tensors):
    """The compiled forward launch alone, as the plan calls it."""
    runner = next(r for r in reversed(list(ops._runners.values())) if r.name == {"attention": "sdpa"}.get(name, name))
    entry = next(iter(runner.entries.values()))
    from layerplan.integration.planner.program import compiled_launch

    (region,) = entry.plan.forward.regions
    launch = compiled_launch(region, entry.arch)
    detached = [t.detach() for t in tensors]
    order = [entry.graph.inputs.index(v) for v in region.region.graph.inputs]
    arguments = [detached[i] for i in order]
    return (lambda: launch(*arguments)), region.engine


def measure(device: str, dtype: torch.dtype) -> list[dict]:
    rows = []
    for name, ours, aten, tensors in cases(device, dtype):
        grad = torch.randn_like(ours(*tensors))
        aten_grad = torch.randn_like(aten(*tensors))

        def both(f, g, tensors=tensors):
            y = f(*tensors)
            torch.autograd.backward(y, g)
            for t in tensors:
                t.grad = None

        both(ours, grad)
        raw, engine = raw_launch(name, tensors)
        with torch.no_grad():
            raw_us = per_call(raw)
        forward_us = per_call(lambda f=ours, a=tensors: f(*a))
        both_us = per_call(lambda f=ours, g=grad: both(f, g), 200)
        aten_us = per_call(lambda f=aten, g=aten_grad: both(f, g), 200)
        aten_forward = per_call(lambda f=aten, a=tensors: f(*a))
        rows.append({
            "op": name, "engine": engine, "forward_us": round(forward_us, 2), "raw_launch_us": round(raw_us, 2),
            "forward_cost_us": round(forward_us - raw_us, 2), "forward_ok": forward_us - raw_us <= FORWARD_BOUND_US,
            "aten_forward_us": round(aten_forward, 2), "both_us": round(both_us, 2), "aten_both_us": round(aten_us, 2),
            "both_over_aten_us": round(both_us - aten_us, 2), "both_ok": both_us - aten_us <= BOTH_BOUND_US,
        })  # fmt: skip
    return rows


def environment() -> dict:
    cpu = next((line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None, "cpu": cpu, "torch": torch.__version__,
        "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"), "commit": commit,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = measure(device, torch.bfloat16 if device == "cuda" else torch.float32)
    for r in rows:
        print(json.dumps(r), flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps({"what": "host cost", **environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
