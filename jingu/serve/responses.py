"""HTTP responses: one JSON value, or server-sent events. A client that disconnects cancels its request."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from jingu.serve.async_engine import RequestHandle
from jingu.serve.http_errors import ApiError, error_body, to_api_error

LOGGER = logging.getLogger("jingu.serve")
T = TypeVar("T")

# Seconds without an event after which a stream sends a keep-alive, as proxies and clients close silent connections.
KEEP_ALIVE_SECONDS = 5.0
# A comment, which readers of server-sent events skip.
COMMENT = b": keep-alive\n\n"

# OpenAPI description of a response that may be streamed.
STREAMING_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "one JSON value, or server-sent events", "content": {"text/event-stream": {}}}
}


def dump_json(value: object) -> bytes:
    """Encode JSON as UTF-8. Lone surrogates, which UTF-8 cannot express, become question marks."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8", "replace")


class JsonResponse(Response):
    """A JSON response."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        """Encode the content."""
        return dump_json(content)


def error_response(error: Exception, path: str) -> JsonResponse:
    """Return the response to a request that failed."""
    api_error = to_api_error(error, path)
    status, body = error_body(api_error, path)
    return JsonResponse(body, status, api_error.headers)


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, but cancel it and raise ApiError (499) when the client disconnects."""
    # Wait until the work is done, or the client disconnects.
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait([task, disconnect], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client has disconnected")
        return task.result()
    finally:
        task.cancel()
        disconnect.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def respond_once(request: Request, handle: RequestHandle | None, work: Coroutine[Any, Any, Any]) -> JsonResponse:
    """Return the value of `work` as JSON; cancel the engine's requests when the client disconnects."""
    try:
        return JsonResponse(await cancel_on_disconnect(request.receive, work))
    finally:
        if handle is not None:
            handle.cancel()


def format_event(value: object, name: str | None = None) -> bytes:
    """Return a server-sent event; `name` is its event name, for protocols that have one."""
    prefix = b"" if name is None else b"event: " + name.encode() + b"\n"
    return prefix + b"data: " + dump_json(value) + b"\n\n"


class EventStream(Response):
    """Streams the server-sent events of a request. If the request fails, the last event reports the error.

    Args:
        named: whether the protocol's events have names.
        media_type: type of the stream; for another one than server-sent events, `events` are lines of JSON.
        keep_alive: sent while the answer has no new event for `KEEP_ALIVE_SECONDS`.
    """

    def __init__(
        self,
        handle: RequestHandle,
        events: AsyncIterator[bytes],
        named: bool = False,
        media_type: str = "text/event-stream",
        keep_alive: bytes = COMMENT,
    ) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(headers=headers, media_type=media_type)
        # The base class has set the length of an empty body.
        del self.headers["content-length"]
        self._handle = handle
        self._events = events
        self._error_name = "error" if named else None
        self._keep_alive = keep_alive
        # The time of the last part; None while one is being sent.
        self._last_time: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        keep_alive = asyncio.ensure_future(self._send_keep_alives(send))
        try:
            await cancel_on_disconnect(receive, self._send(scope["path"], send))
        except ApiError:
            pass  # The client has disconnected, so nobody is left to report the error to.
        finally:
            keep_alive.cancel()
            self._handle.cancel()

    async def _send_keep_alives(self, send: Send) -> None:
        """Send a keep-alive whenever nothing has been sent for some time."""
        while True:
            await asyncio.sleep(KEEP_ALIVE_SECONDS / 2)
            if self._last_time is not None and time.monotonic() - self._last_time >= KEEP_ALIVE_SECONDS / 2:
                await self._send_part(send, self._keep_alive)

    async def _send_part(self, send: Send, part: bytes) -> None:
        self._last_time = None
        await send({"type": "http.response.body", "body": part, "more_body": True})
        self._last_time = time.monotonic()

    async def _send(self, path: str, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            self._last_time = time.monotonic()
            async for part in self._events:
                await self._send_part(send, part)
                # Neither a full queue of events nor a closed connection makes this loop wait: let others have a turn.
                await asyncio.sleep(0)
        except Exception as error:
            # The status has already been sent, so report the error as an event.
            if not isinstance(error, ApiError):
                LOGGER.exception("streaming failed")
            _, body = error_body(to_api_error(error, path), path)
            is_events = self.media_type == "text/event-stream"
            part = format_event(body, self._error_name) if is_events else dump_json(body) + b"\n"
            await self._send_part(send, part)
        self._last_time = None
        await send({"type": "http.response.body", "body": b"", "more_body": False})
