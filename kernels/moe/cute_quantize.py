"""permute together with the quantize that reads its rows, on our own kernels (sm80/quantized.py)."""

from __future__ import annotations

from typing import Any

from ...integration.engines.arch import Arch
from ...integration.engines.contract import (
    BuildContext,
    CompiledRegion,
    Decline,
    Engine,
    Kernel,
    Offer,
    Pattern,
    Region,
)
from ...integration.graph.ir import ITEMSIZE
from ...integration.graph.ops.quantize import BLOCK
from ..common import quantized
from ..common.rows import dtype_reason, rows
from . import places

_DEVICE = "layerplan.kernels.moe.sm80.quantized:spread_quantize"
_OPS = ("permute", "quantize")
_THREADS, _VECTORS = (128, 64, 256, 512), (1, 2, 4)  # of a block; of a thread
_ACCESS = 16  # bytes


class CuteMoEQuantize(Engine):
    """Rows of x [tokens, n] to their slots as fp8 in blocks of 1 x 128; in x's dtype they are not stored. A row is
    quantised once for all slots of its token. Rows behind the last group are left as they are."""

    id = "moe_quantize/cute"
    patterns = (Pattern(_OPS, ((0, "rows", 1, "x"),)),)

    def match(self, region: Region, arch: Arch) -> Offer | Decline:
        if region.ops != _OPS:
            return Decline("takes a permute with the quantize that reads its rows")
        return self.offer_with(region, arch, quantized.defaults(_knobs(region)))

    def offer_with(self, region: Region, arch: Arch, knobs: tuple[tuple[str, Any], ...]) -> Offer | Decline:
        reason = _reason(region) or quantized.knob_reason(knobs, _knobs(region))
        if reason is not None:
            return Decline(reason)
        return Offer(efficiency=0.75, host_us=15, knobs=knobs, ahead_of_time=True)

    def kernels(self, region: Region, arch: Arch, offer: Offer) -> tuple[Kernel, ...]:
        (permute, quantize), specs = region.nodes, region.graph.specs
        x, slots, align = specs[permute.input("x")], specs[permute.input("row_map")].shape[1], permute.attr("align")
        numbers = _numbers(region)
        constants = {
            "dtype": x.dtype, "width": x.shape[1], "slots": slots, "weight": specs[numbers].dtype if numbers else None,
            "experts": specs[permute.input("offsets")].shape[0] if align > 1 else 0, "align": align,
            "fp8": quantize.attr("dtype"), "power_of_two": quantize.attr("power_of_two"), **dict(offer.knobs),
        }  # fmt: skip
        return (Kernel(_DEVICE, tuple(constants.items())),)

    def build(self, ctx: BuildContext) -> CompiledRegion:
        (kernel,) = self.kernels(ctx.region, ctx.arch, ctx.offer)
        return CompiledRegion(_launch(ctx.region, ctx.compile(kernel)))


def _numbers(region: Region) -> str | None:
    """The rows' probabilities where somebody reads them."""
    value = region.nodes[0].output("row_probs")
    return value if value in region.graph.outputs else None


def _knobs(region: Region) -> dict[str, tuple[Any, ...]]:
    """Knob -> values, the default first."""
    large = quantized.streamed(region.graph.specs[region.nodes[1].output("data")])
    return {"threads": _THREADS, "vectors": _VECTORS, "streaming": (large, not large)}


def _reason(region: Region) -> str | None:
    """Why the kernel cannot take the region, None where it can."""
    (permute, quantize), specs = region.nodes, region.graph.specs
    x, probs = specs[permute.input("x")], specs.get(permute.input("probs"))
    if permute.output("rows") in region.graph.outputs:
        return "others read the rows, which are not stored"
    if (block := tuple(quantize.attr("block"))) != BLOCK:
        return f"block {block}: has code for {BLOCK} alone"
    if quantized.transposes(quantized.wanted(region.graph, quantize)):
        return ("the transposed copy takes 128 rows of the result at once: row_map says where a token goes, "
                "not where a row comes from")  # fmt: skip
    if reason := dtype_reason(x=x, probs=probs) or quantized.size_reason(x.shape[:1], x.shape[1], x):
        return reason
    if x.shape[1] * ITEMSIZE[x.dtype] % _ACCESS:
        step = _ACCESS // ITEMSIZE[x.dtype]
        return f"rows of {x.shape[1]} values: the kernel takes {step} at once, and this does not divide by them"
    return places.slots_reason(specs[permute.input("row_map")].shape[1])


def _launch(region: Region, kernel):
    graph, (permute, quantize) = region.graph, region.nodes
    x, align = graph.specs[permute.input("x")], permute.attr("align")
    width, step = x.shape[1], _ACCESS // ITEMSIZE[x.dtype]
    make = quantized.maker(quantize, quantized.wanted(graph, quantize), width)
    find = places.finder({p: graph.inputs.index(v) for p, v in permute.inputs})
    ends, count = places.ends(align, find), places.room(graph.specs[permute.input("offsets")].shape[0], align)
    made_of = {permute.output("row_probs"): 2, quantize.output("data"): 0, quantize.output("scale_inv"): 1}
    order, numbers = [made_of[v] for v in graph.outputs], _numbers(region) is not None

    def launch(*given):
        x, row_map, probs = find(given, "x"), find(given, "row_map"), find(given, "probs") if numbers else None
        total = count(row_map)
        made = (*make(x, (total,))[:2], probs.new_empty(total) if numbers else None)
        if x.shape[0]:
            kernel(rows(x, width, step), places.whole(row_map), *ends(given), places.whole(probs) if numbers else None,
                   *quantized.addresses(made))  # fmt: skip
        return made[order[0]] if len(order) == 1 else tuple([made[i] for i in order])

    return launch
