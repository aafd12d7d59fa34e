"""Our experts beside Megatron's grouped experts on Transformer Engine: the same keys, shapes and values in a
distributed checkpoint, both ways, and the same results from them."""

from __future__ import annotations

import math

import pytest
import torch

from layerplan.integration.engines.packages import locate
from tests import oracle
from tests.gpu.one_rank import moe_config, one_rank

pytestmark = pytest.mark.skipif(
    not (locate("megatron.core").here and locate("transformer_engine").here),
    reason="needs megatron-core and transformer-engine",
)
COUNTS = (40, 0, 7, 129, 0, 1, 64, 15)  # rows of each expert
GLU = {"gated": {}, "plain": {"gated_linear_unit": False, "activation_func": torch.nn.functional.gelu}}
METADATA = {"axis": {}, "keys": {"singleton_local_shards": True}}
BOTH = ("ours", "te")


@pytest.fixture(scope="module", autouse=True)
def _rank():
    with one_rank():
        yield


def _experts(kind: str, **changes) -> torch.nn.Module:
    from megatron.core.process_groups_config import ProcessGroupCollection

    if kind == "ours":
        from layerplan.integration.megatron.provider import LayerplanSpecProvider as Provider
    else:
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider as Provider
    config, groups = moe_config(**changes), ProcessGroupCollection.use_mpu_process_groups()
    made = Provider().grouped_mlp_modules(True)(len(COUNTS), config, pg_collection=groups).cuda()
    assert type(made).__name__ == {"ours": "GroupedExperts", "te": "TEGroupedMLP"}[kind]
    return made


def _matrices(experts: torch.nn.Module) -> dict[str, list[torch.Tensor]]:
    """By product, one for each expert."""
    if hasattr(experts, "fc1"):
        return {"fc1": list(experts.fc1), "fc2": list(experts.fc2)}
    products = {"fc1": experts.linear_fc1, "fc2": experts.linear_fc2}
    return {w: [getattr(product, f"weight{i}") for i in range(len(COUNTS))] for w, product in products.items()}


def _state(experts: torch.nn.Module, metadata: dict) -> dict:
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return experts.sharded_state_dict(metadata={**metadata, "dp_cp_group": group})


def _pieces(state: dict) -> tuple[set, set]:
    """(key, dtype, shape of the whole, this piece's place and shape) of every tensor, (key, place) of every object."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories

    apply_factories(state)
    found = list(nested_values(state))
    assert all(isinstance(v, ShardedTensor | ShardedObject) for v in found)
    tensors, objects = ([t for t in found if isinstance(t, kind)] for kind in (ShardedTensor, ShardedObject))
    pieces = {(t.key, t.dtype, t.global_shape, t.global_offset, t.local_shape) for t in tensors}
    return pieces, {(t.key, t.global_shape, t.global_offset) for t in objects}


def _run(experts: torch.nn.Module, x: torch.Tensor, probs: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x, probs = (t.detach().clone().requires_grad_() for t in (x, probs))
    out, _ = experts(x, torch.tensor(COUNTS), probs)
    return (out.detach(), *torch.autograd.grad(out, (x, probs), dy))


def _truth(experts: torch.nn.Module, gated: bool, x: torch.Tensor, probs: torch.Tensor,
           dy: torch.Tensor) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The same in float64."""
    x, probs = (t.detach().double().requires_grad_() for t in (x, probs))
    made, begin, f = [], 0, torch.nn.functional
    for count, first, second in zip(COUNTS, *_matrices(experts).values(), strict=True):
        h = x[begin : begin + count] @ first.detach().double().T
        a = f.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1] if gated else f.gelu(h)
        made.append((a * probs[begin : begin + count, None]) @ second.detach().double().T)
        begin += count
    out = torch.cat(made)
    return (out.detach(), *torch.autograd.grad(out, (x, probs), dy.double()))


@pytest.mark.parametrize("layout", METADATA)
@pytest.mark.parametrize("kind", GLU)
def test_keys_shapes_and_places_in_a_checkpoint_are_those_of_transformer_engines_experts(kind, layout):
    (ours, own_objects), (theirs, objects) = (_pieces(_state(_experts(k, **GLU[kind]), METADATA[layout])) for k in BOTH)
    assert len(ours) == len(COUNTS) * (3 if kind == "gated" else 2)
    assert ours == theirs
    assert own_objects == objects


@pytest.mark.parametrize("layout", METADATA)
@pytest.mark.parametrize("kind", GLU)
@pytest.mark.parametrize("source", BOTH)
def test_checkpoints_interchange_and_give_the_same_results(source, kind, layout, tmp_path):
    from megatron.core import dist_checkpointing

    torch.manual_seed(3)
    made = {k: _experts(k, **GLU[kind]) for k in BOTH}
    written, read = made[source], made["te" if source == "ours" else "ours"]
    with torch.no_grad():
        for p in written.parameters():
            p.normal_(std=p.shape[-1] ** -0.5)
        for p in read.parameters():
            p.fill_(math.nan)
    dist_checkpointing.save(_state(written, METADATA[layout]), str(tmp_path))
    read.load_state_dict(dist_checkpointing.load(_state(read, METADATA[layout]), str(tmp_path)))
    for name, matrices in _matrices(written).items():
        for i, (a, b) in enumerate(zip(_matrices(read)[name], matrices, strict=True)):
            oracle.equal(a.detach(), b.detach(), f"{name} of expert {i}")
    rows = sum(COUNTS)
    x, dy = (torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    probs = torch.rand(rows, device="cuda")
    truth = _truth(written, kind == "gated", x, probs, dy)
    found = {k: _run(experts, x, probs, dy) for k, experts in made.items()}
    for name, ours, exact, theirs in zip(("out", "dx", "dprobs"), found["ours"], truth, found["te"], strict=True):
        oracle.compare(ours, exact, theirs, f"{kind}, from {source}: {name}")
