"""A task: what the loop trains on. Pretraining is one; fine-tuning and alignment are others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from jingu.data.batch import IGNORED, Batch, changed
from jingu.data.batches import held_out_batch, held_out_windows
from jingu.data.corruption import SpanCorruption
from jingu.data.dataset import TokenDataset
from jingu.data.loader import Loader
from jingu.data.supervised import SupervisedRows
from jingu.model.experts import Routing, auxiliary_losses
from jingu.model.spec import Experts
from jingu.parallel.pipeline import Model
from jingu.train.loss import ChunkLoss, summed_cross_entropy


@dataclass(frozen=True)
class HeldOut:
    """Held-out text as rows that together predict each of its tokens once; or, corrupted, as its whole windows."""

    dataset: TokenDataset
    sequence_length: int
    corruption: SpanCorruption | None = None
    apart: bool = False
    """Whether attention stays inside documents."""
    supervised: SupervisedRows | None = None
    """The rows, where they are supervised."""

    @property
    def count(self) -> int:
        """Rows."""
        if self.supervised is not None:
            return len(self.supervised)
        if self.corruption is not None:
            return self.dataset.tokens // self.sequence_length
        return held_out_windows(self.dataset, self.sequence_length)

    def batch(self, first: int, count: int, end: int) -> Batch:
        """Rows [first, first + count); those from `end` on have no labels."""
        if self.supervised is not None:
            batch = self.supervised.batch(first, count)
        else:
            batch = held_out_batch(self.dataset, self.sequence_length, first, count, apart=self.apart)
        if self.corruption is not None:
            # A window's labels are its text. Beyond the last whole one there is none, nor are there labels in the end.
            batch = self.corruption.batch(batch.labels.clamp_min(0), first)
        batch.labels[max(0, end - first) :] = IGNORED
        return batch


class Task(Protocol):
    """Batches, and the loss of a batch."""

    def batch(self, step: int, first: int, count: int) -> Batch:
        """Rows [first, first + count) of the global batch of a step: a pure function."""

    def held_out(self) -> HeldOut | None:
        """Held-out rows for evaluation, or None."""

    def weights(self, model: Model) -> dict[str, float]:
        """What `loss` gives, in its order, and how much each counts in what is trained. The first is the loss."""

    def loss(self, model: Model, batch: Batch) -> Tensor:
        """Summed loss of the batch's trained tokens; or [n], where other sums over them follow it."""


@dataclass(frozen=True)
class Pretraining:
    """Next-token prediction over windows of a corpus; with an encoder, of what is removed from them."""

    source: Loader
    held_out_rows: HeldOut | None
    chunk: ChunkLoss
    columns: int | None = None
    """As in `summed_cross_entropy`."""
    labels_here: Callable[[Tensor], Tensor] = lambda labels_BT: labels_BT
    """From the labels of whole rows to those of the tokens whose loss this rank computes."""

    def batch(self, step: int, first: int, count: int) -> Batch:
        return self.source.batch(step, first, count)

    def held_out(self) -> HeldOut | None:
        return self.held_out_rows

    def weights(self, model: Model) -> dict[str, float]:
        experts = model.spec.feed_forward
        if not isinstance(experts, Experts):
            return {"loss": 1.0}
        return {"loss": 1.0, "balance_loss": experts.balance, "z_loss": experts.z, "dropped": 0.0}

    def loss(self, model: Model, batch: Batch) -> Tensor:
        def head(hidden_BTD: Tensor, weight_VD: Tensor) -> Tensor:
            return summed_cross_entropy(hidden_BTD, weight_VD, self.labels_here(batch.labels), self.chunk, self.columns)

        def auxiliary(routings: list[Routing]) -> Tensor:
            assert isinstance(model.spec.feed_forward, Experts)
            return auxiliary_losses(routings, model.spec.feed_forward, (batch.labels >= 0).sum(1))

        source = {}
        if batch.source is not None:
            source = {"source_BS": batch.source.tokens, "source_documents_BS": batch.source.documents}
        total: Tensor = model(batch.tokens, batch.positions, batch.documents, loss=head, auxiliary=auxiliary, **source)
        return total


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on the device; a no-op on CPU."""
    if device.type == "cpu":
        return batch
    return changed(batch, lambda tensor: tensor.to(device, non_blocking=True))
