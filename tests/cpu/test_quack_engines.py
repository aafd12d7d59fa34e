"""The engines on quack-kernels: what they decline, as data; their host code on a double of the kernels; what compiles
for sm_90."""

import inspect
import os
import subprocess
import sys

import pytest
import torch

from layerplan.integration import ops
from layerplan.integration.engines.arch import ARCHS
from layerplan.integration.engines.contract import BuildContext, Decline, Offer
from layerplan.integration.engines.manifest import BY_ID, MANIFEST
from layerplan.integration.engines.packages import locate
from layerplan.integration.graph.ir import Dim
from layerplan.integration.planner.cover import region_of
from layerplan.integration.planner.planner import PlanError, plan
from layerplan.integration.planner.policy import Policy
from layerplan.integration.planner.runner import Runner, WeightGrads
from tests import oracle
from tests.cases import faults, quack_double
from tests.cases.catalogue import CASES, LARGE, Declined, hold
from tests.cases.graphs import mlp
from tests.cases.quack_compile import (
    TOKENS,
    backward,
    grouped,
    grouped_wgrad,
    linear,
    loss,
    norm,
    rope,
    swiglu_chain,
    wgrad,
)

torch.set_num_threads(1)
QUACK = [e for e in MANIFEST if "quack" in e.needs]
F32, BF16 = torch.float32, torch.bfloat16
# cases that an engine declines, by dtype; every other one must run
DECLINED = {
    ("norm/quack", F32): {"rms_norm-one_wide", "layer_norm-one_wide"},
    ("norm/quack", BF16): {
        f"{n}-{c}" for n in ("rms_norm", "layer_norm") for c in ("plain", "one_wide", "odd_769", "fp32_weight_all")
    },
    ("rope/quack", F32): {f"rope-{c}_positions" for c in ("packed", "batch", "shared")},
    ("rope/quack", BF16): {f"rope-{c}_positions" for c in ("packed", "batch", "shared")},
    ("loss/quack", BF16): {"cross_entropy-plain", "cross_entropy-batched_int32", "cross_entropy-no_tokens"},
    ("linear/quack", F32): {c.id for c in (*CASES, *LARGE) if c.op == "linear"},
    ("linear/quack", BF16): {"linear-odd_bias"},
    ("grouped_matmul/quack", F32): {c.id for c in (*CASES, *LARGE) if c.op == "grouped_matmul"},
    ("grouped_matmul/quack", BF16): {"grouped_matmul-odd"},
    ("linear_swiglu/quack", F32): {c.id for c in (*CASES, *LARGE) if c.op in ("linear", "swiglu")},
    ("linear_swiglu/quack", BF16): {c.id for c in (*CASES, *LARGE) if c.op in ("linear", "swiglu")},
}
FUSED = {c.id for c in (*CASES, *LARGE) if c.op in BY_ID["experts/quack"].ops}  # no single node
DECLINED |= {("experts/quack", d): FUSED for d in (F32, BF16)}
SOME = (*CASES, *(c for c in LARGE if c.op in ("rms_norm", "linear", "grouped_matmul")))
ROWS = [
    (c, d, how, e.id)
    for e in QUACK
    for c in SOME
    if c.op in e.ops
    for d in c.dtypes
    for how in ("plain", "strided", "offset")
    if how == "plain" or (c.id not in DECLINED.get((e.id, d), ()) and c in CASES)
]


# ---- what is declined -----------------------------------------------------------------------------------------------


def answer(engine, graph, arch="sm_90", nodes=None):
    return BY_ID[engine].load().match(region_of(graph, nodes or graph.nodes), ARCHS[arch])


def declines(engine, graph, *words, arch="sm_90", nodes=None):
    got = answer(engine, graph, arch, nodes)
    assert isinstance(got, Decline), f"{engine} offers {got}"
    for w in words:
        assert w in got.reason, got.reason


def offers(engine, graph, arch="sm_90", nodes=None):
    got = answer(engine, graph, arch, nodes)
    assert isinstance(got, Offer), f"{engine} declines: {got}"
    return got


def bwd(graph, needs=None):
    """(backward graph, its nodes that the engines take) of a graph of one node."""
    d = backward(graph, needs)
    return d, [n for n in d.nodes if n.op.endswith("_bwd")]


