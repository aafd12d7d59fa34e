"""Checks of Megatron's indexed datasets (prefix.bin, prefix.idx) that need neither torch nor megatron.

Megatron maps both files and believes the index: a truncated file shows up as garbage tokens or a crash, steps later.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...recipes import Problem, Recipe
from .tokenizer import Tokenizer, TokenizerError, load_tokenizer

_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")
_ITEMS = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""NumPy's dtype of a token by Megatron's dtype code; its codes 6 and 7 are floating point, which no token is."""
_SCANNED_BYTES = 1 << 28  # of all tokens at the start; larger data is looked at batch by batch


class DatasetError(ValueError):
    """A dataset that is absent, empty, truncated or of another kind. ``rule`` names file and rule, ``remedy`` what to do."""

    def __init__(self, rule: str, remedy: str = "prepare the data again") -> None:
        super().__init__(f"{rule}; {remedy}")
        self.rule, self.remedy = rule, remedy


@dataclass(frozen=True, slots=True)
class DatasetInfo:
    """``dtype``: NumPy's, of the tokens in prefix.bin."""

    sequences: int
    documents: int
    tokens: int
    dtype: str


def tokenizer_path(prefix: Path | str) -> Path:
    return Path(f"{prefix}.tokenizer.json")


def check_dataset(prefix: Path | str) -> DatasetInfo:
    """Sizes of prefix.bin against prefix.idx, and of prefix.idx against its own header; then its tables against each other.

    Raises DatasetError that names the file and the size it should have, or the entry and what it should be.
    """
    idx, bin_ = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for path in (idx, bin_):
        if not path.is_file():
            raise DatasetError(f"{path}: no such file", f"prepare the data with: layerplan data prepare INPUT... --output-prefix {prefix}")
    size = idx.stat().st_size
    with idx.open("rb") as f:
        head = f.read(_HEAD.size)
        if len(head) < _HEAD.size or not head.startswith(_MAGIC):
            raise DatasetError(f"{idx}: has {size} bytes and no index header; it is truncated or not an index")
        _, version, code, sequences, documents = _HEAD.unpack(head)
        if version != 1 or code not in _ITEMS:
            raise DatasetError(f"{idx}: version {version}, token code {code}: must be version 1 and a whole-number code, {', '.join(map(str, _ITEMS))}")
        wanted = _HEAD.size + sequences * (4 + 8) + documents * 8
        if size not in (wanted, wanted + sequences):  # multimodal indices add one byte per sequence
            raise DatasetError(f"{idx}: has {size} bytes, its header asks for {wanted}; it is truncated or damaged")
        lengths = np.frombuffer(f.read(sequences * 4), dtype="<i4")
        pointers = np.frombuffer(f.read(sequences * 8), dtype="<i8")
        ends = np.frombuffer(f.read(documents * 8), dtype="<i8")
    item = np.dtype(_ITEMS[code]).itemsize
    _check_tables(idx, lengths, pointers, ends, item)
    tokens = int(lengths.sum(dtype=np.int64))
    if sequences == 0 or tokens == 0:
        raise DatasetError(f"{prefix}: holds {sequences} sequences and {tokens} tokens; must hold at least one", "prepare it from text")
    wanted = tokens * item
    if bin_.stat().st_size != wanted:
        raise DatasetError(f"{bin_}: has {bin_.stat().st_size} bytes, its index asks for {wanted}; it is truncated or belongs to another "
                           "index")  # fmt: skip
    return DatasetInfo(sequences, documents - 1, tokens, _ITEMS[code])


