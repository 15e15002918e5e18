"""Runs that see beginnings whole, or read them with an encoder: the same in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jingu.formats.models import open_model

PREFIX = {"data.objective": {"type": "prefix_lm"}, "data.document_mask": True}
CONTINUATION = {
    "data.objective": {"type": "continuation", "min_prefix": 0.3, "max_prefix": 0.6},
    "model.family": "t5",
    "model.num_kv_heads": None,
    "model.head_dim": 9,
}


# Encoder-decoders are laid out in tests/training/test_encoder_decoder.py.
@pytest.mark.parametrize(
    ("objective", "layouts"),
    [
        pytest.param(PREFIX, [{"context": 2}, {"pipeline": 2}, {"zero_stage": 3}], marks=pytest.mark.slow),
        (CONTINUATION, [{"pipeline": 2}]),
    ],
    ids=["prefix", "continuation"],
)
def test_every_layout_equals_one_process(objective: dict[str, Any], layouts, tiny_run, train_on, done) -> None:
    changes = {
        **objective,
        "train.steps": 4,
        "evaluation.every": 2,
        "evaluation.num_sequences": 5,
        "batch.micro_batch_size": 2,
    }
    alone = tiny_run(changes, name="alone")
    train_on(1, alone)
    one = done(alone)
    # Then the tokens of a prompt see each other in generation, too.
    assert open_model(Path(alone.runs_dir) / alone.name).is_prefix_lm is (objective is PREFIX)
    losses = one.column("loss")
    assert losses[-1] < losses[0] - 0.1
    assert all(value > 0 for value in one.column("bits_per_byte", "evaluation"))
    configs = [
        tiny_run({**changes, "parallel": layout}, name=f"layout-{number}") for number, layout in enumerate(layouts)
    ]
    train_on(2, *configs)
    for config in configs:
        assert done(config).column("loss") == pytest.approx(losses, rel=1e-9), config.name
        assert done(config).column("loss", "evaluation") == pytest.approx(one.column("loss", "evaluation"), rel=1e-9)
