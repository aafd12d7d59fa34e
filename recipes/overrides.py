"""``section.field=value`` texts onto a recipe, typed by the dataclasses' annotations."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from .config import Problem, Recipe

_TRUE, _FALSE, _NONE = ("true", "yes", "on"), ("false", "no", "off"), ("none", "null", "~")
MEGATRON_NAMES = {
    "tensor_model_parallel_size": "parallel.tensor", "pipeline_model_parallel_size": "parallel.pipeline",
    "expert_model_parallel_size": "parallel.expert", "expert_tensor_parallel_size": "parallel.expert_tensor",
    "moe_token_dispatcher_type": "parallel.dispatcher", "sequence_parallel": "parallel.sequence",
    "use_distributed_optimizer": "parallel.distributed_optimizer", "num_moe_experts": "model.num_experts",
    "layernorm_epsilon": "model.norm_eps", "micro_batch_size": "train.micro_batch", "global_batch_size": "train.global_batch",
    "train_iters": "train.steps",
}  # fmt: skip
"""Megatron's name of an option -> the field of a recipe that means it, where the two are not alike."""


def apply_overrides(recipe: Recipe, overrides: Sequence[str]) -> list[Problem]:
    """Set fields of ``recipe`` in place; returns what was wrong (an override that is wrong changes nothing)."""
    problems: list[Problem] = []
    for text in overrides:
        path, equals, value = text.partition("=")
        path, value = path.strip(), value.strip()
        if not equals:
            problems.append(Problem("override", text, "must read section.field=value", "as in train.steps=200"))
            continue
        problem = _apply(recipe, path, value)
        if problem:
            problems.append(problem)
    return problems


def _apply(recipe: Recipe, path: str, value: str) -> Problem | None:
    sections = recipe.sections()
    section_name, _, name = path.partition(".")
    fields = {f"{s}.{f.name}" for s, o in sections.items() for f in dataclasses.fields(o)}
    if path not in fields:
        return Problem(path, value, "no such field", _suggestion(path, section_name, name, sections, fields))
    section = sections[section_name]
    annotation = _hints(type(section))[name]
    try:
        parsed = _parse(value, annotation)
    except ValueError:
        return Problem(path, value, f"must be {_expected(annotation)}", f"it was {getattr(section, name)!r}")
    setattr(section, name, parsed)
    return None


def _suggestion(path: str, section: str, name: str, sections: dict[str, Any], fields: Iterable[str]) -> str:
    if not name and section in sections:
        return f"name one of its fields: {', '.join(f.name for f in dataclasses.fields(sections[section]))}"
    if (ours := MEGATRON_NAMES.get((name or section).replace("-", "_"))) is not None:
        return f"did you mean {ours}?"
    same_name = sorted(f for f in fields if name and f.partition(".")[2] == name)
    close = difflib.get_close_matches(path, sorted(fields), 1, 0.6)
    if section in sections:  # the section is right: look for the field there before elsewhere
        own = difflib.get_close_matches(name, [f.name for f in dataclasses.fields(sections[section])], 1, 0.6)
        close = [f"{section}.{own[0]}"] if own else same_name[:1] or close
    elif not name:  # no section at all: a field's bare name, or close to one
        own = [f for f in sorted(fields) if f.partition(".")[2] == section]
        bare = difflib.get_close_matches(section, {f.partition(".")[2] for f in fields}, 1, 0.6)
        close = own[:1] or [f for f in sorted(fields) if bare and f.partition(".")[2] == bare[0]][:1] or close
    else:
        near = difflib.get_close_matches(section, sections, 1, 0.5)
        if near and f"{near[0]}.{name}" in fields:
            close = [f"{near[0]}.{name}"]
        elif same_name:
            close = same_name[:1]
    if close:
        return f"did you mean {close[0]}?"
    if section in sections:
        return f"{section} has {', '.join(f.name for f in dataclasses.fields(sections[section]))}"
    return f"sections are {', '.join(sections)}"


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _parse(text: str, annotation: Any) -> Any:
    """``text`` as a value of the annotated type; ValueError if it is none."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        if text.lower() in _NONE and type(None) in args:
            return None
        return _parse(text, next(a for a in args if a is not type(None)))
    if origin is Literal:
        if text not in args:
            raise ValueError(text)
        return text
    if origin is tuple:
        return tuple(_parse(part.strip(), args[0]) for part in text.strip("[]()").split(",") if part.strip())
    if annotation is bool:
        if text.lower() not in (*_TRUE, *_FALSE):
            raise ValueError(text)
        return text.lower() in _TRUE
    if annotation is int:
        return int(text)
    if annotation is float:
        value = float(text)
        if not math.isfinite(value):
            raise ValueError(text)
        return value
    if annotation is str:
        if not text:
            raise ValueError(text)
        return text
    raise TypeError(f"overrides do not know the type {annotation}")


def _expected(annotation: Any) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        return " or ".join("none" if a is type(None) else _expected(a) for a in args)
    if origin is Literal:
        return f"one of {', '.join(args)}"
    if origin is tuple:
        return f"a comma-separated list, each {_expected(args[0])}"
    names = {bool: "true or false", int: "a whole number", float: "a finite number", str: "a text that is not empty"}
    return names[annotation]
