"""The training loop, which all tasks share."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from statistics import mean, median

import torch
from torch import Tensor
from tqdm import tqdm

from jingu.checkpoint.resume import step_folder
from jingu.config.batch_plan import BatchPlan
from jingu.config.sections.train import FP16Settings
from jingu.errors import JinguError, pluralize
from jingu.evaluate.smooth_measures import TASKS_PREFIX, describe
from jingu.formatting import format_duration, format_rounded
from jingu.parallel.mesh import resolve_axis_sizes
from jingu.parallel.pipeline import ParallelModel
from jingu.plan.actual import StepSeconds, StepTimer, complete_terms, computing_clock, widest_axis
from jingu.plan.forecast import Forecast, run_software, run_workload
from jingu.plan.machine import Machine, nominal_machine
from jingu.plan.memory import stage_memory
from jingu.plan.replay import recording, storage_bytes
from jingu.plan.step_time import step_time
from jingu.runtime.collective_stop import CollectiveStop
from jingu.runtime.device import peak_memory
from jingu.runtime.log import log_info, log_warning
from jingu.runtime.ranks import RankInfo, count_ranks, gather_from_all
from jingu.training.checkpointing import Checkpointer, Progress
from jingu.training.evaluate import measure_tasks
from jingu.training.optimizer import ShardedOptimizer, set_learning_rate
from jingu.training.plan_task import add_task
from jingu.training.precision import choose_precision
from jingu.training.profile import profile_steps
from jingu.training.run import Run
from jingu.training.schedule import learning_rate
from jingu.training.step import StepResult, train_step
from jingu.training.task import StepNotStartedError, Task
from jingu.training.throughput import ThroughputMeter

# Comparison of a run with its plan: each run writes planned and measured time and memory into its metrics.

# The step whose operations are timed, counted from 1 at each start. Earlier steps also build caches and buffers; in the
# one before, the peak of all tensors is recorded. With profiling, both come after the profiled steps.
TIMED_STEP = 3


class PlanCheck:
    """Measures one step by term and all logged steps as a whole, and writes both together with the planned values.

    Steps are measured by term only on CPUs, and only if they are not compiled; the memory of tensors also on GPUs.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._speeds: list[float] = []
        self._computing: deque[float] = deque(maxlen=100)
        self._is_warm = self._is_written = False
        self._step_seconds: StepSeconds | None = None
        self._memory: dict[str, float] = {}

    @contextmanager
    def step(self, trainer: Trainer) -> Iterator[None]:
        """Measure the step that is taken within the block."""
        self._steps += 1
        start, distance = computing_clock(), self._steps - _timed_step(trainer)
        if distance not in (-1, 0) or trainer.is_compiled or trainer.ranks.device.type != "cpu":
            yield
            self._computing.append(computing_clock() - start)
            return
        if distance == -1:
            state = _tensors_of_state(trainer)
            with recording([state, list(trainer.model.buffers()), trainer.model.receive_buffers()]) as record:
                yield
            self._memory = _split_peak(state, record.peak)
            return
        sizes = resolve_axis_sizes(trainer.run.config.parallel, trainer.ranks.world, trainer.run.spec)
        timer = StepTimer(trainer.model.activity, waits=sizes.pipeline == 1, widest=widest_axis(sizes))
        self._step_seconds = timer.seconds
        with timer:
            yield

    def log(self, trainer: Trainer, step: int, speed: float, write: WriteMetrics) -> None:
        """Add the speed since the last logged step, and write the line `plan` if it is due.

        The line is written as soon as there is a speed, and again at the last step. All ranks must call this at the
        same steps.

        Args:
            speed: tokens per second.
        """
        # 1. Ignore the first logged steps: they include warmup and the step that is timed by term.
        self._speeds += [speed] * self._is_warm
        self._is_warm = self._steps >= _timed_step(trainer)
        if not self._speeds or (self._is_written and step < trainer.run.config.train.steps):
            return
        # 2. Plan the step of this run.
        self._is_written = True
        seconds = trainer.plan.tokens_per_step / median(self._speeds)
        config, spec, device = trainer.run.config, trainer.run.spec, trainer.ranks.device
        sizes = resolve_axis_sizes(config.parallel, trainer.ranks.world, spec)
        precision, on_gpu = choose_precision(config.precision, device), device.type != "cpu"
        software = run_software(precision, on_gpu=on_gpu, is_compiled=trainer.is_compiled)
        work = run_workload(config, spec, sizes, trainer.plan, software)
        machine = _measured_machine(trainer)
        memory = stage_memory(work, work.stages[0])
        updates = Forecast(work, machine, config.train.steps, step_time(work, machine), memory, None, [])
        forecast = add_task(updates, config, spec)
        # 3. Complete the measured terms with those of all ranks.
        actual = {}
        if self._step_seconds is not None:
            # A collective: all ranks log at the same steps.
            everywhere = gather_from_all([asdict(self._step_seconds), median(self._computing)])
            actual = complete_terms(
                [StepSeconds(**fields) for fields, _ in everywhere],
                mean(computing for _, computing in everywhere),
                seconds,
                ranks_per_core=machine.ranks_per_core,
                is_pipeline=sizes.pipeline > 1,
            )
        plan_parts, run_parts = forecast.memory.of_tensors(), self._memory
        if device.type != "cpu":
            run_parts = _split_peak(_tensors_of_state(trainer), peak_memory(device))
        write(
            "plan",
            step,
            planned=forecast.seconds,
            actual=actual,
            planned_seconds=forecast.step,
            actual_seconds=seconds,
            planned_memory=plan_parts,
            actual_memory=run_parts,
            planned_memory_bytes=sum(plan_parts.values()),
            actual_memory_bytes=sum(run_parts.values()) if run_parts else None,
        )


