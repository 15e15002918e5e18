"""Copies of checkpoints at an address: shared storage or an object store, whatever fsspec knows.

Such a store need not be able to rename: a copy is complete where its manifest is, which comes last and goes first.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import fsspec

from jingu.checkpoint.files import partial_name, put_in_place, sync_folder
from jingu.checkpoint.manifest import MANIFEST, STATE, CheckpointError
from jingu.checkpoint.resume import STEP, Keep, step_folder, superfluous
from jingu.errors import JinguError


def copy(folder: Path, address: str, keep: Keep) -> None:
    """Copy a complete checkpoint to an address, and delete those there that need not stay.

    Raises:
        CheckpointError: the store does not take it; its other checkpoints are as they were.
    """
    try:
        store, root = _open(address)
        target = f"{root}/{folder.name}"
        _delete(store, target)
        store.makedirs(target, exist_ok=True)
        for path in sorted(folder.iterdir(), key=lambda path: (path.name == MANIFEST, path.name)):
            store.put_file(str(path), f"{target}/{path.name}")
        here = steps(address)
        for step in superfluous(here, keep, lambda step: _state(store, f"{root}/{step_folder(Path(), step)}")):
            _delete(store, f"{root}/{step_folder(Path(), step)}")
    except Exception as error:  # stores fail each in a way of its own
        raise CheckpointError(f"it could not be copied to {address} ({type(error).__name__}: {error}).") from error


def steps(address: str) -> list[int]:
    """Steps of the complete checkpoints at an address, in order."""
    store, root = _open(address)
    if not store.exists(root):
        return []
    store.invalidate_cache(root)
    names = (str(path).rstrip("/").rpartition("/")[2] for path in store.ls(root, detail=False))
    matches = [match for match in map(STEP.fullmatch, names) if match]
    return sorted(int(match[1]) for match in matches if store.exists(f"{root}/{match[0]}/{MANIFEST}"))


def fetch(address: str, step: int, checkpoints: Path) -> Path:
    """Copy a checkpoint from an address to its place in a run; what was read is not checked yet."""
    folder = step_folder(checkpoints, step)
    partial = partial_name(folder)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    store, root = _open(address)
    for path in store.ls(f"{root}/{folder.name}", detail=False):
        target = partial / str(path).rpartition("/")[2]
        store.get_file(path, str(target))
        with target.open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(partial)
    put_in_place(partial, folder)
    return folder


def _open(address: str) -> tuple[Any, str]:
    try:
        store, root = fsspec.core.url_to_fs(address)
    except (ImportError, ValueError) as error:
        raise JinguError(
            f"there is no way to this address ({error}).",
            where=address,
            fix="Install what fsspec needs for it (`pip install s3fs` for s3://), or mend checkpoint.copy_to.",
        ) from error
    return store, str(root).rstrip("/")


def _state(store: Any, target: str) -> dict[str, Any]:
    state = json.loads(store.cat_file(f"{target}/{STATE}"))
    assert isinstance(state, dict)
    return state


def _delete(store: Any, target: str) -> None:
    if store.exists(f"{target}/{MANIFEST}"):
        store.rm_file(f"{target}/{MANIFEST}")
    if store.exists(target):
        store.rm(target, recursive=True)
