"""Device code of router and its gradient, as ``integration/graph/ops/router.py`` defines them: a warp for each token.

Lane l holds the logits of experts l, l + 32 and so on. Scores become unsigned integers in the same order, so that the
warp finds the largest and the lowest expert that has it with one instruction each. What is chosen moves to the first
lanes, which weigh it. Sums over lanes have one order in every run."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from ...common import device as d
from ...common import words as w
from ...common.row_tiles import put_if

WARPS = 4  # of a block
NOBODY = 1 << 20  # behind every expert
_LOG2_E = 1.4426950408889634
_LN_2, _LN_2_LOW = 0.693145751953125, 1.4286068203094172e-06  # the first times a small integer is exact
_LEAST = -104.0  # e^x is 0 in float32
_ROUNDS = 12582912.0  # 1.5 * 2^23, the bits 0x4B400000: added, it leaves an integer in the low bits


def exp(x):
    """e^x with a relative error of 2^-23.8, for x in [-104, 88] and NaN: 2^n times the Taylor series of degree 7 of the
    rest, which is at most ln 2 / 2. The GPU's own power of two is off by up to 2^-22, and sums of scores by as much."""
    shifted = d.fma(x, _LOG2_E, _ROUNDS)
    n = d.add(shifted, -_ROUNDS)
    rest = d.fma(n, -_LN_2_LOW, d.fma(n, -_LN_2, x))
    value = Float32(1.0 / 5040)
    for factorial in (720, 120, 24, 6, 2, 1, 1):
        value = d.fma(value, rest, 1.0 / factorial)
    power = Int32(w.bits_of(shifted)) - Int32(0x4B400000)
    half = power >> Int32(1)  # two powers of two, for results below the normal numbers
    return d.mul(d.mul(value, _power(half)), _power(power - half))


def _power(n):
    return w.float_of(Uint32((n + Int32(127)) << Int32(23)))


def sigmoid(x):
    """1 / (1 + e^-x), below x = -88 what it is there: 6e-39."""
    return d.div(1.0, d.add(1.0, exp(d.smallest(d.largest(d.mul(x, -1.0), _LEAST), 88.0))))


def ordered(score):
    """An Uint32 above 0 that grows with a float32 number; NaN is the largest, zeros are equal."""
    bits = w.bits_of(d.add(score, 0.0))
    key = d.select(Int32(bits) < 0, bits ^ Uint32(0xFFFFFFFF), bits | Uint32(0x80000000))
    return d.select(key == Uint32(0), Uint32(1), key)


