"""Prediction of which experts will be needed, and when, from the experts of past tokens and from routers that are
applied one layer early.

A visit is the computation of one layer in one step.

Shapes: L layers in the order of computation, E experts per layer, K experts per token, N tokens of a visit.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

# Weight of the uniform prior over experts, in tokens.
_PRIOR_TOKENS = 4.0
# Largest weight of past tokens, in visits with as many tokens as the current one. Experts are needed in bursts, so a
# short memory predicts better.
_MEMORY_VISITS = 11.0
# Half-life, in tokens, of observations of a router's accuracy.
_HALF_LIFE = 64.0
# Accuracy of routers applied early, before it has been observed.
_PRIOR_ACCURACY = 0.5
_NEVER = 1e9


class ReuseDistancePredictor:
    """Estimates when each expert is needed next, in visits of layers.

    Layers are visited in a cycle, whose order is learned from the visits. The tokens of a visit are assumed to choose
    experts independently of each other, with the frequencies of recent choices.

    Attributes:
        distance_LE: expected visits until each expert is needed; for experts in use, until they are needed again.
    """

    def __init__(self, layers: int, experts: int, active: int) -> None:
        self._experts = experts
        self._active = active
        self._share_LE = np.full((layers, experts), active / experts)
        self._num_past_L = np.full(layers, _PRIOR_TOKENS)
        self._log_tokens_L = np.zeros(layers)  # logarithm of the tokens of a visit
        self._accuracy_LK = np.full((layers, active), _PRIOR_ACCURACY)  # accuracy of first guesses, second ones, ...
        self._guess: tuple[int, IntArray] | None = None
        self._next_layer = [*range(1, layers), 0]
        self._last_layer: int | None = None
        self.distance_LE: FloatArray = np.zeros((layers, experts))

    def visit(self, layer: int, chosen_NK: IntArray) -> None:
        """Update the estimates with a visit of a layer, whose tokens chose these experts."""
        # 1. Update the order of layers.
        num_tokens = len(chosen_NK)
        if self._last_layer is not None:
            self._next_layer[self._last_layer] = layer
        self._last_layer = layer
        # 2. Update the moving averages of the experts' frequencies and of the tokens of a visit.
        num_past = min(self._num_past_L[layer], _MEMORY_VISITS * num_tokens)
        chosen_E = self._share_LE[layer] * num_past + self._count(chosen_NK)
        self._share_LE[layer] = chosen_E / (num_past + num_tokens)
        self._num_past_L[layer] = num_past + num_tokens
        self._log_tokens_L[layer] += (np.log(num_tokens) - self._log_tokens_L[layer]) / 4
        # 3. The next visit of the layer, plus the expected number of cycles without a choice (geometric distribution).
        visits_L, cycle = self._visits_until(layer)
        self.distance_LE = visits_L[:, None] + cycle * (1 / self._visit_probability() - 1)
        # 4. Update the router's accuracy, if there was a guess for this visit.
        if self._guess is not None and self._guess[0] == layer and self._guess[1].shape == chosen_NK.shape:
            right_K = (self._guess[1][:, :, None] == chosen_NK[:, None]).any(2).mean(0)
            self._accuracy_LK[layer] += (right_K - self._accuracy_LK[layer]) * (1 - 0.5 ** (num_tokens / _HALF_LIFE))
        self._guess = None

    def predict(self, layer: int, guess_NK: IntArray) -> FloatArray:
        """Return the probability [E] that each expert of the next layer is needed, given its router's guess of each
        token's first choice, second choice and so on."""
        self._guess = layer, guess_NK
        guesses_KE = np.stack([self._count(guess_N) for guess_N in guess_NK.T])
        accuracy_K = np.clip(self._accuracy_LK[layer], 0.0, 0.99)
        # A token may also choose an expert that is not among its guesses.
        inactive_accuracy = min(0.99, (self._active - accuracy_K.sum()) / max(1, self._experts - self._active))
        log_unused_E = np.log1p(-accuracy_K) @ guesses_KE
        log_unused_E = log_unused_E + np.log1p(-inactive_accuracy) * (len(guess_NK) - guesses_KE.sum(0))
        probability_E: FloatArray = -np.expm1(log_unused_E)
        cycle = self._visits_until(layer)[1]
        self.distance_LE[layer] = 1 + (1 - probability_E) * cycle / self._visit_probability()[layer]
        return probability_E

    def _count(self, experts: IntArray) -> IntArray:
        return np.bincount(experts.ravel(), minlength=self._experts)

    def _visit_probability(self) -> FloatArray:
        """Return the probability [L, E] that an expert is needed in a visit of its layer."""
        tokens_L = np.exp(self._log_tokens_L)
        log_unused_LE = np.log1p(-np.minimum(self._share_LE, 0.999)) * tokens_L[:, None]
        return np.maximum(-np.expm1(log_unused_LE), 1e-6)

    def _visits_until(self, layer: int) -> tuple[FloatArray, int]:
        """Return the visits until the next one of each layer, and the number of layers in a cycle."""
        visits_L = np.full(len(self._next_layer), _NEVER)
        count = 0
        layer = self._next_layer[layer]
        while visits_L[layer] == _NEVER:
            count += 1
            visits_L[layer] = count
            layer = self._next_layer[layer]
        return visits_L, count
