"""`jingu serve`: serve a model over HTTP."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from jingu.errors import JinguError
from jingu.infer.distributed import distributed_engine, inference_ranks
from jingu.infer.generate import DEFAULT_INFERENCE, InferenceOptions
from jingu.infer.inference_model import load_chat_model, model_name
from jingu.runtime.device import run_in_thread
from jingu.runtime.files import read_text
from jingu.serve.settings import ServeSettings


@dataclass(frozen=True)
class AccessOptions:
    """Who may use the server.

    Attributes:
        api_key: keys, of which a client must send one.
        api_key_file: a file with a key on each line.
        allow_host: additional host names to which the server answers.
        cors: web origins whose pages may call the server.
    """

    api_key: Sequence[str] = ()
    api_key_file: Path | None = None
    allow_host: Sequence[str] = ()
    cors: Sequence[str] = ()

    def apply(self, settings: ServeSettings) -> ServeSettings:
        """Add keys, host names and origins to settings. Raise JinguError if one of them is not valid."""
        host = settings.host
        if not host:
            raise JinguError("the address is empty.", where="--host", fix="0.0.0.0 listens on all of this machine's.")
        is_loopback = _is_loopback(host)
        if self.allow_host and not is_loopback:
            raise JinguError(
                f"on {host} the server answers to every host name.",
                where="--allow-host",
                fix="Leave it out, or listen on a loopback address behind a proxy.",
            )
        fix = "Write it without port and path, such as example.com."
        _check_all(self.allow_host, r"[^:/\s]+|\[[^/\s]+\]", "a host name", "--allow-host", fix)
        fix = "Write it as browsers do, such as https://example.com."
        _check_all(self.cors, r"\*|https?://[^/\s]+", "an origin", "--cors", fix)
        # Check host names on loopback: otherwise a web page could reach the server through a name of its own that
        # resolves to this machine (DNS rebinding).
        hosts = ("localhost", "127.0.0.1", "[::1]", host, *self.allow_host) if is_loopback else ()
        keys = _api_keys(self.api_key, self.api_key_file)
        return replace(settings, keys=keys, origins=tuple(self.cors), hosts=hosts)


# All options at their defaults.
# Prompts add at most about this much to the time between two tokens of another stream.
MAX_PREFILL_SECONDS = 0.2
_DEFAULT_SETTINGS = ServeSettings()
_DEFAULT_ACCESS = AccessOptions()


def serve(
    model: Path,
    settings: ServeSettings = _DEFAULT_SETTINGS,
    access: AccessOptions = _DEFAULT_ACCESS,
    inference: InferenceOptions = DEFAULT_INFERENCE,
    name: str | None = None,
    adapter: Sequence[str] | None = None,
    template: str | None = None,
) -> None:
    """Serve a model until Ctrl-C or SIGTERM.

    Args:
        model: a run, a step of a run, a Hugging Face folder, a GGUF file or a packaged model.
        name: the name by which clients ask for the model; its own by default.
        adapter: NAME=PATH of adapters that share the model, which clients ask for by name.
        template: name or file of the chat template; the model's own by default.

    Raises:
        JinguError: the model or the settings cannot be used.
    """
    try:
        from jingu.serve.server import bind_socket, run_server
        from jingu.serve.service import PLACEHOLDER_MODELS
    except ImportError as error:
        raise JinguError(
            f"the server needs a package that is missing ({error.name}).",
            fix="Install it: `pip install 'jingu[serve]'`.",
        ) from error
    settings = access.apply(settings)
    name = name or model_name(model)
    adapters = _adapters(adapter or (), {name, *PLACEHOLDER_MODELS})
    with inference_ranks(inference.device) as ranks, ExitStack() as stack:
        listener = None
        if ranks is None or ranks.is_first:
            # Bind before the model is loaded, which takes long, so that errors of the address appear immediately.
            listener = stack.enter_context(bind_socket(settings.host, settings.port))
        if ranks is None:
            inference = inference.use_int4_blocks(model)
        load = partial(inference.load, model, ranks, adapters, settings.runtime_adapters, allow_rewards=True)
        chat_model, chat_format = run_in_thread(lambda: load_chat_model(load, model, template))
        own_engine = run_in_thread(
            lambda: inference.make_engine(chat_model, settings.max_num_seqs, None, MAX_PREFILL_SECONDS)
        )
        with distributed_engine(own_engine, ranks) as engine:
            if engine is not None and listener is not None:
                run_server(engine, settings, name, chat_format, listener)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_all(values: Sequence[str], pattern: str, kind: str, where: str, fix: str) -> None:
    """Raise JinguError unless all values match the pattern."""
    for value in values:
        if not re.fullmatch(pattern, value):
            raise JinguError(f"{value} is not {kind}.", where=where, fix=fix)


def _api_keys(keys: Sequence[str], file: Path | None) -> tuple[str, ...]:
    """Return the API keys, including those of the file. Raise JinguError if one is empty or the file has none."""
    stripped_keys = [key.strip() for key in keys]
    if not all(stripped_keys):
        raise JinguError("an API key is empty.", where="--api-key", fix="Leave it out to require no key.")
    if file is None:
        return tuple(stripped_keys)
    from_file = [line.strip() for line in read_text(file).split("\n") if line.strip()]
    if not from_file:
        raise JinguError("the file has no API key.", where=file, fix="Write a key on each line.")
    return (*stripped_keys, *from_file)


def _adapters(assignments: Sequence[str], reserved_names: set[str]) -> dict[str, Path]:
    """Return the paths of adapters by name. Raise JinguError for a malformed or repeated assignment."""
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
