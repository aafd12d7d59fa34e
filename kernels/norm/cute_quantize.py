"""RMSNorm and LayerNorm together with the quantize that reads their result, on our own kernels (sm80/quantized.py)."""

from __future__ import annotations

import dataclasses

import torch

from ...integration.engines.arch import Arch
from ...integration.engines.contract import BuildContext, CompiledRegion, Decline, Engine, Kernel, Offer, Region
from ...integration.graph.ir import ITEMSIZE
from ..common import quantized
from ..common.knobs import given_knobs
from ..common.rows import dtype_reason, fresh, rows, step_of, vector
from . import config

_DEVICE = "layerplan.kernels.norm.sm80.quantized"
_BLOCK, _SIDE = 256, 128  # threads of a block that quantises a tile, and rows of it
_RESIDENT = 4  # such blocks on a multiprocessor
_VECTORS, _NUMBERS, _MATRICES = ("weight", "bias"), ("mean", "rstd"), ("y", "residual_out")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeKnobs(config.ForwardKnobs):
    """``together``: with a transposed copy, one kernel for statistics and tiles, in blocks of 256 threads. ``apart``:
    with a transposed copy in blocks of 1 x 128, a tile's scales go through a workspace, for L2's sake, and one more
    kernel moves them (``quantized.knobs``)."""

    together: bool = False
    apart: bool = False


class CuteNormQuantize(Engine):
    """A norm of x [..., n] and the quantize of y, which is rounded to x's dtype first and reaches memory only where
    others read it. With a transposed copy there are two kernels, residual sum and statistics, then tiles of 128 x 128,
    or one in which tiles follow their rows."""

    id = "norm_quantize/cute"
    patterns = (("rms_norm", "quantize"), ("layer_norm", "quantize"))

    def match(self, region: Region, arch: Arch) -> Offer | Decline:
        if (reason := _reason(region)) is not None:
            return Decline(reason)
        return self._offer(region, _usual_knobs(region))

    def offer_with(self, region: Region, arch: Arch, knobs: tuple[tuple[str, object], ...]) -> Offer | Decline:
        if (reason := _reason(region)) is not None:
            return Decline(reason)
        chosen = given_knobs(QuantizeKnobs, knobs)
        if isinstance(chosen, str):
            return Decline(chosen)
        given = _rows(region)
        reason = config.knob_reason(chosen, given, arch)
        if reason is None and chosen.threads * given.step < 128:
            least = 128 // given.step
            reason = f"threads = {chosen.threads}: lanes of a block of 128 values are of one row, so {least} or more"
        if reason is None and chosen.together:
            reason = _together_reason(region, chosen)
        if reason is None and chosen.apart and not quantized.can_lie_apart(region.nodes[1], _wanted(region)):
            reason = f"knob apart = True: {quantized.APART_ONLY}"
        return Decline(reason) if reason is not None else self._offer(region, chosen)

    def _offer(self, region: Region, knobs: QuantizeKnobs) -> Offer:
        items, both = tuple(dataclasses.asdict(knobs).items()), _transposed(region)
        return Offer(
            efficiency=(0.69 if knobs.together else 0.51) if both else 0.81,
            launches=1 + both + knobs.apart,  # one that clears the counters, where it is one kernel
            host_us=18 + quantized.APART_HOST_US * knobs.apart,
            knobs=items,
            workspace_bytes=_workspace(region, knobs),
            ahead_of_time=True,
        )

    def kernels(self, region: Region, arch: Arch, offer: Offer) -> tuple[Kernel, ...]:
        norm, quantize = region.nodes
        given, knobs = _rows(region), dict(offer.knobs)
        dtypes = {p: s and s.dtype for p in _VECTORS for s in (_spec(region, p),)}
        offset = 1.0 if norm.attr("zero_centered") and given.weight else 0.0
        scaled = quantized.constants(quantize, _wanted(region), given.width)
        both, together = scaled.pop("transposed"), knobs.pop("together")
        del scaled["width"], scaled["vector"]
        constants = {"layer": given.layer, "width": given.width, "step": given.step, "x": given.dtype, **dtypes,
                     "residual": norm.input("residual") is not None, "offset": offset, **knobs,
                     "blocks": knobs["blocks"] * arch.sms, **scaled}  # fmt: skip
        if both:
            del constants["hold_weight"]
            constants["overlap"] = arch.capability >= (9, 0)
            constants["stream_data"] = quantized.streamed(region.graph.specs[quantize.output("data")])
            constants["lag"] = _lag(given.width, knobs["rows"], arch) if together else 0
            return (Kernel(f"{_DEVICE}:both_ways", tuple(constants.items())),)
        del constants["apart"]
        constants["outputs"] = sorted(p for p in (*_MATRICES, *_NUMBERS) if norm.output(p) in region.graph.outputs)
        return (Kernel(f"{_DEVICE}:row_wise", tuple(constants.items())),)

    def build(self, ctx: BuildContext) -> CompiledRegion:
        (kernel,) = self.kernels(ctx.region, ctx.arch, ctx.offer)
        compiled = ctx.compile(kernel)
        if _transposed(ctx.region):
            knobs = dict(ctx.offer.knobs)
            return CompiledRegion(_both_ways(ctx.region, compiled, knobs["together"], knobs["apart"]))
        return CompiledRegion(_row_wise(ctx.region, compiled))


