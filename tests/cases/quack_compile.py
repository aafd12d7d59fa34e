"""``python -m tests.cases.quack_compile``: compile what the quack engines offer on sm_90 and launch it up to the
driver, without a GPU.

Run with CUTE_DSL_ARCH=sm_90a, QUACK_ARCH=sm_90, no visible device and a QUACK_CACHE_DIR of its own: the package's cache
knows sources and arguments, not the arch. Tensors in host memory are labelled as a device's; a compiled kernel then
checks number, type, dtype, shape, strides and alignment of all its arguments before it asks the driver, which is not
there."""

from __future__ import annotations

import ctypes
import importlib

import torch

from layerplan.integration.engines.arch import ARCHS
from layerplan.integration.engines.contract import BuildContext, Offer
from layerplan.integration.engines.manifest import BY_ID
from layerplan.integration.graph.autodiff import differentiate
from layerplan.integration.graph.ir import Dim, Graph, GraphBuilder, TensorSpec
from layerplan.integration.planner.cover import region_of
from layerplan.kernels.loss import quack as loss_engine

from . import quack_experts

TOKENS = Dim("t", 64)
_CUDA, _DEVICE_TYPE_AT = 2, 8  # in DLPack's tensor struct


class Labelled:
    """A host tensor that says it is a CUDA device's."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()

    def __dlpack__(self, **_):
        capsule = torch.utils.dlpack.to_dlpack(self.tensor)
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        ctypes.c_int32.from_address(pointer(capsule, b"dltensor") + _DEVICE_TYPE_AT).value = _CUDA
        return capsule

    def __dlpack_device__(self):
        return _CUDA, 0


def labelled(value):
    if isinstance(value, torch.Tensor):
        return Labelled(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(labelled, value))
    return value


def labelling(compile_function):
    """The compile function, whose kernels label their tensors."""

    def compiled(*arguments, **options):
        kernel = compile_function(*arguments, **options)
        return lambda *given: kernel(*map(labelled, given))

    return compiled


def install() -> None:
    rmsnorm, gemm, rotary, host, utils = (
        importlib.import_module(f"quack.{n}")
        for n in ("rmsnorm", "gemm", "rotary", "gemm_runtime.host", "cute_dsl_utils")
    )
    for module, name in (
        (rmsnorm, "_compile_rmsnorm_fwd"),
        (rmsnorm, "_compile_rmsnorm_bwd"),
        (gemm, "_compile_gemm"),
        (host, "_compile_gemm_epi"),
    ):
        setattr(module, name, labelling(getattr(module, name)))
    rotary.RotaryKernel.compile = staticmethod(labelling(rotary.RotaryKernel.compile))
    both = tuple(map(labelling, loss_engine._compilers()))
    loss_engine._compilers = lambda: both
    # the one question to the driver that building asks
    utils.get_max_active_clusters = host.get_max_active_clusters = lambda *_, **__: 66


def single(op: str, inputs: dict, **attrs) -> Graph:
    """A graph of one node; ``inputs`` maps ports to (shape, dtype)."""
    b = GraphBuilder()
    made = b.op(op, **{p: b.input(p, TensorSpec(*spec)) for p, spec in inputs.items()}, **attrs)
    return b.build(made if isinstance(made, tuple) else [made])


def norm(
    op="rms_norm", width=4096, dtype="bfloat16", wdtype=None, weight=True, bias=False, residual=False, **attrs
) -> Graph:
    vector, matrix = ((width,), wdtype or dtype), ((TOKENS, width), dtype)
    inputs = {"x": matrix} | ({"weight": vector} if weight else {}) | ({"bias": vector} if bias else {})
    return single(op, inputs | ({"residual": matrix} if residual else {}), **attrs)


def loss(classes=32000, dtype="bfloat16", **attrs) -> Graph:
    return single("cross_entropy", {"logits": ((TOKENS, classes), dtype), "targets": ((TOKENS,), "int64")}, **attrs)


def rope(
    x=(2, TOKENS, 8, 128), half=64, dtype="bfloat16", tables=("float32", "float32"), axis=1, positions=False, **attrs
) -> Graph:
    inputs = {"x": (x, dtype), "cos": ((4096, half), tables[0]), "sin": ((4096, half), tables[1])}
    return single(
        "rope", {**inputs, **({"positions": ((x[axis],), "int32")} if positions else {})}, seq_axis=axis, **attrs
    )


def linear(n=512, k=256, dtype="bfloat16", bias=False) -> Graph:
    return single(
        "linear", {"x": ((TOKENS, k), dtype), "weight": ((n, k), dtype), **({"bias": ((n,), dtype)} if bias else {})}
    )


def wgrad(accumulate: str) -> Graph:
    return single(
        "linear_wgrad",
        {"dy": ((TOKENS, 16), "bfloat16"), "x": ((TOKENS, 32), "bfloat16"), "accumulate": ((16, 32), accumulate)},
    )


def grouped(n=128, k=64, dtype="bfloat16", experts=3) -> Graph:
    inputs = {"x": ((TOKENS, k), dtype), "weight": ((experts, n, k), dtype), "offsets": ((experts,), "int32")}
    return single("grouped_matmul", inputs)


def grouped_wgrad(accumulate: str) -> Graph:
    inputs = {
        "dy": ((TOKENS, 16), "bfloat16"),
        "x": ((TOKENS, 32), "bfloat16"),
        "offsets": ((3,), "int32"),
        "accumulate": ((3, 16, 32), accumulate),
    }
    return single("grouped_matmul_wgrad", inputs)


def swiglu_chain(bias=False, keep=False, dtype="bfloat16", half=256, weights=False, **attrs) -> Graph:
    """swiglu(linear(x)); ``keep``: the linear's result is an output too."""
    b = GraphBuilder()
    x, w = b.input("x", TensorSpec((TOKENS, 128), dtype)), b.input("w", TensorSpec((2 * half, 128), dtype), weight=True)
    extra = {"bias": b.input("b", TensorSpec((2 * half,), dtype))} if bias else {}
    made = b.op("linear", x=x, weight=w, **extra)
    rows = {"row_weight": b.input("p", TensorSpec((TOKENS,), dtype))} if weights else {}
    return b.build([b.op("swiglu", x=made, **rows, **attrs), *([made] if keep else [])])


