"""Cross entropy over sharded classes and of an output layer in chunks: graphs, plans, engines, refusals."""

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F

from layerplan import ops
from layerplan.integration.engines.arch import ARCHS
from layerplan.integration.engines.contract import Decline, Offer
from layerplan.integration.engines.manifest import BY_ID, CHUNK_BYTES
from layerplan.integration.graph.autodiff import differentiate
from layerplan.integration.graph.ir import Dim, GraphBuilder, GraphError, TensorSpec
from layerplan.integration.graph.ops.loss import NOWHERE
from layerplan.integration.graph.ops.table import op_table
from layerplan.integration.planner.cover import region_of
from layerplan.integration.planner.planner import plan
from layerplan.integration.planner.policy import Policy
from layerplan.kernels.loss import chunked
from layerplan.modules.graphs import TensorParallel
from layerplan.modules.loss import CrossEntropy, cross_entropy_graph
from layerplan.recipes import RecipeError, load_recipe
from layerplan.recipes.estimate import estimate_recipe
from layerplan.recipes.memory import memory_estimate
from layerplan.recipes.policies import module_names
from tests import oracle
from tests.cases import chunked_loss
from tests.cases.graphs import needs_triton

torch.set_num_threads(1)
CPU, SM90 = ARCHS["cpu"], ARCHS["sm_90"]
REFERENCE = "reference/eager"


# ---- classes sharded over ranks, all ranks in this process ------------------------------


def _run(name, want, attrs, **tensors):
    return op_table()[name].reference(tensors, attrs, want)


def sharded(parts, targets, ignore_index=-100, dloss=None):
    """(loss, LSE, gradients of the parts) of logits that lie in ``parts`` [*t, classes], one per rank."""
    classes = parts[0].shape[-1]
    attrs = {"classes": classes, "ignore_index": ignore_index}
    shifted = [
        _run("shard_targets", ("own", "hits"), attrs, targets=targets, first=torch.tensor([r * classes]))
        for r in range(len(parts))
    ]
    local = [
        _run("cross_entropy", ("loss", "lse"), {"ignore_index": NOWHERE}, logits=x, targets=s["own"])
        for x, s in zip(parts, shifted, strict=True)
    ]
    stats = torch.cat([_run("stack_shard", ("stats",), {}, **part)["stats"] for part in local])
    whole = _run("shard_loss", ("loss", "lse"), attrs, stats=stats, targets=targets)
    dloss = torch.ones_like(whole["loss"]) if dloss is None else dloss
    grads = [
        _run(
            "cross_entropy_bwd",
            ("dlogits",),
            {"ignore_index": NOWHERE},
            dloss=dloss,
            logits=x,
            targets=s["hits"],
            lse=whole["lse"],
        )["dlogits"]
        for x, s in zip(parts, shifted, strict=True)
    ]
    return whole["loss"], whole["lse"], grads


@pytest.mark.parametrize("ignored", [-100, 0, 9])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_loss_of_sharded_classes_and_its_gradient_are_those_of_all_of_them(dtype, ignored):
    gen = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(4, 5, 21, generator=gen, dtype=torch.float64)).requires_grad_()
    targets = torch.randint(0, 21, (4, 5), generator=gen)
    targets[0, :3] = (
        ignored  # also a class that another rank shifts onto its own, and one that a rank's shift would hide
    )
    dloss = torch.randn(4, 5, generator=gen, dtype=torch.float64)
    truth = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=ignored).view(4, 5)
    (grad,) = torch.autograd.grad(truth, logits, dloss)
    loss, lse, grads = sharded(logits.detach().chunk(3, -1), targets.to(dtype), ignored, dloss)
    torch.testing.assert_close(loss, truth.detach(), atol=1e-13, rtol=1e-13)
    torch.testing.assert_close(lse, torch.logsumexp(logits.detach(), -1), atol=1e-13, rtol=1e-13)
    torch.testing.assert_close(torch.cat(grads, -1), grad, atol=1e-13, rtol=1e-13)
    assert not loss[targets == ignored].any() and not torch.cat(grads, -1)[targets == ignored].any()


