"""moe/cute and moe_quantize/cute beyond the shared cases: every path by knobs, maps and layouts, rows past 2^31
elements, NaN, guard rows, reruns, capture, and a fuzz that ends in time."""

import dataclasses
import random
import time

import pytest
import torch

from layerplan.integration import ops
from layerplan.integration.engines.arch import Arch
from layerplan.integration.engines.manifest import BY_ID
from layerplan.integration.engines.packages import locate
from layerplan.integration.plan_cache import memory
from layerplan.kernels.common import quantized
from tests import oracle
from tests.cases import cute_group, cute_moe_quantize, cute_router
from tests.cases import cute_moe as cases
from tests.cases.cute_moe import KINDS, Case, knobs
from tests.gpu.capture import captured, replays_and_waits_for_no_host
from tests.gpu.memory import need

pytestmark = pytest.mark.skipif(not locate("tvm_ffi").here, reason="needs apache-tvm-ffi")
BF16 = torch.bfloat16
FUZZ_S = 45  # kernels compile in it too
MODEL = {
    "-".join((op, *want, *(("weighted",) if probs else ()))): Case(op, want, 1031, 6, 64, 2048, probs=probs)
    for op, want, probs in KINDS
}
MAPS = {
    "skewed": {"skew": 0.3},
    "dropped": {"dropped": 0.5, "align": 16},
    "all_dropped": {"dropped": 1.0, "align": 8},
    "one_expert": {"one": True, "align": 128},
    "no_tokens": {"tokens": 0, "align": 8},
    "one_token": {"tokens": 1},
    "one_slot": {"slots": 1, "align": 128},
}


def _gen(seed=0):
    return torch.Generator(device="cuda").manual_seed(seed)


def built(case: Case):
    """The compiled launch of a case here."""
    made, arch = cases.region(case), Arch.of_device(0)
    return BY_ID["moe/cute"].load().build(memory.context(made, arch, cases.offered(case, made, arch))).launch


def given(case: Case, seed: int = 0) -> list[torch.Tensor]:
    return [cases.placed(t, "cuda") for t in cases.inputs(case, cases.region(case), seed).values()]


def results(got) -> tuple[torch.Tensor, ...]:
    return got if isinstance(got, tuple) else (got,)


@pytest.mark.parametrize("case", [*cases.SMALL, *cases.LARGE], ids=str)
def test_results_are_as_exact_as_pytorchs_and_reruns_bitwise_equal(case):
    cases.run(case, built(case), "cuda")


@pytest.mark.parametrize("changes", MAPS.values(), ids=MAPS)
@pytest.mark.parametrize("name", MODEL)
def test_any_map_of_tokens_to_experts_is_right(name, changes):
    case = dataclasses.replace(MODEL[name], **({"tokens": 517} | changes))
    cases.run(case, built(case), "cuda")


@pytest.mark.parametrize("choice", [(64, 1), (128, 2), (256, 1), (512, 4)], ids=str)
@pytest.mark.parametrize("name", MODEL)
def test_every_choice_of_knobs_gives_the_same_results(name, choice):
    case, dots = MODEL[name], MODEL[name].op == "unpermute_bwd" and "dprobs" in MODEL[name].want
    for streaming in (False, True):
        chosen = dataclasses.replace(case, knobs=knobs(choice[0], None if dots else choice[1], streaming))
        cases.run(chosen, built(chosen), "cuda")


