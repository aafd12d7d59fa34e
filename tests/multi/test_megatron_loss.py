"""The loss of LayerplanGPTModel against Megatron's: one process, tensor, sequence and pipeline parallel, in one and in
several chunks."""

import functools
import math

import pytest
import torch
from harness import run_ranks
from test_megatron_layers import _megatron, _metadata

from tests import oracle

KINDS = ("megatron", "fused", "chunked")
CLASSES, HIDDEN, BATCH, LENGTH = 88, 32, 2, 24  # no other tensor of the model is as wide as the logits
CHUNK = 16  # of 48 tokens
STEPS = 4
ALONE = {
    "plain": {},
    "tied": {"tied": True},
    "frozen output layer": {"frozen": True},
    "ignored labels": {"ignored": True},
    "bf16": {"dtype": "bfloat16"},
    "deterministic": {"deterministic_mode": True},
}
SHARDED = {
    "tensor parallel": {},
    "sequence parallel": {"sequence_parallel": True},
    "tied": {"tied": True},
    "sequence parallel, tied, ignored labels": {"sequence_parallel": True, "tied": True, "ignored": True},
    "sequence parallel, frozen output layer": {"sequence_parallel": True, "frozen": True},
}


def _small_chunks():
    from layerplan.kernels.loss import chunked

    chunked._LEAST = chunked._MOST = CHUNK


def _force(gpt):
    """Chunks as small as this pay where memory is short, not where a model is as small as this."""
    from layerplan import Policy

    gpt.loss.set_policy(Policy(engine="loss/chunked"), "loss")


def _model(kind, *, tied=False, frozen=False, dtype="float32", rounded=False, **changes):
    """``rounded``: float32 parameters that hold what bf16 ones would."""
    from megatron.core.models.gpt import GPTModel
    from parity_model import dense_config, fill

    from layerplan.integration.megatron.model import LayerplanGPTModel
    from layerplan.integration.megatron.specs import gpt_block_spec

    if dtype == "bfloat16":
        changes |= {"bf16": True, "params_dtype": torch.bfloat16}
    config = dense_config(**changes)
    make = GPTModel if kind == "megatron" else functools.partial(LayerplanGPTModel, loss=kind)
    gpt = make(
        config,
        gpt_block_spec(config),
        vocab_size=CLASSES,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=tied,
    )
    fill(gpt)
    if kind == "chunked":
        _force(gpt)
    if rounded:
        for p in gpt.parameters():
            p.data = p.data.bfloat16().float()
    if frozen:
        gpt.output_layer.weight.requires_grad_(False)
    return gpt


def _batch():
    gen = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, CLASSES, (BATCH, LENGTH + 1), generator=gen)
    mask = torch.rand(
        BATCH, LENGTH, generator=gen
    )  # a loss mask with weights: every row's gradient has a scale of its own
    positions, hidden = (
        torch.arange(LENGTH)[None].expand(BATCH, -1),
        torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1),
    )
    return tokens[:, :-1].contiguous(), positions, hidden, tokens[:, 1:].contiguous(), mask


