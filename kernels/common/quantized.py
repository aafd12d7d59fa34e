"""Host side of kernels that end in quantize: what they are compiled for, and the tensors that they fill.

Kernels are given the addresses of their outputs, which are made here and hold whole rows: data, scale_inv, data_t,
scale_inv_t, amax, and of a workspace, 0 for one that is not made."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ...integration.graph.ir import Graph, Node, TensorSpec
from ...integration.graph.ops.quantize import BLOCK, MX, TENSOR
from ...integration.graph.ops.table import size_product
from .knobs import names_reason

KINDS = {TENSOR: "tensor", BLOCK: "block", MX: "mx"}
EDGE = 8  # values of a row that lie together in the kernels
PORTS = ("data", "scale_inv", "data_t", "scale_inv_t", "amax")
_MOST_ROWS = 1 << 31
_STREAMED = 32 << 20  # bytes
_TILE = 128  # rows and values of a row
APART_HOST_US = 4  # of one more kernel and its workspace, as between a norm and its backward of two kernels
APART_ONLY = "scales go through a workspace where blocks are 1 x 128 and a transposed copy is made"

Made = tuple[torch.Tensor | None, ...]


def size_reason(rows: tuple, width: Any, x: Any) -> str | None:
    """Why the kernels cannot take rows of ``width`` values with leading dims ``rows``, None where they can."""
    if not isinstance(width, int):
        return f"compiles for one row width, and that of x {x} is known only at run time"
    if width == 0:
        return "rows of no elements"
    return f"{size_product(rows)} rows: counts fewer than 2^31" if size_product(rows) >= _MOST_ROWS else None


def wanted(graph: Graph, node: Node) -> tuple[str, ...]:
    """Output ports of a region's last node that are outputs of the region, in the order in which it has them."""
    port = {v: p for p, v in node.outputs}
    return tuple(port[v] for v in graph.outputs if v in port)


def transposes(want: tuple[str, ...]) -> bool:
    return bool({"data_t", "scale_inv_t"} & set(want))


def streamed(data: TensorSpec) -> bool:
    """Whether a result is so large that who reads it will find little of it in L2."""
    return data.nbytes() >= _STREAMED


def can_lie_apart(node: Node, want: tuple[str, ...]) -> bool:
    """Whether a quantize has the knob ``apart`` (see ``knobs``)."""
    return tuple(node.attr("block")) == BLOCK and transposes(want)


def knobs(node: Node, want: tuple[str, ...], data: TensorSpec) -> dict[str, tuple[Any, ...]]:
    """Knob of a quantize with outputs ``want`` -> the values that it can take, the default first: ``down``: tiles column
    by column; ``streaming``: data leaves L2 first; where ``can_lie_apart``, ``apart``: a tile's scales, which in their
    places are 4 bytes in a sector of 32 each and keep L2 busy, go to a workspace in whole sectors, and a second kernel
    moves them (H200, 16384x4096 bfloat16: 76 us instead of 82)."""
    large, made = streamed(data), {"down": (False, True), "streaming": (False, True)}
    return made | {"apart": (large, not large)} if can_lie_apart(node, want) else made


def defaults(choices: dict[str, tuple[Any, ...]]) -> tuple[tuple[str, Any], ...]:
    return tuple((name, values[0]) for name, values in choices.items())


def knob_reason(given: tuple[tuple[str, Any], ...], choices: dict[str, tuple[Any, ...]]) -> str | None:
    """Why these knobs cannot be run with, None where they can."""
    if "apart" not in choices and (apart := dict(given).get("apart")) is not None:
        return f"knob apart = {apart}: {APART_ONLY}"
    if (reason := names_reason(dict(given), choices, choices)) is not None:
        return reason
    bad = next((name for name, value in given if value not in choices[name]), None)
    return None if bad is None else f"knob {bad} = {dict(given)[bad]}: is one of {', '.join(map(str, choices[bad]))}"


def constants(node: Node, want: tuple[str, ...], width: int) -> dict[str, Any]:
    """What a quantize makes of the kernel that ends in it."""
    return {
        "width": width,
        "vector": width % EDGE == 0,
        "kind": KINDS[tuple(node.attr("block"))],
        "dtype": node.attr("dtype"),
        "power_of_two": node.attr("power_of_two"),
        "swizzled": node.attr("layout") == "swizzled",
        "transposed": transposes(want),
        "amax": "amax" in want,
    }


def workspace_bytes(rows: int, width: int) -> int:
    """Of the scales of all tiles both ways, with the knob ``apart``."""
    return -(-rows // _TILE) * -(-width // _TILE) * (2 * 4 * _TILE)


def maker(
    node: Node, want: tuple[str, ...], width: int, apart: bool = False
) -> Callable[[torch.Tensor, tuple[int, ...]], Made]:
    """``make(like, lead)``: the outputs of a quantize of [*lead, width] values on the device of ``like``, not filled
    but for amax, and the workspace of the knob ``apart``, None where one is not made."""
    block, dtype = tuple(node.attr("block")), getattr(torch, node.attr("dtype"))
    swizzled, whole = node.attr("layout") == "swizzled", block == TENSOR
    scales = torch.float8_e8m0fnu if block == MX else torch.float32
    transposed, amax = transposes(want), "amax" in want
    size = 1 if whole else block[1]
    across, padded = -(-width // size), -(-width // 128) * 128

    def make(like: torch.Tensor, lead: tuple[int, ...]) -> Made:
        rows, new = math.prod(lead), like.new_empty
        data = new(*lead, width, dtype=dtype)  # sizes one by one: as a tuple they cost 1 us more
        if whole:
            inverse = new(1, dtype=scales)
        elif swizzled:
            inverse = new(-(-rows // 128) * 128, -(-across // 4) * 4, dtype=scales)
        else:
            inverse = new(*lead, across, dtype=scales)
        data_t = inverse_t = None
        if transposed:
            data_t = new(width, rows, dtype=dtype)
            down = -(-rows // size)
            if not whole:
                inverse_t = new(*((padded, -(-down // 4) * 4) if swizzled else (width, down)), dtype=scales)
        largest = like.new_zeros(1, dtype=torch.float32) if amax else None
        workspace = new(workspace_bytes(rows, width) // 4, dtype=torch.float32) if apart else None
        return data, inverse, data_t, inverse_t, largest, workspace

    return make


def fill_empty(made: Made, scale: torch.Tensor | None) -> None:
    """What no kernel is launched for, since there is no value: the inverse of a given scale."""
    if scale is not None:
        torch.div(torch.ones_like(scale), scale, out=made[1])


def addresses(made: Made) -> list[int]:
    """What kernels are given of tensors that hold whole rows: 0 for one that is not made."""
    return [0 if t is None else t.data_ptr() for t in made]


def chosen(want: tuple[str, ...]) -> Callable[[Made], Any]:
    """What a launch returns of its outputs: one tensor, or a tuple."""
    order = [PORTS.index(p) for p in want]
    if len(order) == 1:
        (only,) = order
        return lambda made: made[only]
    return lambda made: tuple([made[i] for i in order])
