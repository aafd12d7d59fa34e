"""Latent attention on one plan: against the equations of its paper, under recompute, packing and deferred gradients."""

import itertools
import math

import pytest
from harness import run_ranks
from test_megatron_layers import _megatron, _mla_config

LENGTH, BATCH, WIDTH = 12, 2, 32
NOPE, ROPE, VALUE, KV_RANK, HEADS = 8, 4, 6, 12, 4
CUTS = [0, 5, 5, 11, 12]  # packed sequences of BATCH * LENGTH / 2 tokens, one of them empty
YARN = {"rope_type": "yarn", "rotary_scaling_factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 4.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.5, "rotary_base": 100.0}  # fmt: skip
UP = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}
CASES = {
    "query latent, rope": {},
    "query latent, yarn": YARN,
    "whole query, rope": {"q_lora_rank": None},
    "whole query, yarn": {"q_lora_rank": None, **YARN},
    "no norms": {"qk_layernorm": False},
    "half of the rotary dim": {"rotary_percent": 0.5},
    "window and sink": {"window_size": (3, 0), "softmax_type": "learnable"},
}


def _config(dtype=None, **changes):
    import torch

    sizes = {"qk_head_dim": NOPE, "qk_pos_emb_head_dim": ROPE, "v_head_dim": VALUE, "kv_lora_rank": KV_RANK}
    return _mla_config(**{"params_dtype": dtype or torch.float64, **sizes, **changes})


def _attention(config):
    from megatron.core.transformer.spec_utils import build_module
    from parity_model import fill

    from layerplan.integration.megatron.specs import gpt_block_spec

    module = build_module(gpt_block_spec(config).layer_specs[0].submodules.self_attention, config=config, layer_number=1)
    fill(module)
    return module


