"""Layers of experts on one rank, beside Megatron's with its SequentialMLP: training, recompute, checkpoints, gradients,
refusals."""

import math
import tempfile

import pytest
from harness import run_ranks
from test_megatron_layers import _megatron, _metadata

STEPS = 20
MOE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 48,
    "moe_router_dtype": "fp32",
    "moe_aux_loss_coeff": 1e-2,
    "moe_z_loss_coeff": 1e-3,
    "moe_shared_expert_intermediate_size": 32,
    "moe_grouped_gemm": True,
    "num_layers": 1,
}
# some gradients of an expert that few tokens choose are rounding noise, of which Adam with its usual eps of 1e-8 makes
# full steps
NOISE = {"adam_eps": 1e-5}
LAYERS = ("megatron", "layerplan")


def _variants():
    import torch.nn.functional as F
    from megatron.core.activations import squared_relu

    sigmoid = {"moe_router_score_function": "sigmoid"}
    no_loss = {"moe_aux_loss_coeff": 0.0}
    return {
        "losses and shared expert": {},
        "bias and groups": sigmoid
        | {
            "num_moe_experts": 8,
            "moe_router_num_groups": 4,
            "moe_router_group_topk": 2,
            "moe_router_enable_expert_bias": True,
            "moe_router_topk_scaling_factor": 2.5,
            "moe_router_load_balancing_type": "seq_aux_loss",
        },
        "several losses, gate": {
            "moe_router_pre_softmax": True,
            "moe_router_topk": 3,
            "moe_shared_expert_gate": True,
            "moe_aux_loss_coeff": [1e-2, 2e-2, 3e-2],
            "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
        },
        "one expert a token, per-token loss": {
            "moe_router_topk": 1,
            "moe_router_pre_softmax": True,
            "calculate_per_token_loss": True,
        },
        "dropped tokens": {
            "moe_expert_capacity_factor": 0.75,
            "activation_func": squared_relu,
            "gated_linear_unit": False,
        },
        "sinkhorn, geglu": no_loss
        | {"moe_router_load_balancing_type": "sinkhorn", "moe_z_loss_coeff": None, "activation_func": F.gelu},
        "square-root softplus": {"moe_router_score_function": "sqrtsoftplus"},
        "one dense layer": {"moe_layer_freq": [0, 1], "moe_router_dtype": None, "num_layers": 2},
    }


VARIANTS = (
    "losses and shared expert",
    "bias and groups",
    "several losses, gate",
    "one expert a token, per-token loss",
    "dropped tokens",
    "sinkhorn, geglu",
    "square-root softplus",
    "one dense layer",
)


# Megatron's own layer over our experts is the same code in every variant but for the activation
LAYERS_OF = {name: LAYERS if name in (VARIANTS[0], "dropped tokens") else LAYERS[1:] for name in VARIANTS}
PAIRS = [(name, layer) for name in VARIANTS for layer in LAYERS_OF[name]]


def _ours(moe_layer="layerplan", build_options=None, **changes):
    from parity_model import build, dense_config

    from layerplan.integration.megatron.specs import gpt_block_spec

    config = dense_config(**MOE | changes)
    return build(config, gpt_block_spec(config, moe_layer=moe_layer), **(build_options or {}))


def _local(build_options=None, **changes):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from parity_model import build, dense_config

    config = dense_config(**MOE | changes)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
    for (
        layer
    ) in spec.layer_specs:  # the local spec alone saves the norm in front of experts under the name of a dense layer's
        layer.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
    return build(config, spec, **(build_options or {}))


def _logged(run, steps):
    """[steps, what the losses of the layers add up to in Megatron's log]."""
    from megatron.core.transformer.moe.moe_logging import (
        MoEMetricsTracker,
        get_moe_metrics_tracker,
        set_moe_metrics_tracker,
    )

    set_moe_metrics_tracker(MoEMetricsTracker())
    rows = [run.step() for _ in range(steps)]
    return [
        rows,
        {name: entry.values.double().sum().item() for name, entry in get_moe_metrics_tracker().metrics.items()},
    ]


