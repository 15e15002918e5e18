"""Errors of requests, and their JSON in each protocol."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from jingu.errors import JinguError
from jingu.tables import read_table

_FIELD_NAMES = read_table(__file__, "field_names.toml")
_VLLM_PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
_VLLM_TYPES = {400: "InvalidUserInput", 404: "NotFoundError"}
_OPENAI_CODES = {401: "invalid_api_key", 404: "not_found"}
_OPENAI_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that fails with an HTTP status.

    Args:
        status: HTTP status of the response. In text-generation-inference's protocol, 400 becomes 422 for validation.
        message: message for the client.
        kind: text-generation-inference's error type: validation, overloaded, generation, incomplete_generation or
            authentication.
        field: the field of the request that is at fault.
        headers: additional headers of the response.
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


def bad_request(message: str, field: str | None = None) -> ApiError:
    """Return the error for a request that cannot be fulfilled as it is."""
    return ApiError(400, message, field=field)


def to_api_error(error: Exception, path: str) -> ApiError:
    """Convert any exception to one that a client of `path` may see. The message of an unexpected one is not shown."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, JinguError):
        # The error names the engine's field; clients need the protocol's name of it.
        names = _FIELD_NAMES.get(path, _FIELD_NAMES["text-generation-inference"])
        field = None if error.where is None else names.get(str(error.where), str(error.where))
        return ApiError(400, str(JinguError(error.what, where=field, fix=error.fix)), field=field)
    return ApiError(500, "internal server error; the server's log has the details", kind="generation")


def error_body(error: ApiError, path: str) -> tuple[int, dict[str, Any]]:
    """Return status and JSON of an error, in the form of the protocol to which `path` belongs."""
    # 1. Ollama.
    if path.startswith("/api/"):
        return error.status, {"error": error.message}
    # 2. text-generation-inference.
    if not path.startswith("/v1/"):
        status = 422 if error.status == 400 and error.kind == "validation" else error.status
        return status, {"error": error.message, "error_type": error.kind}
    # 3. vLLM's routes for adapters.
    if path in _VLLM_PATHS:
        kind = _VLLM_TYPES.get(error.status, HTTPStatus(error.status).phrase)
        return error.status, {"error": {"message": error.message, "type": kind, "param": None, "code": error.status}}
    # 4. Anthropic and OpenAI.
    fallback = "invalid_request_error" if error.status < 500 else "server_error"
    kind = _OPENAI_TYPES.get(error.status, fallback)
    if path.startswith("/v1/messages"):
        kind = "api_error" if error.status >= 500 else kind
        return error.status, {"type": "error", "error": {"type": kind, "message": error.message}}
    code = _OPENAI_CODES.get(error.status)
    if error.status == 404 and error.field == "model":
        code = "model_not_found"
    details = {"message": error.message, "type": kind, "param": error.field, "code": code}
    return error.status, {"error": details}
