"""The tables of INTEROP.md, made by asking the engines with archs as data.

    python -m layerplan.integration.planner.interop [INTEROP.md]

Which packages are installed here does not matter: an engine answers from shapes, dtypes and arch alone."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..engines.arch import ARCHS
from ..engines.contract import Decline, Offer
from ..engines.manifest import BY_ID, GPUS
from ..engines.table import between, rewrite
from ..graph.autodiff import accumulate_weight_grads, differentiate
from ..graph.ir import Graph, GraphBuilder, TensorSpec
from ..graph.ops.table import op_table
from .cover import region_of

BEGIN, END = "<!-- {}: begin (made by python -m layerplan.integration.planner.interop) -->", "<!-- {}: end -->"


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One op on sizes of a training step. ``inputs``: port -> (sizes, dtype); ``want``: output ports, the required ones
    where empty, all of which get a gradient; ``accumulate``: the weight gradient is added to a float32 buffer."""

    name: str
    op: str
    inputs: dict[str, tuple[tuple[int, ...], str]]
    attrs: dict[str, Any] = dataclasses.field(default_factory=dict)
    want: tuple[str, ...] = ()
    accumulate: bool = False

    def graphs(self) -> tuple[Graph, Graph]:
        """The forward with what its backward saves, and that backward."""
        b, op = GraphBuilder(), op_table()[self.op]
        values = {port: b.input(port, TensorSpec(*spec)) for port, spec in self.inputs.items()}
        out = b.op(self.op, want=self.want or None, **values, **self.attrs)
        graph = b.build(list(out) if isinstance(out, tuple) else [out])
        with_gradient = graph.inputs if op.differentiable is None else op.differentiable
        made = differentiate(graph, tuple(graph.specs[v].is_float and v in with_gradient for v in graph.inputs))
        weights = tuple(i for i, v in enumerate(graph.inputs) if self.accumulate and v == "weight")
        return made.forward, accumulate_weight_grads(made.backward, made.grads, weights)[0]


def _attention(name: str, d: int = 128, dv: int | None = None, *, heads: int = 8, keys: int = 2048,
               dtype: str = "bfloat16", want: tuple[str, ...] = (), **more) -> Case:  # fmt: skip
    packed, inputs = more.get("layout") == "thd", {}
    for port, length, count, width in (("q", 2048, heads, d), ("k", keys, 8, d), ("v", keys, 8, dv or d)):
        inputs[port] = ((*((length,) if packed else (2, length)), count, width), dtype)
    if packed:
        inputs |= {p: ((9,), "int32") for p in ("cu_seqlens_q", "cu_seqlens_k")}
    if more.get("dropout"):
        inputs |= {p: ((1,), "int64") for p in ("seed", "offset")}
    if more.pop("mask", False):
        inputs["mask"] = ((1, 1, 2048, keys), "bool")
    if more.pop("sink", False):
        inputs["sink"] = ((heads,), dtype)
    return Case(name, "sdpa", inputs, {"causal": True, **more}, want)


def _norm(name: str, *, width: int = 4096, dtype: str = "bfloat16", op: str = "rms_norm",
          residual: str | None = None, **attrs) -> Case:  # fmt: skip
    vectors = ("weight", "bias") if op == "layer_norm" else ("weight",)
    inputs = {"x": ((8192, width), dtype), **{p: ((width,), dtype) for p in vectors}}
    return Case(name, op, inputs | ({"residual": ((8192, width), residual)} if residual else {}), attrs)


def _linear(name: str, *, n: int = 14336, k: int = 4096, dtype: str = "bfloat16",
            bias: bool = False, accumulate: bool = False) -> Case:  # fmt: skip
    inputs = {"x": ((8192, k), dtype), "weight": ((n, k), dtype)}
    return Case(name, "linear", inputs | ({"bias": ((n,), dtype)} if bias else {}), accumulate=accumulate)


