"""What every layerplan module shares: its runners by variant, its policy, and its name in reports."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..integration.graph.ir import Graph
from ..integration.planner.plan_file import Pins, load
from ..integration.planner.policy import Policy
from ..integration.planner.records import Records, given_records
from ..integration.planner.report import planned_modules
from ..integration.planner.runner import Runner

_PLANNING = ("_policy", "_pins", "_records", "_plan_name", "_make_runner", "_runners")


class PlannedModule(torch.nn.Module):
    """Mix-in for modules that run plans. A subclass names a variant of its graph (which optional inputs are there, which
    mask) by a hashable key and builds the graph once per shape class."""

    _plan_name = ""
    boundary = ""  # what the caller runs between this module's plan and the next one, in one phrase; listed by planner.report
    runs_own_plans = True  # read by planner.report.planned_modules
    _deterministic = False  # whether the module's own config asks for reruns that are bitwise equal, under any policy

    def planned(self, key: tuple, names: tuple[str, ...], build: Callable[..., Graph], *,
                recompute: frozenset[str] = frozenset(), groups: Mapping[str, Any] | None = None) -> Runner:  # fmt: skip
        """The runner of one variant. In training the engines of the forward do not depend on grad mode, so the first
        pass of full recompute, which runs under no_grad, computes bitwise what the second one does."""
        runners = self.__dict__.setdefault("_runners", {})
        full = (key, self.training)
        runner = runners.get(full)
        if runner is None:
            policy = self.__dict__.get("_policy") or Policy.of(None)
            policy = dataclasses.replace(policy, deterministic=policy.deterministic or self._deterministic)
            runner = runners[full] = self.__dict__.get("_make_runner", Runner)(
                build, names, policy=policy, name=self._plan_name or type(self).__name__, training=self.training,
                recompute=recompute, groups=groups, pins=self.__dict__.get("_pins"), records=self.__dict__.get("_records"),
            )  # fmt: skip
        return runner

    def plan_runners(self) -> list[Runner]:
        """The runners that this module has used; what ``layerplan.report`` reads."""
        return list(self.__dict__.get("_runners", {}).values())

    def run_by_parent(self) -> None:
        """Leave this module out of reports and policies: its parent's plan reads its parameters and never calls it."""
        self.runs_own_plans = False

    def set_policy(self, policy: Policy, name: str = "", *, pins: Pins | None = None, records: Records | None = None,
                   make_runner: Callable[..., Runner] = Runner) -> None:  # fmt: skip
        """Plan anew under ``policy``, the plan file ``pins`` (None: without one) and measured times ``records`` (None: those of
        LAYERPLAN_RECORDS) from the next call on. ``make_runner`` makes the runners: planner.compare has its own, which note what they
        are called with."""
        self.__dict__["_policy"], self.__dict__["_pins"], self.__dict__["_make_runner"] = policy, pins, make_runner
        self.__dict__["_records"] = records
        if name:
            self._plan_name = name
        self.__dict__["_runners"] = {}

    def planning(self) -> dict[str, Any]:
        """How this module is planned and what it has planned so far, for ``restore_planning``."""
        return {name: self.__dict__[name] for name in _PLANNING if name in self.__dict__}

    def restore_planning(self, planning: Mapping[str, Any]) -> None:
        """Have this module planned again as it was when ``planning()`` returned this; its runners then are used again."""
        for name in _PLANNING:
            self.__dict__.pop(name, None)
        self.__dict__.update(planning)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        for name in ("_runners", "_make_runner"):  # plans and process groups are made anew in a copy
            state.pop(name, None)
        return state

    def __deepcopy__(self, memo):
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        return made


def planned_names(model: torch.nn.Module) -> list[str]:
    """Names of the modules of ``model`` that run plans of their own: what patterns of a policy are held against."""
    return [name for name, _ in planned_modules(model)]


def apply_policy(model: torch.nn.Module, policy: Policy | str | Mapping[str, str] | None, *, pins: Pins | str | Path | None = None,
                 records: Records | str | Path | None = None, rename: Callable[[str], str] = str) -> None:  # fmt: skip
    """Set the policy of every layerplan module of ``model``; patterns of ``per_module`` match its module names, or what ``rename``
    makes of them. ValueError where a pattern holds for no module, with close names, or where no module is layerplan's; nothing is
    set then.

    ``pins``, a plan file's path or what ``planner.plan_file.load`` made of it: regions that they name run on the engine and with
    the knobs that they say. Where the engine no longer takes one, planning it is a PlanError; PlanFileError for a file that
    cannot be read. ``records``, the path of what ``layerplan tune`` wrote or what ``planner.records.load`` made of it (None: what
    LAYERPLAN_RECORDS names): measured times, by which everything else is ranked; RecordsError for a file that cannot be read.
    """
    if isinstance(pins, str | Path):
        pins = load(pins)
    if pins is not None and not isinstance(pins, Pins):
        raise TypeError(f"apply_policy: pins = {type(pins).__name__}: must be a plan file's path, its Pins, or None")
    records = given_records(records)
    chosen = Policy.of(policy)
    names = planned_names(model)
    if not names:
        raise ValueError(f"apply_policy: model = {type(model).__name__}: holds no module of layerplan, so that nothing "
                         "would be planned; build it with layerplan's layers")  # fmt: skip
    chosen.hold_against(rename(n) for n in names)
    for name, module in model.named_modules():
        if isinstance(module, PlannedModule):
            module.set_policy(chosen.for_module(rename(name)), name, pins=pins, records=records)
