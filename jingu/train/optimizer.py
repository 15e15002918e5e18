"""Optimizers: of each parameter a rank holds a part, and every layout comes to the same numbers.

AdamW and Lion look at each number by itself. Adafactor needs sums over rows and columns, which ranks add up; Muon the
matrix itself, which they gather. Of AdamW's moments with 8 bits (Dettmers et al., 2022, arXiv:2110.02861) each 256
elements of a row share a scale, so that ranks that divide a matrix by rows compute what one does.

Shapes: R rows, C columns, of the last two dims; before them stand a mixture's experts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from jingu.config.schema import RunConfig
from jingu.config.sections.train import AdafactorSettings, AdamWSettings, LionSettings, MuonSettings, Optimizer
from jingu.errors import JinguError
from jingu.model.packed import load_bitsandbytes, need_bitsandbytes
from jingu.model.products import product_dtype
from jingu.parallel.offload import Disk, stream_steps
from jingu.parallel.sharing import Part, add_up, local

WHOLE = frozenset({"row_var", "col_var"})
"""State of which every rank has all, whatever part of the parameter it holds."""
BLOCK = 256
"""Elements that share a scale."""
SCALES = frozenset({"exp_avg_scale", "exp_avg_sq_scale"})
"""State that has one number for each BLOCK elements of a row of the parameter."""
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration that Muon's author found (Jordan, 2024)."""
_ITERATIONS = 5
Group = dict[str, Any]
"""Parameters (`params`) that share `lr`, `weight_decay` and whatever else `build_optimizer` groups them by."""