def test_norm_declines_float64_odd_narrow_and_wide_rows_with_reason():
    e = "norm/quack"
    declines(e, norm(dtype="float64"), "float64")
    declines(e, norm(width=769), "769", "even")
    declines(e, norm(width=1, dtype="float32"), "one element")
    declines(e, norm(width=Dim("h", 64)), "run time")
    declines(e, norm(width=65544), "65544", "65536")
    offers(e, norm(width=770))
    offers(e, norm(width=769, dtype="float32"))
    offers(e, norm(wdtype="float32", zero_centered=True))


def test_norm_declines_rows_beyond_the_shared_memory_of_an_arch_with_reason():
    e = "norm/quack"
    for arch, width in (("sm_80", 40960), ("sm_89", 24576)):  # a block keeps two stages of x and dy
        graph, nodes = bwd(norm(width=width))
        declines(e, graph, "shared memory", arch=arch, nodes=nodes)
        offers(e, norm(width=width), arch)
    declines(e, norm(width=32768, dtype="float32", residual=True), "16384")
    declines(e, norm(width=65536, dtype="float32"), "32768", arch="sm_120")
    offers(e, norm(width=65536, dtype="float32"))


def test_norm_backward_without_dx_is_declined_with_reason():
    graph, nodes = bwd(norm(), (False, True))
    declines("norm/quack", graph, "dx", nodes=nodes)
    graph, nodes = bwd(norm())
    got = offers("norm/quack", graph, nodes=nodes)
    assert got.launches == 3 and got.deterministic and got.workspace_bytes == 2 * 132 * 4096 * 4


def test_norm_adds_only_a_float32_residual_itself():
    assert offers("norm/quack", norm(residual=True)).launches == 2
    assert offers("norm/quack", norm(residual=True, dtype="float32")).launches == 1


def test_loss_declines_odd_wide_and_float64_rows_and_64_bit_ignore_index_with_reason():
    e = "loss/quack"
    declines(e, loss(dtype="float64"), "float64")
    declines(e, loss(32001), "32001", "even")
    declines(e, loss(262152), "262144")
    declines(e, loss(262144, "float32"), "131072", arch="sm_120")
    declines(e, loss(128256), "shared memory", arch="sm_80")
    declines(e, loss(ignore_index=2**31), "32-bit")
    offers(e, loss(32001, "float32"))
    graph, nodes = bwd(loss(262152), (True, False))
    offers(e, graph, nodes=nodes)  # the backward cuts rows into blocks


def test_rope_declines_positions_ranks_tables_head_dims_and_grids_with_reason():
    e = "rope/quack"
    declines(e, rope(positions=True), "positions")
    declines(e, rope((2, 3, TOKENS, 8, 128), axis=2), "rank 5")
    declines(e, rope(tables=("float32", "bfloat16")), "one dtype")
    declines(e, rope(tables=("float64", "float64")), "float64")
    declines(e, rope((2, TOKENS, 8, 100), 32), "100", "multiples of 8")
    declines(e, rope(half=30), "60", "multiples of 8")
    declines(e, rope((2, TOKENS, 8, 640)), "640", "512")
    declines(e, rope((Dim("s", 262144), 8, 128), axis=0), "262144")
    declines(e, rope((Dim("b", 65536), 1, 8, 128)), "65536")
    assert offers(e, rope((TOKENS, 2, 8, 128), axis=0, inverse=True)).launches == 1
    assert offers(e, rope(half=32, interleaved=True)).launches == 2


def test_linear_declines_float32_widths_tma_cannot_load_and_rounded_sums_with_reason():
    e = "linear/quack"
    declines(e, linear(dtype="float32"), "TF32")
    declines(e, linear(n=100), "16 bytes")
    declines(e, linear(k=100), "16 bytes")
    declines(e, wgrad("bfloat16"), "bfloat16")
    offers(e, wgrad("float32"))
    offers(e, linear(bias=True))


def test_grouped_products_decline_what_tma_cannot_load_and_rounded_sums_with_reason():
    e = "grouped_matmul/quack"
    declines(e, grouped(dtype="float32"), "TF32")
    declines(e, grouped(n=100), "16 bytes")
    declines(e, grouped(k=100), "16 bytes")
    declines(e, grouped_wgrad("bfloat16"), "bfloat16")
    offers(e, grouped_wgrad("float32"))
    offers(e, grouped(dtype="float16", experts=100))


@pytest.mark.parametrize("arch", ["sm_80", "sm_89"])
def test_products_have_no_code_before_sm_90(arch):
    made = plan(linear(), ARCHS[arch])
    reasons = {c.engine: c.reason for r in made.forward.regions for c in r.candidates}
    assert all("has no code for" in reasons[e] for e in ("linear/quack", "linear_swiglu/quack"))


