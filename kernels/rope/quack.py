"""Rotary embedding on quack-kernels: one kernel over the turned channels, and a copy of the others where there are
any."""

from __future__ import annotations

import torch

from ...integration.engines.arch import Arch
from ...integration.engines.contract import BuildContext, CompiledRegion, Decline, Offer, Region
from ...integration.graph.ir import Dim
from ..common.quack import QuackEngine, cute_dtype
from ..common.rows import dtype_reason, fresh, step_of

_LONGEST = 131072  # tokens of a sequence: a block turns 4 or more of them, and a grid has 65535 blocks along this axis
_BATCHES = 65535  # and as many along the batch


class QuackRope(QuackEngine):
    id = "rope/quack"

    def match(self, region: Region, arch: Arch) -> Offer | Decline:
        node, x, cos, sin = region.node, region.spec("x"), region.spec("cos"), region.spec("sin")
        reason = dtype_reason(x=x, cos=cos, sin=sin)
        head, half = x.shape[-1], cos.shape[1]
        sequence = x.shape[node.attr("seq_axis")]
        batch = x.shape[1 - node.attr("seq_axis")] if x.rank == 4 else 1
        if reason is not None:
            return Decline(reason)
        if node.input("positions") is not None:
            reason = "per-token positions: its kernel reads row i of cos and sin for token i"
        elif x.rank not in (3, 4):
            reason = f"takes [s, heads, d], [b, s, heads, d] and [s, b, heads, d]; x {x} has rank {x.rank}"
        elif cos.dtype != sin.dtype:
            reason = f"wants cos ({cos.dtype}) and sin ({sin.dtype}) of one dtype"
        elif isinstance(head, Dim) or isinstance(half, Dim):
            reason = f"compiles for one head dim, and x {x} or cos {cos} has one that is known only at run time"
        elif head % 8 or 2 * half % 8 or head > 512:
            reason = f"a head dim of {head} with {2 * half} turned channels: both must be multiples of 8, at most 512"
        elif _size(sequence) > _LONGEST or _size(batch) > _BATCHES:
            reason = (
                f"{_size(batch)} sequences of {_size(sequence)} tokens: at most {_BATCHES} of {_LONGEST} fit its grid"
            )
        if reason is not None:
            return Decline(reason)
        # H200: 3.99 of 4.8 TB/s where all channels turn; a copy of the others reads and writes strided rows
        whole = 2 * half == head
        return Offer(
            efficiency=(0.83 if arch.name == "sm_90" else 0.75) * (1 if whole else 0.8),
            launches=1 if whole else 2,
            host_us=30,
        )

    def build(self, ctx: BuildContext) -> CompiledRegion:
        return CompiledRegion(_launch(ctx.region))


def _size(n: int | Dim) -> int:
    return n.hint if isinstance(n, Dim) else n


def _launch(region: Region):
    from quack.rotary import RotaryKernel

    node, x, cos = region.node, region.spec("x"), region.spec("cos")
    turned, head, four, sequence_first = 2 * cos.shape[1], x.shape[-1], x.rank == 4, node.attr("seq_axis") == 0
    kernel = RotaryKernel.compile(
        cute_dtype(x.dtype), cute_dtype(cos.dtype), None, None, turned, node.attr("interleaved"), node.attr("inverse")
    )
    step, table_step = step_of(turned, x.dtype), step_of(turned // 2, cos.dtype)

    def launch(x, cos, sin):
        y = fresh(x)
        if not y.numel():
            return y
        tokens = x.shape[0] if sequence_first else x.shape[1]
        if cos.shape[0] < tokens:
            raise ValueError(
                f"rope: cos and sin have {cos.shape[0]} rows: must be at least the {tokens} tokens of a sequence"
            )
        if turned < head:
            y[..., turned:] = x[..., turned:]
        source, target = _aligned(x, step), y
        if not four:
            source, target = source.unsqueeze(0), target.unsqueeze(0)
        elif sequence_first:
            source, target = source.transpose(0, 1), target.transpose(0, 1)
        kernel(source, _aligned(cos, table_step), _aligned(sin, table_step), None, None, target, tokens)
        return y

    return region.by_port(launch)


def _aligned(x: torch.Tensor, step: int) -> torch.Tensor:
    """``x`` with last stride 1, other strides multiples of ``step``, and the alignment of ``step`` elements; a copy
    where it has not."""
    *strides, last = x.stride()
    if last != 1 or any(s % step for s in strides) or x.data_ptr() % (step * x.itemsize):
        return x.clone(memory_format=torch.contiguous_format)
    return x
