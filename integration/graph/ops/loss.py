"""Cross entropy: loss per token, in float32 or wider; ignored targets give 0 and no gradient.

``linear_cross_entropy`` makes its logits itself and its backward makes them again: no graph value has their size. Four
products instead of three.

Where the classes are sharded over ranks (vocab-parallel), each rank runs one of the two ops over its own classes, and
ranks exchange two numbers a token: ``shard_targets``, (linear_)cross_entropy, ``stack_shard``, all_gather,
``shard_loss``. The gradient of the last one is that of the whole, (softmax - onehot) of this rank's classes, so nothing
is differentiated through the collective. A row of -inf over all of the classes of the target's rank gives NaN, where
the whole row gives inf.
"""

from __future__ import annotations

import torch

from ..ir import TensorSpec
from .table import REQUIRED, Op, acc, acc_dtype, as_rows, demand, ports, same_dtype, same_shape, size_product

NOWHERE = -1
"""The ``ignore_index`` of nodes that read ``shard_targets``: no shifted target has it, whatever the caller ignores."""


def _ignored(op: str, value: object) -> None:
    demand(
        type(value) is int, op, "ignore_index", value, "must be an int", "keep -100 where no target is to be ignored"
    )


def _targets(op: str, targets: TensorSpec, rows: tuple, of: str, field: str = "targets") -> None:
    demand(targets.dtype in ("int32", "int64"), op, field, targets, "must be int32 or int64")
    demand(targets.shape == rows, op, field, targets, f"must have shape {list(rows)}, one class index per row of {of}")


def _infer(specs, attrs):
    logits, targets = specs["logits"], specs["targets"]
    demand(
        logits.is_float and logits.rank >= 1, "cross_entropy", "logits", logits, "must be floating point [..., classes]"
    )
    _targets("cross_entropy", targets, logits.shape[:-1], "logits")
    demand(logits.shape[-1] != 0, "cross_entropy", "logits", logits, "must have at least one class")
    _ignored("cross_entropy", attrs["ignore_index"])
    row = TensorSpec(targets.shape, acc_dtype(logits))
    return {"loss": row, "lse": row}


def _in_range(op: str, targets: torch.Tensor, classes: int, ignored: int) -> None:
    kept = targets[targets != ignored]
    if kept.numel() and (int(kept.min()) < 0 or int(kept.max()) >= classes):
        raise ValueError(
            f"{op}: targets span {int(kept.min())} .. {int(kept.max())}: must lie in [0, {classes}) or equal "
            f"ignore_index = {ignored}; mask them with it"
        )


def _check(op: str, port: str, axis: int):
    """Refuses targets that are no class; there are as many classes as ``port`` is long in ``axis``."""

    def check(t, shape, attrs):
        if "targets" in t:
            _in_range(op, t["targets"], shape(port)[axis], attrs["ignore_index"])

    return check


def _reference(t, attrs, want):
    x, targets = acc(t["logits"]), t["targets"].to(torch.int64)
    ignored = targets == attrs["ignore_index"]
    lse = torch.logsumexp(x, dim=-1)
    picked = x.gather(-1, targets.masked_fill(ignored, 0).unsqueeze(-1)).squeeze(-1)
    return {"loss": torch.where(ignored, 0.0, lse - picked), "lse": lse}


def _gradient(g):
    if g.out("loss") is None:
        return {}
    dlogits = g.op(
        "cross_entropy_bwd",
        dloss=g.out("loss"),
        logits=g.value("logits"),
        targets=g.value("targets"),
        lse=g.value("lse"),
        ignore_index=g.attr("ignore_index"),
    )
    return {"logits": dlogits}


def _bwd_infer(specs, attrs):
    same_shape("cross_entropy_bwd", "dloss", specs["dloss"], specs["lse"])
    return {"dlogits": specs["logits"]}


def _bwd_reference(t, attrs, want):
    """A target behind the last class hits none: its row gets the softmax alone."""
    x, targets = acc(t["logits"]), t["targets"].to(torch.int64)
    ignored = targets == attrs["ignore_index"]
    p = torch.exp(x - t["lse"].to(x.dtype).unsqueeze(-1))
    classes = torch.arange(x.shape[-1], device=x.device)
    hit = classes == targets.unsqueeze(-1)
    dx = (p - hit.to(p.dtype)) * t["dloss"].to(p.dtype).unsqueeze(-1)
    return {"dlogits": torch.where(ignored.unsqueeze(-1), 0.0, dx).to(t["logits"].dtype)}


# ---- linear + cross entropy -----------------------------------------------------------------------------------------


