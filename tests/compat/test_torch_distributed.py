"""What the private names of `torch.distributed` do, on real ranks where that shows more than on one."""

from __future__ import annotations

import gc
import socket
import weakref
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from jingu.compat import torch_distributed
from tests.compat.conftest import Compat

compat: Any = Compat("torch_distributed")


@pytest.mark.parametrize("answer", [None, b"HTTP", b""])
def test_the_store_of_a_process_group_is_told_from_others(answer: bytes | None) -> None:
    if answer is None:
        store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
        with socket.create_connection(("127.0.0.1", store.port), timeout=60) as connection:
            assert compat.may_be_store(connection)
        store.set("key", "value")
        assert store.get("key") == b"value"
    else:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(answer)
            theirs.shutdown(socket.SHUT_WR)
            assert compat.may_be_store(ours) == (answer == b"")


def collectives(rank: int, world: int) -> None:
    group = dist.group.WORLD
    x = torch.full((2, 3), float(rank), requires_grad=True)
    gathered = compat.all_gather(x, 0, group)
    assert gathered[:, 0].tolist() == [0.0, 0.0, 1.0, 1.0]
    gathered.sum().backward()
    assert bool((x.grad == world).all())

    y = torch.arange(4.0, requires_grad=True)
    scattered = compat.reduce_scatter(y, 0, group)
    assert scattered.tolist() == [4.0 * rank, 4.0 * rank + 2.0]
    (scattered.sum() * (rank + 1)).backward()
    assert y.grad.tolist() == [1.0, 1.0, 2.0, 2.0]

    # Rank 0 sends one row to itself and two to rank 1; rank 1 sends two and one.
    z = torch.full((3,), float(rank), requires_grad=True)
    input_sizes, output_sizes = ([1, 2], [1, 2]) if rank == 0 else ([2, 1], [2, 1])
    exchanged = compat.all_to_all(z, group, output_sizes, input_sizes)
    assert exchanged.tolist() == ([0.0, 1.0, 1.0] if rank == 0 else [0.0, 0.0, 1.0])
    (exchanged.sum() * (rank + 1)).backward()
    assert z.grad.tolist() == ([1.0, 2.0, 2.0] if rank == 0 else [1.0, 1.0, 2.0])

    value = torch.tensor([float(rank)])
    assert compat.all_reduce(value, "sum", group).item() == 1.0
    pending = compat.all_reduce(value, "max", group)
    assert pending.item() == 1.0
    assert type(compat.unwrap_pending(pending)) is torch.Tensor and compat.unwrap_pending(value) is value


def test_collectives_and_their_gradients(ranks: Any) -> None:
    ranks.run(collectives, 2)


def overlap(rank: int, world: int) -> None:
    """Compile products between messages, up to the code for them: only CUDA has the joint operations."""
    from torch._inductor import config
    from torch._inductor.exc import InductorError
    from torch.distributed import _symmetric_memory as symmetric_memory

    group = dist.group.WORLD
    x_BSD, up_FD, down_DF = (torch.ones(*size) for size in ((2, 4, 16), (32, 16), (16, 32)))
    operations: list[str] = []

    def feed_forward(x_BSD: torch.Tensor) -> torch.Tensor:
        hidden_BTF = torch.relu(F.linear(torch_distributed.all_gather(x_BSD, 1, group), up_FD))
        return torch_distributed.reduce_scatter(F.linear(hidden_BTF, down_DF), 1, group)

    def stop(graph: torch.fx.Graph) -> None:
        operations.extend(str(node.target) for node in graph.nodes)
        raise StopAsyncIteration

    with pytest.MonkeyPatch.context() as patch, symmetric_memory._test_mode():
        patch.setattr(dist, "is_nccl_available", lambda: True)
        patch.setattr(config, "_micro_pipeline_tp", False)
        patch.setattr(config, "post_grad_custom_post_pass", stop)
        compat.overlap_tensor_parallel(group)
        with torch.no_grad(), pytest.raises(InductorError):
            torch.compile(feed_forward, dynamic=False)(x_BSD)
    assert {"symm_mem.fused_all_gather_matmul.default", "symm_mem.fused_matmul_reduce_scatter.default"} <= {*operations}


def test_tensor_parallelism_overlaps(ranks: Any) -> None:
    ranks.run(overlap, 2)


