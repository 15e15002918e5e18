"""Plug-ins: installed packages that add entries to jingu's tables, through entry points.

The group of an entry point is `jingu.vN.KIND`, where N is the version of the interface, and KIND one of `KINDS`. Its
name is the one that files use. Packages are imported when a table of their kind is first read. A plug-in that cannot be
used is left out with a warning of one line, and changes nothing for the others.
"""

from __future__ import annotations

import logging
import re
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import distributions
from traceback import walk_tb
from typing import Any, TypeVar

from jingu.errors import JinguError
from jingu.formatting import print_table
from jingu.tables import import_name

T = TypeVar("T")
# Version of the interface: what each kind of plug-in must provide, and what it may import (docs/guides/plugins.md).
INTERFACE = 1
KINDS = {
    "families": "jingu.model.families:FAMILIES",
    "tasks": "jingu.config.sections.tasks:TASKS",
    "losses": "jingu.config.sections.pairs:DPO_LOSSES",
    "advantages": "jingu.config.sections.policies:ADVANTAGES",
    "rewards": "jingu.config.sections.rewards:REWARDS",
    "environments": "jingu.config.sections.policies:ENVIRONMENTS",
    "optimizers": "jingu.config.sections.optimizers:OPTIMIZERS",
    "schedules": "jingu.config.sections.schedules:SCHEDULES",
    "trackers": "jingu.config.sections.train:TRACKERS",
    "metrics": "jingu.evaluate.text_metrics:OVERLAPS",
    "filters": "jingu.evaluate.answer_filters:FILTERS",
    "readers": "jingu.text.corpus_file:READERS",
}
"""The tables to which plug-ins can add entries, by kind, each as `module:name` of a `Registry`."""
_GROUP = re.compile(r"jingu\.v(\d+)\.(.+)")


@dataclass(frozen=True)
class Plugin:
    """An entry point of an installed package.

    Attributes:
        kind: its kind, as in `KINDS`.
        name: the name that files use.
        package: the package.
        version: the version of the package.
        interface: the version of the interface that it is written for.
        reference: what it adds, as `module:name`.
    """

    kind: str
    name: str
    package: str
    version: str
    interface: int
    reference: str

    def describe(self, problem: str) -> str:
        """Return one line about a plug-in that cannot be used."""
        return f"The plug-in {self.name} ({self.kind}) of {self.package} {self.version} is ignored: {problem}."


@cache
def installed_plugins() -> tuple[Plugin, ...]:
    """Return the plug-ins of all installed packages, in the order of their kinds and names, without importing them."""
    plugins = set(_read_entry_points())
    # A package may support several versions of the interface.
    current = {(plugin.kind, plugin.name, plugin.package) for plugin in plugins if plugin.interface == INTERFACE}
    return tuple(
        sorted(
            (
                plugin
                for plugin in plugins
                if plugin.interface == INTERFACE or (plugin.kind, plugin.name, plugin.package) not in current
            ),
            key=lambda plugin: (plugin.kind, plugin.name, plugin.package, plugin.interface),
        )
    )


def _read_entry_points() -> Iterator[Plugin]:
    """Yield the plug-ins of each package, of which the first copy on the path counts."""
    names = set()
    for distribution in distributions():
        if "jingu.v" not in (distribution.read_text("entry_points.txt") or "") or distribution.name in names:
            continue
        names.add(distribution.name)
        for point in distribution.entry_points:
            if match := _GROUP.fullmatch(point.group):
                version = distribution.version
                yield Plugin(match[2], point.name, distribution.name, version, int(match[1]), point.value)


def plugin_versions() -> dict[str, str]:
    """Return the versions of the packages that have plug-ins, by the names of the packages."""
    return {plugin.package: plugin.version for plugin in installed_plugins()}


def check_plugin(plugin: Plugin, built_in: Mapping[str, object]) -> str | None:
    """Return why a plug-in cannot be used, as far as its entry point shows; None if it can.

    Args:
        built_in: jingu's own entries of its kind.
    """
    if plugin.kind not in KINDS:
        return f"there is no kind {plugin.kind} of plug-ins"
    if plugin.interface != INTERFACE:
        return f"it is written for version {plugin.interface} of the plug-in interface, and this jingu has {INTERFACE}"
    if plugin.name in built_in:
        return "jingu itself has an entry of this name"
    others = [
        other.package
        for other in installed_plugins()
        if (other.kind, other.name, other.interface) == (plugin.kind, plugin.name, INTERFACE)
        and other.package != plugin.package
    ]
    return f"{others[0]} has an entry of the same name" if others else None


