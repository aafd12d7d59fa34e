"""Measuring: what ``layerplan tune`` does from the recipe to the file, on a CPU; examples for every port; and that a
wrong kernel never wins."""

import dataclasses
import json

import pytest
import torch
from typer.testing import CliRunner

from layerplan.integration import cli
from layerplan.integration.engines.arch import ARCHS
from layerplan.integration.engines.manifest import BY_ID
from layerplan.integration.graph import examples
from layerplan.integration.graph.autodiff import differentiate
from layerplan.integration.graph.examples import PORTS, example, sizes_of
from layerplan.integration.graph.ir import Dim, GraphBuilder, GraphError, TensorSpec
from layerplan.integration.graph.ops.table import op_table
from layerplan.integration.planner import cover, rank, records, tune
from layerplan.integration.planner.planner import plan
from layerplan.integration.planner.policy import Policy
from layerplan.integration.planner.records import NONE, gpu_name, region_key
from layerplan.integration.planner.tune import Workload
from layerplan.integration.planner.tune import tune as measure
from layerplan.modules.graphs import TensorParallel
from layerplan.modules.loss import cross_entropy_graph
from layerplan.recipes import load_recipe
from layerplan.recipes.estimate import workloads
from tests.cases.catalogue import BY_ID as CASE_BY_ID
from tests.cases.graphs import bf16, needs_triton, sdpa
from tests.cases.taken import _graphs as graphs_of

torch.set_num_threads(1)
SM90, CPU = ARCHS["sm_90"], torch.device("cpu")
SMALL = [
    "model.seq_length=32",
    "train.micro_batch=1",
    "train.global_batch=2",
    "model.vocab_size=64",
    "model.hidden_size=32",
    "model.ffn_hidden_size=64",
    "model.num_layers=1",
]


def run(*arguments: str):
    return CliRunner().invoke(cli.app, list(arguments))


@pytest.fixture(autouse=True)
def _brief(monkeypatch):
    monkeypatch.setitem(tune._BLOCKS, "cpu", 3)


def linear(rows=64, dtype="float32"):
    b = GraphBuilder()
    x, w = b.input("x", TensorSpec((Dim("t", rows), 16), dtype)), b.input("w", TensorSpec((8, 16), dtype), weight=True)
    return b.build([b.op("linear", x=x, weight=w)])


def measured(graph, **kw):
    work = Workload("mlp", "one", graph, kw.pop("policy", Policy()), {})
    return measure(
        [work],
        CPU,
        before=kw.pop("before", NONE),
        budget=kw.pop("budget", 60.0),
        keep=kw.pop("keep", lambda records: None),
    )


def notes(found):
    return {offer.entry.id: (record, note) for region in found.regions for offer, record, note in region.rows}


# ---- examples --------------------------------------------------------------------------------------------------------


def run_on_examples(graph):
    """Holds the examples of a graph's inputs against the ops' own checks, and runs the references of the nodes that
    read inputs alone."""
    generator, sizes = torch.Generator().manual_seed(0), sizes_of(graph)
    for node in graph.nodes:
        op = op_table()[node.op]
        own = {p: example(graph, v, sizes, generator) for p, v in node.inputs if v in graph.inputs}
        for p, v in node.inputs:
            spec = graph.specs[v]
            assert spec.is_float or p in PORTS, f"{node.op}: port {p} of {spec.dtype} has no example"
            if p in own:
                assert own[p].dtype == getattr(torch, spec.dtype) and tuple(own[p].shape) == examples.concrete(
                    spec.shape, sizes
                )
        if len(own) < len(node.inputs) or op.kind == "collective":
            continue
        if op.check is not None:
            op.check(own, lambda port, own=own: tuple(own[port].shape) if port in own else None, node.attributes)
        for port, value in op.reference(own, node.attributes, tuple(p for p, _ in node.outputs)).items():
            if value.is_floating_point() and value.numel():
                value = value.float() if value.dtype.itemsize == 1 else value
                assert not value.isnan().any() and (port == "lse" or value.isfinite().all()), f"{node.op}.{port}"


@pytest.mark.parametrize("case", CASE_BY_ID)
def test_every_port_of_every_op_has_an_example_with_which_its_reference_gives_numbers(case):
    for graph in graphs_of(CASE_BY_ID[case], CASE_BY_ID[case].dtypes[0]):
        run_on_examples(graph)


