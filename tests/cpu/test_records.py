"""Measured times: what ranking makes of them, for a GPU as data, and what becomes of a file that is wrong."""

import dataclasses
import json
import time

import pytest
import torch

from layerplan.integration.engines.arch import ARCHS
from layerplan.integration.engines.contract import Offer
from layerplan.integration.engines.manifest import BY_ID
from layerplan.integration.graph.ir import Dim, GraphBuilder
from layerplan.integration.planner import plan_file, rank, records
from layerplan.integration.planner.cover import region_of
from layerplan.integration.planner.explain import explain
from layerplan.integration.planner.plan_file import Pin, Pins
from layerplan.integration.planner.planner import plan
from layerplan.integration.planner.policy import Policy
from layerplan.integration.planner.rank import Priced, Ranking, costs
from layerplan.integration.planner.records import (
    NONE,
    Record,
    Records,
    RecordsError,
    plain_knobs,
    region_key,
    versions_of,
)
from layerplan.integration.planner.report import report
from layerplan.integration.planner.runner import Runner, cached_plan
from layerplan.integration.planner.shapes import SpecMaker
from layerplan.integration.settings import Settings
from layerplan.modules.base import apply_policy
from layerplan.modules.norm import Norm
from layerplan.recipes import RecipeError, load_recipe, policies
from layerplan.recipes.config import load_records
from layerplan.recipes.estimate import estimate_recipe
from tests.cases.graphs import LONG, T, bf16, needs_triton, sdpa

torch.set_num_threads(1)
SM90, CPU = ARCHS["sm_90"], ARCHS["cpu"]


def row(region, engine, us, *, arch="sm_90", gpu="NVIDIA H200", error=None, versions=None, spread=0.01, knobs=()):
    quartiles = None if us is None else (us * (1 - spread), us * (1 + spread))
    return Record(
        arch,
        gpu,
        region_key(region),
        region.ops,
        engine,
        knobs,
        tuple(sorted(versions or versions_of(BY_ID[engine]))),
        us,
        quartiles,
        error,
    )


def in_a_row():
    """bias_dropout_add, rms_norm and an activation, in a row: one region on a GPU."""
    b = GraphBuilder()
    x, r, g = b.input("x", bf16(T, 256)), b.input("r", bf16(T, 256)), b.input("g", bf16(256))
    return b.build([b.op("squared_relu", x=b.op("rms_norm", x=b.op("bias_dropout_add", x=x, residual=r), weight=g))])


def ranking(graph):
    return Ranking(graph, SM90, Policy(), trial=True)


def cover_of(p):
    return [(r.ops, r.engine) for r in p.forward.regions]


def reasons(p):
    (region,) = p.forward.regions
    return {c.engine: c.reason for c in region.candidates}


def attention_records(cudnn=None, flash=None, **kw):
    graph = sdpa(LONG)
    (region,) = plan(graph, SM90).forward.regions
    given = {"attention/torch_cudnn": cudnn, "attention/torch_flash": flash}
    return graph, Records(tuple(row(region.region, e, us, **kw) for e, us in given.items() if us is not None))


# ---- ranking ---------------------------------------------------------------------------------------------------------


def test_measured_times_rank_in_place_of_predictions_and_the_reasons_say_so():
    graph, found = attention_records(cudnn=500.0, flash=312.0)
    assert cover_of(plan(graph, SM90)) == [(("sdpa",), "attention/torch_cudnn")]
    made = plan(graph, SM90, records=found)
    assert cover_of(made) == [(("sdpa",), "attention/torch_flash")] and made.forward.seconds == pytest.approx(312e-6)
    said = reasons(made)
    assert (
        "measured 312.0 us (H200)" in said["attention/torch_flash"] and "predicted" not in said["attention/torch_flash"]
    )
    assert (
        said["attention/torch_cudnn"]
        == "slower: measured 500.0 us (H200), attention/torch_flash measured 312.0 us (H200)"
    )
    (chosen,) = made.choices()
    first = chosen["candidates"][0]
    assert chosen["measured_us"] == 312.0 and first["measured_seconds"] == pytest.approx(312e-6)
    assert (
        chosen["predicted_us"] == pytest.approx(first["seconds"] * 1e6, abs=1e-3)
        and 0 < first["roofline_seconds"] < first["seconds"]
    )
    assert "measured us" in str(made) and "312.0" in str(made)


