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
from jingu.checkpoint.hub import parameter_shapes
from jingu.checkpoint.memory import MemoryCopies, id_of
from jingu.checkpoint.remote import Place
from jingu.checkpoint.resume import copies_of, step_folder
from jingu.checkpoint.store import load
from jingu.config.batch import BatchPlan
from jingu.config.schema import RunConfig
from jingu.config.sections.parallel import DiskOffloadSettings
from jingu.data.loader import Loader, copy_in_background
from jingu.data.objective import batches
from jingu.data.receipt import Receipt, check_receipt
from jingu.data.sources import epochs_used
from jingu.errors import JinguError
from jingu.model.adapters import is_adapter
from jingu.model.count import Shapes, flops_per_token
from jingu.model.decoder import make_model
from jingu.model.products import product_dtype
from jingu.model.spec import Lora, ModelSpec
from jingu.parallel.apply import before_micro_batch, parallelize
from jingu.parallel.mesh import axis_sizes, build_mesh, data_rank
from jingu.parallel.offload import Disk
from jingu.parallel.pipeline import Model, Pipeline
from jingu.parallel.rows import Rows
from jingu.parallel.sharing import sharing_of
from jingu.parallel.stages import SPLIT_BACKWARD
from jingu.parallel.tensor import Vocabulary
from jingu.runtime.device import has_compiler, measured_peak
from jingu.runtime.log import say
from jingu.runtime.ranks import Ranks, all_agree
from jingu.runtime.signals import SharedStop
from jingu.train.begin import begin_with
from jingu.train.eight_bits import BLOCK, SCALES
from jingu.train.keep import Keeper, go_back
from jingu.train.loop import Loop, short, train_loop
from jingu.train.loss import ChunkLoss, chunk_loss, divided_chunk_loss
from jingu.train.matrices import WHOLE
from jingu.train.metrics import MetricsFile
from jingu.train.optimizer import build_optimizer, named_state
from jingu.train.precision import LossScale, Precision, choose_precision, first_scale
from jingu.train.progress import Progress
from jingu.train.run import Run
from jingu.train.task import Chance, HeldOut, Pretraining, Task, to_device

COMPILE_SECONDS = 30.0
"""Compiling a model's blocks and loss takes about this long on CPU; docs/log.md has the figures."""
COMPILE_GAIN = 0.05
"""Share of a run's time that compiled blocks save, at least."""


def train_run(
    run: Run,
    plan: BatchPlan,
    ranks: Ranks,
    stop: SharedStop,
    watch: Callable[[nn.Module, DeviceMesh], None] | None = None,
) -> bool:
    """Build the model on its mesh, find the way back, and run the loop; returns whether the run is complete.

    Args:
        watch: called with model and mesh before the first step.
    """
    config = run.config
    precision = choose_precision(config.precision, ranks.device)
    mesh = build_mesh(axis_sizes(config.parallel, ranks.world, run.spec), ranks.device)

    def measure_peak() -> float:
        return measured_peak(ranks.device, product_dtype(precision.compute, ranks.device)) * ranks.world

    peak = measure_peak()
    shapes = parameter_shapes(run.spec)
    parameters = sum(shape.numel() for shape in shapes.values())
    flops = _flops_of_text(run, shapes)
    seconds = config.train.steps * plan.tokens_per_step * flops / (0.5 * peak)
    splits = mesh["pipeline"].size() > 1 and config.parallel.schedule in SPLIT_BACKWARD
    wanted = all_agree(_decide_compile(config, ranks.device, seconds, splits_backward=splits))
    task, model, optimizer, compiles = _prepare(run, mesh, plan, ranks, precision, compiles=wanted)
    memory = _memory(run, model, optimizer, ranks)
    progress = _find_way_back(run, model, optimizer, ranks, memory)
    if isinstance(model, Pipeline):
        model.refresh_copies()
    if watch is not None:
        watch(model, mesh)
    if config.data.local is not None:
        copy_in_background([each.dataset for each in run.source.sources], Path(config.data.local))
    say(_summary(run, plan, ranks, precision, compiles, parameters))
    if progress.step >= config.train.steps:
        say(f"The run is complete already: {progress.step} steps are done.")
        return True
    start = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "torch": torch.__version__,
        "ranks": ranks.world,
        "device": ranks.device.type,
        "precision": precision.name,
        "compile": compiles,
        "parameters": parameters,
        "peak_flops": peak,
        "tokens_per_step": plan.tokens_per_step,
    }
    with (
        Keeper(run, ranks, lambda: checkpoint_tensors(model, optimizer), optimizer, memory) as keeper,
        _metrics(run, ranks, progress, start) as metrics,
    ):
        loop = Loop(
            run=run,
            task=task,
            model=model,
            optimizer=optimizer,
            mesh=mesh,
            plan=plan,
            ranks=ranks,
            flops_per_token=flops,
            peak_flops=peak,
            measure_peak=measure_peak,
            keeper=keeper,
        )
        return train_loop(loop, progress, stop, metrics)


