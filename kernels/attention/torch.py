"""SDPA kernels that ship with torch: cuDNN, FlashAttention-2 and the blocked CPU kernel, called at the aten level.

All of them return the LSE as a natural log; none of them has a gradient path from the LSE, a sink, or dropout that is a
function of (seed, offset).
"""

from __future__ import annotations

import collections

import torch

from ...integration.engines.arch import Arch
from ...integration.engines.contract import BuildContext, CompiledRegion, Decline, Engine, Offer, Region
from ...integration.graph.ops.attention import softmax_scale
from ...integration.graph.ops.table import size_product

_aten = torch.ops.aten


def _common_decline(region: Region) -> str | None:
    """What none of torch's kernels can do."""
    node = region.node
    if node.attr("dropout") > 0:
        return "dropout: draws its mask from generator state, not from (seed, offset)"
    if region.spec("sink") is not None:
        return "sink: no sink logit"
    if region.spec("mask") is not None:
        return "mask: takes no boolean mask"
    if region.spec("dlse") is not None:
        return "LSE gradient: its backward takes none"
    if 0 in region.spec("q").shape or 0 in region.spec("k").shape:
        return "no queries or no keys: the kernels divide by their number"
    return None


def _square(region: Region) -> bool:
    """Whether queries and keys are known to be equally many, so that both causal alignments agree."""
    axis = 0 if region.node.attr("layout") == "sbhd" else 1
    return region.spec("q").shape[axis] == region.spec("k").shape[axis]


def _windowed(region: Region) -> bool:
    return region.node.attr("window") != (None, None)


def _dense(x: torch.Tensor) -> torch.Tensor:
    """The kernels honour any stride but the head dim's, which they take to be 1: such a tensor is copied."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """The GPU kernels also load 16 bytes at a time: on other addresses flash faults and cuDNN reads wrong values (both
    seen on an H200 with a storage offset of one element), so such a tensor is copied. So is one whose elements lie more than
    2^31 apart: cuDNN fails on it."""
    if x.is_contiguous() and not x.data_ptr() & 15:  # head dims are multiples of 8: every row is aligned
        return x
    strides = x.stride()
    near = sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True)) < 2**31
    if near and strides[-1] == 1 and not x.data_ptr() & 15 and not any(s & 7 for s in strides[:-1]):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _permutations(layout: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The permutation to the kernels' [b, h, s, d], and the one back."""
    return ((0, 2, 1, 3), (0, 2, 1, 3)) if layout == "bshd" else ((1, 2, 0, 3), (2, 0, 1, 3))


def _views(layout: str, prepare=_aligned):
    """Functions to a kernel's [b, h, s, d] view, without copies where ``prepare`` makes none, and back."""
    view, back = _permutations(layout)
    return (lambda x: prepare(x).permute(*view)), (lambda x: x.permute(*back))