def test_a_prediction_beside_measured_times_must_win_even_if_it_is_as_far_off_as_the_worst_of_them():
    graph, _ = attention_records()
    (region,) = plan(graph, SM90).forward.regions
    predicted = {c.engine: c.seconds * 1e6 for c in region.candidates if c.offer is not None}
    cudnn, flash = predicted["attention/torch_cudnn"], predicted["attention/torch_flash"]
    assert cudnn < flash
    # flash takes three times its prediction: cudnn's prediction counts three times too, and still wins
    _, slow = attention_records(flash=3 * flash)
    assert cover_of(plan(graph, SM90, records=slow)) == [(("sdpa",), "attention/torch_cudnn")]
    said = reasons(plan(graph, SM90, records=slow))["attention/torch_flash"]
    assert (
        said.startswith(f"slower: measured {3 * flash:.1f} us (H200), attention/torch_cudnn predicted")
        and f"counts as {3 * cudnn:.1f} us" in said
    )
    # the reference is known to be far off, and flash is as predicted: cudnn's prediction is no match for it any more
    off = 2 * flash / cudnn
    both = Records(
        (
            *attention_records(flash=flash)[1].rows,
            row(region.region, "reference/eager", off * predicted["reference/eager"]),
        )
    )
    made = plan(graph, SM90, records=both)
    assert cover_of(made) == [(("sdpa",), "attention/torch_flash")]
    assert (
        f"predicted {cudnn:.1f} us (counts as {off * cudnn:.1f} us beside measured times)"
        in reasons(made)["attention/torch_cudnn"]
    )


def test_a_measured_reference_does_not_keep_a_kernel_from_running_that_nobody_measured():
    graph, _ = attention_records()
    (region,) = plan(graph, SM90).forward.regions
    known = Records((row(region.region, "reference/eager", 900.0),))
    assert cover_of(plan(graph, SM90, records=known)) == [(("sdpa",), "attention/torch_cudnn")]


def test_measured_times_whose_quartiles_overlap_are_equal_and_the_manifests_first_is_taken():
    for spread, engine in ((0.02, "attention/torch_cudnn"), (0.005, "attention/torch_flash")):
        graph, found = attention_records(cudnn=102.0, flash=100.0, spread=spread)
        made = plan(graph, SM90, records=found)
        assert cover_of(made) == [(("sdpa",), engine)]
    graph, found = attention_records(cudnn=102.0, flash=100.0, spread=0.02)
    assert reasons(plan(graph, SM90, records=found))["attention/torch_flash"].startswith("as fast: measured 100.0 us")


@pytest.mark.parametrize("error", ["wrong: output 0: error 1 over 0.1", "failed: RuntimeError: no kernel image"])
def test_an_engine_that_a_record_calls_wrong_or_failed_is_not_ranked_unless_it_is_named(error):
    graph, found = attention_records(flash=900.0)
    (region,) = plan(graph, SM90).forward.regions
    bad = Records((*found.rows, row(region.region, "attention/torch_cudnn", None, error=error)))
    made = plan(graph, SM90, records=bad)
    assert cover_of(made) == [(("sdpa",), "attention/torch_flash")]
    assert reasons(made)["attention/torch_cudnn"] == f"{error} (when it was measured on H200)"
    assert cover_of(plan(graph, SM90, Policy(engine="attention/torch_cudnn"), records=bad)) == [
        (("sdpa",), "attention/torch_cudnn")
    ]


