"""The backward graph of a forward graph, from the op table's gradients.

Between the two pass only named values: inputs, outputs and named ports of the ops (rstd, lse, ...). What is saved and
what is recomputed is a save policy: a set of op names whose outputs are rebuilt in the backward instead of saved.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from .ir import Graph, GraphBuilder, GraphError, Node, prune
from .ops.table import op_table


@dataclasses.dataclass(frozen=True, slots=True)
class Differentiated:
    """``forward`` computes its ``outputs`` and then the saved intermediates. ``backward`` takes ``saved`` and then one
    gradient per entry of ``grad_outputs`` (positions of forward outputs). ``grads[i]`` is the backward graph's value for
    forward input i, or None."""

    forward: Graph
    num_outputs: int
    backward: Graph
    saved: tuple[str, ...]
    grad_outputs: tuple[int, ...]
    grads: tuple[str | None, ...]


class GradContext:
    """What an op's gradient sees of the node that it differentiates."""

    def __init__(self, node: Node, derivation: _Derivation) -> None:
        self._node, self._d = node, derivation

    def attr(self, name: str) -> Any:
        return self._node.attr(name)

    def has(self, port: str) -> bool:
        return self._node.input(port) is not None

    def needs(self, port: str) -> bool:
        value = self._node.input(port)
        return value is not None and value in self._d.active

    def out(self, port: str) -> str | None:
        """The gradient that arrives at an output port, None where there is none."""
        value = self._d.current(self._node).output(port)
        return None if value is None else self._d.total(value)

    def spec(self, port: str):
        return self._d.specs[self._node.input(port)]

    def value(self, port: str) -> str:
        """A forward value for the backward to read; an optional output port is computed from here on."""
        value = self._node.input(port)
        if value is None:
            value = self._d.request(self._node, port)
        return self._d.saved_value(value)

    def zeros(self, port: str) -> str:
        return self._d.builder.op("zeros_like", like=self._d.saved_value(self._d.request(self._node, port)))

    def op(self, name: str, **arguments: Any) -> Any:
        return self._d.builder.op(name, **arguments)


class _Derivation:
    def __init__(self, graph: Graph, active: set[str]) -> None:
        self.graph, self.active, self.specs = graph, active, dict(graph.specs)
        self.nodes = {id(n): n for n in graph.nodes}
        # the backward's own names must not meet those of the forward, which it reads by name
        self.prefix = "g"
        while any(v.startswith((self.prefix, f"d{self.prefix}")) for v in self.specs):
            self.prefix += "_"
        self.builder = GraphBuilder(self.prefix)
        self.saved: dict[str, None] = {}
        self._grads: dict[str, list[str]] = {}

    def current(self, node: Node) -> Node:
        return self.nodes[id(node)]

    def request(self, node: Node, port: str) -> str:
        now = self.current(node)
        value = now.output(port)
        if value is None:
            op = op_table()[node.op]
            inferred = op.infer({p: self.specs[v] for p, v in now.inputs}, now.attributes)
            if port not in inferred:
                raise GraphError(f"{node.op}: its gradient reads port {port!r}, which it cannot compute here")
            value = f"{now.outputs[0][1]}.{port}"
            self.specs[value] = inferred[port]
            order = [p.name for p in op.outputs]
            outs = sorted((*now.outputs, (port, value)), key=lambda pv: order.index(pv[0]))
            self.nodes[id(node)] = dataclasses.replace(now, outputs=tuple(outs))
        return value

    def saved_value(self, value: str) -> str:
        if value not in self.builder.specs:
            self.builder.input(value, self.specs[value], weight=value in self.graph.weights)
        self.saved[value] = None
        return value

    def contribute(self, value: str, grad: str) -> None:
        self._grads.setdefault(value, []).append(grad)

    def total(self, value: str) -> str | None:
        parts = self._grads.get(value)
        if not parts:
            return None
        while len(parts) > 1:
            parts[:2] = [self.builder.op("add", a=parts[0], b=parts[1])]
        return parts[0]


