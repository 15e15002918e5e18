"""Megatron's indexed data set: tokens in a `.bin`, lengths and offsets of the documents in an `.idx`.

The `.idx`, little-endian, as NVIDIA/Megatron-LM writes it (megatron/core/datasets/indexed_dataset.py):

- 9 bytes `MMIDIDX\\0\\0`; uint64 version (1); uint8 code of the tokens' type
- uint64 S, the number of sequences; uint64 D, the number of document indices (documents and one)
- int32[S] tokens of each sequence; int64[S] byte offset of each sequence in the `.bin`
- int64[D] the first sequence of each document, then S

jingu writes one sequence for each document. Other tools may divide a document into several, such as its sentences.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from jingu.data.array_reader import ArrayReader, IdArray, ReaderType, open_array
from jingu.data.dataset_manifest import ShardEntry, damaged_dataset_error, sample_checksum
from jingu.errors import JinguError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
# Codes of the types of token ids; 6 and 7 are floats.
DTYPES: dict[int, str] = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}

LEGACY_MAGIC = b"TNTIDX\x00\x00"
LEGACY_HEADER = struct.Struct("<8sQQQQQQ")


def best_dtype(vocab_size: int) -> str:
    """Return the type that Megatron uses for a vocabulary: uint16 below 65,500 entries, else int32."""
    return "uint16" if vocab_size < 65_500 else "int32"


class IndexedWriter:
    """Writes PREFIX.bin and PREFIX.idx. Memory grows by 4 bytes per document."""

    def __init__(self, prefix: Path, dtype: str) -> None:
        self._prefix = prefix
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._stream = prefix.with_name(f"{prefix.name}.bin").open("wb")
        self._hash = xxhash.xxh3_128()
        self._lengths = [np.zeros(0, "<i4")]
        self._text_bytes = 0
        self.tokens = 0

    def add(self, ids: IdArray, lengths: npt.NDArray[Any], text_bytes: int = 0) -> None:
        """Append documents: their concatenated ids, the length of each document, and the bytes of all texts."""
        if int(lengths.sum()) != len(ids):
            raise ValueError(f"lengths add up to {int(lengths.sum())}, but there are {len(ids)} ids")
        if len(lengths) and int(lengths.max()) > np.iinfo(np.int32).max:
            raise JinguError("a document is longer than 2,147,483,647 tokens, the maximum of the format.")
        data = np.ascontiguousarray(ids, dtype=self._dtype).data.cast("B") if len(ids) else b""
        self._stream.write(data)
        self._hash.update(data)
        self._lengths.append(lengths.astype("<i4"))
        self._text_bytes += text_bytes
        self.tokens += len(ids)

    def close(self) -> ShardEntry:
        """Write the index, and return the manifest entry of both files."""
        self._stream.close()
        lengths = np.concatenate(self._lengths)
        ends = np.cumsum(lengths, dtype="<i8") * self._dtype.itemsize
        offsets = np.concatenate([np.zeros(1, "<i8"), ends])[: len(lengths)]
        code = next(code for code, name in DTYPES.items() if name == self._dtype.name)
        header = HEADER.pack(MAGIC, VERSION, code, len(lengths), len(lengths) + 1)
        documents = np.arange(len(lengths) + 1)
        index = b"".join([header, lengths.tobytes(), offsets.tobytes(), documents.tobytes()])
        index_path = self._prefix.with_name(f"{self._prefix.name}.idx")
        index_path.write_bytes(index)
        return ShardEntry(
            name=self._prefix.name,
            documents=len(lengths),
            tokens=self.tokens,
            text_bytes=self._text_bytes,
            bin_bytes=self.tokens * self._dtype.itemsize,
            idx_bytes=len(index),
            bin_xxh3=self._hash.hexdigest(),
            idx_xxh3=xxhash.xxh3_128_hexdigest(index),
            bin_sample_xxh3=sample_checksum(self._prefix.with_name(f"{self._prefix.name}.bin")),
            idx_sample_xxh3=sample_checksum(index_path),
        )


@dataclass(frozen=True)
class IndexLayout:
    """The header of an index: the type of the ids, and the positions of the index's arrays."""

    dtype: str
    # Type, first byte and number of the entries.
    lengths: tuple[str, int, int]
    offsets: tuple[str, int, int]
    # The first sequence of each document, and the number of sequences; None: each sequence is a document.
    documents: tuple[str, int, int] | None
    # Bytes that an offset of 1 stands for.
    offset_unit: int


