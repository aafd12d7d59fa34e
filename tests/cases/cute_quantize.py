"""Cases of quantize/cute, activation/cute and swiglu_quantize/cute: options, a shape and knobs; empty knobs are the
engine's own.

What quantize gives is compared bit for bit with its reference, on the y that activation/cute makes of the same inputs
where a swiglu comes first. ``python -m tests.cases.cute_quantize [TEXT]`` builds and runs the small ones (those that
hold TEXT) thread by thread on a CPU (``tests/cases/simt.py``); ``--compile ARCH [WORKERS]`` compiles all of them
ahead."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Iterator

import torch

from layerplan.integration.engines.arch import ARCHS, Arch
from layerplan.integration.engines.contract import BuildContext, Offer, Region
from layerplan.integration.engines.manifest import BY_ID
from layerplan.integration.graph.ir import Dim, GraphBuilder, TensorSpec
from layerplan.integration.graph.ops.table import op_table
from layerplan.integration.planner.cover import region_of
from layerplan.kernels.common.quantized import workspace_bytes

from .. import oracle
from . import own_cases
from .cute_norm import compiled, placed
from .quantized import hard

BLOCK, POWER, MX, SWIZZLED, TENSOR = (
    {"block": (1, 128)},
    {"block": (1, 128), "power_of_two": True},
    {"block": (1, 32)},
    {"block": (1, 32), "layout": "swizzled"},
    {"block": (0, 0)},
)


@dataclasses.dataclass(frozen=True)
class Case:
    """``gate``: x [rows, 2 * width] goes through a swiglu first, with ``clamp`` and row weights of dtype ``weight``.
    ``gap``: elements between two rows of x, ``offset``: of its first element in its storage. ``clean``: ordinary
    numbers alone."""

    rows: int
    width: int
    quantize: dict[str, object]
    transposed: bool = True
    amax: bool = False
    dtype: str = "bfloat16"
    fp8: str = "float8_e4m3fn"
    gate: bool = False
    clamp: float | None = None
    weight: str | None = None
    gap: int = 0
    offset: int = 0
    knobs: tuple[tuple[str, object], ...] = ()
    arch: str = "sm_90"
    clean: bool = False

    @property
    def engine(self) -> str:
        return "swiglu_quantize/cute" if self.gate else "quantize/cute"


def knobs(**values) -> tuple[tuple[str, object], ...]:
    return tuple(values.items())


def apart(**values) -> tuple[tuple[str, object], ...]:
    """The knobs of a quantize both ways in blocks of 1 x 128, as they are where scales go through a workspace."""
    return knobs(**{"down": False, "streaming": False, "apart": True} | values)


SMALL = (
    Case(5, 136, BLOCK, transposed=False),
    Case(9, 133, POWER, fp8="float8_e5m2"),
    Case(130, 136, BLOCK),
    Case(16, 264, POWER, knobs=apart(down=True, streaming=True, apart=False)),
    Case(40, 72, MX),
    Case(35, 37, MX, transposed=False),
    Case(36, 200, SWIZZLED, knobs=knobs(down=False, streaming=True)),
    Case(3, 40, SWIZZLED, transposed=False),
    Case(16, 48, MX),
    Case(100, 104, MX),
    Case(9, 48, TENSOR, amax=True),
    Case(5, 37, TENSOR, amax=True, fp8="float8_e5m2"),
    Case(7, 40, BLOCK, dtype="float32"),
    Case(7, 40, MX, dtype="float16"),
    Case(6, 40, BLOCK, arch="sm_80"),
    Case(6, 40, MX, fp8="float8_e5m2", arch="sm_80"),
    Case(5, 48, BLOCK, gap=8),
    Case(5, 48, BLOCK, gap=3, offset=1),
    Case(0, 64, BLOCK),
    Case(9, 40, BLOCK, gate=True),
    Case(5, 37, POWER, gate=True, clamp=1.0, weight="float32"),
    Case(8, 72, SWIZZLED, gate=True, weight="bfloat16", knobs=knobs(down=True, streaming=True)),
    Case(5, 40, TENSOR, gate=True, amax=True, transposed=False),
    Case(131, 133, BLOCK, knobs=apart()),
    Case(6, 136, POWER, dtype="float32", fp8="float8_e5m2", knobs=apart(down=True)),
    Case(7, 37, BLOCK, gate=True, weight="float32", knobs=apart(streaming=True)),
    Case(6, 48, BLOCK, arch="sm_80", knobs=apart()),
    Case(0, 72, BLOCK, knobs=apart()),
)
LARGE = (
    *(
        Case(rows, width, attrs, transposed)
        for attrs in (BLOCK, POWER, MX, SWIZZLED, TENSOR)
        for transposed in (False, True)
        for rows, width in ((1031, 4096), (1024, 7168), (257, 4095))
    ),
    *(
        Case(1032, 1544, attrs, gate=True, transposed=transposed)
        for attrs in (BLOCK, POWER, MX, SWIZZLED, TENSOR)
        for transposed in (False, True)
    ),
    *(
        Case(1032, 1544, attrs, knobs=make(down=down, streaming=streaming))
        for attrs, make in ((BLOCK, functools.partial(apart, apart=False)), (BLOCK, apart), (SWIZZLED, knobs))
        for down in (False, True)
        for streaming in (False, True)
    ),
    Case(520, 2056, BLOCK, gate=True, knobs=apart(down=True, streaming=True, apart=False)),
    *(Case(rows, 400, attrs) for attrs in (BLOCK, MX, TENSOR) for rows in (144, 248, 251)),
    *(
        Case(777, 1032, attrs, dtype=dtype, fp8="float8_e5m2")
        for attrs in (POWER, MX)
        for dtype in ("float32", "float16")
    ),
    Case(4096, 136, TENSOR, amax=True),
    Case(4096, 136, TENSOR, amax=True, clean=True),
    Case(2048, 512, BLOCK, gap=64),
    Case(300, 2048, MX, gap=5, offset=3),
    Case(100000, 8, BLOCK),
    Case(3, 100000, BLOCK),
    Case(1, 1, BLOCK),
    Case(1, 1, SWIZZLED),
    *(
        Case(rows, width, BLOCK, knobs=apart())
        for rows, width in ((1031, 4096), (1024, 7168), (257, 4095), (4230, 4232), (100000, 8), (3, 100000), (1, 1))
    ),
    Case(1032, 1544, POWER, dtype="float16", knobs=apart(down=True, streaming=True)),
    *(Case(1032, 1544, BLOCK, gate=True, knobs=apart(down=down)) for down in (False, True)),
    Case(128, 128, SWIZZLED),
    Case(129, 129, SWIZZLED),
)


def fuzzed(seed: int) -> Case:
    """A random case."""
    pick = random.Random(seed)
    attrs, transposed = pick.choice((BLOCK, POWER, MX, SWIZZLED, TENSOR)), pick.random() < 0.7
    width = pick.choice((pick.randint(1, 300), 8 * pick.randint(1, 600), 128 * pick.randint(1, 40)))
    rows = pick.choice((0, 1, pick.randint(2, 300), 8 * pick.randint(1, 200), 128 * pick.randint(1, 12)))
    gate = pick.random() < 0.4
    aside = attrs in (BLOCK, POWER) and transposed and pick.random() < 0.5
    return Case(
        rows,
        width,
        attrs,
        transposed,
        attrs is TENSOR and pick.random() < 0.5,
        pick.choice(("bfloat16", "bfloat16", "float16", "float32")),
        pick.choice(("float8_e4m3fn", "float8_e5m2")),
        gate,
        pick.choice((None, 1.5)) if gate else None,
        pick.choice((None, "float32", "bfloat16")) if gate else None,
        pick.choice((0, 0, 1, 8)),
        pick.choice((0, 0, 1, 8)),
        apart(down=pick.random() < 0.5, streaming=pick.random() < 0.5) if aside else (),
    )


def region(case: Case) -> Region:
    b, t = GraphBuilder(), Dim("t", 64)
    x = b.input("x", TensorSpec((t, case.width * (1 + case.gate)), case.dtype))
    if case.gate:
        weight = b.input("row_weight", TensorSpec((t,), case.weight)) if case.weight else None
        x = b.op("swiglu", x=x, clamp=case.clamp, row_weight=weight)
    whole = case.quantize is TENSOR
    scale = b.input("scale", TensorSpec((1,), "float32")) if whole else None
    want = [
        "data",
        "scale_inv",
        *(["data_t"] if case.transposed else []),
        *(["scale_inv_t"] if case.transposed and not whole else []),
        *(["amax"] if case.amax else []),
    ]
    made = b.op("quantize", want=want, x=x, scale=scale, dtype=case.fp8, **case.quantize)
    graph = b.build(list(made))
    return region_of(graph, graph.nodes)


def inputs(case: Case, seed: int) -> dict[str, torch.Tensor]:
    """By the names of the region's inputs, on the CPU."""
    gen = torch.Generator().manual_seed(seed)
    width = case.width * (1 + case.gate)
    x = torch.randn(case.rows, width, generator=gen) * torch.exp2(
        torch.randint(-4, 5, (case.rows, 1), generator=gen).float()
    )
    x = x.to(getattr(torch, case.dtype))
    x = x if case.clean else hard(x)
    if case.gap or case.offset:
        wide = torch.full((case.rows * (width + case.gap) + case.offset,), float("nan"), dtype=x.dtype)
        x = wide.as_strided((case.rows, width), (width + case.gap, 1), case.offset).copy_(x)
    t = {"x": x}
    if case.weight:
        t["row_weight"] = torch.rand(case.rows, generator=gen).to(getattr(torch, case.weight))
    return t | ({"scale": torch.rand(1, generator=gen) * 99 + 1} if case.quantize is TENSOR else {})


