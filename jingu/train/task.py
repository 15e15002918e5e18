"""A task: what the loop trains on. Pretraining is one; fine-tuning and alignment are others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from jingu.data.batch import IGNORED, Batch, changed
from jingu.data.batches import held_out_batch, held_out_windows
from jingu.data.dataset import TokenDataset
from jingu.data.loader import Loader
from jingu.data.objective import Objective
from jingu.data.supervised import SupervisedRows
from jingu.model.experts import Routing, auxiliary_losses
from jingu.model.noise import keys
from jingu.model.spec import Experts, ModelSpec
from jingu.parallel.pipeline import Model
from jingu.train.loss import ChunkLoss, chunk_loss, summed_cross_entropy
from jingu.train.prompted import prompted


@dataclass(frozen=True)
class HeldOut:
    """Held-out text as rows that together predict each of its tokens once; or, for an encoder, as its whole windows."""

    dataset: TokenDataset
    sequence_length: int
    objective: Objective | None = None
    apart: bool = False
    """Whether attention stays inside documents."""
    supervised: SupervisedRows | None = None
    """The rows, where they are supervised."""
    prompts: ModelSpec | None = None
    """A model whose prompt tokens the rows get."""

    @property
    def reads(self) -> bool:
        """Whether there is an encoder that reads a part."""
        return self.objective is not None and self.objective.source_length > 0

    @property
    def count(self) -> int:
        """Rows."""
        if self.supervised is not None:
            return len(self.supervised)
        if self.reads:
            return self.dataset.tokens // self.sequence_length
        return held_out_windows(self.dataset, self.sequence_length)

    def batch(self, first: int, count: int, end: int) -> Batch:
        """Rows [first, first + count); those from `end` on have no labels."""
        if self.supervised is not None:
            batch = self.supervised.batch(first, count)
        else:
            batch = held_out_batch(self.dataset, self.sequence_length, first, count, inside=self.apart)
        if self.reads:  # a window's labels are its text; beyond the last whole one there is none
            batch = replace(batch, tokens=batch.labels.clamp_min(0))
        if self.objective is not None:
            batch = self.objective.of(batch, first)
        batch.labels[max(0, end - first) :] = IGNORED
        return batch if self.prompts is None else prompted(batch, self.prompts)


class Task(Protocol):
    """Batches, and the loss of a batch."""

    def batch(self, step: int, first: int, count: int) -> Batch:
        """Rows [first, first + count) of the global batch of a step: a pure function."""

    @property
    def held_out(self) -> HeldOut | None:
        """Held-out rows for evaluation, or None."""

    def weights(self, model: Model) -> dict[str, float]:
        """What `loss` gives, in its order, and how much each counts in what is trained. The first is the loss."""

    def loss(self, model: Model, batch: Batch) -> Tensor:
        """Summed loss of the batch's trained tokens; or [n], where other sums over them follow it."""


@dataclass(frozen=True)
class Chance:
    """What is drawn while training, as a function of seed, step and place."""

    seed: int
    global_size: int
    noise: float = 0.0
    """Size of the noise on embedded tokens."""
    drops: bool = False
    """Whether adapters drop some of their inputs."""

    def on(self, batch: Batch, step: int, first: int) -> Batch:
        """The rows of a step from `first` on, with the keys of their tokens, and the scale of their noise: it is the
        smaller, the longer the document that a token is in."""
        row, source = step * self.global_size + first, batch.source
        if self.drops:
            if source is not None:
                source = replace(source, keys=keys(self.seed + 1, row, *source.tokens.shape))
            batch = replace(batch, keys=keys(self.seed, row, *batch.tokens.shape), source=source)
        if self.noise:
            key_BT = keys(self.seed, row, *batch.tokens.shape)
            length_BT = torch.full_like(key_BT, key_BT.shape[1])
            if batch.documents is not None:
                documents_BT = batch.documents + 1  # 0: empty
                counts = key_BT.new_zeros(key_BT.shape[0], key_BT.shape[1] + 1)
                counts.scatter_add_(1, documents_BT, torch.ones_like(documents_BT))
                length_BT = counts.gather(1, documents_BT)
            batch = replace(batch, noise=torch.stack([key_BT.double(), self.noise * length_BT.double().rsqrt()]))
        return batch


@dataclass(frozen=True)
class Pretraining:
    """Next-token prediction over windows of a corpus; with an encoder, of what is removed from them."""

    source: Loader
    held_out: HeldOut | None
    chunk: ChunkLoss
    columns: int | None = None
    """As in `summed_cross_entropy`."""
    tokens_here: Callable[..., Tensor] = lambda labels_BT, filler=0: labels_BT
    """From what there is of each token of whole rows to that of the tokens whose loss this rank computes."""
    scoring: ChunkLoss = chunk_loss
    """`chunk` for evaluations, which leave out what only training adds to the loss."""
    chance: Chance | None = None
    prompts: ModelSpec | None = None
    """As of `HeldOut`."""
    alone: bool = False
    """Whether a row is one document and what fills it up, which nothing before it sees and nobody trains: plain causal
    attention is then all that it needs."""

    def batch(self, step: int, first: int, count: int) -> Batch:
        batch = self.source.batch(step, first, count)
        batch = batch if self.chance is None else self.chance.on(batch, step, first)
        batch = replace(batch, documents=None) if self.alone else batch
        return batch if self.prompts is None else prompted(batch, self.prompts)

    def weights(self, model: Model) -> dict[str, float]:
        experts = model.spec.feed_forward
        if not isinstance(experts, Experts):
            return {"loss": 1.0}
        return {"loss": 1.0, "balance_loss": experts.balance, "z_loss": experts.z, "dropped": 0.0}

    def loss(self, model: Model, batch: Batch) -> Tensor:
        def head(hidden_BTD: Tensor, weight_VD: Tensor) -> Tensor:
            labels, factors = self.tokens_here(batch.labels, filler=IGNORED), batch.weights
            factors = None if factors is None else self.tokens_here(factors)
            chunk = self.chunk if torch.is_grad_enabled() else self.scoring
            return summed_cross_entropy(hidden_BTD, weight_VD, labels, chunk, self.columns, factors)

        def auxiliary(routings: list[Routing]) -> Tensor:
            assert isinstance(model.spec.feed_forward, Experts)
            return auxiliary_losses(routings, model.spec.feed_forward, (batch.labels >= 0).sum(1))

        if batch.source is not None:
            more = {"source_BS": batch.source.tokens, "source_documents_BS": batch.source.documents}
            more["source_keys_BS"] = batch.source.keys
        else:
            more = {"noise_2BT": batch.noise, "reach_BT": batch.reach}
        more["keys_BT"] = batch.keys
        total: Tensor = model(batch.tokens, batch.positions, batch.documents, loss=head, auxiliary=auxiliary, **more)
        return total


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on the device; a no-op on CPU."""
    if device.type == "cpu":
        return batch
    return changed(batch, lambda tensor: tensor.to(device, non_blocking=True))
