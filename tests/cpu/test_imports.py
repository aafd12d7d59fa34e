"""The order in which the parts may import each other, read from the source of every file."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("integration", "modules", "kernels", "recipes")

# a part may import parts of a lower rank and itself; parts of one rank may not import each other
RANK = {
    "integration.settings": 0, "integration.problems": 0,
    "integration.graph": 1,
    "integration.engines": 2,
    "integration.plan_cache": 3, "integration.scaling": 3, "integration.capture": 3,
    "integration.planner": 4,
    "integration.ops": 5,
    "modules": 6,
    "recipes": 7,
    "integration.megatron": 8, "integration.doctor": 8,
    "integration.training": 9,
    "integration.cli": 10,
}  # fmt: skip
MEGATRON = ("integration.megatron", "integration.training")
WITHOUT_TORCH = ("integration.settings", "integration.problems", "integration.doctor", "integration.cli", "integration.engines.manifest",
                 "integration.engines.arch", "integration.engines.table", "integration.plan_cache.archive", "integration.plan_cache.build",
                 "integration.plan_cache.worker", "recipes")  # fmt: skip
PLANS = ("recipes.compile", "recipes.estimate", "recipes.graphs", "recipes.memory", "recipes.tune", "recipes.walk")  # plans graphs, so it needs torch; whoever names it imports it where it is used


def _files() -> list[Path]:
    return sorted(p for part in PARTS for p in (ROOT / part).rglob("*.py") if "__pycache__" not in p.parts)


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, source: str | None = None) -> list[tuple[str, int, bool]]:
    """(module, line, runs at import) of every import in a file; names below layerplan lose that prefix, relative ones are
    resolved, and ``from a import b`` counts as a.b where that is a module."""
    tree = ast.parse(source if source is not None else path.read_text(encoding="utf-8"))
    package = _module(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    lazy = {n for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for n in ast.walk(f) if isinstance(n, ast.Import | ast.ImportFrom)}  # fmt: skip
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            inside = base.removeprefix("layerplan.") if base != "layerplan" else ""
            names = []
            for a in node.names:
                below = Path(ROOT, *inside.split("."), a.name) if inside else Path(ROOT, a.name)
                is_module = inside.split(".")[0] in ("", *PARTS) and (below.is_dir() or below.with_suffix(".py").exists())
                names.append(".".join(p for p in (base, a.name) if p) if is_module else base)
        else:
            continue
        found += [(n.removeprefix("layerplan."), node.lineno, node not in lazy) for n in names]
    return found


def _part(module: str) -> str | None:
    """The row of RANK that a module belongs to; None for what is not ours."""
    parts = module.split(".")
    if parts[0] == "integration":
        return ".".join(parts[:2]) if len(parts) > 1 else None
    return parts[0] if parts[0] in PARTS else None


def _order_faults(path: Path, source: str | None = None) -> list[str]:
    own, faults = _part(_module(path)), []
    if own is None:  # integration/__init__.py
        return [f"{path.name}:{line} imports {m}" for m, line, _ in imports(path, source) if _part(m)]
    for module, line, _ in imports(path, source):
        other = _part(module)
        if other is None or other == own:
            continue
        if own == "kernels":
            allowed = other in ("integration.graph", "integration.engines")
        elif other == "kernels":
            allowed = False
        else:
            allowed = RANK[other] < RANK[own]
        if not allowed:
            faults.append(f"{path.relative_to(ROOT)}:{line}: {own} imports {module}")
    return faults


def _family_faults(path: Path, source: str | None = None) -> list[str]:
    """kernels/<family> may import itself and kernels/common."""
    family = path.relative_to(ROOT).parts[1]
    return [f"{path.relative_to(ROOT)}:{line}: imports {m}" for m, line, _ in imports(path, source)
            if m.startswith("kernels.") and m.split(".")[1] not in (family, "common")]  # fmt: skip


def test_every_part_of_the_package_has_a_rank():
    parts = {_part(_module(p)) for p in _files()} - {None, "kernels"}
    assert parts <= set(RANK), f"parts without a place in the import order: {sorted(parts - set(RANK))}"
    assert {"integration.graph", "integration.planner", "modules"} <= parts


def test_parts_import_only_what_stands_before_them():
    faults = [f for p in _files() for f in _order_faults(p)]
    assert not faults, "\n".join(faults)


def test_families_of_kernels_do_not_import_each_other():
    kernels = [p for p in _files() if p.relative_to(ROOT).parts[0] == "kernels"]
    assert kernels
    faults = [f for p in kernels for f in _family_faults(p)]
    assert not faults, "\n".join(faults)
    assert _family_faults(ROOT / "kernels/norm/torch.py", "from ..linear.torch import TorchLinear")


def test_only_megatron_and_training_import_megatron():
    users = {_part(_module(p)) for p in _files() for m, _, _ in imports(p) if m.split(".")[0] == "megatron"}
    assert users <= set(MEGATRON), f"these import megatron: {sorted(users - set(MEGATRON))}"
    assert "integration.megatron" in users


def test_parts_that_must_work_without_torch_do_not_import_it():
    faults = [
        f"{p.relative_to(ROOT)}:{line} imports {m}"
        for p in _files() if _module(p).startswith(WITHOUT_TORCH) and _module(p) not in PLANS
        for m, line, at_import in imports(p) if at_import and (m.split(".")[0] in ("torch", "megatron") or m.startswith(PLANS))
    ]  # fmt: skip
    assert not faults, "\n".join(faults)


def test_parts_that_must_work_without_torch_load_without_it():
    names = [f"layerplan.{name}" for name in WITHOUT_TORCH]
    code = f"import importlib, sys; [importlib.import_module(n) for n in {names}]; print(sorted({{'torch', 'megatron'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stderr


def test_nothing_imports_the_parts_bare():
    """``import modules`` would load a second copy of every class; inside the package, imports are relative or start at
    layerplan."""
    faults = []
    for path in _files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            faults += [f"{path.relative_to(ROOT)}:{node.lineno}: {n}" for n in names if n.split(".")[0] in PARTS]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(("file", "source"), [
    ("integration/graph/ir.py", "from ..planner import planner"),
    ("integration/graph/ir.py", "from layerplan.modules.base import PlannedModule"),
    ("integration/planner/planner.py", "def f():\n    from ...kernels.norm.torch import TorchNorm"),
    ("kernels/norm/torch.py", "from ...integration.planner.policy import Policy"),
    ("kernels/norm/torch.py", "from ...integration import settings"),
    ("modules/base.py", "import layerplan.integration.megatron.specs"),
    ("modules/base.py", "from layerplan.integration import cli"),
])  # fmt: skip
def test_the_order_check_sees_a_forbidden_import(file, source):
    assert len(_order_faults(ROOT / file, source)) == 1
