"""Every op, forward and backward, on every CPU engine: against float64, with odd sizes, strides, offsets and no rows."""

import inspect
import math

import pytest
import torch

from layerplan.integration import ops
from layerplan.integration.planner.policy import Policy
from tests import oracle
from tests.cases.catalogue import BY_ID, CASES, Declined, engines_for, hold
from tests.cases.taken import must_take

torch.set_num_threads(1)
ROWS = [(c.id, d, e) for c in (*CASES, BY_ID["attention-no_queries"], BY_ID["attention-no_keys"]) for d in c.dtypes for e in engines_for(c.op, "cpu", inductor=False)]


def _name(row):
    return f"{row[0]}-{str(row[1]).removeprefix('torch.')}-{row[2]}"


@pytest.mark.parametrize("row", ROWS, ids=_name)
def test_engine_is_as_exact_as_pytorch_or_declines_with_a_reason(row):
    name, dtype, engine = row
    try:
        # no engine but the reference has a gradient from the LSE: the others are asked for the output's alone
        hold(BY_ID[name], "cpu", dtype, engine=engine, upto=1 if engine.startswith("attention/") else None)
    except Declined as reason:
        assert not engine.startswith("reference/"), f"the reference must take everything: {reason}"
        assert not must_take("cpu", engine, name, dtype), f"{engine} took this before: {reason}"
        pytest.skip(f"{engine} declines: {reason}")


