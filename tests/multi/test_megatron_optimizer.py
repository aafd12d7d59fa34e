"""The optimiser pieces that stand in for Transformer Engine's and Apex's: numbers, interface, checkpoints."""

import math
import tempfile

import pytest
import torch
from harness import run_ranks
from test_megatron_cpu_mode import TinyRun, megatron_on_cpu

from layerplan.integration.megatron.optimizer import (
    FusedAdam,
    multi_tensor_applier,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_scale_tensor,
)

SHAPES = [(5, 3), (0,), (7,), (2, 3, 4)]


def _reference(start, grads, *, lr, betas, eps, weight_decay, adam_w_mode, bias_correction):
    """Adam as its paper states it, in fp64, one parameter."""
    p, m, v = start.double(), torch.zeros_like(start, dtype=torch.float64), torch.zeros_like(start, dtype=torch.float64)
    for t, grad in enumerate(grads, 1):
        g = grad.double() + (0.0 if adam_w_mode else weight_decay * p)
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        c1, c2 = (1 - betas[0] ** t, 1 - betas[1] ** t) if bias_correction else (1.0, 1.0)
        if adam_w_mode:
            p = p - lr * weight_decay * p
        p = p - lr * (m / c1) / ((v / c2).sqrt() + eps)
    return p


def _params_and_grads(steps, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    grads = [[torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES] for _ in range(steps)]
    return params, grads


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_fused_adam_follows_the_papers_formula(adam_w_mode, bias_correction):
    options = {"lr": 1e-2, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.1}
    params, grads = _params_and_grads(5)
    starts = [p.detach().clone() for p in params]
    optimizer = FusedAdam(params, **options, adam_w_mode=adam_w_mode, bias_correction=bias_correction)
    for row in grads:
        for param, grad in zip(params, row, strict=True):
            param.grad = grad
        optimizer.step()
    for i, (param, start) in enumerate(zip(params, starts, strict=True)):
        want = _reference(
            start, [row[i] for row in grads], **options, adam_w_mode=adam_w_mode, bias_correction=bias_correction
        )
        # five updates of fp32 rounding, each of a value of size about 1: 5 * 2^-24 * a few operations
        torch.testing.assert_close(param.detach().double(), want, rtol=0, atol=2e-6)


def test_multi_tensor_path_equals_the_fused_kernel():
    results = []
    for foreach in (False, True):
        params, grads = _params_and_grads(4)
        optimizer = FusedAdam(params, lr=1e-2, weight_decay=0.1)
        if foreach:
            optimizer._update = optimizer._update_foreach
        for row in grads:
            for param, grad in zip(params, row, strict=True):
                param.grad = grad
            optimizer.step()
        results.append([p.detach().clone() for p in params])
    for fused, plain in zip(*results, strict=True):
        torch.testing.assert_close(fused, plain, rtol=0, atol=1e-6)


def test_step_is_in_the_group_and_state_keys_are_those_of_megatrons_checkpoints():
    params, grads = _params_and_grads(1)
    optimizer = FusedAdam([{"params": params}, {"params": []}])
    for param, grad in zip(params, grads[0], strict=True):
        param.grad = grad
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 1 and "step" not in optimizer.param_groups[1]
    assert all(set(optimizer.state[p]) == {"exp_avg", "exp_avg_sq"} for p in params)


def test_resumed_adam_equals_the_uninterrupted_one_bitwise():
    def run(stop):
        params, grads = _params_and_grads(6)
        optimizer = FusedAdam(params, lr=1e-2, weight_decay=0.1)
        for i, row in enumerate(grads):
            if i == stop:
                saved = optimizer.state_dict()
                optimizer = FusedAdam(params, lr=1e-2, weight_decay=0.1)
                optimizer.load_state_dict(saved)
            for param, grad in zip(params, row, strict=True):
                param.grad = grad
            optimizer.step()
        return [p.detach().clone() for p in params]

    assert all(torch.equal(a, b) for a, b in zip(run(None), run(3), strict=True))


def test_adam_leaves_parameters_without_gradient_alone_and_casts_other_dtypes():
    params, grads = _params_and_grads(1)
    before = params[0].detach().clone()
    params[2].main_grad = None
    optimizer = FusedAdam(params, lr=1e-2)
    params[2].grad = grads[0][2]
    optimizer.step()
    assert torch.equal(params[0], before) and params[0] not in optimizer.state
    low, low_grads = _params_and_grads(1, torch.bfloat16)
    optimizer = FusedAdam(low, lr=1e-2)
    low[0].grad = low_grads[0][0]
    optimizer.step()
    assert optimizer.state[low[0]]["exp_avg"].dtype == torch.bfloat16


def test_adam_refuses_bad_options_all_at_once():
    params, _ = _params_and_grads(1)
    with pytest.raises(ValueError) as error:
        FusedAdam(params, lr=-1.0, betas=(0.9, 1.5), capturable=True, amsgrad=True, use_decoupled_grad=True)
    for word in ("lr = -1.0", "betas[1] = 1.5", "capturable", "amsgrad", "use_precision_aware_optimizer"):
        assert word in str(error.value)
    with pytest.raises(TypeError, match="exp_avg_dtype"):
        FusedAdam(params, exp_avg_dtype=torch.bfloat16)


def test_norm_is_that_of_all_tensors_together():
    tensors = [torch.randn(shape) for shape in SHAPES] + [torch.randn(9).bfloat16()]
    want = math.sqrt(sum(t.double().square().sum().item() for t in tensors))
    norm, each = multi_tensor_applier(multi_tensor_l2norm, torch.zeros(1, dtype=torch.int), [tensors], True)
    assert norm.shape == (1,) and norm.dtype == torch.float32 and norm.item() == pytest.approx(want, rel=1e-6)
    assert each.shape == (5,) and each[1] == 0
    tensors[0][0, 0] = float("nan")
    assert (
        multi_tensor_l2norm(0, None, [tensors])[0].isnan().all() and multi_tensor_l2norm(0, None, [tensors])[1] is None
    )


@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("target", ["in place", "same dtype", "other dtype"])
@pytest.mark.parametrize("bad", [None, float("inf"), float("nan")])
def test_scale_writes_the_product_and_reports_non_finite_values(scale, target, bad):
    source = [torch.randn(shape) for shape in SHAPES]
    if bad is not None:
        source[2][3] = bad
    want = [s * scale for s in source]
    dtype = torch.bfloat16 if target == "other dtype" else torch.float32
    out = source if target == "in place" else [torch.full_like(s, 7.0, dtype=dtype) for s in source]
    flag = torch.zeros(1, dtype=torch.int)
    multi_tensor_applier(multi_tensor_scale, flag, [source, out], scale)
    assert all(torch.equal(o, w.to(dtype)) or o.isnan().any() for o, w in zip(out, want, strict=True))
    assert all(torch.equal(out[i], want[i].to(dtype)) for i in (0, 1, 3))
    assert flag.item() == (bad is not None)


def test_scale_by_a_tensor_stays_on_the_device_and_leaves_an_earlier_flag():
    tensors, flag = [torch.ones(3), torch.ones(2, 2)], torch.ones(1, dtype=torch.int)
    multi_tensor_applier(multi_tensor_scale_tensor, flag, [tensors, tensors], torch.tensor([0.5]))
    assert all((t == 0.5).all() for t in tensors) and flag.item() == 1


def _round_trip(fmt, *, fresh=False, **case):
    """Losses and norms of two steps after saving, and of two steps after loading that checkpoint."""
    import torch
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as mpu

    def state(run, loading=False):
        meta = {
            "distrib_optim_sharding_type": fmt,
            "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
        }
        model = run.gpt.sharded_state_dict(metadata=meta)
        optimizer = run.optimizer.sharded_state_dict(model, is_loading=loading, metadata=meta)
        return {"model": model, "optimizer": optimizer}

    run = TinyRun(distopt=True, **case)
    run.steps(2)
    folder = [tempfile.mkdtemp() if torch.distributed.get_rank() == 0 else None]
    torch.distributed.broadcast_object_list(folder)
    dist_checkpointing.save(state(run), folder[0])
    after_save = run.steps(2)
    if fresh:
        run = TinyRun(distopt=True, **case)
    with torch.no_grad():
        for param in run.model.parameters():
            param.add_(0.1)
    loaded = dist_checkpointing.load(state(run, loading=True), folder[0])
    run.gpt.load_state_dict(loaded["model"])
    run.optimizer.load_state_dict(loaded["optimizer"])
    return [after_save, run.steps(2)]


def _checkpoints():
    from layerplan.integration.megatron import compat
    from layerplan.integration.megatron import optimizer as ours

    def error(action):
        try:
            action()
        except Exception as raised:
            return f"{type(raised).__name__}: {raised}"
        return "no error"

    seen = {}
    with megatron_on_cpu():
        for fmt in ("fully_reshardable", "dp_reshardable"):
            for bf16 in (False, True):
                seen[f"{fmt} {'bf16' if bf16 else 'fp32'}"] = _round_trip(fmt, bf16=bf16)
            seen[f"{fmt} fresh"] = _round_trip(fmt, fresh=True)
        with _without(compat, "distopt-load-leaf"):
            seen["no leaf guard"] = error(lambda: _round_trip("dp_reshardable"))
        with _without(compat, *compat.OPTIMIZER):
            seen["torch adam"] = error(lambda: _round_trip("fully_reshardable"))
            import megatron.core.optimizer as host

            before = host.Adam
            host.USING_PYTORCH_OPTIMIZER = False  # as where TE or Apex was imported
            left = ours.install_optimizer()
            host.USING_PYTORCH_OPTIMIZER = True
            seen["left alone"] = [left.installed, left.reason, host.Adam is before]
            put = ours.install_optimizer()
            seen["installed"] = [put.installed, put.reason, host.Adam is ours.FusedAdam]
            put.undo()
            seen["undone"] = host.Adam is before and host.USING_PYTORCH_OPTIMIZER
    return seen


class _without:
    """Takes patches of the mode out of force for a block, to show what they are for."""

    def __init__(self, compat, *names):
        self.compat, self.names = compat, names

    def __enter__(self):
        for name in self.names:
            self.compat._release(name)

    def __exit__(self, *_):
        self.compat.apply(*self.names)


@pytest.fixture(scope="module")
def checkpoints():
    return run_ranks("test_megatron_optimizer:_checkpoints", world=2, timeout=200)


@pytest.mark.parametrize("case", ["fp32", "bf16", "fresh"])
@pytest.mark.parametrize("fmt", ["fully_reshardable", "dp_reshardable"])
def test_steps_after_loading_equal_steps_after_saving_bitwise(checkpoints, fmt, case):
    for rank in checkpoints:
        after_save, after_load = rank[f"{fmt} {case}"]
        assert after_save == after_load and all(math.isfinite(x) for row in after_save for x in row)


def test_loading_into_fp32_shards_fails_without_the_guard(checkpoints):
    assert "RuntimeError" in checkpoints[0]["no leaf guard"] and "leaf" in checkpoints[0]["no leaf guard"]


def test_torchs_adam_breaks_megatrons_distributed_checkpoint(checkpoints):
    assert "KeyError: 'step'" in checkpoints[0]["torch adam"]


def test_install_leaves_te_and_apex_alone_and_says_so(checkpoints):
    installed, reason, unchanged = checkpoints[0]["left alone"]
    assert not installed and "left as it is" in reason and unchanged


def test_install_is_taken_back(checkpoints):
    installed, reason, ours = checkpoints[0]["installed"]
    assert installed and "neither Transformer Engine nor Apex" in reason and ours and checkpoints[0]["undone"]
