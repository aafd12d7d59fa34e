"""Two policies of one model on one batch: where they agree, and which module is named where one of them is wrong."""

import dataclasses
import json

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from layerplan.integration.planner import oracle, plan_file, program
from layerplan.integration.planner.compare import Planned, Result, _kept, compare, side_of
from layerplan.integration.planner.plan_file import Pins, PlanFileError
from layerplan.integration.planner.policy import Policy
from layerplan.integration.planner.records import Records
from layerplan.integration.planner.runner import Runner, WeightGrads
from layerplan.modules.base import PlannedModule
from layerplan.modules.graphs import Activation, TensorParallel, attention_graph, mlp_graph
from layerplan.modules.loss import CrossEntropy
from layerplan.modules.norm import Norm

torch.set_num_threads(1)
WIDTH, ROWS = 16, 24


class Mlp(PlannedModule):
    """A gated MLP as one plan, its weight gradients returned, or added to float32 buffers at once (``fuse``) or
    later (``defer``)."""

    def __init__(self, fuse=False, defer=False):
        super().__init__()
        self.fc1, self.fc2 = (torch.nn.Parameter(torch.randn(s) * 0.2) for s in ((2 * WIDTH, WIDTH), (WIDTH, WIDTH)))
        self.sink = WeightGrads({1: self.fc1, 2: self.fc2}, fuse=fuse, defer=defer) if fuse or defer else None
        for p in (self.fc1, self.fc2) if fuse else ():
            p.main_grad, p.grad_added_to_main_grad = torch.zeros(p.shape), False

    def forward(self, x):
        names, build = mlp_graph(TensorParallel(), Activation(), bias=False, row_weight=False)
        return self.planned(("mlp",), names, build)(x, self.fc1, self.fc2, sink=self.sink)


class Core(PlannedModule):
    """Attention with a dropout whose seed is drawn from the global generator."""

    def forward(self, x):
        q = x.view(2, -1, 2, x.shape[-1] // 2)
        seed = torch.randint(0, 2**62, (2,), dtype=torch.int64)
        names = ("q", "k", "v", "seed", "offset")
        build = attention_graph(names, {"layout": "bshd", "causal": True, "dropout": 0.3})
        return self.planned(("core",), names, build)(q, q, q, seed[:1], seed[1:]).flatten(2).view(x.shape)


class Model(torch.nn.Module):
    """Three MLPs with residual adds between them and a norm behind."""

    def __init__(self, *, core=False, recompute=False, **kw):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.ModuleDict({"mlp": Mlp(**kw)}) for _ in range(3)])
        self.core, self.final, self.recompute = Core() if core else torch.nn.Identity(), Norm(WIDTH), recompute

    def forward(self, x):
        x = self.core(x)
        for layer in self.layers:
            x = x + (checkpoint(layer["mlp"], x, use_reentrant=True) if self.recompute else layer["mlp"](x))
        return self.final(x)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def step_on(model, dtype=torch.float32):
    """A step of ``model`` on one batch."""
    batch, goal = (torch.randn(ROWS, WIDTH).to(dtype) for _ in range(2))

    def step(m):
        loss = (m(batch.clone().requires_grad_()) - goal).float().square().mean()
        loss.backward()
        for module in m.modules():
            while getattr(module, "sink", None) is not None and module.sink.run_deferred():
                pass
        return loss.detach()

    return step


def wrong_engine(monkeypatch, op, factor=1.01):
    """Engines other than the reference scale every result of ``op``."""
    real = program.compiled_launch

    def compiled(planned, arch):
        launch = real(planned, arch)
        if op not in planned.ops or planned.engine == "reference/eager":
            return launch

        def scaled(*tensors):
            out = launch(*tensors)
            for t in out if isinstance(out, tuple) else (out,):
                t.mul_(factor)
            return out

        return scaled

    monkeypatch.setattr(program, "compiled_launch", compiled)


MLPS = [f"layers.{i}.mlp" for i in range(3)]


