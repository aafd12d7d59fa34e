"""Whether code asks for values of tensors while it runs: on a GPU each such question waits for the device, and cannot
be captured. Seen on a CPU, where nothing waits.

``watching`` notes three kinds of them: numbers and shapes that come out of values (``item``, ``bool``, ``tolist``,
``nonzero``, masks as indices, ``unique``), copies to the host or to numpy, and tensors made of numbers that the host
holds, which are copied to the device. What a CPU kernel reads for itself is not seen."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[2]
_OPS = frozenset({
    "_local_scalar_dense", "nonzero", "nonzero_numpy", "masked_select", "_unique", "_unique2", "unique_dim",
    "unique_consecutive", "equal", "is_nonzero", "bincount", "histc",
})  # fmt: skip
_CALLS = ("tolist", "numpy", "cpu")  # of a tensor: on a CPU they reach no dispatcher


class Reads(list):
    """(what, where) of each, ``where`` being the innermost function of the project or of Megatron."""

    def note(self, what: str) -> None:
        self.append((what, _caller()))


def _caller() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        path = os.path.realpath(frame.f_code.co_filename)
        own, package = path.removeprefix(f"{ROOT}/"), path.rpartition("/site-packages/")[2]
        if path != __file__ and (package.startswith("megatron/") or (own != path and package == path)):
            return f"{package if package != path else own}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


def _noting(call: Callable[..., Any], what: str, reads: Reads,
            asks: Callable[..., bool] = lambda *a, **k: True) -> Callable[..., Any]:  # fmt: skip
    """``call``, noted as ``what`` where its arguments ask for values."""

    @functools.wraps(call)
    def noted(*args: Any, **kwargs: Any) -> Any:
        if asks(*args, **kwargs):
            reads.note(what)
        return call(*args, **kwargs)

    return noted


def _to_the_host(_, *args: Any, **kwargs: Any) -> bool:
    return any(str(a) == "cpu" for a in (*args, *kwargs.values()))


def _from_numbers(*args: Any, **kwargs: Any) -> bool:
    return not isinstance((*args, *kwargs.values())[0], torch.Tensor)


class _Ops(TorchDispatchMode):
    """Ops whose results are numbers for the host, or of sizes that values decide."""

    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = function._schema.name.removeprefix("aten::")
        if name in _OPS or (name == "repeat_interleave" and (kwargs or {}).get("output_size") is None):
            self.reads.note(name)
        elif name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            masks = [t for t in args[1] if t is not None and t.dtype in (torch.bool, torch.uint8)]
            if masks:
                self.reads.note(f"{name} with a mask")
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def watching() -> Iterator[Reads]:
    """Notes what is asked for within the block, in backward passes too."""
    reads, tensor = Reads(), torch.Tensor
    with contextlib.ExitStack() as stack:
        for name in _CALLS:
            stack.enter_context(mock.patch.object(tensor, name, _noting(getattr(tensor, name), name, reads)))
        stack.enter_context(mock.patch.object(tensor, "to", _noting(tensor.to, "to the host", reads, _to_the_host)))
        for name in ("tensor", "as_tensor"):
            made = _noting(getattr(torch, name), name, reads, _from_numbers)
            stack.enter_context(mock.patch.object(torch, name, made))
        made = _noting(tensor.new_tensor, "new_tensor", reads, lambda _, *a, **k: _from_numbers(*a, **k))
        stack.enter_context(mock.patch.object(tensor, "new_tensor", made))
        stack.enter_context(_Ops(reads))
        yield reads
