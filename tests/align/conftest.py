"""What tests of alignment share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conftest import MakeRun


@pytest.fixture
def base(tiny_run: MakeRun, train_on: Callable[..., None]) -> str:
    """A tiny model after a few steps of pretraining."""
    config = tiny_run({"train.steps": 4}, name="base")
    train_on(1, config)
    return f"{config.runs_dir}/base"
