"""Settings of the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ServeSettings:
    """Settings of the server.

    Attributes:
        host: address to listen on.
        port: port to listen on; 0 selects a free one.
        max_num_seqs: maximum number of sequences that are generated at a time.
        max_concurrent_requests: maximum number of unfinished requests. One for several answers counts as several.
        max_connections: maximum number of open connections, beyond which the idle ones are closed; by default as many
            as the process may have open files.
        timeout: seconds after which a request fails.
        grace: seconds for requests in progress to finish once the server is asked to stop.
        patience: seconds to wait for a client that does not send or does not read.
        body_bytes: maximum size of a request's body.
        keys: API keys, one of which a client must send; if empty, no key is required.
        origins: web origins whose pages may call the server (CORS).
        hosts: host names to which the server answers; if empty, it answers to all.
        log_prompts: whether the log contains the text of prompts.
        runtime_adapters: whether clients may load and unload adapters.
        pooling: an embedding is the mean of the hidden states ("mean"), or the last token's ("last").
    """

    host: str = "127.0.0.1"
    port: int = 8000
    max_num_seqs: int = 64
    max_concurrent_requests: int = 128
    max_connections: int | None = None
    timeout: float = 600.0
    grace: float = 30.0
    patience: float = 60.0
    body_bytes: int = 2_000_000
    keys: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    log_prompts: bool = False
    runtime_adapters: bool = False
    pooling: Literal["mean", "last"] = "mean"
