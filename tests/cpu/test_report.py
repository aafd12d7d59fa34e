"""What ran and why: reports of models, explanations of ops, plans, each as text and as JSON."""

import json

import pytest
import torch

import layerplan
from layerplan.integration.engines.arch import ARCHS
from layerplan.integration.engines.contract import Offer
from layerplan.integration.engines.manifest import MANIFEST
from layerplan.integration.graph.ir import GraphBuilder, TensorSpec
from layerplan.integration.planner.planner import PlanError, plan
from layerplan.integration.planner.runner import WeightGrads
from layerplan.integration.planner.text import aligned, folded, pattern
from layerplan.modules.base import PlannedModule
from layerplan.modules.graphs import Activation, TensorParallel, attention_graph, mlp_graph
from layerplan.modules.norm import Norm
from tests.cases.graphs import LONG

torch.set_num_threads(1)
QKV = {n: (LONG, "bfloat16") for n in "qkv"}
NORM = {"x": ((65536, 1024), "bfloat16"), "weight": ((1024,), "bfloat16")}


class Mlp(PlannedModule):
    """A gated MLP as one plan, with a sink for its weight gradients."""

    boundary = "the residual add"

    def __init__(self, fuse=False):
        super().__init__()
        self.fc1, self.fc2 = (torch.nn.Parameter(torch.randn(s)) for s in ((16, 8), (8, 8)))
        self.sink = WeightGrads({1: self.fc1, 2: self.fc2}, fuse=True) if fuse else None
        if fuse:
            for p in (self.fc1, self.fc2):
                p.main_grad, p.grad_added_to_main_grad = torch.zeros_like(p), False

    def forward(self, x):
        names, build = mlp_graph(TensorParallel(), Activation(), bias=False, row_weight=False)
        return self.planned(("mlp",), names, build)(x, self.fc1, self.fc2, sink=self.sink)


class Core(PlannedModule):
    def forward(self, q, k, v):
        return self.planned(("core",), ("q", "k", "v"), attention_graph(("q", "k", "v"), {"layout": "bshd", "causal": True}))(q, k, v)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.core, self.mlp = Norm(8), Core(), Mlp()

    def forward(self, x):
        q = self.norm(x).view(2, 4, 2, 4)
        return self.mlp(self.core(q, q, q).flatten(2))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 8)
        self.layers = torch.nn.ModuleList([Layer() for _ in range(3)])
        self.final, self.spare = Norm(8), Norm(8)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.final(x)


@pytest.fixture
def stepped():
    model = Model()
    layerplan.apply_policy(model, {"layers.1.mlp": "reference"})
    model(torch.arange(8).view(2, 4) % 5).sum().backward()
    return model, layerplan.report(model)


# ---- report ---------------------------------------------------------------------------------------------------------


def test_after_one_step_every_layer_names_its_engines_forward_and_backward_with_reasons(stepped):
    _, found = stepped
    layers = [f"layers.{i}.{part}" for i in range(3) for part in ("norm", "core", "mlp")]
    assert set(found.engines()) == {*layers, "final"}
    ids = {e.id for e in MANIFEST}
    for name in found.engines():
        rows = [r for r in found.rows if r.module == name]
        assert {r.direction for r in rows} == {"forward", "backward"}, name
        for r in rows:
            assert r.engine in ids and r.why and r.arch == "cpu" and r.predicted_us > 0
            assert r.engine not in dict(r.declined) and all(reason for _, reason in r.declined)
    (core,) = [r for r in found.rows if r.module == "layers.0.core" and r.direction == "forward"]
    assert (core.engine, core.policy, core.why) == ("attention/torch_cpu", "auto", "predicted fastest of 2 offers")
    assert "has no code for cpu" in dict(core.declined)["attention/torch_cudnn"]
    assert sum(r.share for r in found.rows) == pytest.approx(1.0)
    assert found.not_run == ("spare",) and found.others == (("embedding", "Embedding"),)


def test_a_module_of_another_policy_says_so_and_why(stepped):
    _, found = stepped
    rows = [r for r in found.rows if r.module == "layers.1.mlp"]
    assert {r.engine for r in rows} == {"reference/eager"}
    assert {(r.policy, r.why) for r in rows} == {("reference", "policy is reference")}
    assert all(reason == "policy is reference" for r in rows for _, reason in r.declined)
    assert "linear/torch" in {r.engine for r in found.rows if r.module == "layers.0.mlp"}


