"""What is installed here, what can run here, and what stands in the way.

Nothing that may be broken is imported: versions come from package metadata, and torch is asked in a process of its own
with a time limit, so that a broken torch, driver or CUDA library is a line of the report and not its end.
"""

from __future__ import annotations

import contextlib
import getpass
import importlib.metadata as metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .engines.packages import KNOWN_VERSIONS, Place, distribution, install_command, is_checkout, locate
from .plan_cache import toolkit
from .plan_cache.build import linker
from .plan_cache.disk import scan
from .settings import SettingsError, cache_folders, relevant_environment

# distribution -> the module that it brings (None: it brings only other distributions)
PACKAGES: dict[str, str | None] = {
    "torch": "torch", "numpy": "numpy", "triton": "triton", "apache-tvm-ffi": "tvm_ffi", "nvidia-cutlass-dsl": "cutlass", "cuda-python": None,
    "cuda-bindings": "cuda.bindings", "typer": "typer", "rich": "rich", "megatron-core": "megatron.core", "omegaconf": "omegaconf",
    "tokenizers": "tokenizers", "tensorboard": "tensorboard", "matplotlib": "matplotlib", "psutil": "psutil", "nvidia-cudnn-frontend": "cudnn",
    "quack-kernels": "quack", "flash-attn-4": "flash_attn.cute", "flash-attn": "flash_attn", "transformer-engine": "transformer_engine",
    "deep-gemm": "deep_gemm", "apex": "apex",
}  # fmt: skip
# packages that layerplan runs without: what each is for, and the extra that brings it
OPTIONAL: dict[str, tuple[str, str | None]] = {
    "triton": ("kernels that Inductor generates", None), "megatron-core": ("Megatron models and the trainer", "megatron"),
    **dict.fromkeys(("omegaconf", "tokenizers", "tensorboard", "matplotlib", "psutil"), ("the trainer", "train")),
    **dict.fromkeys(("quack-kernels", "flash-attn-4"), ("faster kernels", "peers")),
    "deep-gemm": ("products of experts whose groups are aligned to 128 rows", None),
    "nvidia-cudnn-frontend": ("comparisons: no engine needs it", "peers"),
    "transformer-engine": ("plan.layers=transformer_engine, and comparisons with it", "te"),
    "flash-attn": ("Transformer Engine, which takes it where it is there", None),
    "apex": ("Megatron, which takes its optimiser and norms where it is there", None),
}  # fmt: skip
# what layerplan works with, as its own requirements say: at least, and below
VERSIONS = {"nvidia-cutlass-dsl": ("4.8", None), "megatron-core": ("0.19", "0.20")}
_CUDA_LIBRARY = re.compile(r"^(nvidia-.*?|cuda-toolkit|transformer-engine)(-cu(\d+))?$")
# the compiler's own libraries: nvidia-cutlass-dsl requires the cu12 set, its extra adds the cu13 set beside it
_TWO_TOOLKITS_BY_DESIGN = ("nvidia-cutlass-dsl",)

# Runs in a process of its own. Every fact is taken by itself: the first may be missing and the rest still there.
_PROBE = r"""
import json, sys, time
facts = {}
def take(name, read):
    try:
        facts[name] = read()
    except BaseException as e:
        facts.setdefault("errors", {})[name] = f"{type(e).__name__}: {e}"
start = time.perf_counter()
take("import", lambda: __import__("torch").__version__)
facts["seconds"] = round(time.perf_counter() - start, 2)
if "import" in facts:
    import torch
    facts["version"], facts["file"] = torch.__version__, torch.__file__
    take("cuda_build", lambda: torch.version.cuda)
    take("cudnn", lambda: torch.backends.cudnn.version())
    take("driver_cuda", lambda: torch._C._cuda_getDriverVersion())
    take("nccl", lambda: list(torch.cuda.nccl.version()))
    take("available", lambda: torch.cuda.is_available())
    take("archs", lambda: torch.cuda.get_arch_list())
    def device(i):
        p = torch.cuda.get_device_properties(i)
        return {"index": i, "name": p.name, "capability": [p.major, p.minor], "memory_gib": round(p.total_memory / 2**30, 1)}
    take("devices", lambda: [device(i) for i in range(torch.cuda.device_count())])
    def loaded():
        with open("/proc/self/maps") as f:
            return sorted({l.split(None, 5)[5].strip() for l in f if "libcudnn" in l})
    take("cudnn_files", loaded)
print("\n" + json.dumps(facts))
"""


