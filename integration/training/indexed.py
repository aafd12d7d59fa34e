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
_ITEM_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}
"""Bytes per token by Megatron's dtype code."""


class DatasetError(ValueError):
    """A dataset that is absent, empty, truncated or of another kind; names file and rule."""


@dataclass(frozen=True, slots=True)
class DatasetInfo:
    sequences: int
    documents: int
    tokens: int


def tokenizer_path(prefix: Path | str) -> Path:
    return Path(f"{prefix}.tokenizer.json")


def check_dataset(prefix: Path | str) -> DatasetInfo:
    """Sizes of prefix.bin against prefix.idx, and of prefix.idx against its own header.

    Raises DatasetError that names the file, its size and the size it should have.
    """
    idx, bin_ = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for path in (idx, bin_):
        if not path.is_file():
            raise DatasetError(f"{path}: no such file; prepare the data with: layerplan data prepare INPUT... --output-prefix {prefix}")
    size = idx.stat().st_size
    with idx.open("rb") as f:
        head = f.read(_HEAD.size)
        if len(head) < _HEAD.size or not head.startswith(_MAGIC):
            raise DatasetError(f"{idx}: has {size} bytes and no index header; it is truncated or not an index: prepare the data again")
        _, version, code, sequences, documents = _HEAD.unpack(head)
        if version != 1 or code not in _ITEM_BYTES:
            raise DatasetError(f"{idx}: version {version}, token code {code}: must be version 1 and a known code; prepare the data again")
        wanted = _HEAD.size + sequences * (4 + 8) + documents * 8
        if size not in (wanted, wanted + sequences):  # multimodal indices add one byte per sequence
            raise DatasetError(f"{idx}: has {size} bytes, its header asks for {wanted}; it is truncated or damaged: prepare the data again")
        lengths = np.frombuffer(f.read(sequences * 4), dtype="<i4")
    tokens = int(lengths.sum(dtype=np.int64))
    if sequences == 0 or tokens == 0:
        raise DatasetError(f"{prefix}: holds {sequences} sequences and {tokens} tokens; must hold at least one: prepare it from text")
    wanted = tokens * _ITEM_BYTES[code]
    if bin_.stat().st_size != wanted:
        raise DatasetError(f"{bin_}: has {bin_.stat().st_size} bytes, its index asks for {wanted}; it is truncated or belongs to another "
                           "index: prepare the data again")  # fmt: skip
    return DatasetInfo(sequences, documents - 1, tokens)


def check_data(recipe: Recipe) -> tuple[list[Problem], Tokenizer | None]:
    """What is wrong with the recipe's data, as problems; and its tokenizer."""
    prefix = recipe.data.prefix
    if prefix is None:
        return [Problem("data.prefix", None, "training needs a prepared dataset",
                        "run layerplan data prepare, then set data.prefix=PREFIX")], None  # fmt: skip
    problems, tokenizer = [], None
    try:
        info = check_dataset(prefix)
        if info.tokens < recipe.model.seq_length + 1:
            problems.append(Problem("model.seq_length", recipe.model.seq_length,
                                    f"the dataset holds {info.tokens} tokens, fewer than one sample", "prepare more text, or lower it"))  # fmt: skip
    except DatasetError as error:
        problems.append(Problem("data.prefix", prefix, str(error), "see above"))
    try:
        tokenizer = load_tokenizer(tokenizer_path(prefix))
        if tokenizer.vocab_size > recipe.model.vocab_size:
            problems.append(Problem("model.vocab_size", recipe.model.vocab_size,
                                    f"must be at least the tokenizer's {tokenizer.vocab_size}", "raise it, or prepare with a smaller vocabulary"))  # fmt: skip
    except TokenizerError as error:
        problems.append(Problem("data.prefix", prefix, str(error), "see above"))
    return problems, tokenizer
