"""What every layerplan module shares: its runners by variant, its policy, and its name in reports."""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..integration.graph.ir import Graph
from ..integration.planner.policy import Policy
from ..integration.planner.runner import Runner


class PlannedModule(torch.nn.Module):
    """Mix-in for modules that run plans. A subclass names a variant of its graph (which optional inputs are there, which
    mask) by a hashable key and builds the graph once per shape class."""

    _plan_name = ""

    def planned(self, key: tuple, names: tuple[str, ...], build: Callable[..., Graph], *,
                recompute: frozenset[str] = frozenset(), groups: Mapping[str, Any] | None = None) -> Runner:  # fmt: skip
        """The runner of one variant. In training the engines of the forward do not depend on grad mode, so the first
        pass of full recompute, which runs under no_grad, computes bitwise what the second one does."""
        runners = self.__dict__.setdefault("_runners", {})
        full = (key, self.training)
        runner = runners.get(full)
        if runner is None:
            policy = self.__dict__.get("_policy") or Policy.of(None)
            runner = runners[full] = Runner(
                build, names, policy=policy, name=self._plan_name or type(self).__name__, training=self.training,
                recompute=recompute, groups=groups,
            )  # fmt: skip
        return runner

    def plan_runners(self) -> list[Runner]:
        """The runners that this module has used; what ``layerplan.report`` reads."""
        return list(self.__dict__.get("_runners", {}).values())

    def run_by_parent(self) -> None:
        """Leave this module out of reports: its parent's plan reads its parameters and never calls it."""
        self.__dict__["plan_runners"] = None

    def set_policy(self, policy: Policy, name: str = "") -> None:
        """Plan anew under ``policy`` from the next call on."""
        self.__dict__["_policy"] = policy
        if name:
            self._plan_name = name
        self.__dict__["_runners"] = {}

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state.pop("_runners", None)  # plans and process groups are made anew in a copy
        return state

    def __deepcopy__(self, memo):
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        return made


def apply_policy(model: torch.nn.Module, policy: Policy | str | Mapping[str, str] | None) -> None:
    """Set the policy of every layerplan module of ``model``; patterns of ``per_module`` match its module names."""
    chosen = Policy.of(policy)
    unused = {p for p, _ in chosen.per_module}
    for name, module in model.named_modules():
        if isinstance(module, PlannedModule):
            own = chosen.for_module(name)
            module.set_policy(own, name)
            unused -= {p for p in unused if fnmatch.fnmatchcase(name, p)}
    if unused:
        raise ValueError(f"policy per_module {sorted(unused)}: matches no layerplan module of this model; "
                         "see model.named_modules() for the names")  # fmt: skip
