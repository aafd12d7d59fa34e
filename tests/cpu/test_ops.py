"""Every op, forward and backward, on every CPU engine: against float64, with odd sizes, strides, offsets and no rows."""

import inspect
import math

import pytest
import torch

from layerplan.integration import ops
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


@pytest.mark.parametrize("case", [c for c in CASES if not c.id.endswith(("no_rows", "no_tokens"))], ids=lambda c: c.id)
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
    "bias_dropout_add": f"x residual * bias=None p=0.0 rng=None {ENGINE}",
    "cross_entropy": f"logits targets * ignore_index=-100 {ENGINE}",
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


def test_segments_may_be_none_at_all():
    x, cu = torch.randn(3, 2, 8), torch.tensor([0], dtype=torch.int32)
    out, lse = ops.attention(x, x, x, causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu, return_lse=True)
    assert not out.any() and bool((lse == float("-inf")).all())
