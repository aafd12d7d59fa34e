"""The doctor: what it finds on this machine, and that nothing which is broken can break it."""

from __future__ import annotations

import importlib.metadata as metadata
import io
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from rich.console import Console

from layerplan.integration import doctor
from layerplan.integration.engines.manifest import MANIFEST
from layerplan.integration.settings import settings

ROOT = Path(__file__).resolve().parents[2]
HEALTHY = {
    "status": "ok", "version": "2.11.0+cu130", "file": "torch/__init__.py", "seconds": 1.0, "cuda_build": "13.0", "cudnn": 91900,
    "driver_cuda": 13000, "nccl": [2, 28, 9], "available": True, "archs": ["sm_90"], "cudnn_files": [],
    "devices": [{"index": 0, "name": "NVIDIA H200", "capability": [9, 0], "memory_gib": 139.7}],
}  # fmt: skip


@pytest.fixture
def fake(monkeypatch):
    """Sets what the machine looks like: torch's facts, the driver, the installed distributions and their requirements."""

    def install(torch=HEALTHY, driver="580.1", packages=None, requires=(), env=None):
        monkeypatch.setattr(doctor, "probe_torch", lambda timeout: dict(torch))
        monkeypatch.setattr(doctor, "probe_import", lambda module, timeout: None)
        monkeypatch.setattr(doctor, "_driver", lambda: {"version": driver})
        monkeypatch.setattr(doctor, "relevant_environment", lambda: dict(env or {}))
        if packages is not None:
            monkeypatch.setattr(metadata, "distributions", lambda: [_Distribution(n, v, w) for n, v, w in packages])
        monkeypatch.setattr(metadata, "requires", lambda name: list(requires))
        return doctor.collect()

    return install


class _Distribution:
    def __init__(self, name, version, where):
        self.metadata, self.version, self._where = {"Name": name}, version, where

    def locate_file(self, _):
        return self._where


def _packages(**versions):
    return [(name.replace("_", "-"), version, "site-packages") for name, version in versions.items()]


CLEAN = {"torch": "2.11.0", "nvidia_cudnn_cu13": "9.19.0.56", "nvidia_nccl_cu13": "2.28.9", "triton": "3.6.0"}


def _rendered(facts):
    out = io.StringIO()
    doctor.render(facts, Console(file=out, width=200))
    return out.getvalue()


def test_a_healthy_gpu_machine_has_no_problems(fake):
    facts = fake(packages=_packages(**CLEAN))
    assert facts["problems"] == []
    assert (facts["gpus"][0]["arch"], facts["gpus"][0]["rates_of"]) == ("sm_90", "H200-SXM")
    assert "planned as sm_90 with the rates of H200-SXM" in " ".join(_rendered(facts).split())
    assert {e["id"] for e in facts["engines"]} == {e.id for e in MANIFEST}
    rows = {(e["id"], e["arch"]): e for e in facts["engines"]}
    assert rows["linear/torch", "sm_90"]["runs"]
    assert not rows["attention/torch_cpu", "sm_90"]["runs"] and "sm_90" in rows["attention/torch_cpu", "sm_90"]["reason"]
    text = _rendered(facts)
    assert "NVIDIA H200" in text and "problems: none" in text


def test_facts_are_json_and_have_the_frozen_keys(fake):
    facts = json.loads(json.dumps(fake(packages=_packages(**CLEAN))))
    assert set(facts) == {
        "layerplan", "python", "system", "packages", "libraries", "megatron", "torch", "driver", "gpus", "engines", "compiler",
        "caches", "environment", "problems",
    }  # fmt: skip


def test_what_compiles_own_kernels_and_the_folders_that_keep_them_are_said(fake, monkeypatch, tmp_path):
    monkeypatch.setenv("LAYERPLAN_CACHE", f"{tmp_path}:/nowhere/kernels")
    monkeypatch.setattr(doctor.toolkit, "major", lambda: 12)
    monkeypatch.setattr(doctor, "linker", lambda: None)
    (tmp_path / ("0" * 64 + ".so")).touch()
    facts = fake(packages=_packages(**CLEAN, nvidia_cutlass_dsl="4.8.1"))
    first, second = (c for c in facts["caches"] if c["name"] == "layerplan")
    assert (first["path"], first["remark"]) == (str(tmp_path), "0 kernels, 1 broken files")
    assert (second["exists"], second["remark"]) == (False, "0 kernels, only read")
    assert facts["compiler"] == {"dsl": "4.8.1", "cuda": 12, "linker": None}
    text = " ".join(_rendered(facts).split())
    assert "nvidia-cutlass-dsl 4.8.1 for CUDA 12, linked by nothing: kernels load through the compiler" in text
    assert "without nvidia-cutlass-dsl" in _rendered(fake(packages=_packages(**CLEAN)))


