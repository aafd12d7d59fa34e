"""Every change that layerplan makes to Megatron-Core, as one table: what, where, why, for which version.

    with compat.apply(*compat.GUARDS):      # or: handle = compat.apply("mla-rope-key-gradient"); ...; handle.undo()
        train()

Nothing is patched by importing this module. A patch is counted: applied twice, it is there until both handles are
undone. File and line numbers are those of megatron-core 0.19.2, relative to `megatron/core/`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import inspect
import logging
import threading
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from ..engines.packages import install_command

VERIFIED = "0.19"
"""Release series of megatron-core that every row of the table was run with."""

_ABSENT = object()


class CompatError(RuntimeError):
    """A patch whose target is not in the installed Megatron-Core, or a name that is not in the table."""


class CompatWarning(UserWarning):
    """Megatron-Core is of a release that the patches in use were never run with."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Patch:
    """One row of the table.

    `make(target, original)` returns what takes the place of `original`; each target reads `module:attribute.path`.
    A row that is not a matter of attributes gives `run` instead: it makes the change and returns how to undo it.
    """

    name: str
    targets: tuple[str, ...]
    where: str
    why: str
    make: Callable[[str, Any], Any] | None = None
    run: Callable[[], Callable[[], None]] | None = None
    versions: str = VERIFIED


@dataclasses.dataclass
class _Live:
    count: int
    undo: list[Callable[[], None]]


class Applied:
    """Patches in force. `undo()` (or leaving the `with` block) takes them back; a second `undo()` does nothing."""

    def __init__(self, names: tuple[str, ...]):
        self.names = names
        self._open = True

    def undo(self) -> None:
        if self._open:
            self._open = False
            with _lock:
                for name in reversed(self.names):
                    _release(name)

    def __enter__(self) -> Applied:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


_lock = threading.RLock()
_live: dict[str, _Live] = {}


def megatron_version() -> str:
    """Version of the Megatron-Core that `import megatron.core` gives, a wheel's or a git checkout's."""
    try:
        return importlib.import_module("megatron.core.package_info").__version__
    except ImportError as error:
        raise CompatError(
            "megatron-core = not importable: layerplan's Megatron side needs it; "
            f"{install_command('megatron')}, or put a Megatron checkout on PYTHONPATH ({error})"
        ) from error


@functools.cache
def _warn_once(version: str, names: tuple[str, ...]) -> None:
    rows = "; ".join(f"{name} ({', '.join(PATCHES[name].targets) or PATCHES[name].where})" for name in names)
    warnings.warn(
        f"megatron-core {version}: layerplan's patches were run with {VERIFIED}.x only; unverified here: {rows}. "
        f"Install megatron-core {VERIFIED}.x, or run tests/multi/test_megatron_contract.py against {version} first",
        CompatWarning,
        stacklevel=4,
    )


def check_version(names: Iterable[str] = ()) -> str:
    """The installed version; a CompatWarning that names every row of `names` not run with it (all rows if empty)."""
    version = megatron_version()
    unverified = tuple(n for n in (tuple(names) or tuple(PATCHES)) if not version.startswith(PATCHES[n].versions + "."))
    if unverified:
        _warn_once(version, unverified)
    return version


def apply(*names: str) -> Applied:
    """Put the named patches in force, all or none.

    Raises CompatError for a name that is not in the table and for a target that the installed Megatron does not have.
    """
    unknown = [name for name in names if name not in PATCHES]
    if unknown:
        raise CompatError(f"patches = {unknown}: not in the table; known: {', '.join(PATCHES)}")
    names = tuple(dict.fromkeys(names))
    version = check_version(names) if names else ""
    done: list[str] = []
    with _lock:
        try:
            for name in names:
                _acquire(PATCHES[name], version)
                done.append(name)
        except BaseException:
            for name in reversed(done):
                _release(name)
            raise
    return Applied(names)


def active() -> tuple[str, ...]:
    """Names of the patches in force, in the order they were applied."""
    with _lock:
        return tuple(_live)


def _acquire(patch: Patch, version: str) -> None:
    if patch.name in _live:
        _live[patch.name].count += 1
        return
    undo: list[Callable[[], None]] = []
    try:
        if patch.run is not None:
            undo.append(patch.run())
        for target in patch.targets if patch.make is not None else ():
            undo.append(
                swap(target, functools.partial(patch.make, target), label=f"patch {patch.name}", version=version)
            )
    except BaseException:
        for step in reversed(undo):
            step()
        raise
    _live[patch.name] = _Live(1, undo)


