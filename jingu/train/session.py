"""A session of a run: everything between the opened run and the loop. Built on every start, also on a restart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from jingu import __version__
from jingu.checkpoint.memory import MemoryCopies, id_of
from jingu.checkpoint.resume import step_folder
from jingu.config.batch import BatchPlan
from jingu.config.schema import RunConfig
from jingu.config.sections.parallel import DiskOffloadSettings
from jingu.data.loader import Loader, copy_in_background
from jingu.data.objective import batches
from jingu.data.receipt import Receipt, check_receipt
from jingu.data.sources import epochs_used
from jingu.errors import JinguError, counted
from jingu.model.adapters import is_adapter, is_trained
from jingu.model.count import Shapes, flops_per_token
from jingu.model.decoder import make_model, parameter_shapes
from jingu.model.products import product_dtype
from jingu.model.spec import ModelSpec
from jingu.parallel.apply import before_micro_batch, parallelize
from jingu.parallel.mesh import axis_sizes, build_mesh, data_rank
from jingu.parallel.offload import Disk
from jingu.parallel.pipeline import Model, Pipeline
from jingu.parallel.sharing import local, sharing_of
from jingu.parallel.stages import SPLIT_BACKWARD
from jingu.runtime.device import has_compiler, is_out_of_memory, measured_peak, total_memory
from jingu.runtime.log import say
from jingu.runtime.ranks import Ranks, all_agree
from jingu.runtime.signals import SharedStop
from jingu.train.begin import begin_with
from jingu.train.keep import Keeper, Progress, Tensors, begins_anew, go_back
from jingu.train.loop import Loop, Meter, Write, train_loop
from jingu.train.metrics import MetricsFile
from jingu.train.optimizer import BLOCK, SCALES, WHOLE, build_optimizer, named_state
from jingu.train.precision import LossScale, Precision, choose_precision, first_scale
from jingu.train.run import Run
from jingu.train.task import Pretraining, to_device
from jingu.words import rounded

COMPILE_SECONDS = 30.0
"""Compiling a model's blocks and loss takes about this long on CPU; docs/log.md has the figures."""
COMPILE_GAIN = 0.05
"""Share of a run's time that compiled blocks save, at least."""


def train_run(
    run: Run,
    plan: BatchPlan,
    ranks: Ranks,
    stop: SharedStop,
    watch: Callable[[nn.Module], None] | None = None,
) -> bool:
    """Build the model on its mesh, find the way back, and run the loop; returns whether the run is complete.

    Args:
        watch: called with the model before the first step.
    """
    config, shapes = run.config, parameter_shapes(run.spec)
    precision = choose_precision(config.precision, ranks.device)
    mesh = build_mesh(axis_sizes(config.parallel, ranks.world, run.spec), ranks.device)
    dtype = product_dtype(precision.compute, ranks.device)
    meter = Meter(_flops_of_text(run, shapes), lambda: measured_peak(ranks.device, dtype) * ranks.world)
    seconds = config.train.steps * plan.tokens_per_step * meter.flops_per_token / (0.5 * meter.peak)
    loop = _prepare(run, plan, ranks, mesh, precision, compiles=all_agree(_decide_compile(config, mesh, seconds)))
    tensors = partial(checkpoint_tensors, loop.model, loop.optimizer)
    memory = _memory(run, ranks, tensors)
    progress = _find_way_back(loop, tensors, memory)
    if isinstance(loop.model, Pipeline):
        loop.model.refresh_copies()
    if watch is not None:
        watch(loop.model)
    if config.data.local is not None:
        copy_in_background([each.dataset for each in run.source.sources], Path(config.data.local))
    start = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "torch": torch.__version__,
        "ranks": ranks.world,
        "device": ranks.device.type,
        "precision": precision.name,
        "compile": loop.compiles,
        "parameters": sum(shape.numel() for shape in shapes.values()),
        "peak_flops": meter.peak,
        "tokens_per_step": plan.tokens_per_step,
    }
    say(_summary(run, start))
    if progress.step >= config.train.steps:
        say(f"The run is complete already: {progress.step} steps are done.")
        return True
    with (
        Keeper(run, ranks, tensors, loop.optimizer, memory) as keeper,
        _metrics(run, ranks, progress, start) as write,
    ):
        return train_loop(loop, progress, keeper, meter, stop, write)


def _flops_of_text(run: Run, shapes: Shapes) -> float:
    """Training operations a token of text."""
    length, cut = run.config.batch.sequence_length, run.objective
    if cut is None or not cut.source_length:
        return flops_per_token(run.spec, shapes, length)
    return flops_per_token(run.spec, shapes, cut.target_length, cut.source_length) * cut.target_length / length


