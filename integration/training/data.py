"""Micro-batches from an indexed dataset, in an order that depends on the data and its seed alone.

GPTDataset cuts the shuffled documents of one epoch into samples; the epochs' orders are drawn here. So neither train.steps nor
the number of ranks changes which sample comes when, and a resumed run goes on where it was.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from ...recipes import Problem, Recipe, RecipeError
from .build import Ranks, refuse_together
from .indexed import foreign_token, foreign_token_problem
from .tokenizer import Tokenizer

Batch = dict[str, torch.Tensor]
"""tokens, labels, position_ids [micro_batch, seq] int64; loss_mask [micro_batch, seq] fp32."""


def _cache_of(prefix: str) -> Path:
    """Megatron names its cached sample index by path and settings, not by content: data prepared anew needs a folder of its own."""
    stat = Path(f"{prefix}.idx").stat()
    return Path(f"{prefix}.cache") / f"{stat.st_size:x}-{stat.st_mtime_ns:x}"


def _shared_cache(prefix: str, ranks: Ranks) -> str:
    """The folder of the cached sample index, "" where every rank must make its own in memory: Megatron writes it on rank 0, and
    names it by the path of the data. So all must have the data at one path, and see there what rank 0 writes."""
    box: list[str | None] = [None, prefix]
    mark = None
    if ranks.rank == 0:
        try:
            folder = _cache_of(prefix)
            folder.mkdir(parents=True, exist_ok=True)
            handle, mark = tempfile.mkstemp(prefix=".seen-", dir=folder)
            os.close(handle)
        except OSError:  # a folder of data that cannot be written to
            mark = None
        box[0] = mark
    dist.broadcast_object_list(box, src=0, group=ranks.control)
    seen = [False] * ranks.world
    dist.all_gather_object(seen, box[0] is not None and box[1] == prefix and Path(box[0]).exists(), group=ranks.control)
    if mark is not None:
        Path(mark).unlink(missing_ok=True)
    return str(_cache_of(prefix)) if all(seen) else ""  # None would be Megatron's default, a folder again


class Samples:
    """The training split as an endless sequence of samples, and the start of the validation split. Built on every rank;
    ranks that read nothing hold None. Raises RecipeError on all ranks together where a split holds too little."""

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer, ranks: Ranks):
        prefix = self._prefix = str(recipe.data.prefix)
        self._vocab_size = tokenizer.vocab_size
        self._seed, self._epoch, self._order = recipe.data.seed, -1, torch.empty(0, dtype=torch.int64)
        self._reads = ranks.tensor == 0 and (ranks.first_stage or ranks.last_stage)
        config = GPTDatasetConfig(
            random_seed=recipe.data.seed, sequence_length=recipe.model.seq_length, blend=([prefix], None), split=recipe.data.split,
            tokenizer=tokenizer, reset_position_ids=False, reset_attention_mask=False,
            eod_mask_loss=recipe.data.mask_loss_after_eod, create_attention_mask=False, path_to_cache=_shared_cache(prefix, ranks),
        )  # fmt: skip
        built = BlendedMegatronDatasetBuilder(GPTDataset, [None, None, None], self._is_built_here, config).build()
        self._training, self._validation = built[:2] if self._reads else (None, None)
        self._refuse_too_little(recipe, ranks)

    def _is_built_here(self) -> bool:
        return self._reads

    def _refuse_too_little(self, recipe: Recipe, ranks: Ranks) -> None:
        problems, t, name = [], recipe.train, Path(str(recipe.data.prefix)).name
        training, validation = (len(d) if d is not None else 0 for d in (self._training, self._validation))
        if self._reads and training == 0:
            rule = f"leaves no training sample of {recipe.model.seq_length} tokens in {name}"
            problems.append(Problem("data.split", recipe.data.split, rule, "give training a larger share, or prepare more text"))
        wanted = t.eval_batches * t.global_batch if t.eval_every_steps else 0
        if self._reads and validation < wanted:
            rule = (f"asks for {wanted} samples, data.split = {recipe.data.split} leaves {validation} for validation in "
                    f"{name}: shares are of whole documents")  # fmt: skip
            problems.append(Problem("train.eval_batches", t.eval_batches, rule, "lower it, or give validation a larger share"))
        refuse_together(problems, ranks)

    def _training_sample(self, index: int) -> Batch:
        epoch, place = divmod(index, len(self._training))
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            self._epoch, self._order = epoch, torch.randperm(len(self._training), generator=generator)
        return self._training[int(self._order[place])]

    def _validation_sample(self, index: int) -> Batch:
        return self._validation[index]

    def micro_batches(self, consumed: int, recipe: Recipe, ranks: Ranks) -> Iterator[Batch] | None:
        """This rank's micro-batches of training from sample ``consumed`` on; None on pipeline stages that need no data."""
        return self._dealt(self._training_sample, consumed, recipe, ranks)

    def validation_micro_batches(self, recipe: Recipe, ranks: Ranks) -> Iterator[Batch] | None:
        """This rank's micro-batches of validation, from the start in its own order: the same in every evaluation."""
        return self._dealt(self._validation_sample, 0, recipe, ranks)

    def _dealt(self, sample: Callable[[int], Batch], consumed: int, recipe: Recipe,
               ranks: Ranks) -> Iterator[Batch] | None:  # fmt: skip
        if not (ranks.first_stage or ranks.last_stage):
            return None
        return self._generate(sample, consumed, recipe.train.micro_batch, ranks)

    def _refuse_foreign_tokens(self, rows: list[Batch]) -> None:
        """Before the embedding reads beyond its table, or takes zeros on another rank for them."""
        for row in rows:
            for key in ("tokens", "labels"):
                token = foreign_token(row[key].numpy(), self._vocab_size)
                if token is not None:
                    raise RecipeError([foreign_token_problem(self._prefix, token, self._vocab_size)])

    def _generate(self, sample: Callable[[int], Batch], consumed: int, micro_batch: int,
                  ranks: Ranks) -> Iterator[Batch]:  # fmt: skip
        position = consumed
        while True:
            first = position + ranks.data * micro_batch
            position += micro_batch * ranks.data_size
            rows = [sample(first + j) for j in range(micro_batch)] if self._reads else None
            self._refuse_foreign_tokens(rows or [])
            batch: Batch = {}
            for dtype, keys in ((torch.int64, ("tokens", "labels", "position_ids")), (torch.float32, ("loss_mask",))):
                packed = {k: torch.stack([row[k] for row in rows]) if rows else None for k in keys}
                if mpu.get_tensor_model_parallel_world_size() > 1:
                    packed = tensor_parallel.broadcast_data(list(keys), packed, dtype)
                batch.update({k: v.to(ranks.device, non_blocking=True) for k, v in packed.items()})
            yield batch
