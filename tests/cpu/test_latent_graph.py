"""The graph of latent attention: plans, save policies, tensor parallelism, and its derived backward against autograd."""

import importlib.util

import pytest
import torch

from layerplan.integration.engines.arch import ARCHS
from layerplan.integration.graph.autodiff import differentiate
from layerplan.integration.graph.ir import GraphError
from layerplan.integration.planner.planner import plan
from layerplan.modules.graphs import LATENT_UP_PROJECTION, TensorParallel, latent_attention_graph
from tests.cpu.test_autodiff import derived_gradients, evaluate, same

torch.set_num_threads(1)
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the inductor engine needs the package triton")
HEADS, NOPE, ROPE, VALUE, Q_RANK, KV_RANK = 3, 5, 4, 6, 7, 8
NAMES = ("q_latent", "q_weight", "kv_latent", "kv_weight", "k_rope", "cos", "sin")
NEEDS = (True,) * 5 + (False,) * 2
ALONE = TensorParallel()
KEYS = ("unflatten_heads", "split", "rope", "expand_heads", "concat")
KEYS_BACKWARD = ("split", "sum_heads", "rope", "concat", "flatten_heads")
DENSE = {"layout": "sbhd", "causal": True}


def tensors(*lead, dtype=torch.float64, device="cpu", positions=32):
    shapes = [(*lead, Q_RANK), (HEADS * (NOPE + ROPE), Q_RANK), (*lead, KV_RANK), (HEADS * (NOPE + VALUE), KV_RANK), (*lead, 1, ROPE)]
    gen = torch.Generator().manual_seed(0)
    angle = torch.rand(positions, ROPE // 2, generator=gen, dtype=torch.float64)
    made = [torch.randn(s, generator=gen, dtype=torch.float64) for s in shapes]
    return [t.to(device, dtype) for t in made] + [angle.cos().to(device, dtype), angle.sin().to(device, dtype)]


def graph_of(inputs, names=NAMES, tp=ALONE, attrs=DENSE):
    return latent_attention_graph(tp, HEADS, NOPE, names, attrs)(*inputs)


@pytest.mark.parametrize("recompute", [frozenset(), LATENT_UP_PROJECTION], ids=["kept", "rebuilt"])
@pytest.mark.parametrize("packed", [False, True])
def test_derived_backward_equals_autograd_of_the_references(packed, recompute):
    inputs, names, attrs = tensors(*((11,) if packed else (6, 2))), NAMES, DENSE
    if packed:
        cu, positions = torch.tensor([0, 4, 4, 9], dtype=torch.int32), torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 0])
        names = (*names, "q_positions", "k_positions", "cu_seqlens_q", "cu_seqlens_k")
        inputs, attrs = [*inputs, positions, positions, cu, cu], {"layout": "thd", "causal": True}
    graph = graph_of(inputs, names, attrs=attrs)
    needs = NEEDS + (False,) * (len(names) - 7)
    leaves = [t.clone().requires_grad_(n) for t, n in zip(inputs, needs, strict=True)]
    (out,) = evaluate(graph, leaves)
    assert out.shape == (*inputs[4].shape[:-2], HEADS, VALUE)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    theirs = iter(torch.autograd.grad(out, leaves[:5], dout))
    values, ours, _ = derived_gradients(graph, needs, inputs, [dout], recompute=recompute)
    assert torch.equal(values[0], out)
    same(ours, [next(theirs) if n else None for n in needs], graph.describe())


def test_rebuilding_the_up_projections_saves_latents_and_weights_in_place_of_queries_keys_and_values():
    graph = graph_of(tensors(16, 2))
    kept, rebuilt = (differentiate(graph, NEEDS, None, again) for again in (frozenset(), LATENT_UP_PROJECTION))
    made = {v: n.op for n in kept.forward.nodes for _, v in n.outputs}
    assert sorted(made[v] for v in kept.saved if v in made) == ["concat", "concat", "sdpa", "sdpa", "split"]
    assert [v for v in rebuilt.saved if v in made and made[v] != "sdpa"] == []
    assert set(NAMES) <= set(rebuilt.saved)


