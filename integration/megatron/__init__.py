"""Megatron-Core as host: provider, specs, config map, optimiser pieces, CPU mode and the table of patches."""
