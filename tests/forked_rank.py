"""Ranks that the launcher starts, as forks of one process that has imported jingu and torch: they start at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from jingu.runtime.signals import LAUNCHER_PIPE
from tests.e2e.warm import exit_code
from tests.rank_pool import fork_context


class ForkedRank:
    """In place of `subprocess.Popen` in the launcher: `python -m jingu WORDS` without the seconds of its imports.

    The rank is a real process with its own environment, process group, signals and inherited descriptors. Tests of
    `tests/e2e` start ranks as the product does.
    """

    def __init__(
        self,
        command: list[str],
        *,
        env: dict[str, str],
        process_group: int,
        stdout: Any = None,
        stderr: Any = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        assert command[:3] == [sys.executable, "-m", "jingu"] and process_group == 0
        descriptors = [file.fileno() if file else default for file, default in ((stdout, 1), (stderr, 2))]
        # A connection is the one thing that multiprocessing passes to a process together with its descriptor.
        outputs = [Connection(os.dup(descriptor), readable=False) for descriptor in descriptors]
        inherited = {number: Connection(os.dup(number), writable=False) for number in pass_fds}
        self._process = fork_context().Process(target=_run, args=(command[3:], env, Path.cwd(), outputs, inherited))
        self._process.start()
        for connection in (*outputs, *inherited.values()):
            connection.close()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self._process.is_alive() and self._process.pid is not None:
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()


@contextmanager
def fork_ranks() -> Iterator[None]:
    """Have the launcher of this process start forks."""
    with patch("jingu.runtime.launcher.subprocess", SimpleNamespace(Popen=ForkedRank)):
        yield


def _run(
    words: list[str],
    environment: dict[str, str],
    folder: Path,
    outputs: list[Connection],
    inherited: dict[int, Connection],
) -> None:
    os.setpgid(0, 0)
    # Inherited descriptors have other numbers here.
    numbers = {str(number): str(connection.fileno()) for number, connection in inherited.items()}
    files = {f"/dev/fd/{number}": f"/dev/fd/{own_number}" for number, own_number in numbers.items()}
    words = [files.get(word, word) for word in words]
    environment[LAUNCHER_PIPE] = numbers[environment[LAUNCHER_PIPE]]
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for descriptor, output in zip((1, 2), outputs, strict=True):
        os.dup2(output.fileno(), descriptor)
    from jingu.cli import main

    os._exit(exit_code(main, words))
