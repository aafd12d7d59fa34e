"""The trainer on one rank: bitwise resume, damaged checkpoints, losses that are not finite, signals, refusals, golden losses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import run_ranks
from training_ranks import RESUME_CASES

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "training_losses.json"
DAMAGES = {"flipped_bit": "SHA-256 differs", "truncated": "must have", "half_written": "its save was interrupted", "missing": "is missing",
           "foreign_file": "is not named", "marker": "cannot be read", "evil_index": "asks for builtins.exec"}  # fmt: skip


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    pytest.importorskip("megatron.core")
    return run_ranks("training_ranks:one_rank", 1, 420, folder=str(tmp_path_factory.mktemp("one")))[0]


@pytest.mark.parametrize("case", RESUME_CASES)
def test_a_resumed_run_equals_an_uninterrupted_one_bitwise(result, case):
    whole, first, second = (result[f"resume/{case}"][k] for k in ("whole", "first", "second"))
    assert sorted(first["rows"]) == ["1", "2", "3"] and sorted(second["rows"]) == ["4", "5"]
    assert first["rows"] | second["rows"] == whole["rows"]
    assert second["state"] == whole["state"] and second["state"] != first["state"]
    assert any("resumed at step 3" in line for line in second["said"])


@pytest.mark.parametrize("steps", ["4", "5"])
def test_a_run_that_is_complete_says_that_nothing_is_left_to_train_and_changes_nothing(result, steps):
    again = result["finished"][steps]
    assert again["rows"] == {} and f"step 5 of {steps} is done: nothing left to train; raise train.steps to go on" in again["said"]
    assert again["state"] == result[f"resume/{list(RESUME_CASES)[-1]}"]["second"]["state"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_and_that_is_said(result, damage):
    said = result[f"damage/{damage}"]
    assert "step_0000005" in said[0] and "passed over" in said[0] and DAMAGES[damage] in said[0]
    assert "using the checkpoint before it" in said[1] and any("resumed at step 4" in line for line in said)


def test_nothing_in_a_checkpoint_is_executed(result):
    assert not result["executed"]
    assert "Weights only load failed" in result["evil_object"]["message"] and not result["evil_object"]["executed"]


def test_damaged_checkpoints_without_a_whole_one_stop_the_run_but_interrupted_first_saves_do_not(result):
    assert result["damage/all"].startswith("CheckpointError") and "2 damaged checkpoints" in result["damage/all"]
    assert "no complete checkpoint: starting from the beginning" in result["damage/unmarked"]


def test_only_the_last_checkpoints_are_kept(result):
    assert result["kept"] == ["step_0000004", "step_0000005"]


def test_a_nan_loss_stops_with_step_and_rank_and_saves_nothing_of_it(result):
    assert result["nan"].startswith("NotFiniteError") and "step 4 on rank 0" in result["nan"]
    assert result["nan_left"] == ["step_0000002"] and result["nan_rows"] == [3, 4, 5]


def test_an_infinite_gradient_stops_with_step_and_rank(result):
    assert result["inf"].startswith("NotFiniteError") and "at step 3" in result["inf"] and "rank 0" in result["inf"]
    assert result["inf_left"] == []


def test_sigterm_finishes_the_step_saves_and_goes_on_bitwise(result):
    assert result["term"]["interrupted"] and result["term"]["step"] == 2
    assert "stopped by a signal after step 2, saved" in result["term"]["said"]
    assert result["term_equal"] and result["term_handler_restored"]
    assert result["term_early"] == [0, True, ["stopped by a signal after step 0"]]


def test_the_parameter_formula_equals_built_models(result):
    assert len(result["counts"]) == 6
    for case, (formula, built) in result["counts"].items():
        assert formula == built, case


def test_losses_are_the_golden_ones_with_either_layers(result):
    """Eight steps of a recipe on a synthetic text, fp32. Tolerance: sums in another order, on another CPU, over eight steps."""
    golden = json.loads(GOLDEN.read_text())
    for layers in ("layerplan", "megatron_local"):
        found = {step: loss for step, (loss, _) in result["golden"][layers].items()}
        assert found == pytest.approx(golden["losses"], abs=2e-4), layers
    assert golden["losses"]["8"] < 0.75 * golden["losses"]["1"]


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("other_model", ["model.ffn_hidden_size = 96", "was trained with 64", "model.norm_eps"]), ("other_batch", ["train.global_batch = 8"]),
        ("resume_none", ["checkpoint.resume = 'none'", "holds checkpoints already"]), ("no_data", ["data.prefix = None"]),
        ("arch", ["plan.arch = 'sm_90'", "is cpu"]), ("world", ["must divide the number of ranks, 1"]), ("gpu", ["train.device = 'cuda'"]),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_with_its_field(result, case, said):
    assert result["refused"][case].startswith("RecipeError")
    assert all(part in result["refused"][case] for part in said)


def test_completions_are_the_same_for_the_same_seed_and_bad_requests_are_refused(result):
    found = result["complete"]
    assert found["greedy"][0] == found["greedy"][1] and found["greedy"][0]
    assert found["seeded"][0] == found["seeded"][1] != found["other_seed"]
    assert all(name in found["empty"] for name in ("prompt", "max_new_tokens", "temperature"))
    assert "holds no whole checkpoint" in found["nothing"] and "none': no such folder" in found["no_folder"]


# ---- plan files ------------------------------------------------------------------------------------------------------
