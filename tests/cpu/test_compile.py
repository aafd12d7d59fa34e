"""``layerplan compile`` and ``layerplan cache``: what a recipe's plans need is compiled without a GPU, and travels."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from layerplan.integration import cli
from layerplan.integration.engines import manifest
from layerplan.integration.engines.arch import ARCHS
from layerplan.integration.engines.contract import BuildContext, Engine, Kernel, Offer
from layerplan.integration.engines.packages import locate
from layerplan.integration.graph.ir import GraphBuilder, TensorSpec
from layerplan.integration.plan_cache import ahead
from layerplan.integration.plan_cache.compiler import Compiler
from layerplan.integration.plan_cache.disk import Store
from layerplan.integration.planner.cover import region_of
from layerplan.integration.planner.planner import PlannedRegion
from layerplan.recipes import compile as module
from layerplan.recipes import load_recipe
from layerplan.recipes.compile import compile_recipe, planned_regions

needs_compiler = pytest.mark.skipif(not locate("cutlass").here, reason="needs nvidia-cutlass-dsl")
SCALE = Kernel("tests.cases.own_kernel:scale", (("dtype", "Float32"), ("width", 256)))
WRONG = Kernel("tests.cases.own_kernel:wrong", (("fault", "raise"),))


def region():
    b = GraphBuilder()
    graph = b.build([b.op("zeros_like", like=b.input("x", TensorSpec((8, 256), "float32")))])
    return region_of(graph, graph.nodes)


@pytest.fixture
def engine(monkeypatch):
    """An engine that asks for ``kernels``, and the recipe's plans, which it makes up alone."""

    class Own(Engine):
        id, asked = "test/own", (SCALE,)

        def kernels(self, region, arch, offer):
            return self.asked

    entry = manifest.Entry(Own.id, f"{__name__}:Own", ("zeros_like",), manifest.GPUS)
    monkeypatch.setitem(manifest.BY_ID, Own.id, entry)
    monkeypatch.setattr(manifest, "_load", lambda target: Own())
    planned = PlannedRegion(region(), Own.id, Offer(1.0), (), 0.0)
    monkeypatch.setattr(module, "planned_regions", lambda recipe, arch: [planned, planned])
    return Own


def run(*arguments: str):
    return CliRunner().invoke(cli.app, list(arguments))


# ---- compile ---------------------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.timeout(500)
def test_it_compiles_for_several_archs_then_finds_all_and_the_cache_travels(engine, monkeypatch, tmp_path):
    monkeypatch.setenv("LAYERPLAN_CACHE", str(tmp_path / "a"))
    command = ("compile", "gpt_tiny", "--arch", "sm_90a", "--arch", "sm_100a", "--arch", "H100", "-j", "2")
    done = run(*command, "--json")
    found = json.loads(done.stdout)
    assert done.exit_code == 0, done.stderr
    name = "tests.cases.own_kernel:scale(dtype=Float32, width=256)"
    rows = [(r["name"], r["arch"], r["state"], r["frame_bytes"]) for r in found["kernels"]]
    assert rows == [(name, "sm_100", "compiled", 0), (name, "sm_90", "compiled", 0)]
    assert all(r["seconds"] > 0 and 8 < r["registers"] < 64 for r in found["kernels"])
    assert done.stderr.count("compiled") == 2
    again = run(*command)
    assert again.exit_code == 0 and again.stdout.count(" cached ") == 2
    assert "0 compiled, 2 were there, 0 kept by their libraries, 0 failed" in again.stdout

    shown = run("cache", "show")
    assert shown.stdout.count(name) == 2 and "2 kernels" in shown.stdout
    assert run("cache", "export", str(tmp_path / "k.tar"), "--arch", "sm_90a").stdout.startswith("1 kernels")
    assert run("cache", "export", str(tmp_path / "k.tar")).stdout.startswith("2 kernels")
    monkeypatch.setenv("LAYERPLAN_CACHE", str(tmp_path / "b"))
    assert run("cache", "show").stdout.startswith("no kernels")
    assert run("cache", "import", str(tmp_path / "k.tar")).stdout.startswith("2 kernels taken, 0 were there already, 0 files refused")
    assert run("cache", "import", str(tmp_path / "k.tar")).stdout.startswith("0 kernels taken, 2 were there already, 0 files refused")
    other = run("cache", "export", str(tmp_path / "none.tar"), "--arch", "sm_80")
    assert other.exit_code == 1 and "kernels for sm_100a, sm_90a alone" in other.stderr
    assert run("cache", "verify").exit_code == 0
    next((tmp_path / "b").glob("*.o")).write_bytes(b"")
    repaired = run(*command)
    assert repaired.stdout.count(" cached ") == 1 and "1 compiled, 1 were there" in repaired.stdout
    assert run("cache", "verify").exit_code == 0
    assert run(*command).stdout.count(" cached ") == 2
    next((tmp_path / "b").glob("*.o")).write_bytes(b"")
    broken = run("cache", "verify")
    assert broken.exit_code == 1 and broken.stdout.count("is not the file that its JSON describes") == 3
    assert "1 kernels and" in run("cache", "prune", "--max-mib", "0").stdout


