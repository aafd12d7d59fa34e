"""Every op as a differentiable function over a one-node plan.

Shapes are written ``[b, s, h, d]`` (batch, sequence, heads, head dim) or packed ``[t, h, d]``. Every function takes
``engine="family/name"`` (force one engine; a decline is an error) and ``policy=`` (a mode or a Policy). Inputs that break a
rule raise ValueError or TypeError before any launch, naming field, value and rule. Inputs are never modified.

Double backward (``create_graph=True``) and torch.func transforms of recorded calls are refused with a RuntimeError, except where
the whole plan is one library call (``linear`` without a bias on torch is): torch differentiates that as often as asked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from .graph.ir import Graph, GraphBuilder, ScaleSpec
from .graph.ops.attention import check_cu_seqlens
from .graph.ops.moe import capacity
from .graph.ops.quantize import LAYOUTS, TENSOR, scale_spec
from .planner.policy import Policy
from .planner.runner import Runner, readable
from .planner.shapes import SpecMaker, bucket, dtype_name

Tensor = torch.Tensor
_runners: dict[tuple, Runner] = {}


def _make(key: tuple, op: str, ports: tuple[str, ...], patterns: tuple[str, ...], attrs: dict[str, Any],
          engine: str | None, policy: Policy | str | None, want: tuple[str, ...], scaled: ScaleSpec | None = None) -> Runner:  # fmt: skip
    """The runner of one op with one set of attributes and connected ports. ``scaled``: how the first input is scaled."""

    def build(*tensors: Tensor) -> Graph:
        b, spec = GraphBuilder(), SpecMaker()
        specs = {p: spec(t, pattern) for p, t, pattern in zip(ports, tensors, patterns, strict=True)}
        if scaled is not None:
            specs[ports[0]] = dataclasses.replace(specs[ports[0]], scale=scaled)
        values = {p: b.input(p, s) for p, s in specs.items()}
        out = b.op(op, want=want, **values, **attrs)
        names = dict(b.node_of(out if isinstance(out, str) else out[0]).outputs)
        graph = b.build([names[p] for p in want])

        _runners[key] = runner  # once the graph has passed: a key that is refused is not kept
        return graph

    runner = Runner(build, ports, policy=_policy(op, engine, policy), name=op)
    return runner


def _policy(op: str, engine: str | None, policy: Policy | str | None) -> Policy:
    chosen = Policy.of(policy)
    if chosen.per_module:
        raise ValueError(f"{op}: policy per_module = {dict(chosen.per_module)}: patterns match names of modules, which a function has none of; "
                         "pass a mode or a Policy without them")  # fmt: skip
    return chosen if engine is None else chosen.forcing(engine, op)


def _graph_runner(key: tuple, op: str, ports: Mapping[str, str],
                  make: Callable[[GraphBuilder, dict[str, str]], list[str]], engine: str | None,
                  policy: Policy | str | None) -> Runner:  # fmt: skip
    """The runner of a function that is more than one op, or whose specs say more than its tensors. ``ports``: input ->
    pattern of its dims; ``make`` takes a builder and the inputs' values by name and returns the outputs."""

    def build(*tensors: Tensor) -> Graph:
        b, spec = GraphBuilder(), SpecMaker()
        values = {p: b.input(p, spec(t, pattern)) for (p, pattern), t in zip(ports.items(), tensors, strict=True)}
        graph = b.build(make(b, values))
        _runners[key] = runner  # once the graph has passed: a key that is refused is not kept
        return graph

    runner = Runner(build, tuple(ports), policy=_policy(op, engine, policy), name=op)
    return runner


def _unhashable(op: str, policy: Any, **fields: Any) -> Exception:
    """What is wrong with arguments that cannot be a key: lists, dicts and the like in the place of values."""
    if isinstance(policy, Mapping):
        return ValueError(f"{op}: policy = {policy!r}: patterns match names of modules, which a function has none of; pass a mode or a Policy")
    for field, value in {**fields, "policy": policy}.items():
        try:
            hash(value)
        except TypeError:
            return TypeError(f"{op}: {field} = {value!r}: must be an immutable value, got {type(value).__name__}"
                             + ("; pass a tuple" if isinstance(value, list) else ""))  # fmt: skip
    raise AssertionError("unreachable: every field is hashable")


