"""The router of a mixture of experts: top-k experts and their probabilities, and the losses that keep it in balance.

Semantics are those of Megatron-Core 0.19.2 (moe_utils.py, router.py), in float32 or the logits' dtype where that is
wider. logits [t, e] -> probs [t, topk] in the logits' dtype, expert_map [t, topk] int32, best expert first:

    softmax                 p = softmax over the chosen logits; the choice is by logits
    softmax, pre_softmax    p = softmax over all logits, of the chosen ones; not normalised again
    sigmoid                 s = sigmoid(logits), chosen by s + expert_bias; p = s / (sum of the chosen s + 1e-20), for
                            topk = 1 p = s

times scaling_factor. With ``num_groups`` the experts form that many equal groups; ``group_topk`` of them are kept,
those with the largest sums of their topk // group_topk best scores, and the choice is among their experts. The bias
takes part in the choice of groups and experts and in nothing else. Equal scores: the lowest index goes first, where
torch.topk promises no order.

The losses go by scores over all experts, S = softmax(logits) or sigmoid(logits) / (its sum + 1e-20), without bias and
groups:

    load_balancing_loss = coefficient / B * sum over sequences b and experts i of C[b, i] * P[b, i] * e / (topk * T^2)
    z_loss              = coefficient * mean over tokens of logsumexp(logits)^2

C = ``tokens_per_expert`` [B, e], how many tokens chose each expert (over all ranks that share the loss), P the sum of S
over this rank's tokens of the sequence, T = ``total_tokens`` of one sequence over the same ranks, sum(C) / (topk * B)
where it is not given. Tokens lie as [length, B], so token i is of sequence i % B; B = 1 makes one loss of the whole
batch. Tokens that ``padding_mask`` [t] (True: padding) hides count nowhere. Without any token a loss is 0 and passes no
gradient.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..ir import TensorSpec
from .moe import check_padding
from .table import REQUIRED, Op, acc, acc_dtype, boolean, demand, finite, ports

SCORES = ("softmax", "sigmoid")
_TINY = 1e-20


def _logits(op: str, logits: TensorSpec) -> int:
    """Checks the logits; returns the number of experts."""
    ok = logits.is_float and logits.rank == 2 and isinstance(logits.shape[1], int) and logits.shape[1] > 0
    demand(ok, op, "logits", logits, "must be floating point [tokens, experts]")
    return logits.shape[1]


def _score(op: str, attrs) -> None:
    demand(
        attrs["score_function"] in SCORES,
        op,
        "score_function",
        attrs["score_function"],
        f"must be one of {', '.join(SCORES)}",
    )


def _top(op: str, topk: object, experts: int) -> None:
    ok = type(topk) is int and 0 < topk <= experts
    demand(
        ok,
        op,
        "topk",
        topk if isinstance(topk, int | float | str | None) else type(topk).__name__,
        f"must be an int in 1 .. {experts}, the experts",
    )


def _check_attrs(op: str, specs, attrs, experts: int) -> None:
    topk, groups, kept = attrs["topk"], attrs["num_groups"], attrs["group_topk"]
    _top(op, topk, experts)
    _score(op, attrs)
    boolean(op, "pre_softmax", attrs["pre_softmax"])
    demand(not attrs["pre_softmax"] or attrs["score_function"] == "softmax", op, "pre_softmax", True,
           f"has no meaning with {attrs['score_function']}", "leave it False")  # fmt: skip
    if attrs["scaling_factor"] is not None:
        finite(op, "scaling_factor", attrs["scaling_factor"])
        demand(
            attrs["scaling_factor"] != 0,
            op,
            "scaling_factor",
            attrs["scaling_factor"],
            "must not be 0",
            "pass None for no scaling",
        )
    demand(
        (groups is None) == (kept is None),
        op,
        "num_groups, group_topk",
        (groups, kept),
        "come together",
        "pass both or none",
    )
    if groups is not None:
        ok = type(groups) is int and groups > 0 and experts % groups == 0
        demand(ok, op, "num_groups", groups, f"must be an int that divides the {experts} experts")
        ok = type(kept) is int and 0 < kept <= groups and kept <= topk
        demand(ok, op, "group_topk", kept, f"must be an int in 1 .. {min(groups, topk)}, groups and topk")
        most = kept * (experts // groups)
        demand(
            topk <= most and topk // kept <= experts // groups,
            op,
            "topk",
            topk,
            f"{kept} of {groups} groups hold {most} experts",
        )
    if "expert_bias" in specs:
        bias = specs["expert_bias"]
        demand(
            attrs["score_function"] == "sigmoid", op, "expert_bias", bias, "goes with score_function='sigmoid' alone"
        )
        demand(
            bias.is_float and bias.shape == (experts,), op, "expert_bias", bias, f"must be floating point [{experts}]"
        )


def _infer(specs, attrs):
    logits = specs["logits"]
    _check_attrs("router", specs, attrs, _logits("router", logits))
    shape = (logits.shape[0], attrs["topk"])
    return {"probs": TensorSpec(shape, logits.dtype), "expert_map": TensorSpec(shape, "int32")}


def _best(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` largest of each row and where they stand, largest first, of equal ones the first first."""
    values, places = scores.sort(dim=-1, descending=True, stable=True)
    return values[..., :count], places[..., :count]