def test_text_of_a_report_folds_layers_that_run_alike_and_lists_every_decline(stepped):
    _, found = stepped
    lines = str(found).splitlines()
    head = lines[0].split()
    assert head == ["module", "pass", "ops", "engine", "predicted", "us", "share", "policy", "why"]
    (core,) = [line for line in lines if line.startswith("layers.0-2.core") and " forward " in line]
    assert "sdpa" in core and "attention/torch_cpu" in core and "auto" in core and "predicted fastest of 2 offers" in core
    assert any(line.startswith("layers.0,2.mlp") and "linear/torch" in line for line in lines)
    assert any(line.startswith("layers.1.mlp") and "policy is reference" in line for line in lines)
    (decline,) = [line for line in lines if "sdpa on cpu" in line and "attention/torch_flash" in line]
    assert "has no code for cpu" in decline and "(layers.0-2.core)" in decline
    assert "spare: has not run yet" in lines
    assert any(line == "not run by layerplan: embedding (Embedding)" for line in lines)
    assert any(line == "between plans: layers.0-2.mlp (the residual add)" for line in lines)
    assert "predictions" in lines[-1]


def test_json_of_a_report_holds_every_row_with_its_declines(stepped):
    _, found = stepped
    data = json.loads(json.dumps(found.to_json()))
    assert set(data) == {"rows", "not_run", "others", "boundaries", "files"} and len(data["rows"]) == len(found.rows)
    assert set(data["rows"][0]) == {"module", "kind", "direction", "ops", "arch", "engine", "policy", "why", "declined", "predicted_us",
                                    "measured_us", "share"}  # fmt: skip
    row = next(r for r in data["rows"] if r["module"] == "layers.0.core")
    assert row["kind"] == "Core" and {"engine", "reason"} == set(row["declined"][0])
    assert data["others"] == [{"module": "embedding", "class": "Embedding"}]
    assert data["boundaries"] == [{"module": f"layers.{i}.mlp", "left": "the residual add"} for i in range(3)]


def test_a_report_shows_the_backward_that_ran_not_the_one_that_was_planned():
    plain, fused = Mlp(), Mlp(fuse=True)
    for model in (plain, fused):
        model(torch.randn(6, 8, requires_grad=True)).sum().backward()
    found = {m: [r for _, _, r in m.plan_runners()[0].regions() if r.ops == ("linear_wgrad",)] for m in (plain, fused)}
    assert [r.region.spec("accumulate") for r in found[plain]] == [None, None]
    assert all(r.region.spec("accumulate") is not None for r in found[fused]), "the gradient was added to main_grad"


def test_a_model_that_has_not_run_says_so_for_every_layer():
    found = layerplan.report(Model())
    assert found.rows == () and len(found.not_run) == 11 and "layers.0.mlp: has not run yet" in str(found)
    assert json.loads(json.dumps(found.to_json()))["rows"] == []


def test_names_fold_by_their_first_number():
    assert folded(["a.0.b", "a.1.b", "a.2.b", "a.4.b"]) == "a.0-2,4.b"
    assert folded(["a.0.b.1", "a.1.b.1", "c"]) == "a.0-1.b.1, c" and folded(["7", "8"]) == "7-8"
    assert pattern("a.10.b.2") == pattern("a.3.b.2") != pattern("a.3.b.1") and pattern("a1.b") == "a1.b"
    assert aligned([("a", "bb", "c"), ("aaa", "b", "")]) == ["a    bb  c", "aaa  b"]


# ---- explain --------------------------------------------------------------------------------------------------------


