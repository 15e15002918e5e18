"""The uvicorn server, with JSON errors for invalid HTTP, timeouts for silent clients, and a graceful shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator
from dataclasses import replace
from types import FrameType
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI

from jingu.chat.chat_format import ChatFormat
from jingu.compat.uvicorn import HttpProtocol, bound_address, open_connections
from jingu.errors import JinguError
from jingu.infer.engine_interface import StepEngine
from jingu.runtime.signals import handle_signals
from jingu.serve.app import create_app
from jingu.serve.async_engine import AsyncEngine
from jingu.serve.http_errors import ApiError
from jingu.serve.middleware import MAX_HEADER_BYTES, configure_logging
from jingu.serve.prometheus import ServerMetrics
from jingu.serve.responses import dump_json
from jingu.serve.service import Service
from jingu.serve.settings import ServeSettings

LOGGER = logging.getLogger("jingu.serve")
# File descriptors that are not for connections: files of the model and of Python, the event loop, other sockets.
_RESERVED_DESCRIPTORS = 64
# Seconds for a client to read its last response before the connection is closed. When the grace period ends without a
# second signal, clients have five times as long.
_DRAIN_SECONDS = 1.0


def raise_connection_limit() -> int:
    """Raise the process's limit of open files as far as it may, and return how many connections it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # the system's own limit can be below the hard one
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return sys.maxsize if soft == resource.RLIM_INFINITY else max(soft - _RESERVED_DESCRIPTORS, 1)


def bind_socket(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address but does not listen yet. Raise JinguError if binding fails."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise JinguError(
            f"the server cannot listen on this address ({error.strerror}).",
            where=f"{host}:{port}",
            fix="Choose another --port (0 picks a free one) or --host.",
        ) from error
    return listener