@contextmanager
def _metrics(run: Run, ranks: Ranks, progress: Progress, start: dict[str, Any]) -> Iterator[Write]:
    """What the first rank writes to its file, with the line of this start."""
    if not ranks.is_first:
        yield lambda *_, **__: None
        return
    resumed, board = progress.step or None, run.folder / "tensorboard" if run.config.train.tensorboard else None
    file = run.folder / "metrics.jsonl"
    with MetricsFile(file, resume_at=resumed, evaluated=not progress.evaluation_due, tensorboard=board) as metrics:
        metrics.write("start", progress.step, **start, resumed_from=resumed)
        yield metrics.write


def _prepare(
    run: Run, plan: BatchPlan, ranks: Ranks, mesh: DeviceMesh, precision: Precision, *, compiles: bool
) -> Loop:
    """What the loop needs, tried once on the real shapes; without the compiler, where that fails."""
    source = Loader(batches(run.source, run.objective), pinned=ranks.device.type == "cuda")
    task = Pretraining(source, run.held_out, run.spec, mesh, run.config, compiles=compiles)
    loop = Loop(run, plan, ranks, task, *_build(run, mesh, ranks, precision, compiles), compiles)
    if compiles:
        say("Compiling; the first step takes a while.")
    try:
        _dry_run(loop, mesh)
        return loop
    except RuntimeError as error:
        if not (compiles and _from_compiler(error)):
            raise
        say(f"torch.compile failed ({_first_line(error)}); going on without it.")
    torch._dynamo.reset()
    del loop
    return _prepare(run, plan, ranks, mesh, precision, compiles=False)


def _from_compiler(error: BaseException) -> bool:
    """Whether an error is the compiler's own rather than one of the code that it compiles."""
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))


def _build(
    run: Run, mesh: DeviceMesh, ranks: Ranks, precision: Precision, compiles: bool
) -> tuple[Model, torch.optim.Optimizer]:
    """The model laid out over the mesh with its initial weights, and its optimizer."""
    model = lay_out(run.spec, run.config, mesh, precision, compiles=compiles)
    offload = run.config.parallel.offload
    disk = Disk(Path(offload.path or run.folder / "offload")) if isinstance(offload, DiskOffloadSettings) else None
    if offload.type == "none":
        _refuse_too_large(model, run.config, ranks.device)
    if disk is not None:
        model._apply(disk.zeros_like)
    else:
        model.to_empty(device=torch.device("cpu") if offload.type == "host" else ranks.device)
    sharing_of(model).initialise(model, run.spec, run.config.seed)
    return model, build_optimizer(run.config.optimizer, model, disk)


def _refuse_too_large(model: Model, config: RunConfig, device: torch.device) -> None:
    """JinguError where the whole memory cannot hold what this rank trains, before the system ends it for the attempt.

    Args:
        model: on the meta device.
    """
    held = list(model.parameters())
    state = [each for kept in build_optimizer(config.optimizer, model).state.values() for each in kept.values()]
    needed = sum(local(each).nbytes for each in [*held, *(each for each in held if each.requires_grad), *state])
    there, owner = total_memory(device), "the card" if device.type == "cuda" else "this machine"
    if needed > there:
        raise JinguError(
            f"weights, gradients and optimizer state of one rank take {needed / 2**30:,.1f} GiB, and {owner} has "
            f"{there / 2**30:,.1f} GiB of memory.",
            where="model",
            fix="Choose a smaller one, share it among more ranks, or set parallel.offload; `jingu config show FILE "
            "--processes N` tells what a rank takes.",
        )


def lay_out(spec: ModelSpec, config: RunConfig, mesh: DeviceMesh, precision: Precision, *, compiles: bool) -> Model:
    """The model over the mesh, on the meta device."""
    with torch.device("meta"):
        whole = make_model(spec).to(precision.masters)
    return parallelize(
        whole,
        mesh,
        config.parallel,
        compute=precision.compute,
        reduce=precision.reduce,
        activation_checkpointing=config.train.activation_checkpointing,
        compile=compiles,
    )


def _dry_run(loop: Loop, mesh: DeviceMesh) -> None:
    """Forward and backward once on the real shapes before anything counts: compile and memory trouble shows early.

    Raises:
        JinguError: the device's memory does not hold one micro-batch.
    """
    model, task, plan, config = loop.model, loop.task, loop.plan, loop.run.config
    batch = to_device(task.batch(0, data_rank(mesh) * plan.rows_per_rank, plan.micro_size), loop.ranks.device)
    try:
        if isinstance(model, Pipeline):
            model.rehearse(batch, task.loss)
        else:
            before_micro_batch(model, config.parallel.zero, last=True)
            task.loss(model, batch).sum().backward()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise JinguError(
            f"one micro-batch of {plan.micro_size} × {config.batch.sequence_length} tokens does not fit into "
            f"the device's memory ({_first_line(error)}).",
            fix="Set a smaller batch.micro_size, train.activation_checkpointing.type=full, or parallel.zero=3.",
        ) from None
    model.zero_grad(set_to_none=True)


