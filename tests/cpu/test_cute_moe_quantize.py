"""moe_quantize/cute without a GPU: what it takes and declines, its kernel on every arch, and its device code run thread
by thread."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from layerplan.integration.engines.arch import ARCHS
from layerplan.integration.engines.contract import Decline, Offer
from layerplan.integration.engines.manifest import BY_ID, GPUS
from layerplan.integration.planner import tune
from layerplan.integration.planner.cover import fits, region_of
from layerplan.integration.planner.planner import plan
from layerplan.kernels.moe.cute_quantize import CuteMoEQuantize
from tests.cases import cute_quantize, own_cases
from tests.cases.cute_moe import knobs
from tests.cases.cute_moe_quantize import LARGE, SMALL, Case, fuzzed, region
from tests.cases.trial import off_trial

ROOT = Path(__file__).resolve().parents[2]
USUAL = Case(64, 8, 64, 2048, probs="float32")
needs_compiler = pytest.mark.skipif(BY_ID["moe_quantize/cute"].absent() is not None, reason="needs nvidia-cutlass-dsl")


def answer(case: Case) -> Offer | Decline:
    engine, made = CuteMoEQuantize(), region(case)
    return engine.offer_with(made, ARCHS["sm_90"], case.knobs) if case.knobs else engine.match(made, ARCHS["sm_90"])


def constants(case: Case) -> dict[str, object]:
    made = region(case)
    (kernel,) = CuteMoEQuantize().kernels(made, ARCHS["sm_90"], CuteMoEQuantize().match(made, ARCHS["sm_90"]))
    return dict(kernel.constants)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"probs": "float64"}, ("probs is float64",)),
        ({"slots": 33}, ("33 slots", "1 to 32")),
        ({"width": 0}, ("no elements",)),
        ({"width": 2052}, ("2052 values", "8 at once")),
        ({"width": 2050, "dtype": "float32"}, ("2050 values", "4 at once")),
        ({"block": (1, 32)}, ("block (1, 32)", "(1, 128) alone")),
        ({"extra": ("rows",)}, ("others read the rows",)),
        ({"extra": ("data_t", "scale_inv_t")}, ("transposed copy", "row_map")),
        ({"knobs": knobs(96, 1)}, ("threads = 96",)),
        ({"knobs": knobs(128, 3)}, ("vectors = 3",)),
        ({"knobs": knobs(128, None)}, ("vectors",)),
    ],
)
def test_what_it_has_no_code_for_is_declined_with_the_value(changes, words):
    got = answer(dataclasses.replace(USUAL, **changes))
    assert isinstance(got, Decline) and all(w in got.reason for w in words), got


def test_single_nodes_and_other_chains_are_not_its_region():
    made = region(USUAL)
    for nodes in (made.nodes[:1], made.nodes[1:]):
        assert isinstance(CuteMoEQuantize().match(region_of(made.graph, nodes), ARCHS["sm_90"]), Decline)
    assert fits(made, CuteMoEQuantize.patterns)
    gated = cute_quantize.region(cute_quantize.Case(8, 256, cute_quantize.BLOCK, gate=True, transposed=False))
    assert not fits(gated, CuteMoEQuantize.patterns)
    assert isinstance(CuteMoEQuantize().match(gated, ARCHS["sm_90"]), Decline)


@pytest.mark.parametrize("arch", GPUS)
def test_every_offer_names_the_kernel_that_its_build_asks_for_and_stands_for_its_own_knobs(arch):
    engine, chip = CuteMoEQuantize(), ARCHS[arch]
    for case in (*SMALL, *LARGE, *map(fuzzed, range(60))):
        own_cases.offer_is_whole(engine, region(case), chip, str(case))


def test_groups_without_padding_are_code_for_any_number_of_experts_and_probabilities_unread_are_no_code():
    assert constants(USUAL) == constants(dataclasses.replace(USUAL, experts=8))
    assert constants(dataclasses.replace(USUAL, align=8))["experts"] == 64
    made = region(USUAL)
    numbers = made.nodes[0].output("row_probs")
    graph = dataclasses.replace(made.graph, outputs=tuple(v for v in made.graph.outputs if v != numbers))
    alone = region_of(graph, graph.nodes)
    (kernel,) = CuteMoEQuantize().kernels(alone, ARCHS["sm_90"], CuteMoEQuantize().match(alone, ARCHS["sm_90"]))
    assert dict(kernel.constants)["weight"] is None and constants(USUAL)["weight"] == "float32"


def test_a_result_that_l2_does_not_keep_is_streamed_past_it():
    assert not constants(dataclasses.replace(USUAL, tokens=1024))["streaming"]  # 16 MiB
    assert constants(dataclasses.replace(USUAL, tokens=2048))["streaming"]


def test_off_trial_the_planner_takes_it_and_moves_fewer_bytes(monkeypatch):
    if absent := BY_ID["moe_quantize/cute"].absent():
        pytest.skip(absent)
    graph = region(dataclasses.replace(USUAL, tokens=16384)).graph
    before = plan(graph, ARCHS["sm_90"])
    assert [r.ops for r in before.forward.regions] == [("permute",), ("quantize",)]
    off_trial(monkeypatch, ["moe_quantize/cute"])
    (whole,) = plan(graph, ARCHS["sm_90"]).forward.regions
    assert (whole.ops, whole.engine) == (("permute", "quantize"), "moe_quantize/cute")
    parts = [region_of(graph, [node]).cost()[1] for node in graph.nodes]
    assert region_of(graph, graph.nodes).cost()[1] < sum(parts) / 2


def test_rows_that_a_permute_leaves_open_are_open_behind_it_too():
    made = region(USUAL)
    ends = made.graph.inputs.index("offsets")
    assert tune._ends_of_rows(made) == [ends, ends, ends]
    turned = region(dataclasses.replace(USUAL, extra=("data_t", "scale_inv_t")))
    ports = {v: p for node in turned.nodes for p, v in node.outputs}
    found = dict(zip((ports[v] for v in turned.graph.outputs), tune._ends_of_rows(turned), strict=True))
    assert found["data"] == found["scale_inv"] == ends and found["data_t"] is None


# ---- device code -----------------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("text", [
    "5x2 of 4", "9x3 of 5", "8x2 of 3", "7x", "3x2 of 2", "2x", "4x2 of 3", "0x2", "3x3 of 4", "8x2 of 4",
])  # fmt: skip
@pytest.mark.timeout(900)
def test_the_device_code_gives_the_bits_of_the_references_run_thread_by_thread(text):
    command = [sys.executable, "-m", "tests.cases.cute_moe_quantize", text]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    assert "give the bits of the references" in run.stdout and not run.stdout.startswith("0 ")


@needs_compiler
@pytest.mark.timeout(900)
def test_compiled_code_takes_the_arguments_that_launches_give_it(tmp_path):
    env = os.environ | {"LAYERPLAN_CACHE": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    texts = ("9x3 of 5", "8x2 of 3", "3x2 of 2", "2x11")
    command = [sys.executable, "-m", "tests.cases.cute_moe_quantize", "--reach", *texts]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    assert f"reached the driver: {len(texts)}\n" in run.stdout, run.stdout[-500:] + run.stderr[-3000:]
