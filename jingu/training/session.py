"""A training session: one start (or restart) of a run, from the opened run to the end of the loop.

It builds model, optimizer and task, compiles them if that saves time, loads the newest checkpoint, and runs the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from jingu.checkpoint.memory_copies import MemoryCopies
from jingu.compat.torch import raised_by_compiler
from jingu.compat.torch_distributed import set_group_timeouts
from jingu.config.batch_plan import BatchPlan
from jingu.config.schema import RunConfig
from jingu.config.sections.parallel import DiskOffloadSettings, ParallelSettings
from jingu.data.local_cache import copy_shards_in_background
from jingu.data.open_sources import count_epochs
from jingu.errors import JinguError, pluralize
from jingu.formatting import format_rounded
from jingu.model.decoder import parameter_shapes
from jingu.model.matmul_kernels import matmul_dtype
from jingu.model.mixer_kernels import use_mixer_kernels
from jingu.model.trainable import is_trained
from jingu.parallel.layout import Layout, Precision
from jingu.parallel.materialize import materialize
from jingu.parallel.mesh import build_mesh, data_rank, resolve_axis_sizes
from jingu.parallel.offload import DiskStorage
from jingu.parallel.pipeline import ParallelModel
from jingu.parallel.sharding import TensorBlock
from jingu.parallel.stages import splits_backward
from jingu.plan.forecast import estimate_memory, require_memory
from jingu.runtime.collective_stop import CollectiveStop
from jingu.runtime.device import has_compiler, is_out_of_memory, measure_peak_flops, total_memory
from jingu.runtime.log import log_info, log_warning
from jingu.runtime.ranks import COLLECTIVE_TIMEOUT, RankInfo, all_ranks_agree
from jingu.training.batch_transforms import to_device
from jingu.training.checkpointing import (
    Checkpointer,
    GetTensors,
    Progress,
    checkpoint_tensors,
    open_memory_copies,
    resume,
)
from jingu.training.initialize import keep_base
from jingu.training.loop import DivergenceError, Trainer, WriteMetrics, train_loop
from jingu.training.metrics import MetricsFile
from jingu.training.optimizer import ShardedOptimizer, build_optimizer, optimizer_settings
from jingu.training.precision import choose_precision
from jingu.training.run import Run
from jingu.training.task import TaskFactory
from jingu.training.throughput import ThroughputMeter, training_flops_per_token
from jingu.training.trackers import Trackers
from jingu.version import __version__

# Rollbacks halve the learning rate down to this share of it. A run that still diverges has another problem.
MIN_LR_SCALE = 1 / 32


def check_start(run: Run, plan: BatchPlan, ranks: RankInfo) -> None:
    """Check the settings against the device, before anything is written or allocated.

    Raises:
        JinguError: the device does not support a setting, or the state of this rank does not fit into memory.
    """
    config, device_type = run.config, ranks.device.type
    precision = choose_precision(config.precision, ranks.device)
    use_mixer_kernels(run.spec, config.train.mixer_kernels, device_type, precision.compute)
    check_async_tensor_parallel(config.parallel, device_type, compile=config.train.compile is not False)
    # The system may kill a process that takes too much memory.
    if config.parallel.offload.type == "none":
        sizes = resolve_axis_sizes(config.parallel, ranks.world, run.spec)
        memory = estimate_memory(config, run.spec, sizes, plan, precision)
        owner = "this machine" if device_type == "cpu" else "the device"
        require_memory(memory, total_memory(ranks.device), owner)


def train_run(
    run: Run,
    plan: BatchPlan,
    ranks: RankInfo,
    stop: CollectiveStop,
    task_factory: TaskFactory,
    on_model: Callable[[ParallelModel], None] | None = None,
) -> bool:
    """Build model, optimizer and task, load the newest checkpoint, and run the loop.

    Args:
        plan: how the global batch is divided.
        stop: lets all ranks stop at the same step.
        task_factory: creates the task of the run.
        on_model: called with the model, with its weights loaded, before the first step.

    Returns:
        Whether the run is complete; False if a signal stopped it.

    Raises:
        JinguError: model, task or checkpoints do not allow the run to start.
        DivergenceError: the run has diverged, as `train_loop` and `_roll_back` describe.
    """
    config = run.config

    # 1. The mesh of ranks, and its peak in FLOP/s.
    precision = choose_precision(config.precision, ranks.device)
    mesh = build_mesh(resolve_axis_sizes(config.parallel, ranks.world, run.spec), ranks.device)
    dtype = matmul_dtype(precision.compute, ranks.device)
    meter = ThroughputMeter(
        training_flops_per_token(run), lambda: measure_peak_flops(ranks.device, dtype) * ranks.world
    )

    # 2. Model, optimizer and task. The estimate of the training time assumes half of the peak.
    tokens = config.train.steps * plan.tokens_per_step
    training_seconds = tokens * meter.flops_per_token / (0.5 * meter.peak)
    compile = all_ranks_agree(should_compile(config, mesh, training_seconds))
    check_async_tensor_parallel(config.parallel, mesh.device_type, compile=compile)
    trainer = build_trainer(run, plan, ranks, mesh, precision, meter, task_factory, compile=compile)

    # 3. The newest checkpoint, or the initial weights.
    get_tensors = partial(_state_tensors, trainer)
    memory = open_memory_copies(run, ranks, get_tensors)
    load = partial(_load_state, trainer, get_tensors, memory)
    progress = load()
    if on_model is not None:
        on_model(trainer.model)

    # 4. Copy the data to a local disk in the background, while training already reads the original.
    if config.data.local_cache is not None:
        copy_shards_in_background([source.dataset for source in run.source.sources], Path(config.data.local_cache))

    # 5. Report what is about to happen.
    start = _describe_start(trainer, precision.name)
    log_info(_summarize(run, start))
    if progress.is_complete(config):
        log_info(f"The run is complete already, with {pluralize(progress.step, 'step')}.")
        return True

    # 6. Train. After a divergence, roll back and continue, or raise the error.
    with (
        Checkpointer(run, ranks, get_tensors, trainer.optimizer, memory) as checkpointer,
        _open_metrics(run, ranks, progress, start) as write,
    ):
        while True:
            try:
                return train_loop(trainer, progress, checkpointer, stop, write)
            except DivergenceError as error:
                checkpointer.wait()
                progress = _roll_back(trainer, progress, load, error, write)


def _describe_start(trainer: Trainer, precision: str) -> dict[str, Any]:
    """Return what metrics.jsonl says about a start of the run."""
    config = trainer.run.config
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "torch": torch.__version__,
        "ranks": trainer.ranks.world,
        "device": trainer.ranks.device.type,
        "precision": precision,
        "compile": trainer.is_compiled,
        "parameters": sum(shape.numel() for shape in parameter_shapes(trainer.run.spec).values()),
        "peak_flops": trainer.meter.peak,
        "tokens_per_step": trainer.plan.tokens_per_step,
        "stages": [stage.start_step for stage in config.data.stages],
    }


def _load_state(trainer: Trainer, get_tensors: GetTensors, memory: MemoryCopies | None) -> Progress:
    """Fill model, optimizer and task from the newest checkpoint, or with their initial state; return the progress."""
    progress = resume(trainer.run, trainer.model, trainer.ranks, get_tensors, memory)
    trainer.model.synchronize_tied_weights()
    trainer.task.load_state(progress.task)
    return progress


def _state_tensors(trainer: Trainer) -> dict[str, TensorBlock]:
    """Return all tensors of a checkpoint, including those of the task, by name."""
    return checkpoint_tensors(trainer.model, trainer.optimizer) | trainer.task.tensors()


def _roll_back(
    trainer: Trainer, progress: Progress, load: Callable[[], Progress], error: DivergenceError, write: WriteMetrics
) -> Progress:
    """Load the newest checkpoint, and return the progress from which to continue at half the learning rate.

    Args:
        progress: progress of the run at the divergence.
        load: loads the newest checkpoint, and returns its progress.
        error: the divergence, which is raised again if the run cannot roll back.

    Raises:
        DivergenceError: `train.on_divergence` is `stop`, there is no checkpoint, or the factor on the learning
            rate would fall below `MIN_LR_SCALE`.
    """
    scale = progress.lr_scale / 2
    last_progress = Progress()
    if trainer.run.config.train.on_divergence == "rollback" and scale >= MIN_LR_SCALE:
        last_progress = load()
    if not last_progress.step:
        write("divergence", progress.step, action="stop")
        raise error
    log_warning(f"{error.what} Training goes back to step {last_progress.step}, at {scale:g} times the learning rate.")
    write("divergence", last_progress.step, action="rollback", diverged_step=progress.step, lr_scale=scale)
    return replace(last_progress, lr_scale=scale)


@contextmanager
def _open_metrics(run: Run, ranks: RankInfo, progress: Progress, start: dict[str, Any]) -> Iterator[WriteMetrics]:
    """Yield a function that writes lines to metrics.jsonl, after it has written the line `start`.

    On ranks other than the first, the function does nothing.

    Args:
        start: values of the line `start`.
    """
    if not ranks.is_first:
        yield lambda *_, **__: None
        return
    step = progress.step or None
    trackers = Trackers(run.folder, run.config, step)
    is_evaluated = not progress.evaluation_due
    with MetricsFile(
        run.folder / "metrics.jsonl", resume_step=step, is_evaluated=is_evaluated, trackers=trackers
    ) as metrics:
        metrics.write("start", progress.step, **start, resumed_from=step)
        yield metrics.write


def _summarize(run: Run, start: dict[str, Any]) -> str:
    """Return one line that describes the run: model, parameters, ranks, steps, tokens and epochs."""
    steps = run.config.train.steps
    tokens_per_step = start["tokens_per_step"]
    epochs = count_epochs(run.config, run.source)
    epoch_texts = [f"{count:.2f} epochs" + (f" of {name}" if len(epochs) > 1 else "") for name, _, count in epochs]
    shapes = parameter_shapes(run.spec)
    num_trained = sum(shape.numel() for name, shape in shapes.items() if is_trained(name, run.spec))
    trained_text = f" ({format_rounded(num_trained)} of them trained)" if num_trained < start["parameters"] else ""
    return (
        f"{run.config.name}: {run.spec.family}, {format_rounded(start['parameters'])} parameters{trained_text}, "
        f"{pluralize(start['ranks'], 'rank')} on {start['device']} in {start['precision']}"
        f"{', compiled' if start['compile'] else ''}; {pluralize(steps, 'step')} of "
        f"{pluralize(tokens_per_step, 'token')}, {format_rounded(steps * tokens_per_step)} in all "
        f"({', '.join(epoch_texts) or 'which the model generates'})."
    )


def build_trainer(
    run: Run,
    plan: BatchPlan,
    ranks: RankInfo,
    mesh: DeviceMesh,
    precision: Precision,
    meter: ThroughputMeter,
    task_factory: TaskFactory,
    *,
    compile: bool,
) -> Trainer:
    """Build model, optimizer and task, and run them once on a real micro-batch.

    If compilation fails, it logs why, and builds all of them again without compilation.

    Args:
        compile: whether to compile blocks and loss.

    Raises:
        JinguError: a micro-batch of this rank does not fit into memory.
    """
    # 1. Build, then shorten the timeout of collectives to that of training.
    task = task_factory.create(run, mesh, compile)
    model, optimizer = build_model_and_optimizer(run, mesh, precision, compile=compile)
    trainer = Trainer(run, plan, ranks, task, model, optimizer, meter, compile)
    set_group_timeouts(COLLECTIVE_TIMEOUT)
    # 2. Try. Errors that are not the compiler's are raised.
    if compile:
        log_info("Compiling; the first step takes a while.")
    try:
        _dry_run(trainer, mesh)
        return trainer
    except RuntimeError as error:
        if not (compile and raised_by_compiler(error)):
            raise
        log_info(f"torch.compile failed ({_first_line(error)}); training continues without it.")
    # 3. Build again without compilation. Free the first model before the second one is built.
    torch.compiler.reset()
    del trainer, model, optimizer, task
    return build_trainer(run, plan, ranks, mesh, precision, meter, task_factory, compile=False)


def build_model_and_optimizer(
    run: Run, mesh: DeviceMesh, precision: Precision, *, compile: bool
) -> tuple[ParallelModel, ShardedOptimizer]:
    """Return this rank's part of the model, with initial weights from the run's seed, and its optimizer."""
    config = run.config
    offload = config.parallel.offload
    disk = None
    if isinstance(offload, DiskOffloadSettings):
        disk = DiskStorage(Path(offload.path or run.folder / "offload"))

    layout = training_layout(config, compile=compile)
    base = keep_base(config, run.spec, torch.device(mesh.device_type))
    model = materialize(run.spec, mesh, layout, precision, config.seed, prepare=base, disk=disk)
    return model, build_optimizer(optimizer_settings(config), model, disk)


def training_layout(config: RunConfig, *, compile: bool) -> Layout:
    """Return the layout that the settings of a run describe."""
    return Layout(config.parallel, config.train.activation_checkpointing, compile, config.train.mixer_kernels)


def _dry_run(trainer: Trainer, mesh: DeviceMesh) -> None:
    """Run forward and backward once on a real micro-batch, so that compiler and memory fail before training starts.

    Raises:
        JinguError: one micro-batch does not fit into device memory.
    """
    plan = trainer.plan
    batch = trainer.task.batch(0, data_rank(mesh) * plan.rows_per_rank, plan.micro_batch_size)
    try:
        trainer.model.dry_run(to_device(batch, trainer.ranks.device), trainer.task.loss)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        length = trainer.run.config.batch.sequence_length
        raise JinguError(
            f"one micro-batch of {plan.micro_batch_size} × {length} tokens does not fit into the device's memory "
            f"({_first_line(error)}).",
            fix="Lower batch.micro_batch_size, or set train.activation_checkpointing.type=full or "
            "parallel.zero_stage=3.",
        ) from None


def should_compile(config: RunConfig, mesh: DeviceMesh, training_seconds: float) -> bool:
    """Return whether to compile, by `train.compile`; `auto` compiles if the run is long enough to benefit.

    Nothing is compiled if there is no compiler or the pipeline schedule does not support it.

    Args:
        training_seconds: rough estimate of how long the run takes.
    """
    if not config.train.uses_compiler(training_seconds):
        return False
    if splits_backward(config.parallel, mesh["pipeline"].size()):
        schedule = config.parallel.pipeline_schedule
        obstacle = f"The schedule {schedule} splits the backward pass, which compiled blocks do not support"
    elif not has_compiler(torch.device(mesh.device_type)):
        obstacle = "train.compile is on, but this machine has no compiler"
    else:
        return True
    if config.train.compile is True:
        log_info(f"{obstacle}; training continues without it.")
    return False


def check_async_tensor_parallel(settings: ParallelSettings, device_type: str, *, compile: bool) -> None:
    """Raise JinguError if asynchronous tensor parallelism is set, but the run does not compile or does not use CUDA."""
    if not settings.async_tensor_parallel or (compile and device_type == "cuda"):
        return
    where = "parallel.async_tensor_parallel"
    if device_type != "cuda":
        raise JinguError(f"it needs CUDA, and the run computes on {device_type}.", where=where, fix="Leave it out.")
    fix = "Set train.compile to true, or leave it out."
    raise JinguError("it is a part of compiled blocks, and nothing is compiled.", where=where, fix=fix)


def _first_line(error: Exception) -> str:
    """Return the first line of an error's message, or the name of its type if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
