"""Ways to read numbers that lie one after another in a file: mapped, by single reads, or by kept blocks.

A file is opened once, read-only. All of them may be read from several threads.
"""

from __future__ import annotations

import os
import weakref
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[Any]
Reading = Literal["mmap", "lazy", "cached", "infer"]
"""infer: as suits the file system."""
BLOCK_BYTES = 4 << 20
"""What is read at once where blocks are kept."""
KEPT_BLOCKS = 16
"""Blocks kept a file, the last used ones."""
SLOW = {"9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "pvfs2", "smb3"}
"""File systems over a network, where a page fault is a round trip and mapping is at times not sound."""
MOUNTS = Path("/proc/self/mountinfo")
"""Where Linux tells which file system is where."""


class Stored(Protocol):
    """`len()` numbers of one type."""

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> Ids:
        """Numbers [start, stop), as far as there are any; not to be written to."""


class MappedFile:
    """Numbers of a memory-mapped file."""

    def __init__(self, path: Path, dtype: str, count: int) -> None:
        little = np.dtype(dtype).newbyteorder("<")
        self._all = np.asarray(np.memmap(path, little, "r", shape=(count,))) if count else np.zeros(0, little)
        self._all.flags.writeable = False

    def __len__(self) -> int:
        return len(self._all)

    def read(self, start: int, stop: int) -> Ids:
        return self._all[start:stop]


class ReadFile:
    """Numbers of a file, each stretch read when it is asked for."""

    def __init__(self, path: Path, dtype: str, count: int) -> None:
        self._dtype, self._count = np.dtype(dtype).newbyteorder("<"), count
        self._path, self._file = path, os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)

    def __len__(self) -> int:
        return self._count

    def read(self, start: int, stop: int) -> Ids:
        place, end, parts = start * self._dtype.itemsize, min(stop, self._count) * self._dtype.itemsize, []
        while place < end:  # a single read gives at most 2 GB
            part = os.pread(self._file, end - place, place)
            if not part:
                raise OSError(f"{self._path} ends at byte {place:,}; it was cut while it was read")
            parts.append(part)
            place += len(part)
        return np.frombuffer(b"".join(parts), self._dtype)


class CachedFile:
    """Numbers of a file read in large blocks, of which the last used ones are kept."""

    def __init__(self, path: Path, dtype: str, count: int) -> None:
        file = ReadFile(path, dtype, count)
        self._count, size = count, BLOCK_BYTES // np.dtype(dtype).itemsize
        self._size = size
        self._block = lru_cache(KEPT_BLOCKS)(lambda number: file.read(number * size, (number + 1) * size))

    def __len__(self) -> int:
        return self._count

    def read(self, start: int, stop: int) -> Ids:
        stop = min(stop, self._count)
        first, last = start // self._size, max(stop - 1, start) // self._size
        parts = [self._block(number) for number in range(first, last + 1)]
        together = np.concatenate(parts) if len(parts) > 1 else parts[0]
        return together[start - first * self._size : max(stop, start) - first * self._size]


_KINDS: dict[Reading, type[MappedFile | ReadFile | CachedFile]] = {
    "mmap": MappedFile,
    "lazy": ReadFile,
    "cached": CachedFile,
}


def open_numbers(path: Path, dtype: str, count: int, reading: Reading) -> Stored:
    """The first `count` numbers of type `dtype` (little-endian) in a file."""
    kind = inferred(path) if reading == "infer" else _KINDS[reading]
    return kind(path, dtype, count)


def inferred(path: Path) -> type[MappedFile | CachedFile]:
    """What suits the file system of `path`: mapped, or over a network by kept blocks."""
    kind = _file_system(path)
    return CachedFile if kind in SLOW or kind.startswith("fuse") else MappedFile


def _file_system(path: Path) -> str:
    """The kind of file system that a path is on; empty where the system does not tell."""
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    place, found = path.resolve(), ("", "")
    for line in lines:
        mounted, _, rest = line.partition(" - ")
        point = mounted.split(" ")[4].replace("\\040", " ")
        if place.is_relative_to(point) and len(point) >= len(found[0]):
            found = point, rest.split(" ")[0]
    return found[1]
