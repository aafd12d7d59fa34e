"""swiglu in the epilogue of the product before it, on quack-kernels.

Forward, where nothing else reads gate and up (a training step saves them, and the package's paired epilogue would store
them interleaved): y = swiglu(x @ weight.T). Gradient: d[gate, up] from dy @ weight, whose own result never reaches
memory."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

from ...integration.engines.arch import Arch
from ...integration.engines.contract import BuildContext, CompiledRegion, Decline, Offer, Region
from ..common.quack import QuackEngine
from ..common.rows import fresh, rows
from .quack import STEP, product_reason


class QuackLinearSwiglu(QuackEngine):
    id = "linear_swiglu/quack"
    patterns = (("linear", "swiglu"), ("linear_dgrad", "swiglu_bwd"))

    def match(self, region: Region, arch: Arch) -> Offer | Decline:
        if (reason := fingerprint_reason()) is not None:
            return Decline(reason)
        if region.ops not in self.patterns:
            return Decline(
                "takes a linear with the swiglu that reads it, or a linear_dgrad with the swiglu_bwd that reads it"
            )
        product, gate = region.nodes
        made = product.outputs[0][1]
        weight = region.graph.specs[product.input("weight")]
        dtypes = {region.graph.specs[v].dtype for v in region.graph.inputs}
        reason = product_reason(region.graph, product)
        if reason is not None:
            return Decline(reason)
        if gate.input("x" if gate.op == "swiglu" else "dy") != made:
            reason = f"the {gate.op} reads the product elsewhere than as its argument"
        elif made in region.graph.outputs:
            reason = f"others read the result of the {product.op}, which its epilogue does not store"
        elif product.input("bias") is not None:
            reason = "a bias of two halves, which its paired epilogue reads interleaved"
        elif gate.attr("clamp") is not None or gate.input("row_weight") is not None:
            reason = "its epilogue has neither a clamp nor row weights"
        elif product.op == "linear" and weight.shape[0] % (2 * STEP):
            reason = f"weight {weight}: gate and up are {weight.shape[0] // 2} wide, which must divide by {STEP}"
        elif len(dtypes) > 1:
            reason = f"operands of one dtype, not of {', '.join(sorted(dtypes))}"
        if reason is not None:
            return Decline(reason)
        # H200: 74 % of 989 TFLOP/s with the gradient in the epilogue
        return Offer(efficiency=0.74 if arch.name == "sm_90" else 0.6, host_us=40)

    def build(self, ctx: BuildContext) -> CompiledRegion:
        product, gate = ctx.region.nodes
        graph, weight = ctx.region.graph, product.input("weight")
        if product.op == "linear":
            launch = _forward(graph.specs[weight], ctx.arch)
            values = product.input("x"), weight
        else:
            launch = _backward(graph.specs[weight], ctx.arch)
            values = product.input("dy"), weight, gate.input("x")
        at = [graph.inputs.index(v) for v in values]
        in_place = at == list(range(len(graph.inputs)))
        return CompiledRegion(launch if in_place else lambda *t: launch(*(t[i] for i in at)))


@functools.cache
def fingerprint_reason() -> str | None:
    """Why the package cannot name an epilogue in its cache, None where it can (or cutlass is absent)."""
    spec = importlib.util.find_spec("cutlass")
    folder = os.path.dirname(spec.origin) if spec is not None and spec.origin else None
    if folder is None or any(f"{os.sep}{name}{os.sep}" in folder for name in ("site-packages", "dist-packages")):
        return None
    return (
        f"cutlass lies in {folder}: quack-kernels tells its own code from an installed one's by a path with "
        "site-packages, and cannot fingerprint an epilogue otherwise; install it there"
    )


@functools.cache
def _backward_epilogue():
    """d[gate, up] = dswiglu(gate, up, product), gate and up tiles of their own."""
    from quack.activation import dswiglu
    from quack.epilogue.frontend import gemm_epilogue

    @gemm_epilogue(outputs=("dgate", "dup"))
    def layerplan_dswiglu(acc, gate, up):
        dgate, dup, _ = dswiglu(gate, up, acc)
        return {"dgate": dgate, "dup": dup}

    return layerplan_dswiglu


def compile_epilogue(epilogue, arch: Arch, a: torch.Tensor, b: torch.Tensor, tensors: dict[str, torch.Tensor], *,
                     b_kn: bool, concat: tuple[str, ...] = (), ends: torch.Tensor | None = None,
                     index: torch.Tensor | None = None, tile_n: int | None = None):  # fmt: skip
    """``launch(a, b, **tensors)``; the examples give dtypes, ranks and contiguous dims, every size is symbolic. The
    tiles are the package's default for the arch, ``tile_n`` columns wide where that is given.

    With ``ends`` one product for each group of rows, ``launch(a, b, ends, index, **tensors)``: b [e, n, k] (or
    [e, k, n] where ``b_kn``), ends [e + 1] int32 from 0 on; with ``index`` [rows] int32 row r of the product is of row
    index[r] of a, else None is passed."""
    from quack.gemm_config import _default_config_for_cap
    from quack.varlen_utils import VarlenArguments

    c = _default_config_for_cap(arch.capability[0])
    plan = epilogue.gemm(
        a,
        b,
        None,
        epi_args=tensors,
        tile_M=c.tile_m,
        tile_N=tile_n or c.tile_n,
        tile_K=c.tile_k,
        cluster_M=c.cluster_m,
        cluster_N=c.cluster_n,
        pingpong=c.pingpong,
        is_dynamic_persistent=c.is_dynamic_persistent,
        max_swizzle_size=c.max_swizzle_size,
        cu_seqlens_m=ends,
        A_idx=index,
        b_kn=b_kn,
        concat_layout=concat,
        _launch=False,
    )
    kernel, arguments, schedule = plan.compiled_fn, plan.gemm_cls.EpilogueArguments, plan.scheduler_static
    if ends is None:
        return lambda a, b, **given: kernel(a, b, None, None, arguments(**given), schedule, None, None, None)
    return lambda a, b, ends, index, **given: kernel(
        a, b, None, None, arguments(**given), schedule, VarlenArguments(mCuSeqlensM=ends, mAIdx=index), None, None
    )


def examples(dtype: str, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Tensors that ``compile_epilogue`` looks at, on the device that it is for where there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return [torch.empty(s, dtype=getattr(torch, dtype), device=device) for s in shapes]


def _forward(weight, arch: Arch):
    from quack.epilogue.library import linear_act_mod

    k, half = weight.shape[1], weight.shape[0] // 2
    a, b, y = examples(weight.dtype, (1, 16, 128), (1, 64, 128), (1, 16, 32))
    epilogue = linear_act_mod("swiglu", gated=True, has_c=False, has_rowvec=False, has_colvec=False)
    product = compile_epilogue(epilogue, arch, a, b, {"mAuxOut": y}, b_kn=False, concat=("B",))

    def launch(x, weight):
        y = x.new_empty(*x.shape[:-1], half)
        if y.numel():
            product(rows(x, k, STEP).unsqueeze(0), rows(weight, k, STEP).unsqueeze(0), mAuxOut=y.view(1, -1, half))
        return y

    return launch


def _backward(weight, arch: Arch):
    n, half = weight.shape
    a, b, tile = examples(weight.dtype, (16, 128), (128, 64), (16, 64))
    tiles = dict.fromkeys(("gate", "up", "dgate", "dup"), tile)
    product = compile_epilogue(_backward_epilogue(), arch, a, b, tiles, b_kn=True)

    def launch(dy, weight, gate_up):
        dx = fresh(gate_up)
        if dx.numel():
            source, target = rows(gate_up, 2 * half, STEP), dx.view(-1, 2 * half)
            product(rows(dy, n, STEP), rows(weight, half, STEP), gate=source[:, :half], up=source[:, half:],
                    dgate=target[:, :half], dup=target[:, half:])  # fmt: skip
        return dx

    return launch
