"""Blocks of tensors in shard files: planned from what a rank holds, read back into any other layout.

A shard file is safetensors: eight bytes with the length of a JSON header, the header, then the bytes of all tensors
one after another (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
import xxhash
from torch import Tensor

from jingu.checkpoint.files import CHUNK, Reading, mismatch, shard_name
from jingu.checkpoint.manifest import WIDTHS, CheckpointError, FileRecord, Manifest, Piece, Stored, header_of
from jingu.checkpoint.remote import Place
from jingu.checkpoint.slices import Extent, Slice, overlap

PIECE = 32 << 20
"""Rows of a block are checked, and read by a thread, in pieces of about this many bytes."""
ASIDE = 4 << 20
"""Bytes that pass through memory of a thread's own, where a block is wanted in part. (With a quarter of it, the disk
waits for the thread that copies: a tenth slower.)"""

_KINDS = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8,
    torch.bool, torch.complex64,
)  # fmt: skip
DTYPES: dict[str, torch.dtype] = dict(zip(WIDTHS, _KINDS, strict=True))
"""The names that the safetensors format gives to PyTorch's dtypes."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


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


def plan_part(blocks: Sequence[Held], rank: int, ranks: int) -> tuple[Manifest, list[Held]]:
    """This rank's part of the manifest, checksums left open, and the blocks to write, in the order of the file.

    Raises:
        CheckpointError: a dtype without a name in the format, or two blocks of one key.
    """
    dtypes = {block.name: _dtype_name(block.name, block.local.dtype) for block in blocks}
    written = [block for block in deal(blocks) if block.local.numel() or not prod(block.slice.shape)]
    written.sort(key=lambda block: (-block.local.element_size(), _key(block)))
    keys = [_key(block) for block in written]
    if double := {key for key, following in pairwise(keys) if key == following}:
        raise CheckpointError(f"two tensors would be stored as {min(double)}.")
    stored = {block.name: Stored(dtype=dtypes[block.name], shape=block.slice.shape, pieces=()) for block in blocks}
    pieces = {key: _pieces(block, key, shard_name(rank, ranks)) for key, block in zip(keys, written, strict=True)}
    end = len(header_of((dtypes[block.name], p) for key, block in zip(keys, written, strict=True) for p in pieces[key]))
    for key, block in zip(keys, written, strict=True):
        placed = []
        for piece in pieces[key]:
            begin, end = end, end + prod(piece.shape) * block.local.element_size()
            placed.append(piece.model_copy(update={"bytes": (begin, end)}))
        stored[block.name] = stored[block.name].model_copy(update={"pieces": tuple(placed)})
    return Manifest(ranks=ranks, files={}, tensors=stored), written


def _pieces(block: Held, key: str, file: str) -> list[Piece]:
    """The pieces of a block, some rows each, not placed in the file yet."""
    offset, size = block.slice.offset, block.slice.size
    rows = max(1, PIECE // max(1, prod(size[1:]) * block.local.element_size()))
    firsts = range(0, size[0], rows) if size and size[0] else [0]
    return [
        Piece(
            file=file,
            key=key,
            offset=(offset[0] + first, *offset[1:]) if size else (),
            shape=(min(rows, size[0] - first), *size[1:]) if size else (),
            bytes=(0, 0),
        )
        for first in firsts
    ]


def rows_of(block: Held, piece: Piece) -> Tensor:
    """The part of a block's tensor that a piece of it holds."""
    return (
        block.local.narrow(0, piece.offset[0] - block.slice.offset[0], piece.shape[0]) if piece.shape else block.local
    )


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


def check_header(file: Reading, pieces: Sequence[tuple[str, Piece]], record: FileRecord, path: Place) -> None:
    """Refuse a shard file whose length or whose first bytes are not what its pieces (with their dtypes) ask for."""
    expected = header_of(pieces)
    if file.size != record.bytes:
        raise CheckpointError(f"{path.name} has {file.size} bytes, not {record.bytes}.", where=path.parent)
    found = bytearray(len(expected))
    file.fill(0, memoryview(found))
    if found != expected:
        raise CheckpointError(f"{path.name} does not match its checksum.", where=path.parent)


class Source:
    """An open shard file, read by one thread: pieces of it go into blocks, and are checked."""

    def __init__(self, file: Reading, folder: Place) -> None:
        self._file, self._folder = file, folder
        self._digest = xxhash.xxh3_128()
        self._scratch = torch.empty(ASIDE, dtype=torch.uint8)

    def fill(self, piece: Piece, block: Held) -> None:
        """Read a stored piece, check it, and copy what it has in common with a block into the block."""
        found = overlap(piece.offset, piece.shape, block.slice.offset, block.slice.size)
        assert found is not None
        begins, size = found
        target = block.local
        for dim, (begin, first, extent) in enumerate(zip(begins, block.slice.offset, size, strict=True)):
            target = target.narrow(dim, begin - first, extent)
        inside = tuple(begin - first for begin, first in zip(begins, piece.offset, strict=True))
        self._digest.reset()
        if not size:  # no dims: one element, read as a row of one
            self._read_block(piece.bytes[0], (1,), (0,), target.reshape(1))
        else:
            self._read_block(piece.bytes[0], piece.shape, inside, target)
        if self._digest.hexdigest() != piece.xxh3_128:
            raise CheckpointError(f"{mismatch(piece)}.", where=self._folder)

    def _read(self, position: int, view: memoryview) -> None:
        for first in range(0, len(view), CHUNK):
            chunk = view[first : first + CHUNK]
            self._file.fill(position + first, chunk)
            self._digest.update(chunk)

    def _read_aside(self, position: int, size: int) -> Tensor:
        """The bytes, in memory that the next call uses again."""
        if self._scratch.numel() < size:  # the innermost dim is longer
            self._scratch = torch.empty(size, dtype=torch.uint8)
        raw = self._scratch[:size]
        self._read(position, memory_of(raw))
        return raw

    def _read_block(self, base: int, shape: Extent, offset: Extent, target: Tensor) -> None:
        """Read all of the row-major array of `shape` at byte `base`; copy the block at `offset` of it to `target`.

        All bytes are read, in order, because the checksum is of all of them. What is wanted whole goes straight to
        its place; the rest passes through a chunk of memory, some rows (indices of the first dim) at a time.
        """
        size, width = tuple(target.shape), target.element_size()
        if size == shape and target.is_contiguous() and target.device.type == "cpu":
            self._read(base, memory_of(target))
            return
        row = prod(shape[1:]) * width
        if row > ASIDE and len(shape) > 1:
            for index in range(shape[0]):
                if offset[0] <= index < offset[0] + size[0]:
                    self._read_block(base + index * row, shape[1:], offset[1:], target[index - offset[0]])
                else:
                    self._pass_over(base + index * row, row)
            return
        rows = max(1, ASIDE // row)
        for first in range(0, shape[0], rows):
            count = min(rows, shape[0] - first)
            found = self._read_aside(base + first * row, count * row).view(target.dtype).view(count, *shape[1:])
            begin, end = max(first, offset[0]), min(first + count, offset[0] + size[0])
            if begin < end:
                found = found[begin - first : end - first]
                for dim in range(1, len(shape)):
                    found = found.narrow(dim, offset[dim], size[dim])
                target[begin - offset[0] : end - offset[0]].copy_(found)

    def _pass_over(self, base: int, size: int) -> None:
        for first in range(0, size, ASIDE):
            self._read_aside(base + first, min(ASIDE, size - first))
