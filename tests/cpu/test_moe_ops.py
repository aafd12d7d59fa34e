"""The ops of a mixture of experts beyond the shared cases: whole layers, tails that nobody may read, empty groups, ties, deferred and
accumulated weight gradients, refusals."""

import contextlib
import types

import pytest
import torch

from layerplan.integration import ops
from layerplan.integration.engines.arch import ARCHS
from layerplan.integration.engines.contract import Decline, Offer
from layerplan.integration.engines.manifest import BY_ID
from layerplan.integration.engines.packages import locate
from layerplan.integration.graph.autodiff import differentiate
from layerplan.integration.graph.ir import Dim, GraphBuilder, GraphError, TensorSpec, size_of
from layerplan.integration.graph.ops.moe import capacity
from layerplan.integration.graph.ops.table import op_table
from layerplan.integration.graph.verify import verify
from layerplan.integration.planner import runner as runner_module
from layerplan.integration.planner.cover import region_of
from layerplan.integration.planner.planner import plan
from layerplan.integration.planner.policy import Policy
from layerplan.integration.planner.runner import Runner, WeightGrads
from layerplan.integration.planner.shapes import SpecMaker
from layerplan.integration.settings import Settings
from tests import oracle
from tests.cases import grouped
from tests.cases.moe import draw_map, grouping, plain_router

torch.set_num_threads(1)
NAN = float("nan")
ENGINES = ("reference/eager", "moe/torch")
PRODUCTS = ("reference/eager", "grouped_matmul/torch")


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ends(*counts: int) -> torch.Tensor:
    return torch.tensor(counts).cumsum(0).int()


# ---- a layer of experts as one graph ----------------------------------------------------------------------------------

TOPK, EXPERTS, WIDTH, HIDDEN = 2, 4, 16, 24


def layer(align: int = 1, early: bool = True):
    """What a Runner builds of x [t, h], logits [t, e], w1 [e, 2f, h], w2 [e, h, f]: router, permute, experts, unpermute. ``early``: the
    probabilities weigh the activations, else the sum."""

    def build(x, logits, w1, w2):
        b, s = GraphBuilder(), SpecMaker()
        x, logits = b.input("x", s(x, "t h!")), b.input("logits", s(logits, "t e!"))
        w1, w2 = b.input("w1", s(w1, "e! f! h!"), weight=True), b.input("w2", s(w2, "e! h! g!"), weight=True)
        probs, expert_map = b.op("router", logits=logits, topk=TOPK)
        counts, offsets, row_map = b.op("group_by_expert", expert_map=expert_map, num_experts=EXPERTS, align=align)
        places = {"row_map": row_map, "counts": counts, "offsets": offsets, "align": align}
        made = b.op("permute", x=x, probs=probs if early else None, **places)
        rows, weights = made if early else (made, None)
        h = b.op("swiglu", x=b.op("grouped_matmul", x=rows, weight=w1, offsets=offsets, align=align), row_weight=weights)
        y = b.op("grouped_matmul", x=h, weight=w2, offsets=offsets, align=align)
        return b.build([b.op("unpermute", rows=y, probs=None if early else probs, **places), counts])

    return build


