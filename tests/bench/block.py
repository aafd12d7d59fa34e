"""A block of two layers, bf16: our layers beside Transformer Engine's, in one run.

    python tests/bench/block.py [--model llama8b|moe64|qwen30] [--impl layerplan,layerplan+residual,te]
                                [--trial ENGINE ...] [--pins FILE] [--out FILE] [--profile]
    torchrun --nproc-per-node 2 tests/bench/block.py --model moe64 [--dispatcher allgather] ...
    python tests/bench/block.py --device cpu --tiny --impl layerplan,local      # the script itself, without a GPU

All are Megatron's TransformerBlock, and but for ours Megatron's own MoE layer is in it; Transformer Engine runs as fast as
Megatron has it: rope, router and permutation fused, grouped products by CUTLASS; ``local`` is Megatron in plain PyTorch,
one expert after the other. Steps take turns, so that clocks and temperature are shared. A step is forward and
backward with gradients dropped afterwards. ``idle_share``: the part of a step in which no kernel runs. ``--profile``
adds kernel times by name. Peak memory is that of the implementation's own steps, its parameters and the input included.

Under torchrun the experts are spread over the ranks, each with a batch of its own and the other weights whole (their
gradients are not summed). A step then starts at all ranks at once and takes as long as the slowest's; memory, distances
and kernels are the worst rank's, or where they are no numbers rank 0's.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import statistics
from pathlib import Path
from types import SimpleNamespace

import torch
from host_cost import environment

LAYERS = 2
_EXPERTS = dict(hidden_size=2048, kv_channels=128, moe_grouped_gemm=True, moe_token_dispatcher_type="alltoall",
                moe_router_load_balancing_type="none")  # fmt: skip
MODELS = {  # dims, sequence, batch
    "llama8b": (dict(hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32, num_query_groups=8,
                     kv_channels=128), 8192, 1),
    "moe64": (dict(_EXPERTS, ffn_hidden_size=10944, num_attention_heads=16, num_query_groups=16, num_moe_experts=64,
                   moe_router_topk=6, moe_ffn_hidden_size=1408, moe_shared_expert_intermediate_size=2816), 4096, 4),
    "qwen30": (dict(_EXPERTS, ffn_hidden_size=6144, num_attention_heads=32, num_query_groups=4, num_moe_experts=128,
                    moe_router_topk=8, moe_ffn_hidden_size=768, qk_layernorm=True), 4096, 4),
}  # fmt: skip


TINY = dict(hidden_size=64, ffn_hidden_size=96, num_attention_heads=4, num_query_groups=2, kv_channels=16, num_moe_experts=8,
            moe_router_topk=2, moe_ffn_hidden_size=32, moe_shared_expert_intermediate_size=32)  # fmt: skip


def dims_of(a: argparse.Namespace) -> tuple[dict, int, int]:
    """(dims, sequence, batch) of the model that the arguments name."""
    dims, sequence, batch = MODELS[a.model]
    if a.tiny:
        dims, sequence, batch = dims | {k: v for k, v in TINY.items() if k in dims}, 24, 2
    return dims | ({"moe_token_dispatcher_type": a.dispatcher} if a.dispatcher else {}), sequence, batch


def world() -> int:
    """Ranks, all of which share out the experts."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def config(dims: dict, **over):
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=LAYERS, bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16,
        normalization="RMSNorm", add_bias_linear=False, gated_linear_unit=True, expert_model_parallel_size=world(),
        activation_func=torch.nn.functional.silu, hidden_dropout=0.0, attention_dropout=0.0,
        gradient_accumulation_fusion=False, perform_initialization=True, **(dims | over),
    )  # fmt: skip


def te_block(dims: dict):
    # beside flash-attn-4 4.0.0b36 it takes that for attention and computes something else, in a tenth of the time
    os.environ |= {"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "1", "NVTE_UNFUSED_ATTN": "0",
                   "NVTE_USE_CUTLASS_GROUPED_GEMM": "1"}  # fmt: skip
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.transformer.transformer_block import TransformerBlock

    moe = "num_moe_experts" in dims
    c = config(dims, apply_rope_fusion=True, bias_dropout_fusion=True, bias_activation_fusion=True,
               masked_softmax_fusion=True, **(dict(moe_permute_fusion=True, moe_router_fusion=True) if moe else {}))  # fmt: skip
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=c.num_moe_experts, moe_grouped_gemm=c.moe_grouped_gemm, qk_layernorm=c.qk_layernorm
    )
    return TransformerBlock(c, spec, pre_process=True, post_process=False)


def local_block(dims: dict):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlock

    alone = {"moe_grouped_gemm": False} if "num_moe_experts" in dims else {}
    c = config(dims, transformer_impl="local", **alone)
    spec = get_gpt_layer_local_spec(num_experts=c.num_moe_experts, qk_layernorm=c.qk_layernorm, normalization="RMSNorm")
    return TransformerBlock(c, spec, pre_process=True, post_process=False)


