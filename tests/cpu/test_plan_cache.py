"""Compiled kernels: their names, the folders that keep them, one compile among many processes, and what is left when
one is killed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

import pytest
import torch

from layerplan.integration import settings
from layerplan.integration.engines.arch import ARCHS
from layerplan.integration.engines.contract import Kernel
from layerplan.integration.engines.packages import locate
from layerplan.integration.plan_cache import archive, build, cubin, disk, key, lock, memory, toolkit
from layerplan.integration.plan_cache.compiler import Compiler
from layerplan.integration.plan_cache.disk import Entry, Store
from layerplan.integration.plan_cache.key import KernelError, keyed

ROOT = Path(__file__).resolve().parents[2]
SM_90 = ARCHS["sm_90"]
SCALE = Kernel("tests.cases.own_kernel:scale", (("dtype", "BFloat16"), ("width", 1024)))
NOTED = Kernel("tests.cases.own_kernel:noted_scale", SCALE.constants)
pytestmark = pytest.mark.skipif(not locate("cutlass").here, reason="needs nvidia-cutlass-dsl")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Entry:
    """The entry of SCALE for sm_90, compiled once for this file."""
    folder, compiler = tmp_path_factory.mktemp("made"), Compiler("sm_90a")
    store, wanted = Store((folder,)), keyed(SCALE, SM_90)
    began = time.monotonic()
    with store.workshop() as workshop:
        entry = build.make(wanted, store, workshop, compiler)
    print(f"cold compile {time.monotonic() - began:.2f} s, of that in the compiler {entry.facts['seconds']:.2f} s")
    compiler.close()
    return entry


class Double:
    """Stands in for the compiler: hands out the object file of ``made``, and counts."""

    def __init__(self, made: Entry) -> None:
        self.made, self.count = made, 0

    def compile(self, wanted, folder: Path) -> float:
        self.count += 1
        shutil.copyfile(self.made.file(".o"), folder / f"{wanted.key}.o")
        return 0.5


@pytest.fixture
def cache(made, tmp_path):
    """(store with a copy of the entry, the folder, a double of the compiler)."""
    folder = tmp_path / "cache"
    folder.mkdir()
    for suffix in disk.SUFFIXES:
        shutil.copyfile(made.file(suffix), folder / f"{made.key}{suffix}")
    return Store((folder,)), folder, Double(made)


def process(code: str, folder: Path | str, **env: str) -> subprocess.Popen:
    """A process that runs ``code`` with the cache ``folder``; it has ``function``, SCALE, NOTED and SM_90."""
    head = (
        "import sys, time, torch\n"
        "from layerplan.integration.engines.arch import ARCHS\n"
        "from layerplan.integration.engines.contract import Kernel\n"
        "from layerplan.integration.plan_cache import build, memory\n"
        "from layerplan.integration.plan_cache.memory import function\n"
        f"SCALE, NOTED, SM_90 = {SCALE!r}, {NOTED!r}, ARCHS['sm_90']\n"
    )
    path = os.pathsep.join([str(ROOT), *sys.path])
    env = {**os.environ, "LAYERPLAN_CACHE": str(folder), "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **env}
    return subprocess.Popen([sys.executable, "-c", head + code], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, env=env)  # fmt: skip


def said(started: subprocess.Popen, timeout: float = 450) -> str:
    out, err = started.communicate(timeout=timeout)
    assert started.returncode == 0, err[-3000:]
    return out.strip()


# ---- names -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package ``devicecode`` with a kernel's module and, two steps away, a helper: a function that writes a file."""

    def write(name: str, text: str, root: Path = tmp_path / "a") -> Path:
        file = root / "devicecode" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        key.source_digest.cache_clear()
        return file

    write("__init__.py", "")
    write("scale.py", "def f(arch):\n    from . import middle\n")
    write("middle.py", "import math\nfrom devicecode.helper import two\n")
    write("helper.py", "two = 2\n")
    write("stranger.py", "")
    monkeypatch.syspath_prepend(str(tmp_path / "a"))
    yield write
    key.source_digest.cache_clear()


