"""Finding the way back: which checkpoints a run has, the newest good one, and which to delete."""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, cast

from jingu.checkpoint.files import begin, cause_of, read_state, remove, verify
from jingu.checkpoint.manifest import MANIFEST, CheckpointError, read_manifest
from jingu.checkpoint.remote import Place, RemotePath, place
from jingu.config.schema import RunConfig
from jingu.errors import JinguError
from jingu.runtime.files import sync

_LOGGER = logging.getLogger("jingu")
P = TypeVar("P", bound=Place)
STEP = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"\.step-(\d{8,})\.(partial|deleted)")


@dataclass(frozen=True)
class Found:
    """The newest complete and verified checkpoint, and what was passed over on the way to it."""

    step: int | None
    folder: Place | None
    passed_over: list[tuple[Place, str]] = field(default_factory=list)
    """Newer checkpoints that cannot be used, and why, newest first."""


@dataclass(frozen=True)
class Keep:
    """Which checkpoints of a run stay; the newest always does."""

    last: int = 1
    """So many newest ones."""
    every: int = 0
    """Those whose step is a multiple of this; 0: none."""
    best: int = 0
    """So many of those with the lowest `metric`."""
    metric: str = "loss"
    """A value of the last evaluation before the checkpoint."""


def step_folder(checkpoints: P, step: int) -> P:
    """Final name of the checkpoint of a step."""
    return cast(P, checkpoints / f"step-{step:08d}")


def _step_of(folder: Place) -> int:
    return int(folder.name.removeprefix("step-"))


def all_steps(checkpoints: Place) -> list[int]:
    """Steps that have a folder, complete or not, in order."""
    try:
        matches = [STEP.fullmatch(path.name) for path in checkpoints.iterdir()] if checkpoints.is_dir() else []
    except OSError as error:
        raise CheckpointError(f"this cannot be read ({cause_of(error)}).", where=checkpoints) from error
    return sorted(int(match[1]) for match in matches if match)


def complete_steps(checkpoints: Place) -> list[int]:
    """Steps whose checkpoint has a sound manifest, in order; the other files are not looked at."""
    return [step for step in all_steps(checkpoints) if is_complete(step_folder(checkpoints, step))]


def is_complete(folder: Place) -> bool:
    try:
        read_manifest(folder / MANIFEST)
    except CheckpointError:
        return False
    return True


def newest(checkpoints: Place, where: Place) -> Place:
    """The newest complete checkpoint; says so where a newer one is not complete. Raises JinguError where there is
    none."""
    steps = all_steps(checkpoints)
    for step in reversed(steps):
        folder = step_folder(checkpoints, step)
        if is_complete(folder):
            if step != steps[-1]:
                _LOGGER.warning("%s is not complete: step %d is taken.", step_folder(checkpoints, steps[-1]), step)
            return folder
    fix = "`jingu train` saves the first one; `jingu checkpoint list` shows what there is."
    raise JinguError("there is no complete checkpoint here.", where=where, fix=fix)


def checkpoints_of(run: Path, config: RunConfig) -> Place:
    """Where the checkpoints of a run lie. Raises JinguError for an address that nothing installed knows."""
    address = config.checkpoint.address
    return run / "checkpoints" if address is None else place(_of_run(address, config))


def copies_of(config: RunConfig) -> str | None:
    """The address of the copies of a run's checkpoints."""
    address = config.checkpoint.copy_to
    return None if address is None else _of_run(address, config)


def _of_run(address: str, config: RunConfig) -> str:
    return f"{address.rstrip('/')}/{config.name}/checkpoints"


def find_latest(checkpoints: Place) -> Found:
    """The newest checkpoint that is complete and whose every byte matches its checksum."""
    passed_over: list[tuple[Place, str]] = []
    for step in reversed(all_steps(checkpoints)):
        folder = step_folder(checkpoints, step)
        problems = verify(folder)
        if not problems:
            return Found(step, folder, passed_over)
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        passed_over.append((folder, problems[0] + more))
    return Found(None, None, passed_over)