@pytest.mark.parametrize("name", MODEL)
def test_nothing_is_written_around_the_results_nor_behind_the_last_group(name, monkeypatch):
    case, buffers, addresses = (
        dataclasses.replace(MODEL[name], tokens=33, width=40, align=16, dropped=0.3),
        [],
        quantized.addresses,
    )

    def guarding(made):
        pairs = [
            (None, None) if t is None else oracle.guarded(torch.full_like(t, oracle.SENTINEL), offset=256, rows=16)
            for t in made
        ]
        buffers.extend(p for p in pairs if p[0] is not None)
        return addresses(tuple(inner for inner, _ in pairs))

    run, tensors = built(case), given(case)
    expected = results(run(*tensors))
    monkeypatch.setattr(quantized, "addresses", guarding)
    run(*tensors)
    used = int(cases.inputs(case, cases.region(case), 0)["offsets"][-1]) if case.op != "permute_bwd" else 0
    assert len(buffers) == len(expected)
    for port, (inner, buffer), right in zip(case.want, buffers, expected, strict=True):
        oracle.check_guards(inner, buffer, f"{case}: {port}")
        by_row = port in ("rows", "row_probs", "drows")
        oracle.same_bits(inner[:used] if by_row else inner, right[:used] if by_row else right, f"{case}: {port}")
        assert not by_row or bool((inner[used:] == torch.tensor(oracle.SENTINEL).to(inner.dtype).item()).all()), (
            f"{case}: {port} behind the last group"
        )


# ---- rows that are quantised -----------------------------------------------------------------------------------------

QUANTIZED = cute_moe_quantize.Case(517, 6, 64, 2048, probs="float32")


def quantizes(case: cute_moe_quantize.Case):
    """The compiled launch of a case here."""
    made, arch = cute_moe_quantize.region(case), Arch.of_device(0)
    offer = cute_moe_quantize.offered(case, made, arch)
    return BY_ID[cute_moe_quantize.ENGINE].load().build(memory.context(made, arch, offer)).launch


def quantized_inputs(case: cute_moe_quantize.Case, seed: int = 0) -> list[torch.Tensor]:
    return [cases.placed(t, "cuda") for t in cute_moe_quantize.inputs(case, cute_moe_quantize.region(case), seed).values()]


@pytest.mark.parametrize("case", [*cute_moe_quantize.SMALL, *cute_moe_quantize.LARGE], ids=str)
def test_quantised_rows_are_those_of_the_references_bit_for_bit(case):
    cute_moe_quantize.run(case, quantizes(case), "cuda")


@pytest.mark.parametrize("changes", MAPS.values(), ids=MAPS)
def test_rows_of_any_map_are_quantised(changes):
    case = dataclasses.replace(QUANTIZED, **changes)
    cute_moe_quantize.run(case, quantizes(case), "cuda")


@pytest.mark.parametrize("choice", [(64, 1), (128, 2), (256, 1), (512, 4)], ids=str)
def test_every_choice_of_knobs_quantises_the_same(choice):
    for streaming in (False, True):
        case = dataclasses.replace(QUANTIZED, align=16, knobs=knobs(*choice, streaming))
        cute_moe_quantize.run(case, quantizes(case), "cuda")


@pytest.mark.parametrize("align", [1, 16])
def test_no_quantised_row_is_written_around_the_results_nor_behind_the_last_group(align, monkeypatch):
    case, buffers, addresses = dataclasses.replace(QUANTIZED, tokens=33, width=136, align=align, dropped=0.3), [], quantized.addresses

    def guarding(made):
        pairs = [oracle.guarded(oracle.sentinels(tuple(t.shape), t.dtype, t.device), offset=256, rows=16) for t in made]
        buffers.extend(pairs)
        return addresses(tuple(inner for inner, _ in pairs))

    run, tensors, made = quantizes(case), quantized_inputs(case), cute_moe_quantize.region(case)
    used = int(tensors[made.graph.inputs.index("offsets")][-1])
    expected = dict(zip(made.graph.outputs, run(*tensors), strict=True))
    monkeypatch.setattr(quantized, "addresses", guarding)
    run(*tensors)
    permute, quantize = made.nodes
    in_order = (quantize.output("data"), quantize.output("scale_inv"), permute.output("row_probs"))
    for name, (inner, buffer) in zip(in_order, buffers, strict=True):
        oracle.check_guards(inner, buffer, f"{case}: {name}")
        oracle.same_bits(inner[:used], expected[name][:used], f"{case}: {name}")
        tail = oracle.sentinels(tuple(inner[used:].shape), inner.dtype, inner.device)
        assert len(tail), "there are rows behind the last group"
        oracle.same_bits(inner[used:], tail, f"{case}: {name} behind the last group")


