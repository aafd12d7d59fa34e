"""Megatron's layer slots on plans: Megatron's parameters, initialisation and checkpoint names, our forward and backward.

Tensors are Megatron's: hidden states [s(/tp), b, h], attention [s, b, heads, head_dim] or packed [t, heads, head_dim].
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import layers as tp_layers
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_data_parallel_rng_tracker_name
from megatron.core.transformer import mlp as megatron_mlp
from megatron.core.transformer import multi_latent_attention as mla
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from megatron.core.utils import get_pg_size

from ...modules.base import PlannedModule
from ...modules.graphs import (
    Activation,
    NormAttrs,
    ResidualAdds,
    TensorParallel,
    attention_graph,
    linear_graph,
    mlp_from_norm,
    mlp_graph,
)
from ...modules.norm import Norm as BaseNorm
from ..ops import check_longest
from ..planner.runner import WeightGrads
from ..planner.shapes import bucket
from .config_map import raise_for, recomputes


def device_of(config: TransformerConfig) -> torch.device | int | None:
    """Where Megatron wants parameters to be made."""
    if config.init_model_with_meta_device:
        return torch.device("meta")
    return None if config.use_cpu_initialization else torch.cuda.current_device()


def norm_attrs(config: TransformerConfig, eps: float | None = None) -> NormAttrs:
    """The table's norm that equals Megatron's. Raises ConfigError for a normalization that there is not."""
    raise_for(config, context="the norm slot", fields={"normalization"})
    op = {"RMSNorm": "rms_norm", "LayerNorm": "layer_norm"}[config.normalization]
    return NormAttrs(op, config.layernorm_epsilon if eps is None else eps, config.layernorm_zero_centered_gamma)


def activation_of(config: TransformerConfig) -> Activation:
    """The table's activation that equals Megatron's, with Megatron's approximations: its fused gelus use tanh. Raises ConfigError
    for one that there is not."""
    raise_for(config, context="the MLP slot",
              fields={"activation_func", "gated_linear_unit", "activation_func_clamp_value", "glu_linear_offset"})  # fmt: skip
    f, tanh = config.activation_func, ("approximate", "tanh" if config.bias_activation_fusion else "none")
    if config.gated_linear_unit:
        clamp = ("clamp", config.activation_func_clamp_value)
        return Activation("swiglu", (clamp,)) if f is F.silu else Activation("geglu", (clamp, tanh))
    return Activation("gelu", (tanh,)) if f is F.gelu else Activation("squared_relu")


def run_pre_hooks(*children: torch.nn.Module) -> None:
    """DDP gathers parameters in these hooks; a plan reads the weights of children that it never calls."""
    for child in children:
        for hook in tuple(child._forward_pre_hooks.values()):
            hook(child, ())


def positions_in_segments(cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """The position [tokens] of every packed token in its own sequence; 0 for tokens behind the last one."""
    index = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    start = cu_seqlens[torch.searchsorted(cu_seqlens, index, right=True) - 1]
    return torch.where(index < cu_seqlens[-1], index - start, 0)


class Norm(BaseNorm):
    """The norm slot. Returns a plain y, never a residual: Megatron frees both before it reads the residual when the norm
    is recomputed (transformer_layer.py of 0.19.2).

    Which norm it is, ``config`` says; ``normalization`` and ``zero_centered_gamma`` may repeat it. ``persist_layer_norm`` chooses
    among Megatron's kernels of one result: the planner does that here.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, persist_layer_norm: bool = False,
                 zero_centered_gamma: bool | None = None, normalization: str | None = None) -> None:  # fmt: skip
        del persist_layer_norm
        attrs = norm_attrs(config, eps)
        for name, given, said in (("zero_centered_gamma", zero_centered_gamma, config.layernorm_zero_centered_gamma),
                                  ("normalization", normalization, config.normalization)):  # fmt: skip
            if given is not None and given != said:
                raise ValueError(f"{name} = {given!r}: the config says {said!r}; leave it out, or set it in the config")
        super().__init__(hidden_size, kind=attrs.op, eps=eps, zero_centered=attrs.zero_centered, dtype=config.params_dtype,
                         device=device_of(config))  # fmt: skip
        self._deterministic = config.deterministic_mode
        for p in self.parameters():
            p.sequence_parallel = config.sequence_parallel  # summed over TP by finalize_model_grads

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.fill_(0.0 if self.attrs.zero_centered else 1.0)
            if self.bias is not None:
                self.bias.zero_()


