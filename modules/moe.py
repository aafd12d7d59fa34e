"""The graphs of MoE layers, as functions from tensors to a Graph: router, losses, permutation, experts.

t tokens of this rank, k slots a token, e local experts, h width; fc1 [e, n, h] (n = 2 f, gate first, where the
activation is gated), fc2 [e, h, f]. Expert numbers are int32, -1 where a slot has no expert here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from ..integration.graph.ir import Graph, GraphBuilder, TensorSpec, size_of
from ..integration.planner.shapes import SpecMaker, dtype_name
from .graphs import Activation, TensorParallel

_STEPS = 8  # sizes of receive buffers to each power of two: each is a plan of its own to look up
_SMALLEST = 64


def receive_rows(rows: int) -> int:
    """The size of a buffer that receives ``rows`` rows: at most an eighth more, one of few sizes, never empty."""
    step = max(_SMALLEST, (1 << max(rows - 1, 0).bit_length()) // (2 * _STEPS))
    return max(-(-rows // step) * step, step)


type Build = tuple[tuple[str, ...], Callable[..., Graph]]


def _experts(
    b: GraphBuilder, activation: Activation, rows: str, row_weight: str, offsets: str, fc1: str, fc2: str
) -> str:
    h = b.op("grouped_matmul", x=rows, weight=fc1, offsets=offsets)
    a = b.op(activation.op, x=h, row_weight=row_weight, **dict(activation.attrs))
    return b.op("grouped_matmul", x=a, weight=fc2, offsets=offsets)


def experts_graph(activation: Activation) -> Build:
    """Grouped product, activation times the rows' probabilities, grouped product. Inputs: x [rows, h] by expert,
    row_weight [rows], offsets [e] int32, fc1, fc2. Output [rows, h]."""
    names = ("x", "row_weight", "offsets", "fc1", "fc2")
    patterns = {"x": "t h!", "row_weight": "t", "offsets": "e!", "fc1": "e! n! h!", "fc2": "e! h! f!"}

    def build(*tensors: torch.Tensor) -> Graph:
        b, spec = GraphBuilder(), SpecMaker()
        x, row_weight, offsets, fc1, fc2 = (
            b.input(n, spec(t, patterns[n]), weight=n.startswith("fc")) for n, t in zip(names, tensors, strict=True)
        )
        return b.build([_experts(b, activation, x, row_weight, offsets, fc1, fc2)])

    return names, build


def moe_graph(gather: TensorParallel, activation: Activation, num_experts: int) -> Build:
    """[All-gather of the tokens,] grouping by expert, permute, experts, unpermute [, reduce-scatter of the sums].
    Inputs: x [t, h], probs [t, k], expert_map [t * gather.size, k] with the numbers of local experts, fc1, fc2. Output
    [t, h]: of each token the sum of its experts' outputs times their probabilities."""
    names = ("x", "probs", "expert_map", "fc1", "fc2")

    def build(*tensors: torch.Tensor) -> Graph:
        b, spec = GraphBuilder(), SpecMaker()
        given = dict(zip(names, tensors, strict=True))
        x = gather.enter(b, b.input("x", spec(given["x"], "t h!")))
        probs = gather.enter(b, b.input("probs", spec(given["probs"], "t k!")))
        table = given["expert_map"]
        made = spec(table, "t k!")
        if gather.size > 1 and table.shape[0] == given["x"].shape[0] * gather.size:  # as many as the gathered tokens
            made = TensorSpec((b.specs[x].shape[0], int(table.shape[1])), dtype_name(table.dtype))
        counts, offsets, row_map = b.op(
            "group_by_expert", expert_map=b.input("expert_map", made), num_experts=num_experts
        )
        fc1, fc2 = (b.input(n, spec(given[n], p), weight=True) for n, p in (("fc1", "e! n! h!"), ("fc2", "e! h! f!")))
        places = {"row_map": row_map, "counts": counts, "offsets": offsets}
        rows, row_probs = b.op("permute", x=x, probs=probs, **places)
        out = _experts(b, activation, rows, row_probs, offsets, fc1, fc2)
        return b.build([gather.leave(b, b.op("unpermute", rows=out, **places))])

    return names, build


def permute_graph(num_experts: int) -> Build:
    """Grouping by expert and permute. Inputs: x [t, h], probs [t, k], expert_map [t, k]. Outputs: rows [t * k, h],
    their probabilities [t * k], counts and offsets [num_experts], row_map [t, k]."""
    names, patterns = ("x", "probs", "expert_map"), ("t h!", "t k!", "t k!")

    def build(*tensors: torch.Tensor) -> Graph:
        b, spec = GraphBuilder(), SpecMaker()
        x, probs, table = (b.input(n, spec(t, p)) for n, t, p in zip(names, tensors, patterns, strict=True))
        counts, offsets, row_map = b.op("group_by_expert", expert_map=table, num_experts=num_experts)
        rows, row_probs = b.op("permute", x=x, probs=probs, row_map=row_map, counts=counts, offsets=offsets)
        return b.build([rows, row_probs, counts, offsets, row_map])

    return names, build


