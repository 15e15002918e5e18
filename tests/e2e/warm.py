"""A script that imports jingu and torch, and forks a child for each command that it receives as a line of JSON.

A child starts at once, and can be killed like any other process. `Warm` in conftest.py is the other end.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from typing import Any


def serve() -> None:
    """Answer each request with the exit code of its child, until the input ends."""
    import jingu.training.commands
    from jingu.cli import main
    from jingu.training import session

    assert jingu.training.commands.train is not None
    assert threading.active_count() == 1  # a fork has only the thread that forked
    session.measure_peak_flops = lambda *_: 1e9  # measuring takes longer than a tiny run
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            os._exit(_run(request, main))
        if request["after"] is not None:
            time.sleep(request["after"])
            os.kill(child, request["send"])  # if it has exited, it is still a zombie
        _, status = os.waitpid(child, 0)
        print(json.dumps(os.waitstatus_to_exitcode(status)), flush=True)


def _run(request: dict[str, Any], main: Any) -> int:
    os.chdir(request["cwd"])
    for descriptor, name in ((1, request["out"]), (2, request["err"])):
        os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), descriptor)
    if request["at_event"] is not None:
        _send_at_event(request)
    return exit_code(main, request["words"])


def exit_code(main: Any, words: list[str]) -> int:
    """Return the exit code of a command, whose output is written completely."""
    try:
        code = int(main(words))
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _send_at_event(request: dict[str, Any]) -> None:
    remaining = request["at_event"]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal remaining
        touches = event in ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove")
        if touches and str(arguments[0]).startswith(request["under"]):
            remaining -= 1
            if remaining == 0:
                os.kill(os.getpid(), request["send"])

    sys.addaudithook(hook)


if __name__ == "__main__":
    serve()
