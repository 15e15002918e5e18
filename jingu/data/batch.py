"""Batches: the token ids and labels of a training or evaluation step.

Shape legend: B rows (sequences), T tokens of a row, S tokens of an encoder's row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

# The label of a token that the loss ignores, as in torch.nn.functional.cross_entropy.
IGNORE_INDEX = -100


@dataclass(frozen=True)
class EncoderInputs:
    """Inputs of the encoder of an encoder-decoder. All tensors are [B, S] int64."""

    tokens: Tensor
    # Document id of each token, -1 for padding; the decoder attends to tokens with its own id. None: no padding.
    documents: Tensor | None = None
    # A seed for each token, for the dropout of adapters. None: no dropout.
    dropout_seeds: Tensor | None = None


@dataclass(frozen=True)
class Batch:
    """Rows of token ids with their labels. All tensors are [B, T] int64 unless noted."""

    tokens: Tensor
    # The next token at each position (already shifted); IGNORE_INDEX where the loss ignores it.
    labels: Tensor
    # Position of each token in its document. None: 0 to T - 1.
    positions: Tensor | None = None
    # Document id of each token; attention stays within equal ids. None: each row is one document.
    documents: Tensor | None = None
    # The parent of each token's document, to which the token attends, too. None: no document has a parent.
    parents: Tensor | None = None
    # For prefix LM: how many tokens of the row, from its start, each token attends to in both directions.
    # 0: causal attention only. None: causal attention everywhere.
    prefix_lengths: Tensor | None = None
    # Floating-point factor of the loss of each token. None: all factors are 1.
    weights: Tensor | None = None
    # [2, B, T] float: seed and scale of the NEFTune noise on each embedded token.
    noise: Tensor | None = None
    # A seed for each token, for the dropout of adapters. None: no dropout.
    dropout_seeds: Tensor | None = None
    # Encoder inputs of an encoder-decoder; the fields above then belong to the decoder.
    source: EncoderInputs | None = None


def make_seq2seq_batch(source: EncoderInputs, labels_BT: Tensor, start_id: int) -> Batch:
    """Return a batch whose decoder inputs are the labels shifted right, beginning with `start_id`."""
    starts_B1 = labels_BT.new_full((len(labels_BT), 1), start_id)
    shifted_BT = torch.cat([starts_B1, labels_BT[:, :-1]], dim=1)
    # IGNORE_INDEX is not a token id: after an ignored label, the decoder reads the start token.
    tokens_BT = shifted_BT.where(shifted_BT >= 0, start_id)
    return Batch(tokens_BT, labels_BT, source=source)


Part = TypeVar("Part", Batch, EncoderInputs)


def map_tensors(batch: Part, function: Callable[[Tensor], Tensor]) -> Part:
    """Return the batch with `function` applied to each of its tensors, including the encoder inputs."""
    changes: dict[str, Any] = {}
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, Tensor):
            changes[field.name] = function(value)
        elif isinstance(value, EncoderInputs):
            changes[field.name] = map_tensors(value, function)
    return replace(batch, **changes)
