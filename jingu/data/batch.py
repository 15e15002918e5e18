"""What a step of training or evaluation sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

IGNORED = -100
"""Label of a place that is not trained."""


@dataclass(frozen=True)
class Source:
    """What an encoder reads, all [rows, source sequence] int64."""

    tokens: Tensor
    documents: Tensor | None = None
    """As those of the batch, which the decoder's tokens see by their own number; -1 where the row is padded."""
    keys: Tensor | None = None
    """As those of the batch."""


@dataclass(frozen=True)
class Batch:
    """Rows of token ids with what they must predict, all [rows, sequence] int64."""

    tokens: Tensor
    labels: Tensor
    """The id to predict at each place, that is, the next token (already shifted); -100 where not trained."""
    positions: Tensor | None = None
    """Position of each token; None: 0 … sequence - 1."""
    documents: Tensor | None = None
    """Attention stays within equal numbers; None: each row is one document."""
    reach: Tensor | None = None
    """Tokens of the row, from its first on, that each one sees where these are more than those up to itself; 0: no
    more. None: nowhere."""
    weights: Tensor | None = None
    """Factor on the loss at each place, floating; None: 1."""
    noise: Tensor | None = None
    """[2, rows, sequence] keys and scales of noise on the embedded tokens."""
    keys: Tensor | None = None
    """A whole number for each place of the run, by which adapters drop some of their inputs; None: none does."""
    source: Source | None = None
    """For encoder-decoders; the fields above are then the decoder's side."""


def written(source: Source, labels_BT: Tensor, start_id: int) -> Batch:
    """What a decoder writes of a source: each token is the label before it, the first one `start_id`."""
    starts_B1 = labels_BT.new_full((len(labels_BT), 1), start_id)
    before_BT = torch.cat([starts_B1, labels_BT[:, :-1]], dim=1)
    return Batch(before_BT.where(before_BT >= 0, start_id), labels_BT, source=source)


Part = TypeVar("Part", Batch, Source)


def changed(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """The batch with each of its tensors changed, those of its source too."""
    source = None if batch.source is None else _changed(batch.source, change)
    return replace(_changed(batch, change), source=source)


def _changed(part: Part, change: Callable[[Tensor], Tensor]) -> Part:
    held = {field.name: getattr(part, field.name) for field in fields(part)}
    new: dict[str, Any] = {name: change(it) for name, it in held.items() if isinstance(it, Tensor)}
    return replace(part, **new)
