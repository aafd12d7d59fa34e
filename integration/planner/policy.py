"""What a user may ask of the planner."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
from collections.abc import Iterable, Mapping

from ..settings import POLICIES, settings


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
        if isinstance(self.per_module, Mapping):
            object.__setattr__(self, "per_module", tuple(self.per_module.items()))
        for field, mode in (("policy", self.mode), *((f"policy per_module[{p!r}]", m) for p, m in self.per_module)):
            if mode not in POLICIES:
                raise ValueError(f"{field} = {mode!r}: must be one of {', '.join(POLICIES)}")
        if self.engine is not None:
            from ..engines.manifest import BY_ID

            if self.engine not in BY_ID:
                raise ValueError(f"engine = {self.engine!r}: no such engine; the manifest has {', '.join(BY_ID)}")

    @property
    def chooses(self) -> bool:
        """Whether engines compete under this policy; otherwise a plan file has nothing to pin."""
        return self.mode != "reference" and self.engine is None

    @property
    def said(self) -> str:
        """The policy in a message's words: ``under policy auto``, ``with engine=norm/quack``."""
        chosen = f"under policy {self.mode}" if self.engine is None else f"with engine={self.engine}"
        return f"{chosen}, deterministic" if self.deterministic else chosen

    def forcing(self, engine: str, op: str) -> Policy:
        """This policy with ``engine`` forced for one ``op``. ValueError where the engine has no code for it: something
        else would run in its place."""
        from ..engines.manifest import BY_ID

        chosen = dataclasses.replace(self, engine=engine)
        row = BY_ID[engine]
        if not row.is_reference and op not in row.ops:
            able = ", ".join(e.id for e in BY_ID.values() if op in e.ops or e.is_reference)
            raise ValueError(f"{op}: engine = {engine!r}: has no code for {op}; use one of {able}")
        return chosen

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

    def unmatched(self, names: Iterable[str]) -> dict[str, tuple[str, str]]:
        """The patterns of ``per_module`` that hold for none of the modules ``names``: pattern -> (what is wrong, the remedy)."""
        names, found = list(names), {}
        taken: set[str] = set()
        for pattern, _ in self.per_module:
            mine = {n for n in names if fnmatch.fnmatchcase(n, pattern)}
            if not mine:
                endings = dict.fromkeys(f"*.{n.rpartition('.')[2]}" for n in names)
                near = difflib.get_close_matches(pattern, [*endings, *names], 3, 0.6)
                remedy = f"did you mean {' or '.join(near)}?" if near else f"modules end in {', '.join(e[2:] for e in endings)}"
                found[pattern] = "matches no layerplan module of this model", remedy
            elif mine <= taken:
                found[pattern] = "every module that it matches is taken by an earlier pattern", "put it before the wider one or drop it"
            taken |= mine
        return found

    def hold_against(self, names: Iterable[str]) -> None:
        """ValueError where a pattern of ``per_module`` holds for none of the modules ``names``, with close names."""
        wrong = self.unmatched(names)
        if wrong:
            raise ValueError("\n".join(f"policy per_module[{p!r}]: {rule}; {remedy}" for p, (rule, remedy) in wrong.items()))


def default_policy() -> Policy:
    s = settings()
    return Policy(mode=s.policy, deterministic=s.deterministic)
