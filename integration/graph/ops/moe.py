"""Rows by expert and back: group_by_expert, permute, unpermute, tokens_per_expert.

t tokens, k slots a token, e experts, h width. ``expert_map`` [t, k] int32 holds the expert of each slot, -1 where the
slot is dropped. ``group_by_expert`` says where the rows go:

    counts [e]     int32, rows of each expert
    offsets [e]    int32, where each expert's group ends; groups lie in the order of the experts, each padded to a
                   multiple of ``align``
    row_map [t, k] int32, the row of each slot, -1 where it is dropped; inside a group in the order of (token, slot)

There are c = t * k + e * (align - 1) rows, which is enough for any map: nothing has to be read by the host. Rows
between a group's last and the next multiple of ``align`` are padding: permute and the gradient of unpermute fill them
with zeros. Rows from offsets[-1] on belong to no group: they hold anything, NaN too, and no op of this family or of
grouped_matmul lets them reach a row of a group, a token, a probability or a weight. A dropped slot's probability
is not read either.

Sums over a token's slots are made in slot order, in float32 (or wider), and rounded once.
"""

from __future__ import annotations

import torch

from ..ir import Size, TensorSpec, size_of
from .table import REQUIRED, Op, acc, demand, ports, size_product

LARGEST_ROW = 2**31 - 1  # row_map and offsets are int32


def capacity(tokens: Size, slots: Size, experts: int, align: int) -> Size:
    """The rows that any map of so many tokens, slots and experts has room in."""
    return size_of((tokens, slots), plus=experts * (align - 1))


def positive(op: str, field: str, value: object) -> None:
    shown = value if isinstance(value, int | float | str | None) else type(value).__name__
    demand(type(value) is int and value > 0, op, field, shown, "must be a positive int")


def _map(op: str, field: str, spec: TensorSpec) -> None:
    if field == "row_map":
        remedy = "pass what group_by_expert returned"
    elif spec.dtype == "bool" or spec.is_float:
        remedy = "a mask or probabilities hold no numbers of experts: pass the experts that router returned"
    else:
        shaped = "" if spec.rank == 2 else ".flatten(0, -2)" if spec.rank > 2 else ".unsqueeze(1), one slot for each token"
        convert = "" if spec.dtype == "int32" else ".int()"
        remedy = f"pass {field}{convert}{shaped}"
    demand(spec.rank == 2 and spec.dtype == "int32", op, field, spec, "must be int32 [tokens, slots]", remedy)


# ---- group_by_expert, tokens_per_expert ------------------------------------------------------------------------------


def _group_infer(specs, attrs):
    op, expert_map = "group_by_expert", specs["expert_map"]
    _map(op, "expert_map", expert_map)
    for field in ("num_experts", "align"):
        positive(op, field, attrs[field])
    ends = TensorSpec((attrs["num_experts"],), "int32")
    return {"counts": ends, "offsets": ends, "row_map": expert_map}


def check_experts(op: str, expert_map: torch.Tensor, experts: int) -> None:
    """Refuses ids of no expert: a host sync where they lie on a GPU."""
    if expert_map.numel():
        low, high = int(expert_map.min()), int(expert_map.max())
        if low < -1 or high >= experts:
            raise ValueError(
                f"{op}: expert_map spans {low} .. {high}: must lie in [0, {experts}), or be -1 where a slot is dropped"
            )


def _group_check(t, shape, attrs):
    tokens, slots = shape("expert_map")
    if tokens is not None and slots is not None:
        rows = capacity(tokens, slots, attrs["num_experts"], attrs["align"])
        if rows > LARGEST_ROW:
            raise ValueError(
                f"group_by_expert: {tokens} tokens x {slots} slots: {rows} rows, more than int32 counts; "
                "split the tokens"
            )
    if "expert_map" in t:
        check_experts("group_by_expert", t["expert_map"], attrs["num_experts"])


