"""The files of a checkpoint: written once, brought to disk, given their names at the end, checked to the last byte.

A checkpoint is a folder:

    shard-00000-of-00004.safetensors   the blocks that rank 0 wrote, readable by the safetensors library
    ...
    state.json                         step and whatever else is not a tensor
    manifest.json                      files with sizes and checksums, tensors with their pieces; written last

It is written as `.NAME.partial` beside its final name and renamed when all of it is on disk.
Nothing here needs torch: the process that writes in the background starts at once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from io import RawIOBase
from pathlib import Path
from typing import Any

import xxhash

from jingu.checkpoint.manifest import (
    MANIFEST,
    STATE,
    CheckpointError,
    FileRecord,
    Manifest,
    Piece,
    check,
    header_of,
    merge,
    read_manifest,
)

CHUNK = 4 << 20
"""Bytes that are hashed and written, or read and hashed, while they are still in the processor's cache."""
PARTS_SECONDS = 600.0
"""How long the first rank waits for the other ranks' parts before it gives a checkpoint up."""
LINGER_SECONDS = 5.0
"""The same where it could not write its own part, and waits only to clear away what the others wrote."""
_LOOK_SECONDS = 0.02

Data = Callable[[Piece], Iterable[memoryview]]
"""The bytes of a piece, a chunk at a time."""


# Names


def partial_name(folder: Path) -> Path:
    """Where a checkpoint is while it is being written."""
    return folder.parent / f".{folder.name}.partial"


def shard_name(rank: int, ranks: int) -> str:
    """The file with what one rank wrote."""
    return f"shard-{rank:05d}-of-{ranks:05d}.safetensors"


def _part_name(partial: Path, rank: int) -> Path:
    return partial / f"part-{rank:05d}.json"


def _note_name(partial: Path, rank: int) -> Path:
    return partial / f"failure-{rank:05d}.txt"


# Writing


def write_part(partial: Path, plan: Manifest, data: Data, rank: int, direct: bool = False) -> None:
    """Write one rank's shard file as planned, and the JSON file that tells the first rank about it.

    Args:
        direct: past the file system's cache, where it can: slower, and next to no work for the processor.

    Raises:
        OSError: as the disk will have it. What was written is taken back.
    """
    shard = partial / shard_name(rank, plan.ranks)
    try:
        part = _write_shard(shard, plan, data, direct)
        unseen = partial / f".part-{rank:05d}.json"
        write_bytes(unseen, part.to_bytes())
        unseen.rename(_part_name(partial, rank))  # the first rank looks for it, and finds it whole
    except BaseException:
        # A full disk must have room for the note that says that it is full.
        with contextlib.suppress(OSError):
            shard.unlink(missing_ok=True)
        raise


def _write_shard(path: Path, plan: Manifest, data: Data, direct: bool) -> Manifest:
    planned = sorted(
        ((piece.bytes, name, stored.dtype, piece) for name, stored in plan.tensors.items() for piece in stored.pieces),
        key=lambda item: item[:2],
    )
    written: dict[str, list[Piece]] = {name: [] for name in plan.tensors}
    with _Writer(path, direct) as out:
        out.write(header_of((dtype, piece) for _, _, dtype, piece in planned))
        for _, name, _, piece in planned:
            digest = xxhash.xxh3_128()
            for chunk in data(piece):
                digest.update(chunk)
                out.write(chunk)
            written[name].append(piece.model_copy(update={"xxh3_128": digest.hexdigest()}))
    tensors = {
        name: stored.model_copy(update={"pieces": tuple(written[name])}) for name, stored in plan.tensors.items()
    }
    return plan.model_copy(update={"files": {path.name: out.record}, "tensors": tensors})


def leave_note(partial: Path, rank: int, error: BaseException) -> None:
    """Tell the other ranks what went wrong here, through the folder that all of them see."""
    with contextlib.suppress(OSError):
        _note_name(partial, rank).write_text(cause_of(error), encoding="utf-8")