@needs_triton
def test_a_region_of_several_ops_is_taken_only_where_it_costs_no_more_than_its_ops_apart():
    graph = in_a_row()
    (whole,) = plan(graph, SM90).forward.regions
    assert whole.ops == ("bias_dropout_add", "rms_norm", "squared_relu")
    own = ranking(graph)
    alone = [(own.alone(n)[0][0].region, us) for n, us in zip(graph.nodes, (100.0, 200.0, 300.0), strict=True)]
    engines = ("pointwise/inductor", "norm/torch", "pointwise/inductor")
    parts = [row(region, engine, us) for (region, us), engine in zip(alone, engines, strict=True)]
    parts.append(row(alone[1][0], "pointwise/inductor", 250.0))
    parts.append(row(region_of(graph, graph.nodes[1:]), "pointwise/inductor", 510.0))
    for us, fused in ((600.0, True), (610.0, False), (3000.0, False)):
        made = plan(graph, SM90, records=Records((*parts, row(whole.region, "pointwise/inductor", us))))
        assert (len(made.forward.regions) == 1) is fused, us
        if not fused:
            assert [r.engine for r in made.forward.regions] == list(engines) and made.forward.seconds == pytest.approx(
                600e-6
            )
            (lost,) = [c for c in made.forward.regions[0].candidates if "apart" in c.reason]
            assert lost.reason == f"its 3 ops cost less apart: measured 600.0 us, together measured {us:.1f} us (H200)"


def test_a_record_ranks_as_the_hosts_cost_where_that_is_more():
    graph = sdpa()
    (region,) = plan(graph, SM90).forward.regions
    offers = {p.entry.id: p.offer for p in ranking(graph).alone(graph.nodes[0])[0]}
    quick, slow = sorted(("attention/torch_flash", "attention/torch_cudnn"), key=lambda e: offers[e].host_us)
    assert offers[quick].host_us < offers[slow].host_us
    tiny, long = offers[quick].host_us / 2, 10 * offers[slow].host_us
    for us, chosen in (((tiny, tiny / 4), quick), ((long, long / 4), slow)):
        records = Records(tuple(row(region.region, e, u) for e, u in zip((quick, slow), us, strict=True)))
        (made,) = plan(graph, SM90, records=records).forward.regions
        assert made.engine == chosen, us


@needs_triton
def test_a_predicted_region_is_weighed_against_measured_ops_by_the_same_rule():
    graph = in_a_row()
    (whole,) = plan(graph, SM90).forward.regions
    own = ranking(graph)
    # every op takes a hundred times its prediction: the whole is then believed to do so as well, and is less
    parts = [
        row(p.region, p.entry.id, 100e6 * p.predicted)
        for n in graph.nodes
        for p in own.alone(n)[0]
        if not p.entry.trial
    ]
    assert cover_of(plan(graph, SM90, records=Records(tuple(parts)))) == [(whole.ops, "pointwise/inductor")]


def test_costs_multiply_predictions_by_the_worst_ratio_and_never_make_one_smaller():
    (region,) = plan(sdpa(), SM90).forward.regions
    offer = Priced(region.region, BY_ID["attention/torch_cudnn"], Offer(0.5), 100e-6, 50e-6)
    timed = [
        dataclasses.replace(offer, record=row(region.region, "attention/torch_cudnn", us))
        for us in (50.0, 150.0, 300.0)
    ]
    assert costs([offer]) == [100e-6]
    assert costs([offer, timed[0]]) == pytest.approx([100e-6, 50e-6])
    assert costs([offer, *timed]) == pytest.approx([300e-6, 50e-6, 150e-6, 300e-6])


def test_records_of_another_arch_or_shape_class_change_nothing():
    graph, found = attention_records(cudnn=500.0, flash=1.0)
    for other in (ARCHS["sm_100"], ARCHS["sm_80"]):
        assert plan(graph, other, records=found).choices() == plan(graph, other).choices()
    longer = sdpa((LONG[0], 2 * LONG[1], *LONG[2:]))
    assert plan(longer, SM90, records=found).choices() == plan(longer, SM90).choices()


