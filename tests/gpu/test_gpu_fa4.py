"""flash-attn-4's kernels beyond the shared cases: more than one tile in every direction, head dims and groups of all
kinds, sinks and LSE gradients, token counts that compile nothing, no host sync, capture, and reruns of the
deterministic backward."""

import dataclasses

import pytest
import torch

from layerplan.integration import ops
from layerplan.integration.engines.manifest import BY_ID
from layerplan.integration.planner.policy import Policy
from layerplan.kernels.attention import fa4_code
from tests import oracle
from tests.cases.catalogue import Declined, _attention_case, hold, plain_attention
from tests.gpu.capture import captured

ENGINES = [e for e in BY_ID if e.startswith("attention/fa4")]
BF16 = torch.bfloat16
pytestmark = pytest.mark.skipif(
    BY_ID["attention/fa4"].absent() is not None, reason=str(BY_ID["attention/fa4"].absent())
)

CASES = [
    _attention_case("sink", (2, 300, 8, 64), (2, 300, 2, 64), causal=True, sink=True),
    _attention_case("sink_window", (1, 300, 4, 128), (1, 420, 4, 128), causal=True, window=(130, None), sink=True),
    _attention_case("sink_no_keys_seen", (1, 300, 4, 64), (1, 40, 4, 64), causal=True, sink=True),
    _attention_case("group_3", (1, 300, 6, 128), (1, 300, 2, 128), causal=True),
    _attention_case("group_5_one_key_head", (2, 200, 5, 64), (2, 333, 1, 64)),
    _attention_case("group_16", (1, 200, 16, 128), (1, 200, 1, 128), causal=True),
    _attention_case("window_left", (1, 400, 4, 128), (1, 400, 2, 128), window=(70, None)),
    _attention_case("window_right", (1, 400, 4, 64), (1, 400, 4, 64), window=(None, 30)),
    _attention_case("window_both_192", (1, 300, 2, 192), (1, 300, 2, 192), window=(100, 50)),
    _attention_case("causal_long_keys", (1, 200, 4, 128), (1, 900, 2, 128), causal=True),
    _attention_case("one_query", (3, 1, 8, 128), (3, 700, 2, 128), causal=True),
    *(_attention_case(f"d_{d}", (1, 300, 4, d), (1, 300, 2, d), causal=True)
      for d in (8, 40, 72, 96, 104, 160, 192, 208, 256)),
    _attention_case("mla", (1, 520, 4, 192), (1, 520, 4, 192), 128, causal=True),
    _attention_case("small_values", (1, 300, 4, 128), (1, 300, 4, 128), 64, causal=True),
    _attention_case("no_mask_128", (1, 300, 4, 128), (1, 300, 4, 128)),
    _attention_case("no_mask_96", (1, 300, 4, 96), (1, 300, 4, 96)),
    _attention_case("no_mask_192", (1, 300, 4, 192), (1, 300, 4, 192)),
    _attention_case("d_80_packed", (300, 4, 80), (300, 4, 80), cu=([0, 100, 290], [0, 150, 300]), causal=True),
    _attention_case("packed_sink", (700, 8, 64), (700, 2, 64), cu=([0, 130, 131, 500, 640],) * 2, causal=True,
                    sink=True, lse=False),
    _attention_case("packed_window", (700, 4, 128), (900, 4, 128), cu=([0, 200, 200, 700], [0, 300, 301, 880]),
                    causal=True, window=(90, None)),
    _attention_case("packed_d_256", (400, 4, 256), (400, 2, 256), cu=([0, 3, 250, 400], [0, 3, 250, 400]), causal=True),
    _attention_case("packed_all", (400, 4, 96), (300, 4, 96), cu=([0, 100, 390], [0, 150, 300])),
]  # fmt: skip


