"""The data movement of a mixture of experts on our own kernels (sm80/): permute, unpermute and their gradients, one
pass over memory each, the stable sort of slots by expert that they go by, and the router with its gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ...integration.engines.arch import Arch
from ...integration.engines.contract import BuildContext, CompiledRegion, Decline, Engine, Kernel, Offer, Region
from ...integration.graph.ir import ITEMSIZE
from ..common import quantized
from ..common.rows import dtype_reason, rows, vector
from . import places
from .places import whole

_DEVICE = "layerplan.kernels.moe.sm80"
_THREADS, _VECTORS = (128, 64, 256, 512), (1, 2, 4)  # of a block; of a thread
_PICKED = 128  # threads of a block that gathers numbers alone
_SORTS = ("group_by_expert", "tokens_per_expert")
_ROUTES = ("router", "router_bwd")
_MOST_BINS = 1024
_MOST_EXPERTS, _LANES = 512, 32  # whose logits a warp holds, and what it chooses from them
_BLOCK_SLOTS, _ONE_BLOCK = 2048, 4096  # slots of a block, and up to which there is one
_MOST_BLOCKS, _MOST_HELD = 256, 1 << 17  # blocks, and numbers that each of them reads
_ROWS = ("x", "rows", "drows", "dy")  # ports of matrices
_SHARE = {16: 1.0, 8: 0.85, 4: 0.5, 2: 0.25}  # of the bandwidth, by bytes of an access


class CuteMoE(Engine):
    """Rows of float32, bfloat16 or float16 with any row stride, probabilities in any of these, up to 32 slots. Sums are
    made in slot order in float32. Maps of up to 1024 experts, logits of up to 512. Bitwise equal over reruns."""

    id = "moe/cute"

    def match(self, region: Region, arch: Arch) -> Offer | Decline:
        reason = _reason(region)
        return Decline(reason) if reason else self.offer_with(region, arch, quantized.defaults(_knobs(region)))

    def offer_with(self, region: Region, arch: Arch, knobs: tuple[tuple[str, Any], ...]) -> Offer | Decline:
        reason = _reason(region) or quantized.knob_reason(knobs, _knobs(region))
        if reason is not None:
            return Decline(reason)
        op = region.node.op
        if op in _SORTS:
            blocks = _blocks(region.spec("expert_map").numel(), _bins(region))
            count = 2 if blocks > 1 or op == "tokens_per_expert" else 1
            return Offer(
                efficiency=0.1,
                launches=count,
                host_us=15,
                ahead_of_time=True,
                workspace_bytes=4 * blocks * _bins(region) * (count - 1),
            )
        if op in _ROUTES:
            return Offer(efficiency=0.3, host_us=12, ahead_of_time=True)
        share = {"permute": 0.9, "unpermute": 0.93, "permute_bwd": 0.93, "unpermute_bwd": 0.88}[op]
        return Offer(efficiency=share * _SHARE[_access(region)], host_us=13, knobs=knobs, ahead_of_time=True)

    def kernels(self, region: Region, arch: Arch, offer: Offer) -> tuple[Kernel, ...]:
        if region.node.op in _SORTS:
            return tuple(
                Kernel(f"{_DEVICE}.group:{name}", tuple(given.items())) for name, given in _sort_constants(region)
            )
        if region.node.op in _ROUTES:
            return (Kernel(f"{_DEVICE}.router:{region.node.op}", tuple(_route_constants(region).items())),)
        name, constants = _move_constants(region)
        return (Kernel(f"{_DEVICE}.permute:{name}", tuple((constants | dict(offer.knobs)).items())),)

    def build(self, ctx: BuildContext) -> CompiledRegion:
        make = {
            "permute": _permute,
            "unpermute": _unpermute,
            "permute_bwd": _permute_bwd,
            "unpermute_bwd": _unpermute_bwd,
            "group_by_expert": _group,
            "tokens_per_expert": _tokens,
            "router": _router,
            "router_bwd": _router_bwd,
        }[ctx.region.node.op]
        return CompiledRegion(
            ctx.region.by_port(make(ctx.region, *map(ctx.compile, self.kernels(ctx.region, ctx.arch, ctx.offer))))
        )


# ---- what a region asks for ------------------------------------------------------------------------------------------


def _matrix(region: Region):
    """Spec of the rows that a region moves; None where it moves numbers alone."""
    return next((s for p in _ROWS if (s := region.spec(p)) is not None), None)


def _access(region: Region) -> int:
    """Bytes of an access: those that divide a row, at most 16."""
    x = _matrix(region)
    return math.gcd(x.shape[1] * ITEMSIZE[x.dtype], 16) if x is not None else 4


def _reason(region: Region) -> str | None:
    """Why the kernels cannot take a region, None where they can."""
    if region.node.op in _ROUTES:
        return _route_reason(region)
    return _sort_reason(region) if region.node.op in _SORTS else _move_reason(region)


def _move_reason(region: Region) -> str | None:
    node, x, slots = region.node, _matrix(region), region.spec("row_map").shape[1]
    if reason := dtype_reason(
        **{p: region.spec(p) for p, _ in node.inputs if p not in ("row_map", "counts", "offsets")}
    ):
        return reason
    other = next(
        (p for p in _ROWS if x is not None and region.spec(p) is not None and region.spec(p).dtype != x.dtype), None
    )
    if other is not None:
        return f"{other} is {region.spec(other).dtype} and others {x.dtype}: moves rows of one dtype"
    if x is not None and (reason := quantized.size_reason(x.shape[:1], x.shape[1], x)):
        return reason
    if reason := places.slots_reason(slots):
        return reason
    return "nothing reads the rows" if node.op == "permute" and "rows" not in region.wanted else None


def _sort_reason(region: Region) -> str | None:
    bins, slots = _bins(region), region.spec("expert_map").shape[1]
    if not (isinstance(slots, int) and slots > 0):
        return f"{slots} slots of a token: compiles for a number from 1 on"
    return (
        None
        if bins <= _MOST_BINS
        else f"{bins} experts, over all sequences: counts up to {_MOST_BINS} in a block's shared memory"
    )


def _route_reason(region: Region) -> str | None:
    node, experts = region.node, region.spec("logits").shape[1]
    if reason := dtype_reason(**{p: region.spec(p) for p in ("logits", "expert_bias", "dprobs")}):
        return reason
    if experts > _MOST_EXPERTS:
        return f"{experts} experts: a warp holds the logits of up to {_MOST_EXPERTS}"
    for field in ("topk", "num_groups"):
        if (node.attributes.get(field) or 0) > _LANES:
            return f"{field} = {node.attr(field)}: a warp holds up to {_LANES} of them"
    return None


def _bins(region: Region) -> int:
    """Experts, of each sequence."""
    return region.node.attr("num_experts") * region.node.attributes.get("sequences", 1)


def _blocks(slots: int, bins: int) -> int:
    """Blocks that share the slots: each sums up what all hold, so they are fewer where there are many bins."""
    return 1 if slots <= _ONE_BLOCK else min(_MOST_BLOCKS, _MOST_HELD // bins, -(-slots // _BLOCK_SLOTS))


def _sort_constants(region: Region) -> list[tuple[str, dict[str, Any]]]:
    """(device function, what its code depends on) of each kernel."""
    node = region.node
    if node.op == "group_by_expert":
        experts = node.attr("num_experts")
        plain = {"experts": experts, "slots": 1, "sequences": 1, "masked": False}
        return [("count", plain), ("place", {"experts": experts, "align": node.attr("align")})]
    sequences, masked = node.attr("sequences"), region.spec("padding_mask") is not None
    slots = region.spec("expert_map").shape[1] if masked or sequences > 1 else 1
    return [
        ("count", {"experts": node.attr("num_experts"), "slots": slots, "sequences": sequences, "masked": masked}),
        ("total", {"bins": _bins(region)}),
    ]


def _knobs(region: Region) -> dict[str, tuple[Any, ...]]:
    """Knob -> values, the default first."""
    if region.node.op in (*_SORTS, *_ROUTES):
        return {}
    if region.wanted == ["dprobs"] and region.node.op == "permute_bwd":
        return {}
    large = any(quantized.streamed(region.graph.specs[v]) for v in region.graph.outputs)
    if "dprobs" in region.wanted and region.node.op == "unpermute_bwd":
        usual = _dot_threads(_matrix(region))
        return {"threads": (usual, *(n for n in _THREADS if n != usual)), "streaming": (large, not large)}
    return {"threads": _THREADS, "vectors": _VECTORS, "streaming": (large, not large)}


def _move_constants(region: Region) -> tuple[str, dict[str, Any]]:
    """(device function, what its code depends on but for the knobs)."""
    op, want, slots, x, probs = (
        region.node.op,
        region.wanted,
        region.spec("row_map").shape[1],
        _matrix(region),
        region.spec("probs"),
    )
    if op == "permute_bwd" and "dx" not in want:
        return "pick", {"numbers": region.spec("drow_probs").dtype, "slots": slots, "threads": _PICKED}
    made: dict[str, Any] = {"dtype": x.dtype, "width": x.shape[1], "access": _access(region), "slots": slots}
    if op in ("unpermute", "permute_bwd"):
        numbers = region.spec("drow_probs") if "dprobs" in want else None
        return "gather", made | {"weight": probs and probs.dtype, "numbers": numbers and numbers.dtype}
    align = region.node.attr("align")
    made |= {"experts": region.spec("offsets").shape[0] if align > 1 else 0, "align": align}
    if op == "unpermute_bwd" and "dprobs" in want:
        return "spread_dots", made | {"weight": probs.dtype, "spread": "drows" in want}
    numbers, weighted = "row_probs" in want, op == "unpermute_bwd" and probs is not None
    return "spread", made | {
        "weight": probs.dtype if numbers or weighted else None,
        "weighted": weighted,
        "numbers": numbers,
    }


def _route_constants(region: Region) -> dict[str, Any]:
    node, logits = region.node, region.spec("logits")
    made = {
        "dtype": logits.dtype,
        "experts": logits.shape[1],
        "topk": node.attr("topk"),
        "scale": node.attr("scaling_factor"),
        "score": "pre_softmax" if node.attr("pre_softmax") else node.attr("score_function"),
    }
    if node.op == "router_bwd":
        return made | {"grad": region.spec("dprobs").dtype}
    bias = region.spec("expert_bias")
    return made | {
        "groups": node.attr("num_groups") or 0,
        "kept": node.attr("group_topk") or 0,
        "bias": bias and bias.dtype,
    }


def _dot_threads(x) -> int:
    """Of a block that sums over a row: a vector of 16 bytes each, which leaves registers for more rows in flight."""
    return next((n for n in sorted(_THREADS)[1:] if 16 * n >= x.shape[1] * ITEMSIZE[x.dtype]), max(_THREADS))


# ---- launches --------------------------------------------------------------------------------------------------------


def _step(region: Region) -> tuple[int, int]:
    """(width, elements of an access)."""
    x = _matrix(region)
    return x.shape[1], _access(region) // ITEMSIZE[x.dtype]


def _results(region: Region, made: dict[str, torch.Tensor | None]) -> Any:
    want = region.wanted
    return made[want[0]] if len(want) == 1 else tuple([made[p] for p in want])


def _finder(region: Region) -> places.Find:
    """A function that finds a port's tensor among those that a launch is given, None where it is not connected."""
    return places.finder({p: i for i, (p, _) in enumerate(region.node.inputs)})


