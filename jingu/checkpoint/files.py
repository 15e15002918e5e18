"""The files of a checkpoint: written once, brought to disk, given their names at the end, checked to the last byte.

A checkpoint is a folder:

    shard-00000-of-00004.safetensors   the blocks that rank 0 wrote, readable by the safetensors library
    ...
    state.json                         step and whatever else is not a tensor
    manifest.json                      files with sizes and checksums, tensors with their pieces; written last

It is written as `.NAME.partial` beside its final name and renamed when all of it is on disk; at an address, where
nothing can be renamed, under its final name, and is a checkpoint when it has its manifest.
Nothing here needs torch: the process that writes in the background starts at once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from io import RawIOBase
from pathlib import Path
from typing import IO, Any, TypeVar, cast

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
    pieces_by_file,
    read_manifest,
)
from jingu.checkpoint.remote import Place
from jingu.runtime.files import sync

P = TypeVar("P", bound=Place)
CHUNK = 4 << 20
"""Bytes that are hashed and written, or read and hashed, while they are still in the processor's cache."""
PARTS_SECONDS = 600.0
"""How long the first rank waits for the other ranks' parts before it gives a checkpoint up."""
LINGER_SECONDS = 5.0
"""The same where it could not write its own part, and waits only to clear away what the others wrote."""
_LOOK_SECONDS, _ASK_SECONDS = 0.02, 0.5
_NOTE = re.compile(r"failure-(\d{5,})\.txt")

Data = Callable[[Piece], memoryview]
"""The bytes of a planned piece."""


# Names


def partial_name(folder: Place) -> Place:
    """Where a checkpoint is while it is being written."""
    return folder.parent / f".{folder.name}.partial" if isinstance(folder, Path) else folder


def begin(folder: Place, first: bool) -> Place:
    """Make the place where a checkpoint is written; the first rank also sees to it that there is none meanwhile."""
    partial = partial_name(folder)
    partial.mkdir(parents=True, exist_ok=True)
    if first:
        (partial / MANIFEST).unlink(missing_ok=True)
    return partial