def _tensors_of_state(trainer: Trainer) -> dict[str, list[object]]:
    return {"weights": list(trainer.model.parameters()), "optimizer state": list(trainer.optimizer.state.values())}


def _split_peak(state: Mapping[str, object], peak: float) -> dict[str, float]:
    """Return the peak of all tensors by the parts that a plan names (`RankMemory.of_tensors`)."""
    parts: dict[str, float] = {name: storage_bytes(tensors) for name, tensors in state.items()}
    return parts | {"gradients and activations": peak - sum(parts.values())}


def _timed_step(trainer: Trainer) -> int:
    """Return the number of the step that is timed by term, counted from 1 at each start."""
    return TIMED_STEP + trainer.run.config.train.profile.steps


def _measured_machine(trainer: Trainer) -> Machine:
    """Return this machine with the peak FLOP/s that the run has measured."""
    ranks = trainer.ranks
    machine = nominal_machine(ranks.device).with_nodes(count_ranks(ranks.world)[1])
    peak = trainer.meter.peak / ranks.world / 1e12
    matmul = peak if machine.is_shared else min(peak, machine.matmul_tflops)
    return machine.model_copy(update={"peak_tflops": peak, "matmul_tflops": matmul})


# Writes a line of metrics, as `MetricsFile.write`; does nothing on ranks other than the first.
WriteMetrics = Callable[..., None]


# Steps after which the loop at the latest checks that the loss is finite. It is not checked every step, because reading
# the loss makes the host wait for the device.
CHECK_EVERY = 10
# A run has diverged after this number of consecutive steps without a finite loss and gradient.
DIVERGENCE_STEPS = 3


class DivergenceError(JinguError):
    """The loss of a run is no longer finite."""


@dataclass(frozen=True)
class Trainer:
    """The objects that the loop uses, which are the same from the first step to the last.

    Attributes:
        plan: how the global batch is divided over ranks and micro-batches.
        meter: measures training time and tokens per second.
        is_compiled: whether blocks and loss are compiled.
        plan_check: compares time and memory of the run with its plan.
    """

    run: Run
    plan: BatchPlan
    ranks: RankInfo
    task: Task
    model: ParallelModel
    optimizer: ShardedOptimizer
    meter: ThroughputMeter
    is_compiled: bool
    plan_check: PlanCheck = field(default_factory=PlanCheck)