def swiglu_gradient() -> Graph:
    """swiglu_bwd(linear_dgrad(dy))."""
    b = GraphBuilder()
    dy, w, x = (
        b.input(n, TensorSpec(s, "bfloat16"))
        for n, s in (("dy", (TOKENS, 128)), ("w", (128, 64)), ("x", (TOKENS, 128)))
    )
    return b.build([b.op("swiglu_bwd", want=["dx"], dy=b.op("linear_dgrad", dy=dy, weight=w), x=x)])


def backward(graph: Graph, needs: tuple[bool, ...] | None = None) -> Graph:
    return differentiate(graph, needs or tuple(graph.specs[v].is_float for v in graph.inputs)).backward


def compiled():
    """(engine, graph) pairs; each node, or the two of a pattern, is a region."""
    for graph in (
        norm(residual=True),
        norm("layer_norm", 1026, wdtype="float32", bias=True, zero_centered=True),
        norm(width=512, weight=False),
        norm("layer_norm", 65536),
        norm(width=33, dtype="float32", residual=True),
    ):
        yield "norm/quack", differentiate(graph, (True,) * len(graph.inputs)).forward
        yield "norm/quack", backward(graph)
    for graph in (loss(100000, "float32"), loss()):
        yield "loss/quack", differentiate(graph, (True, False)).forward
        yield "loss/quack", backward(graph)
    yield "rope/quack", rope()
    yield "rope/quack", rope((TOKENS, 2, 8, 64), 16, axis=0, interleaved=True, inverse=True)
    yield "linear/quack", linear(bias=True)
    yield "linear/quack", backward(linear())
    yield "linear/quack", wgrad("float32")
    yield "grouped_matmul/quack", grouped()
    yield "grouped_matmul/quack", backward(grouped())
    yield "grouped_matmul/quack", grouped_wgrad("float32")
    yield "linear_swiglu/quack", swiglu_chain()
    yield "linear_swiglu/quack", swiglu_gradient()
    for kind in quack_experts.KINDS:
        for probs, want in (("float32", ("dx", "drow_weight")), (None, ("dx",))):
            yield "experts/quack", quack_experts.graph(kind, TOKENS, probs=probs, want=want)
    yield "experts/quack", quack_experts.graph("gradient", TOKENS, want=("dx",))


def example(spec: TensorSpec) -> torch.Tensor:
    shape = [4 if isinstance(d, Dim) else d for d in spec.shape]
    dtype = getattr(torch, spec.dtype)
    return torch.randn(shape).to(dtype) if spec.is_float else torch.zeros(shape, dtype=dtype)


def main() -> None:
    install()
    reached = 0
    for engine, graph in compiled():
        for nodes in (
            [graph.nodes]
            if engine in ("linear_swiglu/quack", "experts/quack")
            else ([n] for n in graph.nodes if n.op in BY_ID[engine].ops)
        ):
            region = region_of(graph, nodes)
            offer = BY_ID[engine].load().match(region, ARCHS["sm_90"])
            assert isinstance(offer, Offer), (engine, region.ops, offer)
            launch = BY_ID[engine].load().build(BuildContext(region, ARCHS["sm_90"], offer)).launch
            try:
                launch(*(example(region.graph.specs[v]) for v in region.graph.inputs))
            except RuntimeError as error:  # a mismatch is a TypeError or a ValueError
                assert "Cuda" in str(error), error
                reached += 1
    print("reached the driver:", reached)


if __name__ == "__main__":
    main()