def _parity():
    from parity_model import layout

    out = {}
    with _megatron():
        layout()
        for name, changes in _variants().items():
            out[name] = {"local": _logged(_local(NOISE, **changes), STEPS)}
            for layer in LAYERS_OF[name]:
                out[name][layer] = _logged(_ours(layer, NOISE, **changes), STEPS)
    return out


@pytest.fixture(scope="module")
def parity():
    return run_ranks("test_megatron_moe:_parity", world=1, timeout=240)[0]


@pytest.mark.parametrize(("name", "layer"), PAIRS)
def test_training_follows_megatrons_sequential_experts_over_20_steps(parity, name, layer):
    for (a, n), (b, m) in zip(parity[name]["local"][0], parity[name][layer][0], strict=True):
        assert math.isclose(a, b, rel_tol=1e-5) and math.isclose(n, m, rel_tol=1e-4), (name, a, b, n, m)


@pytest.mark.parametrize(("name", "layer"), PAIRS)
def test_losses_of_the_router_are_logged_as_megatron_logs_them(parity, name, layer):
    wanted, found = parity[name]["local"][1], parity[name][layer][1]
    assert found == pytest.approx(wanted, rel=1e-5)
    assert bool(wanted) == ("sinkhorn" not in name), wanted


# ---- save policies, weight gradients, reports ------------------------------------------------------------------------


def _digest(run):
    import hashlib

    return hashlib.sha256(b"".join(p.main_grad.detach().numpy().tobytes() for p in run.gpt.parameters())).hexdigest()


RECOMPUTED = ("moe_act", "moe", "shared_experts", "moe_act layernorm", "full")


def _policies():
    import torch
    from parity_model import layout
    from test_megatron_save_policies import _saved_bytes

    from layerplan.integration.planner.report import report

    out = {}
    with _megatron():
        layout()
        for layer in LAYERS:
            for kind in ("kept", *RECOMPUTED):
                changes = (
                    {} if kind == "kept" else {"recompute_granularity": "selective", "recompute_modules": kind.split()}
                )
                if kind == "full":
                    changes = {
                        "recompute_granularity": "full",
                        "recompute_method": "uniform",
                        "recompute_num_layers": 1,
                    }
                run = _ours(layer, **changes)
                rows = [*_logged(run, 3), _digest(run)]
                x = torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
                mlp = run.gpt.decoder.layers[0].mlp
                out[f"{layer} {kind}"] = [*rows, _saved_bytes(lambda mlp=mlp, x=x: mlp(x), mlp.parameters())]
            out[f"{layer} fused"] = [
                run.step() for run in [_ours(layer, gradient_accumulation_fusion=True)] for _ in range(4)
            ]
            out[f"{layer} plain"] = [run.step() for run in [_ours(layer)] for _ in range(4)]
            out[f"{layer} deferred"] = [_deferred(layer, fuse) for fuse in (False, True)]
            run = _ours(layer)
            run.step()
            found = report(run.gpt)
            out[f"{layer} report"] = [
                dict(found.boundaries),
                sorted({(r.module, r.ops) for r in found.rows if ".0.mlp" in r.module}),
                [name for name, _ in found.others],
            ]
    return out


def _deferred(layer, fuse):
    """Largest differences of the experts' gradients when weight gradients wait for backward_dw, and how many were there
    before it."""
    import torch

    runs = []
    for defer in (False, True):
        run = _ours(layer, gradient_accumulation_fusion=fuse)
        for module in run.gpt.modules():
            if hasattr(module, "config"):
                module.config.delay_wgrad_compute = defer  # past __post_init__, which wants Transformer Engine for it
        mlp = run.gpt.decoder.layers[0].mlp
        run.model.zero_grad_buffer()
        x = torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
        mlp(x)[0].square().sum().backward()
        own = [mlp.experts.fc1, mlp.experts.fc2]
        early = sum(
            float(p.main_grad.abs().sum() + (p.grad.abs().sum() if p.grad is not None and not fuse else 0)) for p in own
        )
        if defer:
            mlp.backward_dw(routed_experts=True, shared_experts=True)
        runs.append([x.grad, *(p.main_grad if fuse or not defer else p.grad for p in own)])
        if defer:
            assert early == 0.0, "the experts' gradients are there before backward_dw"
    return max(float((a - b).abs().max()) for a, b in zip(*runs, strict=True))


