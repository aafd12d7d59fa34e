"""The process that compiles: ``python -m layerplan.integration.plan_cache.worker``, started by ``compiler.py``.

It reads one JSON line a request from standard input and answers with one JSON line; it ends when its input does, or
when nobody asked for ``IDLE`` seconds. So the compiler (half a gigabyte, seconds to import) never enters a training
process, needs no CUDA context, and may be killed at any time.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import pickle
import select
import sys
import time
import traceback
from typing import Any

IDLE = 60.0


def compile_kernel(request: dict[str, Any]) -> None:
    """Calls ``target(arch, **constants)`` and writes what it compiled to ``object`` under the name ``symbol``."""
    module, _, function = request["target"].partition(":")
    compiled = getattr(importlib.import_module(module), function)(arch=request["arch"], **request["constants"])
    if not hasattr(compiled, "export_to_c"):
        returned = type(compiled).__name__
        raise TypeError(f"{request['target']} returned {returned}: it must return what cute.compile returns")
    compiled.export_to_c(request["object"], request["symbol"])


def compile_library(request: dict[str, Any]) -> None:
    """Has an engine compile a region into its library's own cache. ``work``: the region, its arch and its offer."""
    from ..engines.contract import BuildContext
    from ..engines.manifest import BY_ID

    region, arch, offer = pickle.loads(base64.b64decode(request["work"]))  # from the process that started this one
    BY_ID[request["engine"]].load().compile_ahead(BuildContext(region, arch, offer))


def answer(line: bytes) -> dict[str, Any]:
    began = time.monotonic()
    try:
        request = json.loads(line)
        (compile_library if "engine" in request else compile_kernel)(request)
    except Exception as error:  # whatever device code raises is the answer
        return {"error": "".join(traceback.format_exception(error)[-4:]).strip()}
    return {"seconds": round(time.monotonic() - began, 3)}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what imported code prints is no answer
    while select.select([sys.stdin.buffer], [], [], IDLE)[0]:
        line = sys.stdin.buffer.raw.readline()  # unbuffered: select would not see what a buffer holds
        if not line:
            break
        answers.write(json.dumps(answer(line)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
