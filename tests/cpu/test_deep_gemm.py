"""The engine on DeepGEMM: what it declines, as data; its host code on a double of the package."""

import sys

import pytest
import torch

from layerplan.integration.engines import packages
from layerplan.integration.engines.arch import ARCHS
from layerplan.integration.engines.contract import BuildContext, Decline, Offer
from layerplan.integration.engines.manifest import BY_ID
from layerplan.integration.engines.packages import locate
from layerplan.integration.graph.autodiff import differentiate
from layerplan.integration.graph.examples import example
from layerplan.integration.graph.ir import Dim, GraphBuilder, TensorSpec
from layerplan.integration.planner.cover import region_of
from layerplan.integration.planner.planner import plan
from layerplan.integration.planner.policy import Policy
from layerplan.integration.planner.rank import ask
from tests.cases import deep_gemm_double, grouped
from tests.cases.catalogue import BY_ID as CASES
from tests.cases.catalogue import Declined, hold
from tests.cases.deep_gemm_double import ID, Package

torch.set_num_threads(1)
BF16 = torch.bfloat16
GROUPED = [c for c in CASES.values() if c.op == "grouped_matmul"]
TAKEN = {"grouped_matmul-aligned", "grouped_matmul-aligned_no_rows", "grouped_matmul-large_aligned"}
FROZEN = {"grouped_matmul-large_aligned_frozen"}  # without a weight gradient


def forward(dtype="bfloat16", n=192, k=128, experts=4, align=128, tokens=4096):
    b = GraphBuilder()
    inputs = {"x": ((tokens, k), dtype), "weight": ((experts, n, k), dtype), "offsets": ((experts,), "int32")}
    values = {p: b.input(p, TensorSpec(*spec), weight=p == "weight") for p, spec in inputs.items()}
    return b.build([b.op("grouped_matmul", **values, align=align)])


def dgrad(**given):
    return region_of(g := differentiate(forward(**given), (True, False, False)).backward, g.nodes)


def wgrad(accumulate=None, dtype="bfloat16", n=192, k=128, experts=4, align=128, tokens=4096):
    b = GraphBuilder()
    inputs = {"dy": ((tokens, n), dtype), "x": ((tokens, k), dtype), "offsets": ((experts,), "int32")}
    inputs |= {} if accumulate is None else {"accumulate": ((experts, n, k), accumulate)}
    values = {p: b.input(p, TensorSpec(*spec)) for p, spec in inputs.items()}
    return region_of(g := b.build([b.op("grouped_matmul_wgrad", **values, align=align)]), g.nodes)


def product(**given):
    return region_of(g := forward(**given), g.nodes)


MAKERS = {"grouped_matmul": product, "grouped_matmul_dgrad": dgrad, "grouped_matmul_wgrad": wgrad}


def asked(region, arch="sm_100"):
    return BY_ID[ID].load().match(region, ARCHS[arch])


# ---- what is declined -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_103"])
@pytest.mark.parametrize("op", MAKERS)
@pytest.mark.parametrize(("words", "given"), [
    ("bfloat16 operands", {"dtype": "float16"}), ("is float32", {"dtype": "float32"}),
    ("is float64", {"dtype": "float64"}), ("divide by 64", {"n": 96}), ("divide by 64", {"k": 72}),
    ("multiples of 1:", {"align": 1}), ("multiples of 64:", {"align": 64}), ("multiples of 192:", {"align": 192}),
])  # fmt: skip
def test_other_dtypes_widths_and_alignments_are_declined_with_reason(words, given, op, arch):
    answer = asked(MAKERS[op](**given), arch)
    assert isinstance(answer, Decline) and words in answer.reason, answer


def test_a_weight_gradient_that_takes_row_counts_from_the_host_is_declined_with_reason():
    for region in (wgrad(), wgrad("float32")):
        answer = asked(region, "sm_90")
        assert isinstance(answer, Decline) and "from the host on sm_90" in answer.reason
    answer = asked(wgrad("bfloat16"))
    assert isinstance(answer, Decline) and "adds in float32, and accumulate is bfloat16" in answer.reason


