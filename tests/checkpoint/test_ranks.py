"""The store under real ranks: 2 write, 4 read and write, 1 reads."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from jingu.checkpoint import save_folder, store
from jingu.checkpoint.manifest import CheckpointError
from jingu.parallel.sharding import TensorBlock

WHOLE = {
    "even": torch.arange(48.0).reshape(8, 6),
    "odd": torch.arange(35.0, dtype=torch.float64).reshape(7, 5),
    "row": torch.arange(3).reshape(1, 3),
    "bias": torch.arange(9.0).bfloat16(),
}


def laid_out(world: int, filled: bool) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh

    from jingu.parallel.sharding import ParameterSharding

    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    tensors: dict[str, Any] = {"bias": WHOLE["bias"].clone()}
    for name, dims in {"even": (None, 1), "odd": (0, 0), "row": (0, None)}.items():
        layout = ParameterSharding(WHOLE[name].shape, mesh, dims)
        tensors[name] = layout.block(layout.cut(WHOLE[name]).clone())
    if not filled:
        for tensor in tensors.values():
            values(tensor).zero_()
    return tensors


def values(tensor: Any) -> torch.Tensor:
    """What a rank holds of a tensor."""
    return tensor.local if isinstance(tensor, TensorBlock) else tensor


def save_on(rank: int, world: int, folder: Path, source: Path | None) -> bool:
    from jingu.runtime.ranks import gather_from_all

    tensors = laid_out(world, filled=source is None)
    if source is not None:
        store.load(source, tensors, gather=gather_from_all)
    store.save(folder, tensors, {"ranks": world}, rank=rank, ranks=world, gather=gather_from_all)
    return save_folder.verify(folder) == []


def save_on_full_disk(module: Any, function: str, save: Callable[[], object]) -> str:
    """Return the error of `save` while a function of a module finds no space, or "saved"."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, function, full)
        return save_or_explain(save)


def save_or_explain(save: Callable[[], object]) -> str:
    """Return the error of `save`, or "saved"."""
    try:
        save()
    except CheckpointError as error:
        return error.what
    return "saved"


def save_where_one_fails(rank: int, world: int, folder: Path) -> str:
    from jingu.runtime.ranks import gather_from_all

    tensors = laid_out(world, filled=True)
    save = partial(store.save, folder, tensors, {}, rank=rank, ranks=world, gather=gather_from_all)
    return save_on_full_disk(save_folder, "write_all", save) if rank == 1 else save_or_explain(save)


def test_two_ranks_write_four_rewrite_and_one_reads(tmp_path, ranks):
    assert ranks.run(save_on, 2, tmp_path / "two", None) == [True] * 2
    assert ranks.run(save_on, 4, tmp_path / "four", tmp_path / "two") == [True] * 4
    for name, whole in WHOLE.items():
        assert torch.equal(store.CheckpointReader(tmp_path / "four").read(name), whole)
    whole = {name: torch.zeros_like(tensor) for name, tensor in WHOLE.items()}
    store.load(tmp_path / "four", whole)
    assert all(torch.equal(whole[name], WHOLE[name]) for name in WHOLE)
    failed = ranks.run(save_where_one_fails, 2, tmp_path / "full")
    assert failed == ["the checkpoint could not be saved (rank 1: No space left on device)."] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["four", "two"]
