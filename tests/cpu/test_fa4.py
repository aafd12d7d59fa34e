"""The engines on flash-attn-4: what they decline, as data; their host code on a double of the kernels; and, where the
package is installed, that they launch what the package itself launches, and that its code compiles."""

import dataclasses
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from layerplan.integration import ops
from layerplan.integration.engines.arch import ARCHS
from layerplan.integration.engines.contract import BuildContext, Decline, Offer
from layerplan.integration.engines.manifest import BY_ID, MANIFEST
from layerplan.integration.graph.autodiff import differentiate
from layerplan.integration.graph.ir import Dim
from layerplan.integration.planner.cover import region_of
from layerplan.integration.planner.planner import PlanError
from layerplan.integration.planner.policy import Policy
from layerplan.kernels.attention import fa4, fa4_code
from tests import oracle
from tests.cases import fa4_double, faults
from tests.cases.catalogue import CASES, LARGE, Declined, declined, hold
from tests.cases.graphs import sdpa

torch.set_num_threads(1)
ROOT = Path(__file__).resolve().parents[2]
ENGINES = [e.id for e in MANIFEST if e.target.startswith(fa4.__name__)]
ATTENTION = [c for c in (*CASES, *LARGE) if c.op == "sdpa"]


# ---- what is declined, as data --------------------------------------------------------------------------------------


def region(q=(2, 64, 8, 128), k=None, v=None, *, backward=False, sink=False, **options):
    """One sdpa of ``tests.cases.graphs``, or its gradient (``lse``: from the LSE too), as a region."""
    graph = sdpa(q, k, v, sink=sink, **options)
    if not backward:
        return region_of(graph, graph.nodes)
    graph = differentiate(graph, (True,) * (3 + sink) + (False,) * (len(graph.inputs) - 3 - sink)).backward
    return region_of(graph, [n for n in graph.nodes if n.op == "sdpa_bwd"])


def answer(r, arch="sm_90", engine="attention/fa4"):
    return BY_ID[engine].load().match(r, ARCHS[arch])


DECLINES = {
    "float32": (dict(dtype="float32"), "sm_90", "float32"),
    "dropout": (dict(dropout=0.1), "sm_90", "dropout"),
    "mask": (dict(mask=True), "sm_90", "mask"),
    "no_keys": (dict(k=(2, 0, 8, 128)), "sm_90", "no keys"),
    "no_segment": (dict(q=(64, 8, 128), layout="thd", ends=1), "sm_90", "segment"),
    "batch": (dict(q=(Dim("b", 1 << 16), 64, 8, 128)), "sm_90", "65535"),
    "odd_head_dim": (dict(q=(2, 64, 8, 44)), "sm_90", "44"),
    "wide_head_dim": (dict(q=(2, 64, 8, 264)), "sm_90", "264"),
    "wider_values": (dict(v=(2, 64, 8, 192)), "sm_90", "128/192"),
    "sm_100_head_dim": (dict(q=(2, 64, 8, 160)), "sm_100", "192/128 or 256/256"),
    "sm_100_unequal_256": (dict(q=(2, 64, 8, 256), v=(2, 64, 8, 128)), "sm_103", "192/128 or 256/256"),
    "sm_80_unequal": (dict(v=(2, 64, 8, 64)), "sm_80", "share one"),
    "sm_89_shared_memory": (dict(q=(2, 64, 8, 256)), "sm_89", "128 KiB of shared memory"),
    "sm_120_shared_memory": (dict(q=(2, 64, 8, 256)), "sm_120", "128 KiB of shared memory"),
    "sm_80_sink": (dict(sink=True), "sm_80", "sink"),
    "sm_120_sink": (dict(sink=True), "sm_120", "sink"),
    "sm_80_backward": (dict(backward=True), "sm_80", "backward"),
    "sm_89_backward": (dict(backward=True), "sm_89", "backward"),
    "sm_90_grouped_mla_backward": (
        dict(q=(2, 64, 8, 192), k=(2, 64, 2, 192), v=(2, 64, 2, 128), backward=True),
        "sm_90",
        "grouped heads",
    ),
    "sm_90_padded_head_dim_backward": (dict(q=(2, 64, 8, 72), backward=True, causal=True), "sm_90", "disagree about the layout"),
    "sm_90_no_mask_backward": (dict(backward=True), "sm_90", "without a mask"),
    "sm_120_wide_backward": (dict(q=(2, 64, 8, 136), backward=True), "sm_120", "136"),
    "sm_100_256_lse": (dict(q=(2, 64, 8, 256), backward=True, lse=True), "sm_100", "LSE"),
    "sm_100_256_sink": (dict(q=(2, 64, 8, 256), backward=True, sink=True), "sm_100", "sink"),
    "accumulator": (dict(q=(1, Dim("s", 1 << 24), 8, 128), backward=True, causal=True), "sm_90", "2^31"),
}


