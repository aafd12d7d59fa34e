"""A small kernel of our own, for tests of the toolchain: y = factor * x, row by row, 16 bytes a thread."""

from __future__ import annotations

import os
import time
from pathlib import Path

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from tests.cases.own_kernel_helper import scaled


@cute.kernel
def _kernel(mX: cute.Tensor, mY: cute.Tensor, factor: cutlass.Float32, threads: cute.Layout, tile: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    gX, gY = (cute.zipped_divide(m, tile)[((None, None), (row, 0))] for m in (mX, mY))
    tX, tY = (cute.composition(g, threads)[(thread, None)] for g in (gX, gY))
    copy = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), mX.element_type, num_bits_per_copy=128)
    rX = cute.make_fragment_like(tX)
    cute.copy(copy, tX, rX)
    rX.store(scaled(rX.load(), factor))
    cute.copy(copy, rX, tY)


@cute.jit
def _launch(mX: cute.Tensor, mY: cute.Tensor, factor: cutlass.Float32, stream):
    vector = 128 // mX.element_type.width
    width = mX.shape[1]
    layout = cute.make_layout((width // vector, vector), stride=(vector, 1))
    kernel = _kernel(mX, mY, factor, layout, (1, width))
    kernel.launch(grid=[mX.shape[0], 1, 1], block=[width // vector, 1, 1], stream=stream)


def scale(arch: str, dtype: str, width: int):
    """``f(x, y, factor)`` over [rows, width] tensors of ``dtype``, a name of cutlass; rows of up to 1024 x 16 bytes."""
    rows, element = cute.sym_int(), getattr(cutlass, dtype)
    x, y = (make_fake_compact_tensor(element, (rows, width), stride_order=(1, 0), assumed_align=16) for _ in range(2))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(_launch, x, y, cutlass.Float32(1.0), stream, options="--enable-tvm-ffi")


def noted_scale(arch: str, dtype: str, width: int):
    """The same. Each compile leaves a file named by its process in the folder OWN_KERNEL_NOTES, and takes at least
    OWN_KERNEL_PAUSE seconds."""
    Path(os.environ["OWN_KERNEL_NOTES"], str(os.getpid())).touch()
    time.sleep(float(os.environ.get("OWN_KERNEL_PAUSE", "0")))
    return scale(arch, dtype, width)


def wrong(arch: str, fault: str):
    """What a mistake in device code looks like: ``raise``, ``print`` (then a wrong result), or ``exit``."""
    if fault == "raise":
        raise ValueError("no such tile")
    if fault == "exit":
        os._exit(3)
    print("said aloud")
    return fault
