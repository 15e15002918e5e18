"""Expert parallelism: tokens travel to the ranks of `expert` that have their experts, and back.

Shapes: M choices of this rank's tokens, N choices that this rank's experts get, R ranks, E experts here, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from jingu.compat.torch_distributed import all_to_all
from jingu.model.experts import MoELayer
from jingu.model.grouped_matmul import GatherRows


def apply_expert_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let the mixtures of a model compute with this rank's experts, in place; `mesh` is the axis `expert`."""
    for module in model.modules():
        if isinstance(module, MoELayer):
            module.compute = partial(_compute, mesh.get_group(), module.compute)  # type: ignore[method-assign]


def _compute(
    group: dist.ProcessGroup, original: Callable[[Tensor, Tensor], Tensor], x_MD: Tensor, count: Tensor
) -> Tensor:
    """`MoELayer.compute`; experts lie on the ranks in their order, and so do the rows, sorted by expert."""
    sent_RE = count.view(group.size(), -1)
    received_RE = torch.empty_like(sent_RE)
    dist.all_to_all_single(received_RE, sent_RE.contiguous(), group=group)
    sent, received = sent_RE.sum(1).tolist(), received_RE.sum(1).tolist()  # waits for the device
    # They come by rank, and then by expert; the experts want them by expert.
    expert_RE = torch.arange(sent_RE.shape[1], device=count.device).expand_as(received_RE)
    order_N = expert_RE.flatten().repeat_interleave(received_RE.flatten()).argsort(stable=True)
    place_N = torch.empty_like(order_N).scatter_(0, order_N, torch.arange(len(order_N), device=count.device))
    x_ND = GatherRows.apply(all_to_all(x_MD, group, received, sent), order_N, place_N, 1)
    y_ND = GatherRows.apply(original(x_ND, received_RE.sum(0)), place_N, order_N, 1)
    return all_to_all(y_ND, group, sent, received)
