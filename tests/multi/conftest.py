"""Makes `harness` and the helpers of this folder importable from its test modules, however pytest is started."""

import sys
from pathlib import Path

HERE = str(Path(__file__).resolve().parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)
