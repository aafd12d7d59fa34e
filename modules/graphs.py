"""The graphs of the modules, as functions from tensors to a Graph: host code without a framework."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from ..integration.graph.ir import Graph, GraphBuilder, TensorSpec
from ..integration.planner.shapes import SpecMaker, dtype_name


@dataclasses.dataclass(frozen=True, slots=True)
class TensorParallel:
    """How a linear takes part in tensor parallelism: ``size`` ranks of group ``symbol``; with ``sequence`` the tokens are
    sharded over them outside of the linear pair."""

    size: int = 1
    sequence: bool = False
    symbol: str = "tp"

    def enter(self, b: GraphBuilder, x: str) -> str:
        """In front of a column-parallel linear."""
        if self.size == 1:
            return x
        return b.op("all_gather" if self.sequence else "group_copy", x=x, group=self.symbol, size=self.size)

    def leave(self, b: GraphBuilder, y: str) -> str:
        """Behind a row-parallel linear."""
        if self.size == 1:
            return y
        return b.op("reduce_scatter" if self.sequence else "all_reduce", x=y, group=self.symbol, size=self.size)


@dataclasses.dataclass(frozen=True, slots=True)
class NormAttrs:
    op: str = "rms_norm"
    eps: float = 1e-5
    zero_centered: bool = False

    def attrs(self) -> dict[str, object]:
        return {"eps": self.eps, "zero_centered": self.zero_centered}


@dataclasses.dataclass(frozen=True, slots=True)
class Activation:
    """An activation op of the table and its attributes."""

    op: str = "swiglu"
    attrs: tuple[tuple[str, object], ...] = ()


def norm_graph(norm: NormAttrs, names: tuple[str, ...]) -> Callable[..., Graph]:
    """``names`` in order: x, weight, then optionally bias and residual."""
    patterns = {"x": "*t n!", "residual": "*t n!", "weight": "n!", "bias": "n!"}

    def build(*tensors: torch.Tensor) -> Graph:
        b, spec = GraphBuilder(), SpecMaker()
        values = {n: b.input(n, spec(t, patterns[n]), weight=n in ("weight", "bias")) for n, t in zip(names, tensors, strict=True)}
        out = b.op(norm.op, **values, **norm.attrs())
        return b.build([out] if isinstance(out, str) else out)

    return build


def linear_graph(tp: TensorParallel, *, column: bool, bias: bool, norm: NormAttrs | None = None,
                 norm_bias: bool = False) -> tuple[tuple[str, ...], Callable[..., Graph]]:  # fmt: skip
    """([norm,] all-gather or copy, linear) for a column-parallel one, (linear, reduce) for a row-parallel one.

    Returns the inputs' names and the builder. Inputs: x, weight[, bias][, norm_weight[, norm_bias]].
    """
    names = ("x", "weight", *(("bias",) if bias else ()), *(("norm_weight",) if norm else ()), *(("norm_bias",) if norm_bias else ()))

    def build(*tensors: torch.Tensor) -> Graph:
        b, spec = GraphBuilder(), SpecMaker()
        patterns = {"x": "*t k!", "weight": "n! k!", "bias": "n!", "norm_weight": "k!", "norm_bias": "k!"}
        v = {n: b.input(n, spec(t, patterns[n]), weight=n != "x") for n, t in zip(names, tensors, strict=True)}
        x = v["x"]
        if norm is not None:
            x = b.op(norm.op, x=x, weight=v["norm_weight"], bias=v.get("norm_bias"), want=("y",), **norm.attrs())
        if column:
            x = tp.enter(b, x)
        y = b.op("linear", x=x, weight=v["weight"], bias=v.get("bias"))
        return b.build([y if column else tp.leave(b, y)])

    return names, build


@dataclasses.dataclass(frozen=True, slots=True)
class ResidualAdds:
    """The two residual adds of a layer that stand in its MLP's graph, one in front of the norm and one behind fc2: each adds a
    bias if there is one, drops elements with probability ``dropout``, and adds the residual stream."""

    attention_bias: bool = False
    output_bias: bool = False
    dropout: float = 0.0

    def names(self) -> tuple[str, ...]:
        """The inputs that they add to the graph: residual [*t, h], biases [h], seed and offset [1] of each dropout."""
        return ("residual", *(("attention_bias",) if self.attention_bias else ()), *(("output_bias",) if self.output_bias else ()),
                *(("seed", "offset", "output_seed", "output_offset") if self.dropout > 0 else ()))  # fmt: skip

    def enter(self, b: GraphBuilder, v: dict[str, str]) -> str:
        """The residual stream behind the attention."""
        return b.op("bias_dropout_add", x=v["x"], residual=v["residual"], bias=v.get("attention_bias"), seed=v.get("seed"),
                    offset=v.get("offset"), p=self.dropout)  # fmt: skip

    def leave(self, b: GraphBuilder, v: dict[str, str], y: str, stream: str) -> str:
        """The residual stream behind the MLP whose output is ``y``."""
        return b.op("bias_dropout_add", x=y, residual=stream, bias=v.get("output_bias"), seed=v.get("output_seed"),
                    offset=v.get("output_offset"), p=self.dropout)  # fmt: skip


def mlp_from_norm(norm: NormAttrs | None, activation: Activation) -> frozenset[str]:
    """The ops of ``mlp_graph`` between its residual adds: as a save policy, all of them are rebuilt in the backward from the
    residual stream behind the attention."""
    return frozenset({*([norm.op] if norm else []), "all_gather", "group_copy", "linear", activation.op})


def mlp_graph(tp: TensorParallel, activation: Activation, *, bias: bool, row_weight: bool, norm: NormAttrs | None = None,
              norm_bias: bool = False, adds: ResidualAdds | None = None) -> tuple[tuple[str, ...], Callable[..., Graph]]:  # fmt: skip
    """[residual add,] [norm,] fc1 (+ bias), activation, fc2 [, residual add], with the collectives of tensor parallelism around
    the two linears. Without ``adds`` the bias of fc2 is left to the caller, who adds it with the residual; with it x is the
    attention's output, and the graph's output the residual stream behind the layer.

    Returns the inputs' names and the builder. Inputs: x [*t, h], fc1 [f, h], fc2 [h, g][, fc1_bias [f]][, row_weight [*t]]
    [, norm_weight[, norm_bias] [h]] and those of ``adds``. ``*t`` is s b, of this rank's shard under sequence parallel.
    """
    names = ("x", "fc1", "fc2", *(("fc1_bias",) if bias else ()), *(("row_weight",) if row_weight else ()),
             *(("norm_weight",) if norm else ()), *(("norm_bias",) if norm_bias else ()), *(adds.names() if adds else ()))  # fmt: skip
    patterns = {"x": "*t h!", "fc1": "f! h!", "fc2": "h! g!", "fc1_bias": "f!", "row_weight": "*t", "norm_weight": "h!", "norm_bias": "h!",
                "residual": "*t h!", "attention_bias": "h!", "output_bias": "h!"}  # fmt: skip
    data = ("x", "row_weight", "residual", "seed", "offset", "output_seed", "output_offset")

    def build(*tensors: torch.Tensor) -> Graph:
        b, spec = GraphBuilder(), SpecMaker()
        v = {n: b.input(n, spec(t, patterns.get(n, "*i")), weight=n not in data) for n, t in zip(names, tensors, strict=True)}
        x = stream = adds.enter(b, v) if adds else v["x"]
        if norm is not None:
            x = b.op(norm.op, x=x, weight=v["norm_weight"], bias=v.get("norm_bias"), want=("y",), **norm.attrs())
        h = b.op("linear", x=tp.enter(b, x), weight=v["fc1"], bias=v.get("fc1_bias"))
        a = b.op(activation.op, x=h, row_weight=v.get("row_weight"), **dict(activation.attrs))
        y = tp.leave(b, b.op("linear", x=a, weight=v["fc2"]))
        return b.build([adds.leave(b, v, y, stream) if adds else y])

    return names, build


def attention_graph(names: tuple[str, ...], attrs: dict[str, object]) -> Callable[..., Graph]:
    """One sdpa node. ``names`` are the connected ports in order; ``attrs`` holds at least the layout."""
    dense = {"bshd": ("b s", "b s"), "sbhd": ("s b", "s b"), "thd": ("t", "t")}[attrs["layout"]]
    patterns = {
        "q": f"{dense[0]} h! d!", "k": f"{dense[1]} g! d!", "v": f"{dense[1]} g! e!", "sink": "h!", "cu_seqlens_q": "n",
        "cu_seqlens_k": "n", "mask": "b h s s", "seed": "*i", "offset": "*i",
    }  # fmt: skip

    def build(*tensors: torch.Tensor) -> Graph:
        b, spec = GraphBuilder(), SpecMaker()
        v = {n: b.input(n, spec(t, patterns[n]), weight=n == "sink") for n, t in zip(names, tensors, strict=True)}
        return b.build([b.op("sdpa", want=("out",), **v, **attrs)])

    return build


def _whole_sequence_inputs(b: GraphBuilder, spec: SpecMaker, given: dict[str, torch.Tensor], gathered: TensorSpec, length: int) -> dict[str, str]:
    """Inputs that are as long as the gathered sequence (positions, a mask) and sdpa's other ports. ``gathered`` is a tensor
    [s, ...] or [t, ...] of the graph whose first dim has the size ``length``: under sequence parallel a dim of its own."""
    patterns = {"sink": "h!", "cu_seqlens_q": "n", "cu_seqlens_k": "n", "seed": "*i", "offset": "*i"}
    tokens, batch = gathered.shape[:2]
    values = {}
    for name, t in given.items():
        if name.endswith("positions") and t.shape == (length,):
            made = TensorSpec((tokens,), dtype_name(t.dtype))
        elif name == "mask" and t.dim() == 4 and tuple(t.shape[2:]) == (length, length):
            made = TensorSpec((1 if t.shape[0] == 1 else batch, int(t.shape[1]), tokens, tokens), dtype_name(t.dtype))
        else:  # what does not fit the op's rule refuses, with names
            made = spec(t, patterns.get(name, "*x"))
        values[name] = b.input(name, made, weight=name == "sink")
    return values


LATENT_UP_PROJECTION = frozenset({"linear", "unflatten_heads", "split", "rope", "expand_heads", "concat"})
"""The ops of ``latent_attention_graph`` in front of the attention: as a save policy, queries, keys and values are rebuilt in
the backward from the latents."""


def latent_attention_graph(tp: TensorParallel, heads: int, nope: int, names: tuple[str, ...],
                           attrs: dict[str, object]) -> Callable[..., Graph]:  # fmt: skip
    """Multi-head latent attention (DeepSeek-V2, 2024) from the latents on: up projections, rotary embedding, attention.

    ``heads`` are this rank's, ``nope`` is the part of a query's and key's head dim that is not rotated. ``names`` in order:
    q_latent [*t, c_q], q_weight [heads * (nope + r), c_q], kv_latent [*t, c_kv], kv_weight [heads * (nope + dv), c_kv],
    k_rope [*t, 1, r], cos, sin [positions, <= r / 2], then optionally q_positions, k_positions [tokens] and sdpa's own ports.
    ``*t`` is s b or t, of this rank's shard under sequence parallel. ``attrs`` are sdpa's, the layout among them. Output
    [*t, heads, dv], the whole sequence.
    """

    def build(*tensors: torch.Tensor) -> Graph:
        b, spec = GraphBuilder(), SpecMaker()
        patterns = {"q_latent": "*t c!", "q_weight": "n! c!", "kv_latent": "*t k!", "kv_weight": "m! k!", "k_rope": "*t i r!",
                    "cos": "p r!", "sin": "p r!"}
        v: dict[str, str] = {}
        given = dict(zip(names, tensors, strict=True))
        for name in names[:7]:
            v[name] = b.input(name, spec(given[name], patterns[name]), weight=name.endswith("weight"))
        k_rope = tp.enter(b, v["k_rope"])
        length = given["k_rope"].shape[0] * (tp.size if tp.sequence else 1)
        ports = _whole_sequence_inputs(b, spec, dict(list(given.items())[7:]), b.specs[k_rope], length)

        def turn(x: str, positions: str) -> str:
            return b.op("rope", x=x, cos=v["cos"], sin=v["sin"], positions=ports.get(positions), interleaved=True)

        q = b.op("linear", x=tp.enter(b, v["q_latent"]), weight=v["q_weight"])
        q_nope, q_rope = b.op("split", x=b.op("unflatten_heads", x=q, heads=heads), first=nope)
        q = b.op("concat", a=q_nope, b=turn(q_rope, "q_positions"))
        kv = b.op("linear", x=tp.enter(b, v["kv_latent"]), weight=v["kv_weight"])
        k_nope, value = b.op("split", x=b.op("unflatten_heads", x=kv, heads=heads), first=nope)
        k = b.op("concat", a=k_nope, b=b.op("expand_heads", x=turn(k_rope, "k_positions"), heads=heads))
        ports = {n: value for n, value in ports.items() if not n.endswith("positions")}
        return b.build([b.op("sdpa", want=("out",), q=q, k=k, v=value, **ports, **attrs)])

    return build


@dataclasses.dataclass(frozen=True, slots=True)
class HeadLayout:
    """This rank's heads in a fused QKV projection: per KV group its queries, then its key, then its value."""

    groups: int
    queries_per_group: int
    head_dim: int


