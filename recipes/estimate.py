"""The plans of a recipe's layers for an arch, and what they add up to: without a GPU, and without Megatron."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import torch

from ..integration.engines.arch import Arch
from ..integration.engines.manifest import BY_ID
from ..integration.graph.ir import GraphBuilder
from ..integration.planner.applied import Applied, applied
from ..integration.planner.plan_file import Pins, pins_of
from ..integration.planner.planner import Plan, plan
from ..integration.planner.policy import Policy
from ..integration.planner.records import NONE, Records
from ..integration.planner.shapes import SpecMaker
from ..integration.planner.text import aligned
from ..integration.planner.tune import Workload
from .config import Recipe, load_pins, load_records, refuse_unfit_world
from .graphs import NEEDS_GRAD, graphs_of
from .policies import policy_of, stages_of

_MEGATRONS_PRODUCTS = "linear/torch"  # what Megatron's own output layer runs


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedGraph:
    """One distinct graph of the model: its plan and how often a micro-batch runs it on the fullest rank. ``kind``:
    which modules run it, one of ``policies.MODULE_KINDS``; ``sizes``: of its symbolic dims, by name."""

    kind: str
    name: str
    plan: Plan
    times: int
    sizes: Mapping[str, int]

    @property
    def seconds(self) -> float:
        return self.times * (self.plan.forward.seconds + (self.plan.backward.seconds if self.plan.backward else 0.0))


@dataclasses.dataclass(frozen=True, slots=True)
class RecipePlan:
    """Predictions from datasheet rates, and from measured times where records hold some; ``outside_seconds`` are the
    output layer's products where Megatron runs them itself. Embedding, residual adds (but for plan.fuse_residual),
    Megatron's own loss, optimiser and communication are not in the time. ``plan_file`` and ``records``: what it was
    planned with. ``ranks``: how many it is planned for; ``stages``: pipeline stages among them."""

    recipe: str
    arch: str
    ranks: int
    stages: int
    graphs: tuple[PlannedGraph, ...]
    micro_batches: int
    tokens_per_step: int
    outside_seconds: float
    planning_ms: float
    plan_file: Pins | None = None
    records: Records = NONE

    @property
    def applied(self) -> Applied:
        """How much of the plan file and of the records these plans take."""
        return applied(self.arch, (g.plan for g in self.graphs), self.plan_file, self.records)

    def pins(self) -> Pins:
        """What ``layerplan plan --save`` writes."""
        return pins_of(g.plan for g in self.graphs)

    @property
    def step_seconds(self) -> float:
        return self.micro_batches * (sum(g.seconds for g in self.graphs) + self.outside_seconds)

    def to_json(self) -> dict[str, Any]:
        """Nested plain values. ``step_seconds`` and ``us``: measured where a record says so, else predicted; the
        regions tell which."""
        found = self.applied
        return {
            "recipe": self.recipe, "arch": self.arch, "ranks": self.ranks, "stages": self.stages, "micro_batches": self.micro_batches,
            "tokens_per_step": self.tokens_per_step, "step_seconds": self.step_seconds,
            "planning_ms": round(self.planning_ms, 3), "regions": found.regions, "measured_regions": found.measured,
            "pinned_regions": found.pinned,
            "graphs": [{"kind": g.kind, "name": g.name, "times": g.times, "signature": g.plan.signature,
                        "us": round(g.seconds * 1e6, 1), "regions": g.plan.choices()} for g in self.graphs],
        }  # fmt: skip

    def __str__(self) -> str:
        ranks = f", {self.ranks} rank{'s' if self.ranks > 1 else ''}"
        if self.stages > 1:
            ranks += f" ({self.stages} pipeline stages: the layers of one, loss of the last)"
        lines = [f"plan        {self.recipe} on {self.arch}{ranks}: {len(self.graphs)} distinct graphs, planned in "
                 f"{self.planning_ms:.0f} ms"]  # fmt: skip
        found = self.applied
        for g in self.graphs:
            lines.append(f"  {g.name} x {g.times}  about {g.seconds * 1e3:.2f} ms a micro-batch")
            for row in g.plan.choices():
                us, mark = row["predicted_us"], ""
                if row["measured_us"] is not None:
                    us, mark = row["measured_us"], " measured"
                what = f"{row['pass']:<8} {'+'.join(row['ops']):<28} {row['engine']:<24}"
                lines.append(f"    {what} {us:>10.1f} us{mark}")
        lines += self._references()
        if self.plan_file is not None:
            lines.append(f"plan file   {self.plan_file.source}: {found.of_pins(self.plan_file)}")
        if self.records is not NONE:
            lines.append(f"records     {self.records.source}: {found.of_records(self.records)}")
        rate = self.tokens_per_step / self.step_seconds
        lines.append(f"time        about {self.step_seconds:.3g} s a step on {self._devices} ({rate:,.0f} tokens/s) in these plans and "
                     f"the output layer: {self._basis(found)}, without optimiser and communication")  # fmt: skip
        return "\n".join(lines)

    @property
    def _devices(self) -> str:
        """What the time is taken on."""
        one = "process" if self.arch == "cpu" else "GPU"
        return f"1 {one}" if self.ranks == 1 else f"{self.ranks} {one}{'es' if self.arch == 'cpu' else 's'}"

    def _basis(self, found: Applied) -> str:
        """What the time is made of."""
        if not found.measured:
            return "a prediction from datasheet rates"
        if found.measured < found.regions:
            return (f"measured times of {found.measured} of {found.regions} regions, predictions from datasheet rates "
                    "for the rest")  # fmt: skip
        return "measured times" + (", the output layer's predicted from datasheet rates" if self.outside_seconds else "")

    def _references(self) -> list[str]:
        """Why regions run on a reference on a GPU: the engines that declined, with the reason of each, once for all ops
        that share them."""
        found: dict[tuple[tuple[str, str], ...], tuple[dict[str, None], dict[str, None]]] = {}
        for g in self.graphs:
            for part in (g.plan.forward, g.plan.backward):
                for r in part.regions if part and g.plan.arch.is_gpu else ():
                    if r.engine not in BY_ID or not BY_ID[r.engine].is_reference:
                        continue
                    chosen, *others = r.candidates
                    declined = (("", chosen.reason),)
                    if g.plan.policy.chooses:
                        declined = tuple((c.engine, c.reason) for c in others)
                    ops, names = found.setdefault(declined, ({}, {}))
                    ops["+".join(r.ops)] = names[g.name] = None
        lines = ["reference   plain PyTorch runs"] if found else []
        for declined, (ops, names) in found.items():
            lines.append(f"  {', '.join(ops)} in {', '.join(names)}, because")
            engines: dict[str, list[str]] = {}
            for engine, reason in declined:
                engines.setdefault(reason, []).append(engine)
            rows = ((f"{', '.join(who)}:" if who[0] else "", why) for why, who in engines.items())
            lines += [f"    {line}" for line in aligned(rows)]
        return lines


def _policies(recipe: Recipe, kind: str) -> list[tuple[Policy, int]]:
    """The policies of the modules of a kind, which run one graph, and how many modules each holds for on the stage
    where it holds most often."""
    policy = policy_of(recipe)
    stages = [[policy.for_module(n) for n in stage] for stage in stages_of(recipe, kind)]
    return [(p, max(s.count(p) for s in stages)) for p in dict.fromkeys(p for s in stages for p in s)]


def workloads(recipe: Recipe) -> list[Workload]:
    """Every distinct graph of ``recipe`` as its layers plan it in training, once for each policy that holds for some of
    them."""
    return [w for w, _ in _sized_workloads(recipe)]


def _sized_workloads(recipe: Recipe) -> list[tuple[Workload, dict[str, int]]]:
    """``workloads``, each with the sizes of its graph's symbolic dims."""
    found = []
    for row in graphs_of(recipe):
        g = row.graph
        weights = tuple(i for i, v in enumerate(g.inputs) if v in g.weights)
        needs = tuple(v in NEEDS_GRAD or v in g.weights for v in g.inputs)
        options = {"needs_grad": needs, "recompute": row.recompute,
                   "accumulate": weights if recipe.plan.gradient_accumulation_fusion else ()}  # fmt: skip
        for policy, count in _policies(recipe, row.kind):
            shown = row.name if policy.mode == recipe.plan.policy else f"{row.name} ({policy.mode})"
            found.append((Workload(row.kind, shown, g, policy, options, count), row.sizes))
    return found


