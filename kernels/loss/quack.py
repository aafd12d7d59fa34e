"""Cross entropy on quack-kernels: one kernel forward (loss and LSE), one backward.

The package's own compile functions choose a single-pass softmax, which makes NaN of a warp that sees nothing but -inf,
and let the assembler contract ``x * log2(e) - lse * log2(e)``, which leaves p = 1 + 1e-7 where x equals the LSE. Its
kernels are therefore compiled here, in two passes and without contraction, into its cache. A row that holds nothing but
-inf gives NaN, as the reference's does, and an ignored one must not be such a row."""

from __future__ import annotations

import functools

import torch

from ...integration.engines.arch import Arch
from ...integration.engines.contract import BuildContext, CompiledRegion, Decline, Offer, Region
from ...integration.graph.ir import ITEMSIZE
from ..common.quack import QuackEngine, cute_dtype, spreads_rows, width_reason
from ..common.rows import dtype_reason, fresh, rows, step_of, vector


class QuackCrossEntropy(QuackEngine):
    id = "loss/quack"

    def match(self, region: Region, arch: Arch) -> Offer | Decline:
        logits, backward = region.spec("logits"), region.node.op == "cross_entropy_bwd"
        reason = dtype_reason(logits=logits, dloss=region.spec("dloss")) or width_reason(logits)
        reason = reason or (None if backward else _size_reason(logits.shape[-1], logits.dtype, arch))
        if reason is None and backward and region.spec("dloss").dtype != "float32":
            reason = f"reads dloss in float32, and it is {region.spec('dloss').dtype}"
        if reason is None and not -(2**31) <= region.node.attr("ignore_index") < 2**31:
            reason = f"ignore_index = {region.node.attr('ignore_index')}: its kernel compares 32-bit indices"
        if reason is not None:
            return Decline(reason)
        # H200, forward and backward: 2.53 of 4.8 TB/s, counting two of the three passes that there are
        return Offer(efficiency=0.75 if arch.name == "sm_90" else 0.65, host_us=30)

    def build(self, ctx: BuildContext) -> CompiledRegion:
        return CompiledRegion((_backward if ctx.region.node.op == "cross_entropy_bwd" else _forward)(ctx.region))


def _size_reason(width: int, dtype: str, arch: Arch) -> str | None:
    """Why a row does not fit into shared memory, None where it does. Clusters share a row among up to 16 blocks, 8 on
    sm_120."""
    if spreads_rows(arch):
        limit = 131072 if dtype == "float32" and arch.name == "sm_120" else 262144
        return None if width <= limit else f"{width} classes: at most {limit} {dtype} logits a row on {arch.name}"
    have = (arch.smem_kib - 4) * 1024
    need = width * ITEMSIZE[dtype]
    return (
        None if need <= have else f"{width} {dtype} logits take {need} bytes of shared memory; {arch.name} has {have}"
    )


@functools.cache
def _compilers():
    """``(forward, backward)``: compile the package's kernels for (logits dtype, targets dtype, classes)."""
    from cutlass import Float32, Int32, cute
    from quack.cache import jit_cache
    from quack.compile_utils import make_fake_stream, make_fake_tensor
    from quack.cross_entropy import CrossEntropy, CrossEntropyBackward

    options = "--enable-tvm-ffi --ptxas-options --fmad=false"

    @jit_cache
    def layerplan_cross_entropy(dtype, target_dtype, width, step, keep_lse):
        n = cute.sym_int()
        x, target = make_fake_tensor(dtype, (n, width), step), make_fake_tensor(target_dtype, (n,))
        loss, lse = make_fake_tensor(Float32, (n,)), make_fake_tensor(Float32, (n,)) if keep_lse else None
        kernel = CrossEntropy(dtype, width, online_softmax=False)
        return cute.compile(
            kernel, x, target, None, loss, lse, None, None, Int32(0), make_fake_stream(), options=options
        )

    @jit_cache
    def layerplan_cross_entropy_bwd(dtype, target_dtype, width, step):
        n = cute.sym_int()
        x, dx = make_fake_tensor(dtype, (n, width), step), make_fake_tensor(dtype, (n, width), step)
        target, lse = make_fake_tensor(target_dtype, (n,)), make_fake_tensor(Float32, (n,))
        dloss = cute.runtime.make_fake_tensor(Float32, (n,), stride=(cute.sym_int64(),))
        kernel = CrossEntropyBackward(dtype, width)
        return cute.compile(kernel, x, target, dloss, dx, lse, None, Int32(0), make_fake_stream(), options=options)

    return layerplan_cross_entropy, layerplan_cross_entropy_bwd


def _forward(region: Region):
    node, want, logits = region.node, region.wanted, region.spec("logits")
    width, ignore, keep_lse = logits.shape[-1], node.attr("ignore_index"), "lse" in want
    step = step_of(width, logits.dtype)
    kernel = _compilers()[0](cute_dtype(logits.dtype), cute_dtype(region.spec("targets").dtype), width, step, keep_lse)

    def launch(logits, targets):
        loss = logits.new_empty(targets.shape, dtype=torch.float32)
        lse = logits.new_empty(targets.shape, dtype=torch.float32) if keep_lse else None
        if loss.numel():
            source, target = rows(logits, width, step), vector(targets.reshape(-1), 1)
            kernel(source, target, None, loss.view(-1), lse.view(-1) if keep_lse else None, None, None, ignore)
        out = {"loss": loss, "lse": lse}
        return out[want[0]] if len(want) == 1 else tuple([out[p] for p in want])

    return region.by_port(launch)


def _backward(region: Region):
    logits, ignore = region.spec("logits"), region.node.attr("ignore_index")
    width = logits.shape[-1]
    step = step_of(width, logits.dtype)
    kernel = _compilers()[1](cute_dtype(logits.dtype), cute_dtype(region.spec("targets").dtype), width, step)

    def launch(dloss, logits, targets, lse):
        dlogits = fresh(logits)
        if dlogits.numel():
            source, target = rows(logits, width, step), vector(targets.reshape(-1), 1)
            level = vector(lse.reshape(-1), 1)
            kernel(source, target, dloss.reshape(-1), dlogits.view(-1, width), level, None, ignore)
        return dlogits

    return region.by_port(launch)
