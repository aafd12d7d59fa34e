"""Planning as a pure function, policies, cover and order."""

import dataclasses
import importlib.util
import subprocess
import sys

import pytest
import torch

from layerplan.integration import ops
from layerplan.integration.engines import manifest
from layerplan.integration.engines.arch import ARCHS
from layerplan.integration.engines.contract import Offer, Pattern
from layerplan.integration.engines.manifest import BY_ID, MANIFEST
from layerplan.integration.graph.autodiff import differentiate
from layerplan.integration.graph.ir import GraphBuilder, TensorSpec
from layerplan.integration.planner import cover
from layerplan.integration.planner.cover import grow, region_of
from layerplan.integration.planner.planner import PlanError, plan, primary_outputs
from layerplan.integration.planner.policy import Policy
from tests.cases.graphs import LONG, T, bf16, needs_triton, sdpa
from tests.cases.random_graphs import RandomGraph

torch.set_num_threads(1)
SM90, CPU = ARCHS["sm_90"], ARCHS["cpu"]


def layer():
    """A transformer's second half: norm with residual, MLP, bias-dropout-add."""
    b = GraphBuilder()
    x, res = b.input("x", bf16(T, 256)), b.input("res", bf16(T, 256))
    g = b.input("g", bf16(256), weight=True)
    w1, w2 = b.input("w1", bf16(1024, 256), weight=True), b.input("w2", bf16(256, 512), weight=True)
    y, h = b.op("rms_norm", x=x, weight=g, residual=res)
    out = b.op("linear", x=b.op("swiglu", x=b.op("linear", x=y, weight=w1)), weight=w2)
    return b.build([b.op("bias_dropout_add", x=out, residual=h)])


def engines(p):
    return [r.engine for part in (p.forward, p.backward) if part for r in part.regions]


# ---- purity ---------------------------------------------------------------------------------------------------------


def test_planning_for_any_arch_twice_gives_the_same_plan_and_asks_no_device(monkeypatch):
    def touched(*a, **k):
        raise AssertionError("planning asked the device")

    for name in ("get_device_capability", "get_device_properties", "is_available", "device_count", "current_device", "init", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, touched)
    for arch in ARCHS.values():
        a, b = (plan(layer(), arch, needs_grad=(True,) * 5) for _ in range(2))
        assert a.choices() == b.choices() and a.signature == b.signature


def test_plan_is_the_same_in_another_process():
    code = "import json\nfrom tests.cpu.test_planner import *\nprint(json.dumps(plan(layer(), SM90, needs_grad=(True,) * 5).choices(), sort_keys=True))"
    import json

    mine = json.dumps(plan(layer(), SM90, needs_grad=(True,) * 5).choices(), sort_keys=True)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True,
                          env={"PYTHONHASHSEED": "7", "PYTHONPATH": ".", "PATH": ""})  # fmt: skip
    assert done.stdout.strip() == mine


# ---- cover ----------------------------------------------------------------------------------------------------------


def _check_cover(graph, part):
    covered = [id(n) for r in part.regions for n in r.region.nodes]
    assert sorted(covered) == sorted(id(n) for n in graph.nodes), "every node is in exactly one region"
    defined = set(graph.inputs)
    for r in part.regions:
        assert set(r.region.graph.inputs) <= defined, f"{r.ops} runs before its inputs exist"
        defined |= set(r.region.graph.outputs)
        assert len(r.region.nodes) == 1 or not any(n.op in ("all_gather", "reduce_scatter", "all_reduce", "group_copy") for n in r.region.nodes)
    assert set(graph.outputs) <= defined


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "cpu"])
def test_cover_of_random_graphs_is_complete_and_in_order(arch):
    fused = 0
    for seed in range(60):
        r = RandomGraph(seed, ops=12, dtype="bfloat16", symbolic=True)
        p = plan(r.graph, ARCHS[arch], needs_grad=r.needs)
        _check_cover(p.derived.forward, p.forward)
        _check_cover(p.backward.graph, p.backward)
        fused += sum(len(x.region.nodes) > 1 for part in (p.forward, p.backward) for x in part.regions)
    if arch == "cpu" or importlib.util.find_spec("triton") is None:
        assert fused == 0
    else:
        assert fused > 20


