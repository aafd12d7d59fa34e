"""quantize and dequantize: the rules of the op, exact values, how a scaled tensor is described, and the own kernels for
them without a GPU."""

import dataclasses
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from layerplan.integration import ops
from layerplan.integration.engines.arch import ARCHS
from layerplan.integration.engines.contract import Decline, Offer
from layerplan.integration.engines.manifest import BY_ID, GPUS
from layerplan.integration.graph.autodiff import differentiate
from layerplan.integration.graph.examples import example, sizes_of
from layerplan.integration.graph.ir import Dim, GraphBuilder, GraphError, ScaleSpec, TensorSpec, size_of
from layerplan.integration.graph.ops import quantize as law
from layerplan.integration.graph.verify import verify
from layerplan.integration.plan_cache import memory
from layerplan.integration.planner.cover import region_of
from layerplan.integration.planner.planner import plan
from layerplan.integration.planner.policy import Policy
from tests import oracle
from tests.bench import memory_rows
from tests.cases import cute_quantize, quantized
from tests.cases.cute_quantize import BLOCK, MX, SWIZZLED, TENSOR, Case, region
from tests.cases.quack_compile import labelled

torch.set_num_threads(1)
ROOT = Path(__file__).resolve().parents[2]
T, FP8 = Dim("t", 1024), (torch.float8_e4m3fn, torch.float8_e5m2)
SM90 = ARCHS["sm_90"]


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FP8)
def test_the_cast_to_8_bits_is_nearest_even_and_saturates_for_every_bfloat16_and_between(dtype):
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    near = torch.cat([torch.nextafter(every, torch.full_like(every, side)) for side in (torch.inf, -torch.inf)])
    for x in (every, near):
        oracle.same_bits(law.cast(x, str(dtype).removeprefix("torch.")), quantized.nearest(x, dtype))


@pytest.mark.parametrize(
    ("dtype", "power_of_two", "block"),
    [(d, p, b) for d in FP8 for p, b in ((False, (1, 128)), (True, (1, 128)), (False, (1, 32)))],
)
def test_scales_are_exact_for_every_exponent_at_the_edges_of_a_power_of_two(dtype, power_of_two, block):
    mantissas = torch.tensor([0, 1, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFF])
    amax = (torch.arange(256)[:, None] * (1 << 23) + mantissas).to(torch.int32).view(torch.float32).flatten()
    amax = amax[~amax.isnan()]
    name = str(dtype).removeprefix("torch.")
    data, scale = ops.quantize(amax[:, None], block=block, dtype=dtype, power_of_two=power_of_two)
    want_data, want_scale = quantized.by_rows(amax[:, None], dtype, block, power_of_two)
    oracle.same_bits(scale, want_scale, name)
    oracle.same_bits(data, want_data, name)
    values = data.float() * scale.float()
    finite = amax.isfinite()
    assert (data.float().abs()[finite] <= quantized.LARGEST[dtype][0]).all()
    normal = (amax > 1e-30) & (
        amax < 1e38
    )  # below, scales are bounded; above, rounding up may pass the largest float32
    assert ((values[normal, 0] / amax[normal] - 1).abs() <= 2**-3).all(), "half a unit in the last place of e5m2"


def test_zero_blocks_have_scale_1_and_mxfp8_byte_0_and_nan_stays_alone_in_its_block():
    x = torch.zeros(2, 256)
    x[1, 3], x[1, 5] = float("nan"), 2.0
    data, scale = ops.quantize(x, block=(1, 128))
    assert scale[0].tolist() == [1.0, 1.0] and scale[1, 1] == 1.0
    assert data.float()[1].isnan().nonzero().flatten().tolist() == [3] and data.float()[1, 5] == 448.0
    assert ops.quantize(x, block=(1, 32))[1].view(torch.uint8)[0].tolist() == [0] * 8


def test_infinity_counts_as_the_largest_number_and_its_block_keeps_a_finite_scale():
    x = torch.tensor([[float("inf"), -1e38, 1.0]])
    for block in ((1, 128), (1, 32)):
        data, scale = ops.quantize(x, block=block)
        assert data.float()[0, 0] == 448.0 and bool(scale.float().isfinite().all()) and data.float()[0, 1] < -60


