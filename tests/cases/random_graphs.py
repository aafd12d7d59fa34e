"""Random graphs over every differentiable op: several nodes, shared values, residuals, optional ports, several outputs."""

from __future__ import annotations

import random

import torch

from layerplan.integration.graph.ir import Dim, Graph, GraphBuilder, TensorSpec

B, S, HK, GROUP, D = 2, 3, 1, 2, 4
N = (GROUP + 2) * HK * D  # width of the stream: a fused QKV projection keeps it
CLASSES = 5
TOKENS, EXPERTS = 7, 3


class RandomGraph:
    """``graph``; ``tensors``: one per input; ``needs``: which inputs receive a gradient."""

    def __init__(self, seed: int, *, dtype: str = "float64", ops: int = 7, symbolic: bool = False, frozen: float = 0.2,
                 dropout: bool = True) -> None:  # fmt: skip
        self.random, self.gen = random.Random(seed), torch.Generator().manual_seed(seed)
        self.builder, self.dtype, self.dropout = GraphBuilder(), dtype, dropout
        self.lead = (Dim("b", 2), Dim("s", 4)) if symbolic else (B, S)
        self.tokens = Dim("t", 8) if symbolic else TOKENS
        self.tensors: list[torch.Tensor] = []
        self.names: list[str] = []
        self.stream = [self.new((B, S, N)) for _ in range(2)]
        self.extra: list[str] = []  # statistics and losses, which only an output reads
        self.shared: dict[tuple[int, int], str] = {}
        self.tables: set[str] = set()
        for _ in range(ops):
            getattr(self, f"_{self.random.choice(STEPS)}")()
        ends = [self.stream[-1], *self.random.sample(self.stream[:-1], 1), *self.extra]
        outputs = [v for v in dict.fromkeys(ends) if v not in self.names]
        if not outputs:
            outputs = [self.op("add", a=self.stream[0], b=self.stream[1])]
        self.graph: Graph = self.builder.build(outputs)
        needs = [t.is_floating_point() and n not in self.tables and self.random.random() >= frozen
                 for n, t in zip(self.names, self.tensors, strict=True)]  # fmt: skip
        needs[0] = True
        self.needs = tuple(needs)

    def new(self, shape, weight: bool = False, integer: torch.Tensor | None = None) -> str:
        name = f"x{len(self.names)}"
        t = integer
        if t is None:  # weights keep the stream's magnitude: saturated softmaxes would measure conditioning, not gradients
            t = torch.randn(shape, generator=self.gen, dtype=torch.float64) * (N**-0.5 if weight and len(shape) >= 2 else 1.0)
            t = t.to(getattr(torch, self.dtype))
        spec_shape = tuple(shape)
        if tuple(shape[:2]) == (B, S):
            spec_shape = (*self.lead, *shape[2:])
        elif shape[0] == TOKENS:
            spec_shape = (self.tokens, *shape[1:])
        self.builder.input(name, TensorSpec(spec_shape, str(t.dtype).removeprefix("torch.")), weight=weight)
        self.names.append(name)
        self.tensors.append(t)
        return name

    def op(self, name: str, **arguments):
        return self.builder.op(name, **arguments)

    def pick(self) -> str:
        return self.random.choice(self.stream[-3:])

    def maybe(self, make):
        return make() if self.random.random() < 0.5 else None

    def weight(self, n: int, k: int) -> str:
        """Sometimes one that is in use already: tied weights."""
        if (n, k) in self.shared and self.random.random() < 0.4:
            return self.shared[n, k]
        self.shared[n, k] = self.new((n, k), weight=True)
        return self.shared[n, k]

    def _add(self):
        self.stream.append(self.op("add", a=self.pick(), b=self.pick()))

    def _norm(self):
        name = self.random.choice(("rms_norm", "layer_norm"))
        residual = self.maybe(self.pick)
        out = self.op(name, x=self.pick(), weight=self.maybe(lambda: self.new((N,), True)), bias=self.maybe(lambda: self.new((N,), True)),
                      residual=residual, zero_centered=self.random.random() < 0.5)  # fmt: skip
        self.stream += [out] if isinstance(out, str) else [out[1], out[0]]

    def _linear(self):
        self.stream.append(self.op("linear", x=self.pick(), weight=self.weight(N, N), bias=self.maybe(lambda: self.new((N,), True))))

    def _mlp(self):
        kind = self.random.choice(("swiglu", "geglu", "gelu", "squared_relu"))
        width = 2 * N if kind in ("swiglu", "geglu") else N
        attrs = {"approximate": self.random.choice(("none", "tanh"))} if kind in ("geglu", "gelu") else {}
        h = self.op("linear", x=self.pick(), weight=self.weight(width, N))
        self.stream.append(self.op(kind, x=h, row_weight=self.maybe(lambda: self.new((B, S))), clamp=self.random.choice((None, 0.7)), **attrs))

    def _bda(self):
        p, rng = self.random.choice((0.0, 0.3 if self.dropout else 0.0)), {}
        if p:
            rng = {n: self.new((1,), integer=torch.tensor([self.random.randrange(1 << 40)])) for n in ("seed", "offset")}
        self.stream.append(self.op("bias_dropout_add", x=self.pick(), residual=self.pick(), bias=self.maybe(lambda: self.new((N,), True)), p=p, **rng))

    def _attention(self):
        qkv = self.pick()
        q, k, v = self.op("qkv_split", x=qkv, groups=HK, queries_per_group=GROUP, head_dim=D)
        angle = torch.rand(S + 2, D // 2, generator=self.gen, dtype=torch.float64)
        if self.random.random() < 0.7:
            cos, sin = self.table(angle.cos()), self.table(angle.sin())
            options = {"interleaved": self.random.random() < 0.5, "inverse": self.random.random() < 0.3, "seq_axis": 1}
            q, k = (self.op("rope", x=t, cos=cos, sin=sin, **options) for t in (q, k))
        sink = self.maybe(lambda: self.new((HK * GROUP,)))
        window = self.random.choice(((None, None), (1, None), (1, 1)))
        out, lse = self.builder.op("sdpa", want=("out", "lse"), q=q, k=k, v=v, sink=sink, causal=self.random.random() < 0.5, window=window)
        if self.random.random() < 0.4:
            self.extra.append(lse)
        self.stream.append(self.op("qkv_merge", q=out, k=k, v=v))

    def _heads(self):
        x = self.op("unflatten_heads", x=self.pick(), heads=2)
        own, shared = self.op("split", x=x, first=self.random.choice((1, 5)))
        if self.random.random() < 0.7:  # one head for both; else the parts trade places
            shared = self.op("expand_heads", x=self.op("sum_heads", x=shared), heads=2)
        parts = (own, shared) if self.random.random() < 0.5 else (shared, own)
        if self.random.random() < 0.3:  # a split of which one part is read
            own, rest = self.op("split", x=x, first=3)
            parts = (rest, self.op("split", x=x, first=3)[0])
        self.stream.append(self.op("flatten_heads", x=self.op("concat", a=parts[0], b=parts[1])))

    def table(self, values: torch.Tensor) -> str:
        name = f"x{len(self.names)}"
        t = values.to(getattr(torch, self.dtype))
        self.builder.input(name, TensorSpec(tuple(t.shape), self.dtype))
        self.names.append(name)
        self.tensors.append(t)
        self.tables.add(name)
        return name

    def _loss(self):
        x, weight, targets = self.pick(), self.weight(CLASSES, N), torch.randint(0, CLASSES, (B, S), generator=self.gen)
        targets[0, 0] = -100
        linear, t = self.random.random() < 0.5, self.new((B, S), integer=targets)
        op = "linear_cross_entropy" if linear else "cross_entropy"
        ports = {"x": x, "weight": weight} if linear else {"logits": self.op("linear", x=x, weight=weight)}
        if self.random.random() < 0.5:
            self.extra.append(self.op(op, targets=t, **ports))
            return
        first = self.new((1,), integer=torch.zeros(1, dtype=torch.int64))  # all classes as the shard of a single rank
        own, hits = self.op("shard_targets", targets=t, first=first, classes=CLASSES)
        loss, lse = self.builder.op(op, want=("loss", "lse"), targets=own, ignore_index=-1, **ports)
        stats = self.op("stack_shard", loss=loss, lse=lse)
        self.extra.append(self.op("shard_loss", stats=stats, targets=t, hits=hits, classes=CLASSES, **ports))

    def _moe(self):
        """A layer of experts on tokens of its own, with its losses."""
        x, align = self.new((TOKENS, N)), self.random.choice((1, 4))
        logits = self.op("linear", x=x, weight=self.weight(EXPERTS, N))
        kind, topk = self.random.choice((("softmax", False), ("softmax", True), ("sigmoid", False))), self.random.choice((1, 2))
        bias = {"expert_bias": self.table(torch.randn(EXPERTS, generator=self.gen, dtype=torch.float64))} if kind[0] == "sigmoid" else {}
        probs, expert_map = self.op("router", logits=logits, topk=topk, score_function=kind[0], pre_softmax=kind[1],
                                    scaling_factor=self.random.choice((None, 2.0)), **bias)  # fmt: skip
        counts, offsets, row_map = self.op("group_by_expert", expert_map=expert_map, num_experts=EXPERTS, align=align)
        places = {"row_map": row_map, "counts": counts, "offsets": offsets, "align": align}
        early = self.random.random() < 0.5  # probabilities weigh the activations, or the sum at the end
        made = self.op("permute", x=x, probs=probs if early else None, **places)
        rows, weights = made if early else (made, None)
        h = self.op("grouped_matmul", x=rows, weight=self.new((EXPERTS, N, N), True), offsets=offsets, align=align)
        h = self.op("swiglu", x=h, row_weight=weights)
        h = self.op("grouped_matmul", x=h, weight=self.new((EXPERTS, N, N // 2), True), offsets=offsets, align=align)
        self.extra.append(self.op("unpermute", rows=h, probs=None if early else probs, **places))
        mask = self.maybe(lambda: self.new((TOKENS,), integer=torch.rand(TOKENS, generator=self.gen) < 0.3))
        tokens = self.op("tokens_per_expert", expert_map=expert_map, padding_mask=mask, num_experts=EXPERTS)
        self.extra.append(self.op("load_balancing_loss", logits=logits, tokens_per_expert=tokens, padding_mask=mask, topk=topk, score_function=kind[0]))
        self.extra.append(self.op("z_loss", logits=logits, padding_mask=mask))

    def _collective(self):
        name = self.random.choice(("all_gather", "reduce_scatter", "all_reduce", "group_copy"))
        self.stream.append(self.op(name, x=self.pick(), group="tp", size=1))


STEPS = ("add", "norm", "norm", "linear", "mlp", "mlp", "bda", "attention", "attention", "heads", "loss", "moe", "collective")
