"""What would run, what would not, and why: for any op, shapes and arch, as data and without a GPU."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..engines.arch import Arch
from ..graph.ir import ITEMSIZE, Graph, GraphBuilder, GraphError
from ..graph.ops.quantize import LAYOUTS, scale_spec
from ..graph.ops.table import op_table
from .planner import PlanError, PlannedRegion, plan
from .policy import Policy
from .rank import TIMES, Candidate
from .records import Records, default_records
from .shapes import SpecMaker
from .text import aligned

FUNCTIONS = {"attention": "sdpa"}
"""Functions of ``layerplan.ops`` that do not bear their op's name -> the op."""

EXAMPLES = {
    "rms_norm": "--shape x=8192x4096:bfloat16 --shape weight=4096:bfloat16 --attr eps=1e-5",
    "layer_norm": "--shape x=8192x4096:bfloat16 --shape weight=4096:bfloat16 --shape bias=4096:bfloat16 --attr eps=1e-5",
    "linear": "--shape x=8192x4096:bfloat16 --shape weight=14336x4096:bfloat16",
    "rope": "--shape x=1x4096x32x128:bfloat16 --shape cos=4096x64:float32 --shape sin=4096x64:float32",
    "sdpa": "--shape q=1x4096x32x128:bfloat16 --shape k=1x4096x8x128:bfloat16 --shape v=1x4096x8x128:bfloat16 --attr causal=true",
    "swiglu": "--shape x=8192x28672:bfloat16",
    "grouped_matmul": "--shape x=98304x2048:bfloat16 --shape weight=64x2816x2048:bfloat16 --shape offsets=64:int32",
    "permute": "--shape x=16384x2048:bfloat16 --shape row_map=16384x6:int32 --shape counts=64:int32 --shape offsets=64:int32",
    "router": "--shape logits=16384x64:float32 --attr topk=6",
    "cross_entropy": "--shape logits=8192x32768:bfloat16 --shape targets=8192:int64",
    "linear_cross_entropy": "--shape x=8192x4096:bfloat16 --shape weight=128256x4096:bfloat16 --shape targets=8192:int64",
    "add": "--shape a=8192x4096:bfloat16 --shape b=8192x4096:bfloat16",
    "row_sum": "--shape x=8192x4096:bfloat16",
    "bias_dropout_add": "--shape x=8192x4096:bfloat16 --shape residual=8192x4096:bfloat16 --shape bias=4096:bfloat16",
    "dropout_bwd": "--shape dy=8192x4096:bfloat16 --shape seed=1:int64 --shape offset=1:int64 --attr p=0.1",
    "rms_norm_bwd": "--shape dy=8192x4096:bfloat16 --shape x=8192x4096:bfloat16 --shape weight=4096:bfloat16 --shape rstd=8192:float32",
    "layer_norm_bwd": "--shape dy=8192x4096:bfloat16 --shape x=8192x4096:bfloat16 "
                      "--shape weight=4096:bfloat16 --shape mean=8192:float32 --shape rstd=8192:float32",
    "linear_dgrad": "--shape dy=8192x14336:bfloat16 --shape weight=14336x4096:bfloat16",
    "linear_wgrad": "--shape dy=8192x14336:bfloat16 --shape x=8192x4096:bfloat16",
    "qkv_split": "--shape x=4096x1x6144:bfloat16 --attr groups=8 --attr queries_per_group=4 --attr head_dim=128",
    "qkv_merge": "--shape q=4096x1x32x128:bfloat16 --shape k=4096x1x8x128:bfloat16 --shape v=4096x1x8x128:bfloat16",
    "split": "--shape x=8192x4096:bfloat16 --attr first=1024",
    "concat": "--shape a=8192x1024:bfloat16 --shape b=8192x3072:bfloat16",
    "unflatten_heads": "--shape x=4096x1x4096:bfloat16 --attr heads=32",
    "flatten_heads": "--shape x=4096x1x32x128:bfloat16",
    "expand_heads": "--shape x=4096x1x64:bfloat16 --attr heads=32",
    "sum_heads": "--shape x=4096x1x32x64:bfloat16",
    "zeros_like": "--shape like=8192x4096:bfloat16",
    "sdpa_bwd": "--shape dout=1x4096x32x128:bfloat16 --shape out=1x4096x32x128:bfloat16 --shape lse=1x32x4096:float32 "
                "--shape q=1x4096x32x128:bfloat16 --shape k=1x4096x8x128:bfloat16 --shape v=1x4096x8x128:bfloat16 --attr causal=true",
    "swiglu_bwd": "--shape dy=8192x14336:bfloat16 --shape x=8192x28672:bfloat16",
    "geglu": "--shape x=8192x28672:bfloat16",
    "geglu_bwd": "--shape dy=8192x14336:bfloat16 --shape x=8192x28672:bfloat16",
    "gelu": "--shape x=8192x14336:bfloat16",
    "gelu_bwd": "--shape dy=8192x14336:bfloat16 --shape x=8192x14336:bfloat16",
    "squared_relu": "--shape x=8192x14336:bfloat16",
    "squared_relu_bwd": "--shape dy=8192x14336:bfloat16 --shape x=8192x14336:bfloat16",
    "cross_entropy_bwd": "--shape dloss=8192:float32 --shape logits=8192x32768:bfloat16 --shape targets=8192:int64 --shape lse=8192:float32",
    "linear_cross_entropy_bwd": "--shape x=8192x4096:bfloat16 --shape weight=128256x4096:bfloat16 "
                                "--shape targets=8192:int64 --shape dloss=8192:float32 --shape lse=8192:float32",
    "shard_targets": "--shape targets=8192:int64 --shape first=1:int64 --attr classes=16384",
    "stack_shard": "--shape loss=8192:float32 --shape lse=8192:float32",
    "shard_loss": "--shape stats=2x2x8192:float32 --shape targets=8192:int64 "
                  "--shape hits=8192:int64 --attr classes=16384 --shape logits=8192x16384:bfloat16",
    "quantize": "--shape x=8192x4096:bfloat16 --attr block=[1,128]",
    "dequantize": "--shape data=8192x4096:float8_e4m3fn --shape scale_inv=8192x32:float32 --attr block=[1,128] --attr dtype=bfloat16",
    "group_by_expert": "--shape expert_map=16384x6:int32 --attr num_experts=64",
    "tokens_per_expert": "--shape expert_map=16384x6:int32 --attr num_experts=64",
    "permute_bwd": "--shape drows=98304x2048:bfloat16 --shape row_map=16384x6:int32",
    "unpermute": "--shape rows=98304x2048:bfloat16 --shape row_map=16384x6:int32 --shape counts=64:int32 --shape offsets=64:int32",
    "unpermute_bwd": "--shape dy=16384x2048:bfloat16 --shape row_map=16384x6:int32 --shape counts=64:int32 --shape offsets=64:int32",
    "grouped_matmul_dgrad": "--shape dy=98304x2816:bfloat16 --shape weight=64x2816x2048:bfloat16 --shape offsets=64:int32",
    "grouped_matmul_wgrad": "--shape dy=98304x2816:bfloat16 --shape x=98304x2048:bfloat16 --shape offsets=64:int32",
    "router_bwd": "--shape dprobs=16384x6:float32 --shape logits=16384x64:float32 --shape expert_map=16384x6:int32 --attr topk=6",
    "load_balancing_loss": "--shape logits=16384x64:float32 --shape tokens_per_expert=1x64:float32 --attr topk=6",
    "load_balancing_loss_bwd": "--shape dloss=:float32 --shape logits=16384x64:float32 --shape tokens_per_expert=1x64:float32 --attr topk=6",
    "z_loss": "--shape logits=16384x64:float32",
    "z_loss_bwd": "--shape dloss=:float32 --shape logits=16384x64:float32",
    "all_gather": "--shape x=8192x4096:bfloat16 --attr group=tp --attr size=8",
    "reduce_scatter": "--shape x=8192x4096:bfloat16 --attr group=tp --attr size=8",
    "all_reduce": "--shape x=8192x4096:bfloat16 --attr group=tp --attr size=8",
    "group_copy": "--shape x=8192x4096:bfloat16 --attr group=tp --attr size=8",
}
"""Op -> shapes and attributes of ``layerplan explain`` that work: every op of the table."""

_SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32", "fp64": "float64", "double": "float64",
          "long": "int64", "int": "int32", "fp8": "float8_e4m3fn"}  # fmt: skip
_OVER_ROWS = frozenset({"rms_norm", "layer_norm", "linear", "swiglu", "geglu", "gelu", "squared_relu", "cross_entropy", "linear_cross_entropy", "add",
                        "bias_dropout_add"})  # fmt: skip
"""Ops over rows: all dims but the last are tokens."""
_EXPERTS = frozenset({"group_by_expert", "tokens_per_expert", "permute", "grouped_matmul", "router", "load_balancing_loss", "z_loss"})
_TOKENS = {"x": "t h!", "logits": "t e!", "expert_map": "t k!", "row_map": "t k!", "probs": "t k!", "padding_mask": "t"}
"""Ops of a mixture of experts, and the ports of theirs whose first dim is tokens."""
_CLOSE = 0.6  # difflib's own least likeness


@dataclasses.dataclass(frozen=True, slots=True)
class Explanation:
    """``candidates`` of the forward and ``backward`` of the op's gradient: (ops, candidates) per region. Each candidate has its
    reason and, where it offers, its offer; ``chosen`` is None where the policy leaves no engine, then ``error`` says so."""

    op: str
    arch: str
    chosen: str | None
    candidates: tuple[Candidate, ...]
    backward: tuple[tuple[str, tuple[Candidate, ...]], ...] = ()
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Field -> plain value."""
        return {
            "op": self.op, "arch": self.arch, "chosen": self.chosen, "candidates": [c.to_json() for c in self.candidates],
            "backward": [[ops, [c.to_json() for c in candidates]] for ops, candidates in self.backward], "error": self.error,
        }  # fmt: skip

    def __str__(self) -> str:
        """A table of candidates, their times, offers and reasons for the forward and for each region of the backward."""
        lines = []
        for title, candidates in ((f"{self.op} on {self.arch}", self.candidates), *((f"backward: {ops}", c) for ops, c in self.backward)):
            engine = next((c.engine for c in candidates if c.chosen), "no engine may run it")
            rows = [("yes" if c.chosen else "no", c.engine, *c.times(), str(c.offer or ""), c.reason) for c in candidates]
            lines += [f"{title}: {engine}", *(f"  {line}" for line in aligned([("runs", "engine", *TIMES, "offers", "why"), *rows]))]
        return "\n".join(lines)

    def reasons(self) -> dict[str, str]:
        """Engine id -> why it was not chosen, forward."""
        return {c.engine: c.reason for c in self.candidates if not c.chosen}


def explain(op: str, shapes: Mapping[str, tuple[Sequence[int], str | torch.dtype]], arch: str | Arch, *,
            policy: Policy | str | None = None, engine: str | None = None, records: Records | None = None,
            **attrs: Any) -> Explanation:  # fmt: skip
    """Candidates and reasons for one op.

    ``shapes`` maps input ports to (sizes, dtype), for example ``{"q": ((1, 4096, 32, 128), "bfloat16"), ...}``, dtypes by name or as
    torch has them; ``attrs`` are the op's attributes; ``records`` are measured times (None: those of LAYERPLAN_RECORDS). Raises
    GraphError for shapes that break the op's rules, ValueError for an unknown op, arch or dtype, for an ``engine`` without code for
    the op, or where the records cannot be read.
    """
    check_op(op)
    arch = arch if isinstance(arch, Arch) else Arch.parse(arch)
    chosen = Policy.of(policy)
    if engine is not None:
        chosen = chosen.forcing(engine, op)
    graph = _one_node(op, shapes, attrs)
    needs = tuple(graph.specs[v].is_float and _differentiable(op, v) for v in graph.inputs)
    has_gradient = op_table()[op].gradient is not None and op_table()[op].kind != "collective" and any(needs)
    options = {"needs_grad": needs} if has_gradient else {}
    options["records"] = default_records() if records is None else records
    try:
        made, error = plan(graph, arch, chosen, **options), None
    except PlanError as e:  # the regions of a plan without that policy, each asked under it
        made, error = plan(graph, arch, dataclasses.replace(chosen, mode="auto", engine=None), **options), str(e)
    (forward,) = made.forward.regions
    asked = (lambda r: r.candidates) if error is None else (lambda r: _candidates(r, arch, chosen))
    backward = tuple(("+".join(r.ops), asked(r)) for r in made.backward.regions) if made.backward else ()
    return Explanation(op, arch.name, None if error else forward.engine, asked(forward), backward, error)


def check_op(op: str) -> None:
    """Raises ValueError with the close name where the op table has no ``op``."""
    if op not in op_table():
        known = {**{name: name for name in op_table()}, **FUNCTIONS}
        close = [FUNCTIONS[op]] if op in FUNCTIONS else [known[c] for c in difflib.get_close_matches(op, known, 1, _CLOSE)]
        raise ValueError(f"op = {op!r}: no such op; " + (f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(op_table()))}"))


def example(op: str) -> str:
    """A whole ``layerplan explain`` command for an op of the table."""
    return f"layerplan explain {op} {EXAMPLES[op]} --arch sm_90"


def required_ports(op: str) -> tuple[str, ...]:
    """Input ports that ``op`` cannot do without."""
    return tuple(p.name for p in op_table()[op].inputs if not p.optional)


def _candidates(region: PlannedRegion, arch: Arch, policy: Policy) -> tuple[Candidate, ...]:
    """What every engine answers for a region under a policy that may leave it none."""
    try:
        return tuple(c for r in plan(region.region.graph, arch, policy).forward.regions for c in r.candidates)
    except PlanError as error:
        return error.candidates


def _differentiable(op: str, port: str) -> bool:
    allowed = op_table()[op].differentiable
    return allowed is None or port in allowed


def _pattern(op: str, port: str, rank: int, layout: str) -> str:
    """Which dims of a port are tokens, as the layers and the functional API have them: plans, and the times of records, are those of a
    shape class. All dims of the other ops are static."""
    if op == "sdpa":
        lead = {"sbhd": "s b", "thd": "t"}.get(layout, "b s")
        return {"q": f"{lead} h! d!", "k": f"{lead} g! d!", "v": f"{lead} g! e!", "mask": "b h! s s", "sink": "h!"}.get(port, "n")
    if op == "rope":
        return {"x": "*t h! d!", "positions": "*t"}.get(port, "p r!")
    if op in _OVER_ROWS:
        parameter = port in ("weight", "bias")
        return " ".join(f"p{i}!" for i in range(rank)) if parameter else "*t" if port in ("targets", "row_weight") else "*t n!"
    static = " ".join(f"p{i}!" for i in range(rank))
    return _TOKENS.get(port, static) if op in _EXPERTS else static


def _one_node(op: str, shapes: Mapping[str, tuple[Sequence[int], str | torch.dtype]], attrs: Mapping[str, Any]) -> Graph:
    b = GraphBuilder()
    shapes = {n: (size, str(dtype).removeprefix("torch.")) for n, (size, dtype) in shapes.items()}
    ports, problems = op_table()[op].input_names, []
    for name, (size, dtype) in shapes.items():
        if name not in ports:
            problems.append(f"{op}: no input port {name!r}; it has {', '.join(ports)}")
        if dtype not in ITEMSIZE:
            close = [_SHORT[dtype]] if dtype in _SHORT else difflib.get_close_matches(dtype, ITEMSIZE, 1, _CLOSE)
            problems.append(f"{name} = {dtype!r}: unknown dtype; " + (f"did you mean {close[0]}?" if close else f"known: {', '.join(ITEMSIZE)}"))
        if any(int(s) < 0 for s in size):
            problems.append(f"{name} = {list(size)}: a size must not be negative")
    for name in required_ports(op):
        if name not in shapes:
            problems.append(f"{op}: input port {name!r} must be given; add --shape {name}=SIZExSIZE:DTYPE, in Python "
                            f"{name!r} to shapes")  # fmt: skip
    if problems:
        raise GraphError("\n".join(problems))
    values, spec = {}, SpecMaker()
    for p in ports:
        if p in shapes:
            size, dtype = shapes[p]
            like = torch.empty([int(s) for s in size], dtype=getattr(torch, dtype), device="meta")
            values[p] = b.input(p, spec(like, _pattern(op, p, len(size), attrs.get("layout", "bshd"))))
    if op == "dequantize" and isinstance(attrs.get("block"), tuple) and attrs["block"] in LAYOUTS:  # the scale is a part of its input's type
        b.specs["data"] = dataclasses.replace(b.specs["data"], scale=scale_spec(attrs["block"], attrs.get("layout", "row")))
    row, want = op_table()[op], None
    if not row.required_outputs:  # a gradient of what is connected: all that can be made of it
        ports, bound = row.bind({**values, **attrs})
        made = row.infer({p: b.specs[v] for p, v in ports}, bound)
        want = [p.name for p in row.outputs if p.name in made]
    out = b.op(op, want=want, **values, **attrs)
    return b.build([out] if isinstance(out, str) else out)
