"""The runner of the GPU suite: every test has an outcome or is named as not run, whatever happens to its process."""

import time

import pytest

from tests.gpu.suite import Suite, collected, dealt, record

FAKE = """
import os, time, pytest

@pytest.mark.parametrize("i", range(4))
def test_passes(i):
    pass

def test_fails():
    assert 1 == 2, "one is not two"

def test_is_skipped():
    pytest.skip("declines: no such thing")

def test_ends_the_process():
    os._exit(3)

@pytest.fixture
def broken():
    yield
    raise RuntimeError("left behind")

def test_passes_but_its_end_fails(broken):
    pass

def test_hangs():
    time.sleep(3600)
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fake")
    (folder / "test_fake.py").write_text(FAKE)
    names = collected(folder, ".")
    suite = Suite([[n for n in names if "hangs" not in n], [n for n in names if "hangs" in n]], 2, time.monotonic() + 40, folder, folder)
    suite.run()
    return names, record(names, suite.results, "abc", 1.0)


def test_every_test_has_its_outcome_though_one_ends_the_process_and_one_hangs(ran):
    names, found = ran
    assert len(names) == found["tests"] == 9
    assert found["passed"] == 4 and found["skips"] == ["[1] declines: no such thing"] and found["commit"] == "abc"
    failed = {name.rpartition("::")[2]: why for name, why in found["failed"].items()}
    assert set(failed) == {"test_fails", "test_ends_the_process", "test_passes_but_its_end_fails"}
    assert "one is not two" in failed["test_fails"] and "left behind" in failed["test_passes_but_its_end_fails"]
    assert failed["test_ends_the_process"].startswith("the process ended")
    assert [name.rpartition("::")[2] for name in found["not_run"]] == ["test_hangs"]


@pytest.mark.parametrize("count, jobs", [(0, 3), (2, 3), (500, 3), (1000, 12)])
def test_all_tests_are_dealt_once_in_small_pieces(count, jobs):
    names = [str(i) for i in range(count)]
    pieces = dealt(names, jobs)
    assert sorted(n for p in pieces for n in p) == sorted(names) and all(0 < len(p) <= 60 for p in pieces)
