"""swiglu, its gradient, and swiglu with the quantize that reads it, on our own kernels (sm80/): one pass over memory
each."""

from __future__ import annotations

from typing import Any

import torch

from ...integration.engines.arch import Arch
from ...integration.engines.contract import BuildContext, CompiledRegion, Decline, Engine, Kernel, Offer, Region
from ...integration.graph.ir import ITEMSIZE, Graph, Node
from ..common import quantized
from ..common.rows import dtype_reason, fresh, rows, vector

_DEVICE = "layerplan.kernels.activation.sm80.swiglu"
_THREADS, _VECTORS = (128, 64, 256, 512), (1, 2, 4)  # of a block; of a thread, in flight at once


class CuteSwiglu(Engine):
    """x [..., 2f] of float32, bfloat16 or float16 with any row stride, row_weight in any of these. Bitwise equal over
    reruns."""

    id = "activation/cute"

    def match(self, region: Region, arch: Arch) -> Offer | Decline:
        return self.offer_with(region, arch, quantized.defaults(_knobs(region)))

    def offer_with(self, region: Region, arch: Arch, knobs: tuple[tuple[str, Any], ...]) -> Offer | Decline:
        reason = _reason(region.graph, region.node) or quantized.knob_reason(knobs, _knobs(region))
        if reason is not None:
            return Decline(reason)
        return Offer(
            efficiency=0.8 if "drow_weight" in region.wanted else 0.86, host_us=10, knobs=knobs, ahead_of_time=True
        )

    def kernels(self, region: Region, arch: Arch, offer: Offer) -> tuple[Kernel, ...]:
        x, weight = region.spec("x"), region.spec("row_weight")
        constants = {
            "dtype": x.dtype,
            "width": x.shape[-1] // 2,
            "whole": _step(x) > 1,
            "clamp": region.node.attr("clamp"),
            "weight": weight and weight.dtype,
            **dict(offer.knobs),
        }
        name = "forward" if region.node.op == "swiglu" else "backward"
        if "drow_weight" in region.wanted:
            name, constants["dx"] = "backward_with_weights", "dx" in region.wanted
        return (Kernel(f"{_DEVICE}:{name}", tuple(constants.items())),)

    def build(self, ctx: BuildContext) -> CompiledRegion:
        (kernel,) = self.kernels(ctx.region, ctx.arch, ctx.offer)
        make = _forward if ctx.region.node.op == "swiglu" else _backward
        return CompiledRegion(ctx.region.by_port(make(ctx.region, ctx.compile(kernel))))