@needs_triton
def test_on_a_gpu_the_moves_around_the_rotation_are_part_of_its_kernel():
    inputs = tensors(64, 2, dtype=torch.bfloat16, device="meta", positions=64)
    p = plan(graph_of(inputs), ARCHS["sm_90"], needs_grad=NEEDS, recompute=LATENT_UP_PROJECTION)
    turns = {r.ops for part in (p.forward, p.backward) for r in part.regions if r.engine == "pointwise/inductor"}
    assert turns == {
        ("unflatten_heads", "split", "rope", "concat"),
        KEYS,
        KEYS_BACKWARD,
        ("split", "rope", "concat", "flatten_heads"),
    }
    assert not any(r.engine == "layout/torch" for part in (p.forward, p.backward) for r in part.regions)


@needs_triton
@pytest.mark.timeout(400)  # a C++ compiler at work: 30 s on an idle core
def test_the_generated_kernels_around_the_rotation_equal_the_references_for_any_token_count():
    from layerplan.kernels.pointwise.inductor import compile_region

    p = plan(graph_of(tensors(64, 2, dtype=torch.float32, device="meta", positions=64)), ARCHS["sm_90"], needs_grad=NEEDS)
    regions = [r.region for part in (p.forward, p.backward) for r in part.regions if r.ops in (KEYS, KEYS_BACKWARD)]
    assert len(regions) == 2
    for region in regions:
        run = compile_region(region, "cpu")
        for tokens, batch in ((64, 2), (33, 5)):
            sizes = {"t0": tokens, "t1": batch, "p": 80}
            gen = torch.Generator().manual_seed(tokens)
            inputs = [torch.randn([d if isinstance(d, int) else sizes[d.name] for d in region.graph.specs[v].shape], generator=gen)
                      for v in region.graph.inputs]  # fmt: skip
            for got, want in zip(run(list(inputs)), evaluate(region.graph, inputs), strict=True):
                torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("sequence", [True, False])
def test_tensor_parallelism_enters_at_the_latents_and_sums_all_three_gradients(sequence):
    tp = TensorParallel(4, sequence)
    again = LATENT_UP_PROJECTION | {"all_gather"}
    d = differentiate(graph_of(tensors(3, 2), tp=tp), NEEDS, None, again)
    enter, leave = ("all_gather", "reduce_scatter") if sequence else ("group_copy", "all_reduce")
    assert [n.op for n in d.forward.nodes].count(enter) == 3
    assert [n.op for n in d.backward.nodes].count(leave) == 3
    out = d.forward.specs[d.forward.outputs[0]]
    assert out.shape[0].hint == (16 if sequence else 4), "three tokens in their bucket, times the ranks"
    if sequence:  # what is kept is the shard, gathered again in the backward
        assert {"q_latent", "kv_latent", "k_rope"} <= set(d.saved)


def test_a_mask_fits_the_whole_sequence_under_sequence_parallelism():
    mask = torch.zeros(1, 1, 8, 8, dtype=torch.bool)
    graph = graph_of([*tensors(4, 2), mask], (*NAMES, "mask"), TensorParallel(2, True), {"layout": "sbhd"})
    assert graph.specs["mask"].shape[2] == graph.specs["mask"].shape[3] == graph.specs[graph.outputs[0]].shape[0]
    with pytest.raises(GraphError, match="mask"):
        graph_of([*tensors(4, 2), mask], (*NAMES, "mask"), TensorParallel(4, True), {"layout": "sbhd"})


@pytest.mark.parametrize(
    "at, shape, match",
    [
        (1, (HEADS * (NOPE + ROPE) + 1, Q_RANK), r"unflatten_heads: heads = 3: .*divide"),
        (1, (HEADS * NOPE, Q_RANK), r"split: first = 5"),
        (0, (6, 2, Q_RANK + 1), r"linear: x"),
        (4, (6, 2, 1, ROPE + 2), r"sdpa: k"),
        (4, (6, 2, 2, ROPE), r"expand_heads: x"),
        (5, (4, ROPE), r"rope: cos"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused_by_the_ops_rule(at, shape, match):
    inputs = tensors(6, 2)
    inputs[at] = torch.zeros(shape, dtype=torch.float64)
    with pytest.raises(GraphError, match=match):
        graph_of(inputs)
