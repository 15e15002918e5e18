"""Build a model on ranks. The trainer, the server and the memory estimate all use `materialize`.

The steps are always the same: build the model on the meta device, divide it over the mesh (`parallelize`), allocate
this rank's shards, and fill them from a seed or from files. With a mesh, no rank ever holds the whole model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from jingu.compat.torch import apply_to_tensors, set_recompile_limit
from jingu.compat.torch_distributed import overlap_tensor_parallel
from jingu.model.decoder import Decoder, iterate_blocks
from jingu.model.experts import GroupedLinear
from jingu.model.layers import Embedding, Linear, Vector
from jingu.model.mixer_kernels import set_mixer_kernels
from jingu.model.quantized_weight import TensorReader, quantizing_reader
from jingu.model.scaled_matmul import SIZE_MULTIPLE, Scaling
from jingu.model.spec import ModelSpec
from jingu.parallel.layout import Layout, Precision
from jingu.parallel.offload import DiskStorage
from jingu.parallel.pipeline import ParallelModel
from jingu.parallel.recomputation import checkpoint_for_split_backward
from jingu.parallel.sharding import ShardingPlan, shard_parameters
from jingu.parallel.stages import splits_backward
from jingu.parallel.tensor import apply_expert_parallel, apply_tensor_parallel
from jingu.parallel.zero import apply_zero

# Source of the weights: a seed, a function that reads a whole parameter by name, or None.
Weights = int | TensorReader | None
# Name prefixes of slow operations (matmuls, attention, collectives): selective activation checkpointing saves their
# results. It gathers again, because saved together with partial sums, gathered tokens would need more memory than no
# checkpointing at all.
SAVED_OPERATIONS = (
    *("mm", "_scaled_mm", "bmm", "addmm", "baddbmm", "grouped", "_scaled_dot_product", "flex_attention"),
    *("all_to_all", "all_reduce", "reduce_scatter"),
)


def materialize(
    spec: ModelSpec,
    mesh: DeviceMesh | None,
    layout: Layout,
    precision: Precision,
    weights: Weights,
    *,
    prepare: Callable[[Decoder], object] = lambda model: None,
    disk: DiskStorage | None = None,
) -> ParallelModel:
    """Return this rank's part of a model, with its weights.

    Args:
        mesh: None builds the whole model in this process, without a process group. `weights` must then be a function
            or None. The parameters are the tensors that it returns, without a copy if the dtype is already right.
        weights: a seed for the initial weights, or a function that reads a whole parameter by name (matrices that the
            model stores quantized are quantized here). None leaves the model on the meta device, which is enough to
            estimate the memory of a rank.
        prepare: changes each stage on the meta device before it is sharded, for example quantizes its matrices.
        disk: storage of the master weights, if the layout offloads them to disk.
    """
    model = parallelize(spec, mesh, layout, precision, prepare)
    if weights is None:
        return model
    if mesh is None:
        assert callable(weights)
        _assign(model, quantizing_reader(model.stages, weights), precision.masters)
        return model
    # Allocate this rank's shards.
    if disk is not None:
        apply_to_tensors(model, disk.zeros_like)
    else:
        on_host = layout.parallel.offload.type == "host"
        model.to_empty(device=torch.device("cpu" if on_host else mesh.device_type))
    # Fill them. Only one whole parameter is in memory at a time.
    if isinstance(weights, int):
        model.sharding.init_weights(model, spec, weights)
    else:
        model.sharding.fill(model, quantizing_reader(model.stages, weights))
    model.synchronize_tied_weights()
    return model


def _assign(model: ParallelModel, read: TensorReader, dtype: torch.dtype) -> None:
    """Replace the parameters of a whole model by the tensors that `read` returns, cast to `dtype`.

    Integer tensors (quantized weights) keep their dtype, and vectors without gradients have at least fp32.
    """
    for stage in model.stages:
        for name, parameter in list(stage.named_parameters()):
            weight = read(name)
            path, _, leaf = name.rpartition(".")
            module = stage.get_submodule(path)
            if weight.is_floating_point():
                is_wide = isinstance(module, Vector) and not module.is_trained
                weight = weight.to(torch.promote_types(dtype, torch.float32) if is_wide else dtype)
            setattr(module, leaf, nn.Parameter(weight.contiguous(), requires_grad=parameter.requires_grad))


# Sharding


def parallelize(
    spec: ModelSpec,
    mesh: DeviceMesh | None,
    layout: Layout,
    precision: Precision,
    prepare: Callable[[Decoder], object] = lambda stage: None,
) -> ParallelModel:
    """Return this rank's stages of a model, divided over the mesh, on the meta device.

    The order is: pipeline stages, tensor, context and expert parallelism, activation checkpointing, compile, ZeRO.
    Forward methods are wrapped rather than modules, so that parameter names stay those of the plain model.

    Args:
        mesh: None if one process has the whole model; then nothing is divided.
        prepare: changes each stage on the meta device before it is sharded.
    """
    if layout.compile:
        # Rows of supervised data have up to eight lengths. `torch.compile` specializes blocks for each length, and
        # again for the first block and for evaluation.
        set_recompile_limit(32)
    model = ParallelModel(spec, mesh, layout, precision, prepare)
    if mesh is not None:
        set_mixer_kernels(model, spec, layout.mixer_kernels, mesh.device_type, precision.compute)
        for stage in model.stages:
            model.uses_fsdp = _parallelize_stage(stage, model.sharding, layout, precision)
    if precision.scaling is not None:
        for stage in model.stages:
            _multiply_in_fp8(stage, precision.scaling)
    return model


def _multiply_in_fp8(stage: Decoder, scaling: Scaling) -> None:
    """Run the blocks' matmuls in FP8 for all matrices whose dims the kernels support; the others keep their dtype."""
    for _, block in iterate_blocks(stage):
        for module in block.modules():
            if isinstance(module, Linear) and isinstance(module.weight, nn.Parameter):
                takes = not any(size % SIZE_MULTIPLE for size in module.weight.shape)
                module.scaling = scaling if takes else None


