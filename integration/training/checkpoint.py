"""Checkpoints that are whole or not there.

    DIR/step_0000200/
        __0_0.distcp ... .metadata metadata.json   Megatron's sharded state: model and optimiser
        rng_00000.pt ...                           per rank, generator states as uint8 tensors
        trainer.json                               step, recipe, layout, versions
        plan.json, tokenizer.json                  the plan file in force, the data's tokenizer
        COMPLETE.json                              every other file with its size and SHA-256; written last, by a rename

A folder without COMPLETE.json is what a killed run left, and is passed over. Before anything is read, every file is compared
with COMPLETE.json; a folder that differs is passed over for the one before it, and that is said. Loading executes nothing: tensors
and objects go through torch's weights-only reader, and Megatron's pickled index through an unpickler that knows a handful of classes.

Writing in the background: tensors are copied to host memory, then a thread writes, syncs and hashes this rank's files while training
goes on; the ranks agree that all are done on a gloo group, and rank 0 completes the folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
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

from ...recipes import Recipe
from ..megatron import compat

FORMAT = 1
COMPLETE = "COMPLETE.json"
TRAINER = "trainer.json"
INDEX, CONFIG = ".metadata", "metadata.json"  # Megatron's
_STEP, _RNG = re.compile(r"step_(\d{7,})$"), re.compile(r"rng_\d{5,}\.pt$")
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


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError naming the file; FileNotFoundError passes through."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:  # the last: brackets nested thousands deep
        raise CheckpointError(f"{path}: cannot be read ({error})") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: must hold an object, it holds a {type(data).__name__}")
    return data


def manifest_of(folder: Path) -> dict[str, Any]:
    """COMPLETE.json, checked for form. Raises CheckpointError."""
    path = folder / COMPLETE
    try:
        data = read_json(path)
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: has no {COMPLETE}: its save was interrupted") from None
    files = data.get("files")
    if not isinstance(files, dict) or data.get("format") != FORMAT:
        raise CheckpointError(f"{path}: must be format {FORMAT} with a table of files")
    for name, entry in files.items():
        if not (isinstance(entry, list) and len(entry) == 2) or "/" in name or name in ("", ".", ".."):
            raise CheckpointError(f"{path}: file {name!r}: must be a plain name with size and SHA-256")
    absent = [name for name in (TRAINER, INDEX, CONFIG) if name not in files]
    if absent:
        raise CheckpointError(f"{path}: names no {absent[0]}")
    return files


def verify(folder: Path, part: int = 0, parts: int = 1) -> None:
    """Every file against COMPLETE.json: names, sizes, and of the ``part``-th of ``parts`` the contents. Then what files say whose
    contents are what was written, but perhaps not by layerplan, or for another folder. Raises CheckpointError naming file and
    field."""
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
        if number % parts == part and _RNG.match(name):
            read_rng(path)
    if part == 0:
        load_trainer_state(folder)
        backend = read_json(folder / CONFIG).get("sharded_backend")
        if backend != "torch_dist":
            raise CheckpointError(f"{folder / CONFIG}: sharded_backend = {backend!r}: must be 'torch_dist'")
        _check_extents(folder, check_index(folder / INDEX), files)


def _check_extents(folder: Path, index: Any, files: dict[str, Any]) -> None:
    """Whether every piece that the index names lies within its file."""
    pieces = getattr(index, "storage_data", None)
    if not isinstance(pieces, dict) or not pieces:
        raise CheckpointError(f"{folder / INDEX}: storage_data: must name the pieces of the state, it is {type(pieces).__name__}")
    for piece in pieces.values():
        name, offset, length = (getattr(piece, field, None) for field in ("relative_path", "offset", "length"))
        if not isinstance(name, str) or name not in files:
            raise CheckpointError(f"{folder / INDEX}: relative_path = {name!r}: {COMPLETE} names no such file")
        if not (isinstance(offset, int) and isinstance(length, int) and 0 <= offset <= offset + length <= files[name][0]):
            raise CheckpointError(f"{folder / name}: has {files[name][0]} bytes, {INDEX} looks for {length} bytes at {offset}")


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


def check_index(path: Path) -> Any:
    """Megatron's pickled index (torch's ``Metadata``), read with an unpickler that refuses everything but the index's own
    classes. Raises CheckpointError."""
    try:
        with path.open("rb") as f:
            return _IndexUnpickler(f).load()
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
    """Fill the sharded state dict ``wanted`` from a verified folder. Executes nothing from it. Raises CheckpointError."""
    check_index(folder / INDEX)
    remedy = "remove the folder to go on from the one before"
    try:
        with _weights_only():
            return dist_checkpointing.load(wanted, str(folder))
    except CheckpointException as error:  # torch's is a BaseException: it would pass every handler above
        reasons = "; ".join(f"rank {rank}: {_said(cause[0])}" for rank, cause in error.failures.items())
        raise CheckpointError(f"{folder}: cannot be read ({reasons}); {remedy}") from None
    except Exception as error:  # Megatron and torch raise nearly anything for a state that does not fit
        raise CheckpointError(f"{folder}: cannot be read ({_said(error)}); {remedy}") from None


def _said(error: BaseException) -> str:
    """An error as a message tells it: many of torch's have no text of their own."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def read_rng(path: Path) -> dict[str, torch.Tensor]:
    """Generator states by name, uint8 ``[bytes]`` each. Raises CheckpointError naming file and field."""
    try:
        states = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # a damaged pickle raises nearly anything
        raise CheckpointError(f"{path}: is not a file of generator states ({_said(error).splitlines()[0]})") from None
    if not isinstance(states, dict) or not {"cpu", "cuda"} <= states.keys():
        raise CheckpointError(f"{path}: must hold the generator states cpu and cuda")
    for name, state in states.items():
        if not (isinstance(state, torch.Tensor) and state.dtype == torch.uint8 and state.dim() == 1):
            raise CheckpointError(f"{path}: {name}: must be a generator's state, uint8 of one dimension")
    return states


