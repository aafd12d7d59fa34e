"""The trainer on two ranks: every layout resumes a one-rank checkpoint to the same losses, evaluates to the same loss,
resumes itself bitwise, and agrees on stopping."""

from __future__ import annotations

import pytest
from harness import run_ranks
from training_ranks import BITWISE, LAYOUTS


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    pytest.importorskip("megatron.core")
    folder = str(tmp_path_factory.mktemp("two"))
    start = run_ranks("training_ranks:start", 1, 120, folder=folder)[0]
    return start, run_ranks("training_ranks:two_ranks", 2, 240, folder=folder, prefix=start["prefix"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_goes_on_from_a_one_rank_checkpoint_with_the_same_losses(results, layout):
    """fp32 sums in another order: 1e-5 relative, over three steps of a loss of about 5."""
    one, ranks = results[0]["rows"], results[1]
    last = ranks[-1][layout]["rows"]  # the last rank is on the last pipeline stage: it knows the loss
    assert sorted(last) == sorted(one) == ["3", "4", "5"]
    for step, (loss, norm) in one.items():
        assert last[step][0] == pytest.approx(loss, rel=1e-5), step
        assert last[step][1] == pytest.approx(norm, rel=1e-4), step


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_evaluates_to_the_validation_loss_of_one_rank(results, layout):
    one, ranks = results
    assert sorted(one["validation"]) == ["4", "5"]
    assert ranks[-1][layout]["validation"] == pytest.approx(one["validation"], rel=1e-5)


def test_too_little_validation_data_and_rank_0s_broken_plan_file_stop_every_rank(results):
    for rank in results[1]:
        assert rank["too_many"].startswith("RecipeError") and "train.eval_batches = 1000" in rank["too_many"]
        assert rank["plan_file"].startswith("RecipeError") and "broken-0.json" in rank["plan_file"] and "format 2" in rank["plan_file"]


@pytest.mark.parametrize("layout", ["tp2", "tp2_sp", "pp2"])
def test_a_plan_file_made_without_a_model_names_every_region_of_every_rank(results, layout):
    assert [line for line in results[1][0]["plan_made"][layout] if "digest" not in line] == []  # rank 0 speaks for all


def test_the_digest_is_said_once_at_the_start_and_stands_in_the_first_row_of_each_start(results):
    for layout in LAYOUTS:
        said = [[line for line in rank[layout]["said"] if "digest" in line] for rank in results[1]]
        assert len(said[0]) == 1 and said[0][0].endswith(", the same on 2 ranks") and not said[1]
        # the folder's first two steps are those of the one rank that it was copied from
        begun = [row for row in results[1][0][layout]["metrics"] if "digest" in row]
        assert [row["step"] for row in begun][:2] == [1, 3] and begun[1]["digest"].startswith(said[0][0].partition("digest ")[2][:12])
        assert begun[0]["digest"] != begun[1]["digest"]  # plan.file is the checkpoint's from the second start on


def test_ranks_that_would_plan_or_train_otherwise_stop_all_with_each_field_and_rank(results):
    for rank, found in enumerate(results[1]):
        recipe = found["other_recipe"]
        assert recipe.startswith("RecipeError: 2 problems") and "train.threads" not in recipe
        assert f"optimizer.lr = {0.02 if rank else 0.01}: differs between ranks: 0.01 on rank 0, 0.02 on rank 1" in recipe
        assert "train.steps" in recipe
        assert "environment: check" in found["other_setting"] and "'False' on rank 0, 'True' on rank 1" in found["other_setting"]


@pytest.mark.parametrize("layout", BITWISE)
def test_a_layout_resumes_its_own_checkpoint_bitwise_on_every_rank(results, layout):
    for rank in results[1]:
        assert rank[layout]["cut"] == 6 and rank[layout]["straight_steps"] == [6, 7]
        assert rank[layout]["bitwise"]


def test_a_nan_on_one_rank_stops_all_and_names_that_rank(results):
    for rank in results[1]:
        assert rank["nan"].startswith("NotFiniteError") and "at step 2 on rank 1" in rank["nan"]


def test_a_signal_to_one_rank_stops_all_after_the_same_step(results):
    assert [rank["term"] for rank in results[1]] == [[2, True], [2, True]]
