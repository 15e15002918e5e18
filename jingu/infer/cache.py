"""A key-value cache of a fixed size, allocated once.

Shapes: B rows, G key-value heads, S tokens, K head size.
"""

from __future__ import annotations

from torch import Tensor


class StaticCache:
    """Keys and values of up to `tokens` tokens a row, for every layer; see `jingu.model.attention.Cache`.

    A layer's memory is allocated with its first keys, whose rows, heads, dtype and device it takes: under a layout
    a rank may hold only some of the heads, and compute in another dtype than it keeps weights in.
    """

    def __init__(self, layers: int, tokens: int) -> None:
        self.capacity = tokens
        self.length = 0
        self._layers = [_Layer(self) for _ in range(layers)]

    def layer(self, number: int) -> _Layer:
        """The part of one block."""
        return self._layers[number]

    def advance(self, tokens: int) -> None:
        """Count tokens as held, once every layer has them."""
        self.length += tokens


class _Layer:
    def __init__(self, cache: StaticCache) -> None:
        self._cache = cache
        self._held: tuple[Tensor, Tensor] | None = None
        self.source: tuple[Tensor, Tensor] | None = None

    def extend(self, k_BGTK: Tensor, v_BGTK: Tensor) -> tuple[Tensor, Tensor]:
        if self._held is None:
            rows, heads, _, size = k_BGTK.shape
            shape = (rows, heads, self._cache.capacity, size)
            self._held = k_BGTK.new_empty(shape), v_BGTK.new_empty(shape)
        first = self._cache.length
        last = first + k_BGTK.shape[2]
        keys_BGSK, values_BGSK = self._held
        keys_BGSK[:, :, first:last] = k_BGTK
        values_BGSK[:, :, first:last] = v_BGTK
        return keys_BGSK[:, :, :last], values_BGSK[:, :, :last]
