"""Checkpoints of a run: what they contain, when they are saved, and how a run resumes from the newest valid one.

A run saves them in the background or while training waits, and loads them from disk, from a URL or from main memory.
"""

from __future__ import annotations

import math
import os
import platform
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from jingu.checkpoint.async_save import AsyncSaver
from jingu.checkpoint.manifest import CheckpointError
from jingu.checkpoint.memory_copies import MemoryCopies, run_id
from jingu.checkpoint.remote import CheckpointPath, RemotePath
from jingu.checkpoint.resume import all_steps, complete_steps, copies_url, step_folder
from jingu.checkpoint.retention import Retention, after_save, cost_of, delete_leftovers
from jingu.checkpoint.save_folder import read_state
from jingu.checkpoint.store import MismatchError, load, run_on_all_ranks, save
from jingu.config.schema import RunConfig
from jingu.data.sample_hash import SampleHash, check_sample_hash, extend_sample_hash
from jingu.errors import JinguError
from jingu.model.trainable import is_trained
from jingu.parallel.pipeline import ParallelModel
from jingu.parallel.sharding import TensorBlock
from jingu.plugins import plugin_versions
from jingu.runtime.collective_stop import StopDecision
from jingu.runtime.log import log_info, log_warning
from jingu.runtime.ranks import RankInfo, broadcast_from_first, gather_from_all, wait_until_all_done
from jingu.training.initialize import load_initial_weights
from jingu.training.optimizer import ShardedOptimizer, named_optimizer_state
from jingu.training.precision import LossScale, initial_loss_scale
from jingu.training.run import Run
from jingu.version import __version__

# Returns the tensors of a checkpoint, by logical name.
GetTensors = Callable[[], dict[str, TensorBlock]]


