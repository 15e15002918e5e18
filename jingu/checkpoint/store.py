"""Saving and loading: every rank writes and reads its own bytes; the manifest comes last.

A checkpoint is a folder:

    shard-00000-of-00004.safetensors   the blocks that rank 0 wrote, readable by the safetensors library
    ...
    state.json                         step and whatever else is not a tensor
    manifest.json                      files with sizes and checksums, tensors with their pieces; written last

It is written as `.NAME.partial` beside its final name and renamed when all of it is on disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from jingu.checkpoint.manifest import (
    DTYPE_NAMES,
    DTYPES,
    MANIFEST,
    STATE,
    CheckpointError,
    FileRecord,
    Manifest,
    Piece,
    check,
    merge,
    read_manifest,
)
from jingu.checkpoint.shards import CHUNK, Held, fill_overlap, reading, write_bytes, write_shard
from jingu.checkpoint.slices import overlap, slice_of

Agree = Callable[[bool], bool]


# Saving


def save(
    folder: Path,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    *,
    rank: int = 0,
    ranks: int = 1,
    agree: Agree = bool,
) -> None:
    """Write a checkpoint; every rank calls this, and returns when the whole of it is on disk.

    Args:
        folder: final name. A checkpoint that is already there is replaced at the end.
        tensors: by logical name: DTensors in any layout, and plain tensors that are equal on all ranks.
        state: JSON values, equal on all ranks; the first rank's are written.
        agree: True on every rank if every rank passed True; the one thing that ranks exchange here.

    Raises:
        CheckpointError: on every rank, if some rank could not write its part; says which one and why. Nothing is
            left behind, and the other checkpoints are untouched.
    """
    partial = partial_name(folder)

    def prepare() -> None:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

    def write() -> None:
        write_part(partial, held_blocks(tensors, rank, ranks), rank, ranks)

    def finish() -> None:
        if rank == 0:
            finish_save(folder, state, ranks)

    for phase in (prepare, write, finish):
        error: Exception | None = None
        try:
            phase()
        except Exception as caught:
            error = caught
            _leave_note(partial, rank, caught)
        if not agree(error is None):
            _give_up(folder, rank, error, agree)


def partial_name(folder: Path) -> Path:
    """Where a checkpoint is while it is being written."""
    return folder.parent / f".{folder.name}.partial"


def _note(partial: Path, rank: int) -> Path:
    return partial / f"failure-{rank:05d}.txt"


def _leave_note(partial: Path, rank: int, error: Exception) -> None:
    """Tell the other ranks what went wrong here, through the folder that all of them see."""
    with contextlib.suppress(OSError):
        _note(partial, rank).write_text(_cause(error), encoding="utf-8")


def _cause(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return error.what if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _give_up(folder: Path, rank: int, error: Exception | None, agree: Agree) -> NoReturn:
    partial = partial_name(folder)
    causes = {rank: _cause(error)} if error is not None else {}
    for path in partial.glob("failure-*.txt"):
        with contextlib.suppress(OSError):
            causes[int(path.stem.removeprefix("failure-"))] = path.read_text(encoding="utf-8")
    agree(True)  # everyone has read the notes
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
    if error is not None and not isinstance(error, OSError | CheckpointError):
        raise error  # not something that a user can mend
    story = "; ".join(f"rank {number}: {cause}" for number, cause in sorted(causes.items()))
    raise CheckpointError(
        f"the checkpoint could not be saved ({story or 'another rank failed, and its log says why'}).",
        where=folder,
        fix="Earlier checkpoints are untouched. Make room or mend the disk, and go on with `resume: auto`.",
    ) from error


def held_blocks(tensors: Mapping[str, Tensor], rank: int, ranks: int) -> list[Held]:
    """What this rank holds, in an order that all ranks share."""
    blocks = []
    for name in sorted(tensors):
        tensor = tensors[name]
        try:
            found = slice_of(tensor, rank, ranks)
        except ValueError as error:
            raise CheckpointError(f"tensor {name} cannot be stored: {error}.") from None
        if found is not None:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            blocks.append(Held(name, found, local.detach()))
    return blocks


def write_part(partial: Path, blocks: Sequence[Held], rank: int, ranks: int) -> None:
    """Write one rank's shard file, and the JSON file that tells the first rank about it."""
    shard = partial / f"shard-{rank:05d}-of-{ranks:05d}.safetensors"
    try:
        part = write_shard(shard, blocks, ranks)
        write_bytes(_part_name(partial, rank), part.to_bytes())
    except BaseException:
        # A full disk must have room for the note that says that it is full.
        with contextlib.suppress(OSError):
            shard.unlink(missing_ok=True)
        raise


