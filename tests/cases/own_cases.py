"""What the case modules of our own kernels and their tests share. As scripts the modules run small cases thread by
thread on a CPU, or compile all of them ahead, so that a GPU's time goes into running them."""

from __future__ import annotations

import contextlib
import json
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch

from layerplan.integration.engines.arch import Arch
from layerplan.integration.engines.contract import BuildContext, Engine, Offer, Region


def main(cases: Callable[[], Sequence[Any]], simulated: Callable[[Any], None], contexts: Callable[[Arch], Iterable[tuple[str, BuildContext]]],
         outcome: str, chooses: Callable[[str, str], bool] = operator.contains) -> None:  # fmt: skip
    """``--compile ARCH [WORKERS]`` compiles ``contexts(arch)``, (engine, context) each, into the cache of LAYERPLAN_CACHE. Otherwise
    ``simulated`` runs each of ``cases``, or those that ``chooses(str(case), argument)``; ``outcome`` ends "N cases ..."."""
    given = sys.argv[1:]
    if given[:1] == ["--compile"]:
        from layerplan.integration.plan_cache import ahead
        from layerplan.integration.plan_cache.disk import Store
        from layerplan.integration.settings import cache_folders

        jobs, _ = ahead.jobs_of(list(contexts(Arch.parse(given[1]))), None)
        for done in ahead.compile_all(jobs, Store(cache_folders()), int(given[2]) if len(given) > 2 else 2):
            print(done, flush=True)
        return
    from . import simt

    simt.install()
    chosen = [c for c in cases() if not given or chooses(str(c), given[0])]
    for case in chosen:
        try:
            simulated(case)
        except Exception as error:
            raise AssertionError(str(case)) from error
    print(f"{len(chosen)} cases {outcome}")


def offer_is_whole(engine: Engine, region: Region, arch: Arch, what: str) -> None:
    """The engine's offer names the kernels that its build asks for, with JSON values as constants, and is what it
    answers to the offer's own knobs."""
    offer, asked = engine.match(region, arch), []
    assert isinstance(offer, Offer), (what, offer)
    engine.build(BuildContext(region, arch, offer, asked.append))
    kernels = engine.kernels(region, arch, offer)
    assert tuple(asked) == kernels, what
    assert all(json.loads(json.dumps(dict(k.constants))) == dict(k.constants) for k in kernels), what
    assert engine.offer_with(region, arch, offer.knobs) == offer, what


@contextlib.contextmanager
def guarded_memory(poisoned: bool | int = False) -> Iterator[Callable[[Callable], Callable]]:
    """Within it device code that runs thread by thread may access the arguments of its launch and the tensors that the
    host makes for it, and no other memory. Gives the function that wraps a launch for this. ``poisoned``: those tensors
    hold at first what no kernel means, or a number in each of their bytes."""
    from layerplan.kernels.common import quantized

    from . import simt_ptx

    addresses = quantized.addresses

    def known(tensors) -> list[int]:
        simt_ptx.allow(*tensors)
        for t in tensors if poisoned else ():
            if t is None:
                continue
            if poisoned is True:
                t.fill_(float("nan") if t.is_floating_point() else 0x5A5A5A5A)
            else:
                t.view(torch.uint8).fill_(poisoned)
        return addresses(tensors)

    def guarded(launch: Callable) -> Callable:
        def call(*given):
            simt_ptx.forget()
            simt_ptx.allow(*given)
            return launch(*given)

        return call

    with mock.patch.object(quantized, "addresses", known):
        yield guarded


@contextlib.contextmanager
def poisoned_results() -> Iterator[None]:
    """Within it what launches that are built make for a quantize, its workspace too, holds 0xff at first, NaN of every
    dtype; amax stays 0."""
    from layerplan.kernels.common import quantized

    maker = quantized.maker

    def poisoning(*given):
        make = maker(*given)

        def poisoned(like, lead):
            *made, amax, workspace = make(like, lead)
            for t in (*made, workspace):
                if t is not None:
                    t.view(torch.uint8).fill_(0xFF)
            return *made, amax, workspace

        return poisoned

    with mock.patch.object(quantized, "maker", poisoning):
        yield
