"""Weight gradients that are added into main_grad or deferred to backward_dw, under Megatron's DDP with overlapped reduction."""

import contextlib

import pytest
from harness import run_ranks
from test_megatron_layers import _megatron, _mla_config

BUCKET = 3000  # elements: several buckets for a model of two small layers
WAYS = {
    "plain": {},
    "fused": {"fuse": True},
    "fused, zeros returned": {"fuse": True, "zeros": True},
    "deferred": {"defer": True},
    "deferred and fused": {"defer": True, "fuse": True},
    "deferred and fused, zeros returned": {"defer": True, "fuse": True, "zeros": True},
}


def _model(kind, fuse, defer, zeros):
    """A filled model under DDP that reduces each bucket as soon as its gradients are there."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from parity_model import LENGTH, VOCAB, dense_config, fill, layout

    from layerplan.integration.megatron.specs import gpt_block_spec

    layout()
    up = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}
    config = dense_config() if kind.startswith("dense") else _mla_config(**(up if "recompute" in kind else {}))
    config.gradient_accumulation_fusion = fuse
    config.delay_wgrad_compute = defer  # past __post_init__, which wants Transformer Engine and expert overlap for it
    spec = gpt_block_spec(config, fuse_residual=kind == "dense residual")
    gpt = GPTModel(config, spec, vocab_size=VOCAB, max_sequence_length=LENGTH, share_embeddings_and_output_weights=False,
                   position_embedding_type="rope" if kind.startswith("dense") else "none")  # fmt: skip
    fill(gpt)
    for p in gpt.parameters():
        p.zero_out_wgrad = zeros
    ddp = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=BUCKET, grad_reduce_in_fp32=True, delay_wgrad_compute=defer)
    return gpt, DistributedDataParallel(config, ddp, gpt)


def _backward(kind, fuse=False, defer=False, zeros=False):
    """Gradients of the second step; how often each bucket was reduced after each step; and per step, the reductions that had
    started after each micro-batch's backward and at the end."""
    import torch
    from parity_model import BATCH, LENGTH, VOCAB

    gpt, model = _model(kind, fuse, defer, zeros)
    started = {id(group): 0 for group in model.bucket_groups}
    for group in model.bucket_groups:
        group.start_grad_sync = _counted(group, started)
    tokens = torch.randint(0, VOCAB, (2, BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(torch.distributed.get_rank()))
    positions, mask = torch.arange(LENGTH)[None].expand(BATCH, -1), torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    rounds, early = [], []
    for _ in range(2):  # two steps: what one step leaves behind must not disturb the next
        model.zero_grad_buffer()
        before = sum(started.values())
        for n, row in enumerate(tokens):
            with model.no_sync() if n == 0 else contextlib.nullcontext():
                model(row[:, :-1].contiguous(), positions, mask, labels=row[:, 1:].contiguous()).mean().backward()
                early.append(sum(started.values()) - before)
                for layer in gpt.decoder.layers if defer else ():
                    layer.mlp.backward_dw()
                    layer.self_attention.backward_dw()
        early.append(sum(started.values()) - before)
        model.finish_grad_sync()
        rounds.append(list(started.values()))
    for layer in gpt.decoder.layers if defer else ():  # nothing waits any more: no hook may run again
        layer.mlp.backward_dw()
        layer.self_attention.backward_dw()
    assert list(started.values()) == rounds[-1]
    gradients = {name: p.main_grad.flatten().tolist() for name, p in gpt.named_parameters()}
    return {"gradients": gradients, "started": rounds, "early": early, "left": sum(p.grad is not None for p in gpt.parameters())}


def _counted(group, started):
    original = group.start_grad_sync

    def start(*args, **kwargs):
        started[id(group)] += 1
        return original(*args, **kwargs)

    return start


def _gradients():
    with _megatron():
        return {f"{kind}, {way}": _backward(kind, **fields) for kind in KINDS for way, fields in WAYS.items()}


KINDS = ["dense", "dense residual", "mla", "mla recompute"]
ROWS = [(kind, way) for kind in KINDS for way in WAYS]


@pytest.fixture(scope="module")
def gradients():
    return run_ranks("test_megatron_weight_gradients:_gradients", world=2, timeout=240)


@pytest.mark.parametrize("kind, way", ROWS)
def test_every_bucket_is_reduced_exactly_once_a_step(gradients, kind, way):
    for rank in gradients:
        seen = rank[f"{kind}, {way}"]
        assert len(seen["started"][0]) > 2, "one bucket would say little"
        assert seen["started"] == [[1] * len(seen["started"][0]), [2] * len(seen["started"][0])]
        assert seen["left"] == 0


@pytest.mark.parametrize("kind, way", ROWS)
def test_reduction_starts_with_the_gradients_it_is_for(gradients, kind, way):
    early = gradients[0][f"{kind}, {way}"]["early"]
    buckets = len(gradients[0][f"{kind}, {way}"]["started"][0])
    assert early[:3] == [0, 0, 0], "in its first step DDP only learns which gradients come"
    first, second, end = early[3:]
    assert first == 0, "the first micro-batch must not reduce"
    assert second < buckets if "deferred" in way else second == buckets  # a deferred gradient's bucket waits for backward_dw
    assert end == buckets, "all of it starts before finish_grad_sync asks for it"


@pytest.mark.parametrize("kind, way", [row for row in ROWS if row[1] != "plain"])
def test_gradients_are_those_of_the_plain_way(gradients, kind, way):
    for rank in gradients:
        plain, other = rank[f"{kind}, plain"]["gradients"], rank[f"{kind}, {way}"]["gradients"]
        assert plain.keys() == other.keys()
        for name, values in plain.items():
            if way == "deferred":
                assert other[name] == values, name
                continue
            largest = max(map(abs, values))
            # the sum over two micro-batches in one product-and-add instead of two roundings: two ulps of float32
            assert largest > 0 and max(abs(a - b) for a, b in zip(values, other[name], strict=True)) <= 4e-7 * largest, name


def test_both_ranks_end_with_the_same_gradients(gradients):
    for row in gradients[0]:
        assert gradients[0][row]["gradients"] == gradients[1][row]["gradients"]