def collect(*, torch_timeout: float = 120.0) -> dict[str, Any]:
    """Everything the report shows, as JSON-able data.

    Keys: layerplan, python, system, packages, libraries, megatron, torch, driver, gpus, engines, compiler, caches, environment,
    problems.
    ``problems`` lists what should be mended; ``torch_timeout`` (seconds) bounds the only slow part.
    """
    problems: list[str] = []
    environment = relevant_environment()
    versions = _installed_versions(problems)
    torch_facts = probe_torch(torch_timeout)
    driver = _driver()
    packages = _packages(versions, problems)
    problems += _torch_problems(torch_facts, driver) + _library_problems(versions, torch_facts, environment)
    gpus = _gpus(torch_facts, problems)
    problems += _environment_problems()
    return {
        "layerplan": _own_facts(),
        "python": {"version": platform.python_version(), "executable": sys.executable, "prefix": sys.prefix},
        "system": {"os": platform.platform(), "machine": platform.machine(), "libc": " ".join(platform.libc_ver())},
        "packages": packages,
        "libraries": {name: v for name, v in sorted(versions.items()) if _CUDA_LIBRARY.match(name) and name not in PACKAGES},
        "megatron": _megatron(versions),
        "torch": torch_facts,
        "driver": driver,
        "gpus": gpus,
        "engines": _engines(torch_facts, gpus, problems),
        "compiler": _compiler(versions),
        "caches": _caches(environment),
        "environment": environment,
        "problems": problems,
    }  # fmt: skip


def _environment_problems() -> list[str]:
    """Variables that are wrong, and the file of records that one names, where it cannot be read."""
    from .planner.records import RecordsError, default_records

    try:
        default_records()
    except (SettingsError, RecordsError) as e:
        return [f"environment: {line}" for line in str(e).splitlines()]
    return []


def probe_torch(timeout: float) -> dict[str, Any]:
    """What torch says of itself. ``status``: ok, missing, broken or timeout; ``error`` says more where it is not ok."""
    try:
        done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=timeout, errors="replace")
    except subprocess.TimeoutExpired:
        return {"status": "timeout", "error": f"importing torch and asking for devices took more than {timeout:g} s"}
    except OSError as e:
        return {"status": "broken", "error": f"could not start {sys.executable}: {e}"}
    last = done.stdout.strip().rpartition("\n")[2]
    try:
        facts = json.loads(last)
    except json.JSONDecodeError:  # killed by a signal, or printed over: the tail says why
        tail = " | ".join(done.stderr.strip().splitlines()[-3:]) or "no output"
        return {"status": "broken", "error": f"the process that imports torch ended with {done.returncode}: {tail}"}
    error = facts.get("errors", {}).pop("import", None)
    if error is None:
        return {"status": "ok", **facts}
    missing = "No module named 'torch'" in error
    return {"status": "missing" if missing else "broken", "error": error, "seconds": facts["seconds"]}


def probe_import(module: str, timeout: float) -> str | None:
    """Why a module cannot be imported, None where it can: tried in a process of its own."""
    try:
        done = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, text=True, timeout=timeout, errors="replace")
    except subprocess.TimeoutExpired:
        return f"importing it took more than {timeout:g} s"
    if done.returncode == 0:
        return None
    return done.stderr.strip().rpartition("\n")[2] or f"the process that imports it ended with {done.returncode}"


