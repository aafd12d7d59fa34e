"""Runs a function of a test module in N fresh processes (ranks) and returns what each of them returned.

    results = run_ranks("test_megatron_cpu_mode:two_rank_scenarios", world=2, timeout=120, steps=4)

Each rank is a Python process of its own with RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set; the
function calls `init_process_group("gloo")` itself. It gets the keyword arguments and returns something JSON can hold.
Importing Megatron takes seconds per process, so one function should run many scenarios. At the time limit, or soon
after a rank has failed, the ranks and everything they started are killed and the end of each rank's output is shown.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TAIL = 4000  # characters of output shown per rank
GRACE = 5.0  # seconds the other ranks get once one has failed: they wait in a collective that will not come


class RanksFailed(AssertionError):
    """A rank ended with an error or none ended in time; the message holds each rank's exit code and last output."""


def run_ranks(
    function: str, world: int, timeout: float, *, env: dict[str, str] | None = None, **kwargs: Any
) -> list[Any]:
    """Results of `function` ("module:name", a module of this folder or the path of a .py file), one per rank, in rank
    order.

    `timeout` is in seconds, for all ranks together; `env` is added to their environment; `kwargs` must fit in JSON.
    Raises RanksFailed if a rank fails or the time is over.
    """
    module, separator, name = function.rpartition(":")
    if not separator or not name or world < 1 or timeout <= 0:
        raise ValueError(
            f"function = {function!r}, world = {world}, timeout = {timeout}: need 'module:name', >= 1, > 0"
        )
    path = Path(module) if module.endswith(".py") else HERE / f"{module}.py"
    if not path.is_file():
        raise ValueError(f"function = {function!r}: there is no file {path}")
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks = _start(path, name, world, Path(folder), env or {}, kwargs)
        try:
            reason = _wait(ranks, time.monotonic() + timeout, timeout)
        finally:
            for process in ranks:
                _kill(process)
        outputs = [(Path(folder) / f"{rank}.out").read_text(errors="replace") for rank in range(world)]
        if reason:
            shown = "\n".join(
                f"--- rank {rank}, exit code {process.returncode} ---\n{output[-TAIL:]}"
                for rank, (process, output) in enumerate(zip(ranks, outputs, strict=True))
            )
            raise RanksFailed(f"{function} on {world} ranks: {reason}\n{shown}")
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(world)]


def free_port() -> int:
    """A port that nothing listens on, below those that the system gives to outgoing connections: one of these, free when it
    was asked for, may be taken by the time a rank listens on it."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _start(path: Path, name: str, world: int, folder: Path, env: dict[str, str], kwargs: Any) -> list[subprocess.Popen]:
    port, ranks = free_port(), []
    for rank in range(world):
        variables = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")])),
            **env,
        }
        command = [sys.executable, str(Path(__file__).resolve()), str(path), name, str(folder / f"{rank}.json")]
        with open(folder / f"{rank}.out", "w") as output:
            ranks.append(
                subprocess.Popen(
                    [*command, json.dumps(kwargs)],
                    env=variables,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            )
    return ranks


def _wait(ranks: list[subprocess.Popen], deadline: float, timeout: float) -> str:
    """Waits for all ranks; returns what went wrong, or ''."""
    failed = ""
    while None in (codes := [process.poll() for process in ranks]):
        if not failed and any(codes):
            failed = "a rank failed"
            deadline = min(deadline, time.monotonic() + GRACE)
        if time.monotonic() > deadline:
            return failed or f"not done after {timeout:g} s"
        time.sleep(0.02)
    return "a rank failed" if any(codes) else ""


def _kill(process: subprocess.Popen) -> None:
    """Ends the rank's whole process group: a checkpoint writer that it started must not outlive it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _worker() -> None:
    parser = argparse.ArgumentParser()
    for argument in ("path", "name", "result", "kwargs"):
        parser.add_argument(argument)
    arguments = parser.parse_args()
    path = Path(arguments.path)
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    torch = sys.modules.get("torch")  # OMP_NUM_THREADS=1 holds for a function that imports it later
    if torch is not None:
        torch.set_num_threads(1)
    result = getattr(module, arguments.name)(**json.loads(arguments.kwargs))
    Path(arguments.result).write_text(json.dumps(result))
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":  # multiprocessing's spawn imports this file again
    _worker()