def _group_reference(t, attrs, want):
    """Ids that name no expert are dropped."""
    expert_map, e, align = t["expert_map"], attrs["num_experts"], attrs["align"]
    ids = expert_map.reshape(-1).to(torch.int64)
    ids = torch.where((ids >= 0) & (ids < e), ids, e)  # dropped slots come last
    key, order = ids.sort(stable=True)
    ends = torch.searchsorted(key, torch.arange(e, device=ids.device), right=True)
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    padded = (counts + align - 1) // align * align
    offsets = padded.cumsum(0)
    shift = torch.cat((offsets - padded - ends + counts, ends.new_zeros(1)))  # by what padding moves an expert's rows
    rows = torch.arange(len(ids), device=ids.device) + shift[key]
    row_map = torch.empty_like(ids).scatter_(0, order, torch.where(key < e, rows, -1))
    return {"counts": counts.int(), "offsets": offsets.int(), "row_map": row_map.int().view(expert_map.shape)}


def _tokens_infer(specs, attrs):
    op, expert_map = "tokens_per_expert", specs["expert_map"]
    _map(op, "expert_map", expert_map)
    for field in ("num_experts", "sequences"):
        positive(op, field, attrs[field])
    check_padding(op, specs, expert_map.shape[0])
    return {"tokens": TensorSpec((attrs["sequences"], attrs["num_experts"]), "float32")}


def check_padding(op: str, specs, tokens: Size) -> None:
    """Refuses a padding mask that is not bool [tokens]."""
    if "padding_mask" in specs:
        mask = specs["padding_mask"]
        demand(
            mask.dtype == "bool" and mask.shape == (tokens,),
            op,
            "padding_mask",
            mask,
            f"must be bool [{tokens}], True hides a token",
        )


def _tokens_check(t, shape, attrs):
    if "expert_map" in t:
        check_experts("tokens_per_expert", t["expert_map"], attrs["num_experts"])


def _tokens_reference(t, attrs, want):
    expert_map, e, sequences = t["expert_map"].to(torch.int64), attrs["num_experts"], attrs["sequences"]
    counted = (expert_map >= 0) & (expert_map < e)
    if "padding_mask" in t:
        counted = counted & ~t["padding_mask"].unsqueeze(-1)
    sequence = torch.arange(len(expert_map), device=expert_map.device).remainder(sequences).unsqueeze(-1)
    bins = torch.where(counted, sequence * e + expert_map, sequences * e)
    ordered, ends = bins.flatten().sort().values, torch.arange(sequences * e, device=expert_map.device)
    counts = torch.diff(torch.searchsorted(ordered, ends, right=True), prepend=ends.new_zeros(1))
    return {"tokens": counts.float().view(sequences, e)}


# ---- permute, unpermute ----------------------------------------------------------------------------------------------


def _places(op: str, specs, attrs) -> Size:
    """Checks row_map, counts, offsets and align; returns the number of rows."""
    row_map, counts, offsets = specs["row_map"], specs["counts"], specs["offsets"]
    _map(op, "row_map", row_map)
    positive(op, "align", attrs["align"])
    ok = offsets.rank == 1 and offsets.dtype == "int32" and isinstance(offsets.shape[0], int) and offsets.shape[0] > 0
    demand(ok, op, "offsets", offsets, "must be int32 [experts]")
    demand(counts == offsets, op, "counts", counts, f"must be like offsets {offsets}")
    return capacity(*row_map.shape, offsets.shape[0], attrs["align"])


def _weights(op: str, specs, field: str, shape: tuple[Size, ...], what: str) -> None:
    if field in specs:
        demand(
            specs[field].is_float and specs[field].shape == shape,
            op,
            field,
            specs[field],
            f"must be floating point {list(shape)}, {what}",
        )


def check_offsets(op: str, offsets: torch.Tensor, rows: int | None) -> list[int]:
    """Refuses group ends that decrease or lie behind the last row, and returns them: a host sync on a GPU."""
    values, last = offsets.tolist(), 0
    for i, v in enumerate(values):
        if v < last:
            raise ValueError(
                f"{op}: offsets[{i}] = {v} after {last}: must not decrease; pass cumulative ends, not counts"
            )
        last = v
    if rows is not None and last > rows:
        raise ValueError(f"{op}: offsets[-1] = {last}: beyond the {rows} rows; pass the ends of groups of these rows")
    return values