def test_amax_of_a_tensor_propagates_nan_and_infinity_and_is_0_for_no_elements():
    one, call = torch.ones(1), ops.quantize
    for value, want in ((float("inf"), float("inf")), (-7.0, 7.0)):
        assert call(torch.tensor([[1.0, value]]), block=(0, 0), scale=one, amax=True)[2].item() == want
    assert call(torch.tensor([[float("nan"), float("inf")]]), block=(0, 0), scale=one, amax=True)[2].isnan()
    assert call(torch.zeros(0, 4), block=(0, 0), scale=one, amax=True)[2].item() == 0


@pytest.mark.parametrize(("rows", "k"), [(1, 1), (128, 4), (129, 5), (300, 13), (0, 3), (5, 0)])
def test_the_swizzled_layout_is_the_one_of_its_formula_and_can_be_undone(rows, k):
    scales = torch.randint(0, 255, (rows, k), dtype=torch.int32).to(torch.uint8).view(torch.float8_e8m0fnu)
    made = law.swizzle(scales)
    oracle.same_bits(made, quantized.swizzled(scales))
    oracle.same_bits(law.unswizzle(made, rows, k), scales)


# ---- how scaled tensors are described --------------------------------------------------------------------------------


def test_computed_sizes_are_numbers_where_they_can_be_and_have_one_name_for_one_size():
    b, s = Dim("b", 4), Dim("s", 1024)
    assert (
        size_of((3, 5)) == 15
        and size_of((300,), 128) == 3
        and size_of((300,), 128, 128) == 384
        and size_of((0, s)) == 0
    )
    assert size_of((s,)) is s and size_of((1, s)) is s and size_of(()) == 1
    rows = size_of((b, s))
    assert size_of((rows, 1)) == rows and rows.hint == 4096 and size_of((rows,), 128) == size_of((b, s), 128)
    sizes = {"b": 3, "s": 50}
    assert (
        size_of((rows,), 128, 128).at(lambda d: sizes[d.name]) == 256
        and size_of((2, s), 32).at(lambda d: sizes[d.name]) == 4
    )


@pytest.mark.parametrize(("lead", "transposed", "scales", "scales_t"), [
    ((T,), (256, T), ((T, 2)), (256, size_of((T,), 128))),
    ((2, T), (256, size_of((2, T))), (2, T, 2), (256, size_of((2, T), 128))),
    ((), (256, 1), (2,), (256, 1)),
])  # fmt: skip
def test_outputs_carry_their_scale_spec_and_shapes_follow_the_rows(lead, transposed, scales, scales_t):
    b = GraphBuilder()
    x = b.input("x", TensorSpec((*lead, 256), "bfloat16"))
    data, inverse, data_t, inverse_t = b.op(
        "quantize", want=["data", "scale_inv", "data_t", "scale_inv_t"], x=x, block=(1, 128)
    )
    blocks = ScaleSpec((1, 128), "float32", "row")
    assert b.specs[data] == TensorSpec((*lead, 256), "float8_e4m3fn", scale=blocks) and b.specs[inverse].shape == tuple(
        scales
    )
    assert (
        b.specs[data_t] == TensorSpec(transposed, "float8_e4m3fn", scale=blocks)
        and b.specs[inverse_t].shape == scales_t
    )
    y = b.op("dequantize", data=data_t, scale_inv=inverse_t, block=(1, 128), dtype="float16")
    assert b.specs[y] == TensorSpec(transposed, "float16")
    verify(b.build([y, data]))


def test_swizzled_scales_of_symbolic_rows_are_padded_and_examples_get_the_sizes_of_their_rows():
    b = GraphBuilder()
    x = b.input("x", TensorSpec((T, 200), "bfloat16"))
    data_t, inverse_t = b.op("quantize", want=["data_t", "scale_inv_t"], x=x, block=(1, 32), layout="swizzled")[1:]
    assert b.specs[inverse_t].shape == (256, size_of((size_of((T,), 32),), 4, 4))
    d = GraphBuilder()
    given = {n: d.input(n, b.specs[v]) for n, v in (("data", data_t), ("scale_inv", inverse_t))}
    graph = d.build([d.op("dequantize", **given, block=(1, 32), layout="swizzled", dtype="bfloat16")])
    for most in (None, 100):
        made = [example(graph, v, sizes_of(graph, most), torch.Generator()) for v in graph.inputs]
        node = graph.nodes[0]
        law._dequantize_check(
            {}, lambda port, made=made: tuple(made[("data", "scale_inv").index(port)].shape), node.attributes
        )