class Tokens:
    """``experts`` logits of ``dtype`` for each token, ``topk`` of them chosen."""

    def __init__(self, dtype: str, experts: int, topk: int, score: str, scale: float | None) -> None:
        self.kind, self.experts, self.topk, self.score, self.scale = w.Packed(dtype), experts, topk, score, scale
        self.each = -(-experts // d.WARP)

    @staticmethod
    def blocks(tokens):
        return (tokens + (WARPS - 1)) // WARPS

    @staticmethod
    def place(tokens) -> tuple:
        """(token, whether it is there, lane, warp of the block)."""
        thread = cute.arch.thread_idx()[0]
        token = Int64(cute.arch.block_idx()[0]) * WARPS + thread // d.WARP
        return token, token < Int64(tokens), thread % d.WARP, thread // d.WARP

    def number(self, at, index, ok):
        """The float32 number ``index`` elements behind an address, 0 where not ``ok``."""
        return self.kind.floats([w.read_piece(at + Int64(index) * self.kind.itemsize, self.kind.itemsize, ok)])[0]

    def put(self, at, index, value, ok) -> None:
        w.write_piece(
            at + Int64(index) * self.kind.itemsize,
            self.kind.words([value] * self.kind.per_word)[0],
            self.kind.itemsize,
            ok,
        )

    def mine(self, lane) -> list:
        """(expert, whether there is one) of each of a lane's places."""
        return [
            (lane + i * d.WARP, True if (i + 1) * d.WARP <= self.experts else lane + i * d.WARP < self.experts)
            for i in range(self.each)
        ]

    def logits(self, row, lane, there) -> list:
        return [self.number(row, expert, there if ok is True else there & ok) for expert, ok in self.mine(lane)]

    def only(self, values: list, lane, otherwise: float) -> list:
        """Values of experts, ``otherwise`` at places without one."""
        return [
            v if ok is True else d.select(ok, v, Float32(otherwise))
            for v, (_, ok) in zip(values, self.mine(lane), strict=True)
        ]

    @staticmethod
    def over_lanes(value, combine):
        for offset in (16, 8, 4, 2, 1):
            value = combine(value, cute.arch.shuffle_sync_bfly(value, offset=offset))
        return value

    def powers(self, values: list) -> tuple:
        """(e^(v - the largest of all lanes) of each value, that largest)."""
        largest = values[0]
        for v in values[1:]:
            largest = d.largest(largest, v)
        largest = self.over_lanes(largest, d.largest)
        powers = [exp(d.largest(d.add(v, d.mul(largest, -1.0)), _LEAST)) for v in values]
        return powers, largest

    def whole_softmax(self, values: list, lane) -> tuple:
        """(numerators over a lane's places, largest value, denominator) of the softmax over all experts."""
        powers, largest = self.powers(self.only(values, lane, float("-inf")))
        powers = self.only(powers, lane, 0.0)
        total = powers[0]
        for p in powers[1:]:
            total = d.add(total, p)
        return powers, largest, self.over_lanes(total, d.add)

    def weights(self, x, held, largest, total) -> tuple:
        """(probability before scaling, score, what scores were divided by) of the logit of each of the first lanes;
        ``held``: whether this is one. ``largest`` and ``total`` are those of a softmax over all experts."""
        zero = Float32(0.0)
        if self.score == "sigmoid":
            s = d.select(held, sigmoid(x), zero)
            if self.topk == 1:
                return s, s, None
            total = d.add(self.over_lanes(s, d.add), 1e-20)
            return d.div(s, total), s, total
        if self.score == "pre_softmax":
            p = d.div(exp(d.largest(d.add(x, d.mul(largest, -1.0)), _LEAST)), total)
            p = d.select(held, p, zero)
            return p, p, None
        (power,), _ = self.powers([d.select(held, x, Float32(float("-inf")))])
        power = d.select(held, power, zero)
        p = d.div(power, self.over_lanes(power, d.add))
        return p, p, None


# ---- choice ----------------------------------------------------------------------------------------------------------


class Router(Tokens):
    def __init__(
        self,
        dtype: str,
        experts: int,
        topk: int,
        score: str,
        scale: float | None,
        groups: int,
        kept: int,
        bias: str | None,
    ) -> None:
        super().__init__(dtype, experts, topk, score, scale)
        self.groups, self.kept, self.bias = groups, kept, None if bias is None else w.Packed(bias)
        self.size = experts // groups if groups else experts
        self.best = topk // kept if groups else 0  # scores that count for a group

    @cute.jit
    def launch(self, mLogits: cute.Tensor, mBias: cute.Tensor | None, to_probs: Int64, to_experts: Int64, stream):
        kernel = self.kernel(mLogits, mBias, to_probs, to_experts)
        kernel.launch(grid=[self.blocks(mLogits.shape[0]), 1, 1], block=[WARPS * d.WARP, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, mLogits: cute.Tensor, mBias: cute.Tensor | None, to_probs: Int64, to_experts: Int64):
        table = None
        if cutlass.const_expr(self.groups > 0):
            layout = cute.make_ordered_layout((WARPS, self.experts), order=(1, 0))
            table = SmemAllocator().allocate_tensor(Float32, layout, byte_alignment=16)
        self.work(mLogits, mBias, to_probs, to_experts, table)

    def work(self, mLogits, mBias, to_probs, to_experts, table) -> None:
        token, there, lane, warp = self.place(mLogits.shape[0])
        row = w.address(mLogits) + token * (Int64(mLogits.stride[0]) * self.kind.itemsize)
        values = self.logits(row, lane, there)
        scores, largest, total = values, None, None
        if self.score == "pre_softmax":
            scores, largest, total = self.whole_softmax(values, lane)
        elif self.score == "sigmoid":
            scores = [sigmoid(v) for v in values]
            if self.bias is not None:
                scores = [
                    d.add(s, self.bias_of(mBias, expert, ok))
                    for s, (expert, ok) in zip(scores, self.mine(lane), strict=True)
                ]
        keys = [
            k if ok is True else d.select(ok, k, Uint32(0))
            for k, (_, ok) in zip(map(ordered, scores), self.mine(lane), strict=True)
        ]
        if self.groups:
            open_ = self.open_groups(scores, table[warp, None], lane)
            keys = [
                d.select(self.is_open(open_, expert), k, Uint32(0))
                for k, (expert, _) in zip(keys, self.mine(lane), strict=True)
            ]
        chosen = Int32(0)
        for slot in range(self.topk):
            expert, keys = self.take(keys, lane)
            chosen = d.select(lane == slot, expert, chosen)
        held = lane < self.topk
        p, _, _ = self.weights(self.number(row, chosen, there & held), held, largest, total)
        p = p if self.scale is None else d.mul(p, self.scale)
        place, ok = token * self.topk + lane, there & held
        self.put(to_probs, place, p, ok)
        w.write_words(to_experts + place * 4, [Uint32(chosen)], ok)

    def bias_of(self, mBias, expert, ok):
        size = self.bias.itemsize
        return self.bias.floats([w.read_piece(w.address(mBias) + Int64(expert) * size, size, ok)])[0]

    def take(self, keys: list, lane) -> tuple:
        """(the expert with the largest key, the lowest of equal ones; the keys without it)."""
        best = keys[0]
        for k in keys[1:]:
            best = d.select(best < k, k, best)
        best = cute.arch.warp_redux_sync(best, "umax")
        expert = Int32(NOBODY)
        for k, (mine, _) in reversed(list(zip(keys, self.mine(lane), strict=True))):
            expert = d.select(k == best, mine, expert)
        expert = cute.arch.warp_redux_sync(expert, "min")
        return expert, [
            d.select(mine == expert, Uint32(0), k) for k, (mine, _) in zip(keys, self.mine(lane), strict=True)
        ]

    # ---- groups

    def is_open(self, open_, expert):
        return (open_ >> Uint32(expert // self.size)) & Uint32(1) != Uint32(0)

    def open_groups(self, scores: list, table, lane):
        """The groups with the largest sums of their best scores, as bits."""
        for score, (expert, ok) in zip(scores, self.mine(lane), strict=True):
            put_if(ok, table, expert, score)
        cute.arch.sync_warp()
        total = self.sum_of_best(table, lane)
        key = d.select(lane < self.groups, ordered(total), Uint32(0))
        open_ = Uint32(0)
        for _ in range(self.kept):
            best = cute.arch.warp_redux_sync(key, "umax")
            group = cute.arch.warp_redux_sync(d.select(key == best, lane, Int32(NOBODY)), "min")
            open_ = open_ | (Uint32(1) << Uint32(group))
            key = d.select(lane == group, Uint32(0), key)
        return open_

    @cute.jit
    def sum_of_best(self, table, lane):
        """The sum of the largest scores of the lane's group, from the largest on. Lanes begin at different places of
        their groups, so that they read different banks."""
        best = d.fragment(Float32, self.best)
        best.fill(float("-inf"))
        group = cutlass.min(lane, Int32(self.groups - 1))
        for i in cutlass.range(self.size):
            self.sort_in(best, table[group * self.size + (i + lane) % self.size])
        return self.sum(best)

    def sort_in(self, best, score) -> None:
        for i in range(self.best):
            held = best[i]
            best[i] = d.largest(held, score)
            score = d.smallest(held, score)

    def sum(self, best):
        total = best[0]
        for i in range(1, self.best):
            total = d.add(total, best[i])
        return total


def router(
    arch: str,
    *,
    dtype: str,
    experts: int,
    topk: int,
    score: str,
    scale: float | None,
    groups: int,
    kept: int,
    bias: str | None,
):
    """A function (logits [tokens, experts] with any row stride, expert_bias [experts] of ``bias`` or None, addresses of
    probs and of expert_map). ``score``: "softmax", "pre_softmax" or "sigmoid"; ``groups`` 0 where there are none."""
    work = Router(dtype, experts, topk, score, scale, groups, kept, bias)
    given = d.fake_rows(dtype, cute.sym_int(), experts, 1), d.fake_vector(bias, experts)
    return cute.compile(work.launch, *given, Int64(0), Int64(0), d.fake_stream(), options=d.OPTIONS)


# ---- gradient --------------------------------------------------------------------------------------------------------


class Gradient(Tokens):
    def __init__(self, dtype: str, experts: int, topk: int, score: str, scale: float | None, grad: str) -> None:
        super().__init__(dtype, experts, topk, score, scale)
        self.grad = w.Packed(grad)

    @cute.jit
    def launch(self, mGrad: cute.Tensor, mLogits: cute.Tensor, mExperts: cute.Tensor, to: Int64, stream):
        kernel = self.kernel(mGrad, mLogits, mExperts, to)
        kernel.launch(grid=[self.blocks(mLogits.shape[0]), 1, 1], block=[WARPS * d.WARP, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, mGrad: cute.Tensor, mLogits: cute.Tensor, mExperts: cute.Tensor, to: Int64):
        layout = cute.make_ordered_layout((WARPS, self.experts), order=(1, 0))
        self.work(mGrad, mLogits, mExperts, to, SmemAllocator().allocate_tensor(Float32, layout, byte_alignment=16))

    def work(self, mGrad, mLogits, mExperts, to, table) -> None:
        token, there, lane, warp = self.place(mLogits.shape[0])
        row = w.address(mLogits) + token * (Int64(mLogits.stride[0]) * self.kind.itemsize)
        place, held, size = token * self.topk + lane, lane < self.topk, self.grad.itemsize
        expert = Int32(w.read_piece(w.address(mExperts) + place * 4, 4, there & held))
        dp = self.grad.floats([w.read_piece(w.address(mGrad) + place * size, size, there & held)])[0]
        dp = dp if self.scale is None else d.mul(dp, self.scale)
        powers, largest, total = None, None, None
        if self.score == "pre_softmax":
            powers, largest, total = self.whole_softmax(self.logits(row, lane, there), lane)
        p, s, shares = self.weights(self.number(row, expert, there & held), held, largest, total)
        inner = self.over_lanes(d.mul(dp, p), d.add)
        grad = dp if self.score == "pre_softmax" else self.chosen(dp, p, s, shares, inner)
        mine = table[warp, None]
        for e, ok in self.mine(lane):
            put_if(ok, mine, e, Float32(0.0))
        cute.arch.sync_warp()
        put_if(held & (expert >= 0) & (expert < self.experts), mine, expert, grad)
        cute.arch.sync_warp()
        at = to + token * (self.experts * self.kind.itemsize)
        for i, (e, ok) in enumerate(self.mine(lane)):
            value = mine[e if ok is True else cutlass.min(e, Int32(self.experts - 1))]
            if powers is not None:
                value = d.mul(d.div(powers[i], total), d.add(value, d.mul(inner, -1.0)))
            self.put(at, e, value, there if ok is True else there & ok)

    def chosen(self, dp, p, s, shares, inner):
        """The gradient of a chosen expert's logit."""
        if self.score == "softmax":
            return d.mul(p, d.add(dp, d.mul(inner, -1.0)))
        ds = dp if shares is None else d.div(d.add(dp, d.mul(inner, -1.0)), shares)
        return d.mul(d.mul(ds, s), d.add(1.0, d.mul(s, -1.0)))


def router_bwd(arch: str, *, dtype: str, experts: int, topk: int, score: str, scale: float | None, grad: str):
    """A function (dprobs [tokens, topk] of ``grad``, logits [tokens, experts] with any row stride, expert_map [tokens,
    topk], address of dlogits); other constants as ``router`` has them."""
    tokens, kinds = cute.sym_int(), (d.TYPES[grad], Int32)
    by_slot = [
        cute.runtime.make_fake_tensor(k, (tokens, topk), stride=(topk, 1), assumed_align=k.width // 8) for k in kinds
    ]
    given = by_slot[0], d.fake_rows(dtype, tokens, experts, 1), by_slot[1]
    return cute.compile(
        Gradient(dtype, experts, topk, score, scale, grad).launch, *given, Int64(0), d.fake_stream(), options=d.OPTIONS
    )
