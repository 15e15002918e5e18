"""Batches: the token ids and labels that one training or evaluation step takes.

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
    """What the encoder of an encoder-decoder reads. All tensors are [B, S] int64."""

    tokens: Tensor
    # Document id of each token; the decoder's tokens attend to those of their own id. -1: padding. None: no padding.
    documents: Tensor | None = None
    # A seed for each token, from which adapters draw their dropout. None: no dropout.
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
    # The document that each token's document continues: attention reaches that, too. None: none.
    parents: Tensor | None = None
    # For prefix LM: how many tokens of the row, from its start, each token attends to in both directions.
    # 0: causal attention only. None: causal attention everywhere.
    prefix_lengths: Tensor | None = None
    # Floating-point factor on the loss of each token. None: 1.
    weights: Tensor | None = None
    # [2, B, T] float: seed and scale of the NEFTune noise on each embedded token.
    noise: Tensor | None = None
    # A seed for each token, from which adapters draw their dropout. None: no dropout.
    dropout_seeds: Tensor | None = None
    # For encoder-decoders; the fields above then describe the decoder's side.
    source: EncoderInputs | None = None


def make_seq2seq_batch(source: EncoderInputs, labels_BT: Tensor, start_id: int) -> Batch:
    """Return a batch whose decoder inputs are the labels shifted right, beginning with `start_id`."""
    starts_B1 = labels_BT.new_full((len(labels_BT), 1), start_id)
    shifted_BT = torch.cat([starts_B1, labels_BT[:, :-1]], dim=1)
    # IGNORE_INDEX is no token id: after an ignored label the decoder reads the start token.
    tokens_BT = shifted_BT.where(shifted_BT >= 0, start_id)
    return Batch(tokens_BT, labels_BT, source=source)


Part = TypeVar("Part", Batch, EncoderInputs)


def map_tensors(batch: Part, function: Callable[[Tensor], Tensor]) -> Part:
    """Return the batch with `function` applied to each of its tensors, those of its encoder inputs included."""
    changes: dict[str, Any] = {}
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, Tensor):
            changes[field.name] = function(value)
        elif isinstance(value, EncoderInputs):
            changes[field.name] = map_tensors(value, function)
    return replace(batch, **changes)
