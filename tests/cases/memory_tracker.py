"""What a step allocates, followed storage by storage on a CPU: the peak that memory estimates are held against."""

from __future__ import annotations

import contextlib
import importlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_ROUND = 512  # as the CUDA allocator does


class Tracker(TorchDispatchMode):
    """Bytes of the storages that operators have made and that are still there. What is allocated inside of a region and gone at
    its end does not count towards the peak: an engine on a GPU has no such tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.inside = 0
        self._known: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor):
                self._see(t.untyped_storage())
        if not self.inside:
            self.peak = max(self.peak, self.now)
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        nbytes = -(-storage.nbytes() // _ROUND) * _ROUND

        def gone(_: weakref.ref) -> None:
            del self._known[key]
            self.now -= nbytes

        self._known[key] = weakref.ref(storage, gone)
        self.now += nbytes

    def region(self, launch: Any) -> Any:
        """``launch``, whose own temporaries do not count."""

        def run(*tensors: Any, **options: Any) -> Any:
            self.inside += 1
            try:
                result = launch(*tensors, **options)
            finally:
                self.inside -= 1
            self.peak = max(self.peak, self.now)
            return result

        return run


@contextlib.contextmanager
def tracked_regions(tracker: Tracker) -> Iterator[None]:
    """Every region that is built inside of the block, and the weight gradient of Megatron's output layer, tell ``tracker`` when
    they run. Where an engine has announced workspace, what it allocates counts, though not what its own kernels do."""
    from layerplan.integration.engines.manifest import BY_ID
    from layerplan.integration.megatron import compat
    from layerplan.integration.planner import program

    def build(planned: Any, arch: Any) -> Any:
        launch = compiled(planned, arch)
        return launch if planned.offer.workspace_bytes else tracker.region(launch)

    chunked = importlib.import_module(type(BY_ID["loss/chunked"].load()).__module__)
    compiled, kernel, accumulate = program.compiled_launch, chunked._kernel, compat._TorchWeightGradient.wgrad_gemm_accum_fp32
    program.compiled_launch, chunked._kernel = build, lambda *args: tracker.region(kernel(*args))
    compat._TorchWeightGradient.wgrad_gemm_accum_fp32 = staticmethod(tracker.region(accumulate))
    try:
        yield
    finally:
        program.compiled_launch, chunked._kernel = compiled, kernel
        compat._TorchWeightGradient.wgrad_gemm_accum_fp32 = staticmethod(accumulate)