def layerplan_block(dims: dict, pins: str | None, residual: bool):
    from megatron.core.transformer.transformer_block import TransformerBlock

    from layerplan.integration.megatron.specs import gpt_block_spec
    from layerplan.modules.base import apply_policy

    c = config(dims, transformer_impl="local", bias_dropout_fusion=True, bias_activation_fusion=False)
    spec = gpt_block_spec(c, **({"fuse_residual": True} if residual else {}))
    block = TransformerBlock(c, spec, pre_process=True, post_process=False)
    if pins:
        apply_policy(block, "auto", pins=pins)
    return block


def make(dims: dict, block, x, grad):
    """A step of one implementation, and its forward alone."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    rope = RotaryEmbedding(dims["kv_channels"], rotary_percent=1.0)(len(x))
    parameters = list(block.parameters())

    def forward():
        return block(hidden_states=x, attention_mask=None, rotary_pos_emb=rope)

    def step():
        forward().backward(grad)
        for p in parameters:
            p.grad = None
        x.grad = None

    return SimpleNamespace(block=block, forward=forward, step=step, step_ms=[], forward_ms=[])


def named(block, of=lambda p: p.detach()) -> dict[str, torch.Tensor]:
    """Parameters, or what ``of`` takes of each, under Transformer Engine's names: a matrix for each expert, norms by the
    product that reads them."""
    result, local = {}, type(block.layers[0].input_layernorm).__name__ != "IdentityOp"
    for name, p in block.named_parameters():
        path, _, last = name.rpartition(".")
        path = re.sub(r"input_layernorm$", "self_attention.linear_qkv", path) if local else path
        if local and hasattr(block.layers[0].mlp, "linear_fc1"):
            path = re.sub(r"pre_mlp_layernorm$", "mlp.linear_fc1", path)
        if one := re.fullmatch(r"(.*)\.local_experts\.(\d+)\.(linear_fc[12])", path):
            path, last = f"{one[1]}.{one[3]}", f"{last}{one[2]}"
        elif f"{path}.{last}" != name:
            last = "layer_norm_weight"
        name = f"{path}.{last}"
        if path.endswith("experts") and last in ("fc1", "fc2"):
            result |= {f"{path}.linear_{last}.weight{i}": matrix for i, matrix in enumerate(of(p))}
        else:
            result[name] = of(p)
    return result


def same_weights(made: dict[str, SimpleNamespace]) -> None:
    """The first implementation's parameters for all."""
    first, *others = (named(m.block) for m in made.values())
    for other in others:
        if {n: p.shape for n, p in other.items()} != {n: p.shape for n, p in first.items()}:
            raise RuntimeError(f"the blocks' parameters differ: {sorted(set(first) ^ set(other))}")
        for name, p in other.items():
            p.copy_(first[name])


def apart(made: dict[str, SimpleNamespace], x, grad) -> dict[str, dict[str, float]]:
    """How far each one's output, input gradient and weight gradients are from the first one's, as a share of their L2
    norm: an implementation that computes something else is not one to be measured against."""
    results = {}
    for name, m in made.items():
        y = m.forward()
        y.backward(grad)
        grads = [g.reshape(-1) for _, g in sorted(named(m.block, lambda p: p.grad).items())]
        results[name] = {"y": y.detach(), "dx": x.grad, "dw": torch.cat(grads)}
        x.grad = None
        for p in m.block.parameters():
            p.grad = None
    first = next(iter(results.values()))

    def share(a: torch.Tensor, b: torch.Tensor) -> float:
        return round(float((a.float() - b.float()).norm() / b.float().norm()), 5)

    return {n: {k: share(r[k], t) for k, t in first.items()} for n, r in results.items()}


def milliseconds(f) -> float:
    a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if world() > 1:
        torch.distributed.barrier()
    a.record()
    f()
    b.record()
    torch.cuda.synchronize()
    return a.elapsed_time(b)


def kernels(step, n: int = 4) -> tuple[dict[str, float], list[dict]]:
    """(figures of a step for its row, time per kernel name and step, the longest first) from the profiler."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for _ in range(n):
            step()
        torch.cuda.synchronize()
    events = [e for e in p.events() if e.device_type == DeviceType.CUDA]
    spans = sorted((e.time_range.start, e.time_range.end) for e in events)
    busy, end = 0.0, 0.0
    for a, b in spans:
        busy += max(0.0, b - max(a, end))
        end = max(end, b)
    rows: dict[str, list[float]] = {}
    for e in events:
        rows.setdefault(e.name, []).append(e.time_range.elapsed_us())
    table = [{"kernel": k[:120], "calls": len(v) / n, "ms": round(sum(v) / n / 1e3, 4)} for k, v in rows.items()]
    wall = spans[-1][1] - spans[0][0]
    row = {"busy_ms": round(busy / n / 1e3, 3), "idle_share": round(1 - busy / wall, 4),
           "kernels_a_step": sum(r["calls"] for r in table)}  # fmt: skip
    return row, sorted(table, key=lambda r: -r["ms"])


def show(row: dict) -> None:
    """Print a row as JSON, its kernels as a table."""
    print(json.dumps({k: v for k, v in row.items() if k != "kernels"}), flush=True)
    for k in row.get("kernels", ()):
        print(f"  {k['ms']:8.3f} ms {k['calls']:6.1f}  {k['kernel']}")


def lift(engines: list[str]) -> None:
    """Let ranking choose engines that are on trial, in this process."""
    from layerplan.integration.engines.manifest import BY_ID

    for e in engines:
        object.__setattr__(BY_ID[e], "trial", False)


def start_ranks(device: str) -> int:
    """Megatron's parallel state, for this process alone or for those that torchrun started; this one's rank."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    rank = int(os.environ.get("RANK", "0"))
    torch.cuda.set_device(rank)
    if device == "cuda":
        given = {"backend": "nccl", "device_id": torch.device(f"cuda:{rank}")}
    else:
        given = {"backend": "gloo"}
    if world() == 1:
        given |= {"store": torch.distributed.HashStore(), "rank": 0, "world_size": 1}
    torch.distributed.init_process_group(timeout=datetime.timedelta(seconds=300), **given)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(1, 1, expert_model_parallel_size=world())
    model_parallel_cuda_manual_seed(7)
    torch.manual_seed(rank)
    return rank


