"""Plan files: what they pin, that a pin holds whatever ranking and grouping say, and what becomes of one that no longer fits."""

import dataclasses
import importlib.util
import json
import subprocess
import sys

import pytest
import torch

from layerplan.integration.engines import contract
from layerplan.integration.engines.arch import ARCHS
from layerplan.integration.engines.contract import Decline, Offer
from layerplan.integration.engines.manifest import BY_ID
from layerplan.integration.graph.ir import Dim, GraphBuilder
from layerplan.integration.graph.ops.table import op_table
from layerplan.integration.planner import plan_file, records
from layerplan.integration.planner.cover import convex, grow
from layerplan.integration.planner.plan_file import Pin, Pins, PlanFileError, pins_of
from layerplan.integration.planner.planner import PlanError, plan
from layerplan.integration.planner.policy import Policy
from layerplan.integration.planner.report import report
from layerplan.integration.planner.runner import Runner, WeightGrads
from layerplan.integration.planner.shapes import SpecMaker
from layerplan.modules.base import apply_policy
from layerplan.modules.norm import Norm
from layerplan.recipes import load_recipe
from layerplan.recipes.estimate import estimate_recipe
from tests.cases.graphs import LONG, T, bf16, needs_triton, sdpa
from tests.cases.random_graphs import RandomGraph

torch.set_num_threads(1)
SM90, CPU = ARCHS["sm_90"], ARCHS["cpu"]


def linear_graph(hint=1024):
    b = GraphBuilder()
    return b.build([b.op("linear", x=b.input("x", bf16(Dim("t", hint), 64)), weight=b.input("w", bf16(32, 64), weight=True))])


def rows():
    """bias_dropout_add, rms_norm and an activation, in a row: one region on a GPU."""
    b = GraphBuilder()
    x, r, g = b.input("x", bf16(T, 256)), b.input("r", bf16(T, 256)), b.input("g", bf16(256))
    return b.build([b.op("squared_relu", x=b.op("rms_norm", x=b.op("bias_dropout_add", x=x, residual=r), weight=g))])


def cover_of(p):
    return [[(r.ops, r.engine) for r in part.regions] for part in (p.forward, p.backward) if part]


def pinning(p, engine, *ops):
    """The pins of a plan, with the one of the region of ``ops`` on another engine."""
    found = [(arch, key, Pin(engine, pin.ops, pin.edges) if pin.ops == ops else pin) for arch, key, pin in pins_of([p]).rows]
    return Pins(tuple(found), "plan file x", "write it anew")


# ---- obeying ---------------------------------------------------------------------------------------------------------


def test_a_pinned_engine_runs_though_ranking_would_choose_another_and_the_others_say_why():
    free = plan(sdpa(LONG), SM90)
    (region,) = free.forward.regions
    assert region.engine not in ("attention/torch_flash", "reference/eager")
    before = {c.engine for c in region.candidates}
    (region,) = plan(sdpa(LONG), SM90, pins=pinning(free, "attention/torch_flash", "sdpa")).forward.regions
    assert region.engine == "attention/torch_flash"
    reasons = {c.engine: c.reason for c in region.candidates}
    assert reasons.pop("attention/torch_flash") == "pinned by plan file x"
    assert {"attention/torch_flash", *reasons} == before
    assert set(reasons.values()) == {"plan file x pins attention/torch_flash"}
    assert [c.engine for c in region.candidates if c.chosen] == ["attention/torch_flash"]


@pytest.mark.parametrize(("engine", "policy", "reason"), [
    ("attention/torch_cpu", None, "has no code for sm_90"), ("linear/torch", None, "has no code for sdpa"),
    ("reference/eager", "strict", "a reference is not allowed"),
])  # fmt: skip
def test_a_pin_that_no_longer_fits_is_an_error_with_reason_and_remedy(engine, policy, reason):
    pins = pinning(plan(sdpa(), SM90), engine, "sdpa")
    with pytest.raises(PlanError, match=f"plan file x pins {engine} .*no longer fits: {engine}: .*{reason}.*; write it anew"):
        plan(sdpa(), SM90, Policy.of(policy), pins=pins)