def other_graphs():
    """What the cases lack: dropout behind a product, classes sharded over two ranks."""
    b = GraphBuilder()
    x, r = b.input("x", bf16(8, 16)), b.input("r", bf16(8, 16))
    ints = {n: b.input(n, TensorSpec((1,), "int64")) for n in ("seed", "offset")}
    graph = b.build([b.op("bias_dropout_add", x=x, residual=r, p=0.1, **ints)])
    yield graph
    yield differentiate(graph, (True, True, False, False)).backward
    names, build = cross_entropy_graph(TensorParallel(2), linear=False)
    made = {
        "logits": torch.empty(8, 2, 32),
        "targets": torch.empty(8, 2, dtype=torch.int64),
        "first": torch.empty(1, dtype=torch.int64),
    }
    graph = build(*(made[n] for n in names))
    yield graph
    yield differentiate(graph, tuple(n == "logits" for n in names)).backward


def test_the_ops_that_the_cases_lack_have_examples_too_and_no_op_of_integers_is_left_out():
    seen = {n.op for case in CASE_BY_ID.values() for graph in graphs_of(case, case.dtypes[0]) for n in graph.nodes}
    for graph in other_graphs():
        run_on_examples(graph)
        seen |= {n.op for n in graph.nodes}
    whole = {name for name, op in op_table().items() if op.kind != "collective"}
    assert whole - seen <= {
        "zeros_like",
        "add",
        "split",
        "concat",
        "expand_heads",
        "sum_heads",
        "flatten_heads",
        "unflatten_heads",
        "row_sum",
    }, whole - seen


def test_examples_of_a_packed_graph_are_segments_and_of_sharded_classes_targets():
    generator = torch.Generator().manual_seed(0)
    graph = sdpa((100, 4, 16), layout="thd", ends=4, max_seqlen_q=16, max_seqlen_k=64)
    ends = {n: example(graph, n, {}, generator).tolist() for n in ("cu_seqlens_q", "cu_seqlens_k")}
    assert ends == {"cu_seqlens_q": [0, 16, 32, 48], "cu_seqlens_k": [0, 33, 66, 99]}
    b = GraphBuilder()
    stats = b.input("stats", TensorSpec((2, 2, 6), "float32"))
    ints = {n: b.input(n, TensorSpec((6,), "int64")) for n in ("targets", "hits")}
    graph = b.build(
        [b.op("shard_loss", stats=stats, logits=b.input("logits", bf16(6, 5)), classes=5, want=("loss",), **ints)]
    )
    assert int(example(graph, "targets", {}, generator).max()) < 10


def test_a_port_of_integers_that_is_not_known_is_refused_with_what_to_add(monkeypatch):
    graph = sdpa((1, 8, 2, 16), mask=True)
    monkeypatch.delitem(PORTS, "mask")
    with pytest.raises(
        GraphError, match="sdpa: port 'mask' holds bool: no example is known for it; add a row to PORTS"
    ):
        example(graph, "mask", {}, torch.Generator())


# ---- the whole command -----------------------------------------------------------------------------------------------


