"""Reading safetensors files that other tools wrote."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from jingu.checkpoint.shards import DTYPES
from jingu.errors import JinguError

# Elements to cast, check or dequantize at a time, chosen to fit into a CPU's cache.
CHUNK_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class TensorLocation:
    """The location of a tensor in a file.

    Attributes:
        dtype: the dtype, or its name in the file if torch lacks it, as for quantized weights.
        begin: position of the first byte in the file.
        bytes: number of bytes.
    """

    shape: torch.Size
    dtype: torch.dtype | str
    begin: int
    bytes: int

    def part(self, expert: int, number: int = 0, count: int = 1) -> TensorLocation:
        """Return one of `count` equal ranges of rows of an expert's matrix, of a tensor [E, ...]."""
        shape = self.shape[1:]
        if count > 1:
            shape = torch.Size((shape[0] // count, *shape[1:]))
        size = self.bytes // self.shape[0] // count
        return TensorLocation(shape, self.dtype, self.begin + (expert * count + number) * size, size)


def read_header(path: Path) -> dict[str, TensorLocation]:
    """Return the location of each tensor in a safetensors file. Raises JinguError if the file is damaged or missing."""
    try:
        with safe_open(path, framework="pt"):
            pass  # the library checks the header, and that all tensors lie within the file
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            table = json.loads(file.read(size))
    except (SafetensorError, OSError) as error:
        raise JinguError(
            f"the weight file is damaged or cut short ({error}).", where=path, fix="Fetch the file again."
        ) from error
    table.pop("__metadata__", None)
    locations = {}
    for name, entry in table.items():
        begin, end = entry["data_offsets"]
        dtype = DTYPES.get(entry["dtype"], entry["dtype"])
        locations[name] = TensorLocation(torch.Size(entry["shape"]), dtype, 8 + size + begin, end - begin)
    return locations