class PlannedLinear(PlannedModule):
    """What the linear slots share, the experts' too. Megatron's own classes own parameters and checkpoints; this runs the plan."""

    def _prepare(self) -> None:
        self._deterministic = self.config.deterministic_mode
        self._sinks: dict[tuple[int, ...], WeightGrads] = {}
        self._post_wgrad_hooks: list[Any] = []
        if getattr(self.config, "delay_wgrad_compute", False):
            for p in self.parameters(recurse=False):
                if p.dim() >= 2:
                    p.skip_backward_post_hook = True

    def _parallel(self) -> TensorParallel:
        if getattr(self, "explicit_expert_comm", False):
            return TensorParallel()
        size = get_pg_size(self.tp_group)
        return TensorParallel(size, size > 1 and bool(self.sequence_parallel))

    def sink_for(self, params: dict[int, torch.nn.Parameter]) -> WeightGrads | None:
        """Where the weight gradients go; None where they are returned like any other."""
        fuse, defer = bool(self.config.gradient_accumulation_fusion), bool(getattr(self.config, "delay_wgrad_compute", False))
        if not (fuse or defer):
            return None
        key = tuple(id(p) for p in params.values())
        sink = self._sinks.get(key)
        if sink is None:
            sink = self._sinks[key] = WeightGrads(params, fuse=fuse, defer=defer)
        return sink

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Any) -> None:
        self._post_wgrad_hooks.append(hook)

    def backward_dw(self, *others: PlannedLinear) -> None:
        """The deferred weight gradients of one micro-batch, then the hooks that reduce them. ``others`` are linears whose
        weights are in one plan with this one's, which holds the sink of all of them."""
        done = [sink.run_deferred() for sink in self._sinks.values()]
        if any(done):
            for linear in (self, *others):
                for hook in linear._post_wgrad_hooks:
                    hook()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in super().__getstate__().items() if k != "_sinks"} | {"_sinks": {}}


def _unfused(config: TransformerConfig) -> TransformerConfig:
    """Megatron's constructors refuse gradient_accumulation_fusion without Apex's extension; ours needs none."""
    if not config.gradient_accumulation_fusion:
        return config
    plain = copy.copy(config)
    plain.gradient_accumulation_fusion = False
    return plain


class ColumnParallelLinear(PlannedLinear, tp_layers.ColumnParallelLinear):
    """The column-parallel slot: [all-gather | copy] and product; in backward the all-gather of the input, the data
    gradient and its reduce-scatter run beside the weight gradient."""

    _norm: NormAttrs | None = None

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=_unfused(config), **kwargs)
        self.config, self.gradient_accumulation_fusion = config, config.gradient_accumulation_fusion
        self._plan_name = kwargs.get("name") or ""
        self._prepare()

    def forward(self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None):
        """input_ [..., input_size] -> (output [..., output_size / tp], bias or None)."""
        own = weight is None
        weight = self.weight if own else weight
        if weight is None:
            raise RuntimeError("weight: must be given where skip_weight_param_allocation is set")
        bias = None if self.skip_bias_add else self.bias
        tp = self._parallel()
        norm_bias = getattr(self, "layer_norm_bias", None)
        names, build = linear_graph(tp, column=True, bias=bias is not None, norm=self._norm, norm_bias=norm_bias is not None)
        tensors = [input_, weight, *([bias] if bias is not None else []), *([self.layer_norm_weight] if self._norm else []),
                   *([norm_bias] if norm_bias is not None else [])]  # fmt: skip
        runner = self.planned(("column", tp, bias is not None), names, build, recompute=self._recompute(tp), groups={tp.symbol: self.tp_group})
        output = runner(*tensors, sink=self.sink_for({1: weight}) if own else None)
        gather = self.gather_output if runtime_gather_output is None else runtime_gather_output
        if gather:
            output = gather_from_tensor_model_parallel_region(output, group=self.tp_group)
        return output, self.bias if self.skip_bias_add else None

    def _recompute(self, tp: TensorParallel) -> frozenset[str]:
        # the gathered input is gathered again in backward, as Megatron does: only the shard is kept
        again = {"all_gather"} if tp.sequence else set()
        if self._norm is not None and recomputes(self.config, "layernorm"):
            again.add(self._norm.op)
        return frozenset(again)