def differentiate(
    graph: Graph,
    needs_grad: tuple[bool, ...],
    grad_outputs: tuple[int, ...] | None = None,
    recompute: frozenset[str] = frozenset(),
) -> Differentiated:
    """Derive the backward graph.

    ``needs_grad`` has one flag per input; ``grad_outputs`` lists the outputs that receive a gradient (default: every
    floating-point output); ``recompute`` names ops whose outputs are rebuilt in the backward from what is saved.
    """
    table = op_table()
    active = {v for v, n in zip(graph.inputs, needs_grad, strict=True) if n}
    for v in active:
        if not graph.specs[v].is_float:
            raise GraphError(f"input {v!r}: {graph.specs[v]} cannot receive a gradient; only floating-point tensors can")
    for node in graph.nodes:
        op = table[node.op]
        allowed = op.differentiable
        if any(v in active and (allowed is None or p in allowed) for p, v in node.inputs):
            if op.gradient is None:
                raise GraphError(f"op {node.op!r} has no gradient: pass it what needs none, such as x.detach(); double backward is not offered")
            active |= {v for p, v in node.outputs if p not in op.constant_outputs}
    d = _Derivation(graph, active)
    if grad_outputs is None:
        grad_outputs = tuple(i for i, v in enumerate(graph.outputs) if v in active and graph.specs[v].is_float)
    for i in grad_outputs:
        d.contribute(graph.outputs[i], d.builder.input(f"d{d.prefix}{i}", graph.specs[graph.outputs[i]]))
    for node in reversed(graph.nodes):
        live = [v for _, v in node.outputs if v in active and d._grads.get(v)]
        if not live or not any(v in active for _, v in node.inputs):
            continue
        for port, grad in table[node.op].gradient(GradContext(node, d)).items():
            value = node.input(port)
            if grad is not None and value in active:
                d.contribute(value, grad)
    grads = tuple(d.total(v) if n else None for v, n in zip(graph.inputs, needs_grad, strict=True))
    wanted = tuple(dict.fromkeys(g for g in grads if g is not None))
    backward = _fold_addends(d.builder.build(wanted))
    forward = dataclasses.replace(graph, nodes=tuple(d.current(n) for n in graph.nodes), specs=d.specs)
    backward, saved = _rematerialise(forward, _drop_unread(backward), recompute)
    order = {v: k for k, v in enumerate(saved)}
    grad_names = [f"d{d.prefix}{i}" for i in grad_outputs]
    backward = dataclasses.replace(backward, inputs=(*saved, *grad_names), weights=graph.weights & set(saved))
    extra = tuple(v for v in order if v not in graph.inputs and v not in graph.outputs)
    forward = prune(dataclasses.replace(forward, outputs=(*graph.outputs, *extra)))
    return Differentiated(forward, len(graph.outputs), backward, saved, grad_outputs, grads)


def _fold_addends(backward: Graph) -> Graph:
    """Hand what is added to an op's output to the op itself where it takes an addend (``Op.addends``): the gradient of a
    residual stream then costs no region of its own, and one rounding instead of two."""
    table, nodes = op_table(), list(backward.nodes)
    for node in [n for n in nodes if n.op == "add"]:
        made = {v: k for k, n in enumerate(nodes) for _, v in n.outputs}
        for own, other in (("a", "b"), ("b", "a")):
            part, rest = node.input(own), node.input(other)
            at = made.get(part)
            if at is None or made.get(rest, -1) >= at or part in backward.outputs:
                continue
            maker = nodes[at]
            port = next((table[maker.op].addends.get(p) for p, v in maker.outputs if v == part), None)
            if port is None or maker.input(port) is not None or sum(v == part for n in nodes for _, v in n.inputs) > 1:
                continue
            given = {**dict(maker.inputs), port: rest}
            inputs = tuple((p, given[p]) for p in table[maker.op].input_names if p in given)
            outputs = tuple((p, node.output("y") if v == part else v) for p, v in maker.outputs)
            nodes[at] = dataclasses.replace(maker, inputs=inputs, outputs=outputs)
            nodes.remove(node)
            break
    return prune(dataclasses.replace(backward, nodes=tuple(nodes)))


def _drop_unread(backward: Graph) -> Graph:
    read = {v for n in backward.nodes for _, v in n.inputs} | set(backward.outputs)
    return dataclasses.replace(backward, inputs=tuple(v for v in backward.inputs if v in read))


