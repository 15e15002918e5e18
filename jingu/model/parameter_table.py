"""Names, shapes, sharding styles and initial values of a model's parameters, computed without building its modules.

`jingu plan` needs no more of a model, and importing PyTorch to build one would take seconds. The rows of each part are
in `jingu.model.parts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from jingu.model.part_spec import InitialValues
from jingu.model.parts import model_rows
from jingu.model.sharding_table import ShardingStyle
from jingu.model.spec import ModelSpec


class Entry(NamedTuple):
    """A parameter: its shape, how it can be sharded (None: not at all), and its initial value.

    Attributes:
        initial: initial value of all elements, or the name of their values; None: they are normally distributed with
            `std`.
        is_trained: whether it is ever trained.
        is_wide: whether it keeps at least fp32 in a model of a narrower dtype.
    """

    shape: tuple[int, ...]
    style: ShardingStyle | None = None
    initial: float | InitialValues | None = None
    std: float = 0.0
    is_trained: bool = True
    is_wide: bool = False


def has_table(spec: ModelSpec) -> bool:
    """Return whether `parameter_table` supports the spec: it does not with adapters or quantization."""
    return spec.adapter is None and spec.quantization is None


@lru_cache(maxsize=16)
def parameter_table(spec: ModelSpec) -> Mapping[str, Entry]:
    """Return the parameters by name, in module order, of a model without its adapters and quantization."""
    table = {}
    for name, row in model_rows(spec):
        std = spec.initializer_range if row.std is None else row.std
        table[f"{name}.weight"] = Entry(
            row.shape,
            row.style,
            row.initial,
            std,
            row.is_trained,
            row.is_wide or (len(row.shape) == 1 and not row.is_trained),
        )
        if row.bias:
            # A norm has a vector of both.
            shape = row.shape if len(row.shape) == 1 else row.shape[:-1]
            table[f"{name}.bias"] = Entry(shape, row.style, 0.0, is_trained=row.is_trained)
    return table


def keeps_wide(name: str, spec: ModelSpec) -> bool:
    """Return whether a parameter keeps at least fp32 in a model of a narrower dtype."""
    entry = parameter_table(spec.model_copy(update={"adapter": None, "quantization": None})).get(name)
    return entry is not None and entry.is_wide


@lru_cache(maxsize=16)
def parameter_sizes(spec: ModelSpec) -> Mapping[str, tuple[int, ...]]:
    """Return names and shapes of a model's parameters in module order, as if none were quantized."""
    if has_table(spec.model_copy(update={"quantization": None})):
        return {name: entry.shape for name, entry in parameter_table(spec).items()}
    # The table does not contain adapters, so build the modules on the meta device.
    from jingu.model.decoder import parameter_shapes

    return parameter_shapes(spec)