@pytest.mark.parametrize("how", ["strided", "offset"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_strided_and_offset_inputs_give_the_right_values_and_stay_untouched(case, how):
    hold(case, "cpu", torch.bfloat16, how)


@pytest.mark.parametrize("case", [c for c in CASES if c.diff and not c.id.endswith(("no_rows", "no_tokens"))], ids=lambda c: c.id)
def test_gradient_agrees_with_finite_differences(case):
    gen = torch.Generator().manual_seed(1)
    t = {n: x.double() if x.is_floating_point() else x for n, x in case.make(gen, torch.float64).items()}
    leaves = [t[n].requires_grad_() for n in case.diff]

    def function(*values):
        outs = case.ours({**t, **dict(zip(case.diff, values, strict=True))})
        return tuple(torch.where(torch.isfinite(o), o, 0.0) for o in outs if o.requires_grad)

    assert torch.autograd.gradcheck(function, leaves, fast_mode=True, nondet_tol=0.0)


def test_dropout_uses_philox_4x32_10():
    from layerplan.integration.graph.ops.elementwise import philox_uniform

    # Random123's known answers: counter and key all zero, and all ones in the words that our counter reaches
    zero = torch.zeros(1, dtype=torch.int64)
    words = (philox_uniform((4,), zero, zero).double() * 2**24).to(torch.int64).tolist()
    assert words == [0x6627E8D5 >> 8, 0xE169C58D >> 8, 0xBC57AC4C >> 8, 0x9B00DBD8 >> 8]


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_keeps_the_stated_share_scales_it_and_is_a_function_of_seed_and_offset(p):
    x, zero = torch.ones(64, 256), torch.zeros(64, 256)
    rng = torch.tensor([7]), torch.tensor([3])
    y = ops.bias_dropout_add(x, zero, p=p, rng=rng)
    kept = y != 0
    torch.testing.assert_close(y[kept], torch.full_like(y[kept], 1 / (1 - p)))
    share = float(kept.float().mean())
    # five standard deviations of a binomial
    assert abs(share - (1 - p)) < 5 * math.sqrt(p * (1 - p) / x.numel())
    oracle.equal(ops.bias_dropout_add(x, zero, p=p, rng=rng), y)
    other = ops.bias_dropout_add(x, zero, p=p, rng=(torch.tensor([7]), torch.tensor([4])))
    assert not torch.equal(other, y)


def test_dropout_gradient_uses_the_forward_mask():
    x = torch.randn(8, 16, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(16, dtype=torch.float64, requires_grad=True)
    rng = torch.tensor([1]), torch.tensor([2])
    y = ops.bias_dropout_add(x, torch.zeros_like(x), bias=bias, p=0.4, rng=rng)
    y.backward(torch.ones_like(y))
    mask = (y != 0).double() / 0.6
    torch.testing.assert_close(x.grad, mask)
    torch.testing.assert_close(bias.grad, mask.sum(0))


def test_attention_dropout_gradient_agrees_with_finite_differences():
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 5, h, 4, generator=gen, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
    rng = torch.tensor([5]), torch.tensor([9])
    assert torch.autograd.gradcheck(lambda *t: ops.attention(*t, causal=True, dropout=0.3, rng=rng), (q, k, v), fast_mode=True)


def test_layouts_of_attention_agree_bitwise():
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 6, h, 8, generator=gen) for h in (4, 2, 2))
    for engine in ("reference/eager", "attention/torch_cpu"):
        a = ops.attention(q, k, v, causal=True, engine=engine)
        b = ops.attention(*(x.transpose(0, 1) for x in (q, k, v)), causal=True, layout="sbhd", engine=engine)
        oracle.equal(b.transpose(0, 1), a, engine)


ENGINE = "engine=None policy=None"
NORM = f"x weight * eps bias=None residual=None zero_centered=False {ENGINE}"
GATED = f"gate_up * clamp=None row_weight=None {ENGINE}"
SIGNATURES = {
    "rms_norm": NORM,
    "layer_norm": NORM,
    "linear": f"x w bias=None * {ENGINE}",
    "rope": f"x cos sin * positions=None interleaved=False inverse=False {ENGINE}",
    "swiglu": GATED,
    "geglu": GATED,
    "gelu": GATED.replace("gate_up", "x"),
    "squared_relu": GATED.replace("gate_up", "x"),
    "quantize": "x * block scale=None dtype=torch.float8_e4m3fn layout='row' power_of_two=False transposed=False amax=False " + ENGINE,
    "dequantize": f"data scale_inv * block dtype=torch.bfloat16 layout='row' {ENGINE}",
    "bias_dropout_add": f"x residual * bias=None p=0.0 rng=None {ENGINE}",
    "cross_entropy": f"logits targets * ignore_index=-100 {ENGINE}",
    "linear_cross_entropy": f"x w targets * ignore_index=-100 {ENGINE}",
    "permute": f"x expert_map * num_experts probs=None align=1 {ENGINE}",
    "unpermute": f"rows permuted probs=None * {ENGINE}",
    "grouped_matmul": f"x w offsets * align=1 {ENGINE}",
    "router": "logits * topk score_function='softmax' pre_softmax=False num_groups=None group_topk=None scaling_factor=None "
              f"expert_bias=None {ENGINE}",
    "tokens_per_expert": f"expert_map * num_experts padding_mask=None sequences=1 {ENGINE}",
    "load_balancing_loss": "logits tokens_per_expert * topk score_function='softmax' coefficient=1.0 total_tokens=None padding_mask=None "
                           + ENGINE,
    "z_loss": f"logits * coefficient=1.0 padding_mask=None {ENGINE}",
    "attention": "q k v * causal window=(None,None) sink=None softmax_scale=None cu_seqlens_q=None cu_seqlens_k=None max_seqlen_q=None "
                 f"max_seqlen_k=None return_lse=False rng=None dropout=0.0 mask=None layout=None {ENGINE}",
}  # fmt: skip


def _signature(function):
    """Names in order, ``*`` before the first that is passed by name alone, defaults."""
    words, by_name = [], False
    for p in inspect.signature(function).parameters.values():
        assert p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY), f"{function.__name__}: {p}"
        if p.kind is p.KEYWORD_ONLY and not by_name:
            words.append("*")
            by_name = True
        words.append(p.name if p.default is p.empty else f"{p.name}={p.default!r}".replace(" ", ""))
    return " ".join(words)


