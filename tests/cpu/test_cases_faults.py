"""The pinned faults of tests/cases on a CPU: the reference, the CPU engines and what the planner chooses by itself."""

import itertools
import types
import warnings

import pytest
import torch

import layerplan
from layerplan.integration import ops
from layerplan.integration.engines.arch import ARCHS
from layerplan.integration.engines.manifest import MANIFEST
from layerplan.integration.graph.ir import GraphBuilder, TensorSpec
from layerplan.integration.planner.planner import PlanError, plan
from layerplan.integration.planner.policy import Policy
from layerplan.integration.planner.program import ReferenceFallback, warn_if_reference
from tests.cases import faults
from tests.cases.catalogue import declined, engines_for
from tests.cases.context_parallel import PADDED, REAL, real_tokens_of_rank, rows_of_rank
from tests.cases.graphs import sdpa
from tests.cases.reruns import Watched, near, same, watching

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


def test_fault_04_tokens_that_count_on_each_rank_of_a_padded_sequence():
    # 1001 tokens padded to 1008: the padding lies in the last chunk, which rank 0 holds
    assert [real_tokens_of_rank((1001,), (1008,), 4, rank) for rank in range(4)] == [245, 252, 252, 252]
    assert [real_tokens_of_rank(REAL, PADDED, 2, rank) for rank in range(2)] == [20, 23] and sum(REAL) == 43
    for cp in (1, 2):
        cu = [0, *itertools.accumulate(PADDED)]
        rows = [rows_of_rank(cu, cp, rank) for rank in range(cp)]
        assert sorted(r for part in rows for r in part) == list(range(sum(PADDED))), "every row is on one rank"
        assert len({len(part) for part in rows}) == 1


def test_fault_05_rows_of_each_rank_of_a_packed_sequence():
    assert rows_of_rank([0, 8, 12], 2, 0) == [0, 1, 6, 7, 8, 11]
    assert rows_of_rank([0, 8, 12], 2, 0, restart=True) == [0, 1, 6, 7, 0, 3]
    assert rows_of_rank([0, 8, 12], 2, 1) == [2, 3, 4, 5, 9, 10]
    assert rows_of_rank([0, 8, 12], 2, 1, restart=True) == [2, 3, 4, 5, 1, 2]


def test_fault_09_sizes_beyond_32_bits_stay_exact_in_specs_and_costs():
    spec = TensorSpec((300001, 7200), "bfloat16")
    assert spec.numel() == 2160007200 and spec.nbytes() == 4320014400
    b = GraphBuilder()
    y = b.op("swiglu", x=b.input("x", spec))
    region = plan(b.build([y]), ARCHS["sm_90"]).forward.regions[0].region
    flops, nbytes = region.cost()
    assert nbytes == 4320014400 * 3 // 2 and flops > 2**31


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


def test_fault_28_falling_back_warns_once_per_reason_and_names_the_cost(monkeypatch):
    from layerplan.integration.planner import program

    monkeypatch.setattr(program, "_warned", set())
    made = plan(_sink_graph(), ARCHS["sm_90"])
    (region,) = made.forward.regions
    assert region.engine == "reference/eager"
    with pytest.warns(ReferenceFallback, match=r"sdpa.*us instead of.*sink") as seen:
        warn_if_reference(region, made.arch, made.policy, "layers.0")
        warn_if_reference(region, made.arch, made.policy, "layers.1")
    assert len(seen) == 1 and "layers.0" in str(seen[0].message)