def remove(folder: Place) -> None:
    """Delete a folder, as far as that goes; at an address the manifest first."""
    if isinstance(folder, Path):
        shutil.rmtree(folder, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        (folder / MANIFEST).unlink()
        folder.remove()


def shard_name(rank: int, ranks: int) -> str:
    """The file with what one rank wrote."""
    return f"shard-{rank:05d}-of-{ranks:05d}.safetensors"


def part_name(partial: P, rank: int) -> P:
    """The JSON file that tells what one rank wrote."""
    return cast(P, partial / f"part-{rank:05d}.json")


def _note_name(partial: Place, rank: int) -> Place:
    return partial / f"failure-{rank:05d}.txt"


# Writing


def write_part(partial: Place, plan: Manifest, data: Data, rank: int, direct: bool = False) -> None:
    """Write one rank's shard file as planned, and the JSON file that tells the first rank about it.

    Args:
        direct: past the file system's cache, where it can: slower, and next to no work for the processor.

    Raises:
        OSError: as the disk will have it. What was written is taken back.
    """
    shard = partial / shard_name(rank, plan.ranks)
    try:
        part = _write_shard(shard, plan, data, direct)
        write_bytes(part_name(partial, rank), part.to_bytes())
    except BaseException:
        # A full disk must have room for the note that says that it is full.
        with contextlib.suppress(OSError):
            shard.unlink()
        raise


def _write_shard(path: Place, plan: Manifest, data: Data, direct: bool) -> Manifest:
    planned = pieces_by_file(plan).get(path.name, [])
    header = header_of(planned)
    written: dict[Piece, Piece] = {}
    with _Writer(path, direct) as out:
        out.write(header)
        for _, piece in planned:
            digest, view = xxhash.xxh3_128(), data(piece)
            for chunk in (view[first : first + CHUNK] for first in range(0, len(view), CHUNK)):
                digest.update(chunk)
                out.write(chunk)
            place = tuple(len(header) + position for position in piece.bytes)
            written[piece] = piece.model_copy(update={"bytes": place, "xxh3_128": digest.hexdigest()})
    tensors = {
        name: stored.model_copy(update={"pieces": tuple(written[piece] for piece in stored.pieces)})
        for name, stored in plan.tensors.items()
    }
    return plan.model_copy(update={"files": {path.name: out.record}, "tensors": tensors})


def leave_note(partial: Place, rank: int, error: BaseException) -> None:
    """Tell the other ranks what went wrong here, through the folder that all of them see."""
    with contextlib.suppress(OSError):
        partial.mkdir(parents=True, exist_ok=True)  # this rank may have failed before any has begun
        note = begun = _note_name(partial, rank)
        if isinstance(note, Path):
            begun = note.with_name(f".{note.name}")  # the first rank must not read what is not written yet
        try:
            with begun.open("wb", buffering=0) as file:
                file.write(cause_of(error).encode())
        finally:  # where there is no room for words, it tells that something went wrong
            if isinstance(note, Path) and isinstance(begun, Path):
                begun.rename(note)


def cause_of(error: BaseException) -> str:
    """What went wrong, in a few words."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return error.what if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def notes(partial: Place) -> dict[int, str]:
    """What went wrong on which rank."""
    causes = {}
    with contextlib.suppress(OSError):
        for path in partial.iterdir():
            if match := _NOTE.fullmatch(path.name):
                causes[int(match[1])] = path.read_bytes().decode()
    return causes


def could_not_save(folder: Place, causes: Mapping[int, str]) -> CheckpointError:
    """The words for a save that failed on these ranks."""
    story = "; ".join(f"rank {number}: {cause}" for number, cause in sorted(causes.items()))
    return CheckpointError(
        f"the checkpoint could not be saved ({story or 'another rank failed, and its log says why'}).",
        where=folder,
        fix="Earlier checkpoints are untouched. Make room or mend the disk.",
    )


def wait_for_parts(folder: Place, ranks: int, own: str | None = None) -> None:
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
        missing = {rank for rank in missing if not _is_whole(part_name(partial, rank))} - causes.keys()
        if not missing or time.monotonic() > deadline:
            break
        time.sleep(_LOOK_SECONDS if isinstance(folder, Path) else _ASK_SECONDS)
    if own is None:
        causes |= dict.fromkeys(missing, f"not heard of in {seconds:.0f} s")
    if causes:
        raise could_not_save(folder, causes)


def _is_whole(part: Place) -> bool:
    try:
        read_manifest(part)
    except CheckpointError:
        return False
    return True


def finish_save(folder: Place, state: Mapping[str, Any], ranks: int) -> None:
    """The first rank's last duty: state, manifest, rename."""
    partial = partial_name(folder)
    parts = [part_name(partial, rank) for rank in range(ranks)]
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
    if isinstance(folder, Path) and isinstance(partial, Path):
        sync(partial)
        _put_in_place(partial, folder)


def _put_in_place(partial: Path, folder: Path) -> None:
    """Give a finished folder its final name; what had that name is deleted."""
    old = folder.parent / f".{folder.name}.deleted"
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


class _Writer:
    """A new file, hashed while it is written and on disk when it is closed."""

    def __init__(self, path: Place, direct: bool = False) -> None:
        """`direct`: past the file system's cache, where it can: what is written then passes through one block."""
        self._file, self._local = path.open("xb", buffering=0), isinstance(path, Path)
        self._digest = xxhash.xxh3_128()
        self._bytes = self._held = 0
        direct = direct and self._local and self._pass_the_cache(True)
        self._aligned = memoryview(mmap.mmap(-1, CHUNK) if direct else b"")

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        try:
            if kind is None:
                if self._held:
                    self._pass_the_cache(False)  # which takes whole blocks only
                    write_all(self._file, self._aligned[: self._held])
                if self._local:
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


def write_all(file: IO[bytes] | RawIOBase, view: memoryview) -> None:
    """The system may take less than it is given; and it may fail here, for want of room."""
    while len(view):
        view = view[file.write(view) or 0 :]


def write_bytes(path: Place, data: bytes) -> FileRecord:
    """A small file, on disk when this returns."""
    with _Writer(path) as out:
        out.write(data)
    return out.record


# Reading


def open_checkpoint(folder: Place) -> Manifest:
    """The manifest of a checkpoint, checked in itself."""
    manifest = read_manifest(folder / MANIFEST)
    check(manifest)
    return manifest


def read_state(folder: Place) -> dict[str, Any]:
    """What `save` was given as `state`, checked against its checksum."""
    problems = _problems_of(folder, STATE, open_checkpoint(folder).files[STATE])
    if problems:
        raise CheckpointError(f"{problems[0]}.", where=folder)
    state = json.loads((folder / STATE).read_bytes())
    assert isinstance(state, dict)
    return state


def names(folder: Place, prefix: str = "") -> list[str]:
    """Names of the logical tensors that begin with `prefix`, sorted."""
    return [name for name in open_checkpoint(folder).tensors if name.startswith(prefix)]


def verify(folder: Place) -> list[str]:
    """Everything that is wrong with a checkpoint, read to its last byte; empty where it is good."""
    try:
        manifest = open_checkpoint(folder)
    except CheckpointError as error:
        return [error.what.removesuffix(".")]
    problems, inside = [], pieces_by_file(manifest)
    for name, record in manifest.files.items():
        problems += _problems_of(folder, name, record, (piece for _, piece in inside.get(name, [])))
    if STATE not in manifest.files:
        problems.append(f"{STATE} is not part of it")
    return problems


def _problems_of(folder: Place, name: str, record: FileRecord, pieces: Iterable[Piece] = ()) -> list[str]:
    """What is wrong with a file: the tensors that it has damaged, where they can be told."""
    try:
        with reading(folder / name) as file:
            if file.size != record.bytes:
                return [f"{name} has {file.size} bytes, not {record.bytes}"]
            if _checksum(file, 0, file.size) == record.xxh3_128:
                return []
            wrong = [mismatch(piece) for piece in pieces if _checksum(file, *piece.bytes) != piece.xxh3_128]
    except CheckpointError as error:
        return [error.what.removesuffix(".")]
    return list(dict.fromkeys(wrong)) or [f"{name} does not match its checksum"]


def _checksum(file: Reading, begin: int, end: int) -> str:
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(CHUNK))
    for first in range(begin, end, CHUNK):
        part = buffer[: end - first]
        file.fill(first, part)
        digest.update(part)
    return digest.hexdigest()


