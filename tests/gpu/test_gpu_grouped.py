"""grouped_matmul on every engine for GPUs beyond the shared cases: own weights, empty groups, main_grad, reruns,
capture, rows past 2^31 elements. Groups are aligned where an engine takes no others; where it has no weight gradient
the case with frozen weights runs."""

from __future__ import annotations

import pytest
import torch

from layerplan.integration import ops
from layerplan.integration.engines.manifest import BY_ID
from layerplan.integration.planner.planner import PlanError
from tests import oracle
from tests.cases import grouped
from tests.cases.catalogue import declined, engines_for
from tests.cases.grouped import BF16, FAULT_16, ends, rounded
from tests.gpu.capture import captured, waits_for_no_host
from tests.gpu.memory import need

ENGINES = [
    e for e in engines_for("grouped_matmul", "cuda") if not e.startswith("reference/") and not BY_ID[e].load().patterns
]
ALIGN = {"grouped_matmul/deep_gemm": 128}
SKEWED = (0, 1, 900, 0, 3, 257, 0)


def held(check, engine, *arguments, **more):
    """A check on an engine, of aligned groups where it takes no others; skipped where the engine declines."""
    try:
        return check("cuda", engine, *arguments, **({"align": ALIGN.get(engine, 1)} | more))
    except PlanError as error:
        pytest.skip(f"{engine} declines: {declined(error)}")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("counts", FAULT_16)
def test_fault_16_each_row_meets_its_own_experts_weight(counts, engine):
    held(grouped.own_weights, engine, counts)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("align", [16, 128])
def test_fault_17_padding_never_reaches_the_weight_gradient(align, engine):
    if align % ALIGN.get(engine, 1):
        pytest.skip(f"{engine} takes groups aligned to {ALIGN[engine]} rows")
    held(grouped.padded_groups, engine, align=align)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("counts", [*grouped.EMPTY, SKEWED])
def test_gradients_of_empty_experts_are_exactly_zero_and_the_tail_is_not_read(counts, frozen, engine):
    held(grouped.empty_groups, engine, counts, frozen=frozen)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("offset", "defer"), [(0, False), (1, False), (4, True)])
def test_main_grads_are_added_to_in_float32_and_those_of_empty_groups_left_alone(offset, defer, engine):
    for counts in ((4, 0, 5), SKEWED):
        held(grouped.main_grads, engine, counts, defer=defer, offset=offset)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("frozen", [False, True])
def test_reruns_are_bitwise_equal(frozen, engine):
    held(grouped.reruns, engine, SKEWED, frozen=frozen)


def _replays(device, engine, frozen, align):
    counts = [rounded(c, align) for c in ((300, 0, 212, 128), (0, 640, 0, 0), (1, 2, 3, 634))]
    rows = max(map(sum, counts))
    gen = torch.Generator(device=device).manual_seed(0)
    x, dy = (torch.randn(rows, n, generator=gen, device=device).to(BF16) for n in (grouped.K, grouped.N))
    w = torch.randn(4, grouped.N, grouped.K, generator=gen, device=device).to(BF16)
    offsets, used = ends(counts[0], device), min(map(sum, counts))
    leaves = [t.requires_grad_() for t in ((x,) if frozen else (x, w))]

    def step():
        y = ops.grouped_matmul(x, w, offsets, align=align, engine=engine)
        dx, *dw = torch.autograd.grad(y, leaves, dy)
        return (y[:used], dx[:used], *dw)

    replay = captured(step)
    for other in counts:
        offsets.copy_(ends(other, device))
        for i, (a, b) in enumerate(zip(replay(), step(), strict=True)):
            oracle.equal(a, b, f"{engine}: result {i} of groups {other}")
    waits_for_no_host(step)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("frozen", [False, True])
def test_one_captured_step_serves_any_groups_and_waits_for_no_host(frozen, engine):
    held(_replays, engine, frozen=frozen)


def _far(device, engine, frozen, align):
    """Rows behind 2^31 elements of x and of its gradient are those of a plain product."""
    need(16)
    counts, k, n = rounded((524288, 0, 256), align), 4096, grouped.N
    gen = torch.Generator(device=device).manual_seed(0)
    x = torch.empty(sum(counts), k, dtype=BF16, device=device).normal_(generator=gen)
    assert x.numel() > 2**31
    dy = torch.empty(sum(counts), n, dtype=BF16, device=device).normal_(generator=gen)
    w = (torch.randn(3, n, k, generator=gen, device=device) * k**-0.5).to(BF16)
    leaves = [t.requires_grad_() for t in ((x,) if frozen else (x, w))]
    y = ops.grouped_matmul(x, w, ends(counts, device), align=align, engine=engine)
    dx, *dw = torch.autograd.grad(y, leaves, dy)
    with torch.no_grad():
        for i, own in ((0, slice(0, 256)), (2, slice(counts[0], sum(counts)))):
            a, b, d = x[own], w[i], dy[own]
            oracle.compare(y[own], a.double() @ b.double().T, a @ b.T, f"rows {own}")
            oracle.compare(dx[own], d.double() @ b.double(), d @ b, f"gradient of rows {own}")
        for grads in dw:
            oracle.compare(grads[2], d.double().T @ a.double(), d.T @ a, "weight gradient of the last group")
            assert not grads[1].any() and grads[0].isfinite().all()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("frozen", [False, True])
def test_fault_21_rows_past_2_to_the_31_elements(frozen, engine):
    held(_far, engine, frozen=frozen)
