"""How many files a reader of a training step has to open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jingu.training import loop
from tests.align.preferences import preference_run, train_here
from tests.conftest import MakeRun
from tests.journeys import record_journey

# A bound that is raised needs a reason in docs/log.md, as those of the rooms do.
MOST_FILES = 28


def test_a_step_of_dpo_visits_few_files(
    tiny_run: MakeRun, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = preference_run(tiny_run, tmp_path, {"task": {"type": "dpo"}, "initialize.from": base, "train.steps": 5})
    train_step = loop.train_step
    with record_journey() as journey:

        def recorded(*arguments: Any, **keywords: Any) -> Any:
            # The first steps also build caches, and step 3 is timed.
            journey.is_active = keywords["step"] == 4
            result = train_step(*arguments, **keywords)
            journey.is_active = False
            return result

        monkeypatch.setattr(loop, "train_step", recorded)
        train_here(config)
    # Batches are prepared in another thread.
    visited = {name for name in journey.files if not name.startswith("data/")}
    assert {"training/step.py", "align/preference_learning.py", "model/decoder.py"} <= visited
    assert len(visited) <= MOST_FILES, "\n".join(sorted(visited))