@dataclass
class Progress:
    """State of a run besides its tensors.

    It has no states of random number generators, because every random number is a function of seed and step.

    Attributes:
        step: number of steps taken.
        tokens: tokens of these steps, over all ranks.
        seconds: training time in seconds over all starts of the run, without evaluation and saving.
        loss_sum: sum of the losses since the last line of metrics.jsonl.
        loss_steps: number of losses in that sum.
        evaluation: metrics of the last evaluation.
        evaluation_due: whether a signal stopped the run after a step whose evaluation is still missing.
        loss_scale: loss scale of fp16; 1 for other precisions.
        optimizer_reset_step: step at which --fresh-optimizer reset the optimizer; None if it never did, or if the run
            has started without that option since.
        sample_hash: hash of the samples that the run was trained on.
        nonfinite_steps: number of consecutive steps, up to the last one, whose loss or gradient was not finite.
        lr_scale: factor on the learning rate, which every rollback halves.
        mean_loss: moving average of the logged losses.
        lowest_loss: the lowest value of that average.
        lowest_cost: the best value of `checkpoint.best_metric` in any evaluation, as `cost_of` returns it (lower is
            better).
        evaluations_since_best: number of evaluations since that one.
        task: state of the task, as JSON (`Task.state`).
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss_sum: float = 0.0
    loss_steps: int = 0
    evaluation: dict[str, float | None] | None = None
    evaluation_due: bool = False
    loss_scale: LossScale = field(default_factory=LossScale)
    optimizer_reset_step: int | None = None
    sample_hash: SampleHash = field(default_factory=SampleHash)
    nonfinite_steps: int = 0
    lr_scale: float = 1.0
    mean_loss: float | None = None
    lowest_loss: float | None = None
    lowest_cost: float | None = None
    evaluations_since_best: int = 0
    task: Any = None

    def add_evaluation(self, metrics: dict[str, float | None], best_metric: str) -> None:
        """Store the metrics of an evaluation, and count the evaluations since the best one."""
        self.evaluation = metrics
        cost = cost_of(best_metric, metrics)
        self.evaluations_since_best += 1
        if cost is not None and (self.lowest_cost is None or cost < self.lowest_cost):
            self.lowest_cost = cost
            self.evaluations_since_best = 0

    def is_complete(self, config: RunConfig) -> bool:
        """Return whether the run has taken all its steps, or its evaluations have stopped improving."""
        patience = config.evaluation.patience
        return self.step >= config.train.steps or 0 < patience <= self.evaluations_since_best

    def add_loss(self, loss: float) -> bool:
        """Add a logged loss to the moving average; a loss that is not finite is ignored.

        Returns:
            Whether the average has just risen above 1.3 × its lowest value + 0.3.
        """
        if not math.isfinite(loss):
            return False
        if self.mean_loss is None or self.lowest_loss is None:
            self.mean_loss = self.lowest_loss = loss
        limit = 1.3 * self.lowest_loss + 0.3
        was_high = self.mean_loss > limit
        self.mean_loss += 0.25 * (loss - self.mean_loss)
        self.lowest_loss = min(self.lowest_loss, self.mean_loss)
        return self.mean_loss > limit and not was_high


def checkpoint_tensors(model: ParallelModel, optimizer: ShardedOptimizer) -> dict[str, TensorBlock]:
    """Return all tensors of a checkpoint, by logical name.

    The names are `model/PARAMETER` and `optimizer/SLOT/PARAMETER`. A model with adapters contributes only its trained
    parameters, and a rank of a pipeline only those of its stages.
    """
    plan = model.sharding
    is_whole = model.spec.adapter is None
    tensors = {
        f"model/{name}": plan.block(name, parameter)
        for name, parameter in model.named_parameters()
        if is_whole or is_trained(name, model.spec)
    }
    for key, tensor, slot in named_optimizer_state(optimizer, model):
        name = key.partition("/")[2]
        is_replicated = slot.layout != "sharded"
        tensors[f"optimizer/{key}"] = plan.block(name, tensor, is_replicated=is_replicated, group_size=slot.group_size)
    return tensors


def library_versions() -> dict[str, str]:
    """Return the versions of jingu and of the libraries that a run depends on, by name; also of plug-ins."""
    libraries = {name: version(name) for name in ("numpy", "safetensors", "tokenizers")}
    return {"jingu": __version__, "torch": torch.__version__, **libraries, **plugin_versions()}


class Checkpointer:
    """Saves checkpoints as the section `checkpoint` of the configuration says.

    Every rank has one, and all ranks must call the same methods at the same steps.

    Args:
        get_tensors: returns the tensors of a checkpoint.
        optimizer: optimizer that changes these tensors in its steps, which wait for the copy of an asynchronous save.
        memory: copies in main memory; None if the configuration has none.
    """

    def __init__(
        self,
        run: Run,
        ranks: RankInfo,
        get_tensors: GetTensors,
        optimizer: torch.optim.Optimizer | None = None,
        memory: MemoryCopies | None = None,
    ) -> None:
        settings = run.config.checkpoint
        self._run = run
        self._ranks = ranks
        self._get_tensors = get_tensors
        self._memory = memory
        self._settings = settings
        self._retention = Retention(settings.keep_last, settings.keep_every, settings.keep_best, settings.best_metric)
        self._restart_clock(-1)
        self._versions = {"python": platform.python_version(), **library_versions()}
        if memory is not None:
            log_info(
                f"The state is copied to main memory every {settings.in_memory.every} steps, with a second copy on "
                f"another rank if there is one: up to {memory.bytes / 1e6:,.1f} MB per rank in "
                f"{settings.in_memory.folder}."
            )
        # Asynchronous saves write in the background, from a copy in shared memory. A run that saves only at its end
        # does not need them.
        self._saver: AsyncSaver | None = None
        saves_midway = 0 < settings.every < run.config.train.steps or settings.every_minutes
        if not (settings.async_save and saves_midway):
            return
        if run.config.parallel.offload.type == "disk":
            log_info("Training waits for checkpoints: a state that is offloaded to disk is not copied to memory.")
            return
        self._saver = AsyncSaver(get_tensors(), optimizer, rank=ranks.rank, ranks=ranks.world)
        log_info(
            f"Checkpoints are written in the background, from a copy of {self._saver.bytes / 1e6:,.1f} MB per rank."
        )

    # When

    def status(self) -> tuple[bool, bool]:
        """Return whether a save is due by the clock, and whether one is in progress.

        Only the first rank decides, and the loop shares both values; the other ranks return (False, False). On every
        rank this also reports a save in the background that has failed.
        """
        self._report_result(0.0)
        minutes = (time.monotonic() - self._last_save_time) / 60
        is_late = bool(self._settings.every_minutes) and minutes >= self._settings.every_minutes
        is_busy = self._saver is not None and self._saver.busy
        return is_late and self._ranks.is_first, is_busy and self._ranks.is_first

    def should_save(self, step: int, decision: StopDecision) -> bool:
        """Return whether to save after this step in the middle of the run; the same on all ranks.

        Args:
            decision: what all ranks have agreed on at this step.
        """
        every = self._settings.every
        # With several ranks the flag is one step old: right after a save, it still is from before that save.
        is_late = decision.save and step > self._last_save_step + 1
        if not is_late and (every == 0 or step % every > 0):
            return False
        if decision.busy and self._settings.when_busy == "skip":
            log_warning(f"No checkpoint at step {step}: the one before it is still being written.")
            self._restart_clock(step)
            return False
        return True

    def should_copy(self, step: int) -> bool:
        """Return whether to copy the state to main memory after this step in the middle of the run."""
        return self._memory is not None and step % self._settings.in_memory.every == 0

    def _restart_clock(self, step: int) -> None:
        self._last_save_step = step
        self._last_save_time = time.monotonic()

    # Saving

    def save(self, progress: Progress) -> None:
        """Save in the middle of the run. If that fails, warn, and let training continue."""
        if self._saver is None:
            try:
                self._save_now(progress)
            except CheckpointError as error:
                log_warning(f"{error} Training continues without this checkpoint.")
        else:
            self.wait()
            folder = step_folder(self._run.checkpoints, progress.step)
            copies = copies_url(self._run.config)
            self._saver.save(folder, self._get_tensors(), self._state(progress), self._retention, copies)
        self._restart_clock(progress.step)

    def copy(self, progress: Progress) -> None:
        """Copy the state to main memory. If that fails, warn, and let training continue."""
        assert self._memory is not None
        try:
            self._memory.save(self._state(progress), progress.step)
        except CheckpointError as error:
            log_warning(f"No copy of step {progress.step} in memory: {error} Training continues without it.")

    def save_final(self, progress: Progress, grace_seconds: float | None = None, exit_code: int = 0) -> None:
        """Save before the run ends, and return when the whole checkpoint is stored.

        Args:
            grace_seconds: exit the process with `exit_code` if saving takes longer; older checkpoints stay valid. None:
                no limit.

        Raises:
            CheckpointError: the checkpoint could not be saved.
        """
        timer = None
        if grace_seconds is not None:
            timer = threading.Timer(grace_seconds, self._give_up, (progress.step, grace_seconds, exit_code))
            timer.daemon = True
            timer.start()
        try:
            self.wait()
            self._save_now(progress)
            if self._memory is not None:
                self._memory.delete()
        finally:
            if timer is not None:
                timer.cancel()

    def _give_up(self, step: int, seconds: float, exit_code: int) -> None:
        log_warning(
            f"Step {step} could not be saved within {seconds:,.0f} s (checkpoint.grace_seconds); exiting without it."
        )
        os._exit(exit_code)

    def _report_result(self, seconds: float | None) -> None:
        """Warn if the save in the background has failed.

        Args:
            seconds: wait at most this long for the end of the save; None: however long it takes.
        """
        result = self._saver.poll(seconds) if self._saver is not None else None
        if result is not None and result.problem is not None:
            log_warning(f"{result.folder}: {result.problem.removesuffix('.')}. Training continues.")

    def wait(self) -> None:
        """Wait until no rank has a save in progress. The first rank's save includes the copy to a URL."""

        def is_done(seconds: float) -> bool:
            self._report_result(seconds)
            return self._saver is None or not self._saver.busy

        wait_until_all_done(is_done)

    def _save_now(self, progress: Progress) -> None:
        """Write the tensors without a copy, while training waits.

        Raises:
            CheckpointError: the checkpoint could not be saved.
        """
        ranks = self._ranks
        folder = step_folder(self._run.checkpoints, progress.step)
        save(
            folder,
            self._get_tensors(),
            self._state(progress),
            rank=ranks.rank,
            ranks=ranks.world,
            gather=gather_from_all,
        )
        if not ranks.is_first:
            wait_until_all_done(lambda seconds: True)
            return
        # The first rank copies the checkpoint and deletes old ones in a thread. That may take longer than the timeout
        # of a collective, so all ranks repeat short collectives until it is done.
        with ThreadPoolExecutor(1) as pool:
            cleanup = pool.submit(after_save, folder, self._retention, copies_url(self._run.config))
            wait_until_all_done(lambda seconds: cleanup in wait([cleanup], seconds).done)
        problem = cleanup.result()
        if problem is not None:
            log_warning(f"The checkpoint of step {progress.step}: {problem}")

    def _state(self, progress: Progress) -> dict[str, Any]:
        """Return what a checkpoint stores besides tensors, as JSON; update the sample hash of `progress`."""
        progress.sample_hash = extend_sample_hash(progress.sample_hash, self._run.source, progress.step)
        return {
            "progress": asdict(progress),
            "data": self._run.data_checksums,
            "seed": self._run.config.seed,
            "ranks": self._ranks.world,
            "configuration": self._run.config.model_dump(mode="json"),
            "versions": self._versions,
        }

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_error: object) -> None:
        """Finish the save in progress, unless an error ended the run."""
        if self._saver is not None:
            if error_type is None:
                self._report_result(None)
            self._saver.close()


