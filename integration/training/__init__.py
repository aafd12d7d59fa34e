"""From a recipe to a trained model: data, trainer, checkpoints, metrics, on Megatron-Core's own parts."""
