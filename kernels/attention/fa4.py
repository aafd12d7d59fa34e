"""FlashAttention-4 (package flash-attn-4): its compiled kernels, called with torch tensors on the caller's stream.

The package's own function costs 86 us a call on the host. Here its kernels, which ``fa4_code`` has it compile, are
launched with the arguments that it would pass (``tests/cpu/test_fa4.py`` compares the two). Token counts are arguments
of the kernels and compile nothing.

Packed rows behind the last segment: the kernels write nothing there, so results are zeroed beforehand. They also load
whole tiles, which reach past the last segment, and a NaN there would spread: what enters a second product is copied,
with zeros behind the end. The copies cost 3 to 6 % of a causal pass over 16384 tokens in segments of 4096 (predicted).

Above 256 segments the package also makes an index of tiles for its scheduler; here the scheduler searches itself.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch

from ...integration.engines.arch import Arch
from ...integration.engines.contract import BuildContext, CompiledRegion, Decline, Engine, Offer, Region
from ...integration.graph.ir import ITEMSIZE
from ...integration.graph.ops.attention import softmax_scale
from ...integration.graph.ops.table import size_product
from . import fa4_code
from .fa4_code import Backward, Code

_FAR = 1 << 30  # a window side of this size is open: positions and sides stay below 2^31


# ---- what the package can do ----------------------------------------------------------------------------------------


def _axes(region: Region) -> tuple[int | None, int]:
    """Where batch and sequence stand in q."""
    return {"bshd": (0, 1), "sbhd": (1, 0), "thd": (None, 0)}[region.node.attr("layout")]


def _dims(region: Region) -> tuple[int, int, int]:
    """(head dim of q and k, head dim of v, query heads per key head)."""
    q, k, v = (region.spec(p) for p in "qkv")
    return q.shape[-1], v.shape[-1], q.shape[-2] // k.shape[-2]


def _common_decline(region: Region, arch: Arch) -> str | None:
    node, q, k = region.node, region.spec("q"), region.spec("k")
    if q.dtype not in ("bfloat16", "float16"):
        return f"dtype {q.dtype}: bfloat16 and float16 only"
    if node.attr("dropout") > 0:
        return "dropout: none"
    if region.spec("mask") is not None:
        return "mask: takes no boolean mask"
    if 0 in q.shape or 0 in k.shape:
        return "no queries or no keys: nothing to launch"
    if node.attr("layout") == "thd" and region.spec("cu_seqlens_q").shape[0] in (0, 1):
        return "packed sequences without a segment: nothing to launch"
    batch, _ = _axes(region)
    if batch is not None and size_product((q.shape[batch],)) > 65535:
        return f"batch {q.shape[batch]}: its grid takes at most 65535 sequences (a bucket counts by its upper end)"
    if region.spec("sink") is not None and arch.capability[0] in (8, 12):
        return f"sink: not on {arch.name}"
    return _head_dims_decline(region, arch)


def _head_dims_decline(region: Region, arch: Arch) -> str | None:
    d, dv, _ = _dims(region)
    if d % 8 or dv % 8 or d > 256 or dv > d:
        return f"head dims {d}/{dv}: multiples of 8 up to 256, that of v no larger than that of q"
    major = arch.capability[0]
    if major == 10 and d > 128 and (d, dv) not in ((192, 128), (256, 256)):
        return f"head dims {d}/{dv}: on {arch.name} up to 128, 192/128 or 256/256"
    if major in (8, 12):
        if d != dv:
            return f"head dims {d}/{dv}: on {arch.name} keys and values must share one"
        tile_n = 128 if major == 12 and d <= 64 else 64
        need = 2 * _up(d, 16) * (128 + 2 * tile_n)
        if need > arch.smem_kib << 10:
            return f"head dim {d}: its tiles need {need >> 10} KiB of shared memory, {arch.name} has {arch.smem_kib}"
    return None


def _backward_decline(region: Region, arch: Arch, deterministic: bool) -> str | None:
    d, dv, group = _dims(region)
    major = arch.capability[0]
    if major == 8:
        return f"backward: not on {arch.name}"
    if major == 9 and group > 1 and d != dv:
        return f"backward of grouped heads with head dims {d}/{dv}: keys and values must share one on {arch.name}"
    if major == 9 and (reason := _sm90_wrong_gradient(region, d)):
        return reason
    if major == 12 and d > 128:
        return f"backward with head dim {d}: its tiles do not fit {arch.name}'s shared memory, up to 128 do"
    if major == 10 and d == 256 and (region.spec("sink") is not None or region.spec("dlse") is not None):
        return f"backward with head dim 256: neither sink nor LSE gradient on {arch.name}"
    if deterministic and major == 12:
        return f"deterministic backward: not on {arch.name}"
    if _rows(region, "q") * _up(d, 64) >= 2**31:
        return "one head's float32 dq accumulator would pass 2^31 elements, which it indexes with 32 bits"
    return None


def _sm90_wrong_gradient(region: Region, d: int) -> str | None:
    """Faults of the package's own kernels: why its gradient of q would be wrong."""
    if d <= 128 and _up(d, 16) != _up(d, 32):
        # the main kernel lays its sums of dq out in rows of 16 n elements, the kernels around it in rows of 32 n
        pads = f"they pad to {_up(d, 16)} and to {_up(d, 32)}"
        return f"backward with head dim {d}: its kernels disagree about the layout of dq on sm_90, where {pads}"
    causal, left, right = _span(region.node.attributes)
    if 96 < d <= 128 and not causal and left is None and right is None:
        return f"backward without a mask or window at head dim {d}: its gradient of q is wrong on sm_90"
    return None


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _down(size: int, multiple: int) -> int:
    return size // multiple * multiple