# ---- where they agree ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kind", [{}, {"fuse": True}, {"defer": True}, {"fuse": True, "defer": True}, {"recompute": True}]
)
def test_auto_and_reference_agree_and_rows_stand_in_the_order_of_execution(dtype, kind):
    model = Model(**kind).to(dtype)
    found = compare(model, step_on(model, dtype), "auto", "reference")
    assert found.ok and found.first is None, str(found)
    order = list(dict.fromkeys((r.direction, r.module) for r in found.rows))
    assert [m for d, m in order if d == "forward"] == [*MLPS, "final"]
    assert [m for d, m in order if d == "backward"] == ["final", *MLPS[::-1]]
    assert [d for d, _ in order] == ["forward"] * 4 + ["backward"] * 4
    assert {r.tensor for r in found.rows if r.module == MLPS[0]} == {
        "output",
        "gradient of x",
        "gradient of fc1",
        "gradient of fc2",
    }
    (weight,) = [r for r in found.rows if (r.module, r.tensor) == (MLPS[0], "gradient of fc1")]
    assert weight.dtype == ("float32" if kind.get("fuse") else str(dtype).removeprefix("torch."))
    assert all(r.a.errors.largest > 0 and r.limit.largest > 0 for r in found.rows), "nothing is compared with itself"
    assert "linear/torch" in weight.a.engines and weight.b.engines == "reference/eager"
    assert found.loss[0] == pytest.approx(found.loss[1], rel=1e-2) and found.grad_norm[0] == pytest.approx(
        found.grad_norm[1], rel=2e-2
    )


def test_a_recomputed_call_is_compared_in_both_passes():
    model = Model(recompute=True)
    found = compare(model, step_on(model), "auto", "reference")
    assert [
        (r.call, r.direction) for r in found.rows if r.module == MLPS[1] and r.tensor in ("output", "gradient of x")
    ] == [(0, "forward"), (1, "forward"), (1, "backward")]


def test_both_sides_draw_the_same_dropout_masks_and_each_call_keeps_its_own():
    model = Model(core=True)
    found = compare(model, step_on(model), "reference", Policy("reference"))
    assert found.ok and found.loss[0] == found.loss[1] and found.grad_norm[0] == found.grad_norm[1]
    rows = [r for r in found.rows if r.module == "core"]
    assert {r.tensor for r in rows} == {"output", "gradient of q", "gradient of k", "gradient of v"}
    assert all(r.a.errors == r.b.errors for r in rows)


class Logits(torch.nn.Module):
    """An output layer and its loss as one plan."""

    def __init__(self):
        super().__init__()
        self.weight, self.loss = torch.nn.Parameter(torch.randn(64, WIDTH)), CrossEntropy(64)

    def forward(self, x):
        return self.loss.linear(x, self.weight, torch.arange(ROWS))


@pytest.mark.parametrize("factor", [1.0, 1.05])
def test_logits_in_bf16_are_right_and_a_wrong_loss_of_them_is_still_named(factor, monkeypatch):
    wrong_engine(monkeypatch, "linear_cross_entropy", factor)
    model = Logits().bfloat16()

    def step(m):
        loss = m(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()).mean()
        loss.backward()
        return loss.detach()

    found = compare(model, step, Policy(engine="loss/chunked"), "reference")
    assert {r.a.engines for r in found.rows} == {"loss/chunked"} and len(found.rows) == 2
    assert [r.tensor for r in found.rows if not r.ok] == ([] if factor == 1.0 else ["output", "gradient of weight"]), str(found)


def test_the_model_is_as_it_was_before():
    model = Model(core=True, fuse=True)
    step = step_on(model)
    model.layers[0]["mlp"].set_policy(Policy("reference"), "named")
    step(model)
    parameters = [p.detach().clone() for p in model.parameters()]
    mlps = [layer["mlp"] for layer in model.layers]
    planning, generator = [m.planning() for m in mlps], torch.get_rng_state()
    runners = [m.plan_runners() for m in mlps]
    compare(model, step, "auto", "reference")
    assert [m.planning() for m in mlps] == planning and [m.plan_runners() for m in mlps] == runners
    assert all(type(r) is Runner for m in mlps for r in m.plan_runners()) and mlps[0]._plan_name == "named"
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), parameters, strict=True))
    assert all(p.grad is None and not getattr(p, "main_grad", torch.zeros(1)).any() for p in model.parameters())
    step(model)
    assert [m.plan_runners() for m in mlps] == runners


