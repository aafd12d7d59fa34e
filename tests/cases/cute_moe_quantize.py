"""Cases of moe_quantize/cute: a permute with the quantize that reads its rows.

``python -m tests.cases.cute_moe_quantize [TEXT]`` runs the device code of the cases whose name holds TEXT thread by
thread on a CPU (``tests/cases/simt.py``), over outputs of what no kernel means; ``--compile ARCH [WORKERS]`` compiles
all of them ahead; ``--reach [TEXT ...]`` launches compiled code without a GPU as far as the driver. The rows of groups
are those of the references, one after the other, bit for bit; rows behind the last group are not written."""

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
from layerplan.integration.graph.ops.table import op_table
from layerplan.integration.planner.cover import region_of

from .. import oracle
from . import cute_moe, own_cases
from .cute_moe import knobs
from .cute_norm import compiled, placed
from .quantized import hard

ENGINE = "moe_quantize/cute"
POISON = 0x5A  # of each byte that a simulated launch writes over


@dataclasses.dataclass(frozen=True)
class Case:
    """``probs``: the dtype of probabilities, which move along; other fields as ``cute_moe.Case`` has them. ``arch``:
    the one that a simulated case is built for. ``extra``: outputs that the kernel does not have."""

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
    fp8: str = "float8_e4m3fn"
    power_of_two: bool = False
    block: tuple[int, int] = (1, 128)
    extra: tuple[str, ...] = ()
    knobs: tuple[tuple[str, object], ...] = ()
    arch: str = "sm_90"

    def __str__(self) -> str:
        said = [
            f"{f.name}={value}"
            for f in dataclasses.fields(self)[4:]
            if (value := getattr(self, f.name)) != f.default
        ]
        return " ".join([f"{self.tokens}x{self.slots} of {self.experts}, width {self.width}", *said])


SMALL = (
    Case(5, 2, 4, 264),  # two blocks of scales and a part of one
    Case(9, 3, 5, 128, align=4, dropped=0.3, probs="float32"),  # a warp holds two rows
    Case(8, 2, 3, 40, align=20, skew=1.0, probs="bfloat16", gap=8, offset=8),  # a row is less than a block
    Case(7, 4, 8, 256, "float16", one=True, align=8, fp8="float8_e5m2"),
    Case(7, 3, 4, 260, "float32", power_of_two=True, align=3),  # a block is a whole warp
    Case(3, 2, 2, 12, "float32", probs="float16", gap=4, offset=4),
    Case(2, 11, 16, 16, power_of_two=True, fp8="float8_e5m2"),  # more slots than lanes of a block
    Case(2, 19, 20, 136, "float16"),
    Case(4, 2, 3, 72, dropped=1.0, align=4),  # nothing kept
    Case(0, 2, 3, 16, align=4),
    Case(3, 3, 4, 1208, align=3, knobs=knobs(64, 2, streaming=True)),  # several pieces of a row
    Case(2, 2, 2, 2056, probs="float32", knobs=knobs(64, 4)),
    Case(8, 2, 4, 264, align=2, arch="sm_80"),  # no instruction that casts
    Case(7, 2, 4, 40, fp8="float8_e5m2", arch="sm_80"),
)
LARGE = tuple(
    Case(tokens, slots, experts, width, dtype, probs, align, dropped, skew, fp8=fp8, power_of_two=power)
    for tokens, slots, experts, width, dtype, probs, align, dropped, skew in (
        (1031, 6, 64, 2048, "bfloat16", "float32", 1, 0.0, 0.0),
        (517, 8, 128, 2048, "float16", None, 128, 0.2, 0.05),
        (300, 2, 8, 4104, "float32", "float32", 16, 0.0, 1.0),
        (2049, 4, 60, 1416, "bfloat16", None, 8, 0.5, 0.1),
        (515, 8, 256, 7168, "bfloat16", "float32", 16, 0.0, 0.0),
    )
    for fp8, power in (("float8_e4m3fn", False), ("float8_e5m2", True))
)


