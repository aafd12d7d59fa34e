"""What Megatron-Core takes from Transformer Engine or Apex for its optimiser, on torch's own fused kernels.

Adam with its step in the parameter group (Megatron's distributed checkpoints rely on that), the multi-tensor norm and
scale, and the report of non-finite values. Works on CUDA and on a CPU; `install_optimizer()` puts it to use.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch

from layerplan.integration.megatron import compat

logger = logging.getLogger(__name__)

_FUSED_DEVICES = ("cuda", "cpu")
_CHUNK = 2048 * 32  # unused by torch's kernels; the operators keep amp_C's signature, which starts with it


class FusedAdam(torch.optim.Optimizer):
    """Adam and AdamW in one kernel per dtype and device, with the interface of Transformer Engine's and Apex's
    FusedAdam.

    State per parameter: `exp_avg` and `exp_avg_sq`, of the parameter's shape, dtype and device. `step` (int) is in
    the parameter group, so that it is saved with the group and is the same for every shard. A parameter without a
    gradient is left as it is; a gradient of another floating dtype is cast to the parameter's.

    Raises ValueError for a hyperparameter out of range and for what these kernels do not do (`capturable`, `amsgrad`,
    `master_weights`, `use_decoupled_grad`), TypeError for an option that is unknown: all problems at once.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        capturable: bool = False,
        master_weights: bool = False,
        use_decoupled_grad: bool = False,
        **unknown: Any,
    ):
        problems = []
        if not lr >= 0:
            problems.append(f"lr = {lr}: must be at least 0")
        if not eps >= 0:
            problems.append(f"eps = {eps}: must be at least 0")
        if not weight_decay >= 0:
            problems.append(f"weight_decay = {weight_decay}: must be at least 0")
        problems += [f"betas[{i}] = {b}: must be in [0, 1)" for i, b in enumerate(betas) if not 0 <= b < 1]
        if capturable:
            problems.append("capturable = True: the step is counted on the host; set optimizer_cuda_graph to False")
        if amsgrad:
            problems.append("amsgrad = True: not offered; set it to False")
        if master_weights or use_decoupled_grad:
            problems.append(
                "master_weights, use_decoupled_grad: Megatron keeps the fp32 weights here; set "
                "use_precision_aware_optimizer to False"
            )
        if problems:
            raise ValueError("FusedAdam: " + "; ".join(problems))
        if unknown:
            raise TypeError(f"FusedAdam: {', '.join(sorted(unknown))}: no such option of this optimiser; remove it")
        self.adam_w_mode = bool(adam_w_mode)
        defaults = {
            "lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "bias_correction":
            bias_correction
        }  # fmt: skip
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, grad_scaler: Any = None) -> Any:
        """One update of every parameter that has a gradient. Returns the closure's loss, or None."""
        if grad_scaler is not None:
            raise ValueError("grad_scaler: gradients are unscaled before the step; call step() without one")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for tensors in self._batches(group):
                self._update(group, *tensors)
        return loss

    def _batches(self, group: dict[str, Any]) -> Iterable[tuple[list[torch.Tensor], ...]]:
        """(params, grads, exp_avgs, exp_avg_sqs), one tuple per device and dtype: a fused kernel takes one of each."""
        batches: dict[Any, tuple[list[torch.Tensor], ...]] = defaultdict(lambda: ([], [], [], []))
        for param in group["params"]:
            grad = param.grad
            if grad is None:
                continue
            if grad.is_sparse:
                raise ValueError(f"gradient of a parameter of shape {tuple(param.shape)}: is sparse; must be dense")
            state = self.state[param]
            if "exp_avg" not in state:
                state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            if param.numel() == 0:
                continue
            row = (param, grad.to(param.dtype), state["exp_avg"], state["exp_avg_sq"])
            for tensors, tensor in zip(batches[param.device, param.dtype], row, strict=True):
                tensors.append(tensor)
        return batches.values()

    def _update(self, group: dict[str, Any], params: Any, grads: Any, averages: Any, squares: Any) -> None:
        beta1, beta2 = group["betas"]
        step, device = group["step"], params[0].device
        if device.type in _FUSED_DEVICES and group["bias_correction"]:
            kernel = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
            count = torch.full((), float(step), dtype=torch.float32, device=device)  # read only: one serves all
            kernel(
                params, grads, averages, squares, [], [count] * len(params),
                lr=float(group["lr"]), beta1=beta1, beta2=beta2, weight_decay=float(group["weight_decay"]),
                eps=group["eps"], amsgrad=False, maximize=False, grad_scale=None, found_inf=None,
            )  # fmt: skip
            return
        self._update_foreach(group, params, grads, averages, squares)

    def _update_foreach(self, group: dict[str, Any], params: Any, grads: Any, averages: Any, squares: Any) -> None:
        """The same in multi-tensor operations: without bias correction, and for devices without fused kernels."""
        (beta1, beta2), lr, decay = group["betas"], float(group["lr"]), float(group["weight_decay"])
        steps = group["step"] if group["bias_correction"] else None
        correction1 = 1.0 if steps is None else 1.0 - beta1**steps
        correction2 = 1.0 if steps is None else 1.0 - beta2**steps
        if decay and self.adam_w_mode:
            torch._foreach_mul_(params, 1.0 - lr * decay)
        elif decay:
            grads = torch._foreach_add(grads, params, alpha=decay)
        torch._foreach_lerp_(averages, grads, 1.0 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1.0 - beta2)
        denominator = torch._foreach_sqrt(squares)
        torch._foreach_div_(denominator, correction2**0.5)
        torch._foreach_add_(denominator, group["eps"])
        torch._foreach_addcdiv_(params, averages, denominator, -lr / correction1)