def name(target="devicecode.scale:f", constants=(), arch="sm_90") -> str:
    return keyed(Kernel(target, constants), ARCHS[arch]).key


def test_a_helper_that_is_imported_in_two_steps_is_part_of_the_name_and_a_stranger_is_not(package):
    before = name()
    package("stranger.py", "changed = 1\n")
    assert name() == before
    package("helper.py", "two = 3\n")
    assert name() != before
    own = {f"devicecode.{n}" for n in ("scale", "middle", "helper")}
    assert set(key.sources("devicecode.scale")) == own | {"devicecode"}


def test_neither_the_place_nor_the_time_of_a_file_is_part_of_the_name(package, tmp_path, monkeypatch):
    before = name()
    os.utime(tmp_path / "a" / "devicecode" / "helper.py", (1, 1))
    key.source_digest.cache_clear()
    assert name() == before
    shutil.copytree(tmp_path / "a", tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "a")
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    key.source_digest.cache_clear()
    assert name() == before


def test_everything_else_that_changes_the_code_changes_the_name(package, monkeypatch):
    names = [name(), name(arch="sm_100"), name("devicecode.middle:f")]
    names += [name(constants=(("width", width),)) for width in (1, 1.0, True, "1")]
    versions = {"nvidia-cutlass-dsl": "4.9.0", "apache-tvm-ffi": "0.2"}
    for package_name in versions:
        with monkeypatch.context() as m:
            m.setattr(key, "installed_version", lambda n, p=package_name: versions[n] if n == p else "as ever")
            names.append(name())
    for module, function, value in ((toolkit, "major", 12), (key.platform, "machine", "aarch64")):
        with monkeypatch.context() as m:
            m.setattr(module, function, lambda value=value: value)
            names.append(name())
    assert len(set(names)) == len(names)
    assert name(constants=(("a", 1), ("b", 2))) == name(constants=(("b", 2), ("a", 1)))


@pytest.mark.parametrize("constants", [
    (("x", torch.ones(1)),), (("x", (1, 2)),), (("x", float("nan")),), (("x", 1), ("x", 2)), (("x", {1: 2}),),
])  # fmt: skip
def test_constants_that_are_no_json_values_are_refused_by_name(package, constants):
    with pytest.raises(KernelError, match=r"devicecode\.scale:f: constants = .*JSON"):
        name(constants=constants)


def test_a_target_without_a_source_file_is_refused():
    with pytest.raises(KernelError, match=r"layerplan\.kernels\.nowhere: its source file is not there"):
        name("layerplan.kernels.nowhere:f")
    with pytest.raises(KernelError, match="arch = cpu"):
        keyed(SCALE, ARCHS["cpu"])


# ---- what a hit is ---------------------------------------------------------------------------------------------------


def test_a_hit_loads_without_the_compiler_and_checks_its_arguments(made):
    code = """
began = time.perf_counter(); import tvm_ffi; imported = time.perf_counter() - began
began = time.perf_counter(); f = function(SCALE, SM_90); first = time.perf_counter() - began
assert function(SCALE, SM_90) is f
assert "cutlass" not in sys.modules, "the compiler was imported"
for args, error in (((), TypeError), ((torch.ones(4, 1024, dtype=torch.bfloat16),) * 2 + (2.0,), ValueError)):
    try:
        f(*args)
    except error as e:
        print(e)
memory._functions.clear()
began = time.perf_counter(); function(SCALE, SM_90); again = time.perf_counter() - began
print(f"import of tvm_ffi {imported * 1e3:.0f} ms, first load {first * 1e3:.1f} ms, later ones {again * 1e3:.2f} ms")
"""
    out = said(process(code, made.folder))
    print(out.rpartition("\n")[2])
    assert "Expects 3 parameters" in out and "expected device_type=cuda" in out


def test_what_a_kernel_uses_is_read_from_its_machine_code(made):
    (used,) = made.facts["resources"].values()
    assert 8 <= used["registers"] <= 32 and used["frame_bytes"] == 0 and used["shared_bytes"] == 0
    assert cubin.resources(b"\x7fELF" + bytes(100)) == {} and cubin.resources(b"") == {}
    if cubin.disassembler() is None:
        pytest.skip("needs nvdisasm")
    code = cubin.machine_code(made.file(".o").read_bytes())
    assert "LDG.E.128" in code and "STG.E.128" in code


