"""Own kernels on a GPU: compiled, loaded by another process without the compiler, and ready in a capture."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import layerplan
from layerplan.integration.engines.arch import Arch
from layerplan.integration.engines.contract import Kernel
from layerplan.integration.engines.packages import locate
from layerplan.integration.plan_cache import memory
from layerplan.integration.planner import program, runner
from layerplan.integration.planner.policy import Policy
from layerplan.modules.norm import Norm

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not locate("cutlass").here, reason="needs nvidia-cutlass-dsl")


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache, and a process that knows no kernel."""
    monkeypatch.setenv("LAYERPLAN_CACHE", str(tmp_path))
    for module, name in ((memory, "_functions"), (program, "_compiled"), (runner, "_plans")):
        monkeypatch.setattr(module, name, {})
    return tmp_path


def test_a_kernel_runs_on_the_current_stream_and_another_process_loads_it_without_the_compiler(cache):
    kernel = Kernel("tests.cases.own_kernel:scale", (("dtype", "BFloat16"), ("width", 1024)))
    began = time.perf_counter()
    scale = memory.function(kernel, Arch.of_device(0))
    print(f"cold {time.perf_counter() - began:.2f} s")
    x = torch.randn(33, 1024, device="cuda", dtype=torch.bfloat16)
    scale(x, torch.empty_like(x), 0.5)  # loads its code, which takes longer than what it waits behind below
    y, side = torch.full_like(x, float("nan")), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        scale(x, y, 0.5)
    assert y.isnan().any()  # the launch waits behind what its own stream does
    side.synchronize()
    assert torch.equal(y, x * 0.5)
    code = f"""
import sys, time, torch
from layerplan.integration.engines.arch import Arch
from layerplan.integration.engines.contract import Kernel
from layerplan.integration.plan_cache import memory, toolkit
x = torch.randn(7, 1024, device="cuda", dtype=torch.bfloat16)
y, arch = torch.empty_like(x), Arch.of_device(0)
torch.cuda.synchronize()
began = time.perf_counter(); import tvm_ffi; toolkit.loaded_runtime(); libraries = time.perf_counter() - began
began = time.perf_counter(); f = memory.function({kernel!r}, arch); loaded = time.perf_counter() - began
began = time.perf_counter(); f(x, y, 2.0); torch.cuda.synchronize(); first = time.perf_counter() - began
assert torch.equal(y, x * 2) and "cutlass" not in sys.modules
print(f"libraries {{libraries * 1e3:.1f}} ms, load {{loaded * 1e3:.2f}} ms, first launch {{first * 1e3:.2f}} ms")
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)


def _norm() -> Norm:
    model = Norm(512, dtype=torch.bfloat16, device="cuda")
    model.set_policy(Policy(engine="norm/cute"))
    return model


def test_a_kernel_that_is_not_loaded_is_a_typed_error_in_a_capture(cache):
    model, x = _norm(), torch.randn(64, 512, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(memory.CompileInCapture, match=r"rms_norm.*layerplan\.warm"), torch.cuda.graph(graph):
        model(x)


@pytest.mark.parametrize("training", [True, False])
def test_after_warm_the_first_run_of_a_model_can_be_captured(cache, training):
    model = _norm().train(training)
    x = torch.randn(64, 512, device="cuda", dtype=torch.bfloat16, requires_grad=training)
    assert layerplan.warm(model, {"x": ((64, 512), torch.bfloat16)}) >= 1
    wanted = (x, model.weight) if training else ()

    def step():
        y = model(x)
        return (y, *torch.autograd.grad(y.float().square().sum(), wanted)) if training else (y,)

    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.set_grad_enabled(training), torch.cuda.graph(graph):
        results = step()
    for _ in range(2):
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
        graph.replay()
        replayed = [r.clone() for r in results]
        with torch.set_grad_enabled(training):
            eager = step()
        assert all(torch.equal(a, b) for a, b in zip(replayed, eager, strict=True))
