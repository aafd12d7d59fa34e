"""A swap of layers in a Megatron checkout: what it needs is the core alone, and who answers which slot."""

from __future__ import annotations

import importlib
import importlib.abc
import math
import sys

import pytest
from harness import run_ranks
from test_megatron_layers import _megatron

TRAIN_EXTRA = ("omegaconf", "tokenizers", "tensorboard", "matplotlib", "psutil")


class _Blocked(importlib.abc.MetaPathFinder):
    """As on a machine without the packages."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in TRAIN_EXTRA:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return None


class _Asked:
    """A fallback that notes what it is asked and answers as Megatron's local provider does."""

    def __init__(self):
        from megatron.core.models.backends import LocalSpecProvider

        self.local, self.slots = LocalSpecProvider(), []

    def __getattr__(self, slot):
        self.slots.append(slot)
        return getattr(self.local, slot)


def _importable(name):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        return False
    return True


def _swap():
    """Two steps of a one-layer model in a process in which the packages of the extra ``train`` cannot be imported."""
    there = [name for name in TRAIN_EXTRA if name in sys.modules]
    sys.meta_path.insert(0, _Blocked())
    absent = [name for name in TRAIN_EXTRA if not _importable(name)]
    from layerplan.integration.megatron.provider import LayerplanSpecProvider
    from layerplan.integration.megatron.specs import gpt_block_spec

    with _megatron():
        from parity_model import build, dense_config, layout

        layout()
        out = {"there": there, "absent": absent, "slots": {}}
        run = build(dense_config(num_layers=1), gpt_block_spec(dense_config(num_layers=1)))
        out["losses"] = [run.step()[0] for _ in range(2)]
        out["attention"] = type(run.gpt.decoder.layers[0].self_attention.core_attention).__module__
        out["trainer"] = [n for n in sys.modules if n.startswith("layerplan.integration.training")]
        experts = {"num_moe_experts": 2, "moe_router_dtype": "fp32"}
        for name, changes, moe_layer in (("dense", {}, "layerplan"), ("experts", experts, "layerplan"), ("Megatron's", experts, "megatron")):
            fallback = _Asked()
            config = dense_config(num_layers=1, **changes)
            spec = gpt_block_spec(config, provider=LayerplanSpecProvider(fallback=fallback), moe_layer=moe_layer)
            out["slots"][name] = sorted(set(fallback.slots))
            run = build(config, spec)
            out[f"{name} classes"] = sorted({f"{type(m).__module__}.{type(m).__name__}" for m in run.gpt.decoder.modules()})
            out[f"{name} losses"] = [run.step()[0] for _ in range(3)]
        out["provider"] = _of_providers(dense_config(num_layers=1))
    return out


def _of_providers(config):
    """A provider of one's own: with Megatron's norm it trains; Megatron's core attention does not fit into our attention."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from parity_model import build

    from layerplan.integration.megatron.provider import LayerplanSpecProvider
    from layerplan.integration.megatron.specs import gpt_block_spec

    class Norms(LayerplanSpecProvider):
        def layer_norm(self, rms_norm=False, for_qk=False, has_residual=False):
            return WrappedTorchNorm

    class Attention(LayerplanSpecProvider):
        def core_attention(self):
            return DotProductAttention

    run = build(config, gpt_block_spec(config, provider=Norms()))
    out = {"final_norm": type(run.gpt.decoder.final_layernorm).__module__, "losses": [run.step()[0] for _ in range(2)]}
    try:
        build(config, gpt_block_spec(config, provider=Attention()))
    except ValueError as error:
        return out | {"refused": str(error)}
    return out | {"refused": ""}


@pytest.fixture(scope="module")
def swap():
    return run_ranks("test_megatron_core_alone:_swap", world=1, timeout=120)[0]


def test_layers_build_and_train_without_any_package_of_the_extra_train(swap):
    assert swap["there"] == [] and tuple(swap["absent"]) == TRAIN_EXTRA
    assert swap["trainer"] == [], "the layers import nothing of the trainer"
    assert swap["attention"] == "layerplan.integration.megatron.layers"
    first, second = swap["losses"]
    assert math.isfinite(first) and second < first


def test_a_dense_model_asks_nothing_of_the_fallback(swap):
    assert swap["slots"]["dense"] == []
    assert swap["dense losses"][:2] == swap["losses"]


def test_experts_ask_the_fallback_for_no_more_than_megatrons_layer_wants_of_a_provider(swap):
    assert swap["slots"]["experts"] == [] and swap["slots"]["Megatron's"] == ["activation_func"]
    ours, theirs = ({c.rpartition(".")[2] for c in swap[f"{name} classes"]} for name in ("experts", "Megatron's"))
    assert {"LayerplanMoELayer", "GroupedExperts", "CoreAttention", "Norm"} <= ours
    assert {"MoELayer", "GroupedExperts"} <= theirs and not {"SequentialMLP", "LayerplanMoELayer"} & theirs
    assert "layerplan.integration.megatron.moe_router.TopKRouter" in swap["experts classes"]
    losses = swap["experts losses"]
    assert losses[-1] < losses[0] and swap["Megatron's losses"] == pytest.approx(losses, rel=1e-5)


def test_a_provider_of_ones_own_answers_its_slot_or_is_refused_with_the_slots_name(swap):
    found = swap["provider"]
    assert found["final_norm"].startswith("torch.nn"), "Megatron's wrapper makes torch's norm"
    assert found["losses"] == pytest.approx(swap["losses"], rel=1e-5)
    assert "core_attention = DotProductAttention" in found["refused"] and "CoreAttention" in found["refused"]
