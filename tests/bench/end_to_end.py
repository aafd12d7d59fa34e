"""Training steps of eight layers of Llama-3-8B's dims: layerplan's model beside Megatron's on Transformer Engine.

    python tests/bench/end_to_end.py [--impl layerplan,te,te+te_loss] [--tp 2 --sp | --dp 2]
                                     [--set model.num_layers=4 ...] [--rounds 2] [--steps 8] [--limit SECONDS]
                                     [--profile] [--out FILE]
    python tests/bench/end_to_end.py --device cpu --tiny --impl layerplan,local     # the script itself, without a GPU

A step: four micro-batches of one sequence on each data-parallel rank through Megatron's schedule, its DDP with float32
gradients and gradient_accumulation_fusion, its distributed Adam, cross entropy over the whole vocabulary.
Implementations, each a recipe of the trainer's:

  layerplan   plus ``+chunked`` (output layer and loss in one plan), ``+residual`` (plan.fuse_residual), ``+beside_te``
  te          plan.layers=transformer_engine: rope, SwiGLU and loss fused, TE's Adam; ``+te_loss``: TE's cross entropy
              in place of Megatron's
  local       Megatron's layers in plain PyTorch

Two such models do not fit one GPU, so each runs in processes of its own, and these take turns (A B A B). What layerplan
runs on cannot see Transformer Engine, as on a machine that has only layerplan; ``+beside_te`` leaves it importable, and
Megatron then takes its Adam. All start from one seed and see the same sequences in every step, so losses fall and can
be compared. A child that passes --limit is ended. With ``--tp`` or ``--dp`` each child is one process a rank, started
with what torchrun would set.

Per implementation a JSON row: step time (median over all rounds, of the slowest rank), tokens/s, MFU, peak memory of a
step beside the dry run's estimate, losses and gradient norms from the first step on, the share of a step in which no
kernel runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from block import kernels, lift, show
from host_cost import environment

from layerplan.integration.engines.packages import installed_version
from layerplan.recipes import Recipe, load_recipe
from layerplan.recipes.config import load_pins, load_records
from layerplan.recipes.estimate import estimate_recipe
from layerplan.recipes.memory import memory_estimate
from layerplan.recipes.size import flops_per_token, parameter_count

MICRO_BATCHES, SEED, GIB = 4, 1234, 2**30
MODIFIERS = {
    "layerplan": {"chunked": ["plan.loss=chunked"], "residual": ["plan.fuse_residual=true"], "beside_te": []},
    "te": {"te_loss": []},
    "local": {},
}
PACKAGES = ("megatron-core", "transformer-engine", "quack-kernels", "flash-attn-4", "triton")
LAYERS = {"layerplan": "layerplan", "te": "transformer_engine", "local": "megatron_local"}
TINY = ["model.num_layers=2", "model.hidden_size=64", "model.ffn_hidden_size=160", "model.num_attention_heads=4",
        "model.num_query_groups=2", "model.vocab_size=512", "model.seq_length=64"]  # fmt: skip


def split(impl: str) -> tuple[str, list[str]]:
    """The layers' name and the modifiers behind it. Raises ValueError for one that does not exist."""
    name, *modifiers = impl.split("+")
    if name not in MODIFIERS or set(modifiers) - set(MODIFIERS[name]):
        known = ", ".join("".join([n, *(f"[+{m}]" for m in ms)]) for n, ms in MODIFIERS.items())
        raise ValueError(f"--impl = {impl!r}: must be one of {known}")
    return name, modifiers


def recipe_of(a: argparse.Namespace, impl: str) -> Recipe:
    name, modifiers = split(impl)
    overrides = [
        "model.num_layers=8", *(TINY if a.tiny else ()), f"plan.layers={LAYERS[name]}", f"train.device={a.device}",
        f"train.seed={SEED}", "train.micro_batch=1", f"train.global_batch={MICRO_BATCHES * a.dp}", "train.steps=1000",
        f"parallel.tensor={a.tp}", f"parallel.sequence={str(a.sp).lower()}",
        # with one replica nothing is reduced: overlap would cost launches alone
        *(f"parallel.{field}={str(a.dp > 1).lower()}" for field in ("overlap_grad_reduce", "overlap_param_gather")),
        "optimizer.lr=1e-4", "optimizer.min_lr=1e-4", "schedule.style=constant", "schedule.warmup_steps=0",
        "schedule.decay_steps=1000",
    ]  # fmt: skip
    for modifier in modifiers:
        overrides += MODIFIERS[name][modifier]
    if name == "layerplan":
        overrides += [f"plan.file={a.pins}"] if a.pins else []
        overrides += [f"plan.records={a.records}"] if a.records else []
    return load_recipe("llama3_8b", [*overrides, *a.set])


