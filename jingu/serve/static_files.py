"""The chat page: files in the package that load nothing except from the server's own API."""

from __future__ import annotations

from importlib.resources import files
from typing import NamedTuple

MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
SECURITY_HEADERS = {
    # Nothing from other sites, nothing inline, and no text that becomes markup: what a model writes stays text.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "Cache-Control": "no-cache",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class StaticFile(NamedTuple):
    """One file of the page."""

    content: bytes
    media_type: str


def load_static_files() -> dict[str, StaticFile]:
    """Return the page's files by URL path: `/chat`, and those that it loads."""
    static_files = {}
    for file in files("jingu.serve").joinpath("page").iterdir():
        path = "/chat" if file.name == "index.html" else f"/chat/{file.name}"
        suffix = file.name.rpartition(".")[2]
        static_files[path] = StaticFile(file.read_bytes(), f"{MEDIA_TYPES[suffix]}; charset=utf-8")
    return static_files
