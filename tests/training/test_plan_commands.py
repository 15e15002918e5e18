"""`jingu config show`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from jingu.config.load import load_config
from jingu.config.schema import RunConfig
from jingu.config.sections.parallel import ParallelSettings
from jingu.config.sections.schedules import WsdSettings
from jingu.config.sections.train import BatchSettings, PrecisionSettings, TrainSettings
from jingu.errors import JinguError
from jingu.formatting import format_rounded, memory_unit
from jingu.parallel.pipeline import ParallelModel
from jingu.training import plan_commands
from jingu.training.optimizer import ShardedOptimizer
from jingu.training.plan_commands import show_config
from tests.conftest import Done, MakeRun
from tests.plan.test_figures import state_bytes


def test_config_show_prints_a_valid_file_and_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = RunConfig(
        name="shown",
        batch=BatchSettings(sequence_length=100, global_batch_size=24, micro_batch_size=3),
        schedule=WsdSettings(warmup=7, decay=0.25),
        train=TrainSettings(steps=200),
        precision=PrecisionSettings(type="bf16"),
    )
    show_config(config, 4)
    text = capsys.readouterr().out
    (tmp_path / "shown.yaml").write_text(text)
    assert load_config(tmp_path / "shown.yaml") == config
    followed, _, memory = text.split("\n\n")[-1].rpartition("#   memory per rank          ")
    assert memory.endswith("+ 26.3 optimizer state + 26.3 compute weights + 32.6 activations + 21.4 loss\n")
    assert followed == (
        "# What follows, on 4 ranks:\n"
        "#   model                    llama, 13.8M parameters\n"
        "#   layout                   4 = 4 shard (ZeRO 1)\n"
        "#   tokens per step          2,400 = 24 × 100\n"
        "#   tokens of the run        480,000 = 200 steps × 2,400\n"
        "#   sequences per rank       6 = 24 / 4\n"
        "#   micro-batches per step   2 = 6 / 3 (batch.micro_batch_size)\n"
        "#   tokens per forward pass  300\n"
        "#   warm-up                  7 steps\n"
        "#   decay                    50 steps = 0.25 × 200\n"
    )
    show_config(config)
    assert "# What follows, on 1 rank:\n" in capsys.readouterr().out
    show_config(config.model_copy(update={"parallel": ParallelSettings(pipeline=2)}), 4)
    assert "#   stages                   2 of 3, 3 blocks (1f1b)\n" in capsys.readouterr().out


def test_config_show_refuses_a_batch_that_cannot_be_divided(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(JinguError, match="take 30 or 35"):
        show_config(RunConfig(), 5)
    assert capsys.readouterr().out == ""


def test_the_layout_names_the_ranks_of_experts() -> None:
    config = RunConfig.model_validate({"model": {"family": "mixtral"}, "parallel": {"expert": 4}})
    assert ("layout", "8 = 8 shard (ZeRO 1, 4 expert)") in plan_commands.derive_plan(config, 8)
    assert ("layout", "8 = 8 shard (ZeRO 1)") in plan_commands.derive_plan(RunConfig(), 8)


def test_config_show_names_the_file_without_which_memory_is_unknown(tmp_path: Path) -> None:
    tokenizer, model = tmp_path / "tokenizer", tmp_path / "model"
    config = RunConfig.model_validate(
        {"tokenizer": {"path": str(tokenizer)}, "initialize": {"from": str(model)}, "tune": {"type": "full"}}
    )
    assert dict(plan_commands.derive_plan(config, 1))["memory per rank"] == f"unknown until {model} exists"
    model.mkdir()
    assert dict(plan_commands.derive_plan(config, 1))["memory per rank"] == f"unknown until {tokenizer} exists"


def test_every_figure_of_config_show_is_that_of_the_run(
    tiny_run: MakeRun, train_on: Callable[..., None], done: Callable[[RunConfig], Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A figure that is not listed here fails."""
    changes = {
        "train.steps": 8,
        "schedule": {"type": "wsd", "warmup": 3, "decay": 0.25, "min_lr": 1e-4},
        "optimizer.type": "muon",
    }
    config = tiny_run(changes, name="figures")
    rows = dict(plan_commands.derive_plan(config, 1))
    # 1. Count what the run does.
    steps: list[list[torch.Size]] = []
    built: list[ShardedOptimizer] = []
    train, create = ParallelModel.train_micro_batches, ShardedOptimizer.__init__

    def count(model: ParallelModel, batches: Any, *arguments: Any) -> Any:
        steps.append([batch.tokens.shape for batch in batches])
        return train(model, batches, *arguments)

    def record(optimizer: ShardedOptimizer, *arguments: Any) -> None:
        built.append(optimizer)
        create(optimizer, *arguments)

    monkeypatch.setattr(ParallelModel, "train_micro_batches", count)
    monkeypatch.setattr(ShardedOptimizer, "__init__", record)
    train_on(1, config)
    run = done(config)
    parameters = sum(tensor.numel() for group in built[0].param_groups for tensor in group["params"])
    rates = run.column("lr")
    of_step = [sum(math.prod(shape) for shape in shapes) for shapes in steps]
    # 2. Compare.
    counts = {
        "model": f"{config.model.family}, {format_rounded(parameters)} parameters",
        "layout": "1 = 1 (ZeRO 1)",
        "tokens per step": f"{of_step[0]:,}",
        "tokens of the run": f"{sum(of_step):,}",
        "sequences per rank": f"{sum(rows for rows, _ in steps[0]):,}",
        "micro-batches per step": f"{len(steps[0])}",
        "tokens per forward pass": f"{math.prod(steps[0][0])}",
        "warm-up": f"{rates.index(max(rates)) + 1} steps",
        "decay": f"{sum(rate < max(rates) for rate in rates[3:])} steps",
    }
    memory = rows.pop("memory per rank")
    figures = {name: text if name in ("model", "layout") else text.partition(" = ")[0] for name, text in rows.items()}
    assert figures == counts
    for part, size in state_bytes(built).items():
        text = re.search(rf"([\d.,]+) {part}", memory)
        assert text is not None and float(text[1]) == pytest.approx(size / memory_unit(size)[0], abs=0.05), part