def _packages(versions: dict[str, str], problems: list[str]) -> dict[str, dict[str, str | None]]:
    """Every package that layerplan knows: its version by its metadata, the file that an import would take, and a remark where
    the two do not belong together."""
    places = {name: locate(module) for name, module in PACKAGES.items() if module}
    rows: dict[str, dict[str, str | None]] = {}
    for name, module in PACKAGES.items():
        version, place, remark = versions.get(name), places.get(name, Place("missing")), None
        # flash-attn-4 alone leaves flash_attn without code of its own
        shared = any(p.here and PACKAGES[other].startswith(f"{module}.") for other, p in places.items())
        if version and module and not place.here:
            remark = f"{name} {version} has metadata, but {module} has no code; reinstall it"
        elif place.state == "look-alike" and not shared:
            remark = (f"{name} is not installed, but 'import {module}' finds the folder {place.location}, which holds no package; "
                      "rename the folder or take its parent off the path")  # fmt: skip
        elif place.here and version is None:
            remark = "no metadata: a checkout or a copy, of unknown version"
        elif place.here and version.partition("+")[0] != KNOWN_VERSIONS.get(name, version.partition("+")[0]):
            remark = f"its engines know the functions of {KNOWN_VERSIONS[name]} and decline every other version"
        if remark and not place.here:
            problems.append(remark)
        if name in OPTIONAL and version is None and remark is None:
            purpose, extra = OPTIONAL[name]
            remark = f"optional, for {purpose}" + (f": {install_command(extra)}" if extra else "")
        if version and (rule := _out_of_range(name, version)):
            problems.append(f"{name} {version} is installed, layerplan needs {rule}; pip install '{name}{rule}'")
        rows[name] = {"version": version, "location": place.location if place.here else None, "remark": remark}
    return rows


def _out_of_range(name: str, version: str) -> str | None:
    """The rule that a version breaks, written as pip takes it."""
    least, below = VERSIONS.get(name, (None, None))
    rule = ",".join(f"{sign}{bound}" for sign, bound in ((">=", least), ("<", below)) if bound)
    numbers = _numbers(version)
    return rule if (least and numbers < _numbers(least)) or (below and numbers >= _numbers(below)) else None


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: 0.19.2rc1 -> (0, 19, 2)."""
    return tuple(int(n) for n in re.match(r"\d+(?:\.\d+)*|", version).group().split(".") if n)


def _installed_versions(problems: list[str]) -> dict[str, str]:
    """Normalised distribution name -> version; a name found twice is a problem: which one counts depends on the path."""
    versions: dict[str, str] = {}
    places: dict[str, str] = {}
    for dist in metadata.distributions():
        try:
            name, version, place = _normal(dist.metadata["Name"]), dist.version, str(dist.locate_file(""))
        except Exception:  # a half-removed package has metadata without a name; pip calls it invalid too
            continue
        if name not in versions:
            versions[name], places[name] = version, place
        elif versions[name] != version and (name in PACKAGES or _CUDA_LIBRARY.match(name)):
            problems.append(f"{name} is installed twice: {versions[name]} in {places[name]} and {version} in {place}; "
                            "the first is used: uninstall the other")  # fmt: skip
    return versions


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _own_facts() -> dict[str, Any]:
    import layerplan

    root = Path(layerplan.__file__).resolve().parent
    return {"version": layerplan.__version__, "location": str(root), "install": "checkout" if is_checkout() else "package"}


def _megatron(versions: dict[str, str]) -> dict[str, Any]:
    """A git checkout on the path counts: it has no metadata. Nothing of it is imported, not even the empty parent package."""
    try:
        spec = importlib.util.find_spec("megatron")
    except (ImportError, ValueError):
        spec = None
    folders = [Path(f) / "core" for f in (spec.submodule_search_locations or ())] if spec else []
    location = next((str(f) for f in folders if (f / "__init__.py").exists()), None)
    return {"version": versions.get("megatron-core"), "location": location}


def _driver() -> dict[str, Any]:
    """The kernel module's version, read where the module itself writes it: no driver library is loaded."""
    path = Path("/proc/driver/nvidia/version")
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return {"version": None}
    found = re.search(r"Kernel Module[^\d]*(\d+\.\d+(?:\.\d+)?)", text)
    return {"version": found.group(1) if found else text.splitlines()[0]}


