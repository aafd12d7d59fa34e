"""What a recipe weighs: parameters, FLOPs and memory, from its numbers alone."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ..integration.engines.manifest import CHUNK_BYTES
from ..integration.graph.ir import ITEMSIZE
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


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the fullest rank. ``activations`` and ``logits`` are estimates of the first pipeline stage's peak."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits


def memory_estimate(recipe: Recipe, world: int | None = None) -> Memory:
    """Bytes per rank on ``world`` ranks (default: one data-parallel replica). No fragmentation, no communication buffers."""
    m, p, t = recipe.model, recipe.parallel, recipe.train
    world = world or p.tensor * p.pipeline
    data = max(1, world // (p.tensor * p.pipeline))
    width = ITEMSIZE[recipe.precision.tensor_dtype]
    embedding = m.vocab_size * m.hidden_size
    # first and last stage hold an embedding each; a model in one stage holds both (or one, if tied)
    edges = embedding * (1 if p.pipeline > 1 or m.tie_embeddings else 2)
    params = (m.num_layers // p.pipeline * layer_parameters(m) + edges) // p.tensor
    shards = data if p.distributed_optimizer else 1
    state = params * (4 * 3 if width == 2 else 4 * 2) // shards  # fp32 moments, and fp32 weights where training is bf16
    tokens = t.micro_batch * m.seq_length
    layers, in_flight = m.num_layers // p.pipeline, min(p.pipeline, max(1, t.global_batch // (t.micro_batch * data)))
    replicated = p.tensor if p.sequence else 1
    if recipe.plan.recompute == "full":
        per_layer, extra = tokens * m.hidden_size * width // replicated, _layer_activations(m, tokens, width, p.tensor, replicated)
    else:
        per_layer, extra = _layer_activations(m, tokens, width, p.tensor, replicated), 0
    activations = layers * per_layer * in_flight + extra
    logits = 0 if p.pipeline > 1 else _logits(recipe, tokens, width)
    return Memory(weights=params * width, gradients=params * 4, optimizer=state, activations=activations, logits=logits)


def _logits(recipe: Recipe, tokens: int, width: int) -> int:
    """Bytes of the logits and of what the loss makes of them, at their peak."""
    m, plan = recipe.model, recipe.plan
    whole = tokens * m.vocab_size * width // recipe.parallel.tensor
    if plan.loss_runs == "megatron":
        return whole // width * (width + 4)  # as computed, and fp32 in the loss
    if plan.loss_runs == "fused":
        return 2 * whole  # with their gradient
    part = min(whole, CHUNK_BYTES)  # a weight gradient over several chunks is summed in fp32
    return 2 * part + (m.vocab_size * m.hidden_size * 4 // recipe.parallel.tensor if part < whole and not plan.gradient_accumulation_fusion else 0)


def _layer_activations(m: Model, tokens: int, width: int, tensor: int, replicated: int) -> int:
    """Bytes that one layer keeps for its backward: norm inputs and outputs, q k v, attention output, gate, up and product."""
    qkv = (m.num_attention_heads + 2 * m.num_query_groups) * m.head_width
    attention = m.num_attention_heads * m.head_width
    return tokens * width * (4 * m.hidden_size // replicated + (qkv + attention + m.ffn_hidden_size * (3 if m.gated else 2)) // tensor)


def memory_fit(recipe: Recipe, board: str, gib: float) -> str:
    """Whether ``memory_estimate`` of one replica fits a GPU called ``board`` with ``gib`` GiB, in one line; where it does not, with
    each single change that makes it fit."""
    need = memory_estimate(recipe).total / 2**30
    if need <= gib:
        return f"{board} has {gib:.0f} GiB: {gib - need:.0f} are left for the CUDA context, communication buffers and fragmentation"
    return f"it does not fit {board}, which has {gib:.0f} GiB; {_what_makes_it_fit(recipe, int(gib * 2**30))}"


def _what_makes_it_fit(recipe: Recipe, most: int) -> str:
    m, p, t = recipe.model, recipe.parallel, recipe.train
    block, found = p.tensor * p.pipeline, []
    steps = t.global_batch // max(t.micro_batch, 1)
    ranks = (block * n for n in range(2, steps + 1) if p.distributed_optimizer and steps % n == 0)
    if (world := next((w for w in ranks if memory_estimate(recipe, w).total <= most), None)) is not None:
        found.append(f"{world} ranks ({world // block} replicas share the optimiser's state)")

    def fits(section: str, **changes) -> bool:
        changed = dataclasses.replace(recipe, **{section: dataclasses.replace(getattr(recipe, section), **changes)})
        return not changed.validate() and memory_estimate(changed).total <= most

    if recipe.plan.recompute != "full" and fits("plan", recompute="full"):
        found.append("plan.recompute=full")
    stages = (n for n in range(p.pipeline + 1, m.num_layers + 1) if m.num_layers % n == 0)
    if (stage := next((n for n in stages if fits("parallel", pipeline=n)), None)) is not None:
        found.append(f"parallel.pipeline={stage}")
    if not found:
        return "neither more replicas nor plan.recompute=full nor more pipeline stages alone make it fit: raise parallel.tensor as well"
    return f"it does with {', or '.join(found)}"
