"""Megatron's indexed data set: tokens in a `.bin`, lengths and places of the documents in an `.idx`.

The `.idx`, little-endian, as NVIDIA/Megatron-LM writes it (megatron/core/datasets/indexed_dataset.py):
9 bytes `MMIDIDX\\0\\0`; uint64 version (1); uint8 code of the tokens' type; uint64 S, the number of sequences;
uint64 D, the number of document indices (documents and one); int32[S] tokens of each sequence; int64[S] byte
offset of each sequence in the `.bin`; int64[D] the sequence at which each document begins, then S. jingu
writes one sequence a document.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from jingu.data.manifest import Shard, damaged
from jingu.data.reading import Ids, Reading, Stored, open_numbers
from jingu.errors import JinguError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, str] = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
"""Codes of the types that hold token ids (6 and 7 are floats)."""

LEGACY_MAGIC = b"TNTIDX\x00\x00"
LEGACY = struct.Struct("<8sQQQQQQ")


def best_dtype(vocabulary: int) -> str:
    """The type Megatron takes for a vocabulary: uint16 below 65,500, else int32."""
    return "uint16" if vocabulary < 65_500 else "int32"


class IndexedWriter:
    """Writes PREFIX.bin and PREFIX.idx; memory grows by 4 bytes a document."""

    def __init__(self, prefix: Path, dtype: str) -> None:
        self._prefix, self._dtype = prefix, np.dtype(dtype).newbyteorder("<")
        self._stream = prefix.with_name(f"{prefix.name}.bin").open("wb")
        self._hash = xxhash.xxh3_128()
        self._lengths = [np.zeros(0, "<i4")]
        self._text_bytes = self.tokens = 0

    def add(self, ids: Ids, lengths: npt.NDArray[Any], text_bytes: int = 0) -> None:
        """Append documents: their `ids` one after another, the `lengths` that part them, their size as text."""
        if int(lengths.sum()) != len(ids):
            raise ValueError(f"lengths add up to {int(lengths.sum())}, but there are {len(ids)} ids")
        if len(lengths) and int(lengths.max()) > np.iinfo(np.int32).max:
            raise JinguError("a document is longer than 2,147,483,647 tokens, the most the format can hold.")
        data = np.ascontiguousarray(ids, dtype=self._dtype).data.cast("B") if len(ids) else b""
        self._stream.write(data)
        self._hash.update(data)
        self._lengths.append(lengths.astype("<i4"))
        self._text_bytes += text_bytes
        self.tokens += len(ids)

    def close(self) -> Shard:
        """Write the index, and tell what both files hold."""
        self._stream.close()
        lengths = np.concatenate(self._lengths)
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


@dataclass(frozen=True)
class Layout:
    """What an index says of itself: the type of the ids, and where its arrays are (type, byte, numbers)."""

    dtype: str
    lengths: tuple[str, int, int]
    pointers: tuple[str, int, int]
    pointer_size: int
    """Bytes that a pointer counts."""


class IndexedReader:
    """PREFIX.bin and PREFIX.idx, opened read-only; raises JinguError where they do not fit together.

    Opening reads the header of the index and its last entries, whatever its size. The format is the one above, or
    the older `TNTIDX` (fairseq's, and Megatron's `lazy` and `cached`).
    """

    def __init__(self, prefix: Path, reading: Reading = "mmap") -> None:
        bin_path, self.path = prefix.with_name(prefix.name + ".bin"), prefix.with_name(prefix.name + ".idx")
        try:
            # Little is looked at, here and there: mapped pages would add up over many shards.
            self._index = open_numbers(self.path, "uint8", self.path.stat().st_size, "lazy")
            self._layout = _layout(self.path, self._index)
            self.dtype = self._layout.dtype
            start, length = self.place(len(self) - 1) if len(self) else (0, 0)
            there, used = bin_path.stat().st_size, (start + length) * np.dtype(self.dtype).itemsize
            if there < used:
                raise damaged(bin_path, f"the file has {there:,} bytes, but its .idx speaks of {used:,}.")
            self.storage = open_numbers(bin_path, self.dtype, start + length, reading)
        except OSError as error:
            file = Path(error.filename or self.path)
            raise damaged(file, f"the file cannot be read ({error.strerror}).") from error

    @property
    def tokens(self) -> int:
        """Ids in the `.bin`."""
        return len(self.storage)

    @property
    def ids(self) -> Ids:
        """[tokens] all of them."""
        return self.storage.read(0, self.tokens)

    @property
    def lengths(self) -> Ids:
        """[sequences] tokens of each."""
        return self._read(self._layout.lengths, 0, len(self))

    def __len__(self) -> int:
        """Number of sequences."""
        return self._layout.lengths[2]

    def place(self, index: int) -> tuple[int, int]:
        """First token of a sequence in the `.bin`, and its length. Raises IndexError where there is no such."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.path} has {len(self):,} sequences, numbered from 0, and no {index:,}")
        start = int(self._read(self._layout.pointers, index, index + 1)[0]) * self._layout.pointer_size
        length = int(self._read(self._layout.lengths, index, index + 1)[0])
        return start // np.dtype(self.dtype).itemsize, length

    def __getitem__(self, index: int) -> Ids:
        """Ids of one sequence."""
        start, length = self.place(index)
        return self.storage.read(start, start + length)

    def _read(self, array: tuple[str, int, int], start: int, stop: int) -> Ids:
        """Numbers [start, stop) of one of the index's arrays."""
        dtype, offset = np.dtype(array[0]).newbyteorder("<"), array[1]
        return self._index.read(offset + start * dtype.itemsize, offset + stop * dtype.itemsize).view(dtype)


