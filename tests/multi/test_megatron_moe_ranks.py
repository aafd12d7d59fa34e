"""Layers of experts across ranks: expert, tensor and sequence parallel, both dispatchers, a rank without tokens,
checkpoints between layouts."""

import math
import os
import tempfile

import pytest
from harness import run_ranks
from test_megatron_layers import _megatron, _metadata
from test_megatron_moe import NOISE, _digest, _local, _ours

DISPATCHERS = ("alltoall", "allgather")
STEPS, FEW = 20, 4
# every token chooses experts 0 and 1, which are all of rank 0
LOPSIDED = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.0,
}


def _lopsided(run):
    for layer in run.gpt.decoder.layers:
        bias = layer.mlp.router.expert_bias
        bias.copy_(bias.new_tensor([9.0, 9.0, -9.0, -9.0]))
    return run


def _expert_parallel():
    import torch
    from parity_model import layout

    from layerplan.integration.planner.report import report

    out = {}
    with _megatron():
        layout(ep=2)
        for dispatcher in DISPATCHERS:
            kind = {"moe_token_dispatcher_type": dispatcher}
            out[dispatcher] = [
                [run.step() for _ in range(STEPS)] for run in (_local(NOISE, **kind), _ours("layerplan", NOISE, **kind))
            ]
            runs = [
                _lopsided(run)
                for run in (
                    _local(NOISE, **kind, **LOPSIDED),
                    _ours("layerplan", NOISE, **kind, **LOPSIDED),
                    _ours("megatron", NOISE, **kind, **LOPSIDED),
                )
            ]
            out[f"{dispatcher} lopsided"] = [[run.step() for _ in range(STEPS)] for run in runs]
            out[f"{dispatcher} gradients"] = [[bool(p.main_grad.any()) for p in _expert_weights(run)] for run in runs]
            for again in ((), ("moe",), ("moe_act", "layernorm")):
                changes = {"recompute_granularity": "selective", "recompute_modules": list(again)} if again else {}
                run = _ours(**kind, **changes)
                out[f"{dispatcher} {' '.join(again)}"] = [[run.step() for _ in range(FEW)], _digest(run)]
            out[f"{dispatcher} boundary"] = run.gpt.decoder.layers[0].mlp.boundary
        found = report(run.gpt)
        out["report"] = sorted({r.ops for r in found.rows if r.module == "decoder.layers.0.mlp"})
        out["sums"] = _sums(torch)
        out["no input"] = _no_input(torch)
    return out


def _expert_weights(run):
    return [p for n, p in run.gpt.named_parameters() if ".experts." in n and "shared" not in n]


def _sums(torch):
    """Whether several seeds of a plain layer give the same output and gradient twice, bitwise."""
    run = _ours(moe_token_dispatcher_type="alltoall")
    mlp, same = run.gpt.decoder.layers[0].mlp, []
    for seed in range(3):
        x = torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(seed))
        results = []
        for _ in range(2):
            own = x.clone().requires_grad_()
            y = mlp(own)[0]
            y.square().sum().backward()
            results.append((y.detach(), own.grad))
        same.append(all(torch.equal(a, b) for a, b in zip(*results, strict=True)))
    return same


def _no_input(torch):
    """Whether rank 0's output and input gradient are the same where rank 1 has no tokens at all in place of as many;
    whether rank 1's experts then learn from rank 0's tokens, and its router from nothing."""
    import torch.distributed as dist

    results, rank = [], dist.get_rank()
    for tokens in (16, 0):
        run = _ours(moe_token_dispatcher_type="alltoall")
        run.model.zero_grad_buffer()
        mlp = run.gpt.decoder.layers[0].mlp
        x = torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(rank))[: 16 if rank == 0 else tokens]
        own = x.clone().requires_grad_()
        y = mlp(own)[0]
        y.square().sum().backward()
        results.append((y.detach(), own.grad))
    same = results[1][0].shape == x.shape and results[1][1].shape == x.shape
    if rank == 0:
        return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(*results, strict=True)) and same
    grads = [mlp.experts.fc1.main_grad, mlp.experts.fc2.main_grad]
    return same and all(bool(g.isfinite().all() and g.any()) for g in grads) and not mlp.router.weight.main_grad.any()


