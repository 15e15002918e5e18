"""The connection of `jingu launch ssh` to a node: an ssh client that carries requests, signals and output."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from jingu.errors import JinguError
from jingu.launch.hosts import Node
from jingu.launch.node import HANDSHAKE
from jingu.runtime.exit_codes import EXIT_LOST

# Time for ssh to connect.
CONNECT_SECONDS = 6
# The exit code of ssh if it fails itself or the remote program was killed.
SSH_FAILURE = 255
SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}")


class NodeConnection:
    """A node process on another machine, and the ssh client that is connected to it.

    Attributes:
        description: how the node described itself; empty until then.
        answer_event: set when the node has described itself, or its process has ended.
        is_listening: set when the node says that its store listens.

    Args:
        command: shell command to run on the node.
        options: further options of ssh.
    """

    def __init__(self, node: Node, command: str, options: Sequence[str]) -> None:
        self.node = node
        self.description: dict[str, Any] = {}
        self._lines: list[str] = []
        self._replies: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.answer_event = threading.Event()
        self.is_listening = threading.Event()
        self._is_announced = False
        # In its own process group: Ctrl-C must not kill the ssh client, but reach the node as a signal that is sent.
        self.process = subprocess.Popen(
            ["ssh", *SSH_OPTIONS, "-o", "ServerAliveInterval=15", *options, node.host, command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        """Print the node's output with its name. Output before its description is kept for an error message."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            before, mark, text = line.partition(HANDSHAKE)
            # What a login shell prints first may lack the end of its line.
            if not mark or (before and self.description):
                if self.description:
                    print(f"{self.node.host}: {line}", end="", file=sys.stderr, flush=True)
                else:
                    self._lines.append(line.strip())
                continue
            message = json.loads(text)
            if not self.description:
                self.description = message
                self.answer_event.set()
            elif "listening" in message:
                self.is_listening.set()
            else:
                self._replies.put(message)
        self.answer_event.set()

    def describe_failure(self) -> JinguError:
        """Return an error about a node that has not described itself, with the reason that ssh or its shell gave."""
        code = self.process.poll()
        lines = [line for line in self._lines if line] if code is not None else []
        reason = lines[-1] if lines else "it does not answer"
        what = f"jingu does not start there ({reason.rstrip('.')})."
        fix = "Every node needs this folder, and this Python with jingu, under the same paths."
        if code in (SSH_FAILURE, None):
            what = f"the host cannot be reached by ssh ({reason.rstrip('.')})."
            fix = f"`ssh {self.node.host} true` must work without a password; or leave it out with --exclude."
        return JinguError(what, where=self.node.host, fix=fix)

    def send(self, line: str) -> None:
        """Send a line to the node, unless it has ended."""
        assert self.process.stdin is not None
        with suppress(OSError, ValueError):
            self.process.stdin.write(f"{line}\n")
            self.process.stdin.flush()

    def receive(self, seconds: float) -> dict[str, Any]:
        """Return the next reply to a request; empty if it does not come in time."""
        with suppress(queue.Empty):
            return self._replies.get(timeout=seconds)
        return {}

    @property
    def is_lost(self) -> bool:
        """Whether the connection has ended, or the node process was killed, so that it has no exit code."""
        code = self.process.poll()
        return code is not None and (code == SSH_FAILURE or code < 0)

    def exit_code(self) -> int | None:
        """Return the exit code of the node; None while it runs. A lost node is announced once."""
        if self.is_lost and not self._is_announced:
            self._is_announced = True
            text = "the connection has ended, or the node process was killed; its ranks stop."
            print(f"jingu: {self.node.host}: {text}", file=sys.stderr, flush=True)
        return EXIT_LOST if self.is_lost else self.process.poll()

    def release(self) -> None:
        """Close the node's input, so that it stops its ranks and exits."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()

    def close(self, deadline: float) -> None:
        """Wait until the node process has exited, at most until a time of the monotonic clock, and end ssh."""
        self.release()
        if self.description:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(max(0.0, deadline - time.monotonic()))
        self.process.kill()
        self.process.wait()
        self._reader.join()