def test_signatures_of_the_functional_api_are_frozen():
    functions = {n: f for n, f in vars(ops).items() if inspect.isfunction(f) and f.__module__ == ops.__name__ and not n.startswith("_")}
    found = {n: _signature(f) for n, f in functions.items() if "engine" in inspect.signature(f).parameters}
    assert found == SIGNATURES
    assert all(f.__name__ == n and f.__doc__ for n, f in functions.items())


# ---- bad input ------------------------------------------------------------------------------------------------------


def _refused(words, call, *args, error=ValueError, **kw):
    with pytest.raises(error) as info:
        call(*args, **kw)
    for word in words:
        assert word in str(info.value), f"{word!r} is not in: {info.value}"


def test_norm_refuses_a_weight_of_the_wrong_width_and_names_both():
    _refused(["weight", "[8]"], ops.rms_norm, torch.randn(2, 8), torch.ones(7), eps=1e-5)


def test_norm_refuses_integers_and_negative_eps():
    _refused(["floating-point"], ops.rms_norm, torch.ones(2, 8, dtype=torch.int64), torch.ones(8), eps=1e-5)
    _refused(["eps", "-1"], ops.rms_norm, torch.randn(2, 8), torch.ones(8), eps=-1.0)


def test_linear_refuses_mismatched_dtypes_and_sizes():
    _refused(["weight", "bfloat16", "float32"], ops.linear, torch.randn(2, 8), torch.randn(4, 8).bfloat16())
    _refused(["in_features"], ops.linear, torch.randn(2, 7), torch.randn(4, 8))


def test_devices_that_differ_are_named():
    _refused(["device", "meta", "cpu"], ops.linear, torch.randn(2, 8), torch.empty(4, 8, device="meta"))


def test_not_a_tensor_is_named():
    _refused(["weight", "list"], ops.linear, torch.randn(2, 8), [1.0], error=TypeError)


@pytest.mark.parametrize(("cu", "words"), [
    ([1, 3, 5], ["cu_seqlens_q[0] = 1", "must be 0"]),
    ([0, 4, 3], ["cu_seqlens_q[2] = 3", "decrease"]),
    ([0, 3, 6], ["cu_seqlens_q[-1] = 6", "5 tokens"]),
])  # fmt: skip
def test_cumulative_lengths_that_break_a_rule_are_refused(cu, words):
    x = torch.randn(5, 2, 8)
    c = torch.tensor(cu, dtype=torch.int32)
    _refused(words, ops.attention, x, x, x, causal=True, cu_seqlens_q=c, cu_seqlens_k=torch.tensor([0, 3, 5], dtype=torch.int32))


def test_segment_longer_than_max_seqlen_is_refused():
    x, cu = torch.randn(5, 2, 8), torch.tensor([0, 4, 5], dtype=torch.int32)
    _refused(["max_seqlen_q = 3", "segment 0"], ops.attention, x, x, x, causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu,
             max_seqlen_q=3, max_seqlen_k=4)  # fmt: skip


def test_cumulative_lengths_of_a_wrong_dtype_are_refused():
    x, cu = torch.randn(5, 2, 8), torch.tensor([0.0, 4.0, 5.0])
    _refused(["cu_seqlens_q", "int32"], ops.attention, x, x, x, causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu)


def test_packed_inputs_without_lengths_and_dense_inputs_with_them_are_refused():
    x, cu = torch.randn(5, 2, 8), torch.tensor([0, 5], dtype=torch.int32)
    _refused(["cu_seqlens"], ops.attention, x, x, x, causal=True)
    _refused(["packed"], ops.attention, x[None], x[None], x[None], causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu)


def test_attention_refuses_dropout_without_random_state_and_negative_windows():
    x = torch.randn(1, 5, 2, 8)
    _refused(["rng"], ops.attention, x, x, x, causal=True, dropout=0.1)
    _refused(["window"], ops.attention, x, x, x, causal=False, window=(-1, None))


