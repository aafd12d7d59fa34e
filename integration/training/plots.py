"""What is drawn from a metrics file: a loss curve, TensorBoard events. Usable alone: ``python -m layerplan.integration.training.plots FILE``."""

from __future__ import annotations

import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .metrics import read_metrics

_SCALARS = ("loss", "validation_loss", "grad_norm", "lr", "tokens_per_s", "flops_per_s", "mfu", "memory_bytes")
_SMOOTH = 0.9


def loss_rows(metrics: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file that have a loss."""
    return [r for r in read_metrics(metrics) if r.get("loss") is not None]


def smoothed(losses: Sequence[float]) -> list[float]:
    """The moving average of ``losses``, bias-corrected, so that the first ones are not pulled to zero."""
    average = weight = 0.0
    smooth = []
    for loss in losses:
        average, weight = _SMOOTH * average + (1 - _SMOOTH) * loss, _SMOOTH * weight + (1 - _SMOOTH)
        smooth.append(average / weight)
    return smooth


def plot_loss(metrics: Path, png: Path, *, title: str = "") -> Path | None:
    """Draw loss over steps, its moving average and the validation loss into ``png``; None if there is nothing to draw."""
    return plot_runs({"": metrics}, png, title=title)


def plot_runs(runs: Mapping[str, Path], png: Path, *, title: str = "") -> Path | None:
    """``plot_loss`` of several metrics files in one plot, each with its name and its median tokens/s; those without a loss are left out."""
    found = {name: rows for name, path in runs.items() if (rows := loss_rows(path))}
    if not found:
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120)
    for number, (name, rows) in enumerate(found.items()):
        alone, color = len(found) == 1, f"C{number}"
        steps, losses = [r["step"] for r in rows], [r["loss"] for r in rows]
        label = "moving average" if alone else f"{name}, {statistics.median(r['tokens_per_s'] for r in rows):,.0f} tokens/s"
        axes.plot(steps, losses, color="0.75" if alone else color, alpha=1 if alone else 0.3, linewidth=1, label="loss" if alone else None)
        # dashes: equal curves cover each other
        axes.plot(steps, smoothed(losses), color=color, linewidth=1.8, linestyle="--" if number % 2 else "-", label=label)
        validation = [(r["step"], r["validation_loss"]) for r in rows if r.get("validation_loss") is not None]
        if validation:
            axes.plot(*zip(*validation, strict=True), color="tab:red" if alone else color, linewidth=1.4, marker="o",
                      label="validation" if alone else f"{name}, validation")  # fmt: skip
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(png)
    plt.close(figure)
    return png


def write_tensorboard(metrics: Path, folder: Path) -> Path:
    """The rows as TensorBoard scalars, in a folder of their own that is written anew."""
    from torch.utils.tensorboard import SummaryWriter

    shutil.rmtree(folder, ignore_errors=True)
    with SummaryWriter(str(folder)) as writer:
        for row in read_metrics(metrics):
            for name in _SCALARS:
                if row.get(name) is not None:
                    writer.add_scalar(name, row[name], row["step"])
    return folder


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(plot_loss(Path(name), Path(name).with_suffix(".png")))