# -- one implementation, in a process (or a rank) of its own -----------------------------------------------------------


def batches_of(recipe: Recipe, ranks: Any) -> list[dict[str, torch.Tensor]]:
    """This rank's micro-batches of a step: tokens, labels and positions [1, seq]; the ranks of a tensor-parallel group
    hold the same."""
    m, rows = recipe.model, []
    positions = torch.arange(m.seq_length).unsqueeze(0)
    for i in range(MICRO_BATCHES):
        generator = torch.Generator().manual_seed(SEED + i * ranks.data_size + ranks.data)
        text = torch.randint(m.vocab_size, (1, m.seq_length + 1), generator=generator)
        row = {"input_ids": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous(), "position_ids": positions}
        rows.append({k: v.to(ranks.device) for k, v in row.items()})
    return rows


def step_of(built: Any, recipe: Recipe, batches: list[dict[str, torch.Tensor]]):
    """A function that runs one step and returns (sum and count of this rank's token losses, gradient norm)."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def loss_of(output: torch.Tensor):
        total = output.float().sum()
        count = torch.tensor(output.numel(), dtype=torch.int, device=output.device)
        return total, count, {"sums": torch.stack([total.detach().double(), count.double()])}

    def forward(iterator, model):
        return model(attention_mask=None, **next(iterator)), loss_of

    def step():
        built.model.zero_grad_buffer()
        built.optimizer.zero_grad()
        reports = get_forward_backward_func()(
            forward_step_func=forward, data_iterator=iter(batches), model=[built.model], num_microbatches=len(batches),
            seq_length=recipe.model.seq_length, micro_batch_size=1, forward_only=False,
        )  # fmt: skip
        _, norm, _ = built.optimizer.step()
        built.scheduler.step(increment=recipe.train.global_batch)
        return torch.stack([r["sums"] for r in reports]).sum(0), norm

    return step


def measure(a: argparse.Namespace, impl: str) -> dict[str, Any]:
    """What this rank saw: set-up, warm-up, timed steps, then one step under the profiler."""
    from megatron.core import parallel_state as mpu

    import layerplan
    from layerplan.integration.training.build import arch_of, build, ranks_of
    from layerplan.integration.training.metrics import peak_flops, peak_memory

    recipe = recipe_of(a, impl)
    # before Transformer Engine loads a cuDNN of its own
    machine = environment() if os.environ.get("RANK", "0") == "0" else {}
    pins, records = load_pins(recipe), load_records(recipe)
    with ranks_of(recipe) as ranks:
        built = build(recipe, pins, records)
        if "te_loss" in split(impl)[1]:
            built.gpt.config.cross_entropy_fusion_impl = "te"
        norms = [torch.linalg.vector_norm(p.detach(), dtype=torch.float32) for p in built.gpt.parameters()]
        start_norm = float(torch.stack(norms).norm())
        built.model.train()
        step, seen, seconds = step_of(built, recipe, batches_of(recipe, ranks)), [], []
        for i in range(a.warmup + a.steps):
            if i == a.warmup:
                torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
            began = time.perf_counter()
            seen.append(step())
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        adam = type(_adam(built.optimizer))
        row = {"seconds": seconds[a.warmup :], "first_step_s": round(seconds[0], 2), "peak": peak_memory(ranks.device),
               "between_steps": torch.cuda.memory_allocated(), "reserved": torch.cuda.max_memory_reserved(),
               "start_norm": start_norm, "adam": f"{adam.__module__}.{adam.__qualname__}"}  # fmt: skip
        sums = torch.stack([s for s, _ in seen])
        torch.distributed.all_reduce(sums, group=mpu.get_data_parallel_group())
        row |= {"losses": [round(v, 5) for v in (sums[:, 0] / sums[:, 1]).tolist()],
                "grad_norms": [round(float(n), 5) for _, n in seen]}  # fmt: skip
        if ranks.device.type == "cuda":
            figures, table = kernels(step, 1)
            row |= figures | ({"kernels": table[:40]} if a.profile else {})
        everyone: list[Any] = [None] * ranks.world
        torch.distributed.all_gather_object(everyone, row, group=ranks.control)
        row["seconds"] = [max(times) for times in zip(*(r["seconds"] for r in everyone), strict=True)]
        row |= {k: max(r[k] for r in everyone) for k in ("peak", "between_steps", "reserved", "first_step_s")}
        peak = peak_flops(ranks.device, recipe.precision.tensor_dtype)
        row |= {"rank": ranks.rank, "peak_flops": None if peak is None else peak * ranks.world, "environment": machine}
        if recipe.plan.layers == "layerplan":
            arch = arch_of(ranks.device)
            planned = estimate_recipe(recipe, arch, pins=pins, records=records)
            estimate = memory_estimate(recipe, arch, ranks.world, planned)
            row |= {"estimate": estimate.terms() | {"total": estimate.total},
                    "report": str(layerplan.report(built.gpt)).partition("\nnot chosen")[0]}  # fmt: skip
        return row


def _adam(optimizer: Any) -> Any:
    """The optimiser inside Megatron's wrappers."""
    while True:
        inner = getattr(optimizer, "chained_optimizers", None)
        if inner is None and not hasattr(optimizer, "optimizer"):
            return optimizer
        optimizer = inner[0] if inner else optimizer.optimizer


