"""The chat page: static files of the package, which use nothing but this server."""

from __future__ import annotations

from importlib.resources import files

from starlette.responses import Response

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
