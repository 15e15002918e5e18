"""A rank as the watchdog of its node sees it: the process, its slot, and the report of its stacks."""

from __future__ import annotations

import json
import mmap
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jingu.watch.diagnosis import RankReport
from jingu.watch.slot import BEAT, OPERATION, descendants, process_seconds, process_state
from jingu.watch.stacks import find_blocked_stack, read_stacks

# The reporter thread of a rank runs twice a second; if it has not run for this long, a call holds the GIL.
_SILENT_SECONDS = 5.0
# More than a launcher records for the ranks of a node.
_EXITS_BYTES = 2**16


@dataclass
class LocalRank:
    """A rank of this node: its process, and its mapped slot."""

    process: dict[str, Any]
    path: Path
    slot: mmap.mmap
    # A descriptor of the launcher's record of exits, which stays readable when the launcher has ended.
    exits: int | None = None

    @staticmethod
    def open(path: Path) -> LocalRank:
        """Open a rank by the description of its process."""
        process = json.loads(path.read_text(encoding="utf-8"))
        slot = path.with_suffix(".slot")
        exits = None
        with suppress(OSError):
            exits = os.open(process["exits"], os.O_RDONLY)
        with slot.open("r+b") as file:
            return LocalRank(process, slot, mmap.mmap(file.fileno(), 0), exits)

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

    def exit_code(self) -> int | None:
        """Return the exit code of the process, as its launcher has recorded it; None if it is not known."""
        if self.exits is None:
            return None
        words = [line.split() for line in os.pread(self.exits, _EXITS_BYTES, 0).decode().splitlines()]
        return next((int(code) for pid, code in words if int(pid) == self.process["pid"]), None)

    def work(self) -> tuple[float, int]:
        """Return the CPU seconds of the process and its descendants, and the bytes that they have read and written."""
        seconds, size = 0.0, 0
        for pid in descendants(self.process["pid"]):
            seconds += process_seconds(pid)
            with suppress(OSError, ValueError):
                lines = Path(f"/proc/{pid}/io").read_text(encoding="utf-8").splitlines()
                size += sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))
        return seconds, size

    def is_responsive(self) -> bool:
        """Return whether the reporter thread of the rank runs."""
        return self.process_state() not in ("", "T", "t") and not self._is_silent()

    def _is_silent(self) -> bool:
        (beat,) = BEAT.unpack_from(self.slot, OPERATION.size)
        return time.monotonic() - beat > _SILENT_SECONDS

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
        if state == "running" and self._is_silent():
            state = "silent"
        groups = {}
        with suppress(OSError, ValueError):
            groups = json.loads(self.path.with_suffix(".calls").read_text(encoding="utf-8"))
        stack = find_blocked_stack(read_stacks(self.stacks()), self.process["thread"], phase)
        rank, host = self.process["rank"], self.process["host"]
        seconds = now - change_time
        code = self.exit_code() if state == "dead" else None
        return RankReport(rank, host, state, phase, step, micro_batch, peer, seconds, groups, stack, exit_code=code)

    def stacks(self) -> str:
        """Return the dumps of the stacks of all threads."""
        with suppress(OSError):
            return self.path.with_suffix(".stack").read_text(encoding="utf-8", errors="replace")
        return ""
