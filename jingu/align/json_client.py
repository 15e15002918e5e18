"""Requests to servers that answer in JSON, with retries."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from jingu.errors import JinguError, pluralize
from jingu.runtime.files import read_text
from jingu.runtime.http import StatusError, post

T = TypeVar("T")
# Client errors (4xx) that are worth a retry: request timeout, conflict, too early, too many requests.
_TEMPORARY = (408, 409, 425, 429)


@dataclass(frozen=True)
class JsonClient:
    """Sends JSON to a server.

    Attributes:
        where: the setting that names the server.
        timeout: seconds that a request may take until the end of its reply.
        retries: further attempts after a failure.
        api_key_file: file with the key to send as a bearer token; None sends no key.
    """

    where: str
    timeout: float
    retries: int
    api_key_file: str | None = None

    def headers(self) -> dict[str, str]:
        """Return the headers of a request. Raises JinguError if the key cannot be read."""
        headers = {"Content-Type": "application/json"}
        if self.api_key_file is not None:
            headers["Authorization"] = f"Bearer {read_text(Path(self.api_key_file)).strip()}"
        return headers

    def post(self, url: str, body: object, read: Callable[[bytes], T], what: str) -> T:
        """Send a request, with retries, and return the reply as parsed by `read`.

        Args:
            read: parses the reply; it raises ValueError, LookupError, TypeError, AttributeError or OverflowError for an
                invalid one.
            what: the noun for the expected reply, in the error message.

        Raises:
            JinguError: no attempt succeeded.
        """
        content, headers = json.dumps(body).encode(), self.headers()
        for attempt in range(1 + self.retries):
            # Wait 0, 1, 3, 7 seconds and so on.
            time.sleep(min(2.0**attempt - 1.0, 30.0))
            try:
                return read(post(url, content, headers, self.timeout))
            except StatusError as error:
                failure = str(error)
                if error.code < 500 and error.code not in _TEMPORARY:
                    break
            except (
                OSError,
                HTTPException,
                ValueError,
                LookupError,
                TypeError,
                AttributeError,
                OverflowError,  # an integer beyond float64
                RecursionError,
            ) as error:
                failure = f"{type(error).__name__}: {error}"
        raise JinguError(
            f"{url} gave no {what} in {pluralize(attempt + 1, 'attempt')} ({failure}).",
            where=self.where,
            fix="Start or correct the server, or raise timeout or retries; the run resumes from its checkpoint.",
        )


def check_url(url: str, where: str) -> None:
    """Raise JinguError if a URL has no valid host and port, or contains a space.

    Args:
        where: the setting that has it.
    """
    try:
        parts = urlsplit(url)
        # There is no place for a user name in the URL.
        is_valid = bool(parts.hostname) and parts.port != 0 and "@" not in parts.netloc
    except ValueError:  # such as a port that is not a number up to 65,535
        is_valid = False
    if not is_valid or re.search(r"[\x00-\x20\x7f]", url):
        fix = "Write it as http://HOST:PORT/PATH, with %20 for a space."
        raise JinguError(f"{url!r} is not a valid URL.", where=where, fix=fix)


def parse_reply(content: bytes) -> Any:
    """Return the value of a reply."""
    return json.loads(content)
