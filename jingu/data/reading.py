"""Ways to read numbers that lie one after another in a file: mapped, by single reads, or by kept blocks.

A file is opened once, read-only. All of them may be read from several threads.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections import OrderedDict
from pathlib import Path
from threading import Lock
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[Any]
Reading = Literal["mmap", "lazy", "cached"]
BLOCK_BYTES = 4 << 20
"""What is read at once where blocks are kept."""
KEPT_BLOCKS = 16
"""Blocks kept a file, the last used ones."""
SLOW = {"9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "pvfs2", "smb3"}
"""File systems over a network, where a page fault is a round trip and mapping is at times not sound."""
MOUNTS = Path("/proc/self/mountinfo")
"""Where Linux tells which file system is where."""


class Numbers(Protocol):
    """`len()` numbers of one type."""

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> Ids:
        """Numbers [start, stop), as far as there are any; not to be written to."""


class MappedFile:
    """Numbers of a memory-mapped file, from a byte on."""

    def __init__(self, path: Path, dtype: str, offset: int, count: int) -> None:
        self._all = np.zeros(0, dtype)
        if count:
            with path.open("rb") as stream:
                content = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            self._all = np.frombuffer(content, np.dtype(dtype).newbyteorder("<"), count, offset)
        self._all.flags.writeable = False

    def __len__(self) -> int:
        return len(self._all)

    def read(self, start: int, stop: int) -> Ids:
        return self._all[start:stop]


class ReadFile:
    """Numbers of a file, each stretch read when it is asked for."""

    def __init__(self, path: Path, dtype: str, offset: int, count: int) -> None:
        self._dtype, self._offset, self._count = np.dtype(dtype).newbyteorder("<"), offset, count
        self._path, self._file = path, os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)

    def __len__(self) -> int:
        return self._count

    def read(self, start: int, stop: int) -> Ids:
        size = self._dtype.itemsize
        left = size * (min(stop, self._count) - start)
        place, parts = self._offset + start * size, []
        while left > 0:  # a single read gives at most 2 GB
            part = os.pread(self._file, left, place)
            if not part:
                raise OSError(f"{self._path} ends at byte {place:,}; it was cut while it was read")
            parts.append(part)
            left, place = left - len(part), place + len(part)
        return np.frombuffer(b"".join(parts), self._dtype)


class CachedFile(ReadFile):
    """Numbers of a file read in large blocks, of which the last used ones are kept."""

    def __init__(self, path: Path, dtype: str, offset: int, count: int) -> None:
        super().__init__(path, dtype, offset, count)
        self._per_block = BLOCK_BYTES // self._dtype.itemsize
        self._blocks: OrderedDict[int, Ids] = OrderedDict()
        self._lock = Lock()

    def read(self, start: int, stop: int) -> Ids:
        stop = min(stop, self._count)
        blocks = range(start // self._per_block, -(-stop // self._per_block))
        parts = [self._block(number)[max(start - number * self._per_block, 0) :] for number in blocks]
        together = np.concatenate(parts) if len(parts) > 1 else parts[0] if parts else np.zeros(0, self._dtype)
        return together[: max(stop - start, 0)]

    def _block(self, number: int) -> Ids:
        with self._lock:
            if number not in self._blocks:
                self._blocks[number] = super().read(number * self._per_block, (number + 1) * self._per_block)
            self._blocks.move_to_end(number)
            while len(self._blocks) > KEPT_BLOCKS:
                self._blocks.popitem(last=False)
            return self._blocks[number]


def open_numbers(path: Path, dtype: str, offset: int, count: int, reading: Reading) -> Numbers:
    """`count` numbers of type `dtype` (little-endian) from byte `offset` of a file on."""
    kinds: dict[Reading, type[MappedFile] | type[ReadFile]] = {
        "mmap": MappedFile,
        "lazy": ReadFile,
        "cached": CachedFile,
    }
    return kinds[reading](path, dtype, offset, count)


def inferred(path: Path) -> Reading:
    """The way that suits the file system of `path`: mapped, or over a network by kept blocks."""
    kind = _file_system(path)
    return "cached" if kind in SLOW or kind.startswith("fuse") else "mmap"


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
