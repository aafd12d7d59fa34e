"""The check that code asks for no values of tensors (``tests/cases/host_reads.py``) sees what it is for; the graphs of
MoE layers pass it."""

from __future__ import annotations

import pytest
import torch

from layerplan.integration.planner import runner
from layerplan.integration.planner.policy import Policy
from layerplan.integration.planner.runner import Runner
from layerplan.modules.graphs import Activation, TensorParallel
from layerplan.modules.moe import Routing, balance_graph, moe_graph, router_graph
from tests.cases.host_reads import watching

X = torch.arange(6.0)
READS = {
    "item": lambda: X[2].item(),
    "bool": lambda: bool(X[2] > 1),
    "int": lambda: range(int(X[2])),
    "format": lambda: f"{X.sum().item():.1f}",
    "tolist": lambda: X.tolist(),
    "numpy": lambda: X.numpy(),
    "cpu": lambda: X.cpu(),
    "to": lambda: X.to("cpu", non_blocking=True),
    "to device": lambda: X.to(device=torch.device("cpu")),
    "nonzero": lambda: X.nonzero(),
    "mask": lambda: X[X > 1],
    "masked store": lambda: X.clone().__setitem__(X > 1, torch.ones(4)),
    "masked_select": lambda: X.masked_select(X > 1),
    "unique": lambda: X.unique(),
    "repeats": lambda: X.repeat_interleave(X.long()),
    "equal": lambda: torch.equal(X, X),
    "made": lambda: torch.tensor([1, 2]),
    "made like": lambda: X.new_tensor([1.0]),
}
NONE = {
    "arithmetic": lambda: torch.where(X > 1, X, 0).cumsum(0),
    "index": lambda: X[torch.arange(2)],
    "scatter": lambda: X.scatter(0, torch.arange(2), torch.zeros(2)),
    "cast": lambda: X.to(torch.int32).to(X.device if X.is_cuda else None),
    "slices": lambda: X[1:3].clone(),
    "fill": lambda: torch.full((2,), 3.0),
    "repeats of a known number": lambda: X.repeat_interleave(X.long(), output_size=15),
}


@pytest.mark.parametrize("call", READS.values(), ids=READS)
def test_questions_for_values_are_seen_and_say_where(call):
    with watching() as reads:
        call()
    assert reads and all(where.startswith("tests/cpu/test_host_reads.py:") for _, where in reads), reads


@pytest.mark.parametrize("call", NONE.values(), ids=NONE)
def test_what_stays_on_the_device_is_not_one(call):
    with watching() as reads:
        call()
    assert not reads


def test_questions_in_a_backward_are_seen():
    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, dy):
            return dy * dy.sum().item() * len(dy.tolist())

    x = X.clone().requires_grad_()
    with watching() as reads:
        y = Asks.apply(x).sum()
        assert not reads
        y.backward()
    found = [(what, where.rpartition(":")[2]) for what, where in reads]
    assert found == [("_local_scalar_dense", "backward"), ("tolist", "backward")]


# ---- layers of experts -----------------------------------------------------------------------------------------------

T, K, E, H, F = 24, 2, 4, 32, 48
PLAIN = Routing(E, K)
GROUPS = Routing(E, K, "sigmoid", scaling_factor=2.5, num_groups=2, group_topk=1)


def _router(routing: Routing, bias: bool):
    names, build = router_graph(routing, bias=bias, padding=True, z_coefficient=1e-3, balanced=(1, 2), counted=True)
    given = {"logits": torch.randn(T, E, requires_grad=True), "expert_bias": torch.zeros(E),
             "padding_mask": torch.arange(T) % 5 == 0}  # fmt: skip
    return names, build, [given[n] for n in names]


def _balance():
    names, build = balance_graph(PLAIN, 1e-2, padding=True)
    tokens, total, padding = torch.full((1, E), 12.0), torch.full((1,), float(T)), torch.zeros(T).bool()
    return names, build, [torch.randn(T, E, requires_grad=True), tokens, total, padding]


def _experts():
    names, build = moe_graph(TensorParallel(), Activation(), E)
    expert_map = torch.rand(T, E).topk(K).indices.int()
    expert_map[3, 1] = -1
    return names, build, [
        torch.randn(T, H, requires_grad=True), torch.rand(T, K, requires_grad=True), expert_map,
        torch.randn(E, 2 * F, H, requires_grad=True), torch.randn(E, H, F, requires_grad=True),
    ]  # fmt: skip


GRAPHS = {"router": lambda: _router(PLAIN, False), "router with bias and groups": lambda: _router(GROUPS, True),
          "balance": _balance, "experts": _experts}  # fmt: skip


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Values of inputs are not checked, which is free on a CPU alone."""
    monkeypatch.setattr(runner, "readable", lambda t: False)
    monkeypatch.setattr(runner, "_plans", {})


def _reads(graph: str, mode: str) -> tuple[list, Runner]:
    """What a forward and backward ask for in every step, not while they are planned; their runner."""
    names, build, given = GRAPHS[graph]()
    run = Runner(build, names, policy=Policy(mode), name=graph)

    def step() -> None:
        out = run(*given)
        floats = [o for o in (out if isinstance(out, tuple) else (out,)) if o.requires_grad]
        torch.autograd.grad(floats, [t for t in given if t.requires_grad], [torch.ones_like(o) for o in floats])

    step()
    with watching() as reads:
        step()
    return reads, run


@pytest.mark.parametrize("graph", GRAPHS)
def test_graphs_of_moe_layers_ask_for_no_value(as_on_a_gpu, graph):
    reads, run = _reads(graph, "auto")
    assert not reads, reads
    ran = {r.engine for _, _, r in run.regions()}
    assert not {"grouped_matmul/torch", "moe/torch"}.isdisjoint(ran)


def test_the_reference_of_grouped_products_asks_where_groups_end(as_on_a_gpu):
    reads, _ = _reads("experts", "reference")
    assert set(reads) == {("tolist", "integration/graph/ops/grouped.py:_groups")}
    assert len(reads) == 6, "two products, their data gradients and weight gradients"
