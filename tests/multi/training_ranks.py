"""What the training tests run inside ranks: a tiny recipe on a synthetic text, and scenarios that return plain values."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import random
import shutil
import signal
import tempfile
from pathlib import Path

WORDS = ("graph", "plan", "node", "engine", "norm", "weight", "scale", "token", "layer", "rank", "step", "loss")


def write_text(path: Path) -> Path:
    """A text with structure to learn, the same on every machine."""
    generator = random.Random(7)
    lines = []
    for i in range(900):
        a, b = generator.choice(WORDS), generator.choice(WORDS)
        lines.append(f"{i % 10}: the {a} of a {b} is a {a}-{b}.")
    path.write_text("\n".join(lines))
    return path


def prepare_data(folder: Path) -> str:
    from layerplan.integration.training.data_prepare import prepare

    prepare([write_text(folder / "text.txt")], folder / "text", tokenizer="byte")
    return str(folder / "text")


def prepare_documents(folder: Path) -> str:
    """The same text as ten documents, since a split takes whole ones."""
    from layerplan.integration.training.data_prepare import prepare

    lines = write_text(folder / "text.txt").read_text().splitlines()
    (folder / "documents.jsonl").write_text("".join(json.dumps({"text": "\n".join(lines[i : i + 90])}) + "\n" for i in range(0, 900, 90)))
    prepare([folder / "documents.jsonl"], folder / "documents", tokenizer="byte")
    return str(folder / "documents")


def overrides(prefix: str, directory: str | None, *more: str) -> list[str]:
    return [
        f"data.prefix={prefix}", "model.num_layers=2", "model.hidden_size=32", "model.ffn_hidden_size=64", "model.vocab_size=264", "model.seq_length=32",
        "train.steps=5", "train.global_batch=4", "train.micro_batch=1", "train.threads=1", "schedule.warmup_steps=2", "schedule.decay_steps=20",
        "optimizer.lr=0.01", "optimizer.min_lr=0.001", f"checkpoint.dir={directory or 'none'}", "logging.progress=false", "logging.plot=false", *more,
    ]  # fmt: skip


def recipe_of(prefix, directory, *more):
    from layerplan.recipes import load_recipe

    return load_recipe("gpt_tiny", overrides(prefix, directory, *more))


def quiet() -> None:
    from layerplan.integration.training import quiet as known

    known.quiet()
    logging.getLogger("megatron").setLevel(logging.ERROR)


def run(recipe, *, change=None):
    """Train; returns losses by step, validation losses by step, the digest of all parameters and moments, and what was said.
    ``change(trainer)`` may replace parts before it trains."""
    from layerplan.integration.training.build import ranks_of
    from layerplan.integration.training.trainer import Trainer

    said, rows, validation = [], {}, {}
    with ranks_of(recipe) as ranks:
        trainer = Trainer(recipe, ranks, say=said.append)
        step, evaluate = trainer.run_step, trainer.evaluate

        def recorded():
            loss, norm = step()
            rows[trainer.step] = [loss, norm]
            return loss, norm

        def evaluated():
            validation[trainer.step] = loss = evaluate()
            return loss

        trainer.run_step, trainer.evaluate = recorded, evaluated
        if change is not None:
            change(trainer)
        outcome = trainer.train()
        return {"rows": rows, "validation": validation, "state": digest_of(trainer), "said": said, "step": outcome.step, "interrupted": outcome.interrupted}


def digest_of(trainer) -> str:
    import torch

    sha = hashlib.sha256()

    def add(value):
        if isinstance(value, torch.Tensor):
            sha.update(value.detach().contiguous().view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in value:
                add(value[key])
        elif isinstance(value, (list, tuple)):
            for one in value:
                add(one)
        else:
            sha.update(repr(value).encode())

    add([p for p in trainer.built.gpt.parameters()])
    optimizers = getattr(trainer.built.optimizer, "chained_optimizers", [trainer.built.optimizer])
    for optimizer in optimizers:
        inner = optimizer.optimizer
        for group in inner.param_groups:
            add(group.get("step"))
            for p in group["params"]:
                add([p, dict(sorted(inner.state[p].items()))])
    return sha.hexdigest()


DROPOUT = ("model.hidden_dropout=0.1", "model.attention_dropout=0.1")
RESUME_CASES = {
    "fp32": (),
    "bf16": ("precision.dtype=bf16",),
    "plain_optimizer": ("parallel.distributed_optimizer=false", "checkpoint.background=false"),
    "overlap": ("parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true", "precision.dtype=bf16"),
    "megatron_local": ("plan.layers=megatron_local",),
    "recompute": ("plan.recompute=full",),
    "unfused": ("plan.gradient_accumulation_fusion=false",),
}


def one_rank(folder: str) -> dict:
    """Scenarios of one process that train, stop, resume and refuse: importing Megatron costs more than any of them."""
    quiet()
    work = Path(folder)
    prefix = prepare_data(work)
    result = {"prefix": prefix}
    for name, extra in RESUME_CASES.items():
        whole = run(recipe_of(prefix, str(work / f"{name}-whole"), *DROPOUT, *extra))
        first = run(recipe_of(prefix, str(work / f"{name}-parts"), *DROPOUT, *extra, "train.steps=3"))
        second = run(recipe_of(prefix, str(work / f"{name}-parts"), *DROPOUT, *extra))
        result[f"resume/{name}"] = {"whole": whole, "first": first, "second": second}
    result["finished"] = {str(n): run(recipe_of(prefix, str(work / f"{name}-parts"), *DROPOUT, *extra, f"train.steps={n}")) for n in (4, 5)}
    result |= damage(work, prefix) | not_finite(work, prefix) | stopping(work, prefix) | counts()
    result["golden"] = {layers: run(recipe_of(prefix, None, f"plan.layers={layers}", "train.steps=8"))["rows"]
                        for layers in ("layerplan", "megatron_local")}  # fmt: skip
    result["refused"] = refusals(work, prefix)
    run(recipe_of(prefix, str(work / "start"), "train.steps=2"))
    result["complete"] = completions(work / "start")
    return result


def one_rank_options(folder: str) -> dict:
    """Scenarios of one process again: pinned plans, fused weight gradients, evaluations, schedules, clipping."""
    import training_plans

    quiet()
    work = Path(folder)
    prefix = prepare_data(work)
    result = {"pins": training_plans.pinned_runs(work, prefix) | training_plans.damaged_plans(work, prefix)}
    result["plan_files"] = training_plans.plan_files(work, prefix)
    result["fusion"] = training_plans.fused_weight_gradients(prefix)
    result["evaluation"] = training_plans.evaluations(work)
    result["rope_base"] = training_plans.rope_bases()
    result["schedule"] = schedules(work, prefix)
    result["clipping"] = clippings(work, prefix)
    result["left_over"] = left_over(prefix)
    return result


def left_over(prefix: str) -> list:
    """Which models and wrappers are alive after their runs, with fp32 and bf16 parameters."""
    import gc
    import weakref

    held = []
    for dtype in ("fp32", "bf16"):
        run(recipe_of(prefix, None, "train.steps=1", f"precision.dtype={dtype}"),
            change=lambda trainer: held.extend(map(weakref.ref, (trainer.built.model, trainer.built.gpt))))  # fmt: skip
    gc.collect()  # the optimiser, and with it the graphs that held the hooks
    gc.collect()  # what the hooks held
    return [type(ref()).__name__ for ref in held if ref() is not None]


def schedules(work: Path, prefix: str) -> dict:
    """The learning rate of each step as logged, and the optimiser's after the last one."""
    rates = []
    steps = ("schedule.warmup_steps=2", "schedule.decay_steps=6", "optimizer.lr=0.01", "optimizer.min_lr=0.001", f"logging.dir={work / 'schedule'}")

    def change(trainer):
        train = trainer.train

        def trained():
            outcome = train()
            rates.extend({group["lr"] for group in trainer.built.optimizer.param_groups})
            return outcome

        trainer.train = trained

    run(recipe_of(prefix, None, *steps, "train.steps=8"), change=change)
    return {"logged": [json.loads(line)["lr"] for line in (work / "schedule" / "metrics.jsonl").read_text().splitlines()], "after": rates}


