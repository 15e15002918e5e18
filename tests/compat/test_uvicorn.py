"""What uvicorn does not document, and the server is built on."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import socket
from typing import Any

import h11
import pytest

uvicorn = pytest.importorskip("uvicorn")
ADAPT = f"uvicorn {uvicorn.__version__} took a private name away: adapt jingu/compat/uvicorn.py"


def test_methods_that_are_overridden_are_there() -> None:
    from jingu.compat.uvicorn import PROTOCOL_HOOKS, SERVER_HOOKS, HttpProtocol

    for owner, names in ((uvicorn.Server, SERVER_HOOKS), (HttpProtocol, PROTOCOL_HOOKS)):
        missing = [name for name in names if not inspect.isfunction(inspect.getattr_static(owner, name, None))]
        assert not missing, f"{ADAPT} ({', '.join(missing)})"


def test_a_server_and_its_connections(uvicorn_compat: Any) -> None:
    """Every hook is called, and a connection has what jingu uses of it."""
    from jingu.compat.uvicorn import HttpProtocol

    calls = []

    class Protocol(HttpProtocol):
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            assert isinstance(self.conn, h11.Connection) and self.transport is transport, ADAPT
            assert self.loop is asyncio.get_running_loop(), ADAPT
            calls.append("connection_made")

        def send_400_response(self, msg: str) -> None:
            calls.append("send_400_response")
            super().send_400_response(msg)

    class Server(uvicorn.Server):
        async def on_tick(self, counter: int) -> bool:
            calls.append("on_tick")
            return await super().on_tick(counter)

        @contextlib.contextmanager
        def capture_signals(self) -> Any:
            calls.append("capture_signals")
            yield

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("no request is complete")

    async def scenario() -> None:
        config = uvicorn.Config(app, port=0, http=Protocol, lifespan="off", log_config=None, ws="none")
        server = Server(config)
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        task = asyncio.create_task(server.serve([listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        host, port = uvicorn_compat.bound_address(server)
        assert (host, port) == listener.getsockname()
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"this is not HTTP\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 400")
        writer.close()
        _, idle = await asyncio.open_connection(host, port)
        while not uvicorn_compat.open_connections(server):
            await asyncio.sleep(0.01)
        for connection in uvicorn_compat.open_connections(server):
            connection.transport.abort()
        idle.close()
        server.should_exit = True
        await task
        assert uvicorn_compat.open_connections(server) == []

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert set(calls) == {"capture_signals", "connection_made", "send_400_response", "on_tick"}, ADAPT
