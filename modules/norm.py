"""RMSNorm and LayerNorm without a framework."""

from __future__ import annotations

import torch

from .base import PlannedModule
from .graphs import NormAttrs, norm_graph


class Norm(PlannedModule):
    """RMSNorm or LayerNorm over the last dim of size ``hidden_size``.

    ``forward(x)`` returns y; ``forward(x, residual)`` returns (y, x + residual). The formula is that of
    ``layerplan.ops.rms_norm``. ``kind``: ``"rms_norm"`` or ``"layer_norm"`` (which has a bias).
    """

    def __init__(self, hidden_size: int, *, kind: str = "rms_norm", eps: float = 1e-5, zero_centered: bool = False,
                 dtype: torch.dtype | None = None, device: torch.device | str | int | None = None) -> None:  # fmt: skip
        super().__init__()
        if kind not in ("rms_norm", "layer_norm"):
            raise ValueError(f"Norm kind = {kind!r}: must be rms_norm or layer_norm")
        self.attrs = NormAttrs(kind, eps, zero_centered)
        fill = torch.zeros if zero_centered else torch.ones
        self.weight = torch.nn.Parameter(fill(hidden_size, dtype=dtype, device=device))
        if kind == "layer_norm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=dtype, device=device))
        else:
            self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None):
        if self.bias is None:
            if residual is None:
                return self.planned(("plain",), ("x", "weight"), norm_graph(self.attrs, ("x", "weight")))(x, self.weight)
            names, tensors = ("x", "weight", "residual"), (x, self.weight, residual)
        elif residual is None:
            names, tensors = ("x", "weight", "bias"), (x, self.weight, self.bias)
        else:
            names, tensors = ("x", "weight", "bias", "residual"), (x, self.weight, self.bias, residual)
        return self.planned(names, names, norm_graph(self.attrs, names))(*tensors)