def _rematerialise(forward: Graph, backward: Graph, recompute: frozenset[str]) -> tuple[Graph, tuple[str, ...]]:
    """Replace saved values that ops in ``recompute`` produce by clones of those nodes in the backward graph."""
    producers = {v: n for n in forward.nodes for _, v in n.outputs}
    own = {v for n in backward.nodes for _, v in n.outputs}
    needed = [v for v in backward.inputs if v in forward.specs and v not in own]
    saved: list[str] = []
    cloned: list[Node] = []
    specs = dict(backward.specs)
    done: set[str] = set()

    def resolve(value: str) -> None:
        if value in done:
            return
        node = producers.get(value)
        if node is None or node.op not in recompute or value in forward.outputs:
            done.add(value)
            saved.append(value)
            return
        for _, v in node.inputs:
            resolve(v)
        for _, v in node.outputs:
            specs[v] = forward.specs[v]
            done.add(v)
        cloned.append(node)

    for value in needed:
        resolve(value)
    for v in saved:
        specs[v] = forward.specs[v]
    for k, node in enumerate(cloned):  # a clone of a node with a saved output computes that one under another name
        again = {v: f"{v}.again" for _, v in node.outputs if v in saved}
        if again:
            specs |= {new: specs[v] for v, new in again.items()}
            cloned[k] = dataclasses.replace(node, outputs=tuple((p, again.get(v, v)) for p, v in node.outputs))
    nodes = _views_apart((*cloned, *backward.nodes), set(saved), specs)
    graph = dataclasses.replace(backward, inputs=(*saved, *(v for v in backward.inputs if v not in needed)), nodes=nodes, specs=specs)
    return prune(graph), tuple(saved)


def _views_apart(nodes: tuple[Node, ...], saved: set[str], specs: dict[str, Any]) -> tuple[Node, ...]:
    """A clone that only makes views of saved values, once for each of its readers: it costs nothing, and what reads one view can then
    be put together with its source beside a reader of another view that runs in between. Adds to ``specs``."""
    table, nodes = op_table(), list(nodes)
    for at in reversed(range(len(nodes))):
        node = nodes[at]
        views = {v for _, v in node.outputs}
        readers = [i for i, n in enumerate(nodes) if any(v in views for _, v in n.inputs)]
        if not (table[node.op].aliases and all(v in saved for _, v in node.inputs)):
            continue
        copies = []
        for k, i in enumerate(readers[1:], 1):
            names = {v: f"{v}.{k}" for v in views}
            specs.update({new: specs[v] for v, new in names.items()})
            copies.append(dataclasses.replace(node, outputs=tuple((p, names[v]) for p, v in node.outputs)))
            nodes[i] = dataclasses.replace(nodes[i], inputs=tuple((p, names.get(v, v)) for p, v in nodes[i].inputs))
        nodes[at + 1 : at + 1] = copies
    return tuple(nodes)


def accumulate_weight_grads(backward: Graph, grads: tuple[str | None, ...], positions: tuple[int, ...]):
    """Let the weight gradients at ``positions`` of ``grads`` add into an extra float32 input each, behind the others.

    Returns (backward, grads, the positions that now do). A gradient that is not the output of one node with an ``accumulate`` port (a
    weight used twice, a norm's gamma) is left as it is and returned as usual.
    """
    nodes, inputs, specs, done, table = list(backward.nodes), list(backward.inputs), dict(backward.specs), [], op_table()
    for i in positions:
        value = grads[i]
        at = next((k for k, n in enumerate(nodes) if "accumulate" in table[n.op].input_names and n.output("dweight") == value), None)
        if value is None or at is None or backward.consumers(value) or sum(g == value for g in grads) > 1:
            continue
        name = f"main_grad{i}"
        spec = dataclasses.replace(specs[value], dtype="float32")
        nodes[at] = dataclasses.replace(nodes[at], inputs=(*nodes[at].inputs, ("accumulate", name)))
        inputs.append(name)
        specs[name] = specs[value] = spec
        done.append(i)
    if not done:
        return backward, grads, ()
    return dataclasses.replace(backward, nodes=tuple(nodes), inputs=tuple(inputs), specs=specs), grads, tuple(done)
