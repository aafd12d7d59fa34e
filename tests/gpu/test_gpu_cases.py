"""The pinned faults of tests/cases on every GPU engine, and those that need gigabytes."""

import inspect

import pytest
import torch

from layerplan.integration import ops
from layerplan.integration.planner.planner import PlanError
from tests import oracle
from tests.cases import faults
from tests.cases.catalogue import declined, engines_for
from tests.cases.reruns import same, watching
from tests.gpu.memory import need

# a generated kernel costs seconds per width and dtype; rows of one element it declines
FEW = {faults.case_21_odd_unaligned_and_wide_rows: {"widths": (3, 769, 4097)}}
ROWS = [(case, engine) for op, cases in faults.BY_OP.items() for case in cases
        for engine in (None, *engines_for(op, "cuda"))]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r[0].__name__}-{r[1] or 'planner'}")
def test_fault_is_absent(row):
    case, engine = row
    try:
        case("cuda", engine, **(FEW.get(inspect.unwrap(case), {}) if engine == "pointwise/inductor" else {}))
    except PlanError as error:
        assert engine not in (None, "reference/eager"), f"must always run: {error}"
        pytest.skip(f"{engine} declines: {declined(error)}")


# packed with head dim 96: torch's cuDNN entry takes no packed sequences, and the reference would hold every pair of
# 300001 queries and 101 keys in float32 many times over
PACKED = [e for e in engines_for("sdpa", "cuda") if e not in ("attention/torch_cudnn", "reference/eager")]


@pytest.mark.parametrize("engine", [None, *PACKED])
def test_fault_09_gradient_that_is_a_slice_of_a_very_wide_tensor(engine):
    need(12)
    heads, d, rows = 16, 96, 300001
    base = torch.empty(rows, 7200, dtype=torch.bfloat16, device="cuda")
    gen = torch.Generator(device="cuda").manual_seed(0)
    base[:, : heads * d] = torch.randn(rows, heads * d, generator=gen, device="cuda", dtype=torch.bfloat16)
    dout = base[:, : heads * d].unflatten(-1, (heads, d))
    cu = torch.tensor([0, 299900, rows], dtype=torch.int32, device="cuda")
    # only the last segment is looked at: the first one sees no key, which keeps the case short
    cu_k = torch.tensor([0, 0, 101], dtype=torch.int32, device="cuda")
    q = torch.randn(rows, heads, d, generator=gen, device="cuda", dtype=torch.bfloat16).requires_grad_()
    shape = 101, heads, d
    k, v = (torch.randn(shape, generator=gen, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in "kv")
    try:
        with watching() as ran:
            out = ops.attention(q, k, v, causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu_k, max_seqlen_q=299900,
                                max_seqlen_k=101, engine=engine, policy="strict")  # fmt: skip
    except PlanError as error:
        assert engine is not None, f"a kernel of torch must take it: {error}"
        pytest.skip(f"{engine} declines: {declined(error)}")
    a = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    b = torch.autograd.grad(out, (q, k, v), dout.contiguous())
    for name, x, y in zip(("dq", "dk", "dv"), (a[0][299900:], a[1], a[2]), (b[0][299900:], b[1], b[2]), strict=True):
        same(ran, name, x, y, "a slice of a wide tensor")


@pytest.mark.parametrize("engine", [None, "norm/torch", "pointwise/inductor"])
def test_fault_21_more_than_2_to_the_31_elements_in_a_norm(engine):
    need(24)
    gen = torch.Generator(device="cuda").manual_seed(0)
    x = torch.empty(524289, 4096, dtype=torch.bfloat16, device="cuda").normal_(generator=gen)
    assert x.numel() > 2**31
    w = torch.randn(4096, generator=gen, device="cuda", dtype=torch.bfloat16)
    y = ops.rms_norm(x, w, eps=1e-5, engine=engine)
    for row in (0, 262144, 524288):  # alone a row may go to another engine or code path: one rounding apart
        alone = ops.rms_norm(x[row : row + 1], w, eps=1e-5, engine=engine)
        torch.testing.assert_close(y[row : row + 1], alone, atol=0, rtol=2**-7, msg=lambda m, r=row: f"row {r}: {m}")


def test_fault_21_more_than_2_to_the_31_elements_in_an_activation_and_its_gradient():
    need(30)
    gen = torch.Generator(device="cuda").manual_seed(0)
    x = torch.empty(524289, 4096, dtype=torch.bfloat16, device="cuda").normal_(generator=gen).requires_grad_()
    y = ops.swiglu(x)
    dy = torch.empty_like(y).normal_(generator=gen)
    (dx,) = torch.autograd.grad(y, x, dy)
    for row in (0, 262144, 524288):
        part = x[row : row + 1].detach().requires_grad_()
        want = ops.swiglu(part)
        oracle.equal(y[row : row + 1], want, f"row {row}")
        oracle.equal(dx[row : row + 1], torch.autograd.grad(want, part, dy[row : row + 1])[0], f"gradient of row {row}")