def _call(op: str, attrs: tuple[tuple[str, Any], ...], inputs: tuple[tuple[str, str, Tensor | None], ...],
          engine: str | None, policy: Policy | str | None, want: tuple[str, ...], scaled: ScaleSpec | None = None):  # fmt: skip
    """The general path: ``inputs`` are (port, dim pattern, tensor or None); ``scaled`` is what ``attrs`` say of the first one."""
    tensors = [i[2] for i in inputs if i[2] is not None]
    # with the types: 4.0 and True have the hashes of 4 and 1, and rules of their own
    key = (op, *[i[2] is None for i in inputs], attrs, *[type(a[1]) for a in attrs], engine, policy, want)
    try:
        runner = _runners.get(key)
    except TypeError:
        raise _unhashable(op, policy, **dict(attrs), engine=engine) from None
    if runner is None:
        given = [i for i in inputs if i[2] is not None]
        ports, patterns = (tuple(i[k] for i in given) for k in (0, 1))
        runner = _make(key, op, ports, patterns, dict(attrs), engine, policy, want, scaled)
    return runner(*tensors)


def _seed_offset(op: str, rng: tuple[Tensor, Tensor] | None) -> tuple[Tensor | None, Tensor | None]:
    if rng is None:
        return None, None
    if not isinstance(rng, tuple | list) or len(rng) != 2:
        raise TypeError(f"{op}: rng = {type(rng).__name__}: must be a pair (seed, offset) of int64 tensors of one element")
    return rng[0], rng[1]


_Y, _Y_RESIDUAL, _LOSS = ("y",), ("y", "residual_out"), ("loss",)


def _norm(op: str, x, weight, eps, bias, residual, zero_centered, engine, policy):
    if bias is None and residual is None:  # the hot path: one key, one call
        key = (op, eps, type(eps), zero_centered, type(zero_centered), engine, policy)
        try:
            runner = _runners.get(key)
        except TypeError:
            raise _unhashable(op, policy, eps=eps, zero_centered=zero_centered, engine=engine) from None
        if runner is None:
            attrs = {"eps": eps, "zero_centered": zero_centered}
            runner = _make(key, op, ("x", "weight"), ("*t n!", "n!"), attrs, engine, policy, _Y)
        return runner(x, weight)
    return _call(op, (("eps", eps), ("zero_centered", zero_centered)),
                 (("x", "*t n!", x), ("weight", "n!", weight), ("bias", "n!", bias), ("residual", "*t n!", residual)),
                 engine, policy, _Y if residual is None else _Y_RESIDUAL)  # fmt: skip


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, bias: Tensor | None = None, residual: Tensor | None = None,
             zero_centered: bool = False, engine: str | None = None, policy: Policy | str | None = None):  # fmt: skip
    """RMSNorm over the last dim (Zhang and Sennrich, 2019).

    ``x`` [..., n]; ``weight`` and ``bias`` [n], any float dtype; ``residual`` like x. With a residual
    h = round(x + residual) is normed and returned: ``(y, h)``; otherwise ``y``. y = round(h * rstd * g + bias) with
    g = weight, or 1 + weight where ``zero_centered``: float32 inside, one rounding, with and without a residual.
    """
    return _norm("rms_norm", x, weight, eps, bias, residual, zero_centered, engine, policy)