def _flops_of_text(run: Run, shapes: Shapes) -> float:
    """Training operations a token of text."""
    length, cut = run.config.batch.sequence_length, run.objective
    if cut is None or not cut.source_length:
        return flops_per_token(run.spec, shapes, length)
    return flops_per_token(run.spec, shapes, cut.target_length, cut.source_length) * cut.target_length / length


@contextmanager
def _metrics(run: Run, ranks: Ranks, progress: Progress, start: dict[str, Any]) -> Iterator[MetricsFile | None]:
    """The first rank's file, with the line of this start; None on the others."""
    if not ranks.is_first:
        yield None
        return
    resumed, board = progress.step or None, run.folder / "tensorboard" if run.config.train.tensorboard else None
    file = run.folder / "metrics.jsonl"
    with MetricsFile(file, resume_at=resumed, evaluated=not progress.evaluation_due, tensorboard=board) as metrics:
        metrics.write("start", progress.step, **start, resumed_from=resumed)
        yield metrics


def _prepare(
    run: Run, mesh: DeviceMesh, plan: BatchPlan, ranks: Ranks, precision: Precision, *, compiles: bool
) -> tuple[Task, Model, torch.optim.Optimizer, bool]:
    """Task, model and optimizer, tried once on the real shapes; and whether they are compiled."""
    length, apart = run.config.batch.sequence_length, run.config.data.keeps_apart
    rows = None
    if run.held_out is not None:
        rows = HeldOut(run.held_out, length, run.objective, apart, run.held_out_rows, run.spec)
    source = Loader(batches(run.source, run.objective), pinned=ranks.device.type == "cuda")
    task = pretraining(source, rows, run.spec, mesh, run.config, compiles=compiles)
    model, optimizer = _build(run, mesh, ranks, precision, compiles)
    if compiles:
        say("Compiling; the first step takes a while.")
    try:
        _dry_run(run, task, model, mesh, plan, ranks)
        return task, model, optimizer, compiles
    except RuntimeError as error:
        if not (compiles and _from_compiler(error)):
            raise
        say(f"torch.compile failed ({_first_line(error)}); going on without it.")
    torch._dynamo.reset()
    del model, optimizer
    return _prepare(run, mesh, plan, ranks, precision, compiles=False)


def _from_compiler(error: BaseException) -> bool:
    """Whether an error is the compiler's own rather than one of the code that it compiles."""
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))


def pretraining(
    source: Loader,
    rows: HeldOut | None,
    spec: ModelSpec,
    mesh: DeviceMesh,
    config: RunConfig | None = None,
    *,
    compiles: bool = False,
) -> Pretraining:
    """The task of pretraining, for what this rank computes of the loss."""
    config = config or RunConfig()
    vocabulary, train = Vocabulary.of(mesh, spec.vocabulary), config.train

    def chunk(smoothing: float, z: float) -> ChunkLoss:
        made: ChunkLoss = partial(chunk_loss, smoothing=smoothing, z=z) if smoothing or z else chunk_loss
        if mesh["tensor"].size() > 1:
            made = divided_chunk_loss(vocabulary.start, vocabulary.group, spec.vocabulary, smoothing, z)
        # The last chunk of a batch has any number of rows: that dim is left open once a second number has come.
        return torch.compile(made) if compiles else made

    drops = isinstance(spec.adapter, Lora) and spec.adapter.dropout > 0
    return Pretraining(
        source,
        rows,
        chunk(train.label_smoothing, train.z_loss),
        vocabulary.most,
        Rows(mesh).of_context,
        chunk(0.0, 0.0),
        Chance(config.seed, config.batch.global_size, train.noise, drops),
        spec,
        config.data.rows_alone,
    )


def _build(
    run: Run, mesh: DeviceMesh, ranks: Ranks, precision: Precision, compiles: bool
) -> tuple[Model, torch.optim.Optimizer]:
    """The model laid out over the mesh with its initial weights, and its optimizer."""
    with torch.device("meta"):
        whole = make_model(run.spec).to(precision.masters)
    model = parallelize(
        whole,
        mesh,
        run.config.parallel,
        compute=precision.compute,
        reduce=precision.reduce,
        activation_checkpointing=run.config.train.activation_checkpointing,
        compile=compiles,
    )
    offload = run.config.parallel.offload
    disk = Disk(Path(offload.path or run.folder / "offload")) if isinstance(offload, DiskOffloadSettings) else None
    if disk is not None:
        model._apply(disk.zeros_like)
    else:
        model.to_empty(device=torch.device("cpu") if offload.type == "host" else ranks.device)
    sharing_of(model).initialise(model, run.spec, run.config.seed)
    return model, build_optimizer(run.config.optimizer, model, disk)


