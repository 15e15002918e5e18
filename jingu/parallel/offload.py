"""Tensors in files on disk, mapped into memory: optimizer state and master weights beyond what the memory holds.

The kernel keeps as much of them in memory as there is room for. An optimizer goes through them a layer at a time: the
next layers are read ahead, and what has been changed is on its way to the disk while the next layer is computed.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jingu.compat.torch_distributed import dtensor_like, is_dtensor
from jingu.errors import JinguError
from jingu.parallel.sharding import local_tensor
from jingu.runtime.files import write_error

# Layers that are read ahead of the one that is computed.
PREFETCH_LAYERS = 2


class DiskStorage:
    """Memory in an unnamed temporary file, which disappears with the process, however that ends.

    Args:
        folder: on a local disk; it is made where there is none.
        setting: that chooses the folder.
    """

    def __init__(self, folder: Path, setting: str = "parallel.offload.path=...") -> None:
        self._folder, self._setting = folder, setting
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        except OSError as error:
            raise self._cannot_write(error) from error
        self._size = 0
        self._places: dict[int, tuple[int, mmap.mmap]] = {}

    def zeros_like(self, tensor: Tensor) -> Tensor:
        """Return zeros on disk in the shape of a tensor or DTensor, on any device, also meta.

        Raises:
            JinguError: the disk has no room for it.
        """
        if is_dtensor(tensor):
            return dtensor_like(self.zeros_like(tensor.to_local()), tensor)
        size = tensor.numel() * tensor.element_size()
        if not size:
            return torch.empty_like(tensor, device="cpu")
        try:
            # Room is taken now: a write to a mapped file for which there is none would end the process.
            os.posix_fallocate(self._file.fileno(), self._size, size)
        except OSError as error:
            raise self._cannot_write(error) from error
        mapped = mmap.mmap(self._file.fileno(), size, offset=self._size)
        mapped_tensor = torch.frombuffer(mapped, dtype=tensor.dtype).view(tensor.shape)
        self._places[mapped_tensor.data_ptr()] = (self._size, mapped)
        self._size += -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        return mapped_tensor

    def read_ahead(self, tensors: Sequence[Tensor]) -> None:
        """Start to prefetch tensors, and return at once."""
        for _, mapped in self._mappings(tensors):
            mapped.madvise(mmap.MADV_WILLNEED)

    def write_behind(self, tensors: Sequence[Tensor]) -> None:
        """Start to write changed tensors back, and return at once."""
        for offset, mapped in self._mappings(tensors):
            os.posix_fadvise(self._file.fileno(), offset, len(mapped), os.POSIX_FADV_DONTNEED)

    def _mappings(self, tensors: Sequence[Tensor]) -> list[tuple[int, mmap.mmap]]:
        """Return offset and mapping of those tensors that are on disk."""
        starts = (local_tensor(tensor).data_ptr() for tensor in tensors)
        return [self._places[start] for start in starts if start in self._places]

    def _cannot_write(self, error: OSError) -> JinguError:
        return write_error(error, self._folder, f"choose another folder ({self._setting})")


def stream_optimizer_steps(optimizer: torch.optim.Optimizer, disk: DiskStorage) -> None:
    """Let the optimizer step one layer at a time; parameter groups of a layer have the same `layer`."""
    optimizer.step = partial(_step, optimizer, optimizer.step, disk)  # type: ignore[assignment, method-assign]


def _step(optimizer: torch.optim.Optimizer, step: Any, disk: DiskStorage) -> None:
    groups = optimizer.param_groups
    layers: dict[str, list[dict[str, Any]]] = {}
    for group in groups:
        layers.setdefault(group["layer"], []).append(group)
    layer_tensors = [_tensors(optimizer, layer) for layer in layers.values()]
    try:
        for number, layer in enumerate(layers.values()):
            for tensors in layer_tensors[number + PREFETCH_LAYERS if number else 0 : number + PREFETCH_LAYERS + 1]:
                disk.read_ahead(tensors)
            optimizer.param_groups = layer
            step()
            disk.write_behind(layer_tensors[number])
    finally:
        optimizer.param_groups = groups


def _tensors(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]) -> list[Tensor]:
    """Return the parameters of groups and their optimizer state."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    return [*parameters, *(state for parameter in parameters for state in optimizer.state[parameter].values())]