@pytest.mark.parametrize("shape", [(2, 1, 5, 4), (1, 3, 5, 5), (5, 5)])
def test_attention_refuses_a_mask_of_the_wrong_shape(shape):
    x = torch.randn(1, 5, 2, 8)
    _refused(["mask"], ops.attention, x, x, x, causal=False, mask=torch.zeros(shape, dtype=torch.bool))


def test_attention_refuses_an_additive_mask():
    x = torch.randn(1, 5, 2, 8)
    _refused(["mask", "bool"], ops.attention, x, x, x, causal=False, mask=torch.zeros(1, 1, 5, 5))


def test_rope_refuses_short_tables_and_positions_outside_of_them():
    x, table = torch.randn(1, 5, 2, 8), torch.randn(4, 4)
    _refused(["4 positions", "5"], ops.rope, x, table, table)
    _refused(["positions", "[0, 4)"], ops.rope, x, table, table, positions=torch.tensor([0, 1, 2, 3, 4]))


def test_cross_entropy_refuses_targets_outside_of_the_classes():
    _refused(["targets", "[0, 3)"], ops.cross_entropy, torch.randn(2, 3), torch.tensor([0, 3]))


def test_forcing_an_engine_that_has_no_code_for_the_op_is_an_error():
    _refused(["attention/torch_cpu", "rms_norm"], ops.rms_norm, torch.randn(2, 8), torch.ones(8), eps=1e-5,
             engine="attention/torch_cpu")  # fmt: skip


def test_unknown_engine_is_refused_with_the_known_ones():
    _refused(["norm/fast", "norm/torch"], ops.rms_norm, torch.randn(2, 8), torch.ones(8), eps=1e-5, engine="norm/fast")


CU, X4, X3 = torch.tensor([0, 5], dtype=torch.int32), torch.zeros(1, 5, 2, 8), torch.zeros(5, 2, 8)
ONE, TWO = torch.tensor([1]), torch.tensor([1, 2])


def _attend(packed=False, **kw):
    x = X3 if packed else X4
    return ops.attention(x, x, x, **({"causal": True} | ({"cu_seqlens_q": CU, "cu_seqlens_k": CU} if packed else {}) | kw))


def _norm(eps=1e-5, **kw):
    return ops.rms_norm(torch.zeros(2, 8), torch.ones(8), eps=eps, **kw)


def _loss(ignored):
    return ops.cross_entropy(torch.zeros(2, 3), TWO, ignore_index=ignored)


def _add(**kw):
    return ops.bias_dropout_add(torch.zeros(2, 8), torch.zeros(2, 8), **kw)


def _rope(x=X4, **kw):
    return ops.rope(x, torch.zeros(5, 4), torch.zeros(5, 4), **kw)


