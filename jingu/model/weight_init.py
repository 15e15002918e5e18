"""Initial weights, filled by name from a seed, so that every layout and precision starts from the same numbers."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from jingu.model.spec import ModelSpec


@torch.no_grad()
def init_weights(model: nn.Module, spec: ModelSpec, seed: int, device: torch.device | None = None) -> None:
    """Fill every parameter, in place.

    A parameter's values depend only on (seed, its name, its shape): neither on the order of modules nor on dtype or
    device.

    Args:
        model: parameters on the meta device are first made on `device` (CPU when None).
        seed: the run's seed.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        model.to_empty(device=device or torch.device("cpu"))
    for name, parameter in model.named_parameters():
        parameter.copy_(initial_tensor(name, parameter.shape, spec, seed))


def initial_tensor(name: str, shape: torch.Size, spec: ModelSpec, seed: int) -> Tensor:
    """Return the whole parameter in fp32 on CPU: ones for norms, zeros for biases, normal for matrices.

    Projections back into the residual stream shrink by 1/√(2·layers), so that its variance does not grow with
    depth (Radford et al., 2019). Where scores are not scaled, the queries' matrix is.
    """
    # What begins as zeros and ones.
    if name.endswith(
        (".bias", ".lora_bias", ".weight.values", ".weight.scales")
    ):  # packed matrices are read, never drawn
        return torch.zeros(shape)
    if name.endswith(("norm.weight", ".lora_m", ".ia3_in", ".ia3_out")):
        return torch.ones(shape)
    if name.endswith(".lora_b") or ".bias_" in name:
        return torch.zeros(shape)
    if name.endswith(".lora_a") or ("prompt." in name and not name.endswith("embedding.weight")):  # as peft begins
        bound = shape[-1] ** -0.5
        return torch.empty(shape).uniform_(-bound, bound, generator=generator_for_name(name, seed))
    # Matrices: normal, with a standard deviation for some of them.
    std = spec.initializer_range
    if name == "embedding.weight" and spec.scale_lm_head:
        std = 1.0  # the head divides the states for such an embedding (Raffel et al., 2020)
    if name.endswith("attention.q.weight") and not spec.attention.scale_scores:
        std *= spec.attention.head_dim**-0.5
    if name.endswith(("attention.output.weight", ".down.weight")):
        std /= (2 * spec.num_layers) ** 0.5
    return torch.empty(shape).normal_(0.0, std, generator=generator_for_name(name, seed))


def generator_for_name(name: str, seed: int) -> torch.Generator:
    """Return a generator seeded by a stable hash of seed and name."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
