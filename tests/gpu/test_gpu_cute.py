"""Our own CuTe kernels beyond the shared cases: their paths by knobs, wide and odd rows, layouts, more than 2^31
elements, NaN and infinities, guard rows, reruns, capture, and a fuzz that ends in time."""

import time

import pytest
import torch

from layerplan.integration import ops
from layerplan.integration.engines.arch import Arch
from layerplan.integration.engines.packages import locate
from layerplan.integration.plan_cache import memory
from layerplan.kernels.common.quantized import workspace_bytes
from layerplan.kernels.norm import cute as norm_engine
from tests import oracle
from tests.cases import cute_norm, cute_norm_quantize
from tests.gpu.capture import captured, new_data
from tests.gpu.memory import need

pytestmark = pytest.mark.skipif(not locate("tvm_ffi").here, reason="needs apache-tvm-ffi")
BF16 = torch.bfloat16
FUZZ_S = 45  # kernels compile in it too
NORMS = {"rms_norm": ops.rms_norm, "layer_norm": ops.layer_norm}


def _gen(seed=0):
    return torch.Generator(device="cuda").manual_seed(seed)


def norm_launch(case: cute_norm.Case):
    """The compiled launch of a case here, with its knobs where they are for this arch."""
    arch, region = Arch.of_device(0), cute_norm.region(case)
    return norm_engine.CuteNorm().build(memory.context(region, arch, cute_norm.offered(case, region, arch))).launch


def named(case: cute_norm.Case) -> str:
    extra = [
        *case.given,
        *(["zero"] if case.zero else []),
        *([f"gap{case.gap}"] if case.gap else []),
        *(f"{k}{v}" for k, v in case.knobs),
    ]
    return "-".join([case.op, f"{case.rows}x{case.width}", case.dtype, case.other, *extra, *case.want])


@pytest.mark.parametrize("case", [*cute_norm.cases(), *cute_norm.LARGE], ids=named)
def test_a_norm_is_as_exact_as_pytorchs_and_reruns_bitwise_equal(case):
    cute_norm.run(case, norm_launch(case), "cuda")


@pytest.mark.parametrize("op", NORMS)
def test_fault_21_more_than_2_to_the_31_elements_in_a_norm_and_its_gradient(op):
    need(28)
    x = torch.empty(524289, 4096, dtype=BF16, device="cuda").normal_(generator=_gen()).requires_grad_()
    w = torch.randn(4096, generator=_gen(1), device="cuda", dtype=BF16)
    y = NORMS[op](x, w, eps=1e-5, engine="norm/cute")
    (dx,) = torch.autograd.grad(y, x, x.detach())
    for row in (0, 262144, 524287, 524288):
        part = x[row : row + 1].detach().requires_grad_()
        alone = NORMS[op](part, w, eps=1e-5, engine="norm/cute")
        oracle.equal(y[row : row + 1], alone, f"row {row}")
        oracle.equal(dx[row : row + 1], torch.autograd.grad(alone, part, part.detach())[0], f"gradient of row {row}")


@pytest.mark.parametrize("op", NORMS)
def test_rows_more_than_2_to_the_31_elements_apart(op):
    need(16)
    buffer = torch.empty(2**31 + 8192, dtype=BF16, device="cuda")
    x = buffer.as_strided((2, 4096), (2**31 + 4096, 1)).normal_(generator=_gen())
    w = torch.randn(4096, generator=_gen(1), device="cuda", dtype=BF16)
    oracle.equal(
        NORMS[op](x, w, eps=1e-5, engine="norm/cute"),
        NORMS[op](x.contiguous(), w, eps=1e-5, engine="norm/cute"),
        "far rows",
    )


