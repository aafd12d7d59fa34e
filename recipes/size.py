"""What a recipe weighs: parameters and FLOPs, from its numbers alone."""

from __future__ import annotations

from .config import Model, Recipe


def layer_parameters(m: Model) -> int:
    """Parameters of one transformer layer."""
    q, kv, h, f = m.num_attention_heads * m.head_width, m.num_query_groups * m.head_width, m.hidden_size, m.ffn_hidden_size
    fc1 = f * (2 if m.gated else 1)
    weights = h * (q + 2 * kv) + q * h + h * fc1 + f * h
    biases = (q + 2 * kv if m.linear_bias or m.qkv_bias else 0) + (h + fc1 + h if m.linear_bias else 0)
    per_norm = 2 if m.normalization == "LayerNorm" else 1
    norms = per_norm * (2 * h + (2 * m.head_width if m.qk_norm else 0))
    return weights + biases + norms


def parameter_count(recipe: Recipe) -> int:
    """Parameters of the whole model, tied ones once."""
    m = recipe.model
    embeddings = m.vocab_size * m.hidden_size * (1 if m.tie_embeddings else 2)
    return m.num_layers * layer_parameters(m) + embeddings + m.hidden_size * (2 if m.normalization == "LayerNorm" else 1)


def flops_per_token(recipe: Recipe) -> float:
    """Model FLOPs of forward and backward per token: matrix products and causal attention, recomputation not counted."""
    m = recipe.model
    q, kv, h, f = m.num_attention_heads * m.head_width, m.num_query_groups * m.head_width, m.hidden_size, m.ffn_hidden_size
    linear = h * (q + 2 * kv) + q * h + h * f * (2 if m.gated else 1) + f * h
    attention = q * m.seq_length  # two products of 2 * q * s FLOPs per token, half of them under the causal mask: 2 q s
    forward = 2 * (m.num_layers * (linear + attention) + h * m.vocab_size)
    return 3.0 * forward