def _ends(region: Region) -> Callable[[tuple], tuple]:
    return places.ends(region.node.attr("align"), _finder(region))


def _capacity(region: Region) -> Callable[[torch.Tensor], int]:
    return places.room(region.spec("offsets").shape[0], region.node.attr("align"))


def _permute(region: Region, kernel):
    (width, step), find, ends, count = _step(region), _finder(region), _ends(region), _capacity(region)
    numbers = "row_probs" in region.wanted

    def launch(*given):
        x, row_map, probs = find(given, "x"), find(given, "row_map"), find(given, "probs") if numbers else None
        total = count(row_map)
        made = {"rows": x.new_empty(total, width), "row_probs": probs.new_empty(total) if numbers else None}
        if x.shape[0]:
            targets = quantized.addresses((made["rows"], made["row_probs"]))
            kernel(rows(x, width, step), whole(row_map), *ends(given), whole(probs) if numbers else None, *targets)
        return _results(region, made)

    return launch


def _unpermute(region: Region, kernel):
    (width, step), find = _step(region), _finder(region)

    def launch(*given):
        x, row_map, probs = find(given, "rows"), find(given, "row_map"), find(given, "probs")
        y = x.new_empty(row_map.shape[0], width)
        if y.shape[0]:
            kernel(
                rows(x, width, step),
                whole(row_map),
                None if probs is None else whole(probs),
                None,
                *quantized.addresses((y, None)),
            )
        return y

    return launch


