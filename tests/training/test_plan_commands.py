"""`jingu config show`."""

from pathlib import Path

import pytest

from jingu.config.load import load_config
from jingu.config.schema import RunConfig
from jingu.config.sections.parallel import ParallelSettings
from jingu.config.sections.schedules import WsdSettings
from jingu.config.sections.train import BatchSettings, PrecisionSettings, TrainSettings
from jingu.errors import JinguError
from jingu.training import plan_commands
from jingu.training.plan_commands import show_config


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
    assert memory.endswith(
        "+ 26.3 optimizer state + 26.3 compute weights + 10.1 reduction + 36.5 activations + 13.5 loss\n"
    )
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
