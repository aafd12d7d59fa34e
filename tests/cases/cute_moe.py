"""Cases of moe/cute: rows to their experts and back, over maps, widths, dtypes, layouts and the ways in which rows are
spread over blocks, against the op table's references in float64.

``python -m tests.cases.cute_moe [TEXT]`` runs the device code of the cases whose name holds TEXT thread by thread on a
CPU (``tests/cases/simt.py``), over outputs of NaN; ``--compile ARCH [WORKERS]`` compiles all of them ahead; ``--reach
[TEXT ...]`` launches compiled code, of the sorts and the router too, without a GPU as far as the driver: by then it has
checked number, type, shape, strides and alignment of its arguments."""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Iterator

import torch

from layerplan.integration.engines.arch import ARCHS, Arch
from layerplan.integration.engines.contract import BuildContext, Offer, Region
from layerplan.integration.engines.manifest import BY_ID
from layerplan.integration.graph.ir import Dim, GraphBuilder, TensorSpec
from layerplan.integration.graph.ops.moe import capacity
from layerplan.integration.graph.ops.table import op_table
from layerplan.integration.planner.cover import region_of

from .. import oracle
from . import own_cases
from .cute_norm import compiled, placed
from .moe import draw_map
from .sums import FEW, worst_order

Tensors = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Case:
    """``want``: outputs, which with ``probs`` (a dtype) name the work. ``dropped``: the share of dropped slots,
    ``skew`` as ``draw_map`` has it, ``one``: every slot goes to one expert. ``gap``: elements between rows of matrices,
    ``offset``: of their first in its storage. Empty knobs are the engine's own."""

    op: str
    want: tuple[str, ...]
    tokens: int
    slots: int
    experts: int
    width: int
    dtype: str = "bfloat16"
    probs: str | None = None
    align: int = 1
    dropped: float = 0.0
    skew: float = 0.0
    one: bool = False
    gap: int = 0
    offset: int = 0
    knobs: tuple[tuple[str, object], ...] = ()

    def __str__(self) -> str:
        plain = Case(self.op, self.want, self.tokens, self.slots, self.experts, self.width)
        names = [f.name for f in dataclasses.fields(self)][6:]
        said = [f"{n}={getattr(self, n)}" for n in names if getattr(self, n) != getattr(plain, n)]
        return " ".join(
            [f"{self.op} {'+'.join(self.want)} {self.tokens}x{self.slots} of {self.experts}, width {self.width}", *said]
        )

    @property
    def matrix(self) -> str:
        """The port of rows by token or by slot that the op moves first."""
        return {"permute": "x", "unpermute": "rows", "permute_bwd": "drows", "unpermute_bwd": "dy"}[self.op]


def knobs(threads: int, vectors: int | None, streaming: bool = False) -> tuple[tuple[str, object], ...]:
    """Of a block and of a thread; a block that sums over a row has all of it."""
    return (("threads", threads), *([] if vectors is None else [("vectors", vectors)]), ("streaming", streaming))


KINDS = (
    ("permute", ("rows",), None),
    ("permute", ("rows", "row_probs"), "float32"),
    ("unpermute", ("y",), None),
    ("unpermute", ("y",), "float32"),
    ("permute_bwd", ("dx",), None),
    ("permute_bwd", ("dx", "dprobs"), "float32"),
    ("unpermute_bwd", ("drows",), None),
    ("unpermute_bwd", ("drows", "dprobs"), "float32"),
)
"""Ops with what is wanted of them in a training step, without probabilities and with."""


