"""rope/cute beyond the shared cases: every path by knobs and layout, more than 2^31 elements, NaN and infinities, guard
rows, reruns, capture, and a fuzz that ends in time."""

import dataclasses
import time

import pytest
import torch

from layerplan.integration import ops
from layerplan.integration.engines.arch import Arch
from layerplan.integration.engines.contract import Decline
from layerplan.integration.engines.packages import locate
from layerplan.integration.plan_cache import memory
from layerplan.kernels.rope import cute as rope_engine
from tests import oracle
from tests.cases import cute_rope
from tests.cases.cute_rope import Case, knobs
from tests.gpu.capture import replays_and_waits_for_no_host
from tests.gpu.memory import need

pytestmark = pytest.mark.skipif(not locate("tvm_ffi").here, reason="needs apache-tvm-ffi")
BF16 = torch.bfloat16
FUZZ_S = 45  # kernels compile in it too
LLAMA = {c: Case(c, (257, 3), 32, 0 if c == "alone" else 8, 128, 64) for c in cute_rope.FORMS[:3]}
LLAMA |= {f"{c}_normed": dataclasses.replace(LLAMA["merge"], form=c, norm="rms_norm") for c in ("split", "norm_bwd")}


def _gen(seed=0):
    return torch.Generator(device="cuda").manual_seed(seed)


def built(case: Case):
    """The compiled launch of a case here."""
    arch, made = Arch.of_device(0), cute_rope.region(case)
    return rope_engine.CuteRope().build(memory.context(made, arch, cute_rope.offered(case, made, arch))).launch


@pytest.mark.parametrize("case", [*cute_rope.cases(), *cute_rope.LARGE], ids=str)
def test_results_are_as_exact_as_pytorchs_and_reruns_bitwise_equal(case):
    cute_rope.run(case, built(case), "cuda")


@pytest.mark.parametrize("given", [
    knobs(threads=64, rounds=4, ahead=True, resident=4), knobs(threads=128, rounds=2, ahead=False, resident=6),
    knobs(threads=128, rounds=4, ahead=True, resident=3), knobs(threads=256, rounds=1, ahead=True, resident=2),
], ids=lambda k: "-".join(f"{n}{v}" for n, v in k))  # fmt: skip
@pytest.mark.parametrize("form", LLAMA)
def test_every_choice_of_knobs_gives_the_same_results(form, given):
    case = dataclasses.replace(LLAMA[form], tokens=(4099, 2), knobs=given)
    cute_rope.run(case, built(case), "cuda")


@pytest.mark.parametrize("form", LLAMA)
def test_nothing_is_written_around_results_and_all_of_them_is(form, monkeypatch):
    buffers = []

    def guarded(like, shape, dtype=None):
        inner, buffer = oracle.guarded(
            torch.full(shape, float("nan"), dtype=dtype or like.dtype, device=like.device), 64
        )
        buffers.append((inner, buffer))
        return inner

    monkeypatch.setattr(rope_engine, "empty", guarded)
    for tokens in ((205, 1), (3, 7), (131,)):
        case = dataclasses.replace(LLAMA[form], tokens=tokens)
        cute_rope.run(case, built(case), "cuda")
    assert buffers
    for inner, buffer in buffers:
        oracle.check_guards(inner, buffer, "results")


def test_more_than_2_to_the_31_elements_split_turned_and_merged():
    need(30)
    tokens, case = 349526 + 64, dataclasses.replace(LLAMA["split"], tokens=(349526 + 64,), norm="rms_norm")  # 6144 each
    made = cute_rope.region(case)
    small = cute_rope.inputs(dataclasses.replace(case, tokens=(64,)), made, _gen())
    given = dict(zip(made.graph.inputs, small, strict=True))
    qkv = torch.empty(tokens, 6144, dtype=BF16, device="cuda").normal_(generator=_gen())
    angles = torch.rand(tokens, 64, generator=_gen(1), device="cuda") * 6.28
    given |= {"qkv": qkv, "cos": angles.cos(), "sin": angles.sin()}
    launch = built(case)
    whole = launch(*(given[v] for v in made.graph.inputs))
    for start in (0, tokens - 64):
        part = given | {n: given[n][start : start + 64] for n in ("qkv", "cos", "sin")}
        for i, (a, b) in enumerate(zip(whole, launch(*(part[v] for v in made.graph.inputs)), strict=True)):
            oracle.equal(a[start : start + 64], b, f"output {i} from token {start}")
    back = dataclasses.replace(LLAMA["merge"], tokens=(tokens,), inverse=True)
    merged = cute_rope.region(back)
    heads = {v: t for v, t in zip(made.graph.outputs, whole, strict=True) if t.shape[-1] == 128}
    v = heads.pop(next(name for name in heads if name.endswith(".v")))
    q, k = sorted(heads.values(), key=lambda t: -t.shape[1])
    parts = {"q_grad": q, "k_grad": k, "v_grad": v, "cos": given["cos"], "sin": given["sin"]}
    launch = built(back)
    dqkv = launch(*(parts[v] for v in merged.graph.inputs))
    start = tokens - 64
    oracle.equal(dqkv[start:], launch(*(parts[v][start:] for v in merged.graph.inputs)), "last tokens of the merge")


