"""One optimizer step: forward and backward of the micro-batches, gradient clipping, update."""

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
from jingu.training.expert_loads import load_metrics, split_loads, update_corrections
from jingu.training.task import Task


@dataclass(frozen=True)
class StepResult:
    """Results of a step: scalars on the device, equal on all ranks. Reading one makes the host wait for the device.

    Attributes:
        loss: mean loss over the units (tokens, sequences or pairs) of the global batch, fp64.
        grad_norm: global norm of the gradient before clipping.
        metrics: means of the other loss terms, and the metrics of `Task.end_step`, by name.
        is_skipped: whether the gradient overflowed, so that the weights were not updated (only with a loss scale).
    """

    loss: Tensor
    grad_norm: Tensor
    metrics: Mapping[str, Tensor | float]
    is_skipped: bool

    @property
    def is_finite(self) -> Tensor:
        """Whether loss and gradient are finite. The gradient of a skipped step does not count."""
        return self.loss.isfinite() & (self.grad_norm.isfinite() | self.is_skipped)


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

    The gradient is that of the summed loss, divided by the *global* number of units (tokens, sequences or pairs). It
    therefore does not depend on micro-batches, ranks or padding. The gradient is divided only once, after the backward
    pass and in the dtype of the master weights, so that gradients in a narrow dtype neither underflow nor are rounded.

    Args:
        step: number of the step, counted from 0.
        max_grad_norm: clip the global gradient norm to this value; None: do not clip.
        loss_scale: factor on the mean loss in the backward pass (fp16); None: no loss scale. With it, a step whose
            gradient overflows is skipped on all ranks, because all compute the same norm. The host must wait for that
            norm.
    """
    mesh = model.sharding.mesh
    device = torch.device(mesh.device_type)

    # 1. Get this rank's rows of the global batch, by micro-batch.
    model.activity.enter("rollout", step)
    task.begin_step(model, plan, step)
    model.activity.enter("data")
    first = data_rank(mesh) * plan.rows_per_rank
    batches = [
        task.batch(step, first + start, plan.micro_batch_size)
        for start in range(0, plan.rows_per_rank, plan.micro_batch_size)
    ]

    # 2. Sum the denominators over all ranks. Ranks that share a row have each counted it, hence the division.
    model.activity.enter("gradients")
    units = copy_to_device(float(sum(task.denominator(batch) for batch in batches)), device, torch.float64)
    units = (sum_over_ranks(units) / num_row_replicas(mesh)).clamp_min(1.0)
    scale = torch.ones_like(units)
    if loss_scale is not None:
        # The loss in the backward pass is a sum, not a mean. Divide the scale by the largest power of two that is not
        # above the denominator, 2 ** floor(log2(units)): unlike the denominator, it causes no rounding.
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
    is_skipped = loss_scale is not None and not bool(norm.isfinite())
    if not is_skipped:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    model.synchronize_tied_weights()

    # 6. Average the loss terms over the global batch.
    means = dict(zip(terms, sum_losses(total_n, mesh) / units, strict=True))
    loss = means.pop("loss")
    if model.router_terms:
        means, load_LE = split_loads(means, model.spec.experts)
        if load_LE is not None:
            means |= load_metrics(load_LE)
            means |= {} if is_skipped else update_corrections(model, load_LE)
    # 7. Add what the task has measured.
    return StepResult(loss, norm, {**means, **task.end_step()}, is_skipped)


def sum_over_ranks(value: Tensor) -> Tensor:
    """All-reduce a tensor over all ranks, in place."""
    if dist.get_world_size() > 1:
        dist.all_reduce(value)
    return value


def sum_losses(losses_n: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return sums of losses over all ranks, and overwrite `losses_n`.

    The ranks of `tensor` and `pipeline` hold equal values, which count once.
    """
    return sum_over_ranks(losses_n) / num_ranks(mesh, "tensor", "pipeline")


def scale_gradients(model: ParallelModel, factor: Tensor, max_norm: float | None) -> Tensor:
    """Multiply the gradients by `factor`, and clip their global norm to `max_norm`, in one multiplication.

    It first sums the gradients of parameters that the ranks of `tensor` replicate. Call it only once per step.

    Returns:
        The global norm before clipping, fp64.
    """
    model.sharding.sum_replicated_gradients(model)
    norm = _global_norm(model) * factor
    if max_norm is not None:
        factor = factor * (max_norm / (norm + 1e-6)).clamp_max(1.0)
    gradients = [local_tensor(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    if gradients:  # a pipeline stage may have only frozen parameters
        # Offloaded gradients are in main memory, so the factor is copied there.
        foreach_mul_(gradients, factor.to(gradients[0].device))
    return norm


def _global_norm(model: ParallelModel) -> Tensor:
    """Return the norm of all gradients over all ranks. Elements of which several ranks hold copies count once."""
    gradients: dict[int, list[Tensor]] = {}  # by the number of ranks that hold a copy
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            copies = model.sharding.parts[name].copies
            gradients.setdefault(copies, []).append(local_tensor(parameter.grad))
    squares = [nn.utils.get_total_norm(tensors).double().square() / copies for copies, tensors in gradients.items()]
    total = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    return sum_over_ranks(sum(squares, total)).sqrt()