def test_all_targets_ignored_give_zeros():
    loss, _, grads = sharded(torch.randn(3, 8).chunk(2, -1), torch.full((3,), -100))
    assert not loss.any() and not torch.cat(grads, -1).any()


def test_a_small_loss_beside_large_logits_keeps_its_digits():
    """Target at 200, all others at 190: loss = log1p(31 exp(-10)). LSE - logit in float32 would have errors of 1.5e-5,
    an ulp of 200."""
    logits = torch.full((1, 32), 190.0)
    logits[0, 20] = 200.0
    loss, _, _ = sharded(logits.chunk(4, -1), torch.tensor([20]))
    exact = float(torch.log1p(31 * torch.exp(torch.tensor(-10.0, dtype=torch.float64))))
    assert abs(float(loss) - exact) <= 2 * oracle.ulp(torch.float32, 200.0)
    far = torch.tensor([[0.0, 0.0, 1e4, 1e4]])  # loss 10000 + log(2)
    loss, _, grads = sharded(far.chunk(2, -1), torch.tensor([0]))
    assert float(loss) == pytest.approx(
        10000.693147, rel=1e-7
    )  # an LSE of 10000.693 in float32 is exact to half an ulp
    torch.testing.assert_close(
        torch.cat(grads, -1), torch.tensor([[-1.0, 0.0, 0.5, 0.5]]), atol=oracle.ulp(torch.float32, 1e4) / 4, rtol=0
    )


def test_infinite_logits_of_a_shard_give_no_nan_where_the_target_is_not_among_them():
    logits = torch.full((2, 8), -float("inf"))
    logits[:, 5] = 3.0
    loss, _, grads = sharded(logits.chunk(2, -1), torch.tensor([5, 5]))
    assert not loss.any() and not torch.cat(grads, -1).any()


# ---- graphs ------------------------------


