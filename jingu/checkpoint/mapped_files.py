"""Tensors that are memory-mapped from files, and fast repeated reads from their places in the files."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from io import FileIO
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from jingu.errors import JinguError
from jingu.runtime.device import advise_memory


class FileRegion(NamedTuple):
    """The place of a tensor in a file: the path, and the position of its first byte."""

    path: Path
    begin: int


class FileReader:
    """Reads repeatedly from files, which it keeps open. Several threads may use it."""

    def __init__(self) -> None:
        self._files: dict[Path, FileIO] = {}

    def read_into(self, buffers: Sequence[tuple[FileRegion, memoryview]]) -> None:
        """Fill buffers from regions of files, in the order of the files.

        Raises:
            JinguError: a file ends before the region does.
        """
        for (path, begin), buffer in sorted(buffers, key=itemgetter(0)):
            if path not in self._files:
                self._files[path] = FileIO(path)
            # A system call may read less than requested.
            while buffer:
                count = os.preadv(self._files[path].fileno(), [buffer], begin)
                if not count:
                    raise JinguError("the file is shorter than it was.", where=path, fix="Fetch it again.")
                begin += count
                buffer = buffer[count:]


def map_tensor(path: Path, position: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a tensor whose row-major bytes begin at `position` of a file, memory-mapped.

    Each tensor has its own mapping, which is freed together with it, so that conversions need little memory. Changes of
    the tensor are not written to the file.
    """
    size = prod(shape) * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype)
    before = position % mmap.ALLOCATIONGRANULARITY
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), before + size, mmap.MAP_PRIVATE, offset=position - before)
    data.madvise(mmap.MADV_SEQUENTIAL)
    raw = torch.frombuffer(data, dtype=torch.uint8, count=size, offset=before)
    if position % dtype.itemsize:
        raw = raw.clone()  # a copy is aligned to the size of an element, as `view` requires
    tensor = raw.view(dtype).view(shape)
    tensor.file_region = FileRegion(path, position)  # type: ignore[attr-defined]
    return tensor


def map_file(path: Path) -> Tensor:
    """Return the bytes of a file, memory-mapped for repeated reads."""
    content = map_tensor(path, 0, torch.Size((path.stat().st_size,)), torch.uint8)
    expect_repeated_reads(content)
    return content


def file_region(tensor: Tensor) -> FileRegion | None:
    """Return the place in a file of a tensor from `map_tensor`; None for other tensors, including views of it."""
    return getattr(tensor, "file_region", None)


def expect_repeated_reads(tensor: Tensor) -> None:
    """Advise the system that a tensor, which may be memory-mapped, is read repeatedly and in any order."""
    normal = 0  # MADV_NORMAL
    _advise(tensor, normal)


def expect_read(tensor: Tensor) -> None:
    """Map the pages of a contiguous tensor, which may be memory-mapped, at once (`MADV_POPULATE_READ`, Linux 5.14).

    A page fault for each of them takes as long as copying it.
    """
    populate_read = 22
    _advise(tensor, populate_read)


def _advise(tensor: Tensor, advice: int) -> None:
    if tensor.device.type == "cpu" and tensor.nbytes:
        before = tensor.data_ptr() % mmap.PAGESIZE
        advise_memory(tensor.data_ptr() - before, before + tensor.nbytes, advice)
