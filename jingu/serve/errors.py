"""Failures of requests, and how each protocol tells them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jingu.errors import JinguError

_FIELDS = {
    "/v1/chat/completions": {"prompt": "messages", "constraint": "response_format"},
    "/v1/completions": {"prompt_logprobs": "echo"},
}
_OTHER_FIELDS = {"prompt": "inputs", "constraint": "grammar", "prompt_logprobs": "decoder_input_details"}
"""What clients call fields of `jingu.infer.request.Request`, by path; and elsewhere, text-generation-inference's."""


class ServeError(Exception):
    """A request that fails with a status of HTTP.

    Args:
        status: of the answer; 400 becomes 422 where text-generation-inference's protocol says so.
        message: for the client.
        kind: one of text-generation-inference's: validation, overloaded, generation, incomplete_generation.
        field: of the request, that is to blame.
        headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        field: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind or ("validation" if status < 500 else "generation")
        self.field = field
        self.headers = dict(headers or {})


def invalid(message: str, field: str | None = None) -> ServeError:
    """What a client asks for is not possible."""
    return ServeError(400, message, field=field)


def as_serve_error(error: Exception, path: str) -> ServeError:
    """Any failure as one that can be told to who asked at a path; what is in unexpected ones stays in the log."""
    if isinstance(error, ServeError):
        return error
    if isinstance(error, JinguError):
        named = _FIELDS.get(path, _OTHER_FIELDS)
        field = None if error.where is None else named.get(str(error.where), str(error.where))
        return ServeError(400, str(JinguError(error.what, where=field, fix=error.fix)), field=field)
    return ServeError(500, "the server failed on this; its log tells more", kind="generation")


def told(error: ServeError, path: str) -> tuple[int, dict[str, Any]]:
    """Status and JSON of a failure, in the shape of the protocol that a path belongs to."""
    if not path.startswith("/v1/"):
        status = 422 if error.status == 400 and error.kind == "validation" else error.status
        return status, {"error": error.message, "error_type": error.kind}
    types = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = types.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    codes = {401: "invalid_api_key", 404: "model_not_found" if error.field == "model" else "not_found"}
    shown = {"message": error.message, "type": kind, "param": error.field, "code": codes.get(error.status)}
    return error.status, {"error": shown}
