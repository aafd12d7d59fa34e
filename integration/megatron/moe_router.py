"""Megatron's router with its choice and its losses in plans: parameters, gating product, logging and scaling of the
losses are Megatron's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import router as megatron_router
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.utils import get_pg_size

from ...modules.base import PlannedModule
from ...modules.moe import Routing, balance_graph, router_graph

_LOSSES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Balancing that is a loss -> its name in the log."""


def check_padding_mask(module: str, mask: Any, shape: tuple[int, ...], order: str) -> None:
    """Refuses a padding mask that is not of ``shape``, whose dims are called ``order``: as many values in another order
    would hide other tokens."""
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"{module}: padding_mask = {type(mask).__name__}: must be a bool torch.Tensor {list(shape)}")
    if mask.shape != shape:
        turned = mask.dim() == 2 and mask.shape[::-1] == shape
        raise ValueError(
            f"{module}: padding_mask {list(mask.shape)}: must be {list(shape)}, {order} of the hidden states on this rank; "
            + ("pass padding_mask.transpose(0, 1)" if turned else "pass one value for each token, True for padding")
        )


class TopKRouter(PlannedModule, megatron_router.TopKRouter):
    """Megatron's TopKRouter whose ``forward`` returns the chosen experts alone, [t, k], in place of tables over all
    experts.

    Scores, top-k, the counts of tokens and the losses run in plans, without a wait for the device. Sinkhorn and
    quantile balancing, square-root softplus scores, token dropping by capacity and the replay of routes are Megatron's
    functions: their tables are turned into the chosen experts. Among experts of equal scores the one with the lowest
    number is chosen.
    """

    boundary = "gating product and logging of the losses"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        c = self.config
        self._deterministic = c.deterministic_mode
        kinds = self.routing_type if isinstance(self.routing_type, list) else [self.routing_type]
        self._planned = (
            set(kinds) <= {*_LOSSES, "none"}
            and c.moe_router_score_function in ("softmax", "sigmoid")
            and c.moe_expert_capacity_factor is None
            and self.router_replay is None
        )
        self._balance = tuple(k for k in _LOSSES if self.get_aux_loss_coeff(k) > 0) if self._planned else ()
        pre = c.moe_router_pre_softmax and c.moe_router_score_function == "softmax"
        self._routing = Routing(
            self.num_experts,
            self.topk,
            c.moe_router_score_function,
            pre,
            c.moe_router_topk_scaling_factor or None,
            c.moe_router_num_groups if c.moe_router_group_topk else None,
            c.moe_router_group_topk or None,
        )
        if not self._planned:
            self.run_by_parent()

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """[s, b, h] -> logits [s, b, experts]. Megatron's product cannot shape those of a rank without tokens: it gets
        one of zeros, whose logits nobody reads."""
        if input.numel():
            return super().gating(input)
        one = torch.nn.functional.pad(input.reshape(-1, input.shape[-1]), (0, 0, 0, 1))
        return super().gating(one)[:0].reshape(*input.shape[:-1], self.num_experts)

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """logits [s, b, experts], padding_mask [s, b] (True: padding) -> (probs [t, k] in the logits' dtype, experts
        [t, k] int32, -1 where a slot has none). In training the losses hang on the probabilities."""
        if padding_mask is not None:
            check_padding_mask("TopKRouter", padding_mask, tuple(logits.shape[:-1]), "[sequence, batch]")
        if not self._planned:
            return self._chosen(*super().routing(logits, padding_mask))
        sequences = logits.shape[1]
        logits = logits.reshape(-1, self.num_experts)
        mask = None if padding_mask is None else padding_mask.reshape(-1)
        learns = self.training and torch.is_grad_enabled()
        z = self.config.moe_z_loss_coeff
        z = z / self.tp_cp_group.size() if learns and z else None
        balanced = tuple(sequences if k == "seq_aux_loss" else 1 for k in self._balance) if learns else ()
        counted = bool(self.enable_expert_bias) and torch.is_grad_enabled()
        inputs = {
            "logits": logits,
            "expert_bias": self.expert_bias,
            "padding_mask": mask if z is not None or balanced or counted else None,
        }
        inputs = {n: t for n, t in inputs.items() if t is not None}
        names, build = router_graph(
            self._routing,
            bias="expert_bias" in inputs,
            padding="padding_mask" in inputs,
            z_coefficient=z,
            balanced=balanced,
            counted=counted,
        )
        probs, experts, *rest = self.planned((names, z, balanced, counted), names, build)(*inputs.values())
        if z is not None:
            probs = self._attach_z_loss(probs, rest.pop(0), z, mask)
        for kind, tokens in zip(self._balance if balanced else (), rest, strict=False):
            probs = self._attach_balance(kind, probs, logits, tokens, mask)
        if counted:
            with torch.no_grad():
                self.local_tokens_per_expert += rest[-1].view(-1)
        return probs, experts

    def _attach_z_loss(
        self, probs: torch.Tensor, loss: torch.Tensor, coefficient: float, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """``apply_z_loss`` of Megatron, for a loss that is there."""
        weight = 1
        if self.calculate_per_token_loss:  # gradients are divided by the number of all tokens later on
            weight = self.tp_cp_group.size() * (len(probs) if mask is None else (~mask).sum())
        probs = MoEAuxLossAutoScaler.apply(probs, loss * weight)
        get_moe_metrics_tracker().record(
            "z_loss",
            loss.detach() / coefficient,
            self.layer_number,
            self.config.num_layers,
            avg_group=self.tp_dp_cp_group,
        )
        return probs

    def _attach_balance(
        self, kind: str, probs: torch.Tensor, logits: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """One load-balancing loss. ``tokens`` [B, experts]: this rank's, by sequence for "seq_aux_loss"."""
        whole = kind == "global_aux_loss"
        group, local = self.tp_dp_cp_group if whole else self.tp_cp_group, len(logits) // len(tokens)
        own = tokens.sum() / (self.topk * len(tokens))
        if get_pg_size(group) > 1:
            dist.all_reduce(tokens, group=group)
        total = tokens.sum().view(1) / (self.topk * len(tokens))
        if whole:  # the average over the micro-batches so far
            self.global_tokens_per_expert += tokens.view(-1)
            self.ga_steps += 1
            tokens = (self.global_tokens_per_expert / self.ga_steps).view(1, -1)
        coefficient = self.get_aux_loss_coeff(kind)
        names, build = balance_graph(self._routing, coefficient, padding=mask is not None)
        loss = self.planned((kind, names), names, build)(logits, tokens, total, *(() if mask is None else (mask,)))
        count = (local if mask is None else own) * len(tokens)
        return self.attach_and_log_load_balancing_loss(
            probs, coefficient, loss, _LOSSES[kind], group, needs_dp_avg=not whole, valid_token_count=count
        )

    def _chosen(self, probs: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Megatron's tables [t, experts] of probabilities and choices as [t, k], experts in rising order; a token with
        fewer has -1 in its last slots."""
        taken, experts = table.to(torch.int32).sort(dim=1, descending=True, stable=True)
        taken, experts = taken[:, : self.topk].bool(), experts[:, : self.topk]
        return torch.where(taken, probs.gather(1, experts), 0.0), torch.where(taken, experts, -1).to(torch.int32)
