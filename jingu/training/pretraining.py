"""Pretraining and supervised fine-tuning: next-token prediction over the rows of a data set."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jingu.config.schema import RunConfig
from jingu.data.batch import IGNORE_INDEX, Batch
from jingu.data.batch_prefetch import BatchPrefetcher
from jingu.data.objective import batch_function
from jingu.errors import pluralize
from jingu.model.adapter_specs import Lora
from jingu.model.experts import RoutingStats, auxiliary_losses
from jingu.model.prediction import shift_labels, shift_left
from jingu.model.spec import ModelSpec
from jingu.parallel.pipeline import ParallelModel
from jingu.parallel.tensor import VocabShard
from jingu.parallel.token_sharding import TokenSharding
from jingu.runtime.log import log_info
from jingu.training.batch_transforms import add_dropout_seeds, add_embedding_noise, model_inputs, prepend_virtual_tokens
from jingu.training.evaluate import average_results, evaluate, generate_samples
from jingu.training.loss import ChunkLoss, chunk_loss, linear_cross_entropy
from jingu.training.run import Run
from jingu.training.task import Evaluation, Task, TaskFactory


class Pretraining(Task):
    """The task of predicting the next token; with an encoder, of predicting the target text of the objective.

    Args:
        source: returns rows of the global batch of a step.
        spec: spec of the model.
        mesh: mesh over which the model is laid out.
        run: run to evaluate; None: `evaluate` must not be called.
        compile: whether to compile the loss.
    """

    def __init__(
        self,
        source: BatchPrefetcher,
        spec: ModelSpec,
        mesh: DeviceMesh,
        config: RunConfig,
        run: Run | None = None,
        *,
        compile: bool = False,
    ) -> None:
        self._source = source
        self.spec = spec
        self.config = config
        self._run = run
        self._tokens = TokenSharding(mesh)
        self._vocab = VocabShard.of(mesh, spec.vocab_size)

        def build_chunk_loss(smoothing: float = 0.0, z: float = 0.0) -> ChunkLoss:
            shard = self._vocab if mesh["tensor"].size() > 1 else None
            function: ChunkLoss = partial(chunk_loss, smoothing=smoothing, z=z, shard=shard)
            # The last chunk of a batch may have fewer tokens. The compiler makes that dim dynamic at the second size.
            return torch.compile(function) if compile else function

        # Evaluations measure the plain cross-entropy, without label smoothing and z-loss.
        self._train_loss = build_chunk_loss(config.train.label_smoothing, config.train.z_loss_coef)
        self._eval_loss = build_chunk_loss()

    @classmethod
    def from_run(cls, run: Run, mesh: DeviceMesh, compile: bool) -> Pretraining:
        """Create the task of a run. Its batches depend on the step alone, so they are prefetched."""
        source = BatchPrefetcher(batch_function(run.source, run.objective), mesh.device_type)
        return cls(source, run.spec, mesh, run.config, run, compile=compile)

    def batch(self, step: int, first: int, count: int) -> Batch:
        config = self.config
        batch = self._source.batch(step, first, count)
        first_row = step * config.batch.global_batch_size + first
        if isinstance(self.spec.adapter, Lora) and self.spec.adapter.dropout > 0:
            batch = add_dropout_seeds(batch, config.seed, first_row)
        if config.train.neftune_alpha:
            batch = add_embedding_noise(batch, config.seed, first_row, config.train.neftune_alpha)
        if config.data.has_single_row_sequences:
            # A row is one document, followed by padding without labels: causal attention needs no document mask.
            batch = replace(batch, documents=None)
        return prepend_virtual_tokens(batch, self.spec)

    def loss_terms(self, model: ParallelModel) -> dict[str, float]:
        weight = model.spec.mtp_loss_weight if model.spec.mtp_layers else 0.0
        return {"loss": 1.0, **({"mtp_loss": weight} if weight else {}), **model.router_terms}

    def loss(self, model: Any, batch: Batch) -> Tensor:
        # The model calls this with the head's weight, while that is gathered.
        def head(hidden_BTD: Tensor, weight_VD: Tensor, depth: int = 0) -> Tensor:
            labels_BT = batch.labels
            if depth:
                labels_BT = shift_labels(labels_BT, batch.documents, depth, IGNORE_INDEX)
            labels_BT = self._tokens.shard_context(labels_BT, fill=IGNORE_INDEX)
            factors_BT = batch.weights
            if factors_BT is not None:
                factors_BT = self._tokens.shard_context(shift_left(factors_BT, depth, 0))
            chunk = self._train_loss if torch.is_grad_enabled() else self._eval_loss
            cap = self.spec.logit_softcap
            return linear_cross_entropy(hidden_BTD, weight_VD, labels_BT, chunk, self._vocab.most, factors_BT, cap)

        def auxiliary(routings: list[RoutingStats]) -> Tensor:
            assert model.spec.experts is not None
            return auxiliary_losses(routings, model.spec.experts, (batch.labels >= 0).sum(1))

        further = {"further": head} if model.spec.mtp_loss_weight else {}
        total: Tensor = model(model_inputs(batch), loss=head, auxiliary=auxiliary, **further)
        return total

    def evaluate(self, model: ParallelModel, micro_batch_size: int, *, final: bool) -> Evaluation:
        """Measure the loss on the validation split of each source, and generate continuations of the sample prompts.

        The number of sequences of each source is proportional to its share of the run's samples.
        """
        assert self._run is not None
        limit = self._run.config.evaluation.limit(final=final)
        if limit == "all" and self._run.validation:
            total = sum(map(len, self._run.validation))
            log_info(f"Evaluating on the whole validation split, {pluralize(total, 'sequence')}.")
        byte_lengths = self._run.tokenizer.byte_lengths()
        results = {}
        for rows in self._run.validation:
            num_rows = rows.count(limit)
            results[rows.name] = evaluate(model, self, rows, byte_lengths, num_rows, micro_batch_size)
        shares = {rows.name: rows.share for rows in self._run.validation}
        return Evaluation(average_results(results, shares), generate_samples(self._run, model))


PRETRAINING = TaskFactory(Pretraining.from_run)
