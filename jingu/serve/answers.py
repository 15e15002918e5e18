"""Answers over HTTP: whole or as server-sent events; who leaves, cancels."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from jingu.serve.driver import Ticket
from jingu.serve.errors import ServeError, as_serve_error, told

LOGGER = logging.getLogger("jingu.serve")
T = TypeVar("T")
MAY_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"description": "the answer, whole or as server-sent events", "content": {"text/event-stream": {}}}
}
"""What the OpenAPI description says of an answer that can be a stream."""


def dump(value: object) -> bytes:
    """JSON as UTF-8. Halves of surrogate pairs, which are no characters, become question marks."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8", "replace")


class Json(Response):
    """A JSON answer."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        """As bytes."""
        return dump(content)


def failure(error: Exception, path: str) -> Json:
    """The answer to a request that failed."""
    known = as_serve_error(error, path)
    status, shown = told(known, path)
    return Json(shown, status, known.headers)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The value of `work`, which is cancelled when the client leaves. Raises ServeError (499) then."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            found: T = tasks[0].result()  # type: ignore[assignment]
            return found
        raise ServeError(499, "the client has left")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def whole(request: Request, ticket: Ticket | None, work: Coroutine[Any, Any, Any]) -> Json:
    """The answer that `work` makes, of a ticket's events where there is one."""
    try:
        return Json(await unless_gone(request.receive, work))
    finally:
        if ticket is not None:
            ticket.cancel()


def event(value: object) -> bytes:
    """A server-sent event."""
    return b"data: " + dump(value) + b"\n\n"


class EventStream(Response):
    """Server-sent events made of a ticket's; if it breaks off, the last one tells of it."""

    media_type = "text/event-stream"

    def __init__(self, ticket: Ticket, events: AsyncIterator[bytes]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._ticket = ticket
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await unless_gone(receive, self._send(scope["path"], send))
        except ServeError:
            pass  # nobody is there any more
        finally:
            self._ticket.cancel()

    async def _send(self, path: str, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for part in self._events:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        except Exception as error:
            if not isinstance(error, ServeError):
                LOGGER.exception("a stream failed")
            last = event(told(as_serve_error(error, path), path)[1])
            await send({"type": "http.response.body", "body": last, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