@pytest.fixture(scope="module")
def policies():
    return run_ranks("test_megatron_moe:_policies", world=1, timeout=240)[0]


@pytest.mark.parametrize("kind", RECOMPUTED)
@pytest.mark.parametrize("layer", LAYERS)
def test_recomputation_changes_neither_training_nor_what_is_logged(policies, layer, kind):
    rows, logged, gradients, _ = policies[f"{layer} {kind}"]
    wanted = policies[f"{layer} kept"]
    assert [rows, gradients] == [wanted[0], wanted[2]], "bitwise"
    assert logged == wanted[1], "losses are logged once"


def test_what_the_backward_keeps_is_the_save_policy(policies):
    rows, width = 16 * 2 * 2, 48
    for layer in LAYERS:
        kept = policies[f"{layer} kept"][3]
        # the activation of the routed rows; the shared expert's own is rebuilt too where it is a plan of ours
        shared = 16 * 2 * 32 if layer == "layerplan" else 0
        assert kept - policies[f"{layer} moe_act"][3] == 4 * (rows * width + shared)
        assert policies[f"{layer} moe"][3] < 0.2 * kept


@pytest.mark.parametrize("layer", LAYERS)
def test_weight_gradients_are_the_same_in_main_grad_and_deferred(policies, layer):
    for (a, n), (b, m) in zip(policies[f"{layer} plain"], policies[f"{layer} fused"], strict=True):
        assert math.isclose(a, b, rel_tol=1e-6) and math.isclose(n, m, rel_tol=1e-5)
    assert policies[f"{layer} deferred"] == [0.0, 0.0]


def test_report_says_what_runs_in_plans_and_what_megatrons_dispatcher_costs(policies):
    boundaries, rows, others = policies["layerplan report"]
    ops = {
        "group_by_expert",
        "permute",
        "grouped_matmul",
        "swiglu",
        "unpermute",
        "unpermute_bwd",
        "grouped_matmul_dgrad",
        "grouped_matmul_wgrad",
        "swiglu_bwd",
        "permute_bwd",
    }
    assert {o for m, o in rows if m == "decoder.layers.0.mlp"} == ops
    assert {"router", "tokens_per_expert", "z_loss", "load_balancing_loss"} <= {
        o for m, o in rows if m == "decoder.layers.0.mlp.router"
    }
    assert {m for m, _ in rows} == {f"decoder.layers.0.mlp{part}" for part in ("", ".router", ".shared_experts")}
    assert boundaries["decoder.layers.0.mlp"] == "add of the shared experts, residual add behind it" and not [
        n for n in others if "mlp" in n
    ]
    boundaries, rows, others = policies["megatron report"]
    assert (
        "copies token counts to the host" in boundaries["decoder.layers.0.mlp.experts"]
        and "decoder.layers.0.mlp.router" in others
    )
    assert {"grouped_matmul", "swiglu"} <= {o for m, o in rows if m == "decoder.layers.0.mlp.experts"}


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def _exchange(source, target, **metadata):
    """Two steps, a save, a load into a fresh model with its optimiser, one step of both."""
    metadata = _metadata() | metadata
    for _ in range(2):
        source.step()
    with tempfile.TemporaryDirectory() as folder:
        source.save(folder, metadata)
        target.load(folder, metadata)
    return [source.step(), target.step()]


def _checkpoints():
    import torch
    from parity_model import layout

    out = {}
    with _megatron():
        layout()
        kinds = {"local": _local, "ours": _ours, "experts": lambda **c: _ours("megatron", **c)}
        ways = (("local", "ours"), ("ours", "local"), ("ours", "experts"), ("ours", "ours"))
        for writer, reader in ways:
            for name, metadata in (("axis", {}), ("keys", {"singleton_local_shards": True})):
                options = {"distributed_optimizer": True}
                source, target = (kinds[k](build_options=options) for k in (writer, reader))
                with torch.no_grad():
                    for p in target.gpt.parameters():
                        p.zero_()
                out[f"{writer} to {reader} by {name}"] = _exchange(source, target, **metadata)
        plain = (
            _ours(gated_linear_unit=False, activation_func=torch.nn.functional.gelu),
            _local(gated_linear_unit=False, activation_func=torch.nn.functional.gelu),
        )
        out["plain optimiser, one product"] = _exchange(*plain)
        out["first values"] = _first_values()
    return out


