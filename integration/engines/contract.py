"""The contract between planner and engines.

An engine is one class per device code path. It answers one question about a region, ``match``: an Offer or a Decline
with a reason, from data alone (specs, attributes, arch), never from the device. ``build`` is the expensive step.
``CompiledRegion.launch`` is the hot path: the caller's stream, no host sync, nothing allocated that was not announced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from ..graph.ir import Graph, Node
from ..graph.ops.table import op_table
from .arch import Arch


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """``efficiency`` is the fraction of the roofline that the engine reaches here (a prior, until a record says
    better); ``launches`` is the number of kernels; ``host_us`` what a launch takes on the host: the least that it costs
    in a row of small ones; ``emulated`` marks a path that stands in for missing hardware."""

    efficiency: float
    launches: int = 1
    host_us: float = 5.0
    knobs: tuple[tuple[str, Any], ...] = ()
    workspace_bytes: int = 0
    capture_safe: bool = True
    deterministic: bool = True
    ahead_of_time: bool = False
    emulated: bool = False

    def seconds(self, roofline: float) -> float:
        """The prediction for a region that takes ``roofline`` seconds at least."""
        return max(roofline / self.efficiency + self.launches * 2e-6, self.host_us * 1e-6)

    def to_json(self) -> dict[str, Any]:
        """Field -> value, the knobs as a dict."""
        return {**dataclasses.asdict(self), "knobs": dict(self.knobs)}

    def __str__(self) -> str:
        """What a user weighs beside the time, in a few words."""
        words = [f"{self.launches} launch{'es' if self.launches > 1 else ''}", f"{self.host_us:g} us host"]
        words += [f"{self.workspace_bytes / 2**20:.1f} MiB workspace"] if self.workspace_bytes else []
        words += [] if self.capture_safe else ["not in a CUDA graph"]
        words += [] if self.deterministic else ["not deterministic"]
        words += ["compiles ahead"] if self.ahead_of_time else []
        words += ["emulated"] if self.emulated else []
        return ", ".join(words)


@dataclasses.dataclass(frozen=True, slots=True)
class Decline:
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """A connected part of a graph that one engine runs. ``graph`` is its own small graph: its inputs are what it reads
    from outside, its outputs what is read from it, in the order in which ``launch`` takes and returns them."""

    graph: Graph

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.graph.nodes

    @property
    def ops(self) -> tuple[str, ...]:
        return tuple(n.op for n in self.graph.nodes)

    @property
    def node(self) -> Node:
        (node,) = self.graph.nodes
        return node

    def spec(self, port: str):
        """Spec of a port of the region's only node, None where it is not connected."""
        value = self.node.input(port) or self.node.output(port)
        return None if value is None else self.graph.specs[value]

    @property
    def wanted(self) -> list[str]:
        """Output ports of the region's only node that something reads, in the order in which ``launch`` returns them. A
        required port that nothing reads is not among them."""
        port = {v: p for p, v in self.node.outputs}
        return [port[v] for v in self.graph.outputs]

    def key(self) -> str:
        """Signature and shape class: what a plan file pins an engine by."""
        return f"{self.graph.signature()}@{'x'.join(str(d.hint) for d in self.graph.dims())}"

    def edges(self) -> tuple[tuple[int, str, int, str], ...]:
        """Values that the region's nodes pass to each other: (producer's index, its port, reader's index, its port)."""
        made = {v: (i, port) for i, n in enumerate(self.nodes) for port, v in n.outputs}
        return tuple((*made[v], i, port) for i, n in enumerate(self.nodes) for port, v in n.inputs if v in made)

    def by_port(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        """``launch`` takes one tensor per port of the region's only node; a value that several ports read is one input."""
        ports = [self.graph.inputs.index(v) for _, v in self.node.inputs]
        if ports == list(range(len(self.graph.inputs))):
            return launch
        return lambda *t: launch(*(t[i] for i in ports))

    def cost(self) -> tuple[int, int]:
        """(flops, bytes): flops of all nodes, bytes of what crosses the region's border."""
        table, flops, aliases = op_table(), 0, True
        for n in self.nodes:
            op = table[n.op]
            specs = self.graph.specs
            flops += op.cost({p: specs[v] for p, v in n.inputs}, {p: specs[v] for p, v in n.outputs}, n.attributes)[0]
            aliases = aliases and op.aliases
        read = {v for n in self.nodes for p, v in n.inputs if p not in table[n.op].gradient_only}
        border = (*(v for v in self.graph.inputs if v in read), *self.graph.outputs)
        return flops, 0 if aliases else sum(self.graph.specs[v].nbytes() for v in border)

    def dtype(self) -> str:
        return next((self.graph.specs[v].dtype for v in self.graph.inputs if self.graph.specs[v].is_float), "float32")

    def roofline_seconds(self, arch: Arch) -> float:
        """What the region takes at least, by datasheet rates."""
        return arch.roofline(*self.cost(), self.dtype())

    def predicted_seconds(self, offer: Offer, arch: Arch) -> float:
        return offer.seconds(self.roofline_seconds(arch))


@dataclasses.dataclass(frozen=True, slots=True)
class Pattern:
    """A connected part of a graph, in any order: its nodes' ops, and the values that they pass to each other as
    ``Region.edges`` gives them (producer's index, its port, reader's index, its port); None stands for any port."""

    ops: tuple[str, ...]
    edges: tuple[tuple[int, str | None, int, str | None], ...]

    @staticmethod
    def of(given: tuple[str, ...] | Pattern) -> Pattern:
        """A pattern as it is, ops as a chain: each reads something of the one before it."""
        if isinstance(given, Pattern):
            return given
        return Pattern(given, tuple((i, None, i + 1, None) for i in range(len(given) - 1)))


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """One of our own kernels. ``target`` is ``module:function`` of its device code; ``constants`` are the keyword arguments of that
    function, JSON values: together with the arch all that the code depends on, and never a tensor."""

    target: str
    constants: tuple[tuple[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class BuildContext:
    """``compile(kernel)`` gives one of our own kernels for ``arch``, from the cache where it is there: a function over tensors that
    launches on the current stream."""

    region: Region
    arch: Arch
    offer: Offer
    compile: Callable[[Kernel], Callable[..., Any]] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledRegion:
    """``launch(*inputs)`` returns the output tensor, or a tuple where the region has several outputs."""

    launch: Callable[..., Any]


class Engine:
    """Base of all engines. ``id`` is permanent and never reused. ``fuses`` engines take connected regions of several
    nodes from ``ops``; the others take single nodes, or what ``patterns`` describe. ``not_ahead``: why nothing of
    it is compiled ahead, where nothing is."""

    id: ClassVar[str]
    fuses: ClassVar[bool] = False
    not_ahead: ClassVar[str] = "its library holds compiled kernels"
    patterns: ClassVar[tuple[tuple[str, ...] | Pattern, ...]] = ()  # a tuple of ops is ``Pattern.chain`` of them

    def match(self, region: Region, arch: Arch) -> Offer | Decline:
        raise NotImplementedError

    def offer_with(self, region: Region, arch: Arch, knobs: tuple[tuple[str, Any], ...]) -> Offer | Decline:
        """``match`` with the knobs of a plan file. An engine whose knobs can take other values than ``match`` chose
        overrides this and says which values it can run with."""
        answer = self.match(region, arch)
        if isinstance(answer, Offer) and dict(answer.knobs) != dict(knobs):
            return Decline(f"runs with knobs {dict(answer.knobs)} alone, not with {dict(knobs)}")
        return answer

    def kernels(self, region: Region, arch: Arch, offer: Offer) -> tuple[Kernel, ...]:
        """Our own kernels that ``build`` will ask ``ctx.compile`` for: what can be compiled ahead."""
        return ()

    def ahead_variables(self, ctx: BuildContext, folder: str) -> dict[str, str] | None:
        """The environment variables by which the engine's library keeps what it compiles in a cache below ``folder``, of
        that arch's own: set where ``compile_ahead`` runs, and where its result is used. None where nothing of a library
        can be compiled ahead; ``not_ahead`` then says why."""
        return None

    def compile_ahead(self, ctx: BuildContext) -> None:
        """Compiles what ``build`` would into the library's cache, in a process of its own whose environment names the
        arch, and without asking the driver for anything."""
        raise NotImplementedError

    def build(self, ctx: BuildContext) -> CompiledRegion:
        raise NotImplementedError

    def autograd(self, region: Region, arch: Arch) -> Callable[..., Any] | None:
        """A function over the region's inputs that the library itself differentiates, with the kernels that ``build`` gives
        for this region and for its gradient; None where there is none. It returns the region's first output alone."""
        return None
