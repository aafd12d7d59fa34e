"""Memory-bound kernels of our own beside their peers, as a share of the copy bandwidth of the same run.

    python -m tests.bench.memory_bound [--only TEXT] [--sweep] [--compile] [--out FILE]

Each row is an op at one shape. Its bytes are those of every operand once (``Region.cost``); ``copy`` is a plain copy
that reads and writes as many in all, the faster of two. Contenders are engines of ours, which launch the package's compiled kernels, and
functions of libraries that are there. Each is captured into a CUDA graph of several launches over inputs that rotate,
so that L2 is cold and the host does not count; graphs are replayed in turns and the median counts. What a contender
computes is compared with the reference's result before it is timed. ``--sweep`` times the row's list of knobs as well.
``--compile`` compiles what the rows need into the cache, on a machine that may have no GPU, and times nothing.

A family adds its rows with a function in ``FAMILIES``.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from layerplan.integration.engines.arch import Arch
from layerplan.integration.engines.contract import BuildContext, Decline, Offer, Region
from layerplan.integration.engines.manifest import BY_ID
from layerplan.integration.engines.packages import locate
from layerplan.integration.graph.ir import Dim, GraphBuilder, ScaleSpec, TensorSpec
from layerplan.integration.graph.ops.table import op_table
from layerplan.integration.plan_cache import ahead, memory
from layerplan.integration.plan_cache.disk import Store
from layerplan.integration.planner.cover import region_of
from layerplan.integration.settings import cache_folders
from layerplan.kernels.common.evaluate import reference_launch
from tests.bench.host_cost import environment
from tests.cases import cute_moe, cute_rope

LAUNCHES, ROUNDS = 12, 9  # of one graph; replays of each graph
# the copy bandwidth is the faster one's: a copy inside a graph takes 1.5 times as long at some sizes
COPIES: dict[str, Callable[..., object]] = {"copy": lambda a, b: b.copy_(a), "copy by a kernel": lambda a, b: torch.bitwise_not(a, out=b)}
Knobs = tuple[tuple[str, object], ...]
Call = Callable[..., object]


@dataclasses.dataclass(frozen=True)
class Row:
    """``own``: our engine. ``engines``: the peers that are engines. ``libraries``: name -> a function over the region's
    inputs in their order. ``make(generator)`` gives inputs. ``least``: the share of copy bandwidth that the design asks
    for. ``knobs``: what ``--sweep`` tries. ``exact``: results are compared bit for bit. ``unread``: bytes of operands that a region's ops do not look at."""

    name: str
    own: str
    region: Region
    make: Callable[[torch.Generator], list[torch.Tensor]]
    least: float
    engines: tuple[str, ...] = ()
    libraries: dict[str, Call] = dataclasses.field(default_factory=dict)
    knobs: tuple[Knobs, ...] = ()
    exact: bool = False
    unread: int = 0

    @property
    def nbytes(self) -> int:
        return self.region.cost()[1] - self.unread


# ---- norms ----------------------------------------------------------------------------------------------------------

SHAPES = ((16384, 4096), (16384, 7168), (65536, 2048), (4096, 12288))
_ENGINES = ("norm/torch", "norm/quack", "pointwise/inductor")


def one_node(op: str, want: Sequence[str], inputs: dict[str, TensorSpec], **attributes) -> Region:
    """A region of one node over inputs named by port."""
    b = GraphBuilder()
    made = b.op(op, want=list(want), **{p: b.input(p, s) for p, s in inputs.items()}, **attributes)
    graph = b.build(list(made) if isinstance(made, tuple) else [made])
    return region_of(graph, graph.nodes)


def random_inputs(region: Region, given: Callable[[str, torch.Tensor], torch.Tensor] = lambda port, t: t):
    """``Row.make``: normal numbers for every input of the region; ``given`` may replace one."""

    def make(gen: torch.Generator) -> list[torch.Tensor]:
        made = []
        for value in region.graph.inputs:
            spec = region.graph.specs[value]
            shape = [d.hint if isinstance(d, Dim) else d for d in spec.shape]
            made.append(
                given(value, torch.empty(shape, device="cuda", dtype=getattr(torch, spec.dtype)).normal_(generator=gen))
            )
        return made

    return make


