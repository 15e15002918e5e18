"""One optimizer step: accumulate, reduce, clip, update."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from jingu.config.batch import BatchPlan
from jingu.data.batch import Batch
from jingu.parallel.apply import before_micro_batch
from jingu.parallel.mesh import data_rank, ranks_of, row_copies
from jingu.parallel.pipeline import Model, Pipeline
from jingu.parallel.sharing import local, sharing_of
from jingu.train.task import Task, to_device


@dataclass(frozen=True)
class StepResult:
    """Scalars on the device, the same on every rank; reading them waits for it."""

    loss: Tensor
    """Mean loss of the step's trained tokens, fp64."""
    grad_norm: Tensor
    """Global norm of the gradient before clipping."""
    others: dict[str, Tensor]
    """Means of what the task's loss gives besides, by name."""
    skipped: bool
    """Whether the gradient was not finite, and the weights stayed as they were (with a loss scale only)."""


def train_step(
    model: Model,
    optimizer: torch.optim.Optimizer,
    task: Task,
    plan: BatchPlan,
    *,
    step: int,
    zero: int,
    clip_norm: float | None,
    loss_scale: float | None = None,
) -> StepResult:
    """One step of the run.

    The gradient is that of the summed loss divided by the *global* number of trained tokens, so that it depends on
    neither micro-batches nor ranks nor padding; what else the task's loss gives are such sums, too. It is divided
    once, at the end and in the masters' dtype: what flows backward in a narrow dtype is then neither tiny nor
    rounded for it.

    Args:
        loss_scale: factor on the summed loss while it flows backward (fp16). The gradient may then overflow: such a
            step is skipped, on all ranks alike, since all have one norm; to know it, the host waits for the device.
    """
    mesh, scale = sharing_of(model).mesh, 1.0 if loss_scale is None else loss_scale
    device = torch.device(mesh.device_type)
    first = data_rank(mesh) * plan.rows_per_rank
    batches = [
        task.batch(step, first + start, plan.micro_size) for start in range(0, plan.rows_per_rank, plan.micro_size)
    ]
    trained = sum(int((batch.labels >= 0).sum()) for batch in batches)
    trained_on = summed_over_ranks(torch.tensor(float(trained), dtype=torch.float64, device=device))
    share = 1.0 / (trained_on / row_copies(mesh)).clamp_min(1.0)
    weights = task.weights(model)
    weight_n = torch.tensor(list(weights.values()), dtype=torch.float64, device=device)
    total_n = _accumulate(model, task, [to_device(batch, device) for batch in batches], weight_n, zero, scale=scale)
    norm = scale_gradients(model, share / scale, clip_norm)
    skipped = loss_scale is not None and not bool(norm.isfinite())
    if not skipped:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if isinstance(model, Pipeline):
        model.refresh_copies()
    means = dict(zip(weights, summed_losses(total_n, mesh) * share, strict=True))
    return StepResult(means.pop("loss"), norm, means, skipped)


def _accumulate(model: Model, task: Task, batches: list[Batch], weight_n: Tensor, zero: int, *, scale: float) -> Tensor:
    """Forward and backward of the micro-batches, one after another or through a pipeline; sums of their losses."""
    scaled_n = weight_n * scale
    if isinstance(model, Pipeline):
        return model.train_micro_batches(batches, task.loss, scaled_n)
    total_n = torch.zeros_like(weight_n)
    for number, batch in enumerate(batches, start=1):
        before_micro_batch(model, zero, last=number == len(batches))
        losses_n = task.loss(model, batch).view(-1)
        (losses_n @ scaled_n.to(losses_n.dtype)).backward()
        total_n += losses_n.detach()
    return total_n


def summed_over_ranks(value: Tensor) -> Tensor:
    """The sum of a tensor over all ranks, in place."""
    if dist.get_world_size() > 1:
        dist.all_reduce(value)
    return value


def summed_losses(losses_n: Tensor, mesh: DeviceMesh) -> Tensor:
    """Sums of losses over all ranks, in place; ranks of the axes `tensor` and `pipeline` hold equal ones, of which one
    counts."""
    return summed_over_ranks(losses_n) / ranks_of(mesh, "tensor", "pipeline")


def scale_gradients(model: nn.Module, share: Tensor, largest: float | None) -> Tensor:
    """Multiply the gradients by `share`, and so much more that their global norm does not exceed `largest`.

    Returns:
        The global norm before clipping, fp64.
    """
    sharing_of(model).sum_copies(model)
    norm = _global_norm(model) * share
    factor = share if largest is None else share * (largest / (norm + 1e-6)).clamp_max(1.0)
    gradients = [local(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    if gradients:  # a stage of a pipeline may train nothing
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))  # main memory where the masters are offloaded
    return norm


def _global_norm(model: nn.Module) -> Tensor:
    """The norm of all gradients, each number counted once however many ranks hold it."""
    by_copies: dict[int, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            by_copies.setdefault(sharing_of(model).parts[name].copies, []).append(local(parameter.grad))
    squares = [nn.utils.get_total_norm(held).double().square() / copies for copies, held in by_copies.items()]
    total = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    return summed_over_ranks(sum(squares, total)).sqrt()
