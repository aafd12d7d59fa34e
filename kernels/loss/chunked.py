"""Linear and cross entropy over chunks of tokens, so that there is never more than one chunk of logits (two in the
backward: the logits and their gradient).

The products are cuBLAS's, cross entropy of a chunk is another engine of the manifest's. Forward is one product,
backward three: it makes the logits of a chunk again, since their gradient is a row's scale times what only they give.
Each weight gradient of a chunk is added to one float32 sum.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import torch

from ...integration.engines.arch import Arch
from ...integration.engines.contract import BuildContext, CompiledRegion, Decline, Engine, Kernel, Offer, Region
from ...integration.engines.manifest import BY_ID, CHUNK_BYTES, MANIFEST, Entry
from ...integration.graph.ir import ITEMSIZE, Dim, GraphBuilder, TensorSpec
from ...integration.graph.ops.table import as_rows, size_product

_LEAST, _MOST = 128, 8192  # tokens of a chunk that is chosen here
# chunks are cut in equal parts: with this many tokens none is of one row, for which kernels are compiled apart
_LEAST_PINNED = 16


class ChunkedLinearCrossEntropy(Engine):
    """Knobs: ``chunk``, the most tokens whose logits exist at once, and ``loss``, the id of the engine for cross
    entropy."""

    id = "loss/chunked"
    not_ahead = "cuBLAS holds compiled products, and the engine of its cross entropy compiles at its first launch"

    def match(self, region: Region, arch: Arch) -> Offer | Decline:
        chunk = self._chunk(region)
        entries = [e for e in MANIFEST if "cross_entropy" in e.ops and not e.trial]
        if not arch.is_gpu:
            entries.append(BY_ID["reference/eager"])
        answers = {e.id: _ask(e, region, chunk, arch) for e in entries}
        offers = {name: a for name, a in answers.items() if isinstance(a, Offer)}
        if not offers:
            return Decline("; ".join(f"{name} for the logits of a chunk: {a.reason}" for name, a in answers.items()))
        part = _part(region, chunk)
        best = min(offers, key=lambda name: part.predicted_seconds(offers[name], arch))
        return self.offer_with(region, arch, (("chunk", chunk), ("loss", best)))

    def offer_with(self, region: Region, arch: Arch, knobs: tuple) -> Offer | Decline:
        given = dict(knobs)
        chunk, loss = given.get("chunk"), given.get("loss")
        if set(given) != {"chunk", "loss"} or type(chunk) is not int or chunk < _LEAST_PINNED:
            return Decline(
                f"its knobs are chunk, at least {_LEAST_PINNED} tokens, and loss, an engine's id; not {given}"
            )
        entry = BY_ID.get(loss)
        if entry is None or not (entry.is_reference or "cross_entropy" in entry.ops):
            return Decline(f"loss = {loss!r} has no code for cross_entropy")
        inner = _ask(entry, region, chunk, arch)
        if isinstance(inner, Decline):
            return Decline(f"{loss} for the logits of a chunk: {inner.reason}")
        backward = region.node.op == "linear_cross_entropy_bwd"
        rows, classes = size_product(region.spec("targets").shape), size_product(region.spec("weight").shape[:1])
        itemsize = ITEMSIZE[region.spec("x").dtype]
        parts = -(-rows // chunk)
        workspace = min(rows, chunk) * classes * itemsize * (2 if backward else 1)
        if backward and parts > 1 and "dweight" in region.wanted and region.spec("accumulate") is None:
            workspace += region.spec("weight").numel() * max(4, itemsize)
        return dataclasses.replace(
            inner,
            efficiency=0.6 if arch.is_gpu else 0.5,
            launches=parts * (inner.launches + (3 if backward else 1)),
            host_us=parts * (inner.host_us + 12 * (3 if backward else 1)),
            workspace_bytes=workspace,
            knobs=(("chunk", chunk), ("loss", loss)),
            ahead_of_time=False,
        )

    @staticmethod
    def _chunk(region: Region) -> int:
        """The largest power of two of tokens whose logits take at most ``CHUNK_BYTES``, but not more than there are."""
        rows = size_product(region.spec("targets").shape)
        row = size_product(region.spec("weight").shape[:1]) * ITEMSIZE[region.spec("x").dtype]
        fits = 1 << max((CHUNK_BYTES // max(row, 1)).bit_length() - 1, 0)
        return max(min(max(min(fits, _MOST), _LEAST), rows), _LEAST_PINNED)

    def kernels(self, region: Region, arch: Arch, offer: Offer) -> tuple[Kernel, ...]:
        engine, part = self._loss(BuildContext(region, arch, offer))
        return engine.kernels(part.region, arch, part.offer)

    def ahead_variables(self, ctx: BuildContext, folder: str) -> dict[str, str] | None:
        engine, part = self._loss(ctx)
        return engine.ahead_variables(part, folder)

    def compile_ahead(self, ctx: BuildContext) -> None:
        engine, part = self._loss(ctx)
        engine.compile_ahead(part)

    @staticmethod
    def _loss(ctx: BuildContext) -> tuple[Engine, BuildContext]:
        """The engine for the cross entropy of a chunk, and what it builds."""
        knobs = dict(ctx.offer.knobs)
        engine, part = BY_ID[knobs["loss"]].load(), _part(ctx.region, knobs["chunk"])
        return engine, BuildContext(part, ctx.arch, engine.match(part, ctx.arch), ctx.compile)

    def build(self, ctx: BuildContext) -> CompiledRegion:
        region, knobs = ctx.region, dict(ctx.offer.knobs)
        kernel = _kernel(*self._loss(ctx))
        make = _backward if region.node.op == "linear_cross_entropy_bwd" else _forward
        return CompiledRegion(region.by_port(make(region, knobs["chunk"], kernel, ctx.arch)))


_kernels: dict[tuple[str, str, str], Callable] = {}


def _kernel(engine: Engine, part: BuildContext) -> Callable:
    """The launch function of an engine for a chunk; built once for the regions that share it, in training and in
    evaluation, and with and without accumulation."""
    key = (part.region.key(), engine.id, part.arch.name)
    if key not in _kernels:
        _kernels[key] = engine.build(part).launch
    return _kernels[key]


def _part(region: Region, chunk: int) -> Region:
    """Cross entropy, or its gradient, of one chunk's logits: [rows, classes] in the dtype of x."""
    node, x, targets = region.node, region.spec("x"), region.spec("targets")
    total = size_product(targets.shape)
    rows = 1 if total == 1 else Dim("rows", max(min(total, chunk), 2))
    statistic = TensorSpec((rows,), "float64" if x.dtype == "float64" else "float32")
    specs = {
        "logits": TensorSpec((rows, region.spec("weight").shape[0]), x.dtype),
        "targets": TensorSpec((rows,), targets.dtype),
    }
    if node.op == "linear_cross_entropy_bwd":
        specs = {"dloss": statistic, **specs, "lse": statistic}
    b = GraphBuilder()
    values = {port: b.input(port, spec) for port, spec in specs.items()}
    backward = "lse" in specs
    made = b.op(
        "cross_entropy_bwd" if backward else "cross_entropy",
        want=("dlogits",) if backward else ("loss", "lse"),
        ignore_index=node.attr("ignore_index"),
        **values,
    )
    return Region(b.build([made] if backward else made))