def worst(mine):
    """Number by number the largest of all ranks' (of lists and dicts of numbers too)."""
    if world() == 1:
        return mine
    if isinstance(mine, dict):
        return {k: worst(v) for k, v in mine.items()}
    found = torch.tensor(mine, dtype=torch.float64, device="cuda")
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
    return found.tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama8b")
    parser.add_argument("--impl", default="layerplan,te")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of a few thousand parameters")
    parser.add_argument("--pins", help="a plan file that our block is pinned to")
    parser.add_argument("--dispatcher", help="Megatron's moe_token_dispatcher_type; alltoall where it is not given")
    parser.add_argument("--trial", nargs="*", default=[], help="engines on trial that ranking may choose here")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--commit", help="of the code, for the record")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    lift(a.trial)
    if a.device == "cpu":
        from layerplan.integration.megatron.cpu_mode import cpu_mode

        with cpu_mode():
            run(a)
    else:
        run(a)


def run(a: argparse.Namespace) -> None:
    rank = start_ranks(a.device)
    dims, sequence, batch = dims_of(a)
    x = torch.randn(sequence, batch, dims["hidden_size"], device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(x)
    made, rows = {}, {}
    for name in a.impl.split(","):
        before = torch.cuda.memory_allocated()
        given = () if name in ("te", "local") else (a.pins, "residual" in name)
        block = {"te": te_block, "local": local_block}.get(name, layerplan_block)(dims, *given)
        made[name] = make(dims, block.cuda(), x, grad)
        for _ in range(3):
            made[name].step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        made[name].step()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before + x.nbytes + grad.nbytes
        rows[name] = {"impl": name} | ({"peak_gib": round(worst(peak) / 2**30, 3)} if a.device == "cuda" else {})
    same_weights(made)
    for name, far in apart(made, x, grad).items():
        rows[name]["apart"] = worst(far)
    if a.device == "cuda":
        time_steps(a, made, rows)
    if rank:
        return
    for r in rows.values():
        show(r)
    ours = next((n for n in made if n not in ("te", "local")), None)
    if ours is not None:
        import layerplan

        print(layerplan.report(made[ours].block))
    if a.out:
        record = {"what": f"two-layer block, {a.model}, bf16, {sequence} x {batch}", "dims": dims, "pins": a.pins,
                  "trial": a.trial, "ranks": world()}  # fmt: skip
        record |= environment(a.commit)
        a.out.write_text(json.dumps({**record, "rows": list(rows.values())}, indent=1) + "\n")


def time_steps(a: argparse.Namespace, made: dict[str, SimpleNamespace], rows: dict[str, dict]) -> None:
    """Into each implementation's row: times of its steps, which take turns, and what the profiler says of them."""
    turns = [list(made.values())[i % len(made) :] + list(made.values())[: i % len(made)] for i in range(a.rounds)]
    for turn in turns:  # another one first each time: what ran before sets clocks and temperature
        for m in turn:
            m.step_ms.append(milliseconds(m.step))
    with torch.no_grad():
        for turn in turns:
            for m in turn:
                m.forward_ms.append(milliseconds(m.forward))
    for name, m in made.items():
        m.step_ms, m.forward_ms = worst(m.step_ms), worst(m.forward_ms)
        low, middle, high = statistics.quantiles(m.step_ms, n=4)
        rows[name] |= {"step_ms": round(middle, 3), "step_quartiles": [round(low, 3), round(high, 3)],
                       "forward_ms": round(statistics.median(m.forward_ms), 3)}  # fmt: skip
        figures, table = kernels(m.step)
        rows[name] |= worst(figures)
        if a.profile:
            rows[name]["kernels"] = table[:40]
    for r in rows.values() if "te" in rows else ():
        r["ratio_to_te"] = round(r["step_ms"] / rows["te"]["step_ms"], 4)


if __name__ == "__main__":
    main()