def test_tune_measures_a_recipe_writes_records_and_plans_with_them(tmp_path):
    file = tmp_path / "records.json"
    result = run("tune", "gpt_tiny", *SMALL, "--device", "cpu", "--out", str(file))
    assert result.exit_code == 0, result.output
    found = records.load(file)
    assert found.gpus() == (gpu_name(CPU),) and all(r.arch == "cpu" and r.microseconds > 0 for r in found.rows)
    engines = {r.engine for r in found.rows}
    assert {"linear/torch", "attention/torch_cpu", "reference/eager"} <= engines and "pointwise/inductor" not in engines
    recipe = load_recipe("gpt_tiny", SMALL)
    planned = [
        r
        for w in workloads(recipe)
        for made in [plan(w.graph, ARCHS["cpu"], w.policy, records=found, **w.options)]
        for part in (made.forward, made.backward)
        for r in part.regions
    ]
    assert planned and all(r.measured_seconds is not None for r in planned), (
        "every region that the plans run was measured"
    )
    assert "linear_wgrad" in {op for r in found.rows for op in r.ops}
    tables = result.stdout
    assert (
        tables.startswith("measured on ")
        and "chosen now" in tables
        and "chosen before" in tables
        and "of roofline" not in tables  # a CPU's rates are no datasheet's
    )
    shown = run("plan", "gpt_tiny", *SMALL, f"plan.records={file}", "--arch", "cpu", "--json")
    assert all(row["measured_us"] for g in json.loads(shown.stdout)["graphs"] for row in g["regions"])

    kept = {r.key: r for r in found.rows}
    again = run("tune", "gpt_tiny", *SMALL, "--device", "cpu", "--out", str(file), "--budget", "0")
    assert again.exit_code == 0 and "regions were not measured: the budget was spent" in again.stdout
    assert {r.key: r for r in records.load(file).rows} == kept, "what is there stays"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--device = 'cuda': PyTorch sees no GPU here"),
        (["--device", "tpu"], "--device = 'tpu': must be cuda or cpu"),
        (["plan.layers=megatron_local", "--device", "cpu"], "runs no plans that could be measured"),
        (["--device", "cpu", "--out", "nowhere/r.json"], "--out = nowhere/r.json: the folder nowhere does not exist"),
        (["--device", "cpu", "--out", "plan.json"], "--out = plan.json: is a plan file, not records"),
        (["plan.arch=H100", "--device", "cpu"], "plan.arch = 'H100': tune measures the device at hand, which is cpu"),
        (["plan.records=nowhere.json", "--device", "cpu"], "plan.records = 'nowhere.json': no such file"),
    ],
)
def test_tune_refuses_what_it_cannot_do_before_it_begins(tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "plan.json").write_text('{"format": 2, "pins": {}}')
    out = [] if "--out" in arguments else ["--out", "r.json"]
    result = run("tune", "gpt_tiny", *arguments, *out)
    assert result.exit_code == 2 and said in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "r.json").exists()


def test_tune_refuses_a_launcher_with_several_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = run("tune", "gpt_tiny", "--device", "cpu", "--out", str(tmp_path / "r.json"))
    assert result.exit_code == 2 and "WORLD_SIZE = 2: tune measures one GPU in one process" in result.stderr


def test_tune_does_not_add_to_the_records_of_another_gpu(tmp_path):
    found = measured(linear())
    other = records.Records(tuple(dataclasses.replace(r, gpu="NVIDIA H200") for r in found.records.rows))
    records.save(tmp_path / "r.json", other)
    result = run("tune", "gpt_tiny", "--device", "cpu", "--out", str(tmp_path / "r.json"))
    assert (
        result.exit_code == 2
        and "holds records of NVIDIA H200, this is" in result.stderr
        and records.load(tmp_path / "r.json") == other
    )


# ---- right before fast -----------------------------------------------------------------------------------------------


def launching(monkeypatch, change):
    """linear/torch with a launch that is changed by ``change(launch)``."""
    engine = type(BY_ID["linear/torch"].load())
    build = engine.build
    monkeypatch.setattr(engine, "build", lambda self, ctx: type(made := build(self, ctx))(change(made.launch)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("scaled", lambda launch: lambda x, w: launch(x, w) * 1.05, "output 0: "),
        ("late rows", lambda launch: lambda x, w: torch.cat((launch(x, w)[:-1], launch(x, w)[-1:] * 0)), "output 0: "),
        (
            "unwritten",
            lambda launch: lambda x, w: torch.full_like(launch(x, w), float("nan")),
            "512 of 512 values are NaN",
        ),
        ("wider", lambda launch: lambda x, w: launch(x, w).double(), "output 0 is torch.float64"),
        ("shape", lambda launch: lambda x, w: launch(x, w).t(), "shape"),
        ("pair", lambda launch: lambda x, w: (launch(x, w),) * 2, "2 outputs, not 1"),
    ],
)
def test_an_engine_with_a_wrong_result_is_recorded_as_wrong_and_never_ranked(monkeypatch, dtype, name, change, said):
    launching(monkeypatch, change)
    found = measured(linear(dtype=dtype))
    record, note = notes(found)["linear/torch"]
    assert (
        record.microseconds is None
        and record.error.startswith("wrong: ")
        and said in record.error
        and note == record.error
    )
    assert notes(found)["reference/eager"][0].microseconds > 0
    (chosen,) = plan(linear(dtype=dtype), ARCHS["cpu"], records=found.records).forward.regions
    assert chosen.engine == "reference/eager" and found.now[region_key(chosen.region)] == {"reference/eager"}
    assert "wrong: output" in str(found) or "wrong: 2 outputs" in str(found)


