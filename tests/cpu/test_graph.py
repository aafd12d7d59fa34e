"""Graph IR, builder, signatures and verification."""

import dataclasses
import subprocess
import sys

import pytest

from layerplan.integration.graph.autodiff import differentiate
from layerplan.integration.graph.ir import Dim, Graph, GraphBuilder, GraphError, ScaleSpec, TensorSpec
from layerplan.integration.graph.ops.table import op_table
from layerplan.integration.graph.verify import verify
from tests.cases.random_graphs import RandomGraph


def spec(*shape, dtype="bfloat16"):
    return TensorSpec(shape, dtype)


def mlp(prefix="v", names=("x", "w1", "w2"), dim="t"):
    b = GraphBuilder(prefix)
    x = b.input(names[0], spec(Dim(dim, 8), 16))
    w1, w2 = b.input(names[1], spec(64, 16), weight=True), b.input(names[2], spec(16, 32), weight=True)
    return b.build([b.op("linear", x=b.op("swiglu", x=b.op("linear", x=x, weight=w1)), weight=w2)])


def test_signature_does_not_depend_on_names():
    assert mlp().signature() == mlp("other", ("a", "b", "c"), "tokens").signature()


@pytest.mark.parametrize("change", ["dtype", "shape", "attribute", "order", "weight"])
def test_signature_depends_on_what_changes_the_maths(change):
    b = GraphBuilder()
    x = b.input("x", spec(4, 16, dtype="float32" if change == "dtype" else "bfloat16"))
    y = b.input("y", spec(4, 16, dtype="float32" if change == "dtype" else "bfloat16"), weight=change == "weight")
    wide = b.op("add", a=y if change == "order" else x, b=x if change == "order" else y)
    g = b.build([b.op("swiglu", x=wide, clamp=1.0 if change == "attribute" else None)])
    base = GraphBuilder()
    x, y = base.input("x", spec(5 if change == "shape" else 4, 16)), base.input("y", spec(5 if change == "shape" else 4, 16))
    other = base.build([base.op("swiglu", x=base.op("add", a=x, b=y))])
    assert g.signature() != other.signature()


def test_signature_tells_apart_equal_dims_from_different_ones():
    def graph(second):
        b = GraphBuilder()
        q = b.input("q", spec(1, Dim("s", 8), 2, 16))
        k = b.input("k", spec(1, Dim(second, 8), 2, 16))
        return b.build([b.op("sdpa", q=q, k=k, v=k)])

    assert graph("s").signature() != graph("t").signature()


def test_signature_and_canonical_form_hold_how_a_tensor_is_scaled():
    def graph(scale):
        b = GraphBuilder()
        return b.build([b.op("split", x=b.input("x", TensorSpec((8, 256), "float8_e4m3fn", scale=scale)), first=128)[0]])

    plain, blocks, rows = graph(None), graph(ScaleSpec((1, 128))), graph(ScaleSpec((1, 0)))
    assert blocks.canonical()["inputs"][0][3] == ((1, 128), "float32", "row") and plain.canonical()["inputs"][0][3] is None
    assert len({g.signature() for g in (plain, blocks, rows, graph(ScaleSpec((1, 128), "float8_e8m0fnu")))}) == 4
    assert graph(ScaleSpec((1, 128))).signature() == blocks.signature()


@pytest.mark.parametrize("name", ["groups", "queries_per_group", "head_dim"])
def test_a_split_of_qkv_without_one_of_its_sizes_is_a_graph_error(name):
    b, sizes = GraphBuilder(), {"groups": 2, "queries_per_group": 2, "head_dim": 4}
    x = b.input("x", spec(3, 32))
    with pytest.raises(GraphError, match=f"qkv_split: attribute '{name}' must be given"):
        b.op("qkv_split", x=x, **{k: v for k, v in sizes.items() if k != name})


def test_ops_that_only_move_values_cost_no_flops_and_sums_do():
    table, x = op_table(), spec(4, 8, 16)
    layouts = [op for op in table.values() if op.kind == "layout"]
    assert {"qkv_split", "qkv_merge", "split", "concat", "zeros_like", "flatten_heads"} <= {op.name for op in layouts}
    assert all(op.cost({"x": x}, {"y": x}, {})[0] == 0 for op in layouts)
    assert table["sum_heads"].cost({"x": x}, {"y": spec(4, 1, 16)}, {})[0] == 4 * 8 * 16
    assert table["add"].cost({"a": x, "b": x}, {"y": x}, {})[0] == 4 * 8 * 16