def test_a_region_of_several_nodes_pinned_to_an_engine_of_single_ones_is_refused():
    b = GraphBuilder()
    x, w = b.input("x", bf16(8, 16)), b.input("w", bf16(16, 16))
    graph = b.build([b.op("linear", x=b.op("linear", x=x, weight=w), weight=w)])
    region = contract.Region(graph)
    pins = Pins((("sm_90", region.key(), Pin("linear/torch", region.ops, region.edges())),))
    with pytest.raises(PlanError, match="takes no region of several nodes"):
        plan(graph, SM90, pins=pins)


def test_an_engine_that_is_no_longer_deterministic_enough_declines_its_pin(monkeypatch):
    engine = BY_ID["attention/torch_flash"].load()
    monkeypatch.setattr(type(engine), "match", lambda self, region, arch: Offer(0.5, deterministic=False))
    pins = pinning(plan(sdpa(), SM90), "attention/torch_flash", "sdpa")
    assert cover_of(plan(sdpa(), SM90, pins=pins)) == [[(("sdpa",), "attention/torch_flash")]]
    with pytest.raises(PlanError, match="results may differ between runs"):
        plan(sdpa(), SM90, Policy(deterministic=True), pins=pins)


def test_pins_of_another_arch_do_not_apply():
    pins = pinning(plan(sdpa(), SM90), "attention/torch_flash", "sdpa")
    assert cover_of(plan(sdpa(), ARCHS["sm_100"], pins=pins)) == cover_of(plan(sdpa(), ARCHS["sm_100"]))
    assert pins.archs() == ("sm_90",) and not pins.of_arch("sm_100")


def test_a_policy_that_leaves_no_choice_goes_before_pins_and_is_not_written():
    pins = pinning(plan(sdpa(), SM90), "attention/torch_flash", "sdpa")
    for policy, engine in ((Policy("reference"), "reference/eager"), (Policy(engine="attention/torch_cudnn"), "attention/torch_cudnn")):
        p = plan(sdpa(), SM90, policy, pins=pins)
        assert cover_of(p) == [[(("sdpa",), engine)]] and pins_of([p]) == Pins()


def test_a_shape_class_that_was_not_planned_is_not_pinned():
    pins = pinning(plan(linear_graph(), CPU), "reference/eager", "linear")
    assert cover_of(plan(linear_graph(), CPU, pins=pins)) == [[(("linear",), "reference/eager")]]
    assert cover_of(plan(linear_graph(2048), CPU, pins=pins)) == [[(("linear",), "linear/torch")]]


def test_a_pin_whose_ops_or_edges_are_not_those_of_its_region_is_an_error():
    graph = linear_graph()
    for wrong in (Pin("linear/torch", ("linear_dgrad",)), Pin("linear/torch", ("linear", "linear"), ((0, "y", 1, "x"),)), Pin("linear/torch", ("sdpa",))):
        pins = Pins((("sm_90", contract.Region(graph).key(), wrong),), "plan file x", "write it anew")
        with pytest.raises(PlanError, match=r"plan file x: pin \w+@1024: ops = .*: the region of that key has \['linear'\]; write it anew"):
            plan(graph, SM90, pins=pins)
        assert plan(graph, CPU, pins=pins).forward.regions, "a file for another arch"


@needs_triton
def test_a_pinned_region_with_other_edges_or_swallowed_under_other_ops_is_an_error():
    graph = rows()
    ((arch, key, pin),) = pins_of([plan(graph, SM90)]).rows
    for edges in (pin.edges[:1], ((0, "y", 1, "residual"), *pin.edges[1:])):
        with pytest.raises(PlanError, match="edges = "):
            plan(graph, SM90, pins=Pins(((arch, key, Pin(pin.engine, pin.ops, edges)),)))
    ((arch, key, _),) = single(graph, ("rms_norm", "reference/eager")).rows
    with pytest.raises(PlanError, match=r"ops = \['squared_relu'\]: the region of that key has \['rms_norm'\]"):
        plan(graph, SM90, pins=Pins(((arch, key, Pin("reference/eager", ("squared_relu",))),)))


