"""The manifest: which files a checkpoint is made of, and which bytes of them are which block of which tensor.

Nothing here needs torch: the process that writes in the background starts at once.
The JSON carries a checksum of itself in its first line, so that no byte of a checkpoint is without one.
Checksums are XXH3 with 128 bits, in hexadecimal, as `xxhsum -H2` prints them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from math import prod
from typing import Annotated, Any, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from jingu.checkpoint.remote import Place
from jingu.errors import JinguError

MANIFEST = "manifest.json"
STATE = "state.json"
VERSION = 1

WIDTHS = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "C64": 8,
}  # fmt: skip
"""Bytes an element, by the names that the safetensors format gives to dtypes."""

_OPENING = b'{\n"xxh3_128": "'
_DIGITS = 32

Checksum = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Shape = tuple[NonNegativeInt, ...]


class CheckpointError(JinguError):
    """A checkpoint that cannot be written or read: what is wrong with it, and where."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Piece(_Record):
    """Some rows of a block of a tensor: where they belong, and the bytes of the file that hold them."""

    file: FileName
    key: str
    """Name of the block in the safetensors file."""
    offset: Shape
    shape: Shape
    bytes: tuple[NonNegativeInt, NonNegativeInt]
    """First byte in the file, and the one after the last."""
    xxh3_128: Checksum | None = None
    """None while the piece is only planned."""


class Stored(_Record):
    """One logical tensor."""

    dtype: str
    shape: Shape
    pieces: tuple[Piece, ...]


class FileRecord(_Record):
    """What a file must be."""

    bytes: NonNegativeInt
    xxh3_128: Checksum


class Manifest(_Record):
    """A checkpoint, or one rank's part of it."""

    format: Literal["jingu checkpoint"] = "jingu checkpoint"
    version: int = VERSION
    ranks: int
    """Ranks that wrote it; any number can read it."""
    files: dict[FileName, FileRecord]
    tensors: dict[str, Stored]

    def to_bytes(self) -> bytes:
        """The JSON text, a line for each file and tensor, its own checksum in its first line."""
        lines = [f'"format": {_json(self.format)},', f'"version": {self.version},', f'"ranks": {self.ranks},']
        for title, records, end in (("files", self.files, ","), ("tensors", self.tensors, "")):
            rows = [f" {_json(name)}: {record.model_dump_json()}" for name, record in records.items()]
            lines += [f'"{title}": {{', ",\n".join(rows), "}" + end]
        body = "\n".join(['",', *lines, "}\n"]).encode()
        return _OPENING + xxhash.xxh3_128_hexdigest(_OPENING + body).encode() + body


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def read_manifest(path: Place) -> Manifest:
    """Read a manifest, or a rank's part of one.

    Raises:
        CheckpointError: it is not there, not the bytes that were written, or of a later version of the format.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path.name} is missing: the save was never finished.", where=path.parent) from None
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read ({error.strerror}).", where=path.parent) from None
    digest, body = raw[len(_OPENING) : len(_OPENING) + _DIGITS], raw[: len(_OPENING)] + raw[len(_OPENING) + _DIGITS :]
    if not raw.startswith(_OPENING) or digest != xxhash.xxh3_128_hexdigest(body).encode():
        raise CheckpointError(f"{path.name} is damaged: it does not match its checksum.", where=path.parent)
    try:
        manifest = Manifest.model_validate_json(b"{" + raw[len(_OPENING) + _DIGITS + len('",') :])
    except ValidationError as error:
        detail = error.errors()[0]
        place = ".".join(map(str, detail["loc"]))
        raise CheckpointError(f"{path.name} is not a manifest: {place}: {detail['msg']}.", where=path.parent) from None
    if manifest.version != VERSION:
        raise CheckpointError(
            f"{path.name} has version {manifest.version} of the format, and this jingu reads version {VERSION}.",
            where=path.parent,
            fix="Use the jingu that wrote it, or a later one.",
        )
    return manifest


def merge(parts: Iterable[Manifest]) -> Manifest:
    """One manifest of all ranks' parts, in an order that depends on the names only."""
    files: dict[str, FileRecord] = {}
    tensors: dict[str, Stored] = {}
    ranks = 0
    for part in parts:
        files |= part.files
        ranks = part.ranks
        for name, stored in part.tensors.items():
            known = tensors.get(name, Stored(dtype=stored.dtype, shape=stored.shape, pieces=()))
            if (known.dtype, known.shape) != (stored.dtype, stored.shape):
                raise CheckpointError(
                    f"ranks do not agree about tensor {name}: {known.dtype} {list(known.shape)} and "
                    f"{stored.dtype} {list(stored.shape)}."
                )
            tensors[name] = known.model_copy(update={"pieces": known.pieces + stored.pieces})
    return Manifest(ranks=ranks, files=files, tensors={name: tensors[name] for name in sorted(tensors)})