def test_a_graph_knows_one_computed_size_from_another():
    def graph(scale):
        b = GraphBuilder()
        given = (
            b.input("data", TensorSpec((T, 256), "float8_e4m3fn", scale=ScaleSpec((1, 128)))),
            b.input("s", TensorSpec(scale, "float32")),
        )
        return b.build([b.op("dequantize", data=given[0], scale_inv=given[1], block=(1, 128), dtype="bfloat16")])

    assert graph((T, 2)).signature() != graph((Dim("u", 1024), 2)).signature()
    lengths = [size_of((T,), 128), Dim("u", 8), size_of((T,), 32)]
    b = [GraphBuilder() for _ in lengths]
    graphs = [
        g.build([g.op("add", a=(x := g.input("x", TensorSpec((T, n), "float32"))), b=x)])
        for g, n in zip(b, lengths, strict=True)
    ]
    assert len({g.signature() for g in graphs}) == 3


# ---- bad input -------------------------------------------------------------------------------------------------------

X = torch.randn(4, 256)


@pytest.mark.parametrize(("words", "call"), [
    (("block = (1, 64)", "(1, 128)"), lambda: ops.quantize(X, block=(1, 64))),
    (("scale", "block (0, 0)"), lambda: ops.quantize(X, block=(0, 0))),
    (("scale", "block (0, 0)"), lambda: ops.quantize(X, block=(1, 128), scale=torch.ones(1))),
    (("layout = swizzled", "row"), lambda: ops.quantize(X, block=(1, 128), layout="swizzled")),
    (("power_of_two", "(1, 128)"), lambda: ops.quantize(X, block=(1, 32), power_of_two=True)),
    (("amax", "whole"), lambda: ops.quantize(X, block=(1, 32), amax=True)),
    (("float64",), lambda: ops.quantize(X.double(), block=(1, 32))),
    (("float8_e8m0fnu",), lambda: ops.quantize(X, block=(1, 32), dtype=torch.float8_e8m0fnu)),
    (("scale", "[1]"), lambda: ops.quantize(X, block=(0, 0), scale=torch.ones(2))),
    (("no gradient", "detach"), lambda: ops.quantize(X.clone().requires_grad_(), block=(1, 128))),
    (("scale_inv", "[4, 2]"), lambda: ops.dequantize(X.to(FP8[0]), torch.ones(4, 3), block=(1, 128))),
    (("scale_inv", "float8_e8m0fnu"), lambda: ops.dequantize(X.to(FP8[0]), torch.ones(4, 8), block=(1, 32))),
    (("block = (2, 2)",), lambda: ops.dequantize(X.to(FP8[0]), torch.ones(4, 8), block=(2, 2))),
    (("data", "float32"), lambda: ops.dequantize(X, torch.ones(4, 2), block=(1, 128))),
    (("dtype = float64",), lambda: ops.dequantize(X.to(FP8[0]), torch.ones(4, 2), block=(1, 128), dtype=torch.float64)),
])  # fmt: skip
def test_bad_input_is_refused_with_field_and_rule(words, call):
    with pytest.raises(ValueError) as info:
        call()
    for word in words:
        assert word in str(info.value), f"{word!r} is not in: {info.value}"


def test_data_that_does_not_say_how_it_is_scaled_is_refused():
    b = GraphBuilder()
    data, scale = b.input("data", TensorSpec((4, 256), "float8_e4m3fn")), b.input("s", TensorSpec((4, 2), "float32"))
    with pytest.raises(GraphError, match=r"scale of data = None: must be ScaleSpec\(block=\(1, 128\)"):
        b.op("dequantize", data=data, scale_inv=scale, block=(1, 128), dtype="bfloat16")


