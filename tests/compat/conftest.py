"""Calls of `jingu.compat` that say what to adapt where a new version of a library has taken a private name away."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from typing import Any

import pytest


class Compat:
    """A module of `jingu.compat` whose functions fail a test with a clear message."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._library = name.partition("_")[0]

    def __getattr__(self, function: str) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            try:
                return getattr(import_module(f"jingu.compat.{self._name}"), function)(*arguments, **keywords)
            except (AttributeError, ImportError) as error:
                pytest.fail(
                    f"{self._library} {version(self._library)} took a private name away ({error}): "
                    f"adapt `{function}` in jingu/compat/{self._name}.py."
                )

        return call


@pytest.fixture
def torch_compat() -> Any:
    return Compat("torch")


@pytest.fixture
def distributed_compat() -> Any:
    return Compat("torch_distributed")


@pytest.fixture
def uvicorn_compat() -> Any:
    return Compat("uvicorn")