def child(a: argparse.Namespace) -> None:
    """One rank of one implementation; rank 0 writes what was seen to --result."""
    signal.alarm(a.limit)  # ends this process even where its parent is gone, or a collective waits for a rank that is
    name, modifiers = split(a.child)
    if name != "te" and "beside_te" not in modifiers:
        sys.modules["transformer_engine"] = None  # what tries to import it finds nothing
    lift(a.trial)
    row = measure(a, a.child)
    if row["rank"] == 0:
        a.result.write_text(json.dumps(row))


# -- the parent: children in turns, rows, record -----------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_child(a: argparse.Namespace, impl: str) -> dict[str, Any]:
    """The row of one child, or {"error": why there is none}. Its processes are gone when this returns."""
    world = a.tp * a.dp
    with tempfile.TemporaryDirectory() as folder:
        result, port, ranks = Path(folder, "row.json"), free_port(), []
        logs = [Path(folder, f"rank{r}.log") for r in range(world)]
        command = [sys.executable, __file__, *sys.argv[1:], "--child", impl, "--result", str(result)]
        base = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **({"OMP_NUM_THREADS": "1"} if a.device == "cpu" else {}),
                **os.environ}  # fmt: skip
        rendezvous = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        try:
            for r in range(world):
                env = base | rendezvous | {"RANK": str(r), "LOCAL_RANK": str(r)} if world > 1 else base
                with logs[r].open("w") as log:
                    ranks.append(subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True))
            end = time.monotonic() + a.limit
            while time.monotonic() < end and any(p.poll() is None for p in ranks) and not any(p.poll() for p in ranks):
                time.sleep(0.2)
            if not any(p.poll() for p in ranks) and result.exists():
                return json.loads(result.read_text())
            failed = next((r for r, p in enumerate(ranks) if p.poll()), None)
            why = f"passed --limit {a.limit} s"
            if failed is not None:
                why = f"rank {failed} ended with {ranks[failed].returncode}"
            tail = logs[failed or 0].read_text(errors="replace").strip().splitlines()[-12:]
            return {"error": why, "log": tail}
        finally:
            for p in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(p.pid, signal.SIGKILL)
                p.wait()


