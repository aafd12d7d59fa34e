"""Rows as text: what reports, explanations and plans print."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of columns two spaces apart; the last column is as long as it is."""
    rows = [[str(c) for c in row] for row in rows]
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    return ["  ".join(c.ljust(w) for c, w in zip(row, (*widths, 0), strict=True)).rstrip() for row in rows]


def folded(names: Iterable[str]) -> str:
    """Module names that differ in their first number alone as one: ``layers.0.mlp``, ``layers.1.mlp``, ``layers.3.mlp`` become
    ``layers.0-1,3.mlp``."""
    groups: dict[tuple[str, str], set[int] | None] = {}
    for name in names:
        found = re.match(r"(.*?(?:^|\.))(\d+)((?:\..*)?)$", name)
        if found:
            groups.setdefault((found.group(1), found.group(3)), set()).add(int(found.group(2)))
        else:
            groups[name, ""] = None
    return ", ".join(f"{a}{'' if numbers is None else _ranges(numbers)}{b}" for (a, b), numbers in groups.items())


def pattern(name: str) -> str:
    """The name without its first number: equal for modules that ``folded`` makes one."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1#", name, count=1)


def _ranges(numbers: set[int]) -> str:
    parts: list[list[int]] = []
    for n in sorted(numbers):
        if parts and n == parts[-1][-1] + 1:
            parts[-1].append(n)
        else:
            parts.append([n])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)
