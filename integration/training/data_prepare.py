"""``layerplan data prepare``: text or JSON lines into a Megatron indexed dataset with its tokenizer beside it.

Written in a temporary folder next to the output and renamed, the index last: an output with an index is whole. The same inputs
give the same bytes.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .indexed import DatasetError, DatasetInfo, check_dataset, tokenizer_path
from .quiet import quiet
from .tokenizer import KINDS, Tokenizer, TokenizerError, byte_tokenizer, train_bpe

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".text", ".py", ".c", ".h", ".cpp", ".json", ".jsonl", ".html", ".tex")
"""What is taken from a folder; a file named by itself is taken whatever its name."""

_JSON_LINES = (".jsonl", ".ndjson")
_WRITTEN = (".bin", ".tokenizer.json", ".idx")
_UNFINISHED = ".preparing"
_BATCH_CHARS = 4 << 20
_TRAIN_CHARS = 64 << 20
"""A BPE is trained on the first documents up to this many characters: more text changes few merges."""


class PrepareError(ValueError):
    """Inputs that make no dataset; names the input, the rule and the remedy."""


@dataclass
class Skipped:
    """What a folder held that was not taken, said at the end. ``prepared``: files of datasets prepared before."""

    files: list[str] = field(default_factory=list)
    empty: int = 0
    prepared: int = 0


def is_prepared(path: Path, output_prefix: Path) -> bool:
    """Whether a file belongs to a prepared dataset: the one to be written, or any whose .bin and .idx lie there. Beside
    those and the tokenizer: Megatron's sample index in PREFIX.cache, and the folder that a killed run left."""

    own = output_prefix.resolve()

    def belongs(part: Path) -> bool:
        name, folder = part.name, part.parent
        if name.startswith(".") and name.endswith(_UNFINISHED):
            return True
        for suffix in (*_WRITTEN, ".cache"):
            prefix = folder / name.removesuffix(suffix)
            if name.endswith(suffix) and (prefix == own or all(Path(f"{prefix}{s}").is_file() for s in (".bin", ".idx"))):
                return True
        return False

    whole = path.resolve()
    return any(belongs(part) for part in (whole, *whole.parents))


def find_files(inputs: Sequence[Path], output_prefix: Path, skipped: Skipped) -> list[tuple[Path, bool]]:
    """(file, was named by itself) in the order of the inputs, a folder's files sorted by path. What an earlier call wrote
    is passed over in folders and refused by name."""
    problems, found, endings = [], [], (*TEXT_SUFFIXES, *_JSON_LINES)
    for path in inputs:
        if path.is_dir():
            texts = sorted(p for p in path.rglob("*") if p.is_file() and p.suffix.lower() in endings)
            inside = [p for p in texts if not is_prepared(p, output_prefix)]
            skipped.prepared += len(texts) - len(inside)
            if not inside:
                problems.append(f"{path}: the folder holds no file that ends in {', '.join(TEXT_SUFFIXES)}; name files by themselves")
            found += [(p, False) for p in inside]
        elif path.is_file() and is_prepared(path, output_prefix):
            problems.append(f"{path}: belongs to a prepared dataset; name the text that it was made from")
        elif path.is_file():
            found.append((path, True))
        else:
            problems.append(f"{path}: no such file or folder; check the path")
    if not inputs:
        problems.append("inputs: none given; name files or folders")
    if problems:
        raise PrepareError("\n".join(problems))
    return found


def documents(files: Sequence[tuple[Path, bool]], jsonl_key: str, skipped: Skipped) -> Iterator[str]:
    """One text per document: a text file, or the ``jsonl_key`` of each JSON line. Documents of white space are left out."""
    for path, named in files:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            if named:
                raise PrepareError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start}); convert it or leave it out") from None
            skipped.files.append(str(path))
            continue
        texts = _json_lines(path, text, jsonl_key) if path.suffix.lower() in _JSON_LINES else [text]
        for one in texts:
            if one.strip():
                yield one
            else:
                skipped.empty += 1


