"""Undocumented parts of uvicorn: the class of a connection, and the sockets and connections of a running server."""

from __future__ import annotations

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

# The class of a connection. `conn` is the HTTP/1.1 parser (h11), `transport` the asyncio transport, `loop` the event
# loop, `connections` all connections of the server.
HttpProtocol = H11Protocol

# Methods of `uvicorn.Server` that jingu overrides.
SERVER_HOOKS = ("startup", "capture_signals", "handle_exit", "on_tick", "shutdown")
# Methods of `HttpProtocol` that jingu overrides.
PROTOCOL_HOOKS = (
    *("connection_made", "connection_lost", "data_received", "pause_writing", "resume_writing"),
    "send_400_response",
)


def bound_address(server: uvicorn.Server) -> tuple[str, int]:
    """Return the host and the port that a started server listens on."""
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    return str(host), int(port)


def open_connections(server: uvicorn.Server) -> list[HttpProtocol]:
    """Return the open connections of a server's clients."""
    return [connection for connection in server.server_state.connections if isinstance(connection, HttpProtocol)]