def _widest(sizes):
    """A mode that notes the shapes of all tensors that an operator makes."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            sizes.extend(list(t.shape) for t in torch.utils._pytree.tree_leaves(made) if isinstance(t, torch.Tensor))
            return made

    return Watching()


def _step(kind, *, ignored=False, **options):
    """Loss, its shape, gradients by name, logits where there are no labels, engines, and the most rows of logits that
    there were at once."""
    from megatron.core import parallel_state as mpu

    from layerplan.integration.planner.report import report

    gpt = _model(kind, **options)
    tokens, positions, hidden, labels, mask = _batch()
    if ignored:
        labels[0, :5] = -100
        mask[0, :5] = 0.0  # Megatron ignores no label: the mask is what makes it one
    sizes = []
    with _widest(sizes):
        loss = gpt(tokens, positions, hidden, labels=labels, loss_mask=mask)
        (loss.float() * mask).sum().backward()
    grads = {name: p.grad.flatten().tolist() for name, p in gpt.named_parameters() if p.grad is not None}
    logits = gpt.eval()(tokens, positions, hidden)
    classes = CLASSES // mpu.get_tensor_model_parallel_world_size()
    rows = [
        math.prod(size[:-1]) for size in sizes if len(size) > 1 and size[-1] == classes and size != [HIDDEN, classes]
    ]  # that is the weight
    keys = sorted(gpt.sharded_state_dict(metadata=_metadata()))
    said = str(report(gpt)) if kind != "megatron" else ""
    return {
        "loss": (loss.float() * (mask > 0)).tolist(),
        "shape": list(loss.shape),
        "dtype": str(loss.dtype),
        "grads": grads,
        "keys": keys,
        "logits": logits.flatten().tolist(),
        "rows": max(rows, default=0),
        "report": said,
    }


def _alone():
    from parity_model import layout

    with _megatron():
        layout()
        _small_chunks()
        found = {case: {kind: _step(kind, **options) for kind in KINDS} for case, options in ALONE.items()}
        found["bf16"]["truth"] = _step("megatron", rounded=True)
        return found | {
            "refusals": _refusals(),
            "steps": {kind: _steps(kind) for kind in KINDS},
            "fused sums": _fused_sums(),
        }


def _sharded():
    from parity_model import layout

    with _megatron():
        _small_chunks()
        layout(tp=2)
        found = {case: {kind: _step(kind, **options) for kind in KINDS} for case, options in SHARDED.items()}
        found["steps"] = {kind: _steps(kind, sequence_parallel=True) for kind in KINDS}
        found["gathered"] = _refused(lambda: _gathered_output())
        layout(pp=2)
        found["pipeline"] = {kind: _steps(kind) for kind in KINDS}
        layout()
        found["data parallel"] = {kind: _steps(kind, distributed_optimizer=True, overlap=True) for kind in KINDS}
        return found


def _gathered_output():
    from parity_model import dense_config

    from layerplan.integration.megatron.model import LayerplanGPTModel
    from layerplan.integration.megatron.specs import gpt_block_spec

    config = dense_config()
    LayerplanGPTModel(
        config, gpt_block_spec(config), vocab_size=CLASSES, max_sequence_length=LENGTH, parallel_output=False
    )


def _steps(kind, distributed_optimizer=False, overlap=False, **changes):
    """[loss, gradient norm] of several steps under DDP, weight gradients of ours added to main_grad."""
    from megatron.core.models.gpt import GPTModel
    from parity_model import build, dense_config

    from layerplan.integration.megatron.model import LayerplanGPTModel
    from layerplan.integration.megatron.specs import gpt_block_spec

    config = dense_config(gradient_accumulation_fusion=kind != "megatron", **changes)
    make = GPTModel if kind == "megatron" else functools.partial(LayerplanGPTModel, loss=kind)
    run = build(config, gpt_block_spec(config), make=make, distributed_optimizer=distributed_optimizer, overlap=overlap)
    if kind == "chunked" and run.gpt.post_process:
        _force(run.gpt)
    return [run.step() for _ in range(STEPS)]


def _fused_sums():
    """main_grad of every parameter after a micro-batch, and whether the output weight's was added by the product; tied
    too."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    found = {}
    for tied in (False, True):
        for fuse in (False, True):
            gpt = _model("chunked", tied=tied, gradient_accumulation_fusion=fuse)
            model = DistributedDataParallel(gpt.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), gpt)
            model.zero_grad_buffer()
            tokens, positions, hidden, labels, mask = _batch()
            for _ in range(2):
                (model(tokens, positions, hidden, labels=labels) * mask).sum().backward()
            weight = gpt.shared_embedding_or_output_weight() if tied else gpt.output_layer.weight
            found[f"{tied} {fuse}"] = {
                "grads": {name: p.main_grad.flatten().tolist() for name, p in gpt.named_parameters()},
                "added": bool(weight.grad_added_to_main_grad),
            }
    return found


