"""The specs of norms: their fields, rows and saved bytes."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field

from jingu.model.part_spec import Component, ModuleRow, PositiveFloat, optional
from jingu.model.sharding_table import ShardingStyle


class NormBase(Component):
    """What every norm declares.

    Attributes:
        module: the class of its module, which receives the spec and the width.
    """

    module: ClassVar[str]

    def rows(self, name: str, width: int, style: ShardingStyle | None = None) -> dict[str, ModuleRow]:
        """Return the row of a norm of `width` elements by its name; none if it has no weight."""
        raise NotImplementedError

    def without_weight(self) -> Self:
        """Return the norm without its weight, or itself if it always has one."""
        return self

    def without_bias(self) -> Self:
        """Return the norm without its bias, or itself if it has none."""
        return self

    def saved_bytes(self, width: int, groups: int, size: float, *, is_compiled: bool = False) -> float:
        """Return the bytes per token that the norm over `groups` groups of together `width` elements saves.

        Args:
            size: bytes of the compute dtype.
            is_compiled: whether it is compiled.
        """
        raise NotImplementedError


class RmsNorm(NormBase):
    """Root mean square norm (Zhang and Sennrich, 2019): a weight, no bias.

    Attributes:
        offset: whether one is added to the weight, which therefore starts at zero.
        has_weight: whether it has a weight.
    """

    module = "jingu.model.layers:RMSNorm"
    type: Literal["rms"] = "rms"
    eps: PositiveFloat = 1e-5
    offset: bool = optional(False)
    has_weight: bool = optional(True)

    def rows(self, name: str, width: int, style: ShardingStyle | None = None) -> dict[str, ModuleRow]:
        return {name: ModuleRow((width,), style, initial=0.0 if self.offset else 1.0)} if self.has_weight else {}

    def without_weight(self) -> Self:
        return self.model_copy(update={"has_weight": False})

    def saved_bytes(self, width: int, groups: int, size: float, *, is_compiled: bool = False) -> float:
        wide = max(size, 4.0)
        if is_compiled:
            return width * size + groups * wide
        # Inputs, and results before the multiplication with the weight, in at least fp32.
        return (1 + self.has_weight) * width * wide + groups * wide


class LayerNorm(NormBase):
    """Layer norm (Ba et al., 2016): a weight and, by default, a bias."""

    module = "jingu.model.layers:LayerNormLayer"
    type: Literal["layer"] = "layer"
    eps: PositiveFloat = 1e-5
    bias: bool = optional(True)

    def rows(self, name: str, width: int, style: ShardingStyle | None = None) -> dict[str, ModuleRow]:
        return {name: ModuleRow((width,), style, self.bias, initial=1.0)}

    def without_bias(self) -> Self:
        return self.model_copy(update={"bias": False})

    def saved_bytes(self, width: int, groups: int, size: float, *, is_compiled: bool = False) -> float:
        return width * size + 2 * groups * max(size, 4.0)


Norm = Annotated[RmsNorm | LayerNorm, Field(discriminator="type")]