def _tensors(linear, tp, tokens=(6, 2), classes=5, width=4, dtype=torch.float32):
    data = [
        torch.zeros(tokens[0] // (tp.size if tp.sequence else 1), *tokens[1:], width, dtype=dtype),
        torch.zeros(classes, width, dtype=dtype),
    ]
    data = data if linear else [torch.zeros(*tokens, classes, dtype=dtype)]
    return [
        *data,
        torch.zeros(tokens, dtype=torch.int64),
        *([torch.zeros(1, dtype=torch.int64)] if tp.size > 1 else []),
    ]


def graph_of(linear, tp, **shape):
    return cross_entropy_graph(tp, linear=linear)[1](*_tensors(linear, tp, **shape))


def test_one_rank_runs_one_op():
    alone = TensorParallel()
    assert [n.op for n in graph_of(False, alone).nodes] == ["cross_entropy"]
    assert [n.op for n in graph_of(True, alone).nodes] == ["linear_cross_entropy"]


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("linear", [False, True])
def test_sharded_graph_exchanges_two_numbers_a_token_and_its_backward_only_data_gradients(linear, sequence):
    tp = TensorParallel(2, sequence)
    graph = graph_of(linear, tp)
    entry = {True: "all_gather", False: "group_copy"}[sequence]
    assert [n.op for n in graph.nodes] == [
        *([entry] if linear else []),
        "shard_targets",
        "linear_cross_entropy" if linear else "cross_entropy",
        "stack_shard",
        "all_gather",
        "shard_loss",
    ]
    exchanged = graph.specs[graph.nodes[-1].input("stats")]
    assert exchanged.shape[:2] == (2, 2) and len(exchanged.shape) == 4 and exchanged.dtype == "float32"
    needs = tuple(graph.specs[v].is_float for v in graph.inputs)
    d = differentiate(graph, needs, None, frozenset({"all_gather"}))
    ops_ = [n.op for n in d.backward.nodes]
    if not linear:
        assert ops_ == ["cross_entropy_bwd"]
    elif sequence:
        assert ops_ == ["all_gather", "linear_cross_entropy_bwd", "reduce_scatter"], "the gathered tokens are not kept"
    else:
        assert ops_ == ["linear_cross_entropy_bwd", "all_reduce"]
    assert all(g is not None for g, n in zip(d.grads, needs, strict=True) if n)


def test_ranks_have_one_graph_though_each_has_its_own_classes():
    a, b = (CrossEntropy(5, tp=TensorParallel(2), rank=r) for r in range(2))
    assert [int(m._first(torch.device("cpu"))) for m in (a, b)] == [0, 5]
    assert graph_of(False, TensorParallel(2)).signature() == graph_of(False, TensorParallel(2)).signature()
    assert "5" not in {str(v) for n in graph_of(False, TensorParallel(2)).nodes for k, v in n.attrs if k != "classes"}


def test_frozen_output_weight_costs_no_weight_gradient_and_frozen_hidden_states_no_data_gradient():
    graph = graph_of(True, TensorParallel())
    for needs, ports in (
        ((True, False, False), ["dx"]),
        ((False, True, False), ["dweight"]),
        ((True, True, False), ["dx", "dweight"]),
    ):
        (node,) = differentiate(graph, needs).backward.nodes
        assert [p for p, _ in node.outputs] == ports


def test_what_only_the_gradient_reads_is_not_counted_as_read():
    graph = graph_of(False, TensorParallel(2), tokens=(64, 2), classes=1000)
    region = region_of(graph, [graph.nodes[-1]])
    tokens = 64 * 2
    # stats of two ranks, targets, loss: the logits are 400 times that
    assert region.cost()[1] == tokens * (2 * 2 * 4 + 8 + 4)
    op, node = op_table()["shard_loss"], graph.nodes[-1]
    inputs, outputs = ({p: graph.specs[v] for p, v in ports} for ports in (node.inputs, node.outputs))
    assert op.cost(inputs, outputs, node.attributes)[1] == region.cost()[1]


def test_flops_are_two_forward_and_six_backward_per_logit_and_hidden_unit():
    d = differentiate(graph_of(True, TensorParallel(), tokens=(64,), classes=1000, width=96), (True, True, False))
    forward, backward = (region_of(g, g.nodes).cost()[0] for g in (d.forward, d.backward))
    assert forward == 64 * 1000 * (2 * 96 + 4) and backward == 64 * 1000 * (6 * 96 + 4)
    d = differentiate(graph_of(True, TensorParallel(), dtype=torch.bfloat16), (True, True, False))
    assert [region_of(g, g.nodes).dtype() for g in (d.forward, d.backward)] == ["bfloat16"] * 2, (
        "the rate of the products"
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(targets=torch.zeros(6, 3, dtype=torch.int64)), "must have shape"),
        (dict(targets=torch.zeros(6, 2)), "int32 or int64"),
        (dict(weight=torch.zeros(5, 3)), "hidden size"),
        (dict(weight=torch.zeros(5, 4, dtype=torch.bfloat16)), "dtype of weight"),
        (dict(weight=torch.zeros(0, 4)), "at least one class"),
    ],
)
def test_operands_that_do_not_fit_are_refused_with_names(change, said):
    given = {
        "hidden": torch.zeros(6, 2, 4),
        "weight": torch.zeros(5, 4),
        "targets": torch.zeros(6, 2, dtype=torch.int64),
    } | change
    with pytest.raises(GraphError, match=said):
        cross_entropy_graph(TensorParallel(), linear=True)[1](*given.values())


def test_targets_outside_of_the_vocabulary_are_refused_with_their_range():
    x, w = torch.randn(3, 4), torch.randn(5, 4)
    with pytest.raises(ValueError, match=r"targets span 0 \.\. 5: must lie in \[0, 5\)"):
        ops.linear_cross_entropy(x, w, torch.tensor([0, 5, -100]))
    graph = graph_of(False, TensorParallel(2))
    check, node = op_table()["shard_loss"].check, graph.nodes[-1]
    with pytest.raises(ValueError, match=r"\[0, 10\)"):
        check({"targets": torch.tensor([10])}, lambda port: {"stats": (2, 2, 6, 2)}[port], node.attributes)
    with pytest.raises(ValueError, match="must be 5, the classes of this rank"):
        CrossEntropy(5)(torch.zeros(2, 10), torch.zeros(2, dtype=torch.int64))


