"""What a user may ask of the planner."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping

from ..settings import settings

MODES = ("auto", "strict", "reference")


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """``auto`` takes the fastest offer; ``strict`` makes a reference or emulation an error; ``reference`` takes nothing
    else. ``per_module`` maps patterns over module names to modes, first match first: ``{"*.mlp": "reference"}``.
    ``deterministic`` declines engines whose results may differ between runs. ``engine`` forces one engine id."""

    mode: str = "auto"
    deterministic: bool = False
    per_module: tuple[tuple[str, str], ...] = ()
    engine: str | None = None

    def __post_init__(self) -> None:
        for field, mode in (("mode", self.mode), *((f"per_module[{p!r}]", m) for p, m in self.per_module)):
            if mode not in MODES:
                raise ValueError(f"policy {field} = {mode!r}: must be one of {', '.join(MODES)}")
        if self.engine is not None:
            from ..engines.manifest import BY_ID

            if self.engine not in BY_ID:
                raise ValueError(f"engine = {self.engine!r}: no such engine; the manifest has {', '.join(BY_ID)}")

    @staticmethod
    def of(value: Policy | str | Mapping[str, str] | None) -> Policy:
        """A policy from a Policy, a mode, a mapping of module patterns, or None (what the environment says)."""
        if isinstance(value, Policy):
            return value
        if value is None:
            return default_policy()
        if isinstance(value, str):
            return dataclasses.replace(default_policy(), mode=value)
        if isinstance(value, Mapping):
            return dataclasses.replace(default_policy(), per_module=tuple(value.items()))
        raise TypeError(f"policy = {value!r}: a Policy, a mode, a mapping of module patterns to modes, or None")

    def for_module(self, name: str) -> Policy:
        """The policy with the mode that holds for a module."""
        mode = next((m for p, m in self.per_module if fnmatch.fnmatchcase(name, p)), self.mode)
        return dataclasses.replace(self, mode=mode, per_module=())


def default_policy() -> Policy:
    s = settings()
    return Policy(mode=s.policy, deterministic=s.deterministic)
