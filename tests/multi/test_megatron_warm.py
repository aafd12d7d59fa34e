"""``layerplan.warm`` on Megatron's GPTModel with our layers: the first step plans nothing, and trains as without it."""

import pytest
from harness import run_ranks

CASES = {
    "plain": {},
    "dropout": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "full recompute": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "fused gradients": {"gradient_accumulation_fusion": True},
    "experts": {"num_moe_experts": 4, "moe_ffn_hidden_size": 48, "moe_aux_loss_coeff": 1e-2, "moe_z_loss_coeff": 1e-3, "moe_router_dtype": "fp32",
                "moe_shared_expert_intermediate_size": 32},
}  # fmt: skip


def scenario(fields):
    """(losses and norms without warm, with it, how many plans its steps made, whether the random states moved)."""
    import torch
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from parity_model import BATCH, LENGTH, build, dense_config, layout

    import layerplan
    from layerplan.integration.megatron.cpu_mode import cpu_mode
    from layerplan.integration.megatron.specs import gpt_block_spec
    from layerplan.integration.planner import runner

    with cpu_mode():
        torch.distributed.init_process_group("gloo")
        runs, made, moved = [], [], False
        for warm in (False, True):
            layout()
            config = dense_config(**fields)
            run = build(config, gpt_block_spec(config))
            runner._plans.clear()
            torch.manual_seed(5)
            if warm:
                integers = ((BATCH, LENGTH), torch.int64)
                mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
                before = torch.get_rng_state(), {n: s.clone() for n, s in get_cuda_rng_tracker().get_states().items()}
                shapes = {"input_ids": integers, "position_ids": integers, "attention_mask": mask, "labels": integers}
                layerplan.warm(run.gpt, shapes)
                after = torch.get_rng_state(), get_cuda_rng_tracker().get_states()
                moved = not torch.equal(before[0], after[0]) or any(
                    not torch.equal(s, after[1][n]) for n, s in before[1].items()
                )
                plan = runner.plan
                runner.plan = lambda *a, plan=plan, **k: (made.append(1), plan(*a, **k))[1]
            runs.append([run.step() for _ in range(2)])
    return [*runs, len(made), moved]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", CASES)
def test_after_warm_a_step_plans_nothing_and_trains_bitwise_as_without_it(case):
    ((plain, warmed, made, moved),) = run_ranks("test_megatron_warm:scenario", world=1, timeout=380, fields=CASES[case])
    assert plain == warmed and not moved
    assert (made == 0) == (case != "full recompute")  # which runs the forward again inside of the backward
