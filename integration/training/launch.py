"""``layerplan pretrain``: a recipe and overrides to a finished run, or to what the run would be."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any

from ...recipes import RECIPES, Problem, Recipe, RecipeError, apply_overrides, load_recipe
from ...recipes.config import load_pins
from ...recipes.size import flops_per_token, memory_estimate, parameter_count
from ..engines.packages import locate

EXIT_OK, EXIT_CONFIG, EXIT_NOT_FINITE, EXIT_CHECKPOINT = 0, 2, 3, 4


def quiet_megatron() -> None:
    """Megatron-Core warns in every run about its own plans for later releases; layerplan's users can do nothing about those."""
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"megatron\.core\..*")


def pretrain_command(recipe: str, overrides: list[str], dry_run: bool) -> int:
    """The command. Returns the exit status: 0 when done or stopped by a signal, 2 for a config or data that cannot run, 3 for a
    loss that is not finite, 4 for checkpoints that cannot be read or written."""
    quiet_megatron()
    try:
        made = load_checked(recipe, overrides, dry_run)
        if dry_run:
            return dry_run_report(made, print)
        return run(made)
    except (RecipeError, FileNotFoundError, RuntimeError) as error:
        # PlanError is a RuntimeError of a module that needs torch: told by name, so that a wrong recipe needs no torch
        if isinstance(error, RuntimeError) and type(error).__name__ != "PlanError":
            raise
        print(f"layerplan pretrain: {error}", file=sys.stderr)
        return EXIT_CONFIG


def load_checked(name: str, overrides: list[str], dry_run: bool) -> Recipe:
    """The recipe with its overrides. Raises one RecipeError with everything that is wrong with it, with the environment beside it
    and with the files that it names; a dry run may name no data, and is also held against Megatron's rules."""
    problems: list[Problem] = []
    try:
        made = load_recipe(name, overrides)
    except RecipeError as error:
        if name not in RECIPES:
            raise
        made, problems = RECIPES[name](), error.problems
        apply_overrides(made, overrides)
    own = not problems
    problems = problems + _file_problems(made, data=not dry_run or made.data.prefix is not None)
    if own and dry_run:
        try:
            _check_megatron(made)
        except RecipeError as error:
            problems += error.problems
    if problems:
        raise RecipeError(problems)
    return made


def run(recipe: Recipe, say: Callable[[str], None] | None = None) -> int:
    """Train; errors of a run become its exit status and a line that names step and rank. RecipeError and PlanError pass
    through."""
    _refuse_files(recipe)
    from .checkpoint import CheckpointError
    from .trainer import NotFiniteError, train

    try:
        train(recipe, say=say)
    except NotFiniteError as error:
        print(f"layerplan pretrain: {error}", file=sys.stderr, flush=True)
        return EXIT_NOT_FINITE
    except CheckpointError as error:
        print(f"layerplan pretrain: {error}", file=sys.stderr, flush=True)
        return EXIT_CHECKPOINT
    return EXIT_OK


def _file_problems(recipe: Recipe, *, data: bool = True) -> list[Problem]:
    """What is wrong with the files that the recipe names; found before anything heavy is imported."""
    from .indexed import check_data

    problems = list(check_data(recipe)[0]) if data else []
    try:
        load_pins(recipe)
    except RecipeError as error:
        problems += error.problems
    return problems


def _refuse_files(recipe: Recipe, *, data: bool = True) -> None:
    problems = _file_problems(recipe, data=data)
    if problems:
        raise RecipeError(problems)


def dry_run_report(recipe: Recipe, out: Callable[[str], None]) -> int:
    """Validate all that can be without a GPU and say what the run would be. Raises RecipeError."""
    _refuse_files(recipe, data=recipe.data.prefix is not None)
    checked = _check_megatron(recipe)
    m, p, t = recipe.model, recipe.parallel, recipe.train
    ranks = p.tensor * p.pipeline
    memory = memory_estimate(recipe)
    tokens = t.global_batch * m.seq_length
    out(f"recipe      {recipe.name}: {m.num_layers} layers, hidden {m.hidden_size}, {m.num_attention_heads} heads in {m.num_query_groups} "
        f"groups, vocabulary {m.vocab_size}, sequence {m.seq_length}")  # fmt: skip
    out(f"parameters  {parameter_count(recipe):,}")
    out(f"batch       {t.global_batch} sequences = {tokens:,} tokens a step, micro-batches of {t.micro_batch}; {t.steps:,} steps = {tokens * t.steps:,} tokens")
    out(f"compute     {flops_per_token(recipe) * tokens:.3e} model FLOPs a step, {flops_per_token(recipe) * tokens * t.steps:.3e} in all")
    out(f"ranks       {ranks} per replica (tensor {p.tensor}, pipeline {p.pipeline}{', sequence parallel' if p.sequence else ''})")
    gib = 2**30
    out(f"memory      about {memory.total / gib:.2f} GiB on a rank of one replica: weights {memory.weights / gib:.2f}, gradients "
        f"{memory.gradients / gib:.2f}, optimiser {memory.optimizer / gib:.2f}, activations {memory.activations / gib:.2f}, logits {memory.logits / gib:.2f}")  # fmt: skip
    out(f"data        {recipe.data.prefix or 'not set: data.prefix=PREFIX is needed to train'}")
    evaluated = f"every {t.eval_every_steps} steps on {t.eval_batches} batches = {t.eval_batches * t.global_batch} sequences"
    out(f"validation  {evaluated if t.eval_every_steps else 'off'}")
    out(f"checked     {checked}")
    _plan_report(recipe, out)
    return EXIT_OK


def _check_megatron(recipe: Recipe) -> str:
    if not locate("megatron.core").here:
        return "the recipe's own rules; Megatron's need: pip install 'layerplan[megatron]'"
    try:
        from .build import transformer_config

        config = transformer_config(recipe)
    except (ValueError, AssertionError) as error:
        raise RecipeError([Problem("recipe", recipe.name, f"Megatron-Core refuses it: {error}", "change the field it names")]) from None
    if recipe.plan.layers == "layerplan":
        try:
            from ..megatron.config_map import check_config
        except ImportError:
            return "the recipe's and Megatron-Core's rules"
        problems = check_config(config)
        if problems:
            raise RecipeError(problems)
    return "the recipe's, Megatron-Core's and the layers' rules"


def _plan_report(recipe: Recipe, out: Callable[[str], None]) -> None:
    if recipe.plan.layers != "layerplan":
        out("plan        none: plan.layers=megatron_local runs Megatron's own layers")
        return
    from ...recipes.estimate import estimate_recipe

    arch, pins = _arch(recipe), load_pins(recipe)
    if pins is not None:
        written_for = ", ".join(pins.archs()) or "no arch"
        out(f"plan file   {recipe.plan.file}: {len(pins.of_arch(arch.name))} pins for {arch.name}; it holds pins for {written_for}")
    out(str(estimate_recipe(recipe, arch)))


def _arch(recipe: Recipe) -> Any:
    """The arch to plan for: plan.arch, else the device at hand."""
    from ..engines.arch import Arch

    if recipe.plan.arch is not None:
        return Arch.parse(recipe.plan.arch)
    import torch

    return Arch.of_device(0 if torch.cuda.is_available() and recipe.train.device != "cpu" else -1)