def _first_values():
    """Whether experts start from SequentialMLP's values, on the host's generator and on the device's."""
    import torch
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from parity_model import dense_config

    from layerplan.integration.megatron.provider import LayerplanSpecProvider

    groups, same = ProcessGroupCollection.use_mpu_process_groups(), []
    for on_host in (False, True):
        config, made = dense_config(**MOE, use_cpu_initialization=on_host), []
        for provider in (LocalSpecProvider(), LayerplanSpecProvider()):
            torch.manual_seed(5)
            model_parallel_cuda_manual_seed(5)
            made.append(provider.grouped_mlp_modules(True)(4, config, pg_collection=groups))
        theirs, ours = made
        for i, expert in enumerate(theirs.local_experts):
            same += [
                torch.equal(expert.linear_fc1.weight, ours.fc1[i]),
                torch.equal(expert.linear_fc2.weight, ours.fc2[i]),
            ]
    return same


@pytest.fixture(scope="module")
def checkpoints():
    return run_ranks("test_megatron_moe:_checkpoints", world=1, timeout=240)[0]


WAYS = [
    f"{way} by {name}"
    for way in ("local to ours", "ours to local", "ours to experts", "ours to ours")
    for name in ("axis", "keys")
]


@pytest.mark.parametrize("way", [*WAYS, "plain optimiser, one product"])
def test_checkpoints_of_parameters_and_moments_interchange(checkpoints, way):
    source, target = checkpoints[way]
    assert source == pytest.approx(target, rel=1e-5)


def test_experts_start_from_the_values_of_megatrons(checkpoints):
    assert len(checkpoints["first values"]) == 16 and all(checkpoints["first values"])


# ---- edges -----------------------------------------------------------------------------------------------------------


def _edges():
    from parity_model import dense_config, layout

    from layerplan.integration.megatron.config_map import ConfigError
    from layerplan.integration.megatron.specs import gpt_block_spec

    def refused(call):
        try:
            call()
        except (ConfigError, ValueError, TypeError) as error:
            return str(error)
        return "accepted"

    def spec(moe_layer="layerplan", **changes):
        config = dense_config(**MOE)
        for name, value in changes.items():
            setattr(config, name, value)  # past __post_init__, which refuses some of them itself
        return gpt_block_spec(config, moe_layer=moe_layer)

    out = {}
    with _megatron():
        layout()
        out["refused"] = {
            "flex": refused(lambda: spec(moe_token_dispatcher_type="flex")),
            "flex, megatron": refused(lambda: spec("megatron", moe_token_dispatcher_type="flex")),
            "unknown": refused(lambda: spec("megatron", moe_token_dispatcher_type="broadcast")),
            "overlap": refused(lambda: spec(moe_shared_expert_overlap=True, overlap_moe_expert_parallel_comm=True)),
            "biases": refused(lambda: spec(add_bias_linear=True, moe_apply_probs_on_input=True)),
            "balance": refused(lambda: spec(moe_router_load_balancing_type=["aux_loss", "auction"])),
            "layer": refused(lambda: spec("deepspeed")),
            "experts": refused(lambda: _foreign_experts()),
        }
        out["zero tokens"] = {layer: _one_chosen(layer) for layer in LAYERS}
        out["padding"] = _padding()
        out["refused"] |= _bad_inputs(refused)
        out["evaluation"] = _evaluation()
    return out


def _foreign_experts():
    from megatron.core.models.backends import LocalSpecProvider
    from parity_model import build, dense_config

    from layerplan.integration.megatron.provider import LayerplanSpecProvider
    from layerplan.integration.megatron.specs import gpt_block_spec

    class Sequential(LayerplanSpecProvider):
        def grouped_mlp_modules(self, moe_use_grouped_gemm):
            return LocalSpecProvider().grouped_mlp_modules(moe_use_grouped_gemm)

    config = dense_config(**MOE)
    build(config, gpt_block_spec(config, provider=Sequential()))