# each kind of code compiles for some seconds: all of them once, the other dtype and the ordered sums on a few
SINKS = [c for c in CASES if "sink" in c.diff]
ROWS = [(dataclasses.replace(c, diff=("q", "k", "v")), ENGINES[0], BF16) for c in CASES]
ROWS += [(c, e, torch.float16) for c, e, _ in ROWS[:4]]
ORDERED = ("sink", "group_3", "window_left", "causal_long_keys", "d_256", "mla")
ROWS += [(c, ENGINES[1], d) for c, _, d in ROWS[: len(CASES)] if c.id.endswith(ORDERED)]


@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r[0].id}-{r[1]}-{str(r[2]).removeprefix('torch.')}")
def test_engine_is_as_exact_as_pytorch(row):
    case, engine, dtype = row
    try:
        hold(case, "cuda", dtype, engine=engine)
    except Declined as reason:
        pytest.skip(f"{engine} declines: {reason}")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", SINKS, ids=lambda c: c.id)
def test_gradient_of_the_sink_is_within_the_rounding_of_the_output(case, engine):
    hold_sink(case, "cuda", engine)


def hold_sink(case, device, engine):
    """dsink = -sum over rows of p_sink * delta, delta = rowsum(dO * O), as the backward of FlashAttention has it: O is
    the output as it was rounded. A rounding to bfloat16 moves a value by 2^-8 of it at most; O is rounded once and so
    is every weight of its sum of p * v, which makes 2^-7 of A = sum of p * |v|. So dsink may be off by the sum of
    p_sink * rowsum(|dO| * A) times 2^-7, and by float32's own rounding, far below. PyTorch's eager softmax never rounds
    O before, and is no measure."""
    gen = torch.Generator().manual_seed(1)
    inputs = case.make(gen, BF16)
    exact = {n: x.double().requires_grad_(n == "sink") if x.is_floating_point() else x for n, x in inputs.items()}
    out, lse = plain(case, exact)
    dout = torch.randn(out.shape, generator=gen).to(BF16)
    (truth,) = torch.autograd.grad(out, exact["sink"], dout.double())
    spread, _ = plain(case, {**exact, "v": exact["v"].abs()})
    per_row = (dout.double().abs() * spread).sum(-1).transpose(-1, -2)  # as the LSE: [b, h, s] or [h, t]
    # rows that belong to no segment have no weights: their LSE is -inf
    p_sink = torch.where(lse.isinf(), 0.0, torch.exp(exact["sink"].unsqueeze(-1) - lse))
    bound = (p_sink * per_row).sum(-1).reshape(-1, truth.numel()).sum(0) * 2**-7
    t = {n: x.to(device).requires_grad_(n == "sink") for n, x in inputs.items()}
    got = case.ours(t, engine=engine)[0]
    (dsink,) = torch.autograd.grad(got, t["sink"], dout.to(device))
    off = (dsink.double().cpu() - truth).abs()
    assert bool((off <= bound).all()), f"{case.id}: off by {off.tolist()}, at most {bound.tolist()}"


def plain(case, t):
    """(out, LSE) of a case in plain PyTorch, whatever the case itself compares."""
    window = {"sink_window": (130, None)}.get(case.id.removeprefix("attention-"), (None, None))
    out, lse = plain_attention(t, causal=True, window=window)
    return out, lse.detach()


def _inputs(*shapes, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=gen).to("cuda", BF16).requires_grad_() for s in shapes]


def _packed(q, k, v, cu):
    segments = dict(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=512, max_seqlen_k=512)
    return ops.attention(q, k, v, causal=True, **segments, engine="attention/fa4")


def test_token_counts_compile_nothing():
    before = None
    for s in (300, 2, 63, 64, 65, 127, 128, 129, 1025):
        case = _attention_case(f"{s}", (2, s, 4, 64), (2, s + 3, 2, 64), causal=True)
        hold(case, "cuda", BF16, engine="attention/fa4")
        before = before or len(fa4_code._compiled)
        assert len(fa4_code._compiled) == before, f"{s} tokens compiled something"