def offered(engine: str, made: Region, arch: Arch, chosen: tuple[tuple[str, object], ...] = ()) -> Offer:
    loaded = BY_ID[engine].load()
    answer = loaded.offer_with(made, arch, chosen) if chosen else loaded.match(made, arch)
    assert isinstance(answer, Offer), (engine, answer)
    return answer


Build = Callable[[str, Region, tuple], Callable]
"""(engine, region, knobs) to a launch."""


def run(case: Case, build: Build, device: str = "cpu", seed: int = 0) -> None:
    """Launches a case twice; both times every byte is the reference's."""
    made = region(case)
    given = {n: placed(t, device) for n, t in inputs(case, seed).items()}
    call = [given[n] for n in made.graph.inputs]
    y = given["x"]
    if case.gate:
        gate = region_of(made.graph, made.nodes[:1])
        y = build("activation/cute", gate, ())(*(given[n] for n in gate.graph.inputs))
    quantize = made.nodes[-1]
    tensors = {"x": y.cpu()} | ({"scale": given["scale"].cpu()} if "scale" in given else {})
    ports = {v: p for p, v in quantize.outputs}
    want = tuple(ports[v] for v in made.graph.outputs)
    expected = op_table()["quantize"].reference(tensors, quantize.attributes, want)
    launch = build(case.engine, made, case.knobs)
    workspace = [workspace_bytes(case.rows, case.width) // 4] if dict(case.knobs).get("apart") else []
    for time in range(1 if device == "cpu" else 2):
        oracle.poison(*(torch.empty(t.shape, dtype=t.dtype, device=device) for t in expected.values()))
        oracle.poison(*(torch.empty(n, device=device) for n in workspace))
        for port, got in zip(want, launch(*call), strict=True):
            oracle.same_bits(got, expected[port], f"{case}, run {time}: {port}")


def simulated(case: Case) -> None:
    from . import simt

    arch = ARCHS[case.arch]

    def build(engine: str, made: Region, chosen: tuple) -> Callable:
        context = BuildContext(made, arch, offered(engine, made, arch, chosen), lambda kernel: compiled(kernel, case.arch))
        return guarded(BY_ID[engine].load().build(context).launch)

    simt.conflicts.clear()
    with own_cases.guarded_memory() as guarded, own_cases.poisoned_results():
        run(case, build)
        assert not simt.conflicts, f"{len(simt.conflicts)} accesses meet in a bank: {simt.conflicts[0]}"


def contexts(arch: Arch) -> Iterator[tuple[str, BuildContext]]:
    """(engine, context) of all cases' kernels."""
    for case in (*SMALL, *LARGE):
        made = region(case)
        yield case.engine, BuildContext(made, arch, offered(case.engine, made, arch, case.knobs))
        if case.gate:
            gate = region_of(made.graph, made.nodes[:1])
            yield "activation/cute", BuildContext(gate, arch, offered("activation/cute", gate, arch))


if __name__ == "__main__":
    own_cases.main(lambda: SMALL, simulated, contexts, "give the bits of the reference")
