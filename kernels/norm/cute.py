"""RMSNorm and LayerNorm on our own kernels (sm80/): one pass over memory forward, the residual sum in it; backward one
pass and a second kernel over the partial sums of the weights' gradients, without atomics."""

from __future__ import annotations

import dataclasses

import torch

from ...integration.engines.arch import Arch
from ...integration.engines.contract import BuildContext, CompiledRegion, Decline, Engine, Kernel, Offer, Region
from ..common.knobs import given_knobs
from ..common.rows import dtype_reason, fresh, rows, step_of, vector
from . import config

_TENSORS = ("x", "dy", "weight", "bias", "residual", "dresidual", "dbias")
_DEVICE = "layerplan.kernels.norm.sm80"


class CuteNorm(Engine):
    """x [..., n] to y in x's dtype, with n up to ``config.WIDEST`` and any number of rows; x float32, bfloat16 or
    float16, weight and bias each in any of these; statistics in float32. Only wanted outputs are written. Bitwise equal
    over reruns."""

    id = "norm/cute"

    def match(self, region: Region, arch: Arch) -> Offer | Decline:
        reason = _reason(region)
        return Decline(reason) if reason is not None else self._offer(region, arch, _default(region, arch))

    def offer_with(self, region: Region, arch: Arch, knobs: tuple[tuple[str, object], ...]) -> Offer | Decline:
        reason, kind = _reason(region), config.BackwardKnobs if _backward(region) else config.ForwardKnobs
        if reason is not None:
            return Decline(reason)
        chosen = given_knobs(kind, knobs)
        if isinstance(chosen, str):
            return Decline(chosen)
        reason = config.knob_reason(chosen, _rows(region), arch)
        return Decline(reason) if reason is not None else self._offer(region, arch, chosen)

    def _offer(self, region: Region, arch: Arch, knobs: config.Knobs) -> Offer:
        items = tuple(dataclasses.asdict(knobs).items())
        if not _backward(region):
            return Offer(efficiency=0.83, host_us=12, knobs=items, ahead_of_time=True)
        sums, width = _sums(region), region.spec("x").shape[-1]
        work = arch.sms * knobs.blocks * width * 4 * len(sums)
        return Offer(
            efficiency=0.83, launches=1 + bool(sums), host_us=16, knobs=items, workspace_bytes=work, ahead_of_time=True
        )

    def kernels(self, region: Region, arch: Arch, offer: Offer) -> tuple[Kernel, ...]:
        given = _rows(region)
        spec = {p: s.dtype if (s := region.spec(p)) is not None else None for p in _TENSORS}
        constants = {
            "layer": region.node.op.startswith("layer"),
            "width": given.width,
            "step": given.step,
            "x": given.dtype,
            "weight": given.weight,
        }
        offset = 1.0 if region.node.attr("zero_centered") and given.weight else 0.0
        knobs = dict(offer.knobs)
        if _backward(region):
            del knobs["blocks"]  # the launch says how many
            outputs = [[p, region.spec(p).dtype] for p in region.wanted]
            constants |= {
                "residual": spec["dresidual"] is not None,
                "outputs": sorted(outputs),
                "offset": offset,
                **knobs,
            }
            return (Kernel(f"{_DEVICE}.backward:backward", tuple(constants.items())),)
        knobs["blocks"] *= arch.sms
        constants |= {
            "bias": spec["bias"],
            "residual": spec["residual"] is not None,
            "outputs": sorted(region.wanted),
            "offset": offset,
        }
        return (Kernel(f"{_DEVICE}.forward:forward", tuple((constants | knobs).items())),)

    def build(self, ctx: BuildContext) -> CompiledRegion:
        (kernel,) = self.kernels(ctx.region, ctx.arch, ctx.offer)
        function = ctx.compile(kernel)
        if not _backward(ctx.region):
            return CompiledRegion(_forward_launch(ctx.region, function))
        knobs = dict(ctx.offer.knobs)
        return CompiledRegion(_backward_launch(ctx.region, function, ctx.arch.sms * knobs["blocks"], knobs["rows"]))


def _backward(region: Region) -> bool:
    return region.node.op.endswith("_bwd")


def _sums(region: Region) -> list[str]:
    """Which gradients of vectors are wanted."""
    return [p for p in ("dweight", "dbias") if p in region.wanted]


