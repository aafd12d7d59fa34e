"""PyTorch's native norms. A residual is added by a separate kernel in front; a zero-centred gamma costs a small add."""

from __future__ import annotations

import torch

from ...integration.engines.arch import Arch
from ...integration.engines.contract import BuildContext, CompiledRegion, Decline, Engine, Offer, Region

_aten = torch.ops.aten


class TorchNorm(Engine):
    """x [..., n] to y in x's dtype, and the statistics rstd (and mean) [..., 1] in float32, float64 for float64; dx in x's dtype, dweight
    and dbias [n] in the weight's."""

    id = "norm/torch"

    def match(self, region: Region, arch: Arch) -> Offer | Decline:
        node, x = region.node, region.spec("x")
        rms = node.op.startswith("rms")
        if rms and not arch.is_gpu:
            return Decline("aten has no native RMSNorm on a CPU")
        weight = region.spec("weight")
        if weight is not None and weight.dtype != x.dtype:
            return Decline(f"aten wants weight ({weight.dtype}) and x ({x.dtype}) of one dtype")
        if rms and (region.spec("bias") is not None or region.spec("dbias") is not None):
            return Decline("aten's RMSNorm has no bias")
        bias = region.spec("bias")
        if not rms and bias is not None and (weight is None or bias.dtype != x.dtype):
            return Decline("aten's LayerNorm wants a bias of x's dtype together with a weight")
        if region.spec("dbias") is not None and (weight is None or region.spec("dbias").dtype != x.dtype):
            return Decline("aten's LayerNorm gives a bias gradient of x's dtype, and only together with a weight")
        if node.attr("zero_centered") and x.dtype != "float32":
            return Decline("1 + gamma would be rounded to the weight's dtype before the product")
        residual = region.spec("residual") is not None or region.spec("dresidual") is not None
        if node.op.endswith("_bwd"):
            return Offer(efficiency=0.35 if residual else 0.37, launches=2 + residual, host_us=15 + 6 * residual)
        return Offer(efficiency=0.45 if residual else 0.63, launches=1 + residual, host_us=9 + 6 * residual)

    def build(self, ctx: BuildContext) -> CompiledRegion:
        node = ctx.region.node
        make = _backward if node.op.endswith("_bwd") else _forward
        return CompiledRegion(make(ctx.region, rms=node.op.startswith("rms"), gpu=ctx.arch.is_gpu))

    def autograd(self, region: Region, arch: Arch):
        x, eps = region.spec("x"), region.node.attr("eps")
        shape, ports = [x.shape[-1]], [p for p, _ in region.node.inputs]
        plain = len(region.graph.inputs) == len(ports) and not region.node.attr("zero_centered")
        if not plain or not (arch.is_gpu or x.dtype == "float32"):
            return None
        fused_rms, layer = torch._fused_rms_norm, torch.native_layer_norm
        if ports == ["x", "weight"]:
            if region.node.op == "rms_norm":
                return lambda x, w: fused_rms(x, shape, w, eps)[0]
            return lambda x, w: layer(x, shape, w, None, eps)[0]
        if ports == ["x", "weight", "bias"]:
            return lambda x, w, b: layer(x, shape, w, b, eps)[0]
        return None


def _positions(region: Region) -> dict[str, int]:
    order = {v: i for i, v in enumerate(region.graph.inputs)}
    return {p: order[v] for p, v in region.node.inputs}


def _forward(region: Region, rms: bool, gpu: bool):
    node, at = region.node, _positions(region)
    want, eps, zero = region.wanted, node.attr("eps"), node.attr("zero_centered")
    shape = [region.spec("x").shape[-1]]
    stat = torch.float64 if region.spec("x").dtype == "float64" else torch.float32
    fused_rms, layer = torch._fused_rms_norm, torch.native_layer_norm
    if set(at) == {"x", "weight"} and len(region.graph.inputs) == 2 and not zero and (gpu or region.spec("x").dtype == "float32"):
        common = _common_forward(rms, want, shape, eps)
        if common is not None:
            return common

    def launch(*t):
        x, w = t[at["x"]], t[at["weight"]] if "weight" in at else None
        out = {}
        if "residual" in at:
            out["residual_out"] = x = x + t[at["residual"]]
        if zero and w is not None:
            w = w + 1
        if rms:
            out["y"], rstd = fused_rms(x, shape, w, eps)
        else:
            out["y"], mean, rstd = layer(x, shape, w, t[at["bias"]] if "bias" in at else None, eps)
            out["mean"] = mean.to(stat)
        out["rstd"] = rstd.to(stat)  # aten on a CPU gives them in the dtype of x
        return out[want[0]] if len(want) == 1 else tuple(out[p] for p in want)

    return launch


def _common_forward(rms: bool, want: list[str], shape: list[int], eps: float):
    """x and weight alone, in x's order: no dict on the hot path. None where another result is wanted."""
    fused_rms, layer = torch._fused_rms_norm, torch.native_layer_norm
    if rms and want == ["y", "rstd"]:
        return lambda x, w: fused_rms(x, shape, w, eps)
    if rms and want == ["y"]:
        return lambda x, w: fused_rms(x, shape, w, eps)[0]
    if not rms and want == ["y", "mean", "rstd"]:
        return lambda x, w: layer(x, shape, w, None, eps)
    return None


def _backward(region: Region, rms: bool, gpu: bool):
    node, at = region.node, _positions(region)
    want, zero = region.wanted, node.attr("zero_centered")
    shape = [region.spec("x").shape[-1]]
    rms_backward, layer_backward = _aten._fused_rms_norm_backward.default, _aten.native_layer_norm_backward.default
    mask = ["dx" in want, "dweight" in want]
    if rms and not zero and want == ["dx", "dweight"] and list(at) == ["dy", "x", "weight", "rstd"] and len(region.graph.inputs) == 4:
        return lambda dy, x, w, rstd: rms_backward(dy, x, shape, rstd, w, mask)
    dbias = "dbias" in want
    mask_layer = [*mask, dbias]
    usual = want == ["dx", "dweight"] and list(at) == ["dy", "x", "weight", "mean", "rstd"] and len(region.graph.inputs) == 5
    if not rms and gpu and not zero and usual:
        return lambda dy, x, w, mean, rstd: layer_backward(dy, x, shape, mean, rstd, w, None, mask_layer)[:2]

    def launch(*t):
        x, dy, rstd = t[at["x"]], t[at["dy"]], t[at["rstd"]]
        w = t[at["weight"]] if "weight" in at else None
        if zero and w is not None:
            w = w + 1
        if rms:
            dx, dw = rms_backward(dy, x, shape, rstd, w, mask)
            out = {"dx": dx, "dweight": dw}
        else:
            mean = t[at["mean"]]
            if not gpu:  # on a CPU aten wants the statistics in the dtype of x
                mean, rstd = mean.to(x.dtype), rstd.to(x.dtype)
            # aten reads the bias only to know that there is one
            dx, dw, db = layer_backward(dy, x, shape, mean, rstd, w, w if dbias else None, mask_layer)
            out = {"dx": dx, "dweight": dw, "dbias": db}
        if "dresidual" in at and "dx" in want:
            out["dx"] = out["dx"] + t[at["dresidual"]]
        return out[want[0]] if len(want) == 1 else tuple(out[p] for p in want)

    return launch
