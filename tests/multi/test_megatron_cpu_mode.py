"""Unmodified Megatron-Core, its local layers, on CPU and gloo inside cpu_mode; all of it in processes of its own."""

import contextlib

import pytest
from harness import run_ranks

VOCAB, SEQ, BATCH = 128, 16, 2
CASES = {
    "dense": {},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "dp2-distopt": {"distopt": True},
    "dp2-distopt-overlap-bf16": {"distopt": True, "overlap": True, "bf16": True},
}


class TinyRun:
    """A two-layer GPT of Megatron's own local layers, its DDP and optimiser, and the batch it learns by heart."""

    def __init__(
        self, *, tp=1, pp=1, distopt=False, overlap=False, bf16=False, dropout=0.0, spec=None, config_class=None, **more
    ):
        import torch
        from megatron.core import parallel_state as mpu
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
        from megatron.core.transformer.module import Float16Module
        from megatron.core.transformer.transformer_config import TransformerConfig

        mpu.destroy_model_parallel()
        mpu.initialize_model_parallel(tp, pp)
        model_parallel_cuda_manual_seed(123, force_reset_rng=True)
        dtype = torch.bfloat16 if bf16 else torch.float32
        self.overlap, self.distopt = overlap, distopt
        fields = {
            "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64,
            "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "pipeline_dtype": dtype,
            "params_dtype": dtype, "bf16": bf16, "normalization": "RMSNorm", "add_bias_linear": False,
            "gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "hidden_dropout": dropout,
            "attention_dropout": dropout, "transformer_impl": "local",
        }  # fmt: skip
        self.config = (config_class or TransformerConfig)(**fields | more)
        if spec is None:
            spec = get_gpt_decoder_block_spec(self.config, use_transformer_engine=False, normalization="RMSNorm")
        else:
            spec = spec(self.config)
        rope = "none" if config_class else "rope"
        self.gpt = GPTModel(
            self.config, spec, VOCAB, SEQ, pre_process=mpu.is_pipeline_first_stage(),
            post_process=mpu.is_pipeline_last_stage(), position_embedding_type=rope,
            share_embeddings_and_output_weights=False,
        )  # fmt: skip
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=distopt,
            overlap_grad_reduce=overlap,
            overlap_param_gather=overlap,
            grad_reduce_in_fp32=True,
        )
        self.model = DistributedDataParallel(
            self.config, ddp, Float16Module(self.config, self.gpt) if bf16 else self.gpt
        )
        self.model.broadcast_params()
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam", lr=1e-2, weight_decay=0.01, clip_grad=1.0, bf16=bf16, params_dtype=dtype,
                use_distributed_optimizer=distopt, overlap_param_gather=overlap,
            ),
            [self.model],
        )  # fmt: skip
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss
        if overlap:
            self.config.no_sync_func = self.model.no_sync
        generator = torch.Generator().manual_seed(7)
        data = torch.randint(0, VOCAB, (mpu.get_data_parallel_world_size() * BATCH, SEQ + 1), generator=generator)
        first = mpu.get_data_parallel_rank() * BATCH
        data = data[first : first + BATCH]
        self.tokens, self.labels = data[:, :-1].contiguous(), data[:, 1:].contiguous()
        self.positions = torch.arange(SEQ)[None].expand(BATCH, -1)
        self.mask = torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool).triu(1)

    def backward(self):
        """Forward and backward of two micro-batches; the mean loss, or None on a stage that has none."""
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        def loss(output):
            mean = output.float().mean()
            return mean, {"loss": mean.detach().clone()}

        def forward(_, model):
            return model(self.tokens, self.positions, self.mask, labels=self.labels), loss

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward, data_iterator=iter(()), model=[self.model], num_microbatches=2, seq_length=SEQ,
            micro_batch_size=BATCH, decoder_seq_length=SEQ, forward_only=False,
        )  # fmt: skip
        return sum(entry["loss"].item() for entry in losses) / len(losses) if losses else None

    def step(self):
        loss = self.backward()
        done, norm, _ = self.optimizer.step()
        assert done
        return loss, float(norm)

    def steps(self, count):
        return [self.step() for _ in range(count)]


@contextlib.contextmanager
def megatron_on_cpu():
    """The process group and CPU mode, for the body of a rank's function."""
    import torch

    from layerplan.integration.megatron.cpu_mode import cpu_mode

    with cpu_mode():
        torch.distributed.init_process_group("gloo")
        yield
        torch.distributed.barrier()


def _train(names, steps):
    with megatron_on_cpu():
        return {name: TinyRun(**CASES[name]).steps(steps) for name in names}


