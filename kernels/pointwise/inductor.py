"""TorchInductor on regions of pointwise and row-reduction ops: one generated kernel per region signature.

The region's references are traced with fake tensors whose symbolic dims are the region's, and compiled without Dynamo:
no guards are checked on a call, and a token count never recompiles.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

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
    not_ahead = "Inductor generates its kernels on the GPU, at the first launch of a region"

    def match(self, region: Region, arch: Arch) -> Offer | Decline:
        if all(op_table()[op].kind in ("layout", "reduction") for op in region.ops):
            return Decline("views, copies and sums alone: fused into the arithmetic beside them, or left to torch")
        for node in region.nodes:
            if "norm" in node.op and region.graph.specs[node.input("x")].shape[-1] == 1:
                return Decline(
                    "rows of one element: contracted multiply-adds leave a residue that 1 / sqrt(eps) enlarges"
                )
            if any(p in ("seed", "offset") for p, _ in node.inputs) and not arch.is_gpu:
                return Decline("dropout on a CPU: integer hashing compiles slowly and runs no faster there")
            if any(p in _GRADS_OVER_ROWS for p, _ in node.outputs) and arch.is_gpu and len(region.nodes) > 1:
                return Decline("a weight gradient over rows stays a region of its own")
        if not arch.is_gpu:  # needs a C++ compiler and tens of seconds a region: only when forced
            return Offer(efficiency=0.01, launches=50)
        over_rows = any(p in _GRADS_OVER_ROWS for n in region.nodes for p, _ in n.outputs)
        reduces = any(op.startswith(_REDUCTIONS) for op in region.ops)
        if any(op.startswith("cross_entropy") for op in region.ops):
            efficiency = 0.55 if "cross_entropy_bwd" in region.ops else 0.37
        else:  # H200, rows of 4096: 49 %, 70 to 79 %, 72 to 90 %
            efficiency = 0.49 if over_rows else 0.72 if reduces else 0.85
        return Offer(efficiency=efficiency, launches=2 if over_rows else 1, host_us=25 if over_rows else 18)

    def build(self, ctx: BuildContext) -> CompiledRegion:
        region = ctx.region
        run = compile_region(region, "cuda" if ctx.arch.is_gpu else "cpu")
        single = len(region.graph.outputs) == 1

        def launch(*tensors):
            # compiled for row-major inputs; others are copied first
            out = run([t if t.is_contiguous() else t.contiguous() for t in tensors])
            return out[0] if single else tuple(out)

        return CompiledRegion(launch)


Size = int | tuple[int, int]  # a number, or (input, axis): the size of an input


@dataclasses.dataclass(frozen=True, slots=True)
class _Assembled:
    """An output that the traced graph concatenates from parts: its kernels write the parts where they belong. As one
    pointwise kernel over the whole, as inductor makes it, every element would load what all parts need.

    ``shape`` is that of the outermost concatenation, ``final`` the output's. A part is (its shape, dims and starts).
    """

    position: int
    shape: tuple[Size, ...]
    final: tuple[Size, ...]
    parts: tuple[tuple[tuple[Size, ...], tuple[tuple[int, int], ...]], ...]
    dtype: torch.dtype

    def allocate(self, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The output, and views of its parts."""

        def sizes(of: tuple[Size, ...]) -> list[int]:
            return [s if isinstance(s, int) else inputs[s[0]].shape[s[1]] for s in of]

        whole = inputs[0].new_empty(*sizes(self.shape), dtype=self.dtype)
        strides = whole.stride()
        parts = [whole.as_strided(sizes(shape), strides, sum(strides[dim] * start for dim, start in starts))
                 for shape, starts in self.parts]  # fmt: skip
        return whole.view(*sizes(self.final)), parts


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
        inputs = {t.untyped_storage()._cdata for t in tensors}
        # a view would keep the whole input alive for as long as it is saved
        return tuple(t.clone(memory_format=torch.contiguous_format) if t.untyped_storage()._cdata in inputs else t
                     for t in (out if isinstance(out, tuple) else (out,)))  # fmt: skip

    mode = FakeTensorMode(shape_env=ShapeEnv())
    sizes = _example_sizes(region)
    fakes = []
    for value in region.graph.inputs:
        spec = region.graph.specs[value]
        varies = [isinstance(d, Dim) and sizes[d.name] > 1 for d in spec.shape]
        kinds = [DimDynamic.DYNAMIC if v else DimDynamic.STATIC for v in varies]
        shape = [sizes[d.name] if isinstance(d, Dim) else d for d in spec.shape]
        meta = torch.empty(shape, dtype=getattr(torch, spec.dtype), device="meta")
        context = StatelessSymbolicContext(dynamic_sizes=kinds)
        fake = mode.from_tensor(meta, symbolic_context=context)
        with mode:
            fakes.append(torch.empty_strided(fake.size(), fake.stride(), dtype=fake.dtype, device=device))
    options = config.patch(
        # without it a value that the references round to 16 bits stays in float32 where it is used in the same kernel
        emulate_precision_casts=True,
        # a rotation reads eight values: by default it would be stored before it is put in its place
        realize_acc_reads_threshold=64,
    )
    with torch.no_grad(), mode, tracing(TracingContext(mode)), options:
        traced = make_fx(function, decomposition_table=select_decomp_table())(*fakes)
        assembled = _take_apart(traced, fakes)
        if assembled:
            parts = [p for a in assembled for p in a.allocate(fakes)[1]]
            traced = make_fx(_filling(traced, len(fakes), len(parts)))(*fakes, *parts)
            fakes = [*fakes, *parts]
        run = compile_fx_inner(traced, fakes)
    return _assembling(run, assembled) if assembled else run