def test_the_manifest_names_every_op_that_an_engine_can_be_pinned_for():
    named = {op for e in BY_ID.values() for op in e.ops} - {"*"}
    assert named == {name for name, op in op_table().items() if op.kind != "collective"}


# ---- grouping --------------------------------------------------------------------------------------------------------


def single(graph, *pairs):
    """Pins of single nodes of a graph: (op, engine)."""
    from layerplan.integration.planner.cover import region_of

    made = []
    for op, engine in pairs:
        region = region_of(graph, [next(n for n in graph.nodes if n.op == op)])
        made.append(("sm_90", region.key(), Pin(engine, region.ops)))
    return Pins(tuple(sorted(made)))


@needs_triton
@pytest.mark.parametrize("op", ["bias_dropout_add", "rms_norm", "squared_relu"])
def test_a_pinned_region_wins_over_a_longer_one_that_would_swallow_it(op):
    graph = rows()
    assert cover_of(plan(graph, SM90)) == [[(("bias_dropout_add", "rms_norm", "squared_relu"), "pointwise/inductor")]]
    found = cover_of(plan(graph, SM90, pins=single(graph, (op, "reference/eager"))))[0]
    assert ((op,), "reference/eager") in found
    assert sum(len(ops) for ops, _ in found) == 3


@needs_triton
def test_a_longer_pinned_region_is_found_though_the_engine_would_now_take_single_nodes(monkeypatch):
    graph = rows()
    pins = pins_of([plan(graph, SM90)])
    engine = type(BY_ID["pointwise/inductor"].load())
    match = engine.match
    monkeypatch.setattr("layerplan.integration.planner.rank.grow", lambda graph, seed, *a, **k: [seed])
    assert len(cover_of(plan(graph, SM90))[0]) == 3
    assert cover_of(plan(graph, SM90, pins=pins)) == [[(("bias_dropout_add", "rms_norm", "squared_relu"), "pointwise/inductor")]]
    monkeypatch.setattr(engine, "match", lambda self, r, a: Decline("only one node") if len(r.ops) > 1 else match(self, r, a))
    with pytest.raises(PlanError, match="only one node"):
        plan(graph, SM90, pins=pins)


@pytest.mark.parametrize("arch", ["sm_90", "cpu"])
def test_random_graphs_are_covered_as_their_pins_say_when_ranking_and_grouping_have_changed(arch, monkeypatch):
    graphs = [RandomGraph(seed, ops=14, dtype="bfloat16", symbolic=True) for seed in range(40)]
    before = [plan(r.graph, ARCHS[arch], needs_grad=r.needs) for r in graphs]
    seconds = Offer.seconds
    monkeypatch.setattr(Offer, "seconds", lambda self, roofline: 1 / seconds(self, roofline))
    monkeypatch.setattr("layerplan.integration.planner.rank.grow", lambda *a, **k: grow(*a, 3, **k))
    changed = [plan(r.graph, ARCHS[arch], needs_grad=r.needs) for r in graphs]
    assert sum(cover_of(a) != cover_of(b) for a, b in zip(before, changed, strict=True)) > 20, "otherwise the pins change nothing"
    for r, old in zip(graphs, before, strict=True):
        assert cover_of(plan(r.graph, ARCHS[arch], needs_grad=r.needs, pins=pins_of([old]))) == cover_of(old)


def test_a_set_is_not_convex_where_a_path_passes_through_a_region():
    """a0 -> b0, b1 -> a1, with b0 and b1 in one region: neither a nor b could run first."""
    b = GraphBuilder()
    x, y = b.input("x", bf16(8, 16)), b.input("y", bf16(8, 16))
    a0, b1 = b.op("add", a=x, b=x), b.op("add", a=y, b=y)
    b0, a1 = b.op("add", a=a0, b=y), b.op("add", a=b1, b=x)
    graph = b.build([b0, a1])
    ids = {v: id(graph.producer(v)) for v in (a0, a1, b0, b1)}
    assert convex(graph, {ids[a0], ids[a1]})
    assert not convex(graph, {ids[a0], ids[a1]}, [{ids[b0], ids[b1]}])


