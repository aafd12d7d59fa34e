"""``--spec layerplan.integration.megatron.specs`` through Megatron's own arguments, model config and builder."""

import math
import sys

import pytest
from harness import run_ranks
from test_megatron_layers import _megatron

EXPERTS = [1, 0, 0, 1, 1, 1, 0, 0]  # per layer
SPEC = ["--spec", "layerplan.integration.megatron.specs", "gpt_block_spec"]
MODEL = [
    "--num-layers", "4", "--hidden-size", "32", "--ffn-hidden-size", "64", "--num-attention-heads", "4",
    "--seq-length", "16", "--max-position-embeddings", "16", "--micro-batch-size", "2", "--global-batch-size",
    "4", "--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear",
    "--attention-dropout", "0", "--hidden-dropout", "0", "--untie-embeddings-and-output-weights",
    "--transformer-impl", "local", "--vocab-size", "64", "--tokenizer-type", "NullTokenizer",
    "--make-vocab-size-divisible-by", "1", "--lr", "0.01", "--train-iters", "4", "--no-bias-swiglu-fusion",
    "--no-bias-dropout-fusion", "--no-persist-layer-norm", "--no-gradient-accumulation-fusion",
    "--no-masked-softmax-fusion", "--no-rope-fusion",
]  # fmt: skip
FEW = ["--transformer-impl", "local", "--no-rope-fusion", "--no-persist-layer-norm"]  # what the README names
GQA = [
    "--group-query-attention", "--num-query-groups", "2",
]  # fmt: skip
MLA = [
    "--multi-latent-attention", "--q-lora-rank", "16", "--kv-lora-rank", "12", "--qk-head-dim", "8",
    "--qk-pos-emb-head-dim", "4", "--v-head-dim", "8", "--rope-type", "rope", "--qk-layernorm",
    "--recompute-granularity", "selective", "--recompute-modules", "mla_up_proj",
]  # fmt: skip


def _arguments(*more, spec=SPEC, model=MODEL):
    """Megatron's parsed and validated arguments, as its pretrain script makes them."""
    from megatron.training.arguments import parse_args, validate_args

    before, sys.argv = sys.argv, ["pretrain_gpt.py", *spec, *model, *more]
    try:
        args = parse_args()
    finally:
        sys.argv = before
    validate_args(args)
    return args


def _chunks(*more, **given):
    """What Megatron's pretrain_gpt builds from the arguments: (configuration, model chunks of this rank)."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.argument_utils import gpt_config_from_args

    model = gpt_config_from_args(_arguments(*more, **given))
    builder = model.get_builder_cls()(model)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return model, builder.build_distributed_models(groups, ddp, data_parallel_random_init=False)


def _seen(chunks):
    """Per chunk: numbers of its layers, the classes in the slots, the final norm's class."""
    rows = []
    for chunk in chunks:
        decoder = chunk.module.decoder
        layers = [[layer.layer_number, *(f"{type(m).__module__.rpartition('.')[0]}:{type(m).__name__}" for m in
                                         (layer.self_attention.core_attention, layer.mlp))] for layer in decoder.layers]  # fmt: skip
        rows.append([layers, type(layer_norm).__module__ if (layer_norm := decoder.final_layernorm) is not None else None])
    return rows


def _train(config, chunks, steps=3):
    """Losses of plain SGD on two micro-batches, through the schedule that Megatron chooses for the layout."""
    import torch
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from parity_model import fill

    for chunk in chunks:
        fill(chunk.module)
    config.finalize_model_grads_func = finalize_model_grads
    tokens = torch.randint(0, 64, (2, 2, 17), generator=torch.Generator().manual_seed(7))
    positions, mask = torch.arange(16)[None].expand(2, -1), torch.ones(1, 1, 16, 16, dtype=torch.bool).triu(1)

    def loss_func(output):
        loss = output.float().mean()
        return loss, {"loss": loss.detach().clone()}

    def forward_step(batches, model):
        row = next(batches)
        return model(row[:, :-1].contiguous(), positions, mask, labels=row[:, 1:].contiguous()), loss_func

    losses = []
    for _ in range(steps):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        logged = get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=[iter(tokens) for _ in chunks] if len(chunks) > 1 else iter(tokens),
            model=chunks, num_microbatches=2, seq_length=16, micro_batch_size=2, forward_only=False,
        )  # fmt: skip
        losses.append(torch.stack([row["loss"] for row in logged]).mean().item() if logged else None)
        with torch.no_grad():
            for chunk in chunks:
                for p in chunk.parameters():
                    p.sub_(p.main_grad, alpha=0.1)
    return losses


def _one_process():
    from parity_model import layout

    out = {}
    with _megatron():
        for name, more in (("gqa", GQA), ("mla", MLA)):
            layout()
            model, chunks = _chunks(*more)
            out[name] = {"seen": _seen(chunks), "losses": _train(model.transformer, chunks)}
        out["refused"] = _refused()
        layout()
        out["few"] = _few()
    return out


