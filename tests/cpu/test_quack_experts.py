"""experts/quack: what it declines, as data; its host code on a double of the kernels; what the planner makes of it."""

import dataclasses

import pytest
import torch

from layerplan.integration.engines.arch import ARCHS
from layerplan.integration.engines.contract import Decline, Offer
from layerplan.integration.engines.manifest import BY_ID, MANIFEST
from layerplan.integration.graph.ir import Dim, GraphBuilder, TensorSpec
from layerplan.integration.planner import cover, tune
from layerplan.integration.planner import runner as runner_module
from layerplan.integration.planner.cover import region_of
from layerplan.kernels.linear import quack_experts
from tests.cases import quack_double
from tests.cases import quack_experts as cases

torch.set_num_threads(1)
ROWS = Dim("c", 64)


def answer(graph, arch="sm_90", knobs=None):
    region, engine = region_of(graph, graph.nodes), BY_ID[cases.ENGINE].load()
    return engine.match(region, ARCHS[arch]) if knobs is None else engine.offer_with(region, ARCHS[arch], knobs)


def declines(graph, *words, **how):
    got = answer(graph, **how)
    assert isinstance(got, Decline), got
    for word in words:
        assert word in got.reason, got.reason


def offers(graph, **how) -> Offer:
    got = answer(graph, **how)
    assert isinstance(got, Offer), got
    return got


# ---- what is declined -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_103"])
@pytest.mark.parametrize("kind", cases.KINDS)
def test_every_kind_is_offered_with_weighted_rows_and_without(kind, arch):
    for probs in ("float32", "bfloat16", None):
        got = offers(cases.graph(kind, ROWS, probs=probs, want=("dx", "drow_weight") if probs else ("dx",)), arch=arch)
        assert got.deterministic and got.capture_safe


def test_launches_are_those_beside_the_product_and_the_ends():
    def launches(kind, **how):
        return offers(cases.graph(kind, ROWS, **how)).launches - 2

    assert launches("gated") == launches("gated", probs=None) == 0 and launches("gated", probs="float16") == 1
    assert launches("gradient") == 1, "a sum over tiles of columns"
    assert launches("gradient", want=("dx",)) == 0 and launches("gradient", probs="bfloat16") == 3
    assert launches("gathered", probs=None) == 3 and launches("gathered") == 4, "the map's inverse, the probabilities"
    assert launches("gathered_gated") == 4


def test_workspace_is_what_the_launches_pass_to_each_other():
    def workspace(kind, **how):
        return offers(cases.graph(kind, ROWS, half=328, **how)).workspace_bytes

    assert workspace("gated") == 0 and workspace("gated", probs="bfloat16") == 64 * 4
    assert workspace("gradient", want=("dx",)) == 0 and workspace("gradient") == 64 * 3 * 4
    assert workspace("gathered") == 64 * 3 * 12, "row_probs is a result"
    assert workspace("gathered_gated") == 64 * 3 * 16


@pytest.mark.parametrize("kind", cases.KINDS)
def test_wide_dtypes_odd_widths_and_float64_weights_are_declined_with_reason(kind):
    declines(cases.graph(kind, ROWS, dtype="float32"), "float32", "TF32")
    declines(cases.graph(kind, ROWS, width=60), "60", "divide by 8")
    declines(cases.graph(kind, ROWS, half=42), "divide by 8")
    if kind != "gathered":
        declines(cases.graph(kind, ROWS, probs="float64"), "row_weight", "float64")


@pytest.mark.parametrize("kind", ["gated", "gradient", "gathered_gated"])
def test_what_others_read_and_a_clamp_are_declined_with_reason(kind):
    declines(cases.graph(kind, ROWS, keep=True), "others read the result of the grouped_matmul")
    declines(cases.graph(kind, ROWS, clamp=7.0), "no clamp")


def test_a_gather_of_rows_that_others_read_or_that_are_padded_is_declined_with_reason():
    declines(cases.graph("gathered", ROWS, keep=True), "others read the permuted rows")
    for kind in ("gathered", "gathered_gated"):
        declines(cases.graph(kind, ROWS, align=16), "multiple of 16", "zero")


def test_a_gather_for_other_groups_than_the_permutes_is_declined_with_reason():
    b, ints = GraphBuilder(), {"row_map": (ROWS, 2), "counts": (3,), "offsets": (3,), "others": (3,)}
    v = {n: b.input(n, TensorSpec(shape, "int32")) for n, shape in ints.items()}
    x, w = (b.input(n, TensorSpec(shape, "bfloat16")) for n, shape in (("x", (ROWS, 64)), ("w", (3, 128, 64))))
    rows = b.op("permute", x=x, row_map=v["row_map"], counts=v["counts"], offsets=v["offsets"])
    declines(b.build([b.op("grouped_matmul", x=rows, weight=w, offsets=v["others"])]), "offsets of their own")


def test_halves_that_8_does_not_divide_are_declined_with_reason():
    declines(cases.graph("gated", ROWS, half=44), "44 wide", "divide by 8")


def test_a_gradient_of_the_weights_alone_is_declined_with_reason():
    declines(cases.graph("gradient", ROWS, want=("drow_weight",)), "dx")


