"""The package as a user gets it: wheel, sdist, editable, bare checkout, checkout without links; and what sets it up."""

from __future__ import annotations

import ast
import importlib
import itertools
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import layerplan

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("integration", "modules", "kernels", "recipes")
SMOKE = """
import sys, torch, layerplan
from layerplan import ops
y = ops.rms_norm(torch.ones(2, 8), torch.ones(8), eps=1e-5)
from layerplan.kernels.norm.torch import TorchNorm
from layerplan.recipes import RECIPES
assert torch.allclose(y, torch.ones(2, 8), atol=1e-4) and RECIPES
assert layerplan.Arch is sys.modules["layerplan.integration.engines.arch"].Arch
print(layerplan.__file__, TorchNorm.__module__)
"""


def python(code: str, *, cwd: Path, path: Path | str = "", check: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh process with only ``path`` on PYTHONPATH."""
    env = {**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, timeout=240)
    assert not check or done.returncode == 0, done.stderr
    return done


def copy_checkout(to: Path) -> Path:
    to.mkdir(parents=True)
    for part in ("layerplan", *PARTS):
        shutil.copytree(ROOT / part, to / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "constraints.txt", "Makefile"):
        shutil.copy(ROOT / name, to / name)
    return to


def source_files() -> set[str]:
    """Every module of the package by the name that it must have in a wheel."""
    below = {f"layerplan/{p.relative_to(ROOT)}" for part in PARTS for p in (ROOT / part).rglob("*.py")}
    return {n for n in below if "__pycache__" not in n} | {f"layerplan/{p.name}" for p in (ROOT / "layerplan").glob("*.py")}


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, Path]:
    """Wheel, sdist and editable wheel, made offline by the build backend itself."""
    pytest.importorskip("setuptools", minversion="77")
    tree, out = copy_checkout(tmp_path_factory.mktemp("build") / "tree"), tmp_path_factory.mktemp("dist")
    made = {}
    for kind in ("sdist", "wheel", "editable"):
        (out / kind).mkdir()
        python(f"from setuptools import build_meta as b; b.build_{kind}({str(out / kind)!r})", cwd=tree)
        (made[kind],) = (out / kind).iterdir()
    return made


def test_the_public_names_are_frozen():
    assert layerplan.__all__ == ["Arch", "Policy", "__version__", "apply_policy", "compare", "explain", "ops", "plan", "report", "warm"]
    assert len(layerplan.__all__) <= 10
    assert dir(layerplan) == sorted(layerplan.__all__)


@pytest.mark.parametrize("name", layerplan.__all__)
def test_every_public_name_leads_somewhere(name):
    value = getattr(layerplan, name)
    if name == "ops":
        assert value is importlib.import_module("layerplan.integration.ops")
    elif name != "__version__":
        assert value.__name__ == name and value.__module__.startswith("layerplan.")


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(AttributeError, match=r"'opps'; it has Arch, .*ops"):
        _ = layerplan.opps


def test_importing_layerplan_imports_neither_torch_nor_megatron():
    code = "import sys, layerplan, layerplan.integration; print(sorted({'torch', 'megatron', 'numpy'} & set(sys.modules)))"
    assert python(code, cwd=ROOT).stdout.strip() == "[]"


@pytest.mark.parametrize("part", ["integration", "modules", "recipes"])
def test_a_bare_import_is_refused_and_says_what_to_import(part):
    done = python(f"import {part}", cwd=ROOT, check=False)
    assert done.returncode != 0
    assert f"ImportError: import layerplan.{part}, not {part}" in done.stderr


def test_kernels_has_no_init_because_a_package_of_that_name_exists():
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_the_links_are_relative_and_lead_to_the_folders():
    for part in PARTS:
        link = ROOT / "layerplan" / part
        if link.is_symlink():
            assert os.readlink(link) == f"../{part}"
        assert (link if link.is_symlink() else ROOT / part).is_dir()


def test_a_bare_checkout_on_the_path_works(tmp_path):
    where, module = python(SMOKE, cwd=tmp_path, path=ROOT).stdout.split()
    assert Path(where) == ROOT / "layerplan" / "__init__.py" and module == "layerplan.kernels.norm.torch"


@pytest.mark.parametrize("kind", ["absent", "text file"])
def test_a_checkout_without_links_works(tmp_path, kind):
    """A ZIP download leaves links out or turns each into a file that holds the target's name."""
    tree = copy_checkout(tmp_path / "tree")
    for part in PARTS:
        (tree / "layerplan" / part).unlink()
        if kind == "text file":
            (tree / "layerplan" / part).write_text(f"../{part}")
    where, module = python(SMOKE, cwd=tmp_path, path=tree).stdout.split()
    assert Path(where) == tree / "layerplan" / "__init__.py" and module == "layerplan.kernels.norm.torch"
    assert "ImportError: import layerplan.modules" in python("import modules", cwd=tree, check=False).stderr


def test_the_wheel_holds_every_module_and_nothing_else(built):
    names = set(zipfile.ZipFile(built["wheel"]).namelist())
    package = {n for n in names if ".dist-info/" not in n}
    assert package == source_files() | {"layerplan/py.typed"}
    assert built["wheel"].name == f"layerplan-{layerplan.__version__}-py3-none-any.whl"


# the environment that runs a test may hold an editable install of its own: a path, or a finder on it
FORGET = f"""
import site, sys
sys.path[:] = [p for p in sys.path if p != {str(ROOT)!r}]
sys.meta_path[:] = [f for f in sys.meta_path if "__editable__" not in getattr(f, "__module__", "")]
for name in [n for n in sys.modules if n.startswith("__editable__")]:
    del sys.modules[name]
"""


def test_the_wheel_works_from_where_it_is_unpacked(built, tmp_path):
    zipfile.ZipFile(built["wheel"]).extractall(tmp_path / "site")
    where, _ = python(SMOKE, cwd=tmp_path, path=tmp_path / "site").stdout.split()
    assert Path(where).parent == tmp_path / "site" / "layerplan"
    code = "from layerplan.integration.engines.packages import install_command; print(install_command('train'))"
    assert python(code, cwd=tmp_path, path=tmp_path / "site").stdout == "pip install 'layerplan[train]'\n"
    bare = python(f"{FORGET}import modules", cwd=tmp_path, path=tmp_path / "site", check=False)
    assert "No module named 'modules'" in bare.stderr


def test_the_sdist_builds_the_same_wheel(built, tmp_path):
    with tarfile.open(built["sdist"]) as tar:
        tar.extractall(tmp_path, filter="data")
    (tree,) = tmp_path.iterdir()
    assert not list(tree.rglob("*.pyc"))
    python("from setuptools import build_meta as b; b.build_wheel('dist')", cwd=tree)
    (again,) = (tree / "dist").glob("*.whl")
    assert set(zipfile.ZipFile(again).namelist()) == set(zipfile.ZipFile(built["wheel"]).namelist())


def test_the_editable_install_leads_to_the_checkout(built, tmp_path):
    zipfile.ZipFile(built["editable"]).extractall(tmp_path / "site")
    folder = str(tmp_path / "site")
    code = f"{FORGET}sys.path.insert(0, {folder!r})\nsite.addsitedir({folder!r})\n" + SMOKE
    where, _ = python(code, cwd=tmp_path).stdout.split()
    assert Path(where).parent.name == "layerplan" and Path(where).parents[1].name == "tree"


def test_the_editable_install_is_found_from_the_folder_that_a_checkout_of_the_packages_name_stands_in(tmp_path):
    tree = copy_checkout(tmp_path / "layerplan")
    python("from setuptools import build_meta as b; b.build_editable('..')", cwd=tree)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    # as for `python -c`: the current folder goes before all that is installed
    folder = str(tmp_path / "site")
    code = f"{FORGET}assert sys.path[0] == ''\nsite.addsitedir({folder!r})\n" + SMOKE
    where, _ = python(code, cwd=tmp_path).stdout.split()
    assert Path(where) == tree / "layerplan" / "__init__.py"


@pytest.mark.parametrize("start", ["import layerplan", "import runpy; runpy.run_module('layerplan', run_name='__main__')"])
def test_an_older_python_is_told_which_one_is_needed(start, tmp_path):
    done = python(f"import sys; sys.version_info = (3, 11, 9, 'final', 0); {start}", cwd=tmp_path, path=ROOT, check=False)
    assert done.returncode == 1 and "ImportError: layerplan needs Python 3.12 or newer; this is 3.11 (" in done.stderr
    assert ast.parse((ROOT / "layerplan" / "__init__.py").read_text(), feature_version=(3, 7)), "an older Python reads it"


def test_the_script_starts_the_command_line(built):
    with zipfile.ZipFile(built["wheel"]) as wheel:
        (entry,) = (n for n in wheel.namelist() if n.endswith("entry_points.txt"))
        text = wheel.read(entry).decode()
    module, _, function = re.search(r"layerplan = ([\w.]+):(\w+)", text).group(0).partition("= ")[2].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


# ---- dependencies ----------------------------------------------------------------------------------------------------


def _project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _name(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement).group(0).lower()


def test_dependencies_and_extras_are_frozen():
    project = _project()
    assert project["version"] == layerplan.__version__ and project["requires-python"] == ">=3.12"
    assert [_name(d) for d in project["dependencies"]] == [
        "torch", "numpy", "apache-tvm-ffi", "nvidia-cutlass-dsl", "cuda-python", "typer", "rich",
    ]  # fmt: skip
    assert {extra: [_name(d) for d in names] for extra, names in project["optional-dependencies"].items()} == {
        "megatron": ["megatron-core"],
        "train": ["omegaconf", "tokenizers", "tensorboard", "matplotlib", "psutil"],
        "peers": ["nvidia-cudnn-frontend", "quack-kernels", "flash-attn-4"],
        "te": ["transformer-engine"],
        "dev": ["pytest", "pytest-xdist", "pytest-timeout", "hypothesis", "ruff", "mypy", "setuptools"],
    }
    gpu_only = [d for d in project["dependencies"] if _name(d) in ("apache-tvm-ffi", "nvidia-cutlass-dsl", "cuda-python")]
    assert all("sys_platform == 'linux'" in d for d in gpu_only)
    assert any(d.startswith("nvidia-cutlass-dsl[cu13]>=4.8") for d in gpu_only)


def test_the_commands_demand_what_each_extra_brings_and_the_code_imports():
    from layerplan.integration.engines.packages import EXTRAS

    imported = [d for d in map(_name, _project()["optional-dependencies"]["train"]) if d != "omegaconf"]  # no code reads it
    assert {extra: list(names) for extra, names in EXTRAS.items()} == {"megatron": ["megatron.core"], "train": imported}


def test_constraints_pin_every_direct_dependency_and_hold_no_address():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert all(re.fullmatch(r"[A-Za-z0-9][\w.-]*==[\w.]+", line) for line in lines)
    pins = {line.partition("==")[0].lower().replace("_", "-"): line.partition("==")[2] for line in lines}
    assert len(pins) == len(lines)
    extras = _project()["optional-dependencies"]
    wanted = [*_project()["dependencies"], *itertools.chain.from_iterable(extras.values())]
    assert {_name(d) for d in wanted} <= set(pins)
    assert pins["torch"] == "2.11.0" and pins["megatron-core"].startswith("0.19.")


# ---- make ------------------------------------------------------------------------------------------------------------

WORKING = """#!/bin/sh
echo "$0 $*" >> "{log}"
if [ "$1 $2" = "-m venv" ]; then mkdir -p .venv/bin; cp "$0" .venv/bin/python; fi
exit 0
"""


@pytest.fixture
def machine(tmp_path) -> tuple[Path, dict[str, str]]:
    """A checkout's Makefile on a machine whose python3.12 is a shim that fails, beside a pyenv 3.12 that works."""
    if shutil.which("make") is None:
        pytest.skip("no make here")
    tree, log = tmp_path / "tree", tmp_path / "calls"
    tree.mkdir()
    log.touch()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tree / name)
    _script(tmp_path / "bin" / "python3.12", "#!/bin/sh\necho 'pyenv: python3.12: command not found' >&2\nexit 127\n")
    _script(tmp_path / "pyenv" / "versions" / "3.12.7" / "bin" / "python", WORKING.format(log=log))
    env = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "PYENV_ROOT": str(tmp_path / "pyenv"), "HOME": str(tmp_path)}
    return tree, env