def test_a_plan_file_is_a_side(tmp_path):
    model = Model()
    step_on(model)(model)
    pins = plan_file.pins_of(p for layer in model.layers for r in layer["mlp"].plan_runners() for p in r.plans())
    rows = tuple((arch, key, dataclasses.replace(pin, engine="reference/eager")) for arch, key, pin in pins.rows)
    file = tmp_path / "plan.json"
    plan_file.save(file, Pins(rows))
    found = compare(model, step_on(model), str(file), "auto")
    assert found.ok and found.a == str(file)
    assert {r.a.engines for r in found.rows if r.module in MLPS} == {"reference/eager"}
    assert {r.b.engines for r in found.rows if r.module in MLPS} != {"reference/eager"}


# ---- where one is wrong ----------------------------------------------------------------------------------------------


def test_the_first_wrong_module_of_the_forward_is_named_with_its_engine(monkeypatch):
    wrong_engine(monkeypatch, "linear")
    model = Model()
    found = compare(model, step_on(model), {"layers.0.mlp": "reference"}, "reference")
    first = found.first
    assert (first.module, first.direction, first.tensor, first.call) == ("layers.1.mlp", "forward", "output", 0)
    assert not first.a.ok and first.b.ok and first.a.errors.largest > first.limit.largest > first.b.errors.largest
    assert {r.module for r in found.rows if not r.ok and r.direction == "forward"} == {"layers.1.mlp", "layers.2.mlp"}
    text = str(found)
    assert "first difference: layers.1.mlp, forward, output (float32, call 0)" in text
    assert "linear/torch" in first.a.engines and f"auto,layers.0.mlp=reference on {first.a.engines}: max error" in text
    assert "auto,layers.0.mlp=reference differs" in text and abs(found.loss[0] - found.loss[1]) > 1e-4


@pytest.mark.parametrize("fuse", [False, True])
def test_a_wrong_weight_gradient_is_named_in_the_order_of_the_backward(monkeypatch, fuse):
    wrong_engine(monkeypatch, "linear_wgrad")
    model = Model(fuse=fuse)
    found = compare(model, step_on(model), "reference", {"layers.2.mlp": "reference", "final": "reference"})
    assert all(r.ok for r in found.rows if r.direction == "forward") and found.loss[0] == pytest.approx(
        found.loss[1], rel=1e-5
    )
    first = found.first
    assert (first.module, first.direction, first.tensor) == ("layers.1.mlp", "backward", "gradient of fc1")
    assert first.a.ok and not first.b.ok and first.dtype == "float32"
    assert {r.tensor for r in found.rows if not r.ok} == {"gradient of fc1", "gradient of fc2"}
    assert {r.module for r in found.rows if not r.ok} == {"layers.1.mlp", "layers.0.mlp"}


def test_a_nan_is_a_difference_and_said(monkeypatch):
    wrong_engine(monkeypatch, "linear_dgrad", float("nan"))
    model = Model()
    found = compare(model, step_on(model), "auto", "reference")
    assert found.first.module == "layers.2.mlp" and found.first.tensor == "gradient of x"
    assert found.first.a.errors is None and "values are NaN" in found.first.a.fault and "values are NaN" in str(found)


def test_a_gradient_that_does_not_come_is_a_difference():
    class Forgetful(Planned):
        def replay(self, call):
            made = super().replay(call)
            return Result(made.outputs, tuple(None for _ in made.grads), made.engines)

    model = Model()
    found = compare(model, step_on(model), "auto", Forgetful("forgetful", Policy()))
    assert (found.first.module, found.first.tensor, found.first.b.fault) == (
        "final",
        "gradient of x",
        "no gradient came",
    )
    assert f"  forgetful on {found.first.b.engines}: no gradient came" in str(found).splitlines()