DAMAGES = ("so cut", "so swapped", "o gone and so cut", "json cut", "json of another", "json empty", "format")


@pytest.mark.parametrize("damage", DAMAGES)
def test_whatever_does_not_agree_with_its_json_is_a_miss_and_is_replaced(cache, made, damage):
    store, folder, compiler = cache
    so, o, text = (folder / f"{made.key}{s}" for s in (".so", ".o", ".json"))
    facts = json.loads(text.read_text())
    if "so cut" in damage:
        so.write_bytes(so.read_bytes()[:-1])
    if "o gone" in damage:
        o.unlink()
    if damage == "so swapped":
        so.write_bytes(bytes(reversed(so.read_bytes())))
    if damage == "json cut":
        text.write_text(text.read_text()[:100])
    if damage == "json empty":
        text.write_text("{}")
    if damage == "json of another":
        text.write_text(json.dumps(facts | {"inputs": facts["inputs"] | {"arch": "sm_100a"}}))
    if damage == "format":
        text.write_text(json.dumps(facts | {"format": 0}))
    assert store.find(made.key) is None
    assert callable(build.obtain(keyed(SCALE, SM_90), store, compiler)) and compiler.count == 1
    assert disk.scan(folder, whole=True)[0][0].key == made.key and disk.scan(folder, whole=True)[1] == []
    build.obtain(keyed(SCALE, SM_90), store, compiler)
    assert compiler.count == 1


def test_a_whole_file_that_does_not_load_is_made_anew(cache, made):
    """A file with a checksum that fits, and without the function of this key."""
    store, folder, compiler = cache
    so, text = folder / f"{made.key}.so", folder / f"{made.key}.json"
    shutil.copyfile(toolkit.runtime_library(), so)
    facts = json.loads(text.read_text())
    text.write_text(json.dumps(facts | {"files": facts["files"] | {".so": disk.described(so)}}))
    assert store.find(made.key) is not None
    assert callable(build.obtain(keyed(SCALE, SM_90), store, compiler)) and compiler.count == 1
    assert store.find(made.key).facts["files"][".so"] == disk.described(so) != disk.described(toolkit.runtime_library())


def test_host_code_for_a_newer_cpu_is_a_miss_and_code_for_an_older_one_a_hit(cache, made, monkeypatch):
    store, folder, compiler = cache
    monkeypatch.setattr(toolkit, "cpu_level", lambda: made.facts["cpu"] - 1)
    assert store.find(made.key) is None
    assert callable(build.obtain(keyed(SCALE, SM_90), store, compiler)) and compiler.count == 1
    monkeypatch.undo()
    assert store.find(made.key).facts["cpu"] == made.facts["cpu"] - 1
    build.obtain(keyed(SCALE, SM_90), store, compiler)
    assert compiler.count == 1


@pytest.mark.parametrize("first", ["/proc/layerplan", "file"])
def test_a_folder_that_cannot_be_written_costs_a_compile_and_no_error(cache, made, tmp_path, first):
    _, folder, compiler = cache
    (tmp_path / "file").touch()
    first = tmp_path / "file" if first == "file" else Path(first)
    build.obtain(keyed(SCALE, SM_90), Store((first, folder)), compiler)
    assert compiler.count == 0  # what another folder has is served
    assert callable(build.obtain(keyed(SCALE, SM_90), Store((first,)), compiler)) and compiler.count == 1
    assert callable(build.obtain(keyed(SCALE, SM_90), Store(()), compiler)) and compiler.count == 2


def test_a_full_disk_costs_a_compile_and_no_error(cache, made, monkeypatch):
    store, folder, compiler = cache
    made_in, replace = [], os.replace
    disk.remove(store.find(made.key))

    def full(source, target):
        if Path(target).parent == folder:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        replace(source, target)

    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 30, 1 << 30, 0))
    monkeypatch.setattr(disk.os, "replace", full)
    monkeypatch.setattr(compiler, "compile", lambda w, f: made_in.append(f) or Double.compile(compiler, w, f))
    assert callable(build.obtain(keyed(SCALE, SM_90), store, compiler)) and compiler.count == 1
    assert folder not in made_in[0].parents and store.find(made.key) is None


