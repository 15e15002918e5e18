"""A game of guessing a number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class GuessNumber:
    """Says whether the number in the column `answer` of the row is larger or smaller, until it is guessed."""

    def begin(self, row: Mapping[str, Any]) -> None:
        self._number = str(row["answer"])
        self._is_right = False

    def step(self, answer: str) -> str | None:
        guess = answer.strip()
        self._is_right = guess == self._number
        if self._is_right:
            return None
        if not (guess.isdecimal() and self._number.isdecimal()):
            return "Guess a number. "
        return "It is larger. " if int(guess) < int(self._number) else "It is smaller. "

    def score(self) -> float:
        return float(self._is_right)