class HttpConnection(HttpProtocol):
    """A client's connection. It is closed if the client neither sends a request nor reads for too long.

    Attributes:
        patience: seconds to wait for the client.
        max_connections: number of connections above which the one that has been idle for longest is closed.
    """

    patience = 60.0
    max_connections = sys.maxsize
    _idle_timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None
    _is_refused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set up the connection, so that unread data stays in the kernel's buffer and not in this process."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self._make_room()
        # With a limit of 0, asyncio calls `pause_writing` as soon as the kernel's buffer is full.
        self.transport.set_write_buffer_limits(0)
        self._update_idle_timer()

    def data_received(self, data: bytes) -> None:
        """Handle bytes, unless they follow a refused request."""
        if not self._is_refused:
            super().data_received(data)
            self._update_idle_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        for timer in (self._idle_timer, self._unread_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Start the timer, as the client does not read."""
        super().pause_writing()
        self._unread_timer = self.loop.call_later(self.patience, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the timer, as the client reads again."""
        super().resume_writing()
        if self._unread_timer is not None:
            self._unread_timer.cancel()

    def send_400_response(self, msg: str) -> None:
        """Refuse input that is not HTTP or has too large headers, and give the client time to read the reason."""
        error = sys.exc_info()[1]
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        message = "the headers are too large" if status == 431 else "this is not a valid HTTP/1.1 request"
        self._is_refused = True
        # A response that has begun cannot be replaced by an error.
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        body = dump_json({"error": message, "error_type": "validation"})
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        for part in (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(part) or b"")
        # Close only the sending direction: closing both could discard the response before the client reads it.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_DRAIN_SECONDS, self.transport.abort)

    def _make_room(self) -> None:
        """Close the connection that has been idle for longest if there are too many; if none is idle, this one."""
        if len(self.connections) <= self.max_connections:
            return
        # Each connection sets its timer when it becomes idle, with the same delay.
        idle = [
            (connection._idle_timer.when(), connection)
            for connection in self.connections
            if isinstance(connection, HttpConnection) and connection is not self and connection._idle_timer is not None
        ]
        _, oldest = min(idle, key=lambda entry: entry[0], default=(0.0, self))
        self.connections.discard(oldest)
        oldest.transport.abort()

    def _update_idle_timer(self) -> None:
        """Run the timer while the server waits for a request, or for the rest of one that has been answered."""
        is_idle = self.conn.our_state in (h11.IDLE, h11.DONE)
        if is_idle and self._idle_timer is None:
            self._idle_timer = self.loop.call_later(self.patience, self.transport.abort)
        elif not is_idle and self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None


class Server(uvicorn.Server):
    """A server that, when asked to stop, refuses new requests and finishes or aborts those in progress.

    Args:
        app: the application.
        engine: the application's engine.
        on_start: called with the URL once the server listens.
    """

    def __init__(
        self, app: FastAPI, engine: AsyncEngine, settings: ServeSettings, on_start: Callable[[str], None]
    ) -> None:
        limits = {"patience": settings.patience, "max_connections": settings.max_connections or sys.maxsize}
        protocol: Any = type("Connection", (HttpConnection,), limits)
        super().__init__(
            uvicorn.Config(
                app,
                host=settings.host,
                port=settings.port,
                http=protocol,
                ws="none",
                lifespan="on",
                loop="asyncio",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
                # A fallback: `_abort` ends the requests earlier.
                timeout_graceful_shutdown=int(settings.grace) + 10,
            )
        )
        self.engine = engine
        self._grace = settings.grace
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen."""
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        if self.started:
            host, port = bound_address(self)
            self._on_start(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Handle SIGINT and SIGTERM. Unlike uvicorn, do not raise them again once the server has stopped."""
        is_main = threading.current_thread() is threading.main_thread()
        with handle_signals(self.handle_exit, *((signal.SIGINT, signal.SIGTERM) if is_main else ())):
            yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop once the requests in progress have finished; on a second signal, abort them."""
        if self.should_exit and self._loop is not None:
            self._loop.call_soon_threadsafe(self._abort, _DRAIN_SECONDS)
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Return whether to stop, because of a signal or because the engine cannot continue."""
        return await super().on_tick(counter) or self.engine.failure is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new requests, and give those in progress some time to finish."""
        self.engine.is_stopping = True
        if self.engine.num_requests:
            fields = {"requests": self.engine.num_requests, "grace_seconds": self._grace}
            LOGGER.info("shutting down after these requests; a second signal aborts them", extra={"fields": fields})
        timer = asyncio.get_running_loop().call_later(self._grace, self._abort, 5 * _DRAIN_SECONDS)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def _abort(self, drain_seconds: float) -> None:
        """Fail all requests, and close the connections of clients that have not read their responses in time."""
        self._grace = 0.0
        error = ApiError(503, "the server is shutting down and aborted the request", kind="incomplete_generation")
        self.engine.abort_all(error)
        asyncio.get_running_loop().call_later(drain_seconds, self._close_connections)

    def _close_connections(self) -> None:
        for connection in open_connections(self):
            connection.transport.abort()


def build_server(
    engine: StepEngine,
    settings: ServeSettings,
    name: str,
    chat_format: ChatFormat | None,
    on_start: Callable[[str], None],
) -> Server:
    """Return a server that has not been started."""
    metrics = ServerMetrics(name)
    async_engine = AsyncEngine(engine, settings.max_concurrent_requests, settings.timeout, metrics.record)
    service = Service(engine.model, async_engine, settings, metrics, name, chat_format)
    return Server(create_app(service), async_engine, settings, on_start)


def run_server(
    engine: StepEngine, settings: ServeSettings, name: str, chat_format: ChatFormat | None, listener: socket.socket
) -> None:
    """Serve until a signal arrives. Raise RuntimeError if the engine fails and cannot continue."""

    def announce(url: str) -> None:
        print(f"{name} is served at {url}", flush=True)
        if not settings.hosts and not settings.keys:
            print("Warning: everyone who can reach this address can use it without an API key.", file=sys.stderr)
            sys.stderr.flush()

    configure_logging()
    limit = raise_connection_limit()
    settings = replace(settings, max_connections=min(settings.max_connections or limit, limit))
    server = build_server(engine, settings, name, chat_format, announce)
    server.run([listener])
    if server.engine.failure is not None:
        raise RuntimeError("the engine failed and could not continue, so the server ended") from server.engine.failure