@pytest.mark.parametrize("name", DECLINES)
def test_declines_with_reason(name):
    what, arch, words = DECLINES[name]
    got = answer(region(**what), arch)
    assert isinstance(got, Decline) and words in got.reason, got


OFFERS = {
    "plain": dict(causal=True), "no_mask": dict(q=(2, 64, 8, 64)), "sink": dict(sink=True, causal=True), "window": dict(window=(4, 0)), "packed": dict(q=(64, 8, 128), k=(64, 2, 128), layout="thd", causal=True),
    "mla": dict(q=(2, 64, 8, 192), v=(2, 64, 8, 128)), "small": dict(q=(2, 64, 8, 64), v=(2, 64, 8, 32)), "wide": dict(q=(2, 64, 8, 256)),
    "lse": dict(lse=True, causal=True), "turned": dict(layout="sbhd", causal=True), "float16": dict(dtype="float16", causal=True),
}  # fmt: skip


@pytest.mark.parametrize("name", OFFERS)
@pytest.mark.parametrize("backward", [False, True])
def test_offers_on_sm_90_say_what_a_launch_costs(name, backward):
    plain, ordered = (answer(region(**OFFERS[name], backward=backward), engine=e) for e in ENGINES)
    assert isinstance(plain, Offer) and isinstance(ordered, Offer)
    assert plain.deterministic is not backward and ordered.deterministic
    assert (
        plain.capture_safe
        and plain.ahead_of_time
        and (plain.workspace_bytes > 0) == (backward or "lse" not in OFFERS[name])
    )
    assert (
        (ordered.efficiency < plain.efficiency and ordered.workspace_bytes > plain.workspace_bytes)
        if backward
        else ordered == plain
    )


def test_forward_alone_is_offered_on_sm_80_and_both_passes_on_every_newer_arch():
    for arch in BY_ID["attention/fa4"].archs:
        assert isinstance(answer(region(causal=True), arch), Offer)
        assert isinstance(answer(region(causal=True, backward=True), arch), Offer) == (arch not in ("sm_80", "sm_89"))


def test_without_the_package_the_manifest_names_it():
    for engine in ENGINES:
        entry = BY_ID[engine]
        absent = entry.absent()
        assert absent is None or "'flash-attn-4', which is not installed" in absent
        assert entry.needs[1].startswith("flash_attn.cute."), "flash-attn 2 has a flash_attn, and no cute.cache_utils"


# ---- the host code on a double of the kernels -----------------------------------------------------------------------


@pytest.fixture
def double(monkeypatch):
    assert fa4_double.install(monkeypatch) == ENGINES
    monkeypatch.setattr(ops, "_runners", {})