def test_a_captured_launch_quantises_new_data_and_waits_for_no_host():
    launch, tensors = quantizes(QUANTIZED), quantized_inputs(QUANTIZED)

    def step():  # as numbers that can be compared: e4m3 of randn holds no NaN
        return tuple(t.float() for t in launch(*tensors))

    replays_and_waits_for_no_host(step, tensors, "permute and quantize")


def test_fuzz_over_rows_that_are_quantised():
    end, seed, count = time.monotonic() + FUZZ_S / 3, int(time.time()), 0
    while time.monotonic() < end and count < 100:
        case = cute_moe_quantize.fuzzed(seed + count)
        count += 1
        try:
            cute_moe_quantize.run(case, quantizes(case), "cuda", seed=seed)
        except Exception as error:
            raise AssertionError(f"cute_moe_quantize.fuzzed({seed + count - 1}) = {case}") from error


def test_quantised_rows_past_2_31_elements():
    need(24)
    case = cute_moe_quantize.Case(131136, 4, 1, 4104)  # 2^31 + 5 million elements
    x = torch.empty(case.tokens, case.width, dtype=BF16, device="cuda").normal_(generator=_gen())
    places = _far(case.tokens, case.slots)
    data, scales = quantizes(case)(*(({"x": x} | places)[p] for p in cute_moe_quantize.region(case).graph.inputs))
    assert data.numel() > 2**31
    for part in (slice(0, 64), slice(case.tokens - 64, case.tokens)):
        right, right_scales = ops.quantize(x[part], block=(1, 128), engine="reference/eager")
        for slot in range(case.slots):
            rows = places["row_map"][part, slot].long()
            oracle.same_bits(data.view(torch.uint8)[rows], right.view(torch.uint8), f"slot {slot} of tokens {part}")
            oracle.same_bits(scales[rows], right_scales, f"scales of slot {slot} of tokens {part}")


# ---- slots by expert -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [*cute_group.SMALL, *cute_group.LARGE], ids=str)
def test_slots_are_sorted_and_counted_as_the_reference_does(case):
    cute_group.run(case, grouped(case), "cuda")


def grouped(case: cute_group.Case):
    made, arch = cute_group.region(case), Arch.of_device(0)
    return BY_ID["moe/cute"].load().build(memory.context(made, arch, cute_group.offered(case, made, arch))).launch


@pytest.mark.parametrize("op", cute_group.OPS)
def test_a_captured_sort_replays_on_other_maps(op):
    case = cute_group.Case(op, 5003, 6, 64, 16 if op == "group_by_expert" else 1)
    launch = grouped(case)
    held = cute_group.inputs(case, cute_group.region(case), 0)["expert_map"].cuda()
    replay = captured(lambda: results(launch(held)))
    for seed in (1, 2):
        held.copy_(
            cute_group.inputs(dataclasses.replace(case, kind="skewed"), cute_group.region(case), seed)["expert_map"]
        )
        for i, (a, b) in enumerate(zip(replay(), results(launch(held)), strict=True)):
            oracle.equal(a, b, f"{op}: result {i}")


def test_sorts_of_random_sizes():
    end, r, count = time.monotonic() + FUZZ_S / 3, random.Random(int(time.time())), 0
    while time.monotonic() < end and count < 100:
        kind, count = r.choice(("random", "skewed", "one", "dropped", "foreign")), count + 1
        case = cute_group.Case(
            r.choice(cute_group.OPS),
            r.choice((1, 33, r.randint(1, 200000))),
            r.randint(1, 9),
            r.choice((1, 8, 60, 128, 257)),
            kind=kind,
        )
        cute_group.run(case, grouped(case), "cuda", seed=count)


