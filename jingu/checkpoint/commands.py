"""`jingu checkpoint list | verify | diff | prune`."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jingu.checkpoint import resume
from jingu.checkpoint.manifest import MANIFEST, CheckpointError, read_manifest
from jingu.checkpoint.remote import CheckpointPath, checkpoint_path
from jingu.checkpoint.resume import all_steps, copies_url, find_latest, newest_complete, step_folder
from jingu.checkpoint.retention import Retention, delete_leftovers
from jingu.checkpoint.retention import prune as prune_steps
from jingu.checkpoint.save_folder import delete_folder, read_state, tensor_names
from jingu.checkpoint.save_folder import verify as find_problems
from jingu.checkpoint.shards import has_nan_or_infinity
from jingu.checkpoint.store import CheckpointReader
from jingu.errors import JinguError
from jingu.formatting import format_bytes, print_table
from jingu.runtime.files import lock_folder

# Number of elements that are compared at a time, so that their fp64 copies stay small.
_CHUNK_ELEMENTS = 1 << 20
_HEADER = ("checkpoint", "size", "tensors", "ranks", "state")


# List


def list_checkpoints(path: CheckpointPath) -> None:
    """Print the checkpoints of a run and their copies: step, size, contents, and whether they are complete."""
    config = resume.run_config(path) if isinstance(path, Path) else None
    rows = _list_rows(_checkpoints_of(path))
    copies = None if config is None else copies_url(config)
    if not rows and copies is None:
        raise _no_checkpoint(path)
    print_table(_HEADER, rows, right=(1, 2, 3))
    if copies is not None:
        print(f"\nCopies at {copies}:")
        print_table(_HEADER, _list_rows(checkpoint_path(copies)), right=(1, 2, 3))


def _list_rows(checkpoints: CheckpointPath) -> list[tuple[str, ...]]:
    rows = [(folder, _row(folder)) for folder in (step_folder(checkpoints, step) for step in all_steps(checkpoints))]
    if isinstance(checkpoints, Path):
        for path in sorted(checkpoints.glob(".step-*.partial")):
            size = format_bytes(sum(_file_sizes(path).values()))
            rows.append((path, (path.name, size, "", "", "unfinished: in progress, or left by a run that was killed")))
    # A run in training may have deleted or completed some checkpoints meanwhile.
    return [row for folder, row in rows if row[-1] == "complete" or folder.is_dir()]


def _row(folder: CheckpointPath) -> tuple[str, ...]:
    sizes = _file_sizes(folder)
    size = format_bytes(sum(sizes.values()))
    try:
        manifest = read_manifest(folder / MANIFEST)
    except CheckpointError as error:
        return folder.name, size, "", "", f"not usable: {error.what}"
    damaged_files = [name for name, record in manifest.files.items() if sizes.get(name) != record.bytes]
    state = f"damaged: {', '.join(damaged_files)} missing or cut short" if damaged_files else "complete"
    return folder.name, size, str(len(manifest.tensors)), str(manifest.ranks), state


# Verify


def verify(path: CheckpointPath) -> None:
    """Read every byte of a checkpoint, or of all checkpoints of a run, and print the problems.

    Raises:
        JinguError: there is a problem.
    """
    if _is_checkpoint(path):
        checkpoints = path.parent
        folders = [path]
    else:
        checkpoints = _checkpoints_of(path)
        folders = [step_folder(checkpoints, step) for step in all_steps(checkpoints)]
    if not folders:
        raise _no_checkpoint(path)
    damaged_files = []
    for folder in folders:
        problems = find_problems(folder) or _find_nonfinite_weights(folder)
        if not problems:
            _print_contents(folder)
        elif not _is_checkpoint(path) and not folder.is_dir():
            print(f"{folder.name}: deleted meanwhile")
        else:
            damaged_files.append(folder)
            print(f"{folder.name}: damaged")
            for problem in problems:
                print(f"  {problem}")
    if damaged_files:
        newest = find_latest(checkpoints).step
        raise JinguError(
            f"{len(damaged_files)} of {len(folders)} checkpoints {'is' if len(damaged_files) == 1 else 'are'} damaged: "
            f"{', '.join(folder.name for folder in damaged_files)}.",
            where=path,
            fix="No other checkpoint here is good: restore one from a copy, or start the run anew."
            if newest is None
            else f"Delete what is damaged; training resumes from the newest good checkpoint, step {newest}.",
        )


def _find_nonfinite_weights(folder: CheckpointPath) -> list[str]:
    """Return a problem if weights contain NaN or infinity, else nothing."""
    reader = CheckpointReader(folder)
    names = [name for name in tensor_names(folder, "model/") if has_nan_or_infinity(reader.read(name))]
    return [f"{len(names)} of the weights contain NaN or infinity, such as {names[0]}"] if names else []


def _print_contents(folder: CheckpointPath) -> None:
    """Print a line about a verified checkpoint."""
    manifest = read_manifest(folder / MANIFEST)
    size = format_bytes(sum(record.bytes for record in manifest.files.values()))
    tensors = len(manifest.tensors)
    files = len(manifest.files) + 1  # and the manifest itself
    print(f"{folder.name}: good ({tensors} tensors in {files} files, {size}; every byte matches its checksum)")


# Prune


def prune(run: CheckpointPath, keep: int = 1, keep_every: int = 0, keep_best: int = 0, damaged: bool = False) -> None:
    """Delete the checkpoints of a run except those to keep; the newest good one is always kept.

    Args:
        damaged: also delete newer checkpoints that are incomplete or damaged.

    Raises:
        JinguError: no checkpoint is good, so that none is deleted; or the run is being trained.
    """
    checkpoints = _checkpoints_of(run)
    folder = checkpoints.parent if isinstance(checkpoints, Path) else run
    message = ("a process is training this run now.", "Wait for it, or stop it.")
    with lock_folder(folder, *message) if isinstance(folder, Path) else nullcontext():
        latest = find_latest(checkpoints)
        if latest.step is None:
            fix = "See `jingu checkpoint verify`."
            raise JinguError("no checkpoint here is good, and nothing was deleted.", where=run, fix=fix)
        size_before = _total_size(checkpoints)
        retention = Retention(keep, keep_every, keep_best)
        deleted_names = []
        if isinstance(checkpoints, Path):
            deleted_names = [
                f"{name} (of a save that did not finish)" for name in sorted(delete_leftovers(checkpoints))
            ]
        deleted_names += [
            step_folder(checkpoints, step).name for step in prune_steps(checkpoints, retention, latest.step)
        ]
        for folder, reason in latest.skipped:
            if damaged:
                delete_folder(folder)
                deleted_names.append(folder.name)
            else:
                print(f"{folder.name} stays, though it is not usable ({reason}); --damaged deletes it, too.")
    if deleted_names:
        print(f"Deleted {', '.join(deleted_names)}, and freed {format_bytes(size_before - _total_size(checkpoints))}.")
    else:
        print("There was nothing to delete.")


def _total_size(checkpoints: CheckpointPath) -> int:
    return sum(sum(_file_sizes(folder).values()) for folder in checkpoints.iterdir() if folder.is_dir())


# Diff


def diff(first: CheckpointPath, second: CheckpointPath) -> None:
    """Print the differences of two checkpoints, tensor by tensor; for a run, its newest checkpoint is compared."""
    folder_a = _find_checkpoint(first)
    folder_b = _find_checkpoint(second)
    reader_a = CheckpointReader(folder_a)
    reader_b = CheckpointReader(folder_b)
    names_a = set(reader_a.manifest.tensors)
    names_b = set(reader_b.manifest.tensors)
    rows: list[tuple[str, ...]] = []
    equal = 0
    for name in sorted(names_a & names_b):
        tensor_a = reader_a.read(name)
        tensor_b = reader_b.read(name)
        if (tensor_a.shape, tensor_a.dtype) != (tensor_b.shape, tensor_b.dtype):
            rows.append((name, f"{_describe(tensor_a)} → {_describe(tensor_b)}", "", "", ""))
        elif _same_bytes(tensor_a, tensor_b):
            equal += 1
        else:
            figures = (f"{value:.6g}" for value in difference(tensor_a, tensor_b))
            rows.append((name, _describe(tensor_a), *figures))
    if rows:
        header = ("tensor", "dtype and shape", "largest difference", "norm in first", "norm in second")
        print_table(header, rows, right=(2, 3, 4))
        print()
    for which, names in (("the first", names_a - names_b), ("the second", names_b - names_a)):
        for name in sorted(names):
            print(f"only in {which}: {name}")
    state_a = read_state(folder_a)
    state_b = read_state(folder_b)
    for key in sorted(state_a.keys() | state_b.keys()):
        if state_a.get(key) != state_b.get(key):
            print(f"state {key}: {_shorten(state_a.get(key))} → {_shorten(state_b.get(key))}")
    print(f"{equal} tensors are equal to the last bit, {len(rows)} differ.")


def difference(a: Tensor, b: Tensor) -> list[float]:
    """Compare two tensors of equal shape and dtype, in fp64.

    Returns:
        The largest absolute difference of two elements, and the Euclidean norms of both tensors.
    """
    wide = torch.complex128 if a.is_complex() else torch.float64
    # Largest difference, and both sums of squares. torch's maximum propagates NaN, which must be visible.
    largest, squares_a, squares_b = torch.zeros(3, dtype=torch.float64)
    chunks_a, chunks_b = (tensor.reshape(-1).split(_CHUNK_ELEMENTS) for tensor in (a, b))
    for chunk_a, chunk_b in zip(chunks_a, chunks_b, strict=True):
        wide_a = chunk_a.to(wide)
        wide_b = chunk_b.to(wide)
        largest = torch.cat([largest.view(1), (wide_a - wide_b).abs()]).max()
        squares_a += wide_a.abs().square().sum()
        squares_b += wide_b.abs().square().sum()
    return torch.stack([largest, squares_a.sqrt(), squares_b.sqrt()]).tolist()


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


# Paths


def _is_checkpoint(path: CheckpointPath) -> bool:
    return path.name.startswith("step-") or (path / MANIFEST).exists()


def _checkpoints_of(path: CheckpointPath) -> CheckpointPath:
    """Return the folder of checkpoints, given a run or that folder itself. Raise JinguError if it does not exist."""
    if not path.is_dir():
        raise JinguError("there is no such folder.", where=path, fix="Give a run, such as runs/NAME, or a checkpoint.")
    inside = resume.run_checkpoints(path) if isinstance(path, Path) else path / "checkpoints"
    return inside if inside.is_dir() else path


def _find_checkpoint(path: CheckpointPath) -> CheckpointPath:
    """Return the folder of a checkpoint, given that folder or a run (then its newest complete checkpoint)."""
    return path if _is_checkpoint(path) else newest_complete(_checkpoints_of(path), path)


def _no_checkpoint(path: CheckpointPath) -> JinguError:
    return JinguError("there is no checkpoint here.", where=path, fix="`jingu train` writes the first one.")


def _file_sizes(folder: CheckpointPath) -> dict[str, int]:
    """Return the sizes of the files in a folder by name, without those that a run in training deletes meanwhile."""
    sizes = {}
    with suppress(FileNotFoundError):
        for path in folder.iterdir():
            with suppress(FileNotFoundError):
                sizes[path.name] = path.stat().st_size
    return sizes