QK_NORM_INPUTS = frozenset({"qkv_split"})
"""The op of ``self_attention_graph`` whose results its qk-norm's gradient reads: as a save policy, the QKV product is kept in place of
queries, keys and values, which are views of it. Without qk-norm that would keep more."""


def self_attention_graph(tp: TensorParallel, heads: HeadLayout, names: tuple[str, ...], attrs: dict[str, object], *,
                         norm: NormAttrs | None, qk_norm: NormAttrs | None, interleaved: bool) -> Callable[..., Graph]:  # fmt: skip
    """[norm,] QKV projection, split, [qk-norm,] [rotary embedding,] attention, output projection, with the collectives of
    tensor parallelism around them. The output projection's bias is left to the caller, who adds it with the residual.

    ``names`` of the inputs in order: x [*t, h], qkv [groups * (queries + 2) * d, h], proj [h', heads * d], then optionally qkv_bias,
    norm_weight, norm_bias [h], q_norm_weight, q_norm_bias, k_norm_weight, k_norm_bias [d], cos, sin [positions, <= d / 2],
    q_positions, k_positions [tokens] and sdpa's own ports. ``*t`` is s b or t, of this rank's shard under sequence parallel.
    ``attrs`` are sdpa's, the layout among them. Output [*t, h'].
    """
    patterns = {"x": "*t h!", "qkv": "n! h!", "proj": "g! m!", "qkv_bias": "n!", "norm_weight": "h!", "norm_bias": "h!", "q_norm_weight": "d!",
                "q_norm_bias": "d!", "k_norm_weight": "d!", "k_norm_bias": "d!", "cos": "p r!", "sin": "p r!"}  # fmt: skip
    data = ("x", "cos", "sin")

    def build(*tensors: torch.Tensor) -> Graph:
        b, spec = GraphBuilder(), SpecMaker()
        given = dict(zip(names, tensors, strict=True))
        v = {n: b.input(n, spec(t, patterns[n]), weight=n not in data) for n, t in given.items() if n in patterns}
        x = v["x"]
        if norm is not None:
            x = b.op(norm.op, x=x, weight=v["norm_weight"], bias=v.get("norm_bias"), want=("y",), **norm.attrs())
        x = tp.enter(b, x)
        length = given["x"].shape[0] * (tp.size if tp.sequence else 1)
        ports = _whole_sequence_inputs(b, spec, {n: t for n, t in given.items() if n not in patterns}, b.specs[x], length)
        mixed = b.op("linear", x=x, weight=v["qkv"], bias=v.get("qkv_bias"))
        q, k, value = b.op("qkv_split", x=mixed, **dataclasses.asdict(heads))
        parts = {"q": q, "k": k}
        for side in parts:
            if qk_norm is not None:
                parts[side] = b.op(qk_norm.op, x=parts[side], weight=v[f"{side}_norm_weight"], bias=v.get(f"{side}_norm_bias"), want=("y",),
                                   **qk_norm.attrs())  # fmt: skip
            if "cos" in v:
                parts[side] = b.op("rope", x=parts[side], cos=v["cos"], sin=v["sin"], positions=ports.pop(f"{side}_positions", None),
                                   interleaved=interleaved)  # fmt: skip
        out = b.op("flatten_heads", x=b.op("sdpa", want=("out",), **parts, v=value, **ports, **attrs))
        return b.build([tp.leave(b, b.op("linear", x=out, weight=v["proj"]))])

    return build