def resume(
    run: Run, model: ParallelModel, ranks: RankInfo, get_tensors: GetTensors, memory: MemoryCopies | None
) -> Progress:
    """Load the newest valid checkpoint of the run into model and optimizer; without one, the initial weights.

    Args:
        get_tensors: returns the tensors to fill, by logical name.
        memory: copies in main memory; None if the run has none.

    Returns:
        The progress from which the run continues.

    Raises:
        JinguError: the run has checkpoints, but none of them is valid; or it was trained on other samples.
        MismatchError: the newest valid checkpoint has other tensors.
    """
    state = load_latest_checkpoint(run, ranks, get_tensors, memory, has_all=model.is_whole)
    # Checkpoints of adapters do not contain the frozen weights, which always come from the initial model.
    initial_model = run.config.initialize.from_
    if initial_model is not None and (state is None or model.spec.adapter is not None):
        load_initial_weights(model, run, adapters=state is None)
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
    """Return the progress that is stored in a checkpoint's `state`."""
    values = dict(state["progress"])
    values["loss_scale"] = LossScale(**values["loss_scale"])
    values["sample_hash"] = SampleHash(**values["sample_hash"])
    return Progress(**values)


def resets_optimizer(run: Run, progress: Progress) -> bool:
    """Return whether this start resets the optimizer.

    Launchers repeat a command after a failure. --fresh-optimizer therefore resets the optimizer only once, not at every
    restart.
    """
    return run.resume_options.fresh_optimizer and progress.optimizer_reset_step is None


