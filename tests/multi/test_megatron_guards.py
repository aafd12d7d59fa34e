"""MLA under tensor without sequence parallelism: gradients on two ranks, with and without the guards."""

import pytest
from harness import run_ranks
from test_megatron_cpu_mode import TinyRun, megatron_on_cpu

MLA = {
    "q_lora_rank": 16, "kv_lora_rank": 8, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 8, "rope_type": "rope",
    "apply_rope_fusion": False, "qk_layernorm": True,
}  # fmt: skip


def _spec(config):
    from layerplan.integration.megatron.specs import gpt_block_spec

    return gpt_block_spec(config)


def _gradients():
    """Per guard setting: how far gradients of replicated parameters are apart, and their norms."""
    import torch
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from layerplan.integration.megatron import compat

    seen = {}
    with megatron_on_cpu():
        run = TinyRun(tp=2, spec=_spec, config_class=MLATransformerConfig, **MLA)

        def measure():
            run.backward()
            apart, norms = {}, {}
            for name, param in run.gpt.named_parameters():
                if getattr(param, "tensor_model_parallel", False):
                    continue
                mine = param.main_grad.clone()
                both = [torch.empty_like(mine) for _ in range(2)]
                torch.distributed.all_gather(both, mine)
                apart[name] = ((both[0] - both[1]).norm() / both[0].norm()).item()
                norms[name] = mine.norm().item()
                if "linear_kv_down_proj" in name:  # rows of the latent, then those of the rotary key
                    rotary = [grad[MLA["kv_lora_rank"] :] for grad in both]
                    apart[f"{name} rotary rows"] = ((rotary[0] - rotary[1]).norm() / rotary[0].norm()).item()
            return [apart, norms]

        seen["guarded"] = measure()
        for name in ("mla-rope-key-gradient", "mla-qk-norm-gradient"):
            compat._release(name)
            seen[name] = measure()
            compat.apply(name)
    return seen


@pytest.fixture(scope="module")
def gradients():
    return run_ranks("test_megatron_guards:_gradients", world=2, timeout=120)[0]


def test_replicated_gradients_are_equal_on_both_ranks_with_the_guards(gradients):
    apart, norms = gradients["guarded"]
    assert any("rotary rows" in name for name in apart) and all(norm > 0 for norm in norms.values())
    assert max(apart.values()) < 1e-5, apart


def test_rotary_key_gradient_differs_between_ranks_without_its_guard(gradients):
    apart, _ = gradients["mla-rope-key-gradient"]
    # each rank has the sum over its own half of the heads, which has little to do with the other's
    assert all(value > 0.1 for name, value in apart.items() if "rotary rows" in name), apart


def test_query_norm_gradient_is_twice_too_large_without_its_guard(gradients):
    right, wrong = gradients["guarded"][1], gradients["mla-qk-norm-gradient"][1]
    names = [name for name in right if "q_layernorm" in name]
    assert names and all(wrong[name] == pytest.approx(2 * right[name], rel=1e-5) for name in names)
    others = [name for name in right if "q_layernorm" not in name]
    assert all(wrong[name] == pytest.approx(right[name], rel=1e-5) for name in others)
