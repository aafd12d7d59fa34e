"""Products of 16-bit matrices on quack-kernels: linear, its data gradient, its weight gradient with float32
accumulation."""

from __future__ import annotations

from ...integration.engines.arch import Arch
from ...integration.engines.contract import BuildContext, CompiledRegion, Decline, Offer, Region
from ...integration.graph.ir import Graph, Node
from ..common.quack import QuackEngine, cute_dtype
from ..common.rows import rows, vector

STEP = 8  # TMA wants rows of a multiple of 16 bytes
_BIAS_STEP = 4


class QuackLinear(QuackEngine):
    id = "linear/quack"

    def match(self, region: Region, arch: Arch) -> Offer | Decline:
        reason = product_reason(region.graph, region.node)
        if reason is None and region.spec("accumulate") is not None and region.spec("accumulate").dtype != "float32":
            reason = f"adds in float32, and accumulate is {region.spec('accumulate').dtype}"
        if reason is not None:
            return Decline(reason)
        # H200: 76 to 79 % of 989 TFLOP/s on the products of Llama-3-8B, cuBLAS 74 to 82 %
        return Offer(efficiency=0.77 if arch.name == "sm_90" else 0.6, host_us=30)

    def build(self, ctx: BuildContext) -> CompiledRegion:
        make = {"linear": _linear, "linear_dgrad": _dgrad, "linear_wgrad": _wgrad}[ctx.region.node.op]
        return CompiledRegion(ctx.region.by_port(make(ctx.region, ctx.arch)))


def product_reason(graph: Graph, node: Node) -> str | None:
    """Why the package's products cannot take the operands of a linear, a dgrad or a wgrad, grouped or not, None where they can."""
    for port, value in node.inputs:
        spec = graph.specs[value]
        if port not in ("x", "dy", "weight"):
            continue
        if spec.dtype not in ("bfloat16", "float16"):
            return f"multiplies 16-bit operands; {port} is {spec.dtype}, which it would round to TF32"
        sizes = spec.shape[-2:] if port == "weight" else spec.shape[-1:]
        if any(not isinstance(n, int) or n % STEP for n in sizes):
            return f"{port} {spec}: TMA wants rows of a multiple of 16 bytes, widths that divide by {STEP}"
    return None


