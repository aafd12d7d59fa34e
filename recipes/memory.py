"""Memory of one rank: what is always there, and the most that a step adds, from the plans of the recipe's layers.

A step is walked through as it runs: each region allocates its outputs and the workspace that its engine announced, a
value is freed behind its last reader, and what a plan saves stays until its backward has read it. Sizes and lifetimes
are the plans' own.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ..integration.engines.arch import Arch
from ..integration.graph.ir import ITEMSIZE
from ..modules.moe import receive_rows
from .config import Recipe, refuse_unfit_world
from .estimate import PlannedGraph, RecipePlan, estimate_recipe
from .size import expert_parameters, layer_parameters
from .walk import Again, Alike, Branch, Ledger, Storage, Use, Walk

_HANDLES = 2  # the main thread's and autograd's: PyTorch keeps one cuBLAS workspace for each


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the fullest rank, at the step's peak. ``activations``: what layers have saved for their backward.
    ``logits``: the logits and what the loss makes of them. ``working``: gradients and intermediate results of what runs
    at the peak. ``buffers``: rotary tables, the batch, gathered tokens of the output layer, cuBLAS workspaces."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    working: int
    buffers: int

    @property
    def total(self) -> int:
        return sum(self.terms().values())

    def terms(self) -> dict[str, int]:
        """Name of each part, as the dry run says it, and its bytes."""
        names = [f.name for f in dataclasses.fields(self)]
        return {"optimiser" if n == "optimizer" else n: getattr(self, n) for n in names}


def memory_estimate(recipe: Recipe, arch: Arch, world: int | None = None, planned: RecipePlan | None = None) -> Memory:
    """What PyTorch's allocator holds at most on the fullest of ``world`` ranks (default: one data-parallel replica) of
    ``arch``.

    ``planned``: the recipe's plans where the caller has them. The CUDA context, communication buffers and fragmentation
    are not in it. Layers that are not layerplan's are taken to save what ours do; Megatron's local attention also its
    scores. Raises what ``estimate_recipe`` raises.
    """
    refuse_unfit_world(recipe, world)
    p, t = recipe.parallel, recipe.train
    planned = estimate_recipe(recipe, arch) if planned is None else planned
    data = (world or p.replica) // (p.tensor * p.pipeline)
    micro_batches = t.global_batch // (t.micro_batch * data)
    static = _static(recipe, arch, data)
    peaks = []
    for first, last in {(True, p.pipeline == 1), (p.pipeline == 1, True)}:
        in_flight = 1 if last else min(p.pipeline, micro_batches)
        peaks.append(_Step(recipe, planned, first, last).peak(in_flight))
    peak = max(peaks, key=lambda found: sum(found.values()))
    return Memory(**static, activations=peak["activations"], logits=peak["logits"], working=peak["working"])


def _static(recipe: Recipe, arch: Arch, data: int) -> dict[str, int]:
    """Bytes that are held from step to step on a rank, by field of ``Memory``."""
    m, p, t = recipe.model, recipe.parallel, recipe.train
    width = ITEMSIZE[recipe.precision.tensor_dtype]
    embedding = m.vocab_size * m.hidden_size
    # first and last stage hold an embedding each; a model in one stage holds both (or one, if tied)
    edges = embedding * (1 if p.pipeline > 1 or m.tie_embeddings else 2)
    size = -(-m.num_layers // p.pipeline)
    # of the stage that has most
    with_experts = min(size, m.num_layers - m.moe_dense_layers) if m.num_experts is not None else 0
    routed = with_experts * expert_parameters(m)
    layers = (size - with_experts) * layer_parameters(m) - routed
    layers += with_experts * layer_parameters(m, True) if with_experts else 0
    params, routed = (layers + edges) // p.tensor, routed // (p.expert * p.expert_shards)
    shards = data if p.distributed_optimizer else 1
    expert_shards = max(1, data * p.tensor // (p.expert * p.expert_shards)) if p.distributed_optimizer else 1
    tokens = t.micro_batch * m.seq_length
    batch = tokens * (3 * ITEMSIZE["int64"] + ITEMSIZE["float32"])  # tokens, positions, labels and the loss mask
    rotary = 2 * m.seq_length * m.rotary_width * ITEMSIZE["float32"]  # the angles, their cos and sin
    gathers = p.sequence and p.tensor > 1 and recipe.plan.loss_runs != "chunked"
    gathered = tokens * m.hidden_size * width if gathers else 0
    return {
        "weights": (params + routed) * width, "gradients": (params + routed) * ITEMSIZE["float32"],
        # fp32 moments, and fp32 weights where training is bf16
        "optimizer": (params // shards + routed // expert_shards) * (4 * 3 if width == 2 else 4 * 2),
        "buffers": batch + rotary + gathered + _HANDLES * _cublas_workspace(arch),
    }  # fmt: skip


def _cublas_workspace(arch: Arch) -> int:
    """What PyTorch gives a cuBLAS handle: ``parseChosenWorkspaceSize`` in aten/src/ATen/cuda/CublasHandlePool.cpp."""
    if not arch.is_gpu:
        return 0
    return 32 * 2**20 if arch.capability[0] in (9, 10) else 4096 * 1024 * 2 + 16 * 1024 * 8


def memory_fit(recipe: Recipe, arch: Arch, board: str, gib: float, need: int | None = None) -> str:
    """Whether one replica fits a GPU of ``arch`` called ``board`` with ``gib`` GiB, in one line; where it does not,
    with each single change that makes it fit. ``need``: the total of ``memory_estimate`` where the caller has it."""
    need = (memory_estimate(recipe, arch).total if need is None else need) / 2**30
    if need <= gib:
        return (f"{board} has {gib:.0f} GiB: {gib - need:.0f} are left for the CUDA context, communication buffers and "
                "fragmentation")  # fmt: skip
    return f"it does not fit {board}, which has {gib:.0f} GiB; {_what_makes_it_fit(recipe, arch, int(gib * 2**30))}"


def _what_makes_it_fit(recipe: Recipe, arch: Arch, most: int) -> str:
    # the pins of a plan file may be of this layout alone
    recipe = dataclasses.replace(recipe, plan=dataclasses.replace(recipe.plan, file=None))
    m, p, t = recipe.model, recipe.parallel, recipe.train
    block, found = p.replica, []
    steps, each = t.global_batch // max(t.micro_batch, 1), block // (p.tensor * p.pipeline)
    ranks = (block * n for n in range(2, steps // each + 1) if p.distributed_optimizer and steps % (n * each) == 0)
    if (world := next((w for w in ranks if memory_estimate(recipe, arch, w).total <= most), None)) is not None:
        found.append(f"{world} ranks ({world // block} replicas share the optimiser's state)")

    def fits(section: str, **changes) -> bool:
        changed = dataclasses.replace(recipe, **{section: dataclasses.replace(getattr(recipe, section), **changes)})
        return not changed.validate() and not changed.validate_world(changed.parallel.replica) and memory_estimate(changed, arch).total <= most

    if recipe.plan.recompute != "full" and fits("plan", recompute="full"):
        found.append("plan.recompute=full")
    stages = (n for n in range(p.pipeline + 1, m.num_layers + 1) if m.num_layers % n == 0)
    if (stage := next((n for n in stages if fits("parallel", pipeline=n)), None)) is not None:
        found.append(f"parallel.pipeline={stage}")
    if not found:
        return ("neither more replicas nor plan.recompute=full nor more pipeline stages alone make it fit: raise "
                "parallel.tensor as well")  # fmt: skip
    return f"it does with {', or '.join(found)}"


class _Step(Walk):
    """Forward and backward of a micro-batch on one pipeline stage: the plans, and what Megatron runs between them."""

    def __init__(self, recipe: Recipe, planned: RecipePlan, first: bool, last: bool) -> None:
        super().__init__(Ledger())
        self.recipe, self.first, self.last = recipe, first, last
        kinds: dict[str, list[PlannedGraph]] = {}
        for g in planned.graphs:
            kinds.setdefault(g.kind, []).extend([g] * g.times)
        (self.norm, *_), self.loss = kinds["final_layernorm"], next(iter(kinds.get("loss", ())), None)
        m, p, plan = recipe.model, recipe.parallel, recipe.plan
        self.width = ITEMSIZE[recipe.precision.tensor_dtype]
        self.tokens = recipe.train.micro_batch * m.seq_length
        # of this rank's shard
        self.hidden = self.tokens * m.hidden_size * self.width // (p.tensor if p.sequence else 1)
        # of dropout: bool, on a CPU factors
        self.mask = self.hidden // self.width if planned.graphs[0].plan.arch.is_gpu else self.hidden
        self.weight = m.vocab_size * m.hidden_size * self.width // p.tensor  # of the embedding, and of the output layer
        self.again = {"selective": set(plan.recompute_modules), "full": {"layer"}}.get(plan.recompute, set())
        self.fused_adds = plan.fuse_residual and plan.layers == "layerplan"
        # of the stage with the most layers of experts
        count = len(kinds["self_attention"])
        dense = count - len(kinds.get("pre_mlp_layernorm", ()))
        self.layers = [
            _Halves(self._attention(kinds, i), self._mlp(kinds, i) if i < dense else self._experts(kinds, i - dense))
            for i in range(count)
        ]

    def peak(self, in_flight: int) -> Counter[str]:
        """Bytes by kind when most are held: ``in_flight`` micro-batches forward, one of them back."""
        runs = [self._micro_batch_forward() for _ in range(in_flight)]
        self._micro_batch_backward(*runs[0])
        return self.ledger.peak

    def _micro_batch_forward(self) -> tuple[list, list]:
        """What each layer, and what follows them, has saved."""
        h = self._embedding()
        saved = []
        for halves in self.layers:
            if "layer" in self.again:
                self.ledger.hold(h)
                self.ledger.call(h, "activations")
                out, _ = self._layer(halves, h, False)
                saved.append((halves, h))
            else:
                out, found = self._layer(halves, h, True)
                saved.append((halves, found))
            self.ledger.drop(h)
            h = out
        if not self.last:
            self.ledger.call(h, "activations")  # the schedule keeps what it has sent on
            return saved, [h]
        return saved, self._head(h)

    def _embedding(self) -> Storage:
        """The hidden states that enter the first layer; received where it is another stage's."""
        h = self.ledger.new(self.hidden)
        if self.first and self.recipe.model.hidden_dropout > 0:
            self.ledger.new(self.mask, "activations")  # the mask, until the end of the backward
        return h

    # -- the halves of a layer -----------------------------------------------------------------------------------------

    def _attention(self, kinds: Mapping[str, list[PlannedGraph]], i: int) -> Branch:
        m = self.recipe.model
        if not m.latent:
            return Branch((Use(kinds["self_attention"][i], {"x": "h"}, ("y",)),))
        kv_bytes = self.hidden // m.hidden_size * (m.kv_lora_rank + m.qk_pos_emb_head_dim)
        steps = [Use(kinds["input_layernorm"][i], {"x": "h"}, ("n",))]
        query = "n"
        if m.q_lora_rank is not None:
            steps.append(Use(kinds["linear_q_down_proj"][i], {"x": "n"}, ("q",)))
            query = "q"
        steps.append(Use(kinds["linear_kv_down_proj"][i], {"x": "n"}, ("kv",)))
        steps += [Alike(("kv",), "rope"), Alike(("kv",), "latent", gradient=kv_bytes)]
        latent = "latent"
        if m.qk_norm:
            if m.q_lora_rank is not None:
                steps.append(Use(kinds["q_layernorm"][i], {"x": "q"}, ("q_normed",)))
                query = "q_normed"
            steps.append(Use(kinds["kv_layernorm"][i], {"x": "latent"}, ("normed",)))
            latent = "normed"
        inputs = {"q_latent": query, "kv_latent": latent, "k_rope": "rope"}
        steps.append(Use(kinds["self_attention"][i], inputs, ("out",)))
        return Branch((*steps, Use(kinds["linear_proj"][i], {"x": "out"}, ("y",))))

    def _mlp(self, kinds: Mapping[str, list[PlannedGraph]], i: int) -> Branch | PlannedGraph:
        if self.fused_adds:
            return kinds["mlp"][i]
        branch = Branch((Use(kinds["mlp"][i], {"x": "h"}, ("y",)),))
        return Branch((Again(branch),)) if "mlp" in self.again else branch

    def _experts(self, kinds: Mapping[str, list[PlannedGraph]], i: int) -> Branch:
        """Norm, router, [shared experts,] experts: with rows exchanged between ranks, those that come are taken to be
        as many as those that go."""
        m, named = self.recipe.model, {}
        for g in (*kinds["router"], *kinds["experts"]):
            named.setdefault(g.name.split(" (")[0], g)  # of several policies the first
        tokens, score = self.hidden // (m.hidden_size * self.width), 4 if m.moe_router_dtype == "fp32" else self.width
        table = tokens * m.num_experts * score
        router = named["router"]
        rest = ("",) * (router.plan.derived.num_outputs - 2)
        wide = self.hidden // self.width * 4 if score > self.width else 0  # the tokens in the router's dtype
        steps = [Alike(("n",), "logits", table, self.hidden, keeps=True, passing=wide)]
        steps.append(Use(router, {"logits": "logits"}, ("probs", "table", *rest)))
        if "load-balancing loss" in named:
            steps.append(Use(named["load-balancing loss"], {"logits": "logits"}, ("",)))
        exchanged = "permute" in named
        if exchanged:
            places = ("counts", "offsets", "row_map")
            inputs = {"x": "n", "probs": "probs", "expert_map": "table"}
            steps.append(Use(named["permute"], inputs, ("rows", "row_probs", *places)))
        if m.moe_shared_expert_intermediate_size is not None:
            shared = Branch((Use(kinds["shared_experts"][i], {"x": "n"}, ("shared",)),), "n", "shared")
            steps.append(Again(shared) if "shared_experts" in self.again else shared.steps[0])
        if exchanged:
            sent, room = tokens * m.moe_router_topk, receive_rows(tokens * m.moe_router_topk)
            row = m.hidden_size * self.width
            steps += [
                Alike(("rows",), "inside", room * row, sent * row),
                Alike(("row_probs",), "inside_probs", room * score, sent * score),
                Use(named["experts"], {"x": "inside", "probs": "inside_probs"}, ("done",)),
                Alike(("done",), "back", sent * row, room * row),
                Use(named["unpermute"], {"rows": "back"} | {n: n for n in places}, ("routed",)),
            ]
        else:
            steps.append(Use(named["experts"], {"x": "n", "probs": "probs", "expert_map": "table"}, ("routed",)))
        both = m.moe_shared_expert_intermediate_size is not None
        steps.append(Alike(("routed", "shared"), "y", self.hidden) if both else Alike(("routed",), "y"))
        norm = Use(kinds["pre_mlp_layernorm"][i], {"x": "h"}, ("n",))
        if "moe" in self.again:
            return Branch((norm, Again(Branch(tuple(steps), "n", "y"))))
        return Branch((norm, *steps))

    def _layer(self, halves: _Halves, h: Storage, recorded: bool) -> tuple[Storage, list | None]:
        ledger, masks = self.ledger, []
        out, saved_attention = halves.attention.forward(self, h, recorded)
        scores = self._local_scores(recorded)
        if not isinstance(halves.mlp, Branch):
            (y,), saved_mlp = self.forward(halves.mlp, {"x": out, "residual": h}, recorded)
            ledger.drop(out)
            return y, [saved_attention, saved_mlp, masks, scores] if recorded else None
        middle = self._add(out, recorded, masks)
        y, saved_mlp = halves.mlp.forward(self, middle, recorded)
        top = self._add(y, recorded, masks)
        ledger.drop(middle)
        return top, [saved_attention, saved_mlp, masks, scores] if recorded else None

    def _add(self, branch: Storage, recorded: bool, masks: list[Storage]) -> Storage:
        """Megatron's bias, dropout and residual add behind ``branch``, which goes."""
        ledger, m, made = self.ledger, self.recipe.model, [branch]
        made += [ledger.new(self.hidden) for wanted in (m.linear_bias, m.hidden_dropout > 0) if wanted]
        if recorded and m.hidden_dropout > 0:
            masks.append(ledger.new(self.mask, "activations"))
        out = ledger.new(self.hidden)
        ledger.drop(*made)
        return out

    def _local_scores(self, recorded: bool) -> Storage | None:
        """Scores of Megatron's local attention: float32 out of the softmax, and as the product reads them."""
        m, p = self.recipe.model, self.recipe.parallel
        if not recorded or self.recipe.plan.layers != "megatron_local":
            return None
        count = self.tokens * m.seq_length * m.num_attention_heads // p.tensor
        each = 4 if self.width == 4 else 4 + self.width
        if "core_attn" in self.again:
            self.ledger.passing(count * each)
            return None
        return self.ledger.new(count * each, "activations")

    # -- behind the last layer -----------------------------------------------------------------------------------------

    def _head(self, h: Storage) -> list:
        """Final norm, output layer and loss. ``h`` goes."""
        ledger, loss = self.ledger, self.recipe.plan.loss_runs
        (x,), saved_norm = self.forward(self.norm, {"x": h}, True)
        ledger.drop(h)
        if loss == "chunked":
            results, saved = self.forward(self.loss, {"hidden": x}, True, "logits")
            del results
            ledger.drop(x)
            return [saved_norm, saved]
        ledger.call(x, "activations")  # the output layer keeps it for its weight gradient
        logits = ledger.new(self._logits(self.width), "logits")
        if loss == "fused":
            _, saved = self.forward(self.loss, {"logits": logits}, True, "logits")
        else:
            saved = logits  # float32 logits become the softmax in place, others are converted first
            if self.width < 4:
                saved = ledger.new(self._logits(4), "logits")
                ledger.drop(logits)
            return [saved_norm, x, saved]
        ledger.drop(logits)
        return [saved_norm, x, saved]

    def _logits(self, width: int) -> int:
        return self.tokens * self.recipe.model.vocab_size * width // self.recipe.parallel.tensor

    def _head_backward(self, saved: list) -> tuple[Storage, list[Storage]]:
        """The gradient of the last layer's output, and what stays until the end of the backward: the output layer's
        part of the gradient of tied weights."""
        ledger, plan, kept = self.ledger, self.recipe.plan, []
        tied = self.recipe.model.tie_embeddings and self.first
        if plan.loss_runs == "chunked":
            saved_norm, saved_loss = saved
            dx = self.backward(saved_loss, [None], "logits")["hidden"]
        else:
            saved_norm, x, saved_loss = saved
            if plan.loss_runs == "fused":
                dlogits = self.backward(saved_loss, [None], "logits")["logits"]
            elif self.width == 4:
                dlogits = saved_loss  # in place
            else:
                dlogits = ledger.new(self._logits(self.width), "logits")
                ledger.drop(saved_loss)
            p, m = self.recipe.parallel, self.recipe.model
            whole = self.tokens * m.hidden_size * self.width
            dx = ledger.new(whole)
            if p.sequence and p.tensor > 1:
                shard = ledger.new(self.hidden)
                ledger.drop(dx)
                dx = shard
            weight = ledger.new(self.weight)  # the gradient, or what stands for it
            ledger.drop(dlogits, x, *(() if tied else (weight,)))
            kept += [weight] if tied else []
        dh = self.backward(saved_norm, [dx])["x"]
        ledger.drop(dx)
        return dh, kept

    # -- backward ------------------------------------------------------------------------------------------------------

    def _micro_batch_backward(self, saved: list, head: list) -> None:
        ledger, kept = self.ledger, []
        if self.last:
            grad, kept = self._head_backward(head)
        else:
            grad = ledger.new(self.hidden)  # received
            ledger.drop(*head)
        while saved:
            halves, found = saved.pop()
            if "layer" in self.again:
                h = found
                out, found = self._layer(halves, h, True)
                grad = self._layer_backward(halves, found, grad)
                ledger.drop(out, h)
            else:
                grad = self._layer_backward(halves, found, grad)
        if self.first:
            rows = ledger.new(self.hidden)  # the gradient with the batch in front
            ledger.passing(self.weight)
            ledger.drop(rows)
        ledger.drop(grad, *kept)

    def _layer_backward(self, halves: _Halves, saved: list, grad: Storage) -> Storage:
        """The gradient of the layer's input; ``grad``, that of its output, goes. Autograd adds the residual's in
        place."""
        ledger = self.ledger
        saved_attention, saved_mlp, masks, scores = saved
        if not isinstance(halves.mlp, Branch):
            made = self.backward(saved_mlp, [grad])
            ledger.drop(grad, made.pop("residual", None))
            grad = made.pop("x")
        else:
            grad = self._branch_backward(halves.mlp, saved_mlp, grad, masks)
        if scores is not None:
            ledger.passing(scores.nbytes)
        grad = self._branch_backward(halves.attention, saved_attention, grad, masks)
        ledger.drop(scores)
        return grad

    def _branch_backward(self, branch: Branch, saved: list, grad: Storage, masks: list[Storage]) -> Storage:
        """Backward of an add and of the branch in front of it. The stream's gradient stays where it is and takes the
        branch's."""
        ledger, arrives = self.ledger, grad
        if masks:
            arrives = ledger.new(self.hidden)
            ledger.drop(masks.pop())
        dx = branch.backward(self, saved, arrives)
        ledger.drop(dx, *((arrives,) if arrives is not grad else ()))
        return grad


@dataclass(frozen=True, slots=True)
class _Halves:
    """A layer: what stands between its residual adds, or the MLP's plan that has both adds in it."""

    attention: Branch
    mlp: Branch | PlannedGraph
