"""uvicorn, with errors as JSON also below the application, no waiting for silent clients, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from jingu.errors import JinguError
from jingu.infer.lockstep import Driven
from jingu.runtime.signals import handling
from jingu.serve.answers import dump
from jingu.serve.app import create
from jingu.serve.driver import Driver
from jingu.serve.errors import ServeError
from jingu.serve.gate import HEADER_BYTES, log_to_stderr
from jingu.serve.metrics import Metrics
from jingu.serve.service import ServeSettings, Service
from jingu.tune.speak import Speech

LOGGER = logging.getLogger("jingu.serve")
_DRAIN_SECONDS = 1.0
"""To read what a client is told last, before its connection is cut off; five of these where nobody is in a hurry."""


def bound(host: str, port: int) -> socket.socket:
    """A socket at an address, which does not listen yet. Raises JinguError where it cannot be had."""
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
    except OSError as error:
        made.close()
        raise JinguError(
            f"the server cannot listen there ({error.strerror}).",
            where=f"{host}:{port}",
            fix="Choose another --port (0 takes a free one) or --host.",
        ) from error
    return made


class Connection(H11Protocol):
    """A client's connection. Who keeps the server waiting for a request, or does not read, is left."""

    patience = 60.0
    _overdue: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _refused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin; the kernel holds what the client has not read, and this process nothing."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self.transport.set_write_buffer_limits(0)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Take bytes. What follows a refused request is not looked at."""
        if not self._refused:
            super().data_received(data)
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        for timer in (self._overdue, self._unread):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client does not read."""
        super().pause_writing()
        self._unread = self.loop.call_later(self.patience, self.transport.abort)

    def resume_writing(self) -> None:
        """It does again."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, or has too large headers; then let the client finish, so that it reads why."""
        error = sys.exc_info()[1]
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        words = "the headers are too large" if status == 431 else "this is not a request of HTTP/1.1"
        self._refused = True
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        body = dump({"error": words, "error_type": "validation"})
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        for part in (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(part) or b"")
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_DRAIN_SECONDS, self.transport.abort)

    def _watch(self) -> None:
        """Wait so long for a request to come in, or for the rest of one that has its answer."""
        waits = self.conn.our_state in (h11.IDLE, h11.DONE)
        if waits and self._overdue is None:
            self._overdue = self.loop.call_later(self.patience, self.transport.abort)
        elif not waits and self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None


class Server(uvicorn.Server):
    """A server that, asked to stop, takes nothing more, and finishes what it has or tells each client that it will not.

    Args:
        app: the application.
        driver: of its engine.
        on_start: told the address, once it answers there.
    """

    def __init__(
        self, app: FastAPI, driver: Driver, settings: ServeSettings, on_start: Callable[[str], None] = lambda _: None
    ) -> None:
        protocol: Any = type("Connection", (Connection,), {"patience": settings.patience})
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
                h11_max_incomplete_event_size=HEADER_BYTES,
                timeout_graceful_shutdown=int(settings.grace) + 10,
            )
        )
        self.driver = driver
        self._grace = settings.grace
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self._on_start(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Ctrl-C and SIGTERM end the server, and not the process with a signal; a second one ends it at once."""
        here = threading.current_thread() is threading.main_thread()
        with handling(self.handle_exit, *((signal.SIGINT, signal.SIGTERM) if here else ())):
            yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal."""
        if self.should_exit and self._loop is not None:
            self._loop.call_soon_threadsafe(self._give_up, _DRAIN_SECONDS)
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Whether to stop: asked to, or because the engine cannot go on."""
        return await super().on_tick(counter) or self.driver.broken is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End in order: no new requests, then those under way, for a while."""
        self.driver.stopping = True
        if self.driver.open:
            told = {"requests": self.driver.open, "grace_seconds": self._grace}
            LOGGER.info("stopping when these are finished; a second signal ends it at once", extra={"told": told})
        timer = asyncio.get_running_loop().call_later(self._grace, self._give_up, 5 * _DRAIN_SECONDS)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def _give_up(self, seconds: float) -> None:
        """Tell everyone that it ends, and so much later leave who has not read that."""
        self._grace = 0.0
        late = ServeError(503, "the server stops, and this took too long to finish", kind="incomplete_generation")
        self.driver.abandon(late)
        asyncio.get_running_loop().call_later(seconds, self._leave)

    def _leave(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def make(
    engine: Driven,
    settings: ServeSettings,
    name: str,
    speech: Speech | None = None,
    on_start: Callable[[str], None] = lambda _: None,
) -> Server:
    """A server, not started yet."""
    metrics = Metrics(name)
    driver = Driver(engine, settings.queue, settings.timeout, metrics.ended)
    service = Service(engine.loaded, driver, settings, metrics, name, speech)
    return Server(create(service), driver, settings, on_start)


def run(engine: Driven, settings: ServeSettings, name: str, speech: Speech | None, listener: socket.socket) -> None:
    """Serve until a signal asks to stop. Raises RuntimeError where the engine fails and cannot go on."""

    def tell(address: str) -> None:
        print(f"{name} answers at {address}", flush=True)
        if not settings.hosts and not settings.keys:
            print("Whoever reaches this address can use it: no API key is asked for.", file=sys.stderr, flush=True)

    log_to_stderr()
    server = make(engine, settings, name, speech, tell)
    server.run([listener])
    if server.driver.broken is not None:
        raise RuntimeError("the engine failed and could not go on, so the server has ended") from server.driver.broken