def layer_norm(x: Tensor, weight: Tensor, *, eps: float, bias: Tensor | None = None, residual: Tensor | None = None,
               zero_centered: bool = False, engine: str | None = None, policy: Policy | str | None = None):  # fmt: skip
    """LayerNorm over the last dim (Ba, Kiros and Hinton, 2016). Arguments and result as for ``rms_norm``."""
    return _norm("layer_norm", x, weight, eps, bias, residual, zero_centered, engine, policy)


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None, *, engine: str | None = None,
           policy: Policy | str | None = None) -> Tensor:  # fmt: skip
    """``x @ w.T + bias``: x [..., k], w [n, k], bias [n], all of one dtype -> [..., n]."""
    if bias is None:  # the hot path
        key = ("linear", engine, policy)
        try:
            runner = _runners.get(key)
        except TypeError:
            raise _unhashable("linear", policy, engine=engine) from None
        if runner is None:
            runner = _make(key, "linear", ("x", "weight"), ("*t k!", "n! k!"), {}, engine, policy, _Y)
        return runner(x, w)
    return _call("linear", (), (("x", "*t k!", x), ("weight", "n! k!", w), ("bias", "n!", bias)), engine, policy, _Y)


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, positions: Tensor | None = None, interleaved: bool = False,
         inverse: bool = False, engine: str | None = None, policy: Policy | str | None = None) -> Tensor:  # fmt: skip
    """Rotary position embedding (Su et al., 2021).

    ``x`` [b, s, h, d] or packed [t, h, d]; ``cos``, ``sin`` [positions, r / 2] with r <= d (the other d - r elements pass
    through). ``positions``: int32 or int64, [b, s], [s] or [t]; default 0, 1, 2, ... along the sequence. Pairs are
    (i, i + r/2), or (2i, 2i + 1) if ``interleaved``. ``inverse`` turns back. The tables receive no gradient: ones that
    require it are refused in grad mode.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"rope: x = {type(x).__name__}: must be a torch.Tensor")
    if positions is not None and not isinstance(positions, Tensor):
        raise TypeError(f"rope: positions = {type(positions).__name__}: must be a torch.Tensor of int32 or int64")
    if x.dim() not in (3, 4):
        raise ValueError(f"rope: x has {x.dim()} dims: must be [b, s, h, d] or packed [t, h, d]; flatten the leading ones")
    axis = 1 if x.dim() == 4 else 0
    lead = "b s" if x.dim() == 4 else "s"
    pattern = lead if positions is not None and positions.dim() == x.dim() - 2 else "s"
    attrs = (("interleaved", interleaved), ("inverse", inverse), ("seq_axis", axis))
    inputs = (("x", f"{lead} h! d!", x), ("cos", "p r!", cos), ("sin", "p r!", sin), ("positions", pattern, positions))
    return _call("rope", attrs, inputs, engine, policy, _Y)


def _activation(x: Tensor, op: str, clamp: float | None, row_weight: Tensor | None, engine: str | None,
                policy: Policy | str | None) -> Tensor:  # fmt: skip
    if row_weight is None:  # the hot path
        key = (op, clamp, type(clamp), engine, policy)
        try:
            runner = _runners.get(key)
        except TypeError:
            raise _unhashable(op, policy, clamp=clamp, engine=engine) from None
        if runner is None:
            runner = _make(key, op, ("x",), ("*t f!",), {"clamp": clamp}, engine, policy, _Y)
        return runner(x)
    return _call(op, (("clamp", clamp),), (("x", "*t f!", x), ("row_weight", "*t", row_weight)), engine, policy, _Y)


def swiglu(gate_up: Tensor, *, clamp: float | None = None, row_weight: Tensor | None = None, engine: str | None = None,
           policy: Policy | str | None = None) -> Tensor:  # fmt: skip
    """``silu(gate) * up`` of ``gate_up`` [..., 2f] = [gate, up] -> [..., f].

    ``clamp`` c: gate to at most c, up to [-c, c], before the product. ``row_weight`` [...]: scales each row.
    """
    return _activation(gate_up, "swiglu", clamp, row_weight, engine, policy)


def geglu(gate_up: Tensor, *, clamp: float | None = None, row_weight: Tensor | None = None, engine: str | None = None,
          policy: Policy | str | None = None) -> Tensor:  # fmt: skip
    """``gelu(gate) * up`` (exact gelu) of ``gate_up`` [..., 2f] -> [..., f]; options as for swiglu."""
    return _activation(gate_up, "geglu", clamp, row_weight, engine, policy)


def gelu(x: Tensor, *, clamp: float | None = None, row_weight: Tensor | None = None, engine: str | None = None,
         policy: Policy | str | None = None) -> Tensor:  # fmt: skip
    """Exact gelu of ``x`` [..., f]; ``clamp`` limits x from above, ``row_weight`` [...] scales each row."""
    return _activation(x, "gelu", clamp, row_weight, engine, policy)


def squared_relu(x: Tensor, *, clamp: float | None = None, row_weight: Tensor | None = None, engine: str | None = None,
                 policy: Policy | str | None = None) -> Tensor:  # fmt: skip
    """``relu(x) ** 2`` of ``x`` [..., f]; options as for gelu."""
    return _activation(x, "squared_relu", clamp, row_weight, engine, policy)


def bias_dropout_add(x: Tensor, residual: Tensor, *, bias: Tensor | None = None, p: float = 0.0,
                     rng: tuple[Tensor, Tensor] | None = None, engine: str | None = None,
                     policy: Policy | str | None = None) -> Tensor:  # fmt: skip
    """``residual + dropout(x + bias, p)``: x, residual [..., n], bias [n]. ``rng`` = (seed, offset), int64 tensors of one
    element: the mask is a pure function of them and of the element's index."""
    if rng is not None and p == 0.0:
        raise ValueError("bias_dropout_add: rng is given but p = 0.0: it would be ignored; pass p= or drop rng=")
    seed, offset = _seed_offset("bias_dropout_add", rng)
    inputs = (("x", "*t n!", x), ("residual", "*t n!", residual), ("bias", "n!", bias), ("seed", "*i", seed), ("offset", "*i", offset))
    return _call("bias_dropout_add", (("p", p),), inputs, engine, policy, _Y)


