"""The trainer on two ranks: every layout resumes a one-rank checkpoint to the same losses, resumes itself bitwise, and agrees on stopping."""

from __future__ import annotations

import pytest
from harness import run_ranks
from training_ranks import BITWISE, LAYOUTS


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    pytest.importorskip("megatron.core")
    folder = str(tmp_path_factory.mktemp("two"))
    start = run_ranks("training_ranks:start", 1, 120, folder=folder)[0]
    return start["rows"], run_ranks("training_ranks:two_ranks", 2, 240, folder=folder, prefix=start["prefix"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_goes_on_from_a_one_rank_checkpoint_with_the_same_losses(results, layout):
    """fp32 sums in another order: 1e-5 relative, over three steps of a loss of about 5."""
    one, ranks = results
    last = ranks[-1][layout]["rows"]  # the last rank is on the last pipeline stage: it knows the loss
    assert sorted(last) == sorted(one) == ["3", "4", "5"]
    for step, (loss, norm) in one.items():
        assert last[step][0] == pytest.approx(loss, rel=1e-5), step
        assert last[step][1] == pytest.approx(norm, rel=1e-4), step


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
