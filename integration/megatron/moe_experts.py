"""The experts of an MoE layer on grouped products: one parameter for each product of all local experts.

Tensors: x [rows, h] with the rows of local expert 0 first, then those of expert 1 and so on; fc1 [e, n, h], n = 2 f
where the activation is gated (gate first), fc2 [e, h, f]; f is moe_ffn_hidden_size over the experts' tensor-parallel
ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel.layers import (
    _initialize_affine_weight_cpu,
    _initialize_affine_weight_gpu,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint
from megatron.core.utils import get_pg_rank, get_pg_size

from ...modules.moe import experts_graph
from ..planner.runner import readable
from ..planner.shapes import dtype_name
from . import layers
from .config_map import raise_for, recomputes
from .moe_config import EXPERTS_FIELDS

_EXTRA = "_extra_state"


def _check_counts(counts: Any, experts: int, rows: int) -> None:
    """Refuses ``tokens_per_expert`` that are not the rows of each of ``experts``."""
    name = "GroupedExperts: tokens_per_expert"
    if not isinstance(counts, torch.Tensor):
        raise TypeError(
            f"{name} = {type(counts).__name__}: must be a torch.Tensor of integers [{experts}]; pass torch.tensor(...)"
        )
    if counts.dtype == torch.bool or counts.is_floating_point() or counts.is_complex():
        raise TypeError(
            f"{name} is {dtype_name(counts.dtype)}: must be integers, how many rows each expert has; pass int64"
        )
    if counts.shape != (experts,):
        raise ValueError(
            f"{name} {list(counts.shape)}: must be [{experts}], one count for each local expert; pass the counts of "
            "this rank's experts alone"
        )
    if not readable(counts):
        return
    values = counts.tolist()
    for i, count in enumerate(values):
        if count < 0:
            raise ValueError(f"{name}[{i}] = {count}: must not be negative; pass how many rows each expert has")
    if sum(values) != rows:
        raise ValueError(
            f"{name} sums to {sum(values)}: must sum to the {rows} rows of permuted_local_hidden_states; pass the "
            "counts that these rows were permuted by, not cumulative ends"
        )


class GroupedExperts(layers.PlannedLinear, MegatronModule):
    """The experts slot: grouped product, activation times the rows' probabilities, grouped product, as one graph.

    In Megatron's own MoELayer it serves all of Megatron's dispatchers; what they cost stays (``boundary``). In
    ``LayerplanMoELayer`` the layer's plan reads the weights and this module is never called.

    "moe_act" of recompute_modules is its save policy. Checkpoints hold one matrix for each expert under the names of
    Megatron's SequentialMLP and TEGroupedMLP: either reads what the other has written, with any number of
    expert-parallel ranks. Parameters start as SequentialMLP's would from the same generator.
    """

    boundary = (
        "Megatron's dispatcher: it copies token counts to the host in every layer, and permutes outside of the plan"
    )

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, *, pg_collection: Any = None, name: str | None = None
    ) -> None:
        super().__init__(config=config)
        raise_for(config, context="the experts slot", fields=EXPERTS_FIELDS)
        groups = pg_collection or get_default_pg_collection()
        self.ep_group, self.tp_group, self.dp_group = groups.ep, groups.expt_tp, groups.expt_dp
        self.num_local_experts, self._plan_name = num_local_experts, name or ""
        self._activation = layers.activation_of(config)
        self._glu = 2 if config.gated_linear_unit else 1
        hidden = config.moe_latent_size or config.hidden_size
        width = config.moe_ffn_hidden_size // get_pg_size(self.tp_group)
        make = {"dtype": config.params_dtype, "device": layers.device_of(config)}
        self.fc1 = torch.nn.Parameter(torch.empty(num_local_experts, self._glu * width, hidden, **make))
        self.fc2 = torch.nn.Parameter(torch.empty(num_local_experts, hidden, width, **make))
        own_groups = (
            config.expert_model_parallel_size > 1
            or config.expert_tensor_parallel_size != config.tensor_model_parallel_size
        )
        for weight, axis, stride in ((self.fc1, 1, self._glu), (self.fc2, 2, 1)):
            set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=axis, stride=stride)
            weight.allreduce = not own_groups  # otherwise reduced over the experts' data-parallel ranks
        if config.perform_initialization and not config.init_model_with_meta_device:
            self._initialize()
        self._prepare()

    def _initialize(self) -> None:
        c, size, rank = self.config, get_pg_size(self.tp_group), get_pg_rank(self.tp_group)
        for i in range(self.num_local_experts):
            for weight, axis, stride, method in (
                (self.fc1, 0, self._glu, c.init_method),
                (self.fc2, 1, 1, c.output_layer_init_method),
            ):
                own = weight.detach()[i]
                if not c.use_cpu_initialization:
                    _initialize_affine_weight_gpu(own, method, partition_dim=axis, stride=stride, is_expert=True)
                    continue
                whole = [n * size if k == axis else n for k, n in enumerate(own.shape)]
                _initialize_affine_weight_cpu(
                    own,
                    *whole,
                    own.shape[axis],
                    axis,
                    method,
                    stride=stride,
                    params_dtype=c.params_dtype,
                    rank=rank,
                    world_size=size,
                )

    def forward(
        self, permuted_local_hidden_states: torch.Tensor, tokens_per_expert: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """permuted_local_hidden_states [rows, h], tokens_per_expert [e] (integers, on the host or the device; they sum
        to rows), permuted_probs [rows] -> (output [rows, h], None), a partial sum where the experts are tensor
        parallel. TypeError or ValueError for other counts; on a GPU their values are read with LAYERPLAN_CHECK=1
        alone."""
        x = permuted_local_hidden_states
        _check_counts(tokens_per_expert, self.num_local_experts, x.shape[0])
        offsets = tokens_per_expert.cumsum(0).to(torch.int32).to(x.device, non_blocking=True)
        names, build = experts_graph(self._activation)
        runner = self.planned(("experts",), names, build, recompute=self.saved_anew())
        return runner(
            x, permuted_probs, offsets, self.fc1, self.fc2, sink=self.sink_for({3: self.fc1, 4: self.fc2})
        ), None

    def saved_anew(self) -> frozenset[str]:
        """The save policy that recompute_modules asks of the experts: ops whose outputs are rebuilt in the backward."""
        return frozenset({self._activation.op} if recomputes(self.config, "moe_act") else ())

    # -- distributed checkpoints ---------------------------------------------------------------------------------------

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """One [n, h] and one [h, f] matrix for each local expert, numbered through all ranks, in SequentialMLP's
        layout: with ``singleton_local_shards`` in ``metadata`` under a key of its own each, otherwise along an axis in
        front."""
        single, out = bool((metadata or {}).get("singleton_local_shards")), {}
        first, count = (
            get_pg_rank(self.ep_group) * self.num_local_experts,
            get_pg_size(self.ep_group) * self.num_local_experts,
        )
        replica = (0, 0, get_pg_rank(self.dp_group))
        for own, name, weight in (("fc1", "linear_fc1", self.fc1), ("fc2", "linear_fc2", self.fc2)):
            make, merge = self._matrices(name, tuple(sharded_offsets), first, count, single)
            out[f"{prefix}{own}"] = ShardedTensorFactory(f"{prefix}experts.{name}.weight", weight, make, merge, replica)
            for i in range(self.num_local_experts):  # SequentialMLP's linears read an object that is None
                key = f"{prefix}experts.{f'{first + i}.' if single else ''}{name}.{_EXTRA}"
                axis = () if single else ((len(sharded_offsets), first + i, count),)
                out[f"{prefix}{own}.{_EXTRA}{i}"] = make_sharded_object_for_checkpoint(
                    None, key, (*sharded_offsets, *axis), (0, get_pg_rank(self.tp_group), get_pg_rank(self.dp_group))
                )
        return out

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for key in [k for k in state_dict if k.startswith((f"{prefix}fc1.{_EXTRA}", f"{prefix}fc2.{_EXTRA}"))]:
            del state_dict[key]  # objects that other experts' linears read; here nothing does
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _matrices(
        self, name: str, offsets: tuple, first: int, count: int, single: bool
    ) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """What makes the list of sharded matrices of one parameter, or of a tensor of its shape that the optimiser
        keeps, and what makes the tensor of the list: for each expert gate and up, or the one matrix that there is."""
        size, rank = get_pg_size(self.tp_group), get_pg_rank(self.tp_group)
        axis, parts = (0, self._glu) if name == "linear_fc1" else (1, 1)

        @torch.no_grad()
        def make(key: str, data: torch.Tensor, replica_id: Any, flattened_range: Any) -> list[ShardedTensor]:
            if flattened_range is not None:
                raise ValueError(
                    f"{key}: flattened_range = {flattened_range}: must be None; save with "
                    "distrib_optim_sharding_type = 'fully_reshardable'"
                )
            made = []
            for i, matrix in enumerate(data):
                lead = offsets if single else (*offsets, (len(offsets), first + i, count))
                own_key = f"{key.removesuffix(f'{name}.weight')}{first + i}.{name}.weight" if single else key
                for k, part in enumerate(matrix.chunk(parts, axis)):
                    shard = (rank, size) if single else (k * size + rank, parts * size)
                    part_key = f"{own_key}_{'wv'[k]}" if single and parts == 2 else own_key
                    made.append(
                        ShardedTensor.from_rank_offsets(
                            part_key,
                            part,
                            *lead,
                            (axis + len(lead), *shard),
                            replica_id=replica_id,
                            prepend_axis_num=len(lead),
                        )
                    )
            return made

        @torch.no_grad()
        def merge(loaded: list[torch.Tensor]) -> torch.Tensor:
            return torch.stack([torch.cat(loaded[i : i + parts], axis) for i in range(0, len(loaded), parts)])

        return make, merge
