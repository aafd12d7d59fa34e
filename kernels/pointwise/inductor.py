"""TorchInductor on regions of pointwise and row-reduction ops: one generated kernel per region signature.

The region's references are traced with fake tensors whose symbolic dims are the region's, and compiled without Dynamo:
no guards are checked on a call, and a token count never recompiles.
"""

from __future__ import annotations

import torch

from ...integration.engines.arch import Arch
from ...integration.engines.contract import BuildContext, CompiledRegion, Decline, Engine, Offer, Region
from ...integration.graph.ir import Dim
from ...integration.graph.ops.table import op_table
from ..common.evaluate import reference_launch

_REDUCTIONS = ("rms_norm", "layer_norm", "cross_entropy")
_GRADS_OVER_ROWS = ("dweight", "dbias")


class InductorPointwise(Engine):
    id = "pointwise/inductor"
    fuses = True

    def match(self, region: Region, arch: Arch) -> Offer | Decline:
        if all(op_table()[op].kind in ("layout", "reduction") for op in region.ops):
            return Decline("views, copies and sums alone: fused into the arithmetic beside them, or left to torch")
        for node in region.nodes:
            if "norm" in node.op and region.graph.specs[node.input("x")].shape[-1] == 1:
                return Decline("rows of one element: contracted multiply-adds leave a residue that 1 / sqrt(eps) enlarges")
            if any(p in ("seed", "offset") for p, _ in node.inputs) and not arch.is_gpu:
                return Decline("dropout on a CPU: integer hashing compiles slowly and runs no faster there")
            if any(p in _GRADS_OVER_ROWS for p, _ in node.outputs) and arch.is_gpu and len(region.nodes) > 1:
                return Decline("a weight gradient over rows stays a region of its own")
        if not arch.is_gpu:  # needs a C++ compiler and tens of seconds a region: only when forced
            return Offer(efficiency=0.01, launches=50)
        over_rows = any(p in _GRADS_OVER_ROWS for n in region.nodes for p, _ in n.outputs)
        reduces = any(op.startswith(_REDUCTIONS) for op in region.ops)
        return Offer(efficiency=0.3 if over_rows else 0.6 if reduces else 0.85, launches=2 if over_rows else 1)

    def build(self, ctx: BuildContext) -> CompiledRegion:
        region = ctx.region
        run = compile_region(region, "cuda" if ctx.arch.is_gpu else "cpu")
        single = len(region.graph.outputs) == 1

        def launch(*tensors):
            # compiled for row-major inputs; others are copied first
            out = run([t if t.is_contiguous() else t.contiguous() for t in tensors])
            return out[0] if single else tuple(out)

        return CompiledRegion(launch)


def compile_region(region: Region, device: str):
    """Compile the region's references; returns a function from a list of tensors to a sequence of outputs."""
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    reference = reference_launch(region)

    def function(*tensors):
        out = reference(*tensors)
        return out if isinstance(out, tuple) else (out,)

    mode = FakeTensorMode(shape_env=ShapeEnv())
    sizes = _example_sizes(region)
    fakes = []
    for value in region.graph.inputs:
        spec = region.graph.specs[value]
        kinds = [DimDynamic.DYNAMIC if isinstance(d, Dim) and sizes[d.name] > 1 else DimDynamic.STATIC for d in spec.shape]
        shape = [sizes[d.name] if isinstance(d, Dim) else d for d in spec.shape]
        meta = torch.empty(shape, dtype=getattr(torch, spec.dtype), device="meta")
        context = StatelessSymbolicContext(dynamic_sizes=kinds)
        fake = mode.from_tensor(meta, symbolic_context=context)
        with mode:
            fakes.append(torch.empty_strided(fake.size(), fake.stride(), dtype=fake.dtype, device=device))
    # without it a value that the references round to 16 bits stays in float32 where it is used in the same kernel
    rounding = config.patch(emulate_precision_casts=True)
    with torch.no_grad(), mode, tracing(TracingContext(mode)), rounding:
        traced = make_fx(function, decomposition_table=select_decomp_table())(*fakes)
        return compile_fx_inner(traced, fakes)


def _example_sizes(region: Region) -> dict[str, int]:
    """A distinct size per symbolic dim near its hint: equal sizes would be taken for one symbol. A dim of hint 1 is in
    the bucket that holds nothing but 1."""
    sizes: dict[str, int] = {}
    for dim in region.graph.dims():
        size = dim.hint
        while size > 1 and size in sizes.values():
            size += 8
        sizes[dim.name] = size
    return sizes