def multi_tensor_applier(op: Callable[..., Any], noop_flag: Any, tensor_lists: list[Any], *args: Any) -> Any:
    """`op(chunk_size, noop_flag, tensor_lists, *args)`, as amp_C's applier calls its operators."""
    return op(_CHUNK, noop_flag, tensor_lists, *args)


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Any, tensor_lists: list[list[torch.Tensor]], per_tensor: bool = False, *_: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """L2 norm over all tensors of the first list, accumulated in fp32, without a host sync.

    Returns (norm [1] fp32, norms per tensor [n] fp32 or None). A non-finite element makes the norm non-finite.
    """
    tensors = tensor_lists[0]
    if not tensors:
        empty = torch.zeros(1, dtype=torch.float32, device=_device_of(noop_flag))
        return empty, (empty[:0] if per_tensor else None)
    norms = torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32))
    return torch.linalg.vector_norm(norms).reshape(1), (norms if per_tensor else None)


@torch.no_grad()
def multi_tensor_scale(
    chunk_size: int, noop_flag: Any, tensor_lists: list[list[torch.Tensor]], scale: float | torch.Tensor
) -> None:
    """`target[i] = source[i] * scale` for `tensor_lists = [source, target]`, which may be the same tensors.

    `noop_flag` (int or float [1], or None) becomes 1 if a source holds inf or NaN, and is otherwise left alone.
    The product is formed in the source's dtype.
    """
    source, target = tensor_lists
    if not source:
        return
    device = source[0].device
    if all(s.dtype == t.dtype for s, t in zip(source, target, strict=True)):
        work = target
        if any(s.data_ptr() != t.data_ptr() for s, t in zip(source, target, strict=True)):
            torch._foreach_copy_(target, source)
    else:
        work = [s.clone() for s in source]
    if torch.is_tensor(scale):
        factor = scale.detach().to(device=device, dtype=torch.float32).reshape(1)
    else:
        factor = torch.full((1,), float(scale), dtype=torch.float32, device=device)
    found = torch.zeros(1, dtype=torch.float32, device=device)
    torch._amp_foreach_non_finite_check_and_unscale_(work, found, factor)
    if work is not target:
        torch._foreach_copy_(target, work)
    if noop_flag is not None:
        torch.maximum(noop_flag, found.to(noop_flag.dtype), out=noop_flag)


def multi_tensor_scale_tensor(
    chunk_size: int, noop_flag: Any, tensor_lists: list[list[torch.Tensor]], scale: torch.Tensor
) -> None:
    """As multi_tensor_scale, with a factor ([1], any floating dtype) that stays on the device."""
    multi_tensor_scale(chunk_size, noop_flag, tensor_lists, scale)


def _device_of(flag: Any) -> torch.device:
    return flag.device if torch.is_tensor(flag) else torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Installed:
    """Outcome of install_optimizer: whether anything was changed, and why or why not. `undo()` takes it back."""

    installed: bool
    reason: str
    handle: compat.Applied

    def undo(self) -> None:
        self.handle.undo()


def install_optimizer(*, force: bool = False) -> Installed:
    """Make Megatron-Core use this file's optimiser pieces where neither Transformer Engine nor Apex is installed.

    Where one of them is, nothing is changed and the reason is logged, unless `force` is given (CPU mode does: theirs
    need a GPU). Optimisers that exist already are not touched. Raises CompatError if the installed Megatron-Core has
    not the attributes that are replaced.
    """
    import megatron.core.optimizer as host

    if not force and host.Adam is not FusedAdam and not host.USING_PYTORCH_OPTIMIZER:
        owner = host.Adam.__module__.partition(".")[0]
        reason = f"Megatron-Core takes its optimiser from {owner}; left as it is (force=True replaces it)"
        logger.info(reason)
        return Installed(False, reason, compat.apply())
    handle = compat.apply(*compat.OPTIMIZER)
    reason = "forced" if force else "neither Transformer Engine nor Apex is installed"
    logger.info("Megatron-Core takes Adam, multi-tensor norm and scale from layerplan: %s", reason)
    return Installed(True, reason, handle)
