"""cross_entropy: loss per token, in float32 or wider; ignored targets give 0 and no gradient."""

from __future__ import annotations

import torch

from ..ir import TensorSpec
from .table import Op, acc, acc_dtype, demand, ports, same_shape


def _infer(specs, attrs):
    logits, targets = specs["logits"], specs["targets"]
    demand(logits.is_float and logits.rank >= 1, "cross_entropy", "logits", logits, "must be floating point [..., classes]")
    demand(targets.dtype in ("int32", "int64"), "cross_entropy", "targets", targets, "must be int32 or int64")
    demand(targets.shape == logits.shape[:-1], "cross_entropy", "targets", targets,
           f"must have shape {list(logits.shape[:-1])}, one class index per row of logits")  # fmt: skip
    demand(logits.shape[-1] != 0, "cross_entropy", "logits", logits, "must have at least one class")
    ignored = attrs["ignore_index"]
    demand(type(ignored) is int, "cross_entropy", "ignore_index", ignored, "must be an int", "keep -100 where no target is to be ignored")
    row = TensorSpec(targets.shape, acc_dtype(logits))
    return {"loss": row, "lse": row}


def _check(t, shape, attrs):
    if "targets" not in t:
        return
    kept, classes, ignored = t["targets"], shape("logits")[-1], attrs["ignore_index"]
    kept = kept[kept != ignored]
    if kept.numel() and (int(kept.min()) < 0 or int(kept.max()) >= classes):
        raise ValueError(f"cross_entropy: targets span {int(kept.min())} .. {int(kept.max())}: must lie in [0, {classes}) or equal "
                         f"ignore_index = {ignored}; mask them with it")  # fmt: skip


def _reference(t, attrs, want):
    x, targets = acc(t["logits"]), t["targets"].to(torch.int64)
    ignored = targets == attrs["ignore_index"]
    lse = torch.logsumexp(x, dim=-1)
    picked = x.gather(-1, targets.masked_fill(ignored, 0).unsqueeze(-1)).squeeze(-1)
    return {"loss": torch.where(ignored, 0.0, lse - picked), "lse": lse}


def _gradient(g):
    if g.out("loss") is None:
        return {}
    dlogits = g.op("cross_entropy_bwd", dloss=g.out("loss"), logits=g.value("logits"), targets=g.value("targets"),
                   lse=g.value("lse"), ignore_index=g.attr("ignore_index"))  # fmt: skip
    return {"logits": dlogits}


def _bwd_infer(specs, attrs):
    same_shape("cross_entropy_bwd", "dloss", specs["dloss"], specs["lse"])
    return {"dlogits": specs["logits"]}


def _bwd_reference(t, attrs, want):
    x, targets = acc(t["logits"]), t["targets"].to(torch.int64)
    ignored = targets == attrs["ignore_index"]
    p = torch.exp(x - t["lse"].to(x.dtype).unsqueeze(-1))
    classes = torch.arange(x.shape[-1], device=x.device)
    hit = classes == targets.unsqueeze(-1)
    dx = (p - hit.to(p.dtype)) * t["dloss"].to(p.dtype).unsqueeze(-1)
    return {"dlogits": torch.where(ignored.unsqueeze(-1), 0.0, dx).to(t["logits"].dtype)}


OPS = (
    Op("cross_entropy", ports("logits", "targets"), ports("loss", "lse?"), _infer, _reference,
       attrs={"ignore_index": -100}, gradient=_gradient, kind="loss", differentiable=frozenset({"logits"}), constant_outputs=frozenset({"lse"}),
       flops=lambda i, o, a: 4 * i["logits"].numel(), check=_check),
    Op("cross_entropy_bwd", ports("dloss", "logits", "targets", "lse"), ports("dlogits"), _bwd_infer, _bwd_reference,
       attrs={"ignore_index": -100}, kind="loss", flops=lambda i, o, a: 4 * i["logits"].numel()),
)  # fmt: skip
