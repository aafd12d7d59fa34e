"""GPU architectures as data: planning and explaining for any of them needs no device."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re


@dataclasses.dataclass(frozen=True, slots=True)
class Arch:
    """One architecture. Rates and memory are the vendor's datasheet figures of a typical board (``board``), rates dense: they
    serve rooflines, predictions and MFU; measured ceilings live in records."""

    name: str
    capability: tuple[int, int] | None
    board: str
    copy_tb_s: float
    tflops: tuple[tuple[str, float], ...]
    smem_kib: int = 0
    sms: int = 0
    memory_gb: int = 0

    @property
    def is_gpu(self) -> bool:
        return self.capability is not None

    def peak_flops(self, dtype: str) -> float:
        """Dense FLOP/s of matrix products in ``dtype`` (float32 where the dtype has no rate of its own)."""
        rates = dict(self.tflops)
        return rates.get(dtype, rates["float32"]) * 1e12

    @property
    def copy_bytes_per_s(self) -> float:
        return self.copy_tb_s * 1e12

    def roofline(self, flops: float, nbytes: float, dtype: str) -> float:
        """Seconds that ``flops`` and ``nbytes`` take at least."""
        return max(flops / self.peak_flops(dtype), nbytes / self.copy_bytes_per_s)

    @staticmethod
    def parse(name: str) -> Arch:
        """``sm_90``, ``sm90``, ``90``, ``sm_90a``, ``cpu``, or a GPU's name (``H100``, ``RTX PRO 6000``); anything else is refused
        with the close names."""
        board = _plain(name)
        if board in GPU_NAMES:
            return ARCHS[GPU_NAMES[board]]
        key = name.lower().replace("sm", "").strip("_").rstrip("af")
        key = "cpu" if key == "cpu" or name.lower() == "cpu" else f"sm_{key}"
        if key not in ARCHS:
            close = difflib.get_close_matches(board, GPU_NAMES, 1, _CLOSE)
            if re.fullmatch(r"sm_\d+", key):  # a number; a GPU's name with sm_ before it is like any arch
                close = difflib.get_close_matches(key, ARCHS, 1, _CLOSE)
            hint = f"; did you mean {close[0].upper() if close[0] in GPU_NAMES else close[0]!r}?" if close else ""
            raise ValueError(f"arch = {name!r}: must be one of {', '.join(ARCHS)}, or a GPU's name such as H100{hint}")
        return ARCHS[key]

    @staticmethod
    def of_device(index: int) -> Arch:
        """The arch of a CUDA device, -1 for the CPU. A capability without a row of its own uses the closest older one
        of the same major version, and is refused where there is none."""
        return ARCHS["cpu"] if index < 0 else of_capability(_capability(index))


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    import torch

    return torch.cuda.get_device_capability(index)


@functools.cache
def of_capability(cap: tuple[int, int]) -> Arch:
    rows = [a for a in ARCHS.values() if a.capability and a.capability[0] == cap[0] and a.capability <= cap]
    if not rows:
        known = ", ".join(a for a in ARCHS if a != "cpu")
        raise ValueError(f"compute capability {cap[0]}.{cap[1]}: layerplan plans for {known}; use policy 'reference' there")
    return max(rows, key=lambda a: a.capability)


def _plain(name: str) -> str:
    """A GPU's name as the tables have it."""
    return re.sub(r"[\s_-]+|nvidia|geforce", "", name.lower())


def memory_gb(name: str) -> tuple[str, int] | None:
    """(board, GB) of what ``Arch.parse`` takes: of that GPU, or of the typical board of an arch; None for the CPU. ValueError as
    ``Arch.parse``."""
    arch, plain = Arch.parse(name), _plain(name)
    if plain in GPU_NAMES:
        return name, _BOARDS[arch.name][plain]
    return (arch.board, arch.memory_gb) if arch.is_gpu else None


def _arch(name, cap, board, copy, rates, smem, sms, memory) -> Arch:
    return Arch(name, cap, board, copy, tuple(rates.items()), smem, sms, memory)


ARCHS: dict[str, Arch] = {a.name: a for a in (
    _arch("sm_80", (8, 0), "A100-80GB-SXM", 2.04, {"bfloat16": 312, "float16": 312, "float32": 19.5, "float64": 9.7},
          163, 108, 80),
    _arch("sm_89", (8, 9), "L40S", 0.86, {"bfloat16": 362, "float16": 362, "float32": 91, "float64": 1.4, "float8": 733},
          99, 142, 48),
    _arch("sm_90", (9, 0), "H200-SXM", 4.8, {"bfloat16": 989, "float16": 989, "float32": 67, "float64": 34, "float8": 1979},
          227, 132, 141),
    _arch("sm_100", (10, 0), "B200", 8.0, {"bfloat16": 2250, "float16": 2250, "float32": 80, "float64": 40, "float8": 4500},
          227, 148, 180),
    _arch("sm_103", (10, 3), "B300", 8.0, {"bfloat16": 2250, "float16": 2250, "float32": 77, "float64": 1.3, "float8": 4500},
          227, 148, 270),
    _arch("sm_120", (12, 0), "RTX-PRO-6000", 1.79, {"bfloat16": 504, "float16": 504, "float32": 126, "float64": 2, "float8": 1008},
          99, 188, 96),
    Arch("cpu", None, "host", 0.02, (("float32", 0.1), ("bfloat16", 0.1), ("float16", 0.1), ("float64", 0.05))),
)}  # fmt: skip

# what people call a GPU, in lower case and without spaces and hyphens -> GB of the board that most have
_BOARDS: dict[str, dict[str, int]] = {
    "sm_80": {"a100": 80, "a800": 80, "a30": 24},
    "sm_89": {"l40s": 48, "l40": 48, "l20": 48, "l4": 24, "rtx6000ada": 48, "rtx4090": 24},
    "sm_90": {"h100": 80, "h200": 141, "h800": 80, "h20": 96, "gh200": 96},
    "sm_100": {"b100": 180, "b200": 180, "gb200": 186},
    "sm_103": {"b300": 270, "gb300": 279},
    "sm_120": {"rtxpro6000": 96, "rtx5090": 32},
}
_CLOSE = 0.8  # the least likeness of a slip: other GPUs' names are alike too (V100, H100)
GPU_NAMES: dict[str, str] = {name: arch for arch, boards in _BOARDS.items() for name in boards}