class Updates(torch.optim.Optimizer):
    """What all have: the state is made at once, so that it can be saved and loaded by name at any time.

    Args:
        parts: how parameters are divided; one that is not in it is whole.
        zeros_like: makes the state that is as large as its parameter.
    """

    settings: Any

    def __init__(
        self,
        groups: list[Group],
        settings: Any,
        parts: Mapping[nn.Parameter, Part],
        zeros_like: Callable[[Tensor], Tensor] = torch.zeros_like,
    ) -> None:
        super().__init__(groups, {"lr": settings.lr})
        self.settings, self.parts, self.zeros_like = settings, parts, zeros_like
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = self.first_state(parameter, group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient, whose memory may be used for it."""
        assert closure is None
        for group in self.param_groups:
            if params := [parameter for parameter in group["params"] if parameter.grad is not None]:
                self.update(params, group)

    def first_state(self, parameter: nn.Parameter, group: Group) -> dict[str, Tensor]:
        """The state of a parameter before the first step."""
        raise NotImplementedError

    def update(self, params: list[nn.Parameter], group: Group) -> None:
        """Update parameters of a group, which have gradients."""
        raise NotImplementedError

    def shape(self, parameter: nn.Parameter) -> torch.Size:
        """That of the whole parameter."""
        part = self.parts.get(parameter)
        return parameter.shape if part is None else part.shape


class AdamW(Updates):
    """AdamW (Loshchilov and Hutter, 2019), by PyTorch's fused kernels."""

    settings: AdamWSettings | MuonSettings

    def first_state(self, parameter: nn.Parameter, group: Group) -> dict[str, Tensor]:
        moments = {slot: self.zeros_like(parameter) for slot in ("exp_avg", "exp_avg_sq")}
        return {"step": first_step(parameter), **moments}

    def update(self, params: list[nn.Parameter], group: Group) -> None:
        states = [self.state[parameter] for parameter in params]
        adamw(
            [local(parameter) for parameter in params],
            [gradient_of(parameter) for parameter in params],
            [local(state["exp_avg"]) for state in states],
            [local(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=self.settings.beta1,
            beta2=self.settings.beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=self.settings.epsilon,
            maximize=False,
        )


class AdamW8bit(AdamW):
    """AdamW, of which parameters have such moments whose rows, of more than one, are whole blocks."""

    settings: AdamWSettings

    def __init__(self, *arguments: Any) -> None:
        load_bitsandbytes()
        super().__init__(*arguments)
        self._steps: dict[nn.Parameter, int] = {}
        self._codes: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def first_state(self, parameter: nn.Parameter, group: Group) -> dict[str, Tensor]:
        """The state of a parameter.

        Raises:
            JinguError: the rows of a matrix are whole blocks, and this rank's parts of them are not.
        """
        shape, held = self.shape(parameter), local(parameter)
        if len(shape) < 2 or shape[-1] % BLOCK:
            return super().first_state(parameter, group)
        if held.shape[-1] % BLOCK:
            raise JinguError(
                f"ranks of `tensor` divide rows of {shape[-1]:,} elements into parts of {held.shape[-1]:,}, "
                f"and each {BLOCK} elements of moments of 8 bits share a scale.",
                where="parallel.tensor",
                fix="Choose another number of ranks, or set optimizer.moments=fp32.",
            )
        codes = torch.empty_like(held, dtype=torch.uint8)
        scales = held.new_empty((*held.shape[:-1], held.shape[-1] // BLOCK), dtype=torch.float32)
        slots = {"exp_avg": codes, "exp_avg_scale": scales, "exp_avg_sq": codes, "exp_avg_sq_scale": scales}
        return {"step": first_step(parameter), **{slot: self.zeros_like(each) for slot, each in slots.items()}}

    def update(self, params: list[nn.Parameter], group: Group) -> None:
        plain = [parameter for parameter in params if "exp_avg_scale" not in self.state[parameter]]
        super().update(plain, group)
        for parameter in params:
            if "exp_avg_scale" in self.state[parameter]:
                self._update(parameter, group)

    def _update(self, parameter: nn.Parameter, group: Group) -> None:
        from bitsandbytes.functional import create_dynamic_map, optimizer_update_8bit_blockwise

        state, weight = self.state[parameter], local(parameter)
        settings: Any = self.settings
        # Counted here, too: to read it would wait for the device.
        self._steps[parameter] = step = 1 + (self._steps[parameter] if parameter in self._steps else int(state["step"]))
        state["step"] += 1
        if weight.device not in self._codes:
            signed, unsigned = (create_dynamic_map(signed=kind).to(weight.device) for kind in (True, False))
            self._codes[weight.device] = signed, unsigned
        if not weight.numel():
            return
        optimizer_update_8bit_blockwise(
            "adam",
            gradient_of(parameter),
            weight,
            *(state["exp_avg"], state["exp_avg_sq"]),
            *(settings.beta1, settings.beta2, 0.0, 0.0, settings.epsilon, step, group["lr"]),
            *self._codes[weight.device],
            *(state["exp_avg_scale"].view(-1), state["exp_avg_sq_scale"].view(-1)),
            weight_decay=group["weight_decay"],
        )


class Lion(Updates):
    """Lion (Chen et al., 2023, arXiv:2302.06675, algorithm 2): the sign of an interpolated momentum."""

    settings: LionSettings

    def first_state(self, parameter: nn.Parameter, group: Group) -> dict[str, Tensor]:
        return {"exp_avg": self.zeros_like(parameter)}

    def update(self, params: list[nn.Parameter], group: Group) -> None:
        weights = [local(parameter) for parameter in params]
        grads = [gradient_of(parameter) for parameter in params]
        momenta = [local(self.state[parameter]["exp_avg"]) for parameter in params]
        directions = torch._foreach_lerp(grads, momenta, self.settings.beta1)
        torch._foreach_sign_(directions)
        torch._foreach_mul_(weights, 1.0 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(weights, directions, alpha=-group["lr"])
        torch._foreach_lerp_(momenta, grads, 1.0 - self.settings.beta2)


class Adafactor(Updates):
    """Adafactor (Shazeer and Stern, 2018, arXiv:1804.04235) with decoupled decay, as `torch.optim.Adafactor`."""

    settings: AdafactorSettings

    def first_state(self, parameter: nn.Parameter, group: Group) -> dict[str, Tensor]:
        shape, held = self.shape(parameter), local(parameter)
        if len(shape) == 1:
            return {"step": first_step(parameter), "variance": self.zeros_like(parameter)}
        rows, columns = held.new_zeros(shape[:-1]), held.new_zeros(_columns(shape))
        return {"step": first_step(parameter), "row_var": rows, "col_var": columns}

    def update(self, params: list[nn.Parameter], group: Group) -> None:
        parts = [self.parts.get(parameter) for parameter in params]
        sums = [self._sums(parameter) for parameter in params]
        add_up([(part, each) for part, found in zip(parts, sums, strict=True) for each in found])
        for parameter, found in zip(params, sums, strict=True):
            self._precondition(parameter, found)
        squares = [gradient_of(parameter).square().sum() for parameter in params]
        add_up(list(zip(parts, squares, strict=True)))
        for parameter, found, square in zip(params, sums, squares, strict=True):
            size, step = prod(self.shape(parameter)), self.state[parameter]["step"].double()
            scale = (found[0] / size).sqrt().clamp_min(self.settings.floor) * step.rsqrt().clamp_max(group["lr"])
            factor = scale / ((square / size).sqrt() / self.settings.clip).clamp_min(1.0)
            local(parameter).mul_(1.0 - group["lr"] * group["weight_decay"])
            local(parameter).sub_(gradient_of(parameter).mul_(factor.to(parameter.dtype)))

    def _spread(self, parameter: nn.Parameter, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Sums of all rows and columns as views of the shape of what this rank holds."""
        part, shape = self.parts.get(parameter), self.shape(parameter)
        over_rows, over_columns = rows.unsqueeze(-1).expand(shape), columns.unsqueeze(-2).expand(shape)
        return (over_rows, over_columns) if part is None else (part.cut(over_rows), part.cut(over_columns))

    def _sums(self, parameter: nn.Parameter) -> list[Tensor]:
        """This rank's share of the squares of the weights, and of the gradient's squares by row and by column."""
        shape, gradient = self.shape(parameter), gradient_of(parameter)
        found = [local(parameter).square().sum()]
        if len(shape) > 1:
            squares = gradient.square()
            rows, columns = gradient.new_zeros(shape[:-1]), gradient.new_zeros(_columns(shape))
            if gradient.numel():
                over_rows, over_columns = self._spread(parameter, rows, columns)
                over_rows[..., 0] = squares.sum(-1)
                over_columns[..., 0, :] = squares.sum(-2)
            found += [rows, columns]
        return found

    def _precondition(self, parameter: nn.Parameter, sums: list[Tensor]) -> None:
        """Divide the gradient by the root of its second moment, in place."""
        state, shape, gradient = self.state[parameter], self.shape(parameter), gradient_of(parameter)
        state["step"] += 1
        fresh = state["step"].double().pow(-self.settings.power).to(gradient.dtype)
        least = torch.finfo(gradient.dtype).eps
        if len(shape) == 1:
            moment = local(state["variance"]).lerp_(gradient.square(), fresh)
        else:
            rows = state["row_var"].lerp_(sums[1] / shape[-1], fresh)
            columns = state["col_var"].lerp_(sums[2] / shape[-2], fresh)
            rows = rows / rows.mean(-1, keepdim=True).clamp_min(least)
            over_rows, over_columns = self._spread(parameter, rows, columns)
            moment = over_rows * over_columns
        gradient.mul_(moment.clamp_min(least * least).rsqrt())


class Muon(AdamW):
    """Muon (Jordan, 2024) for groups that are `matrices`: momentum made orthogonal, as `torch.optim.Muon`, at the
    scale of AdamW's steps (Liu et al., 2025, arXiv:2502.16982); AdamW for the others."""

    settings: MuonSettings

    def first_state(self, parameter: nn.Parameter, group: Group) -> dict[str, Tensor]:
        return {"exp_avg": self.zeros_like(parameter)} if group["matrices"] else super().first_state(parameter, group)

    def update(self, params: list[nn.Parameter], group: Group) -> None:
        if not group["matrices"]:
            super().update(params, group)
            return
        for number, parameter in enumerate(params):
            weight, momentum = local(parameter), local(self.state[parameter]["exp_avg"])
            gradient = gradient_of(parameter)
            momentum.lerp_(gradient, 1.0 - self.settings.momentum)
            update = gradient.lerp(momentum, self.settings.momentum)
            part = self.parts.get(parameter)
            direction = orthogonal(update) if part is None else part.cut(_shared(update, part, number))
            *_, rows, columns = self.shape(parameter)
            weight.mul_(1.0 - group["lr"] * group["weight_decay"])
            weight.sub_(direction.to(weight.dtype), alpha=group["lr"] * 0.2 * sqrt(max(rows, columns)))


def _shared(held: Tensor, part: Part, number: int) -> Tensor:
    """The orthogonal form of a matrix of which each rank holds a part, computed by one of the ranks that share it."""
    whole = part.whole(held)
    if part.has_turn(number):
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


def first_step(parameter: nn.Parameter) -> Tensor:
    """The count of a parameter's steps, where PyTorch's kernels expect it."""
    return torch.zeros((), dtype=torch.float32, device=parameter.device)


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """This rank's part of a parameter's gradient."""
    assert parameter.grad is not None
    return local(parameter.grad)


def _columns(shape: torch.Size) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1])


UPDATES: dict[str, type[Updates]] = {"adamw": AdamW, "lion": Lion, "adafactor": Adafactor, "muon": Muon}


def build_optimizer(settings: Optimizer, model: nn.Module, disk: Disk | None = None) -> torch.optim.Optimizer:
    """The optimizer, its state zeroed. Matrices and embeddings decay; norms and biases (one dim) do not.

    Args:
        disk: where its state lies; it then takes its steps a layer at a time.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    sharing = getattr(model, "sharing", None)
    parts = {} if sharing is None else {parameter: sharing.parts[name] for name, parameter in trained.items()}
    alike: dict[tuple[str, float, float, bool], list[nn.Parameter]] = {}
    for name, parameter in trained.items():
        rate, decay = _rate_and_decay(settings, name, parameter)
        matrices = isinstance(settings, MuonSettings) and parameter.dim() > 1 and "blocks." in name
        alike.setdefault((_layer(name) if disk else "", rate, decay, matrices), []).append(parameter)
    groups = [
        {"params": held, "layer": layer, "rate": rate, "weight_decay": decay, "matrices": matrices}
        # A stage of a pipeline may train nothing.
        for (layer, rate, decay, matrices), held in (alike or {("", 1.0, 0.0, False): []}).items()
    ]
    kind = AdamW8bit if isinstance(settings, AdamWSettings) and settings.moments == "int8" else UPDATES[settings.type]
    optimizer = kind(groups, settings, parts, torch.zeros_like if disk is None else disk.zeros_like)
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
