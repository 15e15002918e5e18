"""Resume a run: load the newest valid checkpoint, from disk, from an address or from main memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jingu.checkpoint.manifest import CheckpointError
from jingu.checkpoint.memory_copies import MemoryCopies, run_id
from jingu.checkpoint.remote import CheckpointPath, RemotePath
from jingu.checkpoint.resume import all_steps, complete_steps, copies_url, step_folder
from jingu.checkpoint.retention import delete_leftovers
from jingu.checkpoint.save_folder import read_state
from jingu.checkpoint.store import MismatchError, load
from jingu.data.sample_hash import SampleHash, check_sample_hash
from jingu.errors import JinguError
from jingu.runtime.log import log_info
from jingu.runtime.ranks import RankInfo, all_ranks_agree, broadcast_from_first
from jingu.training.checkpointing import GetTensors, Progress
from jingu.training.initialize import load_initial_weights
from jingu.training.loop import Trainer
from jingu.training.precision import LossScale, initial_loss_scale
from jingu.training.run import Run

# Keys of `progress` in checkpoints of earlier versions, and what they are named now.
_OLD_KEYS = {"receipt": "sample_hash", "fresh_since": "optimizer_reset_step"}


def resume(trainer: Trainer, get_tensors: GetTensors, memory: MemoryCopies | None) -> Progress:
    """Load the newest valid checkpoint of the run into model and optimizer; without one, the initial weights.

    Raises:
        JinguError: the run has checkpoints, and none of them is valid; or it was trained on other samples.
    """
    run = trainer.run
    model = trainer.model
    state = load_latest_checkpoint(run, trainer.ranks, get_tensors, memory, whole=model.is_whole)
    # Checkpoints of adapters do not hold the weights beside them: these always come from the initial model.
    initial_model = run.config.initialize.from_
    if initial_model is not None and (state is None or model.spec.adapter is not None):
        load_initial_weights(model, run.config, run.tokenizer, adapters=state is None)
    if state is None:
        if initial_model is not None:
            log_info(f"Starting from the weights of {initial_model}.")
        return Progress(loss_scale=initial_loss_scale(run.config.precision))

    progress = read_progress(state)
    options = run.resume_options
    if not options.fresh_optimizer:
        log_info(f"Resuming from step {progress.step}.")
        progress.optimizer_reset_step = None
    elif resets_optimizer(run, progress):
        log_info(f"Resuming from step {progress.step} with a fresh optimizer.")
        progress.optimizer_reset_step = progress.step
    else:
        log_info(
            f"Resuming from step {progress.step}.\nThe optimizer was reset at step {progress.optimizer_reset_step}; "
            "--fresh-optimizer resets it again only after a start without that option."
        )
    if not options.allows_other_samples:
        check_sample_hash(progress.sample_hash, run.source, step_folder(run.checkpoints, progress.step))
    return progress


def read_progress(state: dict[str, Any]) -> Progress:
    """Return the progress that is stored in a checkpoint."""
    values = {_OLD_KEYS.get(key, key): value for key, value in state["progress"].items()}
    values["loss_scale"] = LossScale(**values["loss_scale"])
    values["sample_hash"] = SampleHash(**values["sample_hash"])
    return Progress(**values)


def resets_optimizer(run: Run, progress: Progress) -> bool:
    """Return whether this start resets the optimizer.

    Launchers repeat a command after a failure: --fresh-optimizer resets the optimizer once, and not again at every
    restart.
    """
    return run.resume_options.fresh_optimizer and progress.optimizer_reset_step is None


def open_memory_copies(run: Run, ranks: RankInfo, get_tensors: GetTensors) -> MemoryCopies | None:
    """Open the copies of the run in main memory, if its configuration asks for them.

    Raises:
        JinguError: the folder cannot be written; or the run has copies and may not resume.
    """
    settings = run.config.checkpoint.in_memory
    if not settings.every:
        return None
    memory = MemoryCopies(Path(settings.folder), run_id(run.checkpoints, ranks.is_first), get_tensors)
    if run.config.checkpoint.resume == "never" and memory.steps():
        raise JinguError(
            f"the run has a copy of step {memory.steps()[-1]} in memory, and checkpoint.resume is never.",
            where=run.folder,
            fix="Set checkpoint.resume=auto to resume from it, or choose another name (name=...).",
        )
    return memory


def load_latest_checkpoint(
    run: Run, ranks: RankInfo, get_tensors: GetTensors, memory: MemoryCopies | None, *, whole: bool
) -> dict[str, Any] | None:
    """Fill the run's tensors from its newest valid checkpoint; report which ones were skipped and why.

    Every byte is checked as it is read, so a checkpoint need not be read twice to be trusted. Of checkpoints of the
    same step, one in main memory comes first, then the run's own folder, then its copies elsewhere.

    Args:
        whole: whether this rank holds a part of every tensor of the model.

    Returns:
        The state besides the tensors; None if the run has no checkpoint.

    Raises:
        JinguError: there are checkpoints, and none of them is valid.
        MismatchError: a valid one holds other tensors.
    """
    copies = copies_url(run.config)
    folders = [run.checkpoints] if copies is None else [RemotePath.at(copies), run.checkpoints]
    memory_steps = [] if memory is None else memory.steps()

    # The first rank lists the candidates, in the order of their steps, and tells the others which one to try.
    candidates: list[tuple[int, int]] = []
    if ranks.is_first:
        delete_leftovers(run.checkpoints)
        steps_by_source = [*map(complete_steps, folders[:-1]), all_steps(run.checkpoints), memory_steps]
        candidates = sorted((step, source) for source, steps in enumerate(steps_by_source) for step in steps)
    has_candidates = broadcast_from_first(len(candidates))
    while broadcast_from_first(len(candidates)):
        candidate = candidates.pop() if candidates else (0, 0)
        step, source = (broadcast_from_first(value) for value in candidate)
        # Sources go from the farthest to the nearest: copies elsewhere, the run's own folder, main memory.
        in_memory = memory if source == len(folders) else None
        folder = step_folder(run.checkpoints if in_memory is not None else folders[source], step)
        try:
            if in_memory is not None:
                folder = in_memory.gather(step)
            state = _load(run, folder, get_tensors, whole=whole)
            if in_memory is not None:
                log_info(f"Step {step} is in the memory of the nodes; no checkpoint is read.")
            return state
        except MismatchError:
            raise
        except CheckpointError as error:
            # Name a checkpoint in the run's own folder by its step alone.
            name = folder.name if source == len(folders) - 1 else folder
            log_info(f"Skipping {name}{' in memory' if in_memory else ''}: {error.what}")
        finally:
            if in_memory is not None:
                in_memory.release()
    if has_candidates:
        raise JinguError(
            "the run has checkpoints, and none of them is valid.",
            where=run.checkpoints,
            fix="Restore one from a copy, or delete the folder to start the run over.",
        )
    return None


def _load(run: Run, folder: CheckpointPath, get_tensors: GetTensors, *, whole: bool) -> dict[str, Any]:
    """Fill the run's tensors from one checkpoint, and return its state.

    Raises:
        CheckpointError: on every rank, if some rank could not read it.
    """
    problem: CheckpointError | None = None
    state: dict[str, Any] = {}
    try:
        state = read_state(folder)
    except CheckpointError as error:
        problem = error
    if not all_ranks_agree(problem is None):
        raise problem or CheckpointError("another rank could not read it; its log says why.")
    # A fresh optimizer loads the weights alone: its state may be of another kind.
    prefix = "model/" if resets_optimizer(run, read_progress(state)) else ""
    tensors = {name: tensor for name, tensor in get_tensors().items() if name.startswith(prefix)}
    load(folder, tensors, prefix=prefix, whole=whole, agree=all_ranks_agree)
    return state
