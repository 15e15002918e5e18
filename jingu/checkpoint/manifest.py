"""The manifest of a checkpoint: its files, and the position of each block of each tensor in them.

It is JSON with a checksum of itself in its first line, so that every byte of a checkpoint has a checksum.
Checksums are XXH3 with 128 bits, in hexadecimal, as `xxhsum -H2` prints them.
This module does not import torch, so that the writer process starts quickly.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from math import prod
from typing import Annotated, Any, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from jingu.checkpoint.remote import CheckpointPath
from jingu.errors import JinguError

MANIFEST = "manifest.json"
STATE = "state.json"
VERSION = 1

# Bytes per element, by the dtype names of the safetensors format.
DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "C64": 8,
}  # fmt: skip

# The checksum in the first line covers the whole file except its own digits.
_OPENING = b'{\n"xxh3_128": "'
_DIGITS = 32

Checksum = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Shape = tuple[NonNegativeInt, ...]


class CheckpointError(JinguError):
    """A checkpoint cannot be written or read."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Piece(_Record):
    """Contiguous elements of a block of a tensor, and their bytes in a file.

    Attributes:
        key: name of the block in the safetensors file.
        offset: index of the piece's first element in the tensor.
        bytes: first byte in the file, and the one after the last.
        xxh3_128: checksum; None in a plan, before the piece is written.
    """

    file: FileName
    key: str
    offset: Shape
    shape: Shape
    bytes: tuple[NonNegativeInt, NonNegativeInt]
    xxh3_128: Checksum | None = None


class TensorRecord(_Record):
    """A whole tensor, with its pieces."""

    dtype: str
    shape: Shape
    pieces: tuple[Piece, ...]

    def unique_pieces(self) -> dict[Shape, Piece]:
        """Return the pieces by offset, without duplicates.

        Two ranks may write the same piece, such as the tied embedding of the first and the last pipeline stage.
        """
        return {piece.offset: piece for piece in reversed(self.pieces) if prod(piece.shape)}


class FileRecord(_Record):
    """Size and checksum of a file."""

    bytes: NonNegativeInt
    xxh3_128: Checksum


class Manifest(_Record):
    """Contents of a checkpoint, or of one rank's part of it.

    Attributes:
        ranks: number of ranks that wrote the checkpoint; any number of ranks can read it.
    """

    format: Literal["jingu checkpoint"] = "jingu checkpoint"
    version: int = VERSION
    ranks: int
    files: dict[FileName, FileRecord]
    tensors: dict[str, TensorRecord]

    def to_bytes(self) -> bytes:
        """Return the JSON text, with one line for each file and tensor, and its checksum in the first line."""
        lines = [f'"format": {_json(self.format)},', f'"version": {self.version},', f'"ranks": {self.ranks},']
        for title, records, end in (("files", self.files, ","), ("tensors", self.tensors, "")):
            rows = [f" {_json(name)}: {record.model_dump_json()}" for name, record in records.items()]
            lines += [f'"{title}": {{', ",\n".join(rows), "}" + end]
        body = "\n".join(['",', *lines, "}\n"]).encode()
        return _OPENING + xxhash.xxh3_128_hexdigest(_OPENING + body).encode() + body

    def pieces_by_file(self) -> dict[str, list[tuple[str, Piece]]]:
        """Return the pieces in each shard file, with their dtypes, in the order of the file."""
        by_file: dict[str, list[tuple[str, Piece]]] = {}
        for record in self.tensors.values():
            for piece in record.pieces:
                by_file.setdefault(piece.file, []).append((record.dtype, piece))
        for pieces in by_file.values():
            pieces.sort(key=lambda item: (item[1].bytes, item[1].key))
        return by_file


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def read_manifest(path: CheckpointPath) -> Manifest:
    """Read a manifest, or a rank's part of one.

    Raises:
        CheckpointError: the file is missing or damaged, or has another version of the format.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path.name} is missing: the save was never finished.", where=path.parent) from None
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read ({error.strerror}).", where=path.parent) from None
    end = len(_OPENING) + _DIGITS
    digest = raw[len(_OPENING) : end]
    covered_bytes = raw[: len(_OPENING)] + raw[end:]
    if not raw.startswith(_OPENING) or digest != xxhash.xxh3_128_hexdigest(covered_bytes).encode():
        raise CheckpointError(f"{path.name} is damaged: it does not match its checksum.", where=path.parent)
    try:
        manifest = Manifest.model_validate_json(b"{" + raw[end + len('",') :])
    except ValidationError as error:
        detail = error.errors()[0]
        field = ".".join(map(str, detail["loc"]))
        raise CheckpointError(f"{path.name} is not a manifest: {field}: {detail['msg']}.", where=path.parent) from None
    if manifest.version != VERSION:
        raise CheckpointError(
            f"{path.name} has version {manifest.version} of the format, and this jingu reads version {VERSION}.",
            where=path.parent,
            fix="Use the version of jingu that wrote it, or a later one.",
        )
    return manifest


def is_intact(path: CheckpointPath) -> bool:
    """Return whether a manifest, or a rank's part of one, can be read and matches its checksum."""
    try:
        read_manifest(path)
    except CheckpointError:
        return False
    return True


