"""MLA under tensor without sequence parallelism: gradients on two ranks, with and without the guards.

Megatron's own MLASelfAttention on our linears needs the guards; ours sums the rotary key's gradient in its plan.
"""

import pytest
from harness import run_ranks
from test_megatron_cpu_mode import TinyRun, megatron_on_cpu

MLA = {
    "q_lora_rank": 16, "kv_lora_rank": 8, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 8, "rope_type": "rope",
    "apply_rope_fusion": False, "qk_layernorm": True,
}  # fmt: skip


def _ours(config):
    from layerplan.integration.megatron.specs import gpt_block_spec

    return gpt_block_spec(config)


def _megatrons(config):
    """Our block spec with Megatron's attention module."""
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    spec = _ours(config)
    for layer in spec.layer_specs:
        layer.submodules.self_attention.module = MLASelfAttention
    return spec


def _gradients():
    """Per guard setting: how far gradients of replicated parameters are apart, and their norms."""
    import torch
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from layerplan.integration.megatron import compat

    seen = {}
    with megatron_on_cpu():

        def measure(run):
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

        for kind, spec in (("megatron", _megatrons), ("layerplan", _ours)):
            run = TinyRun(tp=2, spec=spec, config_class=MLATransformerConfig, **MLA)
            seen[kind] = measure(run)
            for name in ("mla-rope-key-gradient", "mla-qk-norm-gradient"):
                compat._release(name)
                seen[f"{kind} without {name}"] = measure(run)
                compat.apply(name)
    return seen


@pytest.fixture(scope="module")
def gradients():
    return run_ranks("test_megatron_guards:_gradients", world=2, timeout=120)[0]


def _apart(row):
    apart, norms = row
    assert any("rotary rows" in name for name in apart) and all(norm > 0 for norm in norms.values())
    return apart


@pytest.mark.parametrize("run", ["megatron", "layerplan", "layerplan without mla-rope-key-gradient"])
def test_replicated_gradients_are_equal_on_both_ranks(gradients, run):
    assert max(_apart(gradients[run]).values()) < 1e-5


def test_both_attention_modules_have_the_same_gradients(gradients):
    theirs, ours = gradients["megatron"][1], gradients["layerplan"][1]
    assert ours == {name: pytest.approx(norm, rel=1e-4) for name, norm in theirs.items()}


def test_rotary_key_gradient_differs_between_ranks_in_megatrons_without_its_guard(gradients):
    apart = _apart(gradients["megatron without mla-rope-key-gradient"])
    # each rank has the sum over its own half of the heads, which has little to do with the other's
    assert all(value > 0.1 for name, value in apart.items() if "rotary rows" in name), apart


@pytest.mark.parametrize("kind", ["megatron", "layerplan"])
def test_query_norm_gradient_is_twice_too_large_without_its_guard(gradients, kind):
    right, wrong = gradients[kind][1], gradients[f"{kind} without mla-qk-norm-gradient"][1]
    names = [name for name in right if "q_layernorm" in name]
    assert names and all(wrong[name] == pytest.approx(2 * right[name], rel=1e-5) for name in names)
    others = [name for name in right if "q_layernorm" not in name]
    assert all(wrong[name] == pytest.approx(right[name], rel=1e-5) for name in others)