def _same_digits(rows, wanted, tolerance):
    assert len(rows) == len(wanted)
    for (a, n), (b, m) in zip(rows, wanted, strict=True):
        assert math.isclose(a, b, rel_tol=tolerance) and math.isclose(n, m, rel_tol=10 * tolerance), (rows, wanted)


@pytest.fixture(scope="module")
def expert_parallel():
    return run_ranks("test_megatron_moe_ranks:_expert_parallel", world=2, timeout=400)


@pytest.mark.parametrize("case", [f"{d}{more}" for d in DISPATCHERS for more in ("", " lopsided")])
def test_two_expert_ranks_follow_megatrons_sequential_experts_over_20_steps(expert_parallel, case):
    for rank in expert_parallel:
        wanted, *found = rank[case]
        for rows in found:
            _same_digits(rows, wanted, 1e-5)


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_a_rank_without_tokens_takes_part_and_its_weight_gradients_are_zero(expert_parallel, dispatcher):
    first, second = (rank[f"{dispatcher} gradients"] for rank in expert_parallel)
    assert all(all(run) for run in first)
    assert not any(any(run) for run in second)


@pytest.mark.parametrize("policy", ["moe", "moe_act layernorm"])
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_recomputation_is_bitwise_the_same_across_ranks(expert_parallel, dispatcher, policy):
    for rank in expert_parallel:
        assert rank[f"{dispatcher} {policy}"] == rank[f"{dispatcher} "]


def test_a_rank_whose_input_has_no_tokens_serves_its_experts_to_the_others(expert_parallel):
    assert [rank["no input"] for rank in expert_parallel] == [True, True]


def test_dispatch_and_combine_are_bitwise_the_same_twice(expert_parallel):
    assert all(rank["sums"] == [True] * 3 for rank in expert_parallel)


def test_the_layer_says_where_the_host_waits(expert_parallel):
    for rank in expert_parallel:
        assert "the host waits for once" in rank["alltoall boundary"] and "host" not in rank["allgather boundary"]


def test_collectives_of_the_gathered_tokens_stand_in_the_plan(expert_parallel):
    assert {"all_gather", "reduce_scatter"} <= set(expert_parallel[0]["report"])


# ---- other layouts, and checkpoints between them ---------------------------------------------------------------------


SEQUENCE = {"sequence_parallel": True}
LAYOUTS = {
    "experts' tensor": ({"tp": 2, "etp": 2}, SEQUENCE),
    "tensor": ({"tp": 2, "etp": 1}, SEQUENCE),
    "tensor and expert": ({"tp": 2, "ep": 2, "etp": 1}, SEQUENCE),
    "all three": ({"tp": 2, "ep": 2, "etp": 2}, SEQUENCE),
}


def _layouts(layouts):
    from parity_model import layout

    out = {}
    with _megatron():
        layout()
        alone = _ours(build_options={"all_data": True})
        out["alone"] = [alone.step() for _ in range(FEW)]
        for name in layouts:
            groups, changes = LAYOUTS[name]
            for dispatcher in DISPATCHERS:
                layout(**groups)
                run = _ours(moe_token_dispatcher_type=dispatcher, **changes)
                out[f"{name} {dispatcher}"] = [run.step() for _ in range(FEW)]
        if "tensor" in layouts:
            out["without sequence parallel"] = _refused(layout)
            out["checkpoints"] = _checkpoints(layout)
    return out


def _refused(layout):
    layout(tp=2)
    try:
        _ours().step()
    except ValueError as error:
        return str(error)
    return "trains"


