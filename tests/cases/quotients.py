"""The quotients that scales of 1 x 128 blocks are (``kernels/common/fp8.py``), beside IEEE division, for every
reciprocal that the instruction may give: within 2^-23 of the exact one.

``python -m tests.cases.quotients`` tries mantissas that 16-bit numbers have, random ones and the last ones, at
exponents at which scales or their inverses are ordinary, clamped or denormal; with ``--all`` every mantissa."""

from __future__ import annotations

import sys
import types

import numpy as np

from . import simt

_CHUNK = 1 << 20
_MAX = {"float8_e4m3fn": (448.0, 8), "float8_e5m2": (57344.0, 15)}


def mantissas(every: bool) -> np.ndarray:
    if every:
        return np.arange(1 << 23, dtype=np.uint32)
    random = np.random.default_rng(0).integers(0, 1 << 23, 60000)
    near = [0, 0x600000, 0x1FFFFF, 0x5FFFFF, (1 << 23) - 1]
    edges = [e + k for e in near for k in range(-64, 65)]
    return np.unique(np.concatenate([np.arange(1024) << 13, random, edges]) & 0x7FFFFF).astype(np.uint32)


def off(ulps: int):
    """A reciprocal so far off, where that is within 2^-23; exact elsewhere."""

    def reciprocal(a):
        a = np.asarray(a, np.float32)
        exact = np.float32(1.0) / a
        moved = (exact.view(np.int32) + np.int32(ulps)).view(np.float32)
        near = np.abs(moved.astype(np.float64) * a - 1.0) <= 2.0**-23
        return np.where(near, moved, exact)

    return reciprocal


def on_arrays(fp8, ulps: int) -> None:
    """The module's functions on arrays from now on."""
    fp8.d = types.SimpleNamespace(
        mul=lambda a, b: np.asarray(a * b, np.float32), fma=simt.fused, reciprocal=off(ulps), select=np.where
    )
    fp8.bits_of = lambda value: np.asarray(value, np.float32).view(np.uint32)
    fp8.float_of = lambda bits: np.asarray(bits, np.uint32).view(np.float32)
    fp8.Float32, fp8.Uint32 = np.float32, lambda value: np.asarray(value).astype(np.uint32)
    fp8.Int32 = lambda value: np.asarray(value, np.uint32).view(np.int32)


def wrong(fp8, dtype: str, exponent: int, given: np.ndarray) -> int:
    """How many of the numbers with this biased exponent and these mantissas give another scale or inverse."""
    largest, _ = _MAX[dtype]
    amax = (given | np.uint32(exponent << 23)).view(np.float32)
    amax = amax[amax >= np.float32(largest * 2.0**-127)]
    scale, inverse = fp8._quotients(amax, dtype)
    expected = np.float32(largest) / amax
    return int((scale != expected).sum() + (inverse != np.float32(1.0) / expected).sum())


def main() -> None:
    simt.install()
    from layerplan.kernels.common import fp8

    given, count, faults = mantissas("--all" in sys.argv), 0, 0
    for ulps in (-2, -1, 0, 1, 2):
        on_arrays(fp8, ulps)
        for dtype, (_, power) in _MAX.items():
            for exponent in (power, power + 1, power + 2, 127, 254):  # the first ones' scales begin at 2^127
                for start in range(0, len(given), _CHUNK):
                    faults += wrong(fp8, dtype, exponent, given[start : start + _CHUNK])
                count += len(given)
    assert not faults, f"{faults} quotients of {count} are not the rounded ones"
    print(f"{count} amax give the quotients of IEEE division")


if __name__ == "__main__":
    main()
