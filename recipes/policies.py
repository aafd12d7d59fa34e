"""Which policy holds for which layer of a recipe: the layers' names without a model, and patterns over them."""

from __future__ import annotations

from ..integration.planner.policy import MODES, Policy
from ..integration.problems import Problem
from ..integration.settings import SettingsError, given, settings
from .config import Recipe

_FINAL_NORM = "final norm"


def modules_of(recipe: Recipe, graph: str) -> tuple[str, ...]:
    """Names of the modules that run one of the graphs of ``estimate``, in the order of the layers, which are numbered through all
    pipeline stages."""
    if graph == _FINAL_NORM:
        return ("decoder.final_layernorm",)
    return tuple(f"decoder.layers.{i}.{'mlp' if 'mlp' in graph else 'self_attention'}" for i in range(recipe.model.num_layers))


def module_names(recipe: Recipe) -> tuple[str, ...]:
    """Names of all modules of the model that run plans: what the patterns of plan.per_module are held against."""
    return tuple(name for graph in ("self attention", "mlp", _FINAL_NORM) for name in modules_of(recipe, graph))


def policy_of(recipe: Recipe) -> Policy:
    """plan.policy, plan.per_module and plan.deterministic as the planner's policy. The recipe must be valid."""
    plan = recipe.plan
    return Policy(mode=plan.policy, deterministic=plan.deterministic, per_module=tuple(_split(row) for row in plan.per_module))


def _split(row: str) -> tuple[str, str]:
    pattern, _, mode = row.rpartition("=")
    return pattern.strip(), mode.strip()


def policy_problems(recipe: Recipe) -> list[Problem]:
    """What is wrong with plan.per_module, and where the environment asks for another policy than the recipe."""
    return [*_per_module(recipe), *_environment(recipe)]


def _per_module(recipe: Recipe) -> list[Problem]:
    field, plan = "plan.per_module", recipe.plan
    if plan.per_module and plan.layers != "layerplan":
        return [Problem(field, plan.per_module, f"plan.layers = {plan.layers!r} runs no plans", "set plan.layers=layerplan or drop it")]
    problems, rows = [], []
    for text in plan.per_module:
        pattern, mode = _split(text)
        if not pattern or mode not in MODES:
            problems.append(Problem(field, text, f"must read PATTERN=POLICY with a policy of {', '.join(MODES)}", "as in *.mlp=reference"))
        elif pattern in (p for p, _ in rows):
            problems.append(Problem(field, text, f"the pattern {pattern!r} is given twice; the first holds", "drop one"))
        else:
            rows.append((pattern, mode))
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
    ):
        if variable in given() and says != value:
            text = str(says).lower()
            problems.append(Problem(field, value, f"the environment says {variable}={text}", f"unset {variable} or set {field}={text}"))
    return problems
