"""The Function that runs plans: gradient accumulation, deferral, frozen and tied weights, re-entry, refusals."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from layerplan.integration import ops
from layerplan.integration.graph.ir import GraphBuilder
from layerplan.integration.planner import program
from layerplan.integration.planner.policy import Policy
from layerplan.integration.planner.runner import Runner, WeightGrads
from layerplan.integration.planner.shapes import SpecMaker
from tests import oracle
from tests.cases.graphs import mlp

torch.set_num_threads(1)


def mlp_runner(**kw):
    return Runner(mlp, ("x", "w1", "w2"), policy=Policy(), name="mlp", **kw)


def linear_runner(**kw):
    def build(x, w):
        b, s = GraphBuilder(), SpecMaker()
        return b.build([b.op("linear", x=b.input("x", s(x, "*t k!")), weight=b.input("weight", s(w, "n! k!"), weight=True))])

    return Runner(build, ("x", "weight"), policy=Policy(), name="linear", **kw)


def weights(dtype=torch.float32, main_grad=False, flag=True, seed=0):
    gen = torch.Generator().manual_seed(seed)
    ps = [torch.nn.Parameter((torch.randn(s, generator=gen) * 0.3).to(dtype)) for s in ((16, 8), (8, 8))]
    for p in ps:
        if main_grad:
            p.main_grad = torch.zeros(p.shape)
        if flag:
            p.grad_added_to_main_grad = False
    return ps


def plain(x, w1, w2):
    a, b = (x @ w1.T).chunk(2, -1)
    return (torch.nn.functional.silu(a) * b) @ w2.T


def batch(seed=1, rows=6, dtype=torch.float32):
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed)).to(dtype)


def truth(x, ps, dtype=torch.float32):
    """(dx, dw1, dw2) by PyTorch's autograd in ``dtype``."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in (x, *ps)]
    return torch.autograd.grad(plain(*leaves).sum(), leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_gradients_are_added_to_main_grad_over_micro_batches(dtype):
    ps, run = weights(dtype, main_grad=True), mlp_runner()
    sink = WeightGrads({1: ps[0], 2: ps[1]}, fuse=True)
    exact, peer = ([torch.zeros(p.shape, dtype=d) for p in ps] for d in (torch.float64, torch.float32))
    for p in ps:
        p.zero_out_wgrad = p is ps[0]
    for step in range(3):
        x = batch(step, dtype=dtype).requires_grad_()
        run(x, *ps, sink=sink).sum().backward()
        for sums, kind in ((exact, torch.float64), (peer, dtype)):
            for w, g in zip(sums, truth(x, ps, kind)[1:], strict=True):
                w += g
    for p, r, theirs in zip(ps, exact, peer, strict=True):
        oracle.compare(p.main_grad, r, theirs, f"main_grad of {list(p.shape)}")
        assert p.main_grad.dtype == torch.float32 and p.grad_added_to_main_grad is True
        assert p.grad.dtype == dtype and p.grad.shape == p.shape
    assert not ps[0].grad.any(), "zero_out_wgrad asks for zeros"


def test_fusion_is_off_without_main_grad_or_without_the_flag():
    for kw in ({"main_grad": False}, {"main_grad": True, "flag": False}):
        ps, x = weights(**kw), batch()
        mlp_runner()(x, *ps, sink=WeightGrads({1: ps[0], 2: ps[1]}, fuse=True)).sum().backward()
        for p, g in zip(ps, truth(x, ps)[1:], strict=True):
            torch.testing.assert_close(p.grad, g, atol=1e-5, rtol=1e-5)
            assert not kw["main_grad"] or not p.main_grad.any()


def test_fused_and_unfused_positions_mix():
    ps, x = weights(main_grad=True), batch().requires_grad_()
    del ps[1].main_grad
    mlp_runner()(x, *ps, sink=WeightGrads({1: ps[0], 2: ps[1]}, fuse=True)).sum().backward()
    dx, d1, d2 = truth(x, ps)
    torch.testing.assert_close(ps[0].main_grad, d1, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ps[1].grad, d2, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(x.grad, dx, atol=1e-5, rtol=1e-5)
    assert ps[1].grad_added_to_main_grad is False


@pytest.mark.parametrize("fuse", [False, True])
def test_deferred_weight_gradients_wait_and_run_in_order(fuse):
    ps, run = weights(main_grad=fuse), mlp_runner()
    sink = WeightGrads({1: ps[0], 2: ps[1]}, fuse=fuse, defer=True)
    xs = [batch(s).requires_grad_() for s in range(2)]
    for x in xs:
        run(x, *ps, sink=sink).sum().backward()
        torch.testing.assert_close(x.grad, truth(x, ps)[0], atol=1e-5, rtol=1e-5)
    assert all(p.grad is None for p in ps) and (not fuse or not ps[0].main_grad.any()), "nothing before it is asked for"
    total = [torch.zeros(p.shape) for p in ps]
    for x in xs:
        assert sink.run_deferred()
        for t, g in zip(total, truth(x, ps)[1:], strict=True):
            t += g
        for p, t in zip(ps, total, strict=True):
            torch.testing.assert_close(p.main_grad if fuse else p.grad, t, atol=1e-5, rtol=1e-5)
    assert not sink.run_deferred()


def test_frozen_weights_get_no_gradient_and_others_do():
    ps, x = weights(), batch().requires_grad_()
    ps[0].requires_grad_(False)
    mlp_runner()(x, *ps).sum().backward()
    assert ps[0].grad is None
    dx, _, d2 = truth(x, ps)
    torch.testing.assert_close(x.grad, dx, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ps[1].grad, d2, atol=1e-5, rtol=1e-5)
    frozen = [p.requires_grad_(False) for p in ps]
    assert not mlp_runner()(batch(), *frozen).requires_grad


def test_tied_weights_collect_both_gradients():
    w = torch.nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(3)) * 0.3)
    x = batch().requires_grad_()
    ops.linear(ops.gelu(ops.linear(x, w)), w).sum().backward()
    ref, xr = w.detach().clone().requires_grad_(), x.detach().clone().requires_grad_()
    (torch.nn.functional.gelu(xr @ ref.T) @ ref.T).sum().backward()
    torch.testing.assert_close(w.grad, ref.grad, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(x.grad, xr.grad, atol=1e-5, rtol=1e-5)


def test_weight_used_twice_in_one_graph_is_not_fused_but_right():
    def build(x, w):
        b, s = GraphBuilder(), SpecMaker()
        x_, w_ = b.input("x", s(x, "*t h!")), b.input("w", s(w, "h! h!"), weight=True)
        return b.build([b.op("linear", x=b.op("linear", x=x_, weight=w_), weight=w_)])

    w = torch.nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(3)) * 0.3)
    w.main_grad, w.grad_added_to_main_grad = torch.zeros(8, 8), False
    x = batch()
    Runner(build, ("x", "w"), policy=Policy())(x, w, sink=WeightGrads({1: w}, fuse=True)).sum().backward()
    ref = w.detach().clone().requires_grad_()
    ((x @ ref.T) @ ref.T).sum().backward()
    torch.testing.assert_close(w.grad + w.main_grad, ref.grad, atol=1e-5, rtol=1e-5)
    assert w.grad_added_to_main_grad is bool(w.main_grad.any())