def test_products_that_are_read_elsewhere_than_as_the_argument_are_declined_with_reason():
    b = GraphBuilder()
    rows, w = b.input("rows", TensorSpec((ROWS, 128), "bfloat16")), b.input("w", TensorSpec((3, 128, 128), "bfloat16"))
    ends, dy = b.input("offsets", TensorSpec((3,), "int32")), b.input("dy", TensorSpec((ROWS, 64), "bfloat16"))
    dx = b.op("grouped_matmul_dgrad", dy=rows, weight=w, offsets=ends)
    declines(b.build([b.op("swiglu_bwd", want=["dx"], dy=dy, x=dx)]), "elsewhere than as its argument")


def test_single_nodes_and_other_regions_are_declined_with_what_is_taken():
    graph = cases.graph("gated", ROWS)
    for node in graph.nodes:
        got = BY_ID[cases.ENGINE].load().match(region_of(graph, [node]), ARCHS["sm_90"])
        assert isinstance(got, Decline) and "grouped_matmul_dgrad+swiglu_bwd" in got.reason


def test_an_installation_that_cannot_name_epilogues_is_declined_with_reason(monkeypatch):
    monkeypatch.setattr(quack_experts, "fingerprint_reason", lambda: "cutlass lies in /somewhere")
    declines(cases.graph("gradient", ROWS), "/somewhere")
    offers(cases.graph("gathered", ROWS))  # it has no epilogue


def test_the_gradient_takes_the_tile_that_wastes_least_and_any_that_is_known():
    for half, tile in ((768, 128), (1408, 128), (160, 160), (320, 160), (1440, 160)):
        assert offers(cases.graph("gradient", ROWS, half=half)).knobs == (("tile_n", tile),)
    graph = cases.graph("gradient", ROWS)
    for tile in (128, 160, 192):
        assert offers(graph, knobs=(("tile_n", tile),)).knobs == (("tile_n", tile),)
    declines(graph, "tile_n", "256", knobs=(("tile_n", 256),))
    declines(graph, "tile_n", knobs=())
    declines(cases.graph("gated", ROWS), "tile_n", knobs=(("tile_n", 128),))
    assert offers(graph, arch="sm_100").knobs == (("tile_n", 256),)


# ---- host code on a double of the kernels ---------------------------------------------------------------------------


@pytest.fixture
def double(monkeypatch):
    quack_double.install(monkeypatch)
    monkeypatch.setattr(runner_module, "_plans", {})


@pytest.mark.parametrize("case", cases.SMALL, ids=str)
def test_kernels_get_what_they_were_compiled_for_and_results_are_right(case, double):
    cases.run(case, cases.built(case, ARCHS["sm_90"]), "cpu")


@pytest.mark.parametrize("tile_n", [128, 160, 192])
def test_gradients_of_every_width_of_tile_are_right(tile_n, double):
    case = cases.Case("gradient", half=328, dropped=0.2)
    cases.run(case, cases.built(case, ARCHS["sm_90"], ("tile_n", tile_n)), "cpu")


def test_the_inverse_of_a_map_names_each_rows_token_and_probability():
    row_map = torch.tensor([[2, -1], [0, 3], [-1, 1]], dtype=torch.int32)
    probs = torch.tensor([[0.1, 9.0], [0.2, 0.3], [9.0, 0.4]])
    index, row_probs = quack_experts.inverted(row_map, probs)
    assert index.dtype == torch.int32 and index[:4].tolist() == [1, 2, 0, 1] and len(index) == 6
    assert torch.equal(row_probs[:4], torch.tensor([0.2, 0.4, 0.1, 0.3]))
    assert int(index[5]) in (0, 2), "dropped slots fall behind the last group"


# ---- plans ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def off_trial(monkeypatch):
    """quack's engines as if the package were here and they were off trial."""
    entries = tuple(
        dataclasses.replace(e, trial=False, needs=("torch",)) if e.id in (cases.ENGINE, "grouped_matmul/quack") else e
        for e in MANIFEST
    )
    monkeypatch.setattr(cover, "MANIFEST", entries)
    for e in entries:
        monkeypatch.setitem(BY_ID, e.id, e)


def test_a_training_step_takes_swiglus_gradient_into_a_product_and_inference_all_before_the_second_one(off_trial):
    cases.Layer(16384, 8, 128, 2048, 768).chooses(ARCHS["sm_90"])


@pytest.mark.parametrize("probs", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dropped", [0.0, 0.4])
def test_a_layer_of_experts_trains_and_infers_on_it(dropped, probs, double, monkeypatch):
    # so small that the host's cost would decide, and without the engine that compiles C++
    monkeypatch.setattr(Offer, "seconds", lambda offer, roofline: roofline / offer.efficiency)
    monkeypatch.setattr(cover, "MANIFEST", tuple(e for e in cover.MANIFEST if e.id != "pointwise/inductor"))
    layer = cases.Layer(53, 3, 6, 64, 40, probs, dropped)
    layer.chooses(ARCHS["cpu"])
    layer.hold("cpu")


def test_rows_behind_the_last_group_are_open_in_what_tune_compares():
    for kind in cases.KINDS:
        graph = cases.graph(kind, ROWS)
        region = region_of(graph, graph.nodes)
        assert set(tune._ends_of_rows(region)) == {region.graph.inputs.index("offsets")}, kind
