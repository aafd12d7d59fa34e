"""The grouped products of DeepGEMM 2.6.1 as functions on a CPU: what its host code asserts, what its kernels write.

They stand in for the package ``deep_gemm``, with its signatures. A group begins at the next multiple of the tile's
height behind the end of the one before it, and whole tiles are written, as by the kernels: ends that are no such
multiples give wrong values here too."""

from __future__ import annotations

import dataclasses
import sys
import types

import torch

from layerplan.integration import ops
from layerplan.integration.engines.arch import ARCHS
from layerplan.integration.engines.manifest import BY_ID
from layerplan.integration.planner import cover, program, runner
from layerplan.kernels.linear.deep_gemm import DeepGemmGroupedMatmul

ID = "grouped_matmul/deep_gemm"


class Sm90(DeepGemmGroupedMatmul):
    """The engine asked as if for sm_90, while the plan is for a CPU."""

    arch = "sm_90"

    def match(self, region, arch):
        return super().match(region, ARCHS[self.arch])


class Sm100(Sm90):
    arch = "sm_100"


class Package(types.ModuleType):
    """``calls``: (function, arguments by name) of each call; ``tile``: what set_mk_alignment_for_contiguous_layout last
    set. ``computes``: False for tensors without contents."""

    def __init__(self, arch: str, computes: bool = True) -> None:
        super().__init__("deep_gemm")
        self.major, self.computes, self.tile, self.calls = ARCHS[arch].capability[0], computes, 128, []

    def get_mk_alignment_for_contiguous_layout(self) -> int:
        return self.tile

    def m_grouped_bf16_gemm_nt_contiguous(self, a, b, d, grouped_layout, compiled_dims="nk", use_psum_layout=False,
                                          ensure_zero_padding=True, expected_m_for_psum_layout=None):  # fmt: skip
        """d [m, n] = a [m, k] @ b[g] [n, k].T of the rows of each group g."""
        self._note("nt", a=a, b=b, d=d, grouped_layout=grouped_layout)
        assert a.stride(-1) == 1, "a must be K-major"
        self._product(a, b, d, grouped_layout, use_psum_layout)

    def m_grouped_bf16_gemm_nn_contiguous(self, a, b, d, grouped_layout, compiled_dims="nk", use_psum_layout=False,
                                          ensure_zero_padding=True) -> None:  # fmt: skip
        """d [m, n] = a [m, k] @ b[g] [k, n]."""
        self._note("nn", a=a, b=b, d=d, grouped_layout=grouped_layout)
        self._product(a, b.transpose(1, 2), d, grouped_layout, use_psum_layout)

    def k_grouped_bf16_gemm_tn_contiguous(self, a, b, d, ks_cpu, grouped_layout, c=None, compiled_dims="mn",
                                          use_psum_layout=False) -> None:  # fmt: skip
        """d[g] [m, n] = c[g] + a [k, m].T @ b [k, n] over the rows of group g."""
        self._note("tn", a=a, b=b, d=d, grouped_layout=grouped_layout, c=c, ks_cpu=ks_cpu)
        assert self.major == 10 and use_psum_layout and not ks_cpu, "elsewhere the row counts come from the host"
        assert c is not None and all(t.is_contiguous() for t in (a, b, c, d, grouped_layout))
        assert a.dtype == b.dtype == torch.bfloat16 and c.dtype == d.dtype == torch.float32
        assert d.shape == c.shape == (len(grouped_layout), a.shape[1], b.shape[1]) and len(a) == len(b)
        assert c.data_ptr() == d.data_ptr(), "another c is copied into d first"
        self._tma(a, b, d)
        for i, (begin, end) in self._groups(grouped_layout):
            d[i] += a[begin:end].float().t() @ b[begin:end].float()

    def _note(self, name: str, **arguments) -> None:
        self.calls.append((name, arguments))

    def _product(self, a, b, d, ends, psum) -> None:
        (m, k), (groups, n, _) = a.shape, b.shape
        assert psum and ends.is_contiguous() and ends.dtype == torch.int32 and ends.shape == (groups,)
        assert {t.dtype for t in (a, b, d)} == {torch.bfloat16} and b.shape[2] == k and d.shape == (m, n)
        assert k % 64 == 0 and b.stride(0) == n * k and 1 in b.stride()[1:] and d.stride(-1) == 1
        self._tma(a, b, d)
        for i, (begin, end) in self._groups(ends):
            rows = slice(begin, begin + -(-(end - begin) // self.tile) * self.tile)
            d[rows] = (a[rows].float() @ b[i].float().t()).to(d.dtype)

    def _tma(self, *tensors: torch.Tensor) -> None:
        for t in tensors:
            assert t.data_ptr() % 16 == 0 and all(s * t.itemsize % 16 == 0 for s in t.stride() if s != 1), "no TMA"
            assert t.numel(), "an empty product"

    def _groups(self, ends: torch.Tensor):
        begin = 0
        for i, end in enumerate(ends.tolist() if self.computes else ()):
            if end > begin:
                yield i, (begin, end)
            begin = -(-end // self.tile) * self.tile


def install(monkeypatch, arch: str) -> Package:
    """Put the double in the package's place and let the engine run on a CPU, as on ``arch`` (sm_90 or sm_100)."""
    package = Package(arch)
    for module, kept in ((ops, "_runners"), (runner, "_plans"), (program, "_compiled")):  # of another package, or arch
        monkeypatch.setattr(module, kept, {})
    monkeypatch.setitem(sys.modules, "deep_gemm", package)
    target = f"{__name__}:{'Sm90' if arch == 'sm_90' else 'Sm100'}"
    entry = dataclasses.replace(
        BY_ID[ID], target=target, archs=(*BY_ID[ID].archs, "cpu"), needs=("torch",), trial=False
    )
    monkeypatch.setitem(BY_ID, ID, entry)
    monkeypatch.setattr(cover, "MANIFEST", tuple(entry if e.id == ID else e for e in cover.MANIFEST))
    return package
