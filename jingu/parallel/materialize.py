"""Build a model on ranks: the one way for the trainer, the server and the memory estimate.

The steps are always the same: build the model on the meta device, divide it over the mesh (`parallelize`), allocate
this rank's shards, and fill them from a seed or from files. No rank ever holds the whole model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from jingu.compat.torch import apply_to_tensors
from jingu.model.decoder import Decoder
from jingu.model.quantized_weight import TensorReader, quantizing_reader
from jingu.model.spec import ModelSpec
from jingu.parallel.layout import Layout, Precision
from jingu.parallel.offload import DiskStorage
from jingu.parallel.parallelize import parallelize
from jingu.parallel.pipeline import ParallelModel

# What fills the parameters: a seed, a function that reads a whole parameter by name, or nothing.
Weights = int | TensorReader | None


def materialize(
    spec: ModelSpec,
    mesh: DeviceMesh | None,
    layout: Layout,
    precision: Precision,
    weights: Weights,
    *,
    prepare: Callable[[Decoder], object] = lambda model: None,
    check: Callable[[ParallelModel], object] = lambda model: None,
    disk: DiskStorage | None = None,
) -> ParallelModel:
    """Return this rank's part of a model, with its weights.

    Args:
        mesh: None builds the whole model in this process, which needs no process group. The parameters are then the
            tensors that `weights` reads, without a copy where the dtype agrees.
        weights: a seed for the initial weights, or a function that reads a parameter by name (whole; a matrix that
            the model holds quantized is quantized here). None leaves the model on the meta device, which is enough
            to estimate what a rank holds.
        prepare: changes each stage on the meta device before it is divided, for example by quantizing its matrices.
        check: receives the model on the meta device before any memory is allocated; it may raise an error.
        disk: holds the master weights, if the layout offloads them to disk.
    """
    model = parallelize(spec, mesh, layout, precision, prepare)
    check(model)
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
    # Fill them, with one whole parameter in memory at a time.
    if isinstance(weights, int):
        model.sharding.init_weights(model, spec, weights)
    else:
        model.sharding.fill(model, quantizing_reader(model.stages, weights))
    model.synchronize_tied_weights()
    return model


def _assign(model: ParallelModel, read: TensorReader, dtype: torch.dtype) -> None:
    """Let the parameters of a whole model be the tensors that were read, in `dtype` (integers keep theirs)."""
    for stage in model.stages:
        for name, parameter in list(stage.named_parameters()):
            weight = read(name)
            if weight.is_floating_point():
                weight = weight.to(dtype)
            module, _, leaf = name.rpartition(".")
            tensor = nn.Parameter(weight.contiguous(), requires_grad=parameter.requires_grad)
            setattr(stage.get_submodule(module), leaf, tensor)
