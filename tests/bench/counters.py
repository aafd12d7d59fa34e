"""What a row's own kernels wait for, from the counters of Nsight Compute.

    python -m tests.bench.counters TEXT [TEXT ...] [--out FILE]

For each row of ``tests/bench/memory_rows.py`` whose family and name hold one of the texts: our engine's kernels are
launched over cold inputs under ``ncu``, and per kernel the record holds its time, bytes from and to memory, the shares
of the peak at which memory and the issue of instructions ran, warps that were there, and for what they waited, as warps
per issued instruction. Clocks stay as they are. Needs ``ncu`` on the PATH and a driver that lets it read counters.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from layerplan.integration.engines.arch import Arch
from layerplan.integration.engines.contract import Offer
from layerplan.integration.engines.manifest import BY_ID
from layerplan.integration.plan_cache import memory
from tests.bench.host_cost import environment
from tests.bench.memory_rows import FAMILIES, Row

STALLS = ("long_scoreboard", "short_scoreboard", "barrier", "lg_throttle", "mio_throttle", "math_pipe_throttle", "wait",
          "not_selected", "drain", "branch_resolving", "membar")  # fmt: skip
METRICS = {
    "gpu__time_duration.sum": "us", "dram__bytes_read.sum": "bytes_read", "dram__bytes_write.sum": "bytes_written",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "memory_%", "lts__t_sectors_op_write.sum": "l2_write_sectors",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "issue_%", "smsp__inst_executed.sum": "instructions",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps_%", "launch__registers_per_thread": "registers",
    **{f"smsp__average_warps_issue_stalled_{s}_per_issue_active.ratio": f"waits_{s}" for s in STALLS},
}  # fmt: skip
_UNITS = {
    "ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3,
    "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9,
}  # fmt: skip
_WARM = 3  # launches in front of the one that counts


def chosen(texts: Iterable[str]) -> Iterator[tuple[str, Row]]:
    texts = list(texts)
    for family, make in FAMILIES.items():
        for row in make():
            if any(text in f"{family}/{row.name}" for text in texts):
                yield f"{family}/{row.name}", row


def launch(name: str) -> None:
    """In the process that ncu watches: the row's engine over inputs that rotate."""
    (row,) = (row for full, row in chosen([name]) if full == name)
    arch, generator = Arch.of_device(0), torch.Generator(device="cuda").manual_seed(0)
    engine = BY_ID[row.own].load()
    offer = engine.match(row.region, arch)
    assert isinstance(offer, Offer), offer
    call = engine.build(memory.context(row.region, arch, offer)).launch
    cold = 4 * torch.cuda.get_device_properties(0).L2_cache_size
    sets = [row.make(generator) for _ in range(max(2, -(-cold // row.nbytes)))]
    for i in range(_WARM):
        call(*sets[i % len(sets)])
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    call(*sets[_WARM % len(sets)])
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def kernels(text: str) -> list[dict]:
    """Of ncu's CSV: a row for each kernel."""
    begin = text.find('"ID"')
    if begin < 0:
        raise RuntimeError(f"ncu gave no table: {text[-400:]}")
    found: dict[str, dict] = {}
    for line in csv.DictReader(io.StringIO(text[begin:])):
        made = found.setdefault(line["ID"], {"kernel": line["Kernel Name"][:120]})
        if (label := METRICS.get(line["Metric Name"])) is not None:
            value = float(line["Metric Value"].replace(",", "")) * _UNITS.get(line["Metric Unit"], 1.0)
            made[label] = round(value, 3)
    return list(found.values())


def measure(name: str) -> list[dict]:
    command = ["ncu", "--csv", "--clock-control", "none", "--profile-from-start", "off", "--metrics", ",".join(METRICS),
               sys.executable, "-m", "tests.bench.counters", "--launch", name]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    if done.returncode:
        raise RuntimeError(f"ncu ended with {done.returncode}: {(done.stdout + done.stderr)[-400:]}")
    return kernels(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("texts", nargs="*")
    parser.add_argument("--launch", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.launch:
        launch(given.launch)
        return
    if shutil.which("ncu") is None:
        parser.error("ncu is not on the PATH: it comes with CUDA's toolkit")
    names, rows = [name for name, _ in chosen(given.texts)], []
    if not names:
        parser.error(f"texts = {given.texts}: no row holds one; rows are family/name of tests/bench/memory_rows.py")
    for name in names:
        try:
            rows.append({"row": name, "kernels": measure(name)})
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            rows.append({"row": name, "error": str(error)})
        print(json.dumps(rows[-1]), flush=True)
    if given.out:
        record = {"what": "counters of own kernels", **environment(), "rows": rows}
        given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
