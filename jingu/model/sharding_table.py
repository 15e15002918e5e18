"""The dims along which the parameters of a model can be divided. Each module says it of its children, in `SHARDING`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import nn

# How a child can be divided:
# - heads, kv_heads: its outputs are (key-value) heads, and whole heads stay together
# - from_heads: its inputs are heads
# - column, row: its outputs, or its inputs, are inner dims
# - vocabulary: its weight has a row for each entry of the vocabulary
# - tokens: it is not divided, and looks up what belongs to each token
ShardingStyle = Literal["heads", "kv_heads", "from_heads", "column", "row", "vocabulary", "tokens"]

# Children of a module by name, and how they can be divided.
ShardingTable = Mapping[str, ShardingStyle]


class ShardedDim(NamedTuple):
    """A dim of a parameter, and what it consists of: dims of the same kind are divided among the same ranks."""

    kind: Literal["inner", "kv_heads", "experts"]
    dim: int


def sharded_dims(model: nn.Module) -> dict[str, tuple[ShardedDim, ...]]:
    """Return the dims of each parameter that can be divided, by its name; none if every rank needs all of it."""
    dims: dict[str, tuple[ShardedDim, ...]] = {name: () for name, _ in model.named_parameters()}
    for name, child, style in iterate_styles(model):
        for leaf, parameter in child.named_parameters():
            dims[f"{name}.{leaf}"] = divided_dims(style, leaf, parameter.shape)
    return dims


def iterate_styles(model: nn.Module) -> Iterator[tuple[str, nn.Module, ShardingStyle]]:
    """Yield every module that has a style: its full name, the module and the style."""
    for prefix, module in model.named_modules():
        for name, child, style in child_styles(module):
            yield f"{prefix}.{name}" if prefix else name, child, style


def child_styles(module: nn.Module) -> Iterator[tuple[str, nn.Module, ShardingStyle]]:
    """Yield the children of a module that have a style."""
    for name, style in getattr(module, "SHARDING", {}).items():
        child = getattr(module, name)
        if child is not None:
            yield name, child, style


def divided_dims(style: ShardingStyle, leaf: str, shape: Sequence[int]) -> tuple[ShardedDim, ...]:
    """Return the dims that a style divides of a module's parameter, by its own name in the module."""
    dims = len(shape)
    experts = (ShardedDim("experts", 0),) if dims == 3 else ()  # a matrix for each expert, in one parameter
    inputs = style in ("row", "from_heads")
    of_outputs = leaf in ("bias", "lora_bias", "lora_m", "ia3_out")
    if style == "tokens" or leaf in ("lora_b" if inputs else "lora_a", "token_rows"):
        return experts  # the small inner dim of an adapter stays whole
    if inputs if of_outputs else leaf == "ia3_in" and not inputs:
        return experts
    dim = dims - 1 if inputs or of_outputs else dims - 2
    if shape[dim] == 1:  # of a whole row
        return experts
    return (*experts, ShardedDim("kv_heads" if style == "kv_heads" else "inner", dim))
