"""The documents: their links, file names, table and code are true of this checkout, and no machine's path is in it."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from layerplan.integration.engines import table
from layerplan.integration.engines.manifest import ALL, BY_ID, GPUS, MANIFEST
from layerplan.integration.engines.packages import KNOWN_VERSIONS
from layerplan.integration.planner import interop

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "FACTS.md", "INTEROP.md")
# names of files in other projects or of files that a run makes; everything else must exist here
ELSEWHERE = ("/megatron/", "megatron/core/", "megatron/training/", "demo_run/", "torch/", "~/", "/proc/")
SUFFIXES = (".py", ".md", ".toml", ".txt", ".json", ".jsonl", ".png", ".so", ".o", ".sh")


def _text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def links(text: str) -> list[str]:
    """Targets of markdown links that are not web addresses, without their anchors."""
    found = re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", text)
    return [t.partition("#")[0] for t in found if not re.match(r"[a-z]+:", t) and not t.startswith("#")]


def file_names(text: str) -> list[str]:
    """What stands in backquotes and reads like a path: it has a slash and no space, or ends like a file."""
    names = []
    for quoted in re.findall(r"`([^`\n]+)`", text):
        name = quoted.partition(":")[0]
        plain = re.fullmatch(r"[\w./~-]+", name)
        if plain and (name.endswith(SUFFIXES) or name.endswith("/") or re.fullmatch(r"(integration|modules|kernels|recipes|tests|layerplan)/.*", name)):
            names.append(name)
    return names


def _exists(name: str) -> bool:
    """A path from the root, or from one of the folders that documents speak of by their last part."""
    return any((ROOT / base / name).exists() for base in ("", "integration", "layerplan", "tests", "kernels"))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_relative_link_leads_to_a_file(document):
    missing = [t for t in links(_text(document)) if not (ROOT / t).exists()]
    assert not missing, f"{document} links to what does not exist: {missing}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_that_is_named_exists(document):
    missing = [n for n in file_names(_text(document)) if not n.startswith(ELSEWHERE) and not _exists(n)]
    assert not missing, f"{document} names what does not exist: {missing}"


def test_the_search_for_links_and_names_sees_what_is_missing():
    text = "see [a](gone.md#part), [web](https://example.org/x) and `kernels/gone.py:12` or `integration/settings.py`, `x / y`"
    assert links(text) == ["gone.md"]
    assert file_names(text) == ["kernels/gone.py", "integration/settings.py"]
    assert not _exists("kernels/gone.py") and _exists("integration/settings.py") and _exists("settings.py")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documents_say_something(document):
    assert len(_text(document).splitlines()) > 20


def test_the_readmes_table_of_engines_is_up_to_date():
    text = _text("README.md")
    assert table.updated(text) == text, "run python -m layerplan.integration.engines.table"


def test_the_table_holds_every_engine_and_says_yes_where_the_manifest_has_code_and_trial_of_one_on_trial(monkeypatch):
    engines = (dataclasses.replace(MANIFEST[0], trial=True), *MANIFEST[1:])
    monkeypatch.setattr(table, "MANIFEST", engines)
    rows = {line.split("`")[1]: [c.strip() for c in line.split("|")[2 : 2 + len(ALL)]] for line in table.markdown().splitlines()[2:]}
    assert list(rows) == [e.id for e in MANIFEST]
    for entry in engines:
        word = "trial" if entry.trial else "yes"
        assert rows[entry.id] == [word if a in entry.archs else "" for a in ALL], entry.id


def test_the_table_is_written_between_its_markers_alone(tmp_path):
    path = tmp_path / "README.md"
    path.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n", encoding="utf-8")
    assert table.main([str(path)]) == 0
    text = path.read_text(encoding="utf-8")
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text and "linear/torch" in text
    assert table.updated(text) == text


@pytest.mark.parametrize("text", ["no markers", f"{table.END}\n{table.BEGIN}\n", f"{table.BEGIN}\n{table.BEGIN}\n{table.END}\n"])
def test_a_text_without_one_pair_of_markers_is_refused(text):
    with pytest.raises(ValueError, match="exactly one"):
        table.updated(text)


def test_the_tables_of_interop_are_up_to_date():
    text = _text("INTEROP.md")
    assert interop.updated(text) == text, "run python -m layerplan.integration.planner.interop"


def test_interop_names_the_versions_that_are_known_and_pinned():
    rows = {cells[1].strip(): cells[2].strip() for line in _text("INTEROP.md").splitlines() if len(cells := line.split("|")) == 6}
    pins = dict(line.split("==") for line in _text("constraints.txt").splitlines())
    for name in ("flash-attn-4", "quack-kernels", "nvidia-cutlass-dsl", "apache-tvm-ffi", "megatron-core"):
        assert rows[name] == pins[name], name
    assert rows["torch"].split()[0] == pins["torch"] and rows["cuDNN"].split()[0] == ".".join(pins["nvidia-cudnn-cu13"].split(".")[:2])
    assert rows["Transformer Engine"] == pins["transformer-engine"]
    assert {name: rows[name] for name in KNOWN_VERSIONS} == KNOWN_VERSIONS


def test_interop_asks_every_engine_that_calls_a_package_about_single_ops():
    asked = {e for engines, _ in interop.FAMILIES.values() for e in engines}
    chains = {e.id for e in MANIFEST if e.load().patterns}
    assert {e.id for e in MANIFEST if {"quack", "flash_attn.cute.cache_utils", "deep_gemm"} & set(e.needs)} <= asked | chains
    assert all(BY_ID[e].archs and set(BY_ID[e].archs) & set(GPUS) for e in asked)


def test_a_cell_of_interop_says_which_passes_are_offered_where():
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in interop.tables()["attention"].splitlines()]
    columns = {name: i for i, name in enumerate(rows[0])}
    cell = {(r[0], name): r[i] for r in rows if len(r) == len(rows[0]) for name, i in columns.items() if name}
    assert cell["packed sequences", "`attention/torch_cudnn`"] == "no" and cell["packed sequences", "`attention/torch_flash`"] == "fb"
    assert cell["gradient of the LSE", "`attention/torch_flash`"] == "f"
    assert cell["sink", "`attention/fa4`"] == "no: sm80 sm89 sm120; fb: sm90 sm100 sm103"
    assert ["backward: not on the arch", "`attention/fa4`", "sm80 sm89"] in rows


def test_the_readmes_python_runs(tmp_path):
    """As a user would: the first block, copied into a file, run from elsewhere."""
    blocks = re.findall(r"```python\n(.*?)```", _text("README.md"), re.S)
    assert blocks
    assert sum(bool(line.strip()) for line in blocks[0].splitlines()) == 12, "the README says twelve lines"
    for i, block in enumerate(blocks):
        script = tmp_path / f"block_{i}.py"
        script.write_text("import torch\ntorch.set_num_threads(1)\n" + block, encoding="utf-8")
        env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240, cwd=tmp_path, env=env)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()


def test_the_readmes_commands_exist():
    text = _text("README.md")
    make = set(re.findall(r"^([a-z-]+):", _text("Makefile"), re.M))
    assert set(re.findall(r"\bmake ([a-z-]+)", "\n".join(line for line in text.splitlines() if line.startswith("    ")))) <= make
    assert {"demo", "test"} <= make


# ---- what no tracked file may hold -----------------------------------------------------------------------------------

_MACHINE = re.compile(r"(?<![\w.])/(?:work|root|home/\w+|Users/\w+)/[\w.]")
_HOST = re.compile(r"(?:index-url|extra-index|find-links|https?://[^\s\"')]*(?:pypi|pythonhosted|simple/|artifactory|nexus|devpi))", re.I)


def tracked() -> list[Path]:
    """Files under version control, or, outside a clone, every file that is not made by tools."""
    done = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    if done.returncode == 0 and done.stdout:
        return [ROOT / line for line in done.stdout.splitlines() if (ROOT / line).is_file()]
    return [p for p in ROOT.rglob("*") if p.is_file() and not {".venv", ".git", "__pycache__"} & set(p.parts)]


def _lines_with(pattern: re.Pattern[str]) -> list[str]:
    own = Path(__file__).resolve()
    found = []
    for path in tracked():
        if path.resolve() == own or path.suffix in (".png", ".bin", ".idx", ".pt"):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    return found


def test_no_file_holds_a_path_of_one_machine():
    assert not _lines_with(_MACHINE)


def test_no_file_holds_the_address_of_a_package_registry():
    assert not _lines_with(_HOST)


def test_the_patterns_see_what_they_forbid():
    folder, index = "work", "pypi"  # put together here, so that this file names no such place itself
    assert _MACHINE.search(f"see /{folder}/main/x.py") and _MACHINE.search('"/home/ann/x"') and not _MACHINE.search(f"a/{folder}/main")
    assert _HOST.search("--index-url x") and _HOST.search(f"https://{index}.org/simple/torch") and not _HOST.search("https://arxiv.org/abs/1")


def test_no_needed_folder_is_swallowed_by_an_ignore_rule():
    done = subprocess.run(["git", "rev-parse", "--is-inside-work-tree"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    if done.returncode:
        pytest.skip("not a clone")
    sources = [p for part in ("layerplan", "integration", "modules", "kernels", "recipes", "tests") for p in (ROOT / part).rglob("*.py")]
    names = [str(p.relative_to(ROOT)) for p in sources if "__pycache__" not in p.parts and not _behind_link(p)]
    done = subprocess.run(["git", "check-ignore", "--no-index", "--stdin"], cwd=ROOT, input="\n".join(names), capture_output=True, text=True, timeout=60)
    assert done.stdout == "", f"an ignore rule swallows: {done.stdout}"


def _behind_link(path: Path) -> bool:
    return any(parent.is_symlink() for parent in path.parents)
