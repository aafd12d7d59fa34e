"""Whether all ranks would plan the same: what planning reads, compared once, before the first step.

Planning is a pure function and never communicates, so a rank with another version, arch or setting would run other
kernels, or wait in a collective that the others do not reach. Ranks compare a digest; only where it differs do they
compare what it is made of.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from layerplan import __version__

from ..engines.arch import Arch
from ..engines.manifest import MANIFEST
from ..engines.packages import distribution, installed_version
from ..problems import Problem
from ..settings import settings
from .plan_file import Pins
from .policy import Policy
from .records import Records, RecordsError, default_records

PACKAGES = tuple(
    dict.fromkeys((*(distribution(n) for e in MANIFEST for n in e.needs), "nvidia-cutlass-dsl", "apache-tvm-ffi"))
)
"""What engines need, and what compiles and launches their kernels."""
OF_A_RANK = ("log", "nvtx", "records", "cache")
"""Settings that may differ between ranks: they change no plan. Of the records the content is compared, not the path."""
_SHOWN = 12  # digits of a digest that people read


class RanksDifferError(RuntimeError):
    """Ranks would not plan, or run, the same; ``problems``: each field that differs, with the ranks of each value."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)
        count = f"{len(self.problems)} problem{'s' if len(self.problems) > 1 else ''}"
        super().__init__(f"{count}:\n" + "\n".join(f"  {p}" for p in self.problems))


def planning_facts(
    arch: Arch, *, policy: Policy | None = None, pins: Pins | None = None, records: Records | None = None
) -> dict[str, str]:
    """Field -> value of everything that planning on this rank reads beside the graphs: arch, settings, versions, which
    engines can run, policy, the content of a plan file and of measured times (None: what the environment says)."""
    names = [f.name for f in dataclasses.fields(settings()) if f.name not in OF_A_RANK]
    found = {f"environment: {n}": str(getattr(settings(), n)) for n in names}
    found |= {f"version of {p}": installed_version(p) or "not installed" for p in PACKAGES}
    found |= {"version of torch": torch.__version__, "version of CUDA in torch": str(torch.version.cuda)}
    found |= {"version of cuDNN": _cudnn()}
    found |= {f"engine {e.id}": "cannot run" if e.unusable() else "can run" for e in MANIFEST if arch.name in e.archs}
    found |= {"policy": str(policy or Policy.of(None)), "arch": arch.name, "version of layerplan": __version__}
    return found | file_facts(pins, records)


def file_facts(pins: Pins | None, records: Records | None) -> dict[str, str]:
    """What a plan file and measured times hold."""
    return {"plan file: SHA-256": "no plan file" if pins is None else _sha256(pins.to_json()),
            "environment: records" if records is None else "records: SHA-256": _records(records)}  # fmt: skip


def digest(facts: Mapping[str, Any]) -> str:
    """SHA-256 of facts, whatever their order."""
    return _sha256({field: repr(value) for field, value in facts.items()})


def shown(digest: str) -> str:
    """As much of a digest as a log line says."""
    return digest[:_SHOWN]


def compare(facts: Mapping[str, Any], group: Any) -> str:
    """The digest of ``facts``, which are the same on every rank of ``group``. All of its ranks call this together;
    raises RanksDifferError on each where they are not, naming every field that differs and the ranks that hold each
    value."""
    own, ranks = digest(facts), dist.get_process_group_ranks(group)
    digests: list[Any] = [None] * len(ranks)
    dist.all_gather_object(digests, own, group=group)
    if len(set(digests)) == 1:
        return own
    everyone: list[Any] = [None] * len(ranks)
    dist.all_gather_object(everyone, dict(facts), group=group)
    raise RanksDifferError(_differences(facts, dict(zip(ranks, everyone, strict=True))))


def _differences(own: Mapping[str, Any], everyone: Mapping[int, Mapping[str, Any]]) -> list[Problem]:
    problems = []
    for field in dict.fromkeys(f for one in everyone.values() for f in one):
        holders: dict[str, list[int]] = {}
        for rank, one in everyone.items():
            holders.setdefault(repr(one.get(field)), []).append(rank)
        if len(holders) > 1:
            held = ", ".join(f"{value} on rank {_listed(who)}" for value, who in holders.items())
            rule = f"differs between ranks: {held}"
            problems.append(Problem(field, own.get(field), rule, "start every rank with the same"))
    return problems


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _cudnn() -> str:
    try:
        return str(torch.backends.cudnn.version())
    except RuntimeError as error:  # another cuDNN than torch was built with was loaded
        return f"cannot be used ({error})"


def _records(records: Records | None) -> str:
    """A file that cannot be read is a value too, and is refused where it is needed."""
    try:
        held = default_records() if records is None else records
        return held.digest if held.rows else "no records"
    except RecordsError:
        return "cannot be read"
