"""What a recipe weighs: parameters and FLOPs, from its numbers alone."""

from __future__ import annotations

from .config import Model, Recipe


def attention_matrices(m: Model) -> int:
    """Weights of the products of one layer's attention."""
    h, heads = m.hidden_size, m.num_attention_heads
    if not m.latent:
        q, kv = heads * m.head_width, m.num_query_groups * m.head_width
        return h * (q + 2 * kv) + q * h
    queries = heads * m.head_width
    query = h * queries if m.q_lora_rank is None else m.q_lora_rank * (h + queries)
    keys = h * (m.kv_lora_rank + m.qk_pos_emb_head_dim) + m.kv_lora_rank * heads * (m.qk_head_dim + m.v_head_dim)
    return query + keys + heads * m.v_head_dim * h


def mlp_matrices(m: Model, width: int) -> int:
    """Weights of the products of one MLP of ``width`` hidden units."""
    return m.hidden_size * width * (3 if m.gated else 2)


def expert_parameters(m: Model) -> int:
    """Parameters of all experts of one layer: what expert parallelism shares."""
    return (m.num_experts or 0) * mlp_matrices(m, m.expert_width)


def layer_parameters(m: Model, experts: bool = False) -> int:
    """Parameters of one transformer layer, dense or with experts."""
    h, f = m.hidden_size, m.ffn_hidden_size
    per_norm = 2 if m.normalization == "LayerNorm" else 1
    latents = (m.kv_lora_rank or 0) + (m.q_lora_rank or 0)
    norms = per_norm * (2 * h + (latents if m.latent else 2 * m.head_width) * m.qk_norm)
    biases = h if m.linear_bias else 0  # of the attention's output
    if not m.latent and (m.linear_bias or m.qkv_bias):
        biases += (m.num_attention_heads + 2 * m.num_query_groups) * m.head_width
    if not experts:
        biases += (f * (2 if m.gated else 1) + h) if m.linear_bias else 0
        return attention_matrices(m) + mlp_matrices(m, f) + biases + norms
    shared = mlp_matrices(m, m.moe_shared_expert_intermediate_size or 0)
    return attention_matrices(m) + m.num_experts * h + expert_parameters(m) + shared + biases + norms


def parameter_count(recipe: Recipe) -> int:
    """Parameters of the whole model, tied ones once."""
    m = recipe.model
    embeddings = m.vocab_size * m.hidden_size * (1 if m.tie_embeddings else 2)
    layers = sum(count * layer_parameters(m, experts) for experts, count in _layers(m))
    return layers + embeddings + m.hidden_size * (2 if m.normalization == "LayerNorm" else 1)


def _layers(m: Model) -> tuple[tuple[bool, int], ...]:
    """(whether they have experts, how many layers), for each kind that there is."""
    dense = m.num_layers if m.num_experts is None else m.moe_dense_layers
    return tuple(row for row in ((False, dense), (True, m.num_layers - dense)) if row[1])


def flops_per_token(recipe: Recipe) -> float:
    """Model FLOPs of forward and backward per token: matrix products, of the experts those that a token takes, and
    causal attention; recomputation not counted."""
    m = recipe.model
    value = m.v_head_dim if m.latent else m.head_width
    # two products of 2 * width * s FLOPs per token, half of them under the causal mask: width * s each
    attention = m.num_attention_heads * (m.head_width + value) * m.seq_length / 2
    forward = m.num_layers * (attention_matrices(m) + attention) + m.hidden_size * m.vocab_size
    for experts, count in _layers(m):
        width = (
            m.moe_router_topk * m.expert_width + (m.moe_shared_expert_intermediate_size or 0)
            if experts
            else m.ffn_hidden_size
        )
        forward += count * (mlp_matrices(m, width) + (m.num_experts * m.hidden_size if experts else 0))
    return 3.0 * 2 * forward