PER_MODULE = {"*": "reference"}
NUMBERS = [None, "x", torch.tensor(1.0), float("nan"), float("inf"), [1.0]]
WRONG = [
    *(("policy", "modules", f, {"policy": p}) for f in (_attend, _norm, _add, _rope) for p in (PER_MODULE, Policy(per_module=PER_MODULE))),
    *(("window", "tuple", _attend, {"window": w, "packed": p}) for w in ([1, 0], 3, (1, 2, 3), (1.5, 0), None) for p in (False, True)),
    *(("max_seqlen_q", "an int", _attend, {"packed": True, "max_seqlen_q": m}) for m in (5.0, torch.tensor(5), -1, [5])),
    *((f"cu_seqlens_{s}", "torch.Tensor", _attend, {"packed": True, f"cu_seqlens_{s}": [0, 2, 5]}) for s in "qk"),
    *(("softmax_scale", "", _attend, {"softmax_scale": s}) for s in NUMBERS[1:]), *(("eps", "", _norm, {"eps": e}) for e in NUMBERS),
    *(("clamp", "", lambda clamp: ops.swiglu(torch.zeros(2, 8), clamp=clamp), {"clamp": c}) for c in NUMBERS[1:]),
    *(("p =", "", _add, {"p": p}) for p in NUMBERS), *(("dropout", "", _attend, {"dropout": p}) for p in NUMBERS),
    *(("ignore_index", "", _loss, {"ignored": i}) for i in (None, 1.0, "a", ONE, [1])),
    *(("seed", "one element", f, {d: 0.1, "rng": r}) for f, d in ((_attend, "dropout"), (_add, "p")) for r in ((TWO, ONE), (ONE.int(), ONE))),
    *(("rng", "pair", f, {d: 0.1, "rng": 5}) for f, d in ((_attend, "dropout"), (_add, "p"))), ("rng", "ignored", _add, {"rng": (ONE, ONE)}),
    *(("causal", "", _attend, {"causal": c, "packed": p}) for c in ("no", None, ONE, [True]) for p in (False, True)),
    ("zero_centered", "True or False", _norm, {"zero_centered": "no"}), ("inverse", "True or False", _rope, {"inverse": "no"}),
    ("positions", "torch.Tensor", _rope, {"positions": [1]}), ("x has 5 dims", "[b, s, h, d]", _rope, {"x": X4[None]}),
    ("cos", "share a shape", lambda: ops.rope(X4, torch.tensor(1.0), torch.tensor(1.0)), {}),
    ("q", "torch.Tensor", lambda: ops.attention([1], X4, X4, causal=True), {}), ("x", "torch.Tensor", _rope, {"x": [1]}),
    ("head dim", "at least 1", lambda: ops.attention(X4[..., :0], X4[..., :0], X4, causal=True), {}),
    *(("x", "rank 1", f, {}) for f in (lambda: ops.rms_norm(torch.tensor(1.0), torch.ones(8), eps=1e-5), lambda: ops.swiglu(torch.tensor(1.0)))),
    ("x", "one dim", lambda: ops.bias_dropout_add(torch.tensor(1.0), torch.tensor(1.0), bias=torch.ones(8)), {}),
    ("logits", "one class", lambda: ops.cross_entropy(torch.zeros(2, 0), torch.tensor([-100, -100])), {}),
    ("engine", "immutable", _norm, {"engine": ["norm/torch"]}),
]  # fmt: skip


@pytest.mark.parametrize("row", WRONG, ids=lambda r: "-".join([r[0], *(type(v).__name__ for v in r[3].values())]))
def test_an_argument_of_a_wrong_type_is_refused_by_name_and_its_runner_is_not_kept(row):
    field, rule, call, kw = row
    kept = len(ops._runners)
    _refused([field, rule], call, error=(ValueError, TypeError), **kw)
    assert len(ops._runners) == kept


@pytest.mark.parametrize("engine", [None, "reference/eager", "linear/torch"])
@pytest.mark.parametrize(("x", "w"), [((3, 2, 0), (5, 0)), ((3, 2, 4), (0, 4)), ((3, 0), (5, 0)), ((0, 4), (5, 4)), ((2, 0, 4), (5, 4))])
def test_linear_with_bias_takes_empty_sizes_forward_and_backward(x, w, engine):
    gen = torch.Generator().manual_seed(0)
    x, w, bias = (torch.randn(*s, generator=gen, requires_grad=True) for s in (x, w, w[:1]))
    y = ops.linear(x, w, bias, engine=engine)
    assert torch.equal(y, bias.expand(*x.shape[:-1], -1)), "a sum over nothing"
    y.backward(torch.full_like(y, 2.0))
    assert torch.equal(bias.grad, torch.full_like(bias, 2.0 * math.prod(x.shape[:-1])))
    assert x.grad.shape == x.shape and w.grad.shape == w.shape and not x.grad.any() and not w.grad.any()


def test_a_call_on_meta_tensors_does_not_serve_one_that_mixes_devices():
    x, w = torch.empty(2, 8, device="meta"), torch.empty(4, 8, device="meta")
    assert ops.linear(x, w).is_meta
    _refused(["weight on cpu", "x on meta"], ops.linear, x, torch.empty(4, 8))


