"""What a layer of experts does around its products, fused into them, on quack-kernels.

- swiglu, times a weight for each row, in the epilogue of the product before it, where nobody reads gate and up
  (inference: a training step saves them, and the package's paired epilogue would store them interleaved).
- The gradient of swiglu in the epilogue of the data gradient before it, whose own result never reaches memory; the
  gradient of the rows' weights is summed there too.
- The product reads its rows out of x through an index, where nobody reads the permuted rows (a training step saves them
  for the weight gradient)."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ...integration.engines.arch import Arch
from ...integration.engines.contract import BuildContext, CompiledRegion, Decline, Offer, Pattern, Region
from ...integration.graph.ir import Graph, Node, TensorSpec
from ..common.quack import QuackEngine
from ..common.quantized import defaults, knob_reason
from ..common.rows import dtype_reason, fresh, rows, vector
from .quack import STEP, compile_product, product_reason
from .quack_grouped import ends_of, matrices, prepare
from .quack_swiglu import compile_epilogue, examples, fingerprint_reason

_WEIGHT_STEP = 4  # the package takes vectors at 16 bytes
_GATHER, _GATE = (0, "rows", 1, "x"), (0, "y", 1, "x")
_GRADIENT = Pattern(("grouped_matmul_dgrad", "swiglu_bwd"), ((0, "dx", 1, "dy"),))


class QuackExperts(QuackEngine):
    id = "experts/quack"
    patterns = (
        Pattern(("grouped_matmul", "swiglu"), (_GATE,)),
        _GRADIENT,
        Pattern(("permute", "grouped_matmul"), (_GATHER,)),
        Pattern(("permute", "grouped_matmul", "swiglu"), (_GATHER, (1, "y", 2, "x"))),
    )

    def match(self, region: Region, arch: Arch) -> Offer | Decline:
        return self.offer_with(region, arch, defaults(_knobs(region, arch)))

    def offer_with(self, region: Region, arch: Arch, knobs: tuple[tuple[str, Any], ...]) -> Offer | Decline:
        if region.ops not in [p.ops for p in self.patterns]:
            return Decline(f"takes {', '.join('+'.join(p.ops) for p in self.patterns)}")
        reason = _reason(region) or knob_reason(knobs, _knobs(region, arch))
        if reason is not None:
            return Decline(reason)
        beside, workspace = _beside(region, dict(knobs))
        # H200: 64 % of 989 TFLOP/s without an epilogue, and dense products lose 4 % by theirs; the gather is a guess
        share = (0.62 if arch.name == "sm_90" else 0.48) - (0.02 if "permute" in region.ops else 0.0)
        return Offer(share, launches=2 + beside, host_us=38 + 8 * beside, knobs=knobs, workspace_bytes=workspace)

    def build(self, ctx: BuildContext) -> CompiledRegion:
        prepare()
        if ctx.region.ops == _GRADIENT.ops:
            return CompiledRegion(_backward(ctx.region, ctx.arch, **dict(ctx.offer.knobs)))
        return CompiledRegion(_forward(ctx.region, ctx.arch))


# ---- what is taken --------------------------------------------------------------------------------------------------


def _parts(region: Region) -> tuple[Node | None, Node, Node | None]:
    """(permute, product, swiglu or its gradient)"""
    product = next(n for n in region.nodes if n.op.startswith("grouped_matmul"))
    first, last = region.nodes[0], region.nodes[-1]
    return None if first is product else first, product, None if last is product else last


def _knobs(region: Region, arch: Arch) -> dict[str, tuple[Any, ...]]:
    """Knob -> values, the default first. The gradient's epilogue holds tiles of gate and up beside the product: with
    tiles of 192 columns it spills 112 bytes a thread, with 160 8, with 128 none. Of the last two, the one whose tiles
    reach less far beyond the width."""
    if region.ops != _GRADIENT.ops:
        return {}
    if arch.name != "sm_90":
        return {"tile_n": (256,)}
    _, product, _ = _parts(region)
    half = region.graph.specs[product.outputs[0][1]].shape[-1]
    return {"tile_n": (*sorted((160, 128), key=lambda n: -(-half // n) * n), 192)}


def _reason(region: Region) -> str | None:
    permute, product, gate = _parts(region)
    reason = product_reason(region.graph, product)
    if reason is None and permute is not None:
        reason = _gather_reason(region.graph, permute, product)
    if reason is None and gate is not None:
        reason = _gate_reason(region.graph, product, gate) or fingerprint_reason()
    return reason


def _gather_reason(graph: Graph, permute: Node, product: Node) -> str | None:
    moved = permute.output("rows")
    if product.input("x") != moved:
        return f"the {product.op} reads the permuted rows elsewhere than as x"
    if moved in graph.outputs:
        return "others read the permuted rows, which a gather does not store"
    if product.input("offsets") != permute.input("offsets"):
        return f"the {product.op} and the permute have offsets of their own: only the permute's groups have an index"
    if (align := permute.attr("align")) != 1:
        return f"groups padded to a multiple of {align}: padding rows are zero, and a gather finds none in x"
    return None


def _gate_reason(graph: Graph, product: Node, gate: Node) -> str | None:
    made, port = product.outputs[0][1], "x" if gate.op == "swiglu" else "dy"
    x, weight = graph.specs[gate.input("x")], graph.specs.get(gate.input("row_weight"))
    if [p for p, v in gate.inputs if v == made] != [port]:
        return f"the {gate.op} reads the product elsewhere than as its argument"
    if made in graph.outputs:
        return f"others read the result of the {product.op}, which its epilogue does not store"
    if gate.attr("clamp") is not None:
        return "its epilogue has no clamp"
    if x.dtype != graph.specs[made].dtype:
        return f"operands of one dtype, not of {graph.specs[made].dtype} and {x.dtype}"
    if x.shape[-1] % (2 * STEP):
        return f"x {x}: gate and up are {x.shape[-1] // 2} wide, which must divide by {STEP}"
    if gate.op == "swiglu_bwd" and gate.output("dx") not in graph.outputs:
        return "nothing reads dx, which its epilogue stores"
    return dtype_reason(row_weight=weight)


def _beside(region: Region, knobs: dict[str, Any]) -> tuple[int, int]:
    """(launches beside the product and the groups' ends, bytes that they and the product pass to each other)"""
    permute, _, gate = _parts(region)
    specs, count, size = region.graph.specs, 0, 0
    weight = specs.get(gate.input("row_weight")) if gate is not None else None
    cast = int(weight is not None and weight.dtype != "float32")
    if cast:
        count, size = count + 1, size + TensorSpec(weight.shape, "float32").nbytes()
    if gate is not None and gate.output("drow_weight") in region.graph.outputs:
        columns = -(-specs[gate.output("dx")].shape[-1] // 2 // knobs["tile_n"])
        count, size = count + 1 + cast, size + TensorSpec((*weight.shape, columns), "float32").nbytes()
    if permute is not None:
        row_map, row_probs = specs[permute.input("row_map")], permute.output("row_probs")
        count, size = count + 3, size + 3 * row_map.nbytes()  # the map in 64 bits, its inverse
        if _read(region, row_probs):
            count, size = count + 1, size + (0 if row_probs in region.graph.outputs else specs[row_probs].nbytes())
    return count, size


def _read(region: Region, value: str | None) -> bool:
    """Whether something in the region or behind it reads a value that may not be there."""
    return value in region.graph.outputs or any(v == value for n in region.nodes for _, v in n.inputs)


# ---- forward --------------------------------------------------------------------------------------------------------


@functools.cache
def _gated(weighted: bool):
    """swiglu of neighbouring columns, times the row's weight."""
    from quack.activation import swiglu
    from quack.epilogue.frontend import gemm_epilogue
    from quack.epilogue.math import unpack

    if weighted:

        @gemm_epilogue(outputs=("y",), mode="acc_pair")
        def layerplan_weighted_swiglu(acc, weight):
            gate, up = unpack(acc)
            return {"y": swiglu(gate, up) * weight}

        return layerplan_weighted_swiglu

    @gemm_epilogue(outputs=("y",), mode="acc_pair")
    def layerplan_swiglu(acc):
        gate, up = unpack(acc)
        return {"y": swiglu(gate, up)}

    return layerplan_swiglu


def _compile_gated(arch: Arch, dtype: str, weighted: bool, gather: bool):
    a, b, y = examples(dtype, (24 if gather else 16, 128), (3, 64, 128), (16, 32))
    ends, index = examples("int32", (4,), (16,))
    (weight,) = examples("float32", (16,))
    tensors = {"y": y, **({"weight": weight} if weighted else {})}
    places = {"ends": ends, "index": index if gather else None}
    return compile_epilogue(_gated(weighted), arch, a, b, tensors, b_kn=False, concat=("B",), **places)


def _weights(row_weight: torch.Tensor) -> torch.Tensor:
    """Rows' weights as the epilogues read them, in float32: they are copied 4 bytes at a time, and a group may begin at
    any row, where weights of 16 bits would lie at odd multiples of 2 bytes."""
    return vector(row_weight.float(), _WEIGHT_STEP)


def inverted(row_map: torch.Tensor, probs: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The token of each row, int32 [t * k], and its slot's probability. What stands behind the last group is left open:
    a dropped slot's -1 names the last row, which lies there as soon as one slot is dropped."""
    tokens, slots = row_map.shape
    places = (row_map.long(),)
    index = row_map.new_empty(tokens * slots)
    index.index_put_(places, torch.arange(tokens, dtype=torch.int32, device=row_map.device).unsqueeze(1))
    if probs is None:
        return index, None
    row_probs = probs.new_empty(tokens * slots)
    return index, row_probs.index_put_(places, probs)


def _forward(region: Region, arch: Arch):
    permute, product, gate = _parts(region)
    graph, weight = region.graph, region.graph.specs[product.input("weight")]
    (_, n, k), dtype = weight.shape, weight.dtype
    width = n if gate is None else n // 2
    row_weight = None if gate is None else gate.input("row_weight")
    source, row_map, probs, row_probs = product.input("x"), None, None, None
    if permute is not None:
        source, row_map, row_probs = permute.input("x"), permute.input("row_map"), permute.output("row_probs")
        probs = permute.input("probs") if _read(region, row_probs) else None
    values = source, product.input("weight"), product.input("offsets"), row_weight, row_map, probs
    at = [graph.inputs.index(v) if v in graph.inputs else None for v in values]
    # whether the rows' weights are the probabilities that the permute moves; whether these are a result too
    weighs, returned = row_weight is not None and row_weight == row_probs, row_probs in graph.outputs
    if gate is None:
        plain = compile_product(arch, dtype, dtype, a_major="k", b_kn=False, ragged="m", gather=permute is not None)
    else:
        gated = _compile_gated(arch, dtype, row_weight is not None, permute is not None)

    def launch(*t):
        x, weight, offsets, weights, row_map, probs = (None if i is None else t[i] for i in at)
        index, moved = (None, None) if row_map is None else inverted(row_map, probs)
        y = x.new_empty(x.shape[0] if index is None else index.shape[0], width)
        if y.numel():
            a, b, ends = rows(x, k, STEP), matrices(weight, STEP), ends_of(offsets)
            if gate is None:
                plain(a, b, y, ends, index)
            elif row_weight is None:
                gated(a, b, ends, index, y=y)
            else:
                gated(a, b, ends, index, y=y, weight=_weights(moved if weighs else weights))
        return (moved, y) if returned else y

    return launch


# ---- gradient -------------------------------------------------------------------------------------------------------


@functools.cache
def _gradient(weighted: bool, dots: bool):
    """d[gate, up] of the product's row times its weight; ``dots``: the product's row times swiglu's too. Gate and up
    are tiles of their own, pinned as such: the package refuses to infer one where rows are in groups, but reads it from
    the group's first row on, as it does C."""
    from quack.activation import dswiglu
    from quack.epilogue.frontend import gemm_epilogue
    from quack.epilogue.ops import ColVecReduce, TileLoad

    tiles: dict[str, Any] = {"outputs": ("dgate", "dup"), "ops": {name: TileLoad(name) for name in ("gate", "up")}}
    if dots:

        @gemm_epilogue(**tiles, reduces={"dots": ColVecReduce("dots", scaled=True)})
        def layerplan_swiglu_gradients(acc, gate, up, weight):
            dgate, dup, value = dswiglu(gate, up, acc * weight)
            return {"dgate": dgate, "dup": dup, "dots": (value, acc)}

        return layerplan_swiglu_gradients
    if weighted:

        @gemm_epilogue(**tiles)
        def layerplan_weighted_swiglu_gradient(acc, gate, up, weight):
            dgate, dup, _ = dswiglu(gate, up, acc * weight)
            return {"dgate": dgate, "dup": dup}

        return layerplan_weighted_swiglu_gradient

    @gemm_epilogue(**tiles)
    def layerplan_swiglu_gradient(acc, gate, up):
        dgate, dup, _ = dswiglu(gate, up, acc)
        return {"dgate": dgate, "dup": dup}

    return layerplan_swiglu_gradient


def _compile_gradient(arch: Arch, dtype: str, weighted: bool, dots: bool, tile_n: int):
    a, b, tile = examples(dtype, (16, 128), (3, 128, 64), (16, 64))
    (ends,) = examples("int32", (4,))
    weight, sums = examples("float32", (16,), (16, 1))
    tensors = dict.fromkeys(("gate", "up", "dgate", "dup"), tile)
    tensors |= ({"weight": weight} if weighted else {}) | ({"dots": sums} if dots else {})
    return compile_epilogue(_gradient(weighted, dots), arch, a, b, tensors, b_kn=True, ends=ends, tile_n=tile_n)


def _backward(region: Region, arch: Arch, tile_n: int):
    _, product, gate = _parts(region)
    graph, spec = region.graph, region.graph.specs[product.input("weight")]
    _, n, half = spec.shape
    row_weight, dots = gate.input("row_weight"), gate.output("drow_weight") in graph.outputs
    columns = -(-half // tile_n)
    run = _compile_gradient(arch, spec.dtype, row_weight is not None, dots, tile_n)
    values = product.input("dy"), product.input("weight"), product.input("offsets"), gate.input("x"), row_weight
    at = [None if v is None else graph.inputs.index(v) for v in values]

    def launch(*t):
        dy, weight, offsets, gate_up, weights = (None if i is None else t[i] for i in at)
        dx, beside = fresh(gate_up), {}
        if dots:
            beside["dots"] = dy.new_empty(dy.shape[0], columns, dtype=torch.float32)
        if dx.numel():
            if weights is not None:
                beside["weight"] = _weights(weights)
            source = rows(gate_up, 2 * half, STEP)
            beside |= {"gate": source[:, :half], "up": source[:, half:], "dgate": dx[:, :half], "dup": dx[:, half:]}
            run(rows(dy, n, STEP), matrices(weight, STEP), ends_of(offsets), None, **beside)
        return (dx, beside["dots"].sum(1).to(weights.dtype)) if dots else dx

    return launch
