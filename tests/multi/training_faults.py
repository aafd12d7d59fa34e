"""What the fault tests run inside ranks: checkpoints that are not layerplan's, full disks, ranks that differ."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import shutil
import signal
from pathlib import Path

from harness import free_port
from training_plans import PINNED, attention_answers
from training_ranks import prepare_data, prepare_documents, quiet, recipe_of, refused, run, seal

STEPS = ("train.steps=2", "schedule.warmup_steps=1", "schedule.decay_steps=9")
DISKS = {100_000: "true", 3_000: "false", 100: "true"}
"""Bytes that a file may have -> checkpoint.background."""
DEEP = "[" * 100_000


def _json(name, change):
    """Rewrite a JSON file of a checkpoint: ``change`` alters its content in place, or gives the new text."""

    def act(folder: Path) -> None:
        data = json.loads((folder / name).read_text())
        text = change(data)
        (folder / name).write_text(text if isinstance(text, str) else json.dumps(data))
        seal(folder)

    return act


def _bytes(name, change):
    def act(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))
        seal(folder)

    return act


def _other_states(folder: Path) -> None:
    import torch

    torch.save({"cpu": torch.zeros(3), "cuda": torch.zeros(3)}, folder / "rng_00000.pt")
    seal(folder)


FOREIGN = {
    "no recipe": (_json("trainer.json", lambda d: d.pop("recipe") and None), "trainer.json: recipe"),
    "no layout": (_json("trainer.json", lambda d: d.pop("layout") and None), "trainer.json: layout"),
    "layout of text": (_json("trainer.json", lambda d: d["layout"].update(data="2")), "trainer.json: layout.data"),
    "no step": (_json("trainer.json", lambda d: d.pop("step") and None), "trainer.json: step"),
    "step of text": (_json("trainer.json", lambda d: d.update(step="abc")), "trainer.json: step: must be of type int"),
    "other step": (_json("trainer.json", lambda d: d.update(step=77)), "trainer.json: step = 77: must be that of the folder, 2"),
    "no section": (_json("trainer.json", lambda d: d["recipe"].pop("train") and None), "trainer.json: recipe.train"),
    "section of numbers": (_json("trainer.json", lambda d: d["recipe"].update(plan=3)), "trainer.json: recipe.plan"),
    "list": (_json("trainer.json", lambda d: "[]"), "trainer.json: must hold an object"),
    "deep": (_json("trainer.json", lambda d: DEEP), "trainer.json: cannot be read"),
    "no backend": (_json("metadata.json", lambda d: "{}"), "metadata.json: sharded_backend"),
    "states of garbage": (_bytes("rng_00000.pt", lambda b: b"abc"), "rng_00000.pt: is not a file of generator states"),
    "states of floats": (_other_states, "rng_00000.pt: cpu: must be a generator's state"),
    "short shard": (_bytes("__0_0.distcp", lambda b: b[: len(b) // 2]), "__0_0.distcp: has"),
    "index of nothing": (_bytes(".metadata", lambda b: b"\x80\x04}."), ".metadata: storage_data"),
    "deep marker": (lambda f: (f / "COMPLETE.json").write_text(DEEP), "COMPLETE.json: cannot be read"),
}  # fmt: skip


@contextlib.contextmanager
def largest_file(size: int):
    """No file of this process grows beyond ``size`` bytes, as on a full disk: writes fail with an OSError."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def launched(recipe) -> dict:
    """The exit status of a run, what it printed on stderr and what it said."""
    from layerplan.integration.training.launch import run as launch

    printed, said = io.StringIO(), []
    with contextlib.redirect_stderr(printed):
        status = launch(recipe, say=said.append)
    return {"status": status, "printed": [line for line in printed.getvalue().splitlines() if "layerplan" in line], "said": said}


def one_rank_faults(folder: str) -> dict:
    quiet()
    from layerplan.integration.engines.contract import Decline
    from layerplan.integration.training.checkpoint import verify
    from layerplan.integration.training.trainer import train

    work = Path(folder)
    prefix = prepare_data(work)
    source = work / "source"
    run(recipe_of(prefix, str(source), *PINNED, *STEPS, "checkpoint.every_steps=1"))
    result = {"foreign": {}}
    for name, (act, _) in FOREIGN.items():
        shutil.rmtree(work / "copy", ignore_errors=True)
        shutil.copytree(source, work / "copy")
        act(work / "copy" / "step_0000002")
        result["foreign"][name] = refused(lambda: verify(work / "copy" / "step_0000002"))
    result["sound"] = refused(lambda: verify(source / "step_0000002"))
    shutil.copytree(source, work / "passed")
    FOREIGN["other step"][0](work / "passed" / "step_0000002")
    result["passed"] = run(recipe_of(prefix, str(work / "passed"), *PINNED, *STEPS))
    _json("plan.json", lambda d: DEEP)(work / "passed" / "step_0000002")
    result["deep_plan"] = refused(lambda: run(recipe_of(prefix, str(work / "passed"), *PINNED, *STEPS)))

    said = []
    with attention_answers(lambda offer: Decline("it was taken out")):
        recipe = recipe_of(prefix, str(source), *PINNED, *STEPS, "train.steps=3")
        result["gone"] = [refused(lambda: train(recipe, say=said.append)), said]
    result |= _full_disks(work, prefix) | {"worlds": _worlds()}
    return result


