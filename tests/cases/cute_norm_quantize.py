"""Cases of norm_quantize/cute: a norm with the quantize that reads it.

``python -m tests.cases.cute_norm_quantize [TEXT]`` builds and runs the small ones (those that hold TEXT) thread by
thread on a CPU (``tests/cases/simt.py``). What the quantize gives is compared bit for bit with its reference on the y
that norm/cute makes of the same inputs with the same knobs; statistics and residual sum with those of norm/cute, bit
for bit too."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from layerplan.integration.engines.arch import ARCHS, Arch
from layerplan.integration.engines.contract import BuildContext, Offer
from layerplan.integration.graph.ir import Dim, GraphBuilder, TensorSpec
from layerplan.integration.graph.ops.table import op_table
from layerplan.integration.planner.cover import region_of
from layerplan.kernels.norm.cute import CuteNorm
from layerplan.kernels.norm.cute_quantize import CuteNormQuantize

from . import own_cases
from .cute_norm import compiled, knobs

BLOCK, POWER, MX, SWIZZLED, TENSOR = (
    {"block": (1, 128)}, {"block": (1, 128), "power_of_two": True}, {"block": (1, 32)}, {"block": (1, 32),
    "layout": "swizzled"}, {"block": (0, 0)},
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """``given``: weight, bias, residual; ``extra``: outputs of the norm that others read; ``quantize``: attributes;
    ``values``: what x holds."""

    op: str
    rows: int
    width: int
    quantize: dict[str, object]
    given: tuple[str, ...] = ("weight",)
    extra: tuple[str, ...] = ("rstd",)
    transposed: bool = False
    amax: bool = False
    dtype: str = "bfloat16"
    other: str = "bfloat16"
    fp8: str = "float8_e4m3fn"
    knobs: tuple[tuple[str, object], ...] = ()
    arch: str = "sm_90"
    values: str = "random"  # or "wild": with rows of zeros, NaN, infinities and tiny numbers


_ALL, _SUM = ("weight", "bias", "residual"), ("residual_out", "rstd")
SMALL = (
    Case("rms_norm", 3, 136, BLOCK, given=("weight", "residual"), extra=_SUM, knobs=knobs(threads=32)),
    Case("rms_norm", 3, 136, BLOCK, transposed=True, given=("weight", "residual"), extra=_SUM, knobs=knobs(threads=32)),
    Case("layer_norm", 5, 264, POWER, given=_ALL, extra=("y", "residual_out"), knobs=knobs(threads=32, rows=2),
         values="wild"),
    Case("layer_norm", 2, 40, MX, given=("bias",), extra=("mean",), dtype="float32", other="float32",
         knobs=knobs(threads=32)),
    Case("rms_norm", 2, 296, SWIZZLED, fp8="float8_e5m2", knobs=knobs(threads=32, stages=2), values="wild"),
    Case("layer_norm", 37, 72, SWIZZLED, transposed=True, given=_ALL, extra=(), knobs=knobs(threads=32), values="wild"),
    Case("rms_norm", 5, 136, TENSOR, amax=True, knobs=knobs(threads=32, rows=2), other="float32"),
    Case("rms_norm", 3, 48, TENSOR, amax=True, transposed=True, dtype="float16", other="float16",
         knobs=knobs(threads=32)),
    Case("rms_norm", 9, 64, POWER, transposed=True, dtype="float32", given=("weight", "bias"), knobs=knobs(threads=32)),
    Case("rms_norm", 130, 40, BLOCK, transposed=True, given=("weight", "residual"), extra=_SUM,
         knobs=knobs(threads=16, rows=16, together=True)),
    Case("layer_norm", 20, 72, SWIZZLED, transposed=True, given=_ALL, extra=("residual_out",),
         knobs=knobs(threads=32, rows=8, together=True), values="wild"),
    Case("rms_norm", 3, 136, MX, arch="sm_80", knobs=knobs(threads=32), values="wild"), Case("rms_norm", 0, 64, BLOCK),
    Case("layer_norm", 5, 136, POWER, transposed=True, given=_ALL, extra=(), knobs=knobs(threads=32, apart=True)),
    Case("rms_norm", 131, 40, BLOCK, transposed=True, given=("weight", "residual"), extra=_SUM,
         knobs=knobs(threads=16, rows=16, together=True, apart=True)),
    Case("rms_norm", 5, 40, BLOCK, transposed=True, arch="sm_80", knobs=knobs(threads=32, apart=True)),
)  # fmt: skip
LARGE = (
    *(Case(op, rows, width, q, given=("weight", "residual"), extra=_SUM, transposed=t, values=v) for op in ("rms_norm",
         "layer_norm")
      for rows, width, q, t, v in (
          (1031, 7168, BLOCK, False, "random"), (1031, 7168, BLOCK, True, "random"), (515, 4096, POWER, True, "wild"),
          (300, 4104, SWIZZLED, False, "wild"), (300, 4104, SWIZZLED, True, "wild"), (129, 2048, MX, True, "random"),
      )),
    Case("rms_norm", 1031, 4096, TENSOR, amax=True), Case("rms_norm", 1031, 4096, TENSOR, amax=True, transposed=True),
    *(Case("rms_norm", rows, width, q, given=given, extra=extra, transposed=True,
           knobs=knobs(threads=threads, rows=256 // threads, together=True))
      for rows, width, threads in ((4099, 4096, 128), (1024, 7168, 256), (128, 2048, 64), (1, 1024, 32))
      for q, given, extra in ((BLOCK, ("weight", "residual"), _SUM), (SWIZZLED, ("weight",), ("rstd",)))),
    Case("rms_norm", 300, 1024, TENSOR, amax=True, transposed=True, knobs=knobs(threads=64, rows=4, together=True)),
    *(Case("rms_norm", rows, width, BLOCK, given=("weight", "residual"), extra=_SUM, transposed=True, knobs=knobs(apart=True, **k))
      for rows, width in ((1031, 4096), (4230, 1024)) for k in ({"threads": 128}, {"threads": 128, "rows": 2, "together": True})),
    Case("rms_norm", 67, 32768, BLOCK, dtype="float32", other="float32"),
    Case("rms_norm", 2001, 7168, BLOCK, fp8="float8_e5m2", values="wild"),
    Case("layer_norm", 2001, 256, MX, given=_ALL, extra=("y", "mean", "residual_out", "rstd")),
    Case("rms_norm", 2001, 4096, BLOCK, knobs=knobs(threads=128, rows=2, stages=2, blocks=4, hold_weight=True)),
)  # fmt: skip


def regions(case: Case):
    """(the region of both nodes, that of the norm alone with y and all else that it has)."""
    lead, made = (Dim("t", 64),), []
    for both in (True, False):
        b = GraphBuilder()
        matrix, vector = TensorSpec((*lead, case.width), case.dtype), TensorSpec((case.width,), case.other)
        inputs = {"x": b.input("x", matrix)} | {
            p: b.input(p, matrix if p == "residual" else vector) for p in case.given
        }
        stats = ["mean", "rstd"] if case.op == "layer_norm" else ["rstd"]
        want = ["y", *(["residual_out"] if "residual" in case.given else []), *stats]
        values = dict(zip(want, b.op(case.op, want=want, eps=1e-5, **inputs), strict=True))
        outputs = list(values.values())
        if both:
            ports = ["data", *(["scale_inv"]), *(["data_t"] if case.transposed else [])]
            ports += ["scale_inv_t"] if case.transposed and case.quantize["block"] != (0, 0) else []
            ports += ["amax"] if case.amax else []
            scale = {"scale": b.input("scale", TensorSpec((1,), "float32"))} if case.quantize["block"] == (0, 0) else {}
            got = b.op("quantize", want=ports, x=values["y"], dtype=case.fp8, **case.quantize, **scale)
            outputs = [*got, *(values[p] for p in case.extra)]
        graph = b.build(outputs)
        made.append(region_of(graph, graph.nodes))
    return made


def inputs(case: Case, region, device: str, seed: int = 0) -> dict[str, torch.Tensor]:
    gen, values = torch.Generator().manual_seed(seed), {}
    for name in region.graph.inputs:
        spec = region.graph.specs[name]
        shape = [case.rows if isinstance(n, Dim) else n for n in spec.shape]
        values[name] = (torch.randn(shape, generator=gen, dtype=torch.float64) + 0.3).to(getattr(torch, spec.dtype))
    if "scale" in values:
        values["scale"].fill_(37.0)
    if case.values == "wild" and case.rows > 1:
        x = values["x"]
        x[0], x[-1] = 0.0, x[-1] * 1e-30
        if case.rows > 4:
            x[1, 0], x[2, -1], x[3, case.width // 2] = float("nan"), float("inf"), 1e30
    return {n: t.to(device) for n, t in values.items()}


def offered(case: Case, engine, region, arch: Arch) -> Offer:
    answer = engine.offer_with(region, arch, case.knobs) if case.knobs else engine.match(region, arch)
    assert isinstance(answer, Offer), (case, answer)
    return answer


def plain_knobs(offer: Offer) -> tuple[tuple[str, object], ...]:
    """What norm/cute has of an offer's knobs."""
    return tuple((name, value) for name, value in offer.knobs if name not in ("together", "apart"))