def clippings(work: Path, prefix: str) -> dict:
    """One step with and without clipping: the length of the update, and the gradient norm as returned and as logged."""

    def one(name, clip, *extra):
        before, trainers = [], []

        def change(trainer):
            trainers.append(trainer)
            before.extend(p.detach().clone() for p in trainer.built.gpt.parameters())

        folder = work / f"clipping-{name}"
        options = ("optimizer.lr=0.01", "optimizer.eps=1", "optimizer.weight_decay=0", "schedule.warmup_steps=0", f"optimizer.clip_grad={clip}")
        found = run(recipe_of(prefix, None, *options, f"logging.dir={folder}", "train.steps=1", *extra), change=change)
        after = [p.detach().double() for p in trainers[0].built.gpt.parameters()]
        moved = sum(float((p - b.double()).square().sum()) for p, b in zip(after, before, strict=True)) ** 0.5
        logged = json.loads((folder / "metrics.jsonl").read_text())["grad_norm"]
        return {"moved": moved, "length": sum(float(p.square().sum()) for p in after) ** 0.5, "norm": found["rows"][1][1], "logged": logged}

    return {"tiny": one("tiny", 0.01), "huge": one("huge", 1e6), "plain": one("plain", 0.01, "parallel.distributed_optimizer=false")}


