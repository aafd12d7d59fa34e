"""The GPU suite in several processes side by side, within a time limit, with a record of what ran.

    python -m tests.gpu.suite [--jobs N] [--limit SECONDS] [--compile] [--commit ID] [--out FOLDER]

Tests are dealt in pieces to ``--jobs`` processes, in turns over the GPUs. A process that breaks fails the test that it
ran, and another goes on after it. Results are written down one by one, so that at the limit the others are named as not
run. ``--compile`` compiles our own kernels of the cases into the cache first. Into ``--out`` go ``gpu_suite.json``
(machine, versions, counts, failures, skips by reason, tests not run) and one log per piece. Exit status: 0 where
every test ran and none failed.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

from layerplan.integration.engines.arch import Arch
from tests.bench.host_cost import environment

ROOT = Path(__file__).resolve().parents[2]
CASES = ("cute_norm", "cute_norm_quantize", "cute_quantize", "cute_swiglu", "cute_rope", "cute_moe", "cute_moe_quantize", "cute_group",
         "cute_router")  # fmt: skip
PIECE = 60  # tests of one process: a start costs some 10 s
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider")


def collected(root: Path = ROOT, folder: str = "tests/gpu") -> list[str]:
    """Names of all tests below ``root`` / ``folder``, as pytest takes them there."""
    command = [*PYTEST, "--rootdir", str(root), folder, "--collect-only", "-q"]
    out = subprocess.run(command, cwd=root, capture_output=True, text=True).stdout
    return [line for line in out.splitlines() if "::" in line]


def dealt(names: list[str], jobs: int) -> list[list[str]]:
    """Pieces of at most ``PIECE`` tests. Neighbours, which cost alike, go to different pieces."""
    count = max(jobs, -(-len(names) // PIECE))
    return [names[i::count] for i in range(count) if names[i::count]]


class Suite:
    """Runs pieces until they are done or the time (``end``, of ``time.monotonic``) is over; ``results`` by test."""

    def __init__(self, pieces: list[list[str]], jobs: int, end: float, out: Path, root: Path = ROOT) -> None:
        self.waiting, self.jobs, self.end = collections.deque(enumerate(pieces)), jobs, end
        self.out, self.root = out, root
        self.results: dict[str, dict] = {}
        self.lock = threading.Lock()

    def run(self) -> None:
        threads = [threading.Thread(target=self._worker, args=(i,)) for i in range(self.jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _worker(self, index: int) -> None:
        gpu = str(index % max(1, torch.cuda.device_count()))
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        variables = {"CUDA_VISIBLE_DEVICES": gpu, "PYTHONPATH": path, "GPU_SUITE_LOCK": str(self.out / f"gpu{gpu}.lock")}
        while True:
            with self.lock:
                if not self.waiting:
                    return
                number, names = self.waiting.popleft()
            part = 0
            while names and time.monotonic() < self.end:
                done, broken = self._run(f"piece{number}_{part}", names, variables)
                if broken is not None:
                    done[broken] = {"test": broken, "outcome": "failed", "why": f"the process ended: piece{number}_{part}.log"}
                with self.lock:
                    self.results |= done
                names, part = [name for name in names if name not in done], part + 1

    def _run(self, name: str, tests: list[str], variables: dict[str, str]) -> tuple[dict[str, dict], str | None]:
        """Results of what one process ran, and the test in which it ended, None where it ran all or was ended here."""
        log, report, listed = (self.out / f"{name}.{kind}" for kind in ("log", "jsonl", "txt"))
        listed.write_text("\n".join(tests))
        command = [*PYTEST, "--rootdir", str(self.root), "-p", "tests.gpu.reported", "-q", "--tb=short", f"@{listed}"]
        with log.open("w") as stream:
            process = subprocess.Popen(command, cwd=self.root, env=os.environ | variables | {"GPU_SUITE_REPORT": str(report)},
                                       stdout=stream, stderr=subprocess.STDOUT)  # fmt: skip
            try:
                process.wait(max(1.0, self.end - time.monotonic()))
                ended = True
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                ended = False
        rows = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
        done = {row["test"]: row for row in rows if "outcome" in row}
        left = [test for test in tests if test not in done]
        return done, left[0] if ended and left else None


def record(names: list[str], results: dict[str, dict], commit: str, seconds: float) -> dict:
    """What the run says, for tests/bench/records."""
    outcomes = collections.Counter(row["outcome"] for row in results.values())
    reasons = collections.Counter(row["why"] for row in results.values() if row["outcome"] == "skipped")
    failed = {name: row["why"] for name, row in sorted(results.items()) if row["outcome"] == "failed"}
    return {
        "what": "tests/gpu", **environment(), "commit": commit, "seconds": round(seconds), "tests": len(names),
        "passed": outcomes["passed"], "skipped": outcomes["skipped"], "failed": failed,
        "not_run": [name for name in names if name not in results],
        "skips": [f"[{count}] {reason}" for reason, count in reasons.most_common()],
    }  # fmt: skip


def compile_ahead(workers: int) -> None:
    """Our own kernels of the cases, for the GPU at hand."""
    arch = Arch.of_device(0).name
    for case in CASES:
        subprocess.run([sys.executable, "-m", f"tests.cases.{case}", "--compile", arch, str(workers)], cwd=ROOT, check=True,
                       stdout=subprocess.DEVNULL)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--limit", type=float, default=540.0, help="seconds for all of it")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--commit", default="", help="what the tree is, for the record")
    parser.add_argument("--out", type=Path, default=Path("gpu_suite"))
    given = parser.parse_args()
    begin = time.monotonic()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.compile:
        compile_ahead(os.cpu_count() or 1)
    names = collected()
    suite = Suite(dealt(names, given.jobs), given.jobs, begin + given.limit, given.out.resolve())
    suite.run()
    found = record(names, suite.results, given.commit, time.monotonic() - begin)
    (given.out / "gpu_suite.json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"{found['passed']} passed, {found['skipped']} skipped, {len(found['failed'])} failed, {len(found['not_run'])} not run of {len(names)} in {found['seconds']} s")
    for name, why in found["failed"].items():
        print("FAILED", name, why)
    return 0 if names and not found["failed"] and not found["not_run"] else 1


if __name__ == "__main__":
    sys.exit(main())