def _dry_run(run: Run, task: Task, model: Model, mesh: DeviceMesh, plan: BatchPlan, ranks: Ranks) -> None:
    """Forward and backward once on the real shapes before anything counts: compile and memory trouble shows early.

    Raises:
        JinguError: the device's memory does not hold one micro-batch.
    """
    batch = to_device(task.batch(0, data_rank(mesh) * plan.rows_per_rank, plan.micro_size), ranks.device)
    try:
        if isinstance(model, Pipeline):
            model.rehearse(batch, task.loss)
        else:
            before_micro_batch(model, run.config.parallel.zero, last=True)
            task.loss(model, batch).sum().backward()
    except torch.OutOfMemoryError as error:
        raise JinguError(
            f"one micro-batch of {plan.micro_size} × {run.config.batch.sequence_length} tokens does not fit into "
            f"the device's memory ({_first_line(error)}).",
            fix="Set a smaller batch.micro_size, train.activation_checkpointing.type=full, or parallel.zero=3.",
        ) from None
    model.zero_grad(set_to_none=True)


def _memory(run: Run, model: Model, optimizer: torch.optim.Optimizer, ranks: Ranks) -> MemoryCopies | None:
    """The run's copies in main memory, where its configuration asks for them.

    Raises:
        JinguError: there cannot be any; or there are some, and the run must not go on.
    """
    settings = run.config.checkpoint.memory
    if not settings.every:
        return None
    name = id_of(run.checkpoints, ranks.is_first)
    memory = MemoryCopies(Path(settings.folder), name, lambda: checkpoint_tensors(model, optimizer))
    if run.config.checkpoint.resume == "never" and memory.steps():
        raise JinguError(
            f"the run is in memory at step {memory.steps()[-1]}, and checkpoint.resume is never.",
            where=run.folder,
            fix="Set checkpoint.resume=auto to go on, or choose another name (name=...).",
        )
    return memory


def _find_way_back(
    run: Run, model: Model, optimizer: torch.optim.Optimizer, ranks: Ranks, memory: MemoryCopies | None
) -> Progress:
    """Load the newest good checkpoint of the run, if it has any, and say which were passed over and why; else the
    weights that it begins with.

    Raises:
        JinguError: there are checkpoints, and none of them is good.
    """

    def fill(folder: Place, state: dict[str, Any]) -> None:
        tensors, prefix = checkpoint_tensors(model, optimizer), ""
        if _begins_anew(run, state):
            prefix = "model/"
            tensors = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        load(folder, tensors, prefix=prefix, whole=not isinstance(model, Pipeline), agree=all_agree)

    state = go_back(run.checkpoints, ranks, fill, copies_of(run.config), memory)
    first = run.config.initialize.from_
    if first is not None and (state is None or model.spec.adapter is not None):  # of which checkpoints hold no weights
        begin_with(model, run.config, run.tokenizer, adapters=state is None)
    if state is None:
        if first is not None:
            say(f"Beginning with the weights of {first}.")
        return Progress(loss_scale=first_scale(run.config.precision))
    kept = state["progress"]
    fresh = " with a fresh optimizer" if _begins_anew(run, state) else ""
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


def _begins_anew(run: Run, state: dict[str, Any]) -> bool:
    """Whether the optimizer does: a command that asks for it and is started again, as launchers do, goes on with its
    own steps."""
    return run.going.fresh_optimizer and state["progress"].get("fresh_since") is None


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


def _decide_compile(config: RunConfig, device: torch.device, training_seconds: float, *, splits_backward: bool) -> bool:
    """`train.compile`; auto: where a compiler is present and the run is long enough to earn it."""
    wanted = config.train.compile
    if splits_backward:
        if wanted is True:
            say(f"A compiled block cannot split its backward pass ({config.parallel.schedule}); going on without.")
        return False
    if wanted is False or (wanted == "auto" and training_seconds * COMPILE_GAIN < COMPILE_SECONDS):
        return False
    if not has_compiler(device):
        if wanted is True:
            say("train.compile is on, but there is no compiler here; going on without it.")
        return False
    return True


def _summary(run: Run, plan: BatchPlan, ranks: Ranks, precision: Precision, compiles: bool, parameters: int) -> str:
    steps = run.config.train.steps
    tokens = steps * plan.tokens_per_step
    used = epochs_used(run.config, run.source)
    epochs = ", ".join(f"{count:.2f} epochs" + (f" of {name}" if len(used) > 1 else "") for name, _, count in used)
    return (
        f"{run.config.name}: {run.spec.family}, {short(parameters)} parameters, {ranks.world} rank(s) on "
        f"{ranks.device.type} in {precision.name}{', compiled' if compiles else ''}; {steps} steps of "
        f"{plan.tokens_per_step:,} tokens, {short(tokens)} in all ({epochs})."
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
