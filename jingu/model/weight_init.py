"""Initialization of weights, from a seed and each parameter's name: the same numbers in every layout and precision."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from jingu.model.parameter_table import parameter_table
from jingu.model.spec import ModelSpec


@torch.no_grad()
def init_weights(model: nn.Module, spec: ModelSpec, seed: int, device: torch.device | None = None) -> None:
    """Initialize every parameter in place.

    The values of a parameter depend only on the seed, its name, its shape and the spec. They do not depend on the order
    of modules, the dtype or the device.

    Args:
        model: the model. Parameters on the meta device are first allocated on `device`.
        seed: the run's seed.
        device: None means CPU.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        model.to_empty(device=device or torch.device("cpu"))
    for name, parameter in model.named_parameters():
        parameter.copy_(initial_tensor(name, parameter.shape, spec, seed))


def initial_tensor(name: str, shape: torch.Size, spec: ModelSpec, seed: int) -> Tensor:
    """Return the initial values of a whole parameter, in fp32 on CPU: those of its row in the parameter table.

    Parameters of adapters have no row.
    """
    entry = parameter_table(spec).get(name)
    if entry is not None and entry.initial == "rates":
        return _spread(1.0, 16.0, shape).log()
    if entry is not None and entry.initial == "steps":
        # The inverse of softplus.
        return _spread(math.log(0.001), math.log(0.1), shape).exp().expm1().log()
    if entry is not None and isinstance(entry.initial, float):
        return torch.full(tuple(shape), entry.initial)
    if entry is None:
        # Quantized matrices are never initialized randomly: their values are read.
        if name.endswith((".bias", ".lora_bias", ".weight.values", ".weight.scales", ".lora_b")) or ".bias_" in name:
            return torch.zeros(shape)
        if name.endswith((".lora_m", ".ia3_in", ".ia3_out")):
            return torch.ones(shape)
        # Adapters and the networks of prompts: uniform, as in peft.
        if name.endswith(".lora_a") or ("prompt." in name and not name.endswith("embedding.weight")):
            bound = shape[-1] ** -0.5
            return torch.empty(shape).uniform_(-bound, bound, generator=generator_for_name(name, seed))
    std = spec.initializer_range if entry is None else entry.std
    return torch.empty(shape).normal_(0.0, std, generator=generator_for_name(name, seed))


def _spread(low: float, high: float, shape: torch.Size) -> Tensor:
    """Return equally spaced numbers of a vector, as Mamba-2 spreads the rates of its heads (Dao and Gu, 2024)."""
    return torch.linspace(low, high, shape[0])


def generator_for_name(name: str, seed: int) -> torch.Generator:
    """Return a random generator that is seeded with a stable hash of seed and name."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
