"""Products of groups of rows through torch: one CUTLASS kernel for all groups on a GPU, a loop over them on a CPU."""

from __future__ import annotations

import itertools

import torch

from ...integration.engines.arch import Arch
from ...integration.engines.contract import BuildContext, CompiledRegion, Decline, Engine, Offer, Region
from ...integration.graph.ir import ITEMSIZE
from ..common.rows import dense

_MOST_GROUPS = 1023
_EMPTY_GROUPS = ("sm_90", "cpu")
"""Where the weight gradient of an empty group is known to be zero: on sm_100 it was not (pytorch issue 172439)."""
_BYTES = 16
_DTYPES = ("bfloat16", "float16", "float32")


class TorchGroupedMatmul(Engine):
    """x [t, k], weight [e, n, k], offsets [e] to y [t, n], and both gradients. On a GPU bfloat16 alone has a kernel:
    torch runs the other dtypes group by group and reads the offsets on the host for that."""

    id = "grouped_matmul/torch"

    def match(self, region: Region, arch: Arch) -> Offer | Decline:
        op, offsets, operand = region.node.op, region.spec("offsets"), region.spec("dy") or region.spec("x")
        widths = [region.spec(p) for p in ("x", "dy", "weight") if region.spec(p) is not None]
        if any(
            not isinstance(n, int) or n * ITEMSIZE[s.dtype] % _BYTES
            for s in widths
            for n in s.shape[-2 if s.rank == 3 else -1 :]
        ):
            return Decline(
                f"{', '.join(map(str, widths))}: rows of a multiple of {_BYTES} bytes, which not all of these have"
            )
        if op == "grouped_matmul_wgrad" and region.spec("accumulate") is not None:
            given = region.spec("accumulate").dtype
            if arch.is_gpu:
                return Decline(f"rounds a weight gradient to {operand.dtype} before it could be added to {given}")
            if given not in ("float32", operand.dtype):
                return Decline(f"accumulates into float32 or {operand.dtype}, not {given}")
        if operand.dtype not in _DTYPES:
            return Decline(f"multiplies {', '.join(_DTYPES)}, not {operand.dtype}")
        if not arch.is_gpu:
            return Offer(efficiency=0.5, launches=1, host_us=40, ahead_of_time=True)
        if operand.dtype != "bfloat16":
            return Decline(
                f"has one kernel for all groups of bfloat16; those of {operand.dtype} would wait for the offsets"
            )
        if offsets.shape[0] > _MOST_GROUPS:
            return Decline(f"{offsets.shape[0]} groups: takes at most {_MOST_GROUPS}")
        if op == "grouped_matmul_wgrad" and arch.name not in _EMPTY_GROUPS:
            return Decline(f"the weight gradients of empty groups are not zero on {arch.name} (pytorch issue 172439)")
        # H200: 594, 535 and 651 of 989 TFLOP/s at 64, 128 and 8 experts
        return Offer(efficiency=0.58, launches=3, host_us=25, ahead_of_time=True)

    def build(self, ctx: BuildContext) -> CompiledRegion:
        region, op = ctx.region, ctx.region.node.op
        if op == "grouped_matmul_wgrad":
            launch = _wgrad if region.spec("accumulate") is None else _wgrad_accumulate
        else:
            launch = _product if op == "grouped_matmul" else _dgrad
        return CompiledRegion(region.by_port(launch))


def _product(x, weight, offsets):
    if not x.shape[0]:
        return x.new_empty(0, weight.shape[1])
    return torch._grouped_mm(dense(x), dense(weight).transpose(1, 2), offs=offsets.contiguous())


def _dgrad(dy, weight, offsets):
    if not dy.shape[0]:
        return dy.new_empty(0, weight.shape[2])
    return torch._grouped_mm(dense(dy), dense(weight), offs=offsets.contiguous())


def _wgrad(dy, x, offsets):
    if not dy.shape[0]:
        return dy.new_zeros(len(offsets), dy.shape[1], x.shape[1])
    return torch._grouped_mm(dense(dy).t(), dense(x), offs=offsets.contiguous())


def _wgrad_accumulate(dy, x, offsets, accumulate):
    """On a CPU, where the offsets can be read: empty groups are left as they are."""
    for into, (begin, end) in zip(accumulate.unbind(0), itertools.pairwise([0, *offsets.tolist()]), strict=True):
        if end > begin:
            into.addmm_(dy[begin:end].to(into.dtype).t(), x[begin:end].to(into.dtype))
    return accumulate