def _bad_inputs(refused):
    """What layer, router and experts say of padding masks and counts of other shapes and types."""
    import torch

    mlp = _ours().gpt.decoder.layers[0].mlp
    x, rows = torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(1)), torch.zeros(6, 32)

    def mask(*shape):
        return torch.zeros(shape, dtype=torch.bool)

    def experts(counts):
        return refused(lambda: mlp.experts(rows, counts, torch.ones(6)))

    return {
        "mask": refused(lambda: mlp(x, padding_mask=mask(2, 16))),
        "mask turned": refused(lambda: mlp(x, padding_mask=mask(16, 2))),
        "mask flat": refused(lambda: mlp(x, padding_mask=mask(32))),
        "mask of other tokens": refused(lambda: mlp(x, padding_mask=mask(2, 15))),
        "mask as a list": refused(lambda: mlp(x, padding_mask=mask(2, 16).tolist())),
        "router's mask": refused(lambda: mlp.router(x, mask(16, 2))),
        "router's mask turned": refused(lambda: mlp.router(x, mask(2, 16))),
        "counts": experts(torch.tensor([1, 2, 3, 0])),
        "counts as a list": experts([1, 2, 3, 0]),
        "counts of floats": experts(torch.tensor([1.0, 2.0, 3.0, 0.0])),
        "counts of other experts": experts(torch.tensor([1, 2, 3])),
        "counts below zero": experts(torch.tensor([4, 3, -1, 0])),
        "cumulative ends": experts(torch.tensor([1, 3, 6, 6])),
        "too few": experts(torch.tensor([1, 2, 2, 0])),
    }


def _one_chosen(layer):
    """All tokens go to experts 0 and 1: what the others' gradients hold, plainly and added to main_grad, and whether
    those of the first do."""
    import torch

    found = []
    for fuse in (False, True):
        run = _ours(
            layer,
            gradient_accumulation_fusion=fuse,
            moe_router_score_function="sigmoid",
            moe_router_enable_expert_bias=True,
        )
        run.model.zero_grad_buffer()
        mlp = run.gpt.decoder.layers[0].mlp
        mlp.router.expert_bias.copy_(torch.tensor([9.0, 9.0, -9.0, -9.0]))
        for p in (mlp.experts.fc1, mlp.experts.fc2):
            p.main_grad.fill_(3.0)
        x = torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
        mlp(x)[0].square().sum().backward()
        for p in (mlp.experts.fc1, mlp.experts.fc2):
            rest = p.main_grad[2:]
            found += [bool((rest == 3.0).all()), bool((p.main_grad[:2] != 3.0).float().mean() > 0.9)]
    return found


def _padding():
    """The losses, gradients and counts of 12 real tokens of 16 a sequence, with the others padded and cut off; case
    18's numbers."""
    import torch
    from megatron.core.transformer.moe.moe_logging import (
        MoEMetricsTracker,
        get_moe_metrics_tracker,
        set_moe_metrics_tracker,
    )

    rows = []
    kinds = ["aux_loss", "seq_aux_loss", "global_aux_loss"]
    run = _ours(
        moe_aux_loss_coeff=[1e-2, 2e-2, 3e-2],
        moe_router_load_balancing_type=kinds,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
    )
    router = run.gpt.decoder.layers[0].mlp.router
    x = torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(1))
    for tokens, mask in ((x, torch.arange(16).expand(2, 16).transpose(0, 1) >= 12), (x[:12].contiguous(), None)):
        set_moe_metrics_tracker(MoEMetricsTracker())
        router.weight.grad = None
        router.reset_global_aux_loss_tracker()
        router.local_tokens_per_expert.zero_()
        probs, _ = router(tokens, mask)
        (probs.reshape(-1, 2)[:24] * torch.arange(1, 49).view(24, 2)).sum().backward()
        logged = {name: entry.values.double().sum().item() for name, entry in get_moe_metrics_tracker().metrics.items()}
        rows.append(
            [
                logged,
                router.weight.main_grad.double().abs().sum().item()
                if router.weight.grad is None
                else router.weight.grad.tolist(),
                router.local_tokens_per_expert.tolist(),
            ]
        )
        router.weight.main_grad.zero_()
    return rows