def test_an_engine_that_fails_is_a_row_with_its_error_and_not_the_end(monkeypatch):
    def broken(launch):
        def run(x, w):
            raise RuntimeError("no kernel image\nand a long story")

        return run

    launching(monkeypatch, broken)
    found = measured(linear())
    assert notes(found)["linear/torch"][0].error == "failed: RuntimeError: no kernel image"
    assert notes(found)["reference/eager"][0].microseconds > 0 and found.lost is None


def test_a_lack_of_memory_is_nobodys_fault_and_no_record(monkeypatch):
    def hungry(launch):
        def run(x, w):
            raise torch.OutOfMemoryError("CUDA out of memory")

        return run

    launching(monkeypatch, hungry)
    record, note = notes(measured(linear()))["linear/torch"]
    assert record is None and note == "not measured: OutOfMemoryError: CUDA out of memory"


def test_a_reference_without_memory_is_tried_at_smaller_sizes(monkeypatch):
    tried = []
    prepare = tune._Check._prepare

    def scarce(self, largest):
        tried.append(largest)
        if largest > 16:
            raise torch.OutOfMemoryError("CUDA out of memory")
        prepare(self, largest)

    monkeypatch.setattr(tune._Check, "_prepare", scarce)
    found = measured(linear())
    assert tried == [64, 32, 16] and notes(found)["linear/torch"][0].microseconds > 0


def test_a_launch_that_loses_the_gpu_ends_the_run_with_its_record_and_is_not_tried_again(monkeypatch):
    def deadly(launch):
        def run(x, w):
            monkeypatch.setattr(
                tune._Bench, "wait", lambda self: (_ for _ in ()).throw(RuntimeError("context is destroyed"))
            )
            raise RuntimeError("illegal memory access")

        return run

    with monkeypatch.context() as inner:
        launching(inner, deadly)
        kept = []
        found = measured(linear(), keep=kept.append)
    assert (
        found.lost.startswith("linear on linear/torch lost the GPU: RuntimeError: illegal memory access")
        and kept[-1] == found.records
    )
    monkeypatch.undo()
    again = measured(linear(), before=found.records)
    record, note = notes(again)["linear/torch"]
    assert (
        record is None
        and "lost the GPU in an earlier run" in note
        and notes(again)["reference/eager"][0].microseconds > 0
    )


def test_accumulated_gradients_are_checked_on_copies_of_what_they_are_added_to():
    b = GraphBuilder()
    dy, x = b.input("dy", bf16(32, 8)), b.input("x", bf16(32, 16))
    graph = b.build([b.op("linear_wgrad", dy=dy, x=x, accumulate=b.input("main_grad", TensorSpec((8, 16), "float32")))])
    found = notes(measured(graph))
    assert {e: r.error for e, (r, _) in found.items()} == {"linear/torch": None, "reference/eager": None}


@pytest.mark.parametrize("align", [1, 16])
def test_rows_behind_the_last_group_are_nobodys_and_compared_with_nothing(align):
    b = GraphBuilder()
    x, probs, w = b.input("x", bf16(Dim("t", 64), 32)), b.input("probs", bf16(Dim("t", 64), 2)), b.input("w", bf16(4, 16, 32), weight=True)
    ins = {"row_map": ((Dim("t", 64), 2), "int32"), "counts": ((4,), "int32"), "offsets": ((4,), "int32")}
    places = {p: b.input(p, TensorSpec(*s)) for p, s in ins.items()}
    rows, _ = b.op("permute", x=x, probs=probs, **places, align=align)
    y = b.op("grouped_matmul", x=rows, weight=w, offsets=places["offsets"], align=align)
    forward = b.build([b.op("unpermute", rows=y, probs=probs, **places, align=align)])
    backward = differentiate(forward, tuple(forward.specs[v].is_float for v in forward.inputs)).backward
    found = {r.ops: notes for g in (forward, backward) for r, notes in rows_of(measured(g))}
    engines = {"grouped_matmul/torch", "moe/torch"}
    assert {op for (op,) in found} >= {"permute", "unpermute", "unpermute_bwd", "permute_bwd", "grouped_matmul"}
    for ops, rows in found.items():
        assert {e for e in rows if e != "reference/eager"} == {e for e in engines if ops[0] in BY_ID[e].ops}, ops
        assert all(r.error is None for r, _ in rows.values()), (ops, rows)


