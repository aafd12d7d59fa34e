"""``layerplan demo``: the whole path on this machine's own text, in a few minutes and without a GPU or a download.

Prepares the Python standard library's sources, times a few steps, says what the run will be, trains ``gpt_tiny``, stops, resumes, draws the loss curve and
completes a prompt.
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from ...recipes import RecipeError, load_recipe
from .quiet import quiet

PACKAGES = ("asyncio", "collections", "concurrent", "ctypes", "dbm", "email", "html", "http", "importlib", "json", "logging",
            "multiprocessing", "re", "sqlite3", "unittest", "urllib", "xml", "zipfile")  # fmt: skip
"""Packages of the standard library that are prose-like Python; its tests are left out. Top-level modules are taken too."""

PROMPT = "def __init__(self, "
_MIN_STEPS, _FIRST_SHARE = 60, 0.85


def find_sources(stdlib: Path | None = None) -> list[Path]:
    """Top-level modules and some packages of the standard library. Raises FileNotFoundError naming the folder."""
    root = stdlib or Path(sysconfig.get_paths()["stdlib"])
    found = [p for p in sorted(root.glob("*.py")) if not p.name.startswith("_sysconfigdata")]
    found += [root / name for name in PACKAGES if (root / name).is_dir()]
    if not found:
        raise FileNotFoundError(f"{root}: holds no Python sources; this Python was installed without its library's text")
    return found


def run_demo(workdir: Path, *, seconds: float = 110.0, stdlib: Path | None = None) -> int:
    """The demo in ``workdir``, training for about ``seconds`` (at least 60 steps) on the sources in ``stdlib``, by default this
    Python's. Returns the exit status: 0 if the loss clearly fell, 1 if it did not, 2 if the demo cannot be run."""
    from .launch import EXIT_OK, dry_run_report, load_checked, run

    quiet()
    workdir = Path(workdir)
    started = time.monotonic()

    def head(text: str) -> None:
        print(f"\n== {text}  ({time.monotonic() - started:.0f} s)", flush=True)

    try:
        head("1. prepare the standard library's sources")
        prefix = _prepared(workdir, stdlib)
        runs = _new_folder(workdir)
        common = [f"data.prefix={prefix}", f"checkpoint.dir={runs}", "checkpoint.keep=2"]

        head("2. what the run will be")
        steps = _affordable_steps(workdir, common, seconds)
        first = int(steps * _FIRST_SHARE)
        common += [f"schedule.decay_steps={steps}", f"schedule.warmup_steps={min(20, steps // 4)}", f"checkpoint.every_steps={max(10, first // 2)}"]
        whole = [*common, f"train.steps={steps}", "logging.tensorboard=true"]
        dry_run_report(load_checked("gpt_tiny", whole, dry_run=True), print)

        head(f"3. train as far as step {first} of {steps}")
        status = run(load_recipe("gpt_tiny", [*common, f"train.steps={first}"]))

        head(f"4. resume and train to step {steps}")
        status = status or run(load_recipe("gpt_tiny", whole))
        if status != EXIT_OK:
            return status

        head("5. loss curve")
        fell = _curve(runs)

        head("6. complete a prompt")
        from .complete import complete

        print(PROMPT + complete(runs, PROMPT, max_new_tokens=64, temperature=0.7, seed=1))
        head("done")
        return EXIT_OK if fell else 1
    except (RecipeError, FileNotFoundError) as error:
        print(f"layerplan demo: {error}", file=sys.stderr)
        return 2


def _new_folder(workdir: Path) -> Path:
    """``run``, or ``run-2`` and so on where earlier runs lie: they stay as they are."""
    runs, number = workdir / "run", 1
    while runs.exists():
        number += 1
        runs = workdir / f"run-{number}"
    if number > 1:
        print(f"{workdir}: holds an earlier run, which stays; this one goes to {runs}")
    return runs


def _prepared(workdir: Path, stdlib: Path | None) -> Path:
    from .data_prepare import prepare

    prefix = workdir / "data" / "stdlib"
    info, tokenizer, _ = prepare(find_sources(stdlib), prefix, tokenizer="bpe", vocab_size=2048)
    print(f"{prefix}: {info.documents} documents, {info.tokens:,} tokens, {tokenizer.kind} tokenizer of {tokenizer.vocab_size} ids")
    return prefix


def _affordable_steps(workdir: Path, common: list[str], seconds: float) -> int:
    """Steps that fit ``seconds``, by the pace of a few that are thrown away."""
    from .metrics import FILE, read_metrics
    from .trainer import train

    trial = Path(tempfile.mkdtemp(prefix="trial.", dir=workdir))
    overrides = [*common, "checkpoint.dir=none", f"logging.dir={trial}", "logging.progress=false", "logging.plot=false", "train.steps=12"]
    train(load_recipe("gpt_tiny", overrides), say=lambda _: None)
    pace = sorted(r["seconds"] for r in read_metrics(trial / FILE)[4:])
    typical = pace[len(pace) // 2]
    steps = max(_MIN_STEPS, int(seconds / typical))
    print(f"a step takes about {typical:.2f} s here: {steps} steps in about {steps * typical:.0f} s")
    shutil.rmtree(trial, ignore_errors=True)
    return steps


def _curve(runs: Path) -> bool:
    from .metrics import FILE, read_metrics

    losses = [r["loss"] for r in read_metrics(runs / FILE)]
    tail = losses[-10:]
    end = sum(tail) / len(tail)
    print(f"loss {losses[0]:.3f} -> {end:.3f} over {len(losses)} steps; drawn in {runs / 'loss.png'}, numbers in {runs / FILE}")
    return end < 0.75 * losses[0]
