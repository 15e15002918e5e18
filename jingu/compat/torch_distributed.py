"""Private APIs of `torch.distributed`: process groups, collectives with gradients, device meshes, DTensor."""

from __future__ import annotations

import json
import socket
import struct
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# Process groups


def default_store() -> Any:
    """Return the key-value store of the default process group, with which its ranks rendezvoused."""
    return dist.distributed_c10d._get_default_store()


def may_be_store(connection: socket.socket) -> bool:
    """Return False if the program at the other end of a connection is certainly not a `TCPStore`."""
    # Send two messages of the store's protocol, "validate" and "ping". A store answers the ping with its number.
    number = 4242
    connection.sendall(struct.pack("=BIBI", 0, 0x3C85F7CE, 13, number))
    try:
        answer = connection.recv(4)
    except TimeoutError:
        return True
    # A store of another version may not know the messages, and closes the connection.
    return answer in (b"", struct.pack("=I", number))


def process_groups() -> Iterator[tuple[str, str, list[int]]]:
    """Yield name, description (such as `mesh_tensor`) and ranks of each process group of this rank."""
    world = dist.distributed_c10d._world
    for group, name in world.pg_names.items():
        yield name, group.group_desc, dist.get_process_group_ranks(group)


def set_group_timeouts(timeout: timedelta) -> None:
    """Set the timeout of every process group of this rank. (PyTorch creates groups of mesh axes with half an hour.)"""
    for group in dist.distributed_c10d._world.pg_names:
        dist.distributed_c10d._set_pg_timeout(timeout, group)


def recorded_collectives() -> list[dict[str, Any]]:
    """Return the latest collectives of this process from PyTorch's flight recorder, the oldest first."""
    # PyTorch's type stubs do not declare this function.
    dump: Any = vars(torch._C._distributed_c10d)["_dump_fr_trace_json"]
    text = dump(True, False)
    entries: list[dict[str, Any]] = json.loads(text).get("entries", [])
    return entries


def pretend_ranks(rank: int, world_size: int) -> None:
    """Create a process group whose other ranks do not exist. Its collectives return at once and compute nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


@contextmanager
def static_pipeline_stages() -> Iterator[None]:
    """Make pipeline stages use the shapes that they were given, within the block, without asking the other ranks.

    Since PyTorch 2.13, stages vote on whether they can do so. With simulated ranks (`pretend_ranks`), the vote would be
    no.
    """
    from torch.distributed.pipelining import PipelineStage

    name = "_warmup_backward_result"
    original = getattr(PipelineStage, name, None)
    if original is None:
        yield
        return
    setattr(PipelineStage, name, lambda self, received_result=None: torch.ones(1, dtype=torch.int32))
    try:
        yield
    finally:
        setattr(PipelineStage, name, original)


@dataclass(frozen=True)
class _PendingWork:
    """A send or receive between two ranks that keeps its tensors alive, as a real one does."""

    work: Any
    tensors: list[Tensor]

    def wait(self) -> None:
        self.work.wait()


@contextmanager
def hold_sent_tensors() -> Iterator[None]:
    """Make sends and receives between pipeline stages keep their tensors alive, within the block.

    Schedules keep the work objects of sends until the end of a step. Those of real ranks refer to their tensors, but
    those of simulated ranks (`pretend_ranks`) do not, so the memory of a step would be underestimated.
    """
    from torch.distributed.pipelining import schedules

    original = schedules._batch_p2p

    def exchange(operations: list[Any], desc: str | None = None) -> list[Any]:
        tensors = [operation.tensor for operation in operations]
        return [_PendingWork(work, tensors) for work in original(operations, desc)]

    schedules._batch_p2p = exchange  # type: ignore[assignment]
    try:
        yield
    finally:
        schedules._batch_p2p = original


def collective_group(operation: Any, arguments: Sequence[Any]) -> str | None:
    """Return the description of the process group (mesh axes) that an operation uses; None if it computes locally.

    Args:
        operation: an operator that a dispatch mode has seen.
        arguments: its arguments.
    """
    if operation.namespace not in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
        return None
    if operation.name().partition(".")[0].endswith(("wait_tensor", "_wrap_tensor_autograd")):
        return None
    # The group is one of the arguments: as an object, boxed as a script object, or, before PyTorch 2.13, as a name.
    for argument in reversed(arguments):
        if isinstance(argument, str) and argument not in ("sum", "max"):
            group = dist.distributed_c10d._resolve_process_group(argument)  # type: ignore[attr-defined, arg-type]
            return str(group.group_desc)
        if isinstance(argument, ProcessGroup):
            return str(argument.group_desc)
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return str(ProcessGroup.unbox(argument).group_desc)
    return "default_pg"


def clear_sharding_cache() -> None:
    """Clear DTensor's cache of sharding propagation, which keeps process groups alive."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


