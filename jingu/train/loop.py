"""The loop: one for every task, read from top to bottom."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from tqdm import tqdm

from jingu.checkpoint.resume import step_folder
from jingu.config.batch import BatchPlan
from jingu.config.sections.data import PrefixSettings
from jingu.config.sections.train import FP16Settings
from jingu.parallel.pipeline import Model
from jingu.runtime.device import peak_memory
from jingu.runtime.log import say
from jingu.runtime.ranks import Ranks
from jingu.runtime.signals import SharedStop
from jingu.train.evaluate import evaluate, write_samples
from jingu.train.keep import Keeper
from jingu.train.metrics import MetricsFile
from jingu.train.optimizer import set_learning_rate
from jingu.train.precision import LossScale
from jingu.train.progress import Progress
from jingu.train.run import Run
from jingu.train.schedule import learning_rate
from jingu.train.step import StepResult, train_step
from jingu.train.task import Task


@dataclass(frozen=True)
class Loop:
    """What stays the same while the loop runs."""

    run: Run
    task: Task
    model: Model
    optimizer: torch.optim.Optimizer
    mesh: DeviceMesh
    plan: BatchPlan
    ranks: Ranks
    flops_per_token: float
    """Training operations a token (forward and backward)."""
    peak_flops: float
    """Measured peak of all ranks together."""
    measure_peak: Callable[[], float]
    """Measures it again."""
    keeper: Keeper


def train_loop(loop: Loop, progress: Progress, stop: SharedStop, metrics: MetricsFile | None) -> bool:
    """Train from `progress.step` to the last step, saving on the way and at the end.

    Args:
        progress: where to start; brought up to date in place.
        metrics: where the first rank writes; None on the others.

    Returns:
        Whether the run is complete; False where a stop was asked for (and the state saved).
    """
    config, steps = loop.run.config, loop.run.config.train.steps
    losses = torch.tensor(progress.loss_sum, dtype=torch.float64, device=loop.ranks.device)
    if progress.evaluation_due:
        progress.evaluation_due = False
        _evaluate(loop, progress, metrics)
    meter, held_out = Meter(progress, loop), None
    with tqdm(total=steps, initial=progress.step, unit="step", disable=metrics is None, dynamic_ncols=True) as bar:
        while progress.step < steps:
            result = _step(loop, progress)
            losses += result.loss
            progress.step += 1
            progress.loss_steps += 1
            progress.tokens += loop.plan.tokens_per_step
            bar.update()

            ends = progress.step == steps
            told = stop.ask(*loop.keeper.wishes())
            stops = bool(told.stop) and not ends
            logs = ends or _due(progress.step, config.train.log_every)
            saves = ends or stops or loop.keeper.due(progress.step, told)
            copies = not (ends or stops) and loop.keeper.copies(progress.step)
            due = ends or _due(progress.step, config.evaluation.every)
            evaluates, progress.evaluation_due = due and not stops, due and stops
            if logs or evaluates or saves or copies:
                progress.loss_sum = float(losses.item())  # waits for the device, so the clock is read after it
                meter.read(progress)
            if logs:
                _log(loop, progress, result, meter, metrics, bar)
                losses.zero_()
            if evaluates:
                held_out = _evaluate(loop, progress, metrics)
            if ends:
                loop.keeper.save_last(progress)
            elif stops:
                loop.keeper.save_last(progress, config.checkpoint.grace, told.stop)
            elif saves:
                loop.keeper.save(progress)
            if copies:
                loop.keeper.copy(progress)
            if stops:
                say(f"Stopped at step {progress.step} of {steps}, and saved. The same command goes on from here.")
                break
            if logs or evaluates or saves or copies:
                meter.skip()
    stop.settle()
    if progress.step >= steps:
        words = "" if held_out is None else f" with a held-out loss of {held_out:.4f}"
        say(f"Complete: {steps:,} steps{words}. The checkpoint is {step_folder(loop.run.checkpoints, steps)}.")
    return progress.step >= steps


def _step(loop: Loop, progress: Progress) -> StepResult:
    config = loop.run.config
    rate = learning_rate(config.schedule, config.optimizer.lr, progress.step, config.train.steps)
    set_learning_rate(loop.optimizer, rate)
    scaled, scale = config.precision if isinstance(config.precision, FP16Settings) else None, progress.loss_scale
    result = train_step(
        loop.model,
        loop.optimizer,
        loop.task,
        loop.plan,
        step=progress.step,
        mesh=loop.mesh,
        device=loop.ranks.device,
        zero=config.parallel.zero,
        clip_norm=config.train.clip_norm,
        loss_scale=scale.on_sum(loop.plan.tokens_per_step) if scaled else None,
    )
    if scaled:
        scale.update(scaled, finite=not result.skipped)
    if result.skipped:
        say(f"Step {progress.step + 1} is skipped: its gradient overflowed fp16. The loss scale is {scale.value:g}.")
    return result


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


class Meter:
    """The clock of training: evaluation and saving are left out."""

    def __init__(self, progress: Progress, loop: Loop) -> None:
        self._peak, self._measure = loop.peak_flops, loop.measure_peak
        self._start = time.perf_counter()
        self._logged = (progress.tokens, progress.seconds)

    def read(self, progress: Progress) -> None:
        """Add the time since the last reading to the run's training time."""
        now = time.perf_counter()
        progress.seconds += now - self._start
        self._start = now

    def skip(self) -> None:
        """Leave out the time since the last reading."""
        self._start = time.perf_counter()

    def rate(self, progress: Progress) -> float:
        """Tokens a second since the last call."""
        tokens, seconds = self._logged
        self._logged = (progress.tokens, progress.seconds)
        return (progress.tokens - tokens) / max(progress.seconds - seconds, 1e-9)

    def share(self, flops: float) -> float:
        """Share of the peak. Training that is faster than it shows that the measuring was disturbed: it is done again,
        and what training reaches is a measure, too."""
        if flops > self._peak:
            self._peak = max(flops, self._measure())
        return flops / self._peak


