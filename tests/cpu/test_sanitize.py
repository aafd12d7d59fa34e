"""The runs under compute-sanitizer: what counts as clean."""

import json
import os
import subprocess
import sys

import pytest

from tests.gpu import sanitize

PASSED = "4 passed, 1 skipped in 2.1s\n"


@pytest.mark.parametrize(
    "text, status, clean",
    [
        (PASSED + "========= ERROR SUMMARY: 0 errors\n", 0, True),
        (PASSED + "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", 0, True),
        (PASSED + "========= RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)\n", 0, False),
        (PASSED + "========= ERROR SUMMARY: 3 errors\n", 0, False),
        ("1 failed, 3 passed in 2.1s\n========= ERROR SUMMARY: 0 errors\n", 1, False),
        ("5 skipped in 2.1s\n========= ERROR SUMMARY: 0 errors\n", 0, False),  # nothing ran
        (PASSED, 0, False),  # the tool has said nothing
        ("========= Error: Device not supported\n", 1, False),
        (PASSED + "========= ERROR SUMMARY: 0 errors\n", None, False),  # ended at the limit
    ],
)
def test_clean_is_a_run_that_ended_in_time_passed_and_found_nothing(text, status, clean):
    assert sanitize.outcome(text, status)["clean"] is clean


def test_the_named_tests_exist():
    for name in sanitize.TESTS.values():
        path, _, test = name.partition("::")
        assert f"def {test}(" in (sanitize.ROOT / path).read_text(), name


def test_every_run_is_in_the_record_also_one_that_hangs(tmp_path):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text("""#!/bin/sh
case "$*" in
    *racecheck*router*) sleep 600;;
    *racecheck*) echo '3 passed in 1s'; echo 'RACECHECK SUMMARY: 1 hazards';;
    *) echo '3 passed in 1s'; echo 'ERROR SUMMARY: 0 errors';;
esac
""")
    tool.chmod(0o755)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "tests.gpu.sanitize", "--limit", "5", "--out", str(out), "--commit", "abc"]
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ran = subprocess.run(
        command, cwd=sanitize.ROOT, env=os.environ | path, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 1, ran.stderr
    record = json.loads((out / "sanitize.json").read_text())
    assert record["commit"] == "abc" and len(record["runs"]) == len(sanitize.TESTS) * len(sanitize.TOOLS)
    for made in record["runs"]:
        assert made["clean"] is (made["tool"] == "memcheck"), made
    assert [r["status"] for r in record["runs"] if (r["tool"], r["kernels"]) == ("racecheck", "router")] == [None]