def _accumulator_elements(region: Region) -> int:
    """At most so many elements has FlashAttention-2's dq accumulator: rows and head dim are padded."""
    q, layout = region.spec("q"), region.node.attr("layout")
    if layout == "thd":
        rows = size_product(q.shape[:1]) + 128 * size_product(region.spec("cu_seqlens_q").shape)
    else:
        b, s = (1, 0) if layout == "sbhd" else (0, 1)
        rows = size_product((q.shape[b],)) * -(-size_product((q.shape[s],)) // 128) * 128
    return rows * q.shape[-2] * -(-q.shape[-1] // 32) * 32


class _Attention(Engine):
    """Shared plumbing: ports by position and ``want``-ordered results."""

    def build(self, ctx: BuildContext) -> CompiledRegion:
        region, node = ctx.region, ctx.region.node
        at = {p: region.graph.inputs.index(v) for p, v in node.inputs}
        want = region.wanted
        attrs = node.attributes
        attrs["scale"] = softmax_scale(attrs, region.spec("q").shape[-1])
        make = self.backward if node.op.endswith("_bwd") else self.forward
        run = make(region, attrs)
        if node.op == "sdpa":
            order = [at[p] for p in ("q", "k", "v")] + [at[p] for p in ("cu_seqlens_q", "cu_seqlens_k") if p in at]
            both = len(want) == 2
            index = 0 if want == ["out"] else 1

            def launch(*t):
                result = run(*(t[i] for i in order))
                return result if both else result[index]

            return CompiledRegion(launch)
        order = [at[p] for p in ("dout", "q", "k", "v", "out", "lse", "cu_seqlens_q", "cu_seqlens_k") if p in at]
        keep = [("dq", "dk", "dv").index(p) for p in want]

        def launch_backward(*t):
            grads = run(*(t[i] for i in order))
            return grads[keep[0]] if len(keep) == 1 else tuple(grads[i] for i in keep)

        return CompiledRegion(launch_backward)

    def forward(self, region: Region, attrs):
        raise NotImplementedError

    def backward(self, region: Region, attrs):
        raise NotImplementedError


class CudnnAttention(_Attention):
    """cuDNN on dense batches, 16-bit: q [b, s, h, d] or [s, b, h, d] with fewer key heads, out of q's layout, LSE [b, h, s] in float32.
    Reruns of the backward may differ."""

    id = "attention/torch_cudnn"

    def match(self, region: Region, arch: Arch) -> Offer | Decline:
        reason = _common_decline(region)
        if reason:
            return Decline(reason)
        if region.spec("q").dtype not in ("bfloat16", "float16"):
            return Decline(f"dtype {region.spec('q').dtype}: bfloat16 and float16 only")
        if region.node.attr("layout") == "thd":
            return Decline("packed sequences: not through torch's cuDNN entry")
        if _windowed(region):
            return Decline("window: not through torch's cuDNN entry")
        if region.node.attr("causal") and not _square(region):
            return Decline("causal with Sq != Sk: top-left aligned, not bottom-right")
        axis = 0 if region.node.attr("layout") == "sbhd" else 1
        if 1 in (region.spec("q").shape[axis], region.spec("k").shape[axis]):
            return Decline("a sequence of one token: cuDNN's backward crashes on it")
        d, dv = region.spec("q").shape[-1], region.spec("v").shape[-1]
        limit = 256 if arch.capability >= (9, 0) and arch.capability < (12, 0) else 128
        if d % 8 or dv % 8 or d > limit or dv > limit:
            return Decline(f"head dims {d}/{dv}: multiples of 8 up to {limit}")
        if region.node.op == "sdpa_bwd":
            return Offer(efficiency=0.53, launches=3, host_us=50, deterministic=False, ahead_of_time=True)
        return Offer(efficiency=0.61, host_us=38, ahead_of_time=True)

    def forward(self, region, attrs):
        to, back = _views(attrs["layout"])
        causal, scale = attrs["causal"], attrs["scale"]
        op = torch._scaled_dot_product_cudnn_attention

        def run(q, k, v):
            r = op(to(q), to(k), to(v), None, True, 0.0, causal, False, scale=scale)
            return back(r[0]), r[1].squeeze(-1)

        return run

    def autograd(self, region: Region, arch: Arch):
        node = region.node
        if len(region.graph.inputs) != 3:
            return None
        causal, scale = node.attr("causal"), softmax_scale(node.attributes, region.spec("q").shape[-1])
        op, view, back = torch._scaled_dot_product_cudnn_attention, *_permutations(node.attr("layout"))

        def run(q, k, v):
            if not (q.is_contiguous() and k.is_contiguous() and v.is_contiguous()) or (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
                q, k, v = _aligned(q), _aligned(k), _aligned(v)
            out = op(q.permute(*view), k.permute(*view), v.permute(*view), None, True, 0.0, causal, False, scale=scale)[0].permute(*back)
            # aten's own backward reads the gradient wherever it lies. This is register_hook without its handle, which costs
            # as much as the rest of the call
            out._backward_hooks = collections.OrderedDict(aligned=_aligned)
            out.grad_fn._register_hook_dict(out)
            return out

        return run

    def backward(self, region, attrs):
        to, back = _views(attrs["layout"])
        causal, scale = attrs["causal"], attrs["scale"]
        op = _aten._scaled_dot_product_cudnn_attention_backward.default

        def run(dout, q, k, v, out, lse):
            q, k, v, out, dout = to(q), to(k), to(v), to(out), to(dout)
            empty = torch.empty((), dtype=torch.int64, device=q.device)
            grads = op(dout, q, k, v, out, lse.unsqueeze(-1), empty, empty, None, None, None,
                       q.shape[2], k.shape[2], 0.0, causal, scale=scale)  # fmt: skip
            return tuple(back(g) for g in grads)

        return run


class FlashAttention(_Attention):
    """FlashAttention-2 on dense batches and packs, 16-bit, with windows: q [b, s, h, d], [s, b, h, d] or [t, h, d] with fewer key heads,
    out of q's layout, LSE [b, h, s] or [h, t] in float32. Reruns of the backward may differ."""

    id = "attention/torch_flash"

    def match(self, region: Region, arch: Arch) -> Offer | Decline:
        reason = _common_decline(region)
        if reason:
            return Decline(reason)
        q, v = region.spec("q"), region.spec("v")
        if q.dtype not in ("bfloat16", "float16"):
            return Decline(f"dtype {q.dtype}: bfloat16 and float16 only")
        if q.shape[-1] != v.shape[-1]:
            return Decline(f"head dims {q.shape[-1]}/{v.shape[-1]}: keys and values must share one")
        if q.shape[-1] % 8 or q.shape[-1] > 256:
            return Decline(f"head dim {q.shape[-1]}: a multiple of 8 up to 256")
        if region.node.op == "sdpa_bwd":
            if _accumulator_elements(region) >= 2**31:
                return Decline("its float32 dq accumulator would pass 2^31 elements, which it indexes with 32 bits")
            return Offer(efficiency=0.29, launches=3, host_us=35, deterministic=False, ahead_of_time=True)
        return Offer(efficiency=0.32, host_us=20, ahead_of_time=True)

    @staticmethod
    def _view(layout: str):
        if layout == "sbhd":
            return (lambda x: _aligned(x).transpose(0, 1)), (lambda x: x.transpose(0, 1))
        return _aligned, (lambda x: x)

    def forward(self, region, attrs):
        to, back = self._view(attrs["layout"])
        causal, scale, (left, right) = attrs["causal"], attrs["scale"], attrs["window"]
        longest = attrs["max_seqlen_q"], attrs["max_seqlen_k"]
        op = _aten._flash_attention_forward.default
        packed = attrs["layout"] == "thd"
        blind = packed or _may_be_blind(region)

        def run(q, k, v, cu_q=None, cu_k=None):
            q, k, v = to(q), to(k), to(v)
            mq, mk = _longest(q, k, longest, packed)
            r = op(q, k, v, cu_q, cu_k, mq, mk, 0.0, causal, False, scale=scale, window_size_left=left, window_size_right=right)
            out, lse = r[0], r[1]
            if blind:  # the kernel marks a row that sees no key with +inf
                lse = lse.masked_fill(lse == float("inf"), float("-inf"))
            if packed:  # rows behind the last segment are left as they were allocated
                tail = torch.arange(q.shape[0], device=q.device) >= cu_q[-1]
                out = out.masked_fill(tail.view(-1, 1, 1), 0.0)
                lse = lse.masked_fill(tail, float("-inf"))
            return back(out), lse

        return run

    def backward(self, region, attrs):
        to, back = self._view(attrs["layout"])
        causal, scale, (left, right) = attrs["causal"], attrs["scale"], attrs["window"]
        longest = attrs["max_seqlen_q"], attrs["max_seqlen_k"]
        op = _aten._flash_attention_backward.default
        packed = attrs["layout"] == "thd"
        blind = packed or _may_be_blind(region)

        def run(dout, q, k, v, out, lse, cu_q=None, cu_k=None):
            q, k, v, out, dout = to(q), to(k), to(v), to(out), to(dout)
            mq, mk = _longest(q, k, longest, packed)
            if blind:
                lse = lse.masked_fill(lse == float("-inf"), float("inf"))
            unused = torch.empty(2, dtype=torch.uint64, device=q.device)
            grads = op(dout.contiguous(), q, k, v, out, lse, cu_q, cu_k, mq, mk, 0.0, causal, unused, unused, scale=scale,
                       window_size_left=left, window_size_right=right)  # fmt: skip
            if packed:
                ends = (cu_q, cu_k, cu_k)
                tails = (torch.arange(g.shape[0], device=g.device) >= c[-1] for g, c in zip(grads, ends, strict=True))
                grads = tuple(g.masked_fill(t.view(-1, 1, 1), 0.0) for g, t in zip(grads, tails, strict=True))
            return tuple(back(g) for g in grads)

        return run


def _may_be_blind(region: Region) -> bool:
    """Whether some row may see no key."""
    return _windowed(region) or (region.node.attr("causal") and not _square(region))


def _longest(q: torch.Tensor, k: torch.Tensor, longest: tuple[int | None, int | None], packed: bool) -> tuple[int, int]:
    """Upper bounds of the segment lengths. At least 2 queries: for one, torch's kernel swaps heads and queries, which
    fails for empty segments with grouped heads."""
    if not packed:
        return q.shape[1], k.shape[1]
    return max(longest[0] or q.shape[0], 2), longest[1] or k.shape[0]


class CpuAttention(_Attention):
    """torch's blocked CPU kernel on dense batches, any float dtype: q [b, s, h, d] or [s, b, h, d], out of q's layout, LSE [b, h, s] in
    float32 (float64 for float64). Key heads are repeated for grouped queries, and their gradients summed."""

    id = "attention/torch_cpu"

    def match(self, region: Region, arch: Arch) -> Offer | Decline:
        reason = _common_decline(region)
        if reason:
            return Decline(reason)
        q, v = region.spec("q"), region.spec("v")
        if region.node.attr("layout") == "thd":
            return Decline("packed sequences: dense batches only")
        if _windowed(region):
            return Decline("window: none")
        if q.shape[-1] != v.shape[-1]:
            return Decline(f"head dims {q.shape[-1]}/{v.shape[-1]}: keys and values must share one")
        if region.node.attr("causal") and not _square(region):
            return Decline("causal with Sq != Sk: top-left aligned, not bottom-right")
        return Offer(efficiency=0.5, ahead_of_time=True)

    def forward(self, region, attrs):
        to, back = _views(attrs["layout"], _dense)
        causal, scale, groups = attrs["causal"], attrs["scale"], _groups(region)
        op = _aten._scaled_dot_product_flash_attention_for_cpu.default

        def run(q, k, v):
            out, lse = op(to(q), _expand(to(k), groups), _expand(to(v), groups), 0.0, causal, scale=scale)
            return back(out), lse

        return run

    def backward(self, region, attrs):
        to, back = _views(attrs["layout"], _dense)
        causal, scale, groups = attrs["causal"], attrs["scale"], _groups(region)
        op = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default

        def run(dout, q, k, v, out, lse):
            k, v = _expand(to(k), groups), _expand(to(v), groups)
            dq, dk, dv = op(to(dout), to(q), k, v, to(out), lse, 0.0, causal, scale=scale)
            if groups > 1:
                dk, dv = (x.unflatten(1, (-1, groups)).sum(2) for x in (dk, dv))
            return back(dq), back(dk), back(dv)

        return run


def _groups(region: Region) -> int:
    return region.spec("q").shape[-2] // region.spec("k").shape[-2]


def _expand(x: torch.Tensor, groups: int) -> torch.Tensor:
    return x if groups == 1 else x.repeat_interleave(groups, 1)
