"""Own kernels of quantize, dequantize and swiglu beyond the shared cases: every byte the reference's, over shapes,
layouts, kinds and knobs; guard rows, more than 2^31 elements, reruns, capture, and a fuzz that ends in time."""

import time

import pytest
import torch

from layerplan.integration import ops
from layerplan.integration.engines.arch import Arch
from layerplan.integration.engines.manifest import BY_ID
from layerplan.integration.engines.packages import locate
from layerplan.integration.graph.ops.table import op_table
from layerplan.integration.plan_cache import memory
from layerplan.kernels.common import quantized
from tests import oracle
from tests.cases import cute_quantize as cases
from tests.cases.cute_quantize import BLOCK, MX, POWER, SWIZZLED, TENSOR, Case
from tests.gpu.capture import captured, new_data
from tests.gpu.memory import need

pytestmark = pytest.mark.skipif(not locate("tvm_ffi").here, reason="needs apache-tvm-ffi")
BF16 = torch.bfloat16
FUZZ_S = 45  # kernels compile in it too
ENGINE = {"engine": "quantize/cute"}


def build(engine, region, chosen):
    arch = Arch.of_device(0)
    return BY_ID[engine].load().build(memory.context(region, arch, cases.offered(engine, region, arch, chosen))).launch


def named(case: Case) -> str:
    kind = next(
        n
        for n, v in (("block", BLOCK), ("power", POWER), ("mx", MX), ("swizzled", SWIZZLED), ("tensor", TENSOR))
        if v is case.quantize
    )
    words = [
        f"{case.rows}x{case.width}",
        kind,
        case.dtype,
        case.fp8,
        *(k for k in ("transposed", "amax", "gate", "clean") if getattr(case, k)),
    ]
    return "-".join([*words, *(f"{k}{v}" for k, v in (*case.knobs, ("gap", case.gap), ("offset", case.offset)) if v)])


def _gen(seed=0):
    return torch.Generator(device="cuda").manual_seed(seed)


@pytest.mark.parametrize("case", [c for c in (*cases.SMALL, *cases.LARGE) if c.arch == "sm_90"], ids=named)
def test_every_byte_is_the_references_and_reruns_are_equal(case):
    cases.run(case, build, "cuda")


@pytest.mark.parametrize(
    "case",
    [
        Case(205, 264, BLOCK),
        Case(205, 264, BLOCK, knobs=cases.apart()),
        Case(131, 261, POWER, gate=True, knobs=cases.apart(down=True)),
        Case(205, 264, SWIZZLED, gate=True),
        Case(204, 261, MX),
        Case(200, 264, TENSOR, amax=True),
        Case(131, 136, POWER, transposed=False),
        Case(77, 40, BLOCK, gate=True, transposed=False),
    ],
    ids=named,
)
def test_quantize_writes_nothing_around_its_results(case, monkeypatch):
    buffers, maker = [], quantized.maker

    def guarding(*given):
        make = maker(*given)

        def guarded(like, lead):
            made = make(like, lead)
            pairs = [None if t is None else oracle.guarded(t, offset=256, rows=16) for t in made]
            buffers.extend(p for p in pairs if p is not None)
            return tuple(None if p is None else p[0] for p in pairs)

        return guarded

    monkeypatch.setattr(quantized, "maker", guarding)
    cases.run(case, build, "cuda")
    assert buffers
    for inner, buffer in buffers:
        oracle.check_guards(inner, buffer, str(case))


