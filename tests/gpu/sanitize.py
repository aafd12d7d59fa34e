"""Our own kernels' small cases under compute-sanitizer, with a record of what it found.

    python -m tests.gpu.sanitize [--jobs N] [--limit SECONDS] [--commit ID] [--out FOLDER]

The tests of ``TESTS`` run once under memcheck (accesses outside an allocation, misaligned ones) and once under
racecheck (hazards in shared memory). Each tensor is an allocation of its own, so that one byte too far is seen, and the
tools look at this package's kernels alone. Into ``--out`` go ``sanitize.json`` and a log a run. Exit status: 0 where
every run ended in time, its tests passed and its tool found nothing.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.bench.host_cost import environment

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("memcheck", "racecheck")
TESTS = {
    "norm": "tests/gpu/test_gpu_cute.py::test_a_norm_is_as_exact_as_pytorchs_and_reruns_bitwise_equal",
    "norm_quantize": "tests/gpu/test_gpu_cute.py::test_a_norm_with_quantize_gives_the_bits_of_both_one_after_the_other",
    "quantize": "tests/gpu/test_gpu_quantize.py::test_every_byte_is_the_references_and_reruns_are_equal",
    "swiglu": "tests/gpu/test_gpu_swiglu.py::test_results_hold_to_the_oracles_rule_and_reruns_are_equal",
    "rope": "tests/gpu/test_gpu_rope.py::test_results_are_as_exact_as_pytorchs_and_reruns_bitwise_equal",
    "moe": "tests/gpu/test_gpu_moe.py::test_results_are_as_exact_as_pytorchs_and_reruns_bitwise_equal",
    "moe_quantize": "tests/gpu/test_gpu_moe.py::test_quantised_rows_are_those_of_the_references_bit_for_bit",
    "group": "tests/gpu/test_gpu_moe.py::test_slots_are_sorted_and_counted_as_the_reference_does",
    "router": "tests/gpu/test_gpu_moe.py::"
              "test_routers_choose_what_the_reference_does_and_weigh_it_as_exactly_as_pytorch",
}
KERNELS = "kns=layerplan"  # those with this in their names
_FOUND = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)")
_COUNTS = re.compile(r"(\d+) (passed|failed|skipped|errors?)\b")


def command(tool: str, test: str) -> list[str]:
    return ["compute-sanitizer", "--tool", tool, "--kernel-regex", KERNELS, "--print-limit", "20",
            sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--tb=short", test]  # fmt: skip


def outcome(text: str, status: int | None) -> dict:
    """What a run's output says; ``status`` None: ended at the limit."""
    found = _FOUND.findall(text)
    end = text.split("SUMMARY")[0][-400:]  # of what pytest prints
    counts = {"error" if what == "errors" else what: int(n) for n, what in _COUNTS.findall(end)}
    clean = status == 0 and bool(found) and not any(map(int, found)) and counts.get("passed", 0) > 0
    return {"clean": clean, "status": status, "found": [int(n) for n in found], **counts}


def run(tool: str, name: str, end: float, out: Path) -> dict:
    began, log = time.monotonic(), out / f"{tool}_{name}.log"
    variables = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    with log.open("w") as stream:
        process = subprocess.Popen(
            command(tool, TESTS[name]), cwd=ROOT, env=variables, stdout=stream, stderr=subprocess.STDOUT
        )
        try:
            status = process.wait(max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            status = None
    made = {"tool": tool, "kernels": name, "test": TESTS[name], **outcome(log.read_text(errors="replace"), status)}
    return made | {"seconds": round(time.monotonic() - began)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--limit", type=float, default=540.0, help="seconds for all of it")
    parser.add_argument("--commit", default="", help="what the tree is, for the record")
    parser.add_argument("--out", type=Path, default=Path("sanitize"))
    given = parser.parse_args()
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer is not on the PATH: it comes with CUDA's toolkit")
    given.out.mkdir(parents=True, exist_ok=True)
    end, pairs = time.monotonic() + given.limit, [(tool, name) for name in TESTS for tool in TOOLS]
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        runs = list(pool.map(lambda pair: run(*pair, end, given.out), pairs))
    record = {"what": "compute-sanitizer", **environment(), "commit": given.commit, "kernels": KERNELS, "runs": runs}
    (given.out / "sanitize.json").write_text(json.dumps(record, indent=1) + "\n")
    for made in runs:
        print(json.dumps({k: made[k] for k in made if k != "test"}), flush=True)
    return 0 if all(made["clean"] for made in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
