"""The slot of a rank: the layout of the mapped file with its current activity.

This module does not import torch, to keep the watchdog process small.
"""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from pathlib import Path

# Number of changes, phase, step, micro-batch, peer, and the time of the last change (the machine's monotonic clock).
OPERATION = struct.Struct("=q16sqqqd")
# Time at which the rank's thread last ran.
BEAT = struct.Struct("=d")
# Offset of the byte with the watchdog's command to the rank, and the commands.
COMMAND = OPERATION.size + BEAT.size
LISTEN, REPORT, EXIT = range(3)
# The rank's pipeline stage.
STAGE = struct.Struct("=q")
STAGE_OFFSET = COMMAND + 1
# Statistics of reading data: number of reads, their total seconds, and the sum of their squared seconds.
READS = struct.Struct("=qdd")
READS_OFFSET = STAGE_OFFSET + STAGE.size
SLOT_BYTES = READS_OFFSET + READS.size

# Phases of a rank, and their names in messages.
PHASES = {
    "": "start",
    "rollout": "rollouts",
    "log-probs": "log-probabilities of the answers",
    "reference": "log-probabilities of the reference",
    "teacher": "log-probabilities of the teacher",
    "critic": "the critic's step",
    "data": "read data",
    "micro-batch": "forward and backward",
    "receive": "receive of hidden states",
    "send": "send of hidden states",
    "gradients": "reduction of gradients",
    "optimizer": "optimizer step",
    "between steps": "work between steps",
    "evaluate": "evaluation",
    "save": "save",
    "failed": "error",
}
# Phases that may take arbitrarily long without being a hang.
UNTIMED_PHASES = ("", "evaluate", "save")


def process_state(pid: int, start_time: int) -> str:
    """Return the state of a process as the kernel names it (R, S, D, T, ...); empty if it has exited.

    Args:
        start_time: start time of the process, to recognize that another process has the same pid now.
    """
    fields = _stat(pid)
    if not fields or int(fields[19]) != start_time or fields[0] == "Z":
        return ""
    return fields[0]


def start_time(pid: int) -> int:
    """Return the start time of a process, in clock ticks since boot."""
    return int(_stat(pid)[19])


def process_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and of its children that have ended."""
    fields = _stat(pid)
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def descendants(pid: int) -> list[int]:
    """Return a process and all processes that descend from it, except this one."""
    pids = [pid]
    for parent in pids:
        for path in Path(f"/proc/{parent}/task").glob("*/children"):
            with suppress(OSError):
                pids += [int(word) for word in path.read_text(encoding="utf-8").split() if int(word) != os.getpid()]
    return pids


def _stat(pid: int) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    # The name of the command, in parentheses, may hold spaces.
    return text.rpartition(")")[2].split()