class Registry(UserDict[str, T]):
    """A table with jingu's own entries and those of plug-ins, which are imported when the table is first read.

    Args:
        kind: the kind of its plug-ins.
        entries: jingu's own entries.
        check: returns what is wrong with the object of a plug-in, given its name; None if nothing is. None: the table
            holds references as `module:name`, and objects are imported where they are used.
    """

    def __init__(
        self, kind: str, entries: Mapping[str, T], check: Callable[[str, Any], str | None] | None = None
    ) -> None:
        # Without the initialization of UserDict, which would read the table.
        self.kind = kind
        self.built_in = dict(entries)
        self._check = check

    @cached_property
    def data(self) -> dict[str, T]:  # type: ignore[override]
        """All entries that can be used."""
        entries = dict(self.built_in)
        for plugin in installed_plugins():
            if plugin.kind == self.kind:
                value, problem = self.load(plugin)
                if problem is None:
                    entries[plugin.name] = value
                else:
                    logging.getLogger("jingu").warning(plugin.describe(problem))
        return entries

    def load(self, plugin: Plugin, *, imports: bool = False) -> tuple[Any, str | None]:
        """Return the entry of a plug-in, and why it cannot be used; None if it can.

        Args:
            imports: whether to import all that it names, also what is otherwise imported where it is used.
        """
        problem = check_plugin(plugin, self.built_in)
        if problem is not None or (self._check is None and not imports):
            return plugin.reference, problem
        try:
            value = import_name(plugin.reference)
        except JinguError as error:
            return None, error.what.rstrip(".")
        if self._check is None:
            return plugin.reference, None
        problem = self._check(plugin.name, value)
        return value, _check_names(value) if imports and problem is None else problem


def _check_names(value: object) -> str | None:
    """Return why something that an object names as `module:name` cannot be imported; None if it can."""
    for reference in (getattr(value, name, None) for name in ("FACTORY", "IMPLEMENTATION", "function")):
        try:
            if isinstance(reference, str):
                import_name(reference)
        except JinguError as error:
            return f"{reference}: {error.what.rstrip('.')}"
    return None


def expect_type(kind: type) -> Callable[[str, Any], str | None]:
    """Return a check that an object is an instance of a class."""
    return lambda _, value: None if isinstance(value, kind) else f"it is no {kind.__name__}"


def expect_function(name: str, value: Any) -> str | None:
    """Check that an object can be called."""
    return None if callable(value) else "it is no function"


def failing_package(error: BaseException) -> str | None:
    """Return the package of the plug-in that has raised an exception; None if none has, or if the machine failed.

    An exception of a plug-in is its author's to fix, and comes again in the next run; a full disk, a lost connection
    or memory that ran out may not.
    """
    if isinstance(error, (OSError, MemoryError)) or type(error).__name__ == "OutOfMemoryError":
        return None
    packages = {re.split("[.:]", plugin.reference)[0]: plugin.package for plugin in installed_plugins()}
    modules = (frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in walk_tb(error.__traceback__))
    return next((packages[module] for module in modules if module in packages), None)


def list_plugins() -> int:
    """Print the plug-ins of all installed packages. Return 1 if one of them cannot be used, otherwise 0."""
    rows = []
    for plugin in installed_plugins():
        problem = check_plugin(plugin, {})
        if problem is None:
            registry: Registry[Any] = import_name(KINDS[plugin.kind])
            _, problem = registry.load(plugin, imports=True)
        rows.append((plugin.kind, plugin.name, plugin.package, plugin.version, plugin.reference, problem or "ok"))
    if rows:
        print_table(("kind", "name", "package", "version", "object", "state"), rows, right=())
    else:
        print("No installed package has a plug-in. `jingu example plugin` writes a package with one of each kind.")
    return int(any(row[-1] != "ok" for row in rows))
