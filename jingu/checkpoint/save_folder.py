"""The files of a checkpoint: writing, renaming and verification.

A checkpoint is a folder:

    shard-00000-of-00004.safetensors   the blocks that rank 0 wrote, readable by the safetensors library
    ...
    state.json                         the step and everything else that is not a tensor
    manifest.json                      files with sizes and checksums, tensors with their pieces; written last

On a disk it is written as `.NAME.partial` beside its final path, and renamed when all of it is on disk. At a URL, where
nothing can be renamed, it is written under its final name, and is complete once it has a manifest.
This module does not import torch, so that the writer process starts quickly.
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
from io import FileIO, RawIOBase
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import xxhash

from jingu.checkpoint import manifest as manifests
from jingu.checkpoint.manifest import MANIFEST, STATE, CheckpointError, FileRecord, Manifest, Piece, read_manifest
from jingu.checkpoint.remote import CheckpointPath
from jingu.runtime.files import fsync_path

P = TypeVar("P", bound=CheckpointPath)
# Chunk size of hashing together with writing or reading: a chunk fits into the CPU's cache.
CHUNK = 4 << 20
# Seconds that rank 0 waits for the parts of other ranks before the save fails.
PARTS_SECONDS = 600.0
# Polling intervals of the folder in seconds, on a disk and at a URL.
_DISK_INTERVAL = 0.02
_URL_INTERVAL = 0.5
_NOTE = re.compile(r"failure-(\d{5,})\.txt")

GetBytes = Callable[[Piece], memoryview]


# Names


def partial_path(folder: CheckpointPath) -> CheckpointPath:
    """Return where a checkpoint is while it is being written."""
    return folder.parent / f".{folder.name}.partial" if isinstance(folder, Path) else folder


def create_partial(folder: CheckpointPath, first: bool) -> CheckpointPath:
    """Create the folder in which a checkpoint is written; rank 0 (`first`) also deletes an older manifest in it."""
    partial = partial_path(folder)
    partial.mkdir(parents=True, exist_ok=True)
    if first:
        (partial / MANIFEST).unlink(missing_ok=True)
    return partial


def delete_folder(folder: CheckpointPath) -> None:
    """Delete a folder as far as possible; at a URL its manifest first, so that it is no longer complete."""
    if isinstance(folder, Path):
        shutil.rmtree(folder, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        (folder / MANIFEST).unlink()
        folder.remove()


def shard_name(rank: int, ranks: int) -> str:
    """Return the name of the file with the blocks that a rank writes."""
    return f"shard-{rank:05d}-of-{ranks:05d}.safetensors"


def part_path(partial: P, rank: int) -> P:
    """Return the path of a rank's part of the manifest."""
    return cast(P, partial / f"part-{rank:05d}.json")


# One rank's part


def write_part(partial: CheckpointPath, plan: Manifest, get_bytes: GetBytes, rank: int, direct: bool = False) -> None:
    """Write one rank's planned shard file, and then its part of the manifest, which tells rank 0 that it is done.

    Args:
        get_bytes: returns the bytes of a planned piece.
        direct: bypass the page cache if the file system allows it, which is slower but needs hardly any CPU time.

    Raises:
        OSError: the disk is full or fails. The shard file is deleted.
    """
    shard = partial / shard_name(rank, plan.ranks)
    try:
        part = _write_shard(shard, plan, get_bytes, direct)
        write_small_file(part_path(partial, rank), part.to_bytes())
    except BaseException:
        # Free space on a full disk, so that the note about the failure can be written.
        with contextlib.suppress(OSError):
            shard.unlink()
        raise


def _write_shard(path: CheckpointPath, plan: Manifest, get_bytes: GetBytes, direct: bool) -> Manifest:
    """Write a shard file; return the plan with the checksums and final positions of its pieces."""
    pieces = plan.pieces_by_file().get(path.name, [])
    header = manifests.shard_header(pieces)
    final: dict[Piece, Piece] = {}
    with _HashingWriter(path, direct) as out:
        out.write(header)
        for _, piece in pieces:
            digest = xxhash.xxh3_128()
            view = get_bytes(piece)
            for first in range(0, len(view), CHUNK):
                chunk = view[first : first + CHUNK]
                digest.update(chunk)
                out.write(chunk)
            # Positions in the plan do not include the header.
            positions = tuple(len(header) + position for position in piece.bytes)
            final[piece] = piece.model_copy(update={"bytes": positions, "xxh3_128": digest.hexdigest()})
    tensors = {
        name: record.model_copy(update={"pieces": tuple(final[piece] for piece in record.pieces)})
        for name, record in plan.tensors.items()
    }
    return plan.model_copy(update={"files": {path.name: out.record}, "tensors": tensors})


# Failures: ranks report them to each other through the folder


