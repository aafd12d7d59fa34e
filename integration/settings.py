"""Every environment variable that layerplan reads; its own, LAYERPLAN_*, typed and read once. No other file reads the environment."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

PolicyMode = Literal["auto", "strict", "reference"]
POLICIES: tuple[str, ...] = get_args(PolicyMode)
LOG_LEVELS = ("debug", "info", "warning", "error")
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")

VARIABLES = {
    "LAYERPLAN_CHECK": "check values on the device (cu_seqlens, positions, targets, experts, group offsets); costs host syncs",
    "LAYERPLAN_POLICY": "default planning policy: auto, strict or reference",
    "LAYERPLAN_DETERMINISTIC": "decline engines whose results may differ between runs",
    "LAYERPLAN_LOG": "log level: debug, info, warning or error",
    "LAYERPLAN_RECORDS": "file of measured times ('layerplan tune') that ranking reads in place of predictions",
    "LAYERPLAN_NVTX": "NVTX ranges with module, pass and engine round each launch; needs CUDA",
    "LAYERPLAN_CACHE": "folders of compiled kernels with colons between: new ones go into the first, others are only read",
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
    cache: str | None = None

    @staticmethod
    def from_env(env: Mapping[str, str]) -> Settings:
        """Settings from a mapping of variables; a variable set to nothing counts as unset.

        Raises SettingsError with every problem: names that do not exist, values that are not allowed.
        """
        problems: list[str] = []
        env = {name: value for name, value in env.items() if name not in VARIABLES or value.strip()}
        for name in env:
            if name.startswith("LAYERPLAN_") and name not in VARIABLES:
                own = {v.removeprefix("LAYERPLAN_"): v for v in VARIABLES}  # the prefix makes any two alike
                close = difflib.get_close_matches(name.removeprefix("LAYERPLAN_"), own, 1)
                hint = f"; did you mean {own[close[0]]}?" if close else f"; known: {', '.join(VARIABLES)}"
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

        cache = env.get("LAYERPLAN_CACHE", "").strip() or None
        problems += [f"LAYERPLAN_CACHE = {cache!r}: {part} lies in a home folder that is not known here; write the path out"
                     for part in (cache or "").split(os.pathsep) if part.strip() and _folder(part) is None]  # fmt: skip
        made = Settings(
            check=flag("LAYERPLAN_CHECK"),
            policy=choice("LAYERPLAN_POLICY", POLICIES, "auto"),
            deterministic=flag("LAYERPLAN_DETERMINISTIC"),
            log=choice("LAYERPLAN_LOG", LOG_LEVELS, "warning"),
            records=env.get("LAYERPLAN_RECORDS", "").strip() or None,
            nvtx=flag("LAYERPLAN_NVTX"),
            cache=cache,
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


def cache_folders(env: Mapping[str, str] | None = None) -> tuple[Path, ...]:
    """Where compiled kernels are looked up, in this order; new ones go into the first. LAYERPLAN_CACHE, or
    ``layerplan/kernels`` in the user's cache folder (XDG_CACHE_HOME, or ``~/.cache``); empty where a user has no home."""
    env = os.environ if env is None else env
    if given := env.get("LAYERPLAN_CACHE", "").strip():
        return tuple(f for part in given.split(os.pathsep) if part.strip() and (f := _folder(part)) is not None)
    user = env.get("XDG_CACHE_HOME", "")
    if not user.startswith("/"):  # a relative one is to be ignored, by that standard
        if not env.get("HOME"):
            return ()
        user = os.path.join(env["HOME"], ".cache")
    return (Path(user, "layerplan", "kernels"),)


def _folder(part: str) -> Path | None:
    """None for a ``~`` whose folder is not known: ``Settings`` refuses it."""
    path = os.path.expanduser(part)
    return None if path.startswith("~") else Path(path).absolute()


def compiler_environment(chip: str, path: str, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """What a process that compiles kernels for ``chip`` is started with: this one's environment with ``path`` to find
    modules, no device, and of the compiler's own variables those alone that change no code."""
    env = os.environ if env is None else env
    harmless = ("CUTE_DSL_KEEP", "CUTE_DSL_DUMP", "CUTE_DSL_LOG")
    kept = {name: value for name, value in env.items() if not name.startswith("CUTE_DSL_") or name.startswith(harmless)}
    archs = {"CUTE_DSL_ARCH": chip, "QUACK_ARCH": chip.removesuffix("a")}
    return kept | archs | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}


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