def train_loop(
    trainer: Trainer, progress: Progress, checkpointer: Checkpointer, stop: CollectiveStop, write: WriteMetrics
) -> bool:
    """Train from `progress.step` to the last step.

    Args:
        progress: where to start; updated in place.
        stop: lets all ranks stop at the same step.
        write: writes lines of metrics.jsonl.

    Returns:
        Whether the run is complete; False if a signal stopped it. The state is saved then, unless the last steps were
        not finite.

    Raises:
        DivergenceError: the loss is not finite, and `train.on_divergence` is not `continue`.
        StepNotStartedError: a step could not start. The state is saved, unless the last steps were not finite.
    """
    config = trainer.run.config
    # Losses are summed on the device, so that the host does not wait for it in most steps.
    loss_sum = torch.tensor(progress.loss_sum, dtype=torch.float64, device=trainer.ranks.device)
    nonfinite_steps = torch.tensor(progress.nonfinite_steps, device=trainer.ranks.device)
    if progress.evaluation_due:  # the run was stopped right before this evaluation
        _evaluate(trainer, progress, write)
    trainer.meter.start(progress)
    with _profiler(trainer, progress) as profile_step, _progress_bar(trainer, progress) as bar:
        while not progress.is_complete(config):
            # 1. Take one optimizer step.
            with _save_on_failure(trainer, progress, checkpointer, loss_sum, nonfinite_steps):
                result = _run_step(trainer, progress)
            profile_step()
            loss_sum += result.loss
            nonfinite_steps = (nonfinite_steps + 1) * ~result.is_finite
            bar.update()

            # 2. Decide what follows the step. All ranks must decide the same.
            decision = stop.agree(*checkpointer.status())
            is_last = progress.step == config.train.steps
            is_stopped = bool(decision.stop) and not is_last
            logs = is_last or _is_due(progress.step, config.train.log_every)
            saves = is_last or is_stopped or checkpointer.should_save(progress.step, decision)
            copies = not (is_last or is_stopped) and checkpointer.should_copy(progress.step)
            evaluation_due = is_last or _is_due(progress.step, config.evaluation.every)
            evaluates = evaluation_due and not is_stopped
            # A stopped run evaluates when it resumes.
            progress.evaluation_due = evaluation_due and is_stopped
            if not (logs or saves or copies or evaluates or _is_due(progress.step, CHECK_EVERY)):
                continue

            # 3. Read the losses, which waits for the device. The meter is updated after that, so it counts whole steps.
            progress.loss_sum = float(loss_sum.item())
            trainer.meter.update(progress)

            # 4. Log, and end a run that has diverged.
            if logs:
                _log(trainer, progress, result, write, bar)
                loss_sum.zero_()
            trainer.model.activity.enter("save")
            is_valid = _check_divergence(trainer.run, progress, int(nonfinite_steps.item()))

            # 5. Evaluate and save.
            if evaluates:
                _evaluate(trainer, progress, write)
            if is_valid or progress.is_complete(config):
                reason = decision.stop if is_stopped else None
                _save(trainer, progress, checkpointer, reason, saves=saves, copies=copies)
            if is_stopped:
                _log_stop(progress, config.train.steps, is_valid)
                break
            # 6. Leave evaluation and saving out of the training time.
            trainer.meter.skip()
    stop.wait()
    if progress.is_complete(config):
        _log_completion(trainer, progress)
    return progress.is_complete(config)


def _save(
    trainer: Trainer,
    progress: Progress,
    checkpointer: Checkpointer,
    exit_code: int | None,
    *,
    saves: bool,
    copies: bool,
) -> None:
    """Save the state of the run.

    Args:
        exit_code: exit code of a run that a signal stops; None: it continues.
        saves: whether a checkpoint is due; a run that is complete always saves one.
        copies: whether a copy to main memory is due.
    """
    config = trainer.run.config
    is_complete = progress.is_complete(config)
    if saves or copies or is_complete:
        progress.task = trainer.task.state()
    if is_complete:
        checkpointer.save_final(progress)
    elif exit_code is not None:
        checkpointer.save_final(progress, config.checkpoint.grace_seconds, exit_code)
    elif saves:
        checkpointer.save(progress)
    if copies:
        checkpointer.copy(progress)


@contextmanager
def _save_on_failure(
    trainer: Trainer, progress: Progress, checkpointer: Checkpointer, loss_sum: Tensor, nonfinite_steps: Tensor
) -> Iterator[None]:
    """Save the state if the step within the block cannot start, and raise its error.

    Nothing is saved before the first step, or after steps that were not finite.
    """
    try:
        yield
    except StepNotStartedError:
        if progress.step and not nonfinite_steps.item():
            progress.loss_sum = float(loss_sum.item())
            progress.task = trainer.task.state()
            checkpointer.save_final(progress)
            log_info(f"Saved at step {progress.step} of {trainer.run.config.train.steps}.")
        raise


def _profiler(trainer: Trainer, progress: Progress) -> AbstractContextManager[Callable[[], None]]:
    """Return the context of `profile_steps` for this run."""
    folder = trainer.run.folder / "profile"
    steps = trainer.run.config.train.profile.steps
    return profile_steps(folder, steps, trainer.ranks.rank, progress.step, trainer.model.activity)


