"""When a run saves, and how: in the background while it goes on, at once where it ends."""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from jingu import __version__
from jingu.checkpoint.background import BackgroundSaver
from jingu.checkpoint.files import read_state
from jingu.checkpoint.manifest import CheckpointError
from jingu.checkpoint.memory import MemoryCopies
from jingu.checkpoint.remote import Place, RemotePath
from jingu.checkpoint.resume import (
    Keep,
    after_save,
    all_steps,
    clear_leftovers,
    complete_steps,
    copies_of,
    step_folder,
)
from jingu.checkpoint.store import MismatchError, load, save
from jingu.data.receipt import Receipt, extend
from jingu.errors import JinguError
from jingu.runtime.log import say, warn
from jingu.runtime.ranks import Ranks, all_agree, from_first, until_all
from jingu.runtime.signals import Told
from jingu.train.precision import LossScale
from jingu.train.run import Run

Tensors = Callable[[], dict[str, Tensor]]
"""Gives what a checkpoint holds, by logical name."""


@dataclass
class Progress:
    """What a checkpoint must remember besides tensors."""

    step: int = 0
    """Steps done."""
    tokens: int = 0
    """Tokens seen."""
    seconds: float = 0.0
    """Time spent training, over all starts of the run; evaluation and saving left out."""
    loss_sum: float = 0.0
    """Losses of the steps since the last line of metrics.jsonl."""
    loss_steps: int = 0
    evaluation: dict[str, float | None] | None = None
    """What the last evaluation measured."""
    evaluation_due: bool = False
    """Whether the run was stopped at a step that it should have evaluated."""
    loss_scale: LossScale = field(default_factory=LossScale)
    fresh_since: int | None = None
    """Step at which the optimizer began anew, where every start since then asked for that."""
    receipt: Receipt = field(default_factory=Receipt)
    """What it has been trained on."""


class Keeper:
    """Saves a run as `checkpoint` of its configuration has it. Every rank has one, and all take the same steps."""

    def __init__(
        self,
        run: Run,
        ranks: Ranks,
        tensors: Tensors,
        optimizer: torch.optim.Optimizer | None = None,
        memory: MemoryCopies | None = None,
    ) -> None:
        """Prepare for the saves to come: take the memory that those in the background need.

        Args:
            optimizer: whose steps change the tensors.
            memory: where copies go besides.
        """
        self._run, self._ranks, self._tensors = run, ranks, tensors
        self._settings = settings = run.config.checkpoint
        self._keep = Keep(settings.keep, settings.keep_every, settings.keep_best, settings.best_by)
        self._saver: BackgroundSaver | None = None
        self._memory = memory
        if memory is not None:
            say(
                f"Every {settings.memory.every} steps the state is copied to main memory, twice where there are two "
                f"ranks: up to {memory.bytes / 1e6:,.1f} MB a rank in {settings.memory.folder}."
            )
        self._saved_step, self._saved_at = -1, time.monotonic()
        self._versions = {"python": platform.python_version(), "jingu": __version__, "torch": torch.__version__}
        self._versions |= {name: version(name) for name in ("numpy", "safetensors", "tokenizers")}
        often = 0 < settings.every < run.config.train.steps or settings.minutes
        if settings.background and often and run.config.parallel.offload.type == "disk":
            say("Checkpoints are written while training waits: what is offloaded to disk is not copied to memory.")
        elif settings.background and often:
            self._saver = BackgroundSaver(tensors(), optimizer, rank=ranks.rank, ranks=ranks.world)
            say(f"Checkpoints are written in the background, from a copy of {self._saver.bytes / 1e6:,.1f} MB a rank.")

    def wishes(self) -> tuple[bool, bool]:
        """What the first rank would have all ranks know: that it is time to save; that a save is under way."""
        if self._saver is not None:
            self._hear(0.0)
        minutes = (time.monotonic() - self._saved_at) / 60
        late = bool(self._settings.minutes) and minutes >= self._settings.minutes
        return late and self._ranks.is_first, self._saver is not None and self._saver.busy and self._ranks.is_first

    def due(self, step: int, told: Told) -> bool:
        """Whether to save after this step in the middle of the run; `told` is what all ranks know."""
        every = self._settings.every
        # Right after a save the clock's wish is one from before it.
        late = told.save and step > self._saved_step + 1
        if not (late or (every > 0 and step % every == 0)):
            return False
        if told.busy and self._settings.when_busy == "skip":
            warn(f"No checkpoint at step {step}: the one before it is still being written.")
            self._note(step)
            return False
        return True

    def _note(self, step: int) -> None:
        self._saved_step, self._saved_at = step, time.monotonic()

    def save(self, progress: Progress) -> None:
        """Save in the middle of the run; where it fails, training goes on."""
        if self._saver is None:
            try:
                self._save_now(progress)
            except CheckpointError as error:
                warn(f"{error} Training goes on without this checkpoint.")
        else:
            self._hear_out()
            folder = step_folder(self._run.checkpoints, progress.step)
            self._saver.save(folder, self._tensors(), self._state(progress), self._keep, copies_of(self._run.config))
        self._note(progress.step)

    def copies(self, step: int) -> bool:
        """Whether to copy the state to main memory after this step in the middle of the run."""
        return self._memory is not None and step % self._settings.memory.every == 0

    def copy(self, progress: Progress) -> None:
        """Copy the state to main memory; where that fails, training goes on."""
        assert self._memory is not None
        try:
            self._memory.save(self._state(progress), progress.step)
        except CheckpointError as error:
            warn(f"No copy of step {progress.step} in memory: {error} Training goes on without it.")

    def save_last(self, progress: Progress, grace: float | None = None, code: int = 0) -> None:
        """Save before the run ends, and return when all of it is on disk.

        Args:
            grace: leave, with the exit code, where that takes more seconds; what is on disk by then stays good.

        Raises:
            CheckpointError: it could not be saved.
        """
        timer = None
        if grace is not None:
            timer = threading.Timer(grace, self._leave, (progress.step, grace, code))
            timer.daemon = True
            timer.start()
        try:
            self._hear_out()
            self._save_now(progress)
            if self._memory is not None:
                self._memory.forget()
        finally:
            if timer is not None:
                timer.cancel()

    def _leave(self, step: int, grace: float, code: int) -> None:
        warn(f"Step {step} could not be saved within {grace:,.0f} s (checkpoint.grace); leaving without it.")
        os._exit(code)

    def _hear(self, seconds: float | None) -> None:
        """What became of the save in the background, if there is one; at most so many seconds, or till its end."""
        outcome = self._saver.poll(seconds) if self._saver is not None else None
        if outcome is not None and outcome.problem is not None:
            warn(f"{outcome.folder}: {outcome.problem.removesuffix('.')}. Training goes on.")

    def _hear_out(self) -> None:
        """Wait until no rank has a save under way: the first one's lasts until its copy is where it goes."""

        def done(seconds: float) -> bool:
            self._hear(seconds)
            return self._saver is None or not self._saver.busy

        until_all(done)

    def _save_now(self, progress: Progress) -> None:
        folder, ranks = step_folder(self._run.checkpoints, progress.step), self._ranks
        save(folder, self._tensors(), self._state(progress), rank=ranks.rank, ranks=ranks.world, agree=all_agree)
        with ThreadPoolExecutor(1) as pool:
            rest = pool.submit(after_save, folder, self._keep, copies_of(self._run.config)) if ranks.is_first else None
            until_all(lambda seconds: rest is None or rest in wait([rest], seconds).done)
        problem = rest.result() if rest is not None else None
        if problem is not None:
            warn(f"The checkpoint of step {progress.step}: {problem}")

    def _state(self, progress: Progress) -> dict[str, Any]:
        """What is not a tensor. Seed and step are all there is of random states: every draw follows from them."""
        progress.receipt = extend(progress.receipt, self._run.source, progress.step)
        return {
            "progress": asdict(progress),
            "data": self._run.data_receipt,
            "seed": self._run.config.seed,
            "ranks": self._ranks.world,
            "configuration": self._run.config.model_dump(mode="json"),
            "versions": self._versions,
        }

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        """What is still being written is finished, unless something broke the run off."""
        if self._saver is not None:
            if kind is None:
                self._hear(None)
            self._saver.close()


