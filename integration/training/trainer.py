"""The training loop: one process by itself or many under torchrun, from a recipe to its last step.

A step is: micro-batches through Megatron's schedule, a check that the loss is finite on every rank, the optimiser, metrics, then what the
step's number or a signal asks for. A resumed run equals an uninterrupted one: parameters and moments, generator states, the data's
order and the learning rate are all restored from, or functions of, the step.
"""

from __future__ import annotations

import dataclasses
import json
import math
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

from ...recipes import Problem, Recipe, RecipeError
from ...recipes.config import folder_problems
from ...recipes.size import flops_per_token, parameter_count
from ..planner.agreement import shown
from .agreement import compare_ranks, run_digest
from .build import Built, Ranks, build, ranks_of, refuse_together
from .checkpoint import (
    COMPLETE,
    TRAINER,
    Checkpointer,
    CheckpointError,
    find,
    load_rng,
    load_sharded,
    load_trainer_state,
    raise_together,
    steps_in,
)
from .data import Batch, Samples
from .indexed import check_data, tokenizer_path
from .metrics import Metrics, MetricsError, Progress, peak_flops, peak_memory
from .plans import PLAN, RunPlans

TOKENIZER = "tokenizer.json"
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class NotFiniteError(RuntimeError):
    """The loss or the gradient norm is NaN or infinite; names step and ranks. Nothing of that step was saved."""


@dataclasses.dataclass(slots=True)
class Outcome:
    """How a run ended: the last step done, and whether a signal ended it."""

    step: int
    interrupted: bool


