"""Work before and after a save: deletion of older checkpoints, and the copy to a URL."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from jingu.checkpoint.manifest import MANIFEST, CheckpointError
from jingu.checkpoint.remote import CheckpointPath, RemotePath
from jingu.checkpoint.resume import STEP_NAME, complete_steps, step_folder, step_of
from jingu.checkpoint.save_folder import create_partial, delete_folder, describe_cause, read_state
from jingu.errors import JinguError
from jingu.runtime.files import fsync_path

# Metrics of evaluation tasks for which higher is better. For losses and bits per byte, lower is better.
_HIGHER_IS_BETTER = ("/margin", "/p_gold", "/acc")
_LEFTOVER = re.compile(r"\.step-(\d{8,})\.(partial|deleted)")


@dataclass(frozen=True)
class Retention:
    """Which checkpoints of a run to keep, besides the newest one and the newest one with a finite loss.

    Attributes:
        last: keep this many of the newest checkpoints.
        every: keep checkpoints whose step is a multiple of this; 0 keeps none for this reason.
        best: keep this many checkpoints with the best `metric`.
        metric: name of a metric of the last evaluation before the checkpoint.
    """

    last: int = 1
    every: int = 0
    best: int = 0
    metric: str = "loss"


def cost_of(metric: str, evaluation: Mapping[str, float | None] | None) -> float | None:
    """Return a metric of an evaluation, negated if higher values are better; None if the evaluation lacks it."""
    value = (evaluation or {}).get(metric)
    if not isinstance(value, int | float) or math.isnan(value):
        return None
    return -value if metric.endswith(_HIGHER_IS_BETTER) else value


def before_save(folder: CheckpointPath) -> None:
    """Delete the leftovers of failed saves on rank 0, to free their space."""
    if isinstance(folder, Path):
        with suppress(OSError):
            delete_leftovers(folder.parent, until=step_of(folder) - 1)


def after_save(folder: CheckpointPath, retention: Retention, copy_to: str | None) -> str | None:
    """On rank 0, after a checkpoint is complete, delete checkpoints that retention does not keep, and copy it.

    Returns:
        Why the checkpoint could not be copied to the URL; None if it was copied, or there is no URL.
    """
    with suppress(OSError):  # deletion is tried again after the next save
        prune(folder.parent, retention, current=step_of(folder))
    try:
        if copy_to is not None:
            copy_checkpoint(folder, copy_to, retention)
    except CheckpointError as error:
        return error.what
    return None


def copy_checkpoint(folder: CheckpointPath, url: str, retention: Retention) -> None:
    """Copy a complete checkpoint to a URL, and delete the checkpoints there that retention does not keep.

    Raises:
        CheckpointError: the store reports an error; its other checkpoints are unchanged.
    """
    try:
        to = RemotePath.at(url)
        target = create_partial(to / folder.name, first=True)
        # Copy the manifest last, as it makes the copy complete.
        for path in sorted(folder.iterdir(), key=lambda path: (path.name == MANIFEST, path.name)):
            assert isinstance(path, Path) and isinstance(target, RemotePath)
            (target / path.name).upload(path)
        prune(to, retention, current=step_of(folder))
    except (OSError, JinguError) as error:
        cause = describe_cause(error) if isinstance(error, OSError) else error
        raise CheckpointError(f"it could not be copied to {url} ({cause}).") from error


def prune(checkpoints: CheckpointPath, retention: Retention, current: int) -> list[int]:
    """Delete the complete checkpoints that retention does not keep, and leftovers of failed saves up to `current`.

    Only saves of later steps may run in `checkpoints` at the same time.

    Args:
        current: step of the newest good checkpoint. Folders of later steps were skipped when the run resumed; they are
            neither counted nor deleted.

    Returns:
        The deleted steps.
    """
    if retention.last < 1:
        raise ValueError(f"retention.last is {retention.last}, but at least one checkpoint must stay")
    steps = [step for step in complete_steps(checkpoints) if step <= current]
    superfluous = _superfluous(checkpoints, steps, retention)
    for step in superfluous:
        folder = step_folder(checkpoints, step)
        if isinstance(folder, Path):
            # Rename first, so that a process that is killed here leaves no incomplete checkpoint under a final name.
            hidden = folder.parent / f".{folder.name}.deleted"
            delete_folder(hidden)
            folder = folder.rename(hidden)
        delete_folder(folder)
    if superfluous and isinstance(checkpoints, Path):
        fsync_path(checkpoints)
    delete_leftovers(checkpoints, until=current)
    return superfluous


def _superfluous(checkpoints: CheckpointPath, steps: list[int], retention: Retention) -> list[int]:
    """Return the steps whose checkpoints retention does not keep. Of equally good ones, the later counts as better."""
    measured_steps = []
    stay = set(steps[-retention.last :])
    has_finite = False
    for step in reversed(steps):
        if has_finite and not retention.best:
            break
        try:
            progress = read_state(step_folder(checkpoints, step)).get("progress", {})
        except CheckpointError:
            continue
        if not has_finite and not progress.get("nonfinite_steps"):
            has_finite = True
            stay.add(step)
        cost = cost_of(retention.metric, progress.get("evaluation"))
        if cost is not None:
            measured_steps.append((cost, -step))
    stay |= {-negative_step for _, negative_step in sorted(measured_steps)[: retention.best]}
    if retention.every:
        stay |= {step for step in steps if step % retention.every == 0}
    return [step for step in steps if step not in stay]


def delete_leftovers(checkpoints: CheckpointPath, until: int | None = None) -> list[str]:
    """Delete leftovers of killed processes, of steps up to `until` or of all steps; return the names of the folders."""
    deleted_names = []
    is_local = isinstance(checkpoints, Path)
    for path in checkpoints.iterdir() if checkpoints.is_dir() else ():
        match = (_LEFTOVER if is_local else STEP_NAME).fullmatch(path.name)
        # Skip later steps: other ranks may already be writing one.
        if match is None or (until is not None and int(match[1]) > until):
            continue
        if is_local or not (path / MANIFEST).exists():
            delete_folder(path)
            deleted_names.append(path.name)
    return deleted_names