def _assembling(run: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]], assembled: list[_Assembled]):
    """``run`` takes the inputs and the parts of the assembled outputs, which it fills, and returns the other
    outputs."""

    def whole(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        made = [a.allocate(tensors) for a in assembled]
        out = list(run(tensors + [part for _, parts in made for part in parts]))
        for a, (output, _) in zip(assembled, made, strict=True):
            out.insert(a.position, output)
        return out

    return whole


def _take_apart(traced: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> list[_Assembled]:
    """Take concatenations out of the outputs of a traced graph: it returns the other outputs, then their parts, which
    are in the output's dtype."""
    output = traced.graph.output_node()
    rest, parts, found = [], [], []
    with traced.graph.inserting_before(output):
        for position, node in enumerate(output.args[0]):
            inner, dtypes = _peel(node, views=True)
            pieces = _parts(traced.graph, inner, dtypes)
            sized = (inner, node, *(value for value, _, _ in pieces))
            shapes = [_sizes_of(n.meta["val"], inputs) for n in sized]
            if len(pieces) < 2 or None in shapes:
                rest.append(node)
                continue
            places = tuple(zip(shapes[2:], (starts for _, _, starts in pieces), strict=True))
            found.append(_Assembled(position, *shapes[:2], places, node.meta["val"].dtype))
            for value, kinds, _ in pieces:
                for dtype in reversed(kinds):
                    value = traced.graph.call_function(_CONVERT, (value, dtype))
                parts.append(value)
    output.args = ((*rest, *parts),)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return found


_CONVERT = torch.ops.prims.convert_element_type.default


def _peel(node: torch.fx.Node, views: bool = False) -> tuple[torch.fx.Node, list[torch.dtype]]:
    """What a value is before conversions, copies and (where asked) views that nobody else reads, and the dtypes that it
    is converted to, the last one first."""
    aten, dtypes = torch.ops.aten, []
    passed = (_CONVERT, aten.clone.default, *((aten.view.default,) if views else ()))
    while len(node.users) == 1:
        if node.target in passed:
            dtypes += [node.args[1]] if node.target is _CONVERT else []
            node = node.args[0]
        elif len(pieces := _pieces(node)) == 1:
            node = pieces[0]
        else:
            break
    return node, dtypes


def _pieces(node: torch.fx.Node) -> list[torch.fx.Node]:
    """What a concatenation puts together, without what is empty; nothing where the node is none."""
    if node.target is not torch.ops.aten.cat.default:
        return []
    return [p for p in node.args[0] if 0 not in p.meta["val"].shape]


def _parts(graph: torch.fx.Graph, node: torch.fx.Node, dtypes: list[torch.dtype]) -> list[tuple]:
    """(value, dtypes that it is still converted to, dims and starts) of the parts of a concatenation whose sizes along
    its dim are numbers, however deep; of any other value itself alone. A view between two concatenations may split dims
    in front of the inner one's."""
    inner, more = _peel(node)
    view = inner if inner.target is torch.ops.aten.view.default and len(inner.users) == 1 else None
    if view is not None:
        inner, further = _peel(view.args[0])
        more = more + further
    pieces, rank = _pieces(inner), len(inner.meta["val"].shape)
    dim = (inner.args[1] if len(inner.args) > 1 else 0) % rank if pieces else 0
    widths = [p.meta["val"].shape[dim] for p in pieces]
    outer = (view or inner).meta["val"].shape
    kept = view is None or (dim == rank - 1 and outer[-1] == inner.meta["val"].shape[-1])
    if len(pieces) < 2 or len(inner.users) != 1 or not kept or not all(isinstance(w, int) for w in widths):
        return [(node, dtypes, ())]
    found, start = [], 0
    for piece, width in zip(pieces, widths, strict=True):
        at = dim if view is None else len(outer) - 1
        if view is not None:
            value = piece.meta["val"]
            shape = [*view.args[1][:-1], width]
            piece = graph.call_function(torch.ops.aten.view.default, (piece, shape))
            piece.meta["val"] = value.view([*outer[:-1], width])
        found += [(value, kinds, ((at, start), *starts))
                  for value, kinds, starts in _parts(graph, piece, [*dtypes, *more])]  # fmt: skip
        start += width
    return found


def _sizes_of(tensor: torch.Tensor, inputs: list[torch.Tensor]) -> tuple[Size, ...] | None:
    """Each size as a number or as (input, axis) of the same symbol; None where a size is neither, as a sum of two."""
    where = {s.node.expr: (i, axis) for i, t in reversed(list(enumerate(inputs)))
             for axis, s in enumerate(t.shape) if not isinstance(s, int)}  # fmt: skip
    sizes = tuple(s if isinstance(s, int) else where.get(s.node.expr) for s in tensor.shape)
    return None if None in sizes else sizes


def _filling(traced: torch.fx.GraphModule, num_inputs: int, num_parts: int):
    """``traced`` with further arguments, into which its last outputs are written."""

    def function(*tensors):
        results = torch.fx.Interpreter(traced).run(*tensors[:num_inputs])
        kept = len(results) - num_parts
        for target, value in zip(tensors[num_inputs:], results[kept:], strict=True):
            torch.ops.aten.copy_.default(target, value)
        return tuple(results[:kept])

    return function


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
