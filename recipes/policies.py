"""Which policy holds for which layer of a recipe: the layers' names without a model, and patterns over them."""

from __future__ import annotations

from ..integration.planner.policy import Policy
from ..integration.problems import Problem
from ..integration.settings import POLICIES, SettingsError, given, settings
from .config import AT_MOST, Model, Recipe, pattern_and_mode

_PARTS: dict[str, str] = {
    "input_layernorm": "input_layernorm",
    "linear_q_down_proj": "self_attention.linear_q_down_proj",
    "q_layernorm": "self_attention.q_layernorm",
    "linear_kv_down_proj": "self_attention.linear_kv_down_proj",
    "kv_layernorm": "self_attention.kv_layernorm",
    "self_attention": "self_attention",
    "linear_proj": "self_attention.linear_proj",
    "mlp": "mlp",
    "pre_mlp_layernorm": "pre_mlp_layernorm",
    "router": "mlp.router",
    "experts": "mlp",
    "shared_experts": "mlp.shared_experts",
}
"""What runs plans in a layer, and its name there. Latent attention and layers of experts have several."""

MODULE_KINDS = (*_PARTS, "final_layernorm", "loss")
"""What runs plans in a model."""


def _runs(m: Model, kind: str, layer: int) -> bool:
    """Whether there is such a module in a layer, counted from 0."""
    if kind in ("pre_mlp_layernorm", "router", "experts"):
        return m.has_experts(layer)
    if kind == "shared_experts":
        return m.has_experts(layer) and m.moe_shared_expert_intermediate_size is not None
    if kind == "mlp":
        return not m.has_experts(layer)
    if kind == "self_attention":
        return True
    low_rank = m.q_lora_rank is not None
    wanted = {"linear_q_down_proj": low_rank, "q_layernorm": low_rank and m.qk_norm, "kv_layernorm": m.qk_norm}
    return m.latent and wanted.get(kind, True)


def stages_of(recipe: Recipe, kind: str) -> tuple[tuple[str, ...], ...]:
    """Names of the modules of one of ``MODULE_KINDS`` on each pipeline stage, in the order of the layers, which are
    numbered through all stages."""
    m, stages = recipe.model, recipe.parallel.pipeline
    if kind in ("final_layernorm", "loss"):
        name = "decoder.final_layernorm" if kind == "final_layernorm" else "loss"
        there = kind == "final_layernorm" or recipe.plan.loss_runs != "megatron"
        return (*((),) * (stages - 1), (name,) if there else ())
    size = -(-m.num_layers // stages)
    ranges = [range(k, min(k + size, m.num_layers)) for k in range(0, m.num_layers, size)]
    return tuple(tuple(f"decoder.layers.{i}.{_PARTS[kind]}" for i in layers if _runs(m, kind, i)) for layers in ranges)


def modules_of(recipe: Recipe, kind: str) -> tuple[str, ...]:
    """Names of the modules of one of ``MODULE_KINDS`` in the order of the layers."""
    return tuple(name for stage in stages_of(recipe, kind) for name in stage)


def module_names(recipe: Recipe) -> tuple[str, ...]:
    """Names of all modules of the model that run plans: what the patterns of plan.per_module are held against."""
    return tuple(dict.fromkeys(name for kind in MODULE_KINDS for name in modules_of(recipe, kind)))


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
