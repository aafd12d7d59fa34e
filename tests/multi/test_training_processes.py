"""The trainer as users start it: the command, killed and stopped from outside, and torchrun."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from training_ranks import overrides, prepare_data

from layerplan.integration.engines.arch import ARCHS
from layerplan.integration.planner import plan_file
from layerplan.integration.training.metrics import FILE, read_metrics
from layerplan.integration.training.plots import plot_loss
from layerplan.recipes import load_recipe
from layerplan.recipes.estimate import estimate_recipe

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 150

# A run that is killed, as by kill -9 or the loss of its machine, when step 4's data is written and its marker is not.
KILLED = """
import os, signal, sys
from layerplan.integration.training import checkpoint
from layerplan.integration.training.launch import pretrain_command

finish = checkpoint.Checkpointer._finish

def killed(self):
    if self._pending.step == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    finish(self)

checkpoint.Checkpointer._finish = killed
if __name__ == "__main__":
    sys.exit(pretrain_command("gpt_tiny", sys.argv[1:], False))
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    pytest.importorskip("megatron.core")
    return prepare_data(tmp_path_factory.mktemp("data"))


@contextlib.contextmanager
def started(arguments, log: Path):
    """A process in a group of its own that does not outlive the test."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with log.open("w") as out:
        process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT,
                                   start_new_session=True)  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(condition, process, log: Path, what: str):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert process.poll() is None, f"ended with {process.returncode} before {what}:\n{log.read_text()[-4000:]}"
        assert time.monotonic() < deadline, f"no {what} in {LIMIT_S} s:\n{log.read_text()[-4000:]}"
        time.sleep(0.05)


def test_a_run_killed_while_saving_resumes_from_its_last_complete_save_and_sigterm_saves_and_exits_zero(data, tmp_path):
    run, log = tmp_path / "run", tmp_path / "log"
    common = overrides(data, str(run), "checkpoint.every_steps=2", "schedule.decay_steps=1000000", "train.steps=1000000")
    (tmp_path / "killed.py").write_text(KILLED)
    with started([str(tmp_path / "killed.py"), *common], log) as process:
        assert process.wait(LIMIT_S) == -signal.SIGKILL, log.read_text()[-4000:]
    before = {r["step"]: r["loss"] for r in read_metrics(run / FILE)}
    assert sorted(p.name for p in run.glob("step_*")) == ["step_0000002", "step_0000004"]
    assert not (run / "step_0000004" / "COMPLETE.json").exists()

    def rows():
        return {r["step"]: r["loss"] for r in read_metrics(run / FILE)}

    with started(["-m", "layerplan", "pretrain", "gpt_tiny", *common], log) as process:
        wait_for(lambda: "resumed at" in log.read_text(), process, log, "resume")
        wait_for(lambda: max(rows(), default=0) >= 6, process, log, "step 6")
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0, log.read_text()[-4000:]
    said = log.read_text()
    assert "step_0000004: has no COMPLETE.json" in said and "resumed at step 2" in said
    assert "Warning" not in said and "No CUDA runtime" not in said, "nobody can do anything about those"
    after = rows()
    assert sorted(after) == list(range(1, len(after) + 1)), "each step once"
    assert {s: after[s] for s in before} == before, "steps that were run again gave the same losses"
    last = max(after)
    assert f"stopped by a signal after step {last}, saved" in said
    assert (run / f"step_{last:07d}" / "COMPLETE.json").exists()
    assert plot_loss(run / FILE, tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_torchrun_trains_two_pipeline_stages_and_writes_one_set_of_metrics(data, tmp_path):
    run, log = tmp_path / "run", tmp_path / "log"
    common = overrides(data, str(run), "parallel.pipeline=2", "train.steps=3", "logging.tensorboard=true")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "layerplan", "pretrain", "gpt_tiny", *common]
    with started(launcher, log) as process:
        assert process.wait(LIMIT_S) == 0, log.read_text()[-4000:]
    rows = read_metrics(run / FILE)
    assert [r["step"] for r in rows] == [1, 2, 3]
    assert rows[0]["lr"] == 0.0 and 0 < rows[1]["lr"] < rows[2]["lr"], "warm-up"
    for row in rows:
        assert row["tokens_per_s"] > 0 and row["flops_per_s"] > row["tokens_per_s"] and row["memory_bytes"] > 10**6
        assert row["tokens"] == row["step"] * 4 * 32 and "mfu" not in row
    assert (run / "step_0000003" / "COMPLETE.json").exists() and list((run / "tensorboard").iterdir())
    assert log.read_text().count("checkpoint complete") == 1


def test_torchrun_says_what_is_wrong_with_a_recipe_once(data, tmp_path):
    log = tmp_path / "log"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "layerplan", "pretrain", "gpt_tiny", "train.step=1"]
    with started(launcher, log) as process:
        assert process.wait(LIMIT_S) != 0
    assert log.read_text().count("did you mean train.steps?") == 1


def test_a_dry_run_says_what_the_run_would_be_and_refuses_what_it_cannot_be(tmp_path):
    log = tmp_path / "log"
    code = ("import sys; from layerplan.integration.training.launch import pretrain_command as p; "
            "a = p('llama3_8b', ['plan.arch=sm_90'], True); b = p('gpt_tiny', ['train.step=1', 'optimizer.lr=x'], True); "
            "c = p('gpt_tiny', ['data.prefix=/nowhere/x', 'plan.file=/nowhere/p.json'], True); "
            "d = p('gpt_tiny', ['train.eval_every_steps=50', 'data.split=98,2,0', f'plan.file={sys.argv[1]}'], True); "
            "sys.exit(0 if (a, b, c, d) == (0, 2, 2, 2) else 1)")  # fmt: skip
    # a pin that no engine obeys: every linear on the attention engine
    recipe = estimate_recipe(load_recipe("gpt_tiny"), ARCHS["cpu"])
    rows = [(arch, key, dataclasses.replace(pin, engine="attention/torch_cpu") if pin.ops == ("linear",) else pin) for arch, key, pin in recipe.pins().rows]
    plan_file.save(tmp_path / "pins.json", plan_file.Pins(tuple(rows)))
    with started(["-c", code, str(tmp_path / "pins.json")], log) as process:
        assert process.wait(LIMIT_S) == 0, log.read_text()[-4000:]
    said = log.read_text()
    assert "parameters  8,030,261,248" in said and "memory      about 86." in said and "GPU         H200-SXM has 141 GiB: 5" in said
    assert "schedule    rate up to 0.0003 in 2,000 steps, cosine to 3e-05 at step 100,000\n" in said
    assert "GPU         none here: plan.arch=H100" in said
    assert "did you mean train.steps?" in said and "optimizer.lr = 'x': must be a finite number" in said
    assert "/nowhere/x.idx: no such file" in said and "/nowhere/x.tokenizer.json" not in said and "plan.file = '/nowhere/p.json': no such file" in said
    assert "validation  off" in said and "validation  every 50 steps on 8 batches = 64 sequences" in said
    assert "pins attention/torch_cpu" in said and "has no code for linear" in said and "set plan.file=none" in said