def _norm_rows() -> Iterator[Row]:
    for op, (rows, width) in itertools.product(("rms_norm", "layer_norm"), SHAPES):
        if op == "layer_norm" and (rows, width) != SHAPES[0]:
            continue
        matrix, vector = TensorSpec((Dim("t", rows), width), "bfloat16"), TensorSpec((width,), "bfloat16")
        numbers, stats = (
            TensorSpec((Dim("t", rows), 1), "float32"),
            ["mean", "rstd"] if op == "layer_norm" else ["rstd"],
        )
        tag, saved = f"{op} {rows}x{width}", dict.fromkeys(stats, numbers)
        made = one_node(op, ["y", *stats], {"x": matrix, "weight": vector}, eps=1e-5)
        yield _norm_row(tag, made, 0.95, _te_forward(op))
        made = one_node(
            op, ["y", "residual_out", *stats], {"x": matrix, "weight": vector, "residual": matrix}, eps=1e-5
        )
        yield _norm_row(f"{tag} + residual", made, 0.95, {})
        made = one_node(f"{op}_bwd", ["dx", "dweight"], {"dy": matrix, "x": matrix, "weight": vector, **saved})
        yield _norm_row(f"{tag} backward", made, 0.88, _te_backward(op))
        made = one_node(
            f"{op}_bwd", ["dx", "dweight"], {"dy": matrix, "x": matrix, "weight": vector, **saved, "dresidual": matrix}
        )
        yield _norm_row(f"{tag} backward + residual", made, 0.88, _te_backward(op, added=True))


def _norm_row(name: str, region: Region, least: float, libraries: dict[str, Call]) -> Row:
    def given(value: str, t: torch.Tensor) -> torch.Tensor:
        return t.abs_().add_(0.5) if value == "rstd" else t

    make = random_inputs(region, given)
    return Row(name, "norm/cute", region, make, least, _ENGINES, libraries, tuple(_norm_knobs(region)))


