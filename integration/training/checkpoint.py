"""Checkpoints that are whole or not there.

    DIR/step_0000200/
        __0_0.distcp ... .metadata metadata.json   Megatron's sharded state: model and optimiser
        rng_00000.pt ...                           per rank, generator states as uint8 tensors
        trainer.json                               step, recipe, layout, versions
        COMPLETE.json                              every other file with its size and SHA-256; written last, by a rename

A folder without COMPLETE.json is what a killed run left, and is passed over. Before anything is read, every file is compared
with COMPLETE.json; a folder that differs is passed over for the one before it, and that is said. Loading executes nothing: tensors
and objects go through torch's weights-only reader, and Megatron's pickled index through an unpickler that knows a handful of classes.

Writing in the background: tensors are copied to host memory, then a thread writes, syncs and hashes this rank's files while training
goes on; the ranks agree that all are done on a gloo group, and rank 0 completes the folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import pickle
import queue
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import set_element

from ..megatron import compat

FORMAT = 1
COMPLETE = "COMPLETE.json"
TRAINER = "trainer.json"
_STEP = re.compile(r"step_(\d{7,})$")
_CHUNK = 1 << 22


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used, or one that could not be written; names the folder, the file and the rule."""


def step_folder(root: Path, step: int) -> Path:
    return root / f"step_{step:07d}"


def steps_in(root: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every checkpoint folder, complete or not, newest first."""
    if not root.is_dir():
        return []
    found = [(int(m.group(1)), p) for p in root.iterdir() if p.is_dir() and (m := _STEP.match(p.name))]
    return sorted(found, reverse=True)


def digest(path: Path) -> str:
    sha = hashlib.sha256()
    with path.open("rb") as f:
        while chunk := f.read(_CHUNK):
            sha.update(chunk)
    return sha.hexdigest()


def _write_atomic(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def manifest_of(folder: Path) -> dict[str, Any]:
    """COMPLETE.json, checked for form. Raises CheckpointError."""
    path = folder / COMPLETE
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: has no {COMPLETE}: its save was interrupted") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None
    files = data.get("files") if isinstance(data, dict) else None
    if not isinstance(files, dict) or data.get("format") != FORMAT:
        raise CheckpointError(f"{path}: must be format {FORMAT} with a table of files")
    for name, entry in files.items():
        if not (isinstance(entry, list) and len(entry) == 2) or "/" in name or name in ("", ".", ".."):
            raise CheckpointError(f"{path}: file {name!r}: must be a plain name with size and SHA-256")
    if TRAINER not in files or ".metadata" not in files:
        raise CheckpointError(f"{path}: names no {TRAINER} or no .metadata")
    return files


def verify(folder: Path, part: int = 0, parts: int = 1) -> None:
    """Every file against COMPLETE.json: names, sizes, and of the ``part``-th of ``parts`` the contents. Raises CheckpointError."""
    files = manifest_of(folder)
    present = {p.name for p in folder.iterdir()} - {COMPLETE}
    extra = sorted(present - files.keys())
    if extra:
        raise CheckpointError(f"{folder / extra[0]}: is not named in {COMPLETE}")
    for number, (name, (size, sha)) in enumerate(sorted(files.items())):
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path}: is missing")
        if path.stat().st_size != size:
            raise CheckpointError(f"{path}: has {path.stat().st_size} bytes, must have {size}")
        if number % parts == part and digest(path) != sha:
            raise CheckpointError(f"{path}: its contents are not what was written (SHA-256 differs)")
    if part == 0:
        check_index(folder / ".metadata")


_INDEX_CLASSES = {
    "torch.distributed.checkpoint.metadata": None,  # None: every class of the module; they are plain dataclasses
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.planner": {"SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"},
    "torch": {"Size", "device", "dtype", "layout", "memory_format", "float32", "float64", "bfloat16", "float16", "int8", "uint8",
              "int16", "int32", "int64", "bool", "strided", "contiguous_format", "preserve_format"},
    "torch.serialization": {"_get_layout"},
    "torch._utils": {"_get_layout"},
    "collections": {"OrderedDict", "defaultdict"},
    "pathlib": {"Path", "PosixPath"},
    "pathlib._local": {"PosixPath"},
    "builtins": {"set", "frozenset", "list", "dict", "tuple"},
}  # fmt: skip


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        allowed = _INDEX_CLASSES.get(module, set())
        if module in _INDEX_CLASSES and "." not in name and (allowed is None or name in allowed):
            found = getattr(importlib.import_module(module), name)
            if allowed is not None or (isinstance(found, type) and found.__module__ == module):
                return found
        raise CheckpointError(f"asks for {module}.{name}, which no index of a checkpoint needs: it would run code")


def check_index(path: Path) -> None:
    """Read Megatron's pickled index with an unpickler that refuses everything but the index's own classes."""
    try:
        with path.open("rb") as f:
            _IndexUnpickler(f).load()
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except Exception as error:  # a damaged pickle raises nearly anything
        raise CheckpointError(f"{path}: is not an index ({type(error).__name__}: {error})") from None


_PLANNERS = (
    "megatron.core.dist_checkpointing.strategies.torch:MCoreLoadPlanner.load_bytes",  # sharded objects
    "torch.distributed.checkpoint.default_planner:DefaultLoadPlanner.load_bytes",  # common_state, which is read first
)


@contextlib.contextmanager
def _weights_only() -> Iterator[None]:
    """torch's planners read the objects inside shards with weights_only=False; here they are not."""

    def make(_: Any) -> Any:
        def load_bytes(self: Any, read_item: Any, value: Any) -> None:
            loaded = torch.load(value, weights_only=True)
            if self.flatten_state_dict:
                set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], loaded)
            else:
                self.state_dict[read_item.dest_index.fqn] = loaded

        return load_bytes

    with contextlib.ExitStack() as stack:
        for planner in _PLANNERS:
            stack.callback(compat.swap(planner, make, label="checkpoint load"))
        yield


