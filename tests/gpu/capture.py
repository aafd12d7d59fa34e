"""A step captured into a CUDA graph: what the tests of capture share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tests import oracle

Results = tuple[torch.Tensor, ...]
WARM_UPS = 3  # plans, compiled kernels and library handles exist before the capture


def captured(step: Callable[[], Results]) -> Callable[[], Results]:
    """``step`` (no arguments, a tuple of tensors) warmed up on a side stream and captured. The returned function
    replays it and returns copies of its results: the next replay writes over the graph's own."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()

    def replay() -> Results:
        graph.replay()
        return tuple(r.clone() for r in results)

    return replay


def new_data(*tensors: torch.Tensor) -> None:
    """Other random values in the same memory: what a graph reads when it is replayed."""
    with torch.no_grad():
        for t in tensors:
            t.copy_(torch.randn_like(t))


def replays_and_waits_for_no_host(step: Callable[[], Results], given: Sequence[torch.Tensor], what: str) -> None:
    """A captured ``step`` gives on new data, which goes into the floating-point tensors of ``given``, bit for bit what it
    gives eagerly, and launching it never waits for the device."""
    replay = captured(step)
    for _ in range(2):
        new_data(*(t for t in given if t.is_floating_point()))
        for i, (a, b) in enumerate(zip(replay(), step(), strict=True)):
            oracle.equal(a, b, f"{what}: result {i}")
    waits_for_no_host(step)


def waits_for_no_host(step: Callable[[], object]) -> None:
    """RuntimeError where launching ``step`` waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
