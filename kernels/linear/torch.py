"""cuBLAS (and oneDNN on a CPU) through aten."""

from __future__ import annotations

import torch

from ...integration.engines.arch import Arch
from ...integration.engines.contract import BuildContext, CompiledRegion, Decline, Engine, Offer, Region
from ...integration.graph.ops.table import as_rows

_mm = torch.mm
_linear = torch._C._nn.linear  # F.linear without its Python frame


class TorchLinear(Engine):
    """x [..., k] and weight [n, k] to y [..., n], and both gradients, in the inputs' dtype. A weight gradient [n, k] with
    ``accumulate`` is added to that tensor in place, float32 or the inputs' dtype, and returned."""

    id = "linear/torch"

    def match(self, region: Region, arch: Arch) -> Offer | Decline:
        if region.node.op == "linear_wgrad":
            acc, dy = region.spec("accumulate"), region.spec("dy")
            if acc is not None and acc.dtype not in ("float32", dy.dtype):
                return Decline(f"accumulates into float32 or {dy.dtype}, not {acc.dtype}")
        return Offer(efficiency=0.79, host_us=12, ahead_of_time=True)

    def build(self, ctx: BuildContext) -> CompiledRegion:
        return CompiledRegion(ctx.region.by_port(self._launch(ctx)))

    def autograd(self, region: Region, arch: Arch):
        return _linear if len(region.graph.inputs) == len(region.node.inputs) else None

    @staticmethod
    def _launch(ctx: BuildContext):
        region, op = ctx.region, ctx.region.node.op
        if op == "linear":
            return _linear
        rows = region.spec("dy").rank == 2
        if op == "linear_dgrad":
            return _mm if rows else torch.matmul
        acc = region.spec("accumulate")
        if acc is None:
            return _wgrad2d if rows else _wgrad
        if acc.dtype == region.spec("dy").dtype:
            return _wgrad_accumulate_same
        # cuBLAS adds the fp32 accumulator in its epilogue; the CPU has no such product
        return _wgrad_accumulate_fp32 if ctx.arch.is_gpu else _wgrad_accumulate_two_steps


def _wgrad2d(dy, x):
    return _mm(dy.t(), x)


def _wgrad(dy, x):
    return _mm(as_rows(dy).t(), as_rows(x))


def _wgrad_accumulate_same(dy, x, accumulate):
    return accumulate.addmm_(as_rows(dy).t(), as_rows(x))


def _wgrad_accumulate_fp32(dy, x, accumulate):
    return torch.ops.aten.addmm.dtype_out(accumulate, as_rows(dy).t(), as_rows(x), torch.float32, out=accumulate)


def _wgrad_accumulate_two_steps(dy, x, accumulate):
    # the product of low-precision operands is rounded once only if it is made in float32
    return accumulate.addmm_(as_rows(dy).float().t(), as_rows(x).float())
