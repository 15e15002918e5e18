"""Optimizers over named parameters, with their state made at once so that it can be saved and loaded by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from jingu.config.sections.train import AdafactorSettings, LionSettings, MuonSettings, Optimizer
from jingu.errors import JinguError
from jingu.parallel.offload import Disk, stream_steps
from jingu.parallel.sharing import local
from jingu.train.eight_bits import AdamW8bit, moments, takes
from jingu.train.matrices import Adafactor, Muon


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al., 2023, arXiv:2302.06675, algorithm 2): the sign of an interpolated momentum."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            params = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not params:
                continue
            beta1, beta2 = group["betas"]
            weights = [local(parameter) for parameter in params]
            grads = [local(parameter.grad) for parameter in params]
            momenta = [local(self.state[parameter]["exp_avg"]) for parameter in params]
            directions = torch._foreach_lerp(grads, momenta, beta1)
            torch._foreach_sign_(directions)
            torch._foreach_mul_(weights, 1.0 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(weights, directions, alpha=-group["lr"])
            torch._foreach_lerp_(momenta, grads, 1.0 - beta2)


def build_optimizer(settings: Optimizer, model: nn.Module, disk: Disk | None = None) -> torch.optim.Optimizer:
    """The optimizer, its state zeroed. Matrices and embeddings decay; norms and biases (one dim) do not.

    Args:
        disk: where its state lies; it then takes its steps a layer at a time.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    sharing = getattr(model, "sharing", None)
    parts = {} if sharing is None else {parameter: sharing.parts[name] for name, parameter in trained.items()}
    by_kind: dict[tuple[str, float, float, bool], list[nn.Parameter]] = {}
    for name, parameter in trained.items():
        rate, decay = _rate_and_decay(settings, name, parameter)
        matrices = isinstance(settings, MuonSettings) and parameter.dim() > 1 and "blocks." in name
        by_kind.setdefault((_layer(name) if disk else "", rate, decay, matrices), []).append(parameter)
    groups = [
        {"params": held, "weight_decay": decay, "rate": rate, "layer": layer, "matrices": matrices}
        for (layer, rate, decay, matrices), held in by_kind.items()
    ]
    if not groups:  # a stage of a pipeline may train nothing
        groups = [{"params": [], "weight_decay": 0.0, "rate": 1.0, "layer": "", "matrices": False}]
    optimizer: torch.optim.Optimizer
    if isinstance(settings, LionSettings):
        optimizer = Lion(groups, settings.lr, (settings.beta1, settings.beta2), settings.weight_decay)
    elif isinstance(settings, AdafactorSettings):
        optimizer = Adafactor(groups, settings.lr, settings.power, settings.clip, settings.floor, parts)
    elif isinstance(settings, MuonSettings):
        betas = (settings.beta1, settings.beta2)
        optimizer = Muon(groups, settings.lr, settings.momentum, betas, settings.epsilon, parts)
    else:
        betas = (settings.beta1, settings.beta2)
        made = AdamW8bit if settings.moments == "int8" else partial(torch.optim.AdamW, fused=True)
        optimizer = made(groups, lr=settings.lr, betas=betas, eps=settings.epsilon)
    zeros_like = torch.zeros_like if disk is None else disk.zeros_like
    for group in optimizer.param_groups:
        slots = [] if isinstance(optimizer, Adafactor) else ["exp_avg"]
        if isinstance(optimizer, torch.optim.AdamW) or (isinstance(optimizer, Muon) and not group["matrices"]):
            slots += ["exp_avg_sq"]
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if "exp_avg_sq" in slots:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            if isinstance(optimizer, AdamW8bit) and takes(parameter, parts.get(parameter)):
                state.update(moments(parameter, zeros_like))
            else:
                state.update({slot: zeros_like(parameter) for slot in slots})
    if disk is not None:
        stream_steps(optimizer, disk)
    return optimizer


def _rate_and_decay(settings: Optimizer, name: str, parameter: nn.Parameter) -> tuple[float, float]:
    """Of a parameter, the multiple of the learning rate and the decay; of the groups that it is in, the last counts."""
    rate, decay = 1.0, settings.weight_decay if parameter.dim() >= 2 else 0.0
    for group in settings.groups:
        if fnmatchcase(name, group.match):
            rate, decay = group.rate, decay if group.weight_decay is None else group.weight_decay
    return rate, decay


def check_groups(settings: Optimizer, names: Collection[str]) -> None:
    """JinguError for a group of the settings that has none of the parameters."""
    for number, group in enumerate(settings.groups):
        if not any(fnmatchcase(name, group.match) for name in names):
            raise JinguError(
                f"no parameter of the model has a name like {group.match}.",
                where=f"optimizer.groups[{number}].match",
                fix=f"Names are such as {', '.join(sorted(names)[:3])}; * stands for anything.",
            )


def _layer(name: str) -> str:
    """The block that a parameter belongs to, such as `blocks.3`, or else its module."""
    parts = name.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[: number + 1])


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the rate of every group to its multiple of this."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["rate"]


def named_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every state tensor as ("exp_avg/blocks.0.norm.weight", tensor)."""
    for name, parameter in model.named_parameters():
        for slot, tensor in optimizer.state.get(parameter, {}).items():
            yield f"{slot}/{name}", tensor