def write_failure_note(partial: CheckpointPath, rank: int, error: BaseException) -> None:
    """Write a file to the folder that tells the other ranks why this one failed."""
    with contextlib.suppress(OSError):
        partial.mkdir(parents=True, exist_ok=True)  # this rank may have failed before any other has started
        note = partial / f"failure-{rank:05d}.txt"
        temporary_note = note.with_name(f".{note.name}") if isinstance(note, Path) else note
        try:
            with temporary_note.open("wb", buffering=0) as file:
                file.write(describe_cause(error).encode())
        finally:
            # Rename the complete note, as rank 0 must not read half of it. Without room for its text it is empty, which
            # still reports the failure.
            if isinstance(note, Path) and isinstance(temporary_note, Path):
                temporary_note.rename(note)


def describe_cause(error: BaseException) -> str:
    """Return a short description of an error."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return error.what if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def failure_notes(partial: CheckpointPath) -> dict[int, str]:
    """Return the causes of failures, by rank."""
    with contextlib.suppress(OSError):
        notes = {path.name: path for path in partial.iterdir()}
        return {int(match[1]): notes[match[0]].read_bytes().decode() for match in map(_NOTE.fullmatch, notes) if match}
    return {}


def save_error(folder: CheckpointPath, causes: Mapping[int, str]) -> CheckpointError:
    """Return the error for a save that failed on some ranks."""
    reasons = "; ".join(f"rank {rank}: {cause}" for rank, cause in sorted(causes.items()))
    return CheckpointError(
        f"the checkpoint could not be saved ({reasons or 'another rank failed, and its log says why'}).",
        where=folder,
        fix="Free some space or repair the disk. Earlier checkpoints are untouched.",
    )


# The whole checkpoint: the work of rank 0


def wait_for_parts(folder: CheckpointPath, ranks: int) -> None:
    """Wait until every rank has written its part or a note about its failure.

    Raises:
        CheckpointError: a rank failed, or did not report in time.
    """
    partial = partial_path(folder)
    deadline = time.monotonic() + PARTS_SECONDS
    missing = set(range(ranks))
    while True:
        causes = failure_notes(partial)
        missing = {rank for rank in missing if not manifests.is_intact(part_path(partial, rank))} - causes.keys()
        if not missing or time.monotonic() > deadline:
            break
        time.sleep(_DISK_INTERVAL if isinstance(folder, Path) else _URL_INTERVAL)
    causes |= dict.fromkeys(missing, f"no report within {PARTS_SECONDS:.0f} s")
    if causes:
        raise save_error(folder, causes)


def finish_save(folder: CheckpointPath, state: Mapping[str, Any], ranks: int) -> None:
    """Complete a checkpoint whose parts are all written: write state and manifest, and rename the folder.

    Raises:
        CheckpointError: parts are missing or contradict each other.
    """
    partial = partial_path(folder)
    parts = [part_path(partial, rank) for rank in range(ranks)]
    missing = [rank for rank, part in enumerate(parts) if not part.exists()]
    if missing:
        raise CheckpointError(f"rank 0 cannot see the part of rank {missing[0]}: do all ranks share this folder?")
    manifest = manifests.merge(read_manifest(part) for part in parts)
    text = json.dumps(state, indent=1, ensure_ascii=False).encode() + b"\n"
    manifest.files[STATE] = write_small_file(partial / STATE, text)
    manifests.check(manifest)
    for part in parts:
        part.unlink()
    write_small_file(partial / MANIFEST, manifest.to_bytes())
    if isinstance(folder, Path) and isinstance(partial, Path):
        fsync_path(partial)
        _rename(partial, folder)


def _rename(partial: Path, folder: Path) -> None:
    """Rename a complete folder to its final name; an older folder of that name is deleted."""
    old = folder.parent / f".{folder.name}.deleted"
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    fsync_path(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


# Writing files


class _HashingWriter:
    """Writes a new file, hashes it meanwhile, and ensures that it is on disk when it is closed."""

    def __init__(self, path: CheckpointPath, direct: bool = False) -> None:
        """Open the file. `direct` bypasses the page cache if possible, with an aligned buffer that is reused."""
        self._file = path.open("xb", buffering=0)
        self._is_local = isinstance(path, Path)
        self._digest = xxhash.xxh3_128()
        self._bytes = 0
        direct = direct and self._is_local and self._set_direct(True)
        self._buffer = memoryview(mmap.mmap(-1, CHUNK) if direct else b"")
        self._fill = 0

    def __enter__(self) -> _HashingWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        try:
            if kind is None:
                if self._fill:
                    self._set_direct(False)  # direct writes take whole blocks only
                    write_all(self._file, self._buffer[: self._fill])
                if self._is_local:
                    os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def _set_direct(self, on: bool) -> bool:
        """Turn direct writes on or off; return whether the system supports and allows them."""
        flag = getattr(os, "O_DIRECT", 0)
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | flag if on else flags & ~flag)
        except OSError:
            return False
        return bool(flag)

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        self._digest.update(view)
        self._bytes += len(view)
        if not self._buffer:
            write_all(self._file, view)
            return
        while len(view):
            part = view[: CHUNK - self._fill]
            self._buffer[self._fill : self._fill + len(part)] = part
            self._fill += len(part)
            view = view[len(part) :]
            if self._fill == CHUNK:
                self._flush_buffer()

    def _flush_buffer(self) -> None:
        position = self._file.tell()
        self._fill = 0
        try:
            write_all(self._file, self._buffer)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # Some file systems refuse direct writes only at the first write.
            self._set_direct(False)
            self._file.seek(position)
            write_all(self._file, self._buffer)

    @property
    def record(self) -> FileRecord:
        return FileRecord(bytes=self._bytes, xxh3_128=self._digest.hexdigest())


def write_all(file: IO[bytes] | RawIOBase, view: memoryview) -> None:
    """Write all bytes to an unbuffered file, whose `write` may accept fewer. Raise OSError, for example if the disk is
    full."""
    while len(view):
        view = view[file.write(view) or 0 :]


def write_small_file(path: CheckpointPath, data: bytes) -> FileRecord:
    """Write a file, and return its size and checksum once it is on disk."""
    with _HashingWriter(path) as out:
        out.write(data)
    return out.record


# Reading


def open_checkpoint(folder: CheckpointPath) -> Manifest:
    """Read a checkpoint's manifest. Raise CheckpointError if it is missing, damaged or inconsistent."""
    manifest = read_manifest(folder / MANIFEST)
    manifests.check(manifest)
    return manifest