def cause_of(error: BaseException) -> str:
    """What went wrong, in a few words."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return error.what if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def notes(partial: Path) -> dict[int, str]:
    """What went wrong on which rank."""
    causes = {}
    for path in partial.glob("failure-*.txt"):
        with contextlib.suppress(OSError):
            causes[int(path.stem.removeprefix("failure-"))] = path.read_text(encoding="utf-8")
    return causes


def could_not_save(folder: Path, causes: Mapping[int, str]) -> CheckpointError:
    """The words for a save that failed on these ranks."""
    story = "; ".join(f"rank {number}: {cause}" for number, cause in sorted(causes.items()))
    return CheckpointError(
        f"the checkpoint could not be saved ({story or 'another rank failed, and its log says why'}).",
        where=folder,
        fix="Earlier checkpoints are untouched. Make room or mend the disk.",
    )


def wait_for_parts(folder: Path, ranks: int, own: str | None = None) -> None:
    """Wait, as the first rank, until every rank has written its part or told why it could not.

    Args:
        own: why the first rank itself could not.

    Raises:
        CheckpointError: some rank could not, or was not heard of in time.
    """
    partial, seconds = partial_name(folder), PARTS_SECONDS if own is None else LINGER_SECONDS
    missing, deadline = set(range(ranks)), time.monotonic() + seconds
    while True:
        causes = notes(partial) | ({} if own is None else {0: own})
        missing = {rank for rank in missing if not _part_name(partial, rank).exists()} - causes.keys()
        if not missing or time.monotonic() > deadline:
            break
        time.sleep(_LOOK_SECONDS)
    if own is None:
        causes |= dict.fromkeys(missing, f"not heard of in {seconds:.0f} s")
    if causes:
        raise could_not_save(folder, causes)


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


class _Writer:
    """A new file, hashed while it is written and on disk when it is closed."""

    def __init__(self, path: Path, direct: bool = False) -> None:
        """`direct`: past the file system's cache, where it can: what is written then passes through one block."""
        self._file = path.open("xb", buffering=0)
        self._digest = xxhash.xxh3_128()
        self._bytes = self._held = 0
        self._aligned = memoryview(mmap.mmap(-1, CHUNK) if direct and self._pass_the_cache(True) else b"")

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        try:
            if kind is None:
                if self._held:
                    self._pass_the_cache(False)  # which takes whole blocks only
                    write_all(self._file, self._aligned[: self._held])
                os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def _pass_the_cache(self, on: bool) -> bool:
        flag, flags = getattr(os, "O_DIRECT", 0), fcntl.fcntl(self._file, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | flag if on else flags & ~flag)
        except OSError:
            return False
        return bool(flag)

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        self._digest.update(view)
        self._bytes += len(view)
        if not self._aligned:
            write_all(self._file, view)
            return
        while len(view):
            part = view[: CHUNK - self._held]
            self._aligned[self._held : self._held + len(part)] = part
            self._held, view = self._held + len(part), view[len(part) :]
            if self._held == CHUNK:
                self._write_block()

    def _write_block(self) -> None:
        place, self._held = self._file.tell(), 0
        try:
            write_all(self._file, self._aligned)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._pass_the_cache(False)  # some file systems say only now that they cannot
            self._file.seek(place)
            write_all(self._file, self._aligned)

    @property
    def record(self) -> FileRecord:
        return FileRecord(bytes=self._bytes, xxh3_128=self._digest.hexdigest())


def write_all(file: RawIOBase, view: memoryview) -> None:
    """The system may take less than it is given; and it may fail here, for want of room."""
    while len(view):
        view = view[file.write(view) or 0 :]


def write_bytes(path: Path, data: bytes) -> FileRecord:
    """A small file, on disk when this returns."""
    with _Writer(path) as out:
        out.write(data)
    return out.record


# Reading


def open_checkpoint(folder: Path) -> Manifest:
    """The manifest of a checkpoint, checked in itself."""
    manifest = read_manifest(folder / MANIFEST)
    check(manifest)
    return manifest


def read_state(folder: Path) -> dict[str, Any]:
    """What `save` was given as `state`, checked against its checksum."""
    record = open_checkpoint(folder).files[STATE]
    problem = _file_problem(folder, STATE, record)
    if problem:
        raise CheckpointError(f"{problem}.", where=folder)
    state = json.loads((folder / STATE).read_bytes())
    assert isinstance(state, dict)
    return state


def names(folder: Path, prefix: str = "") -> list[str]:
    """Names of the logical tensors that begin with `prefix`, sorted."""
    return [name for name in open_checkpoint(folder).tensors if name.startswith(prefix)]


def verify(folder: Path) -> list[str]:
    """Everything that is wrong with a checkpoint, read to its last byte; empty where it is good."""
    try:
        manifest = open_checkpoint(folder)
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
    problems: dict[str, None] = {}
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
                    problems[mismatch(piece)] = None
    return list(problems)


def mismatch(piece: Piece) -> str:
    """The words for a piece that is not what was written."""
    return f"{piece.file}: the bytes of tensor {piece.key} do not match their checksum"
