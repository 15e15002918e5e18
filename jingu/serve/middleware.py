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
import zlib
from typing import Any
from urllib.parse import urlsplit

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jingu.compat.malloc import release_free_memory
from jingu.serve.async_engine import RequestHandle
from jingu.serve.http_errors import ApiError
from jingu.serve.responses import error_response
from jingu.serve.settings import ServeSettings

LOGGER = logging.getLogger("jingu.serve")
# Maximum size of a request's headers.
MAX_HEADER_BYTES = 32_768
# A body of at least this many bytes leaves so much free memory behind that it is returned to the operating system.
LARGE_BODY_BYTES = 262_144
# Seconds until then, so that many large requests cost one release.
_RELEASE_DELAY = 1.0
# Paths that need no API key, because they reveal nothing about the model.
PUBLIC_PATHS = ("/health", "/chat")


class AccessMiddleware:
    """The outermost ASGI middleware: access control, limits and logging."""

    def __init__(self, app: ASGIApp, settings: ServeSettings) -> None:
        self._app = app
        self._settings = settings
        self._keys = [_digest(key.encode()) for key in settings.keys]
        self._hosts = {host.lower() for host in settings.hosts}
        self._release_timer: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, and log it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        status = 0
        _convert_absolute_form(scope)
        request_id = secrets.token_hex(8)
        log: dict[str, Any] = {"id": request_id}
        # Handlers read these from `request.state`.
        scope.setdefault("state", {}).update(log=log, arrival_time=start)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                # Anthropic's clients read `request-id`, all others `x-request-id`.
                names = (b"x-request-id", b"request-id")
                message["headers"] = [*message.get("headers", []), *((name, request_id.encode()) for name in names)]
            await send(message)

        try:
            self._check_host_and_key(scope)
            await self._app(scope, self._limit_body(receive, _body_decompressor(scope), log), send_with_id)
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
            if log.get("body_bytes", 0) >= LARGE_BODY_BYTES:
                self._release_memory_later()
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
        if not sum(hmac.compare_digest(digest, expected_digest) for expected_digest in self._keys):
            problem = "the API key is not valid" if key else "an API key is required"
            raise ApiError(
                401,
                f"{problem}: send `Authorization: Bearer KEY`",
                kind="authentication",
                headers={"www-authenticate": "Bearer"},
            )

    def _release_memory_later(self) -> None:
        """Return free memory to the operating system soon, on another thread."""
        loop = asyncio.get_running_loop()

        def release() -> None:
            self._release_timer = None
            loop.run_in_executor(None, release_free_memory)

        if self._release_timer is None:
            self._release_timer = loop.call_later(_RELEASE_DELAY, release)

    def _limit_body(self, receive: Receive, decompressor: Any, log: dict[str, Any]) -> Receive:
        """Wrap `receive` so that it decompresses the body, and limits its size and the time until it is complete.

        Args:
            decompressor: an object of zlib; None for a body that is not compressed.
            log: receives the size of the body.
        """
        settings = self._settings
        deadline = time.monotonic() + settings.patience
        size = 0
        is_complete = False

        async def receive_limited() -> Message:
            nonlocal size, is_complete
            if is_complete:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), max(deadline - time.monotonic(), 0.01))
            except TimeoutError:
                raise HTTPException(408, f"the body did not arrive within {settings.patience:g} seconds") from None
            if message["type"] == "http.request":
                is_complete = not message.get("more_body", False)
                if decompressor is not None:
                    message["body"] = _decompress(decompressor, message, settings.body_bytes - size + 1)
                size += len(message.get("body", b""))
                log["body_bytes"] = size
                if size > settings.body_bytes:
                    raise HTTPException(413, f"the body is larger than {settings.body_bytes:,} bytes")
            return message

        return receive_limited


def _convert_absolute_form(scope: Scope) -> None:
    """Convert a request for a whole URL, as proxies send it (RFC 9112, 3.2.2), to one for its path.

    The host of the URL replaces that of the header.
    """
    url = urlsplit(scope["path"])
    if url.scheme in ("http", "https") and url.netloc:
        scope["path"] = url.path or "/"
        scope["raw_path"] = scope["path"].encode()
        headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
        scope["headers"] = [*headers, (b"host", url.netloc.encode())]


def _body_decompressor(scope: Scope) -> Any:
    """Return an object of zlib that decompresses the body of a request; None for a body that is not compressed.

    Raises:
        ApiError: the compression is not supported.
    """
    encodings = [
        value.decode("latin-1").strip().lower() for name, value in scope["headers"] if name == b"content-encoding"
    ]
    if encodings in ([], [""], ["identity"]):
        return None
    if encodings not in (["gzip"], ["x-gzip"], ["deflate"]):
        raise ApiError(415, "the body's Content-Encoding is not supported; send gzip, deflate or no encoding")
    # With 32 more than the size of the window, zlib recognizes the headers of both formats.
    return zlib.decompressobj(32 + zlib.MAX_WBITS)


def _decompress(decompressor: Any, message: Message, limit: int) -> bytes:
    """Return the decompressed bytes of a part of the body, at most `limit`.

    Raises:
        HTTPException: the bytes are not compressed data, or the last part does not complete them.
    """
    try:
        content: bytes = decompressor.decompress(message.get("body", b""), limit)
    except zlib.error as error:
        raise HTTPException(400, f"the body is not in the format of its Content-Encoding ({error})") from error
    if not message.get("more_body", False) and not decompressor.eof and len(content) < limit:
        raise HTTPException(400, "the compressed body is incomplete")
    return content


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


class RepetitionFilter(logging.Filter):
    """Drops records whose text was logged a moment ago, and tells how many they were with the next one.

    Args:
        seconds: the time in which a text is logged once.
    """

    def __init__(self, seconds: float = 10.0) -> None:
        super().__init__()
        self._seconds = seconds
        # For each text, when it was last logged and how often it was dropped since.
        self._last: dict[str, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log a record."""
        text = str(record.msg)
        time_logged, num_dropped = self._last.get(text, (-self._seconds, 0))
        if record.created - time_logged < self._seconds:
            self._last[text] = time_logged, num_dropped + 1
            return False
        self._last[text] = record.created, 0
        if num_dropped:
            record.fields = {"repeated": num_dropped}
        return True


def configure_logging() -> None:
    """Write the logs of the server, of uvicorn and of asyncio to stderr, as JSON Lines."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLogFormatter())
    # asyncio logs an error for each connection that it cannot accept.
    logging.getLogger("asyncio").addFilter(RepetitionFilter())
    for name in ("jingu.serve", "uvicorn", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
