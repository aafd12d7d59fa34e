"""Random inputs with which a graph can be run: floats of the magnitudes that training has, integers and statistics that
the ops allow.

What a port may hold is known by its name: ports of one name mean one thing in every op. A port of integers or booleans
that has no row in ``PORTS`` is refused, so a new op is added there with its table row."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import torch

from .ir import Dim, Graph, GraphError, Node, Size


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """A port that needs a value: its ``shape``, and ``of(port)``, those of the node's inputs (None where one is not
    connected)."""

    node: Node
    shape: tuple[int, ...]
    generator: torch.Generator
    of: Callable[[str], tuple[int, ...] | None]

    def normal(self) -> torch.Tensor:
        """Standard normal float32."""
        return torch.randn(self.shape, generator=self.generator, device=self.generator.device)

    def uniform(self) -> torch.Tensor:
        """Uniform [0, 1) float32."""
        return torch.rand(self.shape, generator=self.generator, device=self.generator.device)

    def integers(self, end: int) -> torch.Tensor:
        """Uniform int64 in [0, end)."""
        return torch.randint(max(end, 1), self.shape, generator=self.generator, device=self.generator.device)

    def count(self) -> torch.Tensor:
        """0, 1, 2, ... as int64, one for each element."""
        return torch.arange(math.prod(self.shape), device=self.generator.device).view(self.shape)


def _ends(side: str) -> Callable[[Asked], torch.Tensor]:
    """Cumulative lengths of segments as long as they can be: equal ones, of at most the longest that the node's
    attributes name."""

    def make(a: Asked) -> torch.Tensor:
        segments, longest = max(a.shape[0] - 1, 1), a.node.attributes.get(f"max_seqlen_{side}")
        length = (a.of(side) or (0,))[0] // segments
        return a.count() * (length if longest is None else min(length, longest))

    return make


def _positions(a: Asked) -> torch.Tensor:
    return a.count() % (a.of("cos") or (1,))[0]


def _classes(a: Asked) -> int:
    """How many classes a node's targets choose among: those of all ranks where they are sharded."""
    if (stats := a.of("stats")) is not None:
        return stats[0] * a.node.attr("classes")
    if "classes" in a.node.attributes:
        return a.node.attr("classes")
    logits, weight = a.of("logits"), a.of("weight")
    return logits[-1] if logits is not None else weight[0]


def _lse(a: Asked) -> torch.Tensor:
    """What the log of a softmax's denominator is about: that of so many standard normal scores."""
    keys = a.of("k")
    if keys is not None:
        count = keys[1 if a.node.attr("layout") == "bshd" else 0]
    else:
        count = _classes(a)
    return a.uniform() + math.log(max(count, 1)) + 0.5


def _experts(a: Asked) -> torch.Tensor:
    """Each token's slots name experts that follow on each other: all have about as many rows, none comes twice in a token."""
    logits = a.of("logits")
    return a.count() % (a.node.attr("num_experts") if logits is None else logits[1])


def _row_counts(a: Asked, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows of each expert, as even as they can be; where its group ends, with padding). Where nothing maps tokens, of
    what rows there are, less those that padding may take."""
    row_map, align = a.of("row_map"), a.node.attributes.get("align", 1)
    room = (a.of("x") or a.of("dy") or (0,))[0] - experts * (align - 1)
    rows = max(room, 0) if row_map is None else math.prod(row_map)
    first = torch.arange(experts, device=a.generator.device)
    counts = (rows - first + experts - 1).clamp(min=0) // experts
    return counts, ((counts + align - 1) // align * align).cumsum(0)


def _row_map(a: Asked) -> torch.Tensor:
    """Slots deal their rows out to the experts in turn."""
    (experts,), slot = a.of("offsets") or (1,), a.count()
    counts, ends = _row_counts(a, experts)
    begins = torch.cat((ends.new_zeros(1), ends[:-1]))
    return begins[slot % experts] + slot // experts


def _weight(a: Asked) -> torch.Tensor:
    """A matrix keeps the magnitude of what it multiplies; a gamma is of magnitude 1."""
    return a.normal() * (a.shape[-1] ** -0.5 if len(a.shape) > 1 and a.shape[-1] else 1.0)


PORTS: dict[str, Callable[[Asked], torch.Tensor]] = {
    "cu_seqlens_q": _ends("q"),
    "cu_seqlens_k": _ends("k"),
    "positions": _positions,
    "targets": lambda a: a.integers(_classes(a)),
    "hits": lambda a: a.integers(_classes(a)),
    "first": lambda a: a.count(),
    "expert_map": _experts,
    "row_map": _row_map,
    "counts": lambda a: _row_counts(a, a.shape[0])[0],
    "offsets": lambda a: _row_counts(a, a.shape[0])[1],
    "tokens_per_expert": lambda a: 99 * a.uniform() + 1,
    "total_tokens": lambda a: 99 * a.uniform() + 1,
    "padding_mask": lambda a: a.uniform() < 0.1,
    "seed": lambda a: a.integers(1 << 31),
    "offset": lambda a: a.integers(1 << 16),
    "mask": lambda a: a.uniform() < 0.1,
    "lse": _lse,
    "rstd": lambda a: a.uniform() + 0.5,
    "mean": lambda a: 0.1 * a.normal(),
    "cos": lambda a: (6.28 * a.uniform()).cos(),
    "sin": lambda a: (6.28 * a.uniform()).sin(),
    "weight": _weight,
    "scale": lambda a: 64 * a.uniform() + 1,
    "scale_inv": lambda a: a.uniform() / 64 + 1 / 64,
    "data": lambda a: 64 * a.normal(),
}
"""Port -> its values; float ports without a row are standard normal."""
WRITTEN = frozenset({"accumulate"})
"""Ports whose tensor an op writes to: a second run needs a copy."""


def sizes_of(graph: Graph, at_most: int | None = None) -> dict[str, int]:
    """Dim -> size: its hint, or ``at_most`` where that is less; one that is computed from others is computed from
    theirs."""

    def size(d: Dim) -> int:
        return d.hint if at_most is None else min(d.hint, at_most)

    return {d.name: d.at(size) for d in graph.dims()}


def example(graph: Graph, value: str, sizes: Mapping[str, int], generator: torch.Generator) -> torch.Tensor:
    """Contents for an input of ``graph``, on the generator's device, row-major. ``sizes`` are the dims'. Raises
    GraphError for a port of integers or booleans that PORTS does not know."""
    spec = graph.specs[value]
    shape = concrete(spec.shape, sizes)
    readers = [(n, p) for n in graph.nodes for p, v in n.inputs if v == value]
    dtype = getattr(torch, spec.dtype)
    for node, port in sorted(readers, key=lambda r: r[1] not in PORTS):  # what a port must hold goes before what it may

        def of(name: str, node: Node = node) -> tuple[int, ...] | None:
            found = node.input(name)
            return None if found is None else concrete(graph.specs[found].shape, sizes)

        asked = Asked(node, shape, generator, of)
        if port in PORTS:
            return PORTS[port](asked).to(dtype)
        if not spec.is_float:
            raise GraphError(
                f"{node.op}: port {port!r} holds {spec.dtype}: no example is known for it; "
                "add a row to PORTS of graph/examples.py"
            )
        return asked.normal().to(dtype)
    return torch.zeros(shape, dtype=dtype, device=generator.device)  # nothing reads it


def concrete(shape: tuple[Size, ...], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """A shape with its dims' sizes."""
    return tuple(sizes[d.name] if isinstance(d, Dim) else d for d in shape)
