"""norm/cute without a GPU: what it declines, its knobs on every arch, and its device code run thread by thread."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from layerplan.integration.engines.arch import ARCHS
from layerplan.integration.engines.contract import BuildContext, Decline, Offer
from layerplan.integration.engines.manifest import BY_ID, GPUS
from layerplan.integration.graph.ir import Dim, GraphBuilder, TensorSpec
from layerplan.integration.planner.cover import region_of
from layerplan.kernels.norm import config
from layerplan.kernels.norm.cute import CuteNorm
from layerplan.kernels.norm.cute_quantize import CuteNormQuantize
from tests.bench import memory_rows
from tests.cases import cute_norm_quantize as with_quantize
from tests.cases.cute_norm import Case, fuzzed, knobs, region

ROOT = Path(__file__).resolve().parents[2]
WIDTHS = (
    1,
    2,
    3,
    8,
    33,
    64,
    128,
    257,
    512,
    769,
    1024,
    2048,
    4095,
    4096,
    5120,
    7168,
    8192,
    12288,
    16384,
    20000,
    32767,
    32768,
)


def answer(case: Case, arch="sm_90"):
    engine, made = CuteNorm(), region(case)
    return engine.offer_with(made, ARCHS[arch], case.knobs) if case.knobs else engine.match(made, ARCHS[arch])


def declines(case: Case, *words: str, arch="sm_90") -> None:
    got = answer(case, arch)
    assert isinstance(got, Decline), got
    assert all(w in got.reason for w in words), got.reason


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm_bwd"])
def test_wide_rows_and_float64_are_declined_with_the_limit_and_the_dtype(op):
    want = ("dx",) if op.endswith("_bwd") else ("y",)
    declines(Case(op, 8, 32769, want=want), "32769", "32768")
    declines(Case(op, 8, 64, dtype="float64", want=want), "float64")
    declines(Case(op, 8, 64, other="float64", want=want), "weight", "float64")
    assert isinstance(answer(Case(op, 8, 32768, want=want), "sm_80"), Offer)


def test_a_row_width_known_only_at_run_time_is_declined():
    b = GraphBuilder()
    graph = b.build([b.op("rms_norm", want=["y"], x=b.input("x", TensorSpec((4, Dim("n", 64)), "bfloat16")))])
    got = CuteNorm().match(region_of(graph, graph.nodes), ARCHS["sm_90"])
    assert isinstance(got, Decline)
    assert "run time" in got.reason


@pytest.mark.parametrize(("case", "word"), [
    (Case("rms_norm", 8, 64, knobs=knobs(threads=48)), "threads = 48"),
    (Case("rms_norm", 8, 64, knobs=knobs(threads=8, rows=3)), "rows = 3"),
    (Case("rms_norm", 8, 4096, knobs=knobs(threads=64, rows=16)), "rows = 16"),
    (Case("rms_norm", 8, 33, knobs=knobs(threads=32, stages=2)), "4 bytes"),
    (Case("rms_norm", 8, 4096, knobs=knobs(threads=128, stages=1)), "stages = 1"),
    (Case("rms_norm", 8, 4096, knobs=knobs(threads=128, rows=8, stages=8)), "bytes of shared memory"),
    (Case("rms_norm", 8, 4096, knobs=knobs(threads=8, rows=4)), "32 vectors"),
    (Case("rms_norm", 8, 4096, knobs=knobs(threads=128, blocks=0)), "blocks = 0"),
    (Case("rms_norm", 8, 4096, knobs=knobs(threads=128, depth=2)), "depth"),
    (Case("rms_norm", 8, 4096, knobs=knobs(rows=2)), "threads"),
    (Case("rms_norm_bwd", 8, 4096, want=("dx", "dweight"), knobs=knobs(threads=128, rows=2, shared_sums=True)),
    "one row at once"),
])  # fmt: skip
def test_knobs_that_no_kernel_can_run_with_are_declined_by_name(case, word):
    declines(case, word)


def test_grids_overlap_from_sm_90_on():
    case = Case("rms_norm_bwd", 8, 4096, want=("dx", "dweight"), knobs=knobs(threads=256, overlap=True))
    declines(case, "overlap", arch="sm_89")
    assert isinstance(answer(case, "sm_100"), Offer)
    assert dict(answer(dataclasses.replace(case, knobs=()), "sm_80").knobs)["overlap"] is False


@pytest.mark.parametrize("arch", GPUS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_default_knobs_fit_every_arch_and_width(arch, dtype):
    for width in WIDTHS:
        step = math.gcd(width, 4 if dtype == "float32" else 8)
        for tensors in (1, 2, 3):
            for sums in (0, 1, 2):
                rows = config.Rows(
                    width=width, step=step, dtype=dtype, weight=dtype, tensors=tensors, sums=sums, layer=sums == 2
                )
                for made in (config.forward_knobs(rows), config.backward_knobs(rows, ARCHS[arch])):
                    assert config.knob_reason(made, rows, ARCHS[arch]) is None, (width, made)


def test_a_result_of_the_forward_is_stored_through_l2_however_large():
    made = next(r.region for r in memory_rows.FAMILIES["norm"]() if r.name == "rms_norm 16384x4096")
    assert made.spec("x").nbytes() == 128 << 20 and dict(CuteNorm().match(made, ARCHS["sm_90"]).knobs)["streaming"] is False


@pytest.mark.parametrize(("wrong", "said"), [
    ((("rows", 2),), "knob threads: is not given; there are threads, rows, stages"),
    ((("threads", 128), ("keep", True)), "knob keep: the engine has none of this name; there are threads"),
    ((("threads", 128), ("rows", "2")), "knob rows = '2': must be of type int"),
    ((("threads", 128), ("hold_weight", 1)), "knob hold_weight = 1: must be of type bool"),
])  # fmt: skip
def test_knobs_of_a_plan_file_that_are_unknown_missing_or_of_another_type_are_declined_by_name(wrong, said):
    declines(Case("rms_norm", 64, 4096, knobs=wrong), said)
    got = quantized(with_quantize.Case("rms_norm", 64, 4096, with_quantize.BLOCK, transposed=True, knobs=wrong))
    assert isinstance(got, Decline) and said in got.reason


@pytest.mark.parametrize(
    ("shape", "least"), [((16384, 4096), 40), ((16384, 7168), 40), ((65536, 2048), 40), ((4096, 12288), 40)]
)
def test_default_backwards_keep_enough_bytes_on_their_way(shape, least):
    rows = config.Rows(width=shape[1], step=8, dtype="bfloat16", weight="bfloat16", tensors=2, sums=1)
    made = config.backward_knobs(rows, ARCHS["sm_90"])
    assert (made.stages - 1) * made.rows * 2 * 2 * shape[1] * made.blocks >= least * 1024, made


def test_what_can_be_compiled_ahead_is_what_build_asks_for_and_json():
    for seed in range(40):
        case = fuzzed(seed)
        made, engine, arch = region(case), CuteNorm(), ARCHS["sm_100"]
        offer, asked = engine.match(made, arch), []
        assert offer.ahead_of_time
        kernels = engine.kernels(made, arch, offer)
        engine.build(BuildContext(made, arch, offer, lambda kernel, asked=asked: asked.append(kernel)))
        assert tuple(asked) == kernels
        assert json.loads(json.dumps(dict(kernels[0].constants))) == dict(kernels[0].constants)
        again = engine.offer_with(made, arch, offer.knobs)
        assert again == offer, (case, again)


def test_a_backward_announces_its_partial_sums():
    offer = answer(Case("layer_norm_bwd", 8, 4096, want=("dx", "dweight", "dbias")))
    assert offer.workspace_bytes == 2 * 132 * 4096 * 4
    assert offer.launches == 2
    assert answer(Case("rms_norm_bwd", 8, 4096, want=("dx",))).workspace_bytes == 0


def test_the_manifest_names_them_for_every_gpu():
    for name, engine in (("norm/cute", CuteNorm), ("norm_quantize/cute", CuteNormQuantize)):
        assert BY_ID[name].archs == GPUS
        assert type(BY_ID[name].load()) is engine


def quantized(case: with_quantize.Case, arch="sm_90"):
    made, engine = with_quantize.regions(case)[0], CuteNormQuantize()
    return engine.offer_with(made, ARCHS[arch], case.knobs) if case.knobs else engine.match(made, ARCHS[arch])


@pytest.mark.parametrize(("case", "word"), [
    (with_quantize.Case("rms_norm", 8, 33, with_quantize.BLOCK), "8 at once"),
    (with_quantize.Case("rms_norm", 8, 40960, with_quantize.BLOCK), "32768"),
    (with_quantize.Case("rms_norm", 8, 64, with_quantize.BLOCK, other="float64"), "float64"),
    (with_quantize.Case("layer_norm", 8, 64, with_quantize.MX, extra=("y",), transposed=True), "others read y"),
    (with_quantize.Case("rms_norm", 8, 4096, with_quantize.BLOCK, knobs=knobs(threads=8, rows=4)), "vectors of a row"),
    (with_quantize.Case("rms_norm", 8, 64, with_quantize.BLOCK, knobs=knobs(threads=8, rows=4)), "16 or more"),
    (with_quantize.Case("rms_norm", 8, 64, with_quantize.BLOCK, knobs=knobs(threads=32, hold=True)), "hold"),
    (with_quantize.Case("rms_norm", 8, 4096, with_quantize.BLOCK, knobs=knobs(threads=128, rows=2, together=True)),
     "one kernel anyhow"),
    (with_quantize.Case("rms_norm", 8, 4096, with_quantize.BLOCK, transposed=True,
                        knobs=knobs(threads=128, rows=1, together=True)), "blocks of 256"),
    (with_quantize.Case("rms_norm", 8, 12288, with_quantize.BLOCK, transposed=True,
                        knobs=knobs(threads=256, rows=1, together=True)), "6 vectors"),
    (with_quantize.Case("rms_norm", 8, 4096, with_quantize.BLOCK, knobs=knobs(threads=128, apart=True)), "apart = True"),
    (with_quantize.Case("rms_norm", 8, 4096, with_quantize.SWIZZLED, transposed=True, knobs=knobs(threads=128, apart=True)),
     "apart = True"),
])  # fmt: skip
def test_a_norm_with_quantize_is_declined_with_what_stands_in_the_way(case, word):
    got = quantized(case)
    assert isinstance(got, Decline)
    assert word in got.reason, got.reason


def test_a_norm_alone_or_with_a_quantize_of_another_value_is_not_its_region():
    norm = with_quantize.regions(with_quantize.SMALL[0])[1]
    assert "quantize that reads it" in CuteNormQuantize().match(norm, ARCHS["sm_90"]).reason
    b = GraphBuilder()
    x, other = (b.input(n, TensorSpec((Dim("t", 8), 64), "bfloat16")) for n in "xo")
    y = b.op("rms_norm", want=["y"], x=x)
    graph = b.build([y, b.op("quantize", want=["data"], x=other, dtype="float8_e4m3fn", block=(1, 128))])
    assert "another value" in CuteNormQuantize().match(region_of(graph, graph.nodes), ARCHS["sm_90"]).reason


@pytest.mark.parametrize("arch", GPUS)
def test_a_norm_with_quantize_is_offered_on_every_gpu_and_names_the_kernels_that_it_builds(arch):
    for case in (*with_quantize.SMALL, *with_quantize.LARGE):
        made, engine = with_quantize.regions(case)[0], CuteNormQuantize()
        one = {n for n, v in case.knobs if v is True} & {"together", "apart"}  # others may ask for more than an older GPU has
        offer, asked = engine.offer_with(made, ARCHS[arch], case.knobs) if one else engine.match(made, ARCHS[arch]), []
        assert isinstance(offer, Offer), (case, offer)
        engine.build(BuildContext(made, ARCHS[arch], offer, lambda kernel, asked=asked: asked.append(kernel)))
        (kernel,) = engine.kernels(made, ARCHS[arch], offer)
        assert asked == [kernel]
        assert json.loads(json.dumps(dict(kernel.constants))) == dict(kernel.constants)
        assert engine.offer_with(made, ARCHS[arch], offer.knobs) == offer


def test_a_transposed_copy_announces_the_residual_sum_that_nobody_else_wants():
    case = with_quantize.Case(
        "rms_norm", 64, 4096, with_quantize.BLOCK, given=("weight", "residual"), extra=(), transposed=True
    )
    two = dataclasses.replace(case, knobs=knobs(threads=128))
    assert quantized(two).workspace_bytes == 64 * (4096 * 2 + 4)
    assert quantized(dataclasses.replace(two, extra=("residual_out", "rstd"))).workspace_bytes == 0
    counters = 4 * 2  # who has begun, and one number for 128 rows
    assert quantized(case).workspace_bytes == 64 * (4096 * 2 + 4) + counters
    assert quantized(dataclasses.replace(case, extra=("residual_out", "rstd"))).workspace_bytes == counters


def test_scales_that_lie_apart_are_announced_as_a_workspace_and_a_launch_more_and_the_default_of_large_results():
    case = with_quantize.Case("rms_norm", 64, 4096, with_quantize.BLOCK, given=("weight", "residual"),
                              extra=("residual_out", "rstd"), transposed=True)  # fmt: skip
    assert dict(quantized(case).knobs)["apart"] is False
    for rows, block, layout, said in ((8192, (1, 128), "row", True), (8191, (1, 128), "row", False), (8192, (1, 32), "swizzled", False)):
        made = memory_rows.norm_quantize_region(rows, 4096, block, True, True, layout)
        assert dict(CuteNormQuantize().match(made, ARCHS["sm_90"]).knobs)["apart"] is said  # from 32 MiB on
    for chosen in ({"threads": 128}, {"threads": 128, "rows": 2, "together": True}):
        without, offer = (quantized(dataclasses.replace(case, knobs=knobs(**chosen, apart=a))) for a in (False, True))
        assert offer.workspace_bytes - without.workspace_bytes == 32 * 2 * 128 * 4  # of 32 tiles
        assert (offer.launches, offer.host_us) == (without.launches + 1, without.host_us + 4)


@pytest.mark.parametrize(("width", "residual", "transposed", "expected"), [
    (4096, True, True, (128, 2, True, False)), (7168, True, True, (256, 1, True, False)), (1024, True, True, (32, 8, True, False)),
    (8200, True, True, (288, 1, False, False)), (4096, False, True, (128, 1, False, False)),
    (4096, True, False, (128, 1, False, True)), (7168, False, False, (224, 1, False, True)), (32768, True, False, (1024, 1, False, False)),
])  # fmt: skip
def test_one_kernel_for_a_residual_with_a_transposed_copy_where_registers_hold_a_row(width, residual, transposed, expected):
    given = ("weight", "residual") if residual else ("weight",)
    knobs_ = dict(quantized(with_quantize.Case("rms_norm", 64, width, with_quantize.BLOCK, given=given, transposed=transposed)).knobs)
    assert tuple(knobs_[k] for k in ("threads", "rows", "together", "hold_weight")) == expected


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "rms_norm_bwd", "layer_norm_bwd"])
@pytest.mark.timeout(600)
def test_device_code_run_thread_by_thread_agrees_with_the_reference(op):
    run = subprocess.run(
        [sys.executable, "-m", "tests.cases.cute_norm", f"op={op!r}"], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "cases agree" in run.stdout


@pytest.mark.timeout(600)
def test_device_code_of_norms_with_quantize_run_thread_by_thread_gives_the_reference_s_bits():
    run = subprocess.run(
        [sys.executable, "-m", "tests.cases.cute_norm_quantize"], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "cases agree" in run.stdout
