"""The rows of ``tests.bench.memory_bound``: ops at shapes, our engine for each, its peers and their calls.

A family adds its rows with a function in ``FAMILIES``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch

from layerplan.integration.engines.arch import Arch
from layerplan.integration.engines.contract import Region
from layerplan.integration.engines.manifest import BY_ID
from layerplan.integration.engines.packages import locate
from layerplan.integration.graph.ir import Dim, GraphBuilder, ScaleSpec, TensorSpec
from layerplan.integration.graph.ops.table import op_table
from layerplan.integration.plan_cache import memory
from layerplan.integration.planner.cover import region_of
from tests.cases import cute_moe, cute_moe_quantize, cute_rope

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
    """Threads so that a thread has 1 to 16 vectors of 16 bytes; rows, stages and the rest around what fits."""
    vectors, backward = region.spec("x").shape[-1] // 8, region.node.op.endswith("_bwd")
    fits = [t for t in range(32, 1025, 32) if vectors % t == 0 and vectors // t <= (4 if backward else 16)]
    choices = [t for t in fits if vectors // t in ((1, 2, 4) if backward else (2, 4, 7, 8, 14, 16))] or fits[-2:]
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
    return {"transformer_engine": call} if locate("transformer_engine").here else {}


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
                  tuple(_quantize_knobs(width // 8, transposed, kind == "1x128")))  # fmt: skip


def _quantize_knobs(vectors: int, transposed: bool, blocks: bool) -> Iterator[Knobs]:
    fits = [t for t in range(32, 1025, 32) if vectors % t == 0 and vectors // t in (2, 4, 7, 8)]
    aside = transposed and blocks
    for threads in fits:
        yield _items(threads=threads, rows=1)
        if aside:
            yield _items(threads=threads, rows=1, apart=True)
        if not transposed:
            yield _items(threads=threads, rows=1, hold_weight=True)
            yield _items(threads=threads, rows=1, streaming=True)
    for threads in (32, 64, 128, 256) if transposed else ():
        if -(-vectors // threads) in (2, 3, 4):
            yield _items(threads=threads, rows=256 // threads, together=True)
            if aside:
                yield _items(threads=threads, rows=256 // threads, together=True, apart=True)
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
            tuple(_tile_knobs(kind == "1x128" and transposed)),
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
                  tuple(_tile_knobs(kind == "1x128" and transposed)))  # fmt: skip


def _gate_knobs() -> Iterator[Knobs]:
    for threads, vectors, streaming in itertools.product((128, 256), (1, 2, 4), (False, True)):
        yield _items(threads=threads, vectors=vectors, streaming=streaming)
    for threads, vectors in ((64, 1), (512, 1), (64, 2)):
        yield _items(threads=threads, vectors=vectors, streaming=True)


def _tile_knobs(aside: bool) -> Iterator[Knobs]:
    for apart in ({"apart": False}, {"apart": True}) if aside else ({},):
        for down, streaming in itertools.product((False, True), repeat=2):
            yield _items(down=down, streaming=streaming, **apart)


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
    for threads, r, total in itertools.product((64, 128), rounds[-3:], (768, 1024)):
        yield _items(threads=threads, rounds=r, ahead=False, resident=total // threads, streaming=True)
    usual = rounds[-2:][0]  # the second largest, where there are two
    yield _items(threads=256, rounds=usual, ahead=False, resident=4, streaming=True)
    yield _items(threads=128, rounds=usual, ahead=True, resident=4, streaming=True)
    yield _items(threads=128, rounds=usual, ahead=False, resident=8, streaming=False)


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


def _moe_quantize_rows() -> Iterator[Row]:
    """permute with the quantize of its rows in blocks of 1 x 128, beside our two kernels for it."""
    for (tokens, slots, experts, width), probs in itertools.product((*_ROUTED, (8192, 8, 256, 7168)), (None, "float32")):
        case = cute_moe_quantize.Case(tokens, slots, experts, width, probs=probs)
        made = cute_moe_quantize.region(case)
        tag = f"permute {tokens}x{slots} of {experts}, {width}{' with probabilities' if probs else ''} + 1x128"
        yield Row(tag, "moe_quantize/cute", made, _moved_inputs(case, made, {}), 0.85, (),
                  {"moe/cute, then quantize/cute": _one_by_one(made, ("moe/cute", "quantize/cute"))},
                  tuple(_move_knobs(False)), exact=True)  # fmt: skip


def _one_by_one(region: Region, engines: tuple[str, ...]) -> Call:
    """A call that runs the region's nodes one after the other, each on its engine."""
    launches: list[tuple[Region, Call]] = []

    def call(*given):
        if not launches:
            arch = Arch.of_device(torch.cuda.current_device())
            for node, engine in zip(region.nodes, engines, strict=True):
                part, loaded = region_of(region.graph, [node]), BY_ID[engine].load()
                launches.append((part, loaded.build(memory.context(part, arch, loaded.match(part, arch))).launch))
        values = dict(zip(region.graph.inputs, given, strict=True))
        for part, launch in launches:
            got = launch(*(values[v] for v in part.graph.inputs))
            values |= zip(part.graph.outputs, got if isinstance(got, tuple) else (got,), strict=True)
        return tuple(values[v] for v in region.graph.outputs)

    return call


def _moved_inputs(case: cute_moe.Case | cute_moe_quantize.Case, region: Region, maps: dict[int, tuple[torch.Tensor, ...]]):
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
    "rope": _rope_rows, "moe": _moe_rows, "moe_quantize": _moe_quantize_rows,
}  # fmt: skip