def unpermute_graph() -> Build:
    """The sum of each token's rows. Inputs: row_map, counts and offsets as ``permute_graph`` returned them, rows [t *
    k, h]. Output [t, h]."""
    names = ("row_map", "counts", "offsets", "rows")

    def build(*tensors: torch.Tensor) -> Graph:
        b, spec = GraphBuilder(), SpecMaker()
        given = dict(zip(names, tensors, strict=True))
        row_map, counts, offsets = (
            b.input(n, spec(given[n], p)) for n, p in (("row_map", "t k!"), ("counts", "e!"), ("offsets", "e!"))
        )
        rows = b.input(
            "rows",
            TensorSpec(
                (size_of(b.specs[row_map].shape), int(given["rows"].shape[-1])), dtype_name(given["rows"].dtype)
            ),
        )
        return b.build([b.op("unpermute", rows=rows, row_map=row_map, counts=counts, offsets=offsets)])

    return names, build


@dataclasses.dataclass(frozen=True, slots=True)
class Routing:
    """A router's choice: how many of the experts, by which scores. The names are those of the op ``router``."""

    num_experts: int
    topk: int
    score_function: str = "softmax"
    pre_softmax: bool = False
    scaling_factor: float | None = None
    num_groups: int | None = None
    group_topk: int | None = None

    def attrs(self) -> dict[str, object]:
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del found["num_experts"]
        return found


def router_graph(
    routing: Routing,
    *,
    bias: bool,
    padding: bool,
    z_coefficient: float | None,
    balanced: tuple[int, ...],
    counted: bool,
) -> Build:
    """Top-k experts of each token, and what the losses need. Inputs: logits [t, experts][, expert_bias [experts]][,
    padding_mask [t] bool].

    Outputs: probs [t, k], expert_map [t, k], then the z loss (a number; with ``z_coefficient``), for each entry B of
    ``balanced`` the tokens of each sequence that chose each expert by their plain scores [B, experts], and with
    ``counted`` the real tokens of each expert [1, experts], both float32."""
    names = ("logits", *(("expert_bias",) if bias else ()), *(("padding_mask",) if padding else ()))
    patterns = {"logits": "t e!", "expert_bias": "e!", "padding_mask": "t"}

    def build(*tensors: torch.Tensor) -> Graph:
        b, spec = GraphBuilder(), SpecMaker()
        v = {n: b.input(n, spec(t, patterns[n])) for n, t in zip(names, tensors, strict=True)}
        mask = v.get("padding_mask")
        probs, chosen = b.op("router", logits=v["logits"], expert_bias=v.get("expert_bias"), **routing.attrs())
        outputs = [probs, chosen]
        if z_coefficient is not None:
            outputs.append(b.op("z_loss", logits=v["logits"], padding_mask=mask, coefficient=z_coefficient))
        plain = chosen
        if balanced and (bias or routing.num_groups is not None):  # losses go by scores without bias and groups
            _, plain = b.op("router", logits=v["logits"], topk=routing.topk, score_function=routing.score_function)
        counts = [(plain, n) for n in balanced] + ([(chosen, 1)] if counted else [])
        outputs += [
            b.op("tokens_per_expert", expert_map=c, padding_mask=mask, num_experts=routing.num_experts, sequences=n)
            for c, n in counts
        ]
        return b.build(outputs)

    return names, build


def balance_graph(routing: Routing, coefficient: float, *, padding: bool) -> Build:
    """The load-balancing loss, a number. Inputs: logits [t, experts], tokens_per_expert [B, experts] and total_tokens
    [1] over all ranks that share the loss[, padding_mask [t] bool]."""
    names = ("logits", "tokens_per_expert", "total_tokens", *(("padding_mask",) if padding else ()))
    patterns = {"logits": "t e!", "tokens_per_expert": "b! e!", "total_tokens": "i!", "padding_mask": "t"}

    def build(*tensors: torch.Tensor) -> Graph:
        b, spec = GraphBuilder(), SpecMaker()
        v = {n: b.input(n, spec(t, patterns[n])) for n, t in zip(names, tensors, strict=True)}
        return b.build(
            [
                b.op(
                    "load_balancing_loss",
                    **v,
                    topk=routing.topk,
                    score_function=routing.score_function,
                    coefficient=coefficient,
                )
            ]
        )

    return names, build