def test_packed_launches_wait_for_nothing():
    q, k, v = _inputs((512, 8, 128), (512, 2, 128), (512, 2, 128))
    cu = torch.tensor([0, 100, 100, 480], dtype=torch.int32, device="cuda")
    dout = torch.randn(512, 8, 128, device="cuda", dtype=BF16)
    torch.autograd.grad(_packed(q, k, v, cu), (q, k, v), dout)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(_packed(q, k, v, cu), (q, k, v), dout)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_one_captured_graph_serves_other_segments():
    q, k, v = _inputs((512, 8, 128), (512, 2, 128), (512, 2, 128))
    cu = torch.tensor([0, 100, 300, 512, 512], dtype=torch.int32, device="cuda")
    dout = torch.randn(512, 8, 128, device="cuda", dtype=BF16)

    def step():
        out = _packed(q, k, v, cu)
        return (out, *torch.autograd.grad(out, (q, k, v), dout))

    replay = captured(step)
    for ends in ([0, 1, 7, 7, 7], [0, 128, 256, 384, 512], [0, 0, 512, 512, 512], [0, 50, 130, 400, 411]):
        cu.copy_(torch.tensor(ends, dtype=torch.int32))
        for i, (a, b) in enumerate(zip(replay(), step(), strict=True)):
            what = f"{ends}, result {i}"
            assert not a[ends[-1] :].any(), f"{what}: rows behind the last segment"
            near = 2 * oracle.ulp(BF16, float(b.abs().max()))  # sums by atomics: a rounding apart
            torch.testing.assert_close(a, b, atol=near, rtol=2e-2, msg=lambda m, what=what: f"{what}: {m}")


REPEATED = {
    "causal": (((2, 700, 16, 128), (2, 700, 2, 128), (2, 700, 2, 128)), dict(causal=True)),
    "all": (((2, 700, 8, 64), (2, 500, 8, 64), (2, 500, 8, 64)), dict(causal=False)),
    "window": (((1, 900, 8, 128), (1, 900, 4, 128), (1, 900, 4, 128)), dict(causal=True, window=(200, None))),
    "window_both": (((1, 900, 8, 64), (1, 900, 4, 64), (1, 900, 4, 64)), dict(causal=False, window=(100, 200))),
    "mla": (((1, 700, 8, 192), (1, 700, 8, 192), (1, 700, 8, 128)), dict(causal=True)),
    "d_256": (((1, 500, 8, 256), (1, 500, 2, 256), (1, 500, 2, 256)), dict(causal=True)),
    "short_keys": (((1, 500, 8, 128), (1, 60, 2, 128), (1, 60, 2, 128)), dict(causal=True)),
    "packed": (((900, 16, 128), (900, 2, 128), (900, 2, 128)), dict(causal=True, cu=[0, 300, 300, 301, 800])),
}  # fmt: skip


@pytest.mark.parametrize("name", REPEATED)
def test_reruns_of_the_deterministic_engine_are_bitwise_equal(name):
    shapes, options = REPEATED[name]
    t = _inputs(*shapes)
    cu = options.get("cu")
    extra = {} if cu is None else {f"cu_seqlens_{s}": torch.tensor(cu, dtype=torch.int32, device="cuda") for s in "qk"}
    given = {k: v for k, v in options.items() if k != "cu"}
    dout, first = None, None
    for run in range(10):
        policy = Policy(deterministic=True, engine="attention/fa4_deterministic")
        out = ops.attention(*t, **given, **extra, policy=policy)
        dout = torch.randn_like(out) if dout is None else dout
        oracle.poison(*t)
        got = (out, *torch.autograd.grad(out, t, dout))
        first = first or got
        for i, (a, b) in enumerate(zip(got, first, strict=True)):
            oracle.equal(a, b, f"{name}: result {i} of run {run}")
