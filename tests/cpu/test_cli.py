"""The command line: frozen commands and flags, no heavy imports for help, bad input in one line, extras named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from layerplan.integration import cli, doctor
from layerplan.integration.engines import packages
from layerplan.integration.graph.ops.table import op_table
from layerplan.integration.planner.explain import example
from layerplan.recipes import RECIPES

ROOT = Path(__file__).resolve().parents[2]
X = ("--shape", "x=4096x8192:bfloat16", "--shape", "weight=8192:bfloat16", "--attr", "eps=1e-5")


def run(*arguments: str):
    """The command in this process. Its ``exit_code``, ``stdout`` and ``stderr`` are what a shell would see."""
    return CliRunner().invoke(cli.app, list(arguments))


def run_process(*arguments: str, before: str = "", timeout: int = 120, **env: str):
    """``python -m layerplan`` in a process of its own, from another folder; ``before`` runs first in it."""
    code = f"{before}\nimport sys\nsys.argv = ['layerplan', *{list(arguments)!r}]\nfrom layerplan.__main__ import main\nmain()"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout, cwd="/",
                          env={**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "COLUMNS": "200", **env})  # fmt: skip


def _flags(command, path=()) -> dict[str, list[str]]:
    """Command path -> its arguments and flags, as click has them."""
    if hasattr(command, "commands"):
        found = {}
        for name, sub in command.commands.items():
            found |= _flags(sub, (*path, name))
        return found
    return {" ".join(path): [*(p.name for p in command.params if p.param_type_name == "argument"),
                             *(o for p in command.params if p.param_type_name == "option" for o in p.opts)]}  # fmt: skip


def test_commands_and_flags_are_frozen():
    assert _flags(typer.main.get_command(cli.app)) == {
        "doctor": ["--json"],
        "explain": ["op", "--shape", "--arch", "--attr", "--policy", "--engine", "--json"],
        "plan": ["recipe", "overrides", "--arch", "--save", "--json"],
        "compile": ["recipe", "overrides", "--arch", "-j", "--jobs", "--json"],
        "cache show": ["--json"],
        "cache verify": [],
        "cache export": ["file", "--arch"],
        "cache import": ["file"],
        "cache prune": ["--days", "--max-mib", "--other-versions"],
        "tune": ["recipe", "overrides", "--out", "--budget", "--device"],
        "pretrain": ["recipe", "overrides", "--dry-run"],
        "compare": ["recipe", "a", "b", "overrides", "--json"],
        "data prepare": ["inputs", "--output-prefix", "--tokenizer", "--vocab-size", "--jsonl-key"],
        "complete": ["checkpoint", "prompt", "--max-new-tokens", "--temperature", "--seed"],
        "demo": ["--workdir"],
    }


@pytest.mark.parametrize("arguments", [["--help"], ["pretrain", "--help"], ["explain", "--help"], ["data", "prepare", "--help"], ["--version"]])
def test_help_and_version_import_neither_torch_nor_megatron(arguments):
    before = (
        "import atexit, sys\n"
        "atexit.register(lambda: print('IMPORTED', sorted({'torch', 'megatron', 'numpy'} & set(sys.modules))))"
    )  # fmt: skip
    done = run_process(*arguments, before=before)
    assert done.returncode == 0, done.stderr
    assert "IMPORTED []" in done.stdout


def test_version_is_the_packages():
    import layerplan

    assert run("--version").stdout == f"layerplan {layerplan.__version__}\n"


def test_python_dash_m_layerplan_is_the_command():
    done = subprocess.run([sys.executable, "-m", "layerplan", "--version"], capture_output=True, text=True, timeout=60, cwd="/",
                          env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    assert done.returncode == 0 and done.stdout.startswith("layerplan ")


def test_an_unknown_command_is_refused():
    result = run("pretrian")
    assert result.exit_code == 2 and "pretrian" in result.stderr


# ---- explain ---------------------------------------------------------------------------------------------------------


def test_explain_names_the_engine_for_an_arch_that_is_not_here():
    result = run("explain", "rms_norm", *X, "--arch", "sm_90")
    assert result.exit_code == 0, result.stderr
    assert "norm/torch" in result.stdout and "reference/eager" in result.stdout and "backward" in result.stdout


def test_explain_as_json_is_the_explanation_as_data():
    result = run("explain", "rms_norm", *X, "--arch", "sm_90", "--json")
    data = json.loads(result.stdout)
    assert data["op"] == "rms_norm" and data["arch"] == "sm_90" and data["error"] is None
    assert [c["engine"] for c in data["candidates"] if c["chosen"]] == [data["chosen"]]
    assert all(c["reason"] for c in data["candidates"] if not c["chosen"])


def test_explain_of_an_engine_that_declines_fails_with_the_reason():
    shapes = ("--shape", "q=1x64x4x64:bfloat16", "--shape", "k=1x64x4x64:bfloat16", "--shape", "v=1x64x4x64:bfloat16", "--shape", "sink=4:float32")
    result = run("explain", "sdpa", *shapes, "--attr", "layout=bshd", "--attr", "causal=true", "--arch", "sm_90",
                 "--engine", "attention/torch_flash")  # fmt: skip
    assert result.exit_code == 1
    assert "sink" in result.stderr


@pytest.mark.parametrize(("arguments", "said"), [
    (["rms_nrm", *X, "--arch", "sm_90"], ["rms_nrm", "did you mean 'rms_norm'"]),
    (["rms_norm", *X, "--arch", "sm_91"], ["sm_91", "sm_90"]),
    (["rms_norm", *X, "--arch", "sm_90", "--engine", "norm/none"], ["norm/none", "norm/torch"]),
    (["rms_norm", *X, "--arch", "sm_90", "--engine", "attention/fa4"], ["'attention/fa4': has no code for rms_norm", "norm/torch"]),
    (["rms_norm", *X, "--arch", "sm_90", "--policy", "fastest"], ["fastest", "auto, strict, reference"]),
    (["rms_norm", "--shape", "x=4x:bfloat16", "--shape", "weight", "--arch", "sm_90"], ["x=4x:bfloat16", "'weight'", "NAME=SIZExSIZE:DTYPE"]),
    (["rms_norm", "--shape", "x=4x8:bfloat16", "--shape", "weight=9:bfloat16", "--attr", "eps=1e-5", "--arch", "sm_90"], ["weight", "9"]),
    (["rms_norm", *X, "--attr", "epsilon=1", "--arch", "sm_90"], ["epsilon", "eps"]),
    (["rms_norm", *X, "--attr", "=1", "--arch", "sm_90"], ["'=1'", "NAME=VALUE"]),
    (["attention", *X, "--arch", "sm_90"], ["attention", "did you mean 'sdpa'"]),
    (["atention"], ["atention", "did you mean 'sdpa'"]),
    (["sdpa", "--shape", "q=1x64x4x64:bf16", "--arch", "sm_90"],
     ["q = 'bf16': unknown dtype; did you mean bfloat16?", "add --shape k=SIZExSIZE:DTYPE", "add --shape v=SIZExSIZE:DTYPE"]),
    (["linear", "--shape", "x=8x8:wings", "--shape", "weight=8x8:wings", "--arch", "sm_90"], ["unknown dtype; known: float64"]),
    (["rms_norm", *X, "--arch", "H1000"], ["H1000", "sm_90", "a GPU's name such as H100; did you mean 'H100'"]),
    (["sdpa"], ["--shape and --arch must be given", "q, k, v", example("sdpa")]),
    (["linear", "--shape", "x=4x4:bfloat16"], ["--arch must be given", example("linear")]),
    (["concat", "--arch", "sm_90"], ["--shape must be given", "a, b", example("concat")]),
])  # fmt: skip
def test_explain_refuses_bad_input_in_a_line_without_traceback(arguments, said):
    result = run("explain", *arguments)
    assert result.exit_code == 2
    assert all(word in result.stderr for word in said), result.stderr
    assert "Traceback" not in result.stderr and isinstance(result.exception, SystemExit)


@pytest.mark.parametrize("op", op_table())
def test_the_examples_that_a_message_gives_work_as_they_stand(op):
    result = run(*example(op).split()[1:])
    assert result.exit_code == 0 and result.stdout.startswith(f"{op} on sm_90: "), result.stderr


def test_a_gpus_name_stands_for_its_arch():
    assert run("explain", "rms_norm", *X, "--arch", "A100").stdout.startswith("rms_norm on sm_80: ")


def test_shapes_are_parsed_and_all_wrong_ones_named():
    assert cli.parse_shapes(["x=2x3:bfloat16", "s=:float32", "e=0x4:float16"]) == {
        "x": ((2, 3), "bfloat16"), "s": ((), "float32"), "e": ((0, 4), "float16"),
    }  # fmt: skip
    with pytest.raises(ValueError) as error:
        cli.parse_shapes(["x=2,3:bfloat16", "y=2x-3:bfloat16", "z=2x3", "w=2:float32", "w=3:float32"])
    assert len(str(error.value).splitlines()) == 4


def test_attributes_are_parsed_and_all_wrong_ones_named():
    assert cli.parse_attributes(["causal=true", "window=[127, null]", "layout=sbhd", "eps=1e-5", "clamp=null"]) == {
        "causal": True, "window": (127, None), "layout": "sbhd", "eps": 1e-5, "clamp": None,
    }  # fmt: skip
    with pytest.raises(ValueError) as error:
        cli.parse_attributes(["causal", "=1", "eps=1.0.0", "a=1", "a=2"])
    assert len(str(error.value).splitlines()) == 4


# ---- doctor ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("problems", "code"), [([], 0), (["two cuDNNs"], 1)])
def test_doctor_says_by_its_exit_code_whether_something_stands_in_the_way(monkeypatch, problems, code):
    monkeypatch.setattr(doctor, "collect", lambda: {"problems": problems})
    result = run("doctor", "--json")
    assert result.exit_code == code and json.loads(result.stdout) == {"problems": problems}


def test_doctor_works_with_a_broken_torch_and_wrong_variables(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libcudart.so.13: not found')")
    done = run_process("doctor", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}", LAYERPLAN_POLICY="fastest")
    assert done.returncode == 1, done.stderr
    text = " ".join(done.stdout.split())
    assert "torch is broken: OSError: libcudart.so.13" in text and "LAYERPLAN_POLICY = 'fastest'" in text


def test_other_commands_refuse_wrong_variables_before_their_work():
    done = run_process("explain", "rms_norm", *X, "--arch", "sm_90", LAYERPLAN_POLICY="fastest")
    assert done.returncode == 2
    assert "LAYERPLAN_POLICY = 'fastest'" in done.stderr and "Traceback" not in done.stderr


# ---- recipes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["plan", "pretrain"])
def test_an_unknown_recipe_is_refused_with_the_close_name(command):
    result = run(command, "gpt_tinny")
    assert result.exit_code == 2
    assert "gpt_tinny" in result.stderr + result.stdout and "gpt_tiny" in result.stderr + result.stdout


def test_a_wrong_override_is_refused_with_the_close_field():
    result = run("plan", "gpt_tiny", "train.stpes=3", "--arch", "sm_90")
    assert result.exit_code == 2 and "stpes" in result.stderr and "steps" in result.stderr


def test_plan_saves_a_file_that_a_recipe_can_pin_and_refuses_what_it_cannot_write_or_read(tmp_path):
    from layerplan.integration.planner import plan_file

    file = tmp_path / "plan.json"
    result = run("plan", "gpt_tiny", "--arch", "sm_90", "--save", str(file), "--json")
    assert result.exit_code == 0, result.stderr
    shown = {row["engine"] for g in json.loads(result.stdout)["graphs"] for row in g["regions"]}
    pins = plan_file.load(file)
    assert pins.archs() == ("sm_90",) and {p.engine for p in pins.of_arch("sm_90").values()} == shown - {"runner"}
    again = run("plan", "gpt_tiny", f"plan.file={file}", "--arch", "sm_90", "--json")
    candidates = [c for g in json.loads(again.stdout)["graphs"] for row in g["regions"] for c in row["candidates"] if c["chosen"]]
    assert candidates and all(c["reason"] == f"pinned by plan.file = {file}" for c in candidates)
    result = run("plan", "gpt_tiny", "--save", str(tmp_path / "none" / "p.json"))
    assert result.exit_code == 2 and f"--save = {tmp_path}/none/p.json: the folder {tmp_path}/none does not exist" in result.stderr
    (tmp_path / "folder.json").mkdir()
    result = run("plan", "gpt_tiny", "--save", str(tmp_path / "folder.json"))
    assert result.exit_code == 2 and "folder.json: cannot be written (Is a directory)" in result.stderr and ".tmp" not in result.stderr
    file.write_text("{")
    result = run("plan", "gpt_tiny", f"plan.file={file}")
    assert result.exit_code == 2 and "plan.file" in result.stderr and "cannot be read" in result.stderr and "--save" in result.stderr


def test_plan_of_layers_that_run_no_plans_is_refused():
    result = run("plan", "gpt_tiny", "plan.layers=megatron_local")
    assert result.exit_code == 2 and "plan.layers = 'megatron_local': runs no plans that could be shown; set plan.layers=layerplan" in result.stderr


@pytest.mark.parametrize("command", ["plan", "compile", "tune", "pretrain", "compare"])
def test_help_of_a_command_on_a_recipe_lists_the_recipes(command):
    text = " ".join(run(command, "--help").stdout.split())
    assert f"Name of a recipe: {', '.join(RECIPES)}." in text


def test_a_wrong_arch_of_a_recipe_is_refused_with_the_archs_and_what_is_left():
    result = run("plan", "gpt_tiny", "plan.arch=foo")
    assert result.exit_code == 2 and "name one of these, or leave it out" in result.stderr and "at hand" not in result.stderr


@pytest.mark.parametrize("command", [("plan", "--save"), ("tune", "--out")])
def test_a_folder_that_is_not_there_is_known_before_torch_is_imported(command):
    name, option = command
    done = run_process(name, "gpt_tiny", option, "/nowhere/f.json", before=_HIDE.format(names=("torch",)))
    assert done.returncode == 2 and done.stderr == (
        f"layerplan: {option} = /nowhere/f.json: the folder /nowhere does not exist; make it, or name a file in another one\n"
    )


def test_complete_of_a_folder_that_is_not_there_says_so():
    pytest.importorskip("megatron.core")
    done = run_process("complete", "nope", "hello")
    assert done.returncode == 2 and "checkpoint = 'nope': no such folder; name a run's or a step's folder" in done.stderr


# ---- extras ----------------------------------------------------------------------------------------------------------

_HIDE = """
import importlib.abc, sys
class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hide())
import importlib.util
_find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name.partition(".")[0] in {names!r} else _find(name, *a)
"""


@pytest.mark.parametrize(("hidden", "arguments", "extras"), [
    (("megatron",), ("pretrain", "gpt_tiny"), ("megatron",)),
    (("megatron",), ("compare", "gpt_tiny", "auto", "reference"), ("megatron",)),
    (("tokenizers",), ("compare", "gpt_tiny", "auto", "reference", "data.prefix=d"), ("train",)),
    (("tokenizers", "matplotlib"), ("demo",), ("train",)),
    (("megatron", "tokenizers"), ("complete", "checkpoint", "def"), ("megatron", "train")),
    (("tokenizers",), ("data", "prepare", "a.txt", "--output-prefix", "out"), ("train",)),
])  # fmt: skip
def test_a_command_without_its_packages_says_what_to_install(hidden, arguments, extras):
    done = run_process(*arguments, before=_HIDE.format(names=hidden))
    assert done.returncode == 1
    assert f"pip install -c constraints.txt -e '.[{','.join(extras)}]'" in done.stderr and hidden[0] in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("hidden", "arguments"), [
    ("torch", ("explain", "rms_norm", *X, "--arch", "sm_90")), ("typer", ("--help",)), ("typer", ("pretrain", "gpt_tiny")),
])  # fmt: skip
def test_a_checkout_without_a_core_package_says_in_a_line_what_to_install(hidden, arguments):
    done = run_process(*arguments, before=_HIDE.format(names=(hidden,)))
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == (f"layerplan: {hidden} is not installed: pip install -c constraints.txt -e . "
                           "('layerplan doctor' says more)\n")  # fmt: skip


@pytest.mark.parametrize("hidden", ["typer", "rich"])
def test_doctor_without_the_packages_that_lay_it_out_prints_its_facts_as_json(hidden):
    done = run_process("doctor", before=_HIDE.format(names=(hidden,)))
    assert done.returncode == 1 and done.stderr == f"layerplan: {hidden} is not installed: pip install -c constraints.txt -e .\n"
    assert json.loads(done.stdout)["packages"][hidden]["location"] is None


def test_what_to_install_is_the_readmes_command_in_a_checkout_and_the_name_elsewhere(monkeypatch):
    assert packages.is_checkout()
    for extras in ((), ("megatron", "train")):
        assert packages.install_command(*extras) in (ROOT / "README.md").read_text(encoding="utf-8")
    assert packages.remedy_for("megatron.core") == packages.install_command("megatron")
    assert packages.remedy_for("layerplan.integration") is None and packages.remedy_for("") is None
    assert packages.install_hint("quack").endswith("-e '.[peers]'") and packages.install_hint("triton") == "pip install triton"
    monkeypatch.setattr(packages, "is_checkout", lambda: False)
    assert packages.install_command() == "pip install 'layerplan'" and packages.install_hint("quack") == "pip install 'layerplan[peers]'"
    assert packages.install_command("megatron", "train") == "pip install 'layerplan[megatron,train]'"


def test_a_module_of_ours_that_is_not_there_keeps_its_traceback():
    done = run_process("explain", "rms_norm", *X, "--arch", "sm_90", before=_HIDE.format(names=("no_such",)) + """
import layerplan.integration.planner as p, sys
sys.modules['layerplan.integration.planner.explain'] = None
""")  # fmt: skip
    assert done.returncode == 1 and "Traceback" in done.stderr and "planner.explain" in done.stderr