@needs_triton
def test_long_pointwise_graphs_beyond_the_region_limit_can_still_be_ordered():
    for seed in range(30):
        import random

        rnd, b = random.Random(seed), GraphBuilder()
        values = [b.input(f"x{i}", bf16(8, 16)) for i in range(2)]
        for _ in range(60):
            values.append(b.op("add", a=rnd.choice(values[-6:]), b=rnd.choice(values[-6:])))
        graph = b.build(values[-3:])
        _check_cover(graph, plan(graph, SM90).forward)


@needs_triton
def test_cover_takes_the_longest_region_first_on_sm_90():
    b = GraphBuilder()
    x, r = b.input("x", bf16(T, 256)), b.input("r", bf16(T, 256))
    g = b.input("g", bf16(256))
    y = b.op("rms_norm", x=b.op("bias_dropout_add", x=x, residual=r), weight=g)
    graph = b.build([b.op("squared_relu", x=y)])
    (region,) = plan(graph, SM90).forward.regions
    assert region.engine == "pointwise/inductor" and region.ops == ("bias_dropout_add", "rms_norm", "squared_relu")
    assert any(c.engine == "norm/torch" or "covers 1 op" in c.reason for c in region.candidates)


@needs_triton
def test_regions_do_not_cross_a_matrix_product():
    p = plan(layer(), SM90)
    assert [r.ops for r in p.forward.regions] == [("rms_norm",), ("linear",), ("swiglu",), ("linear",), ("bias_dropout_add",)]


def test_grown_regions_are_convex():
    b = GraphBuilder()
    x, w = b.input("x", bf16(8, 16)), b.input("w", bf16(16, 16))
    a = b.op("add", a=x, b=x)
    graph = b.build([b.op("add", a=a, b=b.op("linear", x=a, weight=w))])
    free = {id(n) for n in graph.nodes}
    assert len(grow(graph, graph.nodes[0], free, frozenset({"add"}))) == 1, "the product lies between the two adds"
    assert len(grow(graph, graph.nodes[0], free, frozenset({"add", "linear"}))) == 3


def test_a_chain_follows_producers_to_consumers():
    graph = layer()
    first = next(n for n in graph.nodes if n.op == "linear")
    free = {id(n) for n in graph.nodes}
    (found,) = cover.matches(graph, first, Pattern.of(("linear", "swiglu", "linear")), free)
    assert [n.op for n in found] == ["linear", "swiglu", "linear"]
    assert not list(cover.matches(graph, first, Pattern.of(("linear", "rms_norm")), free))
    region = region_of(graph, found)
    assert region.graph.inputs[1:] == ("w1", "w2")
    assert cover.fits(region, [("linear", "swiglu", "linear")]) and not cover.fits(region, [("linear", "linear", "swiglu")])


def test_a_pattern_matches_by_its_values_whatever_the_order_and_the_node_it_is_sought_from():
    b = GraphBuilder()
    x = b.input("x", bf16(8, 16))
    p, q = b.op("add", a=x, b=x), b.op("geglu", x=x)
    graph = b.build([b.op("concat", a=q, b=p), b.op("add", a=p, b=x)])
    free = {id(n) for n in graph.nodes}
    by_port = Pattern(("concat", "add", "geglu"), ((1, "y", 0, "b"), (2, "y", 0, "a")))
    for node in graph.nodes[:3]:
        (found,) = cover.matches(graph, node, by_port, free)
        assert [n.op for n in found] == ["add", "geglu", "concat"]
    assert cover.fits(region_of(graph, found), [by_port])
    crossed = Pattern(("concat", "add", "geglu"), ((1, "y", 0, "a"), (2, "y", 0, "b")))
    assert not list(cover.matches(graph, graph.nodes[0], crossed, free))
    assert not list(cover.matches(graph, graph.nodes[0], by_port, free - {id(graph.nodes[1])})), "that one is taken"
    assert not list(cover.matches(graph, graph.nodes[3], by_port, free)), "the other add feeds no concat"


