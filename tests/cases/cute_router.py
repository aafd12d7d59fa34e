"""Cases of moe/cute's router and its gradient against the op table's references in float64: scores, groups, biases,
dtypes, numbers of experts that fill a warp's lanes or do not.

Experts are held to the reference's wherever it can be told which they are: where neighbours in the order of the scores,
and of the groups' sums, are equal or further apart than float32 computes them.

``python -m tests.cases.cute_router [TEXT]`` runs the device code of the cases whose name holds TEXT thread by thread on
a CPU (``tests/cases/simt.py``); ``--compile ARCH [WORKERS]`` compiles all of them ahead."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from layerplan.integration.engines.arch import ARCHS, Arch
from layerplan.integration.engines.contract import BuildContext, Offer, Region
from layerplan.integration.engines.manifest import BY_ID
from layerplan.integration.graph.ir import Dim, GraphBuilder, TensorSpec
from layerplan.integration.graph.ops.table import op_table
from layerplan.integration.planner.cover import region_of

from .. import oracle
from . import own_cases
from .cute_norm import compiled, placed

Tensors = dict[str, torch.Tensor]
# of a score without a bias, and of 4 for other sums, which are below that here: e^x, a sum over experts and a division of
# float32 are within 2^-20 of the score, a logit is exact; a bias and further scores add a rounding of 2^-23 each
APART = 2.0**-18


@dataclasses.dataclass(frozen=True)
class Case:
    """``op`` router or router_bwd. ``score``: "softmax", "pre_softmax" or "sigmoid". ``bias`` and ``grad``: dtypes of
    expert_bias and of dprobs. ``hidden``: this share of logits is -inf. ``equal``: logits are of few values. ``gap``:
    elements between rows of logits, ``offset``: of their first in its storage."""

    op: str
    tokens: int
    experts: int
    topk: int
    score: str = "softmax"
    dtype: str = "float32"
    groups: int | None = None
    kept: int | None = None
    scale: float | None = None
    bias: str | None = None
    grad: str | None = None
    hidden: float = 0.0
    equal: bool = False
    spread: float = 2.0
    gap: int = 0
    offset: int = 0

    def __str__(self) -> str:
        said = [
            f"{f.name}={getattr(self, f.name)}"
            for f in dataclasses.fields(self)[4:]
            if getattr(self, f.name) != f.default
        ]
        return " ".join([f"{self.op} {self.tokens} to {self.topk} of {self.experts}", *said])

    @property
    def attributes(self) -> dict[str, object]:
        made = {
            "topk": self.topk,
            "score_function": "sigmoid" if self.score == "sigmoid" else "softmax",
            "pre_softmax": self.score == "pre_softmax",
            "scaling_factor": self.scale,
        }
        return made if self.op == "router_bwd" else made | {"num_groups": self.groups, "group_topk": self.kept}


SMALL = (
    Case("router", 9, 64, 6),
    Case("router", 6, 60, 4, dtype="bfloat16", scale=2.5),
    Case("router", 5, 8, 2, "pre_softmax", gap=3, offset=1),
    Case("router", 7, 100, 8, "sigmoid", bias="float32"),
    Case("router", 6, 128, 8, "sigmoid", groups=4, kept=2, scale=1.5, bias="bfloat16"),
    Case("router", 5, 48, 4, groups=8, kept=4),
    Case("router", 5, 40, 6, "pre_softmax", "float16", groups=5, kept=2),
    Case("router", 3, 1, 1),
    Case("router", 5, 33, 1, "sigmoid"),
    Case("router", 5, 32, 32),
    Case("router", 6, 40, 5, equal=True),
    Case("router", 6, 40, 5, "sigmoid", equal=True),
    Case("router", 5, 64, 4, hidden=0.5),
    Case("router", 4, 20, 3, "sigmoid", spread=60.0),
    Case("router", 4, 20, 3, "pre_softmax", spread=9.0),
    Case("router", 0, 6, 2),
    *(
        Case("router_bwd", 6, 40, 4, score, grad="float32", scale=scale)
        for score in ("softmax", "pre_softmax", "sigmoid")
        for scale in (None, 2.5)
    ),
    Case("router_bwd", 5, 72, 8, "sigmoid", "bfloat16", grad="bfloat16", gap=5, offset=3),
    Case("router_bwd", 5, 33, 1, "sigmoid", grad="float32"),
    Case("router_bwd", 5, 33, 1, grad="float16"),
    Case("router_bwd", 3, 1, 1, grad="float32"),
    Case("router_bwd", 0, 6, 2, grad="float32"),
)
LARGE = (
    *(
        Case("router", tokens, experts, topk, score, dtype)
        for tokens, experts, topk in ((16384, 64, 6), (4099, 128, 8), (2051, 512, 22), (777, 100, 32))
        for score in ("softmax", "pre_softmax", "sigmoid")
        for dtype in ("float32", "bfloat16")
    ),
    Case("router", 4099, 256, 8, "sigmoid", groups=8, kept=4, scale=2.5, bias="float32"),
    Case("router", 4099, 160, 6, groups=8, kept=3, scale=16.0),
    Case("router", 1025, 128, 8, equal=True),
    Case("router", 1025, 128, 8, "sigmoid", "bfloat16", bias="float32", equal=True),
    *(
        Case("router_bwd", 4099, experts, topk, score, dtype, grad=dtype, scale=1.5)
        for experts, topk in ((64, 6), (512, 8))
        for score in ("softmax", "pre_softmax", "sigmoid")
        for dtype in ("float32", "bfloat16")
    ),
)


def region(case: Case) -> Region:
    b, t = GraphBuilder(), Dim("t", max(2, case.tokens))
    by_slot = (t, case.topk)
    ports = {"logits": TensorSpec((t, case.experts), case.dtype)}
    if case.op == "router_bwd":
        ports = {"dprobs": TensorSpec(by_slot, case.grad), **ports, "expert_map": TensorSpec(by_slot, "int32")}
    elif case.bias:
        ports["expert_bias"] = TensorSpec((case.experts,), case.bias)
    made = b.op(case.op, **{p: b.input(p, s) for p, s in ports.items()}, **case.attributes)
    graph = b.build(list(made) if isinstance(made, tuple) else [made])
    return region_of(graph, graph.nodes)


def inputs(case: Case, made: Region, seed: int) -> Tensors:
    """By port, on the CPU."""
    gen, given = torch.Generator().manual_seed(seed), {}
    for port in made.graph.inputs:
        spec = made.graph.specs[port]
        if port == "expert_map":
            given[port] = torch.rand(case.tokens, case.experts, generator=gen).topk(case.topk).indices.int()
            continue
        shape = (case.experts,) if port == "expert_bias" else (case.tokens, *spec.shape[1:])
        t = torch.randn(shape, generator=gen) * (0.3 if port == "expert_bias" else case.spread)
        if port == "logits":
            t = t.round() if case.equal else t
            t[torch.rand(shape, generator=gen) < case.hidden] = float("-inf")
        t = t.to(getattr(torch, spec.dtype))
        if port == "logits" and (case.gap or case.offset):
            row = case.experts + case.gap
            wide = torch.full((case.tokens * row + case.offset,), float("nan"), dtype=t.dtype)
            t = wide.as_strided(t.shape, (row, 1), case.offset).copy_(t)
        given[port] = t
    return given


def told(case: Case, given: Tensors) -> torch.Tensor:
    """bool [tokens]: whether the experts of a token can be told."""
    x = given["logits"].double()
    scores = torch.sigmoid(x) if case.score == "sigmoid" else torch.softmax(x, -1) if case.score == "pre_softmax" else x
    if "expert_bias" in given:
        scores = scores + given["expert_bias"].double()
    ordered, order = scores.sort(dim=-1, descending=True)
    near = 0.0 if case.score == "softmax" else ordered[..., :-1] * APART if case.bias is None else 4 * APART
    same = x.gather(-1, order).diff(dim=-1).nan_to_num(0.0) == 0  # of two that are infinite the difference is NaN
    apart = (same if case.bias is None else False) | (ordered[..., :-1] - ordered[..., 1:] > near)
    found = apart[..., : case.experts if case.groups else case.topk].all(-1)
    if case.groups:
        sums = (
            scores.unflatten(-1, (case.groups, -1))
            .sort(dim=-1, descending=True)
            .values[..., : case.topk // case.kept]
            .sum(-1)
        )
        found = found & (-sums.sort(dim=-1, descending=True).values.diff(dim=-1) > 4 * APART).all(-1)
    return found


def offered(case: Case, made: Region, arch: Arch) -> Offer:
    answer = BY_ID["moe/cute"].load().match(made, arch)
    assert isinstance(answer, Offer), (str(case), answer)
    return answer


def run(case: Case, launch, device: str = "cpu", seed: int = 0) -> None:
    """Launches a case and holds it to the oracle's rule, experts to equality; once more, and the results are the same
    bit for bit."""
    made = region(case)
    cpu = inputs(case, made, seed)
    given, reference = {p: placed(t, device) for p, t in cpu.items()}, op_table()[case.op].reference
    truth = reference({p: t.double() if t.is_floating_point() else t for p, t in cpu.items()}, case.attributes, ())
    peer, found = reference(cpu, case.attributes, ()), []
    for _ in range(2):
        oracle.poison(*(torch.empty_like(t, device=device) for t in truth.values()))
        got = launch(*given.values())
        found.append(got if isinstance(got, tuple) else (got,))
    for port, first, second in zip(peer, *found, strict=True):
        ours, expected, exact = first.cpu(), peer[port], truth[port]
        assert ours.shape == expected.shape and ours.dtype == expected.dtype, (
            f"{case}: {port} is {ours.dtype} {list(ours.shape)}"
        )
        oracle.same_bits(second, first, f"{case}: {port}, again")
        if case.op == "router":
            clear = told(case, cpu)
            assert not case.tokens or case.spread > 2 or clear.float().mean() > 0.5, (
                f"{case}: of most tokens the experts cannot be told"
            )
            ours, expected, exact = ours[clear], expected[clear], exact[clear]
        if port == "expert_map":
            whole = first.cpu().long()
            assert bool(((whole >= 0) & (whole < case.experts)).all()), f"{case}: an expert that is none"
            assert all(row.unique().numel() == case.topk for row in whole[:100]), (
                f"{case}: an expert comes twice in a token"
            )
            oracle.equal(ours, exact.int(), f"{case}: {port}")
        else:
            oracle.compare(ours, exact, expected, f"{case}: {port}")


def simulated(case: Case) -> None:
    """The device code, thread by thread, over outputs of NaN."""
    made, arch = region(case), ARCHS["sm_90"]
    launch = BY_ID["moe/cute"].load().build(BuildContext(made, arch, offered(case, made, arch), compiled)).launch
    with own_cases.guarded_memory(poisoned=True) as guarded:
        run(case, guarded(launch))


def contexts(arch: Arch) -> Iterator[tuple[str, BuildContext]]:
    """(engine, context) of all cases' kernels."""
    for case in (*SMALL, *LARGE):
        made = region(case)
        yield "moe/cute", BuildContext(made, arch, offered(case, made, arch))


if __name__ == "__main__":
    own_cases.main(lambda: SMALL, simulated, contexts, "agree with the reference")