def _log(
    loop: Loop, progress: Progress, result: StepResult, meter: Meter, metrics: MetricsFile | None, bar: tqdm
) -> None:
    loss = progress.loss_sum / progress.loss_steps
    progress.loss_sum, progress.loss_steps = 0.0, 0
    rate = meter.rate(progress)
    share = meter.share(rate * loop.flops_per_token)
    bar.set_postfix_str(f"loss {loss:.3f}, {short(rate)} tokens/s, {share:.0%} of peak")
    if metrics is not None:
        metrics.write(
            "train",
            progress.step,
            loss=loss,
            lr=loop.optimizer.param_groups[0]["lr"],
            grad_norm=float(result.grad_norm.item()),
            **{name: float(value.item()) for name, value in result.others.items()},
            **_scaling(loop, progress.loss_scale),
            tokens=progress.tokens,
            tokens_per_second=rate,
            seconds=progress.seconds,
            peak_share=share,
            memory_bytes=peak_memory(loop.ranks.device),
        )
    if not math.isfinite(loss):
        say(f"The loss is {loss} at step {progress.step}: the run has diverged. A lower optimizer.lr may help.")


def _scaling(loop: Loop, scale: LossScale) -> dict[str, float]:
    return {"loss_scale": scale.value, "skipped": scale.skipped} if loop.run.config.precision.type == "fp16" else {}


def _evaluate(loop: Loop, progress: Progress, metrics: MetricsFile | None) -> float | None:
    """Measure and write samples; returns the held-out loss, where there is held-out text."""
    settings, rows, loss = loop.run.config.evaluation, loop.task.held_out, None
    if not settings.every:
        return None
    if rows is not None:
        ends = progress.step == loop.run.config.train.steps
        wanted = settings.sequences_at_end if ends and settings.sequences_at_end else settings.sequences
        started = time.perf_counter()
        measured = evaluate(
            loop.model,
            loop.task,
            rows,
            loop.run.tokenizer.byte_lengths(),
            loop.mesh,
            loop.ranks.device,
            sequences=None if wanted == "all" else wanted,
            micro_size=loop.plan.micro_size,
        )
        loss, bits, progress.evaluation = measured.loss, measured.bits_per_byte, asdict(measured)
        told = "" if bits is None else f", {bits:.4f} bits per byte"
        say(f"step {progress.step}: held-out loss {measured.loss:.4f}{told}")
        if metrics is not None:
            metrics.write("evaluation", progress.step, **asdict(measured), seconds=time.perf_counter() - started)
    run = loop.run
    samples = write_samples(
        loop.model,
        run.tokenizer,
        settings.prompts,
        settings.prompt_tokens,
        run.config.seed,
        reads_whole=isinstance(run.config.data.objective, PrefixSettings),
    )
    for prompt, text in samples:
        if metrics is not None:
            metrics.write("sample", progress.step, prompt=prompt, text=text)
    return loss


def short(number: float) -> str:
    """Three digits and a letter: `17.3M`."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"