def _progress_bar(trainer: Trainer, progress: Progress) -> tqdm:
    """Return a progress bar over the steps of the run, which is shown only by the first rank and in a terminal."""
    # None lets tqdm disable the bar if there is no terminal.
    disable = None if trainer.ranks.is_first else True
    steps = trainer.run.config.train.steps
    # The bar estimates the time left from about the last 50 steps.
    return tqdm(total=steps, initial=progress.step, unit="step", disable=disable, dynamic_ncols=True, smoothing=0.02)


def _log_stop(progress: Progress, steps: int, is_saved: bool) -> None:
    action = "Stopped and saved" if is_saved else "Stopped without saving"
    log_info(f"{action} at step {progress.step} of {steps}. The same command resumes the run.")


def _log_completion(trainer: Trainer, progress: Progress) -> None:
    """Log the results of a complete run: steps, validation metrics, and where its checkpoint is."""
    warning = "the loss is not finite" if progress.nonfinite_steps else ""
    validation = _format_validation(progress.evaluation or {})
    patience = ""
    if progress.step < trainer.run.config.train.steps:
        metric = trainer.run.config.checkpoint.best_metric
        patience = f"no better {metric} in {pluralize(progress.evaluations_since_best, 'evaluation')}"
    results = ", ".join(filter(None, [pluralize(progress.step, "step"), patience, validation, warning]))
    log_info(f"Complete: {results}. The checkpoint is {step_folder(trainer.run.checkpoints, progress.step)}.")


def _check_divergence(run: Run, progress: Progress, nonfinite_steps: int) -> bool:
    """Log when the loss becomes non-finite, and when it recovers.

    Args:
        nonfinite_steps: number of consecutive steps, up to the last one, without a finite loss and gradient.

    Returns:
        Whether the weights may be saved.

    Raises:
        DivergenceError: the run has diverged, and `train.on_divergence` is not `continue`.
    """
    train = run.config.train
    first = progress.step - nonfinite_steps + 1
    if nonfinite_steps and not progress.nonfinite_steps:
        log_warning(f"The loss or its gradient is not finite since step {first}. A lower optimizer.lr may help.")
    elif progress.nonfinite_steps and not nonfinite_steps:
        log_info(f"The loss is finite again at step {progress.step}.")
    progress.nonfinite_steps = nonfinite_steps
    # With fp16, a step whose gradient is not finite is skipped: the weights do not change.
    keeps_weights = run.config.precision.type == "fp16"
    limit = DIVERGENCE_STEPS
    if progress.step == train.steps and not keeps_weights:
        limit = 1
    if train.on_divergence == "continue" or nonfinite_steps < limit:
        return train.on_divergence == "continue" or keeps_weights or not nonfinite_steps
    raise DivergenceError(
        f"the run has diverged: its loss or gradient is not finite since step {first}.",
        where=run.folder,
        fix="Its checkpoints are from before the divergence. Resume with a lower learning rate (optimizer.lr=... "
        "--allow optimizer), or let train.on_divergence=rollback halve it. In a new run, a longer schedule.warmup or a "
        "lower train.max_grad_norm may help.",
    )


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _run_step(trainer: Trainer, progress: Progress) -> StepResult:
    """Take one step with its learning rate and the current loss scale, and update `progress`.

    Learning from rewards may take several updates (`BatchPlan.updates`) per step.

    Returns:
        The result of the last update.
    """
    config = trainer.run.config
    # The schedule is a pure function of the step, so a resumed run needs no other state.
    lr = learning_rate(config.schedule, config.optimizer.lr, progress.step, config.train.steps)
    plan = replace(trainer.plan, lr_scale=progress.lr_scale)
    set_learning_rate(trainer.optimizer, lr * plan.lr_scale)
    precision = config.precision
    is_fp16 = isinstance(precision, FP16Settings)
    with trainer.plan_check.step(trainer):
        for update in range(plan.updates):
            result = train_step(
                trainer.model,
                trainer.optimizer,
                trainer.task,
                plan,
                step=progress.step * plan.updates + update,
                max_grad_norm=config.train.max_grad_norm,
                loss_scale=progress.loss_scale.value if is_fp16 else None,
            )
    if isinstance(precision, FP16Settings):
        progress.loss_scale.update(precision, finite=not result.is_skipped)
    if result.is_skipped:
        log_info(
            f"Step {progress.step + 1} is skipped: its gradient overflowed fp16. The loss scale is now "
            f"{progress.loss_scale.value:g}."
        )
    progress.step += 1
    progress.loss_steps += 1
    progress.tokens += trainer.plan.tokens_per_step
    trainer.model.activity.enter("between steps")
    return result


