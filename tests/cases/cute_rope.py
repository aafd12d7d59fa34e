"""Cases of rope/cute: rotations alone, and with the split or merge of a fused QKV product and norms over each head,
against the op table's references in float64. Head dims, tables, layouts and token counts are such that every path of
the device code is taken.

``python -m tests.cases.cute_rope [TEXT]`` runs the device code of the small cases thread by thread on a CPU
(``tests/cases/simt.py``); ``--compile ARCH [WORKERS]`` compiles all cases for an arch into the cache of
LAYERPLAN_CACHE; ``--reach`` launches compiled code without a GPU as far as the driver: by then it has checked number,
type, shape, strides and alignment of its arguments."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import sys
from collections.abc import Iterator

import torch

from layerplan.integration.engines.arch import ARCHS, Arch
from layerplan.integration.engines.contract import BuildContext, Offer, Region
from layerplan.integration.graph.ir import Dim, GraphBuilder, TensorSpec
from layerplan.integration.planner.cover import region_of
from layerplan.kernels.common.evaluate import reference_launch
from layerplan.kernels.rope.cute import CuteRope

from .. import oracle
from . import own_cases

EPS = 1e-5
FORMS = ("alone", "split", "merge", "norm_bwd")


@dataclasses.dataclass(frozen=True)
class Case:
    """``tokens``: one or two leading dims. ``keys`` KV groups of ``queries`` heads in all; form "alone" has no keys.
    ``half`` 0: no rotation. ``positions``: None, "axis" [tokens along the axis], "token" [all tokens], "same" (one
    tensor [axis] for queries and keys). ``layout``: "plain", "strided" (gaps between tokens), "offset" (one element
    into an allocation), "heads_first" (heads outside of tokens). ``want``: of a norm's gradient, sums that are wanted;
    of a split, whether values are ("v") and statistics ("stats")."""

    form: str
    tokens: tuple[int, ...] = (5, 2)
    queries: int = 4
    keys: int = 2
    head_dim: int = 64
    half: int = 32
    dtype: str = "bfloat16"
    table: str = "float32"
    norm: str | None = None
    weight: str | None = "bfloat16"
    bias: bool = False
    zero: bool = False
    interleaved: bool = False
    inverse: bool = False
    positions: str | None = None
    axis: int = 0
    layout: str = "plain"
    want: tuple[str, ...] = ("v", "stats", "dweight", "dbias")
    from_fused: bool = True
    knobs: tuple[tuple[str, object], ...] = ()

    def __str__(self) -> str:
        plain = Case(self.form)
        said = [
            f"{f.name}={getattr(self, f.name)}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != getattr(plain, f.name)
        ]
        return " ".join([self.form, *said])


def cases() -> list[Case]:
    """Small ones."""
    made = [Case(f, keys=0 if f == "alone" else 2, norm=n) for f, n in _forms()]
    for form, norm in _forms():
        base = Case(form, keys=0 if form == "alone" else 2, norm=norm)

        def add(base=base, **changes) -> None:
            made.append(dataclasses.replace(base, **changes))

        add(tokens=(7,), positions="axis")
        add(positions="token", axis=1, tokens=(2, 5), interleaved=True)
        add(positions="same", inverse=True, dtype="float16", weight="float32" if norm else None, table="float16")
        add(head_dim=80, half=24, layout="strided", zero=True)  # partial, odd number of units
        add(head_dim=80, half=20, interleaved=True, bias=norm == "layer_norm")
        add(head_dim=72, half=36, dtype="float32", layout="offset", table="bfloat16")
        add(head_dim=70, half=35, tokens=(3,))  # vectors of one element, 2 units a thread
        add(head_dim=68, half=34, interleaved=True, positions="same", table="bfloat16", tokens=(3, 2))  # of one word
        add(head_dim=20, half=6, dtype="float16", weight="float16", tokens=(3,))  # likewise, partial
        add(head_dim=10, half=3, interleaved=True, dtype="float32", weight="float32", tokens=(3, 1))
        add(head_dim=128, half=64, layout="heads_first", tokens=(3, 3))
        add(tokens=(0, 2))
        add(tokens=(1,), queries=14, keys=0 if form == "alone" else 2, head_dim=16, half=8)
        add(queries=8, keys=0 if form == "alone" else 1, head_dim=128, half=16, tokens=(9,))
        if norm:
            add(half=0, weight=None, tokens=(4, 3))
            add(want=("v",), bias=norm == "layer_norm")
        if form == "norm_bwd":
            add(from_fused=False, tokens=(3, 4), layout="heads_first")
            add(want=("dweight",), knobs=knobs(threads=96, rounds=1, ahead=True, resident=1))
            add(head_dim=256, half=128, dtype="float32", bias=norm == "layer_norm", tokens=(7,))
            add(tokens=(21, 2), knobs=knobs(threads=64, rounds=2, ahead=False, resident=1, streaming=True))
        elif form != "alone":
            add(want=("stats",))
        if form in ("alone", "split"):
            add(tokens=(21, 2), knobs=knobs(threads=64, rounds=2, ahead=True, resident=1))
            add(
                tokens=(3,),
                queries=16,
                keys=0 if form == "alone" else 8,
                head_dim=256,
                half=128,
                knobs=knobs(threads=64, rounds=1, ahead=False, resident=1),
            )
    return made


def _forms():
    return [
        ("alone", None),
        ("merge", None),
        ("split", None),
        *itertools.product(("split", "norm_bwd"), ("rms_norm", "layer_norm")),
    ]


def knobs(**values) -> tuple[tuple[str, object], ...]:
    return tuple(({"streaming": False} | values).items())


LARGE = [
    Case(form, tokens=(257, 3), queries=32, keys=0 if form == "alone" else 8, head_dim=128, half=64, norm=norm)
    for form, norm in _forms()
]
"""Heads of usual models, more tokens than one wave of a backward's blocks."""


