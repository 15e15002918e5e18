"""A task: what the loop trains on. Pretraining is one; fine-tuning and alignment are others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jingu.config.schema import RunConfig
from jingu.data.batch import IGNORED, Batch, changed
from jingu.data.batches import held_out_batch, held_out_windows
from jingu.data.dataset import TokenDataset
from jingu.data.loader import Loader
from jingu.data.objective import Objective
from jingu.data.supervised import SupervisedRows
from jingu.model.attention import SHARED
from jingu.model.experts import Routing, auxiliary_losses
from jingu.model.noise import keys
from jingu.model.spec import Experts, Lora, ModelSpec
from jingu.parallel.pipeline import Model
from jingu.parallel.rows import Rows
from jingu.parallel.tensor import Vocabulary
from jingu.train.loss import ChunkLoss, chunk_loss, summed_cross_entropy


@dataclass(frozen=True)
class HeldOut:
    """Held-out text as rows that together predict each of its tokens once; or, for an encoder, as its whole windows."""

    dataset: TokenDataset
    sequence_length: int
    apart: bool
    """Whether attention stays inside documents."""
    supervised: SupervisedRows | None
    """The rows, where they are supervised."""
    spec: ModelSpec
    """Of the model that they are for."""
    objective: Objective | None = None

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
        return prompted(batch, self.spec)


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


class Pretraining:
    """Next-token prediction over windows of a corpus; with an encoder, of what is removed from them.

    Args:
        mesh: that the model is laid out over.
        compiles: whether the loss is compiled.
    """

    def __init__(
        self,
        source: Loader,
        held_out: HeldOut | None,
        spec: ModelSpec,
        mesh: DeviceMesh,
        config: RunConfig,
        *,
        compiles: bool = False,
    ) -> None:
        self.source, self.held_out, self._spec, self._config = source, held_out, spec, config
        self._rows, self._vocabulary = Rows(mesh), Vocabulary.of(mesh, spec.vocabulary)

        def chunk(smoothing: float = 0.0, z: float = 0.0) -> ChunkLoss:
            share = self._vocabulary if mesh["tensor"].size() > 1 else None
            made: ChunkLoss = partial(chunk_loss, smoothing=smoothing, z=z, share=share)
            # The last chunk of a batch has any number of rows: that dim is left open once a second number has come.
            return torch.compile(made) if compiles else made

        # Evaluations leave out what only training adds to the loss.
        self._training, self._scoring = chunk(config.train.label_smoothing, config.train.z_loss), chunk()

    def batch(self, step: int, first: int, count: int) -> Batch:
        config, row = self._config, step * self._config.batch.global_size + first
        batch = self.source.batch(step, first, count)
        if isinstance(self._spec.adapter, Lora) and self._spec.adapter.dropout > 0:
            batch = _with_keys(batch, config.seed, row)
        if config.train.noise:
            batch = _with_noise(batch, config.seed, row, config.train.noise)
        if config.data.rows_alone:
            # Nothing before what fills a row up sees that, and nobody trains it: plain causal attention will do.
            batch = replace(batch, documents=None)
        return prompted(batch, self._spec)

    def weights(self, model: Model) -> dict[str, float]:
        experts = model.spec.feed_forward
        if not isinstance(experts, Experts):
            return {"loss": 1.0}
        return {"loss": 1.0, "balance_loss": experts.balance, "z_loss": experts.z, "dropped": 0.0}

    def loss(self, model: Model, batch: Batch) -> Tensor:
        def head(hidden_BTD: Tensor, weight_VD: Tensor) -> Tensor:
            labels, factors = self._rows.of_context(batch.labels, filler=IGNORED), batch.weights
            factors = None if factors is None else self._rows.of_context(factors)
            chunk = self._training if torch.is_grad_enabled() else self._scoring
            return summed_cross_entropy(hidden_BTD, weight_VD, labels, chunk, self._vocabulary.most, factors)

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


def _with_keys(batch: Batch, seed: int, row: int) -> Batch:
    """Rows from `row` of the run on, with the keys by which adapters drop inputs of their tokens."""
    source = batch.source
    if source is not None:
        source = replace(source, keys=keys(seed + 1, row, *source.tokens.shape))
    return replace(batch, keys=keys(seed, row, *batch.tokens.shape), source=source)


def _with_noise(batch: Batch, seed: int, row: int, size: float) -> Batch:
    """Rows from `row` of the run on, with the keys and the scale of the noise on their tokens: it is the smaller, the
    longer the document that a token is in."""
    key_BT = keys(seed, row, *batch.tokens.shape)
    length_BT = torch.full_like(key_BT, key_BT.shape[1])
    if batch.documents is not None:
        documents_BT = batch.documents + 1  # 0: empty
        counts = key_BT.new_zeros(key_BT.shape[0], key_BT.shape[1] + 1)
        counts.scatter_add_(1, documents_BT, torch.ones_like(documents_BT))
        length_BT = counts.gather(1, documents_BT)
    return replace(batch, noise=torch.stack([key_BT.double(), size * length_BT.double().rsqrt()]))


def prompted(batch: Batch, spec: ModelSpec) -> Batch:
    """A batch with the prompt tokens of a model, of which none is trained to be predicted.

    The same prompt stands before every document of a row, and is there once.
    """
    read, encoded = spec.prompts
    if read:
        before = {"tokens": [*spec.prompted(())], "labels": [IGNORED] * read, "positions": list(range(read))}
        before |= {"documents": [SHARED] * read, **dict.fromkeys(("reach", "weights", "noise"), [0] * read)}
        moved = {name: x + read for name in ("positions", "reach") if (x := getattr(batch, name)) is not None}
        batch = replace(batch, **moved)
        held = {name: getattr(batch, name) for name in before}
        longer: dict[str, Any] = {name: _before(x, before[name]) for name, x in held.items() if x is not None}
        batch = replace(batch, **longer)
    if encoded and batch.source is not None:
        tokens = torch.tensor([spec.prompted(row, encoder=True) for row in batch.source.tokens.tolist()])
        batch = replace(batch, source=replace(batch.source, tokens=tokens))
    return batch


def _before(x_BT: Tensor, values: list[int]) -> Tensor:
    return torch.cat([torch.tensor(values, dtype=x_BT.dtype).expand(*x_BT.shape[:-1], -1), x_BT], -1)