def _worlds() -> dict:
    """What a process makes of a launcher's variables."""
    from layerplan.integration.training.build import launched_world

    cases = {
        "alone": ({}, True), "one of one": ({"RANK": "0", "WORLD_SIZE": "1"}, True),
        "whole": ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, True),
        "no rank": ({"WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, True),
        "no GPU's number": ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, False),
        "no world": ({"RANK": "3"}, True), "beyond": ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, True),
        "text": ({"RANK": "one", "WORLD_SIZE": "-2"}, True),
    }  # fmt: skip
    worlds = {}
    for name, (env, cpu) in cases.items():
        try:
            worlds[name] = launched_world(env, cpu)
        except ValueError as error:
            worlds[name] = str(error)
    return worlds


def _full_disks(work: Path, prefix: str) -> dict:
    """Files that may grow to so many bytes: the shards fail, the texts, the generator states; the metrics."""
    found = {}
    for size, background in DISKS.items():
        folder = work / f"full-{size}"
        run(recipe_of(prefix, str(folder), *STEPS))
        extra = ("train.steps=6", "checkpoint.every_steps=2", f"checkpoint.background={background}")
        with largest_file(size):
            full = launched(recipe_of(prefix, str(folder), *STEPS, *extra))
        after = launched(recipe_of(prefix, str(folder), *STEPS, "train.steps=4"))
        found[str(size)] = {"full": full, "after": after, "whole": sorted(p.parent.name for p in folder.glob("step_*/COMPLETE.json"))}
    folder = work / "full-metrics"
    with largest_file(700):
        metrics = launched(recipe_of(prefix, None, f"logging.dir={folder}"))
    rows = (folder / "metrics.jsonl").read_text().splitlines()
    return {"full": found, "full_metrics": metrics, "full_rows": len(rows)}


def two_ranks_faults(folder: str) -> dict:
    """The ranks join as any launcher would have them: by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT alone."""
    import torch.distributed as dist

    quiet()
    rank, work = int(os.environ["RANK"]), Path(folder)
    own = work / f"data-{rank}"
    own.mkdir()
    same, other = prepare_documents(own), prepare_data(own)
    result = {}
    dist.init_process_group("gloo")
    directory = str(work / "run")

    def differing(*mine):
        return refused(lambda: run(recipe_of(same, directory, *mine[rank])))

    result["every"] = differing(("checkpoint.every_steps=2",), ())
    result["end"] = differing((), ("checkpoint.save_at_end=false",))
    result["dir"] = refused(lambda: run(recipe_of(same, directory if rank == 0 else None)))
    result["data"] = refused(lambda: run(recipe_of(other if rank else same, directory)))
    gone = own / "gone"
    for suffix in ("bin", "idx", "tokenizer.json") if rank == 0 else ():
        shutil.copy(f"{same}.{suffix}", f"{gone}.{suffix}")
    result["absent"] = refused(lambda: run(recipe_of(str(gone), directory)))
    result["alike"] = run(recipe_of(same, directory, *STEPS))["step"]  # paths differ, contents do not
    result["full"] = _full_on_one(same, directory, rank, 1)
    with _index_fails(rank):
        result["index"] = refused(lambda: run(recipe_of(same, directory, *STEPS, "train.steps=5")))
    with largest_file(700) if rank == 0 else contextlib.nullcontext():
        result["metrics"] = refused(lambda: run(recipe_of(same, None, *STEPS, "train.steps=5", f"logging.dir={work / 'metrics'}")))
    result["left"] = sorted(p.parent.name for p in Path(directory).glob("step_*/COMPLETE.json"))
    result["resumed"] = run(recipe_of(same, directory, *STEPS, "train.steps=3"))["said"]
    result["joined"] = _joined(recipe_of(same, None))
    return result


def _joined(recipe) -> list[int]:
    """Rank, world and data-parallel ranks of a run that makes the group itself, at a port of its own."""
    import torch.distributed as dist

    from layerplan.integration.training.build import ranks_of

    port = [None]
    if dist.get_rank() == 0:
        port = [free_port()]
    dist.broadcast_object_list(port, src=0)
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port[0])
    with ranks_of(recipe) as ranks:
        return [ranks.rank, ranks.world, ranks.data_size]


def _full_on_one(prefix, directory, rank, full) -> str:
    with largest_file(3_000) if rank == full else contextlib.nullcontext():
        return refused(lambda: run(recipe_of(prefix, directory, *STEPS, "train.steps=4")))


@contextlib.contextmanager
def _index_fails(rank: int):
    """Rank 0 cannot write the index while the others wait for it."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    def fails(self, metadata, results):
        raise OSError(28, "No space left on device")

    kept = FileSystemWriterAsync.finish
    FileSystemWriterAsync.finish = fails if rank == 0 else kept
    try:
        yield
    finally:
        FileSystemWriterAsync.finish = kept
