"""`jingu serve`: a model behind HTTP."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from jingu.errors import JinguError
from jingu.infer.load import name_of
from jingu.infer.lockstep import in_lockstep, ranks_of
from jingu.infer.verbs import Compute
from jingu.runtime.device import aside
from jingu.tune.speak import speaking


def serve(
    model: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str | None = None,
    adapter: Sequence[str] | None = None,
    template: str | None = None,
    api_key: Sequence[str] | None = None,
    api_key_file: Path | None = None,
    max_batch: int = 64,
    queue: int = 128,
    timeout: float = 600.0,
    grace: float = 30.0,
    allow_host: Sequence[str] | None = None,
    cors: Sequence[str] | None = None,
    pooling: Literal["mean", "last"] = "mean",
    log_prompts: bool = False,
    **compute: Any,
) -> None:
    """Serve a model until Ctrl-C or SIGTERM.

    Args:
        model: a run, a step of a run, a Hugging Face folder, a GGUF file or a packaged model.
        host: address to listen on; others than this machine's own can be reached from elsewhere.
        name: by which clients ask for the model; its own where not given.
        adapter: NAME=PATH of adapters beside it, which clients ask for by these names.
        template: for conversations, where the model has none or another is wanted.
        api_key_file: a key a line.
        compute: as of `jingu.infer.verbs.Compute`.

    Raises:
        JinguError: what is wrong with the model or the settings.
    """
    try:
        from jingu.serve.server import bound, run
        from jingu.serve.service import PLACEHOLDERS, ServeSettings
    except ImportError as error:
        raise JinguError(
            f"a package is missing that the server needs ({error.name}).",
            fix="Install it: `pip install 'jingu[serve]'`.",
        ) from error
    if not host:
        raise JinguError("an address is missing.", where="--host", fix="0.0.0.0 listens on all of this machine's.")
    loopback = _is_loopback(host)
    if allow_host and not loopback:
        raise JinguError(
            f"on {host} the server answers to every name.",
            where="--allow-host",
            fix="Leave it out; or listen on this machine alone, and let a proxy reach it there.",
        )
    settings = ServeSettings(
        host=host,
        port=port,
        queue=queue,
        timeout=timeout,
        grace=grace,
        keys=_keys(api_key or (), api_key_file),
        origins=_origins(cors or ()),
        # A page of another site could else reach the server by a name that leads to this machine.
        hosts=("localhost", "127.0.0.1", "[::1]", host, *_names(allow_host or ())) if loopback else (),
        log_prompts=log_prompts,
        pooling=pooling,
    )
    how, name = Compute(**compute), name or name_of(model)
    adapters = _adapters(adapter or (), {name, *PLACEHOLDERS})
    with ranks_of(how.device) as ranks, ExitStack() as stack:
        # Before the model is loaded, which takes its time.
        listener = stack.enter_context(bound(host, port)) if ranks is None or ranks.is_first else None
        loaded, speech = aside(lambda: speaking(lambda: how.load(model, ranks, adapters), model, template))
        with in_lockstep(aside(lambda: how.engine(loaded, max_batch)), ranks) as engine:
            if engine is not None and listener is not None:
                run(engine, settings, name, speech, listener)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _origins(given: Sequence[str]) -> tuple[str, ...]:
    for each in given:
        if each != "*" and not re.fullmatch(r"https?://[^/\s]+", each):
            what = f"{each} is not an origin."
            raise JinguError(what, where="--cors", fix="Write it as browsers do, such as https://example.com.")
    return tuple(given)


def _names(given: Sequence[str]) -> tuple[str, ...]:
    for each in given:
        if not re.fullmatch(r"[^:/\s]+|\[[^/\s]+\]", each):
            what = f"{each} is not a name."
            raise JinguError(what, where="--allow-host", fix="Write it without a port or a path, such as example.com.")
    return tuple(given)


def _keys(given: Sequence[str], file: Path | None) -> tuple[str, ...]:
    keys = [key.strip() for key in given]
    if not all(keys):
        raise JinguError("an API key is empty.", where="--api-key", fix="Give one, or leave it out: nobody is asked.")
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").split("\n")
        except (OSError, ValueError) as error:
            raise JinguError(f"the file of API keys cannot be read ({error}).", where=file) from error
        keys += filter(None, map(str.strip, lines))
        if len(keys) == len(given):
            raise JinguError("the file of API keys has none.", where=file, fix="Write a key a line.")
    return tuple(keys)


def _adapters(given: Sequence[str], taken: set[str]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for words in given:
        name, _, path = words.partition("=")
        if not name or not path:
            raise JinguError(f"{words} does not say an adapter.", where="--adapter", fix="Write NAME=PATH.")
        if name in found or name in taken:
            what = f"{name} is already what clients call another model here."
            raise JinguError(what, where="--adapter", fix="Give this one another name.")
        found[name] = Path(path).expanduser()
    return found
