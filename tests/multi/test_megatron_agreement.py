"""``compare_planning`` on two ranks of a script of one's own: what differs is named with its ranks, and nobody waits for ever."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import time
from pathlib import Path

import pytest
from harness import run_ranks

LIMIT_S = 3.0


@contextlib.contextmanager
def _changed(module, name, value):
    kept = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, kept)


def _refused(act) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def compared(folder: str) -> dict:
    import dataclasses

    import torch.distributed as dist

    from layerplan.integration.megatron import specs
    from layerplan.integration.megatron.agreement import compare_planning, compare_planning_once
    from layerplan.integration.megatron.cpu_mode import cpu_mode
    from layerplan.integration.planner import agreement
    from layerplan.integration.planner.plan_file import Pin, Pins, save

    rank, work = int(os.environ["RANK"]), Path(folder)
    found = {"alone": compare_planning()}  # without a process group
    dist.init_process_group("gloo")
    (work / f"broken-{rank}.json").write_text("[]")
    for name, engine in (("same", "norm/torch"), ("other", "norm/torch" if rank == 0 else "reference/eager")):
        save(work / f"{name}-{rank}.json", Pins((("cpu", "abc@", Pin(engine, ("rms_norm",))),)))
    found["alike"] = compare_planning(pins=work / f"same-{rank}.json")
    found["group"] = compare_planning(dist.new_group(backend="gloo"), pins=work / f"same-{rank}.json")
    found["pins"] = _refused(lambda: compare_planning(pins=work / f"other-{rank}.json"))
    found["broken_on_one"] = _refused(lambda: compare_planning(pins=work / f"{'broken' if rank else 'same'}-{rank}.json"))
    found["broken_on_both"] = _refused(lambda: compare_planning(pins=work / "none.json"))
    found["policy"] = _refused(lambda: compare_planning(policy="strict" if rank else "auto"))

    settings, version = agreement.settings, agreement.installed_version
    mine = dataclasses.replace(settings(), deterministic=rank == 1, log="error" if rank else "debug", nvtx=rank == 1)
    with _changed(agreement, "settings", lambda: mine):
        found["setting"] = _refused(compare_planning)
        found["spec"] = _refused(lambda: specs.guarded_block_spec(None))  # refused before it looks at the config
    compare_planning_once.cache_clear()
    with _changed(agreement, "installed_version", lambda p: f"9.{rank}" if p == "quack-kernels" else version(p)):
        start = time.monotonic()
        found["version"] = _refused(compare_planning)
        found["seconds"] = time.monotonic() - start
    with cpu_mode():
        found["cpu_mode"] = compare_planning()

    gone = work / "rank-0-is-done"  # rank 1 never calls it
    if rank == 0:
        start = time.monotonic()
        found["late"] = _refused(lambda: compare_planning(timeout=datetime.timedelta(seconds=LIMIT_S)))
        found["late_seconds"] = time.monotonic() - start
        gone.touch()
    while not gone.exists():
        time.sleep(0.05)
    return json.loads(json.dumps(found))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    pytest.importorskip("megatron.core")
    return run_ranks("test_megatron_agreement:compared", 2, 120, folder=str(tmp_path_factory.mktemp("agreement")))


def test_ranks_that_plan_alike_share_a_digest_which_is_that_of_the_plan_files_content(ranks):
    first, second = ranks
    assert first["alike"] == second["alike"] == first["group"] and len(first["alike"]) == 64
    assert first["alone"] == second["alone"] == first["cpu_mode"] != first["alike"]


def test_a_setting_that_differs_is_named_with_the_ranks_and_what_changes_no_plan_may_differ(ranks):
    for rank in ranks:
        lines = rank["setting"].splitlines()
        assert lines[0] == "RanksDifferError: 1 problem:"
        assert "environment: deterministic" in lines[1] and "'False' on rank 0, 'True' on rank 1; start every rank with the same" in lines[1]


def test_a_package_version_that_differs_is_named_with_the_ranks_at_once(ranks):
    for number, rank in enumerate(ranks):
        assert f"version of quack-kernels = '9.{number}': differs between ranks: '9.0' on rank 0, '9.1' on rank 1" in rank["version"]
        assert rank["seconds"] < 30


@pytest.mark.parametrize(("case", "field"), [("pins", "plan file: SHA-256"), ("broken_on_one", "files"), ("policy", "policy")])
def test_what_a_script_plans_with_is_compared_by_content(ranks, case, field):
    for rank in ranks:
        assert rank[case].startswith("RanksDifferError") and any(line.strip().startswith(f"{field} = ") for line in rank[case].splitlines())
        assert "on rank 0" in rank[case] and "on rank 1" in rank[case]
    assert "broken-1.json: must be an object" in ranks[0]["broken_on_one"]


def test_a_file_that_no_rank_can_read_is_refused_as_where_it_is_loaded(ranks):
    for rank in ranks:
        assert rank["broken_on_both"].startswith("PlanFileError") and "none.json: no such file" in rank["broken_on_both"]


def test_the_spec_for_megatrons_own_script_compares_before_it_builds(ranks):
    assert all(rank["spec"].startswith("RanksDifferError") and "deterministic" in rank["spec"] for rank in ranks)


def test_a_rank_that_never_comes_ends_the_others_within_the_limit(ranks):
    late = ranks[0]["late"]
    assert late.startswith("RuntimeError: compare_planning: not all 2 ranks called it within 3 s")
    assert LIMIT_S <= ranks[0]["late_seconds"] < 10 * LIMIT_S