def _angles(config, positions):
    """Rotation angles [t, r / 2] in float64; RoPE (Su et al., 2021), YaRN's "by parts" (Peng et al., 2023, section 3.2)."""
    import torch

    width = int(ROPE * config.rotary_percent) if config.rope_type == "rope" else ROPE
    i = torch.arange(0, width, 2, dtype=torch.float64)
    theta = config.rotary_base ** (-i / width)
    if config.rope_type == "yarn":
        # the dim whose wave turns beta times within the original context
        def dim(beta):
            return width * math.log(config.original_max_position_embeddings / (2 * math.pi * beta)) / (2 * math.log(config.rotary_base))

        low, high = max(math.floor(dim(config.beta_fast)), 0), min(math.ceil(dim(config.beta_slow)), width - 1)
        ramp = ((torch.arange(width // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
        theta = theta / config.rotary_scaling_factor * ramp + theta * (1 - ramp)
    return positions[:, None].double() * theta


def _paper(p, config, x, cuts):
    """DeepSeek-V2 (2024), section 2.1.2, on tokens x [t, h] of the sequences between ``cuts``: u [t, h]."""
    import torch

    def norm(y, name):
        if f"{name}.weight" not in p:
            return y
        return p[f"{name}.weight"] * y / torch.sqrt((y * y).mean(-1, keepdim=True) + config.layernorm_epsilon)

    def mscale(m):
        s = config.rotary_scaling_factor
        return 1.0 if config.rope_type != "yarn" or s <= 1 else 0.1 * m * math.log(s) + 1.0

    def rotate(y, positions):  # pairs (2i, 2i + 1) as complex numbers
        turn = _angles(config, positions)
        r = 2 * turn.shape[-1]
        pairs = torch.view_as_complex(y[..., :r].reshape(*y.shape[:-1], r // 2, 2).contiguous())
        factor = torch.polar(torch.full_like(turn, mscale(config.mscale) / mscale(config.mscale_all_dim)), turn)[:, None]
        return torch.cat((torch.view_as_real(pairs * factor).flatten(-2), y[..., r:]), -1)

    outs = []
    for a, b in itertools.pairwise(cuts):
        h, t = x[a:b], torch.arange(b - a)
        if config.q_lora_rank is None:
            q = h @ p["linear_q_proj.weight"].T
        else:
            q = norm(h @ p["linear_q_down_proj.weight"].T, "q_layernorm") @ p["linear_q_up_proj.weight"].T
        q_c, q_r = q.reshape(-1, HEADS, NOPE + ROPE).split([NOPE, ROPE], -1)
        latent, k_r = (h @ p["linear_kv_down_proj.weight"].T).split([KV_RANK, ROPE], -1)
        k_c, v = (norm(latent, "kv_layernorm") @ p["linear_kv_up_proj.weight"].T).reshape(-1, HEADS, NOPE + VALUE).split([NOPE, VALUE], -1)
        query = torch.cat((q_c, rotate(q_r, t)), -1)
        key = torch.cat((k_c, rotate(k_r[:, None], t).expand(-1, HEADS, -1)), -1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * mscale(config.mscale_all_dim) ** 2 / math.sqrt(NOPE + ROPE)
        hidden = t[None] > t[:, None]
        if config.window_size:
            hidden = hidden | (t[None] < t[:, None] - config.window_size[0])
        scores = scores.masked_fill(hidden, float("-inf"))
        if "core_attention.softmax_offset" in p:
            sink = p["core_attention.softmax_offset"][:, None, None].expand(-1, b - a, 1)
            weights = torch.softmax(torch.cat((scores, sink), -1), -1)[..., :-1]
        else:
            weights = torch.softmax(scores, -1)
        outs.append(torch.einsum("hqk,khd->qhd", weights, v).flatten(1) @ p["linear_proj.weight"].T)
    return torch.cat(outs)


def _packed_params(cuts):
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    cu, longest = torch.tensor(cuts, dtype=torch.int32), max(b - a for a, b in itertools.pairwise(cuts))
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=longest, max_seqlen_kv=longest)


def _against_the_paper():
    """Per case, dense and packed: the largest error of the output and of every gradient, relative to the largest value."""
    import torch

    out = {}
    for name, changes in CASES.items():
        config = _config(**changes)
        module = _attention(config)
        if "core_attention.softmax_offset" in dict(module.named_parameters()):
            module.core_attention.softmax_offset.data.copy_(torch.linspace(-1, 1, HEADS))
        for packed in (False, True):
            gen = torch.Generator().manual_seed(3)
            shape = (CUTS[-1], 1, WIDTH) if packed else (LENGTH, BATCH, WIDTH)
            x = torch.randn(shape, generator=gen, dtype=torch.float64).requires_grad_()
            du = torch.randn(shape, generator=gen, dtype=torch.float64)
            params = dict(module.named_parameters())
            leaves = [x, *params.values()]
            u, _ = module(x, None, packed_seq_params=_packed_params(CUTS) if packed else None)
            ours = [u, *torch.autograd.grad(u, leaves, du)]
            plain = {n: p.detach().clone().requires_grad_() for n, p in params.items()}
            y = x.detach().clone().requires_grad_()
            if packed:
                w = _paper(plain, config, y[:, 0], CUTS)[:, None]
            else:
                w = torch.stack([_paper(plain, config, y[:, b], [0, LENGTH]) for b in range(BATCH)], 1)
            truth = [w, *torch.autograd.grad(w, [y, *plain.values()], du)]
            errors = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, truth, strict=True)]
            out[f"{name}, {'packed' if packed else 'dense'}"] = dict(zip(["output", "input", *params], errors, strict=True))
    return out


def _decoding():
    """Outputs of a prefill and of single tokens through Megatron's cache, and of the whole sequence through our plan."""
    import torch
    from megatron.core.inference.contexts import StaticInferenceContext

    out = {}
    with torch.no_grad():
        for name, changes in {"rope": {}, "yarn, rebuilt in training": {**YARN, **UP}}.items():
            module = _attention(_config(**changes)).eval()
            x = torch.randn(LENGTH, BATCH, WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
            whole, _ = module(x, None)
            cache = StaticInferenceContext(BATCH, LENGTH)
            parts = []
            for a, b in itertools.pairwise([0, 5, *range(6, LENGTH + 1)]):
                cache.sequence_len_offset = a
                parts.append(module(x[a:b], None, inference_context=cache)[0])
            out[name] = ((torch.cat(parts) - whole).abs().max() / whole.abs().max()).item()
    return out


def _refusals():
    """Error messages of what the attention does not take; the names of its parameters and of those of Megatron's."""
    import copy

    import torch
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention
    from megatron.core.transformer.spec_utils import build_module

    from layerplan.integration.megatron.specs import gpt_block_spec

    def message(action):
        try:
            action()
        except ValueError as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    config = _config()
    module, x = _attention(config), torch.zeros(LENGTH, BATCH, WIDTH, dtype=torch.float64)
    spec = gpt_block_spec(config).layer_specs[0].submodules.self_attention
    built = {"config": config, "submodules": copy.copy(spec.submodules), "layer_number": 1, "attn_mask_type": AttnMaskType.causal}
    spec.submodules.linear_kv_up_proj = ColumnParallelLinear
    return {
        "bias": message(lambda: module(x, None, attention_bias=x)),
        "rotary": message(lambda: module(x, None, rotary_pos_emb=x)),
        "foreign": message(lambda: build_module(spec, config=config, layer_number=1)),
        "names": [sorted(m.state_dict()) for m in (module, MLASelfAttention(**built))],
    }


def _scenarios():
    from parity_model import layout

    with _megatron():
        layout()
        return {"paper": _against_the_paper(), "decoding": _decoding(), "refusals": _refusals()}


@pytest.fixture(scope="module")
def seen():
    return run_ranks("test_megatron_latent_attention:_scenarios", world=1, timeout=200)[0]


@pytest.mark.parametrize("kind", ["dense", "packed"])
@pytest.mark.parametrize("name", list(CASES))
def test_output_and_every_gradient_equal_the_papers_equations(seen, name, kind):
    errors = seen["paper"][f"{name}, {kind}"]
    assert len(errors) >= 6
    # float64 throughout but for the rotary table: angles of at most 11 radians in float32 are wrong by 5e-7 each
    assert max(errors.values()) < 1e-5, errors


def test_decoding_through_megatrons_cache_equals_the_whole_sequence(seen):
    for name, error in seen["decoding"].items():
        assert error < 1e-6, name  # float32 rotary tables on both sides, whose pairs stand in another order


def test_what_it_does_not_take_is_refused_by_name_and_parameters_keep_theirs(seen):
    seen = seen["refusals"]
    assert seen["bias"].startswith("ValueError: attention_bias: must be None")
    assert seen["rotary"].startswith("ValueError: rotary_pos_emb: must be None")
    assert "linear_kv_up_proj = ColumnParallelLinear" in seen["foreign"] and "use Megatron's MLASelfAttention" in seen["foreign"]
    ours, megatrons = seen["names"]
    assert ours == megatrons and "linear_kv_up_proj.weight" in ours
