"""Values that another thread computes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def fulfill(future: Future[T], function: Callable[[], T]) -> None:
    """Call a function, and give its value or its error to a future, unless that has been cancelled."""
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)
