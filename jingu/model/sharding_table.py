"""The dims along which the parameters of a model can be sharded.

A module's attribute `sharding` says how its children can be sharded. This module turns these tables into dims.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import nn

# How a module can be sharded:
# - heads, kv_heads: along its outputs, which are query heads or key-value heads; heads are not split
# - from_heads: along its inputs, which are heads
# - column: along its outputs, which are intermediate dims
# - row: along its inputs, which are intermediate dims
# - vocabulary: along the rows of its weight, one per entry of the vocabulary
# - tokens: not sharded; it computes one vector per token, so ranks can share the tokens
ShardingStyle = Literal["heads", "kv_heads", "from_heads", "column", "row", "vocabulary", "tokens"]

# The children of a module that can be sharded, by attribute name.
ShardingTable = Mapping[str, ShardingStyle]


class ShardedDim(NamedTuple):
    """A dim of a parameter that can be sharded.

    Attributes:
        kind: what the dim consists of. Dims of the same kind are divided over the same ranks.
        dim: index of the dim.
    """

    kind: Literal["inner", "kv_heads", "experts"]
    dim: int


def sharded_dims(model: nn.Module) -> dict[str, tuple[ShardedDim, ...]]:
    """Return by parameter name the dims that can be sharded; an empty tuple if every rank needs the whole parameter."""
    dims: dict[str, tuple[ShardedDim, ...]] = {name: () for name, _ in model.named_parameters()}
    for name, child, style in iterate_styles(model):
        for leaf, parameter in child.named_parameters():
            dims[f"{name}.{leaf}"] = divided_dims(style, leaf, parameter.shape)
    return dims


def iterate_styles(model: nn.Module) -> Iterator[tuple[str, nn.Module, ShardingStyle]]:
    """Yield the full name, the module and the sharding style of every module that has a style."""
    for prefix, module in model.named_modules():
        for name, child, style in child_styles(module):
            yield f"{prefix}.{name}" if prefix else name, child, style


def child_styles(module: nn.Module) -> Iterator[tuple[str, nn.Module, ShardingStyle]]:
    """Yield the name, the module and the sharding style of each child that has a style; absent children are skipped."""
    for name, style in getattr(module, "sharding", {}).items():
        child = getattr(module, name, None)
        if child is not None:
            yield name, child, style


def divided_dims(style: ShardingStyle, leaf: str, shape: Sequence[int]) -> tuple[ShardedDim, ...]:
    """Return the dims of a parameter that can be sharded.

    Args:
        style: the style of its module.
        leaf: name of the parameter in its module, such as "weight" or "lora_a".
        shape: its shape.
    """
    dims = len(shape)
    # A parameter with three dims has one matrix per expert, and a bias with two dims one vector.
    experts = (ShardedDim("experts", 0),) if dims == 3 or (leaf == "bias" and dims == 2) else ()
    inputs = style in ("row", "from_heads")
    of_outputs = leaf in ("bias", "lora_bias", "lora_m", "ia3_out") or (leaf == "weight" and dims == 1)
    # Of the two small matrices of a LoRA adapter, only the one with the sharded dim of the weight is sharded.
    if style == "tokens" or leaf in ("lora_b" if inputs else "lora_a", "token_rows"):
        return experts
    # A vector of outputs is whole if inputs are sharded, and a vector of inputs if outputs are.
    if inputs if of_outputs else leaf == "ia3_in" and not inputs:
        return experts
    dim = dims - 1 if inputs or of_outputs else dims - 2
    # A quantized row has one scale for all of its inputs, so every rank needs it.
    if shape[dim] == 1:
        return experts
    return (*experts, ShardedDim("kv_heads" if style == "kv_heads" else "inner", dim))
