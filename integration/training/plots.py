"""What is drawn from a metrics file: a loss curve, TensorBoard events. Usable alone: ``python -m layerplan.integration.training.plots FILE``."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from .metrics import read_metrics

_SCALARS = ("loss", "validation_loss", "grad_norm", "lr", "tokens_per_s", "flops_per_s", "mfu", "memory_bytes")
_SMOOTH = 0.9


def plot_loss(metrics: Path, png: Path, *, title: str = "") -> Path | None:
    """Draw loss over steps, its moving average and the validation loss into ``png``; None if there is nothing to draw."""
    rows = [r for r in read_metrics(metrics) if r.get("loss") is not None]
    if not rows:
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    steps, losses, smooth = [r["step"] for r in rows], [r["loss"] for r in rows], []
    average = weight = 0.0
    for loss in losses:  # bias-corrected, so that the first steps are not pulled to zero
        average, weight = _SMOOTH * average + (1 - _SMOOTH) * loss, _SMOOTH * weight + (1 - _SMOOTH)
        smooth.append(average / weight)
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120)
    axes.plot(steps, losses, color="0.75", linewidth=1, label="loss")
    axes.plot(steps, smooth, color="tab:blue", linewidth=1.8, label="moving average")
    validation = [(r["step"], r["validation_loss"]) for r in rows if r.get("validation_loss") is not None]
    if validation:
        axes.plot(*zip(*validation, strict=True), color="tab:red", linewidth=1.4, marker="o", label="validation")
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
