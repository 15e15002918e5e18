"""`jingu config show`."""

from pathlib import Path

import pytest

from jingu.config.load import load_config
from jingu.config.schema import RunConfig
from jingu.config.sections.parallel import ParallelSettings
from jingu.config.sections.train import BatchSettings, TrainSettings, WarmupStableDecaySettings
from jingu.errors import JinguError
from jingu.parallel.verbs import show


def test_show_prints_a_file_that_works_and_what_follows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = RunConfig(
        name="shown",
        batch=BatchSettings(sequence_length=100, global_size=24, micro_size=3),
        schedule=WarmupStableDecaySettings(warmup=7, decay=0.25),
        train=TrainSettings(steps=200),
    )
    show(config, 4)
    text = capsys.readouterr().out
    (tmp_path / "shown.yaml").write_text(text)
    assert load_config(tmp_path / "shown.yaml") == config
    assert text.split("\n\n")[-1] == (
        "# What follows, on 4 ranks:\n"
        "#   layout                 4 = 4 shard (ZeRO 1)\n"
        "#   tokens a step          2,400 = 24 × 100\n"
        "#   tokens of the run      480,000 = 200 steps × 2,400\n"
        "#   sequences a rank       6 = 24 / 4\n"
        "#   micro batches a step   2 = 6 / 3 (batch.micro_size)\n"
        "#   tokens a forward pass  300\n"
        "#   warm-up                7 steps\n"
        "#   decay                  50 steps = 0.25 × 200\n"
    )
    show(config)
    assert "# What follows, on 1 rank:\n" in capsys.readouterr().out
    show(config.model_copy(update={"parallel": ParallelSettings(pipeline=2)}), 4)
    assert "#   stages                 2 of 3, 3 blocks (1f1b)\n" in capsys.readouterr().out


def test_show_prints_nothing_of_a_batch_that_cannot_be_divided(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(JinguError, match="take 30 or 35"):
        show(RunConfig(), 5)
    assert capsys.readouterr().out == ""