def _checkpoints(layout):
    """Parameters handed from layout to layout, one step in each; then a run handed on with its moments. Megatron keeps
    the moments of experts with groups of their own in a second optimiser: those go between layouts that have it."""
    expert, tensor, both = ({"ep": 2}, {}), ({"tp": 2, "etp": 1}, SEQUENCE), ({"tp": 2, "ep": 2, "etp": 1}, SEQUENCE)
    sharded = ({"tp": 2, "etp": 2}, SEQUENCE)
    parameters = [
        (({}, {}), _ours),
        (expert, _ours),
        (sharded, _ours),
        (expert, _local),
        (({}, {}), _ours),
        (both, _ours),
        (tensor, _ours),
        (({}, {}), _local),
    ]
    moments = [(expert, _ours), (expert, _local), (both, _ours), (tensor, _ours), (expert, _ours)]
    layout(ep=2)
    whole = _ours(build_options={"distributed_optimizer": True}, moe_token_dispatcher_type="alltoall")
    return {
        "parameters": _handed_on(layout, parameters, False),
        "moments": _handed_on(layout, moments, True),
        "stayed": [whole.step() for _ in moments],
    }


def _handed_on(layout, chain, moments):
    """The steps of a chain of runs, each loading what the one before it has saved: its parameters as they were loaded,
    or with ``moments`` all behind its step."""
    import torch
    from megatron.core import dist_checkpointing

    rows, before = [], None
    for (groups, changes), make in chain:
        layout(**groups)
        run = make(build_options={"distributed_optimizer": True}, moe_token_dispatcher_type="alltoall", **changes)
        if before is not None:
            with torch.no_grad():
                for p in run.gpt.parameters():
                    p.zero_()
            if moments:
                run.load(before, _metadata())
            else:
                run.gpt.load_state_dict(
                    dist_checkpointing.load({"model": run.gpt.sharded_state_dict(metadata=_metadata())}, before)[
                        "model"
                    ]
                )
                run.optimizer.reload_model_params()
        before = _folder()
        if moments:
            rows.append(run.step())
            run.save(before, _metadata())
        else:
            dist_checkpointing.save({"model": run.gpt.sharded_state_dict(metadata=_metadata())}, before)
            rows.append(run.step())
    return rows


def _folder():
    """A folder that rank 0 makes and all know."""
    import torch.distributed as dist

    name = [tempfile.mkdtemp(dir=os.environ["CHECKPOINTS"]) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name)
    return name[0]


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    env = {"CHECKPOINTS": str(tmp_path_factory.mktemp("checkpoints"))}
    two = run_ranks(
        "test_megatron_moe_ranks:_layouts",
        world=2,
        timeout=400,
        env=env,
        layouts=["experts' tensor", "tensor", "tensor and expert"],
    )
    four = run_ranks("test_megatron_moe_ranks:_layouts", world=4, timeout=400, layouts=["all three"])
    return [
        {n: rows for n, rows in (*a.items(), *b.items())} | {"alone of 4": b["alone"]}
        for a, b in zip(two, four[:2], strict=True)
    ]


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_as_one_rank_does(layouts, name, dispatcher):
    for rank in layouts:
        _same_digits(rank[f"{name} {dispatcher}"], rank["alone"], 1e-5)


def test_parameters_pass_between_layouts_and_megatrons_experts_as_they_are(layouts):
    for rank in layouts:
        rows = rank["checkpoints"]["parameters"]
        _same_digits(rows, [rows[0]] * len(rows), 1e-5)


def test_a_run_handed_on_with_its_moments_goes_on_as_if_it_had_stayed(layouts):
    for rank in layouts:
        _same_digits(rank["checkpoints"]["moments"], rank["checkpoints"]["stayed"], 1e-5)


def test_tensor_parallel_training_without_sequence_parallel_is_refused(layouts):
    assert all("sequence_parallel = False: must be True" in rank["without sequence parallel"] for rank in layouts)
