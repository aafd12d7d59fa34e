"""activation/cute without a GPU: its knobs, and its device code run thread by thread."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from layerplan.integration.engines.arch import ARCHS
from layerplan.integration.engines.contract import Decline, Offer
from layerplan.integration.engines.manifest import BY_ID
from layerplan.integration.graph.ir import Dim, GraphBuilder, TensorSpec
from layerplan.integration.planner.cover import region_of
from tests.cases.cute_swiglu import Case, knobs, region

ROOT = Path(__file__).resolve().parents[2]


def test_a_result_that_l2_does_not_keep_is_streamed_past_it():
    def streaming(rows: int) -> bool:
        b = GraphBuilder()
        graph = b.build([b.op("swiglu", x=b.input("x", TensorSpec((Dim("t", rows), 8192), "bfloat16")))])
        offer = BY_ID["activation/cute"].load().match(region_of(graph, graph.nodes), ARCHS["sm_90"])
        return dict(offer.knobs)["streaming"]

    assert not streaming(2048) and streaming(4096)  # of 4096 bfloat16 values each: 16 and 32 MiB


def test_knobs_of_a_plan_file_are_taken_whole_and_known_or_declined():
    engine, made, arch = BY_ID["activation/cute"].load(), region(Case(8, 4096)), ARCHS["sm_90"]
    assert isinstance(engine.offer_with(made, arch, knobs(512, 4)), Offer)
    for wrong, said in (
        ((("vectors", 4),), "knob threads: is not given; there are threads, vectors, streaming"),
        ((*knobs(512, 4), ("keep", False)), "knob keep: the engine has none of this name"),
        (knobs(100, 1), "threads = 100"),
    ):
        answer = engine.offer_with(made, arch, wrong)
        assert isinstance(answer, Decline) and said in answer.reason, answer


@pytest.mark.skipif(BY_ID["activation/cute"].absent() is not None, reason="needs nvidia-cutlass-dsl")
@pytest.mark.parametrize("text", ["width=264", "width=37", "width=40, want=('dx',)", "width=1288", "width=300"])
def test_the_device_code_agrees_with_the_reference_run_thread_by_thread(text):
    run = subprocess.run(
        [sys.executable, "-m", "tests.cases.cute_swiglu", text], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    assert "agree with the reference" in run.stdout and not run.stdout.startswith("0 ")