def test_a_module_that_one_side_has_not_is_held_against_the_reference_alone(monkeypatch):
    class Other:
        label = "other"

        def step(self, model, step, log):
            assert log is None, "the calls are those of layerplan's modules"
            return 1.0, 2.0

        def replay(self, call):
            return None

    model = Model()
    found = compare(model, step_on(model), Other(), "auto")
    assert found.ok and found.loss[0] == 1.0 and all(r.a.absent for r in found.rows)
    assert "other has no counterpart of layers.0-2.mlp, final" in str(found)
    wrong_engine(monkeypatch, "linear")
    found = compare(model, step_on(model), Other(), "auto")
    assert found.first.module == "layers.0.mlp" and "  other has no such module" not in str(found).splitlines()
    with pytest.raises(ValueError, match="neither runs layerplan's modules"):
        compare(model, step_on(model), Other(), Other())


def test_json_of_a_comparison_is_plain_and_whole(monkeypatch):
    wrong_engine(monkeypatch, "linear")
    model = Model()
    found = compare(model, step_on(model), "auto", "reference")
    data = json.loads(json.dumps(found.to_json()))
    assert set(data) == {"a", "b", "rows", "loss", "grad_norm", "ok", "first"} and data["ok"] is False
    assert len(data["rows"]) == len(found.rows) and data["first"]["module"] == "layers.0.mlp"
    row = data["rows"][0]
    assert set(row) == {"module", "call", "direction", "tensor", "dtype", "limit", "a", "b", "ok"}
    assert set(row["a"]) == {"errors", "fault", "engines", "ok", "absent"} and set(row["limit"]) == {"largest", "rms"}


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_sides_are_read_from_text():
    side = side_of(" strict , *.mlp=reference,final=auto", deterministic=True)
    assert side.policy == Policy("strict", True, (("*.mlp", "reference"), ("final", "auto")))
    assert side_of("*.mlp=reference").policy == Policy("auto", False, (("*.mlp", "reference"),))
    assert side_of(side) is side and side_of(Policy("strict")).label == "strict"
    assert side_of(Policy(engine="norm/torch")).label == "norm/torch"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fast", "'fast': must be one of auto, strict, reference"),
        ("auto,strict", "'strict': must be one of"),
        ("*.mlp=fast", r"'\*.mlp=fast'"),
        ("=auto", "'=auto'"),
        ("", "''"),
    ],
)
def test_a_text_that_is_no_side_is_refused_by_the_part_that_is_wrong(text, said):
    with pytest.raises(ValueError, match=said):
        side_of(text)


def test_a_plan_file_that_cannot_hold_is_refused(tmp_path):
    with pytest.raises(PlanFileError, match="no such file"):
        side_of(str(tmp_path / "none.json"))
    plan_file.save(tmp_path / "plan.json", Pins())
    with pytest.raises(ValueError, match="reference leaves no choice"):
        side_of(f"reference,{tmp_path / 'plan.json'}")
    assert side_of(tmp_path / "plan.json").pins is not None


def test_a_plan_file_that_pins_nothing_of_the_model_is_refused_and_one_that_does_is_taken(tmp_path):
    model, other, file = Model(), Norm(WIDTH + 1), tmp_path / "plan.json"
    other(torch.randn(3, WIDTH + 1))
    plan_file.save(file, plan_file.pins_of(p for r in other.plan_runners() for p in r.plans()))
    with pytest.raises(ValueError, match=rf"^compare: b = {file}: 0 of \d+ pins for cpu hold here \(\d+ regions planned\): they were "
                                         r"written for another recipe, .*--arch cpu --save FILE"):  # fmt: skip
        compare(model, step_on(model), "auto", str(file))
    assert not model.layers[0]["mlp"].plan_runners() and "_pins" not in model.final.__dict__, "the model is as it was"
    step_on(model)(model)
    plan_file.save(file, plan_file.pins_of(p for r in model.final.plan_runners() for p in r.plans()))
    assert compare(model, step_on(model), "auto", str(file)).ok


