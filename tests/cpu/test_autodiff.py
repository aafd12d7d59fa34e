"""The derived backward graph against PyTorch's autograd of the references, in float64, over random graphs."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layerplan.integration.engines.contract import Region
from layerplan.integration.graph.autodiff import differentiate
from layerplan.integration.graph.ir import GraphBuilder, GraphError, TensorSpec
from layerplan.integration.graph.ops.table import op_table
from layerplan.integration.graph.verify import verify
from layerplan.integration.planner.policy import Policy
from layerplan.integration.planner.runner import Runner
from layerplan.kernels.common.evaluate import reference_launch
from tests.cases.random_graphs import RandomGraph

torch.set_num_threads(1)


def evaluate(graph, tensors):
    out = reference_launch(Region(graph))(*tensors)
    return out if isinstance(out, tuple) else (out,)


def derived_gradients(graph, needs, tensors, cotangents, positions=None, recompute=frozenset()):
    """(outputs, gradients, Differentiated) by the derived graphs alone; ``cotangents`` are by output position."""
    d = differentiate(graph, needs, positions, recompute)
    verify(d.forward), verify(d.backward)
    with torch.no_grad():
        values = evaluate(d.forward, tensors)
        env = dict(zip(graph.inputs, tensors, strict=True)) | dict(zip(d.forward.outputs, values, strict=True))
        got = evaluate(d.backward, [*(env[v] for v in d.saved), *(cotangents[i] for i in d.grad_outputs)]) if d.backward.outputs else ()
    made = dict(zip(d.backward.outputs, got, strict=True))
    return values[: d.num_outputs], [None if g is None else made[g] for g in d.grads], d


def autograd_gradients(r: RandomGraph, positions=None):
    leaves = [t.clone().requires_grad_(n) for t, n in zip(r.tensors, r.needs, strict=True)]
    outs = evaluate(r.graph, leaves)
    gen = torch.Generator().manual_seed(99)
    cotangents = [torch.randn(o.shape, generator=gen, dtype=o.dtype) for o in outs]
    used = [i for i, o in enumerate(outs) if o.requires_grad and (positions is None or i in positions)]
    wanted = [x for x, n in zip(leaves, r.needs, strict=True) if n]
    grads = torch.autograd.grad([outs[i] for i in used], wanted, [cotangents[i] for i in used], allow_unused=True) if used else [None] * len(wanted)
    it = iter(grads)
    return [o.detach() for o in outs], cotangents, [next(it) if n else None for n in r.needs]


def same(ours, theirs, what):
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a is None or b is None:
            assert (a is None or not a.any()) and (b is None or not b.any()), f"{what}: gradient of input {i}: {a} against {b}"
            continue
        atol = 1e-10 * max(1.0, float(b.detach().abs().max()) if b.numel() else 0.0)
        torch.testing.assert_close(a, b, atol=atol, rtol=1e-9, msg=lambda m, i=i: f"{what}: gradient of input {i}: {m}")


@settings(max_examples=120, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**31), ops=st.integers(1, 12))
def test_backward_of_a_random_graph_equals_autograd_of_its_reference(seed, ops):
    r = RandomGraph(seed, ops=ops)
    outs, cotangents, theirs = autograd_gradients(r)
    values, ours, _ = derived_gradients(r.graph, r.needs, r.tensors, cotangents)
    for a, b in zip(values, outs, strict=True):
        assert torch.equal(a, b)
    same(ours, theirs, f"seed {seed}, {ops} ops\n{r.graph.describe()}")


def test_the_random_graphs_reach_every_differentiable_op():
    seen = set()
    for seed in range(60):
        seen |= {n.op for n in RandomGraph(seed, ops=8).graph.nodes}
    differentiable = {name for name, op in op_table().items() if op.gradient is not None}
    assert differentiable <= seen, f"never drawn: {sorted(differentiable - seen)}"


@settings(max_examples=30, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**31), recompute=st.sets(st.sampled_from(["rms_norm", "layer_norm", "swiglu", "geglu", "add", "rope", "sdpa", "bias_dropout_add", "linear"])))
def test_recomputing_any_ops_gives_bitwise_the_same_gradients_and_saves_no_more(seed, recompute):
    r = RandomGraph(seed, ops=8)
    _, cotangents, _ = autograd_gradients(r)
    _, kept, d0 = derived_gradients(r.graph, r.needs, r.tensors, cotangents)
    _, rebuilt, d1 = derived_gradients(r.graph, r.needs, r.tensors, cotangents, recompute=frozenset(recompute))
    for a, b in zip(kept, rebuilt, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    made = {v for n in d1.forward.nodes if n.op in recompute for _, v in n.outputs} - set(r.graph.outputs)
    assert not made & set(d1.saved), "an output of a recomputed op was saved"
    assert not (made & set(d1.forward.outputs))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**31))
def test_gradients_from_some_outputs_alone_are_right(seed):
    r = RandomGraph(seed, ops=8)
    full = differentiate(r.graph, r.needs)
    positions = full.grad_outputs[::2]
    if not positions:
        return
    _, cotangents, theirs = autograd_gradients(r, positions)
    _, ours, _ = derived_gradients(r.graph, r.needs, r.tensors, cotangents, positions)
    same(ours, theirs, f"seed {seed}")


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**31), recompute=st.booleans(), some=st.booleans())
def test_runner_on_cpu_engines_equals_autograd(seed, recompute, some):
    r = RandomGraph(seed, ops=8, symbolic=True)
    runner = Runner(lambda *t: r.graph, r.graph.inputs, policy=Policy(), name="random",
                    recompute=frozenset({"swiglu", "rms_norm", "layer_norm"}) if recompute else frozenset())  # fmt: skip
    leaves = [t.clone().requires_grad_(n) for t, n in zip(r.tensors, r.needs, strict=True)]
    outs = runner(*leaves)
    outs = outs if isinstance(outs, tuple) else (outs,)
    reach = [i for i, o in enumerate(outs) if o.requires_grad]
    if some:
        reach = reach[:1]
    if not reach:
        return
    truth, cotangents, theirs = autograd_gradients(r, reach)
    for a, b in zip(outs, truth, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-9)
    wanted = [x for x, n in zip(leaves, r.needs, strict=True) if n]
    it = iter(torch.autograd.grad([outs[i] for i in reach], wanted, [cotangents[i] for i in reach], allow_unused=True))
    same([next(it) if n else None for n in r.needs], theirs, f"seed {seed}\n{r.graph.describe()}")


def _spec(*shape, dtype="float64"):
    return TensorSpec(shape, dtype)


def test_frozen_inputs_get_no_gradient_and_cost_no_nodes():
    b = GraphBuilder()
    x, w = b.input("x", _spec(3, 4)), b.input("w", _spec(5, 4), weight=True)
    graph = b.build([b.op("linear", x=x, weight=w)])
    frozen_w = differentiate(graph, (True, False))
    assert [n.op for n in frozen_w.backward.nodes] == ["linear_dgrad"] and frozen_w.grads[1] is None
    assert frozen_w.saved == ("w",), "a frozen weight's gradient must not keep the activations alive"
    frozen_x = differentiate(graph, (False, True))
    assert [n.op for n in frozen_x.backward.nodes] == ["linear_wgrad"] and frozen_x.saved == ("x",)


def test_lse_gradients_flow_alone_and_with_the_output():
    gen = torch.Generator().manual_seed(0)
    b = GraphBuilder()
    names = {n: b.input(n, _spec(1, 5, h, 4)) for n, h in (("q", 4), ("k", 2), ("v", 2))}
    sink = b.input("sink", _spec(4))
    graph = b.build(b.op("sdpa", want=("out", "lse"), **names, sink=sink, causal=True))
    tensors = [torch.randn([*graph.specs[v].shape], generator=gen, dtype=torch.float64) for v in graph.inputs]
    for positions in ((0,), (1,), (0, 1)):
        leaves = [t.clone().requires_grad_() for t in tensors]
        outs = evaluate(graph, leaves)
        cot = [torch.randn(o.shape, generator=gen, dtype=torch.float64) for o in outs]
        theirs = torch.autograd.grad([outs[i] for i in positions], leaves, [cot[i] for i in positions], allow_unused=True)
        _, ours, _ = derived_gradients(graph, (True,) * 4, tensors, cot, positions)
        same(ours, theirs, f"outputs {positions}")
        assert ours[3].any(), "the sink gets a gradient from every output"


def test_names_of_the_forward_may_look_like_those_of_the_backward():
    b = GraphBuilder("g")
    x, w = b.input("d0", _spec(3, 4)), b.input("dg0", _spec(4, 4))
    h = b.op("linear", x=x, weight=w)
    graph = b.build([b.op("swiglu", x=h)])
    gen = torch.Generator().manual_seed(0)
    tensors = [torch.randn([*graph.specs[v].shape], generator=gen, dtype=torch.float64) for v in graph.inputs]
    leaves = [t.clone().requires_grad_() for t in tensors]
    (out,) = evaluate(graph, leaves)
    dy = torch.randn(out.shape, generator=gen, dtype=torch.float64)
    _, ours, _ = derived_gradients(graph, (True, True), tensors, [dy])
    same(ours, torch.autograd.grad(out, leaves, dy), "names")


def test_statistics_pass_no_gradient_and_autograd_is_told():
    b = GraphBuilder()
    x, w = b.input("x", _spec(3, 4)), b.input("w", _spec(4))
    graph = b.build(b.op("rms_norm", want=("y", "rstd"), x=x, weight=w))
    assert differentiate(graph, (True, True)).grad_outputs == (0,)
    runner = Runner(lambda *t: graph, ("x", "w"), policy=Policy())
    y, rstd = runner(torch.randn(3, 4, dtype=torch.float64, requires_grad=True), torch.ones(4, dtype=torch.float64))
    assert y.requires_grad and not rstd.requires_grad, "a gradient through rstd would be dropped in silence"


def test_backward_of_a_backward_op_is_refused_by_name():
    b = GraphBuilder()
    dy, w = b.input("dy", _spec(3, 5)), b.input("w", _spec(5, 4))
    graph = b.build([b.op("linear_dgrad", dy=dy, weight=w)])
    with pytest.raises(GraphError, match=r"linear_dgrad.*double backward"):
        differentiate(graph, (True, True))


def test_an_integer_input_cannot_need_a_gradient():
    b = GraphBuilder()
    logits, t = b.input("logits", _spec(3, 5)), b.input("targets", TensorSpec((3,), "int64"))
    graph = b.build([b.op("cross_entropy", logits=logits, targets=t)])
    with pytest.raises(GraphError, match=r"targets.*floating-point"):
        differentiate(graph, (True, True))


def test_an_unused_input_gets_no_gradient():
    b = GraphBuilder()
    x, y = b.input("x", _spec(3)), b.input("y", _spec(3))
    graph = b.build([b.op("add", a=x, b=x)])
    d = differentiate(graph, (True, True))
    assert d.grads[1] is None and d.grads[0] is not None
    assert dataclasses.asdict(d)["grad_outputs"] == (0,) and y == "y"
