"""Advantages from the ranks of rewards."""

from __future__ import annotations

from torch import Tensor

from jingu.align.advantages import StepRewards
from jingu.config.sections.policies import GrpoSettings


def rank(settings: GrpoSettings, rewards: StepRewards) -> Tensor:
    """Return advantages [P, G] by rank, from -1 for the worst to 1 for the best answer to a prompt."""
    reward_PG = rewards.net.view(-1, settings.answers_per_prompt)
    better_PGG = reward_PG[:, :, None] - reward_PG[:, None, :]
    return better_PGG.sign().nan_to_num().sum(-1) / (settings.answers_per_prompt - 1)