def merge(parts: Iterable[Manifest]) -> Manifest:
    """Merge all ranks' parts into one manifest, sorted by tensor name."""
    files: dict[str, FileRecord] = {}
    tensors: dict[str, TensorRecord] = {}
    ranks = 0
    for part in parts:
        files |= part.files
        ranks = part.ranks
        for name, record in part.tensors.items():
            other_record = tensors.get(name, TensorRecord(dtype=record.dtype, shape=record.shape, pieces=()))
            if (other_record.dtype, other_record.shape) != (record.dtype, record.shape):
                raise CheckpointError(
                    f"ranks disagree about tensor {name}: {other_record.dtype} {list(other_record.shape)} and "
                    f"{record.dtype} {list(record.shape)}."
                )
            tensors[name] = other_record.model_copy(update={"pieces": other_record.pieces + record.pieces})
    return Manifest(ranks=ranks, files=files, tensors={name: tensors[name] for name in sorted(tensors)})


def shard_header(pieces: Iterable[tuple[str, Piece]]) -> bytes:
    """Return the header of a shard file, given its pieces and their dtypes."""
    blocks: dict[str, tuple[str, list[Piece]]] = {}
    for dtype, piece in pieces:
        blocks.setdefault(piece.key, (dtype, []))[1].append(piece)
    # Sort by decreasing element size, so that every tensor is aligned; then by name, like the safetensors library.
    ordered_blocks = sorted(blocks.items(), key=lambda item: (-DTYPE_BYTES[item[1][0]], item[0]))
    return safetensors_header(
        (key, dtype, [sum(piece.shape[0] for piece in rows), *rows[0].shape[1:]] if rows[0].shape else [])
        for key, (dtype, rows) in ordered_blocks
    )


def safetensors_header(tensors: Iterable[tuple[str, str, Sequence[int]]]) -> bytes:
    """Return the header of a safetensors file, given name, dtype and shape of its tensors in the order of the file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + prod(shape) * DTYPE_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = _json(header).encode()
    text += b" " * (-len(text) % 8)  # aligns the data after the header to 8 bytes
    return len(text).to_bytes(8, "little") + text


def check(manifest: Manifest) -> None:
    """Check that the pieces of every tensor cover each of its elements once, and are within their files.

    Raises:
        CheckpointError: names the first tensor that fails the check.
    """
    for name, record in manifest.tensors.items():
        if record.dtype not in DTYPE_BYTES:
            raise CheckpointError(f"tensor {name} has the unknown dtype {record.dtype}.")
        width = DTYPE_BYTES[record.dtype]
        for piece in record.pieces:
            begin, end = piece.bytes
            # The piece must be within the tensor, and its bytes within the file and of the right number.
            inside = len(piece.offset) == len(piece.shape) == len(record.shape) and all(
                first + extent <= full_extent
                for first, extent, full_extent in zip(piece.offset, piece.shape, record.shape, strict=True)
            )
            file = manifest.files.get(piece.file)
            fits = file is not None and end <= file.bytes and end - begin == prod(piece.shape) * width
            if not (inside and fits and piece.xxh3_128):
                raise CheckpointError(f"the piece {piece.key} of tensor {name} does not fit where it should be.")
        pieces = record.unique_pieces()
        if any(piece.xxh3_128 != pieces[piece.offset].xxh3_128 for piece in record.pieces if prod(piece.shape)):
            raise CheckpointError(f"ranks disagree about the values of tensor {name}.")
        elements = sum(prod(piece.shape) for piece in pieces.values())
        if elements != prod(record.shape):
            raise CheckpointError(
                f"tensor {name} has {prod(record.shape)} elements and its pieces {elements}: "
                "some are missing or appear twice."
            )
