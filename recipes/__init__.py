"""Recipes: functions that return one whole configuration. Importing this package imports neither torch nor megatron."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence

if __name__ == "recipes":  # a bare import would make a second copy of every class
    raise ImportError("import layerplan.recipes, not recipes: the package is reached through layerplan alone")

from .config import Problem, Recipe, RecipeError
from .deepseek import deepseek_v2_lite
from .gpt import gpt_125m, gpt_tiny, moe_tiny
from .llama3 import llama3_8b, llama3_70b
from .mixtral import mixtral_8x7b
from .overrides import apply_overrides
from .qwen3 import qwen3_30b_a3b

RECIPES: dict[str, Callable[[], Recipe]] = {f.__name__: f for f in (
    gpt_tiny, gpt_125m, llama3_8b, llama3_70b, moe_tiny, mixtral_8x7b, qwen3_30b_a3b, deepseek_v2_lite)}  # fmt: skip

__all__ = ["RECIPES", "Problem", "Recipe", "RecipeError", "apply_overrides", "describe", "load_recipe"]


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe ``name`` with ``section.field=value`` overrides, validated.

    Raises RecipeError with every problem at once: an unknown recipe, section or field, a value of the wrong type, and
    whatever ``Recipe.validate`` finds.
    """
    if name not in RECIPES:
        close = difflib.get_close_matches(name, RECIPES, 1)
        remedy = f"did you mean {close[0]}?" if close else "name one of these"
        raise RecipeError([Problem("recipe", name, f"must be one of {', '.join(RECIPES)}", remedy)])
    recipe = RECIPES[name]()
    problems = apply_overrides(recipe, overrides)
    # a field whose override was refused keeps the recipe's value: judging the rest is still worth it
    problems += recipe.validate()
    if problems:
        raise RecipeError(problems)
    return recipe


def describe(name: str) -> str:
    """One line that says what a recipe is."""
    return (inspect.getdoc(RECIPES[name]) or "").partition("\n")[0]