def _reason(region: Region) -> str | None:
    """Why the kernels cannot take the region, None where they can."""
    width = region.spec("x").shape[-1]
    if reason := dtype_reason(**{p: region.spec(p) for p in _TENSORS}):
        return reason
    if not isinstance(width, int):
        return f"compiles for one row width, and that of x {region.spec('x')} is known only at run time"
    if width == 0:
        return "rows of no elements"
    return (
        None if width <= config.WIDEST else f"rows of {width} values: a block's registers hold {config.WIDEST} at most"
    )


def _rows(region: Region) -> config.Rows:
    x, weight = region.spec("x"), region.spec("weight")
    added = region.spec("residual") is not None or region.spec("dresidual") is not None
    step, tensors = step_of(x.shape[-1], x.dtype), 1 + _backward(region) + added
    return config.Rows(
        width=x.shape[-1], step=step, dtype=x.dtype, weight=weight and weight.dtype, tensors=tensors,
        sums=len(_sums(region)), layer=region.node.op.startswith("layer"),
    )  # fmt: skip


def _default(region: Region, arch: Arch) -> config.Knobs:
    if _backward(region):
        return config.backward_knobs(_rows(region), arch)
    return config.forward_knobs(_rows(region))


def _positions(region: Region) -> dict[str, int]:
    return {p: region.graph.inputs.index(v) for p, v in region.node.inputs}


def _forward_launch(region: Region, kernel):
    want, eps, at = region.wanted, float(region.node.attr("eps")), _positions(region)
    given = _rows(region)
    width, step = given.width, given.step
    ix, iw, ib, ir = (at.get(p) for p in ("x", "weight", "bias", "residual"))
    ports = ("y", "residual_out", "mean", "rstd")
    keep_y, keep_sum, keep_mean, keep_rstd = (p in want for p in ports)
    order = [ports.index(p) for p in want]

    def launch(*t):
        x = t[ix]
        y = fresh(x) if keep_y else None
        total = fresh(x) if keep_sum else None
        lead = (*x.shape[:-1], 1)
        mean = x.new_empty(*lead, dtype=torch.float32) if keep_mean else None
        rstd = x.new_empty(*lead, dtype=torch.float32) if keep_rstd else None
        made = (y, total, mean, rstd)
        if x.numel():
            flat = made if x.dim() == 2 else _as_rows(made, width)
            kernel(
                rows(x, width, step),
                None if iw is None else vector(t[iw], step),
                None if ib is None else vector(t[ib], step),
                None if ir is None else rows(t[ir], width, step),
                *flat,
                eps,
            )
        return made[order[0]] if len(order) == 1 else tuple([made[i] for i in order])

    return launch


def _as_rows(made: tuple, width: int) -> list:
    """Contiguous outputs, two of ``width`` and others of one number a row, as [rows, ...]; None stays None."""
    return [None if m is None else m.view(-1, width if i < 2 else 1) for i, m in enumerate(made)]


def _backward_launch(region: Region, kernel, most: int, tile: int):
    """``most`` blocks with ``tile`` rows at once each."""
    want, at, given = region.wanted, _positions(region), _rows(region)
    width, step = given.width, given.step
    iy, ix, iw, im, ir, ires = (at.get(p) for p in ("dy", "x", "weight", "mean", "rstd", "dresidual"))
    keep_dx, sums = "dx" in want, {p: getattr(torch, region.spec(p).dtype) for p in _sums(region)}
    kind_w, kind_b, count = sums.get("dweight"), sums.get("dbias"), len(sums)
    order = [("dx", "dweight", "dbias").index(p) for p in want]

    def launch(*t):
        x = t[ix]
        dx = fresh(x) if keep_dx else None
        total = x.numel() // width
        make = x.new_empty if total else x.new_zeros
        dweight = None if kind_w is None else make(width, dtype=kind_w)
        dbias = None if kind_b is None else make(width, dtype=kind_b)
        made = (dx, dweight, dbias)
        if total:
            blocks = min(most, -(-total // tile))
            kernel(
                rows(t[iy], width, step),
                rows(x, width, step),
                None if iw is None else vector(t[iw], step),
                None if im is None else rows(t[im], 1, 1),
                rows(t[ir], 1, 1),
                None if ires is None else rows(t[ires], width, step),
                dx if dx is None or x.dim() == 2 else dx.view(-1, width),
                x.new_empty(count, blocks, width, dtype=torch.float32) if count else None,
                dweight,
                dbias,
                blocks,
            )
        return made[order[0]] if len(order) == 1 else tuple([made[i] for i in order])

    return launch