def test_linear_with_swiglu_declines_what_its_epilogue_lacks_with_reason():
    e = "linear_swiglu/quack"
    offers(e, swiglu_chain())
    declines(e, swiglu_chain(keep=True), "others read")
    declines(e, swiglu_chain(bias=True), "interleaved")
    declines(e, swiglu_chain(clamp=7.0), "clamp")
    declines(e, swiglu_chain(weights=True), "row weights")
    declines(e, swiglu_chain(half=12), "12 wide")
    declines(e, swiglu_chain(dtype="float32"), "TF32")
    declines(e, linear(), "with the swiglu")


@pytest.mark.skipif(locate("quack").here, reason="the package is installed")
def test_without_the_package_every_engine_that_would_take_the_region_names_it():
    for engine, graph in (("norm/quack", norm()), ("loss/quack", loss()), ("rope/quack", rope()), ("linear/quack", linear())):
        reasons = {c.engine: c.reason for r in plan(graph, ARCHS["sm_90"]).forward.regions for c in r.candidates}
        assert "'quack-kernels'" in reasons[engine], reasons
        others = {e: r for e, r in reasons.items() if e.endswith("/quack") and e != engine}
        assert not any("'quack-kernels'" in r for r in others.values()), others  # they would decline with it too


# ---- host code on a double of the kernels ---------------------------------------------------------------------------


@pytest.fixture
def double(monkeypatch):
    quack_double.install(monkeypatch)
    ops._runners.clear()  # runners keep their plans
    yield
    ops._runners.clear()


@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r[0].id}-{str(r[1]).removeprefix('torch.')}-{r[2]}-{r[3]}")
def test_kernels_get_what_they_were_compiled_for_and_results_are_right(row, double):
    case, dtype, how, engine = row
    if case.id in DECLINED.get((engine, dtype), ()):
        with pytest.raises(Declined):
            hold(case, "cpu", dtype, how, engine=engine)
    else:
        hold(case, "cpu", dtype, how, engine=engine)


# without what takes gigabytes, and what wants rows of five 16-bit values, which are declined
LEFT_OUT = {
    faults.case_09_norm_with_rows_beyond_32_bits,
    faults.case_19_one_formula_with_and_without_residual,
    faults.case_05_packed_rope_under_context_parallelism,
    faults.case_22_every_reduction_equals_the_unfused_loss,
}
FAULTS = [
    (case, e.id)
    for e in QUACK
    for op in e.ops
    for case in faults.BY_OP.get(op, ())
    if inspect.unwrap(case) not in LEFT_OUT
]


@pytest.mark.parametrize("row", FAULTS, ids=lambda r: f"{r[0].__name__}-{r[1]}")
def test_fault_is_absent(row, double):
    case, engine = row
    wide = inspect.unwrap(case) is faults.case_21_odd_unaligned_and_wide_rows
    case("cpu", engine, **({"widths": (2, 6, 4098, 53248)} if wide else {}))


def _mlp_tensors(tokens):
    gen = torch.Generator().manual_seed(0)
    return [torch.randn(*s, generator=gen).to(BF16).requires_grad_() for s in ((*tokens, 64), (96, 64), (64, 48))]


def _plain_mlp(x, w1, w2):
    gate, up = (x @ w1.t()).chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up) @ w2.t()


@pytest.mark.parametrize("tokens", [(37,), (5, 7), (0,)])
def test_swiglu_and_its_gradient_ride_on_the_products_before_them(tokens, double):
    runner = Runner(mlp, ("x", "w1", "w2"), policy=Policy(engine="linear_swiglu/quack"))
    with pytest.raises(PlanError):
        runner(*_mlp_tensors(tokens))  # forced, it has no code for the products that stand alone
    t = _mlp_tensors(tokens)
    made = plan(mlp(*t), ARCHS["cpu"], needs_grad=(True,) * 3)
    assert ("linear_dgrad", "swiglu_bwd") in [r.ops for r in made.backward.regions if r.engine == "linear_swiglu/quack"]
    assert all(r.engine != "linear_swiglu/quack" for r in made.forward.regions), "what the backward reads is not stored"
    results = []
    for kind in (torch.float64, BF16):
        leaves = [x.detach().to(kind).requires_grad_() for x in t]
        y = _plain_mlp(*leaves)
        results.append((y, *torch.autograd.grad(y, leaves, torch.ones_like(y))))
    y = Runner(mlp, ("x", "w1", "w2"), policy=Policy())(*t)
    got = (y, *torch.autograd.grad(y, t, torch.ones_like(y)))
    for name, a, truth, peer in zip(("y", "dx", "dw1", "dw2"), got, *results, strict=True):
        oracle.compare(a, truth, peer, name)
    made = plan(mlp(*t), ARCHS["cpu"])
    assert ("linear", "swiglu") in [r.ops for r in made.forward.regions if r.engine == "linear_swiglu/quack"]
    with torch.no_grad():
        oracle.compare(
            Runner(mlp, ("x", "w1", "w2"), policy=Policy())(*(x.detach() for x in t)),
            results[0][0],
            results[1][0],
            "inference",
        )


