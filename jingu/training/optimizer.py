"""Optimizers for sharded parameters, which compute the same updates in every layout.

AdamW and Lion update each element independently. Adafactor needs sums over rows and columns, which the ranks
all-reduce. Muon needs whole matrices, which the ranks gather. 8-bit AdamW (Dettmers et al., 2022, arXiv:2110.02861)
shares a scale among 256 elements of one row, so the result does not change when ranks divide a matrix by rows.

The last two dims of a matrix are rows and columns; mixtures of experts have a dim for the experts before them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from jingu.compat.torch import foreach_add_, foreach_lerp, foreach_lerp_, foreach_mul_, foreach_sign_
from jingu.config.schema import RunConfig
from jingu.config.sections.optimizers import (
    AdafactorSettings,
    AdamWSettings,
    LionSettings,
    MuonSettings,
    Optimizer,
    ParamGroupSettings,
    Slot,
    Slots,
)
from jingu.config.sections.tune import LoraSettings
from jingu.errors import JinguError
from jingu.model.matmul_kernels import matmul_dtype
from jingu.model.quantized_weight import import_bitsandbytes, require_bitsandbytes
from jingu.parallel.offload import DiskStorage, stream_optimizer_steps
from jingu.parallel.pipeline import ParallelModel
from jingu.parallel.sharding import ParameterSharding, all_reduce_shards, local_tensor
from jingu.tables import import_name

# Coefficients and number of iterations of Muon's quintic Newton-Schulz iteration (Jordan, 2024).
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
# A parameter group of PyTorch: `params`, and the `lr`, `weight_decay` and other keys of `build_optimizer` they share.
ParamGroup = dict[str, Any]


class ShardedOptimizer(torch.optim.Optimizer):
    """Base of all optimizers. It creates all state at once, so that checkpoints can save and load it at any time.

    Args:
        groups: parameter groups of `build_optimizer`.
        settings: the section `optimizer` of the configuration.
        shardings: how each parameter is divided over ranks.
        zeros_like: allocates state of the shape of a tensor, in memory or on disk.

    Attributes:
        slots: the state of each parameter by name, as the settings declare it.
    """

    settings: Any

    def __init__(
        self,
        groups: list[ParamGroup],
        settings: Any,
        shardings: Mapping[nn.Parameter, ParameterSharding],
        zeros_like: Callable[[Tensor], Tensor] = torch.zeros_like,
    ) -> None:
        super().__init__(groups, {"lr": settings.lr})
        self.settings = settings
        self.shardings = shardings
        self.zeros_like = zeros_like
        self.slots: dict[nn.Parameter, Slots] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                slots = self.settings.slots(tuple(self.shape(parameter)), is_in_block=group["is_in_block"])
                self.slots[parameter] = slots
                self.state[parameter] = {name: self._allocate(slot, parameter) for name, slot in slots.items()}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. This may overwrite the gradients."""
        assert closure is None
        for group in self.param_groups:
            params = [parameter for parameter in group["params"] if parameter.grad is not None]
            if params:
                self.update(params, group)

    def _allocate(self, slot: Slot, parameter: nn.Parameter) -> Tensor:
        """Return the zeros of a slot on this rank."""
        if slot.layout == "counter":
            # PyTorch's kernels expect an fp32 scalar on the device of the parameter.
            device = torch.device("cpu") if slot.on_host else parameter.device
            return torch.zeros((), dtype=torch.float32, device=device)
        dtype = {"master": parameter.dtype, "fp32": torch.float32, "uint8": torch.uint8}[slot.dtype]
        shard = local_tensor(parameter)
        if slot.layout == "replicated":
            return shard.new_zeros(slot.shape, dtype=dtype)
        if dtype == parameter.dtype and slot.group_size == 1:
            return self.zeros_like(parameter)
        return self.zeros_like(shard.new_empty((*shard.shape[:-1], shard.shape[-1] // slot.group_size), dtype=dtype))

    def update(self, params: list[nn.Parameter], group: ParamGroup) -> None:
        """Update parameters of one group, all of which have gradients."""
        raise NotImplementedError

    def shape(self, parameter: nn.Parameter) -> torch.Size:
        """Return the shape of the whole parameter."""
        return self.shardings[parameter].shape


class AdamW(ShardedOptimizer):
    """AdamW (Loshchilov and Hutter, 2019, arXiv:1711.05101), computed by PyTorch's fused kernels."""

    settings: AdamWSettings | MuonSettings

    def update(self, params: list[nn.Parameter], group: ParamGroup) -> None:
        states = [self.state[parameter] for parameter in params]
        adamw(
            [local_tensor(parameter) for parameter in params],
            [local_gradient(parameter) for parameter in params],
            [local_tensor(state["exp_avg"]) for state in states],
            [local_tensor(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=self.settings.beta1,
            beta2=self.settings.beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=self.settings.eps,
            maximize=False,
        )


class AdamW8bit(AdamW):
    """AdamW with 8-bit moments for matrices whose row length is a multiple of 256, and fp32 moments for the others.

    The kernel is bitsandbytes'. Each `exp_avg` and `exp_avg_sq` holds codes of 8 bits, and has a slot of fp32 scales.
    """

    settings: AdamWSettings

    def __init__(self, *arguments: Any) -> None:
        import_bitsandbytes()
        super().__init__(*arguments)

    def _allocate(self, slot: Slot, parameter: nn.Parameter) -> Tensor:
        """Return the zeros of a slot on this rank.

        Raises:
            JinguError: the rows of a matrix consist of whole blocks, but the parts of rows that ranks of `tensor` hold
                do not.
        """
        columns, local = self.shape(parameter)[-1], local_tensor(parameter).shape[-1]
        if local % slot.group_size:
            raise JinguError(
                f"ranks of `tensor` divide rows of {columns:,} elements into parts of {local:,}, and each "
                f"{slot.group_size} elements of 8-bit moments share a scale.",
                where="parallel.tensor",
                fix="Choose another number of ranks, or set optimizer.state_dtype=fp32.",
            )
        return super()._allocate(slot, parameter)

    def update(self, params: list[nn.Parameter], group: ParamGroup) -> None:
        super().update([parameter for parameter in params if "exp_avg_scale" not in self.state[parameter]], group)
        for parameter in params:
            if "exp_avg_scale" in self.state[parameter]:
                self._update_quantized(parameter, group)

    def _update_quantized(self, parameter: nn.Parameter, group: ParamGroup) -> None:
        from bitsandbytes.functional import optimizer_update_8bit_blockwise

        state = self.state[parameter]
        weight = local_tensor(parameter)
        state["step"] += 1
        if not weight.numel():
            return
        optimizer_update_8bit_blockwise(
            "adam",
            local_gradient(parameter),
            weight,
            state["exp_avg"],
            state["exp_avg_sq"],
            beta1=self.settings.beta1,
            beta2=self.settings.beta2,
            beta3=0.0,
            alpha=0.0,
            eps=self.settings.eps,
            step=int(state["step"]),
            lr=group["lr"],
            qmap1=_codebook(weight.device, is_signed=True),
            qmap2=_codebook(weight.device, is_signed=False),
            absmax1=state["exp_avg_scale"].view(-1),
            absmax2=state["exp_avg_sq_scale"].view(-1),
            weight_decay=group["weight_decay"],
        )


@cache
def _codebook(device: torch.device, *, is_signed: bool) -> Tensor:
    """Return the values that the 256 codes of 8-bit moments stand for.

    Args:
        signed: True for the first moment, False for the second.
    """
    from bitsandbytes.functional import create_dynamic_map

    return create_dynamic_map(signed=is_signed).to(device)


class Lion(ShardedOptimizer):
    """Lion (Chen et al., 2023, arXiv:2302.06675, algorithm 2): steps along the sign of an interpolated momentum."""

    settings: LionSettings

    def update(self, params: list[nn.Parameter], group: ParamGroup) -> None:
        weights = [local_tensor(parameter) for parameter in params]
        gradients = [local_gradient(parameter) for parameter in params]
        momenta = [local_tensor(self.state[parameter]["exp_avg"]) for parameter in params]
        directions = foreach_lerp(gradients, momenta, self.settings.beta1)
        foreach_sign_(directions)
        foreach_mul_(weights, 1.0 - group["lr"] * group["weight_decay"])
        foreach_add_(weights, directions, alpha=-group["lr"])
        foreach_lerp_(momenta, gradients, 1.0 - self.settings.beta2)


class Adafactor(ShardedOptimizer):
    """Adafactor (Shazeer and Stern, 2018, arXiv:1804.04235) with decoupled weight decay, as `torch.optim.Adafactor`.

    The second moment of a matrix is stored as means over rows and columns, `row_var` and `col_var`. Every rank holds
    these whole.
    """

    settings: AdafactorSettings

    def update(self, params: list[nn.Parameter], group: ParamGroup) -> None:
        shardings = [self.shardings[parameter] for parameter in params]
        # 1. Sum the squares of weights and gradients over the ranks that share a parameter.
        sums = [self._sums(parameter) for parameter in params]
        all_reduce_shards([(sharding, x) for sharding, xs in zip(shardings, sums, strict=True) for x in xs])
        # 2. Divide each gradient by the root of its second moment.
        for parameter, parameter_sums in zip(params, sums, strict=True):
            self._precondition(parameter, parameter_sums)
        # 3. Clip the root mean square of the update, and scale the update by the root mean square of the weights.
        squares = [local_gradient(parameter).square().sum() for parameter in params]
        all_reduce_shards(list(zip(shardings, squares, strict=True)))
        for parameter, parameter_sums, square in zip(params, sums, squares, strict=True):
            size = prod(self.shape(parameter))
            weight_rms = (parameter_sums[0] / size).sqrt().clamp_min(self.settings.min_weight_rms)
            step_size = self.state[parameter]["step"].double().rsqrt().clamp_max(group["lr"])
            clip = ((square / size).sqrt() / self.settings.clip_threshold).clamp_min(1.0)
            factor = weight_rms * step_size / clip
            weight = local_tensor(parameter)
            weight.mul_(1.0 - group["lr"] * group["weight_decay"])
            weight.sub_(local_gradient(parameter).mul_(factor.to(parameter.dtype)))

    def _expand(self, parameter: nn.Parameter, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Return values per row and per column of the whole matrix as views in the shape of this rank's shard.

        Writing to the views writes to `rows` and `columns`.
        """
        shape = self.shape(parameter)
        rows = rows.unsqueeze(-1).expand(shape)
        columns = columns.unsqueeze(-2).expand(shape)
        sharding = self.shardings[parameter]
        return sharding.cut(rows), sharding.cut(columns)

    def _sums(self, parameter: nn.Parameter) -> list[Tensor]:
        """Return this rank's summands of three sums of squares: of the weights, and of the gradient by row and column.

        The sums by row and by column have the size of the whole matrix. Parameters with one dim have only the first.
        """
        state = self.state[parameter]
        gradient = local_gradient(parameter)
        sums = [local_tensor(parameter).square().sum()]
        if "variance" in state:
            return sums
        rows = torch.zeros_like(state["row_var"])
        columns = torch.zeros_like(state["col_var"])
        if gradient.numel():
            squares = gradient.square()
            # These views write to `rows` and `columns`, where this rank's shard is; the rest stays zero.
            local_rows, local_columns = self._expand(parameter, rows, columns)
            local_rows[..., 0] = squares.sum(-1)
            local_columns[..., 0, :] = squares.sum(-2)
        return [*sums, rows, columns]

    def _precondition(self, parameter: nn.Parameter, sums: list[Tensor]) -> None:
        """Divide the gradient by the root of its second moment, in place.

        Args:
            sums: as `_sums` returns them, all-reduced.
        """
        state = self.state[parameter]
        shape = self.shape(parameter)
        gradient = local_gradient(parameter)
        eps = torch.finfo(gradient.dtype).eps
        state["step"] += 1
        weight = state["step"].double().pow(-self.settings.decay_rate).to(gradient.dtype)
        if len(shape) == 1:
            moment = local_tensor(state["variance"]).lerp_(gradient.square(), weight)
        else:
            # The second moment is approximated by the normalized outer product of its means over rows and columns.
            rows = state["row_var"].lerp_(sums[1] / shape[-1], weight)
            columns = state["col_var"].lerp_(sums[2] / shape[-2], weight)
            rows = rows / rows.mean(-1, keepdim=True).clamp_min(eps)
            local_rows, local_columns = self._expand(parameter, rows, columns)
            moment = local_rows * local_columns
        gradient.mul_(moment.clamp_min(eps * eps).rsqrt())


class Muon(AdamW):
    """Muon (Jordan, 2024) for parameters whose only slot is the momentum, and AdamW for the others.

    The momentum of a matrix is orthogonalized, as in `torch.optim.Muon`, and scaled to the root mean square of AdamW's
    updates (Liu et al., 2025, arXiv:2502.16982).
    """

    settings: MuonSettings

    def update(self, params: list[nn.Parameter], group: ParamGroup) -> None:
        matrices = [parameter for parameter in params if "exp_avg_sq" not in self.slots[parameter]]
        adamw_params = [parameter for parameter in params if "exp_avg_sq" in self.slots[parameter]]
        if adamw_params:
            super().update(adamw_params, group)
        for number, parameter in enumerate(matrices):
            gradient = local_gradient(parameter)
            momentum = local_tensor(self.state[parameter]["exp_avg"])
            momentum.lerp_(gradient, 1.0 - self.settings.momentum)
            direction = gradient.lerp(momentum, self.settings.momentum)  # Nesterov
            direction = _orthogonalize_shared(direction, self.shardings[parameter], number)
            *_, rows, columns = self.shape(parameter)
            weight = local_tensor(parameter)
            weight.mul_(1.0 - group["lr"] * group["weight_decay"])
            weight.sub_(direction.to(weight.dtype), alpha=group["lr"] * 0.2 * sqrt(max(rows, columns)))


def _orthogonalize_shared(shard: Tensor, sharding: ParameterSharding, number: int) -> Tensor:
    """Orthogonalize a matrix that ranks share, and return this rank's shard of it.

    Args:
        number: index of the matrix in its group; decides which rank computes it.
    """
    matrix = sharding.whole(shard)
    # Only one rank computes, and ranks take turns from matrix to matrix. The others add zeros to the sum.
    matrix = orthogonalize(matrix) if sharding.has_turn(number) else matrix.zero_()
    all_reduce_shards([(sharding, matrix)])
    return sharding.cut(matrix)


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return U·Vᵀ of a matrix U·S·Vᵀ, or of several stacked ones, approximated by the Newton-Schulz iteration.

    It computes in bf16 where the device has fast bf16 matmuls, else in fp32, and for a matrix in fp64 in fp64.
    """
    dtype = matrix.dtype if matrix.dtype == torch.float64 else matmul_dtype(torch.bfloat16, matrix.device)
    x = matrix.to(dtype).view(-1, *matrix.shape[-2:])
    # Transpose tall matrices: x @ x.mT is smaller if x is wide.
    is_wide = x.shape[-2] <= x.shape[-1]
    x = x if is_wide else x.mT
    x = x / x.flatten(1).norm(dim=1).clamp_min(1e-7)[:, None, None]
    a, b, c = _NEWTON_SCHULZ
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x if is_wide else x.mT
    return x.reshape(matrix.shape).to(matrix.dtype)


def local_gradient(parameter: nn.Parameter) -> Tensor:
    """Return this rank's part of a parameter's gradient."""
    assert parameter.grad is not None
    return local_tensor(parameter.grad)


def optimizer_settings(config: RunConfig) -> Optimizer:
    """Return the settings of a run's optimizer, with a parameter group for LoRA+.

    LoRA+ (`tune.lora_plus_ratio`) is a higher learning rate for B, the second matrix of a LoRA adapter.
    """
    ratio = config.tune.lora_plus_ratio if isinstance(config.tune, LoraSettings) else 1.0
    if ratio == 1.0:
        return config.optimizer
    # The user's own groups come later and take precedence.
    group = ParamGroupSettings(match="*.lora_b*", lr_multiplier=ratio)
    return config.optimizer.model_copy(update={"param_groups": [group, *config.optimizer.param_groups]})


def build_optimizer(settings: Optimizer, model: nn.Module, disk: DiskStorage | None = None) -> ShardedOptimizer:
    """Build the optimizer, with zero state, for all parameters that are trained.

    By default weight decay applies to matrices and embeddings, but not to norms and biases (parameters with one dim),
    nor to modules whose attribute `decays` is false, such as convolutions.

    Args:
        disk: storage for the optimizer state, and then the optimizer steps layer by layer; None: state in memory.
    """
    # 1. How each parameter is divided over ranks.
    params = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if isinstance(model, ParallelModel):
        shardings = {parameter: model.sharding.parts[name] for name, parameter in params.items()}
    else:
        shardings = {parameter: ParameterSharding.on_one_rank(parameter.shape) for parameter in params.values()}
    # 2. Group the parameters that share all settings.
    modules = [module for module in model.modules() if not getattr(module, "decays", True)]
    undecayed = {parameter for module in modules for parameter in module.parameters(recurse=False)}
    groups: dict[tuple[Any, ...], ParamGroup] = {}
    for name, parameter in params.items():
        decays = parameter.dim() >= 2 and parameter not in undecayed
        lr_multiplier, weight_decay = _group_settings(settings, name, decays)
        key = {
            "layer": _layer_name(name) if disk else "",
            "lr_multiplier": lr_multiplier,
            "weight_decay": weight_decay,
            "is_in_block": "blocks." in name,
        }
        groups.setdefault(tuple(key.values()), {"params": [], **key})["params"].append(parameter)
    if not groups:  # a pipeline stage may have only frozen parameters, and PyTorch requires a group
        groups[()] = {"params": [], "layer": "", "lr_multiplier": 1.0, "weight_decay": 0.0, "is_in_block": False}
    # 3. Create the optimizer and its state.
    optimizer_type: type[ShardedOptimizer] = import_name(settings.implementation)
    zeros_like = torch.zeros_like if disk is None else disk.zeros_like
    optimizer = optimizer_type(list(groups.values()), settings, shardings, zeros_like)
    if disk is not None:
        stream_optimizer_steps(optimizer, disk)
    return optimizer


def _group_settings(settings: Optimizer, name: str, decays: bool) -> tuple[float, float]:
    """Return the learning rate multiplier and the weight decay of a parameter; the last matching group decides."""
    lr_multiplier = 1.0
    weight_decay = settings.weight_decay if decays else 0.0
    for group in settings.param_groups:
        if fnmatchcase(name, group.match):
            lr_multiplier = group.lr_multiplier
            if group.weight_decay is not None:
                weight_decay = group.weight_decay
    return lr_multiplier, weight_decay


def check_param_groups(settings: Optimizer, names: Collection[str]) -> None:
    """Raise JinguError if a group of the settings matches no parameter."""
    for number, group in enumerate(settings.param_groups):
        if not any(fnmatchcase(name, group.match) for name in names):
            raise JinguError(
                f"no parameter of the model matches {group.match}.",
                where=f"optimizer.param_groups[{number}].match",
                fix=f"Names are such as {', '.join(sorted(names)[:3])}; * matches anything.",
            )


def _layer_name(name: str) -> str:
    """Return the block of a parameter, such as `blocks.3`; outside of blocks, its top-level module."""
    parts = name.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[: number + 1])


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group to `lr` times the multiplier of the group."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_multiplier"]


def named_optimizer_state(optimizer: ShardedOptimizer, model: nn.Module) -> Iterator[tuple[str, Tensor, Slot]]:
    """Yield every state tensor with its name SLOT/PARAMETER, such as `exp_avg/blocks.0.norm.weight`, and its slot."""
    for name, parameter in model.named_parameters():
        for slot_name, slot in optimizer.slots.get(parameter, {}).items():
            yield f"{slot_name}/{name}", optimizer.state[parameter][slot_name], slot


def check_state_dtype(config: RunConfig) -> None:
    """Raise JinguError if 8-bit moments are set, but bitsandbytes is not installed or the precision is fp64."""
    if not isinstance(config.optimizer, AdamWSettings) or config.optimizer.state_dtype == "fp32":
        return
    require_bitsandbytes("moments are kept in 8 bits", "optimizer.state_dtype", "fp32")
    if config.precision.type == "fp64":
        raise JinguError(
            "8-bit moments need weights in fp32, and precision.type=fp64 keeps them in fp64.",
            where="optimizer.state_dtype",
            fix="Set it to fp32, or choose another precision.",
        )
