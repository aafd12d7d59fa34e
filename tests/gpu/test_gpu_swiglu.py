"""activation/cute over the ways in which rows are spread over blocks: the oracle's rule, and reruns bitwise equal."""

import pytest
import torch

from layerplan.integration.engines.arch import Arch
from layerplan.integration.engines.manifest import BY_ID
from layerplan.integration.engines.packages import locate
from layerplan.integration.graph.ops.table import op_table
from layerplan.integration.plan_cache import memory
from layerplan.kernels.common import quantized
from tests import oracle
from tests.cases import cute_swiglu as cases
from tests.cases.cute_swiglu import BOTH, Case, knobs
from tests.gpu.memory import need

pytestmark = pytest.mark.skipif(not locate("tvm_ffi").here, reason="needs apache-tvm-ffi")
LARGE = (
    *(Case(1031, width, want) for width in (14336, 11008, 1368, 768, 200, 2047) for want in (("y",), ("dx",))),
    *(Case(517, 5504, want, knobs=knobs(threads, vectors, streaming))
      for threads, vectors, streaming in ((64, 4, True), (256, 2, True), (512, 1, False))
      for want in (("y",), ("dx",))),
    *(Case(1031, width, BOTH, weight="float32", clamp=1.5) for width in (768, 2048, 2049)),
    Case(100000, 8), Case(3, 100000, ("dx",)), Case(1031, 1544, dtype="float16", clamp=1.0, weight="float32", gap=8),
)  # fmt: skip


def launch(case: Case):
    made, arch = cases.region(case), Arch.of_device(0)
    return BY_ID["activation/cute"].load().build(memory.context(made, arch, cases.offered(case, made, arch))).launch


@pytest.mark.parametrize("case", (*cases.SMALL, *LARGE), ids=str)
def test_results_hold_to_the_oracles_rule_and_reruns_are_equal(case):
    cases.run(case, launch(case), "cuda")


@pytest.mark.parametrize("want", [("y",), ("dx",), BOTH])
def test_nothing_around_the_results_is_written(want, monkeypatch):
    case, buffers, addresses = Case(33, 40, want, weight="float32"), [], quantized.addresses

    def guarding(made):
        pairs = [oracle.guarded(t, offset=256, rows=16) for t in made]
        buffers.extend(pairs)
        return addresses(tuple(inner for inner, _ in pairs))

    run, given = launch(case), [t.cuda() for t in cases.inputs(case, cases.region(case), 0).values()]
    results = run(*given)
    monkeypatch.setattr(quantized, "addresses", guarding)
    run(*given)
    for (inner, buffer), expected in zip(buffers, results if isinstance(results, tuple) else (results,), strict=True):
        oracle.check_guards(inner, buffer, str(case))
        oracle.same_bits(inner, expected, str(case))


def test_more_than_2_31_elements():
    need(16)
    case = Case(262153, 8192, knobs=knobs(128, 1, streaming=True))
    x = torch.empty(case.rows, 2 * case.width, device="cuda", dtype=torch.bfloat16).normal_()
    y, reference = launch(case)(x), op_table()["swiglu"].reference
    for rows in (slice(0, 3), slice(-3, None)):
        truth, peer = (reference({"x": t}, {"clamp": None}, ("y",))["y"] for t in (x[rows].double(), x[rows]))
        oracle.compare(y[rows], truth, peer, f"{case}: {rows}")