def _json_lines(path: Path, text: str, key: str) -> Iterator[str]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise PrepareError(f"{path}, line {number}: is not JSON ({error}); every line must be one object") from None
        if not isinstance(row, dict) or not isinstance(row.get(key), str):
            has = ", ".join(row) if isinstance(row, dict) else type(row).__name__
            raise PrepareError(f"{path}, line {number}: must be an object with a text under {key!r}, it has {has}; name the key")
        yield row[key]


def prepare(inputs: Sequence[Path], output_prefix: Path, *, tokenizer: str = "bpe", vocab_size: int = 2048,
            jsonl_key: str = "text") -> tuple[DatasetInfo, Tokenizer, Skipped]:  # fmt: skip
    """Write ``output_prefix``.bin, .idx and .tokenizer.json. Raises PrepareError or TokenizerError; then nothing is written."""
    if tokenizer not in KINDS:
        raise PrepareError(f"tokenizer = {tokenizer!r}: must be one of {', '.join(KINDS)}")
    output_prefix, skipped = Path(output_prefix), Skipped()
    files = find_files([Path(p) for p in inputs], output_prefix, skipped)
    output_prefix.parent.mkdir(parents=True, exist_ok=True)
    made = byte_tokenizer() if tokenizer == "byte" else train_bpe(_head(documents(files, jsonl_key, Skipped())), vocab_size)
    work = Path(tempfile.mkdtemp(prefix=f".{output_prefix.name}.", suffix=_UNFINISHED, dir=output_prefix.parent))
    try:
        written = _write(work / "data", documents(files, jsonl_key, skipped), made)
        if not written:
            raise PrepareError(f"{', '.join(map(str, inputs))}: holds no text ({len(files)} files, all empty); name files with text")
        info = check_dataset(work / "data")
        tokenizer_path(work / "data").write_text(made.to_json(), encoding="utf-8")
        # An old index must not stand over new tokens, not even for the moment between two renames.
        Path(f"{output_prefix}.idx").unlink(missing_ok=True)
        for suffix in _WRITTEN:
            _sync(work / f"data{suffix}")
            os.replace(work / f"data{suffix}", f"{output_prefix}{suffix}")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return info, made, skipped


def _sync(path: Path) -> None:
    with path.open("rb") as f:
        os.fsync(f.fileno())


def _head(texts: Iterator[str]) -> Iterator[str]:
    chars = 0
    for text in texts:
        yield text
        chars += len(text)
        if chars >= _TRAIN_CHARS:
            return


def _write(prefix: Path, texts: Iterator[str], tokenizer: Tokenizer) -> int:
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(tokenizer.vocab_size))
    count = 0
    for batch in _batches(texts):
        for ids in tokenizer.encode_batch(batch):
            ids.append(tokenizer.eod)
            builder.add_document(torch.tensor(ids, dtype=torch.int64), [len(ids)])
            count += 1
    builder.finalize(f"{prefix}.idx")
    return count


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    chars = 0
    for text in texts:
        batch.append(text)
        chars += len(text)
        if chars >= _BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def prepare_command(inputs: list[Path], output_prefix: Path, tokenizer: str, vocab_size: int, jsonl_key: str) -> int:
    """The command: prepares, says what was written and what was left out. Returns the exit status."""
    quiet()
    try:
        info, made, skipped = prepare(inputs, output_prefix, tokenizer=tokenizer, vocab_size=vocab_size, jsonl_key=jsonl_key)
    except (PrepareError, TokenizerError, DatasetError) as error:
        print(f"layerplan data prepare: {error}", file=sys.stderr)
        return 2
    print(f"{output_prefix}: {info.documents} documents, {info.tokens} tokens, {made.kind} tokenizer of {made.vocab_size} ids")
    if skipped.empty:
        print(f"left out: {skipped.empty} documents without text")
    if skipped.prepared:
        print(f"left out: {skipped.prepared} files of prepared datasets")
    if skipped.files:
        print(f"left out: {len(skipped.files)} files that are not UTF-8 text: {', '.join(skipped.files[:5])}")
    return 0
