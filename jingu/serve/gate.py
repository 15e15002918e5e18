"""What every request passes before its handler: host, key, size, a line in the log."""

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

from jingu.serve.answers import failure
from jingu.serve.driver import Ticket
from jingu.serve.errors import ServeError
from jingu.serve.service import ServeSettings

LOGGER = logging.getLogger("jingu.serve")
HEADER_BYTES = 32_768
"""Of a request, at most."""
OPEN_PATHS = ("/health", "/chat")
"""Nobody is asked for a key there: they tell nothing of the model."""


class Gate:
    """ASGI middleware around everything else."""

    def __init__(self, app: ASGIApp, settings: ServeSettings) -> None:
        self._app = app
        self._settings = settings
        self._keys = [_digest(key.encode()) for key in settings.keys]
        self._hosts = {host.lower() for host in settings.hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, and tell the log."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.perf_counter(), 0
        number = secrets.token_hex(8)
        told: dict[str, Any] = {"id": number}
        scope.setdefault("state", {}).update(log=told, arrived=start)

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", number.encode())]
            await send(message)

        try:
            self._check(scope)
            await self._app(scope, self._limited(receive), sending)
        except Exception as error:
            if not isinstance(error, ServeError):
                LOGGER.exception("a request failed", extra={"told": {"id": number}})
            if status:  # the answer has begun: the connection is cut off
                raise
            await failure(error, scope["path"])(scope, receive, sending)
        finally:
            seconds = round(time.perf_counter() - start, 4)
            told |= {"method": scope["method"], "path": scope["path"], "status": status, "seconds": seconds}
            ticket: Ticket | None = told.pop("ticket", None)
            if ticket is not None:
                told |= ticket.account.shown()
            LOGGER.info("request", extra={"told": told})

    def _check(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        if sum(len(name) + len(value) for name, value in scope["headers"]) > HEADER_BYTES:
            raise ServeError(431, "the headers are too large")
        if self._hosts:
            host = headers.get(b"host", b"").decode("latin-1").lower()
            name = host if host.endswith("]") else host.rpartition(":")[0] or host
            if name not in self._hosts:
                raise ServeError(403, "the server is not called by this name; start it with --allow-host to add one")
        if scope["method"] == "OPTIONS" or not self._keys:
            return
        if scope["path"] in OPEN_PATHS or scope["path"].startswith("/chat/"):
            return
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        sent = _digest(key.strip()) if scheme.lower() == b"bearer" else b""
        # All keys are compared, so that time tells nothing.
        if not sum(hmac.compare_digest(sent, each) for each in self._keys):
            what = "this is none of the server's API keys" if key else "an API key is needed"
            raise ServeError(
                401,
                f"{what}: send `Authorization: Bearer KEY`",
                kind="authentication",
                headers={"www-authenticate": "Bearer"},
            )

    def _limited(self, receive: Receive) -> Receive:
        """`receive` of a body that may not be too large, nor too slow."""
        settings, taken, done = self._settings, 0, False
        deadline = time.monotonic() + settings.patience

        async def limited() -> Message:
            nonlocal taken, done
            if done:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), max(deadline - time.monotonic(), 0.01))
            except TimeoutError:
                raise HTTPException(408, f"the body did not arrive within {settings.patience:g} seconds") from None
            if message["type"] == "http.request":
                taken += len(message.get("body", b""))
                done = not message.get("more_body", False)
                if taken > settings.body_bytes:
                    raise HTTPException(413, f"the body has more than {settings.body_bytes:,} bytes")
            return message

        return limited


def _digest(key: bytes) -> bytes:
    """All keys become equally long."""
    return hashlib.sha256(key).digest()


class JsonLines(logging.Formatter):
    """A JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "told", {}),
        }
        if record.exc_info:
            line["traceback"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(line, ensure_ascii=False, default=str)


def log_to_stderr() -> None:
    """Send what the server and uvicorn have to say to stderr, as JSON."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    for name in ("jingu.serve", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
