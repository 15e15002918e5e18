"""Shard files: blocks of tensors as safetensors, written and read in chunks, without copies.

The format: eight bytes with the length of a JSON header, the header, then the bytes of all tensors one after another
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from jingu.checkpoint.manifest import DTYPE_NAMES, CheckpointError, FileRecord, Manifest, Piece, Stored
from jingu.checkpoint.slices import Extent, Slice, overlap

CHUNK = 4 << 20
"""Bytes that are hashed and written, or read and hashed, while they are still in the processor's cache."""
SEGMENT = 256 << 10
"""Runs of bytes shorter than this are read together with what lies between them."""


@dataclass(frozen=True)
class Held:
    """A block of a logical tensor in this rank's memory."""

    name: str
    slice: Slice
    local: Tensor


def deal(blocks: Sequence[Held]) -> list[Held]:
    """Of the blocks this rank holds, those it writes: equal copies are dealt out, the largest first.

    Every rank that holds a copy comes to the same result without asking: it looks at whole tensors only.
    """
    weights: dict[object, list[int]] = {}
    mine = []
    for block in sorted(blocks, key=lambda block: (-prod(block.slice.shape), block.name)):
        dealt = weights.setdefault((block.slice.group, block.slice.replicas), [0] * block.slice.replicas)
        writer = dealt.index(min(dealt))
        dealt[writer] += max(1, prod(block.slice.shape) * block.local.element_size())
        if writer == block.slice.replica:
            mine.append(block)
    return mine


def write_shard(path: Path, blocks: Sequence[Held], ranks: int) -> Manifest:
    """Write this rank's share of the blocks it holds; returns its part of the manifest.

    Raises:
        CheckpointError: a dtype without a name in the format, or two blocks of one key.
        OSError: as the disk will have it.
    """
    dtypes = {block.name: _dtype_name(block.name, block.local.dtype) for block in blocks}
    written = [block for block in deal(blocks) if block.local.numel() or not prod(block.slice.shape)]
    # Wide dtypes first, so that every tensor is aligned to its elements; then by name, as the library does.
    written.sort(key=lambda block: (-block.local.element_size(), block.name))
    keys = [_key(block) for block in written]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    ends = [0]
    for key, block in zip(keys, written, strict=True):
        ends.append(ends[-1] + block.local.numel() * block.local.element_size())
        if key in header:
            raise CheckpointError(f"two tensors would be stored as {key}.")
        header[key] = {
            "dtype": dtypes[block.name],
            "shape": list(block.slice.size),
            "data_offsets": ends[-2:],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    stored = {block.name: Stored(dtype=dtypes[block.name], shape=block.slice.shape, pieces=()) for block in blocks}
    with _Writer(path) as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for key, block, begin, end in zip(keys, written, ends, ends[1:], strict=False):
            digest = xxhash.xxh3_128()
            for chunk in chunks(block.local):
                digest.update(chunk)
                out.write(chunk)
            piece = Piece(
                file=path.name,
                key=key,
                offset=block.slice.offset,
                shape=block.slice.size,
                bytes=(start + begin, start + end),
                xxh3_128=digest.hexdigest(),
            )
            stored[block.name] = stored[block.name].model_copy(update={"pieces": (piece,)})
    return Manifest(ranks=ranks, files={path.name: out.record}, tensors=stored)


def _dtype_name(name: str, dtype: torch.dtype) -> str:
    if dtype not in DTYPE_NAMES:
        raise CheckpointError(f"tensor {name} has dtype {dtype}, which the safetensors format has no name for.")
    return DTYPE_NAMES[dtype]


def _key(block: Held) -> str:
    """Name in the shard file: the logical name, and which block of it this is unless it is all of it."""
    if block.slice.size == block.slice.shape:
        return block.name
    ranges = (f"{first}:{first + n}" for first, n in zip(block.slice.offset, block.slice.size, strict=True))
    return f"{block.name}[{','.join(ranges)}]"


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in main memory, in place, writable.

    Not through numpy: an array made of a tensor pins the size of its storage for good, and the sharding engine must
    be able to free and regrow the storages that it gathers parameters into.
    """
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(bytearray())
    array = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    array.tensor = tensor  # type: ignore[attr-defined]  # the memory lives as long as the view
    return memoryview(array).cast("B")


def chunks(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor, row-major, a chunk at a time; no copy of a contiguous tensor in main memory."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    for first in range(0, raw.numel(), CHUNK):
        yield memory_of(raw[first : first + CHUNK].cpu())


class _Writer:
    """A new file, hashed while it is written and on disk when it is closed."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb", buffering=0)
        self._digest = xxhash.xxh3_128()
        self._bytes = 0

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        try:
            if kind is None:
                os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        self._digest.update(view)
        self._bytes += len(view)
        write_all(self._file, view)

    @property
    def record(self) -> FileRecord:
        return FileRecord(bytes=self._bytes, xxh3_128=self._digest.hexdigest())


