"""Middleware of every HTTP request: checks of host and API key, size limits, and a line in the log."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import secrets
import time
import traceback
from typing import Any

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jingu.serve.async_engine import RequestHandle
from jingu.serve.http_errors import ApiError
from jingu.serve.responses import error_response
from jingu.serve.settings import ServeSettings

LOGGER = logging.getLogger("jingu.serve")
# Maximum size of a request's headers.
MAX_HEADER_BYTES = 32_768
# Paths that need no API key, because they reveal nothing about the model.
PUBLIC_PATHS = ("/health", "/chat")


class AccessMiddleware:
    """The outermost ASGI middleware: access control, limits and logging."""

    def __init__(self, app: ASGIApp, settings: ServeSettings) -> None:
        self._app = app
        self._settings = settings
        self._keys = [_digest(key.encode()) for key in settings.keys]
        self._hosts = {host.lower() for host in settings.hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, and log it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        status = 0
        request_id = secrets.token_hex(8)
        log: dict[str, Any] = {"id": request_id}
        # Handlers read these from `request.state`.
        scope.setdefault("state", {}).update(log=log, arrival_time=start)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            self._check_host_and_key(scope)
            await self._app(scope, self._limit_body(receive), send_with_id)
        except Exception as error:
            if not isinstance(error, ApiError):
                LOGGER.exception("a request failed", extra={"fields": {"id": request_id}})
            if status:
                # The response has begun: only a closed connection can tell the client that it is incomplete.
                raise
            await error_response(error, scope["path"])(scope, receive, send_with_id)
        finally:
            seconds = round(time.perf_counter() - start, 4)
            log |= {"method": scope["method"], "path": scope["path"], "status": status, "seconds": seconds}
            handle: RequestHandle | None = log.pop("handle", None)
            if handle is not None:
                log |= handle.stats.log_fields()
            LOGGER.info("request", extra={"fields": log})

    def _check_host_and_key(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
            raise ApiError(431, "the headers are too large")
        if self._hosts:
            host = headers.get(b"host", b"").decode("latin-1").lower()
            # Remove the port; an IPv6 address in brackets contains colons itself.
            name = host if host.endswith("]") else host.rpartition(":")[0] or host
            if name not in self._hosts:
                raise ApiError(403, "the server does not answer to this host name; --allow-host adds names")
        is_public = scope["path"] in PUBLIC_PATHS or scope["path"].startswith("/chat/")
        if scope["method"] == "OPTIONS" or not self._keys or is_public:
            return
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if b"x-api-key" in headers:
            # The header of Anthropic's clients.
            scheme, key = b"bearer", headers[b"x-api-key"]
        digest = _digest(key.strip()) if scheme.lower() == b"bearer" else b""
        # Compare with every key, so that the response time reveals nothing.
        if not sum(hmac.compare_digest(digest, expected) for expected in self._keys):
            problem = "the API key is not valid" if key else "an API key is required"
            raise ApiError(
                401,
                f"{problem}: send `Authorization: Bearer KEY`",
                kind="authentication",
                headers={"www-authenticate": "Bearer"},
            )

    def _limit_body(self, receive: Receive) -> Receive:
        """Wrap `receive` so that it limits the size of the body and the time until it is complete."""
        settings = self._settings
        deadline = time.monotonic() + settings.patience
        size = 0
        is_complete = False

        async def limited() -> Message:
            nonlocal size, is_complete
            if is_complete:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), max(deadline - time.monotonic(), 0.01))
            except TimeoutError:
                raise HTTPException(408, f"the body did not arrive within {settings.patience:g} seconds") from None
            if message["type"] == "http.request":
                size += len(message.get("body", b""))
                is_complete = not message.get("more_body", False)
                if size > settings.body_bytes:
                    raise HTTPException(413, f"the body is larger than {settings.body_bytes:,} bytes")
            return message

        return limited


def _digest(key: bytes) -> bytes:
    """Return a digest of a key, so that compared values have the same length."""
    return hashlib.sha256(key).digest()


class JsonLogFormatter(logging.Formatter):
    """Formats each log record as a line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(line, ensure_ascii=False, default=str)


def configure_logging() -> None:
    """Write the logs of the server and of uvicorn to stderr, as JSON Lines."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLogFormatter())
    for name in ("jingu.serve", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
