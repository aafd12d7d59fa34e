"""What grouped_matmul must hold on any engine and device beyond the catalogue's cases: groups meet their own weights,
empty groups, rows behind the last group, main_grad, reruns. Counts are rounded up to ``align``. PlanError where an
engine declines."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from layerplan.integration import ops
from layerplan.integration.graph.ir import Graph, GraphBuilder
from layerplan.integration.planner.policy import Policy
from layerplan.integration.planner.runner import Runner, WeightGrads
from layerplan.integration.planner.shapes import SpecMaker

from .. import oracle

N, K = 64, 128
FAULT_16 = ((64, 130, 70), (128, 0, 130, 65))
EMPTY = ((0, 3, 0), (0, 0, 0), (4, 0, 2))
BF16, NAN, TAIL = torch.bfloat16, float("nan"), 3


def rounded(counts: Sequence[int], align: int) -> tuple[int, ...]:
    return tuple(-(-c // align) * align for c in counts)


def ends(counts: Sequence[int], device: str) -> torch.Tensor:
    return torch.tensor(counts).cumsum(0).int().to(device)


def runner(engine: str | None, align: int = 1) -> Runner:
    """x [t, k], weight [e, n, k], offsets [e] as a module's graph has them: the weight is a parameter."""

    def build(x, weight, offsets) -> Graph:
        b, s = GraphBuilder(), SpecMaker()
        rows, w = b.input("x", s(x, "t k!")), b.input("w", s(weight, "e! n! k!"), weight=True)
        return b.build([b.op("grouped_matmul", x=rows, weight=w, offsets=b.input("o", s(offsets, "e!")), align=align)])

    return Runner(build, ("x", "weight", "offsets"), policy=Policy(engine=engine))


def _drawn(device: str, counts: Sequence[int], seed: int) -> tuple[torch.Tensor, ...]:
    """x, w and dy in bfloat16, x and dy with a tail of NaN; the offsets."""
    gen = torch.Generator().manual_seed(seed)
    tail = torch.full((TAIL, K), NAN)
    x, dy = (torch.cat((torch.randn(sum(counts), n, generator=gen), tail[:, :n])).to(device, BF16) for n in (K, N))
    return x, torch.randn(len(counts), N, K, generator=gen).to(device, BF16), dy, ends(counts, device)


def own_weights(device: str, engine: str, counts: Sequence[int], align: int = 1) -> None:
    """Weight i is i + 1 times the identity: one product a value, so the results are exact."""
    counts, factors = rounded(counts, align), torch.arange(1.0, len(counts) + 1)
    x = torch.randn(sum(counts), K, generator=torch.Generator().manual_seed(0)).to(device, BF16)
    w = (factors[:, None, None] * torch.eye(K)).to(device, BF16)
    y = ops.grouped_matmul(x, w, ends(counts, device), align=align, engine=engine)
    oracle.equal(
        y, (x.float() * torch.repeat_interleave(factors, torch.tensor(counts)).to(device)[:, None]).to(BF16), engine
    )


def empty_groups(device: str, engine: str, counts: Sequence[int], align: int = 1, frozen: bool = False) -> None:
    """Weight gradients of empty groups are exactly zero, and no NaN of the tail reaches anyone. ``frozen``: no weight
    gradient."""
    counts = rounded(counts, align)
    (x, w, dy, offsets), used = _drawn(device, counts, 1), sum(counts)
    leaves = [t.requires_grad_() for t in ((x,) if frozen else (x, w))]
    oracle.poison(w, x, dy)
    y = ops.grouped_matmul(x, w, offsets, align=align, engine=engine)
    dx, *dw = torch.autograd.grad(y, leaves, dy)
    assert y[:used].isfinite().all() and dx[:used].isfinite().all() and all(g.isfinite().all() for g in dw)
    assert all([bool(g.any()) for g in grads] == [bool(c) for c in counts] for grads in dw)