def write_all(file: io.FileIO, view: memoryview) -> None:
    """The system may take less than it is given; and it may fail here, for want of room."""
    while len(view):
        view = view[file.write(view) :]


def write_bytes(path: Path, data: bytes) -> FileRecord:
    """A small file, on disk when this returns."""
    with _Writer(path) as out:
        out.write(data)
    return out.record


@contextlib.contextmanager
def reading(path: Path, record: FileRecord) -> Iterator[int]:
    """A file descriptor; what goes wrong while reading from it becomes a `CheckpointError` that names the file."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        raise CheckpointError(f"{path.name} is missing.", where=path.parent) from None
    try:
        yield descriptor
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read ({error.strerror}).", where=path.parent) from error
    except EOFError:
        size = os.fstat(descriptor).st_size
        raise CheckpointError(f"{path.name} has {size} bytes, not {record.bytes}.", where=path.parent) from None
    finally:
        os.close(descriptor)


def fill_overlap(descriptor: int, piece: Piece, block: Held, folder: Path) -> None:
    """Read what a stored piece and a block have in common into the block; a piece read whole is checked."""
    found = overlap(piece.offset, piece.shape, block.slice.offset, block.slice.size)
    assert found is not None
    begins, size = found
    target = block.local
    for dim, (begin, first, extent) in enumerate(zip(begins, block.slice.offset, size, strict=True)):
        target = target.narrow(dim, begin - first, extent)
    inside = tuple(begin - first for begin, first in zip(begins, piece.offset, strict=True))
    digest = xxhash.xxh3_128() if size == piece.shape else None
    source = _Source(descriptor, digest)
    if not size:  # no dims: one element, read as a row of one
        source.read_block(piece.bytes[0], (1,), (0,), target.reshape(1))
    else:
        source.read_block(piece.bytes[0], piece.shape, inside, target)
    if digest is not None and digest.hexdigest() != piece.xxh3_128:
        raise CheckpointError(
            f"{piece.file}: the bytes of tensor {piece.key} do not match their checksum.", where=folder
        )


class _Source:
    """An open shard file; hashes what it reads if given a digest (of pieces that are read whole)."""

    def __init__(self, descriptor: int, digest: xxhash.xxh3_128 | None) -> None:
        self._descriptor = descriptor
        self._digest = digest

    def read_bytes(self, position: int, view: memoryview) -> None:
        for first in range(0, len(view), CHUNK):
            chunk = rest = view[first : first + CHUNK]
            while len(rest):
                count = os.preadv(self._descriptor, [rest], position)
                if count == 0:
                    raise EOFError
                position, rest = position + count, rest[count:]
            if self._digest is not None:
                self._digest.update(chunk)

    def read_block(self, base: int, shape: Extent, offset: Extent, target: Tensor) -> None:
        """Copy the block at `offset` of the row-major array of `shape` at byte `base` to `target`.

        One run of bytes goes straight to its place. A block of long runs is read run by run. Otherwise whole rows
        (index of the first dim) are read a chunk at a time, with the bytes between the runs, and copied out.
        """
        size, width = tuple(target.shape), target.element_size()
        row = prod(shape[1:]) * width
        position = base + offset[0] * row
        is_run = size[1:] == shape[1:]
        if is_run and target.is_contiguous() and target.device.type == "cpu":
            self.read_bytes(position, memory_of(target))
            return
        if len(shape) > 1 and (row > CHUNK or (not is_run and size[1] * prod(shape[2:]) * width >= SEGMENT)):
            for index in range(size[0]):
                self.read_block(position + index * row, shape[1:], offset[1:], target[index])
            return
        rows = max(1, CHUNK // row)
        for first in range(0, size[0], rows):
            count = min(rows, size[0] - first)
            raw = torch.empty(count * row, dtype=torch.uint8)
            self.read_bytes(position + first * row, memory_of(raw))
            found = raw.view(target.dtype).view(count, *shape[1:])
            for dim in range(1, len(shape)):
                found = found.narrow(dim, offset[dim], size[dim])
            target[first : first + count].copy_(found)
