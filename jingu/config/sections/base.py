"""What every section of the tree of settings is made of."""

from __future__ import annotations

from dataclasses import dataclass
from os.path import expanduser
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

Positive = Annotated[int, Field(ge=1)]


NotNegative = Annotated[int, Field(ge=0)]


Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


@dataclass(frozen=True)
class Words:
    """What a value must be, in words for people; beside constraints that only a program reads with ease."""

    text: str


def whole(value: object) -> object:
    """Python holds `True == 1 == 1.0`; a choice among whole numbers does not."""
    if isinstance(value, bool | float):
        raise PydanticCustomError("whole", "a whole number")
    return value


Place = Annotated[str, Field(min_length=1), AfterValidator(expanduser), Words("the name of a file or folder")]
"""A file or folder, relative to where the command is run; a leading ~ is the home folder."""


class Settings(BaseModel):
    """A section of the file: frozen, strict about types, and closed to unknown keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        serialize_by_alias=True,
    )


def type_or(default: str) -> BeforeValidator:
    """Give a section that has no `type:` the default one."""
    return BeforeValidator(lambda value: {"type": default, **value} if isinstance(value, dict) else value)