def test_a_read_only_folder_serves_its_entries_and_takes_none(cache, made, monkeypatch):
    store, folder, compiler = cache
    before = {f: f.stat().st_mtime_ns for f in folder.iterdir()}

    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    refused = ((lock.os, "open"), (disk.os, "replace"), (disk.os, "utime"), (Path, "mkdir"), (Path, "unlink"))
    for module, function in refused:
        monkeypatch.setattr(module, function, refuse)
    monkeypatch.setattr(disk.time, "time", lambda: 4e9)
    assert callable(build.obtain(keyed(SCALE, SM_90), store, compiler)) and compiler.count == 0
    with store.locked(made.key) as held:
        assert not held
    monkeypatch.undo()
    assert {f: f.stat().st_mtime_ns for f in folder.iterdir()} == before


def test_an_entry_without_a_shared_object_loads_through_the_compiler_and_is_linked_where_a_linker_is(made, tmp_path):
    shutil.copyfile(made.file(".o"), tmp_path / f"{made.key}.o")
    facts = {"seconds": 1.0, "cpu": 2, "resources": made.facts["resources"]}
    disk.place(tmp_path, made.key, made.facts["inputs"], tmp_path, facts)
    code = "build.linker = lambda: None\nf = function(SCALE, SM_90)\nprint('cutlass' in sys.modules, type(f).__name__)"
    assert said(process(code, tmp_path)) == "True Function"
    assert Store((tmp_path,)).find(made.key).shared_object is None
    compiler = Double(made)
    build.obtain(keyed(SCALE, SM_90), Store((tmp_path,)), compiler)
    assert compiler.count == 0 and Store((tmp_path,)).find(made.key).shared_object is not None


# ---- many processes --------------------------------------------------------------------------------------------------


@pytest.mark.timeout(500)
def test_eight_processes_that_want_one_kernel_compile_it_once(tmp_path):
    notes, folder = tmp_path / "notes", tmp_path / "cache"
    notes.mkdir()
    code = "t = time.monotonic()\nfunction(NOTED, SM_90)\nprint(time.monotonic() - t, 'cutlass' in sys.modules)"
    began, env = time.monotonic(), {"OWN_KERNEL_NOTES": str(notes), "OWN_KERNEL_PAUSE": "1"}
    outs = [said(p) for p in [process(code, folder, **env) for _ in range(8)]]
    waited = ", ".join(sorted(o.split()[0][:5] for o in outs))
    print(f"eight processes: {time.monotonic() - began:.1f} s; until each had its kernel: {waited} s")
    assert len(list(notes.iterdir())) == 1 and all(o.endswith("False") for o in outs)
    assert sorted(f.suffix for f in folder.iterdir() if f.is_file()) == [".json", ".o", ".so"]  # no lock is left
    assert not list((folder / "tmp").iterdir())


@pytest.mark.timeout(500)
def test_kill_9_in_the_middle_of_a_compile_poisons_nothing(tmp_path):
    notes, folder = tmp_path / "notes", tmp_path / "cache"
    notes.mkdir()
    victim = process("function(NOTED, SM_90)", folder, OWN_KERNEL_NOTES=str(notes), OWN_KERNEL_PAUSE="200")
    compiling = _first_note(notes)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    assert list(folder.glob("*.lease")) and not list(folder.glob("*.json"))  # it held the key
    code = "from layerplan.integration.plan_cache import lock\nlock.STALE = 1e9\nfunction(NOTED, SM_90)"
    said(process(code, folder, OWN_KERNEL_NOTES=str(notes)))  # it did not wait for the dead one's lease to grow old
    os.kill(compiling, signal.SIGKILL)
    entries, faults = disk.scan(folder, whole=True)
    assert len(entries) == 1 and not faults and not list(folder.glob("*.l*"))


