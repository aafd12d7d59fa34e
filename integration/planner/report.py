"""What runs in a model, module by module, and why."""

from __future__ import annotations

import dataclasses
from typing import Any

from .runner import Runner


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One region of one module. ``share`` is the part of all predicted time (a prediction, not a measurement)."""

    module: str
    kind: str
    direction: str
    ops: str
    engine: str
    predicted_us: float
    share: float
    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    rows: tuple[Row, ...]
    not_run: tuple[str, ...]  # layerplan modules that have not run yet

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def engines(self) -> dict[str, set[str]]:
        """Module name -> ids of the engines that it ran."""
        out: dict[str, set[str]] = {}
        for r in self.rows:
            out.setdefault(r.module, set()).add(r.engine)
        return out

    def __str__(self) -> str:
        head = ("module", "pass", "ops", "engine", "predicted us", "why")
        lines = [(r.module, r.direction, r.ops, r.engine, f"{r.predicted_us:.1f}", r.why) for r in self.rows]
        widths = [max(len(row[i]) for row in (head, *lines)) for i in range(5)]
        text = ["  ".join(c.ljust(w) for c, w in zip(row, (*widths, 0), strict=True)).rstrip() for row in (head, *lines)]
        text += [f"{m}: has not run yet" for m in self.not_run]
        text.append("times are predictions from datasheet rates, not measurements")
        return "\n".join(text)


def report(model) -> Report:
    """Rows for every layerplan module of ``model`` (a torch.nn.Module) that has run at least once."""
    rows: list[Row] = []
    idle: list[str] = []
    for name, module in model.named_modules():
        runners = getattr(module, "plan_runners", None)
        if not callable(runners):
            continue
        found = [(d, r) for runner in runners() for d, r in _distinct(runner)]
        if not found:
            idle.append(name or type(module).__name__)
        for direction, r in found:
            losers = [f"{c.engine}: {c.reason}" for c in r.candidates if not c.chosen]
            why = "issued by the runner" if r.engine == "runner" else "; ".join(losers) or "the only candidate"
            rows.append(Row(name, type(module).__name__, direction, "+".join(r.ops), r.engine, r.seconds * 1e6, 0.0, why))
    total = sum(r.predicted_us for r in rows) or 1.0
    return Report(tuple(dataclasses.replace(r, share=r.predicted_us / total) for r in rows), tuple(idle))


def _distinct(runner: Runner):
    seen = set()
    for direction, r in runner.regions():
        key = (direction, r.ops, r.engine, r.candidates)
        if key not in seen:
            seen.add(key)
            yield direction, r
