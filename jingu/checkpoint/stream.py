"""Tensors between files and memory, a piece at a time."""

from __future__ import annotations

import ctypes
import json
import mmap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from jingu.checkpoint.files import write_all
from jingu.checkpoint.manifest import safetensors_header
from jingu.checkpoint.shards import DTYPE_NAMES, DTYPES, memory_of
from jingu.errors import JinguError

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
    return (raw.clone() if position % dtype.itemsize else raw).view(dtype).view(shape)


def read_often(tensor: Tensor) -> None:
    """Tell the system that a tensor, which may be one of `read_at`, is read again and again, in any order."""
    if tensor.device.type == "cpu" and tensor.nbytes:
        madvise = getattr(ctypes.CDLL(None), "madvise", None)
        before = tensor.data_ptr() % mmap.PAGESIZE
        if madvise is not None:
            madvise(ctypes.c_void_p(tensor.data_ptr() - before), ctypes.c_size_t(before + tensor.nbytes), 0)


class SafetensorsWriter:
    """A new safetensors file. Its header follows from the shapes, so tensors pass through one at a time."""

    def __init__(self, path: Path, tensors: Mapping[str, tuple[torch.dtype, torch.Size]]) -> None:
        """`tensors`: dtypes and shapes, in the order in which they will be written."""
        header = safetensors_header((name, DTYPE_NAMES[dtype], shape) for name, (dtype, shape) in tensors.items())
        self._expected = iter(tensors.items())
        self._file = path.open("xb", buffering=0)
        write_all(self._file, memoryview(header))

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, *_error: object) -> None:
        self._file.close()

    def write(self, parts: Iterable[Tensor], check: bool = False) -> bool:
        """Write the next tensor, given in parts along its first dim; whether it is finite, where that is to be checked.

        Raises ValueError for another shape than was announced.
        """
        name, (dtype, shape) = next(self._expected)
        rows, finite = 0, True
        for part in parts:
            rows += len(part)
            if part.shape[1:] != shape[1:]:
                raise ValueError(f"{name} has rows of shape {list(part.shape[1:])}")
            for piece in _pieces(part, dtype):
                finite = finite and (not check or _is_finite(piece))
                write_all(self._file, memory_of(piece))
        if rows != shape[0]:
            raise ValueError(f"{name} has {rows} rows")
        return finite


def _is_finite(tensor: Tensor) -> bool:
    """Whether it holds neither NaN nor infinity: both show in the extremes."""
    return not tensor.numel() or all(bool(extreme.isfinite()) for extreme in tensor.aminmax())


def _pieces(tensor: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """A tensor in pieces that are contiguous in main memory and of the dtype: cast or rearranged, a few rows a time."""
    rows = max(1, ELEMENTS * len(tensor) // max(1, tensor.numel()))
    for first in range(0, len(tensor), rows):
        yield tensor[first : first + rows].to("cpu", dtype).contiguous()