class LayerNormColumnParallelLinear(ColumnParallelLinear):
    """The fused slot: norm and column-parallel linear in one graph. It owns ``layer_norm_weight`` (and ``_bias``), whose
    checkpoint names are the ones that Megatron's local layers write too. Recompute of "layernorm" is its save policy."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self._norm = norm_attrs(config)
        make = {"dtype": config.params_dtype, "device": device_of(config)}
        fill = torch.zeros if self._norm.zero_centered else torch.ones
        self.layer_norm_weight = torch.nn.Parameter(fill(input_size, **make))
        self.layer_norm_bias = None
        if self._norm.op == "layer_norm":
            self.layer_norm_bias = torch.nn.Parameter(torch.zeros(input_size, **make))
        for p in (self.layer_norm_weight, self.layer_norm_bias):
            if p is not None:
                p.sequence_parallel = config.sequence_parallel


class RowParallelLinear(PlannedLinear, tp_layers.RowParallelLinear):
    """The row-parallel slot: product and [reduce-scatter | all-reduce]."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=_unfused(config), **kwargs)
        self.config, self.gradient_accumulation_fusion = config, config.gradient_accumulation_fusion
        self._plan_name = kwargs.get("name") or ""
        if not self.input_is_parallel:
            raise ValueError("input_is_parallel = False: the row-parallel slot takes a sharded input; use ColumnParallelLinear's output")
        self._prepare()

    def forward(self, input_: torch.Tensor):
        """input_ [..., input_size / tp] -> (output [..., output_size], bias or None)."""
        tp = self._parallel()
        names, build = linear_graph(tp, column=False, bias=False)
        runner = self.planned(("row", tp), names, build, groups={tp.symbol: self.tp_group})
        output = runner(input_, self.weight, sink=self.sink_for({1: self.weight}))
        if self.skip_bias_add:
            return output, self.bias
        return (output if self.bias is None else output + self.bias), None


class _AnswersToTELinear(type):
    """MLA asks ``cls in [TELinear]`` to find the linears that it must build as duplicated ones
    (multi_latent_attention.py of 0.19.2); a list's ``in`` compares with ==."""

    def __eq__(cls, other: object) -> bool:
        return other is cls or (cls.__name__ == "DuplicatedLinear" and other is mla.TELinear)

    __hash__ = type.__hash__


