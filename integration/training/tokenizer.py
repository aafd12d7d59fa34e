"""Tokenizers that ``layerplan data prepare`` trains and saves beside a dataset: byte-level BPE, or plain bytes.

The file is JSON: ``{"format": 1, "kind": "bpe" | "byte", "vocab_size": n, "eod": id, "pad": id, "model": ...}``; ``model`` is what
the tokenizers library writes, and is absent for bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

FORMAT = 1
KINDS = ("bpe", "byte")
BYTES = 256
MIN_BPE_VOCAB = BYTES + 2
_EOD, _PAD = "<|eod|>", "<|pad|>"


class TokenizerError(ValueError):
    """A tokenizer file that cannot be used, or settings that make no tokenizer. ``rule`` names the file or setting and the rule,
    ``remedy`` what to do."""

    def __init__(self, rule: str, remedy: str = "prepare the data again") -> None:
        super().__init__(f"{rule}; {remedy}")
        self.rule, self.remedy = rule, remedy


class Tokenizer:
    """Text to ids and back. ``eod`` ends a document, ``pad`` fills; ids lie in ``[0, vocab_size)``."""

    def __init__(self, kind: str, vocab_size: int, eod: int, pad: int, model: Any = None):
        self.kind, self.vocab_size, self.eod, self.pad = kind, vocab_size, eod, pad
        self._model = model

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, without an end of document."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if self._model is None:
            return [list(t.encode("utf-8", errors="surrogatepass")) for t in texts]
        return [e.ids for e in self._model.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; special ids are left out, bytes that form no character become U+FFFD."""
        kept = [int(i) for i in ids if int(i) not in (self.eod, self.pad) and 0 <= int(i) < self.vocab_size]
        if self._model is None:
            return bytes(kept).decode("utf-8", errors="replace")
        return self._model.decode(kept, skip_special_tokens=True)

    # What Megatron's GPTDataset asks of a tokenizer, beside vocab_size, eod and pad.
    @property
    def special_tokens_dict(self) -> dict[str, int]:
        return {}

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        return {"class": type(self).__name__, "kind": self.kind, "vocab_size": self.vocab_size, "eod": self.eod}

    def to_json(self) -> str:
        head = {"format": FORMAT, "kind": self.kind, "vocab_size": self.vocab_size, "eod": self.eod, "pad": self.pad}
        if self._model is not None:
            head["model"] = json.loads(self._model.to_str())
        return json.dumps(head, ensure_ascii=False, indent=None, separators=(",", ":")) + "\n"


def byte_tokenizer() -> Tokenizer:
    """256 bytes, an end of document and a padding id."""
    return Tokenizer("byte", BYTES + 2, BYTES, BYTES + 1)


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of at most ``vocab_size`` ids, special ones included: the same texts give the same tokenizer."""
    if vocab_size < MIN_BPE_VOCAB:
        raise TokenizerError(
            f"vocab_size = {vocab_size}: must be at least {MIN_BPE_VOCAB} (every byte, end of document, padding)",
            "raise it or choose the byte tokenizer",
        )
    from tokenizers import Tokenizer as Model
    from tokenizers import decoders, models, pre_tokenizers, trainers

    model = Model(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[_EOD, _PAD], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())  # fmt: skip
    model.train_from_iterator(texts, trainer)
    return Tokenizer("bpe", model.get_vocab_size(), model.token_to_id(_EOD), model.token_to_id(_PAD), _as_text(model))


def _as_text(model: Any) -> Any:
    """The model with its special tokens out of the way: '<|eod|>' in a document is text, not an end of document."""
    from tokenizers import Tokenizer as Model

    data = json.loads(model.to_str())
    data["added_tokens"] = []
    return Model.from_str(json.dumps(data))


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer file. Raises TokenizerError naming the file, the field and the rule."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # the last: brackets nested thousands deep
        raise TokenizerError(f"{path}: cannot be read ({error})") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("kind") not in KINDS:
        raise TokenizerError(f"{path}: must hold format {FORMAT} and a kind of {', '.join(KINDS)}")
    numbers = [data.get(k) for k in ("vocab_size", "eod", "pad")]
    if not all(isinstance(n, int) and n >= 0 for n in numbers) or max(numbers[1:]) >= numbers[0]:
        raise TokenizerError(f"{path}: vocab_size, eod, pad = {numbers}: must be whole numbers, eod and pad below vocab_size")
    model = None
    if data["kind"] == "bpe":
        from tokenizers import Tokenizer as Model

        try:
            model = Model.from_str(json.dumps(data["model"]))
        except Exception as error:  # the library raises its own bare Exception type
            raise TokenizerError(f"{path}: model: the tokenizers library refuses it ({error})") from None
    return Tokenizer(data["kind"], *numbers, model)