def completions(checkpoint: Path) -> dict:
    from layerplan.integration.training.complete import complete

    def text(**options):
        return complete(checkpoint, "the graph", max_new_tokens=40, **options)

    return {"greedy": [text(temperature=0), text(temperature=0)], "seeded": [text(seed=3), text(seed=3)], "other_seed": text(seed=4),
            "empty": refused(lambda: complete(checkpoint, "", max_new_tokens=0, temperature=-1)),
            "no_folder": refused(lambda: complete(checkpoint / "none", "x")),
            "nothing": refused(lambda: complete(Path(tempfile.mkdtemp(dir=checkpoint.parent)), "x"))}  # fmt: skip


def refused(action) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def damage(work: Path, prefix: str) -> dict:
    """Checkpoints of steps 2, 4 and 5 (keep=2 leaves 4 and 5), damaged in turn."""
    source = work / "damage"
    run(recipe_of(prefix, str(source), "checkpoint.every_steps=2"))
    result = {"kept": sorted(p.name for p in source.glob("step_*"))}
    steps = {"newest": source / "step_0000005", "older": source / "step_0000004"}

    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    def truncate(path: Path) -> None:
        path.write_bytes(path.read_bytes()[:-1])

    damages = {
        "flipped_bit": lambda f: flip(f / "__0_0.distcp"), "truncated": lambda f: truncate(f / "__0_0.distcp"),
        "half_written": lambda f: (f / "COMPLETE.json").unlink(), "missing": lambda f: (f / "rng_00000.pt").unlink(),
        "foreign_file": lambda f: (f / "common.pt").write_bytes(b"x"), "marker": lambda f: truncate(f / "COMPLETE.json"),
        "evil_index": lambda f: evil_index(f, work / "executed"),
    }  # fmt: skip
    for name, act in damages.items():
        copy = work / f"damage-{name}"
        shutil.copytree(source, copy)
        act(copy / steps["newest"].name)
        result[f"damage/{name}"] = run(recipe_of(prefix, str(copy), "train.steps=6"))["said"]
    result["executed"] = (work / "executed").exists()

    both = work / "damage-both"
    shutil.copytree(source, both)
    for folder in steps.values():
        flip(both / folder.name / "__0_0.distcp")
    result["damage/all"] = refused(lambda: run(recipe_of(prefix, str(both))))
    unmarked = work / "damage-unmarked"
    shutil.copytree(source, unmarked)
    for folder in steps.values():
        (unmarked / folder.name / "COMPLETE.json").unlink()
    result["damage/unmarked"] = run(recipe_of(prefix, str(unmarked), "train.steps=3"))["said"]
    result["evil_object"] = evil_object(work, prefix)
    return result


class Evil:
    """Pickled, it runs code when it is read."""

    def __init__(self, path: Path):
        self.path = str(path)

    def __reduce__(self):
        return (exec, (f"open({self.path!r}, 'w').close()",))


def seal(folder: Path) -> None:
    """Rewrite COMPLETE.json as whoever tampered with the folder could."""
    from layerplan.integration.training.checkpoint import digest

    marker = json.loads((folder / "COMPLETE.json").read_text())
    marker["files"] = {p.name: [p.stat().st_size, digest(p)] for p in folder.iterdir() if p.name != "COMPLETE.json"}
    (folder / "COMPLETE.json").write_text(json.dumps(marker))


def evil_index(folder: Path, executed: Path) -> None:
    import pickle

    (folder / ".metadata").write_bytes(pickle.dumps(Evil(executed)))
    seal(folder)


def evil_object(work: Path, prefix: str) -> dict:
    """Megatron's own reader of objects, fed a pickle, with our reading of it in force."""
    import io
    import pickle

    from megatron.core.dist_checkpointing.strategies.torch import MCoreLoadPlanner

    from layerplan.integration.training.checkpoint import _weights_only

    class Item:
        class dest_index:
            fqn = "x"

    planner = MCoreLoadPlanner(flatten_state_dict=False)
    planner.state_dict, planner.flatten_state_dict = {}, False
    marker = work / "object-executed"
    with _weights_only():
        message = refused(lambda: planner.load_bytes(Item, io.BytesIO(pickle.dumps(Evil(marker)))))
    return {"message": message, "executed": marker.exists()}