def summary(a: argparse.Namespace, impl: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """One implementation's row over all of its children."""
    good = [r for r in runs if "error" not in r]
    row: dict[str, Any] = {"impl": impl}
    if errors := [r for r in runs if "error" in r]:
        row |= {"error": errors[0]["error"], "log": errors[0]["log"]}
    if not good:
        return row
    recipe, first = recipe_of(a, impl), good[0]
    seconds = [s for r in good for s in r["seconds"]]
    middle = statistics.median(seconds)
    low, _, high = statistics.quantiles(seconds, n=4)
    tokens = recipe.train.global_batch * recipe.model.seq_length
    row |= {"step_ms": round(middle * 1e3, 3), "step_quartiles": [round(low * 1e3, 3), round(high * 1e3, 3)],
            "round_ms": [round(statistics.median(r["seconds"]) * 1e3, 3) for r in good],
            "tokens_per_s": round(tokens / middle, 1)}  # fmt: skip
    if first["peak_flops"]:
        row["mfu"] = round(tokens / middle * flops_per_token(recipe) / first["peak_flops"], 4)
    peak = max(r["peak"] for r in good)
    if "estimate" in first:
        row |= {"estimate_gib": {k: round(v / GIB, 3) for k, v in first["estimate"].items()},
                "estimate_over_peak": round(first["estimate"]["total"] / peak, 4)}  # fmt: skip
    row["peak_gib"] = round(peak / GIB, 3)
    row |= {f"{k}_gib": round(max(r[k] for r in good) / GIB, 3) for k in ("between_steps", "reserved")}
    row["first_step_s"] = [r["first_step_s"] for r in good]
    row |= {k: first[k] for k in ("adam", "start_norm", "losses", "grad_norms", "kernels_a_step") if k in first}
    row |= {k: statistics.median(r[k] for r in good) for k in ("busy_ms", "idle_share") if k in first}
    if "kernels" in good[-1]:
        row["kernels"] = good[-1]["kernels"]
    return row


def rows_of(a: argparse.Namespace, runs: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """All rows, each with its ratio to the fastest of Transformer Engine's, and its losses' distance from that."""
    rows = [summary(a, impl, found) for impl, found in runs.items() if found]
    peers = [r for r in rows if split(r["impl"])[0] == "te" and "step_ms" in r]
    if peers:
        best = min(peers, key=lambda r: r["step_ms"])
        for r in rows:
            if "step_ms" in r:
                apart = max(abs(x - y) for x, y in zip(r["losses"], best["losses"], strict=True))
                r |= {"ratio_to_te": round(r["step_ms"] / best["step_ms"], 4),
                      "peak_ratio_to_te": round(r["peak_gib"] / best["peak_gib"], 4),
                      "losses_apart": round(apart, 5)}  # fmt: skip
    return rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--impl", default="layerplan,te,te+te_loss")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--sp", action="store_true", help="sequence parallelism over the tensor-parallel ranks")
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model for trying the script")
    parser.add_argument("--set", nargs="*", default=[], metavar="SECTION.FIELD=VALUE", help="overrides for all")
    parser.add_argument("--pins", help="a plan file that layerplan is pinned to")
    parser.add_argument("--records", help="measured times that rank layerplan's engines")
    parser.add_argument("--trial", nargs="*", default=[], help="engines on trial that ranking may choose here")
    parser.add_argument("--rounds", type=int, default=2, help="children of each implementation")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a child, at least 2")
    parser.add_argument("--limit", type=int, default=240, help="seconds that a child may take")
    parser.add_argument("--profile", action="store_true", help="kernel times by name")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    a = arguments()
    if a.child:
        child(a)
        return 0
    names = a.impl.split(",")
    try:  # a name or an override that is wrong, before anything runs
        recipe = [recipe_of(a, impl) for impl in names][0]
    except ValueError as error:
        print(f"end_to_end.py: {error}", file=sys.stderr)
        return 2
    runs: dict[str, list[dict[str, Any]]] = {impl: [] for impl in names}
    what = (f"training steps, {recipe.model.num_layers} layers of Llama-3-8B's dims ({parameter_count(recipe):,} "
            f"parameters), {recipe.precision.dtype}, {MICRO_BATCHES} micro-batches of {recipe.model.seq_length}, "
            f"tensor {a.tp}{' with sequence' if a.sp else ''}, data {a.dp}")  # fmt: skip
    record: dict[str, Any] = {"what": f"{'tiny: ' if a.tiny else ''}{what}", "set": a.set, "pins": a.pins,
                              "records": a.records, "trial": a.trial,
                              "versions": {p: installed_version(p) for p in PACKAGES}}  # fmt: skip
    for _ in range(a.rounds):
        for impl in names:
            if any("error" in r for r in runs[impl]):
                continue
            runs[impl].append(run := run_child(a, impl))
            told: dict[str, Any] = {k: run[k] for k in ("error", "log") if k in run}
            if not told:
                told["median_ms"] = round(statistics.median(run["seconds"]) * 1e3, 3)
            print(json.dumps({"impl": impl, **told}), file=sys.stderr, flush=True)
            record |= run.get("environment", {})
            if a.out:  # after each child: what is measured stays measured
                a.out.write_text(json.dumps({**record, "rows": rows_of(a, runs)}, indent=1) + "\n")
    rows = rows_of(a, runs)
    for row in rows:
        show(row)
    for impl in names:
        if report := next((r["report"] for r in runs[impl] if r.get("report")), ""):
            print(f"{impl}\n{report}")
    return int(any("error" in r for r in rows))


if __name__ == "__main__":
    sys.exit(main())