def main_grads(device: str, engine: str, counts: Sequence[int] = (4, 0, 5), align: int = 1, *, defer: bool = False,
               offset: int = 4) -> tuple[Runner, torch.Tensor]:  # fmt: skip
    """They are added to in float32, at once or deferred, and those of empty groups keep their values, where adding
    nothing may make 0 of -0. ``offset``: of main_grad in its storage, in elements. The runner and main_grad."""
    counts = rounded(counts, align)
    x, w, dy, offsets = _drawn(device, counts, 2)
    w, start = torch.nn.Parameter(w), torch.randn(w.shape, generator=torch.Generator().manual_seed(3)).to(device)
    start[counts.index(0), 0] = -0.0
    w.main_grad, buffer = oracle.guarded(start, offset)
    w.grad_added_to_main_grad = False
    sink, made = WeightGrads({1: w}, fuse=True, defer=defer), runner(engine, align)
    made(x.requires_grad_(), w, offsets, sink=sink).backward(dy)
    if defer:
        oracle.same_bits(w.main_grad, start, "before the deferred stage")
        assert w.grad_added_to_main_grad is False and sink.run_deferred() and not sink.run_deferred()
    begin = 0
    for i, count in enumerate(counts):
        own, begin = slice(begin, begin + count), begin + count
        if not count:
            oracle.equal(w.main_grad[i], start[i], "the empty group")
            continue
        with torch.no_grad():
            truth = start[i].double() + dy[own].double().T @ x[own].double()
            # tensor cores sum 16-bit products less finely than a product of float32 does
            peer = (
                torch.mm(dy[own].T, x[own], out_dtype=torch.float32)
                if x.is_cuda
                else dy[own].float().T @ x[own].float()
            )
            oracle.compare(w.main_grad[i], truth, start[i] + peer, f"group {i}")
    oracle.check_guards(w.main_grad, buffer, "main_grad")
    assert w.grad_added_to_main_grad is True and x.grad is not None
    return made, w.main_grad


def reruns(device: str, engine: str, counts: Sequence[int], align: int = 1, frozen: bool = False) -> None:
    """Three runs are bitwise equal, whatever lies in the allocator."""
    counts = rounded(counts, align)
    (x, w, dy, offsets), used, first = _drawn(device, counts, 4), sum(counts), None
    leaves = [t.requires_grad_() for t in ((x,) if frozen else (x, w))]
    for run in range(3):
        oracle.poison(x, w, dy)
        y = ops.grouped_matmul(x, w, offsets, align=align, engine=engine)
        dx, *dw = torch.autograd.grad(y, leaves, dy)
        got = (y[:used], dx[:used], *dw)
        first = first or got
        for i, (a, b) in enumerate(zip(got, first, strict=True)):
            oracle.equal(a, b, f"{engine}: result {i} of run {run}")


def padded_groups(device: str, engine: str, align: int) -> None:
    """Tokens permuted into groups of 45, 0 and 17 rows, padded to multiples of ``align``, multiplied and brought back:
    what groups without padding give, gradients included, of which the empty group's is zero."""
    gen = torch.Generator().manual_seed(5)
    experts = torch.repeat_interleave(torch.arange(3), torch.tensor((45, 0, 17)))
    expert_map = experts[torch.randperm(62, generator=gen)].int()[:, None].to(device)
    x, w, dy = (torch.randn(*s, generator=gen).to(device, BF16) for s in ((62, 256), (3, K, 256), (62, K)))

    def run(dtype, by, align):
        t = [v.to(dtype).requires_grad_() for v in (x, w)]
        oracle.poison(torch.empty(62 + 3 * (align - 1), 256, dtype=dtype, device=device))
        p = ops.permute(t[0], expert_map, num_experts=3, align=align)
        assert p.offsets.tolist() == list(itertools.accumulate(rounded((45, 0, 17), align)))
        y = ops.unpermute(ops.grouped_matmul(p.rows, t[1], p.offsets, align=align, engine=by), p)
        return y, *torch.autograd.grad(y, t, dy.to(dtype))

    made = run(BF16, engine, align)
    right, peers = (run(d, "reference/eager", 1) for d in (torch.float64, BF16))
    for name, got, truth, peer in zip(("y", "dx", "dw"), made, right, peers, strict=True):
        oracle.compare(got, truth, peer, f"{engine}: {name}")
    assert not made[2][1].any(), "the empty group's weight gradient"