def test_collectives_are_never_part_of_a_region_and_the_runner_issues_them_early():
    b = GraphBuilder()
    x, w = b.input("x", bf16(T, 64)), b.input("w", bf16(64, 64), weight=True)
    full = b.op("all_gather", x=b.op("add", a=x, b=x), group="tp", size=2)
    graph = b.build([b.op("reduce_scatter", x=b.op("linear", x=full, weight=w), group="tp", size=2)])
    p = plan(graph, SM90, needs_grad=(True, True))
    for part in (p.forward, p.backward):
        for r in part.regions:
            if r.engine == "runner":
                assert len(r.ops) == 1
    order = [r.ops for r in p.backward.regions]
    assert order.index(("linear_dgrad",)) < order.index(("reduce_scatter",)) < order.index(("linear_wgrad",)), order


def test_a_weight_gradient_comes_right_after_the_data_gradient_of_its_product():
    p = plan(layer(), SM90, needs_grad=(True,) * 5)
    order = [r.region for r in p.backward.regions]
    weights = [i for i, r in enumerate(order) if r.ops == ("linear_wgrad",)]
    assert len(weights) == 2
    for i in weights:
        before = order[i - 1]
        assert "linear_dgrad" in before.ops and set(before.graph.inputs) & {order[i].node.input("dy")}, [r.ops for r in order]


def test_statistics_are_not_primary_outputs():
    b = GraphBuilder()
    q = b.input("q", bf16(1, 8, 2, 16))
    graph = b.build(b.op("sdpa", want=("out", "lse"), q=q, k=q, v=q))
    assert primary_outputs(graph) == (0,)


# ---- predictions ----------------------------------------------------------------------------------------------------


def test_a_prediction_is_the_hosts_cost_on_small_shapes_and_the_devices_on_large_ones(monkeypatch):
    offers = {"attention/torch_flash": Offer(0.3, launches=1, host_us=15), "attention/torch_cudnn": Offer(0.6, launches=3, host_us=40)}
    for engine, offer in offers.items():
        monkeypatch.setattr(type(BY_ID[engine].load()), "match", lambda self, region, arch, offer=offer: offer)

    def predicted(shape):
        (region,) = plan(sdpa(shape), SM90).forward.regions
        rows = {c.engine: c for c in region.candidates if c.engine in offers}
        device = {e: rows[e].roofline_seconds / o.efficiency + o.launches * 2e-6 for e, o in offers.items()}
        return region.engine, {e: c.seconds for e, c in rows.items()}, device

    host = {e: o.host_us * 1e-6 for e, o in offers.items()}
    chosen, seconds, device = predicted((2, 64, 8, 64))
    assert chosen == "attention/torch_flash" and seconds == pytest.approx(host) and all(device[e] < host[e] for e in offers)
    chosen, seconds, device = predicted(LONG)
    assert chosen == "attention/torch_cudnn" and seconds == pytest.approx(device) and all(device[e] > host[e] for e in offers)


# ---- policies -------------------------------------------------------------------------------------------------------


def test_policy_reference_takes_references_alone():
    assert set(engines(plan(layer(), SM90, Policy("reference"), needs_grad=(True,) * 5))) == {"reference/eager"}


def test_policy_strict_refuses_what_only_a_reference_can_run():
    b = GraphBuilder()
    q = b.input("q", bf16(2, 64, 8, 64))
    graph = b.build([b.op("sdpa", q=q, k=q, v=q, sink=b.input("s", TensorSpec((8,), "float32")))])
    assert engines(plan(graph, SM90)) == ["reference/eager"]
    with pytest.raises(PlanError) as info:
        plan(graph, SM90, Policy("strict"))
    text = str(info.value)
    for engine in ("attention/torch_cudnn", "attention/torch_flash", "attention/torch_cpu", "reference/eager"):
        assert engine in text, f"{engine} gives no reason in: {text}"
    assert "sink" in text and "sm_90" in text


