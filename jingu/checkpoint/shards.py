"""Blocks of tensors in shard files: planned from what a rank holds, read back into any other layout.

A shard file is safetensors: eight bytes with the length of a JSON header, the header, then the bytes of all tensors
one after another (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
import xxhash
from torch import Tensor

from jingu.checkpoint.files import Reading, mismatch, shard_name
from jingu.checkpoint.manifest import WIDTHS, CheckpointError, FileRecord, Manifest, Piece, Stored, header_of
from jingu.checkpoint.remote import Place
from jingu.checkpoint.slices import Slice, boxes, cut, overlap

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
    """This rank's part of the manifest, and the blocks to write, in the order of the file. Checksums are left open, and
    bytes are counted from the first of the first block.

    Raises:
        CheckpointError: a dtype without a name in the format, or two blocks of one key.
    """
    written = [block for block in deal(blocks) if block.local.numel() or not prod(block.slice.shape)]
    written.sort(key=lambda block: (-block.local.element_size(), _key(block)))
    if double := {_key(block) for block, following in pairwise(written) if _key(block) == _key(following)}:
        raise CheckpointError(f"two tensors would be stored as {min(double)}.")
    pieces: dict[str, list[Piece]] = {block.name: [] for block in blocks}
    end = 0
    for block in written:
        size, width = block.slice.size, block.local.element_size()
        for offset, shape in boxes(block.slice.offset, size, max(PIECE // width, prod(size[1:]))):
            begin, end = end, end + prod(shape) * width
            piece = Piece(file=shard_name(rank, ranks), key=_key(block), offset=offset, shape=shape, bytes=(begin, end))
            pieces[block.name].append(piece)
    tensors = {
        block.name: Stored(
            dtype=_dtype_name(block.name, block.local.dtype), shape=block.slice.shape, pieces=tuple(pieces[block.name])
        )
        for block in blocks
    }
    return Manifest(ranks=ranks, files={}, tensors=tensors), written


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


def bytes_of(block: Held, piece: Piece) -> memoryview:
    """The bytes of a piece of a block, row-major; no copy of what lies so in main memory."""
    return memory_of(cut(block.local, block.slice.offset, piece.offset, piece.shape).contiguous().cpu())


def check_header(file: Reading, pieces: Sequence[tuple[str, Piece]], record: FileRecord, path: Place) -> None:
    """Refuse a shard file whose length or whose first bytes are not what its pieces (with their dtypes) ask for."""
    expected = header_of(pieces)
    if file.size != record.bytes:
        raise _damaged(f"{path.name} has {file.size} bytes, not {record.bytes}", path.parent)
    found = bytearray(len(expected))
    file.fill(0, memoryview(found))
    if found != expected:
        raise _damaged(f"{path.name} does not match its checksum", path.parent)


def _damaged(what: str, folder: Place) -> CheckpointError:
    fix = "`jingu checkpoint verify` tells which checkpoints of a run are good: an earlier one can be named instead."
    return CheckpointError(f"{what}.", where=folder, fix=fix)


def fill(block: Held, piece: Piece, file: Reading, folder: Place, aside: Tensor) -> None:
    """Read a stored piece, check it, and copy what it has in common with a block into the block.

    All bytes are read, in order, because the checksum is of all of them. What is wanted whole goes straight to its
    place; the rest passes through memory of `ASIDE` bytes.
    """
    digest, position, width = xxhash.xxh3_128(), piece.bytes[0], block.local.element_size()
    for offset, size in boxes(piece.offset, piece.shape, ASIDE // width):
        shared = overlap(offset, size, block.slice.offset, block.slice.size)
        place = passed = aside[: prod(size) * width]
        if shared is not None:
            target = cut(block.local, block.slice.offset, *shared)
            if target.shape == size and target.is_contiguous() and target.is_cpu:
                place = target
        view = memory_of(place)
        file.fill(position, view)
        digest.update(view)
        position += len(view)
        if shared is not None and place is passed:
            target.copy_(cut(passed.view(target.dtype).view(size), offset, *shared))
    if digest.hexdigest() != piece.xxh3_128:
        raise _damaged(mismatch(piece), folder)
