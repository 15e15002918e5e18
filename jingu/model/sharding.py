"""Along which dims the parameters of a model can be divided. Each part says it of its children, in `SHARDING`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from torch import nn

Style = Literal["heads", "kv_heads", "from_heads", "column", "row", "vocabulary", "tokens"]
"""How a child can be divided:

heads, kv_heads  its outputs are (key-value) heads, and whole heads stay together
from_heads       its inputs are heads
column, row      its outputs, its inputs are inner dims
vocabulary       its weight has a row for each entry of the vocabulary
tokens           it is not divided, and looks up what belongs to each token
"""

Table = Mapping[str, Style]
"""Children of a part by name, and how they can be divided."""


class Cut(NamedTuple):
    """A dim of a parameter, and what it is made of; what is made of the same things is divided among the same ranks."""

    kind: Literal["inner", "kv_heads", "experts"]
    dim: int


def cuts(model: nn.Module) -> dict[str, tuple[Cut, ...]]:
    """The dims of each parameter that can be divided, by its name; none where every rank needs all of it."""
    found: dict[str, tuple[Cut, ...]] = {name: () for name, _ in model.named_parameters()}
    for name, child, style in styled(model):
        for leaf, parameter in child.named_parameters():
            found[f"{name}.{leaf}"] = _cut(style, leaf, parameter.shape)
    return found


def styled(model: nn.Module) -> Iterator[tuple[str, nn.Module, Style]]:
    """Every part of a model that has a style: full name, module and style."""
    for prefix, module in model.named_modules():
        for name, child, style in own_styles(module):
            yield f"{prefix}.{name}" if prefix else name, child, style


def own_styles(module: nn.Module) -> Iterator[tuple[str, nn.Module, Style]]:
    """The children of a part that have a style."""
    for name, style in getattr(module, "SHARDING", {}).items():
        child = getattr(module, name)
        if child is not None:
            yield name, child, style


def _cut(style: Style, leaf: str, shape: Sequence[int]) -> tuple[Cut, ...]:
    dims = len(shape)
    experts = (Cut("experts", 0),) if dims == 3 else ()  # a matrix for each expert, in one parameter
    inputs = style in ("row", "from_heads")
    of_outputs = leaf in ("bias", "lora_m", "ia3_out")
    if style == "tokens" or leaf == ("lora_b" if inputs else "lora_a"):
        return experts  # the small inner dim of an adapter stays whole
    if inputs if of_outputs else leaf == "ia3_in" and not inputs:
        return experts
    dim = dims - 1 if inputs or of_outputs else dims - 2
    if shape[dim] == 1:  # of a whole row
        return experts
    return (*experts, Cut("kv_heads" if style == "kv_heads" else "inner", dim))
