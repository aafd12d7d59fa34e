"""Our block spec against Megatron's local layers, and against itself under other layouts, recompute and checkpoints."""

import contextlib
import math
import tempfile

import pytest
from harness import run_ranks

STEPS, MLA_STEPS = 20, 8
KEY_BIAS = ("qk_norm_and_zero_centred", "layer_norm_bias_gelu")


@contextlib.contextmanager
def _megatron():
    import torch

    from layerplan.integration.megatron.cpu_mode import cpu_mode

    torch.set_num_threads(1)
    with cpu_mode():
        torch.distributed.init_process_group("gloo")
        yield
        torch.distributed.barrier()


def _metadata():
    from megatron.core import parallel_state as mpu

    return {"distrib_optim_sharding_type": "fully_reshardable", "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}


def _variants():
    import torch.nn.functional as F
    from megatron.core.activations import squared_relu

    return {
        "llama": {},
        "qk_norm_and_zero_centred": {"qk_layernorm": True, "layernorm_zero_centered_gamma": True, "normalization": "LayerNorm"},
        "layer_norm_bias_gelu": {"normalization": "LayerNorm", "add_bias_linear": True, "gated_linear_unit": False, "activation_func": F.gelu},
        "geglu_qkv_bias": {"activation_func": F.gelu, "add_qkv_bias": True},
        "squared_relu": {"gated_linear_unit": False, "activation_func": squared_relu},
        "clamped": {"activation_func_clamp_value": 0.5},
    }


def _parity():
    """Per variant: 20 steps of Megatron's local layers and of ours; then recompute, checkpoints, main_grad and plans."""
    from megatron.core import dist_checkpointing
    from parity_model import build, dense_config, layout

    from layerplan.integration.megatron.specs import gpt_block_spec
    from layerplan.integration.planner.report import report

    out = {}
    with _megatron():
        layout()

        def ours(**changes):
            options = changes.pop("build", {})
            config = dense_config(**changes)
            return build(config, gpt_block_spec(config), **options)

        for name, changes in _variants().items():
            # Megatron's own torch norm refuses a zero-centred gamma: there the peer is the same model with gamma - 1
            zero = changes.get("layernorm_zero_centered_gamma")
            # The gradient of a bias on the keys is zero by softmax's invariance to shifts; Adam with its usual eps of 1e-8
            # turns the rounding noise that stands there into full steps. With eps = 1e-3 noise of 1e-8 moves nothing.
            options = {"adam_eps": 1e-3, "weight_decay": 0.0} if name in KEY_BIAS else {}
            local = build(dense_config(**{k: v for k, v in changes.items() if k != "layernorm_zero_centered_gamma"}), **options)
            mine = ours(**changes, build=options)
            if zero:
                _shift_gammas(mine, -1.0)
            out[name] = [[local.step() for _ in range(STEPS)], [mine.step() for _ in range(STEPS)]]
        dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
        full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        some = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
        core = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}
        for name, changes in {"kept": {}, "full": full, "layernorm": some, "core_attn_mlp": core}.items():
            layout()
            run = ours(**dropout, **changes)
            out[f"recompute {name}"] = [run.step() for _ in range(4)]
            out[f"gradients {name}"] = [p.main_grad.double().sum().item() for p in run.gpt.parameters()]
        for name, fuse in {"plain": False, "fused": True}.items():
            run = ours(gradient_accumulation_fusion=fuse)
            out[f"main_grad {name}"] = [run.step() for _ in range(4)]
        out["report"] = sorted({(r.kind, r.engine) for r in report(run.gpt).rows})
        # checkpoints, both ways
        for name, writer, reader in (("local to ours", build, ours), ("ours to local", ours, build)):
            layout()
            source, target = writer(), reader()
            for _ in range(2):
                source.step()
            with tempfile.TemporaryDirectory() as folder:
                dist_checkpointing.save({"model": source.gpt.sharded_state_dict(metadata=_metadata())}, folder)
                got = dist_checkpointing.load({"model": target.gpt.sharded_state_dict(metadata=_metadata())}, folder)
            target.gpt.load_state_dict(got["model"])
            out[f"checkpoint {name}"] = [source.step()[0], target.step()[0]]
        out["sharded alone"] = _sharded_alone()
    return out


