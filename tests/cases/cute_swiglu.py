"""Cases of activation/cute alone: swiglu and its gradient, over the ways in which rows are spread over blocks.

Results are held to the oracle's rule, with the reference in the case's dtype as PyTorch's computation. ``python -m
tests.cases.cute_swiglu [TEXT]`` builds and runs the cases that hold TEXT thread by thread on a CPU
(``tests/cases/simt.py``); ``--compile ARCH [WORKERS]`` compiles all of them ahead."""

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


@dataclasses.dataclass(frozen=True)
class Case:
    """x [rows, 2 * width]; ``want``: y of the forward, or gradients. ``weight``: dtype of row weights. ``gap``:
    elements between two rows of x and of dy, ``offset``: of their first in its storage. Empty knobs are the engine's
    own."""

    rows: int
    width: int
    want: tuple[str, ...] = ("y",)
    dtype: str = "bfloat16"
    clamp: float | None = None
    weight: str | None = None
    gap: int = 0
    offset: int = 0
    knobs: tuple[tuple[str, object], ...] = ()

    @property
    def op(self) -> str:
        return "swiglu" if self.want == ("y",) else "swiglu_bwd"


def knobs(threads: int, vectors: int, streaming: bool = False) -> tuple[tuple[str, object], ...]:
    return (("threads", threads), ("vectors", vectors), ("streaming", streaming))


BOTH = ("dx", "drow_weight")
SMALL = (
    *(Case(rows, width, want)
      for rows, width in ((3, 1040), (5, 264), (33, 40), (7, 37), (3, 8)) for want in (("y",), ("dx",))),
    *(Case(3, 1288, want, knobs=knobs(64, 2, streaming=True)) for want in (("y",), ("dx",))),
    *(Case(2, 2048, want, knobs=knobs(64, 4)) for want in (("y",), ("dx",))),
    Case(5, 72, clamp=1.0, weight="bfloat16", dtype="float32"),
    Case(5, 72, ("dx",), clamp=1.0, weight="float32"),
    Case(3, 300, BOTH, weight="float32", clamp=1.0), Case(2, 2064, BOTH, weight="bfloat16"),
    Case(4, 40, ("drow_weight",), weight="float32", dtype="float16"),
    Case(5, 48, gap=8), Case(5, 48, ("dx",), gap=3, offset=1), Case(0, 64), Case(0, 64, BOTH, weight="float32"),
)  # fmt: skip


def region(case: Case) -> Region:
    b, t = GraphBuilder(), Dim("t", 64)
    ports = {"dy": TensorSpec((t, case.width), case.dtype)} if case.op == "swiglu_bwd" else {}
    ports |= {"x": TensorSpec((t, 2 * case.width), case.dtype)}
    ports |= {"row_weight": TensorSpec((t,), case.weight)} if case.weight else {}
    made = b.op(case.op, want=list(case.want), **{p: b.input(p, s) for p, s in ports.items()}, clamp=case.clamp)
    graph = b.build(list(made) if isinstance(made, tuple) else [made])
    return region_of(graph, graph.nodes)


def inputs(case: Case, made: Region, seed: int) -> dict[str, torch.Tensor]:
    """By port, on the CPU."""
    gen, given = torch.Generator().manual_seed(seed), {}
    for port in made.graph.inputs:
        spec = made.graph.specs[port]
        t = torch.randn(case.rows, *spec.shape[1:], generator=gen).to(getattr(torch, spec.dtype))
        if t.dim() == 2 and (case.gap or case.offset):
            row = t.shape[1] + case.gap
            wide = torch.full((case.rows * row + case.offset,), float("nan"), dtype=t.dtype)
            t = wide.as_strided(t.shape, (row, 1), case.offset).copy_(t)
        given[port] = t
    return given


def offered(case: Case, made: Region, arch: Arch) -> Offer:
    loaded = BY_ID["activation/cute"].load()
    answer = loaded.offer_with(made, arch, case.knobs) if case.knobs else loaded.match(made, arch)
    assert isinstance(answer, Offer), (case, answer)
    return answer


def run(case: Case, launch, device: str = "cpu", seed: int = 0) -> None:
    """Launches a case and holds it to the oracle's rule; once more, and the results are the same bit for bit."""
    made = region(case)
    cpu = inputs(case, made, seed)
    given = {p: placed(t, device) for p, t in cpu.items()}
    attributes, reference = made.node.attributes, op_table()[case.op].reference
    truth = reference({p: t.double() for p, t in cpu.items()}, attributes, case.want)
    peer = reference(cpu, attributes, case.want)
    found = []
    for _ in range(2):
        oracle.poison(*(torch.empty_like(t, device=device) for t in peer.values()))
        got = launch(*given.values())
        found.append(got if isinstance(got, tuple) else (got,))
    for port, first, second in zip(case.want, *found, strict=True):
        assert first.dtype == peer[port].dtype, f"{case}: {port} is {first.dtype}"
        oracle.compare(first.cpu(), truth[port], peer[port], f"{case}: {port}")
        oracle.same_bits(second, first, f"{case}: {port}, again")


def simulated(case: Case) -> None:
    made, arch = region(case), ARCHS["sm_90"]
    launch = BY_ID["activation/cute"].load().build(BuildContext(made, arch, offered(case, made, arch), compiled)).launch
    with own_cases.guarded_memory() as guarded:
        run(case, guarded(launch))


def contexts(arch: Arch) -> Iterator[tuple[str, BuildContext]]:
    """(engine, context) of all cases' kernels."""
    for case in SMALL:
        made = region(case)
        yield "activation/cute", BuildContext(made, arch, offered(case, made, arch))


if __name__ == "__main__":
    own_cases.main(lambda: SMALL, simulated, contexts, "agree with the reference")