def prune(checkpoints: Place, keep: Keep, current: int) -> list[int]:
    """Delete the complete checkpoints that need not stay, and what dead processes left behind until `current`.

    Only saves of later steps may be going on in `checkpoints`.

    Args:
        current: step of the newest good checkpoint. Folders of later steps are those that resuming passed over: they
            are neither counted nor deleted.

    Returns:
        The steps that were deleted.
    """
    if keep.last < 1:
        raise ValueError(f"keep.last is {keep.last}, and at least one checkpoint is kept")
    steps = [step for step in complete_steps(checkpoints) if step <= current]
    doomed = _superfluous(checkpoints, steps, keep)
    for step in doomed:
        folder = step_folder(checkpoints, step)
        if isinstance(folder, Path):
            # Under a dot name first: a process killed while it deletes leaves no half checkpoint under a final name.
            hidden = folder.parent / f".{folder.name}.deleted"
            remove(hidden)
            folder = folder.rename(hidden)
        remove(folder)
    if doomed and isinstance(checkpoints, Path):
        sync(checkpoints)
    clear_leftovers(checkpoints, until=current)
    return doomed


def before_save(folder: Place) -> None:
    """What the first rank does before a checkpoint is written: the room of earlier ones that were given up is free
    again, also where a rank came so late that it began with its part only then."""
    if isinstance(folder, Path):
        with suppress(OSError):
            clear_leftovers(folder.parent, until=_step_of(folder) - 1)


def after_save(folder: Place, keep: Keep, copy_to: str | None) -> str | None:
    """What the first rank does once a checkpoint is complete: delete those that need not stay, and copy it.

    Returns:
        Why it could not be copied to the address; None where it was, or there is none.
    """
    with suppress(OSError):  # what cannot be deleted now is tried again after the next save
        prune(folder.parent, keep, current=_step_of(folder))
    try:
        if copy_to is not None:
            copy(folder, copy_to, keep)
    except CheckpointError as error:
        return error.what
    return None


def copy(folder: Place, address: str, keep: Keep) -> None:
    """Copy a complete checkpoint to an address, and delete those there that need not stay.

    Raises:
        CheckpointError: the store does not take it; its other checkpoints are as they were.
    """
    try:
        to = RemotePath.at(address)
        target = begin(to / folder.name, first=True)
        for path in sorted(folder.iterdir(), key=lambda path: (path.name == MANIFEST, path.name)):
            assert isinstance(path, Path) and isinstance(target, RemotePath)
            (target / path.name).upload(path)
        prune(to, keep, current=_step_of(folder))
    except (OSError, JinguError) as error:
        cause = cause_of(error) if isinstance(error, OSError) else error
        raise CheckpointError(f"it could not be copied to {address} ({cause}).") from error


def _superfluous(checkpoints: Place, steps: list[int], keep: Keep) -> list[int]:
    """The steps whose checkpoints need not stay. Of equally good ones the later is the better."""
    measured = []
    for step in steps if keep.best else []:
        try:
            progress = read_state(step_folder(checkpoints, step)).get("progress", {})
        except CheckpointError:
            continue
        value = (progress.get("evaluation") or {}).get(keep.metric)
        if isinstance(value, int | float) and value == value:
            measured.append((value, -step))
    stay = {*steps[-keep.last :], *(-negative for _, negative in sorted(measured)[: keep.best])}
    stay |= {step for step in steps if keep.every and step % keep.every == 0}
    return [step for step in steps if step not in stay]


def clear_leftovers(checkpoints: Place, until: int | None = None) -> None:
    """Delete what processes that died left behind of steps `until` this one, or of all."""
    local = isinstance(checkpoints, Path)
    for path in checkpoints.iterdir() if checkpoints.is_dir() else ():
        match = (_LEFTOVER if local else STEP).fullmatch(path.name)
        # Other ranks may have begun to write a later step.
        if match and (until is None or int(match[1]) <= until) and (local or not (path / MANIFEST).exists()):
            remove(path)
