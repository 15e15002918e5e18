"""Offload master weights and optimizer state to disk, as memory-mapped tensors.

The page cache of the operating system keeps as much of them in host memory as fits. The optimizer step runs layer by
layer: the next layers are prefetched, and the changed tensors are written back while the next layer is computed.
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

# Number of layers that are prefetched while one is computed.
PREFETCH_LAYERS = 2


class DiskStorage:
    """Allocates tensors in an unnamed temporary file. The file disappears with the process, even if that is killed.

    Args:
        folder: a folder on a local disk; created if it does not exist.
        setting: the setting that chooses the folder, for error messages.
    """

    def __init__(self, folder: Path, setting: str = "parallel.offload.path=...") -> None:
        self._folder, self._setting = folder, setting
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        except OSError as error:
            raise self._cannot_write(error) from error
        self._size = 0
        # Offset in the file and mapping of each tensor, by its address.
        self._places: dict[int, tuple[int, mmap.mmap]] = {}

    def zeros_like(self, tensor: Tensor) -> Tensor:
        """Return a tensor of zeros on disk with the shape and dtype of a tensor or DTensor.

        The given tensor may be on any device, including meta.

        Raises:
            JinguError: the disk is full.
        """
        if is_dtensor(tensor):
            return dtensor_like(self.zeros_like(tensor.to_local()), tensor)
        size = tensor.numel() * tensor.element_size()
        if not size:
            return torch.empty_like(tensor, device="cpu")
        try:
            # Allocate the disk space now. A later write to a mapped page without disk space would kill the process.
            os.posix_fallocate(self._file.fileno(), self._size, size)
        except OSError as error:
            raise self._cannot_write(error) from error
        mapping = mmap.mmap(self._file.fileno(), size, offset=self._size)
        mapped_tensor = torch.frombuffer(mapping, dtype=tensor.dtype).view(tensor.shape)
        self._places[mapped_tensor.data_ptr()] = (self._size, mapping)
        self._size += -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        return mapped_tensor

    def read_ahead(self, tensors: Sequence[Tensor]) -> None:
        """Start to prefetch tensors, and return at once."""
        for _, mapping in self._mappings(tensors):
            mapping.madvise(mmap.MADV_WILLNEED)

    def write_behind(self, tensors: Sequence[Tensor]) -> None:
        """Start to write changed tensors back, and return at once."""
        for offset, mapping in self._mappings(tensors):
            os.posix_fadvise(self._file.fileno(), offset, len(mapping), os.POSIX_FADV_DONTNEED)

    def _mappings(self, tensors: Sequence[Tensor]) -> list[tuple[int, mmap.mmap]]:
        """Return offset and mapping of each tensor that is on disk; the others are skipped."""
        starts = (local_tensor(tensor).data_ptr() for tensor in tensors)
        return [self._places[start] for start in starts if start in self._places]

    def _cannot_write(self, error: OSError) -> JinguError:
        return write_error(error, self._folder, f"choose another folder ({self._setting})")


def stream_optimizer_steps(optimizer: torch.optim.Optimizer, disk: DiskStorage) -> None:
    """Make `optimizer.step` update one layer at a time, with prefetching and writing back in between.

    Every parameter group must have a key `layer`; groups of one layer have the same value. Wraps `optimizer.step`.
    """
    optimizer.step = partial(_step, optimizer, optimizer.step, disk)  # type: ignore[assignment, method-assign]


def _step(optimizer: torch.optim.Optimizer, step: Any, disk: DiskStorage) -> None:
    """Call the optimizer's own `step` for one layer after another."""
    # Group the parameter groups by layer.
    groups = optimizer.param_groups
    layers: dict[str, list[dict[str, Any]]] = {}
    for group in groups:
        layers.setdefault(group["layer"], []).append(group)
    layer_tensors = [_tensors(optimizer, layer) for layer in layers.values()]
    try:
        for number, layer in enumerate(layers.values()):
            # Prefetch one further layer; before the first layer, all that are ahead.
            for tensors in layer_tensors[number + PREFETCH_LAYERS if number else 0 : number + PREFETCH_LAYERS + 1]:
                disk.read_ahead(tensors)
            # The optimizer sees only the groups of this layer.
            optimizer.param_groups = layer
            step()
            disk.write_behind(layer_tensors[number])
    finally:
        optimizer.param_groups = groups


def _tensors(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]) -> list[Tensor]:
    """Return the parameters of some groups and the optimizer state of these parameters."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    return [*parameters, *(state for parameter in parameters for state in optimizer.state[parameter].values())]
