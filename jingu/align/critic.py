"""The critic (value model) of PPO: it predicts the return of an answer from each of its tokens on.

Shapes: B rows, C tokens of a row on a context rank, D hidden size; R answers, A tokens of the longest one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jingu.align.answers import RewardHead
from jingu.align.policy_batch import PolicyBatch
from jingu.align.policy_loss import value_loss
from jingu.align.reference import check_vocabulary
from jingu.config.batch_plan import BatchPlan
from jingu.config.sections.policies import PpoSettings, SeparateCriticSettings
from jingu.data.batch import Batch
from jingu.formats.models import open_model
from jingu.parallel.materialize import materialize
from jingu.parallel.pipeline import ParallelModel
from jingu.parallel.sharding import TensorBlock
from jingu.training.batch_transforms import model_inputs
from jingu.training.checkpointing import checkpoint_tensors
from jingu.training.optimizer import build_optimizer, set_learning_rate
from jingu.training.precision import choose_precision
from jingu.training.run import Run
from jingu.training.schedule import learning_rate
from jingu.training.session import training_layout
from jingu.training.step import train_step
from jingu.training.task import Task


class SeparateCritic(Task):
    """A critic with weights of its own, sharded like the policy. It is itself a `Task`, for the step that trains it.

    Attributes:
        model: a model with a score head.

    Args:
        batch: returns rows [first, first + count) of an update, as `Task.batch` does.
    """

    def __init__(
        self, run: Run, mesh: DeviceMesh, settings: PpoSettings, batch: Callable[[int, int, int], Batch]
    ) -> None:
        assert isinstance(settings.critic, SeparateCriticSettings)
        config = run.config
        self._config = config
        self._clip = settings.value_clip
        self._head = RewardHead(mesh)
        self._lr = settings.critic.lr_multiplier * config.optimizer.lr
        self._batch = batch
        path = settings.critic.model or config.initialize.from_
        stored_model = None if path is None else open_model(Path(path))
        spec = run.spec
        if stored_model is not None:
            check_vocabulary(stored_model, run, "task.critic.model")
            spec = stored_model.spec
        spec = spec.model_copy(update={"adapter": None, "frozen_parameters": (), "score_head": True})
        precision = choose_precision(config.precision, torch.device(mesh.device_type))
        self.model = materialize(spec, mesh, training_layout(config, compile=False), precision, config.seed)
        if stored_model is not None:
            # Only a reward model comes with a score head; otherwise it keeps its random initialization.
            has_head = stored_model.spec.score_head
            self.model.sharding.fill(self.model, stored_model.read, lambda name: has_head or name != "score.weight")
        self.optimizer = build_optimizer(config.optimizer.model_copy(update={"lr": self._lr}), self.model)

    def tensors(self) -> dict[str, TensorBlock]:
        """Return the tensors that belong to a checkpoint, by name."""
        return {f"critic/{name}": block for name, block in checkpoint_tensors(self.model, self.optimizer).items()}

    def values(self, hidden_BCD: Tensor, weight_1D: Tensor, batch: PolicyBatch) -> Tensor:
        """Return the predicted returns [R, A] before each token of the answers."""
        return batch.by_answer(self._head.scores(hidden_BCD, weight_1D, batch))

    def train(self, plan: BatchPlan, step: int) -> dict[str, Tensor | float]:
        """Take an optimizer step on the rows of an update; return its metrics by name."""
        config = self._config
        lr = learning_rate(config.schedule, self._lr, step // plan.updates, config.train.steps)
        set_learning_rate(self.optimizer, lr * plan.lr_scale)
        result = train_step(self.model, self.optimizer, self, plan, step=step, max_grad_norm=config.train.max_grad_norm)
        return {"value_loss": result.loss, **result.metrics, "critic_grad_norm": result.grad_norm}

    # As a task

    def batch(self, step: int, first: int, count: int) -> Batch:
        """Return rows of the step of the trained model."""
        return self._batch(step, first, count)

    def loss_terms(self, model: ParallelModel) -> dict[str, float]:
        return {"loss": 1.0, "value_clipped": 0.0}

    def loss(self, model: Any, batch: Batch) -> Tensor:
        assert isinstance(batch, PolicyBatch)

        def head(hidden_BCD: Tensor, weight_1D: Tensor) -> Tensor:
            value_RA = self.values(hidden_BCD, weight_1D, batch)
            return torch.stack(value_loss(batch, value_RA, self._clip)) * self._head.share

        total: Tensor = model(model_inputs(batch), loss=head)
        return total