def load_sharded(folder: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """Fill the sharded state dict ``wanted`` from a verified folder. Executes nothing from it."""
    check_index(folder / ".metadata")
    try:
        with _weights_only():
            return dist_checkpointing.load(wanted, str(folder))
    except CheckpointException as error:  # torch's is a BaseException: it would pass every handler above
        reasons = "; ".join(f"rank {rank}: {cause[0]}" for rank, cause in error.failures.items())
        raise CheckpointError(f"{folder}: cannot be read ({reasons}); remove the folder to go on from the one before") from None


def load_rng(folder: Path, rank: int) -> dict[str, torch.Tensor] | None:
    path = folder / f"rng_{rank:05d}.pt"
    return torch.load(path, weights_only=True, map_location="cpu") if path.exists() else None


def load_trainer_state(folder: Path) -> dict[str, Any]:
    return json.loads((folder / TRAINER).read_text())


def find(root: Path, control: Any, say: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that is whole, agreed on by all ranks of ``control``; each folder that is passed over is said.

    None if there is no complete one. If the folders that claim to be complete are all damaged, CheckpointError: starting
    over in silence would lose them.
    """
    rank, world = dist.get_rank(control), dist.get_world_size(control)
    listed = [[str(p) for _, p in steps_in(root)] if rank == 0 else None]
    dist.broadcast_object_list(listed, src=0, group=control)
    damaged = []
    for name in listed[0]:
        problem: str | None = None
        try:
            verify(Path(name), rank, world)
        except (CheckpointError, OSError) as error:
            problem = str(error)
        problems: list[str | None] = [None] * world
        dist.all_gather_object(problems, problem, group=control)
        worst = next((p for p in problems if p), None)
        if worst is None:
            if damaged:
                say(f"using the checkpoint before it: {name}")
            return Path(name)
        say(f"checkpoint passed over: {worst}")
        damaged.append((name, worst))
    marked = [(n, w) for n, w in damaged if f"has no {COMPLETE}" not in w]
    if marked:
        raise CheckpointError(
            f"{root}: holds {len(marked)} damaged checkpoints and no whole one ({marked[0][1]}); repair one, or move "
            "them away to start over"
        )
    if damaged:
        say("no complete checkpoint: starting from the beginning")
    return None


@dataclass
class _Pending:
    step: int
    folder: Path
    request: Any
    thread: threading.Thread | None
    error: BaseException | None = None
    hashes: dict[str, list[Any]] | None = None


class Checkpointer:
    """Saves, completes and prunes checkpoints of one run. Every method is called by all ranks together."""

    def __init__(self, root: Path, control: Any, *, keep: int, background: bool, say: Callable[[str], None]):
        self.root, self.keep = root, keep
        self._control, self._background, self._say = control, background, say
        self._rank = dist.get_rank(control)
        self._pending: _Pending | None = None
        self.last_saved: int | None = None

    @property
    def newest(self) -> int | None:
        """The step of the last save that was started here or loaded."""
        return self.last_saved if self._pending is None else self._pending.step

    def save(self, step: int, sharded: dict[str, Any], texts: dict[str, str], rng: dict[str, torch.Tensor]) -> None:
        """Start a save of ``sharded`` (a Megatron sharded state dict; its tensors may change afterwards) and, from rank 0, of
        ``texts`` (file name to content; TRAINER among them), finishing an earlier save first. With ``background`` off it is
        complete on return."""
        self.wait()
        folder = step_folder(self.root, step)
        if self._rank == 0:
            if folder.exists():  # what an interrupted or damaged save of this step left
                _remove(folder)
            folder.mkdir(parents=True)
        dist.barrier(group=self._control)
        if self._background:
            _copy_host_tensors(sharded)
        undo = compat.swap(
            # Megatron's queue of results lives in a manager process of its own; threads need none, and a signal that ends
            # the process group would end that one first
            "megatron.core.dist_checkpointing.strategies.filesystem_async:get_write_results_queue",
            lambda _: lambda *a, **k: queue.Queue(), label="checkpoint save",
        )  # fmt: skip
        try:
            request = dist_checkpointing.save(sharded, str(folder), sharded_strategy=TorchDistSaveShardedStrategy(),
                                              async_sharded_save=True, async_strategy="mcore", validate_access_integrity=True)  # fmt: skip
        finally:
            undo()
        torch.save(rng, folder / f"rng_{self._rank:05d}.pt")  # after Megatron has looked: it warns about folders with files
        for name, text in texts.items() if self._rank == 0 else ():
            (folder / name).write_text(text, encoding="utf-8")
        arguments = list(request.async_fn_args)
        if request.preload_fn is not None:
            arguments[1] = request.preload_fn()
        pending = self._pending = _Pending(step, folder, request, None)
        if self._background:
            pending.thread = threading.Thread(target=self._write, args=(pending, arguments), name=f"checkpoint-{step}", daemon=True)
            pending.thread.start()
        else:
            self._write(pending, arguments)
            self.wait()

    def _write(self, pending: _Pending, arguments: list[Any]) -> None:
        try:
            if pending.request.async_fn is not None:
                pending.request.async_fn(*arguments, **pending.request.async_fn_kwargs)
            own = [*pending.folder.glob(f"__{self._rank}_*"), pending.folder / f"rng_{self._rank:05d}.pt"]
            pending.hashes = {p.name: [p.stat().st_size, digest(p)] for p in own}
        except BaseException as error:  # reported by every rank in _finish, where the others hear of it
            pending.error = error

    def poll(self) -> None:
        """Complete the save in flight if every rank has written its part; never waits for a disk."""
        if self._pending is None:
            return
        alive = self._pending.thread is not None and self._pending.thread.is_alive()
        flag = torch.tensor([int(alive)])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._control)
        if not flag.item():
            self._finish()

    def wait(self) -> None:
        """Wait for the save in flight and complete it. Raises CheckpointError if it failed on any rank."""
        if self._pending is not None:
            if self._pending.thread is not None:
                self._pending.thread.join()
            self._finish()

    def _finish(self) -> None:
        pending, self._pending = self._pending, None
        parts: list[Any] = [None] * dist.get_world_size(self._control)
        mine = (pending.hashes, None if pending.error is None else f"{type(pending.error).__name__}: {pending.error}")
        dist.all_gather_object(parts, mine, group=self._control)
        failed = {rank: error for rank, (_, error) in enumerate(parts) if error}
        if failed:
            raise CheckpointError(f"{pending.folder}: could not be written: " + "; ".join(f"rank {r}: {e}" for r, e in failed.items()))
        for finalize in pending.request.finalize_fns:
            finalize()
        if self._rank == 0:
            files = {name: entry for hashes, _ in parts for name, entry in hashes.items()}
            for path in sorted(pending.folder.iterdir()):
                if path.name not in files:
                    files[path.name] = [path.stat().st_size, digest(path)]
                    _sync(path)
            for path in pending.folder.glob("rng_*.pt"):
                _sync(path)
            _sync_folder(pending.folder)
            _write_atomic(pending.folder / COMPLETE, json.dumps({"format": FORMAT, "step": pending.step, "files": files}, indent=1).encode())
            _sync_folder(self.root)
            self._prune(pending.step)
        self.last_saved = pending.step
        self._say(f"checkpoint complete: {pending.folder}")
        dist.barrier(group=self._control)

    def _prune(self, newest: int) -> None:
        complete = [p for s, p in steps_in(self.root) if s <= newest and (p / COMPLETE).exists()]
        for folder in complete[self.keep :]:
            _remove(folder)
        for step, folder in steps_in(self.root):
            if step < newest and not (folder / COMPLETE).exists():
                _remove(folder)


def _sync(path: Path) -> None:
    with path.open("rb") as f:
        os.fsync(f.fileno())


def _remove(folder: Path) -> None:
    (folder / COMPLETE).unlink(missing_ok=True)  # first: a folder that is half removed must not look whole
    shutil.rmtree(folder)


def _copy_host_tensors(sharded: dict[str, Any]) -> None:
    """Tensors on the CPU go to the writing thread as they are, and training changes them in place: copy them. Those on a GPU
    are copied to the host by Megatron before the thread starts."""

    def copied(tensor: Any) -> Any:
        return tensor.detach().clone() if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" else tensor

    def visit(value: Any) -> Any:
        if isinstance(value, (ShardedTensor, ShardedTensorFactory)):
            value.data = copied(value.data)
            return value
        if isinstance(value, (ShardedObject, ShardedBase)):
            return value  # serialised before the thread starts
        return copied(value)

    dict_list_map_inplace(visit, sharded)
