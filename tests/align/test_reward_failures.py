"""Rewards that fail during a run: it is saved and stops, or goes on without their values."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from jingu.config.schema import RunConfig
from jingu.errors import JinguError
from jingu.training.commands import train
from jingu.training.run import ResumeOptions
from tests.align.policies import rollout
from tests.conftest import Done, MakeRun

pytestmark = pytest.mark.usefixtures("peak")

FAILING = """
from pathlib import Path

def reward(completions):
    calls = Path(__file__).with_suffix(".calls")
    number = int(calls.read_text()) + 1 if calls.exists() else 1
    calls.write_text(str(number))
    scores = [float(len(set(text))) for text in completions]
    if number == 2 and "MISTAKE" == "nan":
        scores[5] = float("nan")
    if number == 2 and "MISTAKE" == "short":
        scores.pop()
    return scores
"""
MISTAKES = {
    "nan": r"the reward reward: it returned nan for an answer to the prompt 'def f\d'",
    "short": "the reward reward: it returned 15 values for 16 answers",
}


@pytest.fixture
def make_failing(make: MakeRun, tmp_path: Path) -> Callable[..., RunConfig]:
    """Makes a run whose reward makes a mistake in the second step."""

    def make_failing(mistake: str, on_error: str, name: str) -> RunConfig:
        (tmp_path / f"{name}.py").write_text(FAILING.replace("MISTAKE", mistake))
        reward = {"type": "python", "function": f"{tmp_path}/{name}.py:reward", "on_error": on_error}
        return make({"task.rewards": [reward]}, name=name)

    return make_failing


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_run_whose_reward_fails_is_saved_and_resumes(
    mistake: str, make_failing: Callable[..., RunConfig], done: Callable[[RunConfig], Done]
) -> None:
    whole, config = make_failing("none", "stop", "whole"), make_failing(mistake, "stop", "failing")
    assert train(whole) == 0
    with pytest.raises(JinguError, match=MISTAKES[mistake]):
        train(config)
    assert done(config).checkpoint().name == "step-00000001"
    # The third call is right again, as a function that was corrected.
    assert train(config) == 0
    tensors = done(config).tensors()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in done(whole).tensors().items())


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_run_goes_on_without_the_values_that_are_skipped(
    mistake: str,
    make_failing: Callable[..., RunConfig],
    done: Callable[[RunConfig], Done],
    capfd: pytest.CaptureFixture[str],
) -> None:
    config = make_failing(mistake, "skip", "skipping")
    assert train(config) == 0
    skipped = [index for index, sample in enumerate(rollout(done(config), 2)) if sample["reward"] is None]
    assert skipped == ([5] if mistake == "nan" else list(range(16)))
    assert rollout(done(config), 2)[5]["advantages"][0] == 0.0
    assert "it returned" in capfd.readouterr().err
    assert all(map(math.isfinite, done(config).column("loss")))


@pytest.mark.parametrize("method", ["reinforce++", "ppo"])
def test_a_step_without_any_reward_teaches_nothing(
    method: str, make: MakeRun, make_ppo: MakeRun, done: Callable[[RunConfig], Done], tmp_path: Path
) -> None:
    (tmp_path / "none.py").write_text("def reward(completions):\n    return [None] * len(completions)\n")
    changes: dict[str, Any] = {"task.rewards": [{"type": "python", "function": f"{tmp_path}/none.py:reward"}]}
    config = make_ppo(changes) if method == "ppo" else make({**changes, "task.advantage": method})
    assert train(config) == 0
    assert done(config).column("loss") == [0.0] * config.train.steps
    assert all(value == 0.0 for sample in rollout(done(config), 1) for value in sample["advantages"])


def test_a_judge_that_does_not_answer_ends_the_run_after_saving(
    make: MakeRun, done: Callable[[RunConfig], Done]
) -> None:
    """It accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        judge = {"type": "judge", "url": url, "timeout": 0.05, "retries": 1, "audit": True, "concurrency": 16}
        exact = {"type": "regex", "pattern": ".*[aeiou].*"}
        assert train(make({"task.rewards": [exact], "train.steps": 1, "schedule.warmup": 0}, name="judged")) == 0
        judged = make({"task.rewards": [exact, judge], "schedule.warmup": 0}, name="judged")
        with pytest.raises(JinguError, match=r"chat/completions gave no scores in 2 attempts .*timed out"):
            train(judged, resume_options=ResumeOptions(["train.steps", "task.rewards"]))
        assert done(judged).checkpoint().name == "step-00000001"
        rewards = [exact, {**judge, "on_error": "skip"}]
        skipping = make({"task.rewards": rewards, "schedule.warmup": 0}, name="judged")
        assert train(skipping, resume_options=ResumeOptions(["train.steps", "task.rewards"])) == 0
    assert {sample["rewards"]["judge"] for sample in rollout(done(skipping), 3)} == {None}
