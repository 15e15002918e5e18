"""Build what a run trains: the model on its mesh, its optimizer and its task, compiled where that pays."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from jingu.compat.torch import raised_by_compiler
from jingu.config.batch_plan import BatchPlan
from jingu.config.schema import RunConfig
from jingu.config.sections.parallel import DiskOffloadSettings
from jingu.errors import JinguError
from jingu.parallel.layout import Layout, Precision
from jingu.parallel.materialize import materialize
from jingu.parallel.mesh import data_rank
from jingu.parallel.offload import DiskStorage
from jingu.parallel.pipeline import ParallelModel
from jingu.parallel.sharding import local_tensor
from jingu.parallel.stages import SPLIT_BACKWARD_SCHEDULES
from jingu.runtime.device import has_compiler, is_out_of_memory, total_memory
from jingu.runtime.log import log_info
from jingu.runtime.ranks import RankInfo
from jingu.training.batch_transforms import to_device
from jingu.training.loop import Trainer
from jingu.training.optimizer import build_optimizer
from jingu.training.run import Run
from jingu.training.task import TaskFactory
from jingu.training.throughput import ThroughputMeter

# Time to compile the blocks and the loss of a model on CPU; docs/log.md has the measurements.
COMPILE_SECONDS = 30.0
# Share of a run's time that compiled blocks save, at least.
COMPILE_SAVING = 0.05


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
    """Build model, optimizer and task, and try them once on a real micro-batch. If the compiler fails, build them again
    without it."""
    task = task_factory.create(run, mesh, compile)
    model, optimizer = build_model_and_optimizer(run, mesh, precision, compile=compile)
    trainer = Trainer(run, plan, ranks, task, model, optimizer, meter, compile)
    if compile:
        log_info("Compiling; the first step takes a while.")
    try:
        _dry_run(trainer, mesh)
        return trainer
    except RuntimeError as error:
        if not (compile and raised_by_compiler(error)):
            raise
        log_info(f"torch.compile failed ({_first_line(error)}); training continues without it.")
    # Free the first model before the second one is built.
    torch.compiler.reset()
    del trainer, model, optimizer, task
    return build_trainer(run, plan, ranks, mesh, precision, meter, task_factory, compile=False)


def build_model_and_optimizer(
    run: Run, mesh: DeviceMesh, precision: Precision, *, compile: bool
) -> tuple[ParallelModel, torch.optim.Optimizer]:
    """Return this rank's part of the model, with initial weights, and its optimizer."""
    config = run.config
    offload = config.parallel.offload
    disk = None
    if isinstance(offload, DiskOffloadSettings):
        disk = DiskStorage(Path(offload.path or run.folder / "offload"))

    def check(model: ParallelModel) -> None:
        if offload.type == "none":
            _check_memory(model, config, torch.device(mesh.device_type))

    layout = training_layout(config, compile=compile)
    model = materialize(run.spec, mesh, layout, precision, config.seed, check=check, disk=disk)
    return model, build_optimizer(config.optimizer, model, disk)


def training_layout(config: RunConfig, *, compile: bool) -> Layout:
    """Return the layout that the settings of a run describe."""
    return Layout(config.parallel, config.train.activation_checkpointing, compile)


def train_state_bytes(model: ParallelModel, config: RunConfig) -> dict[str, int]:
    """Return the bytes of what a rank trains, by purpose.

    Args:
        model: the rank's part; on the meta device, nothing is allocated.
    """
    optimizer = build_optimizer(config.optimizer, model)
    parameters = [parameter for stage in model.stages for parameter in stage.parameters()]
    tensors = {
        "weights": parameters,
        "gradients": [parameter for parameter in parameters if parameter.requires_grad],
        "optimizer state": [tensor for state in optimizer.state.values() for tensor in state.values()],
    }
    return {purpose: sum(local_tensor(tensor).nbytes for tensor in group) for purpose, group in tensors.items()}


def _check_memory(model: ParallelModel, config: RunConfig, device: torch.device) -> None:
    """Raise JinguError if the device cannot hold what this rank trains, before the system kills the process for it."""
    needed = sum(train_state_bytes(model, config).values())
    available = total_memory(device)
    if needed > available:
        owner = "the card" if device.type == "cuda" else "this machine"
        raise JinguError(
            f"weights, gradients and optimizer state of one rank take {needed / 2**30:,.1f} GiB, and {owner} has "
            f"{available / 2**30:,.1f} GiB of memory.",
            where="model",
            fix="Choose a smaller model, share it among more ranks, or set parallel.offload; `jingu config show FILE "
            "--processes N` reports what a rank takes.",
        )


def _dry_run(trainer: Trainer, mesh: DeviceMesh) -> None:
    """Run forward and backward once on a real micro-batch: the compiler and the memory fail now or never.

    Raises:
        JinguError: one micro-batch does not fit into the device's memory.
    """
    plan = trainer.plan
    batch = trainer.task.batch(0, data_rank(mesh) * plan.rows_per_rank, plan.micro_batch_size)
    try:
        trainer.model.rehearse(to_device(batch, trainer.ranks.device), trainer.task.loss)
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
    """Return whether to compile: as `train.compile` says; `auto`, if there is a compiler and the run is long enough.

    Args:
        training_seconds: rough estimate of how long the run takes.
    """
    setting = config.train.compile
    schedule = config.parallel.pipeline_schedule
    if setting is False:
        return False
    if setting == "auto" and training_seconds * COMPILE_SAVING < COMPILE_SECONDS:
        return False
    if mesh["pipeline"].size() > 1 and schedule in SPLIT_BACKWARD_SCHEDULES:
        obstacle = f"The schedule {schedule} splits the backward pass, which compiled blocks do not support"
    elif not has_compiler(torch.device(mesh.device_type)):
        obstacle = "train.compile is on, but this machine has no compiler"
    else:
        return True
    if setting is True:
        log_info(f"{obstacle}; training continues without it.")
    return False


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
