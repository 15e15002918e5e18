"""Processes of jingu that read requests from their parent process as lines of JSON."""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Any


def read_requests() -> Iterator[Any]:
    """Yield the value of each line of standard input. When it is closed, the process ends, even within a request."""
    lines: SimpleQueue[str] = SimpleQueue()
    threading.Thread(target=_listen, args=(lines,), daemon=True).start()
    while True:
        yield json.loads(lines.get())


def _listen(lines: SimpleQueue[str]) -> None:
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


def answer_requests(requests: Iterable[Any], answer: Callable[[Any], dict[str, Any]], brief: type[Exception]) -> None:
    """Write the answer to each request as a line of JSON. The answer to one that fails is {"error": ...}.

    Args:
        brief: errors whose text is enough; others show their traceback.
    """
    # Redirect standard output to standard error, so that nothing a library prints gets between the replies.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for request in requests:
        try:
            reply = answer(request)
        except brief as error:
            reply = {"error": str(error).removesuffix(".")}
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {str(error)[:2_000]}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
