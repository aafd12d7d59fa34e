"""Products of groups of rows on quack-kernels: grouped_matmul, its data gradient, its weight gradient with float32
accumulation. One kernel each, whatever the counts; the device alone reads the offsets."""

from __future__ import annotations

import functools

import torch

from ...integration.engines.arch import Arch
from ...integration.engines.contract import BuildContext, CompiledRegion, Decline, Offer, Region
from ..common.quack import QuackEngine
from ..common.rows import rows
from .quack import STEP, compile_product, product_reason


class QuackGroupedMatmul(QuackEngine):
    id = "grouped_matmul/quack"

    def match(self, region: Region, arch: Arch) -> Offer | Decline:
        accumulate = region.spec("accumulate")
        reason = product_reason(region.graph, region.node)
        if reason is None and accumulate is not None and accumulate.dtype != "float32":
            reason = f"adds in float32, and accumulate is {accumulate.dtype}"
        if reason is not None:
            return Decline(reason)
        # H200: 633, 627 and 666 of 989 TFLOP/s forward at 64, 128 and 8 experts, 635 the weight gradient
        return Offer(efficiency=0.64 if arch.name == "sm_90" else 0.5, launches=2, host_us=38)

    def build(self, ctx: BuildContext) -> CompiledRegion:
        prepare()
        make = {"grouped_matmul": _forward, "grouped_matmul_dgrad": _dgrad, "grouped_matmul_wgrad": _wgrad}[
            ctx.region.node.op
        ]
        return CompiledRegion(ctx.region.by_port(make(ctx.region, ctx.arch)))


@functools.cache
def _zero(device: torch.device) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)


def prepare() -> None:
    """What ``ends_of`` keeps: made while an engine is built, since memory from inside a capture is the graph's."""
    if torch.cuda.is_available():
        _zero(torch.device("cuda", torch.cuda.current_device()))


def ends_of(offsets: torch.Tensor) -> torch.Tensor:
    """The groups' ends with a 0 in front, [e + 1], as the package's kernels read them: one launch, where padding is two."""
    return torch.cat((_zero(offsets.device), offsets))


def matrices(w: torch.Tensor, step: int) -> torch.Tensor:
    """``w`` [e, n, k] row-major at an address of ``step`` elements: itself or a copy."""
    return (
        w
        if w.is_contiguous() and not w.data_ptr() % (step * w.itemsize)
        else w.clone(memory_format=torch.contiguous_format)
    )


def _forward(region: Region, arch: Arch):
    _, n, k = region.spec("weight").shape
    dtype = region.spec("x").dtype
    product = compile_product(arch, dtype, dtype, a_major="k", b_kn=False, ragged="m")

    def launch(x, weight, offsets):
        y = x.new_empty(x.shape[0], n)
        if y.numel():
            product(rows(x, k, STEP), matrices(weight, STEP), y, ends_of(offsets))
        return y

    return launch


def _dgrad(region: Region, arch: Arch):
    _, n, k = region.spec("weight").shape
    dtype = region.spec("dy").dtype
    product = compile_product(arch, dtype, dtype, a_major="k", b_kn=True, ragged="m")

    def launch(dy, weight, offsets):
        dx = dy.new_empty(dy.shape[0], k)
        if dx.numel():
            product(rows(dy, n, STEP), matrices(weight, STEP).transpose(1, 2), dx, ends_of(offsets))
        return dx

    return launch


def _wgrad(region: Region, arch: Arch):
    n, k, experts = region.spec("dy").shape[-1], region.spec("x").shape[-1], region.spec("offsets").shape[0]
    dtype, add = region.spec("dy").dtype, region.spec("accumulate") is not None
    product = compile_product(arch, dtype, "float32" if add else dtype, a_major="m", b_kn=True, add=add, ragged="k")

    def plain(dy, x, offsets):
        if not dy.numel():
            return dy.new_zeros(experts, n, k)
        dweight = dy.new_empty(experts, n, k)
        product(rows(dy, n, STEP).t(), rows(x, k, STEP).t(), dweight, ends_of(offsets))
        return dweight

    def accumulate(dy, x, offsets, total):
        if dy.numel():
            place = matrices(total, 4)  # itself, or a copy where TMA cannot write to it
            product(rows(dy, n, STEP).t(), rows(x, k, STEP).t(), place, ends_of(offsets))
            if place is not total:
                total.copy_(place)
        return total

    return accumulate if add else plain