def _few():
    """The README's options and no others that silence a default: [losses, guards in force before and after, the optimiser]."""
    from megatron.core import optimizer

    from layerplan.integration.megatron import compat

    silenced = [m for m in MODEL if m.startswith("--no-") and m not in FEW]
    plain = [m for m in MODEL if m not in silenced]
    for guard in compat.GUARDS:  # CPU mode has put them in force; guarded_block_spec takes their place
        compat._release(guard)
    before = [g for g in compat.GUARDS if g in compat.active()]
    try:
        _chunks(*GQA, model=plain)
        refused = "no error"
    except ValueError as error:
        refused = str(error)
    model, chunks = _chunks(*GQA, spec=[*SPEC[:-1], "guarded_block_spec"], model=plain)
    assert model.transformer.gradient_accumulation_fusion, "Megatron's own default"
    after = [g for g in compat.GUARDS if g in compat.active()]
    return {"losses": _train(model.transformer, chunks), "refused": refused, "silenced": silenced, "before": before, "after": after, "adam": optimizer.Adam.__module__}


def _refused():
    """The error of a configuration that the layers would not run as it says, out of Megatron's builder."""
    try:
        _chunks("--glu-linear-offset", "1.0", "--group-query-attention", "--num-query-groups", "3")
    except ValueError as error:
        return [type(error).__name__, str(error)]
    return ["no error", ""]


def _pipeline():
    """Two pipeline stages of two chunks each."""
    from megatron.core import parallel_state as mpu
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    out = {}
    with _megatron():
        mpu.initialize_model_parallel(1, 2, virtual_pipeline_model_parallel_size=2)
        model_parallel_cuda_manual_seed(123)
        for name, more in (("gqa", GQA), ("mla", MLA)):
            model, chunks = _chunks("--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1", *more)
            out[name] = {"seen": _seen(chunks), "losses": _train(model.transformer, chunks)}
    return out


def _every_stage():
    """The spec's layers for each pipeline rank and chunk, asked for on one process: which of them hold experts."""
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.spec_utils import import_module
    from parity_model import dense_config, layout

    with _megatron():
        layout()
        config = dense_config(num_layers=8, num_moe_experts=2, moe_layer_freq=EXPERTS, moe_router_dtype="fp32")
        config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size = 2, 2
        make = import_module(SPEC[1:])
        rows = {}
        for rank in range(2):
            for chunk in range(2):
                layers = make(config, vp_stage=chunk, pp_rank=rank).layer_specs
                # experts have a norm of their own in front of the router
                rows[f"{rank} {chunk}"] = [int(s.submodules.pre_mlp_layernorm is not IdentityOp) for s in layers]
    return rows


@pytest.fixture(scope="module")
def one():
    return run_ranks("test_megatron_spec_argument:_one_process", world=1, timeout=200)[0]


@pytest.fixture(scope="module")
def pipeline():
    return run_ranks("test_megatron_spec_argument:_pipeline", world=2, timeout=200)


OURS = "layerplan.integration.megatron"


@pytest.mark.parametrize("name", ["gqa", "mla"])
def test_megatrons_builder_puts_our_layers_into_every_slot(one, name):
    ((layers, final_norm),) = one[name]["seen"]
    assert layers == [[n, f"{OURS}:CoreAttention", f"{OURS}:MLP"] for n in range(1, 5)]
    assert final_norm == f"{OURS}.layers"
    losses = one[name]["losses"]
    assert losses[-1] < losses[0] - 0.05, losses


@pytest.mark.parametrize("name", ["gqa", "mla"])
def test_virtual_pipeline_chunks_hold_their_own_layers_and_train_as_one_process(one, pipeline, name):
    for rank in range(2):
        chunks = pipeline[rank][name]["seen"]
        assert [[layer[0] for layer in layers] for layers, _ in chunks] == [[rank + 1], [rank + 3]]
        assert [norm is not None for _, norm in chunks] == [False, rank == 1]
    for got, want in zip(pipeline[1][name]["losses"], one[name]["losses"], strict=True):
        assert math.isclose(got, want, rel_tol=1e-5)
    assert pipeline[0][name]["losses"] == [None] * 3


def test_the_readmes_options_are_enough_and_the_guarded_spec_puts_the_guards_in_force(one):
    few = one["few"]
    assert "--no-gradient-accumulation-fusion" in few["silenced"] and few["before"] == []
    assert "gradient_accumulation_fusion" in few["refused"] and "guarded_block_spec" in few["refused"]
    assert len(few["after"]) == 5 and few["adam"] == f"{OURS}.optimizer"
    for got, want in zip(few["losses"], one["gqa"]["losses"], strict=True):
        assert math.isclose(got, want, rel_tol=1e-6)


def test_megatrons_builder_hands_on_the_one_error_with_all_problems(one):
    kind, text = one["refused"]
    assert kind == "ConfigError" and "glu_linear_offset" in text and "num_attention_heads, num_query_groups = (4, 3)" in text


def test_spec_of_a_given_pipeline_rank_and_chunk_holds_its_layers():
    rows = run_ranks("test_megatron_spec_argument:_every_stage", world=1, timeout=60)[0]
    # rank 0 holds layers 0, 1 and 4, 5; rank 1 layers 2, 3 and 6, 7
    assert rows == {"0 0": EXPERTS[0:2], "1 0": EXPERTS[2:4], "0 1": EXPERTS[4:6], "1 1": EXPERTS[6:8]}