# ---- runners and modules ---------------------------------------------------------------------------------------------


def linear_runner(**kw):
    def build(x, w):
        b, s = GraphBuilder(), SpecMaker()
        x_, w_ = b.input("x", s(x, "*t h!")), b.input("w", s(w, "f! h!"), weight=True)
        return b.build([b.op("linear", x=x_, weight=w_)])

    return Runner(build, ("x", "w"), policy=Policy(), **kw)


def weight(main_grad=False):
    w = torch.nn.Parameter(torch.randn(4, 8, generator=torch.Generator().manual_seed(0)))
    if main_grad:
        w.main_grad, w.grad_added_to_main_grad = torch.zeros(4, 8), False
    return w


@pytest.mark.parametrize("fuse", [False, True])
def test_a_runner_obeys_pins_forward_backward_and_in_a_backward_that_accumulates(fuse):
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def step(runner):
        w = weight(fuse)
        runner(x, w, sink=WeightGrads({1: w}, fuse=True) if fuse else None).sum().backward()
        return w.main_grad if fuse else w.grad

    free = linear_runner()
    grad = step(free)
    written = pins_of(free.plans())
    assert {p.ops for _, _, p in written.rows} == {("linear",), ("linear_dgrad",), ("linear_wgrad",)}
    assert {p.engine for _, _, p in written.rows} == {"linear/torch"}
    pinned = Pins(tuple((arch, key, Pin("reference/eager", p.ops)) for arch, key, p in written.rows))
    runner = linear_runner(pins=pinned)
    torch.testing.assert_close(step(runner), grad, atol=1e-5, rtol=1e-5)
    assert {r.engine for p in runner.plans() for part in (p.forward, p.backward) if part for r in part.regions} == {"reference/eager"}
    accumulated = any(n.input("accumulate") for p in runner.plans() for n in p.forward.graph.nodes if n.op == "linear_wgrad")
    assert accumulated is fuse


def test_apply_policy_carries_pins_to_every_module_and_none_takes_them_back():
    model = torch.nn.Sequential(Norm(8, kind="layer_norm"), Norm(8, kind="layer_norm", eps=1e-3))
    x = torch.randn(3, 8)

    def engines():
        with torch.no_grad():
            model(x)
        return [r.engine for m in model for runner in m.plan_runners() for way, _, r in runner.regions() if way == "forward"]

    assert set(engines()) == {"norm/torch"}
    written = pins_of(p for m in model for runner in m.plan_runners() for p in runner.plans())
    apply_policy(model, None, pins=Pins(tuple((a, k, Pin("reference/eager", p.ops)) for a, k, p in written.rows)))
    assert set(engines()) == {"reference/eager"}
    apply_policy(model, None)
    assert set(engines()) == {"norm/torch"}


# ---- files -----------------------------------------------------------------------------------------------------------


class Knobs:
    """Gives the linear engine two tiles to choose from."""

    def __init__(self, monkeypatch, tiles):
        self.engine = type(BY_ID["linear/torch"].load())
        monkeypatch.setattr(self.engine, "match", lambda _, region, arch: Offer(0.75, knobs=(("tile", tiles[0]), ("split", 1))))
        monkeypatch.setattr(self.engine, "offer_with", lambda _, region, arch, knobs: (
            Offer(0.5, knobs=knobs) if dict(knobs)["tile"] in tiles else Decline(f"has no tile {dict(knobs)['tile']}")))  # fmt: skip


def test_a_file_comes_back_as_it_was_with_knobs_and_edges(tmp_path, monkeypatch):
    Knobs(monkeypatch, [(128, 64)])
    plans = [plan(g, SM90, needs_grad=n) for g, n in ((linear_graph(), (True, True)), (rows(), (True,) * 3), (sdpa(), (True,) * 3))]
    written = pins_of([*plans, plan(sdpa(), CPU)])
    plan_file.save(tmp_path / "p.json", written)
    read = plan_file.load(tmp_path / "p.json")
    assert read.rows == written.rows and read.archs() == ("cpu", "sm_90")
    assert {p.knobs for _, _, p in read.rows if p.ops == ("linear",)} == {(("tile", (128, 64)), ("split", 1))}
    assert any(p.edges for _, _, p in read.rows) or importlib.util.find_spec("triton") is None
    assert [p.name for p in tmp_path.iterdir()] == ["p.json"]
    hash(read)


