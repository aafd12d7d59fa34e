"""Engines as data: every engine and arch answers with an offer or a reason, and what it launches matches the op's rule."""

import subprocess
import sys

import pytest
import torch

from layerplan.integration.engines.arch import ARCHS, GPU_NAMES, Arch, memory_gb
from layerplan.integration.engines.contract import BuildContext, Decline, Offer
from layerplan.integration.engines.manifest import BY_ID, MANIFEST
from layerplan.integration.graph.autodiff import differentiate
from layerplan.integration.graph.ir import Dim, GraphBuilder, TensorSpec
from layerplan.integration.graph.ops.table import op_table
from layerplan.integration.planner.cover import region_of
from layerplan.integration.planner.planner import plan
from layerplan.integration.planner.policy import Policy
from tests.cases import taken
from tests.cases.graphs import sdpa
from tests.cases.random_graphs import RandomGraph

torch.set_num_threads(1)
GPUS = [a for a in ARCHS if a != "cpu"]


def answer(engine, graph, arch="sm_90"):
    return BY_ID[engine].load().match(region_of(graph, graph.nodes), ARCHS[arch])


def declines(engine, graph, *words, arch="sm_90"):
    got = answer(engine, graph, arch)
    assert isinstance(got, Decline), f"{engine} offers {got}"
    for w in words:
        assert w in got.reason, got.reason


TORCH_ATTENTION = ["attention/torch_cudnn", "attention/torch_flash", "attention/torch_cpu"]


@pytest.mark.parametrize("engine", TORCH_ATTENTION)
def test_attention_engine_declines_sink_dropout_and_mask_with_reason(engine):
    declines(engine, sdpa(sink=True), "sink")
    declines(engine, sdpa(dropout=0.1), "dropout")
    declines(engine, sdpa(mask=True), "mask")


@pytest.mark.parametrize("engine", TORCH_ATTENTION)
def test_attention_engine_declines_lse_gradient_with_reason(engine):
    b = GraphBuilder()
    ins = {n: b.input(n, TensorSpec((2, 64, 8, 64), "bfloat16")) for n in "qkv"}
    graph = b.build(b.op("sdpa", want=("out", "lse"), **ins))
    d = differentiate(graph, (True,) * 3)
    node = next(n for n in d.backward.nodes if n.op == "sdpa_bwd")
    got = BY_ID[engine].load().match(region_of(d.backward, [node]), ARCHS["sm_90"])
    assert isinstance(got, Decline) and "LSE" in got.reason


def test_cudnn_declines_window_packed_float32_and_wide_heads_with_reason():
    e = "attention/torch_cudnn"
    declines(e, sdpa(window=(4, 0)), "window")
    declines(e, sdpa((64, 8, 64), layout="thd"), "packed")
    declines(e, sdpa(dtype="float32"), "float32")
    declines(e, sdpa((2, 64, 8, 264)), "264")
    declines(e, sdpa((2, 64, 8, 256)), "256", arch="sm_80")
    assert isinstance(answer(e, sdpa((2, 64, 8, 256))), Offer)


def test_cudnn_declines_causal_with_unequal_lengths_with_reason():
    for q, k in (((2, 5, 8, 64), (2, 7, 8, 64)), ((2, Dim("s", 8), 8, 64), (2, Dim("t", 8), 8, 64))):
        declines("attention/torch_cudnn", sdpa(q, k, causal=True), "bottom-right")
        declines("attention/torch_cpu", sdpa(q, k, causal=True), "bottom-right")
    assert isinstance(answer("attention/torch_cudnn", sdpa((2, Dim("s", 8), 8, 64), causal=True)), Offer)


def test_flash_declines_unequal_head_dims_and_float32_with_reason():
    e = "attention/torch_flash"
    declines(e, sdpa(v=(2, 64, 8, 32)), "64/32")
    declines(e, sdpa(dtype="float32"), "float32")
    declines(e, sdpa((2, 64, 8, 44)), "44")
    assert isinstance(answer(e, sdpa((64, 8, 64), layout="thd", window=(4, 0))), Offer)


def test_flash_declines_a_backward_whose_accumulator_passes_32_bit_indices():
    def backward(q):
        graph = sdpa(q)
        d = differentiate(graph, (True,) * 3)
        (node,) = [n for n in d.backward.nodes if n.op == "sdpa_bwd"]
        return BY_ID["attention/torch_flash"].load().match(region_of(d.backward, [node]), ARCHS["sm_90"])

    got = backward((5500, 1, 24, 128))
    assert isinstance(got, Decline) and "2^31" in got.reason
    assert isinstance(backward((Dim("b", 8192), 1, 24, 128)), Decline), "a bucket counts by its upper end"
    assert isinstance(backward((4, Dim("s", 32768), 64, 128)), Offer)


def test_cudnn_declines_a_sequence_of_one_token_with_reason():
    declines("attention/torch_cudnn", sdpa((2, 1, 8, 64)), "one token")
    declines("attention/torch_cudnn", sdpa((2, 1, 8, 64), (2, 64, 8, 64)), "one token")


