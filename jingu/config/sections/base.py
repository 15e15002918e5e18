"""Base class and common types of all sections."""

from __future__ import annotations

from dataclasses import dataclass
from os.path import expanduser
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

Positive = Annotated[int, Field(ge=1)]


NonNegative = Annotated[int, Field(ge=0)]


Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


@dataclass(frozen=True)
class Description:
    """Describes what values are allowed, where the other constraints are hard to put into words."""

    text: str


def reject_bool_and_float(value: object) -> object:
    """Accept only integers in a choice among them: for Python, `True == 1 == 1.0`."""
    if isinstance(value, bool | float):
        raise PydanticCustomError("whole", "a whole number")
    return value


PathText = Annotated[str, Field(min_length=1), AfterValidator(expanduser), Description("the name of a file or folder")]
"""A file or folder, relative to the working directory; a leading ~ is the home folder."""


class Settings(BaseModel):
    """A section of the configuration: frozen, strict about types, and without unknown keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        serialize_by_alias=True,
    )


def default_type(default: str) -> BeforeValidator:
    """Return a validator that adds the default `type:` to a section without one."""
    return BeforeValidator(lambda value: {"type": default, **value} if isinstance(value, dict) else value)