def _rows(region: Region, port: str) -> int:
    """At most so many padded rows has one head of one sequence, or of all packed ones."""
    _, s = _axes(region)
    rows = size_product((region.spec(port).shape[s],))
    if region.node.attr("layout") == "thd":
        rows += 128 * size_product(region.spec("cu_seqlens_q").shape)
    return _up(rows, 256)


def _workspace(region: Region, backward: bool, deterministic: bool) -> int:
    """Bytes that a launch allocates beside its outputs, at most (token dims at their hint)."""
    batch, s = _axes(region)
    packed, q = batch is None, region.spec("q")
    d, dv, group = _dims(region)
    heads = (1 if packed else size_product((q.shape[batch],))) * q.shape[-2]
    copied = (("q", "k", "v", "dout") if backward else ("v",)) if packed else ()
    total = sum(region.spec(p).numel() for p in copied) * ITEMSIZE[q.dtype]
    if not backward:
        return total + (0 if "lse" in region.wanted else 4 * heads * size_product((q.shape[s],)))
    total += 4 * heads * _rows(region, "q") * (2 + _up(d, 64))
    if group > 1:
        total += 4 * (heads // group) * _rows(region, "k") * (_up(d, 64) + _up(dv, 64))
    if deterministic:
        segments = size_product(region.spec("cu_seqlens_q").shape) if packed else 1
        total += 8 * heads * segments * (_rows(region, "q") + _rows(region, "k")) // 32
    return total


def _efficiency(region: Region, arch: Arch, backward: bool, deterministic: bool) -> float:
    """sm_90: measured, causal, against 989 TFLOP/s (71, 68, 71 % forward, 60, 45, 36 % backward); elsewhere priors,
    as is what order costs the deterministic backward."""
    if arch.capability[0] != 9:
        base = (0.5 if backward else 0.6) if arch.capability[0] == 10 else (0.25 if backward else 0.3)
    else:
        d = region.spec("q").shape[-1]
        forward_rate, backward_rate = (0.71, 0.6) if d <= 128 else (0.68, 0.45) if d <= 192 else (0.71, 0.36)
        base = backward_rate if backward else forward_rate
    return base * (0.9 if backward and deterministic else 1.0)


# ---- launching ------------------------------------------------------------------------------------------------------


def _span(attrs: dict[str, Any]) -> tuple[bool, int | None, int | None]:
    """(causal, left, right) as the kernels tell them apart: a plain causal mask has no window, any other is one."""
    left, right = (None if side is None else min(side, _FAR) for side in attrs["window"])
    right = 0 if attrs["causal"] else right
    return (True, None, None) if left is None and right == 0 else (False, left, right)


def _code(region: Region, arch: Arch, deterministic: bool) -> Code:
    causal, left, right = _span(region.node.attributes)
    sink = region.spec("sink")
    return Code(
        arch,
        region.spec("q").dtype,
        *_dims(region),
        packed=region.node.attr("layout") == "thd",
        causal=causal,
        left=left is not None,
        right=right is not None,
        sink=None if sink is None else sink.dtype,
        dlse=region.spec("dlse") is not None,
        deterministic=deterministic,
    )


def _ready(x: torch.Tensor) -> torch.Tensor:
    """The kernels honour strides, but load 16 bytes at a time, and have strides of 0 compiled in: such tensors are
    copied."""
    s = x.stride()  # of three or four dims
    if s[-1] == 1 and 0 not in s and not (s[0] | s[-3] | s[-2]) & 7 and not x.data_ptr() & 15:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _vector(x: torch.Tensor | None) -> torch.Tensor | None:
    """Sinks are loaded four bytes at a time."""
    if x is None or (x.is_contiguous() and not x.data_ptr() & 3):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _ends(cu: torch.Tensor) -> torch.Tensor:
    return cu.to(torch.int32).contiguous()


def _zero_tail(cu: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Copies of packed tensors of one length [t, ...] with zeros behind the last segment."""
    first = tensors[0]
    inside = (torch.arange(first.shape[0], device=first.device) < cu[-1]).view(-1, 1, 1)
    zero = first.new_zeros(())
    return [_ready(torch.where(inside, x, zero)) for x in tensors]


class Fa4Attention(Engine):
    """Forward and backward; the backward adds dq, and dk and dv of grouped heads, in any order."""

    id = "attention/fa4"
    deterministic = False

    def ahead_variables(self, ctx: BuildContext, folder: str) -> dict[str, str] | None:
        cache = f"{folder}/flash_attn_4/{ctx.arch.name}"
        return {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": cache}

    def compile_ahead(self, ctx: BuildContext) -> None:
        self.build(ctx)  # on fake tensors: nothing of it needs a device

    def match(self, region: Region, arch: Arch) -> Offer | Decline:
        backward = region.node.op == "sdpa_bwd"
        ordered = backward and self.deterministic
        reason = _common_decline(region, arch) or (_backward_decline(region, arch, ordered) if backward else None)
        if reason:
            return Decline(reason)
        packed, grouped = region.node.attr("layout") == "thd", _dims(region)[2] > 1
        launches = 1 + 6 * packed
        if backward:  # before, main, dq after; grouped heads: two buffers to zero and two to convert
            launches = 3 + 4 * grouped + 13 * packed + (1 + 2 * grouped) * ordered
        return Offer(
            efficiency=_efficiency(region, arch, backward, ordered),
            launches=launches,
            host_us=10.0 + 10 * launches,
            workspace_bytes=_workspace(region, backward, ordered),
            deterministic=ordered or not backward,
            ahead_of_time=True,
        )

    def build(self, ctx: BuildContext) -> CompiledRegion:
        region, node = ctx.region, ctx.region.node
        attrs, backward = node.attributes, node.op == "sdpa_bwd"
        attrs["scale"] = softmax_scale(attrs, region.spec("q").shape[-1])
        code = _code(region, ctx.arch, backward and self.deterministic)
        ends = ("cu_seqlens_q", "cu_seqlens_k") if code.packed else ()
        if backward:
            run, names = _backward(code, attrs), ("dq", "dk", "dv", "dsink")
            ports = ("dout", "q", "k", "v", "out", "lse", *ends, "sink", "dlse")
        else:
            run, names = (_packed_forward if code.packed else _dense_forward)(code, attrs), ("out", "lse")
            ports = ("q", "k", "v", *ends, "sink")
        at = {p: region.graph.inputs.index(v) for p, v in node.inputs}
        slots = [at.get(p) for p in ports]
        while slots[-1] is None:
            slots.pop()
        take = operator.itemgetter(*slots)
        if None in slots:
            take = lambda t: [None if i is None else t[i] for i in slots]  # noqa: E731
        pick = operator.itemgetter(*(names.index(p) for p in region.wanted))
        return CompiledRegion(lambda *t: pick(run(*take(t))))


class Fa4DeterministicAttention(Fa4Attention):
    """The same forward; the backward's additions wait for their turn (semaphores), so that reruns are bitwise equal."""

    id = "attention/fa4_deterministic"
    deterministic = True


def _forward_call(code: Code, attrs: dict[str, Any]) -> Callable[..., None]:
    """(q, k, v, out, lse, sink, cu_q, cu_k, longest) -> None, tensors as [b, s, h, d] or [t, h, d] views."""
    kernel, aux, scale = fa4_code.forward_kernel(code), fa4_code.aux(), attrs["scale"]
    _, left, right = _span(attrs)
    if code.arch.capability[0] == 10:

        def call(q, k, v, out, lse, sink, cu_q, cu_k, longest):
            kernel(q, k, v, out, lse, scale, cu_q, cu_k, None, None, None, left, right, sink, None, None, aux,
                   None, None, None, None, None, None, None, longest)  # fmt: skip

    else:

        def call(q, k, v, out, lse, sink, cu_q, cu_k, longest):
            kernel(q, k, v, out, lse, scale, cu_q, cu_k, None, None, None, left, right, sink, None, aux, None, None)

    return call


def _dense_forward(code: Code, attrs: dict[str, Any]) -> Callable[..., tuple]:
    call, turned, dv = _forward_call(code, attrs), attrs["layout"] == "sbhd", code.dv

    def run(q, k, v, sink=None):
        q, k, v = _ready(q), _ready(k), _ready(v)
        out = view = torch.empty(*q.shape[:-1], dv, dtype=q.dtype, device=q.device)
        if turned:
            q, k, v, view = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), out.transpose(0, 1)
        b, s, h, _ = q.shape
        lse = torch.empty(b, h, s, dtype=torch.float32, device=q.device)
        call(q, k, v, view, lse, _vector(sink), None, None, s)
        return out, lse

    return run


def _packed_forward(code: Code, attrs: dict[str, Any]) -> Callable[..., tuple]:
    call, dv = _forward_call(code, attrs), code.dv

    def run(q, k, v, cu_q, cu_k, sink=None):
        tokens, h, _ = q.shape
        out = torch.zeros((tokens, h, dv), dtype=q.dtype, device=q.device)
        lse = torch.full((h, tokens), float("-inf"), dtype=torch.float32, device=q.device)
        (v,) = _zero_tail(cu_k, v)  # hidden scores are replaced, but a weight of 0 does not hide a NaN
        call(_ready(q), _ready(k), v, out, lse, _vector(sink), _ends(cu_q), _ends(cu_k), tokens)
        return out, lse

    return run


def _backward(code: Code, attrs: dict[str, Any]) -> Callable[..., tuple]:
    """(dout, q, k, v, out, lse, [cu_q, cu_k,] sink, dlse) -> (dq, dk, dv, dsink)."""
    launch, turned, packed = _backward_call(code, attrs), attrs["layout"] == "sbhd", code.packed

    def dense(dout, q, k, v, out, lse, sink=None, dlse=None):
        dout, q, k, v, out = _ready(dout), _ready(q), _ready(k), _ready(v), _ready(out)
        grads = [x.new_empty(*x.shape) for x in (q, k, v)]
        views = grads
        if turned:
            dout, q, k, v, out = (x.transpose(0, 1) for x in (dout, q, k, v, out))
            views = [x.transpose(0, 1) for x in grads]
        return (*grads, launch(dout, q, k, v, out, lse, *views, None, None, sink, dlse))

    def segments(dout, q, k, v, out, lse, cu_q, cu_k, sink=None, dlse=None):
        grads = [torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
        q, dout = _zero_tail(cu_q, q, dout)
        k, v = _zero_tail(cu_k, k, v)
        return (*grads, launch(dout, q, k, v, _ready(out), lse, *grads, _ends(cu_q), _ends(cu_k), sink, dlse))

    return segments if packed else dense


def _backward_call(code: Code, attrs: dict[str, Any]) -> Callable[..., torch.Tensor | None]:
    """(dout, q, k, v, out, lse, dq, dk, dv, cu_q, cu_k, sink, dlse) -> dsink: the package's launches, in order."""
    kernels, aux, scale = fa4_code.backward_kernels(code), fa4_code.aux(), attrs["scale"]
    _, left, right = _span(attrs)
    pre, main, post = kernels.pre, kernels.main, kernels.post
    buffers = _buffers(code, kernels, attrs)
    rest = (None,) if post else (None, None)  # sm_100's kernel of head dim 256 takes the longest lengths, or None

    def launch(dout, q, k, v, out, lse, dq, dk, dv, cu_q, cu_k, sink, dlse):
        lse, sink, dsink, sinks = lse.contiguous(), _vector(sink), None, None
        delta, lse2, dq_sum, dk_sum, dv_sum, turns = buffers(q, k, cu_q, cu_k)
        if sink is not None:
            dsink = torch.empty(sink.shape, dtype=sink.dtype, device=sink.device)
            sinks = (delta, lse, sink, dsink)
        dlse = None if dlse is None else dlse.contiguous()
        pre(out, dout, delta, lse, lse2, dq_sum, cu_q, None, dlse, None, None, 1.0, None, None)
        into = (dq if dq_sum is None else dq_sum, dk if dk_sum is None else dk_sum, dv if dv_sum is None else dv_sum)
        main(q, k, v, dout, lse2, delta, *into, scale, cu_q, cu_k, None, None, left, right, *turns, aux, None, *rest)
        if dq_sum is not None:
            post[0](dq_sum, dq, scale, cu_q, None, sinks, None)
        if dk_sum is not None:
            post[1](dk_sum, dk, scale, cu_k, None, None, None)
            post[2](dv_sum, dv, 1.0, cu_k, None, None, None)
        return dsink

    return launch


def _buffers(code: Code, kernels: Backward, attrs: dict[str, Any]) -> Callable[..., tuple]:
    """(q, k, cu_q, cu_k) -> (delta, LSE in base 2, sums of dq, dk, dv, semaphores): float32 and int32, padded as the
    kernels expect. Sums of dk and dv are None where the kernel writes the results itself, and so is dq's for sm_100's
    head dim 256."""
    m, n, cluster, grouped = kernels.tile_m, kernels.tile_n, kernels.cluster, len(kernels.post) == 3
    d, dv = _up(code.d, kernels.multiple), _up(code.dv, kernels.multiple)
    new, zeros = (functools.partial(f, dtype=torch.float32) for f in (torch.empty, torch.zeros))
    turn = functools.partial(torch.zeros, dtype=torch.int32)
    longest_q, longest_k = attrs["max_seqlen_q"], attrs["max_seqlen_k"]
    ordered, summed = code.deterministic and bool(kernels.post), bool(kernels.post)

    def buffers(q, k, cu_q, cu_k):
        device, h, hk = q.device, q.shape[-2], k.shape[-2]
        if cu_q is None:
            b, sq, sk = q.shape[0], q.shape[1], k.shape[1]
            lead, rows = (b,), _up(sq, m)
            rows_k = _up(sk, n * cluster) if grouped else 0
        else:
            b, lead = cu_q.shape[0] - 1, ()
            sq, sk = longest_q or q.shape[0], longest_k or k.shape[0]
            rows = _down(q.shape[0] + cu_q.shape[0] * m - 1, m)
            rows_k = _down(k.shape[0] + cu_k.shape[0] * n * cluster - 1, n * cluster) if grouped else 0
        delta, lse2 = (new((*lead, h, rows), device=device) for _ in range(2))
        dq_sum = new((*lead, h, rows * d), device=device) if summed else None
        dk_sum = zeros((*lead, hk, rows_k * d), device=device) if grouped else None
        dv_sum = zeros((*lead, hk, rows_k * dv), device=device) if grouped else None
        turns = [None] * 3
        if ordered:
            turns[0] = turn((b, h, _up(sq, m) // m, cluster), device=device)
            if grouped:
                turns[1:] = (turn((b, hk, _up(sk, n * cluster) // n, 2), device=device) for _ in range(2))
        return delta, lse2, dq_sum, dk_sum, dv_sum, turns

    return buffers
