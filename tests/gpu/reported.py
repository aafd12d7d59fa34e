"""A pytest plugin of ``tests.gpu.suite``: writes the outcome of each test as a line of JSON as soon as it has one."""

import json
import os
from pathlib import Path

REPORT = Path(os.environ["GPU_SUITE_REPORT"])


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":  # what is skipped or fails in set-up or tear-down too
        why = report.longrepr
        if isinstance(why, tuple):  # of a skip: file, line, reason
            why = why[2].removeprefix("Skipped: ")
        elif why is not None:
            why = why.reprcrash.message if getattr(why, "reprcrash", None) else str(why)
            why = " ".join(why.split())[:300]
        with REPORT.open("a") as stream:
            stream.write(json.dumps({"test": report.nodeid, "outcome": report.outcome, "why": why}) + "\n")