def load_rng(folder: Path, rank: int) -> dict[str, torch.Tensor] | None:
    """The generator states of ``rank``, None where the folder has none for it. Raises CheckpointError."""
    path = folder / f"rng_{rank:05d}.pt"
    return read_rng(path) if path.exists() else None


_TRAINER_FIELDS = {"step": int, "layout": dict, "recipe": dict, "device": str}


def load_trainer_state(folder: Path) -> dict[str, Any]:
    """trainer.json: ``step`` (that of the folder's name), ``layout`` (sizes of tensor, pipeline, data), ``recipe`` (as
    ``Recipe.to_dict`` gives it), ``device``. Raises CheckpointError naming file and field."""
    path = folder / TRAINER
    try:
        state = read_json(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: is missing") from None
    for field, kind in _TRAINER_FIELDS.items():
        if type(state.get(field)) is not kind:
            raise CheckpointError(f"{path}: {field}: must be of type {kind.__name__}, it is {state.get(field)!r}")
    named = _STEP.match(folder.name)
    if state["step"] < 1 or (named and int(named.group(1)) != state["step"]):
        rule = f"must be that of the folder, {int(named.group(1))}" if named else "must be at least 1"
        raise CheckpointError(f"{path}: step = {state['step']}: {rule}")
    for axis in ("tensor", "pipeline", "data"):
        if type(state["layout"].get(axis)) is not int:
            raise CheckpointError(f"{path}: layout.{axis}: must be of type int, it is {state['layout'].get(axis)!r}")
    sections = {f.name for f in dataclasses.fields(Recipe)} - {"name"}
    for section in sorted(sections & state["recipe"].keys() | {"model", "train"}):
        if not isinstance(state["recipe"].get(section), dict):
            raise CheckpointError(f"{path}: recipe.{section}: must be of type dict, it is {state['recipe'].get(section)!r}")
    if not isinstance(state["recipe"].get("name"), str):
        raise CheckpointError(f"{path}: recipe.name: must be of type str, it is {state['recipe'].get('name')!r}")
    return state


def raise_together(problem: str | None, control: Any) -> None:
    """CheckpointError on every rank of ``control`` if any has a ``problem``, so that none waits for one that failed."""
    problems: list[str | None] = [None] * dist.get_world_size(control)
    dist.all_gather_object(problems, problem, group=control)
    told: dict[str, list[int]] = {}
    for rank, one in enumerate(problems):
        if one:
            told.setdefault(one, []).append(rank)
    if told:
        raise CheckpointError("; ".join(f"rank {', '.join(map(str, ranks))}: {one}" for one, ranks in told.items()))


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
        except CheckpointError as error:
            problem = str(error)
        except Exception as error:  # whatever a foreign file raises: the other ranks wait for the answer
            problem = f"{name}: cannot be read ({_said(error)})"
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
        complete on return. Raises CheckpointError on all ranks if any could not write."""
        self.wait()
        folder, problem = step_folder(self.root, step), None
        if self._rank == 0:
            try:
                if folder.exists():  # what an interrupted or damaged save of this step left
                    _remove(folder)
                folder.mkdir(parents=True)
            except OSError as error:
                problem = f"{folder}: could not be made: {_said(error)}"
        raise_together(problem, self._control)
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
        pending = self._pending = _Pending(step, folder, request, None)
        arguments = list(request.async_fn_args)
        try:
            torch.save(rng, folder / f"rng_{self._rank:05d}.pt")  # after Megatron has looked: it warns about folders with files
            for name, text in texts.items() if self._rank == 0 else ():
                (folder / name).write_text(text, encoding="utf-8")
            if request.preload_fn is not None:
                arguments[1] = request.preload_fn()
        except Exception as error:  # torch.save raises RuntimeError for a full disk; the other ranks go on to _finish
            pending.error = error
        if self._background and pending.error is None:
            pending.thread = threading.Thread(target=self._write, args=(pending, arguments), name=f"checkpoint-{step}", daemon=True)
            pending.thread.start()
        elif pending.error is None:
            self._write(pending, arguments)
        if not self._background:
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
        why = f"{pending.folder}: could not be written: "
        raise_together(None if pending.error is None else why + _said(pending.error), self._control)
        parts: list[Any] = [None] * dist.get_world_size(self._control)
        dist.all_gather_object(parts, pending.hashes, group=self._control)
        error: BaseException | None = None
        try:
            _finalize(pending.request)
            if self._rank == 0:
                self._complete(pending, {name: entry for hashes in parts for name, entry in hashes.items()})
        except (Exception, CheckpointException) as failure:  # torch's is a BaseException
            error = failure
        raise_together(None if error is None else why + _said(error), self._control)
        self.last_saved = pending.step
        self._say(f"checkpoint complete: {pending.folder}")

    def _complete(self, pending: _Pending, files: dict[str, list[Any]]) -> None:
        """On rank 0: hash what has no hash yet in ``files`` (file name -> [size, SHA-256]), and write COMPLETE.json."""
        for path in sorted(pending.folder.iterdir()):
            if path.name not in files:
                files[path.name] = [path.stat().st_size, digest(path)]
                _sync(path)
        unseen = sorted(name for name in files if not (pending.folder / name).is_file())
        if unseen:
            raise FileNotFoundError(f"rank 0 does not see {unseen[0]}: checkpoint.dir must lie on a file system that all ranks share")
        for path in pending.folder.glob("rng_*.pt"):
            _sync(path)
        _sync_folder(pending.folder)
        _write_atomic(pending.folder / COMPLETE, json.dumps({"format": FORMAT, "step": pending.step, "files": files}, indent=1).encode())
        _sync_folder(self.root)
        self._prune(pending.step)

    def _prune(self, newest: int) -> None:
        complete = [p for s, p in steps_in(self.root) if s <= newest and (p / COMPLETE).exists()]
        for folder in complete[self.keep :]:
            _remove(folder)
        for step, folder in steps_in(self.root):
            if step < newest and not (folder / COMPLETE).exists():
                _remove(folder)


_RANK_0_WRITES = (
    "megatron.core.dist_checkpointing.strategies.filesystem_async:FileSystemWriterAsync.finish",
    "megatron.core.dist_checkpointing.serialization:save_config",
)


def _finalize(request: Any) -> None:
    """Megatron's end of a save, on all ranks. In its midst rank 0 writes two files while the others wait in a collective: what
    fails there is kept and raised once all are through. CheckpointException, for failed parts, comes to every rank."""
    failures: list[Exception] = []

    def make(write: Any) -> Any:
        def kept(*arguments: Any, **options: Any) -> None:
            try:
                write(*arguments, **options)
            except Exception as error:
                failures.append(error)

        return kept

    with contextlib.ExitStack() as stack:
        for target in _RANK_0_WRITES:
            stack.callback(compat.swap(target, make, label="checkpoint save"))
        for finalize in request.finalize_fns:
            finalize()
    if failures:
        raise failures[0]


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
