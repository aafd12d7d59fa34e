"""Megatron's GPT model with its loss on plans: cross entropy over sharded classes, or output layer and cross entropy in
chunks."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.fp8_utils import is_mxfp8_output_proj_active
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_pg_rank, get_pg_size

from ...modules.graphs import TensorParallel
from ...modules.loss import CrossEntropy
from ..planner.runner import WeightGrads
from ..problems import Problem
from .config_map import ConfigError
from .layers import run_pre_hooks

LOSSES = ("fused", "chunked")


def _loss_problems(config: TransformerConfig, loss: str, sharded_output: bool) -> list[Problem]:
    """What this loss would not do as the config says. ``sharded_output``: whether logits leave the output layer with
    this rank's classes."""
    problems = []
    if not sharded_output:
        problems.append(
            Problem(
                "parallel_output",
                False,
                "the loss of more than one tensor-parallel rank is over sharded logits",
                "set parallel_output = True and gather the logits where they are read",
            )
        )
    if loss != "chunked":
        return problems
    whole = 'or set loss = "fused"'
    for field, neutral, rule in (
        ("mtp_num_layers", (None, 0), "the losses of multi-token prediction are over full logits"),
        (
            "defer_embedding_wgrad_compute",
            (False,),
            "logits and their gradient are not kept for a weight gradient later on",
        ),
        ("cpu_offloading", (False,), "tensors that a plan saves are not offered to the offloader"),
    ):
        value = getattr(config, field)
        if value not in neutral:
            problems.append(
                Problem(field, value, f"must be {neutral[0]!r}: {rule}", f"set {field} = {neutral[0]!r}, {whole}")
            )
    if config.use_mup and config.mup_output_mult != 1.0:
        problems.append(
            Problem(
                "mup_output_mult",
                config.mup_output_mult,
                "must be 1.0: the logits are not there to be scaled",
                f"set it to 1.0, {whole}",
            )
        )
    if is_mxfp8_output_proj_active(config):
        problems.append(
            Problem(
                "fp8_output_proj",
                True,
                "the product runs in the dtype of the parameters",
                f"set fp8_output_proj = False, {whole}",
            )
        )
    return problems


class LayerplanGPTModel(GPTModel):
    """Megatron's GPTModel, its arguments, shapes and checkpoint names; the module ``loss`` runs the loss on the last
    stage.

    ``loss="fused"``: Megatron's output layer, then cross entropy over the rank's classes: logits are read once forward
    and once backward, two numbers a token are exchanged. ``loss="chunked"``: output layer and cross entropy are one
    plan in chunks of tokens; logits never exist whole, the backward makes them again (four products instead of three).
    Without labels, and with an ``output_processor`` of the caller's, both return what Megatron's does.

    The loss is float32. Labels of -100 give 0 and no gradient, any other that is no class is refused where it can be
    read. cross_entropy_loss_fusion and cross_entropy_fusion_impl choose among Megatron's kernels of one result: the
    planner does that here.
    """

    def __init__(self, config: TransformerConfig, *args: Any, loss: str = "fused", **kwargs: Any) -> None:
        if loss not in LOSSES:
            raise ValueError(
                f"loss = {loss!r}: must be one of {', '.join(LOSSES)}; for Megatron's own loss use its GPTModel"
            )
        super().__init__(config, *args, **kwargs)
        self.chunked = loss == "chunked"
        if not self.post_process:
            return
        size = get_pg_size(self.tp_group)
        problems = _loss_problems(config, loss, size == 1 or self.parallel_output)
        if problems:
            raise ConfigError(problems, context=f"LayerplanGPTModel with loss = {loss!r}")
        tp = TensorParallel(size, bool(self.output_layer.sequence_parallel))
        self.loss = CrossEntropy(
            self.output_layer.output_size_per_partition, tp=tp, group=self.tp_group, rank=get_pg_rank(self.tp_group)
        )
        self.loss._plan_name, self.loss._deterministic = "loss", config.deterministic_mode
        if self.chunked:
            self.output_layer.runs_own_plans = False  # reports leave it out: the loss reads its weight

    def _postprocess(
        self,
        hidden_states: torch.Tensor,
        input_ids: Any,
        position_ids: Any,
        labels: torch.Tensor | None,
        *args: Any,
        output_processor: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        if self.chunked and self.post_process and labels is not None and output_processor is None:
            output_processor = self._chunked_loss  # Megatron calls it in place of output layer and loss
        return super()._postprocess(
            hidden_states, input_ids, position_ids, labels, *args, output_processor=output_processor, **kwargs
        )

    def _chunked_loss(
        self,
        *,
        hidden_states: torch.Tensor,
        output_layer: torch.nn.Module,
        output_weight: torch.Tensor | None,
        labels: torch.Tensor,
        **_: Any,
    ) -> torch.Tensor:
        """hidden_states [s(/tp), b, h], labels [b, s] -> loss [b, s]. ``output_weight``: the embedding's, where they
        are tied."""
        run_pre_hooks(output_layer)
        weight = output_layer.weight if output_weight is None else output_weight
        sink = WeightGrads({1: weight}, fuse=True) if self.config.gradient_accumulation_fusion else None
        loss = self.loss.linear(hidden_states, weight, labels.transpose(0, 1).contiguous(), sink=sink)
        return loss.transpose(0, 1).contiguous()

    def compute_language_model_loss(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """labels [b, s], logits [s, b, v / tp] -> loss [b, s]."""
        return self.loss(logits, labels.transpose(0, 1).contiguous()).transpose(0, 1).contiguous()