class IndexedReader:
    """PREFIX.bin and PREFIX.idx, opened read-only.

    Opening reads the header of the index and its last entries, whatever its size. The format is the one above, or the
    older `TNTIDX` (of fairseq, and of Megatron's `lazy` and `cached`).

    Raises:
        JinguError: a file is missing or damaged, or the two do not match.
    """

    def __init__(self, prefix: Path, reader_type: ReaderType = "mmap") -> None:
        bin_path = prefix.with_name(f"{prefix.name}.bin")
        self.path = prefix.with_name(f"{prefix.name}.idx")
        try:
            # Do not map the index: only a few random entries are read, and mapped pages of many shards would add up.
            self._index = open_array(self.path, "uint8", self.path.stat().st_size, "lazy")
            self._layout = _read_layout(self.path, self._index)
            self.dtype = self._layout.dtype
            if self._layout.documents is not None:
                first, last = (int(self._read(self._layout.documents, n, n + 1)[0]) for n in (0, self.num_documents))
                if (first, last) != (0, len(self)):
                    what = f"its documents are the sequences {first:,} to {last:,}, but it has {len(self):,}."
                    raise damaged_dataset_error(self.path, what)
            start, length = self.sequence_range(len(self) - 1) if len(self) else (0, 0)
            actual = bin_path.stat().st_size
            num_bytes = (start + length) * np.dtype(self.dtype).itemsize
            if actual < num_bytes:
                raise damaged_dataset_error(
                    bin_path, f"the file has {actual:,} bytes, but its .idx refers to {num_bytes:,}."
                )
            self.storage = open_array(bin_path, self.dtype, start + length, reader_type)
        except OSError as error:
            file = Path(error.filename or self.path)
            raise damaged_dataset_error(file, f"the file cannot be read ({error.strerror}).") from error

    @property
    def tokens(self) -> int:
        """Number of ids in the `.bin`."""
        return len(self.storage)

    @property
    def ids(self) -> IdArray:
        """[tokens] all ids."""
        return self.storage.read(0, self.tokens)

    @property
    def lengths(self) -> IdArray:
        """[sequences] tokens of each sequence."""
        return self._read(self._layout.lengths, 0, len(self))

    def __len__(self) -> int:
        """Return the number of sequences."""
        return self._layout.lengths[2]

    def sequence_range(self, index: int) -> tuple[int, int]:
        """Return the first token of a sequence in the `.bin`, and its length. Raises IndexError."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.path} has {len(self):,} sequences, numbered from 0, but no {index:,}")
        first_byte = int(self._read(self._layout.offsets, index, index + 1)[0]) * self._layout.offset_unit
        length = int(self._read(self._layout.lengths, index, index + 1)[0])
        return first_byte // np.dtype(self.dtype).itemsize, length

    @property
    def num_documents(self) -> int:
        """Number of documents, which consist of one sequence or several."""
        return len(self) if self._layout.documents is None else self._layout.documents[2] - 1

    def document_starts(self, first: int, stop: int) -> npt.NDArray[np.int64]:
        """Return [stop - first] the first token in the `.bin` of documents [first, stop), and of what follows the last.

        The number after the last document is the number of tokens.
        """
        if self._layout.documents is None:
            sequences = np.arange(first, stop, dtype=np.int64)
        else:
            sequences = self._check_documents(self._read(self._layout.documents, first, stop).astype(np.int64))
        starts = np.full(stop - first, self.tokens, dtype=np.int64)
        inside = sequences < len(self)
        if inside.any():
            # The sequences of neighboring documents are neighbors in the index.
            low = int(sequences[0])
            offsets = self._read(self._layout.offsets, low, int(sequences[inside][-1]) + 1).astype(np.int64)
            unit = np.dtype(self.dtype).itemsize
            starts[inside] = offsets[sequences[inside] - low] * self._layout.offset_unit // unit
        return starts

    @property
    def document_lengths(self) -> npt.NDArray[np.int64]:
        """[documents] tokens of each document. Reads the whole index."""
        lengths = self.lengths.astype(np.int64)
        if self._layout.documents is None:
            return lengths
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        documents = self._read(self._layout.documents, 0, self._layout.documents[2]).astype(np.int64)
        return np.diff(ends[self._check_documents(documents)])

    def _check_documents(self, sequences: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return entries of the document index. Raise JinguError unless they rise from 0 to the number of sequences."""
        if len(sequences) and (sequences[0] < 0 or sequences[-1] > len(self) or (np.diff(sequences) < 0).any()):
            raise damaged_dataset_error(self.path, "the first sequences of its documents are not in order.")
        return sequences

    def __getitem__(self, index: int) -> IdArray:
        """Return the ids of one sequence."""
        start, length = self.sequence_range(index)
        return self.storage.read(start, start + length)

    def _read(self, array: tuple[str, int, int], start: int, stop: int) -> IdArray:
        """Return entries [start, stop) of one of the index's arrays."""
        dtype = np.dtype(array[0]).newbyteorder("<")
        first_byte = array[1]
        return self._index.read(first_byte + start * dtype.itemsize, first_byte + stop * dtype.itemsize).view(dtype)


