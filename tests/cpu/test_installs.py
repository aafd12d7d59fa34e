"""What is believed installed: doctor and manifest against fake installs of every package name that they know."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import layerplan
from layerplan.integration import ops
from layerplan.integration.doctor import OPTIONAL, PACKAGES, VERSIONS
from layerplan.integration.engines import packages
from layerplan.integration.engines.manifest import BY_ID, MANIFEST
from layerplan.integration.engines.packages import KNOWN_VERSIONS, distribution, locate
from layerplan.integration.planner import cover
from layerplan.integration.planner.planner import PlanError
from layerplan.kernels.pointwise.inductor import InductorPointwise

ROOT = Path(__file__).resolve().parents[2]
MODULES = {name: module for name, module in PACKAGES.items() if module}
RIGHT = {name: VERSIONS[name][0] if name in VERSIONS else "1.2.3" for name in PACKAGES} | {"torch": "2.11.0", "triton": "3.6.0"} | KNOWN_VERSIONS
NEEDED = sorted({n for e in MANIFEST for n in e.needs})
EVERY = sorted({*MODULES.values(), *NEEDED})
# a machine without a driver, whose Python sees the fakes and the standard library alone
_ASK = """
import json, sys
sys.executable = sys.argv[1]
from layerplan.integration import doctor
from layerplan.integration.engines.manifest import MANIFEST
doctor._driver = lambda: {"version": None}
facts = doctor.collect()
assert not set(sys.modules) & {"torch", "triton", "cutlass", "quack", "deep_gemm", "megatron.core"}, "asking must import nothing"
print(json.dumps([facts, {e.id: e.absent() for e in MANIFEST}]))
"""


def code(folder: Path, module: str, source: str = "__version__ = 'fake'\n") -> Path:
    """A package with an __init__.py; parents of a dotted name that are not there stay plain folders."""
    package = folder.joinpath(*module.split("."))
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(source, encoding="utf-8")
    return package / "__init__.py"


def dist_info(folder: Path, name: str, version: str, *requires: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {r}" for r in requires)]
    (info / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture
def ask(tmp_path):
    """Runs doctor and manifest over a folder of fakes: (facts, engine id -> what is absent)."""
    (tmp_path / "fakes").mkdir()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n', encoding="utf-8")
    python.chmod(0o755)

    def run(fill):
        fill(tmp_path / "fakes")
        env = {**os.environ, "PYTHONPATH": f"{tmp_path / 'fakes'}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run([python, "-c", _ASK, python], capture_output=True, text=True, timeout=120, env=env, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_the_versions_are_those_of_layerplans_own_requirements():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [line.partition(";")[0].strip() for part in (project["dependencies"], *project["optional-dependencies"].values()) for line in part]
    # a floor that is a pre-release is there for pip, which takes none without it
    bounded = [line for line in lines if re.search(r">=[\d.]+(,|$)", line) and not line.startswith("setuptools")]
    ranged = {line.partition("[")[0].partition(">")[0]: line for line in bounded}
    assert set(ranged) == set(VERSIONS)
    for name, (least, below) in VERSIONS.items():
        assert ranged[name].endswith(f">={least}" + (f",<{below}" if below else ""))


def test_every_package_that_an_engine_needs_is_one_that_the_doctor_knows():
    for module in NEEDED:
        assert any(f"{module}.".startswith(f"{known}.") for known in MODULES.values()), module


def test_packages_of_the_right_version_are_there_and_no_problem(ask):
    def fill(folder):
        for name in PACKAGES:
            dist_info(folder, name, RIGHT[name])
        for module in EVERY:
            code(folder, module)

    facts, absent = ask(fill)
    for name in PACKAGES:
        row = facts["packages"][name]
        assert row["version"] == RIGHT[name] and row["remark"] is None, name
        if name in MODULES:
            assert row["location"].endswith(f"fakes/{MODULES[name].replace('.', '/')}/__init__.py")
    assert facts["problems"] == [] and set(absent.values()) == {None}
    assert all(e["runs"] for e in facts["engines"] if e["reason"] is None or "no code for" not in e["reason"])


def test_the_known_versions_are_those_that_the_extra_installs_and_the_constraints_pin_but_for_what_is_on_no_index():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    for name, version in KNOWN_VERSIONS.items():
        pinned = f"{name}=={version}" in project["optional-dependencies"]["peers"] and f"{name}=={version}" in pins
        assert pinned is (name not in packages.SOURCES), name


def test_packages_of_a_wrong_version_are_named_with_the_rule_and_the_cure(ask):
    def fill(folder):
        for name in PACKAGES:
            requires = ["triton==3.6.0; platform_system == 'Linux'"] if name == "torch" else []
            dist_info(folder, name, "0.20.1" if name == "megatron-core" else "3.5.0" if name == "triton" else "0.1", *requires)
        for module in EVERY:
            code(folder, module)

    facts, absent = ask(fill)
    for entry in MANIFEST:  # only those whose functions change are held to one version
        known = [n for n in map(distribution, entry.needs) if n in KNOWN_VERSIONS]
        for name in known:
            cure = f"pip install {packages.SOURCES[name]}" if name in packages.SOURCES else "pip install -c constraints.txt -e '.[peers]'"
            assert absent[entry.id] == f"needs {name} {KNOWN_VERSIONS[name]}, the version whose functions it knows; 0.1 is installed: {cure}"
            assert KNOWN_VERSIONS[name] in facts["packages"][name]["remark"]
        assert known or absent[entry.id] is None
    assert {n: r["version"] for n, r in facts["packages"].items()} == {n: "0.20.1" if n == "megatron-core" else "3.5.0" if n == "triton" else "0.1" for n in PACKAGES}
    assert "megatron-core 0.20.1 is installed, layerplan needs >=0.19,<0.20; pip install 'megatron-core>=0.19,<0.20'" in facts["problems"]
    assert "nvidia-cutlass-dsl 0.1 is installed, layerplan needs >=4.8; pip install 'nvidia-cutlass-dsl>=4.8'" in facts["problems"]
    assert any("built with triton 3.6.0, installed is 3.5.0" in p for p in facts["problems"])
    assert len(facts["problems"]) == 3


def test_packages_that_break_on_import_are_reasons_of_their_engines(ask):
    def fill(folder):
        for name in PACKAGES:
            dist_info(folder, name, RIGHT[name])
        for module in EVERY:
            code(folder, module, "raise OSError('libfoo.so.7: cannot open shared object file')\n")

    facts, absent = ask(fill)
    assert facts["torch"]["status"] == "broken" and "libfoo.so.7" in facts["torch"]["error"]
    assert not any(e["runs"] for e in facts["engines"])
    assert set(absent.values()) == {None}, "their code is there: only an import says that it is broken"
    for module in set(NEEDED) - {"torch"}:
        assert any(p.startswith(f"{module} is installed but cannot be imported: OSError: libfoo.so.7") for p in facts["problems"])


def test_a_broken_package_stops_only_the_engines_that_need_it(ask):
    def fill(folder):
        for name in PACKAGES:
            dist_info(folder, name, RIGHT[name])
        for module in EVERY:
            code(folder, module, "raise ImportError('built for another torch')\n" if module == "triton" else "__version__ = 'fake'\n")

    facts, _ = ask(fill)
    rows = {e["id"]: e for e in facts["engines"] if e["arch"] == "cpu"}
    assert not rows["pointwise/inductor"]["runs"] and rows["linear/torch"]["runs"]
    assert rows["pointwise/inductor"]["reason"] == "needs the package 'triton', which cannot be imported: ImportError: built for another torch"


def test_code_without_metadata_is_found_and_said_to_be_of_unknown_version(ask):
    def fill(folder):
        for module in EVERY:
            code(folder, module)

    facts, absent = ask(fill)
    for name in MODULES:
        row = facts["packages"][name]
        assert row["version"] is None and "unknown version" in row["remark"] and "fakes" in row["location"], name
    assert facts["problems"] == []
    for entry in MANIFEST:
        known = [n for n in map(distribution, entry.needs) if n in KNOWN_VERSIONS]
        assert known or absent[entry.id] is None
        assert all(KNOWN_VERSIONS[n] in absent[entry.id] and "no metadata that says its version" in absent[entry.id] for n in known)


def test_metadata_without_code_is_a_problem_and_no_install(ask):
    def fill(folder):
        for name in PACKAGES:
            dist_info(folder, name, RIGHT[name])

    facts, absent = ask(fill)
    for name, module in MODULES.items():
        row = facts["packages"][name]
        assert row["version"] == RIGHT[name] and row["location"] is None, name
        assert row["remark"] == f"{name} {RIGHT[name]} has metadata, but {module} has no code; reinstall it" and row["remark"] in facts["problems"]
    assert facts["packages"]["cuda-python"] == {"version": "1.2.3", "location": None, "remark": None}, "it brings no module of its own"
    assert all("not installed" in why for why in absent.values())


def test_a_folder_that_only_bears_the_name_is_not_an_install(ask):
    def fill(folder):
        for module in EVERY:
            inner = folder.joinpath(*module.split("."))
            inner.mkdir(parents=True, exist_ok=True)
            (inner / "notes.txt").write_text("no package", encoding="utf-8")

    facts, absent = ask(fill)
    for name, module in MODULES.items():
        row = facts["packages"][name]
        assert row["version"] is None and row["location"] is None, name
        assert f"'import {module}' finds the folder" in row["remark"] and "fakes" in row["remark"] and row["remark"] in facts["problems"]
    for entry in MANIFEST:
        assert "not installed" in absent[entry.id] and "without a package in it" in absent[entry.id]


def test_flash_attn_4_alone_is_not_taken_for_flash_attn(ask):
    def fill(folder):
        dist_info(folder, "flash-attn-4", "4.0.0")
        code(folder, "flash_attn.cute")

    facts, _ = ask(fill)
    assert facts["packages"]["flash-attn-4"]["version"] == "4.0.0" and facts["packages"]["flash-attn-4"]["location"]
    row = facts["packages"]["flash-attn"]
    assert row["version"] is row["location"] is None and row["remark"].startswith("optional, for Transformer Engine")


def test_an_absent_package_that_is_optional_says_what_it_is_for_and_how_it_is_installed_and_is_no_problem(ask):
    def fill(folder):
        for name in ("torch", "numpy"):
            dist_info(folder, name, RIGHT[name])
            code(folder, name)

    facts, _ = ask(fill)
    assert set(OPTIONAL) < set(PACKAGES) and facts["problems"] == []
    for name, (purpose, extra) in OPTIONAL.items():
        remark = facts["packages"][name]["remark"]
        assert remark.startswith(f"optional, for {purpose}") and (extra is None or remark.endswith(f"pip install -c constraints.txt -e '.[{extra}]'"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for name, (_, extra) in OPTIONAL.items():  # the extra does bring it
        assert extra is None or any(re.match(rf"{name}(\W|$)", line) for line in project["optional-dependencies"][extra])


# ---- the same in a process that plans ----------------------------------------------------------------------------------

def test_a_package_that_breaks_while_its_engine_is_built_is_an_error_with_the_cure(monkeypatch):
    def build(self, ctx):
        raise ImportError("libfoo.so.7: cannot open shared object file")

    monkeypatch.setattr(InductorPointwise, "build", build)
    with pytest.raises(PlanError, match=r"swiglu: pointwise/inductor cannot be built here: ImportError: libfoo\.so\.7") as caught:
        ops.swiglu(torch.ones(3, 14), engine="pointwise/inductor")
    assert "torch, triton" in str(caught.value) and "layerplan doctor" in str(caught.value)


@pytest.mark.parametrize(("package", "op", "shapes"), [
    ("quack-kernels", "rms_norm", {"x": ((64, 4096), "bfloat16"), "weight": ((4096,), "bfloat16")}),
    ("flash-attn-4", "sdpa", {p: ((1, 64, 8, 128), "bfloat16") for p in "qkv"}),
    ("deep-gemm", "grouped_matmul", {"x": ((512, 64), "bfloat16"), "weight": ((3, 64, 64), "bfloat16"), "offsets": ((3,), "int32")}),
])  # fmt: skip
def test_the_planner_declines_another_version_of_a_package_with_both_versions_and_takes_the_known_one(monkeypatch, package, op, shapes):
    rows = [e for e in MANIFEST if op in e.ops and package in map(distribution, e.needs)]
    assert rows
    given = {package: "99.1"}
    monkeypatch.setattr(packages, "locate", lambda module: packages.Place("here", f"{module}.py"))
    monkeypatch.setattr(packages, "installed_version", lambda name: given.get(name, "1.0"))
    monkeypatch.setattr(cover, "MANIFEST", tuple(dataclasses.replace(e, trial=False) for e in MANIFEST))
    packages.absence.cache_clear()
    try:
        attrs = {"rms_norm": {"eps": 1e-5}, "sdpa": {"causal": True}, "grouped_matmul": {"align": 128}}[op]
        found = layerplan.explain(op, shapes, "sm_90", **attrs).reasons()
        for entry in rows:
            assert f"needs {package} {KNOWN_VERSIONS[package]}" in found[entry.id] and "99.1 is installed" in found[entry.id]
        given[package] = f"{KNOWN_VERSIONS[package]}+cu130"  # a local build of the known version is that version
        packages.absence.cache_clear()
        found = layerplan.explain(op, shapes, "sm_90", **attrs)
        assert all(next(c for c in found.candidates if c.engine == e.id).offer is not None for e in rows)
    finally:
        packages.absence.cache_clear()


def test_an_engine_whose_module_cannot_be_imported_declines_with_the_reason(monkeypatch):
    row = dataclasses.replace(BY_ID["linear/torch"], id="linear/broken", target="layerplan.kernels.no_such.engine:Engine")
    monkeypatch.setattr(cover, "MANIFEST", (row, *MANIFEST))
    found = layerplan.explain("linear", {"x": ((8, 16), "bfloat16"), "weight": ((4, 16), "bfloat16")}, "sm_90")
    assert found.chosen == "linear/torch"
    assert "'layerplan.kernels.no_such.engine' cannot be imported: ModuleNotFoundError" in found.reasons()["linear/broken"]


def test_planning_imports_no_package_that_only_a_build_needs():
    code = ("import sys, layerplan; layerplan.explain('swiglu', {'x': ((64, 32), 'bfloat16')}, 'sm_90'); "
            "print(sorted({'triton', 'quack', 'flash_attn', 'cutlass'} & set(sys.modules)))")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_a_module_that_was_put_in_place_by_hand_is_no_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "no_such_package", type(sys)("no_such_package"))
    assert locate("no_such_package").state == "missing"
    assert locate("layerplan.integration.doctor").here and locate("layerplan.nothing").state == "missing"
    assert locate("json.decoder").location.endswith("json/decoder.py") and locate("json.decoder.deeper").state == "missing"
