"""RMSNorm and LayerNorm on quack-kernels: one kernel forward, one kernel and a sum over its blocks backward.

The package's kernel adds a residual in float32 and normalises the unrounded sum; the op normalises ``round(x +
residual)``, which is the same for float32 alone. 16-bit residuals are therefore added by a kernel in front."""

from __future__ import annotations

import torch

from ...integration.engines.arch import Arch
from ...integration.engines.contract import BuildContext, CompiledRegion, Decline, Offer, Region
from ...integration.graph.ir import ITEMSIZE
from ..common.quack import QuackEngine, cute_dtype, spreads_rows, width_reason
from ..common.rows import dtype_reason, fresh, rows, step_of, vector

_TENSORS = ("x", "dy", "weight", "bias", "residual", "dresidual", "dbias")


class QuackNorm(QuackEngine):
    id = "norm/quack"

    def match(self, region: Region, arch: Arch) -> Offer | Decline:
        node, x, want = region.node, region.spec("x"), region.wanted
        backward = node.op.endswith("_bwd")
        given = {p: region.spec(p) for p in _TENSORS}
        reason = dtype_reason(**given) or width_reason(x, *(s.dtype for s in given.values() if s is not None))
        if reason is None and backward and "dx" not in want:
            reason = "its kernel writes dx in any case, and nothing reads it"
        reason = reason or _size_reason(x.shape[-1], x.dtype, backward, _fused_residual(region), arch)
        if reason is not None:
            return Decline(reason)
        if backward:
            sums = [p for p in want if p != "dx"]
            work = _blocks(x.shape[-1], arch) * x.shape[-1] * 4 * len(sums)
            launches = 1 + sum(1 if region.spec(p).dtype == "float32" else 2 for p in sums)
            return Offer(efficiency=_backward_efficiency(x.shape[-1], arch), launches=launches, host_us=40, workspace_bytes=work)
        # H200: 3.69 to 4.02 of 4.8 TB/s; an addition in front moves 3 tensors where the norm moves 2 and the region 4
        base = 0.8 if arch.name == "sm_90" else 0.7
        added = given["residual"] is not None and not _fused_residual(region)
        return Offer(efficiency=base * 0.8 if added else base, launches=1 + added, host_us=30)

    def build(self, ctx: BuildContext) -> CompiledRegion:
        return CompiledRegion((_backward if ctx.region.node.op.endswith("_bwd") else _forward)(ctx.region, ctx.arch))


def _fused_residual(region: Region) -> bool:
    """Whether the kernel itself adds the residual: in float32 its unrounded sum is the op's rounded one."""
    residual = region.spec("residual")
    return residual is not None and residual.dtype == "float32"


def _size_reason(width: int, dtype: str, backward: bool, fused_residual: bool, arch: Arch) -> str | None:
    """Why a row is too short or does not fit into shared memory, None where it does. Clusters share a row among up to
    16 blocks."""
    if width == 1:
        return "rows of one element: contracted multiply-adds leave a residue that 1 / sqrt(eps) enlarges"
    if spreads_rows(arch):
        limit = 16384 if fused_residual else 32768 if dtype == "float32" and arch.name == "sm_120" else 65536
        return None if width <= limit else f"rows of {width} {dtype} values: at most {limit} on {arch.name}"
    # without clusters one block holds the row: x and the residual, or two stages of x and dy
    need = width * ITEMSIZE[dtype] * (4 if backward else 1 + fused_residual)
    have = (arch.smem_kib - 4) * 1024
    return (
        None
        if need <= have
        else f"rows of {width} {dtype} values take {need} bytes of shared memory; {arch.name} has {have}"
    )


def _blocks(width: int, arch: Arch) -> int:
    """Persistent blocks of a backward, the package's choice: as many as are resident at once. Each leaves one row of
    partial sums."""
    if arch.capability >= (10, 0):
        return arch.sms * (16 if width <= 256 else 8 if width <= 1024 else 4 if width <= 2048 else 2)
    if width > 8192:
        return arch.sms // 2 if width <= 16384 else arch.sms * 2
    return arch.sms * (
        16 if width <= 256 else 8 if width <= 1024 else 4 if width <= 2048 else 2 if width <= 4096 else 1
    )


def _backward_efficiency(width: int, arch: Arch) -> float:
    """H200, of 4.8 TB/s: 45 % at a width of 2048, 60 % at 4096 (with the sums over rows), 64 % at 7168."""
    if arch.name != "sm_90":
        return 0.45
    return 0.45 if width <= 2048 else 0.6 if width <= 4096 else 0.64