@needs_compiler
@pytest.mark.timeout(500)
def test_a_kernel_that_does_not_compile_is_named_and_the_others_are_compiled(engine, monkeypatch, tmp_path):
    monkeypatch.setenv("LAYERPLAN_CACHE", str(tmp_path))
    monkeypatch.setattr(engine, "asked", (WRONG, SCALE))
    done = run("compile", "gpt_tiny", "--arch", "sm_80")
    assert done.exit_code == 1
    assert "sm_80: tests.cases.own_kernel:wrong(fault=raise) does not compile: " in done.stdout
    assert "no such tile" in done.stdout
    assert "1 compiled, 0 were there, 0 kept by their libraries, 1 failed" in done.stdout


def test_jobs_run_in_as_many_processes_as_asked_for_each_of_one_arch_at_a_time(engine, monkeypatch, tmp_path):
    alive, most, both = set(), [0], threading.Barrier(2)

    class Fake:
        def __init__(self, chip, variables):
            alive.add(self)

        def compile_library(self, engine, ctx):
            most[0] = max(most[0], len(alive))
            if both is not None:
                both.wait(30)
            return 1.5

        def close(self):
            alive.discard(self)

    monkeypatch.setattr(ahead, "Compiler", Fake)
    variables = {"A": str(tmp_path)}
    jobs = [ahead.Job("test/own", ARCHS[a], ctx=BuildContext(region(), ARCHS[a], None), variables=variables)
            for a in ("sm_90", "sm_90", "sm_100", "sm_100")]  # fmt: skip
    heard = []
    done = ahead.compile_all(jobs, Store(()), 2, heard.append)
    assert most == [2] and not alive and heard == done
    assert {(d.name, d.state, d.seconds) for d in done} == {("test/own: zeros_like", ahead.KEPT, 1.5)}


def test_of_a_recipe_s_plans_everything_is_compiled_ahead_or_named_with_the_reason_once(tmp_path):
    recipe = load_recipe("llama3_8b", [])
    regions = list(planned_regions(recipe, ARCHS["sm_90"]))
    jobs, rest = ahead.jobs_of([(r.engine, BuildContext(r.region, ARCHS["sm_90"], r.offer)) for r in regions], tmp_path)
    assert {r.engine for r in regions} == {j.engine for j in jobs} | {r.engine for r in rest}
    assert len({(r.engine, r.arch) for r in rest}) == len(rest) and all(r.note for r in rest)
    notes = {r.engine: r.note for r in rest}
    assert "on the GPU" in notes["pointwise/inductor"] and "compiled kernels" in notes["linear/torch"]
    # evaluation runs other regions than training: what nothing saves is not written
    forward = {r.region.key() for r in regions}
    assert len(forward) > len({r.region.key() for r in regions if len(r.region.graph.outputs) > 1})


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("package", "engine", "op"), [("quack", "loss/quack", "cross_entropy")])
def test_a_library_s_kernel_is_compiled_into_a_cache_of_its_arch(package, engine, op, tmp_path):
    if not locate(package).here:
        pytest.skip(f"needs {package}")
    b = GraphBuilder()
    inputs = {"logits": TensorSpec((8, 512), "bfloat16"), "targets": TensorSpec((8,), "int64")}
    made = b.op(op, **{p: b.input(p, s) for p, s in inputs.items()})
    graph = b.build(list(made) if isinstance(made, tuple) else [made])
    found = region_of(graph, graph.nodes)
    loaded = manifest.BY_ID[engine].load()
    ctx = BuildContext(found, ARCHS["sm_90"], loaded.match(found, ARCHS["sm_90"]))
    variables = loaded.ahead_variables(ctx, str(tmp_path))
    compiler = Compiler("sm_90a", variables)
    assert compiler.compile_library(engine, ctx) > 0
    compiler.close()
    (folder,) = (Path(v) for v in variables.values())
    assert "sm_90" in folder.parts and list(folder.rglob("*.o"))


