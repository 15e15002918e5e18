"""The checkpoints of a run, and the one to resume from."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from jingu.checkpoint.manifest import MANIFEST, CheckpointError, is_intact
from jingu.checkpoint.remote import CheckpointPath, checkpoint_path
from jingu.checkpoint.save_folder import describe_cause, verify
from jingu.errors import JinguError
from jingu.text.corpus_file import is_url

if TYPE_CHECKING:
    from jingu.config.schema import RunConfig

_LOGGER = logging.getLogger("jingu")
P = TypeVar("P", bound=CheckpointPath)
STEP_NAME = re.compile(r"step-(\d{8,})")


# Where a run's checkpoints are


def run_config(run: Path) -> RunConfig | None:
    """Return the configuration that a run was last started with; None if the folder has none."""
    # A late import: the writer process starts four times as fast without the configuration.
    from jingu.config.load import load_stored_config

    return load_stored_config(run / "config.yaml") if (run / "config.yaml").is_file() else None


def run_checkpoints(run: Path) -> CheckpointPath:
    """Return where the checkpoints of a run are, given its folder."""
    config = run_config(run)
    return run / "checkpoints" if config is None else checkpoints_path(run, config)


def checkpoints_path(run: Path, config: RunConfig) -> CheckpointPath:
    """Return where the checkpoints of a run are. Raise JinguError for a URL that no installed package supports."""
    url = config.checkpoint.url
    return run / "checkpoints" if url is None else checkpoint_path(_below(url, config))


def copies_url(config: RunConfig) -> str | None:
    """Return the URL or absolute path of the copies of a run's checkpoints; None if it makes no copies."""
    url = config.checkpoint.copy_to
    if url is None:
        return None
    # The writer process has another current folder than the run, so it needs an absolute path.
    return _below(url if is_url(url) else str(Path(url).expanduser().absolute()), config)


def _below(url: str, config: RunConfig) -> str:
    return f"{url.rstrip('/')}/{config.name}/checkpoints"


def step_folder(checkpoints: P, step: int) -> P:
    """Return the path of the checkpoint of a step."""
    return cast(P, checkpoints / f"step-{step:08d}")


def step_of(folder: CheckpointPath) -> int:
    """Return the step of a checkpoint."""
    return int(folder.name.removeprefix("step-"))


# Which there are


def all_steps(checkpoints: CheckpointPath) -> list[int]:
    """Return the steps that have a folder, complete or not, in order. Raise CheckpointError if listing fails."""
    try:
        matches = [STEP_NAME.fullmatch(path.name) for path in checkpoints.iterdir()] if checkpoints.is_dir() else []
    except OSError as error:
        raise CheckpointError(f"the folder cannot be read ({describe_cause(error)}).", where=checkpoints) from error
    return sorted(int(match[1]) for match in matches if match)


def complete_steps(checkpoints: CheckpointPath) -> list[int]:
    """Return the steps whose checkpoint has an intact manifest, in order; other files are not read."""
    return [step for step in all_steps(checkpoints) if is_complete(step_folder(checkpoints, step))]


def is_complete(folder: CheckpointPath) -> bool:
    """Return whether a checkpoint has an intact manifest, which is written last."""
    return is_intact(folder / MANIFEST)


def newest_complete(checkpoints: CheckpointPath, where: CheckpointPath) -> CheckpointPath:
    """Return the newest complete checkpoint; warn if a newer one is not complete.

    Args:
        where: the run or folder that an error names.

    Raises:
        JinguError: no checkpoint is complete.
    """
    steps = all_steps(checkpoints)
    for step in reversed(steps):
        folder = step_folder(checkpoints, step)
        if is_complete(folder):
            if step != steps[-1]:
                _LOGGER.warning("%s is not complete: using step %d.", step_folder(checkpoints, steps[-1]), step)
            return folder
    fix = "`jingu train` saves the first one; `jingu checkpoint list` shows which there are."
    raise JinguError("there is no complete checkpoint here.", where=where, fix=fix)


@dataclass(frozen=True)
class LatestCheckpoint:
    """The newest checkpoint that is complete and verified.

    Attributes:
        step: step of the checkpoint; None if there is none.
        skipped: newer checkpoints that cannot be used, with the reasons, newest first.
    """

    step: int | None
    folder: CheckpointPath | None
    skipped: list[tuple[CheckpointPath, str]] = field(default_factory=list)


def find_latest(checkpoints: CheckpointPath) -> LatestCheckpoint:
    """Return the newest checkpoint that is complete and whose every byte matches its checksum."""
    skipped_checkpoints: list[tuple[CheckpointPath, str]] = []
    for step in reversed(all_steps(checkpoints)):
        folder = step_folder(checkpoints, step)
        problems = verify(folder)
        if not problems:
            return LatestCheckpoint(step, folder, skipped_checkpoints)
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        skipped_checkpoints.append((folder, problems[0] + more))
    return LatestCheckpoint(None, None, skipped_checkpoints)