def _part_name(partial: Path, rank: int) -> Path:
    return partial / f"part-{rank:05d}.json"


def finish_save(folder: Path, state: Mapping[str, Any], ranks: int) -> None:
    """The first rank's last duty: state, manifest, rename."""
    partial = partial_name(folder)
    parts = [_part_name(partial, rank) for rank in range(ranks)]
    missing = [rank for rank, part in enumerate(parts) if not part.exists()]
    if missing:
        raise CheckpointError(f"the part of rank {missing[0]} is not to be seen here: do all ranks see this folder?")
    manifest = merge(read_manifest(part) for part in parts)
    text = json.dumps(state, indent=1, ensure_ascii=False).encode() + b"\n"
    manifest.files[STATE] = write_bytes(partial / STATE, text)
    check(manifest)
    for part in parts:
        part.unlink()
    write_bytes(partial / MANIFEST, manifest.to_bytes())
    sync_folder(partial)
    put_in_place(partial, folder)


def put_in_place(partial: Path, folder: Path) -> None:
    """Give a finished folder its final name; what had that name is deleted."""
    old = folder.parent / f".{folder.name}.deleted"
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Bring a folder's entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Loading


def load(folder: Path, tensors: Mapping[str, Tensor], *, prefix: str = "", agree: Agree = bool) -> None:
    """Fill tensors from a checkpoint of any layout, in place; each rank reads only what it needs.

    Args:
        tensors: by logical name: plain tensors (filled whole) or DTensors (their local blocks), on any device.
        prefix: only names that begin with this are expected in `tensors`; the rest of the checkpoint is left alone.
        agree: as in `save`; with it no rank goes on alone where another one could not load.

    Raises:
        CheckpointError: names that are missing on either side, another shape or dtype (nothing is converted), or
            bytes that do not match their checksum. The tensors then hold a mixture and are not to be used.
    """
    error: Exception | None = None
    try:
        _compare(folder, _open(folder), tensors, prefix)
        load_blocks(folder, held_blocks(tensors, 0, 1))
    except Exception as caught:
        error = caught
    if agree(error is None):
        return
    raise error or CheckpointError("another rank could not load this checkpoint; its log says why.", where=folder)


def read_tensor(folder: Path, name: str) -> Tensor:
    """One whole logical tensor, in main memory."""
    manifest = _open(folder)
    if name not in manifest.tensors:
        raise CheckpointError(f"there is no tensor {name} in this checkpoint.", where=folder)
    stored = manifest.tensors[name]
    tensor = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
    load_blocks(folder, held_blocks({name: tensor}, 0, 1))
    return tensor


def names(folder: Path, prefix: str = "") -> list[str]:
    """Names of the logical tensors that begin with `prefix`, sorted."""
    return [name for name in _open(folder).tensors if name.startswith(prefix)]


def read_state(folder: Path) -> dict[str, Any]:
    """What `save` was given as `state`, checked against its checksum."""
    record = _open(folder).files[STATE]
    problem = _file_problem(folder, STATE, record)
    if problem:
        raise CheckpointError(f"{problem}.", where=folder)
    state = json.loads((folder / STATE).read_bytes())
    assert isinstance(state, dict)
    return state


