"""Rotary embedding on our own kernels (sm80/): alone, and with what stands around it in attention. Forward: the split
of a fused QKV product, a norm over each head of queries and keys, the rotation, in one pass. Backward: the rotation's
inverse, the norms' gradients and the merge in one pass, and a small second kernel over the partial sums of the weights'
gradients, without atomics."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch

from ...integration.engines.arch import Arch
from ...integration.engines.contract import (
    BuildContext,
    CompiledRegion,
    Decline,
    Engine,
    Kernel,
    Offer,
    Pattern,
    Region,
)
from ...integration.graph.ir import ITEMSIZE, Dim, Node, TensorSpec
from ..common.knobs import given_knobs
from ..common.rows import dtype_reason
from . import config

_DEVICE = "layerplan.kernels.rope.sm80"
_SIDES = ("q", "k")
_NOT_OURS = "takes a norm, a split or a merge together with the rotations of queries and keys, and rotations alone"
_ALL = 2**31 - 1  # blocks: as many as tokens fill
_MOST_SPLITS = 65535  # blocks along the second axis of a grid


def _patterns() -> Iterator[Pattern]:
    """Both directions, with either norm or none, with the rotation or without."""
    for norm in ("rms_norm", "layer_norm", None):
        for turns in (True, False) if norm else (True,):
            yield _forward_pattern(norm, turns)
            for from_split in (True, False) if norm else (False,):
                yield _backward_pattern(norm, turns, from_split)


def _forward_pattern(norm: str | None, turns: bool) -> Pattern:
    ops, edges = ["qkv_split"], []
    for side in _SIDES:
        last = (0, side)
        for op in (*([norm] if norm else []), *(["rope"] if turns else [])):
            edges.append((*last, len(ops), "x"))
            last = (len(ops), "y")
            ops.append(op)
    return Pattern(tuple(ops), tuple(edges))


def _backward_pattern(norm: str | None, turns: bool, from_split: bool) -> Pattern:
    """``from_split``: the norms' inputs are views of the fused product, whose split belongs to the region, once for
    each."""
    ops, edges = ["qkv_merge"], []
    for side in _SIDES:
        into = (0, side)
        if norm:
            edges.append((len(ops), "dx", *into))
            into = (len(ops), "dy")
            ops.append(f"{norm}_bwd")
            if from_split:
                edges.append((len(ops), side, len(ops) - 1, "x"))
                ops.append("qkv_split")
        if turns:
            edges.append((len(ops), "y", *into))
            ops.append("rope")
    return Pattern(tuple(ops), tuple(edges))


class CuteRope(Engine):
    """x [*t, heads, head_dim], or a fused product [*t, (queries + 2 * keys) * head_dim], with one or two dims ``*t``; x
    float32, bfloat16 or float16, tables and weights each in any of these. Whole or partial rotation, half-split or
    interleaved, positions per token. What is read may have any strides (a copy where a vector access cannot read it);
    queries, keys and values are written contiguous, so that none of them keeps the product alive. Bitwise equal over
    reruns."""

    id = "rope/cute"
    patterns = tuple(_patterns())

    def match(self, region: Region, arch: Arch) -> Offer | Decline:
        work = _Work.of(region)
        if isinstance(work, str):
            return Decline(work)
        layer = work.norm is not None and work.norm.op.startswith("layer")
        chosen = config.knobs(work.span, work.queries, work.keys, layer=layer, backward=work.backward,
                              tables=work.tables, smem=arch.smem_kib * 1024, nbytes=work.nbytes)  # fmt: skip
        return self._offer(work, arch, chosen)

    def offer_with(self, region: Region, arch: Arch, knobs: tuple[tuple[str, object], ...]) -> Offer | Decline:
        work, chosen = _Work.of(region), given_knobs(config.Knobs, knobs)
        if isinstance(work, str):
            return Decline(work)
        if isinstance(chosen, str):
            return Decline(chosen)
        reason = config.refusal(
            chosen, work.span, work.queries, work.keys, backward=work.backward, smem=arch.smem_kib * 1024
        )
        return Decline(reason) if reason else self._offer(work, arch, chosen)

    def _offer(self, work: _Work, arch: Arch, chosen: config.Knobs) -> Offer | Decline:
        tile = config.Tile(work.span, work.queries, work.keys, chosen.threads, chosen.rounds)
        if tile.splits > _MOST_SPLITS:
            return Decline(f"{work.queries} heads: a grid has {_MOST_SPLITS} blocks for those of a token")
        narrow = {16: 1.0, 8: 0.9, 4: 0.6, 2: 0.3}[work.span.vector * work.span.itemsize]
        sums, share = len(work.sums), 0.75 if work.backward else 0.86 if work.norm is None else 0.82
        blocks = arch.sms * chosen.resident * tile.splits
        return Offer(
            efficiency=share * narrow, launches=2 if sums else 1,
            host_us=18 if work.backward else 15 if work.keys else 12,
            knobs=tuple(dataclasses.asdict(chosen).items()), ahead_of_time=True,
            workspace_bytes=4 * sums * blocks * work.span.head_dim,
        )  # fmt: skip

    def kernels(self, region: Region, arch: Arch, offer: Offer) -> tuple[Kernel, ...]:
        work = _Work.of(region)
        name = "norm_bwd:compile_norm_bwd" if work.backward else "turn:compile_turn"
        return (Kernel(f"{_DEVICE}.{name}", tuple((work.constants() | dict(offer.knobs)).items())),)

    def build(self, ctx: BuildContext) -> CompiledRegion:
        work = _Work.of(ctx.region)
        (kernel,) = self.kernels(ctx.region, ctx.arch, ctx.offer)
        knobs = config.Knobs(**dict(ctx.offer.knobs))
        function = ctx.compile(kernel)
        if work.backward:
            return CompiledRegion(_norm_bwd(work, function, knobs, ctx.arch.sms))
        most = ctx.arch.sms * knobs.resident if knobs.ahead else _ALL
        return CompiledRegion(_split(work, function, most) if work.split else _merge(work, function, most))


# ---- what a region asks for ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _Work:
    """A region's nodes by their part in it. ``ropes`` and ``norms``: of queries and of keys, both or none (alone: one
    rope); ``splits``: of the forward, one; of a norm's gradient, one for each input or none."""

    region: Region
    ropes: tuple[Node, ...]
    norms: tuple[Node, ...]
    splits: tuple[Node, ...]
    merge: Node | None

    @staticmethod
    def of(region: Region) -> _Work | str:
        """The parts, or why the kernels cannot take the region."""
        nodes, merge = region.nodes, next((n for n in region.nodes if n.op == "qkv_merge"), None)
        splits = tuple(n for n in nodes if n.op == "qkv_split")
        if merge is None and region.ops != ("rope",) and len(splits) != 1:
            return _NOT_OURS
        made = {v: n for n in nodes for _, v in n.outputs}
        ropes, norms = [], []
        for side in _SIDES if merge or splits else ():
            for node in _line(region, made, side, merge, splits):
                (ropes if node.op == "rope" else norms).append(node)
        if region.ops == ("rope",):
            ropes = list(nodes)
        if norms and merge:
            splits = tuple(made[n.input("x")] for n in norms if n.input("x") in made)
        found = _Work(region, tuple(ropes), tuple(norms), splits, merge)
        if len(ropes) + len(norms) + len(splits) + (merge is not None) != len(nodes) or not (ropes or norms):
            return _NOT_OURS
        return found._reason() or found

    # ---- facts --------------------------------------------------------------------------------------------------

    @property
    def split(self) -> bool:
        return bool(self.splits) and self.merge is None

    @property
    def backward(self) -> bool:
        """Whether the norms' gradients are in it."""
        return self.merge is not None and bool(self.norms)

    @property
    def norm(self) -> Node | None:
        return self.norms[0] if self.norms else None

    @property
    def x(self) -> TensorSpec:
        """Queries [*t, heads, head_dim]."""
        node, port = (self.splits[0], "q") if self.split else (self.merge, "q") if self.merge else (self.ropes[0], "x")
        return self.region.graph.specs[(node.output if self.split else node.input)(port)]

    @property
    def queries(self) -> int:
        return self.x.shape[-2]

    @property
    def keys(self) -> int:
        if self.split:
            return self.splits[0].attr("groups")
        return self.region.graph.specs[self.merge.input("k")].shape[-2] if self.merge else 0

    @property
    def half(self) -> int:
        return self.spec(self.ropes[0], "cos").shape[1] if self.ropes else 0

    @property
    def span(self) -> config.Span:
        return config.Span(self.x.shape[-1], self.half, ITEMSIZE[self.x.dtype])

    @property
    def nbytes(self) -> int:
        """Of all results."""
        return sum(self.region.graph.specs[v].nbytes() for v in self.region.graph.outputs)

    @property
    def tables(self) -> int:
        """Rows of the tables that a token needs."""
        return 0 if not self.ropes else 1 if self._positions()[1] in (None, "same") else 2

    @property
    def sums(self) -> list[tuple[str, Node]]:
        """(port, node) of the gradients of weights, then of biases, that something reads."""
        read = set(self.region.graph.outputs)
        ports = ("dweight", "dbias") if self.backward else ()
        return [(p, n) for p in ports for n in self.norms if n.output(p) in read]

    def spec(self, node: Node, port: str) -> TensorSpec | None:
        value = node.input(port) or node.output(port)
        return None if value is None else self.region.graph.specs[value]

    def _positions(self) -> list[str | None]:
        given = [n.input("positions") for n in self.ropes]
        dtypes = [None if v is None else self.region.graph.specs[v].dtype for v in given]
        if len(given) == 2 and given[0] == given[1] and given[0] is not None:
            dtypes[1] = "same"
        return (dtypes + [None, None])[:2]

    # ---- whether --------------------------------------------------------------------------------------------------

    def _reason(self) -> str | None:
        return self._dtypes_reason() or self._sizes_reason() or self._sides_reason() or self._borders_reason()

    def _dtypes_reason(self) -> str | None:
        tables = {p: self.spec(self.ropes[0], p) for p in ("cos", "sin")} if self.ropes else {}
        vectors = {
            f"{p} of {'qk'[i]}": self.spec(n, p)
            for i, n in enumerate(self.norms)
            for p in ("weight", "bias", "dweight", "dbias")
        }
        if reason := dtype_reason(x=self.x, **tables, **vectors):
            return reason
        if tables and tables["cos"].dtype != tables["sin"].dtype:
            return f"wants cos ({tables['cos'].dtype}) and sin ({tables['sin'].dtype}) of one dtype"
        data = {self.spec(n, p).dtype for n in self.norms if self.backward for p in ("dy", "x")} | {self.x.dtype}
        if len(data) > 1:
            return f"gradients and inputs of one dtype; they are {', '.join(sorted(data))}"
        return None

    def _sizes_reason(self) -> str | None:
        lead, (*_, heads, head) = self.x.rank - 2, self.x.shape
        if lead not in (1, 2):
            return f"takes tokens of one or two dims in front of the heads; x {self.x} has {lead}"
        if any(isinstance(n, Dim) for n in (heads, head, self.half)):
            return f"compiles for one number of heads and one head dim; of x {self.x} they are known only at run time"
        if head % 2 or head < 2:
            return f"a head dim of {head}: two vectors of one size make up what a thread turns, so it must be even"
        if 0 in (heads, head) or (self.ropes and self.half == 0):
            return "no heads, or no turned channels"
        if self.span.per_lane > config.MOST_UNITS:
            most = f"{config.MOST_UNITS} units for each of a warp's threads"
            return f"a head dim of {head} in vectors of {self.span.vector}: more than {most}"
        return None

    def _sides_reason(self) -> str | None:
        """Queries and keys must be treated alike."""
        sides = {
            "the rotations": [[n.input("cos"), n.input("sin"), *n.attrs, self._position_shape(n)] for n in self.ropes],
            "the norms": [[n.op, *((k, v) for k, v in n.attrs if k != "bias_dtype"),
                           n.input("weight") is None, n.input("bias") is None] for n in self.norms],
        }  # fmt: skip
        for what, both in sides.items():
            if len(both) == 2 and both[0] != both[1]:
                return f"{what} of queries and of keys differ in tables, attributes or which inputs they have"
        if any(n.input(p) is not None for n in self.norms for p in ("residual", "dresidual")):
            return "a residual in the norm of queries or keys"
        return None

    def _position_shape(self, rope: Node) -> tuple | None:
        spec = self.spec(rope, "positions")
        return None if spec is None else spec.shape

    def _borders_reason(self) -> str | None:
        """Only results leave, and what passes between the nodes stays inside."""
        read = set(self.region.graph.outputs)
        if self.split:
            for node in (*self.splits, *self.norms):
                inner = [p for p, v in node.outputs if v in read and (p in _SIDES or (p == "y" and self.ropes))]
                if inner:
                    return f"{inner[0]} of {node.op} is read by others too: it would be written as well"
        elif self.merge:
            inside = (*self.ropes, *self.norms, *self.splits)
            inner = [n.op for n in inside for p, v in n.outputs if p not in ("dweight", "dbias") and v in read]
            if inner:
                return f"a result of {inner[0]} is read by others too: it would be written as well"
            if self.splits and self.splits[0].input("x") != self.splits[-1].input("x"):
                return "queries and keys come from two products"
        return None

    # ---- the kernel -------------------------------------------------------------------------------------------------

    def constants(self) -> dict[str, object]:
        """What the code depends on, but for the knobs."""
        rope, norm, positions = (self.ropes or (None,))[0], self.norm, self._positions()
        shape = self._position_shape(rope) if rope else None
        lead = self.x.rank - 2
        given = {
            "head_dim": self.x.shape[-1], "half": self.half, "dtype": self.x.dtype,
            "queries": self.queries, "keys": self.keys, "lead": lead,
            "axis": rope.attr("seq_axis") if rope else 0, "table": self.spec(rope, "cos").dtype if rope else None,
            "interleaved": bool(rope and rope.attr("interleaved")), "inverse": bool(rope and rope.attr("inverse")),
            "positions": positions, "position_rank": 1 if shape is None else len(shape),
        }  # fmt: skip

        def dtypes(port: str) -> list[str | None]:
            read = set(self.region.graph.outputs)
            wanted = [n for n in self.norms if n.input(port) or n.output(port) in read]
            found = [self.spec(n, port).dtype if n in wanted else None for n in self.norms]
            return (found + [None, None])[:2]

        if self.backward:
            return given | {
                "from_fused": bool(self.splits), "op": norm.op.removesuffix("_bwd"),
                "zero_centered": norm.attr("zero_centered"), "weights": dtypes("weight"),
                "dweights": dtypes("dweight"), "dbiases": dtypes("dbias"),
            }  # fmt: skip
        read = set(self.region.graph.outputs)
        stats = [n.output(p) in read for p in ("rstd", "mean") for n in self.norms] if norm else []
        return given | {
            "split": self.split, "values": not self.split or self.splits[0].output("v") in read,
            "norm": [norm.op, norm.attr("eps"), norm.attr("zero_centered")] if norm else None,
            "weights": dtypes("weight"), "biases": dtypes("bias"), "stats": (stats + [False] * 4)[:4],
        }  # fmt: skip

    # ---- a launch's arguments ----------------------------------------------------------------------------------------

    def at(self, node: Node | None, port: str) -> int | None:
        """Which of the region's inputs a port reads."""
        value = None if node is None else node.input(port)
        return None if value is None else self.region.graph.inputs.index(value)

    def tables_of(self) -> Callable[[tuple, int], tuple]:
        """A function from the region's inputs and the tokens of a sequence to cos, sin and both positions as the kernel
        takes them."""
        rope = (self.ropes or (None,))[0]
        if rope is None:
            return lambda t, length: (None, None, None, None)
        ic, i_sin, ip = (self.at(rope, p) for p in ("cos", "sin", "positions"))
        ik = self.at(self.ropes[-1], "positions") if self._positions()[1] not in (None, "same") else None
        align = min(16, self.span.vector * ITEMSIZE[self.spec(rope, "cos").dtype])

        def make(t: tuple, length: int) -> tuple:
            cos, sin = t[ic], t[i_sin]
            if ip is None and cos.shape[0] < length:
                raise ValueError(
                    f"rope: cos and sin have {cos.shape[0]} rows: must be at least the {length} tokens of a sequence"
                )
            return (
                _dense(cos, align),
                _dense(sin, align),
                None if ip is None else t[ip],
                None if ik is None else t[ik],
            )

        return make