def read_state(folder: CheckpointPath) -> dict[str, Any]:
    """Return the saved `state`. Raise CheckpointError if it does not match its checksum."""
    problems = _find_problems(folder, STATE, open_checkpoint(folder).files[STATE])
    if problems:
        raise CheckpointError(f"{problems[0]}.", where=folder)
    state = json.loads((folder / STATE).read_bytes())
    assert isinstance(state, dict)
    return state


def tensor_names(folder: CheckpointPath, prefix: str = "") -> list[str]:
    """Return the names of the tensors that begin with `prefix`, sorted."""
    return [name for name in open_checkpoint(folder).tensors if name.startswith(prefix)]


def verify(folder: CheckpointPath) -> list[str]:
    """Read every byte of a checkpoint, and return all problems."""
    try:
        manifest = open_checkpoint(folder)
    except CheckpointError as error:
        return [error.what.removesuffix(".")]
    problems = []
    pieces = manifest.pieces_by_file()
    for name, record in manifest.files.items():
        problems += _find_problems(folder, name, record, (piece for _, piece in pieces.get(name, [])))
    if STATE not in manifest.files:
        problems.append(f"{STATE} is not part of it")
    return problems


def _find_problems(folder: CheckpointPath, name: str, record: FileRecord, pieces: Iterable[Piece] = ()) -> list[str]:
    """Return the problems of a file; for a damaged file, they name the affected tensors as far as possible."""
    try:
        with open_for_reading(folder / name) as file:
            if file.size != record.bytes:
                return [f"{name} has {file.size} bytes, not {record.bytes}"]
            if _checksum(file, 0, file.size) == record.xxh3_128:
                return []
            wrong = [mismatch(piece) for piece in pieces if _checksum(file, *piece.bytes) != piece.xxh3_128]
    except CheckpointError as error:
        return [error.what.removesuffix(".")]
    return list(dict.fromkeys(wrong)) or [f"{name} does not match its checksum"]


def _checksum(file: RandomAccessFile, begin: int, end: int) -> str:
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(CHUNK))
    for first in range(begin, end, CHUNK):
        part = buffer[: end - first]
        file.fill(first, part)
        digest.update(part)
    return digest.hexdigest()


class RandomAccessFile:
    """A file, local or at a URL, that several threads can read at any position."""

    def __init__(self, path: CheckpointPath, file: FileIO | None) -> None:
        self._path = path
        self._file = file
        self.size = path.stat().st_size

    def fill(self, position: int, view: memoryview) -> None:
        """Fill a buffer with the bytes from a position on. Raise EOFError if the file is too short, or OSError."""
        while len(view):
            if self._file is None:
                assert not isinstance(self._path, Path)
                data = self._path.read_bytes(position, position + len(view))
                count = len(data)
                view[:count] = data
            else:
                count = os.preadv(self._file.fileno(), [view], position)
            if count == 0:
                raise EOFError
            position += count
            view = view[count:]


@contextlib.contextmanager
def open_for_reading(path: CheckpointPath) -> Iterator[RandomAccessFile]:
    """Open a file. Errors while it is read are converted to a CheckpointError that names it."""
    try:
        with FileIO(path) if isinstance(path, Path) else contextlib.nullcontext() as file:
            yield RandomAccessFile(path, file)
    except FileNotFoundError:
        raise CheckpointError(f"{path.name} is missing.", where=path.parent) from None
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read ({error.strerror}).", where=path.parent) from error
    except EOFError:
        raise CheckpointError(f"{path.name} ended while it was read.", where=path.parent) from None


def mismatch(piece: Piece) -> str:
    """Return the message for a piece whose bytes do not match its checksum."""
    return f"{piece.file}: the bytes of tensor {piece.key} do not match their checksum"