def test_two_cudnns_are_a_problem_that_names_both(fake):
    (problem,) = fake(packages=_packages(**CLEAN, nvidia_cudnn_cu12="9.10.2.21"))["problems"]
    assert "two cuDNNs" in problem and "nvidia-cudnn-cu12 9.10.2.21" in problem and "nvidia-cudnn-cu13 9.19.0.56" in problem


def test_a_library_for_two_cuda_versions_is_a_problem(fake):
    (problem,) = fake(packages=_packages(**CLEAN, nvidia_nccl_cu12="2.27.5"))["problems"]
    assert "nvidia-nccl-cu12 2.27.5" in problem and "two CUDA versions" in problem


def test_the_compilers_two_sets_of_libraries_are_no_problem(fake):
    extra = {"nvidia_cutlass_dsl_libs_cu12": "4.8.1", "nvidia_cutlass_dsl_libs_cu13": "4.8.1"}
    assert fake(packages=_packages(**CLEAN, **extra))["problems"] == []


def test_torch_built_for_another_cuda_than_the_libraries_is_a_problem(fake):
    packages = _packages(torch="2.11.0", triton="3.6.0", nvidia_cudnn_cu12="9.10.2.21")
    (problem,) = fake(packages=packages)["problems"]
    assert "torch is built for CUDA 13.0" in problem and "nvidia-cudnn-cu12" in problem and "install nvidia-cudnn-cu13" in problem


def test_a_library_of_another_version_than_torch_was_built_with_is_a_problem(fake):
    requires = ["nvidia-cudnn-cu13==9.19.0.56 ; platform_system == 'Linux'", "numpy==1.0; extra == 'opt'", "filelock"]
    (problem,) = fake(packages=_packages(**{**CLEAN, "nvidia_cudnn_cu13": "9.20.0.1", "numpy": "2.5.5"}), requires=requires)["problems"]
    assert "9.19.0.56" in problem and "9.20.0.1" in problem and "pip install" in problem


def test_a_package_that_is_installed_twice_is_a_problem(fake):
    packages = [*_packages(**CLEAN), ("triton", "3.5.0", "other-packages")]
    (problem,) = fake(packages=packages)["problems"]
    assert "triton is installed twice" in problem and "other-packages" in problem


def test_a_half_removed_package_does_not_stop_the_report(fake):
    facts = fake(packages=[*_packages(**CLEAN), (None, "1.0", "site-packages")])
    assert facts["packages"]["torch"]["version"] == "2.11.0" and facts["problems"] == []


def test_a_driver_without_a_visible_gpu_is_a_problem(fake):
    (problem,) = fake(torch={**HEALTHY, "devices": []}, packages=_packages(**CLEAN))["problems"]
    assert "580.1" in problem and "sees no GPU" in problem


def test_a_cpu_build_of_torch_on_a_gpu_machine_is_a_problem(fake):
    (problem,) = fake(torch={**HEALTHY, "cuda_build": None, "devices": []}, packages=_packages(torch="2.11.0"))["problems"]
    assert "CPU build" in problem


def test_a_driver_too_old_for_torch_is_a_problem(fake):
    (problem,) = fake(torch={**HEALTHY, "driver_cuda": 12040}, packages=_packages(**CLEAN))["problems"]
    assert "CUDA 13.0" in problem and "12.4" in problem


def test_a_machine_without_driver_and_gpu_is_not_a_problem(fake):
    facts = fake(torch={**HEALTHY, "devices": [], "driver_cuda": 0}, driver=None, packages=_packages(**CLEAN))
    assert facts["problems"] == [] and facts["gpus"] == []
    assert any(e["runs"] and e["arch"] == "cpu" for e in facts["engines"])


def test_a_gpu_that_layerplan_does_not_plan_for_is_a_problem(fake):
    old = [{"index": 0, "name": "Tesla V100", "capability": [7, 0], "memory_gib": 16.0}]
    facts = fake(torch={**HEALTHY, "devices": old}, packages=_packages(**CLEAN))
    assert facts["gpus"][0]["arch"] is None and facts["gpus"][0]["rates_of"] is None
    assert "planned as nothing" in _rendered(facts)
    assert any("Tesla V100" in p and "7.0" in p for p in facts["problems"])
    assert "Tesla V100" in _rendered(facts)


