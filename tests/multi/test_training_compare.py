"""``layerplan compare`` on a recipe's model: two policies, Megatron's own layers, faults that it must name, input
that it refuses."""

from __future__ import annotations

import pytest
from harness import run_ranks
from training_ranks import prepare_data

pytest.importorskip("megatron.core")


def modules_of(found: dict, direction: str) -> list[str]:
    return list(dict.fromkeys(r["module"] for r in found["rows"] if r["direction"] == direction))


@pytest.fixture(scope="module")
def agreeing():
    return run_ranks("compare_ranks:agreeing", 1, 300)[0]


def test_layers_of_experts_agree_module_by_module(agreeing):
    found = agreeing["experts"]["found"]
    assert agreeing["experts"]["status"] == 0 and found["ok"], agreeing["experts"]
    parts = ("self_attention", "pre_mlp_layernorm", "mlp.router", "mlp.shared_experts", "mlp")
    names = {f"decoder.layers.{i}.{part}" for i in range(2) for part in parts} | {"decoder.final_layernorm", "loss"}
    assert set(modules_of(found, "forward")) == set(modules_of(found, "backward")) == names


def test_auto_and_reference_agree_whatever_is_fused_recomputed_or_dropped(agreeing):
    layers = [f"decoder.layers.{i}.{part}" for i in range(2) for part in ("self_attention", "mlp")]
    for name in ("fp32", "bf16, dropout, recompute", "fused further"):
        status, found = agreeing[name]["status"], agreeing[name]["found"]
        assert status == 0 and found["ok"] and found["first"] is None, (name, agreeing[name])
        assert modules_of(found, "forward") == [*layers, "decoder.final_layernorm", "loss"], name
        assert modules_of(found, "backward") == ["loss", "decoder.final_layernorm", *layers[::-1]], name
        assert all(r["a"]["errors"]["largest"] <= r["limit"]["largest"] for r in found["rows"]), name
        assert found["loss"][0] == pytest.approx(found["loss"][1], rel=1e-3) and found["loss"][0] > 1, name
    rows = agreeing["bf16, dropout, recompute"]["found"]["rows"]
    assert {r["dtype"] for r in rows if r["tensor"] == "gradient of fc1"} == {"float32"}, (
        "weight gradients are added to main_grad"
    )
    assert {r["call"] for r in rows if r["module"] == layers[0]} == {0, 1}, "full recompute runs a layer twice"


def test_megatrons_own_layers_are_a_side_with_the_same_parameters(agreeing):
    for name, ours, theirs in (("megatron", "a", "b"), ("megatron, further", "b", "a")):
        status, found = agreeing[name]["status"], agreeing[name]["found"]
        assert status == 0 and found[theirs] == "megatron", (name, agreeing[name])
        assert found["loss"][0] == pytest.approx(found["loss"][1], rel=1e-3), name
        assert found["grad_norm"][0] == pytest.approx(found["grad_norm"][1], rel=1e-2), name
        assert not any(r[ours]["absent"] for r in found["rows"]), name
    absent = {r["module"] for r in agreeing["megatron, further"]["found"]["rows"] if r["a"]["absent"]}
    assert absent == {"decoder.layers.0.mlp", "decoder.layers.1.mlp", "loss"}, (
        "their plans go further than Megatron's modules"
    )
    rows = agreeing["megatron"]["found"]["rows"]
    assert not any(r["b"]["absent"] for r in rows) and all(r["b"]["engines"] == "Megatron's own" for r in rows)
    measured = {r["tensor"] for r in rows if r["module"] == "decoder.layers.0.self_attention"}
    assert measured == {
        "output",
        *(
            f"gradient of {n}"
            for n in ("x", "qkv", "qkv_bias", "proj", "norm_weight", "q_norm_weight", "k_norm_weight")
        ),
    }


def test_a_wrong_engine_or_module_is_named_first_in_the_forward_and_in_the_backward_alone():
    found = run_ranks("compare_ranks:faulty", 1, 240)[0]
    assert {name: one["status"] for name, one in found.items()} == {"linear": 1, "linear_wgrad": 1, "megatron": 1}, (
        found
    )
    first = found["linear"]["found"]["first"]
    assert (first["module"], first["direction"], first["tensor"]) == (
        "decoder.layers.1.self_attention",
        "forward",
        "output",
    )
    assert not first["a"]["ok"] and first["b"]["ok"] and "linear/torch" in first["a"]["engines"]
    first = found["linear_wgrad"]["found"]["first"]
    assert (
        (first["module"], first["direction"]) == ("decoder.layers.1.mlp", "backward")
        and not first["a"]["ok"]
        and first["b"]["ok"]
    )
    assert all(r["ok"] for r in found["linear_wgrad"]["found"]["rows"] if r["direction"] == "forward")
    first = found["megatron"]["found"]["first"]
    assert (first["module"], first["direction"], first["a"]["ok"], first["b"]["ok"]) == (
        "decoder.layers.0.mlp",
        "forward",
        True,
        False,
    )


def test_what_cannot_be_compared_is_refused_by_name():
    found = run_ranks("compare_ranks:refused", 1, 240)[0]
    said = {
        "recipe": (
            "plan.policy = 'strict'",
            "parallel.tensor * parallel.pipeline = 2",
            "model.attention_dropout = 0.1",
        ),
        "experts": (
            "parallel.tensor * parallel.pipeline, parallel.expert = 2",
            "model.num_experts = 4: Megatron's side is made of its dense local layers",
        ),
        "drawn": ("model.hidden_dropout = 0.1: Megatron's layers draw other masks; set model.hidden_dropout=0",),
        "field": ("num_layres", "num_layers"),
        "both": ("both sides are Megatron's own layers",),
        "text": ("'fastest': must be one of auto, strict, reference",),
        "pattern": ("*.mpl", "did you mean *.mlp"),
        "file": ("none.json: no such file",),
        "strict": ("sdpa on cpu", "a reference is not allowed"),
        "data": ("data.prefix", "no such file"),
    }
    assert found.keys() == said.keys()
    for name, words in said.items():
        assert found[name]["status"] == 2 and found[name]["found"] is None, (name, found[name])
        assert found[name]["said"].startswith("layerplan compare: ") and all(w in found[name]["said"] for w in words), (
            name,
            found[name]["said"],
        )


def test_the_batch_is_the_datas_first_where_the_recipe_names_data(tmp_path):
    (found,) = run_ranks("compare_ranks:with_data", 1, 180, prefix=prepare_data(tmp_path))
    assert found["status"] == 0, found
    assert found["found"]["loss"][0] == pytest.approx(found["found"]["loss"][1], rel=1e-4)
