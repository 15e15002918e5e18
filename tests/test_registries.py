"""The tables to which a plug-in adds: each names something for every setting, and takes one more entry."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from jingu.align.advantages import StepRewards
from jingu.align.reward_list import SCORERS
from jingu.align.rollouts import Sample
from jingu.align.step_data import StepData
from jingu.align.verifiers import VERIFIERS, verify
from jingu.config.introspect import accepted_types
from jingu.config.schema import RunConfig
from jingu.config.sections import policies, rewards
from jingu.config.sections.policies import ADVANTAGES, GrpoSettings
from jingu.config.sections.train import TRACKERS
from jingu.tables import import_name
from jingu.training.trackers import Tracker, Trackers
from tests.conftest import MakeRun


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_have_the_shape_that_their_entry_says(name: str) -> None:
    """Two prompts with three answers each, of 1 to 3 tokens."""
    tokens = [(-0.5,) * (1 + number % 3) for number in range(6)]
    samples = [Sample("", 0, 0, (1,), (2,) * len(each), each, "", "end", {"a": 1.0}, reward=1.0) for each in tokens]
    data = StepData.of(samples, 0)
    answers = torch.arange(6.0, dtype=torch.float64)
    penalties = torch.zeros_like(data.sampled)
    step_rewards = StepRewards(data, answers, penalties, data.sampled, data.mask, samples[:2])
    settings = GrpoSettings(advantage=name, answers_per_prompt=3, rewards=[rewards.LengthReward(name="a")])
    advantages = import_name(ADVANTAGES[name].function)(settings, step_rewards)
    assert advantages.shape == ((6, 3) if ADVANTAGES[name].is_per_token else (2, 3))


def test_every_reward_has_a_scorer() -> None:
    types = {*rewards.REWARDS}
    assert types == VERIFIERS.keys() | SCORERS.keys() and len(types) > 9


def test_a_verifier_is_a_class_and_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    class PalindromeReward(rewards.VerifierBase):
        """The answer reads the same backwards."""

        type: Literal["palindrome"] = "palindrome"

    entry = VERIFIERS["exact"]._replace(score=lambda _, answer: answer["completion"] == answer["completion"][::-1])
    monkeypatch.setitem(VERIFIERS, "palindrome", entry)
    assert [verify(PalindromeReward(), {"completion": text}) for text in ("level", "label")] == [1.0, 0.0]


def test_a_tracker_is_an_entry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_run: MakeRun) -> None:
    numbers: list[Any] = []

    class ListTracker(Tracker):
        def __init__(self, run_id: str | None, folder: Path, config: RunConfig) -> None:
            self.run_id = run_id or folder.name

        def log_numbers(self, values: Any, step: int) -> None:
            numbers.append((step, values))

        def close(self) -> None:
            numbers.append(self.run_id)

    monkeypatch.setattr(import_module(__name__), "ListTracker", ListTracker, raising=False)
    monkeypatch.setitem(TRACKERS, "mlflow", f"{__name__}:ListTracker")
    trackers = Trackers(tmp_path, tiny_run({"train.trackers": ["mlflow"]}), None)
    trackers.log("train", {"loss": 1.5}, 3)
    trackers.close()
    assert numbers == [(3, {"train/loss": 1.5}), tmp_path.name]


def test_an_advantage_is_an_entry() -> None:
    (advantage,) = accepted_types(GrpoSettings.model_fields["advantage"])[:1]
    assert advantage.value == next(iter(policies.ADVANTAGES)) and GrpoSettings(advantage="best").needs_greedy is False
