"""Which cases of the catalogue each engine takes, from ``match`` alone: an engine that begins to decline is named.

``python -m tests.cases.taken`` writes tests/golden/taken.json anew, for a change that was meant. Per arch and engine a row for
each case: dtype and ``f`` where every node of the forward that the engine names is offered, ``b`` the same of the backward from
the first output.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import torch

from layerplan.integration.engines.arch import ARCHS, Arch
from layerplan.integration.engines.contract import Offer
from layerplan.integration.engines.manifest import BY_ID
from layerplan.integration.graph.autodiff import differentiate
from layerplan.integration.graph.ir import Graph
from layerplan.integration.planner.cover import region_of

from .catalogue import BY_ID as CASE_BY_ID
from .catalogue import OpCase
from .reruns import watching

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "taken.json"
FROZEN = {
    "cpu": ("linear/torch", "grouped_matmul/torch", "moe/torch", "norm/torch", "attention/torch_cpu", "layout/torch", "loss/chunked"),
    "sm_90": ("linear/torch", "grouped_matmul/torch", "moe/torch", "norm/torch", "attention/torch_cudnn", "attention/torch_flash", "layout/torch"),
}
Table = dict[str, dict[str, dict[str, str]]]


@functools.cache
def _graphs(case: OpCase, dtype: torch.dtype) -> tuple[Graph, ...]:
    """The one-node graph that the case asks for and its backward where it has one; the reference runs it once, on a CPU."""
    inputs = case.make(torch.Generator().manual_seed(0), dtype)
    with watching() as ran:
        case.ours({n: t.requires_grad_(n in case.diff) for n, t in inputs.items()}, engine="reference/eager")
    (made,) = ran.ran
    return (made.graph, differentiate(made.graph, made.needs, (0,)).backward) if case.diff else (made.graph,)


def _offers(engine: str, graph: Graph, arch: Arch) -> bool:
    """Whether the engine offers for every node of the graph that it names, and names one."""
    entry = BY_ID[engine]
    nodes = [n for n in graph.nodes if n.op in entry.ops]
    return bool(nodes) and all(isinstance(entry.load().match(region_of(graph, [n]), arch), Offer) for n in nodes)


def taken() -> Table:
    """{arch: {engine: {case: "float32:fb bfloat16:f"}}}; a case that is not taken at all has no row."""
    table: Table = {}
    for name, engines in FROZEN.items():
        for engine in engines:
            rows = table.setdefault(name, {}).setdefault(engine, {})
            for case in CASE_BY_ID.values():
                if case.op not in BY_ID[engine].ops:
                    continue
                found = []
                for dtype in case.dtypes:
                    stages = zip("fb", _graphs(case, dtype), strict=False)
                    letters = "".join(letter for letter, graph in stages if _offers(engine, graph, ARCHS[name]))
                    if letters:
                        found.append(f"{str(dtype).removeprefix('torch.')}:{letters}")
                if found:
                    rows[case.id] = " ".join(found)
    return table


@functools.cache
def frozen() -> Table:
    return json.loads(GOLDEN.read_text(encoding="utf-8"))


def must_take(arch: str, engine: str, case: str, dtype: torch.dtype) -> bool:
    """Whether the frozen table says that the engine takes the case, forward and backward."""
    row = frozen().get(arch, {}).get(engine, {}).get(case, "")
    return f"{str(dtype).removeprefix('torch.')}:fb" in row.split()


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(taken(), indent=1) + "\n", encoding="utf-8")