def test_a_graph_with_a_quantize_of_what_needs_a_gradient_has_no_backward():
    b = GraphBuilder()
    y = b.op("swiglu", x=b.input("x", TensorSpec((4, 256), "bfloat16")))
    graph = b.build([y, *b.op("quantize", x=y, block=(1, 128))])
    with pytest.raises(GraphError, match="'quantize' has no gradient"):
        differentiate(graph, (True,))
    differentiate(graph, (False,))


# ---- own kernels -----------------------------------------------------------------------------------------------------


def reason(engine, case, arch="sm_90", chosen=()):
    loaded, made = BY_ID[engine].load(), region(case)
    got = loaded.offer_with(made, ARCHS[arch], chosen) if chosen else loaded.match(made, ARCHS[arch])
    return got.reason if isinstance(got, Decline) else None


def one(op, **specs):
    b = GraphBuilder()
    graph = b.build([b.op(op, **{p: b.input(p, s) if isinstance(s, TensorSpec) else s for p, s in specs.items()})])
    return region_of(graph, graph.nodes)


def test_own_engines_take_every_kind_on_every_gpu_and_say_what_they_do_not_take():
    for case, arch in itertools.product((*cute_quantize.SMALL, *cute_quantize.LARGE), GPUS):
        assert reason(case.engine, case, arch, case.knobs) is None
    assert (
        "float64" in BY_ID["activation/cute"].load().match(one("swiglu", x=TensorSpec((T, 8), "float64")), SM90).reason
    )
    assert "no elements" in reason("quantize/cute", Case(4, 0, BLOCK))
    assert (
        "2^31"
        in BY_ID["activation/cute"]
        .load()
        .match(one("swiglu", x=TensorSpec((Dim("t", 1 << 31), 8), "bfloat16")), SM90)
        .reason
    )
    chosen = cute_quantize.apart(streaming=5)
    assert "streaming = 5" in reason("quantize/cute", Case(4, 64, BLOCK), chosen=chosen)
    for case in (Case(4, 64, BLOCK, transposed=False), Case(4, 64, MX), Case(4, 64, MX, gate=True)):
        assert "apart = True: scales go through a workspace" in reason(case.engine, case, chosen=cute_quantize.apart())
    chosen = cute_quantize.knobs(down=True)
    assert "streaming" in reason("swiglu_quantize/cute", Case(4, 64, BLOCK, gate=True), chosen=chosen)


@pytest.mark.parametrize("gate", [False, True])
def test_scales_that_lie_apart_are_announced_as_a_workspace_and_a_launch_more_and_the_default_of_large_results(gate):
    case = Case(130, 300, BLOCK, gate=gate)
    usual, other = (cute_quantize.offered(case.engine, region(case), SM90, k) for k in ((), cute_quantize.apart()))
    assert dict(usual.knobs)["apart"] is False
    for rows in (8192, 8191):  # from 32 MiB on; stores go through L2 however large
        made = BY_ID[case.engine].load().match(memory_rows.quantize_region(rows, 4096, "1x128", True, gate), SM90)
        assert dict(made.knobs) == {"down": False, "streaming": False, "apart": rows == 8192}
    assert (usual.launches, usual.workspace_bytes, usual.host_us) == (1, 0, 14)
    tiles = 1 * 3  # of 64 rows, which stand for any number, and 300 values
    assert (other.launches, other.workspace_bytes, other.host_us) == (2, tiles * 2 * 128 * 4, 18)
    assert "apart" not in dict(cute_quantize.offered(case.engine, region(dataclasses.replace(case, quantize=MX)), SM90).knobs)


def test_a_swiglu_whose_result_others_read_is_not_fused_with_its_quantize():
    b = GraphBuilder()
    y = b.op("swiglu", x=b.input("x", TensorSpec((T, 512), "bfloat16")))
    graph = b.build([*b.op("quantize", x=y, block=(1, 128)), y])
    got = BY_ID["swiglu_quantize/cute"].load().match(region_of(graph, graph.nodes), SM90)
    assert isinstance(got, Decline) and "not stored" in got.reason