class DuplicatedLinear(PlannedLinear, MegatronModule, metaclass=_AnswersToTELinear):
    """A linear whose weight is the same on every tensor-parallel rank (MLA's down projections).

    ``tp_comm_buffer_name`` names a buffer of tp_comm_overlap, which the config map refuses: nothing here reads it.
    """

    def __init__(self, input_size: int, output_size: int, *, parallel_mode: str | None = None, config: TransformerConfig,
                 init_method: Any, bias: bool = False, skip_bias_add: bool = False, skip_weight_param_allocation: bool = False,
                 tp_comm_buffer_name: str | None = None, is_expert: bool = False, symmetric_ar_type: str | None = None,
                 tp_group: Any = None, name: str | None = None, gtp_remat_group: Any = None) -> None:  # fmt: skip
        super().__init__(config=config)
        del tp_comm_buffer_name
        problems = []
        for argument, value in (("symmetric_ar_type", symmetric_ar_type), ("gtp_remat_group", gtp_remat_group)):
            if value is not None:
                problems.append(f"{argument} = {value!r}: must be None; a duplicated linear has no collective")
        if parallel_mode not in ("duplicated", None):
            problems.append(f"parallel_mode = {parallel_mode!r}: must be 'duplicated'; use the column- or row-parallel slot")
        if is_expert or skip_weight_param_allocation:
            problems.append("is_expert and skip_weight_param_allocation: a duplicated linear takes neither")
        if problems:
            raise ValueError("; ".join(problems))
        self.skip_bias_add, self.sequence_parallel, self.tp_group = skip_bias_add, False, tp_group
        self._plan_name = name or ""
        make = {"dtype": config.params_dtype, "device": device_of(config)}
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, **make))
        if config.perform_initialization:
            with get_cuda_rng_tracker().fork(get_data_parallel_rng_tracker_name()):  # equal values on every TP rank
                init_method(self.weight)
        self.register_parameter("bias", torch.nn.Parameter(torch.zeros(output_size, **make)) if bias else None)
        for p in self.parameters():
            p.allreduce, p.tensor_model_parallel = True, False
            p.sequence_parallel = config.sequence_parallel  # gradients are summed over TP where the tokens are sharded
        self._prepare()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x [..., input_size] in the weight's dtype -> (output [..., output_size], and the bias [output_size] where it is left to
        the caller, else None)."""
        bias = None if self.skip_bias_add else self.bias
        names, build = linear_graph(TensorParallel(), column=True, bias=bias is not None)
        runner = self.planned(("duplicated", bias is not None), names, build)
        y = runner(x, self.weight, *([bias] if bias is not None else []), sink=self.sink_for({1: self.weight}))
        return y, self.bias if self.skip_bias_add else None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None):
        tp_group = self.tp_group or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"]).tp
        return make_sharded_tensors_for_checkpoint(self.state_dict(prefix="", keep_vars=True), prefix, None, sharded_offsets,
                                                   tp_group=tp_group, dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"])  # fmt: skip


class CoreAttention(PlannedModule, MegatronModule):
    """The core-attention slot: grouped heads, causal and sliding windows, sinks, packed sequences, MLA's head dims.

    ``cp_comm_type`` is of context parallelism, which is refused; ``attention_type`` ("self", "cross") changes nothing here.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, attn_mask_type: AttnMaskType, attention_type: str,
                 attention_dropout: float | None = None, softmax_scale: float | None = None, k_channels: int | None = None,
                 v_channels: int | None = None, cp_comm_type: str | None = None, pg_collection: Any = None) -> None:  # fmt: skip
        super().__init__(config=config)
        del attention_type, cp_comm_type
        raise_for(config, context="the core-attention slot", fields={"context_parallel_size"})
        self._deterministic = config.deterministic_mode
        self.layer_number, self.attn_mask_type = max(1, layer_number), attn_mask_type
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"])
        self.tp_group = groups.tp
        self.heads = config.num_attention_heads // get_pg_size(self.tp_group)
        self.softmax_scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(k_channels or config.kv_channels)
        if config.apply_query_key_layer_scaling:
            self.softmax_scale /= self.layer_number
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        left, right = config.window_size if windowed else (-1, -1)
        self.window = (None if left < 0 else left, None if right < 0 else right)
        self.hidden_size_per_attention_head_v = v_channels or config.kv_channels
        self.current_max_attn_logits = None  # read by qk-clip, which the config map refuses
        self.softmax_offset = None
        if config.softmax_type != "vanilla":
            self._make_sink(config)

    def _make_sink(self, config: TransformerConfig) -> None:
        sink = torch.zeros(self.heads, dtype=config.params_dtype, device=device_of(config))
        if config.softmax_type != "learnable":
            self.softmax_offset = sink  # off-by-one: a constant logit of 0
            return
        self.softmax_offset = torch.nn.Parameter(sink)
        self.softmax_offset.tensor_model_parallel, self.softmax_offset.partition_dim = True, 0
        self.softmax_offset.partition_stride = 1
        if config.perform_initialization:
            with get_cuda_rng_tracker().fork():
                config.init_method(self.softmax_offset)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
                attn_mask_type: AttnMaskType | None = None, attention_bias: torch.Tensor | None = None,
                packed_seq_params: Any = None) -> torch.Tensor:  # fmt: skip
        """query [s, b, hq, d], key, value [s, b, hk, d] -> [s, b, hq * dv]; packed [t, ...] -> [t, hq * dv]."""
        if attention_bias is not None:
            raise ValueError("attention_bias: must be None; this core attention adds no bias to the logits")
        kind = attn_mask_type if attn_mask_type is not None else self.attn_mask_type
        optional, attrs = self.arguments(query.device, attention_mask, kind, packed_seq_params)
        if kind == AttnMaskType.no_mask and self.window != (None, None) and query.shape[0] == 1 and attrs["layout"] != "thd":
            attrs["causal"] = True  # decoding one token: the window ends at it
        inputs = {"q": query, "k": key, "v": value}
        if attrs["layout"] == "thd":
            inputs = {n: t.squeeze(1) if t.dim() == 4 else t for n, t in inputs.items()}  # [t, 1, heads, d]
        inputs |= optional
        names = tuple(inputs)
        out = self.planned((names, tuple(sorted(attrs.items()))), names, attention_graph(names, attrs))(*inputs.values())
        return out.reshape(*out.shape[:-2], -1)

    def arguments(self, device: torch.device, attention_mask: torch.Tensor | None, kind: AttnMaskType,
                  packed: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:  # fmt: skip
        """The optional ports of an sdpa node with their tensors, and its attributes. Draws the seed of the dropout."""
        inputs: dict[str, torch.Tensor] = {}
        attrs: dict[str, Any] = {"scale": self.softmax_scale, "window": self.window, "layout": "sbhd"}
        attrs["causal"] = kind in (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right)
        if packed is not None and packed.qkv_format == "thd":
            self._pack(packed, inputs, attrs)
        elif kind in (AttnMaskType.padding, AttnMaskType.padding_causal, AttnMaskType.arbitrary) and attention_mask is not None:
            inputs["mask"] = attention_mask
        if self.softmax_offset is not None:
            inputs["sink"] = self.softmax_offset
        if self.training and self.dropout > 0:
            # different on every tensor-parallel rank, the same in recompute: with sequence parallel Megatron's block has set the
            # tracker's generator already, and a fork within draws other numbers when a checkpoint runs this again
            with contextlib.nullcontext() if self.config.sequence_parallel else get_cuda_rng_tracker().fork():
                rng = torch.randint(0, 2**62, (2,), dtype=torch.int64, device=device)
            attrs["dropout"] = self.dropout
            inputs["seed"], inputs["offset"] = rng[:1], rng[1:]
        return inputs, attrs

    def _pack(self, packed: Any, inputs: dict[str, torch.Tensor], attrs: dict[str, Any]) -> None:
        for side, name in (("q", "q"), ("k", "kv")):
            real, padded = getattr(packed, f"cu_seqlens_{name}"), getattr(packed, f"cu_seqlens_{name}_padded")
            if padded is not None and not attrs["causal"]:
                raise ValueError(f"cu_seqlens_{name}_padded: padding is hidden by the causal mask only; pass unpadded sequences")
            inputs[f"cu_seqlens_{side}"] = real if padded is None else padded
            longest = getattr(packed, f"max_seqlen_{name}")
            if longest:
                check_longest({side: (inputs[f"cu_seqlens_{side}"], int(longest))})
            attrs[f"max_seqlen_{side}"] = bucket(int(longest)) if longest else None
        attrs["layout"] = "thd"

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None):
        state = self.state_dict(prefix="", keep_vars=True) if isinstance(self.softmax_offset, torch.nn.Parameter) else {}
        return make_sharded_tensors_for_checkpoint(state, prefix, {"softmax_offset": 0}, sharded_offsets, tp_group=self.tp_group,
                                                   dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"])  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Residual:
    """The residual stream [s(/tp), b, h] that a layer hands to its MLP with the attention's output, that output's bias [h] if
    it is not added yet, and the probability with which both of the layer's residual adds drop elements."""

    stream: torch.Tensor
    bias: torch.Tensor | None
    dropout: float


class MLP(PlannedModule, megatron_mlp.MLP):
    """fc1, activation and fc2 as one graph, with the norm in front of fc1 where the slot holds the fused linear, and with the
    layer's two residual adds where the layer hands over its residual stream (``LayerplanTransformerLayer``).

    What the backward keeps is a save policy: "layernorm" and "moe_act" of recompute_modules rebuild the norm and the
    activation, and in a plan with the residual adds "mlp" rebuilds all that stands between them."""

    boundary = "bias of fc2, dropout and residual add behind it"

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._plan_name, self._deterministic = kwargs.get("name") or "", config.deterministic_mode
        self._activation = activation_of(config)
        for name, kind in (("linear_fc1", ColumnParallelLinear), ("linear_fc2", RowParallelLinear)):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name} = {type(getattr(self, name)).__name__}: this MLP runs both linears in one plan and needs "
                                 "layerplan's; use Megatron's MLP for others")  # fmt: skip
            getattr(self, name).run_by_parent()

    def forward(self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, *,
                padding_mask: torch.Tensor | None = None, residual: Residual | None = None):  # fmt: skip
        """hidden_states [s(/tp), b, h] -> (output [s(/tp), b, h], bias of fc2 or None). ``per_token_scale`` [tokens].
        ``padding_mask`` is what a layer passes to every MLP: routers read it, a dense one runs each token by itself. With
        ``residual`` hidden_states is the attention's output, and the result (the residual stream behind the layer, None).
        Raises ValueError for ``residual`` together with ``per_token_scale``."""
        del padding_mask
        if residual is not None and per_token_scale is not None:
            raise ValueError("per_token_scale: must be None with residual; a scaled MLP is an expert's, and its layer adds the "
                             "residual itself")  # fmt: skip
        fc1, fc2 = self.linear_fc1, self.linear_fc2
        run_pre_hooks(fc1, fc2)
        tp, norm = fc1._parallel(), fc1._norm
        norm_bias = getattr(fc1, "layer_norm_bias", None)
        adds, of_adds = self._residual_adds(residual)
        names, build = mlp_graph(tp, self._activation, bias=fc1.bias is not None, row_weight=per_token_scale is not None,
                                 norm=norm, norm_bias=norm_bias is not None, adds=adds)  # fmt: skip
        optional = (fc1.bias, per_token_scale, fc1.layer_norm_weight if norm else None, norm_bias, *of_adds)
        again = set(fc1._recompute(tp))
        if recomputes(self.config, "moe_act"):
            again.add(self._activation.op)
        if adds is not None and recomputes(self.config, "mlp"):  # otherwise the layer's own checkpoint around this call
            again |= mlp_from_norm(norm, self._activation)
        runner = self.planned((names, tp, adds), names, build, recompute=frozenset(again), groups={tp.symbol: fc1.tp_group})
        sink = fc1.sink_for({1: fc1.weight, 2: fc2.weight})
        output = runner(hidden_states, fc1.weight, fc2.weight, *(t for t in optional if t is not None), sink=sink)
        bias = fc2.bias if adds is None else None
        if per_token_scale is not None and bias is not None:
            output, bias = output + bias.unsqueeze(0) * per_token_scale.unsqueeze(-1), None
        return output, bias

    def _residual_adds(self, residual: Residual | None) -> tuple[ResidualAdds | None, tuple[torch.Tensor | None, ...]]:
        """The residual adds of the graph and their inputs in order. Draws the seeds of the two dropouts from the generator that is
        current, as Megatron's own dropout does: without sequence parallel the tensor-parallel ranks share it, with it
        Megatron's block has set the tracker's, which differs between them."""
        if residual is None:
            return None, ()
        output_bias, dropout = self.linear_fc2.bias, residual.dropout if self.training else 0.0
        seeds: tuple[torch.Tensor, ...] = ()
        if dropout > 0:
            seeds = torch.randint(0, 2**62, (4,), dtype=torch.int64, device=residual.stream.device).split(1)
        return ResidualAdds(residual.bias is not None, output_bias is not None, dropout), (residual.stream, residual.bias, output_bias, *seeds)

    def backward_dw(self) -> None:
        self.linear_fc1.backward_dw(self.linear_fc2)
