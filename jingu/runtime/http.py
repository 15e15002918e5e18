"""Requests to HTTP servers, with a deadline for the whole request and without redirects."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

# A larger reply is a mistake, or an attack.
_MAX_BYTES = 256 * 2**20


class StatusError(OSError):
    """A server refused a request.

    Attributes:
        code: the HTTP status.
    """

    def __init__(self, code: int, reason: str, body: bytes) -> None:
        super().__init__(f"HTTP Error {code}: {reason}: {body.decode(errors='replace')[:300]}")
        self.code = code


def post(
    url: str, body: bytes, headers: Mapping[str, str], timeout: float, context: ssl.SSLContext | None = None
) -> bytes:
    """Send a POST request and return the body of the reply.

    A redirect is an error: it would carry the headers, with their key, to another server.

    Args:
        timeout: seconds until the end of the reply.

    Raises:
        TimeoutError: the reply was not complete in time.
        StatusError: the server replied with another status than success.
        OSError: the server cannot be reached.
        HTTPException: the reply is not HTTP, or is too long.
        ValueError: the address is not a URL.
    """
    connection, target, proxy_headers = _connect(url, timeout, context)
    is_late = threading.Event()
    start = time.monotonic()
    try:
        connection.connect()
    except OSError:
        connection.close()
        raise
    # The connection forgets its socket once the headers of some replies are read.
    stream = connection.sock

    def end() -> None:
        is_late.set()
        # The timeout of a socket is for each operation: a server that sends byte after byte would never exceed it.
        with suppress(OSError):
            stream.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(max(timeout - (time.monotonic() - start), 0.0), end)
    timer.daemon = True
    timer.start()
    try:
        connection.request("POST", target, body, {**headers, **proxy_headers})
        reply = connection.getresponse()
        content = _read(reply)
        if is_late.is_set():
            raise TimeoutError("timed out")
    except (OSError, HTTPException):
        if is_late.is_set():
            raise TimeoutError(f"timed out after {timeout:g} seconds") from None
        raise
    finally:
        timer.cancel()
        connection.close()
    if not 200 <= reply.status < 300:
        reason = f"{reply.reason}, a redirect, which is not followed" if 300 <= reply.status < 400 else reply.reason
        raise StatusError(reply.status, reason, content)
    return content


def _read(reply: HTTPResponse) -> bytes:
    content = reply.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise HTTPException(f"the reply is longer than {_MAX_BYTES:,} bytes")
    # With a limit, an incomplete reply raises no exception.
    if reply.length:
        raise HTTPException(f"IncompleteRead: {reply.length:,} bytes are missing")
    return content


def _connect(url: str, timeout: float, context: ssl.SSLContext | None) -> tuple[HTTPConnection, str, dict[str, str]]:
    """Return a connection for a URL, the target of its requests, and further headers.

    The proxy that the environment variables name is used, as by `urllib`.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url} is not an address such as http://HOST:PORT/PATH")
    path = f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}"
    proxy = None if proxy_bypass(parts.netloc) else getproxies().get(parts.scheme)
    if proxy is None:
        host, port = parts.hostname, parts.port
        if parts.scheme == "https":
            return HTTPSConnection(host, port, timeout=timeout, context=context), path, {}
        return HTTPConnection(host, port, timeout=timeout), path, {}
    through = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    if parts.scheme == "https":
        secure = HTTPSConnection(through.hostname or "", through.port, timeout=timeout, context=context)
        secure.set_tunnel(parts.hostname, parts.port)
        return secure, path, {}
    return HTTPConnection(through.hostname or "", through.port, timeout=timeout), url, {"Host": parts.netloc}