def _torch_problems(torch_facts: dict[str, Any], driver: dict[str, Any]) -> list[str]:
    if torch_facts["status"] != "ok":
        remedy = "pip install torch" if torch_facts["status"] == "missing" else "reinstall torch; the error names what is amiss"
        return [f"torch is {torch_facts['status']}: {torch_facts['error']}; {remedy}"]
    found = []
    built, has_driver = torch_facts.get("cuda_build"), driver["version"] is not None
    speaks = torch_facts.get("driver_cuda") or 0  # 12040 for CUDA 12.4, 0 without a driver
    if has_driver and built is None:
        found.append("torch is a CPU build, but an NVIDIA driver is here; install a CUDA build of torch")
    elif has_driver and not torch_facts.get("devices"):
        why = torch_facts.get("errors", {}).get("devices", "no device is visible; see CUDA_VISIBLE_DEVICES")
        found.append(f"an NVIDIA driver ({driver['version']}) is here, but torch sees no GPU: {why}")
    if built and 0 < speaks < int(built.split(".")[0]) * 1000:
        found.append(f"torch is built for CUDA {built}, the driver speaks CUDA {speaks // 1000}.{speaks % 1000 // 10}; "
                     "install a newer driver, or a torch for the driver's CUDA")  # fmt: skip
    return found


def _library_problems(versions: dict[str, str], torch_facts: dict[str, Any], environment: dict[str, str]) -> list[str]:
    """Clashes between CUDA libraries: two toolkits, two cuDNNs, other versions than torch was built with."""
    found = []
    built = (torch_facts.get("cuda_build") or "").split(".")[0]
    for base, named in _by_library(versions).items():
        if len(named) > 1:
            what = "two cuDNNs are installed" if base == "nvidia-cudnn" else "one library is installed for two CUDA versions"
            names = " and ".join(f"{name} {versions[name]}" for name in sorted(named.values()))
            found.append(f"{what}: {names}; uninstall the one that torch was not built for")
        elif built and built not in named:
            (other,) = named.values()
            found.append(f"torch is built for CUDA {torch_facts['cuda_build']}, installed is {other}; install {base}-cu{built}")
    found += _pins_not_met("torch", versions)
    found += _cudnn_copies(torch_facts, environment)
    return found


def _by_library(versions: dict[str, str]) -> dict[str, dict[str, str]]:
    """Library -> {CUDA major: distribution}. From CUDA 13 on most names bear no suffix: nvidia-cublas, nvidia-cublas-cu12."""
    found: dict[str, dict[str, str]] = {}
    for name in sorted(versions):
        match = _CUDA_LIBRARY.match(name)
        if match and match.group(3) and not name.startswith(_TWO_TOOLKITS_BY_DESIGN):
            found.setdefault(match.group(1), {})[match.group(3)] = name
    for base, named in found.items():
        if base in versions and base.startswith("nvidia-") and "13" not in named:
            named["13"] = base
    return found


def _pins_not_met(name: str, versions: dict[str, str]) -> list[str]:
    """Exact pins in a package's metadata that the installed versions do not meet."""
    try:
        wanted = metadata.requires(name) or ()
    except metadata.PackageNotFoundError:
        return []
    found = []
    for line in wanted:
        match = re.match(r"^([\w.-]+)(?:\[[^\]]*\])?\s*==\s*([\w.+]+)\s*(;.*)?$", line)
        if match is None or "extra ==" in (match.group(3) or "") or not sys.platform.startswith("linux"):
            continue
        other, version = _normal(match.group(1)), match.group(2)
        if other in versions and versions[other] != version:
            found.append(f"{name} {versions.get(name)} was built with {other} {version}, installed is {versions[other]}; "
                         f"pip install '{other}=={version}'")  # fmt: skip
    return found


def _cudnn_copies(torch_facts: dict[str, Any], environment: dict[str, str]) -> list[str]:
    """A cuDNN on LD_LIBRARY_PATH is found before the one that came with torch."""
    found = []
    for folder in filter(None, environment.get("LD_LIBRARY_PATH", "").split(":")):
        with contextlib.suppress(OSError):
            copies = sorted(p.name for p in Path(folder).glob("libcudnn.so*"))
            if copies:
                found.append(f"LD_LIBRARY_PATH holds a cuDNN of its own ({folder}: {copies[0]}), which is loaded before torch's; "
                             "remove the folder from LD_LIBRARY_PATH")  # fmt: skip
    folders = {str(Path(f).parent) for f in torch_facts.get("cudnn_files", ())}
    if len(folders) > 1:
        found.append(f"two cuDNNs are loaded in one process: {', '.join(sorted(folders))}; keep the one that torch came with")
    return found


