"""Layers with their residual adds in the MLP's plan, against Megatron's own forward over the same slots and against its local layers."""

import math
import tempfile

import pytest
from harness import run_ranks
from test_megatron_layers import KEY_BIAS, STEPS, _close, _megatron, _metadata, _mla_config, _variants

LENGTH, BATCH, WIDTH = 12, 2, 32
P = 0.3
_BIASES = {"add_bias_linear": True, "normalization": "LayerNorm", "gated_linear_unit": False}
CASES = ["plain", "biases", "zero centred", "packed", "latent", "latent, biases", "recompute layernorm", "latent, recompute layernorm"]


def _layer(config, fuse=True, **options):
    """The first layer of the block spec, filled: gammas and biases are not all alike."""
    import torch
    from megatron.core.transformer.spec_utils import build_module
    from parity_model import fill

    from layerplan.integration.megatron.specs import gpt_block_spec

    layer = build_module(gpt_block_spec(config, fuse_residual=fuse).layer_specs[0], config=config, layer_number=1, **options)
    fill(layer)
    gen = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in layer.parameters():
            if p.dim() == 1:
                p.add_(torch.randn(p.shape, generator=gen, dtype=p.dtype) * 0.1)
    return layer


def _config(name, **changes):
    import torch
    import torch.nn.functional as F
    from parity_model import dense_config

    fields = {"params_dtype": torch.float64} | changes
    if "biases" in name:
        fields |= _BIASES | {"activation_func": F.gelu}
    if name == "zero centred":
        fields |= {"layernorm_zero_centered_gamma": True}
    if "recompute" in name:
        fields |= {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
    return _mla_config(**fields) if "latent" in name else dense_config(**fields)


def _both(layer, x, dy, **keywords):
    """Per way, the layer's output and all gradients by name: by our forward, and by Megatron's over the same slots."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    results = []
    for forward in (layer, lambda *a, **k: TransformerLayer.forward(layer, *a, **k)):
        hidden = x.clone().requires_grad_()
        out, context = forward(hidden, attention_mask=None, **keywords)
        assert context is None and out._base is None
        layer.zero_grad()
        out.backward(dy)  # what Megatron's checkpoint without output asks for
        named = {"hidden_states": hidden, **dict(layer.named_parameters())}
        results.append({"output": out.detach(), **{n: p.grad for n, p in named.items()}})
    return results


def _errors():
    """Per case, largest difference to Megatron's forward, relative to the largest value, for every output and gradient."""
    import torch
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.packed_seq_params import PackedSeqParams
    from parity_model import layout

    out = {}
    with _megatron():
        layout()
        gen = torch.Generator().manual_seed(1)
        x, dy = (torch.randn(LENGTH, BATCH, WIDTH, generator=gen, dtype=torch.float64) for _ in range(2))
        cu = torch.tensor([0, 5, 5, 11, 24], dtype=torch.int32)
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=13, max_seqlen_kv=13)
        for name in CASES:
            layer, rows, keywords = _layer(_config(name)), (x, dy), {}
            if name == "packed":
                rows, keywords["packed_seq_params"] = tuple(t.reshape(LENGTH * BATCH, 1, WIDTH) for t in rows), packed
            if "latent" not in name:
                keywords["rotary_pos_emb"] = RotaryEmbedding(8, 1.0)(LENGTH * BATCH if name == "packed" else LENGTH)
            seen = []
            layer.mlp.register_forward_hook(lambda module, args, result, seen=seen: seen.append(result))
            ours, theirs = _both(layer, *rows, **keywords)
            assert torch.equal(seen[0][0], ours["output"]) and seen[0][1] is None, "a hook on the MLP sees the layer's output"
            assert len(seen) == 2 and not torch.equal(seen[1][0], theirs["output"])
            out[name] = {k: float((a - b).abs().max() / b.abs().max()) for (k, a), b in zip(ours.items(), theirs.values(), strict=True)}
        out["other ways"] = _other_ways(x)
        out["refused"] = _refused()
        out["reports"] = _reports(x)
    return out


def _regions(layer):
    return [op for runner in layer.mlp.plan_runners() for _, _, r in runner.regions() for op in r.ops]


