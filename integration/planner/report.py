"""What runs in a model, module by module, and why."""

from __future__ import annotations

import dataclasses
from typing import Any

from .applied import applied
from .policy import Policy
from .records import NONE
from .runner import Runner
from .text import aligned, folded, pattern


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One region of one module.

    ``direction``: forward or backward (a backward that has not run yet is shown as planned). ``why``: why this engine runs;
    ``declined``: every other candidate with its reason. ``policy``: what was in force for the module. ``predicted_us``:
    microseconds by datasheet rates; ``measured_us``: a record's where there is one; ``share``: the part of all, of measured times where
    there are, else of predicted ones.
    """

    module: str
    kind: str
    direction: str
    ops: str
    arch: str
    engine: str
    policy: str
    why: str
    declined: tuple[tuple[str, str], ...]
    predicted_us: float
    measured_us: float | None = None
    share: float = 0.0

    @property
    def us(self) -> float:
        """What counts: measured, else predicted."""
        return self.predicted_us if self.measured_us is None else self.measured_us


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """``not_run``: layerplan modules that have not run yet. ``others``: (name, class) of the modules with parameters of their own
    that layerplan does not run. ``boundaries``: (name, what) of the modules that ran and leave something to their caller between
    their plan and the next one. ``files``: for each plan file and file of records in force, how much of it the plans take."""

    rows: tuple[Row, ...]
    not_run: tuple[str, ...]
    others: tuple[tuple[str, str], ...] = ()
    boundaries: tuple[tuple[str, str], ...] = ()
    files: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Nested dicts and lists of plain values."""
        return {
            "rows": [{**dataclasses.asdict(r), "declined": [{"engine": e, "reason": why} for e, why in r.declined]} for r in self.rows],
            "not_run": list(self.not_run),
            "others": [{"module": name, "class": kind} for name, kind in self.others],
            "boundaries": [{"module": name, "left": what} for name, what in self.boundaries],
            "files": list(self.files),
        }

    def engines(self) -> dict[str, set[str]]:
        """Module name -> ids of the engines that it ran."""
        out: dict[str, set[str]] = {}
        for r in self.rows:
            out.setdefault(r.module, set()).add(r.engine)
        return out

    def __str__(self) -> str:
        """A table in which layers that run alike are one line, then every decline, then what does not run through layerplan."""
        if not self.rows and not self.not_run:
            return "no module of this model is layerplan's: nothing here is planned; build it with layerplan's layers"
        rows = [("module", "pass", "ops", "engine", "predicted us", "measured us", "share", "policy", "why"), *self._table()]
        measured = any(r.measured_us is not None for r in self.rows)
        lines = aligned(rows if measured else ((*row[:5], *row[6:]) for row in rows))
        declines: dict[tuple[str, str, str], dict[str, None]] = {}
        for r in self.rows:
            for engine, reason in r.declined:
                declines.setdefault((f"{r.ops} on {r.arch}", engine, reason), {})[r.module] = None
        if declines:
            lines += ["", "not chosen"]
            lines += aligned((f"  {where}", engine, f"{reason} ({folded(modules)})") for (where, engine, reason), modules in declines.items())
        lines += [f"{m}: has not run yet" for m in self.not_run]
        lines += ["", *self.files] if self.files else []
        if self.boundaries:
            lines += ["", "between plans: " + _alike(self.boundaries)]
        if self.others:
            lines += ["", "not run by layerplan: " + _alike(self.others)]
        said = "measured times are of single regions, from records; the others are predictions from datasheet rates"
        return "\n".join([*lines, said if measured else "times are predictions from datasheet rates, not measurements"])

    def _table(self) -> list[tuple[str, ...]]:
        alike: dict[tuple[str, ...], list[Row]] = {}
        for r in self.rows:
            alike.setdefault((pattern(r.module), r.direction, r.ops, r.engine, f"{r.predicted_us:.1f}",
                              "" if r.measured_us is None else f"{r.measured_us:.1f}", r.policy, r.why), []).append(r)
        return [
            (folded(r.module for r in rows), direction, ops, engine, us, measured, f"{sum(r.share for r in rows):.1%}", policy, why)
            for (_, direction, ops, engine, us, measured, policy, why), rows in alike.items()
        ]


def _alike(pairs: tuple[tuple[str, str], ...]) -> str:
    """(module, text) pairs as one line, modules of one text and pattern together."""
    same: dict[tuple[str, str], list[str]] = {}
    for name, text in pairs:
        same.setdefault((pattern(name), text), []).append(name)
    return ", ".join(f"{folded(names)} ({text})" for (_, text), names in same.items())


def planned_modules(model) -> list[tuple[str, Any]]:
    """(name, module) of the modules of ``model`` that run plans of their own: those of layerplan whose parameters no parent's plan
    reads."""
    return [(name, module) for name, module in model.named_modules() if getattr(module, "runs_own_plans", False)]


def report(model) -> Report:
    """What every layerplan module of ``model`` (a torch.nn.Module) that has run at least once runs on, and why."""
    rows: list[Row] = []
    idle: list[str] = []
    boundaries: list[tuple[str, str]] = []
    others = [(name, type(module).__name__) for name, module in model.named_modules()
              if not hasattr(module, "runs_own_plans") and next(module.parameters(recurse=False), None) is not None]  # fmt: skip
    for name, module in planned_modules(model):
        found = [row for runner in module.plan_runners() for row in _rows(name, type(module).__name__, runner)]
        rows += dict.fromkeys(found)
        if not found:
            idle.append(name or type(module).__name__)
        elif module.boundary:
            boundaries.append((name, module.boundary))
    total = sum(r.us for r in rows) or 1.0
    shared = tuple(dataclasses.replace(r, share=r.us / total) for r in rows)
    return Report(shared, tuple(idle), tuple(others), tuple(boundaries), _files(model))


def _files(model) -> tuple[str, ...]:
    """A line for each plan file and file of records that modules which ran are planned with."""
    runners = [r for _, module in planned_modules(model) for r in module.plan_runners()]
    plans = [(r, p) for r in runners for p in r.plans()]
    lines: dict[str, None] = {}
    for arch in dict.fromkeys(p.arch.name for _, p in plans):
        for pins in {id(r.pins): r.pins for r in runners if r.pins is not None}.values():
            lines[f"{pins.source}: {applied(arch, (p for r, p in plans if r.pins is pins), pins).of_pins(pins)}"] = None
        for records in {id(r.records): r.records for r in runners if r.records is not NONE}.values():
            mine = (p for r, p in plans if r.records is records)
            lines[f"{records.source}: {applied(arch, mine, records=records).of_records(records)}"] = None
    return tuple(lines)


def _rows(module: str, kind: str, runner: Runner) -> list[Row]:
    rows = []
    for direction, arch, r in runner.regions():
        if r.engine == "runner":
            why, declined = "a collective: issued by the runner", ()
        else:
            why = r.candidates[0].reason
            declined = tuple((c.engine, c.reason) for c in r.candidates[1:])
        rows.append(Row(module, kind, direction, "+".join(r.ops), arch, r.engine, _named(runner.policy), why, declined, r.predicted_seconds * 1e6,
                        None if r.measured_seconds is None else r.measured_seconds * 1e6))  # fmt: skip
    return rows


def _named(policy: Policy) -> str:
    more = [*(["deterministic"] if policy.deterministic else []), *([f"engine={policy.engine}"] if policy.engine else [])]
    return ", ".join([policy.mode, *more])