def not_finite(work: Path, prefix: str) -> dict:
    def nan_at(step):
        def change(trainer):
            loss_of = trainer.loss_of
            trainer.loss_of = lambda out, batch: loss_of(out * float("nan") if trainer.step + 1 == step else out, batch)

        return change

    def bad_gradient(trainer):
        def hook(grad):
            return grad * float("inf") if trainer.step == 2 else grad

        trainer.built.gpt.decoder.layers[0].self_attention.linear_proj.weight.register_hook(hook)

    directory = work / "nan"
    message = refused(lambda: run(recipe_of(prefix, str(directory), "checkpoint.every_steps=2"), change=nan_at(4)))
    gradient = refused(lambda: run(recipe_of(prefix, str(work / "inf"), "parallel.distributed_optimizer=false", "plan.gradient_accumulation_fusion=false"),
                                      change=bad_gradient))  # a fused weight's hook would see the dummy gradient
    left = sorted(p.name for p in directory.glob("step_*"))
    resumed = run(recipe_of(prefix, str(directory)))
    return {"nan": message, "nan_left": left, "inf": gradient, "inf_left": sorted(p.name for p in (work / "inf").glob("step_*")), "nan_resumed": resumed["said"], "nan_rows": sorted(resumed["rows"])}  # fmt: skip


def stopping(work: Path, prefix: str) -> dict:
    """SIGTERM during step 2: that step is finished and saved."""

    def kill(trainer):
        loss_of = trainer.loss_of

        def sends(out, batch):
            if trainer.step == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return loss_of(out, batch)

        trainer.loss_of = sends

    before = signal.getsignal(signal.SIGTERM)
    stopped = run(recipe_of(prefix, str(work / "term")), change=kill)
    rest = run(recipe_of(prefix, str(work / "term")))
    whole = run(recipe_of(prefix, str(work / "term-whole")))
    early = run(recipe_of(prefix, str(work / "term-early")), change=lambda trainer: trainer._on_signal(signal.SIGTERM, None))
    return {"term_early": [early["step"], early["interrupted"], early["said"]], "term": stopped, "term_equal": rest["state"] == whole["state"], "term_handler_restored": signal.getsignal(signal.SIGTERM) == before}


def counts() -> dict:
    """Formula against built models, for each choice that changes the count."""
    from layerplan.integration.training.build import build_model, ranks_of, transformer_config
    from layerplan.recipes import load_recipe
    from layerplan.recipes.size import parameter_count

    cases = [(), ("model.normalization=LayerNorm", "model.activation=gelu", "model.linear_bias=true"), ("model.qkv_bias=true",),
             ("model.tie_embeddings=true", "model.qk_norm=true"), ("model.activation=squared_relu", "model.head_dim=48"),
             ("model.activation=geglu", "model.num_query_groups=4")]  # fmt: skip
    found = {}
    for extra in cases:
        recipe = load_recipe("gpt_tiny", ["model.vocab_size=512", *extra])
        with ranks_of(recipe):
            model = build_model(recipe, transformer_config(recipe))
            found[" ".join(extra) or "default"] = [parameter_count(recipe), sum(p.numel() for p in model.parameters())]
    return {"counts": found}


def refusals(work: Path, prefix: str) -> dict:
    saved = str(work / "term-whole")
    return {
        "other_model": refused(lambda: run(recipe_of(prefix, saved, "model.ffn_hidden_size=96", "model.norm_eps=1e-6"))),
        "other_batch": refused(lambda: run(recipe_of(prefix, saved, "train.global_batch=8"))),
        "resume_none": refused(lambda: run(recipe_of(prefix, saved, "checkpoint.resume=none"))),
        "no_data": refused(lambda: run(recipe_of("none", None))),
        "arch": refused(lambda: run(recipe_of(prefix, None, "plan.arch=sm_90"))),
        "world": refused(lambda: run(recipe_of(prefix, None, "parallel.tensor=2"))),
        "gpu": refused(lambda: run(recipe_of(prefix, None, "train.device=cuda"))),
    }


EVALUATED = ("data.split=80,20,0", "train.eval_every_steps=2", "train.eval_batches=2")
BITWISE = ("dp2_overlap", "tp2_sp", "pp2")
LAYOUTS = {
    "dp2": (),
    "dp2_overlap": ("parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true"),
    "tp2": ("parallel.tensor=2",),
    "tp2_sp": ("parallel.tensor=2", "parallel.sequence=true"),
    "pp2": ("parallel.pipeline=2",),
}


