"""Every op, forward and backward, on every GPU engine: against float64, with odd sizes, strides, offsets and no
rows."""

import pytest
import torch

from layerplan.integration import ops
from layerplan.integration.engines.arch import Arch
from layerplan.integration.planner.planner import PlanError
from layerplan.integration.planner.policy import Policy
from tests import oracle
from tests.cases.catalogue import BY_ID, CASES, LARGE, Declined, declined, engines_for, hold
from tests.cases.taken import must_take

# a generated kernel costs seconds a region: each kind of region once
GENERATED = ("rms_norm-odd_769", "rms_norm-fp32_weight_all", "layer_norm-bias_zero_centred", "rms_norm-no_rows",
             "swiglu-clamp_weights", "swiglu-large", "geglu-plain", "rope-partial_interleaved", "rope-batch_positions",
             "bias_dropout_add-bias", "cross_entropy-plain", "cross_entropy-large")  # fmt: skip
PLAIN = [(c.id, d, e) for c in (*CASES, *LARGE) for d in c.dtypes for e in engines_for(c.op, "cuda", inductor=False)
         if not (e.startswith("reference/") and c in LARGE)]  # fmt: skip
ROWS = PLAIN + [(c, torch.bfloat16, "pointwise/inductor") for c in GENERATED]
PLACED = [(c.id, how, e) for c in CASES for how in ("strided", "offset")
          for e in engines_for(c.op, "cuda", inductor=False) if not e.startswith("reference/")]  # fmt: skip
PLACED += [(c, how, "pointwise/inductor") for c in GENERATED[:10] for how in ("strided", "offset")]


def _run(name, dtype, engine, how="plain"):
    try:
        # torch's attention has no gradient from the LSE: it is asked for the output's alone
        hold(BY_ID[name], "cuda", dtype, how, engine=engine, upto=1 if engine.startswith("attention/torch") else None)
    except Declined as reason:
        if "LSE gradient" in str(reason):
            return hold(BY_ID[name], "cuda", dtype, how, engine=engine, upto=1)
        assert not engine.startswith("reference/"), f"the reference must take everything: {reason}"
        assert not must_take(Arch.of_device(0).name, engine, name, dtype), f"{engine} took this before: {reason}"
        pytest.skip(f"{engine} declines: {reason}")


@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r[0]}-{str(r[1]).removeprefix('torch.')}-{r[2]}")
def test_engine_is_as_exact_as_pytorch_or_declines_with_a_reason(row):
    _run(*row)


@pytest.mark.parametrize("row", PLACED, ids="-".join)
def test_strided_and_offset_inputs_give_the_right_values_and_stay_untouched(row):
    name, how, engine = row
    _run(name, torch.bfloat16, engine, how)


def _attention(t):
    return ops.attention(*t, causal=True, policy=Policy(deterministic=True))


DETERMINISTIC = {
    "attention": (((2, 300, 8, 64),) * 3, _attention),
    "rms_norm": (((4097, 1024), (1024,)), lambda t: ops.rms_norm(*t, eps=1e-5, policy=Policy(deterministic=True))),
    "layer_norm": (((4097, 1024), (1024,)), lambda t: ops.layer_norm(*t, eps=1e-5, policy=Policy(deterministic=True))),
    "linear": (((4097, 512), (256, 512), (256,)), lambda t: ops.linear(*t, policy=Policy(deterministic=True))),
    "swiglu": (((1031, 1544),), lambda t: ops.swiglu(*t, policy=Policy(deterministic=True))),
}


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_deterministic_policy_gives_bitwise_equal_reruns(name):
    shapes, call = DETERMINISTIC[name]
    gen = torch.Generator().manual_seed(0)
    t = [torch.randn(s, generator=gen).to("cuda", torch.bfloat16).requires_grad_() for s in shapes]
    dout, first = None, None
    for run in range(5):
        out = call(t)
        dout = torch.randn(out.shape, generator=gen).to(out) if dout is None else dout
        oracle.poison(*t)
        got = (out, *torch.autograd.grad(out, t, dout))
        first = first or got
        for i, (a, b) in enumerate(zip(got, first, strict=True)):
            oracle.equal(a, b, f"{name}: result {i} of run {run}")


@pytest.mark.parametrize("engine", [e for e in engines_for("sdpa", "cuda") if not e.startswith("reference/")])
def test_attention_layouts_agree(engine):
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 130, h, 64, generator=gen).to("cuda", torch.bfloat16) for h in (4, 2, 2))
    try:
        a = ops.attention(q, k, v, causal=True, engine=engine)
    except PlanError as error:
        pytest.skip(f"{engine} declines: {declined(error)}")
    b = ops.attention(*(x.transpose(0, 1) for x in (q, k, v)), causal=True, layout="sbhd", engine=engine)
    oracle.equal(b.transpose(0, 1), a, engine)


def test_recompute_of_an_activation_is_bitwise_invisible():
    from layerplan.integration.graph.ir import GraphBuilder
    from layerplan.integration.planner.runner import Runner
    from layerplan.integration.planner.shapes import SpecMaker

    def build(x, g, w1, w2):
        b, s = GraphBuilder(), SpecMaker()
        given = (("x", x, "*t h!"), ("g", g, "h!"), ("w1", w1, "f! h!"), ("w2", w2, "h! e!"))
        i = [b.input(n, s(t, p), weight=n != "x") for n, t, p in given]
        y = b.op("rms_norm", x=i[0], weight=i[1])
        return b.build([b.op("linear", x=b.op("swiglu", x=b.op("linear", x=y, weight=i[2])), weight=i[3])])

    gen = torch.Generator().manual_seed(0)
    shapes = (300, 256), (256,), (512, 256), (256, 256)
    t = [torch.randn(s, generator=gen).to("cuda", torch.bfloat16).requires_grad_() for s in shapes]
    got = []
    for recompute in (frozenset(), frozenset({"swiglu", "rms_norm"})):
        out = Runner(build, ("x", "g", "w1", "w2"), policy=Policy(), recompute=recompute)(*t)
        got.append((out, *torch.autograd.grad(out.float().square().sum(), t)))
    for i, (a, b) in enumerate(zip(*got, strict=True)):
        oracle.equal(a, b, f"result {i}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_main_grad_is_accumulated_in_float32(dtype):
    from layerplan.integration.planner.runner import WeightGrads

    gen = torch.Generator().manual_seed(0)
    w = torch.nn.Parameter(torch.randn(264, 520, generator=gen).to("cuda", dtype))
    start = torch.randn(264, 520, generator=gen, dtype=torch.float64)
    w.main_grad, w.grad_added_to_main_grad = start.float().cuda(), False
    inner, buffer = oracle.guarded(w.main_grad, 4)
    w.main_grad = inner
    x = torch.randn(777, 520, generator=gen).to("cuda", dtype)
    dy = torch.randn(777, 264, generator=gen).to("cuda", dtype)
    ops.linear(x, w)  # builds the runner
    linears = (r for k, r in ops._runners.items() if k[0] == "linear" and r.names == ("x", "weight"))
    runner = next(r for r in linears if r.policy.engine is None)
    runner(x, w, sink=WeightGrads({1: w}, fuse=True)).backward(dy)
    truth = start.float().double() + dy.double().cpu().T @ x.double().cpu()
    # in the same dtype: tensor cores on 16-bit operands, whose float32 sums are coarser than a float32 product's
    peer = start.float().cuda() + torch.mm(dy.T, x, out_dtype=torch.float32)
    oracle.compare(w.main_grad, truth, peer, "main_grad")
    oracle.check_guards(inner, buffer, "main_grad")
    assert w.grad_added_to_main_grad is True
