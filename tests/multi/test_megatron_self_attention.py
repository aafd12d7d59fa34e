"""Self attention on one plan against Megatron's own forward over the same slots, in float64: outputs and all gradients."""

import pytest
from harness import run_ranks
from test_megatron_layers import _megatron

LENGTH, BATCH, WIDTH, HEAD = 12, 2, 32, 8
CUTS = [0, 5, 5, 11, 24]  # packed sequences, one of them empty
REFUSED = {(1, 8, 24): "must be 0", (0, 12, 5, 24): "must not decrease", (0, 12, 26): "24 tokens", (0, 20, 24): "max_seqlen_q = 16"}
CASES = {
    "plain": {},
    "interleaved": {"rotary_interleaved": True},
    "half of the rotary dim": {"part": 0.5},
    "no rotary embedding": {"part": None},
    "a layer without rotary embedding": {"no_rope_freq": [1, 0]},
    "qk norm": {"qk_layernorm": True},
    "qk norm, layer norm": {"qk_layernorm": True, "normalization": "LayerNorm", "layernorm_zero_centered_gamma": True},
    "biases": {"add_bias_linear": True, "add_qkv_bias": True},
    "window and sink": {"window_size": (3, 0), "softmax_type": "learnable"},
    "one group": {"num_query_groups": 1},
    "scaled by layer": {"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True},
}


def _module(**changes):
    import torch
    from megatron.core.transformer.spec_utils import build_module
    from parity_model import dense_config, fill

    from layerplan.integration.megatron.specs import gpt_block_spec

    config = dense_config(params_dtype=torch.float64, **changes)
    module = build_module(gpt_block_spec(config).layer_specs[0].submodules.self_attention, config=config, layer_number=1)
    fill(module)
    gen = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in module.parameters():
            if p.dim() == 1:  # gammas, biases and sinks that are not all alike
                p.add_(torch.randn(p.shape, generator=gen, dtype=p.dtype) * 0.1)
    return module


def _angles(part, interleaved):
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    return None if part is None else RotaryEmbedding(HEAD, part, rotary_interleaved=interleaved)(LENGTH * BATCH)


def _results(module, whole, x, dy, *arguments, **keywords):
    """Output, bias and gradients by one plan, or by Megatron's forward over the slots."""
    import torch

    module._whole = whole
    x = x.clone().requires_grad_()
    out, bias = module(x, *arguments, **keywords)
    parameters = [p for n, p in module.named_parameters() if n != "linear_proj.bias"]
    grads = torch.autograd.grad(out, [x, *parameters], dy)
    assert (bias is None) == (module.linear_proj.bias is None)
    return [out, *grads]


def _errors():
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType
    from parity_model import layout

    from layerplan.integration.planner.report import report

    found = {}
    with _megatron():
        layout()
        gen = torch.Generator().manual_seed(1)
        x, dy = (torch.randn(LENGTH, BATCH, WIDTH, generator=gen, dtype=torch.float64) for _ in range(2))
        mask = torch.rand(BATCH, 1, LENGTH, LENGTH, generator=gen) < 0.4
        cu = torch.tensor(CUTS, dtype=torch.int32)
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=13, max_seqlen_kv=13)

        def error(module, *arguments, rows=(x, dy), **keywords):
            a, b = (_results(module, w, *rows, *arguments, **keywords) for w in (True, False))
            return max(float((p - q).abs().max() / q.abs().max().clamp(min=1e-3)) for p, q in zip(a, b, strict=True))

        for name, changes in CASES.items():
            changes = dict(changes)
            angles = _angles(changes.pop("part", 1.0), changes.get("rotary_interleaved", False))
            module = _module(**changes)
            found[name] = error(module, None, rotary_pos_emb=None if angles is None else angles[:LENGTH])
            kinds = {r.kind for r in report(module).rows}
            assert kinds >= {"SelfAttention"}, kinds
        found["refused"] = {}
        for ends in REFUSED:
            bad = torch.tensor(ends, dtype=torch.int32)
            params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bad, cu_seqlens_kv=bad, max_seqlen_q=16, max_seqlen_kv=16)
            rows, module = x.reshape(LENGTH * BATCH, 1, WIDTH), _module()
            for whole in (True, False):
                module._whole = whole
                try:
                    module(rows, None, rotary_pos_emb=None, packed_seq_params=params)
                    text = "accepted"
                except ValueError as refusal:
                    text = str(refusal)
                found["refused"].setdefault(str(list(ends)), []).append(text)
        module = _module(deterministic_mode=True)
        for whole in (True, False):
            _results(module, whole, x, dy, None)
        found["policies"] = sorted({r.policy for r in report(module).rows})
        module, angles = _module(qk_layernorm=True), _angles(1.0, False)
        rows = tuple(t.reshape(LENGTH * BATCH, 1, WIDTH) for t in (x, dy))
        found["packed"] = error(module, None, rows=rows, rotary_pos_emb=angles, packed_seq_params=packed)
        module.attn_mask_type = AttnMaskType.arbitrary
        found["mask"] = error(module, mask, rotary_pos_emb=angles[:LENGTH])
        # queries and keys with tables of their own: Megatron's forward, although the module could take the whole
        module.attn_mask_type = AttnMaskType.causal
        found["two tables"] = error(module, None, rotary_pos_emb=(angles[:LENGTH], angles[:LENGTH] * 2))
    return found


