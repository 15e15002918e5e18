"""Whole runs on a fake device: evaluation, samples, checkpoints beside training, resuming, offload."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from jingu.checkpoint.async_save import AsyncSaver
from jingu.checkpoint.resume import step_folder
from jingu.checkpoint.retention import Retention
from jingu.checkpoint.store import CheckpointReader
from jingu.config.schema import RunConfig
from jingu.runtime.gpus import visible_devices
from jingu.runtime.ranks import RankInfo
from jingu.runtime.signals import StopRequest
from jingu.training import commands
from jingu.training.commands import train_on_rank
from jingu.training.task import find_task_factory
from tests.conftest import Done, MakeRun, peak_unmeasured
from tests.fake_device import fake_device
from tests.rank_pool import RankPool


def train(rank: int, world: int, config: RunConfig, device: str) -> None:
    """Train a run to its end."""
    fake_device.install()
    with peak_unmeasured():
        ranks = RankInfo(rank, world, torch.device(device), "here")
        assert train_on_rank(config, ranks, StopRequest(), task_factory=find_task_factory(config.task)) == 0


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        pytest.param(1, {"parallel.offload": {"type": "host"}}, id="host"),
        pytest.param(1, {"parallel.offload": {"type": "disk"}}, id="disk"),
        pytest.param(1, {}, id="one", marks=pytest.mark.slow),
        pytest.param(2, {"parallel.zero_stage": 3}, id="zero", marks=pytest.mark.slow),
    ],
)
def test_runs(world: int, layout: dict[str, Any], tiny_run: MakeRun, done: Any, device_ranks: RankPool) -> None:
    """Losses, evaluations and samples are those of the CPU, and the run goes on from its checkpoint."""
    settings = {**layout, "train.steps": 2, "checkpoint.every": 1, "evaluation.every": 1, "evaluation.num_sequences": 2}
    results: list[Done] = []
    for device in ("cpu", fake_device.NAME):
        config = tiny_run(settings, name=device)
        device_ranks.run(train, world, config, device)
        results.append(done(config))
    expected, result = results
    assert result.column("loss") == pytest.approx(expected.column("loss"), rel=1e-9)
    for mine, theirs in zip(result.lines("evaluation"), expected.lines("evaluation"), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-9)
    shutil.rmtree(step_folder(result.folder / "checkpoints", 2))
    device_ranks.run(train, world, config, fake_device.NAME)
    expected_tensors = expected.tensors()
    for name, tensor in done(config).tensors().items():
        torch.testing.assert_close(tensor, expected_tensors[name], rtol=1e-7, atol=1e-10)


def save_beside_training(_rank: int, _world: int, folder: Path) -> None:
    fake_device.install()
    tensors = {"w": torch.arange(6.0).view(2, 3).to(fake_device.NAME), "b": torch.ones(4)}
    saver = AsyncSaver(tensors)
    saver.save(folder, tensors, {}, Retention(1))
    saver.wait_for_copy()
    tensors["w"].add_(1.0)
    outcome = saver.poll(None)
    saver.close()
    assert outcome is not None and outcome.problem is None


def test_a_checkpoint_has_the_values_of_its_step(device_ranks: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "step-00000001"
    device_ranks.run(save_beside_training, 1, folder)
    assert torch.equal(CheckpointReader(folder).read("w"), torch.arange(6.0).view(2, 3))


def start_on_devices(_rank: int, _world: int, config: RunConfig) -> dict[str, str]:
    """Return the variables of ranks that --devices starts."""
    fake_device.install()
    environments = []

    def launch(processes: int, *_: Any, gpus: list[int], **__: Any) -> int:
        environments.append(visible_devices(gpus, {}))
        return processes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commands, "launch_local_ranks", launch)
        assert commands.train(config, devices="1,3") == 2
    return environments[0]


def test_devices_of_any_accelerator_are_selected(tiny_run: MakeRun, device_ranks: RankPool) -> None:
    [variables] = device_ranks.run(start_on_devices, 1, tiny_run({"device.type": "auto"}))
    assert set(variables.values()) == {"1,3"}