def _spec(region: Region, port: str):
    """Spec of an input port of the norm, None where it is not connected."""
    value = region.nodes[0].input(port)
    return None if value is None else region.graph.specs[value]


def _transposed(region: Region) -> bool:
    return bool({"data_t", "scale_inv_t"} & set(_wanted(region)))


def _wanted(region: Region) -> tuple[str, ...]:
    """Output ports of the quantize that others read."""
    return tuple(p for p, v in region.nodes[1].outputs if v in region.graph.outputs)


def _reason(region: Region) -> str | None:
    """Why the kernels cannot take the region, None where they can."""
    if region.ops not in CuteNormQuantize.patterns:
        return "takes a norm with the quantize that reads it"
    norm, quantize = region.nodes
    x = _spec(region, "x")
    if quantize.input("x") != norm.output("y"):
        return "the quantize reads another value than y"
    reason = dtype_reason(**{p: _spec(region, p) for p in ("x", *_VECTORS)}) or quantized.size_reason(
        x.shape[:-1], x.shape[-1], x
    )
    if reason is not None:
        return reason
    if x.shape[-1] % quantized.EDGE:
        return (
            f"rows of {x.shape[-1]} values: the kernels take {quantized.EDGE} at once, and this does not divide by them"
        )
    if x.shape[-1] > config.WIDEST:
        return f"rows of {x.shape[-1]} values: a block's registers hold {config.WIDEST} at most"
    if _transposed(region) and norm.output("y") in region.graph.outputs:
        return "others read y, which the kernels with a transposed copy do not store"
    return None


def _rows(region: Region) -> config.Rows:
    x, weight = _spec(region, "x"), _spec(region, "weight")
    return config.Rows(
        width=x.shape[-1], step=step_of(x.shape[-1], x.dtype), dtype=x.dtype, weight=weight and weight.dtype,
        tensors=1 + (_spec(region, "residual") is not None), layer=region.nodes[0].op == "layer_norm",
    )  # fmt: skip


