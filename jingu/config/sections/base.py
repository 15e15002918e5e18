"""Base class and common types of all sections."""

from __future__ import annotations

import re
from dataclasses import dataclass
from inspect import cleandoc
from os.path import expanduser
from typing import Annotated, Any, Union

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError, PydanticUndefined

Positive = Annotated[int, Field(ge=1)]


NonNegative = Annotated[int, Field(ge=0)]


Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


@dataclass(frozen=True)
class Description:
    """Describes the allowed values of a setting in words, where its other constraints do not say it well."""

    text: str


def reject_bool_and_float(value: object) -> object:
    """Reject booleans and floats where integers are to choose from: in Python, `True == 1 == 1.0`."""
    if isinstance(value, bool | float):
        raise PydanticCustomError("whole", "a whole number")
    return value


def check_file_name(name: str) -> str:
    """Refuse names that are too long for a file system, which counts bytes (up to 255)."""
    if len(name.encode()) > 240:
        raise PydanticCustomError("bytes", "a shorter name")
    return name


PathText = Annotated[str, Field(min_length=1), AfterValidator(expanduser), Description("the name of a file or folder")]
"""Path of a file or folder, relative to the working directory; a leading ~ stands for the home folder."""


class Settings(BaseModel):
    """A section of the configuration: frozen, strict about types, and without unknown keys.

    The docstring of a section documents its settings, below `Attributes:`.
    """

    model_config = ConfigDict(
        # Build validators on first use: that of RunConfig contains those of all sections.
        defer_build=True,
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        serialize_by_alias=True,
    )

    def __init_subclass__(cls, **options: Any) -> None:
        """Move the descriptions of settings from the docstring to the fields, before pydantic collects the fields."""
        super().__init_subclass__(**options)
        cls.__doc__, _, attributes = cleandoc(cls.__doc__ or "").partition("\n\nAttributes:\n")
        # A description continues on lines that are indented further than the names.
        for name, text in re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", attributes, re.MULTILINE):
            default = vars(cls).get(name, PydanticUndefined)
            setattr(cls, name, Field(default, description=" ".join(text.split())))


def union_of(base: type[Settings]) -> Any:
    """Return the union of all subclasses of a section whose `type:` has a default, in the order of their definition."""
    return Union[tuple(_find_variants(base))]  # noqa: UP007


def _find_variants(base: type[Settings]) -> list[type[Settings]]:
    variants = []
    for section in base.__subclasses__():
        variants += [section] * isinstance(section.model_fields["type"].default, str)
        variants += _find_variants(section)
    return variants


def default_type(default: str) -> BeforeValidator:
    """Return a validator that adds the default `type:` to a section without one."""
    return BeforeValidator(lambda value: {"type": default, **value} if isinstance(value, dict) else value)
