"""Every environment variable that layerplan reads; its own, LAYERPLAN_*, typed and read once. No other file reads the environment."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
from collections.abc import Mapping
from typing import Literal, get_args

PolicyMode = Literal["auto", "strict", "reference"]
POLICIES: tuple[str, ...] = get_args(PolicyMode)
LOG_LEVELS = ("debug", "info", "warning", "error")
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")

VARIABLES = {
    "LAYERPLAN_CHECK": "check values of cu_seqlens, positions and targets on the device; costs host syncs",
    "LAYERPLAN_POLICY": "default planning policy: auto, strict or reference",
    "LAYERPLAN_DETERMINISTIC": "decline engines whose results may differ between runs",
    "LAYERPLAN_LOG": "log level: debug, info, warning or error",
    "LAYERPLAN_RECORDS": "file of measured times ('layerplan tune') that ranking reads in place of predictions",
    "LAYERPLAN_NVTX": "NVTX ranges with module, pass and engine round each launch; needs CUDA",
}


class SettingsError(ValueError):
    """An environment variable with a value or a name that layerplan does not know."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What the LAYERPLAN_* variables say; VARIABLES describes each."""

    check: bool = False
    policy: str = "auto"
    deterministic: bool = False
    log: str = "warning"
    records: str | None = None
    nvtx: bool = False

    @staticmethod
    def from_env(env: Mapping[str, str]) -> Settings:
        """Settings from a mapping of variables; a variable set to nothing counts as unset.

        Raises SettingsError with every problem: names that do not exist, values that are not allowed.
        """
        problems: list[str] = []
        env = {name: value for name, value in env.items() if name not in VARIABLES or value.strip()}
        for name in env:
            if name.startswith("LAYERPLAN_") and name not in VARIABLES:
                close = difflib.get_close_matches(name, VARIABLES, 1)
                hint = f"; did you mean {close[0]}?" if close else f"; known: {', '.join(VARIABLES)}"
                problems.append(f"{name} = {env[name]!r}: no such variable{hint}")

        def choice(name: str, allowed: tuple[str, ...], default: str) -> str:
            value = env.get(name, default).strip().lower()
            if value not in allowed:
                problems.append(f"{name} = {env[name]!r}: must be one of {', '.join(allowed)}")
            return value

        def flag(name: str) -> bool:
            value = env.get(name, "0").strip().lower()
            if value not in (*_TRUE, *_FALSE):
                problems.append(f"{name} = {env[name]!r}: must be one of {', '.join((*_TRUE, *_FALSE))}")
            return value in _TRUE

        made = Settings(
            check=flag("LAYERPLAN_CHECK"),
            policy=choice("LAYERPLAN_POLICY", POLICIES, "auto"),
            deterministic=flag("LAYERPLAN_DETERMINISTIC"),
            log=choice("LAYERPLAN_LOG", LOG_LEVELS, "warning"),
            records=env.get("LAYERPLAN_RECORDS", "").strip() or None,
            nvtx=flag("LAYERPLAN_NVTX"),
        )
        if problems:
            raise SettingsError("\n".join(problems))
        return made


@functools.cache
def given() -> frozenset[str]:
    """Names of the LAYERPLAN_* variables that are set to something, whether or not it is the default."""
    return frozenset(name for name in VARIABLES if os.environ.get(name, "").strip())


@functools.cache
def settings() -> Settings:
    """The process's settings, read from the environment on first use."""
    return Settings.from_env(os.environ)


LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def launcher_environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables by which a launcher tells a process its place among others (``LAUNCHER``), those that are set to something."""
    env = os.environ if env is None else env
    return {name: env[name].strip() for name in LAUNCHER if env.get(name, "").strip()}


# what changes how torch, the CUDA libraries and compilers behave; nothing here names an account or a secret
_RELEVANT = ("LAYERPLAN_", "CUDA_", "CUDNN_", "CUBLAS_", "NCCL_", "NVTE_", "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "TRITON_",
             "CUTE_DSL_", "OMP_NUM_THREADS", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH")  # fmt: skip


def relevant_environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables in force that bear on training, sorted by name: what ``layerplan doctor`` shows."""
    env = os.environ if env is None else env
    return {name: env[name] for name in sorted(env) if name.startswith(_RELEVANT)}