@pytest.mark.parametrize("port", ["cos", "sin"])
def test_a_rotation_table_that_requires_a_gradient_is_refused_unless_nothing_is_recorded(port):
    gen = torch.Generator().manual_seed(0)
    t = {"x": torch.randn(1, 5, 2, 8, generator=gen), "cos": torch.randn(5, 4, generator=gen), "sin": torch.randn(5, 4, generator=gen)}
    want = ops.rope(**t)
    t[port].requires_grad_()
    for x in (t["x"], t["x"].clone().requires_grad_()):
        with torch.no_grad():
            assert torch.equal(ops.rope(x, t["cos"], t["sin"]), want)
        _refused([f"{port} requires a gradient", f"pass {port}.detach()"], ops.rope, x, t["cos"], t["sin"])
        assert torch.equal(ops.rope(x, t["cos"].detach(), t["sin"].detach()), want)


def test_rows_of_no_segment_give_nothing_to_a_sink_whatever_they_hold():
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(6, h, 8, generator=gen, dtype=torch.float64) for h in (4, 2, 2))
    cu_q, cu_k = torch.tensor([0, 2, 4]), torch.tensor([0, 3, 3])  # the second segment sees the sink alone
    sink = torch.randn(4, generator=gen, dtype=torch.float64, requires_grad=True)
    q[4:] = float("nan")

    def run(q):
        return ops.attention(q, k, v, causal=False, sink=sink, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, return_lse=True)

    out, lse = run(q)
    assert not out[2:].any() and bool((lse[:, 4:] == float("-inf")).all()) and torch.equal(lse[:, 2:4], sink.detach()[:, None].expand(-1, 2))
    (with_tail,) = torch.autograd.grad((out.sum(), lse[:, :4].sum()), sink)
    (rows_alone,) = torch.autograd.grad(sum(t.sum() for t in run(q[:4])), sink)
    torch.testing.assert_close(with_tail, rows_alone, rtol=1e-13, atol=0)
    assert rows_alone.all(), "the rows of the second segment pass the LSE's gradient on"
    (tail,) = torch.autograd.grad(run(q)[1][:, 4:].sum(), sink)
    assert not tail.any()


def test_segments_may_be_none_at_all():
    x, cu = torch.randn(3, 2, 8), torch.tensor([0], dtype=torch.int32)
    out, lse = ops.attention(x, x, x, causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu, return_lse=True)
    assert not out.any() and bool((lse == float("-inf")).all())


@pytest.mark.parametrize(("right", "wrong"), [({"num_experts": 4}, {"num_experts": 4.0}), ({"num_experts": 1}, {"num_experts": True}),
                                              ({"num_experts": 4, "align": 1}, {"num_experts": 4, "align": True})])  # fmt: skip
def test_a_number_of_another_type_is_refused_behind_a_right_call_as_before_one(right, wrong):
    x, expert_map, offsets = torch.randn(4, 8), torch.zeros(4, 2, dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
    calls = [lambda **a: ops.permute(x, expert_map, **a)]
    calls += [] if "align" in right else [lambda **a: ops.tokens_per_expert(expert_map, **a)]
    calls += [lambda num_experts, align: ops.grouped_matmul(x, torch.randn(1, 8, 8), offsets, align=align)] if "align" in right else []
    for call in calls:
        for _ in range(2):
            call(**right)
            with pytest.raises((ValueError, TypeError)):
                call(**wrong)


def test_a_flag_of_another_type_is_refused_behind_a_right_call():
    x, w, q = torch.randn(4, 8), torch.ones(8), torch.randn(1, 4, 2, 8)
    for flag in (True, False):
        ops.rms_norm(x, w, eps=1e-5, zero_centered=flag), ops.attention(q, q, q, causal=flag)
        with pytest.raises((ValueError, TypeError)):
            ops.rms_norm(x, w, eps=1e-5, zero_centered=int(flag))
        with pytest.raises((ValueError, TypeError)):
            ops.attention(q, q, q, causal=int(flag))
