"""Cases of moe/cute's sort of slots by expert, group_by_expert and tokens_per_expert, against the op table's
references, bit for bit: maps of any skew, one block and several, padding, masks and sequences.

``python -m tests.cases.cute_group [TEXT]`` runs the device code of the cases whose name holds TEXT thread by thread on
a CPU (``tests/cases/simt.py``); ``--compile ARCH [WORKERS]`` compiles all of them ahead."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from unittest import mock

import torch

from layerplan.integration.engines.arch import ARCHS, Arch
from layerplan.integration.engines.contract import BuildContext, Offer, Region
from layerplan.integration.engines.manifest import BY_ID
from layerplan.integration.graph.ir import Dim, GraphBuilder, TensorSpec
from layerplan.integration.graph.ops.table import op_table
from layerplan.integration.planner.cover import region_of

from .. import oracle
from . import own_cases
from .cute_norm import compiled

OPS = ("group_by_expert", "tokens_per_expert")


@dataclasses.dataclass(frozen=True)
class Case:
    """``kind`` of map: "random", "skewed" (most slots go to the first experts), "one" (all to the last), "dropped"
    (none to any), "foreign" (also ids of no expert). ``padding``: the share of tokens that a mask hides. ``few``: slots
    of a block where a simulated case takes several."""

    op: str
    tokens: int
    slots: int
    experts: int
    align: int = 1
    kind: str = "random"
    padding: float = 0.0
    sequences: int = 1
    strided: bool = False
    few: int | None = None

    def __str__(self) -> str:
        said = [
            f"{f.name}={getattr(self, f.name)}"
            for f in dataclasses.fields(self)[4:]
            if getattr(self, f.name) != f.default
        ]
        return " ".join([f"{self.op} {self.tokens}x{self.slots} of {self.experts}", *said])

    @property
    def attributes(self) -> dict[str, int]:
        more = {"align": self.align} if self.op == "group_by_expert" else {"sequences": self.sequences}
        return {"num_experts": self.experts, **more}


SMALL = (
    Case("group_by_expert", 37, 3, 5),
    Case("group_by_expert", 300, 2, 64, 16, "skewed"),
    Case("group_by_expert", 1, 1, 1),
    Case("group_by_expert", 90, 4, 300, 8, "one"),
    Case("group_by_expert", 65, 1, 33, 128, "dropped"),
    Case("group_by_expert", 0, 2, 3, 4),
    Case("group_by_expert", 200, 4, 7, 4, "foreign", strided=True, few=300),
    Case("group_by_expert", 700, 1, 40, 1, "skewed", few=256),
    Case("group_by_expert", 133, 5, 1000, 2, few=300),
    Case("tokens_per_expert", 37, 3, 5),
    Case("tokens_per_expert", 150, 4, 16, padding=0.3, sequences=3, few=256),
    Case("tokens_per_expert", 400, 2, 257, kind="foreign", padding=0.5, strided=True, few=300),
    Case("tokens_per_expert", 60, 2, 8, kind="one", sequences=7),
    Case("tokens_per_expert", 0, 2, 5),
)
LARGE = (
    *(
        Case("group_by_expert", tokens, slots, experts, align, kind)
        for tokens, slots, experts, align in (
            (16384, 8, 128, 1),
            (16383, 6, 64, 128),
            (3001, 2, 8, 16),
            (131071, 4, 1024, 8),
            (2000003, 1, 16, 1),
        )
        for kind in ("random", "skewed", "one", "foreign")
    ),
    *(
        Case("tokens_per_expert", 16384, 8, 128, kind=kind, padding=padding, sequences=sequences)
        for kind in ("random", "one")
        for padding, sequences in ((0.0, 1), (0.1, 4))
    ),
    Case("tokens_per_expert", 1000003, 8, 1024, padding=0.2),
)


def region(case: Case) -> Region:
    b, t = GraphBuilder(), Dim("t", max(2, case.tokens))
    mask = {"padding_mask": b.input("padding_mask", TensorSpec((t,), "bool"))} if case.padding else {}
    made = b.op(
        case.op, expert_map=b.input("expert_map", TensorSpec((t, case.slots), "int32")), **mask, **case.attributes
    )
    graph = b.build(list(made) if isinstance(made, tuple) else [made])
    return region_of(graph, graph.nodes)


def inputs(case: Case, made: Region, seed: int) -> dict[str, torch.Tensor]:
    """By port, on the CPU."""
    gen, shape = torch.Generator().manual_seed(seed), (case.tokens, case.slots)
    u = torch.rand(shape, generator=gen)
    drawn = ((u**4 if case.kind == "skewed" else u) * case.experts).long().clamp(max=case.experts - 1)
    drawn[torch.rand(shape, generator=gen) < 0.1] = -1
    if case.kind == "foreign":
        drawn[torch.rand(shape, generator=gen) < 0.1] = case.experts + 3
        drawn[torch.rand(shape, generator=gen) < 0.1] = -7
    if case.kind in ("one", "dropped"):
        drawn.fill_(case.experts - 1 if case.kind == "one" else -1)
    expert_map = drawn.int()
    if case.strided:
        expert_map = torch.stack((expert_map, expert_map), -1)[..., 0]
    given = {"expert_map": expert_map, "padding_mask": torch.rand(case.tokens, generator=gen) < case.padding}
    return {p: given[p] for p in made.graph.inputs}


def offered(case: Case, made: Region, arch: Arch) -> Offer:
    answer = BY_ID["moe/cute"].load().match(made, arch)
    assert isinstance(answer, Offer), (str(case), answer)
    return answer


def run(case: Case, launch, device: str = "cpu", seed: int = 0) -> None:
    """Results are the reference's, twice."""
    made = region(case)
    cpu = inputs(case, made, seed)
    want, given = op_table()[case.op].reference(cpu, case.attributes, ()), [t.to(device) for t in cpu.values()]
    for _ in range(2):
        oracle.poison(*(torch.empty_like(t, dtype=torch.float32, device=device) for t in want.values()))
        got = launch(*given)
        for (port, expected), ours in zip(want.items(), got if isinstance(got, tuple) else (got,), strict=True):
            oracle.equal(ours.cpu(), expected, f"{case}: {port}")


def simulated(case: Case) -> None:
    """The device code, thread by thread, over outputs and workspace that hold what no kernel means."""
    from layerplan.kernels.moe import cute

    made, arch = region(case), ARCHS["sm_90"]
    launch = BY_ID["moe/cute"].load().build(BuildContext(made, arch, offered(case, made, arch), compiled)).launch
    one, some = (cute._ONE_BLOCK, cute._BLOCK_SLOTS) if case.few is None else (0, case.few)
    with (
        own_cases.guarded_memory(poisoned=True) as guarded,
        mock.patch.multiple(cute, _ONE_BLOCK=one, _BLOCK_SLOTS=some),
    ):
        run(case, guarded(launch))


def contexts(arch: Arch) -> Iterator[tuple[str, BuildContext]]:
    """(engine, context) of all cases' kernels."""
    for case in (*SMALL, *LARGE):
        made = region(case)
        yield "moe/cute", BuildContext(made, arch, offered(case, made, arch))


if __name__ == "__main__":
    own_cases.main(lambda: SMALL, simulated, contexts, "agree with the reference")
