"""Megatron's indexed data set: tokens in a `.bin`, lengths and places of the documents in an `.idx`.

The `.idx`, little-endian, as NVIDIA/Megatron-LM writes it (megatron/core/datasets/indexed_dataset.py):
9 bytes `MMIDIDX\\0\\0`; uint64 version (1); uint8 code of the tokens' type; uint64 S, the number of sequences;
uint64 D, the number of document indices (documents and one); int32[S] tokens of each sequence; int64[S] byte
offset of each sequence in the `.bin`; int64[D] the sequence at which each document begins, then S. jingu
writes one sequence a document.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from jingu.data.manifest import Shard, damaged
from jingu.errors import JinguError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, str] = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
"""Codes of the types that hold token ids (6 and 7 are floats)."""

Ids = npt.NDArray[Any]


def best_dtype(vocabulary: int) -> str:
    """The type Megatron takes for a vocabulary: uint16 below 65,500, else int32."""
    return "uint16" if vocabulary < 65_500 else "int32"


class IndexedWriter:
    """Writes PREFIX.bin and PREFIX.idx; memory grows by 4 bytes a document."""

    def __init__(self, prefix: Path, dtype: str) -> None:
        self._prefix = prefix
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._hash = xxhash.xxh3_128()
        self._lengths: list[npt.NDArray[np.int32]] = []
        self._text_bytes = 0
        self.tokens = 0
        self.stream: BinaryIO = prefix.with_name(f"{prefix.name}.bin").open("wb")

    def add(self, ids: Ids, lengths: npt.NDArray[Any], text_bytes: int = 0) -> None:
        """Append documents: their `ids` one after another, the `lengths` that part them, their size as text."""
        if int(lengths.sum()) != len(ids):
            raise ValueError(f"lengths add up to {int(lengths.sum())}, but there are {len(ids)} ids")
        if len(lengths) and int(lengths.max()) > np.iinfo(np.int32).max:
            raise JinguError("a document is longer than 2,147,483,647 tokens, the most the format can hold.")
        data = np.ascontiguousarray(ids, dtype=self._dtype).data.cast("B") if len(ids) else b""
        self.stream.write(data)
        self._hash.update(data)
        self._lengths.append(lengths.astype("<i4"))
        self._text_bytes += text_bytes
        self.tokens += len(ids)

    def close(self) -> Shard:
        """Write the index, and tell what both files hold."""
        self.stream.close()
        lengths = np.concatenate([np.zeros(0, "<i4"), *self._lengths])
        ends = np.cumsum(lengths, dtype="<i8") * self._dtype.itemsize
        pointers = np.concatenate([np.zeros(1, "<i8"), ends])[: len(lengths)]
        code = next(code for code, name in DTYPES.items() if name == self._dtype.name)
        head = HEADER.pack(MAGIC, VERSION, code, len(lengths), len(lengths) + 1)
        idx_hash = xxhash.xxh3_128()
        with self._prefix.with_name(f"{self._prefix.name}.idx").open("wb") as stream:
            for part in (head, lengths.tobytes(), pointers.tobytes(), np.arange(len(lengths) + 1).tobytes()):
                stream.write(part)
                idx_hash.update(part)
            idx_bytes = stream.tell()
        return Shard(
            name=self._prefix.name,
            documents=len(lengths),
            tokens=self.tokens,
            text_bytes=self._text_bytes,
            bin_bytes=self.tokens * self._dtype.itemsize,
            idx_bytes=idx_bytes,
            bin_xxh3=self._hash.hexdigest(),
            idx_xxh3=idx_hash.hexdigest(),
        )


class IndexedReader:
    """PREFIX.bin and PREFIX.idx, memory-mapped and read-only; raises JinguError where they do not fit together.

    `ids` [tokens] is the whole `.bin`; `lengths` and `pointers` [sequences] and `documents` [documents + 1]
    are the index. Opening reads only the header and the last entry.
    """

    def __init__(self, prefix: Path) -> None:
        bin_path, idx_path = prefix.with_name(prefix.name + ".bin"), prefix.with_name(prefix.name + ".idx")
        index = _map(idx_path)
        self.dtype, sequences, indices = _header(index, idx_path)
        size = np.dtype(self.dtype).itemsize
        need = HEADER.size + 12 * sequences + 8 * indices
        if len(index) < need:
            raise damaged(idx_path, f"the index ends at byte {len(index):,}, but {need:,} were announced.")
        start = HEADER.size
        self.lengths = np.frombuffer(index, "<i4", sequences, start)
        self.pointers = np.frombuffer(index, "<i8", sequences, start + 4 * sequences)
        self.documents = np.frombuffer(index, "<i8", indices, start + 12 * sequences)
        used = int(self.pointers[-1]) + int(self.lengths[-1]) * size if sequences else 0
        data = _map(bin_path)
        if len(data) < used:
            raise damaged(bin_path, f"the file has {len(data):,} bytes, but its .idx speaks of {used:,}.")
        self.ids: Ids = np.frombuffer(data, np.dtype(self.dtype).newbyteorder("<"), used // size)

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    def __getitem__(self, index: int) -> Ids:
        """Ids of one sequence, a view into the map."""
        start = int(self.pointers[index]) // self.ids.itemsize
        return self.ids[start : start + int(self.lengths[index])]


def _map(path: Path) -> mmap.mmap | bytes:
    """The file's bytes, mapped; an empty file cannot be mapped and is just empty."""
    try:
        with path.open("rb") as stream:
            if os.fstat(stream.fileno()).st_size == 0:
                return b""
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise damaged(path, f"the file cannot be read ({error.strerror}).") from error


def _header(index: mmap.mmap | bytes, path: Path) -> tuple[str, int, int]:
    """Type of the ids, number of sequences, number of document indices."""
    if index[: len(MAGIC)] != MAGIC:
        raise damaged(path, "this is not the index of a Megatron data set (its first bytes are not MMIDIDX).")
    if len(index) < HEADER.size:
        raise damaged(path, f"the index ends at byte {len(index)}, inside its header.")
    _, version, code, sequences, indices = HEADER.unpack(index[: HEADER.size])
    if version != VERSION:
        raise damaged(path, f"the index has version {version}; only version {VERSION} can be read.")
    if code not in DTYPES:
        names = ", ".join(f"{code} ({name})" for code, name in DTYPES.items())
        raise damaged(path, f"the index has type code {code}; ids can be {names}.")
    return DTYPES[code], sequences, indices
