"""What test_training_policies runs inside ranks: models of a recipe with policies per module, and what each module got."""

from __future__ import annotations

import logging


def policies(overrides: list[str]) -> dict:
    """This rank's plan-running modules: names in the whole model by layer number, and the policy of each."""
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    from layerplan.integration.training.build import build_model, ranks_of, transformer_config
    from layerplan.modules.base import planned_names
    from layerplan.recipes import load_recipe
    from layerplan.recipes.policies import module_names

    recipe = load_recipe("gpt_tiny", overrides)
    with ranks_of(recipe):
        model = build_model(recipe, transformer_config(recipe))
        modules = dict(model.named_modules())
        return {
            "recipe": list(module_names(recipe)), "layers": [layer.layer_number for layer in model.decoder.layers],
            "modes": {n: modules[n].__dict__["_policy"].mode for n in planned_names(model)},
        }  # fmt: skip


def one_rank() -> list:
    return [policies(["plan.per_module=decoder.layers.1.*=reference,*.final_layernorm=strict", *more]) for more in ([], ["model.qk_norm=true"])]


def two_stages() -> dict:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return policies(["model.num_layers=4", "parallel.pipeline=2",
                     "plan.per_module=decoder.layers.0.mlp=reference,decoder.layers.3.*=strict,*.final_layernorm=reference"])  # fmt: skip