def _release(name: str) -> None:
    live = _live[name]
    live.count -= 1
    if live.count == 0:
        del _live[name]
        for step in reversed(live.undo):
            step()


def swap(target: str, make: Callable[[Any], Any], *, label: str, version: str = "") -> Callable[[], None]:
    """Replace the attribute `module:path` by `make(original)`; returns the function that puts the original back."""
    module_name, _, path = target.partition(":")
    try:
        owner: Any = importlib.import_module(module_name)
        *parents, attribute = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        original = getattr(owner, attribute)
    except (ImportError, AttributeError) as error:
        raise CompatError(
            f"{label}: target {target} is not in the installed version {version}: {error}; it was last there in "
            f"megatron-core {VERIFIED}.x"
        ) from error
    # An attribute that was inherited, or lies in a class as a staticmethod, goes back as exactly what it was.
    own = inspect.getattr_static(owner, attribute) if attribute in vars(owner) else _ABSENT
    setattr(owner, attribute, make(original))

    def undo() -> None:
        if own is _ABSENT:
            delattr(owner, attribute)
        else:
            setattr(owner, attribute, own)

    return undo


# Guards: faults of Megatron-Core that touch layers built from layerplan's provider, on GPU and CPU alike.


def _checkpoint_fp8_flag(_target: str, original: Any) -> Any:
    @functools.wraps(original)
    def __init__(self: Any, fp8: Any = False) -> None:
        original(self, fp8)
        self.fp8 = bool(fp8)

    return __init__


def _mla_down_projection(_target: str, original: Any) -> Any:
    from megatron.core import tensor_parallel as tp

    @functools.wraps(original)
    def _qkv_down_projection(self: Any, hidden_states: Any) -> Any:
        """Same outputs, but kv_combined [s(/TP), b, kv_lora + rope] has a gradient that is whole on every TP rank."""
        import torch

        q_compressed, kv_combined = original(self, hidden_states)
        group = self.pg_collection.tp
        if group.size() == 1:
            return q_compressed, kv_combined
        widths = [self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim]
        sharded = kv_combined.size(-1) != sum(widths)
        if sharded:
            kv_combined = tp.gather_from_tensor_model_parallel_region(kv_combined, group=group)
        if self.config.sequence_parallel:
            # The caller gathers a sequence shard's rotary part, and the backward of that gather sums over TP.
            if sharded:
                kv_combined = tp.scatter_to_sequence_parallel_region(kv_combined, group=group)
            return q_compressed, kv_combined
        # The latent part is summed by the up projection's backward; the rotary part goes to the local heads as it is.
        latent, rotary = torch.split(kv_combined, widths, dim=-1)
        rotary = tp.copy_to_tensor_model_parallel_region(rotary, group=group)
        return q_compressed, torch.cat([latent, rotary], dim=-1)

    return _qkv_down_projection


