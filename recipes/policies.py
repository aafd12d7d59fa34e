"""Which policy holds for which layer of a recipe: the layers' names without a model, and patterns over them."""

from __future__ import annotations

from ..integration.planner.policy import Policy
from ..integration.problems import Problem
from ..integration.settings import POLICIES, SettingsError, given, settings
from .config import AT_MOST, Recipe, pattern_and_mode

MODULE_KINDS = ("self_attention", "mlp", "final_layernorm", "loss")
"""What runs plans in a model, by the last part of the modules' names; the first two are in every layer."""


def modules_of(recipe: Recipe, kind: str) -> tuple[str, ...]:
    """Names of the modules of one of ``MODULE_KINDS``, in the order of the layers, which are numbered through all pipeline
    stages."""
    if kind == "final_layernorm":
        return ("decoder.final_layernorm",)
    if kind == "loss":
        return () if recipe.plan.loss_runs == "megatron" else ("loss",)
    return tuple(f"decoder.layers.{i}.{kind}" for i in range(recipe.model.num_layers))


def module_names(recipe: Recipe) -> tuple[str, ...]:
    """Names of all modules of the model that run plans: what the patterns of plan.per_module are held against."""
    return tuple(name for kind in MODULE_KINDS for name in modules_of(recipe, kind))


def policy_of(recipe: Recipe) -> Policy:
    """plan.policy, plan.per_module and plan.deterministic as the planner's policy. The recipe must be valid."""
    plan = recipe.plan
    return Policy(mode=plan.policy, deterministic=plan.deterministic, per_module=tuple(map(pattern_and_mode, plan.per_module)))


def policy_problems(recipe: Recipe) -> list[Problem]:
    """What is wrong with plan.per_module, and where the environment asks for another policy than the recipe."""
    return [*_per_module(recipe), *_environment(recipe)]


def _per_module(recipe: Recipe) -> list[Problem]:
    field, plan = "plan.per_module", recipe.plan
    if plan.per_module and plan.layers != "layerplan":
        return [Problem(field, plan.per_module, f"plan.layers = {plan.layers!r} runs no plans", "set plan.layers=layerplan or drop it")]
    problems, rows = [], []
    for text in plan.per_module:
        pattern, mode = pattern_and_mode(text)
        if not pattern or mode not in POLICIES:
            problems.append(Problem(field, text, f"must read PATTERN=POLICY with a policy of {', '.join(POLICIES)}", "as in *.mlp=reference"))
        elif pattern in (p for p, _ in rows):
            problems.append(Problem(field, text, f"the pattern {pattern!r} is given twice; the first holds", "drop one"))
        else:
            rows.append((pattern, mode))
    if not rows or not 1 <= recipe.model.num_layers <= AT_MOST["model.num_layers"]:
        return problems  # the number of layers is a problem of its own, and as many names need not end
    for pattern, (rule, remedy) in Policy(per_module=tuple(rows)).unmatched(module_names(recipe)).items():
        problems.append(Problem(field, f"{pattern}={dict(rows)[pattern]}", rule, remedy))
    return problems


def _environment(recipe: Recipe) -> list[Problem]:
    """A recipe says how its layers are planned; a variable that says something else would be lost."""
    try:
        here = settings()
    except SettingsError as error:
        return [Problem("environment", line.partition(":")[0], line.partition(": ")[2], "set it right or unset it") for line in str(error).splitlines()]
    problems = []
    for field, value, variable, says in (
        ("plan.policy", recipe.plan.policy, "LAYERPLAN_POLICY", here.policy),
        ("plan.deterministic", recipe.plan.deterministic, "LAYERPLAN_DETERMINISTIC", here.deterministic),
        ("plan.records", recipe.plan.records or here.records, "LAYERPLAN_RECORDS", here.records),  # a recipe without records takes those
    ):
        if variable in given() and says != value:
            text = says if isinstance(says, str) else str(says).lower()
            problems.append(Problem(field, value, f"the environment says {variable}={text}", f"unset {variable} or set {field}={text}"))
    return problems