# ---- router ----------------------------------------------------------------------------------------------------------


def routed(case: cute_router.Case):
    made, arch = cute_router.region(case), Arch.of_device(0)
    return BY_ID["moe/cute"].load().build(memory.context(made, arch, cute_router.offered(case, made, arch))).launch


@pytest.mark.parametrize("case", [*cute_router.SMALL, *cute_router.LARGE], ids=str)
def test_routers_choose_what_the_reference_does_and_weigh_it_as_exactly_as_pytorch(case):
    cute_router.run(case, routed(case), "cuda")


def test_logits_that_are_nan_or_hidden_still_give_different_experts_to_each_slot():
    for score in ("softmax", "pre_softmax", "sigmoid"):
        case = cute_router.Case("router", 64, 60, 8, score)
        logits = torch.full((64, 60), float("nan"), device="cuda")
        logits[::2] = float("-inf")
        _, experts = routed(case)(logits)
        assert bool((experts == torch.arange(8, device="cuda")).all()), f"{score}: equal scores take the lowest index"


def test_a_router_and_its_gradient_through_the_functional_api():
    logits = torch.randn(515, 64, generator=_gen(), device="cuda")
    dy, found = torch.randn(515, 6, generator=_gen(1), device="cuda"), []
    for engine, dtype in (("moe/cute", torch.float32), ("reference/eager", torch.float32), ("reference/eager", torch.float64)):
        leaf = logits.to(dtype).requires_grad_()
        probs, experts = ops.router(leaf, topk=6, score_function="softmax", engine=engine)
        found.append((experts, probs.detach(), *torch.autograd.grad((probs * dy).sum(), leaf)))
    (ours, *values), (expected, *peers), (_, *exact) = found
    oracle.equal(ours, expected, "experts of different logits")
    for name, a, truth, peer in zip(("probs", "dlogits"), values, exact, peers, strict=True):
        oracle.compare(a, truth, peer, name)


# ---- more than 2^31 elements -----------------------------------------------------------------------------------------


def _far(tokens: int, slots: int) -> dict[str, torch.Tensor]:
    """A map of so many tokens to one group, by port; the slots of the first token are the last rows."""
    places = torch.arange(tokens * slots, device="cuda").flip(0).int().view(tokens, slots)
    ends = torch.tensor([tokens * slots], dtype=torch.int32, device="cuda")
    return {"row_map": places, "counts": ends, "offsets": ends}


def test_rows_past_2_31_elements_are_moved_there_and_back():
    need(24)
    case = Case("permute", ("rows", "row_probs"), 131136, 4, 1, 4104, probs="float32")  # 2^31 + 5 million elements
    x = torch.empty(case.tokens, case.width, dtype=BF16, device="cuda").normal_(generator=_gen())
    probs = torch.rand(case.tokens, case.slots, generator=_gen(1), device="cuda")
    places = _far(case.tokens, case.slots)
    rows, row_probs = built(case)(x, places["row_map"], places["counts"], places["offsets"], probs)
    assert rows.numel() > 2**31
    oracle.equal(row_probs.flip(0).view(probs.shape), probs, "row_probs")
    for part in (slice(0, 64), slice(case.tokens - 64, case.tokens)):
        for slot in range(case.slots):
            oracle.equal(rows[places["row_map"][part, slot].long()], x[part], f"slot {slot} of tokens {part}")
    back = Case("unpermute", ("y",), case.tokens, case.slots, 1, case.width, probs="float32")
    y = built(back)(rows, places["row_map"], places["counts"], places["offsets"], probs)
    for part in (slice(0, 64), slice(case.tokens - 64, case.tokens)):
        exact = (x[part].double() * probs[part].double().sum(1, keepdim=True)).float()
        oracle.compare(y[part], exact, exact.to(BF16), f"tokens {part}")
    del y
    dots = Case("unpermute_bwd", ("dprobs",), case.tokens, case.slots, 1, case.width, probs="float32")
    tensors = {**places, "dy": x, "rows": rows, "probs": probs}
    dprobs = built(dots)(*(tensors[p] for p in cases.region(dots).graph.inputs))
    for part in (slice(0, 64), slice(case.tokens - 64, case.tokens)):
        exact, peer = (
            t.square().sum(1, keepdim=True).expand(-1, case.slots) for t in (x[part].double(), x[part].float())
        )
        oracle.compare(dprobs[part], exact, peer, f"tokens {part}")