def layer_inputs(tokens: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[torch.Tensor]:
    g = gen(seed)
    shapes = (tokens, WIDTH), (tokens, EXPERTS), (EXPERTS, 2 * HIDDEN, WIDTH), (EXPERTS, WIDTH, HIDDEN)
    return [
        (torch.randn(s, generator=g, dtype=torch.float64) * (s[-1] ** -0.5 if len(s) == 3 else 1))
        .to(dtype)
        .requires_grad_()
        for s in shapes
    ]


def plain_layer(x, logits, w1, w2):
    """Token by token."""
    probs, experts = plain_router({"logits": logits}, TOPK)
    out = []
    for i, chosen in enumerate(experts.int().tolist()):
        total = torch.zeros_like(x[i])
        for j, e in enumerate(chosen):
            gate, up = (w1[e] @ x[i]).chunk(2)
            total = total + probs[i, j] * (w2[e] @ (torch.nn.functional.silu(gate) * up))
        out.append(total)
    return torch.stack(out)


@pytest.mark.parametrize("recompute", [frozenset(), frozenset({"swiglu", "permute"})], ids=["save", "recompute"])
@pytest.mark.parametrize(("align", "early"), [(1, True), (4, True), (1, False), (8, False)])
def test_a_layer_of_experts_and_its_gradients_are_those_of_single_tokens(align, early, recompute):
    t, plain = layer_inputs(11), layer_inputs(11)
    runner = Runner(layer(align, early), ("x", "logits", "w1", "w2"), policy=Policy(), recompute=recompute)
    out, counts = runner(*t)
    truth = plain_layer(*plain)
    assert int(counts.sum()) == 11 * TOPK and not counts.requires_grad
    dout = torch.randn(out.shape, generator=gen(1), dtype=torch.float64)
    torch.testing.assert_close(out, truth, rtol=1e-12, atol=1e-12)
    for a, b in zip(torch.autograd.grad(out, t, dout), torch.autograd.grad(truth, plain, dout), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_one_plan_serves_all_token_counts_of_a_shape_class():
    runner = Runner(layer(4), ("x", "logits", "w1", "w2"), policy=Policy())
    for tokens in (9, 12, 16):
        t = layer_inputs(tokens)
        out, _ = runner(*t)
        torch.testing.assert_close(out, plain_layer(*t), rtol=1e-12, atol=1e-12)
    assert len(runner._executables) == 1
    out, _ = runner(*layer_inputs(17))
    assert len(runner._executables) == 2


def test_fault_15_a_rank_without_tokens_gets_an_output_with_a_gradient_and_zero_weight_gradients():
    runner = Runner(layer(8), ("x", "logits", "w1", "w2"), policy=Policy())
    t = layer_inputs(0)
    oracle.poison(*t)
    out, counts = runner(*t)
    assert out.shape == (0, WIDTH) and out.grad_fn is not None and not counts.any()
    grads = torch.autograd.grad(out.sum(), t)
    assert [g.shape for g in grads] == [x.shape for x in t] and not any(g.any() for g in grads)


def test_rows_are_laid_out_for_any_map_and_the_graph_says_how_many():
    t = Dim("t", 8)
    assert capacity(t, 2, 4, 1) == size_of((t, 2)) and capacity(5, 2, 4, 8) == 10 + 28
    padded = capacity(t, 2, 4, 8)
    assert padded.at(lambda d: 5) == 38 and padded.hint == 16 + 28 and padded != capacity(t, 2, 4, 4)
    graph = layer(8)(*layer_inputs(7))
    derived = differentiate(graph, (True,) * 4)
    verify(graph), verify(derived.forward), verify(derived.backward)
    other = layer(4)(*layer_inputs(7))
    assert graph.signature() != other.signature()


def test_on_a_gpu_routing_and_moving_are_one_engines_and_generated_kernels_take_the_activation_alone():
    graph = layer(16)(*layer_inputs(4096, torch.bfloat16))
    made = plan(graph, ARCHS["sm_90"], needs_grad=(True,) * 4)
    engines = {(op, r.engine) for part in (made.forward, made.backward) for r in part.regions for op in r.ops}
    routing = {op for op, _ in engines if "grouped" not in op and "swiglu" not in op}
    assert routing == {
        "router",
        "group_by_expert",
        "permute",
        "unpermute",
        "router_bwd",
        "permute_bwd",
        "unpermute_bwd",
    }
    assert {e for op, e in engines if op in routing} == {"moe/cute" if locate("cutlass").here else "moe/torch"}
    assert {op for op, e in engines if e == "pointwise/inductor"} <= {"swiglu", "swiglu_bwd"}
    assert not {
        op for op in op_table() if "expert" in op or "permute" in op or "router" in op or "grouped" in op
    } & set(BY_ID["pointwise/inductor"].ops)


# ---- permute, unpermute -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("align", [1, 4])
@pytest.mark.parametrize("how", ["no_slot", "skewed", "usual"])
def test_engines_permute_bit_for_bit_alike_and_again(how, align):
    g = gen(3)
    expert_map = draw_map(g, 13, 3, 5, 1.0 if how == "no_slot" else 0.2, 2.0 if how == "skewed" else 0.0)
    x, probs = torch.randn(13, 8, generator=g).bfloat16(), torch.rand(13, 3, generator=g)
    counts, offsets, rows = grouping(expert_map, 5, align)
    first = None
    for engine in (*ENGINES, *ENGINES):
        oracle.poison(torch.empty(13 * 3 + 5 * (align - 1), 8, dtype=torch.bfloat16))
        p = ops.permute(x, expert_map, num_experts=5, probs=probs, align=align, engine=engine)
        assert (p.counts.tolist(), p.offsets.tolist(), p.row_map.tolist()) == (counts, offsets, rows)
        used = offsets[-1]
        got = p.rows[:used], p.probs[:used], ops.unpermute(p.rows, p, probs, engine=engine)
        first = first or got
        for a, b in zip(got, first, strict=True):
            oracle.equal(a, b, engine)
    padding = torch.tensor(
        [r for e, end in enumerate(offsets) for r in range(([0, *offsets])[e] + counts[e], end)], dtype=torch.int64
    )
    assert not first[0][padding].any() and not first[1][padding].any()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("align", [1, 4])
def test_what_lies_behind_the_last_group_or_in_a_dropped_slot_reaches_nobody(align, engine):
    g, tokens, slots, experts = gen(4), 9, 2, 4
    expert_map = draw_map(g, tokens, slots, experts, 0.5)
    expert_map[0] = -1
    x = torch.randn(tokens, 8, generator=g, dtype=torch.float64)
    x[0] = NAN  # a token of dropped slots alone
    probs = torch.rand(tokens, slots, generator=g, dtype=torch.float64)
    probs[expert_map < 0] = NAN
    x.requires_grad_(), probs.requires_grad_()
    p = ops.permute(x, expert_map, num_experts=experts, probs=probs, align=align, engine=engine)
    used = int(p.offsets[-1])
    rows = torch.cat((p.rows[:used].detach(), torch.full_like(p.rows[used:], NAN))).requires_grad_()
    for weights in (None, probs):
        out = ops.unpermute(rows, p, weights, engine=engine)
        assert out.isfinite().all() and not out[0].any()
        dout = torch.randn(out.shape, generator=g, dtype=torch.float64)
        dout[0] = NAN  # nobody's
        grads = torch.autograd.grad(out, [rows] if weights is None else [rows, weights], dout)
        assert grads[0][:used].isfinite().all()
        assert weights is None or (grads[1].isfinite().all() and not grads[1][expert_map < 0].any())
    drows, dprobs = torch.full_like(p.rows, NAN), torch.full_like(p.probs, NAN)
    mine = p.row_map[p.row_map >= 0].long()
    drows[mine], dprobs[mine] = 1.0, 2.0
    dx, dp = torch.autograd.grad((p.rows, p.probs), (x, probs), (drows, dprobs))
    assert torch.equal(dx, (expert_map >= 0).sum(1, keepdim=True).double().expand_as(dx))
    assert torch.equal(dp, torch.where(expert_map >= 0, 2.0, 0.0).double())


def test_a_map_may_be_a_view_and_name_an_expert_twice_in_a_token():
    expert_map = torch.tensor([[1, 1, 0], [0, 1, 1]], dtype=torch.int32).t()
    x = torch.randn(3, 8, generator=gen(), requires_grad=True)
    p = ops.permute(x, expert_map, num_experts=2)
    assert p.row_map.tolist() == [[2, 0], [3, 4], [1, 5]] and p.counts.tolist() == [2, 4] and p.probs is None
    torch.testing.assert_close(ops.unpermute(p.rows, p), 2 * x)
    (dx,) = torch.autograd.grad(ops.unpermute(p.rows, p).sum(), x)
    torch.testing.assert_close(dx, torch.full_like(x, 2.0))


@pytest.mark.parametrize("align", [1, 16, 32, 128])
@pytest.mark.parametrize("engine", PRODUCTS)
def test_fault_17_padding_never_reaches_the_weight_gradient(engine, align):
    grouped.padded_groups("cpu", engine, align)


# ---- grouped_matmul ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", PRODUCTS)
@pytest.mark.parametrize("counts", grouped.FAULT_16)
def test_fault_16_each_row_meets_its_own_experts_weight(counts, engine):
    grouped.own_weights("cpu", engine, counts)


def test_fault_16_groups_that_are_not_what_they_promise_are_refused():
    for counts, row in (((64, 130, 70), 64), ((128, 0, 130, 65), 258)):
        x, w = torch.zeros(sum(counts), 64), torch.zeros(len(counts), 64, 64)
        with pytest.raises(ValueError, match=rf"offsets\[\d\] = {row}: must be a multiple of align = 128"):
            ops.grouped_matmul(x, w, ends(*counts), align=128)
        assert ops.grouped_matmul(x, w, ends(*counts), align=1 if row % 64 else 2).shape == (sum(counts), 64)


@pytest.mark.parametrize("engine", PRODUCTS)
@pytest.mark.parametrize("counts", grouped.EMPTY)
def test_gradients_of_empty_experts_are_exactly_zero_and_the_tail_is_not_read(counts, engine):
    grouped.empty_groups("cpu", engine, counts)


@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize("engine", PRODUCTS)
def test_weight_gradients_are_added_to_main_grad_and_those_of_empty_experts_stay_bit_for_bit(engine, defer):
    runner, _ = grouped.main_grads("cpu", engine, defer=defer)
    made = [r.ops for p in runner.plans() for r in p.forward.regions]
    assert ("grouped_matmul_wgrad",) in made, made


@pytest.mark.parametrize("engine", PRODUCTS)
def test_reruns_of_grouped_products_are_bitwise_equal(engine):
    grouped.reruns("cpu", engine, (0, 1, 300, 0, 3, 257))


def test_deferred_weight_gradients_without_a_main_grad_are_handed_to_the_parameter():
    w = torch.nn.Parameter(torch.randn(2, 8, 16, generator=gen()))
    x = torch.randn(5, 16, generator=gen(1))
    sink = WeightGrads({1: w}, defer=True)
    y = grouped.runner(None)(x, w, ends(2, 3), sink=sink)
    y.sum().backward()
    assert w.grad is None and sink.run_deferred()
    torch.testing.assert_close(w.grad, torch.stack([x[:2].sum(0).expand(8, 16), x[2:].sum(0).expand(8, 16)]))


def match(
    engine: str,
    arch: str,
    op: str = "grouped_matmul",
    dtype: str = "bfloat16",
    n: int = 64,
    k: int = 128,
    experts: int = 8,
    accumulate=None,
):
    b = GraphBuilder()
    offsets = b.input("offsets", TensorSpec((experts,), "int32"))
    if op == "grouped_matmul_wgrad":
        ins = {"dy": ((Dim("t", 64), n), dtype), "x": ((Dim("t", 64), k), dtype)}
        ins |= {} if accumulate is None else {"accumulate": ((experts, n, k), accumulate)}
    else:
        ins = {
            "x" if op == "grouped_matmul" else "dy": ((Dim("t", 64), k if op == "grouped_matmul" else n), dtype),
            "weight": ((experts, n, k), dtype),
        }
    graph = b.build([b.op(op, offsets=offsets, **{p: b.input(p, TensorSpec(*spec)) for p, spec in ins.items()})])
    return BY_ID[engine].load().match(region_of(graph, graph.nodes), ARCHS[arch])


@pytest.mark.parametrize(("words", "given"), [
    ("wait for the offsets", {"dtype": "float16"}), ("wait for the offsets", {"dtype": "float32"}), ("16 bytes", {"n": 63}),
    ("16 bytes", {"k": 100}), ("not float64", {"dtype": "float64"}), ("at most 1023", {"experts": 1024}),
    ("rounds a weight gradient to bfloat16", {"op": "grouped_matmul_wgrad", "accumulate": "float32"}),
    ("empty groups", {"op": "grouped_matmul_wgrad", "arch": "sm_100"}), ("empty groups", {"op": "grouped_matmul_wgrad", "arch": "sm_103"}),
    ("accumulates into", {"op": "grouped_matmul_wgrad", "accumulate": "float16", "arch": "cpu"}),
])  # fmt: skip
def test_torchs_grouped_product_declines_with_reason(words, given):
    answer = match("grouped_matmul/torch", **{"arch": "sm_90", **given})
    assert isinstance(answer, Decline) and words in answer.reason, answer


@pytest.mark.parametrize("op", ["grouped_matmul", "grouped_matmul_dgrad", "grouped_matmul_wgrad"])
def test_grouped_products_are_offered_where_they_can_run(op):
    for engine in ("grouped_matmul/torch", "grouped_matmul/quack"):
        assert isinstance(match(engine, "sm_90", op), Offer)
    assert isinstance(match("grouped_matmul/torch", "cpu", op, "float32"), Offer)
    assert isinstance(match("grouped_matmul/quack", "sm_90", op, accumulate="float32"), Offer)
    reference = match("reference/eager", "sm_90", op)
    assert not reference.capture_safe, "it reads the offsets on the host"


# ---- router, losses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_of_equal_scores_the_lowest_index_goes_first(engine):
    _, experts = ops.router(torch.zeros(3, 6), topk=4, engine=engine)
    assert experts.tolist() == [[0, 1, 2, 3]] * 3
    _, experts = ops.router(torch.tensor([[1.0, 2, 2, 1, 2, 2]]), topk=3, engine=engine)
    assert experts.tolist() == [[1, 2, 4]]
    _, experts = ops.router(torch.tensor([[1.0, 2, 2, 1, 2, 1]]), topk=2, num_groups=3, group_topk=1, engine=engine)
    assert experts.tolist() == [[1, 0]], "two groups with equal sums"


def test_a_bias_moves_the_choice_and_not_the_probabilities():
    logits = torch.randn(9, 6, generator=gen(), requires_grad=True)
    bias = torch.tensor([0.0, 9, 0, 0, 0, -9])
    probs, experts = ops.router(logits, topk=2, score_function="sigmoid", expert_bias=bias)
    assert bool((experts[:, 0] == 1).all()) and not bool((experts == 5).any())
    s = torch.sigmoid(logits.gather(1, experts.long()))
    torch.testing.assert_close(probs, s / s.sum(-1, keepdim=True))
    with pytest.raises(ValueError, match="expert_bias requires a gradient"):
        ops.router(logits, topk=2, score_function="sigmoid", expert_bias=bias.requires_grad_())


@pytest.mark.parametrize("engine", ENGINES)
def test_fault_18_losses_count_real_tokens_alone(engine):
    probs = torch.tensor([[0.9, 0.1], [0.2, 0.8], [1, 0], [1, 0]])
    logits, mask = probs.clamp(min=1e-30).log(), torch.tensor([False, False, True, True])
    _, experts = ops.router(logits, topk=1)
    real = ops.tokens_per_expert(experts, num_experts=2, padding_mask=mask, engine=engine)
    assert real.tolist() == [[1, 1]]
    loss = ops.load_balancing_loss(logits, real, topk=1, padding_mask=mask, engine=engine)
    torch.testing.assert_close(loss, torch.tensor(1.0))
    every = ops.tokens_per_expert(experts, num_experts=2, engine=engine)
    torch.testing.assert_close(ops.load_balancing_loss(logits, every, topk=1, engine=engine), torch.tensor(1.275))
    x = (logits + 1).requires_grad_()
    z = ops.z_loss(x, padding_mask=mask, engine=engine)
    torch.testing.assert_close(z, torch.tensor(1.0))
    (dx,) = torch.autograd.grad(z, x)
    assert not dx[2:].any() and dx[:2].any()


@pytest.mark.parametrize("engine", ENGINES)
def test_losses_of_padding_alone_are_zero_and_pass_no_gradient_even_to_what_is_no_number(engine):
    logits = torch.full((3, 4), NAN, requires_grad=True)
    mask, none = torch.ones(3, dtype=torch.bool), torch.zeros(1, 4)
    for loss in (
        ops.load_balancing_loss(logits, none, topk=2, padding_mask=mask, engine=engine),
        ops.z_loss(logits, padding_mask=mask, engine=engine),
    ):
        assert float(loss.detach()) == 0.0
        assert not torch.autograd.grad(loss, logits)[0].any()


# ---- bad input --------------------------------------------------------------------------------------------------------

X, MAP, ROWS, W, ENDS, LOGITS = (
    torch.zeros(3, 8),
    torch.zeros(3, 2, dtype=torch.int32),
    torch.zeros(6, 8),
    torch.zeros(2, 4, 8),
    ends(2, 2),
    torch.zeros(3, 4),
)
PERMUTED, PADDED = ops.permute(X, MAP, num_experts=2), ops.permute(X, MAP, num_experts=2, align=4)
BAD = {
    "expert behind the last": (lambda: ops.permute(X, MAP + 2, num_experts=2), "expert_map spans 2 .. 2", "[0, 2)"),
    "expert below -1": (lambda: ops.permute(X, MAP - 2, num_experts=2), "expert_map spans -2 .. -2", "-1 where a slot is dropped"),
    "counted expert": (lambda: ops.tokens_per_expert(MAP + 2, num_experts=2), "tokens_per_expert: expert_map spans", "[0, 2)"),
    "map of int64": (lambda: ops.permute(X, MAP.long(), num_experts=2), "expert_map", "must be int32 [tokens, slots]; pass expert_map.int()"),
    "map of one dim": (lambda: ops.permute(X, MAP[:, 0], num_experts=2), "expert_map", "; pass expert_map.unsqueeze(1), one slot for each token"),
    "map of one dim, int64": (lambda: ops.tokens_per_expert(MAP[:, 0].long(), num_experts=2), "expert_map", "; pass expert_map.int().unsqueeze(1)"),
    "map of three dims": (lambda: ops.permute(X, MAP[None], num_experts=2), "expert_map", "pass expert_map.flatten(0, -2)"),
    "map that is a mask": (lambda: ops.permute(X, MAP.bool(), num_experts=2), "expert_map = bool", "the experts that router returned"),
    "row_map of int64": (lambda: ops.unpermute(ROWS, PERMUTED._replace(row_map=MAP.long())), "row_map = int64", "what group_by_expert returned"),
    "map of other tokens": (lambda: ops.permute(X, MAP[:2], num_experts=2), "row_map", "a row for each token of x"),
    "no experts": (lambda: ops.permute(X, MAP, num_experts=0), "num_experts = 0", "positive int"),
    "align": (lambda: ops.permute(X, MAP, num_experts=2, align=0), "align = 0", "positive int"),
    "align of a float": (lambda: ops.permute(X, MAP, num_experts=2, align=2.0), "align = 2.0", "positive int"),
    "x of three dims": (lambda: ops.permute(X[None], MAP, num_experts=2), "x", "[tokens, width]"),
    "probs": (lambda: ops.permute(X, MAP, num_experts=2, probs=torch.zeros(3, 3)), "probs", "one probability per slot"),
    "probs on the way back": (lambda: ops.unpermute(ROWS, PERMUTED, torch.zeros(6)), "probs", "one probability per slot"),
    "rows": (lambda: ops.unpermute(ROWS[:5], PERMUTED), "unpermute: rows [5, 8]", "6 slots"),
    "rows between": (lambda: ops.unpermute(torch.zeros(7, 8), PERMUTED), "unpermute: rows [7, 8]", "6 slots"),
    "rows of another alignment": (lambda: ops.unpermute(torch.zeros(12, 8), PERMUTED), "unpermute: rows [12, 8]", "as many as permute made, 6"),
    "no Permuted": (lambda: ops.unpermute(ROWS, MAP), "permuted = Tensor", "what permute returned"),
    "row_map": (lambda: ops.unpermute(ROWS, PERMUTED._replace(row_map=MAP)), "row_map", "to two slots"),
    "row_map too far": (lambda: ops.unpermute(ROWS, PERMUTED._replace(row_map=PERMUTED.row_map + 1)), "row_map reaches row 6", "[0, 6)"),
    "row_map below -1": (lambda: ops.unpermute(ROWS, PERMUTED._replace(row_map=PERMUTED.row_map - 6)), "row_map reaches row -6", "or be -1"),
    "a row without a slot": (lambda: ops.unpermute(ROWS, PERMUTED._replace(row_map=PERMUTED.row_map - 1)), "row_map and counts", "row 5"),
    "a slot's row in the padding": (lambda: ops.unpermute(PADDED.rows, PADDED._replace(row_map=PADDED.row_map + 1)), "row_map and counts", "row 0"),
    "counts": (lambda: ops.unpermute(ROWS, PERMUTED._replace(counts=PERMUTED.counts + 1)), "counts[0] = 7", "6 rows"),
    "offsets of permute": (lambda: ops.unpermute(ROWS, PERMUTED._replace(offsets=torch.tensor([6, 5]).int())), "offsets[1] = 5 after 6", "must not decrease"),
    "offsets that fall": (lambda: ops.grouped_matmul(ROWS, W, torch.tensor([4, 2]).int()), "offsets[1] = 2 after 4", "must not decrease"),
    "negative offset": (lambda: ops.grouped_matmul(ROWS, W, torch.tensor([-1, 2]).int()), "offsets[0] = -1 after 0", "must not decrease"),
    "offsets too far": (lambda: ops.grouped_matmul(ROWS, W, ends(4, 3)), "offsets[-1] = 7", "beyond the 6 rows"),
    "offsets off the alignment": (lambda: ops.grouped_matmul(ROWS, W, ends(2, 3), align=2), "offsets[1] = 5", "multiple of align = 2"),
    "no alignment": (lambda: ops.grouped_matmul(ROWS, W, ENDS, align=0), "align = 0", "positive int"),
    "offsets of int64": (lambda: ops.grouped_matmul(ROWS, W, ENDS.long()), "offsets", ".int()"),
    "offsets of other experts": (lambda: ops.grouped_matmul(ROWS, W, ends(1, 1, 1)), "offsets", "int32 [2]"),
    "offsets with a 0 in front": (lambda: ops.grouped_matmul(ROWS, W, torch.tensor([0, 2, 4]).int()), "offsets = int32[3]", "int32 [2]", "drop the leading 0, pass offsets[1:]"),
    "offsets of int64 with a 0": (lambda: ops.grouped_matmul(ROWS, W, torch.tensor([0, 2, 4])), "offsets = int64[3]", "drop the leading 0", ".int()"),
    "weight of two dims": (lambda: ops.grouped_matmul(ROWS, W[0], ENDS), "weight", "[experts, out_features, in_features]"),
    "weight turned": (lambda: ops.grouped_matmul(ROWS, W.transpose(1, 2), ENDS), "x = float32[t, 8]", "weight float32[2, 8, 4], which is [experts, out, in]", "pass w.transpose(1, 2)"),
    "widths": (lambda: ops.grouped_matmul(ROWS[:, :5], W, ENDS), "x", "[rows, 8]", "which is [experts, out, in]"),
    "dtypes": (lambda: ops.grouped_matmul(ROWS.bfloat16(), W, ENDS), "dtype of weight", "cast one"),
    "topk": (lambda: ops.router(LOGITS, topk=5), "topk = 5", "1 .. 4"),
    "score": (lambda: ops.router(LOGITS, topk=2, score_function="sinkhorn"), "score_function = sinkhorn", "softmax, sigmoid"),
    "pre_softmax": (lambda: ops.router(LOGITS, topk=2, score_function="sigmoid", pre_softmax=True), "pre_softmax", "no meaning with sigmoid"),
    "scaling": (lambda: ops.router(LOGITS, topk=2, scaling_factor=0.0), "scaling_factor", "must not be 0"),
    "one of the groups": (lambda: ops.router(LOGITS, topk=2, num_groups=2), "num_groups, group_topk", "come together"),
    "uneven groups": (lambda: ops.router(LOGITS, topk=2, num_groups=3, group_topk=1), "num_groups = 3", "divides the 4 experts"),
    "groups kept": (lambda: ops.router(LOGITS, topk=2, num_groups=2, group_topk=3), "group_topk = 3", "1 .. 2"),
    "too few experts left": (lambda: ops.router(LOGITS, topk=3, num_groups=2, group_topk=1), "topk = 3", "hold 2 experts"),
    "bias with softmax": (lambda: ops.router(LOGITS, topk=2, expert_bias=torch.zeros(4)), "expert_bias", "sigmoid"),
    "bias of other experts": (lambda: ops.router(LOGITS, topk=2, score_function="sigmoid", expert_bias=torch.zeros(3)), "expert_bias", "[4]"),
    "padding": (lambda: ops.z_loss(LOGITS, padding_mask=torch.zeros(3)), "padding_mask", "bool [t]"),
    "padding of other tokens": (lambda: ops.tokens_per_expert(MAP, num_experts=2, padding_mask=torch.zeros(4, dtype=torch.bool)), "padding_mask", "bool [t]"),
    "counts of other experts": (lambda: ops.load_balancing_loss(LOGITS, torch.zeros(1, 3), topk=2), "tokens_per_expert", "[sequences, 4]"),
    "total": (lambda: ops.load_balancing_loss(LOGITS, torch.zeros(1, 4), topk=2, total_tokens=torch.zeros(2)), "total_tokens", "[1]"),
    "coefficient": (lambda: ops.z_loss(LOGITS, coefficient=NAN), "coefficient", "finite"),
    "tokens and slots beyond int32": (lambda: ops.permute(torch.empty(2**30, 1, device="meta"), torch.empty(2**30, 2, dtype=torch.int32, device="meta"), num_experts=2), "2147483648 rows", "int32"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_what_breaks_a_rule_is_refused_by_name(what):
    call, *words = BAD[what]
    with pytest.raises((ValueError, TypeError)) as info:
        call()
    for word in words:
        assert word in str(info.value), f"{word!r} is not in: {info.value}"


def test_experts_that_a_mask_hides_are_chosen_from_the_kept_groups():
    hidden = float("-inf")
    logits = torch.tensor([[hidden, hidden, 1.0, hidden, 2.0, hidden]])
    probs, experts = ops.router(logits, topk=3, num_groups=3, group_topk=2)
    assert experts.tolist() == [[4, 2, 3]] and probs[0, 2] == 0


def test_an_unhashable_argument_is_refused_by_name():
    with pytest.raises(TypeError, match=r"permute: num_experts = \[2\]: must be an immutable value"):
        ops.permute(X, MAP, num_experts=[2])


def test_rules_of_the_backward_ops_hold_in_the_builder_too():
    b = GraphBuilder()
    dy, x, o = (
        b.input(n, TensorSpec(s, d))
        for n, s, d in (("dy", (6, 4), "float32"), ("x", (5, 8), "float32"), ("o", (2,), "int32"))
    )
    with pytest.raises(GraphError, match=r"grouped_matmul_wgrad: dy .* as many rows"):
        b.op("grouped_matmul_wgrad", dy=dy, x=x, offsets=o)
    with pytest.raises(GraphError, match=r"grouped_matmul_wgrad: align = 0: must be a positive int"):
        b.op("grouped_matmul_wgrad", dy=dy, x=dy, offsets=o, align=0)


INDEXED = {
    "sdpa": lambda: ops.attention(*(torch.zeros(5, 2, 8),) * 3, causal=True, cu_seqlens_q=ends(3, 3), cu_seqlens_k=ends(3, 3)),
    "rope": lambda: ops.rope(torch.zeros(1, 2, 1, 4), torch.zeros(3, 2), torch.zeros(3, 2), positions=torch.tensor([0, 3])),
    "cross_entropy": lambda: ops.cross_entropy(torch.zeros(2, 3), torch.tensor([0, 3])),
    "linear_cross_entropy": lambda: ops.linear_cross_entropy(torch.zeros(2, 4), torch.zeros(3, 4), torch.tensor([0, 3])),
    "group_by_expert": BAD["expert behind the last"][0], "tokens_per_expert": BAD["counted expert"][0],
    "grouped_matmul": BAD["offsets that fall"][0], "unpermute": BAD["row_map"][0],
}  # fmt: skip


@pytest.mark.parametrize("name", INDEXED)
def test_values_that_may_not_be_read_are_not_and_others_are_refused_in_one_place(name, monkeypatch):
    called = []
    with monkeypatch.context() as m, contextlib.suppress(TypeError):
        m.setattr(Runner, "__call__", lambda self, *tensors, sink=None: called.append((self, tensors)))
        INDEXED[name]()
    ((runner, tensors),) = called
    checks = runner.prepared(tensors).checks
    with pytest.raises(ValueError, match="must"):
        checks(tensors)
    monkeypatch.setattr(runner_module, "readable", lambda t: False)
    checks(tensors)


@pytest.mark.parametrize("check", [False, True])
def test_values_on_a_gpu_are_read_with_layerplan_check_alone(check, monkeypatch):
    monkeypatch.setattr(runner_module, "settings", lambda: Settings(check=check))
    there = {d: types.SimpleNamespace(is_meta=d == "meta", is_cuda=d == "cuda") for d in ("cpu", "meta", "cuda")}
    assert {d: runner_module.readable(t) for d, t in there.items()} == {"cpu": True, "meta": False, "cuda": check}


def test_every_op_that_reads_indices_says_in_the_table_what_they_may_be():
    table = op_table()
    indices = {name for name, op in table.items() if op.kind != "collective" and not name.endswith(("_bwd", "_dgrad", "_wgrad"))
               and {p.name for p in op.inputs} & {"cu_seqlens_q", "positions", "targets", "expert_map", "offsets"}}  # fmt: skip
    assert indices - {"shard_targets"} == {n for n in indices if table[n].check is not None}
    assert indices - {"shard_targets", "shard_loss", "permute"} == set(INDEXED)