def test_more_than_2_to_the_31_elements_quantize_both_ways_and_back():
    need(24)
    rows, width = 300032, 7168  # 2150629376 elements
    x = torch.empty(rows, width, dtype=BF16, device="cuda").normal_(generator=_gen())
    data, scale, data_t, scale_t = ops.quantize(x, block=(1, 128), transposed=True, **ENGINE)
    reference, attrs = (
        op_table()["quantize"].reference,
        {"dtype": "float8_e4m3fn", "block": (1, 128), "layout": "row", "power_of_two": False},
    )
    for start in (0, 149888, rows - 128):
        part = slice(start, start + 128)
        want = reference({"x": x[part].cpu()}, attrs, ("data", "data_t"))
        oracle.same_bits(data[part], want["data"], f"rows from {start}")
        oracle.same_bits(scale[part], want["scale_inv"], f"scales of rows from {start}")
        oracle.same_bits(data_t[:, part], want["data_t"], f"columns from {start}")
        oracle.same_bits(
            scale_t[:, start // 128 : start // 128 + 1], want["scale_inv_t"], f"scales of columns from {start}"
        )
    del x
    back = ops.dequantize(data, scale, block=(1, 128), **ENGINE)
    oracle.equal(
        back[-5:], ops.dequantize(data[-5:], scale[-5:], block=(1, 128), engine="reference/eager"), "the last rows"
    )


def test_more_than_2_to_the_31_elements_in_swiglu_and_its_gradient():
    need(28)
    x = torch.empty(150016, 14336, dtype=BF16, device="cuda").normal_(generator=_gen())
    y = ops.swiglu(x, engine="activation/cute")
    for row in (0, 74899, 149796, 150015):  # both sides of element 2^31
        oracle.equal(y[row : row + 1], ops.swiglu(x[row : row + 1], engine="activation/cute"), f"row {row}")
    leaf = x.requires_grad_()
    (dx,) = torch.autograd.grad(ops.swiglu(leaf, engine="activation/cute"), leaf, y)
    for row in (0, 149796, 150015):
        part = x[row : row + 1].detach().requires_grad_()
        (alone,) = torch.autograd.grad(ops.swiglu(part, engine="activation/cute"), part, y[row : row + 1])
        oracle.equal(dx[row : row + 1], alone, f"gradient of row {row}")


@pytest.mark.parametrize("width", [24, 33, 1536])
def test_nan_and_infinities_of_swiglu_stand_where_the_reference_has_them(width):
    x = torch.randn(37, 2 * width, generator=_gen(), device="cuda", dtype=BF16)
    x[3, 5], x[7, 0], x[11, -1], x[13, 2], x[20] = float("nan"), float("inf"), float("-inf"), float("-inf"), 0.0
    weight = torch.rand(37, generator=_gen(1), device="cuda")
    dy = torch.randn(37, width, generator=_gen(2), device="cuda", dtype=BF16)
    for clamp in (None, 1.0):
        results = []
        for engine in ("activation/cute", "reference/eager"):
            leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
            y = ops.swiglu(leaves[0], clamp=clamp, row_weight=leaves[1], engine=engine)
            results.append((y, *torch.autograd.grad(y, leaves, dy)))
        for name, got, want in zip(("y", "dx", "drow_weight"), *results, strict=True):
            assert torch.equal(got.isnan(), want.isnan()), (
                f"{name}, clamp {clamp}: NaN in {int((got.isnan() != want.isnan()).sum())} other places"
            )
            assert torch.equal(got.isinf(), want.isinf()), f"{name}, clamp {clamp}: infinities in other places"


def test_every_8_bit_value_dequantizes_as_the_reference_does():
    codes = torch.arange(256, dtype=torch.uint8, device="cuda").repeat(512, 1)
    mx = (
        torch.arange(256, dtype=torch.uint8, device="cuda")
        .repeat_interleave(2)[:, None]
        .repeat(1, 8)
        .view(torch.float8_e8m0fnu)
    )
    block = torch.exp2(torch.arange(512, device="cuda") % 250 - 140.0)[:, None].repeat(1, 2)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        for scale, size in ((mx, (1, 32)), (block, (1, 128)), (block[300, :1], (0, 0))):
            for out in (BF16, torch.float16, torch.float32):
                got = ops.dequantize(codes.view(dtype), scale, block=size, dtype=out, **ENGINE)
                want = ops.dequantize(
                    codes.view(dtype).cpu(), scale.cpu(), block=size, dtype=out, engine="reference/eager"
                )
                assert torch.equal(got.isnan().cpu(), want.isnan()), (dtype, size, out)
                oracle.same_bits(
                    torch.where(got.isnan(), 0.0, got), torch.where(want.isnan(), 0.0, want), f"{dtype} {size} {out}"
                )


def test_fuzz_of_quantize_over_shapes_kinds_and_layouts():
    end, seed, count = time.monotonic() + FUZZ_S, int(time.time()), 0
    while time.monotonic() < end and count < 200:
        case = cases.fuzzed(seed + count)
        try:
            cases.run(case, build, "cuda", seed=seed)
        except Exception as error:
            raise AssertionError(f"cute_quantize.fuzzed({seed + count}) = {case}") from error
        count += 1
    print(f"{count} cases from seed {seed}")


def _step(kind):
    x = torch.randn(513, 4096, generator=_gen(), device="cuda", dtype=BF16)
    calls = {
        "block": lambda: ops.quantize(x, block=(1, 128), transposed=True, **ENGINE),
        "mx": lambda: ops.quantize(x, block=(1, 32), layout="swizzled", transposed=True, **ENGINE),
        "tensor": lambda: ops.quantize(x, block=(0, 0), scale=scale, amax=True, **ENGINE),
        "swiglu": lambda: (ops.swiglu(x, engine="activation/cute"),),
        "apart": lambda: apart(x),
    }
    apart = build("quantize/cute", cases.region(Case(513, 4096, BLOCK)), cases.apart()) if kind == "apart" else None
    scale = torch.full((1,), 3.0, device="cuda")
    return (x, *([scale] if kind == "tensor" else [])), calls[kind]


@pytest.mark.parametrize("kind", ["block", "mx", "tensor", "swiglu", "apart"])
def test_captured_calls_replay_on_new_data_bitwise_as_eager_and_wait_for_nothing(kind):
    data, step = _step(kind)
    replay = captured(step)
    for _ in range(2):
        new_data(*data[:1])
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            eager = step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for i, (a, b) in enumerate(zip(replay(), eager, strict=True)):
            oracle.same_bits(a, b, f"{kind}: result {i}")