def meshes(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("a", "b", "c"))
    flat = compat.flatten_axes(mesh["b", "c"], "bc")
    assert flat.size() == 2 and flat.get_local_rank() == mesh.get_local_rank("c")
    split = compat.split_axis(flat, 0, (2, 1), ("x", "y"))
    assert split.mesh_dim_names == ("x", "y") and split["x"].get_local_rank() == flat.get_local_rank()
    joined = compat.join_meshes([mesh["a"], flat])
    assert joined.mesh_dim_names == ("a", "bc") and joined.shape == (2, 2)

    dtensor = distribute_tensor(torch.arange(6.0), mesh["c"], [Shard(0)])
    other = compat.dtensor_like(torch.zeros(3, device="meta"), dtensor)
    assert other.placements == dtensor.placements and other.shape == (6,)
    assert other.to_local().device.type == "meta" and not other.requires_grad
    assert compat.is_dtensor(other) and not compat.is_dtensor(other.to_local())

    store = compat.default_store()
    store.set("jingu-compat", "yes")
    assert store.get("jingu-compat") == b"yes"


def test_meshes_dtensors_and_the_store(ranks: Any) -> None:
    ranks.run(meshes, 4)


def remembered(rank: int, world: int) -> bool:
    """Whether a mesh is freed once nothing but DTensor's cache refers to it."""
    mesh = init_device_mesh("cpu", (world,))
    distribute_tensor(torch.arange(6.0), mesh, [Shard(0)]).add(1)
    reference = weakref.ref(mesh)
    del mesh
    compat.clear_sharding_cache()
    gc.collect()
    return reference() is None


def test_clear_sharding_cache(ranks: Any) -> None:
    assert ranks.run(remembered, 2)


def test_pretend_ranks() -> None:
    compat.pretend_ranks(2, 8)
    try:
        assert (dist.get_rank(), dist.get_world_size()) == (2, 8)
        dist.all_reduce(torch.ones(3))
    finally:
        dist.destroy_process_group()


def groups(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    members = {description: ranks for _, description, ranks in compat.process_groups()}
    assert members["default_pg"] == [0, 1, 2, 3]
    assert members["mesh_a"] == [rank % 2, rank % 2 + 2] and members["mesh_b"] == [rank // 2 * 2, rank // 2 * 2 + 1]

    compat.set_group_timeouts(timedelta(seconds=77))
    dist.all_reduce(torch.ones(3, 2), group=mesh["b"].get_group())
    # The recorder is a ring: after many calls, each new one replaces the oldest.
    call = compat.recorded_collectives()[-1]
    names = {name: description for name, description, _ in compat.process_groups()}
    assert names[call["process_group"][0]] == "mesh_b"
    assert call["profiling_name"] == "gloo:all_reduce" and call["input_sizes"] == [[3, 2]]
    assert call["timeout_ms"] == 77_000


def test_groups_their_timeouts_and_their_calls(ranks: Any) -> None:
    ranks.run(groups, 4)


def mesh_axis_of_calls(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    axes = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            axes.append(compat.collective_group(func, args))
            return func(*args, **(kwargs or {}))

    with Recorder():
        compat.all_reduce(torch.ones(3), "sum", mesh["b"].get_group())
        dist.all_reduce(torch.ones(3), group=mesh["a"].get_group())
    assert [axis for axis in axes if axis is not None] == ["mesh_b", "mesh_a"]


def test_axis_of_a_collective(ranks: Any) -> None:
    ranks.run(mesh_axis_of_calls, 4)


def test_calls_between_stages_hold_what_they_send(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = torch.ones(3)
    waits: list[str] = []
    work = SimpleNamespace(wait=lambda: waits.append("sent"))
    monkeypatch.setattr(schedules, "_batch_p2p", lambda operations, desc=None: [work for _ in operations])
    with compat.hold_sent_tensors():
        (pending,) = schedules._batch_p2p([SimpleNamespace(tensor=sent)])
    assert pending.tensors[0] is sent
    pending.wait()
    assert waits == ["sent"]
    assert schedules._batch_p2p([]) == []


def test_stages_of_pretended_ranks_do_not_vote() -> None:
    vote = getattr(PipelineStage, "_warmup_backward_result", None)
    with compat.static_pipeline_stages():
        replaced = getattr(PipelineStage, "_warmup_backward_result", None)
        if vote is not None:
            assert replaced is not vote and bool(replaced(None))
    assert getattr(PipelineStage, "_warmup_backward_result", None) is vote
