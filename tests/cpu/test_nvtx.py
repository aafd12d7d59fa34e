"""NVTX ranges: what is pushed and popped round each launch, and that generated code holds nothing of them where they
are off."""

import pytest
import torch

from layerplan.integration import settings as settings_module
from layerplan.integration.planner import nvtx, program
from layerplan.integration.planner.policy import Policy
from layerplan.integration.planner.runner import Runner, WeightGrads
from layerplan.integration.settings import Settings
from layerplan.modules.graphs import TensorParallel, linear_graph
from layerplan.modules.norm import Norm
from tests.cases.graphs import mlp

torch.set_num_threads(1)


class Fake:
    """NVTX that writes down what it is asked."""

    def __init__(self):
        self.calls, self.depth = [], 0

    def push(self, text):
        self.calls.append(text)
        self.depth += 1

    def pop(self):
        self.calls.append("pop")
        self.depth -= 1


@pytest.fixture
def fake(monkeypatch):
    made = Fake()
    monkeypatch.setattr(nvtx, "ranges", lambda: (made.push, made.pop))
    return made


@pytest.fixture
def asked(monkeypatch):
    """LAYERPLAN_NVTX=1, read anew."""
    monkeypatch.setattr(nvtx, "settings", lambda: Settings(nvtx=True))
    nvtx.ranges.cache_clear()
    yield
    nvtx.ranges.cache_clear()


def mlp_runner(policy="reference"):
    return Runner(mlp, ("x", "w1", "w2"), policy=Policy(policy), name="decoder.layers.0.mlp", training=True)


def tensors(grad=True):
    gen = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=gen).requires_grad_(grad) for s in ((6, 8), (16, 8), (8, 8))]


def programs(runner):
    """The generated functions of everything that a runner has built."""
    for entry in runner.entries.values():
        yield entry.forward
        if entry.differentiable:
            yield entry._function.forward
            for built, *_ in entry._backward.values():
                yield built.data
                yield entry._function._backward_cls.apply
                yield from [built.weight] if built.weight else []


def test_each_launch_is_in_a_range_of_module_pass_engine_and_ops(fake):
    run = mlp_runner()
    out = run(*tensors())
    names = ["linear", "swiglu", "linear"]
    assert fake.calls == [text for n in names for text in (f"decoder.layers.0.mlp forward reference/eager {n}", "pop")]
    fake.calls.clear()
    out.sum().backward()
    pushed = [text for text in fake.calls if text != "pop"]
    assert fake.calls == [part for text in pushed for part in (text, "pop")], "ranges do not nest: one for each launch"
    assert [text.split()[:3] for text in pushed] == [["decoder.layers.0.mlp", "backward", "reference/eager"]] * 5
    assert sorted(text.split()[3] for text in pushed) == [
        "linear_dgrad",
        "linear_dgrad",
        "linear_wgrad",
        "linear_wgrad",
        "swiglu_bwd",
    ]
    fake.calls.clear()
    with torch.no_grad():
        run(*tensors())
    assert len(fake.calls) == 6 and fake.depth == 0


def test_engines_name_themselves_and_a_module_its_place(fake):
    norm = Norm(8)
    norm.set_policy(Policy("reference"), "decoder.final_layernorm")
    norm(torch.randn(3, 8))
    assert fake.calls == ["decoder.final_layernorm forward reference/eager rms_norm", "pop"]
    fake.calls.clear()
    mlp_runner("auto")(*tensors(grad=False))
    assert "decoder.layers.0.mlp forward linear/torch linear" in fake.calls


def test_deferred_weight_gradients_have_ranges_of_their_own(fake):
    x, w1, w2 = tensors()
    sink = WeightGrads({1: w1, 2: w2}, defer=True)
    mlp_runner()(x, w1, w2, sink=sink).sum().backward()
    assert not [text for text in fake.calls if "wgrad" in text]
    fake.calls.clear()
    assert sink.run_deferred()
    assert [text.split()[3] for text in fake.calls if text != "pop"] == ["linear_wgrad"] * 2 and fake.depth == 0


@pytest.mark.parametrize("op", ["swiglu", "swiglu_bwd"])
def test_ranges_are_closed_where_a_launch_raises(fake, monkeypatch, op):
    real = program.compiled_launch

    def fail(*_):
        raise MemoryError("out of memory")

    monkeypatch.setattr(
        program, "compiled_launch", lambda planned, arch: fail if op in planned.ops else real(planned, arch)
    )
    run = mlp_runner()
    with pytest.raises(MemoryError):
        run(*tensors()).sum().backward()
    assert (
        fake.calls[-2:]
        == [f"decoder.layers.0.mlp {'backward' if '_' in op else 'forward'} reference/eager {op}", "pop"]
        and fake.depth == 0
    )


def test_results_are_the_same_with_ranges_and_without(fake, monkeypatch):
    def gradients():
        leaves = tensors()
        out = mlp_runner("auto")(*leaves)
        out.square().sum().backward()
        return [out, *(t.grad for t in leaves)]

    with_ranges = gradients()
    monkeypatch.setattr(nvtx, "ranges", lambda: None)
    assert fake.calls and all(torch.equal(a, b) for a, b in zip(with_ranges, gradients(), strict=True))


def test_generated_code_holds_no_trace_of_ranges_where_they_are_off(fake, monkeypatch):
    def built():
        run = mlp_runner()
        leaves = tensors()
        for sink in (None, WeightGrads({1: leaves[1], 2: leaves[2]}, defer=True)):
            run(*leaves, sink=sink).sum().backward()
        return list(programs(run))

    assert all({"_push", "_pop"} <= set(p.__code__.co_names) for p in built())
    monkeypatch.setattr(nvtx, "ranges", lambda: None)
    off = built()
    assert len(off) >= 5 and not any({"_push", "_pop"} & {*p.__code__.co_names, *p.__globals__} for p in off)
    assert all(len(p.__code__.co_exceptiontable) == 0 for p in off), "no try block either"


def test_a_plan_that_is_one_library_call_runs_as_a_program_with_ranges(fake, monkeypatch):
    names, build = linear_graph(TensorParallel(), column=True, bias=False)

    def entry():
        run = Runner(build, names, policy=Policy(engine="linear/torch"), name="head")
        run(*(torch.randn(s, requires_grad=True) for s in ((6, 8), (4, 8)))).sum().backward()
        return next(iter(run.entries.values()))

    assert entry().library is None
    assert sorted(text for text in fake.calls if text != "pop") == [
        "head backward linear/torch linear_dgrad",
        "head backward linear/torch linear_wgrad",
        "head forward linear/torch linear",
    ]
    monkeypatch.setattr(nvtx, "ranges", lambda: None)
    assert entry().library is not None, "off, the library's own backward runs"


def test_without_cuda_the_setting_is_ignored_with_one_warning(asked, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.warns(UserWarning, match="LAYERPLAN_NVTX = 1 is ignored") as seen:
        assert nvtx.ranges() is None
        mlp_runner()(*tensors()).sum().backward()
    assert len([w for w in seen if "NVTX" in str(w.message)]) == 1


def test_with_cuda_the_ranges_are_torchs(asked, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert nvtx.ranges() == (torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop)


def test_ranges_are_off_unless_asked_for(monkeypatch):
    monkeypatch.setattr(nvtx, "settings", lambda: Settings())
    nvtx.ranges.cache_clear()
    try:
        assert nvtx.ranges() is None
    finally:
        nvtx.ranges.cache_clear()
    assert settings_module.VARIABLES["LAYERPLAN_NVTX"] and Settings.from_env({"LAYERPLAN_NVTX": "1"}).nvtx