def _places_check(op: str):
    def check(t, shape, attrs):
        tokens, slots = shape("row_map")
        experts, rows = shape("offsets")[0], None
        if tokens is not None and slots is not None:
            rows = capacity(tokens, slots, experts, attrs["align"])
        ends = check_offsets(op, t["offsets"], rows) if "offsets" in t else None
        if ends is not None and "counts" in t:
            for i, (count, begin, end) in enumerate(zip(t["counts"].tolist(), [0, *ends], ends, strict=False)):
                if not end - begin - attrs["align"] < count <= end - begin:
                    raise ValueError(
                        f"{op}: counts[{i}] = {count}: its group has {end - begin} rows, padded to a multiple of "
                        f"{attrs['align']}"
                    )
        if "row_map" in t:
            counts = t["counts"].tolist() if ends is not None and "counts" in t else None
            _check_row_map(op, t["row_map"], rows, counts, ends)

    return check


def _check_row_map(
    op: str, row_map: torch.Tensor, rows: int | None, counts: list[int] | None, ends: list[int] | None
) -> None:
    """Refuses a row that is not there or two slots', and slots that are not just the groups' ``counts`` rows."""
    used = row_map[row_map >= 0].cpu()
    far = int(row_map.min()) if row_map.numel() and int(row_map.min()) < -1 else None
    far = int(used.max()) if used.numel() and rows is not None and int(used.max()) >= rows else far
    if far is not None:
        raise ValueError(f"{op}: row_map reaches row {far}: must lie in [0, {rows}), or be -1 where a slot is dropped")
    if used.unique().numel() != used.numel():
        raise ValueError(
            f"{op}: row_map gives a row to two slots: each must have its own; pass what group_by_expert returned"
        )
    if counts is None or ends is None:
        return
    held = torch.cat([torch.arange(b, b + n) for b, n in zip([0, *ends], counts, strict=False)])
    if not torch.equal(used.sort().values.long(), held):
        row = min(set(used.tolist()) ^ set(held.tolist()))
        raise ValueError(
            f"{op}: row_map and counts do not agree on row {row}: slots must have all rows of the groups but their "
            "padding; pass what group_by_expert returned"
        )


def sources(row_map: torch.Tensor, rows: int) -> torch.Tensor:
    """The inverse of ``row_map``: for each row its flat slot, int64 [rows], -1 where there is none."""
    index = row_map.reshape(-1).to(torch.int64)
    made = index.new_full((rows + 1,), -1)  # the last place takes what is dropped
    return made.scatter_(0, torch.where(index < 0, rows, index), torch.arange(len(index), device=index.device))[:rows]