def test_a_region_is_found_whether_or_not_its_weight_is_a_parameter():
    def linear(weight):
        b = GraphBuilder()
        return b.build(
            [b.op("linear", x=b.input("x", bf16(Dim("t", 64), 64)), weight=b.input("w", bf16(32, 64), weight=weight))]
        )

    (region,) = plan(linear(True), SM90).forward.regions
    found = Records((row(region.region, "linear/torch", 7.0),))
    assert plan(linear(False), SM90, records=found).choices()[0]["measured_us"] == 7.0


def test_a_row_of_another_version_of_the_engines_package_does_not_count_and_that_is_said_once(monkeypatch, caplog):
    old = {"torch": "2.0.0"}.items()
    graph, found = attention_records(cudnn=500.0, flash=1.0, versions=old)
    monkeypatch.setattr(records, "_said", set())
    with caplog.at_level("WARNING", "layerplan"):
        for _ in range(2):
            made = plan(graph, SM90, records=dataclasses.replace(found))
    assert cover_of(made) == [(("sdpa",), "attention/torch_cudnn")]
    assert [r.message for r in caplog.records] == [
        f"the records: 2 records of sm_90 do not count: they are of torch 2.0.0, here it is {records.installed('torch')}; "
        "run 'layerplan tune' again"
    ]
    assert all(
        "a record does not count: it is of torch 2.0.0" in c.reason
        for c in made.forward.regions[0].candidates
        if c.offer and "torch" in c.engine
    )


def test_torch_does_not_decide_whether_the_times_of_another_packages_kernels_hold():
    assert records.packages_of(BY_ID["linear/quack"]) == ("quack-kernels",) and records.packages_of(
        BY_ID["norm/torch"]
    ) == ("torch",)
    assert [p for p, _ in versions_of(BY_ID["linear/quack"])] == ["torch", "quack-kernels"]


def test_pins_go_before_records():
    graph, found = attention_records(cudnn=500.0, flash=312.0)
    (region,) = plan(graph, SM90).forward.regions
    pins = Pins((("sm_90", region.region.key(), Pin("attention/torch_cudnn", ("sdpa",))),))
    made = plan(graph, SM90, records=found, pins=pins)
    assert cover_of(made) == [(("sdpa",), "attention/torch_cudnn")] and made.choices()[0]["measured_us"] == 500.0
    written = plan_file.pins_of([plan(graph, SM90, records=found)])
    assert cover_of(plan(graph, SM90, pins=written)) == [(("sdpa",), "attention/torch_flash")], (
        "a plan file needs no records"
    )


def test_an_engine_on_trial_is_not_chosen_for_its_record(monkeypatch):
    on_trial = dataclasses.replace(BY_ID["attention/torch_flash"], trial=True)
    monkeypatch.setattr(
        rank,
        "entries_for",
        lambda op: [on_trial if e.id == on_trial.id else e for e in BY_ID.values() if op in e.ops or e.is_reference],
    )
    graph, found = attention_records(cudnn=500.0, flash=1.0)
    assert cover_of(plan(graph, SM90, records=found)) == [(("sdpa",), "attention/torch_cudnn")]


def test_planning_with_records_stays_within_the_bound_and_gives_the_same_plan_again():
    recipe = load_recipe("llama3_8b", [])
    found = Records(
        tuple(
            row(c.region, c.engine, 100.0)
            for g in estimate_recipe(recipe, SM90).graphs
            for part in (g.plan.forward, g.plan.backward)
            for r in part.regions
            for c in r.candidates
            if c.region is not None
        )
    )
    assert len({r.region for r in found.rows}) > 10
    first = estimate_recipe(recipe, SM90, records=found)

    def cpu_ms():
        start = time.process_time()
        estimate_recipe(recipe, SM90, records=found)
        return (time.process_time() - start) * 1e3

    assert min(cpu_ms() for _ in range(5)) < 50
    again = estimate_recipe(recipe, SM90, records=dataclasses.replace(found))
    assert [g.plan.choices() for g in again.graphs] == [g.plan.choices() for g in first.graphs]
    assert any(r["measured_us"] == 100.0 for g in first.graphs for r in g.plan.choices()) and " measured" in str(first)


