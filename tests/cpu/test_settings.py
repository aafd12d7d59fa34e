"""Environment variables: typed, read once, in one file, and wrong ones refused by name."""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from layerplan.integration import settings as module
from layerplan.integration.settings import (
    POLICIES,
    VARIABLES,
    Settings,
    SettingsError,
    launcher_environment,
    relevant_environment,
    settings,
)

ROOT = Path(__file__).resolve().parents[2]


def test_the_list_of_variables_is_frozen():
    assert tuple(VARIABLES) == (
        "LAYERPLAN_CHECK", "LAYERPLAN_POLICY", "LAYERPLAN_DETERMINISTIC", "LAYERPLAN_LOG", "LAYERPLAN_RECORDS", "LAYERPLAN_NVTX",
        "LAYERPLAN_CACHE",
    )  # fmt: skip


def test_the_policies_are_said_once_and_recipes_take_the_same():
    from layerplan.integration.planner import policy
    from layerplan.recipes.config import Plan

    assert POLICIES == ("auto", "strict", "reference") and policy.POLICIES is POLICIES
    assert get_args(get_type_hints(Plan)["policy"]) == POLICIES


def test_every_variable_has_a_field_and_every_field_a_variable():
    fields = {f"LAYERPLAN_{f.name.upper()}" for f in dataclasses.fields(Settings)}
    assert fields == set(VARIABLES)


def test_nothing_set_gives_the_defaults():
    made = Settings.from_env({"HOME": "/somewhere", "PATH": ""})
    assert made == Settings()
    assert (made.check, made.policy, made.deterministic, made.log, made.nvtx) == (False, "auto", False, "warning", False) and made.records is None


def test_values_are_typed():
    made = Settings.from_env({
        "LAYERPLAN_CHECK": "1", "LAYERPLAN_POLICY": "Strict", "LAYERPLAN_DETERMINISTIC": " yes ",
        "LAYERPLAN_LOG": "DEBUG", "LAYERPLAN_NVTX": "on", "LAYERPLAN_RECORDS": " a.json ",
    })  # fmt: skip
    assert made == Settings(check=True, policy="strict", deterministic=True, log="debug", nvtx=True, records="a.json")


@pytest.mark.parametrize("value", ["0", "false", "no", "off", "OFF", ""])
def test_a_flag_can_be_switched_off(value):
    assert Settings.from_env({"LAYERPLAN_CHECK": value}).check is False


@pytest.mark.parametrize("name", list(VARIABLES))
def test_a_variable_set_to_nothing_counts_as_unset(name):
    assert Settings.from_env({name: "  "}) == Settings()


@pytest.mark.parametrize(("name", "value", "allowed"), [
    ("LAYERPLAN_CHECK", "maybe", "1, true"),
    ("LAYERPLAN_DETERMINISTIC", "2", "1, true"),
    ("LAYERPLAN_POLICY", "fastest", "auto, strict, reference"),
    ("LAYERPLAN_LOG", "loud", "debug, info, warning, error"),
    ("LAYERPLAN_NVTX", "maybe", "1, true"),
])  # fmt: skip
def test_a_wrong_value_names_variable_value_and_what_is_allowed(name, value, allowed):
    with pytest.raises(SettingsError) as error:
        Settings.from_env({name: value})
    assert name in str(error.value) and repr(value) in str(error.value) and allowed in str(error.value)


def test_an_unknown_variable_is_refused_with_the_close_name():
    with pytest.raises(SettingsError, match=r"LAYERPLAN_POLCY.*did you mean LAYERPLAN_POLICY"):
        Settings.from_env({"LAYERPLAN_POLCY": "strict"})


def test_an_unknown_variable_without_a_close_name_lists_the_known_ones():
    with pytest.raises(SettingsError, match="LAYERPLAN_FOO = '1': no such variable; known: LAYERPLAN_CHECK"):
        Settings.from_env({"LAYERPLAN_FOO": "1"})  # only the prefix is like another's
    with pytest.raises(SettingsError) as error:
        Settings.from_env({"LAYERPLAN_QQQQQQQQQQQQ": "1"})
    assert all(name in str(error.value) for name in VARIABLES)


def test_all_problems_come_in_one_error():
    with pytest.raises(SettingsError) as error:
        Settings.from_env({"LAYERPLAN_CHECK": "maybe", "LAYERPLAN_LOG": "loud", "LAYERPLAN_POLCY": "auto"})
    assert len(str(error.value).splitlines()) == 3


def test_settings_are_read_once(monkeypatch):
    settings.cache_clear()
    try:
        monkeypatch.setenv("LAYERPLAN_POLICY", "reference")
        first = settings()
        monkeypatch.setenv("LAYERPLAN_POLICY", "strict")
        assert settings() is first and first.policy == "reference"
    finally:
        settings.cache_clear()


def test_settings_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().policy = "strict"


def test_relevant_environment_shows_what_bears_on_training_and_nothing_else():
    env = {"NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "0", "LAYERPLAN_LOG": "info", "HOME": "/h", "MY_TOKEN": "secret"}
    assert relevant_environment(env) == {"CUDA_VISIBLE_DEVICES": "0", "LAYERPLAN_LOG": "info", "NCCL_DEBUG": "INFO"}


def test_the_launchers_variables_are_those_that_are_set_to_something():
    env = {"RANK": "1", "WORLD_SIZE": " 2 ", "LOCAL_RANK": "", "MASTER_ADDR": "host", "HOME": "/h"}
    assert launcher_environment(env) == {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "host"}


def _environment_reads(source: str) -> list[int]:
    """Lines that reach the process's environment by os.environ, os.getenv or their imported names."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv"):
            lines.append(node.lineno)
        if isinstance(node, ast.ImportFrom) and node.module == "os" and {a.name for a in node.names} & {"environ", "environb", "getenv"}:
            lines.append(node.lineno)
    return lines


def test_no_other_file_names_a_variable_of_layerplan_where_it_reads_the_environment():
    """Launchers' variables (RANK, MASTER_ADDR) may be read where a process group starts; ours nowhere but here."""
    faults = []
    for part in ("integration", "modules", "kernels", "recipes", "layerplan"):
        for path in sorted((ROOT / part).glob("*.py") if part == "layerplan" else (ROOT / part).rglob("*.py")):
            if path == Path(module.__file__).resolve():
                continue
            source = path.read_text(encoding="utf-8")
            constants = [n.value for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
            if _environment_reads(source) and any(c in VARIABLES or c.startswith("LAYERPLAN_") for c in constants):
                faults.append(str(path.relative_to(ROOT)))
    assert not faults, f"read LAYERPLAN_* themselves: {faults}; add a field to integration/settings.py"


@pytest.mark.parametrize("source", ["import os\nos.environ['LAYERPLAN_CHECK']", "from os import getenv\ngetenv('LAYERPLAN_CHECK')"])
def test_the_search_for_environment_reads_finds_them(source):
    assert _environment_reads(source)


def test_settings_import_neither_torch_nor_megatron():
    code = "import sys, layerplan.integration.settings as s; s.settings(); print(sorted({'torch', 'megatron'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stderr