@pytest.mark.timeout(500)
def test_a_compiling_process_that_is_killed_is_an_error_that_says_so_and_the_next_compile_works(tmp_path):
    notes = tmp_path / "notes"
    notes.mkdir()
    code = """
from layerplan.integration.plan_cache.key import KernelError
try:
    function(NOTED, SM_90)
except KernelError as e:
    print(e)
import os
os.environ["OWN_KERNEL_PAUSE"] = "0"
print(callable(function(NOTED, SM_90)))
"""
    started = process(code, tmp_path / "cache", OWN_KERNEL_NOTES=str(notes), OWN_KERNEL_PAUSE="200")
    os.kill(_first_note(notes), signal.SIGKILL)
    error, works = said(started).splitlines()
    assert "noted_scale(dtype=BFloat16, width=1024) for sm_90a does not compile" in error and "signal 9" in error
    assert works == "True"


def test_after_an_interrupt_the_next_request_does_not_get_the_answer_of_the_interrupted_one(tmp_path, monkeypatch):
    notes = tmp_path / "notes"
    notes.mkdir()
    monkeypatch.setenv("OWN_KERNEL_NOTES", str(notes))
    monkeypatch.setenv("OWN_KERNEL_PAUSE", "2")
    compiler, wanted = Compiler("sm_90a"), keyed(SCALE, SM_90)

    def interrupt() -> None:
        _first_note(notes)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        compiler.compile(keyed(NOTED, SM_90), tmp_path)
    thread.join()
    compiler.compile(wanted, tmp_path)
    assert (tmp_path / f"{wanted.key}.o").is_file()
    compiler.close()


def _first_note(notes: Path) -> int:
    """The process that compiles, once it does."""
    end = time.monotonic() + 400
    while not (found := list(notes.iterdir())):
        assert time.monotonic() < end, "nothing was compiled"
        time.sleep(0.05)
    return int(found[0].name)


def test_a_lease_of_a_dead_process_on_another_machine_is_taken_over_and_a_living_one_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "STALE", 1.0)
    lease = tmp_path / "k.lease"
    lease.write_text(json.dumps({"machine": "another", "pid": 1}))
    began, beats = time.monotonic(), 0

    def sleep(seconds, sleep=time.sleep):
        nonlocal beats
        beats += 1
        if beats <= 15:  # it still lives
            os.utime(lease, ns=(beats, beats))
        sleep(seconds)

    monkeypatch.setattr(lock.time, "sleep", sleep)
    held = lock.Lock(tmp_path / "k.lock")
    assert time.monotonic() - began > 1.4 + lock.STALE
    assert json.loads(lease.read_text())["machine"] == lock.machine()
    held.release()
    assert list(tmp_path.iterdir()) == []


def test_a_lease_of_this_machine_without_its_flock_is_a_dead_process_s(tmp_path, monkeypatch):
    monkeypatch.setattr(lock.time, "sleep", lambda _: pytest.fail("it waits"))
    (tmp_path / "k.lease").write_text(json.dumps({"machine": lock.machine(), "pid": 1}))
    lock.Lock(tmp_path / "k.lock").release()
    assert list(tmp_path.iterdir()) == []


def test_a_lease_that_cannot_be_read_is_waited_for_and_then_taken_over(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "STALE", 0.3)
    (tmp_path / "k.lease").write_bytes(b"{")  # cut short
    began = time.monotonic()
    lock.Lock(tmp_path / "k.lock").release()
    assert time.monotonic() - began > 0.3 and list(tmp_path.iterdir()) == []