def test_signature_is_the_same_in_another_process():
    code = "from tests.cpu.test_graph import mlp; print(mlp().signature())"
    for seed in ("1", "2"):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True,
                              env={"PYTHONHASHSEED": seed, "PYTHONPATH": ".", "PATH": ""})  # fmt: skip
        assert done.stdout.strip() == mlp().signature()


def test_random_graphs_and_their_backwards_verify_and_are_immutable():
    for seed in range(20):
        r = RandomGraph(seed, symbolic=seed % 2 == 0)
        verify(r.graph)
        d = differentiate(r.graph, r.needs)
        verify(d.forward), verify(d.backward)
        with pytest.raises(dataclasses.FrozenInstanceError):
            r.graph.nodes[0].op = "add"


def _broken(change) -> Graph:
    g = mlp()
    nodes = list(g.nodes)
    return {
        "undefined": dataclasses.replace(g, nodes=(nodes[1], nodes[0], nodes[2])),
        "twice": dataclasses.replace(g, nodes=(nodes[0], nodes[0], *nodes[1:])),
        "unknown": dataclasses.replace(g, nodes=(dataclasses.replace(nodes[0], op="liner"), *nodes[1:])),
        "attribute": dataclasses.replace(g, nodes=(nodes[0], dataclasses.replace(nodes[1], attrs=()), nodes[2])),
        "spec": dataclasses.replace(g, specs={**g.specs, g.outputs[0]: spec(Dim("t", 8), 17)}),
        "output": dataclasses.replace(g, outputs=("nowhere",)),
        "weight": dataclasses.replace(g, weights=frozenset({"elsewhere"})),
        "input": dataclasses.replace(g, inputs=(*g.inputs, g.inputs[0])),
        "required": dataclasses.replace(g, nodes=(*nodes[:2], dataclasses.replace(nodes[2], outputs=()))),
    }[change]


@pytest.mark.parametrize(("change", "words"), [
    ("undefined", "nothing before it defines"), ("twice", "a second time"), ("unknown", "liner"), ("attribute", "out of order"),
    ("spec", "the op's rule says"), ("output", "nowhere"), ("weight", "elsewhere"), ("input", "stands twice"), ("required", "required output"),
])  # fmt: skip
def test_verify_catches_a_broken_graph_and_names_the_fault(change, words):
    verify(mlp())
    with pytest.raises(GraphError, match=words):
        verify(_broken(change))


def test_builder_suggests_the_right_port_and_names_what_is_missing():
    b = GraphBuilder()
    x = b.input("x", spec(4, 16))
    with pytest.raises(GraphError, match=r"residul.*did you mean 'residual'"):
        b.op("rms_norm", x=x, residul=x)
    with pytest.raises(GraphError, match="input port 'weight' must be connected"):
        b.op("linear", x=x)
    with pytest.raises(GraphError, match="no output port 'mean'"):
        b.op("rms_norm", x=x, want=("mean",))
    with pytest.raises(GraphError, match="'x': the name is taken"):
        b.input("x", spec(1))


def test_collectives_scale_dim_0_and_refuse_what_does_not_divide():
    b = GraphBuilder()
    x = b.input("x", spec(Dim("s", 8), 4))
    full = b.op("all_gather", x=x, group="tp", size=4)
    assert b.specs[b.op("reduce_scatter", x=full, group="tp", size=4)] == spec(Dim("s", 8), 4)
    with pytest.raises(GraphError, match=r"6.*divide.*4"):
        b.op("reduce_scatter", x=b.input("y", spec(6, 4)), group="tp", size=4)


def test_costs_of_a_linear_and_its_gradients_are_2mnk():
    b = GraphBuilder()
    x, w = b.input("x", spec(8, 16)), b.input("w", spec(32, 16), weight=True)
    d = differentiate(b.build([b.op("linear", x=x, weight=w)]), (True, True))
    from layerplan.integration.engines.contract import Region
    from layerplan.integration.planner.cover import region_of

    for graph in (d.forward, d.backward):
        for node in graph.nodes:
            region = region_of(graph, [node])
            assert isinstance(region, Region) and region.cost()[0] == 2 * 8 * 16 * 32, node.op
