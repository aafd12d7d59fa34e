"""Every kernel of our own compiles for every arch that its engine claims, spills nothing, and moves whole vectors."""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Iterator

import pytest

from layerplan.integration.engines.arch import ARCHS
from layerplan.integration.engines.contract import Engine, Kernel
from layerplan.integration.engines.manifest import BY_ID, GPUS, MANIFEST
from layerplan.integration.graph.ir import Dim, Graph, GraphBuilder, TensorSpec
from layerplan.integration.plan_cache import build, cubin
from layerplan.integration.plan_cache.compiler import Compiler
from layerplan.integration.plan_cache.disk import Store
from layerplan.integration.plan_cache.key import chip, keyed, label
from layerplan.integration.planner import tune
from layerplan.integration.planner.planner import plan
from layerplan.integration.planner.policy import Policy
from layerplan.recipes import load_recipe
from layerplan.recipes.estimate import workloads
from tests.cases import cute_norm_quantize, cute_quantize
from tests.cases.cute_norm import knobs
from tests.cases.cute_quantize import BLOCK, MX

HERE = [e for e in MANIFEST if e.absent() is None]
OWN = [e.id for e in HERE if "cutlass" in e.needs and type(e.load()).kernels is not Engine.kernels]
RECIPES = ("llama3_8b", "gpt_125m")
MOST = {"sm_90": 3}  # kernels of one device function for an arch; 1 elsewhere: an idle core takes about 2 s for each

# device function -> the most bytes of local memory a thread that it may use, and why; all others use none
LOCAL: dict[str, tuple[int, str]] = {}
# whole vectors: 16 bytes a thread or more, or bulk copies; 8-bit values that face 16-bit ones take 8 bytes a thread
EIGHT_BITS = ("layerplan.kernels.quantize.sm80.dequantize:dequantize",)
# a few numbers for each token: their launches take the time
NUMBERS = tuple(
    f"layerplan.kernels.moe.sm80.{f}"
    for f in ("group:count", "group:place", "group:total", "router:router", "router:router_bwd")
)
LOADS = re.compile(r"\b(LDG\.E[\w.]*\.(128|256)|LDGSTS\.E[\w.]*\.128|UBLKCP|UTMALDG)")
STORES = re.compile(r"\b(STG\.E[\w.]*\.(64|128|256)|UBLKCP|UTMASTG)")

pytestmark = pytest.mark.skipif(not OWN, reason="needs nvidia-cutlass-dsl")


def quantized(first: str) -> Graph:
    """[rows, 4096] bfloat16, as it is, normed, or what swiglu makes of [rows, 8192], quantised in blocks and back."""
    b, rows = GraphBuilder(), Dim("t", 4096)
    x = b.input("x", TensorSpec((rows, 8192 if first == "swiglu" else 4096), "bfloat16"))
    if first == "swiglu":
        x = b.op("swiglu", x=x)
    elif first == "rms_norm":
        x = b.op("rms_norm", x=x, weight=b.input("weight", TensorSpec((4096,), "bfloat16")), eps=1e-5)
    data, scale = b.op("quantize", x=x, block=(1, 128))
    return b.build([data, scale, b.op("dequantize", data=data, scale_inv=scale, dtype="bfloat16", block=(1, 128))])


def routed(align: int) -> Graph:
    """[tokens, 2048] bfloat16 to 8 of 64 experts in groups of a multiple of ``align`` rows, and back with their weights."""
    b, t = GraphBuilder(), Dim("t", 4096)
    x, logits = b.input("x", TensorSpec((t, 2048), "bfloat16")), b.input("logits", TensorSpec((t, 64), "float32"))
    probs, expert_map = b.op("router", logits=logits, topk=8)
    tokens = b.op("tokens_per_expert", expert_map=expert_map, num_experts=64)
    counts, offsets, row_map = b.op("group_by_expert", expert_map=expert_map, num_experts=64, align=align)
    places = {"counts": counts, "offsets": offsets, "row_map": row_map, "align": align}
    rows, row_probs = b.op("permute", x=x, probs=probs, **places)
    return b.build([b.op("unpermute", rows=rows, probs=probs, **places), row_probs, tokens])


