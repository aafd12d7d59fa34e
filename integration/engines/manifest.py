"""Every engine as a row of strings. Importing this imports no engine, no torch and no library.

Ids are permanent: an engine that goes takes its id with it. ``archs`` and ``needs`` are checked before the engine's
module is imported, so that an absent package is a reason, not an error.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib

from .packages import absence, import_error

GPUS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")
ALL = (*GPUS, "cpu")
TMA = GPUS[2:]  # from sm_90 on
CHUNK_BYTES = 1 << 29  # of logits that loss/chunked makes at once: 2048 tokens of 128k classes, enough for products at full speed


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    id: str
    target: str  # module:class
    ops: tuple[str, ...]
    archs: tuple[str, ...]
    needs: tuple[str, ...] = ("torch",)
    note: str = ""
    trial: bool = False  # its cases have not all passed on a GPU: no policy chooses it, engine= and plan files may name it

    @property
    def is_reference(self) -> bool:
        return self.id.startswith("reference/")

    @property
    def module(self) -> str:
        """The module that holds the engine."""
        return self.target.partition(":")[0]

    def absent(self) -> str | None:
        """Why the engine cannot run in this environment, as far as that is known without importing anything; None where it can."""
        return next((why for n in self.needs if (why := absence(n)) is not None), None)

    def unusable(self) -> str | None:
        """Why the engine cannot run in this environment; None where it can. Imports its module, but not what that imports for a
        build: planning for a GPU elsewhere would take seconds."""
        return self.absent() or import_error(self.module)

    def load(self):
        """The engine object; imports its module."""
        return _load(self.target)


@functools.cache
def _load(target: str):
    module, _, cls = target.partition(":")
    return getattr(importlib.import_module(module), cls)()


_NORM = ("rms_norm", "rms_norm_bwd", "layer_norm", "layer_norm_bwd")
_GATES = tuple(f"{a}{b}" for a in ("swiglu", "geglu", "gelu", "squared_relu") for b in ("", "_bwd"))
_LOSS = ("cross_entropy", "cross_entropy_bwd")
_SHARDS = ("shard_targets", "stack_shard", "shard_loss")
_HEADS = ("split", "concat", "unflatten_heads", "flatten_heads", "expand_heads", "sum_heads")
_GROUPED = ("grouped_matmul", "grouped_matmul_dgrad", "grouped_matmul_wgrad")
_MOE = ("group_by_expert", "tokens_per_expert", "permute", "permute_bwd", "unpermute", "unpermute_bwd", "router", "router_bwd",
        "load_balancing_loss", "load_balancing_loss_bwd", "z_loss", "z_loss_bwd")  # fmt: skip
_K = "layerplan.kernels"
_QUACK = ("torch", "quack")
_OWN = ("torch", "tvm_ffi", "cutlass")  # own kernels: what compiles and loads them

MANIFEST: tuple[Entry, ...] = (
    Entry("linear/torch", f"{_K}.linear.torch:TorchLinear", ("linear", "linear_dgrad", "linear_wgrad"), ALL,
          note="torch's matmul (cuBLAS on a GPU); fp32 accumulation into main_grad through addmm.dtype_out"),
    Entry("linear/quack", f"{_K}.linear.quack:QuackLinear", ("linear", "linear_dgrad", "linear_wgrad"), TMA, _QUACK,
          note="quack-kernels; 16-bit operands, fp32 accumulation into main_grad in the epilogue"),
    Entry("linear_swiglu/quack", f"{_K}.linear.quack_swiglu:QuackLinearSwiglu",
          ("linear", "swiglu", "linear_dgrad", "swiglu_bwd"), TMA, _QUACK,
          note="quack-kernels; swiglu (where gate and up are not saved) and its gradient in the epilogue of the product before it"),
    Entry("grouped_matmul/torch", f"{_K}.linear.torch_grouped:TorchGroupedMatmul", _GROUPED, ("sm_90", "sm_100", "sm_103", "cpu"),
          note="torch's grouped product (CUTLASS, bfloat16); on a CPU a loop over the groups"),
    Entry("grouped_matmul/quack", f"{_K}.linear.quack_grouped:QuackGroupedMatmul", _GROUPED, ("sm_90", "sm_100", "sm_103"), _QUACK,
          note="quack-kernels; 16-bit operands, fp32 accumulation into main_grad in the epilogue"),
    Entry("grouped_matmul/deep_gemm", f"{_K}.linear.deep_gemm:DeepGemmGroupedMatmul", _GROUPED, ("sm_90", "sm_100", "sm_103"),
          ("torch", "deep_gemm"), note="DeepGEMM 2.6.1; bfloat16, groups of whole tiles (align=128); weight gradient from sm_100 on", trial=True),
    Entry("experts/quack", f"{_K}.linear.quack_experts:QuackExperts", (*_GROUPED[:2], "swiglu", "swiglu_bwd", "permute"),
          ("sm_90", "sm_100", "sm_103"), _QUACK,
          note="quack-kernels; swiglu (where gate and up are not saved), its gradient and the rows' weights in the grouped product's epilogue; rows gathered by it (inference)", trial=True),
    Entry("moe/torch", f"{_K}.moe.torch:TorchMoE", _MOE, ALL, note="torch's index ops; permute, unpermute and router without a host sync"),
    Entry("moe/cute", f"{_K}.moe.cute:CuteMoE", _MOE[:8], GPUS, _OWN,
          note="own kernels; rows read and written once, sums in slot order, slots sorted without atomics, router in one launch"),
    Entry("moe_quantize/cute", f"{_K}.moe.cute_quantize:CuteMoEQuantize", ("permute", "quantize"), GPUS, _OWN,
          note="own kernel: fp8 of a permute's rows in blocks of 1 x 128, which are not stored", trial=True),
    Entry("norm/torch", f"{_K}.norm.torch:TorchNorm", _NORM, ALL, note="native norms"),
    Entry("norm/quack", f"{_K}.norm.quack:QuackNorm", _NORM, GPUS, _QUACK,
          note="quack-kernels; float32 residuals fused, others added in front"),
    Entry("norm/cute", f"{_K}.norm.cute:CuteNorm", _NORM, GPUS, _OWN,
          note="own kernels; one pass with the residual sum in it, rows up to 32768, no atomics"),
    Entry("norm_quantize/cute", f"{_K}.norm.cute_quantize:CuteNormQuantize", ("rms_norm", "layer_norm", "quantize"), GPUS, _OWN,
          note="own kernels: fp8 of the norm's result, which is not stored; with the transposed copy two kernels"),
    Entry("attention/torch_cudnn", f"{_K}.attention.torch:CudnnAttention", ("sdpa", "sdpa_bwd"),
          ("sm_80", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120"), note="cuDNN SDPA"),
    Entry("attention/torch_flash", f"{_K}.attention.torch:FlashAttention", ("sdpa", "sdpa_bwd"), GPUS,
          note="FlashAttention-2 in torch; packed sequences, windows"),
    Entry("attention/fa4", f"{_K}.attention.fa4:Fa4Attention", ("sdpa", "sdpa_bwd"), GPUS, ("torch", "flash_attn.cute.cache_utils"),
          note="FlashAttention-4 (flash-attn-4 4.0.0b36), its kernels without its wrapper; packed sequences, windows, sinks, LSE gradient; backward from sm_90 on"),
    Entry("attention/fa4_deterministic", f"{_K}.attention.fa4:Fa4DeterministicAttention", ("sdpa", "sdpa_bwd"),
          ("sm_90", "sm_100", "sm_103"), ("torch", "flash_attn.cute.cache_utils"),
          note="the same with a backward whose reruns are bitwise equal"),
    Entry("attention/torch_cpu", f"{_K}.attention.torch:CpuAttention", ("sdpa", "sdpa_bwd"), ("cpu",),
          note="blocked CPU kernel"),
    Entry("layout/torch", f"{_K}.pointwise.torch:TorchLayout",
          ("qkv_split", "qkv_merge", *_HEADS, "zeros_like", "add", "row_sum", *_SHARDS), ALL,
          note="views, cat, add, sum; the few numbers a token of vocab-parallel cross entropy"),
    Entry("rope/quack", f"{_K}.rope.quack:QuackRope", ("rope",), GPUS, _QUACK, note="quack-kernels; without per-token positions"),
    Entry("rope/cute", f"{_K}.rope.cute:CuteRope", ("rope", "qkv_split", "qkv_merge", *_NORM), GPUS, _OWN,
          note="own kernels; with per-token positions, and in one pass with QKV split or merge and qk-norm"),
    Entry("activation/cute", f"{_K}.activation.cute:CuteSwiglu", ("swiglu", "swiglu_bwd"), GPUS, _OWN, note="own kernels; clamp and row weights, one pass each way"),
    Entry("swiglu_quantize/cute", f"{_K}.activation.cute:CuteSwigluQuantize", ("swiglu", "quantize"), GPUS, _OWN,
          note="own kernel: fp8 of the swiglu's result, transposed copy too"),
    Entry("quantize/cute", f"{_K}.quantize.cute:CuteQuantize", ("quantize", "dequantize"), GPUS, _OWN,
          note="own kernels: per tensor, 1 x 128 and MXFP8, with the transposed copy in the same pass"),
    Entry("loss/quack", f"{_K}.loss.quack:QuackCrossEntropy", _LOSS, GPUS, _QUACK, note="quack-kernels; up to 262144 classes"),
    Entry("loss/chunked", f"{_K}.loss.chunked:ChunkedLinearCrossEntropy", ("linear_cross_entropy", "linear_cross_entropy_bwd"), ALL,
          note="linear and cross entropy over chunks of tokens: cuBLAS and an engine for cross entropy, never all logits"),
    Entry("pointwise/inductor", f"{_K}.pointwise.inductor:InductorPointwise",
          ("add", "bias_dropout_add", "dropout_bwd", "rope", "qkv_split", "qkv_merge", *_HEADS, *_GATES, *_NORM, *_LOSS, *_SHARDS), ALL,
          ("torch", "triton"),
          note="one generated kernel per region signature"),
    Entry("reference/eager", f"{_K}.reference.eager:Reference", ("*",), ALL, note="plain PyTorch, float32 inside"),
)  # fmt: skip

BY_ID = {e.id: e for e in MANIFEST}
