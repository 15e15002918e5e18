"""Copies in main memory: a run that fails resumes bitwise from the newest of them, or from storage."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from jingu.config.schema import RunConfig
from jingu.errors import JinguError
from jingu.runtime.ranks import join_process_group
from jingu.runtime.signals import StopRequest
from jingu.training import loop as loop_module
from jingu.training.commands import train, train_on_rank
from tests.conftest import peak_unmeasured
from tests.training.test_resume import assert_equal_tensors, untimed

SETTINGS = {"train.steps": 12, "checkpoint.every": 5, "train.log_every": 2, "precision.type": "fp32"}


class BreakError(Exception):
    """The error that ends a run in these tests."""


@pytest.fixture(autouse=True)
def quick(peak: None) -> None:
    """No run here measures the machine."""


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    return tmp_path / "memory"


def breaking_off(config: RunConfig, step: int, ranks: Any) -> None:
    """Train until the loop has begun step `step` (from 1), where an error ends the run."""
    original = loop_module.train_step

    def watched(*arguments: Any, **keywords: Any) -> Any:
        if keywords["step"] == step - 1:
            raise BreakError
        return original(*arguments, **keywords)

    loop_module.train_step = watched
    try:
        train_on_rank(config, ranks, StopRequest())
    except (BreakError, SystemExit):  # how ranks but the first end
        return
    finally:
        loop_module.train_step = original
    raise AssertionError("it went on")


def break_off(config: RunConfig, step: int) -> None:
    with join_process_group("cpu", 1) as ranks:
        breaking_off(config, step, ranks)


def break_off_on(rank: int, world: int, config: RunConfig, step: int) -> None:
    from tests.conftest import this_rank

    with peak_unmeasured():
        breaking_off(config, step, this_rank(rank, world))


def test_a_run_resumes_from_memory_bitwise_and_leaves_no_copies(tiny_run, done, memory, capsys):
    settings = {**SETTINGS, "checkpoint.in_memory.folder": str(memory)}
    whole = tiny_run(settings, name="whole")
    assert train(whole) == 0
    assert not memory.exists() and not (Path(whole.runs_dir) / "whole/checkpoints/memory-id").exists()
    parts = tiny_run({**settings, "checkpoint.in_memory.every": 3}, name="parts")
    break_off(parts, 11)
    assert [path.name[:13] for path in memory.glob("*/*/*")] == ["step-00000009"]
    capsys.readouterr()
    assert train(parts) == 0
    said = capsys.readouterr().err
    assert "Step 9 is in the memory of the nodes; no checkpoint is read.\n" in said and "Resuming from step 9." in said
    assert_equal_tensors(done(whole).tensors(), done(parts).tensors())
    assert untimed(done(parts).lines()) == untimed(done(whole).lines())
    assert list(memory.iterdir()) == []


def flip(memory: Path, rank: int) -> None:
    for path in memory.rglob(f"shard-{rank:05d}-*"):
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)


def test_damaged_copies_are_skipped_and_a_new_run_uses_none(tiny_run, done, memory, capsys):
    config = tiny_run({**SETTINGS, "checkpoint.in_memory": {"every": 3, "folder": str(memory)}})
    break_off(config, 11)
    flip(memory, 0)
    break_off(config, 8)
    said = capsys.readouterr().err
    assert "Skipping" in said and "step-00000009 in memory: " in said and "match their checksum" in said
    assert "Resuming from step 5." in said
    with pytest.raises(JinguError, match="never"):
        train(config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"resume": "never"})}))
    shutil.rmtree(done(config).folder / "checkpoints")
    assert train(config) == 0
    assert done(config).column("resumed_from", "start")[-1] is None


@pytest.mark.slow  # tests/checkpoint/test_memory_copies.py has the copies of neighbours, on more ranks
def test_the_memory_of_one_node_of_two_is_lost(tiny_run, done, memory, ranks, train_on):
    settings = {**SETTINGS, "parallel.zero_stage": 3}
    whole = tiny_run(settings, name="whole")
    train_on(2, whole)
    config = tiny_run({**settings, "checkpoint.in_memory": {"every": 3, "folder": str(memory)}}, name="lost")
    ranks.run(break_off_on, 2, config, 11)
    (node,) = memory.glob("*/rank-00000")
    shutil.rmtree(node)
    train_on(2, config)
    assert done(config).column("resumed_from", "start") == [None, 9]
    assert_equal_tensors(done(whole).tensors(), done(config).tensors())