def _other_ways(x):
    """What inference and the schedules that call a layer's halves themselves run, and whether they get the layer's result."""
    import torch
    from megatron.core.inference.utils import InferenceMode
    from parity_model import dense_config

    out = {}
    for name in ("inference mode", "halves", "fused"):
        layer = _layer(dense_config(params_dtype=torch.float64)).eval()
        with torch.no_grad():
            if name == "inference mode":
                with InferenceMode.active():
                    result = layer(x, attention_mask=None)[0]
            elif name == "halves":
                result = layer._forward_mlp(layer._forward_attention(x, attention_mask=None)[0])
            else:
                result = layer(x, attention_mask=None)[0]
        out[name] = [result.tolist(), "bias_dropout_add" in _regions(layer)]
    return out


def _refused():
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module
    from parity_model import dense_config

    from layerplan.integration.megatron.specs import gpt_block_spec
    from layerplan.integration.megatron.transformer_layer import LayerplanTransformerLayer

    def text(call):
        try:
            call()
        except ValueError as error:
            return str(error)
        return "accepted"

    def foreign():
        spec = get_gpt_layer_local_spec(normalization="RMSNorm")
        spec.module = LayerplanTransformerLayer
        build_module(spec, config=dense_config(), layer_number=1)

    moe = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 64, "num_layers": 2}
    mixed = gpt_block_spec(dense_config(**moe, moe_layer_freq=[0, 1]), fuse_residual=True)
    chunked = _layer(dense_config(params_dtype=torch.float64), fuse=False)
    assert type(chunked).__name__ == "TransformerLayer"
    return {
        "foreign slots": text(foreign),
        "experts alone": text(lambda: gpt_block_spec(dense_config(**moe), fuse_residual=True)),
        "chunks": text(lambda: gpt_block_spec(dense_config(mlp_chunks_for_training=2), fuse_residual=True)),
        "mixed": [s.module.__name__ for s in mixed.layer_specs],
    }


def _reports(x):
    import torch
    from parity_model import dense_config

    from layerplan.integration.planner.report import report

    out = {}
    for fuse in (False, True):
        layer = _layer(dense_config(params_dtype=torch.float64), fuse=fuse)
        layer(x, attention_mask=None)
        found = report(layer)
        out[str(fuse)] = [dict(found.boundaries), [line for line in str(found).splitlines() if line.startswith("between plans")]]
    return out


@pytest.fixture(scope="module")
def errors():
    return run_ranks("test_megatron_transformer_layer:_errors", world=1, timeout=240)[0]


@pytest.mark.parametrize("name", CASES)
def test_a_layer_is_bitwise_megatrons_forward_over_the_same_slots_in_float64(errors, name):
    found = errors[name]
    assert len(found) > 6
    sums = {k for k in found if k.endswith(("linear_proj.bias", "linear_fc2.bias"))}
    assert {k: e for k, e in found.items() if k not in sums and e != 0} == {}
    assert bool(sums) == ("biases" in name)
    assert all(found[k] < 1e-15 for k in sums), "sums over the tokens, in another order"


def test_inference_and_split_forwards_are_megatrons_own(errors):
    ways = errors["other ways"]
    assert ways["fused"][1] and not ways["inference mode"][1] and not ways["halves"][1]
    assert ways["fused"][0] == ways["inference mode"][0] == ways["halves"][0]


def test_what_a_fused_layer_does_not_do_is_refused_by_name(errors):
    refused = errors["refused"]
    assert "mlp = MLP" in refused["foreign slots"] and "pre_mlp_layernorm = " in refused["foreign slots"]
    assert "self_attn_bda" not in refused["foreign slots"]
    assert "fuse_residual = True" in refused["experts alone"]
    assert "mlp_chunks_for_training = 2: must be 1" in refused["chunks"]
    assert refused["mixed"] == ["LayerplanTransformerLayer", "TransformerLayer"]