# ---- plans ------------------------------


@needs_triton
def test_local_classes_are_read_once_in_one_region_on_a_gpu():
    p = plan(graph_of(False, TensorParallel(2), dtype=torch.bfloat16), SM90, needs_grad=(True, False, False))
    assert [(r.ops, r.engine) for r in p.forward.regions] == [
        (("shard_targets", "cross_entropy", "stack_shard"), "pointwise/inductor"),
        (("all_gather",), "runner"),
        (("shard_loss",), "pointwise/inductor"),
    ]
    assert [r.ops for r in p.backward.regions] == [("cross_entropy_bwd",)]


@needs_triton
def test_chunked_is_what_runs_where_an_engine_may_be_chosen():
    graph = graph_of(True, TensorParallel(2), tokens=(4096, 2), classes=16032, width=1024, dtype=torch.bfloat16)
    for policy in ("auto", "strict"):
        p = plan(graph, SM90, Policy.of(policy), needs_grad=(True, True, False, False), accumulate=(1,))
        chosen = {r.ops: r for part in (p.forward, p.backward) for r in part.regions if r.engine != "runner"}
        for op in ("linear_cross_entropy", "linear_cross_entropy_bwd"):
            assert chosen[op,].engine == "loss/chunked" and dict(chosen[op,].offer.knobs) == {
                "chunk": 8192,
                "loss": "pointwise/inductor",
            }
        assert not any(r.engine == REFERENCE for r in chosen.values())


def test_only_references_run_under_policy_reference():
    p = plan(graph_of(True, TensorParallel(2)), CPU, Policy.of("reference"), needs_grad=(True, True, False, False))
    assert {r.engine for part in (p.forward, p.backward) for r in part.regions} == {"runner", REFERENCE}


# ---- the chunked engine ------------------------------


def _region(rows, classes, width, dtype="bfloat16", backward=False, accumulate=False, needs=(True, True, False)):
    b = GraphBuilder()
    x, w = (
        b.input("x", TensorSpec((rows, width), dtype)),
        b.input("w", TensorSpec((classes, width), dtype), weight=True),
    )
    graph = b.build([b.op("linear_cross_entropy", x=x, weight=w, targets=b.input("t", TensorSpec((rows,), "int64")))])
    if not backward:
        return region_of(graph, graph.nodes)
    part = plan(graph, CPU, needs_grad=needs, accumulate=(1,) if accumulate else ()).backward.graph
    return region_of(part, part.nodes)


def _offer(region, arch=CPU, knobs=None):
    engine = BY_ID["loss/chunked"].load()
    return engine.match(region, arch) if knobs is None else engine.offer_with(region, arch, tuple(knobs.items()))


@pytest.mark.parametrize(
    ("rows", "classes", "chunk"),
    [
        (Dim("t", 8192), 128256, 2048),
        (Dim("t", 8192), 16032, 8192),
        (Dim("t", 65536), 32000, 8192),
        (Dim("t", 512), 128256, 512),
        (Dim("t", 8192), 1 << 24, 128),
    ],
)
def test_a_chunk_is_as_many_tokens_as_half_a_gibibyte_of_logits_holds(rows, classes, chunk):
    offer = _offer(_region(rows, classes, 64))
    assert dict(offer.knobs)["chunk"] == chunk
    assert offer.workspace_bytes == chunk * classes * 2


