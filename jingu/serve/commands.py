"""`jingu serve`: a model behind HTTP."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from jingu.errors import JinguError
from jingu.infer.distributed import distributed_engine, inference_ranks
from jingu.infer.generate import InferenceOptions
from jingu.infer.inference_model import load_chat_model, model_name
from jingu.runtime.device import run_in_thread

# Options that are fields of `ServeSettings` under the same name.
_SETTINGS = ("host", "port", "max_concurrent_requests", "timeout", "grace", "pooling", "log_prompts")


def serve(
    model: Path,
    *,
    name: str | None = None,
    adapter: Sequence[str] | None = None,
    template: str | None = None,
    api_key: Sequence[str] | None = None,
    api_key_file: Path | None = None,
    allow_host: Sequence[str] | None = None,
    cors: Sequence[str] | None = None,
    **options: Any,
) -> None:
    """Serve a model until Ctrl-C or SIGTERM.

    Args:
        model: a run, a step of a run, a Hugging Face folder, a GGUF file or a packaged model.
        name: the name by which clients ask for the model; its own by default.
        adapter: NAME=PATH of adapters that share the model, which clients ask for by name.
        template: name or file of the chat template; the model's own by default.
        api_key_file: a file with an API key on each line.
        allow_host: further host names to which the server answers.
        cors: web origins whose pages may call the server.
        options: fields of `ServeSettings` (host, port, max_concurrent_requests, timeout, grace, pooling, log_prompts),
            the most sequences that run at a time (max_num_seqs), and fields of
            `jingu.infer.generate.InferenceOptions`.

    Raises:
        JinguError: the model or the settings cannot be used.
    """
    try:
        from jingu.serve.server import bind_socket, run_server
        from jingu.serve.service import PLACEHOLDER_MODELS, ServeSettings
    except ImportError as error:
        raise JinguError(
            f"the server needs a package that is missing ({error.name}).",
            fix="Install it: `pip install 'jingu[serve]'`.",
        ) from error
    # What remains of `options` are those of inference.
    settings = {key: options.pop(key) for key in _SETTINGS if key in options}
    max_num_seqs = options.pop("max_num_seqs", 64)
    inference = InferenceOptions(**options)
    host = settings.setdefault("host", ServeSettings.host)
    if not host:
        raise JinguError("the address is empty.", where="--host", fix="0.0.0.0 listens on all of this machine's.")
    is_loopback = _is_loopback(host)
    if allow_host and not is_loopback:
        raise JinguError(
            f"on {host} the server answers to every host name.",
            where="--allow-host",
            fix="Leave it out, or listen on a loopback address behind a proxy.",
        )
    fix = "Write it without port and path, such as example.com."
    names = _check_all(allow_host, r"[^:/\s]+|\[[^/\s]+\]", "a host name", "--allow-host", fix)
    # Otherwise a web page could reach the server through a name that resolves to this machine (DNS rebinding).
    hosts = ("localhost", "127.0.0.1", "[::1]", host, *names) if is_loopback else ()
    fix = "Write it as browsers do, such as https://example.com."
    origins = _check_all(cors, r"\*|https?://[^/\s]+", "an origin", "--cors", fix)
    keys = _api_keys(api_key or (), api_key_file)
    serve_settings = ServeSettings(keys=keys, origins=origins, hosts=hosts, **settings)
    name = name or model_name(model)
    adapters = _adapters(adapter or (), {name, *PLACEHOLDER_MODELS})
    with inference_ranks(inference.device) as ranks, ExitStack() as stack:
        # Bind first: loading the model takes long.
        listener = (
            stack.enter_context(bind_socket(host, serve_settings.port)) if ranks is None or ranks.is_first else None
        )
        chat_model, chat_format = run_in_thread(
            lambda: load_chat_model(lambda: inference.load(model, ranks, adapters), model, template)
        )
        own_engine = run_in_thread(lambda: inference.make_engine(chat_model, max_num_seqs))
        with distributed_engine(own_engine, ranks) as engine:
            if engine is not None and listener is not None:
                run_server(engine, serve_settings, name, chat_format, listener)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_all(values: Sequence[str] | None, pattern: str, kind: str, where: str, fix: str) -> tuple[str, ...]:
    """Return the values if all match the pattern. Raises JinguError."""
    for value in values or ():
        if not re.fullmatch(pattern, value):
            raise JinguError(f"{value} is not {kind}.", where=where, fix=fix)
    return tuple(values or ())


def _api_keys(keys: Sequence[str], file: Path | None) -> tuple[str, ...]:
    """Return the API keys, with those of the file. Raises JinguError."""
    stripped = [key.strip() for key in keys]
    if not all(stripped):
        raise JinguError("an API key is empty.", where="--api-key", fix="Leave it out to require no key.")
    if file is None:
        return tuple(stripped)
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise JinguError(f"the file of API keys cannot be read ({error}).", where=file) from error
    from_file = [line.strip() for line in lines if line.strip()]
    if not from_file:
        raise JinguError("the file has no API key.", where=file, fix="Write a key on each line.")
    return (*stripped, *from_file)


def _adapters(assignments: Sequence[str], reserved_names: set[str]) -> dict[str, Path]:
    """Return the paths of adapters by name. Raises JinguError."""
    adapters: dict[str, Path] = {}
    for assignment in assignments:
        name, _, path = assignment.partition("=")
        if not name or not path:
            raise JinguError(f"{assignment} does not name an adapter.", where="--adapter", fix="Write NAME=PATH.")
        if name in adapters or name in reserved_names:
            raise JinguError(
                f"{name} is already the name of another model here.",
                where="--adapter",
                fix="Give this adapter another name.",
            )
        adapters[name] = Path(path).expanduser()
    return adapters
