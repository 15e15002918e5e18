"""A verifier and another reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jingu.align.scorer import RewardContext, RewardScorer, Values
from jingu.align.verifiers import Verifier
from jingu_example.settings import KeywordsReward, PalindromeReward


def _read(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected a text, not {value!r}")
    return value


def _score(settings: PalindromeReward, answer: Mapping[str, Any]) -> bool:
    text = answer["completion"].strip()
    return bool(text) and text == text[::-1] and text != _read(answer[settings.column])


PALINDROME = Verifier(_read, _score)


class KeywordsScorer(RewardScorer):
    """Counts words."""

    def __init__(self, settings: KeywordsReward, context: RewardContext) -> None:
        self._words = settings.words

    def score(self, answers: Sequence[Mapping[str, Any]]) -> Values:
        return [sum(word in answer["completion"] for word in self._words) / len(self._words) for answer in answers]
