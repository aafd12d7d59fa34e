"""The ops of a mixture of experts beside its products, on torch's index ops: nothing waits for the device."""

from __future__ import annotations

import torch

from ...integration.engines.arch import Arch
from ...integration.engines.contract import BuildContext, CompiledRegion, Engine, Offer, Region
from ...integration.graph.ir import Dim
from ...integration.graph.ops.moe import capacity, pick, row_probs, sources
from ...integration.graph.ops.table import acc
from ..common.evaluate import reference_launch

Tensors = dict[str, torch.Tensor]


class TorchMoE(Engine):
    """Moves rows with ``index_select`` and sums a token's slots one after the other in float32. Rows from offsets[-1]
    on are copies of some token. Routing, counting and the losses are the steps of their references."""

    id = "moe/torch"

    def match(self, region: Region, arch: Arch) -> Offer:
        op = region.node.op
        if op not in _MOVES:  # numbers of tokens x experts: what takes time are the launches
            return Offer(efficiency=0.3, launches=12, host_us=55, ahead_of_time=True)
        slots = region.spec("row_map").shape[1]
        sums = op in ("unpermute", "permute_bwd") or "dprobs" in region.wanted
        return Offer(efficiency=0.2 if sums else 0.45, launches=8 + 4 * slots * sums, host_us=50, ahead_of_time=True,
                     workspace_bytes=_workspace(region, sums))  # fmt: skip

    def build(self, ctx: BuildContext) -> CompiledRegion:
        region = ctx.region
        move = _MOVES.get(region.node.op)
        if move is None:
            return CompiledRegion(reference_launch(region))
        ports, wanted, align = [p for p, _ in region.node.inputs], region.wanted, region.node.attributes.get("align", 1)

        def launch(*tensors):
            out = move(dict(zip(ports, tensors, strict=True)), wanted, align)
            return out[wanted[0]] if len(wanted) == 1 else tuple(out[p] for p in wanted)

        return CompiledRegion(region.by_port(launch))


def _spread(
    x: torch.Tensor, source: torch.Tensor, t: Tensors, align: int, weight: torch.Tensor | None = None
) -> torch.Tensor:
    """Row r is x of the token that row belongs to, times ``weight`` [c]; padding is zero."""
    slots = t["row_map"].shape[1]
    if not x.shape[0] or not slots:
        return x.new_zeros((len(source), x.shape[1]))
    made = x.index_select(0, source.clamp(min=0) // slots)
    if weight is not None:
        made = (made * _wide(weight, x).unsqueeze(-1)).to(x.dtype)
    return made if align == 1 else made.index_fill_(0, _padding(t, len(source), align), 0)


def _workspace(region: Region, sums: bool) -> int:
    """What lies beside inputs and outputs when it is most: indices of the rows, and values in float32."""
    tokens, slots = (d.hint if isinstance(d, Dim) else d for d in region.spec("row_map").shape)
    moved = next((s for p in ("x", "drows", "rows", "dy") if (s := region.spec(p)) is not None), None)
    if moved is None:
        return 24 * tokens * slots
    wide = moved.shape[1] * (8 if moved.dtype == "float64" else 4)
    weighted = "drows" in region.wanted and region.spec("probs") is not None  # each row times its probability
    return tokens * max(3 * wide * sums, slots * wide * weighted) + 32 * tokens * slots


def _wide(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A probability in the dtype in which it is multiplied with ``x``."""
    return weight.to(torch.float64 if x.dtype == torch.float64 else torch.float32)


def _padding(t: Tensors, rows: int, align: int) -> torch.Tensor:
    """The padding rows, int64 [e * (align - 1)]. Where there are fewer, the last row is nobody's: it fills the list."""
    counts, ends = (t[p].to(torch.int64).unsqueeze(-1) for p in ("counts", "offsets"))
    begins = torch.cat((ends.new_zeros(1, 1), ends[:-1]))
    places = begins + counts + torch.arange(align - 1, device=ends.device)
    return torch.where(places < ends, places, rows - 1).flatten()


def _slots(t: Tensors, values: torch.Tensor):
    """For each slot (its place, its row of ``values`` for each token, which tokens have one)."""
    index, slots = t["row_map"].to(torch.int64), t["row_map"].shape[1]
    safe = index.clamp(min=0)
    for slot in range(slots):
        yield slot, values.index_select(0, safe[:, slot]), index[:, slot] >= 0


def _sum(values: torch.Tensor, t: Tensors) -> torch.Tensor:
    shape, probs, total = (t["row_map"].shape[0], values.shape[1]), t.get("probs"), None
    if not len(values):
        return values.new_zeros(shape)
    for slot, part, kept in _slots(t, values):
        part = acc(part) if probs is None else part * _wide(probs[:, slot], part).unsqueeze(-1)
        part = torch.where(kept.unsqueeze(-1), part, 0)  # a probability of 0 would not hide a NaN
        total = part if total is None else total.add_(part)
    return values.new_zeros(shape) if total is None else total.to(values.dtype)


def _permute(t: Tensors, wanted: list[str], align: int) -> Tensors:
    source = sources(t["row_map"], capacity(*t["row_map"].shape, len(t["offsets"]), align))
    out = {"rows": _spread(t["x"], source, t, align)} if "rows" in wanted else {}
    return out | ({"row_probs": row_probs(t["probs"], source)} if "row_probs" in wanted else {})


def _permute_bwd(t: Tensors, wanted: list[str], align: int) -> Tensors:
    out = {"dx": _sum(t["drows"], t)} if "dx" in wanted else {}
    return out | ({"dprobs": pick(t["drow_probs"], t["row_map"])} if "dprobs" in wanted else {})


def _unpermute(t: Tensors, wanted: list[str], align: int) -> Tensors:
    return {"y": _sum(t["rows"], t)}


def _unpermute_bwd(t: Tensors, wanted: list[str], align: int) -> Tensors:
    out: Tensors = {}
    if "drows" in wanted:
        source = sources(t["row_map"], capacity(*t["row_map"].shape, len(t["offsets"]), align))
        out["drows"] = _spread(t["dy"], source, t, align, row_probs(t["probs"], source) if "probs" in t else None)
    if "dprobs" in wanted:
        out["dprobs"] = dprobs = torch.zeros_like(t["probs"], memory_format=torch.contiguous_format)
        if len(t["rows"]):
            for slot, part, kept in _slots(t, t["rows"]):
                dprobs[:, slot] = torch.where(kept, (acc(part) * t["dy"]).sum(-1), 0)
    return out


_MOVES = {"permute": _permute, "permute_bwd": _permute_bwd, "unpermute": _unpermute, "unpermute_bwd": _unpermute_bwd}
