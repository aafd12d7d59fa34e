"""moe/cute without a GPU: what it takes and declines, its kernels on every arch, and its device code run thread by
thread."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from layerplan.integration.engines.arch import ARCHS
from layerplan.integration.engines.contract import BuildContext, Decline, Offer
from layerplan.integration.engines.manifest import BY_ID, GPUS
from layerplan.integration.graph.ir import Dim, GraphBuilder, TensorSpec
from layerplan.integration.planner.cover import region_of
from layerplan.integration.planner.planner import plan
from layerplan.kernels.moe import places
from layerplan.kernels.moe.cute import CuteMoE
from tests.cases import cute_group, cute_router, own_cases
from tests.cases.cute_moe import KINDS, LARGE, SMALL, Case, fuzzed, knobs, region

ROOT = Path(__file__).resolve().parents[2]
PERMUTE = Case("permute", ("rows", "row_probs"), 64, 6, 64, 2048, probs="float32")


def answer(case: Case, arch: str = "sm_90") -> Offer | Decline:
    engine, made = CuteMoE(), region(case)
    return engine.offer_with(made, ARCHS[arch], case.knobs) if case.knobs else engine.match(made, ARCHS[arch])


def constants(case: Case) -> dict[str, object]:
    made = region(case)
    (kernel,) = CuteMoE().kernels(made, ARCHS["sm_90"], CuteMoE().match(made, ARCHS["sm_90"]))
    return {"function": kernel.target.rpartition(":")[2], **dict(kernel.constants)}


# ---- what it declines ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "float64"}, ("float64", "float32, bfloat16, float16")),
        ({"probs": "float64"}, ("probs is float64",)),
        ({"slots": 33}, ("33 slots", "1 to 32")),
        ({"width": 0}, ("no elements",)),
    ],
)
def test_dtypes_slots_and_widths_that_it_has_no_code_for_are_declined_with_the_value(changes, words):
    got = answer(dataclasses.replace(PERMUTE, **changes))
    assert isinstance(got, Decline) and all(w in got.reason for w in words), got
    assert isinstance(answer(dataclasses.replace(PERMUTE, slots=32)), Offer)


def test_widths_known_only_at_run_time_and_rows_of_two_dtypes_are_declined():
    t, h = Dim("t", 64), Dim("h", 64)
    places, ends = TensorSpec((t, 2), "int32"), TensorSpec((4,), "int32")

    def asked(op, want, **specs):
        b = GraphBuilder()
        made = b.op(op, want=want, **{p: b.input(p, s) for p, s in specs.items()})
        graph = b.build(list(made) if isinstance(made, tuple) else [made])
        return CuteMoE().match(region_of(graph, graph.nodes), ARCHS["sm_90"])

    reason = asked(
        "permute", ["rows"], x=TensorSpec((t, h), "bfloat16"), row_map=places, counts=ends, offsets=ends
    ).reason
    assert "run time" in reason
    rows = TensorSpec((Dim("c", 128), 64), "float32")
    reason = asked(
        "unpermute_bwd",
        ["drows", "dprobs"],
        dy=TensorSpec((t, 64), "bfloat16"),
        row_map=places,
        counts=ends,
        offsets=ends,
        rows=rows,
        probs=TensorSpec((t, 2), "float32"),
    ).reason
    assert "rows of one dtype" in reason and "float32" in reason and "bfloat16" in reason


@pytest.mark.parametrize(
    ("given", "word"),
    [
        (knobs(96, 1), "threads = 96"),
        (knobs(128, 3), "vectors = 3"),
        (knobs(128, None), "vectors"),
    ],
)
def test_knobs_that_no_kernel_can_run_with_are_declined_by_name(given, word):
    got = answer(dataclasses.replace(PERMUTE, knobs=given))
    assert isinstance(got, Decline) and word in got.reason, got
    assert isinstance(answer(dataclasses.replace(PERMUTE, knobs=knobs(256, 2))), Offer)


# ---- what it offers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", GPUS)
def test_every_offer_names_the_kernels_that_its_build_asks_for_and_stands_for_its_own_knobs(arch):
    engine, chip = CuteMoE(), ARCHS[arch]
    for case in (*SMALL, *LARGE, *map(fuzzed, range(60))):
        own_cases.offer_is_whole(engine, region(case), chip, str(case))


def test_accesses_are_as_wide_as_rows_divide_into_and_offers_say_what_narrow_ones_cost():
    found = {
        width: constants(dataclasses.replace(PERMUTE, width=width))["access"] for width in (2048, 2052, 2050, 2049)
    }
    assert list(found.values()) == [16, 8, 4, 2]
    shares = [answer(dataclasses.replace(PERMUTE, width=width)).efficiency for width in found]
    assert shares == sorted(shares, reverse=True) and len(set(shares)) == 4
    assert constants(dataclasses.replace(PERMUTE, width=3, dtype="float32"))["access"] == 4


def test_groups_without_padding_are_code_for_any_number_of_experts():
    assert constants(PERMUTE) == constants(dataclasses.replace(PERMUTE, experts=8))
    assert constants(dataclasses.replace(PERMUTE, align=8))["experts"] == 64


def test_a_result_that_l2_does_not_keep_is_streamed_past_it():
    assert not constants(dataclasses.replace(PERMUTE, tokens=1024))["streaming"]  # 24 MiB
    assert constants(dataclasses.replace(PERMUTE, tokens=2048))["streaming"]


def test_probabilities_that_nobody_reads_are_not_looked_at():
    made = constants(dataclasses.replace(PERMUTE, want=("rows",)))
    assert (made["function"], made["weight"], made["numbers"]) == ("spread", None, False)


def test_each_direction_has_the_function_that_moves_the_least():
    found = {
        (op, want): constants(Case(op, want, 64, 6, 64, 2048, probs=probs))["function"] for op, want, probs in KINDS
    }
    assert {op: f for (op, want), f in found.items() if "dprobs" not in want} == {
        "permute": "spread",
        "unpermute": "gather",
        "permute_bwd": "gather",
        "unpermute_bwd": "spread",
    }
    assert found["unpermute_bwd", ("drows", "dprobs")] == "spread_dots"
    assert constants(Case("permute_bwd", ("dprobs",), 64, 6, 64, 1, probs="float32"))["function"] == "pick"


# ---- slots by expert, plans ------------------------------------------------------------------------------------------


def test_more_experts_than_a_block_counts_are_declined_with_their_number():
    def sort(op: str, experts: int, **more) -> Offer | Decline:
        return CuteMoE().match(cute_group.region(cute_group.Case(op, 64, 2, experts, **more)), ARCHS["sm_90"])

    assert isinstance(sort("group_by_expert", 1024), Offer) and isinstance(
        sort("tokens_per_expert", 128, sequences=8), Offer
    )
    assert (
        "1025 experts" in sort("group_by_expert", 1025).reason
        and "1032 experts" in sort("tokens_per_expert", 129, sequences=8).reason
    )


def test_a_small_map_is_sorted_in_one_launch_and_a_large_one_announces_what_its_blocks_hold():
    def sort(tokens: int) -> Offer:
        return CuteMoE().match(cute_group.region(cute_group.Case("group_by_expert", tokens, 8, 64)), ARCHS["sm_90"])

    assert (sort(512).launches, sort(512).workspace_bytes) == (1, 0)
    assert (sort(16384).launches, sort(16384).workspace_bytes) == (2, 4 * 64 * 64)  # 64 blocks of 2048 slots
    assert sort(1 << 22).workspace_bytes == 4 * 256 * 64


@pytest.mark.parametrize("arch", GPUS)
def test_the_sorts_ask_for_the_kernels_that_they_name(arch):
    for case in (*cute_group.SMALL, *cute_group.LARGE):
        made, asked = cute_group.region(case), []
        offer = CuteMoE().match(made, ARCHS[arch])
        CuteMoE().build(BuildContext(made, ARCHS[arch], offer, lambda kernel, asked=asked: asked.append(kernel)))
        assert tuple(asked) == CuteMoE().kernels(made, ARCHS[arch], offer) and len(asked) == 2
        assert CuteMoE().offer_with(made, ARCHS[arch], offer.knobs) == offer


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"experts": 513}, "513 experts"),
        ({"topk": 33}, "topk = 33"),
        ({"experts": 128, "groups": 64, "kept": 4}, "num_groups = 64"),
        ({"dtype": "float64"}, "float64"),
        ({"score": "sigmoid", "bias": "float64"}, "expert_bias is float64"),
    ],
)
def test_routers_that_a_warp_does_not_hold_are_declined_with_the_value(changes, word):
    case = dataclasses.replace(cute_router.Case("router", 64, 256, 8), **changes)
    got = CuteMoE().match(cute_router.region(case), ARCHS["sm_90"])
    assert isinstance(got, Decline) and word in got.reason, got
    assert isinstance(
        CuteMoE().match(cute_router.region(cute_router.Case("router", 64, 512, 32)), ARCHS["sm_90"]), Offer
    )


@pytest.mark.parametrize("arch", GPUS)
def test_routers_ask_for_the_kernel_that_they_name(arch):
    for case in (*cute_router.SMALL, *cute_router.LARGE):
        made, asked = cute_router.region(case), []
        offer = CuteMoE().match(made, ARCHS[arch])
        CuteMoE().build(BuildContext(made, ARCHS[arch], offer, lambda kernel, asked=asked: asked.append(kernel)))
        assert tuple(asked) == CuteMoE().kernels(made, ARCHS[arch], offer) and asked[0].target.endswith(f":{case.op}")
        assert json.loads(json.dumps(dict(asked[0].constants))) == dict(asked[0].constants)


def test_experts_that_cannot_be_told_are_seen_as_such():
    case = cute_router.Case("router", 4, 8, 2, "sigmoid")
    x = torch.arange(8.0).repeat(4, 1)
    x[1, 7] = x[1, 6]  # equal: the lowest index goes first
    x[2, 6] = x[2, 7] - 1e-6
    x[3, 3] = x[3, 4] - 1e-6  # not among the first
    assert cute_router.told(case, {"logits": x / 4}).tolist() == [True, True, False, True]
    assert cute_router.told(dataclasses.replace(case, score="softmax"), {"logits": x / 4}).all()
    bias = {"logits": torch.zeros(4, 8), "expert_bias": torch.arange(8.0)}
    assert cute_router.told(dataclasses.replace(case, bias="float32"), bias).all()
    assert not cute_router.told(
        dataclasses.replace(case, bias="float32"), {**bias, "expert_bias": torch.zeros(8)}
    ).any()


def test_the_planner_takes_it_for_both_ways_of_a_routed_layer():
    if absent := BY_ID["moe/cute"].absent():
        pytest.skip(absent)
    b, t = GraphBuilder(), Dim("t", 16384)
    x = b.input("x", TensorSpec((t, 2048), "bfloat16"))
    probs, expert_map = b.op("router", logits=b.input("logits", TensorSpec((t, 64), "float32")), topk=8)
    counts, offsets, row_map = b.op("group_by_expert", expert_map=expert_map, num_experts=64)
    places = {"counts": counts, "offsets": offsets, "row_map": row_map}
    rows = b.op("permute", x=x, **places)
    made = plan(b.build([b.op("unpermute", rows=rows, probs=probs, **places)]), ARCHS["sm_90"], needs_grad=(True, True))
    for part, ops in (
        (made.forward, ["router", "group_by_expert", "permute", "unpermute"]),
        (made.backward, ["unpermute_bwd", "permute_bwd", "router_bwd"]),
    ):
        assert {r.ops: r.engine for r in part.regions} == {(op,): "moe/cute" for op in ops}


# ---- device code -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(BY_ID["moe/cute"].absent() is not None, reason="needs nvidia-cutlass-dsl")
@pytest.mark.parametrize(
    "text",
    [
        "5x2 of 4",
        "7x3 of 5",
        "4x5 of 3",
        "unpermute y 3x11",
        "drows+dprobs 3x11",
        "4x2 of 3",
        "3x2 of 4",
        "2x2 of 2, width 1001",
        "permute_bwd dprobs",
    ],
)
@pytest.mark.timeout(900)
def test_the_device_code_agrees_with_the_reference_run_thread_by_thread(text):
    simulate("cute_moe", text)


@pytest.mark.skipif(BY_ID["moe/cute"].absent() is not None, reason="needs nvidia-cutlass-dsl")
@pytest.mark.parametrize(
    ("cases", "text"),
    [
        ("cute_group", "few=300"),
        ("cute_group", "300x2"),
        ("cute_group", "60x2"),
        ("cute_router", "of 40"),
        ("cute_router", "of 1"),
    ],
)
@pytest.mark.timeout(900)
def test_the_device_code_of_sorts_and_routers_agrees_with_the_reference_run_thread_by_thread(cases, text):
    simulate(cases, text)


def simulate(cases: str, text: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", f"tests.cases.{cases}", text], cwd=ROOT, capture_output=True, text=True, timeout=800
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    assert "agree with the reference" in run.stdout and not run.stdout.startswith("0 ")


@pytest.mark.skipif(BY_ID["moe/cute"].absent() is not None, reason="needs nvidia-cutlass-dsl")
@pytest.mark.timeout(900)
def test_compiled_code_takes_the_arguments_that_launches_give_it(tmp_path):
    env = os.environ | {"LAYERPLAN_CACHE": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    texts = (
        "permute rows+row_probs 4x5",
        "unpermute y 3x1 of 3, width 8 dtype=float32 probs",
        "unpermute_bwd drows+dprobs 4x5",
        "permute_bwd dprobs 5x3",
        "group_by_expert 1x1",
        "tokens_per_expert 150x4",
        "5 to 2 of 8",
        "5 to 8 of 72",
    )
    command = [sys.executable, "-m", "tests.cases.cute_moe", "--reach", *texts]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    assert f"reached the driver: {len(texts)}\n" in run.stdout, run.stdout[-500:] + run.stderr[-3000:]


@pytest.mark.parametrize("t", [
    torch.arange(24.0).view(6, 4), torch.arange(48.0).view(6, 8)[:, ::2], torch.arange(24.0).view(4, 6).t(),
    torch.arange(9.0)[1:].view(2, 4), torch.arange(8.0).view(4, 2)[:, 1:], torch.arange(8.0).as_strided((1, 4), (3, 2)),
    torch.arange(8.0).as_strided((1, 1), (3, 5)), torch.empty(0, 4),
], ids=lambda t: f"{list(t.shape)}-{t.stride()}-{t.storage_offset()}")  # fmt: skip
def test_numbers_by_slot_reach_a_kernel_contiguous_and_aligned_whatever_their_strides(t):
    made = places.whole(t)
    assert made.stride() == (t.shape[1], 1) and not made.data_ptr() % 16 and torch.equal(made, t)
    assert (made is t) == (t.stride() == (t.shape[1], 1) and not t.data_ptr() % 16)
