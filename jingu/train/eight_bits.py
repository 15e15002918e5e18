"""AdamW with moments of 8 bits (Dettmers et al., 2022, arXiv:2110.02861), by bitsandbytes.

Each 256 elements of a row share a scale: ranks that divide a matrix by rows compute what one does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from jingu.config.schema import RunConfig
from jingu.config.sections.train import AdamWSettings
from jingu.errors import JinguError
from jingu.model.packed import load_bitsandbytes, need_bitsandbytes
from jingu.parallel.sharing import Part, local

BLOCK = 256
"""Elements that share a scale."""
SCALES = frozenset({"exp_avg_scale", "exp_avg_sq_scale"})
"""State that has one number for each BLOCK elements of a row of the parameter."""


def check_moments(config: RunConfig) -> None:
    """JinguError where a run's moments cannot have 8 bits."""
    if not isinstance(config.optimizer, AdamWSettings) or config.optimizer.moments == "fp32":
        return
    need_bitsandbytes("moments are kept in 8 bits", "optimizer.moments", "fp32")
    if config.precision.type == "fp64":
        raise JinguError(
            "moments of 8 bits are for weights in fp32, and precision.type=fp64 keeps them in fp64.",
            where="optimizer.moments",
            fix="Set it to fp32, or another precision.",
        )


def takes(parameter: Tensor, part: Part | None) -> bool:
    """Whether the moments of a parameter have 8 bits: where its rows, of more than one, are whole blocks.

    Raises:
        JinguError: those of the whole matrix are, and this rank's parts of them are not.
    """
    shape = parameter.shape if part is None else part.shape
    if len(shape) < 2 or shape[-1] % BLOCK:
        return False
    if local(parameter).shape[-1] % BLOCK:
        raise JinguError(
            f"ranks of `tensor` divide rows of {shape[-1]:,} elements into parts of {local(parameter).shape[-1]:,}, "
            f"and each {BLOCK} elements of moments of 8 bits share a scale.",
            where="parallel.tensor",
            fix="Choose another number of ranks, or set optimizer.moments=fp32.",
        )
    return True


def moments(parameter: Tensor, zeros_like: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """The state of a parameter whose moments have 8 bits."""
    held = local(parameter)
    codes = torch.empty_like(held, dtype=torch.uint8)
    scales = held.new_empty((*held.shape[:-1], held.shape[-1] // BLOCK), dtype=torch.float32)
    slots = {"exp_avg": codes, "exp_avg_scale": scales, "exp_avg_sq": codes, "exp_avg_sq_scale": scales}
    return {slot: zeros_like(each) for slot, each in slots.items()}


class AdamW8bit(torch.optim.AdamW):
    """AdamW, of which some parameters have such moments."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float) -> None:
        load_bitsandbytes()
        super().__init__(params, lr=lr, betas=betas, eps=eps, fused=True)
        self._steps: dict[nn.Parameter, int] = {}
        self._codes: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient; the gradients of those with moments of 8 bits go."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if "exp_avg_scale" in self.state[parameter] and parameter.grad is not None:
                    self._update(parameter, local(parameter.grad), group)
                    parameter.grad = None
        super().step()

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        from bitsandbytes.functional import create_dynamic_map, optimizer_update_8bit_blockwise

        state, weight = self.state[parameter], local(parameter)
        # Counted here, too: to read it would wait for the device.
        self._steps[parameter] = step = 1 + (self._steps[parameter] if parameter in self._steps else int(state["step"]))
        state["step"] += 1
        if weight.device not in self._codes:
            signed, unsigned = (create_dynamic_map(signed=kind).to(weight.device) for kind in (True, False))
            self._codes[weight.device] = signed, unsigned
        if not weight.numel():
            return
        beta1, beta2 = group["betas"]
        optimizer_update_8bit_blockwise(
            "adam",
            gradient,
            weight,
            *(state["exp_avg"], state["exp_avg_sq"]),
            *(beta1, beta2, 0.0, 0.0, group["eps"], step, group["lr"]),
            *self._codes[weight.device],
            *(state["exp_avg_scale"].view(-1), state["exp_avg_sq_scale"].view(-1)),
            weight_decay=group["weight_decay"],
        )