def _norm_knobs(region: Region) -> Iterator[Knobs]:
    """Threads so that a thread has 1 to 8 vectors of 16 bytes; rows, stages and the rest around what fits."""
    vectors, backward = region.spec("x").shape[-1] // 8, region.node.op.endswith("_bwd")
    fits = [t for t in range(32, 1025, 32) if vectors % t == 0 and vectors // t <= (4 if backward else 8)]
    choices = [t for t in fits if vectors // t in ((1, 2, 4) if backward else (2, 4, 7, 8))] or fits[-2:]
    usual = min(choices, key=lambda t: abs(vectors // t - (2 if backward else 4)))
    yield from _backward_knobs(choices, usual) if backward else _forward_knobs(choices, usual)


def _forward_knobs(choices: list[int], usual: int) -> Iterator[Knobs]:
    for threads in choices:
        for streaming in (False, True):
            yield _items(threads=threads, rows=1, streaming=streaming)
    rows = max(1, 256 // usual)
    yield _items(threads=usual, rows=max(1, 128 // usual), hold_weight=True)
    yield _items(threads=usual, rows=1, hold_weight=True, streaming=True)
    yield _items(threads=usual, rows=rows)
    for stages, total in ((2, 768), (2, 1024), (3, 1024), (3, 1536)):
        yield _items(threads=usual, rows=rows, stages=stages, blocks=max(1, total // (usual * rows)), hold_weight=True)


def _backward_knobs(choices: list[int], usual: int) -> Iterator[Knobs]:
    for threads, total in itertools.product(choices, (512, 768, 1024)):
        rows = min(15, total // threads)
        for stages in (3, 2) if rows else ():
            yield _items(
                threads=threads,
                rows=rows,
                stages=stages,
                hold=threads >= usual and total < 1024,
                hold_weight=True,
                overlap=True,
            )
    rows = max(1, min(15, 768 // usual))
    best = {"threads": usual, "rows": rows, "hold": True, "hold_weight": True, "overlap": True}
    yield _items(**best, stages=4)
    yield _items(**best | {"hold": False}, stages=3)
    yield _items(**best | {"overlap": False}, stages=2)
    yield _items(**best, stages=2, streaming=True)
    yield _items(**best | {"rows": max(1, 384 // usual)}, stages=2, blocks=2)
    yield _items(**best | {"rows": 1}, stages=3, blocks=rows)


def _items(**values) -> Knobs:
    return tuple(values.items())


def _te():
    """Transformer Engine's compiled functions."""
    import transformer_engine.pytorch  # noqa: F401 - loads the library that the next one needs
    import transformer_engine_torch

    return transformer_engine_torch


def te(call: Call) -> dict[str, Call]:
    """``call`` as Transformer Engine's contender; nothing where the package is absent."""
    return (
        {"transformer_engine": call}
        if locate("transformer_engine").here and locate("transformer_engine_torch").here
        else {}
    )


def _te_forward(op: str) -> dict[str, Call]:
    def call(x, w):
        functions = _te()
        kind = functions.DType.kBFloat16
        if op == "rms_norm":
            return functions.rmsnorm_fwd(x, w, 1e-5, None, None, kind, 0, False)[0]
        return functions.layernorm_fwd(x, w, zeros, 1e-5, None, None, kind, 0, False)[0]

    zeros = (
        torch.zeros(SHAPES[0][1], dtype=torch.bfloat16, device="cuda") if torch.cuda.is_available() else None
    )  # it wants a bias
    return te(call)


def _te_backward(op: str, added: bool = False) -> dict[str, Call]:
    def call(dy, x, w, *rest):
        functions, stats = _te(), [r.view(-1) for r in (rest[:-1] if added else rest)]
        if op == "layer_norm":  # it has no addition of its own: one more kernel
            dx, dw, _ = functions.layernorm_bwd(dy, x, *stats, w, 0, False)
            return (dx + rest[-1] if added else dx), dw
        if added:
            return tuple(functions.rmsnorm_bwd_add(dy, x, rest[-1], *stats, w, 0, False))
        return tuple(functions.rmsnorm_bwd(dy, x, *stats, w, 0, False))

    return te(call)


# ---- norms with quantize --------------------------------------------------------------------------------------------

_FP8 = "float8_e4m3fn"


def norm_quantize_region(
    rows: int, width: int, block: tuple[int, int], residual: bool, transposed: bool, layout: str = "row"
) -> Region:
    """rms_norm and the quantize of its result to e4m3."""
    b = GraphBuilder()
    matrix = TensorSpec((Dim("t", rows), width), "bfloat16")
    given = {"x": b.input("x", matrix), "weight": b.input("weight", TensorSpec((width,), "bfloat16"))}
    given |= {"residual": b.input("residual", matrix)} if residual else {}
    y, *rest = b.op("rms_norm", want=["y", *(["residual_out"] if residual else []), "rstd"], eps=1e-5, **given)
    ports = ["data", "scale_inv", *(["data_t", "scale_inv_t"] if transposed else [])]
    graph = b.build([*b.op("quantize", want=ports, x=y, dtype=_FP8, block=block, layout=layout), *rest])
    return region_of(graph, graph.nodes)


def _norm_quantize_rows() -> Iterator[Row]:
    kinds = {"1x128": ((1, 128), "row"), "MXFP8": ((1, 32), "swizzled")}
    for (rows, width), residual, kind, transposed in itertools.product(SHAPES[:2], (True, False), kinds, (False, True)):
        if kind == "MXFP8" and not residual:
            continue
        region = norm_quantize_region(rows, width, kinds[kind][0], residual, transposed, kinds[kind][1])
        name = (
            f"rms_norm {rows}x{width}{' + residual' if residual else ''} + {kind}{' both ways' if transposed else ''}"
        )
        libraries = _te_norm_quantize(residual, transposed) if kind == "1x128" else {}
        yield Row(name, "norm_quantize/cute", region, random_inputs(region), 0.75 if transposed else 0.85, (),
                  libraries,
                  tuple(_quantize_knobs(width // 8, transposed)))  # fmt: skip


def _quantize_knobs(vectors: int, transposed: bool) -> Iterator[Knobs]:
    fits = [t for t in range(32, 1025, 32) if vectors % t == 0 and vectors // t in (2, 4, 7, 8)]
    for threads in fits:
        yield _items(threads=threads, rows=1)
        if not transposed:
            yield _items(threads=threads, rows=1, hold_weight=True)
            yield _items(threads=threads, rows=1, streaming=True)
    for threads in (32, 64, 128, 256) if transposed else ():
        if -(-vectors // threads) in (2, 3, 4):
            yield _items(threads=threads, rows=256 // threads, together=True)
    usual = min(fits, key=lambda t: abs(vectors // t - 4))
    yield _items(
        threads=usual,
        rows=max(1, 256 // usual),
        stages=2,
        blocks=max(1, 1024 // max(256, usual)),
        hold_weight=not transposed,
    )


def _te_quantizer(transposed: bool):
    """Its quantiser to e4m3 in blocks of 1 x 128, scales not rounded to powers of two."""
    from transformer_engine.pytorch import Float8BlockQuantizer

    return Float8BlockQuantizer(_te().DType.kFloat8E4M3, rowwise=True, columnwise=transposed, force_pow_2_scales=False, block_scaling_dim=1)


def _te_norm_quantize(residual: bool, transposed: bool) -> dict[str, Call]:
    """Its norm that writes fp8 in blocks of 1 x 128; a residual is added by a kernel in front, as there."""

    def call(x, w, *rest):
        functions = _te()
        h = torch.add(x, rest[0]) if residual else x
        quantizer = _te_quantizer(transposed)
        functions.rmsnorm_fwd(h, w, 1e-5, None, quantizer, functions.DType.kBFloat16, 0, False)
        return ()  # its scales lie otherwise

    return te(call)


# ---- quantize, swiglu, and both -------------------------------------------------------------------------------------

_KINDS = {"1x128": {"block": (1, 128)}, "MXFP8": {"block": (1, 32), "layout": "swizzled"}, "tensor": {"block": (0, 0)}}
_GATED = ((16384, 14336), (8192, 14336), (16384, 2048))


def quantize_region(rows: int, width: int, kind: str, transposed: bool, gate: bool = False) -> Region:
    """The quantize of x [rows, width] to e4m3, or of the swiglu of x [rows, 2 * width]."""
    b, whole = GraphBuilder(), kind == "tensor"
    x = b.input("x", TensorSpec((Dim("t", rows), width * (1 + gate)), "bfloat16"))
    scale = {"scale": b.input("scale", TensorSpec((1,), "float32"))} if whole else {}
    ports = [
        "data",
        "scale_inv",
        *(["data_t", *([] if whole else ["scale_inv_t"])] if transposed else []),
        *(["amax"] if whole else []),
    ]
    made = b.op("quantize", want=ports, x=b.op("swiglu", x=x) if gate else x, dtype=_FP8, **_KINDS[kind], **scale)
    graph = b.build(list(made))
    return region_of(graph, graph.nodes)


def _quantize_rows() -> Iterator[Row]:
    for (rows, width), kind, transposed in itertools.product(SHAPES, _KINDS, (False, True)):
        region = quantize_region(rows, width, kind, transposed)
        tag = f"quantize {rows}x{width} {kind}{' both ways' if transposed else ''}"
        libraries = _te_quantize(transposed) if kind == "1x128" else {}
        yield Row(
            tag,
            "quantize/cute",
            region,
            _positive_scale(region),
            0.85,
            (),
            libraries,
            tuple(_tile_knobs()),
            exact=True,
        )
    for rows, width in SHAPES[:2]:
        data, scales = (
            TensorSpec((Dim("t", rows), width), _FP8, scale=ScaleSpec((1, 128))),
            TensorSpec((Dim("t", rows), width // 128), "float32"),
        )
        region = one_node("dequantize", ["y"], {"data": data, "scale_inv": scales}, dtype="bfloat16", block=(1, 128))
        yield Row(f"dequantize {rows}x{width} 1x128", "quantize/cute", region, _small_data(region), 0.85, exact=True)


def _swiglu_rows() -> Iterator[Row]:
    engines, knobs = ("pointwise/inductor",), tuple(_gate_knobs())
    for rows, width in _GATED:
        wide, narrow = (TensorSpec((Dim("t", rows), n), "bfloat16") for n in (2 * width, width))
        made = one_node("swiglu", ["y"], {"x": wide})
        yield Row(f"swiglu {rows}x2x{width}", "activation/cute", made, random_inputs(made), 0.95, engines,
                  te(lambda x: _te().swiglu(x, None)), knobs)  # fmt: skip
        made = one_node("swiglu_bwd", ["dx"], {"dy": narrow, "x": wide})
        yield Row(f"swiglu {rows}x2x{width} backward", "activation/cute", made, random_inputs(made), 0.95, engines,
                  te(lambda dy, x: _te().dswiglu(dy, x, None)), knobs)  # fmt: skip
    weights = TensorSpec((Dim("t", _GATED[2][0]),), "float32")
    made = one_node("swiglu_bwd", ["dx", "drow_weight"], {"dy": narrow, "x": wide, "row_weight": weights})
    name = f"swiglu {rows}x2x{width} backward with row weights"
    yield Row(name, "activation/cute", made, random_inputs(made), 0.88, engines)
    for (rows, width), kind, transposed in itertools.product(_GATED[:2], _KINDS, (False, True)):
        region = quantize_region(rows, width, kind, transposed, gate=True)
        tag = f"swiglu {rows}x2x{width} + {kind}{' both ways' if transposed else ''}"
        libraries = _te_quantize(transposed, gate=True) if kind == "1x128" else {}
        yield Row(tag, "swiglu_quantize/cute", region, _positive_scale(region), 0.8 if transposed else 0.85, (),
                  libraries,
                  tuple(_tile_knobs()))  # fmt: skip


def _gate_knobs() -> Iterator[Knobs]:
    for threads, vectors, streaming in itertools.product((128, 256), (1, 2, 4), (False, True)):
        yield _items(threads=threads, vectors=vectors, keep=False, streaming=streaming)
    for threads, vectors in ((64, 1), (512, 1), (64, 2)):
        yield _items(threads=threads, vectors=vectors, keep=False, streaming=True)
    for vectors, streaming in itertools.product((1, 2), (False, True)):
        yield _items(threads=128, vectors=vectors, keep=True, streaming=streaming)


def _tile_knobs() -> Iterator[Knobs]:
    for down, streaming in itertools.product((False, True), repeat=2):
        yield _items(down=down, streaming=streaming)


def _positive_scale(region: Region):
    return random_inputs(region, lambda name, t: t.abs_().add_(1) if name == "scale" else t)


def _small_data(region: Region):
    """Data and scales of a quantize: 8-bit values have no random numbers of their own."""
    rows, width = (d.hint if isinstance(d, Dim) else d for d in region.spec("data").shape)

    def make(gen: torch.Generator) -> list[torch.Tensor]:
        data = (
            torch.empty(rows, width, device="cuda", dtype=torch.bfloat16).normal_(generator=gen).to(torch.float8_e4m3fn)
        )
        return [data, torch.empty(rows, width // 128, device="cuda").uniform_(0.5, 2, generator=gen)]

    return make


def _te_quantize(transposed: bool, gate: bool = False) -> dict[str, Call]:
    def call(x):
        functions = _te()
        quantizer = _te_quantizer(transposed)
        if gate:
            functions.swiglu(x, quantizer)
        else:
            quantizer(x)
        return ()  # its scales lie otherwise

    return te(call)


# ---- rotary embedding -----------------------------------------------------------------------------------------------

_TWO = (8192, 2)  # tokens; with 128 channels a head, 32, 56, 16 and 96 of them are rows of the widths of SHAPES
_HEADS = {
    "llama": (_TWO, 32, 8, 128, 64), "qwen": (_TWO, 28, 4, 128, 64), "partial": (_TWO, 32, 8, 80, 24),
    "small": (_TWO, 16, 16, 64, 32), "16384x7168": (_TWO, 56, 8, 128, 64), "65536x2048": ((32768, 2), 16, 4, 128, 64),
    "4096x12288": ((2048, 2), 96, 8, 128, 64),
}  # fmt: skip


def _rope_rows() -> Iterator[Row]:
    """Alone, out of and into a fused QKV product, with norms over each head of queries and keys."""
    for name, (tokens, queries, keys, head, half) in _HEADS.items():
        for form, norm in (("alone", None), ("split", None), ("merge", None), ("split", "rms_norm"), ("norm_bwd", "rms_norm")):
            case = cute_rope.Case(form, tokens, queries, 0 if form == "alone" else keys, head, half, norm=norm, inverse=form in ("merge", "norm_bwd"))
            made = cute_rope.region(case)
            unread = 2 * tokens[0] * tokens[1] * keys * head if form == "norm_bwd" else 0  # the values' part of the product
            engines = () if form == "norm_bwd" else ("pointwise/inductor", *(["rope/quack"] if form == "alone" else []))
            tag = {"alone": "rope", "split": "split + qk-norm + rope" if norm else "split + rope", "merge": "rope + merge"}
            yield Row(f"{tag.get(form, 'rope + qk-norm backward + merge')} {name}", "rope/cute", made, _head_inputs(made), 0.88 if norm else 0.94, engines,
                      {} if norm or form == "merge" else _te_rope(case), tuple(_head_knobs(case)), unread=unread)  # fmt: skip


def _te_rope(case: cute_rope.Case) -> dict[str, Call]:
    """Its fused rotation, alone or with the split, of angles that it takes instead of cos and sin."""

    def call(x, cos, sin):
        from transformer_engine.pytorch.attention import rope

        if not angles:
            angles.append(torch.randn(case.tokens[0], 1, 1, 2 * case.half, device=x.device))
        if case.form == "alone":
            rope.apply_rotary_pos_emb(x, angles[0], tensor_format="sbhd", fused=True)
        else:
            group = case.queries // case.keys * case.head_dim
            grouped = x.view(*x.shape[:-1], case.keys, group + 2 * case.head_dim)
            rope.apply_fused_qkv_rotary_pos_emb(grouped, angles[0], angles[0], [group, case.head_dim, case.head_dim])
        return ()  # of other angles

    angles: list[torch.Tensor] = []
    return te(call)


def _head_inputs(region: Region):
    return random_inputs(region, lambda name, t: t.abs_().add_(0.5) if name.endswith("rstd") else t)


def _head_knobs(case: cute_rope.Case) -> Iterator[Knobs]:
    share = case.queries // case.keys if case.keys else case.queries
    rounds = [r for r in range(1, 9) if share % r == 0][-4:]
    for threads, r, total in itertools.product((64, 128, 256), rounds, (512, 768, 1024, 1280)):
        yield _items(threads=threads, rounds=r, ahead=False, resident=total // threads, streaming=True)
    for threads, r, total in itertools.product((64, 128), rounds[-2:], (256, 384, 512)):
        yield _items(threads=threads, rounds=r, ahead=True, resident=total // threads, streaming=True)
    for r in rounds[-2:]:
        yield _items(threads=128, rounds=r, ahead=False, resident=4, streaming=False)


# ---- rows by expert and back ----------------------------------------------------------------------------------------

_ROUTED = ((16384, 6, 64, 2048), (16384, 8, 128, 2048))  # tokens, slots, experts, width
_MOVES = {"permute": "permute", "unpermute": "unpermute", "permute_bwd": "permute backward",
          "unpermute_bwd": "unpermute backward"}  # fmt: skip


def _moe_rows() -> Iterator[Row]:
    """Rows alone, and with what a training step has of probabilities."""
    for (tokens, slots, experts, width), (op, want, probs) in itertools.product(_ROUTED, cute_moe.KINDS):
        case = cute_moe.Case(op, want, tokens, slots, experts, width, probs=probs)
        made, dots = cute_moe.region(case), op == "unpermute_bwd" and "dprobs" in want
        maps: dict[int, tuple[torch.Tensor, ...]] = {}
        tag = f"{_MOVES[op]} {tokens}x{slots} of {experts}, {width}{' with probabilities' if probs else ''}"
        yield Row(tag, "moe/cute", made, _moved_inputs(case, made, maps), 0.92 if op.startswith("un") else 0.88,
                  ("moe/torch",), _te_moves(case, maps), tuple(_move_knobs(dots)))  # fmt: skip


def _moved_inputs(case: cute_moe.Case, region: Region, maps: dict[int, tuple[torch.Tensor, ...]]):
    """Each token's experts are drawn without preference. Into ``maps`` go, by the address of row_map, the experts of the
    slots and Transformer Engine's map, which lies slot by slot."""

    def make(gen: torch.Generator) -> list[torch.Tensor]:
        experts = torch.rand(case.tokens, case.experts, generator=gen, device="cuda").topk(case.slots).indices.int()
        attributes = {"num_experts": case.experts, "align": 1}
        places = dict(op_table()["group_by_expert"].reference({"expert_map": experts}, attributes, ()))
        maps[places["row_map"].data_ptr()] = experts, places["row_map"].t().contiguous().flatten()
        for port in region.graph.inputs:
            if port not in places:
                shape = [d.hint if isinstance(d, Dim) else d for d in region.graph.specs[port].shape]
                t = torch.empty(shape, device="cuda", dtype=getattr(torch, region.graph.specs[port].dtype))
                places[port] = t.uniform_(generator=gen) if port == "probs" else t.normal_(generator=gen)
        return [places[port] for port in region.graph.inputs]

    return make


def _move_knobs(dots: bool) -> Iterator[Knobs]:
    for threads, vectors, streaming in itertools.product((64, 128, 256, 512), (None,) if dots else (1, 2, 4), (False, True)):
        yield cute_moe.knobs(threads, vectors, streaming)


def _te_moves(case: cute_moe.Case, maps: dict[int, tuple[torch.Tensor, ...]]) -> dict[str, Call]:
    """Its kernels for an index map: permute sorts the map too and moves no probabilities; sums and gradients go by its
    map."""
    ports, kept = list(cute_moe.region(case).graph.inputs), []

    def call(*given):
        functions, t = _te(), dict(zip(ports, given, strict=True))
        kind, (experts, places) = functions.DType.kBFloat16, maps[t["row_map"].data_ptr()]
        if case.op == "permute":
            slots = case.tokens * case.slots
            made, _, workspace = functions.moe_permute_fwd(t["x"], kind, experts, -1, kept, slots)
            kept[:] = workspace
            return made
        if case.op == "permute_bwd":
            return functions.moe_permute_bwd(t["drows"], kind, places, torch.empty(0), case.tokens, case.slots)
        if case.op == "unpermute":
            probs = t.get("probs", torch.empty(0))
            return functions.moe_unpermute_fwd(t["rows"], kind, places, probs, case.tokens, case.slots)
        return tuple(functions.moe_unpermute_bwd(t["dy"], t["rows"], kind, places, t["probs"]))

    if case.op == "unpermute_bwd" and case.probs is None:
        return {}  # it needs them to know the number of slots
    return {f"{name}, with its sort" if case.op == "permute" else name: c for name, c in te(call).items()}


FAMILIES: dict[str, Callable[[], Iterator[Row]]] = {
    "norm": _norm_rows, "norm_quantize": _norm_quantize_rows, "quantize": _quantize_rows, "swiglu": _swiglu_rows,
    "rope": _rope_rows, "moe": _moe_rows,
}  # fmt: skip


# ---- timing ---------------------------------------------------------------------------------------------------------


def offers(row: Row, arch: Arch, sweep: bool) -> Iterator[tuple[str, str, Offer]]:
    """(contender's name, engine, offer): ours, with every list of knobs that it takes where ``sweep``, and the peers
    that are engines."""
    for engine in (row.own, *row.engines):
        loaded = BY_ID[engine].load()
        answer = loaded.match(row.region, arch)
        if isinstance(answer, Decline):
            print(f"{row.name}: {engine} declines: {answer.reason}", flush=True)
            continue
        yield engine, engine, answer
        for knobs in row.knobs if sweep and engine == row.own else ():
            tried = loaded.offer_with(row.region, arch, knobs)
            if isinstance(tried, Offer) and tried.knobs != answer.knobs:
                yield f"{engine} {json.dumps(dict(tried.knobs))}", engine, tried


def contenders(row: Row, arch: Arch, sweep: bool) -> Iterator[tuple[str, Call]]:
    """Name and function over the region's inputs; one that cannot be built is told and left out."""
    for name, engine, offer in offers(row, arch, sweep):
        if why := BY_ID[engine].absent():
            print(f"{row.name}: {engine} is absent: {why}", flush=True)
            continue
        try:
            yield name, BY_ID[engine].load().build(memory.context(row.region, arch, offer)).launch
        except Exception as error:
            print(f"{row.name}: {name} does not build: {type(error).__name__}: {str(error)[-300:]}", flush=True)
    yield from row.libraries.items()


def wrong(row: Row, call: Call, inputs: list[torch.Tensor], expected: tuple[torch.Tensor, ...]) -> str | None:
    """What is wrong with a contender's results, None where they are right. ``exact``: a byte; else more than one value
    of a thousand that is off by 2 % of the largest (sums differ by their order, and what is quantised from them by
    more; the tests are the ones to hold results to more)."""
    got = call(*inputs)
    got = got if isinstance(got, tuple) else (got,)
    for i, (a, b) in enumerate(zip(got, expected, strict=False)):
        if row.exact:
            if not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
                return f"result {i} differs in {int((a.view(torch.uint8) != b.view(torch.uint8)).sum())} bytes"
        else:
            a, b = a.float(), b.float()
            top = float(b.abs().max())
            many = int(((a - b).abs() <= 0.02 * top).logical_not_().sum())
            if many > b.numel() / 1000:
                return f"result {i}: {many} of {b.numel()} values are off by more than 2 % of {top:.3g}"
    return None


def graph_of(call: Call, sets: list[list[torch.Tensor]], pool) -> torch.cuda.CUDAGraph:
    """``LAUNCHES`` calls over inputs that rotate."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for given in sets:
            call(*given)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        for i in range(LAUNCHES):
            call(*sets[i % len(sets)])
    return graph


def in_turns(graphs: dict[str, torch.cuda.CUDAGraph]) -> dict[str, float]:
    """Median seconds of one launch of each graph; another one is first each time."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    names = list(graphs)
    for graph in graphs.values():
        graph.replay()
    for turn in range(ROUNDS):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graphs[name].replay()
            stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop) / LAUNCHES / 1e3)
    return {name: statistics.median(t) for name, t in times.items()}


def measure(row: Row, arch: Arch, sweep: bool) -> dict:
    gen = torch.Generator(device="cuda").manual_seed(0)
    size = max(row.nbytes, 1)
    count = max(2, -(-4 * torch.cuda.get_device_properties(0).L2_cache_size // size))
    sets = [row.make(gen) for _ in range(count)]
    half = size // 2 // 16 * 16
    copies = [[torch.empty(half // 4, dtype=torch.int32, device="cuda").random_() for _ in range(2)] for _ in range(count)]
    expected = reference_launch(row.region)(*sets[0])
    expected = expected if isinstance(expected, tuple) else (expected,)
    pool = torch.cuda.graph_pool_handle()
    graphs, notes = {name: graph_of(call, copies, pool) for name, call in COPIES.items()}, {}
    for name, call in contenders(row, arch, sweep):
        try:
            why = wrong(row, call, sets[0], expected)
            if why is None:
                graphs[name] = graph_of(call, sets, pool)
            else:
                notes[name] = f"WRONG: {why}"
        except Exception as error:
            notes[name] = f"fails: {type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
            torch.cuda.synchronize()
    times = in_turns(graphs)
    return result(row, times, notes)


def result(row: Row, times: dict[str, float], notes: dict[str, str]) -> dict:
    copy = min(times[name] for name in COPIES)
    ours = {n: t for n, t in times.items() if n.split(" ")[0] == row.own}
    peers = {n: t for n, t in times.items() if n not in COPIES and n not in ours}
    rows = [{"name": n, "us": round(t * 1e6, 2), "tb_s": round(row.nbytes / t / 1e12, 3), "of_copy": round(copy / t, 3)}
            for n, t in sorted(times.items(), key=lambda item: item[1])]  # fmt: skip
    best = min(peers.values(), default=None)
    default = times.get(row.own)
    made = {"row": row.name, "bytes": row.nbytes, "least": row.least, "contenders": rows, "notes": notes}
    if default is not None:
        made |= {"of_copy": round(copy / default, 3), "met": copy / default >= row.least,
                 "over_best_peer": None if best is None else round(best / default, 3),
                 "best_knobs_of_copy": round(copy / min(ours.values()), 3)}  # fmt: skip
    return made


def show(made: dict) -> None:
    head = {k: v for k, v in made.items() if k not in ("contenders", "notes")}
    print(json.dumps(head), flush=True)
    for c in made["contenders"][:24]:
        print(
            f"    {c['us']:9.2f} us  {c['tb_s']:6.3f} TB/s  {100 * c['of_copy']:5.1f} % of copy  {c['name']}",
            flush=True,
        )
    for name, note in made["notes"].items():
        print(f"    {name}: {note}", flush=True)


def compile_rows(rows: list[Row], arch: Arch, sweep: bool, workers: int) -> None:
    """Into the cache of LAYERPLAN_CACHE, what the rows' own kernels need."""
    contexts = [(e, BuildContext(r.region, arch, o)) for r in rows for _, e, o in offers(r, arch, sweep) if e == r.own]
    jobs, _ = ahead.jobs_of(contexts, None)
    print(f"{len(jobs)} kernels for {arch.name}", flush=True)
    for done in ahead.compile_all(jobs, Store(cache_folders()), workers):
        if done.note or getattr(done, "frame_bytes", 0):
            print(f"    {done}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="", help="rows whose family and name hold this text, as norm/rms_norm 16384x4096"
    )
    parser.add_argument("--sweep", action="store_true", help="the row's lists of knobs too")
    parser.add_argument("--compile", metavar="ARCH", help="compile for this arch and time nothing")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = [r for family, make in FAMILIES.items() for r in make() if given.only in f"{family}/{r.name}"]
    if given.compile:
        compile_rows(rows, Arch.parse(given.compile), given.sweep, given.workers)
        return
    arch, made = Arch.of_device(0), []
    for row in rows:
        made.append(measure(row, arch, given.sweep))
        show(made[-1])
        torch.cuda.empty_cache()
        if given.out:
            record = {
                "what": "memory-bound kernels",
                "launches": LAUNCHES,
                "rounds": ROUNDS,
                **environment(),
                "rows": made,
            }
            given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
