"""A process of its own that compiles for one arch, as this process sees it."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..settings import compiler_environment
from .key import KernelError, Keyed

if TYPE_CHECKING:
    from ..engines.contract import BuildContext


class Compiler:
    """Compiles one kernel at a time; its process is started by the first request, and again where it is gone.

    ``variables`` are set in that process: those by which a library finds its cache."""

    def __init__(self, chip: str, variables: Mapping[str, str] | None = None) -> None:
        self.chip, self.variables = chip, dict(variables or {})
        self._process: subprocess.Popen | None = None
        self._said: Any = None
        self._one = threading.Lock()

    def compile(self, keyed: Keyed, folder: Path) -> float:
        """Writes ``folder/KEY.o``; the seconds that it took. KernelError with what the compiler said where it fails."""
        request = {
            "target": keyed.kernel.target,
            "constants": dict(keyed.kernel.constants),
            "arch": keyed.arch,
            "symbol": keyed.symbol,
            "object": str(folder / f"{keyed.key}.o"),
        }
        return self._seconds(str(keyed), request)

    def compile_library(self, engine: str, ctx: BuildContext) -> float:
        """Has an engine's ``compile_ahead`` run; the seconds that it took. KernelError as ``compile``."""
        work = base64.b64encode(pickle.dumps((ctx.region, ctx.arch, ctx.offer))).decode()
        return self._seconds(f"{engine}: {'+'.join(ctx.region.ops)}", {"engine": engine, "work": work})

    def _seconds(self, what: str, request: dict[str, Any]) -> float:
        with self._one:
            answer = self._ask(request)
        if "error" in answer:
            raise KernelError(f"{what} for {self.chip} does not compile: {answer['error']}")
        return answer["seconds"]

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        for again in (False, True):
            if self._process is None or again:
                self._start()
            line = b""
            try:
                with contextlib.suppress(BrokenPipeError):
                    self._process.stdin.write(json.dumps(request).encode() + b"\n")
                    self._process.stdin.flush()
                    line = self._process.stdout.readline()
            except BaseException:  # interrupted: this answer would be taken for that of the next request
                self._process.kill()
                self._end()
                raise
            if line.endswith(b"\n"):
                return json.loads(line)
            status, said = self._end()
            if status:  # it ends with 0 where nobody had asked for long
                break
        how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        return {"error": f"the compiling process {how}: {said[-2000:].strip() or 'it said nothing'}"}

    def _start(self) -> None:
        self._end()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        # the same modules as here, and nothing from the folder that happens to be the current one
        path = os.pathsep.join(os.path.abspath(p) for p in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "layerplan.integration.plan_cache.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=compiler_environment(self.chip, path) | self.variables,
        )

    def _end(self) -> tuple[int, str]:
        """(exit status, what it said) of the process, which is gone then."""
        if self._process is None:
            return 0, ""
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        status = self._process.wait()
        self._process.stdout.close()
        self._process = None
        with self._said as file:
            file.seek(0)
            return status, file.read().decode(errors="replace")

    def close(self) -> None:
        """Ends the process, after what it is compiling."""
        with self._one:
            self._end()
