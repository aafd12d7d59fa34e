"""plan.per_module on real models: the recipe's names are the model's, and layers count through all pipeline stages."""

from __future__ import annotations

import pytest
from harness import run_ranks

pytest.importorskip("megatron.core")


def test_the_names_of_a_recipe_are_those_of_its_model_and_each_module_gets_its_policy():
    for found in run_ranks("policy_ranks:one_rank", 1, 180)[0]:
        assert sorted(found["recipe"]) == sorted(found["modes"])
        for name, mode in found["modes"].items():
            assert mode == ("reference" if ".layers.1." in name else "strict" if name.endswith("final_layernorm") else "auto"), name


def test_patterns_number_the_layers_through_all_pipeline_stages():
    first, second = run_ranks("policy_ranks:two_stages", 2, 240)
    assert (first["layers"], second["layers"]) == ([1, 2], [3, 4])
    own = {n: m for n, m in first["modes"].items() if m != "auto"}
    assert own == {"decoder.layers.0.mlp": "reference"}
    own = {n: m for n, m in second["modes"].items() if m != "auto"}
    assert own == {n: "strict" for n in second["modes"] if n.startswith("decoder.layers.1.")} | {"decoder.final_layernorm": "reference"}
    assert any(n.startswith("decoder.layers.0.") for n in second["modes"]), "the stage's own count starts at 0"