def _script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def _make(machine, *arguments: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Runs make; returns the process and what was called since the last time."""
    tree, env = machine
    log = tree.parent / "calls"
    log.write_text("")
    done = subprocess.run(["make", *arguments], cwd=tree, env=env, capture_output=True, text=True, timeout=60)
    return done, log.read_text().splitlines()


def test_set_up_passes_over_a_python_that_does_not_run(machine):
    done, calls = _make(machine, "setup")
    assert done.returncode == 0, done.stderr
    assert any("3.12.7/bin/python -m venv" in c for c in calls)
    installs = [c for c in calls if "-m pip install" in c]
    assert installs and all("-c constraints.txt" in c for c in installs)
    assert any(c.endswith("-e .[megatron,train,dev]") for c in installs)


def test_a_second_call_sets_nothing_up_again_even_with_new_file_times(machine):
    _make(machine, "setup")
    os.utime(machine[0] / "pyproject.toml")
    os.utime(machine[0] / "constraints.txt")
    done, calls = _make(machine, "setup")
    assert done.returncode == 0 and calls == []


def test_new_pins_are_installed_into_the_old_environment(machine):
    _make(machine, "setup")
    with open(machine[0] / "constraints.txt", "a") as f:
        f.write("another==1.0\n")
    _, calls = _make(machine, "setup")
    assert any("-m pip install" in c for c in calls) and not any("-m venv" in c for c in calls)


def test_a_failed_install_is_tried_again(machine):
    tree, _ = machine
    broken = tree.parent / "pyenv" / "versions" / "3.12.7" / "bin" / "python"
    working = broken.read_text()
    broken.write_text(working.replace("exit 0", 'case "$*" in *"pip install"*) exit 1;; esac\nexit 0'))
    done, _ = _make(machine, "setup")
    assert done.returncode != 0
    broken.write_text(working)
    _script(tree / ".venv" / "bin" / "python", working)
    done, calls = _make(machine, "setup")
    assert done.returncode == 0 and any("-m pip install" in c for c in calls)


def test_a_machine_without_python_is_told_what_to_install(machine):
    shutil.rmtree(machine[0].parent / "pyenv")
    done, calls = _make(machine, "setup")
    assert done.returncode != 0 and calls == []
    assert "layerplan needs Python 3.12" in done.stderr


def test_demo_and_test_set_up_first_and_then_work(machine):
    tree, _ = machine
    _make(machine, "setup")
    for name in ("layerplan", "ruff"):
        _script(tree / ".venv" / "bin" / name, WORKING.format(log=tree.parent / "calls"))
    done, calls = _make(machine, "demo")
    assert done.returncode == 0 and [c.split("/")[-1] for c in calls] == ["layerplan demo"]
    done, calls = _make(machine, "test")
    assert done.returncode == 0
    assert calls[0].endswith("ruff check .")
    assert "-m pytest tests/cpu tests/multi -n 2 --dist loadfile" in calls[1]


def test_ci_runs_make_test(tmp_path):
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & stat.S_IXUSR
    _script(tmp_path / "make", f'#!/bin/sh\necho "$PWD $*" > "{tmp_path}/called"\nexit 3\n')
    done = subprocess.run([str(script)], cwd=tmp_path, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, timeout=60)
    assert done.returncode == 3  # what make says is what CI hears
    assert (tmp_path / "called").read_text().split() == [str(ROOT), "test"]
