"""From an engine to a server that answers."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable

from jingu.infer.load import Loaded
from jingu.serve.app import create
from jingu.serve.driver import Driver, Steps
from jingu.serve.gate import log_to_stderr
from jingu.serve.metrics import Metrics
from jingu.serve.server import Server
from jingu.serve.service import ServeSettings, Service
from jingu.tune.speak import Speech


def make(
    engine: Steps,
    loaded: Loaded,
    settings: ServeSettings,
    name: str,
    adapters: tuple[str, ...] = (),
    speech: Speech | None = None,
    on_start: Callable[[str], None] = lambda _: None,
) -> Server:
    """A server, not started yet."""
    metrics = Metrics(name)
    driver = Driver(engine, settings.queue, metrics.ended)
    service = Service(loaded, driver, settings, metrics, name, adapters, speech)
    return Server(create(service), driver, settings, on_start)


def run(
    engine: Steps,
    loaded: Loaded,
    settings: ServeSettings,
    name: str,
    adapters: tuple[str, ...],
    speech: Speech | None,
    listener: socket.socket,
) -> None:
    """Serve until a signal asks to stop. Raises RuntimeError where the engine fails and cannot go on."""

    def tell(address: str) -> None:
        print(f"{name} answers at {address}", flush=True)
        if not settings.hosts and not settings.keys:
            print("Whoever reaches this address can use it: no API key is asked for.", file=sys.stderr, flush=True)

    log_to_stderr()
    server = make(engine, loaded, settings, name, adapters, speech, tell)
    server.run([listener])
    if server.driver.broken is not None:
        raise RuntimeError("the engine failed and could not go on, so the server has ended") from server.driver.broken
