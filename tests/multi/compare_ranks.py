"""What test_training_compare runs in a process of its own: comparisons of a tiny recipe, each as its exit status and
its JSON."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

SMALL = [
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.ffn_hidden_size=128",
    "model.vocab_size=256",
    "model.seq_length=32",
]


def run(a: str, b: str, *overrides: str) -> dict[str, Any]:
    """The command: its status, what it wrote to stderr, and its JSON where there is one."""
    from layerplan.integration.training.quiet import quiet

    quiet()
    from layerplan.integration.training.compare import compare_command

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = compare_command("gpt_tiny", a, b, [*SMALL, *overrides], True)
    return {"status": status, "said": err.getvalue(), "found": json.loads(out.getvalue()) if out.getvalue() else None}


def agreeing() -> dict[str, dict[str, Any]]:
    return {
        "fp32": run("auto", "reference"),
        "bf16, dropout, recompute": run(
            "auto",
            "reference",
            "precision.dtype=bf16",
            "model.hidden_dropout=0.1",
            "model.attention_dropout=0.1",
            "plan.recompute=full",
        ),
        "fused further": run(
            "auto", "*.mlp=reference", "plan.fuse_residual=true", "plan.loss=chunked", "model.tie_embeddings=true"
        ),
        "experts": run(
            "auto",
            "reference",
            "model.num_experts=4",
            "model.moe_shared_expert_intermediate_size=64",
            "model.moe_aux_loss_coeff=0.01",
            "model.moe_z_loss_coeff=0.001",
        ),
        "megatron": run(
            "auto",
            "megatron",
            "precision.dtype=bf16",
            "model.qk_norm=true",
            "model.linear_bias=true",
            "model.qkv_bias=true",
        ),
        "megatron, further": run("megatron", "auto", "plan.fuse_residual=true", "plan.loss=chunked"),
    }


def faulty() -> dict[str, dict[str, Any]]:
    """Engines whose product, or weight gradient, is one part in a hundred too large; and a module of Megatron's that
    is."""
    from layerplan.integration.planner import program

    real = program.compiled_launch

    def scaling(op: str) -> Any:
        def compiled(planned: Any, arch: Any) -> Any:
            launch = real(planned, arch)
            wrong = op in planned.ops and planned.engine != "reference/eager"
            return (lambda *tensors: launch(*tensors).mul_(1.01)) if wrong else launch

        return compiled

    found = {}
    for op in ("linear", "linear_wgrad"):
        program.compiled_launch = scaling(op)
        found[op] = run("auto,decoder.layers.0.*=reference", "reference")
    program.compiled_launch = real
    from megatron.core.transformer.mlp import MLP

    forward = MLP.forward

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        output, bias = forward(self, *args, **kwargs)
        return output * 1.01, bias

    MLP.forward = wrong
    found["megatron"] = run("reference", "megatron")
    return found


def refused() -> dict[str, dict[str, Any]]:
    return {
        "recipe": run("auto", "megatron", "plan.policy=strict", "parallel.tensor=2", "model.attention_dropout=0.1"),
        "experts": run("auto", "megatron", "model.num_experts=4", "parallel.expert=2"),
        "drawn": run("megatron", "auto", "model.hidden_dropout=0.1", "plan.fuse_residual=true"),
        "field": run("auto", "reference", "model.num_layres=2"),
        "both": run("megatron", "megatron"),
        "text": run("auto", "fastest"),
        "pattern": run("auto", "*.mpl=reference"),
        "file": run("none.json", "auto"),
        "strict": run("strict", "auto", "model.attention_dropout=0.1"),
        "data": run("auto", "reference", "data.prefix=none/such"),
    }


def with_data(prefix: str) -> dict[str, Any]:
    return run("auto", "reference", f"data.prefix={prefix}", "model.vocab_size=264")