def _evaluation():
    import torch

    run = _ours()
    mlp = run.gpt.decoder.layers[0].mlp
    x = torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(1))
    trained = mlp(x)[0]
    mlp.eval()
    with torch.no_grad():
        still = mlp(x)[0]
    none = mlp.experts(x[0, :0], torch.zeros(4, dtype=torch.int64), x[0, :0, 0])[0]
    return [
        bool(torch.equal(trained, still)),
        mlp(x[:1])[0].shape == (1, 2, 32),
        none.shape == (0, 32) and none.requires_grad,
    ]


@pytest.fixture(scope="module")
def edges():
    return run_ranks("test_megatron_moe:_edges", world=1, timeout=240)[0]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("flex", ("moe_token_dispatcher_type = 'flex': must be one of allgather, alltoall", "moe_layer='megatron'")),
        ("unknown", ("moe_token_dispatcher_type = 'broadcast': must be one of allgather, alltoall, flex",)),
        (
            "overlap",
            (
                "moe_shared_expert_overlap = True: must be False",
                "overlap_moe_expert_parallel_comm = True: must be False",
            ),
        ),
        (
            "biases",
            (
                "add_bias_linear, num_moe_experts = (True, 4): experts have no biases",
                "moe_apply_probs_on_input = True: must be False",
            ),
        ),
        ("balance", ("moe_router_load_balancing_type", "auction", "quantile_balancing")),
        ("layer", ("moe_layer = 'deepspeed': must be one of layerplan, megatron",)),
        ("experts", ("experts = SequentialMLP", "GroupedExperts")),
        ("mask turned", ("LayerplanMoELayer: padding_mask [16, 2]: must be [2, 16], [batch, sequence]", "pass padding_mask.transpose(0, 1)")),
        ("mask flat", ("LayerplanMoELayer: padding_mask [32]: must be [2, 16]", "True for padding")),
        ("mask of other tokens", ("padding_mask [2, 15]: must be [2, 16]",)),
        ("mask as a list", ("padding_mask = list: must be a bool torch.Tensor [2, 16]",)),
        ("router's mask turned", ("TopKRouter: padding_mask [2, 16]: must be [16, 2], [sequence, batch]", "transpose(0, 1)")),
        ("counts as a list", ("GroupedExperts: tokens_per_expert = list: must be a torch.Tensor of integers [4]", "torch.tensor")),
        ("counts of floats", ("tokens_per_expert is float32: must be integers",)),
        ("counts of other experts", ("tokens_per_expert [3]: must be [4], one count for each local expert",)),
        ("counts below zero", ("tokens_per_expert[2] = -1: must not be negative",)),
        ("cumulative ends", ("tokens_per_expert sums to 16: must sum to the 6 rows", "not cumulative ends")),
        ("too few", ("tokens_per_expert sums to 5: must sum to the 6 rows",)),
    ],
)
def test_what_the_layer_would_not_do_is_refused_by_name(edges, case, words):
    assert all(word in edges["refused"][case] for word in words), edges["refused"][case]


@pytest.mark.parametrize("case", ["mask", "router's mask", "counts"])
def test_masks_and_counts_of_the_shape_that_is_asked_for_are_taken(edges, case):
    assert edges["refused"][case] == "accepted"


def test_megatrons_own_layer_keeps_its_flex_dispatcher(edges):
    assert edges["refused"]["flex, megatron"] == "accepted"


@pytest.mark.parametrize("layer", LAYERS)
def test_experts_without_tokens_leave_main_grad_as_it_is(edges, layer):
    assert all(edges["zero tokens"][layer]) and len(edges["zero tokens"][layer]) == 8


def test_padding_counts_in_no_loss_no_gradient_and_no_bias(edges):
    padded, cut = edges["padding"]
    assert padded[0] == pytest.approx(cut[0], rel=1e-6) and len(cut[0]) == 4
    assert padded[1] == pytest.approx(cut[1], rel=1e-5) and padded[2] == cut[2] and sum(cut[2]) == 48


def test_evaluation_computes_what_training_does_for_any_number_of_tokens(edges):
    assert edges["evaluation"] == [True, True, True]