def _check_tables(idx: Path, lengths: np.ndarray, pointers: np.ndarray, ends: np.ndarray, item: int) -> None:
    """``lengths`` [sequences] int32 in tokens, ``pointers`` [sequences] int64 in bytes, ``ends`` [documents + 1] int64 in
    sequences."""

    def refuse(bad: np.ndarray, table: str, values: np.ndarray, rule: str) -> None:
        if bad.any():
            first = int(bad.argmax())
            raise DatasetError(f"{idx}: {table} {first} is {int(values[first])}: {rule}; the index is damaged")

    refuse(lengths < 0, "length of sequence", lengths, "must be at least 0")
    starts = np.zeros(len(lengths), dtype=np.int64)
    np.cumsum(lengths[:-1], dtype=np.int64, out=starts[1:])
    refuse(pointers != starts * item, "pointer of sequence", pointers, "must be where the sequences before it end")
    if not len(ends) or ends[0] != 0 or ends[-1] != len(lengths):
        held = f"from {int(ends[0])} to {int(ends[-1])}" if len(ends) else "empty"
        raise DatasetError(f"{idx}: table of documents is {held}: must go from 0 to the {len(lengths)} sequences; the index is damaged")
    refuse(np.diff(ends, prepend=0) < 0, "start of document", ends, "must not be before the one before it")


def foreign_token(tokens: np.ndarray, vocab_size: int) -> int | None:
    """A token id outside ``[0, vocab_size)``, None where there is none."""
    if not tokens.size:
        return None
    least, most = int(tokens.min()), int(tokens.max())
    return most if most >= vocab_size else least if least < 0 else None


def foreign_token_problem(prefix: Path | str, token: int, vocab_size: int) -> Problem:
    rule = f"{prefix}.bin: holds the token id {token}: must be at least 0 and below the tokenizer's vocab_size = {vocab_size}"
    return Problem("data.prefix", str(prefix), rule, "prepare the data again: it is damaged, or of another tokenizer")


def _foreign_tokens(prefix: Path | str, info: DatasetInfo, vocab_size: int) -> list[Problem]:
    """Whether all tokens of a dataset of at most ``_SCANNED_BYTES`` are in the vocabulary."""
    if info.tokens * np.dtype(info.dtype).itemsize > _SCANNED_BYTES:
        return []
    token = foreign_token(np.fromfile(f"{prefix}.bin", dtype=info.dtype), vocab_size)
    return [] if token is None else [foreign_token_problem(prefix, token, vocab_size)]


def check_data(recipe: Recipe) -> tuple[list[Problem], Tokenizer | None]:
    """What is wrong with the recipe's data, as problems; and its tokenizer. Tokens that are not in its vocabulary are found here
    where all are read in no time, else in the batch that holds one."""
    prefix = recipe.data.prefix
    if prefix is None:
        return [Problem("data.prefix", None, "training needs a prepared dataset",
                        "run layerplan data prepare, then set data.prefix=PREFIX")], None  # fmt: skip
    problems, tokenizer, info = [], None, None
    try:
        info = check_dataset(prefix)
        if info.tokens < recipe.model.seq_length + 1:
            problems.append(Problem("model.seq_length", recipe.model.seq_length,
                                    f"the dataset holds {info.tokens} tokens, fewer than one sample", "prepare more text, or lower it"))  # fmt: skip
    except DatasetError as error:
        problems.append(Problem("data.prefix", prefix, error.rule, error.remedy))
        if not any(path.exists() for path in (Path(f"{prefix}.idx"), Path(f"{prefix}.bin"), tokenizer_path(prefix))):
            return problems, None  # a dataset that is not there at all is one problem
    try:
        tokenizer = load_tokenizer(tokenizer_path(prefix))
        if info is not None:
            problems += _foreign_tokens(prefix, info, tokenizer.vocab_size)
        if tokenizer.vocab_size > recipe.model.vocab_size:
            problems.append(Problem("model.vocab_size", recipe.model.vocab_size,
                                    f"must be at least the tokenizer's {tokenizer.vocab_size}", "raise it, or prepare with a smaller vocabulary"))  # fmt: skip
    except TokenizerError as error:
        problems.append(Problem("data.prefix", prefix, error.rule, error.remedy))
    return problems, tokenizer