def _sharded_alone():
    """What the slots with a sharded_state_dict of their own shard without metadata, and with the model's."""
    from megatron.core.transformer.enums import AttnMaskType
    from parity_model import dense_config

    from layerplan.integration.megatron.layers import CoreAttention, DuplicatedLinear

    config = dense_config(softmax_type="learnable")
    linear = DuplicatedLinear(8, 4, config=config, init_method=config.init_method, bias=True)
    attention = CoreAttention(config, 1, AttnMaskType.causal, "self")
    return [[{key: [t.global_shape, t.replica_id] for key, t in slot.sharded_state_dict("a.", metadata=metadata).items()}
             for metadata in (None, {}, _metadata())] for slot in (linear, attention)]  # fmt: skip


def _shift_gammas(run, by):
    import torch

    with torch.no_grad():
        for name, p in run.gpt.named_parameters():
            if p.dim() == 1 and "norm" in name and name.endswith("weight"):
                p.add_(by)


def _mla_config(**changes):
    from megatron.core.transformer.transformer_config import MLATransformerConfig
    from parity_model import dense_config

    base = {k: getattr(dense_config(), k) for k in ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "normalization",
            "add_bias_linear", "gated_linear_unit", "activation_func", "hidden_dropout", "attention_dropout", "transformer_impl",
            "bias_dropout_fusion", "bias_activation_fusion", "pipeline_dtype", "tensor_model_parallel_size", "pipeline_model_parallel_size")}  # fmt: skip
    mla = {"q_lora_rank": 16, "kv_lora_rank": 12, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 8, "rope_type": "rope",
           "apply_rope_fusion": False, "qk_layernorm": True}  # fmt: skip
    return MLATransformerConfig(**(base | mla | changes))


LAYOUTS = {
    "tp2": {"layout": {"tp": 2}},
    "tp2 sp": {"layout": {"tp": 2}, "config": {"sequence_parallel": True}},
    "tp2 sp fused": {"layout": {"tp": 2}, "config": {"sequence_parallel": True, "gradient_accumulation_fusion": True}},
    "pp2": {"layout": {"pp": 2}},
    "dp2 distopt": {"layout": {}, "build": {"distributed_optimizer": True}},
    "dp2 distopt overlap": {"layout": {}, "build": {"distributed_optimizer": True, "overlap": True}},
}
# With Adam's usual eps of 1e-8 this model's seventh step makes ten times as much of the rounding noise as the sixth: already
# two sums in another order, on one process, then differ by 4e-5. With eps = 1e-3 the noise stays what it is.
_CALM = {"adam_eps": 1e-3, "weight_decay": 0.0}
GROUP = {"one group": {"layout": {}, "config": {"num_query_groups": 1}, "build": _CALM},
         "one group tp2 sp": {"layout": {"tp": 2}, "config": {"num_query_groups": 1, "sequence_parallel": True}, "build": _CALM}}  # fmt: skip
_SP, _UP = {"sequence_parallel": True}, {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}
MLA = {
    "mla": {"layout": {}},
    "mla whole query": {"layout": {}, "config": {"q_lora_rank": None}},
    "mla tp2": {"layout": {"tp": 2}},
    "mla tp2 recompute": {"layout": {"tp": 2}, "config": _UP},
    "mla tp2 sp": {"layout": {"tp": 2}, "config": _SP},
    "mla tp2 sp recompute": {"layout": {"tp": 2}, "config": _SP | _UP},
    "mla tp2 sp fused": {"layout": {"tp": 2}, "config": _SP | {"gradient_accumulation_fusion": True}},
    "mla whole query tp2 sp recompute": {"layout": {"tp": 2}, "config": _SP | _UP | {"q_lora_rank": None}},
    "mla dp2 distopt overlap recompute": {"layout": {}, "config": _UP, "build": {"distributed_optimizer": True, "overlap": True}},
}
TWO_MLA = [name for name in MLA if "tp2" in name or "dp2" in name]


def _layouts(names, steps, folder=None, write=False):
    """Training runs under the named layouts; with ``folder`` the first one saves or loads model and optimiser there."""
    import os

    from parity_model import build, dense_config, layout

    from layerplan.integration.megatron.specs import gpt_block_spec

    out = {}
    with _megatron():
        for name in names:
            row = (LAYOUTS | GROUP | MLA | {"one": {"layout": {}}})[name]
            layout(**row["layout"])
            make = _mla_config if name.startswith("mla") else dense_config
            config = make(**row.get("config", {}))
            run = build(config, gpt_block_spec(config), **row.get("build", {}))
            if folder and not write:
                run.load(folder, _metadata())
            out[name] = [run.step() for _ in range(min(steps, MLA_STEPS) if name.startswith("mla") else steps)]
            if folder and write:
                os.makedirs(folder, exist_ok=True)
                run.save(folder, _metadata())
                out["after"] = [run.step() for _ in range(2)]
    return out


