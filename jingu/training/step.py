"""One optimizer step: forward and backward of the micro-batches, reduce, clip, update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from jingu.compat.torch import foreach_mul_
from jingu.config.batch_plan import BatchPlan
from jingu.parallel.mesh import data_rank, num_ranks, num_row_replicas
from jingu.parallel.pipeline import ParallelModel
from jingu.parallel.sharding import local_tensor
from jingu.runtime.device import copy_to_device
from jingu.training.batch_transforms import to_device
from jingu.training.task import Task


@dataclass(frozen=True)
class StepResult:
    """Results of a step: scalars on the device, equal on all ranks. To read one waits for the device.

    Attributes:
        loss: mean loss over the units of the global batch, fp64.
        grad_norm: global norm of the gradient before clipping.
        metrics: means of the other loss terms, and what the task has measured, by name.
        skipped: whether the gradient overflowed and the weights stayed as they were (with a loss scale only).
    """

    loss: Tensor
    grad_norm: Tensor
    metrics: Mapping[str, Tensor | float]
    skipped: bool

    @property
    def is_finite(self) -> Tensor:
        """Whether loss and gradient are finite. A gradient that overflows fp16 changes nothing, and does not count."""
        return self.loss.isfinite() & (self.grad_norm.isfinite() | self.skipped)


def train_step(
    model: ParallelModel,
    optimizer: torch.optim.Optimizer,
    task: Task,
    plan: BatchPlan,
    *,
    step: int,
    max_grad_norm: float | None,
    loss_scale: float | None = None,
) -> StepResult:
    """Take one optimizer step.

    The gradient is that of the summed loss, divided by the *global* number of units (tokens, sequences or pairs), so
    that it depends on neither micro-batches nor ranks nor padding. The division comes once, at the end and in the
    dtype of the master weights: what flows backward in a narrow dtype is then neither tiny nor rounded for it.

    Args:
        step: number of the step, counted from 0.
        loss_scale: factor on the mean loss while it flows backward (fp16). A step whose gradient overflows is
            skipped, on all ranks alike, since all compute the same norm. The host has to wait for that norm.
    """
    mesh = model.sharding.mesh
    device = torch.device(mesh.device_type)

    # 1. Get this rank's rows of the global batch, one micro-batch after another.
    model.activity.enter("rollout", step)
    task.begin_step(model, plan, step)
    model.activity.enter("data")
    first = data_rank(mesh) * plan.rows_per_rank
    batches = [
        task.batch(step, first + start, plan.micro_batch_size)
        for start in range(0, plan.rows_per_rank, plan.micro_batch_size)
    ]

    # 2. Sum the denominators over all ranks. Ranks that share a row count it once each.
    model.activity.enter("gradients")
    units = copy_to_device(float(sum(task.denominator(batch) for batch in batches)), device, torch.float64)
    units = (sum_over_ranks(units) / num_row_replicas(mesh)).clamp_min(1.0)
    scale = torch.ones_like(units)
    if loss_scale is not None:
        # The scale of the sum is that of the mean, divided by a power of two near the denominator, which rounds
        # nothing: 2 ** floor(log2(units)).
        scale = torch.ldexp(scale * loss_scale, 1 - torch.frexp(units).exponent)

    # 3. Forward and backward: gradients of the summed loss accumulate in the parameters.
    terms = task.loss_terms(model)
    weight_n = copy_to_device(list(terms.values()), device, torch.float64)
    batches = [to_device(batch, device) for batch in batches]
    total_n = model.train_micro_batches(batches, task.loss, weight_n * scale)

    # 4. Divide the gradient by the denominator and the loss scale, and clip it.
    model.activity.enter("gradients")
    norm = scale_gradients(model, 1.0 / (units * scale), max_grad_norm)

    # 5. Update the weights, unless an fp16 gradient has overflowed.
    model.activity.enter("optimizer")
    skipped = loss_scale is not None and not bool(norm.isfinite())
    if not skipped:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    model.synchronize_tied_weights()

    # 6. Average the loss terms over the global batch.
    means = dict(zip(terms, sum_losses(total_n, mesh) / units, strict=True))
    loss = means.pop("loss")
    # 7. Add what the task has measured.
    return StepResult(loss, norm, {**means, **task.end_step()}, skipped)


def sum_over_ranks(value: Tensor) -> Tensor:
    """All-reduce a tensor over all ranks, in place."""
    if dist.get_world_size() > 1:
        dist.all_reduce(value)
    return value


def sum_losses(losses_n: Tensor, mesh: DeviceMesh) -> Tensor:
    """All-reduce sums of losses over all ranks, in place. The ranks of `tensor` and `pipeline` hold equal values, of
    which one counts."""
    return sum_over_ranks(losses_n) / num_ranks(mesh, "tensor", "pipeline")


def scale_gradients(model: ParallelModel, factor: Tensor, max_norm: float | None) -> Tensor:
    """Multiply the gradients by `factor`, and clip their global norm to `max_norm`, in one multiplication.

    Returns:
        The global norm before clipping, fp64.
    """
    model.sharding.sum_replicated_gradients(model)
    norm = _global_norm(model) * factor
    if max_norm is not None:
        factor = factor * (max_norm / (norm + 1e-6)).clamp_max(1.0)
    gradients = [local_tensor(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    if gradients:  # a stage of a pipeline may train nothing
        # Offloaded gradients lie in main memory, and the factor goes there.
        foreach_mul_(gradients, factor.to(gradients[0].device))
    return norm


def _global_norm(model: ParallelModel) -> Tensor:
    """Return the norm of all gradients, in which each number counts once, however many ranks hold it."""
    gradients: dict[int, list[Tensor]] = {}  # by the number of ranks that hold a copy
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            copies = model.sharding.parts[name].copies
            gradients.setdefault(copies, []).append(local_tensor(parameter.grad))
    squares = [nn.utils.get_total_norm(tensors).double().square() / copies for copies, tensors in gradients.items()]
    total = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    return sum_over_ranks(sum(squares, total)).sqrt()