def _ask(entry: Entry, region: Region, chunk: int, arch: Arch) -> Offer | Decline:
    if arch.name not in entry.archs:
        return Decline(f"has no code for {arch.name}")
    unusable = entry.unusable()
    return Decline(unusable) if unusable else entry.load().match(_part(region, chunk), arch)


def _cuts(rows: int, chunk: int) -> Iterator[slice]:
    """At most ``chunk`` rows each, and as equal as can be: a last chunk of a few rows would be a slow product."""
    parts = -(-rows // chunk)
    ends = [rows * i // parts for i in range(parts + 1)] if parts else [0]
    return (slice(a, b) for a, b in itertools.pairwise(ends))


def _forward(region: Region, chunk: int, kernel, arch: Arch):
    want = region.wanted
    dtype = getattr(torch, region.spec("loss").dtype)

    def launch(x, weight, targets):
        rows, flat, across = as_rows(x), targets.reshape(-1), weight.t()
        out = {port: x.new_empty(rows.shape[0], dtype=dtype) for port in ("loss", "lse")}
        logits = x.new_empty(min(chunk, rows.shape[0]), weight.shape[0])
        for cut in _cuts(rows.shape[0], chunk):
            part = torch.mm(rows[cut], across, out=logits[: cut.stop - cut.start])
            out["loss"][cut], out["lse"][cut] = kernel(part, flat[cut])
        made = tuple(out[port].view(targets.shape) for port in want)
        return made[0] if len(made) == 1 else made

    return launch


def _backward(region: Region, chunk: int, kernel, arch: Arch):
    want = region.wanted

    def launch(x, weight, targets, dloss, lse, accumulate=None):
        rows, across = as_rows(x), weight.t()
        scale, flat, level = dloss.reshape(-1), targets.reshape(-1), lse.reshape(-1)
        dx = torch.empty_like(rows, memory_format=torch.contiguous_format) if "dx" in want else None
        total = accumulate
        if total is None and "dweight" in want and rows.shape[0] > chunk:
            total = torch.zeros(weight.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        once = None
        logits = x.new_empty(min(chunk, rows.shape[0]), weight.shape[0])
        for cut in _cuts(rows.shape[0], chunk):
            part = torch.mm(rows[cut], across, out=logits[: cut.stop - cut.start])
            dlogits = kernel(scale[cut], part, flat[cut], level[cut])
            if dx is not None:
                torch.mm(dlogits, weight, out=dx[cut])
            if total is not None:
                _add_product(total, dlogits, rows[cut], arch)
            elif "dweight" in want:
                once = torch.mm(dlogits.t(), rows[cut])
            del dlogits  # before the next chunk's is made
        made = {"dx": None if dx is None else dx.view(x.shape)}
        if "dweight" in want:
            if total is None:
                total = torch.zeros_like(weight, memory_format=torch.contiguous_format) if once is None else once
            made["dweight"] = total if accumulate is not None else total.to(weight.dtype)
        return made[want[0]] if len(want) == 1 else tuple(made[port] for port in want)

    return launch


def _add_product(total: torch.Tensor, dlogits: torch.Tensor, x: torch.Tensor, arch: Arch) -> None:
    """total [classes, hidden] += dlogits [rows, classes].T @ x [rows, hidden]; float32 or wider, whatever the operands
    are."""
    if total.dtype == x.dtype:
        total.addmm_(dlogits.t(), x)
    elif arch.is_gpu and x.dtype.itemsize == 2:  # cuBLAS adds in its epilogue; the CPU has no such product
        torch.ops.aten.addmm.dtype_out(total, dlogits.t(), x, torch.float32, out=total)
    else:
        wide = torch.promote_types(total.dtype, x.dtype)
        total.add_(dlogits.to(wide).t() @ x.to(wide))
