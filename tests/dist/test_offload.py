"""Offload: the results are bitwise equal wherever optimizer state and master weights are stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from jingu.config.sections.optimizers import AdamWSettings
from jingu.errors import JinguError
from jingu.parallel.offload import DiskStorage
from jingu.training.optimizer import build_optimizer


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


ZBV = {"model.num_layers": 4, "parallel.pipeline": 2, "parallel.pipeline_schedule": "zbv"}


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (1, {}),
        (1, {"optimizer": {"type": "lion", "lr": 1e-3}}),
        (2, {"parallel.zero_stage": 3}),
        slow(4, {"parallel.zero_stage": 2, "parallel.pipeline": 2, "model.tie_word_embeddings": True}),
        slow(2, {"parallel.zero_stage": 0}),
        slow(2, {"parallel.zero_stage": 1, "precision.type": "bf16"}),
        slow(4, {**ZBV, "parallel.zero_stage": 2, "precision.type": "bf16"}),
    ],
)
def test_offload_changes_no_bit(world, layout, tiny_run, train_on, done, tmp_path):
    """Losses, norms and checkpoints are equal, also if only the second half of a run is offloaded."""
    changes = {
        **layout,
        "train.steps": 4,
        "schedule.type": "constant",
        "schedule.warmup": 2,
        "batch.micro_batch_size": 1,
    }
    inside = tiny_run(changes, name="inside")
    train_on(world, inside)
    expected = done(inside)
    weights = expected.tensors()
    for kind in ("host", "disk"):
        there = {"parallel.offload.type": kind, **({"parallel.offload.path": str(tmp_path)} if kind == "disk" else {})}
        outside = tiny_run({**changes, **there}, name=kind)
        train_on(world, tiny_run({**changes, "train.steps": 2}, name=kind))
        train_on(world, outside)
        assert done(outside).column("loss") == expected.column("loss")
        assert done(outside).column("grad_norm") == expected.column("grad_norm")
        theirs = done(outside).tensors()
        for name, tensor in weights.items():
            assert torch.equal(theirs[name], tensor), (kind, name)
    assert not list(tmp_path.glob("tmp*"))


def test_saving_reads_offloaded_tensors_from_disk(tiny_run, train_on, done, tmp_path, monkeypatch):
    from jingu.training import checkpointing

    def refused(*_arguments: Any, **_keywords: Any) -> None:
        raise AssertionError("a copy in memory")

    monkeypatch.setattr(checkpointing, "AsyncSaver", refused)
    changes = {"train.steps": 2, "checkpoint.every": 1, "checkpoint.async_save": True}
    with pytest.raises(AssertionError, match="a copy in memory"):
        train_on(1, tiny_run(changes, name="inside"))
    offload = {"parallel.offload.type": "disk", "parallel.offload.path": str(tmp_path)}
    config = tiny_run({**changes, **offload}, name="disk")
    train_on(1, config)
    assert done(config).checkpoint().name.endswith("2")


def test_disk_tensors_behave_like_tensors_and_leave_no_file(tmp_path: Path):
    disk = DiskStorage(tmp_path / "here")
    shapes = [(3, 5), (0,), (), (4096, 3)]
    resident = [disk.zeros_like(torch.empty(shape, dtype=torch.float64, device="meta")) for shape in shapes]
    for number, tensor in enumerate(resident):
        assert (tuple(tensor.shape), tensor.dtype) == (shapes[number], torch.float64)
        assert not tensor.any()
        tensor += number + 1
    disk.write_behind(resident)
    disk.read_ahead(resident)
    for number, tensor in enumerate(resident):
        assert torch.equal(tensor, torch.full_like(tensor, number + 1))
    assert list((tmp_path / "here").iterdir()) == []


def test_a_full_disk_is_reported_before_writing(tmp_path: Path):
    disk = DiskStorage(tmp_path)
    with pytest.raises(JinguError, match=r"(the disk is full|cannot be written).*parallel.offload.path"):
        disk.zeros_like(torch.empty(2**46, dtype=torch.float64, device="meta"))


def test_master_weights_and_state_are_mapped_from_a_file(tmp_path: Path):
    disk = DiskStorage(tmp_path)
    with torch.device("meta"):
        model = torch.nn.Linear(300, 200)
    model._apply(disk.zeros_like)
    optimizer = build_optimizer(AdamWSettings(), model, disk)
    resident = [
        *model.parameters(),
        *(optimizer.state[p][slot] for p in model.parameters() for slot in ("exp_avg", "exp_avg_sq")),
    ]
    files = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        first, end = (int(number, 16) for number in line.split()[0].split("-"))
        if str(tmp_path) in line:
            files.append(range(first, end))
    assert len(resident) == 6
    for tensor in resident:
        assert any(tensor.data_ptr() in file for file in files)


def test_layers_are_prefetched_and_written_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Two layers are prefetched while a third is computed, and each is written as soon as it has changed."""
    disk, seen = DiskStorage(tmp_path), []
    model = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(5)])
    names = {parameter.data_ptr(): name for name, parameter in model.named_parameters() if name.endswith("weight")}

    def noting(kind: str) -> Any:
        return lambda tensors: seen.extend(f"{kind} {names[t.data_ptr()][0]}" for t in tensors if t.data_ptr() in names)

    monkeypatch.setattr(disk, "read_ahead", noting("read"))
    monkeypatch.setattr(disk, "write_behind", noting("write"))
    optimizer = build_optimizer(AdamWSettings(), model, disk)
    model(torch.ones(1, 2)).sum().backward()
    groups = list(optimizer.param_groups)
    optimizer.step()
    assert optimizer.param_groups == groups
    written = [f"write {number}" for number in range(5)]
    assert seen == ["read 0", "read 1", "read 2", written[0], "read 3", written[1], "read 4", *written[2:]]
    assert all(float(optimizer.state[parameter]["step"]) == 1 for parameter in model.parameters())
