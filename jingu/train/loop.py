"""The loop: one for every task, read from top to bottom."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from tqdm import tqdm

from jingu.checkpoint.resume import step_folder
from jingu.config.batch import BatchPlan
from jingu.config.sections.train import FP16Settings
from jingu.errors import counted
from jingu.parallel.pipeline import Model
from jingu.runtime.device import peak_memory
from jingu.runtime.log import say
from jingu.runtime.ranks import Ranks
from jingu.runtime.signals import SharedStop
from jingu.train.evaluate import evaluate, write_samples
from jingu.train.keep import Keeper, Progress
from jingu.train.optimizer import set_learning_rate
from jingu.train.run import Run
from jingu.train.schedule import learning_rate
from jingu.train.step import StepResult, train_step
from jingu.train.task import Task
from jingu.words import duration, rounded

Write = Callable[..., None]
"""`MetricsFile.write`; on ranks other than the first it does nothing."""


@dataclass(frozen=True)
class Loop:
    """What is trained, on what, and how a step is divided: it stays the same while the loop runs."""

    run: Run
    plan: BatchPlan
    ranks: Ranks
    task: Task
    model: Model
    optimizer: torch.optim.Optimizer
    compiles: bool


def train_loop(loop: Loop, progress: Progress, keeper: Keeper, meter: Meter, stop: SharedStop, write: Write) -> bool:
    """Train from `progress.step` to the last step, saving on the way and at the end.

    Args:
        progress: where to start; brought up to date in place.

    Returns:
        Whether the run is complete; False where a stop was asked for (and the state saved).
    """
    config, steps = loop.run.config, loop.run.config.train.steps
    losses = torch.tensor(progress.loss_sum, dtype=torch.float64, device=loop.ranks.device)
    if progress.evaluation_due:
        progress.evaluation_due = False
        _evaluate(loop, progress, write)
    held_out, diverged = None, False
    meter.begin(progress)
    hidden = None if loop.ranks.is_first else True  # None: where there is no terminal
    with tqdm(total=steps, initial=progress.step, unit="step", disable=hidden, dynamic_ncols=True) as bar:
        while progress.step < steps:
            result = _step(loop, progress)
            losses += result.loss
            progress.step += 1
            progress.loss_steps += 1
            progress.tokens += loop.plan.tokens_per_step
            bar.update()

            ends = progress.step == steps
            told = stop.ask(*keeper.wishes())
            stops = bool(told.stop) and not ends
            logs = ends or _due(progress.step, config.train.log_every)
            saves = ends or stops or keeper.due(progress.step, told)
            copies = not (ends or stops) and keeper.copies(progress.step)
            due = ends or _due(progress.step, config.evaluation.every)
            evaluates, progress.evaluation_due = due and not stops, due and stops
            if logs or evaluates or saves or copies:
                progress.loss_sum = float(losses.item())  # waits for the device, so the clock is read after it
                meter.read(progress)
            if logs:
                diverged = _log(loop, progress, result, meter, write, bar, diverged)
                losses.zero_()
            if evaluates:
                held_out = _evaluate(loop, progress, write)
            if ends:
                keeper.save_last(progress)
            elif stops:
                keeper.save_last(progress, config.checkpoint.grace, told.stop)
            elif saves:
                keeper.save(progress)
            if copies:
                keeper.copy(progress)
            if stops:
                say(f"Stopped at step {progress.step} of {steps}, and saved. The same command goes on from here.")
                break
            if logs or evaluates or saves or copies:
                meter.skip()
    stop.settle()
    if progress.step >= steps:
        words = "" if held_out is None else f" with a held-out loss of {held_out:.4f}"
        say(f"Complete: {counted(steps, 'step')}{words}. The checkpoint is {step_folder(loop.run.checkpoints, steps)}.")
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
    """The clock of training, which leaves out evaluation and saving; and how near the machine's peak it comes.

    Args:
        flops_per_token: training operations a token (forward and backward).
        measure: measures the peak of all ranks together.
    """

    def __init__(self, flops_per_token: float, measure: Callable[[], float]) -> None:
        self.flops_per_token, self._measure, self.peak = flops_per_token, measure, measure()

    def begin(self, progress: Progress) -> None:
        """Start the clock."""
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

    def share(self, rate: float) -> float:
        """Share of the peak, at so many tokens a second. Training that is faster than it shows that the measuring was
        disturbed: it is done again, and what training reaches is a measure, too."""
        flops = rate * self.flops_per_token
        if flops > self.peak:
            self.peak = max(flops, self._measure())
        return flops / self.peak


def _log(
    loop: Loop, progress: Progress, result: StepResult, meter: Meter, write: Write, bar: tqdm, diverged: bool
) -> bool:
    """Write a line of metrics, and tell it. Whether the loss is no number is told where it is not as it was
    (`diverged`), and returned."""
    loss, scale = progress.loss_sum / progress.loss_steps, progress.loss_scale
    progress.loss_sum, progress.loss_steps = 0.0, 0
    rate = meter.rate(progress)
    share = meter.share(rate)
    words = f"loss {loss:.3f}, {rounded(rate)} tokens/s, {share:.0%} of peak"
    bar.set_postfix_str(words)
    if bar.disable and loop.ranks.is_first:
        steps = loop.run.config.train.steps
        left = (steps - progress.step) * loop.plan.tokens_per_step / max(rate, 1e-9)
        say(f"step {progress.step} of {steps}: {words}" + (f", {duration(left)} left" if left else ""))
    scaled = loop.run.config.precision.type == "fp16"
    write(
        "train",
        progress.step,
        loss=loss,
        lr=loop.optimizer.param_groups[0]["lr"],
        grad_norm=float(result.grad_norm.item()),
        **{name: float(value.item()) for name, value in result.others.items()},
        **({"loss_scale": scale.value, "skipped": scale.skipped} if scaled else {}),
        tokens=progress.tokens,
        tokens_per_second=rate,
        seconds=progress.seconds,
        peak_share=share,
        memory_bytes=peak_memory(loop.ranks.device),
    )
    if diverged and math.isfinite(loss):
        say(f"The loss is a number again at step {progress.step}.")
    elif not diverged and not math.isfinite(loss):
        say(f"The loss is {loss} at step {progress.step}: the run has diverged. A lower optimizer.lr may help.")
    return not math.isfinite(loss)


def _evaluate(loop: Loop, progress: Progress, write: Write) -> float | None:
    """Measure and write samples; returns the held-out loss, where there is held-out text."""
    run, settings, rows, loss = loop.run, loop.run.config.evaluation, loop.task.held_out, None
    if not settings.every:
        return None
    if rows is not None:
        ends = progress.step == run.config.train.steps
        wanted = settings.sequences_at_end if ends and settings.sequences_at_end else settings.sequences
        sequences, lengths = None if wanted == "all" else wanted, run.tokenizer.byte_lengths()
        if sequences is None:  # this may take long
            say(f"step {progress.step}: measuring the loss on all held-out text, {counted(rows.count, 'sequence')}")
        started = time.perf_counter()
        found = evaluate(loop.model, loop.task, rows, lengths, sequences=sequences, micro_size=loop.plan.micro_size)
        loss, bits, progress.evaluation = found.loss, found.bits_per_byte, asdict(found)
        told = "" if bits is None else f", {bits:.4f} bits per byte"
        say(f"step {progress.step}: held-out loss {loss:.4f}{told}")
        write("evaluation", progress.step, **asdict(found), seconds=time.perf_counter() - started)
    for prompt, text in write_samples(run, loop.model):
        write("sample", progress.step, prompt=prompt, text=text)
    return loss