def test_rows_2_31_elements_apart_are_read():
    need(12)
    case = Case("permute", ("rows",), 2, 3, 1, 264)
    far = torch.empty(2**31 + 16384, dtype=BF16, device="cuda").as_strided((2, 264), (2**31 + 8192, 1))
    far.normal_(generator=_gen())
    places = _far(2, 3)
    rows = built(case)(far, places["row_map"], places["counts"], places["offsets"])
    oracle.equal(rows.flip(0).view(2, 3, 264), far.unsqueeze(1).expand(2, 3, 264), "rows")


# ---- values, capture, the functional API -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["unpermute-y", "unpermute-y-weighted", "permute_bwd-dx-dprobs-weighted"])
def test_nan_stays_in_its_token_and_column(name):
    case, launch = dataclasses.replace(MODEL[name], tokens=130), built(MODEL[name])
    made = cases.region(case)
    tensors = dict(zip(made.graph.inputs, given(case), strict=True))
    clean = results(launch(*tensors.values()))[0].clone()
    tensors[case.matrix][int(tensors["row_map"][7, 2]), 11] = float("nan")
    dirty = results(launch(*tensors.values()))[0]
    assert dirty.isnan().nonzero().tolist() == [[7, 11]]
    dirty[7, 11] = clean[7, 11]
    oracle.equal(dirty, clean, "the others")


@pytest.mark.parametrize("name", MODEL)
def test_a_captured_launch_replays_on_new_data_and_waits_for_no_host(name):
    case = dataclasses.replace(MODEL[name], tokens=517)
    launch, tensors = built(case), given(case)

    def step():
        return results(launch(*tensors))

    replays_and_waits_for_no_host(step, tensors, name)


@pytest.mark.parametrize("align", [1, 16])
def test_permute_and_unpermute_with_their_gradients_through_the_functional_api(align):
    x = torch.randn(331, 1024, generator=_gen(), device="cuda", dtype=BF16, requires_grad=True)
    probs = torch.rand(331, 4, generator=_gen(1), device="cuda", requires_grad=True)
    experts = torch.rand(331, 32, generator=_gen(2), device="cuda").topk(4).indices.int()
    dy, found = torch.randn(331, 1024, generator=_gen(3), device="cuda", dtype=BF16), []
    for engine in ("moe/cute", "reference/eager"):
        permuted = ops.permute(x, experts, num_experts=32, probs=probs, align=align, engine=engine)
        y, used = ops.unpermute(permuted.rows, permuted, probs, engine=engine), int(permuted.offsets[-1])
        whole = (y * dy).float().sum() + permuted.probs[:used].square().sum()
        found.append((y.detach(), permuted.row_map, permuted.offsets, *torch.autograd.grad(whole, (x, probs))))
    for name, a, b in zip(("y", "row_map", "offsets", "dx", "dprobs"), *found, strict=True):
        if b.is_floating_point():
            oracle.compare(a, b.double(), b, name)
        else:
            oracle.equal(a, b, name)


def test_fuzz_over_widths_maps_dtypes_and_layouts():
    end, seed, count = time.monotonic() + FUZZ_S, int(time.time()), 0
    while time.monotonic() < end and count < 200:
        case = cases.fuzzed(seed + count)
        count += 1
        try:
            cases.run(case, built(case), "cuda", seed=seed)
        except Exception as error:
            raise AssertionError(f"cute_moe.fuzzed({seed + count - 1}) = {case}") from error
    print(f"{count} cases from seed {seed}")
