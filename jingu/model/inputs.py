"""What a model takes: one object that goes unchanged from the task through every layout to the blocks and the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from jingu.model.rotary import RotaryTables


class LayerKVCache(Protocol):
    """Keys and values of one layer: of earlier tokens, and of an encoder's states."""

    def attend(self, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, scale: float | None, first_head: int) -> Tensor:
        """Store these keys and values, and let each token attend to its sequence up to itself: [B, T, H, K].

        Args:
            scale: multiplies the scores; None: 1/√K.
            first_head: the first head here, of those of the whole model.
        """

    def tokens(self, rows: int) -> int:
        """Return how many of a step's rows are tokens; the rows after them are padding."""

    def read(self, k_BSGK: Tensor, v_BSGK: Tensor) -> None:
        """Store keys and values of an encoder's states."""

    def attend_source(self, q_BTHK: Tensor, scale: float | None) -> Tensor:
        """Let each token attend to the encoder's states of its sequence."""


class KVCache(Protocol):
    """Keys and values of earlier tokens, for generation: of many sequences, whose tokens of a step form one row."""

    def begin(self, bias_NH: Tensor | None) -> None:
        """Receive the biases of relative positions, before the first layer of a step."""

    def rotary(self, positions_BT: Tensor, dtype: torch.dtype) -> RotaryTables | None:
        """Return the tables of rotary positions, if the model has them."""

    def layer(self, number: int) -> LayerKVCache:
        """Return the cache of one block."""


@dataclass(frozen=True)
class Inputs:
    """Token ids of a decoder (or of an encoder: see `source`), and what belongs to each of them.

    All tensors are [B, T] and int64, if nothing else is said.

    Attributes:
        positions: position of each token; None: counted from 0, without a cache.
        documents: document of each token, which attends only to its own document. None: each row is one document. Of an
            encoder, -1 is padding, to which nothing attends. Not together with a cache.
        parents: the document that each token's document continues, and to which it attends, too: several answers, say,
            continue one prompt. It stands before them in the row, and its own parent is itself. None: there are none.
        prefix_lengths: tokens of the row, from the first one on, that a token attends to besides those before it. Not
            with a cache.
        dropout_seeds: a seed for each token, from which adapters decide what they drop; None: nothing is dropped.
        embedding_noise: [2, B, T] floating: seed and scale of the noise on each token's embedding.
        source: what the encoder reads. With a cache it is needed with a sequence's first tokens only: the cache keeps
            the keys and values of the encoder's states.
        cache: keys and values of earlier tokens. The tokens form one row: those of many sequences, as the cache
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


def as_inputs(inputs: Inputs | Tensor) -> Inputs:
    """Return inputs; a bare tensor holds token ids."""
    return Inputs(inputs) if isinstance(inputs, Tensor) else inputs