@pytest.mark.parametrize(
    ("engine", "how"), [*((ENGINES[0], how) for how in ("plain", "strided", "offset")), (ENGINES[1], "plain")]
)
@pytest.mark.parametrize("case", ATTENTION, ids=lambda c: c.id)
def test_engine_gives_the_kernels_what_they_were_compiled_for(case, engine, how, double):
    try:
        hold(case, "cpu", torch.bfloat16, how, engine=engine)
    except Declined as reason:
        assert case.id.removeprefix("attention-") in (
            "mask",
            "odd_dim",
            "no_queries",
            "no_keys",
        ), reason


# what only a kernel can get wrong is left to GPUs: the double takes one sequence after the other
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "case",
    [c for c in faults.ATTENTION if c is not faults.case_09_batch_of_5500_single_tokens],
    ids=lambda c: c.__name__,
)
def test_fault_is_absent(case, engine, double):
    try:
        case("cpu", engine, **faults.SMALL.get(case, {}))
    except PlanError as error:
        if case is faults.case_04_context_parallel_equals_one_rank:
            assert "float32" in declined(error)
        else:
            assert (
                case is faults.case_08_slices_are_bitwise_equal_in_deterministic_mode and engine == "attention/fa4"
            ), error


@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
def test_results_lie_in_memory_as_the_layout_says(layout, double):
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 5, h, 16, generator=gen).to(torch.bfloat16).requires_grad_() for h in (4, 2, 2))
    out = ops.attention(q, k, v, causal=True, layout=layout, engine="attention/fa4", policy=Policy())
    assert out.is_contiguous() and all(g.is_contiguous() for g in torch.autograd.grad(out.float().sum(), (q, k, v)))


def test_expanded_and_odd_strides_are_copied_before_a_launch(double):
    gen = torch.Generator().manual_seed(0)
    q = torch.randn(2, 9, 4, 16, generator=gen).to(torch.bfloat16)
    k = torch.randn(2, 9, 1, 16, generator=gen).to(torch.bfloat16)
    want = ops.attention(
        q, k.repeat(1, 1, 2, 1), k.repeat(1, 1, 2, 1), causal=False, engine="attention/fa4", policy=Policy()
    )
    oracle.equal(
        ops.attention(
            q, k.expand(2, 9, 2, 16), k.expand(2, 9, 2, 16), causal=False, engine="attention/fa4", policy=Policy()
        ),
        want,
    )
    odd = torch.zeros(2, 9, 4 * 16 + 3, dtype=torch.bfloat16)[..., : 4 * 16].copy_(q.flatten(2)).unflatten(-1, (4, 16))
    oracle.equal(
        ops.attention(
            odd, k.repeat(1, 1, 2, 1), k.repeat(1, 1, 2, 1), causal=False, engine="attention/fa4", policy=Policy()
        ),
        want,
    )


def test_cumulative_lengths_of_64_bits_are_converted(double):
    gen = torch.Generator().manual_seed(0)
    q = torch.randn(9, 2, 16, generator=gen).to(torch.bfloat16)
    a, b = (ops.attention(q, q, q, causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu, engine="attention/fa4", policy=Policy())
            for cu in (torch.tensor([0, 4, 9], dtype=d) for d in (torch.int32, torch.int64)))  # fmt: skip
    oracle.equal(a, b)


def test_a_window_wider_than_any_sequence_stays_below_32_bits(double):
    gen = torch.Generator().manual_seed(0)
    q = torch.randn(1, 9, 2, 16, generator=gen).to(torch.bfloat16)
    wide = ops.attention(q, q, q, causal=False, window=(2**31 - 1, 2**31 - 1), engine="attention/fa4", policy=Policy())
    oracle.equal(wide, ops.attention(q, q, q, causal=False, engine="attention/fa4", policy=Policy()))


# ---- beside the package, where it is installed ----------------------------------------------------------------------


@dataclasses.dataclass
class _Launches:
    """Stands in for the package's caches: every kernel is there, and a launch is written down."""

    seen: list

    def __contains__(self, key):
        return True

    def __getitem__(self, key):
        return lambda *arguments: self.seen.append(arguments)