def rows_of(found):
    """Of each measured region the notes by engine."""
    return [(r.site.region, {offer.entry.id: (record, note) for offer, record, note in r.rows}) for r in found.regions]


def test_inputs_that_a_view_gives_have_its_strides(monkeypatch):
    b = GraphBuilder()
    x = b.input("x", TensorSpec((Dim("s", 16), Dim("b", 2), 48), "float32"))
    q, k, v = b.op("qkv_split", x=x, groups=2, queries_per_group=1, head_dim=8)
    graph = b.build([b.op("sdpa", q=q, k=k, v=v, layout="sbhd", causal=True, want=("out",))])
    strides, inputs = [], tune._Bench.inputs

    def seen(self, sizes):
        made = inputs(self, sizes)
        if self.site.region.ops == ("sdpa",):
            strides.append([t.stride() for t in made])
        return made

    monkeypatch.setattr(tune._Bench, "inputs", seen)
    measured(graph)
    assert strides and all(s == (96, 48, 24, 1) for s in strides[0])


def test_tune_offers_what_engines_on_trial_and_forced_ones_would_run(monkeypatch):
    on_trial = [dataclasses.replace(e, trial=e.id == "linear/torch") for e in cover.MANIFEST]
    monkeypatch.setattr(cover, "MANIFEST", tuple(on_trial))
    graph = linear(dtype="bfloat16")
    assert "linear/torch" not in [r.engine for r in plan(graph, SM90).forward.regions]
    sites = tune._sites(
        [Workload("mlp", "one", graph, Policy("reference"), {})], [plan(graph, SM90, Policy("reference"))], SM90
    )
    assert {e for s in sites for e, _ in s.offers} >= {"linear/torch", "reference/eager"}


@needs_triton
def test_tune_measures_the_largest_regions_and_their_ops_alone():
    b = GraphBuilder()
    x, r, g = b.input("x", bf16(64, 256)), b.input("r", bf16(64, 256)), b.input("g", bf16(256))
    graph = b.build([b.op("squared_relu", x=b.op("rms_norm", x=b.op("bias_dropout_add", x=x, residual=r), weight=g))])
    sites = tune._sites([Workload("mlp", "one", graph, Policy(), {})], [plan(graph, SM90)], SM90)
    assert {s.region.ops for s in sites} == {
        ("bias_dropout_add", "rms_norm", "squared_relu"),
        ("bias_dropout_add",),
        ("rms_norm",),
        ("squared_relu",),
    }


def test_an_engine_whose_quartiles_overlap_those_of_the_chosen_one_is_said_to_be_as_fast():
    graph = linear()
    (region,) = plan(graph, SM90).forward.regions
    ranking = rank.Ranking(graph, SM90, Policy(), trial=True)
    offers = [p for p in ranking.alone(graph.nodes[0])[0]]

    def text(us):
        rows = []
        for offer, (low, mid, high) in zip(offers, us, strict=False):
            key = region_key(region.region)
            rows.append((offer, records.Record("sm_90", "NVIDIA H200", key, ("linear",), offer.entry.id, (), (), mid, (low, high)), ""))
        site, ids = tune.Site(region.region, graph, {}, {}, 1.0), frozenset({offers[0].entry.id})
        return str(tune.Tuned("NVIDIA H200", (tune.TunedRegion(site, tuple(rows)),), NONE, {}, {region_key(region.region): ids}))

    near, far = text([(9.0, 10.0, 11.0), (8.5, 9.5, 10.5)]), text([(9.0, 10.0, 11.0), (12.0, 13.0, 14.0)])
    first, second = (next(line for line in near.splitlines() if line.split() and line.split()[0] == p.entry.id) for p in offers[:2])
    assert first.endswith("chosen now") and second.endswith("as fast (quartiles overlap)") and "of roofline" in near
    assert "as fast" not in far
