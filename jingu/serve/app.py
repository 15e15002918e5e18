"""The application: both protocols behind the gate, and how failures are told."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, RedirectResponse, Response
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.middleware.cors import CORSMiddleware

from jingu import __version__
from jingu.errors import JinguError
from jingu.serve import chat, openai, tgi
from jingu.serve.answers import failure
from jingu.serve.errors import ServeError
from jingu.serve.gate import Gate
from jingu.serve.pages import HEADERS, Page, pages
from jingu.serve.service import Served, Service

_TYPE = re.compile(r"^(str|bool)$|\[|^[A-Z]")
"""What pydantic puts among the names of fields: a type of several that a field may have."""
_PROBLEM = {"content": {"application/json": {"schema": {"type": "object", "required": ["error"]}}}}
_FAILURES: dict[int | str, dict[str, Any]] = {
    status: {"description": words, **_PROBLEM}
    for status, words in {
        400: "the request is not right",
        401: "an API key is needed",
        403: "not called by this name",
        404: "there is no such model",
        408: "the body came too slowly",
        413: "the body is too large",
        422: "the request is not right",
        429: "the server is busy; Retry-After tells when to try again",
        503: "the server is stopping",
        504: "the request took too long",
    }.items()
}


def create(service: Service) -> FastAPI:
    """The application that serves a model; its engine starts and stops with it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.driver.start()
        yield
        await service.driver.stop()

    # The library's pages of documentation fetch scripts from elsewhere, so there are none; /openapi.json is.
    app = FastAPI(title="jingu", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None,
                  responses=_FAILURES)  # fmt: skip
    app.state.service = service
    for part in (tgi, openai, chat):
        app.include_router(part.router)
    app.add_api_route("/metrics", _metrics, tags=["metrics"], response_class=PlainTextResponse)
    app.add_route("/", lambda _: RedirectResponse("/chat"))
    for path, page in pages().items():
        app.add_route(path, partial(_page, page))
    for kind in (ServeError, JinguError, StarletteHTTPException, RequestValidationError):
        app.add_exception_handler(kind, _failed)
    app.add_middleware(Gate, settings=service.settings)
    if service.settings.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=service.settings.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
        )
    return app


async def _page(page: Page, _: HttpRequest) -> Response:
    return Response(page.content, media_type=page.media_type, headers=HEADERS)


async def _metrics(service: Served) -> Response:
    """Numbers for Prometheus."""
    service.driver.check_open(0)
    stats = await service.driver.call(service.driver.engine.stats)
    return Response(service.metrics.page(stats), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _failed(request: HttpRequest, error: Exception) -> Response:
    if isinstance(error, StarletteHTTPException):
        words = {404: "there is nothing at this address", 405: "this address is not called with this method"}
        message = words.get(error.status_code, str(error.detail))
        error = ServeError(error.status_code, message, headers=error.headers)
    elif isinstance(error, RequestValidationError):
        error = _not_valid(error.errors(), request.headers.get("content-type", ""))
    return failure(error, request.url.path)


def _not_valid(errors: Sequence[Any], kind: str) -> ServeError:
    """What pydantic found first, without the value: it may be text that no log should have."""
    if errors[0]["type"] == "json_invalid":
        return ServeError(400, f"the body is not JSON that is taken here ({errors[0]['ctx']['error']})")
    if "json" not in kind:
        return ServeError(400, "send the body with Content-Type: application/json")
    # Of a field that may be of several types, every type has its complaint: what got furthest was meant.
    same = [each for each in errors if each["loc"][:2] == errors[0]["loc"][:2]]
    found = max(same, key=lambda each: (len(each["loc"]), not each["type"].endswith("_type")))
    place = ".".join(str(each) for each in found["loc"][1:] if not _TYPE.search(str(each)))
    words = "there is no such field" if found["type"] == "extra_forbidden" else found["msg"]
    shown = f"{f'`{place}`' if place else 'the body'}: {words}"
    return ServeError(400, shown, field=place.partition(".")[0] or None)
