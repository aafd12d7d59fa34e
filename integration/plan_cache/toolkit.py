"""The parts of nvidia-cutlass-dsl and apache-tvm-ffi that stand between a compiled kernel and the driver, found without
importing the compiler.

The DSL has one set of libraries for each CUDA major version and takes the newest one that the driver knows; without a
driver the newest that is installed. The same rule holds here, since code that the newer ptxas made does not load on an
older driver: the major version is part of a kernel's name.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import re
from pathlib import Path

from ..engines.packages import locate

_RUNTIME = "libcute_dsl_runtime.so"


@functools.cache
def _driver_major() -> int | None:
    """CUDA major version of the driver; None without one. Makes no context."""
    version = ctypes.c_int(0)
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)):
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000


@functools.cache
def runtime_library() -> Path | None:
    """The DSL's runtime library for this machine's driver; None where the DSL is not installed."""
    place = locate("cutlass")
    if place.location is None:
        return None
    # <root>/dsl_packages/cutlass/__init__.py beside <root>/cu13/lib
    root = Path(place.location).resolve().parents[2]
    files = root.glob(f"cu*/lib/{_RUNTIME}")
    found = {int(m[1]): file for file in files if (m := re.fullmatch(r"cu(\d+)", file.parents[1].name))}
    known = [v for v in found if _driver_major() is None or v <= _driver_major()]
    return found[max(known)] if known else None


def major() -> int | None:
    """CUDA major version whose compiler the DSL uses here; None where it cannot be told."""
    library = runtime_library()
    return None if library is None else int(library.parents[1].name.removeprefix("cu"))


@functools.cache
def cpu_level() -> int:
    """The x86-64 level of this CPU: 4 with AVX-512, 3 with AVX2, else 2; 0 on other machines. The compiler makes the
    host's part of a kernel for the CPU that it runs on."""
    if platform.machine() != "x86_64":
        return 0
    try:
        flags = set(re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[1].split())
    except (OSError, TypeError):
        return 2
    v3 = {"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"} <= flags
    return 4 if v3 and {f"avx512{part}" for part in ("f", "bw", "cd", "dq", "vl")} <= flags else 3 if v3 else 2


@functools.cache
def loaded_runtime() -> ctypes.CDLL:
    """The runtime library, loaded: compiled kernels ask for it by its name. Kept for the rest of the process."""
    library = runtime_library()
    if library is None:
        raise ImportError(f"{_RUNTIME} of nvidia-cutlass-dsl is not there")
    return ctypes.CDLL(str(library))
