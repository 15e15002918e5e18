"""Which experts will be needed, and when: what has been seen, and what routers say ahead of time.

Shapes: L layers in the order of computation, E experts a layer, K experts a token, N tokens of a visit.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_PRIOR = 4.0
"""Tokens that the first guess (every expert alike) counts for."""
_MEMORY = 11.0
"""Visits that what was seen counts for at most, each as large as the present one. Which experts a text needs comes in
bursts, so it is few."""
_HALF_LIFE = 64.0
"""Tokens after which how often a router's guess was right counts half."""
_GUESS = 0.5
"""Share of a router's guesses ahead that are taken to be right before any was seen."""
_NEVER = 1e9


class ReuseDistancePredictor:
    """An estimate of when each expert is needed next, counted in visits of layers.

    Layers are visited one after another and over again; which follows which is learned from the last visit. Each
    token of a visit is taken to choose an expert with a probability of its own, as often as it has been chosen lately.
    """

    def __init__(self, layers: int, experts: int, active: int) -> None:
        self._experts, self._active = experts, active
        self._share_LE = np.full((layers, experts), active / experts)
        self._seen_L = np.full(layers, _PRIOR)
        self._tokens_L = np.zeros(layers)  # logarithm of tokens a visit
        self._right_LK = np.full((layers, active), _GUESS)  # of first guesses, of second ones, and so on
        self._guess: tuple[int, IntArray] | None = None
        self._after = [*range(1, layers), 0]
        self._last: int | None = None
        self.distance_LE: FloatArray = np.zeros((layers, experts))
        """Visits until each expert is likely to be needed; of those in use now, until they are needed again."""

    def visit(self, layer: int, chosen_NK: IntArray) -> None:
        """A layer is being visited by tokens that chose these experts."""
        tokens, chosen_E = len(chosen_NK), self._count(chosen_NK)
        if self._last is not None:
            self._after[self._last] = layer
        self._last = layer
        past_tokens = min(self._seen_L[layer], _MEMORY * tokens)
        self._share_LE[layer] = (self._share_LE[layer] * past_tokens + chosen_E) / (past_tokens + tokens)
        self._seen_L[layer] = past_tokens + tokens
        self._tokens_L[layer] += (np.log(tokens) - self._tokens_L[layer]) / 4
        ahead_L, cycle = self._ahead(layer)
        self.distance_LE = ahead_L[:, None] + cycle * (1 / self._likely() - 1)
        if self._guess is not None and self._guess[0] == layer and self._guess[1].shape == chosen_NK.shape:
            right_K = (self._guess[1][:, :, None] == chosen_NK[:, None]).any(2).mean(0)
            self._right_LK[layer] += (right_K - self._right_LK[layer]) * (1 - 0.5 ** (tokens / _HALF_LIFE))
        self._guess = None

    def foresee(self, layer: int, guess_NK: IntArray) -> FloatArray:
        """How likely each expert [E] of the layer that follows is needed, where tokens are guessed to choose these
        first, second and so on."""
        self._guess = layer, guess_NK
        guesses_KE = np.stack([self._count(guess_N) for guess_N in guess_NK.T])
        right_K = np.clip(self._right_LK[layer], 0.0, 0.99)
        others = min(0.99, (self._active - right_K.sum()) / max(1, self._experts - self._active))
        # Of the tokens that are not guessed to choose an expert, each still may.
        silent_E = np.log1p(-right_K) @ guesses_KE + np.log1p(-others) * (len(guess_NK) - guesses_KE.sum(0))
        likely_E = -np.expm1(silent_E)
        cycle = self._ahead(layer)[1]
        self.distance_LE[layer] = 1 + (1 - likely_E) * cycle / self._likely()[layer]
        return likely_E

    def _count(self, experts: IntArray) -> IntArray:
        return np.bincount(experts.ravel(), minlength=self._experts)

    def _likely(self) -> FloatArray:
        """How likely each expert [L, E] is needed in a visit of its layer."""
        tokens_L = np.exp(self._tokens_L)
        likely_LE: FloatArray = -np.expm1(np.log1p(-np.minimum(self._share_LE, 0.999)) * tokens_L[:, None])
        return np.maximum(likely_LE, 1e-6)

    def _ahead(self, layer: int) -> tuple[FloatArray, int]:
        """Visits until the next one of each layer, and of how many the round consists."""
        ahead_L, number = np.full(len(self._after), _NEVER), 0
        while ahead_L[layer := self._after[layer]] == _NEVER:
            ahead_L[layer] = number = number + 1
        return ahead_L, number