def cross_entropy(logits: Tensor, targets: Tensor, *, ignore_index: int = -100, engine: str | None = None,
                  policy: Policy | str | None = None) -> Tensor:  # fmt: skip
    """Loss per token, float32: ``logits`` [..., classes], ``targets`` [...] int32 or int64 -> [...]. Targets equal to
    ``ignore_index`` give 0 and no gradient."""
    inputs = (("logits", "*t v!", logits), ("targets", "*t", targets))
    return _call("cross_entropy", (("ignore_index", ignore_index),), inputs, engine, policy, ("loss",))


def linear_cross_entropy(x: Tensor, w: Tensor, targets: Tensor, *, ignore_index: int = -100, engine: str | None = None,
                         policy: Policy | str | None = None) -> Tensor:  # fmt: skip
    """``cross_entropy(linear(x, w), targets)``: x [..., k], w [classes, k] of one dtype, targets [...] int32 or int64 -> float32 [...],
    without all of the logits at once. The backward makes them again: four products instead of three."""
    inputs = (("x", "*t k!", x), ("weight", "v! k!", w), ("targets", "*t", targets))
    return _call("linear_cross_entropy", (("ignore_index", ignore_index),), inputs, engine, policy, ("loss",))


def quantize(x: Tensor, *, block: tuple[int, int], scale: Tensor | None = None, dtype: torch.dtype = torch.float8_e4m3fn,
             layout: str = "row", power_of_two: bool = False, transposed: bool = False, amax: bool = False,
             engine: str | None = None, policy: Policy | str | None = None) -> tuple[Tensor, ...]:  # fmt: skip
    """8-bit floats and what they must be multiplied by: ``(data, scale_inv)``, then ``data_t, scale_inv_t`` with ``transposed`` and
    ``amax`` with ``amax``. The exact arithmetic stands in ``integration/graph/ops/quantize.py``.

    ``x`` [..., n], bfloat16, float16 or float32 -> ``data`` [..., n] of ``dtype`` (float8_e4m3fn or float8_e5m2). ``block``, in (rows,
    columns) of x as rows, one of

    - (0, 0), the whole tensor: data = x * ``scale`` (float32 [1]), scale_inv [1] = 1 / scale. ``amax``: float32 [1], the largest |x|.
    - (1, 128): scale_inv float32 [..., ceil(n / 128)], powers of two with ``power_of_two``.
    - (1, 32), MXFP8: scale_inv float8_e8m0fnu [..., ceil(n / 32)], or ``layout="swizzled"`` for the tensor cores of sm_100.

    ``transposed``: also data_t [n, rows] and its scales, in blocks along x's rows; of the whole tensor there is one scale for both.
    x must not require a gradient.
    """
    whole = isinstance(block, tuple) and block == TENSOR
    if amax and not whole:
        raise ValueError(f"quantize: amax with block = {block!r}: is the whole tensor's; pass block=(0, 0) or drop amax")
    want = ("data", "scale_inv", *(() if not transposed else ("data_t",) if whole else ("data_t", "scale_inv_t")), *(("amax",) if amax else ()))
    attrs = (("dtype", dtype_name(dtype)), ("block", block), ("layout", layout), ("power_of_two", power_of_two))
    return _call("quantize", attrs, (("x", "*t n!", x), ("scale", "i", scale)), engine, policy, want)