def test_text_of_an_explanation_names_every_candidate_forward_and_backward():
    found = layerplan.explain("sdpa", QKV, "sm_90", causal=True)
    lines = str(found).splitlines()
    assert lines[0] == "sdpa on sm_90: attention/torch_cudnn"
    assert any(line.startswith("backward: sdpa_bwd: attention/torch_cudnn") for line in lines)
    for engine in ("attention/torch_cudnn", "attention/torch_flash", "attention/torch_cpu", "reference/eager"):
        rows = [line.split() for line in lines if line.startswith("  ") and line.split()[1] == engine]
        assert len(rows) == 2 and all(row[0] == ("yes" if engine == "attention/torch_cudnn" else "no") for row in rows), engine
    assert json.loads(json.dumps(found.to_json()))["chosen"] == "attention/torch_cudnn"


def test_explanation_says_what_each_engine_offers_beside_its_time_in_text_and_json():
    found = layerplan.explain("sdpa", QKV, "sm_90")
    data = json.loads(json.dumps(found.to_json()))
    by_engine = {c["engine"]: c["offer"] for _, candidates in data["backward"] for c in candidates}
    assert by_engine["attention/torch_cpu"] is None, "it declined"
    offer = by_engine["attention/torch_flash"]
    assert (offer["launches"], offer["workspace_bytes"], offer["capture_safe"], offer["deterministic"], offer["ahead_of_time"]) == (3, 0, True, False, True)
    lines = [line for line in str(found).splitlines() if "attention/torch_flash" in line]
    assert len(lines) == 2 and "not deterministic" not in lines[0]
    assert f"3 launches, {offer['host_us']:g} us host, not deterministic, compiles ahead" in lines[1]


def test_an_offer_in_words_names_its_host_cost_and_what_is_not_usual():
    offer = Offer(0.5, launches=2, host_us=12.5, workspace_bytes=3 << 20, capture_safe=False, deterministic=False, emulated=True, knobs=(("tile", 64),))
    assert str(offer) == "2 launches, 12.5 us host, 3.0 MiB workspace, not in a CUDA graph, not deterministic, emulated"
    assert str(Offer(0.5, host_us=30)) == "1 launch, 30 us host"
    assert offer.to_json()["knobs"] == {"tile": 64} and offer.to_json()["host_us"] == 12.5


def test_explanation_under_a_policy_that_leaves_no_engine_gives_the_reasons_under_that_policy():
    found = layerplan.explain("sdpa", {**QKV, "sink": ((8,), "float32")}, "sm_90", policy="strict")
    assert found.chosen is None and "strict" in found.error
    assert not any(c.chosen for c in found.candidates)
    assert "policy is strict" in found.reasons()["reference/eager"] and "sink" in found.reasons()["attention/torch_flash"]
    ((ops, candidates),) = found.backward
    assert ops == "sdpa_bwd" and {c.engine for c in candidates} == set(found.reasons()) and not any(c.chosen for c in candidates)
    assert str(found).startswith("sdpa on sm_90: no engine may run it")


def test_explanation_says_why_the_chosen_one_is_chosen():
    why = {p: next(c.reason for c in layerplan.explain("rms_norm", NORM, "sm_90", policy=p).candidates if c.chosen) for p in ("auto", "reference")}
    assert why["auto"].startswith("predicted fastest of") and why["reference"] == "policy is reference"
    (forced,) = [c for c in layerplan.explain("rms_norm", NORM, "sm_90", engine="norm/torch").candidates if c.chosen]
    assert forced.engine == "norm/torch" and forced.reason == "engine='norm/torch' is forced"
    (alone,) = [c for c in layerplan.explain("sdpa", {**QKV, "sink": ((8,), "float32")}, "sm_90").candidates if c.chosen]
    assert (alone.engine, alone.reason) == ("reference/eager", "the only engine that offers")


def test_an_offer_that_lost_says_by_how_much_and_to_whom():
    best, *others = (c for c in layerplan.explain("rms_norm", NORM, "sm_90").candidates if c.offer is not None)
    assert best.chosen and "reference/eager" in [c.engine for c in others]
    for slow in others:
        assert slow.seconds > best.seconds
        assert slow.reason == f"slower: {slow.seconds * 1e6:.1f} us predicted, {best.engine} {best.seconds * 1e6:.1f} us"