def test_pinned_knobs_are_used_where_the_engine_has_them_and_refused_where_not(monkeypatch):
    Knobs(monkeypatch, [(64, 64)])
    pins = pins_of([plan(linear_graph(), SM90)])
    Knobs(monkeypatch, [(128, 64), (64, 64)])
    assert dict(plan(linear_graph(), SM90).forward.regions[0].offer.knobs)["tile"] == (128, 64)
    assert dict(plan(linear_graph(), SM90, pins=pins).forward.regions[0].offer.knobs)["tile"] == (64, 64)
    Knobs(monkeypatch, [(128, 64)])
    with pytest.raises(PlanError, match=r"has no tile \(64, 64\)"):
        plan(linear_graph(), SM90, pins=pins)


def test_an_engine_without_a_choice_of_knobs_declines_others():
    region = contract.Region(linear_graph())
    pins = Pins((("sm_90", region.key(), Pin("linear/torch", ("linear",), (), (("tile", 3),))),))
    with pytest.raises(PlanError, match=r"linear/torch: runs with knobs \{\} alone, not with \{'tile': 3\}"):
        plan(linear_graph(), SM90, pins=pins)


def good():
    return {"ops": ["add", "rms_norm"], "edges": [[0, "y", 1, "x"]], "engine": "norm/torch", "knobs": {}}


@pytest.mark.parametrize(("content", "said"), [
    ("{", "cannot be read"), ("[]", "format 2"), ('{"format": 1, "pins": {}}', "format 2"), ('{"format": 2, "pins": {"cpu": []}}', "pins per arch"),
    ({"sm_42": {}}, "arch 'sm_42' is not one of"), ({"cpu": {"k": good() | {"engine": "norm/none"}}}, "pin k: engine 'norm/none' is not in the manifest"),
    ({"cpu": {"k": "norm/torch"}}, "pin k: must hold ops, edges, engine and knobs"), ({"cpu": {"k": good() | {"wings": 1}}}, "pin k: must hold"),
    ({"cpu": {"k": good() | {"ops": []}}}, "pin k: ops must be names"), ({"cpu": {"k": good() | {"edges": [[1, "y", 0, "x"]]}}}, "pin k: edge"),
    ({"cpu": {"k": good() | {"ops": ["add", "rms_nrom"]}}}, "no engine has an op 'rms_nrom'; did you mean 'rms_norm'?"),
    ({"cpu": {"k": good() | {"ops": ["add", "all_gather"]}}}, "no engine has an op 'all_gather'"),
    ({"cpu": {"k": good() | {"knobs": {"tile": {"m": 1}}}}}, "pin k: knob tile = {'m': 1}: must be a number"),
    ({"cpu": {"k": good() | {"knobs": {"tile": float("nan")}}}}, "pin k: knob tile = nan: must be a number other than NaN"),
    ({"cpu": {"k": good() | {"knobs": {"tile": [[1]]}}}}, "pin k: knob tile = [[1]]"), ('{"format": ' + "[" * 100_000, "cannot be read"),
    ({"cpu": {"k": good() | {"edges": [[0, "y", 2, "x"]]}}}, "pin k: edge"), ({"cpu": {"k": good() | {"edges": ["y"]}}}, "pin k: edge"),
])  # fmt: skip
def test_a_corrupt_file_is_refused_with_its_name_and_what_is_wrong(tmp_path, content, said):
    path = tmp_path / "p.json"
    path.write_text(content if isinstance(content, str) else json.dumps({"format": 2, "pins": content}))
    with pytest.raises(PlanFileError) as caught:
        plan_file.load(path)
    assert str(path) in str(caught.value) and said in str(caught.value)
    with pytest.raises(PlanFileError, match=r"nothing\.json: no such file"):
        plan_file.load(tmp_path / "nothing.json")


