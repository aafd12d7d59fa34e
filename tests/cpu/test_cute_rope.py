"""rope/cute without a GPU: what it takes and declines, where plans put it, its knobs on every arch, and its device code
run thread by thread."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from layerplan.integration.engines.arch import ARCHS
from layerplan.integration.engines.contract import BuildContext, Decline, Offer
from layerplan.integration.engines.manifest import BY_ID, GPUS
from layerplan.integration.engines.packages import locate
from layerplan.integration.graph.autodiff import differentiate
from layerplan.integration.graph.ir import Dim, GraphBuilder, TensorSpec
from layerplan.integration.planner import cover
from layerplan.integration.planner.planner import plan
from layerplan.kernels.rope import config
from layerplan.kernels.rope.cute import CuteRope
from layerplan.modules.graphs import QK_NORM_INPUTS, HeadLayout, NormAttrs, TensorParallel, self_attention_graph
from tests.cases.cute_rope import FORMS, LARGE, Case, cases, fuzzed, knobs, region

ROOT = Path(__file__).resolve().parents[2]
SMEM = 227 * 1024
needs_compiler = pytest.mark.skipif(
    not (locate("cutlass").here and locate("tvm_ffi").here), reason="needs nvidia-cutlass-dsl and apache-tvm-ffi"
)


def answer(case: Case, arch="sm_90"):
    engine, made = CuteRope(), region(case)
    return engine.offer_with(made, ARCHS[arch], case.knobs) if case.knobs else engine.match(made, ARCHS[arch])


def declines(case: Case, *words: str, arch="sm_90") -> None:
    got = answer(case, arch)
    assert isinstance(got, Decline), got
    assert all(w in got.reason for w in words), got.reason


def matched(graph, nodes=None):
    return CuteRope().match(cover.region_of(graph, nodes or graph.nodes), ARCHS["sm_90"])


# ---- what it declines ------------------------------------------------------------------------------------------------


def test_head_dims_ranks_and_dtypes_that_it_has_no_code_for_are_declined_with_the_value():
    declines(Case("alone", keys=0, head_dim=81, half=40), "81", "even")
    declines(Case("alone", keys=0, dtype="float64"), "float64")
    declines(Case("alone", keys=0, table="float64"), "float64")
    declines(Case("split", norm="rms_norm", weight="float64"), "weight", "float64")
    declines(Case("alone", keys=0, tokens=(2, 3, 4)), "3")
    declines(Case("alone", keys=0, head_dim=2048, half=1023), "2048", "vectors of 1")
    assert isinstance(answer(Case("alone", keys=0, head_dim=80, half=24)), Offer)
    assert isinstance(answer(Case("alone", keys=0, head_dim=1024, half=512)), Offer)


def test_tables_of_two_dtypes_and_heads_known_only_at_run_time_are_declined():
    def alone(x, sin="float32"):
        b = GraphBuilder()
        tables = {n: b.input(n, TensorSpec((64, 32), d)) for n, d in (("cos", "float32"), ("sin", sin))}
        return matched(b.build([b.op("rope", x=b.input("x", TensorSpec(x, "bfloat16")), **tables)]))

    assert "one dtype" in alone((Dim("t", 8), 4, 64), "bfloat16").reason
    assert "run time" in alone((Dim("t", 8), Dim("h", 4), 64)).reason
    assert isinstance(alone((Dim("t", 8), 4, 64)), Offer)


def split_with(**changes):
    """Split, norms and rotations; ``changes`` say how keys differ from queries and what leaves the region."""
    b = GraphBuilder()
    x = b.input("x", TensorSpec((Dim("t", 8), 4 * 64), "bfloat16"))
    tables = {n: b.input(n, TensorSpec((64, 32), "float32")) for n in ("cos", "sin")}
    other = b.input("cos2", TensorSpec((64, 32), "float32"))
    q, k, v = b.op("qkv_split", x=x, groups=1, queries_per_group=2, head_dim=64)
    first = b.op("rms_norm", want=("y",), x=q, weight=b.input("w", TensorSpec((64,), "bfloat16")))
    weight = {} if changes.get("no_weight") else {"weight": b.input("w2", TensorSpec((64,), "bfloat16"))}
    second = b.op(changes.get("op", "rms_norm"), want=("y",), x=k, eps=changes.get("eps", 1e-5), **weight)
    a = b.op("rope", x=first, **tables)
    c = b.op(
        "rope",
        x=second,
        **tables | ({"cos": other} if changes.get("tables") else {}),
        interleaved=changes.get("interleaved", False),
    )
    leaves = {"raw": [q], "normed": [first]}.get(changes.get("leaves"), [])
    graph = b.build([a, c, v, *leaves])
    return matched(graph)


@pytest.mark.parametrize(("changes", "word"), [
    ({"op": "layer_norm"}, "the norms"), ({"eps": 1e-6}, "the norms"), ({"no_weight": True}, "the norms"),
    ({"tables": True}, "the rotations"), ({"interleaved": True}, "the rotations"),
    ({"leaves": "raw"}, "q of qkv_split is read by others"), ({"leaves": "normed"}, "y of rms_norm is read by others"),
])  # fmt: skip
def test_queries_and_keys_that_are_treated_differently_or_read_on_the_way_are_declined(changes, word):
    assert isinstance(split_with(), Offer)
    assert word in split_with(**changes).reason


def test_a_norm_a_split_or_a_merge_alone_is_left_to_others():
    made = region(Case("split", norm="rms_norm"))
    for node in made.nodes:
        got = matched(made.graph, [node])
        assert isinstance(got, Offer) if node.op == "rope" else "alone" in got.reason


@pytest.mark.parametrize(("given", "word"), [
    (knobs(threads=48, rounds=2, ahead=False, resident=1), "threads = 48"),
    (knobs(threads=128, rounds=3, ahead=False, resident=1), "rounds = 3"),
    (knobs(threads=128, rounds=2, ahead=False, resident=0), "resident = 0"),
    (knobs(threads=1024, rounds=2, ahead=True, resident=2), "shared memory"),
    (knobs(threads=128, rounds=2), "knob ahead: is not given; there are threads, rounds, ahead, resident"),
    (knobs(threads=128, rounds=2, ahead=False, resident="1"), "knob resident = '1': must be of type int"),
])  # fmt: skip
def test_knobs_that_no_kernel_can_run_with_are_declined_by_name(given, word):
    declines(Case("norm_bwd", norm="rms_norm", head_dim=256, half=128, knobs=given), word, arch="sm_89")


# ---- what it offers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", GPUS)
def test_every_offer_names_the_kernels_that_its_build_asks_for_and_stands_for_its_own_knobs(arch):
    engine, chip = CuteRope(), ARCHS[arch]
    for case in (*cases(), *LARGE, *map(fuzzed, range(200))):
        made = region(case)
        offer, asked = engine.match(made, chip), []
        if isinstance(offer, Decline):
            assert case.head_dim // 2 > 64 and "units" in offer.reason, (case, offer)
            continue
        kernels = engine.kernels(made, chip, offer)
        engine.build(BuildContext(made, chip, offer, lambda kernel, asked=asked: asked.append(kernel)))
        assert tuple(asked) == kernels
        assert json.loads(json.dumps(dict(kernels[0].constants))) == dict(kernels[0].constants)
        assert engine.offer_with(made, chip, offer.knobs) == offer, (case, offer)
        assert cover.fits(made, engine.patterns) or made.ops == ("rope",)


def test_a_norms_gradient_announces_its_partial_sums_and_second_kernel():
    case = Case("norm_bwd", norm="layer_norm", bias=True)
    offer = answer(case)
    assert offer.launches == 2
    assert offer.workspace_bytes == 4 * 4 * 64 * 132 * dict(offer.knobs)["resident"]
    none = answer(dataclasses.replace(case, want=()))
    assert (none.launches, none.workspace_bytes) == (1, 0)


def test_vectors_are_as_wide_as_both_halves_of_a_head_allow():
    found = {
        (d, h, b): config.Span(d, h, b).vector
        for d, h, b in ((128, 64, 2), (80, 24, 2), (80, 20, 2), (70, 35, 2), (128, 64, 4), (64, 0, 2))
    }
    assert list(found.values()) == [8, 8, 4, 1, 4, 8]


@pytest.mark.parametrize(
    ("queries", "keys", "rounds"), [(32, 8, 4), (28, 4, 7), (32, 1, 4), (16, 16, 1), (32, 0, 2), (28, 0, 2), (13, 0, 1)]
)
def test_a_slot_takes_as_many_queries_as_divide_a_group_and_fit_in_flight(queries, keys, rounds):
    span = config.Span(128, 64, 2)
    assert config.rounds_of(span, queries, keys) == rounds
    for backward, nbytes in itertools.product((False, True), (config.STREAMED - 1, config.STREAMED)):
        chosen = config.knobs(span, queries, keys, layer=True, backward=backward, tables=1, smem=SMEM, nbytes=nbytes)
        assert chosen.streaming is (backward and nbytes == config.STREAMED)
        assert config.refusal(chosen, span, queries, keys, backward=backward, smem=SMEM) is None
        tile = config.Tile(span, queries, keys, chosen.threads, chosen.rounds)
        assert tile.per_token * chosen.rounds == queries and tile.splits * tile.slots >= tile.per_token


# ---- plans -----------------------------------------------------------------------------------------------------------


def attention_plan(norm=None, positions=False, arch="sm_90"):
    heads, d = HeadLayout(2, 2, 64), 64
    names = ["x", "qkv", "proj"]
    shapes = [(64, 2, 256), (8 * d, 256), (256, 4 * d)]
    if norm:
        sides = [f"{s}_norm_{p}" for s in "qk" for p in (("weight", "bias") if norm == "layer_norm" else ("weight",))]
        names, shapes = names + sides, shapes + [(d,)] * len(sides)
    tensors = [torch.empty(s, dtype=torch.bfloat16, device="meta") for s in shapes]
    names += ["cos", "sin"]
    tensors += [torch.empty(64, d // 2, device="meta")] * 2
    if positions:
        names += ["q_positions", "k_positions"]
        tensors += [torch.empty(64, dtype=torch.int32, device="meta")] * 2
    build = self_attention_graph(TensorParallel(), heads, tuple(names), {"layout": "sbhd", "causal": True}, norm=None,
                                 qk_norm=NormAttrs(norm) if norm else None, interleaved=False)  # fmt: skip
    needs = tuple(n not in ("cos", "sin", "q_positions", "k_positions") for n in names)
    return plan(build(*tensors), ARCHS[arch], needs_grad=needs, recompute=QK_NORM_INPUTS if norm else frozenset())


@needs_compiler
@pytest.mark.parametrize("norm", [None, "rms_norm", "layer_norm"])
@pytest.mark.parametrize("arch", GPUS)
def test_an_attentions_plan_takes_split_norms_and_rotations_both_ways_in_one_region(norm, arch):
    made = attention_plan(norm, arch=arch)
    forward, backward = (
        [r.ops for r in part.regions if r.engine == "rope/cute"] for part in (made.forward, made.backward)
    )
    if norm is None:
        assert forward == [("qkv_split", "rope", "rope")] and backward == [("rope", "rope", "qkv_merge")]
    else:
        assert forward == [("qkv_split", norm, "rope", norm, "rope")]
        assert [sorted(ops) for ops in backward] == [
            sorted(("qkv_split", "qkv_split", "rope", "rope", f"{norm}_bwd", f"{norm}_bwd", "qkv_merge"))
        ]


@needs_compiler
def test_positions_of_queries_and_keys_stay_in_the_region():
    made = attention_plan("rms_norm", positions=True)
    (region_,) = [r for r in made.forward.regions if r.engine == "rope/cute"]
    constants = dict(CuteRope().kernels(region_.region, ARCHS["sm_90"], region_.offer)[0].constants)
    assert constants["positions"] == ["int32", "int32"]


@needs_compiler
def test_a_pin_names_it_for_the_region_that_it_takes():
    from layerplan.integration.planner.plan_file import pins_of

    first = attention_plan("rms_norm")
    again = plan(attention_graph := first.forward.graph, ARCHS["sm_90"], pins=pins_of([first]))
    assert [r.engine for r in again.forward.regions if "rope" in r.ops] == ["rope/cute"], attention_graph.describe()


def test_with_qk_norm_the_product_is_saved_in_place_of_queries_keys_and_values_which_are_views_of_it():
    made = attention_plan("rms_norm", arch="cpu")
    product = next(n.output("y") for n in made.forward.graph.nodes if n.op == "linear")
    assert product in made.derived.saved
    kept = [v for n in made.forward.graph.nodes if n.op == "qkv_split" for _, v in n.outputs]
    assert not set(kept) & set(made.derived.saved)
    splits = [n for n in made.backward.graph.nodes if n.op == "qkv_split"]
    readers = [{r.op for _, v in n.outputs for r in made.backward.graph.consumers(v)} for n in splits]
    assert sorted(map(sorted, readers)) == [["rms_norm_bwd"], ["rms_norm_bwd"], ["sdpa_bwd"]], (
        "one split for each reader"
    )


def test_views_of_a_saved_value_are_made_for_each_reader_and_shared_ones_of_others_are_not():
    b = GraphBuilder()
    x = b.input("x", TensorSpec((4, 32), "float32"))
    q, k, v = b.op("qkv_split", x=x, groups=1, queries_per_group=2, head_dim=8)
    out = (
        b.op("swiglu", x=b.op("flatten_heads", x=q)),
        b.op("rms_norm", want=("y",), x=k),
        b.op("rms_norm", want=("y",), x=v),
    )
    made = differentiate(b.build(list(out)), (True,), None, frozenset({"qkv_split", "flatten_heads"}))
    assert made.saved[0] == x and not [v for v in made.saved if ".q" in v or ".k" in v]
    assert [n.op for n in made.backward.nodes].count("qkv_split") == 3
    assert [n.op for n in made.backward.nodes if n.op == "flatten_heads"] == ["flatten_heads"]


def test_the_manifest_names_it_for_every_gpu():
    assert BY_ID["rope/cute"].archs == GPUS
    assert type(BY_ID["rope/cute"].load()) is CuteRope


# ---- device code -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.timeout(900)
def test_device_code_run_thread_by_thread_agrees_with_the_reference(form):
    run = subprocess.run(
        [sys.executable, "-m", "tests.cases.cute_rope", form], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "cases agree" in run.stdout and not run.stdout.startswith("0 ")


@needs_compiler
@pytest.mark.timeout(300)
def test_the_compiler_keeps_every_value_of_vectors_of_any_size():
    env = os.environ | {"CUTE_DSL_ARCH": "sm_90a", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        [sys.executable, "-m", "tests.cases.packed_vectors"], cwd=ROOT, capture_output=True, text=True, env=env
    )
    assert run.stdout.startswith("0 wrong"), run.stdout + run.stderr[-3000:]


@needs_compiler
@pytest.mark.timeout(900)
def test_code_of_usual_heads_takes_the_engines_arguments_spills_nothing_and_moves_16_bytes_at_a_time(tmp_path):
    from layerplan.integration.plan_cache import cubin

    env = os.environ | {"LAYERPLAN_CACHE": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        [sys.executable, "-m", "tests.cases.cute_rope", "--reach"], cwd=ROOT, capture_output=True, text=True, env=env
    )
    assert "reached the driver: 8" in run.stdout, run.stderr[-3000:]
    objects = [f.read_bytes() for f in tmp_path.glob("*.o")]
    used = [r for o in objects for r in cubin.resources(o).values()]
    assert len(objects) == 2 and len(used) == 3
    assert all(r.frame_bytes == 0 and r.registers <= 168 for r in used), used
    if cubin.disassembler() is None:
        pytest.skip("no disassembler here")
    forward, backward = sorted(map(cubin.machine_code, objects), key=len)
    assert "LDG.E.128" in forward and ".NA" not in forward and "STG.E.128" in forward and "LDL" not in forward
    assert "LDGSTS.E.BYPASS" in backward and "LDS.128" in backward and "STG.E.128" in backward and "LDL" not in backward
    assert "ATOM" not in backward and "RED." not in backward