@pytest.mark.parametrize("op", NORMS)
@pytest.mark.parametrize("width", [64, 769, 4096])
def test_nan_and_infinities_stay_in_their_rows_and_stand_where_the_reference_has_them(op, width):
    x = torch.randn(37, width, generator=_gen(), device="cuda", dtype=BF16)
    x[3, width // 2], x[7, 0], x[11, -1], x[20] = float("nan"), float("inf"), float("-inf"), 0.0
    w, dy = (
        torch.randn(width, generator=_gen(1), device="cuda", dtype=BF16),
        torch.randn(37, width, generator=_gen(2), device="cuda", dtype=BF16),
    )
    results = []
    for engine in ("norm/cute", "reference/eager"):
        leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        y = NORMS[op](*leaves, eps=1e-5, engine=engine)
        results.append((y, *torch.autograd.grad(y, leaves, dy)))
    for name, got, want in zip(("y", "dx", "dweight"), *results, strict=True):
        assert torch.equal(got.isnan(), want.isnan()), (
            f"{name}: NaN in {int((got.isnan() != want.isnan()).sum())} other places"
        )
        assert torch.equal(got.isinf(), want.isinf()), (
            f"{name}: infinities in {int((got.isinf() != want.isinf()).sum())} other places"
        )
        if name != "dweight":
            fine = ~want.isnan() & ~want.isinf()
            assert torch.allclose(got[fine].float(), want[fine].float(), rtol=2**-6, atol=2**-6), (
                f"{name}: clean rows have changed"
            )


@pytest.mark.parametrize("width", [33, 64, 4096, 12288])
@pytest.mark.parametrize("stages", [0, 2])
def test_a_norm_writes_nothing_around_its_results(width, stages, monkeypatch):
    buffers = []

    def guarded(x):
        inner, buffer = oracle.guarded(torch.full(x.shape, float("nan"), dtype=x.dtype, device=x.device), 16 * width)
        buffers.append((inner, buffer))
        return inner

    monkeypatch.setattr(norm_engine, "fresh", guarded)
    threads = 32 if width < 4096 else 256 if width == 4096 else 768
    knobs = cute_norm.knobs(threads=threads, rows=3 if width < 12288 else 1, stages=stages if width % 8 == 0 else 0)
    for op, given, want in (
        ("layer_norm", ("weight", "residual"), ("y", "residual_out")),
        ("layer_norm_bwd", ("weight", "dresidual"), ("dx", "dweight")),
    ):
        case = cute_norm.Case(op, 205, width, given=given, want=want, knobs=knobs)
        cute_norm.run(case, norm_launch(case), "cuda")
    assert buffers
    for inner, buffer in buffers:
        oracle.check_guards(inner, buffer, "results")


def test_fuzz_of_norms_over_shapes_dtypes_ports_and_layouts():
    end, seed = time.monotonic() + FUZZ_S, int(time.time())
    count = 0
    while time.monotonic() < end and count < 200:
        case = cute_norm.fuzzed(seed + count)
        try:
            cute_norm.run(case, norm_launch(case), "cuda", seed=seed)
        except Exception as error:
            raise AssertionError(f"cute_norm.fuzzed({seed + count}) = {case}") from error
        count += 1
    print(f"{count} cases from seed {seed}")


def _norm_call(op, residual):
    def call(t):
        return NORMS[op](*t[:2], eps=1e-5, residual=t[2] if residual else None, engine="norm/cute")

    return call


CALLS = {
    f"{op}{'_residual' if residual else ''}": (
        ((513, 4096), (4096,), *([(513, 4096)] if residual else [])),
        _norm_call(op, residual),
    )
    for op in NORMS
    for residual in (False, True)
}


def _step(kind):
    """(leaves and gradients, a step that gives results and all gradients)."""
    shapes, call = CALLS[kind]
    t = [torch.randn(*s, generator=_gen(i), device="cuda", dtype=BF16).requires_grad_() for i, s in enumerate(shapes)]
    first = call(t)
    first = first if isinstance(first, tuple) else (first,)
    grads = [torch.randn_like(o) for o in first]

    def step():
        out = call(t)
        out = out if isinstance(out, tuple) else (out,)
        return (*out, *torch.autograd.grad(out, t, grads))

    return (*t, *grads), step


@pytest.mark.parametrize("kind", CALLS)
def test_captured_forward_and_backward_replay_on_new_data_bitwise_as_eager(kind):
    data, step = _step(kind)
    replay = captured(step)
    for _ in range(2):
        new_data(*data)
        for i, (a, b) in enumerate(zip(replay(), step(), strict=True)):
            oracle.equal(a, b, f"{kind}: result {i}")


@pytest.mark.parametrize("kind", CALLS)
def test_hot_path_makes_no_host_sync_and_reruns_are_bitwise_equal(kind):
    _, step = _step(kind)
    first = step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        runs = [step() for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for run in runs:
        for i, (a, b) in enumerate(zip(run, first, strict=True)):
            oracle.equal(a, b, f"{kind}: result {i}")


# ---- norms with quantize --------------------------------------------------------------------------------------------


def quantize_name(case: cute_norm_quantize.Case) -> str:
    words = [
        case.op,
        f"{case.rows}x{case.width}",
        case.dtype,
        case.fp8,
        *(f"{k}{v}" for k, v in case.quantize.items()),
        *case.given,
        *case.extra,
    ]
    return "-".join(
        words
        + ["transposed"] * case.transposed
        + ["amax"] * case.amax
        + [case.values, *(f"{k}{v}" for k, v in case.knobs)]
    )


@pytest.mark.parametrize("case", [*cute_norm_quantize.SMALL, *cute_norm_quantize.LARGE], ids=quantize_name)
def test_a_norm_with_quantize_gives_the_bits_of_both_one_after_the_other(case):
    arch = Arch.of_device(0)

    def build(engine, region, offer):
        launch = engine.build(memory.context(region, arch, offer)).launch
        scales = workspace_bytes(case.rows, case.width) // 4 if dict(offer.knobs).get("apart") else 0

        def twice(*t):
            oracle.poison(*t, torch.empty(scales, device="cuda"))
            first, second = launch(*t), launch(*t)
            for a, b in zip(*((r if isinstance(r, tuple) else (r,)) for r in (first, second)), strict=True):
                cute_norm_quantize.same(a, b, f"{case}: another run")
            return first

        return twice

    cute_norm_quantize.run(case, build, arch, "cuda")