@pytest.mark.parametrize("offset", [0, 1, 4])
def test_main_grad_is_accumulated_in_float32_wherever_it_lies(offset, double):
    gen = torch.Generator().manual_seed(0)
    w = torch.nn.Parameter(torch.randn(24, 40, generator=gen).to(BF16))
    start = torch.randn(24, 40, generator=gen)
    w.main_grad, buffer = oracle.guarded(start, offset)
    w.grad_added_to_main_grad = False
    x, dy = torch.randn(7, 40, generator=gen).to(BF16), torch.randn(7, 24, generator=gen).to(BF16)
    ops.linear(x, w, engine="linear/quack")
    runner = next(r for k, r in ops._runners.items() if k[0] == "linear" and r.policy.engine == "linear/quack")
    runner(x, w, sink=WeightGrads({1: w}, fuse=True)).backward(dy)
    truth = start.double() + dy.double().t() @ x.double()
    oracle.compare(w.main_grad, truth, start + dy.float().t() @ x.float(), "main_grad")
    oracle.check_guards(w.main_grad, buffer, "main_grad")
    assert w.grad_added_to_main_grad is True


@pytest.mark.parametrize("offset", [0, 1, 4])
def test_main_grads_of_groups_are_accumulated_in_float32_and_those_of_empty_groups_left_alone(offset, double):
    gen = torch.Generator().manual_seed(0)
    w = torch.nn.Parameter(torch.randn(3, 24, 40, generator=gen).to(BF16))
    start = torch.randn(3, 24, 40, generator=gen)
    w.main_grad, buffer = oracle.guarded(start, offset)
    w.grad_added_to_main_grad = False
    ends = torch.tensor([4, 4, 7], dtype=torch.int32)
    x, dy = torch.randn(9, 40, generator=gen).to(BF16), torch.randn(9, 24, generator=gen).to(BF16)
    x[7:], dy[7:] = float("nan"), float("nan")
    ops.grouped_matmul(x, w, ends, engine="grouped_matmul/quack")
    runner = next(r for k, r in ops._runners.items() if k[0] == "grouped_matmul" and r.policy.engine == "grouped_matmul/quack")
    runner(x, w, ends, sink=WeightGrads({1: w}, fuse=True)).backward(dy)
    for i, rows in ((0, slice(0, 4)), (2, slice(4, 7))):
        truth = start[i].double() + dy[rows].double().t() @ x[rows].double()
        oracle.compare(w.main_grad[i], truth, start[i] + dy[rows].float().t() @ x[rows].float(), f"main_grad of expert {i}")
    assert torch.equal(w.main_grad[1], start[1])
    oracle.check_guards(w.main_grad, buffer, "main_grad")
    assert w.grad_added_to_main_grad is True


def test_rope_refuses_a_table_shorter_than_the_sequence(double):
    graph = rope((9, 2, 16), 8, "float32", axis=0)
    region = region_of(graph, graph.nodes)
    launch = BY_ID["rope/quack"].load().build(BuildContext(region, ARCHS["cpu"], Offer(1.0))).launch
    with pytest.raises(ValueError, match=r"8 rows.*9 tokens"):
        launch(torch.randn(9, 2, 16), torch.randn(8, 8), torch.randn(8, 8))


# ---- the package ----------------------------------------------------------------------------------------------------


@pytest.mark.timeout(600)
@pytest.mark.skipif(not locate("quack").here, reason="needs quack-kernels")
def test_what_is_offered_on_sm_90_compiles_and_takes_its_arguments_without_a_gpu(tmp_path):
    env = {
        **os.environ,
        "CUTE_DSL_ARCH": "sm_90a",
        "QUACK_ARCH": "sm_90",
        "QUACK_CACHE_DIR": str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.cases.quack_compile"], capture_output=True, text=True, timeout=580, env=env
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip().endswith("reached the driver: 35"), done.stdout