def _small() -> Iterator[Case]:
    for op, want, probs in KINDS:
        yield Case(op, want, 5, 2, 4, 264, probs=probs)  # vectors of 16 bytes, a piece and a bit of a warp
        yield Case(op, want, 7, 3, 5, 24, probs=probs, align=4, dropped=0.3)  # several rows a block
        yield Case(op, want, 3, 1, 3, 8, "float32", probs=probs and "bfloat16", align=2)  # one vector of 16 bytes
        yield Case(
            op, want, 4, 5, 3, 37, probs=probs and "float16", align=20, skew=1.0, gap=3, offset=1
        )  # values alone
        yield Case(op, want, 3, 4, 8, 44, "float16", probs=probs, one=True, align=8)  # 8 bytes
        yield Case(op, want, 3, 11, 16, 20, "float32", probs=probs, gap=4, offset=4)  # more slots than are in flight
        yield Case(op, want, 4, 2, 3, 66, probs=probs and "bfloat16", dropped=1.0, align=4)  # 4 bytes, nothing kept
        yield Case(op, want, 0, 2, 3, 16, probs=probs, align=4)
    for op, want, probs in KINDS:
        dots = op == "unpermute_bwd" and "dprobs" in want
        yield Case(
            op, want, 3, 3, 4, 1200, probs=probs, align=3, knobs=knobs(64, None if dots else 2, streaming=True)
        )  # two pieces of a row
        yield Case(op, want, 2, 2, 2, 2056, probs=probs, knobs=knobs(64, None if dots else 4))
    yield Case("permute", ("rows",), 3, 2, 4, 40, probs="float32")  # nobody reads the probabilities
    yield Case("unpermute_bwd", ("drows",), 3, 2, 4, 40, probs="float32", align=4)
    yield Case("unpermute_bwd", ("dprobs",), 3, 2, 4, 1032, probs="float32", align=4)  # two chunks a thread
    yield Case("unpermute_bwd", ("drows", "dprobs"), 2, 2, 2, 1001, probs="float32", align=2)  # and a loop over them
    yield Case("permute_bwd", ("dprobs",), 5, 3, 4, 1, probs="bfloat16", align=2, dropped=0.3)
    yield Case("permute_bwd", ("dprobs",), 130, 4, 4, 1, probs="float32")


SMALL = tuple(_small())
LARGE = tuple(
    Case(op, want, tokens, slots, experts, width, dtype, probs, align, dropped, skew)
    for op, want, probs in KINDS
    for tokens, slots, experts, width, dtype, align, dropped, skew in (
        (1031, 6, 64, 2048, "bfloat16", 1, 0.0, 0.0),
        (517, 8, 128, 2048, "float16", 128, 0.2, 0.05),
        (300, 2, 8, 4104, "float32", 16, 0.0, 1.0),
        (2049, 4, 60, 1407, "bfloat16", 8, 0.5, 0.1),
    )
)


