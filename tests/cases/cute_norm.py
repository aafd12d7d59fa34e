"""Cases of norm/cute: an op with its options, a shape and knobs; empty knobs are the engine's own for that arch.

``python -m tests.cases.cute_norm [TEXT]`` builds and runs the small ones (those that hold TEXT) thread by thread on a
CPU (``tests/cases/simt.py``), against the op table's references in float64. Rows, offsets and widths are such that
every path of the device code is taken: partial chunks, rows without a thread, several rows and tiles of a block, stages
and none. The GPU's tests run these and larger ones; ``--compile ARCH [WORKERS]`` compiles all of them ahead."""

from __future__ import annotations

import dataclasses
import importlib
import random
from collections.abc import Iterator

import torch

from layerplan.integration.engines.arch import ARCHS, Arch
from layerplan.integration.engines.contract import BuildContext, Kernel, Offer
from layerplan.integration.graph.ir import Dim, GraphBuilder, TensorSpec
from layerplan.integration.graph.ops.table import op_table
from layerplan.integration.planner.cover import region_of
from layerplan.kernels.norm.cute import CuteNorm

from .. import oracle
from . import own_cases
from .sums import FEW, worst_order


@dataclasses.dataclass(frozen=True)
class Case:
    """``given``: the optional input ports that there are; ``want``: the outputs; ``gap``: elements between two rows of
    x and dy, ``offset``: of their first element in its storage."""

    op: str
    rows: int
    width: int
    dtype: str = "bfloat16"
    other: str = "bfloat16"  # of weight and bias
    given: tuple[str, ...] = ("weight",)
    want: tuple[str, ...] = ("y", "rstd")
    zero: bool = False
    gap: int = 0
    offset: int = 0
    knobs: tuple[tuple[str, object], ...] = ()
    arch: str = "sm_90"
    lead: tuple[int, ...] = ()  # dims before the last, where there are more than one


def knobs(**values) -> tuple[tuple[str, object], ...]:
    return tuple(values.items())


