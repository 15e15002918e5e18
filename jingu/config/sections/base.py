"""Base class and common types of all sections."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from inspect import cleandoc
from os.path import expanduser
from typing import Annotated, Any, Literal, TypeVar, Union

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field
from pydantic_core import PydanticCustomError, PydanticUndefined

from jingu.plugins import Registry

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


Section = TypeVar("Section", bound=Settings)


def registry_of(kind: str, base: type[Section], *sections: type[Section]) -> Registry[type[Section]]:
    """Return the table of a section's variants by their `type:`, to which plug-ins of a kind can add.

    Args:
        base: the class of all variants.
        sections: jingu's own; none: all subclasses that exist, in the order of their definition.
    """

    def check(name: str, section: Any) -> str | None:
        if not (isinstance(section, type) and issubclass(section, base)):
            return f"it is not a subclass of {base.__name__}"
        tag = section.model_fields["type"].default
        return None if tag == name else f"its type is {tag}"

    variants = sections or find_variants(base)
    return Registry(kind, {section.model_fields["type"].default: section for section in variants}, check)


def find_variants(base: type[Section]) -> tuple[type[Section], ...]:
    """Return jingu's subclasses of a section whose `type:` has a default, in the order of their definition."""
    variants: list[type[Section]] = []
    for section in base.__subclasses__():
        is_own = section.__module__.partition(".")[0] == "jingu"
        variants += [section] * (is_own and isinstance(section.model_fields["type"].default, str))
        variants += find_variants(section)
    return tuple(variants)


class LateAnnotation:
    """An annotation that is known when settings are first read, because plug-ins take part in it.

    Args:
        build: returns the annotation.
    """

    def __init__(self, build: Callable[[], Any]) -> None:
        self._build = build

    @cached_property
    def annotation(self) -> Any:
        """The annotation."""
        return self._build()

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return handler.generate_schema(self.annotation)


def variants_of(registry: Registry[Any], default: str | None = None) -> LateAnnotation:
    """Return what makes the base of a table's sections, in `Annotated`, the union of them.

    Args:
        default: the `type:` of a section without one; None: it must have one.
    """

    def build() -> Any:
        union: Any = Union[tuple(registry.values())]  # noqa: UP007
        tagged: Any = Annotated[union, Discriminator("type")]
        return tagged if default is None else Annotated[tagged, default_type(default)]

    return LateAnnotation(build)


def names_of(registry: Registry[Any]) -> LateAnnotation:
    """Return what makes a text, in `Annotated`, one of the names of a table."""
    return LateAnnotation(lambda: Literal[tuple(registry)])


def default_type(default: str) -> BeforeValidator:
    """Return a validator that adds the default `type:` to a section without one."""
    return BeforeValidator(lambda value: {"type": default, **value} if isinstance(value, dict) else value)
