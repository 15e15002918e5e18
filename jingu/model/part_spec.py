"""What the specs of a model's parts are made of: their base class, and the rows of the modules that a part has.

A part is described in two places. Its spec declares its fields, the rows of its parameters and its cost, without
PyTorch; a file of its own has the module, which creates its parameters from these rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from jingu.model.sharding_table import ShardingStyle, ShardingTable

PositiveInt = Annotated[int, Field(ge=1)]

PositiveFloat = Annotated[float, Field(gt=0)]

# Initial values that differ between the elements of a vector: rates of decay, and lengths of steps.
InitialValues = Literal["rates", "steps"]


class ModuleRow(NamedTuple):
    """A child module with a weight and perhaps a bias. Biases start at zero.

    Attributes:
        shape: shape of the weight: outputs and inputs, of experts the number of experts first.
        style: how it can be sharded; None: not at all.
        bias: whether it has a bias.
        initial: initial value of all elements of the weight, or the name of values that differ (`weight_init`); None:
            they are normally distributed.
        std: their standard deviation; None: `ModelSpec.initializer_range`.
        is_trained: whether it is ever trained by gradients. A vector that is not keeps at least fp32, whatever the
            dtype of the model, and ZeRO does not shard it.
        is_wide: whether a vector that is trained keeps at least fp32, too.
        decays: whether weight decay applies to it. It never applies to vectors and biases.
    """

    shape: tuple[int, ...]
    style: ShardingStyle | None = None
    bias: bool = False
    initial: float | InitialValues | None = None
    std: float | None = None
    is_trained: bool = True
    is_wide: bool = False
    decays: bool = True


# The rows of a module, by the names of its children; those of a block have the paths of grandchildren.
Rows = Mapping[str, ModuleRow]


def styles(rows: Rows) -> ShardingTable:
    """Return how the children of a module can be sharded, without their own children."""
    return {name: row.style for name, row in rows.items() if row.style is not None and "." not in name}


def child_rows(rows: Rows, name: str) -> dict[str, ModuleRow]:
    """Return the rows of the child `name` of a module."""
    return {path.removeprefix(f"{name}."): row for path, row in rows.items() if path.startswith(f"{name}.")}


def with_prefix(prefix: str, rows: Rows) -> dict[str, ModuleRow]:
    """Return the rows of the child `prefix` by their paths in its parent."""
    return {f"{prefix}.{name}": row for name, row in rows.items()}


class Component(BaseModel):
    """A part of the spec. It rejects unknown keys; its `type` tells variants apart."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def optional(default: Any) -> Any:
    """Return a field that JSON omits at its default: the JSON of models without the component stays as it was."""
    return Field(default=default, exclude_if=lambda value: bool(value == default))
