"""Warnings of Megatron-Core and torch that a user can do nothing about: each named by message and module."""

from __future__ import annotations

import logging
import warnings

_MEGATRON = r"megatron\.core\."
# a C++ warning, or one with a stack level, bears the frame it is seen in: in CPU mode that of the function mode
_CPU_MODE = r"layerplan\.integration\.megatron\.cpu_mode"
_OPTIMISER = rf"({_MEGATRON}optimizer|{_CPU_MODE})"
_SHARDS = rf"(torch\.distributed\.|{_MEGATRON}dist_checkpointing|{_CPU_MODE})"

WARNINGS: tuple[tuple[str, type[Warning], str], ...] = (
    # what Transformer Engine and Apex give Megatron comes from layerplan
    (r"Transformer Engine and Apex are not installed", UserWarning, _MEGATRON),
    (r"Apex is not installed", UserWarning, _MEGATRON),
    (r"Could not determine rank", UserWarning, _MEGATRON),  # one process by itself has none
    # Megatron's plans for its later releases, and the state of parts that no recipe uses
    (r"", DeprecationWarning, _MEGATRON),
    (r"", FutureWarning, _MEGATRON),
    (r"full scope is deprecated", UserWarning, rf"{_MEGATRON}transformer\."),
    (r"MimoModelConfig is experimental", UserWarning, rf"{_MEGATRON}models\."),
    # the distributed optimiser asks its shards, which are views of parameters, for a gradient that they never have
    (r"The \.grad attribute of a Tensor that is not a leaf Tensor", UserWarning, _OPTIMISER),
    # how Megatron writes and reads checkpoints: by ShardedTensor, and without a group where one process reads
    (r"Please use DTensor instead", FutureWarning, _SHARDS),
    (r"torch\.distributed is disabled, unavailable or uninitialized", UserWarning, r"torch\.distributed\."),
    (r"The argument order of \w+ has been changed", UserWarning, r"torch\.distributed\."),
)
"""(start of the message as a pattern, category, module as a pattern)."""


def _not_of_a_missing_gpu(record: logging.LogRecord) -> bool:
    """torch says on import that it sees no GPU; layerplan says by itself where one is needed."""
    return "No CUDA runtime is found" not in record.getMessage()


def quiet() -> None:
    """Keep WARNINGS and Megatron-Core's log below errors out of what a command prints. Call it before Megatron is
    imported."""
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    logging.getLogger("torch.utils.cpp_extension").addFilter(_not_of_a_missing_gpu)
    for message, category, module in WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category, module=module)