def _mode_rules():
    """What the mode refuses, and that nothing of it is left afterwards."""
    import torch
    from megatron.core.tensor_parallel import random as megatron_random

    from layerplan.integration.megatron import compat, cpu_mode

    def snapshot():
        spaces = (
            torch.cuda,
            torch.cuda.random,
            torch.cuda.nvtx,
            megatron_random,
            megatron_random.CheckpointWithoutOutput,
        )
        return [dict(vars(space)) for space in spaces]

    def same(left, right):
        return all(a.keys() == b.keys() and all(a[k] is b[k] for k in a) for a, b in zip(left, right, strict=True))

    def message(action):
        try:
            action()
        except cpu_mode.CpuModeError as error:
            return str(error)
        return "no error"

    seen, before, mode = {}, snapshot(), cpu_mode.cpu_mode()
    seen["exit_before_enter"] = message(mode.exit)
    with mode:
        seen["changed_inside"] = not same(before, snapshot())
        seen["inside"] = cpu_mode.is_active()
        seen["nested"] = message(cpu_mode.cpu_mode().enter)
        seen["init"] = message(torch.cuda._lazy_init)
        seen["devices"] = [
            str(torch.zeros(1, device=device).device) for device in ("cuda", "cuda:1", 0, torch.device("cuda", 0))
        ] + [str(torch.zeros(1).cuda().device), str(torch.zeros(1).to("cuda", torch.bfloat16).device)]
        leaf = torch.ones(1, requires_grad=True)
        leaf.register_hook(lambda _: seen["devices"].append(str(torch.zeros(1, device="cuda").device)))
        (2 * leaf).backward()
        torch.autograd.grad(2 * leaf, leaf)
        torch.cuda.manual_seed(5)
        drawn = torch.rand(1).item()
        torch.manual_seed(5)
        seen["seed"] = drawn == torch.rand(1).item()
    seen["restored"], seen["active_after"] = same(before, snapshot()), [cpu_mode.is_active(), *compat.active()]
    seen["exit_twice"] = message(mode.exit)
    try:
        with cpu_mode.cpu_mode():
            raise KeyError("body")
    except KeyError:
        seen["restored_after_error"] = same(before, snapshot())
    torch.cuda.is_initialized = lambda: True
    seen["initialized"] = message(cpu_mode.cpu_mode().enter)
    del torch.cuda.is_initialized
    return seen


@pytest.fixture(scope="module")
def two_ranks():
    return run_ranks(
        "test_megatron_cpu_mode:_train", world=2, timeout=150, names=[n for n in CASES if n != "dense"], steps=4
    )


@pytest.fixture(scope="module")
def one_rank():
    return run_ranks("test_megatron_cpu_mode:_train", world=1, timeout=100, names=["dense"], steps=4)[0]


@pytest.fixture(scope="module")
def rules():
    return run_ranks("test_megatron_cpu_mode:_mode_rules", world=1, timeout=90)[0]


def _losses(run):
    return [loss for loss, _ in run]


def test_local_spec_trains_on_one_rank(one_rank):
    losses = _losses(one_rank["dense"])
    assert losses[-1] < losses[0] - 0.5, losses


@pytest.mark.parametrize("name", [n for n in CASES if n != "dense"])
def test_local_spec_trains_on_two_ranks(two_ranks, name):
    losses = [loss for loss in _losses(two_ranks[1][name]) if loss is not None]
    assert len(losses) == 4 and losses[-1] < losses[0] - 0.5, losses


@pytest.mark.parametrize("name", [n for n in CASES if n != "dense"])
def test_gradient_norm_is_the_same_on_both_ranks(two_ranks, name):
    assert [norm for _, norm in two_ranks[0][name]] == [norm for _, norm in two_ranks[1][name]]


def test_cpu_mode_takes_back_every_change(rules):
    assert rules["changed_inside"] and rules["inside"]
    assert rules["restored"] and rules["restored_after_error"] and rules["active_after"] == [False]


def test_cpu_mode_is_refused_when_nested_and_when_left_out_of_order(rules):
    assert "on already" in rules["nested"]
    assert "not the one in force" in rules["exit_before_enter"] and "not the one in force" in rules["exit_twice"]


def test_cpu_mode_is_refused_once_cuda_is_initialised(rules):
    assert "CUDA = initialised" in rules["initialized"]


def test_cpu_mode_turns_every_way_to_name_the_gpu_into_the_cpu(rules):
    assert rules["devices"] == ["cpu"] * 8, "the last two are named during a backward"


def test_cuda_initialisation_inside_cpu_mode_is_an_error(rules):
    assert "CUDA was about to be initialised" in rules["init"]


def test_seeding_the_gpu_seeds_the_generator_that_plays_its_part(rules):
    assert rules["seed"]