def _parallelize_stage(stage: Decoder, plan: ShardingPlan, layout: Layout, precision: Precision) -> bool:
    """Apply all parts of a layout but the pipeline to a stage, in place. The order matters: see `parallelize`.

    Returns:
        Whether FSDP manages the parameters.
    """
    if stage.spec.adapter is not None:
        _narrow_frozen(stage, precision.compute)
    # Tensor, context and expert parallelism: keep this rank's part of each parameter, and compute with that part.
    shard_parameters(stage, plan)
    apply_tensor_parallel(stage, plan.mesh, ring=layout.parallel.context_method == "ring")
    if layout.compile and layout.parallel.async_tensor_parallel:
        overlap_tensor_parallel(plan.mesh.get_group("tensor"))
    if plan.experts is not None:
        apply_expert_parallel(stage, plan.experts["expert"])
    # Activation checkpointing is inside the compiled code, so the compiler may still save results that are cheap to
    # save.
    checkpointing = layout.activation_checkpointing
    is_split = splits_backward(layout.parallel, plan.mesh["pipeline"].size())
    for number, block in iterate_blocks(stage):
        if checkpointing.type != "none" and number % checkpointing.every == 0:
            block.forward = _add_checkpointing(block.forward, checkpointing.type, is_split)
        if layout.compile:
            block.forward = torch.compile(block.forward, dynamic=False)
    return apply_zero(stage, plan, layout.parallel, precision)


def _narrow_frozen(model: nn.Module, dtype: torch.dtype) -> None:
    """Store frozen matrices in the compute dtype, because only the optimizer needs wider copies.

    Routers and position biases keep their dtype, because they compute in fp32.
    """
    for name, module in model.named_modules():
        if isinstance(module, Linear | GroupedLinear | Embedding) and "router" not in name and "bias" not in name:
            for leaf, parameter in list(module.named_parameters(recurse=False)):
                if not parameter.requires_grad:
                    setattr(module, leaf, nn.Parameter(parameter.to(dtype), requires_grad=False))


def _add_checkpointing(forward: Any, kind: str, is_split: bool) -> Any:
    """Wrap a block's `forward` so that its activations are recomputed in the backward pass.

    Args:
        kind: full: recompute all activations; selective: save the results of slow operations (`SAVED_OPERATIONS`), and
            recompute only the others.
        is_split: whether the schedule of the pipeline splits the backward pass.
    """
    if kind == "full" and is_split:
        return partial(checkpoint_for_split_backward, forward)
    if kind == "full":
        return partial(checkpoint, forward, use_reentrant=False)
    contexts = partial(create_selective_checkpoint_contexts, _save_slow_operations)
    return partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)


def _save_slow_operations(_context: Any, operation: Any, *_arguments: Any, **_keywords: Any) -> CheckpointPolicy:
    name = operation.name().partition("::")[2]
    if name.startswith(SAVED_OPERATIONS):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