@pytest.mark.parametrize(("arguments", "words"), [
    (["gpt_tiny", "--arch", "cpu"], "--arch = cpu: kernels are compiled for GPUs"),
    (["gpt_tiny", "--arch", "sm_77"], "arch = 'sm_77'"),
    (["gpt_tiny", "plan.layers=transformer_engine"], "runs no plans"),
    (["gpt_tinny"], "gpt_tiny"),
])  # fmt: skip
def test_what_cannot_be_compiled_for_is_refused_in_one_line(arguments, words):
    done = run("compile", *arguments)
    assert done.exit_code == 2 and words in done.stderr


def test_without_a_folder_the_cache_commands_say_what_to_set(monkeypatch):
    for name in ("LAYERPLAN_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for command in ("show", "verify", "prune"):
        done = run("cache", command)
        assert done.exit_code == 2 and "LAYERPLAN_CACHE" in done.stderr
    assert compile_recipe(load_recipe("gpt_tiny", []), [], 1, ()).folder is None


def test_a_file_that_is_no_archive_ends_an_import_with_its_name(monkeypatch, tmp_path):
    monkeypatch.setenv("LAYERPLAN_CACHE", str(tmp_path / "c"))
    (tmp_path / "x").write_text("no tar")
    for file, words in (("x", "is no tar file"), ("nowhere", "No such file")):
        done = run("cache", "import", str(tmp_path / file))
        assert done.exit_code == 2 and words in done.stderr


def test_cache_commands_say_what_they_did_not_do(monkeypatch, tmp_path):
    monkeypatch.setenv("LAYERPLAN_CACHE", str(tmp_path / "c"))
    (tmp_path / "c").mkdir()
    old, young = (tmp_path / "c" / f"{letter * 64}.o" for letter in "ab")
    for file in (old, young):
        file.write_bytes(b"cut off")
    os.utime(old, (0, 0))
    assert "object files are not read for this: 'layerplan cache verify' does" in run("cache", "show").stdout
    assert run("cache", "prune").stdout.startswith("0 kernels and 1 broken files removed; 1 broken files kept: younger than a minute")
    assert young.exists() and not old.exists()
    nothing = run("cache", "export", str(tmp_path / "k.tar"))
    assert nothing.exit_code == 1 and "has no whole kernels" in nothing.stderr and not (tmp_path / "k.tar").exists()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LAYERPLAN_CACHE", str(tmp_path / "file"))
    assert "is not a folder" in run("cache", "show").stdout


def test_a_cache_folder_that_takes_no_files_ends_a_compile_at_once_in_one_error(engine, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LAYERPLAN_CACHE", str(tmp_path / "file"))
    done = run("compile", "gpt_tiny", "--arch", "sm_90")
    assert done.exit_code == 2 and done.stdout == ""
    assert done.stderr.count("takes no files") == 1 and "name a folder first that can be written" in done.stderr


def test_where_all_is_there_a_folder_that_takes_no_files_is_no_fault(engine, monkeypatch, tmp_path):
    monkeypatch.setenv("LAYERPLAN_CACHE", str(tmp_path / "cache"))
    assert run("compile", "gpt_tiny", "--arch", "sm_90").exit_code == 0
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LAYERPLAN_CACHE", os.pathsep.join([str(tmp_path / "file"), str(tmp_path / "cache")]))
    done = run("compile", "gpt_tiny", "--arch", "sm_90")
    assert done.exit_code == 0 and "\n0 compiled, " in done.stdout, done.stdout + done.stderr
