"""Metrics of a run: one JSON object per line, written by the first rank that knows the loss.

Fields: step, loss (nats per token), validation_loss (in the same unit; only where it was taken), load_balancing_loss (or seq_..., global_...)
and z_loss (of routers, mean over layers, before their coefficients; only where the recipe has them), grad_norm, lr, tokens
(seen so far), seconds (of the step), tokens_per_s (all ranks), flops_per_s (model FLOP/s, all ranks), mfu (fraction of the
ranks' peak; absent where the peak is unknown), memory_bytes (peak of the writing rank), digest (first row of each start only: SHA-256
of the recipe, data, versions, settings, plan file and measured times that all ranks share).
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import torch

FILE = "metrics.jsonl"


def peak_memory(device: torch.device) -> int:
    """Peak bytes: of the GPU's allocator, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Dense FLOP/s of the device in ``dtype`` ("bfloat16"), or None where no datasheet says: a CPU, an unknown GPU."""
    if device.type != "cuda":
        return None
    from ..engines.arch import Arch

    try:
        return Arch.of_device(device.index or 0).peak_flops(dtype)
    except ValueError:
        return None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Rows of a metrics file. A last line that a killed run left unfinished is passed over; any other broken line raises."""
    rows = []
    lines = path.read_text().split("\n") if path.exists() else []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except ValueError:
            if number < len(lines):  # a finished line ends in a newline, so only the last can be cut short
                raise ValueError(f"{path}, line {number}: is not JSON; the file was changed by something else") from None
    return rows


class MetricsError(RuntimeError):
    """A metrics file, or what is drawn from it, that cannot be read or written; names the file and the remedy."""


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        told = str(error) if str(path) in str(error) else f"{path}: cannot be written ({error})"
        raise MetricsError(f"{told}; free space there, or set logging.dir to another folder") from None


class Metrics:
    """Appends rows. Rows of steps after ``step``, left by a run that was killed, go first: those steps are run again. Every method
    raises MetricsError."""

    def __init__(self, folder: Path, step: int):
        self.path = folder / FILE
        with _naming(self.path):
            folder.mkdir(parents=True, exist_ok=True)
            self._begin(folder, step)

    def _begin(self, folder: Path, step: int) -> None:
        rows = read_metrics(self.path)
        if rows and not step:  # a new run in an old run's folder: keep the old one's numbers
            number = next(n for n in range(1, len(rows) + 10_000) if not (folder / f"metrics.{n}.jsonl").exists())
            self.path.rename(folder / f"metrics.{number}.jsonl")
        if any(not isinstance(r, dict) or not isinstance(r.get("step"), int) for r in rows):
            raise ValueError(f"{self.path}: holds rows without a step; the file was changed by something else")
        kept = [r for r in rows if r["step"] <= step] if step else []
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(r) + "\n" for r in kept))
        temporary.replace(self.path)
        self._file: TextIO = self.path.open("a")

    def write(self, row: dict[str, Any]) -> None:
        with _naming(self.path):
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()

    def close(self, draw: Callable[[], None] | None = None) -> None:
        """Close the file, then ``draw`` what is made from it."""
        with _naming(self.path):
            self._file.close()
            if draw is not None:
                draw()


class Progress:
    """On stderr: a bar where that is a terminal, a line now and then elsewhere."""

    _LINE_EVERY_S = 10.0

    def __init__(self, steps: int, done: int, *, show: bool):
        self._bar: Any = None
        self._show, self._steps, self._next_line = show, steps, 0.0
        if show and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"), TimeRemainingColumn()
            self._bar = Bar(*columns, console=Console(stderr=True))  # stdout may go elsewhere
            self._bar.start()
            self._task = self._bar.add_task("training", total=steps, completed=done, text="")

    def update(self, row: dict[str, Any], now: float) -> None:
        """``now``: seconds of a monotonic clock."""
        text = f"loss {row['loss']:.4f}  norm {row['grad_norm']:.3f}  lr {row['lr']:.2e}  {row['tokens_per_s']:,.0f} tokens/s"
        if "validation_loss" in row:
            text += f"  validation {row['validation_loss']:.4f}"
        if "mfu" in row:
            text += f"  MFU {row['mfu']:.1%}"
        if self._bar is not None:
            self._bar.update(self._task, completed=row["step"], text=text)
        elif self._show and (now >= self._next_line or row["step"] == self._steps or "validation_loss" in row):
            self._next_line = now + self._LINE_EVERY_S
            print(f"step {row['step']}/{self._steps}  {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