def dequantize(data: Tensor, scale_inv: Tensor, *, block: tuple[int, int], dtype: torch.dtype = torch.bfloat16, layout: str = "row",
               engine: str | None = None, policy: Policy | str | None = None) -> Tensor:  # fmt: skip
    """``data * scale_inv`` of each block, in ``dtype`` (bfloat16, float16 or float32): what ``quantize`` with the same ``block`` and
    ``layout`` made, data_t with scale_inv_t too. The product is rounded to float32 and then to dtype."""
    known = isinstance(block, tuple) and layout in LAYOUTS.get(block, ())  # the op's rule says what is wrong with others
    pattern = "i" if block == TENSOR else "*t k" if layout == "row" else "r k"
    attrs = (("dtype", dtype_name(dtype)), ("block", block), ("layout", layout))
    inputs = (("data", "*t n", data), ("scale_inv", pattern, scale_inv))
    return _call("dequantize", attrs, inputs, engine, policy, _Y, scale_spec(block, layout) if known else None)


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: tuple[int | None, int | None] = (None, None),
              sink: Tensor | None = None, softmax_scale: float | None = None, cu_seqlens_q: Tensor | None = None,
              cu_seqlens_k: Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
              return_lse: bool = False, rng: tuple[Tensor, Tensor] | None = None, dropout: float = 0.0,
              mask: Tensor | None = None, layout: str | None = None, engine: str | None = None,
              policy: Policy | str | None = None):  # fmt: skip
    """Softmax attention with grouped heads: ``out``, or ``(out, lse)`` with ``return_lse``.

    ``q`` [b, sq, hq, d], ``k`` [b, sk, hk, d], ``v`` [b, sk, hk, dv], hq a multiple of hk -> out [b, sq, hq, dv], lse float32
    [b, hq, sq] (natural log). Packed: q [tq, hq, d], k, v [tk, hk, ...] with ``cu_seqlens_q/k`` (int32, [n + 1], from 0,
    non-decreasing) -> lse [hq, tq]; ``max_seqlen_q/k``: longest segments, for kernels; unset, the token counts serve.
    Rows behind the last end belong to no segment: whatever they hold, they give 0, LSE -inf and gradient 0, none to a sink either.
    ``layout="sbhd"``: sequence first. Causal is bottom-right aligned; ``window`` (L, R) keeps keys
    i + sk - sq - L ... i + sk - sq + R, None open. ``sink`` [hq] adds one logit per head to the denominator; the LSE includes
    it. A row that sees no key gives 0 and LSE -inf (the sink, with one). ``mask``: bool [1 or b, 1 or h, sq, sk], True hides.
    ``dropout`` with ``rng`` = (seed, offset). Gradients flow from out and lse into q, k, v and sink. ``softmax_scale``:
    default 1 / sqrt(d).
    """
    if layout is None and isinstance(q, Tensor) and q.dim() == 4 and sink is None and cu_seqlens_q is None and cu_seqlens_k is None and mask is None and rng is None:
        key = ("sdpa", causal, type(causal), window, softmax_scale, type(softmax_scale), dropout, type(dropout), max_seqlen_q, max_seqlen_k, return_lse,
               engine, policy)  # fmt: skip
        try:
            runner = _runners.get(key)  # the hot path: checked and made below on the first call
        except TypeError:
            raise _unhashable("attention", policy, causal=causal, window=window, softmax_scale=softmax_scale, dropout=dropout,
                              max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, return_lse=return_lse, engine=engine) from None  # fmt: skip
        if runner is not None:
            return runner(q, k, v)
    else:
        key = None
    if not isinstance(q, Tensor):
        raise TypeError(f"attention: q = {type(q).__name__}: must be a torch.Tensor")
    layout = layout or ("thd" if q.dim() == 3 else "bshd")
    if rng is not None and dropout == 0.0:
        raise ValueError("attention: rng is given but dropout = 0.0: it would be ignored; pass dropout= or drop rng=")
    if layout == "thd":
        if cu_seqlens_q is None or cu_seqlens_k is None:
            raise ValueError("attention: packed inputs [t, h, d] need cu_seqlens_q and cu_seqlens_k; for one batch use [b, s, h, d]")
        check_longest({"q": (cu_seqlens_q, max_seqlen_q), "k": (cu_seqlens_k, max_seqlen_k)})
        if cu_seqlens_q.shape != cu_seqlens_k.shape:
            raise ValueError(f"attention: cu_seqlens_q has {cu_seqlens_q.numel()} entries, cu_seqlens_k {cu_seqlens_k.numel()}: must be equal")
        patterns = ("tq h! d!", "tq g! d!", "tq g! e!")
    elif cu_seqlens_q is not None or cu_seqlens_k is not None or max_seqlen_q is not None or max_seqlen_k is not None:
        raise ValueError(f"attention: cu_seqlens / max_seqlen with layout {layout!r}: they belong to packed inputs [t, h, d]")
    else:
        patterns = ("s b h! d!", "s b g! d!", "s b g! e!") if layout == "sbhd" else ("b s h! d!", "b s g! d!", "b s g! e!")
    attrs = (("layout", layout), ("causal", causal), ("window", window), ("scale", softmax_scale), ("dropout", dropout),
             ("max_seqlen_q", bucket(max_seqlen_q) if max_seqlen_q else None),
             ("max_seqlen_k", bucket(max_seqlen_k) if max_seqlen_k else None))  # fmt: skip
    seed, offset = _seed_offset("attention", rng)
    inputs = (
        ("q", patterns[0], q), ("k", patterns[1], k), ("v", patterns[2], v), ("sink", "h!", sink),
        ("cu_seqlens_q", "n", cu_seqlens_q), ("cu_seqlens_k", "n", cu_seqlens_k), ("mask", "b h! s s", mask),
        ("seed", "*i", seed), ("offset", "*i", offset),
    )  # fmt: skip
    want = ("out", "lse") if return_lse else ("out",)
    if key is not None:
        return _make(key, "sdpa", ("q", "k", "v"), patterns, dict(attrs), engine, policy, want)(q, k, v)
    return _call("sdpa", attrs, inputs, engine, policy, want)