def _linear_infer(specs, attrs):
    op, x, w, targets = "linear_cross_entropy", specs["x"], specs["weight"], specs["targets"]
    same_dtype(op, x=x, weight=w)
    demand(w.rank == 2 and w.shape[0] != 0, op, "weight", w, "must be a matrix [classes, hidden] of at least one class")
    demand(
        x.rank >= 1 and x.shape[-1] == w.shape[1], op, "x", x, f"its last dim must equal the hidden size of weight {w}"
    )
    _targets(op, targets, x.shape[:-1], "x")
    _ignored(op, attrs["ignore_index"])
    row = TensorSpec(targets.shape, acc_dtype(x))
    return {"loss": row, "lse": row}


def _logits(t):
    """In the accumulation dtype, unrounded: an engine may round them to the dtype of x, as a linear does."""
    return acc(t["x"]) @ acc(t["weight"]).T


def _linear_reference(t, attrs, want):
    return _reference({"logits": _logits(t), "targets": t["targets"]}, attrs, want)


def _wanted(g) -> tuple[str, ...]:
    return tuple(port for port, of in (("dx", "x"), ("dweight", "weight")) if g.needs(of))


def _linear_gradient(g):
    if g.out("loss") is None:
        return {}
    return _linear_bwd(g, targets=g.value("targets"), ignore_index=g.attr("ignore_index"))


def _linear_bwd(g, **arguments):
    want = _wanted(g)
    made = g.op(
        "linear_cross_entropy_bwd",
        want=want,
        x=g.value("x"),
        weight=g.value("weight"),
        dloss=g.out("loss"),
        lse=g.value("lse"),
        **arguments,
    )
    return dict(zip((port[1:] for port in want), (made,) if isinstance(made, str) else made, strict=True))


def _linear_bwd_infer(specs, attrs):
    op, x, w, accumulate = "linear_cross_entropy_bwd", specs["x"], specs["weight"], specs.get("accumulate")
    same_shape(op, "dloss", specs["dloss"], specs["lse"])
    if accumulate is not None:
        demand(accumulate.shape == w.shape, op, "accumulate", accumulate, f"must have shape {list(w.shape)}")
    return {"dx": x, "dweight": w if accumulate is None else accumulate}


def _linear_bwd_reference(t, attrs, want):
    dlogits = _bwd_reference(t | {"logits": _logits(t)}, attrs, want)["dlogits"]
    out = {}
    if "dx" in want:
        out["dx"] = (dlogits @ acc(t["weight"])).to(t["x"].dtype)
    if "dweight" in want:
        dw = as_rows(dlogits).T @ as_rows(acc(t["x"]))
        out["dweight"] = (
            t["accumulate"].add_(dw.to(t["accumulate"].dtype)) if "accumulate" in t else dw.to(t["weight"].dtype)
        )
    return out


def _linear_flops(i, o, a):
    """A product for the logits and one for each gradient, and what cross entropy does with each logit."""
    rows = size_product(i["targets"].shape)
    products = 1 + ("dx" in o) + ("dweight" in o)
    return rows * size_product(i["weight"].shape) * 2 * products + 4 * rows * size_product(i["weight"].shape[:1])


# ---- classes sharded over ranks --------------------------------------------------------------------------------------


def _shard_targets_infer(specs, attrs):
    op, targets, first = "shard_targets", specs["targets"], specs["first"]
    demand(targets.dtype in ("int32", "int64"), op, "targets", targets, "must be int32 or int64")
    demand(
        first.shape == (1,) and first.dtype == "int64",
        op,
        "first",
        first,
        "must be int64[1], the index of this rank's first class",
    )
    demand(
        type(attrs["classes"]) is int and attrs["classes"] > 0,
        op,
        "classes",
        attrs["classes"],
        "must be an int, the classes of one rank",
    )
    _ignored(op, attrs["ignore_index"])
    return {"own": targets, "hits": targets}


def _shard_targets_reference(t, attrs, want):
    """``own``: NOWHERE where the target is ignored or another rank's; ``hits``: NOWHERE where it is ignored, one behind
    the last class where it is another rank's."""
    targets, classes = t["targets"], attrs["classes"]
    shifted = targets.to(torch.int64) - t["first"]
    ignored, here = targets == attrs["ignore_index"], (shifted >= 0) & (shifted < classes)
    out = {
        "own": torch.where(here & ~ignored, shifted, NOWHERE),
        "hits": torch.where(ignored, NOWHERE, torch.where(here, shifted, classes)),
    }
    return {port: made.to(targets.dtype) for port, made in out.items()}


def _stack_infer(specs, attrs):
    same_shape("stack_shard", "lse", specs["lse"], specs["loss"])
    same_dtype("stack_shard", loss=specs["loss"], lse=specs["lse"])
    return {"stats": TensorSpec((1, 2, *specs["loss"].shape), specs["loss"].dtype)}


