"""CPU mode beyond dense fp32: experts across ranks, fp16 that overflows, Transformer Engine importable."""

import math
import os

import pytest
from harness import HERE, ROOT, run_ranks
from test_megatron_cpu_mode import megatron_on_cpu

OVERFLOW = 2.0**40  # a loss scale that no fp16 gradient survives
MOE = {
    "num_moe_experts": 4, "moe_router_dtype": "fp32", "moe_router_topk": 2, "moe_ffn_hidden_size": 32,
    "moe_aux_loss_coeff": 1e-2, "moe_router_load_balancing_type": "aux_loss", "expert_tensor_parallel_size": 1,
    "moe_shared_expert_intermediate_size": 32, "expert_model_parallel_size": 2,
}  # fmt: skip


def _error(action):
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _train_experts(dispatcher, steps):
    """Megatron's local experts, two of four on each rank."""
    from megatron.core import parallel_state as mpu
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from parity_model import build, dense_config

    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(1, 1, expert_model_parallel_size=2, expert_tensor_parallel_size=1)
    model_parallel_cuda_manual_seed(123)
    run = build(dense_config(**MOE, moe_token_dispatcher_type=dispatcher), distributed_optimizer=True)
    return [run.step() for _ in range(steps)]


def _experts(steps):
    from layerplan.integration.megatron import compat

    with megatron_on_cpu():
        seen = {dispatcher: _train_experts(dispatcher, steps) for dispatcher in ("alltoall", "allgather")}
        compat._release("cpu-dispatch-splits")
        seen["without"] = _error(lambda: _train_experts("alltoall", 1))
        compat.apply("cpu-dispatch-splits")
    return seen


def _half():
    """fp16 with dynamic loss scale, per optimiser: good steps, two that overflow, and a good one again."""
    import torch
    from parity_model import build, dense_config, layout

    def scenario(distributed):
        layout()
        config = dense_config(fp16=True, params_dtype=torch.half, pipeline_dtype=torch.half)
        run = build(
            config, distributed_optimizer=distributed, initial_loss_scale=2.0**8, min_loss_scale=1.0, hysteresis=2
        )
        scaler = getattr(run.optimizer, "chained_optimizers", [run.optimizer])[0].grad_scaler
        good = [run.step() for _ in range(4)]
        held = [p.detach().clone() for p in run.gpt.parameters()]
        skipped, scales = [], []
        scaler._scale.fill_(OVERFLOW)
        for _ in range(2):
            try:
                run.step()
            except TypeError:  # a skipped step has no gradient norm
                skipped.append(not run.good)
            scales.append(scaler.scale.item())
        same = all(torch.equal(a, b) for a, b in zip(held, run.gpt.parameters(), strict=True))
        scaler._scale.fill_(2.0**8)
        return {"good": good, "skipped": skipped, "scales": scales, "same": same, "after": run.step(), "last": run.good}

    with megatron_on_cpu():
        return {str(distributed): scenario(distributed) for distributed in (False, True)}


def _beside_transformer_engine(steps):
    import megatron.core.optimizer as host
    from megatron.core.optimizer import clip_grads
    from parity_model import build, layout

    from layerplan.integration.megatron import optimizer as ours

    seen = {"theirs": [host.Adam.__module__, clip_grads.l2_norm_impl.__module__]}
    left = ours.install_optimizer()
    seen["left"] = [left.installed, left.reason]
    with megatron_on_cpu():
        for distributed in (False, True):
            layout()
            run = build(distributed_optimizer=distributed)
            seen[f"distributed {distributed}"] = [run.step() for _ in range(steps)]
        seen["experts"] = _train_experts("alltoall", steps)
    seen["back"] = [host.Adam.__module__, clip_grads.l2_norm_impl.__module__]
    return seen


def _learns(rows):
    losses = [loss for loss, _ in rows]
    assert all(math.isfinite(x) for row in rows for x in row) and losses[-1] < losses[0] - 0.1, rows


@pytest.fixture(scope="module")
def experts():
    return run_ranks("test_megatron_cpu_variants:_experts", world=2, timeout=150, steps=6)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_local_experts_train_across_two_ranks(experts, dispatcher):
    _learns(experts[0][dispatcher])
    assert [norm for _, norm in experts[0][dispatcher]] == [norm for _, norm in experts[1][dispatcher]]


def test_dispatchers_agree_on_the_loss(experts):
    for one, other in zip(experts[0]["alltoall"], experts[0]["allgather"], strict=True):
        assert math.isclose(one[0], other[0], rel_tol=1e-4)


def test_dispatch_between_ranks_fails_without_its_patch(experts):
    assert "TypeError: alltoall_base()" in experts[0]["without"]  # it is given tensors for the splits


@pytest.fixture(scope="module")
def half():
    return run_ranks("test_megatron_cpu_variants:_half", world=2, timeout=150)


@pytest.mark.parametrize("distributed", ["False", "True"])
def test_fp16_overflow_skips_the_step_and_lowers_the_loss_scale(half, distributed):
    for rank in half:
        seen = rank[distributed]
        _learns(seen["good"])
        assert seen["skipped"] == [True, True] and seen["same"]
        assert seen["scales"] == [OVERFLOW, OVERFLOW / 2]  # hysteresis: the second overflow in a row counts
        assert seen["last"] and all(math.isfinite(x) for x in seen["after"])


@pytest.fixture(scope="module")
def beside():
    path = os.pathsep.join([str(HERE / "fake"), str(ROOT), str(HERE)])
    function = "test_megatron_cpu_variants:_beside_transformer_engine"
    return run_ranks(function, world=2, timeout=150, env={"PYTHONPATH": path}, steps=4)


def test_cpu_mode_trains_where_transformer_engine_can_be_imported_but_not_used(beside):
    for rank in beside:
        assert rank["theirs"] == ["transformer_engine.fake"] * 2, "the fake package was not taken"
        _learns(rank["distributed False"])
        _learns(rank["distributed True"])
        _learns(rank["experts"])


def test_transformer_engines_optimiser_is_left_alone_outside_and_back_afterwards(beside):
    installed, reason = beside[0]["left"]
    assert not installed and "transformer_engine" in reason
    assert beside[0]["back"] == beside[0]["theirs"]