def _described(x):
    """An argument as what a kernel can see of it."""
    if isinstance(x, torch.Tensor):
        return tuple(x.shape), tuple(s for s, n in zip(x.stride(), x.shape, strict=True) if n != 1), x.dtype
    return tuple(map(_described, x)) if isinstance(x, tuple) else x


LAUNCHES = {
    "plain": dict(), "causal": dict(causal=True), "grouped": dict(heads=(6, 2), causal=True), "window": dict(window=(20, 7)),
    "left_window": dict(window=(20, None), causal=True), "right_window": dict(window=(None, 3)), "d_64": dict(d=64), "d_80": dict(d=80),
    "d_96": dict(d=96, causal=True, heads=(4, 1)), "mla": dict(d=192, dv=128, causal=True), "d_256": dict(d=256, heads=(4, 2), causal=True),
    "lse": dict(dlse=True, causal=True), "sink": dict(sink=torch.bfloat16, causal=True, heads=(4, 2)), "short": dict(s=(5, 9)),
    "packed": dict(packed=True, causal=True, heads=(4, 2)), "packed_mha": dict(packed=True, longest=(64, 128)),
    "packed_sink": dict(packed=True, sink=torch.float32, window=(9, None), causal=True), "turned": dict(layout="sbhd", causal=True),
    "ordered": dict(deterministic=True, causal=True, heads=(8, 2)), "ordered_mha": dict(deterministic=True, window=(20, 0)),
    "ordered_packed": dict(deterministic=True, packed=True, longest=(256, 512), heads=(8, 4), causal=True), "ordered_d_64": dict(deterministic=True, d=64),
}  # fmt: skip


@pytest.mark.parametrize("arch", ["sm_90", "sm_80", "sm_120", "sm_100"])
@pytest.mark.parametrize("name", LAUNCHES)
def test_launches_are_those_of_the_package(name, arch, monkeypatch):
    """The package's own function and the engine, both on fake tensors, launches written down instead of made."""
    interface = pytest.importorskip("flash_attn.cute.interface")
    w = {"heads": (4, 4), "d": 128, "s": (300, 420), "packed": False, "window": (None, None), "causal": False, "longest": (None, None),
         "sink": None, "dlse": False, "deterministic": False, "layout": "bshd", **LAUNCHES[name]}  # fmt: skip
    (h, hk), d, dv, packed = w["heads"], w["d"], w.get("dv", w["d"]), w["packed"]
    lead_q, lead_k = [((900,) if packed else (3, s)) for s in w["s"]]
    specs = {"q": (*lead_q, h, d), "k": (*lead_k, hk, d), "v": (*lead_k, hk, dv)}
    attrs = {"causal": w["causal"], "window": w["window"], "layout": "thd" if packed else w["layout"],
             **({"max_seqlen_q": w["longest"][0], "max_seqlen_k": w["longest"][1]} if packed else {})}  # fmt: skip
    turn = (lambda s: (s[1], s[0], *s[2:])) if w["layout"] == "sbhd" else (lambda s: s)
    seen: list = []
    for function in ("_flash_attn_fwd", "_flash_attn_bwd", "_bwd_preprocess", "_bwd_postprocess_convert"):
        monkeypatch.setattr(getattr(interface, function), "compile_cache", _Launches(seen))
    monkeypatch.setattr(interface, "is_fake_mode", lambda: False)
    capability = ARCHS[arch].capability
    monkeypatch.setattr(interface, "_get_device_arch", lambda: 10 * capability[0] + capability[1])
    monkeypatch.setattr(interface, "get_num_sms_for_selection", lambda *_: ARCHS[arch].sms)
    monkeypatch.setattr(fa4_code, "_compiled", {})
    for backward in (False, True):
        r = region(
            *(turn(s) for s in specs.values()), backward=backward, sink=w["sink"] is not None, lse=w["dlse"], **attrs
        )
        if w["sink"] is not None:
            r = _with_dtype(r, ("sink", "dsink"), str(w["sink"]).removeprefix("torch."))
        engine = BY_ID[ENGINES[w["deterministic"]]].load()
        if isinstance(engine.match(r, ARCHS[arch]), Decline) or (w["deterministic"] and arch == "sm_120"):
            continue
        ours, theirs = _both(r, arch, engine, interface, seen, w)
        assert ours and len(ours) == len(theirs)
        for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert list(map(_described, a)) == list(map(_described, b)), (
                f"launch {number} of {'backward' if backward else 'forward'}"
            )


