"""JSON files that ranks share: plan files and records. Imports neither torch nor an engine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write(path: Path, content: Any) -> None:
    """Write atomically: a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read(path: Path, name: str, error: type[ValueError]) -> Any:
    """The content of a file; ``error`` where it is absent or cannot be read, in a message that calls it ``name``."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise error(f"{name}: no such file") from None
    except (OSError, ValueError, RecursionError) as e:  # the last: brackets nested thousands deep
        raise error(f"{name}: cannot be read ({e})") from None


KNOB_RULE = "must be a number other than NaN, a string, a boolean, null, or a list of these"


def is_knob(value: Any) -> bool:
    """Whether a knob can have this value, by ``KNOB_RULE``. Plans are found by their knobs, and NaN equals nothing."""
    plain = value if isinstance(value, list) else [value]
    return all(isinstance(v, str | int | float | None) and v == v for v in plain)