def test_report_lists_the_boundaries_that_remain(errors):
    plain, fused = errors["reports"]["False"], errors["reports"]["True"]
    assert set(plain[0]) == {"self_attention", "mlp"} and all("residual add" in what for what in plain[0].values())
    assert fused[0] == {"mlp": "the next layer's norm"} and len(plain[1]) == len(fused[1]) == 1


# ---- dropout ---------------------------------------------------------------------------------------------------------


def _dropout():
    """What the two masks of a layer do where nothing but the biases of proj and fc2, all 1, goes into the residual stream."""
    import torch
    from parity_model import layout

    with _megatron():
        layout()
        layer = _layer(_config("biases", hidden_dropout=P))
        with torch.no_grad():
            for linear in (layer.self_attention.linear_proj, layer.mlp.linear_fc2):
                linear.weight.zero_()
                linear.bias.fill_(1.0)
        x = torch.randn(64, 8, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

        def added(seed):
            torch.manual_seed(seed)
            return layer(x, attention_mask=None)[0] - x

        first, again, other = (added(seed) for seed in (5, 5, 6))
        biases = [layer.self_attention.linear_proj.bias, layer.mlp.linear_fc2.bias]
        kept = torch.autograd.grad(first.sum(), biases)
        torch.manual_seed(5)
        draws = [layer(x, attention_mask=None)[0] - x for _ in range(2)]
        counts = [int(((first * (1 - P)).round() == k).sum()) for k in range(3)]
        whole = float(((first * (1 - P)) - (first * (1 - P)).round()).abs().max())
        identity = float((first.sum((0, 1)) - sum(kept)).abs().max() / first.sum((0, 1)).max())
        layer.eval()
        return {"counts": counts, "whole": whole, "identity": identity, "same": torch.equal(first, again),
                "other": not torch.equal(first, other), "next": not torch.equal(*draws), "first": torch.equal(draws[0], first),
                "apart": not torch.equal(*kept), "eval": float((layer(x, attention_mask=None)[0] - x - 2).abs().max())}  # fmt: skip


def test_both_dropouts_have_their_probability_their_own_mask_and_the_generators_seed():
    found = run_ranks("test_megatron_transformer_layer:_dropout", world=1, timeout=120)[0]
    n = 64 * 8 * WIDTH
    for count, share in zip(found["counts"], (P * P, 2 * P * (1 - P), (1 - P) ** 2), strict=True):
        assert abs(count - n * share) < 4 * math.sqrt(n * share * (1 - share)), found["counts"]
    assert sum(found["counts"]) == n and found["whole"] < 1e-12, "an element is dropped, or scaled by 1 / (1 - p)"
    assert found["identity"] < 1e-12, "the gradients see the masks of the forward"
    assert found["same"] and found["other"] and found["next"] and found["first"] and found["apart"]
    assert found["eval"] < 1e-12


# ---- training --------------------------------------------------------------------------------------------------------


def _ours(fuse=True, build=None, make=None, **changes):
    from parity_model import build as run_of
    from parity_model import dense_config

    from layerplan.integration.megatron.specs import gpt_block_spec

    config = (make or dense_config)(**changes)
    return run_of(config, gpt_block_spec(config, fuse_residual=fuse), **(build or {}))


RECOMPUTE = {"full": None, "layernorm": ["layernorm"], "mlp": ["mlp"], "core_attn, mlp": ["core_attn", "mlp"], "moe_act": ["moe_act"],
             "layernorm, moe_act": ["layernorm", "moe_act"]}  # fmt: skip


def _recompute_fields(modules):
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    grouped = {"moe_grouped_gemm": True} if "moe_act" in (modules or ()) else {}  # Megatron wants it; it does nothing without experts
    return grouped | ({"recompute_granularity": "selective", "recompute_modules": modules} if modules else full)


def _training():
    import torch
    from megatron.core import dist_checkpointing
    from parity_model import build, dense_config, layout
    from test_megatron_save_policies import _saved_bytes

    out = {}
    with _megatron():
        layout()
        for name, changes in _variants().items():
            zero = changes.get("layernorm_zero_centered_gamma")
            if zero:
                continue  # Megatron's own norm refuses it; the layer's comparison in float64 holds it
            options = {"adam_eps": 1e-3, "weight_decay": 0.0} if name in KEY_BIAS else {}  # see test_megatron_layers._parity
            out[name] = [[run.step() for _ in range(STEPS)] for run in (build(dense_config(**changes), **options), _ours(build=options, **changes))]
        out["latent"] = [[run.step() for _ in range(8)] for run in (_ours(fuse, make=_mla_config) for fuse in (False, True))]
        dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
        x = torch.randn(LENGTH, BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
        for make in (dense_config, _mla_config):
            for name, fields in {"kept": {}, **{n: _recompute_fields(m) for n, m in RECOMPUTE.items()}}.items():
                layout()
                run = _ours(make=make, **dropout, **fields)
                steps = [run.step() for _ in range(3)]
                layer = run.gpt.decoder.layers[0]
                saved = _saved_bytes(lambda: layer(x.clone().requires_grad_(), attention_mask=None), layer.parameters())  # noqa: B023
                out[f"{make.__name__} recompute {name}"] = [steps, [p.main_grad.double().sum().item() for p in run.gpt.parameters()], saved]
        for name, writer, reader in (("local to ours", build, _ours), ("ours to local", _ours, build)):
            layout()
            source, target = writer(), reader()
            source.step()
            with tempfile.TemporaryDirectory() as folder:
                dist_checkpointing.save({"model": source.gpt.sharded_state_dict(metadata=_metadata())}, folder)
                target.gpt.load_state_dict(dist_checkpointing.load({"model": target.gpt.sharded_state_dict(metadata=_metadata())}, folder)["model"])
            out[f"checkpoint {name}"] = [source.step()[0], target.step()[0]]
        out["names"] = [sorted(run.gpt.sharded_state_dict(metadata=_metadata())) + sorted(run.gpt.state_dict()) for run in (_ours(False), _ours())]
    return out


@pytest.fixture(scope="module")
def training():
    return run_ranks("test_megatron_transformer_layer:_training", world=1, timeout=400)[0]


@pytest.mark.parametrize("name", ["llama", "layer_norm_bias_gelu", "geglu_qkv_bias", "squared_relu", "clamped"])
def test_twenty_steps_equal_megatrons_local_layers(training, name):
    local, ours = training[name]
    _close(local, ours)
    assert ours[-1][0] < ours[0][0] - 0.5, "the model must learn, or the comparison says little"


def test_latent_attention_trains_alike_with_and_without_fused_adds(training):
    _close(*training["latent"])


@pytest.mark.parametrize("name", RECOMPUTE)
@pytest.mark.parametrize("kind", ["dense_config", "_mla_config"])
def test_recompute_is_bitwise_invisible_with_dropout_and_keeps_less(training, kind, name):
    kept, again = training[f"{kind} recompute kept"], training[f"{kind} recompute {name}"]
    assert again[:2] == kept[:2]
    if name != "full":  # its checkpoint stands around the layer, in the block
        assert again[2] < kept[2]


@pytest.mark.parametrize("way", ["local to ours", "ours to local"])
def test_checkpoints_interchange_with_megatrons_local_layers(training, way):
    source, target = training[f"checkpoint {way}"]
    assert math.isclose(source, target, rel_tol=1e-6)


def test_checkpoint_names_are_those_of_layers_without_fused_adds(training):
    plain, fused = training["names"]
    assert plain == fused and len(plain) > 20


# ---- two ranks -------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "tp2": {"layout": {"tp": 2}},
    "tp2 sp": {"layout": {"tp": 2}, "config": {"sequence_parallel": True}},
    "tp2 sp fused": {"layout": {"tp": 2}, "config": {"sequence_parallel": True, "gradient_accumulation_fusion": True}},
    "tp2 sp mlp again": {"layout": {"tp": 2}, "config": {"sequence_parallel": True, "recompute_granularity": "selective", "recompute_modules": ["mlp"]}},
    "tp2 mlp again": {"layout": {"tp": 2}, "config": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}},
    "pp2": {"layout": {"pp": 2}},
    "dp2 distopt overlap": {"layout": {}, "build": {"distributed_optimizer": True, "overlap": True}},
}
BIASED = ["tp2", "tp2 sp", "dp2 distopt overlap"]