def fuzzed(seed: int) -> Case:
    r = random.Random(seed)
    op, want, probs = r.choice(KINDS)
    dtype, experts = r.choice(("bfloat16", "bfloat16", "float16", "float32")), r.choice((1, 2, 8, 60, 128, 300))
    slots = min(experts, r.choice((1, 2, 4, 6, 8, 9, 32)))
    return Case(
        op,
        want,
        tokens=r.choice((1, 2, 31, r.randint(1, 6000 // slots))),
        slots=slots,
        experts=experts,
        width=r.randint(1, 700) if r.random() < 0.3 else 8 * r.randint(1, 400),
        dtype=dtype,
        probs=probs and r.choice(("float32", dtype)),
        align=r.choice((1, 1, 8, 16, *((100, 128) if experts <= 60 else ()))),
        dropped=r.choice((0.0, 0.0, 0.3, 1.0)),
        skew=r.choice((0.0, 0.05, 1.0)),
        one=r.random() < 0.1,
        gap=r.choice((0, 0, 8, 3)),
        offset=r.choice((0, 0, 8, 1)),
    )


# ---- regions and inputs ----------------------------------------------------------------------------------------------


def region(case: Case) -> Region:
    """The case's op with symbolic tokens."""
    b, t = GraphBuilder(), Dim("t", max(2, case.tokens))
    places, ends = TensorSpec((t, case.slots), "int32"), TensorSpec((case.experts,), "int32")
    count = capacity(t, case.slots, case.experts, case.align)
    by_token, by_row = TensorSpec((t, case.width), case.dtype), TensorSpec((count, case.width), case.dtype)
    probs = {} if case.probs is None else {"probs": TensorSpec((t, case.slots), case.probs)}
    if case.op == "permute_bwd":
        ports = {"drows": by_row} if "dx" in case.want else {}
        ports |= {"drow_probs": TensorSpec((count,), case.probs)} if "dprobs" in case.want else {}
        ports, attributes = ports | {"row_map": places}, {}
    else:
        ports = {
            case.matrix: by_row if case.op == "unpermute" else by_token,
            "row_map": places,
            "counts": ends,
            "offsets": ends,
        }
        ports |= {"rows": by_row} if case.op == "unpermute_bwd" and "dprobs" in case.want else {}
        ports, attributes = ports | probs, {"align": case.align}
    made = b.op(case.op, want=list(case.want), **{p: b.input(p, s) for p, s in ports.items()}, **attributes)
    graph = b.build(list(made) if isinstance(made, tuple) else [made])
    return region_of(graph, graph.nodes)


def inputs(case: Case, made: Region, seed: int) -> Tensors:
    """By port, on the CPU. Rows behind the last group are NaN."""
    gen = torch.Generator().manual_seed(seed)
    expert_map = (
        draw_map(gen, case.tokens, case.slots, case.experts, case.dropped, case.skew)
        if case.slots <= case.experts
        else None
    )
    if case.one or expert_map is None:
        kept = torch.rand(case.tokens, case.slots, generator=gen) >= case.dropped
        expert_map = torch.where(kept, case.experts - 1, -1).int()
    attributes = {"num_experts": case.experts, "align": case.align}
    given: Tensors = dict(op_table()["group_by_expert"].reference({"expert_map": expert_map}, attributes, ()))
    used, total = int(given["offsets"][-1]), capacity(case.tokens, case.slots, case.experts, case.align)
    for port in made.graph.inputs:
        if port in given:
            continue
        spec = made.graph.specs[port]
        by_row = port in ("rows", "drows", "drow_probs")
        shape = [total if by_row else case.tokens, *spec.shape[1:]]
        t = (torch.rand if port == "probs" else torch.randn)(shape, generator=gen).to(getattr(torch, spec.dtype))
        if by_row:
            t[used:] = float("nan")
        given[port] = laid_out(t, case.gap, case.offset) if t.dim() == 2 and port != "probs" else t
    return {p: given[p] for p in made.graph.inputs}


def laid_out(t: torch.Tensor, gap: int, offset: int) -> torch.Tensor:
    """A matrix with ``gap`` elements between its rows and ``offset`` in front of them, all of these NaN."""
    if not gap and not offset:
        return t
    row = t.shape[1] + gap
    wide = torch.full((len(t) * row + offset,), float("nan"), dtype=t.dtype)
    return wide.as_strided(t.shape, (row, 1), offset).copy_(t)


def offered(case: Case, made: Region, arch: Arch) -> Offer:
    engine = BY_ID["moe/cute"].load()
    answer = engine.offer_with(made, arch, case.knobs) if case.knobs else engine.match(made, arch)
    assert isinstance(answer, Offer), (str(case), answer)
    return answer


# ---- runs ------------------------------------------------------------------------------------------------------------


def run(case: Case, launch, device: str = "cpu", seed: int = 0) -> None:
    """Launches a case and holds it to the oracle's rule, rows that are copied to equality; once more, and the results
    are the same bit for bit."""
    made = region(case)
    cpu = inputs(case, made, seed)
    given = {p: placed(t, device) for p, t in cpu.items()}
    attributes, reference = made.node.attributes, op_table()[case.op].reference
    truth = reference({p: t.double() if t.is_floating_point() else t for p, t in cpu.items()}, attributes, case.want)
    peer = reference(cpu, attributes, case.want)
    used = int(cpu["offsets"][-1]) if "offsets" in cpu else 0
    found = []
    for _ in range(2):
        oracle.poison(*(torch.empty_like(t, device=device) for t in peer.values()))
        got = launch(*given.values())
        found.append(got if isinstance(got, tuple) else (got,))
    for port, first, second in zip(case.want, *found, strict=True):
        ours, expected, exact = first.cpu(), peer[port], truth[port]
        assert ours.shape == expected.shape and ours.dtype == expected.dtype and ours.is_contiguous(), (
            f"{case}: {port} is {ours.dtype} {list(ours.shape)}"
        )
        if port in ("rows", "row_probs", "drows"):
            ours, expected, exact, second = ours[:used], expected[:used], exact[:used], second[:used]
            first = first[:used]
        if case.op == "unpermute_bwd" and port == "dprobs" and 0 < expected.numel() < FEW:
            expected = worst_order(_dots(cpu), exact, expected)
        oracle.compare(ours, exact, expected, f"{case}: {port}")
        if case.op == "permute" or (port == "dprobs" and case.op == "permute_bwd"):
            oracle.equal(ours, expected, f"{case}: {port} is copied")
        oracle.same_bits(second, first, f"{case}: {port}, again")


def _dots(given: Tensors) -> torch.Tensor:
    """The terms [width, tokens, slots] of the gradients of probabilities."""
    place = given["row_map"].long()
    rows = given["rows"].float()[place.clamp(min=0)].masked_fill((place < 0)[:, :, None], 0.0)
    return (rows * given["dy"].float()[:, None]).permute(2, 0, 1)


def simulated(case: Case) -> None:
    """The device code, thread by thread. Outputs are NaN before, and rows behind the last group after it as well."""
    made, arch = region(case), ARCHS["sm_90"]
    ends: list[int] = []
    launch = BY_ID["moe/cute"].load().build(BuildContext(made, arch, offered(case, made, arch), compiled)).launch

    def checked(*t):
        if "offsets" in made.graph.inputs:
            ends.append(int(t[made.graph.inputs.index("offsets")][-1]))
        results = launch(*t)
        for port, result in zip(case.want, results if isinstance(results, tuple) else (results,), strict=True):
            if port in ("rows", "row_probs", "drows") and case.tokens:
                assert result[ends[-1] :].isnan().all(), f"{case}: {port} is written behind the last group"
        return results

    with own_cases.guarded_memory(poisoned=True) as guarded:
        run(case, guarded(checked))


def contexts(arch: Arch) -> Iterator[tuple[str, BuildContext]]:
    """(engine, context) of all cases' kernels."""
    for case in (*SMALL, *LARGE):
        made = region(case)
        yield "moe/cute", BuildContext(made, arch, offered(case, made, arch))


def reach(*texts: str, modules: tuple, engine: str = "moe/cute") -> None:
    """Launches the engine's compiled code for the small cases of ``modules`` whose names hold one of ``texts``."""
    from layerplan.integration.plan_cache import memory

    from .quack_compile import labelling

    arch, reached = ARCHS["sm_90"], 0
    for module in modules:
        for case in module.SMALL:
            if not any(text in str(case) for text in texts or ("",)) or not case.tokens:
                continue
            made = module.region(case)
            build = BuildContext(
                made, arch, module.offered(case, made, arch), lambda kernel: labelling(memory.function)(kernel, arch)
            )
            try:
                BY_ID[engine].load().build(build).launch(*module.inputs(case, made, 0).values())
            except RuntimeError as error:  # a mismatch is a TypeError or a ValueError
                assert "Cuda" in str(error), (str(case), error)
                reached += 1
    print("reached the driver:", reached)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--reach"]:
        from . import cute_group, cute_router

        reach(*sys.argv[2:], modules=(sys.modules[__name__], cute_group, cute_router))
        sys.exit()
    own_cases.main(lambda: SMALL, simulated, contexts, "agree with the reference")
