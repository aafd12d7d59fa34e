"""``layerplan complete``: text that a checkpoint goes on with. One process, whatever layout the checkpoint was written by."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from ...recipes import Problem, Recipe, RecipeError
from ...recipes.config import Parallel
from .quiet import quiet


def check_request(prompt: str, max_new_tokens: int, temperature: float) -> None:
    """Raises RecipeError naming every argument that cannot be."""
    problems = []
    if not prompt:
        problems.append(Problem("prompt", prompt, "must not be empty", "give at least one character"))
    if max_new_tokens < 1:
        problems.append(Problem("max_new_tokens", max_new_tokens, "must be at least 1", "raise it"))
    if not 0 <= temperature < float("inf"):
        problems.append(Problem("temperature", temperature, "must be 0 (the likeliest token) or above, and finite", "try 0.8"))
    if problems:
        raise RecipeError(problems)


def complete(checkpoint: Path, prompt: str, *, max_new_tokens: int = 64, temperature: float = 0.8, seed: int = 0) -> str:
    """The continuation of ``prompt``, without it. ``checkpoint``: a step's folder, or a run's folder (its newest whole step).

    Raises RecipeError for arguments, a folder that is not there among them, CheckpointError where there is nothing whole to load.
    """
    check_request(prompt, max_new_tokens, temperature)
    checkpoint = Path(checkpoint)
    if not checkpoint.is_dir():
        raise RecipeError([Problem("checkpoint", str(checkpoint), "no such folder", "name a run's or a step's folder")])
    import torch

    from .build import build_model, ranks_of, transformer_config
    from .checkpoint import CheckpointError, load_sharded, load_trainer_state, steps_in, verify
    from .tokenizer import load_tokenizer

    candidates = [p for _, p in steps_in(checkpoint)] or [checkpoint]
    stored = None
    for folder in candidates:
        try:
            verify(folder)
            stored = load_trainer_state(folder)
            break
        except (CheckpointError, OSError) as error:
            problem = error
    if stored is None:
        raise CheckpointError(f"{checkpoint}: holds no whole checkpoint ({problem}); name a run's or a step's folder")
    recipe = _for_one_process(Recipe.from_dict(stored["recipe"]))
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    with ranks_of(recipe) as ranks, torch.no_grad():
        model = build_model(recipe, transformer_config(recipe)).eval()
        wanted = {"model": model.sharded_state_dict(metadata={"dp_cp_group": _data_group()})}
        model.load_state_dict(load_sharded(folder, wanted)["model"])
        ids = _generate(model, tokenizer, tokenizer.encode(prompt), recipe.model.seq_length, max_new_tokens, temperature, seed, ranks.device)
    return tokenizer.decode(ids)


def _for_one_process(recipe: Recipe) -> Recipe:
    recipe.parallel = Parallel(distributed_optimizer=recipe.parallel.distributed_optimizer)
    recipe.plan = dataclasses.replace(recipe.plan, file=None, arch=None)
    recipe.train = dataclasses.replace(recipe.train, global_batch=1, micro_batch=1, device="auto")
    return recipe


def _data_group():
    from megatron.core import parallel_state as mpu

    return mpu.get_data_parallel_group(with_context_parallel=True)


def _generate(model, tokenizer, prompt, seq_length, count, temperature, seed, device) -> list[int]:
    """New ids, at most ``count``. The window is always full, padded behind the last token, which causal attention cannot see:
    one shape, so one plan."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    ids, new = list(prompt), []
    positions = torch.arange(seq_length, device=device)[None]
    for _ in range(count):
        window = ids[-seq_length:]
        tokens = torch.tensor([window + [tokenizer.pad] * (seq_length - len(window))], device=device)
        logits = model(tokens, positions, None)[0, len(window) - 1].float().cpu()[: tokenizer.vocab_size]
        logits[tokenizer.pad] = -float("inf")
        if temperature == 0:
            chosen = int(logits.argmax())
        else:
            chosen = int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
        if chosen == tokenizer.eod:
            break
        ids.append(chosen)
        new.append(chosen)
    return new


def complete_command(checkpoint: Path, prompt: str, max_new_tokens: int, temperature: float, seed: int) -> int:
    """The command: prints prompt and continuation. Returns the exit status."""
    quiet()
    from .checkpoint import CheckpointError

    try:
        text = complete(Path(checkpoint), prompt, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    except (RecipeError, CheckpointError) as error:
        print(f"layerplan complete: {error}", file=sys.stderr)
        return 2
    print(prompt + text)
    return 0