def _log(trainer: Trainer, progress: Progress, result: StepResult, write: WriteMetrics, bar: tqdm) -> None:
    """Log and write the metrics since the last logged step, and warn if the loss has risen far above its past.

    Args:
        result: result of the step that is logged.
    """
    loss = progress.loss_sum / progress.loss_steps
    progress.loss_sum = 0.0
    progress.loss_steps = 0
    speed = trainer.meter.tokens_per_second(progress)
    share = trainer.meter.peak_share(speed)
    metrics = {name: float(value) for name, value in result.metrics.items()}
    headline = _format_headline(trainer.task.headline, {**metrics, "loss": loss})
    message = f"{headline}, {format_rounded(speed)} tokens/s, {share:.0%} of peak"
    bar.set_postfix_str(message)
    if bar.disable and trainer.ranks.is_first:
        # Without a progress bar, each logged step is a line.
        steps = trainer.run.config.train.steps
        tokens_left = (steps - progress.step) * trainer.plan.tokens_per_step
        seconds_left = tokens_left / max(trainer.meter.average_tokens_per_second(), 1e-9)
        time_left = f", {format_duration(seconds_left)} left" if seconds_left else ""
        log_info(f"step {progress.step} of {steps}: {message}{time_left}")
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
    trainer.plan_check.log(trainer, progress.step, speed, write)
    if progress.add_loss(loss):
        log_warning(
            f"The loss has risen far above its past: {loss:.3f} at step {progress.step}, from about "
            f"{progress.lowest_loss:.3f}. If it stays there, resume from an earlier step with a lower optimizer.lr."
        )
        write("divergence", progress.step, action="none", loss=loss, lowest_loss=progress.lowest_loss)


def _format_headline(names: tuple[str, ...], metrics: Mapping[str, float]) -> str:
    """Return the metrics of these names as text, such as `reward 0.512, kl 0.031, length 12.3`."""
    digits = {"length": 1}
    values = ((name, metrics[name]) for name in names if name in metrics)
    return ", ".join(f"{name.removeprefix('rewards/')} {value:.{digits.get(name, 3)}f}" for name, value in values)


def _evaluate(trainer: Trainer, progress: Progress, write: WriteMetrics) -> None:
    """Evaluate the model with its task and on the evaluation tasks, and write the results as lines of metrics."""
    progress.evaluation_due = False
    config = trainer.run.config
    if not config.evaluation.every:
        return
    trainer.model.activity.enter("evaluate")
    start_time = time.perf_counter()
    is_last = progress.step == config.train.steps
    evaluation = trainer.task.evaluate(trainer.model, trainer.plan.micro_batch_size, final=is_last)
    metrics = dict(evaluation.metrics)
    tasks = measure_tasks(trainer.run, trainer.model)
    for name, measures in tasks.items():
        metrics |= {f"{TASKS_PREFIX}{name}/{measure}": value for measure, value in measures.items()}
    if metrics:
        progress.add_evaluation(metrics, config.checkpoint.best_metric)
        # If this evaluation ends the run before its last step, evaluate as at the end of a run.
        settings = config.evaluation
        if not is_last and progress.is_complete(config) and settings.limit(final=True) != settings.limit(final=False):
            evaluation = trainer.task.evaluate(trainer.model, trainer.plan.micro_batch_size, final=True)
            metrics = {**metrics, **evaluation.metrics}
            progress.evaluation = metrics
        if evaluation.metrics:
            log_info(f"step {progress.step}: {_format_validation(metrics)}")
        for name, measures in tasks.items():
            log_info(f"step {progress.step}: {name} {describe(measures)}")
        write("evaluation", progress.step, **metrics, seconds=time.perf_counter() - start_time)
    for prompt, text in evaluation.samples:
        write("sample", progress.step, prompt=prompt, text=text)


def _format_validation(metrics: Mapping[str, float | None]) -> str:
    """Return losses on the validation split as text, such as `validation loss 2.1234, bits per byte 0.9876`.

    Counts and the results of evaluation tasks are left out. Without any loss the text is empty.
    """
    values = [
        f"{name.replace('_', ' ')} {value:.4f}"
        for name, value in metrics.items()
        if isinstance(value, float) and not name.startswith(TASKS_PREFIX)
    ]
    return f"validation {', '.join(values)}" if values else ""