_ALL = ("weight", "bias", "residual")
_BOTH = ("dx", "dweight", "dbias")
_STATS = ("y", "mean", "rstd")
FORWARD = (
    Case("rms_norm", 5, 33),
    Case("rms_norm", 3, 1, want=("y",)),
    Case("layer_norm", 3, 1, want=_STATS, dtype="float32", other="float32"),
    Case("rms_norm", 9, 64, given=(), want=("y",)),
    Case("layer_norm", 5, 24, given=_ALL, want=("y", "residual_out", "mean", "rstd"), zero=True),
    Case("rms_norm", 2, 2048, knobs=knobs(threads=64, rows=2)),
    Case("layer_norm", 3, 768, given=_ALL, want=("y", "residual_out"), other="float32"),
    Case("rms_norm", 7, 520, gap=8, given=("weight", "residual"), want=("y", "residual_out", "rstd"),
         knobs=knobs(threads=32, rows=4, stages=2)),
    Case("rms_norm", 19, 264, knobs=knobs(threads=32, rows=2, stages=3, hold_weight=True)),
    Case("layer_norm", 7, 520, want=_STATS, knobs=knobs(threads=64, rows=1, stages=3, hold_weight=True,
         streaming=True)),
    Case("layer_norm", 9, 776, given=_ALL, want=("y", "residual_out"), knobs=knobs(threads=96, rows=2, stages=2)),
    Case("rms_norm", 4, 36, dtype="float32", other="bfloat16", lead=(2, 2)),
    Case("layer_norm", 3, 50, dtype="float16", other="float16", offset=1),
    Case("rms_norm", 3, 64, given=("weight", "residual"), want=("residual_out",)),
    Case("rms_norm", 0, 64),
    Case("rms_norm", 1, 769),
)  # fmt: skip
BACKWARD = (
    Case("rms_norm_bwd", 5, 33, want=("dx", "dweight")),
    Case("layer_norm_bwd", 3, 1, want=_BOTH, dtype="float32", other="float32"),
    Case("rms_norm_bwd", 9, 64, given=(), want=("dx",)),
    Case("rms_norm_bwd", 40, 64, want=("dx", "dweight"), arch="sm_80"),
    Case("layer_norm_bwd", 21, 24, given=("weight", "dresidual"), want=_BOTH, zero=True, knobs=knobs(threads=4, rows=8,
         stages=3)),
    Case("rms_norm_bwd", 5, 520, given=("weight", "dresidual"), want=("dx", "dweight"), gap=8, knobs=knobs(threads=32,
         rows=2, stages=2, hold=True)),
    Case("layer_norm_bwd", 7, 520, want=_BOTH, knobs=knobs(threads=64, rows=2, stages=3, hold_weight=True,
         overlap=True)),
    Case("layer_norm_bwd", 4, 776, other="float32", given=("weight", "dresidual"), want=_BOTH, knobs=knobs(threads=96,
         rows=1, stages=2, shared_sums=True)),
    Case("rms_norm_bwd", 3, 300, want=("dx", "dweight"), zero=True, knobs=knobs(threads=64, rows=1, shared_sums=True)),
    Case("rms_norm_bwd", 6, 36, dtype="float32", other="bfloat16", want=("dweight",), lead=(2, 3)),
    Case("layer_norm_bwd", 3, 50, dtype="float16", other="float16", offset=1, want=("dx", "dbias")),
    Case("rms_norm_bwd", 19, 136, want=("dx", "dweight"), knobs=knobs(threads=32, rows=1, stages=3, hold=True)),
    Case("layer_norm_bwd", 23, 72, want=_BOTH, knobs=knobs(threads=8, rows=4, stages=2)),
    Case("layer_norm_bwd", 5, 40, given=(), want=("dx", "dbias")), Case("rms_norm_bwd", 0, 64, want=("dx", "dweight")),
)  # fmt: skip
LARGE = (
    *(Case(op, rows, width, dtype, other, want=("y", "rstd")) for op in ("rms_norm", "layer_norm") for rows, width,
         dtype, other in (
        (1031, 4096, "bfloat16", "bfloat16"), (257, 4095, "bfloat16", "bfloat16"), (257, 4097, "float16", "float32"),
        (301, 7168, "bfloat16", "float32"), (2049, 2048, "bfloat16", "bfloat16"), (133, 12288, "bfloat16", "bfloat16"),
        (67, 32768, "float32", "float32"), (67, 32768, "bfloat16", "bfloat16"), (3001, 128, "float16", "float16"),
        (1031, 1, "float32", "float32"), (40000, 3, "bfloat16", "bfloat16"), (129, 20000, "float16", "float16"),
    )),
    *(Case(op, 517, 4096, given=_ALL, want=("y", "residual_out", "rstd"), zero=True) for op in ("rms_norm",
         "layer_norm")),
    Case("rms_norm", 4001, 4096, want=("y", "rstd"), knobs=knobs(threads=128, rows=2, stages=3, blocks=4,
         hold_weight=True)),
    Case("layer_norm", 2001, 4096, want=("y", "rstd"), knobs=knobs(threads=128, rows=2, stages=2, blocks=3,
         streaming=True)),
    *(Case(op, rows, width, dtype, other, want=("dx", "dweight")) for op in ("rms_norm_bwd",
         "layer_norm_bwd") for rows, width, dtype, other in (
        (1031, 4096, "bfloat16", "bfloat16"), (257, 4095, "bfloat16", "bfloat16"), (2049, 2048, "bfloat16", "float32"),
        (301, 7168, "bfloat16", "bfloat16"), (301, 12288, "bfloat16", "bfloat16"), (67, 32768, "float32", "float32"),
        (267, 16384, "bfloat16", "bfloat16"), (3001, 128, "float16", "float16"), (1031, 1, "float32", "float32"),
        (40000, 3, "bfloat16", "bfloat16"),
    )),
    *(Case(op, 1517, 4096, given=("weight", "dresidual"), want=("dx", "dweight"), zero=True) for op in ("rms_norm_bwd",
         "layer_norm_bwd")),
    Case("layer_norm_bwd", 1001, 4096, want=_BOTH),
    Case("layer_norm_bwd", 301, 32768, want=_BOTH),
    Case("layer_norm_bwd", 1001, 769, want=_BOTH),
    Case("rms_norm_bwd", 1517, 4096, want=("dx",)), Case("rms_norm_bwd", 1517, 4096, want=("dweight",)),
)  # fmt: skip
_SMS = 2  # so that resident blocks have several tiles each


