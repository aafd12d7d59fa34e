"""Compiling many kernels before they are needed, several at a time, on a machine that may have no GPU."""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..engines.arch import Arch
from ..engines.contract import BuildContext, Kernel
from ..engines.manifest import BY_ID
from .build import make
from .compiler import Compiler
from .disk import Entry, Store, read
from .key import KernelError, chip, keyed, label

CACHED, COMPILED, KEPT, FAILED, NOT_AHEAD = "cached", "compiled", "in library", "failed", "not ahead"


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One thing to compile for an arch: a kernel of ours, or a region (``ctx``) whose library compiles ahead in a
    process with ``variables``."""

    engine: str
    arch: Arch
    kernel: Kernel | None = None
    ctx: BuildContext | None = None
    variables: dict[str, str] | None = None

    @property
    def name(self) -> str:
        if self.kernel is None:
            return f"{self.engine}: {'+'.join(self.ctx.region.ops)}"
        return label(self.kernel.target, self.kernel.constants)

    def ready(self, store: Store) -> bool:
        """Whether the cache holds it already; what a library keeps is not looked for."""
        return self.kernel is not None and store.find(keyed(self.kernel, self.arch).key) is not None


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
    """What became of a job. ``state``: cached or compiled, in library (which keeps it, and does not say whether it had
    it), failed, not ahead. ``registers`` and ``frame_bytes`` (local memory a thread, spills among it) are the most that
    one of its device functions uses; ``note``: why it failed, or is not compiled ahead."""

    name: str
    engine: str
    arch: str
    state: str
    seconds: float | None = None
    registers: int | None = None
    frame_bytes: int | None = None
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def jobs_of(contexts: Iterable[tuple[str, BuildContext]], library: Path | None) -> tuple[list[Job], list[Done]]:
    """(what can be compiled ahead, each once; what cannot, with the reason) of (engine's id, what it would build from).
    ``library``: the folder for the caches of libraries, None where there is none."""
    jobs: dict[Any, Job] = {}
    rest: dict[tuple[str, str], Done] = {}
    for engine, ctx in contexts:
        loaded = BY_ID[engine].load()
        kernels = loaded.kernels(ctx.region, ctx.arch, ctx.offer)
        for kernel in kernels:
            jobs.setdefault((repr(kernel), ctx.arch.name), Job(engine, ctx.arch, kernel=kernel))
        if kernels:
            continue
        variables = None if library is None else loaded.ahead_variables(ctx, str(library))
        if variables is None:
            done = Done(engine, engine, ctx.arch.name, NOT_AHEAD, note=loaded.not_ahead)
            rest.setdefault((engine, ctx.arch.name), done)
        else:
            key = (engine, ctx.region.graph.signature(), ctx.offer.knobs, ctx.arch.name)
            jobs.setdefault(key, Job(engine, ctx.arch, ctx=ctx, variables=variables))
    return sorted(jobs.values(), key=lambda j: (j.arch.name, j.engine, j.name)), list(rest.values())


def compile_all(jobs: Iterable[Job], store: Store, workers: int,
                tell: Callable[[Done], None] = lambda done: None) -> list[Done]:  # fmt: skip
    """Runs ``jobs`` in ``workers`` processes, each of one arch at a time; ``tell`` hears of each as it is done."""
    waiting, done, one = deque(jobs), [], threading.Lock()

    def work() -> None:
        compiler, own = None, None
        try:
            while True:
                with one:
                    if not waiting:
                        return
                    job = waiting.popleft()
                if own != (job.arch, job.variables):
                    if compiler is not None:
                        compiler.close()
                    compiler, own = Compiler(chip(job.arch), job.variables), (job.arch, job.variables)
                result = _run(job, store, compiler)
                with one:
                    done.append(result)
                    tell(result)
        finally:
            if compiler is not None:
                compiler.close()

    with ThreadPoolExecutor(workers) as pool:
        for future in [pool.submit(work) for _ in range(workers)]:
            future.result()
    return done


def _run(job: Job, store: Store, compiler: Compiler) -> Done:
    try:
        if job.kernel is None:
            seconds = compiler.compile_library(job.engine, job.ctx)
            return Done(job.name, job.engine, job.arch.name, KEPT, seconds)
        wanted = keyed(job.kernel, job.arch)
        state, entry, damaged = CACHED, store.find(wanted.key), None
        if entry is not None and not isinstance(read(entry.folder, wanted.key, whole=True), Entry):
            entry, damaged = None, entry
        if entry is None:
            state = COMPILED
            with store.workshop() as folder:
                entry = make(wanted, store, folder, compiler, unusable=damaged)
                if entry.folder == folder:
                    raise KernelError(f"{store.folders[0] if store.folders else 'no cache folder'}: takes no files")
    except KernelError as error:
        return Done(job.name, job.engine, job.arch.name, FAILED, note=str(error))
    used = entry.facts["resources"].values()
    most = {n: max((u[n] for u in used), default=0) for n in ("registers", "frame_bytes")}
    seconds = entry.facts["seconds"] if state == COMPILED else None
    return Done(job.name, job.engine, job.arch.name, state, seconds, **most)
