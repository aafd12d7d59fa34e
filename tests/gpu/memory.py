"""What tests that need gigabytes share."""

import fcntl
import os
import signal

import pytest
import torch

_held = []


def need(gib: int) -> None:
    """Skip the test where the GPU has less than ``gib`` GiB free. Of the processes of ``tests.gpu.suite`` one at a time
    goes on from here, until its test ends."""
    path = os.environ.get("GPU_SUITE_LOCK")
    if path and not _held:
        _held.append(open(path, "w"))  # noqa: SIM115 - ``release`` closes it
        left = signal.alarm(0)  # waiting is not the test's time
        fcntl.flock(_held[0], fcntl.LOCK_EX)
        signal.alarm(left)
    free, _ = torch.cuda.mem_get_info()
    if free < gib << 30:
        pytest.skip(f"needs {gib} GiB of free GPU memory")


def release() -> None:
    """At the end of a test: others may take gigabytes."""
    while _held:
        torch.cuda.empty_cache()
        _held.pop().close()
