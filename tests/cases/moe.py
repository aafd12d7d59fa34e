"""The catalogue's rows of a mixture of experts. Maps, groups and choices are made here once more, in plain Python.

T tokens, K slots, E experts, H width. Rows behind the last group are given as NaN: nothing may read them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from layerplan.integration import ops

from .op_case import OpCase, Tensors, randn


def draw_map(
    gen: torch.Generator, tokens: int, slots: int, experts: int, dropped: float = 0.0, skew: float = 0.0
) -> torch.Tensor:
    """int32 [T, K]: different experts in each token, a share of the slots -1. ``skew`` makes the first experts likelier."""
    weights = torch.exp(-skew * torch.arange(experts)).expand(tokens, experts)
    made = torch.multinomial(weights, slots, generator=gen) if tokens else torch.zeros(0, slots, dtype=torch.int64)
    return torch.where(torch.rand(tokens, slots, generator=gen) < dropped, -1, made).int()


def grouping(expert_map: torch.Tensor, experts: int, align: int = 1) -> tuple[list[int], list[int], list[list[int]]]:
    """(counts, padded ends, row of each slot)."""
    groups: list[list[tuple[int, int]]] = [[] for _ in range(experts)]
    for i, row in enumerate(expert_map.tolist()):
        for j, expert in enumerate(row):
            if expert >= 0:
                groups[expert].append((i, j))
    rows, ends, at = [[-1] * expert_map.shape[1] for _ in range(expert_map.shape[0])], [], 0
    for members in groups:
        for n, (i, j) in enumerate(members):
            rows[i][j] = at + n
        at += -(-len(members) // align) * align
        ends.append(at)
    return [len(g) for g in groups], ends, rows


def ints(values: Sequence, *shape: int, like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=like.device).view(*shape)


def _used(t: Tensors) -> int:
    return int(t["offsets"][-1])


def _with_tail(x: torch.Tensor, rows: int) -> torch.Tensor:
    """``x`` with NaN below it, ``rows`` rows in all."""
    return x if len(x) == rows else torch.cat((x, x.new_full((rows - len(x), *x.shape[1:]), float("nan"))))


# ---- permute, unpermute -----------------------------------------------------------------------------------------------


def plain_permute(t: Tensors, experts: int, align: int) -> tuple:
    x, expert_map = t["x"], t["expert_map"]
    counts, ends, row_map = grouping(expert_map, experts, align)
    source: list[tuple[int, int] | None] = [None] * ends[-1]
    for i, row in enumerate(row_map):
        for j, place in enumerate(row):
            if place >= 0:
                source[place] = (i, j)
    rows = torch.stack([x.new_zeros(x.shape[1]) if s is None else x[s[0]] for s in source]) if source else x[:0]
    made = [rows]
    if "probs" in t:
        probs = t["probs"]
        made.append(
            torch.stack([probs.new_zeros(()) if s is None else probs[s] for s in source])
            if source
            else probs.flatten()[:0]
        )
    found = [ints(counts, experts, like=x), ints(ends, experts, like=x), ints(row_map, *expert_map.shape, like=x)]
    return (*made, *(f.float() for f in found))


def _permute_case(tag: str, tokens: int, slots: int, experts: int, width: int, *, align: int = 1, probs: torch.dtype | None = None,
                  dropped: float = 0.0, skew: float = 0.0) -> OpCase:  # fmt: skip
    def make(gen, dtype):
        t = {"x": randn(gen, dtype, tokens, width), "expert_map": draw_map(gen, tokens, slots, experts, dropped, skew)}
        return t | ({"probs": torch.rand(tokens, slots, generator=gen, dtype=torch.float64).to(probs)} if probs else {})

    def ours(t, **kw):
        p = ops.permute(t["x"], t["expert_map"], num_experts=experts, probs=t.get("probs"), align=align, **kw)
        used = int(p.offsets[-1])
        assert p.rows.shape == (tokens * slots + experts * (align - 1), width) and p.row_map.shape == (tokens, slots)
        assert {v.dtype for v in (p.counts, p.offsets, p.row_map)} == {torch.int32}
        made = [p.rows[:used]] if p.probs is None else [p.rows[:used], p.probs[:used]]
        return (*made, *(v.float() for v in (p.counts, p.offsets, p.row_map)))

    return OpCase(
        f"permute-{tag}",
        "permute",
        make,
        ("x", *(("probs",) if probs else ())),
        ours,
        lambda t: plain_permute(t, experts, align),
    )


def plain_unpermute(t: Tensors) -> tuple:
    rows, row_map = t["rows"], t["row_map"].tolist()
    out = []
    for i, slots in enumerate(row_map):
        total = rows.new_zeros(rows.shape[1])
        for j, place in enumerate(slots):
            if place >= 0:
                total = total + (rows[place] if "probs" not in t else rows[place] * t["probs"][i, j])
        out.append(total.to(rows.dtype))
    return (torch.stack(out) if out else rows[:0],)


def _unpermute_case(tag: str, tokens: int, slots: int, experts: int, width: int, *, align: int = 1, probs: torch.dtype | None = None,
                    dropped: float = 0.0, skew: float = 0.0) -> OpCase:  # fmt: skip
    def make(gen, dtype):
        expert_map = draw_map(gen, tokens, slots, experts, dropped, skew)
        counts, ends, row_map = grouping(expert_map, experts, align)
        t = {"rows": randn(gen, dtype, ends[-1], width), "counts": ints(counts, experts, like=expert_map),
             "offsets": ints(ends, experts, like=expert_map), "row_map": ints(row_map, tokens, slots, like=expert_map)}  # fmt: skip
        return t | ({"probs": torch.rand(tokens, slots, generator=gen, dtype=torch.float64).to(probs)} if probs else {})

    def ours(t, **kw):
        rows = _with_tail(t["rows"], tokens * slots + experts * (align - 1))
        permuted = ops.Permuted(rows, None, t["counts"], t["offsets"], t["row_map"])
        return (ops.unpermute(rows, permuted, t.get("probs"), **kw),)

    return OpCase(
        f"unpermute-{tag}", "unpermute", make, ("rows", *(("probs",) if probs else ())), ours, plain_unpermute
    )


# ---- grouped_matmul ---------------------------------------------------------------------------------------------------


def plain_grouped(t: Tensors) -> tuple:
    ends = t["offsets"].tolist()
    return (torch.cat([t["x"][a:b] @ w.T for w, a, b in zip(t["w"], [0, *ends], ends, strict=False)]),)


def _grouped_case(tag: str, counts: Sequence[int], n: int, k: int, tail: int = 0, *, align: int = 1,
                  diff: tuple[str, ...] = ("x", "w")) -> OpCase:  # fmt: skip
    def make(gen, dtype):
        experts, used = len(counts), sum(counts)
        offsets = torch.tensor(counts).cumsum(0).int()
        return {"x": randn(gen, dtype, used, k), "w": randn(gen, dtype, experts, n, k) * k**-0.5, "offsets": offsets}

    def ours(t, **kw):
        x = _with_tail(t["x"], sum(counts) + tail)
        return (ops.grouped_matmul(x, t["w"], t["offsets"], align=align, **kw)[: sum(counts)],)

    return OpCase(f"grouped_matmul-{tag}", "grouped_matmul", make, diff, ours, plain_grouped)


# ---- router, losses ---------------------------------------------------------------------------------------------------


def _best(scores: Sequence[float], count: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]


def choose(scores: list[float], topk: int, groups: int | None = None, kept: int | None = None) -> list[int]:
    """The experts of one token."""
    if groups is None:
        return _best(scores, topk)
    size = len(scores) // groups
    parts = [scores[g * size : (g + 1) * size] for g in range(groups)]
    sums = [sum(sorted(p, reverse=True)[: topk // kept]) for p in parts]
    open_ = _best(sums, kept)
    return _best([s if i // size in open_ else float("-inf") for i, s in enumerate(scores)], topk)


def plain_router(t: Tensors, topk: int, score: str = "softmax", pre: bool = False, groups: int | None = None, kept: int | None = None,
                 scale: float | None = None) -> tuple:  # fmt: skip
    logits = t["logits"]
    h = logits if logits.dtype == torch.float64 else logits.float()
    scores = torch.sigmoid(h) if score == "sigmoid" else torch.softmax(h, -1) if pre else h
    biased = scores + t["expert_bias"] if "expert_bias" in t else scores
    experts = [choose(row, topk, groups, kept) for row in biased.tolist()]
    picked = torch.stack([s[e] for s, e in zip(scores, experts, strict=True)]) if experts else h[:, :topk]
    if score == "sigmoid" and topk > 1:
        picked = picked / (picked.sum(-1, keepdim=True) + 1e-20)
    elif score == "softmax" and not pre:
        picked = torch.softmax(picked, -1)
    found = torch.tensor(experts, dtype=torch.float32, device=h.device).view(-1, topk)
    return (picked if scale is None else picked * scale).to(logits.dtype), found


def _router_case(tag: str, tokens: int, experts: int, topk: int, *, score: str = "softmax", pre: bool = False, groups: int | None = None,
                 kept: int | None = None, scale: float | None = None, bias: bool = False) -> OpCase:  # fmt: skip
    def make(gen, dtype):
        t = {"logits": randn(gen, dtype, tokens, experts) * 2}
        return t | ({"expert_bias": randn(gen, torch.float32, experts) * 0.3} if bias else {})

    def ours(t, **kw):
        probs, found = ops.router(t["logits"], topk=topk, score_function=score, pre_softmax=pre, num_groups=groups, group_topk=kept,
                                  scaling_factor=scale, expert_bias=t.get("expert_bias"), **kw)  # fmt: skip
        assert found.dtype == torch.int32
        return probs, found.float()

    return OpCase(
        f"router-{tag}",
        "router",
        make,
        ("logits",),
        ours,
        lambda t: plain_router(t, topk, score, pre, groups, kept, scale),
    )


def plain_tokens(
    expert_map: torch.Tensor, experts: int, sequences: int = 1, padding: torch.Tensor | None = None
) -> torch.Tensor:
    made = torch.zeros(sequences, experts)
    for i, slots in enumerate(expert_map.tolist()):
        for expert in slots:
            if expert >= 0 and not (padding is not None and padding[i]):
                made[i % sequences, expert] += 1
    return made


def _tokens_case(
    tag: str, tokens: int, slots: int, experts: int, *, sequences: int = 1, padding: float = 0.0
) -> OpCase:
    def make(gen, dtype):
        t = {"expert_map": draw_map(gen, tokens, slots, experts, 0.2)}
        return t | ({"padding_mask": torch.rand(tokens, generator=gen) < padding} if padding else {})

    return OpCase(f"tokens_per_expert-{tag}", "tokens_per_expert", make, (),
                  lambda t, **kw: (ops.tokens_per_expert(t["expert_map"], num_experts=experts, sequences=sequences,
                                                         padding_mask=t.get("padding_mask"), **kw),),
                  lambda t: (plain_tokens(t["expert_map"], experts, sequences, t.get("padding_mask")),), (torch.float32,), exact=True)  # fmt: skip


def plain_balance(t: Tensors, topk: int, score: str = "softmax", coefficient: float = 1.0) -> tuple:
    logits, tokens = t["logits"], t["tokens_per_expert"]
    h = logits if logits.dtype == torch.float64 else logits.float()
    scores = torch.softmax(h, -1) if score == "softmax" else torch.sigmoid(h)
    if score == "sigmoid":
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    if "padding_mask" in t:
        scores = scores * ~t["padding_mask"].unsqueeze(-1)
    sequences, experts = tokens.shape
    whole = t["total_tokens"].squeeze() if "total_tokens" in t else tokens.sum() / (topk * sequences)
    if not whole:
        return ((scores.sum() * 0.0),)
    losses = [
        experts * ((tokens[b] / (topk * whole)) * (scores[b::sequences].sum(0) / whole)).sum() for b in range(sequences)
    ]
    return (coefficient * torch.stack(losses).mean().to(h.dtype),)


def _balance_case(tag: str, tokens: int, experts: int, topk: int, *, score: str = "softmax", sequences: int = 1, padding: float = 0.0,
                  total: bool = False) -> OpCase:  # fmt: skip
    def make(gen, dtype):
        t = {"logits": randn(gen, dtype, tokens, experts) * 2}
        if padding:
            t["padding_mask"] = torch.rand(tokens, generator=gen) < padding
        t["tokens_per_expert"] = plain_tokens(
            draw_map(gen, tokens, topk, experts, skew=0.2), experts, sequences, t.get("padding_mask")
        )
        return t | ({"total_tokens": torch.tensor([37.0])} if total else {})

    def ours(t, **kw):
        return (ops.load_balancing_loss(t["logits"], t["tokens_per_expert"], topk=topk, score_function=score, coefficient=0.3,
                                        total_tokens=t.get("total_tokens"), padding_mask=t.get("padding_mask"), **kw),)  # fmt: skip

    return OpCase(
        f"load_balancing_loss-{tag}",
        "load_balancing_loss",
        make,
        ("logits",),
        ours,
        lambda t: plain_balance(t, topk, score, 0.3),
    )


def plain_z(t: Tensors, coefficient: float) -> tuple:
    h = t["logits"] if t["logits"].dtype == torch.float64 else t["logits"].float()
    kept = h if "padding_mask" not in t else h[~t["padding_mask"]]
    return (coefficient * torch.logsumexp(kept, -1).square().sum() / max(len(kept), 1),)


def _z_case(tag: str, tokens: int, experts: int, *, padding: float = 0.0) -> OpCase:
    def make(gen, dtype):
        t = {"logits": randn(gen, dtype, tokens, experts) * 3}
        return t | ({"padding_mask": torch.rand(tokens, generator=gen) < padding} if padding else {})

    # the backward rebuilds exp(x - LSE)
    return OpCase(f"z_loss-{tag}", "z_loss", make, ("logits",),
                  lambda t, **kw: (ops.z_loss(t["logits"], coefficient=0.01, padding_mask=t.get("padding_mask"), **kw),),
                  lambda t: plain_z(t, 0.01), exponent=lambda t: float(torch.logsumexp(t["logits"].detach(), -1).abs().max()) if len(t["logits"]) else 0.0)  # fmt: skip


F32, BF16 = torch.float32, torch.bfloat16

CASES: tuple[OpCase, ...] = (
    _permute_case("plain", 7, 2, 4, 16),
    _permute_case("probs", 9, 3, 5, 13, probs=F32),
    _permute_case("dropped_aligned", 11, 2, 4, 8, align=4, probs=BF16, dropped=0.4, skew=1.0),
    _permute_case("one_slot", 6, 1, 3, 8, probs=F32, dropped=0.3),
    _permute_case("one_expert", 5, 1, 1, 8, align=8),
    _permute_case("one_token", 1, 2, 4, 8, align=2, probs=F32),
    _permute_case("all_dropped", 4, 2, 3, 8, align=4, probs=F32, dropped=1.0),
    _permute_case("no_tokens", 0, 2, 3, 8, align=4, probs=F32),
    _unpermute_case("plain", 7, 2, 4, 16),
    _unpermute_case("probs", 9, 3, 5, 13, probs=F32),
    _unpermute_case("dropped_aligned", 11, 2, 4, 8, align=4, probs=BF16, dropped=0.4, skew=1.0),
    _unpermute_case("one_slot", 6, 1, 3, 8, align=2, dropped=0.3),
    _unpermute_case("one_token", 1, 2, 4, 8, probs=F32),
    _unpermute_case("all_dropped", 4, 2, 3, 8, probs=F32, dropped=1.0),
    _unpermute_case("no_tokens", 0, 2, 3, 8, align=4, probs=F32),
    _grouped_case("plain", (5, 3, 9), 16, 24),
    _grouped_case("empty_and_tail", (0, 7, 0, 4, 0), 16, 8, tail=3),
    _grouped_case("odd", (2, 6), 7, 13),
    _grouped_case("one_expert", (5,), 8, 16),
    _grouped_case("all_empty", (0, 0, 0), 8, 16, tail=4),
    _grouped_case("no_rows", (0, 0), 8, 16),
    _grouped_case("aligned", (128, 0, 256), 64, 128, align=128),
    _grouped_case("aligned_no_rows", (0, 0), 64, 64, align=128),
    _router_case("softmax", 9, 6, 2),
    _router_case("pre_softmax_scaled", 9, 6, 3, pre=True, scale=2.5),
    _router_case("sigmoid_bias_groups", 11, 12, 4, score="sigmoid", bias=True, groups=4, kept=2, scale=1.5),
    _router_case("sigmoid_one", 7, 5, 1, score="sigmoid"),
    _router_case("softmax_groups", 8, 8, 2, groups=4, kept=2),
    _router_case("one_expert", 4, 1, 1),
    _router_case("no_tokens", 0, 6, 2),
    _tokens_case("plain", 13, 2, 5),
    _tokens_case("padded_sequences", 12, 3, 4, sequences=3, padding=0.3),
    _tokens_case("no_tokens", 0, 2, 5),
    _balance_case("plain", 9, 6, 2),
    _balance_case("padded", 14, 6, 2, padding=0.4),
    _balance_case("sequences_sigmoid", 12, 8, 3, score="sigmoid", sequences=3, padding=0.3),
    _balance_case("uneven_sequences", 11, 5, 2, sequences=3),
    _balance_case("given_total", 9, 6, 2, score="sigmoid", total=True),
    _balance_case("no_tokens", 0, 6, 2),
    _z_case("plain", 9, 6),
    _z_case("padded", 14, 5, padding=0.4),
    _z_case("all_padding", 4, 5, padding=1.1),
    _z_case("no_tokens", 0, 6),
)
LARGE: tuple[OpCase, ...] = (
    _permute_case("large", 517, 6, 64, 264, probs=F32),
    _permute_case("large_aligned", 301, 4, 16, 520, align=128, probs=F32, dropped=0.3, skew=0.3),
    _unpermute_case("large", 517, 6, 64, 264, probs=F32),
    _unpermute_case("large_aligned", 301, 4, 16, 520, align=128, dropped=0.3, skew=0.3),
    _grouped_case("large_unaligned", (64, 130, 70), 264, 136),
    _grouped_case("large_skewed", (0, 1, 900, 0, 3, 257, 0), 520, 264, tail=65),
    _grouped_case("large_many", tuple(37 * i % 50 for i in range(64)), 128, 256),
    _grouped_case("large_aligned", (0, 128, 640, 0, 0, 384, 256), 320, 192, tail=65, align=128),
    _grouped_case("large_aligned_frozen", (384, 0, 128, 768), 192, 320, align=128, diff=("x",)),
    _router_case("large", 517, 128, 8),
    _router_case("large_sigmoid", 517, 256, 8, score="sigmoid", bias=True, groups=8, kept=4, scale=2.5),
    _balance_case("large", 512, 64, 6, sequences=4, padding=0.1),
    _z_case("large", 517, 128, padding=0.1),
)