# ---- where records come from -----------------------------------------------------------------------------------------


def test_equal_rows_are_equal_records_wherever_they_come_from():
    _, found = attention_records(cudnn=500.0)
    same, other = Records(found.rows, "a file"), attention_records(cudnn=501.0)[1]
    assert same == found and hash(same) == hash(found) and same.digest == found.digest
    assert other != found and other.digest != found.digest and NONE.digest != found.digest


def test_a_plan_is_cached_for_its_records():
    graph, found = attention_records(cudnn=500.0, flash=312.0)
    plain, measured = cached_plan(graph, SM90, Policy()), cached_plan(graph, SM90, Policy(), records=found)
    assert cover_of(plain) != cover_of(measured)
    assert cached_plan(graph, SM90, Policy(), records=Records(found.rows, "again")) is measured


def cpu_records(tmp_path):
    """A file by which a linear on a CPU runs on its reference."""
    b, spec = GraphBuilder(), SpecMaker()
    x, w = torch.empty(64, 16), torch.empty(8, 16)
    graph = b.build([b.op("linear", x=b.input("x", spec(x, "*t h!")), weight=b.input("w", spec(w, "f! h!")))])
    (region,) = plan(graph, CPU).forward.regions
    found = Records(
        tuple(
            row(region.region, e, us, arch="cpu", gpu="a CPU")
            for e, us in (("linear/torch", 50.0), ("reference/eager", 5.0))
        )
    )
    records.save(tmp_path / "r.json", found)
    return tmp_path / "r.json", found, (x, w)


def linear_runner(**kw):
    def build(x, w):
        b, s = GraphBuilder(), SpecMaker()
        return b.build([b.op("linear", x=b.input("x", s(x, "*t h!")), weight=b.input("w", s(w, "f! h!")))])

    return Runner(build, ("x", "w"), policy=Policy(), **kw)


def engines(runner):
    return [r.engine for _, _, r in runner.regions()]


def test_a_runner_plans_with_the_records_it_is_given_or_with_those_of_the_environment(tmp_path, monkeypatch):
    file, found, tensors = cpu_records(tmp_path)
    for given, engine in ((NONE, "linear/torch"), (found, "reference/eager")):
        runner = linear_runner(records=given)
        runner(*tensors)
        assert engines(runner) == [engine]
    monkeypatch.setattr(records, "settings", lambda: dataclasses.replace(Settings(), records=str(file)))
    assert records.default_records() == found
    runner = linear_runner()
    runner(*tensors)
    assert engines(runner) == ["reference/eager"]


def test_apply_policy_takes_a_file_or_its_content_and_the_report_says_what_is_measured(tmp_path):
    model, x = torch.nn.ModuleList([Norm(16)]), torch.randn(4, 16)
    model[0](x)
    ((_, _, region),) = [r for r in model[0].plan_runners()[0].regions() if r[0] == "forward"]
    us = 1e-3 if region.engine != "reference/eager" else 1e9
    found = Records(
        tuple(
            row(region.region, e, t, arch="cpu", gpu="a CPU")
            for e, t in (("norm/torch", 5.0 * us), ("reference/eager", us))
        )
    )
    records.save(tmp_path / "r.json", found)
    for given in (tmp_path / "r.json", str(tmp_path / "r.json"), found):
        apply_policy(model, None, records=given)
        model[0](x)
        made = report(model)
        assert [r.measured_us for r in made.rows if r.direction == "forward"] != [None]
        assert "measured us" in str(made).splitlines()[0] and "from records" in str(made).splitlines()[-1]
    apply_policy(model, None)
    model[0](x)
    assert "measured" not in str(report(model)).splitlines()[0]
    with pytest.raises(TypeError, match="records = int: must be a records file's path"):
        apply_policy(model, None, records=3)


