"""``layerplan pretrain``: a recipe and overrides to a finished run, or to what the run would be."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...recipes import RECIPES, Problem, Recipe, RecipeError, apply_overrides, load_recipe
from ...recipes.config import folder_problems, load_pins, load_records
from ...recipes.size import flops_per_token, parameter_count
from ..engines.packages import install_command, locate
from ..planner.plan_file import Pins
from ..planner.records import NONE, Records
from ..settings import launcher_environment
from .indexed import check_data
from .quiet import quiet

if TYPE_CHECKING:
    from ...recipes.estimate import RecipePlan  # needs torch
    from ..planner.planner import PlanError

EXIT_OK, EXIT_CONFIG, EXIT_NOT_FINITE, EXIT_CHECKPOINT = 0, 2, 3, 4
_GRACE_S = 10.0  # seconds that another rank gives rank 0


def pretrain_command(recipe: str, overrides: list[str], dry_run: bool) -> int:
    """The command. Returns the exit status: 0 when done or stopped by a signal, 2 for a config or data that cannot run, 3 for a
    loss that is not finite, 4 for checkpoints or metrics that cannot be read or written."""
    quiet()
    try:
        checked = load_checked(recipe, overrides, dry_run)
        if dry_run:
            return dry_run_report(checked, print)
        return run(checked.recipe)
    except (RecipeError, FileNotFoundError, RuntimeError) as error:
        # PlanError is a RuntimeError of a module that needs torch: told by name, so that a wrong recipe needs no torch
        if isinstance(error, RuntimeError) and type(error).__name__ != "PlanError":
            raise
        _say_once(f"layerplan pretrain: {error}")
        return EXIT_CONFIG


def _say_once(text: str) -> None:
    """Print what every rank of a node finds alike, from rank 0 alone. The others wait: torchrun ends them as soon as rank 0 is gone,
    and one that is still there after its time met something that rank 0 did not, and says so. A launcher's variables that make no
    rank count as rank 0."""
    env = launcher_environment()
    rank, world, local = (int(v) if (v := env.get(name, "0")).isascii() and v.isdigit() else 0 for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if 0 < rank < world:
        time.sleep(_GRACE_S if local == 0 else 2 * _GRACE_S)
        text = f"rank {rank}: {text}"
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Checked:
    """A recipe that can run as far as can be known beforehand. ``pins``: the content of plan.file, ``records``: of plan.records; ``rules``:
    whose rules it was held against, as a dry run says it."""

    recipe: Recipe
    pins: Pins | None
    records: Records
    rules: str


def load_checked(name: str, overrides: list[str], dry_run: bool) -> Checked:
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
    own, pins, records, rules = not problems, None, NONE, "the recipe's own rules"
    if own and dry_run:  # a run knows its ranks
        problems = made.validate_world(made.parallel.replica)
    if not dry_run or made.data.prefix is not None:
        problems = problems + check_data(made)[0]
    problems = problems + folder_problems(made)
    try:
        pins = load_pins(made)
    except RecipeError as error:
        problems = problems + error.problems
    try:
        records = load_records(made)
    except RecipeError as error:
        problems = problems + error.problems
    if own and dry_run:
        try:
            rules = _check_megatron(made)
        except RecipeError as error:
            problems = problems + error.problems
    if problems:
        raise RecipeError(problems)
    return Checked(made, pins, records, rules)


def run(recipe: Recipe, say: Callable[[str], None] | None = None) -> int:
    """Train; errors of a run become its exit status and a line that names step and rank. RecipeError and PlanError pass
    through."""
    from .checkpoint import CheckpointError
    from .metrics import MetricsError
    from .trainer import NotFiniteError, train

    try:
        train(recipe, say=say)
    except NotFiniteError as error:
        print(f"layerplan pretrain: {error}", file=sys.stderr, flush=True)
        return EXIT_NOT_FINITE
    except (CheckpointError, MetricsError) as error:
        print(f"layerplan pretrain: {error}", file=sys.stderr, flush=True)
        return EXIT_CHECKPOINT
    return EXIT_OK


def dry_run_report(checked: Checked, out: Callable[[str], None]) -> int:
    """Say what the run of a recipe would be, plan included; needs no GPU. Raises PlanError where a layer cannot be planned, behind
    what can be said without a plan."""
    from ...recipes.estimate import estimate_recipe
    from ...recipes.memory import memory_estimate, memory_fit
    from ..planner.planner import PlanError

    recipe, arch = checked.recipe, _arch(checked.recipe)
    m, p, t = recipe.model, recipe.parallel, recipe.train
    planned = failed = None
    try:
        planned = estimate_recipe(recipe, arch, pins=checked.pins, records=checked.records)
    except PlanError as error:
        failed = error
    tokens = t.global_batch * m.seq_length
    out(f"recipe      {recipe.name}: {m.num_layers} layers, hidden {m.hidden_size}, {m.num_attention_heads} heads in {m.num_query_groups} "
        f"groups, vocabulary {m.vocab_size}, sequence {m.seq_length}")  # fmt: skip
    if m.num_experts is not None:
        shared = f", a shared one of {m.moe_shared_expert_intermediate_size}" if m.moe_shared_expert_intermediate_size else ""
        out(f"experts     {m.moe_router_topk} of {m.num_experts} a token, {m.expert_width} hidden units each{shared}, "
            f"in {m.num_layers - m.moe_dense_layers} layers")  # fmt: skip
    out(f"parameters  {parameter_count(recipe):,}")
    out(f"batch       {t.global_batch} sequences = {tokens:,} tokens a step, micro-batches of {t.micro_batch}; {t.steps:,} steps = {tokens * t.steps:,} tokens")
    out(f"compute     {flops_per_token(recipe) * tokens:.3e} model FLOPs a step, {flops_per_token(recipe) * tokens * t.steps:.3e} in all")
    experts = f", expert {p.expert} by {p.expert_shards}" if m.num_experts is not None else ""
    out(f"ranks       {p.replica} per replica (tensor {p.tensor}, pipeline {p.pipeline}{experts}{', sequence parallel' if p.sequence else ''})")
    gpu = _gpu(recipe)
    if planned is not None:
        memory = memory_estimate(recipe, arch, planned=planned)
        parts = ", ".join(f"{name} {nbytes / 2**30:.2f}" for name, nbytes in memory.terms().items())
        out(f"memory      about {memory.total / 2**30:.2f} GiB on a rank of one replica: {parts}")
        if gpu is not None:
            out(f"GPU         {memory_fit(recipe, arch, *gpu, memory.total)}")
    if gpu is None:
        out("GPU         none here: plan.arch=H100, or another, plans for one and says whether it fits")
    out(f"schedule    {_schedule(recipe)}")
    out(f"data        {recipe.data.prefix or 'not set: data.prefix=PREFIX is needed to train'}")
    evaluated = f"every {t.eval_every_steps} steps on {t.eval_batches} batches = {t.eval_batches * t.global_batch} sequences"
    out(f"validation  {evaluated if t.eval_every_steps else 'off'}")
    out(f"checked     {checked.rules}")
    _plan_report(checked, failed or planned, out)
    return EXIT_OK


def _check_megatron(recipe: Recipe) -> str:
    """Hold a valid recipe against the rules of Megatron-Core and of the layers; says whose they were. Raises RecipeError."""
    if not locate("megatron.core").here:
        return f"the recipe's own rules; Megatron's need: {install_command('megatron')}"
    if recipe.plan.layers == "transformer_engine" and not locate("transformer_engine").here:
        return f"the recipe's own rules; Megatron's on Transformer Engine need: {install_command('te')}"
    try:
        from .build import transformer_config

        config = transformer_config(recipe)
    except (ValueError, AssertionError) as error:
        raise RecipeError([Problem("recipe", recipe.name, f"Megatron-Core refuses it: {error}", "change the field it names")]) from None
    if recipe.plan.layers == "layerplan":
        from ..megatron import compat
        from ..megatron.config_map import check_config
        from ..megatron.moe_config import layer_problems

        with compat.apply(*compat.GUARDS):  # as in every run of the trainer
            problems = check_config(config) + (list(layer_problems(config)) if config.num_moe_experts else [])
        if problems:
            raise RecipeError(problems)
        return "the recipe's, Megatron-Core's and the layers' rules"
    return "the recipe's and Megatron-Core's rules"


def _plan_report(checked: Checked, planned: RecipePlan | PlanError, out: Callable[[str], None]) -> None:
    """What the layers run on; raises why they cannot be planned where that is given."""
    recipe = checked.recipe
    if recipe.plan.layers != "layerplan":
        where = " on Transformer Engine" if recipe.plan.layers == "transformer_engine" else ""
        out(f"plan        none: plan.layers={recipe.plan.layers} runs Megatron's own layers{where}")
        return
    if isinstance(planned, Exception):
        raise planned
    out(str(planned))


def _arch(recipe: Recipe) -> Any:
    """The arch to plan for: plan.arch, else the device at hand."""
    from ..engines.arch import Arch

    if recipe.plan.arch is not None:
        return Arch.parse(recipe.plan.arch)
    import torch

    return Arch.of_device(0 if torch.cuda.is_available() and recipe.train.device != "cpu" else -1)


def _gpu(recipe: Recipe) -> tuple[str, float] | None:
    """(name, GiB) of the GPU that a dry run is about: plan.arch's, else the one at hand; None for a CPU."""
    if recipe.plan.arch is not None:
        from ..engines.arch import memory_gb

        return memory_gb(recipe.plan.arch)  # a board of N GB shows its programs about N GiB
    import torch

    if not torch.cuda.is_available() or recipe.train.device == "cpu":
        return None
    found = torch.cuda.get_device_properties(0)
    return found.name, found.total_memory / 2**30


def _schedule(recipe: Recipe) -> str:
    o, end = recipe.optimizer, recipe.decay_steps
    after = f", {recipe.schedule.style} to {o.min_lr:g} at step {end:,}" if recipe.schedule.style != "constant" else ", constant"
    cut = f"; train.steps = {recipe.train.steps:,} ends before that" if recipe.train.steps < end else ""
    return f"rate up to {o.lr:g} in {recipe.warmup_steps:,} steps{after}{cut}"