def test_where_a_file_system_has_no_flock_the_lease_alone_holds(tmp_path, monkeypatch):
    def none(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", none)
    monkeypatch.setattr(lock, "BEAT", 0.1)
    monkeypatch.setattr(lock, "STALE", 1.0)
    first = lock.Lock(tmp_path / "k.lock")
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom layerplan.integration.plan_cache import lock\n"
        "def none(*_):\n    raise OSError(37, 'No locks available')\n"
        "lock.fcntl.flock = none\nlock.STALE = 1.0\nprint('waits', flush=True)\n"
        f"lock.Lock(Path({str(tmp_path / 'k.lock')!r})).release()\nprint('had it')"
    )
    second = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert second.stdout.readline().strip() == "waits"
    time.sleep(2.0)  # twice STALE: the holder's beats keep it
    assert second.poll() is None
    first.release()
    assert second.communicate(timeout=30)[0].strip() == "had it"


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_what_goes_wrong_in_device_code_is_an_error_with_its_words_and_the_compiler_goes_on(made):
    compiler = Compiler("sm_90a")

    def compile_wrong(fault: str) -> str:
        wanted = keyed(Kernel("tests.cases.own_kernel:wrong", (("fault", fault),)), SM_90)
        with pytest.raises(KernelError, match=rf"own_kernel:wrong\(fault={fault}\) for sm_90a does not compile") as e:
            compiler.compile(wanted, Path("/nowhere"))
        return str(e.value)

    for fault, words in (("raise", "no such tile"), ("result", "returned str"), ("exit", "ended with status 3")):
        assert words in compile_wrong(fault)
    compiler.close()
    assert "no such tile" in compile_wrong("raise")  # a process that had ended is started again
    compiler.close()


def test_a_source_that_changes_while_it_is_compiled_is_an_error(package, made, tmp_path):
    class Changing(Double):
        def compile(self, wanted, folder):
            package("helper.py", "two = 4\n")
            return super().compile(wanted, folder)

    with pytest.raises(KernelError, match="its source changed while it was compiled"):
        build.obtain(keyed(Kernel("devicecode.scale:f"), SM_90), Store((tmp_path / "c",)), Changing(made))
    assert disk.scan(tmp_path / "c") == ([], [])


def test_in_a_capture_a_loaded_kernel_is_given_and_another_is_a_typed_error(cache, made, monkeypatch):
    _, folder, _ = cache
    monkeypatch.setenv("LAYERPLAN_CACHE", str(folder))
    monkeypatch.setattr(memory, "_functions", {})
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    region = _norm_region()
    with pytest.raises(memory.CompileInCapture) as e:
        memory.context(region, SM_90, None).compile(SCALE)
    for words in ("own_kernel:scale(dtype=BFloat16, width=1024) on sm_90", "rms_norm", "32", "layerplan.warm(model,"):
        assert words in str(e.value), e.value
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    loaded = memory.function(SCALE, SM_90)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert memory.context(region, SM_90, None).compile(SCALE) is loaded


def _norm_region():
    from layerplan.integration.graph.ir import GraphBuilder, TensorSpec
    from layerplan.integration.planner.cover import region_of

    b = GraphBuilder()
    x, w = b.input("x", TensorSpec((64, 32), "bfloat16")), b.input("w", TensorSpec((32,), "bfloat16"))
    graph = b.build([b.op("rms_norm", x=x, weight=w, eps=1e-5)])
    return region_of(graph, graph.nodes)


# ---- settings --------------------------------------------------------------------------------------------------------


def test_the_cache_s_folders_come_from_the_environment(tmp_path):
    home = {"HOME": "/users/me"}
    assert settings.cache_folders(home) == (Path("/users/me/.cache/layerplan/kernels"),)
    assert settings.cache_folders(home | {"XDG_CACHE_HOME": "/x"}) == (Path("/x/layerplan/kernels"),)
    assert settings.cache_folders(home | {"XDG_CACHE_HOME": "x"}) == settings.cache_folders(home)
    assert settings.cache_folders({}) == ()
    assert settings.cache_folders({"LAYERPLAN_CACHE": "/a:/b: "}) == (Path("/a"), Path("/b"))
    unknown = {"LAYERPLAN_CACHE": "/a:~nobody_of_this_name/b"}
    assert settings.cache_folders(unknown) == (Path("/a"),)
    with pytest.raises(settings.SettingsError, match=r"LAYERPLAN_CACHE = .*: ~nobody_of_this_name/b lies in a home"):
        settings.Settings.from_env(unknown)