def _mla_qk_norm_reduction(_target: str, original: Any) -> Any:
    @functools.wraps(original)
    def reduce_grads(model: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        if config.multi_latent_attention and config.qk_layernorm and not config.sequence_parallel:
            config = copy.copy(config)  # shallow, and only for this call: the sum is chosen by this flag and by name
            config.qk_layernorm = False
        return original(model, config, *args, **kwargs)

    return reduce_grads


def _without_grad(_target: str, original: Any) -> Any:
    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        with torch.no_grad():
            return original(self, *args, **kwargs)

    return wrapped


# CPU mode: what stands between unmodified Megatron-Core and a machine without a GPU.


def _cpu_set_rng(_target: str, _original: Any) -> Any:
    def _set_cuda_rng_state(new_state: Any, device: int = -1, graph_safe: bool = False) -> None:
        import torch

        torch.set_rng_state(new_state)

    return _set_cuda_rng_state


def _cpu_get_rng(_target: str, _original: Any) -> Any:
    def _get_cuda_rng_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> Any:
        import torch

        return torch.get_rng_state()

    return _get_cuda_rng_state


def _cpu_splits(_target: str, original: Any) -> Any:
    @functools.wraps(original)
    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        import torch

        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    return maybe_move_tensor_to_cpu


def _nothing(_target: str, _original: Any) -> None:
    return None


def _quiet_fork_warning() -> Callable[[], None]:
    logger = logging.getLogger("megatron.core.tensor_parallel.random")

    def keep(record: logging.LogRecord) -> bool:
        return "CPU RNG state changed" not in record.getMessage()

    logger.addFilter(keep)
    return lambda: logger.removeFilter(keep)


# Optimiser: the pieces are in optimizer.py, which the row reaches when it is applied.


def _from_optimizer(name: str) -> Callable[[str, Any], Any]:
    def make(_target: str, _original: Any) -> Any:
        return getattr(importlib.import_module("layerplan.integration.megatron.optimizer"), name)

    return make


def _value(value: Any) -> Callable[[str, Any], Any]:
    return lambda _target, _original: value


def _torch_sgd(_target: str, _original: Any) -> Any:
    import torch

    return torch.optim.SGD


class _TorchWeightGradient:
    """What Megatron calls of Apex's fused_weight_gradient_mlp_cuda: main_grad += grad_output^T input, in place."""

    @staticmethod
    def _accumulate(total_input: Any, grad_output: Any, main_grad: Any) -> None:
        import torch

        left, right = grad_output.reshape(-1, grad_output.shape[-1]).t(), total_input.reshape(-1, total_input.shape[-1])
        if main_grad.dtype == left.dtype:
            main_grad.addmm_(left, right)
        elif main_grad.is_cuda:  # cuBLAS adds the fp32 accumulator in its epilogue
            torch.ops.aten.addmm.dtype_out(main_grad, left, right, torch.float32, out=main_grad)
        else:
            main_grad.addmm_(left.float(), right.float())

    wgrad_gemm_accum_fp32 = wgrad_gemm_accum_fp16 = _accumulate


def _weight_gradient_accumulation() -> Callable[[], None]:
    module = importlib.import_module("megatron.core.tensor_parallel.layers")
    if module._grad_accum_fusion_available:  # Apex is there
        return lambda: None
    module._grad_accum_fusion_available, module.fused_weight_gradient_mlp_cuda = True, _TorchWeightGradient

    def undo() -> None:
        module._grad_accum_fusion_available = False
        del module.fused_weight_gradient_mlp_cuda

    return undo


_RANDOM = "megatron.core.tensor_parallel.random"
_OPT = "megatron.core.optimizer"

_ROWS = (
    Patch(
        name="checkpoint-fp8-flag",
        targets=(f"{_RANDOM}:CheckpointWithoutOutput.__init__",),
        where="tensor_parallel/random.py:740",
        why="`fp8 is not None` is True for the default False: recomputation then calls Transformer Engine without FP8",
        make=_checkpoint_fp8_flag,
    ),
    Patch(
        name="mla-rope-key-gradient",
        targets=("megatron.core.transformer.multi_latent_attention:MLASelfAttention._qkv_down_projection",),
        where="transformer/multi_latent_attention.py:731-754",
        why="with TP > 1 the gradient of the shared rotary key is a partial sum that no collective completes, unless "
        "the down projection's output is a sequence shard: TP replicas drift apart",
        make=_mla_down_projection,
    ),
    Patch(
        name="mla-qk-norm-gradient",
        targets=("megatron.core.distributed.finalize_model_grads:_allreduce_non_tensor_model_parallel_grads",),
        where="distributed/finalize_model_grads.py:453",
        why="gradients of parameters *named* q_layernorm are summed over TP; MLA's is whole on every rank without "
        "sequence parallel, so it came out TP times too large",
        make=_mla_qk_norm_reduction,
    ),
    Patch(
        name="distopt-load-leaf",
        targets=(
            "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._set_main_param_and_optimizer_states",
        ),
        where="optimizer/distrib_optimizer.py:1192, fp32 shards are views of leaf parameters (:467)",
        why="loading writes into a view of a leaf that requires grad, outside no_grad: RuntimeError",
        make=_without_grad,
    ),
    Patch(
        name="weight-gradient-accumulation",
        targets=(),
        where="tensor_parallel/layers.py:49, :680, :1070",
        why="gradient_accumulation_fusion is refused for the output layer without Apex's extension; torch can do it",
        run=_weight_gradient_accumulation,
    ),
    Patch(
        name="cpu-rng-set",
        targets=(f"{_RANDOM}:_set_cuda_rng_state",),
        where="tensor_parallel/random.py:135",
        why="reaches into torch's CUDA generators; in CPU mode the CPU generator plays their part",
        make=_cpu_set_rng,
    ),
    Patch(
        name="cpu-rng-get",
        targets=(f"{_RANDOM}:_get_cuda_rng_state",),
        where="tensor_parallel/random.py:104",
        why="as cpu-rng-set",
        make=_cpu_get_rng,
    ),
    Patch(
        name="cpu-rng-fork-warning",
        targets=(),
        where="tensor_parallel/random.py:332",
        why="the tracker warns at every fork that the CPU generator moved; in CPU mode that is its purpose",
        run=_quiet_fork_warning,
    ),
    Patch(
        name="cpu-dispatch-splits",
        targets=("megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu",),
        where="transformer/moe/moe_utils.py:1184",
        why="splits become numpy only if they were on a GPU; all_to_all_single would be given tensors",
        make=_cpu_splits,
    ),
    Patch(
        name="cpu-router-gemm",
        targets=("megatron.core.transformer.moe.moe_utils:te_general_gemm",),
        where="transformer/moe/moe_utils.py:1326",
        why="the router takes Transformer Engine's cuBLAS call wherever it can be imported; it needs a GPU",
        make=_nothing,
    ),
    Patch(
        name="optimizer-adam",
        targets=(f"{_OPT}:Adam", f"{_OPT}.distrib_optimizer:Adam"),
        where="optimizer/__init__.py:14-33, optimizer/distrib_optimizer.py:24-33",
        why="without TE and Apex torch's AdamW is used, whose step is a tensor per parameter: distributed checkpoints "
        "fail (KeyError 'step', distrib_optimizer.py:1223) or resume with one shared step",
        make=_from_optimizer("FusedAdam"),
    ),
    Patch(
        name="optimizer-sgd",
        targets=(f"{_OPT}:SGD",),
        where="optimizer/__init__.py:15-32",
        why="TE's and Apex's SGD need a GPU and their kernels; torch's is what Megatron falls back to",
        make=_torch_sgd,
    ),
    Patch(
        name="optimizer-not-torch",
        targets=(f"{_OPT}:USING_PYTORCH_OPTIMIZER", f"{_OPT}.distrib_optimizer:USING_TE_OPTIMIZER"),
        where="optimizer/__init__.py:556, optimizer/distrib_optimizer.py:851",
        why="adam_w_mode is passed only to an optimiser that is not torch's; none of TE's own code paths may be taken",
        make=_value(False),
    ),
    Patch(
        name="optimizer-step-in-group",
        targets=(f"{_OPT}.distrib_optimizer:HAVE_APEX_OR_TE", f"{_OPT}.distrib_optimizer:USING_APEX_OPTIMIZER"),
        where="optimizer/distrib_optimizer.py:837-880",
        why="tells the distributed optimiser that the step lies in the parameter group",
        make=_value(True),
    ),
    Patch(
        name="optimizer-apply",
        targets=(f"{_OPT}.clip_grads:multi_tensor_applier", f"{_OPT}.optimizer:multi_tensor_applier"),
        where="optimizer/clip_grads.py:12-44, optimizer/optimizer.py:18-37",
        why="the applier of TE or Apex checks for their kernels",
        make=_from_optimizer("multi_tensor_applier"),
    ),
    Patch(
        name="optimizer-l2norm",
        targets=(f"{_OPT}.clip_grads:l2_norm_impl",),
        where="optimizer/clip_grads.py:45, utils.py:1325",
        why="the fallback moves every tensor's norm to the host, one sync each",
        make=_from_optimizer("multi_tensor_l2norm"),
    ),
    Patch(
        name="optimizer-scale",
        targets=(f"{_OPT}.clip_grads:multi_tensor_scale_impl", f"{_OPT}.optimizer:multi_tensor_scale_impl"),
        where="optimizer/clip_grads.py:46, optimizer/optimizer.py:38, utils.py:1337",
        why="the fallback is two kernels and a temporary per tensor, and never reports a non-finite value",
        make=_from_optimizer("multi_tensor_scale"),
    ),
    Patch(
        name="optimizer-scale-tensor",
        targets=(f"{_OPT}.clip_grads:multi_tensor_scale_tensor_impl",),
        where="optimizer/clip_grads.py:47,134,184",
        why="with it the clip factor stays on the device: no host sync between backward and the step",
        make=_from_optimizer("multi_tensor_scale_tensor"),
    ),
)

PATCHES: dict[str, Patch] = {row.name: row for row in _ROWS}
"""The table, by name."""

GUARDS = (
    "checkpoint-fp8-flag", "mla-rope-key-gradient", "mla-qk-norm-gradient", "distopt-load-leaf",
    "weight-gradient-accumulation",
)  # fmt: skip
"""Faults of Megatron-Core that are worked round wherever layerplan's layers are used."""

CPU = tuple(name for name in PATCHES if name.startswith("cpu-"))
"""What CPU mode needs of Megatron-Core."""

OPTIMIZER = tuple(name for name in PATCHES if name.startswith("optimizer-"))
"""What stands in for the optimiser pieces of Transformer Engine and Apex."""