def test_explain_shows_the_times_of_the_layers_shape_class():
    b = GraphBuilder()
    graph = b.build(
        [b.op("linear", x=b.input("x", bf16(Dim("s", 8192), 1, 64)), weight=b.input("w", bf16(32, 64), weight=True))]
    )
    (region,) = plan(graph, SM90).forward.regions
    found = Records((row(region.region, "linear/torch", 7.5),))
    shapes = {"x": ((5000, 1, 64), "bfloat16"), "weight": ((32, 64), "bfloat16")}
    said = explain("linear", shapes, "sm_90", records=found)
    (first,) = [c for c in said.candidates if c.chosen]
    assert (
        first.measured_seconds == pytest.approx(7.5e-6)
        and "7.5" in str(said)
        and said.to_json()["candidates"][0]["roofline_seconds"] > 0
    )


def test_a_recipe_names_its_records_and_refuses_what_the_environment_says_beside_them(tmp_path, monkeypatch):
    file, found, _ = cpu_records(tmp_path)
    recipe = load_recipe("gpt_tiny", [f"plan.records={file}"])
    assert load_records(recipe) == found and load_records(load_recipe("gpt_tiny")) == NONE
    with pytest.raises(
        RecipeError,
        match=r"plan.records = .*no such file; write it anew \(layerplan tune RECIPE --out FILE\), or set plan.records=none",
    ):
        load_records(load_recipe("gpt_tiny", ["plan.records=nowhere.json"]))
    for override, why in (
        ("plan.layers=megatron_local", "runs no plans"),
        ("plan.policy=reference", "leaves no choice that could be ranked"),
    ):
        with pytest.raises(RecipeError, match=f"plan.records = .*{why}"):
            load_recipe("gpt_tiny", [f"plan.records={file}", override])
    monkeypatch.setattr(policies, "settings", lambda: dataclasses.replace(Settings(), records="other.json"))
    monkeypatch.setattr(policies, "given", lambda: frozenset({"LAYERPLAN_RECORDS"}))
    assert load_recipe("gpt_tiny").plan.records is None, "a recipe without records takes those of the environment"
    with pytest.raises(RecipeError, match=r"plan.records = .*the environment says LAYERPLAN_RECORDS=other\.json"):
        load_recipe("gpt_tiny", [f"plan.records={file}"])


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_file_holds_what_was_saved_and_newer_rows_replace_those_of_the_same_gpu_engine_and_region(tmp_path):
    _, found = attention_records(cudnn=500.0, flash=312.0, knobs=(("tile", (128, 64)), ("stages", 2)))
    _, newer = attention_records(flash=300.0, knobs=(("stages", 2), ("tile", (128, 64))))
    _, board = attention_records(flash=200.0, gpu="NVIDIA H100", knobs=(("stages", 2), ("tile", (128, 64))))
    found = NONE.merged(dataclasses.replace(r, knobs=records.plain_knobs(r.knobs)) for r in found.rows)
    records.save(tmp_path / "r.json", found)
    read = records.load(tmp_path / "r.json")
    assert read == found and read.source == f"records file {tmp_path / 'r.json'}" and not list(tmp_path.glob(".*.tmp"))
    assert sorted(r.microseconds for r in read.merged(newer.rows).rows) == [300.0, 500.0]
    both = read.merged(board.rows)
    assert len(both.rows) == 3 and both.gpus() == ("NVIDIA H100", "NVIDIA H200")
    key = found.rows[0].region
    assert (
        both.find("sm_90", key, "attention/torch_flash", [("stages", 2), ("tile", [128, 64])]).microseconds == 200.0
    ), "two boards: the faster"
    assert both.find("sm_90", key, "attention/torch_flash", ()) is None


def test_a_write_that_fails_leaves_nothing_behind(tmp_path):
    (tmp_path / "r.json").mkdir()
    with pytest.raises(OSError, match=r"r\.json"):
        records.save(tmp_path / "r.json", NONE)
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


