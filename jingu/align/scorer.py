"""What computes one reward of many answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jingu.align.worker import Worker
from jingu.text.tokenizer import Tokenizer

Values = list[float | None]


@dataclass(frozen=True)
class RewardContext:
    """What a reward is computed from, beside its settings.

    Attributes:
        where: its place in the settings, for error messages.
        columns: names of the columns that the rows have.
        tokenizer: the tokenizer of the model that answers.
        worker: the processes that verifiers share.
    """

    name: str
    where: str
    columns: Sequence[str]
    tokenizer: Tokenizer
    worker: Worker


class RewardScorer:
    """Computes one reward of many answers.

    Attributes:
        late: indices of the last answers that took longer than the reward's timeout.
    """

    late: Sequence[int] = ()

    def score(self, answers: Sequence[Mapping[str, Any]]) -> Values:
        """Return the value of each answer, None if it cannot be scored. Raises JinguError if the reward fails."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop the processes that it uses; most use none."""
