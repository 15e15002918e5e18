"""Mutants: a module with one line changed, which some test must notice."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest


@contextmanager
def mutated(module: ModuleType, old: str, new: str) -> Iterator[None]:
    """Change a line of a module inside the block: the code of its functions, and its numbers."""
    source = inspect.getsource(module)
    assert source.count(old) == 1, old
    changed = ModuleType(module.__name__)
    changed.__file__ = module.__file__
    # Dataclasses and pydantic look the module up by its name.
    sys.modules[module.__name__] = changed
    try:
        exec(compile(source.replace(old, new), str(module.__file__), "exec"), vars(changed))
    finally:
        sys.modules[module.__name__] = module
    with pytest.MonkeyPatch.context() as patch:
        for before, after in function_pairs(vars(module), vars(changed), module.__name__):
            patch.setattr(before, "__code__", after.__code__)
        for name, value in vars(module).items():
            if isinstance(value, int | float) and vars(changed)[name] != value:
                patch.setattr(module, name, vars(changed)[name])
        yield


def function_pairs(before: Any, after: Any, module: str) -> Iterator[tuple[Any, Any]]:
    """Yield each function and method of a module with its counterpart in a changed copy."""
    for name, value in list(before.items()):
        function, other = (inspect.unwrap(getattr(each, "fget", each)) for each in (value, after.get(name)))
        if inspect.isfunction(function) and inspect.isfunction(other) and function.__module__ == module:
            yield function, other
        elif inspect.isclass(value) and value.__module__ == module:
            yield from function_pairs(vars(value), vars(other), module)