def test_policy_deterministic_declines_atomics_with_reason():
    p = plan(sdpa(LONG), SM90, Policy(deterministic=True), needs_grad=(True,) * 3)
    (bwd,) = [r for r in p.backward.regions if r.ops == ("sdpa_bwd",)]
    assert bwd.engine == "reference/eager"
    assert {c.engine for c in bwd.candidates if "policy is deterministic" in c.reason} == {
        "attention/torch_cudnn", "attention/torch_flash", "attention/fa4"}  # fmt: skip
    assert engines(plan(sdpa(LONG), SM90, Policy(deterministic=True))) == ["attention/torch_cudnn"]


def test_policy_per_module_takes_the_first_matching_pattern():
    p = Policy.of({"*.mlp": "reference", "*.attention*": "strict"})
    assert p.for_module("layers.0.mlp").mode == "reference"
    assert p.for_module("layers.0.attention.core").mode == "strict"
    assert p.for_module("layers.0.norm").mode == "auto" and p.for_module("x").per_module == ()


@pytest.mark.parametrize(("make", "words"), [
    (lambda: Policy("fast"), "fast.*auto, strict, reference"),
    (lambda: Policy(per_module=(("*.mlp", "quick"),)), r"\*\.mlp.*quick"),
    (lambda: Policy(engine="norm/nothing"), "norm/nothing.*norm/torch"),
])  # fmt: skip
def test_policy_refuses_unknown_values_and_names_the_known_ones(make, words):
    with pytest.raises(ValueError, match=words):
        make()
    with pytest.raises(TypeError, match="policy"):
        Policy.of(3)


def test_forced_engine_is_used_and_its_decline_is_an_error_with_reason():
    assert engines(plan(sdpa(), SM90, Policy(engine="attention/torch_flash"))) == ["attention/torch_flash"]
    with pytest.raises(PlanError, match="attention/torch_cudnn: window"):
        plan(sdpa(window=(4, 0)), SM90, Policy(engine="attention/torch_cudnn"))
    with pytest.raises(PlanError, match="attention/torch_flash: has no code for cpu"):
        plan(sdpa(), CPU, Policy(engine="attention/torch_flash"))


def test_forced_engine_of_a_linear_leaves_the_bias_gradient_to_others():
    b = GraphBuilder()
    ports = {"x": b.input("x", bf16(8, 16)), "weight": b.input("w", bf16(4, 16)), "bias": b.input("b", bf16(4))}
    p = plan(b.build([b.op("linear", **ports)]), SM90, Policy(engine="linear/torch"), needs_grad=(True,) * 3)
    assert {r.ops: r.engine for r in p.backward.regions}[("linear_wgrad",)] == "linear/torch"


def test_absent_package_is_a_reason_not_an_error(monkeypatch):
    from layerplan.integration.engines import manifest
    from layerplan.integration.engines.packages import absence

    monkeypatch.setattr(manifest, "absence", lambda name: absence("no_such_package" if name == "triton" else name))
    b = GraphBuilder()
    graph = b.build([b.op("geglu", x=b.input("x", bf16(8, 16)))])
    (region,) = plan(graph, SM90).forward.regions
    assert region.engine == "reference/eager"
    assert any("'no_such_package', which is not installed" in c.reason for c in region.candidates)


def test_every_region_lists_each_candidate_once_and_marks_the_chosen():
    for r in plan(layer(), SM90, needs_grad=(True,) * 5).forward.regions:
        assert sum(c.chosen for c in r.candidates) == 1 and r.candidates[0].engine == r.engine
        names = [c.engine for c in r.candidates]
        assert len(names) == len(set(names)), names