def _open(folder: Path) -> Manifest:
    manifest = read_manifest(folder / MANIFEST)
    check(manifest)
    return manifest


def _compare(folder: Path, manifest: Manifest, tensors: Mapping[str, Tensor], prefix: str) -> None:
    stored = {name for name in manifest.tensors if name.startswith(prefix)}
    absent, extra = sorted(tensors.keys() - stored), sorted(stored - tensors.keys())
    wrong = []
    for name in sorted(tensors.keys() & stored):
        here, there = tensors[name], manifest.tensors[name]
        wanted = f"{DTYPE_NAMES.get(here.dtype, here.dtype)} {list(here.shape)}"
        found = f"{there.dtype} {list(there.shape)}"
        if wanted != found:
            wrong.append(f"{name} (here {wanted}, stored {found})")
    complaints = [
        f"{what}: {', '.join(which[:8])}{f' and {len(which) - 8} more' if len(which) > 8 else ''}"
        for what, which in (
            ("tensors that it lacks", absent),
            ("tensors that have no place here", extra),
            ("tensors of another shape or dtype (nothing is converted)", wrong),
        )
        if which
    ]
    if complaints:
        raise CheckpointError(
            f"this checkpoint is of another model or optimizer: {'; '.join(complaints)}.", where=folder
        )


def load_blocks(folder: Path, blocks: Sequence[Held]) -> None:
    """Read every overlap of a stored piece with a block held here, file by file from front to back."""
    manifest = _open(folder)
    work: dict[str, list[tuple[Piece, Held]]] = {}
    for block in blocks:
        for piece in manifest.tensors[block.name].pieces:
            if overlap(piece.offset, piece.shape, block.slice.offset, block.slice.size):
                work.setdefault(piece.file, []).append((piece, block))
    for name in sorted(work):
        with reading(folder / name, manifest.files[name]) as descriptor:
            for piece, block in sorted(work[name], key=lambda pair: pair[0].bytes):
                fill_overlap(descriptor, piece, block, folder)


# Verifying


def verify(folder: Path) -> list[str]:
    """Everything that is wrong with a checkpoint, read to its last byte; empty where it is good."""
    try:
        manifest = _open(folder)
    except CheckpointError as error:
        return [error.what.removesuffix(".")]
    problems = []
    for name, record in manifest.files.items():
        problem = _file_problem(folder, name, record)
        if problem:
            problems += _tensor_problems(folder, name, manifest) or [problem]
    if STATE not in manifest.files:
        problems.append(f"{STATE} is not part of it")
    return problems


def _file_problem(folder: Path, name: str, record: FileRecord) -> str | None:
    digest = xxhash.xxh3_128()
    try:
        with (folder / name).open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != record.bytes:
                return f"{name} has {size} bytes, not {record.bytes}"
            buffer = memoryview(bytearray(CHUNK))
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None if digest.hexdigest() == record.xxh3_128 else f"{name} does not match its checksum"


def _tensor_problems(folder: Path, name: str, manifest: Manifest) -> list[str]:
    """Which tensors a damaged file has damaged; empty where it is not as long as it was, or only its header is."""
    problems = []
    with contextlib.suppress(OSError), (folder / name).open("rb") as file:
        if os.fstat(file.fileno()).st_size != manifest.files[name].bytes:
            return []
        for stored in manifest.tensors.values():
            for piece in (piece for piece in stored.pieces if piece.file == name):
                digest = xxhash.xxh3_128()
                file.seek(piece.bytes[0])
                for first in range(*piece.bytes, CHUNK):
                    digest.update(file.read(min(CHUNK, piece.bytes[1] - first)))
                if digest.hexdigest() != piece.xxh3_128:
                    problems.append(f"{name}: the bytes of tensor {piece.key} do not match their checksum")
    return problems
