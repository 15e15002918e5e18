"""A rank as the watchdog of its node sees it: the process, its slot, and the report of its stacks."""

from __future__ import annotations

import json
import mmap
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jingu.watch.diagnosis import RankReport
from jingu.watch.slot import BEAT, OPERATION, process_state

# The reporter thread of a rank runs twice a second; if it has not run for this long, a call holds the GIL.
_SILENT_SECONDS = 5.0


@dataclass
class LocalRank:
    """A rank of this node: its process, and its mapped slot."""

    process: dict[str, Any]
    path: Path
    slot: mmap.mmap

    @property
    def operation(self) -> tuple[int, str, int, int, int, float]:
        """Number of changes, phase, step, micro-batch, peer, time of the last change."""
        changes, phase, *numbers = OPERATION.unpack_from(self.slot, 0)
        return (changes, phase.rstrip(b"\0").decode(), *numbers)

    def is_finished(self) -> bool:
        """Return whether the rank has finished without an error."""
        return not self.path.with_suffix(".json").exists()

    def process_state(self) -> str:
        """Return the state of the process as the kernel names it; empty if it has exited."""
        return process_state(self.process["pid"], self.process["start_time"])

    def is_stopped(self) -> bool:
        """Return whether a signal or a debugger has stopped the process."""
        return self.process_state() in ("T", "t")

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the rank's process, if it is still the same."""
        if self.process_state():
            with suppress(ProcessLookupError):
                os.kill(self.process["pid"], number)

    def report(self) -> RankReport:
        """Return a report about the rank, from its slot and the files that it has written."""
        _, phase, step, micro_batch, peer, change_time = self.operation
        now = time.monotonic()
        states = {"": "dead", "T": "stopped", "t": "stopped", "D": "disk"}
        state = states.get(self.process_state(), "running")
        (beat,) = BEAT.unpack_from(self.slot, OPERATION.size)
        if state == "running" and now - beat > _SILENT_SECONDS:
            state = "silent"
        groups = {}
        with suppress(OSError, ValueError):
            groups = json.loads(self.path.with_suffix(".calls").read_text(encoding="utf-8"))
        text = self.path.with_suffix(".stack").read_text(encoding="utf-8", errors="replace")
        stack = list(read_stack(text, self.process["thread"]))
        rank = self.process["rank"]
        host = self.process["host"]
        return RankReport(rank, host, state, phase, step, micro_batch, peer, now - change_time, groups, stack)


def read_stack(text: str, thread: str) -> Iterator[str]:
    """Yield the stack of a thread from the newest of faulthandler's dumps, the innermost function first.

    Args:
        text: the dumps.
        thread: identifier of the thread in hexadecimal.
    """
    _, heading, latest = text.rpartition(f"hread 0x{thread} ")
    for line in latest.splitlines()[1:] if heading else ():
        match = re.match(r'  File "(.*)", line (\d+) in (.*)', line)
        if match is None:
            return
        # Shorten the path to its last three parts.
        yield f"{'/'.join(match[1].split('/')[-3:])}:{match[2]} {match[3]}"
