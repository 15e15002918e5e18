"""ZeRO (Rajbhandari et al., 2020) as settings of PyTorch's FSDP2.

Stage 0 replicates everything. Stage 1 keeps unsharded gradients until the last backward pass of a step. Stage 2
reduce-scatters them after every micro-batch. Stage 3 also frees gathered parameters right after use.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import nn

from jingu.config.sections.parallel import ParallelSettings
from jingu.model.decoder import Decoder, iterate_blocks
from jingu.model.experts import GroupedLinear
from jingu.model.layers import Embedding, Vector
from jingu.parallel.layout import Precision
from jingu.parallel.mesh import fsdp_mesh, hsdp_mesh
from jingu.parallel.sharding import ShardingPlan

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def apply_zero(model: Decoder, plan: ShardingPlan, settings: ParallelSettings, precision: Precision) -> bool:
    """Shard the parameters of a stage over the mesh with FSDP2, in place, and return whether FSDP manages them.

    A single rank uses FSDP only if it offloads from a GPU.
    """
    mesh = hsdp_mesh(plan.mesh, fsdp_mesh(plan.mesh))
    offload = settings.offload.type
    on_gpu = mesh.device_type != "cpu"
    if mesh.size() == 1 and not (offload != "none" and on_gpu):
        # There is nothing to shard, and FSDP would only copy. Weights are cast to the compute dtype where they are
        # used; matrices do that by themselves, embeddings need the dtype.
        for module in model.modules():
            if isinstance(module, Embedding):
                module.compute = precision.compute
        return False
    # FSDP is slow to import.
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
    from torch.distributed.tensor import Shard

    # `cast_forward_inputs=False`: blocks receive rotary tables in a wider dtype than the activations, and FSDP must
    # not round them.
    policy = MixedPrecisionPolicy(
        param_dtype=precision.compute, reduce_dtype=precision.reduce, cast_forward_inputs=False
    )
    wide_policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    offload_policy = OffloadPolicy()
    if offload != "none":
        # Memory-mapped files cannot be pinned.
        offload_policy = CPUOffloadPolicy(pin_memory=offload == "host" and on_gpu)
    dims = {parameter: plan.parts[name].dims[1] or 0 for name, parameter in model.named_parameters()}
    shard = partial(
        fully_shard,
        mesh=mesh,
        mp_policy=policy,
        offload_policy=offload_policy,
        shard_placement_fn=lambda parameter: Shard(dims[parameter]),
        # They keep a wider dtype than FSDP's groups have.
        ignored_params={
            module.weight for module in model.modules() if isinstance(module, Vector) and not module.is_trained
        },
    )
    for _, block in iterate_blocks(model):
        experts = [module for module in block.modules() if isinstance(module, GroupedLinear)]
        if plan.experts is not None and experts:
            # Experts are divided over `expert` already, and sharded over the ranks that hold the same experts.
            expert_mesh = hsdp_mesh(plan.mesh, plan.experts["expert_fsdp"])
            shard(experts, mesh=expert_mesh, reshard_after_forward=settings.zero_stage == 3)
        vectors = [
            module for module in block.modules() if isinstance(module, Vector) and module.is_wide and module.is_trained
        ]
        if vectors:
            # Rates of decay keep fp32: in bf16, those of slow heads would become 1.
            shard(vectors, mp_policy=wide_policy, reshard_after_forward=False)
        shard(block, reshard_after_forward=settings.zero_stage == 3)
    # The root's own parameters (embedding, norm, head) are not freed after forward: the head is used last in the
    # forward pass and first in the backward pass.
    shard(model, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Sum gradients, never average them: the loss is already divided by the global number of tokens.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return True


def prepare_backward(model: FSDPModule, zero_stage: int, *, last: bool) -> None:
    """Tell FSDP whether the next backward pass of a stage is the last one of the step.

    ZeRO 0 and 1 reduce gradients only in the last one. ZeRO 0 to 2 keep gathered parameters between micro-batches.
    """
    if zero_stage <= 1:
        model.set_requires_gradient_sync(last)
    if zero_stage <= 2:
        model.set_reshard_after_backward(last)
    model.set_is_last_backward(last)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode, without gradients, for the block. Routers then ignore capacity and balancing.

    Trap: without a backward pass, FSDP leaves gathered parameters in place of its shards, and a checkpoint or the
    optimizer would use these instead of the shards. So the parameters are resharded at the end.
    """
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
    for module in model.modules():
        if _is_sharded(module):
            module.reshard()


def _is_sharded(module: nn.Module) -> TypeGuard[FSDPModule]:
    """Return whether FSDP manages a module's parameters, without importing FSDP, which is slow."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)