# Collectives with gradients. PyTorch 2.12 renamed the first two.

_all_gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
_reduce_scatter = (
    getattr(collectives, "reduce_scatter_single_autograd", None) or collectives.reduce_scatter_tensor_autograd
)


def all_gather(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Concatenate the tensors of all ranks along `dim`; the backward pass is a reduce-scatter."""
    result: Tensor = _all_gather(x.contiguous(), dim, group)
    return result


def reduce_scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return this rank's part along `dim` of the sum over ranks; the backward pass is an all-gather."""
    result: Tensor = _reduce_scatter(x.contiguous(), "sum", dim, group)
    return result


def all_to_all(
    x: Tensor, group: ProcessGroup, output_sizes: list[int] | None = None, input_sizes: list[int] | None = None
) -> Tensor:
    """Send part i along the first dim to rank i; return the received parts in the order of ranks.

    Args:
        output_sizes, input_sizes: rows received from each rank, and rows sent to each rank; None: equal parts.
    """
    result: Tensor = collectives.all_to_all_single_autograd(x.contiguous(), output_sizes, input_sizes, group)
    return result


def all_reduce(x: Tensor, op: str, group: ProcessGroup) -> Tensor:
    """Return the sum (`op` "sum") or the maximum ("max") over ranks. No gradient flows through it."""
    return collectives.all_reduce(x, op, group)


def overlap_tensor_parallel(group: ProcessGroup) -> None:
    """Make `torch.compile` split matmuls next to all-gathers and reduce-scatters of a group, so that both overlap."""
    from torch._inductor import config
    from torch.distributed import _symmetric_memory

    with warnings.catch_warnings():
        # The call is deprecated, but the compiler still requires it.
        warnings.filterwarnings("ignore", ".*enable_symm_mem_for_group", FutureWarning)
        _symmetric_memory.enable_symm_mem_for_group(group.group_name)
    config._micro_pipeline_tp = True


# Meshes and DTensor


def flatten_axes(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return a mesh with a single axis `name` that joins all axes of `mesh`."""
    return mesh._flatten(name)


def split_axis(mesh: DeviceMesh, axis: int, sizes: Sequence[int], names: Sequence[str]) -> DeviceMesh:
    """Return a mesh in which several axes replace one axis.

    Args:
        axis: index of the axis to split.
        sizes, names: sizes and names of the new axes.
    """
    return mesh._unflatten(axis, tuple(sizes), tuple(names))


def join_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Return a mesh with the axes of several meshes, in their order."""
    return DeviceMesh._concatenate(meshes)


def unwrap_pending(tensor: Tensor) -> Tensor:
    """Return the result that a pending collective writes, without its wrapper, which has no memory of its own."""
    return tensor.elem if isinstance(tensor, collectives.AsyncCollectiveTensor) else tensor


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether a tensor is a DTensor, without importing DTensor, which is slow."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def dtensor_like(local: Tensor, dtensor: DTensor) -> DTensor:
    """Return a DTensor with the layout of another one that wraps a local tensor on any device.

    `DTensor.from_local` would move the local tensor to the device of the mesh.
    """
    return type(dtensor)(local, dtensor._spec, requires_grad=False)