def _chosen(scores: torch.Tensor, attrs) -> torch.Tensor:
    """int64 [t, topk]: the experts with the best scores, of the best groups where there are any."""
    groups, kept = attrs["num_groups"], attrs["group_topk"]
    if groups is not None:
        grouped = scores.unflatten(-1, (groups, -1))
        sums = _best(grouped, attrs["topk"] // kept)[0].sum(-1)
        open_ = torch.zeros_like(sums, dtype=torch.bool).scatter_(-1, _best(sums, kept)[1], True)
        least = torch.finfo(grouped.dtype).min  # a kept group's expert that a mask hides comes before any other group's
        scores = torch.where(open_.unsqueeze(-1), grouped.clamp(min=least), float("-inf")).flatten(-2)
    return _best(scores, attrs["topk"])[1]


def _reference(t, attrs, want):
    x = acc(t["logits"])
    if attrs["score_function"] == "sigmoid":
        scores = torch.sigmoid(x)
        bias = t.get("expert_bias")
        experts = _chosen(scores if bias is None else scores + acc(bias).to(x.dtype), attrs)
    else:
        scores = torch.softmax(x, -1) if attrs["pre_softmax"] else x
        experts = _chosen(scores, attrs)
    probs, _ = _weights(x, experts, attrs)
    if attrs["scaling_factor"] is not None:
        probs = probs * attrs["scaling_factor"]
    return {"probs": probs.to(t["logits"].dtype), "expert_map": experts.int()}


def _weights(x: torch.Tensor, experts: torch.Tensor, attrs):
    """(probs of the chosen experts before scaling, scores that they come from)."""
    if attrs["score_function"] == "sigmoid":
        s = torch.sigmoid(x.gather(-1, experts))
        return (s / (s.sum(-1, keepdim=True) + _TINY) if attrs["topk"] > 1 else s), s
    if attrs["pre_softmax"]:
        s = torch.softmax(x, -1)
        return s.gather(-1, experts), s
    p = torch.softmax(x.gather(-1, experts), -1)
    return p, p


def _gradient(g):
    if g.out("probs") is None:
        return {}
    attrs = {name: g.attr(name) for name in ("topk", "score_function", "pre_softmax", "scaling_factor")}
    return {
        "logits": g.op(
            "router_bwd", dprobs=g.out("probs"), logits=g.value("logits"), expert_map=g.value("expert_map"), **attrs
        )
    }


def _bwd_infer(specs, attrs):
    op, logits, dprobs = "router_bwd", specs["logits"], specs["dprobs"]
    _top(op, attrs["topk"], _logits(op, logits))
    _score(op, attrs)
    shape = (logits.shape[0], attrs["topk"])
    demand(
        dprobs.shape == shape and specs["expert_map"].shape == shape,
        op,
        "dprobs, expert_map",
        (dprobs, specs["expert_map"]),
        f"must be {list(shape)}",
    )
    return {"dlogits": logits}


def _through_softmax(p: torch.Tensor, dp: torch.Tensor) -> torch.Tensor:
    return p * (dp - (dp * p).sum(-1, keepdim=True))


def _through_sigmoid(s: torch.Tensor, ds: torch.Tensor) -> torch.Tensor:
    return ds * s * (1 - s)


def _through_shares(s: torch.Tensor, dp: torch.Tensor) -> torch.Tensor:
    """Gradient of s / (sum of s + 1e-20)."""
    total = s.sum(-1, keepdim=True) + _TINY
    return (dp - (dp * s).sum(-1, keepdim=True) / total) / total


def _bwd_reference(t, attrs, want):
    x, experts = acc(t["logits"]), t["expert_map"].to(torch.int64)
    dp = acc(t["dprobs"]).to(x.dtype)
    if attrs["scaling_factor"] is not None:
        dp = dp * attrs["scaling_factor"]
    probs, scores = _weights(x, experts, attrs)
    nothing = torch.zeros_like(x)
    if attrs["score_function"] == "sigmoid":
        chosen = _through_sigmoid(scores, _through_shares(scores, dp) if attrs["topk"] > 1 else dp)
        dx = nothing.scatter(-1, experts, chosen)
    elif attrs["pre_softmax"]:
        dx = _through_softmax(scores, nothing.scatter(-1, experts, dp))
    else:
        dx = nothing.scatter(-1, experts, _through_softmax(probs, dp))
    return {"dlogits": dx.to(t["logits"].dtype)}


# ---- losses ----------------------------------------------------------------------------------------------------------


def _balance_infer(op: str):
    def infer(specs, attrs):
        logits, tokens = specs["logits"], specs["tokens_per_expert"]
        experts = _logits(op, logits)
        _top(op, attrs["topk"], experts)
        _score(op, attrs)
        finite(op, "coefficient", attrs["coefficient"])
        ok = (
            tokens.is_float
            and tokens.rank == 2
            and isinstance(tokens.shape[0], int)
            and tokens.shape[0] > 0
            and tokens.shape[1] == experts
        )
        demand(ok, op, "tokens_per_expert", tokens, f"must be floating point [sequences, {experts}]")
        check_padding(op, specs, logits.shape[0])
        if "total_tokens" in specs:
            total = specs["total_tokens"]
            demand(
                total.is_float and total.shape == (1,),
                op,
                "total_tokens",
                total,
                "must be floating point [1], the tokens of a sequence",
            )
        return {"loss": TensorSpec((), acc_dtype(logits))} if op == "load_balancing_loss" else {"dlogits": logits}

    return infer


def _real(values: torch.Tensor, t) -> torch.Tensor:
    """``values`` [t] or [t, e], zero for tokens that are padding."""
    mask = t.get("padding_mask")
    return values if mask is None else torch.where(mask.view(-1, *(1,) * (values.dim() - 1)), 0.0, values)


def _balance_parts(t, attrs):
    """(raw scores, tokens_per_expert, what their product with the summed scores is multiplied by)."""
    x = acc(t["logits"])
    raw = torch.sigmoid(x) if attrs["score_function"] == "sigmoid" else torch.softmax(x, -1)
    tokens = t["tokens_per_expert"].to(x.dtype)
    sequences, experts = tokens.shape
    total = (
        t["total_tokens"].to(x.dtype).reshape(()) if "total_tokens" in t else tokens.sum() / (attrs["topk"] * sequences)
    )
    factor = experts * attrs["coefficient"] / (attrs["topk"] * sequences) / (total * total)
    return raw, tokens, torch.where(total > 0, factor, 0.0)


def _balance_reference(t, attrs, want):
    raw, tokens, factor = _balance_parts(t, attrs)
    scores = raw / (raw.sum(-1, keepdim=True) + _TINY) if attrs["score_function"] == "sigmoid" else raw
    rounds = -(-len(scores) // len(tokens))
    scores = F.pad(_real(scores, t), (0, 0, 0, rounds * len(tokens) - len(scores)))
    return {"loss": (scores.view(rounds, *tokens.shape).sum(0) * tokens).sum() * factor}


def _balance_gradient(g):
    ports_ = {p: g.value(p) for p in ("total_tokens", "padding_mask") if g.has(p)}
    attrs = {name: g.attr(name) for name in ("topk", "score_function", "coefficient")}
    return {"logits": g.op("load_balancing_loss_bwd", dloss=g.out("loss"), logits=g.value("logits"),
                           tokens_per_expert=g.value("tokens_per_expert"), **ports_, **attrs)}  # fmt: skip


def _balance_bwd_reference(t, attrs, want):
    raw, tokens, factor = _balance_parts(t, attrs)
    dscores = (tokens * (factor * t["dloss"].to(raw.dtype))).repeat(-(-len(raw) // len(tokens)), 1)[: len(raw)]
    through = (
        _through_softmax(raw, dscores)
        if attrs["score_function"] == "softmax"
        else _through_sigmoid(raw, _through_shares(raw, dscores))
    )
    return {"dlogits": _real(through, t).to(t["logits"].dtype)}


def _z_infer(op: str):
    def infer(specs, attrs):
        logits = specs["logits"]
        _logits(op, logits)
        finite(op, "coefficient", attrs["coefficient"])
        check_padding(op, specs, logits.shape[0])
        return {"loss": TensorSpec((), acc_dtype(logits))} if op == "z_loss" else {"dlogits": logits}

    return infer


def _z_parts(t, attrs):
    """(logits, their LSE, coefficient / number of real tokens)."""
    x = acc(t["logits"])
    mask = t.get("padding_mask")
    count = max(len(x), 1) if mask is None else (~mask).sum().clamp(min=1).to(x.dtype)
    return x, torch.logsumexp(x, -1), attrs["coefficient"] / count


def _z_reference(t, attrs, want):
    _, lse, share = _z_parts(t, attrs)
    return {"loss": _real(lse.square(), t).sum() * share}


def _z_gradient(g):
    mask = {"padding_mask": g.value("padding_mask")} if g.has("padding_mask") else {}
    return {
        "logits": g.op(
            "z_loss_bwd", dloss=g.out("loss"), logits=g.value("logits"), **mask, coefficient=g.attr("coefficient")
        )
    }


def _z_bwd_reference(t, attrs, want):
    x, lse, share = _z_parts(t, attrs)
    dlse = 2 * lse * (share * t["dloss"].to(x.dtype))
    return {"dlogits": _real(torch.exp(x - lse.unsqueeze(-1)) * dlse.unsqueeze(-1), t).to(t["logits"].dtype)}


_WEIGHING = {"topk": REQUIRED, "score_function": "softmax", "pre_softmax": False, "scaling_factor": None}
_BALANCE = {"topk": REQUIRED, "score_function": "softmax", "coefficient": 1.0}
_LOGITS = frozenset({"logits"})


def _flops(i, o, a):
    return 8 * i["logits"].numel()


OPS = (
    Op(
        "router",
        ports("logits", "expert_bias?"),
        ports("probs", "expert_map"),
        _infer,
        _reference,
        attrs=_WEIGHING | {"num_groups": None, "group_topk": None},
        gradient=_gradient,
        kind="reduction",
        differentiable=_LOGITS,
        constant_outputs=frozenset({"expert_map"}),
        flops=_flops,
    ),
    Op(
        "router_bwd",
        ports("dprobs", "logits", "expert_map"),
        ports("dlogits"),
        _bwd_infer,
        _bwd_reference,
        attrs=_WEIGHING,
        kind="reduction",
        flops=_flops,
    ),
    Op(
        "load_balancing_loss",
        ports("logits", "tokens_per_expert", "total_tokens?", "padding_mask?"),
        ports("loss"),
        _balance_infer("load_balancing_loss"),
        _balance_reference,
        attrs=_BALANCE,
        gradient=_balance_gradient,
        kind="loss",
        differentiable=_LOGITS,
        flops=_flops,
    ),
    Op(
        "load_balancing_loss_bwd",
        ports("dloss", "logits", "tokens_per_expert", "total_tokens?", "padding_mask?"),
        ports("dlogits"),
        _balance_infer("load_balancing_loss_bwd"),
        _balance_bwd_reference,
        attrs=_BALANCE,
        kind="loss",
        flops=_flops,
    ),
    Op(
        "z_loss",
        ports("logits", "padding_mask?"),
        ports("loss"),
        _z_infer("z_loss"),
        _z_reference,
        attrs={"coefficient": 1.0},
        gradient=_z_gradient,
        kind="loss",
        differentiable=_LOGITS,
        flops=_flops,
    ),
    Op(
        "z_loss_bwd",
        ports("dloss", "logits", "padding_mask?"),
        ports("dlogits"),
        _z_infer("z_loss_bwd"),
        _z_bwd_reference,
        attrs={"coefficient": 1.0},
        kind="loss",
        flops=_flops,
    ),
)