def test_workspace_counts_the_gradient_and_a_weight_gradient_that_is_summed_over_chunks():
    rows, logits, summed = Dim("t", 8192), 2048 * 128256 * 2, 128256 * 64 * 4
    assert _offer(_region(rows, 128256, 64, backward=True)).workspace_bytes == 2 * logits + summed
    assert _offer(_region(rows, 128256, 64, backward=True, accumulate=True)).workspace_bytes == 2 * logits
    assert _offer(_region(rows, 128256, 64, backward=True, needs=(True, False, False))).workspace_bytes == 2 * logits
    assert _offer(_region(Dim("t", 1024), 128256, 64, backward=True)).workspace_bytes == logits * 2 // 2, (
        "one chunk needs no sum"
    )


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"chunk": 15, "loss": REFERENCE}, "at least 16 tokens"),
        ({"chunk": 64}, "its knobs are chunk"),
        ({"chunk": True, "loss": REFERENCE}, "at least 16"),
        ({"chunk": 64, "loss": "norm/torch"}, "no code for cross_entropy"),
        ({"chunk": 64, "loss": "loss/none"}, "no code for cross_entropy"),
        ({"chunk": 64, "loss": "loss/quack"}, "loss/quack for the logits of a chunk: has no code for cpu"),
    ],
)
def test_knobs_that_it_cannot_run_with_are_declined_with_reason(knobs, said):
    got = _offer(_region(Dim("t", 512), 64, 64), knobs=knobs)
    assert isinstance(got, Decline) and said in got.reason, got


def test_on_a_gpu_it_declines_where_no_kernel_takes_a_chunk_and_says_why(monkeypatch):
    absent = dataclasses.replace(BY_ID["pointwise/inductor"], needs=("torch", "not_a_package"))
    monkeypatch.setattr(chunked, "MANIFEST", tuple(absent if e.id == absent.id else e for e in chunked.MANIFEST))
    got = _offer(_region(Dim("t", 512), 64, 64), SM90)
    assert (
        isinstance(got, Decline)
        and "pointwise/inductor for the logits of a chunk: " in got.reason
        and "not_a_package" in got.reason
    )
    assert isinstance(_offer(_region(Dim("t", 512), 64, 64)), Offer), "a CPU has the reference"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("lead", "chunk"), [((50,), 16), ((33,), 16), ((7, 9), 32), ((64,), 64), ((17, 2), 16)])
def test_chunks_of_any_size_give_loss_and_gradients_of_the_whole(lead, chunk, dtype):
    chunked_loss.hold("cpu", dtype, REFERENCE, lead, classes=37, width=24, chunk=chunk)


@needs_triton
def test_chunks_run_on_generated_kernels():
    chunked_loss.hold("cpu", torch.bfloat16, "pointwise/inductor", (50,), classes=37, width=24, chunk=16)


def test_cuts_are_equal_and_cover_every_row_once():
    for rows, chunk in itertools.product((0, 1, 2, 15, 16, 17, 31, 33, 500), (16, 17, 64)):
        cuts = list(chunked._cuts(rows, chunk))
        sizes = [c.stop - c.start for c in cuts]
        assert (
            sum(sizes) == rows and max(sizes, default=0) <= chunk and max(sizes, default=0) - min(sizes, default=0) <= 1
        )
        assert [c.start for c in cuts] == [sum(sizes[:i]) for i in range(len(sizes))]
        assert rows < 2 or min(sizes) > 1, "kernels for several rows never see one"


@pytest.mark.parametrize("needs", [(True, True, False), (True, False, False), (False, True, False)])
def test_no_tensor_holds_the_logits_of_more_than_a_chunk(needs):
    given = chunked_loss.tensors("cpu", torch.bfloat16, (96,), classes=1000, width=8)
    with chunked_loss.Shapes() as shapes:
        _, dx, dw = chunked_loss.run(given, 32, REFERENCE, torch.ones(96), needs)
    sizes = [torch.Size(s).numel() for s in shapes.seen]
    assert (dx is not None, dw is not None) == needs[:2]
    assert (1000, 8) in shapes.seen and (32, 1000) in shapes.seen, "forward and backward were watched"
    assert max(sizes) == 32 * 1000