def _biased():
    import torch.nn.functional as F

    return _BIASES | {"activation_func": F.gelu}


def _two():
    """Steps per layout, and the seeds that the layers of a model with dropout draw."""
    from parity_model import layout

    out = {}
    with _megatron():
        for name, row in LAYOUTS.items():
            layout(**row["layout"])
            out[name] = [run.step() for run in [_ours(**row.get("config", {}), build=row.get("build"))] for _ in range(STEPS)]
        for name in BIASED:
            row = LAYOUTS[name]
            layout(**row["layout"])
            options = {"adam_eps": 1e-3, "weight_decay": 0.0} | row.get("build", {})
            for fuse in (False, True):
                run = _ours(fuse, **_biased(), **row.get("config", {}), build=options)
                out[f"{name}, biases, {fuse}"] = [run.step() for _ in range(6)]
        for name, fields in (("tp2", {}), ("tp2 sp", {"sequence_parallel": True})):
            for again in (False, True):
                layout(tp=2)
                run = _ours(hidden_dropout=P, attention_dropout=P, **fields, **(_recompute_fields(None) if again else {}))
                seeds = _watch_seeds(run.gpt)
                out[f"{name}, dropout, {again}"] = [run.step() for _ in range(3)]
                out[f"{name}, seeds, {again}"] = seeds
                out[f"{name}, replicas, {again}"] = [float(p.double().sum()) for p in run.gpt.parameters()
                                                     if not getattr(p, "tensor_model_parallel", False)]  # fmt: skip
    return out