def test_what_its_kernels_take_is_offered_with_what_it_allocates():
    for arch in ("sm_90", "sm_100", "sm_103"):
        for region in (product(align=256), dgrad(tokens=Dim("t", 64))):
            answer = asked(region, arch)
            assert isinstance(answer, Offer) and answer.launches == 1 and not answer.workspace_bytes
    for arch in ("sm_100", "sm_103"):
        added, fresh = asked(wgrad("float32"), arch), asked(wgrad(), arch)
        assert added.launches == 1 and not added.workspace_bytes and added.deterministic
        assert fresh.launches == 3 and fresh.workspace_bytes == 4 * (4 * 192 * 128), "the float32 sums"
    assert BY_ID[ID].trial and set(BY_ID[ID].archs) == {"sm_90", "sm_100", "sm_103"}


@pytest.mark.skipif(locate("deep_gemm").here, reason="the package is installed")
def test_without_the_package_the_engine_says_where_it_is_from():
    (region,) = plan(forward(), ARCHS["sm_90"]).forward.regions
    assert next(c.reason for c in region.candidates if c.engine == ID).startswith("on trial")  # none need install it
    reason = ask(BY_ID[ID], region.region, ARCHS["sm_90"], Policy(), trial=True).reason
    assert "'deep-gemm'" in reason and packages.SOURCES["deep-gemm"] in reason, reason


# ---- the promise ----------------------------------------------------------------------------------------------------


def test_the_backward_keeps_the_alignment_of_its_forward():
    made = differentiate(forward(align=256), (True, True, False)).backward
    assert {n.op: n.attr("align") for n in made.nodes} == {"grouped_matmul_dgrad": 256, "grouped_matmul_wgrad": 256}


@pytest.mark.parametrize("tokens", [4096, 517, 509, 508, 3])
def test_examples_of_offsets_keep_the_alignment_and_fit_the_rows(tokens):
    for graph in (forward(tokens=tokens), wgrad(tokens=tokens).graph):
        ends = example(graph, "offsets", {}, torch.Generator().manual_seed(0)).tolist()
        assert all(e % 128 == 0 for e in ends) and ends == sorted(ends) and ends[-1] <= tokens
        assert bool(ends[-1]) is (tokens > 4 * 127), "as many rows as padding leaves room for"


# ---- host code on a double of the package ---------------------------------------------------------------------------


@pytest.fixture(params=["sm_90", "sm_100"])
def double(request, monkeypatch):
    return deep_gemm_double.install(monkeypatch, request.param)


