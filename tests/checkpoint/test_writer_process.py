"""The writer on a failing disk: it fills up, cannot be written, or loses data."""

from __future__ import annotations

import errno
import os
import pathlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from jingu.checkpoint import save_folder, writer_process
from jingu.checkpoint.resume import all_steps, find_latest, step_folder
from jingu.checkpoint.retention import delete_leftovers
from jingu.checkpoint.shards import piece_bytes, plan_part
from jingu.checkpoint.store import CheckpointReader, local_blocks

KEEP = {"last": 1, "every": 0, "best": 0, "metric": "loss"}


def tensors_of(step: int) -> dict[str, Tensor]:
    return {"w": torch.full((7, 5), float(step)), "b": torch.arange(3.0) + step}


def write(checkpoints: Path, step: int) -> str | None:
    """Handle a request as the background process does, and return the problem that it reports."""
    plan, blocks = plan_part(local_blocks(tensors_of(step)), 0, 1)
    owner = {piece: block for name, block in blocks.items() for piece in plan.tensors[name].pieces}
    request = {"folder": str(step_folder(checkpoints, step)), "state": {"step": step}, "retention": KEEP}
    request["copy_to"] = None
    return writer_process._save(request, plan, lambda piece: piece_bytes(owner[piece], piece), 0)


def assert_good(checkpoints: Path, *steps: int) -> None:
    """The newest good one is of one of these steps, and is it to the last bit."""
    result = find_latest(checkpoints)
    assert result.step in steps and result.folder is not None
    for name, tensor in tensors_of(result.step).items():
        assert torch.equal(CheckpointReader(result.folder).read(name), tensor)


class Killed(BaseException):
    """Simulates a SIGKILL."""


CALLS = [
    (save_folder, "write_all"),
    (os, "fsync"),
    (os, "rename"),
    (pathlib.Path, "mkdir"),
    (os, "unlink"),
    (os, "rmdir"),
]
"""Functions that change the disk."""


@contextmanager
def failing(monkeypatch: Any, good: int, error: BaseException, only: str | None = None) -> Iterator[list[str]]:
    """After `good` calls that change the disk (or only calls of the function `only`), all further ones fail."""
    built: list[str] = []

    def stand_in(name: str, real: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            if only in (None, name):
                built.append(name)
                if len(built) > good:
                    raise error
            return real(*arguments, **keywords)

        return call

    with monkeypatch.context() as patch:
        for place, name in CALLS:
            patch.setattr(place, name, stand_in(name, getattr(place, name)))
        yield built


@pytest.mark.parametrize("only", ["write_all", "fsync", "rename", "mkdir", None])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_after_any_failure_the_last_checkpoint_loads_and_saving_works(only, code, tmp_path, monkeypatch):
    good = 0
    while True:
        checkpoints = tmp_path / str(good)
        assert write(checkpoints, 1) is None
        with failing(monkeypatch, good, OSError(code, os.strerror(code)), only) as built:
            problem = write(checkpoints, 2)
        assert_good(checkpoints, 1, 2)
        if len(built) <= good:
            break
        # The very last steps may fail after the rename: then it is there all the same, told of or not.
        assert (problem or os.strerror(code)).count(os.strerror(code)) == 1
        assert problem is not None or 2 in all_steps(checkpoints)
        assert write(checkpoints, 3) is None
        assert all_steps(checkpoints) == [3]
        assert_good(checkpoints, 3)
        good += 1
    assert good >= (1 if only == "mkdir" else 2)


def test_kill_before_each_file_operation(tmp_path, monkeypatch):
    good = 0
    while True:
        checkpoints = tmp_path / str(good)
        assert write(checkpoints, 1) is None
        with failing(monkeypatch, good, Killed()) as built:
            try:
                write(checkpoints, 2)
            except Killed:
                pass
            else:
                break
        assert len(built) > good
        assert_good(checkpoints, 1, 2)
        delete_leftovers(checkpoints)
        assert write(checkpoints, 3) is None
        assert all_steps(checkpoints) == [3]
        assert [path.name for path in checkpoints.iterdir()] == ["step-00000003"]
        good += 1
    assert good > 15
