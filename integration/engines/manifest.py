"""Every engine as a row of strings. Importing this imports no engine, no torch and no library.

Ids are permanent: an engine that goes takes its id with it. ``archs`` and ``needs`` are checked before the engine's
module is imported, so that an absent package is a reason, not an error.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util

GPUS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")
ALL = (*GPUS, "cpu")


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    id: str
    target: str  # module:class
    ops: tuple[str, ...]
    archs: tuple[str, ...]
    needs: tuple[str, ...] = ("torch",)
    note: str = ""

    @property
    def is_reference(self) -> bool:
        return self.id.startswith("reference/")

    def missing_package(self) -> str | None:
        return next((n for n in self.needs if not _installed(n)), None)

    def load(self):
        """The engine object; imports its module."""
        return _load(self.target)


@functools.cache
def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


@functools.cache
def _load(target: str):
    module, _, cls = target.partition(":")
    return getattr(importlib.import_module(module), cls)()


_NORM = ("rms_norm", "rms_norm_bwd", "layer_norm", "layer_norm_bwd")
_GATES = tuple(f"{a}{b}" for a in ("swiglu", "geglu", "gelu", "squared_relu") for b in ("", "_bwd"))
_LOSS = ("cross_entropy", "cross_entropy_bwd")
_K = "layerplan.kernels"

MANIFEST: tuple[Entry, ...] = (
    Entry("linear/torch", f"{_K}.linear.torch:TorchLinear", ("linear", "linear_dgrad", "linear_wgrad"), ALL,
          note="cuBLAS; fp32 accumulation into main_grad through addmm.dtype_out"),
    Entry("norm/torch", f"{_K}.norm.torch:TorchNorm", _NORM, ALL, note="native norms"),
    Entry("attention/torch_cudnn", f"{_K}.attention.torch:CudnnAttention", ("sdpa", "sdpa_bwd"),
          ("sm_80", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120"), note="cuDNN SDPA"),
    Entry("attention/torch_flash", f"{_K}.attention.torch:FlashAttention", ("sdpa", "sdpa_bwd"), GPUS,
          note="FlashAttention-2 in torch; packed sequences, windows"),
    Entry("attention/torch_cpu", f"{_K}.attention.torch:CpuAttention", ("sdpa", "sdpa_bwd"), ("cpu",),
          note="blocked CPU kernel"),
    Entry("layout/torch", f"{_K}.pointwise.torch:TorchLayout",
          ("qkv_split", "qkv_merge", "zeros_like", "add", "row_sum"), ALL, note="views, cat, add, sum"),
    Entry("pointwise/inductor", f"{_K}.pointwise.inductor:InductorPointwise",
          ("add", "bias_dropout_add", "dropout_bwd", "rope", *_GATES, *_NORM, *_LOSS), ALL, ("torch", "triton"),
          note="one generated kernel per region signature"),
    Entry("reference/eager", f"{_K}.reference.eager:Reference", ("*",), ALL, note="plain PyTorch, float32 inside"),
)  # fmt: skip

BY_ID = {e.id: e for e in MANIFEST}