def _norm(op="rms_norm", dtype="bfloat16", wdtype=None, **attrs):
    b = GraphBuilder()
    ports = {"x": b.input("x", TensorSpec((Dim("t", 64), 128), dtype)), "weight": b.input("w", TensorSpec((128,), wdtype or dtype))}
    if attrs.pop("bias", False):
        ports["bias"] = b.input("b", TensorSpec((128,), wdtype or dtype))
    return b.build([b.op(op, **ports, **attrs)])


def test_native_norm_declines_what_aten_cannot_with_reason():
    declines("norm/torch", _norm(), "CPU", arch="cpu")
    declines("norm/torch", _norm(wdtype="float32"), "float32", "bfloat16")
    declines("norm/torch", _norm(bias=True), "bias")
    declines("norm/torch", _norm(zero_centered=True), "gamma")
    assert isinstance(answer("norm/torch", _norm("layer_norm", bias=True)), Offer)


def test_wgrad_engine_declines_accumulators_it_would_round():
    b = GraphBuilder()
    dy, x = b.input("dy", TensorSpec((8, 16), "bfloat16")), b.input("x", TensorSpec((8, 4), "bfloat16"))
    acc = b.input("acc", TensorSpec((16, 4), "float16"))
    declines("linear/torch", b.build([b.op("linear_wgrad", dy=dy, x=x, accumulate=acc)]), "float16")


def test_inductor_declines_dropout_on_a_cpu_and_fused_weight_gradients():
    b = GraphBuilder()
    x = b.input("x", TensorSpec((8, 16), "float32"))
    rng = {n: b.input(n, TensorSpec((1,), "int64")) for n in ("seed", "offset")}
    declines("pointwise/inductor", b.build([b.op("bias_dropout_add", x=x, residual=x, p=0.1, **rng)]), "CPU", arch="cpu")


def _there_and_back():
    """A quantize and its dequantize, which no random graph holds: they have no gradient."""
    b = GraphBuilder()
    data, scale = b.op("quantize", x=b.input("x", TensorSpec((Dim("t", 8), 256), "bfloat16")), block=(1, 128))
    return b.build([b.op("dequantize", data=data, scale_inv=scale, block=(1, 128), dtype="bfloat16")])


@pytest.mark.parametrize("arch", list(ARCHS))
@pytest.mark.parametrize("entry", MANIFEST, ids=lambda e: e.id)
def test_every_engine_answers_every_op_it_names_on_every_arch(entry, arch):
    if arch not in entry.archs:
        made = plan(_norm(), ARCHS[arch])  # refused by the table, with the archs it has
        assert all(c.engine != entry.id or "has no code for" in c.reason for r in made.forward.regions for c in r.candidates)
        return
    asked = set()
    for seed in range(12):
        r = RandomGraph(seed, ops=8, dtype="bfloat16", symbolic=True)
        d = differentiate(r.graph, r.needs)
        for graph in (d.forward, d.backward, _there_and_back()):
            for node in graph.nodes:
                if (node.op in entry.ops or entry.ops == ("*",)) and op_table()[node.op].kind != "collective":
                    got = entry.load().match(region_of(graph, [node]), ARCHS[arch])
                    assert isinstance(got, Offer) or (isinstance(got, Decline) and len(got.reason) > 3), (node.op, got)
                    assert not isinstance(got, Offer) or 0 < got.efficiency <= 1
                    asked.add(node.op)
    assert asked


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_what_cpu_engines_launch_has_the_shapes_and_dtypes_of_the_ops_rules(dtype):
    seen = set()
    for seed in range(25):
        r = RandomGraph(seed, ops=6, dtype=dtype)
        d = differentiate(r.graph, r.needs)
        env = dict(zip(r.graph.inputs, r.tensors, strict=True))
        gen = torch.Generator().manual_seed(seed)
        for graph in (d.forward, d.backward):
            for v in graph.inputs:
                if v not in env:
                    s = graph.specs[v]
                    env[v] = torch.randn(s.shape, generator=gen, dtype=torch.float64).to(getattr(torch, s.dtype))
            for node in graph.nodes:
                region = region_of(dataclass_outputs(graph, node), [node])
                for entry in MANIFEST:
                    if "cpu" not in entry.archs or entry.id == "pointwise/inductor" or op_table()[node.op].kind == "collective":
                        continue
                    if node.op not in entry.ops and entry.ops != ("*",):
                        continue
                    offer = entry.load().match(region, ARCHS["cpu"])
                    if isinstance(offer, Decline):
                        continue
                    launch = entry.load().build(BuildContext(region, ARCHS["cpu"], offer)).launch
                    got = launch(*(env[v] for v in region.graph.inputs))
                    got = got if len(region.graph.outputs) > 1 else (got,)
                    for v, t in zip(region.graph.outputs, got, strict=True):
                        s = graph.specs[v]
                        assert tuple(t.shape) == s.shape, f"{entry.id} {node.op}: {v} has shape {list(t.shape)}, the rule says {s}"
                        assert str(t.dtype) == f"torch.{s.dtype}", f"{entry.id} {node.op}: {v} is {t.dtype}, the rule says {s}"
                    seen.add((entry.id, node.op))
                if op_table()[node.op].kind == "collective":
                    env[node.output("y")] = env[node.input("x")]
                else:
                    env |= zip((v for _, v in node.outputs), got, strict=True)
    engines = {"linear/torch", "moe/torch", "norm/torch", "attention/torch_cpu", "layout/torch", "loss/chunked", "reference/eager"}
    assert {e for e, _ in seen} == engines | (set() if dtype == "float64" else {"grouped_matmul/torch"})


