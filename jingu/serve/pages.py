"""The chat page: files that the package carries, which fetch nothing but the server's own API."""

from __future__ import annotations

from importlib.resources import files
from typing import NamedTuple

TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
HEADERS = {
    # Nothing from elsewhere, nothing inline, and no text that becomes markup: what a model writes stays text.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "Cache-Control": "no-cache",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Page(NamedTuple):
    """One file of the page."""

    content: bytes
    media_type: str


def pages() -> dict[str, Page]:
    """The files by the path that a server answers them at: `/chat`, and those that it asks for."""
    found = {}
    for item in files("jingu.serve").joinpath("page").iterdir():
        path = "/chat" if item.name == "index.html" else f"/chat/{item.name}"
        found[path] = Page(item.read_bytes(), f"{TYPES[item.name.rpartition('.')[2]]}; charset=utf-8")
    return found
