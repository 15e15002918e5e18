"""Bounds on the difference between the probabilities of generation and of training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jingu.align.rollouts import Generator
from jingu.config.schema import RunConfig
from jingu.errors import JinguError
from jingu.training.commands import train
from tests.conftest import Done, MakeRun

pytestmark = pytest.mark.usefixtures("peak")


def scale_temperature(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """Let generation, and not training, sample at another temperature."""
    initialize = Generator.__init__

    def initialize_scaled(self: Generator, prompts: Any, settings: Any, *arguments: Any, **options: Any) -> None:
        settings = settings.model_copy(update={"temperature": settings.temperature * factor})
        initialize(self, prompts, settings, *arguments, **options)

    monkeypatch.setattr(Generator, "__init__", initialize_scaled)


@pytest.mark.parametrize(("precision", "factor"), [("fp64", 1.0001), ("fp32", 1.05), ("fp32", 0.97), ("bf16", 1.5)])
def test_a_wrong_temperature_stops_the_run(
    precision: str, factor: float, make: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A base with logits far from uniform, where a temperature matters.
    config = make({"precision": {"type": precision}, "model.initializer_range": 0.6, "train.steps": 1})
    scale_temperature(monkeypatch, factor)
    with pytest.raises(JinguError, match=r"nats on average over .*, more than .*raise task.max_mean_mismatch"):
        train(config)


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_a_right_temperature_is_no_alarm(
    precision: str, make: MakeRun, done: Callable[[RunConfig], Done], caplog: pytest.LogCaptureFixture
) -> None:
    config = make({"precision": {"type": precision}, "model.initializer_range": 0.6, "train.steps": 1})
    assert train(config) == 0
    print(precision, done(config).column("mismatch_mean"), done(config).column("mismatch_max"))
    assert "differ by" not in caplog.text