def _spread(x: torch.Tensor, source: torch.Tensor, slots: int) -> torch.Tensor:
    """Row r of the result is x of the token that row belongs to, zero where it belongs to none."""
    if not len(x) or not slots:
        return x.new_zeros((len(source), x.shape[1]))
    taken = x.index_select(0, source.clamp(min=0) // slots)
    return torch.where((source >= 0).unsqueeze(-1), taken, 0)


def pick(values: torch.Tensor, row_map: torch.Tensor) -> torch.Tensor:
    """``values`` [c] or [c, h] of each slot's row in [t, k]'s place, zero where the slot is dropped."""
    index = row_map.reshape(-1).to(torch.int64)
    shape = (*row_map.shape, *values.shape[1:])
    if not len(index) or not len(values):
        return values.new_zeros(shape)
    kept = (index >= 0).view(-1, *(1,) * (values.dim() - 1))
    return torch.where(kept, values.index_select(0, index.clamp(min=0)), 0).view(shape)


def row_probs(probs: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """``probs`` [t, k] as [c], zero where a row belongs to no slot."""
    if not probs.numel():
        return probs.new_zeros(len(source))
    return torch.where(source >= 0, probs.reshape(-1).index_select(0, source.clamp(min=0)), 0)


def _permute_infer(specs, attrs):
    op, x = "permute", specs["x"]
    rows = _places(op, specs, attrs)
    demand(x.is_float and x.rank == 2, op, "x", x, "must be floating point [tokens, width]")
    demand(
        specs["row_map"].shape[0] == x.shape[0],
        op,
        "row_map",
        specs["row_map"],
        f"must have a row for each token of x {x}, as must the expert_map that it was made of",
    )
    _weights(op, specs, "probs", specs["row_map"].shape, "one probability per slot")
    out = {"rows": TensorSpec((rows, x.shape[1]), x.dtype)}
    return out | ({"row_probs": TensorSpec((rows,), specs["probs"].dtype)} if "probs" in specs else {})


def _permute_reference(t, attrs, want):
    x, row_map = t["x"], t["row_map"]
    source = sources(row_map, capacity(*row_map.shape, len(t["offsets"]), attrs["align"]))
    out = {"rows": _spread(x, source, row_map.shape[1])}
    return out | ({"row_probs": row_probs(t["probs"], source)} if "probs" in t else {})


def _permute_gradient(g):
    want = [f"d{p}" for p, out in (("x", "rows"), ("probs", "row_probs")) if g.needs(p) and g.out(out) is not None]
    if not want:
        return {}
    outs = g.op("permute_bwd", want=want, drows=g.out("rows") if "dx" in want else None,
                drow_probs=g.out("row_probs") if "dprobs" in want else None, row_map=g.value("row_map"))  # fmt: skip
    return dict(zip([w[1:] for w in want], outs if len(want) > 1 else (outs,), strict=True))


def _permute_bwd_infer(specs, attrs):
    op, row_map = "permute_bwd", specs["row_map"]
    _map(op, "row_map", row_map)
    out = {}
    if "drows" in specs:
        out["dx"] = TensorSpec((row_map.shape[0], specs["drows"].shape[1]), specs["drows"].dtype)
    if "drow_probs" in specs:
        out["dprobs"] = TensorSpec(row_map.shape, specs["drow_probs"].dtype)
    return out


def _sum_slots(rows: torch.Tensor, row_map: torch.Tensor, probs: torch.Tensor | None) -> torch.Tensor:
    total = acc(rows).new_zeros((row_map.shape[0], rows.shape[1]))
    for slot in range(row_map.shape[1]):
        part = acc(pick(rows, row_map[:, slot]))
        if probs is not None:  # what a dropped slot's probability holds is not read
            weight = torch.where(row_map[:, slot] >= 0, acc(probs[:, slot]).to(part.dtype), 0)
            part = part * weight.unsqueeze(-1)
        total = total + part
    return total.to(rows.dtype)


def _permute_bwd_reference(t, attrs, want):
    out = {}
    if "dx" in want:
        out["dx"] = _sum_slots(t["drows"], t["row_map"], None)
    if "dprobs" in want:
        out["dprobs"] = pick(t["drow_probs"], t["row_map"])
    return out


def _unpermute_infer(specs, attrs):
    op, rows, row_map = "unpermute", specs["rows"], specs["row_map"]
    count = _places(op, specs, attrs)
    demand(
        rows.is_float and rows.rank == 2 and rows.shape[0] == count,
        op,
        "rows",
        rows,
        f"must be floating point [{count}, width]",
    )
    _weights(op, specs, "probs", row_map.shape, "one probability per slot")
    return {"y": TensorSpec((row_map.shape[0], rows.shape[1]), rows.dtype)}


def _unpermute_reference(t, attrs, want):
    return {"y": _sum_slots(t["rows"], t["row_map"], t.get("probs"))}


def _unpermute_gradient(g):
    want = [f"d{p}" for p in ("rows", "probs") if g.needs(p)]
    places = {p: g.value(p) for p in ("row_map", "counts", "offsets")}
    outs = g.op("unpermute_bwd", want=want, dy=g.out("y"), **places, rows=g.value("rows") if "dprobs" in want else None,
                probs=g.value("probs") if g.has("probs") else None, align=g.attr("align"))  # fmt: skip
    return dict(zip([w[1:] for w in want], outs if len(want) > 1 else (outs,), strict=True))


def _unpermute_bwd_infer(specs, attrs):
    op, dy, row_map = "unpermute_bwd", specs["dy"], specs["row_map"]
    rows = _places(op, specs, attrs)
    demand(
        dy.rank == 2 and dy.shape[0] == row_map.shape[0],
        op,
        "dy",
        dy,
        f"must have a row for each token of row_map {row_map}",
    )
    out = {"drows": TensorSpec((rows, dy.shape[1]), dy.dtype)}
    return out | ({"dprobs": specs["probs"]} if "rows" in specs and "probs" in specs else {})


def _unpermute_bwd_reference(t, attrs, want):
    dy, row_map, out = t["dy"], t["row_map"], {}
    if "drows" in want:
        source = sources(row_map, capacity(*row_map.shape, len(t["offsets"]), attrs["align"]))
        drows = acc(_spread(dy, source, row_map.shape[1]))
        if "probs" in t:
            weight = acc(row_probs(t["probs"], source)).to(drows.dtype).unsqueeze(-1)
            drows = torch.where((source >= 0).unsqueeze(-1), drows * weight, 0)
        out["drows"] = drows.to(dy.dtype)
    if "dprobs" in want:
        parts = [(acc(dy) * acc(pick(t["rows"], row_map[:, slot]))).sum(-1) for slot in range(row_map.shape[1])]
        dprobs = torch.stack(parts, -1) if parts else torch.zeros_like(t["probs"])
        out["dprobs"] = torch.where(row_map >= 0, dprobs, 0).to(t["probs"].dtype)
    return out


def _sum_flops(i, o, a):
    """A product and a sum for each value of each slot's row."""
    width = next((i[p].shape[1] for p in ("drows", "rows", "dy") if p in i), 1)
    return 2 * size_product((*i["row_map"].shape, width))


_PLACES = ("row_map", "counts", "offsets")
_ALIGN = {"align": 1}

OPS = (
    Op(
        "group_by_expert",
        ports("expert_map"),
        ports("counts", "offsets", "row_map"),
        _group_infer,
        _group_reference,
        attrs={"num_experts": REQUIRED, "align": 1},
        check=_group_check,
        differentiable=frozenset(),
    ),
    Op(
        "tokens_per_expert",
        ports("expert_map", "padding_mask?"),
        ports("tokens"),
        _tokens_infer,
        _tokens_reference,
        attrs={"num_experts": REQUIRED, "sequences": 1},
        check=_tokens_check,
        differentiable=frozenset(),
    ),
    Op(
        "permute",
        ports("x", *_PLACES, "probs?"),
        ports("rows", "row_probs?"),
        _permute_infer,
        _permute_reference,
        attrs=_ALIGN,
        gradient=_permute_gradient,
        implied=lambda specs, attrs: ("row_probs",) if "probs" in specs else (),
        check=_places_check("permute"),
        open_rows=frozenset({"rows", "row_probs"}),
        kind="layout",
        differentiable=frozenset({"x", "probs"}),
    ),
    Op(
        "permute_bwd",
        ports("drows?", "drow_probs?", "row_map"),
        ports("dx?", "dprobs?"),
        _permute_bwd_infer,
        _permute_bwd_reference,
        flops=_sum_flops,
    ),
    Op(
        "unpermute",
        ports("rows", *_PLACES, "probs?"),
        ports("y"),
        _unpermute_infer,
        _unpermute_reference,
        attrs=_ALIGN,
        gradient=_unpermute_gradient,
        check=_places_check("unpermute"),
        differentiable=frozenset({"rows", "probs"}),
        flops=_sum_flops,
        gradient_only=frozenset({"counts", "offsets"}),
    ),
    Op(
        "unpermute_bwd",
        ports("dy", *_PLACES, "rows?", "probs?"),
        ports("drows?", "dprobs?"),
        _unpermute_bwd_infer,
        _unpermute_bwd_reference,
        attrs=_ALIGN,
        flops=_sum_flops,
        open_rows=frozenset({"drows"}),
    ),
)
