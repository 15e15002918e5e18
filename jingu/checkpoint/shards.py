"""Shard files: each rank writes its blocks of tensors to one file, and reads the files of any other layout.

A shard file is a safetensors file: eight bytes with the length of a JSON header, the header, then the bytes of all
tensors one after another (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod

import torch
import xxhash
from torch import Tensor

from jingu.checkpoint import manifest as manifests
from jingu.checkpoint.manifest import DTYPE_BYTES, CheckpointError, FileRecord, Manifest, Piece, TensorRecord
from jingu.checkpoint.remote import CheckpointPath
from jingu.checkpoint.save_folder import RandomAccessFile, mismatch, shard_name
from jingu.parallel.sharding import Extent, TensorBlock, subblock

# A block is stored in pieces of about this many bytes, each with its own checksum and read by one thread.
PIECE_BYTES = 32 << 20
# Staging buffer of a reading thread, for bytes that cannot be read directly into their tensor. With a quarter of this
# size, the disk waits for the copying thread, and loading is a tenth slower.
STAGING_BYTES = 4 << 20

_TORCH_DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8,
    torch.bool, torch.complex64,
)  # fmt: skip
# PyTorch's dtypes by their names in the safetensors format, and the reverse.
DTYPES: dict[str, torch.dtype] = dict(zip(DTYPE_BYTES, _TORCH_DTYPES, strict=True))
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


# Writing


def blocks_to_write(blocks: Mapping[str, TensorBlock]) -> list[str]:
    """Return the names of the local blocks that this rank writes.

    Ranks with equal copies of blocks share the work, largest tensors first. They need not communicate, because they all
    derive the same assignment from the sizes of whole tensors.
    """
    bytes_by_writer: dict[object, list[int]] = {}
    mine = []
    for name, block in sorted(blocks.items(), key=lambda item: (-prod(item[1].shape), item[0])):
        writers = bytes_by_writer.setdefault((block.group, block.replicas), [0] * block.replicas)
        writer = writers.index(min(writers))
        writers[writer] += max(1, prod(block.shape) * block.local.element_size())
        if writer == block.replica:
            mine.append(name)
    return mine


def plan_part(blocks: Mapping[str, TensorBlock], rank: int, ranks: int) -> tuple[Manifest, dict[str, TensorBlock]]:
    """Plan this rank's shard file.

    Returns:
        This rank's part of the manifest, without checksums and with positions relative to the end of the header; and
        the blocks to write, in the order of the file.

    Raises:
        CheckpointError: the format has no name for a dtype, or two blocks have the same key.
    """
    # Write an empty block only if the whole tensor has no elements.
    names = [name for name in blocks_to_write(blocks) if blocks[name].local.numel() or not prod(blocks[name].shape)]
    keys = {name: _key(name, blocks[name]) for name in names}
    # Sort by decreasing element size, so that every tensor is aligned.
    names.sort(key=lambda name: (-blocks[name].local.element_size(), keys[name]))
    for name, following in pairwise(names):
        if keys[name] == keys[following]:
            raise CheckpointError(f"two tensors would be stored as {keys[name]}.")
    pieces: dict[str, list[Piece]] = {name: [] for name in blocks}
    file = shard_name(rank, ranks)
    end = 0
    for name in names:
        block = blocks[name]
        itemsize = block.local.element_size()
        elements = max(PIECE_BYTES // itemsize, prod(block.size[1:]))
        for offset, shape in boxes(block.offset, block.size, elements):
            begin, end = end, end + prod(shape) * itemsize
            pieces[name].append(Piece(file=file, key=keys[name], offset=offset, shape=shape, bytes=(begin, end)))
    tensors = {
        name: TensorRecord(dtype=_dtype_name(name, block.local.dtype), shape=block.shape, pieces=tuple(pieces[name]))
        for name, block in blocks.items()
    }
    return Manifest(ranks=ranks, files={}, tensors=tensors), {name: blocks[name] for name in names}


def _dtype_name(name: str, dtype: torch.dtype) -> str:
    if dtype not in DTYPE_NAMES:
        raise CheckpointError(f"tensor {name} has dtype {dtype}, which the safetensors format has no name for.")
    return DTYPE_NAMES[dtype]


def _key(name: str, block: TensorBlock) -> str:
    """Return the name of a block in its shard file: the tensor's name and, for a part of it, the index ranges."""
    if block.size == block.shape:
        return name
    ranges = (f"{first}:{first + extent}" for first, extent in zip(block.offset, block.size, strict=True))
    return f"{name}[{','.join(ranges)}]"


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, writable, without a copy.

    This does not use `Tensor.numpy`, after which PyTorch can no longer resize the storage. FSDP must be able to free
    and resize the storages that it gathers parameters into.
    """
    if not tensor.nbytes:
        return memoryview(bytearray())
    array = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    array.tensor = tensor  # type: ignore[attr-defined]  # the memory lives as long as the view
    return memoryview(array).cast("B")


def has_nan_or_infinity(tensor: Tensor) -> bool:
    """Return whether some element is not finite."""
    # NaN and infinity also appear in the sum. It takes a quarter of the time of the extremes, but may overflow.
    return not tensor.sum().isfinite() and not all(bool(extreme.isfinite()) for extreme in tensor.aminmax())


def piece_bytes(block: TensorBlock, piece: Piece) -> memoryview:
    """Return the row-major bytes of a piece of a block, without a copy if they are contiguous in main memory."""
    return tensor_bytes(subblock(block.local, block.offset, piece.offset, piece.shape).contiguous().cpu())


# Reading


def check_header(
    file: RandomAccessFile, pieces: Sequence[tuple[str, Piece]], record: FileRecord, path: CheckpointPath
) -> None:
    """Raise CheckpointError if the size or the header of a shard file does not match its pieces (with their dtypes)."""
    expected_header = manifests.shard_header(pieces)
    if file.size != record.bytes:
        raise _damage_error(f"{path.name} has {file.size} bytes, not {record.bytes}", path.parent)
    header = bytearray(len(expected_header))
    file.fill(0, memoryview(header))
    if header != expected_header:
        raise _damage_error(f"{path.name} does not match its checksum", path.parent)


def _damage_error(what: str, folder: CheckpointPath) -> CheckpointError:
    fix = "Name an earlier checkpoint instead; `jingu checkpoint verify` shows which ones of a run are good."
    return CheckpointError(f"{what}.", where=folder, fix=fix)


def fill_from_piece(
    block: TensorBlock, piece: Piece, file: RandomAccessFile, folder: CheckpointPath, staging: Tensor
) -> None:
    """Read a stored piece, verify its checksum, and copy the elements that it has in common with a block.

    All bytes of the piece are read, in order, because the checksum covers all of them. Parts that the block needs
    completely are read directly into it; the others are copied through `staging`, a buffer of `STAGING_BYTES`.

    Raises:
        CheckpointError: the checksum does not match. The block then has damaged values.
    """
    digest = xxhash.xxh3_128()
    position = piece.bytes[0]
    itemsize = block.local.element_size()
    for offset, size in boxes(piece.offset, piece.shape, STAGING_BYTES // itemsize):
        buffer = staging[: prod(size) * itemsize]
        target = None
        region = overlap(offset, size, block.offset, block.size)
        if region is not None:
            target = subblock(block.local, block.offset, *region)
        direct = target is not None and target.shape == size and target.is_contiguous() and target.is_cpu
        view = tensor_bytes(target if target is not None and direct else buffer)
        file.fill(position, view)
        digest.update(view)
        position += len(view)
        if region is not None and target is not None and not direct:
            values = buffer.view(target.dtype).view(size)
            target.copy_(subblock(values, offset, *region))
    if digest.hexdigest() != piece.xxh3_128:
        raise _damage_error(mismatch(piece), folder)


# Boxes of indices


def overlap(offset_a: Extent, size_a: Extent, offset_b: Extent, size_b: Extent) -> tuple[Extent, Extent] | None:
    """Return offset and size of the intersection of two blocks; None if it is empty."""
    begins = tuple(max(a, b) for a, b in zip(offset_a, offset_b, strict=True))
    ends = (min(a + n, b + m) for a, n, b, m in zip(offset_a, size_a, offset_b, size_b, strict=True))
    size = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
    return (begins, size) if all(extent > 0 for extent in size) else None


def boxes(offset: Extent, size: Extent, most: int) -> Iterator[tuple[Extent, Extent]]:
    """Split a block into parts of at most `most` elements that are contiguous in its memory; yield offset and size."""
    if not size or prod(size) <= most:
        yield offset, size
        return
    rows = max(1, most // prod(size[1:]))
    for first in range(0, size[0], rows):
        for inner_offset, inner_size in boxes(offset[1:], size[1:], most):
            yield (offset[0] + first, *inner_offset), (min(rows, size[0] - first), *inner_size)