def fuzzed(seed: int) -> Case:
    r = random.Random(seed)
    dtype, experts = r.choice(("bfloat16", "bfloat16", "float16", "float32")), r.choice((1, 2, 8, 60, 128, 300))
    step, slots = 4 if dtype == "float32" else 8, min(experts, r.choice((1, 2, 4, 6, 8, 9, 32)))
    return Case(
        tokens=r.choice((1, 2, 31, r.randint(1, 6000 // slots))), slots=slots, experts=experts,
        width=step * r.randint(1, 400) if r.random() < 0.7 else 128 * r.randint(1, 20), dtype=dtype,
        probs=r.choice((None, "float32", dtype)), align=r.choice((1, 1, 8, 16, *((100, 128) if experts <= 60 else ()))),
        dropped=r.choice((0.0, 0.0, 0.3, 1.0)), skew=r.choice((0.0, 0.05, 1.0)), one=r.random() < 0.1,
        gap=r.choice((0, 0, step, 3)), offset=r.choice((0, 0, step, 1)),
        fp8=r.choice(("float8_e4m3fn", "float8_e5m2")), power_of_two=r.random() < 0.5,
    )  # fmt: skip


# ---- regions and inputs ----------------------------------------------------------------------------------------------


def region(case: Case) -> Region:
    """Both nodes with symbolic tokens. ``extra`` names more outputs: "rows", "data_t", "scale_inv_t"."""
    b, t = GraphBuilder(), Dim("t", max(2, case.tokens))
    ends = TensorSpec((case.experts,), "int32")
    ports = {"x": TensorSpec((t, case.width), case.dtype), "row_map": TensorSpec((t, case.slots), "int32"),
             "counts": ends, "offsets": ends}  # fmt: skip
    ports |= {} if case.probs is None else {"probs": TensorSpec((t, case.slots), case.probs)}
    rows = b.op("permute", align=case.align, **{p: b.input(p, s) for p, s in ports.items()})
    rows, *numbers = rows if isinstance(rows, tuple) else (rows,)
    want = ["data", "scale_inv", *(p for p in case.extra if p != "rows")]
    made = b.op("quantize", want=want, x=rows, dtype=case.fp8, power_of_two=case.power_of_two, block=case.block)
    graph = b.build([*made, *numbers, *([rows] if "rows" in case.extra else [])])
    return region_of(graph, graph.nodes)


def inputs(case: Case, made: Region, seed: int) -> dict[str, torch.Tensor]:
    """By port, on the CPU; x holds what breaks kernels."""
    plain = cute_moe.Case("permute", (), case.tokens, case.slots, case.experts, case.width, case.dtype, case.probs,
                          case.align, case.dropped, case.skew, case.one)  # fmt: skip
    given = cute_moe.inputs(plain, made, seed)
    return given | {"x": cute_moe.laid_out(hard(given["x"]), case.gap, case.offset)}


def offered(case: Case, made: Region, arch: Arch) -> Offer:
    engine = BY_ID[ENGINE].load()
    answer = engine.offer_with(made, arch, case.knobs) if case.knobs else engine.match(made, arch)
    assert isinstance(answer, Offer), (str(case), answer)
    return answer


# ---- runs ------------------------------------------------------------------------------------------------------------


def expected(made: Region, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the references give, by the names of the region's outputs, without the rows behind the last group."""
    permute, quantize = made.nodes
    table, used = op_table(), int(given["offsets"][-1])
    moved = table["permute"].reference(given, permute.attributes, ("rows", "row_probs"))
    moved = {p: t[:used] for p, t in moved.items()}
    fp8 = table["quantize"].reference({"x": moved["rows"]}, quantize.attributes, ("data", "scale_inv"))
    pairs = ((permute, moved), (quantize, fp8))
    named = {v: found[p] for node, found in pairs for p, v in node.outputs if found.get(p) is not None}
    return {v: named[v] for v in made.graph.outputs}


def run(case: Case, launch, device: str = "cpu", seed: int = 0) -> None:
    """Launches a case twice; both times every byte of the groups' rows is the references'."""
    made = region(case)
    cpu = inputs(case, made, seed)
    given, right = {p: placed(t, device) for p, t in cpu.items()}, expected(made, cpu)
    used = int(cpu["offsets"][-1])
    for _ in range(2):
        oracle.poison(*(torch.empty_like(t, device=device) for t in right.values()))
        for (name, expect), got in zip(right.items(), launch(*given.values()), strict=True):
            assert got.is_contiguous() and len(got) >= used, f"{case}: {name} is {list(got.shape)}"
            oracle.same_bits(got[:used], expect, f"{case}: {name}")


def simulated(case: Case) -> None:
    """The device code, thread by thread. What lies behind the last group is as it was."""
    made, arch = region(case), ARCHS[case.arch]
    context = BuildContext(made, arch, offered(case, made, arch), lambda kernel: compiled(kernel, case.arch))
    launch = BY_ID[ENGINE].load().build(context).launch

    def checked(*t):
        results = launch(*t)
        used = int(t[made.graph.inputs.index("offsets")][-1])
        for name, result in zip(made.graph.outputs, results, strict=True):
            tail = result[used:].view(torch.uint8)
            assert not case.tokens or (tail == POISON).all(), f"{case}: {name} is written behind the last group"
        return results

    with own_cases.guarded_memory(poisoned=POISON) as guarded:
        run(case, guarded(checked))


def contexts(arch: Arch) -> Iterator[tuple[str, BuildContext]]:
    """(engine, context) of all cases' kernels."""
    for case in (*SMALL, *LARGE):
        made = region(case)
        yield ENGINE, BuildContext(made, arch, offered(case, made, arch))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--reach"]:
        cute_moe.reach(*sys.argv[2:], modules=(sys.modules[__name__],), engine=ENGINE)
        sys.exit()
    own_cases.main(lambda: SMALL, simulated, contexts, "give the bits of the references")