needs_compiler = pytest.mark.skipif(
    BY_ID["swiglu_quantize/cute"].absent() is not None, reason="needs nvidia-cutlass-dsl and apache-tvm-ffi"
)


@needs_compiler
def test_a_plan_runs_swiglu_and_quantize_as_one_region():
    found = plan(region(Case(64, 4096, BLOCK, gate=True)).graph, SM90, Policy(engine="swiglu_quantize/cute"))
    assert [(r.ops, r.engine) for r in found.forward.regions] == [(("swiglu", "quantize"), "swiglu_quantize/cute")]


def test_kernels_are_named_by_what_their_code_depends_on_and_not_by_the_rows():
    engine = BY_ID["quantize/cute"].load()

    def names(made):
        offer = engine.match(made, SM90)
        assert isinstance(offer, Offer)
        return engine.kernels(made, SM90, offer)

    assert names(region(Case(7, 256, BLOCK))) == names(region(Case(900, 256, BLOCK)))
    assert (
        len(
            {
                *names(region(Case(7, 256, BLOCK))),
                *names(region(Case(7, 264, BLOCK))),
                *names(region(Case(7, 256, MX))),
                *names(region(Case(7, 256, SWIZZLED))),
                *names(region(Case(7, 256, TENSOR))),
            }
        )
        == 5
    )
    data = TensorSpec((256, T), "float8_e4m3fn", scale=ScaleSpec((1, 128)))
    both = names(
        one("dequantize", data=data, scale_inv=ScaleSpec((1, 128)).scales(data.shape), block=(1, 128), dtype="bfloat16")
    )
    assert sorted(dict(k.constants)["vector"] for k in both) == [False, True], (
        "whether rows divide is known at run time alone"
    )


@needs_compiler
@pytest.mark.parametrize(
    "case",
    [Case(64, 136, BLOCK), Case(64, 136, TENSOR, gate=True, weight="float32"), Case(64, 136, BLOCK, knobs=cute_quantize.apart())],
    ids=["quantize", "swiglu", "apart"],
)
def test_a_launch_hands_its_compiled_kernel_what_that_was_compiled_for(case, tmp_path, monkeypatch):
    monkeypatch.setenv("LAYERPLAN_CACHE", str(tmp_path))
    made, engine = region(case), BY_ID[case.engine].load()
    context = memory.context(made, SM90, cute_quantize.offered(case.engine, made, SM90, case.knobs))

    def labelling(kernel):
        function = context.compile(kernel)
        return lambda *given: function(*map(labelled, given))

    launch = engine.build(dataclasses.replace(context, compile=labelling)).launch
    given = list(cute_quantize.inputs(case, 0).values())
    if not torch.cuda.is_available():  # the kernel checks its arguments before it asks for a device
        with pytest.raises(RuntimeError, match=r"(?i)cuda"):
            launch(*given)
    with pytest.raises(ValueError, match="Mismatched"):
        launch(given[0][:, :8], *given[1:])


def script(name: str, *arguments: str) -> str:
    """What a script of tests/cases prints, which has to end well."""
    run = subprocess.run(
        [sys.executable, "-m", f"tests.cases.{name}", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    return run.stdout


@pytest.mark.parametrize(
    "text",
    ["rows=5, width=136", "rows=5, width=37", "rows=3, width=40", "rows=16, width=48",
     "rows=7, width=40, quantize={'block': (1, 128)}", "rows=7, width=40, quantize={'block': (1, 32)}", "('apart', True)"],
)  # fmt: skip
def test_the_device_code_gives_the_bits_of_the_reference_run_thread_by_thread(text):
    printed = script("cute_quantize", text)
    assert "give the bits of the reference" in printed and not printed.startswith("0 ")


@pytest.mark.timeout(600)
def test_scales_of_more_tiles_than_a_block_takes_go_from_a_workspace_to_their_places():
    assert "4 workspaces are where they belong" in script("scale_places")


def test_faults_in_the_way_through_shared_memory_are_seen_by_the_simulation():
    assert "6 faults are seen" in script("quantize_faults")


def test_scales_are_the_quotients_of_ieee_division_whatever_reciprocal_the_gpu_gives():
    assert "give the quotients of IEEE division" in script("quotients")
