"""Tensors between files and memory, a piece at a time."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from jingu.checkpoint.manifest import DTYPES
from jingu.checkpoint.shards import memory_of
from jingu.errors import JinguError


@dataclass(frozen=True)
class Header:
    """A tensor in a safetensors file. A dtype that torch has no name for here is given as text."""

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
            f"The weight file is damaged or cut short ({error}).", where=path, fix="Fetch the file again."
        ) from error
    table.pop("__metadata__", None)
    headers = {}
    for name, entry in table.items():
        begin, end = entry["data_offsets"]
        dtype = DTYPES.get(entry["dtype"], entry["dtype"])
        headers[name] = Header(torch.Size(entry["shape"]), dtype, 8 + size + begin, end - begin)
    return headers


def read_at(path: Path, position: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor whose row-major bytes begin at `position` of a file. Not mapped: a conversion's memory stays bounded.

    Raises OSError, also where the file ends early.
    """
    tensor = torch.empty(shape, dtype=dtype)
    rest = memory_of(tensor)
    with path.open("rb", buffering=0) as file:
        file.seek(position)
        while len(rest):
            count = file.readinto(rest)
            if not count:
                raise OSError("the file ends early")
            rest = rest[count:]
    return tensor
