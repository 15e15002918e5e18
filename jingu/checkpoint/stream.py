"""Tensors in files of others, read where they lie."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from io import FileIO
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from jingu.checkpoint.shards import DTYPES
from jingu.errors import JinguError
from jingu.runtime.device import advise

ELEMENTS = 1 << 20
"""Elements that are cast, checked or dequantised at a time: about what a processor's cache holds."""


@dataclass(frozen=True)
class Header:
    """A tensor in a file. A dtype that torch has no name for here, as of quantised numbers, is given as text."""

    shape: torch.Size
    dtype: torch.dtype | str
    begin: int
    bytes: int


def read_header(path: Path) -> dict[str, Header]:
    """What a safetensors file holds. Raises JinguError where it is damaged or cut short."""
    try:
        with safe_open(path, framework="pt"):
            pass  # the library checks that the header and all offsets fit the file
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            table = json.loads(file.read(size))
    except (SafetensorError, OSError) as error:
        raise JinguError(
            f"the weight file is damaged or cut short ({error}).", where=path, fix="Fetch the file again."
        ) from error
    table.pop("__metadata__", None)
    headers = {}
    for name, entry in table.items():
        begin, end = entry["data_offsets"]
        dtype = DTYPES.get(entry["dtype"], entry["dtype"])
        headers[name] = Header(torch.Size(entry["shape"]), dtype, 8 + size + begin, end - begin)
    return headers


class Stretch(NamedTuple):
    """Where the bytes of a tensor begin in a file."""

    path: Path
    begin: int


class OpenFiles:
    """Files that stay open, and are read from again and again, by any thread."""

    def __init__(self) -> None:
        self._opened: dict[Path, FileIO] = {}

    def read_into(self, memories: Sequence[tuple[Stretch, memoryview]]) -> None:
        """Fill memories with what lies at these places; what lies in a row is read at once.

        Raises:
            JinguError: a file is shorter by now.
        """
        rest = sorted(memories, key=itemgetter(0))
        while rest:
            (path, begin), first = rest.pop(0)
            row, end = [first], begin + len(first)
            while rest and rest[0][0] == (path, end):
                row.append(rest.pop(0)[1])
                end += len(row[-1])
            if path not in self._opened:
                self._opened[path] = FileIO(path)
            while begin < end:
                count = os.preadv(self._opened[path].fileno(), row, begin)
                if not count:
                    raise JinguError("the file is shorter than it was.", where=path, fix="Fetch it again.")
                begin += count
                while row and count >= len(row[0]):
                    count -= len(row.pop(0))
                row[:1] = [part[count:] for part in row[:1]]


def read_at(path: Path, position: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor whose row-major bytes begin at `position` of a file.

    The bytes are mapped, this tensor's alone, and the mapping goes with the tensor: nothing is copied to be written on,
    and a conversion's memory stays bounded. Changes to the tensor do not reach the file.
    """
    size = prod(shape) * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype)
    before = position % mmap.ALLOCATIONGRANULARITY
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), before + size, mmap.MAP_PRIVATE, offset=position - before)
    data.madvise(mmap.MADV_SEQUENTIAL)
    raw = torch.frombuffer(data, dtype=torch.uint8, count=size, offset=before)
    # Elements that are not aligned to their size are moved to where they are.
    tensor = (raw.clone() if position % dtype.itemsize else raw).view(dtype).view(shape)
    tensor.stretch = Stretch(path, position)  # type: ignore[attr-defined]
    return tensor


def stretch_of(tensor: Tensor) -> Stretch | None:
    """Where a tensor lies that `read_at` gave, as long as it is that very one; None of all that was made of it."""
    return getattr(tensor, "stretch", None)


def read_often(tensor: Tensor) -> None:
    """Tell the system that a tensor, which may be one of `read_at`, is read again and again, in any order."""
    if tensor.device.type == "cpu" and tensor.nbytes:
        before, normal = tensor.data_ptr() % mmap.PAGESIZE, 0
        advise(tensor.data_ptr() - before, before + tensor.nbytes, normal)
