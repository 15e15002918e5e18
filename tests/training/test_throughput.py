"""The speed of training, and the time left that follows from it."""

from __future__ import annotations

import pytest

from jingu.training.checkpointing import Progress
from jingu.training.throughput import ThroughputMeter


def test_one_slow_interval_changes_the_average_speed_little() -> None:
    meter = ThroughputMeter(1.0, lambda: 1.0)
    progress = Progress()
    meter.start(progress)
    for _ in range(40):
        progress.tokens += 100
        progress.seconds += 1.0
        assert meter.tokens_per_second(progress) == pytest.approx(100)
    assert meter.average_tokens_per_second() == pytest.approx(100)
    # The machine stands still for as long as four intervals take.
    progress.tokens += 100
    progress.seconds += 5.0
    assert meter.tokens_per_second(progress) == pytest.approx(20)
    assert 75 < meter.average_tokens_per_second() < 90
    # It is forgotten, too.
    for _ in range(60):
        progress.tokens += 100
        progress.seconds += 1.0
        meter.tokens_per_second(progress)
    assert meter.average_tokens_per_second() == pytest.approx(100, rel=0.02)