def _permute_bwd(region: Region, kernel):
    find, want = _finder(region), region.wanted
    if want == ["dprobs"]:
        return _picked(find, kernel)
    (width, step), numbers = _step(region), "dprobs" in want

    def launch(*given):
        drows, row_map, number = (
            find(given, "drows"),
            find(given, "row_map"),
            find(given, "drow_probs") if numbers else None,
        )
        made = {
            "dx": drows.new_empty(row_map.shape[0], width),
            "dprobs": number.new_empty(*row_map.shape) if numbers else None,
        }
        if row_map.shape[0]:
            targets = quantized.addresses((made["dx"], made["dprobs"]))
            kernel(rows(drows, width, step), whole(row_map), None, vector(number, 1) if numbers else None, *targets)
        return _results(region, made)

    return launch


def _picked(find: Callable, kernel):
    def launch(*given):
        row_map, numbers = find(given, "row_map"), find(given, "drow_probs")
        made = numbers.new_empty(*row_map.shape)
        if row_map.shape[0]:
            kernel(whole(row_map), vector(numbers, 1), *quantized.addresses((made,)))
        return made

    return launch


def _unpermute_bwd(region: Region, kernel):
    (width, step), find, ends, count, want = (
        _step(region),
        _finder(region),
        _ends(region),
        _capacity(region),
        region.wanted,
    )
    dots, spread = "dprobs" in want, "drows" in want

    def launch(*given):
        dy, row_map, probs = find(given, "dy"), find(given, "row_map"), find(given, "probs")
        made = {
            "drows": dy.new_empty(count(row_map), width) if spread else None,
            "dprobs": probs.new_empty(*row_map.shape) if dots else None,
        }
        if row_map.shape[0]:
            front = (
                rows(dy, width, step),
                whole(row_map),
                *(ends(given) if spread else (None, None)),
                None if probs is None else whole(probs),
            )
            if dots:
                kernel(
                    *front,
                    rows(find(given, "rows"), width, step),
                    *quantized.addresses((made["drows"], made["dprobs"])),
                )
            else:
                kernel(*front, *quantized.addresses((made["drows"], None)))
        return _results(region, made)

    return launch