def test_an_offer_for_fewer_ops_says_how_many_the_chosen_one_covers():
    b = GraphBuilder()
    x, row = (b.input(n, TensorSpec((64, 32), "bfloat16")) for n in ("x", "r"))
    made = layerplan.plan(b.build([b.op("add", a=b.op("gelu", x=x), b=row)]), ARCHS["sm_90"])
    (region,) = made.forward.regions
    reasons = {c.engine: c.reason for c in region.candidates}
    assert region.engine == "pointwise/inductor" and reasons["pointwise/inductor"].startswith("covers the most ops of ")
    assert reasons["reference/eager"] == "covers 1 op, pointwise/inductor covers 2"


# ---- plan -----------------------------------------------------------------------------------------------------------


def _graph():
    b = GraphBuilder()
    x, w = b.input("x", TensorSpec((64, 32), "bfloat16")), b.input("w", TensorSpec((16, 32), "bfloat16"))
    full = b.op("all_gather", x=x, group="tp", size=2)
    return b.build([b.op("linear", x=full, weight=w)])


def test_text_and_json_of_a_plan_name_every_region_its_engine_and_every_other_candidate():
    made = layerplan.plan(_graph(), ARCHS["sm_90"], needs_grad=(True, True))
    text, rows = str(made), json.loads(json.dumps(made.choices()))
    assert text.splitlines()[0] == f"plan {made.signature} on sm_90, policy auto"
    assert [(r["pass"], r["ops"], r["engine"]) for r in rows][:2] == [("forward", ["all_gather"], "runner"), ("forward", ["linear"], "linear/torch")]
    assert {"linear_dgrad", "linear_wgrad", "reduce_scatter"} <= {op for r in rows if r["pass"] == "backward" for op in r["ops"]}
    assert "a collective: issued by the runner" in text
    linear = next(r for r in rows if r["ops"] == ["linear"])
    assert (linear["workspace_bytes"], linear["capture_safe"], linear["deterministic"], linear["ahead_of_time"], linear["knobs"]) == (0, True, True, True, {})
    for r in rows:
        for c in r["candidates"]:
            assert c["engine"] in text and c["reason"] in text


def test_plan_error_carries_every_candidate_with_its_reason():
    b = GraphBuilder()
    q = b.input("q", TensorSpec((2, 64, 8, 64), "bfloat16"))
    graph = b.build([b.op("sdpa", q=q, k=q, v=q, sink=b.input("s", TensorSpec((8,), "float32")))])
    with pytest.raises(PlanError) as info:
        plan(graph, ARCHS["sm_90"], layerplan.Policy("strict"))
    assert [c.engine for c in info.value.candidates if c.reason] == [e.id for e in MANIFEST if "sdpa" in e.ops or e.is_reference]


def test_an_engine_is_forced_only_where_it_runs_and_refused_where_it_has_no_code_for_the_op():
    with pytest.raises(ValueError, match=r"rms_norm: engine = 'attention/fa4': has no code for rms_norm; use one of norm/torch"):
        layerplan.explain("rms_norm", NORM, "sm_90", engine="attention/fa4")
    # a policy may name one for other ops: this op then runs as usual
    (chosen,) = [c for c in layerplan.explain("rms_norm", NORM, "sm_90", policy=layerplan.Policy(engine="attention/fa4")).candidates if c.chosen]
    assert "forced" not in chosen.reason


def test_explain_takes_dtypes_as_torch_has_them():
    typed = {n: (size, getattr(torch, dtype)) for n, (size, dtype) in NORM.items()}
    assert layerplan.explain("rms_norm", typed, "sm_90") == layerplan.explain("rms_norm", NORM, "sm_90")
    with pytest.raises(ValueError, match="x = 'complex64': unknown dtype"):
        layerplan.explain("rms_norm", typed | {"x": ((8, 1024), torch.complex64)}, "sm_90")


def test_a_model_without_layerplans_modules_is_said_to_be_one():
    model = torch.nn.Linear(3, 3)
    assert str(layerplan.report(model)).startswith("no module of this model is layerplan's")
    with pytest.raises(ValueError, match="apply_policy: model = Linear: holds no module of layerplan"):
        layerplan.apply_policy(model, "auto")


def test_a_policy_that_is_none_is_refused_by_its_name():
    with pytest.raises(ValueError, match=r"^policy = 'fast': must be one of auto, strict, reference$"):
        layerplan.explain("rms_norm", NORM, "sm_90", policy="fast")