def test_tokens_more_than_2_to_the_31_elements_apart():
    need(12)
    case = dataclasses.replace(LLAMA["split"], tokens=(2,))
    made, launch = cute_rope.region(case), built(case)
    given = dict(zip(made.graph.inputs, cute_rope.inputs(case, made, _gen()), strict=True))
    far = torch.empty(2**31 + 16384, dtype=BF16, device="cuda").as_strided((2, 6144), (2**31 + 8192, 1))
    far.copy_(given["qkv"])
    want = launch(*(given[v] for v in made.graph.inputs))
    for i, (a, b) in enumerate(zip(launch(*((given | {"qkv": far})[v] for v in made.graph.inputs)), want, strict=True)):
        oracle.equal(a, b, f"output {i}")


@pytest.mark.parametrize("form", ["split_normed", "norm_bwd_normed"])
def test_nan_and_infinities_stay_in_their_heads_and_values_are_copied(form):
    case = LLAMA[form]
    made, launch = cute_rope.region(case), built(case)
    given = cute_rope.inputs(case, made, _gen())
    clean = launch(*given)
    at = next(i for i, v in enumerate(made.graph.inputs) if v in ("qkv", "q_grad"))
    heads = given[at].view(*case.tokens, -1, 128)
    heads[5, 1, 2, 7], heads[9, 0, 3, 0] = float("nan"), float("inf")
    v = next((i for i, n in enumerate(made.graph.inputs) if n == "v_grad"), at)
    values = given[v].view(*case.tokens, -1, 128)
    values[11, 2, 5 if v == at else 0, 3] = float("nan")
    for name, a, b in zip(made.graph.outputs, launch(*given), clean, strict=True):
        if a.shape[-1] not in (128, 6144) or a.dim() < 3:
            continue  # statistics and sums
        a, b = (t.view(*case.tokens, -1, 128) for t in (a, b))
        hit = torch.zeros(a.shape[:3], dtype=torch.bool, device="cuda")
        touched = a.isnan().any(-1) | a.isinf().any(-1)
        hit[5, 1], hit[9, 0], hit[11, 2] = True, True, True
        assert not bool((touched & ~hit).any()), f"{name}: other tokens than those were touched"
        assert int(touched.sum()) <= 3, f"{name}: {int(touched.sum())} heads were touched"
        oracle.equal(a[~touched], b[~touched], f"{name}: the other heads")


def test_fuzz_over_heads_dtypes_positions_and_layouts():
    end, seed, arch = time.monotonic() + FUZZ_S, int(time.time()), Arch.of_device(0)
    count = 0
    while time.monotonic() < end and count < 200:
        case = cute_rope.fuzzed(seed + count)
        count += 1
        if isinstance(rope_engine.CuteRope().match(cute_rope.region(case), arch), Decline):
            continue
        try:
            cute_rope.run(case, built(case), "cuda", seed=seed)
        except Exception as error:
            raise AssertionError(f"cute_rope.fuzzed({seed + count - 1}) = {case}") from error
    print(f"{count} cases from seed {seed}")


@pytest.mark.parametrize("form", LLAMA)
def test_a_captured_launch_replays_on_new_data_and_waits_for_no_host(form):
    case = dataclasses.replace(LLAMA[form], tokens=(513, 2))
    made, launch = cute_rope.region(case), built(case)
    given = cute_rope.inputs(case, made, _gen())

    def step():
        out = launch(*given)
        return out if isinstance(out, tuple) else (out,)

    replays_and_waits_for_no_host(step, given, form)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_rotation_and_its_gradient_through_the_functional_api(interleaved):
    x = torch.randn(37, 2, 6, 96, generator=_gen(), device="cuda", dtype=BF16, requires_grad=True)
    angles = torch.rand(40, 24, generator=_gen(1), device="cuda") * 6.28
    results = []
    for engine in ("rope/cute", "reference/eager"):
        y = ops.rope(x, angles.cos(), angles.sin(), interleaved=interleaved, engine=engine)
        results.append((y.detach(), *torch.autograd.grad(y, x, y.detach())))
    for a, b in zip(*results, strict=True):
        oracle.compare(a, b.double(), b, "rope")