GOOD = {
    "arch": "sm_90",
    "gpu": "NVIDIA H200",
    "versions": {"torch": "2.11.0"},
    "region": "abc@1024",
    "ops": ["linear"],
    "engine": "linear/torch",
    "knobs": {},
    "microseconds": 3.5,
    "quartiles": [3.0, 4.0],
    "error": None,
}


def test_the_row_that_the_faults_are_made_from_is_right(tmp_path):
    (tmp_path / "r.json").write_text(
        json.dumps(
            {
                "format": 1,
                "records": [
                    GOOD,
                    GOOD
                    | {"engine": "reference/eager", "microseconds": None, "quartiles": None, "error": "failed: no"},
                ],
            }
        )
    )
    assert len(records.load(tmp_path / "r.json").rows) == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"arch": "sm_91"}, "record 0: arch = 'sm_91': must be one of sm_80"),
        ({"arch": ["sm_90"]}, r"arch = \['sm_90'\]: must be a name"),
        ({"gpu": ""}, "gpu = '': must be a name"),
        ({"region": 3}, "region = 3: must be a name"),
        ({"ops": []}, r"ops = \[\]: must be names, at least one"),
        ({"engine": "linear/none"}, "engine = 'linear/none': is not in the manifest: linear/torch"),
        ({"knobs": {"tile": {}}}, "knobs = .*each must be a number"),
        ({"knobs": {"tile": [float("nan")]}}, "knobs = .*each must be a number other than NaN"),
        ({"versions": {}}, "versions = {}: must hold the versions of torch"),
        ({"engine": "linear/quack"}, "versions = .*must hold the versions of quack-kernels"),
        ({"microseconds": 0.0}, "microseconds = 0.0: must be a number above 0, or null beside an error"),
        ({"microseconds": float("nan")}, "microseconds = nan"),
        ({"microseconds": 10**400}, "microseconds = 1000"),
        ({"quartiles": [3.0, 10**400]}, "quartiles = .*must be two numbers"),
        ({"microseconds": None}, "microseconds = None: must be a number above 0, or null beside an error"),
        ({"error": "failed"}, "microseconds = 3.5"),
        ({"quartiles": [4.0, 3.0]}, "quartiles = .*the lower first"),
        ({"quartiles": None}, "quartiles = None: must be two numbers"),
        ({"more": 1}, "record 0: must hold arch, gpu, region, ops, engine"),
    ],
)
def test_a_wrong_row_is_refused_by_file_row_field_and_rule(tmp_path, change, said):
    (tmp_path / "r.json").write_text(json.dumps({"format": 1, "records": [GOOD | change]}))
    with pytest.raises(RecordsError, match=f"records file .*r.json: .*{said}"):
        records.load(tmp_path / "r.json")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no such file"),
        ("{", "cannot be read"),
        ("[]", "must be an object of format 1"),
        ('{"format": 2, "records": []}', "must be an object of format 1"),
        ('{"format": 1, "records": {}}', "with a list of records"),
        ("[" * 100000, "cannot be read"),
    ],
)
def test_a_file_that_holds_no_records_is_refused(tmp_path, text, said):
    if text is not None:
        (tmp_path / "r.json").write_text(text)
    with pytest.raises(RecordsError, match=f"records file .*r.json: .*{said}"):
        records.load(tmp_path / "r.json")


def test_rows_of_another_version_are_not_spoken_of_where_no_region_of_the_plan_or_another_arch_has_them(monkeypatch, caplog):
    _, found = attention_records(cudnn=500.0, flash=1.0, versions={"torch": "2.0.0"}.items())
    other = tuple(dataclasses.replace(r, arch="sm_100") for r in found.rows)
    monkeypatch.setattr(records, "_said", set())
    with caplog.at_level("WARNING", "layerplan"):
        plan(in_a_row(), SM90, records=found)
        plan(sdpa(LONG), SM90, records=Records(other))
    assert not caplog.records


# ---- what is said of them --------------------------------------------------------------------------------------------


