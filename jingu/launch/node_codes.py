"""The exit codes of the nodes of a Slurm job, in files of a folder that the nodes share.

srun ends all tasks when one fails, and its own exit code does not tell which one was the cause.
`python -m jingu.launch.node_codes FOLDER CODE` prints the exit code of the job and when it is started again.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from jingu.runtime.exit_codes import combine_exit_codes, find_restart
from jingu.runtime.files import write_text_atomically

# The environment variable that names the folder.
CODES_VARIABLE = "JINGU_CODES"


class NodeCodes:
    """The files of one node: `RANK.started` and, once it has ended, `RANK.code`."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self.ready = folder / "ready"
        self._write("started", "")

    def announce(self) -> None:
        """Say that the store of the first node listens."""
        self.ready.touch()

    def finish(self, code: int) -> None:
        """Record the exit code of the node."""
        self._write("code", str(code))

    def _write(self, suffix: str, text: str) -> None:
        # A full disk must not end a run; the node then looks lost.
        with suppress(OSError):
            write_text_atomically(self._folder / f"{self._rank}.{suffix}", text)


def read_code(folder: Path, code: int) -> int:
    """Return the exit code of a job.

    Args:
        folder: with the files of its nodes. A node that has started, and has no code, was lost.
        code: exit code of srun, which counts if no node has started.
    """
    starts = {path.stem for path in folder.glob("*.started")}
    codes = {path.stem: int(path.read_text(encoding="utf-8")) for path in folder.glob("*.code")}
    if not starts:
        return code
    return combine_exit_codes(codes.values(), is_node_lost=bool(starts - codes.keys()))


def main(words: Sequence[str]) -> None:
    code = read_code(Path(words[0]), int(words[1]))
    print(code, find_restart(code).name.lower())


if __name__ == "__main__":
    main(sys.argv[1:])
