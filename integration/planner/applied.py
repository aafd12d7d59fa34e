"""How much of a plan file and of records applies to some plans: what the user is told of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from .plan_file import Pins
from .planner import Plan
from .records import Records, region_key, short_name


@dataclasses.dataclass(frozen=True, slots=True)
class Applied:
    """Counts over the distinct regions of some plans of one arch that an engine runs. ``regions``: all; ``measured``:
    those whose engine has a record's time; ``pinned``: those that a pin holds for; ``recorded``: those that have any
    row in the records, one that does not count among them."""

    arch: str
    regions: int
    measured: int
    pinned: int
    recorded: int

    def of_pins(self, pins: Pins) -> str:
        """What a message says of a plan file."""
        here = len(pins.of_arch(self.arch))
        if not here:
            return (f"0 of {len(pins.rows)} pins hold here: they are for {pins.written_for()}, this plan is for "
                    f"{self.arch}")  # fmt: skip
        text = f"{self.pinned} of {here} pins for {self.arch} hold here ({self.regions} regions planned)"
        return text if self.pinned else f"{text}: they were written for another recipe, batch or parallel split"

    def of_records(self, records: Records) -> str:
        """What a message says of a file of records."""
        gpus = ", ".join(map(short_name, records.gpus(self.arch)))
        none = f"none of its {len(records.rows)} records is for a region of this plan"
        if self.measured:
            return f"{self.measured} of {self.regions} regions have a measured time ({gpus})"
        if self.recorded:
            return (f"0 of {self.regions} regions have a measured time: the rows of {gpus} are of other versions, "
                    "engines or failures")  # fmt: skip
        if not gpus:
            told = ", ".join(dict.fromkeys(r.arch for r in records.rows)) or "nothing"
            return f"{none}: they are of {told}, this plan is for {self.arch}"
        return f"{none} (arch {self.arch}; other sizes or parallel split)"


def applied(arch: str, plans: Iterable[Plan], pins: Pins | None = None, records: Records | None = None) -> Applied:
    """Counts over the plans for ``arch`` among ``plans``."""
    rows = pins.of_arch(arch) if pins is not None else {}
    known = {r.region for r in records.rows if r.arch == arch} if records is not None else set()
    measured: dict[str, bool] = {}
    pinned, recorded = set(), set()
    for plan in {id(p): p for p in plans if p.arch.name == arch}.values():
        for part in (plan.forward, plan.backward):
            for region in part.regions if part else ():
                if region.engine == "runner":
                    continue
                key = region.region.key()
                measured[key] = measured.get(key, True) and region.measured_seconds is not None
                if key in rows and plan.policy.chooses:
                    pinned.add(key)
                if known and region_key(region.region) in known:
                    recorded.add(key)
    return Applied(arch, len(measured), sum(measured.values()), len(pinned), len(recorded))
