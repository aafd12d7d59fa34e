"""The trainer on one rank: pinned plans and plan files, learning rates, clipping, fused weight gradients, evaluation."""

from __future__ import annotations

import json
import math

import pytest
from harness import run_ranks
from training_plans import MATCHING


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    pytest.importorskip("megatron.core")
    return run_ranks("training_ranks:one_rank_options", 1, 420, folder=str(tmp_path_factory.mktemp("options")))[0]


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


def test_a_model_is_freed_once_its_run_has_ended(result):
    assert result["left_over"] == []
