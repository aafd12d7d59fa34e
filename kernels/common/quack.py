"""What the engines on quack-kernels share: its dtypes, and which row widths it takes. The package is imported by ``build`` alone:
deciding needs no package and no device."""

from __future__ import annotations

import importlib

from ...integration.engines.arch import Arch
from ...integration.engines.contract import BuildContext, Engine
from ...integration.graph.ir import ITEMSIZE, TensorSpec
from .rows import step_of

_CLUSTERS = ("sm_90", "sm_100", "sm_103", "sm_120")  # where the package spreads a row over the blocks of a cluster


class QuackEngine(Engine):
    """Base of the engines on quack-kernels: the package keeps what it compiled, under names without the arch."""

    def ahead_variables(self, ctx: BuildContext, folder: str) -> dict[str, str] | None:
        return {"QUACK_CACHE_DIR": f"{folder}/quack/{ctx.arch.name}"}

    def compile_ahead(self, ctx: BuildContext) -> None:
        # the one number that a build asks the driver for is an argument of launches, no part of the code
        for module in ("quack.cute_dsl_utils", "quack.gemm_runtime.host"):
            importlib.import_module(module).get_max_active_clusters = lambda *_, **__: 1
        self.build(ctx)


def cute_dtype(name: str | None):
    """The DSL's type of a dtype's name; None stays None, as the compile functions want an absent tensor."""
    import cutlass

    names = {"float32": "Float32", "bfloat16": "BFloat16", "float16": "Float16", "int32": "Int32", "int64": "Int64"}
    return None if name is None else getattr(cutlass, names[name])


def spreads_rows(arch: Arch) -> bool:
    return arch.name in _CLUSTERS


def width_reason(x: TensorSpec, *dtypes: str) -> str | None:
    """Why rows of ``x`` cannot be copied to shared memory, None where they can: an asynchronous copy moves 4 bytes or
    more."""
    width = x.shape[-1]
    if not isinstance(width, int):
        return f"compiles for one row width, and that of x {x} is known only at run time"
    if step_of(width, x.dtype, *dtypes) * ITEMSIZE[x.dtype] < 4:
        return f"rows of {width} {x.dtype} values: its copies move 4 bytes or more, the width must be even"
    return None