@pytest.mark.parametrize("how", ["plain", "strided", "offset"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", GROUPED, ids=lambda c: c.id)
def test_results_of_aligned_groups_are_right_and_others_are_declined(case, dtype, how, double):
    takes = FROZEN | (TAKEN if double.major == 10 else set())
    if case.id in takes and dtype == BF16:
        return hold(case, "cpu", dtype, how, engine=ID)
    with pytest.raises(Declined) as info:
        hold(case, "cpu", dtype, how, engine=ID)
    reasons = (
        ("is float32",)
        if dtype == torch.float32
        else ("from the host",)
        if case.id in TAKEN
        else ("divide by 64", "multiples of 1:")
    )
    assert any(r in str(info.value) for r in reasons), info.value


def test_fault_17_groups_that_permute_aligns_give_what_unaligned_ones_do(monkeypatch):
    package = deep_gemm_double.install(monkeypatch, "sm_100")
    grouped.padded_groups("cpu", ID, 128)
    assert [(name, a["grouped_layout"].tolist()) for name, a in package.calls] == [
        (n, [128, 128, 256]) for n in ("nt", "nn", "tn")
    ]


@pytest.mark.parametrize("counts", grouped.FAULT_16)
def test_fault_16_each_row_meets_its_own_experts_weight(counts, double):
    grouped.own_weights("cpu", ID, counts, 128)


@pytest.mark.parametrize("counts", grouped.EMPTY)
def test_gradients_of_empty_groups_are_exactly_zero_and_the_tail_is_not_read(counts, double):
    grouped.empty_groups("cpu", ID, counts, 128, frozen=double.major == 9)


def test_reruns_are_bitwise_equal(double):
    grouped.reruns("cpu", ID, (0, 1, 300, 0, 3, 257), 128, frozen=double.major == 9)


@pytest.mark.parametrize(("offset", "defer"), [(0, False), (1, False), (4, True)])
def test_main_grads_are_added_to_in_float32_and_those_of_empty_groups_left_alone(offset, defer, monkeypatch):
    package = deep_gemm_double.install(monkeypatch, "sm_100")
    _, main_grad = grouped.main_grads("cpu", ID, align=128, defer=defer, offset=offset)
    name, given = package.calls[-1]
    assert name == "tn" and (given["d"].data_ptr() == main_grad.data_ptr()) is (offset % 4 == 0), (
        "in place where TMA can"
    )


def launch_of(region, package, monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_gemm", package)
    return BY_ID[ID].load().build(BuildContext(region, ARCHS["sm_100"], asked(region))).launch


@pytest.mark.parametrize(
    "region", [product(), dgrad(), wgrad(), wgrad("float32")], ids=["forward", "dgrad", "wgrad", "wgrad_add"]
)
def test_a_launch_reads_nothing_and_passes_the_offsets_as_they_are(region, monkeypatch):
    package = Package("sm_100", computes=False)
    tensors = {
        v: torch.empty(s.shape, dtype=getattr(torch, s.dtype), device="meta") for v, s in region.graph.specs.items()
    }
    launch_of(region, package, monkeypatch)(
        *(tensors[v] for v in region.graph.inputs)
    )  # a read of a meta tensor raises
    ((_, given),) = package.calls
    assert given["grouped_layout"] is tensors[region.node.input("offsets")] and given.get("ks_cpu") is None


@pytest.mark.parametrize("region", [product(), dgrad(), wgrad()], ids=["forward", "dgrad", "wgrad"])
def test_another_tile_height_of_the_process_is_refused_before_the_launch(region, monkeypatch):
    package = Package("sm_100")
    package.tile = 224  # what the package calls best on sm_100
    tensors = [
        torch.zeros(s.shape, dtype=getattr(torch, s.dtype))
        for s in (region.graph.specs[v] for v in region.graph.inputs)
    ]
    with pytest.raises(
        RuntimeError, match=r"= 224: must be 128; call deep_gemm\.set_mk_alignment_for_contiguous_layout\(128\)"
    ):
        launch_of(region, package, monkeypatch)(*tensors)
    assert not package.calls


def strided(t):
    wide = t.new_zeros(*t.shape[:-1], t.shape[-1] + 3)
    wide[..., : t.shape[-1]] = t
    return wide[..., : t.shape[-1]]


def offset(t):
    return torch.cat((t.new_zeros(1), t.flatten()))[1:].view(t.shape)


@pytest.mark.parametrize("placed", [strided, offset])
@pytest.mark.parametrize("op", MAKERS)
def test_operands_that_tma_cannot_read_are_copied(op, placed, monkeypatch):
    region, gen = MAKERS[op](tokens=384, n=64, k=128), torch.Generator().manual_seed(0)
    launch = launch_of(region, Package("sm_100"), monkeypatch)
    specs = [region.graph.specs[v] for v in region.graph.inputs]
    given = [torch.randn(s.shape, generator=gen).to(BF16) if s.is_float else None for s in specs]
    ends = torch.tensor([128, 128, 384, 384], dtype=torch.int32)
    dense, views = (launch(*(ends if t is None else put(t) for t in given)) for put in (torch.clone, placed))
    assert torch.equal(dense, views) and not dense.isnan().any()