def _memory(run: Run, ranks: Ranks, tensors: Tensors) -> MemoryCopies | None:
    """The run's copies in main memory, where its configuration asks for them.

    Raises:
        JinguError: there cannot be any; or there are some, and the run must not go on.
    """
    settings = run.config.checkpoint.memory
    if not settings.every:
        return None
    memory = MemoryCopies(Path(settings.folder), id_of(run.checkpoints, ranks.is_first), tensors)
    if run.config.checkpoint.resume == "never" and memory.steps():
        raise JinguError(
            f"the run is in memory at step {memory.steps()[-1]}, and checkpoint.resume is never.",
            where=run.folder,
            fix="Set checkpoint.resume=auto to go on, or choose another name (name=...).",
        )
    return memory


def _find_way_back(loop: Loop, tensors: Tensors, memory: MemoryCopies | None) -> Progress:
    """Load the newest good checkpoint of the run, if it has any, and say which were passed over and why; else the
    weights that it begins with.

    Raises:
        JinguError: there are checkpoints, and none of them is good.
    """
    run, model = loop.run, loop.model
    state = go_back(run, loop.ranks, tensors, memory, whole=not isinstance(model, Pipeline))
    first = run.config.initialize.from_
    if first is not None and (state is None or model.spec.adapter is not None):  # of which checkpoints hold no weights
        begin_with(model, run.config, run.tokenizer, adapters=state is None)
    if state is None:
        if first is not None:
            say(f"Beginning with the weights of {first}.")
        return Progress(loss_scale=first_scale(run.config.precision))
    kept = state["progress"]
    fresh = " with a fresh optimizer" if begins_anew(run, state) else ""
    say(f"Going on from step {kept['step']}{fresh}.")
    parts = {"loss_scale": LossScale(**kept["loss_scale"]), "receipt": Receipt(**kept["receipt"])}
    progress = Progress(**{**kept, **parts})
    if not run.going.fresh_optimizer:
        progress.fresh_since = None
    elif fresh:
        progress.fresh_since = progress.step
    else:
        say(
            f"The optimizer is the one that began anew at step {progress.fresh_since}; "
            "after a checkpoint without --fresh-optimizer it can be asked for again."
        )
    if not run.going.other_samples:
        check_receipt(progress.receipt, run.source, step_folder(run.checkpoints, progress.step))
    return progress


def checkpoint_tensors(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Everything a checkpoint holds, by logical name: of a model with adapters these alone; of a pipeline, what the
    stages of this rank hold."""
    sharing, adapted = sharing_of(model), model.spec.adapter is not None
    tensors = {
        f"model/{name}": sharing.logical(name, parameter)
        for name, parameter in model.named_parameters()
        if is_adapter(name) or not adapted
    }
    for key, tensor in named_state(optimizer, model):
        slot, _, name = key.partition("/")
        block = BLOCK if slot in SCALES else 1
        tensors[f"optimizer/{key}"] = sharing.logical(name, tensor, whole=slot in WHOLE, block=block)
    return tensors


def _decide_compile(config: RunConfig, mesh: DeviceMesh, training_seconds: float) -> bool:
    """`train.compile`; auto: where a compiler is present and the run is long enough to earn it."""
    wanted, schedule = config.train.compile, config.parallel.schedule
    if wanted is False or (wanted == "auto" and training_seconds * COMPILE_GAIN < COMPILE_SECONDS):
        return False
    reason = None
    if mesh["pipeline"].size() > 1 and schedule in SPLIT_BACKWARD:
        reason = f"A compiled block cannot split its backward pass ({schedule}); going on without."
    elif not has_compiler(torch.device(mesh.device_type)):
        reason = "train.compile is on, but there is no compiler here; going on without it."
    if reason is not None and wanted is True:
        say(reason)
    return reason is None


def _summary(run: Run, start: dict[str, Any]) -> str:
    steps, a_step = run.config.train.steps, start["tokens_per_step"]
    used = epochs_used(run.config, run.source)
    epochs = ", ".join(f"{count:.2f} epochs" + (f" of {name}" if len(used) > 1 else "") for name, _, count in used)
    trained = sum(shape.numel() for name, shape in parameter_shapes(run.spec).items() if is_trained(name, run.spec))
    part = f" ({rounded(trained)} of them trained)" if trained < start["parameters"] else ""
    return (
        f"{run.config.name}: {run.spec.family}, {rounded(start['parameters'])} parameters{part}, "
        f"{counted(start['ranks'], 'rank')} on {start['device']} in {start['precision']}"
        f"{', compiled' if start['compile'] else ''}; {counted(steps, 'step')} of {counted(a_step, 'token')}, "
        f"{rounded(steps * a_step)} in all ({epochs})."
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