def _gpus(torch_facts: dict[str, Any], problems: list[str]) -> list[dict[str, Any]]:
    """Devices with the arch that the planner uses for each and the board whose rates it predicts with, None where it has none."""
    from .engines import arch as archs

    rows = []
    for device in torch_facts.get("devices", ()):
        try:
            arch = archs.of_capability(tuple(device["capability"]))
            planned = {"arch": arch.name, "rates_of": arch.board}
        except ValueError as e:
            planned = {"arch": None, "rates_of": None}
            problems.append(f"GPU {device['index']} ({device['name']}): {e}")
        rows.append({**device, **planned})
    return rows


def _engines(torch_facts: dict[str, Any], gpus: list[dict[str, Any]], problems: list[str]) -> list[dict[str, Any]]:
    """Every engine of the manifest against every arch here: does it run, and why not."""
    from .engines.manifest import MANIFEST

    here = list(dict.fromkeys(g["arch"] for g in gpus if g["arch"])) + ["cpu"]
    rows, broken = [], {}
    modules = sorted({n for e in MANIFEST for n in e.needs if n != "torch" and locate(n).here})
    with ThreadPoolExecutor() as pool:  # each is a process of its own
        answers = list(pool.map(lambda module: probe_import(module, 60), modules))
    for module, why in zip(modules, answers, strict=True):
        if why is not None:
            broken[module] = f"needs the package {distribution(module)!r}, which cannot be imported: {why}"
            problems.append(f"{module} is installed but cannot be imported: {why}; reinstall it")
    for entry in MANIFEST:
        for arch in here:
            reason = _why_not(entry, arch, torch_facts, broken)
            rows.append({"id": entry.id, "arch": arch, "runs": reason is None, "reason": reason, "note": entry.note})
    if not any(r["runs"] for r in rows):
        problems.append("no engine can run here; the engines' reasons say what is missing")
    return rows


def _why_not(entry: Any, arch: str, torch_facts: dict[str, Any], broken: dict[str, str]) -> str | None:
    if arch not in entry.archs:
        return f"has no code for {arch}; it runs on {', '.join(entry.archs)}"
    if "torch" in entry.needs and torch_facts["status"] != "ok":
        return f"needs torch, which is {torch_facts['status']}"
    return entry.absent() or next((broken[n] for n in entry.needs if n in broken), None)