# ---- slots by expert -------------------------------------------------------------------------------------------------


def _flat(t: torch.Tensor) -> torch.Tensor:
    """All elements in order, with stride 1."""
    return vector(t.reshape(-1), 1)


def _group(region: Region, count, place):
    experts, find = region.node.attr("num_experts"), _finder(region)

    def launch(*given):
        expert_map = find(given, "expert_map")
        slots, make = expert_map.numel(), expert_map.new_empty if expert_map.numel() else expert_map.new_zeros
        made = {"counts": make(experts), "offsets": make(experts), "row_map": make(*expert_map.shape)}
        if not slots:
            return _results(region, made)
        flat, blocks = _flat(expert_map), _blocks(slots, experts)
        held = expert_map.new_empty(blocks, experts) if blocks > 1 else None
        to_held, *targets = quantized.addresses((held, *made.values()))
        if held is not None:
            count(flat, 0, blocks, to_held)
        place(flat, to_held, blocks, *targets)
        return _results(region, made)

    return launch


def _tokens(region: Region, count, total):
    find, bins = _finder(region), _bins(region)
    shape = region.node.attr("sequences"), region.node.attr("num_experts")

    def launch(*given):
        expert_map, mask = find(given, "expert_map"), find(given, "padding_mask")
        slots = expert_map.numel()
        if not slots:
            return torch.zeros(shape, dtype=torch.float32, device=expert_map.device)
        tokens = torch.empty(shape, dtype=torch.float32, device=expert_map.device)
        mask = None if mask is None else vector(mask, 1)
        blocks = _blocks(slots, bins)
        held = expert_map.new_empty(blocks, bins)
        to_held, to = quantized.addresses((held, tokens))
        count(_flat(expert_map), 0 if mask is None else mask.data_ptr(), blocks, to_held)
        total(held, to)
        return tokens

    return launch


# ---- router ----------------------------------------------------------------------------------------------------------


def _router(region: Region, kernel):
    find, experts, topk = _finder(region), region.spec("logits").shape[1], region.node.attr("topk")

    def launch(*given):
        logits, bias = find(given, "logits"), find(given, "expert_bias")
        tokens = logits.shape[0]
        made = {
            "probs": logits.new_empty(tokens, topk),
            "expert_map": logits.new_empty(tokens, topk, dtype=torch.int32),
        }
        if tokens:
            kernel(
                rows(logits, experts, 1),
                None if bias is None else vector(bias, 1),
                *quantized.addresses(tuple(made.values())),
            )
        return _results(region, made)

    return launch


def _router_bwd(region: Region, kernel):
    find, experts = _finder(region), region.spec("logits").shape[1]

    def launch(*given):
        dprobs, logits, expert_map = (find(given, p) for p in ("dprobs", "logits", "expert_map"))
        made = logits.new_empty(*logits.shape)
        if logits.shape[0]:
            kernel(whole(dprobs), rows(logits, experts, 1), whole(expert_map), *quantized.addresses((made,)))
        return made

    return launch