def _last_lines(recipe, arch, found):
    lines = str(estimate_recipe(recipe, arch, records=found)).splitlines()
    return next(line for line in lines if line.startswith("records")), lines[-1]


def test_a_plan_says_how_many_regions_have_a_measured_time_and_what_its_time_is_made_of():
    recipe = load_recipe("llama3_8b")
    planned = estimate_recipe(recipe, SM90)
    parts = [part for g in planned.graphs for part in (g.plan.forward, g.plan.backward)]
    regions = {r.region.key(): r for part in parts for r in part.regions if r.engine != "runner"}
    rows = tuple(row(r.region, r.engine, 1.0, knobs=plain_knobs(r.offer.knobs)) for r in regions.values())
    n = len(regions)
    assert str(planned).endswith("a prediction from datasheet rates, without optimiser and communication")
    said, time_line = _last_lines(recipe, SM90, Records(rows, "plan.records = r.json"))
    assert said == f"records     plan.records = r.json: {n} of {n} regions have a measured time (H200)"
    assert "the output layer: measured times, the output layer's predicted from datasheet rates" in time_line
    some = tuple(r for r in rows if r.ops == ("rms_norm",))
    said, time_line = _last_lines(recipe, SM90, Records(some))
    many = int(said.partition(": ")[2].split()[0])
    assert 0 < many < n and f"measured times of {many} of {n} regions, predictions from datasheet rates for the rest" in time_line
    data = estimate_recipe(recipe, SM90, records=Records(some)).to_json()
    assert (data["regions"], data["measured_regions"], data["pinned_regions"]) == (n, many, 0)


def test_a_plan_says_where_none_of_the_records_is_for_it_and_why():
    planned = estimate_recipe(load_recipe("llama3_8b"), SM90)
    regions = [r for g in planned.graphs for r in g.plan.forward.regions if r.engine != "runner"]
    found = NONE.merged(row(r.region, r.engine, 100.0) for r in regions)
    n = len(found.rows)
    said, time_line = _last_lines(load_recipe("gpt_tiny"), SM90, found)
    assert said.endswith(f"none of its {n} records is for a region of this plan (arch sm_90; other sizes or parallel split)")
    assert "datasheet rates" in time_line and "measured" not in time_line
    said, _ = _last_lines(load_recipe("llama3_8b"), ARCHS["sm_100"], found)
    assert said.endswith("records is for a region of this plan: they are of sm_90, this plan is for sm_100")
    old = Records(tuple(dataclasses.replace(r, versions=tuple((p, "0") for p, _ in r.versions)) for r in found.rows))
    said, _ = _last_lines(load_recipe("llama3_8b"), SM90, old)
    assert "regions have a measured time: the rows of H200 are of other versions" in said


def test_a_report_says_how_many_regions_have_a_measured_time(tmp_path):
    def step():
        model(torch.randn(8, 64, requires_grad=True)).sum().backward()

    model = Norm(64)
    apply_policy(model, None)
    step()
    (forward,) = (r for direction, _, r in model.plan_runners()[0].regions() if direction == "forward")
    found = Records((row(forward.region, forward.engine, 5.0, arch="cpu", gpu="a CPU"),), "records file r.json")
    apply_policy(model, None, records=found)
    assert report(model).files == ()  # nothing has run
    step()
    assert report(model).files == ("records file r.json: 1 of 2 regions have a measured time (a CPU)",)
    assert "records file r.json: 1 of 2 regions" in str(report(model))


def test_a_plan_file_in_the_place_of_records_is_called_what_it_is(tmp_path):
    file = tmp_path / "plan.json"
    plan_file.save(file, plan_file.pins_of([plan(sdpa(LONG), SM90)]))
    with pytest.raises(RecordsError, match=r"is a plan file, not records: plan\.file and pins= take those; write it anew with"):
        records.load(file)
    with pytest.raises(RecipeError) as caught:
        load_records(load_recipe("gpt_tiny", [f"plan.records={file}"]))
    assert str(caught.value).count("write it anew") == 1 and "is a plan file" in str(caught.value)