class Trainer:
    """One run of a recipe on this rank. Use inside ``ranks_of(recipe)``; ``train`` does it all."""

    def __init__(self, recipe: Recipe, ranks: Ranks, *, say: Callable[[str], None] | None = None):
        self.recipe, self.ranks = recipe, ranks
        self._say = say or (lambda text: print(text, file=sys.stderr, flush=True))
        self._shared = compare_ranks(recipe, ranks)
        problems, tokenizer = check_data(recipe)
        refuse_together(problems + folder_problems(recipe), ranks)
        self._tokenizer = tokenizer_path(recipe.data.prefix).read_text(encoding="utf-8")
        self.plans = RunPlans(recipe, ranks, self.say)
        self.built: Built = build(recipe, self.plans.pins, self.plans.records)
        self.samples = Samples(recipe, tokenizer, ranks)
        self.step = 0
        self._resumed = ""  # what to say of a resume once the first step has been planned
        self._signal: int | None = None
        self._batches: Any = None
        self._router_losses = router_losses(recipe)
        self.router_losses: dict[str, float] = {}  # of the last step, by name
        self.checkpoints: Checkpointer | None = None
        if recipe.checkpoint.dir is not None:
            c = recipe.checkpoint
            self.checkpoints = Checkpointer(Path(c.dir), ranks.control, keep=c.keep, background=c.background, say=self.say)

    def say(self, text: str) -> None:
        """Once per run, from rank 0."""
        if self.ranks.rank == 0:
            self._say(text)

    # -- one step ---------------------------------------------------------------------------------------------------

    def loss_of(self, output: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Sum of the token losses of a micro-batch and the number of tokens it is over, on the last pipeline stage.

        ``output``: [micro_batch, seq] losses. The third value is for the log: Megatron divides the first in place.
        """
        mask = batch["loss_mask"].reshape(-1)
        total = (output.float().reshape(-1) * mask).sum()
        count = mask.sum().to(torch.int)
        return total, count, {"sums": torch.stack([total.detach().double(), count.double()])}

    def _forward(self, batches: Any, model: Any) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
        batch = next(batches) if batches is not None else dict.fromkeys(("tokens", "position_ids", "labels"))
        output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        return output, lambda out: self.loss_of(out, batch)

    def run_step(self) -> tuple[float | None, float]:
        """One optimiser step. Returns the mean loss per token over all ranks (None except on the last stage) and the
        gradient norm. Raises NotFiniteError before the parameters are touched if a loss is not finite."""
        built, recipe = self.built, self.recipe
        if self._batches is None:
            self._batches = self.samples.micro_batches(self.step * recipe.train.global_batch, recipe, self.ranks)
        built.model.zero_grad_buffer()
        built.optimizer.zero_grad()
        reports = get_forward_backward_func()(
            forward_step_func=self._forward, data_iterator=self._batches, model=[built.model], num_microbatches=get_num_microbatches(),
            seq_length=recipe.model.seq_length, micro_batch_size=recipe.train.micro_batch, forward_only=False,
        )  # fmt: skip
        sums = torch.stack([r["sums"] for r in reports]).sum(0) if self.ranks.last_stage else None
        self._stop_unless_finite(sums, f"loss is not finite at step {self.step + 1}", "before parameters are touched")
        loss = _mean_loss(sums)
        self._collect_router_losses()
        _, norm, _ = built.optimizer.step()
        norm = float(norm) if norm is not None else 0.0
        self.step += 1
        if not math.isfinite(norm):
            names = self._bad_gradients()
            where = f", first in {names[0]} on {self.ranks.coordinates()}" if names else f" ({self.ranks.coordinates()})"
            raise NotFiniteError(f"gradient norm = {norm} at step {self.step}{where}: the run stops, nothing of this step is saved; "
                                 "lower optimizer.lr, or look at the data of this step")  # fmt: skip
        built.scheduler.step(increment=recipe.train.global_batch)
        return loss, norm

    def _collect_router_losses(self) -> None:
        """What the routers' losses were in this step: the mean over layers of experts, micro-batches and ranks, before their coefficients."""
        if not self._router_losses:
            return
        config, means = self.built.config, {}
        get_moe_metrics_tracker().report(
            1 / get_num_microbatches(), self.step + 1, force_initialize=True, track_names=list(self._router_losses), num_layers=config.num_layers,
            moe_layer_freq=config.moe_layer_freq, total_loss_dict=means,
        )  # fmt: skip
        self.router_losses = {name: float(value) for name, value in means.items()}

    def evaluate(self) -> float | None:
        """Mean loss per token on the first train.eval_batches global batches of the validation split (None except on the
        last stage).

        Without dropout and gradients. Parameters, gradients, generators and the training data's order stay as they are.
        Raises NotFiniteError.
        """
        built, recipe, sums = self.built, self.recipe, torch.zeros(2, dtype=torch.float64, device=self.ranks.device)
        overlap = recipe.parallel.overlap_param_gather
        if overlap:  # parameters of the next forward are still on their way
            built.model.disable_forward_pre_hook(param_sync=True)
        generators = rng_state()
        built.model.eval()
        try:
            batches = self.samples.validation_micro_batches(recipe, self.ranks)
            for _ in range(recipe.train.eval_batches):
                with torch.no_grad():
                    reports = get_forward_backward_func()(
                        forward_step_func=self._forward, data_iterator=batches, model=[built.model],
                        num_microbatches=get_num_microbatches(), seq_length=recipe.model.seq_length,
                        micro_batch_size=recipe.train.micro_batch, forward_only=True,
                    )  # fmt: skip
                for report in reports:
                    sums += report["sums"]
        finally:
            built.model.train()
            set_rng_state(generators)
            if overlap:
                built.model.enable_forward_pre_hook()
        sums = sums if self.ranks.last_stage else None
        what = f"validation loss is not finite after step {self.step}"
        self._stop_unless_finite(sums, what, "and nothing of this step is saved")
        return _mean_loss(sums)

    def _evaluates(self) -> bool:
        t = self.recipe.train
        return t.eval_every_steps > 0 and (self.step % t.eval_every_steps == 0 or self.step == t.steps)

    def _stop_unless_finite(self, sums: torch.Tensor | None, what: str, when: str) -> None:
        bad = torch.zeros(self.ranks.world, dtype=torch.int32)
        value = float("nan")
        if sums is not None:
            value = float(sums[0])
            bad[self.ranks.rank] = int(not math.isfinite(value))
        dist.all_reduce(bad, group=self.ranks.control)
        if bad.any():
            guilty = ", ".join(str(r) for r in bad.nonzero().flatten().tolist())
            own = f" (here {value})" if bad[self.ranks.rank] else ""
            raise NotFiniteError(f"{what} on rank {guilty}{own}: the run stops {when}; the last checkpoint is the state to "
                                 "look at, with a lower optimizer.lr or other data")  # fmt: skip

    def _bad_gradients(self) -> list[str]:
        return [n for n, p in self.built.gpt.named_parameters()
                if getattr(p, "main_grad", None) is not None and not torch.isfinite(p.main_grad).all()]  # fmt: skip

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def _sharded(self, *, loading: bool) -> dict[str, Any]:
        metadata = {"distrib_optim_sharding_type": "fully_reshardable",
                    "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}  # fmt: skip
        model = self.built.gpt.sharded_state_dict(metadata=metadata)
        optimizer = self.built.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
        return {"model": model, "optimizer": optimizer}

    def _layout(self) -> dict[str, int]:
        p = self.recipe.parallel
        experts = {} if self.recipe.model.num_experts is None else {"expert": p.expert, "expert_tensor": p.expert_shards}
        return {"tensor": p.tensor, "pipeline": p.pipeline, "data": self.ranks.data_size} | experts

    def save(self) -> None:
        """Save this step; in the background if the recipe says so. Before the first step there is nothing to save: no moments
        exist, and the parameters follow from the recipe."""
        if self.checkpoints is None or self.step == 0 or self.checkpoints.newest == self.step:
            return
        overlap = self.recipe.parallel.overlap_param_gather
        if overlap:  # parameters of the next forward are still on their way: stale ones would be saved
            self.built.model.disable_forward_pre_hook(param_sync=True)
        trainer = {"step": self.step, "layout": self._layout(), "recipe": self.recipe.to_dict(), "torch": torch.__version__,
                   "parameters": parameter_count(self.recipe), "device": self.ranks.device.type}  # fmt: skip
        texts = {TRAINER: json.dumps(trainer, indent=1) + "\n",
                 PLAN: json.dumps(self.plans.planned(self.built.gpt).to_json(), indent=1) + "\n",
                 TOKENIZER: self._tokenizer}  # fmt: skip
        self.checkpoints.save(self.step, self._sharded(loading=False), texts, rng_state())
        if overlap:
            self.built.model.enable_forward_pre_hook()

    def resume(self) -> bool:
        """Load the newest whole checkpoint, if the recipe wants it and there is one. Returns whether it did. Raises RecipeError for
        one of another model, CheckpointError on all ranks for one that cannot be read."""
        c = self.recipe.checkpoint
        if self.checkpoints is None:
            return False
        if c.resume == "none":
            whole = [str(p) for _, p in steps_in(Path(c.dir)) if (p / COMPLETE).exists()]
            if whole:
                raise RecipeError([Problem("checkpoint.resume", "none", f"checkpoint.dir holds checkpoints already ({whole[0]}): a later resume "
                                           "would mix two runs", "choose an empty checkpoint.dir, or move them away")])  # fmt: skip
            return False
        folder = find(Path(c.dir), self.ranks.control, self.say)
        if folder is None:
            return False
        state = problem = None
        try:
            state = load_trainer_state(folder)
        except CheckpointError as error:
            problem = str(error)
        raise_together(problem, self.ranks.control)
        self._compare(state, folder)
        overlap = self.recipe.parallel.overlap_param_gather
        if overlap:
            self.built.model.disable_forward_pre_hook(param_sync=False)
        try:
            loaded = load_sharded(folder, self._sharded(loading=True))
        except CheckpointError as error:
            problem = str(error)
        raise_together(problem, self.ranks.control)
        self.built.gpt.load_state_dict(loaded["model"])
        self.built.optimizer.load_state_dict(loaded["optimizer"])
        if overlap:
            self.built.model.enable_forward_pre_hook()
        self.step = int(state["step"])
        # the rate is a function of the recipe and the step, not of what another recipe was at
        self.built.scheduler.num_steps = 0
        self.built.scheduler.step(increment=self.step * self.recipe.train.global_batch)
        problem = None
        try:
            self._restore_rng(folder, state)
        except CheckpointError as error:
            problem = str(error)
        raise_together(problem, self.ranks.control)
        self._batches = None
        self.plans.resume(folder, self.built.gpt)
        self.checkpoints.last_saved = self.step
        self._resumed = f"resumed at step {self.step} from {folder}"
        return True

    def _say_resumed(self) -> None:
        if self._resumed:
            self.say(self._resumed)
        self._resumed = ""

    def _compare(self, state: dict[str, Any], folder: Path) -> None:
        then, now = state["recipe"], self.recipe.to_dict()
        defaults = {f.name: f.default for f in dataclasses.fields(self.recipe.model)}  # of fields that an older layerplan did not have
        before = {k: then["model"].get(k, defaults[k]) for k in now["model"]}
        problems = [Problem(f"model.{k}", v, f"{folder} was trained with {before[k]!r}", "use the same model, or another checkpoint.dir")
                    for k, v in now["model"].items() if k not in ("hidden_dropout", "attention_dropout") and before[k] != v]  # fmt: skip
        if then["train"]["global_batch"] != now["train"]["global_batch"]:
            problems.append(Problem("train.global_batch", now["train"]["global_batch"],
                                    f"{folder} was trained with {then['train']['global_batch']}: steps would count other samples",
                                    "use the same, or another checkpoint.dir"))  # fmt: skip
        problems += self._compare_experts(state, folder)
        if problems:
            raise RecipeError(problems)
        silent = ("checkpoint", "logging", "name", "model")
        for section in (s for s in now if s not in silent):
            for key, value in now[section].items():
                before = then.get(section, {}).get(key)
                if before != value:
                    self.say(f"differs from the checkpoint: {section}.{key} = {value!r}, was {before!r}")

    def _compare_experts(self, state: dict[str, Any], folder: Path) -> list[Problem]:
        """Megatron keeps the moments of experts that have groups of their own in an optimiser of their own."""
        if self.recipe.model.num_experts is None:
            return []
        now, then = self._layout(), state["layout"]
        apart = {name: of.get("expert", 1) > 1 or of.get("expert_tensor", of["tensor"]) != of["tensor"] for name, of in (("now", now), ("then", then))}
        if apart["now"] == apart["then"]:
            return []
        rule = (f"{folder} is of parallel.expert = {then.get('expert', 1)} and parallel.expert_tensor = {then.get('expert_tensor', then['tensor'])}: Megatron's "
                "optimiser holds the moments of experts apart in one of both layouts")  # fmt: skip
        remedy = "resume with parallel.expert=1 and the same tensor parallelism" if apart["now"] else "resume with experts shared by ranks, as before"
        return [Problem("parallel.expert", now["expert"], rule, remedy)]

    def _restore_rng(self, folder: Path, state: dict[str, Any]) -> None:
        saved = load_rng(folder, self.ranks.rank) if state["layout"] == self._layout() else None
        if saved is None or state["device"] != self.ranks.device.type:
            self.say(f"random generators start anew: the checkpoint is of layout {state['layout']} on {state['device']}, "
                     f"this run of {self._layout()} on {self.ranks.device.type}")  # fmt: skip
            seed = self.recipe.train.seed + self.step  # not the masks of the first steps again
            torch.manual_seed(seed)
            model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
            return
        try:
            set_rng_state(saved)
        except (RuntimeError, TypeError) as error:
            raise CheckpointError(f"{folder}: the generator states of rank {self.ranks.rank} do not fit here ({error})") from None

    # -- the run ----------------------------------------------------------------------------------------------------

    def _on_signal(self, number: int, _frame: Any) -> None:
        if number == signal.SIGINT and self._signal is not None:
            raise KeyboardInterrupt  # asked twice: do not wait for the step and the save
        self._signal = number

    def _interrupted(self, recorder: Recorder) -> bool:
        """Whether any rank was told to stop, or cannot write its metrics: a signal need not reach them all, nor in the same step."""
        flag = torch.tensor([int(self._signal is not None or recorder.problem is not None)])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.ranks.control)
        return bool(flag.item())

    def train(self) -> Outcome:
        """Resume if there is something to resume, then train to train.steps or until SIGTERM or SIGINT, saving as asked.

        Raises NotFiniteError, CheckpointError, MetricsError (what has been trained is saved before it) and PlanError.
        """
        previous = {s: signal.signal(s, self._on_signal) for s in _SIGNALS} if _in_main_thread() else {}
        try:
            self.resume()
            return self._loop()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _loop(self) -> Outcome:
        recipe, every = self.recipe, self.recipe.checkpoint.every_steps
        steps, interrupted = recipe.train.steps, False
        first, evaluated = self.step + 1, False  # when plans are made
        digest = run_digest(self._shared, self.plans.pins, self.plans.records)
        if self.ranks.world > 1:
            self.say(f"recipe, data and planning: digest {shown(digest)}, the same on {self.ranks.world} ranks")
        recorder = Recorder(recipe, self.ranks, self.step, digest)
        self.built.model.train()
        try:
            while self.step < steps:
                if self._interrupted(recorder):
                    interrupted = True
                    break
                started, rate = time.perf_counter(), self._rate()
                loss, norm = self.run_step()
                self._say_resumed()
                seconds = time.perf_counter() - started
                validation = self.evaluate() if self._evaluates() else None
                recorder.step(self.step, loss, norm, rate, seconds, validation, self.router_losses)
                if self.step == first or (self._evaluates() and not evaluated):
                    self.plans.say_differences(self.built.gpt)
                evaluated = evaluated or self._evaluates()
                if self.checkpoints is not None:
                    self.checkpoints.poll()
                    if every and self.step % every == 0:
                        self.save()
            if self.checkpoints is not None:
                if recipe.checkpoint.save_at_end or interrupted:
                    self.save()
                self.checkpoints.wait()
        except NotFiniteError:  # raised on every rank together: a save in flight is of an earlier, good step
            self._say_resumed()
            if self.checkpoints is not None:
                self.checkpoints.wait()
            raise
        finally:
            recorder.close()
        self._say_resumed()
        if self.step < first and not interrupted:
            self.say(f"step {self.step} of {steps} is done: nothing left to train; raise train.steps to go on")
        self._stop_without_metrics(recorder)
        if interrupted:
            saved = "; checkpoint.dir is not set, so nothing was saved" if self.checkpoints is None else ", saved" if self.step else ""
            self.say(f"stopped by a signal after step {self.step}{saved}")
        return Outcome(self.step, interrupted)

    def _stop_without_metrics(self, recorder: Recorder) -> None:
        """MetricsError on every rank if one could not write: the run's numbers would be lost from here on."""
        problems: list[str | None] = [None] * self.ranks.world
        dist.all_gather_object(problems, recorder.problem, group=self.ranks.control)
        for rank, problem in enumerate(problems):
            if problem:
                saved = f"step {self.step} is saved" if self.checkpoints is not None and self.checkpoints.last_saved == self.step else "nothing was saved"
                raise MetricsError(f"rank {rank}: {problem}; the run stops after step {self.step}, {saved}")

    def _rate(self) -> float:
        return float(self.built.optimizer.param_groups[0]["lr"])


class Recorder:
    """Metrics file and progress of the rank that logs; nothing on the others. It raises nothing, since the other ranks would wait:
    ``problem`` says why the metrics cannot be written, and the ranks agree on it before the next step."""

    def __init__(self, recipe: Recipe, ranks: Ranks, step: int, digest: str):
        self._recipe, self._ranks = recipe, ranks
        self._digest: str | None = digest  # until a row holds it
        self._file = self._progress = None
        self.problem: str | None = None
        self.folder = logging_folder(recipe)
        if not ranks.logs:
            return
        if self.folder is not None:
            try:
                self._file = Metrics(self.folder, step)
            except MetricsError as error:
                self.problem = str(error)
        self._progress = Progress(recipe.train.steps, step, show=recipe.logging.progress)
        self._tokens = recipe.train.global_batch * recipe.model.seq_length
        self._flops = flops_per_token(recipe)
        peak = peak_flops(ranks.device, recipe.precision.tensor_dtype)
        self._peak = None if peak is None else peak * ranks.world

    def step(self, step: int, loss: float | None, norm: float, rate: float, seconds: float,
             validation: float | None, router_losses: dict[str, float]) -> None:  # fmt: skip
        skipped = step % self._recipe.logging.every_steps and step != self._recipe.train.steps and validation is None
        if self._progress is None or skipped:
            return
        speed = self._tokens / seconds
        row = {"step": step, "loss": loss, "grad_norm": norm, "lr": rate, "tokens": step * self._tokens, "seconds": seconds,
               "tokens_per_s": speed, "flops_per_s": speed * self._flops, "memory_bytes": peak_memory(self._ranks.device)}  # fmt: skip
        row |= router_losses
        if validation is not None:
            row["validation_loss"] = validation
        if self._digest is not None:
            row["digest"], self._digest = self._digest, None
        if self._peak is not None:
            row["mfu"] = speed * self._flops / self._peak
        if self._file is not None and self.problem is None:
            try:
                self._file.write(row)
            except MetricsError as error:
                self.problem = str(error)
        self._progress.update(row, time.monotonic())

    def close(self) -> None:
        if self._progress is not None:
            self._progress.close()
        if self._file is not None:
            try:
                self._file.close(self._draw)
            except MetricsError as error:
                self.problem = self.problem or str(error)

    def _draw(self) -> None:
        from . import plots

        if self._recipe.logging.plot:
            plots.plot_loss(self._file.path, self.folder / "loss.png", title=self._recipe.name)
        if self._recipe.logging.tensorboard:
            plots.write_tensorboard(self._file.path, self.folder / "tensorboard")


def router_losses(recipe: Recipe) -> tuple[str, ...]:
    """Names under which Megatron logs the losses of the recipe's routers."""
    m = recipe.model
    balance = {"aux_loss": "load_balancing_loss", "seq_aux_loss": "seq_load_balancing_loss", "global_aux_loss": "global_load_balancing_loss"}
    if m.num_experts is None:
        return ()
    names = [balance[m.moe_router_load_balancing_type]] if m.moe_aux_loss_coeff > 0 else []
    return (*names, *(["z_loss"] if m.moe_z_loss_coeff else []))


def logging_folder(recipe: Recipe) -> Path | None:
    """Where metrics go: logging.dir, else the checkpoints' folder, else nowhere."""
    chosen = recipe.logging.dir or recipe.checkpoint.dir
    return None if chosen is None else Path(chosen)


def rng_state() -> dict[str, torch.Tensor]:
    """Every generator a step draws from, as uint8 tensors: the CPU's, the GPU's, Megatron's tracker's."""
    state = {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state()}
    for name, value in get_cuda_rng_tracker().get_states().items():
        state[f"tracker/{name}"] = value
    return {k: v.cpu().clone() for k, v in state.items()}


def set_rng_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states({k.partition("/")[2]: v for k, v in state.items() if k.startswith("tracker/")})


def _mean_loss(sums: torch.Tensor | None) -> float | None:
    """``sums``: this rank's sum of token losses and their count; None on ranks that know no loss."""
    if sums is None:
        return None
    dist.all_reduce(sums, group=mpu.get_data_parallel_group())
    total, count = sums.tolist()
    return total / max(count, 1.0)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def train(recipe: Recipe, *, say: Callable[[str], None] | None = None) -> Outcome:
    """Train ``recipe`` in this process (or as this rank of a launcher's). Raises RecipeError and what ``Trainer.train`` raises."""
    with ranks_of(recipe) as ranks:
        return Trainer(recipe, ranks, say=say).train()