def region(case: Case):
    b = GraphBuilder()
    lead = case.lead or (Dim("t", 64),)
    matrix, row = TensorSpec((*lead, case.width), case.dtype), TensorSpec((*lead, 1), "float32")
    vector = TensorSpec((case.width,), case.other)
    backward = case.op.endswith("_bwd")
    specs = {"dy": matrix, "x": matrix} if backward else {"x": matrix}
    specs |= {"weight": vector} if "weight" in case.given else {}
    if backward:
        specs |= {"mean": row} if case.op.startswith("layer") else {}
        specs |= {"rstd": row} | ({"dresidual": matrix} if "dresidual" in case.given else {})
        extra = {"bias_dtype": case.other if "dbias" in case.want else None}
    else:
        specs |= {p: s for p, s in (("bias", vector), ("residual", matrix)) if p in case.given}
        extra = {"eps": 1e-5}
    inputs = {p: b.input(p, s) for p, s in specs.items()}
    made = b.op(case.op, want=list(case.want), zero_centered=case.zero, **extra, **inputs)
    graph = b.build(list(made) if isinstance(made, tuple) else [made])
    return region_of(graph, graph.nodes)


def fuzzed(seed: int) -> Case:
    """A random case: op, ports, dtypes, layout, rows and width; with knobs of the engine's own."""
    pick = random.Random(seed)
    op = pick.choice(("rms_norm", "layer_norm")) + pick.choice(("", "_bwd"))
    backward, layer = op.endswith("_bwd"), op.startswith("layer")
    given = (
        [p for p in ("weight", "dresidual") if pick.random() < 0.7]
        if backward
        else [p for p in _ALL if pick.random() < 0.6]
    )
    want = ["dx", *(["dweight"] if "weight" in given else []), *(["dbias"] if pick.random() < 0.5 else [])]
    if not backward:
        want = ["y", *(["residual_out"] if "residual" in given else []), *(["mean"] if layer else []), "rstd"]
    width = pick.choice((pick.randint(1, 300), 8 * pick.randint(1, 2000), pick.randint(1, 9000)))
    rows = pick.choice((0, 1, 2, pick.randint(3, 700), pick.randint(3, 3000)))
    dtype, other = (pick.choice(("float32", "bfloat16", "float16")) for _ in range(2))
    return Case(
        op,
        rows,
        width,
        dtype,
        other,
        tuple(given),
        tuple(want),
        pick.random() < 0.3,
        pick.choice((0, 0, 1, 8)),
        pick.choice((0, 0, 1, 8)),
    )


def inputs(case: Case, made, seed: int) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    lead = case.lead or (case.rows,)
    values = {}
    for port, _ in made.node.inputs:
        spec = made.spec(port)
        shape = [*lead, case.width] if len(spec.shape) > 1 else [case.width]
        values[port] = (torch.randn(shape, generator=gen, dtype=torch.float64) + 0.3).to(getattr(torch, spec.dtype))
    if "rstd" in values:
        x = values["x"].double()
        mean = x.mean(-1, keepdim=True) if "mean" in values else torch.zeros(1)
        values |= {"mean": mean.float()} if "mean" in values else {}
        values["rstd"] = ((x - mean).square().mean(-1, keepdim=True) + 1e-5).rsqrt().float()
    for port in ("x", "dy"):
        if port in values and (case.gap or case.offset):
            wide = torch.full(
                (case.rows * (case.width + case.gap) + case.offset + case.gap,), float("nan"), dtype=values[port].dtype
            )
            view = wide[case.offset :].as_strided((case.rows, case.width), (case.width + case.gap, 1), case.offset)
            values[port] = view.copy_(values[port])
    return values


def compiled(kernel: Kernel, arch: str = "sm_90"):
    module, _, name = kernel.target.partition(":")
    return getattr(importlib.import_module(module), name)(arch=arch, **dict(kernel.constants))


def offered(case: Case, made, arch: Arch) -> Offer:
    answer = CuteNorm().offer_with(made, arch, case.knobs) if case.knobs else CuteNorm().match(made, arch)
    assert isinstance(answer, Offer), (case, answer)
    return answer