def _with_dtype(r, ports, dtype):
    graph = r.graph
    names = {v for n in graph.nodes for p, v in (*n.inputs, *n.outputs) if p in ports}
    specs = {v: s.with_dtype(dtype) if v in names else s for v, s in graph.specs.items()}
    return dataclasses.replace(r, graph=dataclasses.replace(graph, specs=specs))


def _both(r, arch, engine, interface, seen, w):
    """(the engine's launches, the package's) for one region."""
    node, packed = r.node, w["packed"]
    backward = node.op == "sdpa_bwd"
    launch = engine.build(BuildContext(r, ARCHS[arch], Offer(1.0))).launch
    seen.clear()
    with FakeTensorMode():
        t = {
            p: torch.empty(r.graph.specs[v].shape, dtype=getattr(torch, r.graph.specs[v].dtype), device="cuda")
            for p, v in node.inputs
        }
        launch(*(t[p] for p, _ in sorted(node.inputs, key=lambda pv: r.graph.inputs.index(pv[1]))))
        ours = list(seen)
        seen.clear()
        turn = (lambda x: x.transpose(0, 1)) if w["layout"] == "sbhd" else (lambda x: x)
        q, k, v = (turn(t[p]) for p in "qkv")
        options = {"causal": w["causal"], "window_size_left": w["window"][0], "window_size_right": w["window"][1], "learnable_sink": t.get("sink"),
                   "softmax_scale": 1 / math.sqrt(w["d"])}  # fmt: skip
        if packed:
            options |= {
                "cu_seqlens_q": t["cu_seqlens_q"],
                "cu_seqlens_k": t["cu_seqlens_k"],
                "max_seqlen_q": w["longest"][0],
                "max_seqlen_k": w["longest"][1],
            }
        if backward:
            interface._flash_attn_bwd(
                q,
                k,
                v,
                turn(t["out"]),
                turn(t["dout"]),
                t["lse"],
                dlse=t.get("dlse"),
                deterministic=w["deterministic"],
                **options,
            )
        else:
            options |= {"max_seqlen_q": None, "max_seqlen_k": None} if packed else {}
            out = turn(torch.empty((*t["q"].shape[:-1], v.shape[-1]), dtype=q.dtype, device="cuda"))
            interface._flash_attn_fwd(q, k, v, out=out, return_lse=True, **options)
        return ours, list(seen)


@pytest.mark.timeout(500)  # a GPU compiler at work: a minute on an idle core
def test_both_passes_compile_for_sm_90_without_a_gpu():
    pytest.importorskip("flash_attn.cute.cache_utils")
    code = """
from layerplan.integration.engines.arch import ARCHS
from layerplan.kernels.attention import fa4_code
code = fa4_code.Code(ARCHS["sm_90"], "bfloat16", 128, 128, 4, True, True, False, False, sink="float32")
kernels = fa4_code.backward_kernels(code)
assert fa4_code.forward_kernel(code) is fa4_code.forward_kernel(code) and fa4_code.backward_kernels(code) is kernels
print(kernels.tile_m, kernels.tile_n, kernels.cluster, kernels.multiple, len(kernels.post))
"""
    env = {**os.environ, "CUTE_DSL_ARCH": "sm_90a", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=450, env=env)
    assert done.returncode == 0 and done.stdout.split() == ["64", "128", "1", "32", "3"], (
        done.stdout + done.stderr[-2000:]
    )
