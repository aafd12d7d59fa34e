"""Losses of several runs of one recipe in one plot, with their speed, and how far they lie apart.

    layerplan pretrain gpt_125m data.prefix=P train.steps=500 logging.dir=runs/ours
    layerplan pretrain gpt_125m data.prefix=P train.steps=500 logging.dir=runs/te plan.layers=transformer_engine
    python tests/bench/curves.py runs/ours runs/te --out curves.png [--names layerplan,te] [--record FILE]

A run is a folder with a metrics file, or that file. Per run a JSON line: median tokens/s, mean loss of the last steps,
and the largest distance of its moving average from the first run's over the steps that both have, and the step at which
it is reached. The first steps of both smoothing and training are part of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from host_cost import environment

from layerplan.integration.training.metrics import FILE
from layerplan.integration.training.plots import loss_rows, plot_runs, smoothed

LAST = 20


def metrics_of(run: Path) -> Path:
    path = run / FILE if run.is_dir() else run
    if not path.is_file() or not loss_rows(path):
        raise SystemExit(
            f"curves.py: {run}: must be a folder with {FILE}, or such a file, with at least one step in it; set "
            "logging.dir=FOLDER for the run"
        )
    return path


def compare(files: dict[str, Path]) -> list[dict]:
    """A row per run; the first is what the others are compared with."""
    averages, rows = {}, []
    for name, path in files.items():
        found = loss_rows(path)
        averages[name] = dict(zip((r["step"] for r in found), smoothed([r["loss"] for r in found]), strict=True))
        row = {"run": name, "steps": found[-1]["step"],
               "tokens_per_s": round(statistics.median(r["tokens_per_s"] for r in found), 1),
               "first_loss": found[0]["loss"], "last_loss": statistics.mean(r["loss"] for r in found[-LAST:]),
               "peak_gib": round(max(r["memory_bytes"] for r in found) / 2**30, 3)}  # fmt: skip
        first = next(iter(averages.values()))
        if rows and (both := first.keys() & averages[name].keys()):
            step = max(both, key=lambda s: abs(averages[name][s] - first[s]))
            row |= {"largest_distance": abs(averages[name][step] - first[step]), "at_step": step,
                    "speed_ratio": round(row["tokens_per_s"] / rows[0]["tokens_per_s"], 4)}  # fmt: skip
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="the plot, a .png")
    parser.add_argument("--names", help="what the runs are called, with commas between them (default: their folders)")
    parser.add_argument("--title", default="")
    parser.add_argument("--record", type=Path, help="write the rows as JSON, with the machine's facts")
    a = parser.parse_args()
    paths = [metrics_of(run) for run in a.runs]
    names = a.names.split(",") if a.names else [p.parent.name for p in paths]
    if len(set(names)) != len(paths):
        parser.error(f"--names = {','.join(names)}: must name each of the {len(paths)} runs differently")
    files = dict(zip(names, paths, strict=True))
    rows = compare(files)
    for row in rows:
        print(json.dumps(row), flush=True)
    print(plot_runs(files, a.out, title=a.title))
    if a.record:
        record = {"what": f"loss curves: {a.title or ' and '.join(names)}", **environment(), "rows": rows}
        a.record.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
