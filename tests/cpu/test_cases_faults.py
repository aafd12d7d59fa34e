"""The pinned faults of tests/cases on a CPU: the reference, the CPU engines and what the planner chooses by itself."""

import warnings

import pytest
import torch

from layerplan.integration import ops
from layerplan.integration.engines.arch import ARCHS
from layerplan.integration.graph.ir import GraphBuilder, TensorSpec
from layerplan.integration.planner.planner import PlanError, plan
from layerplan.integration.planner.policy import Policy
from layerplan.integration.planner.program import ReferenceFallback, warn_if_reference
from tests.cases import faults
from tests.cases.catalogue import declined, engines_for

torch.set_num_threads(1)
ROWS = [(case, engine) for op, cases in faults.BY_OP.items() for case in cases for engine in (None, *engines_for(op, "cpu", inductor=False))]


@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r[0].__name__}-{r[1] or 'planner'}")
def test_fault_is_absent(row):
    case, engine = row
    try:
        case("cpu", engine, **faults.SMALL.get(case, {}))
    except PlanError as error:
        assert engine not in (None, "reference/eager"), f"must always run: {error}"
        pytest.skip(f"{engine} declines: {declined(error)}")


def test_fault_09_offsets_beyond_32_bits_are_computed_in_64():
    # a view whose last row starts at element 2160000000, without the memory behind it
    base = torch.empty(1, dtype=torch.bfloat16).as_strided((300001, 7200), (0, 0))
    assert 300000 * 7200 == 2160000000 > 2**31
    spec = TensorSpec((300001, 7200), "bfloat16")
    assert spec.numel() == 2160007200 and spec.nbytes() == 4320014400
    # sizes and products of sizes stay Python ints through the cost model
    b = GraphBuilder()
    y = b.op("swiglu", x=b.input("x", spec))
    region = plan(b.build([y]), ARCHS["sm_90"]).forward.regions[0].region
    flops, nbytes = region.cost()
    assert nbytes == 4320014400 * 3 // 2 and flops > 2**31
    assert base.shape == spec.shape


def _sink_graph():
    b = GraphBuilder()
    q, k = (b.input(n, TensorSpec((2, 64, 4, 64), "bfloat16")) for n in "qk")
    out = b.op("sdpa", q=q, k=k, v=k, sink=b.input("sink", TensorSpec((4,), "float32")), causal=True)
    return b.build([out])


def test_fault_28_strict_without_a_fast_kernel_is_an_error_with_every_reason():
    with pytest.raises(PlanError) as info:
        plan(_sink_graph(), ARCHS["sm_90"], Policy("strict"))
    for word in ("attention/torch_cudnn", "attention/torch_flash", "sink", "reference/eager", "strict"):
        assert word in str(info.value)


def test_fault_28_falling_back_warns_once_per_reason_and_names_the_cost():
    made = plan(_sink_graph(), ARCHS["sm_90"])
    (region,) = made.forward.regions
    assert region.engine == "reference/eager"
    from layerplan.integration.planner import program

    program._warned.clear()
    with pytest.warns(ReferenceFallback, match=r"sdpa.*us instead of.*sink") as seen:
        warn_if_reference(region, made.arch, made.policy, "layers.0")
        warn_if_reference(region, made.arch, made.policy, "layers.1")
    assert len(seen) == 1 and "layers.0" in str(seen[0].message)
    program._warned.clear()


def test_fault_28_a_reference_that_was_asked_for_does_not_warn():
    made = plan(_sink_graph(), ARCHS["sm_90"], Policy("reference"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_reference(made.forward.regions[0], made.arch, made.policy, "")
        ops.rms_norm(torch.randn(2, 4), torch.ones(4), eps=1e-5)  # nor does a CPU


def test_fault_06_every_candidate_gives_a_reason_and_the_reference_still_runs():
    b = GraphBuilder()
    q, k, v = (b.input(n, TensorSpec((3000, 1, d), "bfloat16")) for n, d in (("q", 192), ("k", 192), ("v", 128)))
    cu = b.input("cu", TensorSpec((3,), "int32"))
    graph = b.build([b.op("sdpa", q=q, k=k, v=v, cu_seqlens_q=cu, cu_seqlens_k=cu, layout="thd", causal=True)])
    (region,) = plan(graph, ARCHS["sm_90"]).forward.regions
    reasons = {c.engine: c.reason for c in region.candidates}
    assert region.engine == "reference/eager"
    assert "packed" in reasons["attention/torch_cudnn"] and "192/128" in reasons["attention/torch_flash"]
    assert "sm_90" in reasons["attention/torch_cpu"]