class Reading:
    """An open file, read at any place by several threads."""

    def __init__(self, path: Place, descriptor: int | None) -> None:
        self._path, self._descriptor = path, descriptor
        self.size = path.stat().st_size if descriptor is None else os.fstat(descriptor).st_size

    def fill(self, position: int, view: memoryview) -> None:
        """Fill a buffer with the bytes from a position on."""
        while len(view):
            if self._descriptor is None:
                assert not isinstance(self._path, Path)
                data = self._path.read_bytes(position, position + len(view))
                count = len(data)
                view[:count] = data
            else:
                count = os.preadv(self._descriptor, [view], position)
            if count == 0:
                raise EOFError
            position, view = position + count, view[count:]


@contextlib.contextmanager
def reading(path: Place) -> Iterator[Reading]:
    """Open a file; what goes wrong while reading from it becomes a `CheckpointError` that names it."""
    descriptor = None
    try:
        if isinstance(path, Path):
            descriptor = os.open(path, os.O_RDONLY)
        yield Reading(path, descriptor)
    except FileNotFoundError:
        raise CheckpointError(f"{path.name} is missing.", where=path.parent) from None
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read ({error.strerror}).", where=path.parent) from error
    except EOFError:
        raise CheckpointError(f"{path.name} ended while it was read.", where=path.parent) from None
    finally:
        if descriptor is not None:
            os.close(descriptor)


def mismatch(piece: Piece) -> str:
    """The words for a piece that is not what was written."""
    return f"{piece.file}: the bytes of tensor {piece.key} do not match their checksum"
