"""The trainer where something is wrong around it: foreign checkpoints, full disks, ranks that differ, launchers."""

from __future__ import annotations

import pytest
from harness import run_ranks
from training_faults import DISKS, FOREIGN


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    pytest.importorskip("megatron.core")
    return run_ranks("training_faults:one_rank_faults", 1, 300, folder=str(tmp_path_factory.mktemp("one")))[0]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    pytest.importorskip("megatron.core")
    return run_ranks("training_faults:two_ranks_faults", 2, 300, folder=str(tmp_path_factory.mktemp("two")))


@pytest.mark.parametrize("case", FOREIGN)
def test_a_checkpoint_that_is_sealed_but_foreign_is_refused_by_file_and_field(one, case):
    assert one["foreign"][case].startswith("CheckpointError") and FOREIGN[case][1] in one["foreign"][case]
    assert one["sound"] == ""


def test_a_foreign_checkpoint_is_passed_over_for_the_one_before_and_that_is_said(one):
    said = one["passed"]["said"]
    assert "passed over" in said[0] and "step = 77" in said[0] and "step_0000001" in said[1]
    assert any("resumed at step 1 " in line for line in said) and one["passed"]["step"] == 2


def test_a_plan_file_of_deep_brackets_is_refused_by_its_field(one):
    assert one["deep_plan"].startswith("RecipeError") and "checkpoint.pin_plan" in one["deep_plan"] and "plan.json" in one["deep_plan"]


def test_a_resume_is_not_said_where_planning_then_stops_the_run(one):
    error, said = one["gone"]
    assert error.startswith("PlanError") and not any("resumed" in line for line in said)


@pytest.mark.parametrize("size", DISKS)
def test_a_full_disk_ends_the_run_with_status_4_and_one_line_and_the_saves_before_it_stay(one, size):
    found = one["full"][str(size)]
    assert found["full"]["status"] == 4 and len(found["full"]["printed"]) == 1
    fails = "metrics.jsonl: cannot be written" if size == 100 else "step_0000004: could not be written: "  # the old metrics are rewritten first
    assert fails in found["full"]["printed"][0]
    assert "step_0000002" in " ".join(found["after"]["said"]) and found["after"]["status"] == 0
    assert found["whole"] == ["step_0000002", "step_0000004"]


def test_metrics_that_cannot_be_written_end_the_run_with_status_4_and_their_file(one):
    assert one["full_metrics"]["status"] == 4
    (line,) = one["full_metrics"]["printed"]
    assert "metrics.jsonl: cannot be written" in line and "set logging.dir" in line and "rank 0" in line
    assert one["full_rows"] >= 1


def test_a_launchers_variables_are_obeyed_or_refused_by_name(one):
    worlds = one["worlds"]
    assert (worlds["alone"], worlds["one of one"], worlds["whole"]) == (1, 1, 2)
    for case, names in (("no rank", ["RANK"]), ("no GPU's number", ["LOCAL_RANK"]), ("no world", ["RANK"]), ("beyond", ["RANK"]),
                        ("text", ["RANK", "WORLD_SIZE"])):  # fmt: skip
        assert [line.partition(" = ")[0].strip() for line in worlds[case].splitlines()[1:]] == [f"environment: {n}" for n in names], case
    assert "WORLD_SIZE is not set" in worlds["no world"]


def test_ranks_join_by_the_variables_of_any_launcher(two):
    assert [rank["joined"] for rank in two] == [[0, 2, 2], [1, 2, 2]]


@pytest.mark.parametrize(
    ("case", "field"),
    [("every", "checkpoint.every_steps"), ("end", "checkpoint.save_at_end"), ("dir", "checkpoint.dir"), ("data", "data: counts"),
     ("data", "data: SHA-256 of .idx"), ("absent", "data: SHA-256 of the tokenizer")],
)  # fmt: skip
def test_ranks_that_would_save_otherwise_or_hold_other_data_stop_all_with_each_field_and_rank(two, case, field):
    for rank in two:
        assert rank[case].startswith("RecipeError")
        assert any(f" {field} = " in line and "on rank 0" in line and "on rank 1" in line for line in rank[case].splitlines())


def test_the_same_data_under_other_paths_trains(two):
    assert [rank["alike"] for rank in two] == [2, 2]


def test_a_save_that_fails_on_one_rank_stops_all_and_loses_nothing(two):
    for rank in two:
        assert rank["full"].startswith("CheckpointError: rank 1: ") and "step_0000004: could not be written" in rank["full"]
        assert rank["index"].startswith("CheckpointError: rank 0: ") and "No space left on device" in rank["index"]
        assert rank["metrics"].startswith("MetricsError: rank 0: ") and "metrics.jsonl" in rank["metrics"]
        assert rank["left"] == ["step_0000002"]
    assert any("resumed at step 2 " in line for line in two[0]["resumed"])
