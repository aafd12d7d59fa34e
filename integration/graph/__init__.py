"""Graph IR, op table, derived backward graphs and their verification. Imports nothing else of layerplan."""
