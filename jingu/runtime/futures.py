"""Futures that another thread fulfills."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def fulfill(future: Future[T], function: Callable[[], T]) -> None:
    """Call a function, and set a future to its value or its exception. Does nothing if the future was canceled."""
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)
