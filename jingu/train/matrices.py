"""Optimizers that look at whole matrices, of which a rank holds a part: the same numbers in every layout.

Adafactor needs sums over rows and columns, which ranks add up; Muon the matrix itself, which they gather.

Shapes: R rows, C columns, of the last two dims; before them stand a mixture's experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from jingu.model.products import product_dtype
from jingu.parallel.sharing import Part, add_up, local

WHOLE = frozenset({"row_var", "col_var"})
"""State of which every rank has all, whatever part of the parameter it holds."""
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration that Muon's author found (Jordan, 2024)."""
_ITERATIONS = 5
Parts = Mapping[nn.Parameter, Part]
"""How parameters are divided; one that is not in it is whole."""


class Adafactor(torch.optim.Optimizer):
    """Adafactor (Shazeer and Stern, 2018, arXiv:1804.04235) with decoupled decay, as `torch.optim.Adafactor`."""

    def __init__(self, params: Any, lr: float, power: float, clip: float, floor: float, parts: Parts) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})
        self._power, self._clip, self._floor, self._parts = power, clip, floor, parts
        for parameter in (each for group in self.param_groups for each in group["params"]):
            shape, state = self._shape(parameter), self.state[parameter]
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            if len(shape) > 1:
                held = local(parameter)
                state["row_var"], state["col_var"] = held.new_zeros(shape[:-1]), held.new_zeros(_columns(shape))
            else:
                state["variance"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient; the gradient's memory is used for it."""
        assert closure is None
        for group in self.param_groups:
            params = [parameter for parameter in group["params"] if parameter.grad is not None]
            parts = [self._parts.get(parameter) for parameter in params]
            sums = [self._sums(parameter) for parameter in params]
            add_up([(part, each) for part, found in zip(parts, sums, strict=True) for each in found])
            for parameter, found in zip(params, sums, strict=True):
                self._precondition(parameter, found)
            squares = [_gradient(parameter).square().sum() for parameter in params]
            add_up(list(zip(parts, squares, strict=True)))
            for parameter, found, square in zip(params, sums, squares, strict=True):
                size, step = prod(self._shape(parameter)), self.state[parameter]["step"].double()
                scale = (found[0] / size).sqrt().clamp_min(self._floor) * step.rsqrt().clamp_max(group["lr"])
                factor = scale / ((square / size).sqrt() / self._clip).clamp_min(1.0)
                local(parameter).mul_(1.0 - group["lr"] * group["weight_decay"])
                local(parameter).sub_(_gradient(parameter).mul_(factor.to(parameter.dtype)))

    def _shape(self, parameter: nn.Parameter) -> torch.Size:
        part = self._parts.get(parameter)
        return parameter.shape if part is None else part.shape

    def _cut(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        part = self._parts.get(parameter)
        return whole if part is None else part.cut(whole)

    def _sums(self, parameter: nn.Parameter) -> list[Tensor]:
        """This rank's share of the squares of the weights, and of the gradient's squares by row and by column."""
        shape, gradient = self._shape(parameter), _gradient(parameter)
        found = [local(parameter).square().sum()]
        if len(shape) > 1:
            squares = gradient.square()
            rows, columns = gradient.new_zeros(shape[:-1]), gradient.new_zeros(_columns(shape))
            if gradient.numel():
                self._cut(parameter, rows.unsqueeze(-1).expand(shape))[..., 0] = squares.sum(-1)
                self._cut(parameter, columns.unsqueeze(-2).expand(shape))[..., 0, :] = squares.sum(-2)
            found += [rows, columns]
        return found

    def _precondition(self, parameter: nn.Parameter, sums: list[Tensor]) -> None:
        """Divide the gradient by the root of its second moment, in place."""
        state, shape, gradient = self.state[parameter], self._shape(parameter), _gradient(parameter)
        state["step"] += 1
        fresh, least = state["step"].double().pow(-self._power).to(gradient.dtype), torch.finfo(gradient.dtype).eps
        if len(shape) == 1:
            moment = local(state["variance"]).lerp_(gradient.square(), fresh)
        else:
            rows = state["row_var"].lerp_(sums[1] / shape[-1], fresh)
            columns = state["col_var"].lerp_(sums[2] / shape[-2], fresh)
            rows = rows / rows.mean(-1, keepdim=True).clamp_min(least)
            moment = self._cut(parameter, rows.unsqueeze(-1).expand(shape)) * self._cut(
                parameter, columns.unsqueeze(-2).expand(shape)
            )
        gradient.mul_(moment.clamp_min(least * least).rsqrt())


class Muon(torch.optim.Optimizer):
    """Muon (Jordan, 2024) for groups that are `matrices`: momentum made orthogonal, as `torch.optim.Muon`, at the
    scale of AdamW's steps (Liu et al., 2025, arXiv:2502.16982); AdamW for the others."""

    def __init__(
        self, params: Any, lr: float, momentum: float, betas: tuple[float, float], epsilon: float, parts: Parts
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0, "matrices": False})
        self._momentum, self._betas, self._epsilon, self._parts = momentum, betas, epsilon, parts

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            params = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not group["matrices"]:
                self._adamw(params, group)
                continue
            for number, parameter in enumerate(params):
                weight, momentum = local(parameter), local(self.state[parameter]["exp_avg"])
                gradient = _gradient(parameter)
                momentum.lerp_(gradient, 1.0 - self._momentum)
                update = gradient.lerp(momentum, self._momentum)
                part = self._parts.get(parameter)
                direction = orthogonal(update) if part is None else part.cut(_shared(update, part, number))
                *_, rows, columns = parameter.shape if part is None else part.shape
                weight.mul_(1.0 - group["lr"] * group["weight_decay"])
                weight.sub_(direction.to(weight.dtype), alpha=group["lr"] * 0.2 * sqrt(max(rows, columns)))

    def _adamw(self, params: list[nn.Parameter], group: dict[str, Any]) -> None:
        states = [self.state[parameter] for parameter in params]
        adamw(
            [local(parameter) for parameter in params],
            [_gradient(parameter) for parameter in params],
            [local(state["exp_avg"]) for state in states],
            [local(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=self._betas[0],
            beta2=self._betas[1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=self._epsilon,
            maximize=False,
        )


def _shared(held: Tensor, part: Part, number: int) -> Tensor:
    """The orthogonal form of a matrix of which each rank holds a part, computed by one of the ranks that share it."""
    whole = part.whole(held)
    if number % part.sharers == part.place:
        whole = orthogonal(whole)
    else:
        whole.zero_()
    add_up([(part, whole)])
    return whole


def orthogonal(matrix: Tensor) -> Tensor:
    """About U·Vᵀ of a matrix U·S·Vᵀ, or of several, by Newton and Schulz's iteration: in bf16 where there are units
    for it, in fp64 of such a matrix."""
    narrow = product_dtype(torch.bfloat16, matrix.device)
    x = matrix.to(matrix.dtype if matrix.dtype == torch.float64 else narrow).view(-1, *matrix.shape[-2:])
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / x.flatten(1).norm(dim=1).clamp_min(1e-7)[:, None, None]
    a, b, c = _NEWTON_SCHULZ
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if wide else x.mT).reshape(matrix.shape).to(matrix.dtype)


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return local(parameter.grad)


def _columns(shape: torch.Size) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1])
