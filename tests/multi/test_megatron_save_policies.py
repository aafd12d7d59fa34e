"""Megatron's save-and-recompute options as save policies of plans: bitwise the same training, fewer bytes kept for the backward."""

import pytest
from harness import run_ranks
from test_megatron_layers import _megatron, _mla_config

STEPS, LENGTH, BATCH = 3, 16, 2


def _dense(**changes):
    from parity_model import dense_config

    return dense_config(**changes)


def _models():
    """Kind -> (config maker, fields, module of recompute_modules)."""
    import torch.nn.functional as F

    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    grouped = {"moe_grouped_gemm": True}  # Megatron wants it for moe_act; without experts it does nothing else
    mla = {"qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 6, "kv_lora_rank": 12}
    return {
        "mla": (_mla_config, mla | dropout, "mla_up_proj"),
        "mla yarn whole query": (_mla_config, mla | {"q_lora_rank": None, "rope_type": "yarn", "rotary_scaling_factor": 4.0}, "mla_up_proj"),
        "mla fused gradients": (_mla_config, mla | {"gradient_accumulation_fusion": True}, "mla_up_proj"),
        "swiglu": (_dense, grouped | dropout, "moe_act"),
        "gelu with bias": (_dense, grouped | {"activation_func": F.gelu, "gated_linear_unit": False, "add_bias_linear": True}, "moe_act"),
    }  # fmt: skip


def _saved_bytes(call, parameters):
    """Bytes of all storages that the forward keeps for the backward, parameters apart. What is saved for a graph that ends
    within the forward is freed, and its address used again: only what is there at the end counts."""
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef

    saved, ours = [], {p.untyped_storage().data_ptr() for p in parameters}

    def pack(t):
        storage = t.untyped_storage()
        saved.append((StorageWeakRef(storage), storage.data_ptr(), storage.nbytes()))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = call()
    kept = {address: n for ref, address, n in saved if not ref.expired()}
    del out
    return sum(n for address, n in kept.items() if address not in ours)


def _train(make, fields, **recompute):
    """Losses and norms, exact gradients as text, and what the first layer's modules keep."""
    import hashlib

    import torch
    from parity_model import build, layout

    from layerplan.integration.megatron.specs import gpt_block_spec

    layout()
    config = make(**fields, **recompute)
    run = build(config, gpt_block_spec(config))
    steps = [run.step() for _ in range(STEPS)]
    digest = hashlib.sha256(b"".join(p.main_grad.detach().numpy().tobytes() for p in run.gpt.parameters())).hexdigest()
    layer = run.gpt.decoder.layers[0]
    x = torch.randn(LENGTH, BATCH, config.hidden_size, generator=torch.Generator().manual_seed(1)).requires_grad_()
    bytes_kept = {"mlp": _saved_bytes(lambda: layer.mlp(x), layer.parameters())}
    if config.multi_latent_attention:
        bytes_kept["attention"] = _saved_bytes(lambda: layer.self_attention(x, None), layer.parameters())
    return {"steps": steps, "gradients": digest, "bytes": bytes_kept}


def _policies():
    out = {}
    with _megatron():
        for name, (make, fields, module) in _models().items():
            out[name] = [_train(make, fields), _train(make, fields, recompute_granularity="selective", recompute_modules=[module])]
        for name in ("mla", "mla yarn whole query"):  # together with what Megatron's checkpoints rebuild
            make, fields, _ = _models()[name]
            norm = {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "mla_up_proj", "core_attn"]}
            full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
            out[f"{name}, with Megatron's"] = [out[name][0], _train(make, fields, **norm)]
            out[f"{name}, full"] = [out[name][0], _train(make, fields, **full)]
    return out


@pytest.fixture(scope="module")
def policies():
    return run_ranks("test_megatron_save_policies:_policies", world=1, timeout=240)[0]


NAMES = ["mla", "mla yarn whole query", "mla fused gradients", "swiglu", "gelu with bias"]


TOGETHER = [f"{name}, {what}" for name in NAMES[:2] for what in ("with Megatron's", "full")]


@pytest.mark.parametrize("name", [*NAMES, *TOGETHER])
def test_training_is_bitwise_the_same_with_and_without_recomputation(policies, name):
    kept, rebuilt = policies[name]
    assert rebuilt["steps"] == kept["steps"] and rebuilt["gradients"] == kept["gradients"]


def _difference(policies, name, part):
    kept, rebuilt = policies[name]
    return kept["bytes"][part] - rebuilt["bytes"][part]


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith("mla")])
def test_latent_attention_keeps_no_queries_keys_and_values(policies, name):
    heads, key, key_and_value = 4, 8 + 4, 8 + 6
    numbers = LENGTH * BATCH * heads * (key + key + key_and_value)  # q, k, and the product that v is a view of
    assert _difference(policies, name, "attention") == 4 * numbers
    assert _difference(policies, name, "mlp") == 0


@pytest.mark.parametrize("name", ["swiglu", "gelu with bias"])
def test_mlp_keeps_no_activation(policies, name):
    assert _difference(policies, name, "mlp") == 4 * LENGTH * BATCH * 64
