"""The FastAPI application: all protocols behind the access middleware, and the exception handlers."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, RedirectResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.middleware.cors import CORSMiddleware

from jingu.errors import JinguError
from jingu.serve import anthropic_messages, mathml, ollama, openai, openai_chat, openai_responses, tgi, vllm_scores
from jingu.serve.http_errors import ApiError
from jingu.serve.middleware import AccessMiddleware
from jingu.serve.responses import error_response
from jingu.serve.service import Service, ServiceDependency
from jingu.version import __version__

# In the location of an error in a union, pydantic also lists the member type that it tried. This matches such a type.
_TYPE_NAME = re.compile(r"^(constrained-)?(str|bool|int|float)$|\[|^[A-Z]")
_ERROR_CONTENT = {"application/json": {"schema": {"type": "object", "required": ["error"]}}}
_ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"description": HTTPStatus(status).phrase, "content": _ERROR_CONTENT}
    for status in (400, 401, 403, 404, 408, 413, 422, 429, 503, 504)
}


def create_app(service: Service) -> FastAPI:
    """Return the application that serves a model. It starts and stops the engine."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.engine.start()
        yield
        await service.engine.stop()

    app = FastAPI(
        title="jingu",
        version=__version__,
        lifespan=lifespan,
        # FastAPI's documentation pages load scripts from other sites. /openapi.json is still served.
        docs_url=None,
        redoc_url=None,
        responses=_ERROR_RESPONSES,
    )
    app.state.service = service
    for protocol in (tgi, openai, openai_chat, openai_responses, anthropic_messages, ollama, vllm_scores, mathml):
        app.include_router(protocol.router)
    app.include_router(vllm_scores.unversioned_router)
    app.add_api_route("/metrics", _metrics, tags=["metrics"], response_class=PlainTextResponse)
    app.add_route("/", lambda _: RedirectResponse("/chat"))
    for path, response in load_static_files().items():
        app.add_route(path, partial(_send_file, response))
    for error_type in (ApiError, JinguError, StarletteHTTPException, RequestValidationError, ValidationError):
        app.add_exception_handler(error_type, _handle_error)
    app.add_middleware(AccessMiddleware, settings=service.settings)
    if service.settings.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=service.settings.origins,
            allow_methods=["GET", "POST"],
            # Clients send additional headers, such as x-stainless-* of OpenAI's library.
            allow_headers=["*"],
            # A page on the internet may call a server in the browser's own network if its origin is allowed.
            allow_private_network=True,
            expose_headers=["x-request-id", "request-id"],
        )
    return app


async def _send_file(response: Response, _: HttpRequest) -> Response:
    return response


async def _metrics(service: ServiceDependency) -> Response:
    """Metrics for Prometheus."""
    service.engine.check_available(0)
    stats = await service.engine.call(service.engine.engine.stats)
    return Response(service.metrics.export(stats), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _handle_error(request: HttpRequest, error: Exception) -> Response:
    if isinstance(error, StarletteHTTPException):
        messages = {404: "no such path", 405: "this path does not support the method"}
        message = messages.get(error.status_code, str(error.detail))
        error = ApiError(error.status_code, message, headers=error.headers)
    elif isinstance(error, RequestValidationError):
        error = _describe_validation_errors(error.errors(), request.headers.get("content-type", ""))
    elif isinstance(error, ValidationError):
        # A value that one protocol permits and the one to which its requests are converted does not.
        errors = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
        error = _describe_validation_errors(errors, "application/json")
    return error_response(error, request.url.path)


def _describe_validation_errors(errors: Sequence[Any], content_type: str) -> ApiError:
    """Return pydantic's first error without the value, which may be private text that must not be logged."""
    if errors[0]["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON ({errors[0]['ctx']['error']})")
    if "json" not in content_type:
        return ApiError(400, "send the body with Content-Type: application/json")
    # A union field has an error for each of its types. The type whose error is deepest was probably meant.
    same_field = [error for error in errors if error["loc"][:2] == errors[0]["loc"][:2]]
    error = max(same_field, key=lambda error: (len(error["loc"]), not error["type"].endswith("_type")))
    path = ".".join(str(name) for name in error["loc"][1:] if not _TYPE_NAME.search(str(name)))
    text = "unknown field" if error["type"] == "extra_forbidden" else error["msg"]
    subject = f"`{path}`" if path else "the body"
    return ApiError(400, f"{subject}: {text}", field=path.partition(".")[0] or None)


# The chat page: static files of the package, which use nothing but this server.

MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
SECURITY_HEADERS = {
    # Nothing from other sites and nothing inline; and model output can never become markup.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "Cache-Control": "no-cache",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def load_static_files() -> dict[str, Response]:
    """Return the responses of the page and of the files that it loads, by URL path; the page itself is `/chat`."""
    responses = {}
    for file in files("jingu.serve").joinpath("page").iterdir():
        path = "/chat" if file.name == "index.html" else f"/chat/{file.name}"
        media_type = MEDIA_TYPES[file.name.rpartition(".")[2]]
        responses[path] = Response(file.read_bytes(), media_type=media_type, headers=SECURITY_HEADERS)
    return responses