def test_save_policy_moves_an_op_into_the_backward():
    saved = plan(layer(), SM90, needs_grad=(True,) * 5).derived.saved
    again = plan(layer(), SM90, needs_grad=(True,) * 5, recompute=frozenset({"swiglu"})).derived
    assert len(again.saved) == len(saved) - 1
    assert "swiglu" in [n.op for n in again.backward.nodes]


def test_planning_a_malformed_graph_is_refused_before_any_engine_is_asked():
    graph = layer()
    broken = dataclasses.replace(graph, outputs=("nowhere",))
    with pytest.raises(ValueError, match="nowhere"):
        plan(broken, SM90)


def test_planning_stays_fast():
    import time

    plan(layer(), SM90, needs_grad=(True,) * 5)  # imports
    start = time.perf_counter()
    plan(layer(), SM90, needs_grad=(True,) * 5)
    assert time.perf_counter() - start < 0.5, "a generous bound: about 5 ms on an idle core"


def test_functional_call_refuses_an_unknown_policy():
    with pytest.raises(ValueError, match="fast"):
        ops.rms_norm(torch.randn(2, 4), torch.ones(4), eps=1e-5, policy="fast")
    assert differentiate(layer(), (True,) * 5).grad_outputs == (0,)


def test_nobody_is_told_to_install_what_would_not_run_anyhow(monkeypatch):
    gone = ("attention/fa4", "grouped_matmul/deep_gemm", "experts/quack", "linear/quack")
    packages = {n for e in gone for n in BY_ID[e].needs if n != "torch"}
    monkeypatch.setattr(manifest, "absence", lambda module: f"needs {module}, which is not installed" if module in packages else None)

    def refused(graph, policy):
        with pytest.raises(PlanError) as caught:
            plan(graph, SM90, policy)
        return {c.engine: c.reason for c in caught.value.candidates}, str(caught.value).splitlines()[-1]

    b = GraphBuilder()
    q = [b.input(name, TensorSpec((1, 64, 4, 64), "float32")) for name in "qkv"]
    wide = b.build([b.op("sdpa", q=q[0], k=q[1], v=q[2])])
    reasons, ways = refused(wide, Policy(mode="strict"))
    assert "float32" in reasons["attention/fa4"] and "install" not in ways
    assert "install" not in refused(wide, Policy(engine="attention/fa4"))[1]
    reasons, ways = refused(sdpa(), Policy(engine="attention/fa4"))
    assert "not installed" in reasons["attention/fa4"] and "install what the reasons name" in ways

    b = GraphBuilder()
    x, w, ends = b.input("x", bf16(256, 128)), b.input("w", bf16(4, 128, 128)), b.input("ends", TensorSpec((4,), "int32"))
    grouped = b.build([b.op("grouped_matmul", x=x, weight=w, offsets=ends, align=128)])
    (region,) = plan(grouped, SM90).forward.regions
    found = {c.engine: c.reason for c in region.candidates}
    assert "on trial" in found["grouped_matmul/deep_gemm"] and "not installed" in found["grouped_matmul/quack"]
    reasons, ways = refused(grouped, Policy(engine="grouped_matmul/deep_gemm"))
    assert "not installed" in reasons["grouped_matmul/deep_gemm"] and "install what the reasons name" in ways


def test_an_engine_on_trial_runs_only_where_it_is_named(monkeypatch):
    on_trial = dataclasses.replace(BY_ID["attention/torch_flash"], trial=True)
    monkeypatch.setitem(BY_ID, on_trial.id, on_trial)
    monkeypatch.setattr(cover, "MANIFEST", tuple(on_trial if e.id == on_trial.id else e for e in MANIFEST))
    (region,) = plan(sdpa(window=(128, 0)), SM90).forward.regions
    assert region.engine != on_trial.id
    assert "on trial" in next(c.reason for c in region.candidates if c.engine == on_trial.id)
    (region,) = plan(sdpa(window=(128, 0)), SM90, Policy(engine=on_trial.id)).forward.regions
    assert region.engine == on_trial.id
