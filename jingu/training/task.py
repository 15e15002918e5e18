"""Task: what the training loop optimizes. Pretraining, fine-tuning and alignment are tasks; the loop knows none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jingu.config.batch_plan import BatchPlan
from jingu.config.schema import RunConfig
from jingu.data.batch import Batch
from jingu.errors import JinguError
from jingu.parallel.pipeline import ParallelModel
from jingu.parallel.sharding import TensorBlock
from jingu.training.run import Run


@dataclass(frozen=True)
class Evaluation:
    """Results of one evaluation of a model by its task.

    Attributes:
        metrics: values by name, `loss` among them; empty without a validation split.
        samples: pairs (prompt, continuation).
    """

    metrics: dict[str, float | None]
    samples: list[tuple[str, str]] = field(default_factory=list)


class StepNotStartedError(JinguError):
    """`Task.begin_step` failed on all ranks alike, before anything has changed: the state of the run can be saved."""


class Task(Protocol):
    """Batches, their loss, and an evaluation. Every rank has one and calls its methods in the same order."""

    def begin_step(self, model: ParallelModel, plan: BatchPlan, step: int) -> None:
        """Do what a step needs the model for before its batches are read: generate answers, or check a reference.

        Args:
            plan: how the global batch is divided.

        Raises:
            StepNotStartedError: the step cannot start.
        """

    def batch(self, step: int, first: int, count: int) -> Batch:
        """Return rows [first, first + count) of the global batch of a step, on the CPU.

        A task whose rows depend on nothing but these numbers may prefetch them in a thread.
        """

    def denominator(self, batch: Batch) -> float:
        """Return the number of units in a batch that the loss is averaged over: tokens, sequences or pairs."""

    def loss_terms(self, model: ParallelModel) -> dict[str, float]:
        """Return the coefficient of each value of `loss`, by name and in its order; 0 for what is only a metric. The
        first is named `loss`."""

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """Return the loss summed over the units of a batch; or [n], where other sums follow it.

        Args:
            model: the whole model, or one stage of a pipeline, which is called in the same way.
        """

    def end_step(self) -> Mapping[str, Tensor | float]:
        """Return what the step has measured, by name, equal on all ranks: scalars that may be on the device. Called
        after the weights have changed."""

    def tensors(self) -> dict[str, TensorBlock]:
        """Return what belongs to a checkpoint beside model and optimizer, by name: a second model that is trained."""

    def state(self) -> Any:
        """Return what else belongs to a checkpoint, as JSON, on the first rank. All ranks call it together."""

    def load_state(self, state: Any) -> None:
        """Continue from what `state` returned; None: from the beginning. All ranks call it."""

    def evaluate(self, model: ParallelModel, micro_batch_size: int, *, final: bool) -> Evaluation:
        """Evaluate the model.

        Args:
            micro_batch_size: rows of a forward pass on one rank.
            final: whether the run ends with this evaluation.
        """


class StatelessTask:
    """Base of tasks whose checkpoints hold nothing beside model and optimizer.

    By default they average over trained tokens, prepare nothing before a step, and measure nothing but the loss terms.
    """

    def begin_step(self, model: ParallelModel, plan: BatchPlan, step: int) -> None:
        """Do nothing."""

    def denominator(self, batch: Batch) -> float:
        """Return the number of trained tokens."""
        return float((batch.labels >= 0).sum())

    def end_step(self) -> Mapping[str, Tensor | float]:
        """Return nothing."""
        return {}

    def tensors(self) -> dict[str, TensorBlock]:
        """Return nothing."""
        return {}

    def state(self) -> Any:
        """Return nothing."""

    def load_state(self, state: Any) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class TaskFactory:
    """How the task of a run is made. `jingu train` uses that of pretraining; other rooms inject their own.

    Attributes:
        create: from the run, the mesh that its model is laid out over, and whether to compile the loss.
        rows_per_group: neighboring rows that must be in one micro-batch, such as the two answers of a preference pair.
        check: raises JinguError, before a model is built, if the task cannot start.
    """

    create: Callable[[Run, DeviceMesh, bool], Task]
    rows_per_group: Callable[[RunConfig], int] = lambda config: 1
    check: Callable[[Run], object] = lambda run: None
