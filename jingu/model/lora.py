"""Low-rank adapters (Hu et al., 2022): beside a matrix that stays as it is, the product of two small trained ones.

Shapes: R rank, I inputs, O outputs, E experts, M choices.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from jingu.errors import JinguError
from jingu.model.experts import GroupedLinear
from jingu.model.grouped import grouped_product
from jingu.model.layers import Linear
from jingu.model.products import linear
from jingu.model.spec import Lora

LEAVES = ("lora_a", "lora_b")
"""Names of an adapter's parameters, beside the `weight` of its module."""


class LoraLinear(Linear):
    """A linear map and its adapter."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, adapter: Lora) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.scale = adapter.scale
        self.lora_a = nn.Parameter(torch.empty(adapter.rank, inputs))
        self.lora_b = nn.Parameter(torch.empty(outputs, adapter.rank))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.scale * linear(linear(input, self.lora_a), self.lora_b)


class LoraGrouped(GroupedLinear):
    """A matrix for each expert, and an adapter of its own for each."""

    def __init__(self, number: int, inputs: int, outputs: int, adapter: Lora) -> None:
        super().__init__(number, inputs, outputs)
        self.scale = adapter.scale
        self.lora_a = nn.Parameter(torch.empty(number, adapter.rank, inputs))
        self.lora_b = nn.Parameter(torch.empty(number, outputs, adapter.rank))

    def forward(self, x_MI: Tensor, ends_E: Tensor) -> Tensor:
        x_MR = grouped_product(x_MI, self.lora_a.to(x_MI.dtype), ends_E)
        return super().forward(x_MI, ends_E) + self.scale * grouped_product(x_MR, self.lora_b.to(x_MI.dtype), ends_E)

    def one(self, number: int, x_MI: Tensor) -> Tensor:
        """As `GroupedLinear.one`, with the adapter."""
        x_MR = linear(x_MI, self.lora_a[number])
        return super().one(number, x_MI) + self.scale * linear(x_MR, self.lora_b[number])


def add_adapters(model: nn.Module, adapter: Lora) -> None:
    """Give the adapter's targets one each, in place; only adapters are then trained."""
    model.requires_grad_(False)
    for prefix, parent in list(model.named_modules()):
        for leaf, child in list(parent.named_children()):
            name = f"{prefix}.{leaf}" if prefix else leaf
            if not isinstance(child, Linear | GroupedLinear) or not _is_target(name, adapter):
                continue
            new: Linear | GroupedLinear
            if isinstance(child, GroupedLinear):
                number, outputs, inputs = child.weight.shape
                new = LoraGrouped(number, inputs, outputs, adapter)
            else:
                new = LoraLinear(child.in_features, child.out_features, bias=child.bias is not None, adapter=adapter)
                new.bias = child.bias
            new.weight = child.weight
            setattr(parent, leaf, new)


def _is_target(name: str, adapter: Lora) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in adapter.targets)


def check_targets(names: list[str], adapter: Lora) -> None:
    """JinguError for a pattern that no module with an adapter of a model matches; `names` are its parameters'."""
    modules = [name.rpartition(".")[0] for name in names if name.endswith(".lora_a")]
    for pattern in adapter.targets:
        if not any(fnmatchcase(module, pattern) for module in modules):
            raise JinguError(
                f"no matrix of the model has a name like {pattern}.",
                where="tune.targets",
                fix="Names are such as blocks.0.attention.q and blocks.0.feed_forward.up; * stands for anything.",
            )


def is_adapter(name: str) -> bool:
    """Whether a parameter is an adapter's."""
    return name.rpartition(".")[2] in LEAVES


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """The matrix that does what another and its adapter do together; of experts, all at once."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(wide) + scale * (b.to(wide) @ a.to(wide))).to(weight.dtype)
