"""The MLP's graph with a layer's two residual adds: its values, its gradients, its save policies and what the planner makes of it."""

import dataclasses

import pytest
import torch

from layerplan.integration.engines.arch import Arch
from layerplan.integration.graph.autodiff import differentiate
from layerplan.integration.graph.ir import GraphBuilder, TensorSpec
from layerplan.integration.graph.ops.elementwise import keep_mask
from layerplan.integration.planner.planner import plan
from layerplan.integration.planner.policy import Policy
from layerplan.integration.planner.runner import Runner
from layerplan.modules.graphs import (
    Activation,
    NormAttrs,
    ResidualAdds,
    TensorParallel,
    mlp_from_norm,
    mlp_graph,
)
from layerplan.recipes import RecipeError, load_recipe
from layerplan.recipes.estimate import estimate_recipe

torch.set_num_threads(1)
ONE = TensorParallel()
TOKENS, WIDTH, HIDDEN = (6, 2), 16, 24
SEEDS = ("seed", "offset", "output_seed", "output_offset")


def _tensors(names, dtype=torch.float64):
    gen = torch.Generator().manual_seed(2)
    shapes = {"x": (*TOKENS, WIDTH), "residual": (*TOKENS, WIDTH), "fc1": (2 * HIDDEN, WIDTH), "fc2": (WIDTH, HIDDEN), "fc1_bias": (2 * HIDDEN,)}
    made = {}
    for n in names:
        if n in SEEDS:
            made[n] = torch.randint(0, 2**62, (1,), generator=gen)
        else:
            made[n] = torch.randn(shapes.get(n, (WIDTH,)), generator=gen, dtype=torch.float64).to(dtype).requires_grad_()
    return made


def _composed(t, norm, p):
    """The same layer in plain PyTorch, with the graph's masks."""

    def add(x, residual, bias, seed, offset):
        x = x if bias is None else x + bias
        if p:
            x = torch.where(keep_mask(tuple(x.shape), p, seed, offset), x / (1 - p), 0.0)
        return residual + x

    stream = add(t["x"], t["residual"], t.get("attention_bias"), t.get("seed"), t.get("offset"))
    if norm == "rms_norm":
        y = torch.nn.functional.rms_norm(stream, (WIDTH,), t["norm_weight"], 1e-5)
    else:
        y = torch.nn.functional.layer_norm(stream, (WIDTH,), t["norm_weight"], t["norm_bias"], 1e-5)
    gate, up = torch.nn.functional.linear(y, t["fc1"], t.get("fc1_bias")).chunk(2, -1)
    out = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, t["fc2"])
    return add(out, stream, t.get("output_bias"), t.get("output_seed"), t.get("output_offset"))


