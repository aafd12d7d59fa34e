"""Cross entropy of a language model, its classes whole or sharded over tensor-parallel ranks, with and without the
output layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..integration.graph.ir import Graph, GraphBuilder, TensorSpec
from ..integration.graph.ops.loss import NOWHERE
from ..integration.planner.runner import WeightGrads
from ..integration.planner.shapes import SpecMaker, dtype_name
from .base import PlannedModule
from .graphs import TensorParallel


def cross_entropy_graph(
    tp: TensorParallel, *, linear: bool, ignore_index: int = -100
) -> tuple[tuple[str, ...], Callable[..., Graph]]:
    """The inputs' names and the builder of the graph. Output: loss [*t], float32 or wider, the same on every rank of
    ``tp``.

    Inputs: logits [*t, v / tp], or with ``linear`` hidden [*t, h], of this rank's tokens under sequence parallel, and
    weight [v / tp, h]; targets [*t], all tokens, indices of the whole vocabulary; with more than one rank ``first``
    int64 [1], the index of this rank's first class, a tensor so that all ranks have one graph.
    """
    data = ("hidden", "weight") if linear else ("logits",)
    names = (*data, "targets", *(("first",) if tp.size > 1 else ()))

    def build(*tensors: torch.Tensor) -> Graph:
        b, spec = GraphBuilder(), SpecMaker()
        patterns = {"hidden": "*t h!", "weight": "v! h!", "logits": "*t v!", "targets": "*t", "first": "i"}
        given = dict(zip(names, tensors, strict=True))
        v = {n: b.input(n, spec(t, patterns[n]), weight=n == "weight") for n, t in given.items() if n in data}
        x = tp.enter(b, v["hidden"]) if linear else v["logits"]
        targets, shards = given["targets"], tp.size if linear and tp.sequence else 1
        tokens = (tensors[0].shape[0] * shards, *tensors[0].shape[1:-1])
        # as many as the gathered tokens; what is not, the op refuses with names
        fits = tensors[0].dim() > 1 and tuple(targets.shape) == tokens
        own = TensorSpec(b.specs[x].shape[:-1], dtype_name(targets.dtype)) if fits else spec(targets, "*t")
        t = b.input("targets", own)
        ports = {"x": x, "weight": v["weight"]} if linear else {"logits": x}
        op = "linear_cross_entropy" if linear else "cross_entropy"
        if tp.size == 1:
            return b.build([b.op(op, targets=t, ignore_index=ignore_index, **ports)])
        classes = b.specs[v["weight"]].shape[0] if linear else b.specs[x].shape[-1]
        shard = {"classes": classes, "ignore_index": ignore_index}
        own, hits = b.op("shard_targets", targets=t, first=b.input("first", spec(given["first"], "i")), **shard)
        loss, lse = b.op(op, want=("loss", "lse"), targets=own, ignore_index=NOWHERE, **ports)
        stats = b.op("all_gather", x=b.op("stack_shard", loss=loss, lse=lse), group=tp.symbol, size=tp.size)
        return b.build([b.op("shard_loss", want=("loss",), stats=stats, targets=t, hits=hits, **shard, **ports)])

    return names, build


class CrossEntropy(PlannedModule):
    """Loss per token. ``classes`` are this rank's, rank ``rank`` of the process group ``group`` holds those from ``rank
    * classes`` on. Targets equal to ``ignore_index`` give 0 and no gradient. It has no parameters: the output layer
    keeps its own."""

    def __init__(
        self,
        classes: int,
        *,
        tp: TensorParallel | None = None,
        group: Any = None,
        rank: int = 0,
        ignore_index: int = -100,
    ) -> None:
        super().__init__()
        self.classes, self.rank, self.ignore_index = classes, rank, ignore_index
        self.tp, self.group = tp or TensorParallel(), group

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """logits [*t, classes], targets [*t] int32 or int64 -> loss [*t], float32 or wider."""
        if logits.shape[-1] != self.classes:
            raise ValueError(
                f"logits {list(logits.shape)}: their last dim must be {self.classes}, the classes of this rank; pass "
                "them as they leave the output layer, not gathered"
            )
        return self._run(False, (logits, targets), None)

    def linear(
        self, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, sink: WeightGrads | None = None
    ) -> torch.Tensor:
        """The loss of logits ``hidden @ weight.T``, which never exist all at once.

        hidden [*t, h], of this rank's tokens under sequence parallel, weight [classes, h], targets [*t] of all tokens
        -> loss [*t]. ``sink``: where the gradient of the weight, input 1, goes.
        """
        if weight.shape[0] != self.classes:
            raise ValueError(
                f"weight {list(weight.shape)}: its first dim must be {self.classes}, the classes of this rank"
            )
        return self._run(True, (hidden, weight, targets), sink)

    def _run(self, linear: bool, tensors: tuple[torch.Tensor, ...], sink: WeightGrads | None) -> torch.Tensor:
        tp = self.tp
        names, build = cross_entropy_graph(tp, linear=linear, ignore_index=self.ignore_index)
        # the tokens are gathered again in the backward, as a column-parallel linear does it
        again = frozenset({"all_gather"} if linear and tp.sequence else ())
        runner = self.planned((linear,), names, build, recompute=again, groups={tp.symbol: self.group})
        if tp.size > 1:
            tensors = (*tensors, self._first(tensors[0].device))
        return runner(*tensors, sink=sink)

    def _first(self, device: torch.device) -> torch.Tensor:
        """Made once per device, and no buffer: a model that is made on the meta device would lose its value."""
        made = self.__dict__.setdefault("_firsts", {})
        if device not in made:
            made[device] = torch.full((1,), self.rank * self.classes, dtype=torch.int64, device=device)
        return made[device]

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in super().__getstate__().items() if k != "_firsts"}
