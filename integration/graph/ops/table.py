"""What an op is: its ports, attributes, shape and dtype rules, reference, gradient, flops and bytes.

References are plain PyTorch and compute in max(float32, input dtype). A gradient is written as nodes of the backward
graph; backward ops have a reference but no gradient of their own, so double backward is refused.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ..ir import Dim, GraphError, Size, TensorSpec

Specs = Mapping[str, TensorSpec]
Tensors = Mapping[str, torch.Tensor]
REQUIRED = object()


@dataclasses.dataclass(frozen=True, slots=True)
class Port:
    name: str
    optional: bool = False


@dataclasses.dataclass(frozen=True)
class Op:
    """One row of the table.

    ``infer(specs, attrs)`` returns the spec of every output port that the inputs make possible and raises GraphError
    where a rule is broken. ``reference(tensors, attrs, want)`` returns a dict with at least the wanted ports.
    ``gradient(g)`` (see autodiff.GradContext) returns {input port: gradient value}.
    ``implied(specs, attrs)`` names optional outputs that are computed whenever the inputs make them meaningful.
    ``check(tensors, shape, attrs)`` raises ValueError for sizes and values that no spec can show: ``tensors`` holds the input
    ports whose values may be read, ``shape(port)`` gives the sizes at hand, None where one is not known or nothing is connected.
    """

    name: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    infer: Callable[[Specs, dict[str, Any]], dict[str, TensorSpec]]
    reference: Callable[[Tensors, dict[str, Any], tuple[str, ...]], dict[str, torch.Tensor]]
    attrs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    gradient: Callable[[Any], dict[str, str | None]] | None = None
    implied: Callable[[Specs, dict[str, Any]], tuple[str, ...]] | None = None
    flops: Callable[[Specs, Specs, dict[str, Any]], int] | None = None
    check: Callable[[Tensors, Callable[[str], tuple[int | None, ...] | None], dict[str, Any]], None] | None = None
    kind: str = "pointwise"  # pointwise | norm | reduction | matmul | attention | loss | layout | collective
    differentiable: frozenset[str] | None = None  # input ports that can receive a gradient; None: every float port
    constant_outputs: frozenset[str] = frozenset()  # outputs that pass no gradient on; autograd is told so
    gradient_only: frozenset[str] = frozenset()  # input ports that are read by the gradient alone, never by the op
    aliases: bool = False  # outputs may be views of inputs
    addends: Mapping[str, str] = dataclasses.field(default_factory=dict)  # output port -> optional input port that is added to it
    host_sync: bool = False  # the reference waits for the device: it cannot be captured
    open_rows: frozenset[str] = frozenset()  # outputs whose rows from offsets[-1] on (port offsets) may hold anything

    @functools.cached_property
    def required_outputs(self) -> frozenset[str]:
        return frozenset(p.name for p in self.outputs if not p.optional)

    @functools.cached_property
    def weight_gradient(self) -> bool:
        """Whether it makes a weight gradient and nothing else: a stage that can be deferred."""
        return [p.name for p in self.outputs] == ["dweight"]

    @functools.cached_property
    def input_names(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.inputs)

    def bind(self, arguments: Mapping[str, Any]) -> tuple[tuple[tuple[str, str], ...], dict[str, Any]]:
        """Split keyword arguments into connected ports and a full set of attributes."""
        known = set(self.input_names) | set(self.attrs)
        for name in arguments:
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise GraphError(f"{self.name}: no port or attribute {name!r}{hint} (it has {sorted(known)})")
        ports = []
        for p in self.inputs:
            value = arguments.get(p.name)
            if value is not None:
                ports.append((p.name, value))
            elif not p.optional:
                raise GraphError(f"{self.name}: input port {p.name!r} must be connected")
        attrs = {k: arguments.get(k, d) for k, d in self.attrs.items()}
        missing = [k for k, v in attrs.items() if v is REQUIRED]
        if missing:
            raise GraphError(f"{self.name}: attribute {missing[0]!r} must be given")
        return tuple(ports), attrs

    def output_ports(self, specs: Specs, attrs: dict[str, Any], want: Iterable[str] | None) -> tuple[str, ...]:
        chosen = set(self.required_outputs)
        if want is not None:
            chosen |= set(want)
        elif self.implied is not None:
            chosen |= set(self.implied(specs, attrs))
        names = [p.name for p in self.outputs]
        unknown = chosen - set(names)
        if unknown:
            raise GraphError(f"{self.name}: no output port {sorted(unknown)[0]!r}; it has {names}")
        return tuple(n for n in names if n in chosen)

    def cost(self, inputs: Specs, outputs: Specs, attrs: dict[str, Any]) -> tuple[int, int]:
        """(flops, bytes), bytes = every operand once, symbolic dims at their hint. Without a rule of its own an op computes
        each element of its outputs once, and nothing where it only moves values (kind ``layout``)."""
        read = [s for p, s in inputs.items() if p not in self.gradient_only]
        nbytes = 0 if self.aliases else sum(s.nbytes() for s in (*read, *outputs.values()))
        if self.flops is not None:
            return self.flops(inputs, outputs, attrs), nbytes
        return 0 if self.kind == "layout" else sum(s.numel() for s in outputs.values()), nbytes


_FAMILIES = ("elementwise", "norm", "linear", "layout", "rope", "attention", "activation", "loss", "quantize", "moe", "grouped", "router",
             "collectives")  # fmt: skip


@functools.cache
def op_table() -> Mapping[str, Op]:
    table: dict[str, Op] = {}
    for family in _FAMILIES:
        module = importlib.import_module(f"{__package__}.{family}")
        for op in module.OPS:
            if op.name in table:
                raise RuntimeError(f"op {op.name!r} is defined twice")
            table[op.name] = op
    return table


# ---- helpers that the families share -------------------------------------------------------------------------------


def ports(*names: str) -> tuple[Port, ...]:
    """Ports from names; a trailing ``?`` marks an optional one."""
    return tuple(Port(n.rstrip("?"), n.endswith("?")) for n in names)


def acc(x: torch.Tensor) -> torch.Tensor:
    """``x`` in the dtype that references compute in: max(float32, its own)."""
    return x if x.dtype == torch.float64 else x.float()


def acc_dtype(spec: TensorSpec) -> str:
    return "float64" if spec.dtype == "float64" else "float32"


def demand(ok: bool, op: str, field: str, value: object, rule: str, remedy: str = "") -> None:
    if not ok:
        raise GraphError(f"{op}: {field} = {value}: {rule}" + (f"; {remedy}" if remedy else ""))


def finite(op: str, field: str, value: object) -> None:
    """Refuses what is not a finite Python number: tensors, which would have to be read, and NaN and infinities among them."""
    ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    demand(ok, op, field, value if isinstance(value, int | float | str | None) else type(value).__name__,
           "must be a finite Python number", f"pass {field} as a float")  # fmt: skip


def boolean(op: str, field: str, value: object) -> None:
    demand(isinstance(value, bool), op, field, value if isinstance(value, int | float | str | None) else type(value).__name__,
           "must be True or False")  # fmt: skip


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """[..., n] as [rows, n]: a view where its strides allow. ``reshape(-1, n)`` refuses n = 0."""
    return x if x.dim() == 2 else x.flatten(0, -2) if x.dim() > 2 else x.unsqueeze(0)


def same_shape(op: str, field: str, a: TensorSpec, b: TensorSpec) -> None:
    demand(a.shape == b.shape, op, field, a, f"must have the shape of {b}")


def same_dtype(op: str, **specs: TensorSpec | None) -> None:
    """All given specs share one float dtype."""
    given = {k: s for k, s in specs.items() if s is not None}
    first_name, first = next(iter(given.items()))
    demand(first.is_float, op, first_name, first, "must be a floating-point tensor")
    for name, s in given.items():
        demand(s.dtype == first.dtype, op, f"dtype of {name}", s.dtype,
               f"must equal that of {first_name} ({first.dtype})", "cast one of them")  # fmt: skip


def vector_of(op: str, field: str, spec: TensorSpec | None, size: Size) -> None:
    if spec is not None:
        demand(spec.shape == (size,), op, field, spec, f"must have shape [{size}]")


def size_product(shape: Iterable[Size]) -> int:
    n = 1
    for d in shape:
        n *= d.hint if isinstance(d, Dim) else d
    return n