def _config_refused():
    from parity_model import dense_config, layout

    from layerplan.integration.megatron.specs import gpt_block_spec

    with _megatron():
        layout()
        try:
            gpt_block_spec(dense_config(fp8=None, glu_linear_offset=1.0, window_size=(4, 0), context_parallel_size=1, qk_clip=True))
        except ValueError as error:
            return str(error)
    return "no error"


@pytest.fixture(scope="module")
def parity():
    return run_ranks("test_megatron_layers:_parity", world=1, timeout=240)[0]


@pytest.fixture(scope="module")
def one():
    return run_ranks("test_megatron_layers:_layouts", world=1, timeout=120, names=["one", "one group", "mla", "mla whole query"], steps=STEPS)[0]


@pytest.fixture(scope="module")
def two():
    return run_ranks("test_megatron_layers:_layouts", world=2, timeout=300, names=[*LAYOUTS, "one group tp2 sp", *TWO_MLA], steps=STEPS)


def _close(left, right, tolerance=1e-5):
    for (a, n), (b, m) in zip(left, right, strict=True):
        assert math.isclose(a, b, rel_tol=tolerance), (left, right)
        assert math.isclose(n, m, rel_tol=10 * tolerance), (left, right)


@pytest.mark.parametrize("name", ["llama", "qk_norm_and_zero_centred", "layer_norm_bias_gelu", "geglu_qkv_bias", "squared_relu", "clamped"])
def test_twenty_steps_equal_megatrons_local_layers(parity, name):
    local, ours = parity[name]
    _close(local, ours)
    assert ours[-1][0] < ours[0][0] - 0.5, "the model must learn, or the comparison says little"


@pytest.mark.parametrize("what", ["full", "layernorm", "core_attn_mlp"])
def test_recompute_is_bitwise_invisible_with_dropout(parity, what):
    assert parity[f"recompute {what}"] == parity["recompute kept"]
    assert parity[f"gradients {what}"] == parity["gradients kept"]


def test_accumulation_into_main_grad_changes_nothing(parity):
    _close(parity["main_grad plain"], parity["main_grad fused"], 1e-6)


@pytest.mark.parametrize("way", ["local to ours", "ours to local"])
def test_checkpoints_interchange_with_megatrons_local_layers(parity, way):
    source, target = parity[f"checkpoint {way}"]
    assert math.isclose(source, target, rel_tol=1e-6)


def test_slots_shard_without_metadata_over_the_data_parallel_group(parity):
    linear, attention = parity["sharded alone"]
    assert set(linear[0]) == {"a.weight", "a.bias"} and set(attention[0]) == {"a.softmax_offset"}
    assert linear[0] == linear[1] == linear[2] and attention[0] == attention[1] == attention[2]


def test_report_names_every_kind_of_layer(parity):
    kinds = {kind for kind, _ in parity["report"]}
    assert kinds == {"SelfAttention", "MLP", "Norm"}


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_layouts_on_two_ranks_equal_one_process(one, two, name):
    last = two[1][name]
    _close(one["one"], [[a, n] for a, n in last])


def test_fewer_query_groups_than_ranks_equal_one_process(one, two):
    _close(one["one group"], two[1]["one group tp2 sp"])


@pytest.mark.parametrize("name", TWO_MLA)
def test_mla_on_two_ranks_equals_one_process(one, two, name):
    _close(one["mla whole query" if "whole query" in name else "mla"], two[1][name])


@pytest.mark.parametrize("name", [name for name in TWO_MLA if name.endswith("tp2 sp") or name.endswith("tp2")])
def test_mla_on_two_ranks_is_bitwise_the_same_where_the_up_projections_are_rebuilt(two, name):
    assert two[1][f"{name} recompute"] == two[1][name]


@pytest.mark.parametrize("writer, reader", [("one", "tp2 sp"), ("mla", "mla tp2 sp recompute")])
def test_checkpoint_of_one_rank_loads_at_another_tensor_parallel_size(tmp_path, writer, reader):
    folder = str(tmp_path / "checkpoint")
    wrote = run_ranks("test_megatron_layers:_layouts", world=1, timeout=120, names=[writer], steps=3, folder=folder, write=True)[0]
    read = run_ranks("test_megatron_layers:_layouts", world=2, timeout=120, names=[reader], steps=2, folder=folder)[1]
    _close(wrote["after"], read[reader])


def test_config_that_is_not_honoured_is_refused_with_all_problems():
    text = run_ranks("test_megatron_layers:_config_refused", world=1, timeout=60)[0]
    assert "glu_linear_offset" in text
    assert "qk_clip" in text