def dataclass_outputs(graph, node):
    """The graph with every output of the node among its outputs, so that a region returns all of them."""
    import dataclasses

    return dataclasses.replace(graph, outputs=tuple(v for _, v in node.outputs))


def test_arch_parse_accepts_usual_spellings_and_suggests_near_ones():
    for name in ("sm_90", "sm90", "90", "sm_90a", "SM90"):
        assert Arch.parse(name).name == "sm_90"
    assert Arch.parse("CPU").name == "cpu" and not Arch.parse("cpu").is_gpu
    with pytest.raises(ValueError, match=r"sm_91.*did you mean 'sm_90'|sm_91.*did you mean"):
        Arch.parse("sm_91")


def test_a_gpus_name_is_its_arch_however_it_is_spelt():
    names = {"A100": "sm_80", "NVIDIA H100": "sm_90", "h200": "sm_90", "B200": "sm_100", "gb-300": "sm_103", "RTX PRO 6000": "sm_120",
             "GeForce RTX 4090": "sm_89", "L4": "sm_89"}  # fmt: skip
    assert {name: Arch.parse(name).name for name in names} == names
    assert set(GPU_NAMES.values()) == {a.name for a in ARCHS.values() if a.is_gpu}
    with pytest.raises(ValueError, match=r"'H1000': must be one of sm_80, .* or a GPU's name such as H100; did you mean 'H100'\?"):
        Arch.parse("H1000")
    with pytest.raises(ValueError, match=r"'V100': must be one of sm_80, .* or a GPU's name such as H100$"):
        Arch.parse("V100")  # another GPU, and no slip


def test_a_gpus_memory_is_its_own_and_an_archs_that_of_its_board():
    assert memory_gb("H100") == ("H100", 80) and memory_gb("NVIDIA H200")[1] == 141 and memory_gb("sm90") == ("H200-SXM", 141)
    assert memory_gb("cpu") is None
    assert all(arch.memory_gb == memory_gb(arch.board.removesuffix("-SXM").removesuffix("-80GB"))[1] for arch in ARCHS.values() if arch.is_gpu)
    assert all(memory_gb(name)[1] > 0 for name in GPU_NAMES)
    with pytest.raises(ValueError, match="H1000"):
        memory_gb("H1000")


def test_manifest_imports_neither_torch_nor_an_engine():
    code = "import sys; import layerplan.integration.engines.manifest as m; print('torch' in sys.modules, [k for k in sys.modules if 'layerplan.kernels.' in k], len(m.MANIFEST))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split(" ", 1)[0] == "False" and "[]" in done.stdout


def test_manifest_ids_are_unique_and_name_family_and_engine():
    assert len(BY_ID) == len(MANIFEST)
    for e in MANIFEST:
        assert e.id.count("/") == 1 and e.load().id == e.id
        assert e.ops == ("*",) or set(e.ops) <= set(op_table()), f"{e.id} names unknown ops"


def test_every_engine_takes_the_cases_that_it_took_before():
    """A decline skips a test: this one says which. ``python -m tests.cases.taken`` writes the table for a change that was meant."""
    rows = [{(arch, engine, case): row for arch, engines in table.items() for engine, cases in engines.items() for case, row in cases.items()}
            for table in (taken.frozen(), taken.taken())]  # fmt: skip
    before, now = rows
    changed = [f"{' '.join(key)}: {now.get(key, 'declined')}, was {before.get(key, 'declined')}"
               for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]  # fmt: skip
    assert not changed, "\n".join(changed)
    frozen = {arch: tuple(engines) for arch, engines in taken.frozen().items()}
    assert frozen == taken.FROZEN and all(cases for engines in taken.frozen().values() for cases in engines.values())


@pytest.mark.timeout(400)  # a C++ compiler at work: 30 s on an idle core
def test_inductor_on_a_cpu_equals_the_reference_when_forced():
    pytest.importorskip("triton")
    from layerplan.integration import ops

    gen = torch.Generator().manual_seed(0)
    x = torch.randn(6, 32, generator=gen)
    got = ops.swiglu(x, engine="pointwise/inductor", policy=Policy())
    torch.testing.assert_close(got, ops.swiglu(x, engine="reference/eager"), atol=1e-6, rtol=1e-6)
    # other token counts and strides through the same compiled code
    y = torch.randn(7, 64, generator=gen)[:, ::2]
    torch.testing.assert_close(ops.swiglu(y, engine="pointwise/inductor", policy=Policy()), ops.swiglu(y, engine="reference/eager"), atol=1e-6, rtol=1e-6)
