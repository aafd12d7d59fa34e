"""Cases of experts/quack: the fused products of a layer of experts over maps of tokens to experts, against the op
table's references in float64."""

from __future__ import annotations

import dataclasses

import torch

from layerplan.integration.engines.arch import Arch
from layerplan.integration.engines.contract import BuildContext, Offer, Region
from layerplan.integration.engines.manifest import BY_ID
from layerplan.integration.graph.ir import Graph, GraphBuilder, Size, TensorSpec
from layerplan.integration.planner.cover import region_of
from layerplan.integration.planner.planner import plan
from layerplan.integration.planner.policy import Policy
from layerplan.integration.planner.runner import Runner
from layerplan.modules.graphs import Activation, TensorParallel
from layerplan.modules.moe import moe_graph

from .. import oracle
from .moe import draw_map, grouping

ENGINE = "experts/quack"
KINDS = {
    "gated": ("grouped_matmul", "swiglu"),
    "gradient": ("grouped_matmul_dgrad", "swiglu_bwd"),
    "gathered": ("permute", "grouped_matmul"),
    "gathered_gated": ("permute", "grouped_matmul", "swiglu"),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """``probs``: dtype of the rows' weights, None for none. ``want``: outputs of the gradient. ``dropped``, ``skew``:
    as ``draw_map`` has them; ``one``: every slot goes to one expert. ``gap``: elements between rows of matrices,
    ``offset``: of the first in its storage."""

    kind: str
    tokens: int = 37
    slots: int = 3
    experts: int = 5
    width: int = 64
    half: int = 40
    dtype: str = "bfloat16"
    probs: str | None = "float32"
    want: tuple[str, ...] = ("dx", "drow_weight")
    dropped: float = 0.0
    skew: float = 0.0
    one: bool = False
    gap: int = 0
    offset: int = 0

    def __str__(self) -> str:
        plain, names = Case(self.kind), [f.name for f in dataclasses.fields(self)]
        said = [f"{n}={getattr(self, n)}" for n in names if getattr(self, n) != getattr(plain, n)]
        return " ".join([self.kind, *said])


def _every(**changes) -> tuple[Case, ...]:
    """A case of each kind, with the rows' weights and without."""
    return tuple(
        Case(kind, probs=probs, want=("dx", "drow_weight") if probs else ("dx",), **changes)
        for kind in KINDS
        for probs in ("float32", None)
    )


SMALL = (
    *_every(),
    *_every(dropped=0.4, skew=1.0, dtype="float16"),  # groups of any size, rows behind the last one
    *_every(one=True, experts=4),  # all but one are empty
    *_every(tokens=1, slots=2, experts=16, width=8, half=8),
    *_every(tokens=0),
    *_every(dropped=1.0, tokens=5),  # no rows at all, and room for them
    *_every(gap=4, offset=4),  # rows that TMA cannot read: copies
    *(Case(kind, probs="bfloat16", dropped=0.2) for kind in KINDS),
    Case("gradient", want=("dx",)),  # weighted rows whose weights need no gradient
    Case("gradient", half=328, tokens=60),  # three tiles of columns
)
LARGE = (
    *_every(tokens=1031, slots=6, experts=64, width=2048, half=1408),
    *_every(tokens=2048, slots=8, experts=128, width=2048, half=768, skew=0.05),
    *_every(tokens=700, slots=2, experts=8, width=1024, half=3584, dropped=0.3, dtype="float16"),
    *_every(tokens=515, slots=4, experts=32, width=512, half=776, one=True),
)


def graph(kind: str, rows: Size, *, slots: int = 3, experts: int = 3, width: int = 64, half: int = 64,
          dtype: str = "bfloat16", probs: str | None = "float32", want: tuple[str, ...] = ("dx", "drow_weight"),
          clamp: float | None = None, align: int = 1, keep: bool = False) -> Graph:  # fmt: skip
    """The graph of a kind's ops over ``rows`` rows (tokens, where it permutes). ``keep``: what the product gives, or
    reads permuted, is an output too."""
    b = GraphBuilder()
    gathers, weights = kind.startswith("gathered"), {}

    def value(name: str, *shape: Size, of: str = dtype) -> str:
        return b.input(name, TensorSpec(shape, of), weight=name == "w")

    if gathers:
        x = value("x", rows, width)
        places = {"row_map": value("row_map", rows, slots, of="int32")}
        places |= {n: value(n, experts, of="int32") for n in ("counts", "offsets")}
        extra = {"probs": value("probs", rows, slots, of=probs)} if probs else {}
        made = b.op("permute", x=x, **places, **extra, align=align)
        moved, offsets = made[0] if probs else made, places["offsets"]
        weights = {"row_weight": made[1]} if probs else {}
    else:
        moved, offsets = value("rows", rows, width), value("offsets", experts, of="int32")
        weights = {"row_weight": value("p", rows, of=probs)} if probs else {}
    if kind == "gradient":
        dx = b.op("grouped_matmul_dgrad", dy=moved, weight=value("w", experts, width, half), offsets=offsets)
        made = b.op("swiglu_bwd", want=list(want), dy=dx, x=value("gate_up", rows, 2 * half), **weights, clamp=clamp)
        return b.build([*(made if isinstance(made, tuple) else (made,)), *([dx] if keep else [])])
    y = b.op("grouped_matmul", x=moved, weight=value("w", experts, 2 * half, width), offsets=offsets)
    if kind == "gathered":
        return b.build([*weights.values(), y, *([moved] if keep else [])])
    return b.build([b.op("swiglu", x=y, **weights, clamp=clamp), *([y] if keep else [])])


def region(case: Case) -> Region:
    fields = {n: getattr(case, n) for n in ("slots", "experts", "width", "half", "dtype", "probs", "want")}
    made = graph(case.kind, case.tokens * (1 if case.kind.startswith("gathered") else case.slots), **fields)
    return region_of(made, made.nodes)


def inputs(case: Case, seed: int = 0) -> tuple[dict[str, torch.Tensor], int]:
    """(the region's inputs by name, NaN in rows that nothing may read; how many rows are in groups)"""
    gen, made = torch.Generator().manual_seed(seed), region(case)
    table = draw_map(gen, case.tokens, case.slots, case.experts, case.dropped, case.skew)
    table = torch.where(table >= 0, case.experts // 2, -1).int() if case.one else table
    counts, ends, places = grouping(table, case.experts)
    whole = {"counts": counts, "offsets": ends, "row_map": places}
    found = {}
    for name in made.graph.inputs:
        spec = made.graph.specs[name]
        if name in whole:
            found[name] = torch.tensor(whole[name], dtype=torch.int32).view(spec.shape)
            continue
        t = torch.rand(spec.shape, generator=gen) if name in ("p", "probs") else torch.randn(spec.shape, generator=gen)
        t = t * case.width**-0.5 if name == "w" else t
        if name in ("rows", "gate_up", "p"):
            t[ends[-1] :] = float("nan")
        elif name == "x":
            t[(table < 0).all(1)] = float("nan")
        elif name == "probs":
            t[table < 0] = float("nan")
        found[name] = _placed(t.to(getattr(torch, spec.dtype)), case)
    return found, ends[-1]


def _placed(t: torch.Tensor, case: Case) -> torch.Tensor:
    """``t`` with the case's gap between rows (a weight's matrices stay together), ``offset`` elements into its
    storage."""
    gap = case.gap if t.dim() == 2 else 0
    strides = (t.shape[1] + gap, 1) if t.dim() == 2 else t.stride()
    span = sum((n - 1) * s for n, s in zip(t.shape, strides, strict=True)) + 1 if t.numel() else 0
    held = t.new_full((case.offset + span,), float("nan")).as_strided(t.shape, strides, case.offset)
    return held.copy_(t)


def built(case: Case, arch: Arch, *knobs: tuple[str, object]):
    """The engine's launch of a case on ``arch``, with its own knobs where none are given."""
    made, engine = region(case), BY_ID[ENGINE].load()
    offer = engine.offer_with(made, arch, knobs) if knobs else engine.match(made, arch)
    assert isinstance(offer, Offer), f"{case}: {offer}"
    return engine.build(BuildContext(made, arch, offer)).launch


def run(case: Case, launch, device: str, seed: int = 0) -> None:
    """Holds a launch to the rule over outputs of NaN, and its rerun to be bitwise equal."""
    made = region(case)
    given, used = inputs(case, seed)
    here = [_placed(t.to(device), case) if t.is_floating_point() else t.to(device) for t in given.values()]
    reference = BY_ID["reference/eager"].load().build(BuildContext(made, None, None)).launch
    exact = as_tuple(reference(*(t.double() if t.is_floating_point() else t for t in here)))
    peers = as_tuple(reference(*here))
    turns = []
    for _ in range(2):
        oracle.poison(*peers)
        turns.append([t[:used] for t in as_tuple(launch(*here))])
    assert len(turns[0]) == len(peers)
    for value, got, again, truth, peer in zip(made.graph.outputs, *turns, exact, peers, strict=True):
        assert got.dtype == peer.dtype, f"{case}: {value} is {got.dtype}, not {peer.dtype}"
        if got.numel():
            oracle.compare(got, truth[:used], peer[:used], f"{case}: {value}")
        oracle.same_bits(again, got, f"{case}: rerun of {value}")


def as_tuple(made) -> tuple[torch.Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer of experts, its tokens grouped in it."""

    tokens: int
    slots: int
    experts: int
    width: int
    half: int
    probs: torch.dtype = torch.float32
    dropped: float = 0.0

    def empty(self) -> dict[str, torch.Tensor]:
        """The layer's tensors without contents."""
        rows, table, bf16 = (self.tokens, self.width), (self.tokens, self.slots), torch.bfloat16
        found = {
            "x": (rows, bf16), "probs": (table, self.probs), "expert_map": (table, torch.int32), "dy": (rows, bf16),
            "fc1": ((self.experts, 2 * self.half, self.width), bf16),
            "fc2": ((self.experts, self.width, self.half), bf16),
        }  # fmt: skip
        return {n: torch.empty(shape, dtype=dtype, device="meta") for n, (shape, dtype) in found.items()}

    def values(self) -> dict[str, torch.Tensor]:
        gen, made = torch.Generator().manual_seed(0), {}
        shapes = self.empty()
        del shapes["expert_map"]
        for n, t in shapes.items():
            drawn = torch.randn(t.shape, generator=gen) * (t.shape[-1] ** -0.5 if n.startswith("fc") else 1.0)
            made[n] = (drawn.sigmoid() if n == "probs" else drawn).to(t.dtype)
        table = draw_map(gen, self.tokens, self.slots, self.experts, self.dropped, skew=0.3)
        return made | {"expert_map": table}

    def graph(self):
        """(names of its inputs, a function that makes the graph of such tensors)"""
        return moe_graph(TensorParallel(), Activation("swiglu"), self.experts)

    def chooses(self, arch: Arch) -> None:
        """The planner gives the engine swiglu's gradient of a training step, and all that lies in front of the second
        product in inference."""
        names, build = self.graph()
        made, given = build(*(self.empty()[n] for n in names)), tuple(n != "expert_map" for n in names)
        for needs, kind in ((given, "gradient"), (None, "gathered_gated")):
            whole = plan(made, arch, needs_grad=needs)
            parts = (whole.forward, *((whole.backward,) if needs else ()))
            assert [r.ops for p in parts for r in p.regions if r.engine == ENGINE] == [KINDS[kind]], str(whole)

    def step(self, device: str, policy: Policy, wide: bool) -> dict[str, torch.Tensor]:
        """Results and gradients of a training step, and the result of inference; ``wide``: in float64."""
        names, build = self.graph()
        values = self.values()
        here = {n: (t.double() if wide and t.is_floating_point() else t).to(device) for n, t in values.items()}
        leaves = {n: here[n].requires_grad_() for n in names if n != "expert_map"}
        given = tuple(here[n] for n in names)
        oracle.poison(*leaves.values())
        y = Runner(build, names, policy=policy)(*given)
        grads = torch.autograd.grad(y, list(leaves.values()), here["dy"])
        with torch.no_grad():
            inference = Runner(build, names, policy=policy)(*given)
        return {"y": y.detach(), **{f"d{n}": g for n, g in zip(leaves, grads, strict=True)}, "inference": inference}

    def hold(self, device: str) -> None:
        """Results under policy auto to the rule."""
        reference = Policy("reference")
        exact, peer = (self.step(device, reference, wide) for wide in (True, False))
        ours = self.step(device, Policy(), False)
        for name, got in ours.items():
            oracle.compare(got, exact[name], peer[name], name)