def routed_quantized(align: int) -> Graph:
    """The rows of the same in blocks of 1 x 128."""
    b, t = GraphBuilder(), Dim("t", 4096)
    x, probs = b.input("x", TensorSpec((t, 2048), "bfloat16")), b.input("probs", TensorSpec((t, 8), "float32"))
    counts, offsets, row_map = b.op(
        "group_by_expert", expert_map=b.input("expert_map", TensorSpec((t, 8), "int32")), num_experts=64, align=align
    )
    rows, row_probs = b.op("permute", x=x, probs=probs, counts=counts, offsets=offsets, row_map=row_map, align=align)
    return b.build([*b.op("quantize", x=rows, block=(1, 128)), row_probs])


def work() -> Iterator[tune.Workload]:
    """Graphs that between them hold a region for every engine."""
    for name in RECIPES:
        yield from workloads(load_recipe(name, []))
    for first in ("", "swiglu", "rms_norm"):
        yield tune.Workload("", "quantized", quantized(first), Policy(), {}, 1)
    for align in (1, 128):
        yield tune.Workload("", "routed", routed(align), Policy(), {"needs_grad": (True, True)}, 1)
        yield tune.Workload("", "routed", routed_quantized(align), Policy(), {}, 1)


@functools.cache
def kernels(name: str) -> tuple[dict[str, list[Kernel]], set[str]]:
    """(device function -> some of the kernels that its engine asks for on an arch, the first by name and others evenly
    behind it; the engines that asked)."""
    given, arch = list(work()), ARCHS[name]
    plans = [plan(w.graph, arch, w.policy, **w.options) for w in given]
    found: dict[str, dict[str, Kernel]] = {}
    asked = set()
    for site in tune._sites(given, plans, arch):
        for (engine, _), priced in site.offers.items():
            for kernel in BY_ID[engine].load().kernels(site.region, arch, priced.offer) if engine in OWN else ():
                found.setdefault(kernel.target, {})[label(kernel.target, kernel.constants)] = kernel
                asked.add(engine)
    most = MOST.get(name, 1)
    chosen = {t: [rows[n] for n in sorted(rows)[:: -(-len(rows) // most)]] for t, rows in found.items()}
    return chosen, asked


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Store:
    return Store((tmp_path_factory.mktemp("own"),))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("arch", GPUS)
def test_own_kernels_compile_spill_nothing_and_move_whole_vectors(store, arch):
    compiles_well(store, arch, [kernel for rows in kernels(arch)[0].values() for kernel in rows])


@pytest.mark.timeout(900)
@pytest.mark.parametrize("arch", GPUS)
def test_kernels_whose_scales_go_through_a_workspace_do_so_too(store, arch):
    given = [(c.engine, cute_quantize.region(c), c.knobs) for gate in (False, True)
             for c in (cute_quantize.Case(64, 4096, BLOCK, gate=gate, knobs=cute_quantize.apart()),)]  # fmt: skip
    norm = cute_norm_quantize.Case(
        "rms_norm", 64, 4096, BLOCK, ("weight", "residual"), ("residual_out", "rstd"), transposed=True
    )
    for chosen in (knobs(threads=128, apart=True), knobs(threads=128, rows=2, together=True, apart=True)):
        given.append(("norm_quantize/cute", cute_norm_quantize.regions(norm)[0], chosen))
    asked = [BY_ID[e].load().kernels(r, ARCHS[arch], cute_quantize.offered(e, r, ARCHS[arch], k)) for e, r, k in given]
    used = compiles_well(store, arch, [kernel for some in asked for kernel in some])
    moves = [u.registers for name, u in used if "ScalePlaces" in name]
    assert len(moves) == len(given), "one of each launch"
    assert max(moves) <= 32, "registers that leave a multiprocessor all its threads"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])  # one of each bound on registers
def test_kernels_that_quantise_both_ways_do_so_too(store, arch):
    case = functools.partial(cute_quantize.Case, 64, 4096)
    given = [(c.engine, cute_quantize.region(c), ()) for c in (case(BLOCK), case(MX), case(BLOCK, gate=True))]
    norm = cute_norm_quantize.Case(
        "rms_norm", 64, 4096, BLOCK, ("weight", "residual"), ("residual_out", "rstd"), transposed=True
    )
    for chosen in ((), knobs(threads=128, rows=2, together=True)):
        given.append(("norm_quantize/cute", cute_norm_quantize.regions(norm)[0], chosen))
    asked = [BY_ID[e].load().kernels(r, ARCHS[arch], cute_quantize.offered(e, r, ARCHS[arch], k)) for e, r, k in given]
    compiles_well(store, arch, [kernel for some in asked for kernel in some])


def compiles_well(store: Store, arch: str, wanted: list[Kernel]) -> list[tuple[str, cubin.Resources]]:
    """(name, what it uses) of the device functions of all."""
    compiler, faults, found = Compiler(chip(ARCHS[arch])), [], []
    for kernel in wanted:
        key = keyed(kernel, ARCHS[arch])
        with store.workshop() as folder:
            entry = build.make(key, store, folder, compiler)
        compiled = entry.file(".o").read_bytes()
        faults += [f"{key}: {fault}" for fault in _faults(kernel.target, compiled)]
        found += cubin.resources(compiled).items()
        used = ", ".join(f"{u['registers']} registers" for u in entry.facts["resources"].values())
        print(f"{arch} {key}: {entry.facts['seconds']:.1f} s, {used}")
    compiler.close()
    assert not faults, "\n".join(faults)
    return found


def _faults(target: str, compiled: bytes) -> Iterator[str]:
    used = cubin.resources(compiled)
    if not used:
        yield "no device function"
    allowed, _ = LOCAL.get(target, (0, ""))
    for name, u in used.items():
        if u.frame_bytes > allowed:
            yield f"{name} uses {u.frame_bytes} bytes of local memory a thread, {allowed} are allowed: it spills"
    if target in NUMBERS:
        return
    try:
        code = cubin.machine_code(compiled)
    except (FileNotFoundError, subprocess.CalledProcessError):  # no disassembler, or one that is older than the arch
        return
    loads = re.compile(LOADS.pattern.replace("(128", "(64|128")) if target in EIGHT_BITS else LOADS
    for what, pattern in (("loads", loads), ("stores", STORES)):
        if not pattern.search(code):
            yield f"{what} no whole vectors: {sorted(set(re.findall(r'\b(?:LDG|STG)[\w.]*', code)))}"


@pytest.mark.parametrize("arch", GPUS)
def test_every_engine_with_own_kernels_has_a_region_here(arch):
    missing = [e for e in OWN if arch in BY_ID[e].archs and e not in kernels(arch)[1]]
    assert not missing, f"no graph of this file has a region for {missing}: add one to work()"


def test_a_kernel_that_spills_or_moves_single_values_is_seen(monkeypatch):
    monkeypatch.setattr(cubin, "resources", lambda _: {"k": cubin.Resources(255, 8)})
    monkeypatch.setattr(cubin, "machine_code", lambda _: "LDG.E R0, desc[UR4][R2.64]\nSTG.E.64 desc[UR4][R2.64], R0")
    assert [f.partition(" ")[0] for f in _faults("t", b"")] == ["k", "loads"]
    monkeypatch.setattr(cubin, "machine_code", lambda _: "LDG.E.NA.64 R0\nSTG.E.128")
    assert [f.partition(" ")[0] for f in _faults("t", b"")] == ["k", "loads"]
    assert [f.partition(" ")[0] for f in _faults(EIGHT_BITS[0], b"")] == ["k"]
    assert [f.partition(" ")[0] for f in _faults(NUMBERS[0], b"")] == ["k"]