def _forward(region: Region, arch: Arch):
    from quack.rmsnorm import _compile_rmsnorm_fwd

    node, want = region.node, region.wanted
    dtype = {p: s.dtype if (s := region.spec(p)) is not None else None for p in _TENSORS}
    fused, width, eps = _fused_residual(region), region.spec("x").shape[-1], node.attr("eps")
    x_type, residual_type = cute_dtype(dtype["x"]), cute_dtype(dtype["residual"]) if fused else None
    keep_sum, keep_mean, keep_rstd = (p in want for p in ("residual_out", "mean", "rstd"))
    kernel = _compile_rmsnorm_fwd(
        x_type,
        x_type,
        residual_type,
        cute_dtype(dtype["weight"]),
        cute_dtype(dtype["bias"]),
        x_type if fused and keep_sum else None,
        width,
        keep_rstd,
        keep_mean,
        node.op == "layer_norm",
        False,
        _offset(region),
    )
    step = step_of(width, *(d for p, d in dtype.items() if d is not None and (fused or p != "residual")))
    at = {p: region.graph.inputs.index(v) for p, v in node.inputs}
    iw, ib, ir = (at.get(p) for p in ("weight", "bias", "residual"))
    ix = at["x"]

    def launch(*t):
        x = t[ix]
        residual = None if ir is None else t[ir]
        total = None
        if ir is not None and not fused:
            x, residual = torch.add(x, residual), None
            total = x
        y, stats = fresh(x), (*x.shape[:-1], 1)
        if fused and keep_sum:
            total = fresh(x)
        mean = x.new_empty(*stats, dtype=torch.float32) if keep_mean else None
        rstd = x.new_empty(*stats, dtype=torch.float32) if keep_rstd else None
        if y.numel():
            kernel(
                rows(x, width, step),
                None if iw is None else vector(t[iw], step),
                None if ib is None else vector(t[ib], step),
                None if residual is None else rows(residual, width, step),
                y.view(-1, width),
                total.view(-1, width) if fused and keep_sum else None,
                None if rstd is None else rstd.view(-1),
                None if mean is None else mean.view(-1),
                eps,
            )
        out = {"y": y, "residual_out": total, "mean": mean, "rstd": rstd}
        return out[want[0]] if len(want) == 1 else tuple([out[p] for p in want])

    return launch


def _backward(region: Region, arch: Arch):
    from quack.rmsnorm import _compile_rmsnorm_bwd

    node, want = region.node, region.wanted
    dtype = {p: s.dtype if (s := region.spec(p)) is not None else None for p in _TENSORS}
    width, layer = region.spec("x").shape[-1], node.op == "layer_norm_bwd"
    x_type, keep_dw, keep_db = cute_dtype(dtype["x"]), "dweight" in want, "dbias" in want
    kernel = _compile_rmsnorm_bwd(
        width,
        x_type,
        cute_dtype(dtype["dy"]),
        x_type,
        cute_dtype(dtype["weight"]),
        keep_db,
        None,
        cute_dtype(dtype["dresidual"]),
        keep_dw,
        False,
        T_hint=0,
        is_layernorm=layer,
        weight_offset=_offset(region),
    )
    step = step_of(width, *(dtype[p] for p in ("x", "dy", "dresidual") if dtype[p] is not None))
    sums = {p: getattr(torch, region.spec(p).dtype) for p in want if p != "dx"}
    blocks = _blocks(width, arch)
    at = {p: region.graph.inputs.index(v) for p, v in node.inputs}
    ix, iy, ir, iw, im, ires = (at.get(p) for p in ("x", "dy", "rstd", "weight", "mean", "dresidual"))

    def launch(*t):
        x = t[ix]
        out = {"dx": (dx := fresh(x))}
        if not dx.numel():
            out |= {p: x.new_zeros(width, dtype=d) for p, d in sums.items()}
        else:
            count = min(blocks, dx.numel() // width)
            dw = x.new_empty(count, width, dtype=torch.float32) if keep_dw else None
            db = x.new_empty(count, width, dtype=torch.float32) if keep_db else None
            kernel(
                rows(x, width, step),
                None if iw is None else vector(t[iw], step),
                rows(t[iy], width, step),
                None if ires is None else rows(t[ires], width, step),
                vector(t[ir].reshape(-1), 1),
                vector(t[im].reshape(-1), 1) if layer else None,
                dx.view(-1, width),
                dw,
                None,
                db,
                count,
            )
            if keep_dw:
                out["dweight"] = dw.sum(0).to(sums["dweight"])
            if keep_db:
                out["dbias"] = db.sum(0).to(sums["dbias"])
        return dx if len(want) == 1 else tuple([out[p] for p in want])

    return launch


def _offset(region: Region) -> float:
    """What the kernel adds to the weight in float32."""
    return 1.0 if region.node.attr("zero_centered") and region.spec("weight") is not None else 0.0