def simulated(case: Case) -> None:
    """Builds and runs a case with the stand-in's compiler, on an arch of few multiprocessors."""
    made, arch = region(case), ARCHS[case.arch]
    offer = offered(case, made, arch)
    run(case, CuteNorm().build(BuildContext(made, dataclasses.replace(arch, sms=_SMS), offer, compiled)).launch)


def run(case: Case, launch, device: str = "cpu", seed: int = 0) -> None:
    """Launches a case and holds it to the oracle's rule, with the reference in the case's dtype as PyTorch's
    computation; launches it once more, and the results are the same bit for bit."""
    made = region(case)
    given = {p: placed(t, device) for p, t in inputs(case, made, seed).items()}
    call = [given[p] for p, _ in made.node.inputs]
    for t in given.values():
        oracle.poison(t, t.float())
    got = launch(*call)
    reference, attrs = op_table()[case.op].reference, made.node.attributes
    peer = reference(given, attrs, case.want)
    truth = reference({p: t.double() for p, t in given.items()}, attrs, case.want)
    if device != "cpu":
        again = launch(*call)
        for a, b in zip(*((g if isinstance(g, tuple) else (g,)) for g in (got, again)), strict=True):
            oracle.equal(a, b, f"{case}: another run")
    for port, value in zip(made.wanted, got if isinstance(got, tuple) else (got,), strict=True):
        assert value.dtype == peer[port].dtype, (case, port, value.dtype)
        exact = truth[port].double()
        assert value.shape == peer[port].shape, (case, port, value.shape)
        if port == "residual_out":  # rounded once, so bit for bit
            oracle.equal(value, peer[port], f"{case}: {port}")
            continue
        theirs = peer[port]
        exact = _rounded_sum(case, given, truth, port, exact)
        if port in ("mean", "dweight", "dbias") and 0 < theirs.numel() < FEW:
            theirs = _worst_order(case, given, port, exact, theirs)
        oracle.compare(value, exact, theirs, f"{case}: {port}")


def _worst_order(case: Case, given, port: str, exact: torch.Tensor, peer: torch.Tensor) -> torch.Tensor:
    """What ``sums.worst_order`` says of a row's means or a vector's gradients."""
    x = given["x"].float().reshape(-1, case.width).cpu()
    if port == "mean":
        residual = given["residual"].reshape(-1, case.width).cpu() if "residual" in given else None
        x = x if residual is None else (x + residual.float()).to(residual.dtype).float()
        return worst_order(x.t()[:, :, None], exact, peer, case.width)
    dy = given["dy"].float().reshape(-1, case.width).cpu()
    mean, rstd = (given[p].reshape(-1, 1).cpu() if p in given else 0.0 for p in ("mean", "rstd"))
    return worst_order(dy if port == "dbias" else dy * ((x - mean) * rstd), exact, peer)


def placed(t: torch.Tensor, device: str) -> torch.Tensor:
    """The tensor on a device, with its strides and its place in its storage; what lies around it is NaN."""
    if device == "cpu" or (t.is_contiguous() and not t.storage_offset()):
        return t.to(device)
    extent = (
        t.storage_offset() + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1 if t.numel() else 1
    )
    around = torch.full((extent,), float("nan"), dtype=t.dtype, device=device)
    return around.as_strided(t.shape, t.stride(), t.storage_offset()).copy_(t)


def _rounded_sum(case: Case, given, truth, port: str, exact: torch.Tensor) -> torch.Tensor:
    """With a residual, what follows is of the rounded sum: the float64 reference is taken of that."""
    if "residual" not in given:
        return exact
    h = (given["x"].double() + given["residual"].double()).to(given["x"].dtype).double()
    rest = {p: t.double() for p, t in given.items() if p not in ("x", "residual")}
    attrs = {"eps": 1e-5, "zero_centered": case.zero}
    return op_table()[case.op].reference({"x": h, **rest}, attrs, case.want)[port]


def cases() -> Iterator[Case]:
    yield from FORWARD
    yield from BACKWARD


def contexts(arch: Arch) -> Iterator[tuple[str, BuildContext]]:
    """(engine, context) of all cases' kernels."""
    for case in (*cases(), *LARGE):
        made = region(case)
        yield "norm/cute", BuildContext(made, arch, offered(dataclasses.replace(case, arch=arch.name), made, arch))


if __name__ == "__main__":
    own_cases.main(cases, simulated, contexts, "agree with the reference")
