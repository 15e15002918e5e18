"""`parallelize`: from a model on the meta device to one laid out over the mesh, from the outside in, in one order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from jingu.config.sections.parallel import ParallelSettings
from jingu.config.sections.train import ActivationCheckpointingSettings
from jingu.model.decoder import Decoder, all_blocks
from jingu.model.experts import GroupedLinear
from jingu.model.layers import Embedding, Linear
from jingu.parallel.expert import divide_experts
from jingu.parallel.mesh import expert_size, with_replicas, zero_mesh
from jingu.parallel.pipeline import Pipeline
from jingu.parallel.sharing import Sharing, plan_sharing, take_parts
from jingu.parallel.tensor import divide_work

KEPT = (
    *("mm", "bmm", "addmm", "baddbmm", "grouped", "_scaled_dot_product", "flex_attention"),
    *("all_to_all", "all_reduce", "all_gather", "reduce_scatter"),
)
"""How names of operations begin whose results selective activation checkpointing keeps: the slow ones."""


def parallelize(
    model: Decoder,
    mesh: DeviceMesh,
    settings: ParallelSettings,
    *,
    compute: torch.dtype,
    reduce: torch.dtype,
    activation_checkpointing: ActivationCheckpointingSettings,
    compile: bool,
    prepare: Callable[[Decoder], object] = lambda model: None,
) -> Decoder | Pipeline:
    """The stages of a pipeline, then tables, then activation checkpointing, then compile, then ZeRO.

    Forward methods are wrapped rather than modules, so that parameter names stay those of the plain model. A
    parameter becomes this rank's part of it, and the engine makes DTensors of what it shards further;
    `sharing_of` the result tells which part of the whole that is.

    Args:
        model: on the meta device, in the dtype of the master weights.
        compute: dtype of the products; the masters keep theirs.
        reduce: dtype in which gradients are added up.
        prepare: what was done to the model beside `make_model`, to be done to each stage of it.
    """

    # Rows of their own are of up to eight lengths; each has its code, and so have a first block and evaluations.
    torch._dynamo.config.recompile_limit = 32
    expert = expert_size(settings, zero_mesh(mesh).size(), model.spec)
    sharing = plan_sharing(model, mesh, model.spec.attention.kv_heads, expert)

    def lay_out(model: Decoder) -> None:
        if model.spec.adapter is not None:
            _narrow_frozen(model, compute)
        take_parts(model, sharing)
        divide_work(model, mesh, ring=settings.context_by == "ring")
        if sharing.experts is not None:
            divide_experts(model, sharing.experts["expert"])
        for number, block in all_blocks(model):
            if activation_checkpointing.type != "none" and number % activation_checkpointing.every == 0:
                block.forward = _recomputing(block.forward, selective=activation_checkpointing.type == "selective")
            if compile:
                block.forward = torch.compile(block.forward, dynamic=False)
        _shard(model, sharing, settings, compute, reduce)
        model.sharing = sharing  # type: ignore[assignment]

    if mesh["pipeline"].size() == 1:
        lay_out(model)
        return model
    masters = next((each.dtype for each in model.parameters() if each.requires_grad), compute)

    def announce(stage: Decoder, last: bool) -> None:
        before_micro_batch(stage, settings.zero, last=last)

    pipeline = Pipeline(model.spec, mesh, settings, compute, masters, announce, prepare)
    for stage in pipeline.stages:
        lay_out(stage)  # type: ignore[arg-type]
    pipeline.sharing = sharing  # type: ignore[assignment]
    return pipeline


def _narrow_frozen(model: nn.Module, dtype: torch.dtype) -> None:
    """Keep matrices that are not trained, nor saved, in the dtype in which they are multiplied: no wider copy of them.

    Not of routers and biases of positions, which compute in fp32.
    """
    for name, module in model.named_modules():
        if isinstance(module, Linear | GroupedLinear | Embedding) and "router" not in name and "bias" not in name:
            for leaf, parameter in list(module.named_parameters(recurse=False)):
                if not parameter.requires_grad:
                    setattr(module, leaf, nn.Parameter(parameter.to(dtype), requires_grad=False))


def _recomputing(forward: Any, *, selective: bool) -> Any:
    """`forward`, its activations computed again in the backward pass: all, or all that is quickly made."""
    if not selective:
        return partial(checkpoint, forward, use_reentrant=False)
    contexts = partial(create_selective_checkpoint_contexts, _keep_slow)
    return partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)


def _keep_slow(_context: Any, operation: Any, *_arguments: Any, **_keywords: Any) -> CheckpointPolicy:
    name = operation.name().partition("::")[2]
    return CheckpointPolicy.MUST_SAVE if name.startswith(KEPT) else CheckpointPolicy.PREFER_RECOMPUTE


def _shard(
    model: Decoder, sharing: Sharing, settings: ParallelSettings, compute: torch.dtype, reduce: torch.dtype
) -> None:
    """ZeRO as settings of `fully_shard`. Gradients are summed, never averaged: the loss is already a share."""
    mesh = with_replicas(sharing.mesh, zero_mesh(sharing.mesh))
    offloads = settings.offload.type != "none"
    if mesh.size() == 1 and not (offloads and mesh.device_type == "cuda"):
        # Nothing to share: the engine would only copy. The masters are rounded where they are used.
        for module in model.modules():
            if isinstance(module, Embedding):
                module.compute = compute
        return
    # Rotary tables reach the blocks in a wider dtype than the activations, and must not be rounded on the way.
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False)
    # What is mapped from a disk cannot be pinned.
    pins = settings.offload.type == "host" and mesh.device_type == "cuda"
    place = CPUOffloadPolicy(pin_memory=pins) if offloads else OffloadPolicy()
    shard = partial(fully_shard, mesh=mesh, mp_policy=policy, offload_policy=place)
    for _, block in all_blocks(model):
        if sharing.experts is not None:
            own = [part for part in block.modules() if isinstance(part, GroupedLinear)]
            axes = with_replicas(sharing.mesh, sharing.experts["expert_fsdp"])
            shard(own, mesh=axes, reshard_after_forward=settings.zero == 3)
        shard(block, reshard_after_forward=settings.zero == 3)
    # The root's own parameters (embedding, norm, head) are needed last and first: they stay between the passes.
    shard(model, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def before_micro_batch(model: Decoder, zero: int, *, last: bool) -> None:
    """Tell the engine whether this backward pass is the last of its step.

    ZeRO 0 and 1 keep whole gradients until then; 0 to 2 keep the gathered parameters between micro-batches.
    """
    if not isinstance(model, FSDPModule):
        return
    if zero <= 1:
        model.set_requires_gradient_sync(last)
    if zero <= 2:
        model.set_reshard_after_backward(last)
    model.set_is_last_backward(last)


@contextmanager
def scoring(model: nn.Module) -> Iterator[None]:
    """Forward passes without gradients and as in use (routers choose freely), in an evaluation or to generate.

    Without a backward pass the engine would leave the gathered parameters in the place of its shards, and whoever
    then looks for the parameters (a checkpoint, the optimizer's state) would find others than the trained ones.
    """
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