def test_retain_graph_gives_the_same_gradient_again():
    ps, x = weights(), batch().requires_grad_()
    y = mlp_runner()(x, *ps).sum()
    first = torch.autograd.grad(y, (x, *ps), retain_graph=True)
    second = torch.autograd.grad(y, (x, *ps))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, (x, *ps))


def test_double_backward_is_refused_with_a_clear_error():
    x = batch().requires_grad_()
    for _ in range(2):  # the first backward plans, later ones go without that step
        with pytest.raises(RuntimeError, match="double backward"):
            torch.autograd.grad(ops.swiglu(x).sum(), x, create_graph=True)
        torch.autograd.grad(ops.swiglu(x).sum(), x)


def test_one_library_call_is_differentiated_twice_as_torch_does():
    gen = torch.Generator().manual_seed(0)
    leaves = [torch.randn(*s, generator=gen, dtype=torch.float64, requires_grad=True) for s in ((6, 8), (4, 8))]

    def second(linear):
        first = torch.autograd.grad(linear(*leaves).pow(3).sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    for a, b in zip(second(ops.linear), second(torch.nn.functional.linear), strict=True):
        assert torch.equal(a, b) and a.any()


def test_torch_func_transforms_are_refused_except_through_one_library_call():
    x, w = batch(), torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"swiglu: torch\.func transforms.*not offered"):
            torch.func.grad(lambda t: ops.swiglu(t).sum())(x)
    torch.testing.assert_close(torch.func.grad(lambda t: ops.linear(t, w).sum())(x), w.sum(0).expand(6, 8))


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_one_library_call_is_left_to_its_own_autograd_and_gives_what_the_plan_gives(needs):
    runner = linear_runner()
    x, w = (t.requires_grad_(n) for t, n in zip((batch(), torch.randn(4, 8)), needs, strict=True))
    dy = torch.randn(6, 4)
    wanted = [t for t in (x, w) if t.requires_grad]
    y = runner(x, w)
    library = torch.autograd.grad(y, wanted, dy)
    assert "Mm" in y.grad_fn.name() or "Addmm" in y.grad_fn.name(), y.grad_fn.name()
    own = runner(x, w, sink=WeightGrads({}))
    assert "linear" in own.grad_fn.name()
    torch.testing.assert_close(y, own, rtol=0, atol=0)
    for a, b in zip(library, torch.autograd.grad(own, wanted, dy), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_plan_with_two_engines_or_a_save_policy_is_not_left_to_a_library():
    x, w, b = batch().requires_grad_(), torch.randn(4, 8, requires_grad=True), torch.randn(4, requires_grad=True)
    assert "linear" in ops.linear(x, w, b).grad_fn.name()  # the bias gradient is another engine's
    again = linear_runner(recompute=frozenset({"linear"}))
    assert "linear" in again(x, w).grad_fn.name()


def test_saved_tensor_that_was_changed_in_place_is_an_error():
    x, w = batch().requires_grad_(), torch.randn(4, 8, requires_grad=True)
    h = x * 1
    y = ops.linear(h, w)
    h.add_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        y.sum().backward()


def test_inputs_without_rows_and_strided_inputs_work_and_plans_are_reused():
    ps, run = weights(), mlp_runner()
    for rows in (0, 1, 5, 6, 7):
        x = batch(rows=rows).requires_grad_()
        run(x, *ps).sum().backward()
        assert x.grad.shape == (rows, 8)
    wide = torch.randn(6, 16)[:, ::2]
    torch.testing.assert_close(run(wide, *ps), plain(wide, *ps), atol=1e-5, rtol=1e-5)
    plans = {id(e.plan) for k, e in run.entries.items()}
    assert len(run.entries) > len(plans), "token counts of one bucket share a plan"


def test_output_that_receives_no_gradient_counts_as_zero_even_where_nothing_is_saved():
    def build(x):
        b, s = GraphBuilder(), SpecMaker()
        return b.build(b.op("qkv_split", x=b.input("x", s(x, "*t n!")), groups=2, queries_per_group=1, head_dim=4))

    x = torch.randn(5, 24, requires_grad=True)
    q, k, _ = Runner(build, ("x",), policy=Policy())(x)
    (q.sum() + 2 * k.sum()).backward()
    want = torch.cat((torch.ones(4), 2 * torch.ones(4), torch.zeros(4))).repeat(2).expand(5, 24)
    assert torch.equal(x.grad, want)


def test_no_grad_and_training_modules_choose_the_same_forward():
    ps, x = weights(), batch()
    run = mlp_runner(training=True)
    with torch.no_grad():
        first = run(x, *ps)
    assert torch.equal(first, run(x, *ps).detach())
    frozen = [p.detach() for p in ps]
    run(x, *frozen)
    chosen = {tuple(r.engine for r in e.plan.forward.regions) for e in run.entries.values()}
    assert len(chosen) == 1


def test_recompute_of_activations_is_bitwise_invisible():
    got = []
    for recompute in (frozenset(), frozenset({"swiglu"})):
        ps, x = weights(), batch().requires_grad_()
        y = mlp_runner(recompute=recompute)(x, *ps)
        y.sum().backward()
        got.append((y.detach(), x.grad, ps[0].grad, ps[1].grad))
    assert all(torch.equal(a, b) for a, b in zip(*got, strict=True))


def test_torch_compile_sees_one_graph_break_and_gives_the_same_values():
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    w = torch.randn(8, 8, requires_grad=True)

    def model(x):
        return ops.linear(x * 2, w) + 1

    x = batch().requires_grad_()
    compiled = torch.compile(model, backend=counter)
    y = compiled(x)
    y.sum().backward()
    ref, wr = batch().requires_grad_(), w.detach().clone().requires_grad_()
    z = torch.nn.functional.linear(ref * 2, wr) + 1
    z.sum().backward()
    torch.testing.assert_close(y, z, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(x.grad, ref.grad, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(w.grad, wr.grad, atol=1e-6, rtol=1e-6)
    assert counter.frame_count == 2, "one graph before the plan, one after it"
    torch._dynamo.reset()


def test_meta_tensors_run_through_the_references():
    y = ops.rms_norm(torch.empty(3, 8, device="meta"), torch.empty(8, device="meta"), eps=1e-5, policy="reference")
    assert y.device.type == "meta" and y.shape == (3, 8)


def test_wrong_number_of_tensors_is_named():
    with pytest.raises(TypeError, match="takes 3 tensors"):
        mlp_runner()(batch())


def test_backward_frees_each_saved_tensor_after_its_last_reader(monkeypatch):
    """In front of the last weight gradient the activation and its argument are gone, though autograd's node is still
    running."""
    alive: dict[tuple[str, ...], list[bool]] = {}
    saved: list[StorageWeakRef] = []

    original = program.compiled_launch
    monkeypatch.setattr(program, "compiled_launch", lambda region, arch: _watching(original, region, arch, alive, saved))
    x, w1, w2 = (torch.randn(s, requires_grad=True) for s in ((6, 8), (16, 8), (8, 8)))
    y = Runner(mlp, ("x", "w1", "w2"), policy=Policy("reference"))(x, w1, w2)
    own = {t.data_ptr() for t in (x, w1, w2)}
    saved += [StorageWeakRef(t.untyped_storage()) for t in y.grad_fn.saved_tensors if t.data_ptr() not in own]
    assert len(saved) == 2, "the argument and the result of the activation"
    y.sum().backward()
    assert alive[("linear_dgrad",)] == [True, False] and alive[("linear_wgrad",)] == [True, False]


def _watching(compiled, region, arch, alive, saved):
    launch = compiled(region, arch)

    def run(*tensors):
        alive.setdefault(region.ops, []).append(any(not ref.expired() for ref in saved))
        return launch(*tensors)

    return run


def test_a_retained_graph_runs_backward_twice():
    x, w1, w2 = (torch.randn(s, requires_grad=True) for s in ((6, 8), (16, 8), (8, 8)))
    y = Runner(mlp, ("x", "w1", "w2"), policy=Policy("reference"))(x, w1, w2).sum()
    first = torch.autograd.grad(y, (x, w1, w2), retain_graph=True)
    second = torch.autograd.grad(y, (x, w1, w2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, (x, w1, w2))