class Permuted(NamedTuple):
    """What ``permute`` returns and ``unpermute`` takes. t tokens, k slots a token, e experts, h width, c rows:
    t * k + e * (align - 1)."""

    rows: Tensor
    """[c, h] in the dtype of x: the tokens by expert. Padding rows are zero; rows from offsets[-1] on hold anything."""
    probs: Tensor | None
    """[c] in the dtype of the probabilities, each row's own, as ``rows``; None without probabilities."""
    counts: Tensor
    """int32 [e]: how many rows each expert has."""
    offsets: Tensor
    """int32 [e]: where each expert's rows end, with its padding."""
    row_map: Tensor
    """int32 [t, k]: the row of each slot, -1 where it is dropped."""


def permute(x: Tensor, expert_map: Tensor, *, num_experts: int, probs: Tensor | None = None, align: int = 1,
            engine: str | None = None, policy: Policy | str | None = None) -> Permuted:  # fmt: skip
    """Tokens by expert: x [t, h], ``expert_map`` int32 [t, k] (the expert of each slot, -1: dropped), ``probs`` [t, k].

    Each expert's rows are in the order of (token, slot) and are padded to a multiple of ``align`` with zeros. There is
    room for any map, so nothing waits for the device, and reruns are bitwise equal. Gradients flow from rows and probs
    into x and probs; those of padding and of the rows from offsets[-1] on are not read.
    """
    key = ("permute", num_experts, type(num_experts), align, type(align), probs is None, engine, policy)
    try:
        runner = _runners.get(key)
    except TypeError:
        raise _unhashable("permute", policy, num_experts=num_experts, align=align, engine=engine) from None
    if runner is None:

        def make(b: GraphBuilder, v: dict[str, str]) -> list[str]:
            groups = b.op("group_by_expert", expert_map=v["expert_map"], num_experts=num_experts, align=align)
            places = dict(zip(("counts", "offsets", "row_map"), groups, strict=True))
            made = b.op("permute", x=v["x"], probs=v.get("probs"), **places, align=align)
            return [*([made] if probs is None else made), *groups]

        ports = {"x": "t h!", "expert_map": "t k!"} | ({} if probs is None else {"probs": "t k!"})
        runner = _graph_runner(key, "permute", ports, make, engine, policy)
    if probs is None:
        rows, *rest = runner(x, expert_map)
        return Permuted(rows, None, *rest)
    return Permuted(*runner(x, expert_map, probs))


