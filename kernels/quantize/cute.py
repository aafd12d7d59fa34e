"""quantize and dequantize on our own kernels (sm80/): one pass over memory, with the transposed copy too; the bits of
the reference."""

from __future__ import annotations

from typing import Any

import torch

from ...integration.engines.arch import Arch
from ...integration.engines.contract import BuildContext, CompiledRegion, Decline, Engine, Kernel, Offer, Region
from ...integration.graph.ir import ITEMSIZE
from ..common import quantized
from ..common.rows import rows

_DEVICE = "layerplan.kernels.quantize.sm80"
_STEP = quantized.EDGE


class CuteQuantize(Engine):
    """quantize of x [..., n], float32, bfloat16 or float16, with any row stride; dequantize of data [..., n], where n
    may be a size of run time (data_t has the rows there)."""

    id = "quantize/cute"

    def match(self, region: Region, arch: Arch) -> Offer | Decline:
        return self.offer_with(region, arch, quantized.defaults(_knobs(region)))

    def offer_with(self, region: Region, arch: Arch, knobs: tuple[tuple[str, Any], ...]) -> Offer | Decline:
        reason = quantized.knob_reason(knobs, _knobs(region))
        if reason is None and region.node.op == "quantize":
            x = region.spec("x")
            reason = quantized.size_reason(x.shape[:-1], x.shape[-1], x)
        if reason is not None:
            return Decline(reason)
        both = region.node.output("data_t") is not None if region.node.op == "quantize" else False
        apart = dict(knobs).get("apart", False)
        return Offer(
            efficiency=0.75 if both else 0.82,  # H200
            launches=1 + apart,
            host_us=14 + quantized.APART_HOST_US * apart,
            knobs=knobs,
            workspace_bytes=quantized.workspace_bytes(x.numel() // x.shape[-1], x.shape[-1]) if apart else 0,
            ahead_of_time=True,
        )

    def kernels(self, region: Region, arch: Arch, offer: Offer) -> tuple[Kernel, ...]:
        node = region.node
        if node.op == "quantize":
            x = region.spec("x")
            constants = {
                "source": x.dtype,
                **quantized.constants(node, tuple(region.wanted), x.shape[-1]),
                **dict(offer.knobs),
            }
            return (Kernel(f"{_DEVICE}.quantize:quantize", tuple(constants.items())),)
        data, width = region.spec("data"), region.spec("data").shape[-1]
        constants = {
            "dtype": data.dtype,
            "kind": quantized.KINDS[tuple(node.attr("block"))],
            "swizzled": node.attr("layout") == "swizzled",
            "out": node.attr("dtype"),
        }
        vectors = [width % _STEP == 0] if isinstance(width, int) else [True, False]
        return tuple(
            Kernel(f"{_DEVICE}.dequantize:dequantize", tuple({**constants, "vector": v}.items())) for v in vectors
        )

    def build(self, ctx: BuildContext) -> CompiledRegion:
        kernels = self.kernels(ctx.region, ctx.arch, ctx.offer)
        compiled = {dict(k.constants)["vector"]: ctx.compile(k) for k in kernels}
        if ctx.region.node.op == "quantize":
            launch = _quantize(ctx.region, compiled, dict(ctx.offer.knobs).get("apart", False))
        else:
            launch = _dequantize(ctx.region, compiled)
        return CompiledRegion(ctx.region.by_port(launch))


def _knobs(region: Region) -> dict[str, tuple[Any, ...]]:
    node = region.node
    if node.op != "quantize":
        return {}
    return quantized.knobs(node, tuple(region.wanted), region.spec("data"))


def _quantize(region: Region, compiled, apart: bool):
    ((vector, kernel),) = compiled.items()
    want = tuple(region.wanted)
    x = region.spec("x")
    width, step = x.shape[-1], 16 // ITEMSIZE[x.dtype] if vector else 1
    make, result = quantized.maker(region.node, want, width, apart), quantized.chosen(want)

    def launch(x, scale=None):
        made = make(x, x.shape[:-1])
        if x.numel():
            kernel(rows(x, width, step), 0 if scale is None else scale.data_ptr(), *quantized.addresses(made))
        else:
            quantized.fill_empty(made, scale)
        return result(made)

    return launch


def _dequantize(region: Region, compiled):
    dtype = getattr(torch, region.node.attr("dtype"))

    def launch(data, scale_inv):
        y = data.new_empty(*data.shape, dtype=dtype)
        if y.numel():
            width = data.shape[-1]
            vector = width % _STEP == 0
            scales = scale_inv if scale_inv.is_contiguous() else scale_inv.contiguous()
            compiled[vector](
                rows(data.view(torch.uint8), width, _STEP if vector else 1), *quantized.addresses((scales, y))
            )
        return y

    return launch