def open_memory_copies(run: Run, ranks: RankInfo, get_tensors: GetTensors) -> MemoryCopies | None:
    """Open the copies of the run in main memory; None if `checkpoint.in_memory.every` is 0.

    Raises:
        JinguError: the folder cannot be written; or the run has copies, but may not resume.
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
    run: Run, ranks: RankInfo, get_tensors: GetTensors, memory: MemoryCopies | None, *, has_all: bool
) -> dict[str, Any] | None:
    """Fill the run's tensors from its newest valid checkpoint; log which ones were skipped and why.

    Checksums are verified while a checkpoint is loaded, so that it is read only once. Among checkpoints of the same
    step, the one in main memory is tried first, then the one in the run's own folder, then the one at
    `checkpoint.copy_to`.

    Args:
        has_all: whether this rank holds a part of every tensor of the model; False with a pipeline.

    Returns:
        The state besides the tensors; None if the run has no checkpoint.

    Raises:
        JinguError: there are checkpoints, but none of them is valid.
        MismatchError: a valid checkpoint has other tensors. Older ones are not tried then.
    """
    copies = copies_url(run.config)
    folders = [run.checkpoints] if copies is None else [RemotePath.at(copies), run.checkpoints]
    memory_steps = [] if memory is None else memory.steps()

    # The first rank lists the candidates as (step, source), sorted with the best one last, and broadcasts which one to
    # try. Sources are numbered from the farthest to the nearest: the copies at `checkpoint.copy_to` (if any), the run's
    # own folder, main memory.
    candidates: list[tuple[int, int]] = []
    if ranks.is_first:
        delete_leftovers(run.checkpoints)
        steps_by_source = [*map(complete_steps, folders[:-1]), all_steps(run.checkpoints), memory_steps]
        candidates = sorted((step, source) for source, steps in enumerate(steps_by_source) for step in steps)
    has_candidates = broadcast_from_first(len(candidates))
    while broadcast_from_first(len(candidates)):
        candidate = candidates.pop() if candidates else (0, 0)
        step, source = (broadcast_from_first(value) for value in candidate)
        in_memory = memory if source == len(folders) else None
        folder = step_folder(run.checkpoints if in_memory is not None else folders[source], step)
        try:
            if in_memory is not None:
                folder = in_memory.gather(step)
            state = _load(run, folder, get_tensors, has_all=has_all)
            if in_memory is not None:
                log_info(f"Step {step} is in the memory of the nodes; no checkpoint is read.")
            return state
        except MismatchError as error:
            error.fix = (
                "Resume with --fresh-optimizer, which loads only the weights (with --allow for the settings that have "
                "changed); or restore the settings, or choose another name (name=...)."
                if error.concerns_only_optimizer
                else "Restore the settings that the run was started with, or choose another name (name=...)."
            )
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


def _load(run: Run, folder: CheckpointPath, get_tensors: GetTensors, *, has_all: bool) -> dict[str, Any]:
    """Fill the run's tensors from one checkpoint, and return its state.

    Raises:
        MismatchError: the checkpoint has other tensors.
        CheckpointError: a rank could not read it. It is raised on every rank.
    """
    state = run_on_all_ranks(lambda: read_state(folder), folder, gather_from_all)
    # With a fresh optimizer, only the weights are loaded: the stored state may be of another optimizer.
    prefix = ("model/", "critic/model/") if resets_optimizer(run, read_progress(state)) else ""
    tensors = {name: tensor for name, tensor in get_tensors().items() if name.startswith(prefix)}
    load(folder, tensors, prefix=prefix, whole=has_all, gather=gather_from_all)
    return state
