"""The inputs of a model, as one object that passes unchanged from the task through every layout to blocks and cache.

Shapes: B rows, T tokens, S tokens of an encoder, H heads, G key-value heads, K head size, V size of a head's values, N
buckets of distances.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from jingu.model.components import Position
from jingu.model.rotary import RotaryTables


class LayerKVCache(Protocol):
    """The KV cache of one layer: keys and values of earlier tokens, and of an encoder's hidden states."""

    def attend(
        self,
        q_BTHK: Tensor,
        k_BTGK: Tensor,
        v_BTGV: Tensor | None,
        scale: float | None,
        first_head: int,
        sinks_H: Tensor | None,
    ) -> Tensor:
        """Store keys and values, and return attention [B, T, H, V] of each token to its sequence up to itself.

        Args:
            v_BTGV: the values; None: they are the keys, which are stored once.
            scale: multiplies the scores; None: 1/√K.
            first_head: index of this rank's first head in the whole model.
            sinks_H: scores of the heads that join the softmax without a value; None: there are none.
        """

    def mix(self, mixer: Any, x_BTD: Tensor) -> Tensor:
        """Return what a `Mixer` makes of each sequence, which continues from its state, and store the new states."""

    def tokens(self, rows: int) -> int:
        """Return how many of the `rows` tokens of a step are real; those after them are padding."""

    def read(self, k_BSGK: Tensor, v_BSGK: Tensor) -> None:
        """Store keys and values of an encoder's hidden states."""

    def attend_source(self, q_BTHK: Tensor, scale: float | None) -> Tensor:
        """Return attention [B, T, H, K] of each token to the encoder's hidden states of its sequence."""


class KVCache(Protocol):
    """The KV cache of a model in generation. It holds many sequences, whose tokens of one step form a single row."""

    def begin(self, bias_NH: Tensor | None) -> None:
        """Start a step: receive the relative position biases, or None, before the first layer runs."""

    def rotary(self, spec: Position, head_size: int, positions_BT: Tensor, dtype: torch.dtype) -> RotaryTables | None:
        """Return the rotary tables of these positions for heads of this size; None if the spec is not rotary."""

    def layer(self, number: int) -> LayerKVCache:
        """Return the cache of block `number`."""


@dataclass(frozen=True)
class Inputs:
    """Token ids of a decoder, or of an encoder (see `source`), with everything that belongs to them.

    All tensors are int64 [B, T] unless stated otherwise.

    Attributes:
        positions: position of each token; None: the index in the row. Required with a cache.
        documents: number of the document that each token belongs to. A token attends only to its own document and that
            document's parent. None: each row is one document. In an encoder, -1 is padding, to which no other token
            attends. Must be None with a cache.
        parents: number of the document that each token's document continues, and attends to. For example, several
            answers continue one prompt. A parent stands before the documents that continue it, and is its own parent.
            None: no document continues another one.
        prefix_lengths: number of first tokens of the row that each token attends to in addition to earlier tokens
            (prefix LM). Must be None with a cache.
        dropout_seeds: a seed per token for the dropout of adapters; None: no dropout.
        embedding_noise: [2, B, T], floating point: seed and scale of the noise on each token's embedding; None: no
            noise.
        source: inputs of the encoder. With a cache it is needed only in a sequence's first step, because the cache
            stores the keys and values of the encoder's hidden states.
        cache: KV cache of earlier tokens. The tokens of all sequences form one row, in the order that the cache
            planned.
    """

    tokens: Tensor
    positions: Tensor | None = None
    documents: Tensor | None = None
    parents: Tensor | None = None
    prefix_lengths: Tensor | None = None
    dropout_seeds: Tensor | None = None
    embedding_noise: Tensor | None = None
    source: Inputs | None = None
    cache: KVCache | None = None
