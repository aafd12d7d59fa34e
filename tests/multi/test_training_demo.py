"""``layerplan demo``: the whole path on a handful of sources, and what it says where there are none."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path

import pytest
from harness import run_ranks

SOURCES = ("ast", "asyncio/base_events.py", "dataclasses", "json/decoder.py", "random", "textwrap")
SECONDS = 1.0  # the demo's own least number of steps takes longer: that many are made


def _demo(folder: str) -> dict:
    """First without sources, then on a few of the standard library's."""
    import shutil
    import sysconfig

    from layerplan.integration.training.demo import PACKAGES, find_sources, run_demo

    def run(stdlib, name):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = run_demo(Path(folder) / name, seconds=SECONDS, stdlib=stdlib)
        return {"status": status, "out": out.getvalue(), "err": err.getvalue()}

    empty, few, installed = Path(folder) / "empty", Path(folder) / "few", Path(sysconfig.get_paths()["stdlib"])
    (empty / "not_a_package").mkdir(parents=True)
    for name in SOURCES:
        relative = name if name.endswith(".py") else f"{name}.py"
        (few / relative).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(installed / relative, few / relative)
    (few / "_sysconfigdata_of_a_machine.py").write_text("paths = {}\n")
    found = {"found": [p.name for p in find_sources(few)], "whole": len(find_sources()), "packages": len(PACKAGES)}
    return found | {"none": run(empty, "none"), "few": run(few, "work"), "left": sorted(p.name for p in (Path(folder) / "none").glob("*"))}


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    pytest.importorskip("megatron.core")
    folder = tmp_path_factory.mktemp("demo")
    return run_ranks("test_training_demo:_demo", world=1, timeout=300, folder=str(folder))[0] | {"folder": str(folder)}


def test_top_level_modules_and_known_packages_are_the_sources(demo):
    assert demo["found"] == ["ast.py", "dataclasses.py", "random.py", "textwrap.py", "asyncio", "json"]
    assert demo["whole"] > 100 + demo["packages"]


def test_a_python_without_its_sources_is_said_with_the_folder_and_nothing_is_left(demo):
    found = demo["none"]
    assert found["status"] == 2 and demo["left"] == []
    assert found["err"].strip() == (f"layerplan demo: {demo['folder']}/empty: holds no Python sources; this Python was installed without "
                                    "its library's text")  # fmt: skip


def test_the_whole_path_prepares_plans_trains_resumes_draws_and_completes(demo):
    found, work = demo["few"], Path(demo["folder"]) / "work"
    assert found["status"] == 0, found["err"][-2000:]
    heads = [line for line in found["out"].splitlines() if line.startswith("== ")]
    assert [re.sub(r"\s+\(\d+ s\)", "", h) for h in heads] == [
        "== 1. prepare the standard library's sources", "== 2. what the run will be", "== 3. train as far as step 51 of 60",
        "== 4. resume and train to step 60", "== 5. loss curve",
        "== 6. complete a prompt", "== done"]  # fmt: skip
    assert "6 documents" in found["out"] and "rms_norm" in found["out"] and "60 steps in about" in found["out"]
    assert re.findall(r"(\d+) steps = ", found["out"]) == ["60"], "what the run will be is said once, and is what is run"
    assert "resumed at step 51 from" in found["err"]
    rows = [json.loads(line) for line in (work / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == list(range(1, 61)) and rows[-1]["loss"] < 0.75 * rows[0]["loss"]
    assert (work / "run" / "loss.png").read_bytes().startswith(b"\x89PNG") and list((work / "run" / "tensorboard").iterdir())
    assert sorted(p.name for p in (work / "run").glob("step_*")) == ["step_0000051", "step_0000060"]
    assert not list(work.glob("trial*")), "the run that measured the pace is thrown away"
    assert "Warning" not in found["err"] and "No CUDA runtime" not in found["err"], "nobody can do anything about those"
    assert "def __init__(self, " in found["out"].partition("== 6.")[2]