def header_of(pieces: Iterable[tuple[str, Piece]]) -> bytes:
    """A shard file's first bytes, up to the first tensor: they follow from the pieces (with their dtypes) in it."""
    blocks: dict[str, tuple[str, list[Piece]]] = {}
    for dtype, piece in pieces:
        blocks.setdefault(piece.key, (dtype, []))[1].append(piece)
    # Wide dtypes first, so that every tensor is aligned to its elements; then by name, as the library does.
    ordered = sorted(blocks.items(), key=lambda item: (-WIDTHS[item[1][0]], item[0]))
    return safetensors_header(
        (key, dtype, [sum(piece.shape[0] for piece in rows), *rows[0].shape[1:]] if rows[0].shape else [])
        for key, (dtype, rows) in ordered
    )


def safetensors_header(tensors: Iterable[tuple[str, str, Sequence[int]]]) -> bytes:
    """What stands before the first of tensors with these names, dtypes and shapes, in the order of the file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + prod(shape) * WIDTHS[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = _json(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def check(manifest: Manifest) -> None:
    """Refuse a manifest whose pieces do not make up its tensors, each element once.

    Raises:
        CheckpointError: naming the first such tensor.
    """
    for name, stored in manifest.tensors.items():
        if stored.dtype not in WIDTHS:
            raise CheckpointError(f"tensor {name} has the unknown dtype {stored.dtype}.")
        width = WIDTHS[stored.dtype]
        for piece in stored.pieces:
            begin, end = piece.bytes
            inside = len(piece.offset) == len(piece.shape) == len(stored.shape) and all(
                first + extent <= whole
                for first, extent, whole in zip(piece.offset, piece.shape, stored.shape, strict=True)
            )
            written = manifest.files.get(piece.file)
            fits = written is not None and end <= written.bytes and end - begin == prod(piece.shape) * width
            if not (inside and fits and piece.xxh3_128):
                raise CheckpointError(f"the piece {piece.key} of tensor {name} does not fit where it should be.")
        held = distinct(stored)
        if any(piece.xxh3_128 != held[piece.offset].xxh3_128 for piece in stored.pieces if prod(piece.shape)):
            raise CheckpointError(f"ranks do not agree about the values of tensor {name}.")
        elements = sum(prod(piece.shape) for piece in held.values())
        if elements != prod(stored.shape):
            raise CheckpointError(
                f"tensor {name} has {prod(stored.shape)} elements and its pieces {elements}: "
                "some are missing or double."
            )


def distinct(stored: Stored) -> dict[Shape, Piece]:
    """The pieces of a tensor, once each, by offset. Ranks that do not know of each other may both have written one, as
    the first and the last stage of a pipeline do where they share a tensor."""
    return {piece.offset: piece for piece in reversed(stored.pieces) if prod(piece.shape)}


def pieces_by_file(manifest: Manifest) -> dict[str, list[tuple[str, Piece]]]:
    """What each shard file holds, with dtypes, in the order of the file."""
    found: dict[str, list[tuple[str, Piece]]] = {}
    for stored in manifest.tensors.values():
        for piece in stored.pieces:
            found.setdefault(piece.file, []).append((stored.dtype, piece))
    return {file: sorted(pieces, key=lambda item: (item[1].bytes, item[1].key)) for file, pieces in found.items()}