def unpermute(rows: Tensor, permuted: Permuted, probs: Tensor | None = None, *, engine: str | None = None,
              policy: Policy | str | None = None) -> Tensor:  # fmt: skip
    """What ``permute`` moved, back at its token: rows [c, h] -> [t, h], the sum over a token's slots in slot order, in
    float32 and rounded once, weighted by ``probs`` [t, k] where they are given. ``rows`` need not be those of
    ``permuted``, whose counts, offsets and row_map say where they lie. A token of dropped slots alone gives 0.
    Gradients flow into rows and probs."""
    if not isinstance(permuted, Permuted):
        raise TypeError(f"unpermute: permuted = {type(permuted).__name__}: must be what permute returned")
    if not isinstance(rows, Tensor):
        raise TypeError(f"unpermute: rows = {type(rows).__name__}: must be a torch.Tensor")
    slots, experts = permuted.row_map.numel(), permuted.offsets.numel()
    if isinstance(permuted.rows, Tensor) and rows.dim() and rows.shape[0] != permuted.rows.shape[0]:
        raise ValueError(f"unpermute: rows {list(rows.shape)}: must be as many as permute made, {permuted.rows.shape[0]} "
                         f"for {slots} slots of {experts} experts")  # fmt: skip
    padding, left = divmod(rows.shape[0] - slots if rows.dim() else -1, max(experts, 1))
    if padding < 0 or left:
        raise ValueError(f"unpermute: rows {list(rows.shape)}: must be [c, h] as permute made them, "
                         f"c = {slots} slots + {experts} experts * (align - 1)")  # fmt: skip
    key = ("unpermute", padding, probs is None, engine, policy)
    try:
        runner = _runners.get(key)
    except TypeError:
        raise _unhashable("unpermute", policy, engine=engine) from None
    if runner is None:

        def make(b: GraphBuilder, v: dict[str, str]) -> list[str]:
            # the row count is one that is computed, not a size of its own: the gradient's rows are computed too
            given = b.specs[v["rows"]]
            count = capacity(*b.specs[v["row_map"]].shape, b.specs[v["offsets"]].shape[0], padding + 1)
            b.specs[v["rows"]] = dataclasses.replace(given, shape=(count, *given.shape[1:]))
            return [b.op("unpermute", **v, align=padding + 1)]

        ports = {"rows": "c h!", "row_map": "t k!", "counts": "e!", "offsets": "e!"}
        ports |= {} if probs is None else {"probs": "t k!"}
        runner = _graph_runner(key, "unpermute", ports, make, engine, policy)
    weights = () if probs is None else (probs,)
    return runner(rows, permuted.row_map, permuted.counts, permuted.offsets, *weights)


def grouped_matmul(x: Tensor, w: Tensor, offsets: Tensor, *, align: int = 1, engine: str | None = None,
                   policy: Policy | str | None = None) -> Tensor:  # fmt: skip
    """``x[rows of group i] @ w[i].T`` for each i: x [t, k], w [e, n, k] of one dtype, ``offsets`` int32 [e] -> [t, n].

    Group i is the rows offsets[i - 1] .. offsets[i] - 1 (from 0 for i = 0); it may be empty. Rows from offsets[-1] on
    are not read: what the result and the gradient of x hold there is left open. Gradients of the weights of empty
    groups are exactly zero. ``align``: each of the offsets is a multiple of it, as those of ``permute(..., align=...)``
    are; some engines take such groups alone.
    """
    inputs = (("x", "t k!", x), ("weight", "e! n! k!", w), ("offsets", "e!", offsets))
    return _call("grouped_matmul", (("align", align),), inputs, engine, policy, _Y)