class CuteSwigluQuantize(Engine):
    """swiglu and the quantize of its result, which is rounded as swiglu rounds it and never reaches memory."""

    id = "swiglu_quantize/cute"
    patterns = (("swiglu", "quantize"),)

    def match(self, region: Region, arch: Arch) -> Offer | Decline:
        if region.ops not in self.patterns:
            return Decline("takes a swiglu with the quantize that reads it")
        return self.offer_with(region, arch, quantized.defaults(_quantize_knobs(region)))

    def offer_with(self, region: Region, arch: Arch, knobs: tuple[tuple[str, Any], ...]) -> Offer | Decline:
        gate, _ = region.nodes
        if gate.output("y") in region.graph.outputs:
            return Decline("others read the result of the swiglu, which is not stored")
        reason = _reason(region.graph, gate) or quantized.knob_reason(knobs, _quantize_knobs(region))
        if reason is not None:
            return Decline(reason)
        both, apart = region.nodes[1].output("data_t") in region.graph.outputs, dict(knobs).get("apart", False)
        x = region.graph.specs[gate.input("x")]
        return Offer(
            efficiency=0.8 if both else 0.86,  # H200
            launches=1 + apart,
            host_us=14 + quantized.APART_HOST_US * apart,
            knobs=knobs,
            workspace_bytes=quantized.workspace_bytes(x.numel() // x.shape[-1], x.shape[-1] // 2) if apart else 0,
            ahead_of_time=True,
        )

    def kernels(self, region: Region, arch: Arch, offer: Offer) -> tuple[Kernel, ...]:
        gate, quantize = region.nodes
        specs, want = region.graph.specs, quantized.wanted(region.graph, quantize)
        x, weight = specs[gate.input("x")], specs.get(gate.input("row_weight"))
        constants = {
            "source": x.dtype, "clamp": gate.attr("clamp"), "weight": weight and weight.dtype,
            **quantized.constants(quantize, want, x.shape[-1] // 2), **dict(offer.knobs),
        }  # fmt: skip
        return (Kernel(f"{_DEVICE}:forward_quantize", tuple(constants.items())),)

    def build(self, ctx: BuildContext) -> CompiledRegion:
        (kernel,) = self.kernels(ctx.region, ctx.arch, ctx.offer)
        constants = dict(kernel.constants)
        vectors, apart = constants["vector"], constants.get("apart", False)
        return CompiledRegion(_forward_quantize(ctx.region, ctx.compile(kernel), vectors, apart))


def _knobs(region: Region) -> dict[str, tuple[Any, ...]]:
    """Knob -> values, the default first. A sum over rows has its order. One vector of each operand a thread leaves
    registers for as many threads as a multiprocessor takes, and small blocks waste little of the last wave."""
    if "drow_weight" in region.wanted:
        return {}
    large = quantized.streamed(region.graph.specs[region.graph.outputs[0]])
    return {"threads": _THREADS, "vectors": _VECTORS, "streaming": (large, not large)}


def _quantize_knobs(region: Region) -> dict[str, tuple[Any, ...]]:
    quantize, graph = region.nodes[1], region.graph
    return quantized.knobs(quantize, quantized.wanted(graph, quantize), graph.specs[quantize.output("data")])


def _reason(graph: Graph, node: Node) -> str | None:
    """Why the kernels cannot take a swiglu or its gradient, None where they can."""
    specs = {p: graph.specs[v] for p, v in node.inputs}
    x = specs["x"]
    reason = dtype_reason(**specs)
    if reason is None and specs.get("dy") is not None and specs["dy"].dtype != x.dtype:
        reason = f"dy is {specs['dy'].dtype} and x {x.dtype}: reads one dtype"
    return reason or quantized.size_reason(x.shape[:-1], x.shape[-1], x)


def _step(x) -> int:
    """Elements of a vector of 16 bytes where gate and up divide into them, else 1."""
    step = 16 // ITEMSIZE[x.dtype]
    return step if x.shape[-1] // 2 % step == 0 else 1


def _weights(weight: torch.Tensor | None) -> torch.Tensor | None:
    return None if weight is None else vector(weight.reshape(-1), 1)


def _forward(region: Region, kernel):
    x = region.spec("x")
    width, step = x.shape[-1], _step(x)

    def launch(x, weight=None):
        y = x.new_empty(*x.shape[:-1], width // 2)
        if y.numel():
            kernel(rows(x, width, step), _weights(weight), *quantized.addresses((y,)))
        return y

    return launch


def _backward(region: Region, kernel):
    x, want = region.spec("x"), region.wanted
    width, step, keep_dx, sums = x.shape[-1], _step(x), "dx" in want, "drow_weight" in want

    def launch(dy, x, weight=None):
        dx = fresh(x) if keep_dx else None
        dweight = fresh(weight) if sums else None
        if x.numel():
            targets = quantized.addresses((dx, dweight) if sums else (dx,))
            kernel(rows(dy, width // 2, step), rows(x, width, step), _weights(weight), *targets)
        if len(want) == 1:
            return dx if keep_dx else dweight
        return (dx, dweight) if want[0] == "dx" else (dweight, dx)

    return launch


def _forward_quantize(region: Region, kernel, vectors: bool, apart: bool):
    graph, (gate, quantize) = region.graph, region.nodes
    want = quantized.wanted(graph, quantize)
    x = graph.specs[gate.input("x")]
    width, step = x.shape[-1], 16 // ITEMSIZE[x.dtype] if vectors else 1
    make, result = quantized.maker(quantize, want, width // 2, apart), quantized.chosen(want)
    ix, iw, iscale = (
        None if v is None else graph.inputs.index(v)
        for v in (gate.input("x"), gate.input("row_weight"), quantize.input("scale"))
    )

    def launch(*t):
        x, scale = t[ix], None if iscale is None else t[iscale]
        made = make(x, x.shape[:-1])
        if x.numel():
            kernel(
                rows(x, width, step),
                None if iw is None else _weights(t[iw]),
                0 if scale is None else scale.data_ptr(),
                *quantized.addresses(made),
            )
        else:
            quantized.fill_empty(made, scale)
        return result(made)

    return launch