@pytest.fixture(scope="module")
def errors():
    return run_ranks("test_megatron_self_attention:_errors", world=1, timeout=240)[0]


@pytest.mark.parametrize("name", [*CASES, "packed", "mask", "two tables"])
def test_one_plan_equals_megatrons_forward_over_the_slots(errors, name):
    # Megatron takes cosines of the packed angles, we of the table: in float32 an entry may differ by one unit in the last
    # place (2^-24 of values near 1), and a query and a key both hold one
    assert errors[name] < (4 * 2**-24 if name == "packed" else 1e-11)


@pytest.mark.parametrize("ends", REFUSED)
def test_cumulative_lengths_that_break_a_rule_are_refused_before_any_launch(errors, ends):
    for text in errors["refused"][str(list(ends))]:
        assert all(word in text for word in ("cu_seqlens_q", REFUSED[ends], ";")), text


def test_deterministic_mode_of_the_config_plans_deterministically(errors):
    assert errors["policies"] == ["auto, deterministic"]


def _saved():
    import torch
    from parity_model import layout

    out = {}
    with _megatron():
        layout()
        gen = torch.Generator().manual_seed(1)
        x, dy = (torch.randn(LENGTH, BATCH, WIDTH, generator=gen, dtype=torch.float64) for _ in range(2))
        for name, modules in {"kept": None, "core_attn": ["core_attn"], "layernorm": ["layernorm"], "both": ["core_attn", "layernorm"]}.items():
            changes = {} if modules is None else {"recompute_granularity": "selective", "recompute_modules": modules}
            torch.manual_seed(5)
            layout()
            module = _module(attention_dropout=0.2, **changes)
            sizes = {}

            def pack(t, sizes=sizes):
                sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
                return t

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                results = _results(module, True, x, dy, None, rotary_pos_emb=_angles(1.0, False)[:LENGTH])
            out[name] = (sum(sizes.values()), [t.tolist() for t in results])
    return out


def test_what_is_rebuilt_is_bitwise_the_same_and_saves_memory():
    saved = run_ranks("test_megatron_self_attention:_saved", world=1, timeout=120)[0]
    for name in ("core_attn", "layernorm", "both"):
        assert saved[name][1] == saved["kept"][1], name
        assert saved[name][0] < saved["kept"][0], name
    assert saved["both"][0] < min(saved["core_attn"][0], saved["layernorm"][0])
