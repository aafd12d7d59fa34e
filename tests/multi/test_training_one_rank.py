"""The trainer on one rank: bitwise resume, damaged checkpoints, losses that are not finite, signals, refusals, golden losses."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from harness import run_ranks
from training_plans import MATCHING
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


def test_a_resumed_run_keeps_the_pinned_engine_though_ranking_would_choose_another(result):
    pins = result["pins"]
    assert pins["kept"]["state"] == pins["whole"]["state"]
    assert pins["kept"]["rows"] == {s: pins["whole"]["rows"][s] for s in ("4", "5")}
    assert pins["kept_engines"]["sdpa"] == pins["kept_engines"]["sdpa_bwd"] == ["attention/torch_cpu"]
    assert not [line for line in pins["kept"]["said"] if "plan differs" in line]


def test_a_resumed_run_without_pins_plans_anew_and_says_what_differs(result):
    pins = result["pins"]
    assert pins["free_engines"]["sdpa"] == ["reference/eager"]
    said = [line for line in pins["free"]["said"] if "plan differs" in line]
    assert [line.partition("plan.json: ")[2] for line in said] == [
        "sdpa runs on reference/eager, was attention/torch_cpu", "sdpa_bwd runs on reference/eager, was attention/torch_cpu"]  # fmt: skip
    assert any("sdpa runs on reference/eager, was attention/torch_cpu" in line for line in pins["without"])


def test_a_pin_that_no_longer_fits_stops_with_its_file_the_reason_and_the_remedy(result):
    gone = result["pins"]["gone"]
    assert gone.startswith("PlanError") and "step_0000003/plan.json pins attention/torch_cpu" in gone
    assert "attention/torch_cpu: it was taken out" in gone and "set checkpoint.pin_plan=false" in gone


def test_a_region_that_the_checkpoint_did_not_run_is_said(result):
    said = [line for line in result["pins"]["new_region"] if "plan differs" in line]
    assert said and all("new region linear_wgrad runs on linear/torch" in line for line in said)
    assert any("plan.policy = 'reference'" in line for line in result["pins"]["other_policy"])


def test_a_checkpoints_plan_file_that_cannot_be_read_stops_the_run_unless_nothing_is_pinned(result):
    pins = result["pins"]
    for name, why in (("half", "cannot be read"), ("old", "format 2")):
        assert pins[name].startswith("RecipeError") and "checkpoint.pin_plan = True" in pins[name]
        assert "plan.json" in pins[name] and why in pins[name] and "set checkpoint.pin_plan=false" in pins[name]
    assert any("what differs from it cannot be said" in line for line in pins["half_unpinned"])
    assert any("resumed at step 3" in line for line in pins["half_unpinned"])


def test_pins_of_another_arch_do_not_apply_and_that_is_said_once(result):
    for said in (result["pins"]["other_arch"], result["plan_files"]["foreign"]):
        lines = [line for line in said if "do not apply" in line]
        assert len(lines) == 1 and "pins for sm_90, this run is on cpu" in lines[0]
        assert not any("plan differs" in line for line in said)


@pytest.mark.parametrize("case", MATCHING)
def test_a_plan_file_made_without_a_model_names_every_region_that_training_runs(result, case):
    assert result["plan_files"][case] == []


@pytest.mark.parametrize(("case", "why"), [("broken", "format 2"), ("absent", "no such file")])
def test_a_plan_file_that_cannot_be_used_is_refused_by_its_field(result, case, why):
    said = result["plan_files"][case]
    assert said.startswith("RecipeError") and f"{case}.json" in said and why in said
    assert "plan.file = " in said and "layerplan plan RECIPE --save FILE" in said


# ---- learning rate, clipping -----------------------------------------------------------------------------------------


def test_the_rate_warms_up_linearly_and_falls_along_a_cosine_to_its_least_at_the_last_step_of_the_decay(result):
    """Warm-up over 2 steps to 0.01, decay until step 6 to 0.001: 0.001 + 0.0045 * (1 + cos(pi * k / 4)), by hand. A step runs at the
    rate that the steps before it lead to."""
    found = result["schedule"]
    cosine = [0.0086819805, 0.0055, 0.0023180195]  # k = 1, 2, 3: cos = 0.70710678, 0, -0.70710678
    assert found["logged"] == pytest.approx([0.0, 0.005, 0.01, *cosine, 0.001, 0.001], rel=1e-6, abs=1e-12)
    assert found["after"] == pytest.approx([0.001], rel=1e-6)


@pytest.mark.parametrize("case", ["tiny", "plain"])
def test_a_clipped_update_is_as_long_as_the_clipped_gradient_says_and_the_norm_is_logged_unclipped(result, case):
    """Adam's first step is lr * g / (|g| + eps): with eps = 1 and a gradient clipped to length 0.01 it is lr * g to within |g| <=
    0.01 of each element, so its length is 0.01 * 0.01, or up to a hundredth less. Storing the parameters in float32 moves each by at
    most 2^-24 of itself; computing the step in float32 changes it by less than 1e-6 of itself."""
    clipped, huge = result["clipping"][case], result["clipping"]["huge"]
    assert huge["norm"] > 0.1, "without clipping the gradient must be far longer than 0.01"
    rounding = 2**-24 * clipped["length"]
    assert 1e-4 * (0.99 - 1e-6) - rounding <= clipped["moved"] <= 1e-4 * (1 + 1e-6) + rounding
    assert rounding < 2e-6, "the bounds must say something"
    assert clipped["norm"] == clipped["logged"] == pytest.approx(huge["norm"], rel=1e-6)
    assert huge["moved"] > 10 * clipped["moved"]


# ---- fused weight gradients, evaluation ------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["fp32", "bf16", "tied", "chunked", "megatron_local"])
def test_weight_gradients_added_within_the_product_change_no_loss(result, case):
    """The sums are those of the separate product and addition, which BLAS may round once instead of twice: 1e-6 relative in
    fp32. In bf16 the separate product is rounded to bf16 first, a relative 2^-8 of each micro-batch's gradient: over five steps the
    losses may move by that times their own change."""
    fused, plain = (result["fusion"][case][k] for k in ("fused", "plain"))
    assert fused["added"] == [9] * 5 and plain["added"] == [0] * 5  # qkv, projection, fc1, fc2 of two layers, and the output layer
    losses = [[loss for loss, _ in run["rows"].values()] for run in (fused, plain)]
    changed = max(abs(loss - losses[0][0]) for loss in losses[0])
    tolerance = 1e-6 * losses[0][0] if case != "bf16" else 2**-8 * changed
    assert all(math.isclose(a, b, rel_tol=0, abs_tol=tolerance) for a, b in zip(*losses, strict=True)), losses
    assert changed > 0.3


@pytest.mark.parametrize("case", ["fp32", "overlap"])
def test_evaluation_changes_nothing_of_the_training(result, case):
    found = result["evaluation"][case]
    assert found["whole"]["rows"] == found["without"]["rows"] and found["whole"]["state"] == found["without"]["state"]
    assert sorted(found["whole"]["validation"]) == ["2", "4", "5"] and found["without"]["validation"] == {}


@pytest.mark.parametrize("case", ["fp32", "overlap"])
def test_validation_losses_fall_are_the_same_after_a_resume_and_lie_in_the_metrics(result, case):
    found = result["evaluation"][case]
    whole = found["whole"]["validation"]
    assert whole["5"] < whole["2"] - 0.3
    # the first part ends at step 3, and a run ends with an evaluation
    assert sorted(found["first"]["validation"]) == ["2", "3"] and found["first"]["validation"]["2"] == whole["2"]
    assert found["second"]["validation"] == {"4": whole["4"], "5": whole["5"]} and found["second"]["state"] == found["whole"]["state"]
    rows = [json.loads(line) for line in found["metrics"].splitlines()]
    assert {str(r["step"]): r["validation_loss"] for r in rows if "validation_loss" in r} == found["first"]["validation"] | found["second"]["validation"]
    assert found["drawn"] == [True, True]


def test_a_step_with_a_validation_loss_is_logged_whatever_logging_every_steps_says(result):
    rows = [json.loads(line) for line in result["evaluation"]["sparse_metrics"].splitlines()]
    assert [r["step"] for r in rows if "validation_loss" in r] == [2, 4, 5] == [r["step"] for r in rows]


def test_an_evaluation_that_cannot_be_or_is_not_finite_stops_with_its_field_or_step(result):
    found = result["evaluation"]
    assert "train.eval_batches = 1000" in found["too_many"] and "data.split = 80,20,0 leaves" in found["too_many"]
    assert found["nan"].startswith("NotFiniteError") and "validation loss is not finite after step 2 on rank 0" in found["nan"]
    assert found["nan_left"] == ["step_0000001"]


def test_a_rotary_base_that_is_no_whole_number_is_built_as_the_recipe_says(result):
    said, built = result["rope_base"]
    assert built == pytest.approx(said, rel=1e-6) and said != pytest.approx(12345 ** (-2 / 8), rel=1e-6)