def _graph(norm="rms_norm", bias=False, p=0.0, tp=ONE):
    return mlp_graph(tp, Activation("swiglu", (("clamp", None),)), bias=bias, row_weight=False, norm=NormAttrs(norm), norm_bias=norm == "layer_norm",
                     adds=ResidualAdds(bias, bias, p))  # fmt: skip


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize(("norm", "bias"), [("rms_norm", False), ("layer_norm", True)])
@pytest.mark.parametrize("policy", ["kept", "rebuilt"])
def test_values_and_gradients_are_those_of_the_layer_in_plain_pytorch(norm, bias, p, policy):
    names, build = _graph(norm, bias, p)
    tensors = _tensors(names)
    recompute = mlp_from_norm(NormAttrs(norm), Activation("swiglu")) if policy == "rebuilt" else frozenset()
    runner = Runner(build, names, policy=Policy.of(None), name="mlp", training=True, recompute=recompute)
    wanted = [t for n, t in tensors.items() if n not in SEEDS]
    outs = runner(*tensors.values()), _composed(tensors, norm, p)
    dy = torch.randn(*TOKENS, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    ours, theirs = (torch.autograd.grad(out, wanted, dy) for out in outs)
    for got, right in zip((outs[0], *ours), (outs[1], *theirs), strict=True):
        torch.testing.assert_close(got, right, rtol=1e-11, atol=1e-11 * float(right.detach().abs().max()))


def test_the_mlp_as_a_save_policy_keeps_the_stream_and_its_statistics_alone():
    names, build = _graph()
    graph = build(*_tensors(names, torch.float32).values())
    needs = (True,) * len(names)
    kept = differentiate(graph, needs).saved
    rebuilt = differentiate(graph, needs, None, mlp_from_norm(NormAttrs(), Activation())).saved
    made = {v: n.op for n in graph.nodes for _, v in n.outputs}
    assert {made[v] for v in kept if v in made} == {"bias_dropout_add", "rms_norm", "linear", "swiglu"}
    assert {made[v] for v in rebuilt if v in made} <= {"bias_dropout_add"}
    assert len(rebuilt) < len(kept)


def _hopper(policy, tp=ONE):
    """The regions of Llama-3-8B's MLP with residual adds on sm_90 that are no product and no collective, per pass."""
    names, build = _graph(tp=tp)
    h, f = 4096, 14336 // tp.size
    meta = {"x": (4096, 1, h), "residual": (4096, 1, h), "fc1": (2 * f, h), "fc2": (h, f), "norm_weight": (h,)}
    graph = build(*(torch.empty(meta[n], dtype=torch.bfloat16, device="meta") for n in names))
    made = plan(graph, Arch.parse("sm_90"), policy, needs_grad=(True,) * len(names), recompute=frozenset({"all_gather"} if tp.sequence else ()))
    products = {"linear", "linear_dgrad", "linear_wgrad"}
    return [[r for r in part.regions if r.engine != "runner" and not products & set(r.ops)] for part in (made.forward, made.backward)]


@pytest.mark.parametrize("tp", [ONE, TensorParallel(2, True)], ids=["one rank", "tensor and sequence parallel"])
def test_add_and_norm_are_one_region_and_the_norms_gradient_adds_the_residuals_on_hopper(tp):
    forward, backward = _hopper(dataclasses.replace(Policy.of("strict"), engine="pointwise/inductor"), tp)
    assert [r.ops for r in forward] == [("bias_dropout_add", "rms_norm"), ("swiglu",), ("bias_dropout_add",)]
    assert [r.ops for r in backward] == [("swiglu_bwd",), ("rms_norm_bwd",)]
    assert backward[1].region.spec("dresidual") is not None, "the second add's gradient goes into the norm's"
    assert [r.offer.launches for r in (*forward, *backward)] == [1, 1, 1, 1, 2]


def test_the_planner_weighs_add_and_norm_together_against_both_apart_on_hopper():
    forward, backward = _hopper(Policy.of("strict"))
    assert [op for r in forward for op in r.ops] == ["bias_dropout_add", "rms_norm", "swiglu", "bias_dropout_add"]
    (together,) = [c for c in forward[0].candidates if c.region is not None and c.region.ops == ("bias_dropout_add", "rms_norm")]
    assert together.chosen == (forward[0].ops == ("bias_dropout_add", "rms_norm"))
    assert together.chosen or "cost less apart" in together.reason
    assert [r.ops for r in backward] == [("swiglu_bwd",), ("rms_norm_bwd",)]
    assert sum(r.offer.launches for r in (*forward, *backward)) <= 8


def test_a_sum_goes_into_a_norms_gradient_only_where_nothing_else_reads_that():
    def norms(count):
        """x + norm(x), ``count`` norms one upon the other, and the first norm's input as an output of its own."""
        b = GraphBuilder()
        x, w = b.input("x", TensorSpec((4, 8), "float32")), b.input("w", TensorSpec((8,), "float32"), weight=True)
        y = x
        for _ in range(count):
            y = b.op("rms_norm", x=y, weight=w, want=("y",))
        return b.build([b.op("add", a=x, b=y)])

    for count in (1, 2):
        backward = differentiate(norms(count), (True, False)).backward
        assert "add" not in [n.op for n in backward.nodes]
        assert [n.input("dresidual") is not None for n in backward.nodes] == [False] * (count - 1) + [True]
    b = GraphBuilder()
    x, w = b.input("x", TensorSpec((4, 8), "float32")), b.input("w", TensorSpec((8,), "float32"))
    z = b.input("z", TensorSpec((4, 8), "float32"))
    y = b.op("rms_norm", x=b.op("add", a=x, b=z), weight=w, want=("y",))
    made = differentiate(b.build([y, b.op("add", a=x, b=z)]), (True, True, True))
    assert made.grads[0] is not None, "x and z take part in two sums each"
    ops = [n.op for n in made.backward.nodes]
    assert ops.count("add") == 2 and all(n.input("dresidual") is None for n in made.backward.nodes if n.op == "rms_norm_bwd")


@pytest.mark.parametrize("changes", [[], ["model.linear_bias=true", "model.hidden_dropout=0.1", "plan.recompute=selective", "plan.recompute_modules=mlp"]])
def test_a_recipes_plan_holds_the_residual_adds_where_it_says_so(changes):
    arch = Arch.parse("sm_90")
    plain, fused = (estimate_recipe(load_recipe("llama3_8b", [*changes, f"plan.fuse_residual={on}"]), arch) for on in ("false", "true"))
    by_kind = [{g.kind: g for g in found.graphs} for found in (plain, fused)]
    assert all(found["self_attention"].plan.signature == by_kind[0]["self_attention"].plan.signature for found in by_kind)
    ops = [[op for r in found["mlp"].plan.forward.regions for op in r.ops] for found in by_kind]
    assert "bias_dropout_add" not in ops[0] and ops[1].count("bias_dropout_add") == 2
    assert [found["mlp"].name for found in by_kind] == ["norm + mlp", "residual + norm + mlp + residual"]
    assert plain.step_seconds < fused.step_seconds
    backward = [op for r in by_kind[1]["mlp"].plan.backward.regions for op in r.ops]
    assert ("linear" in backward) == bool(changes), "fc1 is run again where the recipe asks for it"


def test_megatrons_own_layers_have_no_plan_to_put_the_residual_adds_into():
    with pytest.raises(RecipeError) as refused:
        load_recipe("gpt_tiny", ["plan.fuse_residual=true", "plan.layers=megatron_local"])
    assert [(p.field, p.value) for p in refused.value.problems] == [("plan.fuse_residual", True)]
