"""``layerplan.warm``: afterwards a step plans and builds nothing, and before it nothing of the model has moved."""

from __future__ import annotations

import copy

import pytest
import torch

import layerplan
from layerplan.integration.engines.arch import ARCHS, Arch
from layerplan.integration.planner import program, runner
from layerplan.modules import warm as module
from layerplan.modules.norm import Norm

SHAPES = {"x": ((24, 32), torch.float32)}


class Model(torch.nn.Module):
    """Norms with and without a residual, dropout and a counter between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Norm(32, kind="layer_norm"), Norm(32)
        self.linear, self.dropout = torch.nn.Linear(32, 32), torch.nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        self.calls += 1
        y, x = self.second(self.dropout(self.linear(self.first(x))), x)
        y += scale
        return y.sum() + x.sum()


@pytest.fixture
def built(monkeypatch):
    """The plans that are made and the regions that are built, from an empty start."""
    monkeypatch.setattr(runner, "_plans", {})
    monkeypatch.setattr(program, "_compiled", {})
    found = []
    for place, name in ((runner, "plan"), (runner, "forward_programs"), (runner, "BackwardProgram")):
        kept = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *a, kept=kept, name=name, **k: (found.append(name), kept(*a, **k))[1])
    return found


@pytest.mark.parametrize("training", [True, False])
def test_after_it_a_step_plans_and_builds_nothing(built, training):
    model = Model().train(training)
    assert layerplan.warm(model, SHAPES) >= 2 and built
    assert ("BackwardProgram" in built) == training
    del built[:]
    loss = model(torch.randn(24, 32))
    if training:
        loss.backward()
    model(torch.randn(31, 32))  # of the same shape class
    assert built == []
    model(torch.randn(200, 32))
    assert "forward_programs" in built


def test_an_input_with_a_gradient_finds_its_plans_as_well(built):
    model = Model()
    layerplan.warm(model, SHAPES)
    del built[:]
    for needs in (True, False):
        model(torch.randn(24, 32, requires_grad=needs)).backward()
    assert built == []


def test_a_step_after_it_is_bitwise_the_step_without_it_and_no_state_has_moved():
    model = Model()
    other, x = copy.deepcopy(model), torch.randn(24, 32)
    generator = torch.get_rng_state()
    state = {n: t.clone() for n, t in model.state_dict().items()}
    layerplan.warm(model, [SHAPES, SHAPES | {"scale": 2.0}, {"x": ((0, 32), "float32")}])
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    losses, grads = [], []
    for m in (model, other):
        torch.manual_seed(1)
        losses.append(m(x))
        losses[-1].backward()
        grads.append([p.grad for p in m.parameters()])
    assert torch.equal(*losses) and all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_runners_that_were_there_keep_what_they_have_and_get_the_new(built):
    model = Model()
    model(torch.randn(24, 32)).backward()
    before = model.first.plan_runners()
    layerplan.warm(model, {"x": ((200, 32), torch.float32)})
    assert model.first.plan_runners() == before and all(type(r) is runner.Runner for r in before)
    del built[:]
    for rows in (24, 200):
        model(torch.randn(rows, 32)).backward()
    assert built == []
    model.eval()
    layerplan.warm(model, SHAPES)
    assert len(model.first.plan_runners()) == len(before) + 1


def test_a_failing_call_leaves_the_model_as_it_was():
    model = Model()
    with pytest.raises(TypeError, match="nothing"):
        layerplan.warm(model, {"nothing": 1})
    assert model.first.plan_runners() == [] and "_make_runner" not in model.first.__dict__
    assert torch.isfinite(model(torch.randn(4, 32)))


@pytest.mark.parametrize(("model", "shapes", "words"), [
    (torch.nn.Linear(2, 2), {}, "model = Linear: holds no layerplan module"),
    (Norm(4), {"x": ((2, -1), torch.float32)}, r"x = .*must be \(sizes, dtype\)"),
    (Norm(4), {"x": ((2, 4), "float33")}, r"x = .*must be \(sizes, dtype\)"),
    (Norm(4), {"x": (8, torch.float32)}, r"x = .*must be \(sizes, dtype\)"),
    (Norm(4), {"x": ((True, 4), torch.float32)}, r"x = .*must be \(sizes, dtype\)"),
    (Norm(4), None, "shapes = NoneType: must be a mapping"), (Norm(4), [], "shapes = no call: must be a mapping"),
    (Norm(4), [((2, 4), torch.float32)], "shapes = list: must be a mapping"),
])  # fmt: skip
def test_a_model_without_modules_and_malformed_shapes_are_refused(model, shapes, words):
    with pytest.raises(ValueError, match=f"warm: {words}"):
        layerplan.warm(model, shapes)


def test_on_a_gpu_every_region_is_launched_once_on_a_few_tokens_and_a_failure_is_named(monkeypatch):
    model, launched = Norm(32), []
    monkeypatch.setattr(program, "_compiled", {})
    layerplan.warm(model, {"x": ((4096, 32), torch.float32)})
    regions = [r for _, _, r in model.plan_runners()[0].regions()]
    monkeypatch.setattr(module, "compiled_launch", lambda *_: lambda *t: launched.append([x.shape for x in t]))
    for r in regions:
        module._launch(r, ARCHS["cpu"], torch.device("cpu"))
    # forward and backward, with a gradient of x and without
    assert len(launched) == 4 and all((module._ROWS, 32) in shapes for shapes in launched)

    def fail(*_):
        raise RuntimeError("no room")

    monkeypatch.setattr(module, "compiled_launch", lambda *_: fail)
    with pytest.raises(RuntimeError, match="no room") as e:
        module._launch(regions[0], Arch.parse("cpu"), torch.device("cpu"))
    assert "first launch of rms_norm on " in e.value.__notes__[0]
