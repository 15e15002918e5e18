"""Limits how long prompts delay the sequences that generate in the same steps."""

from __future__ import annotations

# The tokens of prompts in the first such step, and the fewest in any.
_FIRST_TOKENS, _FEWEST_TOKENS = 64, 32
# After so many steps with prompts, one without them shows again how long generation alone takes.
_STEPS_WITH_PROMPTS = 16


class PrefillPacer:
    """Chooses how many tokens of prompts a step computes if it also generates.

    It measures what the prompts add to the time of a step. Sequences have the same results, whatever it chooses.

    Args:
        limit: seconds that prompts may add to a step.
        most_tokens: most tokens of prompts in a step.
    """

    def __init__(self, limit: float, most_tokens: int) -> None:
        self._limit = limit
        self._most_tokens = most_tokens
        self._tokens = min(_FIRST_TOKENS, most_tokens)
        self._seconds_without = 0.0
        self._steps = 0

    def num_tokens(self, generates: bool) -> int:
        """Return the most tokens of prompts in the next step.

        Args:
            generates: whether the step also generates.
        """
        if not generates:
            return self._most_tokens
        return 0 if self._steps >= _STEPS_WITH_PROMPTS else self._tokens

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Take the time of a step that generated, with `num_tokens` tokens of prompts, into account."""
        if not num_tokens:
            # A single slow step, as on a busy machine, says little of the next ones.
            self._seconds_without = min(seconds, 1.5 * self._seconds_without or seconds)
            self._steps = 0
            return
        self._steps += 1
        # A few tokens take about as long as none, which says nothing of many.
        if 2 * num_tokens < self._tokens:
            return
        added = max(seconds - self._seconds_without, 1e-9)
        tokens = min(int(num_tokens * self._limit / added), 2 * self._tokens, self._most_tokens)
        self._tokens = max(tokens, min(_FEWEST_TOKENS, self._most_tokens))
