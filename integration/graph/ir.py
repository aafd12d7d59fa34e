"""Immutable graphs: symbolic dims, tensor specs, nodes, and a builder that applies the op table's rules.

A value is named by a string that is unique in its graph. Dtypes are strings (``"bfloat16"``), so that a graph can be
hashed, stored in a plan file and planned without a device.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

FLOAT_DTYPES = ("float64", "float32", "bfloat16", "float16")
ITEMSIZE = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2,
    "int8": 1, "uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1,
}  # fmt: skip


class GraphError(ValueError):
    """A graph that breaks a rule of the IR or of the op table; the message names node, port, value and rule."""


@dataclasses.dataclass(frozen=True, slots=True)
class Dim:
    """A symbolic size, known only at run time. ``hint`` is the size that estimates use (a power of two).

    One that is computed from others (``size_of``) is ceil(product of ``of`` / ``per``) * ``times`` + ``plus``; its hint is what that
    gives on the hints of the others."""

    name: str
    hint: int = 1
    of: tuple[int | Dim, ...] = ()
    per: int = 1
    times: int = 1
    plus: int = 0

    def at(self, size: Callable[[Dim], int]) -> int:
        """The size where ``size`` gives those of the dims that are not computed."""
        if not self.of:
            return size(self)
        product = math.prod(d.at(size) if isinstance(d, Dim) else d for d in self.of)
        return -(-product // self.per) * self.times + self.plus

    def __repr__(self) -> str:
        return self.name


type Size = int | Dim


def size_of(sizes: Iterable[Size], per: int = 1, times: int = 1, plus: int = 0) -> Size:
    """ceil(product of ``sizes`` / ``per``) * ``times`` + ``plus``: a number where all sizes are, else a Dim."""
    factors: list[Size] = []
    for d in sizes:  # a product of products is one product
        factors += d.of if isinstance(d, Dim) and d.of and d.per == d.times == 1 and not d.plus else [d]
    number = math.prod(d for d in factors if isinstance(d, int))
    dims = tuple(d for d in factors if isinstance(d, Dim))
    if not dims or number == 0:
        return -(-number // per) * times + plus
    of = dims if number == 1 else (number, *dims)
    if len(of) == 1 and per == times == 1 and not plus:
        return dims[0]
    name = "*".join(map(str, of))
    name = name if per == 1 else f"ceil({name}/{per})"
    name = name if times == 1 else f"{times}*({name})"
    made = Dim(f"{name}+{plus}" if plus else name, 1, of, per, times, plus)
    return dataclasses.replace(made, hint=made.at(lambda d: d.hint))


@dataclasses.dataclass(frozen=True, slots=True)
class ScaleSpec:
    """How a quantised tensor [..., n], taken as [rows, n], is scaled: one scale per ``block`` = (rows, columns) of it, 0 for the whole
    axis; a block at an edge may hold less. A value is its element times its block's scale. Scales are stored as ``dtype``.

    ``layout`` says where they lie. ``row``: row-major, [1] for the whole tensor, else [..., ceil(n / columns)] (for blocks of one row).
    ``swizzled``: the tiles of 128 rows by 4 scales that block-scaled tensor-core products of sm_100 read (``swizzle`` of
    ``ops/quantize.py``), [ceil(rows / 128) * 128, ceil(ceil(n / columns) / 4) * 4], 0 where there is no block."""

    block: tuple[int, int]
    dtype: str = "float32"
    layout: str = "row"

    def scales(self, shape: tuple[Size, ...]) -> TensorSpec:
        """The spec of the scales of a tensor of ``shape``."""
        if self.block == (0, 0):
            return TensorSpec((1,), self.dtype)
        per_row = size_of(shape[-1:], self.block[1])
        if self.layout == "row":
            return TensorSpec((*shape[:-1], per_row), self.dtype)
        return TensorSpec((size_of(shape[:-1], 128, 128), size_of([per_row], 4, 4)), self.dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSpec:
    shape: tuple[Size, ...]
    dtype: str
    layout: str = "strided"
    scale: ScaleSpec | None = None

    @property
    def rank(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        """Number of elements, symbolic dims at their hint."""
        n = 1
        for d in self.shape:
            n *= d.hint if isinstance(d, Dim) else d
        return n

    def nbytes(self) -> int:
        return self.numel() * ITEMSIZE[self.dtype]

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOAT_DTYPES

    def with_dtype(self, dtype: str) -> TensorSpec:
        return dataclasses.replace(self, dtype=dtype)

    def __repr__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """One application of an op. Ports that are absent from ``inputs`` / ``outputs`` are not connected / not computed."""

    op: str
    inputs: tuple[tuple[str, str], ...]  # (port, value), in the op's port order
    outputs: tuple[tuple[str, str], ...]
    attrs: tuple[tuple[str, Any], ...] = ()

    def input(self, port: str) -> str | None:
        return next((v for p, v in self.inputs if p == port), None)

    def output(self, port: str) -> str | None:
        return next((v for p, v in self.outputs if p == port), None)

    def attr(self, name: str) -> Any:
        for k, v in self.attrs:
            if k == name:
                return v
        raise KeyError(f"node {self.op}: no attribute {name!r}; it has {[k for k, _ in self.attrs]}")

    @property
    def attributes(self) -> dict[str, Any]:
        return dict(self.attrs)


@dataclasses.dataclass(frozen=True, slots=True)
class Graph:
    """Nodes in execution order. ``inputs`` and ``outputs`` are value names; ``specs`` has one entry per value."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    specs: Mapping[str, TensorSpec]
    weights: frozenset[str] = frozenset()  # inputs that are parameters: their gradients are deferrable stages

    def producer(self, value: str) -> Node | None:
        return next((n for n in self.nodes if any(v == value for _, v in n.outputs)), None)

    def consumers(self, value: str) -> list[Node]:
        return [n for n in self.nodes if any(v == value for _, v in n.inputs)]

    def canonical(self) -> dict[str, Any]:
        """The graph as JSON-able data with positional value and dim names: equal for equal graphs."""
        names = {v: f"i{k}" for k, v in enumerate(self.inputs)}
        for k, node in enumerate(self.nodes):
            for p, v in node.outputs:
                names.setdefault(v, f"n{k}.{p}")
        dims: dict[str, str] = {}

        def size(d: Size) -> Any:
            if isinstance(d, Dim) and d.of:
                return [[size(f) for f in d.of], d.per, d.times, *((d.plus,) if d.plus else ())]
            return dims.setdefault(d.name, f"d{len(dims)}") if isinstance(d, Dim) else d

        def spec(s: TensorSpec) -> list[Any]:
            shape = [size(d) for d in s.shape]
            scale = dataclasses.astuple(s.scale) if s.scale else None
            return [shape, s.dtype, s.layout, scale]

        return {
            "inputs": [spec(self.specs[v]) for v in self.inputs],
            "weights": sorted(names[w] for w in self.weights),
            "nodes": [
                [n.op, [[p, names[v]] for p, v in n.inputs], [[p, names[v]] for p, v in n.outputs], list(map(list, n.attrs))]
                for n in self.nodes
            ],
            "outputs": [names[v] for v in self.outputs],
        }  # fmt: skip

    def signature(self) -> str:
        """Content hash of the canonical form: what plan files and records are keyed by."""
        text = json.dumps(self.canonical(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    def dims(self) -> tuple[Dim, ...]:
        seen: dict[str, Dim] = {}
        for v in self.inputs:
            for d in self.specs[v].shape:
                if isinstance(d, Dim):
                    seen.setdefault(d.name, d)
        return tuple(seen.values())

    def describe(self) -> str:
        lines = [f"inputs {', '.join(f'{v}: {self.specs[v]}' for v in self.inputs)}"]
        for n in self.nodes:
            outs = ", ".join(f"{v}: {self.specs[v]}" for _, v in n.outputs)
            ins = ", ".join(f"{p}={v}" for p, v in n.inputs)
            attrs = "".join(f", {k}={v!r}" for k, v in n.attrs)
            lines.append(f"  {outs} = {n.op}({ins}{attrs})")
        lines.append(f"outputs {', '.join(self.outputs)}")
        return "\n".join(lines)


class GraphBuilder:
    """Builds a graph node by node; shapes and dtypes come from the op table's rules.

    ``op(name, outputs=..., **inputs_and_attrs)`` returns the output values in port order.
    """

    def __init__(self, prefix: str = "v") -> None:
        self._prefix = prefix
        self._inputs: list[str] = []
        self._weights: set[str] = set()
        self._nodes: list[Node] = []
        self.specs: dict[str, TensorSpec] = {}

    def input(self, name: str, spec: TensorSpec, *, weight: bool = False) -> str:
        if name in self.specs:
            raise GraphError(f"input {name!r}: the name is taken; values of a graph have distinct names")
        self._inputs.append(name)
        self.specs[name] = spec
        if weight:
            self._weights.add(name)
        return name

    def op(self, name: str, *, want: Iterable[str] | None = None, **arguments: Any) -> Any:
        """Append a node. ``want`` names the output ports to compute (default: the required ones and, where the op's
        rule makes them so, the ones implied by its inputs). One port returns its value, several return a tuple."""
        from .ops.table import op_table

        op = op_table()[name]
        inputs, attrs = op.bind(arguments)
        specs = {p: self.specs[v] for p, v in inputs}
        ports = op.output_ports(specs, attrs, want)
        inferred = op.infer(specs, attrs)
        outputs = []
        for port in ports:
            value = f"{self._prefix}{len(self.specs)}.{port}"
            self.specs[value] = inferred[port]
            outputs.append((port, value))
        self._nodes.append(Node(name, inputs, tuple(outputs), tuple(sorted(attrs.items()))))
        values = tuple(v for _, v in outputs)
        return values[0] if len(values) == 1 else values

    def append(self, node: Node, specs: Mapping[str, TensorSpec]) -> None:
        """Append a node of another graph as it is, with the specs of its outputs."""
        for _, v in node.outputs:
            self.specs[v] = specs[v]
        self._nodes.append(node)

    def node_of(self, value: str) -> Node:
        return next(n for n in reversed(self._nodes) if any(v == value for _, v in n.outputs))

    def build(self, outputs: Iterable[str]) -> Graph:
        graph = Graph(tuple(self._inputs), tuple(outputs), tuple(self._nodes), dict(self.specs), frozenset(self._weights))
        return prune(graph)


def prune(graph: Graph) -> Graph:
    """Drop nodes and optional outputs that nothing reads. Inputs stay: they are the graph's calling convention."""
    from .ops.table import op_table

    live, kept = set(graph.outputs), []
    for node in reversed(graph.nodes):
        if not any(v in live for _, v in node.outputs):
            continue
        required = op_table()[node.op].required_outputs
        outs = tuple((p, v) for p, v in node.outputs if v in live or p in required)
        kept.append(dataclasses.replace(node, outputs=outs))
        live.update(v for _, v in node.inputs)
    nodes = tuple(reversed(kept))
    defined = set(graph.inputs) | {v for n in nodes for _, v in n.outputs}
    return dataclasses.replace(graph, nodes=nodes, specs={k: s for k, s in graph.specs.items() if k in defined})