def estimate_recipe(
    recipe: Recipe,
    arch: Arch,
    world: int | None = None,
    *,
    pins: Pins | None = None,
    records: Records | None = None,
) -> RecipePlan:
    """Plan every distinct graph of ``recipe`` for ``arch``. ``world``: number of ranks (default: one data-parallel
    replica). ``pins`` and ``records``: the content of plan.file and plan.records where the caller has it, read here
    otherwise.

    Raises PlanError where the recipe's policy leaves a region without an engine or a pin of plan.file no longer fits,
    RecipeError where the batch does not fit the ranks, or plan.file or the records cannot be read.
    """
    refuse_unfit_world(recipe, world)
    pins = load_pins(recipe) if pins is None else pins
    records = load_records(recipe) if records is None else records
    start = time.perf_counter()
    planned = []
    for w, sizes in _sized_workloads(recipe):
        made = plan(w.graph, arch, w.policy, pins=pins, records=records, **w.options)
        planned.append(PlannedGraph(w.kind, w.name, made, w.times, sizes))
    planning_ms = (time.perf_counter() - start) * 1e3
    m, t, p = recipe.model, recipe.train, recipe.parallel
    data = (world or p.replica) // (p.tensor * p.pipeline)
    micro_batches = t.global_batch // (t.micro_batch * data)
    outside = 0.0 if recipe.plan.loss_runs == "chunked" else _output_layer_seconds(recipe, arch, records)
    tokens = t.global_batch * m.seq_length
    return RecipePlan(recipe.name, arch.name, world or p.replica, p.pipeline, tuple(planned), micro_batches, tokens, outside, planning_ms, pins, records)


def _output_layer_seconds(recipe: Recipe, arch: Arch, records: Records) -> float:
    """What a micro-batch takes in the three products of the output layer that Megatron runs, on one rank."""
    m, dtype = recipe.model, getattr(torch, recipe.precision.tensor_dtype)
    b, spec = GraphBuilder(), SpecMaker()
    tokens = torch.empty(m.seq_length, recipe.train.micro_batch, m.hidden_size, dtype=dtype, device="meta")
    matrix = torch.empty(m.vocab_size // recipe.parallel.tensor, m.hidden_size, dtype=dtype, device="meta")
    x, weight = b.input("x", spec(tokens, "*t k!")), b.input("weight", spec(matrix, "v! k!"))
    graph = b.build([b.op("linear", x=x, weight=weight)])
    made = plan(graph, arch, Policy(engine=_MEGATRONS_PRODUCTS), needs_grad=(True, True), records=records)
    return made.forward.seconds + made.backward.seconds
