"""Products of groups of rows on DeepGEMM (package deep_gemm): grouped_matmul, its data gradient and, from sm_100 on,
its weight gradient with float32 accumulation. One kernel each, whatever the counts; the device alone reads the offsets.

The package lets a group begin at the next multiple of 128 rows behind the end of the one before it. Groups that all end
at such multiples lie there already: ``offsets`` are the ends that it asks for."""

from __future__ import annotations

import importlib

import torch

from ...integration.engines.arch import Arch
from ...integration.engines.contract import BuildContext, CompiledRegion, Decline, Engine, Offer, Region
from ..common.rows import dense, rows

_ROWS = 128  # of a tile: the package's alignment where nobody has set another
_WIDTH = 64  # of one step along what is summed over: forward k, backward n
_STEP = 8  # TMA wants rows of a multiple of 16 bytes


class DeepGemmGroupedMatmul(Engine):
    """x [t, k], weight [e, n, k], offsets [e] to y [t, n], and both gradients: bfloat16, groups of whole tiles."""

    id = "grouped_matmul/deep_gemm"
    not_ahead = "its library compiles in its first launch, with nvcc and for the device at hand"

    def match(self, region: Region, arch: Arch) -> Offer | Decline:
        op, align, accumulate = region.node.op, region.node.attr("align"), region.spec("accumulate")
        given = {p: region.spec(p) for p in ("x", "dy", "weight") if region.spec(p) is not None}
        for port, spec in given.items():
            if spec.dtype != "bfloat16":
                return Decline(f"multiplies bfloat16 operands; {port} is {spec.dtype}")
            sizes = spec.shape[-2:] if port == "weight" else spec.shape[-1:]
            if any(not isinstance(n, int) or n % _WIDTH for n in sizes):
                return Decline(f"{port} {spec}: its kernels take widths that divide by {_WIDTH}")
        if align % _ROWS:
            return Decline(
                f"groups that end at multiples of {align}: its tiles are {_ROWS} rows of one group, so align must be a "
                f"multiple of {_ROWS}"
            )
        if op != "grouped_matmul_wgrad":  # the shares of the roofline are guesses
            return Offer(efficiency=0.6, launches=1, host_us=20)
        if arch.capability is None or arch.capability[0] < 10:
            return Decline(
                f"its weight gradient takes the row counts from the host on {arch.name}: it would wait for them"
            )
        if accumulate is not None:
            if accumulate.dtype != "float32":
                return Decline(f"adds in float32, and accumulate is {accumulate.dtype}")
            return Offer(efficiency=0.6, launches=1, host_us=20)
        return Offer(efficiency=0.5, launches=3, host_us=30, workspace_bytes=4 * region.spec("dweight").numel())

    def build(self, ctx: BuildContext) -> CompiledRegion:
        make = {"grouped_matmul": _forward, "grouped_matmul_dgrad": _dgrad, "grouped_matmul_wgrad": _wgrad}[
            ctx.region.node.op
        ]
        return CompiledRegion(ctx.region.by_port(make(ctx.region, importlib.import_module("deep_gemm"))))


def _ends(library, offsets: torch.Tensor) -> torch.Tensor:
    """``offsets`` as the package takes them. RuntimeError where its tiles are not those that the groups are made for:
    their height is one number for the whole process, which anyone can set."""
    tile = library.get_mk_alignment_for_contiguous_layout()
    if tile != _ROWS:
        raise RuntimeError(
            f"grouped_matmul/deep_gemm: deep_gemm.get_mk_alignment_for_contiguous_layout() = {tile}: must be {_ROWS}; "
            f"call deep_gemm.set_mk_alignment_for_contiguous_layout({_ROWS}) after what set it"
        )
    return offsets.contiguous()


def _forward(region: Region, library):
    _, n, k = region.spec("weight").shape
    return _product(library, library.m_grouped_bf16_gemm_nt_contiguous, k, n)


def _dgrad(region: Region, library):
    _, n, k = region.spec("weight").shape
    return _product(library, library.m_grouped_bf16_gemm_nn_contiguous, n, k)


def _product(library, product, width: int, out_width: int):
    def launch(a, weight, offsets):
        d = a.new_empty(a.shape[0], out_width)
        if d.numel():
            product(rows(a, width, _STEP), dense(weight), d, _ends(library, offsets), use_psum_layout=True)
        return d

    return launch


def _wgrad(region: Region, library):
    shape = region.spec("dweight").shape

    def add(dy, x, offsets, total):
        """The package adds to ``total`` [e, n, k] float32 in place; a group without rows leaves its part alone."""
        ends = _ends(library, offsets)
        # None: the row counts, which it takes from the host where it is not given the ends
        library.k_grouped_bf16_gemm_tn_contiguous(dense(dy), dense(x), total, None, ends, c=total, use_psum_layout=True)

    def plain(dy, x, offsets):
        total = dy.new_zeros(*shape, dtype=torch.float32)
        if dy.numel():
            add(dy, x, offsets, total)
        return total.to(dy.dtype)

    def accumulate(dy, x, offsets, total):
        if dy.numel():
            place = dense(total)  # itself, or a copy where TMA cannot write to it
            add(dy, x, offsets, place)
            if place is not total:
                total.copy_(place)
        return total

    return plain if region.spec("accumulate") is None else accumulate
