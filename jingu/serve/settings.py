"""How a model is served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ServeSettings:
    """How a model is served.

    Attributes:
        host: address to listen on.
        port: port to listen on; 0 picks a free one.
        max_num_seqs: most sequences that are generated at a time.
        max_concurrent_requests: most unfinished requests.
        timeout: seconds that a request may take.
        grace: seconds that requests in progress may take once the server is asked to stop.
        patience: seconds to wait for a client that does not send or does not read.
        body_bytes: most bytes of a request's body.
        keys: API keys, of which a client must send one; empty: no key is required.
        origins: web origins whose pages may call the server (CORS).
        hosts: host names to which the server answers; empty: any.
        log_prompts: whether the log contains the text of prompts.
        runtime_adapters: whether clients may load and unload adapters.
        pooling: which hidden states an embedding is made of: their mean, or the last token's.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    max_num_seqs: int = 64
    max_concurrent_requests: int = 128
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