def compile_product(arch: Arch, dtype: str, out: str, *, a_major: str, b_kn: bool, add: bool = False, bias: str | None = None,
                    ragged: str | None = None, gather: bool = False):  # fmt: skip
    """``launch(a, b, d, bias)``: d [m, n] = a [m, k] @ b, plus d itself where ``add``, plus bias [1, n]. b is [n, k],
    or [k, n] where ``b_kn``; a's contiguous dim is ``a_major``. The tiles are the package's default for the arch;
    static schedule, no split of k.

    ``ragged``: one product for each group of rows, ``launch(a, b, d, ends)`` with the groups' ends [e + 1] int32 from 0
    on. Along m: b is [e, n, k], whose n is contiguous where ``b_kn``; with ``gather`` row r of d is of row index[r] of
    a, ``launch(a, b, d, ends, index)`` with int32 [rows of d]. Along k: b is [n, k] with n contiguous, d [e, m, n]."""
    from quack.cute_dsl_utils import get_max_active_clusters
    from quack.gemm import _compile_gemm
    from quack.gemm_config import _default_config_for_cap
    from quack.gemm_default_epi import GemmDefaultEpiMixin
    from quack.gemm_tvm_ffi_utils import make_scheduler_args
    from quack.rounding import RoundingMode
    from quack.varlen_utils import VarlenArguments

    config = _default_config_for_cap(arch.capability[0])
    kernel = _compile_gemm(
        cute_dtype(dtype),
        cute_dtype(dtype),
        cute_dtype(out),
        None,
        a_major,
        "n" if b_kn else "k",
        "n",
        None,
        (config.tile_m, config.tile_n),
        (config.cluster_m, config.cluster_n, config.cluster_k),
        config.pingpong,
        persistent=True,
        is_dynamic_persistent=config.is_dynamic_persistent,
        rowvec_dtype=cute_dtype(bias),
        colvec_dtype=None,
        colvec_ndim=0,
        alpha_mode=0,
        beta_mode=0,
        add_to_output=add,
        concat_layout=(),
        varlen_m=ragged == "m",
        varlen_k=ragged == "k",
        gather_A=gather,
        use_tma_gather=False,
        has_batch_idx_permute=False,
        device_capacity=arch.capability,
        rounding_mode=RoundingMode.RN,
        sr_seed_mode=0,
        num_warps=config.num_warps,
        batched=ragged is not None,
        b_kn=b_kn and ragged is None,
    )
    clusters = get_max_active_clusters(
        config.cluster_m * config.cluster_n * config.cluster_k, device_capacity=arch.capability
    )
    schedule = make_scheduler_args(clusters, config.max_swizzle_size, None)
    # constants of the compiled kernel are passed as None
    arguments = GemmDefaultEpiMixin.EpilogueArguments
    constant = arguments(add_to_output=None, rounding_mode=None)
    if gather:
        return lambda a, b, d, ends, index: kernel(
            a, b, d, None, constant, schedule, VarlenArguments(mCuSeqlensM=ends, mAIdx=index), None, None
        )
    if ragged is not None:
        port = "mCuSeqlensM" if ragged == "m" else "mCuSeqlensK"
        return lambda a, b, d, ends: kernel(a, b, d, None, constant, schedule, VarlenArguments(**{port: ends}), None, None)
    if bias is None:
        return lambda a, b, d: kernel(a, b, d, None, constant, schedule, None, None, None)
    return lambda a, b, d, v: kernel(
        a, b, d, None, arguments(mRowVecBroadcast=v, add_to_output=None, rounding_mode=None), schedule, None, None, None
    )


def _linear(region: Region, arch: Arch):
    n, k = region.spec("weight").shape
    dtype, bias = region.spec("x").dtype, region.spec("bias")
    product = compile_product(arch, dtype, dtype, a_major="k", b_kn=False, bias=None if bias is None else bias.dtype)

    def launch(x, weight, *bias):
        y = x.new_empty(*x.shape[:-1], n)
        if y.numel():
            added = [vector(b, _BIAS_STEP).view(1, n) for b in bias]
            product(rows(x, k, STEP), rows(weight, k, STEP), y.view(-1, n), *added)
        return y

    return launch


def _dgrad(region: Region, arch: Arch):
    n, k = region.spec("weight").shape
    dtype = region.spec("dy").dtype
    product = compile_product(arch, dtype, dtype, a_major="k", b_kn=True)

    def launch(dy, weight):
        dx = dy.new_empty(*dy.shape[:-1], k)
        if dx.numel():
            product(rows(dy, n, STEP), rows(weight, k, STEP), dx.view(-1, k))
        return dx

    return launch


def _wgrad(region: Region, arch: Arch):
    n, k = region.spec("dy").shape[-1], region.spec("x").shape[-1]
    dtype, add = region.spec("dy").dtype, region.spec("accumulate") is not None
    product = compile_product(arch, dtype, "float32" if add else dtype, a_major="m", b_kn=True, add=add)

    def plain(dy, x):
        if not dy.numel():
            return dy.new_zeros((n, k))
        dweight = dy.new_empty(n, k)
        product(rows(dy, n, STEP).t(), rows(x, k, STEP), dweight)
        return dweight

    def accumulate(dy, x, total):
        if dy.numel():
            place = rows(total, k, 4)  # itself, or a copy where TMA cannot write to it
            product(rows(dy, n, STEP).t(), rows(x, k, STEP), place)
            if place is not total:
                total.copy_(place)
        return total

    return accumulate if add else plain