def fuzzed(seed: int) -> Case:
    r = random.Random(seed)
    form, norm = r.choice(_forms())
    keys = 0 if form == "alone" else r.choice((1, 2, 3, 8))
    head = 2 * r.randint(2, 80) if r.random() < 0.5 else r.choice((32, 64, 80, 96, 128, 256))
    half = 0 if norm and r.random() < 0.1 else r.randint(1, head // 2) if r.random() < 0.4 else head // 2
    tokens = (r.randint(1, 400),) if r.random() < 0.5 else (r.randint(1, 90), r.randint(1, 4))
    dtype = r.choice(("bfloat16", "bfloat16", "float16", "float32"))
    return Case(
        form, tokens, (keys or 1) * r.choice((1, 2, 3, 4, 7)), keys, head, half, dtype, r.choice(("float32", dtype)),
        norm, r.choice((dtype, "float32", None)), norm == "layer_norm" and r.random() < 0.5, r.random() < 0.3,
        r.random() < 0.4, r.random() < 0.5, r.choice((None, None, "axis", "token", "same")), r.randrange(len(tokens)),
        r.choice(("plain", "strided", "offset", "heads_first")),
        from_fused=r.random() < 0.7,
    )  # fmt: skip


# ---- regions --------------------------------------------------------------------------------------------------------


def region(case: Case) -> Region:
    """The case's ops with symbolic tokens, as one region."""
    b, sides = GraphBuilder(), ("q", "k")[: 2 if case.keys else 1]
    lead = tuple(Dim(f"t{i}", max(n, 2)) for i, n in enumerate(case.tokens))
    heads = {"q": case.queries, "k": case.keys, "v": case.keys}

    def part(name: str, side: str, width: int = case.head_dim, dtype: str = case.dtype) -> str:
        return b.input(f"{side}_{name}", TensorSpec((*lead, heads[side], width), dtype))

    fused = TensorSpec((*lead, (case.queries + 2 * case.keys) * case.head_dim), case.dtype)
    shape = (Dim("p", max(64, *case.tokens)), case.half)
    tables = {n: b.input(n, TensorSpec(shape, case.table)) for n in ("cos", "sin")} if case.half else {}
    at = _positions(b, case, lead, sides) if case.half else {}

    def turned(x: str, side: str) -> str:
        if not case.half:
            return x
        return b.op(
            "rope",
            x=x,
            **tables,
            positions=at.get(side),
            interleaved=case.interleaved,
            inverse=case.inverse,
            seq_axis=case.axis,
        )

    def vectors(side: str, *names: str) -> dict[str, str]:
        given = [n for n in names if case.weight is not None and (n == "weight" or case.bias)]
        return {n: b.input(f"{side}_{n}", TensorSpec((case.head_dim,), case.weight)) for n in given}

    if case.form == "alone":
        return _whole(b, [turned(part("x", "q"), "q")])
    outputs: list[str] = []
    if case.form == "split":
        q, k, v = _qkv_split(b, case, b.input("qkv", fused))
        for side, x in zip(sides, (q, k), strict=True):
            stats = []
            if case.norm:
                kept = ("mean", "rstd") if case.norm == "layer_norm" else ("rstd",)
                want = ("y", *(kept if "stats" in case.want else ()))
                made = b.op(
                    case.norm, want=want, x=x, **vectors(side, "weight", "bias"), eps=EPS, zero_centered=case.zero
                )
                x, *stats = made if isinstance(made, tuple) else (made,)
            outputs += [turned(x, side), *stats]
        return _whole(b, outputs + ([v] if "v" in case.want else []))
    grads = {side: turned(part("grad", side), side) for side in sides}
    if case.norm:
        product = b.input("qkv", fused) if case.from_fused else None
        for side in sides:
            x = _qkv_split(b, case, product)["qk".index(side)] if product else part("x", side)
            sums = [
                p
                for p in ("dweight", "dbias")
                if p in case.want and case.weight is not None and (p == "dweight" or case.bias)
            ]
            stats = {n: part(n, side, 1, "float32") for n in ("rstd", *(["mean"] if case.norm == "layer_norm" else []))}
            made = b.op(f"{case.norm}_bwd", want=("dx", *sums), dy=grads[side], x=x, **vectors(side, "weight"), **stats,
                        zero_centered=case.zero, bias_dtype=case.weight if case.bias else None)  # fmt: skip
            grads[side], *rest = made if isinstance(made, tuple) else (made,)
            outputs += rest
    outputs.append(b.op("qkv_merge", q=grads["q"], k=grads["k"], v=part("grad", "v")))
    return _whole(b, outputs)


def _qkv_split(b: GraphBuilder, case: Case, x: str) -> tuple[str, str, str]:
    return b.op("qkv_split", x=x, groups=case.keys, queries_per_group=case.queries // case.keys, head_dim=case.head_dim)


def _positions(b: GraphBuilder, case: Case, lead: tuple, sides: tuple[str, ...]) -> dict[str, str]:
    if case.positions is None:
        return {}
    shape = lead if case.positions == "token" else (lead[case.axis],)
    if case.positions == "same":
        return dict.fromkeys(sides, b.input("positions", TensorSpec(shape, "int32")))
    return {
        s: b.input(f"{s}_positions", TensorSpec(shape, dtype))
        for s, dtype in zip(sides, ("int64", "int32"), strict=False)
    }


def _whole(b: GraphBuilder, outputs: list[str]) -> Region:
    graph = b.build(outputs)
    return region_of(graph, graph.nodes)


def offered(case: Case, made: Region, arch: Arch) -> Offer:
    engine = CuteRope()
    answer = engine.offer_with(made, arch, case.knobs) if case.knobs else engine.match(made, arch)
    assert isinstance(answer, Offer), (str(case), answer)
    return answer


# ---- inputs and runs ------------------------------------------------------------------------------------------------


def inputs(case: Case, made: Region, gen: torch.Generator) -> list[torch.Tensor]:
    sizes = {f"t{i}": n for i, n in enumerate(case.tokens)} | {"p": max(case.tokens) + 3}
    found = []
    for value in made.graph.inputs:
        spec = made.graph.specs[value]
        shape, dtype = [sizes[d.name] if isinstance(d, Dim) else d for d in spec.shape], getattr(torch, spec.dtype)
        if not spec.is_float:
            found.append(torch.randint(0, sizes["p"], shape, generator=gen, device=gen.device).to(dtype))
            continue
        x = torch.randn(shape, generator=gen, device=gen.device)
        if value in ("cos", "sin"):
            x = getattr(x, value)()
        elif value.endswith("rstd"):
            x = x.abs() + 0.5
        found.append(_laid_out(x.to(dtype), case.layout) if value.endswith(("qkv", "_x", "_grad")) else x.to(dtype))
    return found


def _laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "strided":  # a token's rows are a part of longer ones
        whole = x.new_full((*x.shape[:1], 2, *x.shape[1:]), float("nan"))
        whole[:, 0] = x
        return whole[:, 0]
    if layout == "offset":
        flat = x.new_full((x.numel() + 1,), float("nan"))
        flat[1:] = x.flatten()
        return flat[1:].view(x.shape)
    if layout == "heads_first" and x.dim() == 4:
        return x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    return x


def check(case: Case, made: Region, given: list[torch.Tensor], got) -> None:
    """Results against the references in float64, with those in the case's own dtype as the peer."""
    launch = reference_launch(made)
    exact = _tuple(launch(*[t.double() if t.is_floating_point() else t for t in given]))
    peer = _tuple(launch(*given))
    sums = (
        math.ceil(math.log2(max(2, math.prod(case.tokens) * case.queries))) * 2.0**-24
    )  # roundings of a float32 sum in another order
    for value, ours, true, theirs in zip(made.graph.outputs, _tuple(got), exact, peer, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, (
            value,
            ours.shape,
            ours.dtype,
            theirs.shape,
            theirs.dtype,
        )
        assert ours.is_contiguous(), value
        oracle.compare(ours, true, theirs, f"{case}: {value}", sums if ours.dtype is torch.float32 else 0.0)
        if value.endswith(".v"):
            oracle.equal(ours, theirs, f"{case}: values are copied")


def _tuple(result) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def run(case: Case, launch, device: str, seed: int = 0) -> None:
    """The launch's results are right, and bitwise equal when it runs again over dirty memory."""
    made = region(case)
    given = inputs(case, made, torch.Generator(device).manual_seed(seed))
    before = [t.clone() for t in given]
    got = _tuple(launch(*given))
    check(case, made, given, got)
    oracle.poison(*got)
    for a, b in zip(got, _tuple(launch(*given)), strict=True):
        oracle.equal(b, a, f"{case}: rerun")
    for a, b in zip(given, before, strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num()), f"{case}: an input was written to"


# ---- without a GPU --------------------------------------------------------------------------------------------------


def simulated(case: Case, arch: Arch = ARCHS["sm_90"]) -> None:
    """The device code, thread by thread."""
    from layerplan.kernels.rope.sm80 import norm_bwd, turn

    functions = {"compile_norm_bwd": norm_bwd.compile_norm_bwd, "compile_turn": turn.compile_turn}

    def compiled(kernel):
        return functions[kernel.target.rpartition(":")[2]](arch=arch.name, **dict(kernel.constants))

    made = region(case)
    few = dataclasses.replace(arch, sms=2)  # blocks of a backward go from tile to tile
    launch = CuteRope().build(BuildContext(made, few, offered(case, made, arch), compiled)).launch
    given = inputs(case, made, torch.Generator().manual_seed(0))
    check(case, made, given, launch(*given))


def contexts(arch: Arch) -> Iterator[tuple[str, BuildContext]]:
    """(engine, context) of all cases' kernels."""
    for case in (*cases(), *LARGE):
        made = region(case)
        yield "rope/cute", BuildContext(made, arch, offered(case, made, arch))


def reach() -> None:
    from layerplan.integration.plan_cache import memory

    from .quack_compile import labelling

    arch, reached = ARCHS["sm_90"], 0
    for case, layout in itertools.product(
        (LARGE[2], next(c for c in LARGE if c.form == "norm_bwd")), ("plain", "strided", "heads_first", "offset")
    ):
        case = dataclasses.replace(case, tokens=(5, 3), layout=layout)
        made = region(case)
        build = BuildContext(
            made, arch, offered(case, made, arch), lambda kernel: labelling(memory.function)(kernel, arch)
        )
        try:
            CuteRope().build(build).launch(*inputs(case, made, torch.Generator().manual_seed(0)))
        except RuntimeError as error:  # a mismatch is a TypeError or a ValueError
            assert "Cuda" in str(error), error
            reached += 1
    print("reached the driver:", reached)


def main() -> None:
    if sys.argv[1:] == ["--reach"]:
        return reach()
    own_cases.main(cases, simulated, contexts, "agree with the reference", str.startswith)


if __name__ == "__main__":
    main()
