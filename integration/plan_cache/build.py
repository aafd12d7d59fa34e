"""From a key to a function: compile, link, keep, load."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..engines.arch import Arch
from . import cubin, toolkit
from .compiler import Compiler
from .disk import Entry, Store, place, touch
from .key import KernelError, Keyed, keyed, source_digest

LINKERS = ("cc", "gcc", "clang", "ld.lld", "ld")


def obtain(wanted: Keyed, store: Store, by: Compiler) -> Callable[..., Any]:
    """The function of a kernel: from the cache where its entry is there and loads here, else compiled by ``by``."""
    entry = store.find(wanted.key)
    if entry is not None and (entry.shared_object is not None or linker() is None):
        try:
            found = load(entry, entry.shared_object, wanted.symbol)
        except Exception:  # whole files that this machine cannot load all the same: they are made anew
            pass
        else:
            touch(entry)
            return found
    with store.workshop() as folder:
        made = make(wanted, store, folder, by, unusable=entry)
        file = made.shared_object
        if entry is not None and file is not None:  # a name that was loaded once is not loaded again
            file = Path(shutil.copyfile(file, folder / "made_anew.so"))
        return load(made, file, wanted.symbol)


def make(wanted: Keyed, store: Store, folder: Path, by: Compiler, *, unusable: Entry | None = None) -> Entry:
    """The entry of ``wanted``, compiled by ``by`` unless another process has made it meanwhile. Files are made in
    ``folder``, and stay there where the cache takes nothing. ``unusable``: an entry that does not do; where all that
    it lacks is a shared object, it is linked.

    KernelError where the kernel does not compile or link."""
    with store.locked(wanted.key):
        entry = store.find(wanted.key)
        if entry is not None and (unusable is None or entry.facts != unusable.facts):
            return entry
        if entry is not None and entry.shared_object is None and linker() is not None:
            seconds, cpu = entry.facts["seconds"], entry.facts["cpu"]
            shutil.copyfile(entry.file(".o"), folder / f"{wanted.key}.o")
        else:
            seconds, cpu = by.compile(wanted, folder), toolkit.cpu_level()
            source_digest.cache_clear()
            if keyed(wanted.kernel, Arch.parse(wanted.arch)).key != wanted.key:
                raise KernelError(f"{wanted}: its source changed while it was compiled; start this process again")
        link(folder, wanted.key)
        used = cubin.resources((folder / f"{wanted.key}.o").read_bytes())
        facts = {"seconds": seconds, "cpu": cpu, "resources": {name: r.to_json() for name, r in used.items()}}
        published = store.publish(wanted.key, wanted.inputs, folder, **facts)
        return published or place(folder, wanted.key, wanted.inputs, folder, facts)


@functools.cache
def linker() -> str | None:
    """The program that makes shared objects here; None without one."""
    return next((found for name in LINKERS if (found := shutil.which(name))), None)


def link(folder: Path, key: str) -> Path | None:
    """``folder/KEY.so`` of ``folder/KEY.o``; None without a linker. It names the runtime libraries without their paths:
    ``load`` has them loaded by then."""
    program, runtime = linker(), toolkit.runtime_library()
    if program is None or runtime is None:
        return None
    import tvm_ffi

    out = folder / f"{key}.so"
    libraries = (str(runtime), tvm_ffi.libinfo.find_libtvm_ffi())
    done = subprocess.run(
        [program, "-shared", "-o", str(out), str(folder / f"{key}.o"), *libraries], capture_output=True, text=True
    )
    if done.returncode:
        raise KernelError(
            f"linking a kernel with {program} fails: {done.stderr.strip()[-2000:]}; repair the linker, or take it off "
            "the PATH: kernels load without one, through the compiler"
        )
    return out


def load(entry: Entry, file: Path | None, symbol: str) -> Callable[..., Any]:
    """The function of an entry, from ``file``, its shared object: nothing of the compiler is imported for it. Without
    one the compiler's own loader is used."""
    if file is None:
        from cutlass.cute.runtime import load_module

        return getattr(load_module(str(entry.file(".o")), enable_tvm_ffi=True), symbol)
    import tvm_ffi

    toolkit.loaded_runtime()
    return getattr(tvm_ffi.load_module(file), symbol)