def _watch_seeds(model):
    seen = []
    for layer in model.decoder.layers:
        draw = layer.mlp._residual_adds

        def watched(residual, draw=draw):
            adds, inputs = draw(residual)
            seen.append([int(t) for t in inputs[-4:]])
            return adds, inputs

        layer.mlp._residual_adds = watched
    return seen


def _local():
    from parity_model import build, layout

    with _megatron():
        layout()
        return [run.step() for run in [build()] for _ in range(STEPS)]


@pytest.fixture(scope="module")
def two():
    return run_ranks("test_megatron_transformer_layer:_two", world=2, timeout=400)


@pytest.fixture(scope="module")
def local():
    return run_ranks("test_megatron_transformer_layer:_local", world=1, timeout=120)[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_twenty_steps_on_two_ranks_equal_megatrons_local_layers_on_one(local, two, name):
    _close(local, two[1][name])


@pytest.mark.parametrize("name", ["tp2", "tp2 sp"])
def test_the_mlp_as_a_save_policy_is_bitwise_invisible_on_two_ranks(two, name):
    assert two[1][f"{name} mlp again"] == two[1][name]


@pytest.mark.parametrize("name", BIASED)
def test_biases_of_both_adds_train_alike_on_two_ranks(two, name):
    for rank in two:
        plain, fused = rank[f"{name}, biases, False"], rank[f"{name}, biases, True"]
        _close(plain, fused, 1e-6)


@pytest.mark.parametrize("name", ["tp2", "tp2 sp"])
def test_ranks_share_the_masks_of_shared_tokens_and_only_those(two, name):
    first, second = (rank[f"{name}, seeds, False"] for rank in two)
    drawn = [seed for call in first for seed in call]
    assert len(drawn) == len(set(drawn)) == 3 * 2 * 2 * 4, "steps, micro-batches and layers have seeds of their own"
    same = {a == b for a, b in zip(first, second, strict=True)}
    assert same == {name == "tp2"}
    left, right = (rank[f"{name}, replicas, False"] for rank in two)
    assert left == right, "what is replicated must stay so"


@pytest.mark.parametrize("name", ["tp2", "tp2 sp"])
def test_full_recompute_draws_the_same_seeds_again(two, name):
    for rank in two:
        assert rank[f"{name}, dropout, True"] == rank[f"{name}, dropout, False"]
        once, twice = rank[f"{name}, seeds, False"], rank[f"{name}, seeds, True"]
        assert len(twice) == 2 * len(once) and all(twice.count(seeds) == 2 for seeds in once)