def run(case: Case, build, arch: Arch, device: str = "cpu") -> None:
    """``build(engine, region, offer)`` gives a launch."""
    both, norm = regions(case)
    given = inputs(case, both, device)
    offer = offered(case, CuteNormQuantize(), both, arch)
    launch = build(CuteNormQuantize(), both, offer)
    plain = build(CuteNorm(), norm, CuteNorm().offer_with(norm, arch, plain_knobs(offer)))
    got = launch(*(given[v] for v in both.graph.inputs))
    got = dict(zip(both.graph.outputs, got if isinstance(got, tuple) else (got,), strict=True))
    expected = dict(zip(norm.wanted, plain(*(given[v] for v in norm.graph.inputs)), strict=True))
    node, quantize = both.nodes
    wanted = [p for p, v in quantize.outputs if v in both.graph.outputs]
    scale = {"scale": given["scale"]} if "scale" in given else {}
    fp8 = op_table()["quantize"].reference({"x": expected["y"], **scale}, quantize.attributes, wanted)
    for n, values in ((node, expected), (quantize, fp8)):
        for port, value in n.outputs:
            if value in both.graph.outputs:
                same(got[value], values[port], f"{case}: {port}")


def same(a: torch.Tensor, b: torch.Tensor, what: str) -> None:
    """Bit for bit, any NaN for a NaN of a statistic."""
    assert a.shape == b.shape, f"{what}: shape {list(a.shape)}, expected {list(b.shape)}"
    assert a.dtype == b.dtype, f"{what}: {a.dtype}, expected {b.dtype}"
    if a.dtype.itemsize > 1:
        a, b = a.nan_to_num(nan=-12345.0), b.nan_to_num(nan=-12345.0)
    wrong = a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)
    assert not wrong.any(), (
        f"{what}: {int(wrong.sum())} of {wrong.numel()} bytes differ, the first at {wrong.view(-1).nonzero()[0].item()}"
    )


def simulated(case: Case) -> None:
    arch = ARCHS[case.arch]
    few = dataclasses.replace(arch, sms=2)

    def build(engine, region, offer):
        return guarded(engine.build(BuildContext(region, few, offer, lambda kernel: compiled(kernel, case.arch))).launch)

    with own_cases.guarded_memory() as guarded, own_cases.poisoned_results():
        run(case, build, arch)


def contexts(arch: Arch) -> Iterator[tuple[str, BuildContext]]:
    """(engine, context) of all cases' kernels."""
    for case in (*SMALL, *LARGE):
        both, norm = regions(case)
        offer = offered(case, CuteNormQuantize(), both, arch)
        yield "norm_quantize/cute", BuildContext(both, arch, offer)
        yield "norm/cute", BuildContext(norm, arch, CuteNorm().offer_with(norm, arch, plain_knobs(offer)))


if __name__ == "__main__":
    own_cases.main(lambda: SMALL, simulated, contexts, "agree with the reference")
