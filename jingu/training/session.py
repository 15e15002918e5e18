"""A training session: from the opened run to the end of the loop. Every start of a run, also a restart, is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from jingu import __version__
from jingu.config.batch_plan import BatchPlan
from jingu.data.local_cache import copy_shards_in_background
from jingu.data.open_sources import count_epochs
from jingu.errors import pluralize
from jingu.formatting import format_rounded
from jingu.model.adapter_layers import is_trained
from jingu.model.decoder import parameter_shapes
from jingu.model.matmul_kernels import matmul_dtype
from jingu.parallel.mesh import build_mesh, resolve_axis_sizes
from jingu.parallel.pipeline import ParallelModel
from jingu.runtime.device import measure_peak_flops
from jingu.runtime.log import log_info
from jingu.runtime.ranks import RankInfo, all_ranks_agree
from jingu.runtime.signals import CollectiveStop
from jingu.training.checkpointing import Checkpointer, Progress, checkpoint_tensors
from jingu.training.loop import WriteMetrics, train_loop
from jingu.training.metrics import MetricsFile
from jingu.training.precision import choose_precision
from jingu.training.resume_run import open_memory_copies, resume
from jingu.training.run import Run
from jingu.training.task import TaskFactory
from jingu.training.throughput import ThroughputMeter, training_flops_per_token
from jingu.training.trainer import build_trainer, should_compile


def train_run(
    run: Run,
    plan: BatchPlan,
    ranks: RankInfo,
    stop: CollectiveStop,
    task_factory: TaskFactory,
    on_model: Callable[[ParallelModel], None] | None = None,
) -> bool:
    """Build everything, resume, and run the loop.

    Args:
        on_model: called with the model before the first step.

    Returns:
        Whether the run is complete.
    """
    config = run.config

    # 1. The mesh of ranks, and what it can compute in a second.
    precision = choose_precision(config.precision, ranks.device)
    mesh = build_mesh(resolve_axis_sizes(config.parallel, ranks.world, run.spec), ranks.device)
    dtype = matmul_dtype(precision.compute, ranks.device)
    meter = ThroughputMeter(
        training_flops_per_token(run), lambda: measure_peak_flops(ranks.device, dtype) * ranks.world
    )

    # 2. Model, optimizer and task. Half of the peak is what training reaches, roughly.
    tokens = config.train.steps * plan.tokens_per_step
    training_seconds = tokens * meter.flops_per_token / (0.5 * meter.peak)
    compile = all_ranks_agree(should_compile(config, mesh, training_seconds))
    trainer = build_trainer(run, plan, ranks, mesh, precision, meter, task_factory, compile=compile)

    # 3. The newest checkpoint, or the initial weights.
    get_tensors = partial(checkpoint_tensors, trainer.model, trainer.optimizer)
    memory = open_memory_copies(run, ranks, get_tensors)
    progress = resume(trainer, get_tensors, memory)
    trainer.model.synchronize_tied_weights()
    if on_model is not None:
        on_model(trainer.model)

    # 4. A local copy of the data, made while training reads the original.
    if config.data.local_cache is not None:
        copy_shards_in_background([source.dataset for source in run.source.sources], Path(config.data.local_cache))

    # 5. Report what is about to happen.
    start = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "torch": torch.__version__,
        "ranks": ranks.world,
        "device": ranks.device.type,
        "precision": precision.name,
        "compile": trainer.is_compiled,
        "parameters": sum(shape.numel() for shape in parameter_shapes(run.spec).values()),
        "peak_flops": meter.peak,
        "tokens_per_step": plan.tokens_per_step,
    }
    log_info(_summarize(run, start))
    if progress.step >= config.train.steps:
        log_info(f"The run is complete already, with {pluralize(progress.step, 'step')}.")
        return True

    # 6. Train.
    with (
        Checkpointer(run, ranks, get_tensors, trainer.optimizer, memory) as checkpointer,
        _open_metrics(run, ranks, progress, start) as write,
    ):
        return train_loop(trainer, progress, checkpointer, stop, write)


@contextmanager
def _open_metrics(run: Run, ranks: RankInfo, progress: Progress, start: dict[str, Any]) -> Iterator[WriteMetrics]:
    """Open metrics.jsonl on the first rank, and write the line of this start."""
    if not ranks.is_first:
        yield lambda *_, **__: None
        return
    step = progress.step or None
    tensorboard = run.folder / "tensorboard" if run.config.train.tensorboard else None
    is_evaluated = not progress.evaluation_due
    with MetricsFile(
        run.folder / "metrics.jsonl", resume_step=step, is_evaluated=is_evaluated, tensorboard=tensorboard
    ) as metrics:
        metrics.write("start", progress.step, **start, resumed_from=step)
        yield metrics.write


def _summarize(run: Run, start: dict[str, Any]) -> str:
    """Return one line that says what is trained, on what, and for how long."""
    steps = run.config.train.steps
    tokens_per_step = start["tokens_per_step"]
    epochs = count_epochs(run.config, run.source)
    epoch_texts = [f"{count:.2f} epochs" + (f" of {name}" if len(epochs) > 1 else "") for name, _, count in epochs]
    shapes = parameter_shapes(run.spec)
    trained = sum(shape.numel() for name, shape in shapes.items() if is_trained(name, run.spec))
    trained_text = f" ({format_rounded(trained)} of them trained)" if trained < start["parameters"] else ""
    return (
        f"{run.config.name}: {run.spec.family}, {format_rounded(start['parameters'])} parameters{trained_text}, "
        f"{pluralize(start['ranks'], 'rank')} on {start['device']} in {start['precision']}"
        f"{', compiled' if start['compile'] else ''}; {pluralize(steps, 'step')} of "
        f"{pluralize(tokens_per_step, 'token')}, {format_rounded(steps * tokens_per_step)} in all "
        f"({', '.join(epoch_texts)})."
    )