def router(logits: Tensor, *, topk: int, score_function: str = "softmax", pre_softmax: bool = False,
           num_groups: int | None = None, group_topk: int | None = None, scaling_factor: float | None = None,
           expert_bias: Tensor | None = None, engine: str | None = None,
           policy: Policy | str | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Top-k experts of each token, best first: logits [t, e] -> (probs [t, topk] in the logits' dtype, expert_map int32
    [t, topk]).

    ``score_function`` softmax (over the chosen logits; over all with ``pre_softmax``) or sigmoid (normalised over the
    chosen for topk > 1). ``num_groups`` equal groups of experts, of which the best ``group_topk`` take part.
    ``scaling_factor`` multiplies probs. ``expert_bias`` [e], with sigmoid: part of the choice alone; it gets no
    gradient. Equal scores: the lowest index first. Semantics are those of Megatron-Core 0.19.2; the formulas stand in
    ``integration/graph/ops/router.py``.
    """
    attrs = (("topk", topk), ("score_function", score_function), ("pre_softmax", pre_softmax),
             ("num_groups", num_groups), ("group_topk", group_topk), ("scaling_factor", scaling_factor))  # fmt: skip
    inputs = (("logits", "t e!", logits), ("expert_bias", "e!", expert_bias))
    return _call("router", attrs, inputs, engine, policy, ("probs", "expert_map"))


def tokens_per_expert(expert_map: Tensor, *, num_experts: int, padding_mask: Tensor | None = None, sequences: int = 1,
                      engine: str | None = None, policy: Policy | str | None = None) -> Tensor:  # fmt: skip
    """How many slots of ``expert_map`` int32 [t, k] name each expert: float32 [sequences, num_experts]. Token i is of
    sequence i % ``sequences``; tokens that ``padding_mask`` bool [t] hides (True: padding) are not counted, nor are
    dropped slots."""
    attrs = (("num_experts", num_experts), ("sequences", sequences))
    inputs = (("expert_map", "t k!", expert_map), ("padding_mask", "t", padding_mask))
    return _call("tokens_per_expert", attrs, inputs, engine, policy, ("tokens",))


def load_balancing_loss(logits: Tensor, tokens_per_expert: Tensor, *, topk: int, score_function: str = "softmax",
                        coefficient: float = 1.0, total_tokens: Tensor | None = None,
                        padding_mask: Tensor | None = None, engine: str | None = None,
                        policy: Policy | str | None = None) -> Tensor:  # fmt: skip
    """Auxiliary loss of a router (Fedus et al., "Switch Transformers", 2021), float32 []: logits [t, e],
    ``tokens_per_expert`` [sequences, e] as of all ranks that share the loss, ``total_tokens`` [1] of one sequence there
    (default: from tokens_per_expert). Padding tokens (``padding_mask`` bool [t], True hides) count nowhere.

    It is the mean over the sequences of coefficient * e / (topk * total_tokens^2) * the sum over the experts of
    tokens_per_expert * summed scores. Gradients flow into logits."""
    attrs = (("topk", topk), ("score_function", score_function), ("coefficient", coefficient))
    inputs = (("logits", "t e!", logits), ("tokens_per_expert", "b! e!", tokens_per_expert),
              ("total_tokens", "i", total_tokens), ("padding_mask", "t", padding_mask))  # fmt: skip
    return _call("load_balancing_loss", attrs, inputs, engine, policy, _LOSS)


def z_loss(logits: Tensor, *, coefficient: float = 1.0, padding_mask: Tensor | None = None, engine: str | None = None,
           policy: Policy | str | None = None) -> Tensor:  # fmt: skip
    """``coefficient`` * mean over tokens of logsumexp(logits)^2 (Zoph et al., "ST-MoE", 2022), float32 []: logits
    [t, e]; tokens that ``padding_mask`` bool [t] hides (True: padding) do not count."""
    inputs = (("logits", "t e!", logits), ("padding_mask", "t", padding_mask))
    return _call("z_loss", (("coefficient", coefficient),), inputs, engine, policy, _LOSS)


def check_longest(sides: dict[str, tuple[Tensor, int | None]]) -> None:
    """Refuses segments that are longer than what the caller says is the longest: {side: (cu_seqlens, longest or None)}. Graphs
    know the longest as a power of two only; all else about cu_seqlens is checked wherever a graph reads them."""
    for side, (cu, longest) in sides.items():
        if not isinstance(cu, Tensor):
            raise TypeError(f"attention: cu_seqlens_{side} = {type(cu).__name__}: must be a torch.Tensor, int32 [segments + 1]")
        if longest is not None and (type(longest) is not int or longest < 0):
            shown = longest if isinstance(longest, int | float) else type(longest).__name__
            raise TypeError(f"attention: max_seqlen_{side} = {shown}: must be an int of at least 0; pass the longest segment's length as an int")
        if longest is not None and cu.dim() == 1 and readable(cu):
            check_cu_seqlens(side, cu, None, longest)