def go_back(
    run: Run, ranks: Ranks, tensors: Tensors, memory: MemoryCopies | None, *, whole: bool
) -> dict[str, Any] | None:
    """Fill the run's tensors from its newest good checkpoint; say which were passed over and why.

    Every byte is checked as it is read, so a checkpoint need not be read twice to be trusted. Copies elsewhere count
    where they are newer, or good, and those in main memory where they are not older.

    Args:
        whole: whether this rank has all tensors of the model.

    Returns:
        The state beside the tensors; None where the run has no checkpoint.

    Raises:
        JinguError: there are checkpoints, and none of them is good.
        MismatchError: a good one is of other tensors.
    """
    copies, remembered = copies_of(run.config), memory.steps() if memory is not None else []
    places = [run.checkpoints] if copies is None else [RemotePath.at(copies), run.checkpoints]
    found: list[tuple[int, int]] = []  # steps, and from which of the places; past them, from memory
    if ranks.is_first:
        clear_leftovers(run.checkpoints)
        steps = [*map(complete_steps, places[:-1]), all_steps(run.checkpoints), remembered]
        found = sorted((step, number) for number, held in enumerate(steps) for step in held)
    some = from_first(len(found))
    while from_first(len(found)):
        step, number = (from_first(value) for value in (found.pop() if found else (0, 0)))
        in_memory = memory if number == len(places) else None
        folder = step_folder(run.checkpoints if in_memory is not None else places[number], step)
        try:
            if in_memory is not None:
                folder = in_memory.gather(step)
            state, error = _state_of(folder)
            if all_agree(error is None):
                prefix = "model/" if begins_anew(run, state) else ""
                wanted = {name: tensor for name, tensor in tensors().items() if name.startswith(prefix)}
                load(folder, wanted, prefix=prefix, whole=whole, agree=all_agree)
                if in_memory is not None:
                    say(f"Step {step} is in the memory of the nodes; no checkpoint is read.")
                return state
        except MismatchError:
            raise
        except CheckpointError as caught:
            error = caught
        finally:
            if in_memory is not None:
                in_memory.release()
        why = "another rank could not read it; its log says why." if error is None else error.what
        own = folder.name if number == len(places) - 1 else folder
        say(f"Passing over {own}{' in memory' if in_memory else ''}: {why}")
    if some:
        raise JinguError(
            "the run has checkpoints, and none of them is good.",
            where=run.checkpoints,
            fix="Restore one from a copy, or delete the folder to start the run over.",
        )
    return None


def begins_anew(run: Run, state: dict[str, Any]) -> bool:
    """Whether the optimizer does: a command that asks for it and is started again, as launchers do, goes on with its
    own steps."""
    return run.going.fresh_optimizer and state["progress"].get("fresh_since") is None


def _state_of(folder: Place) -> tuple[dict[str, Any], CheckpointError | None]:
    try:
        return read_state(folder), None
    except CheckpointError as error:
        return {}, error
