"""Linear and cross entropy in chunks smaller than what the engine chooses, on any device: what plan files can ask of
it."""

from __future__ import annotations

import dataclasses

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from layerplan.integration.engines.arch import Arch
from layerplan.integration.planner.plan_file import Pins, pins_of
from layerplan.integration.planner.planner import plan
from layerplan.integration.planner.policy import Policy
from layerplan.integration.planner.runner import WeightGrads
from layerplan.modules.graphs import TensorParallel
from layerplan.modules.loss import CrossEntropy, cross_entropy_graph

from .. import oracle
from .catalogue import plain_linear_cross_entropy

ALL = (True, True, False)  # hidden, weight, targets


class Shapes(TorchDispatchMode):
    """Notes the shape of every tensor that an operator makes or gives back."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        self.seen += [tuple(t.shape) for t in torch.utils._pytree.tree_leaves(made) if isinstance(t, torch.Tensor)]
        return made


def tensors(
    device: str, dtype: torch.dtype, lead: tuple[int, ...], classes: int, width: int, seed: int = 0
) -> list[torch.Tensor]:
    """hidden, weight and targets, of which the second is ignored."""
    gen = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*lead, width, generator=gen)
    weight = torch.randn(classes, width, generator=gen) * 3 * width**-0.5
    targets = torch.randint(0, classes, lead, generator=gen)
    targets.view(-1)[1] = -100
    return [hidden.to(device, dtype), weight.to(device, dtype), targets.to(device)]


def pins(given: list[torch.Tensor], chunk: int, loss: str, needs: tuple[bool, ...] = ALL) -> Pins:
    """A plan file's content: loss/chunked with these knobs, forward and backward, with and without accumulation."""
    graph = cross_entropy_graph(TensorParallel(), linear=True)[1](*given)
    arch, accumulate = Arch.of_device(given[0].get_device()), (1,) if needs[1] else ()
    auto = Policy.of("auto")
    plans = [
        plan(graph, arch, auto),
        *(plan(graph, arch, auto, needs_grad=needs, accumulate=a) for a in dict.fromkeys(((), accumulate))),
    ]
    knobs = (("chunk", chunk), ("loss", loss))
    rows = pins_of(plans).rows
    return Pins(tuple((a, key, dataclasses.replace(pin, engine="loss/chunked", knobs=knobs)) for a, key, pin in rows))


def run(
    given: list[torch.Tensor],
    chunk: int,
    loss: str,
    dloss: torch.Tensor,
    needs: tuple[bool, ...] = ALL,
    *,
    fuse: bool = False,
):
    """(loss, gradient of hidden, gradient of weight) under such pins. ``fuse``: the last is what was added to a
    main_grad of ones."""
    module = CrossEntropy(given[1].shape[0])
    module.set_policy(Policy.of("auto"), pins=pins(given, chunk, loss, needs))
    hidden = given[0].detach().requires_grad_(needs[0])
    weight = torch.nn.Parameter(given[1].detach().clone(), requires_grad=needs[1])
    sink = None
    if fuse:
        weight.main_grad, weight.grad_added_to_main_grad = torch.ones_like(weight, dtype=torch.float32), False
        sink = WeightGrads({1: weight}, fuse=True)
    value = module.linear(hidden, weight, given[2], sink=sink)
    value.backward(dloss)
    assert not fuse or weight.grad_added_to_main_grad
    return value.detach(), hidden.grad, weight.main_grad if fuse else weight.grad


def hold(
    device: str, dtype: torch.dtype, loss: str, lead: tuple[int, ...], classes: int, width: int, chunk: int
) -> None:
    """Loss and gradients by the rule of ``oracle``, whether dweight is returned or added; reruns are bitwise equal."""
    given = tensors(device, dtype, lead, classes, width)
    dloss = torch.randn(lead, generator=torch.Generator().manual_seed(5)).to(device)
    results = []
    for kind in (torch.float64, dtype):
        t = {
            "x": given[0].to(kind, copy=True).requires_grad_(),
            "w": given[1].to(kind, copy=True).requires_grad_(),
            "targets": given[2],
        }
        (value,) = plain_linear_cross_entropy(t)
        results.append((value.detach(), *torch.autograd.grad(value, (t["x"], t["w"]), dloss.to(value.dtype))))
    # the backward rebuilds exp(x - LSE) from a float32 LSE: see catalogue.hold
    top = float(torch.logsumexp(given[0].double() @ given[1].double().T, -1).max())
    relative = oracle.ulp(torch.float32, top)
    ran = run(given, chunk, loss, dloss)
    added = run(given, chunk, loss, dloss, fuse=True)
    oracle.poison(ran[1], ran[2])
    rerun, names = run(given, chunk, loss, dloss), ("loss", "dhidden", "dweight")
    for name, ours, again, truth, peer in zip(names, ran, rerun, *results, strict=True):
        oracle.compare(ours, truth, peer, f"{dtype} {name} in chunks of {chunk}", relative if name != "loss" else 0.0)
        oracle.equal(ours, again, f"a rerun's {name}")
    assert added[2].dtype == torch.float32
    relative += oracle.ulp(torch.float32, 1.0)  # of the ones that it was added to
    oracle.compare(added[2].double() - 1, results[0][2], results[1][2], "dweight in main_grad", relative)