def _grouped(name: str, *, experts: int = 64, n: int = 2816, k: int = 2048, dtype: str = "bfloat16", align: int = 128,
             accumulate: bool = False) -> Case:  # fmt: skip
    inputs = {"x": ((98304, k), dtype), "weight": ((experts, n, k), dtype), "offsets": ((experts,), "int32")}
    return Case(name, "grouped_matmul", inputs, {"align": align}, accumulate=accumulate)


def _rope(name: str, *, d: int = 128, turned: int | None = None, dtype: str = "bfloat16",
          positions: bool = False, rows: int = 8192, **attrs) -> Case:  # fmt: skip
    inputs = {"x": ((rows, 2, 32, d), dtype), **{p: ((rows, (turned or d) // 2), "float32") for p in ("cos", "sin")}}
    return Case(name, "rope", inputs | ({"positions": ((rows, 2), "int64")} if positions else {}), attrs)


def _loss(name: str, classes: int, dtype: str = "bfloat16") -> Case:
    return Case(name, "cross_entropy", {"logits": ((8192, classes), dtype), "targets": ((8192,), "int64")})


FAMILIES: dict[str, tuple[tuple[str, ...], tuple[Case, ...]]] = {
    "attention": (
        ("attention/torch_cudnn", "attention/torch_flash", "attention/fa4", "attention/fa4_deterministic"),
        (
            _attention("bfloat16, causal, head dim 128"), _attention("float16", dtype="float16"),
            _attention("float32", dtype="float32"), _attention("no mask", causal=False),
            _attention("causal, fewer queries than keys", keys=4096),
            _attention("grouped heads (32/8)", heads=32), _attention("packed sequences", layout="thd"),
            _attention("window", window=(1023, 0), causal=False), _attention("sink", sink=True),
            _attention("gradient of the LSE", want=("out", "lse")),
            _attention("boolean mask", mask=True), _attention("dropout", dropout=0.1),
            *(_attention(f"head dim {d}", d) for d in (64, 80, 96, 192, 256)),
            _attention("head dims 192/128 (latent attention)", 192, 128),
            _attention("head dims 192/128, grouped heads", 192, 128, heads=32),
        ),
    ),
    "linear": (
        ("linear/torch", "linear/quack"),
        (
            *(_linear(d, dtype=d) for d in ("bfloat16", "float16", "float32")), _linear("bias", bias=True),
            _linear("added to a float32 main_grad", accumulate=True),
            _linear("widths that 8 does not divide", n=1001, k=1003),
        ),
    ),
    "grouped matmul": (
        ("grouped_matmul/torch", "grouped_matmul/quack", "grouped_matmul/deep_gemm"),
        (
            *(_grouped(d, dtype=d) for d in ("bfloat16", "float16", "float32")), _grouped("added to a float32 main_grad", accumulate=True),
            _grouped("groups of any size", align=1), _grouped("2048 experts", experts=2048),
            _grouped("widths that 8 does not divide", n=1001, k=1003),
        ),
    ),
    "norm": (
        ("norm/torch", "norm/quack"),
        (
            *(_norm(f"rms_norm, {d}", dtype=d) for d in ("bfloat16", "float16", "float32")),
            _norm("layer_norm with bias", op="layer_norm"), _norm("residual", residual="bfloat16"),
            _norm("residual, float32", dtype="float32", residual="float32"),
            _norm("weights around zero", zero_centered=True), _norm("odd width", width=4095),
            *(_norm(f"{n} wide", width=n) for n in (16384, 32768, 65536, 131072)),
        ),
    ),
    "rope": (
        ("rope/quack",),
        (
            _rope("bfloat16, whole head"), _rope("float32", dtype="float32"), _rope("half of the head", turned=64),
            _rope("interleaved", interleaved=True), _rope("positions per token", positions=True),
            _rope("head dim 36", d=36), _rope("sequence of 262144", rows=262144),
        ),
    ),
    "loss": (
        ("loss/quack",),
        (
            _loss("bfloat16, 128256 classes", 128256), _loss("float32, 128256 classes", 128256, "float32"),
            _loss("262144 classes", 262144), _loss("262144 classes, float32", 262144, "float32"),
            _loss("524288 classes", 524288), _loss("50257 classes (odd)", 50257),
        ),
    ),
}  # fmt: skip
"""Family -> (its engines on packages, what they are asked)."""


def answers(engine: str, graph: Graph, arch: str) -> Iterator[Offer | Decline]:
    """What an engine says to each node of ``graph`` that it names."""
    entry = BY_ID[engine]
    for node in graph.nodes:
        if node.op in entry.ops:
            yield entry.load().match(region_of(graph, [node]), ARCHS[arch])


Reasons = dict[tuple[str, str], tuple[str, dict[str, None]]]
"""(engine, a reason without its numbers) -> (the first such reason, the archs that had one)."""


def _cell(engine: str, graphs: tuple[Graph, Graph], declined: Reasons) -> str:
    """Passes and archs on which ``engine`` offers; why it declines elsewhere goes into ``declined``."""
    groups: dict[str, list[str]] = {}
    for arch in _gpus(engine):
        passes = ""
        for letter, graph in zip("fb", graphs, strict=True):
            found = list(answers(engine, graph, arch))
            passes += letter if found and all(isinstance(a, Offer) for a in found) else ""
            for answer in found:
                if isinstance(answer, Decline):
                    reason = re.sub(r"\bsm_\d+\b", "the arch", answer.reason)
                    declined.setdefault((engine, re.sub(r"\d+", "#", reason)), (reason, {}))[1][arch] = None
        groups.setdefault(passes or "no", []).append(arch)
    if len(groups) == 1:
        return next(iter(groups))
    return "; ".join(f"{passes}: {_archs(archs, engine)}" for passes, archs in groups.items())


def _gpus(engine: str) -> list[str]:
    return [a for a in GPUS if a in BY_ID[engine].archs]


def _named(archs: list[str]) -> str:
    return " ".join(a.replace("sm_", "sm") for a in archs)


def _archs(archs: list[str], engine: str) -> str:
    return "all" if archs == _gpus(engine) else _named(archs)


def _same_bits(engine: str, graph: Graph) -> str:
    """Archs on which every offer for the backward has reruns that are bitwise equal."""
    held = [a for a in _gpus(engine) if (found := list(answers(engine, graph, a)))
            and all(isinstance(o, Offer) and o.deterministic for o in found)]  # fmt: skip
    return _archs(held, engine) if held else "no"


def tables() -> dict[str, str]:
    """Family -> a table of what its engines take and one of why they decline the rest, as markdown."""
    made = {}
    for family, (engines, cases) in FAMILIES.items():
        declined: Reasons = {}
        asked = [(case.name, case.graphs()) for case in cases]
        rows = [["", *(f"`{e}`" for e in engines)], ["archs", *(_named(_gpus(e)) for e in engines)]]
        rows += [[name, *(_cell(e, graphs, declined) for e in engines)] for name, graphs in asked]
        first, (_, backward) = asked[0]
        rows.append([f"backward reruns bitwise equal ({first})", *(_same_bits(e, backward) for e in engines)])
        shared: dict[tuple[str, str], list[str]] = {}
        for (engine, _), (reason, archs) in declined.items():
            shared.setdefault((reason, _archs([a for a in GPUS if a in archs], engine)), []).append(f"`{engine}`")
        reasons = [["why not", "engines", "archs"]]
        reasons += [[reason, ", ".join(who), archs] for (reason, archs), who in shared.items()]
        made[family] = "\n\n".join(_markdown(t) for t in (rows, reasons) if len(t) > 1)
    return made


def _markdown(rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (rows[0], ["---"] * len(rows[0]), *rows[1:]))


def updated(text: str) -> str:
    """``text`` with new tables between their markers. Raises ValueError where a family has not one pair of them."""
    for family, table in tables().items():
        text = between(text, BEGIN.format(family), END.format(family), table)
    return text


def main(arguments: list[str]) -> int:
    """Bring the named file (default INTEROP.md) up to date."""
    return rewrite(Path(arguments[0] if arguments else "INTEROP.md"), updated)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
