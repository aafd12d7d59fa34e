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
from ..integration.graph.ir import ITEMSIZE, Dim, TensorSpec
from ..integration.graph.ops.table import op_table
from ..integration.planner.planner import GraphPlan, PlannedRegion
from .config import Recipe
from .estimate import PlannedGraph, RecipePlan, estimate_recipe
from .size import layer_parameters

_ROUND = 512  # the caching allocator rounds each tensor up to this
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
    p, t = recipe.parallel, recipe.train
    planned = estimate_recipe(recipe, arch) if planned is None else planned
    data = max(1, (world or p.tensor * p.pipeline) // (p.tensor * p.pipeline))
    micro_batches = max(1, t.global_batch // (t.micro_batch * data))
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
    params = (-(-m.num_layers // p.pipeline) * layer_parameters(m) + edges) // p.tensor
    shards = data if p.distributed_optimizer else 1
    tokens = t.micro_batch * m.seq_length
    batch = tokens * (3 * ITEMSIZE["int64"] + ITEMSIZE["float32"])  # tokens, positions, labels and the loss mask
    rotary = 2 * m.seq_length * m.head_width * ITEMSIZE["float32"]  # the angles, their cos and sin
    gathers = p.sequence and p.tensor > 1 and recipe.plan.loss_runs != "chunked"
    gathered = tokens * m.hidden_size * width if gathers else 0
    return {
        "weights": params * width, "gradients": params * ITEMSIZE["float32"],
        # fp32 moments, and fp32 weights where training is bf16
        "optimizer": params * (4 * 3 if width == 2 else 4 * 2) // shards,
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
    block, found = p.tensor * p.pipeline, []
    steps = t.global_batch // max(t.micro_batch, 1)
    ranks = (block * n for n in range(2, steps + 1) if p.distributed_optimizer and steps % n == 0)
    if (world := next((w for w in ranks if memory_estimate(recipe, arch, w).total <= most), None)) is not None:
        found.append(f"{world} ranks ({world // block} replicas share the optimiser's state)")

    def fits(section: str, **changes) -> bool:
        changed = dataclasses.replace(recipe, **{section: dataclasses.replace(getattr(recipe, section), **changes)})
        return not changed.validate() and memory_estimate(changed, arch).total <= most

    if recipe.plan.recompute != "full" and fits("plan", recompute="full"):
        found.append("plan.recompute=full")
    stages = (n for n in range(p.pipeline + 1, m.num_layers + 1) if m.num_layers % n == 0)
    if (stage := next((n for n in stages if fits("parallel", pipeline=n)), None)) is not None:
        found.append(f"parallel.pipeline={stage}")
    if not found:
        return ("neither more replicas nor plan.recompute=full nor more pipeline stages alone make it fit: raise "
                "parallel.tensor as well")  # fmt: skip
    return f"it does with {', or '.join(found)}"


# ---- a step on a ledger ----------------------------------------------------------------------------------------------


class _Storage:
    __slots__ = ("holders", "kind", "nbytes")

    def __init__(self, kind: str, nbytes: int) -> None:
        self.kind, self.nbytes, self.holders = kind, nbytes, 1


class _Ledger:
    """Bytes that are held now and at the peak, by kind. A storage is held once by whoever made it; None stands for
    tensors that are there all the time."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._total = self._most = 0

    def new(self, nbytes: int, kind: str = "working") -> _Storage:
        made = _Storage(kind, -(-nbytes // _ROUND) * _ROUND)
        self._change(kind, made.nbytes)
        return made

    def _change(self, kind: str, nbytes: int) -> None:
        self.now[kind] += nbytes
        self._total += nbytes
        if self._total > self._most:
            self._most, self.peak = self._total, self.now.copy()

    def hold(self, *storages: _Storage | None) -> None:
        for s in storages:
            if s is not None:
                s.holders += 1

    def drop(self, *storages: _Storage | None) -> None:
        for s in storages:
            if s is not None:
                s.holders -= 1
                if not s.holders:
                    self._change(s.kind, -s.nbytes)

    def call(self, storage: _Storage | None, kind: str) -> None:
        """From now on ``storage`` counts as ``kind``."""
        if storage is not None and storage.kind != kind:
            self.now[storage.kind] -= storage.nbytes
            self.now[kind] += storage.nbytes
            storage.kind = kind

    def passing(self, nbytes: int, kind: str = "working") -> None:
        """What is allocated and freed at once."""
        self.drop(self.new(nbytes, kind))


type Values = dict[str, _Storage | None]


@dataclass(slots=True)
class _Saved:
    """What waits for a plan's backward."""

    graph: PlannedGraph
    values: Values


class _Walk:
    """Plans on a ledger. ``kind``: what large intermediate results count as."""

    def __init__(self, ledger: _Ledger) -> None:
        self.ledger = ledger

    def forward(
        self, g: PlannedGraph, given: Values, recorded: bool, kind: str = "working"
    ) -> tuple[_Storage | None, _Saved | None]:
        """Run a forward plan. ``given``: its inputs that are not there all the time; the caller keeps holding them. The
        first output is held for the caller; with ``recorded`` so is what the backward reads."""
        part, derived = g.plan.forward, g.plan.derived
        saved = derived.saved if recorded else ()
        outputs = part.graph.outputs[: derived.num_outputs]
        self.ledger.hold(*given.values())
        values = dict(given)
        self._regions(part, values, {*outputs, *saved}, g.sizes, kind)
        for v in saved:
            self.ledger.hold(values.get(v))
            self.ledger.call(values.get(v), "logits" if kind == "logits" else "activations")
        out = values[outputs[0]]
        self.ledger.hold(out)
        self.ledger.drop(*values.values())
        return out, _Saved(g, {v: s for v in saved if (s := values.get(v)) is not None}) if recorded else None

    def backward(self, saved: _Saved, grad: _Storage | None, kind: str = "working") -> _Storage | None:
        """Run a plan's backward from the gradient of its first output, which the caller keeps holding. Returns the
        gradient of its first input, held for the caller. Weight gradients, and what stands for those that were added
        elsewhere, go at its end."""
        g = saved.graph
        plan, part = g.plan, g.plan.backward
        names = [v for v in part.graph.inputs if v not in plan.derived.saved and not v.startswith("main_grad")]
        values = {v: saved.values.get(v) for v in part.graph.inputs if v in plan.derived.saved} | {names[0]: grad}
        self.ledger.hold(grad)
        unread = [v for v in saved.values if v not in values]
        self.ledger.drop(*(saved.values[v] for v in unread))
        self._regions(part, values, set(part.graph.outputs), g.sizes, kind)
        weights = plan.forward.graph
        buffers = [v for v in part.graph.inputs if v.startswith("main_grad")]
        added = [weights.inputs[int(v.removeprefix("main_grad"))] for v in buffers]
        dummies = [self.ledger.new(_nbytes(weights.specs[v], g.sizes)) for v in added]
        result = values[part.graph.outputs[0]]
        self.ledger.hold(result)
        self.ledger.drop(*dummies, *values.values())
        return result

    def _regions(self, part: GraphPlan, values: Values, keep: set[str], sizes: Mapping[str, int], kind: str) -> None:
        """Run regions in order. ``values`` comes with the inputs, each held once, and leaves with ``keep`` alone."""
        last = {v: i for i, r in enumerate(part.regions) for v in (*r.region.graph.inputs, *r.region.graph.outputs)}
        for i, r in enumerate(part.regions):
            views = _views(r)
            for v in r.region.graph.outputs:
                if v in views:
                    values[v] = values.get(views[v])
                    self.ledger.hold(values[v])
                else:
                    values[v] = self.ledger.new(_nbytes(r.region.graph.specs[v], sizes), kind)
            self.ledger.passing(r.offer.workspace_bytes, kind)
            for v in (*r.region.graph.inputs, *r.region.graph.outputs):
                if v in values and last[v] == i and v not in keep:
                    self.ledger.drop(values.pop(v))


def _views(r: PlannedRegion) -> dict[str, str]:
    """Outputs of a region that need no memory of their own -> the input that they lie in. What a region computes beside
    them is compiled, and then views are results of their own."""
    table, nodes = op_table(), r.region.nodes
    sums = [(n.output("dweight"), n.input("accumulate")) for n in nodes]
    found = {made: into for made, into in sums if made is not None and into is not None}
    if r.engine == "runner":
        (n,) = nodes
        return {n.output("y"): n.input("x")} if n.op == "group_copy" or n.attr("size") == 1 else {}
    if all(table[n.op].aliases for n in nodes):
        for n in nodes:
            source = n.inputs[0][1]
            found |= dict.fromkeys((v for _, v in n.outputs), found.get(source, source))
    return found


def _size(dim: Dim, sizes: Mapping[str, int]) -> int:
    """The size of a dim of a recipe's graph: an input's, that times or over the ranks of a collective, or one computed
    from these."""
    if dim.of:
        return dim.at(lambda d: _size(d, sizes))
    if dim.name in sizes:
        return sizes[dim.name]
    for sign in "*/":
        name, found, count = dim.name.rpartition(sign)
        if found:
            whole = _size(Dim(name), sizes)
            return whole * int(count) if sign == "*" else whole // int(count)
    raise KeyError(f"dim {dim.name}: no input of the graph has it")


def _nbytes(spec: TensorSpec, sizes: Mapping[str, int]) -> int:
    count = ITEMSIZE[spec.dtype]
    for d in spec.shape:
        count *= _size(d, sizes) if isinstance(d, Dim) else d
    return count


class _Step(_Walk):
    """Forward and backward of a micro-batch on one pipeline stage: the plans, and what Megatron runs between them."""

    def __init__(self, recipe: Recipe, planned: RecipePlan, first: bool, last: bool) -> None:
        super().__init__(_Ledger())
        self.recipe, self.first, self.last = recipe, first, last
        kinds: dict[str, list[PlannedGraph]] = {}
        for g in planned.graphs:
            kinds.setdefault(g.kind, []).extend([g] * g.times)
        self.layers = list(zip(kinds["self_attention"], kinds["mlp"], strict=True))
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

    def peak(self, in_flight: int) -> Counter[str]:
        """Bytes by kind when most are held: ``in_flight`` micro-batches forward, one of them back."""
        runs = [self._micro_batch_forward() for _ in range(in_flight)]
        self._micro_batch_backward(*runs[0])
        return self.ledger.peak

    def _micro_batch_forward(self) -> tuple[list, list]:
        """What each layer, and what follows them, has saved."""
        h = self._embedding()
        saved = []
        for attention, mlp in self.layers:
            if "layer" in self.again:
                self.ledger.hold(h)
                self.ledger.call(h, "activations")
                out, _ = self._layer(attention, mlp, h, False)
                saved.append((attention, mlp, h))
            else:
                out, found = self._layer(attention, mlp, h, True)
                saved.append(found)
            self.ledger.drop(h)
            h = out
        if not self.last:
            self.ledger.call(h, "activations")  # the schedule keeps what it has sent on
            return saved, [h]
        return saved, self._head(h)

    def _embedding(self) -> _Storage:
        """The hidden states that enter the first layer; received where it is another stage's."""
        h = self.ledger.new(self.hidden)
        if self.first and self.recipe.model.hidden_dropout > 0:
            self.ledger.new(self.mask, "activations")  # the mask, until the end of the backward
        return h

    def _layer(
        self, attention: PlannedGraph, mlp: PlannedGraph, h: _Storage, recorded: bool
    ) -> tuple[_Storage, list | None]:
        ledger = self.ledger
        out, saved_attention = self.forward(attention, {"x": h}, recorded)
        masks: list[_Storage] = []
        scores = self._local_scores(recorded)
        if self.fused_adds:
            y, saved_mlp = self.forward(mlp, {"x": out, "residual": h}, recorded)
            ledger.drop(out)
            return y, [saved_attention, saved_mlp, masks, scores] if recorded else None
        middle = self._add(out, recorded, masks)
        if recorded and "mlp" in self.again:
            ledger.hold(middle)
            ledger.call(middle, "activations")
            y, _ = self.forward(mlp, {"x": middle}, False)
            saved_mlp = (mlp, middle)
        else:
            y, saved_mlp = self.forward(mlp, {"x": middle}, recorded)
        top = self._add(y, recorded, masks)
        ledger.drop(middle)
        return top, [saved_attention, saved_mlp, masks, scores] if recorded else None

    def _add(self, branch: _Storage, recorded: bool, masks: list[_Storage]) -> _Storage:
        """Megatron's bias, dropout and residual add behind ``branch``, which goes."""
        ledger, m, made = self.ledger, self.recipe.model, [branch]
        made += [ledger.new(self.hidden) for wanted in (m.linear_bias, m.hidden_dropout > 0) if wanted]
        if recorded and m.hidden_dropout > 0:
            masks.append(ledger.new(self.mask, "activations"))
        out = ledger.new(self.hidden)
        ledger.drop(*made)
        return out

    def _local_scores(self, recorded: bool) -> _Storage | None:
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

    def _head(self, h: _Storage) -> list:
        """Final norm, output layer and loss. ``h`` goes."""
        ledger, loss = self.ledger, self.recipe.plan.loss_runs
        x, saved_norm = self.forward(self.norm, {"x": h}, True)
        ledger.drop(h)
        if loss == "chunked":
            _, saved = self.forward(self.loss, {"hidden": x}, True, "logits")
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

    def _head_backward(self, saved: list) -> tuple[_Storage, list[_Storage]]:
        """The gradient of the last layer's output, and what stays until the end of the backward: the output layer's
        part of the gradient of tied weights."""
        ledger, plan, kept = self.ledger, self.recipe.plan, []
        tied = self.recipe.model.tie_embeddings and self.first
        if plan.loss_runs == "chunked":
            saved_norm, saved_loss = saved
            dx = self.backward(saved_loss, None, "logits")
        else:
            saved_norm, x, saved_loss = saved
            if plan.loss_runs == "fused":
                dlogits = self.backward(saved_loss, None, "logits")
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
        dh = self.backward(saved_norm, dx)
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
            found = saved.pop()
            if "layer" in self.again:
                attention, mlp, h = found
                out, found = self._layer(attention, mlp, h, True)
                grad = self._layer_backward(found, grad)
                ledger.drop(out, h)
            else:
                grad = self._layer_backward(found, grad)
        if self.first:
            rows = ledger.new(self.hidden)  # the gradient with the batch in front
            ledger.passing(self.weight)
            ledger.drop(rows)
        ledger.drop(grad, *kept)

    def _layer_backward(self, saved: list, grad: _Storage) -> _Storage:
        """The gradient of the layer's input; ``grad``, that of its output, goes. Autograd adds the residual's in
        place."""
        ledger = self.ledger
        saved_attention, saved_mlp, masks, scores = saved
        if isinstance(saved_mlp, tuple):
            mlp, middle = saved_mlp
            again, saved_mlp = self.forward(mlp, {"x": middle}, True)
            grad = self._branch_backward(saved_mlp, grad, masks)
            ledger.drop(again, middle)
        elif self.fused_adds:
            both = self.backward(saved_mlp, grad)
            ledger.drop(grad)
            grad = both
        else:
            grad = self._branch_backward(saved_mlp, grad, masks)
        if scores is not None:
            ledger.passing(scores.nbytes)
        grad = self._branch_backward(saved_attention, grad, masks)
        ledger.drop(scores)
        return grad

    def _branch_backward(self, saved: _Saved, grad: _Storage, masks: list[_Storage]) -> _Storage:
        """Backward of an add and of the branch in front of it. The stream's gradient stays where it is and takes the
        branch's."""
        ledger, arrives = self.ledger, grad
        if masks:
            arrives = ledger.new(self.hidden)
            ledger.drop(masks.pop())
        dx = self.backward(saved, arrives)
        ledger.drop(dx, *((arrives,) if arrives is not grad else ()))
        return grad