def _read_layout(path: Path, index: ArrayReader) -> IndexLayout:
    """Read the header of an index."""
    size = len(index)
    header = index.read(0, LEGACY_HEADER.size).tobytes()
    if header.startswith(LEGACY_MAGIC):
        return _read_legacy_layout(path, header, size)
    if not header.startswith(MAGIC):
        raise damaged_dataset_error(path, "this is not a Megatron index (its first bytes are not MMIDIDX).")
    if size < HEADER.size:
        raise damaged_dataset_error(path, f"the index ends at byte {size}, inside its header.")
    _, version, code, sequences, documents = HEADER.unpack(header[: HEADER.size])
    layout = IndexLayout(
        dtype=_read_dtype(path, version, code),
        lengths=("int32", HEADER.size, sequences),
        offsets=("int64", HEADER.size + 4 * sequences, sequences),
        documents=("int64", HEADER.size + 12 * sequences, documents) if documents > 1 else None,
        offset_unit=1,
    )
    num_bytes = HEADER.size + 12 * sequences + 8 * documents
    if size < num_bytes:
        raise damaged_dataset_error(path, f"the index ends at byte {size:,}, but its header announces {num_bytes:,}.")
    return layout


def _read_legacy_layout(path: Path, header: bytes, size: int) -> IndexLayout:
    """Read the header of an index in the older format.

    It has uint64 numbers: version (1), type code, bytes of an id, sequences, their dimensions, and in Megatron's
    variant documents. Then come int64 arrays: the first dimension of each sequence and one more entry, the first id
    of each sequence and one more entry, the dimensions (one a sequence: its length), and in Megatron's variant the
    documents.
    """
    if size < LEGACY_HEADER.size:
        raise damaged_dataset_error(path, f"the index ends at byte {size}, inside its header.")
    _, version, code, id_size, sequences, dimensions, documents = LEGACY_HEADER.unpack(header)
    dtype = _read_dtype(path, version, code)
    arrays_size = 8 * (2 * (sequences + 1) + dimensions)
    # fairseq's variant has no number of documents: its arrays begin 8 bytes earlier.
    start = LEGACY_HEADER.size - 8
    marks = None
    if size != start + arrays_size:
        start = LEGACY_HEADER.size
        num_bytes = start + arrays_size + 8 * documents
        if size != num_bytes:
            raise damaged_dataset_error(path, f"the index has {size:,} bytes, but its header announces {num_bytes:,}.")
        marks = ("int64", start + arrays_size, documents) if documents > 1 else None
    if dimensions != sequences or id_size != np.dtype(dtype).itemsize:
        raise damaged_dataset_error(path, "the index is of multi-dimensional arrays, not of sequences of ids.")
    return IndexLayout(
        dtype=dtype,
        lengths=("int64", start + 16 * (sequences + 1), dimensions),
        offsets=("int64", start + 8 * (sequences + 1), sequences),
        documents=marks,
        offset_unit=id_size,
    )


def _read_dtype(path: Path, version: int, code: int) -> str:
    """Return the type of the ids. Raises JinguError for an unknown version or code."""
    if version != VERSION:
        raise damaged_dataset_error(path, f"the index has version {version}; only version {VERSION} is supported.")
    if code not in DTYPES:
        names = ", ".join(f"{code} ({name})" for code, name in DTYPES.items())
        raise damaged_dataset_error(path, f"the index has type code {code}; ids can be {names}.")
    return DTYPES[code]
