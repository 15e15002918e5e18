"""Readers of files with numbers of one type: memory-mapped, with single reads, or through a block cache.

A file is opened once, read-only. Every reader can be used from several threads.
"""

from __future__ import annotations

import os
import weakref
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

IdArray = npt.NDArray[Any]
# "infer" chooses by the file system.
ReaderType = Literal["mmap", "lazy", "cached", "infer"]
CACHE_BLOCK_BYTES = 4 << 20
# Number of cached blocks for each file (LRU).
MAX_CACHED_BLOCKS = 16
# On network file systems a page fault is a round trip, and memory mapping is not always reliable.
_FILE_SYSTEM_NAMES = "9p afs beegfs ceph cifs gfs2 glusterfs gpfs lustre nfs nfs4 pvfs2 smb3"
NETWORK_FILE_SYSTEMS = set(_FILE_SYSTEM_NAMES.split())
# Where Linux lists the mounted file systems.
MOUNTINFO = Path("/proc/self/mountinfo")


class ArrayReader(Protocol):
    """An array of `len()` numbers of one type."""

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> IdArray:
        """Return numbers [start, stop), fewer at the end of the file. The result is read-only."""


class MmapReader:
    """Numbers of a memory-mapped file."""

    def __init__(self, path: Path, dtype: str, count: int) -> None:
        little_endian = np.dtype(dtype).newbyteorder("<")
        # An empty file cannot be mapped.
        if count:
            self._array = np.asarray(np.memmap(path, little_endian, "r", shape=(count,)))
        else:
            self._array = np.zeros(0, little_endian)
        self._array.flags.writeable = False

    def __len__(self) -> int:
        return len(self._array)

    def read(self, start: int, stop: int) -> IdArray:
        return self._array[start:stop]


class PreadReader:
    """Numbers of a file; each read is a system call."""

    def __init__(self, path: Path, dtype: str, count: int) -> None:
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._count = count
        self._path = path
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)

    def __len__(self) -> int:
        return self._count

    def read(self, start: int, stop: int) -> IdArray:
        position = start * self._dtype.itemsize
        end = min(stop, self._count) * self._dtype.itemsize
        chunks = []
        while position < end:
            # A system call reads at most 2 GB.
            chunk = os.pread(self._file, end - position, position)
            if not chunk:
                raise OSError(f"{self._path} ends at byte {position:,}; it was truncated while it was read")
            chunks.append(chunk)
            position += len(chunk)
        return np.frombuffer(b"".join(chunks), self._dtype)


class CachedReader:
    """Numbers of a file, read in large blocks; the most recently used blocks stay in memory."""

    def __init__(self, path: Path, dtype: str, count: int) -> None:
        file = PreadReader(path, dtype, count)
        block_size = CACHE_BLOCK_BYTES // np.dtype(dtype).itemsize
        self._count = count
        self._block_size = block_size
        self._read_block = lru_cache(MAX_CACHED_BLOCKS)(
            lambda number: file.read(number * block_size, (number + 1) * block_size)
        )

    def __len__(self) -> int:
        return self._count

    def read(self, start: int, stop: int) -> IdArray:
        stop = max(min(stop, self._count), start)
        first = start // self._block_size
        last = max(stop - 1, start) // self._block_size
        blocks = [self._read_block(number) for number in range(first, last + 1)]
        # Avoid the copy if all numbers are in one block.
        array = np.concatenate(blocks) if len(blocks) > 1 else blocks[0]
        return array[start - first * self._block_size : stop - first * self._block_size]


_READERS: dict[ReaderType, type[MmapReader | PreadReader | CachedReader]] = {
    "mmap": MmapReader,
    "lazy": PreadReader,
    "cached": CachedReader,
}


def open_array(path: Path, dtype: str, count: int, reader_type: ReaderType) -> ArrayReader:
    """Open the first `count` numbers of type `dtype` (little-endian) in a file."""
    reader = infer_reader(path) if reader_type == "infer" else _READERS[reader_type]
    return reader(path, dtype, count)


def infer_reader(path: Path) -> type[MmapReader | CachedReader]:
    """Return the reader for the file system of `path`: a block cache on network file systems, else memory mapping."""
    file_system = _file_system(path)
    if file_system in NETWORK_FILE_SYSTEMS or file_system.startswith("fuse"):
        return CachedReader
    return MmapReader


def _file_system(path: Path) -> str:
    """Return the type of file system that contains a path; empty if the system does not say."""
    try:
        lines = MOUNTINFO.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    real_path = path.resolve()
    longest = ""
    file_system = ""
    for line in lines:
        # The fifth field is the mount point; the first after " - " is the type.
        mount, _, source = line.partition(" - ")
        mount_point = mount.split(" ")[4].replace("\\040", " ")
        # The longest mount point that contains the path wins; of equal ones, the last mounted.
        if real_path.is_relative_to(mount_point) and len(mount_point) >= len(longest):
            longest = mount_point
            file_system = source.split(" ")[0]
    return file_system
