"""The README's engine x arch table, made from the manifest: ``python -m layerplan.integration.engines.table [README.md]``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from .manifest import ALL, MANIFEST
from .packages import distribution

BEGIN, END = "<!-- engines: begin (made by python -m layerplan.integration.engines.table) -->", "<!-- engines: end -->"


def markdown() -> str:
    """One row per engine of the manifest, one column per arch; where it has code for an arch, the cell says yes, or trial."""
    head = ["engine", *(a.replace("sm_", "sm") for a in ALL), "needs", "what it is"]
    rows = [
        [f"`{e.id}`", *(("trial" if e.trial else "yes") if a in e.archs else "" for a in ALL), ", ".join(map(distribution, e.needs)), e.note]
        for e in MANIFEST
    ]  # fmt: skip
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def between(text: str, begin: str, end: str, content: str) -> str:
    """``text`` with ``content`` between two lines. Raises ValueError where it has not exactly one pair of them."""
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"the text must hold exactly one line {begin!r} and, after it, one line {end!r}")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{content}\n{end}{rest.split(end)[1]}"


def updated(text: str) -> str:
    """``text`` with a new table between its markers. Raises ValueError where it has not exactly one pair of them."""
    return between(text, BEGIN, END, markdown())


def rewrite(path: Path, update: Callable[[str], str]) -> int:
    """Bring a file up to date; the exit status."""
    path.write_text(update(path.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


def main(arguments: list[str]) -> int:
    """Bring the named file (default README.md) up to date."""
    return rewrite(Path(arguments[0] if arguments else "README.md"), updated)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
