"""An MoE layer on plans of its own: router, permute, experts and unpermute, with dispatchers that wait for no count.

Tensors: hidden states [s(/tp), b, h], taken as tokens [t, h] of this rank; probabilities [t, k] of each token's experts
and their numbers [t, k] (int32, over all experts of the model, -1 for none).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.moe import moe_layer as megatron_moe
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_pg_size

from ...modules.base import PlannedModule
from ...modules.graphs import TensorParallel
from ...modules.moe import moe_graph
from . import layers
from .config_map import ConfigError
from .moe_config import layer_problems
from .moe_dispatch import AllGather, AllToAll
from .moe_experts import GroupedExperts
from .moe_router import TopKRouter, check_padding_mask


def raise_for_moe_layer(config: TransformerConfig) -> None:
    """ConfigError with all that ``config`` asks of an MoE layer and ``LayerplanMoELayer`` would not do."""
    problems = list(layer_problems(config))
    if problems:
        raise ConfigError(problems, "LayerplanMoELayer")


class SharedExperts(SharedExpertMLP, layers.MLP):
    """The shared experts: Megatron's module, with fc1, activation and fc2 as one graph."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.boundary = "gate" if self.use_shared_expert_gate else ""


class LayerplanMoELayer(PlannedModule, megatron_moe.MoELayer):
    """Megatron's MoE layer, its parameters, arguments and checkpoint names. Router, permutation, experts and the
    weighted sum run in plans; token counts and offsets stay on the device.

    Without expert parallelism and with moe_token_dispatcher_type = "allgather" the layer never waits for the device,
    and everything behind the router is one plan. With "alltoall" over several expert-parallel ranks the numbers of rows
    are copied to the host once a layer, behind the router; the copy is waited for behind the shared experts. Sums over
    ranks that share the experts of "allgather", or one expert, are made in the hidden states' dtype.

    "moe_act" and "layernorm" of recompute_modules are save policies, "moe" and "shared_experts" Megatron's checkpoints.
    Raises ConfigError for options that it would not act upon, ValueError for slots that are not layerplan's.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Any = None,
        layer_number: int | None = None,
        pg_collection: Any = None,
        is_mtp_layer: bool = False,
        name: str | None = None,
    ) -> None:
        raise_for_moe_layer(config)
        super().__init__(config, submodules, layer_number, pg_collection, is_mtp_layer, name)
        self._plan_name, self._deterministic = name or "", config.deterministic_mode
        for slot, kind in (("router", TopKRouter), ("experts", GroupedExperts)):
            if not isinstance(getattr(self, slot), kind):
                raise ValueError(
                    f"{slot} = {type(getattr(self, slot)).__name__}: this layer runs in plans and needs layerplan's "
                    f"{kind.__name__}; use Megatron's MoELayer for others"
                )
        self.experts.run_by_parent()
        groups = pg_collection or megatron_moe.get_default_pg_collection()
        exchanges = config.moe_token_dispatcher_type == "alltoall" and get_pg_size(groups.ep) > 1
        # in place of Megatron's
        self.token_dispatcher = (AllToAll if exchanges else AllGather)(groups, self.num_local_experts)
        beside = (
            (not self.router.runs_own_plans, "the router, whose choice is Megatron's functions"),
            (exchanges, "all-to-all of rows, whose numbers the host waits for once"),
            (self.shared_experts is not None, "add of the shared experts"),
        )
        self.boundary = ", ".join([text for there, text in beside if there] + ["residual add behind it"])

    def forward(
        self, hidden_states: torch.Tensor, intermediate_tensors: Any = None, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, None]:
        """hidden_states [s(/tp), b, h], padding_mask [b, s(/tp)] (True: padding, which no loss counts) -> (output of
        that shape, None)."""
        if intermediate_tensors is not None:
            raise ValueError(
                "intermediate_tensors: must be None; they are steps of Megatron's layer, which this one runs in plans"
            )
        if self.training and self.attn_tp_group.size() > 1 and not self.config.sequence_parallel:
            raise ValueError(
                "sequence_parallel = False: must be True in training where tensor parallelism meets experts, as "
                "Megatron demands: every rank would send the same tokens; set sequence_parallel = True"
            )
        if padding_mask is not None:
            check_padding_mask("LayerplanMoELayer", padding_mask, hidden_states.shape[1::-1], "[batch, sequence]")
            padding_mask = padding_mask.transpose(0, 1).bool()
        if self.moe_layer_recompute and self.training:
            return tensor_parallel.checkpoint(self._run, False, hidden_states, padding_mask), None
        return self._run(hidden_states, padding_mask), None

    def _run(self, hidden_states: torch.Tensor, padding_mask: torch.Tensor | None) -> torch.Tensor:
        probs, expert_map = self.router(hidden_states, padding_mask)
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        finish = self.token_dispatcher.start(self, tokens, probs, expert_map)
        shared = self.shared_experts_compute(hidden_states)
        out = finish().view(hidden_states.shape)
        del finish  # and what it holds
        return out if shared is None else out + shared

    def run_experts(
        self, gather: TensorParallel, group: Any, x: torch.Tensor, probs: torch.Tensor, local_map: torch.Tensor
    ) -> torch.Tensor:
        """The sum of each token's local experts, by one plan. x [t, h], probs [t, k]; local_map [t * gather.size, k]
        numbers the local experts of the tokens of all ranks of ``group``, -1 for those of other ranks. Returns [t, h],
        summed over ``group``."""
        experts = self.experts
        layers.run_pre_hooks(experts)
        names, build = moe_graph(gather, experts._activation, self.num_local_experts)
        runner = self.planned(
            ("experts", gather), names, build, recompute=experts.saved_anew(), groups={gather.symbol: group}
        )
        return runner(
            x, probs, local_map, experts.fc1, experts.fc2, sink=experts.sink_for({3: experts.fc1, 4: experts.fc2})
        )