def _shard_loss_infer(specs, attrs):
    op, stats, targets = "shard_loss", specs["stats"], specs["targets"]
    demand(
        stats.is_float and stats.rank >= 2 and stats.shape[1] == 2 and isinstance(stats.shape[0], int),
        op,
        "stats",
        stats,
        "must be [ranks, 2, ...], loss and LSE of each rank's classes",
    )
    _targets(op, targets, stats.shape[2:], "stats")
    _targets(op, specs["hits"], stats.shape[2:], "stats", "hits")
    whole = "logits" in specs, "x" in specs, "weight" in specs
    demand(
        whole in ((True, False, False), (False, True, True)),
        op,
        "logits, x, weight",
        list(whole),
        "must be logits alone, or x and weight",
    )
    classes = specs["logits"].shape[-1] if whole[0] else specs["weight"].shape[0]
    demand(
        attrs["classes"] == classes,
        op,
        "classes",
        attrs["classes"],
        f"must be {classes}, this rank's number of classes",
    )
    _ignored(op, attrs["ignore_index"])
    row = TensorSpec(targets.shape, stats.dtype)
    return {"loss": row, "lse": row}


def _shard_loss_reference(t, attrs, want):
    losses, lses = t["stats"].unbind(1)
    targets = t["targets"].to(torch.int64)
    ignored = targets == attrs["ignore_index"]
    owner = (targets.masked_fill(ignored, 0) // attrs["classes"]).unsqueeze(0)
    lse = torch.logsumexp(lses, dim=0)
    # no difference of large numbers: the loss on the target's rank, and what the other ranks add to its LSE
    loss = losses.gather(0, owner).squeeze(0) + (lse - lses.gather(0, owner).squeeze(0))
    return {"loss": torch.where(ignored, 0.0, loss), "lse": lse}


def _shard_loss_gradient(g):
    if g.out("loss") is None:
        return {}
    if g.has("x"):
        return _linear_bwd(g, targets=g.value("hits"), ignore_index=NOWHERE)
    return {
        "logits": g.op(
            "cross_entropy_bwd",
            dloss=g.out("loss"),
            logits=g.value("logits"),
            targets=g.value("hits"),
            lse=g.value("lse"),
            ignore_index=NOWHERE,
        )
    }


def _shard_loss_check(t, shape, attrs):
    if "targets" in t:
        _in_range("shard_loss", t["targets"], shape("stats")[0] * attrs["classes"], attrs["ignore_index"])


_LSE = frozenset({"lse"})
_LINEAR = {"attrs": {"ignore_index": -100}, "kind": "loss", "flops": _linear_flops}

OPS = (
    Op(
        "cross_entropy",
        ports("logits", "targets"),
        ports("loss", "lse?"),
        _infer,
        _reference,
        attrs={"ignore_index": -100},
        gradient=_gradient,
        kind="loss",
        differentiable=frozenset({"logits"}),
        constant_outputs=_LSE,
        flops=lambda i, o, a: 4 * i["logits"].numel(),
        check=_check("cross_entropy", "logits", -1),
    ),
    Op(
        "cross_entropy_bwd",
        ports("dloss", "logits", "targets", "lse"),
        ports("dlogits"),
        _bwd_infer,
        _bwd_reference,
        attrs={"ignore_index": -100},
        kind="loss",
        flops=lambda i, o, a: 4 * i["logits"].numel(),
    ),
    Op(
        "linear_cross_entropy",
        ports("x", "weight", "targets"),
        ports("loss", "lse?"),
        _linear_infer,
        _linear_reference,
        gradient=_linear_gradient,
        differentiable=frozenset({"x", "weight"}),
        constant_outputs=_LSE,
        check=_check("linear_cross_entropy", "weight", 0),
        **_LINEAR,
    ),
    # x first: its dtype is the products'
    Op(
        "linear_cross_entropy_bwd",
        ports("x", "weight", "targets", "dloss", "lse", "accumulate?"),
        ports("dx?", "dweight?"),
        _linear_bwd_infer,
        _linear_bwd_reference,
        **_LINEAR,
    ),
    Op(
        "shard_targets",
        ports("targets", "first"),
        ports("own", "hits"),
        _shard_targets_infer,
        _shard_targets_reference,
        attrs={"classes": REQUIRED, "ignore_index": -100},
        differentiable=frozenset(),
    ),
    Op(
        "stack_shard",
        ports("loss", "lse"),
        ports("stats"),
        _stack_infer,
        lambda t, attrs, want: {"stats": torch.stack((t["loss"], t["lse"])).unsqueeze(0)},
        kind="layout",
        differentiable=frozenset(),
    ),
    Op(
        "shard_loss",
        ports("stats", "targets", "hits", "logits?", "x?", "weight?"),
        ports("loss", "lse?"),
        _shard_loss_infer,
        _shard_loss_reference,
        attrs={"classes": REQUIRED, "ignore_index": -100},
        gradient=_shard_loss_gradient,
        kind="loss",
        differentiable=frozenset({"logits", "x", "weight"}),
        constant_outputs=_LSE,
        gradient_only=frozenset({"hits", "logits", "x", "weight"}),
        flops=lambda i, o, a: 4 * i["stats"].numel(),
        check=_shard_loss_check,
    ),
)
