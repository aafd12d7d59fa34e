"""The comparison of what ranks plan with, for a training script of one's own; layerplan's trainer makes its own."""

from __future__ import annotations

import datetime
import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..engines.arch import Arch
from ..engines.packages import installed_version
from ..planner import agreement, plan_file
from ..planner.plan_file import Pins, PlanFileError
from ..planner.policy import Policy
from ..planner.records import Records, RecordsError, given_records
from . import cpu_mode
from .compat import megatron_version

TIMEOUT = datetime.timedelta(minutes=5)
log = logging.getLogger("layerplan")


def megatron_facts() -> dict[str, str]:
    """Versions that decide what Megatron itself runs round the layers."""
    return {"version of megatron-core": megatron_version(),
            "version of transformer-engine": installed_version("transformer-engine") or "not installed"}  # fmt: skip


def compare_planning(group: Any = None, *, policy: Policy | str | Mapping[str, str] | None = None,
                     pins: Pins | str | Path | None = None, records: Records | str | Path | None = None,
                     timeout: datetime.timedelta = TIMEOUT) -> str:  # fmt: skip
    """Compare what the ranks of ``group`` plan with: settings, versions, engines, arch, and the policy, the plan file
    and the measured times that the script gives to ``apply_policy``. Call it on all of them, after the process group is
    made and this rank's device is set, before the first step. ``group`` None: all ranks, over a gloo group that lives
    for this call.

    Returns the digest that all share. Raises RanksDifferError on every rank, naming fields and ranks, and a
    RuntimeError where ranks do not come within ``timeout`` (of a group given, its own holds); what a file of all ranks
    alike is refused for (PlanFileError, RecordsError).
    """
    read, refused = {}, None
    for name, load, value in (("pins", _load_pins, pins), ("records", _load_records, records)):
        try:
            read[name] = load(value)
        except (PlanFileError, RecordsError) as error:  # the others wait: first all say what they have
            refused = refused or error
    facts: dict[str, str] = agreement.planning_facts(_arch(), policy=Policy.of(policy), **read) | megatron_facts()
    facts["files"] = "can be read" if refused is None else f"cannot be read ({refused})"
    alone = not dist.is_initialized() or dist.get_world_size(group) == 1
    digest = agreement.digest(facts) if alone else _compare(facts, group, timeout)
    if refused is not None:
        raise refused
    log.info("planning digest %s", digest)
    return digest


def _compare(facts: dict[str, str], group: Any, timeout: datetime.timedelta) -> str:
    if group is not None:
        return agreement.compare(facts, group)
    try:
        made = dist.new_group(backend="gloo", timeout=timeout)
        dist.monitored_barrier(made, timeout=timeout, wait_all_ranks=True)
    except RuntimeError as error:
        raise RuntimeError(f"compare_planning: not all {dist.get_world_size()} ranks called it within "
                           f"{timeout.total_seconds():g} s; call it on every rank, or give the group of those that do "
                           f"({str(error).splitlines()[0]})") from error  # fmt: skip
    try:
        return agreement.compare(facts, made)
    finally:
        dist.destroy_process_group(made)


@functools.cache
def compare_planning_once() -> None:
    """``compare_planning`` over all ranks the first time, where there are several; nothing after that."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        compare_planning()


def _arch() -> Arch:
    on_cpu = cpu_mode.is_active() or not torch.cuda.is_available()
    return Arch.of_device(-1 if on_cpu else torch.cuda.current_device())


def _load_pins(value: Pins | str | Path | None) -> Pins | None:
    return plan_file.load(value) if isinstance(value, str | Path) else value


def _load_records(value: Records | str | Path | None) -> Records | None:
    return None if value is None else given_records(value)
