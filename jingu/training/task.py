"""The interface between the training loop and its tasks, such as pretraining, fine-tuning and alignment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jingu.config.batch_plan import BatchPlan
from jingu.config.schema import RunConfig
from jingu.config.sections.task_base import TaskBase
from jingu.data.batch import Batch
from jingu.errors import JinguError
from jingu.parallel.pipeline import ParallelModel
from jingu.parallel.sharding import TensorBlock
from jingu.tables import import_name
from jingu.training.run import Run


@dataclass(frozen=True)
class Evaluation:
    """Results of one evaluation of a model by its task.

    Attributes:
        metrics: values by name, including `loss`; empty without a validation split.
        samples: pairs (prompt, continuation), as text.
    """

    metrics: dict[str, float | None]
    samples: list[tuple[str, str]] = field(default_factory=list)


class StepNotStartedError(JinguError):
    """`Task.begin_step` failed on all ranks, before it changed anything, so that the state of the run can be saved."""


class Task:
    """Batches, their loss, and an evaluation.

    Every rank has a task, and all ranks must call its methods in the same order. By default a task averages the loss
    over trained tokens, prepares nothing before a step, and adds nothing to a checkpoint of model and optimizer.

    Attributes:
        headline: names of the metrics that the progress of a run shows, where a step has them.
    """

    headline: tuple[str, ...] = ("loss",)

    def begin_step(self, model: ParallelModel, plan: BatchPlan, step: int) -> None:
        """Prepare a step before its batches are read, such as by generating answers or checking the reference model.

        Args:
            plan: how the global batch is divided.
            step: number of the optimizer step, counted from 0.

        Raises:
            StepNotStartedError: the step cannot start.
        """

    def batch(self, step: int, first: int, count: int) -> Batch:
        """Return rows [first, first + count) of the global batch of a step, on the CPU.

        If the rows depend only on these arguments, the task may prefetch them in a thread.
        """
        raise NotImplementedError

    def denominator(self, batch: Batch) -> float:
        """Return the number of units in a batch over which the loss is averaged: trained tokens, sequences or pairs."""
        return float((batch.labels >= 0).sum())

    def loss_terms(self, model: ParallelModel) -> dict[str, float]:
        """Return the coefficient of each value that the method `loss` returns, by name and in the same order.

        The first name is `loss`. A coefficient of 0 makes the value a metric that is not trained on.
        """
        raise NotImplementedError

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """Return the loss of a batch, summed over its units; or with further terms [n], such as auxiliary losses.

        Args:
            model: the whole model, or one stage of a pipeline, which is called in the same way.
        """
        raise NotImplementedError

    def end_step(self) -> Mapping[str, Tensor | float]:
        """Return further metrics of the step, by name and equal on all ranks: numbers, or scalars on the device.

        It is called after the weights are updated.
        """
        return {}

    def tensors(self) -> dict[str, TensorBlock]:
        """Return the tensors of the task for a checkpoint, by name, such as those of a second model that is trained."""
        return {}

    def state(self) -> Any:
        """Return other state of the task for a checkpoint, as a JSON value on the first rank. All ranks call it."""

    def load_state(self, state: Any) -> None:
        """Restore the state that `state` returned; None: start from the beginning. All ranks call it."""

    def evaluate(self, model: ParallelModel, micro_batch_size: int, *, final: bool) -> Evaluation:
        """Evaluate the model. All ranks call it.

        Args:
            micro_batch_size: rows per forward pass on one rank.
            final: whether this is the evaluation at the end of the run.
        """
        return Evaluation({})


@dataclass(frozen=True)
class TaskFactory:
    """Creates the task of a run. The settings of the task name it (`TaskBase.FACTORY`).

    Attributes:
        create: creates the task, given the run, the mesh over which its model is laid out, and whether to compile the
            loss.
        rows_per_group: returns the number of neighboring rows that must be in one micro-batch, such as the two answers
            of a preference pair.
        check: raises JinguError, before a model is built, if the task cannot start.
    """

    create: Callable[[Run, DeviceMesh, bool], Task]
    rows_per_group: Callable[[RunConfig], int] = lambda config: 1
    check: Callable[[Run], object] = lambda run: None


def find_task_factory(settings: TaskBase) -> TaskFactory:
    """Return the factory that the settings of a task name. Packages above this one have most of them."""
    factory: TaskFactory = import_name(settings.FACTORY)
    return factory
