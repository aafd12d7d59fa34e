"""What is wrong with a configuration, whoever wrote it: a recipe, or Megatron's config."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """Which field, or fields that go together, what it holds, the rule it breaks, and what to do."""

    field: str
    value: Any
    rule: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.field} = {show(self.value)}: {self.rule}; {self.remedy}"


def show(value: Any) -> str:
    """A value as a message writes it: functions and classes by their names."""
    return getattr(value, "__name__", None) or repr(value)