def _layout(path: Path, index: Stored) -> Layout:
    """Read the header of an index."""
    size, head = len(index), index.read(0, LEGACY.size).tobytes()
    if head[: len(LEGACY_MAGIC)] == LEGACY_MAGIC:
        return _legacy_layout(path, head, size)
    if head[: len(MAGIC)] != MAGIC:
        raise damaged(path, "this is not the index of a Megatron data set (its first bytes are not MMIDIDX).")
    if size < HEADER.size:
        raise damaged(path, f"the index ends at byte {size}, inside its header.")
    _, version, code, sequences, indices = HEADER.unpack(head[: HEADER.size])
    start, need = HEADER.size, HEADER.size + 12 * sequences + 8 * indices
    layout = Layout(
        dtype=_dtype(path, version, code),
        lengths=("int32", start, sequences),
        pointers=("int64", start + 4 * sequences, sequences),
        pointer_size=1,
    )
    if size < need:
        raise damaged(path, f"the index ends at byte {size:,}, but {need:,} were announced.")
    return layout


def _legacy_layout(path: Path, head: bytes, size: int) -> Layout:
    """uint64 version (1), code, size of an id, number of sequences and of their dimensions, and in Megatron's variant

    of documents; then in int64 the first dimension of each sequence and one, its first id and one, the dimensions
    (their one is the length), and where there are any the documents.
    """
    if size < LEGACY.size:
        raise damaged(path, f"the index ends at byte {size}, inside its header.")
    _, version, code, id_size, sequences, dims, marks = LEGACY.unpack(head)
    dtype = _dtype(path, version, code)
    arrays = 8 * (2 * (sequences + 1) + dims)
    plain = size == LEGACY.size - 8 + arrays
    start = LEGACY.size - 8 if plain else LEGACY.size
    if not plain and size != start + arrays + 8 * marks:
        raise damaged(path, f"the index has {size:,} bytes, but {start + arrays + 8 * marks:,} were announced.")
    if dims != sequences or id_size != np.dtype(dtype).itemsize:
        raise damaged(path, "the index is not of sequences of ids, but of arrays of more dimensions.")
    offsets = start + 8 * (sequences + 1)
    return Layout(
        dtype=dtype,
        lengths=("int64", start + 16 * (sequences + 1), dims),
        pointers=("int64", offsets, sequences),
        pointer_size=id_size,
    )


def _dtype(path: Path, version: int, code: int) -> str:
    if version != VERSION:
        raise damaged(path, f"the index has version {version}; only version {VERSION} can be read.")
    if code not in DTYPES:
        names = ", ".join(f"{code} ({name})" for code, name in DTYPES.items())
        raise damaged(path, f"the index has type code {code}; ids can be {names}.")
    return DTYPES[code]
