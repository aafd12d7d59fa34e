"""tests/bench/block.py without a GPU: what it compares computes the same from the same weights, on one rank and on two."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")
SCRIPT = Path(__file__).resolve().parents[1] / "bench" / "block.py"


def rows(tmp_path, ranks: int, *arguments: str) -> list[dict]:
    out = tmp_path / "block.json"
    command = [sys.executable, *(["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else [])]
    command += [str(SCRIPT), "--device", "cpu", "--tiny", "--impl", "layerplan,local", "--out", str(out), *arguments]
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    made = json.loads(out.read_text())
    assert made["ranks"] == ranks
    return made["rows"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("ranks", "arguments"), [
    (1, ("--model", "llama8b")), (1, ("--model", "qwen30")),
    (2, ("--model", "moe64")), (2, ("--model", "moe64", "--dispatcher", "allgather")),
])  # fmt: skip
def test_both_implementations_compute_the_same(tmp_path, ranks, arguments):
    ours, local = rows(tmp_path, ranks, *arguments)
    assert ours["impl"] == "layerplan" and set(ours["apart"].values()) == {0.0}
    # bfloat16 keeps 8 bits: a step between two values is 0.4 to 0.8 %, and a router may choose otherwise where two are near
    assert local["impl"] == "local" and 0 < local["apart"]["y"] < 0.004 and local["apart"]["dx"] < 0.004
    assert 0 < local["apart"]["dw"] < 0.05