def test_fault_28_a_reference_that_was_asked_for_does_not_warn():
    made = plan(_sink_graph(), ARCHS["sm_90"], Policy("reference"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_reference(made.forward.regions[0], made.arch, made.policy, "")
        ops.rms_norm(torch.randn(2, 4), torch.ones(4), eps=1e-5)  # nor does a CPU


MLA = {"q": ((3000, 1, 192), "bfloat16"), "k": ((3000, 1, 192), "bfloat16"), "v": ((3000, 1, 128), "bfloat16"),
       "cu_seqlens_q": ((3,), "int32"), "cu_seqlens_k": ((3,), "int32")}  # fmt: skip


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_fault_06_every_candidate_for_packed_mla_dims_gives_one_reason(arch):
    found = layerplan.explain("sdpa", MLA, arch, layout="thd", causal=True)
    names = [c.engine for c in found.candidates]
    assert sorted(names) == sorted(e.id for e in MANIFEST if "sdpa" in e.ops or e.is_reference), "one row per candidate"
    assert all(c.reason for c in found.candidates) and [c.engine for c in found.candidates if c.chosen] == [found.chosen]
    reasons = found.reasons()
    assert "packed" in reasons["attention/torch_cudnn"] and "192/128" in reasons["attention/torch_flash"]
    assert arch in reasons["attention/torch_cpu"]


def test_fault_06_with_fast_kernels_off_each_says_so_and_the_reference_runs_where_it_is_allowed():
    found = layerplan.explain("sdpa", MLA, "sm_90", policy="reference", layout="thd", causal=True)
    assert found.chosen == "reference/eager" and set(found.reasons().values()) == {"policy is reference"}
    assert len(found.reasons()) == sum("sdpa" in e.ops for e in MANIFEST)
    found = layerplan.explain("sdpa", MLA, "sm_90", policy="strict", layout="thd", causal=True)
    assert found.chosen is None and "192/128" in found.error and "policy is strict" in found.reasons()["reference/eager"]
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(300, 1, d, generator=gen).bfloat16() for d in (192, 192, 128))
    cu = torch.tensor([0, 130, 300], dtype=torch.int32)
    packed = {"causal": True, "cu_seqlens_q": cu, "cu_seqlens_k": cu}
    assert ops.attention(q, k, v, policy="reference", **packed).shape == (300, 1, 128)
    with pytest.raises(PlanError, match="policy is strict"):
        ops.attention(q, k, v, policy="strict", **packed)


def test_fault_06_head_dim_256_with_a_window_runs_or_says_why_not():
    for arch in ("sm_80", "sm_90", "sm_100"):
        found = layerplan.explain("sdpa", {n: ((1, 70, h, 256), "bfloat16") for n, h in (("q", 2), ("k", 1), ("v", 1))}, arch, causal=True, window=(16, 0))
        assert found.chosen == "attention/torch_flash" and all(found.reasons().values())


# ---- what may differ between two runs --------------------------------------------------------------------------------


def test_only_gradients_of_an_engine_whose_offer_is_not_deterministic_may_differ():
    def varying(policy, arch="sm_90"):
        watched, made = Watched(), plan(sdpa(), ARCHS[arch], policy, needs_grad=(True,) * 3)
        watched.ran.append(types.SimpleNamespace(plan=made, plans=[made]))
        return watched.varying()

    assert varying(Policy(engine="attention/torch_cudnn")) == varying(Policy(engine="attention/torch_flash")) == {"dq"}
    assert varying(Policy(deterministic=True)) == varying(Policy("reference")) == varying(Policy(), "cpu") == set()
    x = torch.randn(1, 6, 2, 8, requires_grad=True)
    with watching() as ran:
        ops.attention(x, x, x, causal=True).sum().backward()
        ops.gelu(x).sum().backward()
    assert {r.engine for r in ran.backward_regions()} == {"attention/torch_cpu", "reference/eager"} and not ran.varying()
    with pytest.raises(AssertionError, match="dq of it"):
        same(ran, "dq", x, x + 1e-6, "it")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_near_lets_one_rounding_pass_and_not_two(dtype):
    x = torch.tensor([1.0, 1.5, -0.75, 2**-10]).to(dtype)
    eps = torch.finfo(dtype).eps
    near(x, torch.nextafter(x, torch.full_like(x, 9.0)), "neighbours")
    near(x, x + torch.tensor([0.0, 0.0, 0.0, 2**-13]).to(dtype), "a small value beside a large one")
    for i, bad in ((0, 1 + 2 * eps), (3, 2**-10 + 2**-12), (1, float("nan"))):
        y = x.clone()
        y[i] = bad
        with pytest.raises(AssertionError, match="what"):
            near(y, x, "what")


# ---- what ran, and why ----------------------------------------------------------------------------------------------


def test_fault_28_strict_names_the_reasons_where_an_op_or_a_layer_is_called():
    q = torch.randn(4, 2, 16)
    cu = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(PlanError, match="attention/torch_cpu: packed sequences") as info:
        ops.attention(q, q, q, causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu, policy="strict")
    assert "policy is strict: a reference is not allowed" in str(info.value)


def test_fault_28_each_distinct_reason_warns_once(monkeypatch):
    from layerplan.integration.planner import program

    monkeypatch.setattr(program, "_warned", set())
    b = GraphBuilder()
    q, k, v = (b.input(n, TensorSpec((1, 64, 4, d), "bfloat16")) for n, d in (("q", 192), ("k", 192), ("v", 100)))
    other = plan(b.build([b.op("sdpa", q=q, k=k, v=v)]), ARCHS["sm_90"])
    made = plan(_sink_graph(), ARCHS["sm_90"])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            for p in (made, other):
                warn_if_reference(p.forward.regions[0], p.arch, p.policy, "layer")
    assert len(seen) == 2 and {w.category for w in seen} == {ReferenceFallback}
    assert sum("sink" in str(w.message) for w in seen) == 1 and sum("192/100" in str(w.message) for w in seen) == 1
