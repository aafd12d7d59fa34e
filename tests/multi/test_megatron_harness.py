import os
import sys
import time

import pytest
from harness import RanksFailed, run_ranks


def _echo(value):
    return {"rank": int(os.environ["RANK"]), "world": int(os.environ["WORLD_SIZE"]), "value": value}


def _fail_on_rank_one():
    print("before the fault", flush=True)
    if os.environ["RANK"] == "1":
        raise RuntimeError("this rank is broken")
    time.sleep(60)


def _sleep_with_child(pid_file):
    import subprocess

    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with open(pid_file, "w") as file:
        file.write(str(child.pid))
    print("asleep", flush=True)
    time.sleep(60)


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_harness_returns_results_in_rank_order():
    got = run_ranks("test_megatron_harness:_echo", world=2, timeout=60, value=[1, "x"])
    assert got == [{"rank": r, "world": 2, "value": [1, "x"]} for r in range(2)]


def test_harness_shows_the_failing_ranks_output_and_does_not_wait_for_the_others():
    start = time.monotonic()
    with pytest.raises(RanksFailed, match="this rank is broken") as error:
        run_ranks("test_megatron_harness:_fail_on_rank_one", world=2, timeout=55)
    assert "--- rank 0" in str(error.value) and "before the fault" in str(error.value)
    assert time.monotonic() - start < 40


def test_harness_kills_the_process_group_at_the_time_limit(tmp_path):
    pid_file = tmp_path / "pid"
    with pytest.raises(RanksFailed, match="not done after 25 s") as error:
        run_ranks("test_megatron_harness:_sleep_with_child", world=1, timeout=25, pid_file=str(pid_file))
    assert "asleep" in str(error.value)
    pid = int(pid_file.read_text())
    deadline = time.monotonic() + 5
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(pid)


def test_harness_refuses_a_function_that_is_not_there():
    with pytest.raises(ValueError, match="there is no file"):
        run_ranks("no_such_module:f", world=1, timeout=1)
    with pytest.raises(ValueError, match="module:name"):
        run_ranks("test_megatron_harness", world=1, timeout=1)