def test_modules_that_disagree_under_different_policies_leave_a_region_unpinned(monkeypatch):
    engine = type(BY_ID["attention/torch_cudnn"].load())
    monkeypatch.setattr(engine, "match", lambda self, region, arch: Offer(0.9, emulated=True))
    plans = [plan(sdpa(), SM90), plan(sdpa(), SM90, Policy("strict"))]
    assert len({cover_of(p)[0][0][1] for p in plans}) == 2
    assert pins_of(plans) == Pins() and pins_of(plans[:1]).rows


def test_reading_a_file_imports_neither_torch_nor_an_engine(tmp_path):
    plan_file.save(tmp_path / "p.json", pins_of([plan(sdpa(), SM90)]))
    code = (f"import sys, pathlib; from layerplan.integration.planner.plan_file import load; load(pathlib.Path({str(tmp_path / 'p.json')!r})); "
            "print([m for m in sys.modules if m == 'torch' or m.startswith('layerplan.kernels.')])")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


# ---- how much of a plan file holds -----------------------------------------------------------------------------------


def test_a_plan_says_how_many_pins_hold_and_why_none_does():
    found = dataclasses.replace(estimate_recipe(load_recipe("llama3_8b"), SM90).pins(), source="plan.file = p.json")
    n = len(found.rows)

    def said(name, arch):
        lines = str(estimate_recipe(load_recipe(name), arch, pins=found)).splitlines()
        return next(line for line in lines if line.startswith("plan file"))

    start = "plan file   plan.file = p.json: "
    assert said("llama3_8b", SM90).startswith(f"{start}{n} of {n} pins for sm_90 hold here (")
    assert said("gpt_tiny", SM90).startswith(f"{start}0 of {n} pins for sm_90 hold here (")
    assert said("gpt_tiny", SM90).endswith("regions planned): they were written for another recipe, batch or parallel split")
    assert said("llama3_8b", CPU) == f"{start}0 of {n} pins hold here: they are for sm_90, this plan is for cpu"


def test_a_report_says_how_many_pins_hold(tmp_path):
    model = Norm(8)
    apply_policy(model, None)
    model(torch.randn(3, 8, requires_grad=True)).sum().backward()
    pins = pins_of(p for r in model.plan_runners() for p in r.plans())
    plan_file.save(tmp_path / "p.json", pins)
    apply_policy(model, None, pins=tmp_path / "p.json")
    for width, many in ((8, len(pins.rows)), (None, 0)):
        if width is None:
            model = Norm(24)
            apply_policy(model, None, pins=tmp_path / "p.json")
        model(torch.randn(3, model.weight.numel(), requires_grad=True)).sum().backward()
        (line,) = report(model).files
        assert line.startswith(f"plan file {tmp_path / 'p.json'}: {many} of {len(pins.rows)} pins for cpu hold here (") and line in str(report(model))


def test_records_in_the_place_of_a_plan_file_are_called_what_they_are(tmp_path):
    file = tmp_path / "r.json"
    records.save(file, records.Records())
    with pytest.raises(PlanFileError, match=r"holds records of 'layerplan tune', not pins: plan\.records and records= take those"):
        plan_file.load(file)


def test_what_no_engine_may_run_is_said_in_the_words_of_the_policy_with_the_remedies_that_apply():
    def message(policy):
        with pytest.raises(PlanError) as caught:
            plan(sdpa(LONG, sink=True), SM90, policy)
        return str(caught.value)

    strict, forced = message(Policy("strict")), message(Policy(engine="attention/torch_flash"))
    assert strict.startswith("sdpa on sm_90 under policy strict: no engine may run it\n") and "Policy(" not in strict + forced
    assert forced.startswith("sdpa on sm_90 with engine=attention/torch_flash: no engine may run it\n")
    assert forced.splitlines()[-1] == "drop engine=" and strict.splitlines()[-1].startswith("set the policy auto")
    both = message(Policy("strict", deterministic=True))
    assert both.startswith("sdpa on sm_90 under policy strict, deterministic: ")
