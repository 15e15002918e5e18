"""The benchmarks that `python -m bench` lists exist, and return their table."""

from __future__ import annotations

import re

import pytest

from bench.__main__ import PAGE, TITLES
from bench.alignment import StepTimer, wrap_rollouts


@pytest.mark.parametrize("name", TITLES)
def test_a_benchmark_returns_its_table(name: str) -> None:
    source = (PAGE.parents[1] / "bench" / f"{name}.py").read_text(encoding="utf-8")
    assert re.search(r"^def run\(.*\) -> str:$", source, re.MULTILINE)


def test_the_parts_of_a_grpo_step_that_are_measured_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    from jingu.align import policy_learning

    # Restore what the timer replaces.
    for place, name in (
        (policy_learning.PolicyLearning, "begin_step"),
        (policy_learning.PolicyLearning, "_generate"),
        (policy_learning, "add_rewards"),
    ):
        monkeypatch.setattr(place, name, getattr(place, name))
    timer = StepTimer()
    wrap_rollouts(timer)
    assert set(timer.inside) == {"begin_step", "_generate", "add_rewards"}