def _line(
    region: Region, made: dict[str, Node], side: str, merge: Node | None, splits: tuple[Node, ...]
) -> Iterator[Node]:
    """The norms and rotations of a side, from the split on or backwards from the merge."""
    if merge is not None:
        node = made.get(merge.input(side))
        while node is not None and node.op != "qkv_split":
            yield node
            node = made.get(node.input("x" if node.op == "rope" else "dy"))
        return
    value = splits[0].output(side)
    while (node := next((n for n in region.nodes if n.input("x") == value), None)) is not None:
        yield node
        value = node.output("y")


# ---- launches --------------------------------------------------------------------------------------------------------


def empty(like: torch.Tensor, shape: tuple, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A contiguous result on the device of ``like``, in its dtype unless another is named. Sizes one by one: as a tuple
    they cost 1 us more."""
    return like.new_empty(*shape) if dtype is None else like.new_empty(*shape, dtype=dtype)


def _dense(t: torch.Tensor, align: int) -> torch.Tensor:
    """``t`` contiguous at an address that is a multiple of ``align`` bytes; a copy where it is not."""
    return t if t.is_contiguous() and not t.data_ptr() % align else t.clone(memory_format=torch.contiguous_format)


def _reader(rank: int, work: _Work, near: bool = False) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function of tensors of ``rank`` dims that gives them with last stride 1, other strides that are multiples of
    the vector, an address that is a multiple of its bytes, and with ``near`` heads less than 2^31 elements apart; a
    copy where they have not. Written out by rank, since a loop over strides takes twice as long."""
    step, align = work.span.vector, work.span.vector * work.span.itemsize
    most = 2**31 if near else 2**63

    def copy(t):
        return t.clone(memory_format=torch.contiguous_format)

    def two(t):
        a, last = t.stride()
        return copy(t) if last != 1 or a % step or t.data_ptr() % align else t

    def three(t):
        a, b, last = t.stride()
        return copy(t) if last != 1 or (a | b) % step or b >= most or t.data_ptr() % align else t

    def four(t):
        a, b, c, last = t.stride()
        return copy(t) if last != 1 or (a | b | c) % step or c >= most or t.data_ptr() % align else t

    return {2: two, 3: three, 4: four}[rank]  # a vector is a power of two: the bits of the strides tell


def _returned(work: _Work, names: list[str | None]):
    """A function from all results, by ``names``, to what ``launch`` returns of them."""
    order = [names.index(v) for v in work.region.graph.outputs]
    if len(order) == 1:
        (only,) = order
        return lambda made: made[only]
    return lambda made: tuple([made[i] for i in order])


def _split(work: _Work, kernel, most: int):
    """Out of the fused product: queries, keys and values, with norms and rotations on the way."""
    (split,), tables, lead = work.splits, work.tables_of(), work.x.rank - 2
    ix, axis, head = work.at(split, "x"), work.ropes[0].attr("seq_axis") if work.ropes else 0, work.x.shape[-1]
    queries, keys, layer = work.queries, work.keys, work.norm is not None and work.norm.op == "layer_norm"
    last = work.ropes or work.norms
    names = [n.output("y") for n in last] + [split.output("v")]
    kept = [n.output(p) if p == "rstd" or layer else None for p in ("rstd", "mean") for n in work.norms] or [None] * 4
    read = set(work.region.graph.outputs)
    wants_v, kept = names[2] in read, [v if v in read else None for v in kept]
    vectors = [work.at(n, p) for p in ("weight", "bias") for n in work.norms] or [None] * 4
    heads = [None if v is None else n for v, n in zip(kept, (queries, keys) * 2, strict=True)]  # whose statistics
    readable, returned, f32 = _reader(lead + 1, work), _returned(work, [*names, *kept]), torch.float32

    def launch(*t):
        x = t[ix]
        shape = x.shape[:lead]
        q, k = empty(x, (*shape, queries, head)), empty(x, (*shape, keys, head))
        v = empty(x, (*shape, keys, head)) if wants_v else None
        stats = [None if n is None else empty(x, (*shape, n, 1), f32) for n in heads]
        if q.numel():
            weights = [None if i is None else _dense(t[i], 16) for i in vectors]
            kernel(readable(x), q, k, v, *tables(t, shape[axis]), *weights, *stats, most)
        return returned((q, k, v, *stats))

    return launch


def _merge(work: _Work, kernel, most: int):
    """A rotation alone, or the rotations of queries and keys and the way into the fused product."""
    tables, lead, merge = work.tables_of(), work.x.rank - 2, work.merge
    axis, keys = work.ropes[0].attr("seq_axis"), work.keys
    sources = [work.at(n, "x") for n in work.ropes] + ([work.at(merge, "v")] if merge else [])
    width, absent = (work.queries + 2 * keys) * work.x.shape[-1], [None] * (3 - len(sources))
    readable, vectors = _reader(lead + 2, work), [None] * 8

    def launch(*t):
        q = t[sources[0]]
        fused = empty(q, (*q.shape[:lead], width) if keys else q.shape)
        if fused.numel():
            parts = [readable(t[i]) for i in sources]
            kernel(fused, *parts, *absent, *tables(t, q.shape[axis]), *vectors, most)
        return fused

    return launch


def _norm_bwd(work: _Work, kernel, knobs: config.Knobs, sms: int):
    """The gradients of rotations and norms, and the way into the fused product."""
    tables, lead, norms = work.tables_of(), work.x.rank - 2, work.norms
    axis, head, sums = work.ropes[0].attr("seq_axis") if work.ropes else 0, work.x.shape[-1], work.sums
    tile = config.Tile(work.span, work.queries, work.keys, knobs.threads, knobs.rounds)
    starts, width = work.ropes or norms, (work.queries + 2 * work.keys) * head
    sources = [work.at(n, "x" if work.ropes else "dy") for n in starts] + [work.at(work.merge, "v")]
    part, whole = _reader(lead + 2, work, near=True), _reader(lead + 1, work)
    ix, ixs = (work.at(work.splits[0], "x"), ()) if work.splits else (None, [work.at(n, "x") for n in norms])
    vectors = [(work.at(n, "weight"), 16) for n in norms]
    vectors += [(work.at(n, p), 4) for p in ("rstd", "mean") for n in norms]
    order = [(p, n) for p in ("dweight", "dbias") for n in norms]
    kinds = [
        getattr(torch, work.spec(n, p).dtype) if any(p == q and n is m for q, m in sums) else None for p, n in order
    ]
    returned = _returned(work, [work.merge.output("x"), *(n.output(p) for p, n in order)])
    most, count, splits, each = sms * knobs.resident, len(sums), tile.splits, tile.tokens

    def launch(*t):
        q = t[sources[0]]
        shape = q.shape[:lead]
        tokens = shape.numel()
        fused = empty(q, (*shape, width))
        made = [
            None if kind is None else empty(q, (head,), kind) if tokens else q.new_zeros(head, dtype=kind)
            for kind in kinds
        ]
        if tokens:
            blocks = min(most, -(-tokens // each))
            xs = (None, *[part(t[i]) for i in ixs]) if ix is None else (whole(t[ix]), None, None)
            kernel(
                fused, *[part(t[i]) for i in sources], *xs, *tables(t, shape[axis]),
                *[None if i is None else _dense(t[i], align) for i, align in vectors],
                empty(q, (count, blocks * splits, head), torch.float32) if count else None, *made, blocks,
            )  # fmt: skip
        return returned((fused, *made))

    return launch