def _caches(environment: dict[str, str]) -> list[dict[str, Any]]:
    """Folders of compiled kernels: layerplan's own first, in the order in which they are read, and those of libraries."""
    own = []
    for i, folder in enumerate(cache_folders()):
        try:
            entries, faults = scan(folder)
        except OSError as error:
            remark = f"cannot be read: {error.strerror}"
        else:
            remark = f"{len(entries)} kernels" + (f", {len(faults)} broken files" if faults else "")
        if i > 0:
            remark += ", only read"
        elif folder.is_dir() and not os.access(folder, os.W_OK):
            remark += "; takes no new ones: each process compiles what is not there for itself"
        own.append({"name": "layerplan", "path": str(folder), **_size(folder), "remark": remark})
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = "unknown"
    temporary = Path(tempfile.gettempdir())
    places = {
        "inductor": Path(environment.get("TORCHINDUCTOR_CACHE_DIR") or temporary / f"torchinductor_{user}"),
        "triton": Path(environment.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"),
    }
    if environment.get("CUTE_DSL_CACHE_DIR"):
        places["cute_dsl"] = Path(environment["CUTE_DSL_CACHE_DIR"])
    return [*own, *({"name": name, "path": str(path), **_size(path), "remark": ""} for name, path in places.items())]


def _compiler(versions: dict[str, str]) -> dict[str, Any]:
    """What compiles our own kernels: nvidia-cutlass-dsl, for the CUDA version of its that this driver takes, and a linker."""
    return {"dsl": versions.get("nvidia-cutlass-dsl"), "cuda": toolkit.major(), "linker": linker()}


def _size(path: Path, limit_s: float = 3.0) -> dict[str, Any]:
    """Files and MiB under a folder; ``complete`` is False where counting would have taken longer than ``limit_s``."""
    files, nbytes, end = 0, 0, time.monotonic() + limit_s
    if not path.is_dir():
        return {"exists": False, "files": 0, "mib": 0.0, "complete": True}
    for folder, _, names in path.walk(on_error=None):
        for name in names:
            with contextlib.suppress(OSError):
                nbytes += (folder / name).lstat().st_size
                files += 1
        if time.monotonic() > end:
            return {"exists": True, "files": files, "mib": round(nbytes / 2**20, 1), "complete": False}
    return {"exists": True, "files": files, "mib": round(nbytes / 2**20, 1), "complete": True}


# ---- text ----------------------------------------------------------------------------------------------------------


def render(facts: dict[str, Any], console: Any) -> None:
    """The report as text on a rich Console."""
    from rich.markup import escape
    from rich.table import Table

    def table(title: str, *columns: str) -> Table:
        return Table(*columns, title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)

    own, py, torch_facts = facts["layerplan"], facts["python"], facts["torch"]
    console.print(f"[bold]layerplan {own['version']}[/] ({own['install']}, {escape(own['location'])})")
    console.print(f"python {py['version']} ({escape(py['executable'])}) on {escape(facts['system']['os'])}\n")

    packages = table("packages", "name", "version", "remark")
    for name, row in facts["packages"].items():
        here = row["location"] and "unknown version"
        packages.add_row(name, row["version"] or here or "[dim]not installed[/]", escape(row["remark"] or ""))
    for name, version in facts["libraries"].items():
        packages.add_row(name, version, "")
    console.print(packages)
    if facts["megatron"]["location"] and not facts["megatron"]["version"]:
        console.print(f"megatron.core is a checkout in {escape(facts['megatron']['location'])}")

    if torch_facts["status"] == "ok":
        console.print(f"\ntorch {torch_facts['version']}: CUDA {torch_facts.get('cuda_build')}, cuDNN {torch_facts.get('cudnn')}, "
                      f"NCCL {'.'.join(map(str, torch_facts.get('nccl', ['none'])))}, imported in {torch_facts['seconds']} s")  # fmt: skip
    else:
        console.print(f"\ntorch: {torch_facts['status']}: {escape(torch_facts['error'])}")
    console.print(f"NVIDIA driver: {facts['driver']['version'] or 'none'}")
    for gpu in facts["gpus"]:
        planned = f"{gpu['arch']} with the rates of {gpu['rates_of']}" if gpu["arch"] else "nothing"
        console.print(f"GPU {gpu['index']}: {gpu['name']}, {gpu['memory_gib']} GiB, planned as {planned}")
    if not facts["gpus"]:
        console.print("GPUs: none")

    engines = table("\nengines", "engine", "arch", "runs", "why not, or what it is")
    for row in facts["engines"]:
        engines.add_row(row["id"], row["arch"], "yes" if row["runs"] else "no", escape(row["reason"] or row["note"]))
    console.print(engines)

    compiler = facts["compiler"]
    if compiler["dsl"] and compiler["cuda"]:
        linked = compiler["linker"] or "nothing: kernels load through the compiler, more slowly"
        console.print(f"\nown kernels: compiled by nvidia-cutlass-dsl {compiler['dsl']} for CUDA {compiler['cuda']}, "
                      f"linked by {escape(linked)}")  # fmt: skip
    else:
        console.print("\nown kernels: without nvidia-cutlass-dsl they are neither compiled nor loaded")

    caches = table("\ncaches", "name", "files", "MiB", "folder", "remark")
    for row in facts["caches"]:
        more = "" if row["complete"] else "+"
        caches.add_row(row["name"], f"{row['files']}{more}", f"{row['mib']}{more}", escape(row["path"]), row["remark"])
    console.print(caches)

    console.print("\n[bold]environment[/]")
    for name, value in facts["environment"].items():
        console.print(f"{name}={escape(value)}")
    if not facts["environment"]:
        console.print("nothing that bears on layerplan is set")
    console.print(f"\n[bold]problems: {len(facts['problems']) or 'none'}[/]")
    for problem in facts["problems"]:
        console.print(f"- {escape(problem)}")
