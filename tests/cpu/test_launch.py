"""What stands around a training run: which warnings are kept quiet, which rank speaks, where the demo writes."""

from __future__ import annotations

import logging
import warnings

import pytest

from layerplan.integration.training import demo, launch
from layerplan.integration.training.quiet import WARNINGS, quiet
from layerplan.recipes import RecipeError, load_recipe

TE = "Transformer Engine and Apex are not installed. Falling back to Torch optimizers."
GRAD = "The .grad attribute of a Tensor that is not a leaf Tensor is being accessed."
SHARDS = "Please use DTensor instead and we are deprecating ShardedTensor."


@pytest.fixture
def heard():
    """Says which of some (message, category, module) come through after ``quiet``."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        quiet()

        def ask(*rows):
            with warnings.catch_warnings(record=True) as caught:
                for message, category, module in rows:
                    warnings.warn_explicit(message, category, "file.py", 1, module=module)
            return [str(w.message) for w in caught]

        yield ask
    logging.getLogger("megatron.core").setLevel(logging.NOTSET)


def test_warnings_about_which_a_user_can_do_nothing_are_quiet(heard):
    assert heard(
        (TE, UserWarning, "megatron.core.optimizer.clip_grads"), ("Apex is not installed. Falling back to Torch Norm", UserWarning, "megatron.core.models.backends"),
        ("removed in megatron-core 0.14", DeprecationWarning, "megatron.core.inference.contexts"), (GRAD, UserWarning, "megatron.core.optimizer.optimizer"),
        (GRAD, UserWarning, "layerplan.integration.megatron.cpu_mode"), (SHARDS, FutureWarning, "layerplan.integration.megatron.cpu_mode"),
        (SHARDS, FutureWarning, "torch.distributed._shard.sharded_tensor.api"),
        ("torch.distributed is disabled, unavailable or uninitialized, assuming", UserWarning, "torch.distributed.checkpoint.utils"),
        ("The argument order of load has been changed. Please", UserWarning, "torch.distributed.checkpoint.logger"),
    ) == []  # fmt: skip


def test_other_warnings_and_the_same_ones_of_other_modules_are_heard(heard):
    rows = [("this setting slows training", UserWarning, "megatron.core.transformer.transformer_config"), (TE, UserWarning, "somebody.elses"),
            (GRAD, UserWarning, "layerplan.integration.planner.runner"), ("old", DeprecationWarning, "torch.distributed.checkpoint.utils")]  # fmt: skip
    assert heard(*rows) == [message for message, _, _ in rows]


def test_every_quiet_warning_names_its_message_or_is_about_later_releases_of_megatron():
    for message, category, module in WARNINGS:
        assert module.endswith(("\\.", ")")) and (message or (category is not UserWarning and module == r"megatron\.core\."))


def test_a_missing_gpu_is_not_torchs_to_report_but_the_rest_of_its_log_is(heard):
    logger = logging.getLogger("torch.utils.cpp_extension")
    says = [logger.makeRecord(logger.name, logging.WARNING, "", 0, text, ("/usr",), None)
            for text in ("No CUDA runtime is found, using CUDA_HOME='%s'", "nvcc not found in %s")]  # fmt: skip
    assert [bool(logger.filter(record)) for record in says] == [False, True]


# ---- ranks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("env", "waits", "said"), [
    ({}, [], "bad\n"), ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "16"}, [], "bad\n"), ({"RANK": "3"}, [], "bad\n"),
    ({"RANK": "x", "WORLD_SIZE": "2"}, [], "bad\n"), ({"RANK": "2", "WORLD_SIZE": "2"}, [], "bad\n"),
    ({"RANK": "8", "LOCAL_RANK": "0", "WORLD_SIZE": "16"}, [launch._GRACE_S], "rank 8: bad\n"),
    ({"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "16"}, [2 * launch._GRACE_S], "rank 3: bad\n"),
])  # fmt: skip
def test_rank_0_speaks_at_once_and_another_only_if_it_is_still_there_later(monkeypatch, capsys, env, waits, said):
    slept = []
    monkeypatch.setattr(launch.time, "sleep", slept.append)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    launch._say_once("bad")
    assert slept == waits and capsys.readouterr().err == said


# ---- schedule --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("recipe", "overrides", "steps"), [
    ("gpt_tiny", [], 40), ("gpt_tiny", ["train.steps=10"], 1), ("gpt_tiny", ["train.steps=3"], 0), ("gpt_tiny", ["schedule.decay_steps=200"], 20),
    ("gpt_125m", [], 100), ("gpt_125m", ["train.steps=500"], 50), ("llama3_8b", [], 2000), ("llama3_70b", ["train.steps=20"], 2000), ("gpt_tiny", ["schedule.warmup_steps=0"], 0),
    ("gpt_125m", ["schedule.warmup_steps=7"], 7), ("gpt_125m", ["schedule.warmup_steps=none"], 100),
])  # fmt: skip
def test_warm_up_is_what_is_asked_for_or_a_tenth_of_the_decay(recipe, overrides, steps):
    assert load_recipe(recipe, overrides).warmup_steps == steps


def test_a_warm_up_that_was_asked_for_and_does_not_fit_is_refused_with_both_ways_out():
    with pytest.raises(RecipeError, match=r"schedule\.warmup_steps = 20: must be below train\.steps = 10; lower it, raise train\.steps, or leave it out"):
        load_recipe("gpt_tiny", ["train.steps=10", "schedule.warmup_steps=20"])


# ---- demo ------------------------------------------------------------------------------------------------------------


def test_a_second_demo_leaves_the_first_ones_run_where_it_is_and_says_so(tmp_path, capsys):
    assert demo._new_folder(tmp_path) == tmp_path / "run" and capsys.readouterr().out == ""
    for name in ("run", "run-2"):
        (tmp_path / name).mkdir()
    assert demo._new_folder(tmp_path) == tmp_path / "run-3"
    assert capsys.readouterr().out == f"{tmp_path}: holds an earlier run, which stays; this one goes to {tmp_path / 'run-3'}\n"
