"""The training loop: one for every task. Read it from top to bottom."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tqdm import tqdm

from jingu.checkpoint.resume import step_folder
from jingu.config.batch_plan import BatchPlan
from jingu.config.sections.train import FP16Settings
from jingu.errors import pluralize
from jingu.formatting import format_duration, format_rounded
from jingu.parallel.pipeline import ParallelModel
from jingu.runtime.device import peak_memory
from jingu.runtime.log import log_info
from jingu.runtime.ranks import RankInfo
from jingu.runtime.signals import CollectiveStop
from jingu.training.checkpointing import Checkpointer, Progress
from jingu.training.optimizer import set_learning_rate
from jingu.training.run import Run
from jingu.training.schedule import learning_rate
from jingu.training.step import StepResult, train_step
from jingu.training.task import Task
from jingu.training.throughput import ThroughputMeter

# `MetricsFile.write`; on ranks other than the first it does nothing.
WriteMetrics = Callable[..., None]


@dataclass(frozen=True)
class Trainer:
    """What the loop works with: it stays the same from the first step to the last.

    Attributes:
        plan: how the global batch is divided over ranks and micro-batches.
    """

    run: Run
    plan: BatchPlan
    ranks: RankInfo
    task: Task
    model: ParallelModel
    optimizer: torch.optim.Optimizer
    meter: ThroughputMeter
    is_compiled: bool


def train_loop(
    trainer: Trainer, progress: Progress, checkpointer: Checkpointer, stop: CollectiveStop, write: WriteMetrics
) -> bool:
    """Train from `progress.step` to the last step.

    Args:
        progress: where to start; updated in place.

    Returns:
        Whether the run is complete; False if a signal stopped it (and the state is saved).
    """
    config = trainer.run.config
    steps = config.train.steps
    # Losses are summed on the device, so that most steps never wait for it.
    loss_sum = torch.tensor(progress.loss_sum, dtype=torch.float64, device=trainer.ranks.device)
    has_diverged = False
    if progress.evaluation_due:
        # The run was stopped right before this evaluation.
        progress.evaluation_due = False
        _evaluate(trainer, progress, write)
    trainer.meter.start(progress)
    # tqdm disables a bar by itself (None) where there is no terminal.
    disable_bar = None if trainer.ranks.is_first else True
    with tqdm(total=steps, initial=progress.step, unit="step", disable=disable_bar, dynamic_ncols=True) as bar:
        while progress.step < steps:
            # 1. Take one optimizer step.
            result = _run_step(trainer, progress)
            loss_sum += result.loss
            progress.step += 1
            progress.loss_steps += 1
            progress.tokens += trainer.plan.tokens_per_step
            bar.update()

            # 2. Decide, equally on all ranks, what follows the step.
            shared = stop.ask(*checkpointer.status())
            is_last = progress.step == steps
            is_stopped = bool(shared.stop) and not is_last
            logs = is_last or _is_due(progress.step, config.train.log_every)
            saves = is_last or is_stopped or checkpointer.should_save(progress.step, shared)
            copies = not (is_last or is_stopped) and checkpointer.should_copy(progress.step)
            evaluation_due = is_last or _is_due(progress.step, config.evaluation.every)
            evaluates = evaluation_due and not is_stopped
            # A stopped run evaluates when it resumes.
            progress.evaluation_due = evaluation_due and is_stopped
            if not (logs or saves or copies or evaluates):
                continue

            # 3. Read the losses, which waits for the device; only then does the clock show the time of the steps.
            progress.loss_sum = float(loss_sum.item())
            trainer.meter.update(progress)

            # 4. Log, evaluate and save.
            if logs:
                has_diverged = _log(trainer, progress, result, write, bar, has_diverged)
                loss_sum.zero_()
            if evaluates:
                _evaluate(trainer, progress, write)
            if is_last:
                checkpointer.save_final(progress)
            elif is_stopped:
                checkpointer.save_final(progress, config.checkpoint.grace_seconds, shared.stop)
            elif saves:
                checkpointer.save(progress)
            if copies:
                checkpointer.copy(progress)
            if is_stopped:
                log_info(f"Stopped and saved at step {progress.step} of {steps}. The same command resumes the run.")
                break
            # 5. Leave evaluation and saving out of the training time.
            trainer.meter.skip()
    stop.settle()
    if progress.step == steps:
        results = ", ".join(filter(None, [pluralize(steps, "step"), _format_validation(progress)]))
        log_info(f"Complete: {results}. The checkpoint is {step_folder(trainer.run.checkpoints, steps)}.")
    return progress.step >= steps


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _run_step(trainer: Trainer, progress: Progress) -> StepResult:
    """Take one optimizer step with the learning rate and the loss scale of the moment."""
    config = trainer.run.config
    # The schedule is a pure function of the step, so a resumed run needs no other state.
    lr = learning_rate(config.schedule, config.optimizer.lr, progress.step, config.train.steps)
    set_learning_rate(trainer.optimizer, lr)
    precision = config.precision
    is_fp16 = isinstance(precision, FP16Settings)
    result = train_step(
        trainer.model,
        trainer.optimizer,
        trainer.task,
        trainer.plan,
        step=progress.step,
        max_grad_norm=config.train.max_grad_norm,
        loss_scale=progress.loss_scale.value if is_fp16 else None,
    )
    if isinstance(precision, FP16Settings):
        progress.loss_scale.update(precision, finite=not result.skipped)
    if result.skipped:
        log_info(
            f"Step {progress.step + 1} is skipped: its gradient overflowed fp16. The loss scale is now "
            f"{progress.loss_scale.value:g}."
        )
    return result


def _log(
    trainer: Trainer, progress: Progress, result: StepResult, write: WriteMetrics, bar: tqdm, has_diverged: bool
) -> bool:
    """Write a line of metrics, and warn when the loss becomes non-finite and when it recovers.

    Returns:
        Whether the loss is non-finite.
    """
    loss = progress.loss_sum / progress.loss_steps
    progress.loss_sum = 0.0
    progress.loss_steps = 0
    speed = trainer.meter.tokens_per_second(progress)
    share = trainer.meter.peak_share(speed)
    message = f"loss {loss:.3f}, {format_rounded(speed)} tokens/s, {share:.0%} of peak"
    bar.set_postfix_str(message)
    if bar.disable and trainer.ranks.is_first:
        # Without a progress bar, each logged step is a line.
        steps = trainer.run.config.train.steps
        seconds_left = (steps - progress.step) * trainer.plan.tokens_per_step / max(speed, 1e-9)
        time_left = f", {format_duration(seconds_left)} left" if seconds_left else ""
        log_info(f"step {progress.step} of {steps}: {message}{time_left}")
    metrics = {name: float(value.item()) for name, value in result.metrics.items()}
    if trainer.run.config.precision.type == "fp16":
        metrics["loss_scale"] = progress.loss_scale.value
        metrics["skipped"] = progress.loss_scale.skipped
    write(
        "train",
        progress.step,
        loss=loss,
        lr=trainer.optimizer.param_groups[0]["lr"],
        grad_norm=float(result.grad_norm.item()),
        **metrics,
        tokens=progress.tokens,
        tokens_per_second=speed,
        seconds=progress.seconds,
        peak_share=share,
        memory_bytes=peak_memory(trainer.ranks.device),
    )
    if has_diverged and math.isfinite(loss):
        log_info(f"The loss is finite again at step {progress.step}.")
    elif not has_diverged and not math.isfinite(loss):
        log_info(f"The loss is {loss} at step {progress.step}: the run has diverged. A lower optimizer.lr may help.")
    return not math.isfinite(loss)


def _evaluate(trainer: Trainer, progress: Progress, write: WriteMetrics) -> None:
    """Let the task evaluate the model, and write what it returns."""
    config = trainer.run.config
    if not config.evaluation.every:
        return
    start_time = time.perf_counter()
    final = progress.step == config.train.steps
    evaluation = trainer.task.evaluate(trainer.model, trainer.plan.micro_batch_size, final=final)
    if evaluation.metrics:
        progress.evaluation = evaluation.metrics
        log_info(f"step {progress.step}: {_format_validation(progress)}")
        write("evaluation", progress.step, **evaluation.metrics, seconds=time.perf_counter() - start_time)
    for prompt, text in evaluation.samples:
        write("sample", progress.step, prompt=prompt, text=text)


def _format_validation(progress: Progress) -> str:
    """Return the metrics of the last evaluation, such as `validation loss 2.1234, bits per byte 0.9876`; counts are
    left out."""
    metrics = progress.evaluation or {}
    values = [f"{name.replace('_', ' ')} {value:.4f}" for name, value in metrics.items() if isinstance(value, float)]
    return f"validation {', '.join(values)}" if values else ""
