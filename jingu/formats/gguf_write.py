"""The bytes of GGUF files: a header, and tensors that are converted while they are written (format: `gguf.py`).

Shapes: G groups of 32 elements of a row.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jingu.checkpoint.mapped_files import expect_read
from jingu.checkpoint.shards import has_nan_or_infinity, tensor_bytes
from jingu.runtime.device import make_worker_threads
from jingu.runtime.gpus import num_usable_cores

_VERSION = 3
# Tensors begin at multiples of so many bytes.
_ALIGNMENT = 32
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Elements that a thread converts at a time, so that they stay in its cache.
_CHUNK = 1 << 17
# More threads than this are not faster than the system's copy of the bytes into the page cache.
_MAX_THREADS = 4
# Bytes after which those that are written go to the disk.
_FLUSH_BYTES = 1 << 26
_Q8_0_GROUP, _Q8_0_LARGEST = 32, 127
# The largest number in fp32 below 0.5. Added to a number and truncated, it rounds halves away from zero, and no others.
_BELOW_HALF = 0.5 - 2.0**-25


@dataclass(frozen=True)
class OutputTensor:
    """A tensor of the file.

    Attributes:
        name: GGUF's name.
        shape: its shape, in PyTorch's order.
        kind: its type, of the package's `GGMLQuantizationType`.
        read: yields its parts along the first dim, in order. Parts of bytes are written as they are.
    """

    name: str
    shape: tuple[int, ...]
    kind: Any
    read: Callable[[], Iterator[Tensor]]


def write_gguf(
    file: Path, metadata: Mapping[str, Any], tensors: Sequence[OutputTensor], library: ModuleType
) -> list[str]:
    """Write a GGUF file; return names of tensors with NaN or infinity. One part of a tensor at a time is in memory.

    Args:
        metadata: values of 32 bits, texts, and lists. An empty list is left out, since its type is unknown.
        library: the package `gguf`.

    Raises:
        OSError: the file cannot be written.
    """
    begins: list[int] = []
    size = 0
    for tensor in tensors:
        begins.append(size)
        block, width = library.GGML_QUANT_SIZES[tensor.kind]
        size += _round_up(prod(tensor.shape) // block * width)
    header = _header(metadata, tensors, begins, library.GGUFValueType)
    # Threads write at their places; without a buffer, the bytes are copied once.
    with file.open("xb", buffering=0) as out:
        os.truncate(out.fileno(), len(header) + size)
        _write_at(out.fileno(), memoryview(header), 0)
        with _RowWriter(out.fileno(), max(tensor.shape[-1] for tensor in tensors), library) as writer:
            broken = [
                tensor.name
                for tensor, begin in zip(tensors, begins, strict=True)
                if not _write_tensor(writer, len(header) + begin, tensor, library)
            ]
            writer.finish()
    return broken


def _round_up(size: int) -> int:
    return size + -size % _ALIGNMENT


# The header


def _header(
    metadata: Mapping[str, Any], tensors: Sequence[OutputTensor], begins: Sequence[int], types: Any
) -> bytearray:
    """Return the bytes before the first tensor.

    Args:
        begins: positions of the tensors behind the header.
        types: the package's `GGUFValueType`.
    """
    entries = {key: value for key, value in metadata.items() if value != []}
    parts = [b"GGUF", struct.pack("<IQQ", _VERSION, len(tensors), len(entries))]
    for key, value in entries.items():
        kind = types.ARRAY if isinstance(value, list) else _value_type(value, types)
        parts += [_text(key), struct.pack("<I", kind), _value(value, types)]
    for tensor, begin in zip(tensors, begins, strict=True):
        dims = tensor.shape[::-1]
        parts.append(_text(tensor.name))
        parts.append(struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, tensor.kind, begin))
    header = bytearray().join(parts)
    return header.ljust(_round_up(len(header)), b"\0")


def _value_type(value: Any, types: Any, *, in_list: bool = False) -> int:
    """Return the type of a value that is no list. Lists have signed numbers."""
    if isinstance(value, bool):
        return int(types.BOOL)
    if isinstance(value, int):
        return int(types.INT32 if in_list else types.UINT32)
    return int(types.FLOAT32 if isinstance(value, float) else types.STRING)


def _value(value: Any, types: Any) -> bytes:
    """Return the bytes of a value or of a list of values of one type."""
    if isinstance(value, list):
        kind = _value_type(value[0], types, in_list=True)
        codes = {types.BOOL: "?", types.INT32: "i", types.FLOAT32: "f"}
        if kind in codes:
            content = struct.pack(f"<{len(value)}{codes[kind]}", *value)
        else:
            content = b"".join(map(_text, value))
        return struct.pack("<IQ", kind, len(value)) + content
    codes = {types.BOOL: "?", types.UINT32: "I", types.FLOAT32: "f"}
    kind = _value_type(value, types)
    return struct.pack(f"<{codes[kind]}", value) if kind in codes else _text(str(value))


def _text(text: str) -> bytes:
    content = text.encode()
    return struct.pack("<Q", len(content)) + content


# Tensors


class _Buffers:
    """Memory in which a thread converts a few rows, again and again: new memory would be mapped anew each time."""

    def __init__(self, size: int) -> None:
        self._values = torch.empty(3, size)

    def take(self, index: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the beginning of one of the three buffers."""
        return self._values[index].view(dtype)[:size]

    def copy(self, index: int, rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a copy of rows in one of the buffers."""
        return self.take(index, rows.numel(), dtype).view_as(rows).copy_(rows)


class _RowWriter:
    """Writes rows of tensors at places of an open file, on several threads.

    Args:
        descriptor: of the file.
        columns: the largest number of elements of a row.
        library: the package `gguf`.
    """

    def __init__(self, descriptor: int, columns: int, library: ModuleType) -> None:
        self._descriptor, self._library = descriptor, library
        threads = min(num_usable_cores(), _MAX_THREADS)
        self._pool = make_worker_threads(threads, "gguf")
        self._buffers = [_Buffers(max(_CHUNK, columns)) for _ in range(threads)]
        self._flusher = ThreadPoolExecutor(1)
        self._flush: Future[None] | None = None
        self._unflushed_bytes = 0

    def __enter__(self) -> _RowWriter:
        return self

    def __exit__(self, *_error: object) -> None:
        self._pool.shutdown()
        self._flusher.shutdown()

    def write(self, rows: Tensor, kind: Any, begin: int, row_bytes: int) -> bool:
        """Write rows [R, C] from a position on; return whether all elements are finite. Raises OSError."""
        chunks = rows.split(max(1, _CHUNK // rows.shape[1]))
        positions = range(begin, begin + len(rows) * row_bytes, len(chunks[0]) * row_bytes)
        # Writes to one file wait for each other, so that copies gain nothing by further threads.
        threads = 1 if _FLOATS.get(kind.name) == rows.dtype else min(len(self._buffers), len(chunks))

        def write_share(number: int) -> bool:
            is_finite = True
            for chunk, position in zip(chunks[number::threads], positions[number::threads], strict=True):
                expect_read(chunk)
                content = _row_bytes(chunk, kind, self._buffers[number], self._library)
                is_finite = is_finite and not has_nan_or_infinity(content if content.is_floating_point() else chunk)
                _write_at(self._descriptor, tensor_bytes(content), position)
            return is_finite

        shares = list(self._pool.map(write_share, range(threads)))
        self._unflushed_bytes += len(rows) * row_bytes
        if self._unflushed_bytes > _FLUSH_BYTES and (self._flush is None or self._flush.done()):
            self.finish()
            # The disk works while the next rows are converted.
            self._flush = self._flusher.submit(os.fdatasync, self._descriptor)
            self._unflushed_bytes = 0
        return all(shares)

    def finish(self) -> None:
        """Wait for the flush to the disk that is under way. Raises OSError."""
        if self._flush is not None:
            self._flush.result()


def _write_tensor(writer: _RowWriter, begin: int, tensor: OutputTensor, library: ModuleType) -> bool:
    """Write a tensor at a position of the file; return whether all of its elements are finite."""
    columns = tensor.shape[-1]
    block, width = library.GGML_QUANT_SIZES[tensor.kind]
    row_bytes = columns // block * width
    end = begin + prod(tensor.shape[:-1]) * row_bytes
    is_finite = True
    for part in tensor.read():
        rows = part.reshape(-1, row_bytes if part.dtype == torch.uint8 else columns)
        is_finite = writer.write(rows, tensor.kind, begin, row_bytes) and is_finite
        begin += len(rows) * row_bytes
    # The header is written already, so another number of elements would damage the file.
    if begin != end:
        raise ValueError(f"{tensor.name} has another size than {tensor.shape}")
    return is_finite


def _write_at(descriptor: int, content: memoryview, position: int) -> None:
    """Write all bytes at a position of a file. A system call may write fewer."""
    while content:
        count = os.pwrite(descriptor, content, position)
        position += count
        content = content[count:]


def _row_bytes(rows: Tensor, kind: Any, buffers: _Buffers, library: ModuleType) -> Tensor:
    """Return rows in a tensor type. The bytes that PyTorch computes are equal to those of the package."""
    dtype = rows.dtype if rows.dtype == torch.uint8 else _FLOATS.get(kind.name)
    if dtype == rows.dtype and rows.is_contiguous():
        return rows
    if dtype is not None:
        # PyTorch converts 16 bits to other 16 bits five times as fast by way of 32.
        values = rows if torch.float32 in (dtype, rows.dtype) else buffers.copy(0, rows)
        return buffers.copy(1, values, dtype)
    if kind.name == "Q8_0":
        return _round_to_q8_0(rows, buffers)
    return torch.from_numpy(library.quants.quantize(rows.float().contiguous().numpy(), kind).view(np.uint8))


def _round_to_q8_0(rows: Tensor, buffers: _Buffers) -> Tensor:
    """Return rows in Q8_0: for 32 elements a scale in fp16, and their codes of one byte, rounded away from zero."""
    groups_GE = buffers.copy(0, rows).view(-1, _Q8_0_GROUP)
    scratch_GE = buffers.take(1, rows.numel()).view(-1, _Q8_0_GROUP)
    scale_G1 = torch.abs(groups_GE, out=scratch_GE).amax(1, keepdim=True).div_(_Q8_0_LARGEST)
    # Zeros remain zeros whatever they are multiplied with.
    groups_GE.mul_(scale_G1.clamp_min(torch.finfo(torch.float32).tiny).reciprocal_())
    groups_GE.add_(torch.sign(groups_GE, out=scratch_GE), alpha=_BELOW_HALF)
    # As numbers of 16 bits, the scales are one column.
    width = 1 + _Q8_0_GROUP // 2
    result = buffers.take(2, len(groups_GE) * width, torch.int16).view(-1, width)
    result[:, 0] = scale_G1.half().view(torch.int16)[:, 0]
    result.view(torch.int8)[:, 2:] = groups_GE
    return result