def _refused(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def _refusals():

    def with_field(**fields):
        from parity_model import dense_config

        from layerplan.integration.megatron.model import _loss_problems

        config = dense_config()
        for name, value in fields.items():
            setattr(config, name, value)
        return [str(p) for p in _loss_problems(config, "chunked", True)], [
            str(p) for p in _loss_problems(config, "fused", True)
        ]

    gpt = _model("fused")
    tokens, positions, hidden, labels, _ = _batch()
    return {
        "kind": _refused(lambda: _model("vocab")),
        "label": _refused(lambda: gpt(tokens, positions, hidden, labels=labels.clone().fill_(CLASSES))),
        "whole logits": _refused(lambda: gpt.compute_language_model_loss(labels, torch.zeros(LENGTH, BATCH, 44))),
        "mtp": with_field(mtp_num_layers=1),
        "deferred": with_field(defer_embedding_wgrad_compute=True),
        "mup": with_field(use_mup=True, mup_output_mult=0.5),
        "offload": with_field(cpu_offloading=True),
    }


@pytest.fixture(scope="module")
def alone():
    return run_ranks("test_megatron_loss:_alone", world=1, timeout=240)[0]


@pytest.fixture(scope="module")
def sharded():
    return run_ranks("test_megatron_loss:_sharded", world=2, timeout=300)


def _close(a, b, what, tolerance=1e-5):
    largest = max(map(abs, b), default=0.0)
    assert len(a) == len(b) and largest > 0, what
    worst = max(abs(x - y) for x, y in zip(a, b, strict=True))
    assert worst <= tolerance * largest, f"{what}: {worst:.2e} of {largest:.2e}"


def _hold(found, kind):
    theirs, ours = found["megatron"], found[kind]
    assert ours["shape"] == theirs["shape"] == [BATCH, LENGTH] and ours["dtype"] == "torch.float32"
    assert ours["grads"].keys() == theirs["grads"].keys() and len(ours["grads"]) > 5
    pairs = {"loss": [[x for row in run["loss"] for x in row] for run in (ours, theirs)]}
    pairs |= {name: [ours["grads"][name], grad] for name, grad in theirs["grads"].items()}
    for name, (a, b) in pairs.items():
        if (
            "truth" in found
        ):  # the rule of tests/oracle.py: at most twice the error of Megatron's loss in bf16, and an ulp
            exact = (
                found["truth"]["grads"][name] if name != "loss" else [x for row in found["truth"]["loss"] for x in row]
            )
            oracle.compare(
                *(torch.tensor(v).to(d) for v, d in ((a, torch.bfloat16), (exact, torch.float64), (b, torch.bfloat16))),
                name,
            )
        else:
            _close(a, b, name)
    assert ours["logits"] == theirs["logits"], "without labels it is Megatron's output layer"
    assert ours["keys"] == theirs["keys"], "names in checkpoints"


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("case", ALONE)
def test_loss_and_gradients_are_megatrons_on_one_rank(alone, case, kind):
    _hold(alone[case], kind)


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("case", SHARDED)
def test_loss_and_gradients_are_megatrons_on_two_tensor_parallel_ranks(sharded, case, kind):
    for rank in sharded:
        _hold(rank[case], kind)
    assert sharded[0][case][kind]["loss"] == sharded[1][case][kind]["loss"], (
        "a loss is the same on all ranks, bit for bit"
    )


def test_chunked_loss_never_makes_more_than_a_chunk_of_logits(alone, sharded):
    for found in (*(alone[case] for case in ALONE), *(rank[case] for rank in sharded for case in SHARDED)):
        assert found["chunked"]["rows"] == CHUNK
        assert found["fused"]["rows"] == found["megatron"]["rows"] == BATCH * LENGTH


@pytest.mark.parametrize("kind", KINDS[1:])
def test_training_steps_are_megatrons(alone, sharded, kind):
    places = [("alone", alone["steps"])] + [
        (name, rank[name]) for rank in sharded for name in ("steps", "pipeline", "data parallel")
    ]
    for name, found in places:
        for ours, theirs in zip(found[kind], found["megatron"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, nan_ok=True), name
    losses = [step[0] for step in sharded[1]["pipeline"][kind]]
    assert losses[-1] < losses[0], "the last stage knows the loss, and it falls"


def test_weight_gradient_of_the_output_layer_is_added_to_main_grad(alone):
    for tied in (False, True):
        plain, fused = alone["fused sums"][f"{tied} False"], alone["fused sums"][f"{tied} True"]
        assert fused["added"] and not plain["added"]
        for name, grad in plain["grads"].items():
            _close(fused["grads"][name], grad, name, 1e-6)


def test_report_names_the_loss_and_what_it_runs(alone, sharded):
    rows = {kind: alone["plain"][kind]["report"].splitlines() for kind in KINDS[1:]}
    assert any(line.startswith("loss ") and " cross_entropy " in line for line in rows["fused"])
    assert any(
        line.startswith("loss ") and "linear_cross_entropy " in line and "loss/chunked" in line
        for line in rows["chunked"]
    )
    assert "output_layer (ColumnParallelLinear)" in alone["plain"]["fused"]["report"]
    assert "output_layer" not in alone["plain"]["chunked"]["report"]
    said = sharded[0]["sequence parallel"]["chunked"]["report"]
    assert all(word in said for word in ("shard_targets", "all_gather", "shard_loss"))


def test_what_a_loss_cannot_do_is_refused_by_name(alone, sharded):
    found = alone["refusals"]
    assert "loss = 'vocab'" in found["kind"] and "fused, chunked" in found["kind"]
    assert "targets span 88 .. 88" in found["label"]
    assert "must be 88, the classes of this rank" in found["whole logits"]
    for case, field in (
        ("mtp", "mtp_num_layers"),
        ("deferred", "defer_embedding_wgrad_compute"),
        ("mup", "mup_output_mult"),
        ("offload", "cpu_offloading"),
    ):
        (chunked,), fused = found[case]
        assert chunked.startswith(field) and fused == [], case
    assert all("parallel_output = False" in rank["gathered"] for rank in sharded)