def test_a_compiling_process_has_no_device_and_no_option_that_changes_code():
    env = settings.compiler_environment("sm_100a", "/p", {"CUTE_DSL_LINEINFO": "1", "CUTE_DSL_KEEP_PTX": "1", "A": "b"})
    archs = {"CUTE_DSL_ARCH": "sm_100a", "QUACK_ARCH": "sm_100"}
    assert env == {"CUTE_DSL_KEEP_PTX": "1", "A": "b", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": "/p"} | archs


# ---- to another machine ----------------------------------------------------------------------------------------------


def test_an_archive_carries_whole_entries_and_names_what_it_refuses(cache, made, tmp_path):
    store, folder, _ = cache
    assert archive.write_archive(disk.scan(folder)[0], tmp_path / "a.tar") == 1
    taken, refused, _ = archive.read_archive(tmp_path / "a.tar", tmp_path / "other")
    assert [e.key for e in taken] == [made.key] and not refused
    assert archive.read_archive(tmp_path / "a.tar", tmp_path / "other") == ([], [], len(taken))  # it is there
    compiler = Double(made)
    assert callable(build.obtain(keyed(SCALE, SM_90), Store((tmp_path / "other",)), compiler)) and compiler.count == 0

    (tmp_path / "evil").write_text("x")
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (broken / f"{made.key}.o").write_bytes(b"cut")
    with tarfile.open(tmp_path / "b.tar", "w") as tar:
        for file in sorted(broken.iterdir()):
            tar.add(file, arcname=file.name)
        tar.add(tmp_path / "evil", arcname="../evil.so")
        tar.add(tmp_path / "evil", arcname="readme.json")
    taken, refused, _ = archive.read_archive(tmp_path / "b.tar", tmp_path / "third")
    assert not taken and {f.path.name: f.reason for f in refused}.keys() == {"evil.so", "readme.json", made.key}
    assert list((tmp_path / "third").iterdir()) == [] and not (tmp_path / "evil.so").exists()
    with pytest.raises(KernelError, match=r"evil: is no tar file"):
        archive.read_archive(tmp_path / "evil", tmp_path / "third")


def test_prune_removes_the_old_the_many_the_other_and_the_broken(cache, made, monkeypatch):
    store, folder, _ = cache
    assert archive.prune(folder, archive.Limits()) == ([], [])
    assert archive.prune(folder, archive.Limits(days=1.0, nbytes=made.nbytes, other_versions=True)) == ([], [])
    (folder / ("0" * 64 + ".so")).touch()
    left_over = ("0" * 64 + ".so", "0" * 64 + ".lock", "tmp/layerplan-compile-old", "layerplan-import-old")
    (folder / left_over[1]).touch()
    for old in left_over[2:]:
        (folder / old).mkdir(parents=True)
    for old in left_over:
        os.utime(folder / old, (1, 1))
    gone, broken = archive.prune(folder, archive.Limits())
    assert not gone and [f.path.stem for f in broken] == ["0" * 64]
    assert {f.name for f in folder.iterdir()} == {"tmp", *(f"{made.key}{s}" for s in disk.SUFFIXES)}
    assert not list((folder / "tmp").iterdir())
    for limits in (archive.Limits(nbytes=made.nbytes - 1), archive.Limits(0.0), archive.Limits(other_versions=True)):
        with monkeypatch.context() as m:
            removed = []
            m.setattr(archive, "remove", removed.append)
            m.setattr(archive, "installed_version", lambda n: "5.0")
            assert len(archive.prune(folder, limits)[0]) == len(removed) == 1
    assert [e.key for e in archive.prune(folder, archive.Limits(days=0.0))[0]] == [made.key]
    assert archive.listing(folder).entries == () and archive.listing(folder / "nowhere").entries == ()


def test_nobody_else_s_files_are_removed_from_a_folder_that_the_cache_was_put_into(cache):
    store, folder, _ = cache
    others = ("poetry.lock", "package.json", "libfoo.so", "main.o", "tmp/thesis.txt", "tmp/results/a.txt")
    for name in others:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    for name in (*others, "tmp/results"):
        os.utime(folder / name, (1, 1))
    with store.workshop() as workshop:  # which clears what dead processes have left
        assert workshop.parent == folder / "tmp"
    assert disk.scan(folder, whole=True)[1] == []
    assert archive.prune(folder, archive.Limits(days=0.0))[1] == []
    assert all((folder / name).read_text() == "{}" for name in others)