def test_a_pattern_that_matches_no_module_is_refused_and_the_model_stays_as_it_was():
    model = Model()
    with pytest.raises(ValueError, match=r"\*\.mpl.*matches no layerplan module.*did you mean \*\.mlp"):
        compare(model, step_on(model), "auto", "auto,*.mpl=reference")
    assert all(type(r) is Runner for layer in model.layers for r in layer["mlp"].plan_runners())
    assert "_policy" not in model.layers[0]["mlp"].__dict__


def test_a_model_in_float64_and_one_without_layerplan_are_refused():
    model = Model().double()
    with pytest.raises(ValueError, match=r"layers\.0\.mlp computes in float64"):
        compare(model, step_on(model, torch.float64), "auto", "reference")
    model = torch.nn.Linear(WIDTH, WIDTH)
    with pytest.raises(ValueError, match="no module of layerplan ran"):
        compare(model, step_on(model), "auto", "reference")


# ---- parts -----------------------------------------------------------------------------------------------------------


def test_a_step_that_updates_parameters_is_refused():
    model = Model()
    step, optimizer = step_on(model), torch.optim.SGD(model.parameters(), 0.1)

    def training_step(m):
        loss = step(m)
        optimizer.step()
        return loss

    with pytest.raises(ValueError, match=r"step changes parameters \(layers\.0-2\.mlp\.fc1.*leave the optimiser out"):
        compare(model, training_step, "auto", "reference")


def test_kept_tensors_have_the_strides_of_the_originals_and_none_of_their_memory():
    base = torch.randn(4, 6, 8)
    for t in (
        base,
        base.transpose(0, 2),
        base[:, 1:5:2, 3:],
        torch.ones(()).expand(3, 4),
        base[:, :1].expand(4, 6, 8),
        torch.empty(0, 3),
    ):
        made = _kept(t)
        assert torch.equal(made, t) and made.stride() == t.stride() and made.dtype == t.dtype
        assert not t.numel() or made.untyped_storage().data_ptr() != t.untyped_storage().data_ptr()
    p = torch.nn.Parameter(base)
    assert _kept(p).data_ptr() == p.data_ptr() and not _kept(p).requires_grad


def test_errors_do_not_depend_on_how_much_is_looked_at_at_once(monkeypatch):
    a, r = torch.randn(7, 9), torch.randn(7, 9, dtype=torch.float64)
    whole, most = oracle.errors(a, r), oracle.limit(a.dtype, r, a)
    assert whole.largest == float((a.double() - r).abs().max())
    assert whole.rms == pytest.approx(float((a.double() - r).square().mean().sqrt()), rel=1e-12)
    monkeypatch.setattr(oracle, "_CHUNK", 5)
    parts = oracle.errors(a, r)
    assert parts.largest == whole.largest and parts.rms == pytest.approx(whole.rms, rel=1e-12)
    assert (
        oracle.limit(a.dtype, r, a).largest
        == most.largest
        == 2 * whole.largest + oracle.ulp(torch.float32, float(r.abs().max()))
    )
    a[3, 4] = float("inf")
    with pytest.raises(oracle.Wrong, match="1 infinities"):
        oracle.errors(a, r)


def test_measured_times_stay_those_of_each_module(monkeypatch):
    seen, own, real = [], Records(source="these"), Runner.__init__

    def noting(self, *args, records=None, **kwargs):
        seen.append(records)
        real(self, *args, records=records, **kwargs)

    monkeypatch.setattr(Runner, "__init__", noting)
    model = Model()
    for layer in model.layers:
        layer["mlp"].set_policy(Policy(), records=own)
    compare(model, step_on(model), "auto", "*.mlp=reference")
    assert len([r for r in seen if r is own]) == 4 * 3, "both steps, and each call by itself on both sides"
