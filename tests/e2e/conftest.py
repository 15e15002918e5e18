"""Run commands in processes of their own that start at once, and write configuration files of tiny runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jingu.config.load import dump_yaml
from jingu.config.schema import RunConfig
from tests.launch.nodes import Nodes, read_stream_until, start_nodes, why_no_nodes


@dataclass(frozen=True)
class CommandResult:
    """The result of a command: its exit code (negative: the signal that killed it) and its output."""

    code: int
    out: str
    err: str


class Warm:
    """A process that has imported jingu and torch, and forks a child for each command (see warm.py)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        root = Path(__file__).parents[2]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(root)}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("warm.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def run(
        self,
        *words: str,
        send: int | None = None,
        at_event: int | None = None,
        under: Path | None = None,
        after: float | None = None,
    ) -> CommandResult:
        """Run `jingu WORDS`.

        Args:
            send: signal to send to the child,
            at_event: when it is about to open, rename, create or remove a file `under` a folder for the n-th time,
            after: or this many seconds after its start, wherever it is then.
        """
        out, err = self._folder / "out.txt", self._folder / "err.txt"
        request = {"words": words, "send": send, "at_event": at_event, "under": str(under), "after": after}
        request |= {"cwd": str(Path.cwd()), "out": str(out), "err": str(err)}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        code = json.loads(self._process.stdout.readline())
        return CommandResult(code, out.read_text(encoding="utf-8"), err.read_text(encoding="utf-8"))

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def read_until(process: subprocess.Popen[str], words: str) -> str:
    """Read what a process writes to stderr until these words are in it; fail if the process ends before."""
    assert process.stderr is not None
    return read_stream_until(process.stderr, words)


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """Run jingu's commands: `warm.run("train", "run.yaml").code`."""
    process = Warm(tmp_path_factory.mktemp("warm"))
    yield process
    process.close()


@pytest.fixture
def run_file(tiny_run: Callable[..., RunConfig], tmp_path: Path) -> Callable[..., str]:
    """Write the file of a tiny run and return its path: `run_file({"train.steps": 3}, name="a")`."""

    def write(changes: dict[str, Any] | None = None, **more: Any) -> str:
        config = tiny_run(changes, **more)
        file = tmp_path / f"{config.name}.yaml"
        file.write_text(dump_yaml(config), encoding="utf-8")
        return str(file)

    return write


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    """Four machines that ssh reaches."""
    reason = why_no_nodes()
    if reason:
        pytest.skip(reason)
    with start_nodes(tmp_path / "nodes", 4) as nodes:
        yield nodes