def test_a_cudnn_on_the_library_path_is_a_problem(fake, tmp_path):
    (tmp_path / "libcudnn.so.9").touch()
    (problem,) = fake(packages=_packages(**CLEAN), env={"LD_LIBRARY_PATH": f"/nowhere:{tmp_path}"})["problems"]
    assert str(tmp_path) in problem and "LD_LIBRARY_PATH" in problem


@pytest.mark.parametrize(("name", "value", "said"), [
    ("LAYERPLAN_POLICY", "fastest", "environment: LAYERPLAN_POLICY = 'fastest'"),
    ("LAYERPLAN_RECORDS", "nope.json", "environment: LAYERPLAN_RECORDS = nope.json: no such file"),
])  # fmt: skip
def test_a_wrong_variable_or_file_that_one_names_is_a_problem_and_not_the_end(fake, monkeypatch, name, value, said):
    settings.cache_clear()
    monkeypatch.setenv(name, value)
    try:
        facts = fake(packages=_packages(**CLEAN))
    finally:
        monkeypatch.undo()
        settings.cache_clear()
    assert [p for p in facts["problems"] if p.startswith(said)]


def test_a_missing_package_of_an_engine_is_its_reason(fake, monkeypatch):
    monkeypatch.setattr(type(MANIFEST[0]), "absent", lambda self: "needs 'triton'" if "triton" in self.needs else None)
    rows = {e["id"]: e for e in fake(packages=_packages(**CLEAN))["engines"] if e["arch"] == "sm_90"}
    assert not rows["pointwise/inductor"]["runs"] and "'triton'" in rows["pointwise/inductor"]["reason"]


@pytest.mark.parametrize("status", ["missing", "broken", "timeout"])
def test_without_a_working_torch_no_engine_runs_and_the_report_says_so(fake, status):
    facts = fake(torch={"status": status, "error": "[it] broke"}, packages=_packages(numpy="2.5.5"))
    assert not any(e["runs"] for e in facts["engines"])
    assert any(status in p and "[it] broke" in p for p in facts["problems"])
    assert "no engine can run here" in " ".join(facts["problems"])
    assert "[it] broke" in _rendered(facts)


# ---- the probe itself, in real processes -------------------------------------------------------------------------------


def _with_torch(monkeypatch, tmp_path, source):
    """Processes that are started from here find this torch first."""
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text(textwrap.dedent(source), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_a_torch_that_raises_on_import_is_broken_with_its_reason(monkeypatch, tmp_path):
    _with_torch(monkeypatch, tmp_path, "raise OSError('libcudart.so.13: cannot open shared object file')")
    facts = doctor.probe_torch(60)
    assert facts["status"] == "broken" and "libcudart.so.13" in facts["error"]


def test_a_torch_that_is_not_there_is_missing(monkeypatch, tmp_path):
    _with_torch(monkeypatch, tmp_path, "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    assert doctor.probe_torch(60)["status"] == "missing"


def test_a_torch_that_kills_its_process_is_broken(monkeypatch, tmp_path):
    _with_torch(monkeypatch, tmp_path, """
        import os, sys
        print("CUDA driver error", file=sys.stderr, flush=True)
        os.abort()
    """)  # fmt: skip
    facts = doctor.probe_torch(60)
    assert facts["status"] == "broken" and "CUDA driver error" in facts["error"] and "-6" in facts["error"]


def test_a_torch_that_hangs_runs_into_the_time_limit(monkeypatch, tmp_path):
    _with_torch(monkeypatch, tmp_path, "import time; time.sleep(60)")
    facts = doctor.probe_torch(1.0)
    assert facts["status"] == "timeout" and "1 s" in facts["error"]


def test_a_torch_whose_driver_calls_fail_still_gives_its_version(monkeypatch, tmp_path):
    _with_torch(monkeypatch, tmp_path, "__version__ = '9.9'\nprint('noise on stdout')")
    facts = doctor.probe_torch(60)
    assert facts["status"] == "ok" and facts["version"] == "9.9" and "AttributeError" in facts["errors"]["devices"]


def test_this_machine_is_reported_without_importing_torch():
    code = (
        "import json, sys; from layerplan.integration import doctor; facts = doctor.collect(); "
        "print(json.dumps([facts['torch']['status'], sorted({'torch', 'megatron', 'triton'} & set(sys.modules))]))"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["ok", []]


def test_counting_a_cache_stops_at_its_time_limit(tmp_path):
    for i in range(3):
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / "kernel.so").write_bytes(b"x" * 2**20)
    assert doctor._size(tmp_path) == {"exists": True, "files": 3, "mib": 3.0, "complete": True}
    assert doctor._size(tmp_path, limit_s=-1.0)["complete"] is False
    assert doctor._size(tmp_path / "gone")["exists"] is False