def start(folder: str) -> dict:
    """Two steps on one rank, where all layouts start (same weights, same moments), and the three that follow them."""
    quiet()
    work = Path(folder)
    prefix = prepare_documents(work)
    run(recipe_of(prefix, str(work / "start"), *EVALUATED, "train.steps=2"))
    shutil.copytree(work / "start", work / "one")
    one = run(recipe_of(prefix, str(work / "one"), *EVALUATED))
    return {"prefix": prefix, "rows": one["rows"], "validation": one["validation"]}


@contextlib.contextmanager
def other_settings(**changes):
    import dataclasses

    from layerplan.integration.planner import agreement

    kept = agreement.settings
    agreement.settings = lambda: dataclasses.replace(kept(), **changes)
    try:
        yield
    finally:
        agreement.settings = kept


def two_ranks(folder: str, prefix: str) -> dict:
    """Each layout resumes the same one-rank checkpoint (so weights are the same) and goes on; then one of them is cut and resumed."""
    import torch.distributed as dist

    quiet()
    dist.init_process_group("gloo")
    rank, work = dist.get_rank(), Path(folder)
    result = {}
    for name, extra in LAYOUTS.items():
        directory = work / f"two-{name}"
        if rank == 0:
            shutil.copytree(work / "start", directory)
        dist.barrier()
        result[name] = run(recipe_of(prefix, str(directory), *EVALUATED, *extra))
        dist.barrier()  # the last stage writes them
        result[name]["metrics"] = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        if name not in BITWISE:
            continue
        keep = "checkpoint.keep=9"  # step 5's must still be there for the straight run
        cut = run(recipe_of(prefix, str(directory), *EVALUATED, *extra, keep, "train.steps=6"))
        more = run(recipe_of(prefix, str(directory), *EVALUATED, *extra, keep, "train.steps=7"))
        if rank == 0:
            shutil.rmtree(directory / "step_0000006")
            shutil.rmtree(directory / "step_0000007")
        dist.barrier()
        straight = run(recipe_of(prefix, str(directory), *EVALUATED, *extra, keep, "train.steps=7"))
        result[name] |= {"cut": cut["step"], "straight_steps": sorted(straight["rows"]), "bitwise": straight["state"] == more["state"]}

    def without_a_file(*extra):
        from layerplan.integration.engines.arch import ARCHS
        from layerplan.integration.planner import plan_file
        from layerplan.recipes.estimate import estimate_recipe

        plan_file.save(work / f"made-{rank}.json", estimate_recipe(recipe_of(prefix, None, *extra), ARCHS["cpu"]).pins())
        return run(recipe_of(prefix, None, *extra, f"plan.file={work / f'made-{rank}.json'}", "train.steps=1"))["said"]

    result["plan_made"] = {name: without_a_file(*LAYOUTS[name]) for name in ("tp2", "tp2_sp", "pp2")}
    result["other_recipe"] = refused(lambda: run(recipe_of(prefix, None, "train.threads=2", *(("optimizer.lr=0.02", "train.steps=9") if rank else ()))))
    with other_settings(check=rank == 1):
        result["other_setting"] = refused(lambda: run(recipe_of(prefix, None)))

    def nan_on_one(trainer):
        loss_of = trainer.loss_of
        trainer.loss_of = lambda out, batch: loss_of(out * float("nan") if trainer.step == 1 and rank == 1 else out, batch)

    result["nan"] = refused(lambda: run(recipe_of(prefix, None), change=nan_on_one))
    result["too_many"] = refused(lambda: run(recipe_of(prefix, None, *EVALUATED, "train.eval_batches=1000", "parallel.tensor=2")))
    (work / f"broken-{rank}.json").write_text('{"format": 2, "pins": {}}' if rank else "[]")  # rank 0's file counts
    result["plan_file"] = refused(lambda: run(recipe_of(prefix, None, f"plan.file={work / f'broken-{rank}.json'}")))

    def signal_on_one(trainer):
        loss_of = trainer.loss_of

        def sends(out, batch):
            if rank == 1 and trainer.step == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return loss_of(out, batch)

        trainer.loss_of = sends

    stopped = run(recipe_of(prefix, str(work / "two-term")), change=signal_on_one)
    result["term"] = [stopped["step"], stopped["interrupted"]]
    with contextlib.suppress(Exception):
        dist.barrier()
    return result