def test_the_plain_loss_holds_all_logits_so_that_the_watch_can_fail():
    x, w, targets = chunked_loss.tensors("cpu", torch.bfloat16, (96,), classes=1000, width=8)
    with chunked_loss.Shapes() as shapes:
        ops.linear_cross_entropy(x.requires_grad_(), w, targets, engine=REFERENCE).sum().backward()
    assert max(torch.Size(s).numel() for s in shapes.seen) == 96 * 1000


def test_a_forced_engine_that_is_no_loss_is_refused_with_those_that_are():
    x, w, targets = chunked_loss.tensors("cpu", torch.float32, (4,), classes=5, width=8)
    with pytest.raises(ValueError, match="loss/chunked"):
        ops.linear_cross_entropy(x, w, targets, engine="loss/quack")


def test_tied_weight_gets_both_of_its_gradients():
    """One weight that is read as the output layer and by another op of the graph: the gradient is no single node's, and
    is returned."""
    b = GraphBuilder()
    x, w, t = (
        b.input("x", TensorSpec((6, 4), "float64")),
        b.input("w", TensorSpec((4, 4), "float64"), weight=True),
        b.input("t", TensorSpec((6,), "int64")),
    )
    graph = b.build([b.op("linear_cross_entropy", x=b.op("linear", x=x, weight=w), weight=w, targets=t)])
    p = plan(graph, CPU, needs_grad=(True, True, False), accumulate=(1,))
    assert not any("accumulate" in dict(n.inputs) for n in p.backward.graph.nodes)
    alone = plan(graph_of(True, TensorParallel()), CPU, needs_grad=(True, True, False), accumulate=(1,))
    assert any("accumulate" in dict(n.inputs) for n in alone.backward.graph.nodes)


# ---- recipes ------------------------------


def test_recipe_says_which_loss_runs_and_refuses_one_without_plans():
    assert load_recipe("gpt_tiny").plan.loss_runs == "fused"
    assert load_recipe("gpt_tiny", ["plan.layers=megatron_local"]).plan.loss_runs == "megatron"
    assert module_names(load_recipe("gpt_tiny", ["plan.loss=megatron"]))[-1] == "decoder.final_layernorm"
    assert module_names(load_recipe("gpt_tiny", ["plan.loss=chunked"]))[-1] == "loss"
    with pytest.raises(RecipeError) as refused:
        load_recipe("gpt_tiny", ["plan.loss=chunked", "plan.layers=megatron_local"])
    (problem,) = refused.value.problems
    assert (problem.field, problem.value) == ("plan.loss", "chunked") and "runs no plans" in problem.rule


def test_dry_run_plans_the_loss_and_counts_its_logits():
    found = {
        loss: load_recipe("llama3_8b", [f"plan.loss={loss}", "parallel.tensor=1", "parallel.sequence=false"])
        for loss in ("fused", "chunked", "megatron")
    }
    tokens, vocabulary = (
        found["fused"].model.seq_length * found["fused"].train.micro_batch,
        found["fused"].model.vocab_size,
    )
    whole = tokens * vocabulary * 2
    assert whole > CHUNK_BYTES
    assert {loss: memory_estimate(r, SM90).logits // whole for loss, r in found.items()} == {
        "fused": 2,
        "chunked": 0,
        "megatron": 3,
    }
    plans = {loss: estimate_recipe(r, CPU) for loss, r in found.items()}
    assert {loss: p.graphs[-1].name for loss, p in plans.items()} == {
        "fused": "loss",
        "chunked": "output layer + loss",
        "megatron": "final norm",
    }
    assert plans["chunked"].outside_seconds == 0.0 < plans["fused"].outside_seconds == plans["megatron"].outside_seconds
    sharded = estimate_recipe(
        load_recipe("llama3_8b", ["plan.loss=chunked", "parallel.tensor=2", "parallel.sequence=true"]), CPU
    )
    assert {n.op for n in sharded.graphs[-1].plan.forward.graph.nodes} >= {
        "all_gather",
        "linear_cross_entropy",
        "shard_loss",
    }
