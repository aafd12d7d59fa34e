"""plan.layers=transformer_engine: what it asks Megatron for, where it is refused; and that our layers train the same beside that package.

Transformer Engine needs a GPU: the package in ``fake`` can be imported and not used.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from harness import HERE, ROOT, run_ranks

BESIDE = {"PYTHONPATH": os.pathsep.join([str(HERE / "fake"), str(ROOT), str(HERE)])}


def _asked(hidden):
    """Problems per device, and the config and classes that recipes of these layers give; ``hidden``: without the package."""
    import torch

    if hidden:
        sys.modules["transformer_engine"] = None
    from layerplan.integration.training.build import block_spec, transformer_config, transformer_engine_problems
    from layerplan.recipes import load_recipe

    def recipe(*overrides):
        return load_recipe("gpt_tiny", ["plan.layers=transformer_engine", *overrides])

    devices = {name: torch.device(name) for name in ("cpu", "cuda:0")}
    seen = {"problems": {name: [str(p) for p in transformer_engine_problems(recipe(), d)] for name, d in devices.items()}}
    seen["others"] = transformer_engine_problems(load_recipe("gpt_tiny", ["plan.layers=megatron_local"]), devices["cpu"])
    if hidden:
        return seen
    seen["deterministic"] = [str(p) for p in transformer_engine_problems(recipe("plan.deterministic=true"), devices["cuda:0"])]
    fields = ("transformer_impl", "apply_rope_fusion", "bias_activation_fusion", "bias_dropout_fusion", "cross_entropy_loss_fusion", "gradient_accumulation_fusion")
    seen["configs"] = {activation: {f: getattr(transformer_config(recipe(f"model.activation={activation}")), f) for f in fields}
                       for activation in ("swiglu", "geglu")}  # fmt: skip
    normed = recipe("model.qk_norm=true")
    attention = block_spec(normed, transformer_config(normed)).submodules.self_attention.submodules
    seen["classes"] = [attention.linear_qkv.__name__, attention.core_attention.__name__, attention.linear_proj.__name__]
    plain = block_spec(recipe(), transformer_config(recipe())).submodules.self_attention.submodules
    seen["norms differ"] = attention.q_layernorm is not plain.q_layernorm
    return seen


@pytest.fixture(scope="module")
def asked():
    pytest.importorskip("megatron.core")
    return run_ranks("test_training_transformer_engine:_asked", 1, 120, env=BESIDE, hidden=False)[0]


def test_its_layers_come_with_the_fusions_that_keep_the_maths(asked):
    fused = asked["configs"]["swiglu"]
    assert fused.pop("transformer_impl") == "transformer_engine" and all(fused.values())
    assert asked["configs"]["geglu"]["bias_activation_fusion"] is False  # Megatron's fused GELU is the tanh approximation
    assert asked["classes"] == ["TELayerNormColumnParallelLinear", "TEDotProductAttention", "TERowParallelLinear"] and asked["norms differ"]


def test_they_are_refused_on_a_cpu_and_where_the_environment_does_not_ask_for_determinism(asked):
    (line,) = asked["problems"]["cpu"]
    assert "plan.layers = 'transformer_engine'" in line and "runs on a GPU only" in line
    assert asked["problems"]["cuda:0"] == [] and asked["others"] == []
    (line,) = asked["deterministic"]
    assert "NVTE_ALLOW_NONDETERMINISTIC_ALGO = 0" in line


def test_a_package_that_is_not_there_is_named_with_what_installs_it():
    pytest.importorskip("megatron.core")
    seen = run_ranks("test_training_transformer_engine:_asked", 1, 120, env=BESIDE, hidden=True)[0]
    (line,) = seen["problems"]["cuda:0"]
    assert "'transformer-engine', which is not installed" in line and "[te]" in line
    assert line in seen["problems"]["cpu"] and len(seen["problems"]["cpu"]) == 2


def test_our_layers_train_the_same_beside_transformer_engine_and_without_it(tmp_path):
    pytest.importorskip("megatron.core")
    command = [sys.executable, str(ROOT / "tests" / "bench" / "end_to_end.py"), "--device", "cpu", "--tiny", "--impl", "layerplan,layerplan+beside_te",
               "--rounds", "1", "--warmup", "1", "--steps", "2", "--limit", "150", "--out", str(tmp_path / "record.json")]  # fmt: skip
    done = subprocess.run(command, env=os.environ | BESIDE, capture_output=True, text=True, timeout=320)
    assert done.returncode == 0, done.stderr
    alone, beside = json.loads((tmp_path / "record.json").read_text())["rows"]
    for name in ("losses", "grad_norms", "start_norm", "adam"):
        assert alone[name] == beside[name], name
    assert alone["losses"][-1] < alone["losses"][0] and alone["tokens_per_s"] > 0 and len(alone["losses"]) == 3