def _usual_knobs(region: Region) -> QuantizeKnobs:
    """With a residual and a transposed copy one kernel where it can: its tiles find the sum in L2 (H200, 16384x4096
    bfloat16: 5 % faster). Without a residual two are as fast or faster. Scales of large results lie apart (5 % faster,
    8 % at 16384x7168)."""
    both, given = _transposed(region), _rows(region)
    held = 0 if both else sum(ITEMSIZE[s.dtype] for p in _VECTORS if (s := _spec(region, p)) is not None)
    quantize, want = region.nodes[1], _wanted(region)
    apart = quantized.can_lie_apart(quantize, want) and quantized.streamed(region.graph.specs[quantize.output("data")])
    made = QuantizeKnobs(**dataclasses.asdict(config.quantize_knobs(given, held)), apart=apart)
    if not both or region.nodes[0].input("residual") is None:
        return made
    threads = min(_BLOCK, 1 << (made.threads - 1).bit_length())
    one = dataclasses.replace(made, threads=threads, rows=_BLOCK // threads, together=True)
    return made if _together_reason(region, one) else one


def _together_reason(region: Region, knobs: QuantizeKnobs) -> str | None:
    """Why one kernel cannot do both, None where it can."""
    if not _transposed(region):
        return "together = True: without a transposed copy there is one kernel anyhow"
    if knobs.threads * knobs.rows != _BLOCK or knobs.stages or _SIDE % knobs.rows:
        return (
            f"together = True, threads = {knobs.threads}, rows = {knobs.rows}, stages = {knobs.stages}: "
            f"blocks of {_BLOCK} threads, rows that divide {_SIDE}, and no stages"
        )
    chunks = _rows(region).chunks(knobs.threads)
    return f"together = True: {chunks} vectors of a row a thread, registers hold 4" if chunks > 4 else None


def _lag(width: int, rows: int, arch: Arch) -> int:
    """How many steps tiles are behind their rows: so many blocks that those have begun to end when a tile begins."""
    step = _SIDE // rows + -(-width // _SIDE)
    return -(-_RESIDENT * arch.sms // step) + 1


def _workspace(region: Region, knobs: QuantizeKnobs) -> int:
    """Bytes of what the tiles read and nobody else wants, of the counters, and of scales that lie apart."""
    if not _transposed(region):
        return 0
    norm, x = region.nodes[0], _spec(region, "x")
    rows, need = x.numel() // x.shape[-1], {"rstd": 4, "mean": 4 * _rows(region).layer}
    need["residual_out"] = x.shape[-1] * ITEMSIZE[x.dtype] * (norm.input("residual") is not None)
    own = 4 * _counters(rows) if knobs.together else 0
    own += quantized.workspace_bytes(rows, x.shape[-1]) if knobs.apart else 0
    return own + rows * sum(size for p, size in need.items() if norm.output(p) not in region.graph.outputs)


def _counters(rows: int) -> int:
    """Numbers by which the blocks of one kernel for both know of each other."""
    return 1 + -(-rows // _SIDE)


class _Host:
    """What both launches share: where inputs are, which outputs are made, and in which order they are returned."""

    def __init__(self, region: Region, always: tuple[str, ...], together: int, apart: bool = False) -> None:
        """``always``: what is made even where nobody reads it; ``together``: elements of an access to weight and bias;
        ``apart``: the knob."""
        graph, (norm, quantize) = region.graph, region.nodes
        given = _rows(region)
        self.width, self.step, self.together, self.eps = given.width, given.step, together, float(norm.attr("eps"))
        self.at = {p: graph.inputs.index(v) for p, v in norm.inputs}
        self.scale = None if quantize.input("scale") is None else graph.inputs.index(quantize.input("scale"))
        kept = {p for p, v in norm.outputs if v in graph.outputs} | set(always)
        self.matrices, self.numbers = [p in kept for p in _MATRICES], [p in kept for p in _NUMBERS]
        want = _wanted(region)
        self.make = quantized.maker(quantize, want, given.width, apart)
        names = {v: p for node in region.nodes for p, v in node.outputs}
        order = (*_MATRICES, *_NUMBERS, *quantized.PORTS)
        self.order = [order.index(names[v]) for v in graph.outputs]

    def vectors(self, t) -> list:
        return [None if (i := self.at.get(p)) is None else vector(t[i], self.together) for p in _VECTORS]

    def made(self, x: torch.Tensor) -> list:
        """y, residual_out, mean, rstd, None where not kept, the quantized outputs and the workspace."""
        numbers = [x.new_empty(*x.shape[:-1], 1, dtype=torch.float32) if keep else None for keep in self.numbers]
        return [*(fresh(x) if keep else None for keep in self.matrices), *numbers, *self.make(x, x.shape[:-1])]

    def views(self, made: list) -> list:
        """The first four as rows."""
        return [None if m is None else m.view(-1, self.width if i < 2 else 1) for i, m in enumerate(made[:4])]

    def result(self, made: list):
        return made[self.order[0]] if len(self.order) == 1 else tuple([made[i] for i in self.order])


def _row_wise(region: Region, kernel):
    host = _Host(region, (), _rows(region).step)
    ix, ir = host.at["x"], host.at.get("residual")

    def launch(*t):
        x, scale = t[ix], None if host.scale is None else t[host.scale]
        made = host.made(x)
        data, scale_inv, _, _, amax, _ = quantized.addresses(made[4:])
        if x.numel():
            residual = None if ir is None else rows(t[ir], host.width, host.step)
            kernel(rows(x, host.width, host.step), *host.vectors(t), residual, *host.views(made), data, scale_inv,
                   0 if scale is None else scale.data_ptr(), amax, host.eps)  # fmt: skip
        else:
            quantized.fill_empty(made[4:], scale)
        return host.result(made)

    return launch


def _both_ways(region: Region, kernel, together: bool, apart: bool):
    residual = _spec(region, "residual") is not None
    always = ("rstd", *(["mean"] if _rows(region).layer else []), *(["residual_out"] if residual else []))
    host = _Host(region, always, quantized.EDGE, apart)
    ix, ir = host.at["x"], host.at.get("residual")

    def launch(*t):
        x, scale = t[ix], None if host.scale is None else t[host.scale]
        made = host.made(x)
        *addresses, amax, workspace = quantized.addresses(made[4:])
        if x.numel():
            residual = None if ir is None else rows(t[ir], host.width, host.step)
            counters = x.new_zeros(_counters(x.numel() // host.width), dtype=torch.int32) if together else None
            kernel(rows(x, host.width, host.step), *host.vectors(t), residual, *host.views(made)[1:], *addresses,
                   0 if scale is None else scale.data_ptr(), amax, workspace,
                   *(quantized.addresses((counters,)) if together else ()), host.eps)  # fmt: skip
        else:
            quantized.fill_empty(made[4:], scale)
        return host.result(made)

    return launch
