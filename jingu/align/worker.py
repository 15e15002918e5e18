"""Processes of jingu that reply to each line of JSON with another one, such as `jingu.align.reward_worker`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from jingu.align.process_pool import PATIENCE
from jingu.config.sections.rewards import RewardBase
from jingu.errors import JinguError

# Seconds that a worker process may take to start and to import a function.
START_SECONDS = 120.0


def total_seconds(seconds: float, count: int) -> float:
    """Return the longest time that a process may take for `count` items, each with its limit of CPU time."""
    return START_SECONDS + PATIENCE * seconds * count


class Worker:
    """A process that computes rewards. It starts with the first request.

    It ends with `close`, or else when this object is garbage-collected.

    Args:
        module: the Python module to run, which replies to each line of JSON with another one.
    """

    def __init__(self, module: str = "jingu.align.reward_worker") -> None:
        self._module = module
        self._process: subprocess.Popen[str] | None = None
        self._ready: set[str] = set()  # rewards that the process has imported
        self._end: Callable[[], object] = lambda: None

    def ask(
        self,
        name: str,
        settings: RewardBase,
        columns: Sequence[str],
        answers: Sequence[Mapping[str, Any]],
        timeout: float,
    ) -> dict[str, Any]:
        """Return the reply to a request for the scores of answers. If the process ends, by a timeout or by itself, the
        next call starts another.

        Args:
            name: the name of the reward.

        Raises:
            TimeoutError: the reward took longer than `timeout` seconds.
            JinguError: the reward failed.
        """
        key = settings.model_dump_json()
        if answers and key not in self._ready:
            # The timeout is for scoring alone: start the process and import the reward before it begins.
            self.ask(name, settings, columns, [], START_SECONDS)
            self._ready.add(key)
        request = {"settings": settings.model_dump(mode="json"), "columns": columns, "answers": answers}
        reply = self.exchange(request, timeout)
        if self._process is not None and self._process.poll() is not None:
            # Unlike other requests to a process, those for rewards do not depend on earlier ones.
            self.close()
        if "error" in reply:
            raise JinguError(f"{reply['error']}.", where=f"the reward {name}", fix="Correct the reward.")
        return reply

    def check(self, name: str, settings: RewardBase, values: Sequence[Any]) -> list[str]:
        """Return why a verifier cannot compare with a value, for each value; empty if it can. Raises JinguError."""
        self.ask(name, settings, (), [], START_SECONDS)
        request = {"settings": settings.model_dump(mode="json"), "columns": (), "answers": [], "check": values}
        reply = self.exchange(request, total_seconds(settings.timeout, len(values)))
        if "error" in reply:
            raise JinguError(f"{reply['error']}.", where=f"the reward {name}", fix="Correct the reward.")
        return list(reply["problems"])

    def exchange(self, request: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """Send a request and return the reply. After `timeout` seconds, kill the process and raise TimeoutError."""
        process = self._start()
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            _kill(process)

        timer = threading.Timer(timeout, end)
        timer.daemon = True
        timer.start()
        reply = _exchange(process, json.dumps(request) + "\n")
        timer.cancel()
        if is_late.is_set():
            self.close()
            raise TimeoutError
        return reply

    def _start(self) -> subprocess.Popen[str]:
        """Return the process, after starting it if necessary."""
        if self._process is None:
            command = [sys.executable, "-m", self._module]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
            self._end = weakref.finalize(self, _end_process, self._process)
        return self._process

    def close(self) -> None:
        """Kill the process."""
        self._process = None
        self._ready.clear()
        self._end()


# The following functions are finalizers or run in threads: a reference to the worker in one of them would keep the
# worker from ever being garbage-collected.


def _exchange(process: subprocess.Popen[str], line: str) -> dict[str, Any]:
    """Send a line to a worker's process and return its reply."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(line)
        process.stdin.flush()
        return dict(json.loads(process.stdout.readline()))
    except (OSError, ValueError):
        return {"error": f"its process ended with exit code {process.wait()}"}


def _end_process(process: subprocess.Popen[str]) -> None:
    """Kill a worker's process and its children, and wait for it."""
    _kill(process)
    with suppress(OSError), process:
        process.wait()


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
